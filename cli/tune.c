/* mok tune: communication SMs, minibatch and ring for a machine, by simulating them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "json.h"
#include "profile_file.h"
#include "simulate.h"
#include "svg.h"
#include "term.h"

enum { MAX_COMM = 8, MAX_MINIBATCH = 8, MAX_RING = 6, MAX_SEEDS = 16, NUM_PASSES = 2 };

/* Settings of one pass. */
typedef struct choice { int64_t comm_sms, minibatch; double seconds; } choice;

typedef struct tuning {
    simulate_settings s;
    int32_t ranks;
    int64_t seeds;
    bool wanted[NUM_PASSES];                       /* forward, backward */
    int64_t comm[MAX_COMM], minibatch[NUM_PASSES][MAX_MINIBATCH], ring[MAX_RING];
    int num_comm, num_minibatch[NUM_PASSES], num_ring;
    double grid[NUM_PASSES][MAX_COMM][MAX_MINIBATCH]; /* seconds, at the ring that the plan chooses; NaN: not legal */
    double ring_seconds[MAX_RING];                 /* both passes with their best */
    int64_t base_ring, best_ring;
    choice base[NUM_PASSES], best[NUM_PASSES], second[NUM_PASSES];
    double seed_base[MAX_SEEDS], seed_best[MAX_SEEDS]; /* both passes, by routing */
    int simulations;
} tuning;

static const mk_pass pass_of[NUM_PASSES] = {MK_PASS_FORWARD, MK_PASS_BACKWARD};
static const char *const pass_names[NUM_PASSES] = {"forward", "backward"};

/* Seconds of a pass with these settings; NaN if they are not legal. */
static bool time_of(tuning *t, int pass, int64_t comm_sms, int64_t minibatch, int64_t ring, uint64_t seed, double *seconds, char *error, size_t error_size)
{
    static simulate_run run;
    simulate_settings s = t->s;
    *seconds = NAN;
    if (ring && 2 * minibatch > ring)
        return true;
    s.cfg.ring_rows = ring;
    s.cfg.minibatch_rows = s.cfg.minibatch_rows_bwd = minibatch;
    s.comm_sms = s.comm_sms_bwd = (int32_t)comm_sms;
    s.routing.seed = seed;
    run = (simulate_run){.ranks = t->ranks, .pass = pass_of[pass], .strategy = SIM_STRATEGY_mok};
    if (!simulate_one(&s, &run, error, error_size))
        return false;
    t->simulations++;
    *seconds = run.result.seconds;
    return true;
}

static void add_value(int64_t *values, int *count, int max, int64_t value)
{
    for (int i = 0; i < *count; i++)
        if (values[i] == value)
            return;
    if (*count < max && value > 0)
        values[(*count)++] = value;
}

/* Around what mok_plan_query chooses. */
static bool list_candidates(tuning *t, char *error, size_t error_size)
{
    static const double factors[] = {0.25, 0.5, 1, 1.5, 2, 3}, ring_factors[] = {0.25, 0.5, 1, 2};
    static const int64_t comm[] = {0, 8, 16, 24, 32, 48};
    sim_case c;
    mok_config cfg = t->s.cfg;
    cfg.max_tokens = t->s.tokens;
    if (!case_of(&cfg, t->ranks, &t->s.profile, MK_PASS_FORWARD, &c, error, error_size))
        return false;
    t->base_ring = t->best_ring = c.dims.ring_tiles * MK_ROW_TILE;
    t->base[0].minibatch = c.dims.mb_tiles_fwd * MK_ROW_TILE;
    t->base[1].minibatch = c.dims.mb_tiles_bwd * MK_ROW_TILE;
    for (size_t i = 0; i < sizeof comm / sizeof comm[0]; i++)
        if (comm[i] + t->s.profile.cluster <= t->s.profile.sms)
            t->comm[t->num_comm++] = comm[i];
    for (int pass = 0; pass < NUM_PASSES; pass++)
        for (size_t i = 0; i < sizeof factors / sizeof factors[0]; i++)
            add_value(t->minibatch[pass], &t->num_minibatch[pass], MAX_MINIBATCH, mk_round_up((int64_t)((double)t->base[pass].minibatch * factors[i]), MK_ROW_TILE));
    for (size_t i = 0; i < sizeof ring_factors / sizeof ring_factors[0]; i++)
        add_value(t->ring, &t->num_ring, MAX_RING, mk_round_up((int64_t)((double)t->base_ring * ring_factors[i]), MK_ROW_TILE));
    return true;
}

