/* The fused forward's entry: the switch of roles. What they do is in stage/forward.cuh. */
#include "cuda/stage/forward.cuh"

using namespace mk;

MK_ENTRY MK_KERNEL(kGemmThreads) mok_forward_fused(MK_KERNEL_PARAM mk_forward_params p)
{
    ForwardShared &s = *static_cast<ForwardShared *>(shared_base());
    ForwardProgram program = {p, s, mk_table_at(&p.rank.memory, p.schedule), {}};
    const ForwardEpilogue epilogue = {p, program.t};
    const uint32_t warp = warp_idx();
    if (thread_idx() == 0)
        forward_init(p, s);
    barrier_cluster_arrive_release();
    barrier_cluster_wait_acquire();
    if (warp >= kFirstMathWarp) {
        registers_raise<kForwardRegistersMath>();
        gemm_math(s.gemm, warp / 4 - 1, epilogue);
    } else {
        registers_lower<kForwardRegistersOther>();
        if (warp == 0 && lane_idx() == 0)
            gemm_load(s.gemm, program);
        else if (warp == 1 && lane_idx() == 0 && cluster_rank() == 0)
            gemm_schedule(s.gemm, program);
        else if (warp == 2)
            forward_dispatch(p, s.walk, s.dispatch);
        else if (warp == 3 && lane_idx() == 0)
            forward_wait(p, program.t, s);
        sync_warp();
    }
    /* Nobody leaves while a CTA of the cluster may still arrive here or send data. */
    barrier_cluster_arrive_release();
    barrier_cluster_wait_acquire();
}
