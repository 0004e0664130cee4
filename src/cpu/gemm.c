/* Matrix product of the CPU backend; see gemm.h for the contract on bits.
 *
 * In: strided bf16 operands. Out: fp32 C. Both operands are widened to fp32 and packed into panels, [k][rows of a tile], which the
 * micro-kernel ("tile") reads in a straight line while the tile's sums stay in registers:
 *
 *   for each DEPTH columns of k                 A block [BLOCK_ROWS / mr panels][DEPTH][mr]   stays in L2
 *     for each BLOCK_ROWS rows of A: pack         B panel [DEPTH][nr]                           stays in L1
 *       for each nr rows of B: pack one panel
 *         for each panel of A: tile, C[mr, nr] += A panel^T B panel
 *
 * A is packed once, and so is B unless M > BLOCK_ROWS. Blocking cannot change bits: between two blocks of k the sum waits in C,
 * as the fp32 number it was in the register. */
#include "cpu/gemm.h"

#include <math.h>
#include <stdatomic.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#include <immintrin.h>
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx2,fma")))
#endif

/* Complete unrolling is what keeps a tile's sums in registers. */
#define UNROLL _Pragma("GCC unroll 16")

enum {
    DEPTH = 256,      /* of a block along k: a B panel of 32 rows is 32 KiB */
    BLOCK_ROWS = 512, /* of A: a block is 512 KiB */
    MAX_MR = 8,
    MAX_NR = 32,
    A_FLOATS = (BLOCK_ROWS + MAX_MR) * DEPTH + 16, /* the last panel may be padded; 16: pack_avx2's overhang */
    B_FLOATS = MAX_NR * DEPTH,
    ALIGNMENT = 64,
};

/* Packs rows [0, width) of `src`, k in [0, depth), into panel[k][width]. `rows` >= 1 rows exist; lanes past them are filled with
 * anything, because the sums they enter are dropped. */
typedef void pack_fn(mk_gemm_operand src, int64_t rows, int64_t depth, int width, float *panel);

/* C[mr, nr] = (load ? C : 0) + a^T b over `depth`; a [depth][mr], b [depth][nr], 64-byte aligned. */
typedef void tile_fn(int64_t depth, const float *a, const float *b, float *c, int64_t ldc, bool load);

typedef struct variant {
    const char *name;
    int mr, nr;
    pack_fn *pack;
    tile_fn *tile;
} variant;

/* The operand that starts at x's element (i, k). */
static mk_gemm_operand offset(mk_gemm_operand x, int64_t i, int64_t k)
{
    x.data += i * x.outer_stride + k * x.k_stride;
    return x;
}

/* ---------------------------------------------------------------------------------------------------- portable -- */

/* Lanes [lane, lane_end) of a panel, k from `k` on. */
static void pack_lanes(mk_gemm_operand src, int64_t rows, int64_t k, int64_t depth, int lane, int lane_end, int width, float *panel)
{
    for (; k < depth; k++)
        for (int i = lane; i < lane_end; i++)
            panel[k * width + i] = i < rows ? mk_bf16_to_float(src.data[i * src.outer_stride + k * src.k_stride]) : 0.0f;
}

static void pack_portable(mk_gemm_operand src, int64_t rows, int64_t depth, int width, float *panel)
{
    pack_lanes(src, rows, 0, depth, 0, width, width, panel);
}

/* fmaf(a, b, c) for a and b that came from bf16, also where the processor has no fma (a call into libm would take its place).
 * In double the product is exact: 16 bits, and no exponent is out of range. The sum is then rounded twice, to 53 and to 24 bits,
 * which equals rounding once: for normal results because 53 >= 2 * 24 + 2; for subnormal ones because the sum is exact in
 * double, unless the product is below 2^-163 and c, a multiple of 2^-149, is the result either way. */
static inline float fma_exact(float a, float b, float c)
{
#ifdef __FP_FAST_FMAF
    return __builtin_fmaf(a, b, c);
#else
    return (float)((double)a * (double)b + (double)c);
#endif
}

