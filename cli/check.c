/* mok check: numerics against float64 and bit identity over everything that must not change a bit. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "commands.h"
#include "shape.h"
#include "term.h"

/* About half of the live routes go to one expert, in the middle: only that makes segments that no small ring can hold. */
static void skew(layer_problem *p, uint64_t seed)
{
    uint64_t state = ~seed;
    for (int64_t i = 0; i < p->tokens * p->cfg.topk; i++)
        if (p->expert_ids[i] >= 0 && layer_random(&state) >> 63)
            p->expert_ids[i] = (int32_t)(p->cfg.num_experts / 2);
}

static void count_routes(check_routing *r)
{
    const layer_problem *p = &r->problem;
    int64_t *routes = calloc((size_t)p->cfg.num_experts, sizeof *routes);
    for (int64_t i = 0; routes && i < p->tokens * p->cfg.topk; i++)
        if (p->expert_ids[i] >= 0) {
            r->rows++;
            int64_t n = ++routes[p->expert_ids[i]];
            r->busiest = n > r->busiest ? n : r->busiest;
        }
    free(routes);
}

static void tick(void *user)
{
    term_progress *p = user;
    term_progress_update(p, p->done + 1);
}

static bool check_one_routing(const check_settings *s, check_routing *r, bool skewed, term_progress *progress)
{
    layer_result first = {0};
    r->name = skewed ? "skewed" : "uniform";
    if (!layer_make(&r->problem, &s->cfg, s->tokens, LAYER_UNIFORM, s->dropped, s->seed + ((uint64_t)skewed << 40)))
        return false;
    if (skewed)
        skew(&r->problem, s->seed);
    count_routes(r);
    bool ok = check_run_all(s, r, &first, tick, progress) && check_against_float64(r, &first);
    tick(progress);
    layer_result_free(&first);
    return ok;
}

/* 0 passed, 1 failed, 2 not even begun. */
static int check_everything(const check_settings *s, bool json)
{
    static check_report report;
    term_progress progress;
    double start = term_now();
    bool ok = true;
    report = (check_report){.settings = *s};
    term_progress_start(&progress, "checking", "run", 0, CHECK_ROUTINGS * (check_count_runs(s) + 1));
    for (int i = 0; i < CHECK_ROUTINGS && ok; i++)
        ok = check_one_routing(s, &report.routings[i], i, &progress);
    term_progress_clear(&progress);
    report.seconds = term_now() - start;
    if (!ok) {
        fprintf(stderr, "mok check: out of memory for a layer of %s experts and %s tokens\n", term_count(s->cfg.num_experts).text, term_count(s->tokens).text);
    } else {
        check_judge(&report);
        if (json)
            ok = check_print_json(&report);
        else
            check_print_text(&report);
    }
    for (int i = 0; i < CHECK_ROUTINGS; i++) {
        layer_free(&report.routings[i].problem);
        free(report.routings[i].runs);
    }
    return ok && report.num_failures == 0 ? 0 : 1;
}

/* Shows what the library says about an expert id that does not exist. 2: it refused it, as it must; 1: it did not. */
static int check_bad_id(const check_settings *s)
{
    layer_problem p;
    layer_result r = {0};
    static const int32_t first_device[4096];
    layer_options o = {.ranks = (int32_t)s->ranks.values[s->ranks.count - 1], .backend = s->cfg.backend, .forward_only = true,
                       .devices = s->num_devices ? first_device : NULL};
    char error[512] = "out of memory";
    mok_status status = MOK_E_MEMORY;
    if (layer_make(&p, &s->cfg, s->tokens, LAYER_UNIFORM, s->dropped, s->seed)) {
        p.expert_ids[p.tokens * p.cfg.topk / 2] = (int32_t)p.cfg.num_experts;
        if (layer_result_make(&r, &p, &o))
            status = layer_run(&p, &o, &r, error);
        layer_result_free(&r);
        layer_free(&p);
    }
    fprintf(stderr, "mok check: %s\n", status == MOK_OK ? "FAILED: an expert id beyond the experts was accepted" : error);
    return status == MOK_E_ROUTE ? 2 : 1;
}

