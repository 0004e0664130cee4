/* The emulator finds what it is there to find: each case plants one mistake and expects it to be reported, whatever the order. */
#include "cuda/arch/arch.cuh"
#include "cuda/sync/wait.cuh"
#include "test.h"
#include <functional>

using namespace mk;

/* A wait without a limit, as the library has none: what never comes is a deadlock. */
static void wait_for_ever(const uint32_t *flag, uint32_t wanted, const char *what)
{
    note_wait(what);
    while ((int32_t)(flag_load_acquire_gpu(flag) - wanted) < 0) {
        sleep_ns(32);
        note_wait(what);
    }
}

struct Memory {
    emu::Buffer<uint32_t> source, sink, flag;
    mk_tensor_map box;  /* 8 rows of 64 bf16 of source */
    explicit Memory(emu::Machine &m) : source(m, "source", 1024), sink(m, "sink", 1024), flag(m, "flag", 4)
    {
        memset(source.host(), 1, 4096);
        memset(flag.host(), 0, 16);
        const mk_tensor t = mk_tensor_operand(source.device(), 64, 16, 0, 8);
        mk_tensor_map_encode(&box, &t, emu::tensor_map_encode_tiled);
    }
};

/* Runs `kernel` under several orders; every run must be reported with `message` in it. */
static void expect_report(const char *message, emu::Launch shape, const std::function<void(Memory &)> &kernel)
{
    for (uint64_t i = 0; i < 10; i++) {
        emu::Machine machine(test_seed() + i);
        Memory memory(machine);
        if (shape.shared_bytes == 0)
            shape.shared_bytes = 32768;
        machine.add_device(1).launch(shape, [&] { kernel(memory); });
        const emu::Result result = machine.run();
        CHECK(!result.ok);
        CHECK_STR(result.message.c_str(), message);
        CHECK_STR(result.message.c_str(), "seed");
    }
}

static emu::Launch threads(uint32_t n, uint32_t cluster = 1)
{
    emu::Launch l;
    l.blocks = l.cluster = cluster;
    l.threads = n;
    return l;
}

static char *shared() { return static_cast<char *>(shared_base()); }
static uint32_t init_bar(uint32_t offset = 0, uint32_t count = 1)
{
    mbar_init(smem_addr(shared() + offset), count);
    fence_mbar_init_release_cluster();
    return smem_addr(shared() + offset);
}

/* ---- tensor maps in global memory ---- */

/* One warp: a map of `at`, made in shared memory and stored to the sink. */
static mk_tensor_map *make_map(Memory &m, const uint32_t *at, bool ordered = true)
{
    mk_tensor_map *map = reinterpret_cast<mk_tensor_map *>(m.sink.device()), *scratch = reinterpret_cast<mk_tensor_map *>(shared() + 16384);
    if (lane_idx() < 16)
        store(&scratch->opaque[lane_idx()], m.box.opaque[lane_idx()]);
    sync_warp();
    if (lane_idx() == 0)
        tensor_map_set_address(smem_addr(scratch), at);
    if (ordered)
        sync_warp();
    tensor_map_store_release_gpu(map, smem_addr(scratch));
    sync_warp();
    return map;
}

static void load_box(const mk_tensor_map *map)
{
    const uint32_t bar = init_bar();
    mbar_arrive_expect_tx_release_cta(bar, 1024);
    tma_load_2d(smem_addr(shared() + 1024), map, 0, 0, bar);
    wait_mbar(bar, 0, "test");
}

TEST(map_changed_by_one_lane_and_stored_by_the_others)
{
    expect_report("not ordered", threads(32), [](Memory &m) { make_map(m, m.source.device(), false); });
}
TEST(map_in_global_memory_used_without_acquire)
{
    expect_report("has not acquired it with fence_tensor_map_acquire", threads(32), [](Memory &m) {
        const mk_tensor_map *map = make_map(m, m.source.device());
        if (lane_idx() == 0)
            load_box(map);
    });
}
/* The copy engine keeps what it knew: a box of the sink, which nobody has written. */
TEST(map_stored_again_after_its_acquire)
{
    expect_report("which was never written", threads(32), [](Memory &m) {
        const mk_tensor_map *map = make_map(m, m.sink.device() + 512);
        if (lane_idx() == 0)
            fence_tensor_map_acquire_gpu(map);
        sync_warp();
        make_map(m, m.source.device());
        if (lane_idx() == 0) {
            load_box(map);
            (void)load(reinterpret_cast<uint32_t *>(shared() + 1024));
        }
    });
}

/* ---- memory ---- */

