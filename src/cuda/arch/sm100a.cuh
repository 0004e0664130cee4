/* Blackwell's matrix unit: tcgen05, with operands in the shared memory of two CTAs (a pair: ranks 2i and 2i + 1 of a cluster) and
 * accumulators in tensor memory; and Cluster Launch Control. Descriptors and addresses: tensor_core.h.
 *
 * One thread of one CTA of the pair issues MMAs, scale copies and commits, and they act on both. D of M = 256: lane l of CTA r holds
 * row 128 r + l, column j of the tensor memory holds column j. CTA r provides rows 128 r .. of A, and rows N/2 r .. of B.
 *
 * Order. MMAs and scale copies of one thread happen in the order of their issue. Nothing else knows of their completion but an mbarrier given
 * to tcgen05_commit. Accesses to tensor memory by different threads need, beside what orders the threads, a tcgen05_fence_before_sync
 * behind the earlier access (commit has it built in) and a tcgen05_fence_after_sync before the later one.
 *
 * A kernel uses pairs throughout or not at all: the assembler refuses a mixture. */
#ifndef MK_ARCH_SM100A_CUH
#define MK_ARCH_SM100A_CUH

#include "cuda/arch/tensor_core.h"

namespace mk {

/* ---- tensor memory ---- */

/* A whole warp of each CTA of the pair, at the same shared address: `Columns` (32, 64 .. 512) columns; writes their address to shared
 * memory. Waits until they are free. Whoever reads the address there comes after a fence_before_sync, a barrier and a fence_after_sync. */
template <int Columns> MK_DEVICE void tmem_allocate_pair(uint32_t to)
{ asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" :: "r"(to), "n"(Columns) : "memory"); }
/* The same warps, after a barrier of the cluster behind the last access. */
template <int Columns> MK_DEVICE void tmem_release_pair(uint32_t address)
{ asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" :: "r"(address), "n"(Columns) : "memory"); }
/* No more allocations by this CTA: others of the SM may go on. */
MK_DEVICE void tmem_relinquish_pair() { asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory"); }

/* 16 lanes x 64 columns, a whole warp. The address names the first lane, which is 32 (warp % 4) or 16 more: a warp reaches no other lanes.
 * r[4j + i] is lane l/4 + 8 (i/2) of the 16, column 8j + 2(l%4) + i%2: the layout of Hopper's accumulators. Valid after tmem_wait_load. */
MK_DEVICE void tmem_load_16x64(uint32_t address, float (&r)[32])
{
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
                 : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3]), "=f"(r[4]), "=f"(r[5]), "=f"(r[6]), "=f"(r[7]),
                   "=f"(r[8]), "=f"(r[9]), "=f"(r[10]), "=f"(r[11]), "=f"(r[12]), "=f"(r[13]), "=f"(r[14]), "=f"(r[15]),
                   "=f"(r[16]), "=f"(r[17]), "=f"(r[18]), "=f"(r[19]), "=f"(r[20]), "=f"(r[21]), "=f"(r[22]), "=f"(r[23]),
                   "=f"(r[24]), "=f"(r[25]), "=f"(r[26]), "=f"(r[27]), "=f"(r[28]), "=f"(r[29]), "=f"(r[30]), "=f"(r[31])
                 : "r"(address) : "memory");
}
/* The same for 32 and 16 columns, into registers from r[First] on. */
template <int First, int N> MK_DEVICE void tmem_load_16x32(uint32_t address, float (&r)[N])
{
    static_assert(First + 16 <= N, "16 registers");
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x4.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
                 : "=f"(r[First + 0]), "=f"(r[First + 1]), "=f"(r[First + 2]), "=f"(r[First + 3]), "=f"(r[First + 4]), "=f"(r[First + 5]),
                   "=f"(r[First + 6]), "=f"(r[First + 7]), "=f"(r[First + 8]), "=f"(r[First + 9]), "=f"(r[First + 10]), "=f"(r[First + 11]),
                   "=f"(r[First + 12]), "=f"(r[First + 13]), "=f"(r[First + 14]), "=f"(r[First + 15])
                 : "r"(address) : "memory");
}
template <int First, int N> MK_DEVICE void tmem_load_16x16(uint32_t address, float (&r)[N])
{
    static_assert(First + 8 <= N, "8 registers");
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=f"(r[First + 0]), "=f"(r[First + 1]), "=f"(r[First + 2]), "=f"(r[First + 3]), "=f"(r[First + 4]), "=f"(r[First + 5]),
                   "=f"(r[First + 6]), "=f"(r[First + 7])
                 : "r"(address) : "memory");
}
MK_DEVICE void tmem_store_16x64(uint32_t address, const float (&r)[32])
{
    asm volatile("tcgen05.st.sync.aligned.16x256b.x8.b32 [%32], {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31};"
                 :: "f"(r[0]), "f"(r[1]), "f"(r[2]), "f"(r[3]), "f"(r[4]), "f"(r[5]), "f"(r[6]), "f"(r[7]),
                    "f"(r[8]), "f"(r[9]), "f"(r[10]), "f"(r[11]), "f"(r[12]), "f"(r[13]), "f"(r[14]), "f"(r[15]),
                    "f"(r[16]), "f"(r[17]), "f"(r[18]), "f"(r[19]), "f"(r[20]), "f"(r[21]), "f"(r[22]), "f"(r[23]),
                    "f"(r[24]), "f"(r[25]), "f"(r[26]), "f"(r[27]), "f"(r[28]), "f"(r[29]), "f"(r[30]), "f"(r[31]), "r"(address) : "memory");
}
/* This thread's loads have arrived in their registers, which no use overtakes: they pass through here. */
MK_DEVICE void tmem_wait_load(float (&r)[32])
{
    asm volatile("tcgen05.wait::ld.sync.aligned;"
                 : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]),
                   "+f"(r[8]), "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15])
                 :: "memory");
    asm volatile("" : "+f"(r[16]), "+f"(r[17]), "+f"(r[18]), "+f"(r[19]), "+f"(r[20]), "+f"(r[21]), "+f"(r[22]), "+f"(r[23]),
                      "+f"(r[24]), "+f"(r[25]), "+f"(r[26]), "+f"(r[27]), "+f"(r[28]), "+f"(r[29]), "+f"(r[30]), "+f"(r[31]) :: "memory");
}
MK_DEVICE void tmem_wait_load(float (&r)[16])
{
    asm volatile("tcgen05.wait::ld.sync.aligned;"
                 : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]),
                   "+f"(r[8]), "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15])
                 :: "memory");
}
MK_DEVICE void tmem_wait_store() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

