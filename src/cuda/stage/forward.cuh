/* The fused forward: one persistent launch that walks all tasks of a pass (layout/walk.h) while one warp of every CTA moves rows.
 *
 *   who            what                                                     stage
 *   warp 2         rows from their ranks into the ring, by ticket           s1_dispatch
 *   warp 3         waits until a task's rows are there, tasks ahead         (layout/depend.h)
 *   load thread    loads what warp 3 has found to be there
 *   math warps     gate/up or down, and (but for BF16 on Hopper)
 *   store warps    SwiGLU, or the push of y                                 s2, s3, s4, s5
 *
 * It computes what the staged launches compute, through the same stage code; only who waits for whom is new. The rank barrier
 * and the reduce follow as launches of their own. Mx: the routed experts in MXFP8. */
#ifndef MK_STAGE_FORWARD_CUH
#define MK_STAGE_FORWARD_CUH

#include "cuda/gemm/broad.cuh"
#include "cuda/stage/rows.cuh"
#include "cuda/stage/s1_dispatch.cuh"
#include "cuda/stage/s2_gate_up.cuh"
#include "cuda/stage/trace.cuh"
#include "cuda/stage/weights.cuh"
#include "cuda/stage/yield.cuh"

namespace mk {

/* Blackwell's tile, or the narrow one, with a stage less, which makes room for the dispatch slots; on Hopper the broad one for BF16. (MXFP8 is quantised out of the
 * accumulators there.) */
#ifdef MK_SM100
struct TileForward : TilePair { static constexpr uint32_t stages = 5; };
template <> struct GemmShared<TileForward> : PairShared<TileForward> {};
template <> struct Acc<TileForward> : PairAcc<TileForward> {};
struct TileForwardScaled : TilePairScaled { static constexpr uint32_t stages = 4; };
template <> struct GemmShared<TileForwardScaled> : PairShared<TileForwardScaled> {};
template <> struct Acc<TileForwardScaled> : SharingAcc<TileForwardScaled> {};
#else
struct TileNarrowFused : TileNarrow { static constexpr uint32_t stages = 5; };
typedef TileBroad TileForward;
typedef TileNarrowFused TileForwardScaled;
#endif
template <bool Mx> struct ForwardTileOf { typedef TileForward Tile; };
template <> struct ForwardTileOf<true> { typedef TileForwardScaled Tile; };
template <bool Mx> using ForwardTile = typename ForwardTileOf<Mx>::Tile;

/* Walking the tasks of a whole pass takes more registers than one GEMM's; the math warps have some to give. */
constexpr int kForwardRegistersMath = 208, kForwardRegistersOther = 88, kBroadRegistersMath = 160, kBroadRegistersStore = 104;
static_assert(kForwardRegistersOther + 2 * kForwardRegistersMath <= 3 * 168, "registers of 384 threads");
static_assert(kForwardRegistersOther + kBroadRegistersStore + 2 * kBroadRegistersMath <= 4 * 128, "registers of 512 threads");
template <bool Mx> constexpr bool kForwardStores = kHasStoreWarps<ForwardTile<Mx>>;
template <bool Mx> constexpr uint32_t kForwardThreads = kForwardStores<Mx> ? kBroadThreads : kGemmThreads;
template <bool Mx> constexpr uint32_t kForwardDispatchArea = kForwardStores<Mx> ? MK_DISPATCH_AREA / 2 : MK_DISPATCH_AREA;

template <bool Mx> struct ForwardShared {
    GemmShared<ForwardTile<Mx>> gemm;
    DispatchSlots<kForwardDispatchArea<Mx>> dispatch;
    mk_walk walk;
    uint64_t ready[kTaskSlots]; /* one arrival of the wait role: the operands of the task in that slot are there */
    TraceShared trace;
    YieldShared yield;
};
static_assert(sizeof(ForwardShared<false>) <= MK_FORWARD_SHARED && sizeof(ForwardShared<false>) > MK_FORWARD_SHARED - 2048, "what the host asks for, on either chip");
static_assert(sizeof(ForwardShared<true>) <= MK_FORWARD_SHARED, "what the host asks for");

/* Cuts of the walk: a task is kColumnTiles neighbouring column tiles. */
template <bool Mx> MK_DEVICE mk_walk forward_walk(const mk_forward_params &p)
{
    typedef ForwardTile<Mx> Tile;
    constexpr int64_t pair = Tile::cols * kColumnTiles<Tile>;
    const mk_dims &d = p.rank.dims;
    mk_walk w = {};
    w.pass = p.recompute ? MK_PASS_RECOMPUTE : MK_PASS_FORWARD;
    w.grid.gate_up = (int32_t)mk_ceil_div(2 * d.intermediate, pair);
    w.grid.down = p.recompute ? 0 : (int32_t)mk_ceil_div(d.hidden, pair);
    w.grid.shared_gate_up = (int32_t)mk_ceil_div(2 * d.shared_intermediate, pair);
    w.grid.shared_down = w.grid.down;
    w.grid.group_tiles = MK_GROUP_TILES;
    w.grid.raises = (int32_t)(kColumnTiles<Tile> * (kForwardStores<Mx> ? kStoreWarps : kWarpsPerTile<Tile>));
    w.mb_tiles = d.mb_tiles_fwd;
    w.tiles = mk_table_at(&p.rank.memory, p.schedule).tiles;
    if (!skipped(p.rank)) {
        w.num_tiles = load(&static_cast<const mk_schedule_head *>(p.schedule)->num_tiles);
        w.shared_tiles = d.shared_intermediate ? mk_ceil_div(p.num_tokens, MK_ROW_TILE) : 0;
        if (p.recompute)
            w.num_tiles = mk_min(w.num_tiles, d.saved_tiles);
    }
    mk_walk_count(&w);
    return w;
}

MK_DEVICE bool is_shared(int32_t kind) { return kind == MK_TASK_SHARED_GATE_UP || kind == MK_TASK_SHARED_DOWN; }
MK_DEVICE bool is_down(int32_t kind) { return kind == MK_TASK_DOWN || kind == MK_TASK_SHARED_DOWN; }

/* The task that was asked for last: a schedule thread asks once for each CTA of its cluster, one after the other, and where tasks are
 * short it is what limits a pass. Program::work_out fills `first` and `cols`. */
struct ClusterTask {
    mk_walk_cursor walked = {-1, 0};
    uint32_t number = ~0u;
    GemmTask first;  /* as it is for rank 0; kind NONE: there are no more */
    int32_t cols;    /* from one rank's columns to the next's */

