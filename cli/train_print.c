/* What mok train shows: text, JSON, CSV. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "json.h"
#include "term.h"
#include "train.h"

/* The points of both curves as doubles, for the terminal and the CSV file. */
typedef struct curves {
    double *train_x, *train_y, *held_x, *held_y;
    term_curve curve[2];
} curves;

static void free_curves(curves *c)
{
    free(c->train_x);
    free(c->train_y);
    free(c->held_x);
    free(c->held_y);
}

static bool make_curves(curves *c, const lm_run *run)
{
    size_t steps = (size_t)run->step, points = (size_t)run->num_points;
    *c = (curves){malloc(sizeof(double) * (steps + 1)), malloc(sizeof(double) * (steps + 1)), malloc(sizeof(double) * (points + 1)),
                  malloc(sizeof(double) * (points + 1)), {{0}}};
    if (!c->train_x || !c->train_y || !c->held_x || !c->held_y) {
        free_curves(c);
        return false;
    }
    for (size_t i = 0; i < steps; i++) {
        c->train_x[i] = (double)(i + 1);
        c->train_y[i] = run->losses[i];
    }
    for (size_t i = 0; i < points; i++) {
        c->held_x[i] = (double)run->points[i].step;
        c->held_y[i] = run->points[i].loss;
    }
    c->curve[0] = (term_curve){"train", c->train_x, c->train_y, steps};
    c->curve[1] = (term_curve){"held out", c->held_x, c->held_y, points};
    return true;
}

bool train_write_csv(const train_settings *s, const train_outcome *o, char error[LM_ERROR])
{
    curves c;
    if (!s->csv)
        return true;
    if (!make_curves(&c, &o->run)) {
        snprintf(error, LM_ERROR, "out of memory");
        return false;
    }
    bool ok = term_write_csv(s->csv, "step", c.curve, 2, error, LM_ERROR);
    free_curves(&c);
    return ok;
}

/* Share of the routes of one layer, in percent. */
static double share(const train_settings *s, const train_outcome *o, int64_t layer, int64_t expert)
{
    const int64_t *routes = o->routes + layer * s->cfg.experts;
    int64_t sum = 0;
    for (int64_t e = 0; e < s->cfg.experts; e++)
        sum += routes[e];
    return sum ? 100.0 * (double)routes[expert] / (double)sum : 0;
}

/* One row per expert; many experts: the busiest and the idlest of each layer only. */
static bool print_balance(const train_settings *s, const train_outcome *o)
{
    term_table t;
    const lm_config *c = &s->cfg;
    enum { MOST_ROWS = 32 };
    char name[16][24], align[18] = "r";
    const char *headers[17] = {"expert"};
    int64_t layers = c->layers < 16 ? c->layers : 16;
    if (c->experts > MOST_ROWS)
        return true;
    for (int64_t l = 0; l < layers; l++) {
        snprintf(name[l], sizeof name[l], "layer %lld", (long long)l + 1);
        headers[l + 1] = name[l];
        align[l + 1] = 'r';
    }
    align[layers + 1] = '\0';
    term_table_start(&t, align, headers);
    for (int64_t e = 0; e < c->experts; e++) {
        term_table_cell(&t, "%lld", (long long)e);
        for (int64_t l = 0; l < layers; l++)
            term_table_cell(&t, "%.1f %%", share(s, o, l, e));
    }
    printf("\nShare of the held-out bytes' routes per expert (balanced: %.1f %%):\n", 100.0 / (double)c->experts);
    return term_table_print(&t, stdout);
}

