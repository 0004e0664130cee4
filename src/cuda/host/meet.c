/* The barrier of ranks that share a GPU. Kernels of such ranks must never wait for each other: the one that would have to run may be queued
 * behind the one that waits. So the rank threads meet on the host, and each stream then waits for an event of every other rank.
 *
 * Two events alternate. A rank records an event again two barriers later, when all ranks have come to the barrier between, and so have
 * asked their streams to wait for its last recording. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "cuda/host/state.h"

static bool one_barrier(int32_t operation) { return operation == MK_OP_SCHEDULE; }

/* The same verdict on every rank. */
static mok_status judge(mok_workspace *w, const mk_cuda_arrival *all, bool *skip)
{
    for (int32_t r = 1; r < w->dims.num_ranks; r++)
        if (all[r].workspace != all[0].workspace) {
            w->broken = true;
            return mk_fail_order((mk_place){0, (mk_operation)all[0].operation, all[0].layer, all[0].workspace},
                                 (mk_place){r, (mk_operation)all[r].operation, all[r].layer, all[r].workspace});
        }
    for (int32_t r = 0; r < w->dims.num_ranks; r++)
        if (all[r].failed) {
            w->broken = true;
            return mk_fail((mok_status)all[r].failed, "rank %d: %.480s", r, all[r].sentence);
        }
    for (int32_t r = 0; r < w->dims.num_ranks; r++)
        *skip |= all[r].refused || one_barrier(all[r].operation) != one_barrier(all[0].operation);
    return MOK_OK;
}

mok_status mk_cuda_meet(mok_workspace *w, mk_cu_stream stream, mk_operation operation, uint64_t layer, mok_status status, bool refused, bool *skip)
{
    mk_cuda_state *s = w->state;
    mk_cu_event event = s->meeting[s->meetings++ & 1];
    mk_cuda_arrival mine;
    memset(&mine, 0, sizeof mine);
    mk_cu_result result = status == MOK_OK ? s->api->cuEventRecord(event, stream) : MK_CU_SUCCESS;
    if (result != MK_CU_SUCCESS)
        status = mk_cuda_fail(result, "recording the event of barrier %llu of rank %d", (unsigned long long)s->meetings, w->dims.rank);
    mine.event = event;
    mine.operation = (int32_t)operation;
    mine.layer = layer;
    mine.workspace = w->number;
    mine.refused = refused;
    mine.failed = (int32_t)status;
    if (status != MOK_OK)
        snprintf(mine.sentence, sizeof mine.sentence, "%s", mok_last_error());
    /* A rank whose driver has failed comes all the same, so that nobody waits for it. */
    mok_status met = w->group->transport->all_gather(w->group, &mine, s->arrivals, sizeof mine, w->config.timeout_ms);
    if (met != MOK_OK) {
        w->broken = true;
        return met;
    }
    MK_TRY(judge(w, s->arrivals, skip));
    for (int32_t r = 0; r < w->dims.num_ranks; r++)
        if (r != w->dims.rank)
            MK_CUDA_TRY(s->api->cuStreamWaitEvent(stream, s->arrivals[r].event, 0), "rank %d waiting for rank %d's event", w->dims.rank, r);
    return MOK_OK;
}
