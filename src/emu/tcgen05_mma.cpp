/* tcgen05's MMAs over a pair of CTAs: they fetch both CTAs' shared memory and write both CTAs' tensor memory.
 *
 * Arithmetic as in wgmma.cpp: fp32, one fused multiply-add for each contraction index, ascending; an MX element is taken times its scale, which
 * is exact. */
#include "emu/tcgen05.h"
#include "emu/tcgen05_operand.h"
#include "emu/tensor.h"

#include <math.h>

namespace emu {

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

} /* namespace emu */

namespace mk {
using namespace emu;
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

} /* namespace mk */
