/* The inside of cli/layer.h: one rank of a run. layer_args.c makes its arguments, layer.c makes its calls. */
#ifndef MOK_CLI_LAYER_RANK_H
#define MOK_CLI_LAYER_RANK_H

#include "layer.h"
#include "try.h"

/* A host array and its copy in the backend's memory. */
typedef struct layer_copy {
    void *host, *there;
    int64_t bytes;
    bool comes_back;
} layer_copy;
enum { MAX_COPIES = 48 };

/* Tables of addresses: of weights and gradients, of the routed experts and the shared one. */
typedef enum table_slot {
    TABLE_GATE, TABLE_UP, TABLE_DOWN, TABLE_DGATE, TABLE_DUP, TABLE_DDOWN,
    TABLE_SHARED, TABLE_SHARED_GATE = TABLE_SHARED, TABLE_SHARED_UP, TABLE_SHARED_DOWN, TABLE_SHARED_DGATE, TABLE_SHARED_DUP, TABLE_SHARED_DDOWN,
    NUM_TABLES
} table_slot;

typedef struct layer_rank {
    const layer_problem *problem;
    const layer_options *options;
    layer_result *result;
    mok_group *group;
    int32_t rank;
    int64_t first_token, num_tokens, max_tokens;
    int64_t first_expert, num_experts;
    mok_workspace *w;
    bool on_device;    /* the backend does not address host memory */
    layer_copy copies[MAX_COPIES];
    int num_copies;
    mok_status copy_status; /* the first copy that failed */
    void *schedule, *context;
    void **tables[NUM_TABLES]; /* made once */
    uint8_t *pair[4];  /* unless gate and up are separate: weights and gradients of both in one matrix, routed, then shared; made once */
    uint16_t *router[2]; /* router weights and their gradients in bf16, if they are to be; made once */
    uint8_t *mx[3];    /* gate, up, down: elements, scales, transposed elements, transposed scales behind each other; made once */
    void *wide[2];     /* routed weights widened: for the forward, for dgrad; null: the passes widen them */
    mok_status status;
    char error[512];
} layer_rank;

/* Arguments of this rank's calls, all gradients wanted. What the device needs a copy of is copied when it is first asked for; what fails is kept in
 * copy_status. The backward's x and router weights are the forward's. */
mok_schedule_args layer_rank_schedule(layer_rank *job);
mok_forward_args layer_rank_forward(layer_rank *job);
mok_backward_args layer_rank_backward(layer_rank *job, const mok_forward_args *f);
/* With options.mx_wide: widens the routed weights that f and b name, and gives both nothing else. */
mok_status layer_rank_widen(layer_rank *job, mok_forward_args *f, mok_backward_args *b);
/* Memory of the backend, every byte 0xff. */
mok_status layer_rank_alloc_poisoned(mok_workspace *w, int64_t bytes, void **memory);
/* Results into the caller's arrays, in the caller's formats. */
mok_status layer_rank_bring_back(layer_rank *job);
void layer_rank_free(layer_rank *job);

#endif
