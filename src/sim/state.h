/* One run of the simulator: shared by pass.c (the event loop), cluster.c and mover.c (the actors), cost.c (their times). */
#ifndef MK_SIM_STATE_H
#define MK_SIM_STATE_H

#include "layout/depend.h"
#include "sim/events.h"
#include "sim/sim.h"

enum { SIM_BATCH = 32, SIM_MAX_AHEAD = 8, SIM_MOVERS_PER_COMM_SM = 1, SIM_NOBODY = -1 };

/* A counter of layout/counters.h. Needs always ask for all that a counter will ever reach, so the time at which it is reached is the latest of
 * its contributions'; nobody has to be told twice. */
typedef struct sim_counter { uint32_t count; int32_t waiter; double time; } sim_counter;

/* Who waits: first in both kinds of actors. */
typedef struct sim_waiter { int32_t next; uint32_t count; double since; } sim_waiter;

typedef struct sim_cluster {
    sim_waiter wait;
    int64_t queue[SIM_MAX_AHEAD + 1];
    int32_t queued, rank, lane;
    bool running, stalled, waited_rows, ended;
    mk_task task;
    double started, end, last_end;   /* of the products of the task under way */
    double epilogue;
    double slot_free[2];             /* when the accumulators of a task can be used again */
    int32_t slot;
} sim_cluster;

typedef struct sim_row_move { int32_t row, rank; int32_t duplicates; } sim_row_move; /* rank: whose table, where rows are pushed */

typedef struct sim_mover {
    sim_waiter wait;
    int32_t rank, lane;
    int32_t step;            /* 0 draw, 1 wait for slots and sources, 2 move groups, 3 announce */
    int32_t num_moves, at, group;
    int64_t tile, batch;
    sim_row_move moves[SIM_BATCH];
    double previous, started, finish;
    bool draining;
} sim_mover;

typedef struct sim_rank {
    const sim_rank_table *t;
    mk_table table;
    mk_walk walk;
    mk_task *order;              /* [walk.num_tasks], or NULL: the walk's own order */
    int64_t ticket, batch_ticket, num_batches; /* batches of 32 rows; where rows are pushed, rows */
    sim_counter *counters;       /* by mk_counter_index; then one per macrobatch */
    int64_t macro_base, num_macros;
    int32_t *macro_tasks;        /* tasks of each macrobatch */
    sim_row_move *sends;         /* rows that this rank pushes, in order; or NULL */
    int64_t num_sends;
    double out_free, in_free, hbm_free;      /* servers: when they have nothing left to do */
    double debt;                 /* cluster-seconds that moved bytes still take from the GEMMs */
    double touched;              /* bytes that have come into L2 so far */
    double *weight_seen[2], *tile_seen[2];   /* `touched` when last used; see cost.c */
    double landed, end, link_out_bytes, link_in_bytes;
    double *tile_start;          /* when the first row of a tile began to move */
} sim_rank;

typedef struct sim_state {
    const sim_case *c;
    sim_result *out;
    mk_grid grid;
    int32_t num_ranks, clusters, movers; /* actors per rank: clusters first, then movers */
    int32_t actors;
    double task_rate;            /* flop/s of a cluster */
    double row_bytes, y_bytes;   /* that a row takes: on its way in, its result's on the way out */
    double slot_rows, group_rows;
    sim_rank *ranks;
    sim_cluster *cluster;        /* [num_ranks * clusters] */
    sim_mover *mover;            /* [num_ranks * movers] */
    sim_events events;
    double sum[8];               /* cluster-seconds, in the order of sim_shares */
    int64_t left;                /* actors that have not ended */
} sim_state;

enum { SIM_SHARE_COMPUTE, SIM_SHARE_COPIES, SIM_SHARE_MEMORY, SIM_SHARE_ROWS, SIM_SHARE_TASKS, SIM_SHARE_EPILOGUE, SIM_SHARE_TAIL };

/* pass.c */
sim_waiter *sim_waiter_of(sim_state *s, int32_t actor);
/* Adds `n` at `time`; wakes those for whom that was the last. */
void sim_raise(sim_state *s, int32_t rank, int64_t counter, uint32_t n, double time);
/* True: the need is met at *ready (which it may move on). False: the actor has been put on the counter's list. */
bool sim_need(sim_state *s, int32_t rank, int64_t counter, uint32_t count, int32_t actor, double now, double *ready);
int64_t sim_macro_of(const sim_state *s, const sim_rank *r, int64_t tile);

/* Bytes from one GPU to another, in the servers' order; returns when the last of them arrives. drained: when they have left. */
double sim_transfer(sim_state *s, int32_t from, int32_t to, double bytes, double gbps, double chunk, double now, double *drained);
double sim_memory(sim_rank *r, const sim_profile *p, double bytes, double now);
void sim_trace(const sim_state *s, int32_t rank, int32_t lane, const char *name, double start, double end);
void sim_stage(sim_state *s, int32_t kind, double start, double end, double per);
const char *sim_task_name(int32_t kind);

/* cost.c */
typedef struct sim_cost { double flops, hbm_bytes, epilogue, extra; } sim_cost; /* flops include padding; extra: seconds that nothing hides */
sim_cost sim_task_cost(sim_state *s, sim_rank *r, mk_task task);

/* cluster.c, mover.c */
void sim_cluster_step(sim_state *s, int32_t actor, double now);
void sim_mover_step(sim_state *s, int32_t actor, double now);

#endif
