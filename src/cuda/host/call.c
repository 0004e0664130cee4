/* One collective call as launches on the caller's stream: the list of cuda/kernel/params.h, with parameters and grids. Nothing is allocated,
 * and the host waits for nothing, but for ranks that share a GPU (meet.c). */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "cuda/host/state.h"
#include "layout/walk.h"

enum { BLOCKS_PER_SM = 8, COMMUNICATION_ROW_TILE = MK_ROW_TILE, COPY_BYTES_PER_BLOCK = 16384, ROUTES_PER_BLOCK = 256 };

typedef struct cuda_call {
    mok_workspace *w;
    mk_cuda_state *s;
    const mk_cuda_driver *api;
    mk_operation operation;
    mk_cu_stream stream;
    bool capturing;
    bool refused;            /* by this rank */
    bool skip;               /* some rank refuses (known here only where ranks meet on the host) */
    int32_t launches;        /* that draw from a ticket */
    const mok_weights *weights; /* of a pass */
    mk_open_params open;
} cuda_call;

/* For benchmarks: the time of this kind of work ends here. */
static mok_status times_stage(const cuda_call *c, mk_cuda_kernel kernel, mk_task_kind kind)
{
    return c->s->times && !c->capturing ? mk_cuda_times_launch(c->s, c->operation, kernel, kind, c->stream) : MOK_OK;
}

/* kind: what the kernel does, if it can do several things. */
static mok_status launch_kind(const cuda_call *c, mk_cuda_kernel kernel, mk_task_kind kind, int64_t blocks, void *params, int64_t step)
{
    const mk_cuda_kernel_shape *shape = &mk_cuda_kernel_shapes[kernel];
    mk_cu_launch_attribute cluster = {.id = MK_CU_LAUNCH_CLUSTER_DIMENSION, .value = {.cluster = {shape->cluster, 1, 1}}};
    mk_cu_launch config = {.grid_x = (unsigned)blocks, .grid_y = 1, .grid_z = 1, .block_x = c->s->device->kernels.threads[kernel], .block_y = 1, .block_z = 1,
                           .shared_bytes = shape->shared, .stream = c->stream, .attributes = &cluster, .num_attributes = shape->cluster > 1};
    void *list[] = {params};
    MK_CUDA_TRY(c->api->cuLaunchKernelEx(&config, c->s->device->kernels.function[kernel], list, NULL),
                "rank %d: launching %s of %s, step %lld (%u blocks of %u on device %d)", c->w->dims.rank, shape->name, mk_operation_name(c->operation),
                (long long)step, config.grid_x, config.block_x, c->s->device->ordinal);
    return times_stage(c, kernel, kind);
}

static mok_status launch(const cuda_call *c, mk_cuda_kernel kernel, int64_t blocks, void *params, int64_t step)
{
    return launch_kind(c, kernel, MK_TASK_NONE, blocks, params, step);
}

/* Enough blocks to fill the GPU, but none without work. */
static int64_t blocks_for(const cuda_call *c, int64_t pieces)
{
    return mk_max(mk_min(pieces, (int64_t)c->s->device->num_sms * BLOCKS_PER_SM), 1);
}

/* --- the beginning and the end of a call ------------------------------------------------------------------------------ */
/* The calls of a workspace happen in order, whichever streams they come on. A captured call's place in time is the caller's matter. */
static mok_status follow_last_call(cuda_call *c)
{
    mk_cuda_state *s = c->s;
    int capturing = 0;
    MK_CUDA_TRY(c->api->cuStreamIsCapturing(c->stream, &capturing), "rank %d: asking whether the stream is being captured", c->w->dims.rank);
    c->capturing = capturing != 0;
    if (c->capturing && s->meets_on_host)
        return mk_fail(MOK_E_UNSUPPORTED, "the stream is being captured, but ranks of this group share a GPU and meet on the host: capture needs one GPU "
                                          "per rank");
    if (!c->capturing && s->called && s->last_stream != c->stream)
        MK_CUDA_TRY(c->api->cuStreamWaitEvent(c->stream, s->done, 0), "rank %d: ordering two streams", c->w->dims.rank);
    if (!s->clear_fault)
        return MOK_OK;
    /* The host has taken the record of an earlier call; behind that call, the device may write a new one. */
    s->clear_fault = c->capturing; /* a replay would clear what it should not; this moment's record is still to be cleared */
    MK_CUDA_TRY(c->api->cuMemsetD32Async(mk_cu_address(c->w->local + c->w->memory.device_state + offsetof(mk_device_state, fault.kind)), MK_FAULT_NONE, 1,
                                         c->stream),
                "rank %d: clearing the device's fault record", c->w->dims.rank);
    return MOK_OK;
}

