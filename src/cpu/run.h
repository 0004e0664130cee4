/* One pass on one rank of the CPU backend: everything its tasks need. Made by cpu/pass.c, read by the stage files. */
#ifndef MK_CPU_RUN_H
#define MK_CPU_RUN_H

#include "backend/backend.h"
#include "cpu/bf16.h"
#include "cpu/gemm.h"
#include "cpu/mx.h"
#include "cpu/pool.h"
#include "layout/depend.h"

/* How the CPU backend cuts GEMMs: columns of one task, and the tile of a weight-gradient task. Any choice gives the same bits. */
enum { MK_CPU_COLS = 512, MK_CPU_WGRAD_ROWS = 256, MK_CPU_WGRAD_COLS = 1024, MK_CPU_TILE_FLOATS = MK_CPU_WGRAD_ROWS * MK_CPU_WGRAD_COLS };

/* MXFP8: as much of k, or of a weight gradient's rows, as is quantised at a time. */
enum { MK_CPU_MX_DEPTH = 512, MK_CPU_MX_ROWS = 256,
       MK_CPU_MX_LEFT = MK_CPU_WGRAD_ROWS * MK_CPU_MX_ROWS, MK_CPU_MX_RIGHT = MK_CPU_WGRAD_COLS * MK_CPU_MX_ROWS };
_Static_assert(MK_ROW_TILE * MK_CPU_MX_DEPTH <= MK_CPU_MX_LEFT && MK_CPU_COLS * MK_CPU_MX_DEPTH <= MK_CPU_MX_RIGHT, "the operands of a product fit");

/* A worker's private memory. */
typedef struct mk_cpu_scratch {
    float *tile[2];           /* [MK_CPU_TILE_FLOATS], [MK_ROW_TILE * MK_CPU_COLS] */
    mk_bf16 *mx_left, *mx_right; /* MXFP8: operands of one product, quantised and widened again; [MK_CPU_MX_LEFT], [MK_CPU_MX_RIGHT] */
    void *gemm;
} mk_cpu_scratch;

/* The backend's part of a workspace. */
typedef struct mk_cpu_state {
    mk_pool *pool;
    mk_cpu_scratch *scratch; /* [workers] */
} mk_cpu_state;

typedef struct mk_cpu_run {
    mok_workspace *w;
    const mk_dims *d;
    const mk_call *call;
    mk_walk walk;
    mk_table table;
    const mok_weights *weights;
    const mok_grads *grads;          /* NULL in forward and recompute */
    bool need_x, want_data, want_weights;
    bool mx;                         /* dtype MXFP8 */
    const mk_bf16 *own_x, *own_dout; /* this rank's tokens in bf16, for the shared expert */

    /* Local memory, see layout/memory.h. */
    mk_bf16 *ring_x, *ring_dout, *ring_gate, *ring_up, *ring_h;
    float *ring_weight, *ring_dweight;
    mk_bf16 *shared_gate, *shared_up, *shared_h, *shared_y;
    float *shared_scale, *shared_dpartial, *wgrad_partial;
    uint32_t *counters;
    /* Context memory, or NULL. */
    mk_bf16 *saved_gate, *saved_up;  /* MXFP8: rows of mx/mx.h instead */
    mk_bf16 *saved_shared_gate, *saved_shared_up;
    bool keep_shared;                /* shared gate/up are in the context (forward: go there) */

    int64_t ticket;                  /* next task number; workers draw it */
    int32_t failed;                  /* a task met an error: the workers stop */
    mok_status status;
    char sentence[512];
    mok_stats counted;               /* of this pass, added to the workspace's at its end */
} mk_cpu_run;

/* Row r of a table tile in the ring: the tile's slot is tile mod ring_tiles. */
static inline int64_t mk_ring_row(const mk_cpu_run *run, int64_t tile) { return tile % run->d->ring_tiles * MK_ROW_TILE; }
static inline void mk_count(int64_t *counter, int64_t n) { __atomic_fetch_add(counter, n, __ATOMIC_RELAXED); }

/* One GEMM operand out of a weight, whichever way it lies: element (n, k) of expert e. */
typedef enum mk_matrix { MK_GATE, MK_UP, MK_DOWN } mk_matrix;
typedef struct mk_strides { int64_t offset, row, col; } mk_strides; /* of the [outputs, inputs] matrix, in elements */
mk_strides mk_weight_strides(const mok_config *cfg, mk_matrix matrix, int64_t outputs, int64_t inputs);
/* Elements of one expert's stored matrix. */
int64_t mk_weight_elements(const mok_config *cfg, mk_matrix matrix, int64_t outputs, int64_t inputs);
/* The matrix of expert e (local index; 0 for the shared expert), as [outputs, inputs]: outer index n over outputs, k over inputs. */
mk_gemm_operand mk_weight_operand(const mk_cpu_run *run, mk_matrix matrix, bool shared, int64_t e);
/* The same with outer index over inputs and k over outputs, for dgrad. */
static inline mk_gemm_operand mk_transposed(mk_gemm_operand o) { return (mk_gemm_operand){o.data, o.k_stride, o.outer_stride}; }
/* The operand from its element (n, k) on. */
static inline mk_gemm_operand mk_operand_from(mk_gemm_operand o, int64_t n, int64_t k)
{
    return (mk_gemm_operand){o.data + n * o.outer_stride + k * o.k_stride, o.outer_stride, o.k_stride};
}

