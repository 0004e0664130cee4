/* Public bug reports against other systems, as small runs of our layer: the id is in the case's name.
 * Rows shown elsewhere: S1 also stage.wgrad; D2 stage.s5_combine; C3, D1, F6, P6, R6 end2end.bits; C6, D4, N1 end2end.workspace; N13
 * end2end.reference; M1, S8 unit.layout; C8, F1, F2, F4, S8, S9 fault. Rows that need a GPU, FP8 or PyTorch are not here. */
#include "../end2end/rig.h"

#include <malloc.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OWN_ALLOCATOR 1 /* the sanitizer's: it does not answer mallinfo, and aborts on absurd sizes */
#else
#define OWN_ALLOCATOR 0
#endif

/* The toy shape of the table is E=8, H=256, I=512, K=2; narrower here where width is not the point. */
static mok_config shape(int64_t experts, int64_t topk)
{
    mok_config c = MOK_INIT(mok_config);
    c.hidden = 128;
    c.intermediate = 64;
    c.num_experts = experts;
    c.topk = topk;
    return c;
}

static void make(layer_problem *p, const mok_config *c, int64_t tokens)
{
    if (!layer_make(p, c, tokens, LAYER_UNIFORM, 0, test_seed()))
        exit(1);
}

/* K = 1, as many routes to each expert as `counts` says, in an order that mixes them. */
static int64_t route_counts(layer_problem *p, const mok_config *c, const int64_t *counts)
{
    int64_t n = 0, at = 0;
    for (int64_t e = 0; e < c->num_experts; e++)
        n += counts[e];
    make(p, c, n);
    for (int64_t e = 0; e < c->num_experts; e++)
        for (int64_t i = 0; i < counts[e]; i++, at++)
            p->expert_ids[at * 7919 % n] = (int32_t)e; /* 7919 is prime and no n here is a multiple of it */
    return n;
}

static layer_options options(int32_t ranks) { return (layer_options){.ranks = ranks, .cpu_threads = 1, .before_pass = rig_poison}; }
static layer_options small_ring(int32_t ranks)
{
    layer_options o = options(ranks);
    o.ring_rows = 256;
    o.minibatch_rows = o.minibatch_rows_bwd = 128;
    return o;
}

/* Runs and compares with float64; the result stays for further checks. */
static void run_against_oracle(const char *what, const layer_problem *p, const layer_options *o, layer_result *r)
{
    rig_references refs;
    int before = test_failures;
    if (!rig_references_make(&refs, p))
        exit(1);
    if (rig_run(what, p, o, r))
        rig_check_errors(p, &refs, r);
    if (test_failures != before)
        printf("  … in %s\n", what);
    rig_references_free(&refs);
}

static bool all_zero(const void *memory, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i++)
        if (((const unsigned char *)memory)[i])
            return false;
    return true;
}

/* Exact zeros where nothing was routed, in all three matrices. */
static void check_empty_experts(const layer_problem *p, const layer_result *r, const int64_t *counts)
{
    int64_t bytes = p->cfg.intermediate * p->cfg.hidden * r->grad_bytes;
    for (int64_t e = 0; e < p->cfg.num_experts; e++) {
        CHECK_EQ(all_zero((char *)r->dgate + e * bytes, bytes), counts[e] == 0);
        CHECK_EQ(all_zero((char *)r->dup + e * bytes, bytes), counts[e] == 0);
        CHECK_EQ(all_zero((char *)r->ddown + e * bytes, bytes), counts[e] == 0);
        CHECK_EQ(r->tokens_per_expert[e], counts[e]);
    }
}

/* --- Z --------------------------------------------------------------------------------------------------------------------------------- */
static void empty_experts(const int64_t *counts, int64_t experts, int32_t ranks, mok_dtype dtype)
{
    mok_config c = shape(experts, 1);
    layer_problem p;
    layer_result r;
    layer_options o = small_ring(ranks);
    route_counts(&p, &c, counts);
    o.grad_dtype = dtype;
    run_against_oracle("empty experts", &p, &o, &r);
    check_empty_experts(&p, &r, counts);
    layer_result_free(&r);
    layer_free(&p);
}

TEST(Z1_backward_with_experts_without_tokens)
{
    static const int64_t counts[] = {128, 0, 256, 0};
    for (int32_t ranks = 1; ranks <= 4; ranks += 1 + RANKS_SLOW)
        empty_experts(counts, 4, ranks, MOK_BF16);
}

TEST(Z2_weight_gradients_of_empty_experts_are_zero)
{
    static const int64_t counts[] = {162, 0, 2577, 446, 0, 83};
    empty_experts(counts, 6, 1, MOK_BF16);
    if (!RANKS_SLOW)
        empty_experts(counts, 6, 3, MOK_FP32);
    static const int64_t none[] = {0, 0, 5, 0, 0, 0}, last[] = {0, 0, 0, 0, 0, 1};
    empty_experts(none, 6, 4, MOK_BF16);
    empty_experts(last, 6, 2, MOK_BF16);
}

