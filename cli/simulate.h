/* mok simulate: what simulate.c runs and simulate_print.c shows. */
#ifndef MOK_CLI_SIMULATE_H
#define MOK_CLI_SIMULATE_H

#include "records.h"
#include "shape.h"
#include "sim/routes.h"
#include "sim/sim.h"

enum { SIMULATE_MAX_RUNS = 512 };

/* What the user asked for. */
typedef struct simulate_settings {
    char name[64], shape[192], routing_text[256];
    mok_config cfg;
    sim_profile profile;
    sim_routing routing;
    const int32_t *ids;          /* from a file, [num_ids] or NULL */
    int64_t num_ids;
    int64_t tokens, racks, copy_distance;
    int32_t comm_sms, comm_sms_bwd;
    bool mxfp8, sustained, no_signals;
    bool only_time;              /* leave `exposed` out: half the work */
    bool forward, backward;
    bool strategies[SIM_NUM_STRATEGIES];
    double moe_share;            /* of the step of `baseline`; 0: not asked for */
    sim_strategy_id baseline;
    const char *trace_path;
    int32_t trace_rank;
} simulate_settings;

/* One pass of one strategy on some number of ranks; over several racks, the slowest one's times. */
typedef struct simulate_run {
    int32_t ranks;
    mk_pass pass;
    sim_strategy_id strategy;
    sim_result result;
    mk_dims dims;
    double exposed;              /* seconds that the pass would be shorter if the link cost nothing */
    double mean_seconds;         /* over racks */
    double took;                 /* seconds to simulate */
} simulate_run;

typedef struct simulate_view {
    const simulate_settings *s;
    simulate_run *runs;          /* [count] */
    int count;
} simulate_view;

/* Ids of a rack's tokens: generated, or from the file. Freed by the caller. NULL and one sentence. */
int32_t *simulate_make_ids(const simulate_settings *s, int32_t ranks, int64_t rack, char *error, size_t error_size);
/* Fills a run whose ranks, pass and strategy are set; all racks. */
bool simulate_one(const simulate_settings *s, simulate_run *run, char *error, size_t error_size);
const simulate_run *simulate_find(const simulate_view *v, int32_t ranks, mk_pass pass, sim_strategy_id strategy);
/* Step time with our layer / step time of the baseline, from the share of the layer in the baseline's step; NaN if a run is missing. */
double simulate_step_ratio(const simulate_view *v, int32_t ranks, sim_strategy_id strategy);

/* The index of an option's word in a list. False and one sentence. */
bool simulate_word(const char *option, const char *text, const char *const *words, int num_words, int *which, char *error, size_t error_size);

void simulate_print_text(const simulate_view *v);
bool simulate_print_json(const simulate_view *v);
bool simulate_draw(const simulate_view *v, const char *path, char *error, size_t error_size);

#endif
