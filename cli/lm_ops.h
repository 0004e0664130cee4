/* The arithmetic of the language model outside the MoE layers: dense products, RMSNorm, router, softmax head, embedding.
 *
 * Every sum has one written order: it runs in this order for every number of tokens in the call, on every instruction set, so results
 * depend on a token's own data only, and sums over tokens (gradients) on the tokens of the call in their order. Gradients of parameters
 * are added to what is there; gradients of activations are written. `real` is float in the tool; the tests compile the same source
 * once more with double, and compare it with finite differences. */
#ifndef MOK_CLI_LM_OPS_H
#define MOK_CLI_LM_OPS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef LM_OPS_DOUBLE
typedef double lm_real;
#define LM_OP(name) lm64_##name
#else
typedef float lm_real;
#define LM_OP(name) lm_##name
#endif

/* out[m, n] = (add ? out[m, n] : 0) + sum over k ascending of a[m * a_m + k * a_k] * b[k, n]; b [K, N] and out [M, N] dense. */
void LM_OP(matmul)(int64_t M, int64_t N, int64_t K, const lm_real *a, int64_t a_m, int64_t a_k, const lm_real *b, lm_real *out, bool add);
void LM_OP(transpose)(int64_t rows, int64_t cols, const lm_real *from, lm_real *to); /* to [cols, rows] */

/* x[t] = the embeddings of the `context` bytes before position t, side by side, the nearest first.
 * text: byte t + context - 1 is the nearest to token t; table [context, 256, H / context]; x [T, H]. */
void LM_OP(embed)(int64_t T, int64_t H, int64_t context, const uint8_t *text, const lm_real *table, lm_real *x);
void LM_OP(embed_backward)(int64_t T, int64_t H, int64_t context, const uint8_t *text, const lm_real *dx, lm_real *dtable);

/* y = x * scale * rrms, rrms = 1 / sqrt(mean of x^2 + 1e-5). x, y [T, H], scale [H], rrms [T] out. */
void LM_OP(norm)(int64_t T, int64_t H, const lm_real *x, const lm_real *scale, lm_real *y, lm_real *rrms);
/* dx is added to: it already holds the gradient that came around the block. */
void LM_OP(norm_backward)(int64_t T, int64_t H, const lm_real *x, const lm_real *scale, const lm_real *rrms, const lm_real *dy, lm_real *dx,
                          lm_real *dscale);

/* probs = softmax(x W), x [T, H], W [H, E]; ids [T, K] the K largest, equal ones by smaller id; weights [T, K] their probabilities divided
 * by their sum. */
void LM_OP(route)(int64_t T, int64_t H, int64_t E, int64_t K, const lm_real *x, const lm_real *W, lm_real *probs, int32_t *ids,
                  lm_real *weights);
/* Gradients of the routing weights, and of the load-balancing loss: sum over tokens and experts of balance[e] * probs[t, e].
 * scratch [T, E]; W_t [E, H] = W transposed; dx [T, H] is written, dW [H, E] added to. */
void LM_OP(route_backward)(int64_t T, int64_t H, int64_t E, int64_t K, const lm_real *x, const lm_real *W_t, const lm_real *probs,
                           const int32_t *ids, const lm_real *weights, const lm_real *dweights, const lm_real *balance, lm_real *scratch,
                           lm_real *dx, lm_real *dW);

/* Sum over tokens of -log softmax(x W + bias)[target], in double, t ascending; W [H, 256]. logits [T, 256]: scratch, which holds
 * the probabilities afterwards. */
double LM_OP(head)(int64_t T, int64_t H, const lm_real *x, const lm_real *W, const lm_real *bias, const uint8_t *targets, lm_real *logits);
/* After head: logits becomes the gradient, `scale` times the sum's. W_t [256, H]; dx [T, H] is written, dW and dbias added to. */
void LM_OP(head_backward)(int64_t T, int64_t H, const lm_real *x, const lm_real *W_t, const uint8_t *targets, lm_real scale, lm_real *logits,
                          lm_real *dx, lm_real *dW, lm_real *dbias);

#ifndef LM_OPS_DOUBLE
/* Element by element. */
void lm_to_bf16(int64_t n, const float *from, uint16_t *to);        /* to nearest, ties to even */
void lm_add_bf16(int64_t n, const uint16_t *from, float *to);       /* to += from */
void lm_add(int64_t n, const float *from, float *to);               /* to += from */

double lm_sum_squares(int64_t n, const float *x); /* sixteen lanes, then the lanes ascending */

/* One step of AdamW on n parameters. rate, decay: learning rate, and what of the value is taken off; scale: of the gradient, from
 * clipping; correction1, 2: 1 - beta^step. */
typedef struct lm_adamw_step { float rate, decay, scale, correction1, correction2; } lm_adamw_step;
void lm_adamw(int64_t n, const lm_adamw_step *step, const float *grad, float *m, float *v, float *value);
#endif
#endif
