/*
 * mok.h - MoK: one mixture-of-experts (MoE) layer of a model in training, over the GPUs of one NVLink domain.
 *
 * This header is the manual. It needs nothing but <stdint.h>, <stddef.h> and <stdbool.h>, is valid C11 and C++, and is the
 * only header that is installed. Three levels of use:
 *
 *   1. Plan     mok_config, mok_plan_query: what a layer will cost before anything is allocated. No group, no GPU needed.
 *   2. Run      mok_group (who takes part), mok_workspace (memory of a shape), then per step
 *               mok_schedule -> mok_forward -> [mok_recompute] -> mok_backward [-> mok_backward again, weights only].
 *   3. Observe  mok_wait, mok_poll, mok_last_error, mok_get_stats.
 *
 * Words and letters used everywhere:
 *   P ranks of the group, T tokens of this rank (any number from 0 to max_tokens, may differ from rank to rank),
 *   N tokens of all ranks, H hidden, I intermediate, Is intermediate of the shared expert, E experts, K top-k,
 *   El experts of this rank: [floor(rE/P), floor((r+1)E/P)) for rank r (mok_expert_range).
 *   Arrays are dense and row-major; "[T, H] bf16" gives shape and element type.
 *
 * The maths (rounding points included) and the promise that results have the same bits for any P, ring size, minibatch,
 * save policy and run are in docs/contract.md.
 *
 * Streams are `void *`: a cudaStream_t / CUstream on the cuda backend. On the cpu backend the stream is ignored and a call
 * does its work in the calling thread (with the workspace's worker threads) and has finished when it returns.
 *
 * Threads: a group handle and the workspaces made from it belong to one rank; use them from one thread at a time. Ranks of
 * one process each need a thread of their own, because collective calls wait for each other.
 *
 * Errors: every call that can fail returns a mok_status. mok_last_error() gives this thread's last sentence, with the
 * numbers in it. The library never exits and never prints. A call that fails has changed nothing that the caller owns,
 * unless its description says otherwise.
 */
#ifndef MOK_H
#define MOK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define MOK_API __attribute__((visibility("default")))
#else
#define MOK_API
#endif

/* Version of the structs in this header. It goes into every struct's api_version, next to its struct_size. */
#define MOK_API_VERSION 1u

/* Fills the two header fields of any struct below: `mok_config cfg = MOK_INIT(mok_config);` zeroes all others. */
#ifdef __cplusplus
#define MOK_INIT(type) mok_init_struct<type>()
extern "C++" {
template <class S> static inline S mok_init_struct()
{
    S s = S();
    s.struct_size = static_cast<uint32_t>(sizeof(S));
    s.api_version = MOK_API_VERSION;
    return s;
}
}
#else
#define MOK_INIT(type) ((type){.struct_size = (uint32_t)sizeof(type), .api_version = MOK_API_VERSION})
#endif

/* ---------------------------------------------------------------------------------------------------------------------
 * Status codes, grouped by who must act: 1-19 the caller, 20-39 the machine's owner, 40-59 another rank, 60-79 the
 * device, 80-99 us. New detail goes into the sentence, not into new codes.
 * ------------------------------------------------------------------------------------------------------------------ */
#define MOK_STATUS_LIST(X)                                                                             \
    X(MOK_OK, 0, "success")                                                                            \
    X(MOK_NOT_READY, 1, "work is still running (mok_poll only)")                                       \
    X(MOK_E_ARG, 2, "an argument is wrong")                                                            \
    X(MOK_E_SHAPE, 3, "shapes, counts or sizes do not fit together")                                   \
    X(MOK_E_ROUTE, 4, "an expert id is outside [-1, E)")                                               \
    X(MOK_E_STATE, 5, "the call does not fit the state: order, schedule or context of another pass")   \
    X(MOK_E_UNSUPPORTED, 6, "the library does not do this (yet)")                                      \
    X(MOK_E_MEMORY, 20, "memory could not be had")                                                     \
    X(MOK_E_ENV, 21, "driver, device or operating system lacks what is needed")                        \
    X(MOK_E_MISMATCH, 40, "ranks called with different arguments")                                     \
    X(MOK_E_PEER, 41, "another rank refused its call")                                                 \
    X(MOK_E_TIMEOUT, 42, "another rank did not come in time")                                          \
    X(MOK_E_DEVICE, 60, "the device reported an error")                                                \
    X(MOK_E_BUG, 80, "an internal check failed: please report")

typedef enum mok_status {
#define MOK_STATUS_ENUM(name, value, text) name = value,
    MOK_STATUS_LIST(MOK_STATUS_ENUM)
#undef MOK_STATUS_ENUM
} mok_status;

/* The name of a status ("MOK_E_ARG") and its general meaning. Never NULL; unknown codes give "unknown status". */
MOK_API const char *mok_status_name(mok_status status);
MOK_API const char *mok_status_text(mok_status status);
/* The sentence of this thread's last failed call, "" if none failed yet. Valid until the thread's next failing call. */
MOK_API const char *mok_last_error(void);
/* "0.1.0", and the API version the library was built with. */
MOK_API const char *mok_version(void);
MOK_API uint32_t mok_api_version(void);

/* ---------------------------------------------------------------------------------------------------------------------
 * Configuration of a layer. A struct's fields beyond the caller's struct_size are taken as 0; a longer struct than the
 * library knows is refused only if its extra bytes are not all 0. In every field 0 means "choose for me" or "none", except in those
 * marked required.
 * ------------------------------------------------------------------------------------------------------------------ */
typedef enum mok_backend_id { MOK_BACKEND_AUTO = 0, MOK_BACKEND_CPU = 1, MOK_BACKEND_CUDA = 2 } mok_backend_id;

