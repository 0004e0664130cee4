/* A rank's row table made by brute force, straight from the words of layout/table.h: gather, sort, search. Shares nothing with
 * s0_schedule but the struct definitions and, for the pieces, layout/pieces.h (whose properties test_walk.c checks). */
#ifndef MOK_TEST_TABLE_MAKER_H
#define MOK_TEST_TABLE_MAKER_H
#include "layout/config.h"
#include "layout/depend.h"
#include "layout/pieces.h"
#include "test.h"

typedef struct made_row { int64_t expert, g, k, order_low, order_high; } made_row;

typedef struct made_table {
    mk_dims d;
    mk_memory memory;
    mk_schedule_head head;
    mk_table t;
    int64_t num_global;
    void *schedule;
} made_table;

static int made_compare(const void *pa, const void *pb)
{
    const made_row *a = (const made_row *)pa, *b = (const made_row *)pb;
#define BY(field) if (a->field != b->field) return a->field < b->field ? -1 : 1
    BY(expert); BY(order_low); BY(order_high); BY(k);
#undef BY
    return 0;
}

/* Row `i`'s source for a copy: the nearest row of the same token on the side the walk comes from, if in the same tile, or if the token is a peer's and the row is in reach
 * and not too near. */
static int32_t made_copy(const made_table *m, const int64_t *token_of_row, int64_t i, bool backward)
{
    int64_t rows = (int64_t)m->head.num_tiles * MK_ROW_TILE, step = backward ? -1 : 1;
    int64_t mb = (backward ? m->d.mb_tiles_bwd : m->d.mb_tiles_fwd) * MK_ROW_TILE, reach = m->d.ring_tiles * MK_ROW_TILE - mb;
    for (int64_t j = i + step, between = 0; j >= 0 && j < rows && between < reach; j += step, between++)
        if (token_of_row[j] == token_of_row[i])
            return j / MK_ROW_TILE == i / MK_ROW_TILE || (m->t.rows[i].src_rank != m->d.rank && (between + 1 >= 2048 || between + 1 >= mb)) ? (int32_t)j : -1;
    return -1;
}

/* ids: [N, K] of all ranks in rank order; token_first: [P + 1]. */
static inline void table_make(made_table *m, const mk_dims *d, const int64_t *token_first, const int32_t *ids)
{
    memset(m, 0, sizeof *m);
    m->d = *d;
    mk_memory_map(d, &m->memory, NULL);
    m->schedule = aligned_alloc(256, (size_t)mk_round_up(m->memory.schedule_bytes, 256));
    memset(m->schedule, 0xff, (size_t)m->memory.schedule_bytes);
    m->t = mk_table_at(&m->memory, m->schedule);
    int64_t n = m->num_global = token_first[d->num_ranks], shard = (n + MK_SHARDS - 1) / MK_SHARDS, count = 0;
    made_row *rows = (made_row *)calloc((size_t)(n * d->topk + 1), sizeof *rows);
    for (int64_t g = 0; g < n; g++)
        for (int64_t k = 0; k < d->topk; k++) {
            int64_t own = ids[g * d->topk + k] - d->experts_first;
            if (own >= 0 && own < d->experts_count)
                rows[count++] = (made_row){own, g, k, g % shard, g / shard};
        }
    qsort(rows, (size_t)count, sizeof *rows, made_compare);

    int64_t tile = 0, next = 0;
    int64_t *token_of_row = (int64_t *)malloc(sizeof *token_of_row * (size_t)(mk_max(d->capacity_tiles, 1) * MK_ROW_TILE));
    for (int64_t i = 0; i < d->capacity_tiles * MK_ROW_TILE; i++) {
        m->t.rows[i] = (mk_row){-1, -1, -1, -1};
        token_of_row[i] = -1 - i;
    }
    for (int64_t e = 0; e < d->experts_count; e++) {
        int64_t in_expert = 0;
        m->t.segment_tile[e] = (int32_t)tile;
        for (; next < count && rows[next].expert == e; next++, in_expert++) {
            int64_t at = tile * MK_ROW_TILE + in_expert, g = rows[next].g, r = 0;
            while (token_first[r + 1] <= g)
                r++;
            m->t.rows[at] = (mk_row){(int32_t)r, (int32_t)((g - token_first[r]) * d->topk + rows[next].k), -1, -1};
            token_of_row[at] = g;
            m->head.rows_peer += r != d->rank;
        }
        m->t.segment_rows[e] = (int32_t)in_expert;
        tile += (in_expert + MK_ROW_TILE - 1) / MK_ROW_TILE;
    }
    m->t.segment_tile[d->experts_count] = (int32_t)tile;
    m->head.num_rows = count;
    m->head.num_tiles = (int32_t)tile;
    m->head.tokens_global = n;
    memset(m->t.copies_out_fwd, 0, sizeof(int32_t) * (size_t)tile);
    memset(m->t.copies_out_bwd, 0, sizeof(int32_t) * (size_t)tile);
    for (int64_t i = 0; i < tile * MK_ROW_TILE; i++) {
        mk_row *row = &m->t.rows[i];
        if (row->src_rank < 0)
            continue;
        row->copy_fwd = made_copy(m, token_of_row, i, false);
        row->copy_bwd = made_copy(m, token_of_row, i, true);
        bool peer = row->src_rank != d->rank;
        if (row->copy_fwd >= 0)
            m->t.copies_out_fwd[row->copy_fwd / MK_ROW_TILE]++;
        if (row->copy_bwd >= 0)
            m->t.copies_out_bwd[row->copy_bwd / MK_ROW_TILE]++;
        m->head.rows_copied_fwd += row->copy_fwd >= 0;
        m->head.rows_copied_bwd += row->copy_bwd >= 0;
        m->head.rows_pulled_peer_fwd += peer && row->copy_fwd < 0;
        m->head.rows_pulled_peer_bwd += peer && row->copy_bwd < 0;
    }
    mk_piece_plan plan = {m->t.segment_tile, m->t.segment_rows, d->experts_count, tile, d->mb_tiles_bwd, d->ring_tiles,
                          m->t.pieces, m->t.piece_of_tile, m->t.piece_first, m->t.tiles, -1, 0, 0};
    m->head.num_pieces = mk_build_pieces(&plan);
    m->t.head = &m->head;
    free(rows);
    free(token_of_row);
}

