/* Fitting figures of a profile to measured passes. */
#ifndef MK_SIM_CALIBRATE_H
#define MK_SIM_CALIBRATE_H

#include "sim/sim.h"

enum { SIM_MAX_FREE = 8 };

/* A measured pass: the case without its profile, and the seconds it took; or a forward and its backward in one time. */
typedef struct sim_record {
    sim_case c;
    bool both;                 /* the forward, then the backward, whatever c.pass says */
    double measured, predicted;
    sim_tables tables;         /* of sim_make_tables, made once */
    bool calibrate;            /* the fit sees it */
} sim_record;

/* Predicted seconds of a record on a profile; NaN if the simulation failed (out of memory). */
double sim_predict(const sim_record *r, const sim_profile *p);

/* Moves the named figures of *p so that the mean of squared logarithms of predicted / measured over the records with `calibrate` set is as
 * small as Nelder and Mead find it. Figures stay within a factor of 4 of where they start. Returns the number of simulations, or -1: some
 * name is no figure of a profile, or is 0. */
int sim_calibrate(sim_record *records, int num_records, sim_profile *p, const char *const *names, int num_names);

/* Fills `predicted` of all; returns the largest |predicted / measured - 1| of those with calibrate == which. */
double sim_predict_all(sim_record *records, int num_records, const sim_profile *p, bool which);

#endif
