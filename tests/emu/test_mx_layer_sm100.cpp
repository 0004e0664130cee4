/* The same layer in MXFP8 on emulated Blackwell: products of e4m3 operands with their scales, but for weight gradients. The bits are Hopper's
 * (tests/emu/same_bits.sh). And what only Blackwell does: clusters that leave in the middle of a pass. */
#define MK_SM100
#include "test_mx_layer.cpp"

static int64_t launches(const char *kernel) { return emulated::gpu.launches[kernel]; }

/* Quantised weights are multiplied where the caller has them; bf16 ones are quantised by the call; of up rows that begin inside a tile of
 * combined weights' scales the call takes a copy. Nothing is widened. A forward reads three weights; a backward, with a replay, two again and all three
 * transposed. */
TEST(no_weight_is_widened)
{
    struct Case { mok_gate_up layout; int64_t width; bool prequantised, forward_only; int64_t quantised, turned, parts; };
    for (const Case &c : {Case{MOK_GATE_UP_SEPARATE, 64, true, false, 0, 0, 0}, Case{MOK_GATE_UP_COMBINED, 128, true, false, 0, 0, 0},
                          Case{MOK_GATE_UP_COMBINED, 64, true, false, 0, 0, 3}, Case{MOK_GATE_UP_INTERLEAVED, 64, false, false, 5, 3, 0},
                          Case{MOK_GATE_UP_COMBINED, 64, false, true, 3, 0, 0}}) {
        layer_problem p = mx_problem(24, 0, 3, 128, c.width, c.layout);
        Run run = make_run("weights", 1, 256, 128, MOK_SAVE_NONE);
        run.prequantised = c.prequantised;
        run.forward_only = c.forward_only;
        run_layer(p, run);
        CHECK_EQ(launches("mok_forward_fused_mx"), 1);
        CHECK_EQ(launches("mok_backward_fused_mx"), !c.forward_only);
        CHECK_EQ(launches("mok_mx_widen_weights"), 0);
        CHECK_EQ(launches("mok_mx_quantise_matrix"), c.quantised);
        CHECK_EQ(launches("mok_mx_quantise_turned"), c.turned);
        CHECK_EQ(launches("mok_mx_take_part"), c.parts);
        layer_free(&p);
    }
}

/* A row of e4m3 that is longer than half of dispatch's memory moves in pieces; its scales come straight from where it lies, or from the row of the ring that
 * it copies. */
TEST(the_longest_rows_move_in_pieces)
{
    layer_problem p;
    mok_config c = MOK_INIT(mok_config);
    c.hidden = 16448;
    c.intermediate = 64;
    c.num_experts = c.topk = 4;
    c.dtype = MOK_MXFP8;
    if (!layer_make(&p, &c, 12, LAYER_UNIFORM, 0.1, test_seed()))
        TEST_FAILED("no memory");
    Run one = forward_run("one rank", 1, 512, 128), two = one;
    two.name = "two ranks";
    two.ranks = 2;
    const StepResult want = run_layer(p, one), got = run_layer(p, two);
    check_close(one, want, run_layer(p, on_cpu(one)), kMore);
    check_bits(two, got, want);
    CHECK(got.stats.rows_copied > 0);
    layer_free(&p);
}

/* Few clusters fit, and launch control refuses never, often or always: the bits are the same, and clusters have left both passes where they could. */
TEST(clusters_come_and_go)
{
    static const uint32_t refusals[] = {0, 2, 1};
    int64_t left[2][3] = {};
    layer_problem p = mx_problem(130, 64, 4, 128, 192);
    const StepResult want = run_layer(p, make_run("all clusters fit", 1, 1024, 256));
    for (int i : {0, 1, 2, 5}) {
        Run run = make_run(i < 3 ? "three clusters fit" : "two clusters fit", 1 + i % 2, 256, 128, i % 2 ? MOK_SAVE_NONE : MOK_SAVE_RING);
        run.resident = i < 3 ? 3 : 2;
        run.refusals = refusals[i % 3];
        run.before_launch = [&](const std::string &kernel, const void *params) {
            const bool forward = kernel == "mok_s5_combine", backward = kernel == "mok_s5_combine_bwd";
            if (!forward && !backward)
                return;
            const mk_rank_params &r = forward ? static_cast<const mk_combine_params *>(params)->rank : static_cast<const mk_combine_bwd_params *>(params)->rank;
            const uint32_t *tickets = reinterpret_cast<const mk_device_state *>(r.local + r.memory.device_state)->tickets;
            CHECK(tickets[MK_YIELD_COUNTED] > 0 && tickets[MK_YIELD_LEFT] < tickets[MK_YIELD_COUNTED]);
            left[backward][i % 3] += tickets[MK_YIELD_LEFT];
        };
        check_bits(run, run_layer(p, run), want);
    }
    printf("  clusters that left forward and backward: %lld, %lld without refusals, %lld, %lld with half, %lld, %lld with all refused\n", (long long)left[0][0],
           (long long)left[1][0], (long long)left[0][1], (long long)left[1][1], (long long)left[0][2], (long long)left[1][2]);
    CHECK(left[0][2] > 0 && left[1][2] > 0);
    layer_free(&p);
}
