#include "lm_ops.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* The hot loops are compiled for several instruction sets and chosen at run time. Their bits agree: each element takes the same
 * operations in the same order, and -ffp-contract=off keeps products and sums apart. */
#if defined(__x86_64__) && defined(__GNUC__)
#define WITH_VARIANTS(name, params, args)                                                       \
    __attribute__((target("avx512f"))) static void name##_avx512 params { name##_body args; } \
    __attribute__((target("avx2"))) static void name##_avx2 params { name##_body args; }       \
    void name params                                                                            \
    {                                                                                           \
        if (__builtin_cpu_supports("avx512f"))                                                  \
            name##_avx512 args;                                                                 \
        else if (__builtin_cpu_supports("avx2"))                                                \
            name##_avx2 args;                                                                   \
        else                                                                                    \
            name##_body args;                                                                   \
    }
#else
#define WITH_VARIANTS(name, params, args) \
    void name params { name##_body args; }
#endif
#define VARIANTS(name, params, args) WITH_VARIANTS(name, params, args)

/* ------------------------------------------------------------------------------------------------------ products -- */
enum { LANES = 16, TILE_M = 4, TILE_N = 2 * LANES };
typedef lm_real lanes __attribute__((vector_size(LANES * sizeof(lm_real)), aligned(sizeof(lm_real)), may_alias));

/* out[rows, cols] for constant rows <= TILE_M and vectors <= 2 of LANES columns: the sums stay in registers. */
INLINE void tile(int rows, int vectors, int64_t K, const lm_real *a, int64_t a_m, int64_t a_k, const lm_real *b, int64_t N, lm_real *out,
                 bool add)
{
    lanes sum[TILE_M][2];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vectors; j++)
            sum[i][j] = add ? *(const lanes *)(out + i * N + j * LANES) : (lanes){0};
    for (int64_t k = 0; k < K; k++, a += a_k, b += N)
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int j = 0; j < vectors; j++)
                sum[i][j] += a[i * a_m] * *(const lanes *)(b + j * LANES);
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vectors; j++)
            *(lanes *)(out + i * N + j * LANES) = sum[i][j];
}

INLINE void columns(int vectors, int64_t M, int64_t K, const lm_real *a, int64_t a_m, int64_t a_k, const lm_real *b, int64_t N, lm_real *out,
                    bool add)
{
    const int last = (int)(M % TILE_M);
    for (int64_t i = 0; i < M / TILE_M; i++, a += TILE_M * a_m, out += TILE_M * N)
        tile(TILE_M, vectors, K, a, a_m, a_k, b, N, out, add);
    for (int i = 0; i < last; i++)
        tile(1, vectors, K, a + i * a_m, a_m, a_k, b, N, out + i * N, add);
}

/* Columns that do not fill a vector: fewer than LANES. */
INLINE void last_columns(int cols, int64_t M, int64_t K, const lm_real *a, int64_t a_m, int64_t a_k, const lm_real *b, int64_t N,
                         lm_real *out, bool add)
{
    for (int64_t m = 0; m < M && cols; m++) {
        lm_real sum[LANES] = {0};
        for (int j = 0; j < cols && add; j++)
            sum[j] = out[m * N + j];
        for (int64_t k = 0; k < K; k++)
            for (int j = 0; j < cols; j++)
                sum[j] += a[m * a_m + k * a_k] * b[k * N + j];
        for (int j = 0; j < cols; j++)
            out[m * N + j] = sum[j];
    }
}

#define MATMUL_PARAMS \
    (int64_t M, int64_t N, int64_t K, const lm_real *a, int64_t a_m, int64_t a_k, const lm_real *b, lm_real *out, bool add)
#define MATMUL_ARGS (M, N, K, a, a_m, a_k, b, out, add)
#ifdef LM_OPS_DOUBLE
#define lm_matmul_body lm64_matmul_body
#endif
INLINE void lm_matmul_body MATMUL_PARAMS
{
    int64_t n = 0;
    for (; n + TILE_N <= N; n += TILE_N)
        columns(2, M, K, a, a_m, a_k, b + n, N, out + n, add);
    for (; n + LANES <= N; n += LANES)
        columns(1, M, K, a, a_m, a_k, b + n, N, out + n, add);
    last_columns((int)(N % LANES), M, K, a, a_m, a_k, b + n, N, out + n, add);
}
VARIANTS(LM_OP(matmul), MATMUL_PARAMS, MATMUL_ARGS)

void LM_OP(transpose)(int64_t rows, int64_t cols, const lm_real *from, lm_real *to)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            to[c * rows + r] = from[r * cols + c];
}

