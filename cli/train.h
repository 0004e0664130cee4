/* What the train*.c files share: settings and outcome of a run. */
#ifndef MOK_CLI_TRAIN_H
#define MOK_CLI_TRAIN_H

#include <stdio.h>

#include "lm_checkpoint.h"
#include "lm_text.h"

typedef struct train_settings {
    lm_config cfg;
    int64_t steps, every;     /* every: steps between held-out losses, and between checkpoints */
    double rate;
    const char *checkpoint, *resume, *csv;
    bool json;
} train_settings;

typedef struct train_outcome {
    lm_run run;
    int64_t first_step;       /* steps of the run it was resumed from */
    double held_out;          /* over the whole held-out text, or evenly spread batches of it, at the end */
    int64_t held_out_bytes;
    double seconds;           /* of this run's steps, without held-out batches */
    int64_t *routes;          /* [layers, experts] of the last held-out loss */
} train_outcome;

/* Fills s->cfg (but for ranks), s->rate and outcome->run from s->resume. */
bool train_resume(train_settings *s, train_outcome *outcome, char error[LM_ERROR]);

/* Trains, from outcome->run on. False and one sentence if a rank fails, the loss stops being a number, or a file cannot be read or written.
 * Prints a line per step of interest on `lines`, if not NULL. train_outcome_free in every case. */
bool train_run(const train_settings *s, const lm_text *text, FILE *lines, train_outcome *outcome, char error[LM_ERROR]);
void train_outcome_free(train_outcome *outcome);

/* The learning rate of a step: rises over the first steps, then falls with the square root; nothing in it depends on how many there will be. */
double train_rate(double rate, int64_t step);

bool train_print_text(const train_settings *s, const lm_text *text, const train_outcome *o);
bool train_print_json(const train_settings *s, const lm_text *text, const train_outcome *o);
bool train_write_csv(const train_settings *s, const train_outcome *o, char error[LM_ERROR]);

#endif
