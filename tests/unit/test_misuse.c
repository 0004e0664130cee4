/* API misuse: every argument of every function wrong once. Each entry has a status, words of its sentence, and leaves every output
 * as it was. The collective calls run on a group of one rank; what the other ranks see of a refusal is in tests/fault. */
#define MOK_EXPERIMENTAL
#include "../multi/ranks.h"
#include "bad_config.h"

#include <sys/wait.h>
#include <unistd.h>

/* Pointers that are never followed. */
static void *const somewhere = (void *)0x1000;

#define EXPECT(call, want, words)                                                                                                         \
    do {                                                                                                                                  \
        mok_status got_ = (call);                                                                                                         \
        if (got_ != (want) || !strstr(mok_last_error(), words))                                                                           \
            TEST_FAILED("%s gives %s, \"%s\"; expected %s with \"%s\"", #call, mok_status_name(got_), mok_last_error(), mok_status_name(want), \
                        words);                                                                                                           \
    } while (0)

TEST(expert_range)
{
    int64_t first = 77, count = 78;
    EXPECT(mok_expert_range(0, 1, 0, &first, &count), MOK_E_ARG, "0 experts");
    EXPECT(mok_expert_range(-4, 1, 0, &first, &count), MOK_E_ARG, "-4 experts");
    EXPECT(mok_expert_range((int64_t)1 << 31, 1, 0, &first, &count), MOK_E_ARG, "2147483648 experts");
    EXPECT(mok_expert_range(8, 0, 0, &first, &count), MOK_E_ARG, "of 0 ranks");
    EXPECT(mok_expert_range(8, -2, 0, &first, &count), MOK_E_ARG, "of -2 ranks");
    EXPECT(mok_expert_range(8, 4, -1, &first, &count), MOK_E_ARG, "rank -1 of 4");
    EXPECT(mok_expert_range(8, 4, 4, &first, &count), MOK_E_ARG, "rank 4 of 4");
    EXPECT(mok_expert_range(8, 4, 0, NULL, &count), MOK_E_ARG, "must not be NULL");
    EXPECT(mok_expert_range(8, 4, 0, &first, NULL), MOK_E_ARG, "must not be NULL");
    CHECK_EQ(first, 77);
    CHECK_EQ(count, 78);
}

TEST(plan_query)
{
    mok_config c = good_config();
    mok_plan plan, before;
    mok_buffer_info infos[2], infos_before[2];
    int32_t num = 2;
    memset(&plan, 0xa5, sizeof plan);
    plan.struct_size = sizeof plan;
    plan.api_version = MOK_API_VERSION;
    memset(infos, 0xa5, sizeof infos);
    before = plan;
    memcpy(infos_before, infos, sizeof infos);
    EXPECT(mok_plan_query(NULL, 4, 0, 0, 0, 0, &plan, infos, &num), MOK_E_ARG, "mok_config is NULL");
    EXPECT(mok_plan_query(&c, 0, 0, 0, 0, 0, &plan, infos, &num), MOK_E_ARG, "num_ranks is 0");
    EXPECT(mok_plan_query(&c, -1, 0, 0, 0, 0, &plan, infos, &num), MOK_E_ARG, "num_ranks is -1");
    EXPECT(mok_plan_query(&c, 4097, 0, 0, 0, 0, &plan, infos, &num), MOK_E_ARG, "num_ranks is 4097");
    EXPECT(mok_plan_query(&c, 4, -1, 0, 0, 0, &plan, infos, &num), MOK_E_ARG, "rank is -1");
    EXPECT(mok_plan_query(&c, 4, 4, 0, 0, 0, &plan, infos, &num), MOK_E_ARG, "rank is 4: it must be from 0 to 3");
    EXPECT(mok_plan_query(&c, 4, 0, -1, 0, 0, &plan, infos, &num), MOK_E_ARG, "-1 SMs");
    EXPECT(mok_plan_query(&c, 4, 0, 5000, 0, 0, &plan, infos, &num), MOK_E_ARG, "5000 SMs");
    EXPECT(mok_plan_query(&c, 4, 0, 0, -128, 0, &plan, infos, &num), MOK_E_ARG, "tiles of -128");
    EXPECT(mok_plan_query(&c, 4, 0, 0, 0, -256, &plan, infos, &num), MOK_E_ARG, "x -256");
    EXPECT(mok_plan_query(&c, 4, 0, 0, 0, 0, NULL, infos, &num), MOK_E_ARG, "mok_plan is NULL");
    EXPECT(mok_plan_query(&c, 4, 0, 0, 0, 0, &plan, infos, NULL), MOK_E_ARG, "num_buffers is NULL");
    CHECK_BYTES(&plan, &before, sizeof plan);
    plan.struct_size = 4;
    EXPECT(mok_plan_query(&c, 4, 0, 0, 0, 0, &plan, infos, &num), MOK_E_ARG, "mok_plan.struct_size is 4");
    plan.struct_size = sizeof plan;
    CHECK_BYTES(&plan, &before, sizeof plan);
    CHECK_BYTES(infos, infos_before, sizeof infos);
    CHECK_EQ(num, 2);
    num = -5; /* no room at all */
    CHECK_EQ(mok_plan_query(&c, 4, 0, 0, 0, 0, &plan, infos, &num), MOK_OK);
    CHECK_BYTES(infos, infos_before, sizeof infos);
}

