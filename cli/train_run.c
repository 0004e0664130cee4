/* The loop of mok train: batches, held-out losses, checkpoints. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "term.h"
#include "train.h"

enum { WARM_UP = 20, LEVEL = 200, FEW_BATCHES = 8, MANY_BATCHES = 64 };
static const double clip_norm = 1.0;

double train_rate(double rate, int64_t step)
{
    double warm = step < WARM_UP ? (double)step / WARM_UP : 1;
    return rate * warm * (step > LEVEL ? sqrt((double)LEVEL / (double)step) : 1);
}

typedef struct trainer {
    const train_settings *s;
    const lm_text *text;
    train_outcome *o;
    lm *model;
    FILE *lines;
    term_progress progress;
    int64_t capacity; /* of the outcome's points */
    char *error;
} trainer;

static bool fail(trainer *t, const char *why)
{
    snprintf(t->error, LM_ERROR, "%s", why);
    return false;
}

/* ---------------------------------------------------------------------------------------------------- held-out loss -- */
/* Mean over `batches` batches, spread evenly; routes are added up. */
static bool held_out_loss(trainer *t, int64_t batches, double *loss)
{
    const lm_config *c = &t->s->cfg;
    int64_t starts[LM_CHUNKS], cells = c->layers * c->experts;
    double sum = 0, one;
    memset(t->o->routes, 0, sizeof *t->o->routes * (size_t)cells);
    for (int64_t i = 0; i < batches; i++) {
        lm_even_starts(c, i, batches, t->text->held_out_size, starts);
        if (!lm_forward(t->model, t->text->held_out, starts, &one, t->error))
            return false;
        sum += one;
        for (int64_t j = 0; j < cells; j++)
            t->o->routes[j] += lm_routes(t->model)[j];
    }
    *loss = sum / (double)batches;
    return true;
}

static bool add_point(trainer *t)
{
    lm_run *run = &t->o->run;
    lm_point *more = run->num_points < t->capacity ? run->points : realloc(run->points, sizeof *more * (size_t)(2 * run->num_points + 16));
    if (!more)
        return fail(t, "out of memory");
    if (more != run->points || !t->capacity)
        t->capacity = run->num_points < t->capacity ? t->capacity : 2 * run->num_points + 16;
    run->points = more;
    lm_point *p = &run->points[run->num_points];
    p->step = run->step;
    if (!held_out_loss(t, FEW_BATCHES, &p->loss))
        return false;
    run->num_points++;
    return true;
}

/* ------------------------------------------------------------------------------------------------------------ steps -- */
static void print_line(trainer *t, const char *held_out)
{
    const lm_run *run = &t->o->run;
    if (!t->lines)
        return;
    term_progress_clear(&t->progress);
    fprintf(t->lines, "step %6lld   loss %.4f  %a%s\n", (long long)run->step, run->losses[run->step - 1], run->losses[run->step - 1], held_out);
    fflush(t->lines);
}

static bool take_step(trainer *t)
{
    lm_run *run = &t->o->run;
    int64_t starts[LM_CHUNKS], step = run->step + 1;
    double loss, norm, start = term_now();
    lm_random_starts(&t->s->cfg, (uint64_t)step, t->text->train_size, starts);
    if (!lm_gradients(t->model, t->text->train, starts, &loss, t->error) ||
        !lm_update(t->model, step, train_rate(t->s->rate, step), clip_norm, &norm, t->error))
        return false;
    t->o->seconds += term_now() - start;
    if (!isfinite(loss) || !isfinite(norm)) {
        snprintf(t->error, LM_ERROR, "the loss of step %lld is not a number any more: try a smaller --lr than %g", (long long)step, t->s->rate);
        return false;
    }
    run->losses[run->step++] = loss;
    return true;
}

static bool write_checkpoint(trainer *t)
{
    return !t->s->checkpoint || lm_checkpoint_write(t->s->checkpoint, t->model, &t->s->cfg, &t->o->run, t->error);
}

