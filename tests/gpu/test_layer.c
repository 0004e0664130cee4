/* The cuda backend on a real GPU, forward and backward, through mok.h: every model's shape scaled to one GPU against the cpu backend, awkward shapes, and the
 * bits over virtual ranks, ring, minibatch, tiles, staged and fused. All ring padding is NaN before each pass. Skipped, and counted as such, where
 * there is no GPU. MOK_TEST_QUICK=1 leaves the large shapes out (compute-sanitizer). */
#define TEST_WATCHDOG 900
#include "layer.h"
#include "reference.h"

#include "gpu.h"
#include "layout/fault.h"

static mok_config shape_of(int64_t hidden, int64_t width, int64_t shared, int64_t experts, int64_t topk)
{
    mok_config c = {.hidden = hidden, .intermediate = width, .shared_intermediate = shared, .num_experts = experts, .topk = topk};
    c.shared_gate = shared > 0;
    c.timeout_ms = 20000; /* what hangs is to be named before a test's time is over */
    return c;
}

/* Forward of a problem; false and a failed check if it does not run. */
static bool run(const layer_problem *p, layer_options o, layer_result *r)
{
    char error[512];
    if (o.backend == MOK_BACKEND_CUDA) {
        o.devices = gpu_devices();
        o.before_pass = poison_ring;
    }
    if (!layer_result_make(r, p, &o)) {
        TEST_FAILED("no memory");
        return false;
    }
    mok_status status = layer_run(p, &o, r, error);
    if (status != MOK_OK)
        TEST_FAILED("%s: %s", mok_status_name(status), error);
    return status == MOK_OK;
}

/* Relative error of n values, bf16 or fp32, against the cpu's. */
static double error_of(const void *got, const void *want, int64_t n, bool fp32)
{
    double *truth = malloc(sizeof *truth * (size_t)(n + 1));
    for (int64_t i = 0; i < n; i++)
        truth[i] = fp32 ? (double)((const float *)want)[i] : layer_float(((const uint16_t *)want)[i]);
    double error = !n ? 0 : fp32 ? reference_error_float(got, truth, n) : reference_error_bf16(got, truth, n);
    free(truth);
    return error;
}

/* GPU and CPU differ by roundings only: far less than what a bf16 chain loses against float64 (4e-3 on such data). In MXFP8 a last bit may
 * become an e4m3's, of few numbers. */
static void compare_with_cpu(const char *what, const mok_config *c, int64_t tokens, layer_routing routing)
{
    layer_problem p;
    layer_result gpu, cpu;
    if (!layer_make(&p, c, tokens, routing, 0.05, test_seed())) {
        TEST_FAILED("%s: no memory", what);
        return;
    }
    if (run(&p, (layer_options){.ranks = 1, .backend = MOK_BACKEND_CUDA, .grad_dtype = MOK_FP32}, &gpu) &&
        run(&p, (layer_options){.ranks = 1, .backend = MOK_BACKEND_CPU, .grad_dtype = MOK_FP32}, &cpu)) {
        int64_t n = tokens * c->hidden;
        double *truth = malloc(sizeof *truth * (size_t)(n + 1));
        for (int64_t i = 0; i < n; i++)
            truth[i] = layer_float(cpu.out[i]);
        double error = n ? reference_error_bf16(gpu.out, truth, n) : 0, dx = error_of(gpu.dx, cpu.dx, n, false);
        int64_t matrix = c->num_experts * c->hidden * c->intermediate, shared = c->hidden * c->shared_intermediate;
        double grads[] = {error_of(gpu.drouter_weights, cpu.drouter_weights, tokens * c->topk, true), error_of(gpu.dgate, cpu.dgate, matrix, true),
                          error_of(gpu.dup, cpu.dup, matrix, true), error_of(gpu.ddown, cpu.ddown, matrix, true),
                          error_of(gpu.dshared_gate, cpu.dshared_gate, shared, true), error_of(gpu.dshared_up, cpu.dshared_up, shared, true),
                          error_of(gpu.dshared_down, cpu.dshared_down, shared, true),
                          error_of(gpu.dshared_output_gate, cpu.dshared_output_gate, shared ? c->hidden : 0, true)};
        double worst = dx;
        for (size_t i = 0; i < sizeof grads / sizeof *grads; i++)
            worst = grads[i] > worst || grads[i] != grads[i] ? grads[i] : worst;
        printf("  %-24s T %6lld H %5lld I %5lld E %3lld K %2lld: gpu against cpu: out %.2e, dx %.2e, worst gradient %.2e\n", what, (long long)tokens,
               (long long)c->hidden, (long long)c->intermediate, (long long)c->num_experts, (long long)c->topk, error, dx, worst);
        bool mx = c->dtype == MOK_MXFP8;
        CHECK_LE(error, mx ? 2e-2 : 3e-3);
        CHECK_LE(dx, mx ? 2e-2 : 4e-3);
        CHECK_LE(worst, mx ? 2e-2 : 4e-3);
        CHECK_BYTES(gpu.tokens_per_expert, cpu.tokens_per_expert, sizeof(int64_t) * (size_t)c->num_experts);
        CHECK_EQ(gpu.stats[0].rows, cpu.stats[0].rows);
        free(truth);
        layer_result_free(&cpu);
    }
    layer_result_free(&gpu);
    layer_free(&p);
}

