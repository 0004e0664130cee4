/* s4_down_bwd: dh' = dout Wd for some columns of I of one tile, not weighted; hosts the SwiGLU backward, the partial sums of the
 * router-weight gradient and the weighting. In: dout rows, gate/up (context or replayed). Out: dgate, dup and w h in the ring
 * (dgate and dup where a replay left gate and up), partials in ring_dweight. Shared expert: the same with s for w. */
#include "cpu/run.h"

/* What s2_gate_up_bwd will quantise. */
static void count_not_finite(mk_cpu_run *run, const mk_rows *rows, int64_t col, int64_t n)
{
    int64_t count = 0;
    for (int64_t r = 0; r < rows->count; r++) {
        int64_t at = (rows->ring_row + r) * rows->width + col;
        for (int64_t i = at; i < at + n; i++)
            count += !mk_mx_is_finite(run->ring_gate[i]) + !mk_mx_is_finite(run->ring_up[i]);
    }
    mk_count(&run->counted.mx_not_finite, count);
}

/* Columns of a row's gate and up. */
typedef struct gate_up {
    const mk_bf16 *gate, *up;
    mk_bf16 wide[2][MK_CPU_COLS]; /* where a saved row of MXFP8 is widened to */
} gate_up;

static const mk_bf16 *widen_saved(const mk_cpu_run *run, const mk_bf16 *saved, int64_t row, int64_t col, int64_t n, mk_bf16 *to)
{
    const uint8_t *from = (const uint8_t *)saved + row * MK_ROW_STRIDE(run->d, run->d->intermediate);
    mk_cpu_mx_widen(from + col, from + run->d->intermediate + col / MK_MX_BLOCK, n, to);
    return to;
}

static void find_gate_up(const mk_cpu_run *run, const mk_rows *rows, int64_t r, int64_t col, int64_t n, gate_up *found)
{
    bool saved = rows->shared ? run->keep_shared : rows->table_row < run->walk.replay_from * MK_ROW_TILE;
    int64_t row = (rows->shared || !saved ? rows->ring_row : rows->table_row) + r, at = row * rows->width + col;
    if (!rows->shared && saved && run->mx) {
        found->gate = widen_saved(run, run->saved_gate, row, col, n, found->wide[0]);
        found->up = widen_saved(run, run->saved_up, row, col, n, found->wide[1]);
    } else if (rows->shared) {
        found->gate = (saved ? run->saved_shared_gate : run->shared_gate) + at;
        found->up = (saved ? run->saved_shared_up : run->shared_up) + at;
    } else {
        found->gate = (saved ? run->saved_gate : run->ring_gate) + at;
        found->up = (saved ? run->saved_up : run->ring_up) + at;
    }
}

void mk_cpu_s4_down_bwd(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task)
{
    mk_rows rows = mk_rows_of_task(run, task);
    int64_t hidden = run->d->hidden, width = rows.width, col = mk_first_col(task.part), n = mk_num_cols(task.part, width);
    mk_gemm_operand dout = {(rows.shared ? run->own_dout : run->ring_dout) + rows.ring_row * hidden, hidden, 1};
    mk_product product = {.matrix = MK_DOWN, .transposed = true, .shared = rows.shared, .expert = rows.expert, .rows = rows.count, .first = col, .n = n,
                          .depth = hidden};
    mk_cpu_multiply(run, scratch, &product, dout, scratch->tile[0], MK_CPU_COLS, false);

    mk_bf16 *dgate = rows.shared ? run->shared_gate : run->ring_gate, *dup = rows.shared ? run->shared_up : run->ring_up;
    mk_bf16 *weighted_h = rows.shared ? run->shared_h : run->ring_h;
    float *partial = rows.shared ? run->shared_dpartial : run->ring_dweight;
    gate_up from;
    for (int64_t r = 0; r < rows.count; r++) {
        float weight = rows.shared ? run->shared_scale[rows.ring_row + r] : run->ring_weight[rows.ring_row + r];
        find_gate_up(run, &rows, r, col, n, &from);
        for (int64_t c = 0; c < n; c += MK_DW_GROUP) {
            int64_t at = (rows.ring_row + r) * width + col + c;
            partial[at / MK_DW_GROUP] = mk_cpu_s3_swiglu_bwd(scratch->tile[0] + r * MK_CPU_COLS + c, from.gate + c, from.up + c, weight, dgate + at,
                                                             dup + at, weighted_h + at, MK_DW_GROUP, run->w->config.swiglu_limit);
        }
    }
    if (run->mx && !rows.shared)
        count_not_finite(run, &rows, col, n);
}
