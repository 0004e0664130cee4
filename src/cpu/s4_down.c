/* s4_down: y = h Wd^T for some columns of one tile, rounded to bf16; hosts the pushing half of s5_combine: each row goes to
 * slot (t, k) of its token's rank. The shared expert's rows stay here, in shared_y. */
#include "cpu/run.h"

void mk_cpu_s4_down(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task)
{
    mk_rows rows = mk_rows_of_task(run, task);
    int64_t hidden = run->d->hidden, col = mk_first_col(task.part), n = mk_num_cols(task.part, hidden), pushed = 0;
    mk_gemm_operand h = {(rows.shared ? run->shared_h : run->ring_h) + rows.ring_row * rows.width, rows.width, 1};
    mk_product product = {.matrix = MK_DOWN, .shared = rows.shared, .expert = rows.expert, .rows = rows.count, .first = col, .n = n, .depth = rows.width};
    mk_cpu_multiply(run, scratch, &product, h, scratch->tile[0], MK_CPU_COLS, false);
    for (int64_t r = 0; r < rows.count; r++) {
        const float *y = scratch->tile[0] + r * MK_CPU_COLS;
        if (rows.shared) {
            mk_floats_to_bf16(run->shared_y + (rows.ring_row + r) * hidden + col, y, n);
            continue;
        }
        const mk_row *row = &run->table.rows[rows.table_row + r];
        mk_bf16 *slots = (mk_bf16 *)(void *)(run->w->heaps[row->src_rank] + run->w->memory.slots);
        mk_floats_to_bf16(slots + row->src_slot * hidden + col, y, n);
        pushed += row->src_rank != run->d->rank;
    }
    mk_count(&run->counted.bytes_pushed_peer, pushed * 2 * n);
}
