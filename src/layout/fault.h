/* What a device found wrong, so that the host can say it in a sentence. Written once per call by the first to see it; every rank sees the same
 * heads and ids, so every rank holds the same record. */
#ifndef MK_LAYOUT_FAULT_H
#define MK_LAYOUT_FAULT_H

#include <stdint.h>

typedef enum mk_fault_kind {
    MK_FAULT_NONE = 0,
    MK_FAULT_BAD_ID,      /* rank, value[0..3] = token, k, id, E */
    MK_FAULT_REFUSED,     /* rank; its sentence is in its call head */
    MK_FAULT_MISMATCH,    /* rank: its call head differs from rank 0's */
    MK_FAULT_STALE,       /* schedule or context memory is not of this configuration or routing; value[0] = 0 schedule, 1 context */
    MK_FAULT_TIMEOUT      /* a wait ran out: rank = whom for, value[0..3] = seen, expected, counter or one of those below, its index; task: who waited */
} mk_fault_kind;
enum { MK_FAULT_EPOCH = -1, MK_FAULT_GAVE_UP = -2 }; /* in place of a counter: the epoch of a rank that did not come; a rank gave up the pass */

typedef struct mk_fault {
    int32_t kind;         /* mk_fault_kind; the other fields are complete once it is not NONE */
    int32_t operation;    /* mk_operation */
    int32_t rank;
    int32_t task;         /* mk_task_kind, or 0 */
    uint64_t layer, call;
    int64_t value[4];
} mk_fault;

/* A counter that a task waited for in vain. */
typedef struct mk_missing_counter {
    int32_t task;         /* mk_task_kind */
    int32_t counter, index;
    uint32_t seen, wanted;
} mk_missing_counter;

/* A rank that somebody waited for in vain at a barrier. */
typedef struct mk_absent {
    uint32_t noted;
    int32_t rank;
    uint64_t seen, wanted; /* its epoch */
} mk_absent;

/* Places in mk_device_state.tickets of those who come and go in the middle of a pass (cuda/stage/yield.cuh): clusters started, or cancelled instead (Blackwell);
 * when the pass began (Hopper); clusters that have left; started and not leaving. */
enum { MK_YIELD_COUNTED = 2, MK_YIELD_BEGIN = 2, MK_YIELD_LEFT = 3, MK_YIELD_PRESENT = 5 };

/* Smallest (weight, expert, what) of a pointer that cannot be used; ~0: none (cuda/stage/weights.cuh). */
typedef struct mk_bad_weights {
    uint64_t given;       /* to a pass; found before its call opens */
    uint64_t widened;     /* given to mok_mx_widen; stays until a pass has told it */
} mk_bad_weights;

/* Device state of a workspace: what must live and advance on the device, so that captured graphs can be replayed. */
typedef struct mk_device_state {
    uint64_t epoch;       /* barriers so far */
    uint64_t calls;       /* collective calls so far */
    uint32_t skip;        /* this call's data stages do nothing */
    uint32_t given_up;    /* waits of a pass that ran out; stays: the ranks are no longer in step */
    uint32_t tickets[6];  /* of the launches of one pass; zeroed when a call opens. 0, 1: tasks, rows; 2, 3, 5: MK_YIELD_…; 4: blocks of mok_call_begin that
                           * have published, 0 between calls */
    int64_t rows_pulled, rows_pulled_peer, rows_copied; /* counted by s1, ever growing */
    int64_t row_moves_peer;  /* by s1: rows of H pulled from peers; a backward moves two for a table row, or one */
    int64_t rows_replayed, wgrad_continued; /* by mok_backward_fused and check_call (stage/call.cuh) */
    int64_t bytes_pushed_peer, rows_padding, ring_rotations; /* by check_call, from the head of the schedule that a pass is about to use */
    int64_t mx_not_finite;   /* MXFP8: by whoever quantises */
    int64_t done[5];      /* by mk_operation: calls not skipped. A schedule counts once its head is written, a pass at check_call */
    uint64_t first_bad_id; /* s0: smallest (rank, route) with an id out of range; ~0: none */
    mk_bad_weights bad_weight;
    mk_missing_counter missing; /* of given_up: the first of them */
    mk_absent absent;     /* a rank that did not come to a barrier; stays, as given_up does */
    mk_fault fault;       /* of this or an earlier call; the host takes it */
} mk_device_state;

#endif