typedef enum mok_dtype { MOK_DTYPE_AUTO = 0, MOK_BF16 = 1, MOK_FP32 = 2, MOK_MXFP8 = 3 } mok_dtype;

typedef enum mok_activation {
    MOK_ACT_SWIGLU = 0,  /* silu(gate) * up, with the optional limit */
    MOK_ACT_GPT_OSS = 1, /* gate * sigmoid(1.702 gate) * (up + 1); unsupported yet */
} mok_activation;

/* How gate and up weights lie: two matrices [I, H]; one [2I, H] with gate above up; or one with rows gate0, up0, gate1 … */
typedef enum mok_gate_up { MOK_GATE_UP_SEPARATE = 0, MOK_GATE_UP_COMBINED = 1, MOK_GATE_UP_INTERLEAVED = 2 } mok_gate_up;

/* How each weight matrix lies: [outputs, inputs] (as nn.Linear keeps it) or [inputs, outputs]. */
typedef enum mok_weight_layout { MOK_WEIGHT_NK = 0, MOK_WEIGHT_KN = 1 } mok_weight_layout;

/* Which table rows keep their gate/up activations for the backward (rows beyond are computed again, never lost). */
typedef enum mok_save {
    MOK_SAVE_AUTO = 0, /* as MOK_SAVE_RING */
    MOK_SAVE_NONE = 1, /* nothing: activation checkpointing */
    MOK_SAVE_RING = 2, /* the first ring_rows rows */
    MOK_SAVE_ALL = 3,  /* as many as the routing can ever give this rank */
    MOK_SAVE_ROWS = 4, /* save_rows rows */
} mok_save;

typedef struct mok_config {
    uint32_t struct_size; /* sizeof(mok_config) */
    uint32_t api_version; /* MOK_API_VERSION */

    /* Shape. The same on all ranks. */
    int64_t hidden;              /* required: H, a multiple of 64 */
    int64_t intermediate;        /* required: I, a multiple of 64 */
    int64_t shared_intermediate; /* Is, a multiple of 64; 0 = no shared expert */
    int64_t routed_hidden;       /* width of the routed rows if not H; unsupported yet unless 0 or H */
    int64_t num_experts;         /* required: E >= 1; P need not divide it, and may be larger */
    int64_t topk;                /* required: K, 1 to 64 and at most E */
    int64_t max_tokens;          /* required: largest T of any rank in any call */

    /* Arithmetic. The same on all ranks. */
    mok_dtype dtype;               /* MOK_BF16 (auto) or MOK_MXFP8: routed experts on e4m3 in blocks of 32 (docs/contract.md) */
    mok_dtype router_dtype;        /* of router weights and their gradients: MOK_FP32 (auto) or MOK_BF16 */
    mok_activation activation;
    float swiglu_limit;            /* L > 0: gate <= L and -L <= up <= L before the activation; 0 = no limit */
    mok_gate_up gate_up;           /* routed experts; shared expert too */
    mok_weight_layout weight_layout;
    bool shared_gate;              /* the shared expert's output is scaled by sigmoid(<x, wgate>) */
    bool expert_bias;              /* unsupported yet */
    bool mx_wgrad_bf16;            /* MXFP8: weight gradients from bf16 operands, not from operands quantised along the tokens */

    /* Schedule. Never changes a result's bits. The same on all ranks. */
    int64_t ring_rows;             /* rows of the ring, rounded up to 128; 0 = this rank's rows under balanced routing */
    int64_t minibatch_rows;        /* grain of overlap in the forward, rounded up to 128; 0 = two-wave bound, in whole waves of tasks if there are rows enough; at most a third of a ring_rows that cannot hold all balanced rows */
    int64_t minibatch_rows_bwd;    /* the same for the backward; at most a fifth with MOK_SAVE_ALL */
    mok_save save;
    int64_t save_rows;             /* with MOK_SAVE_ROWS, rounded up to 128 */
    bool save_x;                   /* context keeps the pulled x rows too; unsupported yet */
    int32_t comm_sms, comm_sms_bwd; /* GPU: SMs that only move rows; 0 = chosen */
    int32_t reserve_sms;           /* GPU: SMs left to other kernels of the same priority */

    /* Local. May differ from rank to rank. */
    mok_backend_id backend;        /* auto: cuda if the group has GPUs, else cpu */
    int32_t cpu_threads;           /* cpu backend: threads of this rank; 0 = cores / ranks of this process, at least 1 */
    int64_t timeout_ms;            /* longest wait for another rank, and of a kernel for work of its own GPU inside a pass; 0 =
                                    * chosen (mok_timeout) */
    bool mx_wide_given;            /* MXFP8: every pass is given the widened weights that it reads (mok_mx_widen): no room for them in the workspace */
    int32_t yield_us;              /* Hopper: in so many microseconds of a long pass 16 SMs come free for a moment, for kernels of higher priority, at a price
                                    * (docs/performance.md); 0 = never. Blackwell: SMs come free when somebody asks; -1 = never. Nor where reserve_sms is set */
} mok_config;

/* ---------------------------------------------------------------------------------------------------------------------
 * Plan: everything about a configuration that can be said without running it. Pure functions: they do not block, are not
 * collective, allocate nothing.
 * ------------------------------------------------------------------------------------------------------------------ */
/* Experts [*first, *first + *count) belong to `rank`. MOK_E_ARG unless E >= 1 and 0 <= rank < P. */
MOK_API mok_status mok_expert_range(int64_t num_experts, int32_t num_ranks, int32_t rank, int64_t *first, int64_t *count);

/* What a timeout_ms stands for, in a configuration, a mok_bootstrap or a provider of the caller's: itself; 0: MOK_TIMEOUT_MS of the environment, or
 * else 600 000. MOK_E_ARG unless it is from 0 to 30 days; MOK_E_ENV if it is 0 and MOK_TIMEOUT_MS is no such number from 1 on. */
