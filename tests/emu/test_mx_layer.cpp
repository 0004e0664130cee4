/* A layer in MXFP8 on the emulator, through the whole library: staged and fused, on 1, 2 and 4 virtual ranks, over rings, tiles, save policies and
 * forms of the weights. All results have the same bits, and agree with the cpu backend. */
#define TEST_WATCHDOG 900
#include "emulated_layer.h"

extern "C" {
#include "cpu/mx.h"
}

static layer_problem mx_problem(int64_t tokens, int64_t shared, int64_t experts = 5, int64_t hidden = 192, int64_t width = 128, mok_gate_up layout = MOK_GATE_UP_SEPARATE)
{
    layer_problem p = make_problem(tokens, shared, experts, hidden, width, layout);
    p.cfg.dtype = MOK_MXFP8;
    return p;
}

static Run forward_run(const char *name, int32_t ranks = 1, int64_t ring = 512, int64_t minibatch = 256)
{
    Run r = make_run(name, ranks, ring, minibatch);
    r.forward_only = true;
    return r;
}

static Run on_cpu(Run run)
{
    run.name = "cpu";
    run.backend = MOK_BACKEND_CPU;
    return run;
}

/* What a rounding of a last bit to another e4m3 may do to a sum. */
static const double kMore = 2.0;

TEST(forward_agrees_with_the_cpu_and_does_not_depend_on_ranks_tiles_ring_or_fusion)
{
    layer_problem p = mx_problem(150, 64);
    Run staged = forward_run("staged");
    staged.forward = "staged";
    Run wide = staged, two = staged, small = forward_run("three ranks, smallest ring, fused", 3, 256, 128), bf16 = staged;
    wide.name = "wide tile";
    wide.tile = "wide";
    two.name = "two ranks, staged";
    two.ranks = 2;
    const StepResult first = run_layer(p, staged), cpu = run_layer(p, on_cpu(staged));
    check_close(staged, first, cpu, kMore);
    for (const Run &run : {wide, two, forward_run("fused"), small, forward_run("four ranks, fused", 4)})
        check_bits(run, run_layer(p, run), first);
    p.cfg.dtype = MOK_BF16;
    CHECK(run_layer(p, bf16).out != first.out);
    layer_free(&p);
}

/* ---- a plain layer that quantises every operand where it is used, with the emulator's exponential ---- */
typedef std::vector<uint16_t> Numbers;

static Numbers rounded(const uint16_t *from, int64_t n)
{
    Numbers to((size_t)n);
    mk_cpu_mx_round(from, n, to.data());
    return to;
}

static uint16_t dot(const uint16_t *a, const uint16_t *b, int64_t n)
{
    float sum = 0.0f;
    for (int64_t k = 0; k < n; k++)
        sum = fmaf(layer_float(a[k]), layer_float(b[k]), sum);
    return emu::float_to_bf16(sum);
}

static Numbers plain_token(const layer_problem &p, int64_t token)
{
    const int64_t h = p.cfg.hidden, w = p.cfg.intermediate;
    const Numbers x = rounded(p.x + token * h, h);
    std::vector<float> acc((size_t)h, 0.0f);
    for (int64_t k = 0; k < p.cfg.topk; k++) {
        const int64_t e = p.expert_ids[token * p.cfg.topk + k];
        if (e < 0)
            continue;
        const Numbers gate = rounded(p.gate + e * h * w, h * w), up = rounded(p.up + e * h * w, h * w), down = rounded(p.down + e * h * w, h * w);
        Numbers middle((size_t)w);
        for (int64_t i = 0; i < w; i++)
            middle[(size_t)i] = emu::float_to_bf16(mk::swiglu(layer_float(dot(x.data(), &gate[(size_t)(i * h)], h)), layer_float(dot(x.data(), &up[(size_t)(i * h)], h)), INFINITY));
        middle = rounded(middle.data(), w);
        for (int64_t i = 0; i < h; i++)
            acc[(size_t)i] = fmaf(p.router_weights[token * p.cfg.topk + k], layer_float(dot(middle.data(), &down[(size_t)(i * w)], w)), acc[(size_t)i]);
    }
    Numbers out;
    for (float v : acc)
        out.push_back(emu::float_to_bf16(v));
    return out;
}