/* A rank alone has nobody to meet: it has the order of its stream. */
static bool alone(const cuda_call *c) { return c->w->dims.num_ranks == 1; }

/* What a call tells the others: every pointer may be NULL. */
typedef struct call_inputs { const void *expert_ids, *x, *dout, *router_weights; } call_inputs;

/* This rank's tokens, quantised once for all who pull them. */
static mok_status publish_mx(const cuda_call *c, const void *tokens, int64_t place)
{
    mk_mx_rows_params p = {.bf16 = (void *)(uintptr_t)tokens, .rows = c->w->heap + place, .num_rows = c->open.num_tokens, .cols = c->w->dims.hidden,
                           .not_finite = (uint64_t *)(void *)(c->w->local + c->w->memory.device_state + offsetof(mk_device_state, mx_not_finite))};
    return launch(c, MK_CUDA_mok_mx_quantise_rows, blocks_for(c, mk_ceil_div(p.num_rows, 8)), &p, 0);
}

/* Before the call opens, which tells all ranks of a pointer that cannot be used. */
static mok_status make_weight_maps(const cuda_call *c)
{
    mk_weight_maps_params p;
    if (!c->weights || c->refused)
        return MOK_OK;
    int64_t matrices = mk_cuda_weight_maps(c->w, c->operation, c->weights, c->open.num_tokens, &p);
    return matrices ? launch(c, MK_CUDA_mok_weight_maps, mk_ceil_div(matrices, MK_WEIGHT_MAPS_PER_BLOCK), &p, 0) : MOK_OK;
}

static mok_status open_call(cuda_call *c, call_inputs in)
{
    int64_t tokens = c->open.num_tokens, blocks = 1;
    bool mx = c->w->dims.mx;
    MK_TRY(follow_last_call(c));
    if (c->s->times && !c->capturing)
        MK_TRY(mk_cuda_times_call(c->s, c->operation, c->stream));
    c->s->rank.own_x = alone(c) ? in.x : NULL;
    c->s->rank.own_dout = alone(c) ? in.dout : NULL;
    mk_begin_params begin = {.open = c->open, .then = c->s->meets_on_host ? MK_BEGIN_OPENS : alone(c) ? MK_BEGIN_CHECKS : MK_BEGIN_MEETS};
    MK_TRY(make_weight_maps(c));
    if (!c->refused && tokens) {
        MK_TRY(mx && in.x ? publish_mx(c, in.x, c->w->memory.x) : MOK_OK); /* before the ranks meet */
        MK_TRY(mx && in.dout ? publish_mx(c, in.dout, c->w->memory.dout) : MOK_OK);
        begin.expert_ids = in.expert_ids;
        begin.x = mk_reads_in_place(&c->w->dims) ? NULL : in.x;
        begin.dout = mk_reads_in_place(&c->w->dims) ? NULL : in.dout;
        begin.router_weights = in.router_weights;
        blocks = mk_ceil_div(tokens * c->w->dims.topk, ROUTES_PER_BLOCK);
        if (begin.x)
            blocks = mk_max(blocks, mk_ceil_div(tokens * c->w->dims.hidden * (in.dout ? 4 : 2), COPY_BYTES_PER_BLOCK));
    }
    return launch(c, MK_CUDA_mok_call_begin, blocks_for(c, blocks), &begin, 0);
}

/* A rank that has failed (`status`) still tells those that it meets on the host. */
static mok_status barrier(cuda_call *c, mok_status status)
{
    if (alone(c))
        return status;
    if (c->s->meets_on_host) {
        MK_TRY(mk_cuda_meet(c->w, c->stream, c->operation, c->open.layer, status, c->refused, &c->skip));
        return times_stage(c, MK_CUDA_mok_rank_barrier, MK_TASK_NONE);
    }
    return status == MOK_OK ? launch(c, MK_CUDA_mok_rank_barrier, 1, &c->s->rank, 0) : status;
}

