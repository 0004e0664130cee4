/* mok simulate: a layer on machines that are not here. */
#include "simulate.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "profile_file.h"
#include "term.h"

/* --- routes from a file -------------------------------------------------------------------------------------------------- */

/* Numbers separated by white space or commas: the K ids of token 0, then of token 1, ... */
static int32_t *read_ids(const char *path, int64_t num_experts, int64_t *count, char *error, size_t error_size)
{
    FILE *in = fopen(path, "r");
    int64_t capacity = 1 << 16;
    int32_t *ids = malloc(sizeof *ids * (size_t)capacity);
    long long id;
    bool ok = in && ids;
    *count = 0;
    if (!in)
        snprintf(error, error_size, "%s cannot be read", path);
    for (int got = 1; ok && got == 1;) {
        for (int c = fgetc(in); ; c = fgetc(in))
            if (c != ',' && !isspace(c)) {
                ungetc(c, in);
                break;
            }
        got = fscanf(in, "%lld", &id);
        if (got == 0 || (got == 1 && (id < -1 || id >= num_experts))) {
            snprintf(error, error_size, "%s: id %lld is no expert from -1 to %lld", path, (long long)*count, (long long)num_experts - 1);
            ok = false;
        }
        if (ok && got == 1) {
            if (*count == capacity) {
                int32_t *more = realloc(ids, sizeof *ids * (size_t)(capacity *= 2));
                ids = more ? more : ids;
                ok = more != NULL;
            }
            if (ok)
                ids[(*count)++] = (int32_t)id;
        }
    }
    if (in)
        fclose(in);
    if (!ok) {
        free(ids);
        ids = NULL;
    }
    return ids;
}

int32_t *simulate_make_ids(const simulate_settings *s, int32_t ranks, int64_t rack, char *error, size_t error_size)
{
    int64_t need = s->tokens * ranks * s->cfg.topk;
    int32_t *ids = malloc(sizeof *ids * (size_t)need);
    sim_routing routing = s->routing;
    if (ids && s->ids) {
        if (s->num_ids < need * (rack + 1)) {
            snprintf(error, error_size, "%s has %lld ids, but %lld ranks x %lld tokens x top-%lld on rack %lld need %lld", s->routing_text, (long long)s->num_ids, (long long)ranks,
                     (long long)s->tokens, (long long)s->cfg.topk, (long long)rack, (long long)(need * (rack + 1)));
            free(ids);
            return NULL;
        }
        memcpy(ids, s->ids + rack * need, sizeof *ids * (size_t)need);
        return ids;
    }
    routing.seed += (uint64_t)rack * 1000003;
    if (ids && sim_make_routes(&routing, s->tokens * ranks, s->cfg.topk, s->cfg.num_experts, ids))
        return ids;
    snprintf(error, error_size, "out of memory for the routes of %lld tokens", (long long)(s->tokens * ranks));
    free(ids);
    return NULL;
}

/* --- a timeline for chrome://tracing and Perfetto ------------------------------------------------------------------------ */

typedef struct tracer { FILE *out; bool any; const char *pass; } tracer;

static void trace_event(void *user, int32_t rank, int32_t lane, const char *name, double start, double end)
{
    tracer *t = user;
    fprintf(t->out, "%s{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f}", t->any ? ",\n" : "", name, t->pass, rank, lane, start * 1e6,
            (end - start) * 1e6);
    t->any = true;
}

/* --- one run ------------------------------------------------------------------------------------------------------------- */

static bool make_case(const simulate_settings *s, const simulate_run *run, sim_case *c, char *error, size_t error_size)
{
    mok_config cfg = s->cfg;
    bool serial = sim_strategies[run->strategy].serial;
    cfg.max_tokens = s->tokens;
    if (serial) /* a macrobatch may be a single minibatch: the rule of two is ours */
        cfg.ring_rows = cfg.minibatch_rows = cfg.minibatch_rows_bwd = 0;
    if (!case_of(&cfg, run->ranks, &s->profile, run->pass, c, error, error_size))
        return false;
    if (serial)
        set_macrobatch(&s->cfg, c);
    c->strategy = run->strategy;
    c->mxfp8 = s->mxfp8;
    c->sustained = s->sustained;
    c->no_signals = s->no_signals;
    c->copy_distance = s->copy_distance;
    c->comm_sms = run->pass == MK_PASS_BACKWARD ? s->comm_sms_bwd : s->comm_sms;
    return true;
}

