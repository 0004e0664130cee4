/* The host side of the cuda backend on a driver without GPUs: what is launched in which order, who is refused with which sentence, and
 * that nothing is left behind whatever fails. */
#include "test.h"

#include "fake_driver.h"
#include "layout/walk.h"
#include "mok.h"

enum { MAX_RANKS = 8 };

/* --- ranks as threads -------------------------------------------------------------------------------------------------- */
typedef struct rank_env {
    int32_t rank, ranks;
    mok_group *group;
    mok_workspace *w;
    mok_plan plan;
    mok_config cfg;
    int64_t tokens;
    /* In the backend's memory. */
    void *schedule, *context, *x, *ids, *weights, *out, *gate, *up, *down, *shared_gate, *shared_up, *shared_down;
    mok_status status;
    char error[512];
    void (*body)(struct rank_env *);
    pthread_barrier_t *barrier;
} rank_env;

static mok_config small_config(void)
{
    mok_config c = MOK_INIT(mok_config);
    c.hidden = 256;
    c.intermediate = 128;
    c.num_experts = 8;
    c.topk = 2;
    c.max_tokens = 512;
    c.minibatch_rows = 256;
    c.minibatch_rows_bwd = 256;
    c.ring_rows = 512;
    c.backend = MOK_BACKEND_CUDA;
    c.timeout_ms = 20000;
    return c;
}

static mok_status device_memory(rank_env *e, void **p, int64_t bytes) { return mok_memory_alloc(e->w, (size_t)(bytes ? bytes : 1), p); }

static mok_status make_memory(rank_env *e)
{
    const mok_config *c = &e->cfg;
    int64_t experts = e->plan.experts_count, matrix = c->hidden * c->intermediate * 2, shared = c->hidden * c->shared_intermediate * 2;
    struct { void **p; int64_t bytes; } all[] = {
        {&e->schedule, e->plan.schedule_bytes}, {&e->context, e->plan.context_bytes}, {&e->x, c->max_tokens * c->hidden * 2},
        {&e->ids, c->max_tokens * c->topk * 4}, {&e->weights, c->max_tokens * c->topk * 4}, {&e->out, c->max_tokens * c->hidden * 2},
        {&e->gate, experts * matrix * (c->gate_up ? 2 : 1)}, {&e->up, experts * matrix}, {&e->down, experts * matrix},
        {&e->shared_gate, shared * 2}, {&e->shared_up, shared}, {&e->shared_down, shared},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        mok_status status = device_memory(e, all[i].p, all[i].bytes);
        if (status != MOK_OK)
            return status;
    }
    return MOK_OK;
}

static void free_memory(rank_env *e)
{
    void *all[] = {e->schedule, e->context, e->x, e->ids, e->weights, e->out, e->gate, e->up, e->down, e->shared_gate, e->shared_up, e->shared_down};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        mok_memory_free(e->w, all[i]);
}

static mok_schedule_args schedule_args(const rank_env *e)
{
    mok_schedule_args a = MOK_INIT(mok_schedule_args);
    a.layer = 7;
    a.num_tokens = e->tokens;
    a.expert_ids = (const int32_t *)e->ids;
    a.schedule = e->schedule;
    return a;
}

static mok_forward_args forward_args(const rank_env *e)
{
    mok_forward_args a = MOK_INIT(mok_forward_args);
    a.layer = 7;
    a.num_tokens = e->tokens;
    a.schedule = e->schedule;
    a.x = e->x;
    a.router_weights = e->weights;
    a.context = e->context;
    a.out = e->out;
    a.weights.gate.packed = e->gate;
    a.weights.up.packed = e->cfg.gate_up ? NULL : e->up;
    a.weights.down.packed = e->down;
    a.weights.shared_gate.packed = e->shared_gate;
    a.weights.shared_up.packed = e->cfg.gate_up ? NULL : e->shared_up;
    a.weights.shared_down.packed = e->shared_down;
    a.weights.shared_output_gate = e->x;
    return a;
}

static void *rank_main(void *argument)
{
    rank_env *e = (rank_env *)argument;
    e->status = mok_workspace_create(e->group, &e->cfg, &e->w);
    if (e->status == MOK_OK) {
        e->plan = MOK_INIT(mok_plan);
        e->status = mok_workspace_plan(e->w, &e->plan);
        if (e->status == MOK_OK)
            e->status = make_memory(e);
    }
    if (e->status == MOK_OK && e->body)
        e->body(e);
    if (e->status != MOK_OK)
        snprintf(e->error, sizeof e->error, "%s", mok_last_error());
    fake_nobody_listens = true;
    if (e->w)
        free_memory(e);
    mok_workspace_destroy(e->w);
    return NULL;
}

static rank_env envs[MAX_RANKS];

/* Every rank: a workspace, memory, body. The first failing rank's status. */
static mok_status run_ranks(int32_t ranks, const int32_t *devices, const mok_config *cfg, int64_t tokens, void (*body)(rank_env *))
{
    mok_group *groups[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    pthread_barrier_t barrier;
    mok_status status = mok_group_create_local(ranks, devices, groups);
    memset(envs, 0, sizeof envs);
    if (status != MOK_OK)
        return status;
    pthread_barrier_init(&barrier, NULL, (unsigned)ranks);
    for (int32_t r = 0; r < ranks; r++) {
        envs[r] = (rank_env){.rank = r, .ranks = ranks, .group = groups[r], .cfg = *cfg, .tokens = tokens, .body = body, .barrier = &barrier};
        pthread_create(&threads[r], NULL, rank_main, &envs[r]);
    }
    for (int32_t r = 0; r < ranks; r++)
        pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&barrier);
    for (int32_t r = 0; r < ranks; r++)
        mok_group_destroy(groups[r]);
    for (int32_t r = ranks - 1; r >= 0; r--)
        if (envs[r].status != MOK_OK)
            status = envs[r].status;
    return status;
}

static void check_nothing_left(void)
{
    CHECK_EQ(fake.live_blocks, 0);
    CHECK_EQ(fake.live_events, 0);
    CHECK_EQ(fake.live_modules, 0);
    CHECK_EQ(fake.live_contexts, 0);
    CHECK_EQ(fake.pushes, fake.pops);
}

/* Names of a rank's launches from `first` on, "mok_" left out, in one line. */
static const char *launches_of(int32_t rank, int first)
{
    static char text[16384];
    size_t used = 0;
    text[0] = 0;
    for (int i = first; i < fake.launches; i++)
        if (fake.log[i].rank == rank && used < sizeof text - 64)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", used ? " " : "", fake.log[i].name + 4);
    return text;
}

static int count_launches(const char *name)
{
    int n = 0;
    for (int i = 0; i < fake.launches; i++)
        n += strcmp(fake.log[i].name, name) == 0;
    return n;
}

#define SAME_TEXT(got, want) do { const char *vg_ = (got), *vw_ = (want);                                       \
    if (strcmp(vg_, vw_)) TEST_FAILED("got  \"%s\"\n    want \"%s\"", vg_, vw_); } while (0)
