/* Weights by pointer on the device: a tensor map for each expert's matrix, made when a call begins, because the addresses are read while the
 * pass runs (a captured graph may find others at its next replay). And who reads them: the load threads of the GEMMs.
 *
 * The copy engine keeps the maps that it has used, by their addresses, which are the same in every call. So whoever writes a map releases it, and each
 * CTA that uses it acquires it first: then nothing older is used, whatever the engine had kept. Between the two is the end of the launch
 * that writes, and after an acquire no map changes until the call is over. */
#ifndef MK_STAGE_WEIGHTS_CUH
#define MK_STAGE_WEIGHTS_CUH

#include "cuda/gemm/tile.cuh"
#include "cuda/stage/stage.cuh"

namespace mk {

static_assert(sizeof(mk_tensor_map) == MK_TENSOR_MAP_BYTES, "what the memory map reserves");
static_assert((int)MK_EXPERT_MAPS == (int)MK_NUM_GRADS, "maps of an expert are numbered as its gradients");

/* ---- making them ---- */

/* A pointer that cannot be used, as a number: the smallest is told when the call opens (call.cuh). */
MK_DEVICE uint64_t bad_weight_number(uint64_t place, uint64_t expert, bool is_null) { return place << 40 | expert << 1 | (is_null ? 0 : 1); }
MK_DEVICE uint64_t bad_weight_place(uint64_t number) { return number >> 40; }
MK_DEVICE uint64_t bad_weight_expert(uint64_t number) { return number % ((uint64_t)1 << 40) >> 1; }
MK_DEVICE bool bad_weight_is_null(uint64_t number) { return (number & 1) == 0; }

MK_DEVICE const char *weight_address(const mk_weight_source &from, int64_t expert)
{
    return from.experts ? static_cast<const char *>(load(&from.experts[expert])) : static_cast<const char *>(from.packed) + expert * from.expert_bytes;
}

/* A warp: the map of one matrix. `scratch`: shared memory of the warp's own. */
MK_DEVICE void make_weight_map(const mk_weight_maps_params &p, uint32_t place, int64_t expert, mk_tensor_map *scratch)
{
    const mk_rank_params &r = p.rank;
    const mk_weight_source &from = p.source[place];
    const char *address = weight_address(from, expert);
    if (!address || reinterpret_cast<uintptr_t>(address) % 16 != 0) {
        if (lane_idx() == 0)
            min_relaxed_gpu(p.bad_weight, bad_weight_number(place, (uint64_t)expert, !address));
        return;
    }
    if (!from.mapped)
        return;
    mk_tensor_map *all = in_local<mk_tensor_map>(r, place < MK_EXPERT_MAPS ? r.memory.expert_maps : r.memory.shared_maps);
    if (lane_idx() < sizeof(mk_tensor_map) / 8)
        store(&scratch->opaque[lane_idx()], p.like[place].opaque[lane_idx()]);
    sync_warp();
    if (lane_idx() == 0)
        tensor_map_set_address(smem_addr(scratch), address + from.offset);
    sync_warp();
    tensor_map_store_release_gpu(&all[expert * MK_EXPERT_MAPS + place % MK_EXPERT_MAPS], smem_addr(scratch));
}

/* 128 threads a block, a warp for each matrix. */
MK_DEVICE void make_weight_maps(const mk_weight_maps_params &p)
{
    mk_tensor_map *scratch = static_cast<mk_tensor_map *>(shared_base()) + warp_idx();
    int64_t matrix = (int64_t)block_idx() * MK_WEIGHT_MAPS_PER_BLOCK + warp_idx();
    for (uint32_t place = 0; place < MK_WEIGHT_PLACES; place++) {
        if (matrix >= 0 && matrix < p.source[place].count)
            make_weight_map(p, place, matrix, scratch);
        matrix -= p.source[place].count;
    }
}

/* ---- using them ---- */

/* What a load thread remembers of the maps of weights by pointer. */
struct ExpertMaps {
    const mk_tensor_map *last = nullptr; /* acquired for the last task: tasks of one expert come one after the other */

    /* One matrix of an expert, or two. */
    MK_MEMBER void acquire(const mk_tensor_map *low, const mk_tensor_map *high)
    {
        if (low == last)
            return;
        fence_tensor_map_acquire_gpu(low);
        if (high != low)
            fence_tensor_map_acquire_gpu(high);
        last = low;
    }
};

/* The operands of a forward's task whose weights come by pointer. maps: of the expert. half: of the tile's columns. */
MK_DEVICE GemmInput input_by_pointer(ExpertMaps &known, const mk_tensor_map *rows, const mk_tensor_map *maps, bool down, int32_t half)
{
    const mk_tensor_map *low = maps + (down ? MK_GRAD_DOWN : MK_GRAD_GATE), *high = maps + (down ? MK_GRAD_DOWN : MK_GRAD_UP);
    known.acquire(low, high);
    return {rows, low, high, down ? half : 0, 0};
}

} /* namespace mk */
#endif
