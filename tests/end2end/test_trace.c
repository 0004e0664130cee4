/* Traces of the cpu backend through the public functions: every task of a pass, in order on its worker; bytes between ranks are those that the
 * statistics count; results have the bits of a run without. */
#include "../multi/ranks.h"
#include "../unit/bad_config.h"

enum { P = 3, TOKENS = 300, WORKERS = 2 };

typedef struct traced {
    layer_problem p;
    layer_result r;
    bool on;
    mok_dtype dtype;
} traced;

static int64_t events_of(const mok_trace_event *e, int64_t n, int32_t kind)
{
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++)
        found += e[i].kind == kind;
    return found;
}

static int64_t link_bytes(const mok_trace_event *e, int64_t n)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < n; i++)
        bytes += (int64_t)e[i].link_bytes;
    return bytes;
}

static int64_t info_row_tile(const ranks_env *e) { return e->plan.row_tile; }

static mok_stats stats_of(ranks_env *e)
{
    mok_stats s = MOK_INIT(mok_stats);
    RANKS_OK(mok_get_stats(e->w, &s));
    return s;
}

/* The events since the last call of this, after checks that hold for every trace. */
static mok_trace_event *take(ranks_env *e, int64_t *n)
{
    int64_t lost = -1;
    RANKS_OK(mok_trace_read(e->w, NULL, n, &lost));
    CHECK_EQ(lost, 0);
    mok_trace_event *events = malloc(sizeof *events * (size_t)(*n + 1));
    RANKS_OK(mok_trace_read(e->w, events, n, NULL));
    uint64_t last[WORKERS] = {0};
    for (int64_t i = 0; i < *n; i++) {
        const mok_trace_event *v = &events[i];
        CHECK_EQ(v->rank, e->rank);
        CHECK(v->track >= 0 && v->track < WORKERS && v->lane == 0);
        CHECK(v->begin_ns >= last[v->track % WORKERS] && v->end_ns >= v->begin_ns); /* no two of a worker overlap */
        last[v->track % WORKERS] = v->end_ns;
        CHECK(i == 0 || v->begin_ns >= events[i - 1].begin_ns);
    }
    RANKS_OK(mok_trace_start(e->w, 4096)); /* anew */
    return events;
}

static void traced_body(ranks_env *e)
{
    traced *t = e->user;
    void *schedule = ranks_schedule_block(e), *context = ranks_context_block(e);
    ranks_part part = ranks_part_of(e, TOKENS, NULL);
    mok_schedule_args s = ranks_schedule_args(&t->p, part, schedule);
    mok_forward_args f = ranks_forward_args(e, &t->p, part, schedule, context, &t->r);
    mok_backward_args b = ranks_backward_args(e, &t->p, part, schedule, context, &t->r);
    mok_schedule_info info = MOK_INIT(mok_schedule_info);
    int64_t n;
    if (t->on)
        RANKS_OK(mok_trace_start(e->w, 4096));
    RANKS_OK(mok_schedule(e->w, &s, NULL));
    RANKS_OK(mok_schedule_query(e->w, schedule, &info));
    int64_t tiles = info.table_rows / info_row_tile(e);
    if (t->on) {
        mok_trace_event *v = take(e, &n);
        CHECK_EQ(events_of(v, n, MOK_TRACE_call), 1);
        CHECK_EQ(events_of(v, n, MOK_TRACE_s0_schedule), 1);
        CHECK_EQ(events_of(v, n, MOK_TRACE_rank_barrier), 1);
        CHECK_EQ(n, 4);
        CHECK_EQ(v[0].part, MOK_CALL_SCHEDULE);
        free(v);
    }
    mok_stats before = stats_of(e);
    RANKS_OK(mok_forward(e->w, &f, NULL));
    mok_stats after = stats_of(e);
    if (t->on) {
        mok_trace_event *v = take(e, &n);
        CHECK_EQ(events_of(v, n, MOK_TRACE_s1_dispatch), tiles);
        CHECK(events_of(v, n, MOK_TRACE_s2_gate_up) >= tiles);
        CHECK(events_of(v, n, MOK_TRACE_s4_down) >= tiles);
        CHECK_EQ(events_of(v, n, MOK_TRACE_s5_reduce), WORKERS);
        CHECK_EQ(events_of(v, n, MOK_TRACE_rank_barrier), 2);
        CHECK_EQ(events_of(v, n, MOK_TRACE_wgrad), 0);
        CHECK_EQ(link_bytes(v, n), after.bytes_pulled_peer - before.bytes_pulled_peer + after.bytes_pushed_peer - before.bytes_pushed_peer);
        CHECK(link_bytes(v, n) > 0);
        free(v);
    }
    before = stats_of(e);
    RANKS_OK(mok_backward(e->w, &b, NULL));
    after = stats_of(e);
    if (t->on) {
        mok_trace_event *v = take(e, &n);
        CHECK_EQ(events_of(v, n, MOK_TRACE_s1_dispatch), tiles);
        CHECK(events_of(v, n, MOK_TRACE_s4_down_bwd) >= tiles);
        CHECK(events_of(v, n, MOK_TRACE_s2_gate_up_bwd) >= tiles);
        CHECK(events_of(v, n, MOK_TRACE_wgrad) >= info.wgrad_pieces);
        CHECK_EQ(events_of(v, n, MOK_TRACE_s5_reduce_bwd), WORKERS);
        CHECK_EQ(link_bytes(v, n), after.bytes_pulled_peer - before.bytes_pulled_peer + after.bytes_pushed_peer - before.bytes_pushed_peer);
        free(v);
        RANKS_OK(mok_trace_stop(e->w));
        RANKS_FAIL(mok_trace_read(e->w, NULL, &n, NULL), MOK_E_STATE, "there is no trace");
    }
    free(schedule);
    free(context);
}