#define EXPECT(call, code) do { mok_status vs_ = (call);                                                         \
    if (vs_ != (code)) TEST_FAILED("%s gives %s (%s), not %s", #call, mok_status_name(vs_), vs_ ? mok_last_error() : "", #code); } while (0)

/* --- no driver, no GPU, the wrong one ----------------------------------------------------------------------------------- */
TEST(a_missing_driver_is_named)
{
    mk_cuda_driver table;
    char why[400] = "";
    CHECK(!mk_cuda_driver_load("libmok-has-no-such-driver.so.1", &table, why, sizeof why));
    CHECK_STR(why, "there is no CUDA driver: libmok-has-no-such-driver.so.1");
    CHECK(!mk_cuda_driver_load("libm.so.6", &table, why, sizeof why));
    CHECK_STR(why, "(libm.so.6, version 0.0) has no cuInit: version 12.0 or newer is needed");
}

TEST(without_a_driver_groups_and_workspaces_say_so)
{
    mk_cuda_driver table;
    char why[400];
    mok_group *groups[1];
    mok_workspace *w = NULL;
    mok_config cfg = small_config();
    int32_t device = 0;
    mk_cuda_driver_inject(NULL);
    if (mk_cuda_driver_load("libcuda.so.1", &table, why, sizeof why))
        SKIP("this machine has a CUDA driver");
    EXPECT(mok_group_create_local(1, &device, groups), MOK_E_ENV);
    CHECK_STR(mok_last_error(), "CUDA driver");
    REQUIRE(mok_group_create_local(1, NULL, groups) == MOK_OK);
    EXPECT(mok_workspace_create(groups[0], &cfg, &w), MOK_E_ENV);
    CHECK_STR(mok_last_error(), "CUDA driver");
    mok_group_destroy(groups[0]);
}

static mok_backend_info cuda_info(void)
{
    mok_backend_info info = MOK_INIT(mok_backend_info);
    for (int32_t i = 0; mok_backend_query(i, &info) == MOK_OK; i++)
        if (info.id == MOK_BACKEND_CUDA)
            return info;
    TEST_FAILED("there is no backend cuda");
    return info;
}

TEST(probe_tells_what_there_is)
{
    fake_reset(4);
    mok_backend_info info = cuda_info();
    CHECK(info.usable);
    CHECK_EQ(info.num_devices, 4);
    CHECK_STR(info.detail, "driver 13.0, 4 of 4 devices: Fake H100, 132 SMs, 139 GiB");
    fake_reset(0);
    info = cuda_info();
    CHECK(!info.usable);
    CHECK_STR(info.detail, "the driver (version 13.0) sees no GPU");
    fake_reset(2);
    fake.cc_major[0] = fake.cc_major[1] = 8;
    info = cuda_info();
    CHECK(!info.usable);
    CHECK_EQ(info.num_devices, 0);
    CHECK_STR(info.detail, "no GPU of compute capability 9.0 (Hopper), 10.0 or 10.3 (Blackwell) that there are kernels for: device 0 is a Fake H100 with 8.0");
    fake.cc_major[1] = 9;
    info = cuda_info();
    CHECK(info.usable);
    CHECK_EQ(info.num_devices, 1);
}

TEST(a_library_without_kernels_says_so)
{
    const char *archs, *why;
    fake_reset(1);
    mk_cuda_image_inject(NULL);
    if (mk_cuda_image(&archs, &why))
        SKIP("this library has kernels");
    mok_backend_info info = cuda_info();
    mok_config cfg = small_config();
    int32_t device = 0;
    CHECK(!info.usable);
    CHECK_STR(info.detail, "built without");
    EXPECT(run_ranks(1, &device, &cfg, 4, NULL), MOK_E_ENV);
    CHECK_STR(envs[0].error, "built without");
    check_nothing_left();
}

TEST(devices_that_cannot_serve_are_refused)
{
    mok_group *groups[2];
    fake_reset(2);
    EXPECT(mok_group_create_local(2, (int32_t[]){0, 2}, groups), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "device 2: there are 2 CUDA devices, numbered from 0");
    fake.cc_major[1] = 12;
    EXPECT(mok_group_create_local(2, (int32_t[]){0, 1}, groups), MOK_E_ENV);
    CHECK_STR(mok_last_error(), "device 1 (Fake H101) has compute capability 12.0: backend cuda runs on 9.0 (Hopper), 10.0 and 10.3 (Blackwell)");
    check_nothing_left();
}

TEST(E1_pairs_without_peer_access_are_all_named)
{
    mok_group *groups[4];
    fake_reset(4);
    fake.no_peer[0][3] = true;
    EXPECT(mok_group_create_local(4, (int32_t[]){0, 1, 2, 3}, groups), MOK_E_ENV);
    CHECK_STR(mok_last_error(), "1 of 6 pairs of devices have no peer access: 0-3. Use devices of one NVLink or PCIe domain");
    check_nothing_left();
    fake.no_peer[3][1] = fake.no_peer[2][3] = true; /* one direction is enough to fail */
    EXPECT(mok_group_create_local(4, (int32_t[]){0, 1, 2, 3}, groups), MOK_E_ENV);
    CHECK_STR(mok_last_error(), "3 of 6 pairs of devices have no peer access: 0-3, 1-3, 2-3.");
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            CHECK(!fake.peer_enabled[i][j]); /* nothing is enabled before all is known */
    REQUIRE(mok_group_create_local(3, (int32_t[]){0, 1, 2}, groups) == MOK_OK);
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 3; j++)
            CHECK_EQ(fake.peer_enabled[i][j], i != j);
    for (int i = 0; i < 3; i++)
        mok_group_destroy(groups[i]);
    check_nothing_left();
}

TEST(backend_and_group_must_fit)
{
    mok_group *groups[1];
    mok_workspace *w = NULL;
    mok_config cfg = small_config();
    int32_t device = 0;
    fake_reset(1);
    REQUIRE(mok_group_create_local(1, &device, groups) == MOK_OK);
    cfg.backend = MOK_BACKEND_CPU;
    EXPECT(mok_workspace_create(groups[0], &cfg, &w), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "backend cpu: the group was made with devices");
    cfg.backend = MOK_BACKEND_AUTO;
    EXPECT(mok_workspace_create(groups[0], &cfg, &w), MOK_OK);
    REQUIRE(mok_workspace_config(w, &cfg) == MOK_OK);
    CHECK_EQ(cfg.backend, MOK_BACKEND_CUDA);
    mok_workspace_destroy(w);
    mok_group_destroy(groups[0]);
    REQUIRE(mok_group_create_local(1, NULL, groups) == MOK_OK);
    cfg = small_config();
    EXPECT(mok_workspace_create(groups[0], &cfg, &w), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "the group was made without devices");
    mok_group_destroy(groups[0]);
    check_nothing_left();
}

/* --- launches ----------------------------------------------------------------------------------------------------------- */
static void schedule_and_forward(rank_env *e)
{
    mok_schedule_args s = schedule_args(e);
    mok_forward_args f = forward_args(e);
    EXPECT(mok_schedule(e->w, &s, NULL), MOK_OK);
    EXPECT(mok_forward(e->w, &f, NULL), MOK_OK);
    EXPECT(mok_wait(e->w), MOK_OK);
}

static const char schedule_launches[] = "call_begin s0_count s0_scan s0_segments s0_place s0_copies";

