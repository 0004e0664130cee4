/* mok soak: one step, compared with itself. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layer.h"
#include "soak.h"

int64_t soak_below(uint64_t *state, int64_t n) { return (int64_t)(layer_random(state) % (uint64_t)n); }

enum { MAX_RANKS = 5 };

typedef struct soak_case {
    mok_config cfg;
    int64_t tokens, tokens_of_rank[MAX_RANKS];
    layer_routing routing;
    double dropped;
    layer_options many, one;
} soak_case;

/* Some ranks get nothing, some much. */
static void split_tokens(soak_case *c, uint64_t *s)
{
    c->tokens = 0;
    for (int32_t r = 0; r < c->many.ranks; r++) {
        c->tokens_of_rank[r] = soak_below(s, 4) ? soak_below(s, 48) : 0;
        c->tokens += c->tokens_of_rank[r];
    }
}

static soak_case make_case(uint64_t seed, mok_backend_id backend, mok_dtype dtype)
{
    static const int32_t first_device[MAX_RANKS];
    static const mok_save saves[] = {MOK_SAVE_NONE, MOK_SAVE_RING, MOK_SAVE_ALL, MOK_SAVE_ROWS};
    uint64_t s = seed;
    soak_case c;
    memset(&c, 0, sizeof c);
    bool cuda = backend == MOK_BACKEND_CUDA;
    c.cfg = MOK_INIT(mok_config);
    c.cfg.hidden = 64 * (1 + soak_below(&s, 3));
    c.cfg.intermediate = 64 * (1 + soak_below(&s, 2));
    c.cfg.shared_intermediate = 64 * soak_below(&s, 2);
    c.cfg.shared_gate = c.cfg.shared_intermediate && soak_below(&s, 2);
    c.cfg.num_experts = 1 + soak_below(&s, 9);
    c.cfg.topk = 1 + soak_below(&s, c.cfg.num_experts < 4 ? c.cfg.num_experts : 4);
    c.cfg.swiglu_limit = soak_below(&s, 3) ? 0 : 1.5f;
    c.cfg.dtype = !cuda && soak_below(&s, 4) == 0 ? MOK_MXFP8 : MOK_BF16;
    c.cfg.dtype = dtype ? dtype : c.cfg.dtype;
    c.many = (layer_options){.ranks = 2 + (int32_t)soak_below(&s, MAX_RANKS - 1), .backend = backend, .devices = cuda ? first_device : NULL, .grad_dtype = soak_below(&s, 2) ? MOK_FP32 : MOK_BF16};
    c.many.minibatch_rows = c.many.minibatch_rows_bwd = 128 * (1 + soak_below(&s, 2));
    c.many.ring_rows = 2 * c.many.minibatch_rows + 128 * soak_below(&s, 3);
    c.many.save = saves[soak_below(&s, 4)];
    c.many.save_rows = c.many.save == MOK_SAVE_ROWS ? 128 * soak_below(&s, 4) : 0;
    c.many.cpu_threads = 1 + (int32_t)soak_below(&s, 2);
    c.many.recompute = soak_below(&s, 3) == 0;
    c.many.two_call_backward = soak_below(&s, 3) == 0;
    split_tokens(&c, &s);
    c.routing = soak_below(&s, 6) == 0 ? LAYER_ONE_EXPERT : soak_below(&s, 2) ? LAYER_UNIFORM : LAYER_DISTINCT;
    c.dropped = soak_below(&s, 3) ? 0.2 : 0;
    c.one = (layer_options){.ranks = 1, .backend = backend, .devices = cuda ? first_device : NULL, .grad_dtype = c.many.grad_dtype, .cpu_threads = 1};
    c.many.mx_prequantised = soak_below(&s, 2);
    c.many.mx_wide = soak_below(&s, 2);
    c.one.mx_prequantised = soak_below(&s, 2);
    return c;
}

/* "" or the name of what differs first. Everything that belongs to no rank. */
static const char *difference(const layer_problem *p, const layer_result *a, const layer_result *b)
{
    size_t rows = (size_t)(p->tokens * p->cfg.hidden) * 2, routes = (size_t)(p->tokens * p->cfg.topk) * 4;
    size_t weights = (size_t)(p->cfg.num_experts * p->cfg.intermediate * p->cfg.hidden * a->grad_bytes);
    const struct { const char *name; const void *a, *b; size_t bytes; } all[] = {
        {"out", a->out, b->out, rows}, {"dx", a->dx, b->dx, rows}, {"drouter_weights", a->drouter_weights, b->drouter_weights, routes},
        {"dgate", a->dgate, b->dgate, weights}, {"dup", a->dup, b->dup, weights}, {"ddown", a->ddown, b->ddown, weights},
        {"tokens_per_expert", a->tokens_per_expert, b->tokens_per_expert, (size_t)p->cfg.num_experts * 8},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].bytes && memcmp(all[i].a, all[i].b, all[i].bytes))
            return all[i].name;
    return "";
}

