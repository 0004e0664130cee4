/* MXFP8 at the ends of the products: rows that are quantised on their way out of an epilogue, and read back. They leave in pieces of eight
 * columns, four neighbouring lanes to a block of 32 (gemm/epilogue.cuh), so the functions of mx.cuh apply to them as they are. */
#ifndef MK_STAGE_MX_EPILOGUE_CUH
#define MK_STAGE_MX_EPILOGUE_CUH

#include "cuda/stage/mx.cuh"
#include "cuda/stage/rows.cuh"

namespace mk {

/* The counter of numbers that were not finite. */
MK_DEVICE uint64_t *mx_not_finite(const mk_rank_params &r) { return reinterpret_cast<uint64_t *>(&device_state(r)->mx_not_finite); }

/* visit(row of the tile, column of the chunk, eight numbers): this lane's pieces of a chunk in staging memory. */
template <class Visit> MK_DEVICE void each_piece(uint32_t half, uint32_t first_row, const Visit &visit)
{
    MK_ROLLED for (uint32_t i = 0; i < 4; i++) {
        const uint32_t row = 4 * i + lane_idx() / 8;
        visit(first_row + row, lane_idx() % 8 * 8, load_shared_b128(chunk_piece(half, row, lane_idx() % 8)));
    }
}

/* Rows of the ring as the next product sees them: quantised and widened again. */
struct MxRoundedRows {
    bf16 *base;
    int64_t cols;
    uint64_t *not_finite;
    /* A chunk (after a sync_warp), whose first column is `col`. */
    MK_MEMBER void flush(const GemmTask &task, uint32_t half, uint32_t first_row, int64_t col) const
    {
        each_piece(half, first_row, [&](uint32_t r, uint32_t c, const Vec4 &v) {
            const Vec4 rounded = mx_round8(v);
            if (r >= (uint32_t)task.num_rows)
                return;
            mx_count_not_finite(not_finite, v);
            store(reinterpret_cast<Vec4 *>(base + ((int64_t)task.row + r) * cols + col + c), rounded);
        });
    }
};

/* The same where the tensor cores multiply MXFP8: elements [ring, cols], and behind them the scales in their atoms. */
struct MxScaledRows {
    uint8_t *base;
    int64_t cols, rows;
    uint64_t *not_finite;
    MK_MEMBER void flush(const GemmTask &task, uint32_t half, uint32_t first_row, int64_t col) const
    {
        each_piece(half, first_row, [&](uint32_t r, uint32_t c, const Vec4 &v) {
            const uint8_t scale = mx_block_scale(v);
            const uint32_t both = scale | shuffle_xor((uint32_t)scale, 4) << 8; /* of the chunk's two blocks: in the first one's lanes */
            if (r >= (uint32_t)task.num_rows)
                return;
            const int64_t row = (int64_t)task.row + r;
            mx_count_not_finite(not_finite, v);
            store(reinterpret_cast<MxElements8 *>(base + row * cols + col + c), mx_encode8(v, scale));
            if (c == 0)
                store_scales(row, col, (uint16_t)both);
        });
    }

private:
    /* A last half atom is filled up with scales of zeros. */
    MK_MEMBER void store_scales(int64_t row, int64_t col, uint16_t both) const
    {
        uint16_t *at = reinterpret_cast<uint16_t *>(base + rows * cols + mk_mx_scale_index(row, col / MK_MX_BLOCK, cols));
        store(at, both);
        if (col % MK_MX_TILE == 0 && col + MK_MX_TILE / 2 == cols)
            store(at + 1, (uint16_t)(MK_MX_SCALE_MIN * 0x0101u));
    }
};

/* Rows of I columns in the ring, or beside it, as this chip multiplies them. */
#ifdef MK_SM100
typedef MxScaledRows MxOperandRows;
MK_DEVICE MxOperandRows mx_operand_rows(const mk_rank_params &r, int64_t place, bool counted = true)
{
    return {in_local<uint8_t>(r, place), r.dims.intermediate, MK_RING_ROWS(&r.dims), counted ? mx_not_finite(r) : nullptr};
}
#else
typedef MxRoundedRows MxOperandRows;
MK_DEVICE MxOperandRows mx_operand_rows(const mk_rank_params &r, int64_t place, bool counted = true) { return {in_local<bf16>(r, place), r.dims.intermediate, counted ? mx_not_finite(r) : nullptr}; }
#endif

/* Rows of the context in MXFP8 (mx/mx.h): the first `limit` table rows; base null: none. */
struct MxSavedRows {
    uint8_t *base;
    int64_t cols, limit;
    MK_MEMBER void flush(const GemmTask &task, uint32_t half, uint32_t first_row, int64_t col) const
    {
        each_piece(half, first_row, [&](uint32_t r, uint32_t c, const Vec4 &v) {
            const int64_t table_row = (int64_t)task.out_row + r, at = col + c;
            const uint8_t scale = mx_block_scale(v);
            if (r >= (uint32_t)task.num_rows || table_row >= limit)
                return;
            uint8_t *row = base + table_row * mk_mx_row_stride(cols);
            store(reinterpret_cast<MxElements8 *>(row + at), mx_encode8(v, scale));
            if (lane_idx() % 4 == 0)
                store(row + cols + at / MK_MX_BLOCK, scale);
        });
    }
};

/* Rows over this rank's tokens as they are: the shared expert's, which is bf16. base null: none. */
struct MxTokenRows {
    bf16 *base;
    int64_t cols;
    MK_MEMBER void flush(const GemmTask &task, uint32_t half, uint32_t first_row, int64_t col) const
    {
        each_piece(half, first_row, [&](uint32_t r, uint32_t c, const Vec4 &v) {
            if (r < (uint32_t)task.num_rows)
                store(reinterpret_cast<Vec4 *>(base + ((int64_t)task.row + r) * cols + col + c), v);
        });
    }
};

/* SwigluRows (gemm/epilogue.cuh) in MXFP8: h as s4_down multiplies it, gate and up kept quantised where their base is not null. What is kept leaves
 * first: then nothing but the accumulators lives while h is rounded. */
template <class Out, class Kept> struct MxSwigluRows {
    Out h;
    Kept gate, up;
    float limit;  /* infinity: no clamp */
    template <class Tile> MK_MEMBER void operator()(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out) const
    {
        const uint32_t low = out.staging, high = out.staging + kChunkBytes;
        each_swiglu_chunk(task, acc, out.row, h.cols, limit, [&](uint32_t row, int64_t col, PackedChunk packed_gate, PackedChunk packed_up, PackedChunk packed_h) {
            if (gate.base) {
                put_chunk(low, packed_gate);
                put_chunk(high, packed_up);
                sync_warp();
                gate.flush(task, low, row, col);
                up.flush(task, high, row, col);
                sync_warp();
            }
            put_chunk(low, packed_h);
            sync_warp();
            h.flush(task, low, row, col);
            sync_warp();
        });
    }
};

/* ---- the backward's rows (LanePlaces, gemm/epilogue.cuh) ---- */

/* As LanePlaces::flush, quantised and widened again on the way. not_finite null: nobody counts. */
MK_DEVICE void mx_flush(const LanePlaces &at, bf16 *base, uint32_t col, uint32_t half, uint64_t *not_finite)
{
    MK_ROLLED for (uint32_t i = 0; i < 4; i++) {
        const Vec4 v = load_shared_b128(chunk_piece(half, 4 * i + lane_idx() / 8, lane_idx() % 8)), rounded = mx_round8(v);
        if (4 * i >= at.rows)
            continue;
        mx_count_not_finite(not_finite, v);
        store(reinterpret_cast<Vec4 *>(base + at.tile + (at.lane + 4 * i * at.cols) + col + lane_idx() % 8 * 8), rounded);
    }
}

/* As LanePlaces::read, from rows of the context in MXFP8, the first of which is the tile's. */
MK_DEVICE void mx_read(const uint8_t *first, uint32_t cols, const GemmTask &task, uint32_t first_row, uint32_t col, Vec4 (&v)[4])
{
    const uint32_t at = (uint32_t)task.col + col + lane_idx() % 8 * 8;
    MK_UNROLL for (uint32_t i = 0; i < 4; i++) {
        const uint32_t r = first_row + 4 * i + lane_idx() / 8;
        const uint8_t *row = first + (int64_t)r * mk_mx_row_stride(cols);
        v[i] = {0, 0, 0, 0};
        if (r < (uint32_t)task.num_rows)
            v[i] = mx_widen8(load(reinterpret_cast<const MxElements8 *>(row + at)), load(row + cols + at / MK_MX_BLOCK));
    }
}

} /* namespace mk */
#endif
