#include "layout/config.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

enum { MAX_TOPK = 64, MAX_RANKS = 4096 };
static const int64_t max_width = 1 << 20, max_experts = 1 << 20, max_rows = INT32_MAX - MK_ROW_TILE;
static const int64_t max_timeout_ms = (int64_t)1000 * 3600 * 24 * 30;
/* So that the tasks of one minibatch are counted in 31 bits (layout/walk.h): 2^13 tiles times at most 2^14 parts. */
static const int64_t max_minibatch = 1 << 20;

mk_machine mk_default_machine(mok_backend_id backend)
{
    if (backend == MOK_BACKEND_CPU)
        return (mk_machine){0, MK_ROW_TILE, 256, false};
    return (mk_machine){132, MK_ROW_TILE, 256, false};
}

typedef struct { uint32_t struct_size, api_version; } struct_head;

mok_status mk_read_struct(const char *what, const void *from, void *to, uint32_t have)
{
    if (!from)
        return mk_fail(MOK_E_ARG, "%s is NULL", what);
    struct_head head;
    memcpy(&head, from, sizeof head);
    if (head.struct_size < sizeof head || head.struct_size > 1 << 16)
        return mk_fail(MOK_E_ARG, "%s.struct_size is %u: set it to sizeof(%s), as MOK_INIT does", what, head.struct_size, what);
    if (head.api_version < 1 || head.api_version > MOK_API_VERSION)
        return mk_fail(MOK_E_ARG, "%s.api_version is %u: this library knows versions 1 to %u", what, head.api_version, MOK_API_VERSION);
    for (uint32_t i = have; i < head.struct_size; i++)
        if (((const unsigned char *)from)[i])
            return mk_fail(MOK_E_UNSUPPORTED, "%s has %u bytes with something in byte %u; this library knows %u", what, head.struct_size, i, have);
    memset(to, 0, have);
    memcpy(to, from, head.struct_size < have ? head.struct_size : have);
    ((struct_head *)to)->struct_size = have;
    return MOK_OK;
}

mok_status mk_write_struct(const char *what, const void *from, uint32_t have, void *to)
{
    struct_head head;
    if (!to)
        return mk_fail(MOK_E_ARG, "%s is NULL", what);
    memcpy(&head, to, sizeof head);
    if (head.struct_size < sizeof head || head.struct_size > 1 << 16)
        return mk_fail(MOK_E_ARG, "%s.struct_size is %u: set it to sizeof(%s), as MOK_INIT does", what, head.struct_size, what);
    uint32_t common = head.struct_size < have ? head.struct_size : have;
    memcpy((char *)to + sizeof head, (const char *)from + sizeof head, common - sizeof head);
    return MOK_OK;
}

static mok_status check_range(const char *name, int64_t value, int64_t low, int64_t high)
{
    if (value < low || value > high)
        return mk_fail(MOK_E_ARG, "%s is %lld: it must be from %lld to %lld", name, (long long)value, (long long)low, (long long)high);
    return MOK_OK;
}

static mok_status check_width(const char *name, int64_t value, int64_t low)
{
    MK_TRY(check_range(name, value, low, max_width));
    if (value % MK_WIDTH_UNIT)
        return mk_fail(MOK_E_SHAPE, "%s is %lld: it must be a multiple of %d", name, (long long)value, MK_WIDTH_UNIT);
    return MOK_OK;
}