TEST(a_forward_launches_its_stages_in_order)
{
    mok_config cfg = small_config(); /* 512 tokens x 2 routes and 8 experts' padding: at most 15 tiles, 8 minibatches of 2 */
    int32_t device = 0;
    char want[4096];
    fake_reset(1);
    EXPECT(run_ranks(1, &device, &cfg, 300, schedule_and_forward), MOK_OK);
    int steps = (int)(envs[0].plan.capacity_rows / 128 + 1) / 2;
    size_t used = (size_t)snprintf(want, sizeof want, "%s call_begin", schedule_launches);
    for (int i = 0; i < steps; i++)
        used += (size_t)snprintf(want + used, sizeof want - used, " s1_dispatch s2_gate_up_narrow s4_down_narrow");
    snprintf(want + used, sizeof want - used, " s5_combine");
    SAME_TEXT(launches_of(0, 0), want);
    CHECK_EQ(steps, 8);
    int ticket = 0, step = 0;
    for (int i = 0; i < fake.launches; i++) {
        const fake_launch *l = &fake.log[i];
        bool gemm = l->cluster == 2, dispatch = !strcmp(l->name, "mok_s1_dispatch");
        CHECK(l->grid > 0 && l->shared > 0);
        if (!gemm && !dispatch)
            continue;
        CHECK_EQ(l->ticket, ticket++ & 1); /* dispatches and GEMMs alternate together */
        CHECK_EQ(l->step, step);
        step += !strcmp(l->name, "mok_s4_down_narrow");
        if (gemm) {
            /* columns: 2 row tiles x (128 of I, 64 to a CTA; 256 of H, 128 to a CTA) */
            CHECK_EQ(l->grid, 2 * 2 * 1);
            CHECK_EQ(l->block, 384);
        }
    }
    CHECK_EQ(fake.event_records, 2); /* the ends of two calls */
    check_nothing_left();
}

TEST(a_shared_expert_comes_first_and_a_long_contraction_takes_the_wide_tile)
{
    mok_config cfg = small_config();
    int32_t device = 0;
    cfg.shared_intermediate = 128;
    cfg.hidden = 4160;
    fake_reset(1);
    EXPECT(run_ranks(1, &device, &cfg, 300, schedule_and_forward), MOK_OK);
    CHECK_STR(launches_of(0, 0), "call_begin s2_gate_up_wide s4_down_narrow s1_dispatch s2_gate_up_wide s4_down_narrow s1_dispatch");
    int shared = 0;
    for (int i = 0; i < fake.launches; i++)
        if (fake.log[i].is_shared) {
            shared++;
            CHECK_EQ(fake.log[i].tiles_or_cols, strstr(fake.log[i].name, "gate_up") ? 128 : 4160);
            /* 3 tiles of 300 tokens: one pair of 128 columns of h, 17 pairs of 128 columns of y */
            CHECK_EQ(fake.log[i].grid, strstr(fake.log[i].name, "gate_up") ? 2 * 3 : 2 * 3 * 17);
        }
    CHECK_EQ(shared, 2);
    fake_reset(1);
    setenv("MOK_TILE", "wide", 1);
    EXPECT(run_ranks(1, &device, &cfg, 300, schedule_and_forward), MOK_OK);
    CHECK_EQ(count_launches("mok_s4_down_narrow") + count_launches("mok_s2_gate_up_narrow"), 0);
    fake_reset(1);
    setenv("MOK_TILE", "narrow", 1);
    EXPECT(run_ranks(1, &device, &cfg, 300, schedule_and_forward), MOK_OK);
    CHECK_EQ(count_launches("mok_s4_down_wide") + count_launches("mok_s2_gate_up_wide"), 0);
    unsetenv("MOK_TILE");
    fake_reset(1);
    setenv("MOK_FORWARD", "fused", 1);
    EXPECT(run_ranks(1, &device, &cfg, 300, schedule_and_forward), MOK_OK);
    setenv("MOK_FORWARD", "staged", 1);
    SAME_TEXT(launches_of(0, 6), "call_begin forward_fused s5_combine"); /* a rank alone meets nobody */
    check_nothing_left();
}

/* Blocks of the fused forward's launch. */
static unsigned forward_grid(const mok_config *cfg, int64_t tokens)
{
    int32_t device = 0;
    unsigned grid = 0;
    fake_reset(1);
    setenv("MOK_FORWARD", "fused", 1);
    EXPECT(run_ranks(1, &device, cfg, tokens, schedule_and_forward), MOK_OK);
    setenv("MOK_FORWARD", "staged", 1);
    for (int i = 0; i < fake.launches; i++)
        if (!strcmp(fake.log[i].name, "mok_forward_fused"))
            grid = fake.log[i].grid;
    return grid;
}

TEST(a_long_pass_has_spare_clusters)
{
    mok_config cfg = small_config();
    cfg.hidden = cfg.intermediate = cfg.max_tokens = 1024;
    cfg.ring_rows = 0;
    cfg.yield_us = 1; /* 12.9 GFLOP, by 132 SMs at 3 TFLOP/s in 32,537 ns: 260 intervals of 125 ns */
    CHECK_EQ(forward_grid(&cfg, 1024), 2 * (FAKE_CLUSTERS + 260));
    CHECK_EQ(forward_grid(&cfg, 100), 2 * FAKE_CLUSTERS); /* over in 3,178 ns, before four times yield_us */
    cfg.yield_us = 0; /* only if asked for */
    CHECK_EQ(forward_grid(&cfg, 1024), 2 * FAKE_CLUSTERS);
    cfg.yield_us = -1;
    CHECK_EQ(forward_grid(&cfg, 1024), 2 * FAKE_CLUSTERS);
    cfg.yield_us = 1;
    cfg.reserve_sms = 6; /* which spare clusters would take */
    CHECK_EQ(forward_grid(&cfg, 1024), 2 * (FAKE_CLUSTERS - 3));
    check_nothing_left();
}

TEST(no_tokens_and_no_experts_launch_no_work_for_them)
{
    mok_config cfg = small_config();
    fake_reset(2);
    cfg.num_experts = 1; /* rank 0 of 2 has none */
    cfg.topk = 1;
    cfg.shared_intermediate = 128;
    EXPECT(run_ranks(2, (int32_t[]){0, 1}, &cfg, 0, schedule_and_forward), MOK_OK);
    SAME_TEXT(launches_of(0, 0), "call_begin s0_count s0_scan s0_segments s0_place s0_copies "
                                 "call_begin rank_barrier s5_combine");
    CHECK_STR(launches_of(1, 0), "call_begin s1_dispatch s2_gate_up_narrow s4_down_narrow");
    check_nothing_left();
}

static void recompute(rank_env *e)
{
    mok_forward_args f = forward_args(e);
    EXPECT(mok_recompute(e->w, &f, NULL), MOK_OK);
    f.context = NULL;
    EXPECT(mok_recompute(e->w, &f, NULL), MOK_E_ARG);
}

TEST(a_recompute_fills_the_context_and_no_more)
{
    mok_config cfg = small_config();
    int32_t device = 0;
    fake_reset(1);
    cfg.shared_intermediate = 128;
    EXPECT(run_ranks(1, &device, &cfg, 300, recompute), MOK_OK);
    CHECK_STR(launches_of(0, 0), "call_begin s2_gate_up_narrow s1_dispatch s2_gate_up_narrow s1_dispatch");
    CHECK_EQ(count_launches("mok_s4_down_narrow"), 0);
    for (int i = 0; i < fake.launches; i++)
        if (strstr(fake.log[i].name, "gate_up") || strstr(fake.log[i].name, "combine"))
            CHECK(fake.log[i].context == envs[0].context && !fake.log[i].out);
    setenv("MOK_FORWARD", "fused", 1);
    fake_reset(1);
    EXPECT(run_ranks(1, &device, &cfg, 300, recompute), MOK_OK);
    CHECK_STR(launches_of(0, 0), "call_begin forward_fused s5_combine");
    setenv("MOK_FORWARD", "staged", 1);
    cfg.save = MOK_SAVE_NONE;
    fake_reset(1);
    EXPECT(run_ranks(1, &device, &cfg, 300, recompute), MOK_OK);
    CHECK_STR(launches_of(0, 0), "call_begin s5_combine");
    check_nothing_left();
}

