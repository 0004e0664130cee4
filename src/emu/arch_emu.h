/* The arch layer of the emulator: the names of arch.cuh as ordinary functions. Bodies: threads.cpp (identity, warps, barriers),
 * memory.cpp (plain memory, fences, flags), mbarrier.cpp, copy.cpp (bulk and tensor copies), wgmma.cpp. */
#ifndef MK_EMU_ARCH_EMU_H
#define MK_EMU_ARCH_EMU_H

#include <math.h>
#include <string.h>
#include "emu/emu.h"

#define MK_DEVICE static inline __attribute__((unused))
#define MK_MEMBER inline
#define MK_KERNEL(threads) static void
#define MK_KERNEL_PARAM const
#define MK_UNROLL
#define MK_UNROLL_4
#define MK_ROLLED
#define MK_ENTRY [[maybe_unused]] /* a test need not launch all of them */

namespace emu {
void memory_read(const void *p, void *out, size_t bytes);
void memory_write(void *p, const void *in, size_t bytes);
void bulk_wait_groups(int newer, bool read_only);
void wgmma_wait_groups(int newer);
void wgmma_issue(float *d, int n, uint64_t a, uint64_t b, bool accumulate, bool a_mn_major, bool b_mn_major);
void registers_set(int per_thread, bool raise);
}

namespace mk {

uint32_t thread_idx();
uint32_t block_idx();
uint32_t num_blocks();
uint32_t sm_idx();
uint32_t lane_idx();
uint32_t warp_idx();
uint32_t cluster_rank();
uint32_t cluster_idx();
uint32_t num_clusters();

void *shared_base();
uint32_t smem_addr(const void *p);
uint32_t cluster_addr(uint32_t addr, uint32_t rank);

template <class T> T load(const T *p) { T v; emu::memory_read(p, &v, sizeof v); return v; }
template <class T> void store(T *p, T value) { emu::memory_write(p, &value, sizeof value); }
Vec4 load_shared_b128(uint32_t addr);
void store_shared_b64(uint32_t addr, uint32_t x, uint32_t y);
void store_shared_b128(uint32_t addr, Vec4 v);
void store_matrix_x4(uint32_t addr, const uint32_t (&r)[4]);
void load_matrix_x4(uint32_t addr, uint32_t (&r)[4]);

void copy_async_b128(uint32_t dst, const void *src, bool there);
void copy_async_wait();

void sync_warp();
uint32_t shuffle(uint32_t value, uint32_t source_lane);
float shuffle(float value, uint32_t source_lane);
uint32_t shuffle_xor(uint32_t value, uint32_t mask);
float shuffle_xor(float value, uint32_t mask);
uint32_t ballot(bool vote);
uint32_t match_any(uint32_t value);
bool elect_one();

void barrier_block_sync();
void barrier_named_sync(uint32_t id, uint32_t threads);
void barrier_named_arrive(uint32_t id, uint32_t threads);
void barrier_cluster_arrive_release();
void barrier_cluster_wait_acquire();

void mbar_init(uint32_t bar, uint32_t count);
void fence_mbar_init_release_cluster();
void mbar_arrive_release_cta(uint32_t bar);
void mbar_arrive_remote_release_cta(uint32_t cluster_bar);
void mbar_arrive_remote_release_cluster(uint32_t cluster_bar);
void mbar_arrive_expect_tx_release_cta(uint32_t bar, uint32_t bytes);
void mbar_arrive_expect_tx_remote_release_cluster(uint32_t cluster_bar, uint32_t bytes);
bool mbar_try_wait_parity_acquire_cta(uint32_t bar, uint32_t parity);
bool mbar_test_parity_acquire_cta(uint32_t bar, uint32_t parity);
bool mbar_try_wait_parity_acquire_cluster(uint32_t bar, uint32_t parity);

void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar);
void bulk_store(void *dst, uint32_t src, uint32_t bytes);
void bulk_store_add_f32(float *dst, uint32_t src, uint32_t bytes);
void bulk_commit();
template <int N> void bulk_wait_read() { emu::bulk_wait_groups(N, true); }
template <int N> void bulk_wait() { emu::bulk_wait_groups(N, false); }
void store_async_b128(uint32_t cluster_dst, Vec4 v, uint32_t cluster_bar);

void tma_load_2d(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t bar);
void tma_load_3d(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, int32_t c2, uint32_t bar);
void tma_load_2d_multicast(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t bar, uint16_t cta_mask);
void tma_load_3d_multicast(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, int32_t c2, uint32_t bar, uint16_t cta_mask);
void tma_store_2d(const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t src);
MK_DEVICE void tma_prefetch_map(const mk_tensor_map *) {}
void tensor_map_set_address(uint32_t map, const void *address);
void tensor_map_store_release_gpu(mk_tensor_map *to, uint32_t map);

void fence_proxy_async();
void fence_proxy_async_global();
void fence_proxy_async_shared_cta();
void fence_tensor_map_acquire_sys(const mk_tensor_map *map);
void fence_tensor_map_acquire_gpu(const mk_tensor_map *map);
void fence_acq_rel_gpu();
void fence_acq_rel_sys();