static mok_status check_shape(const mok_config *c, int32_t num_ranks)
{
    MK_TRY(check_range("num_ranks", num_ranks, 1, MAX_RANKS));
    MK_TRY(check_width("hidden", c->hidden, MK_WIDTH_UNIT));
    MK_TRY(check_width("intermediate", c->intermediate, MK_WIDTH_UNIT));
    MK_TRY(check_width("shared_intermediate", c->shared_intermediate, 0));
    MK_TRY(check_range("num_experts", c->num_experts, 1, max_experts));
    MK_TRY(check_range("topk", c->topk, 1, MAX_TOPK));
    MK_TRY(check_range("max_tokens", c->max_tokens, 1, max_rows));
    if (c->topk > c->num_experts)
        return mk_fail(MOK_E_SHAPE, "topk %lld is larger than num_experts %lld", (long long)c->topk, (long long)c->num_experts);
    /* Rows are numbered in 32 bits, padding included. */
    int64_t rows = c->max_tokens * num_ranks; /* below 2^31 * 2^12 */
    int64_t most_routes = max_rows - mk_ceil_div(c->num_experts, num_ranks) * (MK_ROW_TILE - 1);
    if (rows > most_routes / c->topk)
        return mk_fail(MOK_E_SHAPE, "max_tokens %lld x %d ranks x topk %lld is %lld routes: at most %lld fit a row table", (long long)c->max_tokens,
                       num_ranks, (long long)c->topk, (long long)(rows * c->topk), (long long)most_routes);
    return MOK_OK;
}

static mok_status check_options(const mok_config *c)
{
    MK_TRY(check_range("dtype", c->dtype, MOK_DTYPE_AUTO, MOK_MXFP8));
    MK_TRY(check_range("router_dtype", c->router_dtype, MOK_DTYPE_AUTO, MOK_FP32));
    MK_TRY(check_range("activation", c->activation, MOK_ACT_SWIGLU, MOK_ACT_GPT_OSS));
    MK_TRY(check_range("gate_up", c->gate_up, MOK_GATE_UP_SEPARATE, MOK_GATE_UP_INTERLEAVED));
    MK_TRY(check_range("weight_layout", c->weight_layout, MOK_WEIGHT_NK, MOK_WEIGHT_KN));
    MK_TRY(check_range("save", c->save, MOK_SAVE_AUTO, MOK_SAVE_ROWS));
    MK_TRY(check_range("save_rows", c->save_rows, 0, max_rows));
    MK_TRY(check_range("ring_rows", c->ring_rows, 0, max_rows));
    MK_TRY(check_range("minibatch_rows", c->minibatch_rows, 0, max_minibatch));
    MK_TRY(check_range("minibatch_rows_bwd", c->minibatch_rows_bwd, 0, max_minibatch));
    MK_TRY(check_range("backend", c->backend, MOK_BACKEND_AUTO, MOK_BACKEND_CUDA));
    MK_TRY(check_range("comm_sms", c->comm_sms, 0, 1024));
    MK_TRY(check_range("comm_sms_bwd", c->comm_sms_bwd, 0, 1024));
    MK_TRY(check_range("reserve_sms", c->reserve_sms, 0, 1024));
    MK_TRY(check_range("cpu_threads", c->cpu_threads, 0, 1024));
    MK_TRY(check_range("yield_us", c->yield_us, -1, 1000 * 1000));
    if (!(c->swiglu_limit >= 0) || c->swiglu_limit > 3e38f)
        return mk_fail(MOK_E_ARG, "swiglu_limit is %g: it must be 0 (no limit) or a positive number", (double)c->swiglu_limit);
    if (c->shared_gate && !c->shared_intermediate)
        return mk_fail(MOK_E_SHAPE, "shared_gate is set, but shared_intermediate is 0: there is no shared expert to scale");
    if (c->save_rows && c->save != MOK_SAVE_ROWS)
        return mk_fail(MOK_E_ARG, "save_rows is %lld, but save is not MOK_SAVE_ROWS", (long long)c->save_rows);
    if (c->dtype == MOK_FP32)
        return mk_fail(MOK_E_ARG, "dtype is MOK_FP32: a layer computes in MOK_BF16 or MOK_MXFP8");
    if (c->mx_wgrad_bf16 && c->dtype != MOK_MXFP8)
        return mk_fail(MOK_E_ARG, "mx_wgrad_bf16 is set, but dtype is not MOK_MXFP8: the weight gradients are of bf16 operands anyway");
    if (c->mx_wide_given && c->dtype != MOK_MXFP8)
        return mk_fail(MOK_E_ARG, "mx_wide_given is set, but dtype is not MOK_MXFP8: weights are not widened");
    if (c->activation != MOK_ACT_SWIGLU)
        return mk_fail(MOK_E_UNSUPPORTED, "activation %d is not implemented yet: use MOK_ACT_SWIGLU", (int)c->activation);
    if (c->expert_bias)
        return mk_fail(MOK_E_UNSUPPORTED, "expert_bias is not implemented yet: experts have no biases");
    if (c->save_x)
        return mk_fail(MOK_E_UNSUPPORTED, "save_x is not implemented yet: the backward pulls x again");
    if (c->routed_hidden && c->routed_hidden != c->hidden)
        return mk_fail(MOK_E_UNSUPPORTED, "routed_hidden is %lld: a routed width other than hidden (%lld) is not implemented yet",
                       (long long)c->routed_hidden, (long long)c->hidden);
    return MOK_OK;
}

