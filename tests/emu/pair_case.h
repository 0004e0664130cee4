/* One MMA tile over a pair of CTAs, written out by hand: what the tests of tcgen05 and the planted mistakes start from. Every step is a member that a test can
 * leave out or replace. */
#ifndef MK_TESTS_PAIR_CASE_H
#define MK_TESTS_PAIR_CASE_H

#include "cuda/arch/arch.cuh"
#include "cuda/sync/wait.cuh"
#include "test.h"
#include <functional>
#include <vector>

using namespace mk;

/* D[256, N] = A[256, K] B[N, K]^T, bf16, K a multiple of 64; B is [N, K] or, where N is the contiguous axis, [K, N]. */
struct PairMemory {
    emu::Buffer<uint16_t> a, b;
    emu::Buffer<float> d;
    mk_tensor_map map_a, map_b;
    uint32_t n, depth;

    static mk_tensor_map encode(const mk_tensor &t)
    {
        mk_tensor_map m;
        if (mk_tensor_map_encode(&m, &t, emu::tensor_map_encode_tiled) != 0)
            TEST_FAILED("tensor map refused");
        return m;
    }
    PairMemory(emu::Machine &m, uint32_t cols, uint32_t k, uint64_t seed) : a(m, "a", 256 * k), b(m, "b", cols * k), d(m, "d", 256 * cols), n(cols), depth(k)
    {
        uint64_t state = seed;
        for (size_t i = 0; i < a.count(); i++)
            a.host()[i] = emu::float_to_bf16((float)test_normal(&state));
        for (size_t i = 0; i < b.count(); i++)
            b.host()[i] = emu::float_to_bf16((float)test_normal(&state));
        map_a = encode(mk_tensor_operand(a.device(), k, 256, 0, 128));
        map_b = encode(mk_tensor_operand(b.device(), k, cols, 0, cols / 2));
    }
    float expected(uint32_t row, uint32_t col) const
    {
        float sum = 0;
        for (uint32_t k = 0; k < depth; k++)
            sum = fmaf(emu::bf16_to_float(a[row * depth + k]), emu::bf16_to_float(b[col * depth + k]), sum);
        return sum;
    }
};

/* 128 threads a CTA: warp w reads lanes 32w .. of its CTA's sums. Thread 0 of rank 0 issues. One stage for each 64 of K. */
struct PairKernel {
    const PairMemory &m;
    enum { STAGE_A = 128 * 128, STAGE_B = 128 * 128, STAGES = 2, BARS = STAGES * (STAGE_A + STAGE_B), BYTES = BARS + 1024 };
    char *base = static_cast<char *>(shared_base());

    uint32_t a(uint32_t k) const { return smem_addr(base + k * (STAGE_A + STAGE_B)); }
    uint32_t b(uint32_t k) const { return a(k) + STAGE_A; }
    uint32_t full(uint32_t k) const { return smem_addr(base + BARS + 8 * k); }
    uint32_t done() const { return smem_addr(base + BARS + 64); }
    uint32_t read() const { return smem_addr(base + BARS + 72); }
    uint32_t *address() const { return reinterpret_cast<uint32_t *>(base + BARS + 128); }
    bool issues() const { return cluster_rank() == 0 && thread_idx() == 0; }
    uint32_t blocks() const { return m.depth / 64; }

