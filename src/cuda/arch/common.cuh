/* Instructions that sm_90a and sm_100a share. See arch.cuh for the rules; every wrapper here is one PTX instruction with a
 * memory clobber, so that the compiler moves no access across it. */
#ifndef MK_ARCH_COMMON_CUH
#define MK_ARCH_COMMON_CUH

#define MK_DEVICE __device__ __forceinline__
#define MK_MEMBER __device__ __forceinline__
#define MK_KERNEL(threads) __global__ void __launch_bounds__(threads, 1)
#define MK_KERNEL_PARAM const __grid_constant__
#define MK_UNROLL _Pragma("unroll")
#define MK_UNROLL_4 _Pragma("unroll 4")
#define MK_ROLLED _Pragma("unroll 1") /* a loop that costs the registers of one round */
/* Kernels that the host finds by name. */
#define MK_ENTRY extern "C"

namespace mk {

/* ---- who am I ---- */
MK_DEVICE uint32_t thread_idx() { return threadIdx.x; }
MK_DEVICE uint32_t block_idx() { return blockIdx.x; }
MK_DEVICE uint32_t num_blocks() { return gridDim.x; }
MK_DEVICE uint32_t lane_idx() { return threadIdx.x & 31; }
/* The multiprocessor that this runs on. */
MK_DEVICE uint32_t sm_idx() { uint32_t r; asm volatile("mov.u32 %0, %%smid;" : "=r"(r)); return r; }
/* The same number in all lanes, in a form the compiler knows to be uniform. */
MK_DEVICE uint32_t warp_idx() { return __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0); }
MK_DEVICE uint32_t cluster_rank() { uint32_t r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
MK_DEVICE uint32_t cluster_idx() { uint32_t r; asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(r)); return r; }
MK_DEVICE uint32_t num_clusters() { uint32_t r; asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(r)); return r; }

/* ---- addresses ---- */
MK_DEVICE void *shared_base() { extern __shared__ __align__(1024) unsigned char mk_shared_memory[]; return mk_shared_memory; }
MK_DEVICE uint32_t smem_addr(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
MK_DEVICE uint32_t cluster_addr(uint32_t addr, uint32_t rank)
{ uint32_t r; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank) : "memory"); return r; }

