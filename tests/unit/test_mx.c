/* MXFP8 quantisation against its definition in double: the 127 sizes of e4m3 written out, the nearest one searched, every bf16 with every
 * scale, every amax; blocks with zeros, NaN, infinities and both ends of the scale range; rows, columns, matrices and the API's layout. */
#include "cpu/mx.h"
#include "test.h"

static double bf16_value(uint16_t x)
{
    int exponent = x >> 7 & 0xff, mantissa = x & 0x7f;
    double size = exponent ? ldexp(128 + mantissa, exponent - 127 - 7) : ldexp(mantissa, -126 - 7);
    return x & 0x8000 ? -size : size;
}

/* Code 0 .. 126 of e4m3. */
static double e4m3_value(int code)
{
    int exponent = code >> 3, mantissa = code & 7;
    return exponent ? ldexp(8 + mantissa, exponent - 7 - 3) : ldexp(mantissa, -6 - 3);
}

/* The nearest code, ties to the even one, 126 (448) at most. */
static int e4m3_nearest(double size)
{
    int low = 0, high = 126;
    if (size >= 448)
        return 126;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (e4m3_value(middle) <= size)
            low = middle;
        else
            high = middle;
    }
    double below = size - e4m3_value(low), above = e4m3_value(high) - size;
    return below < above || (below == above && low % 2 == 0) ? low : high;
}

/* The smallest allowed exponent e with amax <= 448 * 2^e, as a byte. */
static int scale_byte(double amax)
{
    int e = -39;
    while (e < 119 && amax > ldexp(448, e))
        e++;
    return e + 127;
}

static bool is_finite_bf16(uint16_t x) { return (x & 0x7f80) != 0x7f80; }

TEST(every_bf16_with_every_scale_is_rounded_to_the_nearest_element)
{
    for (int scale = MK_MX_SCALE_MIN; scale <= MK_MX_SCALE_MAX; scale++)
        for (int x = 0; x < 0x10000; x++) {
            int is = mk_mx_encode((uint16_t)x, (uint8_t)scale), should_be = 0x7f;
            if (is_finite_bf16((uint16_t)x))
                should_be = e4m3_nearest(ldexp(fabs(bf16_value((uint16_t)x)), 127 - scale)) | (x & 0x8000 ? 0x80 : 0);
            if (is != should_be) {
                TEST_FAILED("bf16 0x%04x with scale %d is 0x%02x, expected 0x%02x", x, scale, is, should_be);
                return;
            }
        }
}

TEST(every_amax_has_the_smallest_scale_that_holds_it)
{
    for (int x = 0; x < 0x7f80; x++)
        if (mk_mx_scale((uint16_t)x) != scale_byte(bf16_value((uint16_t)x))) {
            TEST_FAILED("amax 0x%04x has scale %d, expected %d", x, mk_mx_scale((uint16_t)x), scale_byte(bf16_value((uint16_t)x)));
            return;
        }
    CHECK_EQ(mk_mx_scale(0), 88);
    CHECK_EQ(mk_mx_scale(0x7f7f), 246);
}

TEST(widening_is_exact_for_every_element_and_scale)
{
    for (int scale = MK_MX_SCALE_MIN; scale <= MK_MX_SCALE_MAX; scale++)
        for (int code = 0; code < 256; code++) {
            uint16_t wide = mk_mx_widen((uint8_t)code, (uint8_t)scale);
            if ((code & 0x7f) == 0x7f)
                CHECK(!is_finite_bf16(wide) && (wide & 0x7f));
            else {
                double value = ldexp(e4m3_value(code & 0x7f), scale - 127);
                CHECK(is_finite_bf16(wide) && fabs(bf16_value(wide)) == value && (wide >> 15) == (code >> 7));
            }
        }
}

