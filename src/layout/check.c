#include "layout/check.h"

#include <stdlib.h>

#include "base/error.h"
#include "layout/pieces.h"

static const char *task_name(mk_task_kind kind)
{
    static const char *const names[] = {
#define NAME(upper, lower) #lower,
        MK_TASK_LIST(NAME)
#undef NAME
    };
    return names[kind];
}

/* Per table tile: the first task that writes or waits for its new rows, the last one that reads them. */
typedef struct { int64_t first_waiter, last_reader; } tile_span;

static void widen(tile_span *span, int64_t number)
{
    span->first_waiter = mk_min(span->first_waiter, number);
    span->last_reader = mk_max(span->last_reader, number);
}

static void note_copies(const mk_walk *w, const mk_row *rows, int64_t tile, int64_t number, tile_span *spans)
{
    for (int64_t r = tile * MK_ROW_TILE; r < (tile + 1) * MK_ROW_TILE; r++) {
        int32_t from = w->pass == MK_PASS_BACKWARD ? rows[r].copy_bwd : rows[r].copy_fwd;
        if (rows[r].src_rank >= 0 && from >= 0 && from / MK_ROW_TILE < w->num_tiles)
            spans[from / MK_ROW_TILE].last_reader = mk_max(spans[from / MK_ROW_TILE].last_reader, number);
    }
}

static mok_status check_spans(const mk_walk *w, int64_t ring_tiles, const tile_span *spans)
{
    int64_t step = w->pass == MK_PASS_BACKWARD ? -ring_tiles : ring_tiles;
    for (int64_t t = 0; t < w->num_tiles; t++) {
        int64_t old = t + step; /* whose rows the slot held before */
        if (old < 0 || old >= w->num_tiles || spans[old].last_reader < spans[t].first_waiter)
            continue;
        mk_task waiter = mk_walk_task(w, spans[t].first_waiter), reader = mk_walk_task(w, spans[old].last_reader);
        return mk_fail(MOK_E_BUG, "deadlock: task %lld (%s, tile %d) waits for the slot of tile %lld, which task %lld (%s %d) still reads",
                       (long long)spans[t].first_waiter, task_name(waiter.kind), waiter.tile, (long long)old,
                       (long long)spans[old].last_reader, task_name(reader.kind), reader.tile);
    }
    return MOK_OK;
}

mok_status mk_check_walk(const mk_walk *w, const mk_check_table *table)
{
    tile_span *spans = malloc(sizeof *spans * (size_t)mk_max(w->num_tiles, 1));
    if (!spans)
        return mk_fail(MOK_E_MEMORY, "no memory to check a walk over %lld tiles", (long long)w->num_tiles);
    for (int64_t t = 0; t < w->num_tiles; t++)
        spans[t] = (tile_span){INT64_MAX, -1};
    mok_status status = MOK_OK;
    for (int64_t number = w->shared_tasks; number < w->num_tasks; number++) {
        mk_task task = mk_walk_task(w, number);
        if (task.kind == MK_TASK_WGRAD) {
            const mk_piece *piece = &table->pieces[task.tile];
            for (int64_t t = piece->tile_first; t < piece->tile_end; t++)
                spans[t].last_reader = mk_max(spans[t].last_reader, number);
            continue;
        }
        if (task.tile < 0 || task.tile >= w->num_tiles) {
            status = mk_fail(MOK_E_BUG, "task %lld (%s) is of tile %d; the table has %lld", (long long)number, task_name(task.kind),
                             task.tile, (long long)w->num_tiles);
            break;
        }
        widen(&spans[task.tile], number);
        if (task.kind == MK_TASK_DISPATCH && table->rows)
            note_copies(w, table->rows, task.tile, number, spans);
    }
    if (status == MOK_OK)
        status = check_spans(w, table->ring_tiles, spans);
    free(spans);
    return status;
}

static mok_status check_segments(const mk_dims *d, const int32_t *segment_tile, const int32_t *segment_rows)
{
    int64_t tiles = segment_tile[d->experts_count], minibatches = mk_ceil_div(tiles, d->mb_tiles_bwd);
    mk_grid one = {.dispatch = 1, .gate_up = 1, .down = 1, .dgrad_down = 1, .dgrad_gate_up = 1, .wgrad = 1};
    mk_piece *pieces = malloc(sizeof *pieces * (size_t)(d->experts_count + minibatches + 1));
    int32_t *piece_of_tile = malloc(sizeof *piece_of_tile * (size_t)(tiles + 1));
    int32_t *piece_first = malloc(sizeof *piece_first * (size_t)(minibatches + 1));
    mok_status status = MOK_OK;
    if (!pieces || !piece_of_tile || !piece_first) {
        status = mk_fail(MOK_E_MEMORY, "no memory to check a table of %lld tiles", (long long)tiles);
        goto done;
    }
    mk_piece_plan plan = {segment_tile, segment_rows, d->experts_count, tiles, d->mb_tiles_bwd, d->ring_tiles, pieces, piece_of_tile, piece_first, NULL, -1, 0, 0};
    int64_t num_pieces = mk_build_pieces(&plan);
    for (int backward = 0; backward < 2 && status == MOK_OK; backward++) {
        mk_walk walk = {.pass = backward ? MK_PASS_BACKWARD : MK_PASS_FORWARD, .grid = one, .num_tiles = tiles,
                        .mb_tiles = backward ? d->mb_tiles_bwd : d->mb_tiles_fwd, .piece_first = piece_first, .num_pieces = num_pieces};
        if (backward)
            walk.grid.down = 0;
        else
            walk.grid.dgrad_down = walk.grid.dgrad_gate_up = walk.grid.wgrad = 0;
        mk_walk_count(&walk);
        mk_check_table table = {NULL, pieces, d->ring_tiles};
        status = mk_check_walk(&walk, &table);
    }
done:
    free(pieces);
    free(piece_of_tile);
    free(piece_first);
    return status;
}

mok_status mk_check_dims(const mk_dims *d)
{
    int64_t experts = d->experts_count, tiles = mk_min(d->capacity_tiles, mk_max(8 * d->ring_tiles, 4096));
    int32_t *tile = malloc(sizeof *tile * (size_t)(experts + 1)), *rows = malloc(sizeof *rows * (size_t)(experts + 1));
    mok_status status = tile && rows ? MOK_OK : mk_fail(MOK_E_MEMORY, "no memory for %lld experts", (long long)experts);
    for (int shape = 0; shape < 3 && experts && status == MOK_OK; shape++) {
        tile[0] = 0;
        for (int64_t e = 0; e < experts; e++) {
            int64_t share = tiles / experts;
            int64_t of_expert = shape == 0 ? share : shape == 1 ? (e == experts / 2 ? tiles : 0) : (e % 2 ? 2 * share : 0);
            rows[e] = (int32_t)(of_expert * MK_ROW_TILE);
            tile[e + 1] = tile[e] + (int32_t)of_expert;
        }
        status = check_segments(d, tile, rows);
    }
    free(tile);
    free(rows);
    return status;
}
