/* Shapes of MoE layers; see models.h. Model families differ only in how they name the same six figures, so there is one
 * reader with a list of names per figure, and no code per family. */
#include "models.h"

#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>

static const model_shape table[] = {
    {.name = "deepseek-v3", .hidden = 7168, .intermediate = 2048, .experts = 256, .topk = 8, .shared = 2048},
    {.name = "deepseek-v4-flash", .hidden = 4096, .intermediate = 2048, .experts = 256, .topk = 6, .shared = 2048,
     .swiglu_limit = 10.0},
    {.name = "deepseek-v4-pro", .hidden = 7168, .intermediate = 3072, .experts = 384, .topk = 6, .shared = 3072,
     .benchmark = true},
    {.name = "glm-5.2", .hidden = 6144, .intermediate = 2048, .experts = 256, .topk = 8, .shared = 2048,
     .benchmark = true},
    {.name = "gpt-oss-20b", .hidden = 2880, .intermediate = 2880, .experts = 32, .topk = 4,
     .note = "H and I are multiples of 64, not of 128; the model also has biases and its own activation, used here for "
             "its shape only"},
    {.name = "kimi-k2.7-code", .hidden = 7168, .intermediate = 2048, .experts = 384, .topk = 8, .shared = 2048,
     .benchmark = true},
    {.name = "mixtral-8x7b", .hidden = 4096, .intermediate = 14336, .experts = 8, .topk = 2},
    {.name = "olmoe-1b-7b", .hidden = 2048, .intermediate = 1024, .experts = 64, .topk = 8},
    {.name = "qwen3-30b-a3b", .hidden = 2048, .intermediate = 768, .experts = 128, .topk = 8},
    {.name = "qwen3.5-397b-a17b", .hidden = 4096, .intermediate = 1024, .experts = 512, .topk = 10, .shared = 1024,
     .shared_gate = true, .benchmark = true},
};

size_t model_count(void) { return sizeof table / sizeof table[0]; }
const model_shape *model_at(size_t i) { return &table[i]; }

const model_shape *model_find(const char *name)
{
    for (size_t i = 0; i < model_count(); i++)
        if (strcmp(table[i].name, name) == 0)
            return &table[i];
    return NULL;
}

/* ------------------------------------------------------------------------------------------- names of the figures -- */

/* Alternatives are asked for in this order; a file that gives several must give the same value each time. */
typedef const char *const key_list[4];
static key_list keys_experts = {"n_routed_experts",  /* Kimi, DeepSeek, GLM */
                                "num_experts",       /* Qwen, OLMoE, Kimi-Linear */
                                "num_local_experts"  /* Mixtral, gpt-oss */};
static key_list keys_topk = {"num_experts_per_tok", "num_experts_per_token" /* Kimi-Linear */,
                             "experts_per_token" /* gpt-oss */};
static key_list keys_hidden = {"hidden_size"};
static key_list keys_moe_intermediate = {"moe_intermediate_size"};
static key_list keys_intermediate = {"intermediate_size"}; /* Mixtral, gpt-oss, OLMoE; of dense layers elsewhere */
static key_list keys_shared_count = {"n_shared_experts", "num_shared_experts" /* Kimi-Linear */};
static key_list keys_shared_width = {"shared_expert_intermediate_size"}; /* Qwen: one shared expert with a gate */

/* Where configs of multimodal models keep the config of their language model. */
static const char *const nested_keys[] = {"text_config", "language_config", "llm_config"};

typedef struct config {
    const char *path;
    const json_value *object;
    char prefix[64]; /* "text_config." for the sentences, or empty */
    char *error;
    size_t error_size;
} config;

__attribute__((format(printf, 2, 3))) static bool fail(config *c, const char *format, ...)
{
    char what[512];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    snprintf(c->error, c->error_size, "%s: %s", c->path, what);
    return false;
}

/* A key that holds null is the same as no key: Hugging Face writes null for "not used". */
static const json_value *get(const config *c, const char *key)
{
    const json_value *v = json_get(c->object, key);
    return v && v->type != JSON_NULL ? v : NULL;
}

/* Looks for one figure. *key is the name under which it was found, or NULL if it is absent. */
static bool read_optional(config *c, key_list names, int64_t smallest, const char **key, int64_t *value)
{
    char text[64];
    *key = NULL;
    for (int i = 0; i < 4 && names[i]; i++) {
        const json_value *v = get(c, names[i]);
        if (!v)
            continue;
        if (!v->is_integer || v->integer < smallest || v->integer > MODEL_MAX_VALUE)
            return fail(c, "\"%s%s\" is %s, but must be an integer from %d to %d", c->prefix, names[i],
                        json_describe(v, text, sizeof text), (int)smallest, MODEL_MAX_VALUE);
        if (*key && v->integer != *value)
            return fail(c, "\"%s%s\" is %lld, but \"%s%s\" is %lld", c->prefix, *key, (long long)*value, c->prefix,
                        names[i], (long long)v->integer);
        if (!*key)
            *key = names[i];
        *value = v->integer;
    }
    return true;
}

static bool read_required(config *c, key_list names, const char **key, int64_t *value)
{
    if (!read_optional(c, names, 1, key, value))
        return false;
    if (!*key)
        return fail(c, "\"%s%s\" is missing", c->prefix, names[0]);
    return true;
}

static bool has_experts(const config *c)
{
    for (int i = 0; i < 4 && keys_experts[i]; i++)
        if (get(c, keys_experts[i]))
            return true;
    return false;
}

