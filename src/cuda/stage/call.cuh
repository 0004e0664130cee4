/* Where ranks meet on the device: opening a call, publishing its inputs, the rank barrier, and the verdict all ranks share.
 * The CPU's twin is cpu/call.c; the heads and epochs are the same memory. */
#ifndef MK_STAGE_CALL_CUH
#define MK_STAGE_CALL_CUH

#include "backend/operation.h"
#include "base/log.h"
#include "cuda/stage/fault.cuh"
#include "cuda/stage/trace.cuh"
#include "cuda/stage/weights.cuh"

namespace mk {

MK_DEVICE void write_sentence(mk_call_head *head, const char *text, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; i++)
        store(&head->sentence[i], text[i]);
}

/* A sentence into a call head, ended by its caller. */
struct SentenceWriter {
    mk_call_head *head;
    uint32_t used = 0;
    MK_MEMBER SentenceWriter &text(const char *t)
    {
        for (; *t; t++)
            store(&head->sentence[used++], *t);
        return *this;
    }
    MK_MEMBER SentenceWriter &number(uint64_t n)
    {
        uint64_t unit = 1;
        while (n / unit >= 10)
            unit *= 10;
        for (; unit; unit /= 10)
            store(&head->sentence[used++], (char)('0' + n / unit % 10));
        return *this;
    }
    MK_MEMBER bool end() { store(&head->sentence[used], (char)0); return true; }
};

/* What a call's memory says of itself. Read in one go: one thread opens a call, and a pass waits for it. */
struct CallMemory {
    mk_schedule_head schedule = {};
    mk_context_head context = {};
    MK_MEMBER CallMemory(const mk_open_params &p)
    {
        schedule = load(static_cast<const mk_schedule_head *>(p.schedule));
        if (p.context)
            context = load(static_cast<const mk_context_head *>(p.context));
    }
    MK_MEMBER bool is_schedule(const mk_rank_params &r) const { return schedule.magic == MK_SCHEDULE_MAGIC && schedule.fingerprint == r.fingerprint; }
};

/* Is the memory the call got what mok_schedule (and mok_forward) left there? If not, the head gets the cpu backend's sentence
 * (cpu/cpu.c). */
MK_DEVICE bool call_memory_is_stale(const mk_open_params &p, const CallMemory &memory, mk_call_head *head)
{
    const mk_schedule_head &s = memory.schedule;
    const mk_context_head &c = memory.context;
    SentenceWriter say = {head};
    if (!memory.is_schedule(p.rank))
        return say.text("schedule was not filled by mok_schedule of this configuration").end();
    if (s.num_tokens != p.num_tokens)
        return say.text("num_tokens is ").number((uint64_t)p.num_tokens).text(", but the schedule was made for ").number((uint64_t)s.num_tokens).end();
    if (!p.context)
        return false;
    if (c.magic != MK_CONTEXT_MAGIC || c.fingerprint != p.rank.fingerprint)
        return say.text("context was not filled by mok_forward or mok_recompute of this configuration").end();
    if (c.schedule_number != s.number || c.num_tokens != s.num_tokens)
        return say.text("context belongs to schedule ").number(c.schedule_number).text(", but this is schedule ").number(s.number).end();
    return false;
}

/* One thread. Nothing if the fault of the call that found it is still to be taken by the host. */
MK_DEVICE void tell_absent(const mk_rank_params &r)
{
    const mk_absent a = load(&device_state(r)->absent);
    if (a.noted)
        fault_set(r, MK_FAULT_TIMEOUT, a.rank, call_head(r, r.dims.rank, load(&device_state(r)->calls)), (int64_t)a.seen, (int64_t)a.wanted, MK_FAULT_EPOCH, 0);
}

/* Weights by pointer: one that cannot be used (mok_weight_maps has looked). given_to: the pass, or what came before it. */
MK_DEVICE bool weight_is_bad(uint64_t number, const char *given_to, mk_call_head *head)
{
    SentenceWriter say = {head};
    if (number == ~(uint64_t)0)
        return false;
    say.text(given_to).text("weights.");
    switch (bad_weight_place(number)) {
    case MK_GRAD_GATE: say.text("gate"); break;
    case MK_GRAD_UP: say.text("up"); break;
    case MK_GRAD_DOWN: say.text("down"); break;
    case MK_EXPERT_MAPS + MK_GRAD_GATE: say.text("shared_gate"); break;
    case MK_EXPERT_MAPS + MK_GRAD_UP: say.text("shared_up"); break;
    default: say.text("shared_down"); break;
    }
    say.text(".experts[").number(bad_weight_expert(number));
    return say.text(bad_weight_is_null(number) ? "] is NULL" : "] is not aligned to 16 bytes, as backend cuda needs it").end();
}

