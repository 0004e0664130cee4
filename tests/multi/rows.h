/* Public bug reports against other systems, as single runs of our layer: the id is in the case's name. One body of each for every backend: included by
 * multi/test_public.c (cpu), gpu/test_rows.c (a real GPU) and emu/test_rows.cpp (the emulated one), which say before:
 *
 *   ROWS_BACKEND      the backend of all runs that are tested
 *   ROWS_DEVICES      their ranks' devices; NULL: the cpu's
 *   ROWS_POISON       what fills a workspace with NaN before a pass
 *   ROWS_BEFORE_RUN() what comes before a run
 *   ROWS_SLOW         1: fewer and smaller runs
 *
 * C and C++. What is exact is compared bit for bit, everything else with float64: errors are at most twice those of the bf16 chain. */
#ifndef MOK_TEST_ROWS_H
#define MOK_TEST_ROWS_H
#include "../end2end/rig.h"
#include "layer_rank.h"

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

/* A run of the problem; a failure is a failed check. */
static bool run_row(const char *what, const layer_problem *p, const layer_options *o, layer_result *r)
{
    ROWS_BEFORE_RUN();
    return rig_run(what, p, o, r);
}

static layer_options options(int32_t ranks)
{
    layer_options o;
    memset(&o, 0, sizeof o);
    o.ranks = ranks;
    o.cpu_threads = 1;
    o.backend = ROWS_BACKEND;
    o.devices = ROWS_DEVICES;
    o.before_pass = ROWS_POISON;
    return o;
}
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
    if (run_row(what, p, o, r))
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
    for (int32_t ranks = 1; ranks <= 4; ranks += 1 + ROWS_SLOW)
        empty_experts(counts, 4, ranks, MOK_BF16);
}

