/* What one rank hands to the library: its part of the problem in the backend's memory, in the layout and format that the options ask for. */
#include "layer_rank.h"

#include <stdlib.h>
#include <string.h>

/* --- memory of the backend -------------------------------------------------------------------------------------------- */
/* Where the backend finds `host`: there, or in a copy, made at the first call with it. A failure is kept in copy_status. */
static void *place(layer_rank *job, const void *host, int64_t bytes, bool comes_back)
{
    void *there = NULL;
    if (!job->on_device || !host)
        return (void *)(uintptr_t)host;
    for (int i = 0; i < job->num_copies; i++)
        if (job->copies[i].host == host)
            return job->copies[i].there;
    mok_status status = job->num_copies < MAX_COPIES ? mok_memory_alloc(job->w, (size_t)(bytes ? bytes : 1), &there) : MOK_E_BUG;
    if (status == MOK_OK) {
        job->copies[job->num_copies++] = (layer_copy){(void *)(uintptr_t)host, there, bytes, comes_back};
        if (bytes)
            status = mok_memory_copy(job->w, there, host, (size_t)bytes);
    }
    if (job->copy_status == MOK_OK)
        job->copy_status = status;
    return there;
}

static void *input(layer_rank *job, const void *host, int64_t bytes) { return place(job, host, bytes, false); }
static void *result(layer_rank *job, void *host, int64_t bytes) { return place(job, host, bytes, true); }

mok_status layer_rank_alloc_poisoned(mok_workspace *w, int64_t bytes, void **memory)
{
    enum { CHUNK = 1 << 20 };
    char *poison = malloc(CHUNK);
    mok_status status = poison ? mok_memory_alloc(w, (size_t)bytes, memory) : MOK_E_MEMORY;
    if (poison)
        memset(poison, 0xff, CHUNK);
    for (int64_t at = 0; at < bytes && status == MOK_OK; at += CHUNK)
        status = mok_memory_copy(w, (char *)*memory + at, poison, bytes - at < CHUNK ? (size_t)(bytes - at) : CHUNK);
    free(poison);
    return status;
}

void layer_rank_free(layer_rank *job)
{
    for (int i = 0; i < job->num_copies; i++)
        mok_memory_free(job->w, job->copies[i].there);
    for (int i = 0; i < 3; i++)
        free(job->mx[i]);
    for (int i = 0; i < 4; i++)
        free(job->pair[i]);
    for (int i = 0; i < NUM_TABLES; i++)
        free(job->tables[i]);
    free(job->router[0]);
    free(job->router[1]);
    mok_memory_free(job->w, job->schedule);
    mok_memory_free(job->w, job->context);
    mok_memory_free(job->w, job->wide[0]);
    mok_memory_free(job->w, job->wide[1]);
}

/* --- arguments -------------------------------------------------------------------------------------------------------- */
/* `base` + this rank's experts, as one pointer or as a table of pointers. */
static void *from_expert(const layer_rank *job, const void *base, int64_t element)
{
    const mok_config *c = &job->problem->cfg;
    return (char *)(uintptr_t)base + job->first_expert * c->intermediate * c->hidden * element;
}

/* Addresses of `count` matrices behind each other, in a table of the backend's memory; made once. No memory is kept in copy_status. */
static void **table(layer_rank *job, table_slot slot, void *base, int64_t count, int64_t bytes, bool is_grad)
{
    if (!job->tables[slot]) {
        void **entries = job->tables[slot] = malloc(sizeof(void *) * (size_t)(count + 1));
        for (int64_t e = 0; entries && e < count; e++)
            entries[e] = (char *)base + e * bytes;
        int64_t frozen = job->options->frozen_expert - 1 - job->first_expert;
        if (entries && is_grad && slot < TABLE_SHARED && frozen >= 0 && frozen < count)
            entries[frozen] = NULL;
        if (!entries)
            job->copy_status = MOK_E_MEMORY;
    }
    return input(job, job->tables[slot], count * (int64_t)sizeof(void *));
}