    template <class Program> MK_MEMBER bool of_rank(Program &program, uint32_t asked, uint32_t rank, GemmTask &task)
    {
        if (asked != number)
            program.work_out(asked);
        number = asked;
        if (first.kind == MK_TASK_NONE)
            return false;
        task = first;
        task.col += (int32_t)rank * cols;
        return true;
    }
};

/* The Program of the GEMM core (grouped.cuh) over the walk. GemmTask.kind is the task's, tag its tile. */
template <bool Mx> struct ForwardProgram {
    typedef ForwardTile<Mx> Tile;
    const mk_forward_params &p;
    ForwardShared<Mx> &s;
    mk_table t;
    RingCursor<kTaskSlots> at;  /* of the load thread: the next task's place in `ready` */
    Yield yield;                /* of the schedule thread, and */
    ClusterTask last = {};
    ExpertMaps known = {};      /* of the load thread */

    /* A cluster may leave before the tasks are all drawn. */
    MK_MEMBER uint32_t next()
    {
        constexpr int64_t drawn = kColumnTiles<Tile> == 1 ? Tile::cluster : 1; /* at a time */
        return yield.next((uint32_t)mk_ceil_div(s.walk.num_tasks, drawn));
    }

    MK_MEMBER bool task(uint32_t number, uint32_t rank, GemmTask &task) { return last.of_rank(*this, number, rank, task); }

    MK_MEMBER void work_out(uint32_t number)
    {
        const mk_dims &d = p.rank.dims;
        const mk_task next = mk_walk_task_after(&s.walk, number, &last.walked);
        const bool shared = is_shared(next.kind), down = is_down(next.kind);
        const int64_t depth = !down ? d.hidden : shared ? d.shared_intermediate : d.intermediate;
        GemmTask &task = last.first;
        task = {};
        task.kind = next.kind;
        if (next.kind == MK_TASK_NONE)
            return;
        last.cols = (int32_t)(down ? Tile::cols : Tile::cols / 2);
        task.tag = next.tile;
        task.col = next.part * (int32_t)kColumnTiles<Tile> * last.cols;
        task.num_k_blocks = (int32_t)(Mx && kMultipliesMx && !shared ? mk_ceil_div(depth, kRowBytes) : depth / kBlockK);
        task.out_row = next.tile * MK_ROW_TILE;
        if (shared) {
            task.row = task.out_row;
            task.num_rows = (int32_t)mk_min(p.num_tokens - task.out_row, MK_ROW_TILE);
            return;
        }
        task.expert = (int32_t)mk_expert_of_tile(&t, next.tile);
        task.row = (int32_t)ring_row(d, next.tile);
        task.num_rows = (int32_t)mk_valid_rows(&t, next.tile);
    }

    /* The load thread: what the wait role has seen. Rows were written for plain loads; the copy engine reads them next. */
    MK_MEMBER void wait_operands(const GemmTask &)
    {
        wait_mbar(smem_addr(&s.ready[at.slot]), at.parity, "forward: operands of a task are ready");
        at.next();
        fence_proxy_async_global();
    }

    MK_MEMBER auto input(const GemmTask &task)
    {
        if constexpr (Mx && kMultipliesMx)
            return scaled_input(task);
        else
            return operands(task);
    }

private:
    MK_MEMBER ScaledGemmInput scaled_input(const GemmTask &task)
    {
        const GemmInput of = operands(task);
        switch (kind_of(task)) {
        case MK_TASK_GATE_UP: return {of, &p.ring_x_scales, &p.gate_scales, &p.up_scales};
        case MK_TASK_DOWN: return {of, &p.ring_h_scales, &p.down_scales, &p.down_scales};
        default: return {of, nullptr, nullptr, nullptr};
        }
    }

    MK_MEMBER GemmInput operands(const GemmTask &task)
    {
        const int32_t half = Tile::cols / 2;
        const bool shared = is_shared(kind_of(task)), down = is_down(kind_of(task));
        if (const mk_tensor_map *maps = shared ? p.shared_maps : p.expert_maps)
            return input_by_pointer(known, down ? (shared ? &p.shared_h : &p.ring_h) : (shared ? &p.shared_x : &p.ring_x), maps + task.expert * MK_EXPERT_MAPS, down, half);
        switch (kind_of(task)) {
        case MK_TASK_SHARED_GATE_UP: return {&p.shared_x, &p.shared_gate, &p.shared_up, p.shared_up_row, 0};
        case MK_TASK_SHARED_DOWN: return {&p.shared_h, &p.shared_down, &p.shared_down, half, 0};
        case MK_TASK_GATE_UP: return {&p.ring_x, &p.gate, &p.up, p.up_row, task.expert};
        default: return {&p.ring_h, &p.down, &p.down, half, task.expert};
        }
    }
};

/* What the tasks of MXFP8 want of the core: the shared expert's are bf16. */
template <bool Mx> struct ForwardTasks : PlainTasks<ForwardTile<Mx>> {};
#ifdef MK_SM100
template <> struct ForwardTasks<true> : PlainTasks<TileForwardScaled> {
    MK_MEMBER PairRecipe recipe(const GemmTask &task) const
    {
        PairRecipe how;
        how.scaled = !is_shared(task.kind);
        return how;
    }
};
#endif

/* Runs the stage's epilogue and raises the task's counter, once for every math warp. */
template <bool Mx> struct ForwardEpilogue {
    typedef Acc<ForwardTile<Mx>> Sums;
    const mk_forward_params &p;
    mk_table t;

    /* Release, cumulative over the warp's stores. */
    MK_MEMBER void signal(int32_t counter, int32_t tile) const
    {
        sync_warp();
        if (lane_idx() == 0)
            flag_add_release_gpu(counter_at(p.rank, counter, tile), 1);
    }

    MK_MEMBER void down(const GemmTask &task, const Sums &acc, const WarpOut &out) const
    {
        const mk_rank_params &r = p.rank;
        const bool shared = is_shared(task.kind);
        /* h has been read, and nobody in this launch reads y: so before the pushes, whose completion a release would wait for. */
        if (!shared)
            signal(MK_COUNTER_s4_tasks_done, task.tag);
        StoreRows<SlotRows>{{r, t.rows, shared ? in_local<bf16>(r, r.memory.shared_y) : nullptr, r.dims.hidden}}(task, acc, out);
    }

    MK_MEMBER void gate_up(const GemmTask &task, const Sums &acc, const WarpOut &out) const
    {
        const mk_rank_params &r = p.rank;
        const bool shared = is_shared(task.kind);
        if (Mx && !shared)
            gate_up_epilogue_mx(r, p.context, p.recompute)(task, acc, out);
        else
            gate_up_epilogue(r, p.context, shared, p.num_tokens)(task, acc, out);
        signal(shared ? MK_COUNTER_shared_s2_tasks_done : MK_COUNTER_s2_tasks_done, task.tag);
    }

    MK_MEMBER void operator()(const GemmTask &task, const Sums &acc, const WarpOut &out) const
    {
        if (is_down(task.kind))
            down(task, acc, out);
        else
            gate_up(task, acc, out);
    }
};

/* The same by store warps, out of a finished tile (broad.cuh). */
struct ForwardStore {
    const mk_forward_params &p;
    mk_table t;

