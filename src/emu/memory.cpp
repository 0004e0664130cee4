/* Plain memory, flags and fences: bounds, written bytes, and which plain writes a later copy or MMA may not see yet. */
#include "emu/machine.h"

#include <stdlib.h>

namespace emu {

static constexpr size_t kGuard = 256;

/* ---- allocations ---- */

void *Machine::allocate(size_t bytes, const char *name)
{
    auto a = std::make_unique<Allocation>();
    a->bytes = bytes;
    a->name = name;
    a->block = static_cast<uint8_t *>(aligned_alloc(256, (bytes + 2 * kGuard + 255) / 256 * 256));
    a->base = a->block + kGuard;
    memset(a->block, 0xcb, bytes + 2 * kGuard);
    a->written.assign(bytes, 0);
    a->stamp.assign(bytes / 16 + 1, 0);
    void *base = a->base;
    state_->memory[(uintptr_t)base] = std::move(a);
    return base;
}

void Machine::release(void *base)
{
    auto found = state_->memory.find((uintptr_t)base);
    free(found->second->block);
    state_->memory.erase(found);
}

static Allocation *find_in(const State &state, const void *p, size_t bytes)
{
    auto after = state.memory.upper_bound((uintptr_t)p);
    if (after == state.memory.begin())
        return nullptr;
    Allocation *a = std::prev(after)->second.get();
    return (uintptr_t)p + bytes <= (uintptr_t)a->base + a->bytes ? a : nullptr;
}

void Machine::set_written(const void *p, size_t bytes, bool written)
{
    if (Allocation *a = find_in(*state_, p, bytes))
        memset(a->written.data() + (static_cast<const uint8_t *>(p) - a->base), written, bytes);
}

bool Machine::is_written(const void *p, size_t bytes) const
{
    const Allocation *a = find_in(*state_, p, bytes);
    return a && !memchr(a->written.data() + (static_cast<const uint8_t *>(p) - a->base), 0, bytes);
}

/* For the namespace mk's note_written: the running machine's memory. */
void mark_written(const void *p, size_t bytes)
{
    if (Allocation *a = bytes ? find_in(*machine, p, bytes) : nullptr)
        memset(a->written.data() + (static_cast<const uint8_t *>(p) - a->base), 1, bytes);
}

Allocation *find_allocation(const void *p, size_t bytes) { return find_in(*machine, p, bytes); }

Allocation &require_allocation(const void *p, size_t bytes, const char *what)
{
    if (Allocation *a = find_allocation(p, bytes))
        return *a;
    const Allocation *near = nullptr;
    for (auto &entry : machine->memory)
        if (entry.first <= (uintptr_t)p + bytes)
            near = entry.second.get();
    fail("%s of %zu bytes outside every buffer; the nearest is %s (%zu bytes), offset %lld", what, bytes, near ? near->name.c_str() : "none",
         near ? near->bytes : 0, near ? (long long)((intptr_t)p - (intptr_t)near->base) : 0);
}

void check_global_proxy(const Allocation &a, const void *p, size_t bytes, const char *what)
{
    const size_t first = (size_t)(static_cast<const uint8_t *>(p) - a.base) / 16;
    const size_t last = (size_t)(static_cast<const uint8_t *>(p) + bytes - 1 - a.base) / 16;
    for (size_t i = first; i <= last; i++)
        if (a.stamp[i] > self->global_fence)
            fail("%s reads %s+%zu, written by plain stores during this launch, without fence_proxy_async_global after it saw them", what,
                 a.name.c_str(), i * 16);
}

/* ---- shared memory ---- */

Place resolve(uint32_t address, uint32_t bytes, const char *what)
{
    Cta *cta = self->cta;
    const uint32_t rank = address >> kClusterShift;
    if (rank) {
        if (rank > cta->cluster->ctas.size())
            fail("%s: %08x is no address of this cluster", what, address);
        cta = cta->cluster->ctas[rank - 1].get();
        if (cta->gone)
            fail("%s: block %u of the cluster has already ended", what, cta->block);
    }
    const uint32_t offset = (address & ((1u << kClusterShift) - 1)) - kSharedBase;
    if (offset > cta->shared_bytes || bytes > cta->shared_bytes - offset)
        fail("%s: %u bytes at shared offset %d are outside the %u bytes of the CTA", what, bytes, (int)offset, cta->shared_bytes);
    return {cta, offset};
}

static void no_mbarrier_here(const Cta &cta, uint32_t offset, uint32_t bytes, const char *what)
{
    for (uint32_t i = offset / 8; i <= (offset + bytes - 1) / 8; i++)
        if (cta.mbarrier_at[i] >= 0)
            fail("%s touches the mbarrier at shared offset %u", what, i * 8);
}

void shared_plain_write(Cta &cta, uint32_t offset, const void *in, uint32_t bytes)
{
    no_mbarrier_here(cta, offset, bytes, "a plain write");
    for (uint32_t i = offset / 16; i <= (offset + bytes - 1) / 16; i++) {
        Granule &g = cta.granules[i];
        if (g.async_reads)
            fail("a plain write to shared offset %u, which a store or MMA still reads (nobody has waited for it)", i * 16);
        if (g.async_writes)
            fail("a plain write to shared offset %u, where a copy is still under way", i * 16);
        g.stamp = machine->stamp++;
        g.writer = self;
    }
    for (uint32_t i = offset; i < offset + bytes; i++)
        cta.granules[i / 16].written |= (uint16_t)(1u << (i % 16));
    memcpy(cta.shared + offset, in, bytes);
}

static void shared_plain_read(Cta &cta, uint32_t offset, void *out, uint32_t bytes)
{
    no_mbarrier_here(cta, offset, bytes, "a plain read");
    for (uint32_t i = offset; i < offset + bytes; i++) {
        const Granule &g = cta.granules[i / 16];
        if (g.async_writes)
            fail("a plain read of shared offset %u, where a copy is still under way", i);
        if (!(g.written >> (i % 16) & 1))
            fail("a plain read of shared offset %u, which was never written", i);
    }
    memcpy(out, cta.shared + offset, bytes);
}

void begin_async_read(Cta &cta, uint32_t offset, const char *what)
{
    Granule &g = cta.granules[offset / 16];
    if (g.async_writes)
        fail("%s reads shared offset %u, where a copy is still under way", what, offset);
    if (g.stamp && g.writer->shared_fence < g.stamp)
        fail("%s reads shared offset %u, written by a plain store of warp %u, lane %u that no fence_proxy_async_shared_cta followed", what, offset,
             g.writer->warp(), g.writer->lane());
    g.async_reads++;
}

void end_async_read(Cta &cta, uint32_t offset) { cta.granules[offset / 16].async_reads--; }

void begin_async_write(Cta &cta, uint32_t offset, const char *what)
{
    Granule &g = cta.granules[offset / 16];
    no_mbarrier_here(cta, offset, 16, what);
    if (g.async_reads)
        fail("%s overwrites shared offset %u of block %u, which a store or MMA still reads (nobody has waited for it)", what, offset, cta.block);
    if (g.async_writes)
        fail("%s overwrites shared offset %u of block %u, where another copy is still under way", what, offset, cta.block);
    g.async_writes++;
}

/* ---- plain accesses ---- */

static bool in_shared(const void *p, uint32_t &offset)
{
    const uint8_t *byte = static_cast<const uint8_t *>(p);
    const Cta &cta = *self->cta;
    if (byte < cta.shared || byte >= cta.shared + cta.shared_bytes)
        return false;
    offset = (uint32_t)(byte - cta.shared);
    return true;
}

void memory_read(const void *p, void *out, size_t bytes)
{
    step();
    uint32_t offset;
    if (in_shared(p, offset)) {
        shared_plain_read(*self->cta, offset, out, (uint32_t)bytes);
        return;
    }
    Allocation &a = require_allocation(p, bytes, "a read");
    const size_t at = (size_t)(static_cast<const uint8_t *>(p) - a.base);
    if (const void *hole = memchr(a.written.data() + at, 0, bytes))
        fail("a read of %s+%zu, which was never written", a.name.c_str(), (size_t)(static_cast<const uint8_t *>(hole) - a.written.data()));
    memcpy(out, p, bytes);
}

void memory_write(void *p, const void *in, size_t bytes)
{
    step();
    uint32_t offset;
    if (in_shared(p, offset)) {
        shared_plain_write(*self->cta, offset, in, (uint32_t)bytes);
        return;
    }
    Allocation &a = require_allocation(p, bytes, "a write");
    const size_t at = (size_t)(static_cast<uint8_t *>(p) - a.base);
    memset(a.written.data() + at, 1, bytes);
    for (size_t i = at / 16; i <= (at + bytes - 1) / 16; i++)
        a.stamp[i] = machine->stamp++;
    memcpy(p, in, bytes);
    wake(machine->pollers);
}

/* ---- flags: a thread that reads the same value twice running is polling, and sleeps until the value changes ---- */

template <class T> static bool value_changed(Thread &t)
{
    T now;
    memcpy(&now, t.wait_object, sizeof now);
    return now != (T)t.wait_value;
}

template <class T> static T flag_load(const T *p)
{
    T v;
    memory_read(p, &v, sizeof v);
    if (self->polled_address == p && self->polled_value == v) {
        block(machine->pollers, value_changed<T>, "global memory", const_cast<T *>(p), v, true);
        memory_read(p, &v, sizeof v);
    }
    self->polled_address = p;
    self->polled_value = v;
    return v;
}

template <class T> static T flag_add(T *p, T n)
{
    T v, sum;
    memory_read(p, &v, sizeof v);
    sum = v + n;
    /* No step in between: the addition is atomic. */
    self->budget += 2;
    memory_write(p, &sum, sizeof sum);
    return v;
}

} /* namespace emu */

