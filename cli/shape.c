#include "shape.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "models.h"
#include "term.h"

/* ------------------------------------------------------------------------------------------------- mistyped names -- */

static int min_int(int a, int b) { return a < b ? a : b; }

/* Letters to insert, delete or replace to make b of a, case aside. Both shorter than 64. */
static int edit_distance(const char *a, const char *b)
{
    int row[64], n = (int)strlen(b);
    for (int j = 0; j <= n; j++)
        row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int replaced = diagonal + (strncasecmp(&a[i - 1], &b[j - 1], 1) != 0);
            diagonal = row[j];
            row[j] = min_int(replaced, min_int(row[j], row[j - 1]) + 1);
        }
    }
    return row[n];
}

/* A beginning of a name counts as close, whatever the rest of the name is ("kimi"). */
static int distance_to_model(const char *name, const char *model)
{
    size_t n = strlen(name);
    if (n >= 3 && strncasecmp(name, model, n) == 0)
        return 1;
    return edit_distance(name, model);
}

const char *shape_closest_model(const char *name)
{
    const char *closest = NULL;
    size_t n = strlen(name);
    int best = n >= 64 ? 0 : (int)n / 2; /* more than half of the letters wrong: no guess */
    for (size_t i = 0; i < model_count(); i++) {
        int distance = n >= 64 ? 64 : distance_to_model(name, model_at(i)->name);
        if (distance < best || (distance == best && !closest)) {
            best = distance;
            closest = n >= 64 ? NULL : model_at(i)->name;
        }
    }
    return closest;
}

static bool load_model(const char *name, model_shape *m, char *error, size_t error_size)
{
    if (model_load(name, m, error, error_size))
        return true;
    const char *closest = shape_closest_model(name);
    if (closest && strncmp(error, "there is no model", 17) == 0)
        snprintf(error, error_size, "there is no model and no file \"%s\": did you mean %s?", name, closest);
    return false;
}

/* ---------------------------------------------------------------------------------------------------------- shape -- */

void shape_prefer_model(shape_options *s, const arg_option *options, size_t num_options)
{
    static const char *const names[] = {"hidden", "intermediate", "shared", "experts", "topk"};
    int64_t *const values[] = {&s->hidden, &s->intermediate, &s->shared, &s->experts, &s->topk};
    for (int i = 0; i < 5 && s->model; i++)
        if (!args_given(options, num_options, names[i]))
            *values[i] = -1;
}

static int64_t choose(int64_t given, int64_t from_model) { return given >= 0 ? given : from_model; }

bool shape_resolve(const shape_options *s, mok_config *cfg, char name[64], const char **note, char *error, size_t error_size)
{
    model_shape m = {.name = "custom shape"};
    if (s->model && !load_model(s->model, &m, error, error_size))
        return false;
    *cfg = MOK_INIT(mok_config);
    cfg->hidden = choose(s->hidden, m.hidden);
    cfg->intermediate = choose(s->intermediate, m.intermediate);
    cfg->shared_intermediate = choose(s->shared, m.shared);
    cfg->num_experts = choose(s->experts, m.experts);
    cfg->topk = choose(s->topk, m.topk);
    cfg->shared_gate = s->shared_gate || (m.shared_gate && cfg->shared_intermediate);
    cfg->swiglu_limit = (float)(s->swiglu_limit >= 0 ? s->swiglu_limit : m.swiglu_limit);
    const char *missing = !cfg->hidden ? "hidden" : !cfg->intermediate ? "intermediate" : !cfg->num_experts ? "experts" : !cfg->topk ? "topk" : NULL;
    if (missing) {
        snprintf(error, error_size, "--%s is missing: give --model, or --hidden, --intermediate, --experts and --topk", missing);
        return false;
    }
    snprintf(name, 64, "%s", m.name);
    if (note)
        *note = m.note;
    return true;
}