/* Candidates come with minibatches ascending: a larger one has to be better by more than a thousandth. */
static void take_best(tuning *t, int pass, choice c)
{
    if (!(c.seconds < 0.999 * t->best[pass].seconds)) {
        if (c.seconds < t->second[pass].seconds)
            t->second[pass] = c;
        return;
    }
    t->second[pass] = t->best[pass];
    t->best[pass] = c;
}

static bool search_grid(tuning *t, int pass, term_progress *progress, char *error, size_t error_size)
{
    t->best[pass] = t->second[pass] = (choice){0, 0, INFINITY};
    for (int i = 0; i < t->num_comm; i++)
        for (int k = 0; k < t->num_minibatch[pass]; k++) {
            choice c = {t->comm[i], t->minibatch[pass][k], NAN};
            if (!time_of(t, pass, c.comm_sms, c.minibatch, t->base_ring, t->s.routing.seed, &c.seconds, error, error_size))
                return false;
            term_progress_update(progress, t->simulations);
            t->grid[pass][i][k] = c.seconds;
            if (c.comm_sms == 0 && c.minibatch == t->base[pass].minibatch)
                t->base[pass] = c;
            take_best(t, pass, c);
        }
    return true;
}

/* The smallest ring that is within half a per cent of the best: memory is worth more. */
static bool search_ring(tuning *t, term_progress *progress, char *error, size_t error_size)
{
    double best = INFINITY;
    for (int i = 0; i < t->num_ring; i++) {
        t->ring_seconds[i] = 0;
        for (int pass = 0; pass < NUM_PASSES; pass++) {
            double seconds = 0;
            if (t->wanted[pass] && !time_of(t, pass, t->best[pass].comm_sms, t->best[pass].minibatch, t->ring[i], t->s.routing.seed, &seconds, error, error_size))
                return false;
            t->ring_seconds[i] += seconds;
            term_progress_update(progress, t->simulations);
        }
        best = t->ring_seconds[i] < best ? t->ring_seconds[i] : best;
    }
    for (int i = t->num_ring - 1; i >= 0; i--) /* ascending in size */
        if (t->ring_seconds[i] <= 1.005 * best)
            t->best_ring = t->ring[i];
    return true;
}

static bool try_seeds(tuning *t, term_progress *progress, char *error, size_t error_size)
{
    for (int64_t seed = 0; seed < t->seeds; seed++)
        for (int pass = 0; pass < NUM_PASSES; pass++) {
            double base, best;
            if (!t->wanted[pass])
                continue;
            if (!time_of(t, pass, 0, t->base[pass].minibatch, t->base_ring, t->s.routing.seed + 1 + (uint64_t)seed, &base, error, error_size) ||
                !time_of(t, pass, t->best[pass].comm_sms, t->best[pass].minibatch, t->best_ring, t->s.routing.seed + 1 + (uint64_t)seed, &best, error, error_size))
                return false;
            t->seed_base[seed] += base;
            t->seed_best[seed] += best;
            term_progress_update(progress, t->simulations);
        }
    return true;
}

static void gain(const tuning *t, double *least, double *mean, double *most)
{
    *least = INFINITY;
    *most = -INFINITY;
    *mean = 0;
    for (int64_t i = 0; i < t->seeds; i++) {
        double g = t->seed_base[i] / t->seed_best[i] - 1;
        *least = fmin(*least, g);
        *most = fmax(*most, g);
        *mean += g / (double)t->seeds;
    }
}

