/* Giving SMs back in the middle of a pass, on one GPU: bash bench/yield.sh [--tries N] [--pairs N] [--yield-us N] [--json FILE]
 *
 *   latency   a kernel of 16 CTAs, 100 KB of shared memory each, is launched on a stream of the highest priority while a pass runs: from just before its launch
 *             to the first instruction of its first CTA and of its last; with mok_config.yield_us as chosen, with -1 (never), and on an idle GPU
 *   cost      the pass with and without yields in alternation, nobody asking: the ratio of each pair, its median and quartiles
 *
 * of the forward and of the backward. The clocks of host and GPU are brought together by asking a kernel for the time, before the tries and after. */
#include <math.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <cuda_runtime.h>

#include "mok.h"

#define CUDA(call)                                                                              \
    do {                                                                                        \
        cudaError_t error = (call);                                                             \
        if (error != cudaSuccess) {                                                             \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error));      \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)
#define MOK(call)                                                                               \
    do {                                                                                        \
        if ((call) != MOK_OK) {                                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, mok_last_error());               \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)

enum { PROBE_CTAS = 16, PROBE_SHARED = 100 * 1024, PROBE_THREADS = 256, CLOCK_ROUNDS = 200 };
enum Pass { FORWARD, BACKWARD, IDLE };
static const char *const pass_names[] = {"forward", "backward", "idle GPU"};

/* ---- kernels ---- */

static __device__ uint64_t gpu_ns() { uint64_t t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) :: "memory"); return t; }

static __global__ void probe(uint64_t *stamps)
{
    if (threadIdx.x == 0)
        stamps[blockIdx.x] = gpu_ns();
}

/* Answers `rounds` questions, 1, 2, ..., with the time. */
static __global__ void tell_time(volatile uint32_t *question, volatile uint64_t *answer, uint32_t rounds)
{
    for (uint32_t i = 1; i <= rounds; i++) {
        while (*question < i) {
        }
        answer[i] = gpu_ns();
        __threadfence_system();
    }
}

static __device__ uint32_t mixed(uint64_t n)
{
    n = (n ^ n >> 31) * 0x9e3779b97f4a7c15ull;
    return (uint32_t)(n ^ n >> 29) ^ (uint32_t)(n >> 32);
}
/* Sums of four uniform numbers, of this deviation. */
static __global__ void fill_bf16(uint16_t *to, size_t count, float deviation, uint64_t seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (size_t)blockDim.x) {
        const uint32_t r = mixed(seed + i);
        const float sum = (float)(r & 255) + (float)(r >> 8 & 255) + (float)(r >> 16 & 255) + (float)(r >> 24) - 510.0f;
        to[i] = (uint16_t)(__float_as_uint(sum * deviation / 148.0f) >> 16);
    }
}

/* ---- the two clocks ---- */

static int64_t host_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/* GPU minus host, from the question that was answered the quickest. */
static int64_t clock_offset(int64_t *round_trip)
{
    uint32_t *question;
    uint64_t *answer;
    CUDA(cudaHostAlloc(&question, 64, cudaHostAllocMapped));
    CUDA(cudaHostAlloc(&answer, (CLOCK_ROUNDS + 1) * 8, cudaHostAllocMapped));
    memset(answer, 0, (CLOCK_ROUNDS + 1) * 8);
    *question = 0;
    tell_time<<<1, 1>>>(question, answer, CLOCK_ROUNDS);
    CUDA(cudaGetLastError());
    int64_t offset = 0;
    *round_trip = INT64_MAX;
    for (uint32_t i = 1; i <= CLOCK_ROUNDS; i++) {
        const int64_t before = host_ns();
        *(volatile uint32_t *)question = i;
        while (*(volatile uint64_t *)&answer[i] == 0) {
        }
        const int64_t after = host_ns();
        if (after - before < *round_trip) {
            *round_trip = after - before;
            offset = (int64_t)answer[i] - (before + after) / 2;
        }
    }
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaFreeHost(question));
    CUDA(cudaFreeHost(answer));
    return offset;
}

/* ---- a layer ---- */

struct Shape { const char *name; int64_t tokens, hidden, intermediate, experts, topk; };