TEST(Z2_all_routes_dropped)
{
    mok_config c = shape(4, 2);
    layer_problem p;
    layer_result r;
    static const int64_t counts[4] = {0};
    make(&p, &c, 20);
    for (int i = 0; i < 40; i++)
        p.expert_ids[i] = -1;
    for (int32_t ranks = 1; ranks <= 3; ranks++) {
        layer_options o = small_ring(ranks);
        rig_run("all dropped", &p, &o, &r);
        check_empty_experts(&p, &r, counts);
        CHECK(all_zero(r.out, 20 * 128 * 2));
        CHECK(all_zero(r.dx, 20 * 128 * 2));
        CHECK(all_zero(r.drouter_weights, 40 * 4));
        layer_result_free(&r);
    }
    layer_free(&p);
}

TEST(Z4_ranks_without_any_row_return_zeros)
{
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result r;
    make(&p, &c, 60);
    int64_t counts[8] = {0};
    for (int i = 0; i < 120; i++)
        counts[p.expert_ids[i] %= 2]++; /* the experts of rank 0 of 4 */
    layer_options o = options(4);
    run_against_oracle("everything to rank 0", &p, &o, &r); /* layer_run joins all ranks: nobody is left behind */
    check_empty_experts(&p, &r, counts);
    CHECK_EQ(r.info[1].rows + r.info[2].rows + r.info[3].rows, 0);
    layer_result_free(&r);
    layer_free(&p);
}

TEST(Z5_dirty_gradients_of_empty_experts)
{
    static const int64_t counts[] = {30, 0, 5, 0};
    mok_config c = shape(4, 1);
    layer_problem p;
    route_counts(&p, &c, counts);
    for (int accumulate = 0; accumulate < 2; accumulate++)
        for (int32_t ranks = 1; ranks <= 4; ranks += 3) {
            layer_result r;
            layer_options o = options(ranks);
            char error[512];
            o.accumulate = accumulate;
            if (!layer_result_make(&r, &p, &o))
                exit(1);
            int64_t n = 64 * 128;
            uint16_t *grads[] = {r.dgate, r.dup, r.ddown};
            for (int m = 0; m < 3; m++)
                for (int64_t i = 0; i < 4 * n; i++)
                    grads[m][i] = (uint16_t)(0x3f80 + i % 64 + (i & 64 ? 0x8000 : 0));
            CHECK_EQ(layer_run(&p, &o, &r, error), MOK_OK);
            for (int m = 0; m < 3; m++)
                for (int64_t e = 1; e < 4; e += 2)
                    for (int64_t i = e * n; i < (e + 1) * n; i++)
                        if (grads[m][i] != (accumulate ? (uint16_t)(0x3f80 + i % 64 + (i & 64 ? 0x8000 : 0)) : 0)) {
                            TEST_FAILED("matrix %d, expert %lld: %04x at %lld", m, (long long)e, grads[m][i], (long long)i);
                            break;
                        }
            layer_result_free(&r);
        }
    layer_free(&p);
}

TEST(Z7_a_rank_without_tokens_takes_part)
{
    static const int64_t tokens[] = {0, 4, 4, 4}, turned[] = {4, 0, 4, 0};
    mok_config c = shape(8, 2);
    c.shared_intermediate = 64;
    c.shared_gate = true;
    layer_problem p;
    layer_result r;
    make(&p, &c, 12);
    for (int i = 0; i < 24; i++)
        p.expert_ids[i] %= 2; /* all to rank 0 */
    for (int dtype = MOK_BF16; dtype <= MOK_FP32; dtype++) {
        layer_options o = options(4);
        o.tokens_of_rank = tokens;
        o.grad_dtype = (mok_dtype)dtype;
        if (dtype == MOK_FP32)
            run_against_oracle("T = 0, 4, 4, 4", &p, &o, &r);
        else
            rig_run("T = 0, 4, 4, 4", &p, &o, &r);
        CHECK_EQ(r.info[0].rows, 24);
        /* Its shared expert has seen no token: zeros, not what was in memory. */
        CHECK(all_zero(r.dshared_gate, 64 * 128 * r.grad_bytes));
        CHECK(all_zero(r.dshared_up, 64 * 128 * r.grad_bytes));
        CHECK(all_zero(r.dshared_down, 64 * 128 * r.grad_bytes));
        CHECK(all_zero(r.dshared_output_gate, 128 * r.grad_bytes));
        CHECK(!all_zero((char *)r.dshared_down + 64 * 128 * r.grad_bytes, 64 * 128 * r.grad_bytes));
        layer_result_free(&r);
    }
    layer_free(&p);
    make(&p, &c, 8);
    layer_options o = options(4);
    o.tokens_of_rank = turned;
    o.grad_dtype = MOK_FP32;
    o.accumulate = true; /* and where it accumulates, what was there stays */
    char error[512];
    if (!layer_result_make(&r, &p, &o))
        exit(1);
    CHECK_EQ(layer_run(&p, &o, &r, error), MOK_OK);
    for (int64_t rank = 1; rank < 4; rank += 2) {
        CHECK_EQ(((uint32_t *)r.dshared_up)[rank * 64 * 128 + 5], UINT32_MAX);
        CHECK_EQ(((uint32_t *)r.dshared_output_gate)[rank * 128 + 127], UINT32_MAX);
    }
    layer_result_free(&r);
    layer_free(&p);
}

