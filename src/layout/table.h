/* The row table: which token's row stands where. Written by s0_schedule, read by every later stage.
 *
 *   table row   0        128      256               (a segment starts at a multiple of MK_ROW_TILE)
 *               | expert 0 | pad | expert 1 ... | pad | ...
 *
 * Order inside an expert's segment: the N tokens of all ranks are cut into V = MK_SHARDS shards of S = ceil(N/V) tokens,
 * and rows are sorted by (g mod S, g div S, k), where g is the global token id. It knows nothing of ranks, so that sums
 * over rows have the same bits for any P; neighbours come from different ranks, which spreads the link's load.
 *
 * A row is *pulled* from its token's rank, or *copied* from the nearest row of the same token that the walk has met before. In one tile always:
 * they are neighbours, and are written together. From another tile only where that saves the link (the token is another rank's), fewer than
 * ring - minibatch rows lie between them (then that row is still in the ring), and they are at least MK_COPY_DISTANCE rows apart, or a minibatch if
 * that is less: a row that is still on its way would keep the batch of rows that waits for it, and the batches that wait for that one. */
#ifndef MK_LAYOUT_TABLE_H
#define MK_LAYOUT_TABLE_H

#include "layout/dims.h"

typedef struct mk_row {
    int32_t src_rank;  /* whose token; -1 = padding */
    int32_t src_slot;  /* t * K + k there */
    int32_t copy_fwd;  /* table row to copy from in the forward, -1 = pull */
    int32_t copy_bwd;  /* the same for the backward */
} mk_row;

/* A tile of the table. */
typedef struct mk_tile {
    int32_t expert;                     /* local index */
    int32_t rows;                       /* valid ones */
    int32_t segment_first, segment_end; /* tiles of that expert */
} mk_tile;

/* A weight-gradient piece: the rows of one expert that one set of tasks sums up. An expert has one piece, or several where the ring
 * cuts its segment; pieces of an expert follow each other, each continuing from the fp32 sum of the one before. */
typedef struct mk_piece {
    int32_t expert;              /* local index */
    int32_t tile_first, tile_end;/* table tiles [first, end); empty for an expert without rows */
    int32_t minibatch;           /* runs with this backward minibatch */
    int32_t rows;                /* valid rows of [first, end) */
    int32_t is_first, is_last;   /* starts from zero; finishes the expert */
    int32_t after;               /* piece that must be done before (it has, or still needs, the fp32 partial sum); -1: none */
} mk_piece;

/* Start of the schedule memory. Everything is per rank unless it says global. */
typedef struct mk_schedule_head {
    uint64_t magic;              /* MK_SCHEDULE_MAGIC */
    uint64_t fingerprint;        /* of the workspace's configuration */
    uint64_t number;             /* which mok_schedule call of the workspace made it; the same on all ranks */
    int64_t num_tokens;          /* T */
    int64_t tokens_global;       /* N */
    int64_t num_rows;            /* padding excluded */
    int32_t num_tiles;           /* of the table */
    int32_t num_pieces;
    int64_t rows_copied_fwd, rows_copied_bwd;
    int64_t rows_pulled_peer_fwd, rows_pulled_peer_bwd;
    int64_t rows_peer;           /* rows whose token lives on another rank: what combine pushes over the link */
    int64_t wgrad_continued;     /* pieces with is_first == 0 */
} mk_schedule_head;

#define MK_SCHEDULE_MAGIC 0x6d6f6b2d73636864ull /* "mok-schd" */
#define MK_CONTEXT_MAGIC 0x6d6f6b2d63747874ull  /* "mok-ctxt" */

/* Start of the context memory. */
typedef struct mk_context_head {
    uint64_t magic, fingerprint;
    uint64_t schedule_number;    /* the pass: gate/up belong to this row table */
    int64_t num_tokens;
    int64_t saved_tiles;         /* rows kept */
} mk_context_head;

/* Global token at position (j, v) of the row order, or -1. The order is j = 0..S-1 outside, v = 0..V-1 inside. */
MK_FN int64_t mk_order_shard_tokens(int64_t num_global) { return mk_ceil_div(num_global, MK_SHARDS); }
MK_FN int64_t mk_order_token(int64_t num_global, int64_t shard_tokens, int64_t j, int64_t v)
{
    int64_t g = v * shard_tokens + j;
    return g < num_global ? g : -1;
}

/* Index i of the ascending array first[0..count] with first[i] <= value < first[i+1]; O(log count). */
MK_FN int64_t mk_find_interval32(const int32_t *first, int64_t count, int64_t value)
{
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (first[middle] <= value)
            low = middle;
        else
            high = middle;
    }
    return low;
}
MK_FN int64_t mk_find_interval64(const int64_t *first, int64_t count, int64_t value)
{
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (first[middle] <= value)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* About as many rows as are on their way at once (132 warps with 8 to 32 each). Farther costs links more than it saves waiting. By the simulator, on 2, 4 and 8 GPUs,
 * 2,048 is within 1 % of the best of 1,024, 2,048 and 4,096 but for Qwen3-30B-A3B (2 to 5 % on 2 and 4, where 4,096 is better). In small rings less is as good. */
enum { MK_COPY_DISTANCE = 2048 };

/* Is the row at `from`, met by the walk before the row at `row`, still in the ring when that one comes? Both directions. */
MK_FN int mk_copy_in_ring(int64_t row, int64_t from, int64_t ring_tiles, int64_t mb_tiles)
{
    int64_t distance = row < from ? from - row : row - from;
    return distance <= (ring_tiles - mb_tiles) * MK_ROW_TILE;
}

/* May the one be copied from the other? remote: their token is another rank's. */
MK_FN int mk_may_copy(int64_t row, int64_t from, int64_t ring_tiles, int64_t mb_tiles, int remote)
{
    int64_t distance = row < from ? from - row : row - from;
    if (row / MK_ROW_TILE == from / MK_ROW_TILE)
        return 1;
    return remote && distance >= mk_min(mb_tiles * MK_ROW_TILE, MK_COPY_DISTANCE) && mk_copy_in_ring(row, from, ring_tiles, mb_tiles);
}

/* Does backward minibatch `mb` (tiles up to tile_end_of_mb) have to cut a segment that goes on, whose piece starts at
 * piece_first? Two minibatches later (the lag of the walk) tile piece_first may be overwritten. See layout/walk.h. */
MK_FN int mk_must_cut(int64_t piece_first, int64_t tile_end_of_mb, int64_t mb_tiles, int64_t ring_tiles)
{
    return tile_end_of_mb + 2 * mb_tiles - piece_first > ring_tiles;
}

#endif
