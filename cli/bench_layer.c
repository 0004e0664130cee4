/* mok bench: the layer's passes over ranks as threads. */
#define MOK_EXPERIMENTAL
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "layer.h"
#include "term.h"

typedef struct samples {
    const layer_result *result;
    int64_t count, repeat;
    double *schedule, *forward, *backward; /* [repeat]; the warm-up is left out */
    bool by_stage;
    mok_stage_time stages[BENCH_MAX_STAGES];
    int32_t num_stages;
    double *stage_seconds, *forward_seconds; /* [BENCH_MAX_STAGES, repeat], [repeat] */
    mok_status status;                     /* of reading the stages' times */
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

/* Where the times of a stage are kept; -1: no room. */
static int32_t place_of(samples *s, const mok_stage_time *t)
{
    for (int32_t i = 0; i < s->num_stages; i++)
        if (!strcmp(s->stages[i].operation, t->operation) && !strcmp(s->stages[i].stage, t->stage))
            return i;
    if (s->num_stages == BENCH_MAX_STAGES)
        return -1;
    s->stages[s->num_stages] = (mok_stage_time){.operation = t->operation, .stage = t->stage};
    return s->num_stages++;
}

static void take_stages(samples *s, mok_workspace *w, int64_t sample)
{
    mok_stage_time times[BENCH_MAX_STAGES];
    int32_t count = BENCH_MAX_STAGES;
    mok_status status = sample < 0 ? mok_stage_times_start(w) : mok_stage_times_read(w, times, &count);
    if (s->status == MOK_OK)
        s->status = status;
    for (int32_t i = 0; i < count && sample >= 0 && status == MOK_OK; i++) {
        int32_t place = place_of(s, &times[i]);
        if (place < 0)
            continue;
        s->stages[place].launches += times[i].launches;
        s->stage_seconds[place * s->repeat + sample] = times[i].seconds;
        if (!strcmp(times[i].operation, "forward"))
            s->forward_seconds[sample] += times[i].seconds;
    }
}

/* Rank 0 measures: it has expert 0, as every rank has experts here. */
static void after_pass(mok_workspace *w, void *user)
{
    samples *s = user;
    mok_plan plan = MOK_INIT(mok_plan);
    if (mok_workspace_plan(w, &plan) != MOK_OK || plan.experts_first != 0)
        return;
    int64_t i = s->count++ - 1; /* the first is the warm-up */
    term_progress_update(&s->progress, s->count);
    if (s->by_stage)
        take_stages(s, w, i);
    if (i < 0)
        return;
    s->schedule[i] = s->result->seconds_schedule;
    s->forward[i] = s->result->seconds_forward;
    s->backward[i] = s->result->seconds_backward;
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

/* The matrix products and the rows that a stage of rank 0 has to do. */
static void count_work(bench_stage *b, const layer_problem *p, const layer_result *r)
{
    const mok_config *c = &p->cfg;
    double hidden = (double)c->hidden, tokens = (double)(p->tokens / r->ranks), rows = (double)r->info[0].rows;
    double products = rows * (double)c->intermediate + tokens * (double)c->shared_intermediate;
    if (!strcmp(b->operation, "backward")) {
        if (!strcmp(b->stage, "s4_down_bwd"))
            b->flops = 2 * hidden * products;
        if (!strcmp(b->stage, "s2_gate_up_bwd"))
            b->flops = 4 * hidden * products;
        if (!strcmp(b->stage, "wgrad"))
            b->flops = 6 * hidden * products;
        if (!strcmp(b->stage, "fused"))
            b->flops = 12 * hidden * products;
    }
    if (strcmp(b->operation, "forward") != 0)
        return;
    if (!strcmp(b->stage, "publish"))
        b->bytes = 2 * tokens * hidden * 2;
    if (!strcmp(b->stage, "s1_dispatch"))
        b->bytes = rows * hidden * 2;
    if (!strcmp(b->stage, "s2_gate_up"))
        b->flops = 4 * hidden * products;
    if (!strcmp(b->stage, "s4_down"))
        b->flops = 2 * hidden * products;
    if (!strcmp(b->stage, "fused"))
        b->flops = 6 * hidden * products;
    if (!strcmp(b->stage, "s5_combine"))
        b->bytes = tokens * hidden * 2 * (double)(c->topk + (c->shared_intermediate > 0) + 1);
}

static void break_down(const samples *s, const layer_problem *p, bench_breakdown *out)
{
    out->num_stages = s->num_stages;
    out->forward = summarise(s->forward_seconds, s->repeat);
    for (int32_t i = 0; i < s->num_stages; i++) {
        out->stages[i] = (bench_stage){.operation = s->stages[i].operation, .stage = s->stages[i].stage, .launches = (double)s->stages[i].launches / (double)s->repeat,
                                       .time = summarise(s->stage_seconds + i * s->repeat, s->repeat)};
        count_work(&out->stages[i], p, s->result);
    }
}

static bench_traffic count_traffic(const layer_result *r)
{
    bench_traffic t = {0};
    for (int32_t i = 0; i < r->ranks; i++) {
        const mok_schedule_info *info = &r->info[i];
        t.rows += info->rows;
        t.table_rows += info->table_rows;
        if (info->bytes_pulled_peer_fwd + info->bytes_pushed_peer_fwd > t.bytes_pulled + t.bytes_pushed) {
            t.bytes_pulled = info->bytes_pulled_peer_fwd;
            t.bytes_pushed = info->bytes_pushed_peer_fwd;
        }
    }
    return t;
}

static bool run(const bench_settings *s, const layer_problem *p, bench_layer *out, bench_breakdown *breakdown, char *error, size_t error_size)
{
    bool cuda = s->cfg.backend == MOK_BACKEND_CUDA;
    layer_options o = {.ranks = s->ranks, .devices = cuda ? s->devices : NULL, .save = s->save, .save_rows = s->save_rows,
                       .mx_prequantised = !s->requantise, .cpu_threads = s->threads, .backend = s->cfg.backend,
                       .repeat = s->repeat + 1, .after_pass = after_pass};
    layer_result r;
    double *seconds = calloc((4 + BENCH_MAX_STAGES) * (size_t)s->repeat, sizeof *seconds);
    samples sampled = {.result = &r, .repeat = s->repeat, .schedule = seconds, .forward = seconds + s->repeat, .backward = seconds + 2 * s->repeat, .by_stage = cuda,
                       .forward_seconds = seconds + 3 * s->repeat, .stage_seconds = seconds + 4 * s->repeat};
    char sentence[512] = "out of memory";
    mok_status status = MOK_E_MEMORY;
    o.user = &sampled;
    if (seconds && layer_result_make(&r, p, &o)) {
        term_progress_start(&sampled.progress, "measuring", "pass", 0, o.repeat);
        status = layer_run(p, &o, &r, sentence);
        term_progress_clear(&sampled.progress);
        if (status == MOK_OK && sampled.status != MOK_OK) {
            status = sampled.status;
            snprintf(sentence, sizeof sentence, "the stages' times could not be read (%s)", mok_status_name(status));
        }
        if (status == MOK_OK) {
            out->schedule = summarise(sampled.schedule, s->repeat);
            out->forward = summarise(sampled.forward, s->repeat);
            out->backward = summarise(sampled.backward, s->repeat);
            out->config = r.config;
            out->traffic = count_traffic(&r);
            break_down(&sampled, p, breakdown);
        }
        layer_result_free(&r);
    }
    free(seconds);
    if (status != MOK_OK)
        snprintf(error, error_size, "%s", sentence);
    return status == MOK_OK;
}

/* Sets a variable for a run; NULL takes it away. */
static void put(const char *name, const char *value) { value ? setenv(name, value, 1) : unsetenv(name); }

/* A second run, with one launch for each stage, tells where the time goes that the first run spends in one. */
static bool run_staged(const bench_settings *s, const layer_problem *p, bench_breakdown *out, char *error, size_t error_size)
{
    static const char *const names[] = {"MOK_FORWARD", "MOK_BACKWARD"};
    char *before[2];
    bench_layer ignored;
    for (int i = 0; i < 2; i++) {
        before[i] = getenv(names[i]) ? strdup(getenv(names[i])) : NULL;
        put(names[i], "staged");
    }
    bool ok = run(s, p, &ignored, out, error, error_size);
    for (int i = 0; i < 2; i++) {
        put(names[i], before[i]);
        free(before[i]);
    }
    return ok;
}

bool bench_run_layer(const bench_settings *s, bench_layer *out, char *error, size_t error_size)
{
    layer_problem p;
    if (!layer_make(&p, &s->cfg, s->tokens * s->ranks, LAYER_DISTINCT, 0, 1)) {
        snprintf(error, error_size, "out of memory for a layer of %s experts", term_count(s->cfg.num_experts).text);
        return false;
    }
    count_flops(&p, out);
    out->has_breakdown = s->cfg.backend == MOK_BACKEND_CUDA;
    bool ok = run(s, &p, out, &out->called, error, error_size) && (!out->has_breakdown || run_staged(s, &p, &out->staged, error, error_size));
    layer_free(&p);
    return ok;
}
