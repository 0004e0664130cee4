/* Bulk and tensor copies. Each is a list of 16-byte pieces, and two steps at moments of the scheduler's choice: read the
 * source, write the destination (and count on the mbarrier, or in the bulk group). */
#include "emu/machine.h"
#include "emu/tensor_map.h"

#include <algorithm>

namespace emu {

struct Piece {
    uint8_t *global;    /* null: a load writes zeros, a store writes nothing */
    uint32_t offset;    /* in shared memory */
    uint32_t valid;     /* bytes of the 16 that lie inside the tensor */
};

/* 16 bytes have landed in shared memory, in the current phase of `bar`: whoever sees that phase complete may read them. */
static void landed(Cta &cta, uint32_t offset, const Mbarrier &bar)
{
    std::fill_n(cta.write_epoch.begin() + offset, 16, make_epoch(bar.cta->number, bar.member, (uint32_t)bar.phase + 1));
}

/* ---- loads ---- */

struct LoadOp : AsyncOp {
    const char *what = "";
    std::vector<Piece> pieces;
    std::vector<uint8_t> data;
    std::vector<uint16_t> written;
    std::vector<Cta *> targets;
    std::vector<Mbarrier *> bars;
    bool have_data = false;

    void read()
    {
        data.assign(pieces.size() * 16, 0);
        written.assign(pieces.size(), 0xffff);
        for (size_t i = 0; i < pieces.size(); i++) {
            const Piece &p = pieces[i];
            if (!p.global || !p.valid)
                continue;
            memcpy(&data[i * 16], p.global, p.valid);
            if (const Allocation *a = find_allocation(p.global, p.valid))
                for (uint32_t b = 0; b < p.valid; b++)
                    if (!a->written[(size_t)(p.global - a->base) + b])
                        written[i] &= (uint16_t)~(1u << b);
        }
        have_data = true;
    }

    bool advance() override
    {
        if (!have_data) {
            read();
            return false;
        }
        for (size_t t = 0; t < targets.size(); t++) {
            Cta &cta = *targets[t];
            for (size_t i = 0; i < pieces.size(); i++) {
                Granule &g = cta.granules[pieces[i].offset / 16];
                memcpy(cta.shared + pieces[i].offset, &data[i * 16], 16);
                g.written = written[i];
                g.async_writes--;
                g.stamp = 0;
                landed(cta, pieces[i].offset, *bars[t]);
            }
            mbarrier_complete_tx(*bars[t], (uint32_t)pieces.size() * 16);
        }
        return true;
    }
};

/* Accepts the load: its targets are those CTAs of the cluster whose bit is set. */
static void issue_load(const char *what, std::shared_ptr<LoadOp> op, const Place &bar, uint32_t cta_mask, bool pair = false)
{
    op->what = what;
    const Mbarrier &own_bar = mbarrier_at(bar, what);
    if (!own_bar.published)
        fail("%s: its mbarrier was initialised, but neither fence_mbar_init nor a proxy fence has told the copy engine", what);
    for (const Piece &p : op->pieces)
        if (p.global) {
            Allocation &a = require_allocation(p.global, p.valid, what);
            check_global_proxy(a, p.global, p.valid, what);
            global_async_read(a, p.global, p.valid, own_bar, *bar.cta, what);
        }
    Cluster &cluster = *self->cta->cluster;
    for (uint32_t r = 0; r < cluster.ctas.size(); r++) {
        if (!(cta_mask >> r & 1))
            continue;
        Cta &cta = *cluster.ctas[r];
        if (cta.gone)
            fail("%s into block %u, which has ended", what, cta.block);
        op->targets.push_back(&cta);
        op->bars.push_back(&mbarrier_at({pair ? cluster.ctas[(r & ~1u) | (bar.cta->rank & 1)].get() : &cta, bar.offset}, what));
        for (const Piece &p : op->pieces)
            begin_async_write(cta, p.offset, what);
    }
    if (cta_mask >> cluster.ctas.size())
        fail("%s: mask %x names a CTA outside the cluster of %zu", what, cta_mask, cluster.ctas.size());
    if (machine->random.below(2) == 0)
        op->read();  /* the source may be read at once, or late */
    submit(op);
}

/* ---- stores ---- */

struct StoreOp : AsyncOp {
    const char *what = "";
    std::vector<Piece> pieces;
    std::vector<uint8_t> data;
    std::vector<uint16_t> written;
    BulkGroup *group = nullptr;   /* null until committed; its thread keeps it until all its stores are done */
    Cta *cta = nullptr;
    bool have_data = false, done = false, observed = false, add_f32 = false;

