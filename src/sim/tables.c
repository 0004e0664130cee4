#include "sim/tables.h"

#include <stdlib.h>
#include <string.h>

#include "layout/pieces.h"

mk_dims sim_dims(const mok_config *cfg, const mok_plan *plan, int32_t num_ranks, int32_t rank)
{
    mk_dims d = {.hidden = cfg->hidden, .intermediate = cfg->intermediate, .shared_intermediate = cfg->shared_intermediate, .num_experts = cfg->num_experts,
                 .topk = cfg->topk, .max_tokens = cfg->max_tokens, .num_ranks = num_ranks, .rank = rank,
                 .ring_tiles = plan->ring_rows / MK_ROW_TILE, .mb_tiles_fwd = plan->forward.minibatch_rows / MK_ROW_TILE,
                 .mb_tiles_bwd = plan->backward.minibatch_rows / MK_ROW_TILE, .saved_tiles = plan->saved_rows / MK_ROW_TILE};
    d.experts_first = mk_expert_first(d.num_experts, num_ranks, rank);
    d.experts_count = mk_expert_first(d.num_experts, num_ranks, rank + 1) - d.experts_first;
    return d;
}

/* Rank that owns an expert: the inverse of mk_expert_first. */
static int32_t owner_of(const mk_dims *d, int64_t expert)
{
    int64_t r = expert * d->num_ranks / d->num_experts;
    while (mk_expert_first(d->num_experts, d->num_ranks, r + 1) <= expert)
        r++;
    while (mk_expert_first(d->num_experts, d->num_ranks, r) > expert)
        r--;
    return (int32_t)r;
}

/* Segments, and memory for the rest, once the rows of each expert are known. */
static bool lay_out(sim_rank_table *r, const int32_t *rows_of_expert, int64_t *cursor)
{
    mk_dims *d = &r->dims;
    mk_table *t = &r->table;
    int64_t tiles = 0, minibatches;
    for (int64_t e = 0; e < d->experts_count; e++)
        tiles += mk_ceil_div(rows_of_expert[d->experts_first + e], MK_ROW_TILE);
    d->capacity_tiles = mk_max(tiles, 1); /* here a table is as long as its rows; counters are numbered by it */
    minibatches = mk_ceil_div(tiles, mk_min(d->mb_tiles_bwd, d->ring_tiles));
    size_t n = (size_t)tiles + 1, e_bytes = sizeof(int32_t) * (size_t)(d->experts_count + 1);
    t->head = &r->head;
    t->segment_tile = malloc(e_bytes);
    t->segment_rows = malloc(e_bytes);
    t->rows = malloc(sizeof *t->rows * n * MK_ROW_TILE);
    t->tiles = malloc(sizeof *t->tiles * n);
    t->copies_out_fwd = calloc(n, sizeof(int32_t));
    t->copies_out_bwd = calloc(n, sizeof(int32_t));
    t->piece_of_tile = malloc(sizeof(int32_t) * n);
    t->piece_first = malloc(sizeof(int32_t) * (size_t)(minibatches + 2));
    t->pieces = malloc(sizeof *t->pieces * (size_t)(d->experts_count + minibatches + 1));
    if (!t->segment_tile || !t->segment_rows || !t->rows || !t->tiles || !t->copies_out_fwd || !t->copies_out_bwd || !t->piece_of_tile || !t->piece_first || !t->pieces)
        return false;
    r->head.num_tiles = (int32_t)tiles;
    tiles = 0;
    for (int64_t e = 0; e < d->experts_count; e++) {
        int32_t rows = rows_of_expert[d->experts_first + e];
        t->segment_tile[e] = (int32_t)tiles;
        t->segment_rows[e] = rows;
        cursor[d->experts_first + e] = tiles * MK_ROW_TILE;
        r->head.num_rows += rows;
        tiles += mk_ceil_div(rows, MK_ROW_TILE);
    }
    t->segment_tile[d->experts_count] = (int32_t)tiles;
    for (int64_t row = 0; row < tiles * MK_ROW_TILE; row++)
        t->rows[row] = (mk_row){-1, -1, -1, -1};
    return true;
}

/* The order of the contract: j = g mod S outside, v = g div S inside, then k. */
static void place_rows(sim_tables *s, int64_t topk, const int32_t *ids, const int32_t *owner, int64_t *cursor)
{
    int64_t shard = mk_order_shard_tokens(s->num_tokens);
    for (int64_t j = 0; j < shard; j++)
        for (int64_t v = 0; v < MK_SHARDS; v++) {
            int64_t g = mk_order_token(s->num_tokens, shard, j, v);
            if (g < 0)
                break;
            int64_t r = mk_find_interval64(s->token_first, s->num_ranks, g), slot = (g - s->token_first[r]) * topk;
            for (int64_t k = 0; k < topk; k++) {
                int32_t e = ids[g * topk + k];
                if (e >= 0)
                    s->ranks[owner[e]].table.rows[cursor[e]++] = (mk_row){(int32_t)r, (int32_t)(slot + k), -1, -1};
            }
        }
}

/* distance: as in sim_tables_make. */
static bool may_copy(const mk_dims *d, int64_t at, int64_t from, bool remote, bool backward, int64_t distance)
{
    int64_t mb_tiles = backward ? d->mb_tiles_bwd : d->mb_tiles_fwd;
    if (distance == SIM_COPIES_AS_BUILT)
        return mk_may_copy(at, from, d->ring_tiles, mb_tiles, remote);
    bool same_tile = at / MK_ROW_TILE == from / MK_ROW_TILE;
    return same_tile ? distance < SIM_NO_COPIES : remote && llabs(at - from) >= distance && mk_copy_in_ring(at, from, d->ring_tiles, mb_tiles);
}

