/* The arch functions on the emulator, each against what the instruction set says: address arithmetic against vectors
 * worked out by hand, and the instructions themselves in small kernels, over several orders. */
#include "cuda/arch/arch.cuh"
#include "cuda/sync/wait.cuh"
#include "test.h"
#include <vector>

using namespace mk;

static const int kSeeds = 20;

/* Runs one CTA (or cluster) of the kernel under many orders. */
template <class Kernel> static void run_orders(emu::Launch shape, Kernel kernel)
{
    for (int i = 0; i < kSeeds; i++) {
        emu::Machine machine(test_seed() + (uint64_t)i);
        kernel(machine, shape);
        const emu::Result result = machine.run();
        if (!result.ok) {
            TEST_FAILED("%s", result.message.c_str());
            return;
        }
    }
}

static emu::Launch launch_of(uint32_t threads, uint32_t shared_bytes, uint32_t cluster = 1)
{
    emu::Launch l;
    l.blocks = l.cluster = cluster;
    l.threads = threads;
    l.shared_bytes = shared_bytes;
    return l;
}

/* ---- known vectors ---- */

TEST(swizzle_128B) { CHECK_EQ(emu::swizzle_address(0x1a0, MK_SWIZZLE_128B), 0x190); }

static uint64_t descriptor(uint32_t start, uint32_t leading, uint32_t stride)
{
    return 1ull << 62 | (uint64_t)(stride >> 4) << 32 | (uint64_t)(leading >> 4) << 16 | start >> 4;
}

TEST(descriptor_bits)
{
    CHECK_EQ(descriptor(0x8400, 16, 1024), 0x4000004000010840);
    CHECK_EQ(descriptor(0x8400, 8192, 1024), 0x4000004002000840);
}

TEST(matrix_elements_k_major)
{
    static const uint32_t at[][3] = {{0, 0, 0x8400}, {1, 0, 0x8490}, {5, 9, 0x86c2}, {9, 17, 0x88b2}, {63, 63, 0xa38e}, {127, 40, 0xc3a0}};
    for (auto &v : at)
        CHECK_EQ(emu::matrix_element_address(descriptor(0x8400, 16, 1024), false, v[0], v[1]), v[2]);
    for (uint32_t r = 0; r < 128; r++)  /* a step of 16 along k is 32 bytes more in the start address */
        for (uint32_t k = 0; k < 64; k++)
            CHECK_EQ(emu::matrix_element_address(descriptor(0x8400, 16, 1024), false, r, k),
                     emu::matrix_element_address(descriptor(0x8400 + k / 16 * 32, 16, 1024), false, r, k % 16));
}

TEST(matrix_elements_mn_major)
{
    static const uint32_t at[][3] = {{0, 1, 0x8490}, {8, 1, 0x8480}, {65, 0, 0xa402}, {70, 19, 0xadbc}};
    for (auto &v : at)
        CHECK_EQ(emu::matrix_element_address(descriptor(0x8400, 8192, 1024), true, v[0], v[1]), v[2]);
}

TEST(bf16_rounding)
{
    CHECK_EQ(emu::float_to_bf16(1.0f), 0x3f80);
    CHECK_EQ(emu::float_to_bf16(1.00390625f), 0x3f80);   /* halfway, to even */
    CHECK_EQ(emu::float_to_bf16(1.01171875f), 0x3f82);
    CHECK_EQ(emu::float_to_bf16(INFINITY), 0x7f80);
    CHECK(isnan(emu::bf16_to_float(emu::float_to_bf16(NAN))));
}

TEST(tensor_maps_that_the_driver_refuses)
{
    mk_tensor good = mk_tensor_operand((void *)4096, 128, 32, 0, 32), bad;
    mk_tensor_map map;
    CHECK_EQ(mk_tensor_map_encode(&map, &good, emu::tensor_map_encode_tiled), 0);
#define REFUSED(change)                                                              \
    bad = good;                                                                      \
    change;                                                                          \
    CHECK(mk_tensor_map_encode(&map, &bad, emu::tensor_map_encode_tiled) != 0)
    REFUSED(bad.address = (void *)4104);
    REFUSED(bad.stride_bytes[0] = 264);
    REFUSED(bad.box[0] = 128);
    REFUSED(bad.box[1] = 257);
    REFUSED(bad.box[1] = 0);
    REFUSED(bad.dim[1] = 0);
    REFUSED(bad.rank = 4);
    REFUSED(bad.type = 13);
#undef REFUSED
}

/* ---- warps and barriers ---- */

