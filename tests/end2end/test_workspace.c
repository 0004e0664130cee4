/* One workspace, many passes: it holds nothing between calls (all of it is NaN before each), serves several layers and several
 * microbatches in flight, and a context or a schedule may be used again. */
#include "rig.h"

enum { LAYERS = 3 };

struct passes;

typedef struct world {
    mok_config cfg;
    layer_problem p[LAYERS];      /* the same shape, other data and routing */
    layer_result want[LAYERS];    /* of one rank alone, ring large */
    layer_result got[LAYERS];
    int64_t tokens_of_rank[LAYERS][RANKS_MAX];
    int32_t ranks;
    void (*story)(ranks_env *, struct world *, struct passes *);
} world;

/* One rank's memory for each layer. */
typedef struct passes {
    void *schedule[LAYERS], *context[LAYERS];
    ranks_part part[LAYERS];
} passes;

static void poison_all(ranks_env *e)
{
    ranks_meet(e); /* peers are through with this heap */
    rig_poison(e->w, NULL);
    ranks_meet(e);
}

/* Each with its own layer number, and nothing but NaN in the workspace before. */
static void schedule(ranks_env *e, world *w, passes *m, int layer)
{
    mok_schedule_args a = ranks_schedule_args(&w->p[layer], m->part[layer], m->schedule[layer]);
    a.layer = (uint64_t)layer;
    poison_all(e);
    RANKS_OK(mok_schedule(e->w, &a, NULL));
}

static void forward(ranks_env *e, world *w, passes *m, int layer, bool keep)
{
    mok_forward_args a = ranks_forward_args(e, &w->p[layer], m->part[layer], m->schedule[layer], keep ? m->context[layer] : NULL, &w->got[layer]);
    a.layer = (uint64_t)layer;
    poison_all(e);
    RANKS_OK(mok_forward(e->w, &a, NULL));
}

static void recompute(ranks_env *e, world *w, passes *m, int layer)
{
    mok_forward_args a = ranks_forward_args(e, &w->p[layer], m->part[layer], m->schedule[layer], m->context[layer], &w->got[layer]);
    a.layer = (uint64_t)layer;
    a.router_weights = NULL; /* not used, so not needed */
    a.out = NULL;
    a.weights.down.packed = a.weights.shared_down.packed = NULL;
    poison_all(e);
    RANKS_OK(mok_recompute(e->w, &a, NULL));
}

static void backward(ranks_env *e, world *w, passes *m, int layer, mok_backward_parts parts)
{
    mok_backward_args a = ranks_backward_args(e, &w->p[layer], m->part[layer], m->schedule[layer], m->context[layer], &w->got[layer]);
    a.layer = (uint64_t)layer;
    a.parts = parts;
    poison_all(e);
    RANKS_OK(mok_backward(e->w, &a, NULL));
}

static void body(ranks_env *e)
{
    world *w = e->user;
    passes m;
    for (int i = 0; i < LAYERS; i++) {
        m.schedule[i] = ranks_schedule_block(e);
        m.context[i] = ranks_context_block(e);
        m.part[i] = ranks_part_of(e, w->p[i].tokens, w->tokens_of_rank[i]);
    }
    w->story(e, w, &m);
    for (int i = 0; i < LAYERS; i++) {
        free(m.schedule[i]);
        free(m.context[i]);
    }
}