double mk_two_wave_rows(const mok_config *c, mk_machine machine, bool backward, int64_t *narrowest)
{
    *narrowest = backward ? mk_min(c->intermediate, c->hidden) : mk_min(2 * c->intermediate, c->hidden);
    return 2.0 * machine.num_sms * machine.tile_rows * machine.tile_cols / (double)*narrowest;
}

/* Minibatches that a ring is to hold at least, where their size is chosen. Two are legal, and enough where it holds all rows. A ring that turns wants one for each
 * stage that is under way: rows that come, gate/up, down; and two more in a backward without replays, which has the longer way from a row's coming to its weight
 * gradient. Measured in rings of a quarter and of half of the rows: docs/performance.md. */
static int64_t minibatches_of_ring(const mok_config *c, bool backward, int64_t expected_rows)
{
    if (c->ring_rows >= expected_rows)
        return 2;
    return backward && c->save == MOK_SAVE_ALL ? 5 : 3;
}

static int64_t greatest_divisor(int64_t a, int64_t b) { return b ? greatest_divisor(b, a % b) : a; }

/* Tasks of a row tile and tile_cols columns that are worked on at once: Hopper's clusters of two SMs draw one, Blackwell's draw two. */
static int64_t tasks_at_once(const mok_config *c, mk_machine machine)
{
    int64_t sms = machine.num_sms - c->reserve_sms;
    return mk_max(machine.scaled ? sms : sms / 2, 1);
}

/* Rows of which both GEMMs of a pass have as many tasks as clusters do in whole waves. Clusters then go from one kind of task to the next at the same time and stay in step,
 * so that what one has read is in the cache for the others: docs/performance.md, "In step". (A shared expert's tasks, replays and weight gradients need not be whole waves.) */
static int64_t wave_rows(const mok_config *c, mk_machine machine, bool backward)
{
    int64_t inner = mk_ceil_div(backward ? c->intermediate : 2 * c->intermediate, machine.tile_cols), outer = mk_ceil_div(c->hidden, machine.tile_cols);
    int64_t at_once = tasks_at_once(c, machine);
    return at_once / greatest_divisor(at_once, greatest_divisor(inner, outer)) * machine.tile_rows;
}

/* Chosen minibatch: the two-wave bound in whole waves, if that leaves two minibatches of the expected rows and fits the ring, or else in whole clusters of rows; but no
 * more than the ring or the worst table can use. */
static int64_t choose_minibatch(const mok_config *c, mk_machine machine, bool backward, int64_t expected_rows, int64_t capacity_rows)
{
    int64_t narrowest, rows = MK_CLUSTER_ROWS, most = mk_min(mk_round_up(mk_max(capacity_rows, 1), MK_CLUSTER_ROWS), max_minibatch);
    if (c->ring_rows) /* a share of the ring, at least a tile */
        most = mk_min(most, mk_max(c->ring_rows / minibatches_of_ring(c, backward, expected_rows) / MK_ROW_TILE, 1) * MK_ROW_TILE);
    if (machine.num_sms) {
        int64_t two_waves = mk_max((int64_t)ceil(mk_two_wave_rows(c, machine, backward, &narrowest)), 1);
        rows = mk_round_up(two_waves, wave_rows(c, machine, backward));
        if (2 * rows > expected_rows || rows > most)
            rows = mk_round_up(two_waves, MK_CLUSTER_ROWS);
    }
    return mk_min(rows, most);
}

