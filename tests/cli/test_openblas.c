/* The yardstick: absent until it is opened, then a plausible number; a machine without the library gets one sentence. */
#include "test.h"

#include "openblas.h"

TEST(missing_before_it_is_opened)
{
    CHECK_STR(openblas_name(), "missing");
    CHECK(isnan(openblas_sgemm_gflops(8, 8, 8, 0)));
}

TEST(gflops)
{
    char error[160] = "";
    setenv("OPENBLAS_CORETYPE", "Prescott", 1);
    if (!openblas_open(error, sizeof error)) {
        CHECK_STR(error, "OpenBLAS is missing");
        CHECK_STR(openblas_name(), "missing");
        CHECK(isnan(openblas_sgemm_gflops(8, 8, 8, 0)));
        SKIP("OpenBLAS is not installed");
    }
    CHECK(openblas_open(error, sizeof error));
    CHECK_STR(openblas_name(), "OpenBLAS");
    CHECK(openblas_sgemm_gflops(64, 64, 64, 0.01) > 0.0);
    CHECK(isnan(openblas_sgemm_gflops(0, 64, 64, 0.01)));
    CHECK(isnan(openblas_sgemm_gflops(64, 64, INT64_MAX, 0.01)));
    printf("  %s: 256 x 256 x 256 at %.1f GFLOP/s\n", openblas_name(), openblas_sgemm_gflops(256, 256, 256, 0.1));
}

int main(int argc, char **argv) { return test_main(argc, argv); }
