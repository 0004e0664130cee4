#include "reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One expert (or the shared expert) and its rows. */
typedef struct expert_job {
    const layer_problem *p;
    bool rounded;
    int64_t width;
    double *gate_w, *up_w, *down_w;     /* [width, H], [width, H], [H, width] */
    double *dgate_w, *dup_w, *ddown_w;  /* gradients, the same shapes */
} expert_job;

/* Scratch of one row. */
typedef struct row_scratch {
    double *x, *dout, *y, *dy, *dx;      /* [H] */
    double *gate, *up, *act, *h, *dh, *dgate, *dup; /* [width] */
} row_scratch;

static double rounding(const expert_job *j, double v) { return j->rounded ? (double)layer_float(layer_bf16((float)v)) : v; }
static double sigmoid(double v) { return 1.0 / (1.0 + exp(-v)); }

static double dot(const double *a, const double *b, int64_t n)
{
    double s[8] = {0}; /* eight sums, so that the compiler may use vectors */
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++)
            s[k] += a[i + k] * b[i + k];
    for (; i < n; i++)
        s[0] += a[i] * b[i];
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

static void add_scaled(double *to, const double *from, double scale, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] += scale * from[i];
}

/* y = down(silu(gate) * up) for the row in s->x. */
static void forward_row(const expert_job *j, row_scratch *s)
{
    int64_t hidden = j->p->cfg.hidden;
    double limit = j->p->cfg.swiglu_limit;
    for (int64_t i = 0; i < j->width; i++) {
        s->gate[i] = rounding(j, dot(s->x, j->gate_w + i * hidden, hidden));
        s->up[i] = rounding(j, dot(s->x, j->up_w + i * hidden, hidden));
        double g = limit > 0 ? fmin(s->gate[i], limit) : s->gate[i], u = limit > 0 ? fmax(fmin(s->up[i], limit), -limit) : s->up[i];
        s->act[i] = rounding(j, g * sigmoid(g));
        s->h[i] = rounding(j, s->act[i] * u);
    }
    for (int64_t i = 0; i < hidden; i++)
        s->y[i] = rounding(j, dot(s->h, j->down_w + i * j->width, j->width));
}

/* Given dy (the weight is in it) and what forward_row left: dx, and the weight gradients of this row added. */
static void backward_row(const expert_job *j, row_scratch *s)
{
    int64_t hidden = j->p->cfg.hidden;
    double limit = j->p->cfg.swiglu_limit;
    memset(s->dh, 0, sizeof(double) * (size_t)j->width);
    for (int64_t i = 0; i < hidden; i++)
        add_scaled(s->dh, j->down_w + i * j->width, s->dy[i], j->width);
    for (int64_t i = 0; i < j->width; i++) {
        double g = limit > 0 ? fmin(s->gate[i], limit) : s->gate[i], u = limit > 0 ? fmax(fmin(s->up[i], limit), -limit) : s->up[i];
        double dh = rounding(j, s->dh[i]), sg = sigmoid(g);
        double dact = rounding(j, dh * u), dup = rounding(j, dh * s->act[i]);
        s->dgate[i] = s->gate[i] == g ? rounding(j, dact * (sg + g * sg * (1 - sg))) : 0;
        s->dup[i] = s->up[i] == u ? dup : 0;
    }
    double *up_part = s->y; /* y is not needed any more */
    memset(s->dx, 0, sizeof(double) * (size_t)hidden);
    memset(up_part, 0, sizeof(double) * (size_t)hidden);
    for (int64_t i = 0; i < j->width; i++) {
        add_scaled(s->dx, j->gate_w + i * hidden, s->dgate[i], hidden);
        add_scaled(up_part, j->up_w + i * hidden, s->dup[i], hidden);
        add_scaled(j->dgate_w + i * hidden, s->x, s->dgate[i], hidden);
        add_scaled(j->dup_w + i * hidden, s->x, s->dup[i], hidden);
    }
    for (int64_t i = 0; i < hidden; i++) {
        s->dx[i] = rounding(j, rounding(j, s->dx[i]) + rounding(j, up_part[i]));
        add_scaled(j->ddown_w + i * j->width, s->h, s->dy[i], j->width);
    }
}

