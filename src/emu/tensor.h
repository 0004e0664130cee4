/* Tensor memory and the operations on it that are under way: state of tcgen05.cpp. */
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

/* An MMA, scale copy or commit. */
struct TensorOp {
    virtual ~TensorOp() {}
    virtual void execute() = 0;
    std::vector<std::pair<Cta *, uint32_t>> granules;  /* of shared memory that it reads */
    std::vector<Cta *> ctas;                           /* that it touches */
};

/* Operations of one issuing thread happen in order. */
struct TensorUnit {
    Thread *issuer = nullptr;
    std::deque<std::shared_ptr<TensorOp>> ops;         /* issued, not done */
    std::vector<std::pair<Cta *, uint32_t>> uncommitted; /* read by operations done since the last commit */
    uint32_t issued = 0;
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

/* Operations on shared and tensor memory of this CTA that are under way or not committed. */
uint32_t tensor_operations_on(const Cta &cta);

} /* namespace emu */
#endif