TEST(scales_of_others_widen_too)
{
    CHECK_EQ(mk_mx_widen(0, 0), 0);          /* how others scale a block of zeros */
    CHECK_EQ(mk_mx_widen(0x80, 0), 0x8000);
    CHECK_EQ(mk_mx_widen(0x38, 127), 0x3f80); /* 1 */
    CHECK_EQ(mk_mx_widen(0x38, 1), 0x0080);   /* 2^-126 */
    CHECK_EQ(mk_mx_widen(0x38, 0), 0x0040);   /* 2^-127, a subnormal bf16 */
    CHECK_EQ(mk_mx_widen(0x7e, 254), 0x7f80); /* 448 * 2^127: infinity */
    for (int code = 0; code < 256; code++)
        CHECK((mk_mx_widen((uint8_t)code, 255) & 0x7fff) > 0x7f80); /* NaN */
}

TEST(widened_elements_quantise_to_themselves)
{
    for (int scale = MK_MX_SCALE_MIN; scale <= MK_MX_SCALE_MAX; scale++)
        for (int code = 0; code < 256; code++)
            if ((code & 0x7f) != 0x7f)
                CHECK_EQ(mk_mx_encode(mk_mx_widen((uint8_t)code, (uint8_t)scale), (uint8_t)scale), code);
}

/* --- blocks -------------------------------------------------------------------------------------------------------------- */

/* A random block: sizes around 2^centre, some of them special. */
static void draw_block(uint16_t *x, uint64_t *state)
{
    int centre = (int)test_below(state, 256), kind = (int)test_below(state, 8);
    for (int i = 0; i < 32; i++) {
        int64_t exponent = centre + test_below(state, 17) - 12;
        exponent = exponent < 0 ? 0 : exponent > 254 ? 254 : exponent;
        x[i] = (uint16_t)((test_random(state) & 0x807f) | (uint64_t)exponent << 7);
        if (kind == 0)
            x[i] &= 0x8000; /* zeros of both signs */
        if (kind == 1 && test_below(state, 4) == 0)
            x[i] = (uint16_t)(0x7f80 | (test_random(state) & 0x807f)); /* infinities and NaN */
        if (kind == 2)
            x[i] = (uint16_t)(0x7f80 | (test_random(state) & 0x807f));
        if (kind == 3)
            x[i] &= 0x807f; /* subnormal numbers */
        if (kind == 4 && test_below(state, 2))
            x[i] = (uint16_t)(0x7f7f | (test_random(state) & 0x8000)); /* the largest ones */
    }
}

typedef struct block { uint8_t scale, code[32]; uint16_t wide[32]; int not_finite; } block;

/* The definition again. x: `count` numbers, zeros up to 32. */
static block block_of(const uint16_t *x, int64_t step, int64_t count)
{
    block b = {0, {0}, {0}, 0};
    double amax = 0;
    for (int64_t i = 0; i < count; i++)
        if (is_finite_bf16(x[i * step]))
            amax = fmax(amax, fabs(bf16_value(x[i * step])));
    b.scale = (uint8_t)scale_byte(amax);
    for (int64_t i = 0; i < count; i++) {
        uint16_t v = x[i * step];
        if (!is_finite_bf16(v)) {
            b.code[i] = 0x7f;
            b.wide[i] = 0x7fc0;
            b.not_finite++;
            continue;
        }
        int code = e4m3_nearest(ldexp(fabs(bf16_value(v)), 127 - b.scale));
        float wide = (float)ldexp(e4m3_value(code), b.scale - 127);
        uint32_t bits;
        memcpy(&bits, &wide, 4);
        b.code[i] = (uint8_t)(code | (v >> 8 & 0x80));
        b.wide[i] = (uint16_t)(bits >> 16 | (v & 0x8000));
    }
    return b;
}

