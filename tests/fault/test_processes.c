/* Ranks as processes: the same bits as threads; ranks that are killed or stopped are named by all others within the time-out, who then close what they
 * have, give their memory back and go on without them; disagreement gives all ranks the same sentence. */
#define _GNU_SOURCE /* unshare */
#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>

#include "../multi/processes.h"
#include "../unit/bad_config.h"

enum { P = 3, TOKENS = 90, TIMEOUT_MS = 2000 };

typedef struct layer {
    layer_problem p;
    layer_result r;
    mok_config cfg;
    int kill_signal;         /* SIGKILL or SIGSTOP */
    bool in_creation;
    int32_t victim;
} layer;

static layer make_layer(int32_t ranks)
{
    layer l;
    memset(&l, 0, sizeof l);
    layer_options o = {.ranks = ranks};
    l.cfg = good_config();
    l.cfg.max_tokens = TOKENS;
    l.cfg.timeout_ms = TIMEOUT_MS;
    if (!layer_make(&l.p, &l.cfg, TOKENS, LAYER_UNIFORM, 0.1, test_seed()) || !layer_result_make(&l.r, &l.p, &o))
        exit(1);
    processes_share_result(&l.r, &l.p);
    return l;
}

static void free_layer(layer *l)
{
    processes_free_result(&l->r);
    layer_free(&l->p);
}

/* A rank's schedule call of a layer; free its schedule. */
static mok_schedule_args schedule_call(const ranks_env *e, const layer *l, uint64_t number)
{
    mok_schedule_args s = ranks_schedule_args(&l->p, ranks_part_of(e, TOKENS, NULL), ranks_schedule_block(e));
    s.layer = number;
    return s;
}

/* All ranks end well. */
static process_board *run_all(int32_t ranks, void (*body)(process_env *), layer *l)
{
    int statuses[PROCESSES_MAX];
    process_board *board = processes_start(ranks, body, l);
    processes_join(board, ranks, statuses);
    for (int32_t r = 0; r < ranks; r++)
        CHECK_EQ(statuses[r], 0);
    return board;
}

/* --- a whole layer --------------------------------------------------------------------------------------------------------- */
static void run_layer(process_env *pe, layer *l)
{
    ranks_env *e = &pe->env;
    void *schedule = ranks_schedule_block(e), *context = ranks_context_block(e);
    ranks_part part = ranks_part_of(e, TOKENS, NULL);
    mok_schedule_args s = ranks_schedule_args(&l->p, part, schedule);
    mok_forward_args f = ranks_forward_args(e, &l->p, part, schedule, context, &l->r);
    mok_backward_args b = ranks_backward_args(e, &l->p, part, schedule, context, &l->r);
    RANKS_OK(mok_schedule(e->w, &s, NULL));
    RANKS_OK(mok_forward(e->w, &f, NULL));
    RANKS_OK(mok_backward(e->w, &b, NULL));
    free(schedule);
    free(context);
}

static void sound_body(process_env *pe)
{
    ranks_env *e = &pe->env;
    layer *l = pe->user;
    RANKS_OK(process_group(pe, 0, e->rank, e->ranks));
    for (int again = 0; again < 2; again++) { /* a second workspace of the group */
        RANKS_OK(process_workspace(pe, &l->cfg));
        CHECK(layer_heap_mappings() >= e->ranks);
        run_layer(pe, l);
        mok_workspace_destroy(e->w);
        e->w = NULL;
        CHECK_EQ(layer_heap_mappings(), 0);
    }
    process_leave(pe);
}

static void check_against_threads(const char *what, layer *l)
{
    layer_result threads;
    layer_options o = {.ranks = 2};
    char error[512];
    if (!layer_result_make(&threads, &l->p, &o))
        exit(1);
    if (layer_run(&l->p, &o, &threads, error) != MOK_OK)
        TEST_FAILED("%s", error);
    ranks_same_results(what, &l->p, &l->r, &threads, true);
    layer_result_free(&threads);
}

TEST(processes_have_the_bits_of_threads)
{
    for (int32_t ranks = 1; ranks <= 4; ranks++) {
        layer l = make_layer(ranks);
        run_all(ranks, sound_body, &l);
        check_against_threads("processes against threads", &l);
        free_layer(&l);
    }
}

