/* The staged forward: one launch per stage. Oracle of everything fused, and the stages' own bench. Grids and parameters: params.h. */
#include "cuda/stage/call.cuh"
#include "cuda/stage/s0_schedule.cuh"
#include "cuda/stage/s1_dispatch.cuh"
#include "cuda/stage/s2_gate_up.cuh"
#include "cuda/stage/s4_down.cuh"
#include "cuda/stage/s5_combine.cuh"
#include "cuda/stage/trace.cuh"
#include "cuda/stage/weights.cuh"

using namespace mk;

MK_DEVICE int64_t grid_thread() { return (int64_t)block_idx() * 256 + thread_idx(); }
MK_DEVICE int64_t grid_threads() { return (int64_t)num_blocks() * 256; }
MK_DEVICE int64_t grid_warp() { return grid_thread() / 32; }

MK_ENTRY MK_KERNEL(128) mok_weight_maps(MK_KERNEL_PARAM mk_weight_maps_params p) { make_weight_maps(p); }

MK_ENTRY MK_KERNEL(128) mok_call_begin(MK_KERNEL_PARAM mk_begin_params p)
{
    begin_call(p);
}

MK_ENTRY MK_KERNEL(128) mok_rank_barrier(MK_KERNEL_PARAM mk_rank_params r)
{
    const TraceLaunch trace(r, MK_TRACE_rank_barrier);
    if (!skipped(r)) /* all ranks skip alike, so none waits for one that does not come */
        rank_barrier(r);
}

MK_ENTRY MK_KERNEL(128) mok_call_check(MK_KERNEL_PARAM mk_open_params p)
{
    if (!skipped(p.rank))
        check_call(p);
}

MK_ENTRY MK_KERNEL(256) mok_s0_count(MK_KERNEL_PARAM mk_s0_params p)
{
    const TraceLaunch trace(p.rank, MK_TRACE_s0_schedule);
    if (!skipped(p.rank))
        s0_count(p, grid_warp());
}

MK_ENTRY MK_KERNEL(256) mok_s0_scan(MK_KERNEL_PARAM mk_s0_params p)
{
    const TraceLaunch trace(p.rank, MK_TRACE_s0_schedule);
    if (!skipped(p.rank))
        s0_scan(p, block_idx());
}

MK_ENTRY MK_KERNEL(256) mok_s0_segments(MK_KERNEL_PARAM mk_s0_params p)
{
    const TraceLaunch trace(p.rank, MK_TRACE_s0_schedule);
    if (!skipped(p.rank))
        s0_segments(p);
}

MK_ENTRY MK_KERNEL(256) mok_s0_place(MK_KERNEL_PARAM mk_s0_params p)
{
    const TraceLaunch trace(p.rank, MK_TRACE_s0_schedule);
    if (!skipped(p.rank))
        s0_place(p, grid_warp());
}

MK_ENTRY MK_KERNEL(256) mok_s0_copies(MK_KERNEL_PARAM mk_s0_params p)
{
    const TraceLaunch trace(p.rank, MK_TRACE_s0_schedule);
    if (!skipped(p.rank))
        s0_copies(p, grid_thread(), grid_threads());
}

MK_ENTRY MK_KERNEL(32) mok_s1_dispatch(MK_KERNEL_PARAM mk_dispatch_params p)
{
    if (!skipped(p.rank))
        s1_dispatch<false>(p);
}

MK_ENTRY MK_KERNEL(32) mok_s1_dispatch_mx(MK_KERNEL_PARAM mk_dispatch_params p)
{
    if (!skipped(p.rank))
        s1_dispatch<true>(p);
}

MK_ENTRY MK_KERNEL(kGemmThreads) mok_s2_gate_up_wide(MK_KERNEL_PARAM mk_gemm_params p) { s2_gate_up<TileStageWide>(p); }
MK_ENTRY MK_KERNEL(kGemmThreads) mok_s2_gate_up_narrow(MK_KERNEL_PARAM mk_gemm_params p) { s2_gate_up<TileStageNarrow>(p); }
MK_ENTRY MK_KERNEL(kGemmThreads) mok_s2_gate_up_wide_mx(MK_KERNEL_PARAM mk_gemm_params p) { s2_gate_up_mx<TileStageWideMx>(p); }
MK_ENTRY MK_KERNEL(kGemmThreads) mok_s2_gate_up_narrow_mx(MK_KERNEL_PARAM mk_gemm_params p) { s2_gate_up_mx<TileStageNarrowMx>(p); }
MK_ENTRY MK_KERNEL(kGemmThreads) mok_s4_down_wide(MK_KERNEL_PARAM mk_gemm_params p) { s4_down<TileStageWide>(p); }
MK_ENTRY MK_KERNEL(kGemmThreads) mok_s4_down_narrow(MK_KERNEL_PARAM mk_gemm_params p) { s4_down<TileStageNarrow>(p); }
MK_ENTRY MK_KERNEL(kGemmThreads) mok_s4_down_wide_mx(MK_KERNEL_PARAM mk_gemm_params p) { s4_down<TileStageWideMx, MxStageProgram<TileStageWideMx>>(p); }
MK_ENTRY MK_KERNEL(kGemmThreads) mok_s4_down_narrow_mx(MK_KERNEL_PARAM mk_gemm_params p) { s4_down<TileStageNarrowMx, MxStageProgram<TileStageNarrowMx>>(p); }

MK_ENTRY MK_KERNEL(256) mok_s5_combine(MK_KERNEL_PARAM mk_combine_params p)
{
    const TraceLaunch trace(p.rank, MK_TRACE_s5_reduce);
    const bool first = block_idx() == 0 && thread_idx() == 0, skip = skipped(p.rank);
    if (first && skip)
        tell_missing(p.rank);
    if (first && !skip)
        tell_who_gave_up(p.rank);
    if (!skip)
        s5_combine(p);
}
