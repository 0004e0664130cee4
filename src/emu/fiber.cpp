/* A stack is entered once through makecontext; every later switch is a _setjmp/_longjmp pair, which saves registers only.
 * Finished fibers stay booted and run their next function from the loop in `enter`. */
#include "emu/fiber.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace emu {

static constexpr size_t kGuardBytes = 4096;
#if defined(__SANITIZE_ADDRESS__)
static constexpr size_t kStackBytes = 256 << 10;
#else
static constexpr size_t kStackBytes = 64 << 10;
#endif
/* Stacks begin at different distances from their ends, or all threads' frames would fall into the same few lines of the cache. */
static constexpr size_t kLineBytes = 64, kDistances = 61;
static Fiber *booting;

/* AddressSanitizer has to know which stack is current. */
#if defined(__SANITIZE_ADDRESS__)
static const void *scheduler_bottom;
static size_t scheduler_size;
static void leaving(const void *bottom, size_t size) { __sanitizer_start_switch_fiber(nullptr, bottom, size); }
static void arrived(bool on_fiber) { __sanitizer_finish_switch_fiber(nullptr, on_fiber ? &scheduler_bottom : nullptr, on_fiber ? &scheduler_size : nullptr); }
static void leaving_to_scheduler() { leaving(scheduler_bottom, scheduler_size); }
#else
static void leaving(const void *, size_t) {}
static void arrived(bool) {}
static void leaving_to_scheduler() {}
#endif

Fiber::Fiber()
{
    stack_ = static_cast<char *>(mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stack_ == MAP_FAILED || mprotect(stack_, kGuardBytes, PROT_NONE) != 0) {
        perror("emulator: no memory for a fiber's stack");
        exit(1);
    }
}

Fiber::~Fiber() { munmap(stack_, kGuardBytes + kStackBytes); }

void Fiber::enter()
{
    Fiber *self = booting;
    arrived(true);
    for (;;) {
        self->run_(self->arg_);
        self->suspend();
    }
}

void Fiber::start(void (*run)(void *), void *arg)
{
    run_ = run;
    arg_ = arg;
}

void Fiber::resume()
{
    if (_setjmp(scheduler_) == 0) {
        leaving(stack_ + kGuardBytes, kStackBytes);
        if (booted_)
            _longjmp(here_, 1);
        booted_ = true;
        booting = this;
        getcontext(&boot_);
        boot_.uc_stack.ss_sp = stack_ + kGuardBytes;
        static size_t booted;
        boot_.uc_stack.ss_size = kStackBytes - kLineBytes * (booted++ % kDistances);
        boot_.uc_link = nullptr;
        makecontext(&boot_, &Fiber::enter, 0);
        setcontext(&boot_);
    }
    arrived(false);
}

void Fiber::suspend()
{
    if (_setjmp(here_) == 0) {
        leaving_to_scheduler();
        _longjmp(scheduler_, 1);
    }
    arrived(true);
}

} /* namespace emu */
