/* A grouped GEMM on MXFP8 operands, on Blackwell's core: the case of gemm_case.h, whose bf16 operands become what their quantised forms widen to. So
 * the plain loop there says what the bits are, and that they are those of a chip that widens first. */
#ifndef MK_TESTS_SCALED_GEMM_CASE_H
#define MK_TESTS_SCALED_GEMM_CASE_H

#include "gemm_case.h"
#include "mx/mx.h"

typedef GemmCase<mk::TilePairScaled, mk::GroupedScaledProgram<mk::TilePairScaled>> WidenedGemmCase;

struct ScaledGemmCase : WidenedGemmCase {
    int64_t halves, b_scale_bytes;
    emu::Buffer<uint8_t> a8, b8, a_scales, b_scales;  /* B: gate and up rows of every expert are matrices of their own */

    ScaledGemmCase(const GemmShape &s, GemmMode m, uint64_t seed)
        : WidenedGemmCase(s, m, seed), halves(swiglu ? 2 : 1), b_scale_bytes(mk_mx_scale_bytes(s.cols, s.depth)), a8(machine, "e4m3 of a", a.count()),
          b8(machine, "e4m3 of b", b.count()), a_scales(machine, "scales of a", (size_t)mk_mx_scale_bytes(table_rows, s.depth)),
          b_scales(machine, "scales of b", (size_t)(experts * halves * b_scale_bytes))
    {
        uint64_t state = seed ^ 0x5ca1ed;
        memset(b_scales.host(), MK_MX_SCALE_MIN, b_scales.count());
        memset(a_scales.host(), MK_MX_SCALE_MIN, a_scales.count());
        quantise(a.host(), a8.host(), a_scales.host(), table_rows, &state);
        for (int64_t i = 0; i < experts * halves; i++)
            quantise(b.host() + i * s.cols * s.depth, b8.host() + i * s.cols * s.depth, b_scales.host() + i * b_scale_bytes, s.cols, &state);
        use_scaled_operands();
    }

    /* Blocks of very different size, so that every scale matters. A row of NaN becomes one of NaN elements with NaN scales. */
    void quantise(uint16_t *x, uint8_t *elements, uint8_t *scales, int64_t num_rows, uint64_t *state) const
    {
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t block = 0; block < shape.depth / MK_MX_BLOCK; block++) {
                uint16_t *from = x + row * shape.depth + block * MK_MX_BLOCK, amax = 0;
                const float size = ldexpf(1.0f, (int)test_below(state, 13) - 6);
                const bool none = from[0] == kNan;
                for (int i = 0; i < MK_MX_BLOCK; i++) {
                    from[i] = none ? kNan : emu::float_to_bf16(bf(from[i]) * size);
                    amax = mk_mx_amax(amax, from[i]);
                }
                const uint8_t scale = none ? 255 : mk_mx_scale(amax);
                scales[mk_mx_scale_index(row, block, shape.depth)] = scale;
                for (int i = 0; i < MK_MX_BLOCK; i++) {
                    const uint8_t e = none ? (uint8_t)MK_MX_NAN : mk_mx_encode(from[i], scale);
                    elements[row * shape.depth + block * MK_MX_BLOCK + i] = e;
                    from[i] = mk_mx_widen(e, scale);
                }
            }
    }

    /* A matrix of every expert: [E, cols, depth], `matrix` is 0, or 1 for its second half. */
    mk_tensor_map operand_map(int64_t matrix) const
    {
        mk_tensor t = mk_tensor_operand_e4m3(b8.device() + matrix * shape.cols * shape.depth, (uint64_t)shape.depth, (uint64_t)shape.cols, (uint64_t)experts, 128);
        t.stride_bytes[1] *= (uint64_t)halves;
        return encode(t);
    }
    mk_tensor_map scale_map(int64_t matrix) const
    {
        mk_tensor t = mk_tensor_scales(b_scales.device() + matrix * b_scale_bytes, (uint64_t)shape.depth, (uint64_t)shape.cols, (uint64_t)experts);
        t.stride_bytes[1] *= (uint64_t)halves;
        return encode(t);
    }
    void use_scaled_operands()
    {
        const int64_t high = halves - 1;
        program.a = encode(mk_tensor_operand_e4m3(a8.device(), (uint64_t)shape.depth, (uint64_t)table_rows, 0, 128));
        program.a_scales = encode(mk_tensor_scales(a_scales.device(), (uint64_t)shape.depth, (uint64_t)table_rows, 0));
        program.b_low = operand_map(0), program.b_high = operand_map(high);
        program.b_low_scales = scale_map(0), program.b_high_scales = scale_map(high);
        program.b_high_row = swiglu ? 0 : 128;
        program.num_k_blocks = (int32_t)((shape.depth + 127) / 128);
        program.expert_maps = nullptr;
    }
};
#endif
