/* Ranks as threads, for tests that call the public functions themselves (cli/layer.h runs a whole layer at once).
 *
 *   static void body(ranks_env *e) { … mok_schedule(e->w, …) … }
 *   ranks_run(4, &cfg, body, &data);            every rank: workspace, body, workspace destroyed
 *
 * A check that fails in one rank's body must not leave the others waiting for long: give cfg a timeout_ms. */
#ifndef MOK_TEST_RANKS_H
#define MOK_TEST_RANKS_H
#include "layer.h"
#include "mok.h"
#include "test.h"

#include <pthread.h>

/* Sanitizers make the same work 5 to 30 times slower: tests repeat less there. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define RANKS_SLOW 1
#else
#define RANKS_SLOW 0
#endif

enum { RANKS_MAX = 16, RANKS_TIMEOUT_MS = 60000 };

typedef struct ranks_env {
    mok_group *group;
    mok_workspace *w; /* NULL where ranks_run got no configuration */
    int32_t rank, ranks;
    mok_plan plan;    /* of w */
    mok_config cfg;   /* of w, resolved */
    void *user;
    pthread_barrier_t *barrier;
    const mok_config *wish;
    void (*body)(struct ranks_env *);
} ranks_env;

/* All rank threads wait for each other: the order of what comes before and after is fixed. */
static inline void ranks_meet(ranks_env *e) { pthread_barrier_wait(e->barrier); }

static void *ranks_main(void *argument)
{
    ranks_env *e = (ranks_env *)argument;
    if (e->wish) {
        mok_status status = mok_workspace_create(e->group, e->wish, &e->w);
        if (status != MOK_OK) {
            TEST_FAILED("rank %d: mok_workspace_create gives %s: %s", e->rank, mok_status_name(status), mok_last_error());
            return NULL;
        }
        e->plan = MOK_INIT(mok_plan);
        e->cfg = MOK_INIT(mok_config);
        CHECK_EQ(mok_workspace_plan(e->w, &e->plan), MOK_OK);
        CHECK_EQ(mok_workspace_config(e->w, &e->cfg), MOK_OK);
    }
    e->body(e);
    mok_workspace_destroy(e->w);
    return NULL;
}

static inline void ranks_run_groups(int32_t ranks, mok_group **groups, const mok_config *wish, void (*body)(ranks_env *), void *user)
{
    ranks_env env[RANKS_MAX];
    pthread_t threads[RANKS_MAX];
    pthread_barrier_t barrier;
    memset(env, 0, sizeof env);
    pthread_barrier_init(&barrier, NULL, (unsigned)ranks);
    for (int32_t r = 0; r < ranks; r++) {
        env[r].group = groups[r];
        env[r].rank = r;
        env[r].ranks = ranks;
        env[r].user = user;
        env[r].barrier = &barrier;
        env[r].wish = wish;
        env[r].body = body;
        if (pthread_create(&threads[r], NULL, ranks_main, &env[r])) {
            printf("FAIL (no thread)\n");
            exit(1);
        }
    }
    for (int32_t r = 0; r < ranks; r++)
        pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&barrier);
}

/* wish NULL: no workspace, env.w is NULL. */
static inline void ranks_run(int32_t ranks, const mok_config *wish, void (*body)(ranks_env *), void *user)
{
    mok_group *groups[RANKS_MAX];
    REQUIRE(ranks <= RANKS_MAX);
    REQUIRE(mok_group_create_local(ranks, NULL, groups) == MOK_OK);
    ranks_run_groups(ranks, groups, wish, body, user);
    for (int32_t r = 0; r < ranks; r++)
        mok_group_destroy(groups[r]);
}

static inline void *ranks_block(int64_t bytes)
{
    void *p = NULL;
    if (posix_memalign(&p, 256, (size_t)(bytes > 0 ? bytes : 1)))
        exit(1);
    memset(p, 0xff, (size_t)bytes);
    return p;
}
static inline void *ranks_schedule_block(const ranks_env *e) { return ranks_block(e->plan.schedule_bytes); }
static inline void *ranks_context_block(const ranks_env *e) { return ranks_block(e->plan.context_bytes); }

static inline mok_config ranks_config(int64_t hidden, int64_t intermediate, int64_t experts, int64_t topk, int64_t max_tokens)
{
    mok_config c = MOK_INIT(mok_config);
    c.hidden = hidden;
    c.intermediate = intermediate;
    c.num_experts = experts;
    c.topk = topk;
    c.max_tokens = max_tokens;
    c.backend = MOK_BACKEND_CPU;
    c.cpu_threads = 1;
    c.timeout_ms = RANKS_TIMEOUT_MS;
    return c;
}

/* --- arguments of the calls, for this rank's part of a problem: tokens [first, first + tokens) ----------------------------- */
typedef struct ranks_part { int64_t first, tokens; } ranks_part;

/* Tokens as evenly as experts; `tokens_of_rank` (may be NULL) decides otherwise. */
static inline ranks_part ranks_part_of(const ranks_env *e, int64_t tokens, const int64_t *tokens_of_rank)
{
    ranks_part part = {tokens * e->rank / e->ranks, 0};
    part.tokens = tokens * (e->rank + 1) / e->ranks - part.first;
    if (tokens_of_rank) {
        part = (ranks_part){0, tokens_of_rank[e->rank]};
        for (int32_t r = 0; r < e->rank; r++)
            part.first += tokens_of_rank[r];
    }
    return part;
}

