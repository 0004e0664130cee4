/* mok_trace_save, and what the writers share. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "layout/trace.h"
#include "trace/write.h"

static const struct { const char *name, *group; } kinds[] = {
#define KIND(kind, group, what) {#kind, group},
    MOK_TRACE_KIND_LIST(KIND)
#undef KIND
};
static const char *const roles[] = {
#define ROLE(lane) #lane,
    MK_TRACE_LANE_LIST(ROLE)
#undef ROLE
};

const char *mok_trace_kind_name(int32_t kind) { return kind >= 0 && kind < MOK_NUM_TRACE_KINDS ? kinds[kind].name : "unknown"; }
const char *mok_trace_kind_group(int32_t kind) { return kind >= 0 && kind < MOK_NUM_TRACE_KINDS ? kinds[kind].group : "unknown"; }

const char *mk_trace_role_name(int32_t lane, bool lanes)
{
    if (!lanes)
        return "worker";
    return lane >= 0 && lane < MK_NUM_TRACE_LANES ? roles[lane] : "other";
}

void mk_trace_lane_name(const mok_trace_event *e, bool lanes, char *text, size_t bytes)
{
    if (lanes)
        snprintf(text, bytes, "SM %d %s", e->sm, mk_trace_role_name(e->lane, lanes));
    else
        snprintf(text, bytes, "worker %d", e->track);
}

bool mk_trace_has_lanes(const mok_trace_event *events, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (events[i].lane)
            return true;
    return false;
}

mk_trace_span mk_trace_span_of(const mok_trace_event *events, int64_t count)
{
    mk_trace_span s = {count ? events[0].begin_ns : 0, 0};
    for (int64_t i = 0; i < count; i++) {
        s.begin = events[i].begin_ns < s.begin ? events[i].begin_ns : s.begin;
        s.end = events[i].end_ns > s.end ? events[i].end_ns : s.end;
    }
    return s;
}

static int by_lane(const void *a, const void *b)
{
    const mok_trace_event *x = a, *y = b;
    if (x->rank != y->rank)
        return x->rank - y->rank;
    if (x->track != y->track)
        return x->track - y->track;
    if (x->lane != y->lane)
        return x->lane - y->lane;
    return x->begin_ns < y->begin_ns ? -1 : x->begin_ns > y->begin_ns;
}

mok_trace_event *mk_trace_by_lane(const mok_trace_event *events, int64_t count)
{
    mok_trace_event *sorted = malloc(sizeof *sorted * (size_t)(count ? count : 1));
    if (sorted && count) {
        memcpy(sorted, events, sizeof *sorted * (size_t)count);
        qsort(sorted, (size_t)count, sizeof *sorted, by_lane);
    }
    return sorted;
}

mok_status mok_trace_save(const mok_trace_event *events, int64_t count, mok_trace_format format, const char *path)
{
    if (!path || (!events && count) || count < 0)
        return mk_fail(MOK_E_ARG, "%s", !path ? "path is NULL" : count < 0 ? "count is negative" : "events is NULL");
    if (format < MOK_TRACE_CHROME || format > MOK_TRACE_TEXT)
        return mk_fail(MOK_E_ARG, "format is %d: it must be MOK_TRACE_CHROME, _SVG or _TEXT", (int)format);
    for (int64_t i = 0; i < count; i++)
        if (events[i].end_ns < events[i].begin_ns)
            return mk_fail(MOK_E_ARG, "event %lld ends before it begins", (long long)i);
    bool printed = !strcmp(path, "-");
    const char *name = printed ? "standard output" : path;
    FILE *to = printed ? stdout : fopen(path, "w");
    if (!to)
        return mk_fail(MOK_E_ENV, "cannot write %.300s: %s", name, strerror(errno));
    bool memory = format == MOK_TRACE_CHROME ? mk_trace_write_chrome(to, events, count)
                  : format == MOK_TRACE_SVG ? mk_trace_write_svg(to, events, count) : mk_trace_write_text(to, events, count);
    bool written = !ferror(to);
    written &= (printed ? fflush(to) : fclose(to)) == 0;
    if (!memory)
        return mk_fail(MOK_E_MEMORY, "no memory to sort %lld events", (long long)count);
    return written ? MOK_OK : mk_fail(MOK_E_ENV, "cannot write %.300s: %s", name, strerror(errno));
}
