/* The grouped GEMM core, part 3: the accumulators of a warpgroup (the one place that knows the chip's matrix unit), and the
 * math role, which turns stages into finished tiles. */
#ifndef MK_GEMM_MMA_CUH
#define MK_GEMM_MMA_CUH

#include "cuda/gemm/load.cuh"
#include "cuda/sync/named.cuh"

namespace mk {

/* Descriptor of an operand in shared memory as TMA's 128-byte swizzle writes it: rows of 128 bytes, eight rows (1,024 bytes) to a
 * swizzle pattern.
 *   bits 0-13 address / 16 · 16-29 MajorOuter: distance of 64 outer elements / 16, else 1 · 32-45 stride between patterns / 16 ·
 *   62-63 128-byte swizzle = 1 */
constexpr uint64_t kOperandLayout = 1ull << 62 | (uint64_t)(1024 >> 4) << 32;
constexpr uint32_t kHalfBytes = 64 * kRowBytes;  /* a box of 64 rows of 128 bytes, as one TMA load writes it */

/* Which axis of an operand is the contiguous one: the contraction (MajorK: a box is 64 outer rows x 64 of K) or the other
 * (MajorOuter: a box is 64 rows of K x 64 outer; the next 64 outer are the next box). */
enum Major { MajorK = 0, MajorOuter = 1 };
template <Major M> MK_DEVICE uint64_t operand_descriptor(uint32_t addr)
{
    constexpr uint64_t between_boxes = M == MajorOuter ? (uint64_t)(kHalfBytes >> 4) << 16 : 1ull << 16;
    return kOperandLayout | between_boxes | (addr & 0x3ffff) >> 4;
}
/* From one step of 16 along K to the next, in the descriptor's units. */
template <Major M> constexpr uint64_t kNextStep = (M == MajorOuter ? 16 * kRowBytes : 16 * 2) >> 4;

/* What one warpgroup accumulates: `blocks` blocks of rows, all columns of the tile. The seam between chips: on Hopper the
 * sums are in registers, of which a warp holds 16 rows of every 64. Everybody else sees: multiply, wait, read. */
template <class Tile> struct Acc {
    static constexpr uint32_t blocks = Tile::rows / 64 / (Tile::ping_pong ? 1 : kMathWarpgroups), block_rows = 64;
    float r[blocks][Tile::cols / 2];

    /* Starts adding a K block (64 elements of the contraction axis) from the stage at addresses a and b; `first` sets the sums
     * instead. Steps of 16, ascending. */
    template <Major A, Major B> MK_MEMBER void multiply(uint32_t a, uint32_t b, bool first)
    {
        constexpr uint64_t next_block = kHalfBytes >> 4;  /* in the descriptor's units; the same for both majors */
        const uint64_t da = operand_descriptor<A>(a), db = operand_descriptor<B>(b);
        wgmma_fence();
        MK_UNROLL for (uint32_t step = 0; step < kBlockK / 16; step++)
            MK_UNROLL for (uint32_t m = 0; m < blocks; m++)
                issue<A, B>(r[m], da + step * kNextStep<A> + m * next_block, db + step * kNextStep<B>, !first || step > 0);
        wgmma_commit();
    }
    /* All but the last multiply are done: their stages are free. */
    MK_MEMBER void wait_all_but_last() { wgmma_wait<1>(); }
    MK_MEMBER void wait_all() { wgmma_wait<0>(); }

    /* Columns 64c .. 64c+63 of block m, as a warp holds them: v[4j + i] is row l/4 + 8(i/2) of the warp's 16, column
     * 8j + 2(l%4) + i%2 (lane l). */
    MK_MEMBER void read(uint32_t m, uint32_t c, float (&v)[32]) const
    {
        MK_UNROLL for (uint32_t i = 0; i < 32; i++)
            v[i] = r[m][32 * c + i];
    }

private:
    template <Major A, Major B> static MK_MEMBER void issue(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) { wgmma_m64n128k16_bf16<A, B>(d, a, b, accumulate); }
    template <Major A, Major B> static MK_MEMBER void issue(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) { wgmma_m64n256k16_bf16<A, B>(d, a, b, accumulate); }
};

/* A stage has been used by this warp: tell every CTA that multicasts into it. The readers were MMAs, which have completed, and
 * the next writer is a TMA load, so no memory order is needed: the cheap arrive. */
template <class Tile> MK_DEVICE void release_stage(GemmShared<Tile> &s, uint32_t stage)
{
    const uint32_t rank = lane_idx();
    if (rank < Tile::cluster)
        mbar_arrive_remote_release_cta(cluster_addr(smem_addr(&s.empty[stage]), rank));
}

/* Before the MMAs of a task's last K block: nothing. */
struct WholeBlocks { template <class Tile> MK_MEMBER void last_block(GemmShared<Tile> &, uint32_t) const {} };

/* Sums up one task, onto what the accumulators hold if `continues`. Leaves with all MMAs issued and the stage of the last one not yet
 * released. tail.last_block(s, stage) may change the operands of the last K block. */
template <Major A, Major B, class Tile, class Tail>
MK_DEVICE uint32_t multiply_task(GemmShared<Tile> &s, Acc<Tile> &acc, RingCursor<Tile::stages> &at, int32_t num_k_blocks, uint32_t first_row, bool continues, const Tail &tail)
{
    uint32_t previous = 0;
    for (int32_t k = 0; k < num_k_blocks; k++, at.next()) {
        wait_mbar(smem_addr(&s.full[at.slot]), at.parity, "gemm_math: full stage");
        if (k == num_k_blocks - 1)
            tail.last_block(s, at.slot);
        acc.template multiply<A, B>(smem_addr(s.a[at.slot]) + first_row * kRowBytes, smem_addr(s.b[at.slot]), k == 0 && !continues);
        if (k > 0) {
            acc.wait_all_but_last();
            release_stage(s, previous);
        }
        previous = at.slot;
    }
    return previous;
}

/* A warpgroup begins task `number` of its CTA, or its epilogue, or has ended it: kernels that keep a trace overload this for their epilogue
 * (stage/forward.cuh, stage/trace.cuh). */
enum TraceStamp { TRACE_PRODUCT_BEGINS, TRACE_EPILOGUE_BEGINS, TRACE_EPILOGUE_ENDS };
template <class Epilogue> MK_DEVICE void note_task(const Epilogue &, uint32_t, TraceStamp) {}

/* The math role: all threads of a math warpgroup (0 or 1). */
template <class Tile, class Epilogue> MK_DEVICE void gemm_math(GemmShared<Tile> &s, uint32_t warpgroup, Epilogue &epilogue)
{
    constexpr uint32_t both = kMathWarpgroups * 128;
    const uint32_t warp = warp_idx() - kFirstMathWarp;                        /* 0..7 */
    const uint32_t first_row = Tile::ping_pong ? 0 : warpgroup * (Tile::rows / kMathWarpgroups);
    const WarpOut out = {smem_addr(s.staging[warp]), first_row + warp % 4 * 16};
    TaskReader<Tile> tasks;
    RingCursor<Tile::stages> at;
    Acc<Tile> acc;

    if (Tile::ping_pong && warpgroup == 1)
        barrier_named_arrive(BARRIER_MATH_TURN + 0, both);                    /* the first turn is warpgroup 0's */
    for (uint32_t turn = 0;; turn++, tasks.at.next()) {
        const GemmTask task = tasks.wait(s);
        sync_warp();
        if (lane_idx() == 0)
            tasks.release(s);
        if (task.num_k_blocks == 0)
            return;
        if (Tile::ping_pong && turn % 2 != warpgroup) {
            at.skip((uint32_t)task.num_k_blocks);
            continue;
        }
        if (Tile::ping_pong)
            barrier_named_sync(BARRIER_MATH_TURN + warpgroup, both);          /* else a stage's parity may be that of two fillings before */
        note_task(epilogue, turn, TRACE_PRODUCT_BEGINS);
        const uint32_t last = multiply_task<MajorK, MajorK>(s, acc, at, task.num_k_blocks, first_row, false, WholeBlocks());
        if (Tile::ping_pong)
            barrier_named_arrive(BARRIER_MATH_TURN + (warpgroup ^ 1), both);  /* handed on as soon as the MMAs are issued */
        acc.wait_all();
        release_stage(s, last);
        note_task(epilogue, turn, TRACE_EPILOGUE_BEGINS);
        epilogue(task, acc, out);
        note_task(epilogue, turn, TRACE_EPILOGUE_ENDS);
    }
}

} /* namespace mk */
#endif
