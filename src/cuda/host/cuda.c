/* The cuda backend: this file fills its table. A call is a few launches on the caller's stream, asynchronous and without host waits; what
 * goes wrong on the device is found in pinned memory by the next call, or by mok_wait and mok_poll. */
#include "cuda/host/state.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

/* --- memory ----------------------------------------------------------------------------------------------------------- */
static mok_status memory_alloc(mok_workspace *w, size_t bytes, void **memory)
{
    const mk_cuda_device *d = w->group->device;
    mk_cu_pointer address = 0;
    size_t left = 0, total = 0;
    MK_TRY(mk_cuda_enter(d));
    mk_cu_result result = d->api->cuMemAlloc(&address, bytes ? bytes : 1);
    if (result != MK_CU_SUCCESS)
        d->api->cuMemGetInfo(&left, &total);
    mk_cuda_leave(d);
    if (result != MK_CU_SUCCESS)
        return mk_cuda_fail(result, "rank %d: allocating %zu bytes on device %d (%zu of %zu bytes are free)", w->group->rank, bytes, d->ordinal, left, total);
    *memory = (void *)(uintptr_t)address;
    return MOK_OK;
}

static void memory_free(mok_workspace *w, void *memory)
{
    const mk_cuda_device *d = w->group->device;
    if (!memory || mk_cuda_enter(d) != MOK_OK)
        return;
    d->api->cuMemFree(mk_cu_address(memory));
    mk_cuda_leave(d);
}

static bool scaled(const mok_group *group)
{
    const mk_cuda_device *d = group->device;
    return d->blackwell;
}

/* --- open and close --------------------------------------------------------------------------------------------------- */
static void close_entered(mok_workspace *w)
{
    mk_cuda_state *s = w->state;
    for (int i = 0; i < 2; i++)
        if (s->meeting[i])
            s->api->cuEventDestroy(s->meeting[i]);
    if (s->done)
        s->api->cuEventDestroy(s->done);
    mk_cuda_times_free(s);
    if (s->fault)
        s->api->cuMemFreeHost(s->fault);
    if (s->heaps)
        s->api->cuMemFree(s->heaps);
}

static void close_state(mok_workspace *w)
{
    mk_cuda_state *s = w->state;
    if (s && mk_cuda_enter(s->device) == MOK_OK) {
        close_entered(w);
        mk_cuda_leave(s->device);
    }
    if (s) {
        free(s->arrivals);
        free(s->maps);
    }
    free(s);
    w->state = NULL;
}

/* Who has which GPU: threads that share one must meet on the host. Processes have GPU contexts of their own, which the GPU runs in turns: a barrier's kernel
 * then waits for the other's turn, so it ends, but each barrier costs turns. Only for tests, so only on demand. Collective, and the first thing that all
 * ranks do. */
static bool processes_may_share(void)
{
    const char *wish = getenv("MOK_SHARE_GPU");
    return wish && !strcmp(wish, "1");
}

typedef struct seat { mk_cu_uuid uuid; int32_t ordinal; } seat;

static mok_status find_sharers(mok_workspace *w, bool *share)
{
    int32_t ranks = w->dims.num_ranks;
    seat mine = {w->group->device->uuid, w->group->device->ordinal}, *all = calloc((size_t)ranks, sizeof *all);
    if (!all)
        return mk_fail(MOK_E_MEMORY, "no memory to compare the devices of %d ranks", ranks);
    all[0] = mine;
    mok_status status = ranks > 1 ? w->group->transport->all_gather(w->group, &mine, all, sizeof mine, w->config.timeout_ms) : MOK_OK;
    for (int32_t i = 0; i < ranks && status == MOK_OK; i++)
        for (int32_t j = 0; j < i && status == MOK_OK; j++) {
            if (memcmp(&all[i].uuid, &all[j].uuid, sizeof all[i].uuid))
                continue;
            if (w->group->transport == &mk_transport_local)
                *share = true;
            else if (!processes_may_share())
                status = mk_fail(MOK_E_UNSUPPORTED, "ranks %d and %d share a GPU (device %d of rank %d) in processes of their own, which would wait for each other's "
                                 "turns on it: give each a GPU, make them threads (mok_group_create_local), or for tests set MOK_SHARE_GPU=1", j, i, all[j].ordinal, j);
        }
    free(all);
    return status;
}