    void begin() const
    {
        if (thread_idx() == 0) {
            for (uint32_t k = 0; k < STAGES; k++)
                mbar_init(full(k), 1);
            mbar_init(done(), 1);
            mbar_init(read(), 8);
            fence_mbar_init_release_cluster();
        }
        if (warp_idx() == 1) {
            tmem_allocate_pair<256>(smem_addr(address()));
            tmem_relinquish_pair();
            tcgen05_fence_before_sync();
        }
        cluster_barrier();
        tcgen05_fence_after_sync();
    }
    void cluster_barrier() const
    {
        barrier_cluster_arrive_release();
        barrier_cluster_wait_acquire();
    }
    void load() const
    {
        if (thread_idx() != 0)
            return;
        const int32_t r = (int32_t)cluster_rank();
        for (uint32_t k = 0; k < blocks(); k++) {
            if (r == 0)
                mbar_arrive_expect_tx_release_cta(full(k), 2 * (STAGE_A + m.n / 2 * 128));
            tma_load_2d_pair(a(k), &m.map_a, (int32_t)k * 64, r * 128, cluster_addr(full(k), 0));
            tma_load_2d_pair(b(k), &m.map_b, (int32_t)k * 64, r * (int32_t)m.n / 2, cluster_addr(full(k), 0));
        }
    }
    void multiply_block(uint32_t k, uint32_t instruction) const
    {
        for (uint32_t step = 0; step < 4; step++)
            tcgen05_mma_pair_bf16(mk::load(address()), mk_operand_sm100(a(k)) + 2 * step, mk_operand_sm100(b(k)) + 2 * step, instruction, k > 0 || step > 0);
    }
    void multiply() const
    {
        if (!issues())
            return;
        for (uint32_t k = 0; k < blocks(); k++) {
            wait_mbar_cluster(full(k), 0, "pair: full stage");
            multiply_block(k, mk_mma_descriptor_bf16(256, m.n, 0, 0));
        }
    }
    void commit() const
    {
        if (issues())
            tcgen05_commit_pair(done(), 3);
    }
    void wait_done() const
    {
        wait_mbar_cluster(done(), 0, "pair: sums");
        tcgen05_fence_after_sync();
    }
    void store_block(uint32_t block, uint32_t col) const
    {
        float v[32];
        tmem_load_16x64(mk::load(address()) + mk_tmem_address(warp_idx() * 32 + block * 16, col), v);
        tmem_wait_load(v);
        for (uint32_t i = 0; i < 32; i++)
            store(&m.d.device()[(cluster_rank() * 128 + warp_idx() * 32 + block * 16 + lane_idx() / 4 + 8 * (i % 4 / 2)) * m.n + col + 8 * (i / 4) + 2 * (lane_idx() % 4) + i % 2], v[i]);
    }
    void store_sums() const
    {
        for (uint32_t col = 0; col < m.n; col += 64)
            for (uint32_t block = 0; block < 2; block++)
                store_block(block, col);
    }
    void end() const
    {
        tcgen05_fence_before_sync();
        cluster_barrier();
        if (warp_idx() == 1)
            tmem_release_pair<256>(mk::load(address()));
    }
    void all() const
    {
        begin();
        load();
        multiply();
        commit();
        wait_done();
        store_sums();
        end();
    }
};

/* ---- MXFP8 ---- */

/* e4m3 without NaN, worked out apart from the emulator. */
static inline float e4m3(uint8_t x)
{
    const int e = x >> 3 & 15, f = x & 7;
    return (x & 128 ? -1.0f : 1.0f) * (e ? (float)(8 + f) * exp2f((float)(e - 10)) : (float)f * exp2f(-9.0f));
}

/* D[256, N] over K = 128: A and B in e4m3, a scale for each row and 32 of K, in atoms as the copy engine brings them. */
struct ScaledMemory {
    enum { N = 128, DEPTH = 128 };
    emu::Buffer<uint8_t> a, b, a_scales, b_scales;
    PairMemory plain;  /* d, and operands nobody looks at */
    mk_tensor_map map_a, map_b;
    explicit ScaledMemory(emu::Machine &m, uint64_t seed) : a(m, "a", 256 * DEPTH), b(m, "b", N * DEPTH), a_scales(m, "scales of a", 1024),
                                                            b_scales(m, "scales of b", 512), plain(m, N, 64, seed)
    {
        uint64_t state = seed;
        auto fill = [&](emu::Buffer<uint8_t> &x, bool scales) {
            for (size_t i = 0; i < x.count(); i++) {
                uint8_t byte = (uint8_t)test_below(&state, 256);
                x.host()[i] = scales ? (uint8_t)(117 + byte % 20) : (byte & 127) == 127 ? 0 : byte;
            }
        };
        fill(a, false), fill(b, false), fill(a_scales, true), fill(b_scales, true);
        map_a = PairMemory::encode(mk_tensor_operand_e4m3(a.device(), DEPTH, 256, 0, 128));
        map_b = PairMemory::encode(mk_tensor_operand_e4m3(b.device(), DEPTH, N, 0, N / 2));
    }
    float expected(uint32_t row, uint32_t col) const
    {
        float sum = 0;
        for (uint32_t k = 0; k < DEPTH; k++) {
            const int sa = a_scales[(size_t)mk_scale_byte(row, k / 32, 4)] - 127, sb = b_scales[(size_t)mk_scale_byte(col, k / 32, 4)] - 127;
            sum = fmaf(ldexpf(e4m3(a[row * DEPTH + k]), sa), ldexpf(e4m3(b[col * DEPTH + k]), sb), sum);
        }
        return sum;
    }
    int count_differences() const
    {
        int wrong = 0;
        for (uint32_t row = 0; row < 256; row++)
            for (uint32_t col = 0; col < N; col++)
                wrong += plain.d[row * N + col] != expected(row, col);
        return wrong;
    }
};

