/* The backward's mirror of s5_combine: dx = shared part + sum over k ascending of dx_k, in fp32, one rounding; the router-weight gradients
 * out of their slots; and the gradient of the shared expert's output gate. Every sum has one order. */
#ifndef MK_STAGE_S5_COMBINE_BWD_CUH
#define MK_STAGE_S5_COMBINE_BWD_CUH

#include "cuda/stage/s2_gate_up_bwd.cuh"
#include "cuda/stage/s5_combine.cuh"

namespace mk {

/* s of every token, a block for each: what the forward's reduce multiplied with. */
MK_DEVICE void shared_scales(const mk_combine_bwd_params &p)
{
    for (int64_t token = block_idx(); token < p.num_tokens; token += num_blocks()) {
        const float scale = p.rank.shared_gate ? shared_scale(p.rank, p.x, p.shared_output_gate, token) : 1.0f;
        if (thread_idx() == 0)
            store(in_local<float>(p.rank, p.rank.memory.shared_scale) + token, scale);
    }
}

/* Eight columns of a token's dx. */
MK_DEVICE void combine_bwd_columns(const mk_combine_bwd_params &p, const mk_table &t, int64_t token, int64_t col)
{
    const mk_rank_params &r = p.rank;
    const int64_t hidden = r.dims.hidden, topk = r.dims.topk;
    const bf16 *slots = in_heap<bf16>(r, r.memory.slots) + token * topk * hidden + col;
    float acc[8] = {0, 0, 0, 0, 0, 0, 0, 0}, dx[8];
    if (r.dims.shared_intermediate)
        unpack_bf16(load(reinterpret_cast<const Vec4 *>(in_local<bf16>(r, r.memory.shared_y) + token * hidden + col)), acc);
    constexpr int64_t batch = 4; /* rows whose loads are under way at once */
    for (int64_t first = 0; first < topk; first += batch) {
        Vec4 row[batch];
        bool there[batch];
        MK_UNROLL for (int64_t i = 0; i < batch; i++) {
            there[i] = first + i < topk && load(&t.own_ids[token * topk + first + i]) >= 0;
            row[i] = {0, 0, 0, 0};
            if (there[i])
                row[i] = load(reinterpret_cast<const Vec4 *>(slots + (first + i) * hidden));
        }
        MK_UNROLL for (int64_t i = 0; i < batch; i++) {
            if (!there[i])
                continue;
            unpack_bf16(row[i], dx);
            MK_UNROLL for (uint32_t c = 0; c < 8; c++)
                acc[c] += dx[c];
        }
    }
    store(reinterpret_cast<Vec4 *>(static_cast<bf16 *>(p.dx) + token * hidden + col), pack_bf16x8(acc));
}

/* A token's router-weight gradients, a thread for each. */
MK_DEVICE void store_weight_grads(const mk_combine_bwd_params &p, const mk_table &t, int64_t token)
{
    const mk_rank_params &r = p.rank;
    for (int64_t k = thread_idx(); k < r.dims.topk; k += COMBINE_THREADS) {
        const int64_t route = token * r.dims.topk + k;
        const float dw = load(&t.own_ids[route]) >= 0 ? load(in_heap<float>(r, r.memory.dweight_slots) + route) : 0.0f;
        if (r.router_bf16)
            store(static_cast<bf16 *>(p.drouter_weights) + route, (bf16)(pack_bf16(dw, 0.0f) & 0xffff));
        else
            store(static_cast<float *>(p.drouter_weights) + route, dw);
    }
}

/* dwgate = sum over t ascending of da * x: a warp for 32 columns, whose tokens' da its lanes compute 32 at a time. */
MK_DEVICE void gate_grad_columns(const mk_combine_bwd_params &p, int64_t first_col)
{
    const mk_rank_params &r = p.rank;
    const mk_grad_out &g = p.gate_grad;
    const int64_t hidden = r.dims.hidden, col = first_col + lane_idx();
    /* As published: the caller's may be where dx goes. Where tokens are read in place, the caller's, by a launch of its own, before. */
    const bf16 *x = (mk_reads_in_place(&r.dims) ? static_cast<const bf16 *>(p.x) : in_heap<bf16>(r, r.memory.x)) + col;
    float sum = 0.0f;
    for (int64_t first = 0; first < p.num_tokens; first += 32) {
        const int64_t mine = first + lane_idx();
        const float da = mine < p.num_tokens ? shared_gate_grad(r, mine) : 0.0f;
        const uint32_t count = (uint32_t)mk_min(p.num_tokens - first, 32);
        float column[32];
        MK_UNROLL for (uint32_t i = 0; i < 32; i++) /* all loads under way before the sum, which has one order */
            column[i] = i < count ? bf16_to_float(load(&x[(first + i) * hidden])) : 0.0f;
        MK_UNROLL for (uint32_t i = 0; i < 32; i++) {
            const float of_token = shuffle(da, i);
            if (i < count)
                sum = fused_multiply_add(of_token, column[i], sum);
        }
    }
    char *base = grad_place(g, 0);
    if (!base || (g.accumulate && p.num_tokens == 0))
        return;
    if (g.fp32) {
        float *to = reinterpret_cast<float *>(base) + col;
        store(to, g.accumulate ? load(to) + sum : sum);
    } else {
        bf16 *to = reinterpret_cast<bf16 *>(base) + col;
        store(to, (bf16)(pack_bf16(g.accumulate ? bf16_to_float(load(to)) + sum : sum, 0.0f) & 0xffff));
    }
}

/* The first gate_blocks blocks: the output gate's gradient, a warp for 32 columns. The others: tokens. */
MK_DEVICE void s5_combine_bwd(const mk_combine_bwd_params &p)
{
    const mk_rank_params &r = p.rank;
    const mk_table t = mk_table_at(&r.memory, const_cast<void *>(p.schedule));
    if ((int32_t)block_idx() < p.gate_blocks) {
        const int64_t col = ((int64_t)block_idx() * (COMBINE_THREADS / 32) + warp_idx()) * 32;
        if (col < r.dims.hidden)
            gate_grad_columns(p, col);
        return;
    }
    for (int64_t token = block_idx() - p.gate_blocks; token < p.num_tokens; token += num_blocks() - p.gate_blocks) {
        if (p.drouter_weights)
            store_weight_grads(p, t, token);
        for (int64_t col = thread_idx() * 8; col < r.dims.hidden && p.dx; col += COMBINE_THREADS * 8)
            combine_bwd_columns(p, t, token, col);
    }
}

} /* namespace mk */
#endif
