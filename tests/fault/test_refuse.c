/* What one rank does wrong, as all ranks see it: refused calls, calls that do not fit together, bad ids, configurations that
 * differ. After each of them the next call must work, and give the right bits. */
#include "../multi/ranks.h"
#include "../unit/bad_config.h"

enum { P = 4, TOKENS = 61 };

typedef struct rank_memory {
    void *schedule, *other, *context; /* other: a second schedule of the same routing */
    ranks_part part;
} rank_memory;

/* One layer's worth of everything, shared by the ranks; `want` is what one rank alone computes. */
typedef struct scene {
    layer_problem p;
    layer_result want, got;
    char sentences[P][512];
    void (*mishap)(ranks_env *, struct scene *, rank_memory *);
} scene;

static mok_config scene_config(void)
{
    mok_config c = good_config();
    c.max_tokens = 40;
    return c;
}

static void open_scene(scene *s)
{
    layer_options alone = {.ranks = 1};
    mok_config c = scene_config();
    char error[512];
    memset(s, 0, sizeof *s);
    if (!layer_make(&s->p, &c, TOKENS, LAYER_DISTINCT, 0.1, 11) || !layer_result_make(&s->want, &s->p, &alone))
        exit(1);
    if (layer_run(&s->p, &alone, &s->want, error) != MOK_OK)
        TEST_FAILED("one rank alone: %s", error);
    layer_options four = {.ranks = P};
    if (!layer_result_make(&s->got, &s->p, &four))
        exit(1);
}

static void close_scene(scene *s)
{
    layer_free(&s->p);
    layer_result_free(&s->want);
    layer_result_free(&s->got);
}

static void good_pass(ranks_env *e, scene *s, rank_memory *m)
{
    mok_schedule_args a = ranks_schedule_args(&s->p, m->part, m->schedule);
    mok_forward_args f = ranks_forward_args(e, &s->p, m->part, m->schedule, m->context, &s->got);
    mok_backward_args b = ranks_backward_args(e, &s->p, m->part, m->schedule, m->context, &s->got);
    RANKS_OK(mok_schedule(e->w, &a, NULL));
    RANKS_OK(mok_forward(e->w, &f, NULL));
    RANKS_OK(mok_backward(e->w, &b, NULL));
}

static void note_sentence(const ranks_env *e, scene *s) { snprintf(s->sentences[e->rank], sizeof s->sentences[0], "%s", mok_last_error()); }

static void same_sentences(ranks_env *e, const scene *s)
{
    ranks_meet(e);
    CHECK_EQ(strcmp(s->sentences[e->rank], s->sentences[0]), 0);
    ranks_meet(e);
}

static void scene_body(ranks_env *e)
{
    scene *s = e->user;
    rank_memory m = {ranks_schedule_block(e), ranks_schedule_block(e), ranks_context_block(e), ranks_part_of(e, TOKENS, NULL)};
    good_pass(e, s, &m);
    s->mishap(e, s, &m);
    good_pass(e, s, &m);
    free(m.schedule);
    free(m.other);
    free(m.context);
}

static void play(void (*mishap)(ranks_env *, scene *, rank_memory *))
{
    scene s;
    mok_config c = scene_config();
    open_scene(&s);
    s.mishap = mishap;
    ranks_run(P, &c, scene_body, &s);
    ranks_same_results("the pass after it", &s.p, &s.got, &s.want, true);
    close_scene(&s);
}

/* --- refusals -------------------------------------------------------------------------------------------------------------------- */
/* Rank `who` refuses; the others hear its sentence. */
#define REFUSED(who, call, own_status, own_words, operation)                                                             \
    do {                                                                                                                 \
        char heard_[96];                                                                                                 \
        snprintf(heard_, sizeof heard_, "rank %d refused its %s call", (int)(who), operation);                           \
        if (e->rank == (who)) {                                                                                          \
            RANKS_FAIL(call, own_status, own_words);                                                                     \
        } else {                                                                                                         \
            RANKS_FAIL(call, MOK_E_PEER, heard_);                                                                        \
            CHECK_STR(mok_last_error(), own_words);                                                                      \
        }                                                                                                                \
    } while (0)

