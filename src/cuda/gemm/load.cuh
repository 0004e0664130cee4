/* The grouped GEMM core, part 2: the schedule role, which hands out tasks, and the load role, which fills the stages. */
#ifndef MK_GEMM_LOAD_CUH
#define MK_GEMM_LOAD_CUH

#include "cuda/gemm/tile.cuh"
#include "cuda/sync/wait.cuh"

namespace mk {

/* ---- tasks: from the schedule thread to every role of every CTA in the cluster, through a small ring ---- */

template <class Tile> MK_DEVICE void post_task(GemmShared<Tile> &s, uint32_t slot, uint32_t rank, const GemmTask &task)
{
    const uint32_t bar = cluster_addr(smem_addr(&s.task_full[slot]), rank);
    const uint32_t to = cluster_addr(smem_addr(&s.task[slot]), rank);
    mbar_arrive_expect_tx_remote_release_cluster(bar, sizeof(GemmTask));
    store_async_b128(to, {(uint32_t)task.row, (uint32_t)task.col, (uint32_t)task.expert, (uint32_t)task.num_rows}, bar);
    store_async_b128(to + 16, {(uint32_t)task.num_k_blocks, (uint32_t)task.kind, (uint32_t)task.out_row, (uint32_t)task.tag}, bar);
}

/* The schedule role: one thread of the leading CTA. Ends after it has posted "no more tasks" to everybody. */
template <class Tile, class Program> MK_DEVICE void gemm_schedule(GemmShared<Tile> &s, Program &program)
{
    RingCursor<kTaskSlots> at;
    uint32_t next = program.next();
    for (bool more = true; more; at.next()) {
        const uint32_t number = next;
        next = program.next(); /* drawn a task ahead, which hides the ticket's latency; the last one is drawn in vain */
        wait_mbar_cluster(smem_addr(&s.task_empty[at.slot]), at.parity ^ 1, "gemm_schedule: free task slot");
        for (uint32_t rank = 0; rank < Tile::cluster; rank++) {
            GemmTask task = {};
            more = program.task(number, rank, task);
            post_task(s, at.slot, rank, task);
        }
    }
}

/* A role's view of the task ring. Every reader sees every task. */
template <class Tile> struct TaskReader {
    RingCursor<kTaskSlots> at;

    MK_MEMBER GemmTask wait(GemmShared<Tile> &s)
    {
        wait_mbar_cluster(smem_addr(&s.task_full[at.slot]), at.parity, "gemm: next task");
        return load(&s.task[at.slot]);
    }
    /* By one thread for each reader, when its threads have all read the task. They read shared memory only, and the arrive does
     * not overtake that; release at cluster scope would also wait for the last tile's stores to memory. */
    MK_MEMBER void release(GemmShared<Tile> &s)
    {
        mbar_arrive_remote_release_cta(cluster_addr(smem_addr(&s.task_empty[at.slot]), kScheduleRank<Tile>));
    }
};

/* ---- operands ---- */

/* K block k of a task into a stage. The CTAs of a cluster load a share of A each, and multicast it to all. */
template <class Tile> MK_DEVICE void load_stage(GemmShared<Tile> &s, uint32_t stage, const GemmTask &task, const GemmInput &in, int32_t k)
{
    constexpr uint32_t share_a = kBoxRowsA<Tile>, half_b = kBoxRowsB<Tile>;
    const uint32_t full = smem_addr(&s.full[stage]);
    const uint32_t a = smem_addr(s.a[stage]), b = smem_addr(s.b[stage]);
    const int32_t x = k * (int32_t)kBlockK;
    mbar_arrive_expect_tx_release_cta(full, kStageBytes<Tile>);
    if constexpr (Tile::cluster == 1) {
        tma_load_2d(a, in.a, x, task.row, full);
    } else {
        const uint32_t first = cluster_rank() * share_a;
        tma_load_2d_multicast(a + first * kRowBytes, in.a, x, task.row + (int32_t)first, full, (1 << Tile::cluster) - 1);
    }
    tma_load_3d(b, in.b_low, x, task.col, in.b_depth, full);
    tma_load_3d(b + half_b * kRowBytes, in.b_high, x, task.col + in.b_high_row, in.b_depth, full);
}

/* The load role: one thread of each CTA. load_block(stage, task, in, k) fills a stage with K block k. */
template <class Tile, class Program, class LoadBlock> MK_DEVICE void gemm_load(GemmShared<Tile> &s, Program &program, const LoadBlock &load_block)
{
    TaskReader<Tile> tasks;
    RingCursor<Tile::stages> at;
    for (;; tasks.at.next()) {
        const GemmTask task = tasks.wait(s);
        if (task.num_k_blocks != 0)
            program.wait_operands(task);
        tasks.release(s);
        if (task.num_k_blocks == 0)
            return;
        const auto in = program.input(task);
        for (int32_t k = 0; k < task.num_k_blocks; k++, at.next()) {
            wait_mbar(smem_addr(&s.empty[at.slot]), at.parity ^ 1, "gemm_load: free stage");
            load_block(at.slot, task, in, k);
        }
    }
}

} /* namespace mk */
#endif
