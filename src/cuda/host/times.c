/* Where a call's time goes: an event behind every launch, read afterwards. Only between mok_stage_times_start and the workspace's end;
 * otherwise a launch pays one comparison. */
#define MOK_EXPERIMENTAL
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cuda/host/state.h"

/* X(stage): what launches are summed up as. */
#define STAGE_LIST(X)                                                                                                              \
    X(begin) X(rank_barrier) X(call_check) X(s0_schedule) X(shared_scale) X(s1_dispatch) X(s2_gate_up) X(s4_down) X(s4_down_bwd) \
    X(s2_gate_up_bwd) X(wgrad) X(fused) X(s5_combine) X(mx_weights)
enum {
#define STAGE_ENUM(name) STAGE_##name,
    STAGE_LIST(STAGE_ENUM)
#undef STAGE_ENUM
    NUM_STAGES,
    STAGE_NONE = NUM_STAGES /* the beginning of a call: the time before it belongs to nobody */
};
enum { NUM_OPERATIONS = MK_OP_BACKWARD + 1 };

typedef struct mark {
    mk_cu_event event;
    unsigned char operation, stage; /* of what the event is behind */
} mark;

struct mk_cuda_times {
    mark *marks;
    int64_t count, capacity, num_events; /* marks in use; room; marks that have an event */
};

/* The backward's kernel runs one kind of task, or all. */
static int stage_of_kind(mk_task_kind kind)
{
    switch (kind) {
    case MK_TASK_NONE: return STAGE_fused;
    case MK_TASK_DISPATCH: return STAGE_s1_dispatch;
    case MK_TASK_GATE_UP:
    case MK_TASK_SHARED_GATE_UP: return STAGE_s2_gate_up;
    case MK_TASK_DGRAD_DOWN:
    case MK_TASK_SHARED_DGRAD_DOWN: return STAGE_s4_down_bwd;
    case MK_TASK_DGRAD_GATE_UP:
    case MK_TASK_SHARED_DGRAD_GATE_UP: return STAGE_s2_gate_up_bwd;
    default: return STAGE_wgrad;
    }
}

static int stage_of(mk_cuda_kernel kernel, mk_task_kind kind)
{
    switch (kernel) {
    case MK_CUDA_mok_weight_maps:
    case MK_CUDA_mok_mx_quantise_rows:
    case MK_CUDA_mok_call_begin: return STAGE_begin;
    case MK_CUDA_mok_rank_barrier: return STAGE_rank_barrier;
    case MK_CUDA_mok_call_check: return STAGE_call_check;
    case MK_CUDA_mok_s1_dispatch_mx:
    case MK_CUDA_mok_s1_dispatch: return STAGE_s1_dispatch;
    case MK_CUDA_mok_s2_gate_up_wide_mx:
    case MK_CUDA_mok_s2_gate_up_narrow_mx:
    case MK_CUDA_mok_s2_gate_up_wide:
    case MK_CUDA_mok_s2_gate_up_narrow: return STAGE_s2_gate_up;
    case MK_CUDA_mok_s4_down_wide_mx:
    case MK_CUDA_mok_s4_down_narrow_mx:
    case MK_CUDA_mok_s4_down_wide:
    case MK_CUDA_mok_s4_down_narrow: return STAGE_s4_down;
    case MK_CUDA_mok_forward_fused_mx:
    case MK_CUDA_mok_forward_fused: return STAGE_fused;
    case MK_CUDA_mok_mx_quantise_matrix:
    case MK_CUDA_mok_mx_quantise_turned:
    case MK_CUDA_mok_mx_take_part:
    case MK_CUDA_mok_mx_widen_weights: return STAGE_mx_weights;
    case MK_CUDA_mok_backward_fused_mx:
    case MK_CUDA_mok_backward_fused: return stage_of_kind(kind);
    case MK_CUDA_mok_shared_scale: return STAGE_shared_scale;
    case MK_CUDA_mok_s5_combine:
    case MK_CUDA_mok_s5_combine_bwd: return STAGE_s5_combine;
    default: return STAGE_s0_schedule;
    }
}

static mok_status grow(mk_cuda_times *t)
{
    int64_t capacity = t->capacity ? 2 * t->capacity : 256;
    mark *marks = realloc(t->marks, (size_t)capacity * sizeof *marks);
    if (!marks)
        return mk_fail(MOK_E_MEMORY, "no memory for the times of %lld launches", (long long)capacity);
    t->marks = marks;
    t->capacity = capacity;
    return MOK_OK;
}

