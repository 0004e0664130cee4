/* mok trace: what every role of every CTA, or every worker, did in a pass, and when. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "json.h"
#include "layer.h"
#include "mok.h"
#include "shape.h"

static const char *const pass_names[] = {"all", "schedule", "forward", "recompute", "backward"}; /* by mok_call_kind; 0: all */
enum { NUM_PASSES = sizeof pass_names / sizeof *pass_names };

typedef struct tracing {
    mok_config cfg;
    int64_t ranks, tokens, threads, repeat, events_per_lane, seed, devices;
    int pass;
    pthread_mutex_t lock;
    mok_trace_event *events; /* of all ranks */
    int64_t count, lost;
    int64_t moved_ns, accuracy_ns; /* of clocks: the most */
    char error[512];         /* the first that a rank met, or "" */
} tracing;

static void keep_error(tracing *t)
{
    pthread_mutex_lock(&t->lock);
    if (!t->error[0])
        snprintf(t->error, sizeof t->error, "%s", mok_last_error());
    pthread_mutex_unlock(&t->lock);
}

/* Every pass begins a trace anew, so that the last one's stays. */
static void before_pass(mok_workspace *w, void *user)
{
    tracing *t = user;
    if (mok_trace_start(w, t->events_per_lane) != MOK_OK)
        keep_error(t);
}

/* Of one rank's events, sorted by begin, those of the last call of kind `pass`: up to the call after it. */
static int64_t select_pass(mok_trace_event *events, int64_t count, int pass)
{
    int64_t first = -1, end = count;
    for (int64_t i = 0; pass && i < count; i++)
        if (events[i].kind == MOK_TRACE_call) {
            if (events[i].part == pass) {
                first = i;
                end = count;
            } else if (first >= 0 && end == count) {
                end = i;
            }
        }
    if (!pass)
        return count;
    if (first < 0)
        return 0;
    memmove(events, events + first, sizeof *events * (size_t)(end - first));
    return end - first;
}

static void after_pass(mok_workspace *w, void *user)
{
    tracing *t = user;
    int64_t count = 0, lost = 0;
    mok_trace_event *events = NULL;
    mok_status status = mok_trace_read(w, NULL, &count, &lost);
    if (status == MOK_OK)
        events = malloc(sizeof *events * (size_t)(count + 1));
    if (events)
        status = mok_trace_read(w, events, &count, &lost);
    if (!events || status != MOK_OK) {
        keep_error(t);
        free(events);
        return;
    }
    pthread_mutex_lock(&t->lock);
    int32_t rank = count ? events[0].rank : 0;
    int64_t kept = 0; /* the pass before of this rank is forgotten */
    for (int64_t i = 0; i < t->count; i++)
        if (t->events[i].rank != rank)
            t->events[kept++] = t->events[i];
    mok_trace_event *all = realloc(t->events, sizeof *all * (size_t)(kept + count + 1));
    if (all) {
        t->events = all;
        t->count = kept + count;
        t->lost += lost;
        memcpy(all + kept, events, sizeof *all * (size_t)count);
    }
    pthread_mutex_unlock(&t->lock);
    free(events);
}

static bool record(tracing *t, char *error, size_t error_size)
{
    int32_t devices[4096];
    for (int32_t r = 0; r < t->ranks; r++)
        devices[r] = r % (int32_t)t->devices;
    bool cuda = t->cfg.backend == MOK_BACKEND_CUDA;
    layer_problem problem = {.tokens = 0};
    layer_result result;
    layer_options o = {.ranks = (int32_t)t->ranks, .backend = t->cfg.backend, .devices = cuda ? devices : NULL, .cpu_threads = (int32_t)t->threads,
                       .ring_rows = t->cfg.ring_rows, .minibatch_rows = t->cfg.minibatch_rows, .minibatch_rows_bwd = t->cfg.minibatch_rows,
                       .forward_only = t->pass == MOK_CALL_SCHEDULE || t->pass == MOK_CALL_FORWARD, .recompute = t->pass == MOK_CALL_RECOMPUTE,
                       .repeat = t->repeat, .before_pass = before_pass, .after_pass = after_pass, .user = t};
    char sentence[512] = "out of memory";
    bool made = layer_make(&problem, &t->cfg, t->tokens * t->ranks, LAYER_DISTINCT, 0, (uint64_t)t->seed) && layer_result_make(&result, &problem, &o);
    mok_status status = made ? layer_run(&problem, &o, &result, sentence) : MOK_E_MEMORY;
    if (made)
        layer_result_free(&result);
    layer_free(&problem);
    if (status == MOK_OK && t->error[0])
        snprintf(sentence, sizeof sentence, "%s", t->error);
    else if (status == MOK_OK)
        return true;
    snprintf(error, error_size, "%s", sentence);
    return false;
}

