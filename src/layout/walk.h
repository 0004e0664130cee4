/* The walk: which task comes next. Host, device roles, CPU backend, the deadlock check and the tools all decode task numbers
 * here. Numbers are handed out ascending by a ticket; a task waits only for tasks with smaller numbers (and, where a
 * communication role moves rows outside the walk, grid.dispatch = 0, for that role).
 *
 * A minibatch is mb_tiles tiles that follow each other in the walk; only its last one may be shorter. Where these are whole waves of tasks (layout/config.c),
 * clusters stay in step from one minibatch to the next, and read the same operands at the same time.
 *
 * Forward, from the table's end to its start, with a lag of one minibatch between gate/up and down:
 *
 *   shared gate_up, shared down,
 *   [dispatch 0][gate_up 0]  [dispatch 1][gate_up 1][down 0]  …  [dispatch M-1][gate_up M-1][down M-2]  [down M-1]
 *
 * Recompute: the same without down, over the minibatches that hold saved rows.
 * Backward, from the table's start to its end, again with a lag of one:
 *
 *   shared gate_up (if not saved), shared dgrad_down, shared dgrad_gate_up, shared wgrad,
 *   [dispatch 0][gate_up 0: rows not saved][dgrad_down 0]  [dispatch 1][gate_up 1][dgrad_down 1][dgrad_gate_up 0][wgrad 0] …
 *
 * Inside a minibatch the forward takes tiles in descending order, the backward ascending, so that "earlier in the walk" is
 * one direction of the table everywhere. GEMM tasks of a minibatch come in groups of at most grid.group_tiles tiles: for each part, the group's
 * tiles. A group's tiles are of one expert: they share weights in a cache, where those of two experts would only share the room (docs/performance.md, "Groups
 * of one expert"). What a minibatch has of an expert is cut into equal groups. A pass begins with smaller ones, because nobody has anything else to do until
 * their rows are there: its first tiles, half a group of them, have groups of their own, or, in the backward, where rows take twice as long, the first minibatch has groups of a quarter.
 *
 * Why it cannot deadlock: a task of minibatch m overwrites ring slots of tiles that lie ring_tiles before it. With a ring of two
 * minibatches or more these belong to minibatch m-2 or earlier, whose last readers (down, dgrad_gate_up, wgrad) come before
 * the first task of m, because the lag is one; a weight-gradient piece is cut (mk_must_cut) before it could reach further
 * back. layout/check.h verifies this on real tables. */
#ifndef MK_LAYOUT_WALK_H
#define MK_LAYOUT_WALK_H

#include "layout/dims.h"
#include "layout/table.h"

#define MK_TASK_LIST(X)                                                                                   \
    X(NONE, none)                                                                                         \
    X(SHARED_GATE_UP, shared_gate_up)                                                                     \
    X(SHARED_DOWN, shared_down)                                                                           \
    X(SHARED_DGRAD_DOWN, shared_dgrad_down)                                                               \
    X(SHARED_DGRAD_GATE_UP, shared_dgrad_gate_up)                                                         \
    X(SHARED_WGRAD, shared_wgrad)                                                                         \
    X(DISPATCH, dispatch)                                                                                 \
    X(GATE_UP, gate_up)                                                                                   \
    X(DOWN, down)                                                                                         \
    X(DGRAD_DOWN, dgrad_down)                                                                             \
    X(DGRAD_GATE_UP, dgrad_gate_up)                                                                       \
    X(WGRAD, wgrad)

typedef enum mk_task_kind {
#define MK_TASK_ENUM(upper, lower) MK_TASK_##upper,
    MK_TASK_LIST(MK_TASK_ENUM)
#undef MK_TASK_ENUM
    MK_NUM_TASK_KINDS
} mk_task_kind;

/* Tasks per unit: how a backend cuts the work. 0 leaves a kind out of the walk. */
typedef struct mk_grid {
    int32_t shared_gate_up, shared_down, shared_dgrad_down, shared_dgrad_gate_up; /* per tile of the shared expert */
    int32_t shared_wgrad;                                                         /* in all */
    int32_t dispatch, gate_up, down, dgrad_down, dgrad_gate_up;                   /* per table tile */
    int32_t wgrad;                                                                /* per piece */
    int32_t group_tiles; /* at most so many tiles of an expert take turns at each part; 0 stands for 1 */
    int32_t wgrad_waits; /* 1: dgrad_gate_up also makes the weight gradients' operands of its tile */
    int32_t raises;      /* how often one finished GEMM task raises its counter (CTAs x warps on a GPU); 0 stands for 1 */
} mk_grid;

