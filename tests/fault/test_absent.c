/* Ranks that come late or never: bounded waits that name the rank, the operation and the counts; a workspace that is left alone
 * afterwards; a new group in the same process. Late ranks meet heaps that their peers have given up (ASan watches). */
#include "../multi/ranks.h"
#include "../unit/bad_config.h"

enum { P = 3, TOKENS = 50, TIMEOUT_MS = 400 };

typedef enum operation { SCHEDULE, FORWARD, RECOMPUTE, BACKWARD, NUM_OPERATIONS } operation;
static const char *const operation_names[] = {"schedule", "forward", "recompute", "backward"};

typedef struct absence {
    layer_problem p;
    layer_result r;
    operation missed;
    int32_t who;
    int64_t comes_after_ms; /* -1: never */
    bool leave_first;       /* the others destroy their workspaces before it comes */
    int arrivals;           /* ranks that are through */
} absence;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static mok_status call(ranks_env *e, absence *a, operation o, ranks_part part, void *schedule, void *context)
{
    mok_schedule_args s = ranks_schedule_args(&a->p, part, schedule);
    mok_forward_args f = ranks_forward_args(e, &a->p, part, schedule, context, &a->r);
    mok_backward_args b = ranks_backward_args(e, &a->p, part, schedule, context, &a->r);
    s.layer = f.layer = b.layer = 7;
    switch (o) {
    case SCHEDULE: return mok_schedule(e->w, &s, NULL);
    case FORWARD: return mok_forward(e->w, &f, NULL);
    case RECOMPUTE: return mok_recompute(e->w, &f, NULL);
    default: return mok_backward(e->w, &b, NULL);
    }
}

/* The first to wait in vain says whom for; a rank that meets one who has given up may say that one. */
static void check_sentence(const ranks_env *e, const absence *a)
{
    char words[128];
    snprintf(words, sizeof words, "rank %d waited %d ms for rank %d in %s (layer 7, call %d): its epoch is ", e->rank, TIMEOUT_MS, a->who,
             operation_names[a->missed], (int)a->missed + 1);
    CHECK_STR(mok_last_error(), words);
    CHECK_STR(mok_last_error(), ", expected ");
}

static void absent_body(ranks_env *e)
{
    absence *a = e->user;
    void *schedule = ranks_schedule_block(e), *context = ranks_context_block(e);
    ranks_part part = ranks_part_of(e, TOKENS, NULL);
    for (operation o = SCHEDULE; o < a->missed; o++)
        RANKS_OK(call(e, a, o, part, schedule, context));
    ranks_meet(e); /* nobody is late for want of a processor */
    if (e->rank != a->who) {
        double start = now();
        RANKS_FAIL(call(e, a, a->missed, part, schedule, context), MOK_E_TIMEOUT, "waited");
        check_sentence(e, a);
        double took = now() - start;
        CHECK(took > 0.9e-3 * TIMEOUT_MS);
        CHECK_LE(took, 1e-3 * TIMEOUT_MS + 20); /* bounded, on a machine that is busy too */
        RANKS_FAIL(call(e, a, a->missed, part, schedule, context), MOK_E_STATE, "broken");
        RANKS_FAIL(call(e, a, SCHEDULE, part, schedule, context), MOK_E_STATE, "broken");
        start = now();
        if (a->leave_first) {
            mok_workspace_destroy(e->w);
            e->w = NULL;
            CHECK_LE(now() - start, 20);
        }
        __atomic_add_fetch(&a->arrivals, 1, __ATOMIC_ACQ_REL);
    } else if (a->comes_after_ms >= 0) {
        while (__atomic_load_n(&a->arrivals, __ATOMIC_ACQUIRE) < P - 1)
            usleep(1000);
        usleep((useconds_t)(1000 * a->comes_after_ms));
        /* It may get through a schedule, whose only meeting the others have come to; no pass can be completed without them. */
        mok_status status = call(e, a, a->missed, part, schedule, context);
        CHECK(status == MOK_E_TIMEOUT || (status == MOK_OK && a->missed == SCHEDULE));
        if (status == MOK_OK)
            CHECK_EQ(call(e, a, FORWARD, part, schedule, context), MOK_E_TIMEOUT);
        RANKS_FAIL(call(e, a, SCHEDULE, part, schedule, context), MOK_E_STATE, "broken");
    }
    free(schedule);
    free(context);
}