/* One thread. The head's place was last used two calls ago, whose readers have passed the last call's first barrier. */
MK_DEVICE void open_call(const mk_open_params &p)
{
    mk_device_state *state = device_state(p.rank);
    const uint64_t call = load(&state->calls) + 1;
    const bool out_of_step = load(&state->given_up) != 0 || load(&state->absent.noted) != 0, schedules = p.operation == MK_OP_SCHEDULE;
    mk_call_head *head = call_head(p.rank, p.rank.dims.rank, call);
    uint64_t schedule_number = call; /* a schedule's number is its call's, so that ranks agree on it whatever they called before */
    const mk_bad_weights bad = load(&state->bad_weight);
    int32_t status = p.status;
    if (status == 0 && !schedules) {
        const CallMemory memory(p);
        if (call_memory_is_stale(p, memory, head))
            status = 5; /* MOK_E_STATE */
        else if (weight_is_bad(bad.given, "", head))
            status = 2; /* MOK_E_ARG */
        else if (weight_is_bad(bad.widened, "mok_mx_widen: ", head)) {
            status = 2;
            store(&state->bad_weight.widened, ~(uint64_t)0); /* told */
        }
        else
            schedule_number = memory.schedule.number;
    }
    if (status == 0 && schedules)
        store(static_cast<mk_schedule_head *>(p.schedule), mk_schedule_head{}); /* nobody's, until it is filled */
    store(&state->calls, call);
    store(&state->skip, out_of_step ? 1u : 0u); /* with the others, since a pass was given up or a rank did not come: nobody is waited for again */
    store(&state->tickets[0], 0u);
    store(&state->tickets[1], 0u);
    store(&state->tickets[2], 0u);
    store(&state->tickets[3], 0u);
    store(&state->tickets[5], 0u);
    store(&state->first_bad_id, ~(uint64_t)0);
    store(&state->bad_weight.given, ~(uint64_t)0);
    if (p.status != 0)
        write_sentence(head, p.sentence, sizeof p.sentence);
    store(&head->sequence, call);
    store(&head->layer, p.layer);
    store(&head->schedule_number, schedule_number);
    store(&head->num_tokens, p.num_tokens);
    store(&head->operation, p.operation);
    store(&head->parts, p.parts);
    store(&head->status, status);
    store(&head->gave_up, 0u);
    if (out_of_step)
        tell_absent(p.rank);
}

/* ---- publish ---- */

/* A few loads of each thread are under way at once. */
MK_DEVICE void copy_bytes_16(void *to, const void *from, int64_t bytes, int64_t thread, int64_t num_threads)
{
    constexpr int64_t together = 4;
    const int64_t pieces = bytes / 16;
    for (int64_t first = thread; first < pieces; first += together * num_threads) {
        Vec4 v[together];
        MK_UNROLL for (int64_t i = 0; i < together; i++)
            if (first + i * num_threads < pieces)
                v[i] = load(static_cast<const Vec4 *>(from) + first + i * num_threads);
        MK_UNROLL for (int64_t i = 0; i < together; i++)
            if (first + i * num_threads < pieces)
                store(static_cast<Vec4 *>(to) + first + i * num_threads, v[i]);
    }
}

/* All threads of the grid, before the call is opened. H is a multiple of 64, so rows are whole 16-byte pieces. */
MK_DEVICE void publish(const mk_begin_params &p, int64_t thread, int64_t num_threads)
{
    const mk_rank_params &r = p.open.rank;
    const int64_t tokens = p.open.num_tokens, routes = tokens * r.dims.topk, row_bytes = 2 * r.dims.hidden;
    if (p.x)
        copy_bytes_16(in_heap<void>(r, r.memory.x), p.x, tokens * row_bytes, thread, num_threads);
    if (p.dout)
        copy_bytes_16(in_heap<void>(r, r.memory.dout), p.dout, tokens * row_bytes, thread, num_threads);
    if (p.expert_ids) { /* double-buffered by the parity of the call that is about to be opened */
        int32_t *to = in_heap<int32_t>(r, r.memory.expert_ids) + (int64_t)((load(&device_state(r)->calls) + 1) & 1) * MK_SLOTS(&r.dims);
        for (int64_t i = thread; i < routes; i += num_threads)
            store(&to[i], load(&p.expert_ids[i]));
    }
    float *weights = in_heap<float>(r, r.memory.router_weights);
    for (int64_t i = thread; i < routes && p.router_weights; i += num_threads)
        store(&weights[i], r.router_bf16 ? bf16_to_float(load(static_cast<const bf16 *>(p.router_weights) + i))
                                         : load(static_cast<const float *>(p.router_weights) + i));
}

