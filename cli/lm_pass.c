/* One rank's part of a batch: forward through all layers, loss, and back. The layers go through one workspace in the order
 * f1 f2 ... b2 b1, each with a schedule and a context of its own. */
#include <stdlib.h>
#include <string.h>

#include "lm_ops.h"
#include "lm_rank.h"

/* --------------------------------------------------------------------------------------------------------- memory -- */
static void take_expert_memory(lm_rank *rank, lm_layer *l)
{
    int64_t count = rank->num_experts * rank->model->cfg.intermediate * rank->model->cfg.hidden;
    for (int i = 0; i < LM_NUM_MATRICES; i++) {
        l->value[i] = lm_take(&rank->arena, count, sizeof(float));
        l->m[i] = lm_take(&rank->arena, count, sizeof(float));
        l->v[i] = lm_take(&rank->arena, count, sizeof(float));
        l->grad[i] = lm_take(&rank->arena, count, sizeof(float));
        l->bf16[i] = lm_take(&rank->arena, count, sizeof(uint16_t));
    }
}

static void take_layer_memory(lm_rank *rank, lm_layer *l, const mok_plan *plan)
{
    const lm_config *c = &rank->model->cfg;
    int64_t rows = rank->tokens * c->hidden, routes = rank->tokens * c->topk;
    take_expert_memory(rank, l);
    l->x = lm_take(&rank->arena, rows, sizeof(float));
    l->rrms = lm_take(&rank->arena, rank->tokens, sizeof(float));
    l->normed = lm_take(&rank->arena, rows, sizeof(float));
    l->normed_bf16 = lm_take(&rank->arena, rows, sizeof(uint16_t));
    l->out = lm_take(&rank->arena, rows, sizeof(uint16_t));
    l->probs = lm_take(&rank->arena, rank->tokens * c->experts, sizeof(float));
    l->weights = lm_take(&rank->arena, routes, sizeof(float));
    l->dweights = lm_take(&rank->arena, routes, sizeof(float));
    l->ids = lm_take(&rank->arena, routes, sizeof(int32_t));
    l->sent_ids = lm_take(&rank->arena, routes, sizeof(int32_t));
    l->schedule = lm_take(&rank->arena, plan->schedule_bytes, 1);
    l->context = lm_take(&rank->arena, plan->context_bytes, 1);
}

static void take_rank_memory(lm_rank *rank, const mok_plan *plan)
{
    const lm_config *c = &rank->model->cfg;
    int64_t rows = rank->tokens * c->hidden;
    rank->layers = lm_take(&rank->arena, c->layers, sizeof *rank->layers);
    int64_t *routes = lm_take(&rank->arena, c->layers * c->experts, sizeof(int64_t));
    for (int64_t l = 0; l < c->layers && rank->layers && routes; l++) {
        take_layer_memory(rank, &rank->layers[l], plan);
        rank->layers[l].routes = routes + l * c->experts;
    }
    rank->x = lm_take(&rank->arena, rows, sizeof(float));
    rank->dx = lm_take(&rank->arena, rows, sizeof(float));
    rank->head_rrms = lm_take(&rank->arena, rank->tokens, sizeof(float));
    rank->normed = lm_take(&rank->arena, rows, sizeof(float));
    rank->dnormed = lm_take(&rank->arena, rows, sizeof(float));
    rank->dout = lm_take(&rank->arena, rows, sizeof(uint16_t));
    rank->dmoe = lm_take(&rank->arena, rows, sizeof(uint16_t));
    rank->logits = lm_take(&rank->arena, rank->model->chunk_tokens * 256, sizeof(float));
    rank->scratch = lm_take(&rank->arena, rank->model->chunk_tokens * c->experts, sizeof(float));
    rank->balance = lm_take(&rank->arena, c->experts, sizeof(float));
    rank->head_t = lm_take(&rank->arena, 256 * c->hidden, sizeof(float));
    rank->router_t = lm_take(&rank->arena, c->layers * c->experts * c->hidden, sizeof(float));
}

mok_status lm_rank_open(lm_rank *rank)
{
    const lm_config *c = &rank->model->cfg;
    mok_config cfg = MOK_INIT(mok_config);
    mok_plan plan = MOK_INIT(mok_plan);
    cfg.hidden = c->hidden;
    cfg.intermediate = c->intermediate;
    cfg.num_experts = c->experts;
    cfg.topk = c->topk;
    cfg.max_tokens = (LM_CHUNKS + c->ranks - 1) / c->ranks * rank->model->chunk_tokens;
    cfg.dtype = c->mxfp8 ? MOK_MXFP8 : MOK_BF16;
    cfg.save = MOK_SAVE_ALL;
    cfg.backend = MOK_BACKEND_CPU;
    TRY(mok_workspace_create(rank->group, &cfg, &rank->workspace));
    TRY(mok_workspace_plan(rank->workspace, &plan));
    take_rank_memory(rank, &plan);
    if (rank->arena.failed)
        return MOK_E_MEMORY;
    return c->shared_intermediate ? lm_shared_open(rank) : MOK_OK;
}

