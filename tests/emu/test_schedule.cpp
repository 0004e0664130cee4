/* The schedule's five launches on the emulator: the row table against one made by brute force, field by field. Sizes at which
 * every loop of s0 turns more than once: warps with several batches of places, more experts than a block has threads. */
#define TEST_WATCHDOG 900
#include "layer_case.h"
#include "../unit/table_maker.h"

static void run_schedule(const LayerShape &shape)
{
    LayerCase layer(shape, test_seed());
    for (LayerRank &r : layer.ranks)
        layer.schedule(r);
    const emu::Result result = layer.machine.run();
    if (!result.ok) {
        TEST_FAILED("seed %llu: %s", (unsigned long long)test_seed(), result.message.c_str());
        return;
    }
    std::vector<int64_t> token_first(1, 0);
    for (int64_t t : shape.tokens)
        token_first.push_back(token_first.back() + t);
    for (LayerRank &r : layer.ranks) {
        made_table made;
        table_make(&made, &r.dims, token_first.data(), layer.data.ids.data());
        table_compare(&made, r.schedule->device());
        table_free(&made);
        std::vector<int64_t> counts((size_t)(2 * shape.experts), 0); /* of this rank's tokens; of all */
        for (int64_t i = 0; i < layer.data.tokens * shape.topk; i++) {
            const int64_t id = layer.data.ids[(size_t)i], token = i / shape.topk;
            const bool own = token >= r.first_token && token < r.first_token + r.num_tokens;
            if (id >= 0 && own)
                counts[(size_t)id]++;
            if (id >= 0)
                counts[(size_t)(shape.experts + id)]++;
        }
        CHECK_BYTES(r.per_expert->device(), counts.data(), counts.size() * sizeof(int64_t));
    }
}

static LayerShape routing(std::vector<int64_t> tokens, int64_t topk, int64_t experts, int64_t ring, int64_t minibatch, double dropped)
{
    LayerShape s;
    s.hidden = s.intermediate = 64;
    s.tokens = tokens;
    s.topk = topk;
    s.experts = experts;
    s.ring = ring;
    s.minibatch = minibatch;
    s.dropped = dropped;
    return s;
}

/* 64 x 9 x 64 places, more than 1024 warps have lanes; nor do the experts' segments fit into shared memory. */
TEST(warps_take_many_places_and_experts_are_more_than_threads) { run_schedule(routing({520}, 64, 400, 512, 256, 0.9)); }

TEST(several_ranks_and_a_ring_that_cuts) { run_schedule(routing({150, 0, 260}, 3, 7, 256, 128, 0.1)); }

/* Segments of many tiles and minibatches in a ring that holds them all; experts with a few rows, or none. */
TEST(a_ring_that_cuts_nothing)
{
    run_schedule(routing({500}, 3, 5, 2048, 128, 0.1));
    run_schedule(routing({500}, 3, 60, 2048, 128, 0.97));
}

TEST(a_table_without_rows) { run_schedule(routing({40}, 2, 4, 256, 128, 1)); }

int main(int argc, char **argv) { return test_main(argc, argv); }
