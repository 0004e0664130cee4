/* mok soak: one fault on cpu ranks, seen by all of them. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layer.h"
#include "soak.h"

enum { MAX_RANKS = 4, TOKENS = 8, TIMEOUT_MS = 30000, SHORT_TIMEOUT_MS = 60 };
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
    int32_t ranks, culprit;
    fault_rank rank[MAX_RANKS];
} fault_run;

static mok_status schedule(mok_workspace *w, uint64_t layer, const int32_t *ids, void *memory)
{
    mok_schedule_args a = MOK_INIT(mok_schedule_args);
    a.layer = layer;
    a.num_tokens = TOKENS;
    a.expert_ids = ids;
    a.schedule = memory;
    return mok_schedule(w, &a, NULL);
}

static mok_status faulty_call(const fault_run *run, bool culprit, mok_workspace *w, int32_t *ids, void *memory)
{
    if (culprit && run->kind == REFUSAL)
        return mok_refuse(w, MOK_CALL_SCHEDULE, 1, "refused by mok soak", NULL);
    if (culprit && run->kind == BAD_ID)
        ids[3] = 77;
    mok_status status = schedule(w, culprit && run->kind == OTHER_LAYER ? 2 : 1, ids, memory);
    ids[3] = 0;
    return status;
}

static void *run_rank(void *argument)
{
    fault_rank *me = argument;
    const fault_run *run = me->run;
    bool culprit = mok_group_rank(me->group) == run->culprit;
    mok_config cfg = MOK_INIT(mok_config);
    mok_plan plan = MOK_INIT(mok_plan);
    mok_workspace *w = NULL;
    int32_t ids[TOKENS] = {0};
    cfg.hidden = cfg.intermediate = 64;
    cfg.num_experts = 4;
    cfg.topk = 1;
    cfg.max_tokens = TOKENS;
    cfg.cpu_threads = 1;
    cfg.timeout_ms = run->kind == ABSENT ? SHORT_TIMEOUT_MS : TIMEOUT_MS;
    me->created = mok_workspace_create(me->group, &cfg, &w);
    if (me->created != MOK_OK)
        return NULL;
    void *memory = NULL;
    (void)mok_workspace_plan(w, &plan);
    me->created = mok_memory_alloc(w, (size_t)plan.schedule_bytes, &memory);
    if (me->created == MOK_OK && !(culprit && run->kind == ABSENT)) {
        me->faulty = faulty_call(run, culprit, w, ids, memory);
        snprintf(me->sentence, sizeof me->sentence, "%s%s", mok_last_error(), soak_spoils("told") && mok_group_rank(me->group) == 0 ? "!" : "");
        me->after = schedule(w, 3, ids, memory);
    }
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

bool soak_fault(uint64_t seed, char *error, size_t size)
{
    uint64_t s = seed;
    fault_run run;
    mok_group *groups[MAX_RANKS];
    memset(&run, 0, sizeof run);
    run.kind = (fault_kind)soak_below(&s, NUM_FAULTS);
    run.ranks = 2 + (int32_t)soak_below(&s, MAX_RANKS - 1);
    run.culprit = (int32_t)soak_below(&s, run.ranks);
    if (mok_group_create_local(run.ranks, NULL, groups) != MOK_OK) {
        snprintf(error, size, "%s", mok_last_error());
        return false;
    }
    int32_t started = 0;
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
