/* MXFP8: blocks of 32 numbers that share one power of two. Plain C for gcc, g++ and nvcc: the CPU backend, the kernels and the tests
 * quantise with these functions, so that CPU and GPU have the same bits by construction.
 *
 *   element  e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa; largest 448; 0x7f is NaN, there are no infinities
 *   scale    one byte per block (UE8M0): 2^(byte - 127), byte - 127 = clamp(ceil(log2(amax / 448)), -39, 119)
 *
 * amax is the largest finite |x| of the block. A block of zeros so has byte 88. Elements are x / scale, rounded to nearest, ties to
 * even, at most 448; NaN and infinities become NaN. The source is always bf16. Inside these limits every element, widened again, is a bf16
 * number exactly, so that a machine without matrix units for MX multiplies the same numbers.
 *
 * Two layouts. Rows of the library's own (tokens in the heap, saved gate/up): n elements, then n / 32 scales, so that a row moves in one
 * piece. What crosses the API: elements as the matrix they came from, scales in tiles of 128 rows x 128 columns. */
#ifndef MK_MX_H
#define MK_MX_H

#include <string.h>

#include "layout/dims.h"

enum {
    MK_MX_BLOCK = 32,
    MK_MX_SCALE_MIN = 88, MK_MX_SCALE_MAX = 246, /* exponents -39 and 119 */
    MK_MX_NAN = 0x7f,
    MK_MX_TILE = 128,       /* rows and columns of one tile of scales */
    MK_MX_TILE_BYTES = 512
};

MK_FN float mk_mx_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

MK_FN uint32_t mk_mx_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* --- numbers; x is the bit pattern of a bf16 ---------------------------------------------------------------------- */
MK_FN int mk_mx_is_finite(uint16_t x) { return (x & 0x7fff) < 0x7f80; }

/* The larger one of amax (so far; a bf16's bits, 0 to begin with) and |x|, if x is finite. Bits of positive numbers sort as they do. */
MK_FN uint16_t mk_mx_amax(uint16_t amax, uint16_t x)
{
    uint16_t size = x & 0x7fff;
    return size < 0x7f80 && size > amax ? size : amax;
}

/* 448 is 1.75 * 2^8: ceil(log2(amax / 448)) is amax's exponent less 8, and one more if its mantissa is above 1.75. */
MK_FN uint8_t mk_mx_scale(uint16_t amax)
{
    int byte = (amax >> 7) - 8 + ((amax & 0x7f) > 0x60);
    return (uint8_t)(byte < MK_MX_SCALE_MIN ? MK_MX_SCALE_MIN : byte > MK_MX_SCALE_MAX ? MK_MX_SCALE_MAX : byte);
}

/* x / scale as e4m3. `scale`: of mk_mx_scale. */
MK_FN uint8_t mk_mx_encode(uint16_t x, uint8_t scale)
{
    float size = mk_mx_float((uint32_t)(x & 0x7fff) << 16) * mk_mx_float((uint32_t)(254 - scale) << 23); /* exact where it matters */
    size = size > 448.0f ? 448.0f : size;
    uint32_t bits = mk_mx_bits(size);
    /* Below 2^-6 elements are whole multiples of 2^-9, which is the distance of floats at 2^14. */
    uint32_t subnormal = mk_mx_bits(size + 16384.0f) - mk_mx_bits(16384.0f);
    uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    uint32_t element = size < 0.015625f ? subnormal : normal;
    return mk_mx_is_finite(x) ? (uint8_t)(element | (x >> 8 & 0x80)) : (uint8_t)MK_MX_NAN;
}

/* element * scale as bf16: exact for scales of mk_mx_scale. Of others (a caller's) 255 is NaN, and a product that is no bf16 is rounded. */
MK_FN uint16_t mk_mx_widen(uint8_t element, uint8_t scale)
{
    float unit = mk_mx_float(scale ? (uint32_t)scale << 23 : 0x00400000u);
    float size = mk_mx_float((uint32_t)(element & 0x7f) << 20) * 0x1p120f * unit; /* the e4m3's bits are a float's, with another bias */
    uint32_t bits = mk_mx_bits(size);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (element & 0x7f) == MK_MX_NAN || scale == 255 ? (uint16_t)0x7fc0 : (uint16_t)(rounded | (uint32_t)(element & 0x80) << 8);
}

/* --- the library's own rows ---------------------------------------------------------------------------------------- */
/* What a row of n numbers is, and how far rows lie apart: multiples of 16 bytes, for bulk copies. n: a multiple of 32. */
MK_FN int64_t mk_mx_row_bytes(int64_t n) { return n + n / MK_MX_BLOCK; }
MK_FN int64_t mk_mx_row_stride(int64_t n) { return mk_round_up(mk_mx_row_bytes(n), 16); }

/* --- scales of the API: [ceil(rows / 128), ceil(cols / 128), 32, 16] bytes of a [rows, cols] matrix with blocks along cols ----- */
MK_FN int64_t mk_mx_scale_bytes(int64_t rows, int64_t cols)
{
    return mk_ceil_div(rows, MK_MX_TILE) * mk_ceil_div(cols, MK_MX_TILE) * MK_MX_TILE_BYTES;
}

/* Where the scale of row `row` and columns [32 * block, 32 * block + 32) lies. */
MK_FN int64_t mk_mx_scale_index(int64_t row, int64_t block, int64_t cols)
{
    int64_t tile = row / MK_MX_TILE * mk_ceil_div(cols, MK_MX_TILE) + block / 4, in_tile = row % MK_MX_TILE;
    return tile * MK_MX_TILE_BYTES + in_tile % 32 * 16 + in_tile / 32 * 4 + block % 4;
}

#endif
