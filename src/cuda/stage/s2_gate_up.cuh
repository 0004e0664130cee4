/* s2_gate_up on the device: gate and up of one minibatch (or of the shared expert); hosts s3_swiglu in its epilogue. h goes to the ring,
 * gate and up of saved rows to the context. */
#ifndef MK_STAGE_S2_GATE_UP_CUH
#define MK_STAGE_S2_GATE_UP_CUH

#include "cuda/stage/mx_epilogue.cuh"

namespace mk {

/* Where h, gate and up go: used by the staged launch and by the fused forward. */
MK_DEVICE SwigluRows<RingRows, SavedRows> gate_up_epilogue(const mk_rank_params &r, void *context_memory, bool shared, int64_t num_tokens)
{
    const mk_memory &m = r.memory;
    const int64_t cols = shared ? r.dims.shared_intermediate : r.dims.intermediate;
    const int64_t saved_rows = shared ? num_tokens : r.dims.saved_tiles * MK_ROW_TILE;
    char *context = r.dims.saved_tiles ? static_cast<char *>(context_memory) : nullptr;
    bf16 *gate = context ? reinterpret_cast<bf16 *>(context + (shared ? m.saved_shared_gate : m.saved_gate)) : nullptr;
    bf16 *up = context ? reinterpret_cast<bf16 *>(context + (shared ? m.saved_shared_up : m.saved_up)) : nullptr;
    return {{in_local<bf16>(r, shared ? m.shared_h : m.ring_h), cols}, {gate, cols, saved_rows}, {up, cols, saved_rows}, r.swiglu_limit};
}

/* The same in MXFP8. Routed rows: h as s4_down multiplies it, gate and up quantised. A recompute's h is nobody's, and not counted. */
MK_DEVICE SwigluRows<MxOperandRows, MxSavedRows> gate_up_epilogue_mx(const mk_rank_params &r, void *context_memory, bool recompute)
{
    const mk_memory &m = r.memory;
    const int64_t cols = r.dims.intermediate, saved_rows = r.dims.saved_tiles * MK_ROW_TILE;
    uint8_t *context = r.dims.saved_tiles ? static_cast<uint8_t *>(context_memory) : nullptr;
    uint8_t *gate = context ? context + m.saved_gate : nullptr, *up = context ? context + m.saved_up : nullptr;
    return {mx_operand_rows(r, m.ring_h, !recompute), {gate, cols, saved_rows}, {up, cols, saved_rows}, r.swiglu_limit};
}

template <class Tile> MK_DEVICE void s2_gate_up(const mk_gemm_params &p)
{
    StageProgram<Tile> program(p, Tile::cols / 2);
    const SwigluRows<RingRows, SavedRows> epilogue = gate_up_epilogue(p.rank, p.context, p.shared, p.num_tokens);
    gemm_cta<Tile>(program, epilogue);
}

template <class Tile> MK_DEVICE void s2_gate_up_mx(const mk_gemm_params &p)
{
    MxStageProgram<Tile> program(p, Tile::cols / 2);
    const SwigluRows<MxOperandRows, MxSavedRows> epilogue = gate_up_epilogue_mx(p.rank, p.context, p.recompute);
    gemm_cta<Tile>(program, epilogue);
}

} /* namespace mk */
#endif
