/* s2_gate_up_bwd on the device: the epilogue of dx_k = dgate Wg + dup Wu. Pushes dx, and with the first columns dw, to slot (t, k) of the
 * token's rank; the shared expert's part gets + da * wgate before its rounding and stays here, in shared_y. And the replay's
 * epilogue, which keeps gate and up. */
#ifndef MK_STAGE_S2_GATE_UP_BWD_CUH
#define MK_STAGE_S2_GATE_UP_BWD_CUH

#include "cuda/stage/mx_epilogue.cuh"

namespace mk {

/* A row's partial sums, added ascending. */
MK_DEVICE float sum_partials(const float *partial, int64_t groups)
{
    float sum = 0.0f;
    for (int64_t i = 0; i < groups; i++)
        sum += load(&partial[i]);
    return sum;
}

/* da of a token: the gradient of what goes into the shared expert's sigmoid. */
MK_DEVICE float shared_gate_grad(const mk_rank_params &r, int64_t token)
{
    const int64_t groups = r.dims.shared_intermediate / MK_DW_GROUP;
    const float s = load(in_local<float>(r, r.memory.shared_scale) + token);
    const float ds = sum_partials(in_local<float>(r, r.memory.shared_dpartial) + token * groups, groups);
    return ds * (s * (1.0f - s));
}

/* dw of the warp's rows, a lane for each. */
template <class Tile> MK_DEVICE void push_weight_grads(const mk_rank_params &r, const mk_row *rows, const GemmTask &task, const WarpOut &out)
{
    const int64_t groups = r.dims.intermediate / MK_DW_GROUP;
    for (uint32_t m = 0; m < Acc<Tile>::blocks; m++) {
        const uint32_t row = out.row + m * Acc<Tile>::block_rows + lane_idx();
        if (lane_idx() >= 16 || row >= (uint32_t)task.num_rows)
            continue;
        const mk_row record = load(&rows[(int64_t)task.out_row + row]);
        store(in_peer<float>(r, record.src_rank, r.memory.dweight_slots) + record.src_slot,
              sum_partials(in_local<float>(r, r.memory.ring_dweight) + ((int64_t)task.row + row) * groups, groups));
    }
}

/* The shared expert's dx: + da * wgate, for this lane's two rows of a block. */
struct SharedDx {
    const mk_rank_params &r;
    const bf16 *output_gate;  /* [H] or null */

    MK_MEMBER void add_gate(float (&v)[32], const float (&da)[2], int64_t col) const
    {
        MK_UNROLL for (uint32_t j = 0; j < 8; j++)
            MK_UNROLL for (uint32_t i = 0; i < 2; i++) {
                const float w = bf16_to_float(load(&output_gate[col + 8 * j + 2 * (lane_idx() % 4) + i]));
                v[4 * j + i] = fused_multiply_add(da[0], w, v[4 * j + i]);
                v[4 * j + 2 + i] = fused_multiply_add(da[1], w, v[4 * j + 2 + i]);
            }
    }

    template <class Tile> MK_MEMBER void operator()(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out) const
    {
        MK_UNROLL for (uint32_t m = 0; m < Acc<Tile>::blocks; m++) {
            const uint32_t row = out.row + m * Acc<Tile>::block_rows;
            if (row >= (uint32_t)task.num_rows)
                return;
            float da[2] = {0.0f, 0.0f};
            for (uint32_t i = 0; i < 2; i++)
                if (output_gate && row + lane_idx() / 4 + 8 * i < (uint32_t)task.num_rows)
                    da[i] = shared_gate_grad(r, (int64_t)task.out_row + row + lane_idx() / 4 + 8 * i);
            MK_UNROLL for (uint32_t c = 0; c < Tile::cols / 64; c++) {
                float v[32];
                uint32_t packed[16];
                if (task.col + 64 * (int64_t)c >= r.dims.hidden)
                    break;
                acc.read(m, c, v);
                if (output_gate)
                    add_gate(v, da, task.col + 64 * (int64_t)c);
                pack_chunk(v, packed);
                put_chunk(out.staging, packed);
                sync_warp();
                LanePlaces(task, row, (uint32_t)r.dims.hidden).flush(in_local<bf16>(r, r.memory.shared_y), 64 * c, out.staging);
                sync_warp();
            }
        }
    }
};

/* The replay's epilogue: gate and up of the rows, rounded, into the ring. The tile's first half of columns is gate, its second half up. Mx: as they
 * would come out of the context in MXFP8. */
template <bool Mx> struct KeepGateUp {
    bf16 *gate, *up;
    uint32_t cols;

    template <class Tile> MK_MEMBER void operator()(const GemmTask &task, const Acc<Tile> &acc, const WarpOut &out) const
    {
        each_gate_up(task, acc, out, cols, [&](uint32_t r, int64_t col, bool there, const Vec4 &g, const Vec4 &u) {
            if constexpr (Mx) {
                put_columns(MxRoundedRows{gate, cols, nullptr}, task, r, col, there, g);
                put_columns(MxRoundedRows{up, cols, nullptr}, task, r, col, there, u);
            } else {
                put_columns(RingRows{gate, cols}, task, r, col, there, g);
                put_columns(RingRows{up, cols}, task, r, col, there, u);
            }
        });
    }
};

} /* namespace mk */
#endif
