/* s5_combine and its mirror: the written order of the sums, bit for bit, and close to the double sum. Slots of dropped routes are
 * NaN and must not be looked at. */
#include "stage.h"

static void open_slots(stage *s, mk_cpu_run *run, const int32_t *ids)
{
    const mk_memory *m = &s->w->memory;
    int64_t hidden = s->cfg.hidden, topk = s->cfg.topk;
    mk_bf16 *slots = (mk_bf16 *)(void *)(s->w->heap + m->slots);
    float *weights = (float *)(void *)(s->w->heap + m->router_weights), *dweights = (float *)(void *)(s->w->heap + m->dweight_slots);
    for (int64_t i = 0; i < s->tokens * topk; i++)
        if (ids[i] >= 0) {
            stage_fill(s, slots + i * hidden, hidden, 1);
            weights[i] = (float)test_normal(&s->state);
            dweights[i] = (float)test_normal(&s->state);
        }
    if (s->cfg.shared_intermediate)
        stage_fill(s, run->shared_y, s->tokens * hidden, 1);
    stage_fill(s, (mk_bf16 *)(void *)(s->w->heap + m->x), s->tokens * hidden, 1);
}

static void check_out(int shape, bool shared, void (*change)(mok_config *))
{
    stage s;
    if (!stage_open_shape(&s, shape, shared, change))
        return;
    mk_cpu_run *run = stage_pass(&s, MK_PASS_FORWARD);
    const int32_t *ids = run->table.own_ids;
    int64_t hidden = s.cfg.hidden, topk = s.cfg.topk;
    open_slots(&s, run, ids);
    const mk_bf16 *slots = (const mk_bf16 *)(const void *)(s.w->heap + s.w->memory.slots), *x = (const mk_bf16 *)(const void *)(s.w->heap + s.w->memory.x);
    const mk_bf16 *wgate = s.weights.shared_output_gate;
    const float *weights = (const float *)(const void *)(s.w->heap + s.w->memory.router_weights);
    mk_bf16 *out = stage_own(&s, (s.tokens + 1) * hidden * 2);
    s.call.forward.out = out;
    int64_t half = s.tokens / 2; /* in two shares, as two workers would */
    mk_cpu_s5_combine(run, 0, half);
    stage_untouched("the other share", out + half * hidden, (s.tokens + 1 - half) * hidden * 2);
    mk_cpu_s5_combine(run, half, s.tokens);
    for (int64_t t = 0; t < s.tokens; t++) {
        float dot = 0, scale = 1;
        double exact_dot = 0;
        for (int64_t i = 0; i < hidden; i++) {
            dot = fmaf(mk_bf16_to_float(x[t * hidden + i]), mk_bf16_to_float(wgate[i]), dot);
            exact_dot += (double)mk_bf16_to_float(x[t * hidden + i]) * mk_bf16_to_float(wgate[i]);
        }
        if (s.cfg.shared_gate)
            scale = 1.0f / (1.0f + expf(-dot));
        for (int64_t col = 0; col < hidden; col++) {
            float acc = shared ? scale * mk_bf16_to_float(run->shared_y[t * hidden + col]) : 0;
            double exact = shared ? (s.cfg.shared_gate ? 1 / (1 + exp(-exact_dot)) : 1) * mk_bf16_to_float(run->shared_y[t * hidden + col]) : 0;
            double size = fabs(exact);
            for (int64_t k = 0; k < topk; k++) {
                if (ids[t * topk + k] < 0)
                    continue;
                float y = mk_bf16_to_float(slots[(t * topk + k) * hidden + col]);
                acc = fmaf(weights[t * topk + k], y, acc);
                exact += (double)weights[t * topk + k] * y;
                size += fabs((double)weights[t * topk + k] * y);
            }
            stage_near("out", t, col, mk_bf16_to_float(out[t * hidden + col]), exact, size * 0x1p-18);
            stage_same("out", t, col, out[t * hidden + col], mk_float_to_bf16(acc));
        }
    }
    stage_untouched("behind out", out + s.tokens * hidden, hidden * 2);
    stage_close(&s);
}

static void gated(mok_config *c) { c->shared_gate = c->shared_intermediate > 0; }

TEST(s5_out_without_shared_expert)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check_out(i, false, NULL);
}
TEST(s5_out_with_shared_expert)
{
    for (int i = 1; i < STAGE_NUM_SHAPES; i++)
        check_out(i, true, NULL);
}
TEST(s5_out_with_a_gated_shared_expert)
{
    for (int i = 1; i < STAGE_NUM_SHAPES; i++)
        check_out(i, true, gated);
}

static void check_dx(int shape, bool shared, mok_dtype router, bool wanted)
{
    stage s;
    if (!stage_open_shape(&s, shape, shared, NULL))
        return;
    s.w->config.router_dtype = router;
    mk_cpu_run *run = stage_pass(&s, MK_PASS_BACKWARD);
    const int32_t *ids = run->table.own_ids;
    int64_t hidden = s.cfg.hidden, topk = s.cfg.topk, element = router == MOK_BF16 ? 2 : 4;
    open_slots(&s, run, ids);
    const mk_bf16 *slots = (const mk_bf16 *)(const void *)(s.w->heap + s.w->memory.slots);
    const float *dweights = (const float *)(const void *)(s.w->heap + s.w->memory.dweight_slots);
    mk_bf16 *dx = stage_own(&s, (s.tokens + 1) * hidden * 2);
    unsigned char *dw = stage_own(&s, (s.tokens + 1) * topk * element);
    s.call.backward.dx = dx;
    s.call.backward.drouter_weights = wanted ? dw : NULL;
    mk_cpu_s5_combine_bwd(run, 0, s.tokens);
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t col = 0; col < hidden; col++) {
            float acc = shared ? mk_bf16_to_float(run->shared_y[t * hidden + col]) : 0;
            double exact = acc, size = fabs(exact);
            for (int64_t k = 0; k < topk; k++)
                if (ids[t * topk + k] >= 0) {
                    acc += mk_bf16_to_float(slots[(t * topk + k) * hidden + col]);
                    exact += mk_bf16_to_float(slots[(t * topk + k) * hidden + col]);
                    size += fabs((double)mk_bf16_to_float(slots[(t * topk + k) * hidden + col]));
                }
            stage_near("dx", t, col, mk_bf16_to_float(dx[t * hidden + col]), exact, size * 0x1p-20);
            stage_same("dx", t, col, dx[t * hidden + col], mk_float_to_bf16(acc));
        }
    for (int64_t i = 0; i < s.tokens * topk && wanted; i++) {
        float want = ids[i] >= 0 ? dweights[i] : 0;
        if (router == MOK_BF16)
            stage_same("dw", i, 0, ((mk_bf16 *)(void *)dw)[i], mk_float_to_bf16(want));
        else
            stage_same("dw", i, 0, stage_bits(((float *)(void *)dw)[i]), stage_bits(want));
    }
    stage_untouched("behind dx", dx + s.tokens * hidden, hidden * 2);
    stage_untouched("behind dw", dw + (wanted ? s.tokens * topk * element : 0), (wanted ? topk : (s.tokens + 1) * topk) * element);
    stage_close(&s);
}

TEST(s5_dx_and_dw)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++) {
        check_dx(i, false, MOK_FP32, true);
        check_dx(i, i > 0, MOK_FP32, true);
    }
}
TEST(s5_dw_in_bf16)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check_dx(i, i > 0, MOK_BF16, true);
}
TEST(s5_dw_not_wanted) { check_dx(2, true, MOK_FP32, false); }

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
