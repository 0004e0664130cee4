/* Writers of traces: pure functions from events to a stream. */
#ifndef MK_TRACE_WRITE_H
#define MK_TRACE_WRITE_H

#include <stdio.h>

#include "mok.h"

/* The time that all events of a list lie in. */
typedef struct mk_trace_span { uint64_t begin, end; } mk_trace_span;
mk_trace_span mk_trace_span_of(const mok_trace_event *events, int64_t count);

/* Events in the order of rank, track, lane, begin: a lane is a run of neighbours. NULL: no memory. */
mok_trace_event *mk_trace_by_lane(const mok_trace_event *events, int64_t count);
static inline bool mk_trace_same_lane(const mok_trace_event *a, const mok_trace_event *b)
{
    return a->rank == b->rank && a->track == b->track && a->lane == b->lane;
}

/* "SM 17 math0", "worker 3". lanes: whether the trace has lanes, that is, is of a GPU. */
void mk_trace_lane_name(const mok_trace_event *event, bool lanes, char *text, size_t bytes);
const char *mk_trace_role_name(int32_t lane, bool lanes);
bool mk_trace_has_lanes(const mok_trace_event *events, int64_t count);

bool mk_trace_write_chrome(FILE *to, const mok_trace_event *events, int64_t count);
bool mk_trace_write_svg(FILE *to, const mok_trace_event *events, int64_t count);
bool mk_trace_write_text(FILE *to, const mok_trace_event *events, int64_t count);

#endif