static int64_t routed_bytes(const layer_rank *job, int64_t element)
{
    return job->num_experts * job->problem->cfg.intermediate * job->problem->cfg.hidden * element;
}

/* This rank's experts of a [rows, cols] weight, in both quantisations. A failure is kept in copy_status. */
static mok_weight quantised_weight(layer_rank *job, int slot, const uint16_t *source, int64_t rows, int64_t cols)
{
    int64_t count = job->num_experts, elements = count * rows * cols, scales = count * mok_mx_scale_bytes(rows, cols), turned = count * mok_mx_scale_bytes(cols, rows);
    mok_mx_quantise_args a = MOK_INIT(mok_mx_quantise_args);
    uint8_t *memory = job->mx[slot];
    mok_status status = MOK_OK;
    if (!memory) {
        memory = job->mx[slot] = malloc((size_t)(2 * elements + scales + turned + 1));
        a.count = count;
        a.rows = rows;
        a.cols = cols;
        a.source = source;
        a.data = memory;
        a.scales = memory + elements;
        a.transposed = memory + elements + scales;
        a.transposed_scales = memory + 2 * elements + scales;
        status = memory ? mok_mx_quantise(&a, NULL) : MOK_E_MEMORY;
    }
    if (job->copy_status == MOK_OK)
        job->copy_status = status;
    if (!memory)
        return (mok_weight){.packed = NULL};
    return (mok_weight){.packed = input(job, memory, elements), .scales = input(job, memory + elements, scales),
                        .transposed = input(job, memory + elements + scales, elements),
                        .transposed_scales = input(job, memory + 2 * elements + scales, turned)};
}

/* Gate and up [count, width, H] into one matrix [count, 2 width, H] with the rows of cfg.gate_up, or out of it. */
static void move_pair(const mok_config *c, uint8_t *pair, char *gate, char *up, int64_t count, int64_t width, int64_t element, bool into)
{
    int64_t bytes = c->hidden * element;
    bool interleaved = c->gate_up == MOK_GATE_UP_INTERLEAVED;
    for (int64_t row = 0; row < count * width; row++) {
        uint8_t *first = pair + (row / width * 2 * width + (interleaved ? 2 : 1) * (row % width)) * bytes, *second = first + (interleaved ? 1 : width) * bytes;
        memcpy(into ? first : (uint8_t *)gate + row * bytes, into ? (uint8_t *)gate + row * bytes : first, (size_t)bytes);
        memcpy(into ? second : (uint8_t *)up + row * bytes, into ? (uint8_t *)up + row * bytes : second, (size_t)bytes);
    }
}

static bool in_pairs(const layer_rank *job) { return job->problem->cfg.gate_up != MOK_GATE_UP_SEPARATE; }

/* Where the backend finds a pair; no memory is kept in copy_status. */
static void *place_pair(layer_rank *job, int slot, const void *gate, const void *up, int64_t count, int64_t width, int64_t element, bool comes_back)
{
    const mok_config *c = &job->problem->cfg;
    int64_t bytes = 2 * count * width * c->hidden * element;
    if (!bytes)
        return NULL;
    if (!job->pair[slot]) {
        job->pair[slot] = malloc((size_t)bytes);
        if (job->pair[slot])
            move_pair(c, job->pair[slot], (char *)(uintptr_t)gate, (char *)(uintptr_t)up, count, width, element, true);
        else
            job->copy_status = MOK_E_MEMORY;
    }
    return place(job, job->pair[slot], bytes, comes_back);
}

/* Of `count` matrices in one piece of memory, told by its address or by one for each. */
static mok_weight weight_in(layer_rank *job, table_slot slot, void *memory, int64_t count, int64_t bytes)
{
    if (!memory || !job->options->experts_by_pointer)
        return (mok_weight){.packed = memory};
    return (mok_weight){.experts = (const void *const *)table(job, slot, memory, count, bytes, false)};
}

