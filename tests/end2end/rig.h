/* What the end-to-end tests share: poison for everything that the workspace does not promise to keep, errors against float64, and
 * counts that show that a case was not empty. */
#ifndef MOK_TEST_RIG_H
#define MOK_TEST_RIG_H
#include "../multi/ranks.h"
#include "backend/backend.h"
#include "reference.h"

/* NaN in all of the ring, the scratch, and the data areas of this rank's heap: nothing in them lives from one call to the next.
 * Only between calls of all ranks: peers read the heap during a call. */
static inline void rig_poison(mok_workspace *w, void *user)
{
    const mk_memory *m = &w->memory;
    (void)user;
    memset(w->local, 0xff, (size_t)m->local_bytes);
    memset(w->heap + m->router_weights, 0xff, (size_t)(m->heap_bytes - m->router_weights));
}

/* --- against float64 ---------------------------------------------------------------------------------------------------------------- */
typedef struct rig_references { reference_result exact, chain; } rig_references;

static inline bool rig_references_make(rig_references *r, const layer_problem *p)
{
    return reference_run(p, false, &r->exact) && reference_run(p, true, &r->chain);
}
static inline void rig_references_free(rig_references *r)
{
    reference_free(&r->exact);
    reference_free(&r->chain);
}

/* At most twice the error of the bf16 chain. Of few errors the chain's may be small by luck, and of a handful the sum itself may have cancelled: some
 * more is allowed there. Elements that are exactly 0 (dropped tokens, experts without rows) have none, and `most` is how many there can be that do not
 * depend on each other (each token's da is in every element of dshared_output_gate). */
static inline void rig_check_few(const char *name, double error, const double *exact, const double *chain, int64_t n, int64_t most)
{
    double of_chain = reference_error_double(chain, exact, n);
    int64_t errors = 0;
    for (int64_t i = 0; i < n; i++)
        errors += exact[i] != 0;
    errors = errors < most ? errors : most;
    double allowed = 2 * of_chain + (errors < 16 ? 0.5 : 0x1p-7 / sqrt((double)errors));
    if (!(error <= allowed))
        TEST_FAILED("error of %s is %.4g; the bf16 chain's is %.4g (%lld elements, %lld errors)", name, error, of_chain, (long long)n, (long long)errors);
}
static inline void rig_check_error(const char *name, double error, const double *exact, const double *chain, int64_t n)
{
    rig_check_few(name, error, exact, chain, n, n);
}

static inline double rig_error(const void *a, bool fp32, const double *b, int64_t n)
{
    return fp32 ? reference_error_float((const float *)a, b, n) : reference_error_bf16((const uint16_t *)a, b, n);
}

/* The sum over ranks of a shared gradient; NaN in any element stays. */
static inline double *rig_sum_ranks(const void *parts, bool fp32, int32_t ranks, int64_t n)
{
    double *sum = (double *)calloc((size_t)(n + 1), sizeof *sum);
    for (int32_t r = 0; r < ranks; r++)
        for (int64_t i = 0; i < n; i++)
            sum[i] += fp32 ? (double)((const float *)parts)[r * n + i] : (double)layer_float(((const uint16_t *)parts)[r * n + i]);
    return sum;
}

static inline void rig_check_errors(const layer_problem *p, const rig_references *r, const layer_result *got)
{
    const mok_config *c = &p->cfg;
    int64_t n = p->tokens * c->hidden, routed = c->num_experts * c->intermediate * c->hidden, shared = c->shared_intermediate * c->hidden;
    bool fp32 = got->grad_bytes == 4;
    const reference_result *x = &r->exact, *b = &r->chain;
    rig_check_error("out", reference_error_bf16(got->out, x->out, n), x->out, b->out, n);
    rig_check_error("dx", reference_error_bf16(got->dx, x->dx, n), x->dx, b->dx, n);
    rig_check_error("drouter_weights", reference_error_float(got->drouter_weights, x->drouter_weights, p->tokens * c->topk), x->drouter_weights,
                    b->drouter_weights, p->tokens * c->topk);
    rig_check_error("dgate", rig_error(got->dgate, fp32, x->dgate, routed), x->dgate, b->dgate, routed);
    rig_check_error("dup", rig_error(got->dup, fp32, x->dup, routed), x->dup, b->dup, routed);
    rig_check_error("ddown", rig_error(got->ddown, fp32, x->ddown, routed), x->ddown, b->ddown, routed);
    const struct { const char *name; const void *got; const double *exact, *chain; int64_t n; } of_shared[] = {
        {"dshared_gate", got->dshared_gate, x->dshared_gate, b->dshared_gate, shared},
        {"dshared_up", got->dshared_up, x->dshared_up, b->dshared_up, shared},
        {"dshared_down", got->dshared_down, x->dshared_down, b->dshared_down, shared},
        {"dshared_output_gate", got->dshared_output_gate, x->dshared_output_gate, b->dshared_output_gate, c->shared_gate ? c->hidden : 0}};
    for (int i = 0; i < 4; i++) {
        if (!of_shared[i].n)
            continue;
        double *sum = rig_sum_ranks(of_shared[i].got, fp32, got->ranks, of_shared[i].n);
        rig_check_few(of_shared[i].name, reference_error_double(sum, of_shared[i].exact, of_shared[i].n), of_shared[i].exact, of_shared[i].chain,
                      of_shared[i].n, i < 3 ? of_shared[i].n : p->tokens);
        free(sum);
    }
}

/* What MXFP8 may be away from the layer that quantises nothing; printed. */
static inline void rig_check_mx(const char *name, const uint16_t *got, const double *exact, int64_t n)
{
    double most = 0, difference = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs(layer_float(got[i]) - exact[i]);
        most = d > most || isnan(d) ? d : most;
        difference += d;
        size += fabs(exact[i]);
    }
    printf("  %s: at most %.3g off, relative %.3g\n", name, most, difference / size);
    CHECK_LE(most, 1.0);
    CHECK_LE(difference / size, 0.1);
    CHECK(difference / size > 0.005); /* it is not a bf16 layer */
}

/* --- counts ---------------------------------------------------------------------------------------------------------------------------- */
typedef struct rig_counts { int64_t rotations, pulled_peer, copied, replayed, continued; } rig_counts;

static inline void rig_count(rig_counts *c, const layer_result *r)
{
    for (int32_t i = 0; i < r->ranks; i++) {
        c->rotations += r->stats[i].ring_rotations;
        c->pulled_peer += r->stats[i].rows_pulled_peer;
        c->copied += r->stats[i].rows_copied;
        c->replayed += r->stats[i].rows_replayed;
        c->continued += r->stats[i].wgrad_continued;
    }
}
static inline void rig_print_counts(const rig_counts *c)
{
    printf("  rotations %lld, rows pulled from peers %lld, copied %lld, replayed %lld, gradients continued %lld\n", (long long)c->rotations,
           (long long)c->pulled_peer, (long long)c->copied, (long long)c->replayed, (long long)c->continued);
}

/* Runs a problem; a failure is a failed check. */
static inline bool rig_run(const char *what, const layer_problem *p, const layer_options *o, layer_result *r)
{
    char error[512] = "";
    if (!layer_result_make(r, p, o))
        exit(1);
    mok_status status = layer_run(p, o, r, error);
    if (status != MOK_OK)
        TEST_FAILED("%s: %s: %s", what, mok_status_name(status), error);
    return status == MOK_OK;
}
#endif