/* --- tensor maps -------------------------------------------------------------------------------------------------------- */
static const fake_map *map_at(const void *address)
{
    for (int i = 0; i < fake.num_maps && i < FAKE_MAPS; i++)
        if (fake.maps[i].address == address)
            return &fake.maps[i];
    TEST_FAILED("no tensor map of %p", address);
    return &fake.maps[0];
}

static void check_map(const void *address, uint64_t cols, uint64_t rows, uint64_t depth, uint64_t row_stride, uint64_t depth_stride, uint32_t box_rows)
{
    const fake_map *m = map_at(address);
    CHECK_EQ(m->dim[0], cols);
    CHECK_EQ(m->dim[1], rows);
    CHECK_EQ(m->rank, depth ? 3 : 2);
    CHECK_EQ(m->stride[0], row_stride);
    CHECK_EQ(m->box[0], 64);
    CHECK_EQ(m->box[1], box_rows);
    if (depth) {
        CHECK_EQ(m->dim[2], depth);
        CHECK_EQ(m->stride[1], depth_stride);
    }
}

static void forward_twice(rank_env *e)
{
    mok_forward_args f = forward_args(e);
    EXPECT(mok_forward(e->w, &f, NULL), MOK_OK);
    int maps = fake.num_maps;
    EXPECT(mok_forward(e->w, &f, NULL), MOK_OK);
    CHECK_EQ(fake.num_maps, maps); /* nothing has changed */
    f.num_tokens--;
    EXPECT(mok_forward(e->w, &f, NULL), MOK_OK);
    CHECK_EQ(fake.num_maps, maps + (e->cfg.shared_intermediate ? 2 : 0)); /* the shared expert's rows are the tokens */
}

TEST(tensor_maps_see_separate_combined_and_interleaved_weights)
{
    int32_t device = 0;
    const uint64_t hidden = 256, width = 128, row = hidden * 2, matrix = row * width;
    for (int layout = 0; layout < 3; layout++) {
        mok_config cfg = small_config();
        cfg.shared_intermediate = 192;
        cfg.gate_up = (mok_gate_up)layout;
        fake_reset(1);
        EXPECT(run_ranks(1, &device, &cfg, 300, forward_twice), MOK_OK);
        const rank_env *e = &envs[0];
        const char *gate = (const char *)e->gate, *shared_gate = (const char *)e->shared_gate;
        uint64_t step = layout == MOK_GATE_UP_INTERLEAVED ? 2 * row : row, expert = layout ? 2 * matrix : matrix;
        check_map(gate, hidden, width, 8, step, expert, 64);
        if (layout == MOK_GATE_UP_SEPARATE)
            check_map(e->up, hidden, width, 8, row, matrix, 64);
        else
            check_map(gate + (layout == MOK_GATE_UP_COMBINED ? matrix : row), hidden, width, 8, step, expert, 64);
        if (layout != MOK_GATE_UP_SEPARATE)
            check_map(shared_gate + (layout == MOK_GATE_UP_COMBINED ? row * 192 : row), hidden, 192, 1, step, row * 192 * 2, 64);
        check_map(e->down, width, hidden, 8, width * 2, width * 2 * hidden, 64);
        check_map(e->shared_down, 192, hidden, 1, 192 * 2, 192 * 2 * hidden, 64);
        check_nothing_left();
    }
}

/* By pointer: a map of one expert, at no address of anybody's, whatever the table holds; and the launch that makes the experts' own. */
static void forward_by_pointer(rank_env *e)
{
    mok_forward_args f = forward_args(e);
    int first = fake.launches;
    f.weights.up.packed = NULL;
    f.weights.up.experts = (const void *const *)e->up; /* no kernel runs here that would read it */
    EXPECT(mok_forward(e->w, &f, NULL), MOK_OK);
    SAME_TEXT(launches_of(0, first), "weight_maps call_begin forward_fused s5_combine");
    CHECK_EQ(fake.log[first].grid, 8 * 3 / 4); /* a warp for each matrix: gate and down go through maps of their own, too */
    int maps = fake.num_maps;
    f.weights.up.experts = (const void *const *)e->down;
    EXPECT(mok_forward(e->w, &f, NULL), MOK_OK);
    CHECK_EQ(fake.num_maps, maps);
    first = fake.launches;
    f.weights.up.experts = (const void *const *)((char *)e->up + 4);
    EXPECT(mok_forward(e->w, &f, NULL), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "weights.up.experts is at ");
    CHECK_STR(mok_last_error(), "needs it aligned to 8 bytes");
    SAME_TEXT(launches_of(0, first), "call_begin"); /* what is refused makes no maps */
}

TEST(maps_of_weights_by_pointer_are_made_by_a_launch)
{
    int32_t device = 0;
    mok_config cfg = small_config();
    fake_reset(1);
    setenv("MOK_FORWARD", "fused", 1);
    EXPECT(run_ranks(1, &device, &cfg, 300, forward_by_pointer), MOK_OK);
    setenv("MOK_FORWARD", "staged", 1);
    check_nothing_left();
}

/* --- refusals ------------------------------------------------------------------------------------------------------------ */
static void refuse_all(rank_env *e)
{
    if (e->rank != 0) /* the device's barriers are not run here: nobody waits */
        return;
    mok_schedule_args s = schedule_args(e);
    mok_forward_args f = forward_args(e);
    mok_backward_args b = MOK_INIT(mok_backward_args);
    int first = fake.launches;
    s.num_tokens = 513;
    EXPECT(mok_schedule(e->w, &s, NULL), MOK_E_SHAPE);
    CHECK_STR(mok_last_error(), "num_tokens is 513");
    SAME_TEXT(launches_of(0, first), "call_begin");
    CHECK_EQ(fake.log[first].status, MOK_E_SHAPE);
    CHECK_EQ(fake.log[first].operation, 1);

    first = fake.launches;
    f.x = NULL;
    EXPECT(mok_forward(e->w, &f, NULL), MOK_E_ARG);
    SAME_TEXT(mok_last_error(), "x is NULL");
    SAME_TEXT(launches_of(0, first), "call_begin rank_barrier");
    first = fake.launches;
    EXPECT(mok_recompute(e->w, &f, NULL), MOK_E_ARG);
    SAME_TEXT(launches_of(0, first), "call_begin rank_barrier");

    first = fake.launches;
    b.num_tokens = 4;
    b.schedule = e->schedule;
    b.context = e->context;
    b.dout = b.x = e->x;
    b.router_weights = e->weights;
    b.weights = f.weights;
    b.dx = e->out;
    b.grads.down.experts = (void *const *)((char *)e->out + 4);
    EXPECT(mok_backward(e->w, &b, NULL), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "grads.down.experts is at ");
    SAME_TEXT(launches_of(0, first), "call_begin rank_barrier");

    first = fake.launches;
    b.grads.down.experts = NULL;
    EXPECT(mok_backward(e->w, &b, NULL), MOK_OK);
    SAME_TEXT(launches_of(0, first), "call_begin backward_fused rank_barrier s5_combine_bwd");
}

TEST(a_refusal_takes_part_in_the_calls_barriers)
{
    mok_config cfg = small_config();
    fake_reset(2);
    EXPECT(run_ranks(2, (int32_t[]){0, 1}, &cfg, 300, refuse_all), MOK_OK);
    CHECK_EQ(fake.event_syncs, 1); /* only mok_workspace_destroy waits */
    check_nothing_left();
}