namespace mk {
using namespace emu;

void *shared_base() { return self->cta->shared; }

uint32_t smem_addr(const void *p)
{
    uint32_t offset;
    if (!in_shared(p, offset))
        fail("smem_addr of something outside the CTA's shared memory");
    return shared_address(offset);
}

uint32_t cluster_addr(uint32_t addr, uint32_t rank)
{
    if (rank >= self->cta->cluster->ctas.size())
        fail("cluster_addr of rank %u in a cluster of %zu", rank, self->cta->cluster->ctas.size());
    return (rank + 1) << kClusterShift | addr;
}

Vec4 load_shared_b128(uint32_t addr)
{
    step();
    const Place place = resolve(addr, 16, "load_shared_b128");
    if (addr % 16)
        fail("load_shared_b128 of address %08x: not a multiple of 16", addr);
    Vec4 v;
    shared_plain_read(*place.cta, place.offset, &v, 16);
    return v;
}

void store_shared_b128(uint32_t addr, Vec4 v)
{
    step();
    const Place place = resolve(addr, 16, "store_shared_b128");
    if (addr % 16)
        fail("store_shared_b128 to address %08x: not a multiple of 16", addr);
    shared_plain_write(*place.cta, place.offset, &v, 16);
}

void store_matrix_x4(uint32_t addr, const uint32_t (&r)[4])
{
    step();
    if (addr % 16)
        fail("store_matrix_x4 to address %08x: not a multiple of 16", addr);
    const Place place = resolve(addr, 16, "store_matrix_x4");
    Warp &warp = own_warp();
    warp.in[self->lane()] = place.offset;
    memcpy(warp.matrix[self->lane()], r, 16);
    warp_rendezvous("store_matrix_x4", [](Warp &w) {
        const Thread *me = self;
        for (uint32_t i = 0; i < 32; i++) {  /* lane i owns row i%8 of matrix i/8, whose elements lie in lanes 4(i%8) .. +3 */
            uint32_t row[4];
            for (uint32_t j = 0; j < 4; j++)
                row[j] = w.matrix[4 * (i % 8) + j][i / 8];
            self = &me->cta->threads[me->warp() * 32 + i];
            shared_plain_write(*me->cta, (uint32_t)w.in[i], row, 16);
        }
        self = const_cast<Thread *>(me);
    });
}

void fence_proxy_async() { step(); self->shared_fence = self->global_fence = machine->stamp++; }
void fence_proxy_async_global() { step(); self->global_fence = machine->stamp++; }
void fence_proxy_async_shared_cta() { step(); self->shared_fence = machine->stamp++; }
void fence_acq_rel_gpu() { step(); }
void fence_acq_rel_sys() { step(); }

uint32_t flag_load_relaxed_gpu(const uint32_t *p) { return flag_load(p); }
uint32_t flag_load_acquire_gpu(const uint32_t *p) { return flag_load(p); }
uint32_t flag_load_acquire_sys(const uint32_t *p) { return flag_load(p); }
uint64_t flag_load_relaxed_sys(const uint64_t *p) { return flag_load(p); }
uint64_t flag_load_acquire_sys(const uint64_t *p) { return flag_load(p); }
void flag_store_relaxed_gpu(uint32_t *p, uint32_t v) { memory_write(p, &v, 4); }
void flag_store_release_gpu(uint32_t *p, uint32_t v) { memory_write(p, &v, 4); }
void flag_store_release_sys(uint32_t *p, uint32_t v) { memory_write(p, &v, 4); }
void flag_store_relaxed_sys(uint64_t *p, uint64_t v) { memory_write(p, &v, 8); }
void flag_store_release_sys(uint64_t *p, uint64_t v) { memory_write(p, &v, 8); }
void flag_add_release_gpu(uint32_t *p, uint32_t v) { flag_add(p, v); }
void flag_add_release_sys(uint32_t *p, uint32_t v) { flag_add(p, v); }
uint32_t ticket_take_relaxed_gpu(uint32_t *p, uint32_t n) { return flag_add(p, n); }
uint32_t ticket_take_acq_rel_gpu(uint32_t *p, uint32_t n) { return flag_add(p, n); }
void note_written(const void *p, uint64_t bytes) { emu::mark_written(p, bytes); }
void counter_add_relaxed_gpu(uint32_t *p, uint32_t v) { flag_add(p, v); }
void counter_add_relaxed_gpu(uint64_t *p, uint64_t v) { flag_add(p, v); }
void min_relaxed_gpu(uint64_t *p, uint64_t v)
{
    uint64_t old;
    memory_read(p, &old, sizeof old);
    self->budget += 2; /* no step in between: the operation is atomic */
    if (v < old)
        memory_write(p, &v, sizeof v);
}

} /* namespace mk */