static int never_all_gather(void *user, const void *send, void *recv, size_t bytes) { (void)user; (void)send; (void)recv; (void)bytes; return 1; }
static int never_heap_alloc(void *user, size_t bytes, void **peers) { (void)user; (void)bytes; (void)peers; return 1; }
static int never_heap_free(void *user, void *own) { (void)user; (void)own; return 1; }

TEST(groups)
{
    mok_group *groups[2] = {somewhere, somewhere}, *group = somewhere;
    EXPECT(mok_group_create_local(0, NULL, groups), MOK_E_ARG, "num_ranks is 0");
    EXPECT(mok_group_create_local(-1, NULL, groups), MOK_E_ARG, "num_ranks is -1");
    EXPECT(mok_group_create_local(4097, NULL, groups), MOK_E_ARG, "num_ranks is 4097");
    EXPECT(mok_group_create_local(2, NULL, NULL), MOK_E_ARG, "groups is NULL");
    mok_provider p = MOK_INIT(mok_provider);
    p.all_gather = never_all_gather;
    p.heap_alloc = never_heap_alloc;
    p.heap_free = never_heap_free;
    EXPECT(mok_group_create(NULL, 0, 1, &group), MOK_E_ARG, "mok_provider is NULL");
    EXPECT(mok_group_create(&p, 0, 1, NULL), MOK_E_ARG, "group is NULL");
    EXPECT(mok_group_create(&p, -1, 1, &group), MOK_E_ARG, "rank -1 of 1");
    EXPECT(mok_group_create(&p, 1, 1, &group), MOK_E_ARG, "rank 1 of 1");
    EXPECT(mok_group_create(&p, 0, 0, &group), MOK_E_ARG, "rank 0 of 0");
    mok_provider q = p;
    q.struct_size = 3;
    EXPECT(mok_group_create(&q, 0, 1, &group), MOK_E_ARG, "mok_provider.struct_size is 3");
    q = p;
    q.api_version = 9;
    EXPECT(mok_group_create(&q, 0, 1, &group), MOK_E_ARG, "mok_provider.api_version is 9");
    q = p;
    q.all_gather = NULL;
    EXPECT(mok_group_create(&q, 0, 1, &group), MOK_E_ARG, "all_gather");
    q = p;
    q.heap_alloc = NULL;
    EXPECT(mok_group_create(&q, 0, 1, &group), MOK_E_ARG, "heap_alloc");
    q = p;
    q.heap_free = NULL;
    EXPECT(mok_group_create(&q, 0, 1, &group), MOK_E_ARG, "heap_free");
    static const int32_t nowhere[] = {0, 99999};
    mok_status status = mok_group_create_local(2, nowhere, groups);
    CHECK(status == MOK_E_ENV || status == MOK_E_ARG); /* no driver or GPU; or no GPU of that number */
    CHECK(strlen(mok_last_error()) > 10);
    CHECK(group == somewhere && groups[0] == somewhere && groups[1] == somewhere);
    mok_group_destroy(NULL);
    CHECK_EQ(mok_group_rank(NULL), -1);
    CHECK_EQ(mok_group_size(NULL), 0);
}

TEST(workspace_create)
{
    mok_group *group;
    mok_workspace *w = somewhere;
    mok_config c = good_config();
    bad_config bad;
    REQUIRE(mok_group_create_local(1, NULL, &group) == MOK_OK);
    CHECK_EQ(mok_group_rank(group), 0);
    CHECK_EQ(mok_group_size(group), 1);
    EXPECT(mok_workspace_create(NULL, &c, &w), MOK_E_ARG, "group is NULL");
    EXPECT(mok_workspace_create(group, &c, NULL), MOK_E_ARG, "workspace is NULL");
    EXPECT(mok_workspace_create(group, NULL, &w), MOK_E_ARG, "mok_config is NULL");
    for (int i = 0; bad_config_at(i, &c, &bad); i++) {
        mok_config before = c;
        mok_status status = mok_workspace_create(group, &c, &w);
        if (status != bad.status && !(strstr(bad.what, "max_tokens = INT32_MAX") && status == MOK_E_SHAPE))
            TEST_FAILED("%s: %s, \"%s\"; expected %s", bad.what, mok_status_name(status), mok_last_error(), mok_status_name(bad.status));
        if (!strstr(mok_last_error(), bad.words) && !strstr(bad.what, "INT32_MAX"))
            TEST_FAILED("%s: \"%s\" does not contain \"%s\"", bad.what, mok_last_error(), bad.words);
        CHECK_BYTES(&c, &before, sizeof c);
    }
    c = good_config();
    c.backend = MOK_BACKEND_CUDA; /* the group was made for the cpu */
    CHECK(mok_workspace_create(group, &c, &w) != MOK_OK);
    CHECK_STR(mok_last_error(), "cuda");
    CHECK(w == somewhere);
    mok_workspace_destroy(NULL);
    mok_group_destroy(group);
}

/* --- the calls ---------------------------------------------------------------------------------------------------------------------
 * One good setting of everything, from which each entry spoils one thing. */
typedef struct good {
    layer_problem p;
    layer_result r;
    void *schedule, *context, *other_schedule;
    ranks_part part;
    int64_t *local, *global;
    mok_schedule_args s;
    mok_forward_args f;
    mok_backward_args b;
    const void *table[8];
    void *grad_table[8];
} good;