/* A group that works, in the same process, right after. */
static void sound_body(ranks_env *e)
{
    absence *a = e->user;
    void *schedule = ranks_schedule_block(e), *context = ranks_context_block(e);
    ranks_part part = ranks_part_of(e, TOKENS, NULL);
    for (operation o = SCHEDULE; o < NUM_OPERATIONS; o++)
        RANKS_OK(call(e, a, o, part, schedule, context));
    free(schedule);
    free(context);
}

static void without(operation missed, int32_t who, int64_t comes_after_ms, bool leave_first)
{
    absence a = {.missed = missed, .who = who, .comes_after_ms = comes_after_ms, .leave_first = leave_first};
    mok_config c = good_config();
    layer_options o = {.ranks = P};
    if (!layer_make(&a.p, &c, TOKENS, LAYER_UNIFORM, 0, 3) || !layer_result_make(&a.r, &a.p, &o))
        exit(1);
    c.timeout_ms = TIMEOUT_MS;
    ranks_run(P, &c, absent_body, &a);
    c.timeout_ms = RANKS_TIMEOUT_MS;
    ranks_run(P, &c, sound_body, &a);
    layer_free(&a.p);
    layer_result_free(&a.r);
}

TEST(F1_a_rank_never_comes_to_schedule) { without(SCHEDULE, 2, -1, false); }
TEST(F1_a_rank_never_comes_to_forward) { without(FORWARD, 1, -1, false); }
TEST(F1_a_rank_never_comes_to_recompute) { without(RECOMPUTE, 0, -1, false); }
TEST(F1_a_rank_never_comes_to_backward) { without(BACKWARD, 2, -1, false); }
TEST(F2_the_others_leave_without_it) { without(FORWARD, 2, -1, true); }
TEST(F4_it_comes_when_the_others_have_given_up)
{
    for (operation o = SCHEDULE; o < NUM_OPERATIONS; o++)
        without(o, (int32_t)o % P, 0, false);
}
TEST(F4_it_comes_when_the_others_have_left)
{
    for (operation o = SCHEDULE; o < NUM_OPERATIONS; o++)
        without(o, (int32_t)(o + 1) % P, 10, true);
}

/* --- late, but in time ------------------------------------------------------------------------------------------------------------ */
static void late_body(ranks_env *e)
{
    absence *a = e->user;
    void *schedule = ranks_schedule_block(e), *context = ranks_context_block(e);
    ranks_part part = ranks_part_of(e, TOKENS, NULL);
    for (operation o = SCHEDULE; o < NUM_OPERATIONS; o++) {
        if ((int)o % P == e->rank)
            usleep(150000);
        RANKS_OK(call(e, a, o, part, schedule, context));
    }
    if (e->rank == 1)
        usleep(150000); /* and late to destroy */
    free(schedule);
    free(context);
}

TEST(C8_a_late_rank_is_waited_for)
{
    absence a = {.who = -1};
    mok_config c = good_config();
    layer_options o = {.ranks = P};
    if (!layer_make(&a.p, &c, TOKENS, LAYER_UNIFORM, 0, 3) || !layer_result_make(&a.r, &a.p, &o))
        exit(1);
    ranks_run(P, &c, late_body, &a);
    layer_free(&a.p);
    layer_result_free(&a.r);
}

/* --- creation and destruction ------------------------------------------------------------------------------------------------------ */
typedef struct missing { uint32_t absent; int64_t comes_after_ms; int through; } missing; /* bit r: rank r stays away */

