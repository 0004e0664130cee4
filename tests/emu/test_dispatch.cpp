/* The dispatch stage alone on the emulator: every row of the ring against the token's x, at every number of slots that the
 * shared memory of a dispatch warp is cut into, and rows longer than that memory. */
#define TEST_WATCHDOG 900
#include "layer_case.h"

static void launch_dispatch(LayerCase &layer, LayerRank &r)
{
    layer.schedule(r);
    layer.begin(r, layer.open_params(r, MK_OP_FORWARD), false);
    mk_dispatch_params d = {};
    d.rank = r.params;
    d.schedule = r.schedule->device();
    layer.launch(r, "mok_s1_dispatch", mok_s1_dispatch, d, 3, 32, 1, MK_DISPATCH_SHARED);
}

static int64_t wrong_rows(const LayerCase &layer, const LayerRank &r)
{
    const mk_table t = mk_table_at(&r.memory, r.schedule->device());
    const int64_t hidden = layer.shape.hidden;
    const uint16_t *ring = reinterpret_cast<const uint16_t *>(r.local->device() + r.memory.ring_x);
    int64_t wrong = 0;
    for (int64_t row = 0; row < (int64_t)t.head->num_tiles * MK_ROW_TILE; row++) {
        const mk_row &record = t.rows[row];
        if (record.src_rank < 0) {
            for (int64_t i = 0; i < hidden; i++)
                wrong += ring[row * hidden + i] != 0xffff; /* padding stays as it was */
            continue;
        }
        const int64_t token = layer.ranks[(size_t)record.src_rank].first_token + record.src_slot / layer.shape.topk;
        wrong += memcmp(ring + row * hidden, layer.data.x.data() + token * hidden, (size_t)(2 * hidden)) != 0;
    }
    return wrong;
}

/* One minibatch, which is the whole table. */
static void run_dispatch(int64_t hidden)
{
    LayerShape s;
    s.tokens = {40, 20};
    s.hidden = hidden;
    s.intermediate = 64;
    s.experts = 2;
    s.topk = 2;
    s.ring = 256;
    s.minibatch = 128;
    s.resident = 3; /* all warps at once, so that one begins with a batch that begins with padding */
    LayerCase layer(s, test_seed());
    for (LayerRank &r : layer.ranks)
        launch_dispatch(layer, r);
    const emu::Result result = layer.machine.run();
    if (!result.ok) {
        TEST_FAILED("H %lld, seed %llu: %s", (long long)hidden, (unsigned long long)test_seed(), result.message.c_str());
        return;
    }
    for (const LayerRank &r : layer.ranks) {
        REQUIRE(layer.head(r).num_tiles <= r.dims.mb_tiles_fwd);
        CHECK(layer.head(r).rows_copied_fwd > 0 && layer.head(r).rows_pulled_peer_fwd > 0);
        CHECK_EQ(wrong_rows(layer, r), 0);
        CHECK_EQ(layer.state(r).rows_pulled + layer.state(r).rows_copied, layer.head(r).num_rows); /* each row by one warp */
    }
}

TEST(eight_slots) { run_dispatch(64); }
TEST(four_slots) { run_dispatch(MK_DISPATCH_AREA / 8); }
TEST(two_slots) { run_dispatch(MK_DISPATCH_AREA / 4 - 64); }
TEST(rows_that_fill_the_area) { run_dispatch(MK_DISPATCH_AREA / 2); }
TEST(rows_longer_than_the_area) { run_dispatch(MK_DISPATCH_AREA / 2 + 64); }

int main(int argc, char **argv) { return test_main(argc, argv); }
