/* Weight gradients: dWd += dout^T (w h), dWg += dgate^T x, dWu += dup^T x, over the rows of one piece in table order, one tile of
 * one matrix per task. A cut expert's sum goes on in wgrad_partial (fp32), so that cutting changes no bit. The last piece
 * finishes: fresh or accumulated, bf16 or fp32. The shared expert: the same over this rank's tokens. MXFP8: both operands are quantised
 * along the rows, unless the caller wants them in bf16. */
#include <math.h>
#include <string.h>

#include "cpu/run.h"

/* What one task computes: rows [row, row + num_rows) and columns [col, col + num_cols) of the gradient [outputs, inputs]. */
typedef struct wgrad_tile {
    mk_matrix matrix;
    int64_t outputs, inputs, row, col, num_rows, num_cols;
} wgrad_tile;

static int64_t tiles_of(int64_t outputs, int64_t inputs)
{
    return mk_ceil_div(outputs, MK_CPU_WGRAD_ROWS) * mk_ceil_div(inputs, MK_CPU_WGRAD_COLS);
}

int32_t mk_cpu_wgrad_tasks(const mk_dims *d, bool shared)
{
    int64_t width = shared ? d->shared_intermediate : d->intermediate;
    return (int32_t)(2 * tiles_of(width, d->hidden) + tiles_of(d->hidden, width));
}

static wgrad_tile tile_of_part(const mk_dims *d, bool shared, int32_t part)
{
    int64_t width = shared ? d->shared_intermediate : d->intermediate, gate_tiles = tiles_of(width, d->hidden);
    wgrad_tile t = {.matrix = part < gate_tiles ? MK_GATE : part < 2 * gate_tiles ? MK_UP : MK_DOWN};
    int64_t index = t.matrix == MK_GATE ? part : t.matrix == MK_UP ? part - gate_tiles : part - 2 * gate_tiles;
    t.outputs = t.matrix == MK_DOWN ? d->hidden : width;
    t.inputs = t.matrix == MK_DOWN ? width : d->hidden;
    int64_t across = mk_ceil_div(t.inputs, MK_CPU_WGRAD_COLS);
    t.row = index / across * MK_CPU_WGRAD_ROWS;
    t.col = index % across * MK_CPU_WGRAD_COLS;
    t.num_rows = mk_min(MK_CPU_WGRAD_ROWS, t.outputs - t.row);
    t.num_cols = mk_min(MK_CPU_WGRAD_COLS, t.inputs - t.col);
    return t;
}

static const mok_grad *grad_of(const mk_cpu_run *run, mk_matrix matrix, bool shared)
{
    const mok_grads *g = run->grads;
    if (matrix == MK_DOWN)
        return shared ? &g->shared_down : &g->down;
    if (matrix == MK_UP && run->w->config.gate_up == MOK_GATE_UP_SEPARATE)
        return shared ? &g->shared_up : &g->up;
    return shared ? &g->shared_gate : &g->gate;
}

/* Start of an expert's stored gradient, or NULL if it is not wanted. */
static void *grad_memory(const mok_grad *g, int64_t expert, int64_t elements)
{
    if (g->experts)
        return g->experts[expert];
    return g->packed ? (char *)g->packed + expert * elements * (g->dtype == MOK_FP32 ? 4 : 2) : NULL;
}

/* One element: the fp32 sum, plus the old value once, rounded once. */
static void store_element(void *memory, int64_t at, mok_dtype dtype, bool accumulate, float sum)
{
    if (dtype == MOK_FP32) {
        float *p = (float *)memory + at;
        *p = accumulate ? *p + sum : sum;
    } else {
        mk_bf16 *p = (mk_bf16 *)memory + at;
        *p = mk_float_to_bf16(accumulate ? mk_bf16_to_float(*p) + sum : sum);
    }
}

static void store_tile(const mk_cpu_run *run, const wgrad_tile *t, const mok_grad *g, void *memory, const float *tile)
{
    mk_strides s = mk_weight_strides(&run->w->config, t->matrix, t->outputs, t->inputs);
    for (int64_t r = 0; r < t->num_rows; r++)
        for (int64_t c = 0; c < t->num_cols; c++)
            store_element(memory, s.offset + (t->row + r) * s.row + (t->col + c) * s.col, g->dtype, g->accumulate, tile[r * MK_CPU_WGRAD_COLS + c]);
}

/* tile += left[rows]^T right[rows], both quantised along the rows: blocks of 32 from `row` on, which is a tile's first row. */
static void add_rows_mx(mk_cpu_scratch *scratch, const wgrad_tile *t, mk_gemm_operand a, mk_gemm_operand b, int64_t count, bool accumulate)
{
    for (int64_t r = 0; r < count; r += MK_CPU_MX_ROWS) {
        int64_t rows = mk_min(MK_CPU_MX_ROWS, count - r);
        mk_gemm_operand left = mk_cpu_mx_round_operand(mk_operand_from(a, 0, r), t->num_rows, rows, scratch->mx_left);
        mk_gemm_operand right = mk_cpu_mx_round_operand(mk_operand_from(b, 0, r), t->num_cols, rows, scratch->mx_right);
        mk_gemm_bf16(t->num_rows, t->num_cols, rows, left, right, scratch->tile[0], MK_CPU_WGRAD_COLS, accumulate || r > 0, scratch->gemm);
    }
}

