/* s3_swiglu and its derivative against double formulas, the limit and its edges, and the fixed tree of the router-weight partials. */
#include "stage.h"

/* Every gate against a few ups: all 65536 bf16 gates, so every exponent, infinity and NaN. */
static double silu(double g) { return g / (1 + exp(-g)); }

static void check_values(float limit)
{
    static const float ups[] = {0, -0.0f, 1, -1, 0.33203125f, 7, -7, 6.96875f, -1024, 3e38f};
    mk_bf16 gate[10], up[10], h[10];
    for (uint32_t i = 0; i < 65536; i++) {
        for (int j = 0; j < 10; j++) {
            gate[j] = (mk_bf16)i;
            up[j] = mk_float_to_bf16(ups[j]);
        }
        mk_cpu_s3_swiglu(gate, up, h, 10, limit);
        for (int j = 0; j < 10; j++) {
            double g = mk_bf16_to_float(gate[j]), u = mk_bf16_to_float(up[j]), got = mk_bf16_to_float(h[j]);
            if (isnan(g)) {
                CHECK(isnan(got));
                continue;
            }
            if (limit > 0) {
                g = g > limit ? limit : g;
                u = u > limit ? limit : u < -limit ? -limit : u;
            }
            double want = isinf(g) && g < 0 ? NAN : silu(g) * u; /* -inf * sigmoid(-inf) = -inf * 0 */
            if (isnan(want) || (isinf(g) && u == 0))
                CHECK(isnan(got));
            else if (fabs(want) > 3.3895e38)
                CHECK(isinf(got) || fabs(got) > 3.3e38);
            else /* an fp32 exp that has run out gives 0 */
                stage_near("h", i, j, got, want, g < -80 ? fabs(u) * 1e-33 + 1e-38 : 1e-38);
        }
    }
}

TEST(s3_forward_of_every_gate) { check_values(0); }
TEST(s3_forward_of_every_gate_with_limit) { check_values(7.0f); }

/* The fixed tree over 64 products: halves are added. */
static float fold(float *p)
{
    for (int half = 32; half; half /= 2)
        for (int i = 0; i < half; i++)
            p[i] = p[i] + p[i + half];
    return p[0];
}

static void check_backward(float limit, double size)
{
    uint64_t state = test_seed();
    for (int round = 0; round < 300; round++) {
        float dh[64], product[64], weight = round % 7 ? (float)test_normal(&state) : 0;
        mk_bf16 gate[64], up[64], dgate[64], dup[64], weighted[64], h[64];
        double sum = 0, magnitude = 0;
        for (int i = 0; i < 64; i++) {
            dh[i] = (float)test_normal(&state);
            gate[i] = mk_float_to_bf16((float)(test_normal(&state) * size));
            up[i] = mk_float_to_bf16((float)(test_normal(&state) * size));
            if (limit > 0 && i < 6) { /* the edges: at the limit the gradient still flows */
                gate[i] = mk_float_to_bf16(i % 2 ? limit : -limit);
                up[i] = mk_float_to_bf16(i % 3 ? limit : -limit);
            }
        }
        mk_cpu_s3_swiglu(gate, up, h, 64, limit);
        float partial = mk_cpu_s3_swiglu_bwd(dh, gate, up, weight, dgate, dup, weighted, 64, limit);
        for (int i = 0; i < 64; i++) {
            double g = mk_bf16_to_float(gate[i]), u = mk_bf16_to_float(up[i]), w = weight;
            bool gate_flows = !(limit > 0) || g <= limit, up_flows = !(limit > 0) || fabs(u) <= limit;
            double gl = limit > 0 ? fmin(g, limit) : g, ul = limit > 0 ? fmax(fmin(u, limit), -limit) : u, s = 1 / (1 + exp(-gl));
            double slope = s + gl * s * (1 - s), d = w * dh[i];
            stage_near("dgate", round, i, mk_bf16_to_float(dgate[i]), gate_flows ? d * ul * slope : 0, fabs(d * ul) * 0x1p-20 * (1 + fabs(gl)));
            stage_near("dup", round, i, mk_bf16_to_float(dup[i]), up_flows ? d * gl * s : 0, 1e-30);
            /* h as the forward rounded it, then weighted and rounded once */
            stage_same("w h", round, i, weighted[i], mk_float_to_bf16(weight * mk_bf16_to_float(h[i])));
            product[i] = dh[i] * mk_bf16_to_float(h[i]);
            sum += (double)dh[i] * mk_bf16_to_float(h[i]);
            magnitude += fabs((double)product[i]);
        }
        if (fabs(partial - sum) > magnitude * 0x1p-20)
            TEST_FAILED("partial is %.9g; expected %.9g", (double)partial, sum);
        stage_same("partial", round, 0, stage_bits(partial), stage_bits(fold(product)));
    }
}

TEST(s3_backward) { check_backward(0, 1.5); }
TEST(s3_backward_of_large_values) { check_backward(0, 20); }
TEST(s3_backward_with_limit) { check_backward(1.25f, 1.5); }

/* dh is not weighted in the partial, and an unlucky weight spoils nothing: 0 and below are fine. */
TEST(s3_backward_needs_no_division)
{
    float dh[64];
    mk_bf16 gate[64], up[64], a[64], b[64], c[64];
    for (int i = 0; i < 64; i++) {
        dh[i] = 1;
        gate[i] = up[i] = mk_float_to_bf16(1);
    }
    float want = mk_cpu_s3_swiglu_bwd(dh, gate, up, 1, a, b, c, 64, 0);
    static const float weights[] = {0, -1, 1e-38f, -0.0f, 1e30f};
    for (int i = 0; i < 5; i++)
        CHECK_EQ(stage_bits(mk_cpu_s3_swiglu_bwd(dh, gate, up, weights[i], a, b, c, 64, 0)), stage_bits(want));
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
