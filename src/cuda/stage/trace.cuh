/* Recording what a CTA does (layout/trace.h says what a trace is). Free when off: a hook is then one compare with a kernel parameter.
 *
 * The one thread that speaks for a role says trace_begin when something starts, and trace_end when it is over; the event in between is kept
 * in shared memory. Math warpgroups have no registers for even that: they only stamp times (trace_stamp), and the wait role, which sees every task
 * before them, records what the stamps say. */
#ifndef MK_STAGE_TRACE_CUH
#define MK_STAGE_TRACE_CUH

#include "cuda/gemm/mma.cuh"
#include "cuda/stage/stage.cuh"
#include "layout/trace.h"

namespace mk {

/* A task of the GEMM roles: what it is, by the wait role; when it was worked on, by the first thread of its math warpgroup. */
struct TraceTask {
    uint64_t stamp[3];         /* by TraceStamp */
    int32_t tile;
    uint32_t push_row_bytes;   /* what a row pushed by the epilogue moves; 0: it pushes nothing */
    uint32_t part;
    uint8_t kind, lane, epilogue_lane, shared;
};

/* Tasks of a CTA, by number. When the wait role sees task n, task n - kTaskSlots - 1 is done, because a warpgroup reads a task after its last one;
 * and no warpgroup is further than task n + kTaskSlots. */
enum { TRACE_LAG = kTaskSlots + 2, TRACE_TASKS = TRACE_LAG + kTaskSlots };

/* Each lane's entries belong to the one thread that records for it. Everything a hook needs is here, so that the compiler has nothing to
 * compute ahead of a role's loops and keep in registers. */
struct TraceShared {
    mk_trace_event open[MK_TRACE_LANE_math0]; /* what has begun, in the other lanes */
    TraceTask task[TRACE_TASKS];
    mk_trace_head *ring[MK_NUM_TRACE_LANES];
    uint32_t count[MK_NUM_TRACE_LANES];
    uint32_t mask, tasks_seen;
};

/* CTAs without a track (Blackwell launches more than are resident at once) keep none. */
MK_DEVICE bool trace_on(const mk_rank_params &r) { return r.trace.memory && (int32_t)block_idx() < r.trace.tracks; }

/* By one thread, before the roles start: goes on behind the events of earlier launches. */
MK_DEVICE void trace_init(const mk_rank_params &r, TraceShared &s)
{
    if (!trace_on(r))
        return;
    store(&s.mask, r.trace.capacity - 1);
    store(&s.tasks_seen, 0u);
    for (uint32_t lane = 0; lane < MK_NUM_TRACE_LANES; lane++) {
        mk_trace_head *ring = mk_trace_ring(&r.trace, block_idx(), lane);
        store(&s.ring[lane], ring);
        store(&s.count[lane], load(&ring->count));
    }
}

MK_DEVICE void trace_write(TraceShared &s, uint32_t lane, const mk_trace_event &event)
{
    const uint32_t number = load(&s.count[lane]);
    mk_trace_head *ring = load(&s.ring[lane]);
    store(mk_trace_event_at(ring, load(&s.mask), number), event);
    store(&ring->count, number + 1);
    store(&s.count[lane], number + 1);
}

MK_DEVICE void trace_begin(const mk_rank_params &r, TraceShared &s, uint32_t lane, mk_trace_kind kind, int32_t tile, uint32_t part, bool shared = false)
{
    if (!trace_on(r))
        return;
    const mk_trace_event event = {time_ns(), 0, tile, 0, (uint16_t)part, (uint16_t)sm_idx(), (uint8_t)kind, (uint8_t)lane, shared, 0};
    store(&s.open[lane], event);
}

/* Of what has begun: bytes that it moves between ranks, rows of other ranks' tokens. */
MK_DEVICE void trace_link(TraceShared &s, uint32_t lane, uint32_t link_bytes, uint32_t peer_rows)
{
    store(&s.open[lane].link_bytes, link_bytes);
    store(&s.open[lane].peer_rows, (uint8_t)peer_rows);
}

MK_DEVICE void trace_end(const mk_rank_params &r, TraceShared &s, uint32_t lane)
{
    if (!trace_on(r))
        return;
    store(&s.open[lane].end_ns, time_ns());
    trace_write(s, lane, load(&s.open[lane]));
}

/* ---- GEMM tasks; `number` counts those of this CTA, from 0 ---- */

/* All threads of a math warpgroup may call it. */
MK_DEVICE void trace_stamp(const mk_rank_params &r, TraceShared &s, uint32_t number, TraceStamp stamp)
{
    if (trace_on(r) && thread_idx() % 128 == 0)
        store(&s.task[number % TRACE_TASKS].stamp[stamp], time_ns());
}

MK_DEVICE void trace_record_task(TraceShared &s, uint32_t number)
{
    const TraceTask task = load(&s.task[number % TRACE_TASKS]);
    if (task.tile < 0) /* of a CTA that only helped */
        return;
    const uint16_t sm = (uint16_t)sm_idx(), part = (uint16_t)task.part;
    const uint8_t epilogue = (uint8_t)mk_trace_epilogue_of((mk_trace_kind)task.kind);
    trace_write(s, task.lane, {task.stamp[0], task.stamp[1], task.tile, 0, part, sm, task.kind, task.lane, task.shared, 0});
    trace_write(s, task.epilogue_lane, {task.stamp[1], task.stamp[2], task.tile, task.push_row_bytes, part, sm, epilogue, task.epilogue_lane, task.shared, 0});
}

/* What a task moves of each row of [*, H] that it pushes: the tile's columns that exist. */
MK_DEVICE uint32_t trace_row_bytes(const mk_rank_params &r, int32_t col, uint32_t cols) { return (uint32_t)mk_max(mk_min(r.dims.hidden - col, cols), 0) * 2; }

/* The wait role, of every task it sees, before it waits. */
MK_DEVICE void trace_task(const mk_rank_params &r, TraceShared &s, mk_task_kind kind, int32_t tile, uint32_t part, mk_trace_lane lane, mk_trace_lane epilogue_lane, uint32_t push_row_bytes)
{
    if (!trace_on(r))
        return;
    const uint32_t number = load(&s.tasks_seen);
    if (number >= TRACE_LAG)
        trace_record_task(s, number - TRACE_LAG);
    TraceTask &task = s.task[number % TRACE_TASKS];
    store(&task.tile, tile);
    store(&task.push_row_bytes, push_row_bytes);
    store(&task.part, part);
    store(&task.kind, (uint8_t)mk_trace_kind_of(kind));
    store(&task.lane, (uint8_t)lane);
    store(&task.epilogue_lane, (uint8_t)epilogue_lane);
    store(&task.shared, (uint8_t)mk_trace_is_shared(kind));
    store(&s.tasks_seen, number + 1);
}

/* One thread, once all roles are done. */
MK_DEVICE void trace_close(const mk_rank_params &r, TraceShared &s)
{
    if (!trace_on(r))
        return;
    const uint32_t seen = load(&s.tasks_seen);
    for (uint32_t number = seen < TRACE_LAG ? 0 : seen - TRACE_LAG; number < seen; number++)
        trace_record_task(s, number);
}

/* ---- kernels that do one thing: `const TraceLaunch trace(rank, kind);` at their top ---- */

/* From its making to its end, as thread 0 of a block sees it, in lane main of a track: the block's own, if there is one. */
struct TraceLaunch {
    const mk_rank_params &r;
    const int32_t track;
    mk_trace_event event;

    MK_MEMBER bool records() const { return r.trace.memory && track < r.trace.tracks && thread_idx() == 0; }
    MK_MEMBER TraceLaunch(const mk_rank_params &rank, mk_trace_kind kind, int32_t part = 0) : TraceLaunch(rank, kind, part, (int32_t)block_idx()) {}
    MK_MEMBER TraceLaunch(const mk_rank_params &rank, mk_trace_kind kind, int32_t part, int32_t to) : r(rank), track(to), event()
    {
        if (records())
            event = {time_ns(), 0, -1, 0, (uint16_t)part, (uint16_t)sm_idx(), (uint8_t)kind, MK_TRACE_LANE_main, 0, 0};
    }
    MK_MEMBER ~TraceLaunch()
    {
        if (!records())
            return;
        mk_trace_head *ring = mk_trace_ring(&r.trace, track, MK_TRACE_LANE_main);
        const uint32_t number = load(&ring->count);
        event.end_ns = time_ns();
        store(mk_trace_event_at(ring, r.trace.capacity - 1, number), event);
        store(&ring->count, number + 1);
    }
};

} /* namespace mk */
#endif
