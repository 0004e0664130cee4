/* mok bench --only link: rows from GPU to GPU, by the stages' own code and as fast as they go at all, in alternation. Every move goes into poisoned
 * memory and is checked by the library. */
#define MOK_EXPERIMENTAL
#include "bench_link.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "term.h"
#include "try.h"

enum { EXPERTS_OF_RANK = 4, TIMEOUT_MS = 60000, BOARD_BYTES = 4096 };

/* The board on which ranks that are processes find each other, and on which all leave their numbers. */
typedef struct board {
    int32_t arrived, failed;                        /* at the meeting place; a rank has a sentence */
    char slot[BENCH_LINK_MAX_RANKS][BOARD_BYTES];
    char sentence[BENCH_LINK_MAX_RANKS][512];
    double seconds[];                               /* [case, work, round, rank] */
} board;

typedef struct rank_job {
    bench_link_run *run;
    int32_t rank, meetings;
    mok_group *group;
    term_progress progress;
} rank_job;

struct bench_link_run {
    bench_link_settings s;
    board *shared;
    size_t shared_bytes;
    int32_t started;
    pid_t child[BENCH_LINK_MAX_RANKS];
    pthread_t thread[BENCH_LINK_MAX_RANKS];
    rank_job job[BENCH_LINK_MAX_RANKS];
};

static const int32_t work_bits[] = {
#define BITS(name, bits, ceiling) bits,
    BENCH_LINK_WORKS(BITS)
#undef BITS
};
static const int work_ceiling[] = {
#define CEILING(name, bits, ceiling) ceiling,
    BENCH_LINK_WORKS(CEILING)
#undef CEILING
};

/* What crosses of a row of bf16 of so many bytes; in MXFP8 of a row as wide: a byte for each number, and one for 32. */
static int64_t row_bytes_of(int64_t bf16_bytes, int work)
{
    int64_t cols = bf16_bytes / 2;
    return work_bits[work] & MOK_LINK_MX ? cols + cols / 32 : bf16_bytes;
}

/* ---------------------------------------------------------------------------------------------------------------- routes -- */

/* balanced: every rank sends as many rows to each other one. most: three quarters of all rows go to rank 0. one: all of them. */
static const char *const routings[BENCH_LINK_ROUTINGS] = {"balanced", "most to rank 0", "all to rank 0"};

static int32_t num_routings(const bench_link_settings *s) { return s->ranks > 1 ? BENCH_LINK_ROUTINGS : 1; }

/* The rank whose experts a token chooses, never its own unless there is only one; -1: none. */
static int32_t destination(const bench_link_settings *s, int routing, int32_t rank, int64_t token)
{
    bool hot = routing == 2 || (routing == 1 && token % 4 != 3);
    if (s->ranks == 1)
        return 0;
    if (hot)
        return rank == 0 ? -1 : 0;
    return (int32_t)((rank + 1 + token / 4 % (s->ranks - 1)) % s->ranks);
}

static int32_t expert_of(const bench_link_settings *s, int routing, int32_t rank, int64_t token)
{
    int32_t to = destination(s, routing, rank, token);
    return to < 0 ? -1 : to * EXPERTS_OF_RANK + (int32_t)(token % EXPERTS_OF_RANK);
}

/* ------------------------------------------------------------------------------------------------------------- one rank -- */

static double *seconds_at(const bench_link_run *run, int64_t number, int work, int64_t round, int32_t rank)
{
    const bench_link_settings *s = &run->s;
    return &run->shared->seconds[((number * BENCH_LINK_NUM_WORKS + work) * s->repeat + round) * s->ranks + rank];
}

/* One round, all works; the first round is the warm-up and is not kept. */
static mok_status run_round(rank_job *job, mok_workspace *w, const void *schedule, int64_t number, int64_t round)
{
    const bench_link_settings *s = &job->run->s;
    for (int work = 0; work < BENCH_LINK_NUM_WORKS; work++) {
        mok_link_args a = {.schedule = schedule, .num_tokens = s->tokens, .work = work_bits[work], .blocks = s->blocks};
        mok_link_result r = {0};
        TRY(mok_link_move(w, &a, NULL, &r));
        if (r.wrong_words) {
            snprintf(job->run->shared->sentence[job->rank], sizeof job->run->shared->sentence[0], "rank %d: %lld of the words it received are wrong (%s, rows of %lld bytes, work %d)",
                     job->rank, (long long)r.wrong_words, routings[number % num_routings(s)], (long long)s->row_bytes[number / num_routings(s)], work_bits[work]);
            return MOK_E_BUG;
        }
        int64_t counted = r.rows_peer * row_bytes_of(s->row_bytes[number / num_routings(s)], work);
        if (!(work_bits[work] & MOK_LINK_PLAIN) && (work_bits[work] & MOK_LINK_PULL) && r.bytes_pulled_peer != counted) {
            snprintf(job->run->shared->sentence[job->rank], sizeof job->run->shared->sentence[0], "rank %d: %lld bytes were counted over the link, but its %lld rows are %lld (work %d)",
                     job->rank, (long long)r.bytes_pulled_peer, (long long)r.rows_peer, (long long)counted, work_bits[work]);
            return MOK_E_BUG;
        }
        if (round >= 0)
            *seconds_at(job->run, number, work, round, job->rank) = r.seconds;
    }
    return MOK_OK;
}

