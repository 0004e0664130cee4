/* mok check: the JSON for programs. */
#include <stdio.h>

#include "check.h"
#include "json.h"
#include "shape.h"

static void stats_json(json_writer *w, const mok_stats *t)
{
    json_int(w, "rows", t->rows);
    json_int(w, "rows_pulled", t->rows_pulled);
    json_int(w, "rows_pulled_peer", t->rows_pulled_peer);
    json_int(w, "rows_copied", t->rows_copied);
    json_int(w, "rows_replayed", t->rows_replayed);
    json_int(w, "rows_padding", t->rows_padding);
    json_int(w, "wgrad_continued", t->wgrad_continued);
    json_int(w, "bytes_pulled_peer", t->bytes_pulled_peer);
    json_int(w, "bytes_pushed_peer", t->bytes_pushed_peer);
}

/* Per output: the same bits in this run, or (NULL) in all runs of all routings? */
static void bits_json(json_writer *w, const check_report *r, const check_run *only)
{
    json_begin_object(w, "identical_bits");
    for (int i = 0; i < CHECK_NUM_OUTPUTS; i++) {
        uint32_t differing = only ? only->differing : 0;
        for (int k = 0; k < CHECK_ROUTINGS && !only; k++)
            for (int64_t j = 0; j < r->routings[k].num_runs; j++)
                differing |= r->routings[k].runs[j].differing;
        if (check_has_output(r, i))
            json_bool(w, check_output_names[i], !(differing >> i & 1));
    }
    json_end_object(w);
}

static void run_json(json_writer *w, const check_report *r, const check_run *run)
{
    json_begin_object(w, NULL);
    json_string(w, "variant", run->variant);
    json_int(w, "ranks", run->ranks);
    json_int(w, "ring_rows", run->ring_rows);
    json_int(w, "minibatch_rows", run->minibatch_rows);
    json_int(w, "minibatch_rows_bwd", run->minibatch_rows_bwd);
    json_int(w, "saved_rows", run->saved_rows);
    json_int(w, "ring_rotations", run->rotations);
    stats_json(w, &run->total);
    json_bool(w, "equals_plan", !*run->plan_difference);
    bits_json(w, r, run);
    json_end_object(w);
}

static void routing_json(json_writer *w, const check_report *r, const check_routing *routing)
{
    json_begin_object(w, NULL);
    json_string(w, "routing", routing->name);
    json_int(w, "rows", routing->rows);
    json_int(w, "busiest_expert_rows", routing->busiest);
    json_begin_array(w, "errors");
    for (int i = 0; i < CHECK_NUM_OUTPUTS; i++) {
        if (!check_has_output(r, i))
            continue;
        json_begin_object(w, NULL);
        json_string(w, "output", check_output_names[i]);
        json_double(w, "error", routing->error[i]);
        if (r->settings.cfg.dtype == MOK_MXFP8)
            json_double(w, "largest_error", routing->largest[i]);
        else
            json_double(w, "bf16_chain_error", routing->chain_error[i]);
        json_bool(w, "ok", check_error_ok(routing, i));
        json_end_object(w);
    }
    json_end_array(w);
    json_begin_array(w, "runs");
    for (int64_t i = 0; i < routing->num_runs; i++)
        run_json(w, r, &routing->runs[i]);
    json_end_array(w);
    json_end_object(w);
}

bool check_print_json(const check_report *r)
{
    json_writer w;
    int64_t rotations = 0;
    bool equals_plan = true;
    mok_stats all = check_total(&r->routings[0], NULL, &rotations), skewed = check_total(&r->routings[1], NULL, &rotations);
    check_add_stats(&all, &skewed);
    for (int k = 0; k < CHECK_ROUTINGS; k++)
        for (int64_t i = 0; i < r->routings[k].num_runs; i++)
            equals_plan &= !*r->routings[k].runs[i].plan_difference;
    json_writer_start(&w, stdout);
    json_begin_object(&w, NULL);
    json_bool(&w, "passed", r->num_failures == 0);
    json_begin_array(&w, "failures");
    for (int64_t i = 0; i < r->num_failures && i < CHECK_MAX_SENTENCES; i++)
        json_string(&w, NULL, r->sentences[i]);
    json_end_array(&w);
    shape_json(&w, "shape", "custom shape", &r->settings.cfg);
    json_int(&w, "tokens", r->settings.tokens);
    json_int(&w, "seed", (int64_t)r->settings.seed);
    json_double(&w, "dropped", r->settings.dropped);
    json_double(&w, "seconds", r->seconds);
    bits_json(&w, r, NULL);
    json_bool(&w, "equals_plan", equals_plan);
    json_int(&w, "small_ring_rotations", rotations);
    stats_json(&w, &all);
    json_begin_array(&w, "routings");
    for (int k = 0; k < CHECK_ROUTINGS; k++)
        routing_json(&w, r, &r->routings[k]);
    json_end_array(&w);
    json_end_object(&w);
    return json_writer_finish(&w);
}
