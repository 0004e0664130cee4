/* bf16: the upper half of an fp32. Widening is exact; narrowing rounds to nearest, ties to even, once.
 * Infinities stay, values too large become infinities, a NaN stays a NaN with its sign and becomes quiet. */
#ifndef MK_CPU_BF16_H
#define MK_CPU_BF16_H

#include <stdint.h>
#include <string.h>

typedef uint16_t mk_bf16; /* the bit pattern */

static inline float mk_bf16_to_float(mk_bf16 x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline mk_bf16 mk_float_to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t quiet_nan = bits >> 16 | 0x40; /* rounding could carry a NaN's payload into the sign, or lose it */
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (mk_bf16)((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
}

/* The fp32 value of the nearest bf16: a rounding point of the contract, where the value is used on as fp32. */
static inline float mk_round_to_bf16(float value)
{
    return mk_bf16_to_float(mk_float_to_bf16(value));
}

/* n values, each rounded once. */
static inline void mk_floats_to_bf16(mk_bf16 *to, const float *from, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = mk_float_to_bf16(from[i]);
}

#endif