/* tile += left[rows]^T right[rows]; both operands have their outer index contiguous and the rows as contraction. */
static void add_rows(const mk_cpu_run *run, mk_cpu_scratch *scratch, const wgrad_tile *t, bool shared, int64_t row, int64_t count, bool accumulate)
{
    const mk_bf16 *left, *right;
    if (t->matrix == MK_DOWN) {
        left = shared ? run->own_dout : run->ring_dout;
        right = shared ? run->shared_h : run->ring_h;
    } else {
        right = shared ? run->own_x : run->ring_x;
        if (t->matrix == MK_GATE)
            left = shared ? run->shared_gate : run->ring_gate;
        else
            left = shared ? run->shared_up : run->ring_up;
    }
    mk_gemm_operand a = {left + row * t->outputs + t->row, 1, t->outputs}, b = {right + row * t->inputs + t->col, 1, t->inputs};
    if (run->mx && !shared && !run->w->config.mx_wgrad_bf16 && count)
        add_rows_mx(scratch, t, a, b, count, accumulate);
    else
        mk_gemm_bf16(t->num_rows, t->num_cols, count, a, b, scratch->tile[0], MK_CPU_WGRAD_COLS, accumulate, scratch->gemm);
}

/* Moves the tile between scratch and the partial sums of the cut expert: [gate | up | down], each [outputs, inputs]. */
static void move_partial(mk_cpu_run *run, const wgrad_tile *t, float *tile, bool store)
{
    float *partial = run->wgrad_partial + (int64_t)t->matrix * run->d->hidden * run->d->intermediate;
    for (int64_t r = 0; r < t->num_rows; r++) {
        float *kept = partial + (t->row + r) * t->inputs + t->col, *here = tile + r * MK_CPU_WGRAD_COLS;
        memcpy(store ? kept : here, store ? here : kept, sizeof(float) * (size_t)t->num_cols);
    }
}

void mk_cpu_wgrad(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task)
{
    const mk_piece *piece = &run->table.pieces[task.tile];
    wgrad_tile t = tile_of_part(run->d, false, task.part);
    const mok_grad *g = grad_of(run, t.matrix, false);
    void *memory = grad_memory(g, piece->expert, mk_weight_elements(&run->w->config, t.matrix, t.outputs, t.inputs));
    bool empty = piece->is_first && piece->is_last && piece->rows == 0;
    if (task.part == 0 && !piece->is_first)
        mk_count(&run->counted.wgrad_continued, 1);
    if (!memory || (empty && g->accumulate))
        return;
    if (!piece->is_first)
        move_partial(run, &t, scratch->tile[0], false);
    bool started = !piece->is_first;
    if (empty) /* a contraction over nothing: zeros */
        add_rows(run, scratch, &t, false, 0, 0, false);
    for (int64_t tile = piece->tile_first, left = piece->rows; tile < piece->tile_end;) {
        /* As many tiles as lie behind each other in the ring. */
        int64_t run_tiles = mk_min(piece->tile_end - tile, run->d->ring_tiles - tile % run->d->ring_tiles);
        int64_t count = mk_min(left, run_tiles * MK_ROW_TILE);
        add_rows(run, scratch, &t, false, mk_ring_row(run, tile), count, started);
        started = true;
        left -= count;
        tile += run_tiles;
    }
    if (piece->is_last)
        store_tile(run, &t, g, memory, scratch->tile[0]);
    else
        move_partial(run, &t, scratch->tile[0], true);
}

/* The shared expert of a rank without tokens is an expert without rows. */
static bool left_alone(const mk_cpu_run *run, const mok_grad *g) { return g->accumulate && run->call->num_tokens == 0; }

/* dwgate = sum over t ascending of da * x, in fp32. */
static void shared_gate_wgrad(mk_cpu_run *run, mk_cpu_scratch *scratch)
{
    const mok_grad *g = &run->grads->shared_output_gate;
    void *memory = grad_memory(g, 0, run->d->hidden);
    if (!memory || left_alone(run, g))
        return;
    for (int64_t first = 0; first < run->d->hidden; first += MK_CPU_TILE_FLOATS) {
        int64_t n = mk_min(MK_CPU_TILE_FLOATS, run->d->hidden - first);
        float *sum = scratch->tile[0];
        memset(sum, 0, sizeof *sum * (size_t)n);
        for (int64_t t = 0; t < run->call->num_tokens; t++) {
            float da = mk_cpu_shared_dgate(run, t);
            for (int64_t i = 0; i < n; i++)
                sum[i] = fmaf(da, mk_bf16_to_float(run->own_x[t * run->d->hidden + first + i]), sum[i]);
        }
        for (int64_t i = 0; i < n; i++)
            store_element(memory, first + i, g->dtype, g->accumulate, sum[i]);
    }
}

void mk_cpu_shared_wgrad(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task)
{
    if (task.part == mk_cpu_wgrad_tasks(run->d, true)) {
        shared_gate_wgrad(run, scratch);
        return;
    }
    wgrad_tile t = tile_of_part(run->d, true, task.part);
    const mok_grad *g = grad_of(run, t.matrix, true);
    void *memory = grad_memory(g, 0, mk_weight_elements(&run->w->config, t.matrix, t.outputs, t.inputs));
    if (!memory || left_alone(run, g))
        return;
    add_rows(run, scratch, &t, true, 0, run->call->num_tokens, false);
    store_tile(run, &t, g, memory, scratch->tile[0]);
}
