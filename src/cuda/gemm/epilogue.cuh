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
};

MK_DEVICE void pack_chunk(const float (&v)[32], uint32_t (&packed)[16])
{
    MK_UNROLL for (uint32_t i = 0; i < 16; i++)
        packed[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
}

/* ---- plain: the result as it is, rounded to bf16 ---- */

/* Of block `block` of the accumulators, whose first row is first_row. Rows may bring their own (stage/rows.cuh). */
template <class Tile, class Rows> MK_DEVICE void find_lane_rows(LaneRows &to, const Rows &rows, const GemmTask &task, uint32_t, uint32_t first_row) { to.find(rows, task, first_row); }

template <class Rows> struct StoreRows {
    Rows rows;
    template <class Tile> MK_MEMBER void operator()(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out) const
    {
        MK_UNROLL for (uint32_t m = 0; m < Acc<Tile>::blocks; m++) {
            if (out.row + m * Acc<Tile>::block_rows >= (uint32_t)task.num_rows)
                return;
            LaneRows to;
            find_lane_rows<Tile>(to, rows, task, m, out.row + m * Acc<Tile>::block_rows);
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

MK_DEVICE Vec4 swiglu8(const Vec4 &gate, const Vec4 &up, float limit)
{
    const uint32_t g[4] = {gate.x, gate.y, gate.z, gate.w}, u[4] = {up.x, up.y, up.z, up.w};
    uint32_t h[4];
    MK_UNROLL for (uint32_t i = 0; i < 4; i++)
        h[i] = pack_bf16(swiglu(bits_to_float(g[i] << 16), bits_to_float(u[i] << 16), limit),
                         swiglu(bits_to_float(g[i] & 0xffff0000u), bits_to_float(u[i] & 0xffff0000u), limit));
    return {h[0], h[1], h[2], h[3]};
}

/* Chunk q of gate and of up, rounded, into the halves of the staging memory. A branch for each, because registers have no index. */
template <class Tile> MK_DEVICE void put_gate_up(uint32_t staging, const Acc<Tile> &acc, uint32_t q)
{
    constexpr uint32_t chunks = Tile::cols / 128;
    MK_UNROLL for (uint32_t k = 0; k < Acc<Tile>::blocks * chunks; k++) {
        if (k != q)
            continue;
        float v[32];
        uint32_t packed[16];
        acc.read(k / chunks, k % chunks, v);
        pack_chunk(v, packed);
        put_chunk(staging, packed);
        acc.read(k / chunks, k % chunks + chunks, v);
        pack_chunk(v, packed);
        put_chunk(staging + kChunkBytes, packed);
    }
}

/* visit(row of the tile, column of the matrix, does it exist, gate, up), all lanes: eight columns of a row for each, until all that the warp has of a
 * tile has been met. task.col counts columns of h, `cols` in all, and a tile makes Tile::cols / 2 of them. The loop is not unrolled: it is executed
 * once a tile, and instructions that are met once come no faster than L2 sends them. */
template <class Tile, class Visit> MK_DEVICE void each_gate_up(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out, int64_t cols, const Visit &visit)
{
    constexpr uint32_t chunks = Tile::cols / 128, pieces = 4; /* in a chunk */
    MK_ROLLED for (uint32_t n = 0; n < Acc<Tile>::blocks * chunks * pieces; n++) {
        const uint32_t q = n / pieces, in_chunk = n % pieces * 4 + lane_idx() / 8, first_row = out.row + q / chunks * Acc<Tile>::block_rows;
        const int64_t col = task.col + 64 * (int64_t)(q % chunks) + lane_idx() % 8 * 8;
        if (n % pieces == 0) {
            if (first_row >= (uint32_t)task.num_rows)
                return;
            sync_warp(); /* all lanes have read the last chunk */
            put_gate_up(out.staging, acc, q);
            sync_warp();
        }
        const uint32_t at = chunk_piece(out.staging, in_chunk, lane_idx() % 8), row = first_row + in_chunk;
        visit(row, col, row < (uint32_t)task.num_rows && col < cols, load_shared_b128(at), load_shared_b128(at + kChunkBytes));
    }
}

/* All lanes: eight columns of row r of a task, if they exist. */
template <class Rows> MK_DEVICE void put_columns(const Rows &rows, const GemmTask &task, uint32_t r, int64_t col, bool there, const Vec4 &v)
{
    bf16 *to = there ? rows.row(task, r) : nullptr;
    if (to)
        store(reinterpret_cast<Vec4 *>(to + col), v);
}

/* gate and up are kept too where their base is not null. */
template <class Out, class Kept> struct SwigluRows {
    Out h;
    Kept gate, up;
    float limit;  /* infinity: no clamp */
    /* Eight columns of a row, if they exist. */
    MK_MEMBER void put(const GemmTask &task, uint32_t r, int64_t col, bool there, const Vec4 &g, const Vec4 &u) const
    {
        if (gate.base) {
            put_columns(gate, task, r, col, there, g);
            put_columns(up, task, r, col, there, u);
        }
        put_columns(h, task, r, col, there, swiglu8(g, u, limit));
    }
    template <class Tile> MK_MEMBER void operator()(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out) const
    {
        each_gate_up(task, acc, out, h.cols, [&](uint32_t r, int64_t col, bool there, const Vec4 &g, const Vec4 &u) { put(task, r, col, there, g, u); });
    }
};

template <class Out, class Kept> SwigluRows(Out, Kept, Kept, float) -> SwigluRows<Out, Kept>;

} /* namespace mk */
#endif
