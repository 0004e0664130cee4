/* A discrete-event simulation of one layer pass over P ranks. It walks the real row tables, task walk, counters and ring of src/layout/; a
 * machine profile gives every task and every row its time.
 *
 * What is simulated, and by whom:
 *   cluster   takes tickets in order, waits for the counters that mk_task_need names, computes, raises its counter
 *   mover     a dispatch warp of every SM, or of communication SMs: takes batches of 32 rows, waits for the ring's slot
 *             (mk_dispatch_need) and for rows to copy from, moves them
 *   link      of every GPU, one server per direction behind a switch that does not block; HBM: one server per GPU
 * The strategies that run kernel after kernel (NCCL, DeepEP) are added up from the same tables in phases.c. */
#ifndef MK_SIM_SIM_H
#define MK_SIM_SIM_H

#include <stdbool.h>
#include <stdint.h>

#include "layout/walk.h"
#include "sim/profile.h"
#include "sim/tables.h"

/* X(name, push_dispatch, pull_combine, serial, phases, what it is) */
#define SIM_STRATEGY_LIST(X)                                                                                            \
    X(mok, 0, 0, 0, 0, "ours: rows are pulled, results pushed")                                                         \
    X(push_dispatch, 1, 0, 0, 0, "rows are pushed, with a signal per row; results pushed")                              \
    X(pull_combine, 0, 1, 0, 0, "rows are pulled; results pulled after the barrier, by the weighted sum")               \
    X(reversed, 1, 1, 0, 0, "rows pushed, results pulled: ours the other way round")                                    \
    X(macrobatch, 0, 0, 1, 0, "as ours, but a ring's worth of rows at a time, one after the other (as published)")      \
    X(nccl, 0, 0, 0, 1, "NCCL all-to-all, the CPU reading counts, separate GEMMs")                                      \
    X(deepep, 0, 0, 0, 2, "DeepEP-like: a token goes once to each rank and comes back summed; separate GEMMs")

typedef enum sim_strategy_id {
#define SIM_STRATEGY_ENUM(name, pd, pc, s, ph, text) SIM_STRATEGY_##name,
    SIM_STRATEGY_LIST(SIM_STRATEGY_ENUM)
#undef SIM_STRATEGY_ENUM
    SIM_NUM_STRATEGIES
} sim_strategy_id;

typedef struct sim_strategy {
    const char *name;
    int push_dispatch, pull_combine, serial, phases;
    const char *text;
} sim_strategy;
extern const sim_strategy sim_strategies[SIM_NUM_STRATEGIES];

typedef struct sim_case {
    sim_profile profile;
    mk_dims dims;              /* of rank 0 (sim_dims) */
    int64_t tokens;            /* T of every rank */
    mk_pass pass;              /* forward or backward */
    sim_strategy_id strategy;
    bool mxfp8, sustained;
    bool no_signals;           /* push dispatch: as if telling a peer cost nothing */
    int64_t copy_distance;     /* as in sim_tables_make */
    bool free_link;            /* as if moving rows between GPUs cost nothing: what is left is not communication */
    int32_t comm_sms;          /* 0: a dispatch warp in every SM */
    const int32_t *ids;        /* [P * T, K], -1 = dropped */
    int32_t trace_rank;        /* whose tasks go to `trace`; -1: nobody's */
    void (*trace)(void *user, int32_t rank, int32_t lane, const char *name, double start, double end); /* NULL: none */
    void *user;
} sim_case;

/* A quantity over time: `count` bins of `width` seconds. */
enum { SIM_BINS = 128 };
typedef struct sim_series {
    double width;
    double sum[SIM_BINS];      /* quantity x seconds, or bytes */
} sim_series;

/* Where the time of the clusters went, in shares of the kernel; adds up to 1. */
typedef struct sim_shares {
    double compute, copies, memory, rows, tasks, epilogue, tail;
} sim_shares;

typedef struct sim_result {
    double seconds;            /* the pass, from the first launch to the end of the weighted sum, slowest rank */
    double schedule_seconds;   /* of mok_schedule, not part of `seconds` */
    double before, kernel, after;            /* parts of `seconds`: to the first barrier, the fused kernel, second barrier and sum */
    double stage_first[MK_NUM_TASK_KINDS], stage_last[MK_NUM_TASK_KINDS]; /* since the kernel's start, over all ranks; last < first: none */
    double stage_busy[MK_NUM_TASK_KINDS];    /* seconds a cluster (dispatch: a mover) spent in it, mean over clusters of all ranks */
    sim_shares shares;
    sim_series link_out, link_in;            /* bytes, all ranks together */
    sim_series ring;                         /* tiles in the ring x seconds, all ranks together */
    double link_bytes_mean, link_bytes_max;  /* of the busier direction of a rank */
    double link_use;                         /* of the busiest rank's busier direction, while the kernel ran */
    double rows_mean, rows_max, kernel_mean; /* per rank */
    double signal_seconds;                   /* of all signals of rows, per mover */
    double flops;                            /* of all ranks, padding not counted */
    int64_t tasks, events, rows_pulled, rows_pulled_peer, rows_copied, padding_rows, ring_rotations;
} sim_result;

/* The event loop, for strategies that are not sums of phases. Deterministic. False: out of memory, or one sentence in `error` (a walk that
 * does not come to its end). */
bool sim_run(const sim_case *c, const sim_tables *tables, sim_result *out, char *error, size_t error_size);
/* The row tables as the case's strategy uses them. Freed by the caller. False and one sentence. */
bool sim_make_tables(const sim_case *c, sim_tables *tables, char *error, size_t error_size);
/* Runs on tables of sim_make_tables, whichever way the strategy is simulated. */
bool sim_on_tables(const sim_case *c, const sim_tables *tables, sim_result *out, char *error, size_t error_size);
/* Both. */
bool sim_simulate(const sim_case *c, sim_result *out, char *error, size_t error_size);
/* The strategies that are sums of phases. False: out of memory. */
bool sim_phases(const sim_case *c, const sim_tables *tables, sim_result *out);

/* Cuts of the walk on this machine: the same as the fused kernels'. */
mk_grid sim_grid(const sim_profile *p, const mk_dims *d, mk_pass pass);
/* TFLOP/s of all SMs at endless K. */
double sim_rate(const sim_case *c);
double sim_schedule_seconds(const sim_case *c);
/* Bytes that a row of x or dout takes on its way, and on a GEMM's way in. */
double sim_row_bytes(const sim_case *c);

void sim_series_start(sim_series *s, double width);
/* Spreads `amount` evenly over [from, to). Bins double in width as time goes on. */
void sim_series_add(sim_series *s, double from, double to, double amount);

#endif
