/* s4_down_bwd: dh' = dout Wd for some columns of I of one tile, not weighted; hosts the SwiGLU backward, the partial sums of the
 * router-weight gradient and the weighting. In: dout rows, gate/up (context or replayed). Out: dgate, dup and w h in the ring
 * (dgate and dup where a replay left gate and up), partials in ring_dweight. Shared expert: the same with s for w. */
#include "cpu/run.h"

typedef struct { const mk_bf16 *gate, *up; } saved_rows;

static saved_rows gate_up_of(const mk_cpu_run *run, const mk_rows *rows)
{
    if (rows->shared)
        return (saved_rows){(run->keep_shared ? run->saved_shared_gate : run->shared_gate) + rows->ring_row * rows->width,
                            (run->keep_shared ? run->saved_shared_up : run->shared_up) + rows->ring_row * rows->width};
    if (rows->table_row < run->walk.replay_from * MK_ROW_TILE)
        return (saved_rows){run->saved_gate + rows->table_row * rows->width, run->saved_up + rows->table_row * rows->width};
    return (saved_rows){run->ring_gate + rows->ring_row * rows->width, run->ring_up + rows->ring_row * rows->width};
}

void mk_cpu_s4_down_bwd(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task)
{
    mk_rows rows = mk_rows_of_task(run, task);
    int64_t hidden = run->d->hidden, width = rows.width, col = mk_first_col(task.part), n = mk_num_cols(task.part, width);
    const mk_bf16 *own_dout = (const mk_bf16 *)(const void *)(run->w->heap + run->w->memory.dout);
    mk_gemm_operand dout = {(rows.shared ? own_dout : run->ring_dout) + rows.ring_row * hidden, hidden, 1};
    mk_gemm_operand wd = mk_from_column(mk_transposed(mk_weight_operand(run, MK_DOWN, rows.shared, rows.expert)), col);
    mk_gemm_bf16(rows.count, n, hidden, dout, wd, scratch->tile[0], MK_CPU_COLS, false, scratch->gemm);

    saved_rows saved = gate_up_of(run, &rows);
    mk_bf16 *dgate = rows.shared ? run->shared_gate : run->ring_gate, *dup = rows.shared ? run->shared_up : run->ring_up;
    mk_bf16 *weighted_h = rows.shared ? run->shared_h : run->ring_h;
    float *partial = rows.shared ? run->shared_dpartial : run->ring_dweight;
    for (int64_t r = 0; r < rows.count; r++) {
        float weight = rows.shared ? run->shared_scale[rows.ring_row + r] : run->ring_weight[rows.ring_row + r];
        for (int64_t c = 0; c < n; c += MK_DW_GROUP) {
            int64_t in_tile = r * width + col + c, at = (rows.ring_row + r) * width + col + c;
            partial[at / MK_DW_GROUP] = mk_cpu_s3_swiglu_bwd(scratch->tile[0] + r * MK_CPU_COLS + c, saved.gate + in_tile, saved.up + in_tile, weight,
                                                             dgate + at, dup + at, weighted_h + at, MK_DW_GROUP, run->w->config.swiglu_limit);
        }
    }
}
