/* The fused backward: one persistent launch that walks all tasks of the pass (layout/walk.h), first minibatch to last, while one warp of
 * every CTA moves rows. The roles are the fused forward's (forward.cuh); there are more kinds of tasks:
 *
 *   kind            operands (A, B), contraction                    epilogue
 *   gate_up         ring_x, gate and up weights; H                  replay: gate, up into the ring
 *   dgrad_down      ring_dout, down weights as they lie; H          s4_down_bwd.cuh
 *   dgrad_gate_up   ring_gate then ring_up (dgate, dup), weights    s2_gate_up_bwd.cuh: pushes dx and dw
 *                   as they lie; I twice
 *   wgrad           two ring buffers as they lie; rows of a piece   wgrad.cuh
 *
 * and the same for the shared expert over this rank's tokens. With params.kind the launch runs one stage of one step instead, which makes
 * the staged backward out of the same code.
 *
 * Mx: the routed experts in MXFP8 (docs/contract.md). What a product wants quantised along another axis is in a buffer of its own (dgrad_*, wgrad_* in
 * layout/memory.h). Where the tensor cores multiply bf16 only, rows are widened as they land, and weights are widened copies. Elsewhere (is_scaled)
 * operands are e4m3 with scales: those of replay and dgrads with the contraction contiguous, dgrads reading transposed weights; those of weight gradients as they
 * lie (of which mok_config.mx_wgrad_bf16 makes bf16 tasks). */
#ifndef MK_STAGE_BACKWARD_CUH
#define MK_STAGE_BACKWARD_CUH

#include "cuda/stage/forward.cuh"
#include "cuda/stage/s2_gate_up_bwd.cuh"
#include "cuda/stage/s4_down_bwd.cuh"
#include "cuda/stage/weights.cuh"
#include "cuda/stage/wgrad.cuh"

