/* mok bench: the tables for people and the JSON for programs. */
#include <stdio.h>
#include <unistd.h>

#include "bench.h"
#include "json.h"
#include "shape.h"
#include "term.h"

/* ----------------------------------------------------------------------------------------------------------- JSON -- */

static void time_json(json_writer *w, const char *key, bench_time t, double flops)
{
    json_begin_object(w, key);
    json_double(w, "p50_ms", 1e3 * t.p50);
    json_double(w, "p99_ms", 1e3 * t.p99);
    json_double(w, "fastest_ms", 1e3 * t.fastest);
    if (flops > 0) {
        json_double(w, "flops", flops);
        json_double(w, "gflops_per_second", 1e-9 * flops / t.p50);
    }
    json_end_object(w);
}

static void gemm_json(json_writer *w, const bench_gemm *g)
{
    json_begin_object(w, "gemm");
    json_int(w, "threads", 1);
    json_string(w, "openblas", g->has_openblas ? g->openblas : NULL);
    json_string(w, "openblas_missing", g->has_openblas ? NULL : g->openblas);
    json_begin_array(w, "shapes");
    for (int i = 0; i < BENCH_GEMM_SHAPES; i++) {
        const bench_gemm_shape *s = &g->shapes[i];
        json_begin_object(w, NULL);
        json_string(w, "what", s->what);
        json_int(w, "m", s->m);
        json_int(w, "n", s->n);
        json_int(w, "k", s->k);
        json_double(w, "gflops_per_second", s->gflops);
        json_double(w, "openblas_gflops_per_second", s->openblas_gflops);
        json_double(w, "ratio", s->ratio);
        json_begin_array(w, "ratios");
        for (int j = 0; j < BENCH_GEMM_PAIRS && g->has_openblas; j++)
            json_double(w, NULL, s->ratios[j]);
        json_end_array(w);
        json_end_object(w);
    }
    json_end_array(w);
    json_double(w, "ratio", g->ratio);
    json_end_object(w);
}

bool bench_print_json(const bench_report *r)
{
    const bench_settings *s = &r->settings;
    json_writer w;
    json_writer_start(&w, stdout);
    json_begin_object(&w, NULL);
    json_string(&w, "device", r->device);
    json_int(&w, "cores", sysconf(_SC_NPROCESSORS_ONLN));
    json_string(&w, "backend", "cpu");
    json_string(&w, "backend_detail", r->backend);
    json_string(&w, "version", mok_version());
    json_string(&w, "commit", *r->commit ? r->commit : NULL);
    shape_json(&w, "shape", r->name, &s->cfg);
    json_int(&w, "ranks", s->ranks);
    json_int(&w, "tokens", s->tokens);
    json_int(&w, "repeat", s->repeat);
    json_bool(&w, "requantise", s->requantise);
    if (r->has_layer) {
        json_begin_object(&w, "layer");
        json_int(&w, "threads_per_rank", r->layer.config.cpu_threads);
        json_int(&w, "ring_rows", r->layer.config.ring_rows);
        time_json(&w, "schedule", r->layer.schedule, 0);
        time_json(&w, "forward", r->layer.forward, r->layer.forward_flops);
        if (s->cfg.backend != MOK_BACKEND_CUDA)
            time_json(&w, "backward", r->layer.backward, r->layer.backward_flops);
        json_end_object(&w);
    }
    if (r->has_gemm)
        gemm_json(&w, &r->gemm);
    json_int(&w, "skipped", r->has_gemm && !r->gemm.has_openblas);
    json_end_object(&w);
    return json_writer_finish(&w);
}

/* ----------------------------------------------------------------------------------------------------------- text -- */

static void time_row(term_table *t, const char *name, bench_time time, double flops)
{
    term_table_cell(t, "%s", name);
    term_table_cell(t, "%s", term_seconds(time.p50).text);
    term_table_cell(t, "%s", term_seconds(time.p99).text);
    term_table_cell(t, "%s", term_seconds(time.fastest).text);
    term_table_cell(t, "%s", flops > 0 ? term_si(flops, "FLOP").text : "");
    term_table_cell(t, "%s", flops > 0 ? term_si(flops / time.p50, "FLOP/s").text : "");
}

static void print_layer(const bench_report *r)
{
    const bench_layer *l = &r->layer;
    term_table t;
    printf("\nlayer: %d rank%s, %s tokens and %d thread%s each, median of %s passes\n\n", r->settings.ranks, r->settings.ranks == 1 ? "" : "s",
           term_count(r->settings.tokens).text, l->config.cpu_threads, l->config.cpu_threads == 1 ? "" : "s", term_count(r->settings.repeat).text);
    term_table_start(&t, "lrrrrr", (const char *[]){"pass", "p50", "p99", "fastest", "work", "rate"});
    time_row(&t, "schedule", l->schedule, 0);
    time_row(&t, "forward", l->forward, l->forward_flops);
    if (r->settings.cfg.backend != MOK_BACKEND_CUDA)
        time_row(&t, "backward", l->backward, l->backward_flops);
    term_table_print(&t, stdout);
    /* Of the fastest, because a schedule's time includes waiting for ranks that are still in the pass before. */
    printf("\nThe fastest schedule takes %.2g %% of the fastest forward's time.\n", 100 * l->schedule.fastest / l->forward.fastest);
}

static void print_gemm(const bench_gemm *g)
{
    term_table t;
    printf("\nGEMM: one thread, bf16 in and fp32 out, beside OpenBLAS sgemm; %d pairs, taking turns\n\n", BENCH_GEMM_PAIRS);
    term_table_start(&t, "llrrr", (const char *[]){"product", "M x N x K", "mok", "OpenBLAS", "ratio"});
    for (int i = 0; i < BENCH_GEMM_SHAPES; i++) {
        const bench_gemm_shape *s = &g->shapes[i];
        term_table_cell(&t, "%s", s->what);
        term_table_cell(&t, "%lld x %lld x %lld", (long long)s->m, (long long)s->n, (long long)s->k);
        term_table_cell(&t, "%s", term_si(1e9 * s->gflops, "FLOP/s").text);
        term_table_cell(&t, "%s", g->has_openblas ? term_si(1e9 * s->openblas_gflops, "FLOP/s").text : "missing");
        term_table_cell(&t, g->has_openblas ? "%.2f" : "-", s->ratio);
    }
    term_table_print(&t, stdout);
    if (g->has_openblas)
        printf("\n%.2f of OpenBLAS's rate (median of all pairs; %s)\n", g->ratio, g->openblas);
    else
        printf("\n%s; comparison skipped\n1 skipped\n", g->openblas);
}

void bench_print_text(const bench_report *r)
{
    char shape[192];
    printf("%s, %ld cores; backend cpu (%s)", r->device, sysconf(_SC_NPROCESSORS_ONLN), r->backend);
    printf(*r->commit ? "; commit %s\n" : "\n", r->commit);
    printf("%s: %s\n", r->name, shape_describe(&r->settings.cfg, shape));
    if (r->has_layer)
        print_layer(r);
    if (r->has_gemm)
        print_gemm(&r->gemm);
}
