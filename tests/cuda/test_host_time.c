/* What a call of the cuda backend costs the host when the driver does nothing: CPU time of the calling thread, and how often each function of
 * the driver is called. The counts are exact; the times are of this machine, and the bound has room for slow ones. */
#include "test.h"

#include "fake_driver.h"
#include "mok.h"

enum { RANKS = 2, LAYERS = 61, STEPS = 8, ROUNDS = 12, MATRICES = 6 };
static const double BUDGET_US = 50;

/* --- a driver that does nothing, and counts --------------------------------------------------------------------------- */
typedef struct idle_counts { long launches, contexts, attributes, maps, events, captures, memsets; } idle_counts;
static _Thread_local idle_counts idle;

static mk_cu_result idle_cuCtxPushCurrent(mk_cu_context context)
{
    fake_stack[fake_depth++] = (int)((char *)context - fake_contexts);
    idle.contexts++;
    return 0;
}
static mk_cu_result idle_cuCtxPopCurrent(mk_cu_context *context)
{
    *context = (mk_cu_context)(void *)&fake_contexts[fake_stack[--fake_depth]];
    idle.contexts++;
    return 0;
}
static mk_cu_result idle_cuLaunchKernelEx(const mk_cu_launch *launch, mk_cu_function function, void **params, void **extra)
{
    (void)launch; (void)function; (void)params; (void)extra;
    idle.launches++;
    return 0;
}
static mk_cu_result idle_cuStreamIsCapturing(mk_cu_stream stream, int *status) { (void)stream; *status = 0; idle.captures++; return 0; }
static mk_cu_result idle_cuStreamWaitEvent(mk_cu_stream stream, mk_cu_event event, unsigned flags) { (void)stream; (void)event; (void)flags; idle.events++; return 0; }
static mk_cu_result idle_cuEventRecord(mk_cu_event event, mk_cu_stream stream) { (void)event; (void)stream; idle.events++; return 0; }
static mk_cu_result idle_cuMemsetD32Async(mk_cu_pointer memory, unsigned value, size_t words, mk_cu_stream stream)
{
    (void)memory; (void)value; (void)words; (void)stream;
    idle.memsets++;
    return 0;
}
static mk_cu_result idle_cuPointerGetAttributes(unsigned count, int *attributes, void **values, mk_cu_pointer memory)
{
    (void)count; (void)attributes; (void)memory;
    *(unsigned *)values[0] = MK_CU_MEMORY_DEVICE;
    *(int *)values[1] = 0;
    idle.attributes++;
    return 0;
}
static mk_cu_result idle_cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *dim, const uint64_t *stride_bytes,
                                                const uint32_t *box, const uint32_t *element_stride, int interleave, int swizzle, int l2_promotion, int oob_fill)
{
    (void)type; (void)rank; (void)address; (void)dim; (void)stride_bytes; (void)box; (void)element_stride; (void)interleave; (void)swizzle; (void)l2_promotion;
    (void)oob_fill;
    memset(map, 0x5a, 128);
    idle.maps++;
    return 0;
}

/* Everything else is the fake driver's: memory, devices, modules. */
static const mk_cuda_driver *idle_driver(void)
{
    static mk_cuda_driver d;
    d = fake_driver;
    d.cuCtxPushCurrent = idle_cuCtxPushCurrent;
    d.cuCtxPopCurrent = idle_cuCtxPopCurrent;
    d.cuLaunchKernelEx = idle_cuLaunchKernelEx;
    d.cuStreamIsCapturing = idle_cuStreamIsCapturing;
    d.cuStreamWaitEvent = idle_cuStreamWaitEvent;
    d.cuEventRecord = idle_cuEventRecord;
    d.cuMemsetD32Async = idle_cuMemsetD32Async;
    d.cuPointerGetAttributes = idle_cuPointerGetAttributes;
    d.cuTensorMapEncodeTiled = idle_cuTensorMapEncodeTiled;
    return &d;
}

/* --- a model in training ---------------------------------------------------------------------------------------------- */
/* LAYERS layers of one workspace, each with weights and gradients of its own; what a framework's allocator hands out for x, out, the context and
 * the gradients of activations is one of STEPS places for each layer. No memory: nobody reads any. */
