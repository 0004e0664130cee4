/* tcgen05 over a pair of CTAs: MMAs that fetch both CTAs' shared memory through the bits of their descriptors and write both CTAs'
 * tensor memory, scale copies, commits, and what warps do with tensor memory. Operations of one thread happen late and in order.
 *
 * Arithmetic as in wgmma.cpp: fp32, one fused multiply-add for each contraction index, ascending; an MX element is taken times its scale, which
 * is exact.
 *
 * Order: an operation has an epoch of its own, which a commit adds to its mbarriers' phases. So an access to what an MMA has written, or is
 * reading, is reported unless the thread has waited for a commit behind it, whatever the timing. Across threads tensor memory needs fences
 * too: its accesses are judged by what the thread knew at its last fence_after_sync. A commit passes on what its thread knew, too,
 * which is more than the manual says and what every GEMM's ring of stages relies on. */
#include "emu/tensor.h"

#include <math.h>

namespace emu {

/* ---- who and where ---- */

static TensorMemory &memory_of(Cta &cta)
{
    if (!cta.tensor_memory)
        cta.tensor_memory = std::make_shared<TensorMemory>();
    return *cta.tensor_memory;
}

static TensorAccesses &own_accesses()
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

static Cta &pair_cta(uint32_t r, const char *what)
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

static void split(uint32_t address, uint32_t &lane, uint32_t &column)
{
    lane = address >> 16;
    column = address & 0xffff;
}

static TensorCell &allocated_cell(Cta &cta, uint32_t lane, uint32_t column, const char *what)
{
    if (lane >= kTensorLanes || column >= kTensorColumns)
        fail("%s: lane %u, column %u is no place in tensor memory", what, lane, column);
    TensorCell &cell = memory_of(cta).cell(lane, column);
    if (!cell.allocated)
        fail("%s: column %u of block %u's tensor memory is not allocated", what, column, cta.block);
    return cell;
}

static void require_ordered(Epoch e, const char *what, const char *after, uint32_t lane, uint32_t column)
{
    if (known_at_fence(e))
        return;
    if (known_to_self(e))
        fail("%s of tensor memory, lane %u, column %u, without tcgen05_fence_after_sync since the thread learned of the %s", what, lane, column, after);
    fail("%s of tensor memory, lane %u, column %u, is not ordered after the %s by %s", what, lane, column, after, describe_epoch(e).c_str());
}

/* Before anybody overwrites a cell. `same_unit`: MMAs and copies of one thread are in order among themselves. */
static void check_overwrite(TensorCell &cell, const char *what, uint32_t lane, uint32_t column, bool same_unit)
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

/* ---- operations under way ---- */

static TensorUnit &own_unit(const char *what)
{
    Cta &cta = *self->cta;
    if (cta.threads.size() >= kMemberTensor)
        fail("%s in a block of %zu threads: the emulator follows fewer than %u", what, cta.threads.size(), kMemberTensor);
    if (!cta.tensor_unit)
        cta.tensor_unit = std::make_shared<TensorUnit>();
    TensorUnit &unit = *cta.tensor_unit;
    if (unit.issuer && unit.issuer != self)
        fail("%s: warp %u, lane %u issues tcgen05 operations too; a commit follows those of its own thread only", what, unit.issuer->warp(), unit.issuer->lane());
    unit.issuer = self;
    return unit;
}

/* One of these is pending for each operation; whichever the scheduler picks, the oldest of the unit is done. */
struct TensorStep : AsyncOp {
    std::shared_ptr<TensorUnit> unit;
    bool advance() override
    {
        std::shared_ptr<TensorOp> op = unit->ops.front();
        unit->ops.pop_front();
        op->execute();
        unit->uncommitted.insert(unit->uncommitted.end(), op->granules.begin(), op->granules.end());
        return true;
    }
};

static Epoch begin_operation(TensorUnit &unit) { return make_epoch(self->cta->number, kMemberTensor, ++unit.issued); }

static void enqueue(TensorUnit &unit, std::shared_ptr<TensorOp> op)
{
    unit.ops.push_back(op);
    auto pending = std::make_shared<TensorStep>();
    pending->unit = self->cta->tensor_unit;
    submit(pending);
}

uint32_t tensor_operations_on(const Cta &cta)
{
    uint32_t count = 0;
    for (auto &other : cta.cluster->ctas)
        if (other->tensor_unit) {
            for (auto &op : other->tensor_unit->ops)
                for (Cta *c : op->ctas)
                    count += c == &cta;
            for (auto &g : other->tensor_unit->uncommitted)
                count += g.first == &cta;
        }
    return count;
}

/* The operation reads 16 bytes of a CTA's shared memory until a commit has been waited for. */
static void read_granule(TensorOp &op, Cta &cta, uint32_t address, Epoch epoch, const char *what)
{
    const uint32_t offset = address - kSharedBase;
    if (address < kSharedBase || offset + 16 > cta.shared_bytes)
        fail("%s: 16 bytes at shared offset %d are outside the %u bytes of block %u", what, (int)offset, cta.shared_bytes, cta.block);
    begin_async_read(cta, offset, what);
    note_read(cta.granules[offset / 16].reads, epoch, 0xffff);
    op.granules.push_back({&cta, offset});
}

/* ---- operands ---- */

/* Address of the 16 bytes from (mn, k) on. See the manual's canonical layouts. */
static uint32_t piece_address(uint64_t d, bool mn_major, uint32_t element_bytes, uint32_t mn, uint32_t k)
{
    const uint32_t start = (uint32_t)(d & 0x3fff) << 4, leading = (uint32_t)(d >> 16 & 0x3fff) << 4, stride = (uint32_t)(d >> 32 & 0x3fff) << 4;
    const uint32_t code = (uint32_t)(d >> 61);  /* 0 none, 2 = 128, 4 = 64, 6 = 32 bytes */
    const uint32_t per_piece = 16 / element_bytes;
    if (code == 0)
        return mn_major ? start + mn / per_piece * stride + k / 8 * leading + k % 8 * 16 : start + mn / 8 * stride + k / per_piece * leading + mn % 8 * 16;
    const uint32_t pitch = 256u >> (code / 2), group = pitch / element_bytes;
    const uint32_t a = mn_major ? start + mn / group * leading + k / 8 * stride + k % 8 * pitch + mn % group * element_bytes
                                : start + mn / 8 * stride + mn % 8 * pitch + k * element_bytes;
    return a ^ ((a >> 7 & ((8u >> (code / 2 - 1)) - 1)) << 4);
}

static void check_descriptor(uint64_t d, const char *what)
{
    constexpr uint64_t fields = 0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 7ull << 61;
    if ((d >> 46 & 7) != 1)
        fail("%s: descriptor %016llx has version %u in bits 46-48, not Blackwell's 1", what, (unsigned long long)d, (unsigned)(d >> 46 & 7));
    if (d & ~fields & ~(1ull << 46))  /* among them the base offset: every tile is aligned to its swizzle pattern */
        fail("%s: descriptor %016llx: bits outside its fields, or a base offset, are set", what, (unsigned long long)d);
    if ((d >> 61) & 1)
        fail("%s: descriptor %016llx has swizzle code %u", what, (unsigned long long)d, (unsigned)(d >> 61));
}

struct Operand {
    uint64_t descriptor;
    bool mn_major;
    uint32_t element_bytes, rows;   /* in each CTA */
    uint32_t depth() const { return 32 / element_bytes; }
    template <class Visit> void for_each_piece(Visit visit) const
    {
        const uint32_t per_piece = 16 / element_bytes;
        for (uint32_t mn = 0; mn < rows; mn += mn_major ? per_piece : 1)
            for (uint32_t k = 0; k < depth(); k += mn_major ? 1 : per_piece)
                visit(mn, k, piece_address(descriptor, mn_major, element_bytes, mn, k));
    }
};

static float mini_float(uint8_t bits, bool e5m2)
{
    const uint32_t mantissa_bits = e5m2 ? 2 : 3, exponent = bits >> mantissa_bits & (e5m2 ? 31 : 15), mantissa = bits & ((1u << mantissa_bits) - 1);
    const int bias = e5m2 ? 15 : 7;
    const float sign = bits >> 7 ? -1.0f : 1.0f;
    if (e5m2 && exponent == 31)
        return mantissa ? NAN : sign * INFINITY;
    if (!e5m2 && exponent == 15 && mantissa == 7)
        return NAN;
    return exponent ? sign * ldexpf(1.0f + (float)mantissa / (float)(1u << mantissa_bits), (int)exponent - bias)
                    : sign * ldexpf((float)mantissa / (float)(1u << mantissa_bits), 1 - bias);
}

static float element(const uint8_t *p, uint32_t element_bytes, bool e5m2)
{
    static const std::vector<float> mini = [] {
        std::vector<float> values;
        for (uint32_t i = 0; i < 512; i++)
            values.push_back(mini_float((uint8_t)i, i >= 256));
        return values;
    }();
    uint16_t bits;
    if (element_bytes == 1)
        return mini[e5m2 * 256 + *p];
    memcpy(&bits, p, 2);
    return bf16_to_float(bits);
}

/* out[k][first + mn]; what was never written is NaN. */
static void fetch(const Cta &cta, const Operand &o, bool e5m2, float *out, uint32_t pitch, uint32_t first)
{
    o.for_each_piece([&](uint32_t mn, uint32_t k, uint32_t address) {
        const uint32_t offset = address - kSharedBase;
        const bool written = cta.granules[offset / 16].written == 0xffff;
        for (uint32_t j = 0; j < 16 / o.element_bytes; j++)
            out[(o.mn_major ? k : k + j) * pitch + first + (o.mn_major ? mn + j : mn)] = written ? element(cta.shared + offset + j * o.element_bytes, o.element_bytes, e5m2) : NAN;
    });
}

/* ---- MMAs ---- */

struct TensorMma : TensorOp {
    uint32_t d_column, m, n;
    Operand a, b;
    bool a_e5m2 = false, b_e5m2 = false, accumulate, scaled = false;
    uint32_t a_scales = 0, b_scales = 0, a_byte = 0, b_byte = 0;  /* first columns, byte of their cells */