static void tell(void (*story)(ranks_env *, world *, passes *), int32_t ranks, mok_save save, bool shared, int layers)
{
    world w;
    uint64_t state = test_seed() + (uint64_t)ranks;
    memset(&w, 0, sizeof w);
    w.cfg = ranks_config(64, 128, 6, 3, 200);
    w.cfg.shared_intermediate = shared ? 64 : 0;
    w.cfg.shared_gate = shared;
    w.cfg.ring_rows = 256;
    w.cfg.minibatch_rows = w.cfg.minibatch_rows_bwd = 128;
    w.cfg.save = save;
    w.ranks = ranks;
    w.story = story;
    layer_options alone = {.ranks = 1, .ring_rows = 8192, .save = MOK_SAVE_ALL, .cpu_threads = 1}, many = {.ranks = ranks};
    for (int i = 0; i < LAYERS; i++) {
        int64_t tokens = 0;
        for (int32_t r = 0; r < ranks; r++)
            tokens += w.tokens_of_rank[i][r] = test_below(&state, 4) ? test_below(&state, 201) : 0;
        if (!layer_make(&w.p[i], &w.cfg, tokens, LAYER_UNIFORM, 0.1, test_random(&state)) || !layer_result_make(&w.got[i], &w.p[i], &many))
            exit(1);
        rig_run("alone", &w.p[i], &alone, &w.want[i]);
    }
    ranks_run(ranks, &w.cfg, body, &w);
    for (int i = 0; i < LAYERS; i++) {
        char what[64];
        snprintf(what, sizeof what, "layer %d of %d ranks, save %d", i, ranks, (int)save);
        if (i < layers)
            ranks_same_results(what, &w.p[i], &w.got[i], &w.want[i], true);
        layer_result_free(&w.got[i]);
        layer_result_free(&w.want[i]);
        layer_free(&w.p[i]);
    }
}

static void tell_all(void (*story)(ranks_env *, world *, passes *), int layers)
{
    static const mok_save saves[] = {MOK_SAVE_RING, MOK_SAVE_NONE, MOK_SAVE_ALL};
    for (int i = 0; i < 3; i++)
        for (int32_t ranks = 1; ranks <= 4; ranks += 1 + 2 * RANKS_SLOW)
            tell(story, ranks, saves[i], (i + ranks) % 2, layers);
}

/* --- stories ------------------------------------------------------------------------------------------------------------------------- */
static void twice(ranks_env *e, world *w, passes *m)
{
    for (int i = 0; i < 2; i++) {
        schedule(e, w, m, 0);
        forward(e, w, m, 0, true);
        backward(e, w, m, 0, MOK_BACKWARD_ALL);
    }
}
TEST(N1_a_poisoned_workspace_leaves_no_trace) { tell_all(twice, 1); }

static void nested(ranks_env *e, world *w, passes *m)
{
    schedule(e, w, m, 0);
    forward(e, w, m, 0, true);
    schedule(e, w, m, 1);
    forward(e, w, m, 1, true);
    backward(e, w, m, 1, MOK_BACKWARD_ALL);
    backward(e, w, m, 0, MOK_BACKWARD_ALL);
}
TEST(two_layers_share_one_workspace) { tell_all(nested, 2); }

static void in_flight(ranks_env *e, world *w, passes *m)
{
    /* Three microbatches of a pipeline, all schedules and contexts alive at once, backward in the order of the forward. */
    for (int i = 0; i < LAYERS; i++)
        schedule(e, w, m, i);
    for (int i = LAYERS - 1; i >= 0; i--)
        forward(e, w, m, i, true);
    for (int i = 0; i < LAYERS; i++)
        backward(e, w, m, i, MOK_BACKWARD_DATA);
    for (int i = 0; i < LAYERS; i++)
        backward(e, w, m, (i + 1) % LAYERS, MOK_BACKWARD_WEIGHTS);
}
TEST(C6_three_microbatches_in_flight) { tell_all(in_flight, LAYERS); }

static void checkpointed(ranks_env *e, world *w, passes *m)
{
    for (int i = 0; i < 2; i++) {
        schedule(e, w, m, i);
        forward(e, w, m, i, false);
    }
    for (int i = 1; i >= 0; i--) { /* no second exchange of routes: the schedule is still there */
        recompute(e, w, m, i);
        backward(e, w, m, i, MOK_BACKWARD_ALL);
    }
}
TEST(D4_recompute_with_the_saved_routing) { tell_all(checkpointed, 2); }