static void refuse_pointers(rank_env *e)
{
    static char host[4096] __attribute__((aligned(256)));
    const void *host_table[8] = {NULL};
    mok_forward_args good = forward_args(e), f = good;
    mok_schedule_args s = schedule_args(e);
#define REFUSED(field, value, code, sentence)                 \
    do {                                                      \
        f = good;                                             \
        f.field = value;                                      \
        EXPECT(mok_forward(e->w, &f, NULL), code);            \
        CHECK_STR(mok_last_error(), sentence);                \
    } while (0)
    REFUSED(x, (char *)e->x + 2, MOK_E_ARG, "backend cuda needs it aligned to 16 bytes");
    REFUSED(out, (char *)e->out + 8, MOK_E_ARG, "out is at ");
    REFUSED(x, host, MOK_E_ARG, "which is no memory of the CUDA driver: backend cuda takes device pointers");
    REFUSED(weights.gate.packed, host, MOK_E_ARG, "weights.gate is at ");
    REFUSED(weights.down.packed, (char *)e->down + 4, MOK_E_ARG, "down is at ");
    s.expert_ids = (const int32_t *)(const void *)host;
    EXPECT(mok_schedule(e->w, &s, NULL), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "expert_ids is at ");
    f = good;
    f.weights.up.packed = NULL;
    f.weights.up.experts = host_table;
    EXPECT(mok_forward(e->w, &f, NULL), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "weights.up.experts is at ");
    CHECK_STR(mok_last_error(), "which is no memory of the CUDA driver: backend cuda takes device pointers");
    fake_find(e->x)->device = 1;
    REFUSED(x, (char *)e->x + 16, MOK_E_ARG, "x is on device 1, but rank 0 is on device 0");
#undef REFUSED
    EXPECT(mok_forward(e->w, &good, NULL), MOK_OK); /* its pointers were good before */
}

TEST(pointers_that_kernels_could_not_use_are_refused)
{
    mok_config cfg = small_config();
    int32_t device = 0;
    fake_reset(2);
    fake.on_launch = NULL;
    EXPECT(run_ranks(1, &device, &cfg, 300, refuse_pointers), MOK_OK);
    check_nothing_left();
}

TEST(KN_weights_are_refused_at_creation_by_all_ranks)
{
    mok_config cfg = small_config();
    fake_reset(2);
    cfg.weight_layout = MOK_WEIGHT_KN;
    EXPECT(run_ranks(2, (int32_t[]){0, 1}, &cfg, 300, NULL), MOK_E_UNSUPPORTED);
    CHECK_STR(envs[0].error, "rank 0: weight_layout is MOK_WEIGHT_KN");
    SAME_TEXT(envs[0].error, envs[1].error);
    check_nothing_left();
}

/* --- ranks that share a GPU ------------------------------------------------------------------------------------------------ */
TEST(a_forward_in_MXFP8_quantises_the_tokens_and_widens_the_weights)
{
    static const int32_t devices[] = {0, 1};
    mok_config cfg = small_config();
    cfg.dtype = MOK_MXFP8;
    fake_reset(2);
    EXPECT(run_ranks(2, devices, &cfg, 300, schedule_and_forward), MOK_OK);
    CHECK_EQ(count_launches("mok_mx_quantise_rows"), 2);
    CHECK_EQ(count_launches("mok_mx_widen_weights"), 2 * 3);
    CHECK(count_launches("mok_s1_dispatch_mx") > 0);
    CHECK_EQ(count_launches("mok_s1_dispatch"), 0);
    check_nothing_left();
}

/* Weights in no form but widened: their places are checked, and passes widen nothing. */
static void forward_with_wide(rank_env *e)
{
    mok_schedule_args s = schedule_args(e);
    mok_forward_args f = forward_args(e);
    mok_mx_widen_args a = MOK_INIT(mok_mx_widen_args);
    void *wide = NULL;
    static char host[512] __attribute__((aligned(256)));
    CHECK_EQ(e->plan.wide_bytes, e->plan.experts_count * 3 * 256 * 128 * 2);
    EXPECT(device_memory(e, &wide, e->plan.wide_bytes), MOK_OK);
    a.weights = f.weights;
    a.wide = (char *)wide + 16;
    EXPECT(mok_mx_widen(e->w, &a, NULL), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "wide is not aligned to 256 bytes");
    a.wide = host;
    EXPECT(mok_mx_widen(e->w, &a, NULL), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "which is no memory of the CUDA driver");
    a.wide = wide;
    int before = count_launches("mok_mx_widen_weights");
    EXPECT(mok_mx_widen(e->w, &a, NULL), MOK_OK);
    CHECK_EQ(count_launches("mok_mx_widen_weights"), before + 3);
    f.weights.gate.packed = f.weights.up.packed = f.weights.down.packed = NULL;
    EXPECT(mok_schedule(e->w, &s, NULL), MOK_OK);
    f.wide = host;
    EXPECT(mok_forward(e->w, &f, NULL), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "wide is at ");
    f.wide = NULL;
    EXPECT(mok_forward(e->w, &f, NULL), MOK_E_ARG);
    CHECK_STR(mok_last_error(), e->cfg.mx_wide_given ? "wide is NULL" : "weights.gate has neither packed nor experts");
    f.wide = wide;
    EXPECT(mok_forward(e->w, &f, NULL), MOK_OK);
    EXPECT(mok_recompute(e->w, &f, NULL), MOK_OK);
    CHECK_EQ(count_launches("mok_mx_widen_weights"), before + 3);
    const fake_map *down = map_at((char *)wide + 2 * e->plan.wide_bytes / 3);
    CHECK(down && down->rank == 3);
    mok_memory_free(e->w, wide);
}

TEST(passes_that_are_given_widened_weights_widen_none)
{
    static const int32_t device = 0;
    mok_config cfg = small_config();
    int64_t local[2];
    cfg.dtype = MOK_MXFP8;
    for (int given = 0; given < 2; given++) {
        cfg.mx_wide_given = given != 0;
        fake_reset(1);
        EXPECT(run_ranks(1, &device, &cfg, 300, forward_with_wide), MOK_OK);
        local[given] = envs[0].plan.local_bytes;
        check_nothing_left();
    }
    CHECK_EQ(local[0] - local[1], 2 * envs[0].plan.wide_bytes);
}

TEST(ranks_that_share_a_GPU_meet_on_the_host)
{
    mok_config cfg = small_config();
    static const int32_t shared[][3] = {{0, 0, 0}, {0, 1, 0}, {0, 1, 2}};
    for (int i = 0; i < 3; i++) {
        bool alone = i == 2;
        fake_reset(3);
        EXPECT(run_ranks(3, shared[i], &cfg, 300, schedule_and_forward), MOK_OK);
        CHECK_EQ(count_launches("mok_rank_barrier"), alone ? 3 : 0); /* the others are part of mok_call_begin */
        CHECK_EQ(count_launches("mok_call_check"), alone ? 0 : 6);
        CHECK_EQ(count_launches("mok_s5_combine"), 3);
        /* 3 barriers of 3 ranks, each waiting for 2 others; the ends of 2 calls */
        CHECK_EQ(fake.event_waits, alone ? 0 : 3 * 3 * 2);
        CHECK_EQ(fake.event_records, 3 * 2 + (alone ? 0 : 3 * 3));
        check_nothing_left();
    }
}

