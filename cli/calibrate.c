/* mok calibrate: fits a machine profile to records of bench/bench_layer.py, on half of them, and predicts the other half. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "json.h"
#include "profile_file.h"
#include "records.h"
#include "term.h"

typedef struct calibration {
    record_list list;
    sim_profile start, fitted[2]; /* half A's fit, half B's */
    const char *names[SIM_MAX_FREE];
    int num_names;
    double worst[2];
    double *left_out;             /* [count] prediction of each record by the fit that did not see it */
} calibration;

static bool parse_names(char *text, calibration *k, char *error, size_t error_size)
{
    for (char *name = strtok(text, ","); name; name = strtok(NULL, ",")) {
        if (k->num_names == SIM_MAX_FREE) {
            snprintf(error, error_size, "--free names more than %d figures", SIM_MAX_FREE);
            return false;
        }
        if (!sim_profile_field(&k->start, name)) {
            snprintf(error, error_size, "--free: there is no figure \"%s\" in a profile (mok simulate --list-profile shows them all)", name);
            return false;
        }
        k->names[k->num_names++] = name;
    }
    return true;
}

/* Which half a record belongs to: within those of the same pass, mode, strategy and kind of machine (one GPU, or several), every second one. */
static int half_of(const record_list *l, int i)
{
    int before = 0;
    if (l->split)
        return !l->marked[i];
    for (int k = 0; k < i; k++)
        before += l->records[k].c.pass == l->records[i].c.pass && l->records[k].both == l->records[i].both && l->records[k].c.sustained == l->records[i].c.sustained &&
                  l->records[k].c.strategy == l->records[i].c.strategy &&
                  (l->records[k].c.dims.num_ranks > 1) == (l->records[i].c.dims.num_ranks > 1);
    return before % 2;
}

/* Fits on one half, then on the other. */
static bool fit_halves(calibration *k, char *error, size_t error_size)
{
    record_list *l = &k->list;
    k->left_out = malloc(sizeof *k->left_out * (size_t)l->count);
    for (int i = 0; i < l->count; i++)
        l->marked[i] = l->records[i].calibrate;
    for (int half = 0; half < (l->split ? 1 : 2) && k->left_out; half++) {
        for (int i = 0; i < l->count; i++)
            l->records[i].calibrate = half_of(l, i) == half;
        k->fitted[half] = k->start;
        if (sim_calibrate(l->records, l->count, &k->fitted[half], k->names, k->num_names) < 0) {
            snprintf(error, error_size, "--free: a figure to fit is 0 in %s", k->start.name);
            return false;
        }
        k->worst[half] = sim_predict_all(l->records, l->count, &k->fitted[half], false);
        for (int i = 0; i < l->count; i++)
            if (!l->records[i].calibrate || l->split)
                k->left_out[i] = l->records[i].predicted;
    }
    return k->left_out != NULL;
}

static void print_text(const calibration *k)
{
    term_table t;
    sim_profile start = k->start, first = k->fitted[0], second = k->fitted[1];
    term_table_start(&t, "lrrrl", (const char *[]){"record", "measured ms", "predicted ms", "off by", "fitted on"});
    for (int i = 0; i < k->list.count; i++) {
        double measured = k->list.records[i].measured;
        term_table_cell(&t, "%s", k->list.names[i]);
        term_table_cell(&t, "%.3f", measured * 1e3);
        term_table_cell(&t, "%.3f", k->left_out[i] * 1e3);
        term_table_cell(&t, "%+.1f %%", 100 * (k->left_out[i] / measured - 1));
        if (k->list.split)
            term_table_cell(&t, "%s", half_of(&k->list, i) ? "not seen" : "fitted");
        else
            term_table_cell(&t, "half %s", half_of(&k->list, i) ? "A" : "B");
    }
    term_table_print(&t, stdout);
    if (k->list.split)
        printf("\nThe fit has seen the records that say so; worst of the others %.1f %%.\n\n", 100 * k->worst[0]);
    else
        printf("\nNo prediction has seen its record. Of the records of the same pass, mode, strategy and kind of machine (one GPU, several), the first, third ...\n"
               "are half A, the others half B; each half predicts the other. Worst: %.1f %% fitted on A, %.1f %% fitted on B.\n\n", 100 * k->worst[0], 100 * k->worst[1]);
    term_table_start(&t, "lrrr", (const char *[]){"figure", "before", k->list.split ? "fitted" : "fitted on A", k->list.split ? "" : "fitted on B"});
    for (int i = 0; i < k->num_names; i++) {
        term_table_cell(&t, "%s", k->names[i]);
        term_table_cell(&t, "%.4g", *sim_profile_field(&start, k->names[i]));
        term_table_cell(&t, "%.4g", *sim_profile_field(&first, k->names[i]));
        if (k->list.split)
            term_table_cell(&t, "%s", "");
        else
            term_table_cell(&t, "%.4g", *sim_profile_field(&second, k->names[i]));
    }
    term_table_print(&t, stdout);
}

