/* Ranks as two processes on one GPU (MOK_SHARE_GPU=1): the bits of one rank, and a rank that dies is named by the other within the time-out. The same
 * body runs on the cpu backend everywhere; the GPU's cases are skipped, and counted as such, where there is none. */
#include "../multi/processes.h"
#include "../multi/twins.h"

enum { P = 2, TOKENS = 300, TIMEOUT_MS = 5000 };

typedef struct job {
    layer_problem p;
    layer_result r;
    mok_config cfg;
    bool dies;               /* rank 1, between the schedule and the forward */
} job;

/* In a process of its own: a parent that has opened the driver cannot fork children that use it. */
static bool have_gpu(void)
{
    int status = 1;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        mok_backend_info b = MOK_INIT(mok_backend_info);
        for (int32_t i = 0; mok_backend_query(i, &b) == MOK_OK; i++)
            if (b.id == MOK_BACKEND_CUDA && b.usable)
                _exit(0);
        _exit(1);
    }
    waitpid(pid, &status, 0);
    return status == 0;
}

/* --- a rank -------------------------------------------------------------------------------------------------------------- */
static mok_status join_group(process_env *pe, mok_backend_id backend)
{
    mok_bootstrap b = MOK_INIT(mok_bootstrap);
    pe->place = &pe->board->place[0];
    b.user = pe;
    b.all_gather = process_all_gather;
    b.timeout_ms = 60000;
    b.set_device = backend == MOK_BACKEND_CUDA;
    return mok_group_create_processes(&b, pe->env.rank, pe->env.ranks, &pe->env.group);
}

static void rank_body(process_env *pe)
{
    job *j = pe->user;
    ranks_env *e = &pe->env;
    setenv("MOK_SHARE_GPU", "1", 1);
    RANKS_OK(join_group(pe, j->cfg.backend));
    RANKS_OK(process_workspace(pe, &j->cfg));
    if (!e->w)
        return;
    twins_layer t;
    twins_layer_make(&t, e, &j->p, &j->r);
    RANKS_OK(mok_schedule(e->w, &t.schedule, NULL));
    RANKS_OK(mok_wait(e->w));
    if (j->dies && e->rank == 1)
        kill(getpid(), SIGKILL);
    double start = processes_now();
    mok_status status = mok_forward(e->w, &t.forward, NULL);
    if (status == MOK_OK && !j->dies)
        status = mok_backward(e->w, &t.backward, NULL);
    if (status == MOK_OK)
        status = mok_wait(e->w);
    pe->board->report[e->rank].seconds = processes_now() - start;
    snprintf(pe->board->report[e->rank].sentence, 512, "%s", status == MOK_OK ? "" : mok_last_error());
    CHECK_EQ(status, j->dies ? MOK_E_TIMEOUT : MOK_OK);
    if (status == MOK_OK)
        twins_fetch(&t.a, t.outputs);
    twins_layer_free(&t);
    process_leave(pe);
}

static void run(mok_backend_id backend, bool dies)
{
    job j;
    int statuses[PROCESSES_MAX];
    memset(&j, 0, sizeof j);
    j.dies = dies;
    j.cfg = ranks_config(256, 192, 6, 2, TOKENS);
    j.cfg.backend = backend;
    j.cfg.timeout_ms = dies ? TIMEOUT_MS : 60000;
    layer_options o = {.ranks = P};
    REQUIRE(layer_make(&j.p, &j.cfg, TOKENS, LAYER_UNIFORM, 0.1, test_seed()) && layer_result_make(&j.r, &j.p, &o));
    processes_share_result(&j.r, &j.p);
    process_board *board = processes_start(P, rank_body, &j);
    processes_join(board, P, statuses);
    CHECK_EQ(statuses[0], 0);
    if (dies) {
        CHECK(WIFSIGNALED(statuses[1]));
        CHECK_STR(board->report[0].sentence, "for rank 1 in forward (layer 0, call 2)");
        CHECK_LE(board->report[0].seconds, 1e-3 * TIMEOUT_MS + 3);
    } else {
        CHECK_EQ(statuses[1], 0);
    }
    printf("  rank 0 after %.3f s%s%s\n", board->report[0].seconds, dies ? ": " : "", board->report[0].sentence);
    if (!dies) { /* one rank, in this process: opened only now, after all forks of this case */
        int32_t devices[] = {0};
        layer_result one;
        layer_options alone = {.ranks = 1, .backend = backend, .devices = backend == MOK_BACKEND_CUDA ? devices : NULL};
        char error[512];
        REQUIRE(layer_result_make(&one, &j.p, &alone));
        if (layer_run(&j.p, &alone, &one, error) != MOK_OK)
            TEST_FAILED("%s", error);
        ranks_same_results("two processes against one rank", &j.p, &j.r, &one, true);
        layer_result_free(&one);
    }
    processes_free_result(&j.r);
    layer_free(&j.p);
}

TEST(processes_on_the_cpu_have_the_bits_of_one_rank) { run(MOK_BACKEND_CPU, false); }
TEST(F2_a_process_that_dies_is_named_on_the_cpu) { run(MOK_BACKEND_CPU, true); }
/* This one before the next: afterwards the parent has the driver open. */
TEST(F2_a_process_that_dies_is_named_by_the_other_on_its_gpu)
{
    if (!have_gpu())
        SKIP("no GPU that the cuda backend can use");
    run(MOK_BACKEND_CUDA, true);
}
TEST(two_processes_on_one_gpu_have_the_bits_of_one_rank)
{
    if (!have_gpu())
        SKIP("no GPU that the cuda backend can use");
    run(MOK_BACKEND_CUDA, false);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
