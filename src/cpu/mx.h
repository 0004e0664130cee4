/* MXFP8 of whole rows and operands on the CPU: loops over mx/mx.h. n is a multiple of 32 everywhere. */
#ifndef MK_CPU_MX_H
#define MK_CPU_MX_H

#include "cpu/gemm.h"
#include "mx/mx.h"

/* n elements and n / 32 scales, and back. Returns how many elements were not finite. */
int64_t mk_cpu_mx_quantise(const mk_bf16 *from, int64_t n, uint8_t *elements, uint8_t *scales);
void mk_cpu_mx_widen(const uint8_t *elements, const uint8_t *scales, int64_t n, mk_bf16 *to);
/* Quantises and widens: what a GEMM sees of a row. In place if to == from. Returns as mk_cpu_mx_quantise. */
int64_t mk_cpu_mx_round(const mk_bf16 *from, int64_t n, mk_bf16 *to);

/* Quantised along `rows` instead, in blocks of 32 rows from the first on; the last block may be short, as if zeros followed.
 * from: rows `stride` apart; to: [rows, cols], dense. */
void mk_cpu_mx_round_columns(const mk_bf16 *from, int64_t stride, int64_t rows, int64_t cols, mk_bf16 *to);

/* Elements (i, k), i < n and k < depth, of a bf16 operand, quantised along k. Returns an operand in `to` (n * depth numbers). */
mk_gemm_operand mk_cpu_mx_round_operand(mk_gemm_operand from, int64_t n, int64_t depth, mk_bf16 *to);

/* A matrix as it crosses the API: [count, rows, cols] bf16 in; out (both NULL: not wanted) elements [count, rows, cols] and scales
 * [count, tiles, 512] with blocks along cols; transposed: [count, cols, rows], blocks along rows. Returns the elements that were not finite. */
typedef struct mk_mx_matrix {
    const mk_bf16 *source;
    int64_t count, rows, cols;
    uint8_t *data, *scales, *transposed, *transposed_scales;
} mk_mx_matrix;
int64_t mk_cpu_mx_quantise_matrix(const mk_mx_matrix *m);

/* Rows [row, row + n) and columns [col, col + depth) of one quantised matrix of `cols` columns, widened to `to` [n, depth]. */
void mk_cpu_mx_widen_matrix(const uint8_t *data, const uint8_t *scales, int64_t cols, int64_t row, int64_t n, int64_t col, int64_t depth, mk_bf16 *to);

#endif
