/* Blackwell's own mistakes, each planted in a kernel that is right without it (pair_case.h), and expected to be reported under every order. */
#include "pair_case.h"

enum { N = 128, DEPTH = 128 };

static void expect_report(const char *message, const std::function<void(const PairKernel &)> &kernel, uint32_t depth = DEPTH)
{
    for (uint64_t i = 0; i < 4; i++) {
        emu::Machine machine(test_seed() + i);
        PairMemory memory(machine, N, depth, test_seed());
        machine.add_device(1).launch(pair_launch(), [&] { kernel(PairKernel{memory}); });
        const emu::Result result = machine.run();
        CHECK(!result.ok);
        CHECK_STR(result.message.c_str(), message);
        CHECK_STR(result.message.c_str(), "seed");
    }
}

/* begin, load, multiply, commit: what most cases share. */
static void sums(const PairKernel &k)
{
    k.begin();
    k.load();
    k.multiply();
    k.commit();
}

TEST(right_without_mistakes)
{
    emu::Machine machine(test_seed());
    PairMemory memory(machine, N, DEPTH, test_seed());
    machine.add_device(1).launch(pair_launch(), [&] { PairKernel{memory}.all(); });
    const emu::Result result = machine.run();
    if (!result.ok)
        TEST_FAILED("%s", result.message.c_str());
}

/* ---- reading sums ---- */

TEST(sums_read_without_waiting_for_the_commit)
{
    expect_report("is not ordered after the write", [](const PairKernel &k) {
        sums(k);
        k.cluster_barrier(); /* the MMAs have been issued, and that is all that is known */
        tcgen05_fence_after_sync();
        k.store_sums();
    });
}
TEST(sums_read_without_the_fence_after)
{
    expect_report("without tcgen05_fence_after_sync", [](const PairKernel &k) {
        sums(k);
        wait_mbar_cluster(k.done(), 0, "sums");
        k.store_sums();
    });
}
TEST(no_commit_at_all)
{
    expect_report("\"pair: sums\": mbarrier", [](const PairKernel &k) {
        k.begin();
        k.load();
        k.multiply();
        k.wait_done();
    });
}
TEST(commit_before_the_last_mmas)
{
    expect_report("is not ordered after the write", [](const PairKernel &k) {
        k.begin();
        k.load();
        if (k.issues()) {
            for (uint32_t block = 0; block < 2; block++) {
                wait_mbar_cluster(k.full(block), 0, "full");
                if (block == 1)
                    k.commit();
                k.multiply_block(block, mk_mma_descriptor_bf16(256, N, 0, 0));
            }
        }
        k.wait_done();
        k.store_sums();
    });
}
TEST(lanes_of_another_warp)
{
    expect_report("at lane 32 by warp 0, which reaches lanes 0 to 31", [](const PairKernel &k) {
        sums(k);
        k.wait_done();
        float v[32];
        if (warp_idx() == 0)
            tmem_load_16x64(load(k.address()) + mk_tmem_address(32, 0), v);
    });
}
TEST(columns_that_are_not_allocated)
{
    expect_report("is not allocated", [](const PairKernel &k) {
        sums(k);
        k.wait_done();
        float v[32];
        tmem_load_16x64((load(k.address()) ^ 256) + mk_tmem_address(warp_idx() * 32, 0), v);
    });
}
TEST(columns_that_nobody_wrote)
{
    expect_report("which was never written", [](const PairKernel &k) {
        sums(k);
        k.wait_done();
        float v[32];
        tmem_load_16x64(load(k.address()) + mk_tmem_address(warp_idx() * 32, N), v);
    });
}
TEST(loads_not_waited_for)
{
    expect_report("loads under way: tmem_wait_load comes first", [](const PairKernel &k) {
        sums(k);
        k.wait_done();
        float v[32];
        tmem_load_16x64(load(k.address()) + mk_tmem_address(warp_idx() * 32, 0), v);
        k.end();
    });
}

/* ---- using accumulators and stages again ---- */

