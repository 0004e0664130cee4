/* Identity, warps, barriers, registers, time. */
#include "emu/machine.h"

namespace emu {

/* ---- warps ---- */

static bool warp_went_on(Thread &t) { return t.cta->warps[t.warp()].generation != t.wait_value; }

void warp_rendezvous(const char *instruction, void (*complete)(Warp &))
{
    Warp &warp = own_warp();
    if (warp.arrived == 0)
        warp.instruction = instruction;
    else if (strcmp(warp.instruction, instruction) != 0)
        fail("the lanes of a warp are in different instructions: %s and %s", instruction, warp.instruction);
    warp.arrived |= 1u << self->lane();
    if (warp.arrived != warp.members) {
        block(warp.waiters, warp_went_on, "warp", &warp, warp.generation);
        return;
    }
    complete(warp);
    warp.arrived = 0;
    warp.generation++;
    wake(warp.waiters);
}

static void nothing(Warp &) {}

/* sync_warp orders the lanes' memory accesses; the other warp instructions do not. */
static void order_lanes(Warp &warp)
{
    Thread *const me = self;
    Clock all;
    for (int pass = 0; pass < 2; pass++)
        for (uint32_t i = 0; i < 32; i++)
            if (warp.members >> i & 1) {
                self = &me->cta->threads[me->warp() * 32 + i];
                if (pass == 0)
                    release_into(all);
                else
                    acquire_from(all);
            }
    self = me;
}

/* ---- named barriers ---- */

static bool barrier_opened(Thread &t) { return static_cast<NamedBarrier *>(t.wait_object)->generation != t.wait_value; }

static void barrier_arrive(uint32_t id, uint32_t threads, bool wait)
{
    step();
    if (id >= 16 || threads % 32 || threads == 0 || threads > self->cta->threads.size())
        fail("named barrier %u with %u threads: no such barrier", id, threads);
    NamedBarrier &bar = self->cta->named[id];
    if (bar.arrived && bar.expected != threads)
        fail("named barrier %u is used with %u and with %u threads at once", id, bar.expected, threads);
    bar.expected = threads;
    const uint64_t generation = bar.generation;
    release_into(bar.arriving);
    if (++bar.arrived == threads) {
        bar.arrived = 0;
        bar.generation++;
        bar.completed = bar.arriving;
        bar.arriving.clear();
        wake(bar.waiters);
    } else if (wait) {
        block(bar.waiters, barrier_opened, "named barrier", &bar, generation);
    }
    if (wait)
        acquire_from(bar.completed);
}

void open_cluster_barrier(Cluster &cluster)
{
    cluster.barrier_arrived = 0;
    cluster.barrier_generation++;
    cluster.completed = cluster.arriving;
    cluster.arriving.clear();
    wake(cluster.barrier_waiters);
}

static bool cluster_opened(Thread &t) { return t.cta->cluster->barrier_generation > t.cluster_barrier_seen; }

/* ---- registers ---- */

static bool registers_set_done(Thread &t) { return t.cta->warpgroups[t.idx / 128].registers_generation != t.wait_value; }

/* Grants every request that is complete and fits. */
static void grant_registers(Cta &cta)
{
    for (bool again = true; again;) {
        again = false;
        for (Warpgroup &w : cta.warpgroups) {
            if (w.registers_arrived != 128 || w.registers_wanted > w.registers + cta.free_registers)
                continue;
            cta.free_registers = cta.free_registers + w.registers - w.registers_wanted;
            w.registers = w.registers_wanted;
            w.registers_arrived = 0;
            w.registers_generation++;
            wake(w.register_waiters);
            again = true;
        }
    }
}

void registers_set(int per_thread, bool raise)
{
    step();
    Warpgroup &w = self->cta->warpgroups[self->idx / 128];
    if (raise ? per_thread < (int)w.registers : per_thread > (int)w.registers)
        fail("setmaxnreg %s to %d from %u registers", raise ? "raises" : "lowers", per_thread, w.registers);
    if (w.registers_arrived && (int)w.registers_wanted != per_thread)
        fail("the warps of a warpgroup ask for %d and for %u registers", per_thread, w.registers_wanted);
    const uint64_t generation = w.registers_generation;
    w.registers_wanted = (uint32_t)per_thread;
    w.registers_arrived++;
    grant_registers(*self->cta);
    block(w.register_waiters, registers_set_done, "registers", &w, generation);
}

} /* namespace emu */

