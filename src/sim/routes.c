#include "sim/routes.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t sim_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static double uniform(uint64_t *state) { return (double)(sim_random(state) >> 11) * 0x1p-53; }
static int64_t below(uint64_t *state, int64_t n) { return (int64_t)(uniform(state) * (double)n); }

/* order: a random permutation of 0..n-1 */
static void shuffle(int32_t *order, int64_t n, uint64_t *state)
{
    for (int64_t i = 0; i < n; i++) {
        int64_t j = below(state, i + 1);
        order[i] = order[j];
        order[j] = (int32_t)i;
    }
}

/* Index of the interval of the ascending sums that x lies in. */
static int64_t draw(const double *sums, int64_t n, double x)
{
    int64_t low = 0, high = n - 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (sums[middle] > x)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static bool among(const int32_t *ids, int64_t n, int32_t id)
{
    for (int64_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

/* K of E experts by weight, all different: drawn again if met before; after many misses the next free one. */
static void draw_distinct(const double *sums, const int32_t *order, int64_t num_experts, int64_t first, int64_t topk, int32_t *ids, uint64_t *state)
{
    for (int64_t k = first; k < topk; k++) {
        int64_t i = 0;
        for (int tries = 0; tries < 64; tries++) {
            i = draw(sums, num_experts, uniform(state) * sums[num_experts - 1]);
            if (!among(ids, k, order[i]))
                break;
        }
        while (among(ids, k, order[i]))
            i = (i + 1) % num_experts;
        ids[k] = order[i];
    }
}

/* Rounds of a fresh permutation, so that no expert is ever more than one row ahead; a token's experts differ because
 * a round that would repeat one is entered where it does not. */
static void make_balanced(int64_t num_tokens, int64_t topk, int64_t num_experts, int32_t *order, int32_t *ids, uint64_t *state)
{
    int64_t at = num_experts;
    for (int64_t i = 0; i < num_tokens * topk; i++) {
        int64_t k = i % topk;
        if (at == num_experts) {
            shuffle(order, num_experts, state);
            at = 0;
        }
        for (int64_t j = at; j < num_experts; j++) /* the first of the rest that the token does not have */
            if (!among(&ids[i - k], k, order[j])) {
                int32_t taken = order[j];
                order[j] = order[at];
                order[at] = taken;
                break;
            }
        ids[i] = order[at++];
    }
}

bool sim_make_routes(const sim_routing *r, int64_t num_tokens, int64_t topk, int64_t num_experts, int32_t *ids)
{
    double *sums = malloc(sizeof *sums * (size_t)num_experts), sum = 0;
    int32_t *order = malloc(sizeof *order * (size_t)num_experts);
    uint64_t state = r->seed;
    bool ok = sums && order;
    if (ok) {
        shuffle(order, num_experts, &state);
        for (int64_t e = 0; e < num_experts; e++)
            sums[e] = sum += r->kind == SIM_ZIPF ? pow((double)(e + 1), -r->skew) : 1;
        if (r->kind == SIM_BALANCED)
            make_balanced(num_tokens, topk, num_experts, order, ids, &state);
        for (int64_t t = 0; t < num_tokens && r->kind != SIM_BALANCED; t++) {
            int32_t *own = &ids[t * topk];
            int64_t first = 0;
            if (r->kind == SIM_REPLACEMENT) {
                for (; first < topk; first++)
                    own[first] = (int32_t)below(&state, num_experts);
            } else if (r->kind == SIM_HOT && uniform(&state) < r->skew) {
                own[first++] = order[0];
            }
            draw_distinct(sums, order, num_experts, first, topk, own, &state);
        }
    }
    free(sums);
    free(order);
    return ok;
}

bool sim_parse_routing(const char *text, sim_routing *r, char *error, size_t error_size)
{
    static const struct { const char *name; sim_routing_kind kind; double low, high; } kinds[] = {
        {"balanced", SIM_BALANCED, 0, 0}, {"uniform", SIM_UNIFORM, 0, 0}, {"replacement", SIM_REPLACEMENT, 0, 0}, {"zipf:", SIM_ZIPF, 0, 10}, {"hot:", SIM_HOT, 0, 1}};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        size_t n = strlen(kinds[i].name);
        char *end = NULL;
        if (kinds[i].high == 0 ? strcmp(text, kinds[i].name) : strncmp(text, kinds[i].name, n))
            continue;
        r->kind = kinds[i].kind;
        if (kinds[i].high == 0)
            return true;
        r->skew = strtod(text + n, &end);
        if (end != text + n && !*end && r->skew >= kinds[i].low && r->skew <= kinds[i].high)
            return true;
        snprintf(error, error_size, "--routing is \"%s\": a number from %g to %g must follow \"%s\"", text, kinds[i].low, kinds[i].high, kinds[i].name);
        return false;
    }
    snprintf(error, error_size, "--routing is \"%s\", but must be balanced, uniform, replacement, zipf:SKEW, hot:SHARE or file:PATH", text);
    return false;
}