/* The first tile is read; `hand_over` tells the MMA thread, which begins the next. */
static void two_tiles(const PairKernel &k, const std::function<void()> &hand_over)
{
    sums(k);
    k.wait_done();
    k.store_sums();
    hand_over();
    if (k.issues())
        k.multiply_block(0, mk_mma_descriptor_bf16(256, N, 0, 0));
    if (k.issues())
        tcgen05_commit_pair(k.full(1), 1);
    k.end();
}
TEST(accumulators_overwritten_before_they_were_read)
{
    expect_report("overwrites tensor memory", [](const PairKernel &k) { two_tiles(k, [] {}); });
}
TEST(accumulators_handed_over_without_the_fence_before)
{
    expect_report("without a tcgen05_fence_before_sync", [](const PairKernel &k) {
        two_tiles(k, [&] {
            k.cluster_barrier();
            tcgen05_fence_after_sync();
        });
    });
}
TEST(accumulators_taken_over_without_the_fence_after)
{
    expect_report("without tcgen05_fence_after_sync", [](const PairKernel &k) {
        two_tiles(k, [&] {
            tcgen05_fence_before_sync();
            k.cluster_barrier();
        });
    });
}
TEST(stage_refilled_before_its_mmas_are_done)
{
    expect_report("overwrites shared offset", [](const PairKernel &k) {
        sums(k);
        if (thread_idx() == 0)
            tma_load_2d_pair(k.a(0), &k.m.map_a, 0, 0, k.full(0));
        k.cluster_barrier();
    });
}
TEST(stage_of_the_other_cta_refilled_before_the_mmas_are_done)
{
    expect_report("overwrites shared offset", [](const PairKernel &k) {
        sums(k);
        k.cluster_barrier();
        if (thread_idx() == 0 && cluster_rank() == 1)
            tma_load_2d_pair(k.b(0), &k.m.map_b, 0, 0, k.full(0));
        k.cluster_barrier();
    });
}
TEST(mmas_before_the_operands_have_landed)
{
    expect_report("reads shared offset", [](const PairKernel &k) {
        k.begin();
        if (k.issues())
            mbar_arrive_expect_tx_release_cta(k.full(0), 1 << 16);
        if (k.issues())
            tma_load_2d_pair(k.a(0), &k.m.map_a, 0, 0, cluster_addr(k.full(0), 0));
        if (k.issues())
            k.multiply_block(0, mk_mma_descriptor_bf16(256, N, 0, 0));
        k.cluster_barrier();
    });
}
TEST(operand_written_by_threads_without_a_proxy_fence)
{
    expect_report("no fence_proxy_async_shared_cta followed", [](const PairKernel &k) {
        k.begin();
        if (thread_idx() == 0)
            for (uint32_t i = 0; i < PairKernel::STAGE_A + PairKernel::STAGE_B; i += 16)
                store_shared_b128(k.a(0) + i, {0, 0, 0, 0});
        k.cluster_barrier();
        if (k.issues())
            k.multiply_block(0, mk_mma_descriptor_bf16(256, N, 0, 0));
        k.cluster_barrier();
    });
}
TEST(bytes_counted_in_a_cta_of_no_pair)
{
    emu::Launch l = pair_launch();
    l.blocks = l.cluster = 4;
    for (uint64_t i = 0; i < 4; i++) {
        emu::Machine machine(test_seed() + i);
        PairMemory m(machine, N, DEPTH, test_seed());
        machine.add_device(1).launch(l, [&] {
            PairKernel k{m};
            k.begin();
            if (cluster_rank() == 2 && thread_idx() == 0)
                tma_load_2d_pair(k.a(0), &m.map_a, 0, 0, cluster_addr(k.full(0), 0));
            k.cluster_barrier();
        });
        const emu::Result result = machine.run();
        CHECK_STR(result.message.c_str(), "which is not its pair");
    }
}

/* ---- encodings ---- */

