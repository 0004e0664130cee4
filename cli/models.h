/* Shapes of MoE layers: a shipped table of public models, and a reader of Hugging Face config.json files. */
#ifndef MOK_CLI_MODELS_H
#define MOK_CLI_MODELS_H
#include "json.h"

#define MODEL_MAX_VALUE 2147483647 /* larger sizes and counts are taken for a mistake */

typedef struct model_shape {
    char name[64];       /* of the shipped table; the model_type of a config.json */
    int64_t hidden;
    int64_t intermediate; /* of one routed expert */
    int64_t experts;
    int64_t topk;
    int64_t shared;      /* intermediate size of the shared expert; 0 = none */
    bool shared_gate;    /* its output is multiplied by a sigmoid gate */
    double swiglu_limit; /* 0 = none */
    bool benchmark;      /* shipped table: part of the published benchmark (EP 64, 2048 tokens per GPU) */
    const char *note;    /* shipped table: what the shape leaves out; NULL = nothing */
} model_shape;

size_t model_count(void);
const model_shape *model_at(size_t i);           /* i < model_count(), alphabetical */
const model_shape *model_find(const char *name); /* NULL if it is not in the table */

/* A name of the table, the path of a config.json, or a folder that holds one. False and one sentence on failure; the
 * sentence names the file, the key and its value. `out` is written on success only. */
bool model_load(const char *name_or_path, model_shape *out, char *error, size_t error_size);

/* The two steps of reading a config.json. `path` is only for the sentences of model_from_config. */
bool model_read_config(const char *path, model_shape *out, char *error, size_t error_size);
bool model_from_config(const json_value *config, const char *path, model_shape *out, char *error, size_t error_size);
#endif