/* ---- plain memory: no order, no scope ---- */
template <class T> MK_DEVICE T load(const T *p) { return *p; }
template <class T> MK_DEVICE void store(T *p, T value) { *p = value; }
/* Global memory. By hand, because the compiler makes four stores of one where it has little room: four times the requests, each of a part of a sector. */
MK_DEVICE void store(Vec4 *p, Vec4 v)
{ asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" :: "l"(__cvta_generic_to_global(p)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
MK_DEVICE Vec4 load_shared_b128(uint32_t addr)
{ Vec4 v; asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr) : "memory"); return v; }
MK_DEVICE void store_shared_b64(uint32_t addr, uint32_t x, uint32_t y)
{ asm volatile("st.shared.v2.b32 [%0], {%1, %2};" :: "r"(addr), "r"(x), "r"(y) : "memory"); }
MK_DEVICE void store_shared_b128(uint32_t addr, Vec4 v)
{ asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(addr), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
/* Four 8x8 matrices of 16-bit elements: lane i gives the address of row i%8 of matrix i/8, register m holds matrix m, in
 * the layout of the MMA accumulators (lane l: row l/4, columns 2(l%4) and the next). */
MK_DEVICE void store_matrix_x4(uint32_t addr, const uint32_t (&r)[4])
{ asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory"); }

/* The same the other way. */
MK_DEVICE void load_matrix_x4(uint32_t addr, uint32_t (&r)[4])
{ asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory"); }

/* 16 bytes from global to shared memory without passing through registers; `there` false: zeros. Complete, visibly to this thread,
 * after copy_async_wait. */
MK_DEVICE void copy_async_b128(uint32_t dst, const void *src, bool there)
{ asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(dst), "l"(src), "r"(there ? 16u : 0u) : "memory"); }
MK_DEVICE void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/* ---- warp ---- */
MK_DEVICE void sync_warp() { __syncwarp(); }
MK_DEVICE uint32_t shuffle(uint32_t value, uint32_t source_lane) { return __shfl_sync(0xffffffffu, value, (int)source_lane); }
MK_DEVICE float shuffle(float value, uint32_t source_lane) { return __shfl_sync(0xffffffffu, value, (int)source_lane); }
MK_DEVICE uint32_t shuffle_xor(uint32_t value, uint32_t mask) { return __shfl_xor_sync(0xffffffffu, value, (int)mask); }
MK_DEVICE float shuffle_xor(float value, uint32_t mask) { return __shfl_xor_sync(0xffffffffu, value, (int)mask); }
MK_DEVICE uint32_t ballot(bool vote) { return __ballot_sync(0xffffffffu, vote); }
/* The lanes whose value equals this lane's. */
MK_DEVICE uint32_t match_any(uint32_t value) { return __match_any_sync(0xffffffffu, value); }
/* True in exactly one lane of a converged warp. */
MK_DEVICE bool elect_one()
{
    uint32_t chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(chosen) :: "memory");
    return chosen != 0;
}

/* ---- barriers of a CTA and of a cluster ---- */
MK_DEVICE void barrier_block_sync() { __syncthreads(); }
/* These instructions want a whole warp: its lanes meet first, wherever a branch has left them. */
MK_DEVICE void barrier_named_sync(uint32_t id, uint32_t threads) { __syncwarp(); asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory"); }
MK_DEVICE void barrier_named_arrive(uint32_t id, uint32_t threads) { __syncwarp(); asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory"); }
MK_DEVICE void barrier_cluster_arrive_release() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
MK_DEVICE void barrier_cluster_wait_acquire() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/* ---- mbarriers ---- */
MK_DEVICE void mbar_init(uint32_t bar, uint32_t count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory"); }
MK_DEVICE void fence_mbar_init_release_cluster() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
MK_DEVICE void mbar_arrive_release_cta(uint32_t bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory"); }
/* On a barrier of any CTA of the cluster. Release is at CTA scope only (the default form): it orders what *this* CTA sees and
 * costs nothing, where release at cluster scope drains the warp's memory accesses on every arrive and halves a GEMM's
 * speed. Enough where the reader is ordered by the completion of async copies or MMAs. */
MK_DEVICE void mbar_arrive_remote_release_cta(uint32_t cluster_bar) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(cluster_bar) : "memory"); }
MK_DEVICE void mbar_arrive_remote_release_cluster(uint32_t cluster_bar) { asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(cluster_bar) : "memory"); }
MK_DEVICE void mbar_arrive_expect_tx_release_cta(uint32_t bar, uint32_t bytes)
{ asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory"); }
MK_DEVICE void mbar_arrive_expect_tx_remote_release_cluster(uint32_t cluster_bar, uint32_t bytes)
{ asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" :: "r"(cluster_bar), "r"(bytes) : "memory"); }
/* Has the phase of this parity completed? May suspend the thread for a while first; may say no too early, so: loop. */
MK_DEVICE bool mbar_try_wait_parity_acquire_cta(uint32_t bar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done != 0;
}
/* The same without waiting at all. */
MK_DEVICE bool mbar_test_parity_acquire_cta(uint32_t bar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done != 0;
}
MK_DEVICE bool mbar_try_wait_parity_acquire_cluster(uint32_t bar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done != 0;
}

/* ---- async copies. Loads complete on an mbarrier (bytes are counted), stores in the issuing thread's bulk groups. ---- */
MK_DEVICE void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{ asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory"); }
MK_DEVICE void bulk_store(void *dst, uint32_t src, uint32_t bytes)
{ asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(dst), "r"(src), "r"(bytes) : "memory"); }
MK_DEVICE void bulk_store_add_f32(float *dst, uint32_t src, uint32_t bytes)
{ asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" :: "l"(dst), "r"(src), "r"(bytes) : "memory"); }
MK_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/* All but the youngest N groups have read their source: shared memory may be reused, but nobody may be told "it is there". */
template <int N> MK_DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory"); }
/* ... have written their destination, visibly to this thread. */
template <int N> MK_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" :: "n"(N) : "memory"); }
/* 16 bytes into any CTA's shared memory of the cluster; completes on the mbarrier beside it. */
MK_DEVICE void store_async_b128(uint32_t cluster_dst, Vec4 v, uint32_t cluster_bar)
{ asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" :: "r"(cluster_dst), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(cluster_bar) : "memory"); }

/* ---- tensor copies: box at coordinates, innermost first ---- */
MK_DEVICE void tma_load_2d(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t bar)
{ asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" :: "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(bar) : "memory"); }
MK_DEVICE void tma_load_3d(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, int32_t c2, uint32_t bar)
{ asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" :: "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(bar) : "memory"); }
/* Data and byte count land at the same offsets in every CTA of the mask. */
MK_DEVICE void tma_load_2d_multicast(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t bar, uint16_t cta_mask)
{ asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" :: "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(bar), "h"(cta_mask) : "memory"); }
MK_DEVICE void tma_load_3d_multicast(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, int32_t c2, uint32_t bar, uint16_t cta_mask)
{ asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" :: "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(bar), "h"(cta_mask) : "memory"); }
MK_DEVICE void tma_store_2d(const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t src)
{ asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" :: "l"(map), "r"(c0), "r"(c1), "r"(src) : "memory"); }
MK_DEVICE void tma_prefetch_map(const mk_tensor_map *map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }
/* Changes where the tensor begins in a map that lies in shared memory. By one thread. */
MK_DEVICE void tensor_map_set_address(uint32_t map, const void *address)
{ asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" :: "r"(map), "l"(address) : "memory"); }
/* That map into global memory, by a whole warp. Release, of the map alone: pairs with fence_tensor_map_acquire_gpu. */
MK_DEVICE void tensor_map_store_release_gpu(mk_tensor_map *to, uint32_t map)
{ asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;" :: "l"(to), "r"(map) : "memory"); }

/* ---- fences. Proxy fences order plain accesses (generic proxy) before copies and MMAs (async proxy), and back. ---- */
MK_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
MK_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
MK_DEVICE void fence_proxy_async_shared_cta() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/* Before the first use in a CTA of a map that lies in global memory, by the thread that uses it: the copy engine forgets what it knows of an older
 * map in that place. sys: the host wrote it; gpu: a kernel did (tensor_map_store_release_gpu). */
MK_DEVICE void fence_tensor_map_acquire_sys(const mk_tensor_map *map)
{ asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" :: "l"(map) : "memory"); }
MK_DEVICE void fence_tensor_map_acquire_gpu(const mk_tensor_map *map)
{ asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(map) : "memory"); }
MK_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
MK_DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

/* ---- flags and counters in global memory ---- */
MK_DEVICE uint32_t flag_load_relaxed_gpu(const uint32_t *p) { uint32_t v; asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
MK_DEVICE uint32_t flag_load_acquire_gpu(const uint32_t *p) { uint32_t v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
MK_DEVICE uint32_t flag_load_acquire_sys(const uint32_t *p) { uint32_t v; asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
MK_DEVICE uint64_t flag_load_relaxed_sys(const uint64_t *p) { uint64_t v; asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
MK_DEVICE uint64_t flag_load_acquire_sys(const uint64_t *p) { uint64_t v; asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
MK_DEVICE void flag_store_relaxed_gpu(uint32_t *p, uint32_t v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
MK_DEVICE void flag_store_release_gpu(uint32_t *p, uint32_t v) { asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
MK_DEVICE void flag_store_release_sys(uint32_t *p, uint32_t v) { asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
MK_DEVICE void flag_store_relaxed_sys(uint64_t *p, uint64_t v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
MK_DEVICE void flag_store_release_sys(uint64_t *p, uint64_t v) { asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
MK_DEVICE void flag_add_release_gpu(uint32_t *p, uint32_t v) { asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
MK_DEVICE void flag_add_release_sys(uint32_t *p, uint32_t v) { asm volatile("red.release.sys.global.add.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
/* The value before the add. */
MK_DEVICE uint32_t ticket_take_relaxed_gpu(uint32_t *p, uint32_t n) { uint32_t v; asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(v) : "l"(p), "r"(n) : "memory"); return v; }
MK_DEVICE uint32_t ticket_take_acq_rel_gpu(uint32_t *p, uint32_t n) { uint32_t v; asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(v) : "l"(p), "r"(n) : "memory"); return v; }

/* Counts and minima whose readers come in a later launch. */
MK_DEVICE void counter_add_relaxed_gpu(uint32_t *p, uint32_t v) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
MK_DEVICE void counter_add_relaxed_gpu(uint64_t *p, uint64_t v) { asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
MK_DEVICE void min_relaxed_gpu(uint64_t *p, uint64_t v) { asm volatile("red.relaxed.gpu.global.min.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }

/* ---- registers ---- */
/* Opaque to the compiler from here on: it computes it here, and keeps nothing that it had derived from it. */
MK_DEVICE void pin_register(uint32_t &r) { asm volatile("" : "+r"(r) :: "memory"); }
MK_DEVICE void pin_register(int64_t &r) { asm volatile("" : "+l"(r) :: "memory"); }
/* All warps of a warpgroup together. N is a multiple of 8 in 24..256. `raise` waits until others have given up enough. */
template <int N> MK_DEVICE void registers_raise() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N) : "memory"); }
template <int N> MK_DEVICE void registers_lower() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N) : "memory"); }

/* ---- time and trouble ---- */
MK_DEVICE uint64_t time_ns() { uint64_t t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) :: "memory"); return t; }
MK_DEVICE void sleep_ns(uint32_t ns) { asm volatile("nanosleep.u32 %0;" :: "r"(ns) : "memory"); }
MK_DEVICE void trap() { asm volatile("trap;" ::: "memory"); }
/* The emulator prints it beside a thread that waits for ever. */
MK_DEVICE void note_wait(const char *) {}
/* The emulator no longer minds accesses to global memory that nothing orders: nobody will use what this launch still computes. */
MK_DEVICE void note_results_are_void() {}
/* The emulator learns of writes by code that does not use `store` (src/layout). */
MK_DEVICE void note_written(const void *, uint64_t) {}

/* ---- arithmetic (pure: the compiler may move these) ---- */
MK_DEVICE uint32_t pack_bf16(float low, float high) { uint32_t r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
MK_DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
MK_DEVICE float exp2_approx(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
MK_DEVICE float reciprocal_approx(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
/* A NaN stays one. */
MK_DEVICE float min_nan(float a, float b) { float r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
MK_DEVICE float max_nan(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
MK_DEVICE uint32_t population_count(uint32_t x) { return (uint32_t)__popc(x); }
/* Byte i of the result is byte (nibble i of the selector, without its highest bit) of `bytes`; with that bit: eight copies of the byte's sign. */
MK_DEVICE uint32_t permute_bytes(uint32_t bytes, uint32_t selector) { uint32_t r; asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(bytes), "r"(selector)); return r; }
/* Two numbers of 16 bits in a word, each by itself. bf16: rounded to nearest, ties to even, subnormals as they are. */
MK_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) { uint32_t r; asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
MK_DEVICE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) { uint32_t r; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
/* Two e4m3 in 16 bits: rounded to nearest, ties to even; beyond 448, infinities too: 448; NaN: 0x7f. */
MK_DEVICE uint32_t pack_e4m3(float low, float high) { uint16_t r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low)); return r; }
MK_DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
MK_DEVICE uint32_t float_to_bits(float f) { return __float_as_uint(f); }

} /* namespace mk */
#endif
