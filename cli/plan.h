/* mok plan: what plan.c finds out and plan_print.c shows. */
#ifndef MOK_CLI_PLAN_H
#define MOK_CLI_PLAN_H

#include "mok.h"

enum { PLAN_MAX_BUFFERS = 128 };

typedef struct plan_view {
    char name[64], shape[192];
    const char *note;
    mok_config cfg;
    mok_plan plan;
    mok_buffer_info buffers[PLAN_MAX_BUFFERS];
    int32_t num_buffers, ranks, rank;
    int32_t sms, tile_rows, tile_cols;
    const char *speed_of;  /* the machine whose speeds were assumed; NULL: both were given */
    double rate, link;     /* flop/s, bytes/s */
    char why_forward[384], why_backward[384], why_ring[384];
} plan_view;

bool plan_print_json(const plan_view *v); /* false if stdout fails */
void plan_print_text(const plan_view *v);

#endif