/* How much of the pass is the link's: the same pass again with a link that costs nothing. */
static bool measure_exposed(const sim_case *c, simulate_run *run, double seconds, char *error, size_t error_size)
{
    sim_case without = *c;
    if (run->ranks == 1)
        return true;
    sim_result *r = malloc(sizeof *r);
    without.free_link = true;
    without.trace = NULL;
    bool ok = r && sim_simulate(&without, r, error, error_size);
    if (ok)
        run->exposed = seconds > r->seconds ? seconds - r->seconds : 0;
    free(r);
    return ok;
}

static bool run_rack(const simulate_settings *s, simulate_run *run, sim_case *c, int64_t rack, char *error, size_t error_size)
{
    static const char *const pass_names[] = {"forward", "recompute", "backward"};
    tracer t = {NULL, false, pass_names[run->pass]};
    sim_result *r = malloc(sizeof *r);
    int32_t *ids = simulate_make_ids(s, run->ranks, rack, error, error_size);
    bool ok = r && ids;
    c->ids = ids;
    if (ok && s->trace_path && rack == 0 && run->strategy == SIM_STRATEGY_mok) {
        t.out = fopen(s->trace_path, run->pass == MK_PASS_BACKWARD && s->forward ? "a" : "w");
        c->trace = t.out ? trace_event : NULL;
        c->user = &t;
        c->trace_rank = s->trace_rank;
        if (t.out)
            fputs("[\n", t.out);
    }
    ok = ok && sim_simulate(c, r, error, error_size);
    if (t.out) {
        fputs("\n]\n", t.out);
        fclose(t.out);
        c->trace = NULL;
    }
    if (ok) {
        run->mean_seconds += r->seconds / (double)s->racks;
        if (rack == 0 || r->seconds > run->result.seconds) { /* data parallel: all wait for the slowest */
            run->result = *r;
            ok = s->only_time || measure_exposed(c, run, r->seconds, error, error_size);
        }
    }
    free(ids);
    free(r);
    return ok;
}

bool simulate_one(const simulate_settings *s, simulate_run *run, char *error, size_t error_size)
{
    sim_case c;
    double started = term_now();
    bool ok = make_case(s, run, &c, error, error_size);
    if (!ok)
        return false;
    run->dims = c.dims;
    run->mean_seconds = 0;
    for (int64_t rack = 0; rack < s->racks && ok; rack++)
        ok = run_rack(s, run, &c, rack, error, error_size);
    run->took = term_now() - started;
    return ok;
}

const simulate_run *simulate_find(const simulate_view *v, int32_t ranks, mk_pass pass, sim_strategy_id strategy)
{
    for (int i = 0; i < v->count; i++)
        if (v->runs[i].ranks == ranks && v->runs[i].pass == pass && v->runs[i].strategy == strategy)
            return &v->runs[i];
    return NULL;
}

double simulate_step_ratio(const simulate_view *v, int32_t ranks, sim_strategy_id strategy)
{
    double layer = 0, baseline = 0;
    for (mk_pass pass = MK_PASS_FORWARD; pass <= MK_PASS_BACKWARD; pass += MK_PASS_BACKWARD - MK_PASS_FORWARD) {
        const simulate_run *ours = simulate_find(v, ranks, pass, strategy), *theirs = simulate_find(v, ranks, pass, v->s->baseline);
        if (!ours || !theirs)
            return NAN;
        layer += ours->result.seconds + (pass == MK_PASS_FORWARD && !sim_strategies[strategy].phases ? ours->result.schedule_seconds : 0);
        baseline += theirs->result.seconds;
    }
    return 1 - v->s->moe_share + v->s->moe_share * layer / baseline;
}

/* --- the command --------------------------------------------------------------------------------------------------------- */

static bool parse_strategies(const char *text, bool chosen[SIM_NUM_STRATEGIES], char *error, size_t error_size)
{
    char copy[256], list[256] = "";
    snprintf(copy, sizeof copy, "%s", text);
    for (char *name = strtok(copy, ","); name; name = strtok(NULL, ",")) {
        bool known = false;
        for (int i = 0; i < SIM_NUM_STRATEGIES; i++)
            if (!strcmp(name, "all") || !strcmp(name, sim_strategies[i].name))
                chosen[i] = known = true;
        if (known)
            continue;
        for (int i = 0; i < SIM_NUM_STRATEGIES; i++)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? ", " : "", sim_strategies[i].name);
        snprintf(error, error_size, "--strategy: there is no \"%s\"; there are all, %s", name, list);
        return false;
    }
    return true;
}

bool simulate_word(const char *option, const char *text, const char *const *words, int num_words, int *which, char *error, size_t error_size)
{
    char list[128] = "";
    for (int i = 0; i < num_words; i++) {
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i == 0 ? "" : i == num_words - 1 ? " or " : ", ", words[i]);
        *which = i;
        if (!strcmp(text, words[i]))
            return true;
    }
    snprintf(error, error_size, "--%s is \"%s\", but must be %s", option, text, list);
    return false;
}

