/* Giving SMs back while a pass runs: what a cluster asks before it draws another task.
 *
 * Other streams' kernels of higher priority (a framework's NCCL, say) get an SM only when a cluster leaves. So a pass is launched with more
 * clusters than fit. When one leaves, the hardware starts what has the highest priority: somebody else's CTAs, if there are any, or else one of ours, which
 * goes on with the walk. The tasks come from the ticket in any case, so who comes and who leaves changes no bit.
 *
 * A cluster may leave only if another of the grid is left to come after it; so when the last has come, all stay, and all tasks are done.
 *
 * Nor does the last one of those present leave: rows that a leaving cluster still moves may wait for tasks that nobody has drawn yet (a slot of the
 * ring is free when they are done), and it is not gone before it has moved them. So one cluster always goes on drawing tasks, and rows.
 *
 * A cluster that leaves draws no more rows from the moment when it draws no more tasks: it still has a few tasks to do, while its last batch of rows
 * arrives. What rows those tasks want is moved by whoever is present. */
#ifndef MK_STAGE_YIELD_CUH
#define MK_STAGE_YIELD_CUH

#include "cuda/stage/stage.cuh"
#include "cuda/sync/wait.cuh"

namespace mk {

struct YieldShared {
#ifdef MK_SM100
    Vec4 answer;
    uint64_t answered;  /* one arrival and 16 bytes */
#endif
    uint64_t leaving;   /* one arrival: the cluster draws nothing more, because it leaves. In each CTA, for its dispatch warp */
};

/* By one thread, before anybody uses them; then a cluster barrier. */
MK_DEVICE void yield_init(YieldShared &s)
{
#ifdef MK_SM100
    mbar_init(smem_addr(&s.answered), 1);
#endif
    mbar_init(smem_addr(&s.leaving), 1);
}

/* This cluster is no longer there to draw tasks, if another one is. */
MK_DEVICE bool yield_to_another(uint32_t *tickets)
{
    if (ticket_take_relaxed_gpu(&tickets[MK_YIELD_PRESENT], ~0u) >= 2)
        return true;
    ticket_take_relaxed_gpu(&tickets[MK_YIELD_PRESENT], 1);
    return false;
}

/* Of both CTAs: their dispatch warps draw no more rows. */
MK_DEVICE void yield_tell_dispatch(YieldShared &s)
{
    for (uint32_t rank = 0; rank < 2; rank++)
        mbar_arrive_remote_release_cta(cluster_addr(smem_addr(&s.leaving), rank));
}

#ifdef MK_SM100
/* Blackwell: every so many tasks a cluster asks Cluster Launch Control to cancel one that has not started. Granted: it goes on, as if it were that
 * cluster. Refused: somebody wants the SM, or nobody is left; it leaves if somebody will come after it, and else stays to the end.
 *
 * Somebody will come, as long as fewer clusters are counted than the grid has. A cluster is counted by itself when it starts, or by the one that
 * cancelled it, who goes on. Asked is one task ahead, so that the answer is there in time; never again after a refusal. Of one thread of the cluster. */
struct Yield {
    YieldShared &s;
    uint32_t *tickets;          /* of the device state */
    const mk_yield_params &how; /* of Hopper */
    uint32_t every = 0;         /* tasks for one permission */
    uint32_t allowed = 0;       /* of them, still to draw */
    uint32_t parity = 0;
    bool stays = false, asked = false;