static void refuse_each(ranks_env *e, scene *s, rank_memory *m)
{
    for (int32_t who = 0; who < P; who++) {
        bool mine = e->rank == who;
        mok_schedule_args a = ranks_schedule_args(&s->p, m->part, mine ? NULL : m->other);
        REFUSED(who, mok_schedule(e->w, &a, NULL), MOK_E_ARG, "schedule is NULL", "schedule");
        mok_forward_args f = ranks_forward_args(e, &s->p, m->part, m->schedule, m->context, &s->got);
        f.layer = 5;
        if (mine)
            f.x = NULL;
        REFUSED(who, mok_forward(e->w, &f, NULL), MOK_E_ARG, "x is NULL", "forward");
        REFUSED(who, mok_recompute(e->w, &f, NULL), MOK_E_ARG, "x is NULL", "recompute");
        mok_backward_args b = ranks_backward_args(e, &s->p, m->part, m->schedule, m->context, &s->got);
        b.layer = 5;
        if (mine)
            b.weights.gate.packed = NULL;
        REFUSED(who, mok_backward(e->w, &b, NULL), MOK_E_ARG, "weights.gate has neither", "backward");
        if (!mine)
            CHECK_STR(mok_last_error(), "of layer 5: ");
    }
}
TEST(one_rank_refuses_each_call) { play(refuse_each); }

static void refuse_null_args(ranks_env *e, scene *s, rank_memory *m)
{
    mok_forward_args f = ranks_forward_args(e, &s->p, m->part, m->schedule, NULL, &s->got);
    REFUSED(2, mok_forward(e->w, e->rank == 2 ? NULL : &f, NULL), MOK_E_ARG, "mok_forward_args is NULL", "forward");
}
TEST(one_rank_passes_no_arguments_at_all) { play(refuse_null_args); }

static void refuse_in_a_row(ranks_env *e, scene *s, rank_memory *m)
{
    for (int i = 0; i < 25; i++) {
        mok_forward_args f = ranks_forward_args(e, &s->p, m->part, m->schedule, NULL, &s->got);
        if (e->rank == 1)
            f.num_tokens = -3 - i;
        char words[64];
        snprintf(words, sizeof words, "num_tokens is %d:", -3 - i); /* this one, not one of another round */
        REFUSED(1, mok_forward(e->w, &f, NULL), MOK_E_SHAPE, words, "forward");
    }
}
TEST(several_refusals_in_a_row) { play(refuse_in_a_row); }

static void refuse_in_turns(ranks_env *e, scene *s, rank_memory *m)
{
    uint64_t state = test_seed(); /* the same on all ranks */
    for (int i = 0; i < 40; i++) {
        int32_t who = (int32_t)test_below(&state, P + 1); /* P: nobody */
        mok_schedule_args a = ranks_schedule_args(&s->p, m->part, e->rank == who ? NULL : m->schedule);
        if (who < P)
            REFUSED(who, mok_schedule(e->w, &a, NULL), MOK_E_ARG, "schedule is NULL", "schedule");
        else
            RANKS_OK(mok_schedule(e->w, &a, NULL));
    }
}
TEST(refusals_and_good_calls_in_any_order) { play(refuse_in_turns); }

