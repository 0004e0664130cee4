/* mok bench: what bench.c shows, and the two measurements. */
#ifndef MOK_CLI_BENCH_H
#define MOK_CLI_BENCH_H

#include "mok.h"

typedef struct bench_settings {
    mok_config cfg;         /* shape and arithmetic */
    int32_t ranks, threads; /* threads of a rank; 0 = cores / ranks */
    int32_t devices[4096];  /* [ranks]; cuda */
    int64_t tokens, repeat; /* tokens of a rank */
    mok_save save;
    int64_t save_rows;
    bool requantise;        /* MXFP8: weights are given in bf16, so that every pass quantises them */
} bench_settings;

/* Seconds of one operation, over the repeats. */
typedef struct bench_time { double p50, p99, fastest; } bench_time;

/* One stage of an operation on rank 0's GPU. */
typedef struct bench_stage {
    const char *operation, *stage;
    double launches;        /* of one pass */
    bench_time time;        /* of one pass */
    double flops, bytes;    /* of one pass, what it cannot do without: matrix products; rows that it moves. 0: not counted */
} bench_stage;

enum { BENCH_MAX_STAGES = 48 };

typedef struct bench_breakdown {
    bench_stage stages[BENCH_MAX_STAGES];
    int32_t num_stages;
    bench_time forward;     /* all its stages */
} bench_breakdown;

/* Of one forward; rows of all ranks, bytes of the rank that has most. Counted from the schedule: what crosses from GPU to GPU, no more. */
typedef struct bench_traffic { int64_t rows, table_rows, bytes_pulled, bytes_pushed; } bench_traffic;

typedef struct bench_layer {
    bench_time schedule, forward, backward;
    bench_traffic traffic;
    bool has_breakdown;                   /* cuda: the forward as it is, and with one launch for each stage */
    bench_breakdown called, staged;
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

/* NAN: the driver does not say. */
typedef struct bench_gpu {
    char name[96], driver[32];
    double sm_clock_mhz, max_sm_clock_mhz, memory_clock_mhz, power_w; /* sm_clock: median while measuring */
    int64_t clock_samples;
} bench_gpu;

/* bench_gpu.c */
/* "NVIDIA H200, 580.1, 1755, 1980, 3201, 512.3". False if it is no such line. */
bool bench_gpu_parse(const char *line, bench_gpu *g);
typedef struct bench_gpu_watch bench_gpu_watch;
bench_gpu_watch *bench_gpu_watch_start(void);                 /* NULL: no memory */
bool bench_gpu_watch_end(bench_gpu_watch *w, bench_gpu *out); /* false: nobody knows. Frees it. */

typedef struct bench_report {
    bench_settings settings;
    char name[64];                              /* of the shape */
    char device[128], backend[480], commit[64]; /* "" = not known */
    bench_layer layer;
    bench_gemm gemm;
    bench_gpu gpu;
    struct bench_link *link;                    /* bench_link.h */
    bool has_layer, has_gemm, has_gpu, has_link;
} bench_report;

/* bench_print.c */
bool bench_print_json(const bench_report *r); /* false if stdout fails */
void bench_print_text(const bench_report *r);

/* bench_layer.c: sorts `values`; the smallest that at least a share of `p` of them does not exceed. */
double bench_percentile(double *values, int64_t count, double p);

#endif
