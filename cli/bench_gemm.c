/* mok bench: the cpu backend's matrix product beside OpenBLAS, taking turns, as only that is fair on a shared machine. */
#define MOK_EXPERIMENTAL
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"
#include "layer.h"
#include "openblas.h"
#include "term.h"

static const double slice = 0.06; /* seconds of one measurement */

static uint16_t *numbers(int64_t count)
{
    uint16_t *x = malloc((size_t)count * sizeof *x);
    for (int64_t i = 0; x && i < count; i++)
        x[i] = layer_bf16((float)(i % 251) / 251.0f - 0.5f);
    return x;
}

/* As openblas_sgemm_gflops: the fastest of the calls that fit into the slice, at least three. */
static double gflops(const bench_gemm_shape *s, const uint16_t *a, const uint16_t *b, float *c)
{
    double best = INFINITY, start = term_now();
    for (int call = 0; call < 3 || term_now() - start < slice; call++) {
        double before = term_now();
        if (mok_cpu_gemm(s->m, s->n, s->k, a, b, c) != MOK_OK)
            return NAN;
        best = fmin(best, term_now() - before);
    }
    return 2e-9 * (double)s->m * (double)s->n * (double)s->k / best;
}

/* all_ratios: where this shape's go as well. */
static bool measure(bench_gemm_shape *s, bool openblas, double *all_ratios)
{
    double ours[BENCH_GEMM_PAIRS], theirs[BENCH_GEMM_PAIRS], sorted[BENCH_GEMM_PAIRS];
    uint16_t *a = numbers(s->m * s->k), *b = numbers(s->n * s->k);
    float *c = malloc((size_t)(s->m * s->n) * sizeof *c);
    bool ok = a && b && c;
    for (int i = 0; i < BENCH_GEMM_PAIRS && ok; i++) {
        for (int turn = 0; turn < 2; turn++)
            if (turn == i % 2)
                ours[i] = gflops(s, a, b, c);
            else
                theirs[i] = openblas ? openblas_sgemm_gflops(s->m, s->n, s->k, slice) : NAN;
        s->ratios[i] = sorted[i] = all_ratios[i] = ours[i] / theirs[i];
        ok = !isnan(ours[i]) && (!openblas || !isnan(theirs[i]));
    }
    if (ok) {
        s->gflops = bench_percentile(ours, BENCH_GEMM_PAIRS, 0.5);
        s->openblas_gflops = openblas ? bench_percentile(theirs, BENCH_GEMM_PAIRS, 0.5) : NAN;
        s->ratio = openblas ? bench_percentile(sorted, BENCH_GEMM_PAIRS, 0.5) : NAN;
    }
    free(a);
    free(b);
    free(c);
    return ok;
}

static int64_t at_most(int64_t value, int64_t limit) { return value < limit ? value : limit; }

bool bench_run_gemm(const mok_config *cfg, bench_gemm *out, char *error, size_t error_size)
{
    double ratios[BENCH_GEMM_SHAPES * BENCH_GEMM_PAIRS];
    term_progress progress;
    bool ok = true;
    out->shapes[0] = (bench_gemm_shape){.what = "gate or up, one task of the layer", .m = 128, .n = at_most(cfg->intermediate, 512), .k = cfg->hidden};
    out->shapes[1] = (bench_gemm_shape){.what = "down, one task of the layer", .m = 128, .n = at_most(cfg->hidden, 512), .k = cfg->intermediate};
    out->shapes[2] = (bench_gemm_shape){.what = "large and square", .m = 1024, .n = 1024, .k = 1024};
    out->has_openblas = openblas_open(out->openblas, sizeof out->openblas);
    if (out->has_openblas)
        snprintf(out->openblas, sizeof out->openblas, "%s", openblas_name());
    term_progress_start(&progress, "measuring", "GEMM", 0, BENCH_GEMM_SHAPES);
    for (int i = 0; i < BENCH_GEMM_SHAPES && ok; i++) {
        ok = measure(&out->shapes[i], out->has_openblas, ratios + i * BENCH_GEMM_PAIRS);
        term_progress_update(&progress, i + 1);
    }
    term_progress_clear(&progress);
    if (!ok)
        snprintf(error, error_size, "out of memory for the GEMM");
    out->ratio = ok && out->has_openblas ? bench_percentile(ratios, BENCH_GEMM_SHAPES * BENCH_GEMM_PAIRS, 0.5) : NAN;
    return ok;
}
