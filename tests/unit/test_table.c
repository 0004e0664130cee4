/* mok_schedule's row table against one made by brute force (table_maker.h), byte for byte, on every rank. */
#include "../multi/ranks.h"
#include "backend/backend.h"
#include "table_maker.h"

typedef struct table_problem {
    int64_t token_first[RANKS_MAX + 1];
    int32_t *ids;      /* [N, K] */
    int64_t copied, cut, empty, turned; /* over all ranks: the case is not empty */
} table_problem;

static void compare_counts(const ranks_env *e, const table_problem *p, const int64_t *local, const int64_t *global)
{
    int64_t topk = e->cfg.topk;
    for (int64_t x = 0; x < e->cfg.num_experts; x++) {
        int64_t here = 0, everywhere = 0;
        for (int64_t i = 0; i < p->token_first[e->ranks] * topk; i++) {
            everywhere += p->ids[i] == x;
            here += p->ids[i] == x && i >= p->token_first[e->rank] * topk && i < p->token_first[e->rank + 1] * topk;
        }
        CHECK_EQ(local[x], here);
        CHECK_EQ(global[x], everywhere);
    }
}

static void compare_info(const ranks_env *e, const made_table *m, const mok_schedule_info *info)
{
    int64_t row = 2 * e->cfg.hidden;
    CHECK_EQ(info->tokens_global, m->num_global);
    CHECK_EQ(info->rows, m->head.num_rows);
    CHECK_EQ(info->table_rows, m->head.num_tiles * (int64_t)MK_ROW_TILE);
    CHECK_EQ(info->rows_copied_fwd, m->head.rows_copied_fwd);
    CHECK_EQ(info->rows_copied_bwd, m->head.rows_copied_bwd);
    CHECK_EQ(info->rows_pulled_peer_fwd, m->head.rows_pulled_peer_fwd);
    CHECK_EQ(info->rows_pulled_peer_bwd, m->head.rows_pulled_peer_bwd);
    CHECK_EQ(info->bytes_pulled_peer_fwd, m->head.rows_pulled_peer_fwd * row);
    CHECK_EQ(info->bytes_pulled_peer_bwd, m->head.rows_pulled_peer_bwd * 2 * row);
    CHECK_EQ(info->bytes_pushed_peer_fwd, m->head.rows_peer * row);
    CHECK_EQ(info->bytes_pushed_peer_bwd, m->head.rows_peer * (row + 4));
    int64_t continued = 0;
    for (int32_t i = 0; i < m->head.num_pieces; i++)
        continued += !m->t.pieces[i].is_first;
    CHECK_EQ(info->wgrad_pieces, m->head.num_pieces);
    CHECK_EQ(info->wgrad_continued, continued);
}

static void schedule_and_compare(ranks_env *e)
{
    table_problem *p = e->user;
    int64_t topk = e->cfg.topk, experts = e->cfg.num_experts, own = p->token_first[e->rank + 1] - p->token_first[e->rank];
    void *schedule = ranks_schedule_block(e);
    int64_t *local = ranks_block(experts * 8), *global = ranks_block(experts * 8);
    mok_schedule_args a = MOK_INIT(mok_schedule_args);
    a.num_tokens = own;
    a.expert_ids = p->ids + p->token_first[e->rank] * topk;
    a.schedule = schedule;
    a.tokens_per_expert_local = local;
    a.tokens_per_expert_global = global;
    RANKS_OK(mok_schedule(e->w, &a, NULL));
    RANKS_OK(mok_wait(e->w));

    made_table m;
    mok_schedule_info info = MOK_INIT(mok_schedule_info);
    table_make(&m, &e->w->dims, p->token_first, p->ids);
    table_compare(&m, schedule);
    compare_counts(e, p, local, global);
    RANKS_OK(mok_schedule_query(e->w, schedule, &info));
    compare_info(e, &m, &info);
    mk_table t = mk_table_at(&e->w->memory, schedule);
    CHECK_EQ(t.head->num_tokens, own);
    CHECK_BYTES(t.token_first, p->token_first, sizeof(int64_t) * (size_t)(e->ranks + 1));
    CHECK_BYTES(t.own_ids, a.expert_ids, sizeof(int32_t) * (size_t)(own * topk));
    __atomic_add_fetch(&p->copied, m.head.rows_copied_fwd + m.head.rows_copied_bwd, __ATOMIC_RELAXED);
    __atomic_add_fetch(&p->cut, info.wgrad_continued, __ATOMIC_RELAXED);
    __atomic_add_fetch(&p->empty, m.head.num_rows == 0, __ATOMIC_RELAXED);
    __atomic_add_fetch(&p->turned, m.head.num_tiles > e->w->dims.ring_tiles, __ATOMIC_RELAXED);
    table_free(&m);
    free(schedule);
    free(local);
    free(global);
}

