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

/* One after the other: takes the need if it is the index-th that exists. No arrays, so that a device keeps everything in registers. */
MK_FN int mk_need_pick(mk_need *need, int *index, int32_t counter, int64_t first, int64_t end, int64_t count)
{
    if (count <= 0 || first >= end || (*index)-- != 0)
        return 0;
    need->counter = counter;
    need->first = (int32_t)first;
    need->end = (int32_t)end;
    need->count = (uint32_t)count;
    return 1;
}

/* What a counter of GEMM tasks reaches when `tasks` of them are done. */
MK_FN int64_t mk_raised(const mk_grid *g, int64_t tasks) { return tasks * (g->raises ? g->raises : 1); }

MK_FN int mk_is_replayed(const mk_walk *w, int64_t tile) { return w->pass == MK_PASS_BACKWARD && tile >= w->replay_from; }

/* The tile whose rows the slot of `tile` held before, or -1. */
MK_FN int64_t mk_tile_before(const mk_walk *w, int64_t ring_tiles, int64_t tile)
{
    int64_t old = w->pass == MK_PASS_BACKWARD ? tile - ring_tiles : tile + ring_tiles;
    return old >= 0 && old < w->num_tiles ? old : -1;
}

/* dispatch overwrites the x (and dout) rows of the slot's old tile: all its readers must be done. */
MK_FN int mk_dispatch_need(const mk_walk *w, const mk_table *t, int64_t old, int index, mk_need *need)
{
    const mk_grid *g = &w->grid;
    if (w->pass != MK_PASS_BACKWARD)
        return mk_need_pick(need, &index, MK_COUNTER_s1_copies_done, old, old + 1, t->copies_out_fwd[old]) ||
               mk_need_pick(need, &index, MK_COUNTER_s2_tasks_done, old, old + 1, mk_raised(g, g->gate_up));
    return mk_need_pick(need, &index, MK_COUNTER_s1_copies_done, old, old + 1, t->copies_out_bwd[old]) ||
           mk_need_pick(need, &index, MK_COUNTER_s2_tasks_done, old, old + 1, mk_is_replayed(w, old) ? mk_raised(g, g->gate_up) : 0) ||
           mk_need_pick(need, &index, MK_COUNTER_s4_bwd_tasks_done, old, old + 1, mk_raised(g, g->dgrad_down)) ||
           mk_need_pick(need, &index, MK_COUNTER_s2_bwd_tasks_done, old, old + 1, mk_raised(g, g->dgrad_gate_up)) ||
           mk_need_pick(need, &index, MK_COUNTER_wgrad_tasks_done, t->piece_of_tile[old], t->piece_of_tile[old] + 1, mk_raised(g, g->wgrad));
}

/* A tile's rows have all arrived. */
MK_FN int mk_need_rows(const mk_table *t, int64_t tile, int *index, mk_need *need)
{
    return mk_need_pick(need, index, MK_COUNTER_s1_rows_arrived, tile, tile + 1, mk_valid_rows(t, tile));
}

/* The index-th need of a task (0, 1, …); 0: there are no more. A dispatch also waits, row by row, for the tiles it copies from. */
MK_FN int mk_task_need(const mk_walk *w, const mk_table *t, const mk_dims *d, mk_task task, int index, mk_need *need)
{
    const mk_grid *g = &w->grid;
    int64_t tile = task.tile, old = -1;
    switch (task.kind) {
    case MK_TASK_SHARED_DOWN:
    case MK_TASK_SHARED_DGRAD_DOWN:
        return mk_need_pick(need, &index, MK_COUNTER_shared_s2_tasks_done, tile, tile + 1, mk_raised(g, g->shared_gate_up));
    case MK_TASK_SHARED_DGRAD_GATE_UP:
        return mk_need_pick(need, &index, MK_COUNTER_shared_s4_bwd_tasks_done, tile, tile + 1, mk_raised(g, g->shared_dgrad_down));
    case MK_TASK_SHARED_WGRAD:
        return mk_need_pick(need, &index, MK_COUNTER_shared_s4_bwd_tasks_done, 0, w->shared_tiles, mk_raised(g, g->shared_dgrad_down));
    case MK_TASK_DISPATCH:
        old = mk_tile_before(w, d->ring_tiles, tile);
        return old >= 0 && mk_dispatch_need(w, t, old, index, need);
    case MK_TASK_GATE_UP:
        if (mk_need_rows(t, tile, &index, need))
            return 1;
        old = w->pass == MK_PASS_FORWARD ? mk_tile_before(w, d->ring_tiles, tile) : -1; /* h of the slot's old tile has been read */
        return old >= 0 && mk_need_pick(need, &index, MK_COUNTER_s4_tasks_done, old, old + 1, mk_raised(g, g->down));
    case MK_TASK_DOWN:
        return mk_need_pick(need, &index, MK_COUNTER_s2_tasks_done, tile, tile + 1, mk_raised(g, g->gate_up));
    case MK_TASK_DGRAD_DOWN:
        return mk_need_rows(t, tile, &index, need) ||
               mk_need_pick(need, &index, MK_COUNTER_s2_tasks_done, tile, tile + 1, mk_is_replayed(w, tile) ? mk_raised(g, g->gate_up) : 0);
    case MK_TASK_DGRAD_GATE_UP:
        return mk_need_pick(need, &index, MK_COUNTER_s4_bwd_tasks_done, tile, tile + 1, mk_raised(g, g->dgrad_down));
    case MK_TASK_WGRAD: {
        const mk_piece *piece = &t->pieces[tile];
        return (g->wgrad_waits ? mk_need_pick(need, &index, MK_COUNTER_s2_bwd_tasks_done, piece->tile_first, piece->tile_end, mk_raised(g, g->dgrad_gate_up))
                               : mk_need_pick(need, &index, MK_COUNTER_s4_bwd_tasks_done, piece->tile_first, piece->tile_end, mk_raised(g, g->dgrad_down))) ||
               mk_need_pick(need, &index, MK_COUNTER_wgrad_tasks_done, piece->after, piece->after + 1, piece->after >= 0 ? mk_raised(g, g->wgrad) : 0);
    }
    default: return 0;
    }
}

/* All needs of a task; returns their number. */
MK_FN int mk_task_needs(const mk_walk *w, const mk_table *t, const mk_dims *d, mk_task task, mk_need *needs)
{
    int n = 0;
    while (n < MK_MAX_NEEDS && mk_task_need(w, t, d, task, n, &needs[n]))
        n++;
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