typedef struct mk_task {
    mk_task_kind kind;
    int32_t tile;  /* table tile; tile of the shared expert; piece for WGRAD */
    int32_t part;  /* which of the unit's tasks: 0 .. grid - 1 */
} mk_task;

typedef enum mk_pass { MK_PASS_FORWARD, MK_PASS_RECOMPUTE, MK_PASS_BACKWARD } mk_pass;

/* One pass on one rank. num_tiles: of the table (forward, backward) or of its saved part (recompute). */
typedef struct mk_walk {
    mk_pass pass;
    mk_grid grid;
    int64_t num_tiles, mb_tiles, num_minibatches;
    int64_t replay_from;          /* backward: gate_up tasks exist for tiles from here on */
    const mk_tile *tiles;         /* [num_tiles] of the table; may be NULL where group_tiles is at most 1 */
    int64_t shared_tiles;
    const int32_t *piece_first;   /* backward: [num_minibatches + 1] first piece of each minibatch */
    int64_t num_pieces;
    int64_t shared_tasks, num_tasks;
} mk_walk;

/* grid.group_tiles of who shares weights in a cache: what a wave of tasks reads is least where a group has about as many tiles as the wave's columns have
 * tiles' widths (132 SMs: 11 x 6), and longer groups read the weights less often. */
enum { MK_GROUP_TILES = 16 };

/* Tiles [*first, *end) of the walk's step m. */
MK_FN void mk_walk_minibatch(const mk_walk *w, int64_t m, int64_t *first, int64_t *end)
{
    int64_t behind = m * w->mb_tiles, reached = mk_min(behind + w->mb_tiles, w->num_tiles); /* tiles of the walk */
    int backward = w->pass == MK_PASS_BACKWARD;
    *first = backward ? behind : w->num_tiles - reached;
    *end = backward ? reached : w->num_tiles - behind;
}

/* Replayed tiles below tile `end`. */
MK_FN int64_t mk_walk_replayed(const mk_walk *w, int64_t end) { return end > w->replay_from ? end - w->replay_from : 0; }

/* Tasks of everything that comes before step m's dispatch; m = num_minibatches + 1 counts all (the last step holds only what lags). O(1). */
MK_FN int64_t mk_walk_before_step(const mk_walk *w, int64_t m)
{
    const mk_grid *g = &w->grid;
    int64_t lag_steps = mk_max(m - 1, 0), tasks = w->shared_tasks;
    int64_t lead = mk_min(m * w->mb_tiles, w->num_tiles), lag = mk_min(lag_steps * w->mb_tiles, w->num_tiles); /* tiles whose leading and lagging tasks come before step m */
    if (w->pass == MK_PASS_BACKWARD) {
        tasks += lead * (g->dispatch + g->dgrad_down) + mk_walk_replayed(w, lead) * g->gate_up;
        tasks += lag * g->dgrad_gate_up;
        if (g->wgrad)
            tasks += (int64_t)w->piece_first[mk_min(lag_steps, w->num_minibatches)] * g->wgrad;
        return tasks;
    }
    return tasks + lead * (g->dispatch + g->gate_up) + lag * g->down;
}

MK_FN void mk_walk_count(mk_walk *w)
{
    const mk_grid *g = &w->grid;
    w->num_minibatches = mk_ceil_div(w->num_tiles, w->mb_tiles);
    /* The shared expert's weight gradients exist without a token too: they are zeros then. */
    w->shared_tasks = w->shared_tiles * (g->shared_gate_up + g->shared_down + g->shared_dgrad_down + g->shared_dgrad_gate_up) +
                      g->shared_wgrad;
    w->num_tasks = mk_walk_before_step(w, w->num_minibatches + 1);
    /* Pieces of experts without rows hang on the last minibatch; a table without any tile has no minibatch to hang them on. */
    if (w->pass == MK_PASS_BACKWARD && w->num_minibatches == 0)
        w->num_tasks = w->shared_tasks + w->num_pieces * g->wgrad;
}

