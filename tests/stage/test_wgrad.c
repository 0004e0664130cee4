/* Weight gradients of one stage run against plain loops over the expert's rows in table order: bit for bit with one fma per row, close to
 * the double sum; every layout, dtype and way to store; a cut expert equals an uncut one. */
#include "stage.h"

static mk_bf16 *ring_left(mk_cpu_run *run, int which, bool shared, const mk_bf16 *own_dout)
{
    if (which == 2)
        return shared ? (mk_bf16 *)(uintptr_t)own_dout : run->ring_dout;
    if (shared)
        return which ? run->shared_up : run->shared_gate;
    return which ? run->ring_up : run->ring_gate;
}

/* Element (n, k) of the gradient of one matrix: the sum over rows [first, end) of left[r, n] * right[r, k]. */
static float sum_rows(const mk_bf16 *left, const mk_bf16 *right, int64_t outputs, int64_t inputs, int64_t first, int64_t end, int64_t n, int64_t k,
                      double *exact, double *size)
{
    float acc = 0;
    *exact = *size = 0;
    for (int64_t r = first; r < end; r++) {
        float a = mk_bf16_to_float(left[r * outputs + n]), b = mk_bf16_to_float(right[r * inputs + k]);
        acc = fmaf(a, b, acc);
        *exact += (double)a * b;
        *size += fabs((double)a * b);
    }
    return acc;
}

typedef struct wish { mok_dtype dtype; bool accumulate; } wish;

static void make_grad(stage *s, mok_grad *g, int64_t elements, const wish *w)
{
    int64_t bytes = w->dtype == MOK_FP32 ? 4 : 2;
    g->packed = stage_own(s, elements * bytes);
    g->dtype = w->dtype;
    g->accumulate = w->accumulate;
    for (int64_t i = 0; i < elements && w->accumulate; i++) { /* something to add to */
        float old = (float)test_normal(&s->state);
        if (w->dtype == MOK_FP32)
            ((float *)g->packed)[i] = old;
        else
            ((mk_bf16 *)g->packed)[i] = mk_float_to_bf16(old);
    }
}

static float grad_at(const mok_grad *g, const void *memory, int64_t at)
{
    return g->dtype == MOK_FP32 ? ((const float *)memory)[at] : mk_bf16_to_float(((const mk_bf16 *)memory)[at]);
}

static void check_matrix(stage *s, int which, bool shared, const mok_grad *g, const void *before, int64_t expert)
{
    const mok_config *c = &s->cfg;
    mk_cpu_run *run = &s->run;
    int64_t width = shared ? c->shared_intermediate : c->intermediate, outputs = which == 2 ? c->hidden : width, inputs = which == 2 ? width : c->hidden;
    const mk_bf16 *own_x = (const mk_bf16 *)(const void *)(s->w->heap + s->w->memory.x), *own_dout = (const mk_bf16 *)(const void *)(s->w->heap + s->w->memory.dout);
    const mk_bf16 *left = ring_left(run, which, shared, own_dout), *right = which == 2 ? (shared ? run->shared_h : run->ring_h) : (shared ? own_x : run->ring_x);
    int64_t first = shared ? 0 : run->table.segment_tile[expert] * (int64_t)MK_ROW_TILE, end = first + (shared ? s->tokens : run->table.segment_rows[expert]);
    for (int64_t i = 0; i < outputs * inputs; i += outputs * inputs > 20000 ? 113 + 400 * RANKS_SLOW : 1 + 4 * RANKS_SLOW) {
        int64_t n = i / inputs, k = i % inputs, at = stage_element(c, which, outputs, inputs, expert, n, k);
        double exact, size;
        float sum = sum_rows(left, right, outputs, inputs, first, end, n, k, &exact, &size), got = grad_at(g, g->packed, at), old = grad_at(g, before, at);
        if (first == end) { /* an expert without rows: zeros, or left as it is */
            stage_same("gradient of an empty expert", n, k, stage_bits(got), g->accumulate ? stage_bits(old) : 0);
            continue;
        }
        float total = g->accumulate ? old + sum : sum;
        exact += g->accumulate ? old : 0;
        stage_near("gradient", n, k, got, exact, (size + (g->accumulate ? fabs((double)old) : 0)) * 0x1p-18);
        stage_same("gradient", n, k, stage_bits(got), stage_bits(g->dtype == MOK_FP32 ? total : mk_round_to_bf16(total)));
    }
}

static void fill_inputs(stage *s)
{
    mk_cpu_run *run = &s->run;
    int64_t hidden = s->cfg.hidden, width = s->cfg.intermediate, ws = s->cfg.shared_intermediate;
    stage_fill_rows(s, run->ring_x, hidden, 1);
    stage_fill_rows(s, run->ring_dout, hidden, 1);
    stage_fill_rows(s, run->ring_gate, width, 1);
    stage_fill_rows(s, run->ring_up, width, 1);
    stage_fill_rows(s, run->ring_h, width, 1);
    stage_fill(s, run->shared_gate, s->tokens * ws, 1);
    stage_fill(s, run->shared_up, s->tokens * ws, 1);
    stage_fill(s, run->shared_h, s->tokens * ws, 1);
    stage_fill(s, (mk_bf16 *)(void *)(s->w->heap + s->w->memory.x), s->tokens * hidden, 1);
    stage_fill(s, (mk_bf16 *)(void *)(s->w->heap + s->w->memory.dout), s->tokens * hidden, 1);
    for (int64_t t = 0; t < s->tokens && ws; t++) {
        run->shared_scale[t] = (float)test_uniform(&s->state);
        for (int64_t g = 0; g < ws / 64; g++)
            run->shared_dpartial[t * (ws / 64) + g] = (float)test_normal(&s->state);
    }
}