MOK_API mok_status mok_timeout(int64_t timeout_ms, int64_t *ms);

/* One buffer of the memory map. */
typedef enum mok_memory_kind {
    MOK_MEM_HEAP = 0,      /* symmetric heap: peers read or write it */
    MOK_MEM_LOCAL = 1,     /* the rest of the workspace */
    MOK_MEM_SCHEDULE = 2,  /* caller's, one per routing that is alive */
    MOK_MEM_CONTEXT = 3,   /* caller's, one per forward whose backward is still to come */
    MOK_MEM_WEIGHTS = 4,   /* caller's, one per version of a layer's weights and quantisation, if they are kept widened: mok_mx_widen */
} mok_memory_kind;

typedef struct mok_buffer_info {
    const char *name; /* as in src/layout/memory.h; static storage */
    mok_memory_kind kind;
    int64_t offset, bytes;
} mok_buffer_info;

typedef struct mok_pass_plan {
    double two_wave_rows;    /* rows needed to fill the machine twice with the narrowest GEMM of the pass */
    int64_t minibatch_rows;  /* used */
    int64_t narrowest_gemm;  /* its N */
    double flops;            /* of this rank under balanced routing, shared expert included */
    double link_bytes_in, link_bytes_out; /* expected, uniform routing, rows only, no local copies */
} mok_pass_plan;

typedef struct mok_plan {
    uint32_t struct_size, api_version;
    int64_t experts_first, experts_count; /* of the rank asked for */
    int64_t balanced_rows;                /* rows of this rank if all experts are equally liked */
    int64_t capacity_rows;                /* rows (padding included) that the worst routing gives this rank */
    int64_t row_tile, ring_rows, saved_rows;
    int64_t smallest_ring_rows;           /* two minibatches */
    int64_t heap_bytes, local_bytes, schedule_bytes, context_bytes;
    mok_pass_plan forward, backward;
    int64_t wide_bytes;                   /* of one quantisation of the routed weights, widened: mok_mx_widen; 0: passes do not widen weights */
} mok_plan;

/* What `rank` of `num_ranks` gets from `cfg` on a machine with `num_sms` multiprocessors (0: 132; more than the 144 of a whole Hopper: a Blackwell, which keeps
 * operands of MXFP8 as they are) and tiles of tile_rows x tile_cols (0: 128 x 256). Sizes are exact: mok_workspace_create takes heap_bytes + local_bytes.
 * `buffers` (may be NULL) receives up to *num_buffers entries, and *num_buffers the number there are.
 * MOK_E_ARG, MOK_E_SHAPE or MOK_E_UNSUPPORTED with the sentence that creation would give. */
MOK_API mok_status mok_plan_query(const mok_config *cfg, int32_t num_ranks, int32_t rank, int32_t num_sms, int32_t tile_rows,
                                  int32_t tile_cols, mok_plan *plan, mok_buffer_info *buffers, int32_t *num_buffers);

/* ---------------------------------------------------------------------------------------------------------------------
 * Group: the ranks that share a layer's experts.
 * ------------------------------------------------------------------------------------------------------------------ */
typedef struct mok_group mok_group;

/* All ranks are threads of this process: groups[r] becomes rank r's handle. Not collective: call it once, hand one handle
 * to each thread. Destroy every handle. devices: NULL for the cpu backend; else one CUDA device number per rank, where
 * equal numbers make virtual ranks that share a GPU: for tests; their calls may block until the other ranks have called, and cannot be
 * captured in a graph. MOK_E_ENV: no driver, no supported GPU, or GPUs without peer access, every such pair named. */
MOK_API mok_status mok_group_create_local(int32_t num_ranks, const int32_t *devices, mok_group **groups);

/* Peer pointers come from the caller, for ranks in several processes. A workspace with MOK_BACKEND_CUDA takes them as device pointers
 * and runs on the device that is current in the thread that creates it (one GPU per rank); MOK_BACKEND_AUTO means cpu here.
 * Every function is collective over the group, may
 * block, and returns 0 or a non-zero error that the library passes on as MOK_E_ENV. The library does not bound how long they take: a provider that
 * may wait for a rank that has died should give up by itself (mok_group_create_processes needs no provider, and bounds its waits). */
typedef struct mok_provider {
    uint32_t struct_size, api_version;
    void *user;
    /* every rank's `bytes` bytes at `send`, in rank order, into `recv` of all ranks. */
    int (*all_gather)(void *user, const void *send, void *recv, size_t bytes);
    /* `bytes` bytes of zeroed symmetric memory on every rank; peers[r] is rank r's, as this rank can address it. */
    int (*heap_alloc)(void *user, size_t bytes, void **peers);
    /* own: peers[this rank] of heap_alloc. Called once all ranks are through with it. */
    int (*heap_free)(void *user, void *own);
} mok_provider;
MOK_API mok_status mok_group_create(const mok_provider *provider, int32_t rank, int32_t num_ranks, mok_group **group);

/* Ranks are processes, with one GPU each or none; the library makes the symmetric memory: shared memory on the cpu backend, CUDA virtual
 * memory on cuda. Collective, blocks. The caller brings one function. Two ranks on one GPU: only with MOK_SHARE_GPU=1 in the environment, for tests
 * (docs/operations.md).
 *
 * Ranks on one machine find each other through all_gather, once, inside this call; afterwards everything that crosses ranks on the host is
 * bounded by mok_config.timeout_ms and names who is missing, and a process that ends is noticed at once. Ranks on several machines of one
 * NVLink domain (cuda only, fabric handles) go on using all_gather, which must stay valid, and whose waits are the caller's to bound. After a rank has
 * died, the others destroy their workspaces and the group, and make a new group without it. examples/mpi_layer.c, examples/nccl_bootstrap.h.
 * MOK_E_ENV: sockets or containers in the way; MOK_E_MISMATCH; MOK_E_TIMEOUT names the ranks that stayed away. */