static mok_status record(mk_cuda_state *s, mk_operation operation, int stage, mk_cu_stream stream)
{
    mk_cuda_times *t = s->times;
    if (t->count == t->capacity)
        MK_TRY(grow(t));
    mark *m = &t->marks[t->count];
    if (t->count == t->num_events) {
        MK_CUDA_TRY(s->api->cuEventCreate(&m->event, MK_CU_EVENT_DEFAULT), "creating event %lld for stage times", (long long)t->count);
        t->num_events++;
    }
    MK_CUDA_TRY(s->api->cuEventRecord(m->event, stream), "recording event %lld for stage times", (long long)t->count);
    m->operation = (unsigned char)operation;
    m->stage = (unsigned char)stage;
    t->count++;
    return MOK_OK;
}

mok_status mk_cuda_times_call(mk_cuda_state *s, mk_operation operation, mk_cu_stream stream) { return record(s, operation, STAGE_NONE, stream); }

mok_status mk_cuda_times_launch(mk_cuda_state *s, mk_operation operation, mk_cuda_kernel kernel, mk_task_kind kind, mk_cu_stream stream)
{
    return record(s, operation, stage_of(kernel, kind), stream);
}

mok_status mk_cuda_times_start(mok_workspace *w)
{
    mk_cuda_state *s = w->state;
    if (!s->times)
        s->times = calloc(1, sizeof *s->times);
    if (!s->times)
        return mk_fail(MOK_E_MEMORY, "no memory for the stage times of rank %d", w->dims.rank);
    s->times->count = 0;
    return MOK_OK;
}

/* With the context current, if there was one. */
void mk_cuda_times_free(mk_cuda_state *s)
{
    mk_cuda_times *t = s->times;
    for (int64_t i = 0; t && i < t->num_events; i++)
        s->api->cuEventDestroy(t->marks[i].event);
    if (t)
        free(t->marks);
    free(t);
    s->times = NULL;
}

static mok_status add_up(const mok_workspace *w, mok_stage_time sum[NUM_OPERATIONS][NUM_STAGES])
{
    const mk_cuda_state *s = w->state;
    const mk_cuda_times *t = s->times;
    for (int64_t i = 1; i < t->count; i++) {
        const mark *m = &t->marks[i];
        float ms = 0;
        if (m->stage == STAGE_NONE)
            continue;
        MK_CUDA_TRY(s->api->cuEventSynchronize(m->event), "rank %d: waiting for stage times", w->dims.rank);
        MK_CUDA_TRY(s->api->cuEventElapsedTime(&ms, t->marks[i - 1].event, m->event), "rank %d: reading stage times", w->dims.rank);
        sum[m->operation][m->stage].launches++;
        sum[m->operation][m->stage].seconds += 1e-3 * (double)ms;
    }
    return MOK_OK;
}

mok_status mk_cuda_times_read(mok_workspace *w, mok_stage_time *times, int32_t *count)
{
    static const char *const names[] = {
#define STAGE_NAME(name) #name,
        STAGE_LIST(STAGE_NAME)
#undef STAGE_NAME
    };
    mk_cuda_state *s = w->state;
    mok_stage_time sum[NUM_OPERATIONS][NUM_STAGES];
    int32_t room = *count, found = 0;
    if (!s->times)
        return mk_fail(MOK_E_STATE, "mok_stage_times_start was not called for this workspace");
    memset(sum, 0, sizeof sum);
    MK_TRY(mk_cuda_enter(s->device));
    mok_status status = add_up(w, sum);
    mk_cuda_leave(s->device);
    MK_TRY(status);
    for (int operation = 0; operation < NUM_OPERATIONS; operation++)
        for (int stage = 0; stage < NUM_STAGES; stage++) {
            if (!sum[operation][stage].launches)
                continue;
            if (found == room)
                return mk_fail(MOK_E_ARG, "count is %d, but there are more stages than that", room);
            sum[operation][stage].operation = mk_operation_name((mk_operation)operation);
            sum[operation][stage].stage = names[stage];
            times[found++] = sum[operation][stage];
        }
    *count = found;
    s->times->count = 0;
    return MOK_OK;
}