void lm_rank_close(lm_rank *rank)
{
    lm_shared_close(rank);
    mok_workspace_destroy(rank->workspace);
    lm_arena_free(&rank->arena);
}

/* -------------------------------------------------------------------------------------------------------- forward -- */
static mok_weights expert_weights(const lm_layer *l)
{
    return (mok_weights){.gate = {.packed = l->bf16[LM_GATE]}, .up = {.packed = l->bf16[LM_UP]}, .down = {.packed = l->bf16[LM_DOWN]}};
}

static mok_status schedule_layer(lm_rank *rank, int64_t layer)
{
    const lm_config *c = &rank->model->cfg;
    lm_layer *l = &rank->layers[layer];
    mok_schedule_args s = MOK_INIT(mok_schedule_args);
    for (int64_t i = 0; i < rank->tokens * c->topk; i++)
        l->sent_ids[i] = c->drop_routes ? -1 : l->ids[i];
    s.layer = (uint64_t)layer;
    s.num_tokens = rank->tokens;
    s.expert_ids = l->sent_ids;
    s.schedule = l->schedule;
    s.tokens_per_expert_global = l->routes;
    return mok_schedule(rank->workspace, &s, NULL);
}

static mok_status forward_layer(lm_rank *rank, int64_t layer, bool gradients)
{
    const lm *model = rank->model;
    const lm_config *c = &model->cfg;
    const lm_dense *d = &model->dense;
    lm_layer *l = &rank->layers[layer];
    int64_t T = rank->tokens, rows = T * c->hidden;
    memcpy(l->x, rank->x, (size_t)rows * sizeof(float));
    lm_norm(T, c->hidden, l->x, model->value + d->norm + layer * d->norm_stride, l->normed, l->rrms);
    lm_route(T, c->hidden, c->experts, c->topk, l->normed, model->value + d->router + layer * d->router_stride, l->probs, l->ids, l->weights);
    lm_to_bf16(rows, l->normed, l->normed_bf16);
    TRY(schedule_layer(rank, layer));

    mok_forward_args f = MOK_INIT(mok_forward_args);
    f.layer = (uint64_t)layer;
    f.num_tokens = T;
    f.schedule = l->schedule;
    f.x = l->normed_bf16;
    f.router_weights = l->weights;
    f.weights = expert_weights(l);
    f.context = gradients ? l->context : NULL;
    f.out = l->out;
    TRY(mok_forward(rank->workspace, &f, NULL));
    TRY(mok_wait(rank->workspace));
    lm_add_bf16(rows, l->out, rank->x);
    if (c->shared_intermediate) {
        TRY(lm_shared_forward(rank, layer, gradients));
        lm_add_bf16(rows, l->shared_out, rank->x);
    }
    return MOK_OK;
}

/* Loss of every chunk and, if wanted, the gradients of head, bias and last norm: dx begins here. */
static void run_head(lm_rank *rank, bool gradients)
{
    lm *model = rank->model;
    const lm_config *c = &model->cfg;
    const lm_dense *d = &model->dense;
    int64_t tokens = model->chunk_tokens, H = c->hidden;
    const float *scale = model->value + d->norm + c->layers * d->norm_stride;
    lm_norm(rank->tokens, H, rank->x, scale, rank->normed, rank->head_rrms);
    for (int64_t i = 0; i < rank->num_chunks; i++) {
        int64_t chunk = rank->first_chunk + i, t = i * tokens;
        float *grad = model->chunk_grad + chunk * d->count;
        const uint8_t *targets = model->text + model->starts[chunk] + c->context;
        model->chunk_loss[chunk] = lm_head(tokens, H, rank->normed + t * H, model->value + d->head, model->value + d->bias, targets, rank->logits);
        if (!gradients)
            continue;
        lm_head_backward(tokens, H, rank->normed + t * H, rank->head_t, targets, 1.0f / (float)c->tokens, rank->logits, rank->dnormed + t * H,
                         grad + d->head, grad + d->bias);
        memset(rank->dx + t * H, 0, (size_t)(tokens * H) * sizeof(float));
        lm_norm_backward(tokens, H, rank->x + t * H, scale, rank->head_rrms + t, rank->dnormed + t * H, rank->dx + t * H,
                         grad + d->norm + c->layers * d->norm_stride);
    }
}