static void make_good(ranks_env *e, good *g)
{
    layer_options o = {.ranks = 1};
    memset(g, 0, sizeof *g);
    if (!layer_make(&g->p, &e->cfg, 30, LAYER_DISTINCT, 0.1, 5) || !layer_result_make(&g->r, &g->p, &o))
        exit(1);
    g->schedule = ranks_schedule_block(e);
    g->other_schedule = ranks_schedule_block(e);
    g->context = ranks_context_block(e);
    g->part = (ranks_part){0, 30};
    g->local = ranks_block(8 * e->cfg.num_experts);
    g->global = ranks_block(8 * e->cfg.num_experts);
    g->s = ranks_schedule_args(&g->p, g->part, g->schedule);
    g->s.tokens_per_expert_local = g->local;
    g->s.tokens_per_expert_global = g->global;
    g->f = ranks_forward_args(e, &g->p, g->part, g->schedule, g->context, &g->r);
    g->b = ranks_backward_args(e, &g->p, g->part, g->schedule, g->context, &g->r);
    for (int i = 0; i < 8; i++) {
        g->table[i] = g->p.gate;
        g->grad_table[i] = g->r.dgate;
    }
}

static void free_good(good *g)
{
    layer_free(&g->p);
    layer_result_free(&g->r);
    free(g->schedule);
    free(g->other_schedule);
    free(g->context);
    free(g->local);
    free(g->global);
}

/* Everything a call may write, as one string of bytes. */
typedef struct watched { void *memory; size_t bytes; unsigned char *before; } watched;
enum { NUM_WATCHED = 14 };

static void watch(const ranks_env *e, const good *g, watched *all)
{
    const mok_config *c = &e->cfg;
    size_t n = (size_t)(g->p.tokens * c->hidden * 2), routed = (size_t)(c->num_experts * c->intermediate * c->hidden * 2);
    size_t shared = (size_t)(c->shared_intermediate * c->hidden * 2);
    watched list[NUM_WATCHED] = {{g->schedule, (size_t)e->plan.schedule_bytes, NULL}, {g->other_schedule, (size_t)e->plan.schedule_bytes, NULL},
                                 {g->context, (size_t)e->plan.context_bytes, NULL}, {g->local, (size_t)c->num_experts * 8, NULL},
                                 {g->global, (size_t)c->num_experts * 8, NULL}, {g->r.out, n, NULL}, {g->r.dx, n, NULL},
                                 {g->r.drouter_weights, (size_t)(g->p.tokens * c->topk * 4), NULL}, {g->r.dgate, routed, NULL}, {g->r.dup, routed, NULL},
                                 {g->r.ddown, routed, NULL}, {g->r.dshared_gate, shared, NULL}, {g->r.dshared_up, shared, NULL},
                                 {g->r.dshared_down, shared, NULL}};
    for (int i = 0; i < NUM_WATCHED; i++) {
        all[i] = list[i];
        all[i].before = malloc(all[i].bytes + 1);
        memcpy(all[i].before, all[i].memory, all[i].bytes);
    }
}

static void unwatch(watched *all, const char *what)
{
    for (int i = 0; i < NUM_WATCHED; i++) {
        if (memcmp(all[i].memory, all[i].before, all[i].bytes))
            TEST_FAILED("%s: output %d was changed", what, i);
        free(all[i].before);
    }
}

/* X(what is wrong, status, words). In all of them `s`, `f` and `b` are copies of the good arguments. */
#define BAD_SCHEDULE_LIST(X)                                                                       \
    X(s.struct_size = 0, MOK_E_ARG, "mok_schedule_args.struct_size is 0")                          \
    X(s.api_version = 0, MOK_E_ARG, "mok_schedule_args.api_version is 0")                          \
    X(s.num_tokens = -1, MOK_E_SHAPE, "num_tokens is -1: it must be from 0 to max_tokens, which is 40") \
    X(s.num_tokens = 41, MOK_E_SHAPE, "num_tokens is 41")                                          \
    X(s.num_tokens = INT64_MAX, MOK_E_SHAPE, "num_tokens is 9223372036854775807")                  \
    X(s.expert_ids = NULL, MOK_E_ARG, "expert_ids is NULL")                                        \
    X(s.schedule = NULL, MOK_E_ARG, "schedule is NULL")                                            \
    X(s.schedule = (char *)g->schedule + 64, MOK_E_ARG, "schedule is not aligned to 256 bytes")

