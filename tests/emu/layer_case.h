/* One MoE layer over P emulated ranks: memory, launches in the order of cuda/kernel/params.h, and the plain loop that the result must equal
 * bit for bit. Routes, data and sizes come from a seed. */
#ifndef MK_TESTS_LAYER_CASE_H
#define MK_TESTS_LAYER_CASE_H

#include <memory>
#include <string>
#include <vector>

#include "cuda/kernel/staged.cu"
#include "cuda/kernel/forward.cu"
#include "layout/config.h"
#include "test.h"

struct LayerShape {
    int64_t hidden = 128, intermediate = 64, shared = 0, experts = 4, topk = 2;
    std::vector<int64_t> tokens = {16};   /* of each rank */
    int64_t ring = 0, minibatch = 0, save_rows = 0;
    bool shared_gate = false, wide = false, fused = false, duplicates = true;
    bool rows_only = false;               /* no weights: for dispatch alone */
    bool mx = false;                      /* MXFP8, rows_only: the test fills the heap */
    double dropped = 0.1;
    float limit = 0;
    uint32_t resident = 2;                /* clusters at once on each device */
    uint32_t clusters = 3;                /* of the fused launch; more than resident: the rest start when one leaves */
    uint32_t refusals = 0;                /* launch control refuses one request in so many */
    uint32_t yield_ns = 0, spare = 0;     /* Hopper: of the fused launch's clusters, so many are spares, and one leaves in yield_ns */
    uint32_t late = 0;                    /* emu::Device::start_late */
    int64_t matrix() const { return rows_only ? 0 : hidden * intermediate; }
    int64_t ranks() const { return (int64_t)tokens.size(); }
};

static inline float bf(uint16_t x) { return emu::bf16_to_float(x); }
static inline uint16_t random_bf16(uint64_t *state, double scale = 1.0) { return emu::float_to_bf16((float)(test_normal(state) * scale)); }

/* What all ranks together compute on. */
struct LayerData {
    int64_t tokens = 0;
    std::vector<uint16_t> x, gate, up, down, shared_gate, shared_up, shared_down, output_gate;
    std::vector<int32_t> ids;
    std::vector<float> weights;

    LayerData(const LayerShape &s, uint64_t seed)
    {
        uint64_t state = seed;
        for (int64_t t : s.tokens)
            tokens += t;
        fill(x, tokens * s.hidden, 1.0, &state);
        for (auto *m : {&gate, &up, &down})
            fill(*m, s.experts * s.matrix(), 1.0 / sqrt((double)s.hidden), &state);
        for (auto *m : {&shared_gate, &shared_up, &shared_down})
            fill(*m, s.hidden * s.shared, 1.0 / sqrt((double)s.hidden), &state);
        fill(output_gate, s.hidden, 1.0 / sqrt((double)s.hidden), &state);
        for (int64_t i = 0; i < tokens * s.topk; i++) {
            int32_t id = (int32_t)test_below(&state, s.experts);
            if (!s.duplicates && i % s.topk)
                id = (ids.back() + 1) % (int32_t)s.experts;
            ids.push_back(test_uniform(&state) < s.dropped ? -1 : id);
            weights.push_back((float)test_normal(&state));
        }
    }

private:
    static void fill(std::vector<uint16_t> &m, int64_t n, double scale, uint64_t *state)
    {
        for (int64_t i = 0; i < n; i++)
            m.push_back(random_bf16(state, scale));
    }
};

/* One rank's memory on the machine. */
struct LayerRank {
    mk_dims dims = {};
    mk_memory memory = {};
    int64_t first_token = 0, num_tokens = 0;
    emu::Device *device = nullptr;
    std::unique_ptr<emu::Buffer<uint8_t>> heap, local, schedule, context;
    std::unique_ptr<emu::Buffer<char *>> heaps;
    std::unique_ptr<emu::Buffer<uint16_t>> x, gate, up, down, shared_gate, shared_up, shared_down, output_gate, out;
    std::unique_ptr<emu::Buffer<int32_t>> ids;
    std::unique_ptr<emu::Buffer<float>> weights;
    std::unique_ptr<emu::Buffer<int64_t>> per_expert;
    std::unique_ptr<emu::Buffer<mk_host_fault>> host_fault;
    mk_rank_params params = {};
    int32_t launches = 0;   /* of ticketed kernels */
};

struct LayerCase {
    const LayerShape shape;
    LayerData data;
    emu::Machine machine;
    mok_config config = {};
    std::vector<LayerRank> ranks;
    std::function<void(LayerRank &)> before_stages; /* of the forward: a test's own launch */

