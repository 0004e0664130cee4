/* Who waits for what: the counts a task needs before it may run, and the counter it raises when it is done. One definition for the
 * CPU backend, the device roles, the emulator's deadlock report and the tools. */
#ifndef MK_LAYOUT_DEPEND_H
#define MK_LAYOUT_DEPEND_H

#include "layout/counters.h"
#include "layout/view.h"
#include "layout/walk.h"

/* Every one of counter[first .. end) must have reached `count`. */
typedef struct mk_need {
    int32_t counter, first, end;
    uint32_t count;
} mk_need;

enum { MK_MAX_NEEDS = 6 };

MK_FN void mk_need_add(mk_need *needs, int *n, int32_t counter, int64_t first, int64_t end, int64_t count)
{
    if (count <= 0 || first >= end)
        return;
    needs[*n].counter = counter;
    needs[*n].first = (int32_t)first;
    needs[*n].end = (int32_t)end;
    needs[(*n)++].count = (uint32_t)count;
}

MK_FN int mk_is_replayed(const mk_walk *w, int64_t tile) { return w->pass == MK_PASS_BACKWARD && tile >= w->replay_from; }

/* The tile whose rows the slot of `tile` held before, or -1. */
MK_FN int64_t mk_tile_before(const mk_walk *w, int64_t ring_tiles, int64_t tile)
{
    int64_t old = w->pass == MK_PASS_BACKWARD ? tile - ring_tiles : tile + ring_tiles;
    return old >= 0 && old < w->num_tiles ? old : -1;
}

/* dispatch overwrites the x (and dout) rows of the slot's old tile: all its readers must be done. */
MK_FN void mk_dispatch_needs(const mk_walk *w, const mk_table *t, int64_t old, mk_need *needs, int *n)
{
    if (w->pass != MK_PASS_BACKWARD) {
        mk_need_add(needs, n, MK_COUNTER_s1_copies_done, old, old + 1, t->copies_out_fwd[old]);
        mk_need_add(needs, n, MK_COUNTER_s2_tasks_done, old, old + 1, w->grid.gate_up);
        return;
    }
    mk_need_add(needs, n, MK_COUNTER_s1_copies_done, old, old + 1, t->copies_out_bwd[old]);
    mk_need_add(needs, n, MK_COUNTER_s2_tasks_done, old, old + 1, mk_is_replayed(w, old) ? w->grid.gate_up : 0);
    mk_need_add(needs, n, MK_COUNTER_s4_bwd_tasks_done, old, old + 1, w->grid.dgrad_down);
    mk_need_add(needs, n, MK_COUNTER_s2_bwd_tasks_done, old, old + 1, w->grid.dgrad_gate_up);
    mk_need_add(needs, n, MK_COUNTER_wgrad_tasks_done, t->piece_of_tile[old], t->piece_of_tile[old] + 1, w->grid.wgrad);
}

/* A tile's rows have all arrived. */
MK_FN void mk_need_rows(const mk_table *t, int64_t experts_count, int64_t tile, mk_need *needs, int *n)
{
    mk_need_add(needs, n, MK_COUNTER_s1_rows_arrived, tile, tile + 1, mk_valid_rows(t, mk_expert_of_tile(t, experts_count, tile), tile));
}

