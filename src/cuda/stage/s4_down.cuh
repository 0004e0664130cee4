/* s4_down on the device: y of one minibatch, pushed to the tokens' ranks by its epilogue (s5_combine's first half); or the shared
 * expert's y, which stays here. */
#ifndef MK_STAGE_S4_DOWN_CUH
#define MK_STAGE_S4_DOWN_CUH

#include "cuda/stage/rows.cuh"

namespace mk {

template <class Tile, class Program = StageProgram<Tile>> MK_DEVICE void s4_down(const mk_gemm_params &p)
{
    const mk_rank_params &r = p.rank;
    Program program(p, Tile::cols);
    const StoreRows<SlotRows> epilogue = {{r, program.t.rows, p.shared ? in_local<bf16>(r, r.memory.shared_y) : nullptr, p.num_cols}};
    gemm_cta<Tile>(program, epilogue);
}

} /* namespace mk */
#endif