#define BAD_WEIGHTS_LIST(X, a)                                                               \
    X(a.weights.gate.packed = NULL, MOK_E_ARG, "weights.gate has neither packed nor experts")      \
    X(a.weights.up.packed = NULL, MOK_E_ARG, "weights.up has neither")                             \
    X(a.weights.gate.experts = g->table, MOK_E_ARG, "weights.gate has both packed and experts")    \
    X(a.weights.up.experts = g->table, MOK_E_ARG, "weights.up has both")                           \
    X(a.weights.down.experts = g->table, MOK_E_ARG, "weights.down has both")                       \
    X(a.weights.shared_gate.experts = g->table, MOK_E_ARG, "weights.shared_gate has both")         \
    X(a.weights.shared_up.experts = g->table, MOK_E_ARG, "weights.shared_up has both")             \
    X(a.weights.shared_down.experts = g->table, MOK_E_ARG, "weights.shared_down has both")         \
    X(a.weights.gate.scales = g->p.gate, MOK_E_ARG, "weights.gate has MXFP8 parts")        \
    X(a.weights.up.transposed = g->p.gate, MOK_E_ARG, "weights.up has MXFP8 parts")        \
    X(a.weights.down.transposed_scales = g->p.gate, MOK_E_ARG, "weights.down has MXFP8 parts") \
    X(a.weights.shared_gate.packed = NULL, MOK_E_ARG, "weights.shared_gate has neither")           \
    X(a.weights.shared_up.packed = NULL, MOK_E_ARG, "weights.shared_up has neither")               \
    X((g->table[3] = NULL, a.weights.gate.packed = NULL, a.weights.gate.experts = g->table), MOK_E_ARG, "weights.gate.experts[3] is NULL") \
    X((g->table[0] = NULL, a.weights.up.packed = NULL, a.weights.up.experts = g->table), MOK_E_ARG, "weights.up.experts[0] is NULL") \
    X((g->table[0] = NULL, a.weights.shared_up.packed = NULL, a.weights.shared_up.experts = g->table), MOK_E_ARG, "weights.shared_up.experts[0] is NULL") \
    X(a.weights.shared_output_gate = NULL, MOK_E_ARG, "weights.shared_output_gate is NULL")

#define BAD_FORWARD_ONLY_LIST(X)                                                                   \
    X(f.router_weights = NULL, MOK_E_ARG, "router_weights is NULL")                                \
    X(f.out = NULL, MOK_E_ARG, "out is NULL")                                                      \
    X(f.weights.down.packed = NULL, MOK_E_ARG, "weights.down has neither")                         \
    X(f.weights.shared_down.packed = NULL, MOK_E_ARG, "weights.shared_down has neither")           \
    X((g->table[5] = NULL, f.weights.down.packed = NULL, f.weights.down.experts = g->table), MOK_E_ARG, "weights.down.experts[5] is NULL")

#define BAD_FORWARD_LIST(X)                                                                        \
    X(f.struct_size = 5, MOK_E_ARG, "mok_forward_args.struct_size is 5")                           \
    X(f.api_version = 2, MOK_E_ARG, "mok_forward_args.api_version is 2")                           \
    X(f.num_tokens = -1, MOK_E_SHAPE, "num_tokens is -1")                                          \
    X(f.num_tokens = 41, MOK_E_SHAPE, "num_tokens is 41")                                          \
    X(f.num_tokens = 29, MOK_E_STATE, "num_tokens is 29, but the schedule was made for 30")        \
    X(f.schedule = NULL, MOK_E_ARG, "schedule is NULL")                                            \
    X(f.schedule = (char *)g->schedule + 8, MOK_E_ARG, "schedule is not aligned to 256 bytes")     \
    X(f.schedule = g->other_schedule, MOK_E_STATE, "schedule was not filled by mok_schedule")      \
    X(f.x = NULL, MOK_E_ARG, "x is NULL")                                                          \
    X(f.context = (char *)g->context + 128, MOK_E_ARG, "context is not aligned to 256 bytes")      \
    X(f.wide = g->context, MOK_E_ARG, "wide is given, but plan.wide_bytes is 0")                   \
    BAD_WEIGHTS_LIST(X, f)