TEST(read_past_the_end) { expect_report("outside every buffer", threads(1), [](Memory &m) { (void)load(m.source.device() + 1024); }); }
TEST(write_before_the_start) { expect_report("outside every buffer", threads(1), [](Memory &m) { store(m.source.device() - 1, 0u); }); }
TEST(read_of_unwritten_global) { expect_report("sink+64, which was never written", threads(1), [](Memory &m) { (void)load(m.sink.device() + 16); }); }
TEST(read_of_unwritten_shared) { expect_report("shared offset 64, which was never written", threads(1), [](Memory &) { (void)load(shared() + 64); }); }
TEST(shared_address_past_the_end) { expect_report("outside the 32768 bytes", threads(1), [](Memory &) { store_shared_b128(smem_addr(shared()) + 32768, {0, 0, 0, 0}); }); }
TEST(plain_write_over_an_mbarrier)
{
    expect_report("touches the mbarrier", threads(1), [](Memory &) {
        init_bar();
        store(reinterpret_cast<uint32_t *>(shared()), 0u);
    });
}
TEST(misaligned_bulk_copy) { expect_report("multiples of 16", threads(1), [](Memory &m) { bulk_load(smem_addr(shared()) + 1024, m.source.device() + 1, 64, init_bar()); }); }
TEST(bulk_copy_past_the_end)
{
    expect_report("outside every buffer", threads(1), [](Memory &m) { bulk_load(smem_addr(shared()) + 1024, m.source.device() + 1000, 512, init_bar()); });
}

/* ---- deadlocks ---- */

TEST(phase_that_never_completes)
{
    expect_report("\"the missing bytes\": mbarrier at shared offset 16, parity 0; 0 phases completed, 0 of 1 arrivals and 64 bytes missing", threads(1), [](Memory &) {
        const uint32_t bar = init_bar(16);
        mbar_arrive_expect_tx_release_cta(bar, 64);
        wait_mbar(bar, 0, "the missing bytes");
    });
}
TEST(flag_that_nobody_sets)
{
    expect_report("\"flag of tile 2\": polls flag+8, which stays 0", threads(1), [](Memory &m) { wait_for_ever(m.flag.device() + 2, 1, "flag of tile 2"); });
}
TEST(barrier_that_a_warp_skips)
{
    expect_report("named barrier 5, 32 of 64 threads there", threads(64), [](Memory &) {
        if (warp_idx() == 0)
            barrier_named_sync(5, 64);
    });
}
TEST(cluster_that_waits_for_one_not_resident)
{
    emu::Launch l = threads(1);
    l.blocks = 2;
    expect_report("polls flag+0", l, [](Memory &m) {
        if (block_idx() == 0)
            wait_for_ever(m.flag.device(), 1, "the second block");
        else
            flag_add_release_gpu(m.flag.device(), 1);
    });
}
TEST(too_many_registers)
{
    expect_report("registers", threads(384), [](Memory &) {
        if (warp_idx() >= 4)
            registers_raise<232>();
        else
            registers_lower<48>();
    });
}
/* Numbers of warps are read by a shuffle. */
TEST(warp_idx_of_some_lanes)
{
    expect_report("waits for the other lanes in warp_idx; lanes there: 000000ff", threads(32), [](Memory &memory) {
        if (lane_idx() < 8)
            store(memory.sink.device(), warp_idx());
    });
}

TEST(lanes_in_different_instructions)
{
    expect_report("lanes of a warp are in different instructions", threads(32), [](Memory &) {
        if (lane_idx() == 3)
            sync_warp();
        else
            ballot(true);
    });
}

/* ---- mbarriers ---- */

TEST(mbarrier_never_initialised) { expect_report("no mbarrier was initialised", threads(1), [](Memory &) { mbar_arrive_release_cta(smem_addr(shared())); }); }
TEST(mbarrier_used_without_publishing_it)
{
    expect_report("has not published it", threads(64), [](Memory &) {
        if (thread_idx() == 0)
            mbar_init(smem_addr(shared()), 64);
        barrier_block_sync();
        mbar_arrive_release_cta(smem_addr(shared()));
        barrier_block_sync();
    });
}
TEST(copy_into_an_mbarrier_that_the_engine_has_not_been_told_of)
{
    expect_report("has told the copy engine", threads(1), [](Memory &m) {
        mbar_init(smem_addr(shared()), 1);
        bulk_load(smem_addr(shared()) + 1024, m.source.device(), 16, smem_addr(shared()));
    });
}
TEST(more_bytes_expected_than_sent)
{
    expect_report("still expects 64 bytes", threads(1), [](Memory &) { mbar_arrive_expect_tx_release_cta(init_bar(), 64); });
}
TEST(mbarrier_used_before_a_barrier_after_its_initialisation)
{
    expect_report("not ordered after the initialisation", threads(64), [](Memory &) {
        if (thread_idx() == 0) {
            init_bar(0, 2);
        } else if (thread_idx() == 32) {
            for (int i = 0; i < 3000; i++)
                sleep_ns(10);
        }
        if (lane_idx() == 0)
            mbar_arrive_release_cta(smem_addr(shared()));
    });
}
TEST(thread_two_phases_behind)
{
    expect_report("parity 0; 2 phases completed", threads(64), [](Memory &) {
        if (thread_idx() == 0)
            init_bar();
        barrier_block_sync();
        if (thread_idx() == 0) {
            mbar_arrive_release_cta(smem_addr(shared()));
            mbar_arrive_release_cta(smem_addr(shared()));
        }
        barrier_block_sync();
        wait_mbar(smem_addr(shared()), 0, "the phase before the last");
    });
}

