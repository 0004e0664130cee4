/* What the host hands to kernels: plain C structs, passed by value, compiled by gcc, g++ and nvcc. Pointers are device pointers.
 *
 * The kernels (extern "C", src/cuda/kernel/staged.cu), in the order in which a call launches them:
 *
 *   kernel                  params            grid x block                   what it does
 *   mok_weight_maps         mk_weight_maps_params any x 128                  only with weights by pointer: a tensor map of each expert's, a warp each
 *   mok_call_begin          mk_begin_params   any x 128                      inputs into this rank's heap; then the last block advances calls,
 *                                                                            clears tickets, writes the call head, and goes on as `then` says:
 *                                                                            meets the ranks (epoch barrier over GPUs) and checks the call
 *   mok_call_check          mk_open_params    1 x 128                        only of ranks that meet on the host (virtual ranks), after that:
 *                                                                            compares all heads; on trouble sets fault and skip;
 *                                                                            status != 0 (this rank refuses): skip, but no fault
 *   mok_s0_count            mk_s0_params      MK_SCHEDULE_CHUNKS/8 x 256     per chunk and expert: rows; finds bad ids
 *   mok_s0_scan             mk_s0_params      El (at least 1) x 256          chunk counts -> cursors; rows of each expert
 *   mok_s0_segments         mk_s0_params      1 x 256                        segments, pieces, head
 *   mok_s0_place            mk_s0_params      MK_SCHEDULE_CHUNKS/8 x 256     the row table
 *   mok_s0_copies           mk_s0_params      any x 256                      which rows are copied
 *   mok_s1_dispatch         mk_dispatch_params any x 32, MK_DISPATCH_SHARED bytes of shared memory; one minibatch
 *   mok_s2_gate_up_wide     mk_gemm_params    clusters of 2 x 384            gate/up and SwiGLU, one minibatch (or the shared expert)
 *   mok_s2_gate_up_narrow   the same, other tile
 *   mok_s4_down_wide, mok_s4_down_narrow  mk_gemm_params                     down and push, one minibatch (or the shared expert)
 *   mok_forward_fused       mk_forward_params clusters of 2 x 512 (Blackwell: 384), all SMs   s1 to s4 fused, instead of the launches of dispatch, gate_up and down
 *   mok_rank_barrier        mk_rank_params    1 x 128                        the end of forward and recompute: epoch barrier over GPUs (not for
 *                                                                            virtual ranks, nor for a rank alone)
 *   mok_s5_combine          mk_combine_params any x 256                      the weighted sum; the context's head
 *
 * Backward: the same beginning, then
 *
 *   mok_shared_scale        mk_combine_bwd_params any x 256                  s of every token, if there is a shared expert
 *   mok_backward_fused      mk_backward_params clusters of 2 x 384, all SMs  the whole walk; or one launch for each stage and step
 *   mok_rank_barrier
 *   mok_s5_combine_bwd      mk_combine_bwd_params any x 256                  dx, router-weight gradients, the output gate's gradient
 *
 * MXFP8 (kernels of mx_params.h come in too): mok_mx_quantise_rows brings x and dout into the heap, before mok_call_begin; and
 * mok_mx_widen_weights makes the bf16 copies of the routed weights that the products read (Blackwell's forward reads quantised ones where the caller has them; bf16 ones
 * are quantised by mok_mx_quantise_matrix, and mok_mx_take_part copies what begins inside a tile of scales). Then the same launches, with kernels mok_s1_dispatch_mx,
 * mok_s2_gate_up_wide_mx, mok_s2_gate_up_narrow_mx, mok_s4_down_wide_mx, mok_s4_down_narrow_mx (routed), mok_forward_fused_mx, mok_backward_fused_mx in place of those
 * without _mx; mok_s5_combine_bwd twice, first for the output gate's gradient alone. The shared expert's maps are of the caller's x and dout.
 *
 * Recompute is mok_forward_fused with `recompute` set (staged: without mok_s4_down), and mok_s5_combine with out = NULL. A rank that refuses launches mok_call_begin and,
 * but for a schedule, mok_rank_barrier.
 *
 * GEMM kernels take sizeof(GemmShared) = MK_GEMM_SHARED_WIDE or _NARROW bytes (checked in rows.cuh), the others MK_SMALL_SHARED.
 *
 * Every kernel after the check returns at once if the call is to be skipped, mok_rank_barrier included: so ranks that
 * call different operations, one of which has a barrier less, stay in step. All take the live sizes from the device; grids and
 * launches cover the capacity. */