typedef struct mok_bootstrap {
    uint32_t struct_size, api_version;
    void *user;
    /* every rank's `bytes` bytes at `send`, in rank order, into `recv` of all ranks; 0, or an error that is passed on as MOK_E_ENV. */
    int (*all_gather)(void *user, const void *send, void *recv, size_t bytes);
    int64_t timeout_ms; /* longest wait for another rank's connection; 0 = chosen (mok_timeout) */
    bool set_device;    /* this rank's GPU is `device`, and MOK_BACKEND_AUTO means cuda; else cpu, and with MOK_BACKEND_CUDA the current device */
    int32_t device;
} mok_bootstrap;
MOK_API mok_status mok_group_create_processes(const mok_bootstrap *bootstrap, int32_t rank, int32_t num_ranks, mok_group **group);

/* NULL is allowed. Not collective. Workspaces of the group must be gone. */
MOK_API void mok_group_destroy(mok_group *group);
MOK_API int32_t mok_group_rank(const mok_group *group);
MOK_API int32_t mok_group_size(const mok_group *group);

/* ---------------------------------------------------------------------------------------------------------------------
 * Workspace: heap, ring and scratch of one configuration. One workspace serves all layers of that shape, one after the
 * other, and holds nothing between calls. A child of fork() cannot use its parent's: MOK_E_STATE; it makes its own.
 * ------------------------------------------------------------------------------------------------------------------ */
typedef struct mok_workspace mok_workspace;

/* Collective, blocks. Ranks that disagree in a field that must agree, or of which one has a bad configuration or no
 * memory, all get the same status and sentence; then no workspace exists. MOK_E_TIMEOUT names the ranks that stayed away. */
MOK_API mok_status mok_workspace_create(mok_group *group, const mok_config *cfg, mok_workspace **workspace);
/* Collective (waits for the other ranks' destroy, at most timeout_ms, then frees anyway). NULL is allowed. */
MOK_API void mok_workspace_destroy(mok_workspace *workspace);
/* The configuration with every "choose for me" resolved, and the plan. out's struct_size says how much of it to fill. */
MOK_API mok_status mok_workspace_config(const mok_workspace *workspace, mok_config *out);
MOK_API mok_status mok_workspace_plan(const mok_workspace *workspace, mok_plan *out);

/* ---------------------------------------------------------------------------------------------------------------------
 * Arguments of the passes. Pointers are to memory the backend can address (device memory on cuda), owned by the caller,
 * and must stay valid until the call's work is done.
 *
 * Collective calls: schedule, forward, recompute and backward must be called by all ranks of the group in the same order, with the same
 * `layer` number. They are asynchronous on the stream (see the top for the cpu backend). What a rank finds wrong with its own
 * arguments is refused at once, and the other ranks' same call fails with MOK_E_PEER and that rank's sentence. What only
 * the data shows (a bad expert id, ranks that call different things) fails on every rank with the same sentence: on the cpu backend from the
 * call itself, on cuda from mok_wait, mok_poll or the next call. Outputs are then undefined; the next call works again.
 * ------------------------------------------------------------------------------------------------------------------ */

/* One weight matrix of all El local experts (or of the shared expert): give `packed` or `experts`.
 *   packed   [El, rows, cols], dense; [rows, cols] for the shared expert
 *   experts  El pointers to [rows, cols] each, in memory the backend can address. They are read while the pass runs, so that on cuda
 *            the addresses may change between replays of a captured graph. The shared expert has one entry.
 *
 * With MOK_MXFP8 a routed weight is one of two things (shared weights are always bf16):
 *   bf16       as above: the library quantises what it reads, each time it reads it
 *   quantised  by mok_mx_quantise or as it does: `packed` e4m3 [El, rows, cols] with `scales`, blocks along cols; `transposed` e4m3
 *              [El, cols, rows] with `transposed_scales`, blocks along rows. For MOK_WEIGHT_NK, gate and up separate or combined. The forward
 *              and recompute read packed and scales; the backward the transposed pair and, of gate and up unless all rows are saved
 *              (MOK_SAVE_ALL), packed and scales too. What is not read may be NULL. Bits are those of the bf16 original's.
 * A pass that is given a quantisation of the routed weights widened (`wide`, mok_mx_widen) reads nothing of it here. */
typedef struct mok_weight {
    const void *packed;
    const void *const *experts;
    const void *scales, *transposed, *transposed_scales;
} mok_weight;

/* Shapes under MOK_WEIGHT_NK; transposed under MOK_WEIGHT_KN. With combined or interleaved gate/up, `gate` is the one
 * [2I, H] matrix and `up` stays empty. */
typedef struct mok_weights {
    mok_weight gate, up;               /* [I, H] bf16 */
    mok_weight down;                   /* [H, I] bf16 */
    mok_weight shared_gate, shared_up; /* [Is, H] bf16 */
    mok_weight shared_down;            /* [H, Is] bf16 */
    const void *shared_output_gate;    /* [H] bf16, with config.shared_gate */
} mok_weights;

/* Where a weight gradient goes: as mok_weight, packed or one pointer per expert (an entry may be NULL: that expert is frozen).
 * Both NULL: not wanted. */
typedef struct mok_grad {
    void *packed;
    void *const *experts;
    mok_dtype dtype;  /* MOK_BF16 (auto) or MOK_FP32 */
    bool accumulate;  /* add to what is there, rounding once; an expert without rows is left as it is. Else overwrite: zeros */
} mok_grad;

typedef struct mok_grads {
    mok_grad gate, up, down, shared_gate, shared_up, shared_down; /* laid out as the weights */
    mok_grad shared_output_gate;                                  /* [H]; sums over this rank's tokens */
    uint32_t *ready;      /* [El] or NULL: set to ready_value once all gradients of that expert are written */
    uint32_t ready_value;
} mok_grads;

