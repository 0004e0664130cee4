/* The whole library on the emulator: mok.h, host code of the cuda backend, kernels. Results for several virtual ranks, tiles and rings have the
 * same bits and agree with the cpu backend; mistakes give the sentences of the cpu backend. */
#define TEST_WATCHDOG 900
#include "emulated_layer.h"

#include <algorithm>

/* --- results ------------------------------------------------------------------------------------------------------------- */
static Run forward_run(const char *name, int32_t ranks, int64_t ring, int64_t minibatch)
{
    Run run = make_run(name, ranks, ring, minibatch);
    run.forward_only = true;
    return run;
}

TEST(forward_agrees_with_the_cpu_and_does_not_depend_on_ranks_tiles_or_ring)
{
    layer_problem p = make_problem(150, 64);
    const Run one = forward_run("one rank", 1, 512, 256);
    Run cpu = one, wide = one, fused = forward_run("two ranks, fused", 2, 512, 256);
    cpu.backend = MOK_BACKEND_CPU;
    wide.name = "wide tile";
    wide.tile = "wide";
    fused.forward = "fused";
    const StepResult want = run_layer(p, cpu), first = run_layer(p, one);
    check_close(one, first, want);
    CHECK_EQ(first.stats.rows_pulled + first.stats.rows_copied, first.info.rows);
    CHECK_EQ(first.info.rows, want.info.rows);
    CHECK_EQ(first.info.table_rows, want.info.table_rows);
    CHECK_EQ(first.info.rows_copied_fwd, want.info.rows_copied_fwd);
    for (const Run &run : {forward_run("two ranks", 2, 512, 256), wide, fused, forward_run("three ranks, small ring", 3, 256, 128)})
        check_bits(run, run_layer(p, run), first);
    layer_free(&p);
}

TEST(stats_are_those_of_the_cpu)
{
    layer_problem p = make_problem(150, 0);
    Run gpu = forward_run("two ranks, small ring", 2, 256, 128), cpu = gpu;
    cpu.backend = MOK_BACKEND_CPU;
    const mok_stats want = run_layer(p, cpu).stats, got = run_layer(p, gpu).stats;
#define SAME(field) CHECK_EQ(got.field, want.field)
    SAME(schedules); SAME(forwards); SAME(recomputes); SAME(backwards); SAME(rows); SAME(rows_pulled); SAME(rows_pulled_peer); SAME(rows_copied);
    SAME(rows_padding); SAME(ring_rotations); SAME(bytes_pulled_peer); SAME(bytes_pushed_peer);
#undef SAME
    layer_free(&p);
}

/* --- mistakes -------------------------------------------------------------------------------------------------------------- */
struct Mistake {
    mok_workspace *w = nullptr;
    mok_group *group = nullptr;
    mok_config config = MOK_INIT(mok_config); /* of w */
    int32_t rank = 0, ranks = 1;
    void *schedule = nullptr, *ids = nullptr, *x = nullptr, *weights = nullptr, *out = nullptr, *matrix = nullptr, *context[2] = {};
    size_t context_bytes = 0;
    std::vector<std::string> said; /* status and sentence of what each step came to */

    mok_schedule_args schedule_args() const
    {
        mok_schedule_args a = MOK_INIT(mok_schedule_args);
        a.layer = 4;
        a.num_tokens = 3;
        a.expert_ids = static_cast<const int32_t *>(ids);
        a.schedule = schedule;
        return a;
    }
    mok_forward_args forward_args() const
    {
        mok_forward_args a = MOK_INIT(mok_forward_args);
        a.layer = 4;
        a.num_tokens = 3;
        a.schedule = schedule;
        a.x = x;
        a.router_weights = weights;
        a.out = out;
        a.weights.gate.packed = a.weights.up.packed = a.weights.down.packed = matrix;
        return a;
    }
    /* A call, and the wait behind it, where the cuda backend tells what the device found. */
    void step(mok_status status)
    {
        if (status == MOK_OK)
            status = mok_wait(w);
        said.push_back(std::string(mok_status_name(status)) + ": " + (status == MOK_OK ? "" : mok_last_error()));
    }
};

