/* The library against the whole layer in float64, at most twice the error of a plain bf16 chain, for random shapes; and the float64
 * gradients against finite differences of the float64 forward, so that both sides are anchored. */
#include "rig.h"

/* --- the reference's own gradients ------------------------------------------------------------------------------------------------ */
static double loss(const layer_problem *p)
{
    reference_result r;
    double sum = 0;
    if (!reference_run(p, false, &r))
        exit(1);
    for (int64_t i = 0; i < p->tokens * p->cfg.hidden; i++)
        sum += (double)layer_float(p->dout[i]) * r.out[i];
    reference_free(&r);
    return sum;
}

/* A bf16 that stays one with 1/256 and 1/128 added or taken away. */
static void snap(uint16_t *v, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        v[i] = layer_bf16((float)(fmax(fmin(round((double)layer_float(v[i]) * 64), 62), -62) / 64));
}

static double shifted_bf16(layer_problem *p, uint16_t *at, double by)
{
    uint16_t old = *at;
    double value = layer_float(old) + by;
    *at = layer_bf16((float)value);
    if (layer_float(*at) != value)
        TEST_FAILED("%g is no bf16", value);
    double result = loss(p);
    *at = old;
    return result;
}

static double shifted_float(layer_problem *p, float *at, double by)
{
    float old = *at;
    *at = (float)((double)old + by);
    double result = loss(p);
    *at = old;
    return result;
}

typedef struct tally { bool limited; int64_t checked, kinks; } tally;

/* Fourth order: the error of both differences falls out. With a limit some value lies so close to it that a step crosses the edge,
 * which is no gradient's fault: these are counted, and must be few. */
static void check_slope(const char *name, int64_t i, double near_diff, double far_diff, double gradient, tally *t)
{
    double slope = (4 * near_diff - far_diff) / 3;
    bool agrees = fabs(slope - gradient) <= 1e-6 * (1 + fabs(gradient));
    t->checked++;
    t->kinks += t->limited && !agrees;
    if (!agrees && !t->limited)
        TEST_FAILED("%s[%lld]: the gradient is %.9g, the slope %.9g", name, (long long)i, gradient, slope);
}

static void check_bf16_slopes(const char *name, layer_problem *p, uint16_t *values, const double *gradient, int64_t n, tally *t)
{
    const double h = 0x1p-8;
    for (int64_t i = 0; i < n; i++)
        check_slope(name, i, (shifted_bf16(p, values + i, h) - shifted_bf16(p, values + i, -h)) / (2 * h),
                    (shifted_bf16(p, values + i, 2 * h) - shifted_bf16(p, values + i, -2 * h)) / (4 * h), gradient[i], t);
}

static void check_reference(float limit, bool shared, bool gate, uint64_t seed)
{
    mok_config c = MOK_INIT(mok_config); /* the reference takes any width */
    layer_problem p;
    reference_result r;
    tally t = {limit > 0, 0, 0};
    c.hidden = 7;
    c.intermediate = 5;
    c.shared_intermediate = shared ? 3 : 0;
    c.shared_gate = gate;
    c.num_experts = 3;
    c.topk = 2;
    c.swiglu_limit = limit;
    if (!layer_make(&p, &c, 5, LAYER_UNIFORM, 0.2, seed))
        exit(1);
    p.expert_ids[2] = p.expert_ids[3] = 1; /* a duplicate */
    p.router_weights[1] = 0;
    p.router_weights[2] = -0.75f;
    int64_t hidden = 7, routed = 3 * 5 * 7, of_shared = c.shared_intermediate * 7;
    snap(p.x, 5 * hidden);
    snap(p.gate, routed);
    snap(p.up, routed);
    snap(p.down, routed);
    snap(p.shared_gate, of_shared);
    snap(p.shared_up, of_shared);
    snap(p.shared_down, of_shared);
    snap(p.shared_output_gate, hidden);
    if (!reference_run(&p, false, &r))
        exit(1);
    check_bf16_slopes("dx", &p, p.x, r.dx, 5 * hidden, &t);
    check_bf16_slopes("dgate", &p, p.gate, r.dgate, routed, &t);
    check_bf16_slopes("dup", &p, p.up, r.dup, routed, &t);
    check_bf16_slopes("ddown", &p, p.down, r.ddown, routed, &t);
    check_bf16_slopes("dshared_gate", &p, p.shared_gate, r.dshared_gate, of_shared, &t);
    check_bf16_slopes("dshared_up", &p, p.shared_up, r.dshared_up, of_shared, &t);
    check_bf16_slopes("dshared_down", &p, p.shared_down, r.dshared_down, of_shared, &t);
    if (gate)
        check_bf16_slopes("dshared_output_gate", &p, p.shared_output_gate, r.dshared_output_gate, hidden, &t);
    for (int64_t i = 0; i < 10; i++) /* so that fp32 holds it with the steps added */
        p.router_weights[i] = layer_float(layer_bf16(p.router_weights[i]));
    reference_free(&r);
    if (!reference_run(&p, false, &r))
        exit(1);
    for (int64_t i = 0; i < 10; i++) {
        const double h = 0x1p-10;
        if (p.expert_ids[i] < 0)
            CHECK(r.drouter_weights[i] == 0);
        check_slope("drouter_weights", i, (shifted_float(&p, p.router_weights + i, h) - shifted_float(&p, p.router_weights + i, -h)) / (2 * h),
                    (shifted_float(&p, p.router_weights + i, 2 * h) - shifted_float(&p, p.router_weights + i, -2 * h)) / (4 * h),
                    r.drouter_weights[i], &t);
    }
    reference_free(&r);
    layer_free(&p);
    CHECK(t.checked > 350);
    if (t.kinks > t.checked / 5)
        TEST_FAILED("%lld of %lld slopes are not the gradient", (long long)t.kinks, (long long)t.checked);
}