/* --- s0: routes -> row table ------------------------------------------------------------------------------------- */
typedef struct mok_schedule_args {
    uint32_t struct_size, api_version;
    uint64_t layer;            /* any number, the same on all ranks; part of the fingerprint that ranks compare */
    int64_t num_tokens;        /* T */
    const int32_t *expert_ids; /* [T, K]; -1 = dropped route; duplicates within a token are legal, each its own row */
    void *schedule;            /* out: plan.schedule_bytes bytes, 256-byte aligned: the routing, for the calls below */
    int64_t *tokens_per_expert_local;  /* out or NULL: [E] routes of this rank's tokens */
    int64_t *tokens_per_expert_global; /* out or NULL: [E] routes of all ranks' tokens */
} mok_schedule_args;
/* MOK_E_ROUTE on all ranks if any rank has an id outside [-1, E), naming rank, token, k and id. */
MOK_API mok_status mok_schedule(mok_workspace *workspace, const mok_schedule_args *args, void *stream);

/* --- forward ------------------------------------------------------------------------------------------------------ */
typedef struct mok_forward_args {
    uint32_t struct_size, api_version;
    uint64_t layer;
    int64_t num_tokens;         /* T, as in the schedule */
    const void *schedule;       /* from mok_schedule of this workspace */
    const void *x;              /* [T, H] bf16 */
    const void *router_weights; /* [T, K] of config.router_dtype; any value, 0 and below included */
    mok_weights weights;
    void *context;              /* out: plan.context_bytes bytes, 256-byte aligned; NULL = no backward will follow */
    void *out;                  /* out: [T, H] bf16 */
    const void *wide;           /* MXFP8: routed weights as mok_mx_widen made them, or NULL: the pass widens them itself */
} mok_forward_args;
MOK_API mok_status mok_forward(mok_workspace *workspace, const mok_forward_args *args, void *stream);

/* Fills `context` again, as the forward would have, for a layer whose context was dropped. `out`, weights.down,
 * weights.shared_down and router_weights are not used. */
MOK_API mok_status mok_recompute(mok_workspace *workspace, const mok_forward_args *args, void *stream);

/* --- backward ----------------------------------------------------------------------------------------------------- */
typedef enum mok_backward_parts {
    MOK_BACKWARD_ALL = 0,
    MOK_BACKWARD_DATA = 1,    /* dx and drouter_weights now */
    MOK_BACKWARD_WEIGHTS = 2, /* weight gradients only, in a later call with the same schedule, context, x and dout */
} mok_backward_parts;

typedef struct mok_backward_args {
    uint32_t struct_size, api_version;
    uint64_t layer;
    int64_t num_tokens;         /* T, as in the schedule */
    const void *schedule;
    const void *context;        /* from the forward or recompute with this schedule; read only, so it may serve twice */
    const void *dout;           /* [T, H] bf16 */
    const void *x;              /* as in the forward */
    const void *router_weights; /* as in the forward */
    mok_weights weights;
    mok_backward_parts parts;
    void *dx;                   /* out: [T, H] bf16 */
    void *drouter_weights;      /* out: [T, K] of config.router_dtype; 0 for dropped routes. NULL = not wanted */
    mok_grads grads;            /* out; all-zero = no weight gradients */
    const void *wide, *wide_dgrad; /* as in the forward; `wide` is read unless all rows are saved (MOK_SAVE_ALL) */
} mok_backward_args;
MOK_API mok_status mok_backward(mok_workspace *workspace, const mok_backward_args *args, void *stream);

typedef enum mok_call_kind { MOK_CALL_SCHEDULE = 1, MOK_CALL_FORWARD = 2, MOK_CALL_RECOMPUTE = 3, MOK_CALL_BACKWARD = 4 } mok_call_kind;

/* In place of this rank's part in a collective call that it will not make, for reasons of the caller's own: the other ranks' same call
 * fails with MOK_E_PEER and `sentence` (its first 400 characters), and nobody waits. Does not wait for them (but for ranks that share a GPU).
 * MOK_E_ARG, MOK_E_STATE: nothing was announced. */
MOK_API mok_status mok_refuse(mok_workspace *workspace, mok_call_kind call, uint64_t layer, const char *sentence, void *stream);

/* ---------------------------------------------------------------------------------------------------------------------
 * MXFP8: quantisation of weights. The source is bf16; an element is e4m3, and 32 of them share a scale 2^(byte - 127):
 * byte - 127 = ceil(log2(amax / 448)), from -39 to 119, amax being the block's largest finite size. NaN and infinities become NaN.
 * Scales of a [rows, cols] matrix with blocks along cols: bytes [ceil(rows/128), ceil(cols/128), 32, 16]; inside a tile of 128 x 128 the
 * one of row r and columns [32 b, 32 b + 32) is byte (r mod 32) * 16 + (r div 32) * 4 + b.
 * ------------------------------------------------------------------------------------------------------------------ */
typedef struct mok_mx_quantise_args {
    uint32_t struct_size, api_version;
    mok_backend_id backend;       /* whose memory the pointers are of: MOK_BACKEND_CPU (auto), or cuda, where all are multiples of 16 */
    int64_t count, rows, cols;    /* rows and cols: multiples of 32 */
    const void *source;           /* [count, rows, cols] bf16 */
    void *data, *scales;          /* out, both or none: e4m3 [count, rows, cols], and count times the scales, blocks along cols */
    void *transposed, *transposed_scales; /* out, both or none: e4m3 [count, cols, rows], blocks along rows */
    int64_t *not_finite;          /* out or NULL: elements of source that are NaN or infinite; host memory */
} mok_mx_quantise_args;
/* Not collective; the same bits on every backend. cpu: has finished when it returns. cuda: on the stream, of the device that the memory is
 * of; blocks if not_finite is asked for. */
