/* The memory map: every buffer of a rank, once. Offsets are computed by mk_memory_map (layout/memory.c) and used by the
 * plan, the CPU backend, the CUDA host code and, passed by value, by the kernels.
 *
 *   MOK_MEM_HEAP      symmetric: the same offsets on every rank; peers read (x, dout, weights, ids) or write (slots, epochs)
 *   MOK_MEM_LOCAL     ring, scratch and counters; nothing in it lives from one call to the next but the sequence numbers
 *   MOK_MEM_SCHEDULE  the caller's, one per routing: row table
 *   MOK_MEM_CONTEXT   the caller's, one per forward: saved gate/up
 *   MOK_MEM_WEIGHTS   the caller's, or twice in wide_weights: one quantisation of the routed weights, widened
 *
 * X(kind, name, element bytes, elements)   elements may use d (const mk_dims *) */
#ifndef MK_LAYOUT_MEMORY_H
#define MK_LAYOUT_MEMORY_H

#include "layout/counters.h"
#include "layout/dims.h"
#include "layout/fault.h"
#include "layout/table.h"
#include "mok.h"
#include "mx/mx.h"

enum { MK_TENSOR_MAP_BYTES = 128, MK_EXPERT_MAPS = 3 }; /* cuda: of an expert's weights, gate, up, down */
enum { MK_BUFFER_ALIGN = 256, MK_EPOCH_BYTES = 128, MK_CALL_PARITIES = 2, MK_SCHEDULE_CHUNKS = 1024 };

/* What a rank tells the others about its call, at the call's first barrier. Double-buffered by the call's parity. */
typedef struct mk_call_head {
    uint64_t sequence;       /* calls of this workspace so far */
    uint64_t fingerprint;    /* of operation, layer, schedule number, configuration */
    uint64_t layer;
    uint64_t schedule_number;
    int64_t num_tokens;
    int32_t operation;       /* mk_operation */
    int32_t parts;           /* mok_backward_parts */
    int32_t status;          /* MOK_OK, or why this rank refuses */
    char sentence[460];
    uint32_t gave_up, unused; /* cuda: a wait of this rank's own pass has run out; for ranks that share its GPU */
} mk_call_head;

/* A row of n numbers that is quantised in MXFP8: where the next one begins. And what of it crosses the link. */
#define MK_ROW_STRIDE(d, n) ((d)->mx ? mk_mx_row_stride(n) : 2 * (n))
#define MK_ROW_BYTES(d, n) ((d)->mx ? mk_mx_row_bytes(n) : 2 * (n))
#define MK_TILE_ROWS(d) ((d)->capacity_tiles * MK_ROW_TILE)
#define MK_RING_ROWS(d) ((d)->ring_tiles * MK_ROW_TILE)
#define MK_SLOTS(d) ((d)->max_tokens * (d)->topk)
#define MK_MAX_PIECES(d) ((d)->experts_count + mk_ceil_div((d)->capacity_tiles, (d)->mb_tiles_bwd))
/* A row of the ring that a GEMM contracts along: n numbers. mx_scaled: the elements of all rows, and then their scales in tiles. */
#define MK_OPERAND_STRIDE(d, n) ((d)->mx_scaled ? (n) + mk_mx_scale_bytes(MK_MX_TILE, n) / MK_MX_TILE : 2 * (n))
/* MXFP8 on a GPU: rows of operands that are in buffers of their own; of the weight gradients', where the ring's can not be read as they are, or not be
 * written in place. These contract over the rows: their scales are those of the transpose, as many. Then what is kept of a routed weight matrix: numbers,
 * widened, or matrices with their scales. */
