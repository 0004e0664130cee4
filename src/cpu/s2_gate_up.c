/* s2_gate_up: gate = x Wg^T, up = x Wu^T for some columns of one tile, rounded to bf16; hosts s3_swiglu.
 * In: x rows of the ring (the shared expert: this rank's x). Out: h into ring_h (forward), gate/up into the context (forward
 * and recompute, saved rows) or into ring_gate/ring_up (backward, replayed rows). */
#include "cpu/run.h"

/* Where the task's gate and up go; NULL: nowhere. */
static void destination(const mk_cpu_run *run, const mk_rows *rows, mk_bf16 **gate, mk_bf16 **up)
{
    *gate = *up = NULL;
    if (rows->shared) {
        bool context = run->keep_shared && run->walk.pass != MK_PASS_BACKWARD;
        if (context || run->walk.pass == MK_PASS_BACKWARD) {
            *gate = (context ? run->saved_shared_gate : run->shared_gate) + rows->ring_row * rows->width;
            *up = (context ? run->saved_shared_up : run->shared_up) + rows->ring_row * rows->width;
        }
    } else if (run->walk.pass == MK_PASS_BACKWARD) {
        *gate = run->ring_gate + rows->ring_row * rows->width;
        *up = run->ring_up + rows->ring_row * rows->width;
    } else if (run->saved_gate && rows->table_row < run->d->saved_tiles * MK_ROW_TILE) {
        *gate = run->saved_gate + rows->table_row * rows->width;
        *up = run->saved_up + rows->table_row * rows->width;
    }
}

void mk_cpu_s2_gate_up(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task)
{
    mk_rows rows = mk_rows_of_task(run, task);
    int64_t hidden = run->d->hidden, col = mk_first_col(task.part), n = mk_num_cols(task.part, rows.width);
    const mk_bf16 *own_x = (const mk_bf16 *)(const void *)(run->w->heap + run->w->memory.x);
    mk_gemm_operand x = {(rows.shared ? own_x : run->ring_x) + rows.ring_row * hidden, hidden, 1};
    mk_gemm_operand wg = mk_from_column(mk_weight_operand(run, MK_GATE, rows.shared, rows.expert), col);
    mk_gemm_operand wu = mk_from_column(mk_weight_operand(run, MK_UP, rows.shared, rows.expert), col);
    mk_gemm_bf16(rows.count, n, hidden, x, wg, scratch->tile[0], MK_CPU_COLS, false, scratch->gemm);
    mk_gemm_bf16(rows.count, n, hidden, x, wu, scratch->tile[1], MK_CPU_COLS, false, scratch->gemm);

    mk_bf16 *gate_out, *up_out, gate[MK_CPU_COLS], up[MK_CPU_COLS];
    destination(run, &rows, &gate_out, &up_out);
    for (int64_t r = 0; r < rows.count; r++) {
        mk_bf16 *g = gate_out ? gate_out + r * rows.width + col : gate, *u = up_out ? up_out + r * rows.width + col : up;
        mk_floats_to_bf16(g, scratch->tile[0] + r * MK_CPU_COLS, n);
        mk_floats_to_bf16(u, scratch->tile[1] + r * MK_CPU_COLS, n);
        if (run->walk.pass == MK_PASS_FORWARD)
            mk_cpu_s3_swiglu(g, u, (rows.shared ? run->shared_h : run->ring_h) + (rows.ring_row + r) * rows.width + col, n, run->w->config.swiglu_limit);
    }
    if (run->walk.pass == MK_PASS_BACKWARD && !rows.shared && task.part == 0)
        mk_count(&run->counted.rows_replayed, rows.count);
}
