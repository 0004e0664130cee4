/* Tensor maps: the 128-byte object through which the copy engine (TMA) sees a tensor in global memory.
 *
 * In:  a description of the tensor and of the box that one copy moves.
 * Out: an opaque map. On a GPU the driver encodes it (cuTensorMapEncodeTiled), in the emulator src/emu does; both come in
 *      as one function pointer of the driver's signature, so that host code is the same for both.
 * Plain C for gcc, g++ and nvcc; no CUDA header. It does not allocate, and never touches a GPU. */
#ifndef MK_ARCH_TENSOR_MAP_H
#define MK_ARCH_TENSOR_MAP_H

#include <stdint.h>

#ifdef __cplusplus
#define MK_ALIGN(n) alignas(n)
#else
#define MK_ALIGN(n) _Alignas(n)
#endif

typedef struct mk_tensor_map { MK_ALIGN(64) uint64_t opaque[16]; } mk_tensor_map;

/* Numbers of CUtensorMapDataType and CUtensorMapSwizzle. */
enum { MK_TENSOR_U8 = 0, MK_TENSOR_U16 = 1, MK_TENSOR_F32 = 7, MK_TENSOR_BF16 = 9 };
enum { MK_SWIZZLE_NONE = 0, MK_SWIZZLE_128B = 3 };

/* Dimension 0 is the contiguous one. stride_bytes[i] is the distance of neighbours along dimension i + 1. */
typedef struct mk_tensor {
    const void *address;        /* 16-byte aligned */
    uint32_t type, swizzle;
    uint32_t rank;              /* 1..3 */
    uint64_t dim[3];            /* elements */
    uint64_t stride_bytes[2];   /* multiples of 16 */
    uint32_t box[3];            /* elements of one copy, each 1..256; with MK_SWIZZLE_128B box[0] is at most 128 bytes */
} mk_tensor;

/* cuTensorMapEncodeTiled, with the driver's enums as the ints they are. */
typedef int (*mk_tensor_map_encoder)(void *map, int type, uint32_t rank, void *address, const uint64_t *dim,
                                     const uint64_t *stride_bytes, const uint32_t *box, const uint32_t *element_stride,
                                     int interleave, int swizzle, int l2_promotion, int oob_fill);

/* 0, or what the encoder refuses with (CUresult). Out-of-bounds elements of a load are zero; of a store, dropped. */
static inline int mk_tensor_map_encode(mk_tensor_map *map, const mk_tensor *tensor, mk_tensor_map_encoder encode)
{
    enum { INTERLEAVE_NONE = 0, L2_PROMOTION_128B = 2, OOB_ZERO = 0 };
    static const uint32_t ones[3] = {1, 1, 1};
    mk_tensor_map aligned; /* the encoder insists on 64 bytes, and gcc 12 does not align returned structs so far */
    int refused = encode(&aligned, (int)tensor->type, tensor->rank, (void *)(uintptr_t)tensor->address, tensor->dim, tensor->stride_bytes,
                         tensor->box, ones, INTERLEAVE_NONE, (int)tensor->swizzle, L2_PROMOTION_128B, OOB_ZERO);
    if (!refused)
        *map = aligned;
    return refused;
}

/* A row-major bf16 matrix stack [depth, rows, cols] seen through boxes of box_rows x 64 columns, in the 128-byte swizzle that
 * wgmma reads: the shape of every GEMM operand. depth 0 makes a 2-D map. */
static inline mk_tensor mk_tensor_operand(const void *address, uint64_t cols, uint64_t rows, uint64_t depth, uint32_t box_rows)
{
    mk_tensor t;
    t.address = address;
    t.type = MK_TENSOR_BF16;
    t.swizzle = MK_SWIZZLE_128B;
    t.rank = depth ? 3 : 2;
    t.dim[0] = cols;
    t.dim[1] = rows;
    t.dim[2] = depth ? depth : 1;
    t.stride_bytes[0] = cols * 2;
    t.stride_bytes[1] = cols * rows * 2;
    t.box[0] = 64;
    t.box[1] = box_rows;
    t.box[2] = 1;
    return t;
}

/* The same of e4m3: boxes of box_rows x 128 columns. */
static inline mk_tensor mk_tensor_operand_e4m3(const void *address, uint64_t cols, uint64_t rows, uint64_t depth, uint32_t box_rows)
{
    mk_tensor t = mk_tensor_operand(address, cols, rows, depth, box_rows);
    t.type = MK_TENSOR_U8;
    t.stride_bytes[0] = cols;
    t.stride_bytes[1] = cols * rows;
    t.box[0] = 128;
    return t;
}

/* The scales of that stack in their atoms of 128 rows x 128 columns, 512 bytes each (tensor_core.h). A box is one atom, as 256 pairs of bytes:
 * the atom of (row, col) is at coordinates (256 * (col / 128), row / 128, depth). Outside are zeros: scales of elements that are zeros there. */
static inline mk_tensor mk_tensor_scales(const void *address, uint64_t cols, uint64_t rows, uint64_t depth)
{
    const uint64_t across = (cols + 127) / 128, down = (rows + 127) / 128;
    mk_tensor t = mk_tensor_operand(address, across * 256, down, depth, 1);
    t.type = MK_TENSOR_U16;
    t.swizzle = MK_SWIZZLE_NONE;
    t.box[0] = 256;
    return t;
}
#endif