/* As PairKernel. Scales lie in shared memory where its second stage would be, and in tensor memory behind D: A's 4 columns, then B's. */
struct ScaledKernel : PairKernel {
    enum { COLUMNS = ScaledMemory::N };
    const ScaledMemory &of;
    explicit ScaledKernel(const ScaledMemory &memory) : PairKernel{memory.plain}, of(memory) {}

    uint32_t scales(uint32_t operand) const { return a(1) + operand * MK_SCALE_ATOM_BYTES; }
    uint32_t columns(uint32_t operand) const { return mk::load(address()) + COLUMNS + operand * MK_SCALE_ATOM_COLUMNS; }
    /* Scales of this CTA's rows of A, or of all rows of B. */
    const uint8_t *scales_in_memory(uint32_t operand) const { return operand ? of.b_scales.device() : of.a_scales.device() + cluster_rank() * MK_SCALE_ATOM_BYTES; }

    void load_operands() const
    {
        const int32_t r = (int32_t)cluster_rank();
        if (thread_idx() != 0)
            return;
        if (r == 0)
            mbar_arrive_expect_tx_release_cta(full(0), 2 * (128 * 128 + 64 * 128));
        tma_load_2d_pair(a(0), &of.map_a, 0, r * 128, cluster_addr(full(0), 0));
        tma_load_2d_pair(b(0), &of.map_b, 0, r * 64, cluster_addr(full(0), 0));
    }
    void load_scales() const
    {
        if (thread_idx() == 0) {
            mbar_arrive_expect_tx_release_cta(full(1), 2 * MK_SCALE_ATOM_BYTES);
            for (uint32_t operand = 0; operand < 2; operand++)
                bulk_load(scales(operand), scales_in_memory(operand), MK_SCALE_ATOM_BYTES, full(1));
            wait_mbar(full(1), 0, "scales");
        }
        cluster_barrier();
    }
    void copy_scales() const
    {
        for (uint32_t operand = 0; operand < 2; operand++)
            tcgen05_copy_scales_pair(columns(operand), mk_scale_descriptor_sm100(scales(operand)));
    }
    void multiply(uint32_t first_id = 0) const
    {
        wait_mbar_cluster(full(0), 0, "full");
        for (uint32_t step = 0; step < 4; step++)
            tcgen05_mma_pair_mx(mk::load(address()), mk_operand_sm100(a(0)) + 2 * step, mk_operand_sm100(b(0)) + 2 * step,
                                mk_mma_descriptor_mx(256, ScaledMemory::N, 0, 0, MK_MMA_E4M3, MK_MMA_E4M3, (first_id + step) % 4, step), columns(0), columns(1), step > 0);
    }
    void finish() const
    {
        commit();
        wait_done();
        store_sums();
        end();
    }
    void all() const
    {
        begin();
        load_operands();
        load_scales();
        if (issues()) {
            copy_scales();
            multiply();
        }
        finish();
    }
};

static inline emu::Launch pair_launch()
{
    emu::Launch l;
    l.blocks = l.cluster = 2;
    l.threads = 128;
    l.shared_bytes = PairKernel::BYTES;
    l.name = "pair";
    return l;
}
#endif
