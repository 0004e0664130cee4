/* mok train: a small byte-level language model whose feed-forward layers are MoE layers of the library. */
#include <stdio.h>
#include <unistd.h>

#include "args.h"
#include "commands.h"
#include "shape.h"
#include "term.h"
#include "train.h"

#ifndef MOK_SOURCE_DIR
#define MOK_SOURCE_DIR "."
#endif

static const char summary[] =
    "Trains a small byte-level language model on text files. Its loss has the same bits for any number of ranks.";

enum { QUICK_STEPS = 20, QUICK_TOKENS = 512, QUICK_WIDTH = 64 };

/* The model's figures come from the checkpoint; an option that says something else is refused. */
static bool resume(const arg_option *options, size_t num_options, train_settings *s, train_outcome *outcome, char error[LM_ERROR])
{
    const train_settings wanted = *s;
    if (!train_resume(s, outcome, error))
        return false;
    const lm_config *a = &s->cfg, *b = &wanted.cfg;
    const struct { const char *name; double is, wanted; } figures[] = {
        {"hidden", (double)a->hidden, (double)b->hidden}, {"intermediate", (double)a->intermediate, (double)b->intermediate},
        {"shared", (double)a->shared_intermediate, (double)b->shared_intermediate}, {"layers", (double)a->layers, (double)b->layers},
        {"experts", (double)a->experts, (double)b->experts}, {"topk", (double)a->topk, (double)b->topk},
        {"context", (double)a->context, (double)b->context}, {"tokens", (double)a->tokens, (double)b->tokens},
        {"seed", (double)a->seed, (double)b->seed}, {"balance", a->balance, b->balance}, {"lr", s->rate, wanted.rate},
        {"drop-routes", a->drop_routes, b->drop_routes},
    };
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++)
        if (args_given(options, num_options, figures[i].name) && figures[i].is != figures[i].wanted) {
            snprintf(error, LM_ERROR, "%s was trained with --%s %g, not %g: leave the option out, or begin anew", s->resume, figures[i].name,
                     figures[i].is, figures[i].wanted);
            return false;
        }
    if (args_given(options, num_options, "dtype") && a->mxfp8 != b->mxfp8) {
        snprintf(error, LM_ERROR, "%s was trained with --dtype %s, not %s: leave the option out, or begin anew", s->resume, a->mxfp8 ? "mxfp8" : "bf16",
                 b->mxfp8 ? "mxfp8" : "bf16");
        return false;
    }
    return true;
}

static void make_quick(const arg_option *options, size_t num_options, train_settings *s)
{
    const struct { const char *name; int64_t *value, quick; } figures[] = {
        {"steps", &s->steps, QUICK_STEPS}, {"tokens", &s->cfg.tokens, QUICK_TOKENS}, {"hidden", &s->cfg.hidden, QUICK_WIDTH},
        {"intermediate", &s->cfg.intermediate, QUICK_WIDTH}, {"layers", &s->cfg.layers, 1},
    };
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++)
        if (!args_given(options, num_options, figures[i].name))
            *figures[i].value = figures[i].quick;
}

/* Parameters with their state, chunk gradients and, per layer, rows: what large figures would take. */
static bool fits(const lm_config *c, char *error, size_t size)
{
    double experts = 3.0 * (double)c->layers * (double)(c->experts * c->intermediate + c->shared_intermediate) * (double)c->hidden;
    double dense = 512.0 * (double)c->hidden + (double)c->layers * (double)c->hidden * (double)(c->experts + 3 * c->shared_intermediate);
    double rows = (double)c->layers * (double)c->tokens * (double)c->topk * (double)(12 * c->hidden + 8 * c->intermediate);
    return shape_fits(20 * experts + 4 * (4 + LM_CHUNKS) * dense + 2 * rows, error, size);
}

static bool train(train_settings *s, const arg_string_list *paths, train_outcome *outcome, char error[LM_ERROR])
{
    lm_text text;
    const char *own = access(MOK_SOURCE_DIR, R_OK) ? "." : MOK_SOURCE_DIR;
    bool ok = lm_text_read(&text, paths->count ? paths->values : &own, paths->count ? paths->count : 1, error, LM_ERROR);
    if (ok && !s->json)
        printf("text: %s bytes of %lld files to learn from, %s of %lld held out, fingerprint %016llx\n", term_count(text.train_size).text,
               (long long)(text.files - text.files_held_out), term_count(text.held_out_size).text, (long long)text.files_held_out,
               (unsigned long long)text.fingerprint);
    ok = ok && train_run(s, &text, s->json ? NULL : stdout, outcome, error) && train_write_csv(s, outcome, error);
    if (ok && !(s->json ? train_print_json(s, &text, outcome) : train_print_text(s, &text, outcome))) {
        snprintf(error, LM_ERROR, "the result could not be written");
        ok = false;
    }
    lm_text_free(&text);
    return ok;
}

