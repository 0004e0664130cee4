/* A layer run over ranks: as threads of this process, or one rank of a caller's group. */
#include "layer_rank.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static mok_status run_backward(const layer_rank *job, mok_workspace *w, mok_backward_args *b)
{
    if (!job->options->two_call_backward)
        return mok_backward(w, b, NULL);
    b->parts = MOK_BACKWARD_DATA;
    TRY(mok_backward(w, b, NULL));
    b->parts = MOK_BACKWARD_WEIGHTS;
    b->dx = b->drouter_weights = NULL;
    return mok_backward(w, b, NULL);
}

static mok_status run_pass(layer_rank *job, mok_workspace *w)
{
    const layer_options *o = job->options;
    layer_result *r = job->result;
    /* Copies to the device are made here, outside the measured times. */
    mok_schedule_args s = layer_rank_schedule(job);
    mok_forward_args f = layer_rank_forward(job);
    mok_backward_args b = o->forward_only ? (mok_backward_args)MOK_INIT(mok_backward_args) : layer_rank_backward(job, &f);
    TRY(job->copy_status);
    TRY(layer_rank_widen(job, &f, &b));
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

static mok_status run_workspace(layer_rank *job, mok_workspace *w)
{
    const layer_options *o = job->options;
    mok_plan plan = MOK_INIT(mok_plan);
    mok_config resolved = MOK_INIT(mok_config);
    TRY(mok_workspace_plan(w, &plan));
    TRY(mok_workspace_config(w, &resolved));
    job->w = w;
    job->on_device = resolved.backend == MOK_BACKEND_CUDA;
    TRY(layer_rank_alloc_poisoned(w, plan.schedule_bytes, &job->schedule));
    TRY(layer_rank_alloc_poisoned(w, plan.context_bytes, &job->context));
    for (int i = 0; i < 2 && o->mx_wide && plan.wide_bytes; i++)
        TRY(layer_rank_alloc_poisoned(w, plan.wide_bytes, &job->wide[i]));
    for (int64_t i = 0; i < (o->repeat ? o->repeat : 1); i++) {
        if (o->before_pass)
            o->before_pass(w, o->user);
        TRY(run_pass(job, w));
        if (o->after_pass)
            o->after_pass(w, o->user);
    }
    TRY(layer_rank_bring_back(job));
    job->result->stats[job->rank] = MOK_INIT(mok_stats);
    job->result->info[job->rank] = MOK_INIT(mok_schedule_info);
    if (job->rank == 0)
        job->result->config = resolved;
    TRY(mok_get_stats(w, &job->result->stats[job->rank]));
    return mok_schedule_query(w, job->schedule, &job->result->info[job->rank]);
}

/* With a group that exists: workspace, passes, and all of it away again. The sentence of a failure is in job->error. */
static void run_rank(layer_rank *job)
{
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
    cfg.mx_wide_given = o->mx_wide && cfg.dtype == MOK_MXFP8;
    if (mok_expert_range(cfg.num_experts, o->ranks, job->rank, &job->first_expert, &job->num_experts) == MOK_OK)
        job->status = mok_workspace_create(job->group, &cfg, &w);
    else
        job->status = mok_workspace_create(job->group, NULL, &w); /* tells the others */
    if (job->status == MOK_OK)
        job->status = run_workspace(job, w);
    if (job->status != MOK_OK)
        snprintf(job->error, sizeof job->error, "%s", mok_last_error());
    if (w)
        layer_rank_free(job);
    mok_workspace_destroy(w);
}

static void *rank_main(void *argument)
{
    run_rank(argument);
    return NULL;
}

static mok_status run_ranks(layer_rank *jobs, int32_t ranks, char error[512])
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

/* Which tokens are rank r's, and the most that any rank has. */
static layer_rank part_of(const layer_problem *p, const layer_options *o, layer_result *result, mok_group *group, int32_t rank)
{
    layer_rank job = {.problem = p, .options = o, .result = result, .group = group, .rank = rank, .max_tokens = 1};
    for (int32_t r = 0; r < o->ranks; r++) {
        int64_t tokens = o->tokens_of_rank ? o->tokens_of_rank[r] : p->tokens * (r + 1) / o->ranks - p->tokens * r / o->ranks;
        job.first_token += r < rank ? tokens : 0;
        job.num_tokens = r == rank ? tokens : job.num_tokens;
        job.max_tokens = tokens > job.max_tokens ? tokens : job.max_tokens;
    }
    return job;
}

mok_status layer_run_rank(const layer_problem *p, const layer_options *o, layer_result *result, mok_group *group, char error[512])
{
    layer_rank *job = malloc(sizeof *job);
    snprintf(error, 512, "%s", job ? "" : "no memory");
    if (!job)
        return MOK_E_MEMORY;
    *job = part_of(p, o, result, group, mok_group_rank(group));
    run_rank(job);
    mok_status status = job->status;
    snprintf(error, 512, "%s", job->error);
    free(job);
    return status;
}

mok_status layer_run(const layer_problem *p, const layer_options *o, layer_result *result, char error[512])
{
    mok_group **groups = o->ranks > 0 ? calloc((size_t)o->ranks, sizeof(mok_group *)) : NULL;
    layer_rank *jobs = o->ranks > 0 ? calloc((size_t)o->ranks, sizeof *jobs) : NULL;
    mok_status status = mok_group_create_local(o->ranks, o->devices, groups);
    snprintf(error, 512, "%s", status == MOK_OK ? "" : mok_last_error());
    for (int32_t r = 0; r < o->ranks && status == MOK_OK; r++)
        jobs[r] = part_of(p, o, result, groups[r], r);
    if (status == MOK_OK) {
        status = run_ranks(jobs, o->ranks, error);
        for (int32_t r = 0; r < o->ranks; r++)
            mok_group_destroy(groups[r]);
    }
    free(groups);
    free(jobs);
    return status;
}

int layer_heap_mappings(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    int count = 0;
    while (maps && fgets(line, sizeof line, maps))
        count += strstr(line, "mok heap") != NULL;
    if (maps)
        fclose(maps);
    return count;
}
