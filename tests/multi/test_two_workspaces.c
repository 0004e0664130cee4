/* Two workspaces of a group, called in turn by ranks that run ahead of each other: a rank that has met the others in one and has gone on to the other is not
 * taken for one that calls them in a different order. */
#include "ranks.h"

enum { TOKENS = 16, CALLS = RANKS_SLOW ? 400 : 3000 };

static void body(ranks_env *e)
{
    mok_workspace *w[2] = {e->w, NULL};
    void *schedule[2] = {ranks_schedule_block(e), ranks_schedule_block(e)};
    uint64_t state = test_seed() + (uint64_t)e->rank;
    int32_t ids[TOKENS];
    mok_schedule_args a = MOK_INIT(mok_schedule_args);
    for (int t = 0; t < TOKENS; t++)
        ids[t] = t % 4;
    a.num_tokens = TOKENS;
    a.expert_ids = ids;
    CHECK_EQ(mok_workspace_create(e->group, e->wish, &w[1]), MOK_OK);
    for (int i = 0; i < CALLS && w[1]; i++) {
        if (layer_random(&state) % 64 == 0)
            usleep((useconds_t)(layer_random(&state) % 300));
        a.schedule = schedule[i % 2];
        mok_status status = mok_schedule(w[i % 2], &a, NULL);
        if (status != MOK_OK) {
            TEST_FAILED("rank %d, call %d: %s", e->rank, i, mok_last_error());
            break;
        }
    }
    mok_workspace_destroy(w[1]);
    free(schedule[0]);
    free(schedule[1]);
}

TEST(a_rank_that_has_gone_on_to_the_other_workspace_is_not_in_the_wrong_one)
{
    mok_config c = ranks_config(64, 64, 4, 1, TOKENS);
    c.timeout_ms = 20000;
    ranks_run(4, &c, body, NULL);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
