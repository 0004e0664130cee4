/* tcgen05 on the emulator against plain loops: bf16 over a pair of CTAs in both layouts of B, MX with scales, and what Cluster Launch Control
 * hands out. */
#include "pair_case.h"

static void run_pair(uint32_t n, uint32_t depth)
{
    for (uint64_t i = 0; i < 3; i++) {
        emu::Machine machine(test_seed() + i);
        PairMemory m(machine, n, depth, test_seed() + i);
        machine.add_device(1).launch(pair_launch(), [&] { PairKernel{m}.all(); });
        const emu::Result r = machine.run();
        if (!r.ok)
            TEST_FAILED("%s", r.message.c_str());
        int wrong = 0;
        for (uint32_t row = 0; row < 256; row++)
            for (uint32_t col = 0; col < n; col++)
                wrong += m.d[row * n + col] != m.expected(row, col);
        CHECK_EQ(wrong, 0);
    }
}

TEST(bf16_256x256) { run_pair(256, 128); }
TEST(bf16_256x128) { run_pair(128, 64); }

/* Both operands with their rows contiguous, as a weight gradient reads them: A[64, 256], B[64, 256]. Boxes of 64 x 64, one after the other. */
TEST(bf16_other_axis_contiguous)
{
    enum { DEPTH = 64, N = 256 };
    emu::Machine machine(test_seed());
    PairMemory m(machine, N, DEPTH, test_seed());
    m.map_a = PairMemory::encode(mk_tensor_operand(m.a.device(), 256, DEPTH, 0, 64));
    m.map_b = PairMemory::encode(mk_tensor_operand(m.b.device(), N, DEPTH, 0, 64));
    machine.add_device(1).launch(pair_launch(), [&] {
        PairKernel k{m};
        k.begin();
        const int32_t r = (int32_t)cluster_rank();
        if (thread_idx() == 0) {
            if (r == 0)
                mbar_arrive_expect_tx_release_cta(k.full(0), 2 * 4 * 8192);
            for (int32_t half = 0; half < 2; half++) {
                tma_load_2d_pair(k.a(0) + (uint32_t)half * 8192, &m.map_a, r * 128 + half * 64, 0, cluster_addr(k.full(0), 0));
                tma_load_2d_pair(k.b(0) + (uint32_t)half * 8192, &m.map_b, r * 128 + half * 64, 0, cluster_addr(k.full(0), 0));
            }
        }
        if (k.issues()) {
            wait_mbar_cluster(k.full(0), 0, "full");
            for (uint32_t step = 0; step < 4; step++)
                tcgen05_mma_pair_bf16(load(k.address()), mk_smem_descriptor_sm100(k.a(0), 8192, 1024, MK_SMEM_SWIZZLE_128B) + step * (2048 >> 4),
                                      mk_smem_descriptor_sm100(k.b(0), 8192, 1024, MK_SMEM_SWIZZLE_128B) + step * (2048 >> 4),
                                      mk_mma_descriptor_bf16(256, N, 1, 1), step > 0);
        }
        k.commit();
        k.wait_done();
        k.store_sums();
        k.end();
    });
    const emu::Result result = machine.run();
    if (!result.ok)
        TEST_FAILED("%s", result.message.c_str());
    int wrong = 0;
    for (uint32_t row = 0; row < 256; row++)
        for (uint32_t col = 0; col < N; col++) {
            float sum = 0;
            for (uint32_t i = 0; i < DEPTH; i++)
                sum = fmaf(emu::bf16_to_float(m.a[i * 256 + row]), emu::bf16_to_float(m.b[i * N + col]), sum);
            wrong += m.d[row * N + col] != sum;
        }
    CHECK_EQ(wrong, 0);
}

/* ---- MX ---- */

TEST(mx_e4m3_with_scales)
{
    for (uint64_t i = 0; i < 3; i++) {
        emu::Machine machine(test_seed() + i);
        ScaledMemory m(machine, test_seed() + i);
        machine.add_device(1).launch(pair_launch(), [&] { ScaledKernel(m).all(); });
        const emu::Result r = machine.run();
        if (!r.ok)
            TEST_FAILED("%s", r.message.c_str());
        CHECK_EQ(m.count_differences(), 0);
    }
}

/* ---- Cluster Launch Control ---- */

/* Each cluster does its own work, then asks for more until it is refused. Every block's work must be done exactly once, refused or not. */
static void ask_until_refused(uint32_t *done)
{
    struct Shared { Vec4 answer; uint64_t bar; };
    Shared &s = *static_cast<Shared *>(shared_base());
    const uint32_t answer = smem_addr(&s.answer), bar = smem_addr(&s.bar);
    if (thread_idx() == 0) {
        mbar_init(bar, 1);
        fence_mbar_init_release_cluster();
    }
    barrier_cluster_arrive_release();
    barrier_cluster_wait_acquire();
    uint32_t block = block_idx();
    for (uint32_t round = 0;; round++) {
        if (thread_idx() == 0) {
            ticket_take_relaxed_gpu(&done[block], 1);
            mbar_arrive_expect_tx_release_cta(bar, 16);
            fence_proxy_async_acquire_cluster();
        }
        barrier_cluster_arrive_release();
        barrier_cluster_wait_acquire();
        if (thread_idx() == 0 && cluster_rank() == 0)
            launch_try_cancel_multicast(answer, bar);
        wait_mbar_cluster(bar, round & 1, "answer");
        const Vec4 a = load_shared_b128(answer);
        fence_proxy_async_release_cluster();
        if (!launch_was_cancelled(a))
            break;
        block = launch_cancelled_block(a) + cluster_rank();
    }
    barrier_cluster_arrive_release();
    barrier_cluster_wait_acquire();
}

TEST(launch_control_hands_out_everything_once)
{
    enum { BLOCKS = 24 };
    for (uint64_t i = 0; i < 12; i++) {
        emu::Machine machine(test_seed() + i);
        emu::Buffer<uint32_t> done(machine, "done", BLOCKS);
        memset(done.host(), 0, BLOCKS * sizeof(uint32_t));
        emu::Launch l;
        l.blocks = BLOCKS;
        l.cluster = 2;
        l.threads = 32;
        l.shared_bytes = 64;
        emu::Device &gpu = machine.add_device(1 + (uint32_t)i % 4);
        gpu.refuse_launches((uint32_t)i % 3 * 2);
        gpu.launch(l, [&] { ask_until_refused(done.device()); });
        const emu::Result r = machine.run();
        if (!r.ok)
            TEST_FAILED("%s", r.message.c_str());
        for (int b = 0; b < BLOCKS; b++)
            CHECK_EQ(done[(size_t)b], 1);
    }
}

int main(int argc, char **argv) { return test_main(argc, argv); }