struct Layer {
    const Shape shape;
    mok_group *group = nullptr;
    uint16_t *x = nullptr, *dout = nullptr, *weights[3] = {}, *out = nullptr, *dx = nullptr;
    float *router_weights = nullptr, *grads[3] = {}, *drouter = nullptr;
    int32_t *ids = nullptr;

    template <class T> static T *memory(int64_t count)
    {
        T *p;
        CUDA(cudaMalloc(&p, (size_t)count * sizeof(T)));
        return p;
    }
    static uint16_t *numbers(int64_t count, float deviation, uint64_t seed)
    {
        uint16_t *p = memory<uint16_t>(count);
        fill_bf16<<<1024, 256>>>(p, (size_t)count, deviation, seed << 40);
        CUDA(cudaGetLastError());
        return p;
    }

    Layer(const Shape &s, uint64_t seed) : shape(s)
    {
        const int64_t matrix = s.experts * s.hidden * s.intermediate, routes = s.tokens * s.topk, rows = s.tokens * s.hidden;
        const int32_t device = 0;
        MOK(mok_group_create_local(1, &device, &group));
        x = numbers(rows, 1.0f, seed);
        dout = numbers(rows, 1.0f, seed + 1);
        for (int m = 0; m < 3; m++) {
            weights[m] = numbers(matrix, 1.0f / 64, seed + 2 + (uint64_t)m);
            grads[m] = memory<float>(matrix);
        }
        out = memory<uint16_t>(rows);
        dx = memory<uint16_t>(rows);
        drouter = memory<float>(routes);
        std::vector<int32_t> chosen((size_t)routes);
        std::vector<float> given((size_t)routes, 1.0f / (float)s.topk);
        for (int32_t &id : chosen) {
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            id = (int32_t)((seed >> 33) % (uint64_t)s.experts);
        }
        ids = memory<int32_t>(routes);
        router_weights = memory<float>(routes);
        CUDA(cudaMemcpy(ids, chosen.data(), chosen.size() * 4, cudaMemcpyHostToDevice));
        CUDA(cudaMemcpy(router_weights, given.data(), given.size() * 4, cudaMemcpyHostToDevice));
    }
    ~Layer()
    {
        for (void *p : {(void *)x, (void *)dout, (void *)weights[0], (void *)weights[1], (void *)weights[2], (void *)out, (void *)dx, (void *)router_weights, (void *)grads[0],
                        (void *)grads[1], (void *)grads[2], (void *)drouter, (void *)ids})
            cudaFree(p);
        mok_group_destroy(group);
    }
};

/* The layer with a schedule of its own, and one yield_us. */
struct Passes {
    Layer &layer;
    mok_workspace *workspace = nullptr;
    void *schedule = nullptr, *context = nullptr;
    cudaEvent_t begin, end;

    Passes(Layer &l, int32_t yield_us) : layer(l)
    {
        const Shape &s = l.shape;
        mok_config c = MOK_INIT(mok_config);
        c.hidden = s.hidden;
        c.intermediate = s.intermediate;
        c.num_experts = s.experts;
        c.topk = s.topk;
        c.max_tokens = s.tokens;
        c.save = MOK_SAVE_ALL;
        c.backend = MOK_BACKEND_CUDA;
        c.yield_us = yield_us;
        MOK(mok_workspace_create(l.group, &c, &workspace));
        mok_plan plan = MOK_INIT(mok_plan);
        MOK(mok_workspace_plan(workspace, &plan));
        CUDA(cudaMalloc(&schedule, (size_t)plan.schedule_bytes));
        CUDA(cudaMalloc(&context, (size_t)plan.context_bytes));
        CUDA(cudaEventCreate(&begin));
        CUDA(cudaEventCreate(&end));
        mok_schedule_args a = MOK_INIT(mok_schedule_args);
        a.num_tokens = s.tokens;
        a.expert_ids = l.ids;
        a.schedule = schedule;
        MOK(mok_schedule(workspace, &a, nullptr));
        for (int warm = 0; warm < 2; warm++) {
            run(FORWARD, nullptr);
            run(BACKWARD, nullptr);
        }
        MOK(mok_wait(workspace));
    }
    ~Passes()
    {
        mok_workspace_destroy(workspace);
        cudaFree(schedule);
        cudaFree(context);
        cudaEventDestroy(begin);
        cudaEventDestroy(end);
    }

