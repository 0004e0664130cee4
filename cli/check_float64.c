/* mok check: errors against the float64 reference, beside those of a plain bf16 chain. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include "check.h"
#include "reference.h"

typedef struct reference_job {
    const layer_problem *problem;
    bool rounded, ok;
    reference_result result;
} reference_job;

static void *reference_main(void *argument)
{
    reference_job *job = argument;
    job->ok = reference_run(job->problem, job->rounded, &job->result);
    return NULL;
}

/* The two references at once, as they are slow and know nothing of each other. */
static bool run_references(reference_job jobs[2])
{
    pthread_t thread;
    bool threaded = pthread_create(&thread, NULL, reference_main, &jobs[1]) == 0;
    reference_main(&jobs[0]);
    if (threaded)
        pthread_join(thread, NULL);
    else
        reference_main(&jobs[1]);
    return jobs[0].ok && jobs[1].ok;
}

static const double *reference_output(const reference_result *r, int output)
{
    switch (output) {
#define CASE(name) case CHECK_##name: return r->name;
        CHECK_SAME_LIST(CASE) CHECK_SHARED_LIST(CASE)
#undef CASE
    default: return NULL;
    }
}

/* The shared expert's gradients are those of each rank's tokens: summed up, they are the batch's. */
static double shared_error(check_array a, int64_t ranks, const double *truth)
{
    int64_t n = a.count / ranks;
    const uint16_t *part = a.data;
    double *sum = calloc((size_t)(n ? n : 1), sizeof *sum), error = HUGE_VAL;
    for (int64_t r = 0; sum && r < ranks; r++)
        for (int64_t i = 0; i < n; i++)
            sum[i] += (double)layer_float(part[r * n + i]);
    if (sum)
        error = reference_error_double(sum, truth, n);
    free(sum);
    return error;
}

static void compare(check_routing *routing, const layer_result *first, const reference_result *truth, const reference_result *chain)
{
    for (int i = 0; i < CHECK_NUM_OUTPUTS; i++) {
        check_array a = check_output(&routing->problem, first, i);
        const double *t = reference_output(truth, i), *c = reference_output(chain, i);
        bool shared = i >= CHECK_NUM_SAME;
        if (!a.count)
            continue;
        routing->error[i] = shared ? shared_error(a, first->ranks, t) : i == CHECK_drouter_weights ? reference_error_float(a.data, t, a.count)
                                                                                             : reference_error_bf16(a.data, t, a.count);
        routing->chain_error[i] = reference_error_double(c, t, shared ? a.count / first->ranks : a.count);
    }
}

/* What MXFP8 costs: against the unquantised layer. */
static void compare_mx(check_routing *routing, const layer_result *first, const reference_result *truth)
{
    for (int i = 0; i < CHECK_NUM_OUTPUTS; i++) {
        check_array a = check_output(&routing->problem, first, i);
        const double *t = reference_output(truth, i);
        int64_t ranks = i >= CHECK_NUM_SAME ? first->ranks : 1, n = a.count / ranks;
        double most = 0, difference = 0, size = 0, scale = i == CHECK_out ? 1 : sqrt((double)routing->problem.cfg.hidden);
        for (int64_t j = 0; j < n; j++) {
            double value = 0;
            for (int64_t r = 0; r < ranks; r++)
                value += a.size == 4 ? (double)((const float *)a.data)[r * n + j] : (double)layer_float(((const uint16_t *)a.data)[r * n + j]);
            double d = fabs(value - t[j]);
            most = d <= most ? most : d; /* a NaN stays */
            difference += d;
            size += fabs(t[j]);
        }
        routing->error[i] = size > 0 ? difference / size : difference;
        routing->largest[i] = most / scale;
    }
}

static bool check_mx(check_routing *routing, const layer_result *first)
{
    reference_result truth;
    if (!reference_run(&routing->problem, false, &truth))
        return false;
    compare_mx(routing, first, &truth);
    reference_free(&truth);
    return true;
}

bool check_against_float64(check_routing *routing, const layer_result *first)
{
    if (routing->problem.cfg.dtype == MOK_MXFP8)
        return check_mx(routing, first);
    reference_job jobs[2] = {{.problem = &routing->problem}, {.problem = &routing->problem, .rounded = true}};
    bool ok = run_references(jobs);
    if (ok)
        compare(routing, first, &jobs[0].result, &jobs[1].result);
    for (int i = 0; i < 2; i++)
        if (jobs[i].ok)
            reference_free(&jobs[i].result);
    return ok;
}

bool check_error_ok(const check_routing *routing, int output)
{
    if (routing->problem.cfg.dtype == MOK_MXFP8)
        return routing->error[output] <= CHECK_MX_ERROR && routing->largest[output] <= CHECK_MX_LARGEST;
    return routing->error[output] <= 2 * routing->chain_error[output];
}