static void same_with_and_without(mok_dtype dtype)
{
    traced t[2];
    mok_config c = good_config();
    memset(t, 0, sizeof t);
    c.max_tokens = TOKENS;
    c.cpu_threads = WORKERS;
    c.ring_rows = 512;
    c.minibatch_rows = c.minibatch_rows_bwd = 256;
    c.dtype = dtype;
    for (int on = 0; on < 2; on++) {
        layer_options o = {.ranks = P};
        t[on].on = on;
        if (!layer_make(&t[on].p, &c, TOKENS, LAYER_UNIFORM, 0.1, test_seed()) || !layer_result_make(&t[on].r, &t[on].p, &o))
            exit(1);
        ranks_run(P, &c, traced_body, &t[on]);
    }
    ranks_same_results("a traced run", &t[0].p, &t[0].r, &t[1].r, true);
    for (int on = 0; on < 2; on++) {
        layer_free(&t[on].p);
        layer_result_free(&t[on].r);
    }
}

TEST(every_task_is_in_the_trace_and_bytes_are_those_counted) { same_with_and_without(MOK_BF16); }
TEST(every_task_is_in_the_trace_of_mxfp8) { same_with_and_without(MOK_MXFP8); }

static void misuse_body(ranks_env *e)
{
    mok_trace_event one;
    int64_t n = 0;
    RANKS_OK(mok_trace_stop(e->w));
    RANKS_FAIL(mok_trace_start(e->w, -1), MOK_E_ARG, "events_per_lane is -1");
    RANKS_FAIL(mok_trace_start(e->w, (1 << 20) + 1), MOK_E_ARG, "events_per_lane is 1048577");
    RANKS_FAIL(mok_trace_start(NULL, 0), MOK_E_ARG, "workspace is NULL");
    RANKS_FAIL(mok_trace_read(e->w, NULL, NULL, NULL), MOK_E_ARG, "count is NULL");
    RANKS_OK(mok_trace_start(e->w, 1));
    RANKS_OK(mok_trace_read(e->w, NULL, &n, NULL));
    CHECK_EQ(n, 0);
    void *schedule = ranks_schedule_block(e);
    mok_schedule_args s = MOK_INIT(mok_schedule_args);
    s.schedule = schedule;
    RANKS_OK(mok_schedule(e->w, &s, NULL));
    n = 0;
    RANKS_FAIL(mok_trace_read(e->w, &one, &n, NULL), MOK_E_ARG, "there is room for 0 events, but there are 1");
    int64_t lost = 0;
    RANKS_OK(mok_trace_read(e->w, &one, &n, &lost));
    CHECK_EQ(n, 1);
    CHECK_EQ(lost, 3);
    CHECK_EQ(one.kind, MOK_TRACE_s0_schedule); /* the youngest */
    free(schedule); /* the trace goes with the workspace */
}

TEST(misuse_is_refused_and_a_full_ring_keeps_the_youngest)
{
    mok_config c = good_config();
    ranks_run(1, &c, misuse_body, NULL);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
