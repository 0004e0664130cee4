/* A trace in words: for each role, the share of its lanes' time that every kind takes; the longest waits; bytes over the link as time goes by. */
#include <stdlib.h>
#include <string.h>

#include "layout/trace.h"
#include "trace/write.h"

enum { LONGEST = 5, BINS = 20, BAR = 40 };

typedef struct totals { double ns; int64_t count; uint64_t longest; } totals;

static bool is_wait(int32_t kind)
{
    const char *group = mok_trace_kind_group(kind);
    return !strcmp(group, "wait") || !strcmp(group, "barrier");
}

/* One role of one rank. */
static void write_role(FILE *to, const mok_trace_event *sorted, int64_t first, int64_t end, int32_t role, double span_ns, bool lanes)
{
    totals kinds[MOK_NUM_TRACE_KINDS];
    int64_t num_lanes = 0, last = -1;
    double busy = 0;
    memset(kinds, 0, sizeof kinds);
    for (int64_t i = first; i < end; i++) {
        const mok_trace_event *e = &sorted[i];
        if (e->lane != role || e->kind < 0 || e->kind >= MOK_NUM_TRACE_KINDS)
            continue;
        num_lanes += last < 0 || !mk_trace_same_lane(e, &sorted[last]);
        last = i;
        uint64_t ns = e->end_ns - e->begin_ns;
        totals *k = &kinds[e->kind];
        k->ns += (double)ns;
        k->count++;
        k->longest = ns > k->longest ? ns : k->longest;
        busy += (double)ns;
    }
    if (!num_lanes)
        return;
    fprintf(to, "  %-9s %5lld lanes    %-16s %10s %9s %9s %9s\n", mk_trace_role_name(role, lanes), (long long)num_lanes, "", "events", "share", "mean us", "max us");
    for (int k = 0; k < MOK_NUM_TRACE_KINDS; k++)
        if (kinds[k].count && k != MOK_TRACE_call)
            fprintf(to, "%27s%-16s %10lld %8.1f%% %9.2f %9.2f\n", "", mok_trace_kind_name(k), (long long)kinds[k].count,
                    100 * kinds[k].ns / (span_ns * (double)num_lanes), 1e-3 * kinds[k].ns / (double)kinds[k].count, 1e-3 * (double)kinds[k].longest);
    fprintf(to, "%27s%-16s %10s %8.1f%%\n", "", "(nothing)", "", 100 - 100 * busy / (span_ns * (double)num_lanes));
}

static void write_waits(FILE *to, const mok_trace_event *events, int64_t count, uint64_t start, bool lanes)
{
    const mok_trace_event *longest[LONGEST] = {NULL};
    for (int64_t i = 0; i < count; i++) {
        const mok_trace_event *e = &events[i];
        for (int p = 0; e && is_wait(e->kind) && p < LONGEST; p++)
            if (!longest[p] || e->end_ns - e->begin_ns > longest[p]->end_ns - longest[p]->begin_ns) {
                const mok_trace_event *moved = longest[p];
                longest[p] = e;
                e = moved;
            }
    }
    fprintf(to, "\nlongest waits\n");
    for (int p = 0; p < LONGEST && longest[p]; p++) {
        const mok_trace_event *e = longest[p];
        char lane[64], tile[32] = "";
        mk_trace_lane_name(e, lanes, lane, sizeof lane);
        if (e->tile >= 0)
            snprintf(tile, sizeof tile, " of tile %d", e->tile);
        fprintf(to, "  %9.2f us  %s%s, rank %d, %s, from %.2f us\n", 1e-3 * (double)(e->end_ns - e->begin_ns), mok_trace_kind_name(e->kind), tile, e->rank, lane,
                1e-3 * (double)(e->begin_ns - start));
    }
}

/* Bytes of an event spread over its time. */
static void write_links(FILE *to, const mok_trace_event *events, int64_t count, mk_trace_span span)
{
    double bins[BINS] = {0}, most = 0, width = (double)(span.end - span.begin) / BINS, all = 0;
    for (int64_t i = 0; i < count; i++) {
        const mok_trace_event *e = &events[i];
        double from = (double)(e->begin_ns - span.begin), to_ns = (double)(e->end_ns - span.begin), ns = to_ns - from;
        all += (double)e->link_bytes;
        for (int b = (int)(from / width); e->link_bytes && b < BINS && (b * width < to_ns || b == (int)(from / width)); b++) {
            double begin = b * width > from ? b * width : from, end = (b + 1) * width < to_ns ? (b + 1) * width : to_ns;
            bins[b] += (double)e->link_bytes * (ns > 0 ? (end - begin) / ns : 1);
        }
    }
    for (int b = 0; b < BINS; b++)
        most = bins[b] > most ? bins[b] : most;
    if (all == 0) {
        fprintf(to, "\nnothing crossed between ranks\n");
        return;
    }
    fprintf(to, "\nbetween ranks, in and out of these: %.3f MB, %.2f GB/s in the mean; over time (GB/s)\n", 1e-6 * all, all / (double)(span.end - span.begin));
    for (int b = 0; b < BINS; b++)
        fprintf(to, "  %9.2f us %8.2f  %.*s\n", 1e-3 * b * width, bins[b] / width, (int)(BAR * bins[b] / most + 0.5),
                "########################################");
}

bool mk_trace_write_text(FILE *to, const mok_trace_event *events, int64_t count)
{
    mok_trace_event *sorted = mk_trace_by_lane(events, count);
    bool lanes = mk_trace_has_lanes(events, count);
    if (!sorted)
        return false;
    if (!count)
        fprintf(to, "no events\n");
    for (int64_t first = 0, end; first < count; first = end) {
        for (end = first; end < count && sorted[end].rank == sorted[first].rank; end++) {
        }
        mk_trace_span span = mk_trace_span_of(sorted + first, end - first);
        double ns = span.end > span.begin ? (double)(span.end - span.begin) : 1;
        fprintf(to, "%srank %d: %.2f us, %lld events\n", first ? "\n" : "", sorted[first].rank, 1e-3 * ns, (long long)(end - first));
        for (int32_t role = 0; role < MK_NUM_TRACE_LANES; role++)
            write_role(to, sorted, first, end, role, ns, lanes);
    }
    if (count) {
        mk_trace_span span = mk_trace_span_of(events, count);
        span.end = span.end > span.begin ? span.end : span.begin + 1;
        write_waits(to, events, count, span.begin, lanes);
        write_links(to, events, count, span);
    }
    free(sorted);
    return true;
}