static void issue_with(const PairKernel &k, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate = false)
{
    k.begin();
    k.load();
    if (k.issues()) {
        wait_mbar_cluster(k.full(0), 0, "full");
        tcgen05_mma_pair_bf16(load(k.address()), a, b, instruction, accumulate);
    }
    k.cluster_barrier();
}
TEST(descriptor_of_hopper)
{
    expect_report("version 0", [](const PairKernel &k) { issue_with(k, mk_operand_sm90(k.a(0)), mk_operand_sm100(k.b(0)), mk_mma_descriptor_bf16(256, N, 0, 0)); });
}
TEST(descriptor_with_a_base_offset)
{
    expect_report("base offset", [](const PairKernel &k) { issue_with(k, mk_operand_sm100(k.a(0)) | 1ull << 49, mk_operand_sm100(k.b(0)), mk_mma_descriptor_bf16(256, N, 0, 0)); });
}
TEST(swizzle_code_that_does_not_exist)
{
    expect_report("swizzle code 3", [](const PairKernel &k) { issue_with(k, mk_operand_sm100(k.a(0)) | 1ull << 61, mk_operand_sm100(k.b(0)), mk_mma_descriptor_bf16(256, N, 0, 0)); });
}
TEST(instruction_with_reserved_bits)
{
    expect_report("reserved bits", [](const PairKernel &k) { issue_with(k, mk_operand_sm100(k.a(0)), mk_operand_sm100(k.b(0)), mk_mma_descriptor_bf16(256, N, 0, 0) | 1u << 23); });
}
TEST(instruction_with_an_odd_shape)
{
    expect_report("256 x 136", [](const PairKernel &k) { issue_with(k, mk_operand_sm100(k.a(0)), mk_operand_sm100(k.b(0)), mk_mma_descriptor_bf16(256, 136, 0, 0)); });
    expect_report("128 x 128", [](const PairKernel &k) { issue_with(k, mk_operand_sm100(k.a(0)), mk_operand_sm100(k.b(0)), mk_mma_descriptor_bf16(128, N, 0, 0)); });
}
TEST(adding_to_what_was_never_written)
{
    expect_report("that was never written", [](const PairKernel &k) { issue_with(k, mk_operand_sm100(k.a(0)), mk_operand_sm100(k.b(0)), mk_mma_descriptor_bf16(256, N, 0, 0), true); });
}

/* ---- scales ---- */

/* What the emulator says of a kernel, and how many sums are wrong if it says nothing. */
static emu::Result run_scaled(uint64_t seed, const std::function<void(const ScaledKernel &)> &kernel, int *wrong)
{
    emu::Machine machine(seed);
    ScaledMemory memory(machine, test_seed());
    machine.add_device(1).launch(pair_launch(), [&] { kernel(ScaledKernel(memory)); });
    const emu::Result result = machine.run();
    *wrong = result.ok ? memory.count_differences() : 0;
    return result;
}
static void expect_scaled_report(const char *message, const std::function<void(const ScaledKernel &)> &kernel)
{
    for (uint64_t i = 0; i < 4; i++) {
        int wrong;
        const emu::Result result = run_scaled(test_seed() + i, kernel, &wrong);
        CHECK(!result.ok);
        CHECK_STR(result.message.c_str(), message);
    }
}
/* A mistake that breaks no rule: every part is legal, and the sums are wrong. */
static void expect_wrong_sums(const std::function<void(const ScaledKernel &)> &kernel)
{
    int wrong;
    const emu::Result result = run_scaled(test_seed(), kernel, &wrong);
    if (!result.ok)
        TEST_FAILED("%s", result.message.c_str());
    CHECK(wrong > 256 * ScaledMemory::N / 4);
}

/* The right kernel, but for what the issuing thread does. */
static void issue_scaled(const ScaledKernel &k, const std::function<void()> &issue)
{
    k.begin();
    k.load_operands();
    k.load_scales();
    if (k.issues())
        issue();
    k.finish();
}

