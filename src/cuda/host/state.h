/* The cuda backend's part of a workspace, and the files that share it:
 *
 *   cuda.c    the backend table: open, close, check, wait, stats, memory
 *   call.c    one call: which kernels, in which order, with which parameters and grids
 *   maps.c    the tensor maps of the GEMMs
 *   weights.c weights by pointer
 *   mx.c      quantisation of weights, without a workspace; a layer's weights widened
 *   meet.c    the barrier of ranks that share a GPU
 *   times.c   how long each stage took, for benchmarks
 *   link.c    the link by itself, for benchmarks
 *   fault.c   what the device found wrong, in a sentence */
#ifndef MK_CUDA_STATE_H
#define MK_CUDA_STATE_H

#include "backend/backend.h"
#include "base/error.h"
#include "cuda/host/device.h"
#include "cuda/kernel/params.h"
#include "layout/walk.h"

/* The GEMMs of a forward. */
typedef enum mk_gemm_id { MK_GEMM_GATE_UP, MK_GEMM_DOWN, MK_GEMM_SHARED_GATE_UP, MK_GEMM_SHARED_DOWN, MK_NUM_GEMMS } mk_gemm_id;

/* One GEMM: its tile (chosen at open) and its maps for the call that is being made. */
typedef struct mk_cuda_gemm {
    mk_tensor_map a, b_low, b_high, a_scales, b_low_scales, b_high_scales;
    mk_cuda_kernel kernel;
    bool narrow;
    bool scaled;                          /* operands are MXFP8 as it is: a_scales ... are maps too */
    int32_t num_cols, num_k_blocks, b_high_row;
    int64_t tasks_per_tile;               /* clusters' tasks that one row tile makes */
} mk_cuda_gemm;

/* The tensor maps of a backward, in the order of mk_backward_params. */
typedef enum mk_backward_map {
    MK_MAP_X, MK_MAP_DOUT, MK_MAP_GATE, MK_MAP_UP, MK_MAP_H, MK_MAP_WGATE, MK_MAP_WUP, MK_MAP_WDOWN,
    MK_MAP_SHARED,                        /* the same again for the shared expert */
    MK_MAP_MX = 2 * MK_MAP_SHARED,        /* MXFP8: of the routed experts, what is in buffers of its own */
    MK_MAP_DGRAD_DGATE = MK_MAP_MX, MK_MAP_DGRAD_DUP, MK_MAP_REPLAY_GATE, MK_MAP_REPLAY_UP, MK_MAP_WGRAD_X, MK_MAP_WGRAD_DOUT, MK_MAP_WGRAD_DGATE,
    MK_MAP_WGRAD_DUP, MK_MAP_WGRAD_H,
    MK_MAP_SCALES,                        /* of operands in MXFP8 as it is: */
    MK_MAP_X_SCALES = MK_MAP_SCALES, MK_MAP_DOUT_SCALES, MK_MAP_WGATE_SCALES, MK_MAP_WUP_SCALES, MK_MAP_WDOWN_SCALES, MK_MAP_DGRAD_DGATE_SCALES,
    MK_MAP_DGRAD_DUP_SCALES, MK_MAP_REPLAY_GATE_SCALES, MK_MAP_REPLAY_UP_SCALES, MK_MAP_WGRAD_X_SCALES, MK_MAP_WGRAD_DOUT_SCALES, MK_MAP_WGRAD_DGATE_SCALES,
    MK_MAP_WGRAD_DUP_SCALES, MK_MAP_WGRAD_H_SCALES,
    MK_NUM_BACKWARD_MAPS
} mk_backward_map;

/* Encoded maps, by what they describe: two places for each hash, for those who came last. Enough for the layers of a large model. */
enum { MK_CUDA_KEPT_MAPS = 4096 };
typedef struct mk_cuda_kept_map {
    mk_tensor tensor;                     /* rank 0: empty */
    uint64_t map[16];                     /* an mk_tensor_map without its alignment */
} mk_cuda_kept_map;

typedef struct mk_cuda_times mk_cuda_times; /* times.c */