/* Cuts `count` units of `grid` tasks off the number; true if it lies in them. */
MK_FN int mk_walk_take(int64_t *number, int64_t count, int32_t grid, int64_t *unit, int32_t *part)
{
    int64_t tasks = count * grid;
    if (*number >= tasks) {
        *number -= tasks;
        return 0;
    }
    *unit = *number / grid;
    *part = (int32_t)(*number % grid);
    return 1;
}

/* Tiles that take turns at each part: positions [first, first + tiles) among those of a step, as the walk meets them. */
typedef struct mk_group { uint32_t first, tiles; } mk_group;

/* The group that position `at` of [first, end) is in, if these are cut into equal groups of at most `most`. */
MK_FN mk_group mk_walk_cut(uint32_t first, uint32_t end, uint32_t most, uint32_t at)
{
    uint32_t groups = (end - first + most - 1) / most, size = (end - first + groups - 1) / groups;
    mk_group g;
    g.first = first + (at - first) / size * size;
    g.tiles = end - g.first < size ? end - g.first : size;
    return g;
}

/* The same of table tiles [first, end), cut where experts change. begins: the pass does, with these. */
MK_FN mk_group mk_walk_group(const mk_walk *w, int64_t first, int64_t end, uint32_t at, int begins)
{
    int backward = w->pass == MK_PASS_BACKWARD;
    uint32_t most = w->grid.group_tiles > 1 ? (uint32_t)w->grid.group_tiles : 1, from, to, lead = begins && !backward ? most / 2 : 0;
    mk_tile tile;
    if (most == 1)
        return mk_walk_cut(at, at + 1, 1, at);
    tile = w->tiles[backward ? first + at : end - 1 - at];
    from = (uint32_t)(backward ? mk_max(tile.segment_first - first, 0) : mk_max(end - tile.segment_end, 0));
    to = (uint32_t)(backward ? mk_min(tile.segment_end, end) - first : end - mk_max(tile.segment_first, first));
    if (begins && backward)
        most = most < 8 ? 1 : most / 4;
    if (at < lead)
        to = to < lead ? to : lead;
    else
        from = from < lead ? lead : from;
    return mk_walk_cut(from, to, most, at);
}

/* Task n of those of a group, and of all groups before it, of `grid` tasks for each tile: position of its tile, and which of the tile's. Parts go through the tiles up and
 * down in turn: so tasks with neighbouring numbers share weights or rows, and two CTAs that take one each load those once. */
MK_FN void mk_walk_turn(mk_group g, uint32_t n, int32_t grid, int64_t *unit, int32_t *part)
{
    uint32_t turn, at;
    n -= g.first * (uint32_t)grid;
    turn = n / g.tiles;
    at = n % g.tiles;
    *unit = g.first + (turn % 2 ? g.tiles - 1 - at : at);
    *part = (int32_t)turn;
}

/* As mk_walk_take, for GEMM tasks of table tiles [first, end). Inside a step numbers fit 31 bits (layout/config.c bounds the minibatch). */
MK_FN int mk_walk_take_grouped(const mk_walk *w, int64_t *number, int64_t first, int64_t end, int32_t grid, int begins, int64_t *unit, int32_t *part)
{
    int64_t tasks = mk_max(end - first, 0) * grid;
    uint32_t n;
    if (*number >= tasks) {
        *number -= tasks;
        return 0;
    }
    n = (uint32_t)*number;
    mk_walk_turn(mk_walk_group(w, first, end, n / (uint32_t)grid, begins), n, grid, unit, part);
    return 1;
}

/* As mk_walk_take, for GEMM tasks of the shared expert. */
MK_FN int mk_walk_take_shared(const mk_walk *w, int64_t *number, int32_t grid, int64_t *unit, int32_t *part)
{
    uint32_t n = (uint32_t)*number, most = w->grid.group_tiles > 1 ? (uint32_t)w->grid.group_tiles : 1;
    if (*number >= w->shared_tiles * grid) {
        *number -= w->shared_tiles * grid;
        return 0;
    }
    mk_walk_turn(mk_walk_cut(0, (uint32_t)w->shared_tiles, most, n / (uint32_t)grid), n, grid, unit, part);
    return 1;
}

MK_FN mk_task mk_task_make(mk_task_kind kind, int64_t tile, int32_t part)
{
    mk_task t;
    t.kind = kind;
    t.tile = (int32_t)tile;
    t.part = part;
    return t;
}