/* How sure: the gain against its spread over routings, and against what the profile is known to miss. */
static const char *verdict(const tuning *t)
{
    double least, mean, most;
    gain(t, &least, &mean, &most);
    if (least <= 0)
        return "not sure: on some routing the plan's own choice is as good; keep it";
    if (mean * 100 < t->s.profile.error_percent / 4)
        return "a hint: every routing agrees, but the gain is small beside what the profile misses; measure both";
    return "fairly sure: every routing agrees, and the gain is large beside what the profile misses; still measure both";
}

static void print_text(const tuning *t)
{
    double least, mean, most;
    term_table table;
    printf("%s: %s; T %lld, %d ranks, %s, routing %s, profile %s\n", t->s.name, t->s.shape, (long long)t->s.tokens, t->ranks, t->s.mxfp8 ? "MXFP8" : "BF16", t->s.routing_text, t->s.profile.name);
    for (int pass = 0; pass < NUM_PASSES; pass++) {
        if (!t->wanted[pass])
            continue;
        const char *heads[MAX_MINIBATCH + 1] = {"communication SMs"};
        char text[MAX_MINIBATCH][32];
        for (int k = 0; k < t->num_minibatch[pass]; k++) {
            snprintf(text[k], sizeof text[k], "mb %lld", (long long)t->minibatch[pass][k]);
            heads[k + 1] = text[k];
        }
        static const char align[] = "rrrrrrrrr";
        printf("\n%s, ms, ring %lld rows\n", pass_names[pass], (long long)t->base_ring);
        term_table_start(&table, align + (MAX_MINIBATCH - t->num_minibatch[pass]), heads);
        for (int i = 0; i < t->num_comm; i++) {
            if (t->comm[i])
                term_table_cell(&table, "%lld", (long long)t->comm[i]);
            else
                term_table_cell(&table, "a warp in every SM");
            for (int k = 0; k < t->num_minibatch[pass]; k++) {
                if (isfinite(t->grid[pass][i][k]))
                    term_table_cell(&table, "%.3f", t->grid[pass][i][k] * 1e3);
                else
                    term_table_cell(&table, "-");
            }
        }
        term_table_print(&table, stdout);
        printf("best: %lld communication SMs, minibatch %lld; next %lld, %lld (%.2f %% slower)\n", (long long)t->best[pass].comm_sms, (long long)t->best[pass].minibatch,
               (long long)t->second[pass].comm_sms, (long long)t->second[pass].minibatch, 100 * (t->second[pass].seconds / t->best[pass].seconds - 1));
    }
    printf("\n");
    term_table_start(&table, "rr", (const char *[]){"ring rows", "ms with these"});
    for (int i = 0; i < t->num_ring; i++) {
        term_table_cell(&table, "%lld%s", (long long)t->ring[i], t->ring[i] == t->best_ring ? " *" : "");
        if (isfinite(t->ring_seconds[i]))
            term_table_cell(&table, "%.3f", t->ring_seconds[i] * 1e3);
        else
            term_table_cell(&table, "under two minibatches");
    }
    term_table_print(&table, stdout);
    gain(t, &least, &mean, &most);
    printf("\nuse: ring_rows %lld", (long long)t->best_ring);
    if (t->wanted[0])
        printf(", comm_sms %lld, minibatch_rows %lld", (long long)t->best[0].comm_sms, (long long)t->best[0].minibatch);
    if (t->wanted[1])
        printf(", comm_sms_bwd %lld, minibatch_rows_bwd %lld", (long long)t->best[1].comm_sms, (long long)t->best[1].minibatch);
    if (t->best[0].comm_sms || t->best[1].comm_sms)
        printf("\n(today's kernels have a dispatch warp in every SM; communication SMs are simulated only)");
    printf("\nagainst the plan's choice (a warp in every SM, minibatch %lld and %lld, ring %lld): %.1f %% faster, from %.1f to %.1f %% over %lld other routings;\nthe profile may be off by %g %%. "
           "%s.\n", (long long)t->base[0].minibatch, (long long)t->base[1].minibatch, (long long)t->base_ring, 100 * mean, 100 * least, 100 * most, (long long)t->seeds,
           t->s.profile.error_percent, verdict(t));
}

