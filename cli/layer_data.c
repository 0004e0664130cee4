/* A layer's problem and results: made-up data, poisoned memory. */
#include "layer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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
