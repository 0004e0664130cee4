#include "emu/machine.h"

#include <algorithm>
#include <stdio.h>

namespace emu {

static uint32_t cta_of(Epoch e) { return (uint32_t)(e >> 40); }
static uint32_t member_of(Epoch e) { return (uint32_t)(e >> 28) & 0xfff; }
static uint32_t count_of(Epoch e) { return (uint32_t)e & 0xfffffff; }

bool Clock::has_ended(uint32_t cta) const
{
    const CtaRecord &r = machine->cta_records[cta];
    return r.device < ended_.size() && r.launch <= ended_[r.device];
}

bool Clock::knows(Epoch e) const
{
    if (e == 0)
        return true;
    if (e == kUnobserved)
        return false;
    const uint32_t cta = cta_of(e), member = member_of(e);
    if (has_ended(cta))
        return true;
    auto at = std::lower_bound(ctas_.begin(), ctas_.end(), cta, [](const Entry &x, uint32_t c) { return x.cta < c; });
    return at != ctas_.end() && at->cta == cta && member < at->counts->size() && (*at->counts)[member] >= count_of(e);
}

void Clock::add(Epoch e)
{
    const uint32_t cta = cta_of(e), member = member_of(e);
    auto at = std::lower_bound(ctas_.begin(), ctas_.end(), cta, [](const Entry &x, uint32_t c) { return x.cta < c; });
    if (at == ctas_.end() || at->cta != cta)
        at = ctas_.insert(at, {cta, std::make_shared<Counts>(), nullptr});
    else if (member < at->counts->size() && (*at->counts)[member] >= count_of(e))
        return;
    if (at->counts.use_count() > 1) {
        at->covers = at->counts;
        at->counts = std::make_shared<Counts>(*at->counts);
    }
    if (at->counts->size() <= member)
        at->counts->resize(member + 1, 0);
    (*at->counts)[member] = count_of(e);
}

typedef std::shared_ptr<std::vector<uint32_t>> SharedCounts;

/* The larger of both, sharing one of them where it is the larger everywhere. */
static SharedCounts larger(const SharedCounts &a, const SharedCounts &b)
{
    const size_t both = std::min(a->size(), b->size());
    const uint32_t *x = a->data(), *y = b->data();
    uint32_t a_more = a->size() > both, b_more = b->size() > both;
    for (size_t i = 0; i < both; i++) {
        a_more |= x[i] > y[i];
        b_more |= y[i] > x[i];
    }
    if (!b_more)
        return a;
    if (!a_more)
        return b;
    auto sum = std::make_shared<std::vector<uint32_t>>(a->size() > b->size() ? *a : *b);
    for (size_t i = 0; i < both; i++)
        (*sum)[i] = std::max(x[i], y[i]);
    return sum;
}

/* Vectors that several hold never change, so what was once found out about two of them stays true: a thread joins what it joined at the last
 * barrier, and the lanes of a warp join the same one after the other. */
void Clock::take(Entry &mine, const Entry &other)
{
    struct Found { SharedCounts a, b, both; };
    static Found memory[64];
    if (mine.counts == other.counts || mine.covers == other.counts)
        return;
    const bool shared = mine.counts.use_count() > 1;
    Found &known = memory[((uintptr_t)mine.counts.get() ^ (uintptr_t)other.counts.get() >> 3) / 16 % 64];
    if (shared && known.a == mine.counts && known.b == other.counts) {
        mine.counts = known.both;
        mine.covers = other.counts;
        return;
    }
    SharedCounts both = larger(mine.counts, other.counts);
    if (shared)
        known = {mine.counts, other.counts, both};
    mine.covers = both == other.counts ? nullptr : other.counts;
    mine.counts = std::move(both);
}

void Clock::join(const Clock &other)
{
    bool shrink = false;
    if (ended_.size() < other.ended_.size())
        ended_.resize(other.ended_.size(), 0);
    for (size_t d = 0; d < other.ended_.size(); d++) {
        shrink |= other.ended_[d] > ended_[d];
        ended_[d] = std::max(ended_[d], other.ended_[d]);
    }
    size_t at = 0;
    for (const Entry &o : other.ctas_) {
        while (at < ctas_.size() && ctas_[at].cta < o.cta)
            at++;
        if (at == ctas_.size() || ctas_[at].cta != o.cta) {
            if (!has_ended(o.cta))
                ctas_.insert(ctas_.begin() + (long)at, {o.cta, o.counts, nullptr});
        } else {
            take(ctas_[at], o);
        }
    }
    if (shrink)
        ctas_.erase(std::remove_if(ctas_.begin(), ctas_.end(), [&](const Entry &x) { return has_ended(x.cta); }), ctas_.end());
}

void Clock::launch_ended(uint32_t device, uint32_t launch)
{
    Clock end;
    end.ended_.assign(device + 1, 0);
    end.ended_[device] = launch;
    join(end);
}

std::string describe_epoch(Epoch e)
{
    char text[160];
    if (e == kUnobserved)
        return "a store that its thread has not waited for or fenced";
    const CtaRecord &r = machine->cta_records[cta_of(e)];
    const uint32_t member = member_of(e);
    if (member >= kMemberMbarrier)
        snprintf(text, sizeof text, "a copy that completes on mbarrier %u of device %u, block %u, in its phase %u", member - kMemberMbarrier, r.device,
                 r.block, count_of(e) - 1);
    else
        snprintf(text, sizeof text, "device %u, block %u, warp %u, lane %u", r.device, r.block, member / 32, member % 32);
    return text;
}

/* ---- threads ---- */

Epoch Thread::now() const { return make_epoch(cta->number, idx, count); }

void release_into(Clock &clock)
{
    clock.join(self->clock);
    clock.add(self->now());
    self->count++;
}

void acquire_from(const Clock &clock) { self->clock.join(clock); }

bool is_own(Epoch e) { return e != 0 && e != kUnobserved && cta_of(e) == self->cta->number && member_of(e) == self->idx; }

bool known_to_self(Epoch e) { return e == 0 || is_own(e) || self->clock.knows(e); }

void note_read(Reads &reads, Epoch e, uint32_t bytes)
{
    constexpr size_t kept = 40;
    for (Reads::Read &r : reads.list)
        if (r.by == e || ((r.bytes & ~bytes) == 0 && known_to_self(r.by))) {
            r = {e, r.by == e ? r.bytes | bytes : bytes};
            return;
        }
    if (reads.list.size() < kept)
        reads.list.push_back({e, bytes});
    else
        reads.list[machine->random.below(kept)] = {e, bytes};
}

Epoch unknown_read(Reads &reads, uint32_t bytes)
{
    size_t left = 0;
    for (Reads::Read &r : reads.list) {
        if (r.bytes & bytes && !known_to_self(r.by))
            return r.by;
        r.bytes &= ~bytes;
        if (r.bytes)
            reads.list[left++] = r;
    }
    reads.list.resize(left);
    return 0;
}

} /* namespace emu */
