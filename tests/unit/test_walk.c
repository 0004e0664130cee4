/* The walk, its needs and its deadlock check (layout/walk.h, depend.h, check.h, pieces.h) on random tables. */
#include "layout/check.h"
#include "table_maker.h"
#include "test.h"

enum { MAX_TASKS = 1 << 16 };

/* A random table with the walk of one pass over it. */
typedef struct walk_case {
    made_table m;
    mk_walk w;
} walk_case;

static mk_grid random_grid(uint64_t *state, mk_pass pass, bool with_wgrad, bool with_data)
{
    mk_grid g;
    memset(&g, 0, sizeof g);
    g.dispatch = (int32_t)(1 + test_below(state, 2));
    g.gate_up = (int32_t)(1 + test_below(state, 3));
    g.shared_gate_up = (int32_t)(1 + test_below(state, 3));
    g.group_tiles = (int32_t)test_below(state, test_below(state, 2) ? 3 : 12);
    g.raises = (int32_t)test_below(state, 3);
    if (pass == MK_PASS_FORWARD) {
        g.down = (int32_t)(1 + test_below(state, 3));
        g.shared_down = (int32_t)(1 + test_below(state, 2));
    } else if (pass == MK_PASS_BACKWARD) {
        g.dgrad_down = (int32_t)(1 + test_below(state, 3));
        g.shared_dgrad_down = (int32_t)(1 + test_below(state, 3));
        g.dgrad_gate_up = with_data ? (int32_t)(1 + test_below(state, 3)) : 0;
        g.shared_dgrad_gate_up = with_data ? (int32_t)(1 + test_below(state, 3)) : 0;
        g.wgrad = with_wgrad ? (int32_t)(1 + test_below(state, 4)) : 0;
        g.shared_wgrad = with_wgrad ? (int32_t)(1 + test_below(state, 4)) : 0;
    }
    return g;
}

static void walk_of(const made_table *m, mk_pass pass, mk_grid grid, int64_t shared_tiles, mk_walk *w)
{
    memset(w, 0, sizeof *w);
    w->pass = pass;
    w->grid = grid;
    w->mb_tiles = pass == MK_PASS_BACKWARD ? m->d.mb_tiles_bwd : m->d.mb_tiles_fwd;
    w->replay_from = mk_min(m->d.saved_tiles, m->head.num_tiles);
    w->num_tiles = pass == MK_PASS_RECOMPUTE ? w->replay_from : m->head.num_tiles;
    w->shared_tiles = shared_tiles;
    w->tiles = m->t.tiles;
    if (pass == MK_PASS_BACKWARD) {
        w->piece_first = m->t.piece_first;
        w->num_pieces = m->head.num_pieces;
    }
    mk_walk_count(w);
}

static void make_case(walk_case *c, uint64_t *state, mk_pass pass)
{
    mk_dims d = table_random_dims(state);
    int64_t first[16] = {0};
    for (int32_t r = 0; r < d.num_ranks; r++)
        first[r + 1] = first[r] + test_below(state, d.max_tokens + 1);
    int64_t routes = first[d.num_ranks] * d.topk;
    int32_t *ids = malloc(sizeof *ids * (size_t)(routes + 1));
    table_random_ids(state, routes, d.num_experts, ids);
    table_make(&c->m, &d, first, ids);
    free(ids);
    bool wgrad = test_below(state, 4) != 0, data = !wgrad || test_below(state, 4);
    walk_of(&c->m, pass, random_grid(state, pass, wgrad, data), d.shared_intermediate ? test_below(state, 4) : 0, &c->w);
}

/* --- the order, written again from the drawing at the top of walk.h ---------------------------------------------------------- */
typedef struct task_list { mk_task *tasks; int64_t count; } task_list;

static void append(task_list *l, mk_task_kind kind, int64_t tile, int32_t parts)
{
    for (int32_t p = 0; p < parts && l->count < MAX_TASKS; p++)
        l->tasks[l->count++] = (mk_task){kind, (int32_t)tile, p};
}

/* All of these tiles for part 0, then all for part 1 from the last to the first, … */
static void append_group(task_list *l, const int32_t *tiles, int64_t count, mk_task_kind kind, int32_t parts)
{
    for (int32_t part = 0; part < parts; part++)
        for (int64_t i = 0; i < count && l->count < MAX_TASKS; i++)
            l->tasks[l->count++] = (mk_task){kind, tiles[part % 2 ? count - 1 - i : i], part};
}