/* Product with one expert's weight: C[rows, n] (+)= sum over k < depth of A(row, k) * W(first + i, k), W transposed for dgrad. In MXFP8 a
 * routed weight is quantised along k (or was, by the caller); A is taken as it is, or quantised along k too. */
typedef struct mk_product {
    mk_matrix matrix;
    bool transposed, shared, quantise_a;
    int64_t expert;              /* local; 0 for shared */
    int64_t rows, first, n, depth;
} mk_product;
void mk_cpu_multiply(const mk_cpu_run *run, mk_cpu_scratch *scratch, const mk_product *p, mk_gemm_operand a, float *c, int64_t ldc, bool accumulate);

/* Waits, as a task does, until a counter has reached a count. False: the pass has failed meanwhile. Acquire; pairs with mk_cpu_signal. */
bool mk_cpu_wait_counter(mk_cpu_run *run, int32_t counter, int64_t index, uint32_t count);
/* Adds to a counter. Release; pairs with mk_cpu_wait_counter. Returns the new value. */
uint32_t mk_cpu_signal(mk_cpu_run *run, int32_t counter, int64_t index, uint32_t n);
/* Records the first error of a pass, from the thread's sentence. */
void mk_cpu_fail(mk_cpu_run *run, mok_status status);

/* Rows that a GEMM task works on: a tile of the table, or of the shared expert. */
typedef struct mk_rows {
    bool shared;
    int64_t expert;        /* local; 0 for shared */
    int64_t count;         /* valid rows */
    int64_t ring_row;      /* first row in the ring buffers; in the shared buffers if shared */
    int64_t table_row;     /* first row of the table */
    int64_t width;         /* I or Is */
} mk_rows;
mk_rows mk_rows_of_task(const mk_cpu_run *run, mk_task task);
/* [first, end) of the columns of part `part`, MK_CPU_COLS each. */
static inline int64_t mk_first_col(int32_t part) { return (int64_t)part * MK_CPU_COLS; }
static inline int64_t mk_num_cols(int32_t part, int64_t width) { return mk_min(MK_CPU_COLS, width - mk_first_col(part)); }

/* The stages. Each takes one task and does all of it; who may run it when is decided in cpu/pass.c. */
mok_status mk_cpu_s0_schedule(mok_workspace *w, const mk_call *call);
void mk_cpu_s1_dispatch(mk_cpu_run *run, mk_task task);
void mk_cpu_s2_gate_up(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task);
void mk_cpu_s4_down(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task);
void mk_cpu_s4_down_bwd(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task);
void mk_cpu_s2_gate_up_bwd(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task);
void mk_cpu_wgrad(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task);
void mk_cpu_shared_wgrad(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task);
int32_t mk_cpu_wgrad_tasks(const mk_dims *d, bool shared);
/* After the last barrier: the weighted sum of a token's rows. Tokens [first, end). */
void mk_cpu_s5_combine(mk_cpu_run *run, int64_t first, int64_t end);
void mk_cpu_s5_combine_bwd(mk_cpu_run *run, int64_t first, int64_t end);

/* s3, hosted by s2 and s4_bwd. */
float mk_silu(float x);
void mk_cpu_s3_swiglu(const mk_bf16 *gate, const mk_bf16 *up, mk_bf16 *h, int64_t n, float limit);
/* One group of MK_DW_GROUP columns or less: dh (fp32, unweighted) -> dgate, dup, w h (in place of gate, up, into h). Returns the partial <dh, h>. */
float mk_cpu_s3_swiglu_bwd(const float *dh, const mk_bf16 *gate, const mk_bf16 *up, float weight, mk_bf16 *dgate, mk_bf16 *dup, mk_bf16 *weighted_h,
                           int64_t n, float limit);
/* The shared expert's gate: sigmoid(<x, wgate>), 1 without gate; and the gradient da of its argument, from the partials of s4_bwd. */
float mk_cpu_shared_gate(const mk_cpu_run *run, int64_t token);
float mk_cpu_shared_dgate(const mk_cpu_run *run, int64_t token);

/* cpu/pass.c */
mok_status mk_cpu_pass(mok_workspace *w, const mk_call *call);

#endif
