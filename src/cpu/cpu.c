/* The cpu backend: plain C, the reference and the default. A call runs in the calling thread and the workspace's workers, and is
 * done when it returns. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "cpu/call.h"
#include "cpu/mx.h"
#include "cpu/run.h"

static void probe(mok_backend_info *info)
{
    info->usable = true;
    info->num_devices = 1;
    snprintf(info->detail, sizeof info->detail, "%ld cores, GEMM variant %s", sysconf(_SC_NPROCESSORS_ONLN), mk_gemm_variant());
}

static void close_state(mok_workspace *w)
{
    mk_cpu_state *s = w->state;
    if (!s)
        return;
    int32_t workers = s->pool ? mk_pool_size(s->pool) : 0;
    mk_pool_destroy(s->pool);
    for (int32_t i = 0; s->scratch && i < workers; i++) {
        free(s->scratch[i].tile[0]);
        free(s->scratch[i].tile[1]);
        free(s->scratch[i].mx_left);
        free(s->scratch[i].mx_right);
        free(s->scratch[i].gemm);
    }
    free(s->scratch);
    free(s);
    w->state = NULL;
}

static void *aligned(size_t bytes)
{
    void *p = NULL;
    return posix_memalign(&p, 64, bytes) ? NULL : p;
}

static mok_status open_state(mok_workspace *w)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int32_t workers = w->config.cpu_threads ? w->config.cpu_threads : (int32_t)mk_max(cores / w->dims.num_ranks, 1);
    mk_cpu_state *s = calloc(1, sizeof *s);
    w->config.cpu_threads = workers;
    w->trace = (mk_trace){.tracks = workers, .lanes = 1};
    w->state = s;
    bool complete = s && (s->pool = mk_pool_create(workers)) && (s->scratch = calloc((size_t)workers, sizeof *s->scratch));
    for (int32_t i = 0; complete && i < workers; i++) {
        mk_cpu_scratch *c = &s->scratch[i];
        c->tile[0] = aligned(sizeof(float) * MK_CPU_TILE_FLOATS);
        c->tile[1] = aligned(sizeof(float) * MK_ROW_TILE * MK_CPU_COLS);
        c->gemm = aligned(mk_gemm_scratch_bytes());
        complete = c->tile[0] && c->tile[1] && c->gemm;
        if (w->dims.mx) {
            c->mx_left = aligned(sizeof(mk_bf16) * MK_CPU_MX_LEFT);
            c->mx_right = aligned(sizeof(mk_bf16) * MK_CPU_MX_RIGHT);
            complete = complete && c->mx_left && c->mx_right;
        }
    }
    if (complete)
        return MOK_OK;
    close_state(w);
    return mk_fail(MOK_E_MEMORY, "no memory or threads for %d workers of rank %d", workers, w->dims.rank);
}

static mok_status check_schedule(const mok_workspace *w, const void *schedule, int64_t num_tokens)
{
    const mk_schedule_head *h = schedule;
    if (h->magic != MK_SCHEDULE_MAGIC || h->fingerprint != w->fingerprint)
        return mk_fail(MOK_E_STATE, "schedule was not filled by mok_schedule of this configuration");
    if (h->num_tokens != num_tokens)
        return mk_fail(MOK_E_STATE, "num_tokens is %lld, but the schedule was made for %lld", (long long)num_tokens, (long long)h->num_tokens);
    return MOK_OK;
}

static mok_status check_context(const mok_workspace *w, const void *context, const mk_schedule_head *schedule)
{
    const mk_context_head *h = context;
    if (h->magic != MK_CONTEXT_MAGIC || h->fingerprint != w->fingerprint)
        return mk_fail(MOK_E_STATE, "context was not filled by mok_forward or mok_recompute of this configuration");
    if (h->schedule_number != schedule->number || h->num_tokens != schedule->num_tokens)
        return mk_fail(MOK_E_STATE, "context belongs to schedule %llu, but this is schedule %llu", (unsigned long long)h->schedule_number,
                       (unsigned long long)schedule->number);
    return MOK_OK;
}

static mok_status check_pointers(const char *name, const mok_weight *weight, int64_t count)
{
    for (int64_t e = 0; weight->experts && e < count; e++)
        if (!weight->experts[e])
            return mk_fail(MOK_E_ARG, "weights.%s.experts[%lld] is NULL", name, (long long)e);
    return MOK_OK;
}

static mok_status check_weights(const mok_workspace *w, const mok_weights *m, bool down)
{
    int64_t experts = w->dims.experts_count, shared = w->dims.shared_intermediate > 0;
    MK_TRY(check_pointers("gate", &m->gate, experts));
    MK_TRY(check_pointers("up", &m->up, experts));
    MK_TRY(check_pointers("down", &m->down, down ? experts : 0));
    MK_TRY(check_pointers("shared_gate", &m->shared_gate, shared));
    MK_TRY(check_pointers("shared_up", &m->shared_up, shared));
    return check_pointers("shared_down", &m->shared_down, down ? shared : 0);
}

static mok_status check(mok_workspace *w, const mk_call *call)
{
    switch (call->operation) {
    case MK_OP_FORWARD:
    case MK_OP_RECOMPUTE:
        MK_TRY(check_schedule(w, call->forward.schedule, call->num_tokens));
        return check_weights(w, &call->forward.weights, call->operation == MK_OP_FORWARD);
    case MK_OP_BACKWARD:
        MK_TRY(check_schedule(w, call->backward.schedule, call->num_tokens));
        MK_TRY(check_context(w, call->backward.context, call->backward.schedule));
        return check_weights(w, &call->backward.weights, true);
    default: return MOK_OK;
    }
}

static mok_status run(mok_workspace *w, const mk_call *call, void *stream)
{
    (void)stream;
    return call->operation == MK_OP_SCHEDULE ? mk_cpu_s0_schedule(w, call) : mk_cpu_pass(w, call);
}

/* Products widen what they read as they read it: nothing to do but to refuse what a GPU would. */
static mok_status mx_widen(mok_workspace *w, const mok_mx_widen_args *a, void *stream)
{
    int64_t experts = w->dims.experts_count;
    (void)stream;
    MK_TRY(check_pointers("gate", &a->weights.gate, experts));
    MK_TRY(check_pointers("up", &a->weights.up, experts));
    return check_pointers("down", &a->weights.down, experts);
}

