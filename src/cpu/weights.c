/* Where element (output n, input k) of a weight matrix lies, for every layout a caller may have. */
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
    const mk_bf16 *data = weight->experts ? weight->experts[e] : (const mk_bf16 *)weight->packed + e * mk_weight_elements(c, matrix, outputs, inputs);
    return (mk_gemm_operand){data + strides.offset, strides.row, strides.col};
}
