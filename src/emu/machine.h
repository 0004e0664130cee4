/* The emulator's insides: what a thread, a CTA, a device and an asynchronous operation are. Only src/emu includes this.
 *
 * Control flow: the scheduler (machine.cpp) resumes one fiber at a time. Device code calls arch functions; each begins with
 * `step()`, where the scheduler may take over. A thread that cannot go on calls `block` with a condition; whoever may have
 * made the condition true calls `wake` on the list. Asynchronous operations lie in State::pending and are advanced by the
 * scheduler between fibers, in an order drawn from the seed. */
#ifndef MK_EMU_MACHINE_H
#define MK_EMU_MACHINE_H

#include <deque>
#include <map>
#include <set>
#include <unordered_map>
#include <string.h>
#include "cuda/arch/arch.cuh"
#include "emu/fiber.h"
#include "emu/order.h"

namespace emu {

struct Thread;
struct Cta;
struct Cluster;
struct TensorMemory;
struct TensorUnit;
struct TensorAccesses;

struct Random {
    uint64_t state;
    uint64_t next() { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return state * 0x2545f4914f6cdd1dull >> 16; }
    uint32_t below(uint32_t n) { return (uint32_t)(next() % n); }
};

/* Threads that wait for one thing. An entry whose ticket is not the thread's any more is stale. */
struct WaitList {
    struct Entry { Thread *thread; uint64_t ticket; };
    std::vector<Entry> entries;
};

struct Mbarrier {
    uint32_t address = 0;        /* in its CTA */
    uint32_t count = 0, pending = 0;
    int64_t tx = 0;              /* bytes expected minus bytes arrived */
    uint64_t phase = 0;          /* phases completed */
    Cta *cta = nullptr;
    Thread *init_by = nullptr;
    bool published = false;      /* the initialising thread has fenced */
    uint32_t member = 0;         /* in epochs */
    Epoch init_epoch = 0;
    Clock arriving, completed;   /* of the current phase's arrivals, of the last phase */
    WaitList waiters;
};

struct NamedBarrier {
    uint32_t expected = 0, arrived = 0;
    uint64_t generation = 0;
    Clock arriving, completed;
    WaitList waiters;
};

/* Rendezvous of a warp's lanes in one instruction. */
struct Warp {
    uint32_t members = 0, arrived = 0;
    uint64_t generation = 0;
    const char *instruction = nullptr;
    uint64_t in[32], out[32];
    uint32_t matrix[32][4];
    WaitList waiters;
};

/* A copy or MMA under way. `advance` lets it take its next effect; true when it is finished. */
struct AsyncOp {
    virtual ~AsyncOp() {}
    virtual bool advance() = 0;
    Thread *owner = nullptr;
};

/* Bulk stores that one thread committed together. */
struct StoreOp;
struct BulkGroup {
    int reads = 0, writes = 0;   /* operations that have not read their source, written their destination */
    std::vector<std::shared_ptr<StoreOp>> ops;
};

struct Wgmma;
struct Warpgroup {
    std::deque<std::shared_ptr<Wgmma>> ops;  /* issued, oldest first, until all their threads have waited for them */
    uint32_t first = 0;                      /* number of ops.front() */
    uint32_t completed = 0;                  /* operations done; they finish in order */
    uint32_t registers = 0;                  /* per thread */
    uint32_t registers_wanted = 0, registers_arrived = 0;
    uint64_t registers_generation = 0;
    WaitList waiters, register_waiters;
};

/* What is known of 16 bytes of shared memory. */
struct Granule {
    uint16_t written = 0;         /* one bit a byte */
    uint16_t async_reads = 0;     /* copies and MMAs that read it and that nobody has waited for */
    uint16_t async_writes = 0;    /* copies that will still write it */
    uint64_t stamp = 0;           /* of the last plain write; 0 when the last write was a copy's */
    Thread *writer = nullptr;
    Reads reads;                  /* plain ones, and bulk stores that were waited for */
};

enum class Doing { ready, running, blocked, exited };

struct Thread {
    Fiber *fiber = nullptr;
    Cta *cta = nullptr;
    uint32_t idx = 0;
    Doing doing = Doing::ready;
    int budget = 0;               /* arch calls until the scheduler chooses again */
    /* waiting */
    uint64_t ticket = 0;
    bool (*can_go)(Thread &) = nullptr;
    const char *waits_for = "";   /* kind of wait */
    const char *note = nullptr;   /* its name in the source */
    void *wait_object = nullptr;
    uint64_t wait_value = 0;
    bool pollable = false, poked = false;
    const void *polled_address = nullptr;
    uint64_t polled_value = ~0ull;
    /* memory order */
    uint64_t shared_fence = 0, global_fence = 0;  /* stamp at its last proxy fence */
    /* asynchronous work */
    struct Copy { uint32_t dst; const void *src; };
    std::vector<Copy> copies;                     /* copy_async not waited for */
    std::vector<std::shared_ptr<StoreOp>> open_stores;
    std::deque<std::shared_ptr<BulkGroup>> groups;
    uint32_t wgmma_issued = 0, wgmma_observed = 0;
    std::deque<uint32_t> wgmma_group_ends;
    bool wgmma_fenced = false;
    uint64_t cluster_barrier_seen = 0;
    std::shared_ptr<TensorAccesses> tensor;       /* null: none so far */
    /* happens-before */
    Clock clock, fenced, seen_relaxed;  /* what it knows; what its last fence released; what relaxed loads saw */
    uint32_t count = 1;                 /* its releases so far, plus one */
    Epoch now() const;

