/* The staged and the fused forward on 1, 2 and 4 emulated ranks, over seeds: bit for bit against a plain loop, with tails, uneven tokens, dropped and duplicate
 * routes, a ring that rotates, few resident clusters. MOK_TEST_SEEDS sets how many seeds each case runs (default 1). */
#define TEST_WATCHDOG 900
#include <map>

#include "layer_case.h"

typedef std::map<uint64_t, std::vector<uint16_t>> Outputs; /* by seed */
static void run_launches(const LayerShape &shape, const char *what, Outputs &want);

#ifdef __SANITIZE_ADDRESS__ /* several times slower: one of them is enough to see bad accesses */
enum { MOST_RESIDENT = 1 };
#else
enum { MOST_RESIDENT = 3 };
#endif

/* Staged, then fused, with few resident clusters: the rest of the grid starts only when one leaves; with one or two of them, as the seed says. */
static void run_case(LayerShape shape, const char *what)
{
    Outputs want;
    run_launches(shape, what, want);
    shape.fused = true;
    shape.resident = 1 + (uint32_t)((test_seed() + strlen(what)) % 2);
    if (shape.resident < MOST_RESIDENT)
        run_launches(shape, what, want);
    shape.resident = MOST_RESIDENT;
    run_launches(shape, what, want);
}

static void run_launches(const LayerShape &shape, const char *what, Outputs &want)
{
    const char *env = getenv("MOK_TEST_SEEDS");
    const int seeds = env ? atoi(env) : 1;
    for (int i = 0; i < seeds; i++) {
        const uint64_t seed = test_seed() + (uint64_t)i;
        LayerCase layer(shape, seed);
        const emu::Result result = layer.run();
        if (!result.ok) {
            TEST_FAILED("%s, %s, %u resident, seed %llu: %s", what, shape.fused ? "fused" : "staged", shape.resident, (unsigned long long)seed, result.message.c_str());
            return;
        }
        std::vector<uint16_t> &outputs = want[seed];
        if (outputs.empty())
            outputs = layer.expected();
        const int64_t wrong = layer.count_differences(outputs);
        if (wrong)
            TEST_FAILED("%s, %s, %u resident, seed %llu: %lld elements differ", what, shape.fused ? "fused" : "staged", shape.resident, (unsigned long long)seed, (long long)wrong);
        for (const LayerRank &r : layer.ranks) {
            const mk_schedule_head &h = layer.head(r);
            const mk_device_state &s = layer.state(r);
            CHECK_EQ(s.fault.kind, MK_FAULT_NONE);
            CHECK_EQ(s.rows_copied, h.rows_copied_fwd);
            CHECK_EQ(s.rows_pulled + s.rows_copied, h.num_rows);
            CHECK_EQ(s.rows_pulled_peer, h.rows_pulled_peer_fwd);
        }
    }
}

TEST(one_rank)
{
    LayerShape s;
    s.tokens = {70};
    run_case(s, "one rank");
}

TEST(one_rank_wide_tile_shared_expert_and_gate)
{
    LayerShape s;
    s.tokens = {33};
    s.wide = true;
    s.shared = 128;
    s.shared_gate = true;
    s.hidden = 192;
    run_case(s, "wide tile");
}

TEST(two_ranks_uneven_tokens_and_experts)
{
    LayerShape s;
    s.tokens = {5, 40};
    s.experts = 5;
    s.topk = 3;
    s.limit = 1.0f;
    run_case(s, "two ranks");
}

TEST(four_ranks_one_without_tokens)
{
    LayerShape s;
    s.tokens = {9, 0, 20, 7};
    s.experts = 6;
    run_case(s, "four ranks");
}

TEST(ring_rotates_and_context_is_written)
{
    LayerShape s;
    s.tokens = {130, 140};
    s.experts = 8;
    s.hidden = 64;
    s.ring = 256;
    s.minibatch = 128;
    s.save_rows = 256;
    run_case(s, "ring");
}

