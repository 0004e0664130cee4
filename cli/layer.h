/* One MoE layer on made-up data, run over P ranks as threads through the public header: what `mok check`, `mok bench` and the tests
 * share. Everything lies in host memory; for a backend on devices it is copied there before, and results are copied back after, outside
 * the measured times. Inputs and results are those of the whole batch, in rank order, so that results for different P can be compared
 * byte by byte. */
#ifndef MOK_CLI_LAYER_H
#define MOK_CLI_LAYER_H

#include "mok.h"

/* Everything that defines the result. Arrays are owned by the problem. */
typedef struct layer_problem {
    mok_config cfg;             /* shape and arithmetic; ring, minibatch … are set per run */
    int64_t tokens;             /* N */
    uint16_t *x, *dout;         /* [N, H] bf16 */
    float *router_weights;      /* [N, K]; rounded for the backend if cfg.router_dtype is bf16, and its gradients widened */
    int32_t *expert_ids;        /* [N, K] */
    uint16_t *gate, *up, *down; /* [E, I, H], [E, I, H], [E, H, I] bf16 */
    uint16_t *shared_gate, *shared_up, *shared_down, *shared_output_gate; /* [Is, H], [Is, H], [H, Is], [H] */
} layer_problem;

/* How ids are drawn: uniformly with replacement within a token ("duplicates are legal"), distinct experts of a token, or all of them
 * the first expert. A share of the routes is dropped (-1). */
typedef enum layer_routing { LAYER_DISTINCT, LAYER_UNIFORM, LAYER_ONE_EXPERT } layer_routing;

/* Random normal data, scaled as a trained layer's: x and dout of size 1, weights of 1/sqrt(fan-in), router weights a softmax.
 * cfg's shape and topk are read, nothing else. False: no memory. */
bool layer_make(layer_problem *problem, const mok_config *cfg, int64_t tokens, layer_routing routing, double dropped, uint64_t seed);
void layer_free(layer_problem *problem);

typedef struct layer_options {
    int32_t ranks;
    const int64_t *tokens_of_rank; /* [ranks], sums to N; NULL: split as evenly as experts are */
    int64_t ring_rows, minibatch_rows, minibatch_rows_bwd, save_rows;
    mok_save save;
    int32_t cpu_threads;
    mok_backend_id backend;
    const int32_t *devices;        /* [ranks] CUDA device numbers, equal ones for virtual ranks; NULL: the cpu backend */
    bool forward_only, recompute, two_call_backward; /* recompute: the context of the forward is thrown away first */
    bool experts_by_pointer;       /* weights and gradients through pointer tables, the shared expert's too */
    bool grads_by_pointer;         /* gradients alone */
    int64_t frozen_expert;         /* by pointer: 1 + the expert without gradients; 0: none */
    bool mx_prequantised;          /* MXFP8: routed weights are quantised before, with mok_mx_quantise; not with experts_by_pointer */
    bool mx_wide;                  /* MXFP8: they are widened before, with mok_mx_widen, where passes would; and the passes get nothing else */
    mok_dtype grad_dtype;
    bool accumulate;               /* gradients add to what the result holds: fill it first */
    uint32_t ready_value;          /* what an expert's flag becomes when its gradients are written; 0: no flags */
    int64_t repeat;                /* passes over the same data; 0 = 1 */
    void (*before_pass)(mok_workspace *w, void *user); /* tests: poison the workspace; may be NULL */
    void (*after_pass)(mok_workspace *w, void *user);  /* of a pass that worked; on the rank's thread, as before_pass */
    void *user;
} layer_options;

typedef struct layer_result {
    uint16_t *out, *dx;            /* [N, H] */
    float *drouter_weights;        /* [N, K] */
    void *dgate, *dup, *ddown;     /* [E, I, H], [E, I, H], [E, H, I] of grad_dtype */
    void *dshared_gate, *dshared_up, *dshared_down, *dshared_output_gate; /* [ranks, …] of grad_dtype */
    uint32_t *ready;               /* [E] */
    int64_t *tokens_per_expert;    /* [E] as rank 0 saw the whole batch */
    mok_stats *stats;              /* [ranks] */
    mok_schedule_info *info;       /* [ranks] */
    mok_config config;             /* as resolved by rank 0 */
    double seconds_schedule, seconds_forward, seconds_backward; /* rank 0's last repeat */
    int64_t grad_bytes;            /* per element */
    int32_t ranks;
    bool forward_only;             /* out is all there is */
} layer_result;

/* Allocates a result for problem and options, every byte 0xff (NaN). False: no memory. */
bool layer_result_make(layer_result *result, const layer_problem *problem, const layer_options *options);
void layer_result_free(layer_result *result);

/* Runs schedule, forward, [recompute,] backward on all ranks. The first failing rank's status; error receives its sentence. */
mok_status layer_run(const layer_problem *problem, const layer_options *options, layer_result *result, char error[512]);

/* One rank of a group that the caller has made, in this thread; o->ranks is the group's size. Its parts of the result are written. The group stays. */
mok_status layer_run_rank(const layer_problem *problem, const layer_options *options, layer_result *result, mok_group *group, char error[512]);

/* Mappings of symmetric memory that this process still has. */
int layer_heap_mappings(void);

/* splitmix64 and a normal deviate, so that data is the same everywhere. */
uint64_t layer_random(uint64_t *state);
double layer_normal(uint64_t *state);
uint16_t layer_bf16(float value);
float layer_float(uint16_t value);

#endif