static mok_status check_config(const mok_workspace *w)
{
    if (w->config.weight_layout != MOK_WEIGHT_NK)
        return mk_fail(MOK_E_UNSUPPORTED, "weight_layout is MOK_WEIGHT_KN: backend cuda reads weights as MOK_WEIGHT_NK only, for now");
    return MOK_OK;
}

static void fill_rank(mok_workspace *w, mk_cu_pointer fault)
{
    mk_cuda_state *s = w->state;
    s->rank = (mk_rank_params){.dims = w->dims, .memory = w->memory, .heap = w->heap, .local = w->local, .heaps = (char *const *)(uintptr_t)s->heaps,
                               .host_fault = (mk_host_fault *)(uintptr_t)fault, .fingerprint = w->fingerprint,
                               .timeout_ns = (uint64_t)w->config.timeout_ms * 1000000u,
                               .swiglu_limit = w->config.swiglu_limit > 0 ? w->config.swiglu_limit : INFINITY,
                               .router_bf16 = w->config.router_dtype == MOK_BF16, .shared_gate = w->config.shared_gate, .shares_gpu = s->meets_on_host};
}

/* Of a trace: every CTA that can be resident has one. */
static int32_t num_tracks(const mk_cuda_state *s)
{
    int32_t ctas = s->device->num_sms;
    for (int i = 0; i < MK_NUM_CUDA_KERNELS; i++)
        ctas = (int32_t)mk_max(ctas, (int64_t)s->device->kernels.max_clusters[i] * mk_cuda_kernel_shapes[i].cluster);
    return ctas;
}

/* With the context current. */
static mok_status open_entered(mok_workspace *w)
{
    mk_cuda_state *s = w->state;
    const mk_cuda_driver *api = s->api;
    size_t ranks = (size_t)w->dims.num_ranks;
    int32_t rank = w->dims.rank;
    mk_cu_pointer fault;
    MK_CUDA_TRY(api->cuMemAlloc(&s->heaps, ranks * sizeof(char *)), "rank %d: allocating the table of %zu heaps", rank, ranks);
    MK_CUDA_TRY(api->cuMemcpyHtoD(s->heaps, w->heaps, ranks * sizeof(char *)), "rank %d: copying the table of %zu heaps", rank, ranks);
    MK_CUDA_TRY(api->cuMemsetD8(mk_cu_address(w->local + w->memory.device_state), 0, sizeof(mk_device_state)), "rank %d: clearing the device state", rank);
    MK_CUDA_TRY(api->cuMemsetD8(mk_cu_address(w->local + w->memory.device_state + offsetof(mk_device_state, bad_weight)), 0xff, sizeof(mk_bad_weights)),
                "rank %d: clearing the device state", rank);
    MK_CUDA_TRY(api->cuMemHostAlloc((void **)&s->fault, sizeof *s->fault, MK_CU_HOST_PORTABLE | MK_CU_HOST_DEVICEMAP),
                "rank %d: allocating the fault record in pinned memory", rank);
    memset(s->fault, 0, sizeof *s->fault);
    MK_CUDA_TRY(api->cuMemHostGetDevicePointer(&fault, s->fault, 0), "rank %d: mapping the fault record", rank);
    MK_CUDA_TRY(api->cuEventCreate(&s->done, MK_CU_EVENT_DISABLE_TIMING), "rank %d: creating an event", rank);
    for (int i = 0; i < 2 && s->meets_on_host; i++)
        MK_CUDA_TRY(api->cuEventCreate(&s->meeting[i], MK_CU_EVENT_DISABLE_TIMING), "rank %d: creating an event", rank);
    fill_rank(w, fault);
    w->trace = (mk_trace){.tracks = num_tracks(s), .lanes = MK_NUM_TRACE_LANES};
    /* The memory above was cleared on the null stream; the caller's streams need not wait for that one. */
    MK_CUDA_TRY(api->cuCtxSynchronize(), "rank %d: waiting for the workspace's memory", rank);
    return MOK_OK;
}