/* In groups as equal as can be: all have the same number of tiles but the last, which may have fewer. */
static void append_equal_groups(task_list *l, const int32_t *tiles, int64_t count, mk_task_kind kind, int32_t parts, int64_t most)
{
    int64_t groups = 0, size = 0;
    for (groups = 1; groups * most < count;)
        groups++;
    for (size = 1; size * groups < count;)
        size++;
    for (int64_t at = 0; at < count; at += size)
        append_group(l, tiles + at, mk_min(size, count - at), kind, parts);
}

enum { MAX_LISTED = 4096 };

/* GEMM tasks of the table's tiles [first, end), as the pass meets them: where the expert changes a group ends. `begins`: the pass does, with these. */
static void append_groups(task_list *l, const walk_case *c, int64_t first, int64_t end, mk_task_kind kind, int32_t parts, bool begins)
{
    bool backward = c->w.pass == MK_PASS_BACKWARD;
    int32_t tiles[MAX_LISTED], count = 0;
    int64_t most = mk_max(c->w.grid.group_tiles, 1), early = begins && backward ? mk_max(most / 4, 1) : most;
    int64_t ends_early = begins && !backward ? most / 2 : 0; /* a group ends there in any case */
    CHECK(end - first <= MAX_LISTED);
    for (int64_t i = first; i < end; i++)
        tiles[count++] = (int32_t)(backward ? i : first + end - 1 - i);
    for (int32_t start = 0; start < count;) {
        int32_t stop = start + 1;
        while (stop < count && stop != ends_early && mk_expert_of_tile(&c->m.t, tiles[stop]) == mk_expert_of_tile(&c->m.t, tiles[start]))
            stop++;
        append_equal_groups(l, tiles + start, stop - start, kind, parts, early);
        start = stop;
    }
}

/* [kind] of every tile of the walk's minibatch m. Dispatches do not come in groups. */
static void append_minibatch(task_list *l, const walk_case *c, int64_t m, mk_task_kind kind, int32_t parts, bool leads_the_pass)
{
    const mk_walk *w = &c->w;
    int64_t first = m * w->mb_tiles, end = mk_min(first + w->mb_tiles, w->num_tiles);
    if (w->pass != MK_PASS_BACKWARD) {
        end = w->num_tiles - m * w->mb_tiles;
        first = mk_max(end - w->mb_tiles, 0);
    }
    if (kind != MK_TASK_DISPATCH) {
        append_groups(l, c, first, end, kind, parts, leads_the_pass);
        return;
    }
    for (int64_t i = first; i < end; i++)
        append(l, kind, w->pass == MK_PASS_BACKWARD ? i : first + end - 1 - i, parts);
}

static void append_shared(task_list *l, const mk_walk *w, mk_task_kind kind, int32_t parts)
{
    int32_t tiles[MAX_LISTED];
    for (int32_t i = 0; i < w->shared_tiles; i++)
        tiles[i] = i;
    append_equal_groups(l, tiles, w->shared_tiles, kind, parts, mk_max(w->grid.group_tiles, 1));
}

static void draw_forward(task_list *l, const walk_case *c)
{
    const mk_walk *w = &c->w;
    int64_t M = (w->num_tiles + w->mb_tiles - 1) / w->mb_tiles;
    append_shared(l, w, MK_TASK_SHARED_GATE_UP, w->grid.shared_gate_up);
    append_shared(l, w, MK_TASK_SHARED_DOWN, w->grid.shared_down);
    for (int64_t m = 0; m <= M; m++) {
        if (m < M) {
            append_minibatch(l, c, m, MK_TASK_DISPATCH, w->grid.dispatch, false);
            append_minibatch(l, c, m, MK_TASK_GATE_UP, w->grid.gate_up, m == 0);
        }
        if (m > 0)
            append_minibatch(l, c, m - 1, MK_TASK_DOWN, w->grid.down, false);
    }
}

