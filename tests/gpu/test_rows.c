/* The reports of tests/multi/rows.h on a real GPU, ranks being virtual (or over MOK_TEST_DEVICES GPUs), and those that only a GPU can be asked. Skipped,
 * and counted as such, where there is no GPU. */
#include "gpu.h"
#include "layer.h"

#define ROWS_BACKEND MOK_BACKEND_CUDA
#define ROWS_DEVICES gpu_devices()
#define ROWS_POISON poison_ring
#define ROWS_BEFORE_RUN()
#define ROWS_SLOW 0
#include "../multi/rows.h"

/* Another thread takes memory of the same GPU, fills it with NaN and gives it back, all the while. */
typedef struct churn { int stop; int64_t rounds; } churn;

static void *churn_main(void *argument)
{
    churn *c = argument;
    mok_group *group = NULL;
    mok_workspace *w = NULL;
    mok_config wish = shape(1, 1);
    uint64_t state = test_seed();
    enum { MOST = 1 << 22 };
    char *nan = malloc(MOST);
    wish.max_tokens = 1;
    wish.backend = MOK_BACKEND_CUDA;
    memset(nan, 0xff, MOST);
    if (mok_group_create_local(1, gpu_devices(), &group) != MOK_OK || mok_workspace_create(group, &wish, &w) != MOK_OK)
        TEST_FAILED("%s", mok_last_error());
    while (w && !__atomic_load_n(&c->stop, __ATOMIC_RELAXED)) {
        size_t bytes = (size_t)(1 + test_below(&state, MOST));
        void *memory = NULL;
        CHECK_EQ(mok_memory_alloc(w, bytes, &memory), MOK_OK);
        CHECK_EQ(mok_memory_copy(w, memory, nan, bytes), MOK_OK);
        mok_memory_free(w, memory);
        c->rounds++;
    }
    mok_workspace_destroy(w);
    mok_group_destroy(group);
    free(nan);
    return NULL;
}

TEST(N12_a_hundred_identical_steps_beside_a_busy_allocator)
{
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result want, r;
    churn side = {0, 0};
    pthread_t thread;
    make(&p, &c, 200);
    layer_options o = small_ring(2);
    run_row("the first step", &p, &o, &want);
    REQUIRE(pthread_create(&thread, NULL, churn_main, &side) == 0);
    o.repeat = 10;
    for (int i = 0; i < 10; i++) {
        run_row("ten steps", &p, &o, &r);
        ranks_same_results("ten steps", &p, &r, &want, true);
        layer_result_free(&r);
    }
    __atomic_store_n(&side.stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    printf("  meanwhile memory was taken and given back %lld times\n", (long long)side.rounds);
    CHECK(side.rounds > 0);
    layer_result_free(&want);
    layer_free(&p);
}

TEST(C11_fewer_sms_than_there_are)
{
    static const int32_t reserve[] = {2, 31, 64, 120};
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result r, want;
    make(&p, &c, 400);
    layer_options o = small_ring(1);
    run_row("all SMs", &p, &o, &want);
    for (int i = 0; i < 4; i++) {
        p.cfg.reserve_sms = reserve[i];
        run_row("some SMs reserved", &p, &o, &r);
        ranks_same_results("some SMs reserved", &p, &r, &want, true);
        layer_result_free(&r);
    }
    layer_result_free(&want);
    layer_free(&p);
}

int main(int argc, char **argv)
{
    test_skip_all = have_gpu() ? NULL : NO_GPU;
    return gpu_main(argc, argv);
}
