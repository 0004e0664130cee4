/* The backward's roles on Blackwell's core (gemm/pair.cuh): what is said in stage/backward.cuh, for a pair of CTAs. */
#ifndef MK_STAGE_BACKWARD_SM100_CUH
#define MK_STAGE_BACKWARD_SM100_CUH

#include "cuda/stage/backward.cuh"

namespace mk {

MK_DEVICE bool is_wgrad(const GemmTask &task) { return stage_of(task.kind & TASK_KIND_MASK) == MK_TASK_WGRAD; }

/* Two tasks of weight gradients share the rows of one piece, not only columns; who helps with one reads its rows too. */
template <bool Mx> struct Pairing<BackwardProgram<Mx>> {
    static MK_MEMBER uint32_t first(const BackwardProgram<Mx> &program, uint32_t drawn) { return 2 * drawn - program.s.first; } /* launches of a stage begin anywhere */
    static MK_MEMBER bool fit(const GemmTask &a, const GemmTask &b)
    {
        return (a.kind | TASK_SAVED) == (b.kind | TASK_SAVED) && a.expert == b.expert && a.col == b.col && a.num_k_blocks == b.num_k_blocks &&
               (!is_wgrad(a) || a.tag == b.tag);
    }
    static MK_MEMBER GemmTask helper(GemmTask task)
    {
        task.out_row = kNoRows;
        if (is_wgrad(task))
            return task;
        task.row = kNoRows;
        task.num_rows = 0;
        return task;
    }
};

/* A K block: all 128 rows of A, as two boxes, and this CTA's half of B's, the second of which follows on the axis that is not contracted. */
template <bool Mx> MK_DEVICE void load_bf16_block(BackwardShared<Mx> &s, uint32_t stage, const GemmTask &task, const LoadRun &r)
{
    const uint32_t full = smem_addr(&s.gemm.full[stage]), bar = cluster_addr(full, 0), a = smem_addr(s.gemm.a[stage]), b = smem_addr(s.gemm.b[stage]);
    const bool gate_up = stage_of(task.kind & TASK_KIND_MASK) == MK_TASK_GATE_UP, a_outer = is_wgrad(task);
    const mk_tensor_map *map_b = gate_up && cluster_rank() == 1 ? r.b_high : r.b_low;
    const int32_t b_x = gate_up ? r.b_x : r.b_x + (int32_t)(cluster_rank() * TileBackward::cols / 2);
    if (cluster_rank() == 0)
        mbar_arrive_expect_tx_release_cta(full, 2 * kPairStageBytes);
    tma_load_3d_pair(a, r.a, r.a_x, r.a_y, 0, bar);
    tma_load_3d_pair(a + kBoxBytes, r.a, a_outer ? r.a_x + 64 : r.a_x, a_outer ? r.a_y : r.a_y + 64, 0, bar);
    tma_load_3d_pair(b, map_b, b_x, r.b_y, r.b_depth, bar);
    tma_load_3d_pair(b + kBoxBytes, map_b, gate_up ? b_x : b_x + 64, gate_up ? r.b_y + 64 : r.b_y, r.b_depth, bar);
}

/* The same of e4m3, with scales: of this CTA's rows of A, and of both halves of B. The map of an operand's scales follows the operand's. K is x of the operands, or
 * y of a weight gradient's; of the scales it is x always. Boxes are 64 rows, whichever axis these are. */
template <bool Mx> MK_DEVICE void load_scaled_block(BackwardShared<Mx> &s, uint32_t stage, const GemmTask &task, const LoadRun &r)
{
    const uint32_t full = smem_addr(&s.gemm.full[stage]), bar = cluster_addr(full, 0), a = smem_addr(s.gemm.a[stage]), b = smem_addr(s.gemm.b[stage]);
    const bool outer = is_wgrad(task);
    const int32_t half = (task.kind & TASK_KIND_MASK) == MK_TASK_GATE_UP ? 0 : (int32_t)TileBackward::cols / 2; /* from one half of B to the other */
    const int32_t k = outer ? r.a_y : r.a_x, a_row = outer ? r.a_x : r.a_y, b_row = outer ? r.b_x : r.b_y, scale_x = k * 2; /* mk_tensor_scales */
    const mk_tensor_map *map_b = cluster_rank() == 1 ? r.b_high : r.b_low;
    const int32_t own_row = cluster_rank() == 1 ? b_row + half : b_row, b_x = outer ? own_row : r.b_x, b_y = outer ? r.b_y : own_row;
    if (cluster_rank() == 0)
        mbar_arrive_expect_tx_release_cta(full, 2 * (kPairStageBytes + kStageScaleBytes));
    tma_load_3d_pair(smem_addr(s.gemm.scales[stage][0]), r.a + 1, scale_x, a_row / MK_SCALE_ATOM_ROWS, 0, bar);
    tma_load_3d_pair(smem_addr(s.gemm.scales[stage][1]), r.b_low + 1, scale_x, b_row / MK_SCALE_ATOM_ROWS, r.b_depth, bar);
    tma_load_3d_pair(smem_addr(s.gemm.scales[stage][2]), r.b_high + 1, scale_x, (b_row + half) / MK_SCALE_ATOM_ROWS, r.b_depth, bar);
    tma_load_3d_pair(a, r.a, r.a_x, r.a_y, 0, bar);
    tma_load_3d_pair(a + kBoxBytes, r.a, r.a_x, r.a_y + 64, 0, bar);
    tma_load_3d_pair(b, map_b, b_x, b_y, r.b_depth, bar);
    tma_load_3d_pair(b + kBoxBytes, map_b, b_x, b_y + 64, r.b_depth, bar);
}

template <bool Mx> MK_DEVICE void backward_load_block(BackwardShared<Mx> &s, uint32_t stage, const GemmTask &task, const LoadRun &r)
{
    if constexpr (Mx)
        if (is_scaled<Mx>(task))
            return load_scaled_block(s, stage, task, r);
    load_bf16_block(s, stage, task, r);
}

/* What the backward's tasks want of the core. */
template <bool Mx> struct BackwardTasks {
    const mk_backward_params &p;
    BackwardShared<Mx> &s;

    /* Epilogues read what other CTAs wrote, by plain loads. */
    MK_MEMBER void see(uint32_t slot, uint32_t parity) const { wait_mbar(smem_addr(&s.ready[slot]), parity, "backward_math: operands of a task are ready"); }

    MK_MEMBER PairRecipe recipe(const GemmTask &task) const
    {
        PairRecipe how;
        how.scaled = is_scaled<Mx>(task);
        how.a_outer = is_wgrad(task);
        how.b_outer = how.a_outer || (!how.scaled && stage_of(task.kind & TASK_KIND_MASK) != MK_TASK_GATE_UP);
        if (!is_wgrad(task))
            return how;
        how.continues = !(task.kind & WGRAD_FIRST);
        how.missing_rows = (uint32_t)task.num_k_blocks * block_depth(how.scaled) - (uint32_t)task.num_rows;
        return how;
    }

    MK_MEMBER void begin(const GemmTask &task, Acc<BackwardTile<Mx>> &acc, const WarpOut &out) const
    {
        Wgrad{p.rank, p.grads, p.rank.dims.intermediate}.preload(task, acc, out);
    }

    MK_MEMBER void meanwhile(const GemmTask &task, const WarpOut &out) const
    {
        BackwardMath<Mx>{p, s}.prepare(task, out);
    }
};

template <bool Mx> struct BackwardEpilogue {
    BackwardMath<Mx> math;
    LaneRow row; /* of the task under way */
    MK_MEMBER void operator()(const GemmTask &task, const Acc<BackwardTile<Mx>> &acc, const WarpOut &out) const { math.finish(task, acc, out, row); }
};

template <bool Mx> MK_DEVICE void before_task(BackwardEpilogue<Mx> &e, const GemmTask &task, const WarpOut &out) { e.row = e.math.look(task, out); }

template <bool Mx> MK_DEVICE void note_task(const BackwardEpilogue<Mx> &e, uint32_t number, TraceStamp stamp) { trace_stamp(e.math.p.rank, e.math.s.trace, number, stamp); }

/* One warpgroup. */
template <bool Mx> MK_DEVICE void backward_math(const mk_backward_params &p, BackwardShared<Mx> &s, uint32_t warpgroup)
{
    BackwardEpilogue<Mx> epilogue = {{p, s}, {}};
    pair_math(s.gemm, warpgroup, epilogue, BackwardTasks<Mx>{p, s});
}

/* One thread of each CTA. */
template <bool Mx> MK_DEVICE void backward_schedule(const mk_backward_params &p, BackwardShared<Mx> &s, BackwardProgram<Mx> &program)
{
    if (cluster_rank() == kScheduleRank<BackwardTile<Mx>>)
        pair_schedule(s.gemm, program);
    else
        pair_mma(s.gemm, BackwardTasks<Mx>{p, s});
}

} /* namespace mk */
#endif
