/* s2_gate_up: gate = x Wg^T, up = x Wu^T for some columns of one tile, rounded to bf16; hosts s3_swiglu.
 * In: x rows of the ring (the shared expert: this rank's x). Out: h into ring_h (forward), gate/up into the context (forward
 * and recompute, saved rows) or into ring_gate/ring_up (backward, replayed rows). MXFP8: h as s4_down multiplies it, quantised and widened
 * again; gate/up quantised in the context, and in the ring as they come out of it. */
#include "cpu/run.h"

/* Where the task's gate and up go in bf16; NULL: nowhere. */
static bool is_saved(const mk_cpu_run *run, const mk_rows *rows)
{
    return run->walk.pass != MK_PASS_BACKWARD && run->saved_gate && !rows->shared && rows->table_row < run->d->saved_tiles * MK_ROW_TILE;
}

/* Columns [col, col + n) of a saved row. */
static void save_mx(const mk_cpu_run *run, mk_bf16 *saved, int64_t row, const mk_bf16 *values, int64_t col, int64_t n)
{
    uint8_t *to = (uint8_t *)saved + row * MK_ROW_STRIDE(run->d, run->d->intermediate);
    mk_cpu_mx_quantise(values, n, to + col, to + run->d->intermediate + col / MK_MX_BLOCK);
}

/* What MXFP8 does with a row's gate, up and h once they are there. */
static void finish_mx(mk_cpu_run *run, const mk_rows *rows, int64_t r, mk_bf16 *gate, mk_bf16 *up, mk_bf16 *h, int64_t col, int64_t n)
{
    if (is_saved(run, rows)) {
        save_mx(run, run->saved_gate, rows->table_row + r, gate, col, n);
        save_mx(run, run->saved_up, rows->table_row + r, up, col, n);
    }
    if (run->walk.pass == MK_PASS_BACKWARD) {
        mk_cpu_mx_round(gate, n, gate);
        mk_cpu_mx_round(up, n, up);
    }
    if (run->walk.pass == MK_PASS_FORWARD)
        mk_count(&run->counted.mx_not_finite, mk_cpu_mx_round(h, n, h));
}

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
    } else if (!run->mx && is_saved(run, rows)) {
        *gate = run->saved_gate + rows->table_row * rows->width;
        *up = run->saved_up + rows->table_row * rows->width;
    }
}

void mk_cpu_s2_gate_up(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task)
{
    mk_rows rows = mk_rows_of_task(run, task);
    int64_t hidden = run->d->hidden, col = mk_first_col(task.part), n = mk_num_cols(task.part, rows.width);
    mk_gemm_operand x = {(rows.shared ? run->own_x : run->ring_x) + rows.ring_row * hidden, hidden, 1};
    mk_product product = {.matrix = MK_GATE, .shared = rows.shared, .expert = rows.expert, .rows = rows.count, .first = col, .n = n, .depth = hidden};
    mk_cpu_multiply(run, scratch, &product, x, scratch->tile[0], MK_CPU_COLS, false);
    product.matrix = MK_UP;
    mk_cpu_multiply(run, scratch, &product, x, scratch->tile[1], MK_CPU_COLS, false);

    mk_bf16 *gate_out, *up_out, gate[MK_CPU_COLS], up[MK_CPU_COLS];
    destination(run, &rows, &gate_out, &up_out);
    for (int64_t r = 0; r < rows.count; r++) {
        mk_bf16 *g = gate_out ? gate_out + r * rows.width + col : gate, *u = up_out ? up_out + r * rows.width + col : up;
        mk_floats_to_bf16(g, scratch->tile[0] + r * MK_CPU_COLS, n);
        mk_floats_to_bf16(u, scratch->tile[1] + r * MK_CPU_COLS, n);
        mk_bf16 *h = (rows.shared ? run->shared_h : run->ring_h) + (rows.ring_row + r) * rows.width + col;
        if (run->walk.pass == MK_PASS_FORWARD)
            mk_cpu_s3_swiglu(g, u, h, n, run->w->config.swiglu_limit);
        if (run->mx && !rows.shared)
            finish_mx(run, &rows, r, g, u, h, col, n);
    }
    if (run->walk.pass == MK_PASS_BACKWARD && !rows.shared && task.part == 0)
        mk_count(&run->counted.rows_replayed, rows.count);
}
