/* Ranks as threads of one process: a rendezvous under one mutex. Used at creation and destruction, and by ranks that share a GPU
 * (cuda/host/meet.c); all other passes meet in the heaps (cpu/call.c, cuda/stage/call.cuh). */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/log.h"
#include "peer/group.h"

/* What a rank brings to a round; the memory is the rendezvous', so that a rank may leave as soon as all have come. */
typedef struct mk_message {
    char *data;
    size_t bytes, room;
} mk_message;

/* A heap that its rank has left while others may still come late and use it: it goes with the group's last handle. */
typedef struct mk_retired {
    struct mk_retired *next;
    void *heap;
    mok_group owner;            /* only its device, kept for as long */
} mk_retired;

typedef struct mk_rendezvous {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t size, handles;      /* ranks; handles not yet destroyed */
    int32_t arrived;
    uint64_t round;
    bool broken;                /* a rank gave up waiting: nothing works any more */
    char missing[256];          /* the ranks that were waited for then */
    uint64_t *came;             /* [size] rounds that each rank has come to */
    /* [2, size] by parity of the round. A rank writes its place again two rounds later: when all have come to the round between, and so have read. */
    mk_message *sent;
    mk_retired *retired;
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

/* Under the lock: the ranks that are not here. */
static void name_missing(const mk_rendezvous *v, char *text, size_t bytes)
{
    size_t used = 0;
    text[0] = 0;
    for (int32_t r = 0; r < v->size && used < bytes - 12; r++)
        if (v->came[r] <= v->round)
            used += (size_t)snprintf(text + used, bytes - used, " %d", r);
}

/* Under the lock: for everyone who waits. */
static void give_up(mk_rendezvous *v)
{
    name_missing(v, v->missing, sizeof v->missing);
    v->broken = true;
    pthread_cond_broadcast(&v->changed);
}

static bool before(const struct timespec *a, const struct timespec *b)
{
    return a->tv_sec != b->tv_sec ? a->tv_sec < b->tv_sec : a->tv_nsec < b->tv_nsec;
}

/* Under the lock. True: the time is over. A wait that is long, but not over, is worth a line now and then. */
static bool wait_a_while(const mok_group *g, const struct timespec *deadline, int64_t *report_ms, uint64_t round)
{
    mk_rendezvous *v = g->local;
    char missing[128];
    struct timespec report = deadline_after(*report_ms);
    bool last = !before(&report, deadline);
    if (pthread_cond_timedwait(&v->changed, &v->lock, last ? deadline : &report) != ETIMEDOUT || v->round != round || v->broken)
        return false;
    if (last)
        return true;
    name_missing(v, missing, sizeof missing);
    mk_log("rank %d waits at a rendezvous of %d ranks for late ones:%s", g->rank, v->size, missing);
    *report_ms *= 2;
    return false;
}

static mok_status fail_broken(const mok_group *g, const mk_rendezvous *v, int64_t timeout_ms, bool waited)
{
    if (waited)
        return mk_fail(MOK_E_TIMEOUT, "rank %d waited %lld ms at a rendezvous of %d ranks; not there:%s", g->rank, (long long)timeout_ms, v->size,
                       v->missing);
    return mk_fail(MOK_E_TIMEOUT, "rank %d: this group of %d ranks is broken, a rank has given up waiting; not there:%s", g->rank, v->size, v->missing);
}

/* Under the lock. */
static bool bring(mk_message *m, const void *send, size_t bytes)
{
    char *grown = bytes <= m->room ? m->data : realloc(m->data, bytes);
    if (!grown)
        return false;
    m->data = memcpy(grown, send, bytes);
    m->bytes = bytes;
    m->room = bytes > m->room ? bytes : m->room;
    return true;
}

/* Under the lock. Waits until every rank has come; the last one to come opens the next round. A late rank must not complete a round that the others have
 * left. */
static mok_status meet(mok_group *g, const void *send, size_t bytes, int64_t timeout_ms)
{
    mk_rendezvous *v = g->local;
    struct timespec deadline = deadline_after(timeout_ms);
    const uint64_t round = v->round;
    int64_t report_ms = MK_LATE_MS;
    bool waited = false;
    if (v->broken)
        return fail_broken(g, v, timeout_ms, false);
    if (!bring(&v->sent[(round & 1) * (uint64_t)v->size + (uint64_t)g->rank], send, bytes)) {
        give_up(v);
        return mk_fail(MOK_E_MEMORY, "rank %d has no memory to send %zu bytes", g->rank, bytes);
    }
    v->came[g->rank] = round + 1;
    if (++v->arrived == v->size) {
        v->arrived = 0;
        v->round++;
        pthread_cond_broadcast(&v->changed);
    }
    while (v->round == round && !v->broken)
        if (wait_a_while(g, &deadline, &report_ms, round)) {
            waited = true;
            give_up(v);
        }
    return v->round == round ? fail_broken(g, v, timeout_ms, waited) : MOK_OK;
}

/* Sizes differ if ranks are in different calls, creating here and destroying there: the same verdict on all. */
static mok_status collect(const mk_message *sent, int32_t size, void *recv, size_t bytes)
{
    for (int32_t r = 0; r < size; r++)
        if (sent[r].bytes != sent[0].bytes)
            return mk_fail(MOK_E_MISMATCH, "ranks 0 and %d of this group create and destroy workspaces in different orders", r);
    for (int32_t r = 0; r < size; r++)
        memcpy((char *)recv + (size_t)r * bytes, sent[r].data, bytes);
    return MOK_OK;
}

static mok_status local_all_gather(mok_group *g, const void *send, void *recv, size_t bytes, int64_t timeout_ms)
{
    mk_rendezvous *v = g->local;
    pthread_mutex_lock(&v->lock);
    const mk_message *sent = v->sent + (v->round & 1) * (uint64_t)v->size;
    mok_status status = meet(g, send, bytes, timeout_ms);
    pthread_mutex_unlock(&v->lock);
    return status == MOK_OK ? collect(sent, v->size, recv, bytes) : status;
}

static void *host_memory(size_t bytes)
{
    void *own = NULL;
    if (posix_memalign(&own, 4096, bytes ? bytes : 1))
        return NULL;
    return memset(own, 0, bytes);
}

static void free_heap(const mok_group *g, void *own)
{
    if (g->device)
        mk_group_device_free(g, own);
    else
        free(own);
}

/* After a rank has given up waiting, a late one may still come and use this heap. */
static void local_heap_free(mok_group *g, void *own)
{
    mk_rendezvous *v = g->local;
    pthread_mutex_lock(&v->lock);
    mk_retired *r = v->broken ? calloc(1, sizeof *r) : NULL;
    if (r) {
        *r = (mk_retired){.heap = own, .owner = {.device = mk_group_share_device(g)}, .next = v->retired};
        v->retired = r;
    }
    pthread_mutex_unlock(&v->lock);
    if (!r)
        free_heap(g, own);
}

static void local_abandon(mok_group *g)
{
    mk_rendezvous *v = g->local;
    pthread_mutex_lock(&v->lock);
    if (!v->broken)
        give_up(v);
    pthread_mutex_unlock(&v->lock);
}

static mok_status local_heap_alloc(mok_group *g, size_t bytes, void **peers, int64_t timeout_ms)
{
    void *own = g->device ? mk_group_device_alloc(g, bytes) : host_memory(bytes); /* NULL: still tell the others, so that they do not wait */
    mok_status status = local_all_gather(g, &own, peers, sizeof own, timeout_ms);
    for (int32_t r = 0; r < g->size && status == MOK_OK; r++)
        if (!peers[r])
            status = mk_fail(MOK_E_MEMORY, "rank %d could not allocate its heap of %zu bytes", r, bytes);
    if (status != MOK_OK && own)
        local_heap_free(g, own);
    if (status != MOK_OK)
        peers[g->rank] = NULL;
    return status;
}

static void free_rendezvous(mk_rendezvous *v)
{
    for (int32_t i = 0; v->sent && i < 2 * v->size; i++)
        free(v->sent[i].data);
    free(v->sent);
    free(v->came);
    free(v);
}

static void local_close(mok_group *g)
{
    mk_rendezvous *v = g->local;
    pthread_mutex_lock(&v->lock);
    int32_t left = --v->handles;
    pthread_mutex_unlock(&v->lock);
    if (left)
        return;
    while (v->retired) {
        mk_retired *r = v->retired;
        v->retired = r->next;
        free_heap(&r->owner, r->heap);
        mk_group_release_device(&r->owner);
        free(r);
    }
    pthread_cond_destroy(&v->changed);
    pthread_mutex_destroy(&v->lock);
    free_rendezvous(v);
}

const mk_transport mk_transport_local = {local_all_gather, local_heap_alloc, local_heap_free, local_abandon, local_close, NULL};

mok_status mok_group_create_local(int32_t num_ranks, const int32_t *devices, mok_group **groups)
{
    if (!groups)
        return mk_fail(MOK_E_ARG, "groups is NULL: it must point to num_ranks handles");
    if (num_ranks < 1 || num_ranks > 4096)
        return mk_fail(MOK_E_ARG, "num_ranks is %d: it must be from 1 to 4096", num_ranks);
    mk_rendezvous *v = calloc(1, sizeof *v);
    mok_group **made = calloc((size_t)num_ranks, sizeof *made);
    if (v) {
        v->size = v->handles = num_ranks;
        v->sent = calloc(2 * (size_t)num_ranks, sizeof *v->sent);
        v->came = calloc((size_t)num_ranks, sizeof *v->came);
    }
    bool complete = v && made && v->sent && v->came;
    for (int32_t r = 0; r < num_ranks && complete; r++)
        complete = (made[r] = calloc(1, sizeof **made)) != NULL;
    if (!complete) {
        for (int32_t r = 0; made && r < num_ranks; r++)
            free(made[r]);
        if (v)
            free_rendezvous(v);
        free(made);
        return mk_fail(MOK_E_MEMORY, "no memory for a group of %d ranks", num_ranks);
    }
    pthread_mutex_init(&v->lock, NULL);
    pthread_cond_init(&v->changed, NULL);
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
