/* The fused forward's entry: the switch of roles. What they do is in stage/forward.cuh. */
#include "cuda/stage/forward.cuh"

using namespace mk;

/* The roles of the GEMM core, which differ by tile. */
template <bool Mx> MK_DEVICE void forward_finish(const mk_forward_params &p, ForwardShared<Mx> &s, const mk_table &t, uint32_t warp)
{
    if constexpr (!kForwardStores<Mx>) {
        const ForwardEpilogue<Mx> epilogue = {p, t};
        registers_raise<kForwardRegistersMath>();
        gemm_finish(s.gemm, warp, epilogue, ForwardTasks<Mx>());
    } else if (warp >= kFirstBroadMathWarp) {
        registers_raise<kBroadRegistersMath>();
        broad_math(s.gemm, (warp - kFirstBroadMathWarp) / 4, warp % 4, ForwardStore{p, t});
    } else {
        registers_lower<kBroadRegistersStore>();
        broad_store(s.gemm, warp - kFirstStoreWarp, ForwardStore{p, t});
    }
}
template <bool Mx> MK_DEVICE void forward_load_or_schedule(ForwardShared<Mx> &s, ForwardProgram<Mx> &program, uint32_t warp)
{
    if constexpr (!kForwardStores<Mx>)
        gemm_load_or_schedule(s.gemm, warp, program, ForwardTasks<Mx>());
    else
        broad_load_or_schedule(s.gemm, warp, program);
}

template <bool Mx> MK_DEVICE void forward_fused(const mk_forward_params &p)
{
    ForwardShared<Mx> &s = *static_cast<ForwardShared<Mx> *>(shared_base());
    ForwardProgram<Mx> program = {p, s, mk_table_at(&p.rank.memory, p.schedule), {}, {s.yield, device_state(p.rank)->tickets, p.yield}};
    const uint32_t warp = warp_idx();
    gemm_begin(s.gemm, kForwardStores<Mx> ? 1 + kStoreWarps : 1, [&] { forward_init(p, s); });
    if (warp >= kFirstMathWarp) {
        forward_finish<Mx>(p, s, program.t, warp);
    } else {
        registers_lower<kForwardRegistersOther>();
        if (warp < 2)
            forward_load_or_schedule<Mx>(s, program, warp);
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

MK_ENTRY MK_KERNEL(kForwardThreads<false>) mok_forward_fused(MK_KERNEL_PARAM mk_forward_params p) { forward_fused<false>(p); }
MK_ENTRY MK_KERNEL(kForwardThreads<true>) mok_forward_fused_mx(MK_KERNEL_PARAM mk_forward_params p) { forward_fused<true>(p); }
