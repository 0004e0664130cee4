/* Flags and counters in global memory: values, and what they order. */
#include "emu/machine.h"

#include <algorithm>

namespace emu {

/* ---- what they order ---- */

void Flag::store(bool release, bool sys)
{
    clock.clear();
    add(release, sys);
}

void Flag::add(bool release, bool sys)
{
    if (release)
        release_into(clock);
    else
        clock.join(self->fenced);
    device = self->cta->device->index;
    system_scope = sys;
}

void Flag::load(bool acquire, bool sys) const
{
    if (device != self->cta->device->index && !(sys && system_scope))
        return;  /* gpu scope orders nothing across GPUs */
    if (acquire)
        acquire_from(clock);
    else
        self->seen_relaxed.join(clock);
}

static void fence_release_and_acquire()
{
    self->clock.join(self->seen_relaxed);
    self->fenced.clear();
    release_into(self->fenced);
}

/* ---- values: a thread that reads the same value twice running is polling, and sleeps until the value changes ---- */

enum Order { RELAXED, ORDERED };  /* ORDERED: acquire for loads, release for stores, both for read-modify-writes */
enum Scope { GPU, SYS };

template <class T> static bool value_changed(Thread &t)
{
    T now;
    memcpy(&now, t.wait_object, sizeof now);
    return now != (T)t.wait_value;
}

template <class T> static T flag_load(const T *p, Order order, Scope scope)
{
    T v;
    step();
    global_read_bytes(p, &v, sizeof v, true);
    if (self->polled_address == p && self->polled_value == v) {
        block(machine->pollers, value_changed<T>, "global memory", const_cast<T *>(p), v, true);
        global_read_bytes(p, &v, sizeof v, true);
    }
    self->polled_address = p;
    self->polled_value = v;
    machine->flags[p].load(order == ORDERED, scope == SYS);
    return v;
}

/* Data of a flag's write. Its readers are ordered by the flag itself, or by a later launch. */
template <class T> static void flag_write_value(T *p, T v)
{
    Allocation &a = require_allocation(p, sizeof v, "a write");
    const size_t at = (size_t)(reinterpret_cast<uint8_t *>(p) - a.base);
    memset(a.written.data() + at, 1, sizeof v);
    a.stamp[at / 16] = machine->stamp++;
    a.by_copy[at / 16] = false;
    std::fill_n(a.write_epoch.begin() + (long)at, sizeof v, self->now());
    memcpy(p, &v, sizeof v);
    wake(machine->pollers);
}

template <class T> static void flag_store(T *p, T v, Order order, Scope scope)
{
    step();
    flag_write_value(p, v);
    machine->flags[p].store(order == ORDERED, scope == SYS);
}

/* Atomic: nobody runs in between. */
template <class T, class Change> static T flag_change(T *p, Order order, Scope scope, bool acquires, Change change)
{
    T v;
    step();
    global_read_bytes(p, &v, sizeof v, true);
    if (acquires)
        machine->flags[p].load(order == ORDERED, scope == SYS);
    flag_write_value(p, (T)change(v));
    machine->flags[p].add(order == ORDERED, scope == SYS);
    return v;
}

} /* namespace emu */

namespace mk {
using namespace emu;

void fence_acq_rel_gpu() { step(); fence_release_and_acquire(); }
void fence_acq_rel_sys() { step(); fence_release_and_acquire(); }

uint32_t flag_load_relaxed_gpu(const uint32_t *p) { return flag_load(p, RELAXED, GPU); }
uint32_t flag_load_acquire_gpu(const uint32_t *p) { return flag_load(p, ORDERED, GPU); }
uint32_t flag_load_acquire_sys(const uint32_t *p) { return flag_load(p, ORDERED, SYS); }
uint64_t flag_load_relaxed_sys(const uint64_t *p) { return flag_load(p, RELAXED, SYS); }
uint64_t flag_load_acquire_sys(const uint64_t *p) { return flag_load(p, ORDERED, SYS); }
void flag_store_relaxed_gpu(uint32_t *p, uint32_t v) { flag_store(p, v, RELAXED, GPU); }
void flag_store_release_gpu(uint32_t *p, uint32_t v) { flag_store(p, v, ORDERED, GPU); }
void flag_store_release_sys(uint32_t *p, uint32_t v) { flag_store(p, v, ORDERED, SYS); }
void flag_store_relaxed_sys(uint64_t *p, uint64_t v) { flag_store(p, v, RELAXED, SYS); }
void flag_store_release_sys(uint64_t *p, uint64_t v) { flag_store(p, v, ORDERED, SYS); }
void flag_add_release_gpu(uint32_t *p, uint32_t n) { flag_change(p, ORDERED, GPU, false, [n](uint32_t v) { return v + n; }); }
void flag_add_release_sys(uint32_t *p, uint32_t n) { flag_change(p, ORDERED, SYS, false, [n](uint32_t v) { return v + n; }); }
uint32_t ticket_take_relaxed_gpu(uint32_t *p, uint32_t n) { return flag_change(p, RELAXED, GPU, true, [n](uint32_t v) { return v + n; }); }
uint32_t ticket_take_acq_rel_gpu(uint32_t *p, uint32_t n) { return flag_change(p, ORDERED, GPU, true, [n](uint32_t v) { return v + n; }); }
void counter_add_relaxed_gpu(uint32_t *p, uint32_t n) { flag_change(p, RELAXED, GPU, false, [n](uint32_t v) { return v + n; }); }
void counter_add_relaxed_gpu(uint64_t *p, uint64_t n) { flag_change(p, RELAXED, GPU, false, [n](uint64_t v) { return v + n; }); }
void min_relaxed_gpu(uint64_t *p, uint64_t n) { flag_change(p, RELAXED, GPU, false, [n](uint64_t v) { return n < v ? n : v; }); }

} /* namespace mk */
