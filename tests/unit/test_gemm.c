/* The CPU backend's matrix product against three plain loops, bit for bit, in every variant that this processor supports;
 * and the bf16 conversions. */
#include "test.h"

#include "cpu/bf16.h"
#include "cpu/gemm.h"

#include <pthread.h>

/* ------------------------------------------------------------------------------------------------------- support -- */

typedef enum filling { NORMAL, WIDE, ANY_BITS, NUM_FILLINGS } filling; /* WIDE: products overflow and underflow */

static mk_bf16 random_bf16(uint64_t *seed, filling fill)
{
    if (fill == NORMAL)
        return mk_float_to_bf16((float)test_normal(seed));
    mk_bf16 x = (mk_bf16)test_random(seed);
    if (fill == WIDE && (x & 0x7f80) == 0x7f80)
        x &= 0xbfff; /* neither infinite nor NaN */
    return x;
}

/* An operand in memory of its exact size, so that a sanitizer sees every read outside, 2 bytes off alignment. */
typedef struct operand {
    mk_gemm_operand view;
    char *memory;
} operand;

typedef enum order { K_CONTIGUOUS, OUTER_CONTIGUOUS, EVERY_SECOND_ROW, BOTH_STRIDED, BACKWARDS, NUM_ORDERS } order;

static operand make_operand(uint64_t *seed, int64_t outer, int64_t K, order how, filling fill)
{
    const int64_t pad = test_below(seed, 3), outer1 = outer > 0 ? outer - 1 : 0, k1 = K > 0 ? K - 1 : 0;
    const int64_t strides[NUM_ORDERS][2] = {
        [K_CONTIGUOUS] = {K + pad, 1},   [OUTER_CONTIGUOUS] = {1, outer + pad}, [EVERY_SECOND_ROW] = {2 * K, 1},
        [BOTH_STRIDED] = {2, 2 * outer + 3 * pad}, [BACKWARDS] = {-(K + pad), 1},
    };
    operand o = {{NULL, strides[how][0], strides[how][1]}, NULL};
    const int64_t span = outer1 * llabs(o.view.outer_stride) + k1 * o.view.k_stride + 1;
    o.memory = malloc((size_t)span * 2 + 2);
    mk_bf16 *data = (mk_bf16 *)(void *)(o.memory + 2);
    for (int64_t i = 0; i < span; i++)
        data[i] = random_bf16(seed, fill);
    o.view.data = data + (o.view.outer_stride < 0 ? outer1 * -o.view.outer_stride : 0);
    return o;
}

static float canonical(float x)
{
    const uint32_t bits = 0x7fc00000;
    if (x != x)
        memcpy(&x, &bits, sizeof x);
    return x;
}

static void plain_loop(int64_t M, int64_t N, int64_t K, mk_gemm_operand A, mk_gemm_operand B, float *C, int64_t ldc, bool accumulate)
{
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = 0; n < N; n++) {
            float sum = accumulate ? C[m * ldc + n] : 0.0f;
            for (int64_t k = 0; k < K; k++)
                sum = fmaf(mk_bf16_to_float(A.data[m * A.outer_stride + k * A.k_stride]),
                           mk_bf16_to_float(B.data[n * B.outer_stride + k * B.k_stride]), sum);
            C[m * ldc + n] = K > 0 ? canonical(sum) : sum;
        }
}

/* A call with scratch of its exact size at an odd address. */
static void gemm(int64_t M, int64_t N, int64_t K, mk_gemm_operand A, mk_gemm_operand B, float *C, int64_t ldc, bool accumulate)
{
    char *scratch = malloc(mk_gemm_scratch_bytes() + 1);
    memset(scratch, 0xff, mk_gemm_scratch_bytes() + 1);
    mk_gemm_bf16(M, N, K, A, B, C, ldc, accumulate, scratch + 1);
    free(scratch);
}

static float *random_floats(uint64_t *seed, int64_t count)
{
    float *x = malloc((size_t)count * sizeof *x + 1);
    for (int64_t i = 0; i < count; i++)
        x[i] = (float)test_normal(seed);
    return x;
}

static float *copy_floats(const float *x, int64_t count)
{
    float *copy = malloc((size_t)count * sizeof *copy + 1);
    memcpy(copy, x, (size_t)count * sizeof *copy);
    return copy;
}

#define FOR_EACH_VARIANT(isa)                                                                                      \
    for (int isa = 0; isa < MK_NUM_GEMM_VARIANTS; isa++)                                                           \
        if (mk_gemm_force((mk_gemm_isa)isa))

