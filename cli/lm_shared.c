/* The shared expert. The layer's gradients of it cover the tokens of a call, which is right for data parallelism but would depend on how many
 * chunks a rank owns. So every rank has a group and a workspace of its own for it, and calls it chunk by chunk: all routes dropped, one
 * context per chunk and layer, gradients straight into the chunk's. */
#include <string.h>

#include "lm_rank.h"

enum { UNUSED_WIDTH = 64 }; /* of the one routed expert, which gets no rows */

static void take_shared_memory(lm_rank *rank, const mok_plan *plan)
{
    const lm_config *c = &rank->model->cfg;
    int64_t rows = rank->tokens * c->hidden;
    rank->dshared = lm_take(&rank->arena, rows, sizeof(uint16_t));
    rank->shared_bf16 = lm_take(&rank->arena, c->layers * rank->model->dense.shared_stride, sizeof(uint16_t));
    rank->shared_schedule = lm_take(&rank->arena, plan->schedule_bytes, 1);
    rank->shared_unused = lm_take(&rank->arena, UNUSED_WIDTH * c->hidden, sizeof(uint16_t));
    rank->shared_ids = lm_take(&rank->arena, rank->model->chunk_tokens, sizeof(int32_t));
    rank->shared_weights = lm_take(&rank->arena, rank->model->chunk_tokens, sizeof(float));
    for (int64_t l = 0; l < c->layers; l++) {
        rank->layers[l].shared_out = lm_take(&rank->arena, rows, sizeof(uint16_t));
        for (int64_t i = 0; i < rank->num_chunks; i++)
            rank->layers[l].shared_context[i] = lm_take(&rank->arena, plan->context_bytes, 1);
    }
}

mok_status lm_shared_open(lm_rank *rank)
{
    const lm_config *c = &rank->model->cfg;
    mok_config cfg = MOK_INIT(mok_config), main = MOK_INIT(mok_config);
    mok_plan plan = MOK_INIT(mok_plan);
    TRY(mok_workspace_config(rank->workspace, &main));
    cfg.hidden = c->hidden;
    cfg.intermediate = UNUSED_WIDTH;
    cfg.shared_intermediate = c->shared_intermediate;
    cfg.num_experts = cfg.topk = 1;
    cfg.max_tokens = rank->model->chunk_tokens;
    cfg.save = MOK_SAVE_ALL;
    cfg.backend = MOK_BACKEND_CPU;
    cfg.cpu_threads = main.cpu_threads;
    TRY(mok_group_create_local(1, NULL, &rank->shared_group));
    TRY(mok_workspace_create(rank->shared_group, &cfg, &rank->shared_workspace));
    TRY(mok_workspace_plan(rank->shared_workspace, &plan));
    take_shared_memory(rank, &plan);
    if (rank->arena.failed)
        return MOK_E_MEMORY;
    for (int64_t t = 0; t < rank->model->chunk_tokens; t++)
        rank->shared_ids[t] = -1;
    mok_schedule_args s = MOK_INIT(mok_schedule_args);
    s.num_tokens = rank->model->chunk_tokens;
    s.expert_ids = rank->shared_ids;
    s.schedule = rank->shared_schedule;
    return mok_schedule(rank->shared_workspace, &s, NULL);
}

void lm_shared_close(lm_rank *rank)
{
    mok_workspace_destroy(rank->shared_workspace);
    mok_group_destroy(rank->shared_group);
}

static mok_weights shared_weights(const lm_rank *rank, int64_t layer)
{
    const lm_dense *d = &rank->model->dense;
    const uint16_t *w = rank->shared_bf16 + layer * d->shared_stride;
    mok_weight unused = {.packed = rank->shared_unused};
    return (mok_weights){.gate = unused, .up = unused, .down = unused, .shared_gate = {.packed = w + d->shared_gate},
                         .shared_up = {.packed = w + d->shared_up}, .shared_down = {.packed = w + d->shared_down}};
}

mok_status lm_shared_forward(lm_rank *rank, int64_t layer, bool keep)
{
    lm_layer *l = &rank->layers[layer];
    int64_t tokens = rank->model->chunk_tokens, chunk_rows = tokens * rank->model->cfg.hidden;
    mok_forward_args f = MOK_INIT(mok_forward_args);
    f.layer = (uint64_t)layer;
    f.num_tokens = tokens;
    f.schedule = rank->shared_schedule;
    f.router_weights = rank->shared_weights;
    f.weights = shared_weights(rank, layer);
    for (int64_t i = 0; i < rank->num_chunks; i++) {
        f.x = l->normed_bf16 + i * chunk_rows;
        f.context = keep ? l->shared_context[i] : NULL;
        f.out = l->shared_out + i * chunk_rows;
        TRY(mok_forward(rank->shared_workspace, &f, NULL));
    }
    return mok_wait(rank->shared_workspace);
}

mok_status lm_shared_backward(lm_rank *rank, int64_t layer)
{
    const lm_dense *d = &rank->model->dense;
    const lm_layer *l = &rank->layers[layer];
    int64_t tokens = rank->model->chunk_tokens, chunk_rows = tokens * rank->model->cfg.hidden;
    mok_backward_args b = MOK_INIT(mok_backward_args);
    b.layer = (uint64_t)layer;
    b.num_tokens = tokens;
    b.schedule = rank->shared_schedule;
    b.router_weights = rank->shared_weights;
    b.weights = shared_weights(rank, layer);
    for (int64_t i = 0; i < rank->num_chunks; i++) {
        float *grad = rank->model->chunk_grad + (rank->first_chunk + i) * d->count + d->shared + layer * d->shared_stride;
        b.context = l->shared_context[i];
        b.dout = rank->dout + i * chunk_rows;
        b.x = l->normed_bf16 + i * chunk_rows;
        b.dx = rank->dshared + i * chunk_rows;
        b.grads.shared_gate = (mok_grad){.packed = grad + d->shared_gate, .dtype = MOK_FP32};
        b.grads.shared_up = (mok_grad){.packed = grad + d->shared_up, .dtype = MOK_FP32};
        b.grads.shared_down = (mok_grad){.packed = grad + d->shared_down, .dtype = MOK_FP32};
        TRY(mok_backward(rank->shared_workspace, &b, NULL));
    }
    return mok_wait(rank->shared_workspace);
}
