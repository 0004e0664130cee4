/* Weight gradients on the device: dWd += dout^T (w h), dWg += dgate^T x, dWu += dup^T x over the rows of one piece, in table order.
 * Both operands lie with their rows as the contraction axis, as they stand in the ring: nothing is transposed, not even e4m3. A cut expert's sum goes on
 * in wgrad_partial (fp32), from which the next piece's accumulators start, so that cutting changes no bit. */
#ifndef MK_STAGE_WGRAD_CUH
#define MK_STAGE_WGRAD_CUH

#include "cuda/stage/mx.cuh"
#include "cuda/stage/rows.cuh"

namespace mk {

/* Which tile of which matrix a part is: outputs [row, row + 128), inputs [col, col + 256) for a cluster's pair. Parts run over the
 * wanted matrices; in each, groups of 16 row tiles walk the columns, so that clusters at work share operands in a cache. */
struct WgradPart { int32_t matrix, row, col; };

struct WgradGrid {
    enum { Rows = 128, PairCols = 256, GroupTiles = 16 };
    /* In 32 bits: a GPU divides 64-bit numbers slowly, and one thread of a cluster works tasks out for both CTAs. */
    static MK_MEMBER uint32_t down(int32_t matrix, uint32_t hidden, uint32_t width) { return ((matrix == MK_GRAD_DOWN ? hidden : width) + Rows - 1u) / Rows; }
    static MK_MEMBER uint32_t across(int32_t matrix, uint32_t hidden, uint32_t width) { return ((matrix == MK_GRAD_DOWN ? width : hidden) + PairCols - 1u) / PairCols; }

    /* Tasks of a piece. */
    static MK_MEMBER int32_t count(const mk_grad_out *grads, int64_t hidden, int64_t width)
    {
        uint32_t n = 0;
        for (int32_t m = 0; m < MK_NUM_GRADS; m++)
            n += is_wanted(grads[m]) ? down(m, (uint32_t)hidden, (uint32_t)width) * across(m, (uint32_t)hidden, (uint32_t)width) : 0;
        return (int32_t)n;
    }