#define BAD_BACKWARD_LIST(X)                                                                       \
    X(b.struct_size = 70000, MOK_E_ARG, "mok_backward_args.struct_size is 70000")                  \
    X(b.api_version = 0, MOK_E_ARG, "mok_backward_args.api_version is 0")                          \
    X(b.num_tokens = -1, MOK_E_SHAPE, "num_tokens is -1")                                          \
    X(b.num_tokens = 41, MOK_E_SHAPE, "num_tokens is 41")                                          \
    X(b.num_tokens = 29, MOK_E_STATE, "num_tokens is 29, but the schedule was made for 30")        \
    X(b.parts = (mok_backward_parts)3, MOK_E_ARG, "parts is 3")                                    \
    X(b.schedule = NULL, MOK_E_ARG, "schedule is NULL")                                            \
    X(b.schedule = (char *)g->schedule + 255, MOK_E_ARG, "schedule is not aligned")                \
    X(b.schedule = g->other_schedule, MOK_E_STATE, "schedule was not filled by mok_schedule")      \
    X(b.context = NULL, MOK_E_ARG, "context is NULL")                                              \
    X(b.context = (char *)g->context + 1, MOK_E_ARG, "context is not aligned")                     \
    X(b.context = g->other_schedule, MOK_E_STATE, "context was not filled by mok_forward")         \
    X(b.dout = NULL, MOK_E_ARG, "dout is NULL")                                                    \
    X(b.x = NULL, MOK_E_ARG, "x is NULL")                                                          \
    X(b.router_weights = NULL, MOK_E_ARG, "router_weights is NULL")                                \
    X(b.dx = NULL, MOK_E_ARG, "dx is NULL")                                                        \
    X(b.wide = g->schedule, MOK_E_ARG, "wide is given, but plan.wide_bytes is 0")                  \
    X(b.wide_dgrad = g->schedule, MOK_E_ARG, "wide_dgrad is given, but plan.wide_bytes is 0")      \
    X(b.weights.down.packed = NULL, MOK_E_ARG, "weights.down has neither")                         \
    X(b.weights.shared_down.packed = NULL, MOK_E_ARG, "weights.shared_down has neither")           \
    X((g->table[5] = NULL, b.weights.down.packed = NULL, b.weights.down.experts = g->table), MOK_E_ARG, "weights.down.experts[5] is NULL") \
    X(b.grads.gate.experts = g->grad_table, MOK_E_ARG, "grads.gate has both packed and experts")   \
    X(b.grads.up.experts = g->grad_table, MOK_E_ARG, "grads.up has both")                          \
    X(b.grads.down.experts = g->grad_table, MOK_E_ARG, "grads.down has both")                      \
    X(b.grads.shared_gate.experts = g->grad_table, MOK_E_ARG, "grads.shared_gate has both")        \
    X(b.grads.shared_up.experts = g->grad_table, MOK_E_ARG, "grads.shared_up has both")            \
    X(b.grads.shared_down.experts = g->grad_table, MOK_E_ARG, "grads.shared_down has both")        \
    X(b.grads.shared_output_gate.experts = g->grad_table, MOK_E_ARG, "grads.shared_output_gate has both") \
    X(b.grads.gate.dtype = MOK_MXFP8, MOK_E_ARG, "grads.gate.dtype is 3")                          \
    X(b.grads.up.dtype = (mok_dtype)4, MOK_E_ARG, "grads.up.dtype is 4")                           \
    X(b.grads.down.dtype = (mok_dtype)99, MOK_E_ARG, "grads.down.dtype is 99")                     \
    X(b.grads.shared_gate.dtype = MOK_MXFP8, MOK_E_ARG, "grads.shared_gate.dtype is 3")            \
    X(b.grads.shared_up.dtype = MOK_MXFP8, MOK_E_ARG, "grads.shared_up.dtype is 3")                \
    X(b.grads.shared_down.dtype = MOK_MXFP8, MOK_E_ARG, "grads.shared_down.dtype is 3")            \
    X(b.grads.shared_output_gate.dtype = MOK_MXFP8, MOK_E_ARG, "grads.shared_output_gate.dtype is 3") \
    BAD_WEIGHTS_LIST(X, b)

