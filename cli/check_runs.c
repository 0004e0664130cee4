/* mok check: the variants and their runs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { RING_CHOSEN = 0, RING_EVERYTHING = -1, RING_HALF = -2, SMALL = 256 /* the smallest legal ring: two minibatches of one tile */ };

typedef struct variant {
    const char *name, *save_text;
    int64_t ring, minibatch, minibatch_bwd;
    mok_save save;
    int64_t save_rows;
    int64_t repeat;                          /* passes in one workspace */
    bool quick;                              /* part of --quick */
    bool recompute, two_call, by_pointer, lopsided;
    bool prequantised;                       /* MXFP8 only */
    bool wide;                               /* and where passes would widen weights */
    int32_t threads;
} variant;

/* Not for a forward alone. */
static bool needs_backward(const variant *v) { return v->recompute || v->two_call || v->by_pointer; }

/* The first is what the others are compared with. The last must be quick too, so that MOK_CHECK_FAULT always meets one. */
static const variant variants[] = {
    {"everything in the ring", "all", RING_EVERYTHING, 128, 128, MOK_SAVE_ALL, 0, 1, .quick = true},
    {"the same again", "all", RING_EVERYTHING, 128, 128, MOK_SAVE_ALL, 0, 1, .quick = false},
    {"smallest ring", "none", SMALL, 128, 128, MOK_SAVE_NONE, 0, 1, .quick = true},
    {"smallest ring, its rows saved", "ring", SMALL, 128, 128, MOK_SAVE_RING, 0, 1, .quick = false},
    {"ring of three tiles", "ring", 384, 128, 128, MOK_SAVE_RING, 0, 1, .quick = false},
    {"ring of half the rows", "512", RING_HALF, 128, 128, MOK_SAVE_ROWS, 512, 1, .quick = false},
    {"minibatches 256 and 128", "128", 512, 256, 128, MOK_SAVE_ROWS, 128, 1, .quick = true},
    {"minibatches 128 and 256", "384", 640, 128, 256, MOK_SAVE_ROWS, 384, 1, .quick = false},
    {"as the library chooses", "auto", RING_CHOSEN, 0, 0, MOK_SAVE_AUTO, 0, 1, .quick = false},
    {"recompute of the ring's rows", "ring", 384, 128, 128, MOK_SAVE_RING, 0, 1, .quick = false, .recompute = true},
    {"recompute of all rows", "all", SMALL, 128, 128, MOK_SAVE_ALL, 0, 1, .quick = true, .recompute = true},
    {"backward in two calls", "none", SMALL, 128, 128, MOK_SAVE_NONE, 0, 1, .quick = false, .two_call = true},
    {"two calls, all rows saved", "all", SMALL, 128, 128, MOK_SAVE_ALL, 0, 1, .quick = false, .two_call = true},
    {"weights quantised before", "ring", SMALL, 128, 128, MOK_SAVE_RING, 0, 1, .quick = true, .prequantised = true},
    {"weights widened before", "ring", SMALL, 128, 128, MOK_SAVE_RING, 0, 1, .quick = true, .wide = true},
    {"a pointer per expert", "ring", SMALL, 128, 128, MOK_SAVE_RING, 0, 1, .quick = false, .by_pointer = true},
    {"three passes, one workspace", "256", 384, 128, 128, MOK_SAVE_ROWS, 256, 3, .quick = false},
    {"lopsided split of the tokens", "ring", SMALL, 128, 128, MOK_SAVE_RING, 0, 1, .quick = false, .lopsided = true},
    {"three threads per rank", "ring", SMALL, 128, 128, MOK_SAVE_RING, 0, 1, .quick = true, .threads = 3},
};
enum { NUM_VARIANTS = sizeof variants / sizeof *variants };

/* ---------------------------------------------------------------------------------------------------------- fault -- */

static void inject_fault(const layer_problem *p, layer_result *r, bool last)
{
    const char *fault = getenv("MOK_CHECK_FAULT");
    bool all = fault && !strncmp(fault, "all:", 4);
    if (!fault || (!last && !all))
        return;
    if (!strcmp(fault, "counts"))
        r->stats[0].bytes_pulled_peer++;
    for (int i = 0; i < CHECK_NUM_OUTPUTS; i++) {
        check_array a = check_output(p, r, i);
        if (strcmp(fault + (all ? 4 : 0), check_output_names[i]) || !a.count)
            continue;
        unsigned char *element = (unsigned char *)a.data + a.count / 2 * a.size;
        if (all)
            element[a.size - 1] = 0x7e; /* sign and exponent: about 1e37 */
        else
            element[0] ^= 1;
    }
}

/* ----------------------------------------------------------------------------------------------------------- runs -- */

static bool is_run(const check_settings *s, const variant *v)
{
    return (v->quick || !s->quick) && !(s->forward_only && needs_backward(v)) && (s->cfg.dtype == MOK_MXFP8 || !(v->prequantised || v->wide)) &&
           (s->cfg.backend == MOK_BACKEND_CUDA || !v->wide);
}

