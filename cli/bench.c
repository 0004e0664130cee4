/* mok bench: the layer's passes, and the GEMM beside OpenBLAS in the same run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "bench_link.h"
#include "commands.h"
#include "shape.h"
#include "term.h"

/* ------------------------------------------------------------------------------------------------ where it was measured -- */

static void cut_line(char *text) { text[strcspn(text, "\n")] = '\0'; }

static void find_device(char *text, size_t size)
{
    char line[512];
    FILE *file = fopen("/proc/cpuinfo", "r");
    snprintf(text, size, "unknown CPU");
    while (file && fgets(line, sizeof line, file)) {
        const char *value = strstr(line, ": ");
        if (strncmp(line, "model name", 10) != 0 || !value)
            continue;
        snprintf(text, size, "%.120s", value + 2);
        cut_line(text);
        break;
    }
    if (file)
        fclose(file);
}

/* The commit of the sources, if they and git are still there; else what MOK_COMMIT says. */
static void find_commit(char *text, size_t size)
{
    const char *given = getenv("MOK_COMMIT");
    char line[64];
    snprintf(text, size, "%s", given ? given : "");
    if (access(MOK_SOURCE_DIR "/.git", F_OK) != 0)
        return;
    FILE *pipe = popen("git -C '" MOK_SOURCE_DIR "' describe --always --dirty 2>/dev/null", "r");
    if (pipe && fgets(line, sizeof line, pipe))
        snprintf(text, size, "%s", line);
    if (pipe)
        pclose(pipe);
    cut_line(text);
}

static void find_backend(mok_backend_id id, char *text, size_t size)
{
    mok_backend_info b = MOK_INIT(mok_backend_info);
    *text = '\0';
    for (int32_t i = 0; mok_backend_query(i, &b) == MOK_OK; i++)
        if (b.id == id)
            snprintf(text, size, "%.479s", b.detail);
}

/* -------------------------------------------------------------------------------------------------------- command -- */

/* Those that need settling. */
typedef struct bench_options {
    const char *save, *backend, *only, *dtype;
    int64_t blocks, devices; /* devices: how many; 0: to be found out */
    arg_int_list row_bytes;
    bool processes, tokens_given;
} bench_options;

/* What creation would refuse, and what cannot be measured here. */
static bool is_legal(const bench_settings *s, char *error, size_t size)
{
    mok_config cfg = s->cfg;
    mok_plan plan = MOK_INIT(mok_plan);
    cfg.max_tokens = s->tokens;
    cfg.save = s->save;
    cfg.save_rows = s->save_rows;
    if (mok_plan_query(&cfg, s->ranks, 0, 0, 0, 0, &plan, NULL, NULL) != MOK_OK) {
        snprintf(error, size, "%s", mok_last_error());
        return false;
    }
    if (s->ranks > cfg.num_experts) {
        snprintf(error, size, "--ranks is %d, more than the %lld experts: every rank needs work here", s->ranks, (long long)cfg.num_experts);
        return false;
    }
    double weights = 3.0 * (double)cfg.hidden * (double)(cfg.num_experts * cfg.intermediate + s->ranks * cfg.shared_intermediate);
    return shape_fits(4 * weights + s->ranks * (double)(plan.heap_bytes + plan.local_bytes + plan.context_bytes), error, size);
}

