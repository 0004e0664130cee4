/* Workspaces: collective creation, in which every rank sees every rank's configuration or complaint before anyone decides. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "base/error.h"

/* How often this process and those before it were forked since the first workspace was made. */
static uint32_t forks;
static void note_fork(void) { forks++; } /* a child has one thread */
static void watch_forks(void) { pthread_atfork(NULL, NULL, note_fork); }

mok_status mk_check_workspace(const mok_workspace *w)
{
    if (!w)
        return mk_fail(MOK_E_ARG, "workspace is NULL");
    if (w->forks != forks)
        return mk_fail(MOK_E_STATE, "this workspace was made before the process was forked, and its threads and its GPU stayed with the parent: make a group and a "
                                    "workspace in the child");
    return MOK_OK;
}

/* What ranks exchange before anything is allocated. */
typedef struct announcement {
    int32_t status;
    mok_config config;
    char sentence[MK_ERROR_BYTES];
} announcement;

static void announce(announcement *a, mok_status status, const mok_config *config)
{
    memset(a, 0, sizeof *a);
    a->status = status;
    if (status == MOK_OK)
        a->config = *config;
    else
        memcpy(a->sentence, mok_last_error(), sizeof a->sentence);
}

/* The same verdict on every rank: the first complaint, else the first difference to rank 0. */
static mok_status judge(const announcement *all, int32_t num_ranks)
{
    double ours, theirs;
    for (int32_t r = 0; r < num_ranks; r++)
        if (all[r].status != MOK_OK)
            return num_ranks == 1 ? mk_fail(all[r].status, "%s", all[r].sentence) : mk_fail(all[r].status, "rank %d: %.480s", r, all[r].sentence);
    for (int32_t r = 1; r < num_ranks; r++) {
        const char *field = mk_config_difference(&all[0].config, &all[r].config, &ours, &theirs);
        if (field)
            return mk_fail(MOK_E_MISMATCH, "%s is %.10g on rank 0, but %.10g on rank %d: it must be the same on all ranks of a group", field, ours, theirs, r);
    }
    return MOK_OK;
}

static mok_status exchange_verdict(mok_group *group, mok_status status, const mok_config *config, int64_t timeout_ms)
{
    announcement mine, *all = malloc(sizeof *all * (size_t)group->size);
    announcement fallback;
    if (!all && group->size > 1)
        return mk_fail(MOK_E_MEMORY, "no memory to compare the configurations of %d ranks", group->size);
    announce(&mine, status, config);
    if (group->size == 1) {
        fallback = mine;
        status = judge(&fallback, 1);
    } else {
        status = group->transport->all_gather(group, &mine, all, sizeof mine, timeout_ms);
        if (status == MOK_OK)
            status = judge(all, group->size);
    }
    free(all);
    return status;
}

static void release(mok_workspace *w)
{
    if (w->trace.memory)
        w->backend->memory_free(w, w->trace.memory);
    if (w->state)
        w->backend->close(w);
    if (w->heap)
        w->group->transport->heap_free(w->group, w->heap);
    if (w->local)
        w->backend->memory_free(w, w->local);
    free(w->heaps);
    free(w);
}

static mok_status resolve(mok_group *group, const mok_config *cfg, mok_workspace *w)
{
    MK_TRY(mk_read_struct("mok_config", cfg, &w->config, sizeof w->config));
    MK_TRY(mk_timeout("timeout_ms", w->config.timeout_ms, &w->config.timeout_ms));
    MK_TRY(mk_backend_choose(group, w->config.backend, &w->backend));
    w->config.backend = w->backend->id;
    if (w->config.dtype == MOK_MXFP8 && !w->backend->mxfp8)
        return mk_fail(MOK_E_UNSUPPORTED, "dtype MOK_MXFP8: backend %s does not compute in it yet; use MOK_BF16, or backend cpu", w->backend->name);
    mk_machine machine = mk_default_machine(w->config.backend);
    machine.scaled = w->backend->scaled && w->backend->scaled(group);
    MK_TRY(mk_resolve(&w->config, group->size, group->rank, machine, &w->dims));
    mk_memory_map(&w->dims, &w->memory, NULL);
    mk_fill_plan(&w->config, &w->dims, &w->memory, machine, &w->plan);
    w->fingerprint = mk_config_fingerprint(&w->config, group->size);
    return MOK_OK;
}

