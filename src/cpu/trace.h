/* The cpu backend's hooks for traces (layout/trace.h). Off, a hook is one compare. */
#ifndef MK_CPU_TRACE_H
#define MK_CPU_TRACE_H

#include <time.h>

#include "backend/backend.h"

static inline uint64_t mk_cpu_trace_time(const mok_workspace *w)
{
    struct timespec t;
    if (!w->trace.memory)
        return 0;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* What `worker` did since `begin`; event's other fields are the caller's. Returns the end: the begin of what follows at once. */
static inline uint64_t mk_cpu_trace(const mok_workspace *w, int32_t worker, uint64_t begin, mk_trace_event event)
{
    if (!w->trace.memory)
        return 0;
    mk_trace_head *ring = mk_trace_ring(&w->trace, worker, 0);
    event.begin_ns = begin;
    event.end_ns = mk_cpu_trace_time(w);
    event.sm = (uint16_t)worker;
    *mk_trace_event_at(ring, w->trace.capacity - 1, ring->count) = event;
    ring->count++;
    return event.end_ns;
}

/* Things that belong to no tile. */
static inline uint64_t mk_cpu_trace_plain(const mok_workspace *w, int32_t worker, uint64_t begin, mk_trace_kind kind, int32_t part)
{
    return mk_cpu_trace(w, worker, begin, (mk_trace_event){.kind = (uint8_t)kind, .tile = -1, .part = (uint16_t)part});
}

#endif
