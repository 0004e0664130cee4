/* The row tables of all ranks of one group, from the ids of all tokens: what mok_schedule makes on every rank, in one sweep. Row order,
 * copies and pieces come from src/layout/; a test compares the result with mok_schedule's, byte for byte. */
#ifndef MK_SIM_TABLES_H
#define MK_SIM_TABLES_H

#include <stdbool.h>

#include "layout/view.h"
#include "mok.h"

typedef struct sim_rank_table {
    mk_dims dims;
    mk_table table;
    mk_schedule_head head;
} sim_rank_table;

typedef struct sim_tables {
    int32_t num_ranks;
    int64_t num_tokens;      /* of all ranks */
    sim_rank_table *ranks;   /* [num_ranks] */
    int64_t *token_first;    /* [num_ranks + 1] */
} sim_tables;

/* The dims of a rank from a resolved plan (mok_plan_query) of its configuration. */
mk_dims sim_dims(const mok_config *cfg, const mok_plan *plan, int32_t num_ranks, int32_t rank);

/* dims: of rank 0. ids: [num_ranks * tokens, topk], -1 = dropped. piece_tiles > 0: weight gradients are cut at every so many tiles instead
 * of where the ring wants it. copy_distance: no row is copied from one of another tile that is fewer rows away (SIM_…: or as the library does, or none
 * is copied at all). False: out of memory. Free with sim_tables_free. */
enum { SIM_COPIES_AS_BUILT = 0, SIM_NO_COPIES = INT32_MAX };
bool sim_tables_make(const mk_dims *dims, int64_t tokens, const int32_t *ids, int64_t piece_tiles, int64_t copy_distance, sim_tables *out);
void sim_tables_free(sim_tables *t);

#endif