    LayerCase(const LayerShape &s, uint64_t seed) : shape(s), data(s, seed), machine(seed), ranks((size_t)s.ranks())
    {
        config = MOK_INIT(mok_config);
        config.hidden = s.hidden;
        config.intermediate = s.intermediate;
        config.shared_intermediate = s.shared;
        config.shared_gate = s.shared_gate;
        config.num_experts = s.experts;
        config.topk = s.topk;
        config.dtype = s.mx ? MOK_MXFP8 : MOK_BF16;
        config.max_tokens = 1;
        for (int64_t t : s.tokens)
            config.max_tokens = mk_max(config.max_tokens, t);
        config.ring_rows = s.ring;
        config.minibatch_rows = config.minibatch_rows_bwd = s.minibatch;
        config.save = s.save_rows ? MOK_SAVE_ROWS : MOK_SAVE_NONE;
        config.save_rows = s.save_rows;
        int64_t first = 0;
        for (int32_t r = 0; r < (int32_t)ranks.size(); r++) {
            make_rank(r, first);
            first += s.tokens[(size_t)r];
        }
        for (LayerRank &r : ranks)
            for (size_t i = 0; i < ranks.size(); i++)
                r.heaps->host()[i] = reinterpret_cast<char *>(ranks[i].heap->device());
    }

    /* ---- memory ---- */
    template <class T> std::unique_ptr<emu::Buffer<T>> buffer(const char *name, int64_t n) { return std::make_unique<emu::Buffer<T>>(machine, name, (size_t)mk_max(n, 1)); }
    template <class T> std::unique_ptr<emu::Buffer<T>> filled(const char *name, const std::vector<T> &from, int64_t first, int64_t n)
    {
        auto b = buffer<T>(name, n);
        if (n)
            memcpy(b->host(), from.data() + first, sizeof(T) * (size_t)n);
        return b;
    }

    void make_rank(int32_t index, int64_t first_token)
    {
        LayerRank &r = ranks[(size_t)index];
        mok_config resolved = config;
        mk_machine chip = mk_default_machine(MOK_BACKEND_CPU);
        chip.scaled = mk::kMultipliesMx;
        if (mk_resolve(&resolved, (int32_t)ranks.size(), index, chip, &r.dims) != MOK_OK)
            TEST_FAILED("%s", mok_last_error());
        mk_memory_map(&r.dims, &r.memory, nullptr);
        const int64_t h = shape.hidden, matrix = shape.matrix(), shared = h * shape.shared;
        const int64_t e0 = r.dims.experts_first, el = r.dims.experts_count;
        r.first_token = first_token;
        r.num_tokens = shape.tokens[(size_t)index];
        r.device = &machine.add_device(shape.resident);
        r.device->refuse_launches(shape.refusals);
        r.device->start_late(shape.late);
        r.heap = buffer<uint8_t>("heap", r.memory.heap_bytes);
        r.local = buffer<uint8_t>("local", r.memory.local_bytes);
        r.schedule = buffer<uint8_t>("schedule", r.memory.schedule_bytes);
        r.context = buffer<uint8_t>("context", r.memory.context_bytes);
        r.heaps = buffer<char *>("heaps", (int64_t)ranks.size());
        r.x = filled("x", data.x, first_token * h, r.num_tokens * h);
        r.ids = filled("ids", data.ids, first_token * shape.topk, r.num_tokens * shape.topk);
        r.weights = filled("router weights", data.weights, first_token * shape.topk, r.num_tokens * shape.topk);
        r.gate = filled("gate weights", data.gate, e0 * matrix, el * matrix);
        r.up = filled("up weights", data.up, e0 * matrix, el * matrix);
        r.down = filled("down weights", data.down, e0 * matrix, el * matrix);
        r.shared_gate = filled("shared gate", data.shared_gate, 0, shared);
        r.shared_up = filled("shared up", data.shared_up, 0, shared);
        r.shared_down = filled("shared down", data.shared_down, 0, shared);
        r.output_gate = filled("output gate", data.output_gate, 0, h);
        r.out = buffer<uint16_t>("out", r.num_tokens * h);
        r.per_expert = buffer<int64_t>("tokens per expert", 2 * shape.experts);
        memset(r.per_expert->host(), 0, sizeof(int64_t) * 2 * (size_t)shape.experts);
        r.host_fault = buffer<mk_host_fault>("host fault", 1);
        memset(r.host_fault->host(), 0, sizeof(mk_host_fault));
        poison(r);
        r.params.dims = r.dims;
        r.params.memory = r.memory;
        r.params.heap = reinterpret_cast<char *>(r.heap->device());
        r.params.local = reinterpret_cast<char *>(r.local->device());
        r.params.heaps = r.heaps->device();
        r.params.host_fault = r.host_fault->device();
        r.params.fingerprint = 0x1234;
        r.params.timeout_ns = 1000000000;
        r.params.swiglu_limit = shape.limit > 0 ? shape.limit : INFINITY;
        r.params.shared_gate = shape.shared_gate;
    }