static void refuse_together(ranks_env *e, scene *s, rank_memory *m)
{
    /* Two refuse: each has its own sentence, the others hear the lower rank's. */
    mok_forward_args f = ranks_forward_args(e, &s->p, m->part, m->schedule, NULL, &s->got);
    if (e->rank == 1)
        f.x = NULL;
    if (e->rank == 3)
        f.out = NULL;
    if (e->rank == 1)
        RANKS_FAIL(mok_forward(e->w, &f, NULL), MOK_E_ARG, "x is NULL");
    else if (e->rank == 3)
        RANKS_FAIL(mok_forward(e->w, &f, NULL), MOK_E_ARG, "out is NULL");
    else
        RANKS_FAIL(mok_forward(e->w, &f, NULL), MOK_E_PEER, "rank 1 refused its forward call");
    f.x = NULL; /* and now all */
    RANKS_FAIL(mok_forward(e->w, &f, NULL), MOK_E_ARG, "x is NULL");
}
TEST(several_ranks_refuse_the_same_call) { play(refuse_together); }

static void refuse_after_waiting(ranks_env *e, scene *s, rank_memory *m)
{
    /* The refusing rank runs ahead or comes late. */
    for (int late = 0; late < 2; late++) {
        if ((e->rank == 0) == (late == 1))
            usleep(100000);
        mok_forward_args f = ranks_forward_args(e, &s->p, m->part, m->schedule, NULL, &s->got);
        if (e->rank == 0)
            f.x = NULL;
        REFUSED(0, mok_forward(e->w, &f, NULL), MOK_E_ARG, "x is NULL", "forward");
    }
}
TEST(a_refusal_early_or_late) { play(refuse_after_waiting); }

static void too_many_tokens(ranks_env *e, scene *s, rank_memory *m)
{
    mok_schedule_args a = ranks_schedule_args(&s->p, m->part, m->other);
    if (e->rank == 2)
        a.num_tokens = 41;
    REFUSED(2, mok_schedule(e->w, &a, NULL), MOK_E_SHAPE, "num_tokens is 41: it must be from 0 to max_tokens, which is 40", "schedule");
}
TEST(S9_more_tokens_than_the_maximum_on_one_rank) { play(too_many_tokens); }

static void other_context(ranks_env *e, scene *s, rank_memory *m)
{
    /* A context that was never filled, on one rank only. */
    void *empty = ranks_context_block(e);
    mok_backward_args b = ranks_backward_args(e, &s->p, m->part, m->schedule, e->rank == 0 ? empty : m->context, &s->got);
    REFUSED(0, mok_backward(e->w, &b, NULL), MOK_E_STATE, "context was not filled", "backward");
    free(empty);
}
TEST(a_context_that_no_forward_has_filled) { play(other_context); }

/* --- calls that do not fit together ---------------------------------------------------------------------------------------------- */
#define MISMATCH(call, words)                               \
    do {                                                    \
        RANKS_FAIL(call, MOK_E_MISMATCH, words);            \
        note_sentence(e, s);                                \
        same_sentences(e, s);                               \
    } while (0)

static void different_operations(ranks_env *e, scene *s, rank_memory *m)
{
    mok_schedule_args a = ranks_schedule_args(&s->p, m->part, m->schedule);
    mok_forward_args f = ranks_forward_args(e, &s->p, m->part, m->schedule, m->context, &s->got);
    mok_backward_args b = ranks_backward_args(e, &s->p, m->part, m->schedule, m->context, &s->got);
    for (int32_t who = 0; who < P; who++) {
        bool odd = e->rank == who;
        good_pass(e, s, m); /* what a mishap leaves is undefined */
        MISMATCH(odd ? mok_backward(e->w, &b, NULL) : mok_forward(e->w, &f, NULL), who ? "is forward of layer 0" : "is backward of layer 0");
        MISMATCH(odd ? mok_recompute(e->w, &f, NULL) : mok_forward(e->w, &f, NULL), "recompute of layer 0");
        MISMATCH(odd ? mok_backward(e->w, &b, NULL) : mok_recompute(e->w, &f, NULL), "backward of layer 0");
        char rank[32];
        snprintf(rank, sizeof rank, "on rank %d", who ? who : 1);
        CHECK_STR(mok_last_error(), rank);
        /* A schedule against a forward, either way round. */
        MISMATCH(odd ? mok_schedule(e->w, &a, NULL) : mok_forward(e->w, &f, NULL), "schedule of layer 0");
        good_pass(e, s, m);
        MISMATCH(odd ? mok_forward(e->w, &f, NULL) : mok_schedule(e->w, &a, NULL), "schedule of layer 0");
    }
}
TEST(ranks_call_different_operations) { play(different_operations); }

