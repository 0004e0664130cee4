/* Ranks as processes, for tests: each is forked from the test program, finds the others through a board in shared memory, and reports by its exit
 * status and by what it leaves on the board.
 *
 *   static void body(process_env *e) { … e->env.group … }      runs in each child, ranks 0 … P-1
 *   processes_run(3, body, &data, statuses);                     wait statuses of the children
 */
#ifndef MOK_TEST_PROCESSES_H
#define MOK_TEST_PROCESSES_H
#include "ranks.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { PROCESSES_MAX = 8, PROCESSES_SLOT = 4096 };

/* One meeting place; a group of its own has one of its own. */
typedef struct process_place {
    int32_t arrived, left;
    int32_t members;         /* 0: nobody uses it yet */
    char slot[PROCESSES_MAX][PROCESSES_SLOT];
} process_place;

typedef struct process_report { /* left by a child for the parent */
    char sentence[512];
    double seconds;
    int32_t value;
} process_report;

typedef struct process_board {
    process_place place[4];
    process_report report[PROCESSES_MAX];
    int32_t stage[PROCESSES_MAX]; /* how far a child is */
    pid_t pid[PROCESSES_MAX];
} process_board;

typedef struct process_env {
    ranks_env env;           /* group, rank, ranks; w and plan once process_workspace has made them */
    process_board *board;
    void *user;
    process_place *place;    /* of the group */
    int32_t round;
} process_env;

static inline void *processes_shared(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        exit(1);
    return p;
}

static inline double processes_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void processes_wait(const int32_t *counter, int32_t count)
{
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < count)
        usleep(200);
}

/* The bootstrap's all_gather. */
static int process_all_gather(void *user, const void *send, void *recv, size_t bytes)
{
    process_env *e = (process_env *)user;
    process_place *p = e->place;
    int32_t n = e->env.ranks;
    if (bytes > PROCESSES_SLOT)
        return 1;
    e->round++;
    memcpy(p->slot[e->env.rank], send, bytes);
    __atomic_add_fetch(&p->arrived, 1, __ATOMIC_ACQ_REL);
    processes_wait(&p->arrived, n * e->round);
    for (int32_t r = 0; r < n; r++)
        memcpy((char *)recv + (size_t)r * bytes, p->slot[r], bytes);
    __atomic_add_fetch(&p->left, 1, __ATOMIC_ACQ_REL);
    processes_wait(&p->left, n * e->round);
    return 0;
}

/* Makes a group of `ranks` processes, in which this one is `rank`, at one of the board's places. */
static inline mok_status process_group(process_env *e, int32_t place, int32_t rank, int32_t ranks)
{
    mok_bootstrap b = MOK_INIT(mok_bootstrap);
    e->place = &e->board->place[place];
    e->round = 0;
    e->env.rank = rank;
    e->env.ranks = ranks;
    b.user = e;
    b.all_gather = process_all_gather;
    b.timeout_ms = 20000;
    return mok_group_create_processes(&b, rank, ranks, &e->env.group);
}

static inline mok_status process_workspace(process_env *e, const mok_config *cfg)
{
    mok_status status = mok_workspace_create(e->env.group, cfg, &e->env.w);
    if (status != MOK_OK)
        return status;
    e->env.plan = MOK_INIT(mok_plan);
    e->env.cfg = MOK_INIT(mok_config);
    CHECK_EQ(mok_workspace_plan(e->env.w, &e->env.plan), MOK_OK);
    CHECK_EQ(mok_workspace_config(e->env.w, &e->env.cfg), MOK_OK);
    return MOK_OK;
}

static inline void process_leave(process_env *e)
{
    mok_workspace_destroy(e->env.w);
    mok_group_destroy(e->env.group);
    e->env.w = NULL;
    e->env.group = NULL;
}

static inline void process_stage(process_env *e, int32_t rank, int32_t stage) { __atomic_store_n(&e->board->stage[rank], stage, __ATOMIC_RELEASE); }

static inline process_board *processes_start(int32_t ranks, void (*body)(process_env *), void *user)
{
    process_board *board = (process_board *)processes_shared(sizeof *board);
    fflush(stdout);
    for (int32_t r = 0; r < ranks; r++) {
        pid_t pid = fork();
        if (pid < 0)
            exit(1);
        if (pid == 0) {
            process_env e;
            memset(&e, 0, sizeof e);
            e.board = board;
            e.user = user;
            e.env.rank = r;
            e.env.ranks = ranks;
            test_failures = 0;
            alarm(60);
            body(&e);
            fflush(stdout);
            _exit(test_failures ? 1 : 0);
        }
        board->pid[r] = pid;
    }
    return board;
}

/* All children's wait statuses. */
static inline void processes_join(process_board *board, int32_t ranks, int *statuses)
{
    for (int32_t r = 0; r < ranks; r++) {
        statuses[r] = -1;
        waitpid(board->pid[r], &statuses[r], 0);
    }
}

/* A result whose arrays all processes share. */
static inline void processes_share_result(layer_result *r, const layer_problem *p)
{
    size_t rows = (size_t)(p->tokens * p->cfg.hidden) * 2, routes = (size_t)(p->tokens * p->cfg.topk) * 4;
    size_t matrix = (size_t)(p->cfg.num_experts * p->cfg.intermediate * p->cfg.hidden * r->grad_bytes);
    void **arrays[] = {(void **)&r->out, (void **)&r->dx, (void **)&r->drouter_weights, &r->dgate, &r->dup, &r->ddown};
    size_t bytes[] = {rows, rows, routes, matrix, matrix, matrix};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        free(*arrays[i]);
        *arrays[i] = processes_shared(bytes[i]);
        memset(*arrays[i], 0xff, bytes[i]);
    }
}

static inline void processes_free_result(layer_result *r)
{
    r->out = r->dx = NULL; /* the mappings end with the program */
    r->drouter_weights = NULL;
    r->dgate = r->dup = r->ddown = NULL;
    layer_result_free(r);
}
#endif