/* ---- order ---- */

MK_DEVICE void tcgen05_fence_before_sync() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
MK_DEVICE void tcgen05_fence_after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
/* When everything that this thread has issued is done, one arrival at this shared address in every CTA of the mask. */
MK_DEVICE void tcgen05_commit_pair(uint32_t bar, uint16_t cta_mask)
{ asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" :: "r"(bar), "h"(cta_mask) : "memory"); }

/* ---- MMAs: one thread for the pair; all addresses are those of either CTA, at which it finds its own share ---- */

/* D = A B^T (accumulate false) or D += A B^T over 16 bf16 of the contraction axis. */
MK_DEVICE void tcgen05_mma_pair_bf16(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\ntcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n}"
                 :: "r"(d), "l"(a), "l"(b), "r"(instruction), "r"((uint32_t)accumulate) : "memory");
}
/* The same over 32 8-bit elements, with one E8M0 scale for each row of A and of B. Each CTA's tensor memory holds the scales of its own rows of A,
 * and those of all rows of B. */
MK_DEVICE void tcgen05_mma_pair_mx(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales, uint32_t b_scales, bool accumulate)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\ntcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale [%0], %1, %2, %3, [%4], [%5], p;\n}"
                 :: "r"(d), "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales), "r"((uint32_t)accumulate) : "memory");
}
/* An atom of scales, 32 rows of 16 bytes, from each CTA's shared memory to 4 columns of its own tensor memory, four times over the lanes. */
MK_DEVICE void tcgen05_copy_scales_pair(uint32_t to, uint64_t from)
{ asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" :: "r"(to), "l"(from) : "memory"); }

/* ---- tensor copies whose bytes count on an mbarrier of either CTA of the pair (a cluster address) ---- */

MK_DEVICE void tma_load_2d_pair(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t cluster_bar)
{ asm volatile("cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" :: "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(cluster_bar) : "memory"); }
MK_DEVICE void tma_load_3d_pair(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, int32_t c2, uint32_t cluster_bar)
{ asm volatile("cp.async.bulk.tensor.3d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" :: "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(cluster_bar) : "memory"); }
/* To every CTA of the mask; the bytes of a pair count on the mbarrier of the pair's CTA with the rank parity of cluster_bar. */
MK_DEVICE void tma_load_2d_pair_multicast(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t cluster_bar, uint16_t cta_mask)
{ asm volatile("cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" :: "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(cluster_bar), "h"(cta_mask) : "memory"); }

/* ---- Cluster Launch Control ---- */

/* Asks for a cluster of this grid that has not started, to do its work in its stead. The answer, 16 bytes, lands at this shared address of
 * the CTA and counts on the mbarrier. Not after a refusal has been seen. */
MK_DEVICE void launch_try_cancel(uint32_t answer, uint32_t bar)
{
    asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];" :: "r"(answer), "r"(bar) : "memory");
}
/* The same with an answer to every CTA of the cluster, at the same addresses. One thread of the cluster, all of whose CTAs are still there. */
MK_DEVICE void launch_try_cancel_multicast(uint32_t answer, uint32_t bar)
{
    asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 [%0], [%1];"
                 :: "r"(answer), "r"(bar) : "memory");
}
/* Granted? False: there is none left, or somebody more important wants this SM. */
MK_DEVICE bool launch_was_cancelled(Vec4 answer)
{
    uint32_t yes;
    asm volatile("{\n.reg .pred p;\n.reg .b128 q;\n.reg .b64 lo, hi;\nmov.b64 lo, {%1, %2};\nmov.b64 hi, {%3, %4};\nmov.b128 q, {lo, hi};\n"
                 "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, q;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(yes) : "r"(answer.x), "r"(answer.y), "r"(answer.z), "r"(answer.w));
    return yes != 0;
}
/* The first block of the cluster that was cancelled; only of an answer that grants. */
MK_DEVICE uint32_t launch_cancelled_block(Vec4 answer)
{
    uint32_t block;
    asm volatile("{\n.reg .b128 q;\n.reg .b64 lo, hi;\nmov.b64 lo, {%1, %2};\nmov.b64 hi, {%3, %4};\nmov.b128 q, {lo, hi};\n"
                 "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %0, q;\n}"
                 : "=r"(block) : "r"(answer.x), "r"(answer.y), "r"(answer.z), "r"(answer.w));
    return block;
}
/* Answers come through the async proxy into memory that threads have read: the reading threads release, the asking thread acquires. */
MK_DEVICE void fence_proxy_async_acquire_cluster() { asm volatile("fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory"); }
MK_DEVICE void fence_proxy_async_release_cluster() { asm volatile("fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;" ::: "memory"); }

} /* namespace mk */
#endif