bool train_print_text(const train_settings *s, const lm_text *text, const train_outcome *o)
{
    curves c;
    const lm_run *run = &o->run;
    double tokens = (double)(run->step - o->first_step) * (double)s->cfg.tokens;
    if (!make_curves(&c, run))
        return false;
    printf("\n");
    bool ok = run->step < 2 || term_plot(stdout, "step", "loss (nats per byte)", c.curve, 2, term_columns(stdout), 18);
    free_curves(&c);
    if (s->cfg.drop_routes)
        printf("\nEvery route was dropped: no expert saw a byte.\n");
    else
        ok = ok && print_balance(s, o);
    printf("\nheld-out loss %.4f nats per byte  %a\n", o->held_out, o->held_out);
    printf("over %s of %s held-out bytes; %s steps, %s bytes per second", term_count(o->held_out_bytes).text, term_count(text->held_out_size).text,
           term_count(run->step).text, term_count((int64_t)(o->seconds > 0 ? tokens / o->seconds : 0)).text);
    printf(" (%s for %s steps on %d rank%s)\n", term_seconds(o->seconds).text, term_count(run->step - o->first_step).text, s->cfg.ranks, s->cfg.ranks == 1 ? "" : "s");
    if (s->checkpoint)
        printf("checkpoint: %s\n", s->checkpoint);
    if (s->csv)
        printf("curve: %s\n", s->csv);
    return ok;
}

static void json_loss(json_writer *w, int64_t step, double loss)
{
    char hex[40];
    snprintf(hex, sizeof hex, "%a", loss);
    json_begin_object(w, NULL);
    json_int(w, "step", step);
    json_double(w, "loss", loss);
    json_string(w, "hex", hex);
    json_end_object(w);
}

static void json_figures(json_writer *w, const train_settings *s, const lm_text *text)
{
    const lm_config *c = &s->cfg;
    json_begin_object(w, "model");
    json_int(w, "hidden", c->hidden);
    json_int(w, "intermediate", c->intermediate);
    json_int(w, "shared_intermediate", c->shared_intermediate);
    json_int(w, "layers", c->layers);
    json_int(w, "experts", c->experts);
    json_int(w, "topk", c->topk);
    json_int(w, "context", c->context);
    json_int(w, "seed", (int64_t)c->seed);
    json_double(w, "learning_rate", s->rate);
    json_bool(w, "drop_routes", c->drop_routes);
    json_string(w, "dtype", c->mxfp8 ? "mxfp8" : "bf16");
    json_end_object(w);
    json_begin_object(w, "text");
    json_int(w, "files", text->files);
    json_int(w, "files_held_out", text->files_held_out);
    json_int(w, "bytes", text->train_size);
    json_int(w, "bytes_held_out", text->held_out_size);
    json_end_object(w);
    json_int(w, "ranks", c->ranks);
    json_int(w, "tokens_per_step", c->tokens);
}

static void json_outcome(json_writer *w, const train_settings *s, const train_outcome *o)
{
    char hex[40];
    const lm_run *run = &o->run;
    json_begin_array(w, "losses");
    for (int64_t i = 0; i < run->step; i++)
        json_loss(w, i + 1, run->losses[i]);
    json_end_array(w);
    json_begin_array(w, "held_out");
    for (int64_t i = 0; i < run->num_points; i++)
        json_loss(w, run->points[i].step, run->points[i].loss);
    json_end_array(w);
    json_begin_array(w, "expert_shares_percent");
    for (int64_t l = 0; l < s->cfg.layers; l++) {
        json_begin_array(w, NULL);
        for (int64_t e = 0; e < s->cfg.experts; e++)
            json_double(w, NULL, share(s, o, l, e));
        json_end_array(w);
    }
    json_end_array(w);
    snprintf(hex, sizeof hex, "%a", o->held_out);
    json_double(w, "held_out_loss", o->held_out);
    json_string(w, "held_out_loss_hex", hex);
    json_int(w, "held_out_bytes", o->held_out_bytes);
    json_int(w, "resumed_from_step", o->first_step);
    json_double(w, "seconds", o->seconds);
    json_double(w, "tokens_per_second", o->seconds > 0 ? (double)((run->step - o->first_step) * s->cfg.tokens) / o->seconds : 0);
}

bool train_print_json(const train_settings *s, const lm_text *text, const train_outcome *o)
{
    json_writer w;
    json_writer_start(&w, stdout);
    json_begin_object(&w, NULL);
    json_figures(&w, s, text);
    json_outcome(&w, s, o);
    json_end_object(&w);
    return json_writer_finish(&w);
}