MOK_API mok_status mok_mx_quantise(const mok_mx_quantise_args *args, void *stream);
/* Where matrix units multiply bf16 (Hopper), a pass needs the routed weights widened: numbers of e4m3 times their scales, as bf16. It makes them anew
 * each time, in the workspace, unless it is given them: made here once per version of the weights, kept by the caller. The same bits. */
typedef struct mok_mx_widen_args {
    uint32_t struct_size, api_version;
    mok_weights weights;  /* the routed ones, as a pass takes them: bf16 or quantised. One that is not given (in that quantisation) is left out */
    void *wide;           /* out or NULL: for forward, recompute and replayed rows: plan.wide_bytes bytes, 256-byte aligned */
    void *wide_dgrad;     /* out or NULL: for the backward, as many */
} mok_mx_widen_args;
/* On the stream, behind what it holds; not collective, and uses no memory of the workspace, whose configuration alone counts. Where plan.wide_bytes
 * is 0 (cpu; BF16; chips that multiply MXFP8 as it is) nothing is to be done, and wide and wide_dgrad must be NULL, here and in passes.
 * An expert whose pointer is NULL is refused, MOK_E_ARG, by name: on cpu at once; on cuda, where only the device sees the table, by this rank's next
 * forward, recompute or backward of the workspace, which the other ranks hear of as of any refusal. */
MOK_API mok_status mok_mx_widen(mok_workspace *workspace, const mok_mx_widen_args *args, void *stream);
/* Bytes of the scales of one [rows, cols] matrix with blocks along cols; 0 if a size is below 0 or no multiple of 32. */
MOK_API int64_t mok_mx_scale_bytes(int64_t rows, int64_t cols);

/* ---------------------------------------------------------------------------------------------------------------------
 * Memory helpers for C programs: memory that the workspace's backend can address (device memory on cuda), and a way in and out. A
 * framework with an allocator of its own needs none of them. Not collective.
 * ------------------------------------------------------------------------------------------------------------------ */
/* Aligned to 256 bytes, contents undefined. MOK_E_MEMORY. */
MOK_API mok_status mok_memory_alloc(mok_workspace *workspace, size_t bytes, void **memory);
/* Only once all work that uses it is done. NULL is allowed. Before the workspace is destroyed. */
MOK_API void mok_memory_free(mok_workspace *workspace, void *memory);
/* `to` and `from` may each be such memory or the host's. Blocks until the workspace's work and the copy are done. */
MOK_API mok_status mok_memory_copy(mok_workspace *workspace, void *to, const void *from, size_t bytes);

/* ---------------------------------------------------------------------------------------------------------------------
 * Observation.
 * ------------------------------------------------------------------------------------------------------------------ */
/* Blocks until all work of this workspace is done; returns its first error, if any, once. mok_poll: the same, or MOK_NOT_READY. */
MOK_API mok_status mok_wait(mok_workspace *workspace);
MOK_API mok_status mok_poll(mok_workspace *workspace);

/* Counted while the passes run; they only ever grow. Blocks until the work is done. */
typedef struct mok_stats {
    uint32_t struct_size, api_version;
    int64_t schedules, forwards, recomputes, backwards;
    int64_t rows;             /* table rows dispatched, padding excluded (pulled + copied) */
    int64_t rows_pulled;      /* from a rank's heap, this rank's own included */
    int64_t rows_pulled_peer; /* of these, from another rank */
    int64_t rows_copied;      /* from an earlier row of the same token */
    int64_t rows_replayed;    /* whose gate/up were computed again in a backward */
    int64_t rows_padding;     /* computed, but of no token */
    int64_t ring_rotations;   /* whole turns of the ring, all passes added */
    int64_t wgrad_continued;  /* weight-gradient pieces that went on from a partial sum */
    int64_t bytes_pulled_peer, bytes_pushed_peer; /* over the link */
    int64_t mx_not_finite;    /* MXFP8: NaN and infinities in x and dout of this rank's tokens and in h, dgate, dup of its rows */
} mok_stats;
MOK_API mok_status mok_get_stats(mok_workspace *workspace, mok_stats *out);

/* What the schedule says the passes will do on this rank, exactly (its memory must be complete: call mok_wait first on cuda). */
typedef struct mok_schedule_info {
    uint32_t struct_size, api_version;
    int64_t tokens_global;    /* N */
    int64_t rows;             /* of this rank, padding excluded */
    int64_t table_rows;       /* padding included */
    int64_t rows_copied_fwd, rows_copied_bwd; /* the others are pulled */
    int64_t rows_pulled_peer_fwd, rows_pulled_peer_bwd;
    int64_t wgrad_pieces, wgrad_continued;
    int64_t bytes_pulled_peer_fwd, bytes_pushed_peer_fwd; /* of one forward */
    int64_t bytes_pulled_peer_bwd, bytes_pushed_peer_bwd; /* of one backward (MOK_BACKWARD_ALL) */
} mok_schedule_info;
MOK_API mok_status mok_schedule_query(mok_workspace *workspace, const void *schedule, mok_schedule_info *out);

/* What stands in the way on this machine, and what to change. */
typedef enum mok_finding_state { MOK_FINDING_GOOD = 0, MOK_FINDING_SKIPPED = 1, MOK_FINDING_WARNING = 2, MOK_FINDING_BAD = 3 } mok_finding_state;
typedef struct mok_finding {
    char check[24];             /* "driver", "peer access", … */
    mok_finding_state state;
    char detail[480];           /* what was found, with its numbers, or why it was skipped */
    char advice[320];           /* what to change; "" if nothing */
} mok_finding;
/* Looks at everything that ranks need: driver, devices, access between them and its rate (a short copy), handles for shared memory, sockets, and
 * ends with a verdict. Takes a second with GPUs and little memory of theirs, gives it back. *count: room in, number out; findings NULL: only the number.
 * MOK_DOCTOR_FAULT=<name> in the environment makes a check find a fault that is not there, for tests; the names are in src/api/doctor.c. */