#ifndef MK_CUDA_KERNEL_PARAMS_H
#define MK_CUDA_KERNEL_PARAMS_H

#include "cuda/arch/tensor_map.h"
#include "layout/memory.h"
#include "layout/trace.h"

enum { MK_SMALL_SHARED = 4608 };          /* dynamic shared memory of every kernel without a figure of its own */
enum { MK_GEMM_SHARED_WIDE = 230400, MK_GEMM_SHARED_NARROW = 230400 };
enum { MK_DISPATCH_AREA = 32768 };        /* bytes of the dispatch slots: two rows of H 7168, four of H 4096, eight of H 2048 */
enum { MK_DISPATCH_SHARED = MK_DISPATCH_AREA + 384 }; /* with their mbarriers and records */
enum { MK_BACKWARD_SHARED = 232448 };      /* with what tasks leave for their epilogues, and the trace: all there is */
enum { MK_FORWARD_SHARED = 231424 };      /* stages and dispatch slots (checked in forward.cuh) */

/* A fault as the host reads it, while kernels run: pinned host memory. Whoever writes mk_device_state.fault writes this too: the heads (of
 * a fault that has a call head: rank 0's and fault.rank's), the record, and its kind last, with st.release.sys. The host
 * clears both kinds when it takes the record. */
typedef struct mk_late {
    int32_t rank;              /* that came late to a rank barrier, */
    uint32_t waited_ms;        /* by so much; 0: nobody. Written last, with st.release.sys; the host clears it */
    uint64_t call;
} mk_late;
typedef struct mk_host_fault {
    mk_call_head zero, other;
    mk_fault fault;
    mk_late late;
} mk_host_fault;

/* One rank's layer: constant for the life of a workspace, but for the last lines. */
typedef struct mk_rank_params {
    mk_dims dims;
    mk_memory memory;
    char *heap, *local;        /* this rank's */
    char *const *heaps;        /* [P], in device memory */
    mk_host_fault *host_fault; /* may be NULL: nobody looks before the stream is idle */
    uint64_t fingerprint;
    uint64_t timeout_ns;       /* of a wait for another rank */
    float swiglu_limit;        /* infinity: none */
    int32_t router_bf16;       /* router weights come in bf16 */
    int32_t shared_gate;
    int32_t shares_gpu;        /* with other ranks of this process: barriers are the host's */
    mk_trace trace;            /* memory NULL: off */
    const void *own_x, *own_dout; /* of this call, [T, H] bf16: a rank alone dispatches from there; else NULL */
} mk_rank_params;

typedef struct mk_open_params {
    mk_rank_params rank;
    void *schedule;            /* schedule memory (mok_schedule: to be filled) */
    const void *context;       /* backward: context memory; else NULL */
    uint64_t layer;
    int64_t num_tokens;
    int32_t operation, parts;
    int32_t want_weights;      /* a backward that makes weight gradients */
    int32_t status;            /* MOK_OK, or this rank refuses with: */
    char sentence[460];
} mk_open_params;

enum { MK_BEGIN_OPENS, MK_BEGIN_CHECKS, MK_BEGIN_MEETS }; /* open only; and check (a rank alone); and meet the others before that */
typedef struct mk_begin_params {
    mk_open_params open;
    int32_t then;               /* MK_BEGIN_OPENS … */
    const int32_t *expert_ids;  /* [T, K] or NULL; every pointer may be NULL: nothing of that kind */
    const void *x, *dout;       /* [T, H] bf16, 16-byte aligned */
    const void *router_weights; /* [T, K] fp32 or bf16 */
} mk_begin_params;

/* Weights that come as one pointer for each expert: the maps that the GEMMs read them through. They are made on the device, because the addresses
 * are read while the pass runs. Places 0..2: gate, up and down of the routed experts; 3..5: of the shared one. */