/* What ranks that share a GPU tell each other at a barrier. */
typedef struct mk_cuda_arrival {
    mk_cu_event event;       /* recorded behind everything that the barrier waits for */
    uint64_t layer;
    int32_t operation;
    uint32_t workspace;      /* its number in the group */
    int32_t refused;         /* the rank refuses this call */
    int32_t failed;          /* a mok_status: its driver failed */
    char sentence[MK_ERROR_BYTES];
} mk_cuda_arrival;

/* Pointers that were found to be good, kept in the same way, one place for each hash. */
enum { MK_CUDA_SEEN_POINTERS = 4096 };

typedef struct mk_cuda_state {
    mk_cuda_gemm gemm[MK_NUM_GEMMS];
    mk_tensor_map backward[MK_NUM_BACKWARD_MAPS];
    mk_cuda_kept_map *maps;          /* [MK_CUDA_KEPT_MAPS] */
    mk_rank_params rank;
    mk_cuda_device *device;          /* the group's */
    const mk_cuda_driver *api;
    mk_cu_pointer heaps;             /* [P] in device memory */
    mk_host_fault *fault;            /* pinned */
    mk_cu_event done;                /* behind the last call that was not captured */
    mk_cu_stream last_stream;        /* of that call */
    bool called, captured;           /* there was such a call; there was a captured one */
    bool clear_fault;                /* the device's copy of a record that the host has taken is still to be cleared */
    int32_t reserve_clusters;
    mk_cuda_times *times;            /* NULL: nobody asked for stage times */
    bool fused;                      /* the forward: one launch instead of one per stage and minibatch */
    bool fused_backward;
    /* Ranks that share a GPU: */
    bool meets_on_host;
    mk_cu_event meeting[2];          /* by parity of the barrier */
    uint64_t meetings;
    mk_cuda_arrival *arrivals;       /* [P] */
    const void *seen[MK_CUDA_SEEN_POINTERS];
} mk_cuda_state;

/* maps.c */
/* wish: "wide", "narrow" or NULL. A fused forward has its own tile whatever the wish: the wide one's boxes in BF16, the narrow one's in MXFP8. */
void mk_cuda_choose_tiles(mok_workspace *w, const char *wish);
mok_status mk_cuda_encode_gemm(mok_workspace *w, mk_gemm_id id, const mok_forward_args *a);
mok_status mk_cuda_encode_backward(mok_workspace *w, const mok_backward_args *a);

/* weights.c */
/* Do the GEMMs see each expert's weights (or the shared expert's) through maps of its own? If one weight comes by pointer, all do. */
bool mk_cuda_maps_experts(const mok_workspace *w, const mok_weights *weights, bool shared);
/* Those maps, which GEMMs take instead of maps of all experts; NULL: packed. */
const mk_tensor_map *mk_cuda_expert_maps(const mok_workspace *w, const mok_weights *weights, bool shared);
/* Bytes from the first row of gate to the first of up, in a matrix that holds both. */
int64_t mk_cuda_up_offset(const mok_workspace *w, int64_t width);
/* What makes the maps of a pass, behind mk_cuda_encode_gemm or _backward, and what only looks at the pointers that mok_mx_widen is given. -> for how many matrices;
 * 0: there is nothing to launch. */
int64_t mk_cuda_weight_maps(const mok_workspace *w, mk_operation operation, const mok_weights *weights, int64_t num_tokens, mk_weight_maps_params *p);
int64_t mk_cuda_weights_to_widen(const mok_workspace *w, const mok_weights *weights, mk_weight_maps_params *p);

/* yield.c */
/* Of a kernel in clusters: as many as fit beside what is reserved. */
int64_t mk_cuda_resident_clusters(const mok_workspace *w, mk_cuda_kernel kernel);
/* Blocks of a whole pass of so many products of [rows, H] and [H, I]: the resident clusters', and those that come when some of them leave. */
int64_t mk_cuda_pass_blocks(const mok_workspace *w, mk_cuda_kernel kernel, int64_t num_tokens, int products, mk_yield_params *yield);

/* call.c */
mok_status mk_cuda_run(mok_workspace *w, const mk_call *call, void *stream);
void mk_cuda_refuse(mok_workspace *w, mk_operation operation, uint64_t layer, mok_status status, void *stream);