static mok_status begin(cuda_call *c, call_inputs in)
{
    mok_status status = open_call(c, in);
    if (!c->s->meets_on_host) /* the launch did it all */
        return status;
    MK_TRY(barrier(c, status));
    return launch(c, MK_CUDA_mok_call_check, 1, &c->open, 0);
}

static mok_status end(cuda_call *c)
{
    mk_cuda_state *s = c->s;
    if (c->capturing) {
        s->captured = true;
        return MOK_OK;
    }
    MK_CUDA_TRY(c->api->cuEventRecord(s->done, c->stream), "rank %d: recording the end of %s", c->w->dims.rank, mk_operation_name(c->operation));
    s->called = true;
    s->last_stream = c->stream;
    return MOK_OK;
}

static cuda_call make_call(mok_workspace *w, mk_operation operation, uint64_t layer, int64_t num_tokens, void *stream)
{
    mk_cuda_state *s = w->state;
    cuda_call c = {.w = w, .s = s, .api = s->api, .operation = operation, .stream = stream};
    s->rank.trace = w->trace;
    c.open.rank = s->rank;
    c.open.layer = layer;
    c.open.operation = (int32_t)operation;
    c.open.num_tokens = num_tokens;
    return c;
}

/* --- s0 --------------------------------------------------------------------------------------------------------------- */
static mok_status clear_counts(const cuda_call *c, int64_t *counts)
{
    if (counts)
        MK_CUDA_TRY(c->api->cuMemsetD32Async(mk_cu_address(counts), 0, (size_t)c->w->dims.num_experts * 2, c->stream), "rank %d: clearing %lld token counts",
                    c->w->dims.rank, (long long)c->w->dims.num_experts);
    return MOK_OK;
}

static mok_status launch_s0(const cuda_call *c, const mok_schedule_args *a)
{
    const mk_dims *d = &c->w->dims;
    mk_s0_params p = {.rank = c->s->rank, .schedule = a->schedule, .num_tokens = a->num_tokens, .expert_ids = a->expert_ids,
                      .tokens_local = a->tokens_per_expert_local, .tokens_global = a->tokens_per_expert_global};
    MK_TRY(clear_counts(c, a->tokens_per_expert_local));
    MK_TRY(clear_counts(c, a->tokens_per_expert_global));
    MK_TRY(launch(c, MK_CUDA_mok_s0_count, MK_SCHEDULE_CHUNKS / 8, &p, 0));
    MK_TRY(launch(c, MK_CUDA_mok_s0_scan, mk_max(d->experts_count, 1), &p, 0));
    MK_TRY(launch(c, MK_CUDA_mok_s0_segments, 1, &p, 0));
    MK_TRY(launch(c, MK_CUDA_mok_s0_place, MK_SCHEDULE_CHUNKS / 8, &p, 0));
    return launch(c, MK_CUDA_mok_s0_copies, blocks_for(c, mk_ceil_div(MK_SLOTS(d) * d->num_ranks, 256)), &p, 0);
}

static mok_status run_schedule(cuda_call *c, const mok_schedule_args *a)
{
    c->open.schedule = a->schedule;
    MK_TRY(begin(c, (call_inputs){.expert_ids = a->expert_ids}));
    return c->skip ? MOK_OK : launch_s0(c, a);
}

/* --- MXFP8: the copies of the routed weights that a call multiplies with, widened or, on Blackwell, quantised -------------------- */
static mok_status widen_weight(const cuda_call *c, const mok_weights *weights, int matrix, mk_quant quant)
{
    mk_mx_weight_params p = mk_cuda_mx_weight(c->w, weights, matrix, quant, mk_cuda_wide(c->w, NULL, quant));
    return launch(c, MK_CUDA_mok_mx_widen_weights, blocks_for(c, mk_cuda_mx_widen_pieces(&p)), &p, 0);
}