static mok_weight routed_weight(layer_rank *job, int slot, const uint16_t *base)
{
    const mok_config *c = &job->problem->cfg;
    if (c->dtype == MOK_MXFP8 && job->options->mx_prequantised)
        return quantised_weight(job, slot, from_expert(job, base, 2), slot == 2 ? c->hidden : c->intermediate, slot == 2 ? c->intermediate : c->hidden);
    return weight_in(job, (table_slot)slot, input(job, from_expert(job, base, 2), routed_bytes(job, 2)), job->num_experts, c->intermediate * c->hidden * 2);
}

static mok_weight shared_weight(layer_rank *job, table_slot slot, void *memory, int64_t bytes) { return weight_in(job, slot, memory, 1, bytes); }

static mok_grad grad_in(layer_rank *job, table_slot slot, void *memory, int64_t count, int64_t bytes)
{
    mok_grad g = {.dtype = job->options->grad_dtype, .accumulate = job->options->accumulate};
    if (memory && (job->options->experts_by_pointer || job->options->grads_by_pointer))
        g.experts = table(job, slot, memory, count, bytes, true);
    else
        g.packed = memory;
    return g;
}

static mok_grad routed_grad(layer_rank *job, table_slot slot, void *base)
{
    const mok_config *c = &job->problem->cfg;
    int64_t element = job->result->grad_bytes;
    return grad_in(job, slot, result(job, from_expert(job, base, element), routed_bytes(job, element)), job->num_experts, c->intermediate * c->hidden * element);
}

static mok_grad shared_grad(layer_rank *job, table_slot slot, void *base, int64_t elements)
{
    int64_t bytes = elements * job->result->grad_bytes;
    return grad_in(job, slot, elements ? result(job, (char *)base + job->rank * bytes, bytes) : NULL, 1, bytes);
}

/* Gate and up in one matrix; quantised, too, if they are combined. */
static mok_weight routed_pair(layer_rank *job)
{
    const layer_problem *p = job->problem;
    const mok_config *c = &p->cfg;
    void *pair = place_pair(job, 0, from_expert(job, p->gate, 2), from_expert(job, p->up, 2), job->num_experts, c->intermediate, 2, false);
    if (c->dtype == MOK_MXFP8 && job->options->mx_prequantised && c->gate_up == MOK_GATE_UP_COMBINED && job->copy_status == MOK_OK)
        return quantised_weight(job, 0, (const uint16_t *)job->pair[0], 2 * c->intermediate, c->hidden);
    return weight_in(job, TABLE_GATE, pair, job->num_experts, 2 * c->intermediate * c->hidden * 2);
}

static mok_weights weights_of(layer_rank *job)
{
    const layer_problem *p = job->problem;
    const mok_config *c = &p->cfg;
    int64_t shared = c->shared_intermediate * c->hidden * 2;
    mok_weights w = {.down = routed_weight(job, 2, p->down),
                     .shared_down = shared_weight(job, TABLE_SHARED_DOWN, input(job, p->shared_down, shared), shared),
                     .shared_output_gate = input(job, p->shared_output_gate, c->hidden * 2)};
    if (in_pairs(job)) {
        w.gate = routed_pair(job);
        w.shared_gate = shared_weight(job, TABLE_SHARED_GATE, place_pair(job, 1, p->shared_gate, p->shared_up, 1, c->shared_intermediate, 2, false), 2 * shared);
        return w;
    }
    w.gate = routed_weight(job, 0, p->gate);
    w.up = routed_weight(job, 1, p->up);
    w.shared_gate = shared_weight(job, TABLE_SHARED_GATE, input(job, p->shared_gate, shared), shared);
    w.shared_up = shared_weight(job, TABLE_SHARED_UP, input(job, p->shared_up, shared), shared);
    return w;
}