    /* The ring begins full of NaN (copies and MMAs read whole tiles, padding included); state and epochs begin at 0. */
    void poison(LayerRank &r)
    {
        const mk_memory &m = r.memory;
        uint8_t *local = r.local->device(), *heap = r.heap->device();
        auto fill = [&](uint8_t *p, int64_t bytes, int value) {
            memset(p, value, (size_t)bytes);
            machine.set_written(p, (size_t)bytes, true);
        };
        fill(local + m.ring_x, m.ring_dout - m.ring_x, 0xff);
        fill(local + m.ring_h, m.ring_weight - m.ring_h, 0xff);
        fill(local + m.shared_gate, m.shared_scale - m.shared_gate, 0xff);
        fill(heap + m.x, m.dout - m.x, 0xff);
        fill(local + m.device_state, sizeof(mk_device_state), 0);
        fill(local + m.device_state + (int64_t)offsetof(mk_device_state, bad_weight), sizeof(mk_bad_weights), 0xff);
        fill(heap + m.epochs, m.call_heads - m.epochs, 0);
        fill(heap + m.call_heads, m.expert_ids - m.call_heads, 0);
    }

    /* ---- launches ---- */
    template <class Params> void launch(LayerRank &r, const char *name, void (*kernel)(const Params), const Params &p, uint32_t blocks, uint32_t threads, uint32_t cluster = 1,
                                        uint32_t shared = MK_SMALL_SHARED)
    {
        emu::Launch l;
        l.blocks = blocks;
        l.cluster = cluster;
        l.threads = threads;
        l.shared_bytes = shared;
        l.name = name;
        r.device->launch(l, [=] { kernel(p); });
    }
#define LAUNCH(r, kernel, p, ...) launch(r, #kernel, kernel, p, __VA_ARGS__)

    mk_open_params open_params(LayerRank &r, int32_t operation)
    {
        mk_open_params p = {};
        p.rank = r.params;
        p.schedule = r.schedule->device();
        p.num_tokens = r.num_tokens;
        p.operation = operation;
        return p;
    }

    /* The launches that every call begins with. */
    void begin(LayerRank &r, mk_open_params open, bool schedule)
    {
        mk_begin_params p = {};
        p.open = open;
        p.then = schedule ? MK_BEGIN_MEETS : MK_BEGIN_OPENS; /* passes as ranks do that meet on the host */
        if (schedule) {
            p.expert_ids = r.ids->device();
        } else {
            p.x = shape.mx ? nullptr : r.x->device();
            p.router_weights = r.weights->device();
        }
        LAUNCH(r, mok_call_begin, p, 3, 128);
        if (schedule)
            return;
        LAUNCH(r, mok_rank_barrier, r.params, 1, 128);
        LAUNCH(r, mok_call_check, open, 1, 128);
    }

    void schedule(LayerRank &r)
    {
        begin(r, open_params(r, MK_OP_SCHEDULE), true);
        mk_s0_params p = {};
        p.rank = r.params;
        p.schedule = r.schedule->device();
        p.num_tokens = r.num_tokens;
        p.tokens_local = r.per_expert->device();
        p.tokens_global = r.per_expert->device() + shape.experts;
        LAUNCH(r, mok_s0_count, p, MK_SCHEDULE_CHUNKS / 8, 256);
        LAUNCH(r, mok_s0_scan, p, (uint32_t)mk_max(r.dims.experts_count, 1), 256);
        LAUNCH(r, mok_s0_segments, p, 1, 256);
        LAUNCH(r, mok_s0_place, p, MK_SCHEDULE_CHUNKS / 8, 256);
        LAUNCH(r, mok_s0_copies, p, 2, 256);
    }

    mk_tensor_map map(const void *address, int64_t cols, int64_t rows, int64_t depth, uint32_t box)
    {
        mk_tensor_map m;
        const mk_tensor t = mk_tensor_operand(address, (uint64_t)cols, (uint64_t)mk_max(rows, 1), (uint64_t)depth, box);
        if (mk_tensor_map_encode(&m, &t, emu::tensor_map_encode_tiled) != 0)
            TEST_FAILED("tensor map refused");
        return m;
    }

