/* MXFP8 on a real GPU: mok_mx_quantise has the CPU's bits for every bf16 and for matrices with tails, both ways. Its speed is printed. Skipped,
 * and counted as such, where there is no GPU. */
#define TEST_WATCHDOG 300
#include "layer.h"
#include "test.h"

enum { PARTS = 5 }; /* source, data, scales, transposed, transposed scales */

typedef struct gpu { mok_group *group; mok_workspace *w; } gpu;

static bool gpu_open_with(gpu *g, int64_t hidden, int64_t intermediate, mok_dtype dtype)
{
    mok_backend_info b = MOK_INIT(mok_backend_info);
    mok_config c = MOK_INIT(mok_config);
    bool usable = false;
    int32_t device = 0;
    for (int32_t i = 0; mok_backend_query(i, &b) == MOK_OK; i++)
        usable |= b.id == MOK_BACKEND_CUDA && b.usable;
    *g = (gpu){NULL, NULL};
    if (!usable)
        return false;
    c.hidden = hidden;
    c.intermediate = intermediate;
    c.dtype = dtype;
    c.num_experts = c.topk = c.max_tokens = 1;
    c.backend = MOK_BACKEND_CUDA; /* a workspace for its memory helpers */
    if (mok_group_create_local(1, &device, &g->group) != MOK_OK || mok_workspace_create(g->group, &c, &g->w) != MOK_OK)
        TEST_FAILED("%s", mok_last_error());
    return g->w != NULL;
}

static bool gpu_open(gpu *g) { return gpu_open_with(g, 64, 64, MOK_BF16); }

static void gpu_close(gpu *g)
{
    mok_workspace_destroy(g->w);
    mok_group_destroy(g->group);
}

static mok_mx_quantise_args arguments(void *const part[PARTS], int64_t count, int64_t rows, int64_t cols, mok_backend_id backend, int64_t *not_finite)
{
    mok_mx_quantise_args a = MOK_INIT(mok_mx_quantise_args);
    a.backend = backend;
    a.count = count;
    a.rows = rows;
    a.cols = cols;
    a.source = part[0];
    a.data = part[1];
    a.scales = part[2];
    a.transposed = part[3];
    a.transposed_scales = part[4];
    a.not_finite = not_finite;
    return a;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* x: [count, rows, cols], filled. */
static void compare(gpu *g, uint16_t *x, int64_t count, int64_t rows, int64_t cols)
{
    int64_t n = count * rows * cols, here_counted = -1, there_counted = -1;
    size_t bytes[PARTS] = {(size_t)n * 2, (size_t)n, (size_t)(count * mok_mx_scale_bytes(rows, cols)), (size_t)n, (size_t)(count * mok_mx_scale_bytes(cols, rows))};
    void *here[PARTS] = {x, NULL, NULL, NULL, NULL}, *there[PARTS] = {NULL, NULL, NULL, NULL, NULL};
    for (int i = 0; i < PARTS; i++) {
        here[i] = i ? malloc(bytes[i]) : x;
        CHECK_EQ(mok_memory_alloc(g->w, bytes[i], &there[i]), MOK_OK);
        if (i)
            memset(here[i], 0xee, bytes[i]);
        CHECK_EQ(mok_memory_copy(g->w, there[i], here[i], bytes[i]), MOK_OK);
    }
    mok_mx_quantise_args a = arguments(here, count, rows, cols, MOK_BACKEND_CPU, &here_counted);
    mok_mx_quantise_args b = arguments(there, count, rows, cols, MOK_BACKEND_CUDA, &there_counted);
    CHECK_EQ(mok_mx_quantise(&a, NULL), MOK_OK);
    if (mok_mx_quantise(&b, NULL) != MOK_OK)
        TEST_FAILED("%s", mok_last_error());
    CHECK_EQ(there_counted, here_counted);
    double best = 1e9;
    for (int i = 0; i < 5; i++) { /* counting waits for the end; the first was a warm-up */
        double start = now();
        mok_mx_quantise(&b, NULL);
        best = fmin(best, now() - start);
    }
    for (int i = 1; i < PARTS; i++) {
        void *got = malloc(bytes[i]);
        CHECK_EQ(mok_memory_copy(g->w, got, there[i], bytes[i]), MOK_OK);
        CHECK_BYTES(got, here[i], bytes[i]);
        free(got);
        free(here[i]);
    }
    for (int i = 0; i < PARTS; i++)
        mok_memory_free(g->w, there[i]);
    printf("  %lld x [%lld, %lld], both ways: %.3f ms with the wait, %.0f GB/s\n", (long long)count, (long long)rows, (long long)cols, 1e3 * best,
           1e-9 * (2.0 * (double)bytes[0] + 2.0 * (double)n) / best);
}

TEST(every_bf16_among_neighbours_of_every_size)
{
    gpu g;
    if (!gpu_open(&g))
        SKIP("no GPU that the cuda backend can use");
    enum { ROWS = 2048, COLS = 64 }; /* twice all bf16: in order, and shuffled */
    uint16_t *x = malloc(sizeof *x * ROWS * COLS);
    uint64_t state = test_seed();
    for (int64_t i = 0; i < ROWS * COLS; i++)
        x[i] = (uint16_t)i;
    for (int64_t i = 65535; i > 0; i--) {
        int64_t j = test_below(&state, i + 1);
        uint16_t v = x[65536 + i];
        x[65536 + i] = x[65536 + j];
        x[65536 + j] = v;
    }
    compare(&g, x, 1, ROWS, COLS);
    free(x);
    gpu_close(&g);
}

TEST(matrices_of_models_and_with_tails)
{
    static const int64_t shapes[][3] = {{3, 64, 192}, {1, 32, 32}, {2, 160, 96}, {5, 448, 704}, {2, 2048, 7168}, {2, 7168, 2048}};
    gpu g;
    if (!gpu_open(&g))
        SKIP("no GPU that the cuda backend can use");
    uint64_t state = test_seed();
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes - (getenv("MOK_TEST_QUICK") ? 2 : 0); s++) {
        int64_t n = shapes[s][0] * shapes[s][1] * shapes[s][2];
        uint16_t *x = malloc(sizeof *x * (size_t)n);
        for (int64_t i = 0; i < n; i++) /* any sign and mantissa, exponents near 1; now and then anything */
            x[i] = test_below(&state, 1000) ? (uint16_t)((test_random(&state) & 0x807f) | (uint64_t)(120 + test_below(&state, 9)) << 7) : (uint16_t)test_random(&state);
        compare(&g, x, shapes[s][0], shapes[s][1], shapes[s][2]);
        free(x);
    }
    gpu_close(&g);
}

