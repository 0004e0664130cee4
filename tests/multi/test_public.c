/* Public bug reports against other systems, as small runs of our layer: the id is in the case's name.
 * Rows shown elsewhere: S1 also stage.wgrad; D2 stage.s5_combine; C3, D1, F6, P6, R6 end2end.bits; C6, D4, N1 end2end.workspace; N13
 * end2end.reference; M1, S8 unit.layout; C8, F1, F2, F4, S8, S9 fault. Rows of one layer run are in rows.h, which GPUs and the emulated GPU run too. Rows
 * that need FP8 or PyTorch are not here. */
#define ROWS_BACKEND MOK_BACKEND_CPU
#define ROWS_DEVICES NULL
#define ROWS_POISON rig_poison
#define ROWS_BEFORE_RUN()
#define ROWS_SLOW RANKS_SLOW
#include "rows.h"

#include <malloc.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OWN_ALLOCATOR 1 /* the sanitizer's: it does not answer mallinfo, and aborts on absurd sizes */
#else
#define OWN_ALLOCATOR 0
#endif

TEST(S4_every_size_can_be_planned)
{
    for (int64_t hidden = 256; hidden <= 8192; hidden += 128) {
        mok_config c = shape(8, 2);
        mok_plan plan = MOK_INIT(mok_plan);
        c.hidden = hidden;
        c.intermediate = 8448 - hidden;
        c.max_tokens = 256;
        CHECK_EQ(mok_plan_query(&c, 8, 3, 132, 0, 0, &plan, NULL, NULL), MOK_OK);
    }
}

TEST(S11_forward_and_backward_are_checked_together)
{
    mok_config c = shape(4, 2);
    mok_plan plan = MOK_INIT(mok_plan);
    c.max_tokens = 100;
    c.ring_rows = 512;
    c.minibatch_rows = 128;
    c.minibatch_rows_bwd = 384; /* fits the forward, not the backward */
    CHECK_EQ(mok_plan_query(&c, 2, 0, 0, 0, 0, &plan, NULL, NULL), MOK_E_SHAPE);
    CHECK_STR(mok_last_error(), "384 backward): it must be at least 768");
}

/* Router weights in bf16, on the caller's wish: the bits of the same values in fp32; the gradient rounded once. */
typedef struct bf16_router { layer_problem p; layer_result want, got; uint16_t *weights, *dweights; } bf16_router;

static void run_bf16_router(ranks_env *e)
{
    bf16_router *b = e->user;
    ranks_part part = ranks_part_of(e, b->p.tokens, NULL);
    void *schedule = ranks_schedule_block(e), *context = ranks_context_block(e);
    mok_schedule_args s = ranks_schedule_args(&b->p, part, schedule);
    mok_forward_args f = ranks_forward_args(e, &b->p, part, schedule, context, &b->got);
    mok_backward_args a = ranks_backward_args(e, &b->p, part, schedule, context, &b->got);
    f.router_weights = a.router_weights = b->weights + part.first * 2;
    a.drouter_weights = b->dweights + part.first * 2;
    RANKS_OK(mok_schedule(e->w, &s, NULL));
    RANKS_OK(mok_forward(e->w, &f, NULL));
    RANKS_OK(mok_backward(e->w, &a, NULL));
    free(schedule);
    free(context);
}

TEST(R8_router_weights_in_bf16)
{
    mok_config c = shape(6, 2);
    bf16_router b;
    make(&b.p, &c, 70);
    b.weights = malloc(140 * 2);
    b.dweights = malloc(140 * 2);
    b.p.expert_ids[11] = -1;
    for (int i = 0; i < 140; i++) {
        b.weights[i] = layer_bf16(b.p.router_weights[i]);
        b.p.router_weights[i] = layer_float(b.weights[i]);
    }
    layer_options o = options(3);
    rig_run("fp32", &b.p, &o, &b.want);
    if (!layer_result_make(&b.got, &b.p, &o))
        exit(1);
    mok_config r = ranks_config(128, 64, 6, 2, 70);
    r.router_dtype = MOK_BF16;
    ranks_run(3, &r, run_bf16_router, &b);
    CHECK_BYTES(b.got.out, b.want.out, 70 * 128 * 2);
    CHECK_BYTES(b.got.dx, b.want.dx, 70 * 128 * 2);
    CHECK_BYTES(b.got.dup, b.want.dup, 6 * 64 * 128 * 2);
    for (int i = 0; i < 140; i++)
        CHECK_EQ(b.dweights[i], layer_bf16(b.want.drouter_weights[i]));
    layer_result_free(&b.got);
    layer_result_free(&b.want);
    layer_free(&b.p);
    free(b.weights);
    free(b.dweights);
}

