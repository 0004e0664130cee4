/* The grouped GEMM core on the emulator: every tile and cluster mode, every epilogue, tails, empty experts, few resident
 * clusters; bit for bit against a plain loop, over seeds. */
#include "gemm_case.h"

/* Sizes that exercise: an odd last column tile, tails of rows and of columns, more K blocks than stages. */
static GemmShape small_shape(uint64_t *state)
{
    GemmShape s;
    const int64_t experts = 1 + test_below(state, 4);
    int64_t budget = 3;  /* row tiles */
    for (int64_t e = 0; e < experts; e++) {
        static const int32_t some[] = {0, 1, 63, 64, 65, 127, 128, 130};
        int32_t rows = some[test_below(state, 8)];
        if ((rows + 127) / 128 > budget)
            rows = 0;
        budget -= (rows + 127) / 128;
        s.rows.push_back(rows);
    }
    s.cols = 64 * (1 + test_below(state, 7));
    s.depth = 64 * (1 + test_below(state, 8));
    s.blocks = 2 * (1 + (uint32_t)test_below(state, 3));
    s.resident = 1 + (uint32_t)test_below(state, 3);
    s.expert_maps = test_below(state, 2) != 0;
    s.limit = test_below(state, 2) ? INFINITY : 1.5f;
    return s;
}

template <class Tile> static void sweep(const char *tile, GemmMode mode)
{
    const char *env = getenv("MOK_TEST_SEEDS");
    const int count = env ? atoi(env) : 2;
    for (int i = 0; i < count; i++) {
        uint64_t state = test_seed() + (uint64_t)i * 7919;
        const GemmShape shape = small_shape(&state);
        CHECK((gemm_case_passes<Tile>(shape, mode, test_seed() + (uint64_t)i, tile)));
    }
}

#define SWEEP(Tile, mode) TEST(Tile##_##mode) { sweep<mk::Tile>(#Tile, mode); }
SWEEP(TileWide, GEMM_PLAIN) SWEEP(TileWide, GEMM_PUSH) SWEEP(TileWide, GEMM_SWIGLU) SWEEP(TileWide, GEMM_SWIGLU_KEEP)
SWEEP(TileNarrow, GEMM_PLAIN) SWEEP(TileNarrow, GEMM_PUSH) SWEEP(TileNarrow, GEMM_SWIGLU) SWEEP(TileNarrow, GEMM_SWIGLU_KEEP)
SWEEP(TilePair, GEMM_PLAIN) SWEEP(TilePair, GEMM_PUSH) SWEEP(TilePair, GEMM_SWIGLU) SWEEP(TilePair, GEMM_SWIGLU_KEEP)
SWEEP(TileWideAlone, GEMM_PLAIN) SWEEP(TileWideAlone, GEMM_SWIGLU)
SWEEP(TileNarrowAlone, GEMM_PLAIN) SWEEP(TileNarrowAlone, GEMM_SWIGLU)

TEST(no_rows_at_all)
{
    GemmShape s;
    s.rows = {0, 0, 0};
    CHECK((gemm_case_passes<mk::TileNarrow>(s, GEMM_PLAIN, test_seed(), "TileNarrow")));
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
