/* The rows that the GEMM stages work on, seen by the GEMM core: a Program (grouped.cuh says what that is) over one minibatch of the table, or
 * over this rank's tokens for the shared expert; and where results go. */
#ifndef MK_STAGE_ROWS_CUH
#define MK_STAGE_ROWS_CUH

#include "cuda/gemm/gemm.cuh"
#include "cuda/stage/stage.cuh"
#include "cuda/stage/weights.cuh"

namespace mk {

/* The tiles of this chip's staged launches, and those of the routed experts in MXFP8. On Blackwell there is one of each, under both names. */
#ifdef MK_SM100
using TileStageWide = TilePair;
using TileStageNarrow = TilePair;
using TileStageWideMx = TilePairScaled;
using TileStageNarrowMx = TilePairScaled;
#else
using TileStageWide = TileWide;
using TileStageNarrow = TileNarrow;
using TileStageWideMx = TileWide;
using TileStageNarrowMx = TileNarrow;
#endif

/* Tasks of one launch: groups of 16 row tiles; in a group all column pairs, and for each the group's tiles. */
template <class Tile> struct StageProgram {
    const mk_gemm_params &p;
    mk_table t;
    uint32_t *ticket;
    int64_t first, end;        /* row tiles */
    int32_t tile_cols;         /* columns of the result in a tile: all of them, or half of gate and up */
    ExpertMaps known;          /* of the load thread */

    static constexpr int32_t kGroupTiles = 16;

    MK_MEMBER StageProgram(const mk_gemm_params &params, int32_t cols) : p(params), t(mk_table_at(&params.rank.memory, params.schedule)), tile_cols(cols)
    {
        ticket = draw_from(p.rank, p.ticket);
        first = end = 0;
        if (skipped(p.rank))
            return;
        if (p.shared)
            end = mk_ceil_div(p.num_tokens, MK_ROW_TILE);
        else
            forward_minibatch(p.rank.dims, load(&t.head->num_tiles), p.step, &first, &end);
    }

    MK_MEMBER uint32_t next() const { return ticket_take_relaxed_gpu(ticket, 1); }

    MK_MEMBER bool task(uint32_t number, uint32_t rank, GemmTask &task) const
    {
        const int32_t steps = (int32_t)mk_ceil_div(p.num_cols, tile_cols * (int32_t)kColumnTiles<Tile>), num_tiles = (int32_t)(end - first);
        const int32_t group = (int32_t)number / (kGroupTiles * steps), in_group = (int32_t)number % (kGroupTiles * steps);
        const int32_t group_tiles = (int32_t)mk_min(num_tiles - group * kGroupTiles, kGroupTiles);
        if (group_tiles <= 0 || in_group >= group_tiles * steps)
            return false;
        const int64_t tile = first + group * kGroupTiles + in_group % group_tiles;
        task.out_row = (int32_t)(tile * MK_ROW_TILE);
        task.col = (in_group / group_tiles * (int32_t)kColumnTiles<Tile> + (int32_t)rank) * tile_cols;
        task.num_k_blocks = p.num_k_blocks;
        if (p.shared) {
            task.row = task.out_row;
            task.num_rows = (int32_t)mk_min(p.num_tokens - task.out_row, MK_ROW_TILE);
            return true;
        }
        task.expert = (int32_t)mk_expert_of_tile(&t, tile);
        task.row = (int32_t)ring_row(p.rank.dims, tile);
        task.num_rows = (int32_t)mk_valid_rows(&t, tile);
        return true;
    }

    /* The rows come from an earlier launch, which wrote them by bulk copies or plain stores. */
    MK_MEMBER void wait_operands(const GemmTask &) const {}

    MK_MEMBER GemmInput input(const GemmTask &task)
    {
        if (p.expert_maps)
            return input_by_pointer(known, &p.a, p.expert_maps + task.expert * MK_EXPERT_MAPS, tile_cols == (int32_t)Tile::cols, (int32_t)Tile::cols / 2);
        return {&p.a, &p.b_low, &p.b_high, p.b_high_row, task.expert};
    }
};

/* Of the routed experts in MXFP8. */
template <class Tile, bool Scaled = kMultipliesMx> struct MxStageProgram : StageProgram<Tile> { using StageProgram<Tile>::StageProgram; };
template <class Tile> struct MxStageProgram<Tile, true> : StageProgram<Tile> {
    using StageProgram<Tile>::StageProgram;
    MK_MEMBER ScaledGemmInput input(const GemmTask &task)
    {
        return {StageProgram<Tile>::input(task), &this->p.a_scales, &this->p.b_low_scales, &this->p.b_high_scales};
    }
};

/* Rows of a ring buffer, or of a buffer over this rank's tokens. */
struct RingRows {
    bf16 *base;
    int64_t cols;
    MK_MEMBER bf16 *row(const GemmTask &task, uint32_t r) const { return base + ((int64_t)task.row + r) * cols; }
};

/* Rows of the context: the first `limit` table rows; base null: none. */
struct SavedRows {
    bf16 *base;
    int64_t cols, limit;
    MK_MEMBER bf16 *row(const GemmTask &task, uint32_t r) const
    {
        return (int64_t)task.out_row + r < limit ? base + ((int64_t)task.out_row + r) * cols : nullptr;
    }
};

/* The pushing half of s5_combine: slot (t, k) of the row's rank. base: shared expert's rows, which stay here; null: routed. */
struct SlotRows {
    const mk_rank_params &r;
    const mk_row *rows;
    bf16 *shared;
    int64_t cols;
    MK_MEMBER bf16 *row(const GemmTask &task, uint32_t i) const
    {
        const int64_t row = (int64_t)task.out_row + i;
        if (shared)
            return shared + row * cols;
        const mk_row record = load(&rows[row]);
        return in_peer<bf16>(r, record.src_rank, r.memory.slots) + record.src_slot * cols;
    }
};

/* The same, looked up before the MMAs, because the look takes as long as storing the rows. A lane keeps what it has read of one of the warp's 32 rows, and has not
 * waited for it when the MMAs begin. */
struct RowPlace { int32_t src_rank, src_slot; };
static_assert(offsetof(mk_row, src_rank) == 0 && offsetof(mk_row, src_slot) == 4, "read in one go");

struct HeldRows {
    uint64_t own; /* where this lane's row goes; 0: it does not exist */
    int64_t cols;

