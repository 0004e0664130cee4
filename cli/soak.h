/* mok soak: steps on random layers, each checked, with faults in between. soak.c steers, soak_step.c, soak_fault.c and soak_process.c do one
 * of each. */
#ifndef MOK_CLI_SOAK_H
#define MOK_CLI_SOAK_H

#include "mok.h"

typedef struct soak_counts { int64_t steps, faults, processes, rows, ring_rotations, rows_replayed, wgrad_continued; } soak_counts;

/* A random number in [0, n), from splitmix64. */
int64_t soak_below(uint64_t *state, int64_t n);

/* The soak is itself checked: MOK_SOAK_FAULT=dx flips a bit of a result, =told changes what a rank was told, =process a bit of a
 * rank's process; all must be noticed. */
bool soak_spoils(const char *what);

/* One step on a layer that `seed` decides: shape, ranks, tokens of each, routing, ring, minibatches, save policy, threads, forms of MXFP8's weights, and the
 * data type if `dtype` is MOK_DTYPE_AUTO. All results of
 * several ranks are compared byte by byte with one rank's, and with a repetition. False and a sentence. */
bool soak_step(uint64_t seed, mok_backend_id backend, mok_dtype dtype, soak_counts *counts, char *error, size_t error_size);

/* One fault on a group of ranks of `backend` (cuda: virtual ones, which share a GPU) that `seed` decides: a bad expert id, a refusal, another layer, a rank
 * that never comes. All ranks must be told the same (of an absent rank: whom they miss), and the group, or a new one, must work afterwards. */
bool soak_fault(uint64_t seed, mok_backend_id backend, char *error, size_t error_size);

/* Ranks as processes on the cpu backend, one of which is killed or stopped at a moment that `seed` decides. The others must be told who it was within
 * the time-out, give all memory back and go on without it; every step must have the bits of one rank. Forks: no other thread may run. */
bool soak_processes(uint64_t seed, soak_counts *counts, char *error, size_t error_size);

#endif
