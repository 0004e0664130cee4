/* Giving SMs back while a pass runs: what a cluster asks before it draws another task.
 *
 * Other streams' kernels of higher priority (a framework's NCCL, say) get an SM only when a cluster leaves. So a pass is launched with more
 * clusters than fit, and every so many tasks a cluster asks Cluster Launch Control to cancel one that has not started. Granted: it goes
 * on, as if it were that cluster. Refused: somebody wants the SM, or nobody is left; it leaves if somebody will come after it,
 * and else stays to the end. The tasks come from the ticket in any case, so who comes and who leaves changes no bit.
 *
 * Somebody will come, as long as fewer clusters are counted than the grid has. A cluster is counted by itself when it starts, or by the one that
 * cancelled it, who goes on. Whoever counts the last one therefore stays, and all tasks are done. Asked is one task ahead,
 * so that the answer is there in time; never again after a refusal. */
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

/* Of one thread of the cluster. */
struct Yield {
    YieldShared &s;
    uint32_t *counted, *left;   /* of the device state: clusters started or cancelled, and those that have left */
    uint32_t every = 0;         /* tasks for one permission */
    uint32_t allowed = 0;       /* of them, still to draw */
    uint32_t parity = 0;
    bool stays = false, asked = false;

    MK_MEMBER void begin(uint32_t num_tasks)
    {
        every = (num_tasks + num_clusters() - 1) / num_clusters();
        every = every < 2 ? 2 : every;
        allowed = every;
        ticket_take_relaxed_gpu(counted, 1);
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
            ticket_take_relaxed_gpu(counted, 1);
            allowed = every - 1;
            return true;
        }
        if (flag_load_relaxed_gpu(counted) >= num_clusters()) {
            stays = true;
            return true;
        }
        counter_add_relaxed_gpu(left, 1);
        return false;
    }

    /* There are no more tasks: nobody leaves while an answer may still come. */
    MK_MEMBER void finish()
    {
        if (asked)
            granted();
    }
};

} /* namespace mk */
#endif