    mok_weights weights() const
    {
        mok_weights w = {};
        w.gate.packed = layer.weights[0];
        w.up.packed = layer.weights[1];
        w.down.packed = layer.weights[2];
        return w;
    }

    void forward(cudaStream_t stream)
    {
        mok_forward_args a = MOK_INIT(mok_forward_args);
        a.num_tokens = layer.shape.tokens;
        a.schedule = schedule;
        a.x = layer.x;
        a.router_weights = layer.router_weights;
        a.weights = weights();
        a.context = context;
        a.out = layer.out;
        MOK(mok_forward(workspace, &a, stream));
    }

    void backward(cudaStream_t stream)
    {
        mok_backward_args a = MOK_INIT(mok_backward_args);
        mok_grad *const grads[3] = {&a.grads.gate, &a.grads.up, &a.grads.down};
        a.num_tokens = layer.shape.tokens;
        a.schedule = schedule;
        a.context = context;
        a.dout = layer.dout;
        a.x = layer.x;
        a.router_weights = layer.router_weights;
        a.weights = weights();
        a.dx = layer.dx;
        a.drouter_weights = layer.drouter;
        for (int m = 0; m < 3; m++) {
            grads[m]->packed = layer.grads[m];
            grads[m]->dtype = MOK_FP32;
        }
        MOK(mok_backward(workspace, &a, stream));
    }

    /* Does not wait. */
    void run(Pass pass, cudaStream_t stream)
    {
        CUDA(cudaEventRecord(begin, stream));
        if (pass == FORWARD)
            forward(stream);
        if (pass == BACKWARD)
            backward(stream);
        CUDA(cudaEventRecord(end, stream));
    }

    double ms()
    {
        float t;
        CUDA(cudaEventSynchronize(end));
        CUDA(cudaEventElapsedTime(&t, begin, end));
        return t;
    }
};

/* ---- the measurements ---- */

/* Has it not happened yet? */
static bool is_to_come(cudaEvent_t event)
{
    const bool yes = cudaEventQuery(event) == cudaErrorNotReady;
    (void)cudaGetLastError(); /* that answer is kept as an error */
    return yes;
}

static double percentile(std::vector<double> v, double p)
{
    if (v.empty())
        return NAN;
    std::sort(v.begin(), v.end());
    return v[std::min(v.size() - 1, (size_t)(p * (double)v.size()))];
}

struct Latency {
    std::vector<double> first_us, last_us; /* of the tries whose launch came while the pass ran */
    int missed = 0;                        /* the pass was over */
    int after_end = 0;                     /* the pass was over when the kernel was */
};

