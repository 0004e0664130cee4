/* Operands in shared memory, as tcgen05 descriptors name them. */
#ifndef MK_EMU_TCGEN05_OPERAND_H
#define MK_EMU_TCGEN05_OPERAND_H

#include "emu/machine.h"

namespace emu {

void check_descriptor(uint64_t d, const char *what);

/* Address of the 16 bytes from (mn, k) on. */
uint32_t piece_address(uint64_t d, bool mn_major, uint32_t element_bytes, uint32_t mn, uint32_t k);

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

/* The operand in one CTA: out[k][first + mn]; what was never written is NaN. */
void fetch(const Cta &cta, const Operand &o, bool e5m2, float *out, uint32_t pitch, uint32_t first);

} /* namespace emu */
#endif
