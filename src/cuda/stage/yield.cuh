/* Giving SMs back while a pass runs: what a cluster asks before it draws another task.
 *
 * Other streams' kernels of higher priority (a framework's NCCL, say) get an SM only when a cluster leaves. So a pass is launched with more
 * clusters than fit, and every so many tasks a cluster asks Cluster Launch Control to cancel one that has not started. Granted: it goes
 * on, as if it were that cluster. Refused: somebody wants the SM, or nobody is left; it leaves if somebody will come after it,
 * and else stays to the end. The tasks come from the ticket in any case, so who comes and who leaves changes no bit.
 *
 * Somebody will come, as long as fewer clusters are counted than the grid has. A cluster is counted by itself when it starts, or by the one that
 * cancelled it, who goes on. Whoever counts the last one therefore stays, and all tasks are done. Asked is one task ahead,
 * so that the answer is there in time; never again after a refusal.
 *
 * Nor does the last one of those present leave: rows that a leaving cluster still moves may wait for tasks that nobody has drawn yet (a slot of the
 * ring is free when they are done), and it is not gone before it has moved them. So one cluster always goes on drawing tasks. */
#ifndef MK_STAGE_YIELD_CUH
#define MK_STAGE_YIELD_CUH

#include "cuda/stage/stage.cuh"
#include "cuda/sync/wait.cuh"

namespace mk {

struct YieldShared {
    Vec4 answer;
    uint64_t answered;  /* one arrival and 16 bytes */
    uint64_t finished;  /* the CTA's math warps: all tasks that the cluster has drawn are done */
};

/* By one thread, before anybody uses them; then a cluster barrier. */
MK_DEVICE void yield_init(YieldShared &s)
{
    mbar_init(smem_addr(&s.answered), 1);
    mbar_init(smem_addr(&s.finished), kMathWarps);
}

/* By every math warp when it has seen its last task. Rows that only other clusters' tasks need are theirs to move, so a cluster that leaves
 * need not move more: a dispatch warp draws none once this is complete. */
MK_DEVICE void yield_finished(YieldShared &s)
{
    sync_warp();
    if (lane_idx() == 0)
        mbar_arrive_release_cta(smem_addr(&s.finished));
}

/* Of one thread of the cluster. */
struct Yield {
    YieldShared &s;
    uint32_t *tickets;          /* of the device state; [COUNTED]: clusters started or cancelled, [LEFT]: that have left, [PRESENT]: started and not leaving */
    uint32_t every = 0;         /* tasks for one permission */
    uint32_t allowed = 0;       /* of them, still to draw */
    uint32_t parity = 0;
    bool stays = false, asked = false;
    enum { COUNTED = 2, LEFT = 3, PRESENT = 5 };

    MK_MEMBER void begin(uint32_t num_tasks)
    {
        every = (num_tasks + num_clusters() - 1) / num_clusters();
        every = every < 2 ? 2 : every;
        allowed = every;
        ticket_take_relaxed_gpu(&tickets[COUNTED], 1);
        ticket_take_relaxed_gpu(&tickets[PRESENT], 1);
    }

    MK_MEMBER void ask()
    {
        mbar_arrive_expect_tx_release_cta(smem_addr(&s.answered), 16);
        fence_proxy_async_shared_cta(); /* the last answer has been read */
        launch_try_cancel(smem_addr(&s.answer), smem_addr(&s.answered));
        asked = true;
    }

    MK_MEMBER bool granted()
    {
        wait_mbar(smem_addr(&s.answered), parity, "yield: answer of launch control");
        parity ^= 1;
        asked = false;
        return launch_was_cancelled(load_shared_b128(smem_addr(&s.answer)));
    }

    /* After a refusal: will another cluster come, and is one there to go on? */
    MK_MEMBER bool may_leave() const
    {
        if (flag_load_relaxed_gpu(&tickets[COUNTED]) >= num_clusters())
            return false;
        if (ticket_take_relaxed_gpu(&tickets[PRESENT], ~0u) >= 2)
            return true;
        ticket_take_relaxed_gpu(&tickets[PRESENT], 1);
        return false;
    }

    /* Before a task is drawn: false if the cluster is to leave. */
    MK_MEMBER bool go_on()
    {
        if (stays)
            return true;
        if (allowed > 0) {
            if (--allowed == 0)
                ask();
            return true;
        }
        if (granted()) {
            ticket_take_relaxed_gpu(&tickets[COUNTED], 1);
            allowed = every - 1;
            return true;
        }
        stays = !may_leave();
        if (!stays)
            counter_add_relaxed_gpu(&tickets[LEFT], 1u);
        return stays;
    }

    /* The number of the cluster's next task of num_tasks; past them all if there are no more, or if it is to leave. */
    MK_MEMBER uint32_t next(uint32_t num_tasks)
    {
        if (every == 0)
            begin(num_tasks);
        if (!go_on())
            return kNoMoreTasks;
        const uint32_t number = ticket_take_relaxed_gpu(&tickets[0], 1);
        if (number >= num_tasks && asked) /* nobody ends while an answer may still come */
            granted();
        return number;
    }
};

} /* namespace mk */
#endif