TEST(Z2_weight_gradients_of_empty_experts_are_zero)
{
    static const int64_t counts[] = {162, 0, 2577, 446, 0, 83};
    empty_experts(counts, 6, 1, MOK_BF16);
    if (!ROWS_SLOW)
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
        run_row("all dropped", &p, &o, &r);
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
            uint16_t *grads[] = {(uint16_t *)r.dgate, (uint16_t *)r.dup, (uint16_t *)r.ddown};
            for (int m = 0; m < 3; m++)
                for (int64_t i = 0; i < 4 * n; i++)
                    grads[m][i] = (uint16_t)(0x3f80 + i % 64 + (i & 64 ? 0x8000 : 0));
            ROWS_BEFORE_RUN();
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

static float value_of(const void *memory, int64_t i, bool fp32) { return fp32 ? ((const float *)memory)[i] : layer_float(((const uint16_t *)memory)[i]); }

/* old + fp32 sum, rounded once: the sum comes from a fresh fp32 run. */
static void check_accumulated(const char *what, const void *old, const void *sum, const void *got, int64_t n, bool fp32, const bool *empty, int64_t per_expert)
{
    for (int64_t i = 0; i < n; i++) {
        float o = value_of(old, i, fp32), total = o + ((const float *)sum)[i], g = value_of(got, i, fp32);
        float want = empty && empty[i / per_expert] ? o : fp32 ? total : layer_float(layer_bf16(total));
        if (memcmp(&want, &g, 4)) {
            TEST_FAILED("%s[%lld] is %.9g; expected %.9g", what, (long long)i, (double)g, (double)want);
            return;
        }
    }
}

static void accumulate(mok_dtype dtype, int32_t ranks, bool ring)
{
    enum { E = 5, K = 2, H = 128, I = 192, IS = 64, MANY = ROWS_SLOW ? 250 : 700 };
    mok_config c = shape(E, K);
    layer_problem p;
    layer_result fresh, old, got;
    char error[512];
    uint64_t state = test_seed();
    bool fp32 = dtype == MOK_FP32, empty[E];
    layer_options o = ring ? small_ring(ranks) : options(ranks);
    o.grad_dtype = MOK_FP32;
    c.intermediate = I;
    c.shared_intermediate = IS;
    c.shared_gate = true;
    if (!layer_make(&p, &c, MANY, LAYER_UNIFORM, 0.1, test_seed() + 1))
        exit(1);
    for (int64_t i = 0; i < MANY * K; i++) /* expert 2 gets nothing, expert 0 a lot */
        if (p.expert_ids[i] == 2 || i % 3 == 0)
            p.expert_ids[i] = 0;
    for (int x = 0; x < E; x++) {
        empty[x] = true;
        for (int64_t i = 0; i < MANY * K; i++)
            empty[x] &= p.expert_ids[i] != x;
    }
    CHECK(empty[2] && !empty[0]);
    run_row("fresh", &p, &o, &fresh);
    o.grad_dtype = dtype;
    o.accumulate = true;
    if (!layer_result_make(&old, &p, &o) || !layer_result_make(&got, &p, &o))
        exit(1);
    void *olds[] = {old.dgate, old.dup, old.ddown, old.dshared_gate, old.dshared_up, old.dshared_down, old.dshared_output_gate};
    void *gots[] = {got.dgate, got.dup, got.ddown, got.dshared_gate, got.dshared_up, got.dshared_down, got.dshared_output_gate};
    void *sums[] = {fresh.dgate, fresh.dup, fresh.ddown, fresh.dshared_gate, fresh.dshared_up, fresh.dshared_down, fresh.dshared_output_gate};
    int64_t counts[] = {E * I * H, E * I * H, E * I * H, ranks * IS * H, ranks * IS * H, ranks * IS * H, ranks * H};
    for (int m = 0; m < 7; m++)
        for (int64_t i = 0; i < counts[m]; i++) {
            float v = i % 17 ? (float)test_normal(&state) : -0.0f;
            if (fp32)
                ((float *)olds[m])[i] = ((float *)gots[m])[i] = v;
            else
                ((uint16_t *)olds[m])[i] = ((uint16_t *)gots[m])[i] = layer_bf16(v);
        }
    ROWS_BEFORE_RUN();
    CHECK_EQ(layer_run(&p, &o, &got, error), MOK_OK);
    static const char *const names[] = {"dgate", "dup", "ddown", "dshared_gate", "dshared_up", "dshared_down", "dshared_output_gate"};
    for (int m = 0; m < 7; m++)
        check_accumulated(names[m], olds[m], sums[m], gots[m], counts[m], fp32, m < 3 ? empty : NULL, I * H);
    if (ring)
        CHECK(got.stats[0].wgrad_continued > 0);
    layer_result_free(&fresh);
    layer_result_free(&old);
    layer_result_free(&got);
    layer_free(&p);
}

TEST(Z5_accumulate_bf16_rounds_once) { accumulate(MOK_BF16, 1, false); }
TEST(Z5_accumulate_fp32) { accumulate(MOK_FP32, 3, false); }
TEST(Z5_accumulate_over_a_cut_expert) { accumulate(MOK_BF16, 2, true); }

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
            run_row("T = 0, 4, 4, 4", &p, &o, &r);
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
    ROWS_BEFORE_RUN();
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
        run_row("no tokens", &p, &o, &r);
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
            for (int32_t sms = 0; sms <= 16; sms += ROWS_SLOW ? 16 : 8) { /* settings of a GPU: they change no bit and cost a CPU nothing */
                layer_options o = small_ring(2 + threads);
                o.cpu_threads = threads;
                p.cfg.comm_sms = p.cfg.comm_sms_bwd = sms;
                p.cfg.reserve_sms = sms / 2;
                run_row("several", &p, &o, &got);
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
    run_row("one rank", &p, &alone, &want);
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
    for (int i = 0; i < 8; i += 1 + ROWS_SLOW) {
        mok_config c = shape(4, 1);
        layer_problem p;
        layer_result r;
        const int64_t counts[] = {ROWS_SLOW ? 16 : 128, 128, 0, ROWS_SLOW ? 1 : 128};
        c.intermediate = widths[i];
        c.hidden = widths[7 - i] > (ROWS_SLOW ? 64 : 512) ? 192 : widths[7 - i];
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
    for (int i = 0; i < (ROWS_SLOW ? 5 : 7); i++) {
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
        run_row("alone", &p, &alone, &want);
        ranks_same_results("an uneven split", &p, &r, &want, true);
        layer_result_free(&r);
        layer_result_free(&want);
        layer_free(&p);
    }
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
    run_row("without", &p, &o, &without);
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
    run_row("alone", &p, &alone, &want);
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
    run_row("weights rounded to bf16", &p, &o, &rounded);
    CHECK(memcmp(rounded.out, r.out, 60 * 128 * 2) != 0); /* so fp32 weights were used above */
    layer_result_free(&rounded);
    layer_result_free(&r);
    layer_free(&p);
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
    run_row("with NaN", &p, &o, &r);
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
        run_row("several", &p, &o, &r);
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

TEST(N7_router_weights_of_zero_and_below)
{
    mok_config c = shape(8, 3);
    layer_problem p;
    layer_result r;
    make(&p, &c, 60);
    for (int i = 0; i < 180; i++)
        p.router_weights[i] *= i % 3 == 0 ? 0.0f : i % 3 == 1 ? -2.0f : 1.0f;
    for (int32_t ranks = 1; ranks <= 3; ranks += 2) {
        layer_options o = small_ring(ranks);
        run_against_oracle("weights of 0 and below", &p, &o, &r);
        for (int i = 0; i < 180; i += 3) /* what a weight of 0 would change: not 0, not NaN */
            CHECK(r.drouter_weights[i] != 0 && isfinite(r.drouter_weights[i]));
        layer_result_free(&r);
    }
    layer_free(&p);
}

/* Infinite, NaN and the largest tokens, which lie in the same tiles as others: those, and experts that saw none of them, keep their bits. */
TEST(N3_tokens_that_are_not_finite_stay_with_themselves)
{
    enum { TOKENS = 60, H = 128, BAD = 4 };
    static const int bad[BAD] = {7, 21, 33, 40};
    mok_config c = shape(8, 2);
    layer_problem p, clean;
    layer_result r, want;
    make(&p, &c, TOKENS);
    for (int i = 0; i < BAD; i++)
        for (int k = 0; k < 2; k++)
            p.expert_ids[2 * bad[i] + k] = 1 + k;
    make(&clean, &c, TOKENS);
    memcpy(clean.expert_ids, p.expert_ids, TOKENS * 2 * 4);
    for (int i = 0; i < H; i++)
        p.x[7 * H + i] = (uint16_t)(0x7f80 | (i % 2) << 15); /* infinities of both signs */
    p.x[21 * H + 5] = 0x7fc0;
    p.dout[33 * H + 9] = 0x7f80;
    for (int i = 0; i < H; i++)
        p.x[40 * H + i] = 0x7f7f; /* the largest bf16 */
    for (int32_t ranks = 1; ranks <= 2; ranks++) {
        layer_options o = small_ring(ranks);
        run_row("not finite", &p, &o, &r);
        run_against_oracle("finite", &clean, &o, &want);
        for (int t = 0; t < TOKENS; t++) {
            bool out = t == 7 || t == 21 || t == 40, gradient = out || t == 33;
            if (!out)
                CHECK_BYTES(r.out + t * H, want.out + t * H, 2 * H);
            if (gradient)
                continue;
            CHECK_BYTES(r.dx + t * H, want.dx + t * H, 2 * H);
            CHECK_BYTES(r.drouter_weights + 2 * t, want.drouter_weights + 2 * t, 8);
        }
        CHECK(!isfinite(layer_float(r.out[7 * H])) && !isfinite(layer_float(r.out[21 * H])));
        CHECK(!isfinite(layer_float(r.dx[33 * H])) && !isfinite(r.drouter_weights[66]));
        int64_t bytes = c.intermediate * c.hidden * 2;
        for (int64_t e = 0; e < 8; e++) {
            const uint16_t *dgate = (const uint16_t *)((const char *)r.dgate + e * bytes);
            if (e == 1 || e == 2) {
                CHECK(!isfinite(layer_float(dgate[0]))); /* that of a sum with NaN in it */
                continue;
            }
            CHECK_BYTES(dgate, (const char *)want.dgate + e * bytes, (size_t)bytes);
            CHECK_BYTES((const char *)r.dup + e * bytes, (const char *)want.dup + e * bytes, (size_t)bytes);
            CHECK_BYTES((const char *)r.ddown + e * bytes, (const char *)want.ddown + e * bytes, (size_t)bytes);
        }
        layer_result_free(&r);
        layer_result_free(&want);
    }
    layer_free(&p);
    layer_free(&clean);
}

/* --- MXFP8 ----------------------------------------------------------------------------------------------------------------------------- */
static void run_against_unquantised(const char *what, const layer_problem *p, const layer_options *o, layer_result *r)
{
    const mok_config *c = &p->cfg;
    int64_t n = p->tokens * c->hidden, matrix = c->num_experts * c->hidden * c->intermediate;
    rig_references refs;
    if (!rig_references_make(&refs, p))
        exit(1);
    run_row(what, p, o, r);
    rig_check_mx("out", r->out, refs.exact.out, n);
    rig_check_mx("dx", r->dx, refs.exact.dx, n);
    rig_check_mx("dgate", (uint16_t *)r->dgate, refs.exact.dgate, matrix);
    rig_check_mx("dup", (uint16_t *)r->dup, refs.exact.dup, matrix);
    rig_check_mx("ddown", (uint16_t *)r->ddown, refs.exact.ddown, matrix);
    rig_references_free(&refs);
}

TEST(N10_errors_against_the_unquantised_layer)
{
    mok_config c = shape(8, 3);
    layer_problem p;
    layer_result r;
    enum { TOKENS = ROWS_SLOW ? 40 : 160, HIDDEN = ROWS_SLOW ? 128 : 256 };
    c.dtype = MOK_MXFP8;
    c.hidden = HIDDEN;
    c.intermediate = ROWS_SLOW ? 128 : 384;
    c.shared_intermediate = 128;
    if (!layer_make(&p, &c, TOKENS, LAYER_DISTINCT, 0, test_seed()))
        exit(1);
    for (int64_t i = 0; i < TOKENS * HIDDEN; i++) /* dout as the published tests have it */
        p.dout[i] = layer_bf16(layer_float(p.dout[i]) / 16);
    layer_options o = options(ROWS_SLOW ? 2 : 4);
    run_against_unquantised("the layer", &p, &o, &r);
    layer_result_free(&r);
    layer_free(&p);
}

TEST(S5_group_sizes_of_odd_counts_in_mxfp8)
{
    static const int64_t counts[] = {44, 0, 1, 31, 33};
    mok_config c = shape(5, 1);
    layer_problem p;
    layer_result r;
    c.dtype = MOK_MXFP8;
    int64_t n = route_counts(&p, &c, counts);
    for (int64_t i = 0; i < n * c.hidden; i++)
        p.dout[i] = layer_bf16(layer_float(p.dout[i]) / 16);
    layer_options o = small_ring(2);
    run_against_unquantised("odd counts", &p, &o, &r);
    check_empty_experts(&p, &r, counts);
    layer_result_free(&r);
    layer_free(&p);
}

/* --- C, P ----------------------------------------------------------------------------------------------------------------------------- */
TEST(C1_the_same_step_many_times)
{
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result want, r;
    make(&p, &c, 256);
    layer_options o = small_ring(4);
    o.cpu_threads = 2;
    run_row("once", &p, &o, &want);
    for (int i = 0; i < (ROWS_SLOW ? 1 : 6); i++) {
        o.repeat = ROWS_SLOW ? 3 : 12;
        run_row("again", &p, &o, &r);
        ranks_same_results("again", &p, &r, &want, true);
        layer_result_free(&r);
    }
    layer_result_free(&want);
    layer_free(&p);
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
    run_row("a forward", &p, &o, &r);
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
TEST(C6_frozen_experts_are_left_alone_and_flags_come)
{
    mok_config c = shape(6, 2);
    layer_problem p;
    layer_result r, want;
    make(&p, &c, 80);
    layer_options o = small_ring(2);
    run_row("all experts", &p, &o, &want);
    o.grads_by_pointer = true;
    o.frozen_expert = 1 + 4;
    o.ready_value = 41;
    run_row("one frozen", &p, &o, &r);
    int64_t bytes = c.intermediate * c.hidden * 2;
    for (int64_t e = 0; e < 6; e++) {
        const char *got[] = {(char *)r.dgate + e * bytes, (char *)r.dup + e * bytes, (char *)r.ddown + e * bytes},
                   *all[] = {(char *)want.dgate + e * bytes, (char *)want.dup + e * bytes, (char *)want.ddown + e * bytes};
        CHECK_EQ(r.ready[e], 41);
        for (int m = 0; m < 3; m++)
            if (e != 4)
                CHECK_BYTES(got[m], all[m], (size_t)bytes);
            else
                for (int64_t i = 0; i < bytes; i++)
                    if (got[m][i] != (char)0xff) {
                        TEST_FAILED("matrix %d of the frozen expert was written at %lld", m, (long long)i);
                        break;
                    }
    }
    CHECK_BYTES(r.dx, want.dx, (size_t)(p.tokens * c.hidden) * 2);
    CHECK_BYTES(r.drouter_weights, want.drouter_weights, 160 * 4);
    layer_result_free(&r);
    layer_result_free(&want);
    layer_free(&p);
}

/* Weight gradients later, the context anew, and both: with every save policy, the bits of the plain step. */
TEST(D4_recompute_and_delayed_weight_gradients_change_no_bit)
{
    static const mok_save saves[] = {MOK_SAVE_NONE, MOK_SAVE_RING, MOK_SAVE_ALL};
    mok_config c = shape(5, 2);
    layer_problem p;
    layer_result r, want;
    make(&p, &c, ROWS_SLOW ? 150 : 300);
    layer_options alone = options(1);
    run_row("one call", &p, &alone, &want);
    for (int i = 0; i < 3; i++) {
        layer_options o = small_ring(2);
        o.recompute = i != 1;
        o.two_call_backward = i != 0;
        o.save = saves[i];
        run_row("several calls", &p, &o, &r);
        ranks_same_results("several calls", &p, &r, &want, true);
        layer_result_free(&r);
    }
    layer_result_free(&want);
    layer_free(&p);
}

/* --- several layers through one workspace ------------------------------------------------------------------------------------------------- */
enum { STORY_LAYERS = 4 };
typedef struct story_layer { mok_schedule_args schedule; mok_forward_args forward; mok_backward_args backward; } story_layer;
typedef struct story {
    layer_problem p[STORY_LAYERS];
    layer_result want[STORY_LAYERS], got[STORY_LAYERS]; /* want: each alone, on one rank */
    layer_options o;
    int layers;
    bool one_memory;                                    /* one schedule and one context for all */
    void (*tell)(ranks_env *e, story_layer *layers, int count);
} story;

static void story_open(ranks_env *e, story *s, int i, layer_rank *job)
{
    ranks_part part = ranks_part_of(e, s->p[i].tokens, NULL);
    memset(job, 0, sizeof *job);
    job->problem = &s->p[i];
    job->options = &s->o;
    job->result = &s->got[i];
    job->group = e->group;
    job->rank = e->rank;
    job->first_token = part.first;
    job->num_tokens = part.tokens;
    job->first_expert = e->plan.experts_first;
    job->num_experts = e->plan.experts_count;
    job->w = e->w;
    job->on_device = e->cfg.backend == MOK_BACKEND_CUDA;
    RANKS_OK(layer_rank_alloc_poisoned(e->w, e->plan.schedule_bytes, &job->schedule));
    RANKS_OK(layer_rank_alloc_poisoned(e->w, e->plan.context_bytes, &job->context));
}

static void story_body(ranks_env *e)
{
    story *s = (story *)e->user;
    layer_rank *jobs = (layer_rank *)malloc(STORY_LAYERS * sizeof *jobs);
    story_layer layers[STORY_LAYERS];
    for (int i = 0; i < s->layers; i++) {
        story_open(e, s, i, &jobs[i]);
        layers[i].schedule = layer_rank_schedule(&jobs[i]);
        layers[i].forward = layer_rank_forward(&jobs[i]);
        layers[i].backward = layer_rank_backward(&jobs[i], &layers[i].forward);
        layers[i].schedule.layer = layers[i].forward.layer = layers[i].backward.layer = (uint64_t)i;
        if (s->one_memory) {
            layers[i].schedule.schedule = jobs[0].schedule;
            layers[i].forward.schedule = layers[i].backward.schedule = jobs[0].schedule;
            layers[i].forward.context = jobs[0].context;
            layers[i].backward.context = jobs[0].context;
        }
        CHECK_EQ(jobs[i].copy_status, MOK_OK);
    }
    ROWS_POISON(e->w, NULL);
    ranks_meet(e);
    s->tell(e, layers, s->layers);
    RANKS_OK(mok_wait(e->w));
    for (int i = 0; i < s->layers; i++) {
        RANKS_OK(layer_rank_bring_back(&jobs[i]));
        layer_rank_free(&jobs[i]);
    }
    free(jobs);
}

static void tell(void (*what)(ranks_env *, story_layer *, int), int layers, int32_t ranks, bool one_memory)
{
    static const int64_t tokens[STORY_LAYERS] = {150, 3, 77, 128};
    story *s = (story *)calloc(1, sizeof *s);
    mok_config c = shape(6, 2), wish = ranks_config(128, 64, 6, 2, 150);
    mok_group *groups[RANKS_MAX];
    layer_options alone = options(1);
    c.shared_intermediate = wish.shared_intermediate = 64;
    wish.backend = ROWS_BACKEND;
    wish.ring_rows = 256;
    wish.minibatch_rows = wish.minibatch_rows_bwd = 128;
    s->o = options(ranks);
    s->layers = layers;
    s->one_memory = one_memory;
    s->tell = what;
    for (int i = 0; i < layers; i++) {
        if (!layer_make(&s->p[i], &c, tokens[i], i % 2 ? LAYER_ONE_EXPERT : LAYER_UNIFORM, 0.2, test_seed() + (uint64_t)i))
            exit(1);
        run_row("alone", &s->p[i], &alone, &s->want[i]);
        if (!layer_result_make(&s->got[i], &s->p[i], &s->o))
            exit(1);
    }
    ROWS_BEFORE_RUN();
    REQUIRE(mok_group_create_local(ranks, ROWS_DEVICES, groups) == MOK_OK);
    ranks_run_groups(ranks, groups, &wish, story_body, s);
    for (int32_t r = 0; r < ranks; r++)
        mok_group_destroy(groups[r]);
    for (int i = 0; i < layers; i++) {
        ranks_same_results("a layer", &s->p[i], &s->got[i], &s->want[i], true);
        layer_result_free(&s->want[i]);
        layer_result_free(&s->got[i]);
        layer_free(&s->p[i]);
    }
    free(s);
}

static void two_layers(ranks_env *e, story_layer *l, int count)
{
    for (int i = 0; i < count; i++) {
        RANKS_OK(mok_schedule(e->w, &l[i].schedule, NULL));
        RANKS_OK(mok_forward(e->w, &l[i].forward, NULL));
    }
    for (int i = count - 1; i >= 0; i--)
        RANKS_OK(mok_backward(e->w, &l[i].backward, NULL));
}
TEST(C6_two_layers_through_one_workspace)
{
    for (int32_t ranks = 1; ranks <= 2; ranks++)
        tell(two_layers, 2, ranks, false);
}

/* All schedules and contexts at once; data first, then the weights in another order. */
static void microbatches(ranks_env *e, story_layer *l, int count)
{
    for (int i = 0; i < count; i++)
        RANKS_OK(mok_schedule(e->w, &l[i].schedule, NULL));
    for (int i = count - 1; i >= 0; i--)
        RANKS_OK(mok_forward(e->w, &l[i].forward, NULL));
    for (int part = 0; part < 2; part++)
        for (int i = 0; i < count; i++) {
            mok_backward_args b = l[(i + part) % count].backward;
            b.parts = part ? MOK_BACKWARD_WEIGHTS : MOK_BACKWARD_DATA;
            if (part)
                b.dx = b.drouter_weights = NULL;
            RANKS_OK(mok_backward(e->w, &b, NULL));
        }
}
TEST(C6_three_microbatches_in_flight_and_weights_later) { tell(microbatches, 3, 2, false); }

static void twice_each(ranks_env *e, story_layer *l, int count)
{
    for (int i = 0; i < 2 * count; i++) {
        RANKS_OK(mok_schedule(e->w, &l[i % count].schedule, NULL));
        RANKS_OK(mok_forward(e->w, &l[i % count].forward, NULL));
        RANKS_OK(mok_backward(e->w, &l[i % count].backward, NULL));
    }
}
TEST(A3_the_same_memory_with_another_routing_each_time) { tell(twice_each, STORY_LAYERS, ROWS_SLOW ? 2 : 3, true); }

#endif