static void schedules_out_of_step(ranks_env *e, scene *s, rank_memory *m)
{
    /* One rank misses a schedule again and again; the good pass in between finds all ranks' schedules numbered alike. */
    mok_schedule_args a = ranks_schedule_args(&s->p, m->part, m->schedule);
    mok_forward_args f = ranks_forward_args(e, &s->p, m->part, m->schedule, m->context, &s->got);
    for (int i = 0; i < 3; i++) {
        MISMATCH(e->rank == 1 ? mok_forward(e->w, &f, NULL) : mok_schedule(e->w, &a, NULL), "schedule of layer 0");
        good_pass(e, s, m);
        f.schedule = m->schedule;
    }
}
TEST(one_rank_misses_a_schedule) { play(schedules_out_of_step); }

static void different_layers(ranks_env *e, scene *s, rank_memory *m)
{
    mok_schedule_args a = ranks_schedule_args(&s->p, m->part, m->other);
    a.layer = e->rank == 3 ? 12 : 11;
    MISMATCH(mok_schedule(e->w, &a, NULL), "is schedule of layer 11");
    CHECK_STR(mok_last_error(), "schedule of layer 12");
    CHECK_STR(mok_last_error(), "on rank 3");
    mok_forward_args f = ranks_forward_args(e, &s->p, m->part, m->schedule, m->context, &s->got);
    f.layer = e->rank == 0 ? UINT64_MAX : 0;
    MISMATCH(mok_forward(e->w, &f, NULL), "forward of layer 18446744073709551615");
}
TEST(ranks_call_different_layers) { play(different_layers); }

static void different_schedules(ranks_env *e, scene *s, rank_memory *m)
{
    mok_schedule_args a = ranks_schedule_args(&s->p, m->part, m->other);
    RANKS_OK(mok_schedule(e->w, &a, NULL));
    mok_forward_args f = ranks_forward_args(e, &s->p, m->part, e->rank == 2 ? m->other : m->schedule, NULL, &s->got);
    MISMATCH(mok_forward(e->w, &f, NULL), "with schedule");
    CHECK_STR(mok_last_error(), "on rank 2");
    mok_backward_args b = ranks_backward_args(e, &s->p, m->part, m->schedule, m->context, &s->got);
    b.parts = e->rank == 1 ? MOK_BACKWARD_DATA : MOK_BACKWARD_ALL;
    MISMATCH(mok_backward(e->w, &b, NULL), "backward with parts 0 on rank 0, but 1 on rank 1");
}
TEST(ranks_use_different_schedules_or_parts) { play(different_schedules); }

/* --- ids ---------------------------------------------------------------------------------------------------------------------------- */
static void bad_ids(ranks_env *e, scene *s, rank_memory *m)
{
    static const int32_t ids[] = {-2, 6, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++)
        for (int32_t who = 0; who < P; who += 3) {
            int32_t *mine = malloc(sizeof *mine * (size_t)(m->part.tokens * s->p.cfg.topk));
            memcpy(mine, s->p.expert_ids + m->part.first * s->p.cfg.topk, sizeof *mine * (size_t)(m->part.tokens * s->p.cfg.topk));
            mok_schedule_args a = ranks_schedule_args(&s->p, m->part, m->schedule);
            a.expert_ids = mine;
            if (e->rank == who)
                mine[5] = mine[8] = ids[i];
            char words[96];
            snprintf(words, sizeof words, "rank %d, token 2, k 1: expert id %d is outside [-1, 6)", who, ids[i]);
            RANKS_FAIL(mok_schedule(e->w, &a, NULL), MOK_E_ROUTE, words);
            note_sentence(e, s);
            same_sentences(e, s);
            /* The memory held a good schedule; now it holds none, on every rank. */
            mok_forward_args f = ranks_forward_args(e, &s->p, m->part, m->schedule, NULL, &s->got);
            RANKS_FAIL(mok_forward(e->w, &f, NULL), MOK_E_STATE, "schedule was not filled");
            good_pass(e, s, m);
            free(mine);
        }
}
TEST(bad_ids_on_one_rank) { play(bad_ids); }