static mok_status wait_done(mok_workspace *w, bool block)
{
    (void)w;
    (void)block;
    return MOK_OK;
}

static mok_status schedule_head(mok_workspace *w, const void *schedule, mk_schedule_head *head)
{
    (void)w;
    *head = *(const mk_schedule_head *)schedule;
    return MOK_OK;
}

static mok_status memory_alloc(mok_workspace *w, size_t bytes, void **memory)
{
    (void)w;
    return posix_memalign(memory, 4096, bytes ? bytes : 1) ? mk_fail(MOK_E_MEMORY, "no memory for %zu bytes", bytes) : MOK_OK;
}

static void memory_free(mok_workspace *w, void *memory)
{
    (void)w;
    free(memory);
}

static mok_status memory_copy(mok_workspace *w, void *to, const void *from, size_t bytes)
{
    (void)w;
    if (bytes)
        memcpy(to, from, bytes);
    return MOK_OK;
}

static mok_status mx_quantise(const mok_mx_quantise_args *a, void *stream)
{
    (void)stream;
    mk_mx_matrix m = {a->source, a->count, a->rows, a->cols, a->data, a->scales, a->transposed, a->transposed_scales};
    int64_t not_finite = mk_cpu_mx_quantise_matrix(&m);
    if (a->not_finite)
        *a->not_finite = not_finite;
    return MOK_OK;
}

const mk_backend mk_backend_cpu = {
    .name = "cpu",
    .id = MOK_BACKEND_CPU,
    .probe = probe,
    .open = open_state,
    .close = close_state,
    .check = check,
    .run = run,
    .refuse = mk_cpu_call_refuse,
    .wait = wait_done,
    .schedule_head = schedule_head,
    .memory_alloc = memory_alloc,
    .memory_free = memory_free,
    .memory_copy = memory_copy,
    .mx_widen = mx_widen,
    .mx_quantise = mx_quantise,
    .mxfp8 = true,
};
