/* The grouped GEMM core in clusters of four (Hopper): two tasks of the same columns, two column tiles of each, so that both operands are shared.
 *
 *              column tile 0     column tile 1
 *     task n        CTA 0             CTA 1        share A: each loads 64 of its 128 rows for both
 *     task n+1      CTA 2             CTA 3
 *                share B: each loads 64 of its 128 columns for both
 *
 * A K block so takes 16 KiB of every SM from L2, where clusters of two take 24. Clusters of four leave SMs over that no more of them fit on: clusters of two beside
 * them draw from the same ticket, two tasks at a time as well, so that tasks which belong together stay so. */
#ifndef MK_GEMM_QUAD_CUH
#define MK_GEMM_QUAD_CUH

#include "cuda/gemm/load.cuh"
#include "cuda/gemm/pairing.cuh"

namespace mk {

/* ---- schedule ---- */

/* Both tasks to their CTAs. */
template <class Tile> MK_DEVICE void post_quad(GemmShared<Tile> &s, RingCursor<kTaskSlots> &at, const GemmTask (&first)[2], const GemmTask (&second)[2])
{
    wait_mbar_cluster(smem_addr(&s.task_empty[at.slot]), at.parity ^ 1, "gemm_schedule: free task slot");
    MK_UNROLL for (uint32_t column = 0; column < 2; column++) {
        post_task(s, at.slot, column, first[column]);
        post_task(s, at.slot, 2 + column, second[column]);
    }
    at.next();
}

/* One thread of the leading CTA: as gemm_schedule. */
template <class Tile, class Program> MK_DEVICE void quad_schedule(GemmShared<Tile> &s, Program &program)
{
    using Pairs = Pairing<Program>;
    RingCursor<kTaskSlots> at;
    uint32_t drawn = program.next();
    for (;;) {
        const uint32_t number = Pairs::first(program, drawn);
        GemmTask first[2] = {}, second[2] = {};
        drawn = program.next();
        const bool any = program.task(number, 0, first[0]) && program.task(number, 1, first[1]);
        const bool both = any && program.task(number + 1, 0, second[0]) && program.task(number + 1, 1, second[1]);
        if (!any) {
            post_quad(s, at, first, second);
            return;
        }
        if (both && Pairs::fit(first[0], second[0])) {
            post_quad(s, at, first, second);
            continue;
        }
        post_quad(s, at, first, {Pairs::helper(first[0]), Pairs::helper(first[1])});
        if (both)
            post_quad(s, at, second, {Pairs::helper(second[0]), Pairs::helper(second[1])});
    }
}

/* ---- load ---- */

/* Who gets a share of a task's rows; of a column tile's columns. */
MK_DEVICE uint16_t quad_row(uint32_t row) { return (uint16_t)(3 << 2 * row); }
MK_DEVICE uint16_t quad_column(uint32_t column) { return (uint16_t)(5 << column); }

/* This CTA's shares of K block k: half of its rows of A, for the other column tile too, and half of its columns of B, for the other task too. */
template <class Tile> MK_DEVICE void load_quad_stage(GemmShared<Tile> &s, uint32_t stage, const GemmTask &task, const GemmInput &in, int32_t k)
{
    const uint32_t full = smem_addr(&s.full[stage]), column = cluster_rank() % 2, row = cluster_rank() / 2;
    const uint32_t rows = column * kBoxRowsA<Tile>, cols = row * kBoxRowsB<Tile>;
    const int32_t x = k * (int32_t)kBlockK;
    mbar_arrive_expect_tx_release_cta(full, kStageBytes<Tile>);
    tma_load_2d_multicast(smem_addr(s.a[stage]) + rows * kRowBytes, in.a, x, task.row + (int32_t)rows, full, quad_row(row));
    tma_load_3d_multicast(smem_addr(s.b[stage]) + cols * kRowBytes, row ? in.b_high : in.b_low, x, row ? task.col + in.b_high_row : task.col, in.b_depth, full,
                          quad_column(column));
}

} /* namespace mk */
#endif
