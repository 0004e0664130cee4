/* MXFP8 at the ends of the products: rows that are quantised on their way out of an epilogue, and read back. They leave in pieces of eight
 * columns, four neighbouring lanes to a block of 32 (gemm/epilogue.cuh), so the functions of mx.cuh apply to them as they are. */
#ifndef MK_STAGE_MX_EPILOGUE_CUH
#define MK_STAGE_MX_EPILOGUE_CUH

#include "cuda/stage/mx.cuh"
#include "cuda/stage/rows.cuh"

namespace mk {

/* The counter of numbers that were not finite. */
MK_DEVICE uint64_t *mx_not_finite(const mk_rank_params &r) { return reinterpret_cast<uint64_t *>(&device_state(r)->mx_not_finite); }

/* Rows of the ring as the next product sees them: quantised and widened again. */
struct MxRoundedRows {
    bf16 *base;
    int64_t cols;
    uint64_t *not_finite;
    /* All lanes: eight columns of a row of the tile, from column `col` of the matrix on. */
    MK_MEMBER void put(const GemmTask &task, uint32_t r, int64_t col, bool there, const Vec4 &v) const
    {
        const Vec4 rounded = mx_round8(v);
        if (!there)
            return;
        mx_count_not_finite(not_finite, v);
        store(reinterpret_cast<Vec4 *>(base + ((int64_t)task.row + r) * cols + col), rounded);
    }
};

/* The same where the tensor cores multiply MXFP8: elements [ring, cols], and behind them the scales in their atoms. */
struct MxScaledRows {
    uint8_t *base;
    int64_t cols, rows;
    uint64_t *not_finite;
    MK_MEMBER void put(const GemmTask &task, uint32_t r, int64_t col, bool there, const Vec4 &v) const
    {
        const uint8_t scale = mx_block_scale(v);
        const uint32_t both = scale | shuffle_xor((uint32_t)scale, 4) << 8; /* of the chunk's two blocks: in the first one's lanes */
        if (!there)
            return;
        const int64_t row = (int64_t)task.row + r;
        mx_count_not_finite(not_finite, v);
        store(reinterpret_cast<MxElements8 *>(base + row * cols + col), mx_encode8(v, scale));
        if (lane_idx() % 8 == 0)
            store_scales(row, col, (uint16_t)both);
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
    MK_MEMBER void put(const GemmTask &task, uint32_t r, int64_t col, bool there, const Vec4 &v) const
    {
        const int64_t table_row = (int64_t)task.out_row + r;
        const uint8_t scale = mx_block_scale(v);
        if (!there || table_row >= limit)
            return;
        uint8_t *row = base + table_row * mk_mx_row_stride(cols);
        store(reinterpret_cast<MxElements8 *>(row + col), mx_encode8(v, scale));
        if (lane_idx() % 4 == 0)
            store(row + cols + col / MK_MX_BLOCK, scale);
    }
};

/* What SwigluRows (gemm/epilogue.cuh) asks for. */
MK_DEVICE void put_columns(const MxRoundedRows &rows, const GemmTask &task, uint32_t r, int64_t col, bool there, const Vec4 &v) { rows.put(task, r, col, there, v); }
MK_DEVICE void put_columns(const MxScaledRows &rows, const GemmTask &task, uint32_t r, int64_t col, bool there, const Vec4 &v) { rows.put(task, r, col, there, v); }
MK_DEVICE void put_columns(const MxSavedRows &rows, const GemmTask &task, uint32_t r, int64_t col, bool there, const Vec4 &v) { rows.put(task, r, col, there, v); }

/* Eight columns of row `row` of the context in MXFP8, from column `col` on; first: the tile's first row. */
MK_DEVICE Vec4 mx_read8(const uint8_t *first, uint32_t cols, uint32_t row, uint32_t col)
{
    const uint8_t *from = first + (int64_t)row * mk_mx_row_stride(cols);
    return mx_widen8(load(reinterpret_cast<const MxElements8 *>(from + col)), load(from + cols + col / MK_MX_BLOCK));
}

} /* namespace mk */
#endif