/* One entry: spoil, call, compare. The good arguments are put back before each. */
#define TRY_BAD(call, what, want, words)                                                                                          \
    do {                                                                                                                          \
        mok_schedule_args s = g->s;                                                                                               \
        mok_forward_args f = g->f;                                                                                                \
        mok_backward_args b = g->b;                                                                                               \
        watched all[NUM_WATCHED];                                                                                                 \
        (void)s;                                                                                                                  \
        (void)f;                                                                                                                  \
        (void)b;                                                                                                                  \
        for (int i_ = 0; i_ < 8; i_++)                                                                                            \
            g->table[i_] = g->p.gate;                                                                                             \
        what;                                                                                                                     \
        watch(e, g, all);                                                                                                         \
        mok_status got_ = (call);                                                                                                 \
        if (got_ != (want) || !strstr(mok_last_error(), words))                                                                   \
            TEST_FAILED("%s with %s gives %s, \"%s\"; expected %s with \"%s\"", #call, #what, mok_status_name(got_), mok_last_error(), \
                        mok_status_name(want), words);                                                                            \
        unwatch(all, #what);                                                                                                      \
    } while (0);

static void bad_calls(ranks_env *e)
{
    good one, *g = &one;
    make_good(e, g);
#define TRY_SCHEDULE(what, want, words) TRY_BAD(mok_schedule(e->w, &s, NULL), what, want, words)
    BAD_SCHEDULE_LIST(TRY_SCHEDULE)
    EXPECT(mok_schedule(NULL, &g->s, NULL), MOK_E_ARG, "workspace is NULL");
    EXPECT(mok_schedule(e->w, NULL, NULL), MOK_E_ARG, "mok_schedule_args is NULL");
    RANKS_OK(mok_schedule(e->w, &g->s, NULL)); /* the next call works */

#define TRY_FORWARD(what, want, words) TRY_BAD(mok_forward(e->w, &f, NULL), what, want, words)
    BAD_FORWARD_LIST(TRY_FORWARD)
    BAD_FORWARD_ONLY_LIST(TRY_FORWARD)
#define TRY_RECOMPUTE(what, want, words) TRY_BAD(mok_recompute(e->w, &f, NULL), what, want, words)
    BAD_FORWARD_LIST(TRY_RECOMPUTE)
    TRY_BAD(mok_recompute(e->w, &f, NULL), f.context = NULL, MOK_E_ARG, "context is NULL")
    mok_mx_widen_args widen = MOK_INIT(mok_mx_widen_args);
    EXPECT(mok_mx_widen(NULL, &widen, NULL), MOK_E_ARG, "workspace is NULL");
    EXPECT(mok_mx_widen(e->w, NULL, NULL), MOK_E_ARG, "mok_mx_widen_args is NULL");
    RANKS_OK(mok_mx_widen(e->w, &widen, NULL)); /* nothing to do */
    widen.wide_dgrad = g->context;
    EXPECT(mok_mx_widen(e->w, &widen, NULL), MOK_E_ARG, "wide_dgrad is given, but plan.wide_bytes is 0: here passes read no widened weights");
    const void *experts[64] = {g->f.weights.down.packed};
    CHECK(e->plan.experts_count > 1 && e->plan.experts_count <= 64);
    widen.wide_dgrad = NULL;
    widen.weights.down.experts = experts;
    EXPECT(mok_mx_widen(e->w, &widen, NULL), MOK_E_ARG, "weights.down.experts[1] is NULL");
    EXPECT(mok_forward(NULL, &g->f, NULL), MOK_E_ARG, "workspace is NULL");
    EXPECT(mok_forward(e->w, NULL, NULL), MOK_E_ARG, "mok_forward_args is NULL");
    EXPECT(mok_recompute(NULL, &g->f, NULL), MOK_E_ARG, "workspace is NULL");
    EXPECT(mok_recompute(e->w, NULL, NULL), MOK_E_ARG, "mok_forward_args is NULL");

    /* A backward whose context no forward has filled; then the rest with a good one. */
    TRY_BAD(mok_backward(e->w, &b, NULL), (void)0, MOK_E_STATE, "context was not filled by mok_forward")
    RANKS_OK(mok_forward(e->w, &g->f, NULL));
#define TRY_BACKWARD(what, want, words) TRY_BAD(mok_backward(e->w, &b, NULL), what, want, words)
    BAD_BACKWARD_LIST(TRY_BACKWARD)
    EXPECT(mok_backward(NULL, &g->b, NULL), MOK_E_ARG, "workspace is NULL");
    EXPECT(mok_backward(e->w, NULL, NULL), MOK_E_ARG, "mok_backward_args is NULL");
    RANKS_OK(mok_backward(e->w, &g->b, NULL));

    /* A context of another routing. */
    mok_schedule_args s2 = g->s;
    s2.schedule = g->other_schedule;
    RANKS_OK(mok_schedule(e->w, &s2, NULL));
    TRY_BAD(mok_backward(e->w, &b, NULL), b.schedule = g->other_schedule, MOK_E_STATE, "context belongs to schedule")
    free_good(g);
}

TEST(collective_calls)
{
    mok_config c = good_config();
    c.shared_gate = true;
    ranks_run(1, &c, bad_calls, NULL);
}

/* Gate and up in one matrix: `up` must stay empty. */
static void bad_up(ranks_env *e)
{
    good one, *g = &one;
    make_good(e, g);
    const char *how = e->cfg.gate_up == MOK_GATE_UP_COMBINED ? "gate_up is combined" : "gate_up is interleaved";
    uint16_t *both = calloc((size_t)(2 * e->cfg.num_experts * e->cfg.intermediate * e->cfg.hidden), 4);
    RANKS_OK(mok_schedule(e->w, &g->s, NULL));
    g->f.weights.gate.packed = g->b.weights.gate.packed = both;
    g->f.weights.up.packed = g->b.weights.up.packed = NULL;
    g->f.weights.shared_gate.packed = g->b.weights.shared_gate.packed = both;
    g->f.weights.shared_up.packed = g->b.weights.shared_up.packed = NULL;
    g->b.grads.gate.packed = g->b.grads.shared_gate.packed = both;
    g->b.grads.up.packed = g->b.grads.shared_up.packed = NULL;
    TRY_BAD(mok_forward(e->w, &f, NULL), f.weights.up.packed = g->p.up, MOK_E_ARG, how)
    TRY_BAD(mok_forward(e->w, &f, NULL), f.weights.shared_up.packed = g->p.up, MOK_E_ARG, how)
    TRY_BAD(mok_forward(e->w, &f, NULL), f.weights.up.experts = g->table, MOK_E_ARG, how)
    RANKS_OK(mok_forward(e->w, &g->f, NULL));
    TRY_BAD(mok_backward(e->w, &b, NULL), b.weights.up.packed = g->p.up, MOK_E_ARG, how)
    TRY_BAD(mok_backward(e->w, &b, NULL), b.grads.up.packed = g->r.dup, MOK_E_ARG, "grads.up is given")
    TRY_BAD(mok_backward(e->w, &b, NULL), b.grads.shared_up.experts = g->grad_table, MOK_E_ARG, "grads.up is given")
    free(both);
    free_good(g);
}

TEST(up_where_gate_and_up_are_one)
{
    mok_config c = good_config();
    c.gate_up = MOK_GATE_UP_COMBINED;
    ranks_run(1, &c, bad_up, NULL);
    c.gate_up = MOK_GATE_UP_INTERLEAVED;
    ranks_run(1, &c, bad_up, NULL);
}

/* Every id that is none. Outputs are undefined after it, but the schedule is unusable, and nothing is out of bounds (ASan). */
static void bad_ids(ranks_env *e)
{
    good one, *g = &one;
    static const int32_t ids[] = {-2, INT32_MIN, 6, 7, INT32_MAX};
    make_good(e, g);
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        int32_t old = g->p.expert_ids[7];
        char words[96];
        RANKS_OK(mok_schedule(e->w, &g->s, NULL)); /* so that the memory holds a good schedule */
        g->p.expert_ids[7] = ids[i];
        snprintf(words, sizeof words, "rank 0, token 3, k 1: expert id %d is outside [-1, 6)", ids[i]);
        EXPECT(mok_schedule(e->w, &g->s, NULL), MOK_E_ROUTE, words);
        EXPECT(mok_forward(e->w, &g->f, NULL), MOK_E_STATE, "schedule was not filled");
        mok_schedule_info info = MOK_INIT(mok_schedule_info);
        EXPECT(mok_schedule_query(e->w, g->schedule, &info), MOK_E_STATE, "schedule was not filled");
        g->p.expert_ids[7] = old;
    }
    RANKS_OK(mok_schedule(e->w, &g->s, NULL));
    RANKS_OK(mok_forward(e->w, &g->f, NULL));
    free_good(g);
}

