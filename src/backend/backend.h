/* The one table that a backend fills. Only src/api calls it; every slot is required unless it says otherwise. */
#ifndef MK_BACKEND_H
#define MK_BACKEND_H

#include "backend/operation.h"
#include "base/error.h"
#include "layout/config.h"
#include "layout/memory.h"
#include "layout/trace.h"
#include "mok.h"
#include "peer/group.h"

struct mok_stage_time; /* of the experimental part of mok.h, as the next two */
struct mok_link_args;
struct mok_link_result;

/* One collective call, its arguments checked. The member that belongs to the operation is filled (recompute: forward). */
typedef struct mk_call {
    mk_operation operation;
    uint64_t layer;
    int64_t num_tokens;
    mok_schedule_args schedule;
    mok_forward_args forward;
    mok_backward_args backward;
} mk_call;

typedef struct mk_backend {
    const char *name;
    mok_backend_id id;
    /* Fills usable, detail, num_devices. */
    void (*probe)(mok_backend_info *info);
    /* After the group agreed on the configuration and the heaps exist: the backend's own part of a workspace. */
    mok_status (*open)(mok_workspace *w);
    void (*close)(mok_workspace *w);
    /* What the host can see of schedule and context memory and of pointer tables, before the call is announced to others. */
    mok_status (*check)(mok_workspace *w, const mk_call *call);
    /* Runs the call on the stream. */
    mok_status (*run)(mok_workspace *w, const mk_call *call, void *stream);
    /* Tells the other ranks, on the call's stream, that this rank refuses it, with the thread's sentence. Does not wait for them
     * (but for ranks that share a GPU). */
    void (*refuse)(mok_workspace *w, mk_operation operation, uint64_t layer, mok_status status, void *stream);
    /* Blocks if `block`, else may answer MOK_NOT_READY. */
    mok_status (*wait)(mok_workspace *w, bool block);
    /* Copies the head of schedule memory to the host. */
    mok_status (*schedule_head)(mok_workspace *w, const void *schedule, mk_schedule_head *head);
    /* Memory that the backend can address, aligned to MK_BUFFER_ALIGN; of the workspace itself (before open) and of mok_memory_alloc. */
    mok_status (*memory_alloc)(mok_workspace *w, size_t bytes, void **memory);
    void (*memory_free)(mok_workspace *w, void *memory);
    /* Between such memory and the host's, any way. Waits for the workspace's work first. */
    mok_status (*memory_copy)(mok_workspace *w, void *to, const void *from, size_t bytes);
    /* mok_mx_quantise, its arguments checked. NULL: this backend does not do it. */
    mok_status (*mx_quantise)(const mok_mx_quantise_args *args, void *stream);
    /* mok_mx_widen, its arguments checked. Where plan.wide_bytes is 0 it only looks at tables of pointers. */
    mok_status (*mx_widen)(mok_workspace *w, const mok_mx_widen_args *args, void *stream);
    /* mok_stage_times_start, mok_stage_times_read; NULL: it has none. */
    mok_status (*stage_times_start)(mok_workspace *w);
    mok_status (*stage_times_read)(mok_workspace *w, struct mok_stage_time *times, int32_t *count);
    /* mok_link_move; NULL: it has no link to measure. */
    mok_status (*link_move)(mok_workspace *w, const struct mok_link_args *args, void *stream, struct mok_link_result *result);
    /* Of the group's device: its tensor cores multiply MXFP8 as it is. NULL: no. */
    bool (*scaled)(const mok_group *group);
    bool mxfp8; /* its layers compute in MXFP8 too */
} mk_backend;

struct mok_workspace {
    mok_group *group;
    const mk_backend *backend;
    mok_config config;          /* resolved */
    mk_dims dims;
    mk_memory memory;
    mok_plan plan;
    uint64_t fingerprint;
    char **heaps;               /* [P] as this rank addresses them */
    char *heap;                 /* heaps[rank] */
    char *local;
    uint64_t calls;             /* collective calls so far; the same on all ranks */
    uint64_t epoch;             /* barriers so far */
    uint64_t call_epoch;        /* epoch of the last call's first barrier */
    bool broken;                /* a wait ran out or a launch failed: the ranks are no longer in step */
    mok_stats stats;
    void *state;                /* the backend's */
    mk_trace trace;             /* tracks and lanes by the backend's open; memory while a trace is kept */
    mok_workspace *next;        /* of the group handle's list */
    uint32_t number;            /* among the group's workspaces, from 1, as they were created: the same on all ranks */
    uint32_t forks;             /* of this process and its parents, when it was made */
};

/* workspace.c */
/* MOK_OK unless w is NULL, or belongs to the process that this one was forked from. */
mok_status mk_check_workspace(const mok_workspace *w);

/* Does the caller give this weight in MXFP8? Else it is bf16. */
static inline bool mk_mx_is_quantised(const mok_weight *weight) { return weight->scales || weight->transposed || weight->transposed_scales; }

static inline const char *mk_operation_name(mk_operation operation)
{
    static const char *const names[] = {"no call", "schedule", "forward", "recompute", "backward"};
    return operation >= 0 && operation <= MK_OP_BACKWARD ? names[operation] : "unknown call";
}

/* A rank in a call, for mk_fail_order: two ranks that call two workspaces of a group in different orders, of which neither will come to the other's. `low` is the
 * smaller rank, so that both say the same. */
typedef struct mk_place { int32_t rank; mk_operation operation; uint64_t layer; uint32_t workspace; } mk_place;
static inline mok_status mk_fail_order(mk_place low, mk_place high)
{
    return mk_fail(MOK_E_MISMATCH, "ranks call two workspaces of a group in different orders: rank %d is in %s of layer %llu in workspace %u, rank %d in %s of "
                   "layer %llu in workspace %u (counted as they were created)", (int)low.rank, mk_operation_name(low.operation), (unsigned long long)low.layer,
                   (unsigned)low.workspace, (int)high.rank, mk_operation_name(high.operation), (unsigned long long)high.layer, (unsigned)high.workspace);
}

/* registry.c */
int32_t mk_backend_count(void);
const mk_backend *mk_backend_at(int32_t index);
/* The backend for a group and a wish; the sentence says why there is none. */
mok_status mk_backend_choose(mok_group *group, mok_backend_id wish, const mk_backend **backend);

extern const mk_backend mk_backend_cpu;  /* cpu/cpu.c */
extern const mk_backend mk_backend_cuda; /* cuda/host/cuda.c */

#endif
