/* Symmetric device memory between processes, on a driver without GPUs whose virtual memory works like the real one: heaps that all ranks see, every
 * failure told to all ranks in one sentence, and nothing left behind. */
#include "../multi/processes.h"
#include "../unit/bad_config.h"
#include "fake_driver.h"

#include "backend/backend.h"
#include "cuda/host/vmm.h"

enum { P = 3 };

typedef struct job {
    mok_config cfg;
    const char *fail_name;   /* fails on rank 1 */
    bool no_fd, no_vmm, fabric;
    mok_status want;
    const char *words;
} job;

static mok_config device_config(void)
{
    mok_config c = good_config();
    c.backend = MOK_BACKEND_AUTO;
    c.timeout_ms = 20000;
    return c;
}

static mok_status device_group(process_env *pe, int32_t device)
{
    mok_bootstrap b = MOK_INIT(mok_bootstrap);
    pe->place = &pe->board->place[0];
    b.user = pe;
    b.all_gather = process_all_gather;
    b.timeout_ms = 20000;
    b.set_device = true;
    b.device = device;
    return mok_group_create_processes(&b, pe->env.rank, pe->env.ranks, &pe->env.group);
}

static void check_nothing_left(void)
{
    CHECK_EQ(fake.live_handles, 0);
    CHECK_EQ(fake.live_ranges, 0);
    CHECK_EQ(fake.live_blocks, 0);
    CHECK_EQ(fake.live_contexts, 0);
    CHECK_EQ(fake.pushes, fake.pops);
    CHECK_EQ(layer_heap_mappings(), 0);
}

static void sharing_body(process_env *pe)
{
    job *j = pe->user;
    ranks_env *e = &pe->env;
    fake_reset(P);
    RANKS_OK(device_group(pe, e->rank));
    RANKS_OK(process_workspace(pe, &j->cfg));
    CHECK_EQ(e->cfg.backend, MOK_BACKEND_CUDA); /* auto follows the device */
    mok_workspace *w = e->w;
    for (int64_t i = 0; i < w->memory.heap_bytes; i += 997)
        CHECK_EQ(w->heap[i], 0);
    char mine = 1, all[P];
    RANKS_OK(w->group->transport->all_gather(w->group, &mine, all, 1, 20000)); /* all have looked */
    memset(w->heap, 'a' + e->rank, (size_t)w->memory.heap_bytes);
    RANKS_OK(w->group->transport->all_gather(w->group, &mine, all, 1, 20000)); /* all have written */
    for (int32_t r = 0; r < P; r++) {
        CHECK_EQ(w->heaps[r][0], 'a' + r);
        CHECK_EQ(w->heaps[r][w->memory.heap_bytes - 1], 'a' + r);
    }
    process_leave(pe);
    check_nothing_left();
}

static void run_job(job *j, void (*body)(process_env *))
{
    int statuses[PROCESSES_MAX];
    j->cfg = device_config();
    process_board *board = processes_start(P, body, j);
    processes_join(board, P, statuses);
    for (int32_t r = 0; r < P; r++) {
        CHECK_EQ(statuses[r], 0);
        if (j->words)
            CHECK_STR(board->report[r].sentence, j->words);
        if (j->words && strcmp(board->report[r].sentence, board->report[0].sentence))
            TEST_FAILED("rank %d says \"%s\", rank 0 \"%s\"", r, board->report[r].sentence, board->report[0].sentence);
    }
    if (j->words)
        printf("  %s\n", board->report[0].sentence);
}

TEST(heaps_of_device_memory_are_shared_between_processes)
{
    job j = {.want = MOK_OK};
    run_job(&j, sharing_body);
}

static void failing_body(process_env *pe)
{
    job *j = pe->user;
    ranks_env *e = &pe->env;
    fake_reset(P);
    if (j->fabric)
        setenv("MOK_HANDLE", "fabric", 1);
    RANKS_OK(device_group(pe, e->rank));
    if (e->rank == 1) {
        fake.no_fd_handles = j->no_fd;
        fake.no_vmm = j->no_vmm;
        fake.fail_name = j->fail_name;
    }
    fake.fabric_handles = j->fabric && e->rank != 0;
    CHECK_EQ(process_workspace(pe, &j->cfg), j->want);
    snprintf(pe->board->report[e->rank].sentence, 512, "%s", mok_last_error());
    fake.fail_name = NULL;
    process_leave(pe);
    check_nothing_left();
}

TEST(E2_a_device_that_cannot_share_is_named_on_all_ranks)
{
    job fd = {.no_fd = true, .want = MOK_E_ENV, .words = "rank 1: device 1 (Fake H101) does not offer file-descriptor handles"};
    job vmm = {.no_vmm = true, .want = MOK_E_ENV, .words = "device 1 (Fake H101) does not offer virtual memory management"};
    job fabric = {.fabric = true, .want = MOK_E_ENV, .words = "device 0 (Fake H100) does not offer fabric handles"};
    run_job(&fd, failing_body);
    run_job(&vmm, failing_body);
    run_job(&fabric, failing_body);
}

TEST(E5_every_failing_driver_call_is_told_to_all_ranks_and_leaves_nothing)
{
    static const char *const calls[] = {"cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle",
                                        "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        job j = {.fail_name = calls[i], .want = MOK_E_MEMORY, .words = "rank 1"};
        run_job(&j, failing_body);
    }
}

static void absent_device_body(process_env *pe)
{
    fake_reset(2);
    CHECK_EQ(device_group(pe, pe->env.rank), MOK_E_ARG);
    snprintf(pe->board->report[pe->env.rank].sentence, 512, "%s", mok_last_error());
    CHECK(pe->env.group == NULL);
    check_nothing_left();
}

TEST(S8_more_processes_than_devices_is_told_to_all_ranks)
{
    job j = {.words = "rank 2: device 2: there are 2 CUDA devices, numbered from 0"};
    run_job(&j, absent_device_body);
}

/* --- two processes on one GPU ------------------------------------------------------------------------------------------------- */
static void one_gpu_body(process_env *pe)
{
    job *j = pe->user;
    ranks_env *e = &pe->env;
    bool allowed = j->want == MOK_OK;
    fake_reset(1);
    if (allowed)
        setenv("MOK_SHARE_GPU", "1", 1);
    RANKS_OK(device_group(pe, 0));
    CHECK_EQ(process_workspace(pe, &j->cfg), j->want);
    snprintf(pe->board->report[e->rank].sentence, 512, "%s", allowed ? "" : mok_last_error());
    if (allowed) { /* each GPU context has its own turns: the barrier is the kernel's, as with a GPU for each rank */
        void *schedule = NULL;
        RANKS_OK(mok_memory_alloc(e->w, (size_t)e->plan.schedule_bytes, &schedule));
        mok_schedule_args s = MOK_INIT(mok_schedule_args);
        s.schedule = schedule;
        RANKS_OK(mok_schedule(e->w, &s, NULL));
        CHECK_EQ(fake.event_waits, 0);
        CHECK_EQ(fake.event_records, 1); /* the end of the call, and no meeting */
        mok_memory_free(e->w, schedule);
    }
    process_leave(pe);
    check_nothing_left();
}

TEST(two_processes_on_one_gpu_are_refused_unless_asked_for)
{
    job refused = {.want = MOK_E_UNSUPPORTED, .words = "ranks 0 and 1 share a GPU (device 0 of rank 0) in processes of their own"}, allowed = {.want = MOK_OK};
    run_job(&refused, one_gpu_body);
    run_job(&allowed, one_gpu_body);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
