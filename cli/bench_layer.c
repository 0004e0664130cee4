/* mok bench: the layer's passes over ranks as threads. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"
#include "layer.h"
#include "term.h"

typedef struct samples {
    const layer_result *result;
    int64_t count;
    double *schedule, *forward, *backward; /* [repeat]; the warm-up is left out */
    term_progress progress;
} samples;

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_percentile(double *values, int64_t count, double p)
{
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    int64_t i = (int64_t)ceil(p * (double)count) - 1;
    return count ? values[i < 0 ? 0 : i] : NAN;
}

static void take_sample(samples *s)
{
    int64_t i = s->count++ - 1; /* the first is the warm-up */
    if (i < 0)
        return;
    s->schedule[i] = s->result->seconds_schedule;
    s->forward[i] = s->result->seconds_forward;
    s->backward[i] = s->result->seconds_backward;
}

/* Before each pass, on the thread of rank 0 (which is the one with expert 0, as every rank has experts): the times of the pass before. */
static void before_pass(mok_workspace *w, void *user)
{
    samples *s = user;
    mok_plan plan = MOK_INIT(mok_plan);
    if (mok_workspace_plan(w, &plan) != MOK_OK || plan.experts_first != 0)
        return;
    if (s->progress.done > 0)
        take_sample(s);
    term_progress_update(&s->progress, s->progress.done + 1);
}

static bench_time summarise(double *seconds, int64_t count)
{
    return (bench_time){bench_percentile(seconds, count, 0.5), bench_percentile(seconds, count, 0.99), bench_percentile(seconds, count, 0)};
}

static void count_flops(const layer_problem *p, bench_layer *out)
{
    const mok_config *c = &p->cfg;
    double routes = 0, hidden = (double)c->hidden;
    for (int64_t i = 0; i < p->tokens * c->topk; i++)
        routes += p->expert_ids[i] >= 0;
    out->forward_flops = 6 * hidden * (routes * (double)c->intermediate + (double)p->tokens * (double)c->shared_intermediate);
    out->backward_flops = 2 * out->forward_flops;
}

static bool run(const bench_settings *s, const layer_problem *p, bench_layer *out, char *error, size_t error_size)
{
    static const int32_t first_device[4096];
    bool cuda = s->cfg.backend == MOK_BACKEND_CUDA;
    layer_options o = {.ranks = s->ranks, .devices = cuda ? first_device : NULL, .save = s->save, .save_rows = s->save_rows,
                       .mx_prequantised = !s->requantise, .cpu_threads = s->threads, .backend = s->cfg.backend,
                       .repeat = s->repeat + 1, .before_pass = before_pass};
    layer_result r;
    double *seconds = calloc(3 * (size_t)s->repeat, sizeof *seconds);
    samples sampled = {.result = &r, .schedule = seconds, .forward = seconds + s->repeat, .backward = seconds + 2 * s->repeat};
    char sentence[512] = "out of memory";
    mok_status status = MOK_E_MEMORY;
    o.user = &sampled;
    if (seconds && layer_result_make(&r, p, &o)) {
        term_progress_start(&sampled.progress, "measuring", "pass", 0, o.repeat);
        status = layer_run(p, &o, &r, sentence);
        term_progress_clear(&sampled.progress);
        if (status == MOK_OK) {
            take_sample(&sampled);
            out->schedule = summarise(sampled.schedule, s->repeat);
            out->forward = summarise(sampled.forward, s->repeat);
            out->backward = summarise(sampled.backward, s->repeat);
            out->config = r.config;
        }
        layer_result_free(&r);
    }
    free(seconds);
    if (status != MOK_OK)
        snprintf(error, error_size, "%s", sentence);
    return status == MOK_OK;
}

bool bench_run_layer(const bench_settings *s, bench_layer *out, char *error, size_t error_size)
{
    layer_problem p;
    if (!layer_make(&p, &s->cfg, s->tokens * s->ranks, LAYER_DISTINCT, 0, 1)) {
        snprintf(error, error_size, "out of memory for a layer of %s experts", term_count(s->cfg.num_experts).text);
        return false;
    }
    count_flops(&p, out);
    bool ok = run(s, &p, out, error, error_size);
    layer_free(&p);
    return ok;
}
