/* Tensor memory: who may use which of it, and what warps do with it. Allocation, loads, stores, fences.
 *
 * Across threads it needs fences: accesses are judged by what the thread knew at its last fence_after_sync, and reads and stores become part
 * of what it publishes with its next fence_before_sync. */
#include "emu/tcgen05.h"
#include "emu/tensor.h"

#include <math.h>

namespace emu {

/* ---- who and where ---- */

TensorMemory &memory_of(Cta &cta)
{
    if (!cta.tensor_memory)
        cta.tensor_memory = std::make_shared<TensorMemory>();
    return *cta.tensor_memory;
}

TensorAccesses &own_accesses()
{
    if (!self->tensor)
        self->tensor = std::make_shared<TensorAccesses>();
    return *self->tensor;
}

/* For the length of a scope, the running thread knows only what it knew at its last fence. */
struct FencedView {
    FencedView() { std::swap(self->clock, own_accesses().clock); }
    ~FencedView() { std::swap(self->clock, own_accesses().clock); }
};
static bool known_at_fence(Epoch e)
{
    FencedView fenced;
    return known_to_self(e);
}

Cta &pair_cta(uint32_t r, const char *what)
{
    Cluster &cluster = *self->cta->cluster;
    const uint32_t rank = (self->cta->rank & ~1u) + r;
    if (rank >= cluster.ctas.size())
        fail("%s: block %u has no other CTA to pair with", what, self->cta->block);
    Cta &cta = *cluster.ctas[rank];
    if (cta.gone)
        fail("%s: block %u of the pair has ended", what, cta.block);
    return cta;
}

void split(uint32_t address, uint32_t &lane, uint32_t &column)
{
    lane = address >> 16;
    column = address & 0xffff;
}

TensorCell &allocated_cell(Cta &cta, uint32_t lane, uint32_t column, const char *what)
{
    if (lane >= kTensorLanes || column >= kTensorColumns)
        fail("%s: lane %u, column %u is no place in tensor memory", what, lane, column);
    TensorCell &cell = memory_of(cta).cell(lane, column);
    if (!cell.allocated)
        fail("%s: column %u of block %u's tensor memory is not allocated", what, column, cta.block);
    return cell;
}

void require_ordered(Epoch e, const char *what, const char *after, uint32_t lane, uint32_t column)
{
    if (known_at_fence(e))
        return;
    if (known_to_self(e))
        fail("%s of tensor memory, lane %u, column %u, without tcgen05_fence_after_sync since the thread learned of the %s", what, lane, column, after);
    fail("%s of tensor memory, lane %u, column %u, is not ordered after the %s by %s", what, lane, column, after, describe_epoch(e).c_str());
}

void check_overwrite(TensorCell &cell, const char *what, uint32_t lane, uint32_t column, bool same_unit)
{
    if (cell.loads)
        fail("%s overwrites tensor memory, lane %u, column %u, from which a load is under way (no tmem_wait_load)", what, lane, column);
    if (cell.unfenced && (same_unit || cell.unfenced_warp != self->warp()))
        fail("%s overwrites tensor memory, lane %u, column %u, that was read without a tcgen05_fence_before_sync behind it", what, lane, column);
    const Epoch unit = make_epoch(self->cta->number, kMemberTensor, 0);
    const Epoch mask = ~(Epoch)0xfffffff;
    for (const Reads::Read &r : cell.reads.list)
        if (!(same_unit && (r.by & mask) == unit))
            require_ordered(r.by, what, "read", lane, column);
    cell.reads.list.clear();
    if (cell.write && !(same_unit && (cell.write & mask) == unit))
        require_ordered(cell.write, what, "write", lane, column);
}

/* ---- allocation ---- */

void tmem_allocate(uint32_t to, uint32_t columns)
{
    step();
    const char *what = "tmem_allocate_pair";
    pair_cta(0, what), pair_cta(1, what);
    Cta &cta = *self->cta;
    warp_rendezvous("tmem_allocate_pair", [](Warp &) {});
    if (self->lane() != 0) {
        warp_rendezvous("tmem_allocate_pair, done", [](Warp &) {});
        return;
    }
    TensorMemory &m = memory_of(cta);
    if (columns < 32 || columns > kTensorColumns || (columns & (columns - 1)))
        fail("%s of %u columns: a power of two, 32 to 512", what, columns);
    if (m.relinquished)
        fail("%s: block %u has given up its right to allocate", what, cta.block);
    if (m.last_size && columns > m.last_size)
        fail("%s of %u columns after one of %u: sizes must not grow", what, columns, m.last_size);
    std::vector<uint32_t> fits;
    for (uint32_t first = 0; first + columns <= kTensorColumns; first += columns) {
        bool free = true;
        for (auto &b : m.blocks)
            free = free && (b.first + b.second <= first || b.first >= first + columns);
        if (free)
            fits.push_back(first);
    }
    if (fits.empty())
        fail("%s of %u columns: nothing is left, and it would wait for ever", what, columns);
    /* Both CTAs get the same place: rank 0 of the pair draws, or finds what the other drew. */
    const uint32_t first = fits[machine->seed % fits.size()];
    m.blocks[first] = m.last_size = columns;
    for (uint32_t group = 0; group < kTensorLanes / kLaneGroup; group++)
        for (uint32_t c = first; c < first + columns; c++) {
            TensorCell fresh;
            fresh.allocated = true;
            m.cell(group * kLaneGroup, c) = fresh;
        }
    const Place place = resolve(to, 4, what);
    shared_plain_write(*place.cta, place.offset, &first, 4);
    std::fill_n(place.cta->write_epoch.begin() + place.offset, 4, kUnobserved);  /* until the fence */
    own_accesses().allocations.push_back({place.cta, place.offset});
    warp_rendezvous("tmem_allocate_pair, done", [](Warp &) {});
}

void tmem_release(uint32_t address, uint32_t columns)
{
    step();
    const char *what = "tmem_release_pair";
    warp_rendezvous("tmem_release_pair", [](Warp &) {});
    Cta &cta = *self->cta;
    TensorMemory &m = memory_of(cta);
    if (self->lane() == 0) {
        auto block = m.blocks.find(address);
        if (block == m.blocks.end() || block->second != columns)
            fail("%s of %u columns at %08x: not what was allocated", what, columns, address);
        if (tensor_operations_on(cta))
            fail("%s: MMAs or copies of block %u are under way or not committed", what, cta.block);
        for (uint32_t group = 0; group < kTensorLanes / kLaneGroup; group++)
            for (uint32_t c = address; c < address + columns; c++) {
                TensorCell &cell = m.cell(group * kLaneGroup, c);
                if (cell.loads)
                    fail("%s: a load from column %u is under way", what, c);
                if (cell.write && !known_to_self(cell.write))
                    fail("%s: column %u: not ordered after the write by %s", what, c, describe_epoch(cell.write).c_str());
                if (Epoch e = unknown_read(cell.reads, 0xffff))
                    fail("%s: column %u: not ordered after a read by %s", what, c, describe_epoch(e).c_str());
                cell = TensorCell();
            }
        m.blocks.erase(block);
    }
    warp_rendezvous("tmem_release_pair, done", [](Warp &) {});
}

/* ---- warps and tensor memory ---- */

/* The running lane's registers of 16 lanes x so many columns. */
template <class Visit> static void for_each_register(uint32_t first_lane, uint32_t first_column, uint32_t columns, Visit visit)
{
    const uint32_t l = self->lane();
    for (uint32_t i = 0; i < columns / 2; i++)
        visit(i, first_lane + l / 4 + 8 * (i % 4 / 2), first_column + 8 * (i / 4) + 2 * (l % 4) + i % 2);
}

static void check_reach(uint32_t address, const char *what, uint32_t &lane, uint32_t &column)
{
    split(address, lane, column);
    const uint32_t own = 32 * (self->warp() % 4);
    if (lane != own && lane != own + 16)
        fail("%s at lane %u by warp %u, which reaches lanes %u to %u", what, lane, self->warp(), own, own + 31);
}

void tmem_load(uint32_t address, uint32_t columns, float *to)
{
    step();
    const char *what = "tmem_load";
    uint32_t lane, column;
    check_reach(address, what, lane, column);
    warp_rendezvous(what, [](Warp &) {});
    TensorAccesses &own = own_accesses();
    for (uint32_t c = column + 2 * (self->lane() % 4); c < column + columns; c += c % 2 ? 7 : 1) {
        TensorCell &cell = allocated_cell(*self->cta, lane, c, what);
        if (!cell.written)
            fail("%s from lane %u, column %u, which was never written", what, lane, c);
        require_ordered(cell.write, what, "write", lane, c);
        cell.loads++;
    }
    std::fill_n(to, columns / 2, NAN);  /* until tmem_wait_load */
    own.loads.push_back({to, self->cta, lane, column, columns});
}

void tmem_wait_loads()
{
    step();
    warp_rendezvous("tmem_wait_load", [](Warp &) {});
    TensorAccesses &own = own_accesses();
    for (TensorAccesses::Load &load : own.loads) {
        TensorMemory &m = memory_of(*load.cta);
        for_each_register(load.lane, load.column, load.columns, [&](uint32_t i, uint32_t lane, uint32_t column) { load.to[i] = m.at(lane, column); });
        for (uint32_t c = load.column + 2 * (self->lane() % 4); c < load.column + load.columns; c += c % 2 ? 7 : 1) {
            TensorCell &cell = m.cell(load.lane, c);
            cell.loads--;
            cell.unfenced++;
            cell.unfenced_warp = self->warp();
            own.unfenced.push_back(&cell);
        }
    }
    own.loads.clear();
}

} /* namespace emu */