/* All variants against the plain loop. The gap between C's rows is compared too: nothing may be written there. */
static void check_problem(uint64_t *seed, int64_t M, int64_t N, int64_t K, order a_order, order b_order, filling fill)
{
    operand A = make_operand(seed, M, K, a_order, fill), B = make_operand(seed, N, K, b_order, fill);
    const int64_t ldc = N + test_below(seed, 4), count = M * ldc;
    float *start = random_floats(seed, count);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        float *want = copy_floats(start, count);
        plain_loop(M, N, K, A.view, B.view, want, ldc, accumulate);
        FOR_EACH_VARIANT(isa) {
            float *got = copy_floats(start, count);
            gemm(M, N, K, A.view, B.view, got, ldc, accumulate);
            if (memcmp(got, want, (size_t)count * sizeof *got) != 0)
                TEST_FAILED("%s: M %lld N %lld K %lld, orders %d %d, filling %d, accumulate %d", mk_gemm_variant(), (long long)M,
                            (long long)N, (long long)K, (int)a_order, (int)b_order, (int)fill, accumulate);
            free(got);
        }
        free(want);
    }
    free(start);
    free(A.memory);
    free(B.memory);
}

/* ------------------------------------------------------------------------------------------------------- threads -- */

/* Comes first, so that the threads choose the variant, all at once. */
enum { THREAD_M = 40, THREAD_N = 70, THREAD_K = 300 };
typedef struct worker { mk_gemm_operand A, B; float C[THREAD_M * THREAD_N]; } worker;

static void *run_worker(void *argument)
{
    worker *w = argument;
    for (int i = 0; i < 4; i++)
        gemm(THREAD_M, THREAD_N, THREAD_K, w->A, w->B, w->C, THREAD_N, false);
    return NULL;
}

TEST(many_threads)
{
    enum { NUM_THREADS = 4 };
    uint64_t seed = test_seed();
    operand A = make_operand(&seed, THREAD_M, THREAD_K, K_CONTIGUOUS, NORMAL);
    operand B = make_operand(&seed, THREAD_N, THREAD_K, K_CONTIGUOUS, NORMAL);
    static float want[THREAD_M * THREAD_N];
    plain_loop(THREAD_M, THREAD_N, THREAD_K, A.view, B.view, want, THREAD_N, false);
    static worker workers[NUM_THREADS];
    pthread_t threads[NUM_THREADS];
    for (int i = 0; i < NUM_THREADS; i++) {
        workers[i].A = A.view;
        workers[i].B = B.view;
        CHECK_EQ(pthread_create(&threads[i], NULL, run_worker, &workers[i]), 0);
    }
    for (int i = 0; i < NUM_THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK_BYTES(workers[i].C, want, sizeof want);
    }
    free(A.memory);
    free(B.memory);
}

/* ------------------------------------------------------------------------------------------------------- product -- */

TEST(variants)
{
    CHECK_EQ(mk_gemm_force(MK_GEMM_PORTABLE), true);
    CHECK_STR(mk_gemm_variant(), "portable");
    CHECK_EQ(mk_gemm_force(MK_NUM_GEMM_VARIANTS), false);
    CHECK_STR(mk_gemm_variant(), "portable");
    FOR_EACH_VARIANT(isa)
        printf("  variant: %s\n", mk_gemm_variant());
}

TEST(equals_plain_loop_any_shape)
{
    uint64_t seed = test_seed();
    for (int round = 0; round < 300; round++) {
        int64_t M = test_below(&seed, 36), N = test_below(&seed, 80), K = test_below(&seed, 60);
        check_problem(&seed, M, N, K, (order)test_below(&seed, NUM_ORDERS), (order)test_below(&seed, NUM_ORDERS),
                      (filling)test_below(&seed, NUM_FILLINGS));
    }
}

TEST(equals_plain_loop_every_order)
{
    uint64_t seed = test_seed();
    for (int a = 0; a < NUM_ORDERS; a++)
        for (int b = 0; b < NUM_ORDERS; b++) {
            check_problem(&seed, 48, 64, 64, (order)a, (order)b, NORMAL);
            check_problem(&seed, 21, 55, 39, (order)a, (order)b, ANY_BITS);
        }
}

/* Several blocks along k (256) and along the rows of A (512), with and without a rest. */
TEST(equals_plain_loop_blocks)
{
    uint64_t seed = test_seed();
    check_problem(&seed, 24, 48, 512, K_CONTIGUOUS, K_CONTIGUOUS, NORMAL);
    check_problem(&seed, 19, 41, 777, K_CONTIGUOUS, OUTER_CONTIGUOUS, NORMAL);
    check_problem(&seed, 19, 41, 257, OUTER_CONTIGUOUS, OUTER_CONTIGUOUS, WIDE);
    check_problem(&seed, 1024, 33, 20, K_CONTIGUOUS, K_CONTIGUOUS, NORMAL);
    check_problem(&seed, 513, 17, 272, OUTER_CONTIGUOUS, EVERY_SECOND_ROW, NORMAL);
}

