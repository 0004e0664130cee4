/* OpenBLAS as a yardstick: its single-precision matrix product in one thread, if the library is installed. It is opened at run
 * time; nothing is linked. */
#ifndef MOK_CLI_OPENBLAS_H
#define MOK_CLI_OPENBLAS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Opens the library, once; later calls give the same answer. False and one sentence if it is missing or lacks a function. Call
 * it before other threads start: it sets OPENBLAS_NUM_THREADS and OPENBLAS_CORETYPE, which the library reads while it is
 * opened. The latter to the best kernels that this processor can run, whatever the environment says, because releases that do
 * not know a processor's model fall back to SSE kernels (0.3.21 on Emerald Rapids: 20 to 30 instead of 130 to 150 GFLOP/s). */
bool openblas_open(char *error, size_t error_size);

/* "OpenBLAS 0.3.21 ... SkylakeX ...": the version and kernels in use; "missing" if it is not open. */
const char *openblas_name(void);

/* GFLOP/s of C = A B^T, A [M, K], B [N, K], C [M, N], fp32: the fastest of the calls that fit into `seconds` (at least three).
 * M, N, K from 1 to 2^20. NAN if the library is not open or memory runs out. */
double openblas_sgemm_gflops(int64_t M, int64_t N, int64_t K, double seconds);
#endif
