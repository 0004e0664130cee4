/* mok simulate: tables for people, JSON for programs, SVG for documents. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "simulate.h"
#include "svg.h"
#include "term.h"

static const char *pass_name(mk_pass pass) { return pass == MK_PASS_BACKWARD ? "backward" : "forward"; }

static const char *const task_names[] = {
#define NAME(upper, lower) #lower,
    MK_TASK_LIST(NAME)
#undef NAME
};

/* ----------------------------------------------------------------------------------------------------------- text -- */

static void print_table(const simulate_view *v)
{
    term_table t;
    term_table_start(&t, "rllrrrrrrrr", (const char *[]){"ranks", "pass", "strategy", "ms", "TFLOP/s", "kernel", "before + after", "schedule", "exposed link", "rows max/mean", "against mok"});
    for (int i = 0; i < v->count; i++) {
        const simulate_run *run = &v->runs[i];
        const sim_result *r = &run->result;
        const simulate_run *ours = simulate_find(v, run->ranks, run->pass, SIM_STRATEGY_mok);
        term_table_cell(&t, "%d", run->ranks);
        term_table_cell(&t, "%s", pass_name(run->pass));
        term_table_cell(&t, "%s", sim_strategies[run->strategy].name);
        term_table_cell(&t, "%.3f", r->seconds * 1e3);
        term_table_cell(&t, "%.0f", r->flops / run->ranks / r->seconds * 1e-12);
        term_table_cell(&t, "%.3f", r->kernel * 1e3);
        term_table_cell(&t, "%.3f", (r->before + r->after) * 1e3);
        if (sim_strategies[run->strategy].phases || run->pass == MK_PASS_BACKWARD)
            term_table_cell(&t, "-");
        else
            term_table_cell(&t, "%.3f", r->schedule_seconds * 1e3);
        term_table_cell(&t, "%.3f (%.0f %%)", run->exposed * 1e3, 100 * run->exposed / r->seconds);
        term_table_cell(&t, "%.2f", r->rows_mean > 0 ? r->rows_max / r->rows_mean : 1);
        if (ours)
            term_table_cell(&t, "%.2f", r->seconds / ours->result.seconds);
        else
            term_table_cell(&t, "-");
    }
    term_table_print(&t, stdout);
}

static void print_stages(const simulate_run *run)
{
    term_table t;
    const sim_result *r = &run->result;
    term_table_start(&t, "lrrr", (const char *[]){"stage", "from ms", "to ms", "busy ms (mean of its actors)"});
    for (int k = 0; k < MK_NUM_TASK_KINDS; k++) {
        if (r->stage_last[k] <= r->stage_first[k])
            continue;
        term_table_cell(&t, "%s", task_names[k]);
        term_table_cell(&t, "%.3f", r->stage_first[k] * 1e3);
        term_table_cell(&t, "%.3f", r->stage_last[k] * 1e3);
        term_table_cell(&t, "%.3f", r->stage_busy[k] * 1e3);
    }
    term_table_print(&t, stdout);
}

/* A series as a curve of per-second (or mean) values up to `end`. */
static size_t curve_of(const sim_series *s, double end, double scale, double *x, double *y)
{
    size_t n = 0;
    for (; n < SIM_BINS && (double)n * s->width < end; n++) {
        x[n] = ((double)n + 0.5) * s->width * 1e3;
        y[n] = s->sum[n] / s->width * scale;
    }
    return n;
}