/* last[g]: the last row of token g that the walk has met, valid if stamp[g] is this sweep's. */
static void plan_copies(const sim_tables *s, sim_rank_table *r, int32_t *last, int32_t *stamp, int32_t sweep, bool backward, int64_t distance)
{
    const mk_dims *d = &r->dims;
    mk_schedule_head *h = &r->head;
    int64_t num_rows = (int64_t)h->num_tiles * MK_ROW_TILE, copied = 0, pulled_peer = 0;
    int32_t *copies_out = backward ? r->table.copies_out_bwd : r->table.copies_out_fwd;
    for (int64_t i = 0; i < num_rows; i++) {
        int64_t at = backward ? i : num_rows - 1 - i;
        mk_row *row = &r->table.rows[at];
        if (row->src_rank < 0)
            continue;
        int64_t g = s->token_first[row->src_rank] + row->src_slot / d->topk;
        int32_t from = stamp[g] == sweep ? last[g] : -1;
        if (from >= 0 && !may_copy(d, at, from, row->src_rank != d->rank, backward, distance))
            from = -1;
        last[g] = (int32_t)at;
        stamp[g] = sweep;
        *(backward ? &row->copy_bwd : &row->copy_fwd) = from;
        if (from >= 0) {
            copies_out[from / MK_ROW_TILE]++;
            copied++;
        } else {
            pulled_peer += row->src_rank != d->rank;
        }
    }
    *(backward ? &h->rows_copied_bwd : &h->rows_copied_fwd) = copied;
    *(backward ? &h->rows_pulled_peer_bwd : &h->rows_pulled_peer_fwd) = pulled_peer;
}

static void plan_pieces(sim_rank_table *r, int64_t piece_tiles)
{
    const mk_dims *d = &r->dims;
    mk_table *t = &r->table;
    /* Cut everywhere: a "minibatch" of piece_tiles in a ring of as many always has to cut (mk_must_cut). */
    mk_piece_plan plan = {t->segment_tile, t->segment_rows, d->experts_count, r->head.num_tiles, piece_tiles ? piece_tiles : d->mb_tiles_bwd,
                          piece_tiles ? piece_tiles : d->ring_tiles, t->pieces, t->piece_of_tile, t->piece_first, t->tiles, -1, 0, 0};
    r->head.num_pieces = mk_build_pieces(&plan);
    r->head.wgrad_continued = plan.num_continued;
    for (int64_t row = 0; row < (int64_t)r->head.num_tiles * MK_ROW_TILE; row++)
        r->head.rows_peer += t->rows[row].src_rank >= 0 && t->rows[row].src_rank != d->rank;
}

bool sim_tables_make(const mk_dims *dims, int64_t tokens, const int32_t *ids, int64_t piece_tiles, int64_t copy_distance, sim_tables *out)
{
    int64_t num_experts = dims->num_experts, routes = tokens * dims->num_ranks * dims->topk;
    *out = (sim_tables){.num_ranks = dims->num_ranks, .num_tokens = tokens * dims->num_ranks};
    int32_t *rows = calloc((size_t)num_experts, sizeof *rows), *owner = malloc(sizeof *owner * (size_t)num_experts);
    int64_t *cursor = malloc(sizeof *cursor * (size_t)num_experts);
    int32_t *last = malloc(sizeof *last * (size_t)mk_max(out->num_tokens, 1)), *stamp = calloc((size_t)mk_max(out->num_tokens, 1), sizeof *stamp);
    out->ranks = calloc((size_t)dims->num_ranks, sizeof *out->ranks);
    out->token_first = malloc(sizeof *out->token_first * (size_t)(dims->num_ranks + 1));
    bool ok = rows && owner && cursor && last && stamp && out->ranks && out->token_first;
    for (int64_t i = 0; i < routes && ok; i++)
        if (ids[i] >= 0)
            rows[ids[i]]++;
    for (int64_t e = 0; e < num_experts && ok; e++)
        owner[e] = owner_of(dims, e);
    for (int32_t r = 0; r <= dims->num_ranks && ok; r++)
        out->token_first[r] = r * tokens;
    for (int32_t r = 0; r < dims->num_ranks && ok; r++) {
        sim_rank_table *rank = &out->ranks[r];
        rank->dims = *dims;
        rank->dims.rank = r;
        rank->dims.experts_first = mk_expert_first(num_experts, dims->num_ranks, r);
        rank->dims.experts_count = mk_expert_first(num_experts, dims->num_ranks, r + 1) - rank->dims.experts_first;
        rank->head.num_tokens = tokens;
        rank->head.tokens_global = out->num_tokens;
        ok = lay_out(rank, rows, cursor);
    }
    if (ok) {
        place_rows(out, dims->topk, ids, owner, cursor);
        for (int32_t r = 0; r < dims->num_ranks; r++) {
            plan_copies(out, &out->ranks[r], last, stamp, 2 * r + 1, false, copy_distance);
            plan_copies(out, &out->ranks[r], last, stamp, 2 * r + 2, true, copy_distance);
            plan_pieces(&out->ranks[r], piece_tiles);
        }
    }
    free(rows);
    free(owner);
    free(cursor);
    free(last);
    free(stamp);
    if (!ok)
        sim_tables_free(out);
    return ok;
}

void sim_tables_free(sim_tables *s)
{
    for (int32_t r = 0; s->ranks && r < s->num_ranks; r++) {
        mk_table *t = &s->ranks[r].table;
        void *own[] = {t->segment_tile, t->segment_rows, t->rows, t->tiles, t->copies_out_fwd, t->copies_out_bwd, t->piece_of_tile, t->piece_first, t->pieces};
        for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
            free(own[i]);
    }
    free(s->ranks);
    free(s->token_first);
    *s = (sim_tables){0};
}