#define MK_OPERAND_ROWS(d) ((d)->mx_wide || (d)->mx_scaled ? MK_RING_ROWS(d) : 0)
#define MK_WGRAD_STRIDE(d, n) ((d)->mx_wgrad ? MK_OPERAND_STRIDE(d, n) : 2 * (n))
#define MK_WGRAD_ROWS(d) ((d)->mx_wgrad || (d)->mx_scaled ? MK_OPERAND_ROWS(d) : 0)
#define MK_SCALED_WGRAD_ROWS(d) ((d)->mx_wgrad && (d)->mx_scaled ? MK_RING_ROWS(d) : 0)
#define MK_SCALED_WEIGHTS(d) ((d)->mx_scaled ? (d)->experts_count : 0)
#define MK_WIDE_WEIGHTS(d) ((d)->mx_wide ? (d)->experts_count * (d)->hidden * (d)->intermediate : 0)
/* Experts whose weights may come one pointer each: those that a GPU multiplies as the caller has them. */
#define MK_MAPPED_EXPERTS(d) ((d)->mx ? 0 : (d)->experts_count)
#define MK_MX_MATRIX_BYTES(rows, cols) ((rows) * (cols) + mk_mx_scale_bytes(rows, cols))
#define MK_SHARED_ROWS(d) ((d)->shared_intermediate ? (d)->max_tokens : 0)
#define MK_SHARED_TILES(d) mk_ceil_div(MK_SHARED_ROWS(d), MK_ROW_TILE)