    bool advance() override
    {
        if (!have_data) {
            for (const Piece &p : pieces) {
                data.insert(data.end(), cta->shared + p.offset, cta->shared + p.offset + 16);
                written.push_back(cta->granules[p.offset / 16].written);
            }
            have_data = true;
            if (group)
                group->reads--;
            wake(machine->store_owners);
            return false;
        }
        for (size_t i = 0; i < pieces.size(); i++)
            write(pieces[i], &data[i * 16], written[i]);
        done = true;
        if (group)
            group->writes--;
        wake(machine->pollers);
        wake(machine->store_owners);
        return true;
    }

    void write(const Piece &p, const uint8_t *from, uint16_t mask)
    {
        if (!p.valid)
            return;
        Allocation *a = find_allocation(p.global, p.valid);
        if (!a)
            return;
        const size_t at = (size_t)(p.global - a->base);
        if (add_f32) {
            for (uint32_t j = 0; j < p.valid / 4; j++) {
                float x, y;
                memcpy(&x, p.global + 4 * j, 4);
                memcpy(&y, from + 4 * j, 4);
                x += y;
                memcpy(p.global + 4 * j, &x, 4);
            }
            return;
        }
        memcpy(p.global, from, p.valid);
        for (uint32_t b = 0; b < p.valid; b++)
            a->written[at + b] = mask >> b & 1;
    }
};

static void issue_store(const char *what, std::shared_ptr<StoreOp> op)
{
    op->what = what;
    op->cta = self->cta;
    for (const Piece &p : op->pieces) {
        begin_async_read(*self->cta, p.offset, what);
        if (p.valid)
            global_async_write(require_allocation(p.global, p.valid, what), p.global, p.valid, what);
    }
    self->open_stores.push_back(op);
    submit(op);
}

static size_t groups_to_wait(const Thread &t)
{
    return t.groups.size() > t.wait_value / 2 ? t.groups.size() - (size_t)(t.wait_value / 2) : 0;
}

static bool groups_done(Thread &t)
{
    const bool read_only = t.wait_value & 1;
    for (size_t i = 0; i < groups_to_wait(t); i++)
        if (t.groups[i]->reads || (!read_only && t.groups[i]->writes))
            return false;
    return true;
}

/* The running thread has waited: its store's source is free, and (unless read_only) what it wrote counts as written by the thread. */
static void observe(StoreOp &op, bool read_only)
{
    for (const Piece &p : op.pieces) {
        if (!op.observed) {
            end_async_read(*op.cta, p.offset);
            note_read(op.cta->granules[p.offset / 16].reads, self->now(), 0xffff);
        }
        if (!read_only && p.valid)
            global_async_write_observed(p.global, p.valid);
    }
    op.observed = true;
}

void bulk_wait_groups(int newer, bool read_only)
{
    step();
    Thread &t = *self;
    block(machine->store_owners, groups_done, read_only ? "its bulk stores to read their source" : "its bulk stores to complete", nullptr,
          (uint64_t)newer * 2 + read_only);
    const size_t count = t.groups.size() > (size_t)newer ? t.groups.size() - (size_t)newer : 0;
    for (size_t i = 0; i < count; i++)
        for (auto &op : t.groups[i]->ops) {
            observe(*op, read_only);
        }
    if (!read_only)
        t.groups.erase(t.groups.begin(), t.groups.begin() + (long)count);
}

/* ---- tensor boxes ---- */

/* The box at coordinates c as pieces; `shared` is where it lies in shared memory. */
static std::vector<Piece> box_pieces(const char *what, const mk_tensor_map *opaque, const int32_t (&c)[3], uint32_t rank, const Place &shared)
{
    if (find_allocation(opaque, sizeof *opaque)) {
        const auto acquired = self->cta->acquired_maps.find(opaque);
        if (acquired == self->cta->acquired_maps.end())
            fail("%s: the map lies in global memory, and this CTA has not acquired it with fence_tensor_map_acquire", what);
        opaque = &acquired->second;
    }
    const TensorMap &map = *reinterpret_cast<const TensorMap *>(opaque);
    if (map.magic != kTensorMapMagic || map.rank != rank)
        fail("%s: not a tensor map of rank %u", what, rank);
    const uint32_t inner = map.box[0] * map.element_bytes;
    const uint32_t pitch = map.swizzle == MK_SWIZZLE_128B ? 128 : inner;
    const uint32_t rows = map.box[1] * map.box[2];
    const uint32_t alignment = map.swizzle == MK_SWIZZLE_128B && rows > 1 ? 1024 : 128;
    if (shared_address(shared.offset) % alignment)
        fail("%s: shared offset %u is not a multiple of %u", what, shared.offset, alignment);
    resolve(shared_address(shared.offset), rows * pitch, what);
    std::vector<Piece> pieces;
    for (uint32_t r = 0; r < rows; r++) {
        const int64_t y = (int64_t)c[1] + r % map.box[1], z = (int64_t)c[2] + r / map.box[1];
        const bool row_inside = y >= 0 && y < (int64_t)map.dim[1] && z >= 0 && z < (int64_t)map.dim[2];
        for (uint32_t b = 0; b < inner; b += 16) {
            const int64_t x = (int64_t)c[0] * map.element_bytes + b, end = (int64_t)map.dim[0] * map.element_bytes;
            Piece p = {nullptr, 0, 0};
            p.offset = swizzle_address(shared_address(shared.offset) + r * pitch + b, (int)map.swizzle) - kSharedBase;
            if (row_inside && x >= 0 && x < end) {
                p.global = reinterpret_cast<uint8_t *>(map.address) + z * (int64_t)map.stride_bytes[1] + y * (int64_t)map.stride_bytes[0] + x;
                p.valid = (uint32_t)std::min<int64_t>(16, end - x);
            }
            pieces.push_back(p);
        }
    }
    return pieces;
}

static void tensor_load(const char *what, uint32_t dst, const mk_tensor_map *map, const int32_t (&c)[3], uint32_t rank, uint32_t bar, uint32_t mask,
                        bool pair = false)
{
    step();
    auto op = std::make_shared<LoadOp>();
    const Place place = resolve(dst, 16, what);
    if (place.cta != self->cta)
        fail("%s: the destination is given as an address of this CTA, also with multicast", what);
    op->pieces = box_pieces(what, map, c, rank, place);
    const Place at = resolve(bar, 8, what);
    if (at.cta->rank / (pair ? 2 : 1) != self->cta->rank / (pair ? 2 : 1))
        fail("%s of block %u: its mbarrier lies in block %u, which is not its %s", what, self->cta->block, at.cta->block, pair ? "pair" : "own");
    issue_load(what, op, at, mask, pair);
}

static std::vector<Piece> linear_pieces(const char *what, void *global, uint32_t shared, uint32_t bytes)
{
    if ((uintptr_t)global % 16 || shared % 16 || bytes % 16 || bytes == 0)
        fail("%s: global %p, shared %08x, %u bytes: all must be multiples of 16", what, global, shared, bytes);
    const Place place = resolve(shared, bytes, what);
    if (place.cta != self->cta)
        fail("%s: another CTA's shared memory", what);
    std::vector<Piece> pieces;
    for (uint32_t b = 0; b < bytes; b += 16)
        pieces.push_back({static_cast<uint8_t *>(global) + b, place.offset + b, 16});
    return pieces;
}

/* ---- st.async ---- */

struct StAsyncOp : AsyncOp {
    Place dst;
    Mbarrier *bar = nullptr;
    mk::Vec4 value;
    bool advance() override
    {
        Granule &g = dst.cta->granules[dst.offset / 16];
        memcpy(dst.cta->shared + dst.offset, &value, 16);
        g.written = 0xffff;
        g.async_writes--;
        g.stamp = 0;
        landed(*dst.cta, dst.offset, *bar);
        mbarrier_complete_tx(*bar, 16);
        return true;
    }
};

} /* namespace emu */

