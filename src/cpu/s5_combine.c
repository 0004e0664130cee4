/* s5_combine, the reducing half: out = s y_s + sum over k ascending of w_k y_k, in fp32, one rounding. In: slots [T, K, H] of this rank's
 * heap, complete after the pass's last barrier. The pushing half is hosted by s4_down. */
#include <math.h>

#include "cpu/run.h"

enum { CHUNK = 256 }; /* columns at a time, so that the sums stay in registers and L1 */

/* acc += weight * row, one fma each. */
static void add_weighted(float *acc, const mk_bf16 *row, float weight, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        acc[i] = fmaf(weight, mk_bf16_to_float(row[i]), acc[i]);
}

void mk_cpu_s5_combine(mk_cpu_run *run, int64_t first, int64_t end)
{
    const mk_memory *m = &run->w->memory;
    int64_t hidden = run->d->hidden, topk = run->d->topk;
    const mk_bf16 *slots = (const mk_bf16 *)(const void *)(run->w->heap + m->slots);
    const float *weights = (const float *)(const void *)(run->w->heap + m->router_weights);
    mk_bf16 *out = run->call->forward.out;
    for (int64_t t = first; t < end; t++) {
        float s = run->d->shared_intermediate ? mk_cpu_shared_gate(run, t) : 0.0f;
        for (int64_t col = 0; col < hidden; col += CHUNK) {
            float acc[CHUNK] = {0};
            int64_t n = mk_min(CHUNK, hidden - col);
            if (run->d->shared_intermediate)
                for (int64_t i = 0; i < n; i++)
                    acc[i] = s * mk_bf16_to_float(run->shared_y[t * hidden + col + i]);
            for (int64_t k = 0; k < topk; k++)
                if (run->table.own_ids[t * topk + k] >= 0)
                    add_weighted(acc, slots + (t * topk + k) * hidden + col, weights[t * topk + k], n);
            mk_floats_to_bf16(out + t * hidden + col, acc, n);
        }
    }
}
