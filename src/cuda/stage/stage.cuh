/* What every stage of the device needs: the rank's memory as typed pointers, and the device state. */
#ifndef MK_STAGE_STAGE_CUH
#define MK_STAGE_STAGE_CUH

#include "cuda/arch/arch.cuh"
#include "cuda/kernel/params.h"
#include "layout/depend.h"

namespace mk {

typedef uint16_t bf16; /* the bits of one */

MK_DEVICE mk_device_state *device_state(const mk_rank_params &r) { return reinterpret_cast<mk_device_state *>(r.local + r.memory.device_state); }
template <class T> MK_DEVICE T *in_local(const mk_rank_params &r, int64_t offset) { return reinterpret_cast<T *>(r.local + offset); }
template <class T> MK_DEVICE T *in_heap(const mk_rank_params &r, int64_t offset) { return reinterpret_cast<T *>(r.heap + offset); }
/* The same buffer in another rank's heap. */
template <class T> MK_DEVICE T *in_peer(const mk_rank_params &r, int64_t rank, int64_t offset) { return reinterpret_cast<T *>(load(&r.heaps[rank]) + offset); }

/* Where a gradient of one expert goes; null: nowhere. */
MK_DEVICE bool is_wanted(const mk_grad_out &g) { return g.base || g.experts; }
MK_DEVICE char *grad_place(const mk_grad_out &g, int64_t expert)
{
    if (!g.experts)
        return g.base ? static_cast<char *>(g.base) + expert * g.expert_bytes : nullptr;
    char *own = static_cast<char *>(load(&g.experts[expert]));
    return own ? own + g.experts_offset : nullptr;
}

/* This call's data stages do nothing: trouble was found, by all ranks alike in an earlier launch, or by a wait of this one that ran out. */
MK_DEVICE bool skipped(const mk_rank_params &r) { return flag_load_relaxed_gpu(&device_state(r)->skip) != 0; }

MK_DEVICE uint32_t *counter_at(const mk_rank_params &r, int32_t counter, int64_t index)
{
    return in_local<uint32_t>(r, r.memory.counters) + mk_counter_index(&r.dims, counter, index);
}

/* Row of a ring buffer where a table tile begins. */
MK_DEVICE int64_t ring_row(const mk_dims &d, int64_t tile) { return tile % d.ring_tiles * MK_ROW_TILE; }

/* Table tiles [*first, *end) of minibatch `step` of the forward's walk, which begins at the table's end. Empty past the table. */
MK_DEVICE void forward_minibatch(const mk_dims &d, int64_t num_tiles, int64_t step, int64_t *first, int64_t *end)
{
    *end = mk_max(num_tiles - step * d.mb_tiles_fwd, 0);
    *first = mk_max(*end - d.mb_tiles_fwd, 0);
}

/* Launches of a pass alternate between two tickets; each clears the one of the launch after it. */
MK_DEVICE uint32_t *draw_from(const mk_rank_params &r, int32_t ticket)
{
    uint32_t *tickets = device_state(r)->tickets;
    if (block_idx() == 0 && thread_idx() == 0)
        store(&tickets[1 - ticket], 0u);
    return &tickets[ticket];
}

/* The sum over a warp's lanes, in all of them. */
MK_DEVICE uint32_t sum_of_warp(uint32_t value)
{
    for (uint32_t mask = 16; mask > 0; mask /= 2)
        value += shuffle_xor(value, mask);
    return value;
}

MK_DEVICE float bf16_to_float(uint32_t bits) { return bits_to_float(bits << 16); }

} /* namespace mk */
#endif
