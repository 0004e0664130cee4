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

TEST(warps_take_many_places_and_experts_are_more_than_threads)
{
    LayerShape s;
    s.hidden = s.intermediate = 64;
    s.tokens = {520};
    s.topk = 64;     /* 64 x 9 x 64 places, more than 1024 warps have lanes */
    s.experts = 400; /* nor do their segments fit into shared memory */
    s.dropped = 0.9;
    s.ring = 512;
    s.minibatch = 256;
    run_schedule(s);
}

TEST(several_ranks_and_a_ring_that_cuts)
{
    LayerShape s;
    s.hidden = s.intermediate = 64;
    s.tokens = {150, 0, 260};
    s.topk = 3;
    s.experts = 7;
    s.ring = 256;
    s.minibatch = 128;
    run_schedule(s);
}

/* Segments of many tiles and minibatches in a ring that holds them all, and experts without rows between them. */
TEST(a_ring_that_cuts_nothing)
{
    LayerShape s;
    s.hidden = s.intermediate = 64;
    s.tokens = {500};
    s.topk = 3;
    s.experts = 5;
    s.ring = 2048;
    s.minibatch = 128;
    run_schedule(s);
    s.dropped = 0.97; /* some experts get a few rows, some none */
    s.experts = 60;
    run_schedule(s);
}

TEST(a_table_without_rows)
{
    LayerShape s;
    s.hidden = s.intermediate = 64;
    s.tokens = {40};
    s.topk = 2;
    s.experts = 4;
    s.dropped = 1;
    s.ring = 256;
    s.minibatch = 128;
    run_schedule(s);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
