/* mok bench: the tables for people and the JSON for programs. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bench_link.h"
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

static void work_json(json_writer *w, double flops, double bytes, double seconds)
{
    if (flops > 0) {
        json_double(w, "flops", flops);
        json_double(w, "tflops_per_second", 1e-12 * flops / seconds);
    }
    if (bytes > 0) {
        json_double(w, "bytes", bytes);
        json_double(w, "gb_per_second", 1e-9 * bytes / seconds);
    }
}

static void breakdown_json(json_writer *w, const char *key, const bench_breakdown *b)
{
    json_begin_array(w, key);
    for (int32_t i = 0; i < b->num_stages; i++) {
        const bench_stage *s = &b->stages[i];
        json_begin_object(w, NULL);
        json_string(w, "operation", s->operation);
        json_string(w, "stage", s->stage);
        json_double(w, "launches", s->launches);
        json_double(w, "p50_ms", 1e3 * s->time.p50);
        json_double(w, "p99_ms", 1e3 * s->time.p99);
        work_json(w, s->flops, s->bytes, s->time.p50);
        json_end_object(w);
    }
    json_end_array(w);
}

static double link_bytes(const bench_layer *l) { return (double)(l->traffic.bytes_pulled + l->traffic.bytes_pushed); }
static double padding_share(const bench_layer *l) { return l->traffic.table_rows ? 1 - (double)l->traffic.rows / (double)l->traffic.table_rows : 0; }

static void gpu_layer_json(json_writer *w, const bench_layer *l)
{
    time_json(w, "forward_gpu", l->called.forward, l->forward_flops);
    json_double(w, "tflops_per_second", 1e-12 * l->forward_flops / l->called.forward.p50);
    json_double(w, "link_gb_per_second", 1e-9 * link_bytes(l) / l->called.forward.p50);
    breakdown_json(w, "stages", &l->called);
    breakdown_json(w, "staged", &l->staged);
}

static void traffic_json(json_writer *w, const bench_layer *l)
{
    json_int(w, "rows", l->traffic.rows);
    json_int(w, "table_rows", l->traffic.table_rows);
    json_double(w, "padding_share", padding_share(l));
    json_int(w, "bytes_pulled", l->traffic.bytes_pulled);
    json_int(w, "bytes_pushed", l->traffic.bytes_pushed);
}

static void gpu_json(json_writer *w, const bench_gpu *g)
{
    json_begin_object(w, "gpu");
    json_string(w, "name", g->name);
    json_string(w, "driver", g->driver);
    json_double(w, "sm_clock_mhz", g->sm_clock_mhz);
    json_int(w, "sm_clock_samples", g->clock_samples);
    json_double(w, "max_sm_clock_mhz", g->max_sm_clock_mhz);
    json_double(w, "memory_clock_mhz", g->memory_clock_mhz);
    json_double(w, "power_w", g->power_w);
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
    json_string(&w, "backend", shape_backend_name(s->cfg.backend));
    json_string(&w, "backend_detail", r->backend);
    if (r->has_gpu)
        gpu_json(&w, &r->gpu);
    else
        json_null(&w, "gpu");
    json_string(&w, "version", mok_version());
    json_string(&w, "commit", *r->commit ? r->commit : NULL);
    if (!r->has_link)
        shape_json(&w, "shape", r->name, &s->cfg);
    json_int(&w, "ranks", s->ranks);
    json_int(&w, "tokens", r->has_link ? r->link->settings.tokens : s->tokens);
    if (s->cfg.backend == MOK_BACKEND_CUDA) {
        json_begin_array(&w, "devices");
        for (int32_t i = 0; i < s->ranks; i++)
            json_int(&w, NULL, s->devices[i]);
        json_end_array(&w);
    }
    json_int(&w, "repeat", s->repeat);
    json_bool(&w, "requantise", s->requantise);
    if (r->has_layer) {
        json_begin_object(&w, "layer");
        json_int(&w, "threads_per_rank", r->layer.config.cpu_threads);
        json_int(&w, "ring_rows", r->layer.config.ring_rows);
        time_json(&w, "schedule", r->layer.schedule, 0);
        time_json(&w, "forward", r->layer.forward, r->layer.forward_flops);
        time_json(&w, "backward", r->layer.backward, r->layer.backward_flops);
        traffic_json(&w, &r->layer);
        if (r->layer.has_breakdown)
            gpu_layer_json(&w, &r->layer);
        json_end_object(&w);
    }
    if (r->has_gemm)
        gemm_json(&w, &r->gemm);
    if (r->has_link)
        bench_link_json(&w, r->link);
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

/* Seconds of an operation: of all its stages. */
static double whole(const bench_breakdown *b, const char *operation)
{
    double sum = 0;
    for (int32_t i = 0; i < b->num_stages; i++)
        sum += strcmp(b->stages[i].operation, operation) ? 0 : b->stages[i].time.p50;
    return sum;
}