/* All threads of the grid: the counters of the live tiles start a pass at 0. They are this rank's own, so nobody has to be met first. */
MK_DEVICE void clear_counters(const mk_open_params &p, int64_t thread, int64_t num_threads)
{
    const mk_rank_params &r = p.rank;
    if (p.operation == MK_OP_SCHEDULE || p.status != 0)
        return;
    const CallMemory memory(p);
    if (!memory.is_schedule(r)) /* then the call is about to be refused */
        return;
    for (int32_t c = 0; c < MK_NUM_TILE_COUNTERS; c++)
        for (int64_t t = thread; t < memory.schedule.num_tiles; t += num_threads)
            store(counter_at(r, c, t), 0u);
    for (int64_t t = thread; t < memory.schedule.num_pieces; t += num_threads)
        store(counter_at(r, MK_COUNTER_wgrad_tasks_done, t), 0u);
    for (int32_t c = MK_COUNTER_shared_s2_tasks_done; c < MK_NUM_COUNTERS; c++)
        for (int64_t t = thread; t < MK_SHARED_TILES(&r.dims); t += num_threads)
            store(counter_at(r, c, t), 0u);
}

/* Is this the last block of the grid to come here? Release: what the block has published; acquire: what all have. Leaves a word of shared
 * memory that is free after the next barrier. */
MK_DEVICE bool last_block(const mk_rank_params &r)
{
    uint32_t *before = static_cast<uint32_t *>(shared_base());
    uint32_t *arrived = &device_state(r)->tickets[4];
    barrier_block_sync();
    if (thread_idx() == 0)
        store(before, ticket_take_acq_rel_gpu(arrived, 1));
    barrier_block_sync();
    if (load(before) + 1 != num_blocks())
        return false;
    if (thread_idx() == 0)
        store(arrived, 0u);
    return true;
}

/* ---- the rank barrier: ranks on GPUs of their own ---- */

/* One thread, after a barrier that all have come to: a line for the log, if somebody came late. */
MK_DEVICE void report_late(const mk_rank_params &r, const uint32_t *waited_ms, const int32_t *rank)
{
    uint32_t last = 0;
    for (uint32_t i = 1; i < 128; i++)
        if (load(&waited_ms[i]) > load(&waited_ms[last]))
            last = i;
    if (load(&waited_ms[last]) < MK_LATE_MS || !r.host_fault)
        return;
    store(&r.host_fault->late.rank, load(&rank[last]));
    store(&r.host_fault->late.call, load(&device_state(r)->calls));
    /* Release: publishes the two above to the host, whose acquire load meets it (cuda/host/fault.c). */
    flag_store_release_sys(&r.host_fault->late.waited_ms, load(&waited_ms[last]));
}

/* 128 threads, one block. What this stream's earlier kernels wrote, peers' memory included, is complete. Release: publishes it to
 * rank i, whose acquire in the same place meets it; only own memory is polled. */
