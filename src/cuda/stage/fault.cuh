/* Trouble that the device finds: the record that reaches the host, and the waits of a pass, which may end in it. */
#ifndef MK_STAGE_FAULT_CUH
#define MK_STAGE_FAULT_CUH

#include "cuda/stage/stage.cuh"
#include "cuda/sync/wait.cuh"

namespace mk {

MK_DEVICE mk_call_head *call_head(const mk_rank_params &r, int64_t rank, uint64_t call)
{
    return in_peer<mk_call_head>(r, rank, r.memory.call_heads) + (call & 1);
}

/* Word by word: heads lie in peers' memory, the host's copy in pinned host memory. */
MK_DEVICE void copy_head(mk_call_head *to, const mk_call_head *from)
{
    for (uint32_t i = 0; i < sizeof(mk_call_head) / 8; i++)
        store(reinterpret_cast<uint64_t *>(to) + i, load(reinterpret_cast<const uint64_t *>(from) + i));
}

/* One thread. The first trouble since the host last looked is kept. head: the offender's. */
MK_DEVICE void fault_note(const mk_rank_params &r, int32_t kind, int32_t rank, const mk_call_head *head, int64_t v0, int64_t v1, int64_t v2, int64_t v3, int32_t task = 0)
{
    mk_device_state *state = device_state(r);
    if (load(&state->fault.kind) != MK_FAULT_NONE)
        return;
    mk_fault f = {kind, head ? load(&head->operation) : 0, rank, task, head ? load(&head->layer) : 0, load(&state->calls), {v0, v1, v2, v3}};
    store(&state->fault, f);
    if (!r.host_fault)
        return;
    if (head) {
        copy_head(&r.host_fault->zero, call_head(r, 0, f.call));
        copy_head(&r.host_fault->other, head);
    }
    f.kind = MK_FAULT_NONE;
    store(&r.host_fault->fault, f);
    /* Release: publishes the record to the host, whose acquire load of kind meets it. */
    flag_store_release_sys(reinterpret_cast<uint32_t *>(&r.host_fault->fault.kind), (uint32_t)kind);
}

/* The same, and the data stages of this call do nothing. */
MK_DEVICE void fault_set(const mk_rank_params &r, int32_t kind, int32_t rank, const mk_call_head *head, int64_t v0, int64_t v1, int64_t v2, int64_t v3, int32_t task = 0)
{
    flag_store_relaxed_gpu(&device_state(r)->skip, 1);
    fault_note(r, kind, rank, head, v0, v1, v2, v3, task);
}

/* A counter of the pass has not come in time. Whoever finds it first notes it; the record is written by the launch behind the pass, whose registers
 * are free (tell_missing). `skip` then ends all other waits of this launch, so that every role goes through its remaining tasks; what
 * they compute is void. No later barrier is signalled, so that the peers, who would use it, name this rank. */
MK_DEVICE void give_up(const mk_rank_params &r, int32_t task, int32_t counter, int64_t index, uint32_t seen, uint32_t wanted)
{
    mk_device_state *state = device_state(r);
    note_results_are_void();
    if (ticket_take_relaxed_gpu(&state->given_up, 1) != 0)
        return;
    store(&state->missing, mk_missing_counter{task, counter, (int32_t)index, seen, wanted});
    store(&call_head(r, r.dims.rank, load(&state->calls))->gave_up, 1u);
    flag_store_relaxed_gpu(&state->skip, 1);
}

/* By one thread of a later launch. */
MK_DEVICE void tell_missing(const mk_rank_params &r)
{
    const mk_device_state *state = device_state(r);
    if (load(&state->given_up) == 0)
        return;
    const mk_missing_counter m = load(&state->missing);
    fault_set(r, MK_FAULT_TIMEOUT, r.dims.rank, call_head(r, r.dims.rank, load(&state->calls)), (int32_t)m.seen, m.wanted, m.counter, m.index, m.task);
}

/* By one thread of the launch behind a pass's second barrier, of ranks that share a GPU and so met on the host: did one of them give up the pass? Where
 * ranks have GPUs of their own, its barrier does not come. */
MK_DEVICE void tell_who_gave_up(const mk_rank_params &r)
{
    const uint64_t call = load(&device_state(r)->calls);
    for (int32_t i = 0; r.shares_gpu && i < r.dims.num_ranks; i++) {
        const mk_call_head *head = call_head(r, i, call);
        if (load(&head->gave_up) == 0)
            continue;
        fault_note(r, MK_FAULT_TIMEOUT, i, head, 0, 0, MK_FAULT_GAVE_UP, 0); /* this launch goes on: its threads must not part */
        return;
    }
}

/* counter[index] >= wanted, for a task of kind `task` (mk_task_kind). Acquire: pairs with flag_add_release_gpu of whoever counts. */
MK_DEVICE void wait_counter(const mk_rank_params &r, int32_t task, int32_t counter, int64_t index, uint32_t wanted, const char *what)
{
    const uint32_t seen = wait_flag_at_least_gpu(counter_at(r, counter, index), wanted, &device_state(r)->skip, r.timeout_ns, what);
    if ((int32_t)(seen - wanted) < 0)
        give_up(r, task, counter, index, seen, wanted);
}

} /* namespace mk */
#endif
