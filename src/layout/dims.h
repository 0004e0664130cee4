/* The numbers of one layer on one rank, and the constants of the contract. Plain C for gcc, g++ and nvcc; host and device
 * use this one definition. Every field is derived once, in layout/config.c. */
#ifndef MK_LAYOUT_DIMS_H
#define MK_LAYOUT_DIMS_H

#include <stdint.h>

#ifdef __CUDACC__
#define MK_FN static __host__ __device__ __forceinline__
#else
#define MK_FN static inline __attribute__((unused))
#endif

enum {
    MK_ROW_TILE = 128,    /* rows of a tile; expert segments start at multiples of it; a ring slot is one tile */
    MK_SHARDS = 64,       /* V: the tokens of all ranks are cut into this many shards for the row order */
    MK_DW_GROUP = 64,     /* columns of I whose products one router-weight partial sums up */
    MK_WIDTH_UNIT = 64,   /* H, I and Is are multiples of it */
    MK_CLUSTER_ROWS = 256 /* chosen minibatches are multiples of it, unless they are whole waves or the ring bounds them */
};

typedef struct mk_dims {
    int64_t hidden, intermediate, shared_intermediate; /* H, I, Is */
    int64_t num_experts, topk;                         /* E, K */
    int64_t max_tokens;                                /* largest T */
    int32_t num_ranks, rank;                           /* P, r */
    int64_t experts_first, experts_count;              /* this rank's experts */
    int64_t ring_tiles;                                /* slots of the ring */
    int64_t mb_tiles_fwd, mb_tiles_bwd;                /* minibatch */
    int64_t saved_tiles;                               /* tiles of the table whose gate/up the context keeps */
    int64_t capacity_tiles;                            /* tiles the worst routing needs */
    int32_t mx;                                        /* MXFP8: tokens travel, and gate/up are kept, as rows of mx/mx.h */
    int32_t mx_wide;                                   /* MXFP8 on a GPU that multiplies bf16: operands of GEMMs are kept widened */
    int32_t mx_wide_given;                             /* and the caller keeps the weights' */
    int32_t mx_scaled;                                 /* MXFP8 on a GPU that multiplies it: operands of GEMMs are e4m3, with scales in tiles (mx/mx.h) */
    int32_t mx_wgrad;                                  /* MXFP8: weight gradients from operands quantised along the rows */
} mk_dims;

MK_FN int64_t mk_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MK_FN int64_t mk_round_up(int64_t a, int64_t b) { return mk_ceil_div(a, b) * b; }
MK_FN int64_t mk_min(int64_t a, int64_t b) { return a < b ? a : b; }
MK_FN int64_t mk_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* Are tokens read where the caller has them? No peer pulls them (one rank), or peers pull them in another form (MXFP8). Else from the heap. */
MK_FN int mk_reads_in_place(const mk_dims *d) { return d->mx || d->num_ranks == 1; }

/* First expert of a rank; rank == P gives E. Balanced, contiguous, not necessarily even. E and P are below 2^31. */
MK_FN int64_t mk_expert_first(int64_t num_experts, int64_t num_ranks, int64_t rank) { return rank * num_experts / num_ranks; }

#endif