static bool print_json(const calibration *k)
{
    json_writer w;
    json_writer_start(&w, stdout);
    json_begin_object(&w, NULL);
    json_string(&w, "profile", k->start.name);
    json_begin_array(&w, "records");
    for (int i = 0; i < k->list.count; i++) {
        json_begin_object(&w, NULL);
        json_string(&w, "record", k->list.names[i]);
        json_string(&w, "fitted_on", k->list.split ? (half_of(&k->list, i) ? "others" : "itself") : half_of(&k->list, i) ? "A" : "B");
        json_double(&w, "measured_ms", k->list.records[i].measured * 1e3);
        json_double(&w, "predicted_ms", k->left_out[i] * 1e3);
        json_double(&w, "off_by", k->left_out[i] / k->list.records[i].measured - 1);
        json_end_object(&w);
    }
    json_end_array(&w);
    json_double(&w, "worst_fitted_on_a", k->worst[0]);
    json_double(&w, "worst_fitted_on_b", k->worst[1]);
    json_begin_array(&w, "free");
    for (int i = 0; i < k->num_names; i++) {
        sim_profile first = k->fitted[0], second = k->fitted[1];
        json_begin_object(&w, NULL);
        json_string(&w, "figure", k->names[i]);
        json_double(&w, "fitted_on_a", *sim_profile_field(&first, k->names[i]));
        json_double(&w, "fitted_on_b", *sim_profile_field(&second, k->names[i]));
        json_end_object(&w);
    }
    json_end_array(&w);
    json_end_object(&w);
    return json_writer_finish(&w);
}

/* The profile of the first half's fit: what it predicts of the others is what was reported. */
static bool save(const calibration *k, const char *path, const char *free_names, char *error, size_t error_size)
{
    char source[512];
    FILE *out = fopen(path, "w");
    snprintf(source, sizeof source, "%s of %s fitted on half A of %d records; worst of the other half %.1f %%", free_names, k->start.name, k->list.count, 100 * k->worst[0]);
    bool ok = out && profile_write(out, &k->fitted[0], source);
    if (!out || fclose(out) || !ok)
        snprintf(error, error_size, "%s cannot be written", path);
    return ok;
}

static int run(calibration *k, const arg_string_list *files, const char *profile, const char *free_names, const char *out, const char *name, double within, bool json,
               char *error, size_t error_size)
{
    char copy[512];
    snprintf(copy, sizeof copy, "%s", free_names);
    if (!profile_load(profile, &k->start, error, error_size) || !parse_names(copy, k, error, error_size))
        return 2;
    for (size_t i = 0; i < files->count; i++)
        if (!records_read(files->values[i], &k->start, &k->list, error, error_size))
            return 2;
    if (k->list.count < 4 && !k->list.split) {
        snprintf(error, error_size, "%d records are too few to leave half of them out: give --records files of bench/bench_layer.py --json", k->list.count);
        return 2;
    }
    if (!fit_halves(k, error, error_size))
        return 2;
    for (int half = 0; half < 2 && name; half++)
        snprintf(k->fitted[half].name, sizeof k->fitted[half].name, "%s", name);
    if (json && !print_json(k))
        return 1;
    if (!json)
        print_text(k);
    if (out && !save(k, out, free_names, error, error_size))
        return 2;
    return within > 0 && fmax(k->worst[0], k->worst[1]) > within / 100 ? 1 : 0;
}

int command_calibrate(int argc, char **argv)
{
    calibration k = {0};
    const char *profile, *free_names, *out, *name;
    arg_string_list files;
    double within;
    bool json;
    char error[1024];
    arg_option options[] = {
        ARG_STRING_LIST("records", "FILE...", &files, NULL, "records of bench/bench_layer.py --json"),
        ARG_STRING("profile", "NAME", &profile, "h200-x2", "the machine to begin with: a name, or the path of a JSON file"),
        ARG_STRING("free", "A,B,...", &free_names, "bf16_tflops,bf16_sustained_tflops,task_us", "figures to fit"),
        ARG_STRING("out", "FILE", &out, NULL, "write the profile that was fitted on half A"),
        ARG_STRING("name", "NAME", &name, NULL, "name of the fitted profile"),
        ARG_DOUBLE("within", "PERCENT", &within, 0, 1e-6, 1e6, "fail if a prediction is off by more"),
        ARG_FLAG("json", &json, "print JSON"),
    };
    const size_t num_options = sizeof options / sizeof *options;
    args_result parsed = args_parse(options, num_options, argc, argv, error, sizeof error);
    int status = parsed == ARGS_ERROR ? 2 : 0;
    if (parsed == ARGS_HELP)
        args_help(stdout, "mok calibrate", "Fits a machine profile of the simulator to measured passes: on half of the records, which predict the other half; then the other way round.", options, num_options);
    else if (parsed == ARGS_OK)
        status = run(&k, &files, profile, free_names, out, name, within, json, error, sizeof error);
    if (status == 2)
        fprintf(stderr, "mok calibrate: %s\n", error);
    records_free(&k.list);
    free(k.left_out);
    args_free(options, num_options);
    return status;
}