static double *zeros(int64_t n) { return calloc((size_t)(n ? n : 1), sizeof(double)); }

static bool scratch_make(row_scratch *s, int64_t hidden, int64_t width)
{
    double *all = zeros(5 * hidden + 7 * width);
    if (!all)
        return false;
    double **of_hidden[] = {&s->x, &s->dout, &s->y, &s->dy, &s->dx}, **of_width[] = {&s->gate, &s->up, &s->act, &s->h, &s->dh, &s->dgate, &s->dup};
    for (int i = 0; i < 5; i++)
        *of_hidden[i] = all + i * hidden;
    for (int i = 0; i < 7; i++)
        *of_width[i] = all + 5 * hidden + i * width;
    return true;
}

static void widen(double *to, const uint16_t *from, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = layer_float(from[i]);
}

static bool job_open(expert_job *j, const uint16_t *gate, const uint16_t *up, const uint16_t *down, double *dgate, double *dup, double *ddown)
{
    int64_t n = j->width * j->p->cfg.hidden;
    j->gate_w = zeros(3 * n);
    if (!j->gate_w)
        return false;
    j->up_w = j->gate_w + n;
    j->down_w = j->up_w + n;
    widen(j->gate_w, gate, n);
    widen(j->up_w, up, n);
    widen(j->down_w, down, n);
    j->dgate_w = dgate;
    j->dup_w = dup;
    j->ddown_w = ddown;
    return true;
}

static void load_row(const expert_job *j, row_scratch *s, int64_t token)
{
    int64_t hidden = j->p->cfg.hidden;
    widen(s->x, j->p->x + token * hidden, hidden);
    widen(s->dout, j->p->dout + token * hidden, hidden);
}

static void routed_rows(const expert_job *j, row_scratch *s, int64_t expert, reference_result *r)
{
    const layer_problem *p = j->p;
    int64_t hidden = p->cfg.hidden, topk = p->cfg.topk;
    for (int64_t route = 0; route < p->tokens * topk; route++) {
        if (p->expert_ids[route] != expert)
            continue;
        int64_t token = route / topk;
        double w = p->router_weights[route];
        load_row(j, s, token);
        forward_row(j, s);
        add_scaled(r->out + token * hidden, s->y, w, hidden);
        r->drouter_weights[route] = dot(s->dout, s->y, hidden);
        for (int64_t i = 0; i < hidden; i++)
            s->dy[i] = rounding(j, w * s->dout[i]);
        backward_row(j, s);
        add_scaled(r->dx + token * hidden, s->dx, 1.0, hidden);
    }
}

static void shared_rows(const expert_job *j, row_scratch *s, reference_result *r, double *wgate)
{
    const layer_problem *p = j->p;
    int64_t hidden = p->cfg.hidden;
    widen(wgate, p->shared_output_gate, hidden);
    for (int64_t token = 0; token < p->tokens; token++) {
        load_row(j, s, token);
        forward_row(j, s);
        double scale = p->cfg.shared_gate ? rounding(j, sigmoid(rounding(j, dot(s->x, wgate, hidden)))) : 1.0;
        add_scaled(r->out + token * hidden, s->y, scale, hidden);
        double da = dot(s->dout, s->y, hidden) * scale * (1 - scale);
        for (int64_t i = 0; i < hidden; i++)
            s->dy[i] = rounding(j, scale * s->dout[i]);
        backward_row(j, s);
        add_scaled(r->dx + token * hidden, s->dx, 1.0, hidden);
        if (!p->cfg.shared_gate)
            continue;
        add_scaled(r->dx + token * hidden, wgate, da, hidden);
        add_scaled(r->dshared_output_gate, s->x, da, hidden);
    }
}

