/* The dispatch stage alone on the emulator: every row of the ring against the token's x, at every number of slots that the
 * shared memory of a dispatch warp is cut into, and rows longer than that memory. In MXFP8 the ring has what the tensor cores multiply: the token's
 * elements and scales, or those widened. */
#define TEST_WATCHDOG 900
#include "layer_case.h"

extern "C" {
#include "cpu/mx.h"
}

/* A token as a heap has it in MXFP8: elements, then scales. */
static std::vector<uint8_t> quantised(const LayerCase &layer, int64_t token)
{
    const int64_t hidden = layer.shape.hidden;
    std::vector<uint8_t> row((size_t)mk_mx_row_bytes(hidden));
    mk_cpu_mx_quantise(layer.data.x.data() + token * hidden, hidden, row.data(), row.data() + hidden);
    return row;
}

static void launch_dispatch(LayerCase &layer, LayerRank &r)
{
    const bool mx = layer.shape.mx;
    for (int64_t t = 0; mx && t < r.num_tokens; t++) {
        const std::vector<uint8_t> row = quantised(layer, r.first_token + t);
        memcpy(r.heap->device() + r.memory.x + t * mk_mx_row_stride(layer.shape.hidden), row.data(), row.size());
    }
    layer.schedule(r);
    layer.begin(r, layer.open_params(r, MK_OP_FORWARD), false);
    mk_dispatch_params d = {};
    d.rank = r.params;
    d.schedule = r.schedule->device();
    layer.launch(r, "mok_s1_dispatch", mx ? mok_s1_dispatch_mx : mok_s1_dispatch, d, 3, 32, 1, MK_DISPATCH_SHARED);
}

static bool is_token_in_bf16(const LayerCase &layer, const uint8_t *ring, int64_t row, int64_t token)
{
    const int64_t hidden = layer.shape.hidden;
    std::vector<uint16_t> want(layer.data.x.begin() + token * hidden, layer.data.x.begin() + (token + 1) * hidden);
    if (layer.shape.mx)
        mk_cpu_mx_round(want.data(), hidden, want.data());
    return memcmp(ring + row * 2 * hidden, want.data(), (size_t)(2 * hidden)) == 0;
}

/* Elements as they came, and every scale in its atom, to the atom's end. */
static bool is_token_with_scales(const LayerCase &layer, const LayerRank &r, const uint8_t *ring, int64_t row, int64_t token)
{
    const int64_t hidden = layer.shape.hidden, blocks = hidden / MK_MX_BLOCK;
    const std::vector<uint8_t> want = quantised(layer, token);
    const uint8_t *scales = ring + MK_RING_ROWS(&r.dims) * hidden;
    bool same = memcmp(ring + row * hidden, want.data(), (size_t)hidden) == 0;
    for (int64_t b = 0; b < mk_round_up(blocks, 4); b++)
        same = same && scales[mk_mx_scale_index(row, b, hidden)] == (b < blocks ? want[(size_t)(hidden + b)] : (uint8_t)MK_MX_SCALE_MIN);
    return same;
}

static int64_t wrong_rows(const LayerCase &layer, const LayerRank &r)
{
    const mk_table t = mk_table_at(&r.memory, r.schedule->device());
    const bool scaled = r.dims.mx_scaled;
    const int64_t row_bytes = scaled ? layer.shape.hidden : 2 * layer.shape.hidden;
    const uint8_t *ring = r.local->device() + r.memory.ring_x;
    int64_t wrong = 0;
    for (int64_t row = 0; row < (int64_t)t.head->num_tiles * MK_ROW_TILE; row++) {
        const mk_row &record = t.rows[row];
        if (record.src_rank < 0) {
            for (int64_t i = 0; i < row_bytes; i++)
                wrong += ring[row * row_bytes + i] != 0xff; /* padding stays as it was */
            continue;
        }
        const int64_t token = layer.ranks[(size_t)record.src_rank].first_token + record.src_slot / layer.shape.topk;
        wrong += !(scaled ? is_token_with_scales(layer, r, ring, row, token) : is_token_in_bf16(layer, ring, row, token));
    }
    return wrong;
}

/* One minibatch, which is the whole table. Rows that are copied are neighbours of their tile, a token twice at one expert: inside a minibatch nothing is far enough to be
 * copied in the ring (tests/emu/test_forward.cpp has that). */
static void run_dispatch(int64_t hidden, bool mx)
{
    LayerShape s;
    s.rows_only = true;
    s.mx = mx;
    s.tokens = {40, 20};
    s.hidden = hidden;
    s.intermediate = 64;
    s.experts = 4;
    s.topk = 3;
    s.ring = 512;
    s.minibatch = 256;
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

#ifndef MK_SM100 /* where bf16 moves as on Hopper */
TEST(eight_slots) { run_dispatch(64, false); }
TEST(four_slots) { run_dispatch(MK_DISPATCH_AREA / 8, false); }
TEST(two_slots) { run_dispatch(MK_DISPATCH_AREA / 4 - 64, false); }
TEST(rows_that_fill_the_area) { run_dispatch(MK_DISPATCH_AREA / 2, false); }
TEST(rows_longer_than_the_area) { run_dispatch(MK_DISPATCH_AREA / 2 + 64, false); }
#endif

/* The same numbers of slots on both chips; half an atom of scales at the end. */
TEST(eight_slots_in_mxfp8) { run_dispatch(192, true); }
TEST(four_slots_in_mxfp8) { run_dispatch(MK_DISPATCH_AREA / 8, true); }
TEST(two_slots_in_mxfp8) { run_dispatch(MK_DISPATCH_AREA / 4 - 64, true); }
TEST(rows_longer_than_half_the_area_in_mxfp8) { run_dispatch(MK_DISPATCH_AREA / 2 + 64, true); }

int main(int argc, char **argv) { return test_main(argc, argv); }
