#include "sim/calibrate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_STEPS = 160 };

typedef struct fit {
    sim_record *records;
    int num_records, num, simulations;
    const sim_profile *start;
    const char *const *names;
} fit;

typedef struct point { double x[SIM_MAX_FREE], error; } point; /* x: logarithm of the factor on each figure */

double sim_predict(const sim_record *r, const sim_profile *p)
{
    sim_case c = r->c;
    sim_result *out = malloc(sizeof *out);
    char error[256];
    double seconds = 0;
    c.profile = *p;
    for (int i = 0; i < (r->both ? 2 : 1); i++) {
        if (r->both)
            c.pass = i ? MK_PASS_BACKWARD : MK_PASS_FORWARD;
        seconds += out && sim_on_tables(&c, &r->tables, out, error, sizeof error) ? out->seconds : NAN;
    }
    free(out);
    return seconds;
}

static sim_profile profile_at(const fit *f, const double *x)
{
    sim_profile p = *f->start;
    for (int i = 0; i < f->num; i++)
        *sim_profile_field(&p, f->names[i]) *= exp(x[i]);
    return p;
}

static void evaluate(fit *f, point *at)
{
    sim_profile p = profile_at(f, at->x);
    double sum = 0, count = 0;
    for (int i = 0; i < f->num_records; i++) {
        if (!f->records[i].calibrate)
            continue;
        double e = log(sim_predict(&f->records[i], &p) / f->records[i].measured);
        sum += e * e;
        count++;
        f->simulations++;
    }
    at->error = sum / count;
    for (int i = 0; i < f->num; i++) /* a figure stays where it was unless the records say otherwise */
        at->error += (fabs(at->x[i]) > log(4.0) ? fabs(at->x[i]) : 0) + 5e-4 * at->x[i] * at->x[i];
}

static int worse_first(const void *a, const void *b)
{
    double x = ((const point *)a)->error, y = ((const point *)b)->error;
    return (x > y) - (x < y);
}

/* The worst point mirrored at the middle of the others: the middle + factor x (middle - worst). */
static point reflect(fit *f, const point *simplex, double factor)
{
    point p = {.error = 0};
    for (int i = 0; i < f->num; i++) {
        double middle = 0;
        for (int k = 0; k < f->num; k++)
            middle += simplex[k].x[i] / f->num;
        p.x[i] = middle + factor * (middle - simplex[f->num].x[i]);
    }
    evaluate(f, &p);
    return p;
}

static void shrink(fit *f, point *simplex)
{
    for (int k = 1; k <= f->num; k++) {
        for (int i = 0; i < f->num; i++)
            simplex[k].x[i] = (simplex[k].x[i] + simplex[0].x[i]) / 2;
        evaluate(f, &simplex[k]);
    }
}

static void search(fit *f, point *simplex)
{
    int n = f->num;
    for (int step = 0; step < MAX_STEPS; step++) {
        qsort(simplex, (size_t)n + 1, sizeof *simplex, worse_first);
        if (simplex[n].error - simplex[0].error < 2e-8)
            return;
        point mirrored = reflect(f, simplex, 1);
        if (mirrored.error < simplex[0].error) {
            point further = reflect(f, simplex, 2);
            simplex[n] = further.error < mirrored.error ? further : mirrored;
        } else if (mirrored.error < simplex[n - 1].error || n == 0) {
            simplex[n] = mirrored;
        } else {
            point nearer = reflect(f, simplex, mirrored.error < simplex[n].error ? 0.5 : -0.5);
            if (nearer.error < simplex[n].error)
                simplex[n] = nearer;
            else
                shrink(f, simplex);
        }
    }
    qsort(simplex, (size_t)n + 1, sizeof *simplex, worse_first);
}

int sim_calibrate(sim_record *records, int num_records, sim_profile *p, const char *const *names, int num_names)
{
    sim_profile start = *p;
    fit f = {records, num_records, num_names, 0, &start, names};
    point simplex[SIM_MAX_FREE + 1];
    for (int i = 0; i < num_names; i++) {
        const double *field = sim_profile_field(&start, names[i]);
        if (!field || *field <= 0)
            return -1;
    }
    memset(simplex, 0, sizeof simplex);
    for (int k = 0; k <= num_names; k++) {
        if (k)
            simplex[k].x[k - 1] = 0.15;
        evaluate(&f, &simplex[k]);
    }
    search(&f, simplex);
    *p = profile_at(&f, simplex[0].x);
    return f.simulations;
}

double sim_predict_all(sim_record *records, int num_records, const sim_profile *p, bool which)
{
    double worst = 0;
    for (int i = 0; i < num_records; i++) {
        records[i].predicted = sim_predict(&records[i], p);
        if (records[i].calibrate == which)
            worst = fmax(worst, fabs(records[i].predicted / records[i].measured - 1));
    }
    return worst;
}
