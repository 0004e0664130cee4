/* mok soak: one fault on ranks of a backend (cuda: virtual ones of one GPU), seen by all of them. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "layer.h"
#include "soak.h"

enum { MAX_RANKS = 4, TOKENS = 8, TIMEOUT_MS = 30000, SHORT_TIMEOUT_MS = 60, SHORT_TIMEOUT_MS_CUDA = 2000 };
typedef enum fault_kind { BAD_ID, REFUSAL, OTHER_LAYER, ABSENT, NUM_FAULTS } fault_kind;
static const char *const names[] = {"a bad expert id", "a refusal", "another layer", "an absent rank"};

typedef struct fault_rank {
    const struct fault_run *run;
    mok_group *group;
    pthread_t thread;
    mok_status created, faulty, after; /* of workspace creation, the call with the fault, the call behind it */
    char sentence[512];                /* of the call with the fault */
} fault_rank;

typedef struct fault_run {
    fault_kind kind;
    mok_backend_id backend;
    int32_t ranks, culprit;
    int32_t *done;                     /* ranks that have made their calls */
    fault_rank rank[MAX_RANKS];
} fault_run;

/* A call, and the wait behind it, where a GPU tells what it has found. */
static mok_status waited(mok_workspace *w, mok_status status) { return status == MOK_OK ? mok_wait(w) : status; }

static mok_status schedule(mok_workspace *w, uint64_t layer, const int32_t *ids, void *memory)
{
    mok_schedule_args a = MOK_INIT(mok_schedule_args);
    a.layer = layer;
    a.num_tokens = TOKENS;
    a.expert_ids = ids;
    a.schedule = memory;
    return waited(w, mok_schedule(w, &a, NULL));
}

static mok_status copy_ids(mok_workspace *w, int32_t *to, int32_t fourth)
{
    int32_t ids[TOKENS] = {0};
    ids[3] = fourth;
    return mok_memory_copy(w, to, ids, sizeof ids);
}

static mok_status faulty_call(const fault_run *run, bool culprit, mok_workspace *w, int32_t *ids, void *memory)
{
    if (culprit && run->kind == REFUSAL)
        return waited(w, mok_refuse(w, MOK_CALL_SCHEDULE, 1, "refused by mok soak", NULL));
    bool bad = culprit && run->kind == BAD_ID;
    mok_status status = bad ? copy_ids(w, ids, 77) : MOK_OK;
    if (status == MOK_OK)
        status = schedule(w, culprit && run->kind == OTHER_LAYER ? 2 : 1, ids, memory);
    return status;
}

/* It does nothing at all until the others have given it up: going to destroy its workspace would tell them more. */
static void stay_away(const fault_run *run)
{
    while (__atomic_load_n(run->done, __ATOMIC_ACQUIRE) < run->ranks - 1)
        usleep(1000);
}

static void *run_rank(void *argument)
{
    fault_rank *me = argument;
    const fault_run *run = me->run;
    bool culprit = mok_group_rank(me->group) == run->culprit;
    mok_config cfg = MOK_INIT(mok_config);
    mok_plan plan = MOK_INIT(mok_plan);
    mok_workspace *w = NULL;
    void *memory = NULL, *ids = NULL;
    cfg.backend = run->backend;
    cfg.hidden = cfg.intermediate = 64;
    cfg.num_experts = 4;
    cfg.topk = 1;
    cfg.max_tokens = TOKENS;
    cfg.cpu_threads = 1;
    cfg.timeout_ms = run->kind != ABSENT ? TIMEOUT_MS : run->backend == MOK_BACKEND_CUDA ? SHORT_TIMEOUT_MS_CUDA : SHORT_TIMEOUT_MS;
    me->created = mok_workspace_create(me->group, &cfg, &w);
    if (me->created != MOK_OK) {
        __atomic_add_fetch(run->done, 1, __ATOMIC_RELEASE);
        return NULL;
    }
    (void)mok_workspace_plan(w, &plan);
    me->created = mok_memory_alloc(w, (size_t)plan.schedule_bytes, &memory);
    if (me->created == MOK_OK)
        me->created = mok_memory_alloc(w, TOKENS * sizeof(int32_t), &ids);
    if (me->created == MOK_OK)
        me->created = copy_ids(w, ids, 0);
    if (culprit && run->kind == ABSENT) {
        stay_away(run);
    } else if (me->created == MOK_OK) {
        me->faulty = faulty_call(run, culprit, w, ids, memory);
        snprintf(me->sentence, sizeof me->sentence, "%s%s", mok_last_error(), soak_spoils("told") && mok_group_rank(me->group) == 0 ? "!" : "");
        if (copy_ids(w, ids, 0) == MOK_OK)
            me->after = schedule(w, 3, ids, memory);
    }
    __atomic_add_fetch(run->done, 1, __ATOMIC_RELEASE);
    mok_memory_free(w, ids);
    mok_memory_free(w, memory);
    mok_workspace_destroy(w);
    return NULL;
}