enum { PORTABLE_MR = 4, PORTABLE_NR = 4 };

static void tile_portable(int64_t depth, const float *a, const float *b, float *c, int64_t ldc, bool load)
{
    float acc[PORTABLE_MR][PORTABLE_NR];
    for (int i = 0; i < PORTABLE_MR; i++)
        for (int j = 0; j < PORTABLE_NR; j++)
            acc[i][j] = load ? c[i * ldc + j] : 0.0f;
    for (int64_t k = 0; k < depth; k++, a += PORTABLE_MR, b += PORTABLE_NR)
        UNROLL for (int i = 0; i < PORTABLE_MR; i++)
            UNROLL for (int j = 0; j < PORTABLE_NR; j++)
                acc[i][j] = fma_exact(a[i], b[j], acc[i][j]);
    for (int i = 0; i < PORTABLE_MR; i++)
        for (int j = 0; j < PORTABLE_NR; j++)
            c[i * ldc + j] = isnan(acc[i][j]) ? NAN : acc[i][j];
}

#ifdef HAVE_X86
/* -------------------------------------------------------------------------------------------------------- avx2 -- */

/* Transposes 8 x 8 words of 32 bits. */
TARGET_AVX2 static inline __attribute__((always_inline)) void transpose_8x8(__m256i r[8])
{
    __m256i t[8];
    UNROLL for (int i = 0; i < 8; i += 2) { /* within 128-bit halves: pairs of rows */
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) { /* fours of rows: columns 0..3, with 4..7 in the upper half */
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
    UNROLL for (int i = 0; i < 8; i++)
        r[i] = t[i];
}

/* Eight rows with k contiguous, k in [0, depth) by sixteens; returns the first k not done. A word of 32 bits holds two
 * neighbouring k, so half the transposes do, and widening comes after them: a shift for even k, a mask for odd k. */
TARGET_AVX2 static int64_t pack_rows_avx2(mk_gemm_operand src, int64_t rows, int64_t depth, int width, float *panel)
{
    const __m256i odd = _mm256_set1_epi32((int)0xffff0000u);
    int64_t k = 0;
    for (; k + 16 <= depth; k += 16) {
        __m256i r[8];
        UNROLL for (int i = 0; i < 8; i++) { /* missing rows: the last one again */
            const mk_bf16 *row = src.data + (i < rows ? i : rows - 1) * src.outer_stride;
            r[i] = _mm256_loadu_si256((const __m256i *)(row + k));
        }
        transpose_8x8(r);
        UNROLL for (int i = 0; i < 8; i++) {
            float *out = panel + (k + 2 * i) * width;
            _mm256_storeu_ps(out, _mm256_castsi256_ps(_mm256_slli_epi32(r[i], 16)));
            _mm256_storeu_ps(out + width, _mm256_castsi256_ps(_mm256_and_si256(r[i], odd)));
        }
    }
    return k;
}

/* Lanes [0, lanes), eight by eight, with the row index contiguous. */
TARGET_AVX2 static void pack_columns_avx2(mk_gemm_operand src, int lanes, int64_t depth, int width, float *panel)
{
    for (int64_t k = 0; k < depth; k++)
        for (int lane = 0; lane < lanes; lane += 8) {
            const mk_bf16 *from = src.data + k * src.k_stride + lane;
            __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
            _mm256_storeu_ps(panel + k * width + lane, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
        }
}

/* Width: a multiple of 8, or less than 8. In the latter case 8 lanes are stored nevertheless: what hangs over is overwritten by
 * the next k, after the panel's end by the next panel. */
static void pack_avx2(mk_gemm_operand src, int64_t rows, int64_t depth, int width, float *panel)
{
    int lane = 0;
    if (src.outer_stride == 1) {
        while (lane < width && lane + 8 <= rows)
            lane += 8;
        pack_columns_avx2(src, lane, depth, width, panel);
    } else if (src.k_stride == 1) {
        for (; lane < width && lane < rows; lane += 8) {
            int64_t k = pack_rows_avx2(offset(src, lane, 0), rows - lane, depth, width, panel + lane);
            pack_lanes(src, rows, k, depth, lane, width < lane + 8 ? width : lane + 8, width, panel);
        }
    }
    pack_lanes(src, rows, 0, depth, lane, width, width, panel);
}

/* 6 x 16: twelve sums, two vectors of b, one of a, of sixteen registers. */
TARGET_AVX2 static void tile_avx2(int64_t depth, const float *a, const float *b, float *c, int64_t ldc, bool load)
{
    __m256 acc[6][2];
    UNROLL for (int i = 0; i < 6; i++)
        UNROLL for (int j = 0; j < 2; j++)
            acc[i][j] = load ? _mm256_loadu_ps(c + i * ldc + 8 * j) : _mm256_setzero_ps();
    for (int64_t k = 0; k < depth; k++, a += 6, b += 16) {
        __m256 b0 = _mm256_load_ps(b), b1 = _mm256_load_ps(b + 8);
        UNROLL for (int i = 0; i < 6; i++) {
            __m256 ai = _mm256_broadcast_ss(a + i);
            acc[i][0] = _mm256_fmadd_ps(ai, b0, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(ai, b1, acc[i][1]);
        }
    }
    UNROLL for (int i = 0; i < 6; i++)
        UNROLL for (int j = 0; j < 2; j++) {
            __m256 is_nan = _mm256_cmp_ps(acc[i][j], acc[i][j], _CMP_UNORD_Q);
            _mm256_storeu_ps(c + i * ldc + 8 * j, _mm256_blendv_ps(acc[i][j], _mm256_set1_ps(NAN), is_nan));
        }
}

/* ------------------------------------------------------------------------------------------------------ avx512 -- */

/* 8 x 32: sixteen sums are enough to hide an fma's latency, and fit the shapes of models without edges. */
TARGET_AVX512 static void tile_avx512(int64_t depth, const float *a, const float *b, float *c, int64_t ldc, bool load)
{
    __m512 acc[8][2];
    UNROLL for (int i = 0; i < 8; i++)
        UNROLL for (int j = 0; j < 2; j++)
            acc[i][j] = load ? _mm512_loadu_ps(c + i * ldc + 16 * j) : _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k++, a += 8, b += 32) {
        __m512 b0 = _mm512_load_ps(b), b1 = _mm512_load_ps(b + 16);
        UNROLL for (int i = 0; i < 8; i++) {
            __m512 ai = _mm512_set1_ps(a[i]);
            acc[i][0] = _mm512_fmadd_ps(ai, b0, acc[i][0]);
            acc[i][1] = _mm512_fmadd_ps(ai, b1, acc[i][1]);
        }
    }
    UNROLL for (int i = 0; i < 8; i++)
        UNROLL for (int j = 0; j < 2; j++) {
            __mmask16 is_nan = _mm512_cmp_ps_mask(acc[i][j], acc[i][j], _CMP_UNORD_Q);
            _mm512_storeu_ps(c + i * ldc + 16 * j, _mm512_mask_mov_ps(acc[i][j], is_nan, _mm512_set1_ps(NAN)));
        }
}
#endif

/* --------------------------------------------------------------------------------------------- choice of variant -- */

static const variant variants[MK_NUM_GEMM_VARIANTS] = {
    [MK_GEMM_PORTABLE] = {"portable", PORTABLE_MR, PORTABLE_NR, pack_portable, tile_portable},
#ifdef HAVE_X86
    [MK_GEMM_AVX2] = {"avx2", 6, 16, pack_avx2, tile_avx2},
    [MK_GEMM_AVX512] = {"avx512", 8, 32, pack_avx2, tile_avx512},
#endif
};

/* Relaxed is enough: it points to constant data, and two threads that choose at once choose the same. */
static _Atomic(const variant *) chosen_variant;

static bool is_supported(mk_gemm_isa isa)
{
#ifdef HAVE_X86
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == MK_GEMM_AVX2)
        return avx2;
    if (isa == MK_GEMM_AVX512)
        return avx2 && __builtin_cpu_supports("avx512f");
#endif
    return isa == MK_GEMM_PORTABLE;
}

bool mk_gemm_force(mk_gemm_isa isa)
{
    if (!is_supported(isa))
        return false;
    atomic_store_explicit(&chosen_variant, &variants[isa], memory_order_relaxed);
    return true;
}

static const variant *current_variant(void)
{
    const variant *v = atomic_load_explicit(&chosen_variant, memory_order_relaxed);
    for (int isa = MK_NUM_GEMM_VARIANTS - 1; !v; isa--)
        if (is_supported((mk_gemm_isa)isa)) {
            v = &variants[isa];
            atomic_store_explicit(&chosen_variant, v, memory_order_relaxed);
        }
    return v;
}

const char *mk_gemm_variant(void)
{
    return current_variant()->name;
}

/* ------------------------------------------------------------------------------------------------------ blocking -- */

size_t mk_gemm_scratch_bytes(void)
{
    return (A_FLOATS + B_FLOATS) * sizeof(float) + ALIGNMENT;
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* A tile that hangs over C's edge goes through a copy of full size. */
static void edge_tile(const variant *v, int64_t rows, int64_t cols, int64_t depth, const float *a, const float *b, float *c, int64_t ldc,
                      bool load)
{
    float whole[MAX_MR * MAX_NR] = {0};
    for (int64_t i = 0; load && i < rows; i++)
        memcpy(whole + i * v->nr, c + i * ldc, (size_t)cols * sizeof(float));
    v->tile(depth, a, b, whole, v->nr, load);
    for (int64_t i = 0; i < rows; i++)
        memcpy(c + i * ldc, whole + i * v->nr, (size_t)cols * sizeof(float));
}

/* C[rows, N] += A block (packed) times B, over one block of k. */
static void multiply_block(const variant *v, int64_t rows, int64_t N, int64_t depth, const float *a_block, mk_gemm_operand B,
                           float *b_panel, float *C, int64_t ldc, bool load)
{
    for (int64_t n = 0; n < N; n += v->nr) {
        v->pack(offset(B, n, 0), N - n, depth, v->nr, b_panel);
        for (int64_t m = 0; m < rows; m += v->mr) {
            const float *a_panel = a_block + m * depth;
            float *c = C + m * ldc + n;
            if (m + v->mr <= rows && n + v->nr <= N)
                v->tile(depth, a_panel, b_panel, c, ldc, load);
            else
                edge_tile(v, min64(v->mr, rows - m), min64(v->nr, N - n), depth, a_panel, b_panel, c, ldc, load);
        }
    }
}

void mk_gemm_bf16(int64_t M, int64_t N, int64_t K, mk_gemm_operand A, mk_gemm_operand B, float *C, int64_t ldc, bool accumulate,
                  void *scratch)
{
    const variant *v = current_variant();
    float *a_block = (float *)(((uintptr_t)scratch + ALIGNMENT - 1) & ~(uintptr_t)(ALIGNMENT - 1));
    float *b_panel = a_block + A_FLOATS;
    if (K <= 0 && !accumulate && N > 0)
        for (int64_t m = 0; m < M; m++)
            memset(C + m * ldc, 0, (size_t)N * sizeof(float));
    for (int64_t k = 0; k < K && N > 0; k += DEPTH) {
        int64_t depth = min64(DEPTH, K - k);
        for (int64_t first = 0; first < M; first += BLOCK_ROWS) {
            int64_t rows = min64(BLOCK_ROWS, M - first);
            for (int64_t m = 0; m < rows; m += v->mr)
                v->pack(offset(A, first + m, k), rows - m, depth, v->mr, a_block + m * depth);
            multiply_block(v, rows, N, depth, a_block, offset(B, 0, k), b_panel, C + first * ldc, ldc, accumulate || k > 0);
        }
    }
}