static void print_breakdown(const bench_breakdown *b)
{
    term_table t;
    term_table_start(&t, "llrrrrrr", (const char *[]){"operation", "stage", "launches", "p50", "p99", "share", "work", "rate"});
    for (int32_t i = 0; i < b->num_stages; i++) {
        const bench_stage *s = &b->stages[i];
        double work = s->flops > 0 ? s->flops : s->bytes;
        const char *unit = s->flops > 0 ? "FLOP" : "B", *rate = s->flops > 0 ? "FLOP/s" : "B/s";
        term_table_cell(&t, "%s", s->operation);
        term_table_cell(&t, "%s", s->stage);
        term_table_cell(&t, "%.4g", s->launches);
        term_table_cell(&t, "%s", term_seconds(s->time.p50).text);
        term_table_cell(&t, "%s", term_seconds(s->time.p99).text);
        term_table_cell(&t, "%.1f %%", 100 * s->time.p50 / whole(b, s->operation));
        term_table_cell(&t, "%s", work > 0 ? term_si(work, unit).text : "");
        term_table_cell(&t, "%s", work > 0 ? term_si(work / s->time.p50, rate).text : "");
    }
    term_table_print(&t, stdout);
}

static void print_gpu_layer(const bench_layer *l)
{
    printf("\nOn the GPU of rank 0 a forward takes %s (p50; p99 %s), which is %s for all ranks. By launch, as shares of the operation:\n\n", term_seconds(l->called.forward.p50).text,
           term_seconds(l->called.forward.p99).text, term_si(l->forward_flops / l->called.forward.p50, "FLOP/s").text);
    print_breakdown(&l->called);
    printf("\nWith one launch for each stage and minibatch (MOK_FORWARD=staged, MOK_BACKWARD=staged), where nothing overlaps, a forward takes %s:\n\n", term_seconds(l->staged.forward.p50).text);
    print_breakdown(&l->staged);
    printf("\nThe busiest rank pulls %s and pushes %s in a forward, from rank to rank: %s, both together.\n", term_si((double)l->traffic.bytes_pulled, "B").text,
           term_si((double)l->traffic.bytes_pushed, "B").text, term_si(link_bytes(l) / l->called.forward.p50, "B/s").text);
}

static bool share_gpu(const bench_settings *s) { return s->ranks > 1 && s->devices[0] == s->devices[1]; }

static void print_layer(const bench_report *r)
{
    const bench_layer *l = &r->layer;
    term_table t;
    printf("\nlayer: %d rank%s, %s tokens", r->settings.ranks, r->settings.ranks == 1 ? "" : "s", term_count(r->settings.tokens).text);
    if (!l->has_breakdown)
        printf(" and %d thread%s", l->config.cpu_threads, l->config.cpu_threads == 1 ? "" : "s");
    printf(" each%s, median of %s passes\n\n", l->has_breakdown && r->settings.ranks > 1 && share_gpu(&r->settings) ? ", on one GPU" : "", term_count(r->settings.repeat).text);
    term_table_start(&t, "lrrrrr", (const char *[]){"pass", "p50", "p99", "fastest", "work", "rate"});
    time_row(&t, "schedule", l->schedule, 0);
    time_row(&t, "forward", l->forward, l->forward_flops);
    time_row(&t, "backward", l->backward, l->backward_flops);
    term_table_print(&t, stdout);
    /* Of the fastest, because a schedule's time includes waiting for ranks that are still in the pass before. */
    printf("\nThe fastest schedule takes %.3g %% of the fastest forward's time.\n", 100 * l->schedule.fastest / l->forward.fastest);
    printf("%s of %s rows in tiles are padding (%.1f %%).\n", term_count(l->traffic.table_rows - l->traffic.rows).text, term_count(l->traffic.table_rows).text, 100 * padding_share(l));
    if (l->has_breakdown)
        print_gpu_layer(l);
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
    printf("%s, %ld cores; backend %s (%s)", r->device, sysconf(_SC_NPROCESSORS_ONLN), shape_backend_name(r->settings.cfg.backend), r->backend);
    printf(*r->commit ? "; commit %s\n" : "\n", r->commit);
    if (r->has_gpu)
        printf("%s, driver %s; SM clock %.0f MHz (median of %lld while measuring), at most %.0f; memory %.0f MHz; %.0f W\n", r->gpu.name, r->gpu.driver, r->gpu.sm_clock_mhz,
               (long long)r->gpu.clock_samples, r->gpu.max_sm_clock_mhz, r->gpu.memory_clock_mhz, r->gpu.power_w);
    if (!r->has_link)
        printf("%s: %s\n", r->name, shape_describe(&r->settings.cfg, shape));
    if (r->has_layer)
        print_layer(r);
    if (r->has_gemm)
        print_gemm(&r->gemm);
    if (r->has_link)
        bench_link_text(r->link);
}