namespace mk {
using namespace emu;

uint32_t thread_idx() { return self->idx; }
uint32_t block_idx() { return self->cta->block; }
uint32_t sm_idx() { return self->cta->block % 132; }
uint32_t num_blocks() { return self->cta->device->queue.front().shape.blocks; }
uint32_t lane_idx() { return self->lane(); }
uint32_t cluster_rank() { return self->cta->rank; }
uint32_t cluster_idx() { return self->cta->cluster->index; }
uint32_t num_clusters() { return num_blocks() / self->cta->device->queue.front().shape.cluster; }

void sync_warp()
{
    step();
    warp_rendezvous("sync_warp", order_lanes);
}

/* A GPU reads it by a shuffle: all lanes have to come. */
uint32_t warp_idx()
{
    step();
    warp_rendezvous("warp_idx", nothing);
    return self->warp();
}

uint32_t shuffle(uint32_t value, uint32_t source_lane)
{
    step();
    Warp &warp = own_warp();
    warp.in[self->lane()] = (uint64_t)source_lane << 32 | value;
    warp_rendezvous("shuffle", [](Warp &w) {
        for (int i = 0; i < 32; i++)
            w.out[i] = (uint32_t)w.in[w.in[i] >> 32 & 31];
    });
    return (uint32_t)warp.out[self->lane()];
}

uint32_t shuffle_xor(uint32_t value, uint32_t mask) { return shuffle(value, lane_idx() ^ mask); }

float shuffle(float value, uint32_t source_lane)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits_to_float(shuffle(bits, source_lane));
}
float shuffle_xor(float value, uint32_t mask)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits_to_float(shuffle_xor(bits, mask));
}

uint32_t match_any(uint32_t value)
{
    step();
    Warp &warp = own_warp();
    warp.in[self->lane()] = value;
    warp_rendezvous("match_any", [](Warp &w) {
        for (int i = 0; i < 32; i++) {
            w.out[i] = 0;
            for (int j = 0; j < 32; j++)
                w.out[i] |= (uint64_t)(w.members >> j & 1 && w.in[j] == w.in[i]) << j;
        }
    });
    return (uint32_t)warp.out[self->lane()];
}

uint32_t ballot(bool vote)
{
    step();
    Warp &warp = own_warp();
    warp.in[self->lane()] = vote;
    warp_rendezvous("ballot", [](Warp &w) {
        uint64_t all = 0;
        for (int i = 0; i < 32; i++)
            all |= (w.members >> i & 1 & w.in[i]) << i;
        for (int i = 0; i < 32; i++)
            w.out[i] = all;
    });
    return (uint32_t)warp.out[self->lane()];
}

bool elect_one()
{
    step();
    warp_rendezvous("elect_one", nothing);
    return self->lane() == 0;
}

void barrier_block_sync() { barrier_arrive(0, (uint32_t)self->cta->threads.size(), true); }
void barrier_named_sync(uint32_t id, uint32_t threads) { barrier_arrive(id, threads, true); }
void barrier_named_arrive(uint32_t id, uint32_t threads) { barrier_arrive(id, threads, false); }

void barrier_cluster_arrive_release()
{
    step();
    Cluster &cluster = *self->cta->cluster;
    self->cluster_barrier_seen = cluster.barrier_generation;
    release_into(cluster.arriving);
    if (++cluster.barrier_arrived == cluster.live)
        open_cluster_barrier(cluster);
}

void barrier_cluster_wait_acquire()
{
    step();
    block(self->cta->cluster->barrier_waiters, cluster_opened, "cluster barrier", self->cta->cluster, 0);
    acquire_from(self->cta->cluster->completed);
}

uint64_t time_ns()
{
    step();
    return machine->time_ns;
}

void sleep_ns(uint32_t ns)
{
    machine->time_ns += ns / 32;
    yield();
}

void trap() { fail("trap"); }
void note_wait(const char *what) { self->note = what; }
void note_results_are_void() { machine->results_are_void = true; }

} /* namespace mk */