static Latency measure_latency(Passes &passes, Pass pass, int tries, uint64_t seed)
{
    int lowest, highest;
    int64_t trip_before, trip_after;
    cudaStream_t low, high;
    uint64_t *stamps;
    CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CUDA(cudaStreamCreateWithPriority(&low, cudaStreamNonBlocking, lowest));
    CUDA(cudaStreamCreateWithPriority(&high, cudaStreamNonBlocking, highest));
    CUDA(cudaMalloc(&stamps, PROBE_CTAS * 8));
    CUDA(cudaFuncSetAttribute(probe, cudaFuncAttributeMaxDynamicSharedMemorySize, PROBE_SHARED));
    probe<<<PROBE_CTAS, PROBE_THREADS, PROBE_SHARED, high>>>(stamps); /* loads it */
    CUDA(cudaStreamSynchronize(high));
    passes.run(pass, low);
    const double whole_us = passes.ms() * 1e3;
    const int64_t offset = clock_offset(&trip_before);
    struct Try { int64_t launched; uint64_t stamps[PROBE_CTAS]; bool during, ended_first; };
    std::vector<Try> all((size_t)tries);
    for (Try &t : all) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        const double wait_us = whole_us * (0.2 + 0.5 * (double)(seed >> 40) / (double)(1 << 24)); /* from a fifth to seven tenths of the pass */
        passes.run(pass, low);
        while (pass != IDLE && is_to_come(passes.begin)) {
        }
        std::thread([&] { /* a second host thread, as a framework's would be */
            CUDA(cudaSetDevice(0));
            for (const int64_t until = host_ns() + (int64_t)(wait_us * 1e3); host_ns() < until;) {
            }
            t.during = is_to_come(passes.end);
            t.launched = host_ns();
            probe<<<PROBE_CTAS, PROBE_THREADS, PROBE_SHARED, high>>>(stamps);
            CUDA(cudaGetLastError());
            CUDA(cudaStreamSynchronize(high));
            t.ended_first = !is_to_come(passes.end);
        }).join();
        CUDA(cudaStreamSynchronize(low));
        CUDA(cudaMemcpy(t.stamps, stamps, sizeof t.stamps, cudaMemcpyDeviceToHost));
    }
    const int64_t drift = clock_offset(&trip_after) - offset;
    printf("  clocks: round trips of %.1f and %.1f us, apart by %.1f us more after the tries\n", (double)trip_before * 1e-3, (double)trip_after * 1e-3, (double)drift * 1e-3);
    Latency l;
    for (size_t i = 0; i < all.size(); i++) {
        const Try &t = all[i];
        const int64_t now = offset + drift * (int64_t)i / (int64_t)all.size();
        if (pass != IDLE && !t.during) {
            l.missed++;
            continue;
        }
        l.after_end += pass != IDLE && t.ended_first;
        l.first_us.push_back((double)((int64_t)*std::min_element(t.stamps, t.stamps + PROBE_CTAS) - now - t.launched) * 1e-3);
        l.last_us.push_back((double)((int64_t)*std::max_element(t.stamps, t.stamps + PROBE_CTAS) - now - t.launched) * 1e-3);
    }
    CUDA(cudaFree(stamps));
    CUDA(cudaStreamDestroy(low));
    CUDA(cudaStreamDestroy(high));
    return l;
}

struct Cost { std::vector<double> on_ms, off_ms, ratio; };

static Cost measure_cost(Passes &on, Passes &off, Pass pass, int pairs)
{
    Cost c;
    for (int i = -2; i < pairs; i++) {
        Passes *first = i % 2 ? &off : &on, *second = i % 2 ? &on : &off;
        first->run(pass, nullptr);
        second->run(pass, nullptr);
        const double a = on.ms(), b = off.ms();
        if (i < 0)
            continue;
        c.on_ms.push_back(a);
        c.off_ms.push_back(b);
        c.ratio.push_back(a / b);
    }
    MOK(mok_wait(on.workspace));
    MOK(mok_wait(off.workspace));
    return c;
}

/* ---- what is shown ---- */

static bool any_record;
static char about[512]; /* of every record: the device, the setting, the commit */

static void begin_record(FILE *json, const char *what, const Shape &s, Pass pass)
{
    fprintf(json, "%s  {\"what\": \"%s\", \"shape\": \"%s\", \"T\": %lld, \"pass\": \"%s\", %s", any_record ? ",\n" : "", what, s.name, (long long)s.tokens, pass_names[pass], about);
    any_record = true;
}

static void show_latency(FILE *json, const Shape &s, Pass pass, const char *how, const Latency &l)
{
    printf("  %-8s %-9s us from launch to the first CTA: p50 %6.1f max %6.1f; to the last of %d: p50 %6.1f max %6.1f; %zu tries, %d too late, %d ended after the pass\n", pass_names[pass],
           how, percentile(l.first_us, 0.5), percentile(l.first_us, 1), (int)PROBE_CTAS, percentile(l.last_us, 0.5), percentile(l.last_us, 1), l.last_us.size(), l.missed, l.after_end);
    if (!json)
        return;
    begin_record(json, "latency", s, pass);
    fprintf(json, ", \"yield\": \"%s\", \"tries\": %zu, \"too_late\": %d, \"after_the_pass\": %d", how, l.last_us.size(), l.missed, l.after_end);
    if (!l.last_us.empty())
        fprintf(json, ", \"first_us_p50\": %.1f, \"first_us_max\": %.1f, \"last_us_p50\": %.1f, \"last_us_max\": %.1f", percentile(l.first_us, 0.5), percentile(l.first_us, 1),
                percentile(l.last_us, 0.5), percentile(l.last_us, 1));
    fprintf(json, "}");
}

