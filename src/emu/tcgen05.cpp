/* tcgen05 operations under way: those of one thread happen late and in order. Scale copies and commits; MMAs are in tcgen05_mma.cpp.
 *
 * Order: an operation has an epoch of its own, which a commit adds to its mbarriers' phases. So an access to what an MMA has written, or is
 * reading, is reported unless the thread has waited for a commit behind it, whatever the timing. A commit passes on what its thread knew, too,
 * which is more than the manual says and what every GEMM's ring of stages relies on. */
#include "emu/tcgen05.h"
#include "emu/tcgen05_operand.h"
#include "emu/tensor.h"

namespace emu {

/* ---- operations under way ---- */

TensorUnit &own_unit(const char *what)
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

Epoch begin_operation(TensorUnit &unit) { return make_epoch(self->cta->number, kMemberTensor, ++unit.issued); }

void enqueue(TensorUnit &unit, std::shared_ptr<TensorOp> op)
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

void read_granule(TensorOp &op, Cta &cta, uint32_t address, Epoch epoch, const char *what)
{
    const uint32_t offset = address - kSharedBase;
    if (address < kSharedBase || offset + 16 > cta.shared_bytes)
        fail("%s: 16 bytes at shared offset %d are outside the %u bytes of block %u", what, (int)offset, cta.shared_bytes, cta.block);
    begin_async_read(cta, offset, what);
    note_read(cta.granules[offset / 16].reads, epoch, 0xffff);
    op.granules.push_back({&cta, offset});
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

} /* namespace emu */

namespace mk {
using namespace emu;
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
