/* Cluster Launch Control: a cluster asks to be given one that has not started. Granted or refused late, in any order, as the seed says: also refused
 * while clusters wait, which then start when somebody leaves. */
#include "emu/machine.h"

#include <algorithm>

namespace emu {

static constexpr uint32_t kGranted = 0x6b0c1e01, kRefused = 0x6b0c1e02;  /* opaque to programs: asked only through the queries */

struct LaunchAnswer : AsyncOp {
    std::vector<Cta *> ctas;
    DeviceState *device = nullptr;
    uint32_t offset = 0;
    std::vector<Mbarrier *> bars;
    mk::Vec4 answer = {};
    bool decided = false;

    void decide()
    {
        QueuedLaunch &q = device->queue.front();
        const bool refused = q.waiting.empty() || (device->refusals && machine->random.below(device->refusals) == 0);
        answer = {refused ? kRefused : kGranted, 0, machine->random.below(1u << 30), 0};
        if (!refused) {
            const uint32_t pick = machine->random.below((uint32_t)q.waiting.size());
            answer.y = q.waiting[pick] * q.shape.cluster;
            q.waiting.erase(q.waiting.begin() + (long)pick);
        }
        decided = true;
    }

    bool advance() override
    {
        if (!decided) {
            decide();
            return false;
        }
        for (size_t r = 0; r < ctas.size(); r++) {
            Cta &cta = *ctas[r];
            Granule &g = cta.granules[offset / 16];
            memcpy(cta.shared + offset, &answer, 16);
            g.written = 0xffff;
            g.async_writes--;
            g.stamp = 0;
            std::fill_n(cta.write_epoch.begin() + offset, 16, make_epoch(cta.number, bars[r]->member, (uint32_t)bars[r]->phase + 1));
            mbarrier_complete_tx(*bars[r], 16);
        }
        return true;
    }
};

static void ask(const char *what, uint32_t answer, uint32_t bar, bool all)
{
    step();
    Cluster &cluster = *self->cta->cluster;
    const Place to = resolve(answer, 16, what), at = resolve(bar, 8, what);
    if (to.cta != self->cta || at.cta != self->cta || to.offset % 16)
        fail("%s: the answer's place and its mbarrier are given as addresses of this CTA, the first a multiple of 16", what);
    if (cluster.launch_refused)
        fail("%s after a refusal has been seen: undefined", what);
    auto op = std::make_shared<LaunchAnswer>();
    op->device = self->cta->device;
    op->offset = to.offset;
    for (auto &cta : cluster.ctas) {
        if (!all && cta.get() != self->cta)
            continue;
        if (cta->gone)
            fail("%s: block %u of the cluster has ended", what, cta->block);
        op->ctas.push_back(cta.get());
        op->bars.push_back(&mbarrier_at({cta.get(), at.offset}, what));
        begin_async_write(*cta, to.offset, what);
    }
    submit(op);
}

} /* namespace emu */

namespace mk {
using namespace emu;

void launch_try_cancel(uint32_t answer, uint32_t bar) { ask("launch_try_cancel", answer, bar, false); }
void launch_try_cancel_multicast(uint32_t answer, uint32_t bar) { ask("launch_try_cancel_multicast", answer, bar, true); }

bool launch_was_cancelled(Vec4 answer)
{
    if (answer.x != kGranted && answer.x != kRefused)
        fail("launch_was_cancelled of something that is no answer of launch control");
    if (answer.x == kRefused)
        self->cta->cluster->launch_refused = true;
    return answer.x == kGranted;
}

uint32_t launch_cancelled_block(Vec4 answer)
{
    if (answer.x != kGranted)
        fail("launch_cancelled_block of a refusal: undefined");
    return answer.y;
}

void fence_proxy_async_acquire_cluster() { step(); self->shared_fence = machine->stamp++; }
void fence_proxy_async_release_cluster() { step(); self->shared_fence = machine->stamp++; }

} /* namespace mk */
