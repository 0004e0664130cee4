/* The grouped GEMM core on Blackwell: what the other parts of the core are on Hopper, for a pair of CTAs and accumulators in tensor memory.
 *
 * The pair works on 256 rows x 256 columns at a time: each CTA brings 128 rows of A and half of B's rows, the tensor cores read both
 * CTAs' shared memory, and each CTA gets the 256 columns of its own rows. So a task of the walk, one row tile and one column
 * tile, is one CTA's share, and the pair takes two tasks with neighbouring numbers: walks put row tiles of the same columns next
 * to each other. Where two neighbours do not fit together (other expert, other columns, other GEMM), the pair does one after the other, the
 * second CTA helping with rows of zeros.
 *
 *   warp 0      load      of both CTAs, as on Hopper; bytes count on the leading CTA's barrier
 *   warp 1      mma       one thread of the leading CTA issues for the pair
 *               schedule  one thread of the other CTA
 *   warps 4-11  math      two warpgroups take turns: one reads its accumulators while the MMAs fill the other's
 *
 * Program, Epilogue and GemmTask are those of Hopper; num_rows 0 is a CTA that only helps. Bits are those of Hopper, too: one accumulator,
 * K in steps of 16, ascending. */
#ifndef MK_GEMM_PAIR_CUH
#define MK_GEMM_PAIR_CUH

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/load.cuh"

