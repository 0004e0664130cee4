/* A layer through the whole library, with the emulator as its GPU: what a run is told, what it makes, and how two runs are compared. */
#ifndef MOK_EMULATED_LAYER_H
#define MOK_EMULATED_LAYER_H

#include "test.h"

#include <vector>

#include "emulated_driver.h"

extern "C" {
#include "layer.h"
#include "mok.h"
}

struct Run {
    const char *name = "";
    int32_t ranks = 1;
    mok_backend_id backend = MOK_BACKEND_CUDA;
    int64_t ring = 512, minibatch = 256, save_rows = 0;
    mok_save save = MOK_SAVE_ALL;
    const char *tile = nullptr, *forward = nullptr, *backward = "fused"; /* null: what the library chooses */
    bool forward_only = false, two_calls = false, recompute = false, accumulate = false, grads_by_pointer = false, experts_by_pointer = false;
    bool prequantised = false; /* in MXFP8: weights come quantised */
    bool wide = false;         /* in MXFP8: they come widened, and in no other form */
    mok_dtype dtype = MOK_FP32;
    int64_t frozen_expert = 0;
    uint32_t resident = 2, ready_value = 0;
    uint32_t refusals = 0; /* launch control refuses one request in so many */
    uint32_t late = 0;     /* emu::Device::start_late */
    std::function<void(const std::string &kernel, const void *params)> before_launch;
    void (*before_pass)(mok_workspace *w, void *user) = nullptr, (*after_pass)(mok_workspace *w, void *user) = nullptr;
};

inline Run make_run(const char *name, int32_t ranks, int64_t ring, int64_t minibatch, mok_save save = MOK_SAVE_ALL)
{
    Run r;
    r.name = name;
    r.ranks = ranks;
    r.ring = ring;
    r.minibatch = minibatch;
    r.save = save;
    return r;
}

/* Everything that a step makes. The shared expert's weight gradients are per rank, so only one rank's are comparable. */
struct StepResult {
    std::vector<uint16_t> out, dx;
    std::vector<float> drouter;
    std::vector<uint8_t> weights[3], shared[4];
    std::vector<uint32_t> ready;
    std::vector<int64_t> per_expert;
    mok_stats stats = {};
    mok_schedule_info info = {};
    int64_t link_bytes = 0;  /* that all ranks counted */
    bool ok = false;
};
static const char *const kWeights[] = {"dgate", "dup", "ddown"}, *const kShared[] = {"dshared_gate", "dshared_up", "dshared_down", "dshared_output_gate"};

inline layer_problem make_problem(int64_t tokens, int64_t shared, int64_t experts = 6, int64_t hidden = 192, int64_t width = 128, mok_gate_up layout = MOK_GATE_UP_SEPARATE,
                                  layer_routing routing = LAYER_UNIFORM)
{
    layer_problem p;
    mok_config c = MOK_INIT(mok_config);
    c.hidden = hidden;
    c.intermediate = width;
    c.shared_intermediate = shared;
    c.shared_gate = shared != 0;
    c.num_experts = experts;
    c.topk = 2;
    c.gate_up = layout;
    if (!layer_make(&p, &c, tokens, routing, 0.1, test_seed()))
        TEST_FAILED("no memory");
    return p;
}

inline layer_options options_of(const Run &run)
{
    static const int32_t devices[8] = {0};
    layer_options o = {};
    o.ranks = run.ranks;
    o.backend = run.backend;
    o.devices = run.backend == MOK_BACKEND_CUDA ? devices : nullptr;
    o.ring_rows = run.ring;
    o.minibatch_rows = o.minibatch_rows_bwd = run.minibatch;
    o.save = run.save;
    o.save_rows = run.save_rows;
    o.cpu_threads = 1;
    o.forward_only = run.forward_only;
    o.two_call_backward = run.two_calls;
    o.recompute = run.recompute;
    o.mx_prequantised = run.prequantised;
    o.mx_wide = run.wide;
    o.grad_dtype = run.dtype;
    o.accumulate = run.accumulate;
    o.grads_by_pointer = run.grads_by_pointer;
    o.experts_by_pointer = run.experts_by_pointer;
    o.frozen_expert = run.frozen_expert;
    o.ready_value = run.ready_value;
    o.before_pass = run.before_pass;
    o.after_pass = run.after_pass;
    return o;
}

