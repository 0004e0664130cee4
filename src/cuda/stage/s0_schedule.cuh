/* s0_schedule on the device: all ranks' routes -> this rank's row table (layout/table.h), the same table that cpu/s0_schedule.c makes.
 * No host read. Five launches:
 *
 *   count     routes in the contract's order are cut into chunks, one warp each: rows per (chunk, expert). Reads the ids from the ranks'
 *             heaps, once, and keeps them in route_rows. Finds ids out of range.
 *   scan      per expert, over chunks: counts become each chunk's first place in the expert's segment
 *   segments  segment starts, weight-gradient pieces, head
 *   place     the same walk as count: every route gets its row, in order, without atomics
 *   copies    per route: the nearest row of the same token in both directions */
#ifndef MK_STAGE_S0_SCHEDULE_CUH
#define MK_STAGE_S0_SCHEDULE_CUH

#include "cuda/stage/call.cuh"
#include "layout/pieces.h"

namespace mk {

enum { S0_THREADS = 256, S0_WARPS = S0_THREADS / 32, S0_SHARED_EXPERTS = 384 };

/* What all launches need; num_routes counts places of the order, some of which lie behind the last token. */
struct S0 {
    const mk_s0_params &p;
    const mk_rank_params &r;
    mk_table t;
    int64_t num_global, shard, num_places, chunk_places;
    int32_t *counts;      /* [chunks, El] */
    int32_t *route_rows;  /* [N, K]: ids, later rows */

    MK_MEMBER explicit S0(const mk_s0_params &params) : p(params), r(params.rank), t(mk_table_at(&params.rank.memory, params.schedule))
    {
        num_global = load(&t.token_first[r.dims.num_ranks]);
        shard = mk_order_shard_tokens(num_global);
        num_places = shard * MK_SHARDS * r.dims.topk;
        chunk_places = mk_round_up(mk_ceil_div(num_places, MK_SCHEDULE_CHUNKS), 32);
        counts = in_local<int32_t>(r, r.memory.chunk_counts);
        route_rows = in_local<int32_t>(r, r.memory.route_rows);
    }

    /* Token and k of a place of the order; false behind the last token. */
    MK_MEMBER bool route_at(int64_t place, int64_t *token, int64_t *k) const
    {
        *k = place % r.dims.topk;
        const int64_t position = place / r.dims.topk;
        *token = place < num_places ? mk_order_token(num_global, shard, position / MK_SHARDS, position % MK_SHARDS) : -1;
        return *token >= 0;
    }

