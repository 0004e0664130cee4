/* Random shapes, splits, rings and routes, all from one seed: the bits of one rank with a full ring, and errors within twice the
 * bf16 chain's. A failing case prints what it was; MOK_TEST_SEED repeats the run. */
#include "rig.h"

typedef struct fuzz_case {
    mok_config cfg;
    layer_problem p;
    layer_options o;
    int64_t tokens_of_rank[8];
} fuzz_case;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Routes of every kind: even, skewed to some experts, one expert alone, some experts empty, duplicates, dropped; whole tokens dropped. */
static void draw_ids(uint64_t *state, fuzz_case *f, bool skewed)
{
    int64_t experts = f->cfg.num_experts, topk = f->cfg.topk, style = skewed ? 1 : test_below(state, 6), favourite = test_below(state, experts);
    double dropped = skewed || test_below(state, 3) ? 0 : test_uniform(state);
    for (int64_t t = 0; t < f->p.tokens; t++) {
        bool none = style == 5 && test_below(state, 3) == 0;
        for (int64_t k = 0; k < topk; k++) {
            int32_t *id = &f->p.expert_ids[t * topk + k];
            *id = (int32_t)test_below(state, experts);
            if (style == 1 || (style == 2 && test_below(state, 8)))
                *id = (int32_t)favourite;
            if (style == 3)
                *id = (int32_t)(*id / 2 * 2); /* every second expert is empty */
            if (style == 4 && k)
                *id = f->p.expert_ids[t * topk]; /* the same expert K times */
            if (none || test_uniform(state) < dropped)
                *id = -1;
            float *w = &f->p.router_weights[t * topk + k];
            if (test_below(state, 10) == 0)
                *w = test_below(state, 2) ? 0.0f : -*w;
        }
    }
}

/* turning: a small ring and one expert with most of the rows, so that ring, copies and cuts are certain. */
static void draw(uint64_t *state, fuzz_case *f, bool turning)
{
    mok_config *c = &f->cfg;
    memset(f, 0, sizeof *f);
    *c = MOK_INIT(mok_config);
    c->hidden = 64 * (1 + test_below(state, 3));
    c->intermediate = 64 * (1 + test_below(state, 3));
    c->shared_intermediate = test_below(state, 3) ? 0 : 64 * (1 + test_below(state, 2));
    c->shared_gate = c->shared_intermediate && test_below(state, 2);
    c->num_experts = 1 + test_below(state, 10);
    c->topk = 1 + test_below(state, c->num_experts < 4 ? c->num_experts : 4);
    c->swiglu_limit = test_below(state, 4) ? 0 : 1;
    c->dtype = test_below(state, 3) ? MOK_BF16 : MOK_MXFP8;
    c->mx_wgrad_bf16 = c->dtype == MOK_MXFP8 && test_below(state, 3) == 0;
    layer_options *o = &f->o;
    o->mx_prequantised = test_below(state, 2);
    o->ranks = (int32_t)(1 + test_below(state, 8));
    int64_t tokens = 0, most = test_below(state, 3) ? 40 : 200;
    for (int32_t r = 0; r < o->ranks; r++)
        tokens += f->tokens_of_rank[r] = test_below(state, 4) ? test_below(state, most) : 0;
    if (turning) {
        tokens += 300 - f->tokens_of_rank[0];
        f->tokens_of_rank[0] = 300;
    }
    o->tokens_of_rank = f->tokens_of_rank;
    o->minibatch_rows = turning ? 128 : 128 * (1 + test_below(state, 3));
    o->minibatch_rows_bwd = turning ? 128 : 128 * (1 + test_below(state, 3));
    o->ring_rows = 2 * (o->minibatch_rows > o->minibatch_rows_bwd ? o->minibatch_rows : o->minibatch_rows_bwd) + 128 * (turning ? 0 : test_below(state, 4));
    o->save = (mok_save)test_below(state, 5);
    o->save_rows = o->save == MOK_SAVE_ROWS ? test_below(state, 700) : 0;
    o->cpu_threads = (int32_t)(1 + test_below(state, 3));
    o->recompute = test_below(state, 4) == 0;
    o->two_call_backward = test_below(state, 4) == 0;
    o->experts_by_pointer = test_below(state, 2);
    o->before_pass = rig_poison;
    if (!layer_make(&f->p, c, tokens, LAYER_UNIFORM, 0, test_random(state)))
        exit(1);
    draw_ids(state, f, turning);
}