/* Steps into the nested config of the language model as long as the present one has no experts. */
static void enter_nested(config *c)
{
    for (size_t i = 0; !has_experts(c) && i < sizeof nested_keys / sizeof nested_keys[0];) {
        const json_value *inner = get(c, nested_keys[i]);
        size_t used = strlen(c->prefix);
        if (!inner || inner->type != JSON_OBJECT || used + strlen(nested_keys[i]) + 2 > sizeof c->prefix) {
            i++;
            continue;
        }
        snprintf(c->prefix + used, sizeof c->prefix - used, "%s.", nested_keys[i]);
        c->object = inner;
        i = 0;
    }
}

/* The width of the routed experts. "intermediate_size" may be that of the model's dense layers instead, and is so in the
 * families that count "n_routed_experts": there it is no substitute. */
static bool read_intermediate(config *c, const char *experts_key, model_shape *m)
{
    const char *key;
    if (!read_optional(c, keys_moe_intermediate, 1, &key, &m->intermediate))
        return false;
    if (key)
        return true;
    if (strcmp(experts_key, "n_routed_experts") == 0)
        return read_required(c, keys_moe_intermediate, &key, &m->intermediate);
    return read_required(c, keys_intermediate, &key, &m->intermediate);
}

static bool read_shared(config *c, model_shape *m)
{
    const char *count_key, *width_key;
    int64_t count = 0, width = 0;
    if (!read_optional(c, keys_shared_count, 0, &count_key, &count) ||
        !read_optional(c, keys_shared_width, 0, &width_key, &width))
        return false;
    if (count > 0 && width > 0)
        return fail(c, "\"%s%s\" is %lld and \"%s%s\" is %lld, but only one of them can describe the shared expert",
                    c->prefix, count_key, (long long)count, c->prefix, width_key, (long long)width);
    if (count * m->intermediate > MODEL_MAX_VALUE)
        return fail(c, "\"%s%s\" is %lld, which makes the shared expert %lld wide, more than %d", c->prefix, count_key,
                    (long long)count, (long long)(count * m->intermediate), MODEL_MAX_VALUE);
    m->shared = count > 0 ? count * m->intermediate : width;
    m->shared_gate = width > 0;
    return true;
}

static bool read_swiglu_limit(config *c, model_shape *m)
{
    char text[64];
    const json_value *v = get(c, "swiglu_limit");
    if (!v)
        return true;
    if (v->type != JSON_NUMBER || v->number < 0 || v->number > MODEL_MAX_VALUE)
        return fail(c, "\"%sswiglu_limit\" is %s, but must be a number from 0 (no limit) to %d", c->prefix,
                    json_describe(v, text, sizeof text), MODEL_MAX_VALUE);
    m->swiglu_limit = v->number;
    return true;
}

/* model_type names the shape. It comes from a file and goes to a terminal, so only printable ASCII is kept. */
static void read_name(const config *c, model_shape *m)
{
    const json_value *type = get(c, "model_type");
    snprintf(m->name, sizeof m->name, "%s", type && type->type == JSON_STRING && *type->string ? type->string : "config.json");
    for (char *p = m->name; *p; p++)
        if (*p < 0x20 || *p > 0x7e)
            *p = '?';
}

bool model_from_config(const json_value *root, const char *path, model_shape *out, char *error, size_t error_size)
{
    config c = {.path = path, .object = root, .error = error, .error_size = error_size};
    model_shape m = {.note = NULL};
    const char *experts_key, *topk_key, *key;
    if (root->type != JSON_OBJECT)
        return fail(&c, "expected an object of settings, found another kind of JSON value");
    enter_nested(&c);
    if (!has_experts(&c))
        return fail(&c, "not the config of a mixture-of-experts model, as none of \"%s\", \"%s\", \"%s\" is there",
                    keys_experts[0], keys_experts[1], keys_experts[2]);
    read_name(&c, &m);
    if (!read_required(&c, keys_experts, &experts_key, &m.experts) || !read_required(&c, keys_topk, &topk_key, &m.topk) ||
        !read_required(&c, keys_hidden, &key, &m.hidden) || !read_intermediate(&c, experts_key, &m) ||
        !read_shared(&c, &m) || !read_swiglu_limit(&c, &m))
        return false;
    if (m.topk > m.experts)
        return fail(&c, "\"%s%s\" is %lld, more than the %lld experts that \"%s%s\" gives", c.prefix, topk_key,
                    (long long)m.topk, (long long)m.experts, c.prefix, experts_key);
    *out = m;
    return true;
}

bool model_read_config(const char *path, model_shape *out, char *error, size_t error_size)
{
    json_value *root = json_read_file(path, error, error_size);
    if (!root)
        return false;
    bool ok = model_from_config(root, path, out, error, error_size);
    json_free(root);
    return ok;
}

static bool fail_unknown(const char *name, char *error, size_t error_size)
{
    char names[512] = "";
    size_t used = 0;
    for (size_t i = 0; i < model_count() && used < sizeof names; i++)
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i ? ", " : "", table[i].name);
    snprintf(error, error_size, "there is no model and no file \"%s\"; models: %s", name, names);
    return false;
}

bool model_load(const char *name_or_path, model_shape *out, char *error, size_t error_size)
{
    const model_shape *shipped = model_find(name_or_path);
    if (shipped) {
        *out = *shipped;
        return true;
    }
    struct stat status;
    size_t n = strlen(name_or_path);
    bool exists = stat(name_or_path, &status) == 0;
    bool looks_like_path = strchr(name_or_path, '/') || (n >= 5 && strcmp(name_or_path + n - 5, ".json") == 0);
    if (exists && S_ISDIR(status.st_mode)) {
        char path[4096];
        if (snprintf(path, sizeof path, "%s/config.json", name_or_path) < (int)sizeof path)
            return model_read_config(path, out, error, error_size);
    }
    if (exists || looks_like_path)
        return model_read_config(name_or_path, out, error, error_size);
    return fail_unknown(name_or_path, error, error_size);
}