    /* As in ForwardEpilogue. */
    MK_MEMBER void signal(int32_t counter, int32_t tile) const
    {
        sync_warp();
        if (lane_idx() == 0)
            flag_add_release_gpu(counter_at(p.rank, counter, tile), 1);
    }

    MK_MEMBER void begin(const GemmTask &task) const
    {
        if (kind_of(task) == MK_TASK_DOWN)
            signal(MK_COUNTER_s4_tasks_done, task.tag); /* h has been read */
    }

    MK_MEMBER void store(const GemmTask &task, const FinishedTile &tile, uint32_t first_row) const
    {
        const mk_rank_params &r = p.rank;
        const bool shared = is_shared(kind_of(task));
        if (is_down(kind_of(task)))
            store_finished(task, tile, first_row, SlotRows{r, t.rows, shared ? in_local<bf16>(r, r.memory.shared_y) : nullptr, r.dims.hidden});
        else
            store_finished_swiglu(task, tile, first_row, gate_up_epilogue(r, p.context, shared, p.num_tokens));
    }

    MK_MEMBER void end(const GemmTask &task) const
    {
        if (!is_down(kind_of(task)))
            signal(is_shared(kind_of(task)) ? MK_COUNTER_shared_s2_tasks_done : MK_COUNTER_s2_tasks_done, task.tag);
    }
};

MK_DEVICE void note_task(const ForwardStore &e, uint32_t number, TraceStamp stamp)
{
    trace_stamp(e.p.rank, static_cast<ForwardShared<false> *>(shared_base())->trace, number, stamp);
}
template <bool Mx> MK_DEVICE void note_task(const ForwardEpilogue<Mx> &e, uint32_t number, TraceStamp stamp)
{
    trace_stamp(e.p.rank, static_cast<ForwardShared<Mx> *>(shared_base())->trace, number, stamp);
}

/* Of store warps a CTA that only helps has nothing to record. */
template <bool Mx> MK_DEVICE bool is_recorded(const GemmTask &task) { return task.num_k_blocks != 0 && !(kForwardStores<Mx> && only_helps(task)); }

template <bool Mx> MK_DEVICE void forward_trace(const mk_forward_params &p, ForwardShared<Mx> &s, const GemmTask &task, uint32_t number)
{
    typedef ForwardTile<Mx> Tile;
    const mk_task_kind kind = (mk_task_kind)kind_of(task);
    const uint32_t part = (uint32_t)task.col / (is_down(kind) ? Tile::cols : Tile::cols / 2);
    const mk_trace_lane product = kForwardStores<Mx> || number % 2 == 0 ? MK_TRACE_LANE_math0 : MK_TRACE_LANE_math1;
    trace_task(p.rank, s.trace, kind, is_recorded<Mx>(task) ? task.tag : -1, part, product, kForwardStores<Mx> ? MK_TRACE_LANE_math1 : product,
               kind == MK_TASK_DOWN && !only_helps(task) ? trace_row_bytes(p.rank, task.col, Tile::cols) : 0);
    if (is_recorded<Mx>(task))
        trace_begin(p.rank, s.trace, MK_TRACE_LANE_wait, MK_TRACE_wait_operands, task.tag, part, mk_trace_is_shared(kind));
}

/* The wait role: one thread of each CTA. Finding out that a task may go on takes several dependent reads of global memory, more
 * than the stages in flight can hide, so it is done tasks ahead of the load thread. Acquire: the rows a task reads have been written,
 * those it overwrites have been read; pairs with the releases of s1_dispatch and of ForwardEpilogue. Handed on by the arrive. */
template <bool Mx> MK_DEVICE void forward_wait(const mk_forward_params &p, const mk_table &t, ForwardShared<Mx> &s)
{
    TaskReader<ForwardTile<Mx>> tasks;
    for (uint32_t number = 0;; tasks.at.next(), number++) {
        const GemmTask task = tasks.wait(s.gemm);
        const uint32_t slot = tasks.at.slot;
        const mk_task as_walked = mk_task_make((mk_task_kind)kind_of(task), task.tag, 0);
        mk_need need;
        if (task.num_k_blocks != 0)
            forward_trace(p, s, task, number);
        for (int i = 0; task.num_k_blocks != 0 && mk_task_need(&s.walk, &t, &p.rank.dims, as_walked, i, &need); i++)
            wait_counter(p.rank, as_walked.kind, need.counter, need.first, need.count, "forward: operands of a task");
        mbar_arrive_release_cta(smem_addr(&s.ready[slot]));
        tasks.release(s.gemm);
        if (is_recorded<Mx>(task))
            trace_end(p.rank, s.trace, MK_TRACE_LANE_wait);
        if (task.num_k_blocks == 0)
            return;
    }
}

template <bool Mx> MK_DEVICE void forward_init(const mk_forward_params &p, ForwardShared<Mx> &s)
{
    if constexpr (kForwardStores<Mx>)
        broad_init(s.gemm);
    for (uint32_t i = 0; i < kTaskSlots; i++)
        mbar_init(smem_addr(&s.ready[i]), 1);
    yield_init(s.yield);
    fence_mbar_init_release_cluster();
    s.walk = forward_walk<Mx>(p);
    trace_init(p.rank, s.trace);
}

/* The dispatch role: one warp of each CTA. Rows come from the state's second ticket, in the order of the walk. */
template <bool Mx> MK_DEVICE void forward_dispatch(const mk_forward_params &p, ForwardShared<Mx> &s)
{
    const mk_walk &walk = s.walk;
    Dispatch<Mx, false, kForwardDispatchArea<Mx>> dispatch(p.rank, mk_table_at(&p.rank.memory, p.schedule), s.dispatch, &walk, &s.trace);
    dispatch.stop = smem_addr(&s.yield.leaving);
    const int64_t num_rows = walk.num_tiles * MK_ROW_TILE;
    dispatch.move_all(&device_state(p.rank)->tickets[1], num_rows - 1, num_rows);
    dispatch.count();
}

} /* namespace mk */
#endif