    MK_MEMBER void begin(uint32_t num_tasks)
    {
        every = (num_tasks + num_clusters() - 1) / num_clusters();
        every = every < 2 ? 2 : every;
        allowed = every;
        ticket_take_relaxed_gpu(&tickets[MK_YIELD_COUNTED], 1);
        ticket_take_relaxed_gpu(&tickets[MK_YIELD_PRESENT], 1);
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
        return flag_load_relaxed_gpu(&tickets[MK_YIELD_COUNTED]) < num_clusters() && yield_to_another(tickets);
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
            ticket_take_relaxed_gpu(&tickets[MK_YIELD_COUNTED], 1);
            allowed = every - 1;
            return true;
        }
        stays = !may_leave();
        if (!stays) {
            counter_add_relaxed_gpu(&tickets[MK_YIELD_LEFT], 1u);
            yield_tell_dispatch(s);
        }
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
#else
/* Hopper: by the clock, since nobody can be asked. The grid is what is resident at once and spare clusters; one cluster leaves every `interval_ns` from the start of the
 * pass on: the first to draw a task when it is time. So the SMs come free one pair after the other; after a pause in which nobody drew, those whose time it was leave together.
 * A fixed turn for each cluster would not do: clusters that work in step end their tasks together, those that come after them start together, and so they would leave together.
 *
 * As many leave as there are spare clusters, and none when few tasks are left. Of one thread of the cluster. */
struct Yield {
    YieldShared &s;
    uint32_t *tickets;          /* of the device state */
    const mk_yield_params &how;
    bool begun = false, stays = false, leaves = false;
    uint32_t last = 0;          /* task drawn */
    uint32_t start = 0;         /* of the pass, as far as known; 0: not yet */
    uint32_t left = 0;          /* clusters, when last looked at */

    /* Nobody leaves at the very beginning, when all wait for their first rows. */
    enum { QUIET_INTERVALS = 8, LAST_TASKS = 4 };

    /* In 1,024 ns, never 0. Only differences count, and they fit. */
    static MK_MEMBER uint32_t now()
    {
        const uint32_t time = (uint32_t)(time_ns() >> 10);
        return time ? time : 1;
    }

    MK_MEMBER void begin()
    {
        begun = true;
        stays = how.interval_ns == 0;
        if (stays)
            return;
        if (cluster_idx() == 0)
            flag_store_relaxed_gpu(&tickets[MK_YIELD_BEGIN], now());
        counter_add_relaxed_gpu(&tickets[MK_YIELD_PRESENT], 1u);
    }

    /* Is it time for one more to leave than these? */
    MK_MEMBER bool is_time(uint32_t others) const
    {
        const int32_t since = (int32_t)(now() - start); /* clocks of SMs may differ a little */
        return since > 0 && (uint64_t)since << 10 >= (uint64_t)how.interval_ns * (QUIET_INTERVALS + others);
    }

    /* It is this one's turn, a spare cluster comes after it, and one is present to go on. Memory is read only when time is up by what is known: tasks can be short.
     * Many may take a number at the same time, which tells whose turn it is. */
    MK_MEMBER bool may_leave()
    {
        if (!start)
            start = flag_load_relaxed_gpu(&tickets[MK_YIELD_BEGIN]);
        if (!start || !is_time(left))
            return false;
        left = flag_load_relaxed_gpu(&tickets[MK_YIELD_LEFT]);
        if (!is_time(left))
            return false;
        left = ticket_take_relaxed_gpu(&tickets[MK_YIELD_LEFT], 1);
        if (left < num_clusters() - how.num_resident && is_time(left) && yield_to_another(tickets))
            return true;
        ticket_take_relaxed_gpu(&tickets[MK_YIELD_LEFT], ~0u);
        stays = left >= num_clusters() - how.num_resident; /* nobody comes any more */
        return false;
    }

    /* The number of the cluster's next task of num_tasks; past them all if there are no more, or, from then on, if it is to leave. */
    MK_MEMBER uint32_t next(uint32_t num_tasks)
    {
        const bool comes = !begun; /* and draws a task before it thinks of leaving */
        if (comes)
            begin();
        stays = stays || last + LAST_TASKS * how.num_resident >= num_tasks;
        if (!comes && !stays && !leaves && may_leave()) {
            leaves = true;
            yield_tell_dispatch(s);
        }
        if (leaves)
            return kNoMoreTasks;
        return last = ticket_take_relaxed_gpu(&tickets[0], 1);
    }
};
#endif

} /* namespace mk */
#endif