enum { MK_WEIGHT_PLACES = 2 * MK_EXPERT_MAPS, MK_WEIGHT_MAPS_PER_BLOCK = 4 };
typedef struct mk_weight_source {
    const void *const *experts; /* [count] addresses of matrices; or NULL: */
    const void *packed;         /* the first matrix, */
    int64_t expert_bytes;       /* from one to the next */
    int64_t offset;             /* bytes from a matrix to the first row wanted */
    int32_t count;              /* 0: nothing to do */
    int32_t mapped;             /* else the pointers are only looked at */
} mk_weight_source;
typedef struct mk_weight_maps_params {
    mk_rank_params rank;
    mk_tensor_map like[MK_WEIGHT_PLACES]; /* [1, N, K] at any address */
    mk_weight_source source[MK_WEIGHT_PLACES];
    uint64_t *bad_weight;       /* in mk_device_state: where a pointer that cannot be used is noted */
} mk_weight_maps_params;

typedef struct mk_s0_params {
    mk_rank_params rank;
    void *schedule;
    int64_t num_tokens;
    const int32_t *expert_ids;                  /* [T, K], kept in the schedule for the reduce */
    int64_t *tokens_local, *tokens_global;      /* [E] or NULL */
} mk_s0_params;

typedef struct mk_dispatch_params {
    mk_rank_params rank;
    void *schedule;
    int32_t step;              /* minibatch, in the order of the forward's walk: 0 is the table's last */
    int32_t ticket;            /* as in mk_gemm_params: launches of both kinds alternate together */
} mk_dispatch_params;

/* Gate/up: num_cols = I (columns of h), b_low = gate rows, b_high = up rows of the weights.
 * Down: num_cols = H, b_low = b_high = the weights, b_high_row = half of the tile's columns. */
typedef struct mk_gemm_params {
    mk_tensor_map a;           /* routed: the ring buffer [ring, K]; shared: [T, K]; box mk_tensor_operand(…, tile rows / 2) */
    mk_tensor_map b_low, b_high; /* [El, N, K] (shared: [1, N, K]); box rows: half of the tile's columns */
    mk_tensor_map a_scales, b_low_scales, b_high_scales; /* of kernels in MXFP8 on Blackwell: then the operands are e4m3 */
    const mk_tensor_map *expert_maps; /* weights by pointer: MK_EXPERT_MAPS of each expert, in place of the two above; else NULL */
    mk_rank_params rank;
    void *schedule;
    void *context;             /* saved gate/up go there; NULL: nowhere */
    int64_t num_tokens;        /* shared expert: its rows */
    int32_t shared;            /* the shared expert's rows instead of the table's */
    int32_t recompute;         /* h is nobody's */
    int32_t step;              /* minibatch of the forward's walk */
    int32_t ticket;            /* 0 or 1, alternating: draws tickets[ticket], clears the other for the launch after it */
    int32_t num_cols, num_k_blocks, b_high_row;
} mk_gemm_params;

/* Clusters that leave in the middle of a pass (stage/yield.cuh). Hopper. */
typedef struct mk_yield_params {
    uint32_t interval_ns;      /* from one cluster's leaving to the next one's; 0: all stay */
    uint32_t num_resident;     /* clusters of the grid that are no spares */
} mk_yield_params;

/* The fused forward. Maps as in mk_gemm_params; those of the shared expert are unused without one. */
typedef struct mk_forward_params {
    mk_tensor_map ring_x, gate, up, ring_h, down;
    mk_tensor_map ring_x_scales, gate_scales, up_scales, ring_h_scales, down_scales;
    mk_tensor_map shared_x, shared_gate, shared_up, shared_h, shared_down;
    const mk_tensor_map *expert_maps, *shared_maps; /* weights by pointer: MK_EXPERT_MAPS of each expert, in place of gate, up, down; else NULL */
    mk_rank_params rank;
    void *schedule;
    void *context;             /* saved gate/up go there; NULL: nowhere */
    int64_t num_tokens;
    int32_t up_row;            /* row of `up` where the up rows start: 0, or I with combined weights */
    int32_t shared_up_row;
    int32_t recompute;         /* gate/up alone, of the rows that the context keeps */
    mk_yield_params yield;
} mk_forward_params;