namespace mk {
using namespace emu;

void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
    step();
    auto op = std::make_shared<LoadOp>();
    op->pieces = linear_pieces("bulk_load", const_cast<void *>(src), dst, bytes);
    issue_load("bulk_load", op, resolve(bar, 8, "bulk_load"), 1u << self->cta->rank);
}

void bulk_store(void *dst, uint32_t src, uint32_t bytes)
{
    step();
    auto op = std::make_shared<StoreOp>();
    op->pieces = linear_pieces("bulk_store", dst, src, bytes);
    issue_store("bulk_store", op);
}

void bulk_store_add_f32(float *dst, uint32_t src, uint32_t bytes)
{
    step();
    auto op = std::make_shared<StoreOp>();
    op->pieces = linear_pieces("bulk_store_add_f32", dst, src, bytes);
    op->add_f32 = true;
    issue_store("bulk_store_add_f32", op);
}

void bulk_commit()
{
    step();
    auto group = std::make_shared<BulkGroup>();
    group->ops.swap(self->open_stores);
    for (auto &op : group->ops) {
        op->group = group.get();
        group->reads += !op->have_data;
        group->writes += !op->done;
    }
    self->groups.push_back(group);
}

void store_async_b128(uint32_t cluster_dst, Vec4 v, uint32_t cluster_bar)
{
    step();
    auto op = std::make_shared<StAsyncOp>();
    op->dst = resolve(cluster_dst, 16, "store_async_b128");
    const Place bar = resolve(cluster_bar, 8, "store_async_b128");
    if (op->dst.offset % 16 || bar.cta != op->dst.cta)
        fail("store_async_b128: destination not a multiple of 16, or its mbarrier in another CTA");
    op->bar = &mbarrier_at(bar, "store_async_b128");
    op->value = v;
    begin_async_write(*op->dst.cta, op->dst.offset, "store_async_b128");
    submit(op);
}