TEST(Z7_no_tokens_anywhere)
{
    mok_config c = shape(5, 2);
    layer_problem p;
    layer_result r;
    static const int64_t counts[5] = {0};
    make(&p, &c, 0);
    for (int32_t ranks = 1; ranks <= 3; ranks++) {
        layer_options o = options(ranks);
        o.recompute = ranks == 2;
        o.two_call_backward = ranks == 3;
        rig_run("no tokens", &p, &o, &r);
        check_empty_experts(&p, &r, counts);
        layer_result_free(&r);
    }
    layer_free(&p);
}

TEST(Z10_token_counts_around_powers_of_two)
{
    static const int64_t tokens[] = {1, 2, 7, 63, 64, 65, 127, 128, 129, 255};
    mok_config c = shape(8, 2);
    for (int i = 0; i < 10; i++) {
        layer_problem p;
        layer_result want, got;
        make(&p, &c, tokens[i]);
        layer_options alone = options(1);
        run_against_oracle("one rank", &p, &alone, &want);
        for (int32_t threads = 1; threads <= 3; threads += 2)
            for (int32_t sms = 0; sms <= 16; sms += RANKS_SLOW ? 16 : 8) { /* settings of a GPU: they change no bit and cost a CPU nothing */
                layer_options o = small_ring(2 + threads);
                o.cpu_threads = threads;
                p.cfg.comm_sms = p.cfg.comm_sms_bwd = sms;
                p.cfg.reserve_sms = sms / 2;
                rig_run("several", &p, &o, &got);
                ranks_same_results("several", &p, &got, &want, true);
                layer_result_free(&got);
            }
        layer_result_free(&want);
        layer_free(&p);
    }
}

TEST(Z11_a_different_token_count_on_every_rank)
{
    static const int64_t tokens[] = {0, 1, 37, 200};
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result r, want;
    make(&p, &c, 238);
    layer_options o = small_ring(4), alone = options(1);
    o.tokens_of_rank = tokens;
    run_against_oracle("T = 0, 1, 37, 200", &p, &o, &r);
    rig_run("one rank", &p, &alone, &want);
    ranks_same_results("T = 0, 1, 37, 200", &p, &r, &want, true);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(r.info[i].tokens_global, 238);
    layer_result_free(&r);
    layer_result_free(&want);
    layer_free(&p);
}

/* --- S --------------------------------------------------------------------------------------------------------------------------------- */
TEST(S1_weight_gradients_of_every_width)
{
    static const int64_t widths[] = {64, 128, 192, 320, 512, 768, 832, 896};
    for (int i = 0; i < 8; i += 1 + RANKS_SLOW) {
        mok_config c = shape(4, 1);
        layer_problem p;
        layer_result r;
        const int64_t counts[] = {RANKS_SLOW ? 16 : 128, 128, 0, RANKS_SLOW ? 1 : 128};
        c.intermediate = widths[i];
        c.hidden = widths[7 - i] > (RANKS_SLOW ? 64 : 512) ? 192 : widths[7 - i];
        route_counts(&p, &c, counts);
        layer_options o = small_ring(2);
        run_against_oracle("a width", &p, &o, &r);
        check_empty_experts(&p, &r, counts);
        layer_result_free(&r);
        layer_free(&p);
    }
}

TEST(S3_group_sizes_need_no_alignment)
{
    static const int64_t counts[] = {1, 63, 64, 65, 127, 128, 129};
    for (int32_t ranks = 1; ranks <= 8; ranks += 3)
        empty_experts(counts, 7, ranks, MOK_BF16);
}

TEST(S5_group_sizes_of_odd_counts)
{
    static const int64_t counts[] = {44, 1, 31, 33};
    empty_experts(counts, 4, 2, MOK_BF16);
}

TEST(S6_hidden_sizes)
{
    static const int64_t hidden[] = {64, 512, 1536, 2048, 2880, 3072, 7168};
    for (int i = 0; i < (RANKS_SLOW ? 5 : 7); i++) {
        mok_config c = shape(3, 2);
        layer_problem p;
        layer_result r;
        c.hidden = hidden[i];
        make(&p, &c, 5);
        layer_options o = options(2);
        run_against_oracle("a hidden size", &p, &o, &r);
        layer_result_free(&r);
        layer_free(&p);
    }
    mok_config c = shape(3, 2);
    mok_plan plan = MOK_INIT(mok_plan);
    c.max_tokens = 5;
    for (c.hidden = 2881; c.hidden < 2944; c.hidden++) { /* the others: an error that names the rule */
        CHECK_EQ(mok_plan_query(&c, 2, 0, 0, 0, 0, &plan, NULL, NULL), MOK_E_SHAPE);
        CHECK_STR(mok_last_error(), "it must be a multiple of 64");
    }
}

TEST(S4_every_size_can_be_planned)
{
    for (int64_t hidden = 256; hidden <= 8192; hidden += 128) {
        mok_config c = shape(8, 2);
        mok_plan plan = MOK_INIT(mok_plan);
        c.hidden = hidden;
        c.intermediate = 8448 - hidden;
        c.max_tokens = 256;
        CHECK_EQ(mok_plan_query(&c, 8, 3, 132, 0, 0, &plan, NULL, NULL), MOK_OK);
    }
}