static void draw_backward(task_list *l, const walk_case *c)
{
    const mk_walk *w = &c->w;
    const mk_piece *pieces = c->m.t.pieces;
    int64_t num_pieces = c->m.head.num_pieces;
    int64_t M = (w->num_tiles + w->mb_tiles - 1) / w->mb_tiles;
    append_shared(l, w, MK_TASK_SHARED_GATE_UP, w->grid.shared_gate_up);
    append_shared(l, w, MK_TASK_SHARED_DGRAD_DOWN, w->grid.shared_dgrad_down);
    append_shared(l, w, MK_TASK_SHARED_DGRAD_GATE_UP, w->grid.shared_dgrad_gate_up);
    append(l, MK_TASK_SHARED_WGRAD, 0, w->grid.shared_wgrad);
    for (int64_t m = 0; m <= M; m++) {
        if (m < M) {
            int64_t end = mk_min((m + 1) * w->mb_tiles, w->num_tiles), replayed = mk_max(m * w->mb_tiles, w->replay_from);
            append_minibatch(l, c, m, MK_TASK_DISPATCH, w->grid.dispatch, false);
            append_groups(l, c, mk_min(replayed, end), end, MK_TASK_GATE_UP, w->grid.gate_up, m == 0);
            append_minibatch(l, c, m, MK_TASK_DGRAD_DOWN, w->grid.dgrad_down, m == 0);
        }
        if (m > 0)
            append_minibatch(l, c, m - 1, MK_TASK_DGRAD_GATE_UP, w->grid.dgrad_gate_up, false);
        for (int64_t p = 0; p < num_pieces && (m > 0 || M == 0); p++)
            if (M == 0 || pieces[p].minibatch == m - 1)
                append(l, MK_TASK_WGRAD, p, w->grid.wgrad);
    }
}

static void check_order(const walk_case *c)
{
    const mk_walk *w = &c->w;
    task_list l = {malloc(sizeof(mk_task) * MAX_TASKS), 0};
    if (w->pass == MK_PASS_BACKWARD)
        draw_backward(&l, c);
    else
        draw_forward(&l, c);
    CHECK(l.count < MAX_TASKS);
    CHECK_EQ(w->num_tasks, l.count);
    for (int64_t i = 0; i < l.count && i < w->num_tasks; i++) {
        mk_task t = mk_walk_task(w, i);
        if (t.kind != l.tasks[i].kind || t.tile != l.tasks[i].tile || t.part != l.tasks[i].part) {
            TEST_FAILED("pass %d, task %lld is kind %d tile %d part %d; drawn is kind %d tile %d part %d", (int)w->pass, (long long)i, (int)t.kind,
                        t.tile, t.part, (int)l.tasks[i].kind, l.tasks[i].tile, l.tasks[i].part);
            break;
        }
    }
    for (int64_t i = w->num_tasks; i < w->num_tasks + 3; i++)
        CHECK_EQ(mk_walk_task(w, i).kind, MK_TASK_NONE);
    CHECK_EQ(mk_walk_task(w, INT64_MAX / 2).kind, MK_TASK_NONE);
    free(l.tasks);
}

/* Whoever draws ascending numbers, with gaps, gets the same tasks. */
static void check_cursor(const mk_walk *w, uint64_t *state)
{
    mk_walk_cursor at = {-1, 0};
    for (int64_t i = test_below(state, 3); i < w->num_tasks + 3; i += 1 + test_below(state, 4)) {
        mk_task got = mk_walk_task_after(w, i, &at), want = mk_walk_task(w, i);
        CHECK(got.kind == want.kind && got.tile == want.tile && got.part == want.part);
    }
}

/* The ranges of all kinds and steps hold every task once, each its own kind. */
static void check_ranges(const mk_walk *w)
{
    int64_t tasks = 0;
    for (int64_t m = 0; m <= w->num_minibatches; m++)
        for (int kind = MK_TASK_NONE + 1; kind < MK_NUM_TASK_KINDS; kind++) {
            int64_t first, end;
            mk_walk_range(w, (mk_task_kind)kind, m, &first, &end);
            for (int64_t i = first; i < end; i++)
                CHECK_EQ(mk_walk_task(w, i).kind, kind);
            tasks += end - first;
        }
    CHECK_EQ(tasks, w->num_tasks);
}

static const mk_pass passes[] = {MK_PASS_FORWARD, MK_PASS_RECOMPUTE, MK_PASS_BACKWARD};

TEST(every_task_once_in_the_drawn_order)
{
    uint64_t state = test_seed();
    int64_t most = 0;
    for (int i = 0; i < 600; i++) {
        walk_case c;
        make_case(&c, &state, passes[i % 3]);
        check_order(&c);
        check_cursor(&c.w, &state);
        check_ranges(&c.w);
        most = mk_max(most, c.w.num_minibatches);
        table_free(&c.m);
    }
    CHECK(most > 4);
}

