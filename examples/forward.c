/* One forward pass over P ranks, from C: group, workspace, memory, schedule, forward. The cuda backend runs if it is named, the cpu
 * backend otherwise, and the first run's result is compared with the second's when both are asked for.
 *
 *   cc examples/forward.c $(pkg-config --cflags --libs mok) -lpthread -lm -o forward
 *   ./forward cpu            ./forward cuda            ./forward cpu cuda
 */
#include <math.h>
#include <mok.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 2, TOKENS = 384, HIDDEN = 512, INTERMEDIATE = 256, EXPERTS = 6, TOPK = 2 }; /* TOKENS of each rank */

typedef struct rank_run {
    mok_group *group;
    bool cuda;
    uint16_t *out; /* [TOKENS, HIDDEN] */
    bool ok;
} rank_run;

/* Small numbers that look random; the same on every rank that asks with the same seed. */
static uint16_t *bf16_values(int64_t n, float scale, uint32_t seed)
{
    uint16_t *values = malloc(sizeof *values * (size_t)n);
    for (int64_t i = 0; values && i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        float value = ((float)(seed >> 8) / 16777216.0f - 0.5f) * scale;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        values[i] = (uint16_t)(bits >> 16);
    }
    return values;
}

static void check(mok_status status, const char *what)
{
    if (status == MOK_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, mok_last_error());
    exit(1);
}

/* A copy of host data that the backend can address. */
static void *to_backend(mok_workspace *w, const void *data, size_t bytes)
{
    void *memory = NULL;
    check(mok_memory_alloc(w, bytes, &memory), "mok_memory_alloc");
    if (data)
        check(mok_memory_copy(w, memory, data, bytes), "mok_memory_copy");
    return memory;
}

static void *run_rank(void *argument)
{
    rank_run *run = argument;
    int32_t rank = mok_group_rank(run->group);
    mok_config cfg = MOK_INIT(mok_config);
    cfg.hidden = HIDDEN;
    cfg.intermediate = INTERMEDIATE;
    cfg.num_experts = EXPERTS;
    cfg.topk = TOPK;
    cfg.max_tokens = TOKENS;
    cfg.backend = run->cuda ? MOK_BACKEND_CUDA : MOK_BACKEND_CPU;

    mok_workspace *w = NULL;
    mok_plan plan = MOK_INIT(mok_plan);
    check(mok_workspace_create(run->group, &cfg, &w), "mok_workspace_create");
    check(mok_workspace_plan(w, &plan), "mok_workspace_plan");

    int32_t ids[TOKENS * TOPK];
    float weights[TOKENS * TOPK];
    for (int i = 0; i < TOKENS * TOPK; i++) {
        ids[i] = (i * 7 + rank * 3 + i / 5) % EXPERTS;
        weights[i] = 1.0f / TOPK;
    }
    int64_t own = plan.experts_count * HIDDEN * INTERMEDIATE, first = plan.experts_first * HIDDEN * INTERMEDIATE, all = (int64_t)EXPERTS * HIDDEN * INTERMEDIATE;
    uint16_t *x = bf16_values(TOKENS * HIDDEN, 2.0f, 1 + (uint32_t)rank), *gate = bf16_values(all, 0.2f, 100), *up = bf16_values(all, 0.2f, 200),
             *down = bf16_values(all, 0.2f, 300);

    mok_schedule_args s = MOK_INIT(mok_schedule_args);
    s.num_tokens = TOKENS;
    s.expert_ids = to_backend(w, ids, sizeof ids);
    s.schedule = to_backend(w, NULL, (size_t)plan.schedule_bytes);
    check(mok_schedule(w, &s, NULL), "mok_schedule");

    mok_forward_args f = MOK_INIT(mok_forward_args);
    f.num_tokens = TOKENS;
    f.schedule = s.schedule;
    f.x = to_backend(w, x, sizeof *x * TOKENS * HIDDEN);
    f.router_weights = to_backend(w, weights, sizeof weights);
    f.weights.gate.packed = to_backend(w, gate + first, sizeof *gate * (size_t)own);
    f.weights.up.packed = to_backend(w, up + first, sizeof *up * (size_t)own);
    f.weights.down.packed = to_backend(w, down + first, sizeof *down * (size_t)own);
    f.out = to_backend(w, NULL, sizeof *run->out * TOKENS * HIDDEN);
    check(mok_forward(w, &f, NULL), "mok_forward");
    check(mok_wait(w), "mok_wait");
    check(mok_memory_copy(w, run->out, f.out, sizeof *run->out * TOKENS * HIDDEN), "mok_memory_copy");

    const void *memory[] = {s.expert_ids, s.schedule, f.x, f.router_weights, f.weights.gate.packed, f.weights.up.packed, f.weights.down.packed, f.out};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        mok_memory_free(w, (void *)(uintptr_t)memory[i]);
    free(x);
    free(gate);
    free(up);
    free(down);
    mok_workspace_destroy(w);
    run->ok = true;
    return NULL;
}

/* All ranks as threads of this process. On cuda they share device 0: virtual ranks. */
static uint16_t *run_all(bool cuda)
{
    mok_group *groups[RANKS];
    pthread_t threads[RANKS];
    rank_run runs[RANKS];
    int32_t devices[RANKS] = {0};
    uint16_t *out = malloc(sizeof *out * RANKS * TOKENS * HIDDEN);
    if (!out)
        return NULL;
    check(mok_group_create_local(RANKS, cuda ? devices : NULL, groups), "mok_group_create_local");
    for (int r = 0; r < RANKS; r++) {
        runs[r] = (rank_run){groups[r], cuda, out + (size_t)r * TOKENS * HIDDEN, false};
        pthread_create(&threads[r], NULL, run_rank, &runs[r]);
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(threads[r], NULL);
        mok_group_destroy(groups[r]);
    }
    return out;
}

static float value_of(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

int main(int argc, char **argv)
{
    uint16_t *first = NULL;
    double difference = 0, size = 0;
    for (int i = 1; i < argc || i == 1; i++) {
        const char *name = i < argc ? argv[i] : "cpu";
        if (strcmp(name, "cpu") && strcmp(name, "cuda")) {
            fprintf(stderr, "usage: forward [cpu | cuda] ...: there is no backend %s\n", name);
            return 2;
        }
        uint16_t *out = run_all(!strcmp(name, "cuda"));
        if (!out)
            return 1;
        printf("%s: out[0][0..3] = %g %g %g %g\n", name, value_of(out[0]), value_of(out[1]), value_of(out[2]), value_of(out[3]));
        for (size_t k = 0; first && k < (size_t)RANKS * TOKENS * HIDDEN; k++) {
            double d = value_of(out[k]) - value_of(first[k]);
            difference += d * d;
            size += (double)value_of(first[k]) * value_of(first[k]);
        }
        if (first) {
            printf("relative difference to the first: %.2e\n", sqrt(difference / size));
            free(out);
        } else {
            first = out;
        }
    }
    free(first);
    return sqrt(difference) <= 0.01 * sqrt(size) || size == 0 ? 0 : 1;
}