/* Fills at most MK_MAX_NEEDS needs; returns their number. A dispatch also waits, row by row, for the tiles it copies from. */
MK_FN int mk_task_needs(const mk_walk *w, const mk_table *t, const mk_dims *d, mk_task task, mk_need *needs)
{
    const mk_grid *g = &w->grid;
    int n = 0;
    int64_t tile = task.tile, old = -1;
    switch (task.kind) {
    case MK_TASK_SHARED_DOWN:
    case MK_TASK_SHARED_DGRAD_DOWN:
        mk_need_add(needs, &n, MK_COUNTER_shared_s2_tasks_done, tile, tile + 1, g->shared_gate_up);
        break;
    case MK_TASK_SHARED_DGRAD_GATE_UP:
        mk_need_add(needs, &n, MK_COUNTER_shared_s4_bwd_tasks_done, tile, tile + 1, g->shared_dgrad_down);
        break;
    case MK_TASK_SHARED_WGRAD:
        mk_need_add(needs, &n, MK_COUNTER_shared_s4_bwd_tasks_done, 0, w->shared_tiles, g->shared_dgrad_down);
        break;
    case MK_TASK_DISPATCH:
        old = mk_tile_before(w, d->ring_tiles, tile);
        if (old >= 0)
            mk_dispatch_needs(w, t, old, needs, &n);
        break;
    case MK_TASK_GATE_UP:
        mk_need_rows(t, d->experts_count, tile, needs, &n);
        old = mk_tile_before(w, d->ring_tiles, tile);
        if (old >= 0 && w->pass == MK_PASS_FORWARD) /* h of the slot's old tile has been read */
            mk_need_add(needs, &n, MK_COUNTER_s4_tasks_done, old, old + 1, g->down);
        break;
    case MK_TASK_DOWN:
        mk_need_add(needs, &n, MK_COUNTER_s2_tasks_done, tile, tile + 1, g->gate_up);
        break;
    case MK_TASK_DGRAD_DOWN:
        mk_need_rows(t, d->experts_count, tile, needs, &n);
        mk_need_add(needs, &n, MK_COUNTER_s2_tasks_done, tile, tile + 1, mk_is_replayed(w, tile) ? g->gate_up : 0);
        break;
    case MK_TASK_DGRAD_GATE_UP:
        mk_need_add(needs, &n, MK_COUNTER_s4_bwd_tasks_done, tile, tile + 1, g->dgrad_down);
        break;
    case MK_TASK_WGRAD: {
        const mk_piece *piece = &t->pieces[tile];
        mk_need_add(needs, &n, MK_COUNTER_s4_bwd_tasks_done, piece->tile_first, piece->tile_end, g->dgrad_down);
        if (piece->after >= 0)
            mk_need_add(needs, &n, MK_COUNTER_wgrad_tasks_done, piece->after, piece->after + 1, g->wgrad);
        break;
    }
    default: break;
    }
    return n;
}

/* The counter that a finished task raises at index task.tile, by one (a dispatch: by the rows it moved); -1: none. */
MK_FN int mk_task_counter(mk_task_kind kind)
{
    switch (kind) {
    case MK_TASK_SHARED_GATE_UP: return MK_COUNTER_shared_s2_tasks_done;
    case MK_TASK_SHARED_DGRAD_DOWN: return MK_COUNTER_shared_s4_bwd_tasks_done;
    case MK_TASK_DISPATCH: return MK_COUNTER_s1_rows_arrived;
    case MK_TASK_GATE_UP: return MK_COUNTER_s2_tasks_done;
    case MK_TASK_DOWN: return MK_COUNTER_s4_tasks_done;
    case MK_TASK_DGRAD_DOWN: return MK_COUNTER_s4_bwd_tasks_done;
    case MK_TASK_DGRAD_GATE_UP: return MK_COUNTER_s2_bwd_tasks_done;
    case MK_TASK_WGRAD: return MK_COUNTER_wgrad_tasks_done;
    default: return -1;
    }
}

/* Place of a counter in the counter memory of a rank (memory map: counters). */
MK_FN int64_t mk_counter_index(const mk_dims *d, int32_t counter, int64_t index)
{
    if (counter < MK_NUM_TILE_COUNTERS)
        return counter * d->capacity_tiles + index;
    if (counter == MK_COUNTER_wgrad_tasks_done)
        return MK_NUM_TILE_COUNTERS * d->capacity_tiles + index;
    return MK_NUM_TILE_COUNTERS * d->capacity_tiles + MK_MAX_PIECES(d) +
           (counter - MK_COUNTER_shared_s2_tasks_done) * MK_SHARED_TILES(d) + index;
}

#endif