TEST(shuffles_ballot_and_match)
{
    run_orders(launch_of(64, 0), [](emu::Machine &m, const emu::Launch &l) {
        m.add_device(1).launch(l, [] {
            const uint32_t lane = lane_idx();
            CHECK_EQ(shuffle(lane * 3, (lane + 1) % 32), (lane + 1) % 32 * 3);
            CHECK_EQ(shuffle_xor(lane, 5), lane ^ 5);
            CHECK_EQ(shuffle_xor((float)lane, 16), (float)(lane ^ 16));
            CHECK_EQ(ballot(lane % 3 == 0), 0x49249249);
            CHECK_EQ(match_any(lane / 16), lane < 16 ? 0xffffu : 0xffff0000u);
            CHECK_EQ(ballot(elect_one()), 1);
            CHECK_EQ(warp_idx(), thread_idx() / 32);
        });
    });
}

/* Rows of four matrices come out at the addresses their lanes gave. */
TEST(store_matrix)
{
    run_orders(launch_of(32, 1024), [](emu::Machine &m, const emu::Launch &l) {
        m.add_device(1).launch(l, [] {
            uint16_t *s = static_cast<uint16_t *>(shared_base());
            const uint32_t lane = lane_idx();
            uint32_t r[4];
            for (uint32_t i = 0; i < 4; i++)  /* element (row, col) of matrix i is 100 i + 8 row + col */
                r[i] = (100 * i + 8 * (lane / 4) + 2 * (lane % 4)) | (100 * i + 8 * (lane / 4) + 2 * (lane % 4) + 1) << 16;
            store_matrix_x4(smem_addr(s + 8 * lane), r);
            sync_warp();
            for (uint32_t c = 0; c < 8; c++)
                CHECK_EQ(load(&s[8 * lane + c]), 100 * (lane / 8) + 8 * (lane % 8) + c);
        });
    });
}

/* Everybody's value before the barrier is seen after it; arrive and sync on one named barrier. */
TEST(block_and_named_barriers)
{
    run_orders(launch_of(96, 96 * 4), [](emu::Machine &m, const emu::Launch &l) {
        m.add_device(1).launch(l, [] {
            uint32_t *s = static_cast<uint32_t *>(shared_base());
            for (uint32_t round = 0; round < 3; round++) {
                store(&s[thread_idx()], thread_idx() + round);
                barrier_block_sync();
                CHECK_EQ(load(&s[(thread_idx() + 17) % 96]), (thread_idx() + 17) % 96 + round);
                barrier_block_sync();
            }
            if (thread_idx() < 32)
                store(&s[thread_idx()], 7u);
            if (thread_idx() < 64) {
                barrier_named_arrive(3, 96);
            } else {
                barrier_named_sync(3, 96);
                CHECK_EQ(load(&s[thread_idx() - 64]), 7);
            }
        });
    });
}

TEST(cluster_barrier_and_remote_arrive)
{
    run_orders(launch_of(32, 16, 2), [](emu::Machine &m, const emu::Launch &l) {
        m.add_device(1).launch(l, [] {
            uint64_t *bar = static_cast<uint64_t *>(shared_base());
            if (thread_idx() == 0) {
                mbar_init(smem_addr(bar), 2);
                fence_mbar_init_release_cluster();
            }
            barrier_cluster_arrive_release();
            barrier_cluster_wait_acquire();
            for (uint32_t phase = 0; phase < 5; phase++) {
                if (lane_idx() < 2)
                    mbar_arrive_remote_release_cta(cluster_addr(smem_addr(bar), lane_idx()));
                wait_mbar(smem_addr(bar), phase & 1, "both CTAs");
                sync_warp();  /* nobody may be two phases behind */
            }
            barrier_cluster_arrive_release();
            barrier_cluster_wait_acquire();
        });
    });
}

/* Lowering frees what raising needs, whatever the order. */
TEST(register_budgets)
{
    run_orders(launch_of(384, 0), [](emu::Machine &m, const emu::Launch &l) {
        m.add_device(1).launch(l, [] {
            if (warp_idx() < 4)
                registers_lower<40>();
            else
                registers_raise<232>();
        });
    });
}

/* ---- copies ---- */