/* All ranks on one clock; then the pass that is wanted. A rank's events are neighbours. */
static bool align_and_select(tracing *t, char *error, size_t error_size)
{
    int32_t num = (int32_t)t->ranks;
    mok_trace_clock *clocks = calloc((size_t)t->ranks, sizeof *clocks);
    bool gpus = t->cfg.backend == MOK_BACKEND_CUDA; /* the cpu backend has one clock */
    bool ok = clocks && (!gpus || mok_trace_align(t->events, t->count, clocks, &num) == MOK_OK);
    if (!ok)
        snprintf(error, error_size, "%s", clocks ? mok_last_error() : "out of memory");
    for (int32_t i = 0; ok && i < num; i++) {
        int64_t moved = clocks[i].offset_ns < 0 ? -clocks[i].offset_ns : clocks[i].offset_ns;
        t->moved_ns = moved > t->moved_ns ? moved : t->moved_ns;
        t->accuracy_ns = clocks[i].accuracy_ns > t->accuracy_ns ? clocks[i].accuracy_ns : t->accuracy_ns;
    }
    free(clocks);
    int64_t kept = 0;
    for (int64_t first = 0, end; ok && first < t->count; first = end) {
        for (end = first; end < t->count && t->events[end].rank == t->events[first].rank; end++) {
        }
        int64_t count = select_pass(t->events + first, end - first, t->pass);
        memmove(t->events + kept, t->events + first, sizeof *t->events * (size_t)count);
        kept += count;
    }
    t->count = kept;
    return ok;
}

typedef struct figures { int64_t events; uint64_t ns, longest_ns, link_bytes; } figures;

static void print_json(const tracing *t)
{
    json_writer w;
    figures all[MOK_NUM_TRACE_KINDS];
    memset(all, 0, sizeof all);
    for (int64_t i = 0; i < t->count; i++) {
        figures *f = &all[t->events[i].kind];
        uint64_t ns = t->events[i].end_ns - t->events[i].begin_ns;
        f->events++;
        f->ns += ns;
        f->longest_ns = ns > f->longest_ns ? ns : f->longest_ns;
        f->link_bytes += t->events[i].link_bytes;
    }
    json_writer_start(&w, stdout);
    json_begin_object(&w, NULL);
    json_string(&w, "backend", shape_backend_name(t->cfg.backend));
    json_string(&w, "pass", pass_names[t->pass]);
    json_int(&w, "ranks", t->ranks);
    json_int(&w, "tokens_per_rank", t->tokens);
    json_int(&w, "events", t->count);
    json_int(&w, "events_lost", t->lost);
    json_int(&w, "clocks_moved_ns", t->moved_ns);
    json_int(&w, "clocks_accuracy_ns", t->accuracy_ns);
    json_begin_object(&w, "kinds");
    for (int k = 0; k < MOK_NUM_TRACE_KINDS; k++) {
        if (!all[k].events)
            continue;
        json_begin_object(&w, mok_trace_kind_name(k));
        json_string(&w, "group", mok_trace_kind_group(k));
        json_int(&w, "events", all[k].events);
        json_double(&w, "seconds", 1e-9 * (double)all[k].ns);
        json_double(&w, "longest_seconds", 1e-9 * (double)all[k].longest_ns);
        json_int(&w, "link_bytes", (int64_t)all[k].link_bytes);
        json_end_object(&w);
    }
    json_end_object(&w);
    json_end_object(&w);
    json_writer_finish(&w);
}

static bool save(const tracing *t, mok_trace_format format, const char *path, char *error, size_t error_size)
{
    if (!path || mok_trace_save(t->events, t->count, format, path) == MOK_OK)
        return true;
    snprintf(error, error_size, "%s", mok_last_error());
    return false;
}

static bool settle(tracing *t, const shape_options *shape, const char *backend, const char *pass, char *error, size_t size)
{
    if (!shape_backend(backend, &t->cfg.backend, error, size) || !shape_backend_usable(t->cfg.backend, error, size))
        return false;
    mok_backend_id chosen = t->cfg.backend;
    for (t->pass = 0; t->pass < NUM_PASSES && strcmp(pass, pass_names[t->pass]); t->pass++) {
    }
    if (t->pass == NUM_PASSES) {
        snprintf(error, size, "--pass is \"%s\", but must be all, schedule, forward, recompute or backward", pass);
        return false;
    }
    int64_t ring = t->cfg.ring_rows, minibatch = t->cfg.minibatch_rows;
    if (!shape_resolve(shape, &t->cfg, (char[64]){0}, NULL, error, size))
        return false;
    t->cfg.backend = chosen == MOK_BACKEND_CUDA ? MOK_BACKEND_CUDA : MOK_BACKEND_CPU;
    t->cfg.ring_rows = ring;
    t->cfg.minibatch_rows = t->cfg.minibatch_rows_bwd = minibatch;
    t->cfg.max_tokens = t->tokens;
    mok_plan plan = MOK_INIT(mok_plan);
    if (mok_plan_query(&t->cfg, (int32_t)t->ranks, 0, 0, 0, 0, &plan, NULL, NULL) == MOK_OK)
        return true;
    snprintf(error, size, "%s", mok_last_error());
    return false;
}

