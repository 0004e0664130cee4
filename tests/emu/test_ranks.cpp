/* Two virtual ranks that call mok.h themselves: one gives up a pass, and the other learns it from the same call; gradients of down alone bring no x. */
#include "test.h"

#include "emulated_driver.h"

extern "C" {
#include "../multi/twins.h"
}

enum { P = 2, TOKENS = 40 };

struct Told { mok_status status, next; std::string sentence; };
struct Job { layer_problem p; layer_result r; bool backward; Told told[P]; };

static void body(ranks_env *e)
{
    Job *j = static_cast<Job *>(e->user);
    Told &told = j->told[e->rank];
    twins_layer t;
    twins_layer_make(&t, e, &j->p, &j->r);
    RANKS_OK(mok_schedule(e->w, &t.schedule, NULL));
    RANKS_OK(mok_wait(e->w));
    mok_status status = mok_forward(e->w, &t.forward, NULL);
    if (status == MOK_OK && j->backward)
        status = mok_backward(e->w, &t.backward, NULL);
    told.status = status == MOK_OK ? mok_wait(e->w) : status;
    told.sentence = mok_last_error();
    told.next = mok_forward(e->w, &t.forward, NULL);
    twins_layer_free(&t);
}

/* The first counter of this kind that rank 1's pass waits for stays away. */
static void check(bool backward)
{
    const char *kernel = backward ? "mok_backward_fused" : "mok_forward_fused";
    const int32_t devices[P] = {0, 0};
    mok_group *groups[P];
    Job j = {};
    mok_config cfg = ranks_config(128, 64, 4, 2, TOKENS);
    cfg.ring_rows = 256;
    cfg.minibatch_rows = cfg.minibatch_rows_bwd = 128;
    cfg.backend = MOK_BACKEND_CUDA;
    cfg.timeout_ms = 20000; /* of the emulator's clock for counters; of the host's where ranks meet, whom a busy machine may keep for seconds */
    layer_options o = {};
    o.ranks = P;
    j.backward = backward;
    REQUIRE(layer_make(&j.p, &cfg, TOKENS, LAYER_UNIFORM, 0.1, test_seed()) && layer_result_make(&j.r, &j.p, &o));
    emulated::plug_in(test_seed(), 2);
    emulated::gpu.machine->let_time_pass(true);
    emulated::gpu.before_launch = [&](const std::string &name, const void *params) {
        if (name != kernel)
            return;
        const mk_rank_params &r = backward ? static_cast<const mk_backward_params *>(params)->rank : static_cast<const mk_forward_params *>(params)->rank;
        const void *schedule = backward ? static_cast<const mk_backward_params *>(params)->schedule : static_cast<const mk_forward_params *>(params)->schedule;
        const int32_t last = static_cast<const mk_schedule_head *>(schedule)->num_tiles - 1;
        if (r.dims.rank == 1)
            *reinterpret_cast<uint32_t *>(r.local + r.memory.counters + 4 * mk_counter_index(&r.dims, MK_COUNTER_s1_rows_arrived, backward ? 0 : last)) -= 1000000;
    };
    REQUIRE(mok_group_create_local(P, devices, groups) == MOK_OK);
    ranks_run_groups(P, groups, &cfg, body, &j);
    for (int r = 0; r < P; r++) {
        mok_group_destroy(groups[r]);
        printf("  rank %d: %s\n", r, j.told[r].sentence.c_str());
        CHECK_EQ(j.told[r].status, MOK_E_TIMEOUT);
        CHECK_EQ(j.told[r].next, MOK_E_STATE); /* at once, without a wait for the other */
    }
    CHECK_STR(j.told[1].sentence.c_str(), backward ? "in backward (layer 0, call 3): " : "in forward (layer 0, call 2): ");
    CHECK_STR(j.told[1].sentence.c_str(), " needs ");
    CHECK_STR(j.told[0].sentence.c_str(), backward ? "rank 0: rank 1 gave up in backward (layer 0, call 3): its kernel waited 20000 ms"
                                                   : "rank 0: rank 1 gave up in forward (layer 0, call 2): its kernel waited 20000 ms");
    if (!emulated::gpu.trouble.empty())
        TEST_FAILED("emulator: %s", emulated::gpu.trouble.c_str());
    CHECK_EQ(emulated::gpu.live, 0);
    layer_result_free(&j.r);
    layer_free(&j.p);
}