namespace mk {
using namespace emu;

void tmem_relinquish_pair()
{
    step();
    warp_rendezvous("tmem_relinquish_pair", [](Warp &) {});
    memory_of(*self->cta).relinquished = true;
}

void tmem_store_16x64(uint32_t address, const float (&r)[32])
{
    step();
    const char *what = "tmem_store";
    uint32_t lane, column;
    check_reach(address, what, lane, column);
    warp_rendezvous(what, [](Warp &) {});
    TensorAccesses &own = own_accesses();
    TensorMemory &m = memory_of(*self->cta);
    if (self->lane() == 0)
        for (uint32_t c = column; c < column + 64; c++) {
            TensorCell &cell = allocated_cell(*self->cta, lane, c, what);
            check_overwrite(cell, what, lane, c, false);
            cell.written = true;
            cell.write = kUnobserved;  /* until waited for */
            own.stores.push_back(&cell);
        }
    for_each_register(lane, column, 64, [&](uint32_t i, uint32_t at_lane, uint32_t at_column) { m.at(at_lane, at_column) = r[i]; });
    warp_rendezvous("tmem_store, done", [](Warp &) {});
}

void tmem_wait_store()
{
    step();
    warp_rendezvous("tmem_wait_store", [](Warp &) {});
    own_accesses().waited = own_accesses().stores.size();
}

/* Reads and waited-for writes become part of what the thread's next release publishes. */
void tcgen05_fence_before_sync()
{
    step();
    TensorAccesses &own = own_accesses();
    if (!own.loads.empty())
        fail("tcgen05_fence_before_sync with loads under way: tmem_wait_load comes first");
    if (own.waited < own.stores.size())
        fail("tcgen05_fence_before_sync with stores under way: tmem_wait_store comes first");
    for (TensorCell *cell : own.unfenced) {
        cell->unfenced--;
        note_read(cell->reads, self->now(), 0xffff);
    }
    own.unfenced.clear();
    for (TensorCell *cell : own.stores)
        cell->write = self->now();
    own.stores.clear();
    own.waited = 0;
    for (auto &word : own.allocations)
        std::fill_n(word.first->write_epoch.begin() + word.second, 4, self->now());
    own.allocations.clear();
}

void tcgen05_fence_after_sync()
{
    step();
    own_accesses().clock = self->clock;
}

} /* namespace mk */
