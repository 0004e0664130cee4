/* s4_down_bwd on the device: the epilogue of dh' = dout Wd. Hosts the SwiGLU backward, the partial sums of the router-weight gradient
 * and the weighting. In: the accumulators (dh', not weighted), gate and up (the context's, or replayed ones in the ring).
 * Out: dgate, dup and w h in the ring (dgate and dup where a replay left gate and up), partial sums in ring_dweight. The shared expert: the
 * same with s for w. */
#ifndef MK_STAGE_S4_DOWN_BWD_CUH
#define MK_STAGE_S4_DOWN_BWD_CUH

#include "cuda/stage/mx_epilogue.cuh"

namespace mk {

/* What one column of one row of dh' becomes. */
struct SwigluGrad { float dgate, dup, weighted_h, product; };

MK_DEVICE SwigluGrad swiglu_backward(float dh, float gate, float up, float weight, float limit)
{
    const float g = min_nan(gate, limit), u = max_nan(min_nan(up, limit), -limit);
    const float s = reciprocal_approx(1.0f + exp2_approx(g * -1.44269504f)), silu = g * s;
    const float h = bits_to_float(pack_bf16(0.0f, silu * u) & 0xffff0000u); /* as the forward rounded it */
    const float d = weight * dh, slope = fused_multiply_add(silu, 1.0f - s, s);
    /* nothing flows through a limit that was hit; a NaN does */
    return {gate > g ? 0.0f : d * u * slope, up > u || up < u ? 0.0f : d * silu, weight * h, dh * h};
}

/* ---- sums on their way from the layout of the MMAs to rows ---- */

/* A chunk of sums, fp32, in all of a warp's staging memory: 16 rows of 64 columns. A row is eight units of eight columns, unit u of row r at place u ^ r % 8; the
 * halves of a unit change sides from place 4 on. So neither writing (pairs of columns of eight rows) nor reading (16 bytes of eight units) meets a bank twice. */
MK_DEVICE uint32_t sums_half_unit(uint32_t staging, uint32_t row, uint32_t unit, uint32_t half)
{
    const uint32_t place = unit ^ row % 8;
    return staging + row * 256 + place * 32 + (half ^ place / 4) * 16;
}

/* Chunk q of the accumulators. A branch for each, because registers have no index. */
template <class Tile> MK_DEVICE void put_sums(uint32_t staging, const Acc<Tile> &acc, uint32_t q)
{
    constexpr uint32_t chunks = Tile::cols / 64;
    const uint32_t row = lane_idx() / 4, half = lane_idx() % 4 / 2, in_half = lane_idx() % 2 * 8;
    MK_UNROLL for (uint32_t k = 0; k < Acc<Tile>::blocks * chunks; k++) {
        if (k != q)
            continue;
        float v[32];
        acc.read(k / chunks, k % chunks, v);
        MK_UNROLL for (uint32_t j = 0; j < 8; j++)
            MK_UNROLL for (uint32_t i = 0; i < 2; i++)
                store_shared_b64(sums_half_unit(staging, row + 8 * i, j, half) + in_half, float_to_bits(v[4 * j + 2 * i]), float_to_bits(v[4 * j + 2 * i + 1]));
    }
}

/* ---- the epilogue ---- */

/* Eight columns of a row: what a lane works on at a time. */
struct GateUp { Vec4 gate, up; };

/* Buffers says where things are, each time anew (which costs no register between): gate(task), up(task), const bf16 *, moved so that
 * dgate's offsets fit; cols(task), I or Is; dgate(task), dup(task), weighted_h(task), bf16 *; weights(task), of rows; partial(task), [rows, cols / 64].
 * Mx, of the routed experts: saved gate and up are in MXFP8 (is_packed(task), packed_gate(task), packed_up(task), uint8_t *), and dgate and dup are
 * wanted a second time, quantised along the columns (is_rounded(task); round_dgate, round_dup: of eight columns; all lanes).
 *
 * A warp brings 16 rows of 64 columns of its sums into rows through its staging memory and then takes four rows at a time, a lane eight columns of
 * one, so that gate and up come and dgate, dup and w h leave in whole lines without another turn. The loops are not unrolled: this is executed once a tile, and
 * instructions that are met once come no faster than L2 sends them. */
template <bool Mx, class Buffers> struct SwigluBackward {
    Buffers buffers;
    float limit;            /* infinity: no clamp */

    static constexpr uint32_t kPieces = 4; /* of four rows each, in a chunk */
    static constexpr uint32_t kAhead = 2; /* pieces whose gate and up are read ahead: more do not fit beside the accumulators */

    /* Piece n of a tile: its row and column there (of this lane). */
    template <class Tile> static MK_MEMBER uint32_t row_of(const WarpOut &out, uint32_t n)
    {
        const uint32_t chunk = n / kPieces;
        return out.row + chunk / (Tile::cols / 64) * Acc<Tile>::block_rows + n % kPieces * 4 + lane_idx() / 8;
    }
    template <class Tile> static MK_MEMBER uint32_t col_of(uint32_t n) { return n / kPieces % (Tile::cols / 64) * 64 + lane_idx() % 8 * 8; }

    MK_MEMBER bool exists(const GemmTask &task, uint32_t row, uint32_t col) const { return row < (uint32_t)task.num_rows && (uint32_t)task.col + col < buffers.cols(task); }
    MK_MEMBER int64_t element(const GemmTask &task, uint32_t row, uint32_t col) const { return ((int64_t)task.row + row) * buffers.cols(task) + (uint32_t)task.col + col; }

    /* Of rows and columns that do not exist: zeros. */
    template <class Tile> MK_MEMBER void read(const GemmTask &task, const WarpOut &out, uint32_t n, GateUp &in) const
    {
        const uint32_t row = row_of<Tile>(out, n), col = col_of<Tile>(n);
        in = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        if (!exists(task, row, col))
            return;
        if constexpr (Mx) {
            if (buffers.is_packed(task)) {
                in.gate = mx_read8(buffers.packed_gate(task), buffers.cols(task), row, (uint32_t)task.col + col);
                in.up = mx_read8(buffers.packed_up(task), buffers.cols(task), row, (uint32_t)task.col + col);
                return;
            }
        }
        in.gate = load(reinterpret_cast<const Vec4 *>(buffers.gate(task) + element(task, row, col)));
        in.up = load(reinterpret_cast<const Vec4 *>(buffers.up(task) + element(task, row, col)));
    }

    /* Before the MMAs, on their way while these run: gate and up of the first pieces, into staging memory. Every lane takes from there what it has brought
     * itself. */
    template <class Tile> MK_MEMBER void prefetch(const GemmTask &task, const WarpOut &out) const
    {
        const bool packed = Mx && buffers.is_packed(task);
        MK_UNROLL for (uint32_t n = 0; n < kAhead; n++) {
            const uint32_t row = row_of<Tile>(out, n), col = col_of<Tile>(n);
            if constexpr (Mx) {
                if (packed) {
                    GateUp in;
                    read<Tile>(task, out, n, in);
                    store_shared_b128(own_cell(out, n, 0), in.gate);
                    store_shared_b128(own_cell(out, n, 1), in.up);
                    continue;
                }
            }
            const bool there = exists(task, row, col);
            const int64_t at = there ? element(task, row, col) : 0;
            copy_async_b128(own_cell(out, n, 0), buffers.gate(task) + at, there);
            copy_async_b128(own_cell(out, n, 1), buffers.up(task) + at, there);
        }
    }

    /* Of this lane's one of the warp's 32 rows. */
    template <class Tile> MK_MEMBER float own_weight(const GemmTask &task, const WarpOut &out) const
    {
        const uint32_t row = own_row_of<Tile>(out);
        return row < (uint32_t)task.num_rows ? load(&buffers.weights(task)[(int64_t)task.row + row]) : 0.0f;
    }

    /* weight: this lane's own. */
    template <class Tile> MK_MEMBER void operator()(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out, float weight) const
    {
        constexpr uint32_t count = Acc<Tile>::blocks * (Tile::cols / 64) * kPieces;
        static_assert(MK_DW_GROUP == 64, "a chunk of 64 columns is a group of the router-weight gradient");
        GateUp in[kAhead];
        copy_async_wait();
        MK_UNROLL for (uint32_t i = 0; i < kAhead; i++)
            in[i] = {load_shared_b128(own_cell(out, i, 0)), load_shared_b128(own_cell(out, i, 1))};
        MK_ROLLED for (uint32_t n = 0; n < count; n += kAhead) {
            const uint32_t q = n / kPieces, block = q / (Tile::cols / 64);
            if (n % kPieces == 0) {
                if (out.row + block * Acc<Tile>::block_rows >= (uint32_t)task.num_rows)
                    return;
                sync_warp(); /* all lanes have read the last chunk, or what prefetch brought */
                put_sums(out.staging, acc, q);
                sync_warp();
            }
            MK_UNROLL for (uint32_t i = 0; i < kAhead; i++) {
                const Gradients piece = work(out, n + i, in[i], shuffle(weight, block * 16 + (n + i) % kPieces * 4 + lane_idx() / 8));
                if (n + kAhead < count) /* before the stores, behind which it would wait in line */
                    read<Tile>(task, out, n + kAhead + i, in[i]);
                put<Tile>(task, out, n + i, piece);
            }
        }
    }

private:
    template <class Tile> static MK_MEMBER uint32_t own_row_of(const WarpOut &out)
    {
        static_assert(Acc<Tile>::blocks == 2, "32 rows");
        return out.row + lane_idx() / 16 * Acc<Tile>::block_rows + lane_idx() % 16;
    }
    static MK_MEMBER uint32_t own_cell(const WarpOut &out, uint32_t n, uint32_t which) { return out.staging + (n * 2 + which) * 512 + lane_idx() * 16; }

    struct Gradients { uint32_t dgate[4], dup[4], weighted_h[4]; float sum; };

    /* Piece n. Two columns at a time, ascending. */
    MK_MEMBER Gradients work(const WarpOut &out, uint32_t n, const GateUp &in, float w) const
    {
        const uint32_t gate[4] = {in.gate.x, in.gate.y, in.gate.z, in.gate.w}, up[4] = {in.up.x, in.up.y, in.up.z, in.up.w};
        Gradients g;
        g.sum = 0.0f;
        MK_UNROLL for (uint32_t half = 0; half < 2; half++) {
            const Vec4 v = load_shared_b128(sums_half_unit(out.staging, n % kPieces * 4 + lane_idx() / 8, lane_idx() % 8, half));
            const uint32_t dh[4] = {v.x, v.y, v.z, v.w};
            MK_UNROLL for (uint32_t i = 0; i < 2; i++) {
                const uint32_t j = 2 * half + i;
                const SwigluGrad a = swiglu_backward(bits_to_float(dh[2 * i]), bits_to_float(gate[j] << 16), bits_to_float(up[j] << 16), w, limit);
                const SwigluGrad b = swiglu_backward(bits_to_float(dh[2 * i + 1]), bits_to_float(gate[j] & 0xffff0000u), bits_to_float(up[j] & 0xffff0000u), w, limit);
                g.dgate[j] = pack_bf16(a.dgate, b.dgate);
                g.dup[j] = pack_bf16(a.dup, b.dup);
                g.weighted_h[j] = pack_bf16(a.weighted_h, b.weighted_h);
                g.sum += a.product + b.product;
            }
        }
        return g;
    }

    static MK_MEMBER Vec4 vec4(const uint32_t (&v)[4]) { return {v[0], v[1], v[2], v[3]}; }

    template <class Tile> MK_MEMBER void put(const GemmTask &task, const WarpOut &out, uint32_t n, const Gradients &g) const
    {
        const uint32_t row = row_of<Tile>(out, n), col = col_of<Tile>(n);
        const bool there = exists(task, row, col);
        const int64_t at = element(task, row, col);
        if (there) {
            store(reinterpret_cast<Vec4 *>(buffers.dgate(task) + at), vec4(g.dgate));
            store(reinterpret_cast<Vec4 *>(buffers.dup(task) + at), vec4(g.dup));
            store(reinterpret_cast<Vec4 *>(buffers.weighted_h(task) + at), vec4(g.weighted_h));
        }
        if constexpr (Mx)
            if (buffers.is_rounded(task)) {
                buffers.round_dgate(task, row, col, there, vec4(g.dgate));
                buffers.round_dup(task, row, col, there, vec4(g.dup));
            }
        store_sum(task, row, col, there, g.sum);
    }

    /* The products of a row over its eight lanes: the group's partial sum. */
    MK_MEMBER void store_sum(const GemmTask &task, uint32_t row, uint32_t col, bool there, float sum) const
    {
        MK_UNROLL for (uint32_t distance = 1; distance < 8; distance *= 2)
            sum += shuffle_xor(sum, distance);
        if (there && lane_idx() % 8 == 0)
            store(&buffers.partial(task)[((int64_t)task.row + row) * (buffers.cols(task) / MK_DW_GROUP) + ((uint32_t)task.col + col) / MK_DW_GROUP], sum);
    }
};

} /* namespace mk */
#endif