/* ---- proxies and asynchronous work ---- */

TEST(store_reads_plain_writes_without_a_fence)
{
    expect_report("no fence_proxy_async_shared_cta followed", threads(1), [](Memory &m) {
        store_shared_b128(smem_addr(shared()), {1, 2, 3, 4});
        bulk_store(m.sink.device(), smem_addr(shared()), 16);
        bulk_commit();
        bulk_wait<0>();
    });
}
TEST(fence_by_a_thread_that_did_not_write)
{
    expect_report("no fence_proxy_async_shared_cta followed", threads(32), [](Memory &m) {
        if (lane_idx() == 7)
            store_shared_b128(smem_addr(shared()), {1, 2, 3, 4});
        sync_warp();
        if (lane_idx() == 0) {
            fence_proxy_async_shared_cta();
            bulk_store(m.sink.device(), smem_addr(shared()), 16);
            bulk_commit();
            bulk_wait<0>();
        }
    });
}
TEST(load_of_plain_global_writes_without_a_fence)
{
    expect_report("without fence_proxy_async_global", threads(1), [](Memory &m) {
        const uint32_t bar = init_bar();
        store(m.sink.device(), 5u);
        mbar_arrive_expect_tx_release_cta(bar, 16);
        bulk_load(smem_addr(shared()) + 1024, m.sink.device(), 16, bar);
        wait_mbar(bar, 0, "row");
    });
}
TEST(read_before_the_copy_has_landed)
{
    expect_report("a plain read of shared offset 1024", threads(1), [](Memory &m) {  /* under way, or landed but not waited for */
        const uint32_t bar = init_bar();
        mbar_arrive_expect_tx_release_cta(bar, 64);
        bulk_load(smem_addr(shared()) + 1024, m.source.device(), 64, bar);
        (void)load(shared() + 1024);
    });
}
TEST(overwrite_while_a_store_reads)
{
    expect_report("still reads (nobody has waited for it)", threads(1), [](Memory &m) {
        store_shared_b128(smem_addr(shared()), {1, 2, 3, 4});
        fence_proxy_async_shared_cta();
        bulk_store(m.sink.device(), smem_addr(shared()), 16);
        bulk_commit();
        store_shared_b128(smem_addr(shared()), {5, 6, 7, 8});
    });
}
TEST(exit_with_the_source_read_only)
{
    expect_report("without waiting for the completion", threads(1), [](Memory &m) {
        store_shared_b128(smem_addr(shared()), {1, 2, 3, 4});
        fence_proxy_async_shared_cta();
        bulk_store(m.sink.device(), smem_addr(shared()), 16);
        bulk_commit();
        bulk_wait_read<0>();
    });
}
TEST(store_never_committed)
{
    expect_report("never committed", threads(1), [](Memory &m) {
        store_shared_b128(smem_addr(shared()), {1, 2, 3, 4});
        fence_proxy_async_shared_cta();
        bulk_store(m.sink.device(), smem_addr(shared()), 16);
        bulk_wait<0>();
    });
}
TEST(multicast_into_a_cta_that_has_ended)
{
    expect_report("has ended", threads(1, 2), [](Memory &m) {
        const uint32_t bar = init_bar();
        barrier_cluster_arrive_release();
        barrier_cluster_wait_acquire();
        if (cluster_rank() == 1)
            return;
        for (int i = 0; i < 3000; i++)
            sleep_ns(100);
        tma_load_2d_multicast(smem_addr(shared()) + 1024, &m.box, 0, 0, bar, 3);
    });
}

TEST(load_of_another_threads_bulk_store_without_a_fence)
{
    expect_report("without fence_proxy_async_global", threads(64), [](Memory &m) {
        if (thread_idx() == 0) {
            store_shared_b128(smem_addr(shared()), {1, 2, 3, 4});
            fence_proxy_async_shared_cta();
            bulk_store(m.sink.device(), smem_addr(shared()), 16);
            bulk_commit();
            bulk_wait<0>();
            flag_add_release_gpu(m.flag.device(), 1);
        } else if (thread_idx() == 32) {
            const uint32_t bar = init_bar(64);
            wait_for_ever(m.flag.device(), 1, "the row");
            mbar_arrive_expect_tx_release_cta(bar, 16);
            bulk_load(smem_addr(shared()) + 1024, m.sink.device(), 16, bar);
            wait_mbar(bar, 0, "the row again");
        }
    });
}