TEST(nothing_to_do)
{
    uint64_t seed = test_seed();
    const mk_gemm_operand nowhere = {NULL, 0, 0};
    FOR_EACH_VARIANT(isa) {
        gemm(0, 5, 5, nowhere, nowhere, NULL, 5, false);
        gemm(5, 0, 5, nowhere, nowhere, NULL, 0, true);
        float *C = random_floats(&seed, 35), *old = copy_floats(C, 35);
        gemm(5, 6, 0, nowhere, nowhere, C, 7, true);
        CHECK_BYTES(C, old, 35 * sizeof *C);
        gemm(5, 6, 0, nowhere, nowhere, C, 7, false);
        for (int i = 0; i < 35; i++)
            CHECK_EQ(C[i] == 0.0f, i % 7 < 6);
        free(C);
        free(old);
    }
}

/* One product, one addition: where exponents are chosen so that the sum cancels, ties, overflows or is subnormal. */
TEST(single_fma_is_exact)
{
    enum { SIZE = 64 };
    uint64_t seed = test_seed();
    for (int round = 0; round < 60; round++) {
        operand A = make_operand(&seed, SIZE, 1, K_CONTIGUOUS, WIDE), B = make_operand(&seed, SIZE, 1, K_CONTIGUOUS, WIDE);
        static float start[SIZE * SIZE], want[SIZE * SIZE], got[SIZE * SIZE];
        for (int64_t i = 0; i < SIZE * SIZE; i++) { /* near the product, or above it by up to 2^26 */
            double product = (double)mk_bf16_to_float(A.view.data[i / SIZE * A.view.outer_stride]) *
                             (double)mk_bf16_to_float(B.view.data[i % SIZE * B.view.outer_stride]);
            start[i] = (float)ldexp(product * (test_uniform(&seed) - 0.5), (int)test_below(&seed, 28) - 1);
        }
        memcpy(want, start, sizeof want);
        plain_loop(SIZE, SIZE, 1, A.view, B.view, want, SIZE, true);
        FOR_EACH_VARIANT(isa) {
            memcpy(got, start, sizeof got);
            gemm(SIZE, SIZE, 1, A.view, B.view, got, SIZE, true);
            CHECK_BYTES(got, want, sizeof got);
        }
        free(A.memory);
        free(B.memory);
    }
}

/* Subnormal ties: the product is half a unit of the smallest subnormal, give or take a little. */
TEST(subnormal_ties)
{
    const float a[] = {0x1p-75f, -0x1p-75f, 0x1.02p-75f, 0x1.fep-76f}, b[] = {0x1p-75f, 0x1.02p-75f, 0x1.fep-76f, 0x1.fep-20f};
    mk_bf16 A[4], B[4];
    for (int i = 0; i < 4; i++) {
        A[i] = mk_float_to_bf16(a[i]);
        B[i] = mk_float_to_bf16(b[i]);
    }
    for (int units = -5; units <= 5; units++) {
        float want[16], got[16];
        for (int i = 0; i < 16; i++)
            want[i] = fmaf(a[i / 4], b[i % 4], (float)units * 0x1p-149f);
        FOR_EACH_VARIANT(isa) {
            for (int i = 0; i < 16; i++)
                got[i] = (float)units * 0x1p-149f;
            gemm(4, 4, 1, (mk_gemm_operand){A, 1, 1}, (mk_gemm_operand){B, 1, 1}, got, 4, true);
            CHECK_BYTES(got, want, sizeof got);
        }
    }
}

/* Any cut, along M, N and K at once, gives the bits of the whole. */
TEST(cuts_do_not_change_bits)
{
    enum { M = 70, N = 130, K = 600 };
    uint64_t seed = test_seed();
    operand A = make_operand(&seed, M, K, K_CONTIGUOUS, NORMAL), B = make_operand(&seed, N, K, OUTER_CONTIGUOUS, NORMAL);
    static float want[M * N], got[M * N];
    FOR_EACH_VARIANT(isa) {
        gemm(M, N, K, A.view, B.view, want, N, false);
        for (int round = 0; round < 10; round++) {
            memset(got, 0xff, sizeof got);
            int64_t m_cut[3] = {0, test_below(&seed, M + 1), M}, n_cut[3] = {0, test_below(&seed, N + 1), N};
            int64_t k_cut[3] = {0, test_below(&seed, K + 1), K};
            for (int part = 0; part < 8; part++) {
                const int k = part >> 2, i = part >> 1 & 1, j = part & 1; /* k slowest: the first part starts the sums */
                const int64_t m0 = m_cut[i], n0 = n_cut[j], k0 = k_cut[k];
                mk_gemm_operand a = A.view, b = B.view;
                a.data += m0 * a.outer_stride + k0 * a.k_stride;
                b.data += n0 * b.outer_stride + k0 * b.k_stride;
                gemm(m_cut[i + 1] - m0, n_cut[j + 1] - n0, k_cut[k + 1] - k0, a, b, got + m0 * N + n0, N, k > 0);
            }
            CHECK_BYTES(got, want, sizeof got);
        }
    }
    free(A.memory);
    free(B.memory);
}