TEST(kinds_left_out_leave_no_task)
{
    /* grid.dispatch = 0 is how a communication role takes rows out of the walk. */
    uint64_t state = test_seed();
    for (int i = 0; i < 90; i++) {
        walk_case c;
        make_case(&c, &state, passes[i % 3]);
        c.w.grid.dispatch = 0;
        if (i % 2)
            c.w.grid.shared_gate_up = 0;
        mk_walk_count(&c.w);
        check_order(&c);
        table_free(&c.m);
    }
}

/* --- pieces ------------------------------------------------------------------------------------------------------------------- */
static void check_pieces(const made_table *m)
{
    const mk_dims *d = &m->d;
    const mk_piece *pieces = m->t.pieces;
    int64_t count = m->head.num_pieces, tiles = m->head.num_tiles, minibatches = mk_ceil_div(tiles, d->mb_tiles_bwd), tile = 0, last_continued = -1;
    CHECK(count <= MK_MAX_PIECES(d));
    CHECK_EQ(m->t.piece_first[0], 0);
    if (minibatches)
        CHECK_EQ(m->t.piece_first[minibatches], count);
    int32_t expert = -1; /* of the last finished piece */
    for (int64_t i = 0; i < count; i++) {
        const mk_piece *p = &pieces[i];
        int64_t rows = 0;
        CHECK_EQ(p->tile_first, tile); /* so every tile is in exactly one piece, in order */
        for (; tile < p->tile_end; tile++) {
            CHECK_EQ(m->t.piece_of_tile[tile], i);
            CHECK_EQ(mk_expert_of_tile(&m->t, tile), p->expert);
            for (int64_t r = 0; r < MK_ROW_TILE; r++)
                rows += m->t.rows[tile * MK_ROW_TILE + r].src_rank >= 0;
        }
        CHECK_EQ(p->rows, rows);
        CHECK_EQ(p->is_first, p->expert != expert || i == 0);
        if (p->is_first)
            CHECK_EQ(p->expert, expert + 1);
        CHECK_EQ(p->is_last, p->tile_end == m->t.segment_tile[p->expert + 1]);
        expert = p->expert;
        if (!p->is_first) { /* goes on from the piece before it */
            CHECK_EQ(p->after, i - 1);
            CHECK_EQ(pieces[i - 1].expert, p->expert);
            CHECK(!pieces[i - 1].is_last);
            last_continued = i;
        } else { /* needs the one partial sum only if it will be continued itself */
            CHECK_EQ(p->after, p->is_last ? -1 : last_continued);
        }
        CHECK(p->after < i);
        if (!minibatches)
            continue;
        CHECK(p->minibatch >= 0 && p->minibatch < minibatches);
        CHECK(i >= m->t.piece_first[p->minibatch] && i < m->t.piece_first[p->minibatch + 1]);
        CHECK(p->tile_end <= mk_min((p->minibatch + 1) * d->mb_tiles_bwd, tiles)); /* complete when it runs */
        if (p->tile_end > p->tile_first)
            CHECK(p->tile_end > p->minibatch * d->mb_tiles_bwd); /* and runs as soon as it is */
    }
    CHECK_EQ(tile, tiles);
    CHECK_EQ(expert, d->experts_count - 1);
}

TEST(pieces_cover_every_tile_once_and_chain)
{
    uint64_t state = test_seed();
    int64_t cuts = 0, empty = 0, waits = 0;
    for (int i = 0; i < 600; i++) {
        walk_case c;
        make_case(&c, &state, MK_PASS_BACKWARD);
        check_pieces(&c.m);
        for (int32_t p = 0; p < c.m.head.num_pieces; p++) {
            cuts += !c.m.t.pieces[p].is_first;
            empty += c.m.t.pieces[p].rows == 0;
            waits += c.m.t.pieces[p].is_first && c.m.t.pieces[p].after >= 0;
        }
        table_free(&c.m);
    }
    CHECK(cuts > 50);
    CHECK(empty > 50);
    CHECK(waits > 5); /* a second cut expert waits for the partial sum of the first */
}

/* --- deadlock check -------------------------------------------------------------------------------------------------------------- */
static mok_status check_walk(const walk_case *c, int64_t ring_tiles)
{
    mk_check_table table = {c->m.t.rows, c->m.t.pieces, ring_tiles};
    return mk_check_walk(&c->w, &table);
}

