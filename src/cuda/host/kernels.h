/* The kernels: one list of their names and launch shapes, and the binary they come from, which is part of libmok.so. */
#ifndef MK_CUDA_KERNELS_H
#define MK_CUDA_KERNELS_H

#include "cuda/host/driver.h"
#include "cuda/kernel/link_params.h"
#include "cuda/kernel/mx_params.h"
#include "cuda/kernel/params.h"

/* X(name, threads, bytes of dynamic shared memory, CTAs of a cluster), as in cuda/kernel/params.h. A kernel that was compiled for fewer threads (Blackwell's fused forward:
 * 384) is launched with those. */
#define MK_CUDA_KERNEL_LIST(X)                            \
    X(mok_call_begin, 128, MK_SMALL_SHARED, 1)            \
    X(mok_weight_maps, 128, MK_SMALL_SHARED, 1)           \
    X(mok_rank_barrier, 128, MK_SMALL_SHARED, 1)          \
    X(mok_call_check, 128, MK_SMALL_SHARED, 1)            \
    X(mok_s0_count, 256, MK_SMALL_SHARED, 1)              \
    X(mok_s0_scan, 256, MK_SMALL_SHARED, 1)               \
    X(mok_s0_segments, 256, MK_SMALL_SHARED, 1)           \
    X(mok_s0_place, 256, MK_SMALL_SHARED, 1)              \
    X(mok_s0_copies, 256, MK_SMALL_SHARED, 1)             \
    X(mok_s1_dispatch, 32, MK_DISPATCH_SHARED, 1)         \
    X(mok_s2_gate_up_wide, 384, MK_GEMM_SHARED_WIDE, 2)   \
    X(mok_s2_gate_up_narrow, 384, MK_GEMM_SHARED_NARROW, 2) \
    X(mok_s4_down_wide, 384, MK_GEMM_SHARED_WIDE, 2)      \
    X(mok_s4_down_narrow, 384, MK_GEMM_SHARED_NARROW, 2)  \
    X(mok_forward_fused, 512, MK_FORWARD_SHARED, 2)       \
    X(mok_s5_combine, 256, MK_SMALL_SHARED, 1)            \
    X(mok_shared_scale, 256, MK_SMALL_SHARED, 1)          \
    X(mok_backward_fused, 384, MK_BACKWARD_SHARED, 2)     \
    X(mok_s5_combine_bwd, 256, MK_SMALL_SHARED, 1)        \
    X(mok_s1_dispatch_mx, 32, MK_DISPATCH_SHARED, 1)      \
    X(mok_s2_gate_up_wide_mx, 384, MK_GEMM_SHARED_WIDE, 2) \
    X(mok_s2_gate_up_narrow_mx, 384, MK_GEMM_SHARED_NARROW, 2) \
    X(mok_s4_down_wide_mx, 384, MK_GEMM_SHARED_WIDE, 2)   \
    X(mok_s4_down_narrow_mx, 384, MK_GEMM_SHARED_NARROW, 2) \
    X(mok_forward_fused_mx, 384, MK_FORWARD_SHARED, 2)    \
    X(mok_backward_fused_mx, 384, MK_BACKWARD_SHARED, 2)  \
    X(mok_mx_quantise_rows, 256, MK_SMALL_SHARED, 1)      \
    X(mok_mx_widen_weights, 256, MK_SMALL_SHARED, 1)      \
    X(mok_mx_quantise_matrix, 256, MK_SMALL_SHARED, 1)    \
    X(mok_mx_quantise_turned, 256, MK_MX_TURNED_SHARED, 1) \
    X(mok_mx_take_part, 256, MK_SMALL_SHARED, 1)          \
    X(mok_link_fill, 256, MK_SMALL_SHARED, 1)             \
    X(mok_link_move, 288, MK_LINK_MOVE_SHARED, 1)         \
    X(mok_link_move_mx, 288, MK_LINK_MOVE_SHARED, 1)      \
    X(mok_link_copy, 256, MK_LINK_COPY_SHARED, 1)         \
    X(mok_link_check, 256, MK_SMALL_SHARED, 1)

typedef enum mk_cuda_kernel {
#define MK_CUDA_KERNEL_ENUM(name, threads, shared, cluster) MK_CUDA_##name,
    MK_CUDA_KERNEL_LIST(MK_CUDA_KERNEL_ENUM)
#undef MK_CUDA_KERNEL_ENUM
    MK_NUM_CUDA_KERNELS
} mk_cuda_kernel;

typedef struct mk_cuda_kernel_shape { const char *name; unsigned threads, shared, cluster; } mk_cuda_kernel_shape;
extern const mk_cuda_kernel_shape mk_cuda_kernel_shapes[MK_NUM_CUDA_KERNELS];

/* Loaded into one context. */
typedef struct mk_cuda_kernels {
    mk_cu_module module;                              /* NULL: not loaded */
    mk_cu_function function[MK_NUM_CUDA_KERNELS];
    unsigned threads[MK_NUM_CUDA_KERNELS];            /* of a block */
    int max_clusters[MK_NUM_CUDA_KERNELS];            /* resident at once; only of kernels in clusters */
} mk_cuda_kernels;

/* The fat binary inside this library, or NULL: *why says why it was built without. *archs: "90a, sm_100a". */
const void *mk_cuda_image(const char **archs, const char **why);
/* For tests and the emulator: this image instead; NULL: the built-in one again. */
void mk_cuda_image_inject(const void *image);

/* With the context current. Loads everything there and then: a kernel that loads lazily could need the GPU to be idle while
 * another rank's kernel waits for it. */
mok_status mk_cuda_kernels_load(const mk_cuda_driver *api, mk_cuda_kernels *kernels);
void mk_cuda_kernels_unload(const mk_cuda_driver *api, mk_cuda_kernels *kernels);

#endif
