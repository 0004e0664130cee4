/* wgmma: a warpgroup's matrix operations, done late and in order, with operands fetched from shared memory through the bits
 * of their descriptors.
 *
 * Arithmetic: fp32, one fused multiply-add for each contraction index, ascending. What the hardware does inside one K = 16
 * step is not specified (it sums the products of a step with limited alignment before adding them), so values agree with a
 * GPU within rounding only; the order of the steps, and with it everything that depends on tile shapes, is the same. */
#include "emu/machine.h"

#include <math.h>

namespace emu {

static constexpr uint32_t kThreads = 128, kRows = 64, kDepth = 16;

struct Wgmma {
    uint32_t n = 0, issued = 0, observed = 0;  /* threads that have issued it, waited for it */
    uint64_t a = 0, b = 0;
    bool accumulate = false, a_mn_major = false, b_mn_major = false, done = false;
    float *d[kThreads];
    std::vector<uint32_t> granules;            /* what it reads */
};

/* ---- operands ---- */

/* Calls visit(mn, k, shared address) for each 16-byte piece of the operand: 8 elements from (mn, k) on along the
 * contiguous axis. */
template <class Visit> static void for_each_piece(uint64_t descriptor, bool mn_major, uint32_t rows, Visit visit)
{
    for (uint32_t mn = 0; mn < rows; mn += mn_major ? 8 : 1)
        for (uint32_t k = 0; k < kDepth; k += mn_major ? 1 : 8)
            visit(mn, k, matrix_element_address(descriptor, mn_major, mn, k));
}

static void check_descriptor(uint64_t d)
{
    constexpr uint64_t fields = 0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 3ull << 62;
    if (d & ~fields)  /* among them the base offset: every tile is aligned to its swizzle pattern */
        fail("wgmma descriptor %016llx: bits outside its fields, or a base offset, are set", (unsigned long long)d);
}

/* out[k][mn] of an operand; what was never written is NaN. */
static void fetch(const Cta &cta, uint64_t descriptor, bool mn_major, uint32_t rows, float *out)
{
    for_each_piece(descriptor, mn_major, rows, [&](uint32_t mn, uint32_t k, uint32_t address) {
        const uint32_t offset = address - kSharedBase;  /* checked when it was issued */
        uint16_t element[8];
        memcpy(element, cta.shared + offset, 16);
        const bool written = cta.granules[offset / 16].written == 0xffff;
        for (uint32_t j = 0; j < 8; j++)
            out[mn_major ? k * rows + mn + j : (k + j) * rows + mn] = written ? bf16_to_float(element[j]) : NAN;
    });
}

/* ---- arithmetic ---- */

/* A block of Rows x Cols sums stays in registers while k goes from 0 to depth: the order of the additions is that of the plain loop. */
template <uint32_t Rows, uint32_t Cols> [[gnu::always_inline]] static inline void multiply_block(float *__restrict d, size_t pitch, const float *__restrict a, const float *__restrict b,
                                                                                               size_t rows, size_t n, size_t depth)
{
    float sum[Rows][Cols];
    for (uint32_t r = 0; r < Rows; r++)
        for (uint32_t c = 0; c < Cols; c++)
            sum[r][c] = d[r * pitch + c];
    for (uint32_t k = 0; k < depth; k++)
        for (uint32_t r = 0; r < Rows; r++)
            for (uint32_t c = 0; c < Cols; c++)
                sum[r][c] = __builtin_fmaf(a[k * rows + r], b[k * n + c], sum[r][c]);
    for (uint32_t r = 0; r < Rows; r++)
        for (uint32_t c = 0; c < Cols; c++)
            d[r * pitch + c] = sum[r][c];
}

/* rows is a multiple of 4, n of 8. */
#define MULTIPLY_PARAMETERS float *d, size_t pitch, const float *a, const float *b, size_t rows, size_t n, size_t depth
[[gnu::always_inline]] static inline void multiply_blocks(MULTIPLY_PARAMETERS)
{
    for (size_t row = 0; row < rows; row += 4) {
        size_t col = 0;
        for (; col + 16 <= n; col += 16)
            multiply_block<4, 16>(d + row * pitch + col, pitch, a + row, b + col, rows, n, depth);
        if (col < n)
            multiply_block<4, 8>(d + row * pitch + col, pitch, a + row, b + col, rows, n, depth);
    }
}
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void multiply_fma(MULTIPLY_PARAMETERS) { multiply_blocks(d, pitch, a, b, rows, n, depth); }
#endif
static void multiply_portable(MULTIPLY_PARAMETERS) { multiply_blocks(d, pitch, a, b, rows, n, depth); }

void multiply_add(MULTIPLY_PARAMETERS)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2")) {
        multiply_fma(d, pitch, a, b, rows, n, depth);
        return;
    }
#endif
    multiply_portable(d, pitch, a, b, rows, n, depth);
}

