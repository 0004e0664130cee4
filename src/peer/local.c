/* Ranks as threads of one process: a rendezvous under one mutex. Used at creation and destruction only; the passes meet in
 * the heaps (cpu/call.c). */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "peer/group.h"

typedef struct mk_rendezvous {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t size, handles;      /* ranks; handles not yet destroyed */
    int32_t arrived;
    uint64_t round;
    bool broken;                /* a rank gave up waiting: nothing works any more */
    const void **sent;          /* [size] what each rank brings this round */
} mk_rendezvous;

static struct timespec deadline_after(int64_t ms)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_sec += ms / 1000;
    t.tv_nsec += ms % 1000 * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

/* Under the lock: names the ranks that are not here. */
static mok_status fail_missing(const mok_group *g, const mk_rendezvous *v, int64_t timeout_ms)
{
    char missing[256] = "";
    size_t used = 0;
    for (int32_t r = 0; r < v->size && used < sizeof missing - 12; r++)
        if (!v->sent[r])
            used += (size_t)snprintf(missing + used, sizeof missing - used, " %d", r);
    return mk_fail(MOK_E_TIMEOUT, "rank %d waited %lld ms at a rendezvous of %d ranks; not there:%s", g->rank, (long long)timeout_ms, v->size, missing);
}

/* Waits until every rank has come with something to send. The last one to come opens the next round. */
static mok_status meet(mok_group *g, const void *send, int64_t timeout_ms)
{
    mk_rendezvous *v = g->local;
    struct timespec deadline = deadline_after(timeout_ms);
    mok_status status = MOK_OK;
    pthread_mutex_lock(&v->lock);
    uint64_t round = v->round;
    v->sent[g->rank] = send;
    if (++v->arrived == v->size) {
        v->arrived = 0;
        v->round++;
        pthread_cond_broadcast(&v->changed);
    }
    while (v->round == round && !v->broken)
        if (pthread_cond_timedwait(&v->changed, &v->lock, &deadline) == ETIMEDOUT && v->round == round && !v->broken) {
            status = fail_missing(g, v, timeout_ms);
            v->broken = true;
            pthread_cond_broadcast(&v->changed);
            pthread_mutex_unlock(&v->lock);
            return status;
        }
    if (v->round == round)
        status = mk_fail(MOK_E_TIMEOUT, "rank %d: another rank gave up at a rendezvous of this group", g->rank);
    pthread_mutex_unlock(&v->lock);
    return status;
}

static mok_status local_all_gather(mok_group *g, const void *send, void *recv, size_t bytes, int64_t timeout_ms)
{
    mk_rendezvous *v = g->local;
    MK_TRY(meet(g, send, timeout_ms));
    for (int32_t r = 0; r < v->size; r++)
        memcpy((char *)recv + (size_t)r * bytes, v->sent[r], bytes);
    /* Nobody may leave, or clear its place, before all have read. */
    mok_status status = meet(g, send, timeout_ms);
    pthread_mutex_lock(&v->lock);
    v->sent[g->rank] = NULL;
    pthread_mutex_unlock(&v->lock);
    return status;
}

static void *host_memory(size_t bytes)
{
    void *own = NULL;
    if (posix_memalign(&own, 4096, bytes ? bytes : 1))
        return NULL;
    return memset(own, 0, bytes);
}

static void local_heap_free(mok_group *g, void *own)
{
    if (g->device)
        mk_group_device_free(g, own);
    else
        free(own);
}

static mok_status local_heap_alloc(mok_group *g, size_t bytes, void **peers, int64_t timeout_ms)
{
    void *own = g->device ? mk_group_device_alloc(g, bytes) : host_memory(bytes); /* NULL: still tell the others, so that they do not wait */
    mok_status status = local_all_gather(g, &own, peers, sizeof own, timeout_ms);
    for (int32_t r = 0; r < g->size && status == MOK_OK; r++)
        if (!peers[r])
            status = mk_fail(MOK_E_MEMORY, "rank %d could not allocate its heap of %zu bytes", r, bytes);
    if (status != MOK_OK)
        local_heap_free(g, own);
    return status;
}

static void local_close(mok_group *g)
{
    mk_rendezvous *v = g->local;
    pthread_mutex_lock(&v->lock);
    int32_t left = --v->handles;
    pthread_mutex_unlock(&v->lock);
    if (left)
        return;
    pthread_cond_destroy(&v->changed);
    pthread_mutex_destroy(&v->lock);
    free(v->sent);
    free(v);
}

const mk_transport mk_transport_local = {local_all_gather, local_heap_alloc, local_heap_free, local_close};

mok_status mok_group_create_local(int32_t num_ranks, const int32_t *devices, mok_group **groups)
{
    if (!groups)
        return mk_fail(MOK_E_ARG, "groups is NULL: it must point to num_ranks handles");
    if (num_ranks < 1 || num_ranks > 4096)
        return mk_fail(MOK_E_ARG, "num_ranks is %d: it must be from 1 to 4096", num_ranks);
    mk_rendezvous *v = calloc(1, sizeof *v);
    mok_group **made = calloc((size_t)num_ranks, sizeof *made);
    if (v)
        v->sent = calloc((size_t)num_ranks, sizeof *v->sent);
    bool complete = v && made && v->sent;
    for (int32_t r = 0; r < num_ranks && complete; r++)
        complete = (made[r] = calloc(1, sizeof **made)) != NULL;
    if (!complete) {
        for (int32_t r = 0; made && r < num_ranks; r++)
            free(made[r]);
        if (v)
            free(v->sent);
        free(v);
        free(made);
        return mk_fail(MOK_E_MEMORY, "no memory for a group of %d ranks", num_ranks);
    }
    pthread_mutex_init(&v->lock, NULL);
    pthread_cond_init(&v->changed, NULL);
    v->size = v->handles = num_ranks;
    for (int32_t r = 0; r < num_ranks; r++) {
        made[r]->rank = r;
        made[r]->size = num_ranks;
        made[r]->transport = &mk_transport_local;
        made[r]->local = v;
    }
    mok_status status = devices ? mk_group_use_devices(made, devices, num_ranks) : MOK_OK;
    for (int32_t r = 0; r < num_ranks; r++)
        if (status == MOK_OK)
            groups[r] = made[r];
        else
            mok_group_destroy(made[r]);
    free(made);
    return status;
}
