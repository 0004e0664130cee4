/* What follows a batch: chunk gradients are summed, parameters take a step, the layer's bf16 copies are made again. Every sum has one order,
 * whichever rank makes it. */
#include <math.h>

#include "lm_ops.h"
#include "lm_rank.h"

static const double weight_decay = 0.05, adam_beta1 = 0.9, adam_beta2 = 0.98; /* the betas of lm_ops.c */

static bool is_mine(const lm_rank *rank, int64_t expert) { return expert >= rank->first_expert && expert < rank->first_expert + rank->num_experts; }

void lm_rank_sum(lm_rank *rank)
{
    lm *model = rank->model;
    int64_t count = model->dense.count, blocks = (count + LM_SUM_BLOCK - 1) / LM_SUM_BLOCK, ranks = model->cfg.ranks;
    for (int64_t i = blocks * rank->rank / ranks; i < blocks * (rank->rank + 1) / ranks; i++) {
        int64_t at = i * LM_SUM_BLOCK, n = count - at < LM_SUM_BLOCK ? count - at : LM_SUM_BLOCK;
        float *grad = model->grad + at;
        for (int64_t j = 0; j < n; j++)
            grad[j] = 0;
        for (int64_t chunk = 0; chunk < LM_CHUNKS; chunk++)
            lm_add(n, model->chunk_grad + chunk * count + at, grad);
        model->block_squares[i] = lm_sum_squares(n, grad);
    }
    for (int64_t i = model->first_expert_tensor; i < model->num_tensors; i++)
        if (is_mine(rank, model->tensors[i].expert))
            model->expert_squares[i] = lm_sum_squares(model->tensors[i].count, model->tensors[i].grad);
}

void lm_rank_adamw(lm_rank *rank)
{
    const lm *model = rank->model;
    int64_t ranks = model->cfg.ranks;
    lm_adamw_step step = {.rate = (float)model->rate, .scale = (float)model->scale,
                          .correction1 = (float)(1 - pow(adam_beta1, (double)model->step)), .correction2 = (float)(1 - pow(adam_beta2, (double)model->step))};
    for (int64_t i = 0; i < model->num_tensors; i++) {
        const lm_tensor *t = &model->tensors[i];
        int64_t first = t->expert < 0 ? t->count * rank->rank / ranks : 0;
        int64_t end = t->expert < 0 ? t->count * (rank->rank + 1) / ranks : t->count;
        if (t->expert >= 0 && !is_mine(rank, t->expert))
            continue;
        step.decay = t->decays ? (float)(model->rate * weight_decay) : 0;
        lm_adamw(end - first, &step, t->grad + first, t->m + first, t->v + first, t->value + first);
    }
}

void lm_rank_round(lm_rank *rank)
{
    const lm *model = rank->model;
    const lm_config *c = &model->cfg;
    const lm_dense *d = &model->dense;
    for (int64_t layer = 0; layer < c->layers; layer++) {
        const lm_layer *l = &rank->layers[layer];
        for (int i = 0; i < LM_NUM_MATRICES; i++)
            lm_to_bf16(rank->num_experts * c->intermediate * c->hidden, l->value[i], l->bf16[i]);
        lm_transpose(c->hidden, c->experts, model->value + d->router + layer * d->router_stride, rank->router_t + layer * d->router_stride);
    }
    lm_transpose(c->hidden, 256, model->value + d->head, rank->head_t);
    if (c->shared_intermediate)
        lm_to_bf16(c->layers * d->shared_stride, model->value + d->shared, rank->shared_bf16);
}
