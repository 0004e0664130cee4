/* One MoE layer, forward and backward, over the processes of an MPI program. MPI brings one function: an all-gather of bytes. On one machine it
 * is called while the group is made and never again.
 *
 *   mpicc examples/mpi_layer.c $(pkg-config --cflags --libs mok) -o mpi_layer
 *   mpirun -n 2 ./mpi_layer            ranks on the cpu backend
 *   mpirun -n 2 ./mpi_layer cuda       one GPU for each rank of a machine
 *
 * Rank 0 then computes the same batch alone, and the bits must be the same. */
#include <mok.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 256, HIDDEN = 256, INTERMEDIATE = 128, EXPERTS = 6, TOPK = 2 }; /* TOKENS of each rank */

static int mpi_all_gather(void *user, const void *send, void *recv, size_t bytes)
{
    return MPI_Allgather(send, (int)bytes, MPI_BYTE, recv, (int)bytes, MPI_BYTE, *(MPI_Comm *)user) != MPI_SUCCESS;
}

static void check(mok_status status, const char *what)
{
    if (status == MOK_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, mok_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Small numbers that look random: element i of stream `seed`, in bf16. */
static uint16_t value_at(uint32_t seed, int64_t i, float scale)
{
    uint32_t bits, h = (seed * 2654435761u) ^ (uint32_t)(i * 40503);
    h = (h ^ h >> 15) * 2246822519u;
    h = (h ^ h >> 13) * 3266489917u;
    float value = ((float)(h >> 8) / 16777216.0f - 0.5f) * scale;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static void *to_backend(mok_workspace *w, const void *data, size_t bytes)
{
    void *memory = NULL;
    check(mok_memory_alloc(w, bytes, &memory), "mok_memory_alloc");
    if (data)
        check(mok_memory_copy(w, memory, data, bytes), "mok_memory_copy");
    return memory;
}

static void *values_on_backend(mok_workspace *w, uint32_t seed, int64_t first, int64_t count, float scale)
{
    uint16_t *values = malloc(sizeof *values * (size_t)count);
    for (int64_t i = 0; values && i < count; i++)
        values[i] = value_at(seed, first + i, scale);
    void *memory = to_backend(w, values, sizeof *values * (size_t)count);
    free(values);
    return memory;
}

/* Tokens [first, first + count) of the whole batch, on this rank of the group. out and dx: [count, HIDDEN]. */
static void run_layer(mok_group *group, int64_t first, int64_t count, uint16_t *out, uint16_t *dx)
{
    mok_config cfg = MOK_INIT(mok_config);
    cfg.hidden = HIDDEN;
    cfg.intermediate = INTERMEDIATE;
    cfg.num_experts = EXPERTS;
    cfg.topk = TOPK;
    cfg.max_tokens = count;
    mok_workspace *w = NULL;
    mok_plan plan = MOK_INIT(mok_plan);
    check(mok_workspace_create(group, &cfg, &w), "mok_workspace_create");
    check(mok_workspace_plan(w, &plan), "mok_workspace_plan");

    int32_t *ids = malloc(sizeof *ids * (size_t)(count * TOPK));
    float *weights = malloc(sizeof *weights * (size_t)(count * TOPK));
    for (int64_t i = 0; i < count * TOPK; i++) {
        int64_t route = first * TOPK + i;
        ids[i] = (int32_t)((route * 7 + route / 5) % EXPERTS);
        weights[i] = 1.0f / (1 + (float)(route % 3));
    }
    const int64_t matrix = HIDDEN * INTERMEDIATE, from = plan.experts_first * matrix, own = plan.experts_count * matrix, rows = count * HIDDEN;
    mok_schedule_args s = MOK_INIT(mok_schedule_args);
    s.num_tokens = count;
    s.expert_ids = to_backend(w, ids, sizeof *ids * (size_t)(count * TOPK));
    s.schedule = to_backend(w, NULL, (size_t)plan.schedule_bytes);
    check(mok_schedule(w, &s, NULL), "mok_schedule");

    mok_forward_args f = MOK_INIT(mok_forward_args);
    f.num_tokens = count;
    f.schedule = s.schedule;
    f.x = values_on_backend(w, 1, first * HIDDEN, rows, 2.0f);
    f.router_weights = to_backend(w, weights, sizeof *weights * (size_t)(count * TOPK));
    f.weights.gate.packed = values_on_backend(w, 2, from, own, 0.2f);
    f.weights.up.packed = values_on_backend(w, 3, from, own, 0.2f);
    f.weights.down.packed = values_on_backend(w, 4, from, own, 0.2f);
    f.context = to_backend(w, NULL, (size_t)plan.context_bytes);
    f.out = to_backend(w, NULL, sizeof *out * (size_t)rows);
    check(mok_forward(w, &f, NULL), "mok_forward");

    mok_backward_args b = MOK_INIT(mok_backward_args);
    b.num_tokens = count;
    b.schedule = s.schedule;
    b.context = f.context;
    b.dout = values_on_backend(w, 5, first * HIDDEN, rows, 2.0f);
    b.x = f.x;
    b.router_weights = f.router_weights;
    b.weights = f.weights;
    b.dx = to_backend(w, NULL, sizeof *dx * (size_t)rows);
    mok_status status = mok_backward(w, &b, NULL);
    if (status == MOK_E_UNSUPPORTED) { /* a backend may not have it yet */
        printf("%s\n", mok_last_error());
        memset(dx, 0, sizeof *dx * (size_t)rows);
    } else {
        check(status, "mok_backward");
        check(mok_memory_copy(w, dx, b.dx, sizeof *dx * (size_t)rows), "mok_memory_copy");
    }
    check(mok_memory_copy(w, out, f.out, sizeof *out * (size_t)rows), "mok_memory_copy");

    const void *memory[] = {s.expert_ids, s.schedule, f.x, f.router_weights, f.weights.gate.packed, f.weights.up.packed, f.weights.down.packed, f.context,
                            f.out, b.dout, b.dx};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        mok_memory_free(w, (void *)(uintptr_t)memory[i]);
    free(ids);
    free(weights);
    mok_workspace_destroy(w);
}

/* This rank's number among those of its machine: its GPU. */
static int local_rank(MPI_Comm world)
{
    MPI_Comm machine;
    int rank;
    MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
    MPI_Comm_rank(machine, &rank);
    MPI_Comm_free(&machine);
    return rank;
}

static int compare_with_one_rank(bool cuda, int ranks, const uint16_t *out, const uint16_t *dx)
{
    size_t all = (size_t)ranks * TOKENS * HIDDEN;
    uint16_t *alone = malloc(2 * sizeof *alone * all);
    int32_t device = 0;
    mok_group *group;
    check(mok_group_create_local(1, cuda ? &device : NULL, &group), "mok_group_create_local");
    run_layer(group, 0, (int64_t)ranks * TOKENS, alone, alone + all);
    mok_group_destroy(group);
    int differ = memcmp(out, alone, sizeof *alone * all) || memcmp(dx, alone + all, sizeof *alone * all);
    printf("%d processes against one rank: out and dx %s\n", ranks, differ ? "DIFFER" : "have the same bits");
    free(alone);
    return differ;
}

int main(int argc, char **argv)
{
    MPI_Comm world = MPI_COMM_WORLD;
    int rank, ranks, differ = 0;
    bool cuda = argc > 1 && !strcmp(argv[1], "cuda");
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(world, &rank);
    MPI_Comm_size(world, &ranks);

    mok_bootstrap bootstrap = MOK_INIT(mok_bootstrap);
    bootstrap.user = &world;
    bootstrap.all_gather = mpi_all_gather;
    bootstrap.set_device = cuda;
    bootstrap.device = local_rank(world);
    mok_group *group = NULL;
    check(mok_group_create_processes(&bootstrap, rank, ranks, &group), "mok_group_create_processes");

    const int mine = TOKENS * HIDDEN;
    uint16_t *out = malloc(2 * sizeof *out * (size_t)mine), *all = rank ? NULL : malloc(2 * sizeof *all * (size_t)mine * (size_t)ranks);
    run_layer(group, (int64_t)rank * TOKENS, TOKENS, out, out + mine);
    mok_group_destroy(group);
    MPI_Gather(out, mine, MPI_UINT16_T, all, mine, MPI_UINT16_T, 0, world);
    MPI_Gather(out + mine, mine, MPI_UINT16_T, all ? all + (size_t)mine * (size_t)ranks : NULL, mine, MPI_UINT16_T, 0, world);
    if (rank == 0)
        differ = compare_with_one_rank(cuda, ranks, all, all + (size_t)mine * (size_t)ranks);
    free(all);
    free(out);
    MPI_Bcast(&differ, 1, MPI_INT, 0, world);
    MPI_Finalize();
    return differ;
}