static char *place(int kind, int layer, int step) { return (char *)(uintptr_t)(0x700000000000ull + (((uint64_t)kind * 64 + (uint64_t)layer) * 16 + (uint64_t)step) * 1048576); }
enum { SCHEDULE, CONTEXT, X, IDS, ROUTER, OUT, DOUT, DX, DROUTER, WEIGHT, GRAD = WEIGHT + MATRICES };

static mok_weights weights_of(int layer)
{
    mok_weights w;
    memset(&w, 0, sizeof w);
    mok_weight *all[MATRICES] = {&w.gate, &w.up, &w.down, &w.shared_gate, &w.shared_up, &w.shared_down};
    for (int i = 0; i < MATRICES; i++)
        all[i]->packed = place(WEIGHT + i, layer, 0);
    return w;
}

static mok_schedule_args schedule_of(int layer, int step)
{
    mok_schedule_args a = MOK_INIT(mok_schedule_args);
    a.layer = (uint64_t)layer;
    a.num_tokens = 2048;
    a.expert_ids = (const int32_t *)(void *)place(IDS, layer, step);
    a.schedule = place(SCHEDULE, layer, step);
    return a;
}

static mok_forward_args forward_of(int layer, int step)
{
    mok_forward_args a = MOK_INIT(mok_forward_args);
    a.layer = (uint64_t)layer;
    a.num_tokens = 2048;
    a.schedule = place(SCHEDULE, layer, step);
    a.x = place(X, layer, step);
    a.router_weights = place(ROUTER, layer, step);
    a.context = place(CONTEXT, layer, step);
    a.out = place(OUT, layer, step);
    a.weights = weights_of(layer);
    return a;
}

static mok_backward_args backward_of(int layer, int step)
{
    mok_backward_args a = MOK_INIT(mok_backward_args);
    a.layer = (uint64_t)layer;
    a.num_tokens = 2048;
    a.schedule = place(SCHEDULE, layer, step);
    a.context = place(CONTEXT, layer, step);
    a.dout = place(DOUT, layer, step);
    a.x = place(X, layer, step);
    a.router_weights = place(ROUTER, layer, step);
    a.dx = place(DX, layer, step);
    a.drouter_weights = place(DROUTER, layer, step);
    a.weights = weights_of(layer);
    mok_grad *all[MATRICES] = {&a.grads.gate, &a.grads.up, &a.grads.down, &a.grads.shared_gate, &a.grads.shared_up, &a.grads.shared_down};
    for (int i = 0; i < MATRICES; i++)
        all[i]->packed = place(GRAD + i, layer, 0);
    return a;
}

/* --- measuring -------------------------------------------------------------------------------------------------------- */
enum { OP_SCHEDULE, OP_FORWARD, OP_BACKWARD, NUM_OPS };
static const char *const op_names[] = {"schedule", "forward", "backward"};

typedef struct host_rank {
    mok_group *group;
    int32_t ranks, layers, steps;
    mok_status status;
    double us[NUM_OPS];         /* of one call, the best round */
    idle_counts counts[NUM_OPS]; /* of one call of the last round, the average rounded down */
} host_rank;

static double cpu_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static mok_status call(mok_workspace *w, int op, int layer, int step)
{
    mok_schedule_args s;
    mok_forward_args f;
    mok_backward_args b;
    switch (op) {
    case OP_SCHEDULE: s = schedule_of(layer, step); return mok_schedule(w, &s, NULL);
    case OP_FORWARD: f = forward_of(layer, step); return mok_forward(w, &f, NULL);
    default: b = backward_of(layer, step); return mok_backward(w, &b, NULL);
    }
}

static void divide(idle_counts *counts, long by)
{
    long *at = (long *)counts;
    for (size_t i = 0; i < sizeof *counts / sizeof *at; i++)
        at[i] /= by;
}

