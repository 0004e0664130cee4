/* The trace of an emulated forward: every task once, in order, on the lane of who did it; and the same results as without. */
#define TEST_WATCHDOG 900
#include "layer_case.h"

#include <map>
#include <set>
#include <tuple>

struct Traced {
    std::unique_ptr<emu::Buffer<uint8_t>> memory;
    std::vector<mk_trace_event> events;              /* of all lanes */
    std::map<std::pair<int, int>, std::vector<mk_trace_event>> lanes;
};

static void trace_rank(LayerCase &layer, LayerRank &r, uint32_t capacity, Traced &t, int32_t tracks = 0)
{
    mk_trace shape = {nullptr, tracks ? tracks : (int32_t)layer.shape.clusters * 2, MK_NUM_TRACE_LANES, capacity};
    t.memory = layer.buffer<uint8_t>("trace", mk_trace_bytes(&shape));
    memset(t.memory->host(), 0, (size_t)mk_trace_bytes(&shape));
    shape.memory = reinterpret_cast<char *>(t.memory->device());
    r.params.trace = shape;
}

static void read(const LayerRank &r, Traced &t)
{
    const mk_trace &shape = r.params.trace;
    for (int track = 0; track < shape.tracks; track++)
        for (int lane = 0; lane < shape.lanes; lane++) {
            mk_trace_head *ring = mk_trace_ring(&shape, track, lane);
            const uint32_t kept = (uint32_t)mk_min(ring->count, shape.capacity);
            for (uint32_t n = ring->count - kept; n < ring->count; n++) {
                const mk_trace_event e = *mk_trace_event_at(ring, shape.capacity - 1, n);
                t.events.push_back(e);
                t.lanes[{track, lane}].push_back(e);
            }
        }
}

static int64_t count(const Traced &t, mk_trace_kind kind, bool shared)
{
    int64_t n = 0;
    for (const mk_trace_event &e : t.events)
        n += e.kind == kind && e.shared == shared;
    return n;
}

static LayerShape two_ranks()
{
    LayerShape s;
    s.tokens = {70, 33};
    s.shared = 64;
    s.experts = 3;
    s.topk = 3;
    s.fused = true;
    return s;
}

TEST(every_task_has_its_product_and_epilogue_in_order)
{
    LayerCase layer(two_ranks(), test_seed());
    std::vector<Traced> traces(layer.ranks.size());
    for (size_t i = 0; i < traces.size(); i++)
        trace_rank(layer, layer.ranks[i], 256, traces[i]);
    const emu::Result result = layer.run();
    if (!result.ok) {
        TEST_FAILED("%s", result.message.c_str());
        return;
    }
    CHECK_EQ(layer.count_differences(), 0);
    for (size_t i = 0; i < traces.size(); i++) {
        const LayerRank &r = layer.ranks[i];
        Traced &t = traces[i];
        read(r, t);
        const int64_t tiles = layer.head(r).num_tiles, shared_tiles = mk_ceil_div(r.num_tokens, MK_ROW_TILE), ctas = mk::kColumnTiles<mk::TileForward>;
        const int64_t pair = mk::TileForward::cols * ctas, up = mk_ceil_div(2 * layer.shape.intermediate, pair), down = mk_ceil_div(layer.shape.hidden, pair);
        CHECK_EQ(count(t, MK_TRACE_s2_gate_up, false), tiles * up * ctas);
        CHECK_EQ(count(t, MK_TRACE_s3_swiglu, false), tiles * up * ctas);
        CHECK_EQ(count(t, MK_TRACE_s4_down, false), tiles * down * ctas);
        CHECK_EQ(count(t, MK_TRACE_s5_push, false), tiles * down * ctas);
        CHECK_EQ(count(t, MK_TRACE_s2_gate_up, true), shared_tiles * ctas);
        CHECK_EQ(count(t, MK_TRACE_s5_push, true), shared_tiles * ctas * down);
        CHECK_EQ(count(t, MK_TRACE_wait_operands, false), tiles * (up + down) * ctas);
        CHECK_EQ(count(t, MK_TRACE_s1_dispatch, false), tiles * MK_ROW_TILE / mk::DISPATCH_BATCH);
        CHECK_EQ(count(t, MK_TRACE_call, false), 2); /* schedule, forward */
        CHECK_EQ(count(t, MK_TRACE_rank_barrier, false), 3);
        int64_t peer_rows = 0, pulled_bytes = 0;
        std::set<std::tuple<int, int, int>> seen;
        for (const mk_trace_event &e : t.events) {
            peer_rows += e.peer_rows;
            pulled_bytes += e.kind == MK_TRACE_s1_dispatch ? e.link_bytes : 0;
            if (e.kind == MK_TRACE_s2_gate_up || e.kind == MK_TRACE_s4_down)
                CHECK(seen.insert({e.kind * 2 + e.shared, e.tile, e.part}).second);
        }
        CHECK_EQ(peer_rows, layer.head(r).rows_peer);
        CHECK_EQ(pulled_bytes, layer.head(r).rows_pulled_peer_fwd * layer.shape.hidden * 2);
        for (const auto &lane : t.lanes) {
            uint64_t last = 0;
            for (const mk_trace_event &e : lane.second) {
                CHECK(e.begin_ns >= last && e.end_ns >= e.begin_ns);
                CHECK_EQ(e.lane, lane.first.second);
                last = e.end_ns;
            }
        }
    }
}

