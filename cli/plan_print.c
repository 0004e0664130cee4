/* mok plan: the table for people and the JSON for programs. */
#include <math.h>
#include <stdio.h>

#include "json.h"
#include "plan.h"
#include "shape.h"
#include "term.h"

static double compute_seconds(const plan_view *v, const mok_pass_plan *pass) { return pass->flops / v->rate; }
static double link_seconds(const plan_view *v, const mok_pass_plan *pass) { return fmax(pass->link_bytes_in, pass->link_bytes_out) / v->link; }
/* Of what is known: fmax ignores a NaN. */
static double floor_seconds(const plan_view *v, const mok_pass_plan *pass) { return fmax(compute_seconds(v, pass), link_seconds(v, pass)); }

enum { NUM_GROUPS = 5 };

static int64_t group_bytes(const mok_plan *p, mok_memory_kind kind)
{
    const int64_t bytes[NUM_GROUPS] = {p->heap_bytes, p->local_bytes, p->schedule_bytes, p->context_bytes, p->wide_bytes};
    return bytes[kind];
}

static const char *const group_names[] = {"heap", "local", "schedule", "context", "wide"};
static const char *const group_texts[] = {"symmetric heap: peers read and write it", "the rest of the workspace",
                                          "the caller's, one per routing alive", "the caller's, one per forward whose backward is still to come",
                                          "the caller's, for each quantisation of a layer's weights, if kept widened (mok_mx_widen)"};

/* ----------------------------------------------------------------------------------------------------------- JSON -- */

static void pass_json(json_writer *w, const char *key, const plan_view *v, const mok_pass_plan *p, const char *why)
{
    json_begin_object(w, key);
    json_double(w, "two_wave_rows", p->two_wave_rows);
    json_int(w, "minibatch_rows", p->minibatch_rows);
    json_int(w, "narrowest_gemm", p->narrowest_gemm);
    json_string(w, "why", why);
    json_double(w, "flops", p->flops);
    json_double(w, "link_bytes_in", p->link_bytes_in);
    json_double(w, "link_bytes_out", p->link_bytes_out);
    json_double(w, "compute_seconds", compute_seconds(v, p));
    json_double(w, "link_seconds", link_seconds(v, p));
    json_double(w, "floor_seconds", floor_seconds(v, p));
    json_end_object(w);
}

/* Routed weights of the rank: bf16, and what both of their quantisations take (MXFP8), kept once per version by whoever owns them. */
static int64_t weight_bytes(const plan_view *v) { return v->plan.experts_count * 3 * v->cfg.intermediate * v->cfg.hidden * 2; }
static int64_t quantised_bytes(const plan_view *v)
{
    int64_t h = v->cfg.hidden, i = v->cfg.intermediate, scales = 3 * (mok_mx_scale_bytes(i, h) + mok_mx_scale_bytes(h, i));
    return v->cfg.dtype == MOK_MXFP8 ? weight_bytes(v) + v->plan.experts_count * scales : 0;
}

static void memory_json(json_writer *w, const plan_view *v)
{
    json_begin_object(w, "memory");
    for (int k = 0; k < NUM_GROUPS; k++) {
        char key[32];
        snprintf(key, sizeof key, "%s_bytes", group_names[k]);
        json_int(w, key, group_bytes(&v->plan, (mok_memory_kind)k));
    }
    json_int(w, "workspace_bytes", v->plan.heap_bytes + v->plan.local_bytes);
    json_int(w, "weight_bytes", weight_bytes(v));
    json_int(w, "quantised_weight_bytes", quantised_bytes(v));
    json_begin_array(w, "buffers");
    for (int32_t i = 0; i < v->num_buffers; i++) {
        json_begin_object(w, NULL);
        json_string(w, "name", v->buffers[i].name);
        json_string(w, "memory", group_names[v->buffers[i].kind]);
        json_int(w, "offset", v->buffers[i].offset);
        json_int(w, "bytes", v->buffers[i].bytes);
        json_end_object(w);
    }
    json_end_array(w);
    json_end_object(w);
}

bool plan_print_json(const plan_view *v)
{
    const mok_plan *p = &v->plan;
    json_writer w;
    json_writer_start(&w, stdout);
    json_begin_object(&w, NULL);
    shape_json(&w, "shape", v->name, &v->cfg);
    json_string(&w, "note", v->note);
    json_int(&w, "ranks", v->ranks);
    json_int(&w, "rank", v->rank);
    json_int(&w, "tokens", v->cfg.max_tokens);
    json_begin_object(&w, "machine");
    json_int(&w, "sms", v->sms);
    json_int(&w, "tile_rows", v->tile_rows);
    json_int(&w, "tile_cols", v->tile_cols);
    json_double(&w, "flops_per_second", v->rate);
    json_double(&w, "link_bytes_per_second", v->link);
    json_end_object(&w);
    json_begin_object(&w, "experts");
    json_int(&w, "first", p->experts_first);
    json_int(&w, "count", p->experts_count);
    json_end_object(&w);
    json_begin_object(&w, "rows");
    json_int(&w, "balanced", p->balanced_rows);
    json_int(&w, "capacity", p->capacity_rows);
    json_int(&w, "tile", p->row_tile);
    json_int(&w, "saved", p->saved_rows);
    json_end_object(&w);
    pass_json(&w, "forward", v, &p->forward, v->why_forward);
    pass_json(&w, "backward", v, &p->backward, v->why_backward);
    json_begin_object(&w, "ring");
    json_int(&w, "rows", p->ring_rows);
    json_int(&w, "smallest_rows", p->smallest_ring_rows);
    json_string(&w, "deadlock_check", "passed");
    json_string(&w, "why", v->why_ring);
    json_end_object(&w);
    memory_json(&w, v);
    json_double(&w, "floor_seconds", floor_seconds(v, &p->forward) + floor_seconds(v, &p->backward));
    json_end_object(&w);
    return json_writer_finish(&w);
}