/* Every layer in turn, forwards for the forward and backwards for the backward, as a step of training does. */
static void measure(host_rank *r, mok_workspace *w)
{
    for (int op = 0; op < NUM_OPS; op++)
        r->us[op] = 1e9;
    for (int round = 0; round < ROUNDS; round++)
        for (int op = 0; op < NUM_OPS; op++) {
            int repeats = r->layers > 1 ? 1 : LAYERS;
            memset(&idle, 0, sizeof idle);
            double start = cpu_us();
            for (int i = 0; i < r->layers * repeats && r->status == MOK_OK; i++)
                r->status = call(w, op, op == OP_BACKWARD ? r->layers - 1 - i % r->layers : i % r->layers, round % r->steps);
            double us = (cpu_us() - start) / (r->layers * repeats);
            r->us[op] = us < r->us[op] ? us : r->us[op];
            r->counts[op] = idle;
            divide(&r->counts[op], r->layers * repeats);
        }
}

static void *rank_main(void *argument)
{
    host_rank *r = argument;
    mok_config c = MOK_INIT(mok_config);
    mok_workspace *w = NULL;
    c.hidden = 512;
    c.intermediate = 256;
    c.shared_intermediate = 256;
    c.num_experts = 16;
    c.topk = 4;
    c.max_tokens = 2048;
    c.minibatch_rows = c.minibatch_rows_bwd = 512;
    c.ring_rows = 2048;
    c.backend = MOK_BACKEND_CUDA;
    c.timeout_ms = 60000;
    r->status = mok_workspace_create(r->group, &c, &w);
    if (r->status == MOK_OK)
        measure(r, w);
    if (r->status != MOK_OK)
        TEST_FAILED("%s", mok_last_error());
    mok_workspace_destroy(w);
    return NULL;
}

static host_rank ranks[RANKS];

static void run(int32_t count, int layers, int steps)
{
    static const int32_t one_gpu[RANKS] = {0, 0};
    mok_group *groups[RANKS];
    pthread_t threads[RANKS];
    fake_reset(1);
    mk_cuda_driver_inject(idle_driver());
    REQUIRE(mok_group_create_local(count, one_gpu, groups) == MOK_OK);
    for (int32_t r = 0; r < count; r++) {
        ranks[r] = (host_rank){.group = groups[r], .ranks = count, .layers = layers, .steps = steps};
        pthread_create(&threads[r], NULL, rank_main, &ranks[r]);
    }
    for (int32_t r = 0; r < count; r++)
        pthread_join(threads[r], NULL);
    for (int32_t r = 0; r < count; r++)
        mok_group_destroy(groups[r]);
    for (int op = 0; op < NUM_OPS; op++) {
        const idle_counts *n = &ranks[0].counts[op];
        printf("  %d rank%s, %2d layer%s, %s: %-8s %6.2f us; driver calls: %ld launches, %ld contexts, %ld attributes, %ld maps, %ld events, %ld captures\n", count,
               count > 1 ? "s" : "", layers, layers > 1 ? "s" : "", steps > 1 ? "fresh activations" : "the same pointers", op_names[op], ranks[0].us[op], n->launches,
               n->contexts, n->attributes, n->maps, n->events, n->captures);
        CHECK_LE(ranks[0].us[op], count > 1 ? 4 * BUDGET_US : BUDGET_US); /* virtual ranks: for tests, and two wakings of a thread for each barrier */
    }
}

/* Launches, and nothing that could be known from an earlier call. */
TEST(a_call_that_came_before_asks_the_driver_for_launches_only)
{
    static const long launches[] = {6, 3, 4};
    run(1, 1, 1);
    for (int op = 0; op < NUM_OPS; op++) {
        const idle_counts *n = &ranks[0].counts[op];
        CHECK_EQ(n->launches, launches[op]);
        CHECK_EQ(n->contexts, 4);
        CHECK_EQ(n->attributes + n->maps + n->memsets, 0);
        CHECK_EQ(n->events, 1);
        CHECK_EQ(n->captures, 1);
    }
}

TEST(layers_of_a_model_keep_their_tensor_maps)
{
    run(1, LAYERS, STEPS);
    for (int op = 0; op < NUM_OPS; op++)
        CHECK_EQ(ranks[0].counts[op].maps, 0);
}

/* Three barriers of events: their ranks meet on the host too, whose waiting is not CPU time, but whose waking is. */
TEST(virtual_ranks_cost_little_more)
{
    static const long events[] = {3, 5, 5};
    run(2, LAYERS, STEPS);
    for (int op = 0; op < NUM_OPS; op++)
        CHECK_EQ(ranks[0].counts[op].events, events[op]);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
