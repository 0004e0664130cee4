#include "layer.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* --- data ------------------------------------------------------------------------------------------------------------ */
uint64_t layer_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static double uniform(uint64_t *state) { return (double)(layer_random(state) >> 11) * 0x1p-53; }

double layer_normal(uint64_t *state)
{
    double u = 1.0 - uniform(state), v = uniform(state);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

uint16_t layer_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float layer_float(uint16_t value)
{
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

static uint16_t *random_matrix(int64_t elements, double scale, uint64_t *state)
{
    uint16_t *m = malloc(sizeof *m * (size_t)(elements ? elements : 1));
    /* Normal deviates are drawn in a pool, then picked: fast enough for large layers, and no two runs alike. */
    enum { POOL = 8192 };
    uint16_t pool[POOL];
    for (int64_t i = 0; i < POOL; i++)
        pool[i] = layer_bf16((float)(layer_normal(state) * scale));
    for (int64_t i = 0; m && i < elements; i++)
        m[i] = pool[layer_random(state) % POOL];
    return m;
}

static void draw_routes(layer_problem *p, layer_routing routing, double dropped, uint64_t *state)
{
    int64_t topk = p->cfg.topk, experts = p->cfg.num_experts;
    for (int64_t t = 0; t < p->tokens; t++) {
        int32_t *ids = p->expert_ids + t * topk;
        float *weights = p->router_weights + t * topk;
        float sum = 0;
        for (int64_t k = 0; k < topk; k++) {
            bool again = true;
            while (again) {
                ids[k] = routing == LAYER_ONE_EXPERT ? 0 : (int32_t)(layer_random(state) % (uint64_t)experts);
                again = false;
                for (int64_t j = 0; j < k && routing == LAYER_DISTINCT; j++)
                    again |= ids[j] == ids[k];
            }
            weights[k] = (float)exp(layer_normal(state));
            sum += weights[k];
        }
        for (int64_t k = 0; k < topk; k++) {
            weights[k] /= sum;
            if (uniform(state) < dropped)
                ids[k] = -1;
        }
    }
}

bool layer_make(layer_problem *p, const mok_config *cfg, int64_t tokens, layer_routing routing, double dropped, uint64_t seed)
{
    int64_t hidden = cfg->hidden, width = cfg->intermediate, shared = cfg->shared_intermediate, experts = cfg->num_experts;
    uint64_t state = seed;
    memset(p, 0, sizeof *p);
    p->cfg = *cfg;
    p->tokens = tokens;
    p->x = random_matrix(tokens * hidden, 1.0, &state);
    p->dout = random_matrix(tokens * hidden, 1.0, &state);
    p->gate = random_matrix(experts * width * hidden, 1.0 / sqrt((double)hidden), &state);
    p->up = random_matrix(experts * width * hidden, 1.0 / sqrt((double)hidden), &state);
    p->down = random_matrix(experts * width * hidden, 1.0 / sqrt((double)width), &state);
    p->shared_gate = random_matrix(shared * hidden, 1.0 / sqrt((double)hidden), &state);
    p->shared_up = random_matrix(shared * hidden, 1.0 / sqrt((double)hidden), &state);
    p->shared_down = random_matrix(shared * hidden, 1.0 / sqrt((double)(shared ? shared : 1)), &state);
    p->shared_output_gate = random_matrix(hidden, 1.0 / sqrt((double)hidden), &state);
    p->router_weights = malloc(sizeof(float) * (size_t)(tokens * cfg->topk + 1));
    p->expert_ids = malloc(sizeof(int32_t) * (size_t)(tokens * cfg->topk + 1));
    if (!p->x || !p->dout || !p->gate || !p->up || !p->down || !p->shared_gate || !p->shared_up || !p->shared_down || !p->shared_output_gate ||
        !p->router_weights || !p->expert_ids) {
        layer_free(p);
        return false;
    }
    draw_routes(p, routing, dropped, &state);
    return true;
}

void layer_free(layer_problem *p)
{
    void *all[] = {p->x, p->dout, p->router_weights, p->expert_ids, p->gate, p->up, p->down, p->shared_gate, p->shared_up, p->shared_down, p->shared_output_gate};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    memset(p, 0, sizeof *p);
}

static void *poisoned(int64_t bytes)
{
    void *m = malloc((size_t)(bytes ? bytes : 1));
    if (m)
        memset(m, 0xff, (size_t)bytes);
    return m;
}

bool layer_result_make(layer_result *r, const layer_problem *p, const layer_options *o)
{
    const mok_config *c = &p->cfg;
    int64_t n = p->tokens, routed = c->num_experts * c->intermediate * c->hidden, shared = c->shared_intermediate * c->hidden, ranks = o->ranks;
    memset(r, 0, sizeof *r);
    int64_t element = r->grad_bytes = o->grad_dtype == MOK_FP32 ? 4 : 2;
    r->ranks = o->ranks;
    r->forward_only = o->forward_only;
    r->out = poisoned(n * c->hidden * 2);
    r->dx = poisoned(n * c->hidden * 2);
    r->drouter_weights = poisoned(n * c->topk * 4);
    r->dgate = poisoned(routed * element);
    r->dup = poisoned(routed * element);
    r->ddown = poisoned(routed * element);
    r->dshared_gate = poisoned(ranks * shared * element);
    r->dshared_up = poisoned(ranks * shared * element);
    r->dshared_down = poisoned(ranks * shared * element);
    r->dshared_output_gate = poisoned(ranks * c->hidden * element);
    r->ready = poisoned(c->num_experts * 4);
    r->tokens_per_expert = poisoned(c->num_experts * 8);
    r->stats = calloc((size_t)ranks, sizeof *r->stats);
    r->info = calloc((size_t)ranks, sizeof *r->info);
    if (r->out && r->dx && r->drouter_weights && r->dgate && r->dup && r->ddown && r->dshared_gate && r->dshared_up && r->dshared_down &&
        r->dshared_output_gate && r->ready && r->tokens_per_expert && r->stats && r->info)
        return true;
    layer_result_free(r);
    return false;
}

void layer_result_free(layer_result *r)
{
    void *all[] = {r->out, r->dx, r->drouter_weights, r->dgate, r->dup, r->ddown, r->dshared_gate, r->dshared_up, r->dshared_down,
                   r->dshared_output_gate, r->ready, r->tokens_per_expert, r->stats, r->info};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    memset(r, 0, sizeof *r);
}

/* --- ranks ----------------------------------------------------------------------------------------------------------- */
/* A host array and its copy in the backend's memory. */
typedef struct layer_copy {
    void *host, *there;
    int64_t bytes;
    bool comes_back;
} layer_copy;
enum { MAX_COPIES = 48 };

typedef struct rank_job {
    const layer_problem *problem;
    const layer_options *options;
    layer_result *result;
    mok_group *group;
    int32_t rank;
    int64_t first_token, num_tokens, max_tokens;
    int64_t first_expert, num_experts;
    mok_workspace *w;
    bool on_device;    /* the backend does not address host memory */
    layer_copy copies[MAX_COPIES];
    int num_copies;
    mok_status copy_status; /* the first copy that failed */
    void *schedule, *context;
    void **tables[12]; /* pointer tables of weights and gradients */
    uint8_t *pair[4];  /* unless gate and up are separate: weights and gradients of both in one matrix, routed, then shared; made once */
    uint16_t *router[2]; /* router weights and their gradients in bf16, if they are to be; made once */
    uint8_t *mx[3];    /* gate, up, down: elements, scales, transposed elements, transposed scales behind each other; made once */
    mok_status status;
    char error[512];
} rank_job;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#define TRY(call)                       \
    do {                                \
        mok_status try_status = (call); \
        if (try_status != MOK_OK)       \
            return try_status;          \
    } while (0)

/* --- memory of the backend -------------------------------------------------------------------------------------------- */
/* Where the backend finds `host`: there, or in a copy, made at the first call with it. A failure is kept in copy_status. */
static void *place(rank_job *job, const void *host, int64_t bytes, bool comes_back)
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

static void *input(rank_job *job, const void *host, int64_t bytes) { return place(job, host, bytes, false); }
static void *result(rank_job *job, void *host, int64_t bytes) { return place(job, host, bytes, true); }

static mok_status bring_back(rank_job *job)
{
    for (int i = 0; i < job->num_copies; i++)
        if (job->copies[i].comes_back && job->copies[i].bytes)
            TRY(mok_memory_copy(job->w, job->copies[i].host, job->copies[i].there, (size_t)job->copies[i].bytes));
    return MOK_OK;
}

static mok_status alloc_poisoned(mok_workspace *w, int64_t bytes, void **memory)
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

static void free_memory(rank_job *job)
{
    for (int i = 0; i < job->num_copies; i++)
        mok_memory_free(job->w, job->copies[i].there);
    for (int i = 0; i < 3; i++)
        free(job->mx[i]);
    for (int i = 0; i < 4; i++)
        free(job->pair[i]);
    free(job->router[0]);
    free(job->router[1]);
    mok_memory_free(job->w, job->schedule);
    mok_memory_free(job->w, job->context);
}

/* --- arguments -------------------------------------------------------------------------------------------------------- */
/* `base` + this rank's experts, as one pointer or as a table of pointers. */
static void *from_expert(const rank_job *job, const void *base, int64_t element)
{
    const mok_config *c = &job->problem->cfg;
    return (char *)(uintptr_t)base + job->first_expert * c->intermediate * c->hidden * element;
}

static void **expert_table(rank_job *job, int slot, void *base, int64_t element)
{
    const mok_config *c = &job->problem->cfg;
    void **table = job->tables[slot] = malloc(sizeof(void *) * (size_t)(job->num_experts + 1));
    for (int64_t e = 0; table && e < job->num_experts; e++)
        table[e] = (char *)base + e * c->intermediate * c->hidden * element;
    return table;
}

static int64_t routed_bytes(const rank_job *job, int64_t element)
{
    return job->num_experts * job->problem->cfg.intermediate * job->problem->cfg.hidden * element;
}

/* This rank's experts of a [rows, cols] weight, in both quantisations. A failure is kept in copy_status. */
static mok_weight quantised_weight(rank_job *job, int slot, const uint16_t *base, int64_t rows, int64_t cols)
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
        a.source = from_expert(job, base, 2);
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

static bool in_pairs(const rank_job *job) { return job->problem->cfg.gate_up != MOK_GATE_UP_SEPARATE && !job->options->experts_by_pointer; }

/* Where the backend finds a pair; no memory is kept in copy_status. */
static void *place_pair(rank_job *job, int slot, const void *gate, const void *up, int64_t count, int64_t width, int64_t element, bool comes_back)
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

static mok_weight routed_weight(rank_job *job, int slot, const uint16_t *base)
{
    const mok_config *c = &job->problem->cfg;
    if (c->dtype == MOK_MXFP8 && job->options->mx_prequantised)
        return quantised_weight(job, slot, base, slot == 2 ? c->hidden : c->intermediate, slot == 2 ? c->intermediate : c->hidden);
    void *mine = input(job, from_expert(job, base, 2), routed_bytes(job, 2));
    if (!job->options->experts_by_pointer)
        return (mok_weight){.packed = mine};
    return (mok_weight){.experts = (const void *const *)expert_table(job, slot, mine, 2)};
}

static mok_grad routed_grad(rank_job *job, int slot, void *base)
{
    void *mine = result(job, from_expert(job, base, job->result->grad_bytes), routed_bytes(job, job->result->grad_bytes));
    mok_grad g = {.dtype = job->options->grad_dtype, .accumulate = job->options->accumulate};
    if (job->options->experts_by_pointer)
        g.experts = expert_table(job, slot, mine, job->result->grad_bytes);
    else
        g.packed = mine;
    return g;
}

static mok_grad shared_grad(rank_job *job, void *base, int64_t elements)
{
    int64_t bytes = elements * job->result->grad_bytes;
    return (mok_grad){.packed = elements ? result(job, (char *)base + job->rank * bytes, bytes) : NULL,
                      .dtype = job->options->grad_dtype, .accumulate = job->options->accumulate};
}

static mok_weights weights_of(rank_job *job)
{
    const layer_problem *p = job->problem;
    int64_t shared = p->cfg.shared_intermediate * p->cfg.hidden * 2;
    if (in_pairs(job))
        return (mok_weights){.gate = {.packed = place_pair(job, 0, from_expert(job, p->gate, 2), from_expert(job, p->up, 2), job->num_experts, p->cfg.intermediate, 2, false)},
                             .down = routed_weight(job, 2, p->down),
                             .shared_gate = {.packed = place_pair(job, 1, p->shared_gate, p->shared_up, 1, p->cfg.shared_intermediate, 2, false)},
                             .shared_down = {.packed = input(job, p->shared_down, shared)},
                             .shared_output_gate = input(job, p->shared_output_gate, p->cfg.hidden * 2)};
    return (mok_weights){.gate = routed_weight(job, 0, p->gate), .up = routed_weight(job, 1, p->up), .down = routed_weight(job, 2, p->down),
                         .shared_gate = {.packed = input(job, p->shared_gate, shared)}, .shared_up = {.packed = input(job, p->shared_up, shared)},
                         .shared_down = {.packed = input(job, p->shared_down, shared)},
                         .shared_output_gate = input(job, p->shared_output_gate, p->cfg.hidden * 2)};
}

/* This rank's part of a result of the shared expert. */
static void *of_rank(const rank_job *job, void *base)
{
    const mok_config *c = &job->problem->cfg;
    return (char *)base + job->rank * c->shared_intermediate * c->hidden * job->result->grad_bytes;
}

static mok_grad pair_grad(rank_job *job, int slot, void *gate, void *up, int64_t count, int64_t width)
{
    return (mok_grad){.packed = place_pair(job, slot, gate, up, count, width, job->result->grad_bytes, true), .dtype = job->options->grad_dtype,
                      .accumulate = job->options->accumulate};
}

static void split_pair_grads(const rank_job *job)
{
    const mok_config *c = &job->problem->cfg;
    const layer_result *r = job->result;
    if (job->pair[2])
        move_pair(c, job->pair[2], from_expert(job, r->dgate, r->grad_bytes), from_expert(job, r->dup, r->grad_bytes), job->num_experts, c->intermediate,
                  r->grad_bytes, false);
    if (job->pair[3])
        move_pair(c, job->pair[3], of_rank(job, r->dshared_gate), of_rank(job, r->dshared_up), 1, c->shared_intermediate, r->grad_bytes, false);
}

static mok_grads grads_of(rank_job *job)
{
    const mok_config *c = &job->problem->cfg;
    layer_result *r = job->result;
    int64_t shared = c->shared_intermediate * c->hidden, element = r->grad_bytes;
    if (in_pairs(job))
        return (mok_grads){.gate = pair_grad(job, 2, from_expert(job, r->dgate, element), from_expert(job, r->dup, element), job->num_experts, c->intermediate),
                           .down = routed_grad(job, 5, r->ddown),
                           .shared_gate = pair_grad(job, 3, of_rank(job, r->dshared_gate), of_rank(job, r->dshared_up), 1, c->shared_intermediate),
                           .shared_down = shared_grad(job, r->dshared_down, shared),
                           .shared_output_gate = shared_grad(job, r->dshared_output_gate, c->shared_gate ? c->hidden : 0)};
    return (mok_grads){.gate = routed_grad(job, 3, r->dgate), .up = routed_grad(job, 4, r->dup), .down = routed_grad(job, 5, r->ddown),
                       .shared_gate = shared_grad(job, r->dshared_gate, shared), .shared_up = shared_grad(job, r->dshared_up, shared),
                       .shared_down = shared_grad(job, r->dshared_down, shared),
                       .shared_output_gate = shared_grad(job, r->dshared_output_gate, c->shared_gate ? c->hidden : 0)};
}

/* Router weights (slot 0) or their gradients (1) of this rank, in the configuration's format. No memory is kept in copy_status. */
static void *place_router(rank_job *job, int slot, float *all)
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

static void widen_router_grads(const rank_job *job)
{
    int64_t topk = job->problem->cfg.topk;
    for (int64_t i = 0; i < job->num_tokens * topk && job->router[1]; i++)
        job->result->drouter_weights[job->first_token * topk + i] = layer_float(job->router[1][i]);
}

static mok_schedule_args schedule_args(rank_job *job)
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

static mok_forward_args forward_args(rank_job *job)
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

static mok_backward_args backward_args(rank_job *job, const mok_forward_args *f)
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

static mok_status run_backward(const rank_job *job, mok_workspace *w, mok_backward_args *b)
{
    if (!job->options->two_call_backward)
        return mok_backward(w, b, NULL);
    b->parts = MOK_BACKWARD_DATA;
    TRY(mok_backward(w, b, NULL));
    b->parts = MOK_BACKWARD_WEIGHTS;
    b->dx = b->drouter_weights = NULL;
    return mok_backward(w, b, NULL);
}

static void free_tables(rank_job *job)
{
    for (int i = 0; i < 12; i++) {
        free(job->tables[i]);
        job->tables[i] = NULL;
    }
}

static mok_status run_pass(rank_job *job, mok_workspace *w)
{
    const layer_options *o = job->options;
    layer_result *r = job->result;
    /* Copies to the device are made here, outside the measured times. */
    mok_schedule_args s = schedule_args(job);
    mok_forward_args f = forward_args(job);
    mok_backward_args b = o->forward_only ? (mok_backward_args)MOK_INIT(mok_backward_args) : backward_args(job, &f);
    TRY(job->copy_status);
    double start = seconds();
    TRY(mok_schedule(w, &s, NULL));
    TRY(mok_wait(w));
    double scheduled = seconds();
    TRY(mok_forward(w, &f, NULL));
    TRY(mok_wait(w));
    double forwarded = seconds();
    if (o->recompute) {
        f.context = job->context;
        TRY(mok_recompute(w, &f, NULL));
    }
    if (!o->forward_only)
        TRY(run_backward(job, w, &b));
    TRY(mok_wait(w));
    if (job->rank == 0) {
        r->seconds_schedule = scheduled - start;
        r->seconds_forward = forwarded - scheduled;
        r->seconds_backward = seconds() - forwarded;
    }
    return MOK_OK;
}

static mok_status run_workspace(rank_job *job, mok_workspace *w)
{
    const layer_options *o = job->options;
    mok_plan plan = MOK_INIT(mok_plan);
    mok_config resolved = MOK_INIT(mok_config);
    TRY(mok_workspace_plan(w, &plan));
    TRY(mok_workspace_config(w, &resolved));
    job->w = w;
    job->on_device = resolved.backend == MOK_BACKEND_CUDA;
    TRY(alloc_poisoned(w, plan.schedule_bytes, &job->schedule));
    TRY(alloc_poisoned(w, plan.context_bytes, &job->context));
    for (int64_t i = 0; i < (o->repeat ? o->repeat : 1); i++) {
        if (o->before_pass)
            o->before_pass(w, o->user);
        mok_status status = run_pass(job, w);
        free_tables(job);
        TRY(status);
        if (o->after_pass)
            o->after_pass(w, o->user);
    }
    TRY(bring_back(job));
    split_pair_grads(job);
    widen_router_grads(job);
    job->result->stats[job->rank] = MOK_INIT(mok_stats);
    job->result->info[job->rank] = MOK_INIT(mok_schedule_info);
    if (job->rank == 0)
        job->result->config = resolved;
    TRY(mok_get_stats(w, &job->result->stats[job->rank]));
    return mok_schedule_query(w, job->schedule, &job->result->info[job->rank]);
}

static void *rank_main(void *argument)
{
    rank_job *job = argument;
    const layer_options *o = job->options;
    mok_config cfg = job->problem->cfg;
    mok_workspace *w = NULL;
    cfg.struct_size = (uint32_t)sizeof cfg;
    cfg.api_version = MOK_API_VERSION;
    cfg.max_tokens = job->max_tokens;
    cfg.ring_rows = o->ring_rows;
    cfg.minibatch_rows = o->minibatch_rows;
    cfg.minibatch_rows_bwd = o->minibatch_rows_bwd;
    cfg.save = o->save;
    cfg.save_rows = o->save_rows;
    cfg.cpu_threads = o->cpu_threads;
    cfg.backend = o->backend;
    if (mok_expert_range(cfg.num_experts, o->ranks, job->rank, &job->first_expert, &job->num_experts) == MOK_OK)
        job->status = mok_workspace_create(job->group, &cfg, &w);
    else
        job->status = mok_workspace_create(job->group, NULL, &w); /* tells the others */
    if (job->status == MOK_OK)
        job->status = run_workspace(job, w);
    if (job->status != MOK_OK)
        snprintf(job->error, sizeof job->error, "%s", mok_last_error());
    if (w)
        free_memory(job);
    mok_workspace_destroy(w);
    return NULL;
}

static mok_status run_ranks(rank_job *jobs, int32_t ranks, char error[512])
{
    pthread_t *threads = calloc((size_t)(uint32_t)ranks, sizeof *threads);
    mok_status status = threads ? MOK_OK : MOK_E_MEMORY;
    int32_t started = 0;
    while (threads && started < ranks && pthread_create(&threads[started], NULL, rank_main, &jobs[started]) == 0)
        started++;
    for (int32_t r = 0; r < started; r++)
        pthread_join(threads[r], NULL);
    if (threads && started < ranks) {
        snprintf(error, 512, "only %d of %d threads could be started", started, ranks);
        status = MOK_E_MEMORY;
    }
    for (int32_t r = 0; r < ranks && status == MOK_OK; r++)
        if (jobs[r].status != MOK_OK) {
            status = jobs[r].status;
            snprintf(error, 512, "%s", jobs[r].error);
        }
    free(threads);
    return status;
}

mok_status layer_run(const layer_problem *p, const layer_options *o, layer_result *result, char error[512])
{
    mok_group **groups = o->ranks > 0 ? calloc((size_t)o->ranks, sizeof(mok_group *)) : NULL;
    rank_job *jobs = o->ranks > 0 ? calloc((size_t)o->ranks, sizeof *jobs) : NULL;
    mok_status status = mok_group_create_local(o->ranks, o->devices, groups);
    snprintf(error, 512, "%s", status == MOK_OK ? "" : mok_last_error());
    int64_t first = 0, most = 1;
    for (int32_t r = 0; r < o->ranks && status == MOK_OK; r++) {
        int64_t tokens = o->tokens_of_rank ? o->tokens_of_rank[r] : p->tokens * (r + 1) / o->ranks - p->tokens * r / o->ranks;
        jobs[r] = (rank_job){.problem = p, .options = o, .result = result, .group = groups[r], .rank = r, .first_token = first, .num_tokens = tokens};
        first += tokens;
        most = tokens > most ? tokens : most;
    }
    for (int32_t r = 0; r < o->ranks && status == MOK_OK; r++)
        jobs[r].max_tokens = most;
    if (status == MOK_OK) {
        status = run_ranks(jobs, o->ranks, error);
        for (int32_t r = 0; r < o->ranks; r++)
            mok_group_destroy(groups[r]);
    }
    free(groups);
    free(jobs);
    return status;
}
