/* The whole layer once more, written from the maths alone: token by token lists per expert, double precision, no tiles, ranks,
 * tables or rings. Two uses: exact (the truth, up to float64), and as a plain bf16 chain, in which every operation of a
 * framework's eager path rounds its result to bf16. A result of the library is right if its error against the first is at most
 * twice the second's. */
#ifndef MOK_CLI_REFERENCE_H
#define MOK_CLI_REFERENCE_H

#include "layer.h"

typedef struct reference_result {
    double *out, *dx;                /* [N, H] */
    double *drouter_weights;         /* [N, K] */
    double *dgate, *dup, *ddown;     /* [E, I, H], [E, I, H], [E, H, I] */
    double *dshared_gate, *dshared_up, *dshared_down, *dshared_output_gate; /* over all N tokens */
} reference_result;

/* rounded: the bf16 chain. False: no memory. */
bool reference_run(const layer_problem *problem, bool rounded, reference_result *result);
void reference_free(reference_result *result);

/* Relative error |a - b| / |b| (Frobenius) of n elements; NaN anywhere gives infinity. */
double reference_error_bf16(const uint16_t *a, const double *b, int64_t n);
double reference_error_float(const float *a, const double *b, int64_t n);
double reference_error_double(const double *a, const double *b, int64_t n);

#endif
