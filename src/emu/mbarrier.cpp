/* mbarriers: arrivals and bytes, phases, and the rules for publishing and using them.
 *
 * A remote arrive with release semantics at CTA scope is taken to order the arriving CTA's accesses for everybody in the cluster:
 * more than the manual promises, and what every fast GEMM relies on (its readers are ordered by completed MMAs and loads). */
#include "emu/machine.h"

namespace emu {

static constexpr int64_t kMaxTx = (1 << 20) - 1;

Mbarrier &mbarrier_at(const Place &place, const char *what)
{
    const int32_t index = place.offset % 8 ? -1 : place.cta->mbarrier_at[place.offset / 8];
    if (index < 0)
        fail("%s: no mbarrier was initialised at shared offset %u of block %u", what, place.offset, place.cta->block);
    Mbarrier &bar = place.cta->mbarriers[(size_t)index];
    if (!bar.published && bar.init_by != self)
        fail("%s: the thread that initialised the mbarrier at shared offset %u has not published it with fence_mbar_init", what, place.offset);
    if (!known_to_self(bar.init_epoch))
        fail("%s: not ordered after the initialisation of the mbarrier at shared offset %u of block %u", what, place.offset, place.cta->block);
    return bar;
}

void publish_mbarriers()
{
    for (Mbarrier &bar : self->cta->mbarriers)
        if (bar.init_by == self)
            bar.published = true;
}

static void maybe_complete(Mbarrier &bar)
{
    if (bar.pending || bar.tx)
        return;
    bar.phase++;
    bar.pending = bar.count;
    bar.completed = bar.arriving;
    bar.completed.add(make_epoch(bar.cta->number, bar.member, (uint32_t)bar.phase));
    bar.arriving.clear();
    wake(bar.waiters);
}

static void arrive(Mbarrier &bar)
{
    if (bar.pending == 0)
        fail("mbarrier at shared offset %u: more than its %u arrivals in one phase", bar.address, bar.count);
    bar.pending--;
    release_into(bar.arriving);
    maybe_complete(bar);
}

void mbarrier_arrive_async(Mbarrier &bar, const Clock &known)
{
    if (bar.pending == 0)
        fail("mbarrier at shared offset %u: more than its %u arrivals in one phase", bar.address, bar.count);
    bar.pending--;
    bar.arriving.join(known);
    maybe_complete(bar);
}

static void expect_tx(Mbarrier &bar, uint32_t bytes)
{
    bar.tx += bytes;
    if (bar.tx > kMaxTx)
        fail("mbarrier at shared offset %u expects %lld bytes, more than %lld", bar.address, (long long)bar.tx, (long long)kMaxTx);
}

void mbarrier_complete_tx(Mbarrier &bar, uint32_t bytes)
{
    bar.tx -= bytes;
    if (bar.tx < -kMaxTx)
        fail("mbarrier at shared offset %u received %lld bytes that nobody expected", bar.address, (long long)-bar.tx);
    maybe_complete(bar);
}

static bool phase_completed(Thread &t) { return (static_cast<Mbarrier *>(t.wait_object)->phase & 1) != t.wait_value; }

static bool try_wait(uint32_t address, uint32_t parity)
{
    step();
    Mbarrier &bar = mbarrier_at(resolve(address, 8, "mbarrier try_wait"), "mbarrier try_wait");
    if ((address >> kClusterShift) != 0)
        fail("mbarrier try_wait on a cluster address: only the CTA's own barriers can be waited for");
    if (parity > 1)
        fail("mbarrier try_wait with parity %u", parity);
    if (machine->random.below(64) == 0) {  /* the instruction may give up early */
        yield();
        return false;
    }
    const bool gave_up = block(bar.waiters, phase_completed, "mbarrier", &bar, parity, machine->let_time_pass);
    if (!gave_up)
        acquire_from(bar.completed);
    return !gave_up;
}

static void arrive_at(uint32_t address, const char *what)
{
    step();
    arrive(mbarrier_at(resolve(address, 8, what), what));
}

static void arrive_expect_tx_at(uint32_t address, uint32_t bytes, const char *what)
{
    step();
    Mbarrier &bar = mbarrier_at(resolve(address, 8, what), what);
    expect_tx(bar, bytes);
    arrive(bar);
}

} /* namespace emu */

namespace mk {
using namespace emu;

void mbar_init(uint32_t address, uint32_t count)
{
    step();
    const Place place = resolve(address, 8, "mbar_init");
    if (place.cta != self->cta || place.offset % 8 || count == 0 || count >= 1u << 20)
        fail("mbar_init at %08x with count %u", address, count);
    if (place.cta->mbarrier_at[place.offset / 8] >= 0)
        fail("mbar_init: there is already an mbarrier at shared offset %u", place.offset);
    place.cta->mbarrier_at[place.offset / 8] = (int32_t)place.cta->mbarriers.size();
    place.cta->mbarriers.emplace_back();
    Mbarrier &bar = place.cta->mbarriers.back();
    bar.address = place.offset;
    bar.count = bar.pending = count;
    bar.init_by = self;
    bar.init_epoch = self->now();
    bar.cta = self->cta;
    bar.member = kMemberMbarrier + (uint32_t)self->cta->mbarriers.size() - 1;
}

void fence_mbar_init_release_cluster()
{
    step();
    publish_mbarriers();
}

void mbar_arrive_release_cta(uint32_t bar) { arrive_at(bar, "mbar_arrive"); }
void mbar_arrive_remote_release_cta(uint32_t bar) { arrive_at(bar, "mbar_arrive_remote"); }
void mbar_arrive_remote_release_cluster(uint32_t bar) { arrive_at(bar, "mbar_arrive_remote"); }
void mbar_arrive_expect_tx_release_cta(uint32_t bar, uint32_t bytes) { arrive_expect_tx_at(bar, bytes, "mbar_arrive_expect_tx"); }
void mbar_arrive_expect_tx_remote_release_cluster(uint32_t bar, uint32_t bytes) { arrive_expect_tx_at(bar, bytes, "mbar_arrive_expect_tx_remote"); }
bool mbar_try_wait_parity_acquire_cta(uint32_t bar, uint32_t parity) { return try_wait(bar, parity); }
bool mbar_test_parity_acquire_cta(uint32_t bar, uint32_t parity)
{
    step();
    Mbarrier &b = mbarrier_at(resolve(bar, 8, "mbarrier test_wait"), "mbarrier test_wait");
    if ((b.phase & 1) == parity)
        return false;
    acquire_from(b.completed);
    return true;
}
bool mbar_try_wait_parity_acquire_cluster(uint32_t bar, uint32_t parity) { return try_wait(bar, parity); }

} /* namespace mk */
