/* Pointers into schedule and context memory, from a base and the memory map. */
#ifndef MK_LAYOUT_VIEW_H
#define MK_LAYOUT_VIEW_H

#include "layout/memory.h"

typedef struct mk_table {
    mk_schedule_head *head;
    int64_t *token_first;                        /* [P + 1] */
    int32_t *own_ids;                            /* [T, K] */
    int32_t *segment_tile, *segment_rows;        /* [El + 1], [El] */
    mk_row *rows;                                /* [tiles * MK_ROW_TILE] */
    mk_tile *tiles;                              /* [tiles] */
    int32_t *copies_out_fwd, *copies_out_bwd;    /* [tiles] */
    int32_t *piece_of_tile, *piece_first;        /* [tiles], [minibatches + 1] */
    mk_piece *pieces;
} mk_table;

MK_FN mk_table mk_table_at(const mk_memory *m, void *schedule)
{
    char *base = (char *)schedule;
    mk_table t;
    t.head = (mk_schedule_head *)(base + m->schedule_head);
    t.token_first = (int64_t *)(base + m->token_first);
    t.own_ids = (int32_t *)(base + m->own_ids);
    t.segment_tile = (int32_t *)(base + m->segment_tile);
    t.segment_rows = (int32_t *)(base + m->segment_rows);
    t.rows = (mk_row *)(base + m->rows);
    t.tiles = (mk_tile *)(base + m->tiles);
    t.copies_out_fwd = (int32_t *)(base + m->copies_out_fwd);
    t.copies_out_bwd = (int32_t *)(base + m->copies_out_bwd);
    t.piece_of_tile = (int32_t *)(base + m->piece_of_tile);
    t.piece_first = (int32_t *)(base + m->piece_first);
    t.pieces = (mk_piece *)(base + m->pieces);
    return t;
}

/* Local expert whose segment holds a table tile, and the tile's valid rows: MK_ROW_TILE but in a segment's last tile. One read. */
MK_FN int64_t mk_expert_of_tile(const mk_table *t, int64_t tile) { return t->tiles[tile].expert; }
MK_FN int64_t mk_valid_rows(const mk_table *t, int64_t tile) { return t->tiles[tile].rows; }

#endif
