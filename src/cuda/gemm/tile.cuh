/* The grouped GEMM core, part 1: tiles, tasks, and the shared memory of a CTA.
 *
 *   C[rows of expert e, :] = A[rows of e, K] * B[e, N, K]^T        bf16 in, fp32 accumulators, epilogue of the caller's choice
 *
 * 384 threads, persistent, in clusters of one or two CTAs:
 *
 *   warp 0      load      one thread keeps the ring of stages filled by TMA                   load.cuh
 *   warp 1      schedule  one thread of the cluster draws tasks and hands them to all roles   load.cuh
 *   warps 2, 3  spare     a stage kernel may use them
 *   warps 4-11  math      two warpgroups: wgmma, then the epilogue                            mma.cuh, epilogue.cuh
 *
 * (With warps of their own for epilogues: broad.cuh. Blackwell: pair.cuh.)
 *
 * A stage kernel brings three things, each a struct:
 *   Tile      one of the tiles below
 *   Program   which task comes next and where its operands are (the interface is at GroupedProgram, grouped.cuh)
 *   Epilogue  what becomes of a finished tile (epilogue.cuh)
 * and calls gemm_cta (gemm.cuh), or the role functions one by one if its CTA does other work too.
 *
 * Bits do not depend on the tile or the cluster: an element has one accumulator, and K is walked in steps of 16, ascending. */
#ifndef MK_GEMM_TILE_CUH
#define MK_GEMM_TILE_CUH

#include "cuda/arch/arch.cuh"