TEST(S8_experts_that_ranks_do_not_divide)
{
    static const struct { int64_t experts; int32_t ranks; } splits[] = {{10, 4}, {3, 4}, {8, 3}, {1, 8}, {7, 5}, {2, 8}};
    for (int i = 0; i < 6; i++) {
        mok_config c = shape(splits[i].experts, splits[i].experts < 2 ? 1 : 2);
        layer_problem p;
        layer_result r, want;
        make(&p, &c, 50);
        layer_options o = small_ring(splits[i].ranks), alone = options(1);
        run_against_oracle("an uneven split", &p, &o, &r);
        rig_run("alone", &p, &alone, &want);
        ranks_same_results("an uneven split", &p, &r, &want, true);
        layer_result_free(&r);
        layer_result_free(&want);
        layer_free(&p);
    }
}

TEST(S11_forward_and_backward_are_checked_together)
{
    mok_config c = shape(4, 2);
    mok_plan plan = MOK_INIT(mok_plan);
    c.max_tokens = 100;
    c.ring_rows = 512;
    c.minibatch_rows = 128;
    c.minibatch_rows_bwd = 384; /* fits the forward, not the backward */
    CHECK_EQ(mok_plan_query(&c, 2, 0, 0, 0, 0, &plan, NULL, NULL), MOK_E_SHAPE);
    CHECK_STR(mok_last_error(), "384 backward): it must be at least 768");
}

/* --- R --------------------------------------------------------------------------------------------------------------------------------- */
TEST(R1_dropped_routes_touch_nobody_else)
{
    mok_config c = shape(8, 2);
    layer_problem p, q;
    layer_result with, without;
    uint64_t state = test_seed();
    make(&p, &c, 120);
    make(&q, &c, 120); /* the same draw */
    bool changed[120] = {false};
    for (int64_t t = 40; t < 80; t++) /* tokens of rank 1 of 3 */
        for (int64_t k = 0; k < 2; k++)
            if (test_uniform(&state) < 0.3) {
                q.expert_ids[t * 2 + k] = -1;
                changed[t] = true;
            }
    layer_options o = small_ring(3);
    run_against_oracle("with dropped routes", &q, &o, &with);
    rig_run("without", &p, &o, &without);
    for (int64_t t = 0; t < 120; t++) {
        if (!changed[t]) {
            CHECK_BYTES(with.out + t * 128, without.out + t * 128, 256);
            CHECK_BYTES(with.dx + t * 128, without.dx + t * 128, 256);
            CHECK_BYTES(with.drouter_weights + t * 2, without.drouter_weights + t * 2, 8);
        }
        for (int64_t k = 0; k < 2; k++) /* the routes that stay have their gradient, the dropped have none */
            if (q.expert_ids[t * 2 + k] < 0)
                CHECK(with.drouter_weights[t * 2 + k] == 0);
            else
                CHECK_BYTES(with.drouter_weights + t * 2 + k, without.drouter_weights + t * 2 + k, 4);
    }
    layer_result_free(&with);
    layer_result_free(&without);
    layer_free(&p);
    layer_free(&q);
}

TEST(R3_duplicate_ids_are_two_rows)
{
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result r;
    make(&p, &c, 40);
    for (int64_t t = 0; t < 40; t += 2)
        p.expert_ids[2 * t] = p.expert_ids[2 * t + 1] = 3;
    for (int32_t ranks = 1; ranks <= 4; ranks += 3) {
        layer_options o = options(ranks);
        run_against_oracle("ids 3, 3", &p, &o, &r);
        for (int64_t t = 0; t < 40; t += 2) /* <dh', h> of the same row twice */
            CHECK_BYTES(&r.drouter_weights[2 * t], &r.drouter_weights[2 * t + 1], 4);
        int64_t of_three = 0;
        for (int i = 0; i < 80; i++)
            of_three += p.expert_ids[i] == 3;
        CHECK_EQ(r.tokens_per_expert[3], of_three);
        layer_result_free(&r);
    }
    layer_free(&p);
}

TEST(R5_padding_tokens_cost_nothing)
{
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result r;
    make(&p, &c, 100);
    int64_t counts[8] = {0}, kept = 0;
    for (int64_t t = 0; t < 100; t++)
        for (int64_t k = 0; k < 2; k++) {
            if (t % 4 == 3)
                p.expert_ids[2 * t + k] = -1;
            else
                counts[p.expert_ids[2 * t + k]]++, kept++;
        }
    layer_options o = options(4);
    run_against_oracle("a pad mask", &p, &o, &r);
    int64_t rows = 0;
    for (int i = 0; i < 4; i++)
        rows += r.info[i].rows;
    CHECK_EQ(rows, kept);
    CHECK_BYTES(r.tokens_per_expert, counts, sizeof counts);
    for (int64_t t = 3; t < 100; t += 4) {
        CHECK(all_zero(r.out + t * 128, 256));
        CHECK(all_zero(r.dx + t * 128, 256));
        CHECK(all_zero(r.drouter_weights + 2 * t, 8));
    }
    layer_result_free(&r);
    layer_free(&p);
}

