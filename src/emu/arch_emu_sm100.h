/* The emulator's names for cuda/arch/sm100a.cuh. Bodies: tensor_memory.cpp, tcgen05*.cpp, and copy.cpp and launch_control.cpp for the rest. */
#ifndef MK_EMU_ARCH_EMU_SM100_H
#define MK_EMU_ARCH_EMU_SM100_H

#include "cuda/arch/tensor_core.h"

namespace emu {
void tmem_allocate(uint32_t to, uint32_t columns);
void tmem_release(uint32_t address, uint32_t columns);
void tmem_load(uint32_t address, uint32_t columns, float *to);
void tmem_wait_loads();
}

namespace mk {

template <int Columns> void tmem_allocate_pair(uint32_t to) { emu::tmem_allocate(to, Columns); }
template <int Columns> void tmem_release_pair(uint32_t address) { emu::tmem_release(address, Columns); }
void tmem_relinquish_pair();
inline void tmem_load_16x64(uint32_t address, float (&r)[32]) { emu::tmem_load(address, 64, r); }
template <int First, int N> void tmem_load_16x32(uint32_t address, float (&r)[N]) { emu::tmem_load(address, 32, r + First); }
template <int First, int N> void tmem_load_16x16(uint32_t address, float (&r)[N]) { emu::tmem_load(address, 16, r + First); }
void tmem_store_16x64(uint32_t address, const float (&r)[32]);
template <int N> void tmem_wait_load(float (&)[N]) { emu::tmem_wait_loads(); }
void tmem_wait_store();

void tcgen05_fence_before_sync();
void tcgen05_fence_after_sync();
void tcgen05_commit_pair(uint32_t bar, uint16_t cta_mask);
void tcgen05_mma_pair_bf16(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate);
void tcgen05_mma_pair_mx(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales, uint32_t b_scales, bool accumulate);
void tcgen05_copy_scales_pair(uint32_t to, uint64_t from);

void tma_load_2d_pair(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t cluster_bar);
void tma_load_3d_pair(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, int32_t c2, uint32_t cluster_bar);
void tma_load_2d_pair_multicast(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t cluster_bar, uint16_t cta_mask);

void launch_try_cancel(uint32_t answer, uint32_t bar);
void launch_try_cancel_multicast(uint32_t answer, uint32_t bar);
bool launch_was_cancelled(Vec4 answer);
uint32_t launch_cancelled_block(Vec4 answer);
void fence_proxy_async_acquire_cluster();
void fence_proxy_async_release_cluster();

} /* namespace mk */
#endif
