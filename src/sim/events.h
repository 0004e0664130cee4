/* The simulator's queue: what happens next. A binary heap; events of equal time come out in the order they went in. */
#ifndef MK_SIM_EVENTS_H
#define MK_SIM_EVENTS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct sim_event { double time; int64_t order; int32_t actor; } sim_event;
typedef struct sim_events { sim_event *heap; int64_t count, capacity, pushed; bool failed; } sim_events;

static inline bool sim_event_before(const sim_event *a, const sim_event *b) { return a->time < b->time || (a->time == b->time && a->order < b->order); }

static inline void sim_events_push(sim_events *q, double time, int32_t actor)
{
    if (q->count == q->capacity) {
        int64_t capacity = q->capacity ? 2 * q->capacity : 1024;
        sim_event *heap = realloc(q->heap, sizeof *heap * (size_t)capacity);
        if (!heap) {
            q->failed = true;
            return;
        }
        q->heap = heap;
        q->capacity = capacity;
    }
    sim_event e = {time, q->pushed++, actor};
    int64_t i = q->count++;
    for (; i > 0 && sim_event_before(&e, &q->heap[(i - 1) / 2]); i = (i - 1) / 2)
        q->heap[i] = q->heap[(i - 1) / 2];
    q->heap[i] = e;
}

static inline bool sim_events_pop(sim_events *q, sim_event *out)
{
    if (q->count == 0)
        return false;
    *out = q->heap[0];
    sim_event e = q->heap[--q->count];
    int64_t i = 0;
    for (;;) {
        int64_t child = 2 * i + 1;
        if (child >= q->count)
            break;
        child += child + 1 < q->count && sim_event_before(&q->heap[child + 1], &q->heap[child]);
        if (!sim_event_before(&q->heap[child], &e))
            break;
        q->heap[i] = q->heap[child];
        i = child;
    }
    q->heap[i] = e;
    return true;
}

#endif
