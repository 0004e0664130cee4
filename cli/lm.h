/* A small byte-level language model over the public API: the embeddings of the last bytes side by side, residual blocks of RMSNorm and MoE
 * layer with a top-k router, RMSNorm, softmax head. Expert-parallel over P ranks, as threads of this process; AdamW with fp32
 * master weights.
 *
 * Its bits do not depend on P. A batch is LM_CHUNKS chunks of consecutive bytes; a rank owns whole chunks, neighbours in order, so the MoE
 * layers see the tokens in the same global order for any P. Gradients that no expert owns are made per chunk and summed over the chunks in
 * ascending order. Experts and their optimizer state live on their rank only. All MoE layers share one workspace per rank.
 *
 * A shared expert's gradient covers the tokens of a call, so it is called chunk by chunk: lm_shared.c.
 *
 * Calls are made from one thread; the ranks' threads wait between them, so everything a tensor points to may be read and written then. */
#ifndef MOK_CLI_LM_H
#define MOK_CLI_LM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LM_CHUNKS = 16, LM_ERROR = 512 };

typedef struct lm_config {
    int64_t hidden;              /* a multiple of 64 and of context */
    int64_t intermediate;        /* of an expert, a multiple of 64 */
    int64_t shared_intermediate; /* of the shared expert, a multiple of 64; 0 = none */
    int64_t layers, experts, topk;
    int64_t context;             /* bytes before the predicted one that the model sees */
    int64_t tokens;              /* of a batch, a multiple of LM_CHUNKS */
    uint64_t seed;               /* of the first parameters */
    double balance;              /* factor of the load-balancing loss */
    bool drop_routes;            /* every route is -1: the experts see nothing */
    bool mxfp8;                  /* the routed experts compute in MXFP8, else in bf16 */
    int32_t ranks;
} lm_config;

/* One piece of the parameters: of all ranks, or one matrix of one expert. Pointers to [count] elements. */
typedef struct lm_tensor {
    const char *name;      /* "embedding", "gate", ... */
    int64_t layer, expert; /* -1: not of a layer, not of an expert */
    int64_t count;
    bool decays;           /* weight decay */
    float *value, *m, *v, *grad;
} lm_tensor;

typedef struct lm lm;

/* Threads, group, workspaces, parameters. NULL and one sentence if the figures do not fit or memory is short. */
lm *lm_open(const lm_config *cfg, char error[LM_ERROR]);
void lm_close(lm *model); /* NULL is fine */

/* Mean loss in nats per byte of LM_CHUNKS chunks that begin at `starts`: byte starts[c] + context + i is predicted from the `context` bytes
 * before it, for i < tokens / LM_CHUNKS. False and one sentence if a rank fails. */
bool lm_forward(lm *model, const uint8_t *text, const int64_t starts[LM_CHUNKS], double *loss, char error[LM_ERROR]);
/* The same, and the gradients (those of the load-balancing loss included) into the tensors' grad. */
bool lm_gradients(lm *model, const uint8_t *text, const int64_t starts[LM_CHUNKS], double *loss, char error[LM_ERROR]);
/* AdamW step number `step` >= 1 with the gradients, which are scaled down to norm `clip`; *norm is theirs before. */
bool lm_update(lm *model, int64_t step, double rate, double clip, double *norm, char error[LM_ERROR]);

/* Tensors in an order that does not depend on the number of ranks. After writing values: lm_values_changed. */
const lm_tensor *lm_tensors(const lm *model, int64_t *count);
void lm_values_changed(lm *model);

/* Routes per expert of the last forward or gradients call, [layers, experts]. */
const int64_t *lm_routes(const lm *model);

/* Chunk starts of training step `step`, drawn from the seed; and evenly over the text, batch `index` of `count`. size: of the text, at
 * least lm_chunk_bytes. */
int64_t lm_chunk_bytes(const lm_config *cfg);
void lm_random_starts(const lm_config *cfg, uint64_t step, int64_t size, int64_t starts[LM_CHUNKS]);
void lm_even_starts(const lm_config *cfg, int64_t index, int64_t count, int64_t size, int64_t starts[LM_CHUNKS]);

#endif