typedef void (*Script)(Mistake &);
struct MistakeThread { mok_group *group; mok_backend_id backend; Script script; Mistake m; };

static void *mistake_main(void *argument)
{
    MistakeThread &t = *static_cast<MistakeThread *>(argument);
    Mistake &m = t.m;
    mok_config c = MOK_INIT(mok_config);
    mok_plan plan = MOK_INIT(mok_plan);
    c.hidden = c.intermediate = 64;
    c.num_experts = 4;
    c.topk = 1;
    c.max_tokens = 8;
    c.minibatch_rows = c.minibatch_rows_bwd = 128;
    c.ring_rows = 256;
    c.backend = t.backend;
    c.timeout_ms = 60000;
    m.group = t.group;
    m.config = c;
    if (mok_workspace_create(t.group, &c, &m.w) != MOK_OK || mok_workspace_plan(m.w, &plan) != MOK_OK) {
        TEST_FAILED("%s", mok_last_error());
        return nullptr;
    }
    const std::vector<char> zeros((size_t)(plan.schedule_bytes + plan.context_bytes + 65536), 0);
    struct { void **p; size_t bytes; } all[] = {{&m.schedule, (size_t)plan.schedule_bytes}, {&m.ids, 32}, {&m.x, 1024}, {&m.weights, 64}, {&m.out, 1024},
                                                {&m.matrix, 4 * 64 * 64 * 2}, {&m.context[0], (size_t)plan.context_bytes},
                                                {&m.context[1], (size_t)plan.context_bytes}};
    m.context_bytes = (size_t)plan.context_bytes;
    for (auto &a : all) {
        CHECK_EQ(mok_memory_alloc(m.w, a.bytes, a.p), MOK_OK);
        CHECK_EQ(mok_memory_copy(m.w, *a.p, zeros.data(), a.bytes), MOK_OK);
    }
    t.script(m);
    for (auto &a : all)
        mok_memory_free(m.w, *a.p);
    mok_workspace_destroy(m.w);
    return nullptr;
}

static std::vector<std::string> make_mistake(mok_backend_id backend, Script script, int32_t ranks)
{
    const int32_t devices[4] = {0};
    mok_group *groups[4];
    std::vector<MistakeThread> threads((size_t)ranks);
    pthread_t ids[4];
    std::vector<std::string> said;
    emulated::plug_in(test_seed(), 2);
    if (mok_group_create_local(ranks, backend == MOK_BACKEND_CUDA ? devices : nullptr, groups) != MOK_OK)
        TEST_FAILED("%s", mok_last_error());
    for (int32_t r = 0; r < ranks; r++) {
        threads[(size_t)r] = {groups[r], backend, script, {}};
        threads[(size_t)r].m.rank = r;
        threads[(size_t)r].m.ranks = ranks;
        pthread_create(&ids[r], nullptr, mistake_main, &threads[(size_t)r]);
    }
    for (int32_t r = 0; r < ranks; r++)
        pthread_join(ids[r], nullptr);
    for (int32_t r = 0; r < ranks; r++) {
        mok_group_destroy(groups[r]);
        for (size_t i = 0; i < threads[(size_t)r].m.said.size(); i++)
            said.push_back("rank " + std::to_string(r) + ", step " + std::to_string(i) + ": " + threads[(size_t)r].m.said[i]);
    }
    if (!emulated::gpu.trouble.empty())
        TEST_FAILED("emulator: %s", emulated::gpu.trouble.c_str());
    return said;
}

static void check_mistake(Script script, const char *part, int32_t ranks = 3)
{
    const auto want = make_mistake(MOK_BACKEND_CPU, script, ranks), got = make_mistake(MOK_BACKEND_CUDA, script, ranks);
    bool named = false;
    CHECK_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size() && i < got.size(); i++) {
        if (got[i] != want[i])
            TEST_FAILED("cpu  %s\n    cuda %s", want[i].c_str(), got[i].c_str());
        named |= want[i].find(part) != std::string::npos;
    }
    CHECK(named);
}