/* This rank's part of a result of the shared expert. */
static void *of_rank(const layer_rank *job, void *base)
{
    const mok_config *c = &job->problem->cfg;
    return (char *)base + job->rank * c->shared_intermediate * c->hidden * job->result->grad_bytes;
}

static mok_grad routed_pair_grad(layer_rank *job, void *gate, void *up)
{
    const mok_config *c = &job->problem->cfg;
    int64_t element = job->result->grad_bytes;
    return grad_in(job, TABLE_DGATE, place_pair(job, 2, gate, up, job->num_experts, c->intermediate, element, true), job->num_experts,
                   2 * c->intermediate * c->hidden * element);
}

static mok_grad shared_pair_grad(layer_rank *job, void *gate, void *up)
{
    const mok_config *c = &job->problem->cfg;
    int64_t element = job->result->grad_bytes;
    return grad_in(job, TABLE_SHARED_DGATE, place_pair(job, 3, gate, up, 1, c->shared_intermediate, element, true), 1, 2 * c->shared_intermediate * c->hidden * element);
}

static void split_pair_grads(const layer_rank *job)
{
    const mok_config *c = &job->problem->cfg;
    const layer_result *r = job->result;
    if (job->pair[2])
        move_pair(c, job->pair[2], from_expert(job, r->dgate, r->grad_bytes), from_expert(job, r->dup, r->grad_bytes), job->num_experts, c->intermediate,
                  r->grad_bytes, false);
    if (job->pair[3])
        move_pair(c, job->pair[3], of_rank(job, r->dshared_gate), of_rank(job, r->dshared_up), 1, c->shared_intermediate, r->grad_bytes, false);
}

static mok_grad output_gate_grad(layer_rank *job)
{
    const mok_config *c = &job->problem->cfg;
    int64_t bytes = c->hidden * job->result->grad_bytes;
    return (mok_grad){.packed = c->shared_gate ? result(job, (char *)job->result->dshared_output_gate + job->rank * bytes, bytes) : NULL,
                      .dtype = job->options->grad_dtype, .accumulate = job->options->accumulate};
}

static mok_grads grads_of(layer_rank *job)
{
    const mok_config *c = &job->problem->cfg;
    layer_result *r = job->result;
    int64_t shared = c->shared_intermediate * c->hidden, element = r->grad_bytes;
    if (in_pairs(job))
        return (mok_grads){.gate = routed_pair_grad(job, from_expert(job, r->dgate, element), from_expert(job, r->dup, element)),
                           .down = routed_grad(job, TABLE_DDOWN, r->ddown),
                           .shared_gate = shared_pair_grad(job, of_rank(job, r->dshared_gate), of_rank(job, r->dshared_up)),
                           .shared_down = shared_grad(job, TABLE_SHARED_DDOWN, r->dshared_down, shared),
                           .shared_output_gate = output_gate_grad(job)};
    return (mok_grads){.gate = routed_grad(job, TABLE_DGATE, r->dgate), .up = routed_grad(job, TABLE_DUP, r->dup), .down = routed_grad(job, TABLE_DDOWN, r->ddown),
                       .shared_gate = shared_grad(job, TABLE_SHARED_DGATE, r->dshared_gate, shared),
                       .shared_up = shared_grad(job, TABLE_SHARED_DUP, r->dshared_up, shared),
                       .shared_down = shared_grad(job, TABLE_SHARED_DDOWN, r->dshared_down, shared), .shared_output_gate = output_gate_grad(job)};
}

/* Router weights (slot 0) or their gradients (1) of this rank, in the configuration's format. No memory is kept in copy_status. */
static void *place_router(layer_rank *job, int slot, float *all)
{
    float *mine = all + job->first_token * job->problem->cfg.topk;
    int64_t n = job->num_tokens * job->problem->cfg.topk;
    if (job->problem->cfg.router_dtype != MOK_BF16)
        return place(job, mine, n * 4, slot == 1);
    if (!job->router[slot]) {
        job->router[slot] = malloc((size_t)(2 * n + 2));
        for (int64_t i = 0; i < n && job->router[slot]; i++)
            job->router[slot][i] = layer_bf16(mine[i]);
        if (!job->router[slot])
            job->copy_status = MOK_E_MEMORY;
    }
    return place(job, job->router[slot], n * 2, slot == 1);
}

