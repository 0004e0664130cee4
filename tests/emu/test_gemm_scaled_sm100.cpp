/* Blackwell's GEMM core on MXFP8 operands, on the emulator: every epilogue, tails, empty experts, few resident clusters; bit for bit against a plain
 * loop over the widened operands, and within the error of fp32 sums against float64. */
#include "scaled_gemm_case.h"

/* Whole K blocks of 128 and half ones, more than stages. */
#define SWEEP(name, mode) TEST(name) { sweep<ScaledGemmCase>("TilePairScaled", mode, 14); }
SWEEP(plain, GEMM_PLAIN) SWEEP(push, GEMM_PUSH) SWEEP(swiglu, GEMM_SWIGLU) SWEEP(swiglu_keep, GEMM_SWIGLU_KEEP)

/* Both accumulators again and again: tasks of two row tiles, of one, and of many columns, by one cluster. */
TEST(accumulators_take_turns)
{
    GemmShape s;
    s.rows = {250, 90};
    s.cols = 1024;
    s.depth = 192;
    CHECK((gemm_case_passes<ScaledGemmCase>(s, GEMM_PLAIN, test_seed(), "TilePairScaled")));
}

TEST(sums_are_those_of_float64)
{
    GemmShape s;
    s.rows = {200};
    s.cols = 320;
    s.depth = 704;
    ScaledGemmCase gemm(s, GEMM_PLAIN, test_seed());
    const emu::Result result = gemm.run();
    if (!result.ok)
        TEST_FAILED("%s", result.message.c_str());
    double worst = 0;
    for (int64_t row = 0; row < s.rows[0]; row++)
        for (int64_t col = 0; col < s.cols; col++) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < s.depth; k++) {
                const double p = (double)bf(gemm.a[(size_t)(row * s.depth + k)]) * bf(gemm.b[(size_t)(col * s.depth + k)]);
                sum += p, size += fabs(p);
            }
            /* fp32 sums, then one rounding to bf16 */
            const double off = fabs(bf(gemm.c[(size_t)(row * s.cols + col)]) - sum), allowed = ldexp(fabs(sum), -8) + (double)s.depth * ldexp(size, -24);
            worst = fmax(worst, off / allowed);
        }
    printf("  worst error: %.3f of what is allowed\n", worst);
    CHECK(worst > 0 && worst <= 1);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