    /* The copy of a row's scale that lies in a quarter of the lanes. */
    static float scale(Cta &cta, uint32_t quarter, uint32_t first_column, uint32_t row, uint32_t byte)
    {
        const uint32_t at = mk_scale_cell(row);
        uint32_t cell;
        memcpy(&cell, &memory_of(cta).at(32 * quarter + (at >> 16), first_column + (at & 0xffff)), 4);
        const uint32_t e8m0 = cell >> (8 * byte) & 0xff;
        return e8m0 == 0xff ? NAN : mk::bits_to_float(e8m0 ? e8m0 << 23 : 1u << 22);
    }

    /* to[k][row] = from[k][first + row], times the scale of the row. */
    void take_scaled(Cta &cta, uint32_t quarter, uint32_t scales, uint32_t byte, const float *from, uint32_t pitch, uint32_t first, uint32_t rows, float *to)
    {
        for (uint32_t row = 0; row < rows; row++) {
            const float by = scale(cta, quarter, scales, first + row, byte);
            for (uint32_t k = 0; k < a.depth(); k++)
                to[k * rows + row] = from[k * pitch + first + row] * by;
        }
    }

    /* Each quarter of the rows sits in 32 lanes, and is multiplied there: with the scales in those lanes, of its rows of A and of all rows of B. */
    void multiply_quarters(Cta &cta, float *d, const float *x, const float *y)
    {
        static float own_x[32 * 32], own_y[32 * 256];
        for (uint32_t quarter = 0; quarter < 4; quarter++) {
            take_scaled(cta, quarter, a_scales, a_byte, x, m / 2, 32 * quarter, 32, own_x);
            take_scaled(cta, quarter, b_scales, b_byte, y, n, 0, n, own_y);
            multiply_add(d + 32 * quarter * kTensorColumns, kTensorColumns, own_x, own_y, 32, n, a.depth());
        }
    }