static void print_detail(const simulate_view *v, const simulate_run *run)
{
    const sim_result *r = &run->result;
    static double x[SIM_BINS], out[SIM_BINS], in[SIM_BINS];
    printf("\n%s, %s, %d ranks: ring %lld rows, minibatch %lld rows, %s\n", sim_strategies[run->strategy].name, pass_name(run->pass), run->ranks,
           (long long)(run->dims.ring_tiles * MK_ROW_TILE), (long long)((run->pass == MK_PASS_BACKWARD ? run->dims.mb_tiles_bwd : run->dims.mb_tiles_fwd) * MK_ROW_TILE),
           (run->pass == MK_PASS_BACKWARD ? v->s->comm_sms_bwd : v->s->comm_sms) ? "communication SMs" : "a dispatch warp in every SM");
    print_stages(run);
    printf("clusters: %.1f %% products, %.1f %% slowed by moved bytes, %.1f %% by memory, %.1f %% waiting for rows, %.1f %% for tasks, %.1f %% for their own results, %.1f %% at the end\n",
           100 * r->shares.compute, 100 * r->shares.copies, 100 * r->shares.memory, 100 * r->shares.rows, 100 * r->shares.tasks, 100 * r->shares.epilogue, 100 * r->shares.tail);
    printf("link: %s in the busier direction of a rank (largest %s), %.0f %% of the pushing rate while the kernel ran; signals %.1f us of each mover\n",
           term_bytes(r->link_bytes_mean).text, term_bytes(r->link_bytes_max).text, 100 * r->link_use, r->signal_seconds * 1e6);
    printf("rows: %s pulled (%s from peers), %s copied, %s padding; %s tasks, %s events, simulated in %s\n", term_count(r->rows_pulled).text, term_count(r->rows_pulled_peer).text,
           term_count(r->rows_copied).text, term_count(r->padding_rows).text, term_count(r->tasks).text, term_count(r->events).text, term_seconds(run->took).text);
    if (run->ranks == 1)
        return;
    size_t n = curve_of(&r->link_out, r->kernel, 1e-9 / run->ranks, x, out);
    curve_of(&r->link_in, r->kernel, 1e-9 / run->ranks, x, in);
    term_curve curves[] = {{"out", x, out, n}, {"in", x, in, n}};
    term_plot(stdout, "ms", "GB/s of a GPU's link", curves, 2, term_columns(stdout), 8);
}

void simulate_print_text(const simulate_view *v)
{
    const simulate_settings *s = v->s;
    bool detailed = v->count <= 4;
    printf("%s: %s; T %lld, %s, %s, routing %s, profile %s\n", s->name, s->shape, (long long)s->tokens, s->mxfp8 ? "MXFP8" : "BF16", s->sustained ? "sustained" : "burst", s->routing_text,
           s->profile.name);
    if (s->racks > 1)
        printf("%lld racks: times are the slowest rack's\n", (long long)s->racks);
    print_table(v);
    for (int i = 0; i < v->count && detailed; i++)
        if (!sim_strategies[v->runs[i].strategy].phases)
            print_detail(v, &v->runs[i]);
    if (s->moe_share > 0)
        for (int i = 0; i < v->count; i++) {
            double ratio = simulate_step_ratio(v, v->runs[i].ranks, v->runs[i].strategy);
            if (v->runs[i].pass == MK_PASS_BACKWARD && v->runs[i].strategy != s->baseline && isfinite(ratio))
                printf("step with %s on %d ranks x %lld racks: %.3f of the step with %s (%.2fx), where these layers were %.0f %% of it\n", sim_strategies[v->runs[i].strategy].name,
                       v->runs[i].ranks, (long long)s->racks, ratio, sim_strategies[s->baseline].name, 1 / ratio, 100 * s->moe_share);
        }
}

/* ----------------------------------------------------------------------------------------------------------- JSON -- */

static void series_json(json_writer *w, const char *key, const sim_series *s, double end)
{
    json_begin_object(w, key);
    json_double(w, "bin_seconds", s->width);
    json_begin_array(w, "sums");
    for (int i = 0; i < SIM_BINS && i * s->width < end; i++)
        json_double(w, NULL, s->sum[i]);
    json_end_array(w);
    json_end_object(w);
}

