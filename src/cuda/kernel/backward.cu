/* The backward's entries. What the roles do is in stage/backward.cuh. */
#include "cuda/stage/backward.cuh"
#ifdef MK_SM100
#include "cuda/stage/backward_sm100.cuh"
#endif
#include "cuda/stage/s5_combine_bwd.cuh"

using namespace mk;

template <bool Mx> MK_DEVICE void backward_fused(const mk_backward_params &p)
{
    BackwardShared<Mx> &s = *static_cast<BackwardShared<Mx> *>(shared_base());
    const mk_table t = mk_table_at(&p.rank.memory, p.schedule);
    const uint32_t warp = warp_idx();
    gemm_begin(s.gemm, 1, [&] { backward_init<Mx>(p, t, s); });
    if (warp >= kFirstMathWarp) {
        registers_raise<kBackwardRegistersMath>();
        backward_math<Mx>(p, s, warp / 4 - 1);
    } else {
        registers_lower<kBackwardRegistersOther>();
        BackwardProgram<Mx> program = {p, s, t, {s.yield, device_state(p.rank)->tickets, p.yield}};
        if (warp == 0 && lane_idx() == 0)
            backward_load<Mx>(s);
        else if (warp == 1 && lane_idx() == 0)
            backward_schedule(p, s, program);
        else if (warp == 2)
            backward_dispatch<Mx>(p, t, s);
        else if (warp == 3)
            backward_wait(p, t, s);
    }
    sync_warp();
    gemm_end(s.gemm);
    if (thread_idx() == 0)
        trace_close(p.rank, s.trace);
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