static void create_without(ranks_env *e)
{
    missing *m = e->user;
    mok_config c = good_config();
    mok_workspace *w = NULL;
    c.timeout_ms = TIMEOUT_MS + 100 * e->rank; /* not all run out at once */
    ranks_meet(e);
    if (!(m->absent >> e->rank & 1)) {
        RANKS_FAIL(mok_workspace_create(e->group, &c, &w), MOK_E_TIMEOUT, "; not there:");
        const char *list = strstr(mok_last_error(), "; not there:");
        for (int32_t r = 0; r < e->ranks && list; r++) {
            char name[16];
            snprintf(name, sizeof name, " %d", r);
            if ((strstr(list, name) != NULL) != (m->absent >> r & 1))
                TEST_FAILED("rank %d: \"%s\" is wrong about rank %d", e->rank, mok_last_error(), r);
        }
        __atomic_add_fetch(&m->through, 1, __ATOMIC_ACQ_REL);
    } else if (m->comes_after_ms >= 0) {
        while (__atomic_load_n(&m->through, __ATOMIC_ACQUIRE) < e->ranks - __builtin_popcount(m->absent))
            usleep(1000);
        double start = now();
        RANKS_FAIL(mok_workspace_create(e->group, &c, &w), MOK_E_TIMEOUT, "not there:");
        CHECK_LE(now() - start, 20);
    }
    CHECK(w == NULL);
}

TEST(F1_a_rank_never_comes_to_create)
{
    for (uint32_t absent = 1; absent < 8; absent += 2) {
        missing m = {absent == 7 ? 4 : absent, -1, 0};
        ranks_run(3, NULL, create_without, &m);
    }
}

TEST(F1_a_rank_comes_to_create_when_the_others_have_left)
{
    for (uint32_t absent = 1; absent < 7; absent++) {
        missing m = {absent, 0, 0};
        ranks_run(3, NULL, create_without, &m);
    }
    missing last = {1u << 4, 0, 0};
    ranks_run(5, NULL, create_without, &last);
}

/* A rank that refuses its configuration tells the others, and waits for them no longer than it would with a good one. */
static void create_a_bad_one(ranks_env *e)
{
    mok_config c = good_config();
    mok_workspace *w = NULL;
    double start = now();
    c.timeout_ms = 0;
    c.hidden = 255;
    if (e->rank == 0)
        RANKS_FAIL(mok_workspace_create(e->group, &c, &w), MOK_E_TIMEOUT, "waited 400 ms");
    CHECK_LE(now() - start, 20);
}

TEST(F1_a_refused_configuration_waits_as_long_as_the_environment_says)
{
    setenv("MOK_TIMEOUT_MS", "400", 1);
    ranks_run(2, NULL, create_a_bad_one, NULL);
    unsetenv("MOK_TIMEOUT_MS");
}

/* A rank that never destroys its workspace: the others wait no longer than the time-out, and it may still do so later. */
static void destroy_without(ranks_env *e)
{
    int *through = e->user;
    double start = now();
    if (e->rank == 0) {
        while (__atomic_load_n(through, __ATOMIC_ACQUIRE) < e->ranks - 1)
            usleep(1000);
    } else {
        mok_workspace_destroy(e->w);
        e->w = NULL;
        CHECK(now() - start > 0.9e-3 * TIMEOUT_MS);
        CHECK_LE(now() - start, 20);
        __atomic_add_fetch(through, 1, __ATOMIC_ACQ_REL);
    }
}

TEST(F2_a_rank_does_not_destroy)
{
    int through = 0;
    mok_config c = good_config();
    c.timeout_ms = TIMEOUT_MS;
    ranks_run(P, &c, destroy_without, &through);
}

/* --- late at a rendezvous of threads: creation ---------------------------------------------------------------------------------- */
static char log_text[512];
static void keep_line(void *user, const char *text)
{
    (void)user;
    snprintf(log_text + strlen(log_text), sizeof log_text - strlen(log_text), "%s\n", text);
}

static void late_creation_body(ranks_env *e)
{
    mok_config c = good_config();
    mok_workspace *w = NULL;
    if (e->rank == 1)
        usleep(1300 * 1000);
    RANKS_OK(mok_workspace_create(e->group, &c, &w));
    mok_workspace_destroy(w);
}

TEST(C8_a_rank_late_to_creation_is_logged_and_waited_for)
{
    log_text[0] = 0;
    mok_set_log(keep_line, NULL);
    ranks_run(2, NULL, late_creation_body, NULL);
    mok_set_log(NULL, NULL);
    CHECK_STR(log_text, "rank 0 waits at a rendezvous of 2 ranks for late ones: 1");
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
