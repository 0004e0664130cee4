/* mok check: what check.c steers, check_runs.c measures and check_report.c shows.
 *
 * For each routing the layer is run in many ways (variants) for every number of ranks. The first run is compared with float64, all
 * others with the first, byte by byte; and what every rank counted is compared with what its schedule said.
 *
 * The checker is itself checked: the environment variable MOK_CHECK_FAULT spoils what the library returned, so that the check must
 * fail. "dx" flips the lowest bit of one dx element in the last run of each routing; "all:dx" makes it huge in all runs
 * (which only float64 can notice); "counts" adds one byte to a rank's counted traffic in the last run. */
#ifndef MOK_CLI_CHECK_H
#define MOK_CLI_CHECK_H

#include "args.h"
#include "layer.h"

/* Results with the same bits for any number of ranks; those of the shared expert belong to a rank's own tokens. */
#define CHECK_SAME_LIST(X) X(out) X(dx) X(drouter_weights) X(dgate) X(dup) X(ddown)
#define CHECK_SHARED_LIST(X) X(dshared_gate) X(dshared_up) X(dshared_down) X(dshared_output_gate)

enum {
#define CHECK_ENUM(name) CHECK_##name,
    CHECK_SAME_LIST(CHECK_ENUM) CHECK_NUM_SAME, CHECK_BEFORE_SHARED = CHECK_NUM_SAME - 1, CHECK_SHARED_LIST(CHECK_ENUM)
#undef CHECK_ENUM
    CHECK_NUM_OUTPUTS
};
extern const char *const check_output_names[CHECK_NUM_OUTPUTS];

typedef struct check_settings {
    mok_config cfg;        /* shape and arithmetic */
    int64_t tokens;        /* N */
    arg_int_list ranks;
    uint64_t seed;
    double dropped;
    bool quick;
    bool forward_only;     /* no backward */
    int32_t num_devices;   /* cuda: GPUs that the ranks are spread over, several to each if need be */
} check_settings;

/* One run of the layer, its counts summed over the ranks. */
typedef struct check_run {
    const char *variant, *save;
    int32_t ranks;
    bool small_ring;
    int64_t ring_rows, minibatch_rows, minibatch_rows_bwd, saved_rows; /* as the library resolved them */
    mok_stats total;
    int64_t rotations;        /* of the rank that turned its ring most */
    uint32_t differing;       /* a bit per output */
    char difference[256];     /* "", or a sentence about the first bits that differ, or about the failed call */
    char plan_difference[256];/* "", or a sentence about the first count that is not the schedule's */
} check_run;

typedef struct check_routing {
    const char *name;
    layer_problem problem;
    int64_t rows, busiest;    /* live routes; those of the most liked expert */
    double error[CHECK_NUM_OUTPUTS], chain_error[CHECK_NUM_OUTPUTS]; /* relative, against float64; of the first run and of the bf16 chain */
    double largest[CHECK_NUM_OUTPUTS]; /* MXFP8, in place of chain_error: largest difference; of gradients, as if dout were randn / sqrt(H) */
    check_run *runs;
    int64_t num_runs;
} check_routing;

enum { CHECK_ROUTINGS = 2, CHECK_MAX_SENTENCES = 12 };

typedef struct check_report {
    check_settings settings;
    check_routing routings[CHECK_ROUTINGS];
    double seconds;
    char sentences[CHECK_MAX_SENTENCES][320]; /* what failed; the first few */
    int64_t num_failures;
} check_report;

/* An output of a result: `count` elements of `size` bytes; those of the shared expert once per rank. count is 0 if the layer has none. */
typedef struct check_array { void *data; int64_t count, size; } check_array;
check_array check_output(const layer_problem *p, const layer_result *r, int output);

/* check_runs.c. `tick` is called after every run; `first` receives the result of the first run, for check_against_float64. False: no memory. */
int64_t check_count_runs(const check_settings *s);
bool check_run_all(const check_settings *s, check_routing *routing, layer_result *first, void (*tick)(void *), void *user);

/* check_compare.c: bits against the first run of all, and (for the shared expert; NULL: not) the first with as many ranks and the same
 * split; counts against the schedule. Notes in `run` what it finds. */
void check_compare(const layer_problem *p, const layer_options *o, const layer_result *r, const layer_result *first, const layer_result *first_here,
                   check_run *run);

/* check_float64.c: fills error and chain_error, or, for MXFP8, error (sum of differences over sum of sizes) and largest, against the layer
 * that quantises nothing. False: no memory. */
#define CHECK_MX_ERROR 0.1
#define CHECK_MX_LARGEST 1.0
bool check_against_float64(check_routing *routing, const layer_result *first);
/* Is this output's error at most twice the chain's? MXFP8: are both within the limits above? */
bool check_error_ok(const check_routing *routing, int output);

/* check_report.c: collects the failures; the tables for people. */
void check_judge(check_report *report);
void check_print_text(const check_report *report);
/* check_json.c */
bool check_print_json(const check_report *report);

/* check_report.c, for both: runs of one variant (NULL: all) added up, and does the layer have this output? `rotations` (may be NULL) is
 * raised to the most that one rank counted in a run with the smallest ring. */
mok_stats check_total(const check_routing *r, const char *variant, int64_t *rotations);
void check_add_stats(mok_stats *to, const mok_stats *from);
bool check_has_output(const check_report *r, int output);

#endif