/* NaN and infinity in one row of A and one row of B reach that row and that column of C, and nothing else. */
TEST(nan_stays_in_its_row)
{
    enum { M = 29, N = 75, K = 40, BAD_M = 17, BAD_N = 40 };
    uint64_t seed = test_seed();
    operand A = make_operand(&seed, M, K, K_CONTIGUOUS, NORMAL), B = make_operand(&seed, N, K, OUTER_CONTIGUOUS, NORMAL);
    static float clean[M * N], got[M * N];
    gemm(M, N, K, A.view, B.view, clean, N, false);
    ((mk_bf16 *)A.view.data)[BAD_M * A.view.outer_stride + 3] = 0xffa1; /* a signalling NaN with a payload */
    ((mk_bf16 *)B.view.data)[BAD_N * B.view.outer_stride + 39 * B.view.k_stride] = 0x7f80;
    FOR_EACH_VARIANT(isa) {
        gemm(M, N, K, A.view, B.view, got, N, false);
        for (int i = 0; i < M * N; i++) {
            uint32_t bits;
            memcpy(&bits, &got[i], sizeof bits);
            if (i / N == BAD_M)
                CHECK_EQ(bits, 0x7fc00000);
            else if (i % N == BAD_N)
                CHECK_EQ(bits & 0x7fffffff, 0x7f800000);
            else
                CHECK_BYTES(&got[i], &clean[i], sizeof(float));
        }
    }
    free(A.memory);
    free(B.memory);
}

/* ---------------------------------------------------------------------------------------------------------- bf16 -- */

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Every bf16 widens to its own upper half and comes back; the points around the middle to the next one round as they must. */
TEST(bf16_all_patterns)
{
    for (uint32_t x = 0; x < 0x10000; x++) {
        const uint32_t wide = x << 16;
        if (bits_of(mk_bf16_to_float((mk_bf16)x)) != wide) /* no call moves a NaN through a register that quiets it */
            TEST_FAILED("%04x widens to %08x", x, bits_of(mk_bf16_to_float((mk_bf16)x)));
        if ((x & 0x7fff) > 0x7f80) { /* NaN: stays, keeps its sign, becomes quiet, whatever the lost bits are */
            CHECK_EQ(mk_float_to_bf16(float_of(wide)), x | 0x40);
            CHECK_EQ(mk_float_to_bf16(float_of(wide | 0xffff)), x | 0x40);
            continue;
        }
        CHECK_EQ(mk_float_to_bf16(float_of(wide)), x);
        if ((x & 0x7fff) == 0x7f80) {
            CHECK_EQ(mk_float_to_bf16(float_of(wide | 1)), x | 0x40); /* a NaN whose payload is in the lost bits */
            continue;
        }
        CHECK_EQ(mk_float_to_bf16(float_of(wide | 0x7fff)), x);
        CHECK_EQ(mk_float_to_bf16(float_of(wide | 0x8000)), x + (x & 1));
        CHECK_EQ(mk_float_to_bf16(float_of(wide | 0x8001)), x + 1); /* the largest goes to infinity */
        CHECK_EQ(mk_float_to_bf16(float_of(wide | 0xffff)), x + 1);
        CHECK_EQ(bits_of(mk_round_to_bf16(float_of(wide | 0x8000))), (x + (x & 1)) << 16);
    }
}

/* No bf16 is nearer than the one chosen, for random numbers, in exact arithmetic. */
TEST(bf16_is_nearest)
{
    uint64_t seed = test_seed();
    for (int i = 0; i < 1000000; i++) {
        const uint32_t bits = (uint32_t)test_random(&seed);
        if ((bits & 0x7f800000) >= 0x7f000000)
            continue; /* near infinity distances are not what decides; see above */
        const double x = (double)float_of(bits);
        const uint32_t below = bits & 0xffff0000, chosen = (uint32_t)mk_float_to_bf16(float_of(bits)) << 16;
        const double to_below = fabs((double)float_of(below) - x), to_above = fabs((double)float_of(below + 0x10000) - x);
        const bool even_is_below = (below & 0x10000) == 0;
        const bool want_below = to_below < to_above || (to_below == to_above && even_is_below);
        CHECK_EQ(chosen, want_below ? below : below + 0x10000);
    }
}

int main(int argc, char **argv) { return test_main(argc, argv); }
