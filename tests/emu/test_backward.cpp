/* The backward on the emulator, through the whole library: staged and fused, on 1, 2 and 4 virtual ranks, over rings, save policies and
 * gradient forms. All gradients have the same bits, and agree with the cpu backend. */
#define MOK_EXPERIMENTAL /* stage times */
#define TEST_WATCHDOG 900
#include "emulated_layer.h"

#include <mutex>

/* What traces of all ranks hold. */
static struct Traced {
    std::mutex lock;
    int64_t kinds[MOK_NUM_TRACE_KINDS], link_bytes, lost;
} traced;

static void start_trace(mok_workspace *w, void *)
{
    if (mok_trace_start(w, 0) != MOK_OK)
        TEST_FAILED("%s", mok_last_error());
}

static void read_trace(mok_workspace *w, void *)
{
    int64_t count = 0, lost = 0;
    if (mok_trace_read(w, nullptr, &count, nullptr) != MOK_OK)
        TEST_FAILED("%s", mok_last_error());
    std::vector<mok_trace_event> events((size_t)count);
    if (mok_trace_read(w, events.data(), &count, &lost) != MOK_OK)
        TEST_FAILED("%s", mok_last_error());
    std::lock_guard<std::mutex> hold(traced.lock);
    traced.lost += lost;
    for (const mok_trace_event &e : events) {
        CHECK(e.end_ns >= e.begin_ns);
        traced.kinds[e.kind]++;
        traced.link_bytes += (int64_t)e.link_bytes;
    }
}

#if defined(__SANITIZE_ADDRESS__) && defined(MK_SM100)
enum { MOST_RUNS = 0, STUCK_STEP = 8 };
#elif defined(__SANITIZE_ADDRESS__)
enum { MOST_RUNS = 1, STUCK_STEP = 4 };
#else
enum { MOST_RUNS = 100, STUCK_STEP = 1 };
#endif

/* A first run on one rank against the cpu backend, then others against its bits; under AddressSanitizer, many times slower, the last ones only. */
static void compare(const layer_problem &p, const std::vector<Run> &runs, mok_dtype dtype = MOK_FP32, bool accumulate = false)
{
    Run cpu = make_run("cpu", 1, 1024, 256), first = make_run("one rank, fused", 1, 1024, 256);
    cpu.backend = MOK_BACKEND_CPU;
    cpu.dtype = first.dtype = dtype;
    cpu.accumulate = first.accumulate = accumulate;
    const StepResult want = run_layer(p, cpu), one = run_layer(p, first);
    if (!want.ok || !one.ok)
        return;
    check_close(first, one, want);
    print_hash(one);
    const size_t most = bits_only() ? 0 : MOST_RUNS;
    for (size_t i = runs.size() > most ? runs.size() - most : 0; i < runs.size(); i++) {
        Run run = runs[i];
        run.dtype = dtype;
        run.accumulate = accumulate;
        check_bits(run, run_layer(p, run), one);
    }
}

TEST(gradients_do_not_depend_on_ranks_ring_or_fusion)
{
    layer_problem p = make_problem(150, 64);
    Run staged = make_run("one rank, staged", 1, 1024, 256), crowded = make_run("few clusters", 1, 512, 128);
    staged.backward = "staged";
    crowded.resident = 1;
    compare(p, {staged, crowded, make_run("two ranks", 2, 1024, 256), make_run("four ranks, smallest ring", 4, 256, 128)});
    layer_free(&p);
}

TEST(gradients_do_not_depend_on_what_was_saved)
{
    layer_problem p = make_problem(150, 64);
    Run rows = make_run("384 rows saved", 1, 512, 128, MOK_SAVE_ROWS), again = make_run("recomputed", 1, 512, 128, MOK_SAVE_RING);
    rows.save_rows = 384;
    again.recompute = true;
    Run staged = make_run("nothing saved, staged", 2, 512, 128, MOK_SAVE_NONE);
    staged.backward = "staged";
    compare(p, {make_run("nothing saved", 1, 512, 128, MOK_SAVE_NONE), rows, again, staged});
    layer_free(&p);
}

