/* The grouped GEMM core, part 5: the walk of a kernel that does nothing but one grouped GEMM over a row table, and at the same time
 * the definition of what a Program is.
 *
 * Expert e's rows stand in tiles [tile_first[e], tile_first[e+1]) of A, `rows[e]` of them; everything is read on the device.
 * Walk: groups of 16 row tiles; inside a group all column pairs, and for each of them the group's row tiles, so that the
 * CTAs at work share both operands in L2. */
#ifndef MK_GEMM_GROUPED_CUH
#define MK_GEMM_GROUPED_CUH

#include "cuda/gemm/tile.cuh"
#include "layout/table.h"

namespace mk {

/* The maps live in the kernel's parameters, so the program does too; what changes is in global memory (ticket) only. */
template <class Tile> struct GroupedProgram {
    mk_tensor_map a;                       /* [rows, K], box kBoxRowsA */
    mk_tensor_map b_low, b_high;           /* [E, N, K], box kBoxRowsB; unused with expert_maps */
    const mk_tensor_map *expert_maps;      /* null, or [E][2] in global memory: low and high half, each [1, N, K] */
    const int32_t *tile_first;             /* [E + 1], in row tiles */
    const int32_t *rows;                   /* [E] */
    uint32_t *ticket;                      /* 0 at the start of the launch */
    int32_t num_experts;
    int32_t num_k_blocks;
    int32_t num_cols;                      /* of the result */
    int32_t tile_cols;                     /* columns of the result in a tile: Tile::cols, or half of it under SwiGLU */
    int32_t b_high_row;                    /* Tile::cols / 2, or where the up rows start in b_high */

    static constexpr int32_t kGroupTiles = 16;

    /* One thread of the cluster: the number of its next task. Numbers ascend. */
    MK_MEMBER uint32_t next() const { return ticket_take_relaxed_gpu(ticket, 1); }

    /* Task `number` of the CTA `rank` of its cluster; false if there are no more, and then `task` is not touched. */
    MK_MEMBER bool task(uint32_t number, uint32_t rank, GemmTask &task) const
    {
        const int32_t num_tiles = load(&tile_first[num_experts]);
        const int32_t steps = (num_cols + tile_cols * (int32_t)kColumnTiles<Tile> - 1) / (tile_cols * (int32_t)kColumnTiles<Tile>);
        const int32_t group = (int32_t)number / (kGroupTiles * steps);
        const int32_t in_group = (int32_t)number % (kGroupTiles * steps);
        const int32_t group_tiles = num_tiles - group * kGroupTiles < kGroupTiles ? num_tiles - group * kGroupTiles : kGroupTiles;
        if (group_tiles <= 0 || in_group >= group_tiles * steps)
            return false;
        const int32_t tile = group * kGroupTiles + in_group % group_tiles;
        const int32_t expert = (int32_t)mk_find_interval32(tile_first, num_experts, tile);
        const int32_t rows_left = load(&rows[expert]) - (tile - load(&tile_first[expert])) * (int32_t)Tile::rows;
        task.row = task.out_row = tile * (int32_t)Tile::rows;
        task.col = (in_group / group_tiles * (int32_t)kColumnTiles<Tile> + (int32_t)rank) * tile_cols;
        task.expert = expert;
        task.num_rows = rows_left < (int32_t)Tile::rows ? rows_left : (int32_t)Tile::rows;
        task.num_k_blocks = num_k_blocks;
        return true;
    }

    /* The load thread, before it loads anything of a task: waits until A's rows are there. */
    MK_MEMBER void wait_operands(const GemmTask &) const {}

    MK_MEMBER GemmInput input(const GemmTask &task) const
    {
        if (!expert_maps)
            return {&a, &b_low, &b_high, b_high_row, task.expert};
        const mk_tensor_map *own = expert_maps + 2 * task.expert;
        fence_tensor_map_acquire_sys(&own[0]);  /* the host wrote them */
        fence_tensor_map_acquire_sys(&own[1]);
        return {&a, &own[0], &own[1], b_high_row, 0};
    }
};

/* The same for operands in MXFP8. K blocks are 128 elements; the rows of b_high and those of its scales begin at a multiple of 128. */
template <class Tile> struct GroupedScaledProgram : GroupedProgram<Tile> {
    mk_tensor_map a_scales, b_low_scales, b_high_scales;

    MK_MEMBER ScaledGemmInput input(const GemmTask &task) const { return {GroupedProgram<Tile>::input(task), &a_scales, &b_low_scales, &b_high_scales}; }
};

} /* namespace mk */
#endif