/* Results begin as NaN: what is left of it was not written. */
static bool has_nan(const uint16_t *values, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if ((values[i] & 0x7f80) == 0x7f80 && (values[i] & 0x7f))
            return true;
    return false;
}

static bool check_counts(const layer_result *r, char *error, size_t size)
{
    for (int32_t i = 0; i < r->ranks; i++) {
        const mok_stats *s = &r->stats[i];
        const mok_schedule_info *h = &r->info[i];
        if (s->forwards != 1 || s->rows_pulled + s->rows_copied != s->rows || s->rows < h->rows) {
            snprintf(error, size, "rank %d counted %lld rows (%lld pulled, %lld copied), its schedule has %lld", i, (long long)s->rows, (long long)s->rows_pulled,
                     (long long)s->rows_copied, (long long)h->rows);
            return false;
        }
    }
    return true;
}

static void add_counts(soak_counts *c, const layer_result *r)
{
    c->steps++;
    for (int32_t i = 0; i < r->ranks; i++) {
        c->rows += r->stats[i].rows;
        c->ring_rotations += r->stats[i].ring_rotations;
        c->rows_replayed += r->stats[i].rows_replayed;
        c->wgrad_continued += r->stats[i].wgrad_continued;
    }
}

bool soak_spoils(const char *what)
{
    const char *fault = getenv("MOK_SOAK_FAULT");
    return fault && !strcmp(fault, what);
}

/* Compares `b` with `a`; a step's whole verdict is the first sentence. */
static bool same(const soak_case *c, const layer_problem *p, const layer_result *a, const layer_result *b, const char *what, char *error, size_t size)
{
    const char *name = difference(p, a, b);
    if (name[0])
        snprintf(error, size, "%s differs %s: %d ranks, %lld tokens, H %lld, I %lld, E %lld, K %lld, ring %lld, minibatch %lld, %s", name, what, c->many.ranks,
                 (long long)c->tokens, (long long)c->cfg.hidden, (long long)c->cfg.intermediate, (long long)c->cfg.num_experts, (long long)c->cfg.topk,
                 (long long)c->many.ring_rows, (long long)c->many.minibatch_rows, c->cfg.dtype == MOK_MXFP8 ? "mxfp8" : "bf16");
    return !name[0];
}

bool soak_step(uint64_t seed, mok_backend_id backend, mok_dtype dtype, soak_counts *counts, char *error, size_t size)
{
    soak_case c = make_case(seed, backend, dtype);
    c.many.tokens_of_rank = c.tokens_of_rank;
    layer_problem p;
    layer_result r[3];
    const layer_options *options[] = {&c.many, &c.many, &c.one};
    char sentence[512] = "out of memory";
    bool ok = layer_make(&p, &c.cfg, c.tokens, c.routing, c.dropped, seed);
    int made = 0;
    for (; ok && made < 3; made++) {
        ok = layer_result_make(&r[made], &p, options[made]) && layer_run(&p, options[made], &r[made], sentence) == MOK_OK;
        if (!ok)
            snprintf(error, size, "%s of %d ranks: %s", made == 1 ? "the repetition" : made == 2 ? "the comparison" : "the step", options[made]->ranks, sentence);
    }
    if (ok && soak_spoils("dx") && c.tokens)
        r[0].dx[0] ^= 1;
    if (ok) {
        ok = same(&c, &p, &r[0], &r[1], "from its repetition", error, size) && same(&c, &p, &r[0], &r[2], "from one rank's", error, size) &&
             check_counts(&r[0], error, size);
        if (ok && (has_nan(r[0].out, c.tokens * c.cfg.hidden) || has_nan(r[0].dx, c.tokens * c.cfg.hidden)))
            ok = (snprintf(error, size, "out or dx holds NaN"), false);
        if (ok)
            add_counts(counts, &r[0]);
    }
    for (int i = 0; i < made; i++)
        layer_result_free(&r[i]);
    layer_free(&p);
    return ok;
}