static mok_status allocate(mok_workspace *w)
{
    void *local = NULL;
    char why[300];
    w->heaps = calloc((size_t)w->group->size, sizeof *w->heaps);
    if (!w->heaps)
        return mk_fail(MOK_E_MEMORY, "no memory for %d heap pointers", w->group->size);
    mok_status status = w->backend->memory_alloc(w, (size_t)w->memory.local_bytes, &local);
    if (status != MOK_OK) {
        snprintf(why, sizeof why, "%s", mok_last_error());
        return mk_fail(status, "no memory for a workspace of %lld bytes (heap %lld, local %lld): %s",
                       (long long)(w->memory.heap_bytes + w->memory.local_bytes), (long long)w->memory.heap_bytes, (long long)w->memory.local_bytes, why);
    }
    w->local = local;
    return MOK_OK;
}

mok_status mok_workspace_create(mok_group *group, const mok_config *cfg, mok_workspace **workspace)
{
    if (!group || !workspace)
        return mk_fail(MOK_E_ARG, "%s is NULL", group ? "workspace" : "group");
    mok_workspace *w = calloc(1, sizeof *w);
    if (!w)
        return mk_fail(MOK_E_MEMORY, "no memory for a workspace handle");
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    w->forks = forks;
    w->group = group;
    /* From here on a failure is told to the others, so that all ranks get the same sentence and nobody waits. */
    mok_status status = resolve(group, cfg, w);
    int64_t timeout_ms = w->config.timeout_ms ? w->config.timeout_ms : MK_TIMEOUT_MS; /* a configuration that could not be read has none */
    if (status == MOK_OK)
        status = allocate(w);
    MK_TRY_GOTO(exchange_verdict(group, status, &w->config, timeout_ms), fail);
    group->on_device = w->backend->id == MOK_BACKEND_CUDA;
    status = group->transport->heap_alloc(group, (size_t)w->memory.heap_bytes, (void **)w->heaps, timeout_ms);
    w->heap = w->heaps[group->rank]; /* it may exist though another rank's does not */
    MK_TRY_GOTO(exchange_verdict(group, status, &w->config, timeout_ms), fail);
    MK_TRY_GOTO(exchange_verdict(group, w->backend->open(w), &w->config, timeout_ms), fail);
    w->number = ++group->num_created;
    w->next = group->workspaces;
    group->workspaces = w;
    *workspace = w;
    return MOK_OK;
fail:
    release(w);
    return status;
}

void mok_workspace_destroy(mok_workspace *w)
{
    if (!w || w->forks != forks) /* the parent's is the parent's to destroy */
        return;
    w->backend->wait(w, true);
    /* Peers may still read this heap, so all meet first. After a wait that ran out there is no meeting: the others are told not
     * to expect this rank. */
    char mine = 0, *all = malloc((size_t)w->group->size);
    if (w->broken)
        w->group->transport->abandon(w->group);
    else if (all)
        (void)w->group->transport->all_gather(w->group, &mine, all, 1, w->config.timeout_ms);
    free(all);
    for (mok_workspace **at = &w->group->workspaces; *at; at = &(*at)->next)
        if (*at == w) {
            *at = w->next;
            break;
        }
    release(w);
}

mok_status mok_workspace_config(const mok_workspace *w, mok_config *out)
{
    if (!w)
        return mk_fail(MOK_E_ARG, "workspace is NULL");
    return mk_write_struct("mok_config", &w->config, sizeof w->config, out);
}

mok_status mok_workspace_plan(const mok_workspace *w, mok_plan *out)
{
    if (!w)
        return mk_fail(MOK_E_ARG, "workspace is NULL");
    return mk_write_struct("mok_plan", &w->plan, sizeof w->plan, out);
}
