/* mok plan: what a layer will cost, before anything is allocated. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "plan.h"
#include "shape.h"
#include "term.h"

enum { CLUSTER_ROWS = 256 /* chosen minibatches are multiples of it, or whole waves */ };

/* Speeds assumed where none are given: dense BF16 peak in TFLOP/s, NVLink GB/s in one direction. Ascending by SMs. */
static const struct machine { int32_t sms; const char *name; double rate, link; } machines[] = {
    {132, "H100/H200 SXM", 989, 450},
    {148, "B200", 2250, 900},
};

/* The plan's minibatch in one sentence; the same reasons that it has. */
static void explain_minibatch(const plan_view *v, const mok_pass_plan *pass, int64_t asked, char *why, size_t size)
{
    char bound[192], used[80];
    int64_t rounded = ((int64_t)ceil(pass->two_wave_rows) + CLUSTER_ROWS - 1) / CLUSTER_ROWS * CLUSTER_ROWS;
    snprintf(used, sizeof used, "%s rows", term_count(pass->minibatch_rows).text);
    if (pass->two_wave_rows > 0)
        snprintf(bound, sizeof bound, "2 waves x %d SMs x %d x %d tile / %lld columns of the narrowest GEMM = %.6g rows", v->sms, v->tile_rows, v->tile_cols,
                 (long long)pass->narrowest_gemm, pass->two_wave_rows);
    else
        snprintf(bound, sizeof bound, "a CPU has no waves to fill");
    if (asked)
        snprintf(why, size, "%s, as asked (%s)", used, bound);
    else if (pass->two_wave_rows > 0 && pass->minibatch_rows == rounded)
        snprintf(why, size, "%s, rounded up to %d: %s", bound, CLUSTER_ROWS, used);
    else if (pass->two_wave_rows > 0 && (double)pass->minibatch_rows >= pass->two_wave_rows)
        snprintf(why, size, "%s, rounded up to whole waves of both GEMMs or as the ring allows: %s", bound, used);
    else if (pass->two_wave_rows > 0)
        snprintf(why, size, "%s, but %s allows only %s", bound, v->cfg.ring_rows && v->cfg.ring_rows < v->plan.capacity_rows ? "so small a ring" : "the worst routing", used);
    else
        snprintf(why, size, "%s: %s", bound, used);
}

static void explain_ring(plan_view *v)
{
    const mok_plan *p = &v->plan;
    const char *chosen = v->cfg.ring_rows                                      ? "as asked"
                         : p->ring_rows == p->smallest_ring_rows                ? "the smallest legal"
                         : p->capacity_rows && p->ring_rows >= p->capacity_rows ? "as many as any routing can need"
                                                                                : "balanced rows of the largest rank, with half a tile of padding per expert";
    snprintf(v->why_ring, sizeof v->why_ring, "%s rows (%s); at least two minibatches = %s; deadlock check passed", term_count(p->ring_rows).text, chosen,
             term_count(p->smallest_ring_rows).text);
}

static mok_status query(plan_view *v)
{
    v->plan = MOK_INIT(mok_plan);
    v->num_buffers = PLAN_MAX_BUFFERS;
    mok_status status = mok_plan_query(&v->cfg, v->ranks, v->rank, v->sms, v->tile_rows, v->tile_cols, &v->plan, v->buffers, &v->num_buffers);
    if (status != MOK_OK)
        return status;
    if (v->num_buffers > PLAN_MAX_BUFFERS)
        v->num_buffers = PLAN_MAX_BUFFERS;
    explain_minibatch(v, &v->plan.forward, v->cfg.minibatch_rows, v->why_forward, sizeof v->why_forward);
    explain_minibatch(v, &v->plan.backward, v->cfg.minibatch_rows_bwd, v->why_backward, sizeof v->why_backward);
    explain_ring(v);
    return MOK_OK;
}

/* -------------------------------------------------------------------------------------------------------- command -- */

static bool settle(plan_view *v, const shape_options *shape, const char *save, const char *backend, const char *dtype, bool sms_given, double rate, double link,
                   char *error, size_t size)
{
    bool wide_given = v->cfg.mx_wide_given;
    int64_t tokens = v->cfg.max_tokens, ring = v->cfg.ring_rows, forward = v->cfg.minibatch_rows, backward = v->cfg.minibatch_rows_bwd;
    if (!shape_resolve(shape, &v->cfg, v->name, &v->note, error, size) || !shape_save(save, &v->cfg.save, &v->cfg.save_rows, error, size) ||
        !shape_backend(backend, &v->cfg.backend, error, size) || !shape_dtype(dtype, &v->cfg.dtype, error, size))
        return false;
    v->cfg.max_tokens = tokens;
    v->cfg.ring_rows = ring;
    v->cfg.minibatch_rows = forward;
    v->cfg.minibatch_rows_bwd = backward;
    v->cfg.mx_wide_given = wide_given;
    if (v->cfg.backend == MOK_BACKEND_CPU && !sms_given)
        v->sms = 0;
    shape_describe(&v->cfg, v->shape);
    /* What a core of this machine can do is mok bench's to say. */
    static const struct machine unknown = {0, NULL, NAN, NAN};
    const struct machine *m = v->cfg.backend == MOK_BACKEND_CPU ? &unknown : &machines[v->sms >= machines[1].sms];
    v->speed_of = rate > 0 && link > 0 ? NULL : m->name;
    v->rate = (rate > 0 ? rate : m->rate) * 1e12;
    v->link = (link > 0 ? link : m->link) * 1e9;
    return true;
}