void tma_load_2d(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t bar)
{ tensor_load("tma_load_2d", dst, map, {c0, c1, 0}, 2, bar, 1u << self->cta->rank); }
void tma_load_3d(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, int32_t c2, uint32_t bar)
{ tensor_load("tma_load_3d", dst, map, {c0, c1, c2}, 3, bar, 1u << self->cta->rank); }
void tma_load_2d_multicast(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t bar, uint16_t cta_mask)
{ tensor_load("tma_load_2d_multicast", dst, map, {c0, c1, 0}, 2, bar, cta_mask); }
void tma_load_3d_multicast(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, int32_t c2, uint32_t bar, uint16_t cta_mask)
{ tensor_load("tma_load_3d_multicast", dst, map, {c0, c1, c2}, 3, bar, cta_mask); }

void tma_load_2d_pair(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t bar)
{ tensor_load("tma_load_2d_pair", dst, map, {c0, c1, 0}, 2, bar, 1u << self->cta->rank, true); }
void tma_load_3d_pair(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, int32_t c2, uint32_t bar)
{ tensor_load("tma_load_3d_pair", dst, map, {c0, c1, c2}, 3, bar, 1u << self->cta->rank, true); }
void tma_load_2d_pair_multicast(uint32_t dst, const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t bar, uint16_t cta_mask)
{ tensor_load("tma_load_2d_pair_multicast", dst, map, {c0, c1, 0}, 2, bar, cta_mask, true); }

void tensor_map_set_address(uint32_t map, const void *address)
{
    step();
    const Place place = resolve(map, sizeof(mk_tensor_map), "tensor_map_set_address");
    TensorMap m;
    memory_read(place.cta->shared + place.offset, &m, sizeof m);
    if (m.magic != kTensorMapMagic || place.offset % 64 || (uintptr_t)address % 16)
        fail("tensor_map_set_address: no tensor map at shared offset %u, or a tensor at %p", place.offset, address);
    m.address = (uint64_t)(uintptr_t)address;
    memory_write(place.cta->shared + place.offset, &m, sizeof m);
}

void tensor_map_store_release_gpu(mk_tensor_map *to, uint32_t map)
{
    step();
    const Place place = resolve(map, sizeof(mk_tensor_map), "tensor_map_store_release_gpu");
    struct { TensorMap map; uint8_t rest[sizeof(mk_tensor_map) - sizeof(TensorMap)]; } m;
    memory_read(place.cta->shared + place.offset, &m, sizeof m); /* any lane may copy */
    warp_rendezvous("tensor_map_store_release_gpu", [](Warp &) {});
    if (self->lane() != 0)
        return;
    if (m.map.magic != kTensorMapMagic || (uintptr_t)to % 128)
        fail("tensor_map_store_release_gpu: no tensor map at shared offset %u, or a destination (%p) that is no multiple of 128", place.offset, static_cast<void *>(to));
    memory_write(to, &m, sizeof m);
}

static void acquire_tensor_map(const mk_tensor_map *map)
{
    mk_tensor_map m;
    memory_read(map, &m, sizeof m);
    self->cta->acquired_maps[map] = m;
}
void fence_tensor_map_acquire_sys(const mk_tensor_map *map) { acquire_tensor_map(map); }
void fence_tensor_map_acquire_gpu(const mk_tensor_map *map) { acquire_tensor_map(map); }

void tma_store_2d(const mk_tensor_map *map, int32_t c0, int32_t c1, uint32_t src)
{
    step();
    auto op = std::make_shared<StoreOp>();
    op->pieces = box_pieces("tma_store_2d", map, {c0, c1, 0}, 2, resolve(src, 16, "tma_store_2d"));
    issue_store("tma_store_2d", op);
}

} /* namespace mk */