TEST(N13_reference_gradients_are_slopes) { check_reference(0, false, false, test_seed()); }
TEST(N13_reference_gradients_with_a_shared_expert) { check_reference(0, true, false, test_seed()); }
TEST(N13_reference_gradients_with_a_gated_shared_expert) { check_reference(0, true, true, test_seed()); }
TEST(N13_reference_gradients_with_a_limit)
{
    check_reference(0.4f, true, true, test_seed());
    check_reference(0.1f, false, false, test_seed());
}

/* --- the library ---------------------------------------------------------------------------------------------------------------------- */
static mok_config random_config(uint64_t *state)
{
    mok_config c = MOK_INIT(mok_config);
    c.hidden = 64 * (1 + test_below(state, 4));
    c.intermediate = 64 * (1 + test_below(state, 5));
    c.shared_intermediate = test_below(state, 2) ? 64 * (1 + test_below(state, 4)) : 0;
    c.shared_gate = c.shared_intermediate && test_below(state, 2);
    c.num_experts = 1 + test_below(state, 9);
    c.topk = 1 + test_below(state, c.num_experts < 4 ? c.num_experts : 4);
    c.swiglu_limit = test_below(state, 3) ? 0 : 0.5f + 2 * (float)test_uniform(state);
    return c;
}

static void check_random(uint64_t *state, int32_t most_ranks)
{
    mok_config c = random_config(state);
    layer_problem p;
    layer_result got;
    rig_references refs;
    int64_t tokens = 1 + test_below(state, test_below(state, 3) ? 60 : 250);
    layer_options o = {.ranks = (int32_t)(1 + test_below(state, most_ranks)), .minibatch_rows = 128, .minibatch_rows_bwd = 128,
                       .ring_rows = 256 + 128 * test_below(state, 6), .save = (mok_save)test_below(state, 4), .cpu_threads = 1,
                       .grad_dtype = test_below(state, 2) ? MOK_FP32 : MOK_BF16, .before_pass = rig_poison};
    if (!layer_make(&p, &c, tokens, test_below(state, 3) ? LAYER_UNIFORM : LAYER_DISTINCT, test_below(state, 2) ? 0 : 0.3, test_random(state)))
        exit(1);
    for (int64_t i = 0; i < tokens * c.topk; i++) { /* router weights of any sign */
        if (test_below(state, 6) == 0)
            p.router_weights[i] = -p.router_weights[i];
        if (test_below(state, 9) == 0)
            p.router_weights[i] = 0;
    }
    char what[200];
    snprintf(what, sizeof what, "hidden %lld, intermediate %lld, shared %lld%s, experts %lld, topk %lld, limit %g, tokens %lld, ranks %d",
             (long long)c.hidden, (long long)c.intermediate, (long long)c.shared_intermediate, c.shared_gate ? " gated" : "",
             (long long)c.num_experts, (long long)c.topk, (double)c.swiglu_limit, (long long)tokens, o.ranks);
    int before = test_failures;
    if (!rig_references_make(&refs, &p))
        exit(1);
    if (o.grad_dtype == MOK_BF16 && c.shared_intermediate)
        o.ranks = 1; /* summing rounded parts of several ranks is the caller's error, not the layer's */
    if (rig_run(what, &p, &o, &got))
        rig_check_errors(&p, &refs, &got);
    if (test_failures != before)
        printf("  … with %s\n", what);
    layer_result_free(&got);
    rig_references_free(&refs);
    layer_free(&p);
}

TEST(errors_of_random_shapes_are_within_twice_the_bf16_chains)
{
    uint64_t state = test_seed();
    for (int i = 0; i < (RANKS_SLOW ? 8 : 40); i++)
        check_random(&state, 5);
}

/* Enough elements that no luck is involved, in the shape of `mok check`. */
TEST(errors_of_a_larger_layer)
{
    mok_config c = MOK_INIT(mok_config);
    layer_problem p;
    layer_result got;
    rig_references refs;
    c.hidden = 256;
    c.intermediate = 384;
    c.shared_intermediate = 128;
    c.num_experts = 8;
    c.topk = 3;
    enum { TOKENS = RANKS_SLOW ? 40 : 200 };
    if (!layer_make(&p, &c, TOKENS, LAYER_DISTINCT, 0, test_seed()) || !rig_references_make(&refs, &p))
        exit(1);
    layer_options o = {.ranks = 4, .grad_dtype = MOK_FP32, .cpu_threads = 1};
    rig_run("the larger layer", &p, &o, &got);
    rig_check_errors(&p, &refs, &got);
    CHECK(reference_error_bf16(got.out, refs.exact.out, TOKENS * 256) > 1e-4); /* the truth is not what the library computes */
    CHECK(reference_error_double(refs.chain.dx, refs.exact.dx, TOKENS * 256) > 1e-4);
    layer_result_free(&got);
    rig_references_free(&refs);
    layer_free(&p);
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