/* After each mistake a schedule and a forward that work. */
static void good_pass(Mistake &m)
{
    const mok_schedule_args s = m.schedule_args();
    const mok_forward_args f = m.forward_args();
    m.step(mok_schedule(m.w, &s, nullptr));
    m.step(mok_forward(m.w, &f, nullptr));
}

static void bad_id(Mistake &m)
{
    const mok_schedule_args s = m.schedule_args();
    const int32_t bad[] = {0, 99, -7}, good[] = {0, 1, 2};
    if (m.rank == 1)
        CHECK_EQ(mok_memory_copy(m.w, m.ids, bad, sizeof bad), MOK_OK);
    m.step(mok_schedule(m.w, &s, nullptr));
    CHECK_EQ(mok_memory_copy(m.w, m.ids, good, sizeof good), MOK_OK);
    good_pass(m);
}
TEST(a_bad_id_is_named_as_on_the_cpu) { check_mistake(bad_id, "rank 1, token 1, k 0: expert id 99 is outside [-1, 4)"); }

static void refused_schedule(Mistake &m)
{
    mok_schedule_args s = m.schedule_args();
    if (m.rank == 2)
        s.num_tokens = 9;
    m.step(mok_schedule(m.w, &s, nullptr));
    good_pass(m);
}
TEST(a_refused_schedule_is_told_as_on_the_cpu) { check_mistake(refused_schedule, "rank 2 refused its schedule call of layer 4: num_tokens is 9"); }

static void refused_forward(Mistake &m)
{
    mok_forward_args f = m.forward_args();
    good_pass(m);
    if (m.rank == 0)
        f.out = nullptr;
    m.step(mok_forward(m.w, &f, nullptr));
    good_pass(m);
}
TEST(a_refused_forward_is_told_as_on_the_cpu) { check_mistake(refused_forward, "rank 0 refused its forward call of layer 4: out is NULL"); }

/* Each rank begins with the workspace that the other one begins with last. */
static void other_order(Mistake &m)
{
    mok_workspace *first = m.w, *second = nullptr;
    CHECK_EQ(mok_workspace_create(m.group, &m.config, &second), MOK_OK);
    mok_schedule_args s = m.schedule_args();
    s.layer = 1 + (uint64_t)m.rank;
    m.step(mok_schedule(m.rank ? second : first, &s, nullptr));
    mok_workspace_destroy(second);
}
TEST(C6_two_workspaces_in_different_orders_are_named_as_on_the_cpu)
{
    check_mistake(other_order, "rank 0 is in schedule of layer 1 in workspace 1, rank 1 in schedule of layer 2 in workspace 2", 2);
}

static void other_layer(Mistake &m)
{
    mok_forward_args f = m.forward_args();
    good_pass(m);
    f.layer = m.rank == 1 ? 5 : 4;
    m.step(mok_forward(m.w, &f, nullptr));
    good_pass(m);
}
TEST(another_layer_is_named_as_on_the_cpu) { check_mistake(other_layer, "but forward of layer 5"); }

static void other_operation(Mistake &m)
{
    const mok_forward_args f = m.forward_args();
    const mok_schedule_args s = m.schedule_args();
    good_pass(m);
    m.step(m.rank == 2 ? mok_schedule(m.w, &s, nullptr) : mok_forward(m.w, &f, nullptr));
    good_pass(m);
}
TEST(another_operation_is_named_as_on_the_cpu) { check_mistake(other_operation, "on rank 0, but schedule of layer 4"); }

static void stale_schedule(Mistake &m)
{
    mok_forward_args f = m.forward_args();
    m.step(mok_forward(m.w, &f, nullptr)); /* never filled */
    good_pass(m);
    f.num_tokens = m.rank == 1 ? 2 : 3;
    m.step(mok_forward(m.w, &f, nullptr)); /* for other tokens */
    good_pass(m);
}
TEST(a_stale_schedule_is_named_as_on_the_cpu) { check_mistake(stale_schedule, "schedule was not filled by mok_schedule of this configuration"); }