    template <class Tile> mk_gemm_params gemm_params(LayerRank &r, bool shared, bool down, int32_t step)
    {
        const int64_t h = shape.hidden, width = shared ? shape.shared : shape.intermediate, depth = shared ? 1 : mk_max(r.dims.experts_count, 1);
        const int64_t rows = shared ? r.dims.max_tokens : MK_RING_ROWS(&r.dims), k = down ? width : h;
        char *a = down ? r.params.local + (shared ? r.memory.shared_h : r.memory.ring_h)
                       : shared ? r.params.heap + r.memory.x : r.params.local + r.memory.ring_x;
        uint16_t *low = down ? (shared ? r.shared_down : r.down)->device() : (shared ? r.shared_gate : r.gate)->device();
        uint16_t *high = down ? low : (shared ? r.shared_up : r.up)->device();
        mk_gemm_params p = {};
        p.rank = r.params;
        p.schedule = r.schedule->device();
        p.context = r.context->device();
        p.num_tokens = r.num_tokens;
        p.shared = shared;
        p.step = step;
        p.ticket = r.launches++ % 2;
        p.a = map(a, k, rows, 0, mk::kBoxRowsA<Tile>);
        p.b_low = map(low, k, down ? h : width, depth, mk::kBoxRowsB<Tile>);
        p.b_high = map(high, k, down ? h : width, depth, mk::kBoxRowsB<Tile>);
        p.num_cols = (int32_t)(down ? h : width);
        p.num_k_blocks = (int32_t)(k / 64);
        p.b_high_row = down ? Tile::cols / 2 : 0;
        return p;
    }

    template <class Tile> void gemms(LayerRank &r, bool shared, int32_t step)
    {
        const auto gate_up = Tile::ping_pong ? mok_s2_gate_up_narrow : mok_s2_gate_up_wide;
        const auto down = Tile::ping_pong ? mok_s4_down_narrow : mok_s4_down_wide;
        launch(r, "s2_gate_up", gate_up, gemm_params<Tile>(r, shared, false, step), 4, mk::kGemmThreads, 2, sizeof(mk::GemmShared<Tile>));
        launch(r, "s4_down", down, gemm_params<Tile>(r, shared, true, step), 4, mk::kGemmThreads, 2, sizeof(mk::GemmShared<Tile>));
    }

    mk_forward_params forward_params(LayerRank &r)
    {
        const mk_gemm_params up = gemm_params<mk::TileForward>(r, false, false, 0), down = gemm_params<mk::TileForward>(r, false, true, 0);
        mk_forward_params p = {};
        p.rank = r.params;
        p.schedule = r.schedule->device();
        p.context = r.context->device();
        p.num_tokens = r.num_tokens;
        p.yield = {shape.yield_ns, shape.clusters - shape.spare};
        p.ring_x = up.a;
        p.gate = up.b_low;
        p.up = up.b_high;
        p.ring_h = down.a;
        p.down = down.b_low;
        if (!shape.shared)
            return p;
        const mk_gemm_params shared_up = gemm_params<mk::TileForward>(r, true, false, 0), shared_down = gemm_params<mk::TileForward>(r, true, true, 0);
        p.shared_x = shared_up.a;
        p.shared_gate = shared_up.b_low;
        p.shared_up = shared_up.b_high;
        p.shared_h = shared_down.a;
        p.shared_down = shared_down.b_low;
        return p;
    }

    /* One launch a stage, or the fused one. */
    template <class Tile> void staged_launches(LayerRank &r)
    {
        if (shape.shared)
            gemms<Tile>(r, true, 0);
        const int64_t steps = mk_ceil_div(r.dims.capacity_tiles, r.dims.mb_tiles_fwd);
        for (int32_t step = 0; step < (int32_t)steps; step++) {
            mk_dispatch_params d = {};
            d.rank = r.params;
            d.schedule = r.schedule->device();
            d.step = step;
            d.ticket = r.launches++ % 2;
            LAUNCH(r, mok_s1_dispatch, d, 3, 32, 1, MK_DISPATCH_SHARED);
            gemms<Tile>(r, false, step);
        }
    }

    template <class Tile> void forward_with(LayerRank &r)
    {
        r.launches = 0;
        begin(r, open_params(r, MK_OP_FORWARD), false);
        if (before_stages)
            before_stages(r);
        if (shape.fused)
            LAUNCH(r, mok_forward_fused, forward_params(r), 2 * shape.clusters, mk::kForwardThreads<false>, 2, MK_FORWARD_SHARED);
        else
            staged_launches<Tile>(r);
        LAUNCH(r, mok_rank_barrier, r.params, 1, 128);
        mk_combine_params c = {};
        c.rank = r.params;
        c.schedule = r.schedule->device();
        c.context = r.context->device();
        c.x = r.x->device();
        c.shared_output_gate = r.output_gate->device();
        c.out = r.out->device();
        c.num_tokens = r.num_tokens;
        LAUNCH(r, mok_s5_combine, c, 2, 256);
    }