/* Sums over a row of H elements: H is a multiple of LANES; lanes ascending at the end. */
INLINE lm_real add_lanes(const lanes *sum)
{
    lm_real total = 0;
    for (int i = 0; i < LANES; i++)
        total += (*sum)[i];
    return total;
}

/* ----------------------------------------------------------------------------------------------------- embedding -- */
void LM_OP(embed)(int64_t T, int64_t H, int64_t context, const uint8_t *text, const lm_real *table, lm_real *x)
{
    int64_t width = H / context;
    for (int64_t t = 0; t < T; t++)
        for (int64_t j = 0; j < context; j++)
            memcpy(x + t * H + j * width, table + (j * 256 + text[t + context - 1 - j]) * width, sizeof *x * (size_t)width);
}

void LM_OP(embed_backward)(int64_t T, int64_t H, int64_t context, const uint8_t *text, const lm_real *dx, lm_real *dtable)
{
    int64_t width = H / context;
    for (int64_t t = 0; t < T; t++)
        for (int64_t j = 0; j < context; j++) {
            lm_real *to = dtable + (j * 256 + text[t + context - 1 - j]) * width;
            for (int64_t i = 0; i < width; i++)
                to[i] += dx[t * H + j * width + i];
        }
}

/* ---------------------------------------------------------------------------------------------------------- norm -- */
void LM_OP(norm)(int64_t T, int64_t H, const lm_real *x, const lm_real *scale, lm_real *y, lm_real *rrms)
{
    for (int64_t t = 0; t < T; t++, x += H, y += H) {
        lanes sum = {0};
        for (int64_t h = 0; h < H; h += LANES)
            sum += *(const lanes *)(x + h) * *(const lanes *)(x + h);
        rrms[t] = 1 / (lm_real)sqrt((double)(add_lanes(&sum) / (lm_real)H + (lm_real)1e-5));
        for (int64_t h = 0; h < H; h++)
            y[h] = x[h] * rrms[t] * scale[h];
    }
}