namespace mk {

#ifdef MK_SM100
typedef TileForward TileBackward; /* its rows, columns and cluster are those of either precision's */
template <bool Mx> using BackwardTile = ForwardTile<Mx>;
#else
typedef TileNarrowFused TileBackward;
template <bool Mx> using BackwardTile = TileBackward;
#endif

/* The epilogue of s4_down_bwd takes all that the other roles can spare. */
constexpr int kBackwardRegistersMath = 208, kBackwardRegistersOther = 88;
static_assert(kBackwardRegistersOther + 2 * kBackwardRegistersMath <= 3 * 168, "registers of 384 threads");

/* What a math warp knows while it is in an epilogue, whose accumulators leave no register for it. */
struct MathState {
    GemmTask task;
    RingCursor<kTaskSlots> tasks;
    RingCursor<TileBackward::stages> stages;
    uint32_t turn;
};

/* A run of K blocks of a task whose boxes follow each other: where the first are, and how far the next. A's share of this CTA, B's halves.
 * A task is one run or two: dgate then dup, or a piece that goes over the ring's end. The wait role works
 * them out, tasks ahead: the load thread has to keep up with the matrix unit, which is through with a short task in 3 us. */
struct LoadRun {
    const mk_tensor_map *a, *b_low, *b_high;
    int32_t a_x, a_y, b_x, b_high_x, b_y, b_depth;
    int32_t a_step_x, a_step_y, b_step_x, b_step_y;
    int32_t count;
    bool by_pointer = false; /* B's maps lie in memory */
};

template <bool Mx> struct BackwardShared {
    GemmShared<BackwardTile<Mx>> gemm;
    DispatchShared dispatch;
    mk_walk walk;
    uint32_t first, end;        /* task numbers of this launch */
    uint64_t ready[kTaskSlots]; /* one arrival of the wait role: the operands of the task in that slot are there */
    LoadRun runs[kTaskSlots][2]; /* of the task in that slot, once it is ready */
    MathState math[kMathWarps];
    TraceShared trace;
    YieldShared yield;
};
static_assert(sizeof(BackwardShared<false>) <= MK_BACKWARD_SHARED && sizeof(BackwardShared<false>) > MK_BACKWARD_SHARED - 2048, "what the host asks for, on either chip");
static_assert(sizeof(BackwardShared<true>) <= MK_BACKWARD_SHARED, "what the host asks for");

MK_DEVICE bool is_shared_task(int32_t kind) { return kind >= MK_TASK_SHARED_GATE_UP && kind <= MK_TASK_SHARED_WGRAD; }
/* The routed kind that computes the same. */
MK_DEVICE int32_t stage_of(int32_t kind)
{
    switch (kind) {
    case MK_TASK_SHARED_GATE_UP: return MK_TASK_GATE_UP;
    case MK_TASK_SHARED_DGRAD_DOWN: return MK_TASK_DGRAD_DOWN;
    case MK_TASK_SHARED_DGRAD_GATE_UP: return MK_TASK_DGRAD_GATE_UP;
    case MK_TASK_SHARED_WGRAD: return MK_TASK_WGRAD;
    default: return kind;
    }
}

/* Are operands of this kind e4m3 with scales? A task has the answer in its flags. Then a K block is 128 elements. */
template <bool Mx> MK_DEVICE bool is_scaled_kind(const mk_dims &d, int32_t kind) { return Mx && kMultipliesMx && !is_shared_task(kind) && (kind != MK_TASK_WGRAD || d.mx_wgrad); }
template <bool Mx> MK_DEVICE bool is_scaled(const GemmTask &task) { return Mx && kMultipliesMx && task.kind & TASK_SCALED; }
template <bool Mx> MK_DEVICE int32_t k_blocks(const GemmTask &task, int64_t depth) { return (int32_t)(is_scaled<Mx>(task) ? mk_ceil_div(depth, kRowBytes) : mk_ceil_div(depth, kBlockK)); }

/* ---- the walk ---- */

/* Weight gradients read x: dWd is of dout and w h. */
MK_DEVICE bool wants_x(const mk_backward_params &p) { return p.want_weights && (is_wanted(p.grads[MK_GRAD_GATE]) || is_wanted(p.grads[MK_GRAD_UP])); }

/* Are the shared expert's gate and up in the context? */
MK_DEVICE bool shared_is_saved(const mk_backward_params &p) { return p.context && p.rank.dims.saved_tiles > 0; }

template <bool Mx> MK_DEVICE mk_grid backward_grid(const mk_backward_params &p)
{
    constexpr int64_t pair = TileBackward::cols * kColumnTiles<TileBackward>;
    const mk_dims &d = p.rank.dims;
    mk_grid g = {};
    g.gate_up = (int32_t)mk_ceil_div(2 * d.intermediate, pair);
    g.dgrad_down = (int32_t)mk_ceil_div(d.intermediate, pair);
    g.shared_gate_up = shared_is_saved(p) ? 0 : (int32_t)mk_ceil_div(2 * d.shared_intermediate, pair);
    g.shared_dgrad_down = (int32_t)mk_ceil_div(d.shared_intermediate, pair);
    if (p.want_data)
        g.dgrad_gate_up = g.shared_dgrad_gate_up = (int32_t)mk_ceil_div(d.hidden, pair);
    if (p.want_weights) {
        /* Somebody has to say that an expert is ready, even if nothing of it is wanted. */
        g.wgrad = (int32_t)mk_max(WgradGrid::count(p.grads, d.hidden, d.intermediate), p.ready ? 1 : 0);
        g.shared_wgrad = d.shared_intermediate ? WgradGrid::count(p.shared_grads, d.hidden, d.shared_intermediate) : 0;
    }
    if constexpr (Mx) {
        g.wgrad_waits = (d.mx_wgrad || kMultipliesMx) && g.wgrad > 0;
        if (g.wgrad_waits)
            g.dgrad_gate_up = (int32_t)mk_ceil_div(d.hidden, pair);
    }
    g.group_tiles = MK_GROUP_TILES;
    g.raises = (int32_t)(kColumnTiles<TileBackward> * kWarpsPerTile<TileBackward>);
    return g;
}

template <bool Mx> MK_DEVICE mk_walk backward_walk(const mk_backward_params &p, const mk_table &t)
{
    const mk_dims &d = p.rank.dims;
    mk_walk w = {};
    w.pass = MK_PASS_BACKWARD;
    w.mb_tiles = d.mb_tiles_bwd;
    w.tiles = t.tiles;
    w.piece_first = t.piece_first;
    if (!skipped(p.rank)) {
        w.grid = backward_grid<Mx>(p);
        w.num_tiles = load(&t.head->num_tiles);
        w.num_pieces = load(&t.head->num_pieces);
        w.shared_tiles = d.shared_intermediate ? mk_ceil_div(p.num_tokens, MK_ROW_TILE) : 0;
        w.replay_from = p.context ? mk_min(d.saved_tiles, w.num_tiles) : 0;
    }
    mk_walk_count(&w);
    return w;
}

template <bool Mx> MK_DEVICE void backward_init(const mk_backward_params &p, const mk_table &t, BackwardShared<Mx> &s)
{
    for (uint32_t i = 0; i < kTaskSlots; i++)
        mbar_init(smem_addr(&s.ready[i]), 1);
    yield_init(s.yield);
    fence_mbar_init_release_cluster();
    s.walk = backward_walk<Mx>(p, t);
    int64_t first = 0, end = s.walk.num_tasks;
    if (p.kind)
        mk_walk_range(&s.walk, (mk_task_kind)p.kind, p.step, &first, &end);
    s.first = (uint32_t)first;
    s.end = (uint32_t)end;
    trace_init(p.rank, s.trace);
}

/* ---- the program ---- */

/* Row of a piece without rows: past every ring, so its operands are zeros; and small enough for what is made of it. */
constexpr int32_t kNoPiece = kNoRows / 4;

/* Of one thread. */
template <bool Mx> struct BackwardProgram {
    const mk_backward_params &p;
    BackwardShared<Mx> &s;
    mk_table t;
    Yield yield;  /* of the schedule thread, and */
    ClusterTask last = {};

    /* A cluster may leave before the tasks of a pass are all drawn. */
    MK_MEMBER uint32_t next()
    {
        constexpr uint32_t drawn = TileBackward::tensor_memory ? 2 : 1; /* at a time */
        if (!p.kind)
            return yield.next((s.end + drawn - 1) / drawn);
        return s.first + ticket_take_relaxed_gpu(&device_state(p.rank)->tickets[0], 1);
    }

    MK_MEMBER bool task(uint32_t number, uint32_t rank, GemmTask &task) { return last.of_rank(*this, number, rank, task); }

    MK_MEMBER void work_out(uint32_t number)
    {
        const mk_task next = number < s.end ? mk_walk_task_after(&s.walk, number, &last.walked) : mk_task_make(MK_TASK_NONE, 0, 0);
        last.first = {};
        last.first.kind = next.kind;
        last.first.tag = next.tile;
        if (next.kind == MK_TASK_NONE)
            return;
        if (is_scaled_kind<Mx>(p.rank.dims, next.kind))
            last.first.kind |= TASK_SCALED;
        if (stage_of(next.kind) == MK_TASK_WGRAD)
            wgrad_task(next, last.first);
        else
            row_task(next, last.first);
    }

private:
    MK_MEMBER void row_task(const mk_task &next, GemmTask &task)
    {
        const mk_dims &d = p.rank.dims;
        const bool shared = is_shared_task(next.kind);
        const int32_t stage = stage_of(next.kind);
        const int64_t width = shared ? d.shared_intermediate : d.intermediate;
        last.cols = (int32_t)(stage == MK_TASK_GATE_UP ? TileBackward::cols / 2 : TileBackward::cols);
        task.col = next.part * (int32_t)kColumnTiles<TileBackward> * last.cols;
        task.num_k_blocks = stage == MK_TASK_DGRAD_GATE_UP ? 2 * k_blocks<Mx>(task, width) : k_blocks<Mx>(task, d.hidden);
        if constexpr (Mx) /* a task that is there for the weight gradients' operands alone */
            task.num_k_blocks = stage == MK_TASK_DGRAD_GATE_UP && !p.want_data ? 2 : task.num_k_blocks;
        task.out_row = next.tile * MK_ROW_TILE;
        if (shared ? shared_is_saved(p) : next.tile < s.walk.replay_from)
            task.kind |= TASK_SAVED;
        if (shared) {
            task.row = task.out_row;
            task.num_rows = (int32_t)mk_min(p.num_tokens - task.out_row, MK_ROW_TILE);
            return;
        }
        task.expert = (int32_t)mk_expert_of_tile(&t, next.tile);
        task.row = (int32_t)ring_row(d, next.tile);
        task.num_rows = (int32_t)mk_valid_rows(&t, next.tile);
    }

    MK_MEMBER void wgrad_task(const mk_task &next, GemmTask &task)
    {
        const mk_dims &d = p.rank.dims;
        const bool shared = is_shared_task(next.kind);
        const WgradPart part = WgradGrid::at(shared ? p.shared_grads : p.grads, (uint32_t)d.hidden, (uint32_t)(shared ? d.shared_intermediate : d.intermediate),
                                             (uint32_t)next.part);
        int32_t flags = WGRAD_FIRST | WGRAD_LAST;
        task.num_rows = (int32_t)p.num_tokens;
        if (!shared) {
            const mk_piece piece = load(&t.pieces[next.tile]);
            const bool from_zero = piece.is_first || !is_wanted(p.grads[part.matrix]); /* not wanted: there is no sum to go on from */
            flags = (from_zero ? WGRAD_FIRST : 0) | (piece.is_last ? WGRAD_LAST : 0);
            task.num_rows = piece.rows;
            task.row = piece.rows ? (int32_t)ring_row(d, piece.tile_first) : kNoPiece; /* what stands there is another expert's, and may be under way */
            task.expert = piece.expert;
        }
        task.kind |= part.matrix << WGRAD_MATRIX_SHIFT | flags;
        task.out_row = part.row;
        task.col = part.col;
        last.cols = (int32_t)TileBackward::cols;
        /* A contraction over nothing is one block, all of it zeroed. */
        task.num_k_blocks = (int32_t)mk_max(k_blocks<Mx>(task, task.num_rows), 1);
    }
};

/* ---- the load role ---- */

/* What there is to load, as the wait role works it out. */
template <bool Mx> struct LoadPlan {
    const mk_backward_params &p;
    enum { K = (int32_t)kBlockK };

    /* Run 0 or 1 of a task, of a count that may be 0. */
    MK_MEMBER LoadRun run(const GemmTask &task, int32_t which) const
    {
        LoadRun r = packed_run(task, which);
        const int32_t stage = stage_of(task.kind & TASK_KIND_MASK);
        const mk_tensor_map *maps = is_shared_task(task.kind & TASK_KIND_MASK) ? p.shared_maps : p.expert_maps;
        if (!maps || stage == MK_TASK_WGRAD || r.count == 0)
            return r;
        maps += task.expert * MK_EXPERT_MAPS; /* weights by pointer */
        r.b_low = maps + (stage == MK_TASK_DGRAD_DOWN ? MK_GRAD_DOWN : which ? MK_GRAD_UP : MK_GRAD_GATE);
        r.b_high = stage == MK_TASK_GATE_UP ? maps + MK_GRAD_UP : r.b_low;
        r.b_depth = 0;
        r.by_pointer = true;
        return r;
    }

private:
    MK_MEMBER LoadRun packed_run(const GemmTask &task, int32_t which) const
    {
        if (is_scaled<Mx>(task) && (task.kind & TASK_KIND_MASK) != MK_TASK_WGRAD)
            return scaled_run(task, which);
        const int32_t kind = task.kind & TASK_KIND_MASK, half = TileBackward::tensor_memory ? 0 : (int32_t)(cluster_rank() * kBoxRowsA<TileBackward>), all = task.num_k_blocks;
        const bool shared = is_shared_task(kind);
        switch (stage_of(kind)) {
        case MK_TASK_GATE_UP:
            return {shared ? &p.shared_x : &p.ring_x, shared ? &p.shared_gate : Mx ? &p.replay_gate : &p.gate, shared ? &p.shared_up : Mx ? &p.replay_up : &p.up,
                    0, task.row + half, 0, 0, task.col, task.expert, K, 0, K, 0, which ? 0 : all};
        case MK_TASK_DGRAD_DOWN:
            return dgrad(shared ? &p.shared_dout : &p.ring_dout, shared ? &p.shared_down : &p.down, task, half, which ? 0 : all);
        case MK_TASK_DGRAD_GATE_UP:
            if (which == 0)
                return dgrad(shared ? &p.shared_dgate : Mx ? &p.dgrad_dgate : &p.ring_gate, shared ? &p.shared_gate : &p.gate, task, half, all / 2);
            return dgrad(shared ? &p.shared_dup : Mx ? &p.dgrad_dup : &p.ring_up, shared ? &p.shared_up : &p.up, task, half, all / 2);
        default: return wgrad(task, shared, half, which);
        }
    }

    /* Of a replay or a dgrad: operands are e4m3, K is the contiguous axis of both. A pair's: the CTAs' halves of B follow each other, or are gate and up. */
    MK_MEMBER LoadRun scaled_run(const GemmTask &task, int32_t which) const
    {
        const int32_t step = (int32_t)kRowBytes, all = task.num_k_blocks;
        switch (task.kind & TASK_KIND_MASK) {
        case MK_TASK_GATE_UP: return {&p.ring_x, &p.replay_gate, &p.replay_up, 0, task.row, 0, 0, task.col, task.expert, step, 0, step, 0, which ? 0 : all};
        case MK_TASK_DGRAD_DOWN: return {&p.ring_dout, &p.down, &p.down, 0, task.row, 0, 0, task.col, task.expert, step, 0, step, 0, which ? 0 : all};
        default: {
            const mk_tensor_map *weight = which ? &p.up : &p.gate;
            return {which ? &p.dgrad_dup : &p.dgrad_dgate, weight, weight, 0, task.row, 0, 0, task.col, task.expert, step, 0, step, 0, all / 2};
        }
        }
    }

    /* Rows of A along K, weights as they lie: K is their outer axis. */
    static MK_MEMBER LoadRun dgrad(const mk_tensor_map *a, const mk_tensor_map *b, const GemmTask &task, int32_t half, int32_t count)
    {
        return {a, b, b, 0, task.row + half, task.col, task.col + 64, 0, task.expert, K, 0, 0, K, count};
    }

    /* Both operands as they lie: K is the rows. */
    MK_MEMBER LoadRun wgrad(const GemmTask &task, bool shared, int32_t half, int32_t which) const
    {
        const int32_t matrix = wgrad_matrix(task), all = task.num_k_blocks, step = (int32_t)block_depth(is_scaled<Mx>(task));
        const int32_t fit = shared || task.row == kNoPiece ? all : (int32_t)mk_min(k_blocks<Mx>(task, MK_RING_ROWS(&p.rank.dims) - task.row), all);
        const mk_tensor_map *left = shared ? &p.shared_dout : Mx ? &p.wgrad_dout : &p.ring_dout, *right = shared ? &p.shared_wh : Mx ? &p.wgrad_h : &p.ring_h;
        if (matrix != MK_GRAD_DOWN)
            right = shared ? &p.shared_x : Mx ? &p.wgrad_x : &p.ring_x;
        if (matrix == MK_GRAD_GATE)
            left = shared ? &p.shared_dgate : Mx ? &p.wgrad_dgate : &p.ring_gate;
        if (matrix == MK_GRAD_UP)
            left = shared ? &p.shared_dup : Mx ? &p.wgrad_dup : &p.ring_up;
        const int32_t y = which ? 0 : task.row;
        return {left, right, right, task.out_row + half, y, task.col, task.col + 64, y, 0, 0, step, 0, step, which ? all - fit : fit};
    }
};

#ifdef MK_SM100
template <bool Mx> MK_DEVICE void backward_load_block(BackwardShared<Mx> &s, uint32_t stage, const GemmTask &task, const LoadRun &r);
#else
/* A K block: this CTA's share of A for both, and B. */
template <bool Mx> MK_DEVICE void backward_load_block(BackwardShared<Mx> &s, uint32_t stage, const GemmTask &, const LoadRun &r)
{
    constexpr uint16_t all_ctas = (1 << TileBackward::cluster) - 1;
    const uint32_t full = smem_addr(&s.gemm.full[stage]), b = smem_addr(s.gemm.b[stage]);
    mbar_arrive_expect_tx_release_cta(full, kStageBytes<TileBackward>);
    tma_load_3d_multicast(smem_addr(s.gemm.a[stage]) + cluster_rank() * kHalfBytes, r.a, r.a_x, r.a_y, 0, full, all_ctas);
    tma_load_3d(b, r.b_low, r.b_x, r.b_y, r.b_depth, full);
    tma_load_3d(b + kHalfBytes, r.b_high, r.b_high_x, r.b_y, r.b_depth, full);
}
#endif

/* One thread of each CTA: what the wait role has found to be there. Rows were written by plain stores; the copy engine reads them next. */
template <bool Mx> MK_DEVICE void backward_load(BackwardShared<Mx> &s)
{
    ExpertMaps known = {};
    TaskReader<BackwardTile<Mx>> tasks;
    RingCursor<BackwardTile<Mx>::stages> at;
    for (;; tasks.at.next()) {
        const GemmTask task = tasks.wait(s.gemm);
        wait_mbar(smem_addr(&s.ready[tasks.at.slot]), tasks.at.parity, "backward_load: operands of a task are ready");
        fence_proxy_async_global();
        if (task.num_k_blocks == 0)
            return tasks.release(s.gemm);
        LoadRun r = load(&s.runs[tasks.at.slot][0]);
        const LoadRun second = load(&s.runs[tasks.at.slot][1]);
        tasks.release(s.gemm);
        for (int32_t which = 0; which < 2; which++, r = second) {
            if (r.by_pointer && r.count)
                known.acquire(r.b_low, r.b_high);
            for (; r.count > 0; r.count--, at.next()) {
                wait_mbar(smem_addr(&s.gemm.empty[at.slot]), at.parity ^ 1, "backward_load: free stage");
                backward_load_block(s, at.slot, task, r);
                r.a_x += r.a_step_x;
                r.a_y += r.a_step_y;
                r.b_x += r.b_step_x;
                r.b_high_x += r.b_step_x;
                r.b_y += r.b_step_y;
            }
        }
    }
}

/* ---- the wait role ---- */

template <bool Mx> MK_DEVICE void backward_trace(const mk_backward_params &p, BackwardShared<Mx> &s, const GemmTask &task, uint32_t number)
{
    const mk_task_kind kind = (mk_task_kind)(task.kind & TASK_KIND_MASK);
    const uint32_t part = (uint32_t)task.col / (stage_of(kind) == MK_TASK_GATE_UP ? TileBackward::cols / 2 : TileBackward::cols);
    trace_task(p.rank, s.trace, kind, task.tag, part, number % 2 ? MK_TRACE_LANE_math1 : MK_TRACE_LANE_math0, number % 2 ? MK_TRACE_LANE_math1 : MK_TRACE_LANE_math0,
               kind == MK_TASK_DGRAD_GATE_UP && !only_helps(task) ? trace_row_bytes(p.rank, task.col, TileBackward::cols) : 0);
    trace_begin(p.rank, s.trace, MK_TRACE_LANE_wait, MK_TRACE_wait_operands, task.tag, part, mk_trace_is_shared(kind));
}

/* One warp of each CTA, tasks ahead of the load thread; its lanes share the counters of a need. Acquire: what a task reads has been
 * written, what it overwrites has been read; pairs with the releases of s1_dispatch and of BackwardMath. Handed on by the arrive. */
template <bool Mx> MK_DEVICE void backward_wait(const mk_backward_params &p, const mk_table &t, BackwardShared<Mx> &s)
{
    TaskReader<BackwardTile<Mx>> tasks;
    int32_t last_kind = MK_TASK_NONE, last_tag = 0;
    for (uint32_t number = 0;; tasks.at.next(), number++) {
        const GemmTask task = tasks.wait(s.gemm);
        if (lane_idx() == 0 && task.num_k_blocks != 0)
            backward_trace(p, s, task, number);
        const bool waited = (task.kind & TASK_KIND_MASK) == last_kind && task.tag == last_tag; /* parts of one piece come one after the other */
        last_kind = task.kind & TASK_KIND_MASK;
        last_tag = task.tag;
        const mk_task as_walked = mk_task_make((mk_task_kind)(task.kind & TASK_KIND_MASK), task.tag, 0);
        mk_need need;
        for (int i = 0; task.num_k_blocks != 0 && !waited && mk_task_need(&s.walk, &t, &p.rank.dims, as_walked, i, &need); i++)
            for (int32_t index = need.first + (int32_t)lane_idx(); index < need.end; index += 32)
                wait_counter(p.rank, as_walked.kind, need.counter, index, need.count, "backward_wait: operands of a task");
        if (lane_idx() < 2 && task.num_k_blocks != 0)
            store(&s.runs[tasks.at.slot][lane_idx()], LoadPlan<Mx>{p}.run(task, (int32_t)lane_idx()));
        sync_warp(); /* what every lane has acquired or worked out, lane 0 hands on */
        if (lane_idx() == 0) {
            mbar_arrive_release_cta(smem_addr(&s.ready[tasks.at.slot]));
            tasks.release(s.gemm);
            if (task.num_k_blocks != 0)
                trace_end(p.rank, s.trace, MK_TRACE_LANE_wait);
        }
        if (task.num_k_blocks == 0)
            return;
    }
}

/* ---- the math role ---- */

/* Where s4_down_bwd finds and leaves things, in the ring or over this rank's tokens. */
struct GradBuffers {
    const mk_backward_params &p;

