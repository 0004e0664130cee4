/* Every wait of device code. A wait has a name, which says what is missing when it never ends; the emulator prints it.
 * Waits inside a CTA or cluster are for work that other warps are bound to finish, because the waits for other CTAs and ranks are bounded; they
 * need no limit of their own. */
#ifndef MK_SYNC_WAIT_CUH
#define MK_SYNC_WAIT_CUH

#include "cuda/arch/arch.cuh"

namespace mk {

/* A phase of one of the CTA's own mbarriers, whose arrivals come from this CTA or from async copies. */
MK_DEVICE void wait_mbar(uint32_t bar, uint32_t parity, const char *what)
{
    note_wait(what);
    while (!mbar_try_wait_parity_acquire_cta(bar, parity)) {
    }
}

/* The same where another CTA of the cluster wrote data and arrived. */
MK_DEVICE void wait_mbar_cluster(uint32_t bar, uint32_t parity, const char *what)
{
    note_wait(what);
    while (!mbar_try_wait_parity_acquire_cluster(bar, parity)) {
    }
}

/* A counter in this GPU's memory; pairs with flag_add_release_gpu of whoever counts. What was published may then be read by
 * plain loads; before a TMA or bulk load of it, fence_proxy_async_global in the thread that issues the load. Bounded: returns what was seen last,
 * which is less than wanted if the time ran out or if somebody else has set *given_up; both are looked at once in so many polls,
 * so a wait that does not last costs nothing more. */
constexpr uint32_t kPollsBetweenLooks = 256;
#ifdef MK_UNBOUNDED_WAITS
constexpr bool kWaitsAreBounded = false; /* only to measure what the bound costs (bench/waits.py): whatever goes wrong, the kernel stays */
#else
constexpr bool kWaitsAreBounded = true;
#endif

MK_DEVICE uint32_t wait_flag_at_least_gpu(const uint32_t *flag, uint32_t wanted, const uint32_t *given_up, uint64_t timeout_ns, const char *what)
{
    uint64_t start = 0; /* as of the first look */
    uint32_t seen;
    note_wait(what);
    for (uint32_t polls = 1; (int32_t)((seen = flag_load_acquire_gpu(flag)) - wanted) < 0; polls++) {
        if (kWaitsAreBounded && polls % kPollsBetweenLooks == 0) {
            const uint64_t now = time_ns();
            start = start ? start : now;
            if (flag_load_relaxed_gpu(given_up) != 0 || now - start >= timeout_ns)
                break;
        }
        sleep_ns(32);
        note_wait(what);
    }
    return seen;
}

/* Another rank's epoch in this rank's own heap; pairs with the release in rank_barrier there. Bounded: returns what was seen last, which is
 * less than wanted if the time ran out. */
MK_DEVICE uint64_t wait_epoch_sys(const uint64_t *word, uint64_t wanted, uint64_t timeout_ns, const char *what)
{
    note_wait(what);
    const uint64_t start = kWaitsAreBounded ? time_ns() : 0;
    uint64_t seen;
    while ((seen = flag_load_acquire_sys(word)) < wanted && (!kWaitsAreBounded || time_ns() - start < timeout_ns)) {
        sleep_ns(64);
        note_wait(what);
    }
    return seen;
}

} /* namespace mk */
#endif