TEST(row_table_equals_a_brute_force_sort)
{
    uint64_t state = test_seed();
    int64_t copied = 0, cut = 0, empty = 0, turned = 0;
    for (int i = 0; i < (RANKS_SLOW ? 25 : 120); i++) {
        mk_dims d = table_random_dims(&state);
        mok_config c = ranks_config(64, 64, d.num_experts, d.topk, d.max_tokens);
        c.ring_rows = d.ring_tiles * MK_ROW_TILE;
        c.minibatch_rows = d.mb_tiles_fwd * MK_ROW_TILE;
        c.minibatch_rows_bwd = d.mb_tiles_bwd * MK_ROW_TILE;
        table_problem p = {.ids = NULL};
        for (int32_t r = 0; r < d.num_ranks; r++)
            p.token_first[r + 1] = p.token_first[r] + (test_below(&state, 5) ? test_below(&state, d.max_tokens + 1) : 0);
        int64_t routes = p.token_first[d.num_ranks] * d.topk;
        p.ids = malloc(sizeof *p.ids * (size_t)(routes + 1));
        table_random_ids(&state, routes, d.num_experts, p.ids);
        ranks_run(d.num_ranks, &c, schedule_and_compare, &p);
        free(p.ids);
        copied += p.copied;
        cut += p.cut;
        empty += p.empty;
        turned += p.turned;
    }
    CHECK(copied > 500);
    CHECK(cut > 3);
    CHECK(RANKS_SLOW || empty > 2);
    CHECK(turned > 3);
}

/* A case small enough to be written down: N = 130 tokens make shards of S = 3, so the order is 0, 3, 6, …, 129, 1, 4, …, 2, 5, … */
static void written_down(ranks_env *e)
{
    table_problem *p = e->user;
    void *schedule = ranks_schedule_block(e);
    mok_schedule_args a = MOK_INIT(mok_schedule_args);
    a.num_tokens = p->token_first[e->rank + 1] - p->token_first[e->rank];
    a.expert_ids = p->ids + p->token_first[e->rank];
    a.schedule = schedule;
    RANKS_OK(mok_schedule(e->w, &a, NULL));
    mk_table t = mk_table_at(&e->w->memory, schedule);
    if (e->rank == 0) {
        int64_t at = 0;
        for (int64_t low = 0; low < 3; low++)
            for (int64_t g = low; g < 130; g += 3, at++) {
                int32_t rank = g < 50 ? 0 : 1;
                CHECK_EQ(t.rows[at].src_rank, rank);
                CHECK_EQ(t.rows[at].src_slot, g - (rank ? 50 : 0));
            }
        CHECK_EQ(at, 130);
        CHECK_EQ(t.head->num_tiles, 2);
        CHECK_EQ(t.rows[130].src_rank, -1);
        CHECK_EQ(t.rows[255].src_rank, -1);
    } else {
        CHECK_EQ(t.head->num_tiles, 0);
        CHECK_EQ(t.head->num_pieces, 1); /* an expert without rows still has a gradient to clear */
    }
    free(schedule);
}

TEST(row_order_of_130_tokens_is_written_down)
{
    mok_config c = ranks_config(64, 64, 2, 1, 80);
    table_problem p = {.token_first = {0, 50, 130}};
    p.ids = calloc(130, sizeof *p.ids); /* all to expert 0, on rank 0 */
    ranks_run(2, &c, written_down, &p);
    free(p.ids);
}

/* The order knows only global token ids: however the same tokens are split over ranks, the rows of an expert are the same tokens. */
typedef struct order_of_expert { int64_t *tokens, *rows; int64_t experts, most; table_problem p; } order_of_expert;

static void note_order(ranks_env *e)
{
    order_of_expert *o = e->user;
    void *schedule = ranks_schedule_block(e);
    mok_schedule_args a = MOK_INIT(mok_schedule_args);
    int64_t topk = e->cfg.topk;
    a.num_tokens = o->p.token_first[e->rank + 1] - o->p.token_first[e->rank];
    a.expert_ids = o->p.ids + o->p.token_first[e->rank] * topk;
    a.schedule = schedule;
    RANKS_OK(mok_schedule(e->w, &a, NULL));
    mk_table t = mk_table_at(&e->w->memory, schedule);
    for (int64_t x = 0; x < e->w->dims.experts_count; x++) {
        int64_t expert = e->w->dims.experts_first + x;
        o->rows[expert] = t.segment_rows[x];
        for (int64_t i = 0; i < t.segment_rows[x]; i++) {
            const mk_row *row = &t.rows[t.segment_tile[x] * (int64_t)MK_ROW_TILE + i];
            o->tokens[expert * o->most + i] = o->p.token_first[row->src_rank] * topk + row->src_slot;
        }
    }
    free(schedule);
}

