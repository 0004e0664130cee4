/* Fibers: cooperative threads with their own stacks, switched without system calls. One scheduler (the thread that calls
 * `resume`) and any number of fibers, which give control back with `suspend`. */
#ifndef MK_EMU_FIBER_H
#define MK_EMU_FIBER_H

#include <setjmp.h>
#include <stddef.h>
#include <ucontext.h>

namespace emu {

class Fiber {
public:
    Fiber();
    ~Fiber();
    Fiber(const Fiber &) = delete;
    Fiber &operator=(const Fiber &) = delete;

    void start(void (*run)(void *), void *arg);  /* the next resume begins run(arg) */
    void resume();                               /* from the scheduler: until the fiber suspends or its function returns */
    void suspend();                              /* from the fiber itself */

private:
    static void enter();
    jmp_buf here_, scheduler_;
    ucontext_t boot_;
    char *stack_;
    bool booted_ = false;
    void (*run_)(void *) = nullptr;
    void *arg_ = nullptr;
};

} /* namespace emu */
#endif