static bool quick(void) { return getenv("MOK_TEST_QUICK") != NULL; }

TEST(every_model_scaled_to_one_gpu)
{
    NEED_GPU();
    static const struct { const char *name; int64_t hidden, width, shared, experts, topk; } models[] = {
        {"kimi-k2.7-code", 7168, 2048, 2048, 8, 8},  {"glm-5.2", 6144, 2048, 2048, 8, 8},    {"qwen3.5-397b-a17b", 4096, 1024, 1024, 10, 10},
        {"deepseek-v4-pro", 7168, 3072, 3072, 6, 6}, {"deepseek-v3", 7168, 2048, 2048, 8, 8}, {"deepseek-v4-flash", 4096, 2048, 2048, 8, 6},
        {"qwen3-30b-a3b", 2048, 768, 0, 128, 8},     {"mixtral-8x7b", 4096, 14336, 0, 2, 2},  {"olmoe-1b-7b", 2048, 1024, 0, 64, 8},
        {"gpt-oss-20b", 2880, 2880, 0, 8, 4}};
    for (size_t i = 0; i < sizeof models / sizeof *models && !quick(); i++) {
        mok_config c = shape_of(models[i].hidden, models[i].width, models[i].shared, models[i].experts, models[i].topk);
        c.swiglu_limit = i == 5 ? 10.0f : 0;
        compare_with_cpu(models[i].name, &c, 300, LAYER_DISTINCT);
    }
}

TEST(S6_widths_that_are_multiples_of_64_only)
{
    NEED_GPU();
    int64_t widths[][3] = {{64, 64, 0}, {192, 320, 64}, {448, 192, 192}, {2880, 2880, 0}, {16448, 64, 0}, {320, 4160, 128}};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        mok_config c = shape_of(widths[i][0], widths[i][1], widths[i][2], 4, 2);
        compare_with_cpu("odd widths", &c, quick() ? 20 : 140, LAYER_UNIFORM);
    }
}

TEST(Z10_tokens_from_none_to_many_and_topk_from_1_to_16)
{
    NEED_GPU();
    int64_t tokens[] = {0, 1, 2, 7, 63, 64, 65, 127, 128, 129, 255, 1000};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        mok_config c = shape_of(256, 128, i % 2 ? 64 : 0, 16 + (int64_t)i * 10, (int64_t)i + 1 > 16 ? 16 : (int64_t)i + 1);
        compare_with_cpu("tokens and topk", &c, tokens[i], i % 3 ? LAYER_DISTINCT : LAYER_UNIFORM);
    }
    mok_config many = shape_of(256, 64, 0, 32, 16);
    if (!quick())
        compare_with_cpu("many tokens", &many, 32768, LAYER_DISTINCT);
    mok_config one = shape_of(256, 128, 0, 1, 1);
    compare_with_cpu("one expert has all", &one, 700, LAYER_ONE_EXPERT);
}

/* Everything but the shared expert's weight gradients, which are per rank. */
static void check_gradient_bytes(const layer_result *r, const layer_result *want, const layer_problem *p)
{
    const mok_config *c = &p->cfg;
    size_t matrix = (size_t)(c->num_experts * c->hidden * c->intermediate * r->grad_bytes);
    CHECK_BYTES(r->dx, want->dx, (size_t)(p->tokens * c->hidden) * 2);
    CHECK_BYTES(r->drouter_weights, want->drouter_weights, (size_t)(p->tokens * c->topk) * 4);
    CHECK_BYTES(r->dgate, want->dgate, matrix);
    CHECK_BYTES(r->dup, want->dup, matrix);
    CHECK_BYTES(r->ddown, want->ddown, matrix);
}

