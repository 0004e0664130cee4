/* The grouped GEMM core, part 6: a whole CTA that does nothing else. */
#ifndef MK_GEMM_GEMM_CUH
#define MK_GEMM_GEMM_CUH

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/grouped.cuh"
#include "cuda/gemm/load.cuh"
#include "cuda/gemm/mma.cuh"
#include "cuda/gemm/pair.cuh"

namespace mk {

/* A kernel on the core calls these three, whatever the chip: begin by all threads, then its roles, then end by all threads. Between, nobody
 * leaves while a CTA of the cluster may still arrive here or send data. `init` is run by one thread and prepares what is the kernel's own. */
template <class Tile, class Init> MK_DEVICE void gemm_begin(GemmShared<Tile> &s, uint32_t more_readers, const Init &init)
{
    if (thread_idx() == 0) {
        if constexpr (Tile::tensor_memory)
            pair_init(s, more_readers);
        else
            gemm_init(s, more_readers);
        init();
    }
    if constexpr (Tile::tensor_memory)
        if (warp_idx() == 1)
            pair_allocate(s);
    barrier_cluster_arrive_release();
    barrier_cluster_wait_acquire();
    if constexpr (Tile::tensor_memory)
        tcgen05_fence_after_sync();
}

/* The roles of warps 0 and 1 and of the math warps. `of`: with tensor memory, what the program's tasks want of the core. */
template <class Tile, class Program, class Tasks = PlainTasks<Tile>>
MK_DEVICE void gemm_load_or_schedule(GemmShared<Tile> &s, uint32_t warp, Program &program, [[maybe_unused]] const Tasks &of = {})
{
    if (lane_idx() != 0)
        return;
    if constexpr (Tile::tensor_memory) {
        if (warp == 0)
            gemm_load(s, program, [&](uint32_t stage, const GemmTask &task, const auto &in, int32_t k) { load_pair_stage(s, stage, task, in, k); });
        else if (cluster_rank() == kScheduleRank<Tile>)
            pair_schedule(s, program);
        else
            pair_mma(s, of);
    } else {
        if (warp == 0)
            gemm_load(s, program, [&](uint32_t stage, const GemmTask &task, const GemmInput &in, int32_t k) { load_stage(s, stage, task, in, k); });
        else if (cluster_rank() == kScheduleRank<Tile>)
            gemm_schedule(s, program);
    }
}

template <class Tile, class Epilogue, class Tasks = PlainTasks<Tile>>
MK_DEVICE void gemm_finish(GemmShared<Tile> &s, uint32_t warp, Epilogue &epilogue, [[maybe_unused]] const Tasks &of = {})
{
    if constexpr (Tile::tensor_memory)
        pair_math(s, warp / 4 - 1, epilogue, of);
    else
        gemm_math(s, warp / 4 - 1, epilogue);
}

template <class Tile> MK_DEVICE void gemm_end([[maybe_unused]] GemmShared<Tile> &s)
{
    barrier_cluster_arrive_release();
    barrier_cluster_wait_acquire();
    if constexpr (Tile::tensor_memory)
        if (warp_idx() == 1)
            pair_release(s);
}

/* kGemmThreads threads, clusters of Tile::cluster, sizeof(GemmShared<Tile>) bytes of dynamic shared memory. */
template <class Tile, class Program, class Epilogue> MK_DEVICE void gemm_cta(Program &program, Epilogue &epilogue)
{
    GemmShared<Tile> &s = *static_cast<GemmShared<Tile> *>(shared_base());
    const uint32_t warp = warp_idx();
    gemm_begin(s, 0, [] {});
    if (warp >= kFirstMathWarp) {
        registers_raise<kRegistersMath>();
        gemm_finish(s, warp, epilogue);
    } else {
        registers_lower<kRegistersOther>();
        if (warp < 2)
            gemm_load_or_schedule(s, warp, program);
        sync_warp();
    }
    gemm_end(s);
}

template <class Tile, class Program, class Epilogue> MK_KERNEL(kGemmThreads) gemm_kernel(MK_KERNEL_PARAM Program program, MK_KERNEL_PARAM Epilogue epilogue)
{
    gemm_cta<Tile>(program, epilogue);
}

} /* namespace mk */
#endif