TEST(a_cut_weight_gradient_continues_exactly)
{
    layer_problem p = make_problem(260, 0, 2, 128, 64, MOK_GATE_UP_SEPARATE, LAYER_ONE_EXPERT);
    Run small = make_run("smallest ring", 1, 256, 128), two = make_run("two ranks, smallest ring", 2, 256, 128, MOK_SAVE_NONE);
    compare(p, {small, two});
    const StepResult got = run_layer(p, small);
    CHECK(got.stats.wgrad_continued > 0);
    layer_free(&p);
}

TEST(bf16_gradients_accumulated_or_fresh_in_one_call_or_two)
{
    layer_problem p = make_problem(90, 64, 5);
    Run two_calls = make_run("two calls", 2, 512, 128);
    two_calls.two_calls = true;
    compare(p, {two_calls}, MOK_BF16);
    compare(p, {two_calls}, MOK_BF16, true);
    compare(p, {two_calls}, MOK_FP32, true);
    layer_free(&p);
}

/* One address for each expert: the same bits; and nothing is written for an expert whose address is NULL. */
TEST(gradients_through_pointers_and_a_frozen_expert)
{
    for (mok_gate_up layout : {MOK_GATE_UP_SEPARATE, MOK_GATE_UP_COMBINED}) {
        layer_problem p = make_problem(90, 64, 5, 128, 64, layout);
        Run packed = make_run("packed", 1, 256, 128), pointers = make_run("by pointer", 2, 256, 128), frozen = packed;
        pointers.grads_by_pointer = frozen.grads_by_pointer = true;
        frozen.name = "expert 2 frozen";
        frozen.frozen_expert = 1 + 2;
        const StepResult want = run_layer(p, packed);
        check_bits(pointers, run_layer(p, pointers), want);
        const StepResult got = run_layer(p, frozen);
        CHECK(got.dx == want.dx);
        for (int m = 0; m < 3; m++) {
            const size_t expert = got.weights[m].size() / 5;
            for (size_t i = 0; i < got.weights[m].size(); i++)
                REQUIRE(got.weights[m][i] == (i / expert == 2 ? 0xff : want.weights[m][i])); /* poison: as before the pass */
        }
        layer_free(&p);
    }
}

/* Weights too, of the shared expert as well: the same bits, whatever launches there are. */
TEST(weights_through_pointers)
{
    for (mok_gate_up layout : {MOK_GATE_UP_SEPARATE, MOK_GATE_UP_COMBINED, MOK_GATE_UP_INTERLEAVED}) {
        layer_problem p = make_problem(50, 64, 3, 128, 64, layout);
        Run packed = make_run("packed", 1, 512, 128), fused = make_run("by pointer, replayed", 1, 256, 128, MOK_SAVE_NONE), staged = make_run("by pointer, two ranks, staged", 2, 512, 128);
        fused.experts_by_pointer = staged.experts_by_pointer = true;
        staged.forward = staged.backward = "staged";
        staged.recompute = true;
        staged.tile = layout == MOK_GATE_UP_COMBINED ? "wide" : "narrow";
        const StepResult want = run_layer(p, packed);
        check_bits(fused, run_layer(p, fused), want);
        if (layout != MOK_GATE_UP_INTERLEAVED)
            check_bits(staged, run_layer(p, staged), want);
        layer_free(&p);
    }
}

/* The traced step has the bits of the one without, and its trace has every product with its epilogue, and the bytes that were counted. */
TEST(a_step_is_traced)
{
    layer_problem p = make_problem(150, 64);
    Run plain = make_run("two ranks", 2, 512, 128, MOK_SAVE_NONE), watched = plain;
    watched.name = "two ranks, traced";
    watched.before_pass = start_trace;
    watched.after_pass = read_trace;
    const StepResult one = run_layer(p, plain), got = run_layer(p, watched);
    check_bits(watched, got, one);
    const int64_t *k = traced.kinds;
    CHECK_EQ(traced.lost, 0);
    for (int kind : {MOK_TRACE_s2_gate_up, MOK_TRACE_s4_down, MOK_TRACE_s4_down_bwd, MOK_TRACE_s2_gate_up_bwd, MOK_TRACE_wgrad}) {
        CHECK(k[kind] > 0);
        CHECK_EQ(k[kind], k[kind + 1]);
    }
    CHECK_EQ(k[MOK_TRACE_call], 2 * 3);
    CHECK(k[MOK_TRACE_s1_dispatch] > 0 && k[MOK_TRACE_wait_operands] > 0 && k[MOK_TRACE_s5_reduce] > 0 && k[MOK_TRACE_s5_reduce_bwd] > 0);
    /* dx rows; their router-weight gradients (4 bytes of each) are not in the trace of a GPU. */
    const int64_t weights = (got.link_bytes - traced.link_bytes) / 4;
    printf("  %lld bytes between ranks, %lld counted, the difference is %lld router-weight gradients\n", (long long)traced.link_bytes, (long long)got.link_bytes, (long long)weights);
    CHECK(weights > 0 && weights * 4 == got.link_bytes - traced.link_bytes && weights <= 150 * p.cfg.topk);
    layer_free(&p);
}

