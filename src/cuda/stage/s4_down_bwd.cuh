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

/* Buffers says where things are, each time anew (which costs no register between): gate(task), up(task), const bf16 *, moved so that
 * dgate's offsets fit; cols(task), I or Is; dgate(task), dup(task), weighted_h(task), bf16 *; weights(task), of rows; partial(task), [rows, cols / 64].
 * Mx, of the routed experts: saved gate and up are in MXFP8 (is_packed(task), packed_gate(task), packed_up(task), uint8_t *), and dgate and dup are
 * wanted a second time, quantised along the columns (is_rounded(task); flush_dgate, flush_dup: a chunk of them, from a half of the staging memory). */
template <bool Mx, class Buffers> struct SwigluBackward {
    Buffers buffers;
    float limit;            /* infinity: no clamp */

    /* A chunk: gate and up in the halves of the staging memory become dgate and dup, 16 columns at a time, because more does not fit
     * beside the accumulators; h: w h, packed. sum[i]: this lane's products of row l/4 + 8i, always in this order. */
    MK_MEMBER void chunk(const WarpOut &out, const float (&dh)[32], const float (&w)[2], uint32_t (&h)[16], float (&sum)[2]) const
    {
        sum[0] = sum[1] = 0.0f;
        MK_UNROLL for (uint32_t j = 0; j < 4; j++) {
            const uint32_t at_gate = chunk_matrix(out.staging, j), at_up = at_gate + kChunkBytes;
            uint32_t g[4], u[4];
            load_matrix_x4(at_gate, g);
            load_matrix_x4(at_up, u);
            MK_UNROLL for (uint32_t i = 0; i < 4; i++) {
                const float *pair = &dh[8 * j + 2 * i];
                const SwigluGrad a = swiglu_backward(pair[0], bits_to_float(g[i] << 16), bits_to_float(u[i] << 16), w[i % 2], limit);
                const SwigluGrad b = swiglu_backward(pair[1], bits_to_float(g[i] & 0xffff0000u), bits_to_float(u[i] & 0xffff0000u), w[i % 2], limit);
                g[i] = pack_bf16(a.dgate, b.dgate);
                u[i] = pack_bf16(a.dup, b.dup);
                h[4 * j + i] = pack_bf16(a.weighted_h, b.weighted_h);
                sum[i % 2] += a.product + b.product;
            }
            sync_warp(); /* every lane has read what is overwritten */
            store_matrix_x4(at_gate, g);
            store_matrix_x4(at_up, u);
        }
    }

    /* The products of a row over its four lanes: the group's partial sum. */
    MK_MEMBER void store_sums(const GemmTask &task, uint32_t first_row, uint32_t col, float (&sum)[2]) const
    {
        MK_UNROLL for (uint32_t i = 0; i < 2; i++) {
            const uint32_t r = first_row + lane_idx() / 4 + 8 * i;
            sum[i] += shuffle_xor(sum[i], 1);
            sum[i] += shuffle_xor(sum[i], 2);
            if (lane_idx() % 4 == 0 && r < (uint32_t)task.num_rows)
                store(&buffers.partial(task)[((int64_t)task.row + r) * (buffers.cols(task) / MK_DW_GROUP) + ((uint32_t)task.col + col) / MK_DW_GROUP], sum[i]);
        }
    }

    MK_MEMBER LanePlaces places(const GemmTask &task, uint32_t row) const { return LanePlaces(task, row, buffers.cols(task)); }

    MK_MEMBER float weight(const GemmTask &task, uint32_t r) const { return r < (uint32_t)task.num_rows ? load(&buffers.weights(task)[(int64_t)task.row + r]) : 0.0f; }

    /* Gate and up of the first chunk, before the MMAs: on their way while these run. */
    MK_MEMBER void prefetch(const GemmTask &task, const WarpOut &out) const
    {
        if (out.row >= (uint32_t)task.num_rows || (uint32_t)task.col >= buffers.cols(task))
            return;
        if constexpr (Mx) {
            if (buffers.is_packed(task)) {
                Vec4 gate[4], up[4];
                read_ahead(task, out.row, 0, gate, up);
                put_pieces(out.staging, gate);
                put_pieces(out.staging + kChunkBytes, up);
                return;
            }
        }
        places(task, out.row).fetch(buffers.gate(task), 0, out.staging);
        places(task, out.row).fetch(buffers.up(task), 0, out.staging + kChunkBytes);
    }

    /* Chunk by chunk. The next one's gate and up are read ahead, into registers that this one has given back. */
    template <class Tile> MK_MEMBER void operator()(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out) const
    {
        constexpr uint32_t chunks = Tile::cols / 64, count = Acc<Tile>::blocks * chunks;
        static_assert(MK_DW_GROUP == 64, "a chunk of 64 columns is a group of the router-weight gradient");
        copy_async_wait();
        MK_UNROLL for (uint32_t q = 0; q < count; q++) {
            const uint32_t m = q / chunks, c = q % chunks, row = out.row + m * Acc<Tile>::block_rows, col = 64 * c;
            const uint32_t low = out.staging, high = out.staging + kChunkBytes;
            if (row >= (uint32_t)task.num_rows)
                return;
            if ((uint32_t)task.col + col >= buffers.cols(task))
                continue;
            const float w[2] = {weight(task, row + lane_idx() / 4), weight(task, row + lane_idx() / 4 + 8)};
            float dh[32], sum[2];
            uint32_t h[16];
            sync_warp(); /* every lane has put its pieces of gate and up */
            acc.read(m, c, dh);
            chunk(out, dh, w, h, sum);
            sync_warp();
            places(task, row).flush(buffers.dgate(task), col, low);
            if constexpr (Mx) /* both here, before gate and up are read ahead: there are not registers for all */
                if (buffers.is_rounded(task)) {
                    buffers.flush_dgate(task, row, col, low);
                    buffers.flush_dup(task, row, col, high);
                }
            store_sums(task, row, col, sum);
            sync_warp();
            put_chunk(low, h);
            Vec4 next_gate[4], next_up[4];
            if (q + 1 < count) {
                const bool same_rows = c + 1 < chunks && (uint32_t)task.col + col + 64 < buffers.cols(task);
                const uint32_t next_row = m + 1 < Acc<Tile>::blocks ? row + Acc<Tile>::block_rows : (uint32_t)task.num_rows; /* no next block: no rows */
                read_ahead(task, same_rows ? row : next_row, same_rows ? col + 64 : 0, next_gate, next_up);
            }
            places(task, row).flush(buffers.dup(task), col, high);
            sync_warp();
            places(task, row).flush(buffers.weighted_h(task), col, low);
            if (q + 1 < count) { /* each lane where it alone has read last */
                put_pieces(low, next_gate);
                put_pieces(high, next_up);
            }
        }
    }

private:
    MK_MEMBER void read_ahead(const GemmTask &task, uint32_t row, uint32_t col, Vec4 (&gate)[4], Vec4 (&up)[4]) const
    {
        if constexpr (Mx) {
            if (buffers.is_packed(task)) {
                mx_read(buffers.packed_gate(task), buffers.cols(task), task, row, col, gate);
                mx_read(buffers.packed_up(task), buffers.cols(task), task, row, col, up);
                return;
            }
        }
        places(task, row).read(buffers.gate(task), col, gate);
        places(task, row).read(buffers.up(task), col, up);
    }
};

} /* namespace mk */
#endif