namespace mk {

/* ---- the tiles: a short list, not a cross product ---- */

/* Both math warpgroups on one tile, 64 x 256 each. Best for large K. */
struct TileWide {
    static constexpr uint32_t rows = 128, cols = 256, stages = 4, cluster = 2;
    static constexpr bool ping_pong = false, tensor_memory = false;
};
/* The warpgroups take turns, each on a tile of its own: one's epilogue hides under the other's MMAs. Best for K up to about
 * 2048 and for heavy epilogues. */
struct TileNarrow {
    static constexpr uint32_t rows = 128, cols = 128, stages = 6, cluster = 2;
    static constexpr bool ping_pong = true, tensor_memory = false;
};
/* The same without a cluster. */
struct TileWideAlone : TileWide { static constexpr uint32_t cluster = 1; };
struct TileNarrowAlone : TileNarrow { static constexpr uint32_t cluster = 1; };

constexpr uint32_t kGemmThreads = 384;
constexpr uint32_t kMathWarpgroups = 2, kMathWarps = 8, kFirstMathWarp = 4;
constexpr uint32_t kBlockK = 64;              /* contraction elements of a stage: one 128-byte swizzled row */
constexpr uint32_t kRowBytes = kBlockK * 2;
MK_DEVICE uint32_t block_depth(bool scaled) { return scaled ? kRowBytes : kBlockK; } /* of e4m3 a stage has twice as many */
constexpr uint32_t kTaskSlots = 4;            /* ping-pong needs three: a task under way in each warpgroup, one ahead */
constexpr uint32_t kStagingBytes = 4096;      /* for each math warp, to turn accumulators into rows */

/* Registers a thread: 56 + 2 * 224 = 3 * 168, all that 384 threads have. */
constexpr int kRegistersMath = 224, kRegistersOther = 56;

/* Column tiles of a task: one for each CTA of the cluster, which share A. With tensor memory (pair.cuh) the CTAs share B and have a task
 * each. */
template <class Tile> constexpr uint32_t kColumnTiles = Tile::tensor_memory ? 1 : Tile::cluster;

/* Boxes of the operands' tensor maps, in rows of 64 elements: each CTA of a cluster loads its share of A for all, and B in
 * two halves, which need not be neighbours (gate and up rows of one weight). */
template <class Tile> constexpr uint32_t kBoxRowsA = Tile::tensor_memory ? Tile::rows : Tile::rows / Tile::cluster;
template <class Tile> constexpr uint32_t kBoxRowsB = Tile::cols / 2;

/* ---- a task: one tile of one GEMM ---- */

constexpr uint32_t kNoMoreTasks = 0x7fffffff; /* a number past every walk's end */

/* The CTAs of a cluster get neighbouring columns of the same rows (they share A) and the same number of K blocks. */
struct alignas(16) GemmTask {
    int32_t row;           /* first row of A */
    int32_t col;           /* first column; may lie past N (the odd tile of a pair), then nothing is stored */
    int32_t expert;
    int32_t num_rows;      /* rows that exist, up to Tile::rows; the rest is computed and dropped */
    int32_t num_k_blocks;  /* 0: no more tasks */
    int32_t kind;          /* which GEMM, for kernels that run several */
    int32_t out_row;       /* first row of the result, for the epilogue */
    int32_t tag;           /* free for Program and Epilogue */
};
static_assert(sizeof(GemmTask) == 32, "a task travels as two 16-byte stores");

/* Where the operands of a task are. */
struct GemmInput {
    const mk_tensor_map *a;                /* [rows, K] */
    const mk_tensor_map *b_low, *b_high;   /* [E, N, K]: first and second half of the tile's columns */
    int32_t b_high_row;                    /* the second half starts at row col + b_high_row of b_high */
    int32_t b_depth;                       /* index along E */
};
/* The same of e4m3 operands (pair.cuh), and their scales, atom by atom (mk_tensor_scales). No a_scales: this task's operands are bf16. */
struct ScaledGemmInput : GemmInput {
    const mk_tensor_map *a_scales, *b_low_scales, *b_high_scales;
};

/* What a math warp needs to bring out its share of a tile. */
struct WarpOut {
    uint32_t staging;  /* kStagingBytes of shared memory, this warp's own */
    uint32_t row;      /* the warp's first row in the tile's first block; block m adds m * Acc::block_rows */
};

/* ---- shared memory ---- */

template <class Tile> struct GemmShared {
    alignas(1024) uint8_t a[Tile::stages][Tile::rows * kRowBytes];  /* swizzled, as TMA writes and wgmma reads it */
    alignas(1024) uint8_t b[Tile::stages][Tile::cols * kRowBytes];
    alignas(1024) uint8_t staging[kMathWarps][kStagingBytes];
    GemmTask task[kTaskSlots];
    uint64_t full[Tile::stages];       /* one arrival and the bytes of a stage */
    uint64_t empty[Tile::stages];      /* the math warps that used it, in every CTA of the cluster */
    uint64_t task_full[kTaskSlots];    /* one arrival and the bytes of a task */
    uint64_t task_empty[kTaskSlots];   /* of the leading CTA: every reader in the cluster */
};
static_assert(sizeof(GemmShared<TileWide>) <= 232448 && sizeof(GemmShared<TileNarrow>) <= 232448, "shared memory of a CTA");

template <class Tile> constexpr uint32_t kStageBytes = (Tile::rows + Tile::cols) * kRowBytes;
/* Math warps that work on one tile. */
template <class Tile> constexpr uint32_t kWarpsPerTile = Tile::ping_pong ? kMathWarps / 2 : kMathWarps;
/* Readers of a task in a CTA: load and every math warp. */
constexpr uint32_t kTaskReaders = 1 + kMathWarps;
/* The CTA of the cluster whose schedule role hands out the tasks. With tensor memory the leading one has the mma role in its place. */
template <class Tile> constexpr uint32_t kScheduleRank = Tile::tensor_memory ? 1 : 0;

/* By one thread, before anybody uses them; then a cluster barrier. more_readers: roles of the kernel's own, in each CTA, that
 * read every task. */
template <class Tile> MK_DEVICE void gemm_init(GemmShared<Tile> &s, uint32_t more_readers = 0)
{
    for (uint32_t i = 0; i < Tile::stages; i++) {
        mbar_init(smem_addr(&s.full[i]), 1);
        mbar_init(smem_addr(&s.empty[i]), kWarpsPerTile<Tile> * Tile::cluster);
    }
    for (uint32_t i = 0; i < kTaskSlots; i++) {
        mbar_init(smem_addr(&s.task_full[i]), 1);
        mbar_init(smem_addr(&s.task_empty[i]), (kTaskReaders + more_readers) * Tile::cluster);
    }
    fence_mbar_init_release_cluster();
}

/* Position in a ring of barriers: which slot, and the parity of its current round. */
template <uint32_t Slots> struct RingCursor {
    uint32_t slot = 0, parity = 0;
    MK_MEMBER void next() { skip(1); }
    MK_MEMBER void skip(uint32_t n)
    {
        slot += n;
        parity ^= slot / Slots & 1;
        slot %= Slots;
    }
};

} /* namespace mk */
#endif