    static MK_MEMBER WgradPart at(const mk_grad_out *grads, uint32_t hidden, uint32_t width, uint32_t part)
    {
        for (int32_t m = 0; m < MK_NUM_GRADS; m++) {
            const uint32_t rows = down(m, hidden, width), columns = across(m, hidden, width), tiles = is_wanted(grads[m]) ? rows * columns : 0;
            if (part >= tiles) {
                part -= tiles;
                continue;
            }
            const uint32_t group = part / (GroupTiles * columns), in_group = part % (GroupTiles * columns);
            const uint32_t height = (uint32_t)mk_min(rows - group * GroupTiles, GroupTiles);
            return {m, (int32_t)((group * GroupTiles + in_group % height) * Rows), (int32_t)(in_group / height * PairCols)};
        }
        return {0, 0, 0};
    }
};

/* Flags travel in the upper bits of GemmTask.kind; TASK_SAVED: the rows' gate and up are in the context; TASK_SCALED: operands are e4m3 with scales. */
enum { WGRAD_MATRIX_SHIFT = 8, WGRAD_FIRST = 1 << 12, WGRAD_LAST = 1 << 13, TASK_SAVED = 1 << 14, TASK_SCALED = 1 << 15, TASK_KIND_MASK = 0xff };
MK_DEVICE int32_t wgrad_matrix(const GemmTask &task) { return task.kind >> WGRAD_MATRIX_SHIFT & 3; }

/* The rows of a ragged last K block that do not exist: zero in both operands, because 0 times what lies there may be NaN. One
 * warpgroup, whose tile it is alone. */
struct ZeroTail {
    uint32_t rows, barrier;  /* that exist, 0..64; a named barrier of the warpgroup's own */
    template <class Tile> MK_MEMBER void last_block(GemmShared<Tile> &s, uint32_t stage) const
    {
        static_assert(Tile::ping_pong && Tile::rows == 128 && Tile::cols == 128, "two boxes of each operand, one warpgroup");
        if (rows == kBlockK)
            return;
        for (uint32_t i = thread_idx() % 128; i < (kBlockK - rows) * 8; i += 128) {
            const uint32_t at = rows * kRowBytes + i * 16;
            for (uint32_t box = 0; box < 2; box++) {
                store_shared_b128(smem_addr(s.a[stage]) + box * kHalfBytes + at, {0, 0, 0, 0});
                store_shared_b128(smem_addr(s.b[stage]) + box * kHalfBytes + at, {0, 0, 0, 0});
            }
        }
        fence_proxy_async_shared_cta(); /* plain stores, read by MMAs */
        barrier_named_sync(barrier, 128);
    }
};

/* Neighbouring elements of a matrix in memory, fp32 or bf16. */
struct Pair { float low, high; };
MK_DEVICE Pair load_pair(const float *p) { return load(reinterpret_cast<const Pair *>(p)); }
MK_DEVICE void store_pair(float *p, Pair v) { store(reinterpret_cast<Pair *>(p), v); }
MK_DEVICE Pair load_pair(const bf16 *p)
{
    const uint32_t bits = load(reinterpret_cast<const uint32_t *>(p));
    return {bits_to_float(bits << 16), bits_to_float(bits & 0xffff0000u)};
}
MK_DEVICE void store_pair(bf16 *p, Pair v) { store(reinterpret_cast<uint32_t *>(p), pack_bf16(v.low, v.high)); }

/* A matrix [outputs, inputs] in memory, seen by a lane through the layout of its accumulators: registers i and i + 1 (i even) of block m are
 * a pair of row l/4 + 8(i/2%2), columns 8(i/4) + 2(l%4) and the one after it. inputs is a multiple of 64. */
template <class T> struct LaneMatrix {
    T *base;
    int64_t stride, outputs, inputs;

    /* The pair of registers i and i + 1 of block m; outside the matrix: zeros. */
    template <class Tile> MK_MEMBER Pair pair(const GemmTask &task, const WarpOut &out, uint32_t m, uint32_t i) const
    {
        const int64_t row = (int64_t)task.out_row + out.row + m * Acc<Tile>::block_rows + lane_idx() / 4 + 8 * (i / 2 % 2);
        const int64_t col = (int64_t)task.col + 8 * (i / 4) + 2 * (lane_idx() % 4);
        Pair v = {0.0f, 0.0f};
        if (row < outputs && col < inputs)
            v = load_pair(base + row * stride + col);
        return v;
    }

    /* visit(p, v) for every 64 columns of a row that are in the matrix: v[4j], v[4j + 1] belong to the pair p[8j], p[8j + 1], j < 8. */
    template <class Tile, class Visit> MK_MEMBER void each(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out, Visit visit) const
    {
        if constexpr (Tile::tensor_memory) {
            for (uint32_t m = 0; m < Acc<Tile>::blocks; m++)
                for (uint32_t c = 0; c < Tile::cols / 64; c++) {
                    const int64_t first = (int64_t)task.out_row + out.row + m * Acc<Tile>::block_rows, col = task.col + 64 * (int64_t)c;
                    float v[32];
                    if (first >= outputs || col >= inputs)
                        break;
                    acc.read(m, c, v);
                    MK_UNROLL for (uint32_t half = 0; half < 2; half++) {
                        const int64_t row = first + lane_idx() / 4 + 8 * half;
                        if (row < outputs)
                            visit(base + row * stride + col + 2 * (lane_idx() % 4), &v[2 * half]);
                    }
                }
        } else {
            MK_UNROLL for (uint32_t m = 0; m < Acc<Tile>::blocks; m++)
                MK_UNROLL for (uint32_t half = 0; half < 2; half++) {
                    int64_t row = (int64_t)task.out_row + out.row + m * Acc<Tile>::block_rows + lane_idx() / 4 + 8 * half;
                    pin_register(row); /* no addresses kept from one row to the next */
                    MK_UNROLL for (uint32_t c = 0; c < Tile::cols / 64; c++)
                        if (row < outputs && task.col + 64 * (int64_t)c < inputs)
                            visit(base + row * stride + task.col + 64 * (int64_t)c + 2 * (lane_idx() % 4), &acc.r[m][32 * c + 2 * half]);
                }
        }
    }
};

struct Wgrad {
    const mk_rank_params &r;
    const mk_grad_out *grads;
    int64_t width;           /* I or Is */

    MK_MEMBER int64_t outputs(const GemmTask &task) const { return wgrad_matrix(task) == MK_GRAD_DOWN ? r.dims.hidden : width; }
    MK_MEMBER int64_t inputs(const GemmTask &task) const { return wgrad_matrix(task) == MK_GRAD_DOWN ? width : r.dims.hidden; }
    MK_MEMBER LaneMatrix<float> partial(const GemmTask &task) const
    {
        const int64_t elements = r.dims.hidden * r.dims.intermediate;
        return {in_local<float>(r, r.memory.wgrad_partial) + wgrad_matrix(task) * elements, inputs(task), outputs(task), inputs(task)};
    }

