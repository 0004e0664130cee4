/* s2_gate_up on the device: gate and up of one minibatch (or of the shared expert); hosts s3_swiglu in its epilogue. h goes to the ring,
 * gate and up of saved rows to the context. */
#ifndef MK_STAGE_S2_GATE_UP_CUH
#define MK_STAGE_S2_GATE_UP_CUH

#include "cuda/stage/rows.cuh"

namespace mk {

template <class Tile> MK_DEVICE void s2_gate_up(const mk_gemm_params &p)
{
    const mk_rank_params &r = p.rank;
    const mk_memory &m = r.memory;
    const int64_t cols = p.num_cols, saved_rows = p.shared ? p.num_tokens : r.dims.saved_tiles * MK_ROW_TILE;
    char *context = r.dims.saved_tiles ? static_cast<char *>(p.context) : nullptr;
    const SavedRows nowhere = {nullptr, cols, 0};
    const SavedRows gate = {reinterpret_cast<bf16 *>(context + (p.shared ? m.saved_shared_gate : m.saved_gate)), cols, saved_rows};
    const SavedRows up = {reinterpret_cast<bf16 *>(context + (p.shared ? m.saved_shared_up : m.saved_up)), cols, saved_rows};
    const RingRows h = {in_local<bf16>(r, p.shared ? m.shared_h : m.ring_h), cols};
    StageProgram<Tile> program(p, Tile::cols / 2);
    const SwigluRows<RingRows, SavedRows> epilogue = {h, context ? gate : nowhere, context ? up : nowhere, r.swiglu_limit};
    gemm_cta<Tile>(program, epilogue);
}

} /* namespace mk */
#endif
