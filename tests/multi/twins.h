/* Arrays of the host in the backend's memory, and back: for tests that call the public functions on a GPU or the emulator. */
#ifndef MOK_TEST_TWINS_H
#define MOK_TEST_TWINS_H
#include "ranks.h"

typedef struct twins {
    mok_workspace *w;
    struct { void *device, *host; size_t bytes; } at[40];
    int count;
} twins;

/* The device's twin of a host array of which this rank has `bytes`, filled from it. */
static inline void *twin(twins *a, const void *host, size_t bytes)
{
    void *device = NULL;
    if (mok_memory_alloc(a->w, bytes ? bytes : 1, &device) != MOK_OK || mok_memory_copy(a->w, device, host, bytes) != MOK_OK)
        TEST_FAILED("%s", mok_last_error());
    a->at[a->count].device = device;
    a->at[a->count].host = (void *)(uintptr_t)host; /* an output's is written */
    a->at[a->count++].bytes = bytes;
    return device;
}

/* Outputs are the arrays from `first` on. */
static inline void twins_fetch(twins *a, int first)
{
    for (int i = first; i < a->count; i++)
        CHECK_EQ(mok_memory_copy(a->w, a->at[i].host, a->at[i].device, a->at[i].bytes), MOK_OK);
}

static inline void twins_drop(twins *a)
{
    for (int i = 0; i < a->count; i++)
        mok_memory_free(a->w, a->at[i].device);
}

/* All arguments of a rank's schedule, forward and backward, in the backend's memory. Outputs are the arrays from `outputs` on. */
typedef struct twins_layer {
    twins a;
    int outputs;
    void *schedule_memory, *context;
    mok_schedule_args schedule;
    mok_forward_args forward;
    mok_backward_args backward;
} twins_layer;

static inline void twins_layer_make(twins_layer *t, const ranks_env *e, const layer_problem *p, layer_result *r)
{
    ranks_part part = ranks_part_of(e, p->tokens, NULL);
    size_t rows = (size_t)(part.tokens * p->cfg.hidden) * 2, routes = (size_t)(part.tokens * p->cfg.topk) * 4;
    size_t matrix = (size_t)(e->plan.experts_count * p->cfg.intermediate * p->cfg.hidden) * 2;
    memset(t, 0, sizeof *t);
    t->a.w = e->w;
    if (mok_memory_alloc(e->w, (size_t)e->plan.schedule_bytes, &t->schedule_memory) != MOK_OK || mok_memory_alloc(e->w, (size_t)e->plan.context_bytes, &t->context) != MOK_OK)
        TEST_FAILED("%s", mok_last_error());
    t->schedule = ranks_schedule_args(p, part, t->schedule_memory);
    t->forward = ranks_forward_args(e, p, part, t->schedule_memory, t->context, r);
    t->backward = ranks_backward_args(e, p, part, t->schedule_memory, t->context, r);
    mok_forward_args *f = &t->forward;
    mok_backward_args *b = &t->backward;
    t->schedule.expert_ids = (const int32_t *)twin(&t->a, t->schedule.expert_ids, routes);
    b->x = f->x = twin(&t->a, f->x, rows);
    b->dout = twin(&t->a, b->dout, rows);
    b->router_weights = f->router_weights = twin(&t->a, f->router_weights, routes);
    f->weights.gate.packed = twin(&t->a, f->weights.gate.packed, matrix);
    f->weights.up.packed = twin(&t->a, f->weights.up.packed, matrix);
    f->weights.down.packed = twin(&t->a, f->weights.down.packed, matrix);
    b->weights = f->weights;
    t->outputs = t->a.count;
    f->out = twin(&t->a, f->out, rows);
    b->dx = twin(&t->a, b->dx, rows);
    b->drouter_weights = twin(&t->a, b->drouter_weights, routes);
    b->grads.gate.packed = twin(&t->a, b->grads.gate.packed, matrix);
    b->grads.up.packed = twin(&t->a, b->grads.up.packed, matrix);
    b->grads.down.packed = twin(&t->a, b->grads.down.packed, matrix);
}

static inline void twins_layer_free(twins_layer *t)
{
    mok_memory_free(t->a.w, t->schedule_memory);
    mok_memory_free(t->a.w, t->context);
    twins_drop(&t->a);
}
#endif