MOK_API mok_status mok_doctor(mok_finding *findings, int32_t *count);

/* --- traces: what every role of every CTA (cuda), or every worker (cpu), did and when. Off by default, and free when off. ------------------ */
/* X(kind, group, what happens meanwhile): the group is the unit of summaries. The kind `call` marks a call's beginning; its `part` is the mok_call_kind. */
#define MOK_TRACE_KIND_LIST(X)                                                                  \
    X(call, "call", "a call begins")                                                            \
    X(publish, "publish", "inputs into this rank's heap")                                       \
    X(s0_schedule, "s0_schedule", "routes to row table")                                        \
    X(s1_dispatch, "s1_dispatch", "rows into the ring")                                         \
    X(s2_gate_up, "s2_gate_up", "gate/up product of a tile")                                    \
    X(s3_swiglu, "s3_swiglu", "epilogue of s2_gate_up")                                         \
    X(s4_down, "s4_down", "down product of a tile")                                             \
    X(s5_push, "s5_combine", "epilogue of s4_down: y to its tokens' ranks")                     \
    X(s5_reduce, "s5_combine", "weighted sum of a token's rows")                                \
    X(s4_down_bwd, "s4_down_bwd", "dgrad through down of a tile")                               \
    X(s3_swiglu_bwd, "s3_swiglu_bwd", "epilogue of s4_down_bwd")                                \
    X(s2_gate_up_bwd, "s2_gate_up_bwd", "dgrad through gate/up of a tile")                      \
    X(s5_push_bwd, "s5_combine_bwd", "epilogue of s2_gate_up_bwd: dx to its tokens' ranks")     \
    X(s5_reduce_bwd, "s5_combine_bwd", "sum of a token's dx rows")                              \
    X(wgrad, "wgrad", "weight-gradient product of a piece")                                     \
    X(wgrad_store, "wgrad", "epilogue of a weight gradient")                                    \
    X(wait_slot, "wait", "for the readers of a ring slot's old rows")                           \
    X(wait_source, "wait", "for the tile to copy a row from")                                   \
    X(wait_operands, "wait", "for the rows and results that a task reads or overwrites")        \
    X(rank_barrier, "barrier", "for all ranks")
typedef enum mok_trace_kind {
#define MOK_TRACE_ENUM(kind, group, what) MOK_TRACE_##kind,
    MOK_TRACE_KIND_LIST(MOK_TRACE_ENUM)
#undef MOK_TRACE_ENUM
    MOK_NUM_TRACE_KINDS
} mok_trace_kind;

typedef struct mok_trace_event {
    uint64_t begin_ns, end_ns; /* of the rank's clock: CLOCK_MONOTONIC on cpu; on cuda globaltimer, which differs between GPUs: mok_trace_align */
    uint64_t link_bytes;       /* moved between ranks meanwhile, in or out */
    int32_t rank;
    int32_t track, lane;       /* CTA and its role, or worker and 0: events of one lane do not overlap */
    int32_t sm;                /* where the CTA ran; the worker */
    int32_t kind;              /* mok_trace_kind */
    int32_t tile, part;        /* table tile (piece of a weight gradient; -1: none), and which of its tasks */
    int32_t shared;            /* 1: of the shared expert */
} mok_trace_event;

/* Each lane keeps its youngest `events_per_lane` events from here on (0: 2048; rounded up to a power of two, 2^20 at most), in memory that the
 * library takes: 32 bytes each. Starting again forgets. Local; waits for the workspace's work. Graphs captured earlier are not traced. MOK_E_MEMORY. */
MOK_API mok_status mok_trace_start(mok_workspace *workspace, int64_t events_per_lane);
/* Ends it and gives the memory back. Fine without a trace. */
MOK_API mok_status mok_trace_stop(mok_workspace *workspace);
/* What was kept, sorted by begin. *count: room in, number out; events NULL: only the number. Waits for the workspace's work. *lost (may be NULL): events
 * that were overwritten. MOK_E_STATE without a trace. */
MOK_API mok_status mok_trace_read(mok_workspace *workspace, mok_trace_event *events, int64_t *count, int64_t *lost);

/* How far a rank's clock was from the first rank's, and how well that is known: half of the barriers' differences lie within accuracy_ns of it. */
typedef struct mok_trace_clock {
    int32_t rank, barriers;          /* rank barriers that both have in the trace; below 3 nothing is known, and nothing was moved */
    int64_t offset_ns, accuracy_ns;  /* ahead by so much; 0: not by more than accuracy_ns, so that nothing was moved */
} mok_trace_clock;
/* Brings the clocks of several ranks together, in place: events of the other ranks are moved to the clock of the first one (of the lowest number). All ranks
 * leave a rank barrier at one time, but for the way of its last signal (about a microsecond between GPUs); the middle of the differences counts. The trace of each
 * must end with the same call. *num_clocks: room in, number of ranks out; clocks NULL: only the number. Pure: any thread. MOK_E_ARG, MOK_E_MEMORY. */
MOK_API mok_status mok_trace_align(mok_trace_event *events, int64_t count, mok_trace_clock *clocks, int32_t *num_clocks);