TEST(R6_everything_to_one_expert_in_the_memory_that_was_planned)
{
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result r, want;
    make(&p, &c, 400);
    for (int i = 0; i < 800; i++)
        p.expert_ids[i] = 5;
    layer_options o = small_ring(4), alone = options(1); /* T = max on every rank */
    run_against_oracle("one expert", &p, &o, &r);
    rig_run("alone", &p, &alone, &want);
    ranks_same_results("one expert", &p, &r, &want, true);
    CHECK_EQ(r.info[2].rows, 800);
    CHECK(r.stats[2].ring_rotations >= 6);
    CHECK(r.stats[2].wgrad_continued > 3);
    layer_result_free(&r);
    layer_result_free(&want);
    layer_free(&p);
}

TEST(R8_equal_tokens_on_two_ranks_have_equal_outputs)
{
    mok_config c = shape(8, 3);
    layer_problem p;
    layer_result r;
    make(&p, &c, 60);
    memcpy(p.x + 30 * 128, p.x, 30 * 128 * 2);
    memcpy(p.dout + 30 * 128, p.dout, 30 * 128 * 2);
    for (int i = 0; i < 90; i++) {
        p.router_weights[i] = 1.0f / (float)(3 + i); /* no bf16 holds these */
        p.router_weights[90 + i] = p.router_weights[i];
        p.expert_ids[90 + i] = p.expert_ids[i];
    }
    layer_options o = options(2);
    run_against_oracle("the same tokens twice", &p, &o, &r);
    CHECK_BYTES(r.out, r.out + 30 * 128, 30 * 128 * 2);
    CHECK_BYTES(r.dx, r.dx + 30 * 128, 30 * 128 * 2);
    CHECK_BYTES(r.drouter_weights, r.drouter_weights + 90, 90 * 4);
    layer_result rounded;
    for (int i = 0; i < 180; i++)
        p.router_weights[i] = layer_float(layer_bf16(p.router_weights[i]));
    rig_run("weights rounded to bf16", &p, &o, &rounded);
    CHECK(memcmp(rounded.out, r.out, 60 * 128 * 2) != 0); /* so fp32 weights were used above */
    layer_result_free(&rounded);
    layer_result_free(&r);
    layer_free(&p);
}

/* Router weights in bf16, on the caller's wish: the bits of the same values in fp32; the gradient rounded once. */
typedef struct bf16_router { layer_problem p; layer_result want, got; uint16_t *weights, *dweights; } bf16_router;

static void run_bf16_router(ranks_env *e)
{
    bf16_router *b = e->user;
    ranks_part part = ranks_part_of(e, b->p.tokens, NULL);
    void *schedule = ranks_schedule_block(e), *context = ranks_context_block(e);
    mok_schedule_args s = ranks_schedule_args(&b->p, part, schedule);
    mok_forward_args f = ranks_forward_args(e, &b->p, part, schedule, context, &b->got);
    mok_backward_args a = ranks_backward_args(e, &b->p, part, schedule, context, &b->got);
    f.router_weights = a.router_weights = b->weights + part.first * 2;
    a.drouter_weights = b->dweights + part.first * 2;
    RANKS_OK(mok_schedule(e->w, &s, NULL));
    RANKS_OK(mok_forward(e->w, &f, NULL));
    RANKS_OK(mok_backward(e->w, &a, NULL));
    free(schedule);
    free(context);
}

TEST(R8_router_weights_in_bf16)
{
    mok_config c = shape(6, 2);
    bf16_router b;
    make(&b.p, &c, 70);
    b.weights = malloc(140 * 2);
    b.dweights = malloc(140 * 2);
    b.p.expert_ids[11] = -1;
    for (int i = 0; i < 140; i++) {
        b.weights[i] = layer_bf16(b.p.router_weights[i]);
        b.p.router_weights[i] = layer_float(b.weights[i]);
    }
    layer_options o = options(3);
    rig_run("fp32", &b.p, &o, &b.want);
    if (!layer_result_make(&b.got, &b.p, &o))
        exit(1);
    mok_config r = ranks_config(128, 64, 6, 2, 70);
    r.router_dtype = MOK_BF16;
    ranks_run(3, &r, run_bf16_router, &b);
    CHECK_BYTES(b.got.out, b.want.out, 70 * 128 * 2);
    CHECK_BYTES(b.got.dx, b.want.dx, 70 * 128 * 2);
    CHECK_BYTES(b.got.dup, b.want.dup, 6 * 64 * 128 * 2);
    for (int i = 0; i < 140; i++)
        CHECK_EQ(b.dweights[i], layer_bf16(b.want.drouter_weights[i]));
    layer_result_free(&b.got);
    layer_result_free(&b.want);
    layer_free(&b.p);
    free(b.weights);
    free(b.dweights);
}

/* --- N --------------------------------------------------------------------------------------------------------------------------------- */
TEST(N1_rows_that_nobody_wrote)
{
    /* Capacity many times the rows in use, everything NaN before each of several iterations. */
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result r;
    static const int64_t tokens[] = {3, 200, 5};
    make(&p, &c, 208);
    for (int i = 6; i < 406; i++)
        if (i % 3)
            p.expert_ids[i] = -1;
    layer_options o = small_ring(3);
    o.tokens_of_rank = tokens;
    o.repeat = 3;
    run_against_oracle("three iterations", &p, &o, &r);
    layer_result_free(&r);
    layer_free(&p);
}

