/* What the emulator says about a deadlock, and about threads and CTAs that leave too early. */
#include "emu/machine.h"

#include <stdio.h>

namespace emu {

/* One line for one waiting thread, its identity left out. */
static std::string describe_wait(const Thread &t)
{
    char text[300];
    std::string line = t.note ? std::string("\"") + t.note + "\": " : "";
    if (!strcmp(t.waits_for, "mbarrier")) {
        const Mbarrier &bar = *static_cast<Mbarrier *>(t.wait_object);
        snprintf(text, sizeof text, "mbarrier at shared offset %u, parity %llu; %llu phases completed, %u of %u arrivals and %lld bytes missing",
                 bar.address, (unsigned long long)t.wait_value, (unsigned long long)bar.phase, bar.pending, bar.count, (long long)bar.tx);
    } else if (!strcmp(t.waits_for, "named barrier")) {
        const NamedBarrier &bar = *static_cast<NamedBarrier *>(t.wait_object);
        snprintf(text, sizeof text, "named barrier %d, %u of %u threads there", (int)(&bar - t.cta->named), bar.arrived, bar.expected);
    } else if (!strcmp(t.waits_for, "global memory")) {
        const Allocation *a = find_allocation(t.wait_object, 4);
        snprintf(text, sizeof text, "polls %s+%lld, which stays %llu", a ? a->name.c_str() : "?",
                 a ? (long long)(static_cast<uint8_t *>(t.wait_object) - a->base) : 0, (unsigned long long)t.wait_value);
    } else if (!strcmp(t.waits_for, "warp")) {
        const Warp &warp = *static_cast<Warp *>(t.wait_object);
        snprintf(text, sizeof text, "the other lanes in %s; lanes there: %08x", warp.instruction, warp.arrived);
    } else {
        snprintf(text, sizeof text, "%s", t.waits_for);
    }
    return line + text;
}

std::string deadlock_report()
{
    std::string report = "deadlock: nobody can go on";
    int lines = 0;
    for (auto &device : machine->devices)
        for (auto &cluster : device->resident)
            for (auto &cta : cluster->ctas) {
                std::string last;
                uint32_t last_warp = ~0u;
                for (Thread &t : cta->threads) {
                    if (t.doing != Doing::blocked)
                        continue;
                    std::string line = describe_wait(t);
                    if (t.warp() == last_warp && line == last)
                        continue;
                    last = line;
                    last_warp = t.warp();
                    if (++lines <= 24)
                        report += "\n  " + describe(t) + " waits for " + line;
                }
            }
    if (lines > 24)
        report += "\n  and others";
    return report;
}

void thread_exit_checks(Thread &t)
{
    if (!t.copies.empty())
        fail("a thread ends with %zu copy_async that it has not waited for", t.copies.size());
    if (!t.open_stores.empty())
        fail("a thread ends with %zu bulk stores that it never committed", t.open_stores.size());
    if (!t.groups.empty())
        fail("a thread ends without waiting for the completion of its %zu groups of bulk stores", t.groups.size());
}

void cta_exit_checks(Cta &cta)
{
    for (size_t i = 0; i < cta.granules.size(); i++) {
        if (cta.granules[i].async_writes)
            fail("block %u has ended, and a copy into its shared memory (offset %zu) is still under way", cta.block, i * 16);
        if (cta.granules[i].async_reads)
            fail("block %u has ended, and a store or MMA that reads its shared memory (offset %zu) was never waited for", cta.block, i * 16);
    }
    for (Mbarrier &bar : cta.mbarriers)
        if (bar.tx != 0)
            fail("block %u has ended, and its mbarrier at shared offset %u still expects %lld bytes", cta.block, bar.address, (long long)bar.tx);
    tensor_exit_checks(cta);
}

} /* namespace emu */
