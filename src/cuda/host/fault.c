/* From a device's record to the sentence that the cpu backend gives for the same mistake. */
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "cuda/host/state.h"

typedef unsigned long long ull;

static const char *name_of(int32_t operation) { return mk_operation_name((mk_operation)operation); }

static mok_status say_refused(const mok_workspace *w, const mk_host_fault *f)
{
    const mk_call_head *h = &f->other;
    int length = (int)strnlen(h->sentence, sizeof h->sentence);
    if (f->fault.rank == w->dims.rank) /* found by this rank's own device when the call opened */
        return mk_fail((mok_status)h->status, "%.*s", length, h->sentence);
    return mk_fail(MOK_E_PEER, "rank %d refused its %s call of layer %llu: %.*s", f->fault.rank, name_of(h->operation), (ull)h->layer, length, h->sentence);
}

static mok_status say_mismatch(const mk_host_fault *f)
{
    const mk_call_head *zero = &f->zero, *h = &f->other;
    if (h->operation == zero->operation && h->layer == zero->layer && h->schedule_number == zero->schedule_number && h->sequence == zero->sequence)
        return mk_fail(MOK_E_MISMATCH, "call %llu is backward with parts %d on rank 0, but %d on rank %d", (ull)zero->sequence, zero->parts, h->parts,
                       f->fault.rank);
    return mk_fail(MOK_E_MISMATCH, "call %llu is %s of layer %llu with schedule %llu on rank 0, but %s of layer %llu with schedule %llu on rank %d",
                   (ull)zero->sequence, name_of(zero->operation), (ull)zero->layer, (ull)zero->schedule_number, name_of(h->operation), (ull)h->layer,
                   (ull)h->schedule_number, f->fault.rank);
}

static const char *const task_names[] = {
#define NAME(upper, lower) #lower,
    MK_TASK_LIST(NAME)
#undef NAME
};
static const struct { const char *name, *raised_by; } counters[] = {
#define NAME(space, name, writer, reader, need) {#name, writer},
    MK_COUNTER_LIST(NAME)
#undef NAME
};

static const char *owner_of(int64_t counter)
{
    return counter < MK_NUM_TILE_COUNTERS ? "tile" : counter == MK_COUNTER_wgrad_tasks_done ? "piece" : "shared tile";
}

static mok_status say_timeout(const mok_workspace *w, const mk_fault *f)
{
    const int64_t *v = f->value, counter = v[2];
    if (counter == MK_FAULT_GAVE_UP)
        return mk_fail(MOK_E_TIMEOUT, "rank %d: rank %d gave up in %s (layer %llu, call %llu): its kernel waited %lld ms for a counter of its own", w->dims.rank, f->rank,
                       name_of(f->operation), (ull)f->layer, (ull)f->call, (long long)w->config.timeout_ms);
    if (counter < 0 || counter >= MK_NUM_COUNTERS || f->task < 0 || f->task >= MK_NUM_TASK_KINDS)
        return mk_fail(MOK_E_TIMEOUT, "rank %d waited %lld ms for rank %d in %s (layer %llu, call %llu): its epoch is %llu, expected %llu", w->dims.rank,
                       (long long)w->config.timeout_ms, f->rank, f->operation ? name_of(f->operation) : "a barrier", (ull)f->layer, (ull)f->call, (ull)v[0],
                       (ull)v[1]);
    return mk_fail(MOK_E_TIMEOUT, "rank %d waited %lld ms in %s (layer %llu, call %llu): %s needs %s of %s %lld, which is %lld, expected %lld (%s)", w->dims.rank,
                   (long long)w->config.timeout_ms, name_of(f->operation), (ull)f->layer, (ull)f->call, task_names[f->task], counters[counter].name,
                   owner_of(counter), (long long)v[3], (long long)v[0], (long long)v[1], counters[counter].raised_by);
}

static mok_status say(mok_workspace *w, const mk_host_fault *record)
{
    const mk_fault *f = &record->fault;
    const int64_t *v = f->value;
    switch (f->kind) {
    case MK_FAULT_BAD_ID:
        return mk_fail(MOK_E_ROUTE, "rank %d, token %lld, k %lld: expert id %lld is outside [-1, %lld)", f->rank, (long long)v[0], (long long)v[1],
                       (long long)v[2], (long long)v[3]);
    case MK_FAULT_REFUSED: return say_refused(w, record);
    case MK_FAULT_MISMATCH: return say_mismatch(record);
    case MK_FAULT_STALE:
        return mk_fail(MOK_E_STATE, v[0] ? "context was not filled by mok_forward or mok_recompute of this configuration"
                                         : "schedule was not filled by mok_schedule of this configuration");
    case MK_FAULT_TIMEOUT:
        w->broken = true;
        if (((const mk_cuda_state *)w->state)->meets_on_host) /* nobody need wait for this rank at the next meeting */
            w->group->transport->abandon(w->group);
        return say_timeout(w, f);
    default: return mk_fail(MOK_E_BUG, "the device's fault record has kind %d", f->kind);
    }
}

/* A record that only the device has (kernels that got no host_fault): the heads are still where the call left them. */
static void fetch_heads(const mok_workspace *w, mk_host_fault *record)
{
    const mk_cuda_state *s = w->state;
    int64_t place = w->memory.call_heads + (int64_t)(record->fault.call & 1) * (int64_t)sizeof(mk_call_head);
    int32_t rank = record->fault.rank;
    s->api->cuMemcpyDtoH(&record->zero, mk_cu_address(w->heaps[0] + place), sizeof record->zero);
    if (rank >= 0 && rank < w->dims.num_ranks)
        s->api->cuMemcpyDtoH(&record->other, mk_cu_address(w->heaps[rank] + place), sizeof record->other);
}

/* Late is no error: the device has waited, and the log gets a line. */
static void log_late(const mok_workspace *w, mk_late *shown)
{
    /* Acquire: pairs with the st.release.sys in report_late. */
    uint32_t ms = __atomic_load_n(&shown->waited_ms, __ATOMIC_ACQUIRE);
    if (!ms)
        return;
    mk_late late = *shown;
    __atomic_store_n(&shown->waited_ms, 0, __ATOMIC_RELEASE);
    mk_log("rank %d was late: rank %d has waited %.1f s for it at a barrier on the device (call %llu)", late.rank, w->dims.rank, 1e-3 * ms, (ull)late.call);
}

mok_status mk_cuda_take_fault(mok_workspace *w, const mk_device_state *idle)
{
    mk_cuda_state *s = w->state;
    mk_host_fault record;
    log_late(w, &s->fault->late);
    memset(&record, 0, sizeof record);
    /* Acquire: pairs with the st.release.sys of the kernel that filled the record. */
    bool shown = __atomic_load_n(&s->fault->fault.kind, __ATOMIC_ACQUIRE) != MK_FAULT_NONE;
    if (shown) {
        record = *s->fault;
        __atomic_store_n(&s->fault->fault.kind, MK_FAULT_NONE, __ATOMIC_RELEASE);
        s->clear_fault = true;
    } else if (idle && idle->fault.kind != MK_FAULT_NONE) {
        record.fault = idle->fault;
        fetch_heads(w, &record);
        s->clear_fault = true;
    } else {
        return MOK_OK;
    }
    if (idle) {
        int32_t none = MK_FAULT_NONE;
        mk_cu_pointer kind = mk_cu_address(w->local + w->memory.device_state + offsetof(mk_device_state, fault.kind));
        s->clear_fault = s->api->cuMemcpyHtoD(kind, &none, sizeof none) != MK_CU_SUCCESS;
    }
    return say(w, &record);
}