TEST(N3_masked_rows_full_of_nan)
{
    mok_config c = shape(8, 2);
    layer_problem p, clean;
    layer_result r, want;
    make(&p, &c, 80);
    for (int64_t t = 0; t < 80; t++)
        if (t % 5 == 0)
            p.expert_ids[2 * t] = p.expert_ids[2 * t + 1] = -1;
        else if (t % 5 == 1)
            p.expert_ids[2 * t + 1] = -1;
    make(&clean, &c, 80);
    memcpy(clean.expert_ids, p.expert_ids, 160 * 4);
    for (int64_t t = 0; t < 80; t++) {
        for (int64_t k = 0; k < 2; k++)
            if (p.expert_ids[2 * t + k] < 0)
                p.router_weights[2 * t + k] = NAN;
        if (t % 5 == 0) {
            memset(p.x + t * 128, 0xff, 256);
            memset(p.dout + t * 128, 0xff, 256);
        }
    }
    layer_options o = options(2);
    run_against_oracle("without NaN", &clean, &o, &want);
    rig_run("with NaN", &p, &o, &r);
    ranks_same_results("masked rows", &p, &r, &want, true);
    layer_result_free(&r);
    layer_result_free(&want);
    layer_free(&p);
    layer_free(&clean);
}

TEST(N5_weight_gradients_do_not_scale_with_ranks)
{
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result want, r;
    make(&p, &c, 100);
    layer_options alone = options(1);
    run_against_oracle("alone", &p, &alone, &want);
    for (int32_t ranks = 2; ranks <= 8; ranks *= 2) {
        layer_options o = options(ranks);
        rig_run("several", &p, &o, &r);
        ranks_same_results("several", &p, &r, &want, true); /* not within tolerance: the same bits */
        layer_result_free(&r);
    }
    layer_result_free(&want);
    layer_free(&p);
}

TEST(N6_dx_of_tokens_routed_to_four_ranks)
{
    mok_config c = shape(8, 4);
    layer_problem p;
    layer_result r;
    make(&p, &c, 64);
    for (int64_t t = 0; t < 64; t++)
        for (int64_t k = 0; k < 4; k++)
            p.expert_ids[4 * t + k] = (int32_t)((2 * k + t) % 8); /* one expert of each rank */
    layer_options o = options(4);
    run_against_oracle("four ranks", &p, &o, &r);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(r.info[i].rows, 64);
    layer_result_free(&r);
    layer_free(&p);
}

TEST(N7_router_gradients_over_four_ranks)
{
    mok_config c = shape(4, 4);
    layer_problem p;
    layer_result r;
    rig_references refs;
    make(&p, &c, 50);
    for (int64_t i = 0; i < 200; i++)
        p.expert_ids[i] = (int32_t)((i + i / 4) % 4);
    layer_options o = options(4);
    run_against_oracle("K = 4 over 4 ranks", &p, &o, &r);
    if (!rig_references_make(&refs, &p))
        exit(1);
    double chain = 0; /* what the bf16 chain is wrong by, on average */
    for (int64_t i = 0; i < 200; i++)
        chain += pow(refs.chain.drouter_weights[i] - refs.exact.drouter_weights[i], 2) / 200;
    for (int64_t i = 0; i < 200; i++) /* each by itself, not only their norm: none is missing, none is another's */
        if (fabs(r.drouter_weights[i] - refs.exact.drouter_weights[i]) > 10 * sqrt(chain))
            TEST_FAILED("dw[%lld] is %g; expected %g", (long long)i, (double)r.drouter_weights[i], refs.exact.drouter_weights[i]);
    rig_references_free(&refs);
    layer_result_free(&r);
    layer_free(&p);
}

/* Another thread allocates, poisons and frees all the while. */
typedef struct churn { int stop; } churn;

static void *churn_main(void *argument)
{
    churn *c = argument;
    uint64_t state = 4;
    while (!__atomic_load_n(&c->stop, __ATOMIC_RELAXED)) {
        size_t bytes = (size_t)(1 + test_below(&state, 200000));
        void *p = malloc(bytes);
        memset(p, 0xff, bytes);
        free(p);
    }
    return NULL;
}