TEST(forward_has_the_bits_of_a_layer_that_quantises_every_operand)
{
    layer_problem p = mx_problem(40, 0, 4, 192, 128);
    const StepResult got = run_layer(p, forward_run("two ranks", 2, 256, 128));
    print_hash(got);
    int64_t differ = 0;
    for (int64_t t = 0; t < p.tokens; t++) {
        const Numbers want = plain_token(p, t);
        for (int64_t i = 0; i < p.cfg.hidden; i++)
            differ += got.out[(size_t)(t * p.cfg.hidden + i)] != want[(size_t)i];
    }
    CHECK_EQ(differ, 0);
    layer_free(&p);
}

TEST(forms_of_weights_change_no_bit)
{
    for (int i = 0; i < 4; i++) { /* the last one: up rows of combined weights begin with a tile of scales */
        const mok_gate_up layout = i < 3 ? (mok_gate_up)i : MOK_GATE_UP_COMBINED;
        layer_problem p = mx_problem(40, 0, 3, 128, i < 3 ? 64 : 128, layout);
        Run run = forward_run("bf16 weights"), quantised = run, pointers = run;
        quantised.name = "quantised weights";
        quantised.prequantised = true;
        pointers.name = "bf16 weights by pointer";
        pointers.experts_by_pointer = true;
        const StepResult want = run_layer(p, run);
        check_close(run, want, run_layer(p, on_cpu(run)), kMore);
        check_bits(pointers, run_layer(p, pointers), want);
        if (layout != MOK_GATE_UP_INTERLEAVED)
            check_bits(quantised, run_layer(p, quantised), want);
        layer_free(&p);
    }
}

/* Launches of the widening kernel: those of mok_mx_widen, and none by passes that were given its results. (Blackwell has nothing for callers to keep.) */
TEST(weights_widened_before_change_no_bit_and_passes_widen_none)
{
    layer_problem p = mx_problem(60, 64, 4, 128, 64);
    Run run = make_run("widened by the passes", 1, 256, 128, MOK_SAVE_RING), given = run, recompute = run, quantised = run, all = run;
    given.name = "given";
    given.wide = true;
    recompute.name = "given, recompute, fused";
    recompute.recompute = true;
    quantised.name = "given, made of quantised weights, two ranks";
    quantised.prequantised = true;
    quantised.ranks = 2;
    all.name = "given, all rows saved, staged";
    all.save = MOK_SAVE_ALL;
    all.forward = all.backward = "staged";
    recompute.wide = quantised.wide = all.wide = true;
    const StepResult want = run_layer(p, run);
    for (Run &r : std::vector<Run>{given, recompute, quantised, all}) {
        int widened = 0;
        r.before_launch = [&](const std::string &kernel, const void *) { widened += kernel == "mok_mx_widen_weights"; };
        check_bits(r, run_layer(p, r), want);
#ifndef MK_SM100
        CHECK_EQ(widened, 6 * r.ranks);
#endif
    }
    layer_free(&p);
}

/* Rows that take eight, four, two or no place in dispatch's memory; duplicate routes and ring copies among them. */
TEST(rows_of_every_length_are_widened_exactly)
{
    for (int64_t hidden : {64, 2112, 4160, 8256}) {
        layer_problem p = mx_problem(24, 0, 2, hidden, 64);
        Run one = forward_run("one rank", 1, 256, 128), two = one;
        two.name = "two ranks";
        two.ranks = 2;
        const StepResult want = run_layer(p, one);
        check_close(one, want, run_layer(p, on_cpu(one)), kMore);
        check_bits(two, run_layer(p, two), want);
        layer_free(&p);
    }
}

/* ---- the backward ---- */

/* A first run against the cpu backend, then others against its bits. */
static StepResult compare(const layer_problem &p, const Run &first, const std::vector<Run> &runs)
{
    const StepResult one = run_layer(p, first);
    check_close(first, one, run_layer(p, on_cpu(first)), kMore);
    for (const Run &run : bits_only() ? std::vector<Run>() : runs)
        check_bits(run, run_layer(p, run), one);
    return one;
}

TEST(gradients_do_not_depend_on_ranks_ring_or_fusion)
{
    layer_problem p = mx_problem(150, 64);
    Run first = make_run("one rank, fused", 1, 1024, 256), staged = first, crowded = make_run("few clusters", 1, 512, 128);
    staged.name = "one rank, staged";
    staged.backward = "staged";
    crowded.resident = 1;
    const StepResult got = compare(p, first, {staged, crowded, make_run("two ranks", 2, 1024, 256), make_run("four ranks, smallest ring", 4, 256, 128)});
    p.cfg.mx_wgrad_bf16 = true;
    Run again = make_run("two ranks, smallest ring", 2, 256, 128);
    const StepResult bf16 = compare(p, first, {again});
    CHECK(got.dx == bf16.dx);
    CHECK(got.weights[0] != bf16.weights[0] && got.weights[2] != bf16.weights[2]);
    layer_free(&p);
}