/* --- a rank that dies or stops ---------------------------------------------------------------------------------------------- */
static void victim_body(process_env *pe)
{
    layer *l = pe->user;
    ranks_env *e = &pe->env;
    int32_t me = e->rank, others = e->ranks - 1, place = me > l->victim ? me - 1 : me;
    RANKS_OK(process_group(pe, 0, me, e->ranks));
    if (!l->in_creation) {
        RANKS_OK(process_workspace(pe, &l->cfg));
        mok_schedule_args s = schedule_call(e, l, 7);
        RANKS_OK(mok_schedule(e->w, &s, NULL));
        free(s.schedule);
    }
    if (me == l->victim) {
        kill(getpid(), l->kill_signal);
        _exit(0); /* continued at the test's end */
    }
    double start = processes_now();
    if (l->in_creation) {
        RANKS_FAIL(process_workspace(pe, &l->cfg), MOK_E_TIMEOUT, "not there: 1");
    } else {
        mok_schedule_args s = schedule_call(e, l, 8);
        RANKS_FAIL(mok_schedule(e->w, &s, NULL), MOK_E_TIMEOUT, "for rank 1 in schedule (layer 8, call 2): its epoch is 1, expected 2");
        free(s.schedule);
    }
    pe->board->report[me].seconds = processes_now() - start;
    snprintf(pe->board->report[me].sentence, 512, "%s", mok_last_error());
    start = processes_now();
    process_leave(pe); /* at once, and everything is given back */
    CHECK_LE(processes_now() - start, 1.0);
    CHECK_EQ(layer_heap_mappings(), 0);
    /* A group of those who are left, in the same processes. */
    RANKS_OK(process_group(pe, 1, place, others));
    RANKS_OK(process_workspace(pe, &l->cfg));
    run_layer(pe, l);
    process_leave(pe);
    CHECK_EQ(layer_heap_mappings(), 0);
}

static void with_victim(int signal, bool in_creation, double at_most_seconds)
{
    layer l = make_layer(P - 1);
    int statuses[PROCESSES_MAX];
    l.kill_signal = signal;
    l.in_creation = in_creation;
    l.victim = 1;
    process_board *board = processes_start(P, victim_body, &l);
    for (int32_t r = 0; r < P; r++)
        if (r != l.victim)
            waitpid(board->pid[r], &statuses[r], 0);
    kill(board->pid[l.victim], SIGKILL);
    waitpid(board->pid[l.victim], &statuses[l.victim], 0);
    for (int32_t r = 0; r < P; r++) {
        if (r == l.victim)
            continue;
        CHECK_EQ(statuses[r], 0);
        CHECK_LE(board->report[r].seconds, at_most_seconds);
        printf("  rank %d after %.2f s: %s\n", r, board->report[r].seconds, board->report[r].sentence);
    }
    check_against_threads("the group that is left", &l);
    free_layer(&l);
}

/* A process that has ended is noticed at once, one that has stopped after the time-out. */
TEST(F2_a_killed_rank_is_named_and_the_others_go_on) { with_victim(SIGKILL, false, 1.5); }
TEST(F1_a_stopped_rank_is_named_and_the_others_go_on) { with_victim(SIGSTOP, false, 1e-3 * TIMEOUT_MS + 5); }
TEST(F2_a_rank_killed_before_creation_is_named) { with_victim(SIGKILL, true, 1.5); }
TEST(F1_a_rank_stopped_before_creation_is_named) { with_victim(SIGSTOP, true, 1e-3 * TIMEOUT_MS + 5); }

/* A rank joins all others, in a group and a workspace of it. */
static void join_all(process_env *pe, const mok_config *cfg)
{
    ranks_env *e = &pe->env;
    RANKS_OK(process_group(pe, 0, e->rank, e->ranks));
    RANKS_OK(process_workspace(pe, cfg));
}

/* --- disagreement ------------------------------------------------------------------------------------------------------------ */
static void same_sentence(int32_t ranks, void (*body)(process_env *), layer *l, const char *words)
{
    process_board *board = run_all(ranks, body, l);
    for (int32_t r = 0; r < ranks; r++) {
        CHECK_STR(board->report[r].sentence, words);
        if (strcmp(board->report[r].sentence, board->report[0].sentence))
            TEST_FAILED("rank %d says \"%s\", rank 0 \"%s\"", r, board->report[r].sentence, board->report[0].sentence);
    }
    printf("  all ranks: %s\n", board->report[0].sentence);
}