void LM_OP(norm_backward)(int64_t T, int64_t H, const lm_real *x, const lm_real *scale, const lm_real *rrms, const lm_real *dy, lm_real *dx,
                          lm_real *dscale)
{
    for (int64_t t = 0; t < T; t++, x += H, dy += H, dx += H) {
        lanes sum = {0};
        for (int64_t h = 0; h < H; h += LANES)
            sum += *(const lanes *)(dy + h) * *(const lanes *)(scale + h) * *(const lanes *)(x + h);
        lm_real r = rrms[t], pull = add_lanes(&sum) * r * r * r / (lm_real)H;
        for (int64_t h = 0; h < H; h++) {
            dx[h] += dy[h] * scale[h] * r - x[h] * pull;
            dscale[h] += dy[h] * x[h] * r;
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- router -- */
#ifdef LM_OPS_DOUBLE
#define EXP exp
#else
#define EXP expf
#endif

/* In place; returns log(sum of exp(x)). */
static double softmax(int64_t n, lm_real *x)
{
    lm_real most = x[0], sum = 0;
    for (int64_t i = 1; i < n; i++)
        most = x[i] > most ? x[i] : most;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] = EXP(x[i] - most);
    for (int64_t i = 0; i < n; i++)
        x[i] /= sum;
    return (double)most + log((double)sum);
}

/* The K largest of p, largest first; of equal ones the smaller index first. Not-a-numbers count as smallest. */
static void top(int64_t E, int64_t K, const lm_real *p, int32_t *ids, lm_real *weights)
{
    lm_real sum = 0;
    for (int64_t k = 0; k < K; k++) {
        int64_t best = -1;
        for (int64_t e = 0; e < E; e++) {
            bool taken = false;
            for (int64_t j = 0; j < k; j++)
                taken |= ids[j] == e;
            if (!taken && (best < 0 || p[e] > p[best]))
                best = e;
        }
        ids[k] = (int32_t)best;
        weights[k] = p[best];
        sum += weights[k];
    }
    for (int64_t k = 0; k < K; k++)
        weights[k] /= sum;
}

void LM_OP(route)(int64_t T, int64_t H, int64_t E, int64_t K, const lm_real *x, const lm_real *W, lm_real *probs, int32_t *ids,
                  lm_real *weights)
{
    LM_OP(matmul)(T, E, H, x, H, 1, W, probs, false);
    for (int64_t t = 0; t < T; t++) {
        softmax(E, probs + t * E);
        top(E, K, probs + t * E, ids + t * K, weights + t * K);
    }
}

/* d of one token's router logits. The chosen weights are a softmax over the chosen logits, whatever the others are. */
static void route_token_backward(int64_t E, int64_t K, const lm_real *probs, const int32_t *ids, const lm_real *weights,
                                 const lm_real *dweights, const lm_real *balance, lm_real *dlogits)
{
    lm_real mean = 0, weighted = 0;
    for (int64_t e = 0; e < E; e++)
        mean += probs[e] * balance[e];
    for (int64_t e = 0; e < E; e++)
        dlogits[e] = probs[e] * (balance[e] - mean);
    for (int64_t k = 0; k < K; k++)
        weighted += weights[k] * dweights[k];
    for (int64_t k = 0; k < K; k++)
        if (ids[k] >= 0)
            dlogits[ids[k]] += weights[k] * (dweights[k] - weighted);
}

void LM_OP(route_backward)(int64_t T, int64_t H, int64_t E, int64_t K, const lm_real *x, const lm_real *W_t, const lm_real *probs,
                           const int32_t *ids, const lm_real *weights, const lm_real *dweights, const lm_real *balance, lm_real *scratch,
                           lm_real *dx, lm_real *dW)
{
    for (int64_t t = 0; t < T; t++)
        route_token_backward(E, K, probs + t * E, ids + t * K, weights + t * K, dweights + t * K, balance, scratch + t * E);
    LM_OP(matmul)(T, H, E, scratch, E, 1, W_t, dx, false);
    LM_OP(matmul)(H, E, T, x, 1, H, scratch, dW, true);
}

/* ---------------------------------------------------------------------------------------------------------- head -- */
double LM_OP(head)(int64_t T, int64_t H, const lm_real *x, const lm_real *W, const lm_real *bias, const uint8_t *targets, lm_real *logits)
{
    double loss = 0;
    for (int64_t t = 0; t < T; t++)
        memcpy(logits + t * 256, bias, 256 * sizeof *logits);
    LM_OP(matmul)(T, 256, H, x, H, 1, W, logits, true);
    for (int64_t t = 0; t < T; t++) {
        double target = (double)logits[t * 256 + targets[t]];
        loss += softmax(256, logits + t * 256) - target;
    }
    return loss;
}

void LM_OP(head_backward)(int64_t T, int64_t H, const lm_real *x, const lm_real *W_t, const uint8_t *targets, lm_real scale, lm_real *logits,
                          lm_real *dx, lm_real *dW, lm_real *dbias)
{
    for (int64_t t = 0; t < T; t++) {
        lm_real *row = logits + t * 256;
        row[targets[t]] -= 1;
        for (int64_t v = 0; v < 256; v++) {
            row[v] *= scale;
            dbias[v] += row[v];
        }
    }
    LM_OP(matmul)(T, H, 256, logits, 256, 1, W_t, dx, false);
    LM_OP(matmul)(H, 256, T, x, 1, H, logits, dW, true);
}

#ifndef LM_OPS_DOUBLE
/* --------------------------------------------------------------------------------------------- element by element -- */
void lm_to_bf16(int64_t n, const float *from, uint16_t *to)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, sizeof bits);
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        to[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
    }
}

void lm_add_bf16(int64_t n, const uint16_t *from, float *to)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        to[i] += value;
    }
}

void lm_add(int64_t n, const float *from, float *to)
{
    for (int64_t i = 0; i < n; i++)
        to[i] += from[i];
}

double lm_sum_squares(int64_t n, const float *x)
{
    double lane[LANES] = {0}, total = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            lane[j] += (double)x[i + j] * (double)x[i + j];
    for (; i < n; i++)
        lane[i % LANES] += (double)x[i] * (double)x[i];
    for (int j = 0; j < LANES; j++)
        total += lane[j];
    return total;
}

static const float beta1 = 0.9f, beta2 = 0.98f, epsilon = 1e-8f;

#define ADAMW_PARAMS (int64_t n, const lm_adamw_step *step, const float *grad, float *m, float *v, float *value)
#define ADAMW_ARGS (n, step, grad, m, v, value)
INLINE void lm_adamw_body ADAMW_PARAMS
{
    const lm_adamw_step s = *step;
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * s.scale;
        m[i] = beta1 * m[i] + (1 - beta1) * g;
        v[i] = beta2 * v[i] + (1 - beta2) * (g * g);
        value[i] -= s.rate * (m[i] / s.correction1) / (sqrtf(v[i] / s.correction2) + epsilon) + s.decay * value[i];
    }
}
VARIANTS(lm_adamw, ADAMW_PARAMS, ADAMW_ARGS)
#endif