    MK_MEMBER uint32_t cols(const GemmTask &task) const { return (uint32_t)(is_shared(task) ? p.rank.dims.shared_intermediate : p.rank.dims.intermediate); }
    MK_MEMBER bf16 *dgate(const GemmTask &task) const { return at<bf16>(task, p.rank.memory.ring_gate, p.rank.memory.shared_gate); }
    MK_MEMBER bf16 *dup(const GemmTask &task) const { return at<bf16>(task, p.rank.memory.ring_up, p.rank.memory.shared_up); }
    MK_MEMBER bf16 *weighted_h(const GemmTask &task) const { return at<bf16>(task, p.rank.memory.ring_h, p.rank.memory.shared_h); }
    MK_MEMBER const float *weights(const GemmTask &task) const { return at<float>(task, p.rank.memory.ring_weight, p.rank.memory.shared_scale); }
    MK_MEMBER float *partial(const GemmTask &task) const { return at<float>(task, p.rank.memory.ring_dweight, p.rank.memory.shared_dpartial); }
    MK_MEMBER const bf16 *gate(const GemmTask &task) const { return task.kind & TASK_SAVED ? saved(task, p.rank.memory.saved_gate, p.rank.memory.saved_shared_gate) : dgate(task); }
    MK_MEMBER const bf16 *up(const GemmTask &task) const { return task.kind & TASK_SAVED ? saved(task, p.rank.memory.saved_up, p.rank.memory.saved_shared_up) : dup(task); }

