/* s2_gate_up_bwd: dx_k = dgate Wg + dup Wu for some columns of H of one tile, one fp32 accumulation with gate first, rounded to
 * bf16; hosts the push of dx (and, with the first columns, of dw) to slot (t, k) of the token's rank. The shared expert's
 * part also gets da * wgate before its rounding, and stays here, in shared_y. MXFP8: dgate and dup are quantised along I. */
#include <math.h>

#include "cpu/run.h"

/* dw of a row: its groups' partial sums, added ascending. */
static float sum_partials(const float *partial, int64_t width)
{
    float sum = 0.0f;
    for (int64_t i = 0; i < width / MK_DW_GROUP; i++)
        sum += partial[i];
    return sum;
}

float mk_cpu_shared_gate(const mk_cpu_run *run, int64_t token)
{
    if (!run->w->config.shared_gate)
        return 1.0f;
    const mk_bf16 *wgate = run->weights->shared_output_gate;
    const mk_bf16 *x = run->own_x + token * run->d->hidden;
    float dot = 0.0f;
    for (int64_t i = 0; i < run->d->hidden; i++)
        dot = fmaf(mk_bf16_to_float(x[i]), mk_bf16_to_float(wgate[i]), dot);
    return 1.0f / (1.0f + expf(-dot));
}

float mk_cpu_shared_dgate(const mk_cpu_run *run, int64_t token)
{
    int64_t width = run->d->shared_intermediate;
    float s = run->shared_scale[token], ds = sum_partials(run->shared_dpartial + token * (width / MK_DW_GROUP), width);
    return ds * (s * (1.0f - s));
}

static void finish_shared_row(mk_cpu_run *run, const mk_rows *rows, int64_t r, float *dx, int64_t col, int64_t n)
{
    int64_t token = rows->ring_row + r;
    if (run->w->config.shared_gate) {
        float da = mk_cpu_shared_dgate(run, token);
        const mk_bf16 *wgate = run->weights->shared_output_gate;
        for (int64_t i = 0; i < n; i++)
            dx[i] = fmaf(da, mk_bf16_to_float(wgate[col + i]), dx[i]);
    }
    mk_floats_to_bf16(run->shared_y + token * run->d->hidden + col, dx, n);
}

static void push_row(mk_cpu_run *run, const mk_rows *rows, int64_t r, const float *dx, int64_t col, int64_t n)
{
    const mk_row *row = &run->table.rows[rows->table_row + r];
    char *heap = run->w->heaps[row->src_rank];
    mk_bf16 *slots = (mk_bf16 *)(void *)(heap + run->w->memory.slots);
    float *dweights = (float *)(void *)(heap + run->w->memory.dweight_slots);
    int64_t bytes = 2 * n, width = rows->width;
    mk_floats_to_bf16(slots + row->src_slot * run->d->hidden + col, dx, n);
    if (col == 0) {
        dweights[row->src_slot] = sum_partials(run->ring_dweight + (rows->ring_row + r) * (width / MK_DW_GROUP), width);
        bytes += 4;
    }
    if (row->src_rank != run->d->rank)
        mk_count(&run->counted.bytes_pushed_peer, bytes);
}

void mk_cpu_s2_gate_up_bwd(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task)
{
    mk_rows rows = mk_rows_of_task(run, task);
    int64_t col = mk_first_col(task.part), n = mk_num_cols(task.part, run->d->hidden), width = rows.width;
    mk_gemm_operand dgate = {(rows.shared ? run->shared_gate : run->ring_gate) + rows.ring_row * width, width, 1};
    mk_gemm_operand dup = {(rows.shared ? run->shared_up : run->ring_up) + rows.ring_row * width, width, 1};
    mk_product product = {.matrix = MK_GATE, .transposed = true, .shared = rows.shared, .quantise_a = true, .expert = rows.expert, .rows = rows.count,
                          .first = col, .n = n, .depth = width};
    mk_cpu_multiply(run, scratch, &product, dgate, scratch->tile[0], MK_CPU_COLS, false);
    product.matrix = MK_UP;
    mk_cpu_multiply(run, scratch, &product, dup, scratch->tile[0], MK_CPU_COLS, true);
    for (int64_t r = 0; r < rows.count; r++) {
        float *dx = scratch->tile[0] + r * MK_CPU_COLS;
        if (rows.shared)
            finish_shared_row(run, &rows, r, dx, col, n);
        else
            push_row(run, &rows, r, dx, col, n);
    }
}
