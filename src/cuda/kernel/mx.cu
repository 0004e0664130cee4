/* Kernels of MXFP8 that stand alone: quantisation of tokens and weights, and the way back. Grids and parameters: mx_params.h. */
#include "cuda/stage/mx.cuh"

using namespace mk;

MK_DEVICE int64_t mx_warp() { return ((int64_t)block_idx() * 256 + thread_idx()) / 32; }
MK_DEVICE int64_t mx_warps() { return (int64_t)num_blocks() * 8; }

MK_ENTRY MK_KERNEL(256) mok_mx_quantise_rows(MK_KERNEL_PARAM mk_mx_rows_params p) { mx_quantise_rows(p, mx_warp(), mx_warps()); }
MK_ENTRY MK_KERNEL(256) mok_mx_widen_rows(MK_KERNEL_PARAM mk_mx_rows_params p) { mx_widen_rows(p, mx_warp(), mx_warps()); }
MK_ENTRY MK_KERNEL(256) mok_mx_quantise_matrix(MK_KERNEL_PARAM mk_mx_matrix_params p) { mx_quantise_matrix(p, mx_warp(), mx_warps()); }
MK_ENTRY MK_KERNEL(256) mok_mx_widen_matrix(MK_KERNEL_PARAM mk_mx_matrix_params p) { mx_widen_matrix(p, mx_warp(), mx_warps()); }
MK_ENTRY MK_KERNEL(256) mok_mx_widen_weights(MK_KERNEL_PARAM mk_mx_weight_params p) { mx_widen_weights(p, mx_warp(), mx_warps()); }
MK_ENTRY MK_KERNEL(256) mok_mx_take_part(MK_KERNEL_PARAM mk_mx_part_params p) { mx_take_part(p, mx_warp(), mx_warps()); }
MK_ENTRY MK_KERNEL(256) mok_mx_quantise_turned(MK_KERNEL_PARAM mk_mx_matrix_params p)
{
    mx_quantise_turned(p, *static_cast<MxTurnedShared *>(shared_base()));
}
