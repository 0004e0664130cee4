/* What the host hands to the kernels that measure the link (src/cuda/kernel/link.cu): as params.h. They move the rows of a schedule and compute
 * nothing. K is 1, so that no row is a copy and a slot is a token; the ring holds the whole table.
 *
 *   kernel          params           grid x block                             what it does
 *   mok_link_fill   mk_link_params   any x 256                                known numbers: x in this rank's heap; rows to push in ring_dout
 *   mok_link_move   mk_link_params   any x 288, MK_LINK_MOVE_SHARED bytes     the stages' own code: s1_dispatch by one warp of a CTA, the push of
 *                                                                             s4_down's epilogue by eight, as in mok_forward_fused
 *   mok_link_move_mx  mk_link_params  as mok_link_move                        its pull with rows in MXFP8: e4m3 and scales, into the ring as a pass has them
 *   mok_link_copy   mk_link_params   any x 256, MK_LINK_COPY_SHARED bytes     the same rows as fast as the GPU can: the ceiling; signals, if wanted
 *   mok_link_check  mk_link_params   any x 256                                counts 4-byte words that are not what was sent
 *
 * All work is spread over whatever grid there is. */
#ifndef MK_CUDA_KERNEL_LINK_PARAMS_H
#define MK_CUDA_KERNEL_LINK_PARAMS_H

#include "cuda/kernel/params.h"

enum { MK_LINK_WARPS = 8, MK_LINK_SLOT = 24576 };                                 /* of mok_link_copy, and bytes that each has under way */
enum { MK_LINK_COPY_SHARED = MK_LINK_WARPS * MK_LINK_SLOT + 128 };
enum { MK_LINK_MOVE_SHARED = MK_DISPATCH_SHARED + 128 + MK_LINK_WARPS * 4096 };   /* checked in link.cu */

enum { MK_LINK_SIGNAL_PULL = 1, MK_LINK_SIGNAL_PUSH = 2 };

typedef struct mk_link_params {
    mk_rank_params rank;
    void *schedule;
    int64_t num_tokens;
    uint64_t *wrong;     /* mok_link_check adds to it */
    int32_t pull, push;  /* rows of x into ring_x; rows of ring_dout (mok_link_move: made up on the spot) to their tokens' slots */
    int32_t signal;      /* MK_LINK_SIGNAL_PULL: a counter here for each batch of rows that have arrived (mok_link_move always does that);
                          * MK_LINK_SIGNAL_PUSH: a flag at the token's rank for each row (mok_link_copy only) */
    int32_t payload;     /* mok_link_copy: 0: signals only */
    int32_t mx;          /* rows of x are in MXFP8 (mx/mx.h) */
    uint32_t round;      /* value of the flags, not 0 */
} mk_link_params;

#endif