TEST(gradients_do_not_depend_on_what_was_saved)
{
    layer_problem p = mx_problem(150, 64);
    Run rows = make_run("384 rows saved", 1, 512, 128, MOK_SAVE_ROWS), again = make_run("recomputed", 1, 512, 128, MOK_SAVE_RING);
    rows.save_rows = 384;
    again.recompute = true;
    Run staged = make_run("nothing saved, staged", 2, 512, 128, MOK_SAVE_NONE);
    staged.backward = "staged";
    compare(p, make_run("all saved", 1, 512, 128), {make_run("nothing saved", 1, 512, 128, MOK_SAVE_NONE), rows, again, staged});
    layer_free(&p);
}

TEST(a_cut_weight_gradient_continues_exactly)
{
    layer_problem p = make_problem(260, 0, 2, 128, 64, MOK_GATE_UP_SEPARATE, LAYER_ONE_EXPERT);
    p.cfg.dtype = MOK_MXFP8;
    Run small = make_run("smallest ring", 1, 256, 128);
    compare(p, make_run("one rank", 1, 1024, 256), {make_run("two ranks, smallest ring", 2, 256, 128, MOK_SAVE_NONE)});
    const StepResult cut = run_layer(p, small);
    print_hash(cut);
    CHECK(cut.stats.wgrad_continued > 0);
    layer_free(&p);
}

TEST(gradients_in_one_call_or_two_and_from_quantised_weights)
{
    layer_problem p = mx_problem(90, 64);
    Run first = make_run("one call", 1, 512, 128, MOK_SAVE_RING);
    for (bool accumulate : {false, true}) {
        Run two_calls = make_run("two calls", 2, 512, 128);
        two_calls.two_calls = true;
        first.accumulate = two_calls.accumulate = accumulate;
        first.dtype = two_calls.dtype = accumulate ? MOK_BF16 : MOK_FP32;
        Run quantised = first;
        quantised.name = "quantised weights";
        quantised.prequantised = true;
        if (accumulate) {
            two_calls.name = "two calls, by pointer";
            two_calls.experts_by_pointer = true;
        }
        print_hash(compare(p, first, {two_calls, quantised}));
    }
    layer_free(&p);
}

/* Their weight gradients are zeros, and must not come from what stands in the ring where their rows would be: that is another expert's, and may be
 * under way. */
TEST(experts_without_rows_read_none_of_others)
{
    for (mok_dtype dtype : {MOK_MXFP8, MOK_BF16}) {
        layer_problem p = make_problem(24, 0, 25, 128, 64);
        Run run = make_run(dtype == MOK_BF16 ? "bf16" : "MXFP8", 1, 512, 128, MOK_SAVE_RING);
        p.cfg.dtype = dtype;
        p.cfg.topk = 1;
        for (int64_t t = 0; t < p.tokens; t++) /* to every second expert; in front of each stands one without rows */
            p.expert_ids[t] = 1 + (int32_t)(t % 12) * 2;
        const StepResult got = run_layer(p, run);
        check_close(run, got, run_layer(p, on_cpu(run)), dtype == MOK_BF16 ? 1.0 : kMore);
        layer_free(&p);
    }
}

TEST(stats_are_those_of_the_cpu)
{
    layer_problem p = mx_problem(150, 0);
    p.x[77] = 0x7f80;
    p.dout[5] = 0x7fc0;
    Run gpu = make_run("cuda", 2, 256, 128, MOK_SAVE_RING);
    gpu.recompute = true;
    const mok_stats want = run_layer(p, on_cpu(gpu)).stats, got = run_layer(p, gpu).stats;
#define SAME(field) CHECK_EQ(got.field, want.field)
    SAME(backwards); SAME(rows); SAME(rows_pulled); SAME(rows_pulled_peer); SAME(rows_copied); SAME(rows_replayed); SAME(mx_not_finite);
    SAME(rows_padding); SAME(ring_rotations); SAME(wgrad_continued); SAME(bytes_pulled_peer); SAME(bytes_pushed_peer);
#undef SAME
    layer_free(&p);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
