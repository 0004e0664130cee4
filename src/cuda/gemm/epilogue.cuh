/* The grouped GEMM core, part 4: epilogues. An epilogue is a functor
 *
 *   void operator()(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out)
 *
 * called by every math warp with its share of a finished tile: 16 rows of each of the accumulator's blocks, all columns. Block m
 * begins Acc::block_rows rows after block m - 1.
 * Warps do not wait for each other. Rows past task.num_rows and columns past the result's width are never written.
 *
 * Results leave in whole lines: a warp turns 64 columns of its 16 rows (MMA layout) into rows through 2 KiB of its own shared
 * memory, swizzled so that neither side has bank conflicts, and stores 128 contiguous bytes of four rows with each
 * instruction. Every row has its own destination, which may be a peer's memory; so the plain store and the push of combine
 * are one thing. */
#ifndef MK_GEMM_EPILOGUE_CUH
#define MK_GEMM_EPILOGUE_CUH

#include "cuda/gemm/tile.cuh"

namespace mk {

template <class Tile> struct Acc;

typedef uint16_t bf16;  /* the bits of one */

/* ---- rows of bf16, each somewhere ---- */

/* A row-major matrix [rows, cols]: row r of a task goes to row task.out_row + r. base null: stored nowhere. */
struct MatrixRows {
    bf16 *base;
    int64_t cols;
    MK_MEMBER bf16 *row(const GemmTask &task, uint32_t r) const { return base ? base + (task.out_row + (int64_t)r) * cols : nullptr; }
};

/* Row pushes: slot[table row] says where each row goes. */
struct PushedRows {
    bf16 *const *slot;
    int64_t cols;
    MK_MEMBER bf16 *row(const GemmTask &task, uint32_t r) const { return load(&slot[task.out_row + (int64_t)r]); }
};

/* Where this lane's rows of one block go, when they leave: lane l stores 16 bytes at column 8(l%8) of rows 4i + l/8. */
struct LaneRows {
    bf16 *to[4];
    template <class Rows> MK_MEMBER void find(const Rows &rows, const GemmTask &task, uint32_t first_row)
    {
        MK_UNROLL for (uint32_t i = 0; i < 4; i++) {
            const uint32_t r = first_row + 4 * i + lane_idx() / 8;
            to[i] = r < (uint32_t)task.num_rows ? rows.row(task, r) : nullptr;
        }
    }
};

/* A chunk: 64 columns of the warp's 16 rows, in half of its staging memory, 16-byte pieces of row r at place (piece ^ r % 8).
 * Packed, packed[4j + i] is columns 16j + 8(i/2) + 2(l%4) and the next of row l/4 + 8(i%2): what stmatrix and ldmatrix call matrices. */
constexpr uint32_t kChunkBytes = kStagingBytes / 2;
MK_DEVICE uint32_t chunk_matrix(uint32_t half, uint32_t j)
{
    const uint32_t in_row = lane_idx() % 16, in_piece = lane_idx() / 16; /* rows 0-7 and 8-15, of two pieces */
    return half + in_row * kRowBytes + ((2 * j + in_piece) ^ (in_row % 8)) * 16;
}
MK_DEVICE uint32_t chunk_piece(uint32_t half, uint32_t row, uint32_t piece) { return half + row * kRowBytes + (piece ^ (row % 8)) * 16; }

MK_DEVICE void put_chunk(uint32_t half, const uint32_t (&packed)[16])
{
    MK_UNROLL for (uint32_t j = 0; j < 4; j++) {
        const uint32_t r[4] = {packed[4 * j], packed[4 * j + 1], packed[4 * j + 2], packed[4 * j + 3]};
        store_matrix_x4(chunk_matrix(half, j), r);
    }
}

/* From staging memory (after a sync_warp) to column `col` of each row. */
MK_DEVICE void flush_chunk(uint32_t half, const LaneRows &rows, int64_t col)
{
    MK_UNROLL for (uint32_t i = 0; i < 4; i++) {
        const Vec4 v = load_shared_b128(chunk_piece(half, 4 * i + lane_idx() / 8, lane_idx() % 8));
        if (rows.to[i])
            store(reinterpret_cast<Vec4 *>(rows.to[i] + col + lane_idx() % 8 * 8), v);
    }
}

/* Both. `turn` alternates between the two halves of the staging memory, so that one sync_warp a call is enough: who writes a half
 * again has passed the sync_warp of the call in between, and with it every lane's reads of that half. */
MK_DEVICE void store_chunk(const WarpOut &out, uint32_t turn, const uint32_t (&packed)[16], const LaneRows &rows, int64_t col)
{
    const uint32_t half = out.staging + turn % 2 * kChunkBytes;
    put_chunk(half, packed);
    sync_warp();
    flush_chunk(half, rows, col);
}

/* Where this lane's rows of one block are in every buffer with rows of `cols` columns: lane l moves 16 bytes at column 8(l%8) of rows
 * 4i + l/8. Addresses are made anew each time, out of two numbers that are opaque to the compiler: kept for later, they would
 * cost the registers that the accumulators need. */
struct LanePlaces {
    int64_t tile;           /* elements: the tile's first row and column */
    uint32_t lane;          /* elements from there: this lane's row i = 0, of first_row */
    uint32_t rows, cols;    /* of this lane's rows i: those with 4i < rows exist */
    MK_MEMBER LanePlaces(const GemmTask &task, uint32_t first_row, uint32_t num_cols)
    {
        const uint32_t row = first_row + lane_idx() / 8;
        tile = (int64_t)task.row * num_cols + task.col;
        lane = row * num_cols;
        rows = row < (uint32_t)task.num_rows ? (uint32_t)task.num_rows - row : 0;
        cols = num_cols;
    }
    /* The chunk in `half` (after a sync_warp) to the rows of a buffer, from column `col` of the tile on. */
    MK_MEMBER void flush(bf16 *base, uint32_t col, uint32_t half)
    {
        pin_register(tile);
        pin_register(lane);
        MK_UNROLL for (uint32_t i = 0; i < 4; i++) {
            const Vec4 v = load_shared_b128(chunk_piece(half, 4 * i + lane_idx() / 8, lane_idx() % 8));
            if (4 * i < rows)
                store(reinterpret_cast<Vec4 *>(base + tile + (lane + 4 * i * cols) + col + lane_idx() % 8 * 8), v);
        }
    }
    /* The other way into registers: 16 bytes of each row, zeros for rows that do not exist. put_pieces takes them on into staging memory. */
    MK_MEMBER void read(const bf16 *base, uint32_t col, Vec4 (&v)[4])
    {
        pin_register(tile);
        pin_register(lane);
        MK_UNROLL for (uint32_t i = 0; i < 4; i++) {
            v[i] = {0, 0, 0, 0};
            if (4 * i < rows)
                v[i] = load(reinterpret_cast<const Vec4 *>(base + tile + (lane + 4 * i * cols) + col + lane_idx() % 8 * 8));
        }
    }
    /* The same without registers: on the way until copy_async_wait. */
    MK_MEMBER void fetch(const bf16 *base, uint32_t col, uint32_t half)
    {
        pin_register(tile);
        pin_register(lane);
        MK_UNROLL for (uint32_t i = 0; i < 4; i++) {
            const bool there = 4 * i < rows;
            copy_async_b128(chunk_piece(half, 4 * i + lane_idx() / 8, lane_idx() % 8), there ? base + tile + (lane + 4 * i * cols) + col + lane_idx() % 8 * 8 : base, there);
        }
    }
};

MK_DEVICE void put_pieces(uint32_t half, const Vec4 (&v)[4])
{
    MK_UNROLL for (uint32_t i = 0; i < 4; i++)
        store_shared_b128(chunk_piece(half, 4 * i + lane_idx() / 8, lane_idx() % 8), v[i]);
}

MK_DEVICE void pack_chunk(const float (&v)[32], uint32_t (&packed)[16])
{
    MK_UNROLL for (uint32_t i = 0; i < 16; i++)
        packed[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
}

/* ---- plain: the result as it is, rounded to bf16 ---- */

template <class Rows> struct StoreRows {
    Rows rows;
    template <class Tile> MK_MEMBER void operator()(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out) const
    {
        MK_UNROLL for (uint32_t m = 0; m < Acc<Tile>::blocks; m++) {
            if (out.row + m * Acc<Tile>::block_rows >= (uint32_t)task.num_rows)
                return;
            LaneRows to;
            to.find(rows, task, out.row + m * Acc<Tile>::block_rows);
            MK_UNROLL for (uint32_t c = 0; c < Tile::cols / 64; c++) {
                const int64_t col = task.col + 64 * (int64_t)c;
                float v[32];
                uint32_t packed[16];
                if (col >= rows.cols)
                    break;
                acc.read(m, c, v);
                pack_chunk(v, packed);
                store_chunk(out, c, packed, to, col);
            }
            sync_warp();
        }
    }
};

/* ---- SwiGLU: the tile's first half of columns is gate, its second half up, of the same outputs ---- */

/* h = silu(gate) * up in fp32, from gate and up as rounded to bf16 and clamped: gate <= limit, -limit <= up <= limit. NaN stays
 * NaN. silu(g) = g / (1 + 2^(-g log2 e)). */
MK_DEVICE float swiglu(float gate, float up, float limit)
{
    const float g = gate > limit ? limit : gate;
    const float u = up > limit ? limit : up < -limit ? -limit : up;
    return g * reciprocal_approx(1.0f + exp2_approx(g * -1.44269504f)) * u;
}

MK_DEVICE void swiglu_chunk(const uint32_t (&gate)[16], const uint32_t (&up)[16], float limit, uint32_t (&h)[16])
{
    MK_UNROLL for (uint32_t i = 0; i < 16; i++)
        h[i] = pack_bf16(swiglu(bits_to_float(gate[i] << 16), bits_to_float(up[i] << 16), limit),
                         swiglu(bits_to_float(gate[i] & 0xffff0000u), bits_to_float(up[i] & 0xffff0000u), limit));
}

/* visit(row, col, gate, up, h): every chunk of h that this warp has of a tile, packed; task.col counts columns of h, `cols` in all, and a tile makes
 * Tile::cols / 2 of them. `row`: the chunk's first in the tile. */
template <class Tile, class Visit> MK_DEVICE void each_swiglu_chunk(const GemmTask &task, const Acc<Tile> &acc, uint32_t first_row, int64_t cols, float limit, const Visit &visit)
{
    constexpr uint32_t chunks = Tile::cols / 128;
    MK_UNROLL for (uint32_t m = 0; m < Acc<Tile>::blocks; m++) {
        const uint32_t row = first_row + m * Acc<Tile>::block_rows;
        if (row >= (uint32_t)task.num_rows)
            return;
        MK_UNROLL for (uint32_t c = 0; c < chunks; c++) {
            const int64_t col = task.col + 64 * (int64_t)c;
            if (col >= cols)
                break;
            float v[32];
            uint32_t gate[16], up[16], h[16];
            acc.read(m, c, v);
            pack_chunk(v, gate);
            acc.read(m, c + chunks, v);
            pack_chunk(v, up);
            swiglu_chunk(gate, up, limit, h);
            visit(row, col, gate, up, h);
        }
    }
}

typedef const uint32_t (&PackedChunk)[16];

/* gate and up are kept too where their base is not null. */
template <class Out, class Kept> struct SwigluRows {
    Out h;
    Kept gate, up;
    float limit;  /* infinity: no clamp */
    template <class Tile> MK_MEMBER void operator()(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out) const
    {
        each_swiglu_chunk(task, acc, out.row, h.cols, limit, [&](uint32_t row, int64_t col, PackedChunk packed_gate, PackedChunk packed_up, PackedChunk packed_h) {
            LaneRows to;
            to.find(h, task, row);
            store_chunk(out, 0, packed_h, to, col);
            if (gate.base) {
                to.find(gate, task, row);
                store_chunk(out, 1, packed_gate, to, col);
                to.find(up, task, row);
                store_chunk(out, 0, packed_up, to, col);
            }
            sync_warp();
        });
    }
};

template <class Out, class Kept> SwigluRows(Out, Kept, Kept, float) -> SwigluRows<Out, Kept>;

} /* namespace mk */
#endif