static mok_status run_routing(rank_job *job, mok_workspace *w, int64_t number, int32_t *ids, void *ids_there, void *schedule)
{
    const bench_link_settings *s = &job->run->s;
    mok_schedule_args a = MOK_INIT(mok_schedule_args);
    for (int64_t t = 0; t < s->tokens; t++)
        ids[t] = expert_of(s, (int)(number % num_routings(s)), job->rank, t);
    TRY(mok_memory_copy(w, ids_there, ids, sizeof *ids * (size_t)s->tokens));
    a.num_tokens = s->tokens;
    a.expert_ids = ids_there;
    a.schedule = schedule;
    TRY(mok_schedule(w, &a, NULL));
    TRY(mok_wait(w));
    for (int64_t round = -1; round < s->repeat; round++) {
        TRY(run_round(job, w, schedule, number, round));
        if (job->rank == 0)
            term_progress_update(&job->progress, number * (s->repeat + 1) + round + 2);
    }
    return MOK_OK;
}

static mok_config config_of(const bench_link_settings *s, int64_t row_bytes)
{
    mok_config c = MOK_INIT(mok_config);
    mok_plan plan = MOK_INIT(mok_plan);
    c.hidden = row_bytes / 2;
    c.intermediate = 64;
    c.num_experts = s->ranks * EXPERTS_OF_RANK;
    c.topk = 1;
    c.max_tokens = s->tokens;
    c.save = MOK_SAVE_NONE;
    c.backend = MOK_BACKEND_CUDA;
    c.timeout_ms = TIMEOUT_MS;
    if (mok_plan_query(&c, s->ranks, 0, 0, 0, 0, &plan, NULL, NULL) == MOK_OK)
        c.ring_rows = plan.capacity_rows; /* no slot is used twice */
    return c;
}

static mok_status run_rows(rank_job *job, int32_t which, int32_t *ids)
{
    const bench_link_settings *s = &job->run->s;
    const mok_config c = config_of(s, s->row_bytes[which]);
    mok_workspace *w = NULL;
    mok_plan plan = MOK_INIT(mok_plan);
    void *ids_there = NULL, *schedule = NULL;
    mok_status status = mok_workspace_create(job->group, &c, &w);
    if (status == MOK_OK)
        status = mok_workspace_plan(w, &plan);
    if (status == MOK_OK)
        status = mok_memory_alloc(w, sizeof *ids * (size_t)s->tokens, &ids_there);
    if (status == MOK_OK)
        status = mok_memory_alloc(w, (size_t)plan.schedule_bytes, &schedule);
    for (int routing = 0; routing < num_routings(s) && status == MOK_OK; routing++)
        status = run_routing(job, w, (int64_t)which * num_routings(s) + routing, ids, ids_there, schedule);
    if (w) {
        mok_memory_free(w, ids_there);
        mok_memory_free(w, schedule);
    }
    mok_workspace_destroy(w);
    return status;
}

/* The bootstrap of ranks that are processes: a meeting on the board. 1: somebody did not come in time. */
static int meet(void *user, const void *send, void *recv, size_t bytes)
{
    rank_job *job = user;
    board *b = job->run->shared;
    int32_t ranks = job->run->s.ranks, wanted[2] = {ranks * (2 * job->meetings + 1), ranks * (2 * job->meetings + 2)};
    double start = term_now();
    if (bytes > BOARD_BYTES)
        return 1;
    job->meetings++;
    memcpy(b->slot[job->rank], send, bytes);
    for (int half = 0; half < 2; half++) { /* all have written; all have read */
        __atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL);
        while (__atomic_load_n(&b->arrived, __ATOMIC_ACQUIRE) < wanted[half]) {
            if (term_now() - start > 1e-3 * TIMEOUT_MS || __atomic_load_n(&b->failed, __ATOMIC_ACQUIRE))
                return 1;
            sched_yield();
        }
        for (int32_t r = 0; r < ranks && half == 0; r++)
            memcpy((char *)recv + (size_t)r * bytes, b->slot[r], bytes);
    }
    return 0;
}