/* Only of what the tensor cores can not read where the caller has it. */
static mok_status quantise_weight(const cuda_call *c, const mok_weights *weights, int matrix, mk_quant quant)
{
    const mk_cuda_mx_operand to = mk_cuda_mx_operand_of(c->w, weights, matrix, quant);
    const int32_t form = mk_cuda_mx_weight(c->w, weights, matrix, quant, NULL).form;
    int64_t warps = to.count * mk_round_up(to.rows, MK_MX_TILE);
    if (!to.own)
        return MOK_OK;
    if (form == MK_MX_QUANTISED || form == MK_MX_TURNED) {
        mk_mx_part_params p = mk_cuda_mx_part(c->w, weights, matrix, quant);
        return launch(c, MK_CUDA_mok_mx_take_part, blocks_for(c, mk_ceil_div(warps, 8)), &p, 0);
    }
    mk_mx_matrix_params p = mk_cuda_mx_quantise_params(c->w, weights, matrix, quant);
    if (quant == MK_QUANT_FORWARD)
        return launch(c, MK_CUDA_mok_mx_quantise_matrix, blocks_for(c, mk_ceil_div(warps, 8)), &p, 0);
    return launch(c, MK_CUDA_mok_mx_quantise_turned, blocks_for(c, p.count * mk_ceil_div(p.rows, MK_MX_TURNED_ROWS) * mk_ceil_div(p.cols, MK_MX_TURNED_COLS)), &p, 0);
}

static mok_status quantise_weights(const cuda_call *c, const mok_weights *weights, mk_quant quant, bool gate_up, bool down)
{
    MK_TRY(gate_up ? quantise_weight(c, weights, MK_GRAD_GATE, quant) : MOK_OK);
    MK_TRY(gate_up ? quantise_weight(c, weights, MK_GRAD_UP, quant) : MOK_OK);
    return down ? quantise_weight(c, weights, MK_GRAD_DOWN, quant) : MOK_OK;
}

/* The copies that a call multiplies with; none of what it is given widened. */
static mok_status copy_weights(const cuda_call *c, const mok_weights *weights, const void *given, mk_quant quant, bool gate_up, bool down)
{
    if (!c->w->dims.mx || !c->w->dims.capacity_tiles || given)
        return MOK_OK;
    if (c->w->dims.mx_scaled)
        return quantise_weights(c, weights, quant, gate_up, down);
    MK_TRY(gate_up ? widen_weight(c, weights, MK_GRAD_GATE, quant) : MOK_OK);
    MK_TRY(gate_up ? widen_weight(c, weights, MK_GRAD_UP, quant) : MOK_OK);
    return down ? widen_weight(c, weights, MK_GRAD_DOWN, quant) : MOK_OK;
}

/* --- forward and recompute -------------------------------------------------------------------------------------------- */
static mk_gemm_params gemm_params(const cuda_call *c, mk_gemm_id id, const mok_forward_args *a)
{
    const mk_cuda_gemm *g = &c->s->gemm[id];
    return (mk_gemm_params){.a = g->a, .b_low = g->b_low, .b_high = g->b_high, .a_scales = g->a_scales, .b_low_scales = g->b_low_scales, .b_high_scales = g->b_high_scales, .rank = c->s->rank, .schedule = (void *)(uintptr_t)a->schedule,
                            .context = a->context, .num_tokens = a->num_tokens, .recompute = c->operation == MK_OP_RECOMPUTE,
                            .shared = id >= MK_GEMM_SHARED_GATE_UP,
                            .expert_maps = mk_cuda_expert_maps(c->w, c->weights, id >= MK_GEMM_SHARED_GATE_UP), .num_cols = g->num_cols, .num_k_blocks = g->num_k_blocks, .b_high_row = g->b_high_row};
}

/* Row tiles: of a minibatch, or of the shared expert. */
static mok_status launch_gemm(cuda_call *c, mk_gemm_id id, mk_gemm_params *p, int64_t row_tiles, int64_t step)
{
    const mk_cuda_gemm *g = &c->s->gemm[id];
    int64_t resident = mk_cuda_resident_clusters(c->w, g->kernel);
    p->step = (int32_t)step;
    p->ticket = c->launches++ & 1;
    return launch(c, g->kernel, mk_min(resident, row_tiles * g->tasks_per_tile) * mk_cuda_kernel_shapes[g->kernel].cluster, p, step);
}