TEST(bulk_load_then_bulk_store)
{
    for (int i = 0; i < kSeeds; i++) {
        emu::Machine m(test_seed() + (uint64_t)i);
        emu::Buffer<uint32_t> from(m, "from", 256), to(m, "to", 256);
        uint32_t *host = from.host();
        for (uint32_t j = 0; j < 256; j++)
            host[j] = j * j;
        m.add_device(1).launch(launch_of(1, 2048), [&] {
            char *s = static_cast<char *>(shared_base());
            const uint32_t bar = smem_addr(s), data = smem_addr(s + 1024);
            mbar_init(bar, 1);
            fence_mbar_init_release_cluster();
            mbar_arrive_expect_tx_release_cta(bar, 1024);
            bulk_load(data, from.device(), 512, bar);
            bulk_load(data + 512, from.device() + 128, 512, bar);
            wait_mbar(bar, 0, "rows");
            CHECK_EQ(load(reinterpret_cast<uint32_t *>(s + 1024) + 200), 200 * 200);
            bulk_store(to.device(), data, 1024);
            bulk_commit();
            bulk_wait<0>();
        });
        const emu::Result result = m.run();
        if (!result.ok)
            TEST_FAILED("%s", result.message.c_str());
        CHECK(to.written(0, 256));
        CHECK_BYTES(&to[0], &from[0], 1024);
    }
}

/* A 3-D box that hangs over two edges: zeros outside, 128-byte swizzle inside, the whole box counted; multicast to both CTAs. */
TEST(tensor_load_swizzle_edges_and_multicast)
{
    for (int i = 0; i < kSeeds; i++) {
        emu::Machine m(test_seed() + (uint64_t)i);
        emu::Buffer<uint16_t> t(m, "tensor", 2 * 20 * 72);
        uint16_t *host = t.host();
        for (uint32_t j = 0; j < t.count(); j++)
            host[j] = (uint16_t)(j + 1);
        const mk_tensor tensor = mk_tensor_operand(t.device(), 72, 20, 2, 16);
        mk_tensor_map map;
        CHECK_EQ(mk_tensor_map_encode(&map, &tensor, emu::tensor_map_encode_tiled), 0);
        m.add_device(1).launch(launch_of(1, 4096, 2), [&] {
            char *s = static_cast<char *>(shared_base());
            const uint32_t bar = smem_addr(s), box = smem_addr(s + 1024);
            mbar_init(bar, 1);
            fence_mbar_init_release_cluster();
            barrier_cluster_arrive_release();
            barrier_cluster_wait_acquire();
            mbar_arrive_expect_tx_release_cta(bar, 16 * 128);
            if (cluster_rank() == 1)
                tma_load_3d_multicast(box, &map, 32, 10, 1, bar, 3);
            wait_mbar(bar, 0, "the box");
            for (int32_t y = 0; y < 16; y++)
                for (int32_t x = 0; x < 64; x++) {
                    const uint32_t at = emu::swizzle_address(box + (uint32_t)(y * 128 + x * 2), MK_SWIZZLE_128B) - box;
                    const bool inside = 10 + y < 20 && 32 + x < 72;
                    CHECK_EQ(load(reinterpret_cast<uint16_t *>(s + 1024 + at)), inside ? (uint16_t)((20 + 10 + y) * 72 + 32 + x + 1) : 0);
                }
            barrier_cluster_arrive_release();
            barrier_cluster_wait_acquire();
        });
        const emu::Result result = m.run();
        if (!result.ok)
            TEST_FAILED("%s", result.message.c_str());
    }
}

/* A box written by plain stores comes out un-swizzled, and clipped at the tensor's edge. */
TEST(tensor_store_clips)
{
    emu::Machine m(test_seed());
    emu::Buffer<uint16_t> t(m, "tensor", 12 * 64);
    const mk_tensor tensor = mk_tensor_operand(t.device(), 64, 12, 0, 8);
    mk_tensor_map map;
    CHECK_EQ(mk_tensor_map_encode(&map, &tensor, emu::tensor_map_encode_tiled), 0);
    m.add_device(1).launch(launch_of(1, 1024), [&] {
        const uint32_t box = smem_addr(shared_base());
        for (uint32_t y = 0; y < 8; y++)
            for (uint32_t piece = 0; piece < 8; piece++)
                store_shared_b128(emu::swizzle_address(box + y * 128 + piece * 16, MK_SWIZZLE_128B), {y, piece, 0, 0});
        fence_proxy_async_shared_cta();
        tma_store_2d(&map, 0, 8, box);
        bulk_commit();
        bulk_wait<0>();
    });
    const emu::Result result = m.run();
    if (!result.ok)
        TEST_FAILED("%s", result.message.c_str());
    CHECK(!t.written(0) && t.written(8 * 64, 4 * 64));
    for (uint32_t y = 0; y < 4; y++)
        for (uint32_t piece = 0; piece < 8; piece++) {
            CHECK_EQ(t[(8 + y) * 64 + piece * 8], y);
            CHECK_EQ(t[(8 + y) * 64 + piece * 8 + 2], piece);
        }
}

/* ---- MMA ---- */

/* D = A B^T for a 64 x 64 x 64 product, operands in shared memory as TMA would put them: contraction axis contiguous, or the other
 * one (then the matrix is stored as [k][mn]). */