static bool print_json(const tuning *t)
{
    json_writer w;
    double least, mean, most;
    gain(t, &least, &mean, &most);
    json_writer_start(&w, stdout);
    json_begin_object(&w, NULL);
    shape_json(&w, "shape", t->s.name, &t->s.cfg);
    json_string(&w, "profile", t->s.profile.name);
    json_int(&w, "ranks", t->ranks);
    json_int(&w, "ring_rows", t->best_ring);
    for (int pass = 0; pass < NUM_PASSES; pass++) {
        if (!t->wanted[pass])
            continue;
        json_begin_object(&w, pass_names[pass]);
        json_int(&w, "comm_sms", t->best[pass].comm_sms);
        json_int(&w, "minibatch_rows", t->best[pass].minibatch);
        json_double(&w, "seconds", t->best[pass].seconds);
        json_double(&w, "plan_seconds", t->base[pass].seconds);
        json_begin_array(&w, "tried");
        for (int i = 0; i < t->num_comm; i++)
            for (int k = 0; k < t->num_minibatch[pass]; k++) {
                json_begin_object(&w, NULL);
                json_int(&w, "comm_sms", t->comm[i]);
                json_int(&w, "minibatch_rows", t->minibatch[pass][k]);
                json_double(&w, "seconds", t->grid[pass][i][k]);
                json_end_object(&w);
            }
        json_end_array(&w);
        json_end_object(&w);
    }
    json_double(&w, "gain_least", least);
    json_double(&w, "gain_mean", mean);
    json_double(&w, "gain_most", most);
    json_double(&w, "profile_error_percent", t->s.profile.error_percent);
    json_string(&w, "verdict", verdict(t));
    json_int(&w, "simulations", t->simulations);
    json_end_object(&w);
    return json_writer_finish(&w);
}

static bool draw(const tuning *t, const char *path, char *error, size_t error_size)
{
    svg_panel *panels = calloc(NUM_PASSES, sizeof *panels);
    double x[NUM_PASSES][MAX_MINIBATCH], y[NUM_PASSES][MAX_COMM][MAX_MINIBATCH];
    size_t count = 0;
    for (int pass = 0; pass < NUM_PASSES && panels; pass++) {
        if (!t->wanted[pass])
            continue;
        svg_panel *panel = &panels[count++];
        *panel = (svg_panel){.title = pass_names[pass], .x_label = "rows of a minibatch", .y_label = "ms"};
        for (int i = 0; i < t->num_comm; i++) {
            svg_line *line = &panel->lines[panel->num_lines++];
            *line = (svg_line){.x = x[pass], .y = y[pass][i], .count = (size_t)t->num_minibatch[pass]};
            snprintf(line->label, sizeof line->label, t->comm[i] ? "%lld communication SMs" : "a warp in every SM", (long long)t->comm[i]);
            for (int k = 0; k < t->num_minibatch[pass]; k++) {
                x[pass][k] = (double)t->minibatch[pass][k];
                y[pass][i][k] = t->grid[pass][i][k] * 1e3;
            }
        }
    }
    bool ok = panels && svg_write(path, panels, count, error, error_size);
    free(panels);
    return ok;
}

static bool search(tuning *t, char *error, size_t error_size)
{
    term_progress progress;
    bool ok = list_candidates(t, error, error_size);
    int64_t total = 0;
    for (int pass = 0; pass < NUM_PASSES; pass++)
        total += t->wanted[pass] ? t->num_comm * t->num_minibatch[pass] + t->num_ring + 2 * t->seeds : 0;
    term_progress_start(&progress, "simulating", "pass", 0, total);
    for (int pass = 0; pass < NUM_PASSES && ok; pass++)
        ok = !t->wanted[pass] || search_grid(t, pass, &progress, error, error_size);
    ok = ok && search_ring(t, &progress, error, error_size) && try_seeds(t, &progress, error, error_size);
    term_progress_clear(&progress);
    return ok;
}

