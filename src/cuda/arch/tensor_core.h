/* Encodings that the matrix units of both chips read: descriptors of operands in shared memory (wgmma, tcgen05), the instruction
 * descriptor of tcgen05.mma, tensor-memory addresses, and the layout of MX scales. Each is one function here, for gcc, g++ and
 * nvcc alike; the emulator takes them apart again on its own.
 *
 * Field positions are those of the PTX manual, chapters "wgmma" and "tcgen05". */
#ifndef MK_ARCH_TENSOR_CORE_H
#define MK_ARCH_TENSOR_CORE_H

#include <stdint.h>

#ifdef __CUDACC__
#define MK_ENCODE static __host__ __device__ __forceinline__
#else
#define MK_ENCODE static inline __attribute__((unused))
#endif

/* ---- operands in shared memory ----
 *
 *   bits  0-13 address / 16        bits 46-48 Blackwell: 1           bits 61-63 Blackwell: 0 none, 2 128-byte,
 *        16-29 leading offset / 16      49-51 base offset: 0                    4 64-byte, 6 32-byte swizzle
 *        32-45 stride offset / 16                                    bits 62-63 Hopper: 0 none, 1 128, 2 64, 3 32
 *
 * The base offset is 0 because every tile is aligned to its swizzle pattern. What the offsets mean depends on the layout:
 *   contraction axis contiguous, 128-byte swizzle: stride = from 8 rows to the next 8 rows; the leading offset is not used
 *   other axis contiguous, 128-byte swizzle: stride = to the next 8 of the contraction axis, leading = to the next 128 bytes of the other
 *   no swizzle: stride = to the next 8 rows, leading = to the next 16 bytes of the contraction axis */
enum mk_smem_swizzle { MK_SMEM_SWIZZLE_NONE = 0, MK_SMEM_SWIZZLE_128B = 1, MK_SMEM_SWIZZLE_64B = 2, MK_SMEM_SWIZZLE_32B = 3 };

MK_ENCODE uint64_t mk_smem_descriptor_sm90(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes, uint32_t swizzle)
{
    return (uint64_t)(address & 0x3ffff) >> 4 | (uint64_t)(leading_bytes >> 4) << 16 | (uint64_t)(stride_bytes >> 4) << 32 | (uint64_t)swizzle << 62;
}

/* The same layouts have the same bits on Blackwell, but for the version in bit 46. */
MK_ENCODE uint64_t mk_smem_descriptor_sm100(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes, uint32_t swizzle)
{
    return mk_smem_descriptor_sm90(address, leading_bytes, stride_bytes, swizzle) | 1ull << 46;
}

/* A tile as TMA's 128-byte swizzle writes it, contraction axis contiguous: rows of 128 bytes, eight rows to a pattern. One step of an MMA
 * (32 bytes of the contraction axis) adds 2 to the descriptor. */
MK_ENCODE uint64_t mk_operand_sm90(uint32_t address) { return mk_smem_descriptor_sm90(address, 16, 1024, MK_SMEM_SWIZZLE_128B); }
MK_ENCODE uint64_t mk_operand_sm100(uint32_t address) { return mk_smem_descriptor_sm100(address, 16, 1024, MK_SMEM_SWIZZLE_128B); }
/* 512 bytes of scales (below) as tcgen05.cp reads them: 32 rows of 16 bytes. */
MK_ENCODE uint64_t mk_scale_descriptor_sm100(uint32_t address) { return mk_smem_descriptor_sm100(address, 0, 128, MK_SMEM_SWIZZLE_NONE); }

/* ---- the instruction descriptor of tcgen05.mma ----
 *
 *   kind::f16          4-5 D: 1 = fp32 | 7-9, 10-12 A, B: 1 = bf16                  | 15, 16 A, B not K-major | 17-22 N / 8 | 24-28 M / 16
 *   kind::mxf8f6f4     4-5 id of B's scales | 7-9, 10-12 A, B: 0 = e4m3, 1 = e5m2 | 15, 16 the same          | 17-22 N / 8 | 23 = 1: E8M0 |
 *                      27-28 M / 128 | 29-30 id of A's scales
 *
 * M and N are those of the whole instruction: of both CTAs with cta_group::2. The id of the scales says which byte of their 32-bit cells
 * is meant: the block of 32 that this instruction contracts over, counted in its 128. */
enum mk_mma_type { MK_MMA_E4M3 = 0, MK_MMA_E5M2 = 1 };

MK_ENCODE uint32_t mk_mma_shape(uint32_t m, uint32_t n, uint32_t a_mn_major, uint32_t b_mn_major)
{
    return (n >> 3) << 17 | (m >> 4) << 24 | a_mn_major << 15 | b_mn_major << 16;
}

MK_ENCODE uint32_t mk_mma_descriptor_bf16(uint32_t m, uint32_t n, uint32_t a_mn_major, uint32_t b_mn_major)
{
    return mk_mma_shape(m, n, a_mn_major, b_mn_major) | 1u << 4 | 1u << 7 | 1u << 10;
}

MK_ENCODE uint32_t mk_mma_descriptor_mx(uint32_t m, uint32_t n, uint32_t a_mn_major, uint32_t b_mn_major, uint32_t a_type, uint32_t b_type, uint32_t a_scale_id, uint32_t b_scale_id)
{
    return mk_mma_shape(m, n, a_mn_major, b_mn_major) | a_type << 7 | b_type << 10 | 1u << 23 | a_scale_id << 29 | b_scale_id << 4;
}

/* ---- tensor memory: 128 lanes x 512 columns of 32 bits ---- */

enum { MK_TMEM_LANES = 128, MK_TMEM_COLUMNS = 512 };
MK_ENCODE uint32_t mk_tmem_address(uint32_t lane, uint32_t column) { return lane << 16 | column; }

/* ---- MX scales: one E8M0 byte for each row and block of 32 along the contraction axis ----
 *
 * In global and shared memory they come in atoms of 128 rows x 4 blocks = 512 bytes, rows padded to 128 and blocks to 4. One tcgen05.cp
 * brings an atom into 4 columns of tensor memory, which then hold row mn in column mn % 128 / 32, lane mn % 32 (and 32, 64 and 96 lanes
 * further), the 4 blocks in the 4 bytes of the cell. Further rows of 128 follow 4 columns on. */
enum { MK_SCALE_ATOM_ROWS = 128, MK_SCALE_ATOM_BLOCKS = 4, MK_SCALE_ATOM_BYTES = 512, MK_SCALE_ATOM_COLUMNS = 4 };

/* Byte of the scale of (row, block), where a row has `blocks` blocks. */
MK_ENCODE int64_t mk_scale_byte(int64_t row, int64_t block, int64_t blocks)
{
    int64_t atom = row / MK_SCALE_ATOM_ROWS * ((blocks + 3) / 4) + block / 4;
    return atom * MK_SCALE_ATOM_BYTES + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}
MK_ENCODE int64_t mk_scale_bytes(int64_t rows, int64_t blocks) { return (rows + 127) / 128 * ((blocks + 3) / 4) * MK_SCALE_ATOM_BYTES; }
/* Its cell, in lanes and columns behind the first; the byte is block % 4. */
MK_ENCODE uint32_t mk_scale_cell(uint32_t row) { return mk_tmem_address(row % 32, row % 128 / 32 + row / 128 * MK_SCALE_ATOM_COLUMNS); }

#endif