#define MK_BUFFER_LIST(X)                                                                                                   \
    X(HEAP, epochs, MK_EPOCH_BYTES, (d)->num_ranks)              /* [P] words of 64 bits, 128 bytes apart: peer r's barriers */ \
    X(HEAP, call_heads, sizeof(mk_call_head), MK_CALL_PARITIES)                                                             \
    X(HEAP, expert_ids, 4, MK_CALL_PARITIES * MK_SLOTS(d))       /* [2, T, K] int32 */                                      \
    X(HEAP, router_weights, 4, MK_SLOTS(d))                      /* [T, K] fp32 */                                          \
    X(HEAP, x, MK_ROW_STRIDE(d, (d)->hidden), (d)->max_tokens)   /* [T, H] bf16; MXFP8: [T] rows of mx/mx.h */              \
    X(HEAP, dout, MK_ROW_STRIDE(d, (d)->hidden), (d)->max_tokens) /* as x */                                                \
    X(HEAP, slots, 2, MK_SLOTS(d) * (d)->hidden)                 /* [T, K, H] bf16: y in the forward, dx in the backward */ \
    X(HEAP, dweight_slots, 4, MK_SLOTS(d))                       /* [T, K] fp32 */                                          \
    X(LOCAL, ring_x, MK_OPERAND_STRIDE(d, (d)->hidden), MK_RING_ROWS(d))    /* [ring, H] bf16; or e4m3, and scales */       \
    X(LOCAL, ring_dout, MK_OPERAND_STRIDE(d, (d)->hidden), MK_RING_ROWS(d)) /* as ring_x */                                 \
    X(LOCAL, ring_gate, 2, MK_RING_ROWS(d) * (d)->intermediate)  /* [ring, I] bf16: replayed gate, then dgate */            \
    X(LOCAL, ring_up, 2, MK_RING_ROWS(d) * (d)->intermediate)    /* [ring, I] bf16: replayed up, then dup */                \
    X(LOCAL, ring_h, 2, MK_RING_ROWS(d) * (d)->intermediate)     /* [ring, I] bf16: h (or e4m3, and scales); w h in the backward */ \
    X(LOCAL, ring_weight, 4, MK_RING_ROWS(d))                    /* [ring] fp32: router weight of the row */                \
    X(LOCAL, ring_dweight, 4, MK_RING_ROWS(d) * ((d)->intermediate / MK_DW_GROUP)) /* [ring, I/64] fp32 partial sums */     \
    X(LOCAL, shared_gate, 2, MK_SHARED_ROWS(d) * (d)->shared_intermediate)  /* [T, Is] bf16: gate, then dgate */            \
    X(LOCAL, shared_up, 2, MK_SHARED_ROWS(d) * (d)->shared_intermediate)    /* [T, Is] bf16: up, then dup */                \
    X(LOCAL, shared_h, 2, MK_SHARED_ROWS(d) * (d)->shared_intermediate)     /* [T, Is] bf16: h; s h in the backward */      \
    X(LOCAL, shared_y, 2, MK_SHARED_ROWS(d) * (d)->hidden)                  /* [T, H] bf16: y_s; its dx in the backward */  \
    X(LOCAL, shared_scale, 4, MK_SHARED_ROWS(d))                            /* [T] fp32: s */                               \
    X(LOCAL, shared_dpartial, 4, MK_SHARED_ROWS(d) * ((d)->shared_intermediate / MK_DW_GROUP)) /* [T, Is/64] fp32 */        \
    X(LOCAL, wgrad_partial, 4, 3 * (d)->hidden * (d)->intermediate)         /* fp32 sums of the one expert that is cut */   \
    X(LOCAL, dgrad_dgate, MK_OPERAND_STRIDE(d, (d)->intermediate), MK_OPERAND_ROWS(d)) /* [ring, I] bf16: dgate as dx_k's product sees it: quantised along I; or e4m3, and scales */ \
    X(LOCAL, dgrad_dup, MK_OPERAND_STRIDE(d, (d)->intermediate), MK_OPERAND_ROWS(d))   /* as dgrad_dgate */                 \
    X(LOCAL, wgrad_x, MK_WGRAD_STRIDE(d, (d)->hidden), MK_WGRAD_ROWS(d)) /* [ring, H] bf16: x as weight gradients see it: quantised along the rows; or e4m3, and scales [H, ring / 32] */ \
    X(LOCAL, wgrad_dout, MK_WGRAD_STRIDE(d, (d)->hidden), MK_WGRAD_ROWS(d)) /* as wgrad_x */                                \
    X(LOCAL, wgrad_dgate, MK_WGRAD_STRIDE(d, (d)->intermediate), MK_SCALED_WGRAD_ROWS(d)) /* [ring, I] e4m3, and scales [I, ring / 32]: dgate */ \
    X(LOCAL, wgrad_dup, MK_WGRAD_STRIDE(d, (d)->intermediate), MK_SCALED_WGRAD_ROWS(d)) /* as wgrad_dgate */                \
    X(LOCAL, wgrad_h, MK_WGRAD_STRIDE(d, (d)->intermediate), MK_SCALED_WGRAD_ROWS(d)) /* the same of w h */                 \
    X(LOCAL, wide_weights, 2, (d)->mx_wide_given ? 0 : 2 * 3 * MK_WIDE_WEIGHTS(d)) /* two of WEIGHTS: what the forward multiplies with, and dgrad */ \
    X(LOCAL, scaled_gate, MK_MX_MATRIX_BYTES((d)->intermediate, (d)->hidden), MK_SCALED_WEIGHTS(d)) /* [El, I, H] e4m3, and scales: gate weights, blocks along H */ \
    X(LOCAL, scaled_up, MK_MX_MATRIX_BYTES((d)->intermediate, (d)->hidden), MK_SCALED_WEIGHTS(d)) /* as scaled_gate */      \
    X(LOCAL, scaled_down, MK_MX_MATRIX_BYTES((d)->hidden, (d)->intermediate), MK_SCALED_WEIGHTS(d)) /* [El, H, I] e4m3, and scales: blocks along I */ \
    X(LOCAL, scaled_gate_bwd, MK_MX_MATRIX_BYTES((d)->hidden, (d)->intermediate), MK_SCALED_WEIGHTS(d)) /* [El, H, I] e4m3, and scales: gate weights, blocks along I */ \
    X(LOCAL, scaled_up_bwd, MK_MX_MATRIX_BYTES((d)->hidden, (d)->intermediate), MK_SCALED_WEIGHTS(d)) /* as scaled_gate_bwd */ \
    X(LOCAL, scaled_down_bwd, MK_MX_MATRIX_BYTES((d)->intermediate, (d)->hidden), MK_SCALED_WEIGHTS(d)) /* [El, I, H] e4m3, and scales: down weights, blocks along H */ \
    X(LOCAL, counters, 4, MK_NUM_TILE_COUNTERS * (d)->capacity_tiles + MK_MAX_PIECES(d) +                                   \
                          MK_NUM_SHARED_COUNTERS * MK_SHARED_TILES(d))      /* layout/counters.h, in its order */           \
    X(LOCAL, device_state, sizeof(mk_device_state), 1)                      /* layout/fault.h; cuda only */                \
    X(LOCAL, expert_maps, MK_TENSOR_MAP_BYTES, MK_EXPERT_MAPS * MK_MAPPED_EXPERTS(d)) /* cuda: of weights by pointer, gate, up, down of each */ \
    X(LOCAL, shared_maps, MK_TENSOR_MAP_BYTES, (d)->shared_intermediate ? MK_EXPERT_MAPS : 0) /* the same of the shared expert */ \
    X(LOCAL, route_rows, 4, (d)->max_tokens * (d)->num_ranks * (d)->topk)   /* [N, K] int32: s0, table row of a route */    \
    X(LOCAL, expert_cursor, 8, (d)->experts_count)                          /* [El] int64: s0 */                            \
    X(LOCAL, chunk_counts, 4, MK_SCHEDULE_CHUNKS * (d)->experts_count)      /* [chunks, El] int32: s0 on cuda */            \
    X(SCHEDULE, schedule_head, sizeof(mk_schedule_head), 1)                                                                 \
    X(SCHEDULE, token_first, 8, (d)->num_ranks + 1)              /* [P+1] int64: global id of each rank's first token */    \
    X(SCHEDULE, own_ids, 4, MK_SLOTS(d))                         /* [T, K] int32: this rank's routes, for the reduce */     \
    X(SCHEDULE, segment_tile, 4, (d)->experts_count + 1)         /* [El+1] int32: first tile of each segment */             \
    X(SCHEDULE, segment_rows, 4, (d)->experts_count)             /* [El] int32: valid rows */                               \
    X(SCHEDULE, rows, sizeof(mk_row), MK_TILE_ROWS(d))           /* the row table */                                        \
    X(SCHEDULE, tiles, sizeof(mk_tile), (d)->capacity_tiles)     /* expert and valid rows of each tile */                   \
    X(SCHEDULE, copies_out_fwd, 4, (d)->capacity_tiles)          /* [tiles] int32: rows elsewhere copied from this tile */  \
    X(SCHEDULE, copies_out_bwd, 4, (d)->capacity_tiles)                                                                     \
    X(SCHEDULE, piece_of_tile, 4, (d)->capacity_tiles)           /* [tiles] int32: weight-gradient piece */                 \
    X(SCHEDULE, pieces, sizeof(mk_piece), MK_MAX_PIECES(d))                                                                 \
    X(SCHEDULE, piece_first, 4, mk_ceil_div((d)->capacity_tiles, (d)->mb_tiles_bwd) + 1) /* first piece of each minibatch */ \
    X(CONTEXT, context_head, sizeof(mk_context_head), 1)                                                                    \
    X(CONTEXT, saved_gate, MK_ROW_STRIDE(d, (d)->intermediate), (d)->saved_tiles * MK_ROW_TILE) /* [C, I] bf16, or [C] rows of mx/mx.h */ \
    X(CONTEXT, saved_up, MK_ROW_STRIDE(d, (d)->intermediate), (d)->saved_tiles * MK_ROW_TILE)   /* as saved_gate */         \
    X(CONTEXT, saved_shared_gate, 2, (d)->saved_tiles ? MK_SHARED_ROWS(d) * (d)->shared_intermediate : 0) /* [T, Is] */     \
    X(CONTEXT, saved_shared_up, 2, (d)->saved_tiles ? MK_SHARED_ROWS(d) * (d)->shared_intermediate : 0)   /* [T, Is] */   \
    X(WEIGHTS, wide_gate, 2, MK_WIDE_WEIGHTS(d))                 /* [El, I, H] bf16: gate weights, quantised along H; for dgrad: along I */ \
    X(WEIGHTS, wide_up, 2, MK_WIDE_WEIGHTS(d))                   /* as wide_gate */                                         \
    X(WEIGHTS, wide_down, 2, MK_WIDE_WEIGHTS(d))                 /* [El, H, I] bf16: down weights, quantised along I; for dgrad: along H */

/* Byte offset of each buffer inside its memory kind. */
typedef struct mk_memory {
#define MK_BUFFER_FIELD(kind, name, bytes, count) int64_t name;
    MK_BUFFER_LIST(MK_BUFFER_FIELD)
#undef MK_BUFFER_FIELD
    int64_t heap_bytes, local_bytes, schedule_bytes, context_bytes, weights_bytes;
} mk_memory;

enum {
#define MK_BUFFER_COUNT(kind, name, bytes, count) MK_BUFFER_##name,
    MK_BUFFER_LIST(MK_BUFFER_COUNT)
#undef MK_BUFFER_COUNT
    MK_NUM_BUFFERS
};

#ifdef __cplusplus
extern "C" {
#endif
/* Fills the offsets and, if infos is not NULL, MK_NUM_BUFFERS descriptions. */
void mk_memory_map(const mk_dims *d, mk_memory *memory, mok_buffer_info *infos);
#ifdef __cplusplus
}
#endif

#endif
