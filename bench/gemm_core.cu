/* The grouped GEMM core on a GPU: right, and how fast against dense cuBLAS of the same size.
 *
 *   bash bench/gemm_core.sh [quick]
 *
 * Right means: ragged shapes agree with a plain fp32 kernel; all tiles and cluster modes give the same bits; the pushed and
 * the SwiGLU results are those of the plain one. Fast is measured in alternation with cuBLAS (equal idle gaps, because the
 * chip is power-limited), as the median and quartiles of the ratio over rounds. One line for each variant; exit status 1 if
 * anything is wrong. */
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <algorithm>
#include <vector>

#include "cuda/gemm/gemm.cuh"

#define CHECK(call)                                                                                                  \
    do {                                                                                                             \
        cudaError_t status_ = (call);                                                                                \
        if (status_ != cudaSuccess) {                                                                                \
            printf("FAIL %s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_));                  \
            exit(1);                                                                                                 \
        }                                                                                                            \
    } while (0)

typedef uint16_t bf16_bits;
static int failures;

/* ---- helpers on the device ---- */

__global__ void fill_normal(bf16_bits *p, size_t n, uint64_t seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint64_t z = (seed << 40) + i * 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        z ^= z >> 31;
        const float u = ((uint32_t)z >> 8) * 0x1p-24f + 0x1p-25f, v = (uint32_t)(z >> 40) * 0x1p-24f;
        p[i] = __bfloat16_as_ushort(__float2bfloat16_rn(sqrtf(-2.0f * logf(u)) * cospif(2.0f * v)));
    }
}

/* count[0] += elements of c (row pitch cols) that differ from want; rows of c through map, -1 = skip. */
__global__ void count_different(const bf16_bits *c, const bf16_bits *want, const int *map, long rows, long cols, unsigned long long *count)
{
    const long n = rows * cols;
    unsigned long long mine = 0;
    for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n; i += (long)gridDim.x * blockDim.x) {
        const long r = i / cols, to = map ? map[r] : r;
        mine += to >= 0 && c[to * cols + i % cols] != want[i];
    }
    if (mine)
        atomicAdd(count, mine);
}

__global__ void swiglu_reference(const bf16_bits *gate_up, bf16_bits *h, long rows, long width)
{
    for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < rows * width; i += (long)gridDim.x * blockDim.x) {
        const bf16_bits *row = gate_up + i / width * 2 * width + i % width;
        h[i] = (bf16_bits)mk::pack_bf16(mk::swiglu(mk::bits_to_float((uint32_t)row[0] << 16), mk::bits_to_float((uint32_t)row[width] << 16), INFINITY), 0.0f);
    }
}

/* ---- a case: shape, memory, launches ---- */

struct Shape {
    const char *name;
    int experts;
    long cols, depth;
    std::vector<int> rows;
};

/* `total` rows over experts, uneven, each a multiple of 128. */
static std::vector<int> uneven(int experts, long total)
{
    std::vector<int> rows(experts, 0);
    long left = total / 128;
    uint64_t z = 12345;
    for (int e = 0; e < experts; e++) {
        z = z * 6364136223846793005ull + 1442695040888963407ull;
        const long fair = left / (experts - e), spread = fair / 2 ? (long)(z >> 33) % (fair / 2 + 1) - fair / 4 : 0;
        rows[e] = (int)((e == experts - 1 ? left : fair + spread) * 128);
        left -= rows[e] / 128;
    }
    return rows;
}

static mk_tensor_map encode(const mk_tensor &t)
{
    static mk_tensor_map_encoder encoder;
    if (!encoder) {
        void *fn = nullptr;
        cudaDriverEntryPointQueryResult found;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault, &found));
        encoder = (mk_tensor_map_encoder)fn;
    }
    mk_tensor_map map;
    if (int refused = mk_tensor_map_encode(&map, &t, encoder)) {
        printf("FAIL cuTensorMapEncodeTiled: %d\n", refused);
        exit(1);
    }
    return map;
}