/* ------------------------------------------------------------------------------------------------------- backward -- */
static mok_status backward_experts(lm_rank *rank, int64_t layer)
{
    lm_layer *l = &rank->layers[layer];
    mok_backward_args b = MOK_INIT(mok_backward_args);
    lm_to_bf16(rank->tokens * rank->model->cfg.hidden, rank->dx, rank->dout);
    b.layer = (uint64_t)layer;
    b.num_tokens = rank->tokens;
    b.schedule = l->schedule;
    b.context = l->context;
    b.dout = rank->dout;
    b.x = l->normed_bf16;
    b.router_weights = l->weights;
    b.weights = expert_weights(l);
    b.dx = rank->dmoe;
    b.drouter_weights = l->dweights;
    b.grads.gate = (mok_grad){.packed = l->grad[LM_GATE], .dtype = MOK_FP32};
    b.grads.up = (mok_grad){.packed = l->grad[LM_UP], .dtype = MOK_FP32};
    b.grads.down = (mok_grad){.packed = l->grad[LM_DOWN], .dtype = MOK_FP32};
    TRY(mok_backward(rank->workspace, &b, NULL));
    return mok_wait(rank->workspace);
}

/* The load-balancing loss is balance * E * sum over e of (share of routes to e) * (mean probability of e); the shares, of all ranks,
 * count as constants. */
static void balance_gradient(lm_rank *rank, const lm_layer *l)
{
    const lm_config *c = &rank->model->cfg;
    double routes = (double)(c->tokens * c->topk);
    for (int64_t e = 0; e < c->experts; e++)
        rank->balance[e] = (float)(c->balance * (double)c->experts * ((double)l->routes[e] / routes) / (double)c->tokens);
}

static mok_status backward_layer(lm_rank *rank, int64_t layer)
{
    lm *model = rank->model;
    const lm_config *c = &model->cfg;
    const lm_dense *d = &model->dense;
    lm_layer *l = &rank->layers[layer];
    int64_t tokens = model->chunk_tokens, H = c->hidden, E = c->experts, K = c->topk;
    TRY(backward_experts(rank, layer));
    if (c->shared_intermediate)
        TRY(lm_shared_backward(rank, layer));
    balance_gradient(rank, l);
    for (int64_t i = 0; i < rank->num_chunks; i++) {
        int64_t t = i * tokens;
        float *grad = model->chunk_grad + (rank->first_chunk + i) * d->count, *dnormed = rank->dnormed + t * H;
        lm_route_backward(tokens, H, E, K, l->normed + t * H, rank->router_t + layer * E * H, l->probs + t * E, l->sent_ids + t * K,
                          l->weights + t * K, l->dweights + t * K, rank->balance, rank->scratch, dnormed, grad + d->router + layer * d->router_stride);
        lm_add_bf16(tokens * H, rank->dmoe + t * H, dnormed);
        if (c->shared_intermediate)
            lm_add_bf16(tokens * H, rank->dshared + t * H, dnormed);
        lm_norm_backward(tokens, H, l->x + t * H, model->value + d->norm + layer * d->norm_stride, l->rrms + t, dnormed, rank->dx + t * H,
                         grad + d->norm + layer * d->norm_stride);
    }
    return MOK_OK;
}

/* ----------------------------------------------------------------------------------------------------------- pass -- */
static void embed_chunks(lm_rank *rank, bool gradients)
{
    lm *model = rank->model;
    const lm_config *c = &model->cfg;
    for (int64_t i = 0; i < rank->num_chunks; i++) {
        int64_t chunk = rank->first_chunk + i, rows = i * model->chunk_tokens * c->hidden;
        const uint8_t *text = model->text + model->starts[chunk];
        float *grad = model->chunk_grad + chunk * model->dense.count;
        if (gradients)
            lm_embed_backward(model->chunk_tokens, c->hidden, c->context, text, rank->dx + rows, grad + model->dense.embedding);
        else
            lm_embed(model->chunk_tokens, c->hidden, c->context, text, model->value + model->dense.embedding, rank->x + rows);
    }
}

mok_status lm_rank_pass(lm_rank *rank, bool gradients)
{
    lm *model = rank->model;
    if (gradients)
        memset(model->chunk_grad + rank->first_chunk * model->dense.count, 0, (size_t)(rank->num_chunks * model->dense.count) * sizeof(float));
    embed_chunks(rank, false);
    for (int64_t layer = 0; layer < model->cfg.layers; layer++)
        TRY(forward_layer(rank, layer, gradients));
    run_head(rank, gradients);
    for (int64_t layer = model->cfg.layers - 1; layer >= 0 && gradients; layer--)
        TRY(backward_layer(rank, layer));
    if (gradients)
        embed_chunks(rank, true);
    return MOK_OK;
}