/* --- creation ---------------------------------------------------------------------------------------------------------------------- */
typedef struct creation {
    mok_config cfg[P];
    mok_status status[P];
    char sentences[P][512];
} creation;

static void create_body(ranks_env *e)
{
    creation *c = e->user;
    mok_workspace *w = NULL;
    c->status[e->rank] = mok_workspace_create(e->group, &c->cfg[e->rank], &w);
    snprintf(c->sentences[e->rank], sizeof c->sentences[0], "%s", mok_last_error());
    if (c->status[e->rank] == MOK_OK)
        TEST_FAILED("rank %d got a workspace", e->rank);
    CHECK(w == NULL);
    /* Then no workspace exists, and the group may try again. */
    mok_config good = good_config();
    RANKS_OK(mok_workspace_create(e->group, &good, &w));
    void *schedule = NULL;
    mok_plan plan = MOK_INIT(mok_plan);
    RANKS_OK(mok_workspace_plan(w, &plan));
    schedule = ranks_block(plan.schedule_bytes);
    mok_schedule_args a = MOK_INIT(mok_schedule_args);
    a.schedule = schedule;
    RANKS_OK(mok_schedule(w, &a, NULL));
    mok_workspace_destroy(w);
    free(schedule);
}

static void create_differing(creation *c, mok_status status, const char *words)
{
    ranks_run(P, NULL, create_body, c);
    for (int r = 0; r < P; r++) {
        CHECK_EQ(c->status[r], status);
        CHECK_STR(c->sentences[r], words);
        CHECK_EQ(strcmp(c->sentences[r], c->sentences[0]), 0);
    }
}

