/* s1_dispatch: one tile's rows into the ring, pulled from their source ranks' heaps or copied from an earlier row of the same token.
 * Forward and recompute: x. Backward: dout, router weights, and x if anything needs it. Padding rows are not touched.
 * MXFP8: rows travel as e4m3 with their scales, and are widened as they land. */
#include <string.h>

#include "cpu/run.h"

static void move_row(mk_bf16 *ring, int64_t to, const mk_bf16 *from, int64_t hidden)
{
    memcpy(ring + to * hidden, from, sizeof *ring * (size_t)hidden);
}

/* The row is in the ring already, in the slot of an earlier tile. */
static void copy_row(mk_cpu_run *run, int64_t from, int64_t to, bool x, bool dout)
{
    int64_t hidden = run->d->hidden, at = mk_ring_row(run, from / MK_ROW_TILE) + from % MK_ROW_TILE;
    if (x)
        move_row(run->ring_x, to, run->ring_x + at * hidden, hidden);
    if (dout)
        move_row(run->ring_dout, to, run->ring_dout + at * hidden, hidden);
}

/* `from`: a rank's published token. */
static void land_row(const mk_cpu_run *run, mk_bf16 *ring, int64_t to, const char *from)
{
    int64_t hidden = run->d->hidden;
    const uint8_t *elements = (const uint8_t *)from;
    if (run->mx)
        mk_cpu_mx_widen(elements, elements + hidden, hidden, ring + to * hidden);
    else
        move_row(ring, to, (const mk_bf16 *)(const void *)from, hidden);
}

static void pull_row(mk_cpu_run *run, const mk_row *row, int64_t to, bool x, bool dout)
{
    const mk_memory *m = &run->w->memory;
    const char *heap = run->w->heaps[row->src_rank];
    int64_t at = row->src_slot / run->d->topk * MK_ROW_STRIDE(run->d, run->d->hidden);
    if (x)
        land_row(run, run->ring_x, to, heap + m->x + at);
    if (dout)
        land_row(run, run->ring_dout, to, heap + m->dout + at);
}

/* All rows of an earlier tile have arrived. */
static bool wait_tile(mk_cpu_run *run, int64_t tile)
{
    return mk_cpu_wait_counter(run, MK_COUNTER_s1_rows_arrived, tile, (uint32_t)mk_valid_rows(&run->table, tile));
}

void mk_cpu_s1_dispatch(mk_cpu_run *run, mk_task task)
{
    bool backward = run->walk.pass == MK_PASS_BACKWARD, x = run->need_x, dout = backward;
    int64_t first = (int64_t)task.tile * MK_ROW_TILE, pulled = 0, pulled_peer = 0, copied = 0;
    for (int64_t i = 0; i < MK_ROW_TILE; i++) {
        /* In the order of the walk, because a row may be copied from one of the same tile. */
        int64_t in_tile = backward ? i : MK_ROW_TILE - 1 - i, to = mk_ring_row(run, task.tile) + in_tile;
        const mk_row *row = &run->table.rows[first + in_tile];
        if (row->src_rank < 0)
            continue;
        int64_t from = backward ? row->copy_bwd : row->copy_fwd, from_tile = from / MK_ROW_TILE;
        if (from >= 0 && from_tile < run->walk.num_tiles) {
            if (from_tile != task.tile && !wait_tile(run, from_tile))
                return;
            copy_row(run, from, to, x, dout);
            mk_cpu_signal(run, MK_COUNTER_s1_copies_done, from_tile, 1);
            copied++;
        } else {
            pull_row(run, row, to, x, dout);
            pulled++;
            pulled_peer += row->src_rank != run->d->rank;
        }
        if (backward) {
            const float *weights = (const float *)(const void *)(run->w->heaps[row->src_rank] + run->w->memory.router_weights);
            run->ring_weight[to] = weights[row->src_slot];
        }
    }
    mk_count(&run->counted.rows, pulled + copied);
    mk_count(&run->counted.rows_pulled, pulled);
    mk_count(&run->counted.rows_copied, copied);
    mk_count(&run->counted.rows_pulled_peer, pulled_peer);
    mk_count(&run->counted.bytes_pulled_peer, pulled_peer * MK_ROW_BYTES(run->d, run->d->hidden) * (x + dout));
    mk_count(&run->counted.rows_padding, MK_ROW_TILE - pulled - copied);
}