    void forward(LayerRank &r) { shape.wide ? forward_with<mk::TileStageWide>(r) : forward_with<mk::TileStageNarrow>(r); }

    emu::Result run()
    {
        for (LayerRank &r : ranks) {
            schedule(r);
            forward(r);
        }
        return machine.run();
    }

    /* ---- the plain loop ---- */
    static uint16_t dot(const uint16_t *a, const uint16_t *b, int64_t n)
    {
        float sum = 0.0f;
        for (int64_t k = 0; k < n; k++)
            sum = fmaf(bf(a[k]), bf(b[k]), sum);
        return emu::float_to_bf16(sum);
    }

    /* y of one row, as the contract rounds it. */
    std::vector<uint16_t> row(const uint16_t *x, const uint16_t *gate, const uint16_t *up, const uint16_t *down, int64_t width) const
    {
        const float limit = shape.limit > 0 ? shape.limit : INFINITY;
        std::vector<uint16_t> h, y;
        for (int64_t i = 0; i < width; i++)
            h.push_back(emu::float_to_bf16(mk::swiglu(bf(dot(x, gate + i * shape.hidden, shape.hidden)), bf(dot(x, up + i * shape.hidden, shape.hidden)), limit)));
        for (int64_t i = 0; i < shape.hidden; i++)
            y.push_back(dot(h.data(), down + i * width, width));
        return y;
    }

    float scale(const uint16_t *x) const
    {
        float sums[256] = {0};
        if (!shape.shared_gate)
            return 1.0f;
        for (int64_t c = 0; c < shape.hidden; c++)
            sums[c % 256] = fmaf(bf(x[c]), bf(data.output_gate[(size_t)c]), sums[c % 256]);
        for (int half = 128; half > 0; half /= 2)
            for (int i = 0; i < half; i++)
                sums[i] += sums[i + half];
        return 1.0f / (1.0f + exp2f(sums[0] * -1.44269504f));
    }

    std::vector<uint16_t> expected(int64_t token) const
    {
        const int64_t h = shape.hidden, matrix = h * shape.intermediate;
        const uint16_t *x = data.x.data() + token * h;
        std::vector<float> acc((size_t)h, 0.0f);
        if (shape.shared) {
            const auto y = row(x, data.shared_gate.data(), data.shared_up.data(), data.shared_down.data(), shape.shared);
            const float s = scale(x);
            for (int64_t i = 0; i < h; i++)
                acc[(size_t)i] = s * bf(y[(size_t)i]);
        }
        for (int64_t k = 0; k < shape.topk; k++) {
            const int32_t e = data.ids[(size_t)(token * shape.topk + k)];
            if (e < 0)
                continue;
            const auto y = row(x, data.gate.data() + e * matrix, data.up.data() + e * matrix, data.down.data() + e * matrix, shape.intermediate);
            for (int64_t i = 0; i < h; i++)
                acc[(size_t)i] = fmaf(data.weights[(size_t)(token * shape.topk + k)], bf(y[(size_t)i]), acc[(size_t)i]);
        }
        std::vector<uint16_t> out;
        for (float v : acc)
            out.push_back(emu::float_to_bf16(v));
        return out;
    }

    /* Of all tokens: the same however the passes run. */
    std::vector<uint16_t> expected() const
    {
        std::vector<uint16_t> all;
        for (int64_t t = 0; t < data.tokens; t++) {
            const auto one = expected(t);
            all.insert(all.end(), one.begin(), one.end());
        }
        return all;
    }

    /* Elements of all ranks' outputs that differ from what is expected. */
    int64_t count_differences(const std::vector<uint16_t> &want) const
    {
        int64_t wrong = 0;
        for (const LayerRank &r : ranks)
            for (int64_t i = 0; i < r.num_tokens * shape.hidden; i++)
                wrong += !r.out->written((size_t)i) || (*r.out)[(size_t)i] != want[(size_t)(r.first_token * shape.hidden + i)];
        return wrong;
    }
    int64_t count_differences() const { return count_differences(expected()); }

    const mk_schedule_head &head(const LayerRank &r) const { return *reinterpret_cast<const mk_schedule_head *>(r.schedule->device()); }
    const mk_device_state &state(const LayerRank &r) const { return *reinterpret_cast<const mk_device_state *>(r.local->device() + r.memory.device_state); }
};

#endif