    template <class Tile> static MK_MEMBER RowPlace look(const mk_row *rows, const GemmTask &task, const WarpOut &out)
    {
        static_assert(Acc<Tile>::blocks == 2, "32 rows");
        const uint32_t r = out.row + lane_idx() / 16 * Acc<Tile>::block_rows + lane_idx() % 16;
        return r < (uint32_t)task.num_rows ? load(reinterpret_cast<const RowPlace *>(&rows[task.out_row + (int64_t)r])) : RowPlace{-1, 0};
    }
    static MK_MEMBER HeldRows of(const mk_rank_params &r, const RowPlace &at)
    {
        if (at.src_rank < 0)
            return {0, r.dims.hidden};
        return {reinterpret_cast<uint64_t>(in_peer<bf16>(r, at.src_rank, r.memory.slots) + at.src_slot * r.dims.hidden), r.dims.hidden};
    }
};
template <class Tile> MK_DEVICE void find_lane_rows(LaneRows &to, const HeldRows &rows, const GemmTask &, uint32_t block, uint32_t)
{
    MK_UNROLL for (uint32_t i = 0; i < 4; i++) {
        const uint32_t lane = block * 16 + 4 * i + lane_idx() / 8;
        const uint32_t low = shuffle((uint32_t)rows.own, lane), high = shuffle((uint32_t)(rows.own >> 32), lane);
        to.to[i] = reinterpret_cast<bf16 *>((uint64_t)high << 32 | low);
    }
}

static_assert(sizeof(GemmShared<TileStageWide>) == MK_GEMM_SHARED_WIDE && sizeof(GemmShared<TileStageNarrow>) == MK_GEMM_SHARED_NARROW, "what the host asks for");
static_assert(sizeof(GemmShared<TileStageWideMx>) <= MK_GEMM_SHARED_WIDE && sizeof(GemmShared<TileStageNarrowMx>) <= MK_GEMM_SHARED_NARROW, "what the host asks for");

} /* namespace mk */
#endif
