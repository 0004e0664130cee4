/* The deadlock check of a walk: no task may wait for one with a larger number. Host only. */
#ifndef MK_LAYOUT_CHECK_H
#define MK_LAYOUT_CHECK_H

#include "layout/walk.h"
#include "mok.h"

typedef struct mk_check_table {
    const mk_row *rows;      /* NULL: rows are not looked at, only tiles */
    const mk_piece *pieces;
    int64_t ring_tiles;
} mk_check_table;

/* MOK_OK, or MOK_E_BUG with the first pair of tasks that violates the rule; MOK_E_MEMORY. O(tasks + rows). */
mok_status mk_check_walk(const mk_walk *walk, const mk_check_table *table);

/* The same on made-up tables of a configuration (all experts alike; one expert with everything; every other expert without rows),
 * for tools that have no routing yet. */
mok_status mk_check_dims(const mk_dims *d);

#endif