/* Gate and up in one matrix change no bit: of another run on the same data, and against the cpu backend with the same layout. */
TEST(one_matrix_for_gate_and_up_changes_no_bit)
{
    layer_problem separate = make_problem(60, 64, 3, 128, 64);
    const StepResult want = run_layer(separate, make_run("separate", 1, 512, 128));
    for (mok_gate_up layout : {MOK_GATE_UP_COMBINED, MOK_GATE_UP_INTERLEAVED}) {
        layer_problem p = make_problem(60, 64, 3, 128, 64, layout);
        Run first = make_run(layout == MOK_GATE_UP_COMBINED ? "combined" : "interleaved", 1, 512, 128), cpu = first, two = first;
        cpu.backend = MOK_BACKEND_CPU;
        two.ranks = 2;
        two.save = MOK_SAVE_NONE;
        const StepResult got = run_layer(p, first);
        check_bits(first, got, want);
        check_close(first, got, run_layer(p, cpu));
        check_bits(two, run_layer(p, two), want);
        layer_free(&p);
    }
    layer_free(&separate);
}

/* Some gates and ups lie beyond the limit: their gradients are 0. */
TEST(a_limit_of_swiglu_stops_gradients)
{
    layer_problem p = make_problem(60, 64, 3, 128, 64), free_of_it = make_problem(60, 64, 3, 128, 64);
    p.cfg.swiglu_limit = 0.75f;
    Run staged = make_run("staged", 1, 512, 128);
    staged.backward = "staged";
    compare(p, {staged, make_run("two ranks", 2, 512, 128, MOK_SAVE_NONE)});
    const StepResult got = run_layer(p, staged), other = run_layer(free_of_it, staged);
    CHECK(got.ok && other.ok && got.dx != other.dx);
    layer_free(&p);
    layer_free(&free_of_it);
}

TEST(router_weights_in_bf16)
{
    layer_problem p = make_problem(60, 0, 3, 128, 64);
    p.cfg.router_dtype = MOK_BF16;
    compare(p, {make_run("two ranks", 2, 512, 128, MOK_SAVE_NONE)});
    layer_free(&p);
}

#ifndef MK_SM100
/* A whole step; *left: clusters that have left its backward. */
static StepResult run_and_count(const layer_problem &p, Run run, uint32_t yield_ns, uint32_t *left)
{
    run.before_launch = [&](const std::string &kernel, const void *params) {
        if (kernel == "mok_backward_fused")
            const_cast<mk_backward_params *>(static_cast<const mk_backward_params *>(params))->yield.interval_ns = yield_ns;
        if (kernel != "mok_s5_combine_bwd")
            return;
        const mk_rank_params &r = static_cast<const mk_combine_bwd_params *>(params)->rank;
        *left += reinterpret_cast<const mk_device_state *>(r.local + r.memory.device_state)->tickets[MK_YIELD_LEFT];
    };
    return run_layer(p, run);
}