TEST(ids_outside_the_experts)
{
    mok_config c = good_config();
    ranks_run(1, &c, bad_ids, NULL);
}

static void bad_questions(ranks_env *e)
{
    good one, *g = &one;
    mok_stats stats, stats_before;
    mok_schedule_info info, info_before;
    mok_plan plan;
    mok_config c;
    make_good(e, g);
    memset(&stats, 0x3c, sizeof stats);
    memset(&info, 0x3c, sizeof info);
    stats.struct_size = sizeof stats;
    info.struct_size = sizeof info;
    stats_before = stats;
    info_before = info;
    EXPECT(mok_wait(NULL), MOK_E_ARG, "workspace is NULL");
    EXPECT(mok_poll(NULL), MOK_E_ARG, "workspace is NULL");
    CHECK_EQ(mok_wait(e->w), MOK_OK);
    CHECK_EQ(mok_poll(e->w), MOK_OK);
    EXPECT(mok_get_stats(NULL, &stats), MOK_E_ARG, "workspace is NULL");
    EXPECT(mok_get_stats(e->w, NULL), MOK_E_ARG, "mok_stats is NULL");
    EXPECT(mok_schedule_query(NULL, g->schedule, &info), MOK_E_ARG, "workspace is NULL");
    EXPECT(mok_schedule_query(e->w, NULL, &info), MOK_E_ARG, "schedule is NULL");
    EXPECT(mok_schedule_query(e->w, (char *)g->schedule + 32, &info), MOK_E_ARG, "schedule is not aligned");
    EXPECT(mok_schedule_query(e->w, g->schedule, &info), MOK_E_STATE, "schedule was not filled");
    CHECK_BYTES(&stats, &stats_before, sizeof stats);
    CHECK_BYTES(&info, &info_before, sizeof info);
    RANKS_OK(mok_schedule(e->w, &g->s, NULL));
    EXPECT(mok_schedule_query(e->w, g->schedule, NULL), MOK_E_ARG, "mok_schedule_info is NULL");
    info.struct_size = 1;
    EXPECT(mok_schedule_query(e->w, g->schedule, &info), MOK_E_ARG, "mok_schedule_info.struct_size is 1");
    stats.struct_size = 7;
    EXPECT(mok_get_stats(e->w, &stats), MOK_E_ARG, "mok_stats.struct_size is 7");
    plan.struct_size = 0;
    EXPECT(mok_workspace_plan(e->w, &plan), MOK_E_ARG, "mok_plan.struct_size is 0");
    EXPECT(mok_workspace_plan(e->w, NULL), MOK_E_ARG, "mok_plan is NULL");
    EXPECT(mok_workspace_plan(NULL, &plan), MOK_E_ARG, "workspace is NULL");
    c.struct_size = 0;
    EXPECT(mok_workspace_config(e->w, &c), MOK_E_ARG, "mok_config.struct_size is 0");
    EXPECT(mok_workspace_config(e->w, NULL), MOK_E_ARG, "mok_config is NULL");
    EXPECT(mok_workspace_config(NULL, &c), MOK_E_ARG, "workspace is NULL");
    mok_backend_info backend = MOK_INIT(mok_backend_info), backend_before = backend;
    EXPECT(mok_backend_query(-1, &backend), MOK_E_ARG, "backend index -1");
    EXPECT(mok_backend_query(1000, &backend), MOK_E_ARG, "backend index 1000");
    EXPECT(mok_backend_query(0, NULL), MOK_E_ARG, "mok_backend_info is NULL");
    CHECK_BYTES(&backend, &backend_before, sizeof backend);
    backend.struct_size = 2;
    EXPECT(mok_backend_query(0, &backend), MOK_E_ARG, "mok_backend_info.struct_size is 2");
    backend.struct_size = sizeof backend;
    CHECK_EQ(mok_backend_query(0, &backend), MOK_OK);
    CHECK(strlen(backend.name) > 0 && strlen(backend.detail) > 0);
    free_good(g);
}

TEST(questions)
{
    mok_config c = good_config();
    ranks_run(1, &c, bad_questions, NULL);
}