/* What an element and a scale stand for, as bf16. */
static uint16_t bf16_of(int element, int scale)
{
    int size = element & 0x7f;
    double value = ldexp(size < 8 ? size / 8.0 : 1 + size % 8 / 8.0, (size < 8 ? 1 : size / 8) - 7 + scale - 127);
    if (size == 0x7f || scale == 255)
        return 0x7fc0;
    return layer_bf16((float)(element & 0x80 ? -value : value)); /* a float has them all; beyond the scales of mok_mx_quantise a bf16 may not */
}

/* Row s of gate has scale s. Every element in order, then again with NaN replaced, so that its neighbours are seen alone too. */
TEST(every_element_of_every_scale_widens_exactly)
{
    enum { SCALES = 256, COLS = 512 };
    gpu g;
    mok_plan plan = MOK_INIT(mok_plan);
    mok_mx_widen_args a = MOK_INIT(mok_mx_widen_args);
    static uint8_t data[SCALES * COLS], scales[SCALES * COLS / 32];
    static uint16_t got[SCALES * COLS];
    void *there[3] = {NULL, NULL, NULL};
    if (!gpu_open_with(&g, COLS, SCALES, MOK_MXFP8))
        SKIP("no GPU that the cuda backend can use");
    CHECK_EQ(mok_workspace_plan(g.w, &plan), MOK_OK);
    CHECK_EQ(mok_mx_scale_bytes(SCALES, COLS), (int64_t)sizeof scales);
    for (int i = 0; i < SCALES * COLS; i++) {
        int row = i / COLS, col = i % COLS, tile = row / 128 * (COLS / 128) + col / 128;
        data[i] = (uint8_t)(col >= 256 && (col & 0x7f) == 0x7f ? col - 1 : col);
        scales[tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + col % 128 / 32] = (uint8_t)row;
    }
    if (plan.wide_bytes) {
        size_t bytes[3] = {sizeof data, sizeof scales, (size_t)plan.wide_bytes};
        const void *from[2] = {data, scales};
        for (int i = 0; i < 3; i++) {
            CHECK_EQ(mok_memory_alloc(g.w, bytes[i], &there[i]), MOK_OK);
            if (i < 2)
                CHECK_EQ(mok_memory_copy(g.w, there[i], from[i], bytes[i]), MOK_OK);
        }
        a.weights.gate.packed = there[0];
        a.weights.gate.scales = there[1];
        a.wide = there[2];
        if (mok_mx_widen(g.w, &a, NULL) != MOK_OK)
            TEST_FAILED("%s", mok_last_error());
        CHECK_EQ(mok_memory_copy(g.w, got, there[2], sizeof got), MOK_OK); /* gate comes first */
        int64_t differ = 0;
        for (int i = 0; i < SCALES * COLS; i++)
            if (got[i] != bf16_of(data[i], i / COLS) && differ++ < 5)
                TEST_FAILED("element 0x%02x with scale %d widens to 0x%04x, not 0x%04x", data[i], i / COLS, got[i], bf16_of(data[i], i / COLS));
        CHECK_EQ(differ, 0);
    }
    for (int i = 0; i < 3; i++)
        mok_memory_free(g.w, there[i]);
    gpu_close(&g);
    if (!plan.wide_bytes)
        SKIP("this GPU multiplies MXFP8 as it is");
}

int main(int argc, char **argv) { return test_main(argc, argv); }
