/* Operands in shared memory: through the bits of their descriptors to numbers. */
#include "emu/tcgen05_operand.h"

#include <math.h>

namespace emu {

/* See the manual's canonical layouts. */
uint32_t piece_address(uint64_t d, bool mn_major, uint32_t element_bytes, uint32_t mn, uint32_t k)
{
    const uint32_t start = (uint32_t)(d & 0x3fff) << 4, leading = (uint32_t)(d >> 16 & 0x3fff) << 4, stride = (uint32_t)(d >> 32 & 0x3fff) << 4;
    const uint32_t code = (uint32_t)(d >> 61);  /* 0 none, 2 = 128, 4 = 64, 6 = 32 bytes */
    const uint32_t per_piece = 16 / element_bytes;
    if (code == 0)
        return mn_major ? start + mn / per_piece * stride + k / 8 * leading + k % 8 * 16 : start + mn / 8 * stride + k / per_piece * leading + mn % 8 * 16;
    const uint32_t pitch = 256u >> (code / 2), group = pitch / element_bytes;
    const uint32_t a = mn_major ? start + mn / group * leading + k / 8 * stride + k % 8 * pitch + mn % group * element_bytes
                                : start + mn / 8 * stride + mn % 8 * pitch + k * element_bytes;
    return a ^ ((a >> 7 & ((8u >> (code / 2 - 1)) - 1)) << 4);
}

void check_descriptor(uint64_t d, const char *what)
{
    constexpr uint64_t fields = 0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 7ull << 61;
    if ((d >> 46 & 7) != 1)
        fail("%s: descriptor %016llx has version %u in bits 46-48, not Blackwell's 1", what, (unsigned long long)d, (unsigned)(d >> 46 & 7));
    if (d & ~fields & ~(1ull << 46))  /* among them the base offset: every tile is aligned to its swizzle pattern */
        fail("%s: descriptor %016llx: bits outside its fields, or a base offset, are set", what, (unsigned long long)d);
    if ((d >> 61) & 1)
        fail("%s: descriptor %016llx has swizzle code %u", what, (unsigned long long)d, (unsigned)(d >> 61));
}

static float mini_float(uint8_t bits, bool e5m2)
{
    const uint32_t mantissa_bits = e5m2 ? 2 : 3, exponent = bits >> mantissa_bits & (e5m2 ? 31 : 15), mantissa = bits & ((1u << mantissa_bits) - 1);
    const int bias = e5m2 ? 15 : 7;
    const float sign = bits >> 7 ? -1.0f : 1.0f;
    if (e5m2 && exponent == 31)
        return mantissa ? NAN : sign * INFINITY;
    if (!e5m2 && exponent == 15 && mantissa == 7)
        return NAN;
    return exponent ? sign * ldexpf(1.0f + (float)mantissa / (float)(1u << mantissa_bits), (int)exponent - bias)
                    : sign * ldexpf((float)mantissa / (float)(1u << mantissa_bits), 1 - bias);
}

static float element(const uint8_t *p, uint32_t element_bytes, bool e5m2)
{
    static const std::vector<float> mini = [] {
        std::vector<float> values;
        for (uint32_t i = 0; i < 512; i++)
            values.push_back(mini_float((uint8_t)i, i >= 256));
        return values;
    }();
    uint16_t bits;
    if (element_bytes == 1)
        return mini[e5m2 * 256 + *p];
    memcpy(&bits, p, 2);
    return bf16_to_float(bits);
}

void fetch(const Cta &cta, const Operand &o, bool e5m2, float *out, uint32_t pitch, uint32_t first)
{
    o.for_each_piece([&](uint32_t mn, uint32_t k, uint32_t address) {
        const uint32_t offset = address - kSharedBase;
        const bool written = cta.granules[offset / 16].written == 0xffff;
        for (uint32_t j = 0; j < 16 / o.element_bytes; j++)
            out[(o.mn_major ? k : k + j) * pitch + first + (o.mn_major ? mn + j : mn)] = written ? element(cta.shared + offset + j * o.element_bytes, o.element_bytes, e5m2) : NAN;
    });
}

} /* namespace emu */
