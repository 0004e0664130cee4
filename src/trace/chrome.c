/* The trace-event format that chrome://tracing and ui.perfetto.dev read: complete events ("X"), times in microseconds. */
#include <stdlib.h>

#include "trace/write.h"

enum { LANES_OF_TRACK = 16 };

static void name_thread(FILE *to, const mok_trace_event *e, bool lanes)
{
    char name[64];
    mk_trace_lane_name(e, lanes, name, sizeof name);
    fprintf(to, ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}}", e->rank, e->track * LANES_OF_TRACK + e->lane, name);
}

static void write_event(FILE *to, const mok_trace_event *e, uint64_t start)
{
    fprintf(to, ",\n{\"name\":\"%s%s\",\"cat\":\"%s\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,\"tid\":%d,\"args\":{\"tile\":%d,\"part\":%d,\"link_bytes\":%llu}}",
            e->shared ? "shared " : "", mok_trace_kind_name(e->kind), mok_trace_kind_group(e->kind), 1e-3 * (double)(e->begin_ns - start),
            1e-3 * (double)(e->end_ns - e->begin_ns), e->rank, e->track * LANES_OF_TRACK + e->lane, e->tile, e->part, (unsigned long long)e->link_bytes);
}

bool mk_trace_write_chrome(FILE *to, const mok_trace_event *events, int64_t count)
{
    mok_trace_event *sorted = mk_trace_by_lane(events, count);
    uint64_t start = mk_trace_span_of(events, count).begin;
    bool lanes = mk_trace_has_lanes(events, count);
    if (!sorted)
        return false;
    fprintf(to, "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n{\"name\":\"trace\",\"ph\":\"M\",\"pid\":0,\"args\":{\"version\":\"%s\"}}", mok_version());
    for (int64_t i = 0; i < count; i++) {
        const mok_trace_event *e = &sorted[i];
        if (i == 0 || e->rank != e[-1].rank)
            fprintf(to, ",\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}}", e->rank, e->rank);
        if (i == 0 || !mk_trace_same_lane(e, e - 1))
            name_thread(to, e, lanes);
        write_event(to, e, start);
    }
    fprintf(to, "\n]}\n");
    free(sorted);
    return true;
}