static void one_rank_refuses(rank_env *e)
{
    mok_forward_args f = forward_args(e);
    mok_schedule_args s = schedule_args(e);
    if (e->rank == 1) {
        f.x = NULL;
        EXPECT(mok_forward(e->w, &f, NULL), MOK_E_ARG);
    } else {
        EXPECT(mok_forward(e->w, &f, NULL), MOK_OK); /* asynchronous: the device finds the refusal */
    }
    /* Ranks that call different things: no rank waits for a barrier that another does not have. */
    if (e->rank == 0)
        EXPECT(mok_schedule(e->w, &s, NULL), MOK_OK);
    else
        EXPECT(mok_forward(e->w, &(mok_forward_args){.struct_size = 0}, NULL), MOK_E_ARG);
    schedule_and_forward(e);
}

TEST(virtual_ranks_stay_in_step_when_one_refuses)
{
    mok_config cfg = small_config();
    fake_reset(1);
    cfg.timeout_ms = 5000;
    EXPECT(run_ranks(2, (int32_t[]){0, 0}, &cfg, 300, one_rank_refuses), MOK_OK);
    CHECK_EQ(count_launches("mok_s5_combine"), 2);
    CHECK_EQ(count_launches("mok_s0_copies"), 2);
    check_nothing_left();
}

static void one_ranks_driver_fails(rank_env *e)
{
    mok_forward_args f = forward_args(e);
    pthread_barrier_wait(e->barrier);
    if (e->rank == 1)
        fake.fail_name = "cuLaunchKernelEx";
    pthread_barrier_wait(e->barrier);
    EXPECT(mok_forward(e->w, &f, NULL), MOK_E_MEMORY);
    CHECK_STR(mok_last_error(), "rank 0: rank 0: launching mok_call_begin of forward");
    pthread_barrier_wait(e->barrier);
    if (e->rank == 1)
        fake.fail_name = NULL;
    pthread_barrier_wait(e->barrier);
    EXPECT(mok_forward(e->w, &f, NULL), MOK_E_STATE);
    CHECK_STR(mok_last_error(), "broken");
}

TEST(virtual_ranks_do_not_wait_for_one_whose_driver_fails)
{
    mok_config cfg = small_config();
    fake_reset(1);
    cfg.timeout_ms = 5000;
    EXPECT(run_ranks(2, (int32_t[]){0, 0}, &cfg, 300, one_ranks_driver_fails), MOK_OK);
    check_nothing_left();
}

static void captured(rank_env *e)
{
    mok_forward_args f = forward_args(e);
    int records = fake.event_records, syncs = fake.context_syncs;
    fake.capturing = true;
    EXPECT(mok_forward(e->w, &f, NULL), MOK_OK);
    CHECK_EQ(fake.event_records, records); /* it would belong to the graph */
    fake.capturing = false;
    EXPECT(mok_wait(e->w), MOK_OK);
    CHECK_EQ(fake.context_syncs, syncs + 1); /* replays are somewhere on the device */
}

static void captured_together(rank_env *e)
{
    mok_forward_args f = forward_args(e);
    if (e->rank == 0)
        fake.capturing = true;
    pthread_barrier_wait(e->barrier);
    EXPECT(mok_forward(e->w, &f, NULL), MOK_E_UNSUPPORTED);
    CHECK_STR(mok_last_error(), "capture needs one GPU per rank");
}

TEST(capture_works_with_a_GPU_per_rank_and_is_refused_without)
{
    mok_config cfg = small_config();
    int32_t device = 0;
    fake_reset(1);
    EXPECT(run_ranks(1, &device, &cfg, 300, captured), MOK_OK);
    fake_reset(1);
    EXPECT(run_ranks(2, (int32_t[]){0, 0}, &cfg, 300, captured_together), MOK_OK);
    check_nothing_left();
}

static void streams(rank_env *e)
{
    static char a, b;
    mok_forward_args f = forward_args(e);
    int waits = fake.event_waits;
    EXPECT(mok_forward(e->w, &f, &a), MOK_OK);
    EXPECT(mok_forward(e->w, &f, &a), MOK_OK);
    CHECK_EQ(fake.event_waits, waits);
    EXPECT(mok_forward(e->w, &f, &b), MOK_OK);
    CHECK_EQ(fake.event_waits, waits + 1); /* calls of a workspace stay in order */
    CHECK(fake.log[fake.launches - 1].stream == (mk_cu_stream)(void *)&b);
    fake.busy = true;
    EXPECT(mok_poll(e->w), MOK_NOT_READY);
    fake.busy = false;
    EXPECT(mok_poll(e->w), MOK_OK);
}

TEST(streams_are_ordered_and_poll_does_not_wait)
{
    mok_config cfg = small_config();
    int32_t device = 0;
    fake_reset(1);
    EXPECT(run_ranks(1, &device, &cfg, 300, streams), MOK_OK);
    check_nothing_left();
}

/* --- faults ------------------------------------------------------------------------------------------------------------------ */
/* The device's part: what mok_call_begin would write. */
static mk_host_fault next_fault;
static bool device_only; /* kernels that do not write to pinned memory */

static void write_fault(const char *name, const void *params)
{
    const mk_open_params *p = (const mk_open_params *)params;
    if (strcmp(name, "mok_call_begin") || next_fault.fault.kind == MK_FAULT_NONE || p->status)
        return;
    mk_device_state *state = (mk_device_state *)(void *)(p->rank.local + p->rank.memory.device_state);
    if (state->fault.kind != MK_FAULT_NONE)
        return;
    state->fault = next_fault.fault;
    if (device_only) {
        mk_call_head *heads = (mk_call_head *)(void *)(p->rank.heap + p->rank.memory.call_heads);
        heads[next_fault.fault.call & 1] = next_fault.other;
    } else {
        *p->rank.host_fault = next_fault;
    }
}

static mk_call_head head_of(int32_t operation, uint64_t layer, uint64_t schedule, int32_t status, const char *sentence)
{
    mk_call_head h = {.sequence = 3, .layer = layer, .schedule_number = schedule, .operation = operation, .status = status};
    snprintf(h.sentence, sizeof h.sentence, "%s", sentence);
    return h;
}

static mok_status want_status;
static const char *want_sentence;

static void fault_once(rank_env *e)
{
    mok_schedule_args s = schedule_args(e);
    mok_forward_args f = forward_args(e);
    mk_host_fault kept = next_fault;
    EXPECT(mok_schedule(e->w, &s, NULL), MOK_OK);
    next_fault.fault.kind = MK_FAULT_NONE;
    EXPECT(mok_wait(e->w), want_status);
    SAME_TEXT(mok_last_error(), want_sentence);
    EXPECT(mok_wait(e->w), MOK_OK); /* once */
    EXPECT(mok_forward(e->w, &f, NULL), MOK_OK);
    EXPECT(mok_poll(e->w), MOK_OK);
    if (device_only)
        return;
    /* The next call finds it too, without waiting, and tells the others. */
    next_fault = kept;
    EXPECT(mok_schedule(e->w, &s, NULL), MOK_OK);
    next_fault.fault.kind = MK_FAULT_NONE;
    int syncs = fake.event_syncs, memsets = fake.memsets, first = fake.launches;
    EXPECT(mok_forward(e->w, &f, NULL), want_status);
    SAME_TEXT(mok_last_error(), want_sentence);
    CHECK_EQ(fake.event_syncs, syncs);
    CHECK_EQ(fake.memsets, memsets + 1); /* the device's copy */
    SAME_TEXT(launches_of(0, first), "call_begin");
    EXPECT(mok_forward(e->w, &f, NULL), MOK_OK);
    EXPECT(mok_wait(e->w), MOK_OK);
}