static void execute(const Cta &cta, Wgmma &op)
{
    static float a[kDepth * kRows], b[kDepth * 256], d[kRows * 256];
    fetch(cta, op.a, op.a_mn_major, kRows, a);
    fetch(cta, op.b, op.b_mn_major, op.n, b);
    auto each_register = [&](auto &&visit) {
        for (uint32_t t = 0; t < kThreads; t++)
            for (uint32_t i = 0; i < op.n / 2; i++) {
                const uint32_t row = 16 * (t / 32) + t % 32 / 4 + 8 * (i >> 1 & 1);
                const uint32_t col = 8 * (i >> 2) + 2 * (t % 4) + (i & 1);
                visit(d[row * op.n + col], op.d[t][i]);
            }
    };
    each_register([&](float &cell, float &reg) { cell = op.accumulate ? reg : 0.0f; });
    multiply_add(d, op.n, a, b, kRows, op.n, kDepth);
    each_register([&](float &cell, float &reg) { reg = cell; });
    op.done = true;
}

/* One of these is pending for each operation; whichever the scheduler picks, the oldest of the warpgroup is done. */
struct WgmmaOp : AsyncOp {
    Cta *cta = nullptr;
    Warpgroup *group = nullptr;
    bool advance() override
    {
        execute(*cta, *group->ops[group->completed - group->first]);
        group->completed++;
        wake(group->waiters);
        return true;
    }
};

/* ---- issue and wait ---- */

static void begin_reads(Cta &cta, Wgmma &op)
{
    check_descriptor(op.a);
    check_descriptor(op.b);
    auto mark = [&](uint32_t, uint32_t, uint32_t address) {
        const uint32_t offset = resolve(address, 16, "wgmma operand").offset;
        begin_async_read(cta, offset, "wgmma");
        op.granules.push_back(offset);
    };
    for_each_piece(op.a, op.a_mn_major, kRows, mark);
    for_each_piece(op.b, op.b_mn_major, op.n, mark);
}

void wgmma_issue(float *d, int n, uint64_t a, uint64_t b, bool accumulate, bool a_mn_major, bool b_mn_major)
{
    step();
    Thread &t = *self;
    Cta &cta = *t.cta;
    Warpgroup &group = cta.warpgroups[t.idx / kThreads];
    if (!t.wgmma_fenced)
        fail("wgmma without wgmma_fence since its accumulators were last free to be touched");
    const uint32_t number = t.wgmma_issued++;
    while (group.first + group.ops.size() <= number)
        group.ops.push_back(std::make_shared<Wgmma>());
    Wgmma &op = *group.ops[number - group.first];
    if (op.issued == 0) {
        op.n = (uint32_t)n;
        op.a = a;
        op.b = b;
        op.accumulate = accumulate;
        op.a_mn_major = a_mn_major;
        op.b_mn_major = b_mn_major;
        begin_reads(cta, op);  /* from now on: whoever issues first may be read first */
    } else if (op.n != (uint32_t)n || op.a != a || op.b != b || op.accumulate != accumulate) {
        fail("the threads of a warpgroup issue different wgmma: %016llx %016llx and %016llx %016llx", (unsigned long long)a, (unsigned long long)b,
             (unsigned long long)op.a, (unsigned long long)op.b);
    }
    op.d[t.idx % kThreads] = d;
    if (++op.issued < kThreads)
        return;
    auto pending = std::make_shared<WgmmaOp>();
    pending->cta = &cta;
    pending->group = &group;
    submit(pending);
}

static bool operations_done(Thread &t) { return t.cta->warpgroups[t.idx / kThreads].completed >= t.wait_value; }

void wgmma_wait_groups(int newer)
{
    step();
    warp_rendezvous("wgmma_wait", [](Warp &) {});
    Thread &t = *self;
    Warpgroup &group = t.cta->warpgroups[t.idx / kThreads];
    uint32_t upto = t.wgmma_observed;
    while (t.wgmma_group_ends.size() > (size_t)newer) {
        upto = t.wgmma_group_ends.front();
        t.wgmma_group_ends.pop_front();
    }
    block(group.waiters, operations_done, "its MMAs", nullptr, upto);
    if (newer == 0)
        t.wgmma_fenced = false;
    for (; t.wgmma_observed < upto; t.wgmma_observed++) {
        Wgmma &op = *group.ops[t.wgmma_observed - group.first];
        if (++op.observed == kThreads)
            for (uint32_t offset : op.granules)
                end_async_read(*t.cta, offset);
    }
    while (!group.ops.empty() && group.ops.front()->observed == kThreads) {
        group.ops.pop_front();
        group.first++;
    }
    /* Where one lane has waited, the instruction has waited for the whole warp. */
    warp_rendezvous("wgmma_wait", [](Warp &) {});
}

} /* namespace emu */

namespace mk {
using namespace emu;

void wgmma_fence()
{
    step();
    self->wgmma_fenced = true;
}

void wgmma_commit()
{
    step();
    self->wgmma_group_ends.push_back(self->wgmma_issued);
}

} /* namespace mk */