/* Another thread allocates, poisons and frees all the while. */
typedef struct churn { int stop; } churn;

static void *churn_main(void *argument)
{
    churn *c = argument;
    uint64_t state = 4;
    while (!__atomic_load_n(&c->stop, __ATOMIC_RELAXED)) {
        size_t bytes = (size_t)(1 + test_below(&state, 200000));
        void *p = malloc(bytes);
        memset(p, 0xff, bytes);
        free(p);
    }
    return NULL;
}

TEST(N12_identical_steps_beside_a_busy_allocator)
{
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result want, r;
    churn side = {0};
    pthread_t thread;
    make(&p, &c, 60);
    layer_options o = small_ring(2);
    o.cpu_threads = 2;
    rig_run("the first step", &p, &o, &want);
    REQUIRE(pthread_create(&thread, NULL, churn_main, &side) == 0);
    for (int i = 0; i < (RANKS_SLOW ? 4 : 30); i++) {
        rig_run("a step", &p, &o, &r);
        ranks_same_results("a step", &p, &r, &want, true);
        layer_result_free(&r);
    }
    __atomic_store_n(&side.stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    layer_result_free(&want);
    layer_free(&p);
}

/* --- M --------------------------------------------------------------------------------------------------------------------------------- */
typedef struct measured { int64_t planned, workers; size_t in_use; } measured;

static size_t in_use(void)
{
    struct mallinfo2 m = mallinfo2();
    return m.uordblks + m.hblkhd;
}

static void measure(ranks_env *e)
{
    measured *m = e->user;
    size_t heap = malloc_usable_size(e->w->heap), local = malloc_usable_size(e->w->local);
    CHECK(heap >= (size_t)e->plan.heap_bytes && heap < (size_t)e->plan.heap_bytes + 8192);
    CHECK(local >= (size_t)e->plan.local_bytes && local < (size_t)e->plan.local_bytes + 8192);
    /* The plan made before anything existed. */
    mok_plan before = MOK_INIT(mok_plan);
    CHECK_EQ(mok_plan_query(e->wish, e->ranks, e->rank, 0, 0, 0, &before, NULL, NULL), MOK_OK);
    CHECK_EQ(before.heap_bytes, e->plan.heap_bytes);
    CHECK_EQ(before.local_bytes, e->plan.local_bytes);
    CHECK_EQ(before.schedule_bytes, e->plan.schedule_bytes);
    CHECK_EQ(before.context_bytes, e->plan.context_bytes);
    CHECK_EQ(before.ring_rows, e->plan.ring_rows);
    CHECK_EQ(before.saved_rows, e->plan.saved_rows);
    CHECK_EQ(before.forward.minibatch_rows, e->plan.forward.minibatch_rows);
    CHECK_EQ(before.backward.minibatch_rows, e->plan.backward.minibatch_rows);
    __atomic_add_fetch(&m->planned, e->plan.heap_bytes + e->plan.local_bytes, __ATOMIC_RELAXED);
    __atomic_add_fetch(&m->workers, e->cfg.cpu_threads, __ATOMIC_RELAXED);
    ranks_meet(e);
    if (e->rank == 0)
        m->in_use = in_use();
    ranks_meet(e);
}

TEST(M8_plan_equals_what_a_workspace_takes)
{
    for (int i = 0; i < 4; i++) {
        mok_config c = ranks_config(128 + 64 * i, 192, 5 + 9 * i, 2 + i, 700);
        measured m = {0, 0, 0};
        c.shared_intermediate = 64 * (i % 2);
        c.save = (mok_save)i;
        c.ring_rows = i == 3 ? 1024 : 0;
        size_t before = in_use();
        ranks_run(1 + i, &c, measure, &m);
        if (OWN_ALLOCATOR)
            continue;
        CHECK(m.in_use - before >= (size_t)m.planned);
        /* Beside it only handles and the workers' tiles. */
        CHECK_LE(m.in_use - before, m.planned + m.workers * (4 << 20) + (1 << 20));
        CHECK_LE(in_use(), before + 65536); /* and all of it is given back */
    }
}

static void many_passes(ranks_env *e)
{
    measured *m = e->user;
    enum { LAYERS = 8 };
    layer_problem p;
    layer_result r;
    layer_options o = {.ranks = e->ranks};
    void *schedule[LAYERS], *context[LAYERS];
    mok_config c = shape(8, 2);
    if (!layer_make(&p, &c, 100, LAYER_UNIFORM, 0, 9) || !layer_result_make(&r, &p, &o))
        exit(1);
    ranks_part part = ranks_part_of(e, 100, NULL);
    for (int i = 0; i < LAYERS; i++) {
        schedule[i] = ranks_schedule_block(e);
        context[i] = ranks_context_block(e);
    }
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < LAYERS; i++) {
            mok_schedule_args s = ranks_schedule_args(&p, part, schedule[i]);
            mok_forward_args f = ranks_forward_args(e, &p, part, schedule[i], context[i], &r);
            RANKS_OK(mok_schedule(e->w, &s, NULL));
            RANKS_OK(mok_forward(e->w, &f, NULL));
        }
        for (int i = LAYERS - 1; i >= 0; i--) {
            mok_backward_args b = ranks_backward_args(e, &p, part, schedule[i], context[i], &r);
            RANKS_OK(mok_backward(e->w, &b, NULL));
        }
        ranks_meet(e);
        if (e->rank == 0) { /* eight layers take no more than one: the caller's contexts are all that grows */
            if (round == 0)
                m->in_use = in_use();
            else
                CHECK_LE(in_use(), m->in_use + 4096);
        }
        ranks_meet(e);
    }
    for (int i = 0; i < LAYERS; i++) {
        free(schedule[i]);
        free(context[i]);
    }
    layer_result_free(&r);
    layer_free(&p);
}