template <int AMnMajor, int BMnMajor> static void multiply_64(uint64_t seed)
{
    emu::Machine m(seed);
    emu::Buffer<uint16_t> a(m, "a", 64 * 64), b(m, "b", 64 * 64);
    emu::Buffer<float> d(m, "d", 64 * 64);
    uint64_t state = seed;
    for (auto *x : {a.host(), b.host()})
        for (int i = 0; i < 64 * 64; i++)
            x[i] = emu::float_to_bf16((float)test_below(&state, 17) - 8.0f);
    const mk_tensor ta = mk_tensor_operand(a.device(), 64, 64, 0, 64), tb = mk_tensor_operand(b.device(), 64, 64, 0, 64);
    mk_tensor_map ma, mb;
    mk_tensor_map_encode(&ma, &ta, emu::tensor_map_encode_tiled);
    mk_tensor_map_encode(&mb, &tb, emu::tensor_map_encode_tiled);
    m.add_device(1).launch(launch_of(128, 1024 + 16384), [&] {
        char *s = static_cast<char *>(shared_base());
        const uint32_t bar = smem_addr(s), sa = smem_addr(s + 1024), sb = sa + 8192;
        if (thread_idx() == 0) {
            mbar_init(bar, 1);
            fence_mbar_init_release_cluster();
            mbar_arrive_expect_tx_release_cta(bar, 16384);
            tma_load_2d(sa, &ma, 0, 0, bar);
            tma_load_2d(sb, &mb, 0, 0, bar);
        }
        barrier_block_sync();
        wait_mbar(bar, 0, "operands");
        float acc[32];
        wgmma_fence();
        for (uint32_t step = 0; step < 4; step++)
            wgmma_m64n64k16_bf16<AMnMajor, BMnMajor>(acc, descriptor(sa + step * (AMnMajor ? 2048 : 32), 8192, 1024),
                                                     descriptor(sb + step * (BMnMajor ? 2048 : 32), 8192, 1024), step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        const uint32_t t = thread_idx();
        for (uint32_t i = 0; i < 32; i++)
            store(d.device() + (16 * (t / 32) + t % 32 / 4 + 8 * (i >> 1 & 1)) * 64 + 8 * (i >> 2) + 2 * (t % 4) + (i & 1), acc[i]);
    });
    const emu::Result result = m.run();
    if (!result.ok) {
        TEST_FAILED("%s", result.message.c_str());
        return;
    }
    int wrong = 0;
    for (int row = 0; row < 64; row++)
        for (int col = 0; col < 64; col++) {
            float sum = 0;
            for (int k = 0; k < 64; k++)
                sum += emu::bf16_to_float(AMnMajor ? a[(size_t)(k * 64 + row)] : a[(size_t)(row * 64 + k)]) *
                       emu::bf16_to_float(BMnMajor ? b[(size_t)(k * 64 + col)] : b[(size_t)(col * 64 + k)]);
            wrong += d[(size_t)(row * 64 + col)] != sum;
        }
    CHECK_EQ(wrong, 0);
}

TEST(mma_k_major) { for (int i = 0; i < 5; i++) multiply_64<0, 0>(test_seed() + (uint64_t)i); }
TEST(mma_a_mn_major) { for (int i = 0; i < 5; i++) multiply_64<1, 0>(test_seed() + (uint64_t)i); }
TEST(mma_b_mn_major) { for (int i = 0; i < 5; i++) multiply_64<0, 1>(test_seed() + (uint64_t)i); }

/* ---- flags between devices ---- */

TEST(flags_between_ranks_and_few_resident_clusters)
{
    for (int i = 0; i < kSeeds; i++) {
        emu::Machine m(test_seed() + (uint64_t)i);
        emu::Buffer<uint32_t> flag(m, "flag", 2), data(m, "data", 2);
        flag.host()[0] = flag.host()[1] = 0;
        for (uint32_t rank = 0; rank < 2; rank++) {
            emu::Launch l;
            l.blocks = 5;
            m.add_device(1).launch(l, [&, rank] {
                if (block_idx() == 0) {
                    store(data.device() + rank, 40 + rank);
                    flag_store_release_sys(flag.device() + rank, 1);
                }
                if (block_idx() == 4) {
                    while (flag_load_acquire_sys(flag.device() + (rank ^ 1)) == 0)
                        sleep_ns(20);
                    CHECK_EQ(load(data.device() + (rank ^ 1)), 40 + (rank ^ 1));
                }
            });
        }
        const emu::Result result = m.run();
        if (!result.ok)
            TEST_FAILED("%s", result.message.c_str());
    }
}

int main(int argc, char **argv) { return test_main(argc, argv); }
