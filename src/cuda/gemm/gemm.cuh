/* The grouped GEMM core, part 6: a whole CTA that does nothing else. */
#ifndef MK_GEMM_GEMM_CUH
#define MK_GEMM_GEMM_CUH

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/grouped.cuh"
#include "cuda/gemm/load.cuh"
#include "cuda/gemm/mma.cuh"

namespace mk {

/* kGemmThreads threads, clusters of Tile::cluster, sizeof(GemmShared<Tile>) bytes of dynamic shared memory. */
template <class Tile, class Program, class Epilogue> MK_DEVICE void gemm_cta(Program &program, Epilogue &epilogue)
{
    GemmShared<Tile> &s = *static_cast<GemmShared<Tile> *>(shared_base());
    const uint32_t warp = warp_idx();
    if (thread_idx() == 0)
        gemm_init(s);
    barrier_cluster_arrive_release();
    barrier_cluster_wait_acquire();
    if (warp >= kFirstMathWarp) {
        registers_raise<kRegistersMath>();
        gemm_math(s, warp / 4 - 1, epilogue);
    } else {
        registers_lower<kRegistersOther>();
        if (warp == 0 && lane_idx() == 0)
            gemm_load(s, program);
        else if (warp == 1 && lane_idx() == 0 && cluster_rank() == 0)
            gemm_schedule(s, program);
        sync_warp();
    }
    /* Nobody leaves while a CTA of the cluster may still arrive here or send data. */
    barrier_cluster_arrive_release();
    barrier_cluster_wait_acquire();
}

template <class Tile, class Program, class Epilogue> MK_KERNEL(kGemmThreads) gemm_kernel(MK_KERNEL_PARAM Program program, MK_KERNEL_PARAM Epilogue epilogue)
{
    gemm_cta<Tile>(program, epilogue);
}

} /* namespace mk */
#endif