int command_train(int argc, char **argv)
{
    train_settings s = {.steps = 0};
    train_outcome outcome = {.first_step = 0};
    lm_config *c = &s.cfg;
    arg_string_list paths;
    const char *dtype_name;
    mok_dtype dtype;
    int64_t ranks, seed;
    bool quick;
    char error[LM_ERROR];
    arg_option options[] = {
        ARG_STRING_LIST("text", "PATH", &paths, NULL, "files and folders to learn from; MoK's own sources if not given"),
        ARG_INT("steps", "N", &s.steps, 400, 1, 1 << 30, "steps in all, those before --resume included"),
        ARG_INT("ranks", "P", &ranks, 4, 1, 256, "ranks, as threads of this process; changes no bit of the losses"),
        ARG_INT("tokens", "N", &c->tokens, 2048, LM_CHUNKS, 1 << 22, "bytes predicted per step, a multiple of 16"),
        ARG_INT("hidden", "H", &c->hidden, 128, 64, 1 << 14, "width of the model, a multiple of 64"),
        ARG_INT("intermediate", "I", &c->intermediate, 128, 64, 1 << 16, "intermediate size of an expert, a multiple of 64"),
        ARG_INT("shared", "IS", &c->shared_intermediate, 0, 0, 1 << 16, "intermediate size of a shared expert, 0 for none"),
        ARG_INT("layers", "L", &c->layers, 3, 1, 256, "blocks, each with an MoE layer"),
        ARG_INT("experts", "E", &c->experts, 16, 1, 4096, "experts of a layer"),
        ARG_INT("topk", "K", &c->topk, 2, 1, 64, "experts of a byte"),
        ARG_INT("context", "C", &c->context, 8, 1, 64, "bytes that the model sees, a divisor of H"),
        ARG_DOUBLE("lr", "RATE", &s.rate, 5e-3, 0, 1, "learning rate, reached after 20 steps; falls with the square root from step 200 on"),
        ARG_DOUBLE("balance", "FACTOR", &c->balance, 0.01, 0, 100, "factor of the load-balancing loss"),
        ARG_INT("seed", "N", &seed, 1, 0, INT64_MAX, "of first parameters and batches"),
        SHAPE_DTYPE_OPTION(&dtype_name),
        ARG_FLAG("drop-routes", &c->drop_routes, "drop every route, so that no expert sees anything: shows that they are what learns"),
        ARG_INT("every", "N", &s.every, 50, 1, 1 << 30, "steps between held-out losses, and between checkpoints"),
        ARG_STRING("checkpoint", "FILE", &s.checkpoint, NULL, "where to keep the run; replaced whole, never half written"),
        ARG_STRING("resume", "FILE", &s.resume, NULL, "go on from a checkpoint, with any number of ranks and the same bits"),
        ARG_STRING("csv", "FILE", &s.csv, NULL, "write the loss curve"),
        ARG_FLAG("quick", &quick, "a smaller model and a few steps"),
        ARG_FLAG("json", &s.json, "print JSON"),
    };
    const size_t num_options = sizeof options / sizeof *options;
    args_result parsed = args_parse(options, num_options, argc, argv, error, sizeof error);
    int status = 0;
    if (parsed == ARGS_HELP)
        args_help(stdout, "mok train", summary, options, num_options);
    if (parsed == ARGS_OK && !shape_dtype(dtype_name, &dtype, error, sizeof error))
        parsed = ARGS_ERROR;
    if (parsed == ARGS_OK) {
        c->mxfp8 = dtype == MOK_MXFP8;
        c->ranks = (int32_t)ranks;
        c->seed = (uint64_t)seed;
        if (quick)
            make_quick(options, num_options, &s);
        if ((s.resume && !resume(options, num_options, &s, &outcome, error)) || !fits(c, error, sizeof error))
            parsed = ARGS_ERROR;
        else
            status = train(&s, &paths, &outcome, error) ? 0 : 1;
    }
    train_outcome_free(&outcome);
    if (parsed == ARGS_ERROR || status)
        fprintf(stderr, "mok train: %s\n", error);
    args_free(options, num_options);
    return parsed == ARGS_ERROR ? 2 : status;
}