/* ----------------------------------------------------------------------------------------------------------- text -- */

static term_text seconds_or_dash(double seconds) { return isnan(seconds) ? (term_text){"-"} : term_seconds(seconds); }

static void pass_row(term_table *t, const char *name, const plan_view *v, const mok_pass_plan *p)
{
    term_table_cell(t, "%s", name);
    term_table_cell(t, p->two_wave_rows > 0 ? "%s" : "-", term_count((int64_t)ceil(p->two_wave_rows)).text);
    term_table_cell(t, "%s", term_count(p->minibatch_rows).text);
    term_table_cell(t, "%s", term_si(p->flops, "FLOP").text);
    term_table_cell(t, "%s", term_si(p->link_bytes_in, "B").text);
    term_table_cell(t, "%s", term_si(p->link_bytes_out, "B").text);
    term_table_cell(t, "%s", seconds_or_dash(compute_seconds(v, p)).text);
    term_table_cell(t, "%s", seconds_or_dash(link_seconds(v, p)).text);
    term_table_cell(t, "%s", seconds_or_dash(floor_seconds(v, p)).text);
}

static void print_memory(const plan_view *v)
{
    term_table t;
    printf("\n");
    term_table_start(&t, "llr", (const char *[]){"memory", "buffer", "bytes"});
    for (int k = 0; k < NUM_GROUPS; k++) {
        for (int32_t i = 0; i < v->num_buffers; i++)
            if ((int)v->buffers[i].kind == k) {
                term_table_cell(&t, "%s", group_names[k]);
                term_table_cell(&t, "%s", v->buffers[i].name);
                term_table_cell(&t, "%s", term_bytes((double)v->buffers[i].bytes).text);
            }
    }
    term_table_print(&t, stdout);
    printf("\n");
    term_table_start(&t, "lrl", (const char *[]){"memory", "total", "what"});
    for (int k = 0; k < NUM_GROUPS; k++) {
        term_table_cell(&t, "%s", group_names[k]);
        term_table_cell(&t, "%s", term_bytes((double)group_bytes(&v->plan, (mok_memory_kind)k)).text);
        term_table_cell(&t, "%s", group_texts[k]);
    }
    term_table_print(&t, stdout);
}

static void print_floor(const plan_view *v)
{
    double both = floor_seconds(v, &v->plan.forward) + floor_seconds(v, &v->plan.backward);
    if (isnan(both)) {
        printf("floor               not known for a CPU: give --rate and --link\n");
        return;
    }
    printf("floor               %s for both passes", term_seconds(both).text);
    if (!isnan(v->rate))
        printf(", at %s", term_si(v->rate, "FLOP/s").text);
    if (!isnan(v->link))
        printf(", at %s per direction", term_si(v->link, "B/s").text);
    if (v->speed_of)
        printf(" (%s, dense BF16 peak; --rate and --link change them)", v->speed_of);
    printf("\n");
}

void plan_print_text(const plan_view *v)
{
    const mok_plan *p = &v->plan;
    term_table t;
    printf("%s: %s\n", v->name, v->shape);
    if (v->note)
        printf("note: %s\n", v->note);
    printf("%d rank%s, %s tokens each; rank %d ", v->ranks, v->ranks == 1 ? "" : "s", term_count(v->cfg.max_tokens).text, v->rank);
    if (p->experts_count == 1)
        printf("has expert %lld\n", (long long)p->experts_first);
    else if (p->experts_count)
        printf("has experts %lld to %lld\n", (long long)p->experts_first, (long long)(p->experts_first + p->experts_count - 1));
    else
        printf("has no experts\n");
    printf("rows of this rank: %s if routing is balanced, %s at most (capacity)\n\n", term_count(p->balanced_rows).text, term_count(p->capacity_rows).text);
    term_table_start(&t, "lrrrrrrrr", (const char *[]){"pass", "two waves", "minibatch", "work", "link in", "link out", "compute", "link", "floor"});
    pass_row(&t, "forward", v, &p->forward);
    pass_row(&t, "backward", v, &p->backward);
    term_table_print(&t, stdout);
    printf("\nminibatch forward   %s\nminibatch backward  %s\nring                %s\n", v->why_forward, v->why_backward, v->why_ring);
    printf("saved               gate and up of %s rows per forward; rows beyond are computed again in the backward\n", term_count(p->saved_rows).text);
    printf("weights             %s of routed bf16 weights", term_bytes((double)weight_bytes(v)).text);
    if (v->cfg.dtype == MOK_MXFP8)
        printf("; %s for both quantisations, where they are kept (mok_mx_quantise)", term_bytes((double)quantised_bytes(v)).text);
    printf("\n");
    print_floor(v);
    print_memory(v);
}
