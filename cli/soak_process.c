/* mok soak: ranks as processes on the cpu backend, one of which is killed or stopped in the middle of a call. The others must be told who it was within the
 * time-out, give all memory back, and go on as a group without it, with the bits of one rank in every step. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "layer.h"
#include "soak.h"

enum { MAX_RANKS = 4, SLOT = 4096, STEPS = 4, TIMEOUT_MS = 4000, SLACK_MS = 6000 };

/* Where the processes of one group find each other. */
typedef struct meeting { int32_t arrived, left; char slot[MAX_RANKS][SLOT]; } meeting;

typedef struct verdict { char sentence[512]; int32_t steps; } verdict; /* "" if all was well, and how many steps that was */

typedef struct board {
    meeting first, second;      /* of all ranks, and of those that are left */
    verdict rank[MAX_RANKS];
} board;

/* Decided by the seed, the same in all processes. */
typedef struct plan {
    layer_problem p;
    layer_result want;          /* of one rank */
    int32_t ranks, victim, step; /* when the victim's end begins, */
    int32_t delay_us;           /* and how much later it comes */
    int signal;
    board *board;
} plan;

/* A rank's process. */
typedef struct process {
    const plan *plan;
    meeting *at;                /* of its group */
    int32_t rank, ranks, rounds; /* in that group */
    layer_result got;
    int32_t steps;
    bool is_victim;
    verdict *verdict;
} process;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void wait_for(const int32_t *counter, int32_t count)
{
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < count)
        usleep(100);
}

static int all_gather(void *user, const void *send, void *recv, size_t bytes)
{
    process *me = user;
    if (bytes > SLOT)
        return 1;
    me->rounds++;
    memcpy(me->at->slot[me->rank], send, bytes);
    __atomic_add_fetch(&me->at->arrived, 1, __ATOMIC_ACQ_REL);
    wait_for(&me->at->arrived, me->ranks * me->rounds);
    for (int32_t r = 0; r < me->ranks; r++)
        memcpy((char *)recv + (size_t)r * bytes, me->at->slot[r], bytes);
    __atomic_add_fetch(&me->at->left, 1, __ATOMIC_ACQ_REL);
    wait_for(&me->at->left, me->ranks * me->rounds);
    return 0;
}

static mok_status make_group(process *me, meeting *at, int32_t rank, int32_t ranks, mok_group **group)
{
    mok_bootstrap b = MOK_INIT(mok_bootstrap);
    me->at = at;
    me->rank = rank;
    me->ranks = ranks;
    me->rounds = 0;
    b.user = me;
    b.all_gather = all_gather;
    b.timeout_ms = 30000;
    return mok_group_create_processes(&b, rank, ranks, group);
}

/* --- a step ---------------------------------------------------------------------------------------------------------------- */
static void *end_this_process(void *argument)
{
    const plan *p = argument;
    usleep((useconds_t)p->delay_us);
    kill(getpid(), p->signal);
    return NULL;
}

static void spoil(layer_result *r, const layer_problem *p)
{
    size_t weights = (size_t)(p->cfg.num_experts * p->cfg.intermediate * p->cfg.hidden * r->grad_bytes);
    memset(r->out, 0xff, (size_t)(p->tokens * p->cfg.hidden) * 2);
    memset(r->dx, 0xff, (size_t)(p->tokens * p->cfg.hidden) * 2);
    memset(r->drouter_weights, 0xff, (size_t)(p->tokens * p->cfg.topk) * 4);
    memset(r->dgate, 0xff, weights);
    memset(r->dup, 0xff, weights);
    memset(r->ddown, 0xff, weights);
}

static void before_pass(mok_workspace *w, void *user)
{
    process *me = user;
    pthread_t thread;
    (void)w;
    spoil(&me->got, &me->plan->p);
    if (me->is_victim && me->steps == me->plan->step && pthread_create(&thread, NULL, end_this_process, (void *)(uintptr_t)me->plan))
        kill(getpid(), me->plan->signal);
}

