/* The fused forward's entry: the switch of roles. What they do is in stage/forward.cuh. */
#include "cuda/stage/forward.cuh"

using namespace mk;

template <bool Mx> MK_DEVICE void forward_fused(const mk_forward_params &p)
{
    ForwardShared<Mx> &s = *static_cast<ForwardShared<Mx> *>(shared_base());
    const ForwardTasks<Mx> tasks;
    ForwardProgram<Mx> program = {p, s, mk_table_at(&p.rank.memory, p.schedule), {}, {s.yield, device_state(p.rank)->tickets, p.yield}};
    const ForwardEpilogue<Mx> epilogue = {p, program.t};
    const uint32_t warp = warp_idx();
    gemm_begin(s.gemm, 1, [&] { forward_init(p, s); });
    if (warp >= kFirstMathWarp) {
        registers_raise<kForwardRegistersMath>();
        gemm_finish(s.gemm, warp, epilogue, tasks);
    } else {
        registers_lower<kForwardRegistersOther>();
        if (warp < 2)
            gemm_load_or_schedule(s.gemm, warp, program, tasks);
        else if (warp == 2)
            forward_dispatch<Mx>(p, s);
        else if (warp == 3 && lane_idx() == 0)
            forward_wait(p, program.t, s);
        sync_warp();
    }
    gemm_end(s.gemm);
    if (thread_idx() == 0)
        trace_close(p.rank, s.trace);
}

MK_ENTRY MK_KERNEL(kGemmThreads) mok_forward_fused(MK_KERNEL_PARAM mk_forward_params p) { forward_fused<false>(p); }
MK_ENTRY MK_KERNEL(kGemmThreads) mok_forward_fused_mx(MK_KERNEL_PARAM mk_forward_params p) { forward_fused<true>(p); }