static mok_status open_state(mok_workspace *w)
{
    bool share = false;
    MK_TRY(find_sharers(w, &share));
    MK_TRY(check_config(w));
    mk_cuda_state *s = aligned_alloc(_Alignof(mk_cuda_state), sizeof *s);
    if (!s)
        return mk_fail(MOK_E_MEMORY, "no memory for the state of rank %d", w->dims.rank);
    memset(s, 0, sizeof *s);
    w->state = s;
    s->device = w->group->device;
    s->api = s->device->api;
    s->reserve_clusters = (w->config.reserve_sms + 1) / 2;
    s->meets_on_host = share;
    mok_status status;
    MK_TRY_GOTO(mk_cuda_device_load(s->device), fail);
    s->maps = calloc(MK_CUDA_KEPT_MAPS, sizeof *s->maps);
    if (!s->maps)
        MK_TRY_GOTO(mk_fail(MOK_E_MEMORY, "no memory for the tensor maps of rank %d", w->dims.rank), fail);
    s->arrivals = s->meets_on_host ? calloc((size_t)w->dims.num_ranks, sizeof *s->arrivals) : NULL;
    if (s->meets_on_host && !s->arrivals)
        MK_TRY_GOTO(mk_fail(MOK_E_MEMORY, "no memory for the meetings of rank %d", w->dims.rank), fail);
    const char *forward = getenv("MOK_FORWARD"), *backward = getenv("MOK_BACKWARD");
    s->fused = !(forward && !strcmp(forward, "staged"));
    s->fused_backward = !(backward && !strcmp(backward, "staged"));
    mk_cuda_choose_tiles(w, getenv("MOK_TILE"));
    MK_TRY_GOTO(mk_cuda_enter(s->device), fail);
    status = open_entered(w);
    mk_cuda_leave(s->device);
    if (status == MOK_OK)
        return MOK_OK;
fail:
    close_state(w);
    return status;
}

/* --- check ------------------------------------------------------------------------------------------------------------ */
/* One argument: NULL is fine (src/api has looked). The driver is asked once about a pointer: a model's layers come again and again, and a framework's
 * allocator hands out the same places. */
enum { SEEN_BITS = 12 };
_Static_assert(1 << SEEN_BITS == MK_CUDA_SEEN_POINTERS, "a place for each hash");

static mok_status check_memory(const mok_workspace *w, const char *name, const void *pointer, unsigned align)
{
    mk_cuda_state *s = w->state;
    const void **seen = &s->seen[mk_cuda_place(pointer, 0, SEEN_BITS)];
    int attributes[] = {MK_CU_POINTER_MEMORY_TYPE, MK_CU_POINTER_DEVICE_ORDINAL}, ordinal = -1;
    unsigned type = 0;
    void *values[] = {&type, &ordinal};
    if ((uintptr_t)pointer % align)
        return mk_fail(MOK_E_ARG, "%s is at %p: backend cuda needs it aligned to %u bytes", name, pointer, align);
    if (!pointer || *seen == pointer)
        return MOK_OK;
    MK_CUDA_TRY(s->api->cuPointerGetAttributes(2, attributes, values, mk_cu_address(pointer)), "asking the driver what %s (at %p) is", name, pointer);
    if (type == 0)
        return mk_fail(MOK_E_ARG, "%s is at %p, which is no memory of the CUDA driver: backend cuda takes device pointers", name, pointer);
    if (type == MK_CU_MEMORY_DEVICE && ordinal != s->device->ordinal)
        return mk_fail(MOK_E_ARG, "%s is on device %d, but rank %d is on device %d", name, ordinal, w->dims.rank, s->device->ordinal);
    *seen = pointer;
    return MOK_OK;
}

/* Addresses of experts are read by the pass, so only their table is looked at. */
static mok_status check_table(const mok_workspace *w, const char *name, const void *experts)
{
    char table[64];
    snprintf(table, sizeof table, "%s.experts", name);
    return check_memory(w, table, experts, 8);
}

static mok_status check_weight(const mok_workspace *w, const char *name, const mok_weight *m, bool used)
{
    if (used && m->experts)
        return check_table(w, name, (const void *)m->experts);
    return check_memory(w, name, used ? m->packed : NULL, 16);
}