    uint32_t lane() const { return idx & 31; }
    uint32_t warp() const { return idx >> 5; }
};

struct DeviceState;

struct Cta {
    Cluster *cluster = nullptr;
    DeviceState *device = nullptr;
    uint32_t block = 0, rank = 0;
    uint32_t number = 0;               /* in epochs */
    uint32_t shared_bytes = 0;
    std::vector<Epoch> write_epoch;    /* by byte of shared memory */
    uint8_t *shared = nullptr;
    std::vector<Granule> granules;
    std::vector<int32_t> mbarrier_at;  /* by address / 8, -1 = none */
    std::deque<Mbarrier> mbarriers;
    NamedBarrier named[16];
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    uint32_t free_registers = 0;       /* per thread of a warpgroup */
    std::map<const void *, mk_tensor_map> acquired_maps; /* those in global memory, as the copy engine knows them: as they were when acquired */
    std::shared_ptr<TensorMemory> tensor_memory;  /* null: not used so far */
    std::shared_ptr<TensorUnit> tensor_unit;      /* of the CTA whose thread issues */
    uint32_t live = 0;
    bool gone = false;
    ~Cta();
};

struct Cluster {
    std::vector<std::unique_ptr<Cta>> ctas;
    uint32_t index = 0, live = 0;
    uint32_t barrier_arrived = 0;
    uint64_t barrier_generation = 0;
    Clock arriving, completed;
    WaitList barrier_waiters;
    bool launch_refused = false;                      /* a thread has seen a refusal of launch control */
};

struct QueuedLaunch {
    Launch shape;
    std::function<void()> kernel;
    std::deque<uint32_t> waiting;                     /* clusters that have neither started nor been cancelled */
    bool started = false;
};

struct DeviceState {
    State *state = nullptr;
    uint32_t index = 0, resident_limit = 1;
    std::deque<QueuedLaunch> queue;                   /* front = running */
    std::vector<std::unique_ptr<Cluster>> resident;
    uint64_t launch_stamp = 0;                        /* writes before it are visible to the whole launch */
    uint32_t launches = 0;                            /* started so far */
    uint32_t late_starts = 0;                         /* a place that is free is taken in one of so many turns of the scheduler; 0: at once */
    uint32_t refusals = 0;                            /* launch control refuses one request in so many; 0: only when nothing waits */
    Clock clock, clock_at_end;                        /* what a thread that starts now knows; what those that have ended knew */
};

struct Allocation {
    uint8_t *base = nullptr, *block = nullptr;
    size_t bytes = 0;
    std::string name;
    std::vector<uint8_t> written;   /* by byte */
    std::vector<uint64_t> stamp;    /* by 16 bytes: last write, as of when its thread knew it to be done */
    std::vector<bool> by_copy;      /* by 16 bytes: that was a bulk store */
    std::vector<Epoch> write_epoch; /* by byte */
    std::vector<Reads> reads;       /* by 16 bytes */
};

/* A flag or counter in global memory, as far as it orders anything. */
struct Flag {
    Clock clock;
    uint32_t device = 0;         /* of the last writer */
    bool system_scope = false;
    void store(bool release, bool sys);
    void add(bool release, bool sys);
    void load(bool acquire, bool sys) const;
};

struct CtaRecord { uint32_t device, launch, block; };

struct State {
    uint64_t seed = 0;
    Random random{1};
    std::vector<std::unique_ptr<DeviceState>> devices;
    std::vector<Thread *> ready;
    std::vector<std::shared_ptr<AsyncOp>> pending;
    std::map<uintptr_t, std::unique_ptr<Allocation>> memory;
    WaitList pollers;                                 /* wait for global memory to change */
    WaitList store_owners;                            /* wait for their own bulk stores */
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Fiber *> free_fibers;
    std::vector<CtaRecord> cta_records;               /* by CTA number */
    std::unordered_map<const void *, Flag> flags;
    uint64_t stamp = 1;        /* of plain writes */
    uint64_t progress = 0;     /* counts everything that may let somebody go on */
    uint64_t time_ns = 1000000;
    uint32_t async_odds = 8;   /* one in so many scheduler turns advances an operation */
    uint32_t slow_odds = 1;    /* drawn per seed: how often a slow warp is passed over */
    uint64_t slow_mask = 0;    /* warps that are slow in this run */
    uint32_t frozen_blocks = 2;/* blocks of this parity run only when nobody else can; 2: none */
    uint32_t frozen_warp = 32; /* the same for warps of this index; 32: none */
    bool let_time_pass = false;
    bool results_are_void = false; /* of this run: a wait of its kernels has run out, and they go on without what they waited for */
    bool failed = false;
    Result result;
};

extern Thread *self;  /* who is running; null in the scheduler */
extern State *machine;

/* ---- scheduler ---- */
void step();
void yield();
/* Until can_go(*self). `what` and `object` are for the report. True if it was let go without that (only if pollable). */
bool block(WaitList &list, bool (*can_go)(Thread &), const char *what, void *object, uint64_t value, bool pollable = false);
void wake(WaitList &list);
void submit(std::shared_ptr<AsyncOp> op);
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
std::string describe(const Thread &t);
std::string deadlock_report();
void thread_exit_checks(Thread &t);
void cta_exit_checks(Cta &cta);
void tensor_exit_checks(const Cta &cta);

/* ---- happens-before, of the running thread ---- */
void release_into(Clock &clock);
void acquire_from(const Clock &clock);

/* ---- warps ---- */
void open_cluster_barrier(Cluster &cluster);
void warp_rendezvous(const char *instruction, void (*complete)(Warp &));
inline Warp &own_warp() { return self->cta->warps[self->warp()]; }

/* ---- shared memory ---- */
constexpr uint32_t kSharedBase = 1024;        /* what the system keeps at the start of the window */
constexpr uint32_t kClusterShift = 24;        /* cluster address = (rank + 1) << 24 | address in that CTA */
struct Place { Cta *cta; uint32_t offset; };
Place resolve(uint32_t address, uint32_t bytes, const char *what);
inline uint32_t shared_address(uint32_t offset) { return offset + kSharedBase; }
void shared_plain_write(Cta &cta, uint32_t offset, const void *in, uint32_t bytes);
/* Before an asynchronous read or write of 16 bytes is accepted from `self`; afterwards the granule is marked. */
void begin_async_read(Cta &cta, uint32_t offset, const char *what);
void begin_async_write(Cta &cta, uint32_t offset, const char *what);

/* ---- global memory ---- */
Allocation *find_allocation(const void *p, size_t bytes);
Allocation &require_allocation(const void *p, size_t bytes, const char *what);
void check_global_proxy(const Allocation &a, const void *p, size_t bytes, const char *what);

/* ---- mbarriers ---- */
Mbarrier &mbarrier_at(const Place &place, const char *what);
void publish_mbarriers();  /* those that the running thread has initialised */
void mbarrier_complete_tx(Mbarrier &bar, uint32_t bytes);
/* One arrival that brings `known` with it, by no thread. */
void mbarrier_arrive_async(Mbarrier &bar, const Clock &known);

/* ---- copies and MMAs ---- */
/* d[row][col] += sum over k of a[k][row] * b[k][col], k ascending; rows of d are `pitch` floats apart. */
void multiply_add(float *d, size_t pitch, const float *a, const float *b, size_t rows, size_t n, size_t depth);
void observe_stores(Thread &t, size_t groups, bool read_only);
/* Shared memory read by a bulk store or MMA has been waited for. */
void end_async_read(Cta &cta, uint32_t offset);
/* A load into a phase of `bar` reads global memory; a store writes it, first unobserved, then as a write of the thread that waited. */
void global_async_read(Allocation &a, const void *p, size_t bytes, const Mbarrier &bar, const Cta &cta, const char *what);
void global_async_write(Allocation &a, void *p, size_t bytes, const char *what);
void global_async_write_observed(void *p, size_t bytes);
/* Bounds and written bytes; unless atomic, order too. */
void global_read_bytes(const void *p, void *out, size_t bytes, bool atomic);

} /* namespace emu */
#endif