TEST(deadlock_check_passes_for_every_legal_ring)
{
    uint64_t state = test_seed();
    int64_t turned = 0;
    for (int i = 0; i < 900; i++) {
        walk_case c;
        make_case(&c, &state, passes[i % 3]);
        if (check_walk(&c, c.m.d.ring_tiles) != MOK_OK)
            TEST_FAILED("ring of %lld tiles, minibatch %lld, pass %d: %s", (long long)c.m.d.ring_tiles, (long long)c.w.mb_tiles, (int)c.w.pass,
                        mok_last_error());
        CHECK_EQ(mk_check_dims(&c.m.d), MOK_OK);
        turned += c.w.num_tiles > c.m.d.ring_tiles;
        table_free(&c.m);
    }
    CHECK(turned > 100);
}

/* Plants: each makes a legal case illegal. Returns false where the case has nothing to plant in. */
static bool plant_small_ring(walk_case *c, mk_check_table *table)
{
    /* One tile less than two minibatches: minibatch 2 begins before minibatch 1 has been followed by the lagging tasks of 0. A
     * recompute has no lagging tasks. Where the first minibatches are full and the walk goes on behind them, this must show. */
    table->ring_tiles = 2 * c->w.mb_tiles - 1;
    bool lags = c->w.grid.down || c->w.grid.dgrad_gate_up || c->w.grid.wgrad;
    return c->w.pass != MK_PASS_RECOMPUTE && lags && c->w.num_minibatches > 3;
}

static bool plant_uncut_piece(walk_case *c, mk_check_table *table)
{
    /* All tiles of a cut expert are read by its last piece: too late for the first ones. */
    mk_piece *pieces = c->m.t.pieces;
    (void)table;
    if (c->w.pass != MK_PASS_BACKWARD || !c->w.grid.wgrad)
        return false;
    for (int32_t p = 1; p < c->m.head.num_pieces; p++) {
        int32_t start = c->m.t.segment_tile[pieces[p].expert];
        if (!pieces[p].is_first && pieces[p].is_last && pieces[p].tile_end - start > c->m.d.ring_tiles) {
            pieces[p].tile_first = start;
            return true;
        }
    }
    return false;
}

static bool plant_far_copy(walk_case *c, mk_check_table *table)
{
    /* A row copies from a tile whose slot has been given away before. */
    int64_t away = table->ring_tiles + c->w.mb_tiles;
    for (int64_t tile = 0; tile + away < c->w.num_tiles; tile++)
        for (int64_t r = 0; r < MK_ROW_TILE; r++) {
            mk_row *low = &c->m.t.rows[tile * MK_ROW_TILE + r], *high = &c->m.t.rows[(tile + away) * MK_ROW_TILE + r];
            if (low->src_rank < 0 || high->src_rank < 0)
                continue;
            if (c->w.pass == MK_PASS_BACKWARD)
                high->copy_bwd = (int32_t)(tile * MK_ROW_TILE + r);
            else
                low->copy_fwd = (int32_t)((tile + away) * MK_ROW_TILE + r);
            return c->w.grid.dispatch > 0;
        }
    return false;
}


static int64_t planted(bool (*plant)(walk_case *, mk_check_table *), const char *name)
{
    uint64_t state = test_seed();
    int64_t found = 0;
    for (int i = 0; i < 900 || (found < 30 && i < 4000); i++) {
        walk_case c;
        make_case(&c, &state, passes[i % 3]);
        mk_check_table table = {c.m.t.rows, c.m.t.pieces, c.m.d.ring_tiles};
        if (plant(&c, &table)) {
            mok_status status = mk_check_walk(&c.w, &table);
            if (status != MOK_E_BUG)
                TEST_FAILED("%s, pass %d, %lld tiles, ring %lld, minibatch %lld: not found (status %d)", name, (int)c.w.pass,
                            (long long)c.w.num_tiles, (long long)table.ring_tiles, (long long)c.w.mb_tiles, (int)status);
            else
                CHECK_STR(mok_last_error(), "deadlock: task ");
            found++;
        }
        table_free(&c.m);
    }
    return found;
}

TEST(deadlock_check_finds_a_ring_below_two_minibatches) { CHECK(planted(plant_small_ring, "small ring") > 20); }
TEST(deadlock_check_finds_an_uncut_weight_gradient) { CHECK(planted(plant_uncut_piece, "uncut piece") > 3); }
TEST(deadlock_check_finds_a_copy_out_of_reach) { CHECK(planted(plant_far_copy, "far copy") > 10); }