static void bad_memory(ranks_env *e)
{
    void *memory = somewhere, *block = NULL;
    char to[4] = {1, 2, 3, 4}, from[4] = {5, 6, 7, 8};
    EXPECT(mok_memory_alloc(NULL, 16, &memory), MOK_E_ARG, "workspace is NULL");
    EXPECT(mok_memory_alloc(e->w, 16, NULL), MOK_E_ARG, "memory is NULL");
    CHECK(memory == somewhere);
    EXPECT(mok_memory_copy(NULL, to, from, 4), MOK_E_ARG, "workspace is NULL");
    EXPECT(mok_memory_copy(e->w, NULL, from, 4), MOK_E_ARG, "to is NULL");
    EXPECT(mok_memory_copy(e->w, to, NULL, 4), MOK_E_ARG, "from is NULL");
    CHECK_EQ(to[0], 1);
    CHECK_EQ(mok_memory_copy(e->w, NULL, NULL, 0), MOK_OK);
    mok_memory_free(e->w, NULL);
    mok_memory_free(NULL, somewhere);
    CHECK_EQ(mok_memory_alloc(e->w, 1000, &block), MOK_OK);
    CHECK_EQ((uintptr_t)block % 256, 0);
    CHECK_EQ(mok_memory_copy(e->w, block, from, 4), MOK_OK);
    CHECK_EQ(mok_memory_copy(e->w, to, block, 4), MOK_OK);
    CHECK_BYTES(to, from, 4);
    mok_memory_free(e->w, block);
    block = NULL;
    CHECK_EQ(mok_memory_alloc(e->w, 0, &block), MOK_OK);
    mok_memory_free(e->w, block);
}

TEST(memory_helpers)
{
    mok_config c = good_config();
    ranks_run(1, &c, bad_memory, NULL);
}

TEST(cpu_gemm)
{
    static uint16_t a[4 * 3], b[5 * 3];
    float c[4 * 5], before[4 * 5];
    memset(c, 0x5c, sizeof c);
    memcpy(before, c, sizeof c);
    EXPECT(mok_cpu_gemm(-1, 5, 3, a, b, c), MOK_E_ARG, "M is -1");
    EXPECT(mok_cpu_gemm(4, -5, 3, a, b, c), MOK_E_ARG, "N is -5");
    EXPECT(mok_cpu_gemm(4, 5, -3, a, b, c), MOK_E_ARG, "K is -3");
    EXPECT(mok_cpu_gemm((1 << 20) + 1, 5, 3, a, b, c), MOK_E_ARG, "M is 1048577");
    EXPECT(mok_cpu_gemm(4, INT64_MAX, 3, a, b, c), MOK_E_ARG, "N is 9223372036854775807");
    EXPECT(mok_cpu_gemm(4, 5, 3, NULL, b, c), MOK_E_ARG, "a_bf16 is NULL");
    EXPECT(mok_cpu_gemm(4, 5, 3, a, NULL, c), MOK_E_ARG, "b_bf16 is NULL");
    EXPECT(mok_cpu_gemm(4, 5, 3, a, b, NULL), MOK_E_ARG, "c is NULL");
    CHECK_BYTES(c, before, sizeof c);
    CHECK_EQ(mok_cpu_gemm(0, 5, 3, NULL, b, NULL), MOK_OK); /* what is empty needs no pointer */
    CHECK_EQ(mok_cpu_gemm(4, 5, 0, NULL, NULL, c), MOK_OK);
    for (int i = 0; i < 20; i++)
        CHECK(c[i] == 0);
}

/* What is not used may be NULL: no tokens, no pointers. */
static void no_tokens(ranks_env *e)
{
    void *schedule = ranks_schedule_block(e), *context = ranks_context_block(e);
    good one, *g = &one;
    make_good(e, g);
    mok_schedule_args s = MOK_INIT(mok_schedule_args);
    s.schedule = schedule;
    RANKS_OK(mok_schedule(e->w, &s, NULL));
    mok_forward_args f = MOK_INIT(mok_forward_args);
    f.schedule = schedule;
    f.context = context;
    f.weights = g->f.weights;
    RANKS_OK(mok_forward(e->w, &f, NULL));
    RANKS_OK(mok_recompute(e->w, &f, NULL));
    mok_backward_args b = MOK_INIT(mok_backward_args);
    b.schedule = schedule;
    b.context = context;
    b.weights = g->f.weights;
    RANKS_OK(mok_backward(e->w, &b, NULL));
    free_good(g);
    free(schedule);
    free(context);
}

TEST(Z7_without_tokens_pointers_may_be_null)
{
    mok_config c = good_config();
    ranks_run(1, &c, no_tokens, NULL);
    ranks_run(3, &c, no_tokens, NULL);
}

/* In a child the pool's threads are missing: a call would wait for them for ever. */
static void fork_with_workspace(ranks_env *e)
{
    good one, *g = &one;
    make_good(e, g);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        bool named = mok_schedule(e->w, &g->s, NULL) == MOK_E_STATE && strstr(mok_last_error(), "made before the process was forked");
        named = named && mok_wait(e->w) == MOK_E_STATE && mok_forward(e->w, &g->f, NULL) == MOK_E_STATE;
        mok_workspace_destroy(e->w); /* the parent's */
        mok_config c = good_config();
        mok_group *group = NULL;
        mok_workspace *own = NULL;
        bool works = mok_group_create_local(1, NULL, &group) == MOK_OK && mok_workspace_create(group, &c, &own) == MOK_OK && mok_schedule(own, &g->s, NULL) == MOK_OK;
        mok_workspace_destroy(own);
        mok_group_destroy(group);
        _exit(named ? works ? 0 : 2 : 1);
    }
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    RANKS_OK(mok_schedule(e->w, &g->s, NULL));
    free_good(g);
}

TEST(a_workspace_from_before_a_fork_is_named_in_the_child)
{
    mok_config c = good_config();
    c.cpu_threads = 3;
    ranks_run(1, &c, fork_with_workspace, NULL);
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