static void report(process_env *pe, mok_status status, mok_status want)
{
    CHECK_EQ(status, want);
    snprintf(pe->board->report[pe->env.rank].sentence, 512, "%s", mok_last_error());
}

static void config_body(process_env *pe)
{
    layer *l = pe->user;
    mok_config cfg = l->cfg;
    ranks_env *e = &pe->env;
    RANKS_OK(process_group(pe, 0, e->rank, e->ranks));
    cfg.max_tokens += e->rank == 2 ? 64 : 0;
    report(pe, process_workspace(pe, &cfg), MOK_E_MISMATCH);
    CHECK_EQ(layer_heap_mappings(), 0);
    RANKS_OK(process_workspace(pe, &l->cfg)); /* the group works on */
    process_leave(pe);
}

TEST(F1_ranks_of_different_configurations_get_one_sentence)
{
    layer l = make_layer(P);
    same_sentence(P, config_body, &l, "max_tokens is ");
    free_layer(&l);
}

static void num_ranks_body(process_env *pe)
{
    mok_bootstrap b = MOK_INIT(mok_bootstrap);
    pe->place = &pe->board->place[0];
    b.user = pe;
    b.all_gather = process_all_gather;
    report(pe, mok_group_create_processes(&b, pe->env.rank, pe->env.ranks + (pe->env.rank == 1), &pe->env.group), MOK_E_MISMATCH);
    CHECK(pe->env.group == NULL);
}

TEST(ranks_of_different_group_sizes_get_one_sentence)
{
    /* The caller's all_gather decides who takes part; the two ranks see that they mean different groups. */
    layer l = make_layer(2);
    same_sentence(2, num_ranks_body, &l, "num_ranks is 2 on rank 0, but 3 on rank 1");
    free_layer(&l);
}

static void layer_number_body(process_env *pe)
{
    layer *l = pe->user;
    ranks_env *e = &pe->env;
    join_all(pe, &l->cfg);
    mok_schedule_args s = schedule_call(e, l, e->rank == 1 ? 4 : 3);
    report(pe, mok_schedule(e->w, &s, NULL), MOK_E_MISMATCH);
    s.layer = 5;
    RANKS_OK(mok_schedule(e->w, &s, NULL)); /* the next call works */
    free(s.schedule);
    process_leave(pe);
}

TEST(F1_ranks_in_different_layers_get_one_sentence)
{
    layer l = make_layer(P);
    same_sentence(P, layer_number_body, &l, "call 1 is schedule of layer 3 with schedule 1 on rank 0, but schedule of layer 4");
    free_layer(&l);
}

/* What a caller finds wrong by itself is told to the others in its own words. */
static void refusing_body(process_env *pe)
{
    layer *l = pe->user;
    ranks_env *e = &pe->env;
    join_all(pe, &l->cfg);
    mok_schedule_args s = schedule_call(e, l, 3);
    RANKS_FAIL(mok_refuse(e->w, 5, 3, "", NULL), MOK_E_ARG, "call is 5");
    RANKS_FAIL(mok_refuse(e->w, MOK_CALL_FORWARD, 3, NULL, NULL), MOK_E_ARG, "sentence is NULL");
    if (e->rank == 1)
        RANKS_OK(mok_refuse(e->w, MOK_CALL_SCHEDULE, 3, "the router gave no ids", NULL));
    else
        RANKS_FAIL(mok_schedule(e->w, &s, NULL), MOK_E_PEER, "rank 1 refused its schedule call of layer 3: the router gave no ids");
    RANKS_OK(mok_schedule(e->w, &s, NULL));
    free(s.schedule);
    process_leave(pe);
}

TEST(a_callers_own_refusal_reaches_the_other_ranks)
{
    layer l = make_layer(P);
    run_all(P, refusing_body, &l);
    free_layer(&l);
}

