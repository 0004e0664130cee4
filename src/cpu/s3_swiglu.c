/* s3_swiglu: h = silu(gate) * up, and its derivative. Hosted by the ends of s2_gate_up and s4_down_bwd. fp32 from the
 * rounded gate/up; with a limit L > 0 first gate <= L and -L <= up <= L. */
#include <math.h>

#include "cpu/run.h"

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
float mk_silu(float x) { return x * sigmoid(x); }

static float limited_gate(float gate, float limit) { return limit > 0 && gate > limit ? limit : gate; }
static float limited_up(float up, float limit)
{
    if (limit <= 0)
        return up;
    return up > limit ? limit : up < -limit ? -limit : up;
}

void mk_cpu_s3_swiglu(const mk_bf16 *gate, const mk_bf16 *up, mk_bf16 *h, int64_t n, float limit)
{
    for (int64_t i = 0; i < n; i++)
        h[i] = mk_float_to_bf16(mk_silu(limited_gate(mk_bf16_to_float(gate[i]), limit)) * limited_up(mk_bf16_to_float(up[i]), limit));
}

/* The fixed tree over one group of 64 products: halves are added until one is left. */
static float tree_sum(float *p)
{
    for (int64_t half = MK_DW_GROUP / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; i++)
            p[i] += p[i + half];
    return p[0];
}

float mk_cpu_s3_swiglu_bwd(const float *dh, const mk_bf16 *gate, const mk_bf16 *up, float weight, mk_bf16 *dgate, mk_bf16 *dup,
                           mk_bf16 *weighted_h, int64_t n, float limit)
{
    float product[MK_DW_GROUP] = {0};
    for (int64_t i = 0; i < n; i++) {
        float g = mk_bf16_to_float(gate[i]), u = mk_bf16_to_float(up[i]);
        float gl = limited_gate(g, limit), ul = limited_up(u, limit), s = sigmoid(gl), silu = gl * s;
        float h = mk_round_to_bf16(silu * ul); /* as the forward rounded it */
        float d = weight * dh[i];
        product[i] = dh[i] * h;
        /* silu'(g) = s + g s (1 - s); nothing flows through a limit that was hit */
        float slope = fmaf(silu, 1.0f - s, s);
        dgate[i] = mk_float_to_bf16(g > gl ? 0.0f : d * ul * slope);
        dup[i] = mk_float_to_bf16(u > ul || u < ul ? 0.0f : d * silu);
        weighted_h[i] = mk_float_to_bf16(weight * h);
    }
    return tree_sum(product);
}