template <class T> static T *device_array(size_t n)
{
    void *p;
    CHECK(cudaMalloc(&p, std::max<size_t>(n, 1) * sizeof(T)));
    return (T *)p;
}
template <class T> static T *upload(const std::vector<T> &v)
{
    T *p = device_array<T>(v.size());
    CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

struct Case {
    Shape shape;
    long table_rows = 0, real_rows = 0;
    std::vector<int> first;
    bf16_bits *a, *b, *c, *h;
    int *tile_first, *rows, *row_map;  /* row_map: a permutation for the push, -1 in padding */
    bf16_bits **slot;
    static constexpr int kTickets = 4096;  /* one for each launch, so that none has to be cleared between timed launches */
    uint32_t *tickets;
    mutable int launches = 0;
    unsigned long long *count;

    explicit Case(const Shape &s) : shape(s)
    {
        first.push_back(0);
        for (int r : s.rows) {
            first.push_back(first.back() + (r + 127) / 128);
            real_rows += r;
        }
        table_rows = first.back() * 128L;
        a = device_array<bf16_bits>(table_rows * s.depth);
        b = device_array<bf16_bits>(s.experts * s.cols * s.depth);
        c = device_array<bf16_bits>(table_rows * s.cols);
        h = device_array<bf16_bits>(table_rows * s.cols);
        fill_normal<<<1024, 256>>>(a, table_rows * s.depth, 1);
        fill_normal<<<1024, 256>>>(b, s.experts * s.cols * s.depth, 2);
        CHECK(cudaMemset(c, 0xff, table_rows * s.cols * 2));
        CHECK(cudaMemset(h, 0xff, table_rows * s.cols * 2));
        tile_first = upload(first);
        rows = upload(s.rows);
        std::vector<int> map(table_rows, -1);
        std::vector<bf16_bits *> slots(table_rows, nullptr);
        for (int e = 0; e < s.experts; e++)
            for (int r = 0; r < s.rows[e]; r++) {
                const long row = first[e] * 128L + r;
                map[row] = (int)(row * 7919L % table_rows);  /* a permutation: 7919 is prime and larger than any factor here */
                slots[row] = h + map[row] * s.cols;
            }
        row_map = upload(map);
        slot = upload(slots);
        tickets = device_array<uint32_t>(kTickets);
        count = device_array<unsigned long long>(1);
    }
    ~Case()
    {
        for (void *p : {(void *)a, (void *)b, (void *)c, (void *)h, (void *)tile_first, (void *)rows, (void *)row_map, (void *)slot, (void *)tickets, (void *)count})
            CHECK(cudaFree(p));
    }

    template <class Tile> mk::GroupedProgram<Tile> program(bool swiglu) const
    {
        mk::GroupedProgram<Tile> p = {};
        p.a = encode(mk_tensor_operand(a, shape.depth, table_rows, 0, mk::kBoxRowsA<Tile>));
        p.b_low = p.b_high = encode(mk_tensor_operand(b, shape.depth, shape.cols, shape.experts, mk::kBoxRowsB<Tile>));
        p.tile_first = tile_first;
        p.rows = rows;
        p.ticket = tickets + launches++ % kTickets;
        p.num_experts = shape.experts;
        p.num_k_blocks = (int)((shape.depth + 63) / 64);
        p.num_cols = (int)(swiglu ? shape.cols / 2 : shape.cols);
        p.tile_cols = swiglu ? Tile::cols / 2 : Tile::cols;
        p.b_high_row = (int)(swiglu ? shape.cols / 2 : Tile::cols / 2);
        return p;
    }

    template <class Tile, class Epilogue> void launch(const Epilogue &epilogue, bool swiglu) const
    {
        auto kernel = mk::gemm_kernel<Tile, mk::GroupedProgram<Tile>, Epilogue>;
        static int blocks;
        cudaLaunchAttribute attribute;
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {Tile::cluster, 1, 1};
        cudaLaunchConfig_t config = {};
        config.blockDim = {mk::kGemmThreads, 1, 1};
        config.dynamicSmemBytes = sizeof(mk::GemmShared<Tile>);
        config.attrs = &attribute;
        config.numAttrs = 1;
        if (!blocks) {
            int clusters = 0;
            CHECK(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)config.dynamicSmemBytes));
            config.gridDim = {Tile::cluster, 1, 1};
            CHECK(cudaOccupancyMaxActiveClusters(&clusters, (const void *)kernel, &config));
            blocks = clusters * (int)Tile::cluster;
        }
        config.gridDim = {(unsigned)blocks, 1, 1};
        if (launches % kTickets == 0)
            CHECK(cudaMemsetAsync(tickets, 0, kTickets * sizeof *tickets));
        CHECK(cudaLaunchKernelEx(&config, kernel, program<Tile>(swiglu), epilogue));
    }

    template <class Tile> void plain(bf16_bits *to) const { launch<Tile>(mk::StoreRows<mk::MatrixRows>{{to, shape.cols}}, false); }
    template <class Tile> void push() const { launch<Tile>(mk::StoreRows<mk::PushedRows>{{slot, shape.cols}}, false); }
    template <class Tile> void swiglu(bf16_bits *to) const
    {
        launch<Tile>(mk::SwigluRows<mk::MatrixRows, mk::MatrixRows>{{to, shape.cols / 2}, {nullptr, shape.cols / 2}, {nullptr, shape.cols / 2}, INFINITY}, true);
    }

    /* Elements of `got` that differ from `want` in real rows. */
    unsigned long long different(const bf16_bits *got, const bf16_bits *want, long cols, bool pushed) const
    {
        std::vector<int> map(table_rows, -1);
        for (int e = 0; e < shape.experts; e++)
            for (int r = 0; r < shape.rows[e]; r++)
                map[first[e] * 128L + r] = (int)(first[e] * 128L + r);
        int *identity = upload(map);
        unsigned long long n = 0;
        CHECK(cudaMemset(count, 0, sizeof *count));
        count_different<<<1024, 256>>>(got, want, pushed ? row_map : identity, table_rows, cols, count);
        CHECK(cudaMemcpy(&n, count, sizeof n, cudaMemcpyDeviceToHost));
        CHECK(cudaFree(identity));
        return n;
    }
};

