/* The backward's mirror of s5_combine: dx = shared part + sum over k ascending of dx_k, in fp32, one rounding; and the router-weight
 * gradients out of their slots, 0 for dropped routes. */
#include "cpu/run.h"

enum { CHUNK = 256 };

static void add_row(float *acc, const mk_bf16 *row, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        acc[i] += mk_bf16_to_float(row[i]);
}

static void store_dweights(const mk_cpu_run *run, int64_t first, int64_t end)
{
    const float *slots = (const float *)(const void *)(run->w->heap + run->w->memory.dweight_slots);
    void *out = run->call->backward.drouter_weights;
    for (int64_t i = first * run->d->topk; i < end * run->d->topk && out; i++) {
        float dw = run->table.own_ids[i] >= 0 ? slots[i] : 0.0f;
        if (run->w->config.router_dtype == MOK_BF16)
            ((mk_bf16 *)out)[i] = mk_float_to_bf16(dw);
        else
            ((float *)out)[i] = dw;
    }
}

void mk_cpu_s5_combine_bwd(mk_cpu_run *run, int64_t first, int64_t end)
{
    int64_t hidden = run->d->hidden, topk = run->d->topk;
    const mk_bf16 *slots = (const mk_bf16 *)(const void *)(run->w->heap + run->w->memory.slots);
    mk_bf16 *dx = run->call->backward.dx;
    store_dweights(run, first, end);
    for (int64_t t = first; t < end; t++)
        for (int64_t col = 0; col < hidden; col += CHUNK) {
            float acc[CHUNK] = {0};
            int64_t n = mk_min(CHUNK, hidden - col);
            if (run->d->shared_intermediate)
                add_row(acc, run->shared_y + t * hidden + col, n);
            for (int64_t k = 0; k < topk; k++)
                if (run->table.own_ids[t * topk + k] >= 0)
                    add_row(acc, slots + (t * topk + k) * hidden + col, n);
            mk_floats_to_bf16(dx + t * hidden + col, acc, n);
        }
}
