/* The grouped GEMM core on the emulator: every tile and cluster mode, every epilogue, tails, empty experts, few resident
 * clusters; bit for bit against a plain loop, over seeds. */
#include "gemm_case.h"

#define SWEEP(Tile, mode) TEST(Tile##_##mode) { sweep<GemmCase<mk::Tile>>(#Tile, mode, 8); }
SWEEP(TileWide, GEMM_PLAIN) SWEEP(TileWide, GEMM_PUSH) SWEEP(TileWide, GEMM_SWIGLU) SWEEP(TileWide, GEMM_SWIGLU_KEEP)
SWEEP(TileNarrow, GEMM_PLAIN) SWEEP(TileNarrow, GEMM_PUSH) SWEEP(TileNarrow, GEMM_SWIGLU) SWEEP(TileNarrow, GEMM_SWIGLU_KEEP)
SWEEP(TilePair, GEMM_PLAIN) SWEEP(TilePair, GEMM_PUSH) SWEEP(TilePair, GEMM_SWIGLU) SWEEP(TilePair, GEMM_SWIGLU_KEEP)
SWEEP(TileWideAlone, GEMM_PLAIN) SWEEP(TileWideAlone, GEMM_SWIGLU)
SWEEP(TileNarrowAlone, GEMM_PLAIN) SWEEP(TileNarrowAlone, GEMM_SWIGLU)

TEST(no_rows_at_all)
{
    GemmShape s;
    s.rows = {0, 0, 0};
    CHECK((gemm_case_passes<GemmCase<mk::TileNarrow>>(s, GEMM_PLAIN, test_seed(), "TileNarrow")));
}

/* The same seed gives the same run. */
TEST(replays_exactly)
{
    GemmShape s;
    s.rows = {130};
    s.cols = 128;
    s.depth = 128;
    uint64_t switches[2];
    for (int i = 0; i < 2; i++) {
        GemmCase<mk::TileNarrow> gemm(s, GEMM_PLAIN, 5);
        const emu::Result result = gemm.run();
        CHECK(result.ok);
        switches[i] = result.switches;
    }
    CHECK_EQ(switches[0], switches[1]);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