    /* A piece that goes on: the accumulators start from the sum so far. Every register is set, whatever lies outside the matrix: then the
     * compiler sees that nothing of the last task lives on. */
    template <class Tile> MK_MEMBER void preload(const GemmTask &task, Acc<Tile> &acc, const WarpOut &out) const
    {
        const LaneMatrix<float> from = partial(task);
        if constexpr (Tile::tensor_memory) {
            for (uint32_t m = 0; m < Acc<Tile>::blocks; m++)
                for (uint32_t c = 0; c < Tile::cols / 64; c++) {
                    float v[32];
                    MK_UNROLL for (uint32_t i = 0; i < 32; i += 2) {
                        const Pair pair = from.pair<Tile>(task, out, m, 32 * c + i);
                        v[i] = pair.low;
                        v[i + 1] = pair.high;
                    }
                    acc.write(m, c, v);
                }
        } else {
            MK_UNROLL for (uint32_t m = 0; m < Acc<Tile>::blocks; m++)
                MK_UNROLL for (uint32_t i = 0; i < Tile::cols / 2; i += 2) {
                    const Pair pair = from.pair<Tile>(task, out, m, i);
                    acc.r[m][i] = pair.low;
                    acc.r[m][i + 1] = pair.high;
                }
            MK_UNROLL for (uint32_t m = 0; m < Acc<Tile>::blocks; m++)
                MK_UNROLL for (uint32_t i = 0; i < Tile::cols / 2; i++)
                    pin_register(acc.r[m][i]);
        }
    }

    template <class Tile> MK_MEMBER void operator()(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out) const
    {
        const mk_grad_out &g = grads[wgrad_matrix(task)];
        char *base = grad_place(g, task.expert);
        if (!base)
            return;
        if (!(task.kind & WGRAD_LAST))
            write(task, acc, out, partial(task));
        else if (!g.accumulate && g.fp32)
            write(task, acc, out, LaneMatrix<float>{reinterpret_cast<float *>(base), g.row_stride, outputs(task), inputs(task)});
        else if (!g.accumulate)
            write_rows(task, acc, out, reinterpret_cast<bf16 *>(base), g.row_stride);
        else if (task.num_rows == 0) /* an expert without rows is left as it is */
            return;
        else if (g.fp32)
            add(task, acc, out, LaneMatrix<float>{reinterpret_cast<float *>(base), g.row_stride, outputs(task), inputs(task)});
        else
            add(task, acc, out, LaneMatrix<bf16>{reinterpret_cast<bf16 *>(base), g.row_stride, outputs(task), inputs(task)});
    }

private:
    template <class Tile> MK_MEMBER void write(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out, const LaneMatrix<float> &to) const
    {
        to.each(task, acc, out, [](float *p, const float *v) {
            MK_UNROLL for (uint32_t j = 0; j < 8; j++)
                store_pair(p + 8 * j, {v[4 * j], v[4 * j + 1]});
        });
    }

    /* The whole sum, plus what is there, rounded once. */
    template <class T, class Tile> MK_MEMBER void add(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out, const LaneMatrix<T> &to) const
    {
        to.each(task, acc, out, [](T *p, const float *v) {
            Pair old[8];
            MK_UNROLL for (uint32_t j = 0; j < 8; j++)
                old[j] = load_pair(p + 8 * j);
            MK_UNROLL for (uint32_t j = 0; j < 8; j++)
                store_pair(p + 8 * j, {old[j].low + v[4 * j], old[j].high + v[4 * j + 1]});
        });
    }

    struct GradRows {
        bf16 *base;
        int64_t cols, stride;
        MK_MEMBER bf16 *row(const GemmTask &task, uint32_t i) const { return base + ((int64_t)task.out_row + i) * stride; }
    };
    template <class Tile> MK_MEMBER void write_rows(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out, bf16 *base, int64_t row_stride) const
    {
        GemmTask tile = task;
        tile.num_rows = (int32_t)mk_min(outputs(task) - task.out_row, Tile::rows);
        StoreRows<GradRows>{{base, inputs(task), row_stride}}(tile, acc, out);
    }
};

/* MXFP8: the operands of a tile's weight gradients, quantised along its rows in blocks of 32. Every task of s2_gate_up_bwd
 * does its share of the tile, before its product: by then everything that the products of before read of the tile has been written, and nobody but
 * weight gradients reads it again. Where the tensor cores multiply bf16, they are widened again: dgate, dup and w h in place; x and dout, which other rows
 * of the ring may be copied from, into buffers of their own. Elsewhere all are elements [ring, columns] in buffers of their own, and behind them the scales of the
 * transpose in their atoms; or, if weight gradients are of bf16 operands, x and dout are only widened. A warp (of the four of a task) takes one block of rows, a lane
 * eight columns at a time: so lanes part, and nothing behind block_of may need them all, as warp_idx does. */
struct WgradOperands {
    const mk_rank_params &r;
    bool with_x;

