/* mok bench: which GPU and driver, and the clocks while it works. The driver's own tool is asked, again and again in a thread beside the
 * measurement, since clocks follow the load; each answer takes tens of milliseconds and none of the GPU's time. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

static void trim(char *to, size_t size, const char *from, size_t length)
{
    while (length && *from == ' ')
        from++, length--;
    while (length && (from[length - 1] == ' ' || from[length - 1] == '\n'))
        length--;
    snprintf(to, size, "%.*s", (int)length, from);
}

bool bench_gpu_parse(const char *line, bench_gpu *g)
{
    enum { FIELDS = 6 };
    char field[FIELDS][96];
    double *const numbers[FIELDS] = {NULL, NULL, &g->sm_clock_mhz, &g->max_sm_clock_mhz, &g->memory_clock_mhz, &g->power_w};
    for (int i = 0; i < FIELDS; i++) {
        size_t length = strcspn(line, ",");
        if ((line[length] == ',') != (i < FIELDS - 1) || length >= sizeof field[i])
            return false;
        trim(field[i], sizeof field[i], line, length);
        line += length + 1;
    }
    snprintf(g->name, sizeof g->name, "%s", field[0]);
    snprintf(g->driver, sizeof g->driver, "%.31s", field[1]);
    for (int i = 2; i < FIELDS; i++) {
        char *end;
        *numbers[i] = strtod(field[i], &end);
        if (end == field[i]) /* "[N/A]" */
            *numbers[i] = NAN;
    }
    return *g->name && *g->driver;
}

/* The GPU of the measurement is the first that CUDA may see. */
static void query_of(char *text, size_t size)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    size_t length = visible ? strspn(visible, "0123456789abcdefABCDEFGPUMIG-") : 0;
    snprintf(text, size, "nvidia-smi --id=%.*s --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw --format=csv,noheader,nounits 2>/dev/null",
             length ? (int)length : 1, length ? visible : "0");
}

static bool ask(bench_gpu *g)
{
    char query[256], line[512];
    query_of(query, sizeof query);
    FILE *pipe = popen(query, "r");
    bool ok = pipe && fgets(line, sizeof line, pipe) && bench_gpu_parse(line, g);
    if (pipe)
        pclose(pipe);
    return ok;
}

struct bench_gpu_watch {
    pthread_t thread;
    bool stop, started;
    bench_gpu last;
    int64_t count;
    double clocks[1024];
};

static void *watch(void *argument)
{
    bench_gpu_watch *w = argument;
    while (!__atomic_load_n(&w->stop, __ATOMIC_ACQUIRE) && ask(&w->last))
        if (!isnan(w->last.sm_clock_mhz))
            w->clocks[w->count++ % 1024] = w->last.sm_clock_mhz;
    return NULL;
}

bench_gpu_watch *bench_gpu_watch_start(void)
{
    bench_gpu_watch *w = calloc(1, sizeof *w);
    if (w)
        w->started = pthread_create(&w->thread, NULL, watch, w) == 0;
    return w;
}

bool bench_gpu_watch_end(bench_gpu_watch *w, bench_gpu *out)
{
    if (!w)
        return false;
    __atomic_store_n(&w->stop, true, __ATOMIC_RELEASE);
    if (w->started)
        pthread_join(w->thread, NULL);
    bool found = *w->last.name != '\0';
    *out = w->last;
    out->clock_samples = w->count;
    out->sm_clock_mhz = bench_percentile(w->clocks, w->count < 1024 ? w->count : 1024, 0.5);
    free(w);
    return found;
}