/* "" or the name of what is not as one rank has it, of this rank's tokens and experts. */
static const char *difference(const process *me)
{
    const layer_problem *p = &me->plan->p;
    const layer_result *a = &me->got, *b = &me->plan->want;
    int64_t first = p->tokens * me->rank / me->ranks, tokens = p->tokens * (me->rank + 1) / me->ranks - first, expert = 0, experts = 0;
    (void)mok_expert_range(p->cfg.num_experts, me->ranks, me->rank, &expert, &experts);
    int64_t matrix = p->cfg.intermediate * p->cfg.hidden * a->grad_bytes;
    const struct { const char *name; const void *a, *b; int64_t at, bytes; } all[] = {
        {"out", a->out, b->out, first * p->cfg.hidden * 2, tokens * p->cfg.hidden * 2}, {"dx", a->dx, b->dx, first * p->cfg.hidden * 2, tokens * p->cfg.hidden * 2},
        {"drouter_weights", a->drouter_weights, b->drouter_weights, first * p->cfg.topk * 4, tokens * p->cfg.topk * 4},
        {"dgate", a->dgate, b->dgate, expert * matrix, experts * matrix}, {"dup", a->dup, b->dup, expert * matrix, experts * matrix},
        {"ddown", a->ddown, b->ddown, expert * matrix, experts * matrix},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (memcmp((const char *)all[i].a + all[i].at, (const char *)all[i].b + all[i].at, (size_t)all[i].bytes))
            return all[i].name;
    return "";
}

static void after_pass(mok_workspace *w, void *user)
{
    process *me = user;
    (void)w;
    while (me->is_victim && me->steps == me->plan->step) /* the end comes in this step, or right behind it */
        pause();
    me->steps++;
    if (soak_spoils("process") && me->rank == 0)
        me->got.dx[0] ^= 1;
    const char *name = difference(me);
    if (name[0] && !me->verdict->sentence[0])
        snprintf(me->verdict->sentence, sizeof me->verdict->sentence, "step %d: %s of rank %d of %d is not as one rank has it", me->steps, name, me->rank, me->ranks);
}

/* --- a process -------------------------------------------------------------------------------------------------------------- */
static void say(process *me, const char *what, const char *why)
{
    if (!me->verdict->sentence[0])
        snprintf(me->verdict->sentence, sizeof me->verdict->sentence, "%s: %.400s", what, why);
}

static bool names(const char *sentence, int32_t rank)
{
    char waited[32], absent[16];
    const char *missing = strstr(sentence, "not there:");
    snprintf(waited, sizeof waited, "for rank %d ", rank);
    snprintf(absent, sizeof absent, " %d", rank);
    return strstr(sentence, waited) || (missing && strstr(missing, absent));
}

static mok_status run_group(process *me, mok_group *group, int64_t steps, char error[512])
{
    layer_options o = {.ranks = me->ranks, .backend = MOK_BACKEND_CPU, .cpu_threads = 1, .repeat = steps, .before_pass = before_pass, .after_pass = after_pass, .user = me};
    mok_status status = layer_run_rank(&me->plan->p, &o, &me->got, group, error);
    mok_group_destroy(group);
    return status;
}

static void run_process(process *me, const plan *p, int32_t rank)
{
    mok_group *group = NULL;
    char error[512];
    layer_options o = {.ranks = p->ranks, .backend = MOK_BACKEND_CPU};
    me->plan = p;
    me->verdict = &p->board->rank[rank];
    me->is_victim = rank == p->victim;
    if (!layer_result_make(&me->got, &p->p, &o) || make_group(me, &p->board->first, rank, p->ranks, &group) != MOK_OK) {
        say(me, "a group of processes", mok_last_error());
        return;
    }
    double start = now();
    mok_status status = run_group(me, group, STEPS, error);
    double ms = 1e3 * (now() - start);
    if (status != MOK_E_TIMEOUT || !names(error, p->victim))
        say(me, "a rank that was not told who is gone", status == MOK_OK ? "all calls succeeded" : error);
    if (ms > TIMEOUT_MS + SLACK_MS)
        say(me, "a rank that was told too late", error);
    if (layer_heap_mappings())
        say(me, "memory of the old group is left", "");
    me->is_victim = false;
    int32_t place = rank - (rank > p->victim);
    if (make_group(me, &p->board->second, place, p->ranks - 1, &group) != MOK_OK)
        say(me, "the group that is left", mok_last_error());
    else if (run_group(me, group, STEPS, error) != MOK_OK)
        say(me, "a step of the group that is left", error);
    me->verdict->steps = me->steps;
    layer_result_free(&me->got);
}

static bool start_processes(const plan *p, pid_t *pids, char *error, size_t size)
{
    fflush(NULL);
    for (int32_t r = 0; r < p->ranks; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            process me;
            memset(&me, 0, sizeof me);
            alarm(60); /* whatever happens */
            run_process(&me, p, r);
            _exit(0);
        }
        if (pids[r] > 0)
            continue;
        snprintf(error, size, "no process for rank %d", r);
        for (int32_t i = 0; i < r; i++)
            kill(pids[i], SIGKILL), waitpid(pids[i], NULL, 0);
        return false;
    }
    return true;
}

