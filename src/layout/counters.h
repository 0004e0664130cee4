/* The counters that order the tasks of one pass on one rank. A counter belongs to a table tile (the row tile that sits in
 * a ring slot), to a weight-gradient piece or to a tile of the shared expert; it is 0 when a pass begins and only grows. A
 * task adds (1, or the rows it moved) with release when its writes are done; a task that needs the data polls with acquire until the required
 * count is there. Who needs what is in layout/depend.h.
 *
 * X(space, counter, writer, reader, required count) */
#ifndef MK_LAYOUT_COUNTERS_H
#define MK_LAYOUT_COUNTERS_H

#define MK_COUNTER_LIST(X)                                                                                             \
    X(TILE, s1_rows_arrived, "s1_dispatch: rows are in the ring", "s2_gate_up, s4_down_bwd, copying s1_dispatch", "valid rows of the tile") \
    X(TILE, s1_copies_done, "s1_dispatch: a row elsewhere was copied from here", "s1_dispatch into the slot", "copies_out[tile]") \
    X(TILE, s2_tasks_done, "s2_gate_up: h, gate, up of some columns", "s4_down, s4_down_bwd, s1_dispatch into the slot", "grid.gate_up") \
    X(TILE, s4_tasks_done, "s4_down: y of some columns is pushed", "s2_gate_up into the slot", "grid.down")            \
    X(TILE, s4_bwd_tasks_done, "s4_down_bwd: dgate, dup, w h of some columns", "s2_gate_up_bwd, wgrad", "grid.dgrad_down") \
    X(TILE, s2_bwd_tasks_done, "s2_gate_up_bwd: dx of some columns is pushed", "s1_dispatch into the slot, wgrad in MXFP8", "grid.dgrad_gate_up") \
    X(PIECE, wgrad_tasks_done, "wgrad: some of a weight gradient's piece", "the piece after it, s1_dispatch into the slots", "grid.wgrad") \
    X(SHARED, shared_s2_tasks_done, "s2_gate_up: shared h, gate, up", "shared s4_down, s4_down_bwd", "grid.shared_gate_up") \
    X(SHARED, shared_s4_bwd_tasks_done, "s4_down_bwd: shared dgate, dup, s h", "shared s2_gate_up_bwd, shared wgrad", "grid.shared_dgrad_down")

enum {
#define MK_COUNTER_ENUM(space, name, writer, reader, need) MK_COUNTER_##name,
    MK_COUNTER_LIST(MK_COUNTER_ENUM)
#undef MK_COUNTER_ENUM
    MK_NUM_COUNTERS,
    /* The spaces are consecutive runs of the list. */
    MK_NUM_TILE_COUNTERS = MK_COUNTER_wgrad_tasks_done,
    MK_NUM_SHARED_COUNTERS = MK_NUM_COUNTERS - MK_COUNTER_shared_s2_tasks_done
};

#endif
