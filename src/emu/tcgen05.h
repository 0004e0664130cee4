/* tcgen05 operations that are under way (tcgen05.cpp). */
#ifndef MK_EMU_TCGEN05_H
#define MK_EMU_TCGEN05_H

#include "emu/machine.h"

namespace emu {

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

/* The unit of the running thread's CTA, which issues for it; the epoch of its next operation; to be done some time. */
TensorUnit &own_unit(const char *what);
Epoch begin_operation(TensorUnit &unit);
void enqueue(TensorUnit &unit, std::shared_ptr<TensorOp> op);

/* The operation reads 16 bytes of a CTA's shared memory until a commit has been waited for. */
void read_granule(TensorOp &op, Cta &cta, uint32_t address, Epoch epoch, const char *what);

/* Operations on shared and tensor memory of this CTA that are under way or not committed. */
uint32_t tensor_operations_on(const Cta &cta);

} /* namespace emu */
#endif