TEST(deadlock_check_refuses_dims_with_a_small_ring)
{
    mok_config c = MOK_INIT(mok_config);
    mk_dims d;
    c.hidden = c.intermediate = 64;
    c.num_experts = 8;
    c.topk = 2;
    c.max_tokens = 4096;
    c.minibatch_rows = c.minibatch_rows_bwd = 512;
    c.ring_rows = 1024;
    REQUIRE(mk_resolve(&c, 2, 0, (mk_machine){0, 128, 256, false}, &d) == MOK_OK);
    CHECK_EQ(mk_check_dims(&d), MOK_OK);
    for (d.ring_tiles = 7; d.ring_tiles > 0; d.ring_tiles--) {
        CHECK_EQ(mk_check_dims(&d), MOK_E_BUG);
        CHECK_STR(mok_last_error(), "deadlock");
    }
}

/* --- the walk runs ----------------------------------------------------------------------------------------------------------------
 * A machine that executes tasks without computing: every ring slot of every buffer knows which tile's data it holds. `workers`
 * tasks are in flight at once; tickets are drawn ascending; a task starts when its needs are met and ends at a random time. A
 * task that finds, at its start or at its end, that what it reads is not (any more) its tile's, fails: so do missing needs. */
typedef enum ring_buffer { RING_X, RING_DOUT, RING_GATE, RING_H, NUM_RING_BUFFERS } ring_buffer;
enum { STAGE_NOTHING = 0, STAGE_REPLAYED = 1, STAGE_GRADS = 2 };

typedef struct machine {
    const walk_case *c;
    uint32_t *counters;
    int64_t *owner[NUM_RING_BUFFERS]; /* [ring_tiles] tile, or -1 */
    int64_t *held[NUM_RING_BUFFERS];  /* [ring_tiles] tasks in flight that read the slot */
    int64_t partial_of;               /* piece whose sum is in the partial, -1: none */
    int64_t starved;                  /* starts that had to wait */
} machine;

static uint32_t *counter_at(machine *v, int32_t counter, int64_t index) { return &v->counters[mk_counter_index(&v->c->m.d, counter, index)]; }

static bool needs_met(machine *v, mk_task task)
{
    mk_need needs[MK_MAX_NEEDS];
    const made_table *m = &v->c->m;
    int n = mk_task_needs(&v->c->w, &m->t, &m->d, task, needs);
    CHECK(n <= MK_MAX_NEEDS);
    for (int i = 0; i < n; i++)
        for (int32_t index = needs[i].first; index < needs[i].end; index++)
            if (*counter_at(v, needs[i].counter, index) < needs[i].count)
                return false;
    if (task.kind != MK_TASK_DISPATCH)
        return true;
    /* Row by row a dispatch also waits for the tiles it copies from. */
    for (int64_t r = (int64_t)task.tile * MK_ROW_TILE; r < (task.tile + 1) * (int64_t)MK_ROW_TILE; r++) {
        const mk_row *row = &m->t.rows[r];
        int64_t from = v->c->w.pass == MK_PASS_BACKWARD ? row->copy_bwd : row->copy_fwd, tile = from / MK_ROW_TILE;
        if (row->src_rank < 0 || from < 0 || tile == task.tile || tile >= v->c->w.num_tiles)
            continue;
        int64_t valid = mk_valid_rows(&m->t, tile);
        if (*counter_at(v, MK_COUNTER_s1_rows_arrived, tile) < (uint32_t)valid * (uint32_t)v->c->w.grid.dispatch)
            return false;
    }
    return true;
}

/* What a task reads: calls `visit` for every (buffer, tile). */
static void reads_of(machine *v, mk_task task, void (*visit)(machine *, ring_buffer, int64_t, mk_task))
{
    const mk_walk *w = &v->c->w;
    switch (task.kind) {
    case MK_TASK_GATE_UP: visit(v, RING_X, task.tile, task); break;
    case MK_TASK_DOWN: visit(v, RING_H, task.tile, task); break;
    case MK_TASK_DGRAD_DOWN:
        visit(v, RING_DOUT, task.tile, task);
        if (task.tile >= w->replay_from)
            visit(v, RING_GATE, task.tile, task);
        break;
    case MK_TASK_DGRAD_GATE_UP: visit(v, RING_GATE, task.tile, task); break;
    case MK_TASK_WGRAD:
        for (int64_t t = v->c->m.t.pieces[task.tile].tile_first; t < v->c->m.t.pieces[task.tile].tile_end; t++) {
            visit(v, RING_X, t, task);
            visit(v, RING_DOUT, t, task);
            visit(v, RING_GATE, t, task);
            visit(v, RING_H, t, task);
        }
        break;
    default: break;
    }
}