TEST(S8_configurations_that_differ)
{
    /* X(what rank `who` does, words) */
#define DIFFERENCES(X)                                                        \
    X(hidden = 192, "hidden is ")                                             \
    X(intermediate = 256, "intermediate is ")                                 \
    X(shared_intermediate = 128, "shared_intermediate is ")                   \
    X(num_experts = 7, "num_experts is ")                                     \
    X(topk = 1, "topk is ")                                                   \
    X(max_tokens = 1234567891, "max_tokens")                                  \
    X(max_tokens = 41, "max_tokens is ")                                      \
    X(router_dtype = MOK_BF16, "router_dtype is ")                            \
    X(swiglu_limit = 7.5f, "swiglu_limit is ")                                \
    X(gate_up = MOK_GATE_UP_INTERLEAVED, "gate_up is ")                       \
    X(weight_layout = MOK_WEIGHT_KN, "weight_layout is ")                     \
    X(shared_gate = true, "shared_gate is ")                                  \
    X(ring_rows = 12800, "ring_rows is ")                                     \
    X(minibatch_rows = 128, "minibatch_rows is ")                             \
    X(minibatch_rows_bwd = 128, "minibatch_rows_bwd is ")                     \
    X(save = MOK_SAVE_NONE, "save is ")                                       \
    X(comm_sms = 8, "comm_sms is ")                                           \
    X(comm_sms_bwd = 8, "comm_sms_bwd is ")                                   \
    X(reserve_sms = 8, "reserve_sms is ")
    int who = 0;
#define DIFFER(what, words)                                                                             \
    do {                                                                                                \
        creation c;                                                                                     \
        char rank[16];                                                                                  \
        for (int r = 0; r < P; r++)                                                                     \
            c.cfg[r] = good_config();                                                                   \
        c.cfg[who].what;                                                                                \
        int before = test_failures;                                                                     \
        create_differing(&c, c.cfg[who].max_tokens > 100 ? MOK_E_SHAPE : MOK_E_MISMATCH, words);        \
        snprintf(rank, sizeof rank, "rank %d", who ? who : 1);                                          \
        if (c.cfg[who].max_tokens <= 100)                                                               \
            CHECK_STR(c.sentences[0], rank);                                                            \
        if (test_failures != before)                                                                    \
            printf("  … with rank %d's %s: %s\n", who, #what, c.sentences[0]);                          \
        who = (who + 1) % P;                                                                            \
    } while (0);
    DIFFERENCES(DIFFER)
}

TEST(the_values_that_differ_are_told)
{
    creation c;
    for (int r = 0; r < P; r++)
        c.cfg[r] = good_config();
    c.cfg[2].swiglu_limit = 0.5f;
    create_differing(&c, MOK_E_MISMATCH, "swiglu_limit is 0 on rank 0, but 0.5 on rank 2: it must be the same on all ranks of a group");
    c.cfg[2].swiglu_limit = 0;
    c.cfg[3].max_tokens = 39;
    create_differing(&c, MOK_E_MISMATCH, "max_tokens is 40 on rank 0, but 39 on rank 3");
}

TEST(fields_that_may_differ)
{
    /* create_body expects a failure; so give one rank a bad field beside differences that are allowed. */
    creation c;
    for (int r = 0; r < P; r++) {
        c.cfg[r] = good_config();
        c.cfg[r].cpu_threads = 1 + r;
        c.cfg[r].timeout_ms = 20000 + r;
        c.cfg[r].backend = r % 2 ? MOK_BACKEND_CPU : MOK_BACKEND_AUTO;
    }
    c.cfg[1].topk = 0;
    create_differing(&c, MOK_E_ARG, "rank 1: topk is 0");
}

TEST(one_bad_configuration)
{
    mok_config bad_cfg;
    bad_config bad;
    for (int i = 0; bad_config_at(i, &bad_cfg, &bad); i += 4) { /* every fourth: all are tried on one rank in unit.misuse */
        creation c;
        int who = i / 4 % P;
        char words[200];
        for (int r = 0; r < P; r++)
            c.cfg[r] = good_config();
        c.cfg[who] = bad_cfg;
        snprintf(words, sizeof words, "rank %d: %s", who, bad.words);
        int before = test_failures;
        create_differing(&c, bad.status, words);
        if (test_failures != before)
            printf("  … with rank %d's %s\n", who, bad.what);
    }
    creation c;
    for (int r = 0; r < P; r++)
        c.cfg[r] = good_config();
    c.cfg[0].hidden = 96; /* two are bad: the lower one's complaint, on all */
    c.cfg[3].topk = -1;
    create_differing(&c, MOK_E_SHAPE, "rank 0: hidden is 96");
}

/* Two workspaces of one group live at once; ranks that destroy and create in different orders are told so and do not crash. */
static void different_orders(ranks_env *e)
{
    mok_config c = good_config();
    mok_workspace *a = NULL, *b = NULL;
    RANKS_OK(mok_workspace_create(e->group, &c, &a));
    if (e->rank == 1)
        mok_workspace_destroy(a);
    else
        RANKS_FAIL(mok_workspace_create(e->group, &c, &b), MOK_E_MISMATCH, "in different orders");
    if (e->rank != 1)
        mok_workspace_destroy(a);
    else
        RANKS_FAIL(mok_workspace_create(e->group, &c, &b), MOK_E_MISMATCH, "in different orders");
    CHECK(b == NULL);
}

TEST(create_against_destroy)
{
    ranks_run(2, NULL, different_orders, NULL);
    ranks_run(3, NULL, different_orders, NULL);
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
