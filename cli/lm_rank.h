/* What the lm_*.c files share: the model, its ranks and their memory. */
#ifndef MOK_CLI_LM_RANK_H
#define MOK_CLI_LM_RANK_H

#include <pthread.h>

#include "lm.h"
#include "mok.h"
#include "try.h"

/* Memory that is freed all at once; zeroed, 256-byte aligned. */
typedef struct lm_arena { struct lm_block *blocks; bool failed; } lm_arena;
void *lm_take(lm_arena *arena, int64_t count, size_t size); /* NULL and `failed` if there is none */
void lm_arena_free(lm_arena *arena);

/* Parameters of all ranks, one after the other in one array; norm `layers` is the head's. */
typedef struct lm_dense {
    int64_t embedding, norm, router, head, bias, shared; /* where they begin */
    int64_t norm_stride, router_stride, shared_stride;   /* from layer to layer */
    int64_t shared_gate, shared_up, shared_down;         /* within a layer's shared expert */
    int64_t count;
} lm_dense;

enum { LM_SUM_BLOCK = 4096 }; /* elements of the flat array whose gradient one rank adds up */

typedef enum lm_matrix { LM_GATE, LM_UP, LM_DOWN, LM_NUM_MATRICES } lm_matrix;

/* One layer on one rank. */
typedef struct lm_layer {
    float *value[LM_NUM_MATRICES], *m[LM_NUM_MATRICES], *v[LM_NUM_MATRICES], *grad[LM_NUM_MATRICES]; /* [El, I, H] or [El, H, I] */
    uint16_t *bf16[LM_NUM_MATRICES];
    float *x, *rrms, *normed;             /* block's input [T, H], [T], RMSNorm's output [T, H] */
    uint16_t *normed_bf16, *out;          /* what the experts see and give [T, H] */
    float *probs, *weights, *dweights;    /* [T, E], [T, K], [T, K] */
    int32_t *ids, *sent_ids;              /* [T, K] the router's choice, and what the layer is told (-1: dropped) */
    int64_t *routes;                      /* [E] of all ranks */
    void *schedule, *context;
    uint16_t *shared_out;                 /* [T, H] */
    void *shared_context[LM_CHUNKS];
} lm_layer;

typedef struct lm_rank {
    lm *model;
    int32_t rank;
    mok_group *group;
    mok_workspace *workspace;
    int64_t first_chunk, num_chunks, tokens; /* tokens: T */
    int64_t first_expert, num_experts;
    lm_arena arena;
    lm_layer *layers;
    float *x, *dx, *head_rrms, *normed, *dnormed; /* [T, H], [T, H], [T], [T, H], [T, H] */
    uint16_t *dout, *dmoe, *dshared;              /* [T, H] */
    float *logits, *scratch, *balance;            /* [chunk tokens, 256], [chunk tokens, E], [E] */
    float *head_t, *router_t;                     /* [256, H], [layers, E, H]: transposed */
    /* shared expert: a group of this rank alone, for one chunk at a time */
    mok_group *shared_group;
    mok_workspace *shared_workspace;
    void *shared_schedule;
    uint16_t *shared_bf16, *shared_unused;        /* [layers, 3, Is * H]; the weights of the routed expert, that gets no rows */
    int32_t *shared_ids;                          /* [chunk tokens], all -1 */
    float *shared_weights;                        /* [chunk tokens] */
    pthread_t thread;
    mok_status status;
    char error[LM_ERROR];
} lm_rank;

typedef enum lm_job { LM_JOB_NONE, LM_JOB_OPEN, LM_JOB_FORWARD, LM_JOB_GRADIENTS, LM_JOB_SUM, LM_JOB_ADAMW, LM_JOB_ROUND, LM_JOB_CLOSE } lm_job;

struct lm {
    lm_config cfg;
    int64_t chunk_tokens;
    lm_dense dense;
    lm_arena arena;
    float *value, *m, *v, *grad; /* dense parameters */
    float *chunk_grad;           /* [LM_CHUNKS, dense.count] */
    double *block_squares;       /* [blocks of the flat array] */
    double *expert_squares;      /* [layers, matrices, experts] */
    double chunk_loss[LM_CHUNKS];
    lm_tensor *tensors;
    int64_t num_tensors, first_expert_tensor;
    lm_rank *ranks;
    mok_group **groups;
    /* what the ranks are to do */
    pthread_mutex_t lock;
    pthread_cond_t start, finish;
    int64_t round;
    int32_t running, started;
    lm_job job;
    const uint8_t *text;
    const int64_t *starts;
    int64_t step;
    double rate, scale;
};

/* lm_tensors.c: where parameters lie, and their first values. */
void lm_lay_out(lm *model);
void lm_list_tensors(lm *model);
void lm_first_values(lm *model);

/* lm_pass.c */
mok_status lm_rank_open(lm_rank *rank);
void lm_rank_close(lm_rank *rank);
mok_status lm_rank_pass(lm_rank *rank, bool gradients);

/* lm_update.c */
void lm_rank_sum(lm_rank *rank);   /* chunk gradients -> grad, and squares */
void lm_rank_adamw(lm_rank *rank);
void lm_rank_round(lm_rank *rank); /* fp32 -> the layer's bf16 */

/* lm_shared.c: the shared expert, chunk by chunk. */
mok_status lm_shared_open(lm_rank *rank);
void lm_shared_close(lm_rank *rank);
mok_status lm_shared_forward(lm_rank *rank, int64_t layer, bool keep); /* layer's shared_out from normed_bf16 */
mok_status lm_shared_backward(lm_rank *rank, int64_t layer);           /* rank's dshared, and chunk gradients, from dout */

#endif