MK_FN mk_task mk_walk_shared_task(const mk_walk *w, int64_t number)
{
    const mk_grid *g = &w->grid;
    int64_t unit = 0;
    int32_t part = 0;
    if (mk_walk_take_shared(w, &number, g->shared_gate_up, &unit, &part))
        return mk_task_make(MK_TASK_SHARED_GATE_UP, unit, part);
    if (mk_walk_take_shared(w, &number, g->shared_down, &unit, &part))
        return mk_task_make(MK_TASK_SHARED_DOWN, unit, part);
    if (mk_walk_take_shared(w, &number, g->shared_dgrad_down, &unit, &part))
        return mk_task_make(MK_TASK_SHARED_DGRAD_DOWN, unit, part);
    if (mk_walk_take_shared(w, &number, g->shared_dgrad_gate_up, &unit, &part))
        return mk_task_make(MK_TASK_SHARED_DGRAD_GATE_UP, unit, part);
    return mk_task_make(MK_TASK_SHARED_WGRAD, 0, (int32_t)number);
}

/* Step m with before(m) <= number < before(m + 1): O(1) in the forward, whose steps are alike but for the first and the last two, else O(log minibatches). */
MK_FN int64_t mk_walk_step(const mk_walk *w, int64_t number)
{
    int64_t low = 0, high = w->num_minibatches + 1;
    if (w->pass != MK_PASS_BACKWARD && high > 2) {
        int64_t second = mk_walk_before_step(w, 1), each = w->mb_tiles * (w->grid.dispatch + w->grid.gate_up + w->grid.down);
        if (number >= mk_walk_before_step(w, w->num_minibatches))
            return w->num_minibatches;
        return number < second ? 0 : 1 + (number - second) / each;
    }
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (mk_walk_before_step(w, middle) <= number)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The task with this number, at least shared_tasks and below num_tasks, which is in step m: before(m) <= number < before(m + 1). */
MK_FN mk_task mk_walk_task_in_step(const mk_walk *w, int64_t number, int64_t m)
{
    const mk_grid *g = &w->grid;
    int64_t lead_first = 0, lead_end = 0, lag_first = 0, lag_end = 0, unit = 0;
    int32_t part = 0;
    int backward = w->pass == MK_PASS_BACKWARD;
    number -= mk_walk_before_step(w, m);
    if (m < w->num_minibatches)
        mk_walk_minibatch(w, m, &lead_first, &lead_end);
    if (m > 0)
        mk_walk_minibatch(w, m - 1, &lag_first, &lag_end);
#define MK_TILE_AT(first, end) (backward ? (first) + unit : (end) - 1 - unit)
    if (mk_walk_take(&number, lead_end - lead_first, g->dispatch, &unit, &part))
        return mk_task_make(MK_TASK_DISPATCH, MK_TILE_AT(lead_first, lead_end), part);
    if (!backward) {
        if (mk_walk_take_grouped(w, &number, lead_first, lead_end, g->gate_up, m == 0, &unit, &part))
            return mk_task_make(MK_TASK_GATE_UP, MK_TILE_AT(lead_first, lead_end), part);
        mk_walk_take_grouped(w, &number, lag_first, lag_end, g->down, 0, &unit, &part);
        return mk_task_make(MK_TASK_DOWN, MK_TILE_AT(lag_first, lag_end), part);
    }
    int64_t replay_first = mk_max(lead_first, w->replay_from);
    if (mk_walk_take_grouped(w, &number, replay_first, lead_end, g->gate_up, m == 0, &unit, &part))
        return mk_task_make(MK_TASK_GATE_UP, replay_first + unit, part);
    if (mk_walk_take_grouped(w, &number, lead_first, lead_end, g->dgrad_down, m == 0, &unit, &part))
        return mk_task_make(MK_TASK_DGRAD_DOWN, lead_first + unit, part);
    if (mk_walk_take_grouped(w, &number, lag_first, lag_end, g->dgrad_gate_up, 0, &unit, &part))
        return mk_task_make(MK_TASK_DGRAD_GATE_UP, lag_first + unit, part);
#undef MK_TILE_AT
    int64_t piece = m > 0 ? w->piece_first[m - 1] : 0;
    if (number >> 32) /* a last step on which very many experts without rows hang; 64-bit divisions are slow on a GPU */
        return mk_task_make(MK_TASK_WGRAD, piece + number / g->wgrad, (int32_t)(number % g->wgrad));
    return mk_task_make(MK_TASK_WGRAD, piece + (uint32_t)number / (uint32_t)g->wgrad, (int32_t)((uint32_t)number % (uint32_t)g->wgrad));
}

/* The task with this number; kind NONE at num_tasks and beyond. */
MK_FN mk_task mk_walk_task(const mk_walk *w, int64_t number)
{
    if (number >= w->num_tasks)
        return mk_task_make(MK_TASK_NONE, 0, 0);
    if (number < w->shared_tasks)
        return mk_walk_shared_task(w, number);
    return mk_walk_task_in_step(w, number, mk_walk_step(w, number));
}

/* The same for one who asks for ascending numbers: remembers the step of the last one. Starts as {-1, 0}. */
typedef struct mk_walk_cursor { int64_t step, end; } mk_walk_cursor;
MK_FN mk_task mk_walk_task_after(const mk_walk *w, int64_t number, mk_walk_cursor *at)
{
    if (number >= w->num_tasks)
        return mk_task_make(MK_TASK_NONE, 0, 0);
    if (number < w->shared_tasks)
        return mk_walk_shared_task(w, number);
    while (number >= at->end) {
        at->step++;
        at->end = at->step >= w->num_minibatches ? w->num_tasks : mk_walk_before_step(w, at->step + 1);
    }
    return mk_walk_task_in_step(w, number, at->step);
}

/* The numbers [*first, *end) of one kind's tasks in step m (shared kinds: m = 0), which are neighbours. What lags belongs to the step in
 * which it runs. For those who run a pass stage by stage. */
MK_FN void mk_walk_range(const mk_walk *w, mk_task_kind kind, int64_t m, int64_t *first, int64_t *end)
{
    const mk_grid *g = &w->grid;
    int64_t n = w->shared_tiles, at = 0, lead_first = 0, lead_end = 0, lag_first = 0, lag_end = 0, tasks = 0;
    *first = *end = 0;
#define MK_RUN(run_kind, count)           \
    if (kind == (run_kind)) {             \
        *first = at;                      \
        *end = at + (count);              \
        return;                           \
    }                                     \
    at += (count)
    if (m == 0) {
        MK_RUN(MK_TASK_SHARED_GATE_UP, n * g->shared_gate_up);
        MK_RUN(MK_TASK_SHARED_DOWN, n * g->shared_down);
        MK_RUN(MK_TASK_SHARED_DGRAD_DOWN, n * g->shared_dgrad_down);
        MK_RUN(MK_TASK_SHARED_DGRAD_GATE_UP, n * g->shared_dgrad_gate_up);
        MK_RUN(MK_TASK_SHARED_WGRAD, (int64_t)g->shared_wgrad);
    }
    if (m > w->num_minibatches)
        return;
    at = mk_walk_before_step(w, m);
    tasks = (m < w->num_minibatches ? mk_walk_before_step(w, m + 1) : w->num_tasks) - at;
    if (m < w->num_minibatches)
        mk_walk_minibatch(w, m, &lead_first, &lead_end);
    if (m > 0)
        mk_walk_minibatch(w, m - 1, &lag_first, &lag_end);
    MK_RUN(MK_TASK_DISPATCH, (lead_end - lead_first) * g->dispatch);
    if (w->pass != MK_PASS_BACKWARD) {
        MK_RUN(MK_TASK_GATE_UP, (lead_end - lead_first) * g->gate_up);
        MK_RUN(MK_TASK_DOWN, (lag_end - lag_first) * g->down);
        return;
    }
    MK_RUN(MK_TASK_GATE_UP, mk_max(lead_end - mk_max(lead_first, w->replay_from), 0) * g->gate_up);
    MK_RUN(MK_TASK_DGRAD_DOWN, (lead_end - lead_first) * g->dgrad_down);
    MK_RUN(MK_TASK_DGRAD_GATE_UP, (lag_end - lag_first) * g->dgrad_gate_up);
    MK_RUN(MK_TASK_WGRAD, mk_walk_before_step(w, m) + tasks - at); /* the rest */
#undef MK_RUN
}

#endif
