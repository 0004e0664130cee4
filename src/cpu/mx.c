#include "cpu/mx.h"

/* Compiled twice, and chosen when the program starts: every operation is on one element and exact or rounded once, so that vectors of any
 * width give the same bits. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define VECTOR __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define VECTOR
#endif

/* Loops without branches over one block, which compilers turn into vector code. */
static inline __attribute__((always_inline)) uint8_t scale_of(const mk_bf16 *x)
{
    uint16_t amax = 0;
    for (int i = 0; i < MK_MX_BLOCK; i++)
        amax = mk_mx_amax(amax, x[i]);
    return mk_mx_scale(amax);
}

static inline __attribute__((always_inline)) int64_t count_not_finite(const mk_bf16 *x, int64_t n)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++)
        count += !mk_mx_is_finite(x[i]);
    return count;
}

VECTOR int64_t mk_cpu_mx_quantise(const mk_bf16 *from, int64_t n, uint8_t *elements, uint8_t *scales)
{
    for (int64_t b = 0; b < n; b += MK_MX_BLOCK) {
        uint8_t scale = scales[b / MK_MX_BLOCK] = scale_of(from + b);
        for (int64_t i = b; i < b + MK_MX_BLOCK; i++)
            elements[i] = mk_mx_encode(from[i], scale);
    }
    return count_not_finite(from, n);
}

VECTOR void mk_cpu_mx_widen(const uint8_t *elements, const uint8_t *scales, int64_t n, mk_bf16 *to)
{
    for (int64_t b = 0; b < n; b += MK_MX_BLOCK)
        for (int64_t i = b; i < b + MK_MX_BLOCK; i++)
            to[i] = mk_mx_widen(elements[i], scales[b / MK_MX_BLOCK]);
}

VECTOR int64_t mk_cpu_mx_round(const mk_bf16 *from, int64_t n, mk_bf16 *to)
{
    int64_t not_finite = count_not_finite(from, n);
    for (int64_t b = 0; b < n; b += MK_MX_BLOCK) {
        uint8_t scale = scale_of(from + b);
        for (int64_t i = b; i < b + MK_MX_BLOCK; i++)
            to[i] = mk_mx_widen(mk_mx_encode(from[i], scale), scale);
    }
    return not_finite;
}

enum { STRIP = 64 }; /* columns that share their way down the rows */

/* One block of rows of a strip of columns. */
static inline __attribute__((always_inline)) void round_strip(const mk_bf16 *from, int64_t stride, int64_t rows, int64_t cols, mk_bf16 *to, int64_t to_stride)
{
    uint16_t amax[STRIP] = {0};
    uint8_t scale[STRIP];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            amax[c] = mk_mx_amax(amax[c], from[r * stride + c]);
    for (int64_t c = 0; c < cols; c++)
        scale[c] = mk_mx_scale(amax[c]);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            to[r * to_stride + c] = mk_mx_widen(mk_mx_encode(from[r * stride + c], scale[c]), scale[c]);
}

VECTOR void mk_cpu_mx_round_columns(const mk_bf16 *from, int64_t stride, int64_t rows, int64_t cols, mk_bf16 *to)
{
    for (int64_t r = 0; r < rows; r += MK_MX_BLOCK)
        for (int64_t c = 0; c < cols; c += STRIP)
            round_strip(from + r * stride + c, stride, mk_min(MK_MX_BLOCK, rows - r), mk_min(STRIP, cols - c), to + r * cols + c, cols);
}

VECTOR mk_gemm_operand mk_cpu_mx_round_operand(mk_gemm_operand from, int64_t n, int64_t depth, mk_bf16 *to)
{
    if (from.outer_stride == 1) { /* k runs down the rows of memory */
        mk_cpu_mx_round_columns(from.data, from.k_stride, depth, n, to);
        return (mk_gemm_operand){to, 1, n};
    }
    for (int64_t i = 0; i < n; i++) {
        const mk_bf16 *row = from.data + i * from.outer_stride;
        mk_bf16 *out = to + i * depth;
        if (from.k_stride == 1) {
            mk_cpu_mx_round(row, depth, out);
            continue;
        }
        for (int64_t k = 0; k < depth; k++)
            out[k] = row[k * from.k_stride];
        mk_cpu_mx_round(out, depth, out);
    }
    return (mk_gemm_operand){to, depth, 1};
}

/* Row `row` of a [rows, cols] matrix, one block after the other; the source's elements lie `step` apart. */
static inline __attribute__((always_inline)) void quantise_matrix_row(const mk_bf16 *from, int64_t step, int64_t row, int64_t cols, uint8_t *data, uint8_t *scales)
{
    mk_bf16 block[MK_MX_BLOCK];
    for (int64_t b = 0; b < cols / MK_MX_BLOCK; b++) {
        for (int64_t i = 0; i < MK_MX_BLOCK; i++)
            block[i] = from[(b * MK_MX_BLOCK + i) * step];
        uint8_t scale = scales[mk_mx_scale_index(row, b, cols)] = scale_of(block);
        for (int64_t i = 0; i < MK_MX_BLOCK; i++)
            data[row * cols + b * MK_MX_BLOCK + i] = mk_mx_encode(block[i], scale);
    }
}

/* Blocks along cols of from(row, col) = from[row * row_step + col * col_step]. Scales of rows and columns that only fill a tile are
 * those of zeros. */
static inline __attribute__((always_inline)) void quantise_one(const mk_bf16 *from, int64_t row_step, int64_t col_step, int64_t rows, int64_t cols, uint8_t *data, uint8_t *scales)
{
    memset(scales, MK_MX_SCALE_MIN, (size_t)mk_mx_scale_bytes(rows, cols));
    for (int64_t r = 0; r < rows; r++)
        quantise_matrix_row(from + r * row_step, col_step, r, cols, data, scales);
}

VECTOR int64_t mk_cpu_mx_quantise_matrix(const mk_mx_matrix *m)
{
    int64_t elements = m->rows * m->cols;
    for (int64_t i = 0; i < m->count; i++) {
        const mk_bf16 *source = m->source + i * elements;
        if (m->data)
            quantise_one(source, m->cols, 1, m->rows, m->cols, m->data + i * elements, m->scales + i * mk_mx_scale_bytes(m->rows, m->cols));
        if (m->transposed)
            quantise_one(source, 1, m->cols, m->cols, m->rows, m->transposed + i * elements,
                         m->transposed_scales + i * mk_mx_scale_bytes(m->cols, m->rows));
    }
    return count_not_finite(m->source, m->count * elements);
}

VECTOR void mk_cpu_mx_widen_matrix(const uint8_t *data, const uint8_t *scales, int64_t cols, int64_t row, int64_t n, int64_t col, int64_t depth, mk_bf16 *to)
{
    for (int64_t i = 0; i < n; i++, to += depth)
        for (int64_t k = 0; k < depth; k += MK_MX_BLOCK) {
            uint8_t scale = scales[mk_mx_scale_index(row + i, (col + k) / MK_MX_BLOCK, cols)];
            const uint8_t *block = data + (row + i) * cols + col + k;
            for (int64_t j = 0; j < MK_MX_BLOCK; j++)
                to[k + j] = mk_mx_widen(block[j], scale);
        }
}