/* A routed weight: packed alone, or in MXFP8 with up to three more parts. */
static mok_status check_routed(const mok_workspace *w, const char *name, const mok_weight *m, bool used)
{
    MK_TRY(check_weight(w, name, m, used));
    MK_TRY(check_memory(w, name, used ? m->scales : NULL, 16));
    MK_TRY(check_memory(w, name, used ? m->transposed : NULL, 16));
    return check_memory(w, name, used ? m->transposed_scales : NULL, 16);
}

static mok_status check_schedule(const mok_workspace *w, const mok_schedule_args *a)
{
    MK_TRY(check_memory(w, "expert_ids", a->num_tokens ? a->expert_ids : NULL, 4));
    MK_TRY(check_memory(w, "schedule", a->schedule, MK_BUFFER_ALIGN));
    MK_TRY(check_memory(w, "tokens_per_expert_local", a->tokens_per_expert_local, 8));
    return check_memory(w, "tokens_per_expert_global", a->tokens_per_expert_global, 8);
}

static mok_status check_forward(const mok_workspace *w, const mok_forward_args *a, bool down)
{
    const mok_weights *m = &a->weights;
    bool routed = w->dims.experts_count > 0, shared = w->dims.shared_intermediate > 0;
    MK_TRY(check_memory(w, "schedule", a->schedule, MK_BUFFER_ALIGN));
    MK_TRY(check_memory(w, "context", a->context, MK_BUFFER_ALIGN));
    MK_TRY(check_memory(w, "x", a->num_tokens ? a->x : NULL, 16));
    MK_TRY(check_memory(w, "router_weights", a->num_tokens && down ? a->router_weights : NULL, w->config.router_dtype == MOK_BF16 ? 2 : 4));
    MK_TRY(check_memory(w, "out", a->num_tokens && down ? a->out : NULL, 16));
    MK_TRY(check_memory(w, "wide", a->wide, MK_BUFFER_ALIGN));
    MK_TRY(check_memory(w, "shared_output_gate", w->config.shared_gate ? m->shared_output_gate : NULL, 16));
    MK_TRY(check_routed(w, "weights.gate", &m->gate, routed));
    MK_TRY(check_routed(w, "weights.up", &m->up, routed));
    MK_TRY(check_routed(w, "weights.down", &m->down, routed && down));
    MK_TRY(check_weight(w, "weights.shared_gate", &m->shared_gate, shared));
    MK_TRY(check_weight(w, "weights.shared_up", &m->shared_up, shared));
    return check_weight(w, "weights.shared_down", &m->shared_down, shared && down);
}

static mok_status check_grad(const mok_workspace *w, const char *name, const mok_grad *g)
{
    return g->experts ? check_table(w, name, (const void *)g->experts) : check_memory(w, name, g->packed, 16);
}

static mok_status check_backward(const mok_workspace *w, const mok_backward_args *a)
{
    const mok_weights *m = &a->weights;
    const mok_grads *g = &a->grads;
    bool routed = w->dims.experts_count > 0, shared = w->dims.shared_intermediate > 0, data = a->parts != MOK_BACKWARD_WEIGHTS && a->num_tokens;
    unsigned router = w->config.router_dtype == MOK_BF16 ? 2 : 4;
    MK_TRY(check_memory(w, "schedule", a->schedule, MK_BUFFER_ALIGN));
    MK_TRY(check_memory(w, "context", a->context, MK_BUFFER_ALIGN));
    MK_TRY(check_memory(w, "x", a->num_tokens ? a->x : NULL, 16));
    MK_TRY(check_memory(w, "dout", a->num_tokens ? a->dout : NULL, 16));
    MK_TRY(check_memory(w, "router_weights", a->num_tokens ? a->router_weights : NULL, router));
    MK_TRY(check_memory(w, "dx", data ? a->dx : NULL, 16));
    MK_TRY(check_memory(w, "drouter_weights", data ? a->drouter_weights : NULL, router));
    MK_TRY(check_memory(w, "wide", a->wide, MK_BUFFER_ALIGN));
    MK_TRY(check_memory(w, "wide_dgrad", a->wide_dgrad, MK_BUFFER_ALIGN));
    MK_TRY(check_memory(w, "shared_output_gate", w->config.shared_gate ? m->shared_output_gate : NULL, 16));
    MK_TRY(check_routed(w, "weights.gate", &m->gate, routed));
    MK_TRY(check_routed(w, "weights.up", &m->up, routed));
    MK_TRY(check_routed(w, "weights.down", &m->down, routed));
    MK_TRY(check_weight(w, "weights.shared_gate", &m->shared_gate, shared));
    MK_TRY(check_weight(w, "weights.shared_up", &m->shared_up, shared));
    MK_TRY(check_weight(w, "weights.shared_down", &m->shared_down, shared));
    MK_TRY(check_grad(w, "grads.gate", &g->gate));
    MK_TRY(check_grad(w, "grads.up", &g->up));
    MK_TRY(check_grad(w, "grads.down", &g->down));
    MK_TRY(check_grad(w, "grads.shared_gate", &g->shared_gate));
    MK_TRY(check_grad(w, "grads.shared_up", &g->shared_up));
    MK_TRY(check_grad(w, "grads.shared_down", &g->shared_down));
    MK_TRY(check_grad(w, "grads.shared_output_gate", &g->shared_output_gate));
    return check_memory(w, "grads.ready", g->ready, 4);
}

