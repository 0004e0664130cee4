/* What the simulator knows of a machine: plain figures, one list. A JSON file of profiles/ has the same names; what a file leaves out has
 * the default of the list. Rates are what a kernel reaches, not what a data sheet promises; docs/simulator.md says where each comes from.
 *
 * X(field, default, unit and meaning) */
#ifndef MK_SIM_PROFILE_H
#define MK_SIM_PROFILE_H

#define SIM_PROFILE_LIST(X)                                                                                                        \
    X(ranks_max, 8, "GPUs of the NVLink domain")                                                                                   \
    X(sms, 132, "multiprocessors of a GPU")                                                                                        \
    X(cluster, 2, "SMs that work on one task, sharing operands")                                                                   \
    X(tile_cols, 128, "columns of one SM's GEMM tile; rows are the row tile's 128")                                                \
    X(tasks_ahead, 2, "tasks a cluster has drawn beyond the one under way")                                                        \
    X(overlap_tiles, 2, "tiles under way in an SM: 2 if one's epilogue hides under the other's products, else 1")                  \
    X(bf16_tflops, 800, "TFLOP/s of all SMs at endless K, cool chip")                                                              \
    X(bf16_sustained_tflops, 690, "the same, after a second of work")                                                              \
    X(forward_factor, 1, "rate of a BF16 forward's products / the two above, which are the backward's")                            \
    X(mxfp8_tflops, 800, "TFLOP/s with block-scaled FP8; chips without such units widen it to BF16")                               \
    X(mxfp8_sustained_tflops, 690, "the same, after a second of work")                                                             \
    X(task_us, 0.4, "us of a GEMM task that overlap with nothing: filling, handing over")                                          \
    X(epilogue_us, 3, "us to bring out one plain tile of 128 x 128")                                                               \
    X(swiglu_bwd_us, 3.3, "us that the derivative of SwiGLU adds to such a tile, hidden or not")                                   \
    X(wgrad_factor, 0.96, "rate of a weight gradient / rate of the other products")                                                \
    X(wgrad_epilogue_us, 8.4, "us to bring out such a tile of a weight gradient")                                                  \
    X(wgrad_cut_us, 9.3, "us more if other tasks add to the same tile: its sums are read and written in fp32")                     \
    X(stall_us, 1.5, "us from a counter reaching its count to the first product of a task that waited for it")                     \
    X(hbm_gbps, 4200, "GB/s between L2 and memory, reads and writes together")                                                     \
    X(l2_mib, 48, "MiB of L2 within which something is found again")                                                               \
    X(copy_us_per_mb, 0.13, "us that the GEMMs of a GPU lose for each MB of rows moved on it: L2, memory, power")                  \
    X(push_us_per_mb, 0.17, "the same for each MB of results pushed")                                                              \
    X(mover_us, 0.85, "us from a local row's request until it is in the ring, of which nothing overlaps in a slot")                \
    X(mover_remote_us, 2.0, "the same for a peer's row")                                                                           \
    X(mover_gbps, 19, "GB/s that one warp moves once a row flows")                                                                 \
    X(mover_batch_us, 6, "us of a warp for a batch of 32 rows: drawing, reading the records, announcing")                          \
    X(mover_kib, 32, "KiB of row slots of the dispatch warp that every SM has")                                                    \
    X(comm_sm_kib, 200, "KiB of row slots of a communication SM")                                                                  \
    X(comm_sm_gbps, 36, "GB/s that a communication SM moves")                                                                      \
    X(link_pull_gbps, 334, "GB/s of NVLink in one direction, peers reading, both directions busy")                                 \
    X(link_push_gbps, 358, "the same, peers writing")                                                                              \
    X(link_half_chunk, 4, "bytes of a copy at which a link reaches half of that")                                                  \
    X(link_us, 1.2, "us of one way")                                                                                               \
    X(switch_factor, 1, "rate over a switch with all ports busy / rate of a pair")                                                 \
    X(signal_us, 0.9, "us that a mover spends on telling a peer that a row has come, per row (push only)")                         \
    X(publish_gbps, 2000, "GB/s of copying inputs into the heap, read once and written once")                                      \
    X(combine_gbps, 4700, "GB/s of the weighted sum, rows read and written counted once")                                          \
    X(pass_us, 25, "us of a pass outside its kernels' work: launches that follow each other, opening, checks")                     \
    X(barrier_us, 6, "us of one rank barrier")                                                                                     \
    X(schedule_us, 48, "us of making a row table, independent of its size")                                                        \
    X(schedule_ns_per_route, 0.205, "ns for each route of all ranks")                                                              \
    X(schedule_ns_per_row, 0.18, "ns for each row of the rank")                                                                    \
    X(schedule_us_per_expert, 0.2, "us for each expert of the rank")                                                               \
    X(grouped_factor, 0.96, "separate GEMMs (torch grouped_mm): their rate / bf16_tflops")                                         \
    X(grouped_half_k, 190, "K at which they reach half of that")                                                                   \
    X(elementwise_gbps, 1000, "GB/s of sort, gather, SwiGLU and other kernels between separate GEMMs")                             \
    X(elementwise_us, 6, "us of launching one of them")                                                                            \
    X(nccl_gbps, 340, "GB/s per GPU and direction of an all-to-all")                                                               \
    X(nccl_us, 25, "us of an all-to-all without data")                                                                             \
    X(nccl_us_per_rank, 1, "us more for each rank")                                                                                \
    X(cpu_sync_us, 680, "us of the host in a forward of separate kernels: reading counts, and launches that the GPU waits for")    \
    X(deepep_gbps, 300, "GB/s per GPU and direction of DeepEP's dispatch and combine")                                             \
    X(deepep_us, 40, "us of one of them without data")                                                                             \
    X(error_percent, 50, "% by which predictions of passes on this machine may be off: measured by mok calibrate, or a guess")     \
    X(macrobatch_us, 20, "us between macrobatches, where a system runs them one after the other")

typedef struct sim_profile {
    char name[64];
#define SIM_PROFILE_FIELD(field, default_, text) double field;
    SIM_PROFILE_LIST(SIM_PROFILE_FIELD)
#undef SIM_PROFILE_FIELD
} sim_profile;

typedef struct sim_profile_entry {
    const char *name, *text;
    double default_value;
    int offset; /* of the field in sim_profile */
} sim_profile_entry;

enum {
#define SIM_PROFILE_COUNT(field, default_, text) SIM_PROFILE_##field,
    SIM_PROFILE_LIST(SIM_PROFILE_COUNT)
#undef SIM_PROFILE_COUNT
    SIM_PROFILE_FIELDS
};

extern const sim_profile_entry sim_profile_entries[SIM_PROFILE_FIELDS];
void sim_profile_defaults(sim_profile *p);
/* The field with this name, or NULL. */
double *sim_profile_field(sim_profile *p, const char *name);

#endif
