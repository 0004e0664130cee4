/* The backward's entries. What the roles do is in stage/backward.cuh. */
#include "cuda/stage/backward.cuh"
#ifdef MK_SM100
#include "cuda/stage/backward_sm100.cuh"
#endif
#include "cuda/stage/s5_combine_bwd.cuh"

using namespace mk;

template <bool Mx, class Tile = BackwardTile<Mx>> MK_DEVICE void backward_fused(const mk_backward_params &p)
{
    BackwardShared<Mx, Tile> &s = *static_cast<BackwardShared<Mx, Tile> *>(shared_base());
    const mk_table t = mk_table_at(&p.rank.memory, p.schedule);
    const uint32_t warp = warp_idx();
    gemm_begin(s.gemm, 1, [&] { backward_init(p, t, s); });
    if (warp >= kFirstMathWarp) {
        registers_raise<kBackwardRegistersMath>();
        backward_math(p, s, warp / 4 - 1);
    } else {
        registers_lower<kBackwardRegistersOther>();
        BackwardProgram<Mx, Tile> program = {p, s, t, {s.yield, device_state(p.rank)->tickets, p.yield}};
        if (warp == 0 && lane_idx() == 0)
            backward_load(p, s);
        else if (warp == 1 && lane_idx() == 0)
            backward_schedule(p, s, program);
        else if (warp == 2)
            backward_dispatch(p, t, s);
        else if (warp == 3)
            backward_wait(p, t, s);
    }
    sync_warp();
    gemm_end(s.gemm);
    if (thread_idx() == 0)
        trace_close(p.rank, s.trace);
}

/* Hopper, the whole pass. The launch of mok_backward_fused beside it draws two tasks at a time, as this does. */
MK_ENTRY MK_KERNEL(kGemmThreads) mok_backward_fused_quad([[maybe_unused]] MK_KERNEL_PARAM mk_backward_params p)
{
#ifndef MK_SM100
    backward_fused<false, TileBackwardQuad>(p);
#endif
}
MK_ENTRY MK_KERNEL(kGemmThreads) mok_backward_fused(MK_KERNEL_PARAM mk_backward_params p) { backward_fused<false>(p); }
MK_ENTRY MK_KERNEL(kGemmThreads) mok_backward_fused_mx(MK_KERNEL_PARAM mk_backward_params p) { backward_fused<true>(p); }

MK_ENTRY MK_KERNEL(256) mok_shared_scale(MK_KERNEL_PARAM mk_combine_bwd_params p)
{
    if (!skipped(p.rank))
        shared_scales(p);
}

MK_ENTRY MK_KERNEL(256) mok_s5_combine_bwd(MK_KERNEL_PARAM mk_combine_bwd_params p)
{
    const TraceLaunch trace(p.rank, MK_TRACE_s5_reduce_bwd);
    const bool first = block_idx() == 0 && thread_idx() == 0, skip = skipped(p.rank);
    if (first && skip)
        tell_missing(p.rank);
    if (first && !skip)
        tell_who_gave_up(p.rank);
    if (!skip)
        s5_combine_bwd(p);
}