static mok_status launch_shared(cuda_call *c, const mok_forward_args *a, bool down)
{
    int64_t tiles = mk_ceil_div(a->num_tokens, MK_ROW_TILE);
    mk_gemm_params p = gemm_params(c, MK_GEMM_SHARED_GATE_UP, a);
    MK_TRY(launch_gemm(c, MK_GEMM_SHARED_GATE_UP, &p, tiles, 0));
    if (!down)
        return MOK_OK;
    p = gemm_params(c, MK_GEMM_SHARED_DOWN, a);
    return launch_gemm(c, MK_GEMM_SHARED_DOWN, &p, tiles, 0);
}

/* As many minibatches as the worst routing needs; those that the table does not have end at once. */
static mok_status launch_steps(cuda_call *c, const mok_forward_args *a, bool down)
{
    const mk_dims *d = &c->w->dims;
    mk_gemm_params gate_up = gemm_params(c, MK_GEMM_GATE_UP, a), down_params = gemm_params(c, MK_GEMM_DOWN, a);
    mk_dispatch_params dispatch = {.rank = c->s->rank, .schedule = gate_up.schedule};
    int64_t steps = mk_ceil_div(d->capacity_tiles, d->mb_tiles_fwd), dispatch_blocks = blocks_for(c, d->mb_tiles_fwd * COMMUNICATION_ROW_TILE);
    for (int64_t step = 0; step < steps; step++) {
        dispatch.step = (int32_t)step;
        dispatch.ticket = c->launches++ & 1;
        MK_TRY(launch(c, d->mx ? MK_CUDA_mok_s1_dispatch_mx : MK_CUDA_mok_s1_dispatch, dispatch_blocks, &dispatch, step));
        MK_TRY(launch_gemm(c, MK_GEMM_GATE_UP, &gate_up, d->mb_tiles_fwd, step));
        if (down)
            MK_TRY(launch_gemm(c, MK_GEMM_DOWN, &down_params, d->mb_tiles_fwd, step));
    }
    return MOK_OK;
}

static mok_status launch_fused(cuda_call *c, const mok_forward_args *a, bool down)
{
    const mk_cuda_gemm *g = c->s->gemm;
    const mk_dims *d = &c->w->dims;
    mk_forward_params p = {.rank = c->s->rank, .schedule = (void *)(uintptr_t)a->schedule, .context = a->context, .num_tokens = a->num_tokens,
                           .recompute = !down, .expert_maps = mk_cuda_expert_maps(c->w, c->weights, false),
                           .shared_maps = mk_cuda_expert_maps(c->w, c->weights, true)};
    if (d->capacity_tiles) {
        p.ring_x = g[MK_GEMM_GATE_UP].a;
        p.gate = g[MK_GEMM_GATE_UP].b_low;
        p.up = g[MK_GEMM_GATE_UP].b_high;
        p.ring_h = g[MK_GEMM_DOWN].a;
        p.down = g[MK_GEMM_DOWN].b_low;
        p.ring_x_scales = g[MK_GEMM_GATE_UP].a_scales;
        p.gate_scales = g[MK_GEMM_GATE_UP].b_low_scales;
        p.up_scales = g[MK_GEMM_GATE_UP].b_high_scales;
        p.ring_h_scales = g[MK_GEMM_DOWN].a_scales;
        p.down_scales = g[MK_GEMM_DOWN].b_low_scales;
    }
    if (d->shared_intermediate && a->num_tokens) {
        p.shared_x = g[MK_GEMM_SHARED_GATE_UP].a;
        p.shared_gate = g[MK_GEMM_SHARED_GATE_UP].b_low;
        p.shared_up = g[MK_GEMM_SHARED_GATE_UP].b_high;
        p.shared_h = g[MK_GEMM_SHARED_DOWN].a;
        p.shared_down = g[MK_GEMM_SHARED_DOWN].b_low;
    }
    const mk_cuda_kernel kernel = d->mx ? MK_CUDA_mok_forward_fused_mx : MK_CUDA_mok_forward_fused;
    return launch(c, kernel, mk_cuda_pass_blocks(c->w, kernel, c->open.num_tokens, down ? 3 : 2, &p.yield), &p, 0);
}

static mok_status launch_stages(cuda_call *c, const mok_forward_args *a, bool forward)
{
    const mk_dims *d = &c->w->dims;
    if (!forward && !d->saved_tiles) /* a context without rows */
        return MOK_OK;
    MK_TRY(copy_weights(c, &a->weights, a->wide, MK_QUANT_FORWARD, true, forward));
    if (c->s->fused)
        return launch_fused(c, a, forward);
    if (d->shared_intermediate && a->num_tokens)
        MK_TRY(launch_shared(c, a, forward));
    return launch_steps(c, a, forward);
}

