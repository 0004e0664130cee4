/* Blackwell's GEMM core on MXFP8 operands, on the emulator: every epilogue, tails, empty experts, few resident clusters; bit for bit against a plain
 * loop over the widened operands, and within the error of fp32 sums against float64. */
#include "scaled_gemm_case.h"

static GemmShape some_shape(uint64_t *state)
{
    static const int32_t some[] = {0, 1, 64, 127, 128, 130, 300};
    GemmShape s;
    int64_t budget = 4; /* row tiles */
    for (int64_t e = 0, experts = 1 + test_below(state, 3); e < experts; e++) {
        int32_t rows = some[test_below(state, 7)];
        if ((rows + 127) / 128 > budget)
            rows = 0;
        budget -= (rows + 127) / 128;
        s.rows.push_back(rows);
    }
    s.cols = 64 * (1 + test_below(state, 7));
    s.depth = 64 * (1 + test_below(state, 14)); /* whole and half K blocks, more than stages */
    s.blocks = 2 * (1 + (uint32_t)test_below(state, 3));
    s.resident = 1 + (uint32_t)test_below(state, 3);
    s.limit = test_below(state, 2) ? INFINITY : 1.5f;
    return s;
}

static void sweep(GemmMode mode)
{
    const char *env = getenv("MOK_TEST_SEEDS");
    for (int i = 0; i < (env ? atoi(env) : 2); i++) {
        uint64_t state = test_seed() + (uint64_t)i * 7919;
        const GemmShape shape = some_shape(&state);
        CHECK((gemm_case_passes<mk::TilePairScaled, ScaledGemmCase>(shape, mode, test_seed() + (uint64_t)i, "TilePairScaled")));
    }
}
TEST(plain) { sweep(GEMM_PLAIN); }
TEST(push) { sweep(GEMM_PUSH); }
TEST(swiglu) { sweep(GEMM_SWIGLU); }
TEST(swiglu_keep) { sweep(GEMM_SWIGLU_KEEP); }

/* Both accumulators again and again: tasks of two row tiles, of one, and of many columns, by one cluster. */
TEST(accumulators_take_turns)
{
    GemmShape s;
    s.rows = {250, 90};
    s.cols = 1024;
    s.depth = 192;
    CHECK((gemm_case_passes<mk::TilePairScaled, ScaledGemmCase>(s, GEMM_PLAIN, test_seed(), "TilePairScaled")));
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
