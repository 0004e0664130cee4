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