static mok_status encode_maps(mok_workspace *w, const mok_forward_args *a, bool down)
{
    bool routed = w->dims.capacity_tiles > 0, shared = w->dims.shared_intermediate > 0 && a->num_tokens > 0;
    if (routed)
        MK_TRY(mk_cuda_encode_gemm(w, MK_GEMM_GATE_UP, a));
    if (routed && down)
        MK_TRY(mk_cuda_encode_gemm(w, MK_GEMM_DOWN, a));
    if (shared)
        MK_TRY(mk_cuda_encode_gemm(w, MK_GEMM_SHARED_GATE_UP, a));
    return shared && down ? mk_cuda_encode_gemm(w, MK_GEMM_SHARED_DOWN, a) : MOK_OK;
}

static mok_status check_entered(mok_workspace *w, const mk_call *call)
{
    bool down = call->operation == MK_OP_FORWARD;
    MK_TRY(mk_cuda_take_fault(w, NULL));
    if (call->operation == MK_OP_SCHEDULE)
        return check_schedule(w, &call->schedule);
    if (call->operation == MK_OP_BACKWARD) {
        MK_TRY(check_backward(w, &call->backward));
        return mk_cuda_encode_backward(w, &call->backward);
    }
    MK_TRY(check_forward(w, &call->forward, down));
    return encode_maps(w, &call->forward, down);
}

static mok_status check(mok_workspace *w, const mk_call *call)
{
    const mk_cuda_state *s = w->state;
    MK_TRY(mk_cuda_enter(s->device));
    mok_status status = check_entered(w, call);
    mk_cuda_leave(s->device);
    return status;
}

/* --- weights widened for the caller ------------------------------------------------------------------------------------- */
static mok_status widen_entered(mok_workspace *w, const mok_mx_widen_args *a, void *stream)
{
    MK_TRY(check_memory(w, "wide", a->wide, MK_BUFFER_ALIGN));
    MK_TRY(check_memory(w, "wide_dgrad", a->wide_dgrad, MK_BUFFER_ALIGN));
    MK_TRY(check_routed(w, "weights.gate", &a->weights.gate, true));
    MK_TRY(check_routed(w, "weights.up", &a->weights.up, true));
    MK_TRY(check_routed(w, "weights.down", &a->weights.down, true));
    return mk_cuda_mx_widen(w, a, stream);
}

static mok_status mx_widen(mok_workspace *w, const mok_mx_widen_args *args, void *stream)
{
    const mk_cuda_state *s = w->state;
    MK_TRY(mk_cuda_enter(s->device));
    mok_status status = widen_entered(w, args, stream);
    mk_cuda_leave(s->device);
    return status;
}

