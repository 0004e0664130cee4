/* Where element (output n, input k) of a weight matrix lies, for every layout a caller may have; and products with one, in bf16 and MXFP8. */
#include "cpu/run.h"

mk_strides mk_weight_strides(const mok_config *c, mk_matrix matrix, int64_t outputs, int64_t inputs)
{
    bool kn = c->weight_layout == MOK_WEIGHT_KN, one = matrix != MK_DOWN && c->gate_up != MOK_GATE_UP_SEPARATE;
    int64_t stored = one ? 2 * outputs : outputs; /* outputs of the matrix in memory */
    int64_t step = one && c->gate_up == MOK_GATE_UP_INTERLEAVED ? 2 : 1;
    int64_t first = one && matrix == MK_UP ? (step == 2 ? 1 : outputs) : 0;
    int64_t row = kn ? 1 : inputs; /* between neighbouring stored outputs */
    return (mk_strides){first * row, step * row, kn ? stored : 1};
}

int64_t mk_weight_elements(const mok_config *c, mk_matrix matrix, int64_t outputs, int64_t inputs)
{
    return outputs * inputs * (matrix != MK_DOWN && c->gate_up != MOK_GATE_UP_SEPARATE ? 2 : 1);
}

static const mok_weight *weight_of(const mk_cpu_run *run, mk_matrix matrix, bool shared)
{
    const mok_weights *w = run->weights;
    if (matrix == MK_DOWN)
        return shared ? &w->shared_down : &w->down;
    if (matrix == MK_UP && run->w->config.gate_up == MOK_GATE_UP_SEPARATE)
        return shared ? &w->shared_up : &w->up;
    return shared ? &w->shared_gate : &w->gate;
}

mk_gemm_operand mk_weight_operand(const mk_cpu_run *run, mk_matrix matrix, bool shared, int64_t e)
{
    const mok_config *c = &run->w->config;
    int64_t width = shared ? run->d->shared_intermediate : run->d->intermediate;
    int64_t outputs = matrix == MK_DOWN ? run->d->hidden : width, inputs = matrix == MK_DOWN ? width : run->d->hidden;
    const mok_weight *weight = weight_of(run, matrix, shared);
    mk_strides strides = mk_weight_strides(c, matrix, outputs, inputs);
    if (mk_mx_is_quantised(weight))
        return (mk_gemm_operand){NULL, 0, 0};
    const mk_bf16 *data = weight->experts ? weight->experts[e] : (const mk_bf16 *)weight->packed + e * mk_weight_elements(c, matrix, outputs, inputs);
    return (mk_gemm_operand){data + strides.offset, strides.row, strides.col};
}

/* Elements [first, first + n) x [k, k + depth) of the product's weight, in scratch->mx_right: quantised here, or by the caller. */
static mk_gemm_operand mx_weight(const mk_cpu_run *run, mk_cpu_scratch *scratch, const mk_product *p, int64_t k, int64_t depth)
{
    const mok_weight *weight = weight_of(run, p->matrix, false);
    mk_gemm_operand w = mk_weight_operand(run, p->matrix, false, p->expert);
    if (!mk_mx_is_quantised(weight))
        return mk_cpu_mx_round_operand(mk_operand_from(p->transposed ? mk_transposed(w) : w, p->first, k), p->n, depth, scratch->mx_right);
    int64_t width = run->d->intermediate, outputs = p->matrix == MK_DOWN ? run->d->hidden : width, inputs = p->matrix == MK_DOWN ? width : run->d->hidden;
    int64_t stored = mk_weight_elements(&run->w->config, p->matrix, outputs, inputs) / inputs, up = p->matrix == MK_UP && stored > outputs ? outputs : 0;
    int64_t rows = p->transposed ? inputs : stored, cols = p->transposed ? stored : inputs;
    const uint8_t *data = (const uint8_t *)(p->transposed ? weight->transposed : weight->packed) + p->expert * rows * cols;
    const uint8_t *scales = (const uint8_t *)(p->transposed ? weight->transposed_scales : weight->scales) + p->expert * mk_mx_scale_bytes(rows, cols);
    mk_cpu_mx_widen_matrix(data, scales, cols, p->first + (p->transposed ? 0 : up), p->n, k + (p->transposed ? up : 0), depth, scratch->mx_right);
    return (mk_gemm_operand){scratch->mx_right, depth, 1};
}

void mk_cpu_multiply(const mk_cpu_run *run, mk_cpu_scratch *scratch, const mk_product *p, mk_gemm_operand a, float *c, int64_t ldc, bool accumulate)
{
    if (!run->mx || p->shared) {
        mk_gemm_operand w = mk_weight_operand(run, p->matrix, p->shared, p->expert);
        w = mk_operand_from(p->transposed ? mk_transposed(w) : w, p->first, 0);
        mk_gemm_bf16(p->rows, p->n, p->depth, a, w, c, ldc, accumulate, scratch->gemm);
        return;
    }
    for (int64_t k = 0; k < p->depth; k += MK_CPU_MX_DEPTH) { /* going on from C changes no bit */
        int64_t depth = mk_min(MK_CPU_MX_DEPTH, p->depth - k);
        mk_gemm_operand left = mk_operand_from(a, 0, k);
        if (p->quantise_a)
            left = mk_cpu_mx_round_operand(left, p->rows, depth, scratch->mx_left);
        mk_gemm_bf16(p->rows, p->n, depth, left, mx_weight(run, scratch, p, k, depth), c, ldc, accumulate || k > 0, scratch->gemm);
    }
}