/* One problem over everything that must not change a bit. */
static void check_bits(mok_dtype dtype)
{
    mok_config c = shape_of(512, 384, 128, 12, 3);
    c.dtype = dtype;
    layer_problem p;
    layer_result first = {0}, r;
    int64_t tokens = quick() ? 90 : 700, n = tokens * c.hidden * 2, rotations = 0, copied = 0, continued = 0, replayed = 0;
    REQUIRE(layer_make(&p, &c, tokens, LAYER_UNIFORM, 0.1, test_seed()));
    static const int32_t ranks[] = {1, 2, 3, 4, 8};
    static const int64_t rings[][2] = {{0, 0}, {256, 128}, {768, 256}};
    static const mok_save saves[] = {MOK_SAVE_ALL, MOK_SAVE_NONE, MOK_SAVE_RING};
    static const char *const ways[][2] = {{"fused", "narrow"}, {"staged", "narrow"}, {"staged", "wide"}};
    for (size_t w = 0; w < 3; w++)
        for (size_t k = 0; k < 5; k++)
            for (size_t g = 0; g < 3; g++) {
                setenv("MOK_FORWARD", ways[w][0], 1);
                setenv("MOK_BACKWARD", ways[w][0], 1);
                setenv("MOK_TILE", ways[w][1], 1);
                layer_options o = {.ranks = ranks[k], .backend = MOK_BACKEND_CUDA, .ring_rows = rings[g][0], .minibatch_rows = rings[g][1],
                                   .minibatch_rows_bwd = rings[g][1], .repeat = 2, .save = saves[(w + k + g) % 3],
                                   .mx_wide = g == 1, .mx_prequantised = g == 2};
                if (!run(&p, o, &r))
                    return;
                if (!first.out) {
                    first = r;
                    continue;
                }
                CHECK_BYTES(r.out, first.out, (size_t)n);
                check_gradient_bytes(&r, &first, &p);
                for (int32_t i = 0; i < ranks[k]; i++) {
                    rotations += r.stats[i].ring_rotations;
                    copied += r.stats[i].rows_copied;
                    continued += r.stats[i].wgrad_continued;
                    replayed += r.stats[i].rows_replayed;
                    CHECK_EQ(r.stats[i].rows_pulled_peer, 2 * (r.info[i].rows_pulled_peer_fwd + r.info[i].rows_pulled_peer_bwd));
                }
                layer_result_free(&r);
            }
    unsetenv("MOK_FORWARD");
    unsetenv("MOK_BACKWARD");
    unsetenv("MOK_TILE");
    printf("  over these runs: %lld ring rotations, %lld rows copied, %lld replayed, %lld weight gradients continued\n", (long long)rotations, (long long)copied,
           (long long)replayed, (long long)continued);
    CHECK(rotations > 3 && copied > 0 && replayed > 0 && (continued > 0 || quick())); /* too few rows to cut a weight gradient */
    layer_result_free(&first);
    layer_free(&p);
}

TEST(D1_bits_over_ranks_ring_minibatch_tiles_and_kernels)
{
    NEED_GPU();
    check_bits(MOK_BF16);
}

/* The maps of the experts' weights are made on the device and kept by the copy engine: several passes, layouts and ways to read them. */
TEST(weights_by_pointer_have_the_bits_of_packed_weights)
{
    NEED_GPU();
    static const char *const ways[][2] = {{"fused", "narrow"}, {"staged", "narrow"}, {"staged", "wide"}};
    static const mok_gate_up layouts[] = {MOK_GATE_UP_SEPARATE, MOK_GATE_UP_COMBINED, MOK_GATE_UP_INTERLEAVED};
    for (size_t i = 0; i < 2 * sizeof layouts / sizeof *layouts; i++) {
        mok_config c = shape_of(512, 384, 128, 40, 3);
        c.gate_up = layouts[i / 2];
        c.dtype = i % 2 ? MOK_MXFP8 : MOK_BF16;
        layer_problem p;
        layer_result packed, r;
        REQUIRE(layer_make(&p, &c, quick() ? 90 : 700, LAYER_UNIFORM, 0.1, test_seed()));
        if (!run(&p, (layer_options){.ranks = 1, .backend = MOK_BACKEND_CUDA}, &packed))
            return;
        for (size_t w = 0; w < sizeof ways / sizeof *ways; w++)
            for (int32_t ranks = 1; ranks <= 4; ranks *= 4) {
                setenv("MOK_FORWARD", ways[w][0], 1);
                setenv("MOK_BACKWARD", ways[w][0], 1);
                setenv("MOK_TILE", ways[w][1], 1);
                if (!run(&p, (layer_options){.ranks = ranks, .backend = MOK_BACKEND_CUDA, .experts_by_pointer = true, .ring_rows = 768, .minibatch_rows = 256,
                                             .minibatch_rows_bwd = 256, .repeat = 3, .save = w == 1 ? MOK_SAVE_NONE : MOK_SAVE_RING}, &r))
                    return;
                CHECK_BYTES(r.out, packed.out, (size_t)(p.tokens * c.hidden * 2));
                check_gradient_bytes(&r, &packed, &p);
                layer_result_free(&r);
            }
        unsetenv("MOK_FORWARD");
        unsetenv("MOK_BACKWARD");
        unsetenv("MOK_TILE");
        layer_result_free(&packed);
        layer_free(&p);
    }
}

