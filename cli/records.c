#include "records.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "sim/routes.h"

bool case_of(const mok_config *cfg, int32_t ranks, const sim_profile *p, mk_pass pass, sim_case *c, char *error, size_t error_size)
{
    mok_plan plan = MOK_INIT(mok_plan);
    int32_t none = 0;
    if (ranks > p->ranks_max) {
        snprintf(error, error_size, "%d ranks, but profile %s is an NVLink domain of %g GPUs (--set ranks_max=%d pretends)", ranks, p->name, p->ranks_max, ranks);
        return false;
    }
    mok_config bf16 = *cfg;
    bf16.dtype = MOK_BF16; /* rows are cut the same way, whatever their type */
    bf16.backend = MOK_BACKEND_CUDA;
    if (mok_plan_query(&bf16, ranks, 0, (int32_t)p->sms, MK_ROW_TILE, 256, &plan, NULL, &none) != MOK_OK) {
        snprintf(error, error_size, "%s", mok_last_error());
        return false;
    }
    *c = (sim_case){.profile = *p, .dims = sim_dims(cfg, &plan, ranks, 0), .tokens = cfg->max_tokens, .pass = pass, .trace_rank = -1};
    return true;
}

bool strategy_of(const char *name, sim_strategy_id *strategy)
{
    for (int i = 0; i < SIM_NUM_STRATEGIES; i++)
        if (!strcmp(name, sim_strategies[i].name)) {
            *strategy = (sim_strategy_id)i;
            return true;
        }
    return false;
}

void set_macrobatch(const mok_config *cfg, sim_case *c)
{
    if (cfg->ring_rows)
        c->dims.ring_tiles = c->dims.saved_tiles = mk_ceil_div(cfg->ring_rows, MK_ROW_TILE);
    if (cfg->save == MOK_SAVE_NONE)
        c->dims.saved_tiles = 0;
    if (cfg->save == MOK_SAVE_ALL)
        c->dims.saved_tiles = INT32_MAX;
    if (cfg->minibatch_rows)
        c->dims.mb_tiles_fwd = mk_ceil_div(cfg->minibatch_rows, MK_ROW_TILE);
    if (cfg->minibatch_rows_bwd)
        c->dims.mb_tiles_bwd = mk_ceil_div(cfg->minibatch_rows_bwd, MK_ROW_TILE);
}

typedef struct reader { const char *path; int index; const json_value *record; char *error; size_t size; bool ok; } reader;

static int64_t whole(reader *r, const char *key)
{
    const json_value *v = json_get(r->record, key);
    if (r->ok && (!v || !v->is_integer || v->integer < 0 || v->integer > INT32_MAX)) {
        snprintf(r->error, r->size, "%s: record %d has no whole number \"%s\"", r->path, r->index, key);
        r->ok = false;
    }
    return r->ok ? v->integer : 0;
}

static const char *text(reader *r, const char *key)
{
    const json_value *v = json_get(r->record, key);
    if (r->ok && (!v || v->type != JSON_STRING)) {
        snprintf(r->error, r->size, "%s: record %d has no text \"%s\"", r->path, r->index, key);
        r->ok = false;
    }
    return r->ok ? v->string : "";
}

static int64_t optional(const reader *r, const char *key)
{
    const json_value *v = json_get(r->record, key);
    return v && v->is_integer ? v->integer : 0;
}

static const char *optional_text(const reader *r, const char *key, const char *otherwise)
{
    const json_value *v = json_get(r->record, key);
    return v && v->type == JSON_STRING ? v->string : otherwise;
}

/* The policy of a context, by the names of bench/. */
static bool save_of(reader *r, mok_save *save)
{
    static const char *const names[] = {[MOK_SAVE_AUTO] = "auto", [MOK_SAVE_NONE] = "none", [MOK_SAVE_RING] = "ring", [MOK_SAVE_ALL] = "all"};
    const char *name = optional_text(r, "save", "auto");
    for (int i = MOK_SAVE_AUTO; i <= MOK_SAVE_ALL; i++)
        if (!strcmp(name, names[i])) {
            *save = (mok_save)i;
            return true;
        }
    snprintf(r->error, r->size, "%s: record %d has \"save\": \"%s\", which is not auto, none, ring or all", r->path, r->index, name);
    return false;
}

/* "forward", "backward", or "train": one after the other. */
static bool pass_of(reader *r, const char *name, sim_record *out, mk_pass *pass)
{
    out->both = !strcmp(name, "train");
    *pass = !strcmp(name, "forward") ? MK_PASS_FORWARD : MK_PASS_BACKWARD;
    if (out->both || !strcmp(name, "forward") || !strcmp(name, "backward"))
        return true;
    snprintf(r->error, r->size, "%s: record %d has the pass \"%s\", which is not forward, backward or train", r->path, r->index, name);
    return false;
}