MK_DEVICE void rank_barrier(const mk_rank_params &r)
{
    mk_device_state *state = device_state(r);
    uint64_t *seen = static_cast<uint64_t *>(shared_base()); /* [128] */
    int32_t *late = reinterpret_cast<int32_t *>(seen + 128);   /* [128] rank that did not come, P: none */
    uint32_t *waited_ms = reinterpret_cast<uint32_t *>(late + 128); /* [128] longest wait of a thread, */
    int32_t *waited_for = reinterpret_cast<int32_t *>(waited_ms + 128); /* [128] and for whom */
    const uint64_t epoch = load(&state->epoch) + 1;
    const uint32_t thread = thread_idx();
    store(&late[thread], r.dims.num_ranks);
    store(&waited_ms[thread], 0u);
    store(&waited_for[thread], 0);
    for (int64_t i = thread; i < r.dims.num_ranks; i += 128)
        flag_store_release_sys(in_peer<uint64_t>(r, i, r.memory.epochs + (int64_t)r.dims.rank * MK_EPOCH_BYTES), epoch);
    for (int64_t i = thread; i < r.dims.num_ranks && load(&late[thread]) == r.dims.num_ranks; i += 128) {
        const uint64_t begin = time_ns();
        store(&seen[thread], wait_epoch_sys(in_heap<uint64_t>(r, r.memory.epochs + i * MK_EPOCH_BYTES), epoch, r.timeout_ns, "rank_barrier: epoch of a rank"));
        const uint32_t ms = (uint32_t)((time_ns() - begin) / 1000000u);
        if (ms > load(&waited_ms[thread])) {
            store(&waited_ms[thread], ms);
            store(&waited_for[thread], (int32_t)i);
        }
        if (load(&seen[thread]) < epoch)
            store(&late[thread], (int32_t)i);
    }
    barrier_block_sync(); /* late and seen; and a fault sets `skip`, which every warp has read by now */
    if (thread != 0)
        return;
    uint32_t first = 0;
    for (uint32_t i = 1; i < 128; i++)
        if (load(&late[i]) < load(&late[first]))
            first = i;
    if (load(&late[first]) < r.dims.num_ranks) {
        store(&state->absent, mk_absent{1, load(&late[first]), load(&seen[first]), epoch});
        tell_absent(r);
    } else {
        report_late(r, waited_ms, waited_for);
    }
    store(&state->epoch, epoch);
}

/* ---- the verdict ---- */

/* Smallest rank whose head refuses, and smallest whose head differs from rank 0's; P: none. One candidate per thread. */
struct Offenders { int32_t refuses, differs; };
MK_DEVICE Offenders find_offenders(const mk_rank_params &r, uint64_t call)
{
    Offenders *found = static_cast<Offenders *>(shared_base()); /* [128] */
    const mk_call_head *zero = call_head(r, 0, call);
    const int32_t none = r.dims.num_ranks;
    Offenders mine = {none, none};
    for (int32_t i = (int32_t)thread_idx(); i < none; i += 128) {
        const mk_call_head *h = call_head(r, i, call);
        const bool differs = (load(&h->operation) != load(&zero->operation)) | (load(&h->layer) != load(&zero->layer)) | (load(&h->parts) != load(&zero->parts)) |
                             (load(&h->schedule_number) != load(&zero->schedule_number)) | (load(&h->sequence) != load(&zero->sequence));
        if (load(&h->status) != 0)
            mine.refuses = (int32_t)mk_min(mine.refuses, i);
        if (differs)
            mine.differs = (int32_t)mk_min(mine.differs, i);
    }
    store(&found[thread_idx()], mine);
    barrier_block_sync();
    for (int32_t i = 0; i < mk_min(none, 128); i++) {
        const Offenders of = load(&found[i]);
        mine = {(int32_t)mk_min(mine.refuses, of.refuses), (int32_t)mk_min(mine.differs, of.differs)};
    }
    return mine;
}

/* Rank offsets of the global token ids, from all heads. */
MK_DEVICE void count_tokens(const mk_rank_params &r, const mk_table &t, uint64_t call)
{
    for (int64_t i = thread_idx(); i < r.dims.num_ranks; i += 128)
        store(&t.token_first[i + 1], load(&call_head(r, i, call)->num_tokens));
    barrier_block_sync();
    if (thread_idx() != 0)
        return;
    int64_t sum = 0;
    store(&t.token_first[0], sum);
    for (int64_t i = 0; i < r.dims.num_ranks; i++) {
        sum += load(&t.token_first[i + 1]);
        store(&t.token_first[i + 1], sum);
    }
}

/* One thread. Rows that exist in the table's first tiles. */
MK_DEVICE int64_t rows_of_tiles(const mk_rank_params &r, const mk_table &t, int64_t num_tiles)
{
    int64_t rows = 0;
    for (int64_t e = 0; e < r.dims.experts_count; e++)
        rows += mk_min(load(&t.segment_rows[e]), mk_max(num_tiles - load(&t.segment_tile[e]), 0) * MK_ROW_TILE);
    return rows;
}