TEST(scales_that_nobody_copied)
{
    expect_scaled_report("were never written", [](const ScaledKernel &k) { issue_scaled(k, [&] { k.multiply(); }); });
}
TEST(scales_copied_after_the_mmas)
{
    expect_scaled_report("were never written", [](const ScaledKernel &k) {
        issue_scaled(k, [&] {
            k.multiply();
            k.copy_scales();
        });
    });
}
/* Copies and MMAs of one thread are in order; of two, the copies must have been committed and waited for. */
TEST(scales_copied_by_another_thread_and_not_committed)
{
    expect_scaled_report("is not ordered after the write", [](const ScaledKernel &k) {
        k.begin();
        k.load_operands();
        k.load_scales();
        if (cluster_rank() == 1 && thread_idx() == 0)
            k.copy_scales();
        k.cluster_barrier();
        tcgen05_fence_after_sync();
        if (k.issues())
            k.multiply();
        k.finish();
    });
}
TEST(scales_copied_by_another_thread_and_committed_without_the_fence_after)
{
    expect_scaled_report("without tcgen05_fence_after_sync", [](const ScaledKernel &k) {
        k.begin();
        k.load_operands();
        k.load_scales();
        if (cluster_rank() == 1 && thread_idx() == 0) {
            k.copy_scales();
            tcgen05_commit_pair(k.read(), 1); /* counts 8: seven more */
        }
        if (k.issues()) {
            for (int i = 0; i < 7; i++)
                mbar_arrive_release_cta(k.read());
            wait_mbar_cluster(k.read(), 0, "scales are in tensor memory");
            k.multiply();
        }
        k.finish();
    });
}
TEST(scales_in_shared_memory_replaced_before_their_copy_is_done)
{
    expect_scaled_report("overwrites shared offset", [](const ScaledKernel &k) {
        issue_scaled(k, [&] {
            k.copy_scales();
            bulk_load(k.scales(1), k.scales_in_memory(1), MK_SCALE_ATOM_BYTES, k.full(1));
            k.multiply();
        });
    });
}
TEST(scales_copied_before_they_have_landed)
{
    /* while the copy is under way, or after it without having waited: as the order has it */
    expect_scaled_report("reads shared offset", [](const ScaledKernel &k) {
        k.begin();
        k.load_operands();
        if (k.issues()) {
            mbar_arrive_expect_tx_release_cta(k.full(1), MK_SCALE_ATOM_BYTES);
            bulk_load(k.scales(0), k.scales_in_memory(0), MK_SCALE_ATOM_BYTES, k.full(1));
            k.copy_scales();
        }
        k.finish();
    });
}

/* Scales laid out by threads in shared memory: `place` says at which byte of its atom the scale of (row, block) goes. */
static void scales_by_threads(const ScaledKernel &k, const std::function<uint32_t(uint32_t row, uint32_t block)> &place, bool fence)
{
    k.begin();
    k.load_operands();
    if (thread_idx() < 32)
        for (uint32_t operand = 0; operand < 2; operand++) {
            uint8_t own[16]; /* row thread_idx() of the atom's 32 of 16 bytes */
            for (uint32_t row = 0; row < 128; row++)
                for (uint32_t block = 0; block < 4; block++)
                    if (place(row, block) / 16 == thread_idx())
                        own[place(row, block) % 16] = load(k.scales_in_memory(operand) + mk_scale_byte(row, block, 4));
            Vec4 v;
            memcpy(&v, own, 16);
            store_shared_b128(k.scales(operand) + 16 * thread_idx(), v);
        }
    if (fence)
        fence_proxy_async_shared_cta();
    k.cluster_barrier();
    if (k.issues()) {
        k.copy_scales();
        k.multiply();
    }
    k.finish();
}
static uint32_t atom_byte(uint32_t row, uint32_t block) { return (uint32_t)mk_scale_byte(row, block, 4); }
TEST(scales_by_threads_right)
{
    int wrong;
    const emu::Result result = run_scaled(test_seed(), [](const ScaledKernel &k) { scales_by_threads(k, atom_byte, true); }, &wrong);
    if (!result.ok)
        TEST_FAILED("%s", result.message.c_str());
    CHECK_EQ(wrong, 0);
}
TEST(scales_by_threads_without_a_proxy_fence)
{
    expect_scaled_report("no fence_proxy_async_shared_cta followed", [](const ScaledKernel &k) { scales_by_threads(k, atom_byte, false); });
}
TEST(scales_in_rows_instead_of_atoms)
{
    expect_wrong_sums([](const ScaledKernel &k) { scales_by_threads(k, [](uint32_t row, uint32_t block) { return 4 * row + block; }, true); });
}
TEST(scales_of_the_wrong_block)
{
    expect_wrong_sums([](const ScaledKernel &k) {
        issue_scaled(k, [&] {
            k.copy_scales();
            k.multiply(1);
        });
    });
}
TEST(scales_of_a_and_b_swapped)
{
    expect_wrong_sums([](const ScaledKernel &k) {
        issue_scaled(k, [&] {
            for (uint32_t operand = 0; operand < 2; operand++)
                tcgen05_copy_scales_pair(k.columns(operand), mk_scale_descriptor_sm100(k.scales(1 - operand)));
            k.multiply();
        });
    });
}
TEST(scale_rows_as_far_apart_as_operand_rows)
{
    expect_wrong_sums([](const ScaledKernel &k) {
        issue_scaled(k, [&] {
            for (uint32_t operand = 0; operand < 2; operand++)
                tcgen05_copy_scales_pair(k.columns(operand), mk_smem_descriptor_sm100(k.scales(operand), 0, 16, MK_SMEM_SWIZZLE_NONE));
            k.multiply();
        });
    });
}
TEST(scales_copied_with_a_swizzle)
{
    expect_scaled_report("must have no swizzle", [](const ScaledKernel &k) {
        issue_scaled(k, [&] { tcgen05_copy_scales_pair(k.columns(0), mk_smem_descriptor_sm100(k.scales(0), 0, 128, MK_SMEM_SWIZZLE_128B)); });
    });
}
TEST(scales_copied_to_some_lanes)
{
    expect_scaled_report("the destination lane 32 be 0", [](const ScaledKernel &k) {
        issue_scaled(k, [&] { tcgen05_copy_scales_pair(k.columns(0) + mk_tmem_address(32, 0), mk_scale_descriptor_sm100(k.scales(0))); });
    });
}