static void verdict(const char *what, const char *shape, unsigned long long wrong)
{
    printf("%s %s, %s: %llu elements differ\n", wrong ? "FAIL" : "PASS", shape, what, wrong);
    failures += wrong != 0;
}

/* ---- right ---- */

/* Largest error of c against a plain product, in units of the last place of bf16 at the size of the sum's terms. */
static void check_against_host(const Case &k)
{
    const Shape &s = k.shape;
    std::vector<bf16_bits> a(k.table_rows * s.depth), b(s.experts * s.cols * s.depth), c(k.table_rows * s.cols);
    CHECK(cudaMemcpy(a.data(), k.a, a.size() * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(b.data(), k.b, b.size() * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(c.data(), k.c, c.size() * 2, cudaMemcpyDeviceToHost));
    auto value = [](bf16_bits x) { uint32_t u = (uint32_t)x << 16; float f; memcpy(&f, &u, 4); return (double)f; };
    unsigned long long wrong = 0;
    for (int e = 0; e < s.experts; e++)
        for (long r = 0; r < (k.first[e + 1] - k.first[e]) * 128L; r++)
            for (long n = 0; n < s.cols; n++) {
                const long row = k.first[e] * 128L + r;
                const bf16_bits got = c[row * s.cols + n];
                double sum = 0, size = 0;
                for (long d = 0; d < s.depth; d++) {
                    const double t = value(a[row * s.depth + d]) * value(b[(e * s.cols + n) * s.depth + d]);
                    sum += t;
                    size += t < 0 ? -t : t;
                }
                const double error = value(got) - sum;
                if (r >= s.rows[e])
                    wrong += got != 0xffff;  /* padding: as it was */
                else
                    wrong += !((error < 0 ? -error : error) <= (sum < 0 ? -sum : sum) / 256 + size * 1e-6);
            }
    verdict("against a plain loop on the host", s.name, wrong);
}

static void check_case(const Shape &shape, bool on_host)
{
    Case k(shape);
    bf16_bits *want = device_array<bf16_bits>(k.table_rows * shape.cols), *got = device_array<bf16_bits>(k.table_rows * shape.cols);
    k.plain<mk::TileWide>(k.c);
    CHECK(cudaDeviceSynchronize());
    if (on_host)
        check_against_host(k);
#define SAME(Tile)                                              \
    k.plain<mk::Tile>(got);                                     \
    CHECK(cudaDeviceSynchronize());                             \
    verdict(#Tile " against TileWide", shape.name, k.different(got, k.c, shape.cols, false));
    SAME(TileWide) SAME(TileNarrow) SAME(TileWideAlone) SAME(TileNarrowAlone)
    k.push<mk::TileWide>();
    CHECK(cudaDeviceSynchronize());
    verdict("pushed, TileWide", shape.name, k.different(k.h, k.c, shape.cols, true));
    CHECK(cudaMemset(k.h, 0, k.table_rows * shape.cols * 2));
    k.push<mk::TileNarrow>();
    CHECK(cudaDeviceSynchronize());
    verdict("pushed, TileNarrow", shape.name, k.different(k.h, k.c, shape.cols, true));
    if (shape.cols % 128 == 0) {
        swiglu_reference<<<1024, 256>>>(k.c, want, k.table_rows, shape.cols / 2);
        k.swiglu<mk::TileWide>(got);
        CHECK(cudaDeviceSynchronize());
        verdict("SwiGLU, TileWide", shape.name, k.different(got, want, shape.cols / 2, false));
        k.swiglu<mk::TileNarrow>(got);
        CHECK(cudaDeviceSynchronize());
        verdict("SwiGLU, TileNarrow", shape.name, k.different(got, want, shape.cols / 2, false));
    }
    CHECK(cudaFree(want));
    CHECK(cudaFree(got));
}

/* ---- fast ---- */

static unsigned sm_clock_mhz()
{
    typedef int (*Init)(void);
    typedef int (*Handle)(unsigned, void **);
    typedef int (*Clock)(void *, int, unsigned *);
    static void *device;
    static Clock clock;
    if (!clock) {
        void *lib = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        if (!lib || ((Init)dlsym(lib, "nvmlInit_v2"))() || ((Handle)dlsym(lib, "nvmlDeviceGetHandleByIndex_v2"))(0, &device))
            return 0;
        clock = (Clock)dlsym(lib, "nvmlDeviceGetClockInfo");
    }
    unsigned mhz = 0;
    clock(device, 1 /* SM */, &mhz);
    return mhz;
}

/* Median time of one launch, in ms: idle, warm-ups, then `launches` timed ones. */
template <class Run> static float timed(Run run, int launches, unsigned *mhz)
{
    static cudaEvent_t start[64], stop[64];
    if (!start[0])
        for (int i = 0; i < 64; i++) {
            CHECK(cudaEventCreate(&start[i]));
            CHECK(cudaEventCreate(&stop[i]));
        }
    const struct timespec idle = {0, 15000000};
    nanosleep(&idle, nullptr);
    for (int i = 0; i < 3; i++)
        run();
    for (int i = 0; i < launches; i++) {
        CHECK(cudaEventRecord(start[i]));
        run();
        CHECK(cudaEventRecord(stop[i]));
    }
    CHECK(cudaEventSynchronize(stop[launches / 2]));
    *mhz = sm_clock_mhz();
    CHECK(cudaDeviceSynchronize());
    std::vector<float> ms(launches);
    for (int i = 0; i < launches; i++)
        CHECK(cudaEventElapsedTime(&ms[i], start[i], stop[i]));
    std::sort(ms.begin(), ms.end());
    return ms[launches / 2];
}

struct Variant {
    const char *name;
    void (*run)(const Case &);
};

static void bench(const Shape &shape, const std::vector<Variant> &variants, int rounds)
{
    static cublasHandle_t blas;
    if (!blas)
        cublasCreate(&blas);
    Case k(shape);
    const double flop = 2.0 * (double)k.real_rows * (double)shape.cols * (double)shape.depth;
    auto dense = [&] {
        const float one = 1.0f, zero = 0.0f;
        if (cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, (int)shape.cols, (int)k.table_rows, (int)shape.depth, &one, k.b, CUDA_R_16BF, (int)shape.depth, k.a,
                         CUDA_R_16BF, (int)shape.depth, &zero, k.c, CUDA_R_16BF, (int)shape.cols, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT))
            printf("FAIL cublasGemmEx\n"), failures++;
    };
    std::vector<std::vector<float>> ms(variants.size()), ratio(variants.size());
    std::vector<std::vector<unsigned>> clocks(variants.size());
    std::vector<float> base;
    std::vector<unsigned> base_clocks;
    for (int r = 0; r < rounds; r++)
        for (size_t v = 0; v < variants.size(); v++) {
            unsigned mhz;
            const float reference = timed(dense, 12, &mhz);
            base.push_back(reference);
            base_clocks.push_back(mhz);
            const float own = timed([&] { variants[v].run(k); }, 12, &mhz);
            ms[v].push_back(own);
            clocks[v].push_back(mhz);
            ratio[v].push_back(reference / own);
        }
    auto quantile = [](auto list, double q) { std::sort(list.begin(), list.end()); return list[(size_t)(q * (double)(list.size() - 1) + 0.5)]; };
    printf("\n%s: M %ld N %ld K %ld E %d; cuBLAS dense %.4f ms, %.0f TFLOP/s, %u MHz\n", shape.name, k.real_rows, shape.cols, shape.depth, shape.experts,
           quantile(base, 0.5), flop / quantile(base, 0.5) / 1e9, quantile(base_clocks, 0.5));
    for (size_t v = 0; v < variants.size(); v++)
        printf("  %-24s %.4f ms  %4.0f TFLOP/s  %u MHz  ratio %.3f  (quartiles %.3f %.3f, %d rounds)\n", variants[v].name, quantile(ms[v], 0.5),
               flop / quantile(ms[v], 0.5) / 1e9, quantile(clocks[v], 0.5), quantile(ratio[v], 0.5), quantile(ratio[v], 0.25), quantile(ratio[v], 0.75), rounds);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    const bool quick = argc > 1 && !strcmp(argv[1], "quick");
    cudaDeviceProp device;
    int driver = 0;
    CHECK(cudaGetDeviceProperties(&device, 0));
    CHECK(cudaDriverGetVersion(&driver));
    printf("device %s, %d SMs, driver %d\n", device.name, device.multiProcessorCount, driver);

    check_case({"ragged", 6, 192, 192, {1, 127, 128, 0, 300, 65}}, true);
    check_case({"ragged, wide", 3, 1408, 2880, {200, 5, 700}}, false);
    check_case({"one row", 1, 64, 64, {1}}, true);
    check_case({"Kimi gate/up", 6, 4096, 7168, uneven(6, 16384)}, false);
    check_case({"Qwen3-30B down", 64, 2048, 768, uneven(64, 65536)}, false);
    if (failures)
        return 1;

    const Variant plain_wide = {"plain TileWide", [](const Case &k) { k.plain<mk::TileWide>(k.h); }};
    const Variant plain_narrow = {"plain TileNarrow", [](const Case &k) { k.plain<mk::TileNarrow>(k.h); }};
    const Variant swiglu_wide = {"SwiGLU TileWide", [](const Case &k) { k.swiglu<mk::TileWide>(k.h); }};
    const Variant swiglu_narrow = {"SwiGLU TileNarrow", [](const Case &k) { k.swiglu<mk::TileNarrow>(k.h); }};
    const Variant push_wide = {"push TileWide", [](const Case &k) { k.push<mk::TileWide>(); }};
    const Variant push_narrow = {"push TileNarrow", [](const Case &k) { k.push<mk::TileNarrow>(); }};
    const int rounds = quick ? 3 : 10;
    bench({"Kimi gate/up", 6, 4096, 7168, uneven(6, 16384)}, {plain_wide, plain_narrow, swiglu_wide, swiglu_narrow}, rounds);
    bench({"Kimi down", 6, 7168, 2048, uneven(6, 16384)}, {plain_wide, plain_narrow, push_wide, push_narrow}, rounds);
    if (!quick) {
        bench({"Qwen3.5 gate/up", 8, 2048, 4096, uneven(8, 20480)}, {plain_wide, plain_narrow, swiglu_wide, swiglu_narrow}, rounds);
        bench({"Qwen3.5 down", 8, 4096, 1024, uneven(8, 20480)}, {plain_wide, plain_narrow, push_wide, push_narrow}, rounds);
        bench({"Qwen3-30B gate/up", 64, 1536, 2048, uneven(64, 65536)}, {plain_wide, plain_narrow, swiglu_wide, swiglu_narrow}, rounds);
        bench({"Qwen3-30B down", 64, 2048, 768, uneven(64, 65536)}, {plain_wide, plain_narrow, push_wide, push_narrow}, rounds);
    }
    return failures != 0;
}