static int measure(bench_report *r, bool json, char *error, size_t size)
{
    find_device(r->device, sizeof r->device);
    find_commit(r->commit, sizeof r->commit);
    /* Ranks that are processes are forked here, before this process asks CUDA anything or starts a thread. */
    bench_link_run *link = r->has_link ? bench_link_start(&r->link->settings, error, size) : NULL;
    bool ok = link || !r->has_link;
    bench_gpu_watch *watch = r->settings.cfg.backend == MOK_BACKEND_CUDA ? bench_gpu_watch_start() : NULL;
    if (link)
        ok = bench_link_finish(link, r->link, error, size);
    /* The GEMM first: OpenBLAS wants to be opened before other threads start. */
    ok = ok && (!r->has_gemm || bench_run_gemm(&r->settings.cfg, &r->gemm, error, size)) && (!r->has_layer || bench_run_layer(&r->settings, &r->layer, error, size));
    r->has_gpu = bench_gpu_watch_end(watch, &r->gpu);
    find_backend(r->settings.cfg.backend, r->backend, sizeof r->backend);
    if (!ok) {
        fprintf(stderr, "mok bench: %s\n", error);
        return 1;
    }
    if (json)
        return bench_print_json(r) ? 0 : 1;
    bench_print_text(r);
    return 0;
}

/* Rank r has GPU r mod `count`; 0: as many as there are, at most one for each rank. Ranks that are processes have one each, as nobody has counted them. */
static void settle_devices(int64_t count, int32_t ranks, bool processes, int32_t *devices)
{
    mok_backend_info b = MOK_INIT(mok_backend_info);
    for (int32_t i = 0; !count && !processes && mok_backend_query(i, &b) == MOK_OK && b.id != MOK_BACKEND_CUDA; i++)
        ;
    count = count ? count : processes ? ranks : b.num_devices > 0 ? b.num_devices : 1;
    for (int32_t r = 0; r < ranks; r++)
        devices[r] = (int32_t)(r % count);
}

static bool settle_link(bench_report *r, const bench_options *o, char *error, size_t size)
{
    bench_link_settings *s = &r->link->settings;
    *s = (bench_link_settings){.ranks = r->settings.ranks, .blocks = (int32_t)o->blocks, .processes = o->processes, .tokens = o->tokens_given ? r->settings.tokens : 16384,
                               .repeat = r->settings.repeat, .num_rows = (int32_t)o->row_bytes.count};
    memcpy(s->devices, r->settings.devices, sizeof s->devices);
    if (r->settings.cfg.backend != MOK_BACKEND_CUDA)
        snprintf(error, size, "--only link needs --backend cuda: the cpu backend has no link");
    else if (s->ranks > BENCH_LINK_MAX_RANKS)
        snprintf(error, size, "--ranks is %d, but the link is measured with at most %d", s->ranks, BENCH_LINK_MAX_RANKS);
    else if (s->num_rows < 1 || s->num_rows > BENCH_LINK_MAX_ROWS)
        snprintf(error, size, "--row-bytes has %d sizes, but must have 1 to %d", s->num_rows, BENCH_LINK_MAX_ROWS);
    else {
        for (int32_t i = 0; i < s->num_rows; i++) {
            s->row_bytes[i] = o->row_bytes.values[i];
            if (s->row_bytes[i] % 128) {
                snprintf(error, size, "--row-bytes has %lld, but rows are multiples of 128 bytes", (long long)s->row_bytes[i]);
                return false;
            }
        }
        snprintf(r->name, sizeof r->name, "link");
        return true;
    }
    return false;
}

static bool settle(bench_report *r, const shape_options *shape, const bench_options *o, char *error, size_t size)
{
    bench_settings *s = &r->settings;
    const char *only = o->only;
    if (!shape_backend(o->backend, &s->cfg.backend, error, size) || !shape_save(o->save, &s->save, &s->save_rows, error, size))
        return false;
    bool cuda = s->cfg.backend == MOK_BACKEND_CUDA;
    if (!o->processes && !shape_backend_usable(s->cfg.backend, error, size))
        return false;
    if (strcmp(only, "all") && strcmp(only, "layer") && strcmp(only, "gemm") && strcmp(only, "link")) {
        snprintf(error, size, "--only is \"%s\", but must be layer, gemm, link or all", only);
        return false;
    }
    r->has_link = !strcmp(only, "link");
    if (o->processes && !r->has_link) {
        snprintf(error, size, "--processes goes with --only link");
        return false;
    }
    settle_devices(o->devices, s->ranks, o->processes, s->devices);
    if (r->has_link)
        return settle_link(r, o, error, size);
    r->has_layer = strcmp(only, "gemm") != 0;
    r->has_gemm = strcmp(only, "layer") != 0 && !cuda; /* of the cpu backend; the GPU's is measured by bench/gemm_core.sh */
    if (!shape_resolve(shape, &s->cfg, r->name, NULL, error, size) || !shape_dtype(o->dtype, &s->cfg.dtype, error, size))
        return false;
    s->cfg.backend = cuda ? MOK_BACKEND_CUDA : MOK_BACKEND_CPU;
    return is_legal(s, error, size);
}