static void check_output_gate(stage *s, const void *before)
{
    const mok_grad *g = &s->grads.shared_output_gate;
    const mk_bf16 *x = (const mk_bf16 *)(const void *)(s->w->heap + s->w->memory.x);
    int64_t hidden = s->cfg.hidden, groups = s->cfg.shared_intermediate / 64;
    for (int64_t i = 0; i < hidden; i++) {
        float sum = 0;
        for (int64_t t = 0; t < s->tokens; t++) {
            float ds = 0, scale = s->run.shared_scale[t];
            for (int64_t p = 0; p < groups; p++)
                ds += s->run.shared_dpartial[t * groups + p];
            sum = fmaf(ds * (scale * (1.0f - scale)), mk_bf16_to_float(x[t * hidden + i]), sum);
        }
        float total = g->accumulate ? grad_at(g, before, i) + sum : sum;
        stage_same("dwgate", i, 0, stage_bits(grad_at(g, g->packed, i)), stage_bits(g->dtype == MOK_FP32 ? total : mk_round_to_bf16(total)));
    }
}

static void check(int shape, wish w, void (*change)(mok_config *))
{
    stage s;
    if (!stage_open_shape(&s, shape, true, change))
        return;
    const mok_config *c = &s.cfg;
    int64_t times = c->gate_up == MOK_GATE_UP_SEPARATE ? 1 : 2, routed = c->num_experts * c->intermediate * c->hidden, shared = c->shared_intermediate * c->hidden;
    mok_grad *all[] = {&s.grads.gate, &s.grads.up, &s.grads.down, &s.grads.shared_gate, &s.grads.shared_up, &s.grads.shared_down, &s.grads.shared_output_gate};
    int64_t elements[] = {routed * times, times == 1 ? routed : 0, routed, shared * times, times == 1 ? shared : 0, shared, c->hidden};
    void *before[7];
    for (int i = 0; i < 7; i++) {
        int64_t bytes = elements[i] * (w.dtype == MOK_FP32 ? 4 : 2);
        if (elements[i])
            make_grad(&s, all[i], elements[i], &w);
        before[i] = malloc((size_t)bytes + 1);
        if (bytes)
            memcpy(before[i], all[i]->packed, (size_t)bytes);
    }
    stage_pass(&s, MK_PASS_BACKWARD);
    fill_inputs(&s);
    stage_each(&s, MK_TASK_WGRAD, mk_cpu_wgrad);
    stage_each(&s, MK_TASK_SHARED_WGRAD, mk_cpu_shared_wgrad);
    for (int64_t e = 0; e < c->num_experts; e++)
        for (int which = 0; which < 3; which++) {
            int i = which == 1 && times == 2 ? 0 : which;
            check_matrix(&s, which, false, all[i], before[i], e);
        }
    for (int which = 0; which < 3 && c->shared_intermediate; which++) {
        int i = 3 + (which == 1 && times == 2 ? 0 : which);
        check_matrix(&s, which, true, all[i], before[i], 0);
    }
    if (c->shared_gate)
        check_output_gate(&s, before[6]);
    else if (!w.accumulate)
        stage_untouched("dwgate without a gate", s.grads.shared_output_gate.packed, c->hidden * (w.dtype == MOK_FP32 ? 4 : 2));
    for (int i = 0; i < 7; i++)
        free(before[i]);
    stage_close(&s);
}

static void gated(mok_config *c) { c->shared_gate = c->shared_intermediate > 0; }

TEST(Z2_fresh_bf16_gradients)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check(i, (wish){MOK_BF16, false}, gated);
}
TEST(Z5_accumulated_bf16_gradients_round_once)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check(i, (wish){MOK_BF16, true}, gated);
}
TEST(Z2_fresh_fp32_gradients)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check(i, (wish){MOK_FP32, false}, NULL);
}
TEST(Z5_accumulated_fp32_gradients)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check(i, (wish){MOK_FP32, true}, gated);
}

static mok_weight_layout lay_layout;
static mok_gate_up lay_gate_up;
static void lay(mok_config *c)
{
    c->weight_layout = lay_layout;
    c->gate_up = lay_gate_up;
}
TEST(gradients_in_every_layout)
{
    for (int i = 0; i < 6; i++) {
        lay_layout = (mok_weight_layout)(i % 2);
        lay_gate_up = (mok_gate_up)(i / 2);
        check(1, (wish){MOK_BF16, i % 2 == 0}, lay);
        check(3, (wish){MOK_FP32, i % 2 != 0}, lay);
    }
}

/* S1: every width that no tile divides, and row counts from 1 to more than a tile. */
static int64_t s1_hidden, s1_intermediate;
static void s1_shape(mok_config *c)
{
    c->hidden = s1_hidden;
    c->intermediate = s1_intermediate;
    c->shared_intermediate = 0;
}
TEST(S1_widths_that_no_tile_divides)
{
    static const int64_t widths[] = {64, 192, 320, 768, 896, 1088};
    for (int i = 0; i < 6; i++) {
        s1_hidden = widths[i];
        s1_intermediate = widths[5 - i];
        check(1, (wish){MOK_BF16, false}, s1_shape);
    }
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