TEST(rows_are_quantised_widened_and_rounded_block_by_block)
{
    enum { BLOCKS = 2000, N = 32 * BLOCKS };
    static uint16_t x[N], wide[N], rounded[N];
    static uint8_t row[N + BLOCKS];
    uint64_t state = test_seed();
    int64_t not_finite = 0;
    for (int b = 0; b < BLOCKS; b++)
        draw_block(x + 32 * b, &state);
    memset(row, 0xff, sizeof row);
    memset(wide, 0xff, sizeof wide);
    int64_t counted = mk_cpu_mx_quantise(x, N, row, row + N);
    mk_cpu_mx_widen(row, row + N, N, wide);
    CHECK_EQ(mk_cpu_mx_round(x, N, rounded), counted);
    CHECK_BYTES(rounded, wide, sizeof wide);
    for (int b = 0; b < BLOCKS; b++) {
        block want = block_of(x + 32 * b, 1, 32);
        CHECK_EQ(row[N + b], want.scale);
        CHECK_BYTES(row + 32 * b, want.code, 32);
        CHECK_BYTES(wide + 32 * b, want.wide, 64);
        not_finite += want.not_finite;
    }
    CHECK_EQ(counted, not_finite);
    CHECK(not_finite > 0);
    mk_cpu_mx_round(x, N, x); /* in place */
    CHECK_BYTES(x, wide, sizeof wide);
    mk_cpu_mx_round(x, N, rounded); /* NaN aside, what was rounded stays */
    CHECK_BYTES(rounded, wide, sizeof wide);
}

TEST(an_infinity_does_not_hurt_its_neighbours)
{
    uint16_t x[32], wide[32];
    for (int i = 0; i < 32; i++)
        x[i] = (uint16_t)(0x3f80 + i); /* 1 and a little more */
    x[7] = 0x7f80;
    x[9] = 0xff80;
    x[11] = 0x7fff;
    CHECK_EQ(mk_cpu_mx_round(x, 32, wide), 3);
    for (int i = 0; i < 32; i++)
        if (i == 7 || i == 9 || i == 11)
            CHECK_EQ(wide[i], 0x7fc0);
        else
            CHECK_LE(fabs(bf16_value(wide[i]) - bf16_value(x[i])), 0.0625 * bf16_value(x[i]));
}

TEST(S5_columns_are_quantised_in_blocks_of_32_rows_of_which_the_last_may_be_short)
{
    static const int64_t counts[] = {1, 31, 32, 33, 44, 64, 127, 128};
    enum { COLS = 100, STRIDE = 130 };
    uint64_t state = test_seed();
    static uint16_t x[128 * STRIDE], to[129 * COLS];
    for (int64_t i = 0; i < 128 * STRIDE / 32; i++)
        draw_block(x + 32 * i, &state);
    for (size_t s = 0; s < sizeof counts / sizeof *counts; s++) {
        int64_t rows = counts[s];
        memset(to, 0xff, sizeof to);
        mk_cpu_mx_round_columns(x, STRIDE, rows, COLS, to);
        for (int64_t c = 0; c < COLS; c++)
            for (int64_t r = 0; r < rows; r += 32) {
                int64_t n = rows - r < 32 ? rows - r : 32;
                block want = block_of(x + r * STRIDE + c, STRIDE, n);
                for (int64_t i = 0; i < n; i++)
                    CHECK_EQ(to[(r + i) * COLS + c], want.wide[i]);
            }
        for (int64_t i = rows * COLS; i < 129 * COLS; i++)
            CHECK_EQ(to[i], 0xffff);
    }
}

TEST(operands_are_quantised_along_k_however_they_lie)
{
    enum { N = 40, DEPTH = 96 };
    static const int64_t strides[][2] = {{DEPTH, 1}, {2 * DEPTH, 1}, {1, N}, {1, 2 * N}, {2, 2 * N}, {3 * DEPTH, 3}};
    uint64_t state = test_seed();
    static uint16_t x[N * DEPTH * 3], to[N * DEPTH];
    for (size_t i = 0; i < sizeof x / 64; i++)
        draw_block(x + 32 * i, &state);
    for (size_t s = 0; s < sizeof strides / sizeof *strides; s++) {
        mk_gemm_operand from = {x, strides[s][0], strides[s][1]};
        memset(to, 0xff, sizeof to);
        mk_gemm_operand is = mk_cpu_mx_round_operand(from, N, DEPTH, to);
        CHECK(is.data == to);
        for (int64_t i = 0; i < N; i++)
            for (int64_t k = 0; k < DEPTH; k += 32) {
                block want = block_of(x + i * from.outer_stride + k * from.k_stride, from.k_stride, 32);
                for (int64_t j = 0; j < 32; j++)
                    CHECK_EQ(is.data[i * is.outer_stride + (k + j) * is.k_stride], want.wide[j]);
            }
    }
}