    /* The warp's rows of a tile in the ring; none: all are past the tile's count. */
    struct Block { int64_t first; int32_t rows; };
    static MK_MEMBER Block block_of(const GemmTask &task)
    {
        const uint32_t first = warp_idx() % 4 * MK_MX_BLOCK;
        return {(int64_t)task.row + first, (int32_t)mk_min((int64_t)task.num_rows - first, MK_MX_BLOCK)};
    }

    /* Eight columns of such rows of e4m3 with scales along the columns, widened. */
    struct WidenedColumns8 {
        const uint8_t *elements, *scales; /* of the whole ring */
        int64_t first, cols, col;
        MK_MEMBER Vec4 operator()(int32_t i) const
        {
            const int64_t row = first + i;
            return mx_widen8(load(reinterpret_cast<const MxElements8 *>(elements + row * cols + col)), load(scales + mk_mx_scale_index(row, col / MK_MX_BLOCK, cols)));
        }
    };
    MK_MEMBER WidenedColumns8 widened(const Block &block, int64_t from, int64_t cols, int64_t col) const
    {
        const uint8_t *elements = in_local<uint8_t>(r, from);
        return {elements, elements + MK_RING_ROWS(&r.dims) * cols, block.first, cols, col};
    }
    MK_MEMBER MxColumns8 in_bf16(const Block &block, int64_t from, int64_t cols, int64_t col) const { return {in_local<bf16>(r, from) + block.first * cols + col, cols}; }

    template <class RowAt> MK_MEMBER void quantise(const Block &block, const RowAt &row_at, int64_t to, int64_t cols, int64_t col) const
    {
        uint8_t *elements = in_local<uint8_t>(r, to), *scales = elements + MK_RING_ROWS(&r.dims) * cols;
        mx_quantise_columns8(row_at, block.rows, elements + block.first * cols + col, cols, [&](int i, uint8_t scale) {
            store(scales + mk_mx_scale_index(col + i, block.first / MK_MX_BLOCK, MK_RING_ROWS(&r.dims)), scale);
        });
    }

    MK_MEMBER void round(const Block &block, int64_t from, int64_t to, int64_t cols, int64_t col) const
    {
        mx_round_columns8(in_local<bf16>(r, from) + block.first * cols + col, cols, block.rows, in_local<bf16>(r, to) + block.first * cols + col, cols);
    }

    /* Eight columns of x or dout. */
    MK_MEMBER void take_token(const Block &block, int64_t from, int64_t to, int64_t col) const
    {
        const int64_t cols = r.dims.hidden;
        if constexpr (kMultipliesMx) {
            const WidenedColumns8 rows = widened(block, from, cols, col);
            if (r.dims.mx_wgrad)
                return quantise(block, rows, to, cols, col);
            for (int32_t i = 0; i < block.rows; i++)
                store(reinterpret_cast<Vec4 *>(in_local<bf16>(r, to) + (block.first + i) * cols + col), rows(i));
        } else {
            round(block, from, to, cols, col);
        }
    }

    /* Of dgate, dup or w h. */
    MK_MEMBER void take_middle(const Block &block, int64_t from, int64_t to, int64_t col) const
    {
        const int64_t cols = r.dims.intermediate;
        if constexpr (kMultipliesMx)
            quantise(block, in_bf16(block, from, cols, col), to, cols, col);
        else
            round(block, from, from, cols, col);
    }

    /* The task's columns of x and dout (tile_cols from task.col on), and part `part` of `parts` of the others'. */
    MK_MEMBER void share(const GemmTask &task, uint32_t tile_cols, uint32_t part, uint32_t parts) const
    {
        const mk_memory &m = r.memory;
        const Block block = block_of(task);
        const uint32_t pieces = (uint32_t)r.dims.intermediate / 8, all = 3 * pieces;
        if (block.rows <= 0)
            return;
        for (uint32_t i = lane_idx(); i < 2 * tile_cols / 8; i += 32) {
            const bool of_x = i < tile_cols / 8;
            const int64_t col = task.col + (int64_t)(i % (tile_cols / 8)) * 8;
            if ((of_x && !with_x) || col >= r.dims.hidden)
                continue;
            take_token(block, of_x ? m.ring_x : m.ring_dout, of_x ? m.wgrad_x : m.wgrad_dout, col);
        }
        if (!r.dims.mx_wgrad)
            return;
        for (uint32_t i = part * all / parts + lane_idx(); i < (part + 1) * all / parts; i += 32) {
            const uint32_t which = i / pieces;
            take_middle(block, which == 0 ? m.ring_gate : which == 1 ? m.ring_up : m.ring_h, which == 0 ? m.wgrad_dgate : which == 1 ? m.wgrad_dup : m.wgrad_h, (int64_t)(i % pieces) * 8);
        }
    }
};

} /* namespace mk */
#endif
