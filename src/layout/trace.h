/* Traces: what every role of every CTA (cuda), or every worker (cpu), did and when. Plain C for gcc, g++ and nvcc.
 *
 * A lane is a role's own line in the picture. Each lane keeps its youngest `capacity` events in a ring that only its one thread writes, so
 * that nothing is shared; the host reads when the work is done.
 *
 *   memory   [tracks][lanes] rings, each one mk_trace_head and `capacity` events; event number n lies at n mod capacity */
#ifndef MK_LAYOUT_TRACE_H
#define MK_LAYOUT_TRACE_H

#include "layout/walk.h"
#include "mok.h"

/* The kinds of mok.h. Events of one lane never overlap. */
typedef enum mk_trace_kind {
#define MK_TRACE_ENUM(kind, group, what) MK_TRACE_##kind,
    MOK_TRACE_KIND_LIST(MK_TRACE_ENUM)
#undef MK_TRACE_ENUM
    MK_NUM_TRACE_KINDS
} mk_trace_kind;

/* Lanes of a CTA; the cpu backend's workers have only the first. */
#define MK_TRACE_LANE_LIST(X) X(main) X(dispatch) X(wait) X(load) X(math0) X(math1)
typedef enum mk_trace_lane {
#define MK_TRACE_ENUM(lane) MK_TRACE_LANE_##lane,
    MK_TRACE_LANE_LIST(MK_TRACE_ENUM)
#undef MK_TRACE_ENUM
    MK_NUM_TRACE_LANES
} mk_trace_lane;

typedef struct mk_trace_event {
    uint64_t begin_ns, end_ns;   /* of the machine's clock: globaltimer, CLOCK_MONOTONIC */
    int32_t tile;                /* table tile; tile of the shared expert; piece of a weight gradient; -1: none */
    uint32_t link_bytes;         /* moved between ranks; of a push (mk_trace_is_push): of one row, and whoever reads multiplies by the tile's peer rows */
    uint16_t part, sm;           /* task of the tile; where it ran */
    uint8_t kind, lane;          /* mk_trace_kind, mk_trace_lane */
    uint8_t shared;              /* of the shared expert */
    uint8_t peer_rows;           /* s1_dispatch: rows of other ranks' tokens, pulled or copied; their results are pushed back */
} mk_trace_event;

typedef struct mk_trace_head {
    uint32_t count;              /* events recorded so far */
    uint32_t reserved[7];
} mk_trace_head;

typedef struct mk_trace {
    char *memory;                /* NULL: off */
    int32_t tracks, lanes;       /* CTAs or workers, and the lanes of each */
    uint32_t capacity;           /* events that a lane keeps, a power of two */
} mk_trace;

MK_FN int64_t mk_trace_ring_bytes(const mk_trace *t) { return (int64_t)sizeof(mk_trace_head) + (int64_t)t->capacity * (int64_t)sizeof(mk_trace_event); }
MK_FN int64_t mk_trace_bytes(const mk_trace *t) { return (int64_t)t->tracks * t->lanes * mk_trace_ring_bytes(t); }
MK_FN mk_trace_head *mk_trace_ring(const mk_trace *t, int64_t track, int64_t lane)
{
    return (mk_trace_head *)(void *)(t->memory + (track * t->lanes + lane) * mk_trace_ring_bytes(t));
}
/* Event `number` of a ring of capacity mask + 1. */
MK_FN mk_trace_event *mk_trace_event_at(mk_trace_head *ring, uint32_t mask, uint32_t number) { return (mk_trace_event *)(void *)(ring + 1) + (number & mask); }

/* What a task of the walk is in a trace: its product. */
MK_FN mk_trace_kind mk_trace_kind_of(mk_task_kind task)
{
    switch (task) {
    case MK_TASK_DISPATCH: return MK_TRACE_s1_dispatch;
    case MK_TASK_SHARED_GATE_UP:
    case MK_TASK_GATE_UP: return MK_TRACE_s2_gate_up;
    case MK_TASK_SHARED_DOWN:
    case MK_TASK_DOWN: return MK_TRACE_s4_down;
    case MK_TASK_SHARED_DGRAD_DOWN:
    case MK_TASK_DGRAD_DOWN: return MK_TRACE_s4_down_bwd;
    case MK_TASK_SHARED_DGRAD_GATE_UP:
    case MK_TASK_DGRAD_GATE_UP: return MK_TRACE_s2_gate_up_bwd;
    default: return MK_TRACE_wgrad;
    }
}

/* The epilogue of a product follows it in the list. */
MK_FN mk_trace_kind mk_trace_epilogue_of(mk_trace_kind product) { return (mk_trace_kind)(product + 1); }

/* Kinds that push rows, on one backend or the other. */
MK_FN int mk_trace_is_push(int kind)
{
    return kind == MK_TRACE_s4_down || kind == MK_TRACE_s5_push || kind == MK_TRACE_s2_gate_up_bwd || kind == MK_TRACE_s5_push_bwd;
}

/* SHARED_* are the first kinds of the walk's list. */
MK_FN int mk_trace_is_shared(mk_task_kind task) { return task >= MK_TASK_SHARED_GATE_UP && task <= MK_TASK_SHARED_WGRAD; }

#endif