static void must_own(machine *v, ring_buffer b, int64_t tile, mk_task task)
{
    int64_t slot = tile % v->c->m.d.ring_tiles;
    if (v->owner[b][slot] != tile)
        TEST_FAILED("pass %d: task kind %d tile %d reads tile %lld of buffer %d, but the slot holds tile %lld", (int)v->c->w.pass, (int)task.kind,
                    task.tile, (long long)tile, (int)b, (long long)v->owner[b][slot]);
}

static void start_reading(machine *v, ring_buffer b, int64_t tile, mk_task task)
{
    must_own(v, b, tile, task);
    v->held[b][tile % v->c->m.d.ring_tiles]++;
}

static void stop_reading(machine *v, ring_buffer b, int64_t tile, mk_task task)
{
    must_own(v, b, tile, task);
    v->held[b][tile % v->c->m.d.ring_tiles]--;
}

static void take_slot(machine *v, ring_buffer b, mk_task task)
{
    int64_t slot = task.tile % v->c->m.d.ring_tiles;
    if (v->owner[b][slot] != task.tile && v->held[b][slot])
        TEST_FAILED("pass %d: task kind %d tile %d overwrites tile %lld of buffer %d while it is read", (int)v->c->w.pass, (int)task.kind, task.tile,
                    (long long)v->owner[b][slot], (int)b);
    v->owner[b][slot] = task.tile;
}

static void for_copies(machine *v, mk_task task, void (*visit)(machine *, ring_buffer, int64_t, mk_task), bool count)
{
    bool backward = v->c->w.pass == MK_PASS_BACKWARD;
    for (int64_t r = (int64_t)task.tile * MK_ROW_TILE; r < (task.tile + 1) * (int64_t)MK_ROW_TILE; r++) {
        const mk_row *row = &v->c->m.t.rows[r];
        int64_t from = backward ? row->copy_bwd : row->copy_fwd, tile = from / MK_ROW_TILE;
        if (row->src_rank < 0 || from < 0 || tile >= v->c->w.num_tiles)
            continue;
        if (tile != task.tile) {
            visit(v, RING_X, tile, task);
            if (backward)
                visit(v, RING_DOUT, tile, task);
        }
        if (count && task.part == 0)
            ++*counter_at(v, MK_COUNTER_s1_copies_done, tile);
    }
}

static void start_task(machine *v, mk_task task)
{
    bool backward = v->c->w.pass == MK_PASS_BACKWARD;
    reads_of(v, task, start_reading);
    switch (task.kind) {
    case MK_TASK_DISPATCH:
        for_copies(v, task, start_reading, false);
        take_slot(v, RING_X, task);
        if (backward)
            take_slot(v, RING_DOUT, task);
        break;
    case MK_TASK_GATE_UP:
        if (backward)
            take_slot(v, RING_GATE, task);
        else if (v->c->w.pass == MK_PASS_FORWARD)
            take_slot(v, RING_H, task);
        break;
    case MK_TASK_DGRAD_DOWN:
        take_slot(v, RING_GATE, task);
        take_slot(v, RING_H, task);
        break;
    case MK_TASK_WGRAD: {
        /* Parts of a piece share the partial: the first to start takes it, all find it theirs. */
        const mk_piece *p = &v->c->m.t.pieces[task.tile];
        if (!p->is_first || !p->is_last) {
            bool mine = v->partial_of == task.tile, next = p->is_first ? v->partial_of == -1 : v->partial_of == task.tile - 1;
            if (!mine && !next)
                TEST_FAILED("piece %d takes the partial sum of piece %lld", task.tile, (long long)v->partial_of);
            v->partial_of = task.tile;
        }
        break;
    }
    default: break;
    }
}