int command_plan(int argc, char **argv)
{
    static plan_view v;
    shape_options shape;
    int64_t ranks, rank, tokens, sms, tile_rows, tile_cols, ring, minibatch, minibatch_bwd;
    double rate, link;
    const char *save, *backend, *dtype;
    bool json, wide_given;
    char error[1024];
    arg_option options[] = {
        SHAPE_MODEL_OPTION(&shape),
        SHAPE_OPTIONS(&shape, -1, -1, -1, -1, -1),
        ARG_INT("ranks", "P", &ranks, 1, 1, INT32_MAX, "ranks that share the experts"),
        ARG_INT("rank", "R", &rank, 0, 0, INT32_MAX, "the rank to show"),
        ARG_INT("tokens", "T", &tokens, 2048, 1, ARG_NO_LIMIT, "tokens of each rank"),
        ARG_INT("sms", "N", &sms, 132, 1, 4096, "multiprocessors of a GPU"),
        ARG_INT("tile-rows", "N", &tile_rows, 128, 1, 4096, "rows of a GEMM tile"),
        ARG_INT("tile-cols", "N", &tile_cols, 256, 1, 4096, "columns of a GEMM tile"),
        ARG_INT("ring", "ROWS", &ring, 0, 1, ARG_NO_LIMIT, "rows of the ring; chosen if not given"),
        ARG_INT("minibatch", "ROWS", &minibatch, 0, 1, ARG_NO_LIMIT, "minibatch of the forward; chosen if not given"),
        ARG_INT("minibatch-bwd", "ROWS", &minibatch_bwd, 0, 1, ARG_NO_LIMIT, "minibatch of the backward; chosen if not given"),
        ARG_STRING("save", "WHAT", &save, "auto", "gate/up rows kept for the backward: none, ring, all or a number"),
        ARG_DOUBLE("rate", "TFLOPS", &rate, 0, 1e-9, 1e9, "speed of one GPU for the time floor; that of the GPU with so many SMs if not given"),
        ARG_DOUBLE("link", "GBPS", &link, 0, 1e-9, 1e9, "link speed in one direction, the same"),
        ARG_STRING("backend", "NAME", &backend, "auto", "auto or cuda: a GPU; cpu"),
        SHAPE_DTYPE_OPTION(&dtype),
        ARG_FLAG("wide-given", &wide_given, "mxfp8: the caller keeps widened weights, the workspace has no room for them"),
        ARG_FLAG("json", &json, "print JSON"),
    };
    const size_t num_options = sizeof options / sizeof *options;
    args_result parsed = args_parse(options, num_options, argc, argv, error, sizeof error);
    int status = parsed == ARGS_ERROR ? 2 : 0;
    if (parsed == ARGS_HELP) {
        args_help(stdout, "mok plan", "What one layer costs on one rank, from a model's name, its config.json, or figures: nothing is run.", options, num_options);
    } else if (parsed == ARGS_OK) {
        v = (plan_view){.ranks = (int32_t)ranks, .rank = (int32_t)rank, .sms = (int32_t)sms, .tile_rows = (int32_t)tile_rows, .tile_cols = (int32_t)tile_cols,
                        .cfg = {.max_tokens = tokens, .ring_rows = ring, .minibatch_rows = minibatch, .minibatch_rows_bwd = minibatch_bwd, .mx_wide_given = wide_given}};
        status = settle(&v, &shape, save, backend, dtype, args_given(options, num_options, "sms"), rate, link, error, sizeof error) ? 0 : 2;
        if (status == 0 && query(&v) != MOK_OK) {
            snprintf(error, sizeof error, "%s", mok_last_error());
            status = 2;
        }
        if (status == 0 && json)
            status = plan_print_json(&v) ? 0 : 1;
        else if (status == 0)
            plan_print_text(&v);
    }
    if (status == 2)
        fprintf(stderr, "mok plan: %s\n", error);
    args_free(options, num_options);
    return status;
}