/* --- weights by pointer ---------------------------------------------------------------------------------------------------- */
/* This rank's experts of `matrix`, or of what stands `shift` bytes behind it, in a table at `table`. */
static void point_at(Mistake &m, void *table, size_t shift, int32_t none)
{
    int64_t first = 0, count = 0;
    const void *entries[4] = {};
    CHECK_EQ(mok_expert_range(4, m.ranks, m.rank, &first, &count), MOK_OK);
    for (int64_t e = 0; e < count; e++)
        entries[e] = e == none ? nullptr : static_cast<const char *>(m.matrix) + (size_t)e * 64 * 64 * 2 + shift;
    CHECK_EQ(mok_memory_copy(m.w, table, entries, sizeof entries), MOK_OK);
}

static mok_forward_args by_pointer(const Mistake &m, const void *table)
{
    mok_forward_args f = m.forward_args();
    f.weights.up.packed = f.weights.down.packed = nullptr; /* gate stays packed */
    f.weights.up.experts = f.weights.down.experts = static_cast<const void *const *>(table);
    return f;
}

static void null_expert(Mistake &m)
{
    void *table = nullptr;
    CHECK_EQ(mok_memory_alloc(m.w, 64, &table), MOK_OK);
    const mok_forward_args f = by_pointer(m, table);
    good_pass(m);
    point_at(m, table, 0, m.rank == 1 ? 0 : -1);
    m.step(mok_forward(m.w, &f, nullptr));
    point_at(m, table, 0, -1);
    m.step(mok_forward(m.w, &f, nullptr));
    good_pass(m);
    mok_memory_free(m.w, table);
}
TEST(an_expert_without_an_address_is_named_as_on_the_cpu) { check_mistake(null_expert, "rank 1 refused its forward call of layer 4: weights.up.experts[0] is NULL"); }

/* Only the device sees that table, and it is nobody's call: the next pass tells. */
static void widen_null_expert(Mistake &m)
{
    void *table = nullptr;
    mok_mx_widen_args a = MOK_INIT(mok_mx_widen_args);
    CHECK_EQ(mok_memory_alloc(m.w, 64, &table), MOK_OK);
    a.weights.gate.packed = m.matrix;
    a.weights.down.experts = static_cast<const void *const *>(table);
    point_at(m, table, 0, m.rank == 1 ? 1 : -1);
    m.step(mok_mx_widen(m.w, &a, nullptr));
    good_pass(m); /* the schedule is good, the forward tells */
    good_pass(m);
    mok_memory_free(m.w, table);
}
TEST(an_expert_without_an_address_is_not_widened_and_the_next_pass_names_it)
{
    for (const std::string &said : make_mistake(MOK_BACKEND_CUDA, widen_null_expert, 2)) {
        const bool tells = said.find("step 2") != std::string::npos, own = said.find("rank 1") == 0;
        const char *want = !tells ? "MOK_OK"
                           : own  ? "MOK_E_ARG: mok_mx_widen: weights.down.experts[1] is NULL"
                                  : "MOK_E_PEER: rank 1 refused its forward call of layer 4: mok_mx_widen: weights.down.experts[1] is NULL";
        if (said.find(want) == std::string::npos)
            TEST_FAILED("%s; expected %s", said.c_str(), want);
    }
}

