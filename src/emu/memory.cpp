/* Plain memory and fences: bounds, written bytes, and which plain writes a later copy or MMA may not see yet. */
#include "emu/machine.h"

#include <algorithm>
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
    a->by_copy.assign(bytes / 16 + 1, false);
    a->write_epoch.assign(bytes, 0);
    a->reads.resize(bytes / 16 + 2);
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

/* The bytes of granule i that [at, at + bytes) covers. */
static uint32_t bytes_of(size_t i, size_t at, size_t bytes)
{
    return byte_mask(std::max(at, i * 16) - i * 16, std::min(at + bytes, i * 16 + 16) - i * 16);
}

/* What nothing orders, as far as anybody minds. */
static Epoch unordered(Epoch e) { return machine->results_are_void ? 0 : e; }

/* Bytes, order and proxy of a plain write; the data itself is the caller's. */
static void global_plain_write(Allocation &a, const void *p, size_t bytes)
{
    const size_t at = (size_t)(static_cast<const uint8_t *>(p) - a.base);
    memset(a.written.data() + at, 1, bytes);
    for (size_t i = at / 16; i <= (at + bytes - 1) / 16; i++) {
        if (Epoch e = unordered(unknown_read(a.reads[i], bytes_of(i, at, bytes))))
            fail("a write of %s+%zu is not ordered after a read by %s", a.name.c_str(), i * 16, describe_epoch(e).c_str());
        a.stamp[i] = machine->stamp++;
        a.by_copy[i] = false;
    }
    std::fill_n(a.write_epoch.begin() + (long)at, bytes, self->now());
}

/* What a reader must know of: everybody who wrote these bytes. */
static void require_known_writes(const Allocation &a, const void *p, size_t bytes, const char *what)
{
    const size_t at = (size_t)(static_cast<const uint8_t *>(p) - a.base);
    Epoch last = 0;
    for (size_t i = at; i < at + bytes; i++) {
        const Epoch e = a.write_epoch[i];
        if (e != last && !known_to_self(e) && unordered(e))
            fail("%s of %s+%zu is not ordered after the write by %s", what, a.name.c_str(), i, describe_epoch(e).c_str());
        last = e;
    }
}

void global_async_read(Allocation &a, const void *p, size_t bytes, const Mbarrier &bar, const Cta &cta, const char *what)
{
    require_known_writes(a, p, bytes, what);
    note_read(a.reads[(size_t)(static_cast<const uint8_t *>(p) - a.base) / 16], make_epoch(cta.number, bar.member, (uint32_t)bar.phase + 1), 0xffff);
}

void global_async_write(Allocation &a, void *p, size_t bytes, const char *what)
{
    const size_t at = (size_t)(static_cast<uint8_t *>(p) - a.base);
    if (Epoch e = unordered(unknown_read(a.reads[at / 16], 0xffff)))
        fail("%s to %s+%zu is not ordered after a read by %s", what, a.name.c_str(), at, describe_epoch(e).c_str());
    std::fill_n(a.write_epoch.begin() + (long)at, bytes, kUnobserved);
}

void global_async_write_observed(void *p, size_t bytes)
{
    Allocation *a = find_allocation(p, bytes);
    if (!a)
        return;
    const size_t at = (size_t)(static_cast<uint8_t *>(p) - a->base);
    std::fill_n(a->write_epoch.begin() + (long)at, bytes, self->now());
    a->stamp[at / 16] = machine->stamp++;
    a->by_copy[at / 16] = true;
}

/* For the namespace mk's note_written: the running machine's memory. */
void mark_written(const void *p, size_t bytes)
{
    if (Allocation *a = bytes ? find_in(*machine, p, bytes) : nullptr)
        global_plain_write(*a, p, bytes);
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
        if (a.stamp[i] > self->global_fence && !machine->results_are_void && !(a.by_copy[i] && is_own(a.write_epoch[i * 16])))
            fail("%s reads %s+%zu, written during this launch, without fence_proxy_async_global after it saw the data", what, a.name.c_str(), i * 16);
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
        if (Epoch e = unknown_read(g.reads, bytes_of(i, offset, bytes)))
            fail("a plain write to shared offset %u is not ordered after a read by %s", i * 16, describe_epoch(e).c_str());
        g.stamp = machine->stamp++;
        g.writer = self;
    }
    for (uint32_t i = offset; i < offset + bytes; i++) {
        if (!known_to_self(cta.write_epoch[i]))
            fail("a plain write to shared offset %u is not ordered after the write by %s", i, describe_epoch(cta.write_epoch[i]).c_str());
        cta.granules[i / 16].written |= (uint16_t)(1u << (i % 16));
    }
    std::fill_n(cta.write_epoch.begin() + offset, bytes, self->now());
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
        if (!known_to_self(cta.write_epoch[i]))
            fail("a plain read of shared offset %u is not ordered after the write by %s", i, describe_epoch(cta.write_epoch[i]).c_str());
    }
    for (uint32_t i = offset / 16; i <= (offset + bytes - 1) / 16; i++)
        note_read(cta.granules[i].reads, self->now(), bytes_of(i, offset, bytes));
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
    if (!known_to_self(cta.write_epoch[offset]))
        fail("%s reads shared offset %u: not ordered after the write by %s", what, offset, describe_epoch(cta.write_epoch[offset]).c_str());
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
    if (Epoch e = unknown_read(g.reads, 0xffff))
        fail("%s overwrites shared offset %u of block %u: not ordered after a read by %s", what, offset, cta.block, describe_epoch(e).c_str());
    if (!known_to_self(cta.write_epoch[offset]))
        fail("%s overwrites shared offset %u of block %u: not ordered after the write by %s", what, offset, cta.block,
             describe_epoch(cta.write_epoch[offset]).c_str());
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