static void check_fault(mok_status status, const char *sentence)
{
    mok_config cfg = small_config();
    int32_t device = 0;
    mk_host_fault kept = next_fault;
    want_status = status;
    want_sentence = sentence;
    for (int i = 0; i < 2; i++) {
        device_only = i == 1;
        next_fault = kept;
        fake_reset(1);
        fake.on_launch = write_fault;
        EXPECT(run_ranks(1, &device, &cfg, 300, fault_once), MOK_OK);
        check_nothing_left();
    }
    next_fault.fault.kind = MK_FAULT_NONE;
}

/* The sentences are those of the cpu backend (cpu/s0_schedule.c, cpu/call.c): tests/fault runs the same mistakes there. */
TEST(a_bad_id_is_named)
{
    next_fault = (mk_host_fault){.fault = {MK_FAULT_BAD_ID, 1, 0, 0, 7, 1, {12, 1, 99, 8}}};
    check_fault(MOK_E_ROUTE, "rank 0, token 12, k 1: expert id 99 is outside [-1, 8)");
}

TEST(a_refusal_of_another_rank_is_passed_on)
{
    next_fault = (mk_host_fault){.other = head_of(2, 7, 1, MOK_E_ARG, "x is NULL"), .fault = {.kind = MK_FAULT_REFUSED, .rank = 5, .layer = 7}};
    mok_config cfg = small_config();
    int32_t device = 0;
    want_status = MOK_E_PEER;
    want_sentence = "rank 5 refused its forward call of layer 7: x is NULL";
    device_only = false;
    fake_reset(1);
    fake.on_launch = write_fault;
    EXPECT(run_ranks(1, &device, &cfg, 300, fault_once), MOK_OK);
    next_fault.fault.kind = MK_FAULT_NONE;
}

TEST(stale_memory_is_this_ranks_own_mistake)
{
    next_fault = (mk_host_fault){.other = head_of(2, 7, 0, MOK_E_STATE, "schedule was not filled by mok_schedule of this configuration"),
                                 .fault = {.kind = MK_FAULT_REFUSED, .rank = 0, .layer = 7}};
    check_fault(MOK_E_STATE, "schedule was not filled by mok_schedule of this configuration");
}

TEST(different_calls_are_compared)
{
    next_fault = (mk_host_fault){.zero = head_of(1, 7, 4, 0, ""), .other = head_of(2, 8, 3, 0, ""), .fault = {.kind = MK_FAULT_MISMATCH, .rank = 2}};
    mok_config cfg = small_config();
    int32_t device = 0;
    want_status = MOK_E_MISMATCH;
    want_sentence = "call 3 is schedule of layer 7 with schedule 4 on rank 0, but forward of layer 8 with schedule 3 on rank 2";
    device_only = false;
    fake_reset(1);
    fake.on_launch = write_fault;
    EXPECT(run_ranks(1, &device, &cfg, 300, fault_once), MOK_OK);
    next_fault.fault.kind = MK_FAULT_NONE;
}

static void timed_out(rank_env *e)
{
    mok_schedule_args s = schedule_args(e);
    EXPECT(mok_schedule(e->w, &s, NULL), MOK_OK);
    EXPECT(mok_wait(e->w), MOK_E_TIMEOUT);
    SAME_TEXT(mok_last_error(), "rank 0 waited 20000 ms for rank 3 in schedule (layer 7, call 2): its epoch is 5, expected 6");
    int first = fake.launches;
    EXPECT(mok_schedule(e->w, &s, NULL), MOK_E_STATE);
    CHECK_STR(mok_last_error(), "broken");
    CHECK_EQ(fake.launches, first);
}

TEST(a_rank_that_does_not_come_breaks_the_workspace)
{
    mok_config cfg = small_config();
    int32_t device = 0;
    next_fault = (mk_host_fault){.fault = {MK_FAULT_TIMEOUT, 1, 3, 0, 7, 2, {5, 6, -1, 0}}};
    device_only = false;
    fake_reset(1);
    fake.on_launch = write_fault;
    EXPECT(run_ranks(1, &device, &cfg, 300, timed_out), MOK_OK);
    next_fault.fault.kind = MK_FAULT_NONE;
    check_nothing_left();
}

static void gave_up(rank_env *e)
{
    mok_schedule_args s = schedule_args(e);
    EXPECT(mok_schedule(e->w, &s, NULL), MOK_OK);
    EXPECT(mok_wait(e->w), MOK_E_TIMEOUT);
    SAME_TEXT(mok_last_error(), "rank 0 waited 20000 ms in backward (layer 7, call 2): dgrad_gate_up needs s4_bwd_tasks_done of tile 12, which is 3, expected 8 "
                                "(s4_down_bwd: dgate, dup, w h of some columns)");
    EXPECT(mok_schedule(e->w, &s, NULL), MOK_E_STATE);
}

TEST(a_counter_that_does_not_come_is_named_and_breaks_the_workspace)
{
    mok_config cfg = small_config();
    int32_t device = 0;
    next_fault = (mk_host_fault){.fault = {MK_FAULT_TIMEOUT, 4, 0, MK_TASK_DGRAD_GATE_UP, 7, 2, {3, 8, MK_COUNTER_s4_bwd_tasks_done, 12}}};
    device_only = false;
    fake_reset(1);
    fake.on_launch = write_fault;
    EXPECT(run_ranks(1, &device, &cfg, 300, gave_up), MOK_OK);
    next_fault.fault.kind = MK_FAULT_NONE;
    check_nothing_left();
}

/* --- stats, memory, schedule head ----------------------------------------------------------------------------------------- */
/* --- late is no error: the device says so, the host logs it once ------------------------------------------------------------- */
static void come_late(const char *name, const void *params)
{
    const mk_open_params *p = (const mk_open_params *)params;
    if (!strcmp(name, "mok_call_begin"))
        p->rank.host_fault->late = (mk_late){.rank = 2, .waited_ms = 1500, .call = 4};
}

static char late_lines[512];
static void keep_line(void *user, const char *text)
{
    (void)user;
    snprintf(late_lines + strlen(late_lines), sizeof late_lines - strlen(late_lines), "%s;", text);
}

static void late_body(rank_env *e)
{
    mok_schedule_args s = schedule_args(e);
    EXPECT(mok_schedule(e->w, &s, NULL), MOK_OK);
    fake.on_launch = NULL;
    EXPECT(mok_wait(e->w), MOK_OK);
    EXPECT(mok_wait(e->w), MOK_OK);
}

TEST(C8_a_rank_that_the_device_waited_for_is_logged_once)
{
    mok_config cfg = small_config();
    int32_t device = 0;
    late_lines[0] = 0;
    fake_reset(1);
    fake.on_launch = come_late;
    mok_set_log(keep_line, NULL);
    EXPECT(run_ranks(1, &device, &cfg, 300, late_body), MOK_OK);
    mok_set_log(NULL, NULL);
    SAME_TEXT(late_lines, "rank 2 was late: rank 0 has waited 1.5 s for it at a barrier on the device (call 4);");
    check_nothing_left();
}

static void count_on_device(const char *name, const void *params)
{
    const mk_open_params *p = (const mk_open_params *)params;
    if (strcmp(name, "mok_call_begin"))
        return;
    mk_device_state *state = (mk_device_state *)(void *)(p->rank.local + p->rank.memory.device_state);
    state->done[p->operation]++;
    state->rows_pulled += 10;
    state->rows_pulled_peer += 4;
    state->row_moves_peer += 4;
    state->rows_copied += 3;
    state->ring_rotations += 2;
    if (p->operation == 1) {
        mk_schedule_head *h = (mk_schedule_head *)p->schedule;
        *h = (mk_schedule_head){.magic = MK_SCHEDULE_MAGIC, .fingerprint = p->rank.fingerprint, .num_rows = 42, .num_tiles = 3};
    }
}