TEST(N12_identical_steps_beside_a_busy_allocator)
{
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result want, r;
    churn side = {0};
    pthread_t thread;
    make(&p, &c, 60);
    layer_options o = small_ring(2);
    o.cpu_threads = 2;
    rig_run("the first step", &p, &o, &want);
    REQUIRE(pthread_create(&thread, NULL, churn_main, &side) == 0);
    for (int i = 0; i < (RANKS_SLOW ? 4 : 30); i++) {
        rig_run("a step", &p, &o, &r);
        ranks_same_results("a step", &p, &r, &want, true);
        layer_result_free(&r);
    }
    __atomic_store_n(&side.stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    layer_result_free(&want);
    layer_free(&p);
}

/* --- M --------------------------------------------------------------------------------------------------------------------------------- */
typedef struct measured { int64_t planned, workers; size_t in_use; } measured;

static size_t in_use(void)
{
    struct mallinfo2 m = mallinfo2();
    return m.uordblks + m.hblkhd;
}

static void measure(ranks_env *e)
{
    measured *m = e->user;
    size_t heap = malloc_usable_size(e->w->heap), local = malloc_usable_size(e->w->local);
    CHECK(heap >= (size_t)e->plan.heap_bytes && heap < (size_t)e->plan.heap_bytes + 8192);
    CHECK(local >= (size_t)e->plan.local_bytes && local < (size_t)e->plan.local_bytes + 8192);
    /* The plan made before anything existed. */
    mok_plan before = MOK_INIT(mok_plan);
    CHECK_EQ(mok_plan_query(e->wish, e->ranks, e->rank, 0, 0, 0, &before, NULL, NULL), MOK_OK);
    CHECK_EQ(before.heap_bytes, e->plan.heap_bytes);
    CHECK_EQ(before.local_bytes, e->plan.local_bytes);
    CHECK_EQ(before.schedule_bytes, e->plan.schedule_bytes);
    CHECK_EQ(before.context_bytes, e->plan.context_bytes);
    CHECK_EQ(before.ring_rows, e->plan.ring_rows);
    CHECK_EQ(before.saved_rows, e->plan.saved_rows);
    CHECK_EQ(before.forward.minibatch_rows, e->plan.forward.minibatch_rows);
    CHECK_EQ(before.backward.minibatch_rows, e->plan.backward.minibatch_rows);
    __atomic_add_fetch(&m->planned, e->plan.heap_bytes + e->plan.local_bytes, __ATOMIC_RELAXED);
    __atomic_add_fetch(&m->workers, e->cfg.cpu_threads, __ATOMIC_RELAXED);
    ranks_meet(e);
    if (e->rank == 0)
        m->in_use = in_use();
    ranks_meet(e);
}

TEST(M8_plan_equals_what_a_workspace_takes)
{
    for (int i = 0; i < 4; i++) {
        mok_config c = ranks_config(128 + 64 * i, 192, 5 + 9 * i, 2 + i, 700);
        measured m = {0, 0, 0};
        c.shared_intermediate = 64 * (i % 2);
        c.save = (mok_save)i;
        c.ring_rows = i == 3 ? 1024 : 0;
        size_t before = in_use();
        ranks_run(1 + i, &c, measure, &m);
        if (OWN_ALLOCATOR)
            continue;
        CHECK(m.in_use - before >= (size_t)m.planned);
        /* Beside it only handles and the workers' tiles. */
        CHECK_LE(m.in_use - before, m.planned + m.workers * (4 << 20) + (1 << 20));
        CHECK_LE(in_use(), before + 65536); /* and all of it is given back */
    }
}

static void many_passes(ranks_env *e)
{
    measured *m = e->user;
    enum { LAYERS = 8 };
    layer_problem p;
    layer_result r;
    layer_options o = {.ranks = e->ranks};
    void *schedule[LAYERS], *context[LAYERS];
    mok_config c = shape(8, 2);
    if (!layer_make(&p, &c, 100, LAYER_UNIFORM, 0, 9) || !layer_result_make(&r, &p, &o))
        exit(1);
    ranks_part part = ranks_part_of(e, 100, NULL);
    for (int i = 0; i < LAYERS; i++) {
        schedule[i] = ranks_schedule_block(e);
        context[i] = ranks_context_block(e);
    }
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < LAYERS; i++) {
            mok_schedule_args s = ranks_schedule_args(&p, part, schedule[i]);
            mok_forward_args f = ranks_forward_args(e, &p, part, schedule[i], context[i], &r);
            RANKS_OK(mok_schedule(e->w, &s, NULL));
            RANKS_OK(mok_forward(e->w, &f, NULL));
        }
        for (int i = LAYERS - 1; i >= 0; i--) {
            mok_backward_args b = ranks_backward_args(e, &p, part, schedule[i], context[i], &r);
            RANKS_OK(mok_backward(e->w, &b, NULL));
        }
        ranks_meet(e);
        if (e->rank == 0) { /* eight layers take no more than one: the caller's contexts are all that grows */
            if (round == 0)
                m->in_use = in_use();
            else
                CHECK_LE(in_use(), m->in_use + 4096);
        }
        ranks_meet(e);
    }
    for (int i = 0; i < LAYERS; i++) {
        free(schedule[i]);
        free(context[i]);
    }
    layer_result_free(&r);
    layer_free(&p);
}

TEST(M5_eight_layers_take_one_workspace)
{
    mok_config c = ranks_config(128, 64, 8, 2, 100);
    measured m = {0, 0, 0};
    ranks_run(2, &c, many_passes, &m);
}

static void too_large(ranks_env *e)
{
    mok_config c = ranks_config(1 << 20, 64, 6, 2, 1 << 20);
    mok_plan plan = MOK_INIT(mok_plan);
    mok_workspace *w = NULL;
    char words[64];
    c.ring_rows = 1 << 30;
    CHECK_EQ(mok_plan_query(&c, e->ranks, e->rank, 0, 0, 0, &plan, NULL, NULL), MOK_OK); /* a number, before anything is taken */
    snprintf(words, sizeof words, "no memory for a workspace of %lld bytes", (long long)(plan.heap_bytes + plan.local_bytes));
    RANKS_FAIL(mok_workspace_create(e->group, &c, &w), MOK_E_MEMORY, words);
    CHECK(w == NULL);
}