static void run_json(json_writer *w, const simulate_view *v, const simulate_run *run)
{
    const sim_result *r = &run->result;
    json_begin_object(w, NULL);
    json_int(w, "ranks", run->ranks);
    json_string(w, "pass", pass_name(run->pass));
    json_string(w, "strategy", sim_strategies[run->strategy].name);
    json_double(w, "seconds", r->seconds);
    json_double(w, "seconds_mean_of_racks", run->mean_seconds);
    json_double(w, "before", r->before);
    json_double(w, "kernel", r->kernel);
    json_double(w, "after", r->after);
    json_double(w, "schedule", r->schedule_seconds);
    json_double(w, "exposed_link", run->exposed);
    json_double(w, "flops", r->flops);
    json_int(w, "ring_rows", run->dims.ring_tiles * MK_ROW_TILE);
    json_int(w, "minibatch_rows", (run->pass == MK_PASS_BACKWARD ? run->dims.mb_tiles_bwd : run->dims.mb_tiles_fwd) * MK_ROW_TILE);
    json_begin_array(w, "stages");
    for (int k = 0; k < MK_NUM_TASK_KINDS; k++) {
        if (r->stage_last[k] <= r->stage_first[k])
            continue;
        json_begin_object(w, NULL);
        json_string(w, "stage", task_names[k]);
        json_double(w, "from", r->stage_first[k]);
        json_double(w, "to", r->stage_last[k]);
        json_double(w, "busy", r->stage_busy[k]);
        json_end_object(w);
    }
    json_end_array(w);
    const struct { const char *name; double value; } shares[] = {{"products", r->shares.compute}, {"moved_bytes", r->shares.copies}, {"memory", r->shares.memory}, {"rows", r->shares.rows},
                                                                 {"tasks", r->shares.tasks}, {"results", r->shares.epilogue}, {"end", r->shares.tail}};
    json_begin_object(w, "shares");
    for (size_t i = 0; i < sizeof shares / sizeof shares[0]; i++)
        json_double(w, shares[i].name, shares[i].value);
    json_end_object(w);
    json_double(w, "rows_mean", r->rows_mean);
    json_double(w, "rows_max", r->rows_max);
    json_double(w, "link_bytes_mean", r->link_bytes_mean);
    json_double(w, "link_bytes_max", r->link_bytes_max);
    json_double(w, "link_use", r->link_use);
    json_double(w, "signal_seconds", r->signal_seconds);
    json_int(w, "rows_pulled", r->rows_pulled);
    json_int(w, "rows_pulled_peer", r->rows_pulled_peer);
    json_int(w, "rows_copied", r->rows_copied);
    json_int(w, "padding_rows", r->padding_rows);
    json_int(w, "ring_rotations", r->ring_rotations);
    json_int(w, "tasks", r->tasks);
    json_double(w, "took", run->took);
    series_json(w, "link_out_bytes", &r->link_out, r->kernel);
    series_json(w, "link_in_bytes", &r->link_in, r->kernel);
    series_json(w, "ring_tile_seconds", &r->ring, r->kernel);
    double ratio = v->s->moe_share > 0 && run->pass == MK_PASS_BACKWARD ? simulate_step_ratio(v, run->ranks, run->strategy) : NAN;
    json_double(w, "step_ratio", ratio);
    json_end_object(w);
}

bool simulate_print_json(const simulate_view *v)
{
    json_writer w;
    const simulate_settings *s = v->s;
    json_writer_start(&w, stdout);
    json_begin_object(&w, NULL);
    shape_json(&w, "shape", s->name, &s->cfg);
    json_string(&w, "profile", s->profile.name);
    json_string(&w, "dtype", s->mxfp8 ? "mxfp8" : "bf16");
    json_string(&w, "mode", s->sustained ? "sustained" : "burst");
    json_string(&w, "routing", s->routing_text);
    json_int(&w, "seed", (int64_t)s->routing.seed);
    json_int(&w, "tokens", s->tokens);
    json_int(&w, "racks", s->racks);
    json_int(&w, "comm_sms", s->comm_sms);
    json_int(&w, "comm_sms_bwd", s->comm_sms_bwd);
    json_begin_array(&w, "runs");
    for (int i = 0; i < v->count; i++)
        run_json(&w, v, &v->runs[i]);
    json_end_array(&w);
    json_end_object(&w);
    return json_writer_finish(&w);
}

/* ------------------------------------------------------------------------------------------------------------ SVG -- */

/* Memory of a panel's curves: each has as many points as there can be. */
typedef struct points { double x[SIMULATE_MAX_RUNS], y[SIMULATE_MAX_RUNS]; } points;