static mok_status join_processes(rank_job *job)
{
    mok_bootstrap b = MOK_INIT(mok_bootstrap);
    b.user = job;
    b.all_gather = meet;
    b.timeout_ms = TIMEOUT_MS;
    b.set_device = true;
    b.device = job->run->s.devices[job->rank];
    return mok_group_create_processes(&b, job->rank, job->run->s.ranks, &job->group);
}

static bool run_rank(rank_job *job)
{
    const bench_link_settings *s = &job->run->s;
    char *sentence = job->run->shared->sentence[job->rank];
    int32_t *ids = malloc(sizeof *ids * (size_t)s->tokens);
    mok_status status = !ids ? MOK_E_MEMORY : s->processes ? join_processes(job) : MOK_OK;
    if (job->rank == 0)
        term_progress_start(&job->progress, "measuring", "round", 0, (int64_t)s->num_rows * num_routings(s) * (s->repeat + 1));
    for (int32_t i = 0; i < s->num_rows && status == MOK_OK; i++)
        status = run_rows(job, i, ids);
    if (job->rank == 0)
        term_progress_clear(&job->progress);
    if (status != MOK_OK && !*sentence)
        snprintf(sentence, sizeof job->run->shared->sentence[0], "%s", ids ? mok_last_error() : "out of memory");
    if (status != MOK_OK)
        __atomic_store_n(&job->run->shared->failed, 1, __ATOMIC_RELEASE);
    free(ids);
    mok_group_destroy(job->group);
    job->group = NULL;
    return status == MOK_OK;
}

static void *thread_main(void *job) { return run_rank(job) ? NULL : job; }

/* ------------------------------------------------------------------------------------------------------------- all ranks -- */

static bool start_threads(bench_link_run *run, char *error, size_t error_size)
{
    mok_group *groups[BENCH_LINK_MAX_RANKS];
    if (mok_group_create_local(run->s.ranks, run->s.devices, groups) != MOK_OK) {
        snprintf(error, error_size, "%s", mok_last_error());
        return false;
    }
    for (int32_t r = 0; r < run->s.ranks; r++)
        run->job[r].group = groups[r];
    for (; run->started < run->s.ranks; run->started++)
        if (pthread_create(&run->thread[run->started], NULL, thread_main, &run->job[run->started]) != 0)
            break;
    if (run->started == run->s.ranks)
        return true;
    snprintf(error, error_size, "only %d of %d rank threads could be started", run->started, run->s.ranks);
    _exit(1); /* those that run wait for the others */
}

static bool start_processes(bench_link_run *run, char *error, size_t error_size)
{
    fflush(NULL);
    for (; run->started < run->s.ranks; run->started++) {
        pid_t pid = fork();
        if (pid == 0)
            _exit(run_rank(&run->job[run->started]) ? 0 : 1);
        if (pid < 0)
            break;
        run->child[run->started] = pid;
    }
    if (run->started == run->s.ranks)
        return true;
    __atomic_store_n(&run->shared->failed, 1, __ATOMIC_RELEASE); /* the others leave their meeting */
    snprintf(error, error_size, "only %d of %d rank processes could be started", run->started, run->s.ranks);
    return false;
}

static void free_run(bench_link_run *run)
{
    if (run->shared)
        munmap(run->shared, run->shared_bytes);
    free(run);
}

bench_link_run *bench_link_start(const bench_link_settings *s, char *error, size_t error_size)
{
    bench_link_run *run = calloc(1, sizeof *run);
    if (!run) {
        snprintf(error, error_size, "out of memory");
        return NULL;
    }
    run->s = *s;
    run->shared_bytes = sizeof *run->shared + sizeof(double) * (size_t)(s->num_rows * BENCH_LINK_ROUTINGS * BENCH_LINK_NUM_WORKS * s->repeat * s->ranks);
    run->shared = mmap(NULL, run->shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (run->shared == MAP_FAILED)
        run->shared = NULL;
    for (int32_t r = 0; r < s->ranks; r++)
        run->job[r] = (rank_job){.run = run, .rank = r};
    if (!run->shared)
        snprintf(error, error_size, "no memory for the times of %d ranks", s->ranks);
    else if (s->processes ? start_processes(run, error, error_size) : start_threads(run, error, error_size))
        return run;
    free_run(run);
    return NULL;
}

/* Waits for all; the sentence of the first rank that has one. */
static bool join_all(bench_link_run *run, char *error, size_t error_size)
{
    bool ok = true;
    for (int32_t r = 0; r < run->started; r++) {
        int status = 0;
        void *failed = NULL;
        if (run->s.processes)
            waitpid(run->child[r], &status, 0);
        else
            pthread_join(run->thread[r], &failed);
        if (!status && !failed)
            continue;
        if (status && !*run->shared->sentence[r])
            snprintf(run->shared->sentence[r], sizeof run->shared->sentence[r], "the process of rank %d ended with wait status %d", r, status);
        if (ok)
            snprintf(error, error_size, "%s", run->shared->sentence[r]);
        ok = false;
    }
    return ok;
}

/* ----------------------------------------------------------------------------------------------------------- summing up -- */

static const char *row_name(int64_t bytes)
{
    static const struct { int64_t bytes; const char *name; } known[] = {
        {14336, "kimi-k2.7-code, deepseek-v4-pro, deepseek-v3"}, {12288, "glm-5.2"}, {8192, "qwen3.5-397b-a17b, mixtral-8x7b"}, {4096, "qwen3-30b-a3b, olmoe-1b-7b"},
        {5760, "gpt-oss-20b"}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].bytes == bytes)
            return known[i].name;
    return "";
}