/* --- waiting ----------------------------------------------------------------------------------------------------------- */
static void read_stats(mok_workspace *w, const mk_device_state *d)
{
    mok_stats *to = &w->stats;
    int64_t row = MK_ROW_BYTES(&w->dims, w->dims.hidden);
    to->schedules = d->done[MK_OP_SCHEDULE];
    to->forwards = d->done[MK_OP_FORWARD];
    to->recomputes = d->done[MK_OP_RECOMPUTE];
    to->backwards = d->done[MK_OP_BACKWARD];
    to->rows = d->rows_pulled + d->rows_copied;
    to->rows_pulled = d->rows_pulled;
    to->rows_pulled_peer = d->rows_pulled_peer;
    to->rows_copied = d->rows_copied;
    to->rows_padding = d->rows_padding;
    to->ring_rotations = d->ring_rotations;
    to->rows_replayed = d->rows_replayed;
    to->wgrad_continued = d->wgrad_continued;
    to->mx_not_finite = d->mx_not_finite;
    to->bytes_pulled_peer = d->row_moves_peer * row;
    to->bytes_pushed_peer = d->bytes_pushed_peer;
}

/* Replays of a captured graph are work that this library has not seen start: only the whole context can be waited for. */
static mok_status wait_idle(mok_workspace *w, bool block)
{
    const mk_cuda_state *s = w->state;
    int32_t rank = w->dims.rank;
    if (block && s->captured)
        MK_CUDA_TRY(s->api->cuCtxSynchronize(), "rank %d: waiting for device %d", rank, s->device->ordinal);
    else if (block && s->called)
        MK_CUDA_TRY(s->api->cuEventSynchronize(s->done), "rank %d: waiting for device %d", rank, s->device->ordinal);
    else if (s->called) {
        mk_cu_result result = s->api->cuEventQuery(s->done);
        if (result == MK_CU_NOT_READY)
            return MOK_NOT_READY;
        MK_CUDA_TRY(result, "rank %d: looking at device %d", rank, s->device->ordinal);
    }
    return MOK_OK;
}

static mok_status wait_entered(mok_workspace *w, bool block)
{
    const mk_cuda_state *s = w->state;
    mk_device_state device;
    if (!s->called && !s->captured)
        return MOK_OK;
    MK_TRY(wait_idle(w, block));
    if (!block && s->captured) /* a replay may be running: only pinned memory may be looked at */
        return mk_cuda_take_fault(w, NULL);
    MK_CUDA_TRY(s->api->cuMemcpyDtoH(&device, mk_cu_address(w->local + w->memory.device_state), sizeof device), "rank %d: reading the device state",
                w->dims.rank);
    read_stats(w, &device);
    return mk_cuda_take_fault(w, &device);
}

static mok_status wait_done(mok_workspace *w, bool block)
{
    const mk_cuda_state *s = w->state;
    MK_TRY(mk_cuda_enter(s->device));
    mok_status status = wait_entered(w, block);
    mk_cuda_leave(s->device);
    return status;
}

static mok_status copy_entered(mok_workspace *w, void *to, const void *from, size_t bytes)
{
    const mk_cuda_state *s = w->state;
    MK_TRY(wait_idle(w, true));
    MK_CUDA_TRY(s->api->cuMemcpy(mk_cu_address(to), mk_cu_address(from), bytes), "rank %d: copying %zu bytes from %p to %p", w->dims.rank, bytes, from, to);
    return MOK_OK;
}

static mok_status memory_copy(mok_workspace *w, void *to, const void *from, size_t bytes)
{
    const mk_cuda_state *s = w->state;
    if (!bytes)
        return MOK_OK;
    MK_TRY(mk_cuda_enter(s->device));
    mok_status status = copy_entered(w, to, from, bytes);
    mk_cuda_leave(s->device);
    return status;
}

static mok_status schedule_head(mok_workspace *w, const void *schedule, mk_schedule_head *head) { return memory_copy(w, head, schedule, sizeof *head); }

const mk_backend mk_backend_cuda = {
    .name = "cuda",
    .id = MOK_BACKEND_CUDA,
    .probe = mk_cuda_probe,
    .open = open_state,
    .close = close_state,
    .check = check,
    .run = mk_cuda_run,
    .refuse = mk_cuda_refuse,
    .wait = wait_done,
    .schedule_head = schedule_head,
    .memory_alloc = memory_alloc,
    .memory_free = memory_free,
    .memory_copy = memory_copy,
    .stage_times_start = mk_cuda_times_start,
    .stage_times_read = mk_cuda_times_read,
    .link_move = mk_cuda_link_move,
    .mx_quantise = mk_cuda_mx_quantise,
    .mx_widen = mx_widen,
    .scaled = scaled,
    .mxfp8 = true,
};