static mok_status run_pass(cuda_call *c, const mok_forward_args *a)
{
    bool forward = c->operation == MK_OP_FORWARD;
    c->open.schedule = (void *)(uintptr_t)a->schedule;
    c->weights = &a->weights;
    MK_TRY(begin(c, (call_inputs){.x = a->x, .router_weights = forward ? a->router_weights : NULL}));
    if (c->skip)
        return MOK_OK;
    MK_TRY(barrier(c, launch_stages(c, a, forward)));
    mk_combine_params p = {.rank = c->s->rank, .schedule = a->schedule, .context = a->context, .x = a->x,
                           .shared_output_gate = a->weights.shared_output_gate, .out = forward ? a->out : NULL, .num_tokens = a->num_tokens};
    return launch(c, MK_CUDA_mok_s5_combine, forward ? blocks_for(c, a->num_tokens) : 1, &p, 0);
}

/* --- backward --------------------------------------------------------------------------------------------------------- */
/* Where the gradients of one matrix go; gate and up may be halves of one matrix, or its even and odd rows. */
static mk_grad_out grad_out(const mok_workspace *w, const mok_grad *g, int64_t outputs, int64_t inputs, bool pair, bool up)
{
    bool one = pair && w->config.gate_up != MOK_GATE_UP_SEPARATE, interleaved = one && w->config.gate_up == MOK_GATE_UP_INTERLEAVED;
    int64_t element = g->dtype == MOK_FP32 ? 4 : 2, first_row = one && up ? (interleaved ? 1 : outputs) : 0, first = first_row * inputs * element;
    return (mk_grad_out){.base = g->packed ? (char *)g->packed + first : NULL, .expert_bytes = outputs * inputs * element * (one ? 2 : 1), .experts = g->experts,
                         .experts_offset = first, .row_stride = inputs * (interleaved ? 2 : 1), .fp32 = g->dtype == MOK_FP32, .accumulate = g->accumulate};
}

static void fill_grads(const mok_workspace *w, const mok_grads *g, mk_backward_params *p)
{
    bool separate = w->config.gate_up == MOK_GATE_UP_SEPARATE;
    int64_t h = w->dims.hidden, i = w->dims.intermediate, s = w->dims.shared_intermediate;
    p->grads[MK_GRAD_GATE] = grad_out(w, &g->gate, i, h, true, false);
    p->grads[MK_GRAD_UP] = grad_out(w, separate ? &g->up : &g->gate, i, h, true, true);
    p->grads[MK_GRAD_DOWN] = grad_out(w, &g->down, h, i, false, false);
    p->shared_grads[MK_GRAD_GATE] = grad_out(w, &g->shared_gate, s, h, true, false);
    p->shared_grads[MK_GRAD_UP] = grad_out(w, separate ? &g->shared_up : &g->shared_gate, s, h, true, true);
    p->shared_grads[MK_GRAD_DOWN] = grad_out(w, &g->shared_down, h, s, false, false);
}

static bool is_wanted(const mok_grad *g) { return g->packed || g->experts; }

static bool any_grad(const mok_grads *g)
{
    return is_wanted(&g->gate) || is_wanted(&g->up) || is_wanted(&g->down) || is_wanted(&g->shared_gate) || is_wanted(&g->shared_up) ||
           is_wanted(&g->shared_down) || is_wanted(&g->shared_output_gate) || g->ready;
}

