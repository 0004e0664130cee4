/* The options that describe a layer, shared by the commands: a model by name or config.json, single figures, or both (a figure
 * given by hand wins over the model's). */
#ifndef MOK_CLI_SHAPE_H
#define MOK_CLI_SHAPE_H

#include <math.h>

#include "args.h"
#include "json.h"
#include "mok.h"

typedef struct shape_options {
    const char *model;
    int64_t hidden, intermediate, shared, experts, topk; /* -1 = not given */
    bool shared_gate;
    double swiglu_limit; /* below 0 = not given */
} shape_options;

/* A default of -1 means none. SHAPE_MODEL_OPTION is for commands that take --model. */
#define SHAPE_MODEL_OPTION(s)                                                                                               \
    ARG_STRING("model", "NAME", &(s)->model, NULL, "shape of a model: a name of the table, or the path of a config.json")
#define SHAPE_OPTIONS(s, hidden_, intermediate_, shared_, experts_, topk_)                                                  \
    ARG_INT("hidden", "H", &(s)->hidden, hidden_, 1, ARG_NO_LIMIT, "hidden size, a multiple of 64"),                        \
    ARG_INT("intermediate", "I", &(s)->intermediate, intermediate_, 1, ARG_NO_LIMIT, "intermediate size of an expert"),     \
    ARG_INT("shared", "IS", &(s)->shared, shared_, 0, ARG_NO_LIMIT, "intermediate size of the shared expert, 0 for none"),  \
    ARG_INT("experts", "E", &(s)->experts, experts_, 1, ARG_NO_LIMIT, "number of routed experts"),                          \
    ARG_INT("topk", "K", &(s)->topk, topk_, 1, ARG_NO_LIMIT, "experts of a token"),                                         \
    ARG_FLAG("shared-gate", &(s)->shared_gate, "scale the shared expert by a sigmoid gate"),                                \
    ARG_DOUBLE("swiglu-limit", "L", &(s)->swiglu_limit, -1, 0, HUGE_VAL, "clamp gate and up before the activation, 0 for none")
enum { SHAPE_NUM_OPTIONS = 7 };

/* Where the table has defaults: a model's figures win over those that were not given. Between args_parse and shape_resolve. */
void shape_prefer_model(shape_options *s, const arg_option *options, size_t num_options);

/* Fills the shape fields of `cfg`, the rest 0, and a name to show ("custom shape" without a model); `note` (may be NULL) receives what
 * the model's table says about the shape, or NULL. False and one sentence. Whether the figures fit together is mok_plan_query's to say. */
bool shape_resolve(const shape_options *s, mok_config *cfg, char name[64], const char **note, char *error, size_t error_size);

/* "hidden 7168, intermediate 2048, shared 2048, 384 experts, top-8" */
char *shape_describe(const mok_config *cfg, char text[192]);
void shape_json(json_writer *w, const char *key, const char *name, const mok_config *cfg);

/* The name in the model table that a mistyped name most likely meant, or NULL. */
const char *shape_closest_model(const char *name);

/* Would `bytes` fit into this machine's memory? Asked before large data is made, as Linux kills where it should refuse. */
bool shape_fits(double bytes, char *error, size_t error_size);

/* "cpu", "cuda" or "auto". */
/* One sentence if the backend cannot run here. */
bool shape_backend_usable(mok_backend_id backend, char *error, size_t error_size);
bool shape_backend(const char *text, mok_backend_id *backend, char *error, size_t error_size);
const char *shape_backend_name(mok_backend_id backend);
/* "bf16" or "mxfp8": the arithmetic of the routed experts. */
#define SHAPE_DTYPE_OPTION(text) ARG_STRING("dtype", "NAME", text, "bf16", "arithmetic of the routed experts: bf16, or mxfp8")
bool shape_dtype(const char *text, mok_dtype *dtype, char *error, size_t error_size);
const char *shape_dtype_name(mok_dtype dtype);
/* "none", "ring", "all", "auto" or a number of rows. */
bool shape_save(const char *text, mok_save *save, int64_t *rows, char *error, size_t error_size);

#endif