static int64_t expected_rows(const mok_config *c, int32_t num_ranks, int64_t experts_count)
{
    return mk_ceil_div(c->max_tokens * num_ranks * c->topk * experts_count, c->num_experts);
}

/* The most experts a rank has: ring and capacity choices must come out the same on all ranks. */
static int64_t most_experts(const mok_config *c, int32_t num_ranks) { return mk_ceil_div(c->num_experts, num_ranks); }

static mok_status resolve_schedule(mok_config *c, int32_t num_ranks, mk_machine machine)
{
    int64_t most = most_experts(c, num_ranks);
    int64_t capacity = (c->max_tokens * num_ranks * c->topk + most * (MK_ROW_TILE - 1)) / MK_ROW_TILE * MK_ROW_TILE;
    c->ring_rows = mk_round_up(c->ring_rows, MK_ROW_TILE);
    if (!c->minibatch_rows)
        c->minibatch_rows = choose_minibatch(c, machine, false, expected_rows(c, num_ranks, most), capacity);
    if (!c->minibatch_rows_bwd)
        c->minibatch_rows_bwd = choose_minibatch(c, machine, true, expected_rows(c, num_ranks, most), capacity);
    c->minibatch_rows = mk_round_up(c->minibatch_rows, MK_ROW_TILE);
    c->minibatch_rows_bwd = mk_round_up(c->minibatch_rows_bwd, MK_ROW_TILE);
    int64_t smallest = 2 * mk_max(c->minibatch_rows, c->minibatch_rows_bwd);
    if (!c->ring_rows) {
        int64_t balanced = mk_round_up(expected_rows(c, num_ranks, most) + most * (MK_ROW_TILE / 2), MK_ROW_TILE);
        c->ring_rows = mk_max(mk_min(balanced, capacity), smallest);
    }
    if (c->ring_rows < smallest)
        return mk_fail(MOK_E_SHAPE, "ring_rows %lld is smaller than two minibatches (%lld rows forward, %lld backward): it must be at least %lld",
                       (long long)c->ring_rows, (long long)c->minibatch_rows, (long long)c->minibatch_rows_bwd, (long long)smallest);
    if (c->save == MOK_SAVE_AUTO)
        c->save = MOK_SAVE_RING;
    switch (c->save) {
    case MOK_SAVE_NONE: c->save_rows = 0; break;
    case MOK_SAVE_RING: c->save_rows = mk_min(c->ring_rows, capacity); break;
    case MOK_SAVE_ALL: c->save_rows = capacity; break;
    default: c->save_rows = mk_min(mk_round_up(c->save_rows, MK_ROW_TILE), capacity); break;
    }
    return MOK_OK;
}

/* Tasks of a backward that the worst routing gives the rank with most experts, at most: in tiles of 128 columns (layout/walk.h; a forward has fewer). Kernels
 * draw them from a ticket of 32 bits. The same on all ranks. */
static mok_status check_tasks(const mok_config *c, const mk_dims *d)
{
    enum { COLS = 128 };
    int64_t wide = mk_ceil_div(d->hidden, COLS), narrow = mk_ceil_div(d->intermediate, COLS), shared = mk_ceil_div(d->shared_intermediate, COLS);
    int64_t most = most_experts(c, d->num_ranks), tiles = (c->max_tokens * d->num_ranks * c->topk + most * (MK_ROW_TILE - 1)) / MK_ROW_TILE;
    int64_t pieces = most + mk_ceil_div(tiles, d->mb_tiles_bwd);
    int64_t tasks = tiles * (3 * narrow + wide) + pieces * 3 * narrow * wide + MK_SHARED_TILES(d) * (3 * shared + wide) + 3 * shared * wide;
    if (tasks > INT32_MAX)
        return mk_fail(MOK_E_SHAPE, "max_tokens %lld x %d ranks x topk %lld with hidden %lld, intermediate %lld and minibatch_rows_bwd %lld may give a pass %lld tasks: at "
                       "most %d can be numbered", (long long)c->max_tokens, d->num_ranks, (long long)c->topk, (long long)d->hidden, (long long)d->intermediate,
                       (long long)c->minibatch_rows_bwd, (long long)tasks, INT32_MAX);
    return MOK_OK;
}