static mok_status expected(const fault_run *run, bool culprit)
{
    switch (run->kind) {
    case BAD_ID: return MOK_E_ROUTE;
    case REFUSAL: return culprit ? MOK_OK : MOK_E_PEER;
    case OTHER_LAYER: return MOK_E_MISMATCH;
    default: return culprit ? MOK_OK : MOK_E_TIMEOUT;
    }
}

static bool judge(const fault_run *run, char *error, size_t size)
{
    const char *said = NULL;
    for (int32_t r = 0; r < run->ranks; r++) {
        const fault_rank *f = &run->rank[r];
        bool culprit = r == run->culprit, absent = run->kind == ABSENT;
        if (f->created != MOK_OK || f->faulty != expected(run, culprit) || (!absent && f->after != MOK_OK) || (absent && !culprit && f->after != MOK_E_STATE)) {
            snprintf(error, size, "%s on rank %d of %d: rank %d got %s, %s and %s: %.200s", names[run->kind], run->culprit, run->ranks, r, mok_status_name(f->created),
                     mok_status_name(f->faulty), mok_status_name(f->after), f->sentence);
            return false;
        }
        if (absent || f->faulty == MOK_OK)
            continue;
        if (said && strcmp(said, f->sentence)) {
            snprintf(error, size, "%s: rank %d is told \"%.200s\", another \"%.200s\"", names[run->kind], r, f->sentence, said);
            return false;
        }
        said = f->sentence;
    }
    return true;
}

bool soak_fault(uint64_t seed, mok_backend_id backend, char *error, size_t size)
{
    static const int32_t one_gpu[MAX_RANKS];
    uint64_t s = seed;
    fault_run run;
    mok_group *groups[MAX_RANKS];
    memset(&run, 0, sizeof run);
    run.backend = backend;
    run.kind = (fault_kind)soak_below(&s, NUM_FAULTS);
    run.ranks = 2 + (int32_t)soak_below(&s, MAX_RANKS - 1);
    run.culprit = (int32_t)soak_below(&s, run.ranks);
    if (mok_group_create_local(run.ranks, backend == MOK_BACKEND_CUDA ? one_gpu : NULL, groups) != MOK_OK) {
        snprintf(error, size, "%s", mok_last_error());
        return false;
    }
    int32_t started = 0, done = 0;
    run.done = &done;
    for (; started < run.ranks; started++) {
        run.rank[started].run = &run;
        run.rank[started].group = groups[started];
        if (pthread_create(&run.rank[started].thread, NULL, run_rank, &run.rank[started]))
            break;
    }
    for (int32_t r = 0; r < started; r++)
        pthread_join(run.rank[r].thread, NULL);
    for (int32_t r = 0; r < run.ranks; r++)
        mok_group_destroy(groups[r]);
    if (started < run.ranks) {
        snprintf(error, size, "no thread for rank %d", started);
        return false;
    }
    return judge(&run, error, size);
}