static void observe(rank_env *e)
{
    mok_stats stats = MOK_INIT(mok_stats);
    mok_schedule_info info = MOK_INIT(mok_schedule_info);
    char there[64], back[64] = "";
    void *p = NULL;
    schedule_and_forward(e);
    EXPECT(mok_get_stats(e->w, &stats), MOK_OK);
    CHECK_EQ(stats.schedules, 1);
    CHECK_EQ(stats.forwards, 1);
    CHECK_EQ(stats.rows, 26);
    CHECK_EQ(stats.rows_pulled_peer, 8);
    CHECK_EQ(stats.bytes_pulled_peer, 8 * 512);
    CHECK_EQ(stats.ring_rotations, 4);
    EXPECT(mok_schedule_query(e->w, e->schedule, &info), MOK_OK);
    CHECK_EQ(info.rows, 42);
    CHECK_EQ(info.table_rows, 3 * 128);
    EXPECT(mok_memory_alloc(e->w, sizeof there, &p), MOK_OK);
    memset(there, 'm', sizeof there);
    EXPECT(mok_memory_copy(e->w, p, there, sizeof there), MOK_OK);
    EXPECT(mok_memory_copy(e->w, back, p, sizeof there), MOK_OK);
    CHECK_BYTES(there, back, sizeof there);
    mok_memory_free(e->w, p);
    EXPECT(mok_memory_alloc(NULL, 1, &p), MOK_E_ARG);
    EXPECT(mok_memory_copy(e->w, NULL, there, 1), MOK_E_ARG);
}

TEST(stats_heads_and_memory_come_to_the_host)
{
    mok_config cfg = small_config();
    int32_t device = 0;
    fake_reset(1);
    fake.on_launch = count_on_device;
    EXPECT(run_ranks(1, &device, &cfg, 300, observe), MOK_OK);
    check_nothing_left();
}

/* --- a caller's provider ----------------------------------------------------------------------------------------------------- */
static int gather_alone(void *user, const void *send, void *recv, size_t bytes)
{
    (void)user;
    memcpy(recv, send, bytes);
    return 0;
}
static int heap_alone(void *user, size_t bytes, void **peers)
{
    mk_cu_pointer p = 0;
    (void)user;
    fake_cuCtxPushCurrent((mk_cu_context)(void *)&fake_contexts[1]);
    int result = fake_cuMemAlloc(&p, bytes);
    mk_cu_context context;
    fake_cuCtxPopCurrent(&context);
    peers[0] = (void *)(uintptr_t)p;
    return result;
}
static int free_alone(void *user, void *own)
{
    (void)user;
    return fake_cuMemFree((mk_cu_pointer)(uintptr_t)own);
}

TEST(a_callers_provider_runs_on_the_current_device)
{
    mok_provider provider = MOK_INIT(mok_provider);
    mok_config cfg = small_config();
    mok_group *group = NULL;
    mok_workspace *w = NULL;
    mk_cu_context context;
    provider.all_gather = gather_alone;
    provider.heap_alloc = heap_alone;
    provider.heap_free = free_alone;
    fake_reset(2);
    REQUIRE(mok_group_create(&provider, 0, 1, &group) == MOK_OK);
    EXPECT(mok_workspace_create(group, &cfg, &w), MOK_E_STATE);
    CHECK_STR(mok_last_error(), "no CUDA device is current in this thread");
    fake_cuCtxPushCurrent((mk_cu_context)(void *)&fake_contexts[1]);
    EXPECT(mok_workspace_create(group, &cfg, &w), MOK_OK);
    CHECK_EQ(fake_current(), 1); /* restored */
    rank_env e = {.w = w, .cfg = cfg, .tokens = 20};
    e.plan = MOK_INIT(mok_plan);
    REQUIRE(mok_workspace_plan(w, &e.plan) == MOK_OK);
    EXPECT(make_memory(&e), MOK_OK);
    CHECK_EQ(fake_find(e.x)->device, 1);
    schedule_and_forward(&e);
    CHECK_EQ(fake_current(), 1);
    free_memory(&e);
    mok_workspace_destroy(w);
    mok_group_destroy(group);
    fake_cuCtxPopCurrent(&context);
    check_nothing_left();
}

/* --- whatever fails ------------------------------------------------------------------------------------------------------------ */
static void try_everything(rank_env *e)
{
    mok_schedule_args s = schedule_args(e);
    mok_forward_args f = forward_args(e);
    mok_status status = mok_schedule(e->w, &s, NULL);
    if (status == MOK_OK)
        status = mok_forward(e->w, &f, NULL);
    if (status == MOK_OK)
        status = mok_wait(e->w);
    e->status = status;
}

TEST(nothing_is_left_behind_whichever_call_fails)
{
    mok_config cfg = small_config();
    static const int32_t devices[][2] = {{0, 1}, {0, 0}};
    int failed = 0;
    cfg.timeout_ms = 3000;
    cfg.shared_intermediate = 128;
    for (int d = 0; d < 2; d++) {
        fake_reset(2);
        EXPECT(run_ranks(2, devices[d], &cfg, 300, try_everything), MOK_OK);
        long calls = fake.calls;
        for (long at = 1; at <= calls; at += at < 200 || at > calls - 60 ? 1 : 7) {
            fake_reset(2);
            fake.fail_at = at;
            fake.fail_with = at % 2 ? MK_CU_OUT_OF_MEMORY : MK_CU_ILLEGAL_ADDRESS;
            time_t started = time(NULL);
            mok_status status = run_ranks(2, devices[d], &cfg, 300, try_everything);
            if (time(NULL) - started >= 2) /* nobody may be left waiting for a rank that has failed: the time-out is 3 s */
                TEST_FAILED("call %ld of %ld (%s) fails, and somebody waits in vain: %s", at, calls, fake.failed, envs[0].error);
            const char *name = fake.failed ? fake.failed : "nothing";
            bool helper = !strcmp(name, "cuMemGetInfo") || !strcmp(name, "cuDeviceGet");
            if (status == MOK_OK && fake.failed && !fake.failed_unheard && !helper)
                TEST_FAILED("call %ld of %ld (%s) fails, but nobody says so", at, calls, name);
            failed += status != MOK_OK;
            if (fake.live_blocks || fake.live_events || fake.live_modules || fake.live_contexts > (strcmp(name, "cuDeviceGet") == 0))
                TEST_FAILED("call %ld (%s) fails: %ld blocks, %ld events, %ld modules, %ld contexts are left", at, name, fake.live_blocks, fake.live_events,
                            fake.live_modules, fake.live_contexts);
        }
    }
    printf("  %d failing runs\n", failed);
    CHECK(failed > 300);
}

TEST(out_of_memory_names_rank_bytes_and_what_is_free)
{
    mok_config cfg = small_config();
    fake_reset(2);
    fake.memory_limit = 2000000;
    EXPECT(run_ranks(2, (int32_t[]){0, 1}, &cfg, 300, NULL), MOK_E_MEMORY);
    CHECK_STR(envs[0].error, "no memory for a workspace of ");
    CHECK_STR(envs[0].error, "CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
    SAME_TEXT(envs[0].error, envs[1].error);
    check_nothing_left();
}

int main(int argc, char **argv) { setenv("MOK_FORWARD", "staged", 1); /* the launches that most cases look at; the default is the fused kernel */
    return test_main(argc, argv); }
