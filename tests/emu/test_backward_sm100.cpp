/* The same backward on emulated Blackwell; and what only Blackwell does: clusters that leave in the middle of a pass. */
#define MK_SM100
#include "test_backward.cpp"

/* A whole step. *left: clusters that have left its backward. */
static StepResult run_and_count(const layer_problem &p, Run run, int64_t *left)
{
    *left = 0;
    run.before_launch = [left](const std::string &kernel, const void *params) {
        if (kernel != "mok_s5_combine_bwd")
            return;
        const mk_rank_params &r = static_cast<const mk_combine_bwd_params *>(params)->rank;
        const uint32_t *tickets = reinterpret_cast<const mk_device_state *>(r.local + r.memory.device_state)->tickets;
        CHECK(tickets[MK_YIELD_COUNTED] > 0 && tickets[MK_YIELD_LEFT] < tickets[MK_YIELD_COUNTED]);
        *left += tickets[MK_YIELD_LEFT];
    };
    return run_layer(p, run);
}

/* Launch control refuses never, often or always; many clusters fit, or few: the bits are the same, all tasks are done, and clusters have left where
 * they could. With the smallest ring, rows wait for slots while clusters leave. */
TEST(clusters_come_and_go)
{
    static const uint32_t refusals[] = {0, 2, 1};
    int64_t left[3] = {};
    layer_problem p = make_problem(130, 64, 4, 128, 64);
    const StepResult want = run_layer(p, make_run("all clusters fit", 1, 1024, 256));
    for (int i : {0, 1, 2, 5}) {
        Run run = make_run(i < 3 ? "three clusters fit" : "two clusters fit", 1 + i % 2, 256, 128, i % 2 ? MOK_SAVE_NONE : MOK_SAVE_RING);
        run.resident = i < 3 ? 3 : 2;
        run.refusals = refusals[i % 3];
        int64_t count;
        check_bits(run, run_and_count(p, run, &count), want);
        left[i % 3] += count;
    }
    printf("  clusters that left: %lld without refusals, %lld with half, %lld with all refused\n", (long long)left[0], (long long)left[1], (long long)left[2]);
    CHECK(left[2] > 0);
    layer_free(&p);
}
