/* mok_link_move: the rows of a schedule, moved once and checked, for benchmarks. A few launches between barriers of all ranks:
 *
 *   known numbers, poison ─ barrier ─ [event] move [event] ─ barrier ─ check
 */
#define MOK_EXPERIMENTAL
#include "cuda/host/state.h"

#include "layout/depend.h"
#include "layout/view.h"

enum { BLOCKS_PER_SM = 8 };

typedef struct link_call {
    mok_workspace *w;
    mk_cuda_state *s;
    const mk_cuda_driver *api;
    mk_cu_stream stream;
    mk_link_params p;
    mk_schedule_head head;
    int64_t blocks;
    mk_cuda_kernel kernel;
    mk_cu_event event[2];
    int64_t moves_before;    /* of rows of other ranks, as the device counts them */
} link_call;

static mok_status launch(const link_call *c, mk_cuda_kernel kernel, int64_t blocks, void *params)
{
    const mk_cuda_kernel_shape *shape = &mk_cuda_kernel_shapes[kernel];
    mk_cu_launch config = {.grid_x = (unsigned)blocks, .grid_y = 1, .grid_z = 1, .block_x = c->s->device->kernels.threads[kernel], .block_y = 1, .block_z = 1,
                           .shared_bytes = shape->shared, .stream = c->stream};
    void *list[] = {params};
    MK_CUDA_TRY(c->api->cuLaunchKernelEx(&config, c->s->device->kernels.function[kernel], list, NULL), "rank %d: launching %s (%u blocks on device %d)",
                c->w->dims.rank, shape->name, config.grid_x, c->s->device->ordinal);
    return MOK_OK;
}

static mok_status fill(const link_call *c, const void *memory, uint32_t word, int64_t bytes, const char *what)
{
    if (bytes)
        MK_CUDA_TRY(c->api->cuMemsetD32Async(mk_cu_address(memory), word, (size_t)bytes / 4, c->stream), "rank %d: filling %s", c->w->dims.rank, what);
    return MOK_OK;
}

/* Every buffer that rows, flags or counts will arrive in. */
static mok_status poison(const link_call *c)
{
    const mk_dims *d = &c->w->dims;
    const mk_memory *m = &c->w->memory;
    int64_t row = 2 * d->hidden, tokens = c->p.num_tokens;
    MK_TRY(fill(c, c->w->local + m->ring_x, 0xffffffffu, MK_RING_ROWS(d) * row, "the ring"));
    MK_TRY(fill(c, c->w->heap + m->slots, 0xffffffffu, tokens * row, "the slots"));
    MK_TRY(fill(c, c->w->heap + m->dweight_slots, 0, tokens * 4, "the flags"));
    MK_TRY(fill(c, c->w->local + m->counters + 4 * mk_counter_index(d, MK_COUNTER_s1_rows_arrived, 0), 0, c->head.num_tiles * 4, "the counters"));
    MK_TRY(fill(c, c->p.wrong, 0, sizeof *c->p.wrong, "a counter"));
    return fill(c, c->w->local + m->device_state + (int64_t)offsetof(mk_device_state, tickets), 0, 2 * 4, "the tickets");
}

static mok_status barrier(link_call *c, mok_status status)
{
    bool skip = false;
    if (c->s->meets_on_host)
        return mk_cuda_meet(c->w, c->stream, MK_OP_FORWARD, 0, status, false, &skip);
    return status == MOK_OK ? launch(c, MK_CUDA_mok_rank_barrier, 1, &c->s->rank) : status;
}

static mok_status prepare(link_call *c)
{
    MK_TRY(poison(c));
    return launch(c, MK_CUDA_mok_link_fill, (int64_t)c->s->device->num_sms * BLOCKS_PER_SM, &c->p);
}

static mok_status move(link_call *c)
{
    int32_t rank = c->w->dims.rank;
    MK_CUDA_TRY(c->api->cuEventRecord(c->event[0], c->stream), "rank %d: recording the beginning of the moves", rank);
    MK_TRY(launch(c, c->kernel, c->blocks, &c->p));
    MK_CUDA_TRY(c->api->cuEventRecord(c->event[1], c->stream), "rank %d: recording the end of the moves", rank);
    return MOK_OK;
}

/* Nothing of the workspace runs. */
static mok_status read_moves(const link_call *c, int64_t *moves)
{
    MK_CUDA_TRY(c->api->cuMemcpyDtoH(moves, mk_cu_address(c->w->local + c->w->memory.device_state + offsetof(mk_device_state, row_moves_peer)), sizeof *moves),
                "rank %d: reading the count of rows moved", c->w->dims.rank);
    return MOK_OK;
}