static void odd_expert(Mistake &m)
{
    void *table = nullptr;
    CHECK_EQ(mok_memory_alloc(m.w, 64, &table), MOK_OK);
    const mok_forward_args f = by_pointer(m, table);
    good_pass(m);
    point_at(m, table, m.rank == 1 ? 8 : 0, -1);
    m.step(mok_forward(m.w, &f, nullptr));
    mok_memory_free(m.w, table);
}
TEST(an_expert_at_an_odd_address_is_named)
{
    const auto said = make_mistake(MOK_BACKEND_CUDA, odd_expert, 2);
    CHECK(std::find(said.begin(), said.end(), "rank 1, step 2: MOK_E_ARG: weights.up.experts[0] is not aligned to 16 bytes, as backend cuda needs it") != said.end());
    CHECK(std::find(said.begin(), said.end(), "rank 0, step 2: MOK_E_PEER: rank 1 refused its forward call of layer 4: weights.up.experts[0] is not aligned to 16 bytes, as "
                                              "backend cuda needs it") != said.end());
}

/* The table is read by the pass: the same call with other addresses in the same table is another result. */
static void other_addresses(Mistake &m)
{
    enum { N = 64 * 64, ROW = 64 };
    std::vector<uint16_t> x(3 * ROW), w(4 * N), out(3 * ROW), want(3 * ROW), before(3 * ROW);
    const std::vector<float> weights(3, 1.0f);
    uint64_t state = test_seed();
    void *table = nullptr;
    for (auto *v : {&x, &w})
        for (uint16_t &e : *v)
            e = layer_bf16((float)layer_normal(&state));
    CHECK_EQ(mok_memory_copy(m.w, m.x, x.data(), x.size() * 2), MOK_OK);
    CHECK_EQ(mok_memory_copy(m.w, m.matrix, w.data(), w.size() * 2), MOK_OK);
    CHECK_EQ(mok_memory_copy(m.w, m.weights, weights.data(), 3 * sizeof(float)), MOK_OK);
    CHECK_EQ(mok_memory_alloc(m.w, 64, &table), MOK_OK);
    mok_forward_args f = m.forward_args();
    f.weights.gate.packed = f.weights.up.packed = f.weights.down.packed = nullptr;
    f.weights.gate.experts = f.weights.up.experts = f.weights.down.experts = static_cast<const void *const *>(table);
    good_pass(m);
    CHECK_EQ(mok_memory_copy(m.w, before.data(), m.out, before.size() * 2), MOK_OK);
    mok_forward_args g = m.forward_args(); /* packed, from the second matrix on: no token goes to the last expert */
    g.weights.gate.packed = g.weights.up.packed = g.weights.down.packed = static_cast<const char *>(m.matrix) + N * 2;
    m.step(mok_forward(m.w, &g, nullptr));
    CHECK_EQ(mok_memory_copy(m.w, want.data(), m.out, want.size() * 2), MOK_OK);
    CHECK(want != before);
    for (size_t shift : {0, N * 2}) {
        point_at(m, table, shift, -1);
        m.step(mok_forward(m.w, &f, nullptr));
        CHECK_EQ(mok_memory_copy(m.w, out.data(), m.out, out.size() * 2), MOK_OK);
        CHECK(out == (shift ? want : before));
    }
    mok_memory_free(m.w, table);
    for (const std::string &said : m.said)
        CHECK(said == "MOK_OK: ");
}
TEST(addresses_are_read_when_the_pass_runs) { make_mistake(MOK_BACKEND_CUDA, other_addresses, 1); }