static mk_backward_params backward_params(const cuda_call *c, const mok_backward_args *a)
{
    mk_backward_params p = {.rank = c->s->rank, .schedule = (void *)(uintptr_t)a->schedule, .context = c->w->dims.saved_tiles ? a->context : NULL,
                            .shared_output_gate = a->weights.shared_output_gate, .ready = a->grads.ready, .ready_value = a->grads.ready_value,
                            .num_tokens = a->num_tokens, .want_data = a->parts != MOK_BACKWARD_WEIGHTS, .want_weights = c->open.want_weights,
                            .expert_maps = mk_cuda_expert_maps(c->w, c->weights, false),
                            .shared_maps = mk_cuda_expert_maps(c->w, c->weights, true)};
    mk_tensor_map *to[MK_NUM_BACKWARD_MAPS] = {&p.ring_x, &p.ring_dout, &p.ring_gate, &p.ring_up, &p.ring_h, &p.gate, &p.up, &p.down,
                                               &p.shared_x, &p.shared_dout, &p.shared_dgate, &p.shared_dup, &p.shared_wh, &p.shared_gate, &p.shared_up, &p.shared_down,
                                               &p.dgrad_dgate, &p.dgrad_dup, &p.replay_gate, &p.replay_up, &p.wgrad_x, &p.wgrad_dout, &p.wgrad_dgate, &p.wgrad_dup, &p.wgrad_h,
                                               &p.ring_x_scales, &p.ring_dout_scales, &p.gate_scales, &p.up_scales, &p.down_scales, &p.dgrad_dgate_scales,
                                               &p.dgrad_dup_scales, &p.replay_gate_scales, &p.replay_up_scales, &p.wgrad_x_scales, &p.wgrad_dout_scales,
                                               &p.wgrad_dgate_scales, &p.wgrad_dup_scales, &p.wgrad_h_scales};
    for (int i = 0; i < MK_NUM_BACKWARD_MAPS; i++)
        *to[i] = c->s->backward[i];
    fill_grads(c->w, &a->grads, &p);
    return p;
}

static mok_status launch_backward(const cuda_call *c, mk_backward_params *p, mk_task_kind kind, int64_t step)
{
    const mk_cuda_kernel kernel = c->w->dims.mx ? MK_CUDA_mok_backward_fused_mx : MK_CUDA_mok_backward_fused;
    p->kind = (int32_t)kind;
    p->step = (int32_t)step;
    if (kind != MK_TASK_NONE)
        MK_CUDA_TRY(c->api->cuMemsetD32Async(mk_cu_address(c->w->local + c->w->memory.device_state + offsetof(mk_device_state, tickets)), 0, 2, c->stream),
                    "rank %d: clearing the tickets of a backward stage", c->w->dims.rank);
    int64_t blocks = kind == MK_TASK_NONE ? mk_cuda_pass_blocks(c->w, kernel, c->open.num_tokens, 1 + 2 * p->want_data + 3 * p->want_weights, &p->yield)
                                          : mk_cuda_resident_clusters(c->w, kernel) * mk_cuda_kernel_shapes[kernel].cluster;
    return launch_kind(c, kernel, kind, blocks, p, step);
}

/* One launch for each stage and step, as many as the worst routing needs: the same code, in an order that needs no counter. */
static mok_status launch_backward_staged(const cuda_call *c, mk_backward_params *p)
{
    static const mk_task_kind shared[] = {MK_TASK_SHARED_GATE_UP, MK_TASK_SHARED_DGRAD_DOWN, MK_TASK_SHARED_DGRAD_GATE_UP, MK_TASK_SHARED_WGRAD};
    static const mk_task_kind routed[] = {MK_TASK_DISPATCH, MK_TASK_GATE_UP, MK_TASK_DGRAD_DOWN, MK_TASK_DGRAD_GATE_UP, MK_TASK_WGRAD};
    const mk_dims *d = &c->w->dims;
    for (size_t i = 0; i < sizeof shared / sizeof *shared && d->shared_intermediate; i++)
        MK_TRY(launch_backward(c, p, shared[i], 0));
    for (int64_t step = 0; step <= mk_ceil_div(d->capacity_tiles, d->mb_tiles_bwd); step++)
        for (size_t i = 0; i < sizeof routed / sizeof *routed; i++)
            MK_TRY(launch_backward(c, p, routed[i], step));
    return MOK_OK;
}

static mk_combine_bwd_params combine_bwd_params(const cuda_call *c, const mok_backward_args *a)
{
    const mk_dims *d = &c->w->dims;
    bool data = a->parts != MOK_BACKWARD_WEIGHTS;
    mk_combine_bwd_params p = {.rank = c->s->rank, .schedule = a->schedule, .x = a->x, .shared_output_gate = a->weights.shared_output_gate,
                               .dx = data ? a->dx : NULL, .drouter_weights = data ? a->drouter_weights : NULL, .num_tokens = a->num_tokens};
    if (c->open.want_weights && c->w->config.shared_gate)
        p.gate_grad = grad_out(c->w, &a->grads.shared_output_gate, 1, d->hidden, false, false);
    p.gate_blocks = p.gate_grad.base || p.gate_grad.experts ? (int32_t)mk_ceil_div(d->hidden, 256) : 0;
    return p;
}