    /* Local expert of an id, or -1. */
    MK_MEMBER int32_t own_expert(int32_t id) const
    {
        const int64_t own = id - r.dims.experts_first;
        return own >= 0 && own < r.dims.experts_count ? (int32_t)own : -1;
    }
};

/* Of the 32 lanes, those with my value come together: my place among them, and whether I speak for them. */
struct Peers {
    uint32_t mask, before;
    bool leads;
    MK_MEMBER explicit Peers(int32_t value)
    {
        mask = match_any((uint32_t)value);
        before = population_count(mask & ((1u << lane_idx()) - 1));
        leads = before == 0;
    }
};

/* ---- count ---- */

MK_DEVICE void note_id(const S0 &s, int64_t rank, int64_t route, int32_t id)
{
    if (id < -1 || id >= s.r.dims.num_experts)
        min_relaxed_gpu(&device_state(s.r)->first_bad_id, (uint64_t)rank << 40 | (uint64_t)route);
    else if (id >= 0 && s.p.tokens_global)
        counter_add_relaxed_gpu(reinterpret_cast<uint64_t *>(&s.p.tokens_global[id]), 1);
    if (id >= 0 && id < s.r.dims.num_experts && s.p.tokens_local && rank == s.r.dims.rank)
        counter_add_relaxed_gpu(reinterpret_cast<uint64_t *>(&s.p.tokens_local[id]), 1);
}

/* The id of a route, out of its rank's heap. */
MK_DEVICE int32_t fetch_id(const S0 &s, int64_t token, int64_t k)
{
    const int64_t rank = mk_find_interval64(s.t.token_first, s.r.dims.num_ranks, token);
    const int64_t route = (token - load(&s.t.token_first[rank])) * s.r.dims.topk + k;
    const int64_t half = (int64_t)(load(&device_state(s.r)->calls) & 1) * MK_SLOTS(&s.r.dims);
    const int32_t id = load(in_peer<int32_t>(s.r, rank, s.r.memory.expert_ids) + half + route);
    store(&s.route_rows[token * s.r.dims.topk + k], id);
    if (rank == s.r.dims.rank)
        store(&s.t.own_ids[route], id);
    note_id(s, rank, route, id);
    return id;
}

/* One warp, one chunk. */
MK_DEVICE void s0_count(const mk_s0_params &p, int64_t chunk)
{
    const S0 s(p);
    int32_t *counts = s.counts + chunk * s.r.dims.experts_count;
    for (int64_t e = lane_idx(); e < s.r.dims.experts_count; e += 32)
        store(&counts[e], 0);
    sync_warp();
    for (int64_t place = chunk * s.chunk_places; place < (chunk + 1) * s.chunk_places && place < s.num_places; place += 32) {
        int64_t token, k;
        const bool there = s.route_at(place + lane_idx(), &token, &k);
        const int32_t own = there ? s.own_expert(fetch_id(s, token, k)) : -1;
        const Peers peers(own);
        if (own >= 0 && peers.leads)
            store(&counts[own], load(&counts[own]) + (int32_t)population_count(peers.mask));
        sync_warp();
    }
}

/* ---- scan ---- */

/* All threads of a block, each with a number: the sum of those of the threads before, and of all. sums: [S0_THREADS] of shared memory, free again after the
 * next barrier. */
MK_DEVICE int32_t sum_before(int32_t *sums, int32_t mine, int32_t *total)
{
    const int32_t thread = (int32_t)thread_idx();
    store(&sums[thread], mine);
    barrier_block_sync();
    for (int32_t step = 1; step < S0_THREADS; step *= 2) { /* Hillis and Steele */
        const int32_t left = thread >= step ? load(&sums[thread - step]) : 0;
        barrier_block_sync();
        store(&sums[thread], load(&sums[thread]) + left);
        barrier_block_sync();
    }
    *total = load(&sums[S0_THREADS - 1]);
    return load(&sums[thread]) - mine;
}

/* One block per expert. Exclusive sums over chunks, in place; the total is the expert's rows. */
MK_DEVICE void s0_scan(const mk_s0_params &p, int64_t expert)
{
    const S0 s(p);
    constexpr int32_t each = MK_SCHEDULE_CHUNKS / S0_THREADS;
    int32_t *sums = static_cast<int32_t *>(shared_base()); /* [S0_THREADS] */
    const int32_t thread = (int32_t)thread_idx();
    if (expert >= s.r.dims.experts_count)
        return;
    int32_t mine[each], sum = 0;
    for (int32_t i = 0; i < each; i++) {
        mine[i] = load(&s.counts[(int64_t)(thread * each + i) * s.r.dims.experts_count + expert]);
        sum += mine[i];
    }
    int32_t total, before = sum_before(sums, sum, &total);
    for (int32_t i = 0; i < each; i++) {
        store(&s.counts[(int64_t)(thread * each + i) * s.r.dims.experts_count + expert], before);
        before += mine[i];
    }
    if (thread == 0)
        store(&s.t.segment_rows[expert], total);
}

/* ---- segments ---- */

MK_DEVICE void s0_fault_bad_id(const S0 &s, uint64_t bad)
{
    const int64_t rank = (int64_t)(bad >> 40), route = (int64_t)(bad & 0xffffffffffull), half = (int64_t)(load(&device_state(s.r)->calls) & 1);
    const int32_t id = load(in_peer<int32_t>(s.r, rank, s.r.memory.expert_ids) + half * MK_SLOTS(&s.r.dims) + route);
    fault_set(s.r, MK_FAULT_BAD_ID, (int32_t)rank, call_head(s.r, s.r.dims.rank, load(&device_state(s.r)->calls)), route / s.r.dims.topk,
              route % s.r.dims.topk, id, s.r.dims.num_experts);
}

/* Of the one block of s0_segments. */
struct SegmentsShared {
    int32_t sums[S0_THREADS];
    int32_t tile[S0_SHARED_EXPERTS + 1], rows[S0_SHARED_EXPERTS]; /* segment_tile and segment_rows, if the experts are few */
};
static_assert(sizeof(SegmentsShared) <= MK_SMALL_SHARED, "shared memory of mok_s0_segments");

/* Segment starts, a thread for each expert. All threads get the table's tiles. */
MK_DEVICE int64_t s0_place_segments(const S0 &s, SegmentsShared &shared, int64_t *num_rows)
{
    const int64_t num_experts = s.r.dims.experts_count;
    int64_t tile = 0;
    *num_rows = 0;
    for (int64_t first = 0; first < num_experts; first += S0_THREADS) {
        const int64_t e = first + thread_idx();
        const int32_t rows = e < num_experts ? load(&s.t.segment_rows[e]) : 0;
        int32_t batch_rows, batch_tiles;
        sum_before(shared.sums, rows, &batch_rows);
        barrier_block_sync();
        const int32_t start = (int32_t)tile + sum_before(shared.sums, (int32_t)mk_ceil_div(rows, MK_ROW_TILE), &batch_tiles);
        barrier_block_sync();
        if (e < num_experts)
            store(&s.t.segment_tile[e], start);
        if (e < mk_min(num_experts, S0_SHARED_EXPERTS)) {
            store(&shared.rows[e], rows);
            store(&shared.tile[e], start);
        }
        *num_rows += batch_rows;
        tile += batch_tiles;
    }
    if (thread_idx() == 0) {
        store(&s.t.segment_tile[num_experts], (int32_t)tile);
        if (num_experts <= S0_SHARED_EXPERTS)
            store(&shared.tile[num_experts], (int32_t)tile);
    }
    barrier_block_sync();
    return tile;
}

/* Segments are read from shared memory, if they fit. */
MK_DEVICE mk_piece_plan s0_piece_plan(const S0 &s, const SegmentsShared &shared, int64_t num_tiles)
{
    const mk_dims &d = s.r.dims;
    const bool fit = d.experts_count <= S0_SHARED_EXPERTS;
    return {fit ? shared.tile : s.t.segment_tile, fit ? shared.rows : s.t.segment_rows, d.experts_count, num_tiles, d.mb_tiles_bwd, d.ring_tiles,
            s.t.pieces, s.t.piece_of_tile, s.t.piece_first, s.t.tiles, -1, 1, 0};
}

/* The pieces, a thread for each expert. False: the table is empty, or a segment is cut, and where depends on those before it. */
MK_DEVICE bool s0_emit_uncut(SegmentsShared &shared, mk_piece_plan plan)
{
    int32_t cut = plan.num_tiles == 0, any;
    for (int64_t e = thread_idx(); e < plan.num_experts && !cut; e += S0_THREADS)
        cut = mk_uncut_minibatch(&plan, e) < 0;
    sum_before(shared.sums, cut, &any); /* of any thread */
    if (any)
        return false;
    for (int64_t e = thread_idx(); e < plan.num_experts; e += S0_THREADS) {
        const int64_t start = plan.segment_tile[e], stop = plan.segment_tile[e + 1], minibatch = mk_uncut_minibatch(&plan, e);
        mk_piece_emit(&plan, (int32_t)e, e, start, stop, start, stop, minibatch);
        for (int64_t b = e ? mk_uncut_minibatch(&plan, e - 1) + 1 : 0; b <= minibatch; b++)
            store(&plan.piece_first[b], (int32_t)e);
        if (e == plan.num_experts - 1) /* which ends in the last minibatch */
            store(&plan.piece_first[minibatch + 1], (int32_t)plan.num_experts);
    }
    return true;
}

/* One thread. `uncut`: the pieces are there. */
MK_DEVICE void s0_write_head(const S0 &s, mk_piece_plan plan, bool uncut, int64_t num_rows)
{
    mk_schedule_head h = {};
    h.num_pieces = uncut ? (int32_t)plan.num_experts : mk_build_pieces(&plan);
    note_written(s.t.pieces, sizeof(mk_piece) * (uint64_t)h.num_pieces);
    if (!uncut)
        note_written(s.t.piece_first, sizeof(int32_t) * (uint64_t)(mk_ceil_div(plan.num_tiles, plan.mb_tiles) + 1));
    h.wgrad_continued = plan.num_continued;
    h.magic = MK_SCHEDULE_MAGIC;
    h.fingerprint = s.r.fingerprint;
    h.number = load(&device_state(s.r)->calls);
    h.num_tokens = s.p.num_tokens;
    h.tokens_global = s.num_global;
    h.num_rows = num_rows;
    h.num_tiles = (int32_t)plan.num_tiles;
    store(s.t.head, h);
}

/* One block. */
MK_DEVICE void s0_segments(const mk_s0_params &p)
{
    const S0 s(p);
    const uint64_t bad = load(&device_state(s.r)->first_bad_id);
    barrier_block_sync(); /* the fault sets `skip`, which every warp has read by now */
    if (bad != ~(uint64_t)0) {
        if (thread_idx() == 0)
            s0_fault_bad_id(s, bad);
        return;
    }
    SegmentsShared &shared = *static_cast<SegmentsShared *>(shared_base());
    int64_t num_rows;
    const int64_t num_tiles = s0_place_segments(s, shared, &num_rows);
    const mk_piece_plan plan = s0_piece_plan(s, shared, num_tiles);
    const bool uncut = s0_emit_uncut(shared, plan);
    if (thread_idx() == 0) {
        s0_write_head(s, plan, uncut, num_rows);
        store(&device_state(s.r)->done[MK_OP_SCHEDULE], load(&device_state(s.r)->done[MK_OP_SCHEDULE]) + 1);
    }
    barrier_block_sync();
    const int32_t num_pieces = load(&s.t.head->num_pieces);
    for (int32_t i = (int32_t)thread_idx(); i < num_pieces; i += S0_THREADS)
        mk_piece_fill(&plan, i);
    if (thread_idx() == 0) { /* by plain stores of src/layout */
        note_written(s.t.tiles, sizeof(mk_tile) * (uint64_t)num_tiles);
        note_written(s.t.piece_of_tile, sizeof(int32_t) * (uint64_t)num_tiles);
    }
    for (int32_t i = (int32_t)thread_idx(); i < num_tiles; i += S0_THREADS) {
        store(&s.t.copies_out_fwd[i], 0);
        store(&s.t.copies_out_bwd[i], 0);
    }
}

/* ---- place ---- */

MK_DEVICE void s0_place_route(const S0 &s, int64_t token, int64_t k, int32_t own, int32_t in_segment)
{
    const int64_t row = (int64_t)load(&s.t.segment_tile[own]) * MK_ROW_TILE + in_segment;
    const int64_t rank = mk_find_interval64(s.t.token_first, s.r.dims.num_ranks, token);
    const int64_t slot = (token - load(&s.t.token_first[rank])) * s.r.dims.topk + k;
    store(&s.t.rows[row], mk_row{(int32_t)rank, (int32_t)slot, -1, -1});
    store(&s.route_rows[token * s.r.dims.topk + k], (int32_t)row);
}

/* Rows of an expert's last tile that no token has. */
MK_DEVICE void s0_place_padding(const S0 &s, int64_t expert)
{
    const int64_t first = (int64_t)load(&s.t.segment_tile[expert]) * MK_ROW_TILE + load(&s.t.segment_rows[expert]);
    const int64_t end = (int64_t)load(&s.t.segment_tile[expert + 1]) * MK_ROW_TILE;
    for (int64_t row = first + lane_idx(); row < end; row += 32)
        store(&s.t.rows[row], mk_row{-1, -1, -1, -1});
}

/* One warp, one chunk; warps also share out the experts' padding. */
MK_DEVICE void s0_place(const mk_s0_params &p, int64_t chunk)
{
    const S0 s(p);
    int32_t *cursor = s.counts + chunk * s.r.dims.experts_count;
    for (int64_t place = chunk * s.chunk_places; place < (chunk + 1) * s.chunk_places && place < s.num_places; place += 32) {
        int64_t token, k;
        int32_t own = -1;
        const bool there = s.route_at(place + lane_idx(), &token, &k);
        if (there)
            own = s.own_expert(load(&s.route_rows[token * s.r.dims.topk + k]));
        const Peers peers(own);
        const int32_t first = own >= 0 ? load(&cursor[own]) : 0;
        sync_warp();
        if (own >= 0)
            s0_place_route(s, token, k, own, first + (int32_t)peers.before);
        else if (there)
            store(&s.route_rows[token * s.r.dims.topk + k], -1);
        if (own >= 0 && peers.leads)
            store(&cursor[own], first + (int32_t)population_count(peers.mask));
        sync_warp();
    }
    for (int64_t e = chunk; e < s.r.dims.experts_count; e += MK_SCHEDULE_CHUNKS)
        s0_place_padding(s, e);
}

/* ---- copies ---- */

/* What copies counts for the head: rows copied and rows of other ranks' tokens that are pulled, in both directions; rows of other ranks' tokens. */
enum { S0_COPIED_FWD, S0_COPIED_BWD, S0_PULLED_PEER_FWD, S0_PULLED_PEER_BWD, S0_PEER, S0_NUM_SUMS };
struct S0Sums { uint32_t n[S0_NUM_SUMS] = {}; };

/* The row of one route: looks at the token's other rows (K or fewer) for the nearest on either side. */
MK_DEVICE void s0_copy_row(const S0 &s, const int32_t *rows, int64_t topk, int32_t row, bool remote, S0Sums &sums)
{
    const mk_dims &d = s.r.dims;
    int32_t above = -1, below = -1; /* the forward walks down and meets higher rows first */
    for (int64_t k = 0; k < topk; k++) {
        const int32_t other = load(&rows[k]);
        if (other > row && (above < 0 || other < above))
            above = other;
        if (other >= 0 && other < row && other > below)
            below = other;
    }
    if (above >= 0 && !mk_may_copy(row, above, d.ring_tiles, d.mb_tiles_fwd, remote))
        above = -1;
    if (below >= 0 && !mk_may_copy(row, below, d.ring_tiles, d.mb_tiles_bwd, remote))
        below = -1;
    /* s0_place has put -1 there */
    if (above >= 0) {
        store(&s.t.rows[row].copy_fwd, above);
        counter_add_relaxed_gpu(reinterpret_cast<uint32_t *>(&s.t.copies_out_fwd[above / MK_ROW_TILE]), 1);
    }
    if (below >= 0) {
        store(&s.t.rows[row].copy_bwd, below);
        counter_add_relaxed_gpu(reinterpret_cast<uint32_t *>(&s.t.copies_out_bwd[below / MK_ROW_TILE]), 1);
    }
    sums.n[S0_COPIED_FWD] += above >= 0;
    sums.n[S0_COPIED_BWD] += below >= 0;
    sums.n[S0_PULLED_PEER_FWD] += remote && above < 0;
    sums.n[S0_PULLED_PEER_BWD] += remote && below < 0;
    sums.n[S0_PEER] += remote;
}

/* All threads of a block: one addition to the head for each block. */
MK_DEVICE void s0_add_sums(const S0 &s, const S0Sums &sums)
{
    uint32_t *of_warps = static_cast<uint32_t *>(shared_base()); /* [S0_WARPS, S0_NUM_SUMS] */
    int64_t *const totals[S0_NUM_SUMS] = {&s.t.head->rows_copied_fwd, &s.t.head->rows_copied_bwd, &s.t.head->rows_pulled_peer_fwd, &s.t.head->rows_pulled_peer_bwd,
                                          &s.t.head->rows_peer};
    const uint32_t own = warp_idx();
    MK_UNROLL for (uint32_t i = 0; i < S0_NUM_SUMS; i++) {
        const uint32_t sum = sum_of_warp(sums.n[i]);
        if (lane_idx() == 0)
            store(&of_warps[own * S0_NUM_SUMS + i], sum);
    }
    barrier_block_sync();
    MK_UNROLL for (uint32_t i = 0; i < S0_NUM_SUMS; i++) {
        uint32_t sum = 0;
        for (uint32_t warp = 0; warp < S0_WARPS && thread_idx() == i; warp++)
            sum += load(&of_warps[warp * S0_NUM_SUMS + i]);
        if (sum)
            counter_add_relaxed_gpu(reinterpret_cast<uint64_t *>(totals[i]), sum);
    }
}

/* All threads of the grid, a route at a time. */
MK_DEVICE void s0_copies(const mk_s0_params &p, int64_t thread, int64_t num_threads)
{
    const S0 s(p);
    const int64_t topk = s.r.dims.topk, own_first = load(&s.t.token_first[s.r.dims.rank]), own_end = load(&s.t.token_first[s.r.dims.rank + 1]);
    S0Sums sums;
    for (int64_t route = thread; route < s.num_global * topk; route += num_threads) {
        const int64_t token = route / topk;
        const int32_t row = load(&s.route_rows[route]);
        if (row >= 0)
            s0_copy_row(s, s.route_rows + token * topk, topk, row, token < own_first || token >= own_end, sums);
    }
    s0_add_sums(s, sums);
}

} /* namespace mk */
#endif
