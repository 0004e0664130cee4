/* mok bench --only link: what is measured, and the numbers. */
#ifndef MOK_CLI_BENCH_LINK_H
#define MOK_CLI_BENCH_LINK_H

#include "bench.h"
#include "json.h"

enum { BENCH_LINK_MAX_ROWS = 16, BENCH_LINK_ROUTINGS = 3, BENCH_LINK_MAX_RANKS = 64 };

/* X(name, bits of mok_link_work, ceiling). pull_mx: tokens as wide, in MXFP8; its "ceiling" is what bf16 takes. Measured in this order, round after round. */
#define BENCH_LINK_WORKS(X)                                                                               \
    X(plain_pull, MOK_LINK_PLAIN | MOK_LINK_PULL, -1)                                                     \
    X(pull, MOK_LINK_PULL, BENCH_LINK_plain_pull)                                                         \
    X(plain_push, MOK_LINK_PLAIN | MOK_LINK_PUSH, -1)                                                     \
    X(push, MOK_LINK_PUSH, BENCH_LINK_plain_push)                                                         \
    X(plain_both, MOK_LINK_PLAIN | MOK_LINK_PULL | MOK_LINK_PUSH, -1)                                     \
    X(both, MOK_LINK_PULL | MOK_LINK_PUSH, BENCH_LINK_plain_both)                                         \
    X(pull_told, MOK_LINK_PLAIN | MOK_LINK_PULL | MOK_LINK_SIGNAL, BENCH_LINK_plain_pull)                 \
    X(push_told, MOK_LINK_PLAIN | MOK_LINK_PUSH | MOK_LINK_SIGNAL, BENCH_LINK_plain_push)                 \
    X(pull_news, MOK_LINK_PLAIN | MOK_LINK_PULL | MOK_LINK_SIGNAL | MOK_LINK_EMPTY, -1)                   \
    X(push_news, MOK_LINK_PLAIN | MOK_LINK_PUSH | MOK_LINK_SIGNAL | MOK_LINK_EMPTY, -1)                   \
    X(pull_mx, MOK_LINK_PULL | MOK_LINK_MX, BENCH_LINK_pull)
enum {
#define BENCH_LINK_ENUM(name, bits, ceiling) BENCH_LINK_##name,
    BENCH_LINK_WORKS(BENCH_LINK_ENUM)
#undef BENCH_LINK_ENUM
    BENCH_LINK_NUM_WORKS
};

typedef struct bench_link_settings {
    int32_t ranks, blocks;                     /* blocks: CTAs of a rank; 0: one on each SM */
    int32_t devices[BENCH_LINK_MAX_RANKS];
    bool processes;                            /* ranks are processes; else threads of this one */
    int64_t tokens, repeat;                    /* rows that a rank sends or keeps; rounds */
    int64_t row_bytes[BENCH_LINK_MAX_ROWS];    /* multiples of 128 */
    int32_t num_rows;
} bench_link_settings;

/* Seconds of a round: of the rank that takes longest. */
typedef struct bench_link_time {
    double p50, p99;
    double bytes;       /* that cross into, or out of, the busiest rank, whichever is more; of a rank alone: that it copies */
    double share;       /* median over the rounds of (ceiling's seconds / these); NAN: has no ceiling */
} bench_link_time;

typedef struct bench_link_case {
    const char *routing, *row_of; /* row_of: whose rows are so long, or "" */
    int64_t row_bytes;
    int64_t rows, rows_both;      /* that cross into or out of the busiest rank, whichever is more; in and out of a rank together */
    bench_link_time times[BENCH_LINK_NUM_WORKS];
} bench_link_case;

typedef struct bench_link {
    bench_link_settings settings;
    bench_link_case cases[BENCH_LINK_ROUTINGS * BENCH_LINK_MAX_ROWS];
    int32_t num_cases;
    bool one_gpu;                 /* virtual ranks, or a single one: nothing crosses a link */
} bench_link;

/* bench_link.c. Ranks that are processes are forked in `start`: before this process has touched CUDA, and before it has threads. NULL and one sentence on
 * failure. `finish` waits for the ranks and frees; false and one sentence on failure, wrong data included. */
typedef struct bench_link_run bench_link_run;
bench_link_run *bench_link_start(const bench_link_settings *s, char *error, size_t error_size);
bool bench_link_finish(bench_link_run *run, bench_link *out, char *error, size_t error_size);

/* bench_link_print.c */
void bench_link_json(json_writer *w, const bench_link *l);
void bench_link_text(const bench_link *l);

#endif