/* A pull brings rows in, a push sends them back: the busiest rank's rows are what a direction carries. Both together load each of a rank's
 * directions with its rows in and its rows out. */
static void count_rows(const bench_link_settings *s, int routing, bench_link_case *c)
{
    int64_t in[BENCH_LINK_MAX_RANKS] = {0}, out[BENCH_LINK_MAX_RANKS] = {0};
    for (int32_t r = 0; r < s->ranks; r++)
        for (int64_t t = 0; t < s->tokens; t++) {
            int32_t to = destination(s, routing, r, t);
            if (to >= 0)
                in[to]++, out[r]++;
        }
    for (int32_t r = 0; r < s->ranks; r++) {
        int64_t most = in[r] > out[r] ? in[r] : out[r];
        c->rows = most > c->rows ? most : c->rows;
        c->rows_both = in[r] + out[r] > c->rows_both ? in[r] + out[r] : c->rows_both;
    }
}

static double bytes_of(const bench_link_case *c, int work)
{
    bool both = (work_bits[work] & MOK_LINK_PULL) && (work_bits[work] & MOK_LINK_PUSH);
    return work_bits[work] & MOK_LINK_EMPTY ? 0 : (double)((both ? c->rows_both : c->rows) * row_bytes_of(c->row_bytes, work));
}

static bool sum_up_work(const bench_link_run *run, int64_t number, int work, bench_link_case *c)
{
    const bench_link_settings *s = &run->s;
    double *longest = calloc(3 * (size_t)s->repeat, sizeof *longest), *ceiling = longest ? longest + s->repeat : NULL, *share = longest ? ceiling + s->repeat : NULL;
    if (!longest)
        return false;
    for (int64_t i = 0; i < s->repeat; i++) {
        for (int32_t r = 0; r < s->ranks; r++) {
            longest[i] = fmax(longest[i], *seconds_at(run, number, work, i, r));
            if (work_ceiling[work] >= 0)
                ceiling[i] = fmax(ceiling[i], *seconds_at(run, number, work_ceiling[work], i, r));
        }
        share[i] = ceiling[i] / longest[i];
    }
    c->times[work] = (bench_link_time){.p50 = bench_percentile(longest, s->repeat, 0.5), .p99 = bench_percentile(longest, s->repeat, 0.99), .bytes = bytes_of(c, work),
                                       .share = work_ceiling[work] >= 0 ? bench_percentile(share, s->repeat, 0.5) : NAN};
    free(longest);
    return true;
}

static bool sum_up(const bench_link_run *run, bench_link *out)
{
    const bench_link_settings *s = &run->s;
    bool ok = true;
    *out = (bench_link){.settings = *s, .num_cases = s->num_rows * num_routings(s), .one_gpu = s->ranks == 1};
    for (int32_t r = 1; r < s->ranks; r++)
        out->one_gpu |= s->devices[r] == s->devices[0];
    for (int32_t i = 0; i < out->num_cases; i++) {
        bench_link_case *c = &out->cases[i];
        c->routing = s->ranks > 1 ? routings[i % num_routings(s)] : "alone";
        c->row_bytes = s->row_bytes[i / num_routings(s)];
        c->row_of = row_name(c->row_bytes);
        count_rows(s, i % num_routings(s), c);
        for (int work = 0; work < BENCH_LINK_NUM_WORKS; work++)
            ok &= sum_up_work(run, i, work, c);
    }
    return ok;
}

bool bench_link_finish(bench_link_run *run, bench_link *out, char *error, size_t error_size)
{
    bool ok = join_all(run, error, error_size);
    if (ok && !sum_up(run, out)) {
        snprintf(error, error_size, "out of memory");
        ok = false;
    }
    free_run(run);
    return ok;
}