/* One thread. What the passes count, as far as the schedule says it beforehand. */
MK_DEVICE void count_pass(const mk_open_params &p)
{
    mk_device_state *state = device_state(p.rank);
    const mk_schedule_head h = load(static_cast<const mk_schedule_head *>(p.schedule));
    /* All are read before any is written: reads wait for nothing but each other then. */
    const auto done = load(&state->done[p.operation]);
    const auto padding = load(&state->rows_padding), rotations = load(&state->ring_rotations), pushed = load(&state->bytes_pushed_peer), continued = load(&state->wgrad_continued);
    const int64_t num_tiles = p.operation == MK_OP_RECOMPUTE ? mk_min(h.num_tiles, p.rank.dims.saved_tiles) : h.num_tiles;
    const int64_t num_rows = num_tiles == h.num_tiles ? h.num_rows : rows_of_tiles(p.rank, mk_table_at(&p.rank.memory, p.schedule), num_tiles);
    const bool data = p.operation == MK_OP_BACKWARD && p.parts != 2; /* MOK_BACKWARD_WEIGHTS */
    store(&state->done[p.operation], done + 1);
    store(&state->rows_padding, padding + num_tiles * MK_ROW_TILE - num_rows);
    store(&state->ring_rotations, rotations + num_tiles / p.rank.dims.ring_tiles);
    if (p.operation == MK_OP_FORWARD || data)
        store(&state->bytes_pushed_peer, pushed + h.rows_peer * (p.rank.dims.hidden * 2 + (data ? 4 : 0)));
    if (p.want_weights)
        store(&state->wgrad_continued, continued + h.wgrad_continued);
}

/* 128 threads, one block, when all ranks have opened the call. Every rank reads the same heads, so all come to the same end; a rank
 * whose own memory was stale says so first, and one that refused has told its caller already. */
MK_DEVICE void check_call(const mk_open_params &p)
{
    const mk_rank_params &r = p.rank;
    mk_device_state *state = device_state(r);
    const uint64_t call = load(&state->calls);
    const Offenders offenders = find_offenders(r, call);
    const int32_t first = offenders.refuses, different = offenders.differs, none = r.dims.num_ranks;
    if (first != none || different != none) {
        const int32_t refused = first != none && load(&call_head(r, r.dims.rank, call)->status) != 0 ? r.dims.rank : first;
        if (thread_idx() == 0 && p.status != 0)
            store(&state->skip, 1u);
        else if (thread_idx() == 0 && refused != none)
            fault_set(r, MK_FAULT_REFUSED, refused, call_head(r, refused, call), 0, 0, 0, 0);
        else if (thread_idx() == 0)
            fault_set(r, MK_FAULT_MISMATCH, different, call_head(r, different, call), 0, 0, 0, 0);
        return;
    }
    mk_table t = mk_table_at(&r.memory, p.schedule);
    if (p.operation == MK_OP_SCHEDULE) {
        count_tokens(r, t, call);
        return;
    }
    if (thread_idx() == 0)
        count_pass(p);
}

/* ---- the beginning of a call ---- */

/* The block that has come last. It may have no track: its events go to the first one, whose block has come before it. */
MK_DEVICE void open_and_check_call(const mk_begin_params &p)
{
    const mk_rank_params &r = p.open.rank;
    {
        const TraceLaunch trace(r, MK_TRACE_call, p.open.operation, 0);
        if (thread_idx() == 0)
            open_call(p.open);
        barrier_block_sync();
    }
    if (p.then == MK_BEGIN_MEETS && !skipped(r)) { /* all ranks skip alike, so none waits for one that does not come */
        const TraceLaunch trace(r, MK_TRACE_rank_barrier, 0, 0);
        rank_barrier(r);
        barrier_block_sync(); /* a fault of the barrier sets `skip` */
    }
    if (p.then != MK_BEGIN_OPENS && !skipped(r))
        check_call(p.open);
}

/* 128 threads a block. The ranks' barrier follows what all blocks have published: last_block's acquire, the barrier's release. */
MK_DEVICE void begin_call(const mk_begin_params &p)
{
    {
        const TraceLaunch trace(p.open.rank, MK_TRACE_publish);
        const int64_t thread = (int64_t)block_idx() * 128 + thread_idx(), num_threads = (int64_t)num_blocks() * 128;
        clear_counters(p.open, thread, num_threads);
        publish(p, thread, num_threads);
    }
    if (last_block(p.open.rank))
        open_and_check_call(p);
}

} /* namespace mk */
#endif