/* What gradients are added to: 1.0 in either format, for every element. */
inline void fill_with_ones(uint8_t *p, size_t bytes, mok_dtype dtype)
{
    static const uint8_t one[2][4] = {{0x80, 0x3f, 0x80, 0x3f}, {0, 0, 0x80, 0x3f}};
    for (size_t i = 0; i < bytes; i++)
        p[i] = one[dtype == MOK_FP32][i % 4];
}

/* Sets a variable that the library reads, for as long as it lives. */
struct Setting {
    const char *name;
    Setting(const char *variable, const char *value) : name(variable)
    {
        if (value)
            setenv(name, value, 1);
        else
            unsetenv(name);
    }
    ~Setting() { unsetenv(name); }
};

inline StepResult run_layer(const layer_problem &problem, const Run &run)
{
    const mok_config &c = problem.cfg;
    const size_t element = run.dtype == MOK_FP32 ? 4 : 2, matrix = (size_t)(c.num_experts * c.hidden * c.intermediate) * element,
                 shared = (size_t)(c.hidden * c.shared_intermediate) * element, ranks = (size_t)run.ranks;
    const Setting tile("MOK_TILE", run.tile), forward("MOK_FORWARD", run.forward), backward("MOK_BACKWARD", run.backward);
    const layer_options o = options_of(run);
    StepResult got;
    layer_result r;
    char error[512];
    emulated::plug_in(test_seed(), run.resident);
    emulated::gpu.device->refuse_launches(run.refusals);
    emulated::gpu.device->start_late(run.late);
    emulated::gpu.before_launch = run.before_launch;
    if (!layer_result_make(&r, &problem, &o)) {
        TEST_FAILED("no memory");
        return got;
    }
    struct Grad { void *from; size_t bytes, copies; std::vector<uint8_t> &to; };
    const size_t output_gate = c.shared_gate ? (size_t)c.hidden * element : 0;
    const Grad grads[] = {{r.dgate, matrix, 1, got.weights[0]}, {r.dup, matrix, 1, got.weights[1]}, {r.ddown, matrix, 1, got.weights[2]},
                          {r.dshared_gate, shared, ranks, got.shared[0]}, {r.dshared_up, shared, ranks, got.shared[1]}, {r.dshared_down, shared, ranks, got.shared[2]},
                          {r.dshared_output_gate, output_gate, ranks, got.shared[3]}};
    for (const Grad &g : grads)
        if (run.accumulate)
            fill_with_ones((uint8_t *)g.from, g.bytes * g.copies, run.dtype);
    if (layer_run(&problem, &o, &r, error) != MOK_OK)
        TEST_FAILED("%s: %s%s%s", run.name, error, emulated::gpu.trouble.empty() ? "" : "; emulator: ", emulated::gpu.trouble.c_str());
    else
        got.ok = true;
    CHECK_EQ(emulated::gpu.live, 0);
    got.out.assign(r.out, r.out + problem.tokens * c.hidden);
    got.per_expert.assign(r.tokens_per_expert, r.tokens_per_expert + c.num_experts);
    got.stats = r.stats[0];
    got.info = r.info[0];
    for (int32_t i = 0; i < run.ranks; i++)
        got.link_bytes += r.stats[i].bytes_pulled_peer + r.stats[i].bytes_pushed_peer;
    if (!run.forward_only) {
        got.dx.assign(r.dx, r.dx + problem.tokens * c.hidden);
        got.drouter.assign(r.drouter_weights, r.drouter_weights + problem.tokens * c.topk);
        got.ready.assign(r.ready, r.ready + c.num_experts);
        for (const Grad &g : grads)
            g.to.assign((uint8_t *)g.from, (uint8_t *)g.from + g.bytes);
    }
    layer_result_free(&r);
    return got;
}

/* --- comparisons ------------------------------------------------------------------------------------------------------------ */

inline std::vector<float> widened(const std::vector<uint16_t> &v)
{
    std::vector<float> f(v.size());
    for (size_t i = 0; i < v.size(); i++)
        f[i] = layer_float(v[i]);
    return f;
}