TEST(M6_what_does_not_fit_is_refused_with_the_number)
{
    if (OWN_ALLOCATOR)
        SKIP("the sanitizer's allocator aborts on sizes that cannot be had");
    ranks_run(1, NULL, too_large, NULL);
    ranks_run(3, NULL, too_large, NULL);
}

/* --- C, A, P --------------------------------------------------------------------------------------------------------------------------- */
TEST(C1_the_same_step_many_times)
{
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result want, r;
    make(&p, &c, 256);
    layer_options o = small_ring(4);
    o.cpu_threads = 2;
    rig_run("once", &p, &o, &want);
    for (int i = 0; i < (RANKS_SLOW ? 1 : 6); i++) {
        o.repeat = RANKS_SLOW ? 3 : 12;
        rig_run("again", &p, &o, &r);
        ranks_same_results("again", &p, &r, &want, true);
        layer_result_free(&r);
    }
    layer_result_free(&want);
    layer_free(&p);
}

TEST(C11_fewer_workers_than_anything)
{
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result one, many;
    make(&p, &c, 100);
    layer_options o = small_ring(2);
    rig_run("one worker", &p, &o, &one);
    o.cpu_threads = 7;
    rig_run("seven workers", &p, &o, &many);
    ranks_same_results("workers", &p, &many, &one, true);
    layer_result_free(&one);
    layer_result_free(&many);
    layer_free(&p);
}

/* One workspace and one piece of schedule memory, routing after routing. */
typedef struct replay { layer_problem p[4]; layer_result want[4], got[4]; } replay;

static void run_replay(ranks_env *e)
{
    replay *d = e->user;
    void *schedule = ranks_schedule_block(e), *context = ranks_context_block(e);
    for (int round = 0; round < 8; round++) {
        layer_problem *p = &d->p[round % 4];
        ranks_part part = ranks_part_of(e, p->tokens, NULL);
        mok_schedule_args s = ranks_schedule_args(p, part, schedule);
        mok_forward_args f = ranks_forward_args(e, p, part, schedule, context, &d->got[round % 4]);
        mok_backward_args b = ranks_backward_args(e, p, part, schedule, context, &d->got[round % 4]);
        RANKS_OK(mok_schedule(e->w, &s, NULL));
        RANKS_OK(mok_forward(e->w, &f, NULL));
        RANKS_OK(mok_backward(e->w, &b, NULL));
    }
    free(schedule);
    free(context);
}

TEST(A3_the_same_memory_with_another_routing_each_time)
{
    replay d;
    mok_config c = shape(8, 2), w = ranks_config(128, 64, 8, 2, 150);
    static const int64_t tokens[] = {150, 3, 77, 128};
    layer_options alone = options(1), o = options(3);
    for (int i = 0; i < 4; i++) {
        if (!layer_make(&d.p[i], &c, tokens[i], i % 2 ? LAYER_ONE_EXPERT : LAYER_UNIFORM, 0.2, test_seed() + (uint64_t)i))
            exit(1);
        rig_run("alone", &d.p[i], &alone, &d.want[i]);
        if (!layer_result_make(&d.got[i], &d.p[i], &o))
            exit(1);
    }
    w.ring_rows = 256;
    w.minibatch_rows = w.minibatch_rows_bwd = 128;
    ranks_run(3, &w, run_replay, &d);
    for (int i = 0; i < 4; i++) {
        ranks_same_results("a routing", &d.p[i], &d.got[i], &d.want[i], true);
        layer_result_free(&d.want[i]);
        layer_result_free(&d.got[i]);
        layer_free(&d.p[i]);
    }
}

TEST(A9_what_is_not_built_is_refused_at_construction)
{
    mok_group *group;
    mok_workspace *w = NULL;
    REQUIRE(mok_group_create_local(1, NULL, &group) == MOK_OK);
    mok_config c = ranks_config(64, 64, 2, 1, 4);
    c.activation = MOK_ACT_GPT_OSS;
    CHECK_EQ(mok_workspace_create(group, &c, &w), MOK_E_UNSUPPORTED);
    CHECK_STR(mok_last_error(), "use MOK_ACT_SWIGLU"); /* with the alternative */
    CHECK(w == NULL);
    mok_group_destroy(group);
}

TEST(P9_rows_moved_are_rows_routed)
{
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result r;
    make(&p, &c, 90);
    int64_t routed = 0, rows = 0, moved = 0, padding = 0, table = 0;
    for (int i = 0; i < 180; i++)
        routed += (p.expert_ids[i] = i % 7 == 0 ? -1 : p.expert_ids[i]) >= 0;
    layer_options o = options(4);
    o.forward_only = true;
    rig_run("a forward", &p, &o, &r);
    for (int i = 0; i < 4; i++) {
        rows += r.info[i].rows;
        table += r.info[i].table_rows;
        moved += r.stats[i].rows_pulled + r.stats[i].rows_copied;
        padding += r.stats[i].rows_padding; /* computed for nobody, and said so */
    }
    CHECK_EQ(rows, routed);
    CHECK_EQ(moved, routed);
    CHECK_EQ(padding, table - routed);
    layer_result_free(&r);
    layer_free(&p);
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