/* Byte of the scale of (row, 32-column block), from the published format: [rows/128, cols/128, 32, 16]. */
static int64_t published_place(int64_t row, int64_t block_column, int64_t tiles_across)
{
    return ((row / 128) * tiles_across + block_column * 32 / 128) * 512 + (row % 32) * 16 + (row % 128 / 32) * 4 + block_column % 4;
}

static void check_matrix(const uint16_t *x, int64_t row_step, int64_t col_step, int64_t rows, int64_t cols, const uint8_t *data, const uint8_t *scales)
{
    int64_t across = (cols + 127) / 128, num_scales = (rows + 127) / 128 * across * 512, used = 0;
    CHECK_EQ(mk_mx_scale_bytes(rows, cols), num_scales);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < cols / 32; b++, used++) {
            block want = block_of(x + r * row_step + b * 32 * col_step, col_step, 32);
            CHECK_BYTES(data + r * cols + b * 32, want.code, 32);
            CHECK_EQ(scales[published_place(r, b, across)], want.scale);
        }
    int64_t padding = 0;
    for (int64_t t = 0; t < num_scales; t++)
        padding += scales[t] == 88;
    CHECK(padding >= num_scales - used);
}

TEST(matrices_have_both_quantisations_in_the_published_layout)
{
    static const int64_t shapes[][3] = {{1, 128, 256}, {2, 64, 192}, {3, 192, 64}, {1, 320, 128}};
    uint64_t state = test_seed();
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        int64_t count = shapes[s][0], rows = shapes[s][1], cols = shapes[s][2], n = count * rows * cols;
        uint16_t *x = malloc((size_t)n * 2), *wide = malloc((size_t)(rows * cols) * 2);
        uint8_t *data = malloc((size_t)n), *turned = malloc((size_t)n);
        int64_t bytes = mk_mx_scale_bytes(rows, cols), turned_bytes = mk_mx_scale_bytes(cols, rows);
        uint8_t *scales = malloc((size_t)(count * bytes)), *turned_scales = malloc((size_t)(count * turned_bytes));
        for (int64_t i = 0; i < n; i += 32)
            draw_block(x + i, &state);
        memset(scales, 0xff, (size_t)(count * bytes));
        memset(turned_scales, 0xff, (size_t)(count * turned_bytes));
        mk_mx_matrix m = {x, count, rows, cols, data, scales, turned, turned_scales};
        mk_cpu_mx_quantise_matrix(&m);
        for (int64_t i = 0; i < count; i++) {
            const uint16_t *source = x + i * rows * cols;
            check_matrix(source, cols, 1, rows, cols, data + i * rows * cols, scales + i * bytes);
            check_matrix(source, 1, cols, cols, rows, turned + i * rows * cols, turned_scales + i * turned_bytes);
            int64_t row = 32 * test_below(&state, rows / 32), col = 32 * test_below(&state, cols / 32), depth = cols - col;
            mk_cpu_mx_widen_matrix(data + i * rows * cols, scales + i * bytes, cols, row, rows - row, col, depth, wide);
            for (int64_t r = row; r < rows; r++)
                for (int64_t b = col; b < cols; b += 32) {
                    block want = block_of(source + r * cols + b, 1, 32);
                    CHECK_BYTES(wide + (r - row) * depth + b - col, want.wide, 64);
                }
        }
        free(x); free(wide); free(data); free(turned); free(scales); free(turned_scales);
    }
}

TEST(rows_are_half_of_bf16_and_aligned)
{
    for (int64_t n = 64; n <= 8192; n += 64) {
        CHECK_EQ(mk_mx_row_stride(n) % 16, 0);
        CHECK(mk_mx_row_stride(n) >= mk_mx_row_bytes(n) && mk_mx_row_stride(n) < mk_mx_row_bytes(n) + 16);
        CHECK_LE((double)mk_mx_row_bytes(n), 0.52 * 2 * (double)n);
    }
}

int main(int argc, char **argv) { return test_main(argc, argv); }