static void widen_router_grads(const layer_rank *job)
{
    int64_t topk = job->problem->cfg.topk;
    for (int64_t i = 0; i < job->num_tokens * topk && job->router[1]; i++)
        job->result->drouter_weights[job->first_token * topk + i] = layer_float(job->router[1][i]);
}

mok_schedule_args layer_rank_schedule(layer_rank *job)
{
    const layer_problem *p = job->problem;
    int64_t topk = p->cfg.topk;
    mok_schedule_args s = MOK_INIT(mok_schedule_args);
    s.num_tokens = job->num_tokens;
    s.expert_ids = input(job, p->expert_ids + job->first_token * topk, job->num_tokens * topk * 4);
    s.schedule = job->schedule;
    s.tokens_per_expert_global = job->rank == 0 ? result(job, job->result->tokens_per_expert, p->cfg.num_experts * 8) : NULL;
    return s;
}

mok_forward_args layer_rank_forward(layer_rank *job)
{
    const layer_problem *p = job->problem;
    int64_t hidden = p->cfg.hidden, t = job->first_token, n = job->num_tokens;
    mok_forward_args f = MOK_INIT(mok_forward_args);
    f.num_tokens = n;
    f.schedule = job->schedule;
    f.x = input(job, p->x + t * hidden, n * hidden * 2);
    f.router_weights = place_router(job, 0, p->router_weights);
    f.weights = weights_of(job);
    f.context = job->options->forward_only || job->options->recompute ? NULL : job->context;
    f.out = result(job, job->result->out + t * hidden, n * hidden * 2);
    return f;
}

mok_backward_args layer_rank_backward(layer_rank *job, const mok_forward_args *f)
{
    const layer_problem *p = job->problem;
    int64_t hidden = p->cfg.hidden, t = job->first_token, n = job->num_tokens;
    mok_backward_args b = MOK_INIT(mok_backward_args);
    b.num_tokens = n;
    b.schedule = job->schedule;
    b.context = job->context;
    b.dout = input(job, p->dout + t * hidden, n * hidden * 2);
    b.x = f->x;
    b.router_weights = f->router_weights;
    b.weights = f->weights;
    b.dx = result(job, job->result->dx + t * hidden, n * hidden * 2);
    b.drouter_weights = place_router(job, 1, job->result->drouter_weights);
    b.grads = grads_of(job);
    if (job->options->ready_value) {
        b.grads.ready = result(job, job->result->ready + job->first_expert, job->num_experts * 4);
        b.grads.ready_value = job->options->ready_value;
    }
    return b;
}

mok_status layer_rank_widen(layer_rank *job, mok_forward_args *f, mok_backward_args *b)
{
    mok_mx_widen_args a = MOK_INIT(mok_mx_widen_args);
    if (!job->wide[0])
        return MOK_OK;
    a.weights = f->weights;
    a.wide = job->wide[0];
    a.wide_dgrad = job->wide[1];
    TRY(mok_mx_widen(job->w, &a, NULL));
    f->wide = b->wide = job->wide[0];
    b->wide_dgrad = job->wide[1];
    f->weights.gate = f->weights.up = f->weights.down = b->weights.gate = b->weights.up = b->weights.down = (mok_weight){.packed = NULL};
    return MOK_OK;
}

mok_status layer_rank_bring_back(layer_rank *job)
{
    for (int i = 0; i < job->num_copies; i++)
        if (job->copies[i].comes_back && job->copies[i].bytes)
            TRY(mok_memory_copy(job->w, job->copies[i].host, job->copies[i].there, (size_t)job->copies[i].bytes));
    split_pair_grads(job);
    widen_router_grads(job);
    return MOK_OK;
}
