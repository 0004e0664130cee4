/* The scheduler: launches, clusters coming and going, whom to run next, and what to do when nobody can. */
#include "emu/machine.h"

#include <algorithm>
#include <iterator>
#include <malloc.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

namespace emu {

Thread *self;
State *machine;

/* ---- from inside a fiber ---- */

struct Failure {};

/* After a failure a fiber is resumed once more, only to destroy what is on its stack (Machine::run). */
static void suspend()
{
    self->fiber->suspend();
    if (machine->failed)
        throw Failure();
}

void yield()
{
    self->doing = Doing::ready;
    machine->ready.push_back(self);
    suspend();
}

void step()
{
    if (--self->budget <= 0)
        yield();
}

bool block(WaitList &list, bool (*can_go)(Thread &), const char *what, void *object, uint64_t value, bool pollable)
{
    Thread &t = *self;
    t.wait_object = object;
    t.wait_value = value;
    while (!can_go(t)) {
        t.can_go = can_go;
        t.waits_for = what;
        t.pollable = pollable;
        t.poked = false;
        t.ticket++;
        t.doing = Doing::blocked;
        list.entries.push_back({&t, t.ticket});
        suspend();
        if (t.poked)
            return true;
    }
    t.note = nullptr;
    return false;
}

void wake(WaitList &list)
{
    machine->progress++;
    size_t kept = 0;
    for (WaitList::Entry &e : list.entries) {
        Thread &t = *e.thread;
        if (t.ticket != e.ticket || t.doing != Doing::blocked)
            continue;
        if (t.can_go(t)) {
            t.doing = Doing::ready;
            machine->ready.push_back(&t);
        } else {
            list.entries[kept++] = e;
        }
    }
    list.entries.resize(kept);
}

void submit(std::shared_ptr<AsyncOp> op)
{
    op->owner = self;
    machine->pending.push_back(std::move(op));
}

std::string describe(const Thread &t)
{
    char text[160];
    snprintf(text, sizeof text, "device %u, block %u (rank %u of its cluster), warp %u, lane %u", t.cta->device->index, t.cta->block,
             t.cta->rank, t.warp(), t.lane());
    return text;
}

[[noreturn]] void fail(const char *format, ...)
{
    char text[600];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (!machine->failed) {
        machine->failed = true;
        machine->result.ok = false;
        machine->result.message = std::string(text) + (self ? "\n  by " + describe(*self) : "");
        char seed[64];
        snprintf(seed, sizeof seed, "\n  seed %llu", (unsigned long long)machine->seed);
        machine->result.message += seed;
    }
    throw Failure();  /* ends this fiber (thread_main), or the scheduler's loop (run); nobody goes on */
}

/* ---- clusters ---- */

static void thread_main(void *arg)
{
    Thread &t = *static_cast<Thread *>(arg);
    try {
        if (machine->failed)
            throw Failure();
        t.cta->device->queue.front().kernel();
        thread_exit_checks(t);
    } catch (const Failure &) {
    }
    t.doing = Doing::exited;
}

Cta::~Cta()
{
    free(shared);
}

/* Fibers that have returned, of machines that are gone: a stack costs system calls and pages, and programs make a machine for every run. */
static std::vector<std::unique_ptr<Fiber>> &spare_fibers()
{
    static auto &spare = *new std::vector<std::unique_ptr<Fiber>>();
    return spare;
}

static Fiber *take_fiber()
{
    if (machine->free_fibers.empty()) {
        std::vector<std::unique_ptr<Fiber>> &spare = spare_fibers();
        if (spare.empty())
            spare.push_back(std::make_unique<Fiber>());
        machine->free_fibers.push_back(spare.back().get());
        machine->fibers.push_back(std::move(spare.back()));
        spare.pop_back();
    }
    Fiber *fiber = machine->free_fibers.back();
    machine->free_fibers.pop_back();
    return fiber;
}

static std::unique_ptr<Cta> make_cta(DeviceState &device, Cluster &cluster, const Launch &shape, uint32_t rank)
{
    auto cta = std::make_unique<Cta>();
    cta->cluster = &cluster;
    cta->device = &device;
    cta->rank = rank;
    cta->block = cluster.index * shape.cluster + rank;
    cta->number = (uint32_t)machine->cta_records.size();
    machine->cta_records.push_back({device.index, device.launches, cta->block});
    cta->shared_bytes = (shape.shared_bytes + 15) & ~15u;
    cta->shared = static_cast<uint8_t *>(aligned_alloc(1024, (cta->shared_bytes + 2047) & ~1023u));
    memset(cta->shared, 0xa5, cta->shared_bytes);
    cta->granules.resize(cta->shared_bytes / 16);
    cta->write_epoch.assign(cta->shared_bytes, 0);
    cta->mbarrier_at.assign(cta->shared_bytes / 8, -1);
    cta->live = shape.threads;
    cta->threads.resize(shape.threads);
    cta->warps.resize((shape.threads + 31) / 32);
    cta->warpgroups.resize((shape.threads + 127) / 128);
    for (Warpgroup &w : cta->warpgroups)
        w.registers = 65536 / shape.threads / 8 * 8;
    for (uint32_t i = 0; i < shape.threads; i++) {
        Thread &t = cta->threads[i];
        t.cta = cta.get();
        t.idx = i;
        t.global_fence = device.launch_stamp;
        t.clock = device.clock;
        cta->warps[i / 32].members |= 1u << (i % 32);
        t.fiber = take_fiber();
        t.fiber->start(thread_main, &t);
        machine->ready.push_back(&t);
    }
    return cta;
}

static void start_clusters(DeviceState &device, bool late = false)
{
    if (device.queue.empty())
        return;
    QueuedLaunch &q = device.queue.front();
    if (q.started && device.late_starts && !late)
        return;
    if (!q.started) {
        q.started = true;
        device.launch_stamp = machine->stamp++;
        device.clock.launch_ended(device.index, device.launches++);
    }
    while (!q.waiting.empty() && device.resident.size() < device.resident_limit) {
        auto cluster = std::make_unique<Cluster>();
        cluster->index = q.waiting.front();
        q.waiting.pop_front();
        cluster->live = q.shape.cluster * q.shape.threads;
        for (uint32_t r = 0; r < q.shape.cluster; r++)
            cluster->ctas.push_back(make_cta(device, *cluster, q.shape, r));
        device.resident.push_back(std::move(cluster));
    }
}

static void thread_left(Thread &t)
{
    Cta &cta = *t.cta;
    Cluster &cluster = *cta.cluster;
    DeviceState &device = *cta.device;
    machine->progress++;
    device.clock_at_end.join(t.clock);
    machine->free_fibers.push_back(t.fiber);
    cluster.live--;
    if (cluster.live && cluster.barrier_arrived == cluster.live) {  /* the others do not wait for one who has left */
        open_cluster_barrier(cluster);
    }
    if (--cta.live == 0) {
        cta_exit_checks(cta);
        cta.gone = true;
    }
    if (cluster.live)
        return;
    for (size_t i = 0; i < device.resident.size(); i++)
        if (device.resident[i].get() == &cluster) {
            device.resident.erase(device.resident.begin() + (long)i);
            break;
        }
    if (device.resident.empty() && device.queue.front().waiting.empty()) {
        device.queue.pop_front();
        device.clock.join(device.clock_at_end);
    }
    start_clusters(device);
}

/* Where places are taken late: now, if nothing else goes on, or by chance. */
static void start_late_clusters()
{
    for (auto &device : machine->devices)
        if (device->late_starts && ((machine->ready.empty() && machine->pending.empty()) || machine->random.below(device->late_starts) == 0))
            start_clusters(*device, true);
}

/* ---- the loop ---- */

static bool is_frozen(const Thread &t) { return t.cta->block % 2 == machine->frozen_blocks || t.warp() == machine->frozen_warp; }

/* How often this thread is passed over while others are ready. */
static bool passed_over(const Thread &t)
{
    if (is_frozen(t))
        return machine->random.below(256) != 0;
    const bool slow = machine->slow_mask >> ((t.warp() + 5 * t.cta->block) % 64) & 1;
    return slow && machine->random.below(machine->slow_odds) != 0;
}

static void run_one_thread()
{
    std::vector<Thread *> &ready = machine->ready;
    uint32_t pick = machine->random.below((uint32_t)ready.size());
    for (int tries = 0; tries < 16 && passed_over(*ready[pick]); tries++)
        pick = machine->random.below((uint32_t)ready.size());
    Thread &t = *ready[pick];
    ready[pick] = ready.back();
    ready.pop_back();
    t.doing = Doing::running;
    t.budget = 1 + (int)machine->random.below(48);
    machine->time_ns += 10;
    machine->result.switches++;
    self = &t;
    t.fiber->resume();
    self = nullptr;
    if (!machine->failed && t.doing == Doing::exited)
        thread_left(t);
}

static void advance_one_operation()
{
    std::vector<std::shared_ptr<AsyncOp>> &pending = machine->pending;
    uint32_t pick = machine->random.below((uint32_t)pending.size());
    std::shared_ptr<AsyncOp> op = pending[pick];
    machine->progress++;
    if (op->advance()) {
        machine->result.async_ops++;
        pending[pick] = pending.back();
        pending.pop_back();
    }
}

/* Nobody is ready and nothing is under way: those who poll memory look once more. */
static bool poke_pollers()
{
    bool any = false;
    for (auto &device : machine->devices)
        for (auto &cluster : device->resident)
            for (auto &cta : cluster->ctas)
                for (Thread &t : cta->threads)
                    if (t.doing == Doing::blocked && t.pollable) {
                        t.poked = any = true;
                        t.doing = Doing::ready;
                        machine->ready.push_back(&t);
                    }
    return any;
}

static void run_until_done()
{
    uint64_t last_progress = ~0ull;
    int pokes = 0;
    while (!machine->failed) {
        start_late_clusters();
        if (!machine->pending.empty() && (machine->ready.empty() || machine->random.below(machine->async_odds) == 0))
            advance_one_operation();
        if (!machine->ready.empty()) {
            run_one_thread();
            continue;
        }
        if (!machine->pending.empty())
            continue;
        bool busy = false;
        for (auto &device : machine->devices)
            busy |= !device->queue.empty();
        if (!busy)
            return;
        pokes = machine->progress == last_progress ? pokes + 1 : 0;
        last_progress = machine->progress;
        if (pokes > 3 && machine->let_time_pass)
            machine->time_ns += 1000000000ull;
        if ((pokes > 3 && !machine->let_time_pass) || pokes > 100000 || !poke_pollers()) {
            std::string text = deadlock_report();
            fail("%s", text.c_str());
        }
    }
}

Machine::Machine(uint64_t seed) : state_(std::make_unique<State>())
{
    /* What a CTA leaves behind the next one takes, instead of pages that the system has to clear first. */
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    state_->seed = seed;
    state_->random.state = (seed + 1) * 0x9e3779b97f4a7c15ull | 1;
    for (int i = 0; i < 8; i++)
        state_->random.next();
    static const uint32_t odds[] = {1, 2, 8, 32, 128, 1024};
    state_->async_odds = odds[state_->random.below(6)];
    state_->slow_odds = 1 + state_->random.below(4) * 8;
    state_->slow_mask = state_->random.next() & state_->random.next();
    switch (state_->random.below(4)) {
    case 0: state_->frozen_blocks = state_->random.below(2); break;
    case 1: state_->frozen_warp = state_->random.below(12); break;
    default: break;
    }
}

Machine::~Machine()
{
    if (machine == state_.get())
        machine = nullptr;
    if (state_->free_fibers.size() == state_->fibers.size())
        std::move(state_->fibers.begin(), state_->fibers.end(), std::back_inserter(spare_fibers()));
    for (auto &entry : state_->memory)
        free(entry.second->block);
}

Device &Machine::add_device(uint32_t resident_clusters)
{
    auto state = std::make_unique<DeviceState>();
    state->state = state_.get();
    state->index = (uint32_t)state_->devices.size();
    state->resident_limit = resident_clusters;
    devices_.push_back(std::make_unique<Device>());
    devices_.back()->state_ = state.get();
    state_->devices.push_back(std::move(state));
    return *devices_.back();
}

void Device::launch(const Launch &shape, std::function<void()> kernel)
{
    if (shape.blocks % shape.cluster || shape.shared_bytes > 232448 || shape.threads > 1024) {
        fprintf(stderr, "emulator: launch of %s refused: %u blocks in clusters of %u, %u threads, %u bytes of shared memory\n", shape.name,
                shape.blocks, shape.cluster, shape.threads, shape.shared_bytes);
        abort();
    }
    QueuedLaunch q;
    q.shape = shape;
    q.kernel = std::move(kernel);
    for (uint32_t c = 0; c < shape.blocks / shape.cluster; c++)
        q.waiting.push_back(c);
    state_->queue.push_back(std::move(q));
}

void Device::refuse_launches(uint32_t one_in) { state_->refusals = one_in; }
void Device::start_late(uint32_t one_in) { state_->late_starts = one_in; }

void Machine::let_time_pass(bool on) { state_->let_time_pass = on; }

/* Kernels hold vectors and the like on their stacks, which must not be lost with them. */
static void unwind_fibers()
{
    for (auto &device : machine->devices)
        for (auto &cluster : device->resident)
            for (auto &cta : cluster->ctas)
                for (Thread &t : cta->threads)
                    if (t.fiber && t.doing != Doing::exited) {
                        self = &t;
                        t.fiber->resume();
                    }
    self = nullptr;
}

Result Machine::run()
{
    machine = state_.get();
    machine->result = Result();
    machine->result.seed = machine->seed;
    machine->failed = false;
    machine->results_are_void = false;
    for (auto &device : machine->devices)  /* the host has seen everything so far */
        for (auto &other : machine->devices)
            device->clock.launch_ended(other->index, other->launches);
    try {
        for (auto &device : machine->devices)
            start_clusters(*device);
        run_until_done();
    } catch (const Failure &) {
    }
    if (machine->failed) {  /* nothing of the launch can go on */
        unwind_fibers();
        machine->ready.clear();
        machine->pending.clear();
        machine->pollers.entries.clear();
        machine->store_owners.entries.clear();
        machine->free_fibers.clear();
        for (auto &device : machine->devices) {
            device->queue.clear();
            device->resident.clear();
        }
        machine->fibers.clear();
    }
    return machine->result;
}

} /* namespace emu */