/* --- recompute ------------------------------------------------------------------------------------------------------------- */
static void recompute(Mistake &m)
{
    std::vector<char> from_forward(m.context_bytes), again(m.context_bytes);
    std::vector<uint16_t> x(3 * 64), w(4 * 64 * 64);
    uint64_t state = test_seed();
    for (auto *v : {&x, &w})
        for (uint16_t &e : *v)
            e = layer_bf16((float)layer_normal(&state));
    CHECK_EQ(mok_memory_copy(m.w, m.x, x.data(), x.size() * 2), MOK_OK);
    CHECK_EQ(mok_memory_copy(m.w, m.matrix, w.data(), w.size() * 2), MOK_OK);
    mok_forward_args f = m.forward_args();
    const mok_schedule_args s = m.schedule_args();
    m.step(mok_schedule(m.w, &s, nullptr));
    f.context = m.context[0];
    m.step(mok_forward(m.w, &f, nullptr));
    f.context = m.context[1];
    f.out = nullptr;
    f.router_weights = nullptr;
    f.weights.down.packed = nullptr;
    m.step(mok_recompute(m.w, &f, nullptr));
    CHECK_EQ(mok_memory_copy(m.w, from_forward.data(), m.context[0], m.context_bytes), MOK_OK);
    CHECK_EQ(mok_memory_copy(m.w, again.data(), m.context[1], m.context_bytes), MOK_OK);
    CHECK_BYTES(again.data(), from_forward.data(), m.context_bytes);
    CHECK(std::any_of(again.begin(), again.end(), [](char c) { return c != 0; }));
    for (const std::string &said : m.said)
        CHECK(said == "MOK_OK: ");
}
TEST(a_recompute_makes_the_context_of_the_forward)
{
    make_mistake(MOK_BACKEND_CPU, recompute, 2);
    make_mistake(MOK_BACKEND_CUDA, recompute, 2);
}

TEST(mx_quantise_has_the_cpus_bits_and_refuses_foreign_memory)
{
    enum { COUNT = 2, ROWS = 160, COLS = 96, N = COUNT * ROWS * COLS };
    const size_t scale_bytes = (size_t)(COUNT * mok_mx_scale_bytes(ROWS, COLS)), turned_bytes = (size_t)(COUNT * mok_mx_scale_bytes(COLS, ROWS));
    uint64_t state = test_seed();
    std::vector<uint16_t> x(N);
    for (uint16_t &v : x)
        v = layer_bf16((float)(test_normal(&state) * exp(10 * test_normal(&state))));
    x[77] = 0x7f80;
    x[N - 3] = 0xffc0;
    std::vector<uint8_t> want[4] = {std::vector<uint8_t>(N), std::vector<uint8_t>(scale_bytes), std::vector<uint8_t>(N), std::vector<uint8_t>(turned_bytes)};
    int64_t counted = -1, counted_there = -1;
    mok_mx_quantise_args a = MOK_INIT(mok_mx_quantise_args);
    a.count = COUNT;
    a.rows = ROWS;
    a.cols = COLS;
    a.source = x.data();
    a.data = want[0].data();
    a.scales = want[1].data();
    a.transposed = want[2].data();
    a.transposed_scales = want[3].data();
    a.not_finite = &counted;
    CHECK_EQ(mok_mx_quantise(&a, nullptr), MOK_OK);
    CHECK_EQ(counted, 2);

    emulated::plug_in(test_seed(), 2);
    void *there[5];
    const size_t sizes[5] = {N * 2, N, scale_bytes, N, turned_bytes};
    for (int i = 0; i < 5; i++)
        emulated::allocate(&there[i], sizes[i]);
    emulated::copy(there[0], x.data(), N * 2);
    mok_mx_quantise_args b = a;
    b.backend = MOK_BACKEND_CUDA;
    CHECK_EQ(mok_mx_quantise(&b, nullptr), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "source is at");
    b.source = there[0];
    CHECK_EQ(mok_mx_quantise(&b, nullptr), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "data is at");
    b.data = there[1];
    b.scales = there[2];
    b.transposed = there[3];
    b.transposed_scales = there[4];
    b.not_finite = &counted_there;
    if (mok_mx_quantise(&b, nullptr) != MOK_OK)
        TEST_FAILED("%s; emulator: %s", mok_last_error(), emulated::gpu.trouble.c_str());
    CHECK_EQ(counted_there, 2);
    for (int i = 0; i < 4; i++)
        CHECK_BYTES(there[i + 1], want[i].data(), sizes[i + 1]);
    /* The transpose alone counts too. */
    b.data = b.scales = nullptr;
    counted_there = -1;
    CHECK_EQ(mok_mx_quantise(&b, nullptr), MOK_OK);
    CHECK_EQ(counted_there, 2);
    for (void *p : there)
        emulated::release(p);
    CHECK_EQ(emulated::gpu.live, 0);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
