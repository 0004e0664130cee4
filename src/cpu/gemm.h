/* The CPU backend's matrix product: bf16 operands anywhere in memory, fp32 result.
 *
 *   C[m, n] = (accumulate ? C[m, n] : 0) + sum over k ascending of A(m, k) * B(n, k)
 *
 * One function serves every pass, because an operand is a pointer and two strides (in elements, any sign):
 *   x W^T   W [N, K]: {w, K, 1}     W [K, N]: {w, 1, N}     every second row of [2N, K]: {w, 2 * K, 1}
 *   dy^T x  both operands contract over token rows: A = {dy, 1, I}, B = {x, 1, H}
 * An operand is read fast if one of its strides is 1, correctly in any case.
 *
 * Bits. An element of C is one fp32 accumulator that takes one fused multiply-add per k, k ascending. So its bits depend on
 * its own row of A, its own row of B and its old value only: not on M, N, the variant, or the element's place; and a sum that
 * is cut along k and continued with `accumulate` equals the uncut one. A NaN reaches only the elements whose sums contain it, and
 * every NaN result is 0x7fc00000 (which NaN survives an fma is up to operand order, which compilers choose). All this holds in
 * the default floating-point mode: round to nearest, subnormals not flushed. */
#ifndef MK_CPU_GEMM_H
#define MK_CPU_GEMM_H

#include "cpu/bf16.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mk_gemm_operand {
    const mk_bf16 *data; /* element (i, k) is data[i * outer_stride + k * k_stride], i being m for A and n for B */
    int64_t outer_stride, k_stride;
} mk_gemm_operand;

/* M, N, K >= 0; K = 0 gives zeros or leaves C. C: [M, N] fp32, rows `ldc` elements apart, overlapping nothing else.
 * scratch: mk_gemm_scratch_bytes() bytes of any alignment, for this call alone. Runs in the calling thread; any number of
 * threads may call at once. */
void mk_gemm_bf16(int64_t M, int64_t N, int64_t K, mk_gemm_operand A, mk_gemm_operand B, float *C, int64_t ldc, bool accumulate,
                  void *scratch);
size_t mk_gemm_scratch_bytes(void);

/* Variants, best last. The best one that the processor supports is chosen at the first call. */
#define MK_GEMM_VARIANT_LIST(X) X(PORTABLE, portable) X(AVX2, avx2) X(AVX512, avx512)

typedef enum mk_gemm_isa {
#define MK_GEMM_ENUM(upper, lower) MK_GEMM_##upper,
    MK_GEMM_VARIANT_LIST(MK_GEMM_ENUM)
#undef MK_GEMM_ENUM
    MK_NUM_GEMM_VARIANTS
} mk_gemm_isa;

const char *mk_gemm_variant(void); /* name of the variant in use: "avx512" */

/* For tests: use this variant from now on, in all threads. False, and nothing changed, if the processor lacks it. */
bool mk_gemm_force(mk_gemm_isa isa);

#endif
