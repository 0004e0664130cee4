/* What tests on a real GPU share: is there one, which devices ranks get, and NaN into what a pass may not read before it was written. */
#ifndef MOK_TEST_GPU_H
#define MOK_TEST_GPU_H
#include "backend/backend.h"
#include "test.h"

static inline bool have_gpu(void)
{
    mok_backend_info b = MOK_INIT(mok_backend_info);
    for (int32_t i = 0; mok_backend_query(i, &b) == MOK_OK; i++)
        if (b.id == MOK_BACKEND_CUDA && b.usable)
            return true;
    return false;
}
#define NO_GPU "no GPU that the cuda backend can use"
#define NEED_GPU() do { if (!have_gpu()) SKIP(NO_GPU); } while (0)

/* Of 64 ranks, spread over as many GPUs as MOK_TEST_DEVICES says; default 1: virtual ranks. */
static inline const int32_t *gpu_devices(void)
{
    static int32_t devices[64];
    const char *number = getenv("MOK_TEST_DEVICES");
    for (int32_t i = 0; i < 64; i++)
        devices[i] = i % (number ? atoi(number) : 1);
    return devices;
}

/* The program's cases, with the GPUs' contexts and kernels kept loaded between runs: each run opens its own group, and the first takes a while. */
static inline int gpu_main(int argc, char **argv)
{
    mok_group *kept[64] = {NULL};
    const char *number = getenv("MOK_TEST_DEVICES");
    int32_t count = number ? atoi(number) : 1;
    if (have_gpu() && mok_group_create_local(count, gpu_devices(), kept) != MOK_OK)
        printf("  no group of %d GPUs: %s\n", count, mok_last_error());
    int status = test_main(argc, argv);
    for (int32_t i = 0; i < count; i++)
        mok_group_destroy(kept[i]);
    return status;
}

/* From the ring of a workspace to its counters. */
static inline void poison_ring(mok_workspace *w, void *user)
{
    const mk_memory *m = &w->memory;
    size_t bytes = (size_t)(m->counters - m->ring_x);
    void *nan = malloc(bytes + 1);
    (void)user;
    memset(nan, 0xff, bytes);
    CHECK_EQ(mok_memory_copy(w, w->local + m->ring_x, nan, bytes), MOK_OK);
    free(nan);
}
#endif