TEST(one_expert_gets_everything_of_all_ranks)
{
    LayerShape s;
    s.tokens = {60, 80};
    s.experts = 1;
    s.topk = 1;
    s.dropped = 0;
    run_case(s, "one expert");
}

/* A block of the accumulators has all its rows, and the next one row. */
TEST(half_a_tile_of_rows_and_one_more)
{
    for (int64_t rows : {64, 65}) {
        LayerShape s;
        s.tokens = {rows};
        s.experts = 1;
        s.topk = 1;
        s.dropped = 0;
        s.shared = 64;
        run_case(s, rows == 64 ? "64 rows" : "65 rows");
    }
}

TEST(more_ranks_than_experts)
{
    LayerShape s;
    s.tokens = {10, 12, 3, 8};
    s.experts = 3;
    run_case(s, "ranks without experts");
}

/* The acceptance size of the staged forward: H 256, I 256, E 8, K 2, T 128 on two ranks. */
TEST(two_ranks_reference_size)
{
    LayerShape s;
    s.hidden = s.intermediate = 256;
    s.experts = 8;
    s.tokens = {128, 128};
    s.dropped = 0;
    run_case(s, "reference size");
}

#ifndef MK_SM100
/* One leaves in a random time, in a rotating ring or a full one; fewer clusters are resident than the host thinks, or as many; those that come after others come
 * at once or late. The bits are the same, all is done, and no more leave than there are spares. */
TEST(clusters_leave_by_the_clock)
{
    uint64_t state = test_seed();
    uint32_t left = 0, most = 0;
    for (uint64_t i = 0; i < 7; i++) {
        LayerShape s;
        s.tokens = i % 3 ? std::vector<int64_t>{320} : std::vector<int64_t>{190, 150};
        s.experts = 3 + i % 3;
        s.hidden = 64 << i % 2;
        s.intermediate = 1024;
        s.ring = i % 4 ? 256 : 0;
        s.minibatch = i % 4 ? 128 : 0;
        s.shared = i % 2 * 64;
        s.fused = true;
        s.resident = i ? 2 + (uint32_t)i % 3 : 1;
        s.spare = 1 + (uint32_t)test_below(&state, 12);
        s.clusters = s.resident + (uint32_t)(i % 5 == 0) + s.spare;
        const bool never = i == 6; /* it is nobody's time before the pass ends */
        s.yield_ns = 1u << (never ? 31 : test_below(&state, 15));
        s.late = i % 3 ? (uint32_t)test_below(&state, 200) : 0;
        LayerCase layer(s, test_seed() + i);
        const emu::Result result = layer.run();
        if (!result.ok)
            TEST_FAILED("%u resident, %u spare, one leaves in %u ns: %s", s.resident, s.spare, s.yield_ns, result.message.c_str());
        if (const int64_t wrong = result.ok ? layer.count_differences() : 0)
            TEST_FAILED("%u resident, %u spare, one leaves in %u ns: %lld elements differ", s.resident, s.spare, s.yield_ns, (long long)wrong);
        for (const LayerRank &r : layer.ranks) {
            CHECK_EQ(layer.state(r).rows_pulled + layer.state(r).rows_copied, layer.head(r).num_rows);
            CHECK_LE(layer.state(r).tickets[MK_YIELD_LEFT], never ? 0 : s.spare);
            left += layer.state(r).tickets[MK_YIELD_LEFT];
            most += s.spare;
        }
    }
    printf("  clusters that left: %u, of %u spares\n", left, most);
    CHECK(left > 3);
}
#endif

TEST(R1_bad_id_on_one_rank_is_found_by_all_and_nothing_runs)
{
    LayerShape s;
    s.tokens = {8, 8};
    s.dropped = 0;
    LayerCase layer(s, test_seed());
    layer.ranks[1].ids->host()[5] = 99;
    const emu::Result result = layer.run();
    if (!result.ok)
        TEST_FAILED("%s", result.message.c_str());
    for (const LayerRank &r : layer.ranks) {
        const mk_fault &f = layer.state(r).fault;
        /* the forward then finds the unusable schedule and says so too, but the first record stays */
        CHECK_EQ(f.kind, MK_FAULT_BAD_ID);
        CHECK_EQ(f.rank, 1);
        CHECK_EQ(f.value[0], 2);
        CHECK_EQ(f.value[1], 1);
        CHECK_EQ(f.value[2], 99);
        CHECK(!r.out->written(0));
        const mk_host_fault &told = *r.host_fault->device();
        CHECK_EQ(told.fault.kind, MK_FAULT_BAD_ID);
        CHECK_EQ(told.fault.value[2], 99);
        CHECK_EQ(told.zero.sequence, 1);
        CHECK_EQ(told.other.operation, MK_OP_SCHEDULE);
    }
}

