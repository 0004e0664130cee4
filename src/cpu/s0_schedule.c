/* s0_schedule: all ranks' routes -> this rank's row table (layout/table.h).
 * In: expert_ids [T, K] of every rank, through the heaps. Out: schedule memory. Called by cpu.c; one barrier, no data moves. */
#include <string.h>

#include "base/error.h"
#include "cpu/call.h"
#include "cpu/run.h"
#include "cpu/trace.h"
#include "layout/pieces.h"

typedef struct schedule_job {
    mok_workspace *w;
    const mk_dims *d;
    mk_table t;
    uint64_t number;
    int64_t num_global;
} schedule_job;

static const int32_t *ids_of(const schedule_job *s, int64_t rank)
{
    return (const int32_t *)(const void *)(s->w->heaps[rank] + s->w->memory.expert_ids) + (int64_t)(s->number & 1) * MK_SLOTS(s->d);
}

/* Every rank checks every id, so that all see the same first mistake. */
static mok_status check_ids(const schedule_job *s)
{
    for (int32_t r = 0; r < s->d->num_ranks; r++) {
        const int32_t *ids = ids_of(s, r);
        int64_t routes = (s->t.token_first[r + 1] - s->t.token_first[r]) * s->d->topk;
        for (int64_t i = 0; i < routes; i++)
            if (ids[i] < -1 || ids[i] >= s->d->num_experts)
                return mk_fail(MOK_E_ROUTE, "rank %d, token %lld, k %lld: expert id %d is outside [-1, %lld)", r, (long long)(i / s->d->topk),
                               (long long)(i % s->d->topk), ids[i], (long long)s->d->num_experts);
    }
    return MOK_OK;
}

static void count_rows(const schedule_job *s, int64_t *per_expert_local, int64_t *per_expert_global)
{
    const mk_dims *d = s->d;
    size_t bytes = sizeof(int64_t) * (size_t)d->num_experts;
    memset(s->t.segment_rows, 0, sizeof(int32_t) * (size_t)d->experts_count);
    if (per_expert_local)
        memset(per_expert_local, 0, bytes);
    if (per_expert_global)
        memset(per_expert_global, 0, bytes);
    for (int32_t r = 0; r < d->num_ranks; r++) {
        const int32_t *ids = ids_of(s, r);
        int64_t routes = (s->t.token_first[r + 1] - s->t.token_first[r]) * d->topk;
        for (int64_t i = 0; i < routes; i++) {
            int64_t e = ids[i], own = e - d->experts_first;
            if (e < 0)
                continue;
            if (own >= 0 && own < d->experts_count)
                s->t.segment_rows[own]++;
            if (per_expert_global)
                per_expert_global[e]++;
            if (per_expert_local && r == d->rank)
                per_expert_local[e]++;
        }
    }
}

/* Segment starts, and padding rows everywhere, to be overwritten. */
static void lay_out_segments(const schedule_job *s, int64_t *cursor)
{
    mk_schedule_head *h = s->t.head;
    int32_t tile = 0;
    h->num_rows = 0;
    for (int64_t e = 0; e < s->d->experts_count; e++) {
        s->t.segment_tile[e] = tile;
        cursor[e] = (int64_t)tile * MK_ROW_TILE;
        h->num_rows += s->t.segment_rows[e];
        tile += (int32_t)mk_ceil_div(s->t.segment_rows[e], MK_ROW_TILE);
    }
    s->t.segment_tile[s->d->experts_count] = tile;
    h->num_tiles = tile;
    for (int64_t row = 0; row < (int64_t)tile * MK_ROW_TILE; row++)
        s->t.rows[row] = (mk_row){-1, -1, -1, -1};
}

/* The order of the contract: j = g mod S outside, v = g div S inside, then k. */
static void place_rows(const schedule_job *s, int64_t *cursor)
{
    const mk_dims *d = s->d;
    int64_t shard = mk_order_shard_tokens(s->num_global);
    for (int64_t j = 0; j < shard; j++)
        for (int64_t v = 0; v < MK_SHARDS; v++) {
            int64_t g = mk_order_token(s->num_global, shard, j, v);
            if (g < 0)
                break;
            int64_t r = mk_find_interval64(s->t.token_first, d->num_ranks, g), slot = (g - s->t.token_first[r]) * d->topk;
            const int32_t *ids = ids_of(s, r) + slot;
            for (int64_t k = 0; k < d->topk; k++) {
                int64_t own = ids[k] - d->experts_first;
                if (own >= 0 && own < d->experts_count)
                    s->t.rows[cursor[own]++] = (mk_row){(int32_t)r, (int32_t)(slot + k), -1, -1};
            }
        }
}

static int64_t global_token(const schedule_job *s, const mk_row *row)
{
    return s->t.token_first[row->src_rank] + row->src_slot / s->d->topk;
}