static bool settle_routing(simulate_settings *s, const char *text, char *error, size_t error_size)
{
    snprintf(s->routing_text, sizeof s->routing_text, "%s", text);
    if (strncmp(text, "file:", 5))
        return sim_parse_routing(text, &s->routing, error, error_size);
    s->ids = read_ids(text + 5, s->cfg.num_experts, &s->num_ids, error, error_size);
    return s->ids != NULL;
}

/* Every number of ranks, pass and strategy that was asked for. */
static bool run_all(simulate_settings *s, const arg_int_list *ranks, simulate_view *v, char *error, size_t error_size)
{
    for (size_t p = 0; p < ranks->count; p++)
        for (int pass = 0; pass < 2; pass++)
            for (int i = 0; i < SIM_NUM_STRATEGIES; i++) {
                if (!s->strategies[i] || !(pass ? s->backward : s->forward) || v->count == SIMULATE_MAX_RUNS)
                    continue;
                simulate_run *run = &v->runs[v->count];
                *run = (simulate_run){.ranks = (int32_t)ranks->values[p], .pass = pass ? MK_PASS_BACKWARD : MK_PASS_FORWARD, .strategy = (sim_strategy_id)i};
                if (!simulate_one(s, run, error, error_size))
                    return false;
                v->count++;
            }
    return true;
}

static void list_profile(void)
{
    term_table t;
    term_table_start(&t, "lrl", (const char *[]){"figure", "default", "meaning"});
    for (int i = 0; i < SIM_PROFILE_FIELDS; i++) {
        term_table_cell(&t, "%s", sim_profile_entries[i].name);
        term_table_cell(&t, "%g", sim_profile_entries[i].default_value);
        term_table_cell(&t, "%s", sim_profile_entries[i].text);
    }
    term_table_print(&t, stdout);
}