mok_status mk_timeout(const char *name, int64_t wish, int64_t *ms)
{
    *ms = MK_TIMEOUT_MS;
    MK_TRY(check_range(name, wish, 0, max_timeout_ms));
    const char *said = getenv("MOK_TIMEOUT_MS");
    if (wish || !said) {
        *ms = wish ? wish : MK_TIMEOUT_MS;
        return MOK_OK;
    }
    char *end;
    int64_t value = strtoll(said, &end, 10);
    if (*end || end == said || value < 1 || value > max_timeout_ms)
        return mk_fail(MOK_E_ENV, "MOK_TIMEOUT_MS is \"%s\" in the environment; it must be a number of milliseconds from 1 to %lld", said, (long long)max_timeout_ms);
    *ms = value;
    return MOK_OK;
}

mok_status mk_resolve(mok_config *c, int32_t num_ranks, int32_t rank, mk_machine machine, mk_dims *d)
{
    MK_TRY(mk_timeout("timeout_ms", c->timeout_ms, &c->timeout_ms));
    MK_TRY(check_shape(c, num_ranks));
    MK_TRY(check_options(c));
    MK_TRY(check_range("rank", rank, 0, num_ranks - 1));
    if (c->dtype == MOK_DTYPE_AUTO)
        c->dtype = MOK_BF16;
    if (c->router_dtype == MOK_DTYPE_AUTO)
        c->router_dtype = MOK_FP32;
    if (!c->routed_hidden)
        c->routed_hidden = c->hidden;
    MK_TRY(resolve_schedule(c, num_ranks, machine));

    memset(d, 0, sizeof *d);
    d->hidden = c->hidden;
    d->intermediate = c->intermediate;
    d->shared_intermediate = c->shared_intermediate;
    d->num_experts = c->num_experts;
    d->topk = c->topk;
    d->max_tokens = c->max_tokens;
    d->num_ranks = num_ranks;
    d->rank = rank;
    d->experts_first = mk_expert_first(c->num_experts, num_ranks, rank);
    d->experts_count = mk_expert_first(c->num_experts, num_ranks, rank + 1) - d->experts_first;
    d->mx = c->dtype == MOK_MXFP8;
    d->mx_scaled = d->mx && machine.scaled;
    d->mx_wide = d->mx && machine.num_sms > 0 && !d->mx_scaled;
    d->mx_wide_given = d->mx_wide && c->mx_wide_given;
    d->mx_wgrad = d->mx && !c->mx_wgrad_bf16;
    d->ring_tiles = c->ring_rows / MK_ROW_TILE;
    d->mb_tiles_fwd = c->minibatch_rows / MK_ROW_TILE;
    d->mb_tiles_bwd = c->minibatch_rows_bwd / MK_ROW_TILE;
    if (d->experts_count)
        d->capacity_tiles = (c->max_tokens * num_ranks * c->topk + d->experts_count * (MK_ROW_TILE - 1)) / MK_ROW_TILE;
    d->saved_tiles = c->save == MOK_SAVE_ALL ? d->capacity_tiles : mk_min(c->save_rows / MK_ROW_TILE, d->capacity_tiles);
    return check_tasks(c, d);
}