    /* CTA r's rows of A against all of B. Every CTA uses the scales of B in its own tensor memory. */
    void execute_in(uint32_t r)
    {
        static float x[32 * 128], y[32 * 256];
        Cta &cta = *ctas[r];
        const uint32_t depth = a.depth(), rows = m / 2;
        fetch(cta, a, a_e5m2, x, rows, 0);
        for (uint32_t half = 0; half < 2; half++)
            fetch(*ctas[half], b, b_e5m2, y, n, half * (n / 2));
        float *d = &memory_of(cta).at(0, d_column);
        if (!accumulate)
            for (uint32_t row = 0; row < rows; row++)
                memset(d + row * kTensorColumns, 0, n * sizeof(float));
        if (scaled)
            multiply_quarters(cta, d, x, y);
        else
            multiply_add(d, kTensorColumns, x, y, rows, n, depth);
    }
    void execute() override
    {
        execute_in(0);
        execute_in(1);
    }
};

/* Fields of the instruction descriptor that both kinds have, and their rules for a pair of CTAs. */
static void take_shape(TensorMma &op, uint32_t instruction, uint64_t a, uint64_t b, uint32_t element_bytes, const char *what)
{
    op.m = (instruction >> 24 & 31) << 4;
    op.n = (instruction >> 17 & 63) << 3;
    if (op.m != 256 || op.n % 16 || op.n < 16 || op.n > 256)
        fail("%s: %u x %u: over a pair of CTAs M is 256 (128 is not emulated), N a multiple of 16 up to 256", what, op.m, op.n);
    check_descriptor(a, what);
    check_descriptor(b, what);
    op.a = {a, (instruction >> 15 & 1) != 0, element_bytes, op.m / 2};
    op.b = {b, (instruction >> 16 & 1) != 0, element_bytes, op.n / 2};
}

static void begin_mma(std::shared_ptr<TensorMma> op, uint32_t d, bool accumulate, const char *what)
{
    TensorUnit &unit = own_unit(what);
    const Epoch epoch = begin_operation(unit);
    uint32_t lane;
    split(d, lane, op->d_column);
    if (lane != 0)
        fail("%s: D at lane %u; with M = 256 it begins at lane 0", what, lane);
    op->accumulate = accumulate;
    for (uint32_t r = 0; r < 2; r++) {
        Cta &cta = pair_cta(r, what);
        op->ctas.push_back(&cta);
        op->a.for_each_piece([&](uint32_t, uint32_t, uint32_t address) { read_granule(*op, cta, address, epoch, what); });
        op->b.for_each_piece([&](uint32_t, uint32_t, uint32_t address) { read_granule(*op, cta, address, epoch, what); });
        for (uint32_t group = 0; group < kTensorLanes; group += kLaneGroup)
            for (uint32_t c = op->d_column; c < op->d_column + op->n; c++) {
                TensorCell &cell = allocated_cell(cta, group, c, what);
                check_overwrite(cell, what, group, c, true);
                if (accumulate && !cell.written)
                    fail("%s adds to tensor memory, lane %u, column %u of block %u, that was never written", what, group, c, cta.block);
                cell.written = true;
                cell.write = epoch;
            }
        auto read_scales = [&](uint32_t first, uint32_t rows) {
            for (uint32_t c = first; c < first + (rows + 127) / 128 * MK_SCALE_ATOM_COLUMNS; c++)
                for (uint32_t group = 0; group < kTensorLanes; group += kLaneGroup) {
                    TensorCell &cell = allocated_cell(cta, group, c, what);
                    if (!cell.written)
                        fail("%s: scales in column %u of block %u were never written", what, c, cta.block);
                    if ((cell.write & ~(Epoch)0xfffffff) != make_epoch(self->cta->number, kMemberTensor, 0))
                        require_ordered(cell.write, what, "write", group, c);
                    note_read(cell.reads, epoch, 0xffff);
                }
        };
        if (op->scaled) {
            read_scales(op->a_scales, op->m / 2);
            read_scales(op->b_scales, op->n);
        }
    }
    enqueue(unit, op);
}

/* ---- scale copies ---- */

struct TensorScaleCopy : TensorOp {
    uint32_t column = 0;
    uint64_t from = 0;
    void execute() override
    {
        for (Cta *cta : ctas)
            for (uint32_t row = 0; row < 32; row++) {
                const uint8_t *p = cta->shared + piece_address(from, false, 1, row, 0) - kSharedBase;
                for (uint32_t copy = 0; copy < 4; copy++)
                    for (uint32_t c = 0; c < 4; c++)
                        memcpy(&memory_of(*cta).at(32 * copy + row, column + c), p + 4 * c, 4);
            }
    }
};

/* ---- commit ---- */

struct TensorCommit : TensorOp {
    std::vector<Mbarrier *> bars;
    Clock known;
    TensorUnit *unit;  /* which holds this operation */
    void execute() override
    {
        for (auto &g : unit->uncommitted)
            end_async_read(*g.first, g.second);
        unit->uncommitted.clear();
        for (Mbarrier *bar : bars)
            mbarrier_arrive_async(*bar, known);
    }
};

void tensor_exit_checks(const Cta &cta)
{
    if (cta.tensor_memory && !cta.tensor_memory->blocks.empty())
        fail("block %u has ended without releasing its tensor memory", cta.block);
    if (uint32_t count = tensor_operations_on(cta))
        fail("block %u has ended, and %u tcgen05 operations that concern it are under way or not committed", cta.block, count);
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

void tcgen05_mma_pair_bf16(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate)
{
    step();
    const char *what = "tcgen05 mma, bf16";
    const uint32_t fixed = 1u << 4 | 1u << 7 | 1u << 10, fields = 1u << 15 | 1u << 16 | 63u << 17 | 31u << 24;
    if ((instruction & ~fields) != fixed)
        fail("%s: instruction descriptor %08x: not bf16 operands with fp32 accumulators, or reserved bits are set", what, instruction);
    auto op = std::make_shared<TensorMma>();
    take_shape(*op, instruction, a, b, 2, what);
    begin_mma(op, d, accumulate, what);
}

void tcgen05_mma_pair_mx(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales, uint32_t b_scales, bool accumulate)
{
    step();
    const char *what = "tcgen05 mma, mxf8f6f4";
    const uint32_t fields = 3u << 4 | 7u << 7 | 7u << 10 | 1u << 15 | 1u << 16 | 63u << 17 | 1u << 23 | 3u << 27 | 3u << 29;
    const uint32_t a_type = instruction >> 7 & 7, b_type = instruction >> 10 & 7;
    if (instruction & ~fields || !(instruction >> 23 & 1) || a_type > MK_MMA_E5M2 || b_type > MK_MMA_E5M2)
        fail("%s: instruction descriptor %08x: not e4m3 or e5m2 with E8M0 scales, or reserved bits are set", what, instruction);
    auto op = std::make_shared<TensorMma>();
    /* The high bits are the id of A's scales, not part of M. */
    take_shape(*op, instruction & ~(3u << 29), a, b, 1, what);
    op->scaled = true;
    op->a_e5m2 = a_type == MK_MMA_E5M2;
    op->b_e5m2 = b_type == MK_MMA_E5M2;
    op->a_byte = instruction >> 29 & 3;
    op->b_byte = instruction >> 4 & 3;
    uint32_t lane_a, lane_b;
    split(a_scales & 0x3fffffff, lane_a, op->a_scales);
    split(b_scales & 0x3fffffff, lane_b, op->b_scales);
    if (lane_a || lane_b)
        fail("%s: scales at lanes %u and %u; they begin at lane 0", what, lane_a, lane_b);
    begin_mma(op, d, accumulate, what);
}

void tcgen05_copy_scales_pair(uint32_t to, uint64_t from)
{
    step();
    const char *what = "tcgen05 scale copy";
    TensorUnit &unit = own_unit(what);
    const Epoch epoch = begin_operation(unit);
    auto op = std::make_shared<TensorScaleCopy>();
    uint32_t lane;
    split(to, lane, op->column);
    op->from = from;
    check_descriptor(from, what);
    if (from >> 61 || lane != 0)
        fail("%s: descriptor %016llx must have no swizzle, and the destination lane %u be 0", what, (unsigned long long)from, lane);
    for (uint32_t r = 0; r < 2; r++) {
        Cta &cta = pair_cta(r, what);
        op->ctas.push_back(&cta);
        for (uint32_t row = 0; row < 32; row++)
            read_granule(*op, cta, piece_address(from, false, 1, row, 0), epoch, what);
        for (uint32_t group = 0; group < kTensorLanes; group += kLaneGroup)
            for (uint32_t c = op->column; c < op->column + MK_SCALE_ATOM_COLUMNS; c++) {
                TensorCell &cell = allocated_cell(cta, group, c, what);
                check_overwrite(cell, what, group, c, true);
                cell.written = true;
                cell.write = epoch;
            }
    }
    enqueue(unit, op);
}

void tcgen05_commit_pair(uint32_t bar, uint16_t cta_mask)
{
    step();
    const char *what = "tcgen05_commit";
    TensorUnit &unit = own_unit(what);
    Cluster &cluster = *self->cta->cluster;
    auto op = std::make_shared<TensorCommit>();
    const Place place = resolve(bar, 8, what);
    if (cta_mask == 0 || cta_mask >> cluster.ctas.size())
        fail("%s: mask %x in a cluster of %zu CTAs", what, cta_mask, cluster.ctas.size());
    for (uint32_t r = 0; r < cluster.ctas.size(); r++)
        if (cta_mask >> r & 1) {
            Cta &cta = *cluster.ctas[r];
            if (cta.gone)
                fail("%s: block %u has ended", what, cta.block);
            op->ctas.push_back(&cta);
            op->bars.push_back(&mbarrier_at({&cta, place.offset}, what));
        }
    op->unit = &unit;
    op->known = self->clock;
    op->known.add(self->now());
    self->count++;  /* what the thread does from now on is not part of it */
    if (unit.issued)
        op->known.add(make_epoch(self->cta->number, kMemberTensor, unit.issued));
    enqueue(unit, op);
}

} /* namespace mk */