    /* MXFP8 */
    MK_MEMBER bool is_packed(const GemmTask &task) const { return task.kind & TASK_SAVED && !is_shared(task); }
    MK_MEMBER bool is_rounded(const GemmTask &task) const { return !is_shared(task); }
    MK_MEMBER const uint8_t *packed_gate(const GemmTask &task) const { return packed(task, p.rank.memory.saved_gate); }
    MK_MEMBER const uint8_t *packed_up(const GemmTask &task) const { return packed(task, p.rank.memory.saved_up); }
    MK_MEMBER void round_dgate(const GemmTask &task, uint32_t row, uint32_t col, bool there, const Vec4 &v) const { round(task, row, col, there, v, p.rank.memory.dgrad_dgate); }
    MK_MEMBER void round_dup(const GemmTask &task, uint32_t row, uint32_t col, bool there, const Vec4 &v) const { round(task, row, col, there, v, p.rank.memory.dgrad_dup); }

private:
    MK_MEMBER void round(const GemmTask &task, uint32_t row, uint32_t col, bool there, const Vec4 &v, int64_t place) const
    {
        mx_operand_rows(p.rank, place).put(task, row, task.col + (int64_t)col, there, v);
    }
    MK_MEMBER const uint8_t *packed(const GemmTask &task, int64_t place) const
    {
        return static_cast<const uint8_t *>(p.context) + place + (int64_t)task.out_row * mk_mx_row_stride(p.rank.dims.intermediate);
    }
    static MK_MEMBER bool is_shared(const GemmTask &task)
    {
        uint32_t kind = (uint32_t)task.kind;
        pin_register(kind);
        return is_shared_task((int32_t)kind & TASK_KIND_MASK);
    }
    template <class T> MK_MEMBER T *at(const GemmTask &task, int64_t routed, int64_t shared) const { return in_local<T>(p.rank, is_shared(task) ? shared : routed); }
    /* The context's rows are numbered as the table's. */
    MK_MEMBER const bf16 *saved(const GemmTask &task, int64_t routed, int64_t shared) const
    {
        const bool of_shared = is_shared(task);
        const int64_t cols = of_shared ? p.rank.dims.shared_intermediate : p.rank.dims.intermediate;
        return reinterpret_cast<const bf16 *>(static_cast<const char *>(p.context) + (of_shared ? shared : routed)) + ((int64_t)task.out_row - task.row) * cols;
    }
};

/* What a lane has read of one of its warp's 32 rows, before the MMAs, for the epilogue: where dx goes, or the weight. */
struct LaneRow { RowPlace place; float weight; };

template <bool Mx> struct BackwardMath {
    const mk_backward_params &p;
    BackwardShared<Mx> &s;

    /* Release, cumulative over the warp's stores. */
    MK_MEMBER void signal(int32_t counter, int32_t index) const
    {
        sync_warp();
        if (lane_idx() == 0)
            flag_add_release_gpu(counter_at(p.rank, counter, index), 1);
    }

    /* Is it a task of the shared expert? Mx: worked out anew, because quantising leaves no register to keep it in. */
    static MK_MEMBER bool again(const GemmTask &task, bool shared)
    {
        if constexpr (Mx) {
            uint32_t nothing = 0;
            pin_register(nothing); /* behind it memory is read again */
            return is_shared_task(task.kind & TASK_KIND_MASK);
        }
        return shared;
    }

    MK_MEMBER void replay(const GemmTask &task, const Acc<BackwardTile<Mx>> &acc, const WarpOut &out, bool shared) const
    {
        const mk_rank_params &r = p.rank;
        const int64_t cols = shared ? r.dims.shared_intermediate : r.dims.intermediate;
        bf16 *gate = in_local<bf16>(r, shared ? r.memory.shared_gate : r.memory.ring_gate), *up = in_local<bf16>(r, shared ? r.memory.shared_up : r.memory.ring_up);
        if (Mx && !shared)
            KeepGateUp<Mx>{gate, up, (uint32_t)cols}(task, acc, out);
        else
            KeepGateUp<false>{gate, up, (uint32_t)cols}(task, acc, out);
        if (!shared && task.col == 0 && warp_idx() % 4 == 0 && lane_idx() == 0)
            counter_add_relaxed_gpu(reinterpret_cast<uint64_t *>(&device_state(r)->rows_replayed), (uint64_t)task.num_rows);
        signal(again(task, shared) ? MK_COUNTER_shared_s2_tasks_done : MK_COUNTER_s2_tasks_done, task.tag);
    }

    MK_MEMBER SwigluBackward<Mx, GradBuffers> swiglu_epilogue() const { return {{p}, p.rank.swiglu_limit}; }

    MK_MEMBER void dgrad_down(const GemmTask &task, const Acc<BackwardTile<Mx>> &acc, const WarpOut &out, bool shared, float weight) const
    {
        swiglu_epilogue()(task, acc, out, weight);
        signal(again(task, shared) ? MK_COUNTER_shared_s4_bwd_tasks_done : MK_COUNTER_s4_bwd_tasks_done, task.tag);
    }

    MK_MEMBER void dgrad_gate_up(const GemmTask &task, const Acc<BackwardTile<Mx>> &acc, const WarpOut &out, bool shared, const RowPlace &place) const
    {
        const mk_rank_params &r = p.rank;
        if (shared)
            return SharedDx{r, r.shared_gate ? static_cast<const bf16 *>(p.shared_output_gate) : nullptr}(task, acc, out);
        if (Mx && !p.want_data) {
            signal(MK_COUNTER_s2_bwd_tasks_done, task.tag);
            return;
        }
        const mk_row *rows = mk_table_at(&r.memory, p.schedule).rows;
        if (task.col == 0)
            push_weight_grads<BackwardTile<Mx>>(r, rows, task, out);
        /* dgate, dup and the partial sums have been read, and nobody in this launch reads dx: so before the pushes, whose completion a
         * release would wait for. */
        signal(MK_COUNTER_s2_bwd_tasks_done, task.tag);
        StoreRows<HeldRows>{HeldRows::of(r, place)}(task, acc, out);
    }

    /* Before its MMAs. */
    MK_MEMBER LaneRow look(const GemmTask &task, const WarpOut &out) const
    {
        LaneRow row = {{-1, 0}, 0.0f};
        const int32_t kind = task.kind & TASK_KIND_MASK;
        if (kind == MK_TASK_DGRAD_GATE_UP)
            row.place = HeldRows::look<BackwardTile<Mx>>(mk_table_at(&p.rank.memory, p.schedule).rows, task, out);
        if (stage_of(kind) == MK_TASK_DGRAD_DOWN)
            row.weight = swiglu_epilogue().template own_weight<BackwardTile<Mx>>(task, out);
        return row;
    }

    /* What a task does before its MMAs, while others' run. */
    MK_MEMBER void prepare(const GemmTask &task, const WarpOut &out) const
    {
        const int32_t kind = task.kind & TASK_KIND_MASK;
        if (stage_of(kind) == MK_TASK_DGRAD_DOWN)
            swiglu_epilogue().template prefetch<BackwardTile<Mx>>(task, out);
        if constexpr (Mx)
            if (kind == MK_TASK_DGRAD_GATE_UP && s.walk.grid.wgrad_waits)
                WgradOperands{p.rank, wants_x(p)}.share(task, TileBackward::cols, (uint32_t)task.col / TileBackward::cols, (uint32_t)s.walk.grid.dgrad_gate_up * kColumnTiles<TileBackward>);
    }

    MK_MEMBER Wgrad wgrad(bool shared) const
    {
        return {p.rank, shared ? p.shared_grads : p.grads, shared ? p.rank.dims.shared_intermediate : p.rank.dims.intermediate};
    }

    MK_MEMBER void finish_wgrad(const GemmTask &task, const Acc<BackwardTile<Mx>> &acc, const WarpOut &out, bool shared) const
    {
        const bool told_later = !(task.kind & WGRAD_LAST) || p.ready;
        /* The operands have been read, and nobody in this launch reads a complete gradient: so before the stores, whose completion a
         * release would wait for. */
        if (!shared && !told_later)
            signal(MK_COUNTER_wgrad_tasks_done, task.tag);
        wgrad(shared)(task, acc, out);
        if (shared || !told_later)
            return;
        sync_warp();
        if (lane_idx() != 0)
            return;
        /* Release: the piece after it goes on from the partial sums, dispatch overwrites the rows. Acquire: whoever is last publishes
         * everybody's gradients. */
        const uint32_t before = ticket_take_acq_rel_gpu(counter_at(p.rank, MK_COUNTER_wgrad_tasks_done, task.tag), 1);
        if (p.ready && task.kind & WGRAD_LAST && before + 1 == (uint32_t)mk_raised(&s.walk.grid, s.walk.grid.wgrad) && !skipped(p.rank))
            flag_store_release_sys(&p.ready[task.expert], p.ready_value);
    }

    MK_MEMBER void finish(const GemmTask &task, const Acc<BackwardTile<Mx>> &acc, WarpOut out, const LaneRow &row) const
    {
        pin_register(out.staging); /* addresses derived from it are not kept through the MMAs */
        const int32_t kind = task.kind & TASK_KIND_MASK;
        const bool shared = is_shared_task(kind);
        switch (stage_of(kind)) {
        case MK_TASK_GATE_UP: replay(task, acc, out, again(task, shared)); break;
        case MK_TASK_DGRAD_DOWN: dgrad_down(task, acc, out, again(task, shared), row.weight); break;
        case MK_TASK_DGRAD_GATE_UP: dgrad_gate_up(task, acc, out, again(task, shared), row.place); break;
        default: finish_wgrad(task, acc, out, again(task, shared)); break;
        }
    }

#ifndef MK_SM100
    /* The MMAs are waited for before the accumulators meet those of the other kinds again: moving registers under way would serialise. */
    MK_MEMBER uint32_t continue_task(const GemmTask &task, Acc<BackwardTile<Mx>> &acc, RingCursor<TileBackward::stages> &at, const ZeroTail &tail, const WarpOut &out) const
    {
        wgrad(false).preload(task, acc, out);
        const uint32_t last = multiply_task<MajorOuter, MajorOuter>(s.gemm, acc, at, task.num_k_blocks, 0, true, tail);
        acc.wait_all();
        return last;
    }

    MK_MEMBER uint32_t multiply(const GemmTask &task, Acc<BackwardTile<Mx>> &acc, RingCursor<TileBackward::stages> &at, uint32_t warpgroup, const WarpOut &out) const
    {
        const ZeroTail tail = {(uint32_t)(task.num_rows - (task.num_k_blocks - 1) * (int32_t)kBlockK), BARRIER_ZERO_TAIL + warpgroup};
        switch (stage_of(task.kind & TASK_KIND_MASK)) {
        case MK_TASK_GATE_UP: return multiply_task<MajorK, MajorK>(s.gemm, acc, at, task.num_k_blocks, 0, false, WholeBlocks());
        case MK_TASK_DGRAD_DOWN:
        case MK_TASK_DGRAD_GATE_UP: return multiply_task<MajorK, MajorOuter>(s.gemm, acc, at, task.num_k_blocks, 0, false, WholeBlocks());
        default:
            if (task.kind & WGRAD_FIRST)
                return multiply_task<MajorOuter, MajorOuter>(s.gemm, acc, at, task.num_k_blocks, 0, false, tail);
            return continue_task(task, acc, at, tail, out);
        }
    }

    /* All threads of a math warpgroup (0 or 1), which take turns. */
    MK_MEMBER void run(uint32_t warpgroup) const
    {
        constexpr uint32_t both = kMathWarpgroups * 128;
        const uint32_t warp = warp_idx() - kFirstMathWarp;
        const WarpOut out = {smem_addr(s.gemm.staging[warp]), warp % 4 * 16};
        TaskReader<BackwardTile<Mx>> tasks;
        RingCursor<TileBackward::stages> at;
        Acc<BackwardTile<Mx>> acc;
        if (warpgroup == 1)
            barrier_named_arrive(BARRIER_MATH_TURN + 0, both);
        for (uint32_t turn = 0;; turn++, tasks.at.next()) {
            const GemmTask task = tasks.wait(s.gemm);
            const bool mine = turn % 2 == warpgroup && task.num_k_blocks != 0;
            if (mine) /* before the slot is released: epilogues read what other CTAs wrote, by plain loads */
                wait_mbar(smem_addr(&s.ready[tasks.at.slot]), tasks.at.parity, "backward_math: operands of a task are ready");
            sync_warp();
            if (lane_idx() == 0)
                tasks.release(s.gemm);
            if (task.num_k_blocks == 0)
                return;
            if (!mine) {
                at.skip((uint32_t)task.num_k_blocks);
                continue;
            }
            MathState &state = s.math[warp];
            if (lane_idx() == 0)
                store(&state.task, task);
            sync_warp();
            prepare(state.task, out);
            const LaneRow row = look(state.task, out);
            barrier_named_sync(BARRIER_MATH_TURN + warpgroup, both);
            trace_stamp(p.rank, s.trace, turn, TRACE_PRODUCT_BEGINS);
            const uint32_t last = multiply(task, acc, at, warpgroup, out);
            barrier_named_arrive(BARRIER_MATH_TURN + (warpgroup ^ 1), both);
            acc.wait_all();
            release_stage(s.gemm, last);
            if (lane_idx() == 0) {
                store(&state.tasks, tasks.at);
                store(&state.stages, at);
                store(&state.turn, turn);
            }
            sync_warp();
            trace_stamp(p.rank, s.trace, state.turn, TRACE_EPILOGUE_BEGINS);
            finish(state.task, acc, out, row);
            if (trace_on(p.rank) && out.row == 0 && lane_idx() == 0) /* trace_stamp, with what is in registers here */
                store(&s.trace.task[load(&state.turn) % TRACE_TASKS].stamp[TRACE_EPILOGUE_ENDS], time_ns());
            tasks.at = load(&state.tasks);
            at = load(&state.stages);
            turn = load(&state.turn); /* read by all before lane 0 writes it again: the next task's sync_warp */
        }
    }
#endif
};

#ifndef MK_SM100
template <bool Mx> MK_DEVICE void backward_math(const mk_backward_params &p, BackwardShared<Mx> &s, uint32_t warpgroup) { BackwardMath<Mx>{p, s}.run(warpgroup); }

/* One thread of each CTA. */
template <bool Mx> MK_DEVICE void backward_schedule(const mk_backward_params &, BackwardShared<Mx> &s, BackwardProgram<Mx> &program)
{
    if (cluster_rank() == kScheduleRank<TileBackward>)
        gemm_schedule(s.gemm, program);
}
#endif

/* The dispatch role: one warp of each CTA. Rows come from the state's second ticket, in the order of the walk. */
template <bool Mx> MK_DEVICE void backward_dispatch(const mk_backward_params &p, const mk_table &t, BackwardShared<Mx> &s)
{
    Dispatch<Mx, true> dispatch(p.rank, t, s.dispatch, &s.walk, &s.trace);
    int64_t first = 0, end = s.walk.num_tiles;
    if (p.kind && p.kind != MK_TASK_DISPATCH)
        return;
    if (p.kind) {
        first = end = 0;
        if (p.step < s.walk.num_minibatches)
            mk_walk_minibatch(&s.walk, p.step, &first, &end);
    }
    dispatch.stop = p.kind ? 0 : smem_addr(&s.yield.leaving);
    const auto need_x = [&] { return wants_x(p) || s.walk.replay_from < s.walk.num_tiles; };
    dispatch.need_x = need_x();
    dispatch.move_all(&device_state(p.rank)->tickets[1], first * MK_ROW_TILE, (end - first) * MK_ROW_TILE);
    dispatch.need_x = need_x(); /* not kept meanwhile */
    dispatch.count();
}

} /* namespace mk */
#endif
