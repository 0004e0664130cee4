/* The model as its caller sees it, and the ranks' threads: they wait, do one job, and wait again. */
#include "lm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lm_rank.h"

/* ------------------------------------------------------------------------------------------------------- threads -- */
static mok_status run_job(lm_rank *rank, lm_job job)
{
    switch (job) {
    case LM_JOB_OPEN: return lm_rank_open(rank);
    case LM_JOB_FORWARD: return lm_rank_pass(rank, false);
    case LM_JOB_GRADIENTS: return lm_rank_pass(rank, true);
    case LM_JOB_SUM: lm_rank_sum(rank); break;
    case LM_JOB_ADAMW: lm_rank_adamw(rank); break;
    case LM_JOB_ROUND: lm_rank_round(rank); break;
    case LM_JOB_CLOSE: lm_rank_close(rank); break;
    case LM_JOB_NONE: break;
    }
    return MOK_OK;
}

static void *rank_main(void *argument)
{
    lm_rank *rank = argument;
    lm *model = rank->model;
    lm_job job = LM_JOB_NONE;
    for (int64_t round = 1; job != LM_JOB_CLOSE; round++) {
        pthread_mutex_lock(&model->lock);
        while (model->round < round)
            pthread_cond_wait(&model->start, &model->lock);
        job = model->job;
        pthread_mutex_unlock(&model->lock);
        rank->status = run_job(rank, job);
        if (rank->status != MOK_OK)
            snprintf(rank->error, sizeof rank->error, "%s", mok_last_error());
        pthread_mutex_lock(&model->lock);
        if (--model->running == 0)
            pthread_cond_signal(&model->finish);
        pthread_mutex_unlock(&model->lock);
    }
    return NULL;
}

/* The rank that failed by itself, rather than because another did. */
static bool report_failure(const lm *model, char error[LM_ERROR])
{
    const lm_rank *worst = NULL;
    for (int32_t r = 0; r < model->started; r++) {
        const lm_rank *rank = &model->ranks[r];
        if (rank->status != MOK_OK && (!worst || (worst->status == MOK_E_PEER && rank->status != MOK_E_PEER)))
            worst = rank;
    }
    if (worst)
        snprintf(error, LM_ERROR, "%s", worst->error[0] ? worst->error : mok_status_text(worst->status));
    return worst != NULL;
}

/* Gives all ranks the job and waits until it is done. */
static bool run_all(lm *model, lm_job job, char error[LM_ERROR])
{
    pthread_mutex_lock(&model->lock);
    model->job = job;
    model->running = model->started;
    model->round++;
    pthread_cond_broadcast(&model->start);
    while (model->running)
        pthread_cond_wait(&model->finish, &model->lock);
    pthread_mutex_unlock(&model->lock);
    return !report_failure(model, error);
}

/* ------------------------------------------------------------------------------------------------ open and close -- */
static bool check_config(const lm_config *c, char error[LM_ERROR])
{
    mok_config layer = MOK_INIT(mok_config);
    mok_plan plan = MOK_INIT(mok_plan);
    layer.hidden = c->hidden;
    layer.intermediate = c->intermediate;
    layer.shared_intermediate = c->shared_intermediate;
    layer.num_experts = c->experts;
    layer.topk = c->topk;
    layer.max_tokens = c->tokens;
    if (mok_plan_query(&layer, c->ranks, 0, 0, 0, 0, &plan, NULL, NULL) != MOK_OK)
        snprintf(error, LM_ERROR, "%s", mok_last_error());
    else if (c->layers < 1 || c->context < 1 || c->hidden % c->context)
        snprintf(error, LM_ERROR, "layers is %lld and context is %lld: there must be a layer, and hidden (%lld) must be a multiple of context",
                 (long long)c->layers, (long long)c->context, (long long)c->hidden);
    else if (c->tokens % LM_CHUNKS)
        snprintf(error, LM_ERROR, "tokens is %lld: it must be a multiple of %d, the number of chunks of a batch", (long long)c->tokens, LM_CHUNKS);
    else
        return true;
    return false;
}