static void again_and_again(ranks_env *e, world *w, passes *m)
{
    schedule(e, w, m, 0);
    for (int i = 0; i < 3; i++) { /* one schedule, several forwards */
        forward(e, w, m, 0, i > 0);
        schedule(e, w, m, 1);
    }
    void *kept = ranks_context_block(e);
    memcpy(kept, m->context[0], (size_t)e->plan.context_bytes);
    for (int i = 0; i < 2; i++) /* one context, several backwards: it is read only */
        backward(e, w, m, 0, MOK_BACKWARD_ALL);
    CHECK_BYTES(m->context[0], kept, (size_t)e->plan.context_bytes);
    free(kept);
    forward(e, w, m, 1, true);
    recompute(e, w, m, 1);
    backward(e, w, m, 1, MOK_BACKWARD_ALL);
}
TEST(schedules_and_contexts_serve_more_than_once) { tell_all(again_and_again, 2); }

/* A recompute fills the context with the forward's bits. */
static void same_context(ranks_env *e, world *w, passes *m)
{
    schedule(e, w, m, 0);
    forward(e, w, m, 0, true);
    void *kept = m->context[0];
    m->context[0] = ranks_context_block(e);
    recompute(e, w, m, 0);
    CHECK_BYTES(m->context[0], kept, (size_t)e->plan.context_bytes);
    free(kept);
    backward(e, w, m, 0, MOK_BACKWARD_ALL);
}
TEST(recompute_writes_the_forwards_context) { tell_all(same_context, 1); }

/* Schedules and contexts may be moved in memory: they hold no pointers. */
static void moved(ranks_env *e, world *w, passes *m)
{
    schedule(e, w, m, 0);
    for (int i = 0; i < 2; i++) {
        void *s = ranks_schedule_block(e), *c = ranks_context_block(e);
        memcpy(s, m->schedule[0], (size_t)e->plan.schedule_bytes);
        memcpy(c, m->context[0], (size_t)e->plan.context_bytes);
        memset(m->schedule[0], 0, (size_t)e->plan.schedule_bytes);
        memset(m->context[0], 0, (size_t)e->plan.context_bytes);
        free(m->schedule[0]);
        free(m->context[0]);
        m->schedule[0] = s;
        m->context[0] = c;
        if (i == 0)
            forward(e, w, m, 0, true);
    }
    backward(e, w, m, 0, MOK_BACKWARD_ALL);
}
TEST(schedules_and_contexts_may_be_moved) { tell_all(moved, 1); }

/* --- two workspaces of one group --------------------------------------------------------------------------------------------------- */
static void two_workspaces(ranks_env *e, world *w, passes *m)
{
    mok_workspace *first = e->w, *second = NULL;
    mok_config other = *e->wish;
    other.ring_rows = 512;
    RANKS_OK(mok_workspace_create(e->group, &other, &second));
    mok_plan plan = MOK_INIT(mok_plan), mine = e->plan;
    RANKS_OK(mok_workspace_plan(second, &plan));
    schedule(e, w, m, 0);
    e->w = second;
    e->plan = plan;
    free(m->schedule[1]);
    free(m->context[1]);
    m->schedule[1] = ranks_schedule_block(e);
    m->context[1] = ranks_context_block(e);
    schedule(e, w, m, 1);
    forward(e, w, m, 1, true);
    mok_forward_args wrong = ranks_forward_args(e, &w->p[0], m->part[0], m->schedule[0], NULL, &w->got[0]);
    RANKS_FAIL(mok_forward(second, &wrong, NULL), MOK_E_STATE, "schedule was not filled by mok_schedule of this configuration");
    e->w = first;
    e->plan = mine;
    forward(e, w, m, 0, true);
    backward(e, w, m, 0, MOK_BACKWARD_ALL);
    e->w = second;
    e->plan = plan;
    backward(e, w, m, 1, MOK_BACKWARD_ALL);
    mok_workspace_destroy(second);
    e->w = first;
    e->plan = mine;
}
TEST(two_workspaces_of_one_group) { tell_all(two_workspaces, 2); }

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