TEST(M5_eight_layers_take_one_workspace)
{
    mok_config c = ranks_config(128, 64, 8, 2, 100);
    measured m = {0, 0, 0};
    ranks_run(2, &c, many_passes, &m);
}

static void too_large(ranks_env *e)
{
    mok_config c = ranks_config(1 << 20, 64, 6, 2, 1 << 20);
    mok_plan plan = MOK_INIT(mok_plan);
    mok_workspace *w = NULL;
    char words[64];
    c.ring_rows = 1 << 30;
    CHECK_EQ(mok_plan_query(&c, e->ranks, e->rank, 0, 0, 0, &plan, NULL, NULL), MOK_OK); /* a number, before anything is taken */
    snprintf(words, sizeof words, "no memory for a workspace of %lld bytes", (long long)(plan.heap_bytes + plan.local_bytes));
    RANKS_FAIL(mok_workspace_create(e->group, &c, &w), MOK_E_MEMORY, words);
    CHECK(w == NULL);
}

TEST(M6_what_does_not_fit_is_refused_with_the_number)
{
    if (OWN_ALLOCATOR)
        SKIP("the sanitizer's allocator aborts on sizes that cannot be had");
    ranks_run(1, NULL, too_large, NULL);
    ranks_run(3, NULL, too_large, NULL);
}

/* --- C, A, P --------------------------------------------------------------------------------------------------------------------------- */
TEST(C11_fewer_workers_than_anything)
{
    mok_config c = shape(8, 2);
    layer_problem p;
    layer_result one, many;
    make(&p, &c, 100);
    layer_options o = small_ring(2);
    rig_run("one worker", &p, &o, &one);
    o.cpu_threads = 7;
    rig_run("seven workers", &p, &o, &many);
    ranks_same_results("workers", &p, &many, &one, true);
    layer_result_free(&one);
    layer_result_free(&many);
    layer_free(&p);
}

TEST(A9_what_is_not_built_is_refused_at_construction)
{
    mok_group *group;
    mok_workspace *w = NULL;
    REQUIRE(mok_group_create_local(1, NULL, &group) == MOK_OK);
    mok_config c = ranks_config(64, 64, 2, 1, 4);
    c.activation = MOK_ACT_GPT_OSS;
    CHECK_EQ(mok_workspace_create(group, &c, &w), MOK_E_UNSUPPORTED);
    CHECK_STR(mok_last_error(), "use MOK_ACT_SWIGLU"); /* with the alternative */
    CHECK(w == NULL);
    mok_group_destroy(group);
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