/* All but the victim end by themselves. */
static bool judge(const plan *p, const pid_t *pids, soak_counts *counts, char *error, size_t size)
{
    const char *what = p->signal == SIGKILL ? "killed" : "stopped";
    bool ok = true;
    int status;
    for (int32_t r = 0; r < p->ranks; r++) {
        if (r == p->victim)
            continue;
        waitpid(pids[r], &status, 0);
        const verdict *v = &p->board->rank[r];
        counts->steps += v->steps;
        if (ok && (!WIFEXITED(status) || v->sentence[0])) {
            snprintf(error, size, "rank %d of %d was %s in step %d; rank %d: %.400s", p->victim, p->ranks, what, p->step + 1, r,
                     v->sentence[0] ? v->sentence : "its process did not end well");
            ok = false;
        }
    }
    kill(pids[p->victim], SIGKILL);
    waitpid(pids[p->victim], &status, 0);
    return ok;
}

bool soak_processes(uint64_t seed, soak_counts *counts, char *error, size_t size)
{
    uint64_t s = seed;
    plan p;
    pid_t pids[MAX_RANKS];
    layer_options one = {.ranks = 1, .backend = MOK_BACKEND_CPU, .cpu_threads = 1};
    mok_config cfg = {.hidden = 64 * (1 + soak_below(&s, 2)), .intermediate = 64, .num_experts = 2 + soak_below(&s, 6), .topk = 2, .timeout_ms = TIMEOUT_MS};
    memset(&p, 0, sizeof p);
    p.ranks = 2 + (int32_t)soak_below(&s, MAX_RANKS - 1);
    p.victim = (int32_t)soak_below(&s, p.ranks);
    p.step = (int32_t)soak_below(&s, STEPS - 1);
    p.delay_us = (int32_t)soak_below(&s, 1500);
    p.signal = soak_below(&s, 4) ? SIGKILL : SIGSTOP;
    p.board = mmap(NULL, sizeof *p.board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    bool ok = p.board != MAP_FAILED && layer_make(&p.p, &cfg, 16 + soak_below(&s, 64), LAYER_UNIFORM, 0.1, seed) && layer_result_make(&p.want, &p.p, &one);
    char sentence[512] = "no memory";
    ok = ok && layer_run(&p.p, &one, &p.want, sentence) == MOK_OK;
    snprintf(error, size, "%s", sentence);
    ok = ok && start_processes(&p, pids, error, size) && judge(&p, pids, counts, error, size);
    if (p.board != MAP_FAILED)
        munmap(p.board, sizeof *p.board);
    layer_result_free(&p.want);
    layer_free(&p.p);
    return ok;
}