static void round_all(double *v, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        v[i] = layer_float(layer_bf16((float)v[i]));
}

static bool run_shared(const layer_problem *p, bool rounded, reference_result *r)
{
    expert_job j = {.p = p, .rounded = rounded, .width = p->cfg.shared_intermediate};
    row_scratch s = {0};
    double *wgate = zeros(p->cfg.hidden);
    bool ok = wgate && scratch_make(&s, p->cfg.hidden, j.width) && job_open(&j, p->shared_gate, p->shared_up, p->shared_down, r->dshared_gate, r->dshared_up, r->dshared_down);
    if (ok)
        shared_rows(&j, &s, r, wgate);
    free(j.gate_w);
    free(s.x);
    free(wgate);
    return ok;
}

static bool run_routed(const layer_problem *p, bool rounded, reference_result *r)
{
    int64_t width = p->cfg.intermediate, n = width * p->cfg.hidden;
    row_scratch s = {0};
    bool ok = scratch_make(&s, p->cfg.hidden, width);
    for (int64_t e = 0; e < p->cfg.num_experts && ok; e++) {
        expert_job j = {.p = p, .rounded = rounded, .width = width};
        ok = job_open(&j, p->gate + e * n, p->up + e * n, p->down + e * n, r->dgate + e * n, r->dup + e * n, r->ddown + e * n);
        if (ok)
            routed_rows(&j, &s, e, r);
        free(j.gate_w);
    }
    free(s.x);
    return ok;
}

bool reference_run(const layer_problem *p, bool rounded, reference_result *r)
{
    const mok_config *c = &p->cfg;
    int64_t routed = c->num_experts * c->intermediate * c->hidden, shared = c->shared_intermediate * c->hidden, tokens = p->tokens * c->hidden;
    *r = (reference_result){zeros(tokens), zeros(tokens), zeros(p->tokens * c->topk), zeros(routed), zeros(routed), zeros(routed),
                            zeros(shared), zeros(shared), zeros(shared), zeros(c->hidden)};
    bool ok = r->out && r->dx && r->drouter_weights && r->dgate && r->dup && r->ddown && r->dshared_gate && r->dshared_up && r->dshared_down &&
              r->dshared_output_gate;
    ok = ok && (!shared || run_shared(p, rounded, r)) && run_routed(p, rounded, r);
    if (!ok) {
        reference_free(r);
        return false;
    }
    if (rounded) { /* what a framework hands out is bf16; router weights and their gradients are fp32 */
        double *all[] = {r->out, r->dx, r->dgate, r->dup, r->ddown, r->dshared_gate, r->dshared_up, r->dshared_down, r->dshared_output_gate};
        int64_t counts[] = {tokens, tokens, routed, routed, routed, shared, shared, shared, c->hidden};
        for (int i = 0; i < 9; i++)
            round_all(all[i], counts[i]);
    }
    return true;
}

void reference_free(reference_result *r)
{
    double *all[] = {r->out, r->dx, r->drouter_weights, r->dgate, r->dup, r->ddown, r->dshared_gate, r->dshared_up, r->dshared_down, r->dshared_output_gate};
    for (int i = 0; i < 10; i++)
        free(all[i]);
    memset(r, 0, sizeof *r);
}

#define ERROR_OF(name, type, value)                                     \
    double name(const type *a, const double *b, int64_t n)              \
    {                                                                   \
        double difference = 0, size = 0;                                \
        for (int64_t i = 0; i < n; i++) {                               \
            double d = (value) - b[i];                                  \
            difference += d * d;                                        \
            size += b[i] * b[i];                                        \
        }                                                               \
        if (!(difference >= 0) || isinf(difference))                    \
            return INFINITY;                                            \
        return size > 0 ? sqrt(difference / size) : sqrt(difference);   \
    }
ERROR_OF(reference_error_bf16, uint16_t, layer_float(a[i]))
ERROR_OF(reference_error_float, float, a[i])
ERROR_OF(reference_error_double, double, a[i])