static void print_case(const fuzz_case *f)
{
    const mok_config *c = &f->cfg;
    const layer_options *o = &f->o;
    printf("  … case: hidden %lld, intermediate %lld, shared %lld%s, experts %lld, topk %lld, limit %g, ranks %d with tokens", (long long)c->hidden,
           (long long)c->intermediate, (long long)c->shared_intermediate, c->shared_gate ? " gated" : "", (long long)c->num_experts, (long long)c->topk,
           (double)c->swiglu_limit, o->ranks);
    for (int32_t r = 0; r < o->ranks; r++)
        printf(" %lld", (long long)f->tokens_of_rank[r]);
    printf(", ring %lld, minibatches %lld and %lld, save %d (%lld), threads %d, recompute %d, two calls %d, pointers %d%s%s%s\n", (long long)o->ring_rows,
           (long long)o->minibatch_rows, (long long)o->minibatch_rows_bwd, (int)o->save, (long long)o->save_rows, o->cpu_threads, o->recompute,
           o->two_call_backward, o->experts_by_pointer, c->dtype == MOK_MXFP8 ? ", MXFP8" : "", c->mx_wgrad_bf16 ? ", bf16 weight gradients" : "",
           c->dtype == MOK_MXFP8 && o->mx_prequantised ? ", prequantised" : "");
}

static void run_case(uint64_t *state, rig_counts *counts, bool references, bool turning)
{
    fuzz_case f;
    layer_result want, got;
    rig_references refs;
    draw(state, &f, turning);
    layer_options alone = {.ranks = 1, .ring_rows = 1 << 14, .save = MOK_SAVE_ALL, .cpu_threads = 1};
    int before = test_failures;
    rig_run("alone", &f.p, &alone, &want);
    rig_run("fuzzed", &f.p, &f.o, &got);
    ranks_same_results("the case", &f.p, &got, &want, true);
    CHECK_BYTES(got.tokens_per_expert, want.tokens_per_expert, (size_t)f.cfg.num_experts * 8);
    if (references && f.cfg.dtype == MOK_BF16) {
        if (!rig_references_make(&refs, &f.p))
            exit(1);
        rig_check_errors(&f.p, &refs, &want);
        rig_references_free(&refs);
    }
    rig_count(counts, &got);
    if (test_failures != before)
        print_case(&f);
    layer_result_free(&want);
    layer_result_free(&got);
    layer_free(&f.p);
}

/* As many cases as a few seconds hold, at least some. MOK_FUZZ_SECONDS makes it longer. */
TEST(routes_and_shapes)
{
    const char *wish = getenv("MOK_FUZZ_SECONDS");
    double limit = wish ? atof(wish) : 6, start = seconds();
    uint64_t state = test_seed();
    rig_counts counts = {0};
    int cases = 0;
    if (limit > TEST_WATCHDOG - 20)
        alarm((unsigned)limit + 60);
    while ((cases < 25 || seconds() - start < limit) && seconds() - start < limit + 20 && test_failures == 0)
        {
        run_case(&state, &counts, cases % 2 == 0, cases % 8 == 7);
        cases++;
    }
    printf("  %d cases in %.1f s\n", cases, seconds() - start);
    rig_print_counts(&counts);
    if (test_failures == 0)
        CHECK(counts.rotations > 0 && counts.copied > 0 && counts.replayed > 0 && counts.continued > 0 && counts.pulled_peer > 0);
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