static bool start_ranks(lm *model, char error[LM_ERROR])
{
    const lm_config *c = &model->cfg;
    if (mok_group_create_local(c->ranks, NULL, model->groups) != MOK_OK) {
        snprintf(error, LM_ERROR, "%s", mok_last_error());
        return false;
    }
    for (int32_t r = 0; r < c->ranks; r++) {
        lm_rank *rank = &model->ranks[r];
        *rank = (lm_rank){.model = model, .rank = r, .group = model->groups[r], .first_chunk = (int64_t)r * LM_CHUNKS / c->ranks};
        rank->num_chunks = (int64_t)(r + 1) * LM_CHUNKS / c->ranks - rank->first_chunk;
        rank->tokens = rank->num_chunks * model->chunk_tokens;
        mok_expert_range(c->experts, c->ranks, r, &rank->first_expert, &rank->num_experts);
    }
    while (model->started < c->ranks && pthread_create(&model->ranks[model->started].thread, NULL, rank_main, &model->ranks[model->started]) == 0)
        model->started++;
    if (model->started == c->ranks)
        return true;
    snprintf(error, LM_ERROR, "only %d of %d threads could be started", model->started, c->ranks);
    return false;
}

lm *lm_open(const lm_config *cfg, char error[LM_ERROR])
{
    if (!check_config(cfg, error))
        return NULL;
    lm *model = calloc(1, sizeof *model);
    if (!model) {
        snprintf(error, LM_ERROR, "out of memory");
        return NULL;
    }
    model->cfg = *cfg;
    model->chunk_tokens = cfg->tokens / LM_CHUNKS;
    pthread_mutex_init(&model->lock, NULL);
    pthread_cond_init(&model->start, NULL);
    pthread_cond_init(&model->finish, NULL);
    model->ranks = lm_take(&model->arena, cfg->ranks, sizeof *model->ranks);
    model->groups = lm_take(&model->arena, cfg->ranks, sizeof *model->groups);
    lm_lay_out(model);
    bool ok = !model->arena.failed;
    snprintf(error, LM_ERROR, "out of memory for the model");
    ok = ok && start_ranks(model, error) && run_all(model, LM_JOB_OPEN, error);
    if (ok) {
        lm_list_tensors(model);
        lm_first_values(model);
        ok = run_all(model, LM_JOB_ROUND, error);
    }
    if (ok)
        return model;
    lm_close(model);
    return NULL;
}

void lm_close(lm *model)
{
    char ignored[LM_ERROR];
    if (!model)
        return;
    if (model->started)
        run_all(model, LM_JOB_CLOSE, ignored);
    for (int32_t r = 0; r < model->started; r++)
        pthread_join(model->ranks[r].thread, NULL);
    for (int32_t r = 0; model->groups && r < model->cfg.ranks; r++)
        mok_group_destroy(model->groups[r]);
    pthread_cond_destroy(&model->finish);
    pthread_cond_destroy(&model->start);
    pthread_mutex_destroy(&model->lock);
    lm_arena_free(&model->arena);
    free(model);
}

/* --------------------------------------------------------------------------------------------------------- steps -- */
static bool run_batch(lm *model, lm_job job, const uint8_t *text, const int64_t *starts, double *loss, char error[LM_ERROR])
{
    double sum = 0;
    model->text = text;
    model->starts = starts;
    if (!run_all(model, job, error))
        return false;
    for (int c = 0; c < LM_CHUNKS; c++)
        sum += model->chunk_loss[c];
    *loss = sum / (double)model->cfg.tokens;
    return true;
}

bool lm_forward(lm *model, const uint8_t *text, const int64_t starts[LM_CHUNKS], double *loss, char error[LM_ERROR])
{
    return run_batch(model, LM_JOB_FORWARD, text, starts, loss, error);
}

bool lm_gradients(lm *model, const uint8_t *text, const int64_t starts[LM_CHUNKS], double *loss, char error[LM_ERROR])
{
    return run_batch(model, LM_JOB_GRADIENTS, text, starts, loss, error) && run_all(model, LM_JOB_SUM, error);
}

bool lm_update(lm *model, int64_t step, double rate, double clip, double *norm, char error[LM_ERROR])
{
    double squares = 0;
    for (int64_t i = 0; i * LM_SUM_BLOCK < model->dense.count; i++)
        squares += model->block_squares[i];
    for (int64_t i = model->first_expert_tensor; i < model->num_tensors; i++)
        squares += model->expert_squares[i];
    *norm = sqrt(squares);
    model->step = step;
    model->rate = rate;
    model->scale = *norm > clip ? clip / *norm : 1;
    return run_all(model, LM_JOB_ADAMW, error) && run_all(model, LM_JOB_ROUND, error);
}

const lm_tensor *lm_tensors(const lm *model, int64_t *count)
{
    *count = model->num_tensors;
    return model->tensors;
}

void lm_values_changed(lm *model)
{
    char ignored[LM_ERROR];
    run_all(model, LM_JOB_ROUND, ignored); /* nothing in it can fail */
}

const int64_t *lm_routes(const lm *model) { return model->ranks[0].layers[0].routes; }