int64_t check_count_runs(const check_settings *s)
{
    int64_t n = 0;
    for (int i = 0; i < NUM_VARIANTS; i++)
        n += is_run(s, &variants[i]);
    return n * (int64_t)s->ranks.count;
}

/* Rows of the worst routing on the rank with most experts. */
static int64_t capacity_of(const check_settings *s, int32_t ranks)
{
    int64_t most = SMALL;
    for (int32_t r = 0; r < ranks; r++) {
        mok_config cfg = s->cfg;
        mok_plan plan = MOK_INIT(mok_plan);
        cfg.max_tokens = (s->tokens + ranks - 1) / ranks;
        if (mok_plan_query(&cfg, ranks, r, 0, 0, 0, &plan, NULL, NULL) == MOK_OK && plan.capacity_rows > most)
            most = plan.capacity_rows;
    }
    return most;
}

/* A third on the first rank, the rest on the last, nothing between. */
static void lopsided_split(int64_t tokens, int32_t ranks, int64_t *tokens_of_rank)
{
    memset(tokens_of_rank, 0, sizeof *tokens_of_rank * (size_t)ranks);
    tokens_of_rank[0] = ranks > 1 ? tokens / 3 : 0;
    tokens_of_rank[ranks - 1] += tokens - tokens_of_rank[0];
}

static layer_options options_of(const check_settings *s, const variant *v, int32_t ranks, const int64_t *split, const int32_t *devices)
{
    int64_t capacity = capacity_of(s, ranks), half = capacity / 2 > SMALL ? capacity / 2 : SMALL;
    return (layer_options){.ranks = ranks, .tokens_of_rank = v->lopsided ? split : NULL,
                           .ring_rows = v->ring == RING_EVERYTHING ? capacity : v->ring == RING_HALF ? half : v->ring,
                           .minibatch_rows = v->minibatch, .minibatch_rows_bwd = v->minibatch_bwd, .save = v->save, .save_rows = v->save_rows,
                           .cpu_threads = v->threads, .backend = s->cfg.backend, .recompute = v->recompute, .two_call_backward = v->two_call,
                           .experts_by_pointer = v->by_pointer, .mx_prequantised = v->prequantised, .mx_wide = v->wide, .repeat = v->repeat, .forward_only = s->forward_only, .devices = devices};
}

/* A call that fails is a difference in everything. */
static void note_run(const variant *v, const layer_result *r, mok_status status, const char *error, check_run *run)
{
    *run = (check_run){.variant = v->name, .save = v->save_text, .ranks = r->ranks, .small_ring = v->ring == SMALL};
    if (status != MOK_OK) {
        run->differing = (1u << CHECK_NUM_OUTPUTS) - 1;
        snprintf(run->difference, sizeof run->difference, "%s: %.220s", mok_status_name(status), error);
        return;
    }
    run->ring_rows = r->config.ring_rows;
    run->minibatch_rows = r->config.minibatch_rows;
    run->minibatch_rows_bwd = r->config.minibatch_rows_bwd;
    run->saved_rows = r->config.save_rows;
}

/* All variants for one number of ranks. `first`: the result that all are compared with; made here if these are the first runs. */
static bool run_variants(const check_settings *s, check_routing *routing, int32_t ranks, layer_result *first, void (*tick)(void *), void *user)
{
    const layer_problem *p = &routing->problem;
    layer_result own = {0}, *here = first->out ? &own : first, r;
    int64_t *split = calloc((size_t)ranks, sizeof *split);
    int32_t *devices = calloc((size_t)ranks, sizeof *devices);
    bool ok = split && devices;
    for (int32_t i = 0; ok && s->num_devices && i < ranks; i++)
        devices[i] = i % s->num_devices;
    for (int j = 0; j < NUM_VARIANTS && ok; j++) {
        const variant *v = &variants[j];
        char error[512];
        if (!is_run(s, v))
            continue;
        lopsided_split(p->tokens, ranks, split);
        layer_options o = options_of(s, v, ranks, split, s->num_devices ? devices : NULL);
        if (!(ok = layer_result_make(&r, p, &o)))
            break;
        check_run *run = &routing->runs[routing->num_runs++];
        mok_status status = layer_run(p, &o, &r, error);
        note_run(v, &r, status, error, run);
        inject_fault(p, &r, routing->num_runs == check_count_runs(s));
        if (j == 0)
            *here = r;
        if (status == MOK_OK)
            check_compare(p, &o, &r, first, v->lopsided ? NULL : here, run);
        if (j != 0)
            layer_result_free(&r);
        tick(user);
    }
    layer_result_free(&own);
    free(split);
    free(devices);
    return ok;
}

bool check_run_all(const check_settings *s, check_routing *routing, layer_result *first, void (*tick)(void *), void *user)
{
    routing->runs = calloc((size_t)check_count_runs(s), sizeof *routing->runs);
    bool ok = routing->runs != NULL;
    for (size_t i = 0; i < s->ranks.count && ok; i++)
        ok = run_variants(s, routing, (int32_t)s->ranks.values[i], first, tick, user);
    return ok;
}