/* The fields that may be left out. */
static bool take_settings(reader *r, const sim_profile *p, mok_config *cfg, int32_t ranks, mk_pass pass, sim_record *out)
{
    sim_strategy_id strategy;
    if (!strategy_of(optional_text(r, "strategy", "mok"), &strategy)) {
        snprintf(r->error, r->size, "%s: record %d has no known strategy", r->path, r->index);
        return false;
    }
    bool serial = sim_strategies[strategy].serial;
    mok_config with = *cfg;
    with.ring_rows = optional(r, "ring_rows");
    with.minibatch_rows = optional(r, "minibatch_rows");
    with.minibatch_rows_bwd = json_get(r->record, "minibatch_rows_bwd") ? optional(r, "minibatch_rows_bwd") : with.minibatch_rows;
    mok_save save;
    if (!save_of(r, &save))
        return false;
    with.save = save;
    if (!case_of(serial ? cfg : &with, ranks, p, pass, &out->c, r->error, r->size))
        return false;
    if (serial)
        set_macrobatch(&with, &out->c);
    out->c.strategy = strategy;
    out->c.comm_sms = (int32_t)optional(r, "comm_sms");
    int64_t distance = json_get(r->record, "copy_distance") ? optional(r, "copy_distance") : 1; /* without: measured when rows were copied from any distance */
    out->c.copy_distance = distance == MK_COPY_DISTANCE ? SIM_COPIES_AS_BUILT : distance;
    out->c.mxfp8 = !strcmp(optional_text(r, "dtype", "bf16"), "mxfp8");
    out->calibrate = json_get(r->record, "fit") && json_get(r->record, "fit")->boolean;
    return true;
}

static bool take(reader *r, const sim_profile *p, sim_record *out, char name[96])
{
    mok_config cfg = MOK_INIT(mok_config);
    cfg.hidden = whole(r, "H");
    cfg.intermediate = whole(r, "I");
    cfg.num_experts = whole(r, "E");
    cfg.topk = whole(r, "K");
    cfg.max_tokens = whole(r, "T");
    cfg.shared_intermediate = whole(r, "shared");
    int32_t ranks = (int32_t)whole(r, "ranks");
    const char *pass = text(r, "pass"), *mode = text(r, "mode"), *shape = text(r, "shape");
    const json_value *ms = json_get(json_get(r->record, "ms"), "p50");
    if (r->ok && (!ms || ms->type != JSON_NUMBER || !(ms->number > 0))) {
        snprintf(r->error, r->size, "%s: record %d has no number \"ms\".\"p50\"", r->path, r->index);
        r->ok = false;
    }
    if (!r->ok)
        return false;
    int64_t chosen = cfg.num_experts; /* of a small share, experts that nobody chooses fill up to top-k */
    if (cfg.num_experts < cfg.topk)
        cfg.num_experts = cfg.topk;
    mk_pass which;
    if (!pass_of(r, pass, out, &which) || !take_settings(r, p, &cfg, ranks, which, out))
        return false;
    out->c.sustained = !strcmp(mode, "sustained");
    out->measured = ms->number * 1e-3;
    snprintf(name, 96, "%.40s T%d, %d rank%s, %s, %s", shape, (int)cfg.max_tokens, ranks, ranks > 1 ? "s" : "", pass, mode);
    int64_t ring = optional(r, "ring_rows");
    if (json_get(r->record, "save") && ring && ring < cfg.max_tokens * cfg.topk) /* bench/ writes the ring down when it holds all rows, too */
        snprintf(name + strlen(name), 96 - strlen(name), ", ring %d, save %s", (int)ring, optional_text(r, "save", "auto"));
    sim_routing routing = {.kind = strcmp(optional_text(r, "routing", ""), "uniform") ? SIM_REPLACEMENT : SIM_UNIFORM, .seed = 1};
    int32_t *ids = malloc(sizeof *ids * (size_t)(cfg.max_tokens * ranks * cfg.topk));
    bool ok = ids && sim_make_routes(&routing, cfg.max_tokens * ranks, cfg.topk, chosen, ids);
    out->c.ids = ids;
    if (!ok)
        snprintf(r->error, r->size, "out of memory for record %d of %s", r->index, r->path);
    ok = ok && sim_make_tables(&out->c, &out->tables, r->error, r->size);
    out->c.ids = NULL;
    free(ids);
    return ok;
}

bool records_read(const char *path, const sim_profile *p, record_list *list, char *error, size_t error_size)
{
    json_value *file = json_read_file(path, error, error_size);
    bool ok = file != NULL;
    if (!list->records) {
        list->records = calloc(RECORDS_MAX, sizeof *list->records);
        list->names = calloc(RECORDS_MAX, sizeof *list->names);
        ok = ok && list->records && list->names;
    }
    if (ok && file->type != JSON_ARRAY) {
        snprintf(error, error_size, "%s: records must be an array", path);
        ok = false;
    }
    int index = 0;
    for (const json_value *v = ok ? file->first : NULL; v && ok; v = v->next, index++) {
        reader r = {path, index, v, error, error_size, true};
        if (list->count == RECORDS_MAX) {
            snprintf(error, error_size, "more than %d records", RECORDS_MAX);
            ok = false;
            break;
        }
        list->split |= json_get(v, "fit") != NULL;
        ok = take(&r, p, &list->records[list->count], list->names[list->count]);
        list->count += ok;
    }
    json_free(file);
    return ok;
}

void records_free(record_list *list)
{
    for (int i = 0; i < list->count; i++)
        sim_tables_free(&list->records[i].tables);
    free(list->records);
    free(list->names);
    *list = (record_list){0};
}
