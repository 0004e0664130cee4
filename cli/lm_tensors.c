/* Where the parameters lie, in which order they are listed, and what they are at first. None of it depends on the number of ranks. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layer.h"
#include "lm_rank.h"

struct lm_block { struct lm_block *next; void *memory; };

void *lm_take(lm_arena *arena, int64_t count, size_t size)
{
    struct lm_block *block = malloc(sizeof *block);
    size_t bytes = (size_t)(count > 0 ? count : 1) * size;
    void *memory = NULL;
    if (!block || posix_memalign(&memory, 256, bytes)) {
        free(block);
        arena->failed = true;
        return NULL;
    }
    *block = (struct lm_block){arena->blocks, memory};
    arena->blocks = block;
    return memset(memory, 0, bytes);
}

void lm_arena_free(lm_arena *arena)
{
    while (arena->blocks) {
        struct lm_block *block = arena->blocks;
        arena->blocks = block->next;
        free(block->memory);
        free(block);
    }
}

void lm_lay_out(lm *model)
{
    const lm_config *c = &model->cfg;
    lm_dense *d = &model->dense;
    int64_t shared = c->shared_intermediate * c->hidden;
    *d = (lm_dense){.norm_stride = c->hidden, .router_stride = c->hidden * c->experts, .shared_stride = 3 * shared,
                    .shared_gate = 0, .shared_up = shared, .shared_down = 2 * shared};
    d->norm = d->embedding + 256 * c->hidden;
    d->router = d->norm + (c->layers + 1) * d->norm_stride;
    d->head = d->router + c->layers * d->router_stride;
    d->bias = d->head + 256 * c->hidden;
    d->shared = d->bias + 256;
    d->count = d->shared + c->layers * d->shared_stride;
    model->value = lm_take(&model->arena, d->count, sizeof(float));
    model->grad = lm_take(&model->arena, d->count, sizeof(float));
    model->m = lm_take(&model->arena, d->count, sizeof(float));
    model->v = lm_take(&model->arena, d->count, sizeof(float));
    model->chunk_grad = lm_take(&model->arena, LM_CHUNKS * d->count, sizeof(float));
    model->block_squares = lm_take(&model->arena, (d->count + LM_SUM_BLOCK - 1) / LM_SUM_BLOCK, sizeof(double));
    model->num_tensors = 3 + c->layers + 1 + c->layers + (shared ? 3 * c->layers : 0) + LM_NUM_MATRICES * c->experts * c->layers;
    model->tensors = lm_take(&model->arena, model->num_tensors, sizeof(lm_tensor));
    model->expert_squares = lm_take(&model->arena, model->num_tensors, sizeof(double));
}

static void list_dense(lm *model, int64_t *n, const char *name, int64_t layer, int64_t at, int64_t count, bool decays)
{
    model->tensors[(*n)++] = (lm_tensor){.name = name, .layer = layer, .expert = -1, .count = count, .decays = decays, .value = model->value + at,
                                         .m = model->m + at, .v = model->v + at, .grad = model->grad + at};
}

static void list_expert(lm *model, int64_t *n, int64_t layer, int64_t expert)
{
    static const char *const names[LM_NUM_MATRICES] = {"gate", "up", "down"};
    int64_t count = model->cfg.intermediate * model->cfg.hidden;
    const lm_rank *owner = model->ranks;
    while (expert >= owner->first_expert + owner->num_experts)
        owner++;
    const lm_layer *l = &owner->layers[layer];
    int64_t at = (expert - owner->first_expert) * count;
    for (int i = 0; i < LM_NUM_MATRICES; i++)
        model->tensors[(*n)++] = (lm_tensor){.name = names[i], .layer = layer, .expert = expert, .count = count, .decays = true,
                                             .value = l->value[i] + at, .m = l->m[i] + at, .v = l->v[i] + at, .grad = l->grad[i] + at};
}

void lm_list_tensors(lm *model)
{
    const lm_config *c = &model->cfg;
    const lm_dense *d = &model->dense;
    int64_t n = 0, shared = c->shared_intermediate * c->hidden;
    list_dense(model, &n, "embedding", -1, d->embedding, 256 * c->hidden, false);
    list_dense(model, &n, "head", -1, d->head, 256 * c->hidden, true);
    list_dense(model, &n, "bias", -1, d->bias, 256, false);
    for (int64_t l = 0; l <= c->layers; l++)
        list_dense(model, &n, "norm", l, d->norm + l * d->norm_stride, c->hidden, false);
    for (int64_t l = 0; l < c->layers; l++)
        list_dense(model, &n, "router", l, d->router + l * d->router_stride, d->router_stride, true);
    for (int64_t l = 0; l < c->layers && shared; l++) {
        list_dense(model, &n, "shared_gate", l, d->shared + l * d->shared_stride + d->shared_gate, shared, true);
        list_dense(model, &n, "shared_up", l, d->shared + l * d->shared_stride + d->shared_up, shared, true);
        list_dense(model, &n, "shared_down", l, d->shared + l * d->shared_stride + d->shared_down, shared, true);
    }
    model->first_expert_tensor = n;
    for (int64_t l = 0; l < c->layers; l++)
        for (int64_t e = 0; e < c->experts; e++)
            list_expert(model, &n, l, e);
}

/* Standard deviation of a tensor's first values. The last matrix of a block is smaller, so that blocks begin near the identity. */
static double first_size(const lm_config *c, const char *name)
{
    double block = 1.0 / sqrt(2.0 * (double)c->layers);
    if (!strcmp(name, "embedding"))
        return 0.5;
    if (!strcmp(name, "bias"))
        return 0;
    if (!strcmp(name, "head"))
        return 0.2 / sqrt((double)c->hidden);
    if (!strcmp(name, "down"))
        return block / sqrt((double)c->intermediate);
    if (!strcmp(name, "shared_down"))
        return block / sqrt((double)c->shared_intermediate);
    return 1 / sqrt((double)c->hidden); /* router, gate, up */
}

void lm_first_values(lm *model)
{
    for (int64_t i = 0; i < model->num_tensors; i++) {
        const lm_tensor *t = &model->tensors[i];
        uint64_t state = model->cfg.seed ^ (uint64_t)(i + 1) << 32;
        double size = first_size(&model->cfg, t->name);
        bool norm = !strcmp(t->name, "norm");
        for (int64_t j = 0; j < t->count; j++)
            t->value[j] = norm ? 1 : size > 0 ? (float)(size * layer_normal(&state)) : 0;
    }
}

int64_t lm_chunk_bytes(const lm_config *c) { return c->context + c->tokens / LM_CHUNKS; }

void lm_random_starts(const lm_config *c, uint64_t step, int64_t size, int64_t starts[LM_CHUNKS])
{
    uint64_t state = c->seed * 0x9e3779b97f4a7c15ull + step;
    state = layer_random(&state);
    for (int i = 0; i < LM_CHUNKS; i++)
        starts[i] = (int64_t)(layer_random(&state) % (uint64_t)(size - lm_chunk_bytes(c) + 1));
}

void lm_even_starts(const lm_config *c, int64_t index, int64_t count, int64_t size, int64_t starts[LM_CHUNKS])
{
    int64_t last = size - lm_chunk_bytes(c), chunks = count * LM_CHUNKS;
    for (int i = 0; i < LM_CHUNKS; i++)
        starts[i] = last * (index * LM_CHUNKS + i) / (chunks - 1);
}
