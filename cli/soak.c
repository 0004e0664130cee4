/* mok soak: as many random, checked steps as one has time for. */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "json.h"
#include "layer.h"
#include "shape.h"
#include "soak.h"
#include "term.h"

typedef struct soak_settings {
    mok_backend_id backend;
    mok_dtype dtype; /* MOK_DTYPE_AUTO: each step's own */
    int64_t steps, first, seconds, seed, faults, processes;
} soak_settings;

/* Steps are numbered, and a step's number and the seed decide all of it, so that any one can be repeated alone. */
static uint64_t seed_of(const soak_settings *s, int64_t step)
{
    uint64_t state = (uint64_t)s->seed * 0x9e3779b97f4a7c15ull + (uint64_t)step;
    return layer_random(&state);
}

/* Thousands of small steps, each with memory of its own: what is kept does not have to be mapped and zeroed anew for each, half of a step's time. */
static void keep_freed_memory(void)
{
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    mallopt(M_ARENA_MAX, 1);
}

/* False: the step that failed is in *step. */
static bool run(const soak_settings *s, soak_counts *counts, int64_t *step, char *error, size_t size)
{
    term_progress progress;
    double start = term_now();
    bool ok = true;
    keep_freed_memory();
    term_progress_start(&progress, "soaking", "step", 0, s->steps);
    for (*step = s->first; ok && *step < s->first + s->steps && (!s->seconds || term_now() - start < (double)s->seconds); ++*step) {
        uint64_t seed = seed_of(s, *step);
        ok = soak_step(seed, s->backend, s->dtype, counts, error, size);
        if (ok && s->faults && *step % s->faults == s->faults - 1) {
            ok = soak_fault(seed, s->backend, error, size);
            counts->faults += ok;
        }
        if (ok && s->processes && *step % s->processes == s->processes - 1) {
            ok = soak_processes(seed, counts, error, size);
            counts->processes += ok;
        }
        term_progress_update(&progress, *step - s->first + 1);
        if (!ok)
            break;
    }
    term_progress_clear(&progress);
    return ok;
}

static void print_json(const soak_settings *s, const soak_counts *c, bool ok, int64_t step, double seconds, const char *error)
{
    json_writer w;
    json_writer_start(&w, stdout);
    json_begin_object(&w, NULL);
    json_string(&w, "backend", shape_backend_name(s->backend));
    json_int(&w, "seed", s->seed);
    json_bool(&w, "passed", ok);
    json_int(&w, "steps", c->steps);
    json_int(&w, "faults", c->faults);
    json_int(&w, "processes_ended", c->processes);
    json_int(&w, "rows", c->rows);
    json_int(&w, "ring_rotations", c->ring_rotations);
    json_int(&w, "rows_replayed", c->rows_replayed);
    json_int(&w, "wgrad_continued", c->wgrad_continued);
    json_double(&w, "seconds", seconds);
    if (!ok) {
        json_int(&w, "failed_step", step);
        json_string(&w, "error", error);
    }
    json_end_object(&w);
    json_writer_finish(&w);
}

static int soak(const soak_settings *s, bool json)
{
    soak_counts counts = {0};
    int64_t step;
    char error[1024] = "";
    double start = term_now();
    bool ok = run(s, &counts, &step, error, sizeof error);
    double seconds = term_now() - start;
    if (json)
        print_json(s, &counts, ok, step, seconds, error);
    else
        printf("%lld steps in %s, each with the bits of its repetition and of one rank; %lld faults, each told to all ranks\n"
               "%lld processes killed or stopped, and the others went on without them\n%s rows, %s turns of rings, %s rows replayed, %s weight gradients continued\n", (long long)counts.steps, term_seconds(seconds).text,
               (long long)counts.faults, (long long)counts.processes, term_count(counts.rows).text, term_count(counts.ring_rotations).text, term_count(counts.rows_replayed).text,
               term_count(counts.wgrad_continued).text);
    if (!ok)
        fprintf(stderr, "mok soak: step %lld: %s\n  repeat: mok soak --backend %s --dtype %s --seed %lld --first %lld --steps 1 --faults %d --processes %d\n", (long long)step, error,
                shape_backend_name(s->backend), s->dtype ? shape_dtype_name(s->dtype) : "mixed", (long long)s->seed, (long long)step, s->faults != 0, s->processes != 0);
    return ok ? 0 : 1;
}

int command_soak(int argc, char **argv)
{
    soak_settings s;
    const char *backend, *dtype;
    bool json;
    char error[1024];
    memset(&s, 0, sizeof s);
    arg_option options[] = {
        ARG_INT("steps", "N", &s.steps, 1000, 1, ARG_NO_LIMIT, "steps, at most"),
        ARG_INT("seconds", "S", &s.seconds, 0, 0, ARG_NO_LIMIT, "time, at most; 0 for no limit"),
        ARG_INT("seed", "N", &s.seed, 1, 0, ARG_NO_LIMIT, "of everything"),
        ARG_INT("first", "N", &s.first, 0, 0, ARG_NO_LIMIT, "number of the first step: to repeat one"),
        ARG_INT("faults", "N", &s.faults, 10, 0, ARG_NO_LIMIT, "a fault on one of several ranks after every N-th step, 0 for none"),
        ARG_INT("processes", "N", &s.processes, 200, 0, ARG_NO_LIMIT, "after every N-th step, cpu ranks as processes, one of which ends; 0 for never"),
        ARG_STRING("backend", "NAME", &backend, "cpu", "cpu, or cuda: ranks share the first GPU"),
        ARG_STRING("dtype", "NAME", &dtype, "mixed", "bf16, mxfp8, or mixed: a quarter of the steps in mxfp8 (cuda: none)"),
        ARG_FLAG("json", &json, "print JSON"),
    };
    const size_t num_options = sizeof options / sizeof *options;
    args_result parsed = args_parse(options, num_options, argc, argv, error, sizeof error);
    int status = 0;
    if (parsed == ARGS_HELP)
        args_help(stdout, "mok soak", "Steps on random layers, every one checked, with faults in between.", options, num_options);
    if (parsed == ARGS_OK) {
        bool mixed = !strcmp(dtype, "mixed");
        if (shape_backend(backend, &s.backend, error, sizeof error) && (mixed || shape_dtype(dtype, &s.dtype, error, sizeof error)) && shape_backend_usable(s.backend, error, sizeof error)) {
            s.backend = s.backend == MOK_BACKEND_CUDA ? MOK_BACKEND_CUDA : MOK_BACKEND_CPU;
            status = soak(&s, json);
        } else {
            parsed = ARGS_ERROR;
        }
    }
    if (parsed == ARGS_ERROR)
        fprintf(stderr, "mok soak: %s\n", error);
    args_free(options, num_options);
    return parsed == ARGS_ERROR ? 2 : status;
}