int command_tune(int argc, char **argv)
{
    static tuning t;
    shape_options shape;
    int64_t ranks, seed;
    const char *profile, *assignments, *pass, *routing, *dtype, *mode, *svg;
    bool json;
    char error[1024];
    t = (tuning){0};
    arg_option options[] = {
        SHAPE_MODEL_OPTION(&shape),
        SHAPE_OPTIONS(&shape, -1, -1, -1, -1, -1),
        ARG_STRING("profile", "NAME", &profile, "h200-x8", "the machine: a name of profiles/, or the path of a JSON file"),
        ARG_STRING("set", "NAME=X,...", &assignments, NULL, "figures of the profile by hand"),
        ARG_INT("ranks", "P", &ranks, 8, 1, 4096, "GPUs that share the experts"),
        ARG_INT("tokens", "T", &t.s.tokens, 2048, 1, ARG_NO_LIMIT, "tokens of each rank"),
        ARG_STRING("pass", "WHAT", &pass, "both", "forward, backward or both"),
        ARG_STRING("routing", "KIND", &routing, "uniform", "uniform, balanced, replacement, zipf:SKEW or hot:SHARE"),
        ARG_STRING("dtype", "TYPE", &dtype, "bf16", "bf16 or mxfp8"),
        ARG_STRING("mode", "MODE", &mode, "sustained", "burst: a cool chip; sustained: as in training"),
        ARG_INT("seed", "N", &seed, 1, 0, ARG_NO_LIMIT, "of the routing that is searched on"),
        ARG_INT("seeds", "N", &t.seeds, 3, 1, MAX_SEEDS, "other routings that the choice is tried on"),
        ARG_INT("copy-distance", "ROWS", &t.s.copy_distance, SIM_COPIES_AS_BUILT, 0, INT32_MAX, "pull a row rather than copy it from fewer rows away; 1: copy from any distance; 0: as the library does"),
        ARG_STRING("svg", "FILE", &svg, NULL, "draw time over minibatch and communication SMs"),
        ARG_FLAG("json", &json, "print JSON"),
    };
    const size_t num_options = sizeof options / sizeof *options;
    args_result parsed = args_parse(options, num_options, argc, argv, error, sizeof error);
    int status = parsed == ARGS_ERROR ? 2 : 0;
    if (parsed == ARGS_HELP) {
        args_help(stdout, "mok tune", "Communication SMs, minibatch and ring for a layer on a machine, by simulating them; and how sure that is.", options, num_options);
    } else if (parsed == ARGS_OK) {
        static const char *const passes[] = {"both", "forward", "backward"}, *const dtypes[] = {"bf16", "mxfp8"}, *const modes[] = {"burst", "sustained"};
        int which_pass, which_dtype, which_mode;
        bool ok = profile_load(profile, &t.s.profile, error, sizeof error) && profile_set(&t.s.profile, assignments, error, sizeof error) && simulate_word("pass", pass, passes, 3, &which_pass, error, sizeof error) &&
                  simulate_word("dtype", dtype, dtypes, 2, &which_dtype, error, sizeof error) && simulate_word("mode", mode, modes, 2, &which_mode, error, sizeof error) &&
                  shape_resolve(&shape, &t.s.cfg, t.s.name, NULL, error, sizeof error) && sim_parse_routing(routing, &t.s.routing, error, sizeof error);
        if (ok) {
            snprintf(t.s.routing_text, sizeof t.s.routing_text, "%s", routing);
            shape_describe(&t.s.cfg, t.s.shape);
            t.s.routing.seed = (uint64_t)seed;
            t.s.racks = 1;
            t.s.only_time = true;
            t.s.mxfp8 = which_dtype == 1;
            t.s.sustained = which_mode == 1;
            t.ranks = (int32_t)ranks;
            t.wanted[0] = which_pass != 2;
            t.wanted[1] = which_pass != 1;
            ok = search(&t, error, sizeof error) && (!svg || draw(&t, svg, error, sizeof error));
        }
        status = !ok ? 2 : json ? !print_json(&t) : 0;
        if (ok && !json)
            print_text(&t);
    }
    if (status == 2)
        fprintf(stderr, "mok tune: %s\n", error);
    args_free(options, num_options);
    return status;
}