/* Every field that the passes read; the made table is the truth. */
static inline void table_compare(const made_table *m, void *schedule)
{
    const mk_dims *d = &m->d;
    mk_table t = mk_table_at(&m->memory, schedule);
    int64_t tiles = m->head.num_tiles, minibatches = mk_ceil_div(tiles, d->mb_tiles_bwd);
    CHECK_EQ(t.head->num_tiles, tiles);
    CHECK_EQ(t.head->num_rows, m->head.num_rows);
    CHECK_EQ(t.head->num_pieces, m->head.num_pieces);
    CHECK_EQ(t.head->tokens_global, m->num_global);
    CHECK_EQ(t.head->rows_copied_fwd, m->head.rows_copied_fwd);
    CHECK_EQ(t.head->rows_copied_bwd, m->head.rows_copied_bwd);
    CHECK_EQ(t.head->rows_pulled_peer_fwd, m->head.rows_pulled_peer_fwd);
    CHECK_EQ(t.head->rows_pulled_peer_bwd, m->head.rows_pulled_peer_bwd);
    CHECK_EQ(t.head->rows_peer, m->head.rows_peer);
    CHECK_BYTES(t.segment_tile, m->t.segment_tile, sizeof(int32_t) * (size_t)(d->experts_count + 1));
    CHECK_BYTES(t.segment_rows, m->t.segment_rows, sizeof(int32_t) * (size_t)d->experts_count);
    if (t.head->num_tiles != tiles)
        return;
    CHECK_BYTES(t.rows, m->t.rows, sizeof(mk_row) * (size_t)(tiles * MK_ROW_TILE));
    CHECK_BYTES(t.copies_out_fwd, m->t.copies_out_fwd, sizeof(int32_t) * (size_t)tiles);
    CHECK_BYTES(t.copies_out_bwd, m->t.copies_out_bwd, sizeof(int32_t) * (size_t)tiles);
    CHECK_BYTES(t.pieces, m->t.pieces, sizeof(mk_piece) * (size_t)m->head.num_pieces);
    CHECK_BYTES(t.piece_of_tile, m->t.piece_of_tile, sizeof(int32_t) * (size_t)tiles);
    CHECK_BYTES(t.piece_first, m->t.piece_first, sizeof(int32_t) * (size_t)(minibatches + 1));
}

static inline void table_free(made_table *m) { free(m->schedule); }

/* How many experts like to be liked: even, one takes most, or only few are alive. A share of the routes is dropped. */
static inline void table_random_ids(uint64_t *state, int64_t routes, int64_t experts, int32_t *ids)
{
    int64_t style = test_below(state, 4), favourite = test_below(state, experts), alive = 1 + test_below(state, experts);
    double dropped = test_below(state, 3) ? 0 : 0.4 * test_uniform(state);
    for (int64_t i = 0; i < routes; i++) {
        ids[i] = (int32_t)test_below(state, style == 2 ? alive : experts);
        if (style == 1 && test_below(state, 4))
            ids[i] = (int32_t)favourite;
        if (test_uniform(state) < dropped)
            ids[i] = -1;
    }
}

/* Dims that mk_resolve would give, for any legal ring (in tiles) and minibatches. */
static inline mk_dims table_random_dims(uint64_t *state)
{
    mok_config c = MOK_INIT(mok_config);
    mk_dims d;
    c.hidden = c.intermediate = 64;
    c.shared_intermediate = 64 * test_below(state, 2);
    c.num_experts = 1 + test_below(state, 12);
    c.topk = 1 + test_below(state, mk_min(c.num_experts, 6));
    int32_t ranks = (int32_t)(1 + test_below(state, 5)), rank = (int32_t)test_below(state, ranks);
    c.max_tokens = 1 + test_below(state, (test_below(state, 3) ? 1500 : 5000) / (ranks * c.topk));
    int64_t widest = test_below(state, 2) ? 1 : test_below(state, 2) ? 4 : 9; /* small rings turn and cut more */
    c.minibatch_rows = MK_ROW_TILE * (1 + test_below(state, widest));
    c.minibatch_rows_bwd = MK_ROW_TILE * (1 + test_below(state, widest));
    c.ring_rows = 2 * mk_max(c.minibatch_rows, c.minibatch_rows_bwd) + MK_ROW_TILE * test_below(state, 2 * widest);
    c.save = MOK_SAVE_ROWS;
    c.save_rows = MK_ROW_TILE * test_below(state, 12);
    if (mk_resolve(&c, ranks, rank, (mk_machine){0, 128, 256, false}, &d) != MOK_OK)
        TEST_FAILED("random dims are refused: %s", mok_last_error());
    return d;
}
#endif