typedef enum mok_trace_format {
    MOK_TRACE_CHROME = 1, /* JSON for chrome://tracing and ui.perfetto.dev: a process per rank, a thread per lane */
    MOK_TRACE_SVG = 2,    /* a picture: time to the right, a line per lane */
    MOK_TRACE_TEXT = 3,   /* share of each kind of lane's time, longest waits, link rate over time */
} mok_trace_format;
/* Writes events, of one rank or of several one behind the other, to a file; "-": to standard output. Pure: any thread. MOK_E_ARG, MOK_E_ENV with the reason. */
MOK_API mok_status mok_trace_save(const mok_trace_event *events, int64_t count, mok_trace_format format, const char *path);
/* "s2_gate_up", and its group; "unknown" for no kind. lane -> "math0"; static strings. */
MOK_API const char *mok_trace_kind_name(int32_t kind);
MOK_API const char *mok_trace_kind_group(int32_t kind);

/* What is notable but no error, a line at a time: ranks that come late, and when they came. From any thread, which must not call the library from
 * it. NULL: nobody listens (then MOK_LOG=stderr in the environment prints lines there). Otherwise the library never prints. */
MOK_API void mok_set_log(void (*line)(void *user, const char *text), void *user);

/* What this library can run here. */
typedef struct mok_backend_info {
    uint32_t struct_size, api_version;
    mok_backend_id id;
    char name[32];
    bool usable;
    char detail[480]; /* what it found, or why it is not usable */
    int32_t num_devices;
} mok_backend_info;
/* index 0, 1, …; MOK_E_ARG past the last. */
MOK_API mok_status mok_backend_query(int32_t index, mok_backend_info *out);

/* ---------------------------------------------------------------------------------------------------------------------
 * Experimental: define MOK_EXPERIMENTAL before including this header. What stands here may change or go in any version.
 * ------------------------------------------------------------------------------------------------------------------ */
#ifdef MOK_EXPERIMENTAL
/* The cpu backend's matrix product by itself, for benchmarks: c = a b^T with a [M, K] and b [N, K] bf16, c [M, N] fp32, all dense.
 * Every element is one chain of fused multiply-adds, k ascending. Runs in the calling thread; any number may call at once. Sizes from 0
 * to 2^20; K = 0 gives zeros. MOK_E_ARG, or MOK_E_MEMORY (about half a MiB of scratch is had per call). */
MOK_API mok_status mok_cpu_gemm(int64_t M, int64_t N, int64_t K, const void *a_bf16, const void *b_bf16, float *c);

/* Where the time of this rank's calls goes, for benchmarks; backend cuda only. From the start on, an event is recorded behind every launch of a
 * call that is not captured (host memory grows with their number until they are read). With MOK_FORWARD=staged in the environment
 * when the workspace is created, a forward has a launch for every stage and minibatch. */
typedef struct mok_stage_time {
    const char *operation, *stage; /* "forward", "s2_gate_up"; never freed */
    int64_t launches;
    double seconds;                /* on the GPU, from the end of the launch before it in the same call to its own end */
} mok_stage_time;
MOK_API mok_status mok_stage_times_start(mok_workspace *workspace);
/* Blocks until the calls so far have run, and begins anew. *count: room in `times` (48 is enough), then how many were written. Sums over the
 * calls. MOK_E_UNSUPPORTED on another backend, MOK_E_STATE before the start, MOK_E_ARG if there is too little room. */
MOK_API mok_status mok_stage_times_read(mok_workspace *workspace, mok_stage_time *times, int32_t *count);

/* The link by itself, for benchmarks; backend cuda only: the rows of a schedule travel once as in a pass, and nothing is computed. Collective: all
 * ranks with the same `work`; blocks until the rows have arrived and were checked. Made-up numbers are sent, into memory that was filled with
 * NaN just before. The schedule is of mok_schedule for this workspace, with top-k 1 and a ring of at least its rows; BF16.
 * MOK_LINK_PULL  rows of x into the ring, as s1_dispatch does
 * MOK_LINK_PUSH  rows to their tokens' slots, as the epilogue of s4_down does; with MOK_LINK_PULL: both at once
 * MOK_LINK_PLAIN instead of that code: whole rows, with as many bulk copies under way as fit. What the link gives at best.
 * MOK_LINK_SIGNAL with PLAIN: and the news that rows have arrived. Pulled: the puller counts them in its own memory, batch by batch. Pushed:
 *                a flag for every row, written at the token's rank once the row is complete there.
 * MOK_LINK_EMPTY with PLAIN and SIGNAL: the news alone.
 * MOK_LINK_MX    with PULL alone: the rows travel as in MXFP8, as e4m3 and scales, and land in the ring as s1_dispatch leaves them there */
typedef enum mok_link_work { MOK_LINK_PULL = 1, MOK_LINK_PUSH = 2, MOK_LINK_PLAIN = 4, MOK_LINK_SIGNAL = 8, MOK_LINK_EMPTY = 16, MOK_LINK_MX = 32 } mok_link_work;
typedef struct mok_link_args {
    const void *schedule;
    int64_t num_tokens;    /* as in the schedule */
    int32_t work;          /* mok_link_work, or'ed */
    int32_t blocks;        /* CTAs; 0: one on each SM */
} mok_link_args;
typedef struct mok_link_result {
    double seconds;        /* on this rank's GPU, from the barrier of all ranks to the end of its own moves */
    int64_t rows, rows_peer; /* in this rank's table; those whose token lives on another rank */
    int64_t wrong_words;   /* of 4 bytes, in what this rank received; flags and counters too. 0 unless something is broken */
    int64_t bytes_pulled_peer; /* over the link, of rows that s1_dispatch's code has counted as it moved them; 0 with PLAIN */
} mok_link_result;
/* MOK_E_UNSUPPORTED on another backend, with MXFP8 or another top-k; MOK_E_STATE if the table does not fit the ring; MOK_E_ARG. */
MOK_API mok_status mok_link_move(mok_workspace *workspace, const mok_link_args *args, void *stream, mok_link_result *result);
#endif

#ifdef __cplusplus
}
#endif
#endif /* MOK_H */
