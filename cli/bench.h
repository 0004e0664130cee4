/* mok bench: what bench.c shows, and the two measurements. */
#ifndef MOK_CLI_BENCH_H
#define MOK_CLI_BENCH_H

#include "mok.h"

typedef struct bench_settings {
    mok_config cfg;         /* shape and arithmetic */
    int32_t ranks, threads; /* threads of a rank; 0 = cores / ranks */
    int64_t tokens, repeat; /* tokens of a rank */
    mok_save save;
    int64_t save_rows;
    bool requantise;        /* MXFP8: weights are given in bf16, so that every pass quantises them */
} bench_settings;

/* Seconds of one operation, over the repeats. */
typedef struct bench_time { double p50, p99, fastest; } bench_time;

typedef struct bench_layer {
    bench_time schedule, forward, backward;
    double forward_flops, backward_flops; /* of all ranks: what the maths needs, replayed rows and padding not counted */
    mok_config config;                    /* as resolved */
} bench_layer;

/* bench_layer.c: one warm-up, then `repeat` passes in one workspace. False and one sentence on failure. */
bool bench_run_layer(const bench_settings *s, bench_layer *out, char *error, size_t error_size);

enum { BENCH_GEMM_SHAPES = 3, BENCH_GEMM_PAIRS = 9 };

/* One shape of the GEMM, in one thread: pairs of measurements, the two libraries taking turns. */
typedef struct bench_gemm_shape {
    const char *what;
    int64_t m, n, k;
    double gflops, openblas_gflops, ratio;  /* medians; ratio: of the ratios within the pairs; NAN without OpenBLAS */
    double ratios[BENCH_GEMM_PAIRS];
} bench_gemm_shape;

typedef struct bench_gemm {
    bench_gemm_shape shapes[BENCH_GEMM_SHAPES];
    bool has_openblas;
    char openblas[512];                     /* its name, or why it is missing */
    double ratio;                           /* median over all pairs of all shapes */
} bench_gemm;

/* bench_gemm.c. False and one sentence on failure; a missing OpenBLAS is none. */
bool bench_run_gemm(const mok_config *cfg, bench_gemm *out, char *error, size_t error_size);

typedef struct bench_report {
    bench_settings settings;
    char name[64];                              /* of the shape */
    char device[128], backend[480], commit[64]; /* "" = not known */
    bench_layer layer;
    bench_gemm gemm;
    bool has_layer, has_gemm;
} bench_report;

/* bench_print.c */
bool bench_print_json(const bench_report *r); /* false if stdout fails */
void bench_print_text(const bench_report *r);

/* bench_layer.c: sorts `values`; the smallest that at least a share of `p` of them does not exceed. */
double bench_percentile(double *values, int64_t count, double p);

#endif