/* Rank 1 never calls: rank 0's wait ends, says for whom, and nothing after it runs. */
TEST(a_rank_that_does_not_come_is_named_when_the_time_is_over)
{
    LayerShape s;
    s.tokens = {8, 8, 8};
    LayerCase layer(s, test_seed());
    layer.machine.let_time_pass(true);
    for (int i : {0, 2}) {
        layer.schedule(layer.ranks[(size_t)i]);
        layer.forward(layer.ranks[(size_t)i]);
    }
    const emu::Result result = layer.machine.run();
    if (!result.ok)
        TEST_FAILED("%s", result.message.c_str());
    for (int i : {0, 2}) {
        const LayerRank &r = layer.ranks[(size_t)i];
        const mk_fault &f = layer.state(r).fault, &told = r.host_fault->device()->fault;
        CHECK_EQ(f.kind, MK_FAULT_TIMEOUT);
        CHECK_EQ(f.rank, 1);
        CHECK_EQ(f.call, 1);
        CHECK_EQ(f.value[0], 0); /* epoch seen */
        CHECK_EQ(f.value[1], 1); /* and wanted */
        CHECK_EQ(layer.state(r).epoch, 1); /* the forward, called behind it, has waited for nobody */
        CHECK_BYTES(&told, &f, sizeof f);
        CHECK(!r.out->written(0));
    }
}

static void hold_back(const mk_rank_params r)
{
    if (mk::thread_idx() == 0)
        mk::store(mk::counter_at(r, MK_COUNTER_s2_tasks_done, 0), (uint32_t)-1000000);
}

/* Rank 0's pass does not end well: rank 1, which would use what it pushes, does not go on. Nor does rank 0 with its next call. */
TEST(a_pass_that_gives_up_keeps_the_other_ranks_from_using_it)
{
    LayerShape s;
    s.tokens = {16, 16};
    s.fused = true;
    s.dropped = 0;
    LayerCase layer(s, test_seed());
    layer.machine.let_time_pass(true);
    layer.before_stages = [&](LayerRank &r) {
        if (&r == &layer.ranks[0])
            layer.launch(r, "hold_back", hold_back, r.params, 1, 32);
    };
    for (LayerRank &r : layer.ranks) {
        layer.schedule(r);
        layer.forward(r);
    }
    layer.schedule(layer.ranks[0]);
    const emu::Result result = layer.machine.run();
    if (!result.ok)
        TEST_FAILED("%s", result.message.c_str());
    const mk_fault &f = layer.state(layer.ranks[0]).fault, &told = layer.ranks[0].host_fault->device()->fault, &other = layer.state(layer.ranks[1]).fault;
    CHECK_EQ(f.kind, MK_FAULT_TIMEOUT);
    CHECK_EQ(f.operation, MK_OP_FORWARD);
    CHECK_EQ(f.call, 2);
    CHECK_EQ(f.task, MK_TASK_DOWN);
    CHECK_EQ(f.value[2], MK_COUNTER_s2_tasks_done);
    CHECK_EQ(f.value[3], 0);
    CHECK_BYTES(&told, &f, sizeof f);
    CHECK_EQ(other.kind, MK_FAULT_TIMEOUT);
    CHECK_EQ(other.rank, 0);
    CHECK_EQ(other.value[2], -1);
    for (const LayerRank &r : layer.ranks)
        CHECK(!r.out->written(0));
}

int main(int argc, char **argv) { return test_main(argc, argv); }