/* Turns to leave at random times, one to three clusters resident, which the host takes for two, and those that come after others late: the bits are the same and all is done. */
TEST(clusters_leave_by_the_clock)
{
    uint64_t state = test_seed();
    uint32_t left = 0, none = 0;
    layer_problem p = make_problem(260, 64, 4, 128, 64), stays = p;
    p.cfg.yield_us = 1;
    stays.cfg.yield_us = -1;
    const StepResult want = run_and_count(stays, make_run("all stay", 1, 1024, 256), 1, &none);
    CHECK_EQ(none, 0);
    for (int i = 0; i < (MOST_RUNS > 1 ? 4 : 2); i++) {
        Run run = make_run("clusters leave", 1 + i % 2, i % 2 ? 1024 : 256, i % 2 ? 256 : 128, i % 2 ? MOK_SAVE_NONE : MOK_SAVE_RING);
        run.resident = 1 + (uint32_t)(i + 1) % 3;
        run.late = (uint32_t)test_below(&state, 200);
        check_bits(run, run_and_count(p, run, i ? 1u << test_below(&state, 15) : 1, &left), want); /* the first: whenever they may */
    }
    printf("  clusters that left: %u\n", left);
    CHECK(left > 0);
    layer_free(&p);
}
#endif

/* Experts without rows, and those whose gradient is made of several pieces, too. */
TEST(every_expert_is_ready_in_the_end)
{
    for (layer_routing routing : {LAYER_UNIFORM, LAYER_ONE_EXPERT}) {
        layer_problem p = make_problem(200, 0, 5, 128, 64, MOK_GATE_UP_SEPARATE, routing);
        Run run = make_run("flags", 2, 256, 128), without = run, cpu = run;
        run.ready_value = cpu.ready_value = 7;
        cpu.backend = MOK_BACKEND_CPU;
        const StepResult got = run_layer(p, run), none = run_layer(p, without), want = run_layer(p, cpu);
        for (uint32_t ready : got.ready)
            CHECK_EQ(ready, 7);
        CHECK(got.ready == want.ready);
        for (uint32_t ready : none.ready)
            CHECK_EQ(ready, ~0u);
        check_bits(run, got, none);
        layer_free(&p);
    }
}

/* 33 rows of one expert, the last two of one token: a batch of dispatch with nothing but a row that the batch before has moved. */
TEST(a_batch_of_duplicates_alone)
{
    layer_problem p = make_problem(17, 0, 2, 128, 64);
    for (int64_t i = 0; i < 34; i++)
        p.expert_ids[i] = i == 0 ? -1 : 0;
    compare(p, {make_run("two ranks", 2, 256, 128), make_run("nothing saved", 1, 256, 128, MOK_SAVE_NONE)});
    layer_free(&p);
}

/* 65 rows of one expert, 64 of the other, replayed too: a block of the accumulators has all its rows, and the next one or none. */
TEST(half_a_tile_of_rows_and_one_more)
{
    layer_problem p = make_problem(65, 64, 2, 128, 64);
    for (int64_t i = 0; i < 130; i++)
        p.expert_ids[i] = i == 129 ? -1 : i % 2;
    compare(p, {make_run("nothing saved", 1, 256, 128, MOK_SAVE_NONE)});
    layer_free(&p);
}

/* Whole tiles: every row and column that a warp has of one. */
TEST(tiles_without_padding)
{
    layer_problem p = make_problem(128, 0, 2, 64, 128);
    for (int64_t i = 0; i < 256; i++)
        p.expert_ids[i] = i % 2;
    compare(p, {make_run("nothing saved", 1, 256, 128, MOK_SAVE_NONE)});
    layer_free(&p);
}

TEST(stats_are_those_of_the_cpu)
{
    layer_problem p = make_problem(150, 0);
    Run cpu = make_run("cpu", 2, 256, 128, MOK_SAVE_RING), gpu = cpu;
    cpu.backend = MOK_BACKEND_CPU;
    const mok_stats want = run_layer(p, cpu).stats, got = run_layer(p, gpu).stats;
#define SAME(field) CHECK_EQ(got.field, want.field)
    SAME(backwards); SAME(rows); SAME(rows_pulled); SAME(rows_pulled_peer); SAME(rows_copied); SAME(rows_replayed);
    SAME(rows_padding); SAME(ring_rotations); SAME(wgrad_continued); SAME(bytes_pulled_peer); SAME(bytes_pushed_peer);
#undef SAME
    layer_free(&p);
}

/* --- waits that never end ------------------------------------------------------------------------------------------------------ */
/* The first counter of a kind that the pass waits for: the table's last tile in the forward, its first in the backward. */
struct Stuck {
    const char *kernel, *pass;
    int32_t counter;
    const char *needs;
};