/* What creation would refuse is refused here, with the same sentence. */
static bool is_legal(const check_settings *s, char *error, size_t size)
{
    for (size_t i = 0; i < s->ranks.count; i++) {
        mok_config cfg = s->cfg;
        mok_plan plan = MOK_INIT(mok_plan);
        cfg.max_tokens = s->tokens;
        if (mok_plan_query(&cfg, (int32_t)s->ranks.values[i], 0, 0, 0, 0, &plan, NULL, NULL) != MOK_OK) {
            snprintf(error, size, "%s", mok_last_error());
            return false;
        }
    }
    /* Weights, three results and two references; per row of x and the like: ring, slots and both references. */
    const mok_config *c = &s->cfg;
    double weights = 3.0 * (double)c->hidden * (double)(c->num_experts * c->intermediate + c->shared_intermediate);
    return shape_fits(24 * weights + 64.0 * (double)(s->tokens * c->topk) * (double)(c->hidden + c->intermediate), error, size);
}

static uint64_t fresh_seed(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint64_t state = (uint64_t)t.tv_sec * 1000000007u + (uint64_t)t.tv_nsec * 31u + (uint64_t)getpid();
    return layer_random(&state) % 1000000000; /* short enough to type */
}

int command_check(int argc, char **argv)
{
    check_settings s = {.quick = false};
    shape_options shape = {.model = NULL};
    int64_t seed, devices;
    const char *backend, *dtype;
    bool json, bad_ids, wgrad_bf16;
    char error[1024], name[64];
    arg_option options[] = {
        SHAPE_OPTIONS(&shape, 256, 384, 128, 8, 3),
        ARG_INT("tokens", "N", &s.tokens, 300, 1, 1 << 24, "tokens of the whole batch, split over the ranks"),
        ARG_INT_LIST("ranks", "P,P,...", &s.ranks, "1,2,4,8", 1, 4096, "numbers of ranks to compare"),
        ARG_DOUBLE("dropped", "SHARE", &s.dropped, 0.05, 0, 1, "share of the routes that are dropped (-1)"),
        ARG_INT("seed", "N", &seed, -1, 0, INT64_MAX, "seed of data and routes; a fresh one, printed, if not given"),
        ARG_STRING("backend", "NAME", &backend, "cpu", "cpu, or cuda: with virtual ranks if there are more ranks than GPUs"),
        ARG_INT("devices", "N", &devices, 1, 1, 64, "cuda: GPUs that the ranks are spread over"),
        SHAPE_DTYPE_OPTION(&dtype),
        ARG_FLAG("wgrad-bf16", &wgrad_bf16, "mxfp8: weight gradients from bf16 operands, not from quantised ones"),
        ARG_FLAG("quick", &s.quick, "fewer variants"),
        ARG_FLAG("bad-ids", &bad_ids, "instead, give one route an expert that does not exist and show how it is refused"),
        ARG_FLAG("json", &json, "print JSON"),
    };
    const size_t num_options = sizeof options / sizeof *options;
    args_result parsed = args_parse(options, num_options, argc, argv, error, sizeof error);
    int status = 0;
    if (parsed == ARGS_HELP)
        args_help(stdout, "mok check", "Runs one layer in every way that must not change its bits, and compares it with float64.", options, num_options);
    if (parsed == ARGS_OK) {
        if (!args_given(options, num_options, "topk") && shape.topk > shape.experts)
            shape.topk = shape.experts;
        bool ok = shape_resolve(&shape, &s.cfg, name, NULL, error, sizeof error) && shape_dtype(dtype, &s.cfg.dtype, error, sizeof error) && shape_backend(backend, &s.cfg.backend, error, sizeof error) &&
                  shape_backend_usable(s.cfg.backend, error, sizeof error);
        s.cfg.mx_wgrad_bf16 = wgrad_bf16;
        s.num_devices = s.cfg.backend == MOK_BACKEND_CUDA ? (int32_t)devices : 0;
        s.seed = seed >= 0 ? (uint64_t)seed : fresh_seed();
        ok = ok && is_legal(&s, error, sizeof error);
        if (ok)
            status = bad_ids ? check_bad_id(&s) : check_everything(&s, json);
        else
            parsed = ARGS_ERROR;
    }
    if (parsed == ARGS_ERROR)
        fprintf(stderr, "mok check: %s\n", error);
    args_free(options, num_options);
    return parsed == ARGS_ERROR ? 2 : status;
}
