/* Two tasks at a time, where the CTAs of a cluster share B (pair.cuh, quad.cuh): row tiles that follow each other in the walk, of the same expert and
 * columns. Where there are no such two (the end of an expert with an odd number of tiles, the end of a group), the cluster does one after
 * the other, and the other task's CTAs help: they load and multiply what is shared, with rows of zeros for A, and store nothing. */
#ifndef MK_GEMM_PAIRING_CUH
#define MK_GEMM_PAIRING_CUH

#include "cuda/gemm/tile.cuh"

namespace mk {

constexpr int32_t kNoRows = 1 << 30; /* rows from here on are past every map: zeros */

/* Which two tasks may be done at once, and what CTAs do that only help. */
template <class Program> struct Pairing {
    /* The first task of the two that were drawn. */
    static MK_MEMBER uint32_t first(const Program &, uint32_t drawn) { return 2 * drawn; }
    static MK_MEMBER bool fit(const GemmTask &a, const GemmTask &b)
    {
        return a.kind == b.kind && a.expert == b.expert && a.col == b.col && a.num_k_blocks == b.num_k_blocks;
    }
    static MK_MEMBER GemmTask helper(GemmTask task)
    {
        task.row = task.out_row = kNoRows;
        task.num_rows = 0;
        return task;
    }
};
MK_DEVICE bool only_helps(const GemmTask &task) { return task.out_row == kNoRows; }

} /* namespace mk */
#endif