void mk_fill_plan(const mok_config *c, const mk_dims *d, const mk_memory *memory, mk_machine machine, mok_plan *plan)
{
    plan->experts_first = d->experts_first;
    plan->experts_count = d->experts_count;
    plan->balanced_rows = expected_rows(c, d->num_ranks, d->experts_count);
    plan->capacity_rows = d->capacity_tiles * MK_ROW_TILE;
    plan->row_tile = MK_ROW_TILE;
    plan->ring_rows = c->ring_rows;
    plan->saved_rows = d->saved_tiles * MK_ROW_TILE;
    plan->smallest_ring_rows = 2 * mk_max(c->minibatch_rows, c->minibatch_rows_bwd);
    plan->heap_bytes = memory->heap_bytes;
    plan->local_bytes = memory->local_bytes;
    plan->schedule_bytes = memory->schedule_bytes;
    plan->context_bytes = memory->context_bytes;
    plan->wide_bytes = memory->weights_bytes;

    double rows = (double)plan->balanced_rows, row_bytes = 2.0 * (double)c->hidden, token_bytes = (double)MK_ROW_BYTES(d, d->hidden);
    double away = (double)(d->num_ranks - 1) / d->num_ranks, own_routes = (double)(c->max_tokens * c->topk);
    double gemm = 2.0 * (double)c->hidden * (double)c->intermediate; /* flops of a row in one [H, I] matrix */
    double shared = 2.0 * (double)c->max_tokens * (double)c->hidden * (double)c->shared_intermediate;
    double unsaved = mk_max(plan->balanced_rows - plan->saved_rows, 0);
    plan->forward.minibatch_rows = c->minibatch_rows;
    plan->forward.two_wave_rows = mk_two_wave_rows(c, machine, false, &plan->forward.narrowest_gemm);
    plan->forward.flops = 3 * (rows * gemm + shared);
    plan->forward.link_bytes_in = (rows * token_bytes + own_routes * row_bytes) * away; /* x comes, y comes back */
    plan->forward.link_bytes_out = (own_routes * token_bytes + rows * row_bytes) * away;
    plan->backward.minibatch_rows = c->minibatch_rows_bwd;
    plan->backward.two_wave_rows = mk_two_wave_rows(c, machine, true, &plan->backward.narrowest_gemm);
    plan->backward.flops = 6 * (rows * gemm + shared) + 2 * unsaved * gemm + (d->saved_tiles ? 0 : 2 * shared);
    plan->backward.link_bytes_in = (2 * rows * token_bytes + own_routes * row_bytes) * away; /* x and dout come, dx comes back */
    plan->backward.link_bytes_out = (2 * own_routes * token_bytes + rows * row_bytes) * away;
}

/* The fields that must agree over the ranks: one list for the comparison, its sentence and the fingerprint. */
#define SAME_FIELDS(X)                                                                                                   \
    X(hidden) X(intermediate) X(shared_intermediate) X(routed_hidden) X(num_experts) X(topk) X(max_tokens) X(dtype)       \
    X(router_dtype) X(activation) X(swiglu_limit) X(gate_up) X(weight_layout) X(shared_gate) X(expert_bias) X(mx_wgrad_bf16) X(ring_rows) \
    X(minibatch_rows) X(minibatch_rows_bwd) X(save) X(save_rows) X(save_x) X(comm_sms) X(comm_sms_bwd) X(reserve_sms) X(backend)

const char *mk_config_difference(const mok_config *a, const mok_config *b, double *value_a, double *value_b)
{
#define COMPARE(field)                     \
    if (a->field != b->field) {            \
        *value_a = (double)a->field;       \
        *value_b = (double)b->field;       \
        return #field;                     \
    }
    SAME_FIELDS(COMPARE)
#undef COMPARE
    return NULL;
}

uint64_t mk_config_fingerprint(const mok_config *c, int32_t num_ranks)
{
    uint64_t hash = 0xcbf29ce484222325ull ^ (uint64_t)num_ranks;
    double value;
    uint64_t bits;
#define MIX(field)                                \
    value = (double)c->field;                     \
    memcpy(&bits, &value, sizeof bits);           \
    hash = (hash ^ bits) * 0x100000001b3ull;      \
    hash ^= hash >> 29;
    SAME_FIELDS(MIX)
#undef MIX
    return hash;
}