TEST(F1_virtual_ranks_hear_of_a_forward_that_was_given_up) { check(false); }
TEST(F1_virtual_ranks_hear_of_a_backward_that_was_given_up) { check(true); }

/* --- gradients of down alone ------------------------------------------------------------------------------------------------------ */
struct Partial { layer_problem p; layer_result all, down; bool cuda; int64_t bytes[2]; };

static void partial_body(ranks_env *e)
{
    Partial *j = static_cast<Partial *>(e->user);
    layer_result *results[] = {&j->all, &j->down};
    for (int i = 0; i < 2; i++) {
        twins_layer t;
        mok_stats before = MOK_INIT(mok_stats), after = before;
        twins_layer_make(&t, e, &j->p, results[i]);
        if (i == 1) {
            memset(&t.backward.grads.gate, 0, sizeof(mok_grad));
            memset(&t.backward.grads.up, 0, sizeof(mok_grad));
        }
        RANKS_OK(mok_schedule(e->w, &t.schedule, NULL));
        RANKS_OK(mok_forward(e->w, &t.forward, NULL));
        RANKS_OK(mok_get_stats(e->w, &before));
        RANKS_OK(mok_backward(e->w, &t.backward, NULL));
        RANKS_OK(mok_get_stats(e->w, &after));
        if (e->rank == 0)
            j->bytes[i] = after.bytes_pulled_peer - before.bytes_pulled_peer;
        twins_fetch(&t.a, t.outputs);
        twins_layer_free(&t);
    }
}

/* On the cpu backend or the emulator. All rows are saved, so that nothing is replayed. */
static void run_partial(Partial *j)
{
    const int32_t devices[P] = {0, 0};
    mok_group *groups[P];
    mok_config cfg = ranks_config(128, 64, 4, 2, TOKENS);
    layer_options o = {};
    o.ranks = P;
    cfg.save = MOK_SAVE_ALL;
    cfg.ring_rows = 256;
    cfg.minibatch_rows = cfg.minibatch_rows_bwd = 128;
    cfg.backend = j->cuda ? MOK_BACKEND_CUDA : MOK_BACKEND_CPU;
    REQUIRE(layer_make(&j->p, &cfg, TOKENS, LAYER_UNIFORM, 0.1, test_seed()) && layer_result_make(&j->all, &j->p, &o) && layer_result_make(&j->down, &j->p, &o));
    if (j->cuda)
        emulated::plug_in(test_seed(), 2);
    REQUIRE(mok_group_create_local(P, j->cuda ? devices : NULL, groups) == MOK_OK);
    ranks_run_groups(P, groups, &cfg, partial_body, j);
    for (int r = 0; r < P; r++)
        mok_group_destroy(groups[r]);
    size_t rows = (size_t)(TOKENS * 128) * 2, matrix = 4 * 64 * 128 * 2;
    CHECK_BYTES(j->down.out, j->all.out, rows);
    CHECK_BYTES(j->down.dx, j->all.dx, rows);
    CHECK_BYTES(j->down.ddown, j->all.ddown, matrix);
    CHECK_EQ(j->bytes[0], 2 * j->bytes[1]);
    CHECK(j->bytes[1] > 0);
    if (!emulated::gpu.trouble.empty())
        TEST_FAILED("emulator: %s", emulated::gpu.trouble.c_str());
}

TEST(gradients_of_down_alone_bring_no_rows_of_x)
{
    Partial cpu = {}, gpu = {};
    gpu.cuda = true;
    run_partial(&cpu);
    run_partial(&gpu);
    CHECK_EQ(gpu.bytes[1], cpu.bytes[1]);
    for (Partial *j : {&cpu, &gpu}) {
        layer_result_free(&j->all);
        layer_result_free(&j->down);
        layer_free(&j->p);
    }
}

int main(int argc, char **argv) { return test_main(argc, argv); }