static void show_cost(FILE *json, const Shape &s, Pass pass, const Cost &c)
{
    printf("  %-8s ms: %.3f with yields, %.3f without; ratio of a pair: median %.4f, quartiles %.4f and %.4f, %zu pairs\n", pass_names[pass], percentile(c.on_ms, 0.5),
           percentile(c.off_ms, 0.5), percentile(c.ratio, 0.5), percentile(c.ratio, 0.25), percentile(c.ratio, 0.75), c.ratio.size());
    if (!json)
        return;
    begin_record(json, "cost", s, pass);
    fprintf(json, ", \"pairs\": %zu, \"on_ms\": %.4f, \"off_ms\": %.4f, \"ratio\": %.5f, \"ratio_q1\": %.5f, \"ratio_q3\": %.5f}", c.ratio.size(), percentile(c.on_ms, 0.5),
            percentile(c.off_ms, 0.5), percentile(c.ratio, 0.5), percentile(c.ratio, 0.25), percentile(c.ratio, 0.75));
}

static void measure(FILE *json, const Shape &s, bool latency, int tries, int pairs, int32_t yield_us, uint64_t seed)
{
    printf("%s: T %lld H %lld I %lld E %lld K %lld\n", s.name, (long long)s.tokens, (long long)s.hidden, (long long)s.intermediate, (long long)s.experts, (long long)s.topk);
    Layer layer(s, seed);
    Passes on(layer, yield_us), off(layer, -1);
    for (Pass pass : {FORWARD, BACKWARD}) {
        show_cost(json, s, pass, measure_cost(on, off, pass, pairs));
        if (!latency)
            continue;
        show_latency(json, s, pass, "chosen", measure_latency(on, pass, tries, seed));
        show_latency(json, s, pass, "never", measure_latency(off, pass, 5, seed));
    }
    if (latency)
        show_latency(json, s, IDLE, "-", measure_latency(on, IDLE, 20, seed));
}

int main(int argc, char **argv)
{
    int tries = 40, pairs = 30, yield_us = 250;
    const char *file = nullptr;
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc) {
            fprintf(stderr, "yield: %s needs a value\n", argv[i]);
            return 2;
        }
        if (!strcmp(argv[i], "--tries"))
            tries = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--pairs"))
            pairs = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--yield-us"))
            yield_us = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--json"))
            file = argv[i + 1];
        else {
            fprintf(stderr, "yield: there is no option %s\n", argv[i]);
            return 2;
        }
    }
    FILE *json = file ? fopen(file, "w") : nullptr;
    if (file && !json) {
        perror(file);
        return 1;
    }
    const uint64_t seed = (uint64_t)std::chrono::system_clock::now().time_since_epoch().count();
    cudaDeviceProp device;
    int driver;
    CUDA(cudaGetDeviceProperties(&device, 0));
    CUDA(cudaDriverGetVersion(&driver));
    printf("%s, CUDA driver %d, seed %llu\n", device.name, driver, (unsigned long long)seed);
    const char *commit = getenv("MOK_COMMIT");
    snprintf(about, sizeof about, "\"yield_us\": %d, \"device\": \"%s\", \"cuda_driver\": %d, \"commit\": \"%s\"", yield_us, device.name, driver, commit ? commit : "");
    if (json)
        fprintf(json, "[\n");
    const Shape shapes[] = {{"kimi-k2.7-code, 8 experts", 8192, 7168, 2048, 8, 8}, {"kimi-k2.7-code, 8 experts", 2048, 7168, 2048, 8, 8}, {"qwen3-30b-a3b", 8192, 2048, 768, 128, 8},
                            {"deepseek-v4-pro, 6 experts", 2048, 7168, 3072, 6, 6}};
    for (const Shape &s : shapes)
        measure(json, s, &s == shapes, tries, pairs, yield_us, seed);
    if (json) {
        fprintf(json, "\n]\n");
        fclose(json);
    }
    return 0;
}