/* Scales put into tensor memory by warps, each into its own 32 lanes: cell (lane, column) of the 64 columns behind D. All of B's and A's cells are in the
 * first 8 columns; a warp that writes what only its own rows need leaves the others without. */
static void scales_by_warps(const ScaledKernel &k, uint32_t warps, bool own_lanes, bool waits = true, bool fences = true)
{
    k.begin();
    k.load_operands();
    if (warp_idx() < warps)
        for (uint32_t block = 0; block < 2; block++) {
            float v[32];
            for (uint32_t i = 0; i < 32; i++) {
                const uint32_t lane = block * 16 + lane_idx() / 4 + 8 * (i % 4 / 2), column = 8 * (i / 4) + 2 * (lane_idx() % 4) + i % 2;
                const uint32_t from = own_lanes ? lane : (lane + warp_idx()) % 32;
                uint32_t cell = 0;
                for (uint32_t byte = 0; byte < 4 && column < 8; byte++)
                    cell |= (uint32_t)load(k.scales_in_memory(column / 4) + from * 16 + column % 4 * 4 + byte) << 8 * byte;
                memcpy(&v[i], &cell, 4);
            }
            tmem_store_16x64(load(k.address()) + ScaledKernel::COLUMNS + mk_tmem_address(32 * warp_idx() + 16 * block, 0), v);
        }
    if (waits)
        tmem_wait_store();
    if (fences)
        tcgen05_fence_before_sync();
    k.cluster_barrier();
    tcgen05_fence_after_sync();
    if (k.issues())
        k.multiply();
    k.finish();
}
TEST(scales_by_warps_right)
{
    int wrong;
    const emu::Result result = run_scaled(test_seed(), [](const ScaledKernel &k) { scales_by_warps(k, 4, true); }, &wrong);
    if (!result.ok)
        TEST_FAILED("%s", result.message.c_str());
    CHECK_EQ(wrong, 0);
}
TEST(scales_by_warps_not_waited_for)
{
    expect_scaled_report("stores under way: tmem_wait_store comes first", [](const ScaledKernel &k) { scales_by_warps(k, 4, true, false); });
}
TEST(scales_by_warps_without_the_fence_before)
{
    expect_scaled_report("is not ordered after the write", [](const ScaledKernel &k) { scales_by_warps(k, 4, true, true, false); });
}
TEST(scales_in_the_lanes_of_one_warp_only)
{
    expect_scaled_report("were never written", [](const ScaledKernel &k) { scales_by_warps(k, 1, true); });
}
TEST(scales_in_the_wrong_lanes_of_a_warp)
{
    expect_wrong_sums([](const ScaledKernel &k) { scales_by_warps(k, 4, false); });
}

/* ---- who may ---- */