/* Whichever block of a call comes last: with many tokens there are more blocks than tracks. */
TEST(a_call_is_recorded_by_a_block_without_a_track)
{
    LayerCase layer(two_ranks(), test_seed());
    Traced traces[2];
    for (int i = 0; i < 2; i++)
        trace_rank(layer, layer.ranks[(size_t)i], 256, traces[i], 1);
    const emu::Result result = layer.run();
    if (!result.ok) {
        TEST_FAILED("%s", result.message.c_str());
        return;
    }
    for (int i = 0; i < 2; i++) {
        read(layer.ranks[(size_t)i], traces[i]);
        CHECK_EQ(count(traces[i], MK_TRACE_call, false), 2); /* schedule, forward */
        CHECK_EQ(count(traces[i], MK_TRACE_rank_barrier, false), 3);
    }
}

/* A small ring keeps the youngest events, and says how many there were. */
TEST(a_ring_keeps_the_youngest_events)
{
    LayerCase layer(two_ranks(), test_seed());
    Traced t, other;
    trace_rank(layer, layer.ranks[0], 2, t);
    trace_rank(layer, layer.ranks[1], 256, other);
    const emu::Result result = layer.run();
    if (!result.ok) {
        TEST_FAILED("%s", result.message.c_str());
        return;
    }
    CHECK_EQ(layer.count_differences(), 0);
    read(layer.ranks[0], t);
    mk_trace_head *main_lane = mk_trace_ring(&layer.ranks[0].params.trace, 0, MK_TRACE_LANE_main);
    CHECK(main_lane->count > 2);
    const auto &kept = t.lanes[{0, MK_TRACE_LANE_main}];
    CHECK_EQ((int64_t)kept.size(), 2);
    CHECK_EQ(kept.back().kind, MK_TRACE_s5_reduce);
    CHECK_EQ(kept.front().kind, MK_TRACE_rank_barrier);
}

/* A rank that comes two seconds late to a barrier is late, not dead: the others finish, and their host is told. */
static void sleep_long(const mk_rank_params r)
{
    if (mk::thread_idx() == 0) /* until rank 0 is at its first barrier */
        mk::wait_epoch_sys(mk::in_heap<uint64_t>(r, r.memory.epochs), 1, r.timeout_ns, "sleep_long: rank 0");
    for (int i = 0; i < 2000 && mk::thread_idx() == 0; i++) /* and has looked at the time there */
        mk::sleep_ns(32);
    for (int i = 0; i < 16 && mk::thread_idx() == 0; i++)
        mk::sleep_ns(0xffffffffu); /* an eighth of a second each, in the emulator's time */
}

TEST(C8_a_late_rank_is_reported_as_late)
{
    LayerShape shape = two_ranks();
    LayerCase layer(shape, test_seed());
    std::vector<std::unique_ptr<emu::Buffer<mk_host_fault>>> faults;
    for (LayerRank &r : layer.ranks) {
        faults.push_back(layer.buffer<mk_host_fault>("host fault", 1));
        memset(static_cast<void *>(faults.back()->host()), 0, sizeof(mk_host_fault));
        r.params.host_fault = faults.back()->device();
        r.params.timeout_ns = 600000000000ull;
    }
    layer.launch(layer.ranks[1], "sleep_long", sleep_long, layer.ranks[1].params, 1, 32);
    const emu::Result result = layer.run();
    if (!result.ok) {
        TEST_FAILED("%s", result.message.c_str());
        return;
    }
    CHECK_EQ(layer.count_differences(), 0);
    const mk_late &late = faults[0]->host()[0].late;
    CHECK_EQ(late.rank, 1);
    CHECK(late.waited_ms >= 1000 && late.waited_ms < 10000);
    CHECK_EQ(late.call, 1);
    CHECK_EQ(faults[0]->host()[0].fault.kind, MK_FAULT_NONE);
    CHECK_EQ(faults[1]->host()[0].late.waited_ms, 0);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