static void hold_back(const Stuck &stuck, const mk_rank_params &r, const void *schedule, bool backward)
{
    const int32_t last = static_cast<const mk_schedule_head *>(schedule)->num_tiles - 1;
    const int32_t index = backward || stuck.counter >= MK_NUM_TILE_COUNTERS ? 0 : last;
    *reinterpret_cast<uint32_t *>(r.local + r.memory.counters + 4 * mk_counter_index(&r.dims, stuck.counter, index)) -= 1000000;
}

/* Every role goes through the rest of the pass, the host hears what was missing, and the workspace is closed. What runs out first may also be
 * a wait for somebody who waits himself: then no counter in the sentence is below 0. */
static void check_gives_up(const Stuck &stuck)
{
    layer_problem p = make_problem(40, 64, 4, 128, 64);
    layer_result r;
    char error[512];
    const bool backward = !strcmp(stuck.kernel, "mok_backward_fused");
    Run run = make_run("stuck", 1, 256, 128);
    run.forward_only = !backward;
    const layer_options o = options_of(run);
    p.cfg.timeout_ms = 2000;
    const Setting forward("MOK_FORWARD", "fused");
    emulated::plug_in(test_seed(), 2);
    emulated::gpu.machine->let_time_pass(true);
    emulated::gpu.before_launch = [&](const std::string &kernel, const void *params) {
        if (kernel != stuck.kernel)
            return;
        if (backward)
            hold_back(stuck, static_cast<const mk_backward_params *>(params)->rank, static_cast<const mk_backward_params *>(params)->schedule, true);
        else
            hold_back(stuck, static_cast<const mk_forward_params *>(params)->rank, static_cast<const mk_forward_params *>(params)->schedule, false);
    };
    if (!layer_result_make(&r, &p, &o)) {
        TEST_FAILED("no memory");
        return;
    }
    CHECK_EQ(layer_run(&p, &o, &r, error), MOK_E_TIMEOUT);
    CHECK_STR(error, stuck.pass);
    if (!strstr(error, " needs ") || (!strstr(error, stuck.needs) && strstr(error, "which is -")))
        TEST_FAILED("%s where %s", error, stuck.needs);
    if (!emulated::gpu.trouble.empty())
        TEST_FAILED("%s: emulator: %s", stuck.needs, emulated::gpu.trouble.c_str());
    CHECK_EQ(emulated::gpu.live, 0);
    layer_result_free(&r);
    layer_free(&p);
}

TEST(a_counter_that_never_comes_ends_the_pass_with_its_name)
{
    static const char forward[] = "rank 0 waited 2000 ms in forward (layer 0, call 2): ", backward[] = "rank 0 waited 2000 ms in backward (layer 0, call 3): ";
    static const Stuck all[] = {
        {"mok_forward_fused", forward, MK_COUNTER_s1_rows_arrived, " needs s1_rows_arrived of tile "},
        {"mok_forward_fused", forward, MK_COUNTER_s2_tasks_done, " needs s2_tasks_done of tile "},
        {"mok_forward_fused", forward, MK_COUNTER_s4_tasks_done, "gate_up needs s4_tasks_done of tile "},
        {"mok_forward_fused", forward, MK_COUNTER_shared_s2_tasks_done, "shared_down needs shared_s2_tasks_done of shared tile 0, which is -999"},
        {"mok_backward_fused", backward, MK_COUNTER_s1_rows_arrived, " needs s1_rows_arrived of tile 0, "},
        {"mok_backward_fused", backward, MK_COUNTER_s2_bwd_tasks_done, "dispatch needs s2_bwd_tasks_done of tile 0, which is -999"},
        {"mok_backward_fused", backward, MK_COUNTER_s4_bwd_tasks_done, " needs s4_bwd_tasks_done of tile 0, which is -999"},
        {"mok_backward_fused", backward, MK_COUNTER_wgrad_tasks_done, "dispatch needs wgrad_tasks_done of piece 0, which is -999"},
        {"mok_backward_fused", backward, MK_COUNTER_shared_s4_bwd_tasks_done, " needs shared_s4_bwd_tasks_done of shared tile 0, which is -999"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i += STUCK_STEP)
        check_gives_up(all[i]);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