static void scaling_panel(const simulate_view *v, mk_pass pass, svg_panel *panel, points *memory)
{
    *panel = (svg_panel){.title = pass == MK_PASS_BACKWARD ? "backward" : "forward", .x_label = "ranks", .y_label = "ms", .log_x = true};
    for (int i = 0; i < SIM_NUM_STRATEGIES; i++) {
        svg_line *line = &panel->lines[panel->num_lines];
        points *p = &memory[panel->num_lines];
        *line = (svg_line){.x = p->x, .y = p->y};
        for (int k = 0; k < v->count; k++)
            if (v->runs[k].pass == pass && v->runs[k].strategy == (sim_strategy_id)i) {
                p->x[line->count] = v->runs[k].ranks;
                p->y[line->count++] = v->runs[k].result.seconds * 1e3;
            }
        snprintf(line->label, sizeof line->label, "%s", sim_strategies[i].name);
        panel->num_lines += line->count > 0;
    }
}

/* Of strategy mok: link and ring over time. */
static void time_panels(const simulate_view *v, svg_panel *panels, size_t *num_panels, points *memory)
{
    static char titles[SVG_MAX_PANELS][96];
    for (int i = 0; i < v->count && *num_panels + 2 <= SVG_MAX_PANELS; i++) {
        const simulate_run *run = &v->runs[i];
        if (sim_strategies[run->strategy].phases || run->strategy != SIM_STRATEGY_mok)
            continue;
        svg_panel *link = &panels[*num_panels], *ring = link + 1;
        points *p = &memory[3 * *num_panels / 2];
        snprintf(titles[*num_panels], 96, "%s: link of a GPU, mean over ranks", pass_name(run->pass));
        snprintf(titles[*num_panels + 1], 96, "%s: rows in the ring, mean over ranks (ring: %lld)", pass_name(run->pass), (long long)run->dims.ring_tiles * MK_ROW_TILE);
        *link = (svg_panel){.title = titles[*num_panels], .x_label = "ms since the fused kernel's start", .y_label = "GB/s", .num_lines = 2};
        *ring = (svg_panel){.title = titles[*num_panels + 1], .x_label = link->x_label, .y_label = "rows", .num_lines = 1};
        const sim_result *r = &run->result;
        size_t out = curve_of(&r->link_out, r->kernel, 1e-9 / run->ranks, p[0].x, p[0].y), in = curve_of(&r->link_in, r->kernel, 1e-9 / run->ranks, p[1].x, p[1].y);
        size_t rows = curve_of(&r->ring, r->kernel, (double)MK_ROW_TILE / run->ranks, p[2].x, p[2].y);
        link->lines[0] = (svg_line){"out", p[0].x, p[0].y, out};
        link->lines[1] = (svg_line){"in", p[1].x, p[1].y, in};
        ring->lines[0] = (svg_line){"rows", p[2].x, p[2].y, rows};
        *num_panels += 2;
    }
}

bool simulate_draw(const simulate_view *v, const char *path, char *error, size_t error_size)
{
    svg_panel *panels = calloc(SVG_MAX_PANELS, sizeof *panels);
    points *memory = calloc(2 * SIM_NUM_STRATEGIES, sizeof *memory);
    size_t num_panels = 0;
    bool ok = panels && memory, several = false;
    for (int i = 1; i < v->count; i++)
        several |= v->runs[i].ranks != v->runs[0].ranks;
    if (ok && several) {
        if (v->s->forward)
            scaling_panel(v, MK_PASS_FORWARD, &panels[num_panels++], memory);
        if (v->s->backward)
            scaling_panel(v, MK_PASS_BACKWARD, &panels[num_panels++], memory + SIM_NUM_STRATEGIES);
    } else if (ok) {
        time_panels(v, panels, &num_panels, memory);
    }
    if (!ok)
        snprintf(error, error_size, "out of memory");
    ok = ok && svg_write(path, panels, num_panels, error, error_size);
    free(panels);
    free(memory);
    return ok;
}