static void finish_task(machine *v, mk_task task)
{
    const made_table *m = &v->c->m;
    reads_of(v, task, stop_reading);
    if (task.kind == MK_TASK_DISPATCH)
        for_copies(v, task, stop_reading, true);
    int counter = mk_task_counter(task.kind);
    if (counter < 0)
        return;
    uint32_t amount = v->c->w.grid.raises > 1 ? (uint32_t)v->c->w.grid.raises : 1; /* a GEMM task's */
    if (task.kind == MK_TASK_DISPATCH)
        amount = (uint32_t)mk_valid_rows(&m->t, task.tile);
    *counter_at(v, counter, task.tile) += amount;
    if (task.kind == MK_TASK_WGRAD && m->t.pieces[task.tile].is_last && *counter_at(v, counter, task.tile) == (uint32_t)v->c->w.grid.wgrad * amount &&
        v->partial_of == task.tile)
        v->partial_of = -1;
}

/* Runs all tasks; false on a deadlock. */
static bool run_machine(const walk_case *c, int workers, uint64_t *state)
{
    const mk_dims *d = &c->m.d;
    machine v = {.c = c, .partial_of = -1};
    int64_t counters = MK_NUM_TILE_COUNTERS * d->capacity_tiles + MK_MAX_PIECES(d) + MK_NUM_SHARED_COUNTERS * (MK_SHARED_TILES(d) + 8) + 8;
    v.counters = calloc((size_t)counters, sizeof *v.counters);
    for (int b = 0; b < NUM_RING_BUFFERS; b++) {
        v.owner[b] = malloc(sizeof(int64_t) * (size_t)d->ring_tiles);
        v.held[b] = calloc((size_t)d->ring_tiles, sizeof(int64_t));
        for (int64_t s = 0; s < d->ring_tiles; s++)
            v.owner[b][s] = -1;
    }
    enum { MAX_WORKERS = 16 };
    struct { mk_task task; bool running; } seat[MAX_WORKERS];
    int64_t ticket = 0, done = 0, stuck = 0;
    for (int i = 0; i < workers; i++)
        seat[i].task = mk_walk_task(&c->w, ticket++), seat[i].running = false;
    while (done < c->w.num_tasks && stuck < 1) {
        bool moved = false;
        int first = (int)test_below(state, workers);
        for (int j = 0; j < workers; j++) {
            int i = (first + j) % workers;
            if (seat[i].task.kind == MK_TASK_NONE)
                continue;
            if (!seat[i].running) {
                if (!needs_met(&v, seat[i].task)) {
                    v.starved++;
                    continue;
                }
                start_task(&v, seat[i].task);
                seat[i].running = moved = true;
            } else if (workers == 1 || test_below(state, 3) == 0) {
                finish_task(&v, seat[i].task);
                seat[i].task = mk_walk_task(&c->w, ticket++);
                seat[i].running = false;
                done++;
                moved = true;
            } else {
                moved = true; /* time passes */
            }
        }
        stuck = !moved;
    }
    if (stuck) {
        mk_task t = seat[0].task;
        TEST_FAILED("%d workers, pass %d: nobody can go on after %lld of %lld tasks; seat 0 has kind %d tile %d", workers, (int)c->w.pass,
                    (long long)done, (long long)c->w.num_tasks, (int)t.kind, t.tile);
    }
    if (workers == 1)
        CHECK_EQ(v.starved, 0); /* in ticket order every need is met: a task waits for smaller numbers only */
    free(v.counters);
    for (int b = 0; b < NUM_RING_BUFFERS; b++) {
        free(v.owner[b]);
        free(v.held[b]);
    }
    return !stuck;
}

static void run_cases(int workers_from, int workers_to, int cases)
{
    uint64_t state = test_seed();
    int64_t turned = 0, copied = 0;
    for (int i = 0; i < cases && !test_failures; i++) {
        walk_case c;
        make_case(&c, &state, passes[i % 3]);
        c.w.grid.dispatch = 1; /* the CPU's: a tile's rows come at once */
        c.w.shared_tiles = mk_min(c.w.shared_tiles, MK_SHARED_TILES(&c.m.d));
        mk_walk_count(&c.w);
        run_machine(&c, workers_from + (int)test_below(&state, workers_to - workers_from + 1), &state);
        turned += c.w.num_tiles > c.m.d.ring_tiles;
        copied += c.m.head.rows_copied_bwd;
        table_free(&c.m);
    }
    CHECK(turned > cases / 20);
    CHECK(copied > cases);
}

TEST(one_worker_never_waits_and_reads_what_it_should) { run_cases(1, 1, 400); }
TEST(many_workers_never_read_or_overwrite_too_early) { run_cases(2, 16, 600); }

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
