#include "cpu/call.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/log.h"

int64_t mk_cpu_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

void mk_cpu_relax(uint32_t *spins)
{
    if (++*spins < 64)
        return;
    if (*spins < 1024) {
        sched_yield();
        return;
    }
    struct timespec nap = {0, 50000};
    nanosleep(&nap, NULL);
}

/* The word in `heap` that rank r stores its epoch to. */
static uint64_t *epoch_word(const mok_workspace *w, char *heap, int32_t r)
{
    return (uint64_t *)(void *)(heap + w->memory.epochs + (int64_t)r * MK_EPOCH_BYTES);
}

static mk_call_head *head_of(const mok_workspace *w, int32_t r)
{
    return (mk_call_head *)(void *)(w->heaps[r] + w->memory.call_heads) + (w->calls & 1);
}

const mk_call_head *mk_cpu_call_head(const mok_workspace *w, int32_t r) { return head_of(w, r); }

/* Raises this rank's epoch in every heap. Release: publishes all this rank wrote before; pairs with the acquire in wait_epoch. */
static void post_epoch(mok_workspace *w)
{
    w->epoch++;
    for (int32_t r = 0; r < w->dims.num_ranks; r++)
        __atomic_store_n(epoch_word(w, w->heaps[r], w->dims.rank), w->epoch, __ATOMIC_RELEASE);
}

/* Whom this rank waits for, in what, and since when. */
typedef struct patience {
    mok_workspace *w;
    const char *stage;
    uint64_t layer, epoch;
    int64_t start, report; /* ms; how long a wait must last to be worth the next line in the log */
    bool late;             /* it has been worth one */
} patience;

/* A rank that has begun a call in another workspace, which this rank has not come to, while this rank waits for it here: they call the
 * workspaces in different orders, and neither will ever come. Ranks that wait for each other find the same sentence. */
static mok_status check_order(const patience *p, int32_t r)
{
    mok_workspace *w = p->w, *v = w->group->workspaces;
    for (; v; v = v->next) {
        if (v == w || v->backend != w->backend || __atomic_load_n(epoch_word(v, v->heap, r), __ATOMIC_ACQUIRE) <= v->epoch)
            continue;
        if (__atomic_load_n(epoch_word(w, w->heap, r), __ATOMIC_ACQUIRE) >= p->epoch) /* it came here, and has gone on to that one since the last look */
            return MOK_OK;
        const mk_call_head *theirs = (const mk_call_head *)(const void *)(v->heaps[r] + v->memory.call_heads) + ((v->calls + 1) & 1);
        const mk_call_head *ours = head_of(w, w->dims.rank), *low = w->dims.rank < r ? ours : theirs, *high = w->dims.rank < r ? theirs : ours;
        const mok_workspace *low_in = low == ours ? w : v, *high_in = low == ours ? v : w;
        w->broken = v->broken = true;
        return mk_fail_order((mk_place){mk_min(w->dims.rank, r), (mk_operation)low->operation, low->layer, low_in->number},
                             (mk_place){mk_max(w->dims.rank, r), (mk_operation)high->operation, high->layer, high_in->number});
    }
    return MOK_OK;
}

/* Now and then in a wait for rank r. MOK_OK: go on waiting. */
static mok_status still_waiting(patience *p, int32_t r, uint64_t seen)
{
    mok_workspace *w = p->w;
    int64_t waited = mk_cpu_now_ms() - p->start;
    bool gone = w->group->transport->gone && w->group->transport->gone(w->group, r);
    MK_TRY(check_order(p, r));
    if (gone && __atomic_load_n(epoch_word(w, w->heap, r), __ATOMIC_ACQUIRE) >= p->epoch) /* it came, and then went */
        return MOK_OK;
    if (!gone && waited <= w->config.timeout_ms) {
        if (waited < p->report)
            return MOK_OK;
        p->late = true;
        p->report = 2 * waited;
        mk_log("rank %d is late: rank %d has waited %.1f s for it in %s (layer %llu, call %llu)", r, w->dims.rank, 1e-3 * (double)waited, p->stage,
               (unsigned long long)p->layer, (unsigned long long)w->calls);
        return MOK_OK;
    }
    w->broken = true;
    return mk_fail(MOK_E_TIMEOUT, "rank %d waited %lld ms for rank %d in %s (layer %llu, call %llu): its epoch is %llu, expected %llu%s", w->dims.rank,
                   (long long)(gone ? waited : w->config.timeout_ms), r, p->stage, (unsigned long long)p->layer, (unsigned long long)w->calls,
                   (unsigned long long)seen, (unsigned long long)p->epoch, gone ? "; its process has ended or left the group" : "");
}

