/* Encoding tensor maps, and the address arithmetic of swizzles and wgmma's matrix descriptors. Pure functions. */
#include "emu/tensor_map.h"
#include "emu/emu.h"

#include <math.h>
#include <string.h>

namespace emu {

static constexpr int kInvalidValue = 1; /* CUDA_ERROR_INVALID_VALUE */

int tensor_map_encode_tiled(void *out, int type, uint32_t rank, void *address, const uint64_t *dim, const uint64_t *stride_bytes, const uint32_t *box,
                            const uint32_t *element_stride, int interleave, int swizzle, int, int oob_fill)
{
    TensorMap map = {};
    map.magic = kTensorMapMagic;
    map.address = (uint64_t)(uintptr_t)address;
    map.element_bytes = type == MK_TENSOR_U8 ? 1 : type == MK_TENSOR_BF16 || type == MK_TENSOR_U16 ? 2 : type == MK_TENSOR_F32 ? 4 : 0;
    map.rank = rank;
    map.swizzle = (uint32_t)swizzle;
    if (!map.element_bytes || rank < 1 || rank > 3 || map.address % 16 || interleave || oob_fill || (uintptr_t)out % 64 ||
        (swizzle != MK_SWIZZLE_NONE && swizzle != MK_SWIZZLE_128B))
        return kInvalidValue;
    for (uint32_t i = 0; i < 3; i++) {
        map.dim[i] = i < rank ? dim[i] : 1;
        map.box[i] = i < rank ? box[i] : 1;
        if (map.dim[i] < 1 || map.dim[i] > 1ull << 32 || map.box[i] < 1 || map.box[i] > 256 || (i < rank && element_stride[i] != 1))
            return kInvalidValue;
        if (i + 1 < rank) {
            map.stride_bytes[i] = stride_bytes[i];
            if (stride_bytes[i] % 16 || stride_bytes[i] >= 1ull << 40)
                return kInvalidValue;
        }
    }
    const uint32_t inner = map.box[0] * map.element_bytes;
    if (inner % 16 || (swizzle == MK_SWIZZLE_128B && inner > 128))
        return kInvalidValue;
    memcpy(out, &map, sizeof map);
    return 0;
}

uint32_t swizzle_address(uint32_t a, int tensor_swizzle)
{
    return tensor_swizzle == MK_SWIZZLE_128B ? a ^ ((a >> 7 & 7) << 4) : a;
}

/* The canonical layouts of the PTX manual. Element size 2 bytes. */
uint32_t matrix_element_address(uint64_t descriptor, bool mn_major, uint32_t mn, uint32_t k)
{
    const uint32_t start = (uint32_t)(descriptor & 0x3fff) << 4;
    const uint32_t leading = (uint32_t)(descriptor >> 16 & 0x3fff) << 4;
    const uint32_t stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    const uint32_t swizzle = (uint32_t)(descriptor >> 62);  /* 0 none, 1 = 128, 2 = 64, 3 = 32 bytes */
    if (swizzle == 0)
        return mn_major ? start + mn / 8 * stride + k / 8 * leading + k % 8 * 16 + mn % 8 * 2
                        : start + mn / 8 * stride + k / 8 * leading + mn % 8 * 16 + k % 8 * 2;
    const uint32_t pitch = 256u >> swizzle;  /* bytes of a swizzled row */
    const uint32_t group = pitch / 2;        /* elements of it */
    const uint32_t a = mn_major ? start + mn / group * leading + k / 8 * stride + k % 8 * pitch + mn % group * 2
                                : start + mn / 8 * stride + mn % 8 * pitch + k * 2;
    const uint32_t mask = (8u >> (swizzle - 1)) - 1;
    return a ^ ((a >> 7 & mask) << 4);
}

uint16_t float_to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (isnan(x))
        return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Saturating: what is beyond 448 becomes 448. */
uint8_t float_to_e4m3(float x)
{
    const uint8_t sign = signbit(x) ? 0x80 : 0;
    const float size = fminf(fabsf(x), 448.0f);
    if (isnan(x))
        return 0x7f;
    if (size == 0.0f)
        return sign;
    int exponent;
    frexpf(size, &exponent); /* size = [0.5, 1) * 2^exponent */
    const int unit = exponent - 4 > -9 ? exponent - 4 : -9;              /* steps of 2^unit: 3 bits behind the first, or a subnormal's */
    const int steps = (int)nearbyintf(ldexpf(size, -unit));              /* ties to even, as the processor is set */
    return (uint8_t)(sign | (steps + (unit + 9) * 8)); /* 8 steps more: a normal's first bit counts its exponent, so 16 carry into it */
}

} /* namespace emu */
