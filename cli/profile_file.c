#include "profile_file.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "json.h"

enum { MAX_BASES = 4 };

static bool find(const char *name, char path[1024])
{
    static const char *const folders[] = {MOK_SOURCE_DIR "/profiles", MOK_PROFILE_DIR};
    snprintf(path, 1024, "%s", name);
    if (strchr(name, '/') || strstr(name, ".json"))
        return access(path, R_OK) == 0;
    for (size_t i = 0; i < 2; i++) {
        snprintf(path, 1024, "%s/%s.json", folders[i], name);
        if (access(path, R_OK) == 0)
            return true;
    }
    return false;
}

static bool is_text(const char *key) { return !strcmp(key, "base") || !strcmp(key, "sources") || !strcmp(key, "note") || !strcmp(key, "fit"); }

static bool take(const json_value *file, const char *path, sim_profile *p, char *error, size_t error_size)
{
    char text[64];
    for (const json_value *v = file->first; v; v = v->next) {
        double *field = sim_profile_field(p, v->key);
        if (!strcmp(v->key, "name") && v->type == JSON_STRING) {
            snprintf(p->name, sizeof p->name, "%.63s", v->string);
        } else if (field && v->type == JSON_NUMBER && v->number >= 0) {
            *field = v->number;
        } else if (field) {
            snprintf(error, error_size, "%s: \"%s\" is %s, but must be a number of 0 or more", path, v->key, json_describe(v, text, sizeof text));
            return false;
        } else if (!is_text(v->key)) {
            snprintf(error, error_size, "%s: there is no figure \"%s\" in a profile (mok simulate --list-profile shows them all)", path, v->key);
            return false;
        }
    }
    return true;
}

static bool load(const char *name, sim_profile *p, int depth, char *error, size_t error_size)
{
    char path[1024];
    if (!find(name, path)) {
        snprintf(error, error_size, "there is no profile \"%s\": give a name of " MOK_SOURCE_DIR "/profiles or the path of a JSON file", name);
        return false;
    }
    json_value *file = json_read_file(path, error, error_size);
    const json_value *base = json_get(file, "base");
    bool ok = file != NULL;
    if (ok && file->type != JSON_OBJECT) {
        snprintf(error, error_size, "%s: a profile must be an object", path);
        ok = false;
    }
    if (ok && base && (depth == MAX_BASES || base->type != JSON_STRING)) {
        snprintf(error, error_size, "%s: \"base\" must be the name of a profile, and no more than %d may stand on each other", path, MAX_BASES);
        ok = false;
    }
    ok = ok && (!base || load(base->string, p, depth + 1, error, error_size)) && take(file, path, p, error, error_size);
    json_free(file);
    return ok;
}

static bool check(const sim_profile *p, const char *name, char *error, size_t error_size)
{
    static const struct { const char *name; double low, high; } whole[] = {{"sms", 1, 4096}, {"cluster", 1, 16}, {"tile_cols", 64, 1024}, {"tasks_ahead", 0, 8}, {"ranks_max", 1, 4096}};
    static const char *const positive[] = {"bf16_tflops", "bf16_sustained_tflops", "forward_factor", "mxfp8_tflops", "mxfp8_sustained_tflops", "hbm_gbps", "mover_gbps", "comm_sm_gbps",
                                           "link_pull_gbps", "link_push_gbps", "publish_gbps", "combine_gbps", "wgrad_factor", "grouped_factor", "elementwise_gbps",
                                           "nccl_gbps", "deepep_gbps", "switch_factor", "mover_kib", "comm_sm_kib"};
    sim_profile copy = *p;
    for (size_t i = 0; i < sizeof whole / sizeof whole[0]; i++) {
        double v = *sim_profile_field(&copy, whole[i].name);
        if (v != floor(v) || v < whole[i].low || v > whole[i].high) {
            snprintf(error, error_size, "profile %s: %s is %g, but must be a whole number from %g to %g", name, whole[i].name, v, whole[i].low, whole[i].high);
            return false;
        }
    }
    for (size_t i = 0; i < sizeof positive / sizeof positive[0]; i++)
        if (!(*sim_profile_field(&copy, positive[i]) > 0)) {
            snprintf(error, error_size, "profile %s: %s is 0, but a rate or size must be positive", name, positive[i]);
            return false;
        }
    return true;
}

bool profile_load(const char *name, sim_profile *p, char *error, size_t error_size)
{
    sim_profile_defaults(p);
    snprintf(p->name, sizeof p->name, "%.63s", name);
    return load(name, p, 0, error, error_size) && check(p, name, error, error_size);
}

bool profile_set(sim_profile *p, const char *assignments, char *error, size_t error_size)
{
    char copy[512];
    snprintf(copy, sizeof copy, "%s", assignments ? assignments : "");
    for (char *item = strtok(copy, ","); item; item = strtok(NULL, ",")) {
        char *equals = strchr(item, '='), *end = NULL;
        if (equals)
            *equals = '\0';
        double *field = sim_profile_field(p, item), value = equals ? strtod(equals + 1, &end) : NAN;
        if (!field || !equals || end == equals + 1 || *end || !(value >= 0)) {
            snprintf(error, error_size, "--set: \"%s\" is no figure of a profile with a number of 0 or more behind it, as in cpu_sync_us=0", item);
            return false;
        }
        *field = value;
    }
    return check(p, "with --set", error, error_size);
}

bool profile_write(FILE *out, const sim_profile *p, const char *source)
{
    json_writer w;
    sim_profile copy = *p;
    json_writer_start(&w, out);
    json_begin_object(&w, NULL);
    json_string(&w, "name", p->name);
    json_string(&w, "fit", source);
    for (int i = 0; i < SIM_PROFILE_FIELDS; i++)
        json_double(&w, sim_profile_entries[i].name, *sim_profile_field(&copy, sim_profile_entries[i].name));
    json_end_object(&w);
    return json_writer_finish(&w);
}