TEST(row_order_does_not_know_ranks)
{
    uint64_t state = test_seed();
    enum { N = 777, K = 3, E = 11 };
    int32_t *ids = malloc(sizeof *ids * N * K);
    table_random_ids(&state, N * K, E, ids);
    order_of_expert want = {0};
    for (int32_t ranks = 1; ranks <= 8; ranks++) {
        order_of_expert o = {.experts = E, .most = N * K};
        o.tokens = calloc(E * N * K, sizeof *o.tokens);
        o.rows = calloc(E, sizeof *o.rows);
        o.p.ids = ids;
        for (int32_t r = 0; r < ranks; r++)
            o.p.token_first[r + 1] = r == ranks - 1 ? N : o.p.token_first[r] + test_below(&state, (N - o.p.token_first[r]) / 2);
        mok_config c = ranks_config(64, 64, E, K, N);
        ranks_run(ranks, &c, note_order, &o);
        if (ranks == 1) {
            want = o;
            continue;
        }
        CHECK_BYTES(o.rows, want.rows, sizeof *o.rows * E);
        CHECK_BYTES(o.tokens, want.tokens, sizeof *o.tokens * E * N * K);
        free(o.tokens);
        free(o.rows);
    }
    free(want.tokens);
    free(want.rows);
    free(ids);
}

/* Neither too near, but for the same tile, nor so far that the ring has lost it. */
TEST(rows_are_copied_from_rows_of_the_right_distance)
{
    for (int up = -1; up <= 1; up += 2) {
        int64_t row = 1 << 20, at = up > 0 ? row : row + MK_ROW_TILE - 1; /* the first of its tile as the walk goes, so that all rows before are of other tiles */
        CHECK(mk_may_copy(row + 64, row + 64 + up, 2, 1, 1));           /* the same tile */
        CHECK(mk_may_copy(row + 64, row + 64 + up, 2, 1, 0));
        CHECK(!mk_may_copy(at, at - up * 2048, 64, 17, 0));             /* this rank's token: nothing to save */
        CHECK(!mk_may_copy(at, at - up, 64, 17, 1));
        CHECK(!mk_may_copy(at, at - up * 2047, 64, 17, 1));
        CHECK(mk_may_copy(at, at - up * 2048, 64, 17, 1));
        CHECK(!mk_may_copy(at, at - up * 255, 64, 2, 1));               /* a minibatch is shorter than that */
        CHECK(mk_may_copy(at, at - up * 256, 64, 2, 1));
        CHECK(mk_may_copy(at, at - up * 62 * 128, 64, 2, 1));
        CHECK(!mk_may_copy(at, at - up * (62 * 128 + 1), 64, 2, 1));
        CHECK(mk_may_copy(at, at - up * 128, 2, 1, 1) && !mk_may_copy(at, at - up * 129, 2, 1, 1)); /* the smallest ring: one distance */
    }
}

/* A piece for each expert, or a cut, as cutting one segment after the other finds it. */
TEST(pieces_that_nothing_cuts_are_found_one_by_one)
{
    enum { MOST = 12 };
    uint64_t state = test_seed();
    int64_t cut_ones = 0, whole_ones = 0;
    for (int round = 0; round < 4000; round++) {
        int32_t segment_tile[MOST + 1] = {0}, segment_rows[MOST], piece_of_tile[MOST * 6 + 1], piece_first[MOST * 6 + 2];
        mk_piece pieces[MOST * 8];
        int64_t experts = 1 + (int64_t)test_below(&state, MOST), mb_tiles = 1 + (int64_t)test_below(&state, 5), ring_tiles = 2 * mb_tiles + (int64_t)test_below(&state, 24);
        for (int64_t e = 0; e < experts; e++) {
            segment_rows[e] = test_below(&state, 3) ? (int32_t)test_below(&state, 6 * MK_ROW_TILE) : 0;
            segment_tile[e + 1] = segment_tile[e] + (int32_t)mk_ceil_div(segment_rows[e], MK_ROW_TILE);
        }
        if (segment_tile[experts] == 0)
            continue;
        mk_piece_plan plan = {segment_tile, segment_rows, experts, segment_tile[experts], mb_tiles, ring_tiles, pieces, piece_of_tile, piece_first, NULL, -1, 0, 0};
        bool cut = mk_build_pieces(&plan) != experts;
        bool seen = false;
        for (int64_t e = 0; e < experts; e++)
            seen |= mk_uncut_minibatch(&plan, e) < 0;
        CHECK_EQ(seen, cut);
        for (int64_t e = 0; e < experts && !cut; e++)
            CHECK_EQ(mk_uncut_minibatch(&plan, e), pieces[e].minibatch);
        cut_ones += cut;
        whole_ones += !cut;
    }
    CHECK(cut_ones > 100 && whole_ones > 100);
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