inline std::vector<float> widened(const std::vector<uint8_t> &bytes, mok_dtype dtype)
{
    std::vector<float> f(bytes.size() / (dtype == MOK_FP32 ? 4 : 2));
    for (size_t i = 0; i < f.size(); i++) {
        uint16_t half;
        if (dtype == MOK_FP32)
            memcpy(&f[i], &bytes[4 * i], 4);
        else
            memcpy(&half, &bytes[2 * i], 2), f[i] = layer_float(half);
    }
    return f;
}

/* No element off by more than `allowed` of the values' size (the root of their mean square); a NaN is off. */
inline void check_near(const char *run, const char *what, const std::vector<float> &got, const std::vector<float> &want, double allowed)
{
    double worst = 0, norm = 0;
    CHECK_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size() && i < want.size(); i++) {
        const double off = fabs((double)got[i] - want[i]);
        worst = off > worst || off != off ? off : worst;
        norm += (double)want[i] * want[i];
    }
    norm = sqrt(norm / (double)(want.empty() ? 1 : want.size()));
    if (!want.empty() && !(worst <= allowed * norm))
        TEST_FAILED("%s: %s is off by %g where values are of size %g", run, what, worst, norm);
}

/* Against the cpu backend, whose exponential and order of sums differ. `more`: times as far, as in MXFP8, where a last bit may become an e4m3's. */
inline void check_close(const Run &run, const StepResult &got, const StepResult &want, double more = 1.0)
{
    check_near(run.name, "out", widened(got.out), widened(want.out), (run.forward_only ? 0.03 : 0.04) * more);
    CHECK(got.per_expert == want.per_expert);
    if (run.forward_only)
        return;
    check_near(run.name, "dx", widened(got.dx), widened(want.dx), 0.04 * more);
    check_near(run.name, "drouter_weights", got.drouter, want.drouter, 0.02 * more);
    for (size_t i = 0; i < 3; i++)
        check_near(run.name, kWeights[i], widened(got.weights[i], run.dtype), widened(want.weights[i], run.dtype), 0.04 * more);
    for (size_t i = 0; i < 4; i++)
        check_near(run.name, kShared[i], widened(got.shared[i], run.dtype), widened(want.shared[i], run.dtype), 0.04 * more);
}

template <class T> void check_same(const char *run, const char *what, const std::vector<T> &got, const std::vector<T> &want)
{
    size_t differ = got.size() != want.size(), first = 0;
    for (size_t i = 0; i < want.size() && i < got.size(); i++)
        if (memcmp(&got[i], &want[i], sizeof(T)) && differ++ == 0)
            first = i;
    if (differ)
        TEST_FAILED("%s: %s has other bits in %zu of %zu elements, the first at %zu", run, what, differ, want.size(), first);
}

inline void check_bits(const Run &run, const StepResult &got, const StepResult &want)
{
    if (!got.ok)
        return;
    check_same(run.name, "out", got.out, want.out);
    check_same(run.name, "tokens_per_expert", got.per_expert, want.per_expert);
    if (run.forward_only)
        return;
    check_same(run.name, "dx", got.dx, want.dx);
    check_same(run.name, "drouter_weights", got.drouter, want.drouter);
    for (size_t i = 0; i < 3; i++)
        check_same(run.name, kWeights[i], got.weights[i], want.weights[i]);
    for (size_t i = 0; i < 4 && run.ranks == 1; i++)
        check_same(run.name, kShared[i], got.shared[i], want.shared[i]);
}

/* Of everything, in one number: what tests/emu/same_bits.sh compares between the chips. */
template <class T> inline void add_to_hash(uint64_t *hash, const std::vector<T> &v)
{
    const uint8_t *p = reinterpret_cast<const uint8_t *>(v.data());
    for (size_t i = 0; i < v.size() * sizeof(T); i++)
        *hash = (*hash ^ p[i]) * 0x100000001b3ull;
}

/* It asks for the first runs alone. */
inline bool bits_only() { return getenv("MOK_TEST_BITS_ONLY") != nullptr; }

inline void print_hash(const StepResult &g)
{
    uint64_t hash = 0xcbf29ce484222325ull;
    add_to_hash(&hash, g.out), add_to_hash(&hash, g.dx), add_to_hash(&hash, g.drouter);
    for (const auto &w : g.weights)
        add_to_hash(&hash, w);
    for (const auto &w : g.shared)
        add_to_hash(&hash, w);
    printf("  bits of out and all gradients: %016llx\n", (unsigned long long)hash);
}

#endif
