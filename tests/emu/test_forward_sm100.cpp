/* The same layers through the same stage code on emulated Blackwell: tensor memory, MMAs over pairs of CTAs. The plain loop that all must
 * equal bit for bit is Hopper's, so the chips have the same bits. And what only Blackwell does: clusters that leave in the middle of a pass. */
#define MK_SM100
#include "test_forward.cpp"

/* More clusters than fit, and launch control that refuses never, often or always: bits are the same, all tasks are done, and clusters
 * have left where they could. */
TEST(clusters_come_and_go)
{
    uint64_t left[3] = {};
    for (uint64_t i = 0; i < 6; i++) {
        static const uint32_t refusals[] = {0, 2, 1};
        LayerShape s;
        s.tokens = {70, 90};
        s.hidden = 128;
        s.intermediate = 256;
        s.experts = 6;
        s.shared = 64;
        s.fused = true;
        s.clusters = 5;
        s.resident = 1 + (uint32_t)i / 3 * 2;
        s.refusals = refusals[i % 3];
        LayerCase layer(s, test_seed() + i);
        const emu::Result result = layer.run();
        if (!result.ok)
            TEST_FAILED("%u resident, refusals %u: %s", s.resident, s.refusals, result.message.c_str());
        if (const int64_t wrong = result.ok ? layer.count_differences() : 0)
            TEST_FAILED("%u resident, refusals %u: %lld elements differ", s.resident, s.refusals, (long long)wrong);
        for (const LayerRank &r : layer.ranks) {
            CHECK_LE(layer.state(r).tickets[MK_YIELD_LEFT], layer.state(r).tickets[MK_YIELD_COUNTED]);
            CHECK_LE(layer.state(r).tickets[MK_YIELD_COUNTED], s.clusters);
            left[i % 3] += layer.state(r).tickets[MK_YIELD_LEFT];
        }
    }
    printf("  clusters that left: %llu without refusals, %llu with half, %llu with all refused\n", (unsigned long long)left[0], (unsigned long long)left[1], (unsigned long long)left[2]);
    CHECK(left[2] > 0);
}

/* The smallest ring, and a GPU that always wants its SMs back: rows wait for slots while clusters leave, and somebody must draw the tasks that free them. */
TEST(clusters_leave_with_the_ring_full)
{
    uint32_t left = 0;
    for (uint64_t i = 0; i < 6; i++) {
        LayerShape s;
        s.tokens = {300};
        s.experts = 3;
        s.ring = 256;
        s.minibatch = 128;
        s.fused = true;
        s.clusters = 8;
        s.resident = 1 + (uint32_t)i / 2;
        s.refusals = 1;
        LayerCase layer(s, test_seed() + i);
        const emu::Result result = layer.run();
        if (!result.ok)
            TEST_FAILED("%u resident: %s", s.resident, result.message.c_str());
        if (const int64_t wrong = result.ok ? layer.count_differences() : 0)
            TEST_FAILED("%u resident: %lld elements differ", s.resident, (long long)wrong);
        left += layer.state(layer.ranks[0]).tickets[MK_YIELD_LEFT];
    }
    printf("  clusters that left: %u\n", left);
    CHECK(left > 0);
}
