/* The same layer in MXFP8 on emulated Blackwell: the forward's products are of e4m3 operands with their scales, the backward's of operands widened to bf16.
 * The bits are Hopper's (tests/emu/same_bits.sh). And what only Blackwell does: clusters that leave in the middle of a pass. */
#define MK_SM100
#include "test_mx_layer.cpp"

static int64_t launches(const char *kernel) { return emulated::gpu.launches[kernel]; }

/* Quantised weights are multiplied where the caller has them; bf16 ones are quantised by the call; of up rows that begin inside a tile of
 * combined weights' scales the call takes a copy. Nothing is widened. */
TEST(a_forward_widens_nothing)
{
    struct Case { mok_gate_up layout; int64_t width; bool prequantised; int64_t quantised, parts; };
    for (const Case &c : {Case{MOK_GATE_UP_SEPARATE, 64, true, 0, 0}, Case{MOK_GATE_UP_COMBINED, 128, true, 0, 0}, Case{MOK_GATE_UP_COMBINED, 64, true, 0, 1},
                          Case{MOK_GATE_UP_INTERLEAVED, 64, false, 3, 0}}) {
        layer_problem p = mx_problem(24, 0, 3, 128, c.width, c.layout);
        Run run = forward_run("weights");
        run.prequantised = c.prequantised;
        run_layer(p, run);
        CHECK_EQ(launches("mok_forward_fused_mx"), 1);
        CHECK_EQ(launches("mok_mx_widen_weights"), 0);
        CHECK_EQ(launches("mok_mx_quantise_matrix"), c.quantised);
        CHECK_EQ(launches("mok_mx_take_part"), c.parts);
        layer_free(&p);
    }
}

/* A row of e4m3 that is longer than half of dispatch's memory moves in pieces; its scales come straight from where it lies. */
TEST(the_longest_rows_move_in_pieces)
{
    layer_problem p = mx_problem(12, 0, 2, 16448, 64);
    Run one = forward_run("one rank", 1, 256, 128), two = one;
    two.name = "two ranks";
    two.ranks = 2;
    const StepResult want = run_layer(p, one), got = run_layer(p, two);
    check_close(one, want, run_layer(p, on_cpu(one)), kMore);
    check_bits(two, got, want);
    CHECK(got.stats.rows_copied > 0);
    layer_free(&p);
}

/* Few clusters fit, and launch control refuses never, often or always: the bits are the same, and clusters have left where they could. */
TEST(clusters_come_and_go)
{
    static const uint32_t refusals[] = {0, 2, 1};
    int64_t left[3] = {};
    layer_problem p = mx_problem(260, 64, 4, 128, 192);
    const StepResult want = run_layer(p, forward_run("all clusters fit", 1, 1024, 256));
    for (int i = 0; i < 6; i++) {
        Run run = forward_run(i < 3 ? "three clusters fit" : "two clusters fit", 1 + i % 2, 256, 128);
        run.resident = i < 3 ? 3 : 2;
        run.refusals = refusals[i % 3];
        run.before_launch = [&](const std::string &kernel, const void *params) {
            if (kernel != "mok_s5_combine")
                return;
            const mk_rank_params &r = static_cast<const mk_combine_params *>(params)->rank;
            const uint32_t *tickets = reinterpret_cast<const mk_device_state *>(r.local + r.memory.device_state)->tickets;
            CHECK(tickets[MK_YIELD_COUNTED] > 0 && tickets[MK_YIELD_LEFT] < tickets[MK_YIELD_COUNTED]);
            left[i % 3] += tickets[MK_YIELD_LEFT];
        };
        check_bits(run, run_layer(p, run), want);
    }
    printf("  clusters that left: %lld without refusals, %lld with half, %lld with all refused\n", (long long)left[0], (long long)left[1], (long long)left[2]);
    CHECK(left[2] > 0);
    layer_free(&p);
}