/* Waits until every rank's epoch has reached `epoch`. Acquire: pairs with the release in post_epoch of rank r. */
static mok_status wait_epoch(mok_workspace *w, uint64_t epoch, const char *stage, uint64_t layer)
{
    patience p = {w, stage, layer, epoch, mk_cpu_now_ms(), MK_LATE_MS, false};
    uint32_t spins = 0;
    for (int32_t r = 0; r < w->dims.num_ranks; r++) {
        uint64_t seen;
        while ((seen = __atomic_load_n(epoch_word(w, w->heap, r), __ATOMIC_ACQUIRE)) < epoch) {
            mk_cpu_relax(&spins);
            if (spins % 256 == 0)
                MK_TRY(still_waiting(&p, r, seen));
        }
        if (p.late)
            mk_log("rank %d has come to %s (layer %llu, call %llu) after %.1f s", r, stage, (unsigned long long)layer, (unsigned long long)w->calls,
                   1e-3 * (double)(mk_cpu_now_ms() - p.start));
        p.late = false;
    }
    return MOK_OK;
}

mok_status mk_cpu_barrier(mok_workspace *w, const char *stage, uint64_t layer)
{
    post_epoch(w);
    return wait_epoch(w, w->epoch, stage, layer);
}

/* Fills this rank's head of the next call. The place was last used two calls ago: whoever has come to the last call's first
 * barrier has read it (only a rank that has just refused a call may have to wait here). */
static mok_status announce(mok_workspace *w, mk_operation operation, uint64_t layer, mk_call_head **head)
{
    MK_TRY(wait_epoch(w, w->call_epoch, mk_operation_name(operation), layer));
    w->calls++;
    *head = head_of(w, w->dims.rank);
    memset(*head, 0, sizeof **head);
    (*head)->sequence = w->calls;
    (*head)->fingerprint = w->fingerprint;
    (*head)->layer = layer;
    (*head)->operation = (int32_t)operation;
    return MOK_OK;
}

static mok_status compare_heads(const mok_workspace *w)
{
    const mk_call_head *zero = head_of(w, 0);
    for (int32_t r = 0; r < w->dims.num_ranks; r++) {
        const mk_call_head *h = head_of(w, r);
        if (h->status != MOK_OK)
            return mk_fail(MOK_E_PEER, "rank %d refused its %s call of layer %llu: %s", r, mk_operation_name((mk_operation)h->operation),
                           (unsigned long long)h->layer, h->sentence);
    }
    for (int32_t r = 1; r < w->dims.num_ranks; r++) {
        const mk_call_head *h = head_of(w, r);
        if (h->operation != zero->operation || h->layer != zero->layer || h->schedule_number != zero->schedule_number || h->sequence != zero->sequence)
            return mk_fail(MOK_E_MISMATCH, "call %llu is %s of layer %llu with schedule %llu on rank 0, but %s of layer %llu with schedule %llu on rank %d",
                           (unsigned long long)zero->sequence, mk_operation_name((mk_operation)zero->operation), (unsigned long long)zero->layer,
                           (unsigned long long)zero->schedule_number, mk_operation_name((mk_operation)h->operation), (unsigned long long)h->layer,
                           (unsigned long long)h->schedule_number, r);
        if (h->parts != zero->parts)
            return mk_fail(MOK_E_MISMATCH, "call %llu is backward with parts %d on rank 0, but %d on rank %d", (unsigned long long)zero->sequence,
                           zero->parts, h->parts, r);
    }
    return MOK_OK;
}

mok_status mk_cpu_call_open(mok_workspace *w, const mk_call *call, uint64_t schedule_number)
{
    mk_call_head *head;
    MK_TRY(announce(w, call->operation, call->layer, &head));
    head->num_tokens = call->num_tokens;
    head->schedule_number = schedule_number;
    head->parts = call->operation == MK_OP_BACKWARD ? (int32_t)call->backward.parts : 0;
    return MOK_OK;
}

mok_status mk_cpu_call_meet(mok_workspace *w, const mk_call *call)
{
    post_epoch(w);
    w->call_epoch = w->epoch;
    MK_TRY(wait_epoch(w, w->epoch, mk_operation_name(call->operation), call->layer));
    return compare_heads(w);
}

void mk_cpu_call_refuse(mok_workspace *w, mk_operation operation, uint64_t layer, mok_status status, void *stream)
{
    (void)stream;
    mk_call_head *head;
    char sentence[sizeof head->sentence];
    snprintf(sentence, sizeof sentence, "%.*s", (int)sizeof sentence - 1, mok_last_error());
    if (announce(w, operation, layer, &head) == MOK_OK) {
        head->status = status;
        memcpy(head->sentence, sentence, sizeof sentence);
        post_epoch(w);
        w->call_epoch = w->epoch;
    }
    mk_fail(status, "%s", sentence); /* announcing may have overwritten it */
}