int command_simulate(int argc, char **argv)
{
    static simulate_settings s;
    shape_options shape;
    int64_t ring, minibatch, minibatch_bwd, comm_sms, comm_sms_bwd, seed, trace_rank;
    arg_int_list ranks;
    const char *profile, *assignments, *pass, *strategies, *routing, *dtype, *mode, *save, *svg, *baseline;
    bool json, list, no_copies;
    char error[1024];
    s = (simulate_settings){0};
    arg_option options[] = {
        SHAPE_MODEL_OPTION(&shape),
        SHAPE_OPTIONS(&shape, -1, -1, -1, -1, -1),
        ARG_STRING("profile", "NAME", &profile, "h200-x8", "the machine: a name of profiles/, or the path of a JSON file"),
        ARG_STRING("set", "NAME=X,...", &assignments, NULL, "figures of the profile by hand"),
        ARG_INT_LIST("ranks", "P,P,...", &ranks, "8", 1, 4096, "GPUs that share the experts; several: one run for each"),
        ARG_INT("tokens", "T", &s.tokens, 2048, 1, ARG_NO_LIMIT, "tokens of each rank"),
        ARG_STRING("pass", "WHAT", &pass, "both", "forward, backward or both"),
        ARG_STRING("strategy", "NAME,...", &strategies, "mok,nccl,deepep", "how rows travel; all, or names of docs/simulator.md"),
        ARG_STRING("routing", "KIND", &routing, "uniform", "uniform, balanced, replacement, zipf:SKEW, hot:SHARE, or file:PATH of top-k ids, token after token"),
        ARG_STRING("dtype", "TYPE", &dtype, "bf16", "bf16 or mxfp8"),
        ARG_STRING("mode", "MODE", &mode, "sustained", "burst: a cool chip; sustained: as in training"),
        ARG_INT("ring", "ROWS", &ring, 0, 1, ARG_NO_LIMIT, "rows of the ring; chosen if not given"),
        ARG_INT("minibatch", "ROWS", &minibatch, 0, 1, ARG_NO_LIMIT, "minibatch of the forward; chosen if not given"),
        ARG_INT("minibatch-bwd", "ROWS", &minibatch_bwd, 0, 1, ARG_NO_LIMIT, "minibatch of the backward; chosen if not given"),
        ARG_STRING("save", "WHAT", &save, "auto", "gate/up rows kept for the backward: none, ring, all or a number"),
        ARG_INT("comm-sms", "N", &comm_sms, 0, 0, 1024, "communication SMs of the forward; 0: a dispatch warp in every SM"),
        ARG_INT("comm-sms-bwd", "N", &comm_sms_bwd, -1, 0, 1024, "of the backward, if different"),
        ARG_INT("racks", "N", &s.racks, 1, 1, 64, "data-parallel groups of so many ranks, each with a routing of its own"),
        ARG_INT("seed", "N", &seed, 1, 0, ARG_NO_LIMIT, "of the routing"),
        ARG_FLAG("no-signals", &s.no_signals, "push dispatch: telling the peer costs nothing"),
        ARG_INT("copy-distance", "ROWS", &s.copy_distance, SIM_COPIES_AS_BUILT, 0, INT32_MAX, "pull a row rather than copy it from fewer rows away; 1: copy from any distance; 0: as the library does"),
        ARG_FLAG("no-copies", &no_copies, "pull every row, also where an earlier row of its token is in the ring"),
        ARG_DOUBLE("moe-share", "SHARE", &s.moe_share, 0, 0, 1, "share of these layers in the step of --baseline: also print the step's ratio"),
        ARG_STRING("baseline", "NAME", &baseline, "nccl", "what the share belongs to"),
        ARG_STRING("svg", "FILE", &svg, NULL, "draw time over ranks, or for one number of ranks link and ring over time"),
        ARG_STRING("trace", "FILE", &s.trace_path, NULL, "timeline of one rank of strategy mok, for Perfetto and chrome://tracing"),
        ARG_INT("trace-rank", "R", &trace_rank, 0, 0, 4095, "which rank"),
        ARG_FLAG("list-profile", &list, "the figures of a profile, and what they mean"),
        ARG_FLAG("json", &json, "print JSON"),
    };
    static const char *const passes[] = {"both", "forward", "backward"}, *const dtypes[] = {"bf16", "mxfp8"}, *const modes[] = {"burst", "sustained"};
    const size_t num_options = sizeof options / sizeof *options;
    simulate_view v = {&s, NULL, 0};
    args_result parsed = args_parse(options, num_options, argc, argv, error, sizeof error);
    int status = parsed == ARGS_ERROR ? 2 : 0, which_pass = 0, which_dtype = 0, which_mode = 0;
    if (parsed == ARGS_HELP) {
        args_help(stdout, "mok simulate", "A layer on machines that are not here: the real row tables, walk, counters and ring, with times from a machine profile. docs/simulator.md says how far to trust it.", options, num_options);
    } else if (parsed == ARGS_OK && list) {
        list_profile();
    } else if (parsed == ARGS_OK) {
        bool base[SIM_NUM_STRATEGIES] = {0};
        bool ok = profile_load(profile, &s.profile, error, sizeof error) && profile_set(&s.profile, assignments, error, sizeof error) && simulate_word("pass", pass, passes, 3, &which_pass, error, sizeof error) &&
                  simulate_word("dtype", dtype, dtypes, 2, &which_dtype, error, sizeof error) && simulate_word("mode", mode, modes, 2, &which_mode, error, sizeof error) &&
                  parse_strategies(strategies, s.strategies, error, sizeof error) && parse_strategies(baseline, base, error, sizeof error) &&
                  shape_resolve(&shape, &s.cfg, s.name, NULL, error, sizeof error) && shape_save(save, &s.cfg.save, &s.cfg.save_rows, error, sizeof error) &&
                  settle_routing(&s, routing, error, sizeof error);
        for (int i = 0; ok && i < SIM_NUM_STRATEGIES; i++)
            s.baseline = base[i] ? (sim_strategy_id)i : s.baseline;
        if (ok) {
            s.cfg.ring_rows = ring;
            s.cfg.minibatch_rows = minibatch;
            s.cfg.minibatch_rows_bwd = minibatch_bwd;
            s.comm_sms = (int32_t)comm_sms;
            s.copy_distance = no_copies ? SIM_NO_COPIES : s.copy_distance;
            s.comm_sms_bwd = (int32_t)(comm_sms_bwd < 0 ? comm_sms : comm_sms_bwd);
            s.routing.seed = (uint64_t)seed;
            s.trace_rank = (int32_t)trace_rank;
            s.mxfp8 = which_dtype == 1;
            s.sustained = which_mode == 1;
            s.forward = which_pass != 2;
            s.backward = which_pass != 1;
            shape_describe(&s.cfg, s.shape);
            v.runs = calloc(SIMULATE_MAX_RUNS, sizeof *v.runs);
            ok = v.runs && run_all(&s, &ranks, &v, error, sizeof error);
        }
        if (ok && svg)
            ok = simulate_draw(&v, svg, error, sizeof error);
        status = !ok ? 2 : json ? !simulate_print_json(&v) : 0;
        if (ok && !json)
            simulate_print_text(&v);
    }
    if (status == 2)
        fprintf(stderr, "mok simulate: %s\n", error);
    free(v.runs);
    free((void *)s.ids);
    args_free(options, num_options);
    return status;
}