char *shape_describe(const mok_config *c, char text[192])
{
    int n = snprintf(text, 192, "hidden %lld, intermediate %lld, ", (long long)c->hidden, (long long)c->intermediate);
    if (c->shared_intermediate)
        n += snprintf(text + n, (size_t)(192 - n), "shared %lld%s, ", (long long)c->shared_intermediate, c->shared_gate ? " (gated)" : "");
    n += snprintf(text + n, (size_t)(192 - n), "%lld experts, top-%lld", (long long)c->num_experts, (long long)c->topk);
    if (c->swiglu_limit > 0)
        n += snprintf(text + n, (size_t)(192 - n), ", swiglu limit %g", (double)c->swiglu_limit);
    if (c->dtype == MOK_MXFP8)
        snprintf(text + n, (size_t)(192 - n), ", mxfp8%s", c->mx_wgrad_bf16 ? " with bf16 weight gradients" : "");
    return text;
}

void shape_json(json_writer *w, const char *key, const char *name, const mok_config *c)
{
    json_begin_object(w, key);
    json_string(w, "name", name);
    json_int(w, "hidden", c->hidden);
    json_int(w, "intermediate", c->intermediate);
    json_int(w, "shared", c->shared_intermediate);
    json_bool(w, "shared_gate", c->shared_gate);
    json_int(w, "experts", c->num_experts);
    json_int(w, "topk", c->topk);
    json_double(w, "swiglu_limit", (double)c->swiglu_limit);
    json_string(w, "dtype", shape_dtype_name(c->dtype));
    json_end_object(w);
}

bool shape_fits(double bytes, char *error, size_t error_size)
{
    double have = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    if (have <= 0 || bytes < 0.8 * have)
        return true;
    snprintf(error, error_size, "this layer needs about %s, but the machine has %s: try fewer --experts or --tokens", term_bytes(bytes).text,
             term_bytes(have).text);
    return false;
}

/* -------------------------------------------------------------------------------------------------- small choices -- */

static const char *const backend_names[] = {[MOK_BACKEND_AUTO] = "auto", [MOK_BACKEND_CPU] = "cpu", [MOK_BACKEND_CUDA] = "cuda"};

bool shape_backend(const char *text, mok_backend_id *backend, char *error, size_t error_size)
{
    for (int i = 0; i < 3; i++)
        if (strcmp(text, backend_names[i]) == 0) {
            *backend = (mok_backend_id)i;
            return true;
        }
    snprintf(error, error_size, "--backend is \"%s\", but must be auto, cpu or cuda", text);
    return false;
}

bool shape_backend_usable(mok_backend_id backend, char *error, size_t error_size)
{
    mok_backend_info b = MOK_INIT(mok_backend_info);
    for (int32_t i = 0; mok_backend_query(i, &b) == MOK_OK; i++)
        if (b.id == backend && !b.usable) {
            snprintf(error, error_size, "--backend %s cannot run here: %.400s", backend_names[backend], b.detail);
            return false;
        }
    return true;
}

const char *shape_dtype_name(mok_dtype dtype) { return dtype == MOK_MXFP8 ? "mxfp8" : "bf16"; }

bool shape_dtype(const char *text, mok_dtype *dtype, char *error, size_t error_size)
{
    *dtype = strcmp(text, "mxfp8") == 0 ? MOK_MXFP8 : MOK_BF16;
    if (strcmp(text, shape_dtype_name(*dtype)) == 0)
        return true;
    snprintf(error, error_size, "--dtype is \"%s\", but must be bf16 or mxfp8", text);
    return false;
}

const char *shape_backend_name(mok_backend_id backend) { return backend_names[backend]; }

bool shape_save(const char *text, mok_save *save, int64_t *rows, char *error, size_t error_size)
{
    static const char *const names[] = {[MOK_SAVE_AUTO] = "auto", [MOK_SAVE_NONE] = "none", [MOK_SAVE_RING] = "ring", [MOK_SAVE_ALL] = "all"};
    *rows = 0;
    for (int i = 0; i < 4; i++)
        if (strcmp(text, names[i]) == 0) {
            *save = (mok_save)i;
            return true;
        }
    char *end;
    errno = 0;
    *save = MOK_SAVE_ROWS;
    *rows = strtoll(text, &end, 10);
    if (*text >= '0' && *text <= '9' && *end == '\0' && errno == 0)
        return true;
    snprintf(error, error_size, "--save is \"%s\", but must be none, ring, all, auto or a number of rows", text);
    return false;
}