int command_bench(int argc, char **argv)
{
    static bench_report r;
    static bench_link link;
    shape_options shape;
    bench_options o = {.save = NULL};
    int64_t ranks, threads;
    bool json;
    char error[1024];
    r = (bench_report){.link = &link};
    arg_option options[] = {
        SHAPE_MODEL_OPTION(&shape),
        SHAPE_OPTIONS(&shape, 1024, 512, 512, 8, 2),
        ARG_INT("ranks", "P", &ranks, 2, 1, 4096, "ranks, as threads of this process"),
        ARG_INT("tokens", "T", &r.settings.tokens, 256, 1, 1 << 24, "tokens of each rank; with --only link rows, 16384 if not given"),
        ARG_INT("threads", "N", &threads, 0, 1, 1024, "threads of each rank; cores / ranks if not given"),
        ARG_INT("repeat", "N", &r.settings.repeat, 20, 1, 100000, "measured passes, after one that is not"),
        ARG_STRING("save", "WHAT", &o.save, "all", "gate/up rows kept for the backward: none, ring, all or a number"),
        ARG_STRING("only", "PART", &o.only, "all", "layer, gemm or all; or link (cuda): rows from GPU to GPU by themselves"),
        ARG_STRING("backend", "NAME", &o.backend, "cpu", "cpu or cuda"),
        ARG_INT("devices", "N", &o.devices, 0, 1, 64, "cuda: GPUs that the ranks are spread over; all if not given"),
        SHAPE_DTYPE_OPTION(&o.dtype),
        ARG_FLAG("requantise", &r.settings.requantise, "mxfp8: quantise the weights in every pass, not once before"),
        ARG_INT_LIST("row-bytes", "LIST", &o.row_bytes, "14336,12288,8192,4096", 128, 1 << 20, "link: lengths of rows in BF16, multiples of 128"),
        ARG_INT("blocks", "N", &o.blocks, 0, 1, 65535, "link: CTAs that move rows; one on each SM if not given"),
        ARG_FLAG("processes", &o.processes, "link: ranks are processes, with a GPU each"),
        ARG_FLAG("json", &json, "print JSON"),
    };
    const size_t num_options = sizeof options / sizeof *options;
    args_result parsed = args_parse(options, num_options, argc, argv, error, sizeof error);
    int status = 0;
    if (parsed == ARGS_HELP)
        args_help(stdout, "mok bench", "Times of one layer's passes; on a GPU by stage, on the CPU also the rate of the GEMM beside OpenBLAS. Or of the link alone.", options, num_options);
    if (parsed == ARGS_OK) {
        r.settings.ranks = (int32_t)ranks;
        r.settings.threads = (int32_t)threads;
        o.tokens_given = args_given(options, num_options, "tokens");
        shape_prefer_model(&shape, options, num_options);
        if (settle(&r, &shape, &o, error, sizeof error))
            status = measure(&r, json, error, sizeof error);
        else
            parsed = ARGS_ERROR;
    }
    if (parsed == ARGS_ERROR)
        fprintf(stderr, "mok bench: %s\n", error);
    args_free(options, num_options);
    return parsed == ARGS_ERROR ? 2 : status;
}