static bool take_steps(trainer *t)
{
    lm_run *run = &t->o->run;
    if (!run->step && !add_point(t))
        return false;
    while (run->step < t->s->steps) {
        char held_out[48] = "";
        if (!take_step(t))
            return false;
        bool stop = run->step % t->s->every == 0;
        if (stop && !add_point(t))
            return false;
        if (stop)
            snprintf(held_out, sizeof held_out, "   held out %.4f", run->points[run->num_points - 1].loss);
        if (stop || run->step <= 5 || run->step == t->s->steps)
            print_line(t, held_out);
        if (stop && run->step < t->s->steps && !write_checkpoint(t))
            return false;
        term_progress_update(&t->progress, run->step);
    }
    return write_checkpoint(t);
}

static bool finish(trainer *t)
{
    int64_t batches = t->text->held_out_size / t->s->cfg.tokens;
    batches = batches < 1 ? 1 : batches > MANY_BATCHES ? MANY_BATCHES : batches;
    t->o->held_out_bytes = batches * t->s->cfg.tokens;
    if (t->o->held_out_bytes > t->text->held_out_size) /* a short text: chunks overlap */
        t->o->held_out_bytes = t->text->held_out_size;
    return held_out_loss(t, batches, &t->o->held_out);
}

/* ------------------------------------------------------------------------------------------------------------- run -- */
static bool check_text(trainer *t)
{
    int64_t need = lm_chunk_bytes(&t->s->cfg), have = t->text->train_size < t->text->held_out_size ? t->text->train_size : t->text->held_out_size;
    if (have < need) {
        snprintf(t->error, LM_ERROR, "the text is too short: %lld bytes to learn from and %lld held out, but a chunk takes %lld; give more --text or fewer --tokens",
                 (long long)t->text->train_size, (long long)t->text->held_out_size, (long long)need);
        return false;
    }
    if (t->o->run.step && t->o->run.text != t->text->fingerprint)
        return fail(t, "the text is not the one that the checkpoint was trained on: give the same --text, or begin anew");
    t->o->run.text = t->text->fingerprint;
    return true;
}

bool train_resume(train_settings *s, train_outcome *outcome, char error[LM_ERROR])
{
    int32_t ranks = s->cfg.ranks;
    if (!lm_checkpoint_read(s->resume, &s->cfg, &outcome->run, error))
        return false;
    s->cfg.ranks = ranks;
    s->rate = outcome->run.rate;
    return true;
}

static bool prepare(trainer *t)
{
    const train_settings *s = t->s;
    lm_run *run = &t->o->run;
    run->rate = s->rate;
    t->o->first_step = run->step;
    if (run->step > s->steps) {
        snprintf(t->error, LM_ERROR, "%s has %lld steps already: --steps %lld is the number of all steps", s->resume, (long long)run->step, (long long)s->steps);
        return false;
    }
    double *losses = realloc(run->losses, sizeof *losses * (size_t)(s->steps + 1));
    run->losses = losses ? losses : run->losses;
    t->o->routes = calloc((size_t)(s->cfg.layers * s->cfg.experts), sizeof *t->o->routes);
    if (!losses || !t->o->routes)
        return fail(t, "out of memory");
    if (!check_text(t) || !(t->model = lm_open(&s->cfg, t->error)))
        return false;
    return !s->resume || lm_checkpoint_load(s->resume, t->model, t->error);
}

bool train_run(const train_settings *s, const lm_text *text, FILE *lines, train_outcome *outcome, char error[LM_ERROR])
{
    trainer t = {.s = s, .text = text, .o = outcome, .lines = lines, .error = error};
    bool ok = prepare(&t);
    if (ok) {
        term_progress_start(&t.progress, "training", "step", outcome->run.step, s->steps);
        ok = take_steps(&t) && finish(&t);
        term_progress_clear(&t.progress);
    }
    lm_close(t.model);
    return ok;
}

void train_outcome_free(train_outcome *outcome)
{
    lm_run_free(&outcome->run);
    free(outcome->routes);
    outcome->routes = NULL;
}