uint32_t flag_load_relaxed_gpu(const uint32_t *p);
uint32_t flag_load_acquire_gpu(const uint32_t *p);
uint32_t flag_load_acquire_sys(const uint32_t *p);
uint64_t flag_load_relaxed_sys(const uint64_t *p);
uint64_t flag_load_acquire_sys(const uint64_t *p);
void flag_store_relaxed_gpu(uint32_t *p, uint32_t v);
void flag_store_release_gpu(uint32_t *p, uint32_t v);
void flag_store_release_sys(uint32_t *p, uint32_t v);
void flag_store_relaxed_sys(uint64_t *p, uint64_t v);
void flag_store_release_sys(uint64_t *p, uint64_t v);
void flag_add_release_gpu(uint32_t *p, uint32_t v);
void flag_add_release_sys(uint32_t *p, uint32_t v);
uint32_t ticket_take_relaxed_gpu(uint32_t *p, uint32_t n);
uint32_t ticket_take_acq_rel_gpu(uint32_t *p, uint32_t n);
void counter_add_relaxed_gpu(uint32_t *p, uint32_t v);
void counter_add_relaxed_gpu(uint64_t *p, uint64_t v);
void min_relaxed_gpu(uint64_t *p, uint64_t v);

template <int N> void registers_raise() { static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg"); emu::registers_set(N, true); }
template <int N> void registers_lower() { static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg"); emu::registers_set(N, false); }

uint64_t time_ns();
void sleep_ns(uint32_t ns);
void trap();
void note_wait(const char *what);
void note_results_are_void();
void note_written(const void *p, uint64_t bytes);

MK_DEVICE uint32_t pack_bf16(float low, float high) { return emu::float_to_bf16(low) | (uint32_t)emu::float_to_bf16(high) << 16; }
MK_DEVICE float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
MK_DEVICE float exp2_approx(float x) { return exp2f(x); }
MK_DEVICE float reciprocal_approx(float x) { return 1.0f / x; }
MK_DEVICE float min_nan(float a, float b) { return a != a || b != b ? NAN : fminf(a, b); }
MK_DEVICE float max_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }
MK_DEVICE uint32_t population_count(uint32_t x) { return (uint32_t)__builtin_popcount(x); }
MK_DEVICE uint32_t permute_bytes(uint32_t bytes, uint32_t selector)
{
    uint32_t r = 0;
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t nibble = selector >> 4 * i & 15, from = nibble & 7, byte = from < 4 ? bytes >> 8 * from & 0xff : 0;
        r |= (nibble < 8 ? byte : byte & 0x80 ? 0xffu : 0u) << 8 * i;
    }
    return r;
}
MK_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b)
{
    const uint32_t low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff, high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
    return high << 16 | low;
}
MK_DEVICE uint32_t multiply_bf16x2(uint32_t a, uint32_t b)
{
    const float low = emu::bf16_to_float((uint16_t)a) * emu::bf16_to_float((uint16_t)b), high = emu::bf16_to_float((uint16_t)(a >> 16)) * emu::bf16_to_float((uint16_t)(b >> 16));
    return emu::float_to_bf16(low) | (uint32_t)emu::float_to_bf16(high) << 16;
}
MK_DEVICE uint32_t pack_e4m3(float low, float high) { return emu::float_to_e4m3(low) | (uint32_t)emu::float_to_e4m3(high) << 8; }
MK_DEVICE float bits_to_float(uint32_t bits) { float f; memcpy(&f, &bits, sizeof f); return f; }
MK_DEVICE uint32_t float_to_bits(float f) { uint32_t bits; memcpy(&bits, &f, sizeof bits); return bits; }

void wgmma_fence();
void wgmma_commit();
template <int N> void wgmma_wait() { emu::wgmma_wait_groups(N); }
MK_DEVICE void pin_register(float &) {}
MK_DEVICE void pin_register(uint32_t &) {}
MK_DEVICE void pin_register(int64_t &) {}
template <int AMnMajor, int BMnMajor> void wgmma_m64n64k16_bf16(float (&d)[32], uint64_t a, uint64_t b, bool accumulate)
{ emu::wgmma_issue(d, 64, a, b, accumulate, AMnMajor != 0, BMnMajor != 0); }
template <int AMnMajor, int BMnMajor> void wgmma_m64n128k16_bf16(float (&d)[64], uint64_t a, uint64_t b, bool accumulate)
{ emu::wgmma_issue(d, 128, a, b, accumulate, AMnMajor != 0, BMnMajor != 0); }
template <int AMnMajor, int BMnMajor> void wgmma_m64n256k16_bf16(float (&d)[128], uint64_t a, uint64_t b, bool accumulate)
{ emu::wgmma_issue(d, 256, a, b, accumulate, AMnMajor != 0, BMnMajor != 0); }

} /* namespace mk */
#endif