void global_read_bytes(const void *p, void *out, size_t bytes, bool atomic)
{
    Allocation &a = require_allocation(p, bytes, "a read");
    const size_t at = (size_t)(static_cast<const uint8_t *>(p) - a.base);
    if (const void *hole = memchr(a.written.data() + at, 0, bytes))
        fail("a read of %s+%zu, which was never written", a.name.c_str(), (size_t)(static_cast<const uint8_t *>(hole) - a.written.data()));
    if (!atomic) {
        require_known_writes(a, p, bytes, "a read");
        for (size_t i = at / 16; i <= (at + bytes - 1) / 16; i++)
            note_read(a.reads[i], self->now(), bytes_of(i, at, bytes));
    }
    memcpy(out, p, bytes);
}

void memory_read(const void *p, void *out, size_t bytes)
{
    step();
    uint32_t offset;
    if (in_shared(p, offset))
        shared_plain_read(*self->cta, offset, out, (uint32_t)bytes);
    else
        global_read_bytes(p, out, bytes, false);
}

void memory_write(void *p, const void *in, size_t bytes)
{
    step();
    uint32_t offset;
    if (in_shared(p, offset)) {
        shared_plain_write(*self->cta, offset, in, (uint32_t)bytes);
        return;
    }
    global_plain_write(require_allocation(p, bytes, "a write"), p, bytes);
    memcpy(p, in, bytes);
    wake(machine->pollers);
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

void store_shared_b64(uint32_t addr, uint32_t x, uint32_t y)
{
    step();
    const Place place = resolve(addr, 8, "store_shared_b64");
    const uint32_t both[2] = {x, y};
    if (addr % 8)
        fail("store_shared_b64 to address %08x: not a multiple of 8", addr);
    shared_plain_write(*place.cta, place.offset, both, 8);
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

void load_matrix_x4(uint32_t addr, uint32_t (&r)[4])
{
    step();
    if (addr % 16)
        fail("load_matrix_x4 from address %08x: not a multiple of 16", addr);
    Warp &warp = own_warp();
    const Vec4 row = load_shared_b128(addr);  /* lane i reads row i%8 of matrix i/8 */
    memcpy(warp.matrix[self->lane()], &row, 16);
    warp_rendezvous("load_matrix_x4", [](Warp &) {});
    for (uint32_t m = 0; m < 4; m++)
        r[m] = warp.matrix[8 * m + self->lane() / 4][self->lane() % 4];
    warp_rendezvous("load_matrix_x4", [](Warp &) {});
}

/* As late as can be: when it is waited for. */
void copy_async_b128(uint32_t dst, const void *src, bool there)
{
    step();
    if (dst % 16 || reinterpret_cast<uintptr_t>(src) % 16)
        fail("copy_async_b128 from %p to address %08x: not multiples of 16", src, dst);
    self->copies.push_back({dst, there ? src : nullptr});
}

void copy_async_wait()
{
    step();
    for (const Thread::Copy &c : self->copies)
        store_shared_b128(c.dst, c.src ? load(static_cast<const Vec4 *>(c.src)) : Vec4{0, 0, 0, 0});
    self->copies.clear();
}

void fence_proxy_async() { step(); self->shared_fence = self->global_fence = machine->stamp++; publish_mbarriers(); }
void fence_proxy_async_global() { step(); self->global_fence = machine->stamp++; }
void fence_proxy_async_shared_cta() { step(); self->shared_fence = machine->stamp++; publish_mbarriers(); }
void note_written(const void *p, uint64_t bytes) { emu::mark_written(p, bytes); }

} /* namespace mk */
