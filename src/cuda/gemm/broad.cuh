/* The grouped GEMM core with warps of its own for epilogues: tiles of 128 x 256, which need a quarter less of the SM's port to L2 than two of 128 x 128, and
 * an epilogue that hides under the next tile's MMAs all the same. Hopper; 512 threads:
 *
 *   warps 0-3    load, schedule, and two for the kernel's own roles
 *   warps 4-7    store   the epilogue, out of shared memory
 *   warps 8-15   math    two warpgroups, 128 columns each: wgmma, then their sums, rounded to bf16, into shared memory
 *
 * A finished tile takes 64 KiB. Three quarters of them are the stage of its last K block, which is kept back until the store warps have read it: the next task's first
 * K blocks take turns in the other three.
 *
 * A task is one CTA's share, and the CTAs of a cluster have one each, with neighbouring numbers: two row tiles of the same columns share B, two tiles of columns of the same
 * rows share A; each CTA loads half of what is shared, for both. Walks go through a group's row tiles up and down in turn, so neighbours nearly always share one or
 * the other; where they do not, one comes after the other, and the second CTA has rows of zeros. */
#ifndef MK_GEMM_BROAD_CUH
#define MK_GEMM_BROAD_CUH

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/mma.cuh"
#include "cuda/gemm/pair.cuh"