/* ---- order ---- */

TEST(read_of_another_lanes_write_without_sync_warp)
{
    expect_report("not ordered after", threads(32), [](Memory &) {
        uint32_t *s = static_cast<uint32_t *>(shared_base());
        store(&s[lane_idx()], 1u);
        (void)ballot(true);  /* together, but no order */
        (void)load(&s[lane_idx() ^ 1]);
    });
}
TEST(write_over_what_another_warp_still_reads)
{
    expect_report("is not ordered after a read by", threads(64), [](Memory &) {
        uint32_t *s = static_cast<uint32_t *>(shared_base());
        if (thread_idx() == 0)
            store(s, 1u);
        barrier_block_sync();
        (void)load(s);
        if (thread_idx() == 0) {
            for (int i = 0; i < 3000; i++)
                sleep_ns(10);
            store(s, 2u);
        }
    });
}
TEST(flag_set_with_a_relaxed_store)
{
    expect_report("is not ordered after the write by", threads(64), [](Memory &m) {
        if (thread_idx() == 0) {
            store(m.sink.device(), 5u);
            flag_store_relaxed_gpu(m.flag.device(), 1);
        } else if (thread_idx() == 32) {
            wait_for_ever(m.flag.device(), 1, "the row");
            (void)load(m.sink.device());
        }
    });
}
TEST(flag_raised_when_the_store_has_only_read_its_source)
{
    expect_report("by a store that its thread has not waited for", threads(64), [](Memory &m) {
        if (thread_idx() == 0) {
            store_shared_b128(smem_addr(shared()), {1, 2, 3, 4});
            fence_proxy_async_shared_cta();
            bulk_store(m.source.device(), smem_addr(shared()), 16);
            bulk_commit();
            bulk_wait_read<0>();
            for (int i = 0; i < 3000; i++)
                sleep_ns(10);
            flag_add_release_gpu(m.flag.device(), 1);
        } else if (thread_idx() == 32) {
            wait_for_ever(m.flag.device(), 1, "the row");
            (void)load(m.source.device());
        }
        barrier_block_sync();
        bulk_wait<0>();
    });
}

/* ---- MMA ---- */

/* One MMA on two loaded boxes; `mistake` says what is left out. */
enum { NO_FENCE = 1, NO_WAIT, PLAIN_OPERAND, BAD_DESCRIPTOR, DIFFERENT_DESCRIPTORS };
static void one_mma(int mistake)
{
    const uint32_t a = smem_addr(shared()) + 8192;
    uint64_t d = 1ull << 62 | (uint64_t)(1024 >> 4) << 32 | 1ull << 16 | a >> 4;
    float acc[32];
    for (uint32_t at = thread_idx() * 16; at < 8192; at += 128 * 16)
        store_shared_b128(a + at, {0, 0, 0, 0});
    if (mistake != PLAIN_OPERAND)
        fence_proxy_async_shared_cta();
    barrier_block_sync();
    if (mistake == BAD_DESCRIPTOR)
        d |= 1ull << 49;
    if (mistake == DIFFERENT_DESCRIPTORS && thread_idx() == 77)
        d += 2;
    if (mistake != NO_FENCE)
        wgmma_fence();
    wgmma_m64n64k16_bf16<0, 0>(acc, d, d, false);
    wgmma_commit();
    if (mistake != NO_WAIT)
        wgmma_wait<0>();
    store_shared_b128(a + thread_idx() * 16, {0, 0, 0, 0});
}
TEST(mma_without_fence) { expect_report("wgmma without wgmma_fence", threads(128), [](Memory &) { one_mma(NO_FENCE); }); }
TEST(operand_overwritten_without_wait) { expect_report("still reads (nobody has waited for it)", threads(128), [](Memory &) { one_mma(NO_WAIT); }); }
TEST(operand_written_without_proxy_fence) { expect_report("wgmma reads shared offset", threads(128), [](Memory &) { one_mma(PLAIN_OPERAND); }); }
TEST(descriptor_with_base_offset) { expect_report("base offset", threads(128), [](Memory &) { one_mma(BAD_DESCRIPTOR); }); }
TEST(descriptors_that_differ_in_a_warpgroup) { expect_report("issue different wgmma", threads(128), [](Memory &) { one_mma(DIFFERENT_DESCRIPTORS); }); }

int main(int argc, char **argv) { return test_main(argc, argv); }