TEST(D1_bits_in_mxfp8_over_ranks_ring_minibatch_tiles_and_kernels)
{
    NEED_GPU();
    check_bits(MOK_MXFP8);
}

/* Clusters that have left the last pass. */
static void count_left(mok_workspace *w, void *user)
{
    mk_device_state state;
    CHECK_EQ(mok_memory_copy(w, &state, w->local + w->memory.device_state, sizeof state), MOK_OK);
    *(int64_t *)user += state.tickets[MK_YIELD_LEFT];
}

/* Clusters leave all the time, or never. */
TEST(Y1_clusters_that_leave_change_no_bit)
{
    NEED_GPU();
    mok_config c = shape_of(1024, 512, 256, 8, 2);
    int64_t left[2] = {0};
    layer_result result[2];
    layer_problem p;
    REQUIRE(layer_make(&p, &c, quick() ? 512 : 8192, LAYER_UNIFORM, 0.05, test_seed()));
    for (int i = 0; i < 2; i++) {
        layer_options o = {.ranks = 1, .backend = MOK_BACKEND_CUDA, .grad_dtype = MOK_FP32, .repeat = 10, .after_pass = count_left, .user = &left[i]};
        p.cfg.yield_us = i ? -1 : 4;
        REQUIRE(run(&p, o, &result[i]));
    }
    printf("  clusters that left ten backwards: %lld, and %lld where they must not\n", (long long)left[0], (long long)left[1]);
    CHECK(left[0] > 0 || quick());
    CHECK_EQ(left[1], 0);
    CHECK_BYTES(result[0].out, result[1].out, (size_t)(p.tokens * c.hidden) * 2);
    check_gradient_bytes(&result[0], &result[1], &p);
    for (int i = 0; i < 2; i++)
        layer_result_free(&result[i]);
    layer_free(&p);
}

TEST(mxfp8_agrees_with_the_cpu)
{
    NEED_GPU();
    static const int64_t shapes[][5] = {{512, 256, 128, 8, 2}, {2880, 2880, 0, 4, 2}, {4096, 1024, 1024, 10, 4}, {8256, 64, 0, 2, 2}};
    for (size_t i = 0; i < (quick() ? 1u : sizeof shapes / sizeof *shapes); i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            mok_config c = shape_of(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], shapes[i][4]);
            c.dtype = MOK_MXFP8;
            c.mx_wgrad_bf16 = bf16;
            compare_with_cpu(bf16 ? "mxfp8, wgrad in bf16" : "mxfp8", &c, 200, LAYER_DISTINCT);
        }
}

TEST(Z7_unequal_tokens_some_ranks_without_any)
{
    NEED_GPU();
    mok_config c = shape_of(256, 192, 64, 10, 2);
    layer_problem p;
    layer_result one, four;
    int64_t split[] = {0, 200, 1, 99};
    REQUIRE(layer_make(&p, &c, 300, LAYER_DISTINCT, 0.0, test_seed()));
    if (run(&p, (layer_options){.ranks = 1, .backend = MOK_BACKEND_CUDA}, &one) &&
        run(&p, (layer_options){.ranks = 4, .backend = MOK_BACKEND_CUDA, .tokens_of_rank = split}, &four)) {
        CHECK_BYTES(four.out, one.out, 300 * 256 * 2);
        check_gradient_bytes(&four, &one, &p);
        layer_result_free(&four);
    }
    layer_result_free(&one);
    layer_free(&p);
}

TEST(C3_a_thousand_repeats_have_the_same_bits)
{
    NEED_GPU();
    mok_config c = shape_of(1024, 512, 0, 16, 4);
    layer_problem p;
    layer_result first = {0}, r;
    REQUIRE(layer_make(&p, &c, 1024, LAYER_DISTINCT, 0.0, test_seed()));
    for (int i = 0; i < (quick() ? 2 : 20); i++) { /* 20 workspaces of 50 passes; every pass must equal the last for the last to equal the first */
        if (!run(&p, (layer_options){.ranks = 1 + i % 2, .backend = MOK_BACKEND_CUDA, .repeat = quick() ? 2 : 50}, &r))
            return;
        if (!first.out) {
            first = r;
            continue;
        }
        CHECK_BYTES(r.out, first.out, 1024 * 1024 * 2);
        check_gradient_bytes(&r, &first, &p);
        layer_result_free(&r);
    }
    layer_result_free(&first);
    layer_free(&p);
}

int main(int argc, char **argv) { return gpu_main(argc, argv); }