static mok_status launch_backward_stages(const cuda_call *c, const mok_backward_args *a, mk_combine_bwd_params *combine)
{
    const mk_dims *d = &c->w->dims;
    mk_backward_params p = backward_params(c, a);
    MK_TRY(copy_weights(c, &a->weights, a->wide, MK_QUANT_FORWARD, d->saved_tiles < d->capacity_tiles, false)); /* for a replay */
    MK_TRY(copy_weights(c, &a->weights, a->wide_dgrad, MK_QUANT_DGRAD, p.want_data, true));
    if (c->w->dims.shared_intermediate && a->num_tokens)
        MK_TRY(launch(c, MK_CUDA_mok_shared_scale, blocks_for(c, a->num_tokens), combine, 0));
    return c->s->fused_backward ? launch_backward(c, &p, MK_TASK_NONE, 0) : launch_backward_staged(c, &p);
}

static mok_status run_backward(cuda_call *c, const mok_backward_args *a)
{
    c->open.schedule = (void *)(uintptr_t)a->schedule;
    c->open.context = a->context;
    c->weights = &a->weights;
    c->open.parts = (int32_t)a->parts;
    c->open.want_weights = a->parts != MOK_BACKWARD_DATA && any_grad(&a->grads);
    MK_TRY(begin(c, (call_inputs){.x = a->x, .dout = a->dout, .router_weights = a->router_weights}));
    if (c->skip)
        return MOK_OK;
    mk_combine_bwd_params combine = combine_bwd_params(c, a);
    MK_TRY(barrier(c, launch_backward_stages(c, a, &combine)));
    if (mk_reads_in_place(&c->w->dims) && combine.gate_blocks) { /* reads the caller's x, which may be where dx goes */
        MK_TRY(launch(c, MK_CUDA_mok_s5_combine_bwd, combine.gate_blocks, &combine, 0));
        combine.gate_blocks = 0;
    }
    return launch(c, MK_CUDA_mok_s5_combine_bwd, combine.gate_blocks + blocks_for(c, a->num_tokens), &combine, 0);
}

static mok_status run_operation(cuda_call *c, const mk_call *call)
{
    switch (call->operation) {
    case MK_OP_SCHEDULE: return run_schedule(c, &call->schedule);
    case MK_OP_BACKWARD: return run_backward(c, &call->backward);
    default: return run_pass(c, &call->forward);
    }
}

mok_status mk_cuda_run(mok_workspace *w, const mk_call *call, void *stream)
{
    cuda_call c = make_call(w, call->operation, call->layer, call->num_tokens, stream);
    MK_TRY(mk_cuda_enter(c.s->device));
    mok_status status = run_operation(&c, call);
    if (status == MOK_OK)
        status = end(&c);
    mk_cuda_leave(c.s->device);
    if (status != MOK_OK) /* some launches are missing: the ranks are no longer in step */
        w->broken = true;
    return status;
}

void mk_cuda_refuse(mok_workspace *w, mk_operation operation, uint64_t layer, mok_status why, void *stream)
{
    cuda_call c = make_call(w, operation, layer, 0, stream);
    char sentence[sizeof c.open.sentence];
    snprintf(sentence, sizeof sentence, "%.*s", (int)sizeof sentence - 1, mok_last_error());
    if (w->broken)
        return;
    memcpy(c.open.sentence, sentence, sizeof sentence);
    c.open.status = (int32_t)why;
    c.refused = true;
    mok_status status = mk_cuda_enter(c.s->device);
    if (status == MOK_OK) {
        status = begin(&c, (call_inputs){0});
        if (status == MOK_OK && !c.skip && operation != MK_OP_SCHEDULE)
            status = barrier(&c, MOK_OK);
        if (status == MOK_OK)
            status = end(&c);
        mk_cuda_leave(c.s->device);
    }
    w->broken |= status != MOK_OK;
    mk_fail(why, "%s", sentence); /* telling the others may have overwritten it */
}