static mok_status finish(link_call *c, mok_link_result *result)
{
    mk_cuda_state *s = c->s;
    float ms = 0;
    uint64_t wrong = 0;
    int32_t rank = c->w->dims.rank;
    MK_TRY(launch(c, MK_CUDA_mok_link_check, (int64_t)s->device->num_sms * BLOCKS_PER_SM, &c->p));
    MK_CUDA_TRY(c->api->cuEventRecord(s->done, c->stream), "rank %d: recording the end of the check", rank);
    s->called = true;
    s->last_stream = c->stream;
    MK_CUDA_TRY(c->api->cuEventSynchronize(s->done), "rank %d: waiting for the moved rows", rank);
    MK_TRY(mk_cuda_take_fault(c->w, NULL));
    MK_CUDA_TRY(c->api->cuEventElapsedTime(&ms, c->event[0], c->event[1]), "rank %d: reading the time of the moves", rank);
    MK_CUDA_TRY(c->api->cuMemcpyDtoH(&wrong, mk_cu_address(c->p.wrong), sizeof wrong), "rank %d: reading the count of wrong words", rank);
    int64_t moves, row_bytes = c->p.mx ? mk_mx_row_bytes(c->w->dims.hidden) : 2 * c->w->dims.hidden;
    MK_TRY(read_moves(c, &moves));
    *result = (mok_link_result){.seconds = 1e-3 * (double)ms, .rows = c->head.num_rows, .rows_peer = c->head.rows_peer, .wrong_words = (int64_t)wrong,
                                .bytes_pulled_peer = (moves - c->moves_before) * row_bytes};
    return MOK_OK;
}

static mok_status run(link_call *c, mok_link_result *result)
{
    if (c->s->called && c->s->last_stream != c->stream)
        MK_CUDA_TRY(c->api->cuStreamWaitEvent(c->stream, c->s->done, 0), "rank %d: ordering two streams", c->w->dims.rank);
    MK_TRY(read_moves(c, &c->moves_before)); /* what called last has been waited for: schedule_head and the calls before this */
    MK_TRY(barrier(c, prepare(c)));
    MK_TRY(barrier(c, move(c)));
    return finish(c, result);
}

static mok_status run_with_events(link_call *c, mok_link_result *result)
{
    mok_status status = MOK_OK;
    for (int i = 0; i < 2 && status == MOK_OK; i++) {
        mk_cu_result created = c->api->cuEventCreate(&c->event[i], MK_CU_EVENT_DEFAULT);
        if (created != MK_CU_SUCCESS)
            status = mk_cuda_fail(created, "rank %d: creating an event", c->w->dims.rank);
    }
    if (status == MOK_OK)
        status = run(c, result);
    for (int i = 0; i < 2; i++)
        if (c->event[i])
            c->api->cuEventDestroy(c->event[i]);
    return status;
}

/* What the same arguments say on every rank comes first, so that all refuse alike. */
static mok_status check(const link_call *c)
{
    const mk_dims *d = &c->w->dims;
    if (d->mx)
        return mk_fail(MOK_E_UNSUPPORTED, "the link is measured with rows of BF16: of a workspace whose dtype is MOK_BF16");
    if (d->topk != 1)
        return mk_fail(MOK_E_UNSUPPORTED, "the link is measured with top-k 1, so that no row is a copy, but topk is %lld", (long long)d->topk);
    if (d->num_ranks > d->num_experts)
        return mk_fail(MOK_E_UNSUPPORTED, "the link is measured with experts on every rank, but there are %lld for %d ranks", (long long)d->num_experts, d->num_ranks);
    if (d->capacity_tiles > d->ring_tiles)
        return mk_fail(MOK_E_STATE, "ring_rows is %lld, but the table of the worst routing has %lld rows: the link is measured without reusing the ring",
                       (long long)d->ring_tiles * MK_ROW_TILE, (long long)d->capacity_tiles * MK_ROW_TILE);
    if (c->head.magic != MK_SCHEDULE_MAGIC || c->head.fingerprint != c->w->fingerprint || c->head.num_tokens != c->p.num_tokens)
        return mk_fail(MOK_E_STATE, "schedule was not filled by mok_schedule of this configuration for %lld tokens", (long long)c->p.num_tokens);
    return MOK_OK;
}

mok_status mk_cuda_link_move(mok_workspace *w, const mok_link_args *a, void *stream, mok_link_result *result)
{
    mk_cuda_state *s = w->state;
    bool plain = a->work & MOK_LINK_PLAIN, pull = a->work & MOK_LINK_PULL, push = a->work & MOK_LINK_PUSH, signal = a->work & MOK_LINK_SIGNAL;
    link_call c = {.w = w, .s = s, .api = s->api, .stream = stream, .blocks = a->blocks ? a->blocks : s->device->num_sms,
                   .kernel = plain ? MK_CUDA_mok_link_copy : a->work & MOK_LINK_MX ? MK_CUDA_mok_link_move_mx : MK_CUDA_mok_link_move};
    c.p = (mk_link_params){.rank = s->rank, .schedule = (void *)(uintptr_t)a->schedule, .num_tokens = a->num_tokens, .pull = pull, .push = push,
                           .wrong = (uint64_t *)(w->local + w->memory.expert_cursor), .payload = !(a->work & MOK_LINK_EMPTY), .mx = (a->work & MOK_LINK_MX) != 0, .round = 1};
    c.p.signal = (pull && (signal || !plain) ? MK_LINK_SIGNAL_PULL : 0) | (push && signal ? MK_LINK_SIGNAL_PUSH : 0);
    MK_TRY(w->backend->schedule_head(w, a->schedule, &c.head));
    MK_TRY(check(&c));
    MK_TRY(mk_cuda_enter(s->device));
    mok_status status = run_with_events(&c, result);
    mk_cuda_leave(s->device);
    w->broken |= status != MOK_OK; /* the ranks may no longer be in step */
    return status;
}
