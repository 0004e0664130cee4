/* Tensor memory: its state, and the rules of those who touch it (tensor_memory.cpp). */
#ifndef MK_EMU_TENSOR_H
#define MK_EMU_TENSOR_H

#include "emu/machine.h"

namespace emu {

constexpr uint32_t kTensorLanes = MK_TMEM_LANES, kTensorColumns = MK_TMEM_COLUMNS, kLaneGroup = 16;
constexpr uint32_t kMemberTensor = kMemberMbarrier - 1;  /* in epochs: what a CTA's tcgen05 operations write and read */

/* One column of 16 lanes. */
struct TensorCell {
    Epoch write = 0;             /* who wrote it last */
    bool written = false, allocated = false;
    uint32_t loads = 0;          /* under way: no tmem_wait_load yet */
    uint32_t unfenced = 0;       /* done, but no fence_before_sync yet */
    uint32_t unfenced_warp = 0;  /* whose the last of these was: its own later stores are in order */
    Reads reads;
};

struct TensorMemory {
    std::vector<float> value = std::vector<float>(kTensorLanes * kTensorColumns);  /* [lane][column] */
    std::vector<TensorCell> cells = std::vector<TensorCell>(kTensorLanes / kLaneGroup * kTensorColumns);
    std::map<uint32_t, uint32_t> blocks;   /* allocated: first column -> columns */
    uint32_t last_size = 0;                /* 0: nothing was allocated yet */
    bool relinquished = false;
    float &at(uint32_t lane, uint32_t column) { return value[lane * kTensorColumns + column]; }
    TensorCell &cell(uint32_t lane, uint32_t column) { return cells[lane / kLaneGroup * kTensorColumns + column]; }
};

/* A thread's own accesses. */
struct TensorAccesses {
    struct Load { float *to; Cta *cta; uint32_t lane, column, columns; };
    std::vector<Load> loads;                           /* under way */
    std::vector<TensorCell *> unfenced;                /* read, not followed by a fence */
    std::vector<TensorCell *> stores;                  /* written, not followed by a fence; the first `waited` of them have been waited for */
    size_t waited = 0;
    std::vector<std::pair<Cta *, uint32_t>> allocations; /* where in shared memory addresses were written, not followed by a fence */
    Clock clock;                                       /* what the thread knew at its last fence_after_sync */
};

TensorMemory &memory_of(Cta &cta);
TensorAccesses &own_accesses();

/* Lane and column of an address; the cell there, which must be allocated. */
void split(uint32_t address, uint32_t &lane, uint32_t &column);
TensorCell &allocated_cell(Cta &cta, uint32_t lane, uint32_t column, const char *what);

/* The running thread's access must be ordered after e, which `after` names. */
void require_ordered(Epoch e, const char *what, const char *after, uint32_t lane, uint32_t column);

/* Before anybody overwrites a cell. `same_unit`: MMAs and copies of one thread are in order among themselves. */
void check_overwrite(TensorCell &cell, const char *what, uint32_t lane, uint32_t column, bool same_unit);

/* CTA r of the running thread's pair. */
Cta &pair_cta(uint32_t r, const char *what);

} /* namespace emu */
#endif