/* Rank 0 uses workspace 1 and then 2, rank 1 the other way round: with a time-out of a minute, both are told at once. */
static void interleaved_body(process_env *pe)
{
    layer *l = pe->user;
    ranks_env *e = &pe->env;
    mok_config cfg = l->cfg;
    mok_workspace *both[2];
    cfg.timeout_ms = 50000;
    RANKS_OK(process_group(pe, 0, e->rank, e->ranks));
    for (int i = 0; i < 2; i++) {
        RANKS_OK(process_workspace(pe, &cfg));
        both[i] = e->w;
    }
    mok_schedule_args s = schedule_call(e, l, 0);
    for (int i = 0; i < 2; i++) { /* in the same order, they work */
        RANKS_OK(mok_schedule(both[i], &s, NULL));
        RANKS_OK(mok_schedule(both[i], &s, NULL));
    }
    double start = processes_now();
    s.layer = 1 + (uint64_t)e->rank;
    report(pe, mok_schedule(both[e->rank], &s, NULL), MOK_E_MISMATCH);
    CHECK_LE(processes_now() - start, 10);
    RANKS_FAIL(mok_schedule(both[1 - e->rank], &s, NULL), MOK_E_STATE, "broken");
    free(s.schedule);
    mok_workspace_destroy(both[1]);
    mok_workspace_destroy(both[0]);
    e->w = NULL;
    CHECK_EQ(layer_heap_mappings(), 0);
    process_leave(pe);
}

TEST(C6_two_workspaces_interleaved_differently_are_told_at_once)
{
    layer l = make_layer(2);
    same_sentence(2, interleaved_body, &l, "rank 0 is in schedule of layer 1 in workspace 1, rank 1 in schedule of layer 2 in workspace 2");
    free_layer(&l);
}

/* --- late is not dead ---------------------------------------------------------------------------------------------------------- */
static char log_text[512];
static void keep_line(void *user, const char *text)
{
    (void)user;
    snprintf(log_text + strlen(log_text), sizeof log_text - strlen(log_text), "%s\n", text);
}

static void late_body(process_env *pe)
{
    layer *l = pe->user;
    ranks_env *e = &pe->env;
    mok_config cfg = l->cfg;
    cfg.timeout_ms = 30000;
    mok_set_log(keep_line, NULL);
    join_all(pe, &cfg);
    mok_schedule_args s = schedule_call(e, l, 9);
    if (e->rank == 1)
        usleep(1600 * 1000);
    RANKS_OK(mok_schedule(e->w, &s, NULL));
    snprintf(pe->board->report[e->rank].sentence, 512, "%s", log_text);
    free(s.schedule);
    process_leave(pe);
}

TEST(C8_a_late_rank_is_logged_as_late_and_waited_for)
{
    layer l = make_layer(2);
    process_board *board = run_all(2, late_body, &l);
    CHECK_STR(board->report[0].sentence, "rank 1 is late: rank 0 has waited 1.");
    CHECK_STR(board->report[0].sentence, "for it in schedule (layer 9, call 1)");
    CHECK_STR(board->report[0].sentence, "rank 1 has come to schedule (layer 9, call 1) after 1.");
    CHECK_EQ(board->report[1].sentence[0], 0);
    printf("  %s", board->report[0].sentence);
    free_layer(&l);
}

static void few_descriptors_body(process_env *pe)
{
    layer *l = pe->user;
    ranks_env *e = &pe->env;
    struct rlimit most;
    RANKS_OK(process_group(pe, 0, e->rank, e->ranks));
    getrlimit(RLIMIT_NOFILE, &most);
    int used = open("/dev/null", O_RDONLY); /* the lowest that is free */
    close(used);
    most.rlim_cur = (rlim_t)used + 1; /* room for its own memory's, not for those of the others */
    if (e->rank == 1)
        setrlimit(RLIMIT_NOFILE, &most);
    report(pe, process_workspace(pe, &l->cfg), MOK_E_MEMORY);
    CHECK_EQ(layer_heap_mappings(), 0);
    most.rlim_cur = most.rlim_max;
    setrlimit(RLIMIT_NOFILE, &most);
    RANKS_OK(process_workspace(pe, &l->cfg)); /* the group works on */
    process_leave(pe);
}

TEST(E5_a_rank_without_room_for_descriptors_is_named_on_all)
{
    layer l = make_layer(P);
    same_sentence(P, few_descriptors_body, &l, "no descriptor came, as this process may hold no more of them (ulimit -n)");
    free_layer(&l);
}

/* The last case of the file: what it leaves, nothing else may need. */
TEST(E8_a_machine_without_a_network_will_do)
{
    if (unshare(CLONE_NEWNET) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0)
        SKIP("this process may not make a network namespace");
    layer l = make_layer(3);
    run_all(3, sound_body, &l);
    check_against_threads("processes without a network", &l);
    free_layer(&l);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
