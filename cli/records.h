/* Records of bench/bench_layer.py as cases for the simulator. A record's pass is forward, backward, or train: one after the other. These fields may be
 * left out:
 *   "ring_rows", "minibatch_rows", "save": as the options of mok simulate; "minibatch_rows_bwd", if it is another one
 *   "copy_distance": that of the library that was measured (MK_COPY_DISTANCE); without it: 1, rows were copied from any distance
 *   "strategy", "comm_sms": the same, of other systems' measurements
 *   "dtype": "mxfp8"; "routing": "uniform" instead of the draws of bench/
 *   "fit": true or false, which half the record belongs to; in all records of a file or in none */
#ifndef MOK_CLI_RECORDS_H
#define MOK_CLI_RECORDS_H

#include "sim/calibrate.h"

enum { RECORDS_MAX = 256 };

typedef struct record_list {
    sim_record *records;       /* [count] */
    bool split;                /* the records say themselves what is fitted: */
    bool marked[RECORDS_MAX];  /* this one is */
    char (*names)[96];         /* "kimi-k2.7-code-share T2048, 1 rank, forward, burst" */
    int count;
} record_list;

/* Adds a file's records. p: the machine, whose tiles choose minibatches. False and one sentence. */
bool records_read(const char *path, const sim_profile *p, record_list *list, char *error, size_t error_size);
void records_free(record_list *list);

/* A strategy by its name; false: there is none. */
bool strategy_of(const char *name, sim_strategy_id *strategy);
/* Settings of a macrobatch system, whose ring and minibatch mok_plan_query would refuse: a macrobatch may be a single minibatch. */
void set_macrobatch(const mok_config *cfg, sim_case *c);

/* The case of a shape with the settings that mok_plan_query chooses on this machine (0: chosen). ids are made by the caller. Fields of cfg that
 * are 0 are chosen. False and one sentence. */
bool case_of(const mok_config *cfg, int32_t ranks, const sim_profile *p, mk_pass pass, sim_case *c, char *error, size_t error_size);

#endif