static inline mok_schedule_args ranks_schedule_args(const layer_problem *p, ranks_part part, void *schedule)
{
    mok_schedule_args a = MOK_INIT(mok_schedule_args);
    a.num_tokens = part.tokens;
    a.expert_ids = p->expert_ids + part.first * p->cfg.topk;
    a.schedule = schedule;
    return a;
}

static inline mok_weights ranks_weights(const ranks_env *e, const layer_problem *p)
{
    int64_t at = e->plan.experts_first * p->cfg.intermediate * p->cfg.hidden;
    mok_weights w;
    memset(&w, 0, sizeof w);
    w.gate.packed = p->gate + at;
    w.up.packed = p->up + at;
    w.down.packed = p->down + at;
    w.shared_gate.packed = p->shared_gate;
    w.shared_up.packed = p->shared_up;
    w.shared_down.packed = p->shared_down;
    w.shared_output_gate = p->shared_output_gate;
    return w;
}

static inline mok_forward_args ranks_forward_args(const ranks_env *e, const layer_problem *p, ranks_part part, const void *schedule, void *context,
                                                  layer_result *r)
{
    mok_forward_args a = MOK_INIT(mok_forward_args);
    a.num_tokens = part.tokens;
    a.schedule = schedule;
    a.x = p->x + part.first * p->cfg.hidden;
    a.router_weights = p->router_weights + part.first * p->cfg.topk;
    a.weights = ranks_weights(e, p);
    a.context = context;
    a.out = r->out + part.first * p->cfg.hidden;
    return a;
}

/* All gradients, fresh, into this rank's part of r. */
static inline mok_backward_args ranks_backward_args(const ranks_env *e, const layer_problem *p, ranks_part part, const void *schedule,
                                                    const void *context, layer_result *r)
{
    mok_backward_args a = MOK_INIT(mok_backward_args);
    int64_t at = e->plan.experts_first * p->cfg.intermediate * p->cfg.hidden * r->grad_bytes;
    int64_t shared = e->rank * p->cfg.shared_intermediate * p->cfg.hidden * r->grad_bytes;
    a.num_tokens = part.tokens;
    a.schedule = schedule;
    a.context = context;
    a.dout = p->dout + part.first * p->cfg.hidden;
    a.x = p->x + part.first * p->cfg.hidden;
    a.router_weights = p->router_weights + part.first * p->cfg.topk;
    a.weights = ranks_weights(e, p);
    a.dx = r->dx + part.first * p->cfg.hidden;
    a.drouter_weights = r->drouter_weights + part.first * p->cfg.topk;
    a.grads.gate.packed = (char *)r->dgate + at;
    a.grads.up.packed = (char *)r->dup + at;
    a.grads.down.packed = (char *)r->ddown + at;
    if (p->cfg.shared_intermediate) {
        a.grads.shared_gate.packed = (char *)r->dshared_gate + shared;
        a.grads.shared_up.packed = (char *)r->dshared_up + shared;
        a.grads.shared_down.packed = (char *)r->dshared_down + shared;
    }
    if (p->cfg.shared_gate)
        a.grads.shared_output_gate.packed = (char *)r->dshared_output_gate + e->rank * p->cfg.hidden * r->grad_bytes;
    mok_grad *all[] = {&a.grads.gate, &a.grads.up, &a.grads.down, &a.grads.shared_gate, &a.grads.shared_up, &a.grads.shared_down, &a.grads.shared_output_gate};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        all[i]->dtype = r->grad_bytes == 4 ? MOK_FP32 : MOK_BF16;
    return a;
}

/* One call that must succeed; says which one did not. */
#define RANKS_OK(call)                                                                                                     \
    do {                                                                                                                   \
        mok_status status_ = (call);                                                                                       \
        if (status_ != MOK_OK)                                                                                             \
            TEST_FAILED("rank %d: %s gives %s: %s", e->rank, #call, mok_status_name(status_), mok_last_error());           \
    } while (0)
/* One call that must fail so, with these words in its sentence. */
#define RANKS_FAIL(call, want, words)                                                                                      \
    do {                                                                                                                   \
        mok_status status_ = (call);                                                                                       \
        if (status_ != (want) || !strstr(mok_last_error(), words))                                                         \
            TEST_FAILED("rank %d: %s gives %s: \"%s\"; expected %s with \"%s\"", e->rank, #call, mok_status_name(status_), \
                        mok_last_error(), mok_status_name(want), words);                                                   \
    } while (0)

/* --- results ------------------------------------------------------------------------------------------------------------ */
/* Everything that does not depend on the number of ranks has the same bits. */
static inline void ranks_same_results(const char *what, const layer_problem *p, const layer_result *a, const layer_result *b, bool backward)
{
    int64_t n = p->tokens * p->cfg.hidden, routed = p->cfg.num_experts * p->cfg.intermediate * p->cfg.hidden * a->grad_bytes;
    int before = test_failures;
    CHECK_EQ(a->grad_bytes, b->grad_bytes);
    CHECK_BYTES(a->out, b->out, (size_t)n * 2);
    if (backward) {
        CHECK_BYTES(a->dx, b->dx, (size_t)n * 2);
        CHECK_BYTES(a->drouter_weights, b->drouter_weights, (size_t)(p->tokens * p->cfg.topk) * 4);
        CHECK_BYTES(a->dgate, b->dgate, (size_t)routed);
        CHECK_BYTES(a->dup, b->dup, (size_t)routed);
        CHECK_BYTES(a->ddown, b->ddown, (size_t)routed);
    }
    if (test_failures != before)
        printf("  … in %s\n", what);
}
#endif