/* Which rows are copied, seen from one direction of the walk. last[g]: the last row of token g that the walk has met. */
static void plan_copies(const schedule_job *s, int32_t *last, bool backward)
{
    const mk_dims *d = s->d;
    mk_schedule_head *h = s->t.head;
    int64_t num_rows = (int64_t)h->num_tiles * MK_ROW_TILE, copied = 0, pulled_peer = 0;
    int32_t *copies_out = backward ? s->t.copies_out_bwd : s->t.copies_out_fwd;
    memset(copies_out, 0, sizeof *copies_out * (size_t)h->num_tiles);
    for (int64_t g = 0; g < s->num_global; g++)
        last[g] = -1;
    for (int64_t i = 0; i < num_rows; i++) {
        int64_t r = backward ? i : num_rows - 1 - i;
        mk_row *row = &s->t.rows[r];
        if (row->src_rank < 0)
            continue;
        int64_t g = global_token(s, row);
        bool remote = row->src_rank != d->rank;
        int32_t from = last[g];
        if (from >= 0 && !mk_may_copy(r, from, d->ring_tiles, backward ? d->mb_tiles_bwd : d->mb_tiles_fwd, remote))
            from = -1;
        last[g] = (int32_t)r;
        *(backward ? &row->copy_bwd : &row->copy_fwd) = from;
        if (from >= 0) {
            copies_out[from / MK_ROW_TILE]++;
            copied++;
        } else {
            pulled_peer += remote;
        }
    }
    *(backward ? &h->rows_copied_bwd : &h->rows_copied_fwd) = copied;
    *(backward ? &h->rows_pulled_peer_bwd : &h->rows_pulled_peer_fwd) = pulled_peer;
}

static void plan_pieces(const schedule_job *s)
{
    const mk_dims *d = s->d;
    mk_schedule_head *h = s->t.head;
    mk_piece_plan plan = {s->t.segment_tile, s->t.segment_rows, d->experts_count, h->num_tiles, d->mb_tiles_bwd, d->ring_tiles,
                          s->t.pieces, s->t.piece_of_tile, s->t.piece_first, s->t.tiles, -1, 0, 0};
    h->num_pieces = mk_build_pieces(&plan);
    h->wgrad_continued = plan.num_continued;
}

mok_status mk_cpu_s0_schedule(mok_workspace *w, const mk_call *call)
{
    const mok_schedule_args *a = &call->schedule;
    schedule_job s = {.w = w, .d = &w->dims, .t = mk_table_at(&w->memory, a->schedule), .number = w->calls + 1};
    size_t id_bytes = sizeof(int32_t) * (size_t)(a->num_tokens * w->dims.topk);
    uint64_t begin = mk_cpu_trace_plain(w, 0, mk_cpu_trace_time(w), MK_TRACE_call, call->operation);
    MK_TRY(mk_cpu_call_open(w, call, s.number));
    if (id_bytes)
        memcpy((int32_t *)(void *)(w->heap + w->memory.expert_ids) + (int64_t)(s.number & 1) * MK_SLOTS(s.d), a->expert_ids, id_bytes);
    begin = mk_cpu_trace_plain(w, 0, begin, MK_TRACE_publish, 0);
    MK_TRY(mk_cpu_call_meet(w, call));
    begin = mk_cpu_trace_plain(w, 0, begin, MK_TRACE_rank_barrier, 0);

    s.t.head->magic = 0; /* whatever was here before, it is no schedule until this one is complete */
    s.t.token_first[0] = 0;
    for (int32_t r = 0; r < w->dims.num_ranks; r++)
        s.t.token_first[r + 1] = s.t.token_first[r] + mk_cpu_call_head(w, r)->num_tokens;
    s.num_global = s.t.token_first[w->dims.num_ranks];
    MK_TRY(check_ids(&s));

    int64_t *cursor = (int64_t *)(void *)(w->local + w->memory.expert_cursor);
    int32_t *last = (int32_t *)(void *)(w->local + w->memory.route_rows);
    mk_schedule_head *h = s.t.head;
    *h = (mk_schedule_head){.fingerprint = w->fingerprint, .number = s.number, .num_tokens = a->num_tokens, .tokens_global = s.num_global};
    if (id_bytes)
        memcpy(s.t.own_ids, a->expert_ids, id_bytes);
    count_rows(&s, a->tokens_per_expert_local, a->tokens_per_expert_global);
    lay_out_segments(&s, cursor);
    place_rows(&s, cursor);
    plan_copies(&s, last, false);
    plan_copies(&s, last, true);
    plan_pieces(&s);
    for (int64_t r = 0; r < (int64_t)h->num_tiles * MK_ROW_TILE; r++)
        h->rows_peer += s.t.rows[r].src_rank >= 0 && s.t.rows[r].src_rank != w->dims.rank;
    h->magic = MK_SCHEDULE_MAGIC;
    mk_cpu_trace_plain(w, 0, begin, MK_TRACE_s0_schedule, 0);
    w->stats.schedules++;
    return MOK_OK;
}
