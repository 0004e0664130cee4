/* Cuts the weight gradients of a table into pieces: one per expert, or several where the ring cannot hold a whole segment.
 * Used by s0_schedule on every backend. O(experts + minibatches), sequential; on a GPU only where a segment is cut. */
#ifndef MK_LAYOUT_PIECES_H
#define MK_LAYOUT_PIECES_H

#include "layout/table.h"

typedef struct mk_piece_plan {
    const int32_t *segment_tile, *segment_rows; /* [El + 1], [El] */
    int64_t num_experts, num_tiles;
    int64_t mb_tiles, ring_tiles;               /* of the backward */
    mk_piece *pieces;
    int32_t *piece_of_tile;                     /* [num_tiles] */
    int32_t *piece_first;                       /* [minibatches + 1] */
    mk_tile *tiles;                             /* [num_tiles] or NULL */
    int32_t last_continued;                     /* running: the last piece so far that went on from the partial sum, or -1 */
    int32_t fill_later;                         /* the caller calls mk_piece_fill for each piece, from several threads */
    int32_t num_continued;                      /* result: pieces that go on from the partial sum */
} mk_piece_plan;

/* What is known of a piece's tiles. */
MK_FN void mk_piece_fill(const mk_piece_plan *p, int32_t index)
{
    int64_t expert = p->pieces[index].expert, start = p->segment_tile[expert], t;
    mk_tile tile = {(int32_t)expert, 0, (int32_t)start, p->segment_tile[expert + 1]};
    for (t = p->pieces[index].tile_first; t < p->pieces[index].tile_end; t++) {
        p->piece_of_tile[t] = index;
        if (!p->tiles)
            continue;
        tile.rows = (int32_t)mk_min(p->segment_rows[expert] - (t - start) * MK_ROW_TILE, MK_ROW_TILE);
        p->tiles[t] = tile;
    }
}

/* Of an expert's segment, tiles [start, stop). */
MK_FN void mk_piece_emit(mk_piece_plan *p, int32_t index, int64_t expert, int64_t start, int64_t stop, int64_t first, int64_t end, int64_t minibatch)
{
    mk_piece *piece = &p->pieces[index];
    int32_t is_first = first == start, is_last = end == stop;
    piece->expert = (int32_t)expert;
    piece->tile_first = (int32_t)first;
    piece->tile_end = (int32_t)end;
    piece->minibatch = (int32_t)minibatch;
    piece->rows = (int32_t)mk_min((end - first) * MK_ROW_TILE, p->segment_rows[expert] - (first - start) * MK_ROW_TILE);
    piece->is_first = is_first;
    piece->is_last = is_last;
    /* There is one partial sum: a piece continues it after the piece before, or starts it once its last user is done. */
    piece->after = !is_first ? index - 1 : !is_last ? p->last_continued : -1;
    if (!is_first) {
        p->last_continued = index;
        p->num_continued++;
    }
    if (!p->fill_later)
        mk_piece_fill(p, index);
}

/* Where the ring cuts no segment, each expert has one piece, which can be found without those before it: the piece's minibatch, as mk_build_pieces below finds it;
 * -1: this segment is cut. num_tiles is not 0. */
MK_FN int64_t mk_uncut_minibatch(const mk_piece_plan *p, int64_t expert)
{
    uint32_t start = (uint32_t)p->segment_tile[expert], stop = (uint32_t)p->segment_tile[expert + 1], mb_tiles = (uint32_t)p->mb_tiles; /* 64-bit divisions are slow on a GPU */
    uint32_t last = ((uint32_t)p->num_tiles - 1) / mb_tiles, ends_in = stop > start ? (stop - 1) / mb_tiles : stop / mb_tiles;
    if (stop > start && ends_in > start / mb_tiles && mk_must_cut(start, (int64_t)ends_in * mb_tiles, mb_tiles, p->ring_tiles))
        return -1;
    return mk_min(ends_in, last);
}

/* Returns the number of pieces: at most experts + minibatches. An expert without rows gets an empty piece, whose tasks write zeros.
 * Segments are neighbours, so of each only its end is read: where a segment is cut, one thread of a GPU does this, and a schedule waits for it. */
MK_FN int32_t mk_build_pieces(mk_piece_plan *p)
{
    int64_t minibatches = mk_ceil_div(p->num_tiles, p->mb_tiles), e = 0, first = 0, start = 0, stop = p->num_experts ? p->segment_tile[1] : 0;
    int32_t count = 0;
    p->last_continued = -1;
    p->num_continued = 0;
    for (int64_t b = 0; b < minibatches; b++) {
        int64_t end = mk_min((b + 1) * p->mb_tiles, p->num_tiles);
        p->piece_first[b] = count;
        /* Segments that end in this minibatch; at the table's end also experts without rows that come last. */
        while (e < p->num_experts && (stop < end || (stop == end && start < end) || b == minibatches - 1)) {
            mk_piece_emit(p, count++, e++, start, stop, first, stop, b);
            first = start = stop;
            stop = e < p->num_experts ? p->segment_tile[e + 1] : stop;
        }
        if (e < p->num_experts && first < end && mk_must_cut(first, end, p->mb_tiles, p->ring_tiles)) {
            mk_piece_emit(p, count++, e, start, stop, first, end, b);
            first = end;
        }
    }
    p->piece_first[minibatches] = count;
    for (; e < p->num_experts; e++) /* a table without rows */
        mk_piece_emit(p, count++, e, 0, 0, 0, 0, 0);
    return count;
}

#endif