namespace mk {

struct TileBroad {
    static constexpr uint32_t rows = 128, cols = 256, stages = 4, cluster = 2;
    static constexpr bool ping_pong = false, tensor_memory = false;
};
template <> constexpr uint32_t kColumnTiles<TileBroad> = 1;
template <> struct Acc<TileBroad> : Acc<TileNarrow> {}; /* of each warpgroup */
template <class Tile> constexpr bool kHasStoreWarps = false;
template <> constexpr bool kHasStoreWarps<TileBroad> = true;

constexpr uint32_t kStoreWarps = 4, kFirstStoreWarp = 4, kFirstBroadMathWarp = 8, kBroadThreads = 512;

/* Of one math warpgroup's sums, rounded: the first or the second block of 64 rows. */
constexpr uint32_t kBlockBytes = 64 * 128 * 2;
static_assert(2 * kBlockBytes == TileBroad::cols * kRowBytes && kBlockBytes == TileBroad::rows * kRowBytes, "three blocks in a stage");

template <> struct GemmShared<TileBroad> {
    alignas(1024) uint8_t a[TileBroad::stages][TileBroad::rows * kRowBytes];
    alignas(1024) uint8_t b[TileBroad::stages][TileBroad::cols * kRowBytes];
    alignas(1024) uint8_t finished[kBlockBytes]; /* warpgroup 0's second block; the others are in the stage of the last K block */
    GemmTask task[kTaskSlots];
    uint64_t full[TileBroad::stages];       /* one arrival and the bytes of a stage */
    uint64_t empty[TileBroad::stages];      /* the math warps of both CTAs; of a task's last stage the store warps, two arrivals each */
    uint64_t task_full[kTaskSlots];         /* one arrival and the bytes of a task */
    uint64_t task_empty[kTaskSlots];        /* of the leading CTA: every reader in the cluster */
    uint64_t finished_full, finished_empty; /* math warps: a tile is there; store warps: it has been read */
    uint64_t low_ready;                     /* warpgroup 0's warps: they have read the last K block, and the tile before has been read */
    uint32_t last_stage;                    /* of the finished tile */
};
static_assert(sizeof(GemmShared<TileBroad>) <= 232448, "shared memory of a CTA");

/* Where a role is in the stages: K block after K block, the next stage; but a task's last stage is passed over by the kKeptBlocks K blocks behind it. */
constexpr uint32_t kKeptBlocks = 9;
struct StageCursor {
    uint32_t slot = 0, kept = 0, passes = 0; /* K blocks that still pass `kept` over */
    uint32_t parities = 0;                   /* bit s: of stage s, in its current round */
    MK_MEMBER uint32_t parity() const { return parities >> slot & 1; }
    MK_MEMBER void next(bool last_of_task)
    {
        parities ^= 1u << slot;
        kept = last_of_task ? slot : kept;
        passes = last_of_task ? kKeptBlocks : passes;
        slot = (slot + 1) % TileBroad::stages;
        if (passes > 0) {
            slot = slot == kept ? (slot + 1) % TileBroad::stages : slot;
            passes--;
        }
    }
};

/* After gemm_init, by the same thread; then a fence, and a cluster barrier. */
MK_DEVICE void broad_init(GemmShared<TileBroad> &s)
{
    mbar_init(smem_addr(&s.finished_full), kMathWarps);
    mbar_init(smem_addr(&s.finished_empty), kStoreWarps);
    mbar_init(smem_addr(&s.low_ready), kMathWarps / 2);
}

/* ---- schedule ---- */

/* In GemmTask.kind of both CTAs' tasks: they share A. Else they share B. */
constexpr int32_t kSharesA = 1 << 30;
MK_DEVICE int32_t kind_of(const GemmTask &task) { return task.kind & ~kSharesA; }

/* The schedule role: one thread of the leading CTA. Programs count tasks of one CTA, and draw two. */
template <class Program> MK_DEVICE void broad_schedule(GemmShared<TileBroad> &s, Program &program)
{
    RingCursor<kTaskSlots> at;
    for (uint32_t drawn = program.next();;) {
        const uint32_t number = 2 * drawn;
        drawn = program.next(); /* a task ahead, which hides the ticket's latency; the last one is drawn in vain */
        GemmTask first = {}, second = {};
        const bool any = program.task(number, 0, first), both = any && program.task(number + 1, 0, second);
        if (!any) {
            post_pair(s, at, first, first);
            return;
        }
        const bool alike = both && first.kind == second.kind && first.expert == second.expert, same_rows = first.out_row == second.out_row;
        if (alike && (same_rows || first.col == second.col)) {
            first.kind |= same_rows ? kSharesA : 0;
            second.kind |= same_rows ? kSharesA : 0;
            post_pair(s, at, first, second);
            continue;
        }
        post_pair(s, at, first, Pairing<Program>::helper(first));
        if (both)
            post_pair(s, at, second, Pairing<Program>::helper(second));
    }
}

/* ---- load ---- */

/* K block k into a stage: A's rows in two boxes, of which the other CTA may bring one, or else half of B's columns. */
MK_DEVICE void load_broad_stage(GemmShared<TileBroad> &s, uint32_t stage, const GemmTask &task, const GemmInput &in, int32_t k)
{
    constexpr uint32_t box = kBoxRowsA<TileBroad>, half_b = kBoxRowsB<TileBroad>;
    const uint32_t full = smem_addr(&s.full[stage]), a = smem_addr(s.a[stage]), b = smem_addr(s.b[stage]), rank = cluster_rank();
    const int32_t x = k * (int32_t)kBlockK;
    mbar_arrive_expect_tx_release_cta(full, kStageBytes<TileBroad>);
    if (task.kind & kSharesA) {
        tma_load_2d_multicast(a + rank * box * kRowBytes, in.a, x, task.row + (int32_t)(rank * box), full, kBothCtas);
        tma_load_3d(b, in.b_low, x, task.col, in.b_depth, full);
        tma_load_3d(b + half_b * kRowBytes, in.b_high, x, task.col + in.b_high_row, in.b_depth, full);
        return;
    }
    tma_load_2d(a, in.a, x, task.row, full);
    tma_load_2d(a + box * kRowBytes, in.a, x, task.row + (int32_t)box, full);
    tma_load_3d_multicast(b + rank * half_b * kRowBytes, rank ? in.b_high : in.b_low, x, task.col + (rank ? in.b_high_row : 0), in.b_depth, full, kBothCtas);
}

/* The load role, as gemm_load. */
template <class Program> MK_DEVICE void broad_load(GemmShared<TileBroad> &s, Program &program)
{
    TaskReader<TileBroad> tasks;
    StageCursor at;
    for (;; tasks.at.next()) {
        const GemmTask task = tasks.wait(s);
        if (task.num_k_blocks != 0)
            program.wait_operands(task);
        tasks.release(s);
        if (task.num_k_blocks == 0)
            return;
        const GemmInput in = program.input(task);
        for (int32_t k = 0; k < task.num_k_blocks; k++) {
            wait_mbar(smem_addr(&s.empty[at.slot]), at.parity() ^ 1, "gemm_load: free stage");
            load_broad_stage(s, at.slot, task, in, k);
            at.next(k == task.num_k_blocks - 1);
        }
    }
}

/* The roles of warps 0 and 1, as gemm_load_or_schedule. */
template <class Program> MK_DEVICE void broad_load_or_schedule(GemmShared<TileBroad> &s, uint32_t warp, Program &program)
{
    if (lane_idx() != 0)
        return;
    if (warp == 0)
        broad_load(s, program);
    else if (cluster_rank() == kScheduleRank<TileBroad>)
        broad_schedule(s, program);
}

/* ---- math ---- */

/* A store warp's and a math warp's view of a finished tile: rows 16 `warp` .. + 15 of each block, in chunks of 64 columns. */
struct FinishedTile {
    uint32_t block[2][2]; /* addresses of warpgroup g's block m, this warp's rows */
    MK_MEMBER FinishedTile(GemmShared<TileBroad> &s, uint32_t last_stage, uint32_t warp)
    {
        const uint32_t rows = warp * 2 * kChunkBytes;
        block[0][0] = smem_addr(s.b[last_stage]) + rows;
        block[1][0] = smem_addr(s.b[last_stage]) + kBlockBytes + rows;
        block[0][1] = smem_addr(s.finished) + rows;
        block[1][1] = smem_addr(s.a[last_stage]) + rows;
    }
};

template <class Sums> MK_DEVICE void put_block(uint32_t to, const Sums &acc, uint32_t m)
{
    MK_UNROLL for (uint32_t c = 0; c < 2; c++) {
        float v[32];
        uint32_t packed[16];
        acc.read(m, c, v);
        pack_chunk(v, packed);
        put_chunk(to + c * kChunkBytes, packed);
    }
}

/* Into the stage of the last K block, once nobody multiplies from there: a half of B is one warpgroup's alone, A is both's. The other CTA does not load into that stage
 * before the store warps have read it. */
MK_DEVICE void finish_tile(GemmShared<TileBroad> &s, const Acc<TileBroad> &acc, uint32_t last_stage, uint32_t warpgroup, uint32_t warp, uint32_t parity)
{
    const FinishedTile tile(s, last_stage, warp);
    barrier_named_sync(BARRIER_MATH_TURN + warpgroup, 128);
    if (warpgroup == 0) {
        wait_mbar(smem_addr(&s.finished_empty), parity ^ 1, "gemm_math: the tile before has been stored");
        if (lane_idx() == 0)
            mbar_arrive_release_cta(smem_addr(&s.low_ready));
        if (warp == 0 && lane_idx() == 0)
            store(&s.last_stage, last_stage);
        put_block(tile.block[0][0], acc, 0);
        put_block(tile.block[0][1], acc, 1);
    } else {
        put_block(tile.block[1][0], acc, 0);
        wait_mbar(smem_addr(&s.low_ready), parity, "gemm_math: both warpgroups have read the last stage");
        put_block(tile.block[1][1], acc, 1);
    }
    fence_proxy_async_shared_cta(); /* plain stores; TMA writes there next, when the store warps have let it */
}

/* As multiply_task, of this warpgroup's columns. */
MK_DEVICE uint32_t multiply_broad(GemmShared<TileBroad> &s, Acc<TileBroad> &acc, StageCursor &at, int32_t num_k_blocks, uint32_t warpgroup)
{
    uint32_t previous = 0;
    for (int32_t k = 0; k < num_k_blocks; k++) {
        wait_mbar(smem_addr(&s.full[at.slot]), at.parity(), "gemm_math: full stage");
        acc.template multiply<MajorK, MajorK>(smem_addr(s.a[at.slot]), smem_addr(s.b[at.slot]) + warpgroup * (TileBroad::cols / 2) * kRowBytes, k == 0);
        if (k > 0) {
            acc.wait_all_but_last();
            release_stage(s, previous);
        }
        previous = at.slot;
        at.next(k == num_k_blocks - 1);
    }
    acc.wait_all();
    return previous;
}

/* The math role: all threads of warpgroup 0 or 1; `warp` of its four. */
template <class Store> MK_DEVICE void broad_math(GemmShared<TileBroad> &s, uint32_t warpgroup, uint32_t warp, const Store &store_tile)
{
    TaskReader<TileBroad> tasks;
    StageCursor at;
    Acc<TileBroad> acc;
    for (uint32_t number = 0;; number++, tasks.at.next()) {
        const GemmTask task = tasks.wait(s);
        sync_warp();
        if (lane_idx() == 0)
            tasks.release(s);
        if (task.num_k_blocks == 0)
            return;
        if (warpgroup == 0)
            note_task(store_tile, number, TRACE_PRODUCT_BEGINS);
        const uint32_t last = multiply_broad(s, acc, at, task.num_k_blocks, warpgroup);
        finish_tile(s, acc, last, warpgroup, warp, number & 1);
        if (warpgroup == 0)
            note_task(store_tile, number, TRACE_EPILOGUE_BEGINS);
        sync_warp();
        if (lane_idx() == 0)
            mbar_arrive_release_cta(smem_addr(&s.finished_full));
    }
}

/* ---- store ---- */

/* The store role: warp 0..3. Of store_tile: begin(task), when its products are done; store(task, tile, first row), which reads the tile; end(task). */
template <class Store> MK_DEVICE void broad_store(GemmShared<TileBroad> &s, uint32_t warp, const Store &store_tile)
{
    TaskReader<TileBroad> tasks;
    for (uint32_t number = 0;; number++, tasks.at.next()) {
        const GemmTask task = tasks.wait(s);
        sync_warp();
        if (lane_idx() == 0)
            tasks.release(s);
        if (task.num_k_blocks == 0)
            return;
        wait_mbar(smem_addr(&s.finished_full), number & 1, "gemm_store: finished tile");
        const uint32_t last = load(&s.last_stage);
        if (!only_helps(task)) {
            store_tile.begin(task);
            store_tile.store(task, FinishedTile(s, last, warp), warp * 16);
        }
        note_task(store_tile, number, TRACE_EPILOGUE_ENDS); /* before the next one begins */
        sync_warp();
        if (lane_idx() < 4) /* they have read shared memory, and the arrive does not overtake that (TaskReader::release) */
            mbar_arrive_remote_release_cta(cluster_addr(smem_addr(&s.empty[last]), lane_idx() % 2));
        if (lane_idx() == 0)
            mbar_arrive_release_cta(smem_addr(&s.finished_empty));
        if (!only_helps(task))
            store_tile.end(task);
    }
}

/* StoreRows of a finished tile: rows first_row .. + 15 of both blocks. */
template <class Rows> MK_DEVICE void store_finished(const GemmTask &task, const FinishedTile &tile, uint32_t first_row, const Rows &rows)
{
    MK_UNROLL for (uint32_t m = 0; m < 2; m++) {
        if (first_row + m * 64 >= (uint32_t)task.num_rows)
            return;
        LaneRows to;
        to.find(rows, task, first_row + m * 64);
        MK_UNROLL for (uint32_t q = 0; q < 4; q++)
            if (task.col + 64 * (int64_t)q < rows.cols)
                flush_chunk(tile.block[q / 2][m] + q % 2 * kChunkBytes, to, task.col + 64 * (int64_t)q);
    }
}

/* SwigluRows of a finished tile: warpgroup 0 has made gate, warpgroup 1 up. */
template <class Out, class Kept>
MK_DEVICE void store_finished_swiglu(const GemmTask &task, const FinishedTile &tile, uint32_t first_row, const SwigluRows<Out, Kept> &to)
{
    MK_ROLLED for (uint32_t q = 0; q < 4; q++) {
        const uint32_t block_row = first_row + q / 2 * 64, chunk = q % 2 * kChunkBytes;
        const uint32_t gate = (q < 2 ? tile.block[0][0] : tile.block[0][1]) + chunk, up = (q < 2 ? tile.block[1][0] : tile.block[1][1]) + chunk;
        const int64_t col = task.col + 64 * (int64_t)(q % 2) + lane_idx() % 8 * 8;
        if (block_row >= (uint32_t)task.num_rows)
            return;
        MK_UNROLL for (uint32_t i = 0; i < 4; i++) {
            const uint32_t in_chunk = 4 * i + lane_idx() / 8, at = chunk_piece(0, in_chunk, lane_idx() % 8);
            to.put(task, block_row + in_chunk, col, block_row + in_chunk < (uint32_t)task.num_rows && col < to.h.cols, load_shared_b128(gate + at), load_shared_b128(up + at));
        }
    }
}

} /* namespace mk */
#endif
