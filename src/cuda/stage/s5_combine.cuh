/* s5_combine on the device, the reducing half: out = s y_s + sum over k ascending of w_k y_k in fp32, one rounding. A block takes a token
 * at a time, a thread eight columns at a time; the order of every sum is fixed. */
#ifndef MK_STAGE_S5_COMBINE_CUH
#define MK_STAGE_S5_COMBINE_CUH

#include "cuda/stage/stage.cuh"

namespace mk {

enum { COMBINE_THREADS = 256 };

MK_DEVICE void unpack_bf16(const Vec4 &v, float (&f)[8])
{
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    MK_UNROLL for (uint32_t i = 0; i < 4; i++) {
        f[2 * i] = bf16_to_float(words[i] & 0xffff);
        f[2 * i + 1] = bits_to_float(words[i] & 0xffff0000u);
    }
}

MK_DEVICE Vec4 pack_bf16x8(const float (&f)[8]) { return {pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]), pack_bf16(f[4], f[5]), pack_bf16(f[6], f[7])}; }

/* s = sigmoid(<x, wgate>): each thread sums its columns ascending, then a tree over the threads. All threads get it. */
MK_DEVICE float shared_scale(const mk_rank_params &r, const void *tokens, const void *output_gate, int64_t token)
{
    float *sums = static_cast<float *>(shared_base()); /* [COMBINE_THREADS] */
    const uint32_t thread = thread_idx();
    const int64_t hidden = r.dims.hidden;
    const bf16 *x = static_cast<const bf16 *>(tokens) + token * hidden, *gate = static_cast<const bf16 *>(output_gate);
    float sum = 0.0f;
    for (int64_t c = thread; c < hidden; c += COMBINE_THREADS)
        sum = fused_multiply_add(bf16_to_float(load(&x[c])), bf16_to_float(load(&gate[c])), sum);
    barrier_block_sync(); /* the last token's reads */
    store(&sums[thread], sum);
    for (uint32_t half = COMBINE_THREADS / 2; half > 0; half /= 2) {
        barrier_block_sync();
        if (thread < half)
            store(&sums[thread], load(&sums[thread]) + load(&sums[thread + half]));
    }
    barrier_block_sync();
    return 1.0f / (1.0f + exp2_approx(load(&sums[0]) * -1.44269504f));
}

/* Eight columns of a token. */
MK_DEVICE void combine_columns(const mk_combine_params &p, const mk_table &t, int64_t token, int64_t col, float scale)
{
    const mk_rank_params &r = p.rank;
    const int64_t hidden = r.dims.hidden, topk = r.dims.topk;
    const bf16 *slots = in_heap<bf16>(r, r.memory.slots) + token * topk * hidden + col;
    const float *weights = in_heap<float>(r, r.memory.router_weights) + token * topk;
    float acc[8] = {0, 0, 0, 0, 0, 0, 0, 0}, y[8];
    if (r.dims.shared_intermediate) {
        unpack_bf16(load(reinterpret_cast<const Vec4 *>(in_local<bf16>(r, r.memory.shared_y) + token * hidden + col)), y);
        MK_UNROLL for (uint32_t i = 0; i < 8; i++)
            acc[i] = scale * y[i];
    }
    constexpr int64_t batch = 4; /* rows whose loads are under way at once; the order of the sum stays k ascending */
    for (int64_t first = 0; first < topk; first += batch) {
        Vec4 row[batch];
        bool there[batch];
        MK_UNROLL for (int64_t i = 0; i < batch; i++) {
            there[i] = first + i < topk && load(&t.own_ids[token * topk + first + i]) >= 0;
            if (there[i])
                row[i] = load(reinterpret_cast<const Vec4 *>(slots + (first + i) * hidden));
        }
        MK_UNROLL for (int64_t i = 0; i < batch; i++) {
            if (!there[i])
                continue;
            const float weight = load(&weights[first + i]);
            unpack_bf16(row[i], y);
            MK_UNROLL for (uint32_t c = 0; c < 8; c++)
                acc[c] = fused_multiply_add(weight, y[c], acc[c]);
        }
    }
    store(reinterpret_cast<Vec4 *>(static_cast<bf16 *>(p.out) + token * hidden + col), pack_bf16x8(acc));
}

MK_DEVICE void s5_combine(const mk_combine_params &p)
{
    const mk_rank_params &r = p.rank;
    const mk_table t = mk_table_at(&r.memory, const_cast<void *>(p.schedule));
    if (p.context && block_idx() == 0 && thread_idx() == 0) {
        mk_context_head head = {MK_CONTEXT_MAGIC, r.fingerprint, load(&t.head->number), p.num_tokens, r.dims.saved_tiles};
        store(static_cast<mk_context_head *>(p.context), head);
    }
    if (!p.out) /* recompute: only the context is made */
        return;
    for (int64_t token = block_idx(); token < p.num_tokens; token += num_blocks()) {
        const float scale = r.shared_gate ? shared_scale(r, p.x, p.shared_output_gate, token) : 1.0f;
        for (int64_t col = thread_idx() * 8; col < r.dims.hidden; col += COMBINE_THREADS * 8)
            combine_columns(p, t, token, col, scale);
    }
}

} /* namespace mk */
#endif