/* Where one matrix's weight gradients go. */
enum { MK_GRAD_GATE, MK_GRAD_UP, MK_GRAD_DOWN, MK_NUM_GRADS };
typedef struct mk_grad_out {
    void *base;                /* of this rank's first expert */
    int64_t expert_bytes;      /* from one expert's to the next's */
    void *const *experts;      /* or one address for each expert, read by the pass; NULL in there: not of this expert. Both NULL: not wanted */
    int64_t experts_offset;    /* bytes from such an address to the first output */
    int64_t row_stride;        /* elements between neighbouring outputs */
    int32_t fp32, accumulate;
} mk_grad_out;

/* The fused backward, and its stages one by one. Maps as in mk_gemm_params, every box 64 x 64; dout and dgate, dup stand in for x and h. */
typedef struct mk_backward_params {
    /* mk_dims.mx_scaled: what is followed by its scales is e4m3, read from there on (map + 1), and gate, up and down are transposed weights. wgrad_…: only with
     * mk_dims.mx_wgrad; bf16 without. Their scales are of the transpose */
    mk_tensor_map ring_x, ring_x_scales, ring_dout, ring_dout_scales, ring_gate, ring_up, ring_h;
    mk_tensor_map gate, gate_scales, up, up_scales, down, down_scales;
    /* MXFP8: what dx_k's product and weight gradients read in place of the ring's, and a replay in place of gate and up */
    mk_tensor_map dgrad_dgate, dgrad_dgate_scales, dgrad_dup, dgrad_dup_scales, replay_gate, replay_gate_scales, replay_up, replay_up_scales;
    mk_tensor_map wgrad_x, wgrad_x_scales, wgrad_dout, wgrad_dout_scales, wgrad_dgate, wgrad_dgate_scales, wgrad_dup, wgrad_dup_scales, wgrad_h, wgrad_h_scales;
    mk_tensor_map shared_x, shared_dout, shared_dgate, shared_dup, shared_wh, shared_gate, shared_up, shared_down;
    const mk_tensor_map *expert_maps, *shared_maps; /* as in mk_forward_params */
    mk_rank_params rank;
    void *schedule;
    const void *context;       /* saved gate/up; NULL: none */
    const void *shared_output_gate; /* [H] bf16 or NULL */
    mk_grad_out grads[MK_NUM_GRADS], shared_grads[MK_NUM_GRADS];
    uint32_t *ready;           /* [El] or NULL: set to ready_value when an expert's weight gradients are complete */
    uint32_t ready_value;
    int64_t num_tokens;
    int32_t want_data, want_weights;
    int32_t kind, step;        /* kind 0: the whole pass; else an mk_task_kind: its tasks of this step only (staged) */
    mk_yield_params yield;     /* of a whole pass */
} mk_backward_params;

/* mok_shared_scale: s of every token. mok_s5_combine_bwd: the reduce, and the shared expert's output gate's gradient. */
typedef struct mk_combine_bwd_params {
    mk_rank_params rank;
    const void *schedule;
    const void *x;                  /* [T, H] */
    const void *shared_output_gate; /* [H] bf16 or NULL */
    void *dx;                       /* [T, H] bf16 or NULL */
    void *drouter_weights;          /* [T, K] fp32 or bf16, or NULL */
    mk_grad_out gate_grad;          /* [H]; base NULL: not wanted */
    int32_t gate_blocks;            /* blocks of the grid that compute it, the first ones */
    int64_t num_tokens;
} mk_combine_bwd_params;

typedef struct mk_combine_params {
    mk_rank_params rank;
    const void *schedule;
    void *context;             /* its head is written; NULL: none */
    const void *x;             /* for the shared expert's gate */
    const void *shared_output_gate; /* [H] bf16 or NULL */
    void *out;                 /* [T, H] bf16; NULL: only the context's head (recompute) */
    int64_t num_tokens;
} mk_combine_params;

#endif