/* mx.c */
mok_status mk_cuda_mx_quantise(const mok_mx_quantise_args *args, void *stream);
/* Which of a weight's two quantisations: MK_QUANT_FORWARD, what the forward (and a replay) multiplies with; _DGRAD. */
typedef enum mk_quant { MK_QUANT_FORWARD, MK_QUANT_DGRAD } mk_quant;
/* Where the products read a quantisation of the routed weights, widened: in what the call was given, or else in the workspace. */
char *mk_cuda_wide(const mok_workspace *w, const void *given, mk_quant quant);
/* What makes the widened copy of one routed weight (MK_GRAD_GATE, _UP, _DOWN), out of whatever the caller gives, in `wide`. */
mk_mx_weight_params mk_cuda_mx_weight(const mok_workspace *w, const mok_weights *weights, int matrix, mk_quant quant, char *wide);
int64_t mk_cuda_mx_widen_pieces(const mk_mx_weight_params *p); /* blocks that have something to do */
/* mok_mx_widen, its pointers checked; with the context current. */
mok_status mk_cuda_mx_widen(mok_workspace *w, const mok_mx_widen_args *args, void *stream);

/* On Blackwell: an operand as its tensor cores read it, e4m3 [count, rows, cols] with blocks along cols, and scales in atoms of 128 x 128 (mx/mx.h). In bytes:
 * from one row, matrix, row of atoms, matrix's atoms to the next. */
typedef struct mk_cuda_mx_operand {
    const char *data, *scales;
    int64_t count, rows, cols, row_bytes, matrix_bytes, atoms_bytes, scales_bytes;
    bool own;                             /* in the workspace, where the call puts it: what the caller gives is bf16, or cut where no atom begins */
} mk_cuda_mx_operand;
/* One routed weight as B of the products with this quantisation: [El, outputs, inputs], or for dgrad [El, inputs, outputs]. */
mk_cuda_mx_operand mk_cuda_mx_operand_of(const mok_workspace *w, const mok_weights *weights, int matrix, mk_quant quant);
/* What makes one that is `own`, of a quantised weight (mok_mx_take_part), or of a bf16 one (mok_mx_quantise_matrix, for dgrad _turned). */
mk_mx_part_params mk_cuda_mx_part(const mok_workspace *w, const mok_weights *weights, int matrix, mk_quant quant);
mk_mx_matrix_params mk_cuda_mx_quantise_params(const mok_workspace *w, const mok_weights *weights, int matrix, mk_quant quant);

/* meet.c: with the context current. `status` and `refused`: how this rank comes. *skip: the rest of the call does not take place,
 * because some rank refuses it or calls another operation; the device says so too. */
mok_status mk_cuda_meet(mok_workspace *w, mk_cu_stream stream, mk_operation operation, uint64_t layer, mok_status status, bool refused, bool *skip);

/* times.c: with the context current and s->times not NULL, behind the beginning of a call, and behind each of its launches. kind: of a
 * launch of the backward's kernel. */
mok_status mk_cuda_times_call(mk_cuda_state *s, mk_operation operation, mk_cu_stream stream);
mok_status mk_cuda_times_launch(mk_cuda_state *s, mk_operation operation, mk_cuda_kernel kernel, mk_task_kind kind, mk_cu_stream stream);
mok_status mk_cuda_times_start(mok_workspace *w);
mok_status mk_cuda_times_read(mok_workspace *w, struct mok_stage_time *times, int32_t *count);
void mk_cuda_times_free(mk_cuda_state *s);

/* link.c: mok_link_move, its arguments checked as far as they concern every backend. */
mok_status mk_cuda_link_move(mok_workspace *w, const struct mok_link_args *args, void *stream, struct mok_link_result *result);

/* fault.c: takes the record that is there, if any: MOK_OK or its status and sentence. Does not wait. idle: the device is, so that its own
 * copy may be read and cleared too. */
mok_status mk_cuda_take_fault(mok_workspace *w, const mk_device_state *idle);

/* A place among 2^bits for what is at an address. */
static inline size_t mk_cuda_place(const void *address, uint64_t salt, int bits)
{
    return (size_t)((((uint64_t)(uintptr_t)address >> 4) + salt) * 0x9e3779b97f4a7c15u >> (64 - bits));
}

static inline mk_cu_pointer mk_cu_address(const void *p) { return (mk_cu_pointer)(uintptr_t)p; }

#endif