TEST(two_threads_issue)
{
    expect_report("issues tcgen05 operations too", [](const PairKernel &k) {
        sums(k);
        if (cluster_rank() == 0 && thread_idx() == 32)
            tcgen05_commit_pair(k.done(), 3);
        if (k.issues())
            tcgen05_commit_pair(k.done(), 3);
        k.cluster_barrier();
    });
}
TEST(address_of_an_allocation_read_without_the_fence_before)
{
    expect_report("a plain read of shared offset", [](const PairKernel &k) {
        if (warp_idx() == 1)
            tmem_allocate_pair<64>(smem_addr(k.address()));
        k.cluster_barrier();
        tcgen05_fence_after_sync();
        (void)load(k.address());
    });
}
TEST(allocations_grow)
{
    expect_report("sizes must not grow", [](const PairKernel &k) {
        if (warp_idx() != 1)
            return;
        tmem_allocate_pair<64>(smem_addr(k.address()));
        tmem_allocate_pair<128>(smem_addr(k.address()));
    });
}
TEST(allocation_after_giving_up_the_right)
{
    expect_report("given up its right", [](const PairKernel &k) {
        if (warp_idx() != 1)
            return;
        tmem_relinquish_pair();
        tmem_allocate_pair<64>(smem_addr(k.address()));
    });
}
TEST(tensor_memory_not_released)
{
    expect_report("without releasing its tensor memory", [](const PairKernel &k) {
        sums(k);
        k.wait_done();
        k.cluster_barrier();
    });
}
TEST(tensor_memory_released_under_the_mmas)
{
    expect_report("tmem_release_pair", [](const PairKernel &k) {
        sums(k);
        k.cluster_barrier();
        if (warp_idx() == 1)
            tmem_release_pair<256>(load(k.address()));
        k.wait_done();
    });
}
TEST(a_cta_leaves_under_its_partners_mmas)
{
    expect_report("ended", [](const PairKernel &k) {
        sums(k);
        if (cluster_rank() == 0)
            k.wait_done();
        k.cluster_barrier();
        if (warp_idx() == 1 && cluster_rank() == 1)
            return;
        if (k.issues())
            k.multiply_block(0, mk_mma_descriptor_bf16(256, N, 0, 0));
    });
}

/* ---- Cluster Launch Control ---- */

/* `body` by one thread of each of six blocks, with an mbarrier behind the place for an answer. */
static void expect_launch_report(const char *message, const std::function<void(uint32_t answer, uint32_t bar)> &body)
{
    for (uint64_t i = 0; i < 4; i++) {
        emu::Machine machine(test_seed() + i);
        emu::Launch l;
        l.blocks = 6;
        l.threads = 1;
        l.shared_bytes = 64;
        machine.add_device(1).launch(l, [&] {
            const uint32_t answer = smem_addr(shared_base()), bar = answer + 16;
            mbar_init(bar, 1);
            fence_mbar_init_release_cluster();
            body(answer, bar);
        });
        const emu::Result result = machine.run();
        CHECK(!result.ok);
        CHECK_STR(result.message.c_str(), message);
    }
}

static void ask_until_refused(uint32_t answer, uint32_t bar)
{
    for (uint32_t round = 0;; round++) {
        mbar_arrive_expect_tx_release_cta(bar, 16);
        launch_try_cancel_multicast(answer, bar);
        wait_mbar(bar, round & 1, "answer");
        if (!launch_was_cancelled(load_shared_b128(answer)))
            return;
    }
}

TEST(asking_again_after_a_refusal)
{
    expect_launch_report("after a refusal has been seen", [](uint32_t answer, uint32_t bar) {
        ask_until_refused(answer, bar);
        launch_try_cancel_multicast(answer, bar);
    });
}
TEST(the_block_of_a_refusal)
{
    expect_launch_report("of a refusal", [](uint32_t answer, uint32_t bar) {
        ask_until_refused(answer, bar);
        (void)launch_cancelled_block(load_shared_b128(answer));
    });
}
TEST(an_answer_that_nobody_waits_for)
{
    expect_launch_report("copy into its shared memory", [](uint32_t answer, uint32_t bar) { launch_try_cancel_multicast(answer, bar); });
}

int main(int argc, char **argv) { return test_main(argc, argv); }
