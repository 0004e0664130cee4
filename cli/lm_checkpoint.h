/* A training run on disk: the figures of the model, the curve so far, every parameter with its optimizer state. One file for all ranks, which
 * does not say how many there were: any number may go on.
 *
 *   "mok-lm 1" | head | train losses [step] | held-out points | per tensor: value, m, v | checksum of all before
 *
 * In the byte order of the machine that wrote it. */
#ifndef MOK_CLI_LM_CHECKPOINT_H
#define MOK_CLI_LM_CHECKPOINT_H

#include "lm.h"

typedef struct lm_point { int64_t step; double loss; } lm_point;

/* Where a run stands. */
typedef struct lm_run {
    int64_t step;           /* steps taken */
    double rate;            /* learning rate */
    uint64_t text;          /* fingerprint of the text */
    double *losses;         /* [step] of the batches, before each step */
    int64_t num_points;
    lm_point *points;       /* [num_points] held-out losses */
} lm_run;

/* Written beside `path` first, then renamed: a reader, or a crash, finds the old file or the new one. */
bool lm_checkpoint_write(const char *path, const lm *model, const lm_config *cfg, const lm_run *run, char error[LM_ERROR]);

/* Checks the whole file and fills cfg (but for ranks) and run, whose arrays go to lm_run_free. Then, with a model of cfg, its tensors. */
bool lm_checkpoint_read(const char *path, lm_config *cfg, lm_run *run, char error[LM_ERROR]);
bool lm_checkpoint_load(const char *path, lm *model, char error[LM_ERROR]);
void lm_run_free(lm_run *run);

#endif