namespace mk {

/* rows and cols of one CTA's share; 2 x 256 accumulator columns are all of the tensor memory. */
struct TilePair {
    static constexpr uint32_t rows = 128, cols = 256, stages = 6, cluster = 2;
    static constexpr bool ping_pong = true, tensor_memory = true;
};

template <class Tile> struct PairShared {
    alignas(1024) uint8_t a[Tile::stages][Tile::rows * kRowBytes];
    alignas(1024) uint8_t b[Tile::stages][Tile::cols / 2 * kRowBytes]; /* this CTA's half of B */
    alignas(1024) uint8_t staging[kMathWarps][kStagingBytes];
    GemmTask task[kTaskSlots];
    uint64_t full[Tile::stages];         /* of the leading CTA: one arrival and the bytes of both CTAs */
    uint64_t empty[Tile::stages];        /* one arrival: the MMAs that read the stage are done */
    uint64_t task_full[kTaskSlots];      /* one arrival and the bytes of a task */
    uint64_t task_empty[kTaskSlots];     /* of the scheduling CTA: every reader of the pair */
    uint64_t sums_full[kMathWarpgroups]; /* one arrival: a warpgroup's sums are there */
    uint64_t sums_empty[kMathWarpgroups];/* of the leading CTA: the math warps of both CTAs have read them */
    uint32_t tensor_memory;              /* address of the CTA's columns */
};
template <> struct GemmShared<TilePair> : PairShared<TilePair> {};
static_assert(sizeof(GemmShared<TilePair>) <= 232448, "shared memory of a CTA");

constexpr uint32_t kPairStageBytes = (TilePair::rows + TilePair::cols / 2) * kRowBytes; /* in one CTA */
constexpr uint16_t kBothCtas = 3;
constexpr int32_t kNoRows = 1 << 30; /* rows from here on are past every map: zeros */

/* The seam to the epilogues: a warp reads 32 lanes, as two blocks of 16 rows. */
template <class Tile> struct PairAcc {
    static constexpr uint32_t blocks = 2, block_rows = 16;
    uint32_t address; /* of the warp's first lane and its warpgroup's first column */

    MK_MEMBER void read(uint32_t m, uint32_t c, float (&v)[32]) const
    {
        tmem_load_16x64(address + mk_tmem_address(m * block_rows, 64 * c), v);
        tmem_wait_load(v);
    }
};
template <> struct Acc<TilePair> : PairAcc<TilePair> {};

/* As gemm_init. */
template <class Tile> MK_DEVICE void pair_init(GemmShared<Tile> &s, uint32_t more_readers)
{
    for (uint32_t i = 0; i < Tile::stages; i++) {
        mbar_init(smem_addr(&s.full[i]), 1);
        mbar_init(smem_addr(&s.empty[i]), 1);
    }
    for (uint32_t i = 0; i < kTaskSlots; i++) {
        mbar_init(smem_addr(&s.task_full[i]), 1);
        mbar_init(smem_addr(&s.task_empty[i]), (kTaskReaders + more_readers) * Tile::cluster + 1); /* and the mma role */
    }
    for (uint32_t i = 0; i < kMathWarpgroups; i++) {
        mbar_init(smem_addr(&s.sums_full[i]), 1);
        mbar_init(smem_addr(&s.sums_empty[i]), kWarpsPerTile<Tile> * Tile::cluster);
    }
    fence_mbar_init_release_cluster();
}

/* ---- schedule ---- */

MK_DEVICE bool fit_together(const GemmTask &a, const GemmTask &b)
{
    return a.kind == b.kind && a.expert == b.expert && a.col == b.col && a.num_k_blocks == b.num_k_blocks;
}

MK_DEVICE GemmTask helper_of(GemmTask task)
{
    task.row = kNoRows;
    task.num_rows = 0;
    return task;
}

template <class Tile> MK_DEVICE void post_pair(GemmShared<Tile> &s, RingCursor<kTaskSlots> &at, const GemmTask &leading, const GemmTask &other)
{
    wait_mbar_cluster(smem_addr(&s.task_empty[at.slot]), at.parity ^ 1, "gemm_schedule: free task slot");
    post_task(s, at.slot, 0, leading);
    post_task(s, at.slot, 1, other);
    at.next();
}

template <class Tile, class Program> MK_DEVICE void pair_schedule(GemmShared<Tile> &s, Program &program)
{
    RingCursor<kTaskSlots> at;
    for (;;) {
        const uint32_t number = program.next();
        GemmTask first = {}, second = {};
        const bool any = program.task(2 * number, 0, first), both = any && program.task(2 * number + 1, 0, second);
        if (!any) {
            post_pair(s, at, first, first);
            return;
        }
        if (both && fit_together(first, second)) {
            post_pair(s, at, first, second);
            continue;
        }
        post_pair(s, at, first, helper_of(first));
        if (both)
            post_pair(s, at, second, helper_of(second));
    }
}

/* ---- load ---- */

/* This CTA's share of K block k. The leading CTA's barrier counts both shares. */
template <class Tile> MK_DEVICE void load_pair_stage(GemmShared<Tile> &s, uint32_t stage, const GemmTask &task, const GemmInput &in, int32_t k)
{
    const uint32_t full = smem_addr(&s.full[stage]), leading_full = cluster_addr(full, 0);
    const int32_t x = k * (int32_t)kBlockK;
    if (cluster_rank() == 0)
        mbar_arrive_expect_tx_release_cta(full, 2 * kPairStageBytes);
    tma_load_2d_pair(smem_addr(s.a[stage]), in.a, x, task.row, leading_full);
    if (cluster_rank() == 0)
        tma_load_3d_pair(smem_addr(s.b[stage]), in.b_low, x, task.col, in.b_depth, leading_full);
    else
        tma_load_3d_pair(smem_addr(s.b[stage]), in.b_high, x, task.col + in.b_high_row, in.b_depth, leading_full);
}

template <class Tile, class Program> MK_DEVICE void pair_load(GemmShared<Tile> &s, Program &program)
{
    TaskReader<Tile> tasks;
    RingCursor<Tile::stages> at;
    for (;; tasks.at.next()) {
        const GemmTask task = tasks.wait(s);
        if (task.num_k_blocks != 0)
            program.wait_operands(task);
        tasks.release(s);
        if (task.num_k_blocks == 0)
            return;
        const GemmInput in = program.input(task);
        for (int32_t k = 0; k < task.num_k_blocks; k++, at.next()) {
            wait_mbar(smem_addr(&s.empty[at.slot]), at.parity ^ 1, "gemm_load: free stage");
            load_pair_stage(s, at.slot, task, in, k);
        }
    }
}

/* ---- mma ---- */

/* One K block: four steps of 16, ascending. */
template <class Tile> MK_DEVICE void multiply_pair_stage(GemmShared<Tile> &s, uint32_t stage, uint32_t sums, bool first)
{
    constexpr uint32_t instruction_rows = 2 * Tile::rows;
    const uint64_t a = mk_operand_sm100(smem_addr(s.a[stage])), b = mk_operand_sm100(smem_addr(s.b[stage]));
    MK_UNROLL for (uint32_t step = 0; step < kBlockK / 16; step++)
        tcgen05_mma_pair_bf16(sums, a + 2 * step, b + 2 * step, mk_mma_descriptor_bf16(instruction_rows, Tile::cols, 0, 0), !first || step > 0);
}

/* The mma role: one thread of the leading CTA. Its commits tell both CTAs that a stage is free, and that sums are complete. */
template <class Tile> MK_DEVICE void pair_mma(GemmShared<Tile> &s)
{
    TaskReader<Tile> tasks;
    RingCursor<Tile::stages> at;
    RingCursor<kMathWarpgroups> turn;
    const uint32_t tensor_memory = load(&s.tensor_memory);
    for (;; tasks.at.next(), turn.next()) {
        const int32_t num_k_blocks = tasks.wait(s).num_k_blocks;
        tasks.release(s);
        if (num_k_blocks == 0)
            return;
        wait_mbar_cluster(smem_addr(&s.sums_empty[turn.slot]), turn.parity ^ 1, "gemm_mma: free accumulators");
        for (int32_t k = 0; k < num_k_blocks; k++, at.next()) {
            wait_mbar_cluster(smem_addr(&s.full[at.slot]), at.parity, "gemm_mma: full stage");
            tcgen05_fence_after_sync(); /* of the loads' and, at first, of the epilogue's arrival */
            multiply_pair_stage(s, at.slot, tensor_memory + turn.slot * Tile::cols, k == 0);
            tcgen05_commit_pair(smem_addr(&s.empty[at.slot]), kBothCtas);
        }
        tcgen05_commit_pair(smem_addr(&s.sums_full[turn.slot]), kBothCtas);
    }
}

/* ---- math ---- */

template <class Tile, class Epilogue> MK_DEVICE void pair_math(GemmShared<Tile> &s, uint32_t warpgroup, Epilogue &epilogue)
{
    const uint32_t warp = warp_idx() - kFirstMathWarp, first_lane = warp % 4 * 32;
    const WarpOut out = {smem_addr(s.staging[warp]), first_lane};
    TaskReader<Tile> tasks;
    RingCursor<kMathWarpgroups> turn;
    Acc<Tile> acc;
    acc.address = load(&s.tensor_memory) + mk_tmem_address(first_lane, warpgroup * Tile::cols);
    for (;; tasks.at.next(), turn.next()) {
        const GemmTask task = tasks.wait(s);
        sync_warp();
        if (lane_idx() == 0)
            tasks.release(s);
        if (task.num_k_blocks == 0)
            return;
        if (turn.slot != warpgroup)
            continue;
        wait_mbar_cluster(smem_addr(&s.sums_full[warpgroup]), turn.parity, "gemm_math: finished sums");
        tcgen05_fence_after_sync();
        if (task.num_rows > 0)
            epilogue(task, acc, out);
        /* The next MMAs overwrite what has been read. Of memory they see nothing, so the cheap arrive is enough. */
        tcgen05_fence_before_sync();
        sync_warp();
        if (lane_idx() == 0)
            mbar_arrive_remote_release_cta(cluster_addr(smem_addr(&s.sums_empty[warpgroup]), 0));
    }
}

/* ---- tensor memory, all of it, by warp 1 of both CTAs: before the barrier of the cluster that begins a kernel, and after the one that ends it ---- */

template <class Tile> MK_DEVICE void pair_allocate(GemmShared<Tile> &s)
{
    tmem_allocate_pair<MK_TMEM_COLUMNS>(smem_addr(&s.tensor_memory));
    tmem_relinquish_pair();
    tcgen05_fence_before_sync();
}

template <class Tile> MK_DEVICE void pair_release(GemmShared<Tile> &s) { tmem_release_pair<MK_TMEM_COLUMNS>(load(&s.tensor_memory)); }

} /* namespace mk */
#endif