static int trace(tracing *t, const char *chrome, const char *svg, const char *text, bool json, char *error, size_t size)
{
    pthread_mutex_init(&t->lock, NULL);
    bool ok = record(t, error, size) && align_and_select(t, error, size) && save(t, MOK_TRACE_CHROME, chrome, error, size) && save(t, MOK_TRACE_SVG, svg, error, size) &&
              save(t, MOK_TRACE_TEXT, text, error, size);
    if (ok && json)
        print_json(t);
    else if (ok && !text)
        ok = save(t, MOK_TRACE_TEXT, "-", error, size);
    if (ok && t->moved_ns && !json)
        printf("\nclocks of ranks were moved by up to %.1f us, and now agree to about %.1f us (half of the barriers are better)\n", 1e-3 * (double)t->moved_ns,
               1e-3 * (double)t->accuracy_ns);
    if (ok && t->lost && !json)
        printf("\n%lld older events were overwritten: --events keeps more\n", (long long)t->lost);
    if (!ok)
        fprintf(stderr, "mok trace: %s\n", error);
    free(t->events);
    pthread_mutex_destroy(&t->lock);
    return ok ? 0 : 1;
}

int command_trace(int argc, char **argv)
{
    tracing t;
    shape_options shape;
    const char *backend, *pass, *chrome, *svg, *text;
    bool json;
    char error[1024];
    memset(&t, 0, sizeof t);
    t.cfg = MOK_INIT(mok_config);
    arg_option options[] = {
        SHAPE_MODEL_OPTION(&shape),
        SHAPE_OPTIONS(&shape, 1024, 512, 512, 8, 2),
        ARG_INT("ranks", "P", &t.ranks, 2, 1, 4096, "ranks, as threads of this process"),
        ARG_INT("tokens", "T", &t.tokens, 256, 1, 1 << 24, "tokens of each rank"),
        ARG_INT("threads", "N", &t.threads, 0, 1, 1024, "cpu: threads of each rank; cores / ranks if not given"),
        ARG_INT("ring", "ROWS", &t.cfg.ring_rows, 0, 0, ARG_NO_LIMIT, "rows of the ring, 0 to choose"),
        ARG_INT("minibatch", "ROWS", &t.cfg.minibatch_rows, 0, 0, ARG_NO_LIMIT, "rows of a minibatch, 0 to choose"),
        ARG_INT("repeat", "N", &t.repeat, 3, 1, 100000, "passes; the last is traced"),
        ARG_INT("events", "N", &t.events_per_lane, 0, 0, 1 << 20, "events that a lane keeps, 0 for 2048"),
        ARG_INT("seed", "N", &t.seed, 1, 0, ARG_NO_LIMIT, "of data and routing"),
        ARG_STRING("pass", "NAME", &pass, "all", "all, schedule, forward, recompute or backward"),
        ARG_STRING("chrome", "FILE", &chrome, NULL, "write JSON for ui.perfetto.dev and chrome://tracing"),
        ARG_STRING("svg", "FILE", &svg, NULL, "write a picture"),
        ARG_STRING("text", "FILE", &text, NULL, "write the summary there, not to the terminal"),
        ARG_STRING("backend", "NAME", &backend, "cpu", "cpu or cuda"),
        ARG_INT("devices", "N", &t.devices, 1, 1, 64, "cuda: GPUs that the ranks are spread over"),
        ARG_FLAG("json", &json, "print the sums as JSON"),
    };
    const size_t num_options = sizeof options / sizeof *options;
    args_result parsed = args_parse(options, num_options, argc, argv, error, sizeof error);
    int status = 0;
    if (parsed == ARGS_HELP)
        args_help(stdout, "mok trace", "Who did what when in a layer's pass: a summary, a picture, or a trace to look around in.", options, num_options);
    if (parsed == ARGS_OK) {
        shape_prefer_model(&shape, options, num_options);
        if (settle(&t, &shape, backend, pass, error, sizeof error))
            status = trace(&t, chrome, svg, text, json, error, sizeof error);
        else
            parsed = ARGS_ERROR;
    }
    if (parsed == ARGS_ERROR)
        fprintf(stderr, "mok trace: %s\n", error);
    args_free(options, num_options);
    return parsed == ARGS_ERROR ? 2 : status;
}
