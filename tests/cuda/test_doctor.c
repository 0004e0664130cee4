/* mok_doctor: on a machine without a driver, on one with GPUs (made up), and with every fault that it can find forced or built in. */
#include "test.h"

#include "fake_driver.h"
#include "mok.h"

enum { ROOM = 64 };
static mok_finding findings[ROOM];
static int32_t count;

static const mok_finding *find(const char *check)
{
    for (int32_t i = 0; i < count; i++)
        if (!strcmp(findings[i].check, check))
            return &findings[i];
    TEST_FAILED("there is no check \"%s\"", check);
    return &findings[0];
}

static void examine(const char *fault)
{
    if (fault)
        setenv("MOK_DOCTOR_FAULT", fault, 1);
    count = ROOM;
    CHECK_EQ(mok_doctor(findings, &count), MOK_OK);
    unsetenv("MOK_DOCTOR_FAULT");
    for (int32_t i = 0; i < count; i++) {
        CHECK(findings[i].detail[0] != 0);
        CHECK((findings[i].advice[0] != 0) == (findings[i].state >= MOK_FINDING_WARNING)); /* whatever is wrong comes with advice */
    }
    CHECK_STR(findings[count - 1].check, "verdict");
    CHECK_EQ(fake.live_contexts, 0); /* nothing stays behind */
    CHECK_EQ(fake.live_blocks + fake.live_handles + fake.live_ranges, 0);
}

static void expect(const char *check, mok_finding_state state, const char *words)
{
    const mok_finding *f = find(check);
    if (f->state != state)
        TEST_FAILED("%s is %d, not %d: %s", check, f->state, state, f->detail);
    CHECK_STR(f->detail, words);
}

TEST(four_gpus_that_have_all)
{
    fake_reset(4);
    fake.memory_limit = (size_t)8 << 30;
    examine("slow_link nobody knows"); /* an unknown fault changes nothing */
    expect("driver", MOK_FINDING_GOOD, "version 13.0");
    expect("devices", MOK_FINDING_GOOD, "4: 0: Fake H100; 1: Fake H101");
    expect("compute mode", MOK_FINDING_GOOD, "default");
    expect("MIG", MOK_FINDING_GOOD, "no device");
    expect("memory in use", MOK_FINDING_GOOD, "nobody");
    expect("peer access", MOK_FINDING_GOOD, "all 6 pairs");
    static const char *const pairs[] = {": 0-1 ", ", 0-2 ", ", 0-3 ", ", 1-2 ", ", 1-3 ", ", 2-3 "};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        CHECK_STR(find("link rate")->detail, pairs[i]);
    expect("fabric handles", MOK_FINDING_WARNING, "device 0 (Fake H100) does not offer fabric handles");
    expect("descriptor handles", MOK_FINDING_GOOD, "file descriptor");
    expect("shared memory", MOK_FINDING_GOOD, "can be shared");
    expect("sockets", MOK_FINDING_GOOD, "Unix sockets work");
    expect("verdict", MOK_FINDING_GOOD, "backend cuda works on 4 devices: virtual ranks on one; ranks as threads with a device each; ranks as processes by file descriptor");
}

/* X(fault, check, state, words, verdict's state, verdict's words) */
#define FAULT_LIST(X)                                                                                                                          \
    X("driver", "driver", BAD, "there is no CUDA driver", WARNING, "backend cpu works, with ranks as threads or processes; backend cuda does not") \
    X("devices", "devices", BAD, "the driver sees no GPU", WARNING, "backend cuda does not")                                                   \
    X("architecture", "devices", BAD, "0 of 2 usable", WARNING, "backend cuda does not")                                                       \
    X("compute_mode", "compute mode", WARNING, "device 0 is in compute mode exclusive process", GOOD, "backend cuda works")                    \
    X("mig", "MIG", WARNING, "device 0 is a MIG slice", GOOD, "backend cuda works")                                                            \
    X("memory", "memory in use", WARNING, "device 0: 2.0 GB, device 1: 2.0 GB", GOOD, "backend cuda works")                                    \
    X("peer", "peer access", BAD, "1 of 1 pairs of devices have no peer access: 0-1", WARNING, "NOT ranks with a device each")                 \
    X("slow_link", "link rate", WARNING, "GB/s: 0-1 20; by their rates no NVLink: 0-1", GOOD, "backend cuda works")                                    \
    X("fabric", "fabric handles", WARNING, "does not offer fabric handles: forced", GOOD, "ranks as processes by file descriptor")             \
    X("fd", "descriptor handles", BAD, "does not offer file-descriptor handles", WARNING, "NOT ranks as processes")                            \
    X("vmm", "descriptor handles", BAD, "does not offer virtual memory management", WARNING, "NOT ranks as processes")                         \
    X("ptrace", "ptrace rights", WARNING, "no ptrace rights", GOOD, "backend cuda works")                                                      \
    X("shared_memory", "shared memory", BAD, "Operation not permitted", WARNING, "NOT ranks as processes")                                     \
    X("socket", "sockets", BAD, "cannot open a Unix socket", WARNING, "NOT ranks as processes")

TEST(every_fault_is_found_told_and_counts_in_the_verdict)
{
#define FAULT(fault, check, state, words, verdict, verdict_words)           \
    fake_reset(2);                                                          \
    fake.memory_limit = (size_t)8 << 30;                                    \
    examine(fault);                                                         \
    expect(check, MOK_FINDING_##state, words);                              \
    expect("verdict", MOK_FINDING_##verdict, verdict_words);
    FAULT_LIST(FAULT)
#undef FAULT
}

TEST(a_machine_without_gpu_skips_what_needs_one)
{
    fake_reset(2);
    examine("driver");
    static const char *const skipped[] = {"devices", "compute mode", "MIG", "memory in use", "peer access", "link rate", "fabric handles", "descriptor handles"};
    for (size_t i = 0; i < sizeof skipped / sizeof *skipped; i++)
        expect(skipped[i], MOK_FINDING_SKIPPED, "there is no CUDA driver");
    expect("shared memory", MOK_FINDING_GOOD, "can be shared");
}

TEST(real_faults_of_the_driver_are_found)
{
    fake_reset(3);
    fake.memory_limit = (size_t)8 << 30;
    fake.no_peer[0][2] = true;
    fake.no_fd_handles = true;
    fake.compute_mode = 2;
    fake.fabric_handles = true;
    examine(NULL);
    expect("peer access", MOK_FINDING_BAD, "1 of 3 pairs of devices have no peer access: 0-2");
    expect("descriptor handles", MOK_FINDING_BAD, "device 0 (Fake H100) does not offer file-descriptor handles");
    expect("compute mode", MOK_FINDING_BAD, "prohibited");
    expect("fabric handles", MOK_FINDING_WARNING, "allocating 65536 bytes on device 0 that can be shared by fabric handle");
    CHECK_STR(find("link rate")->detail, "0-1 "); /* those that can be measured are */
    CHECK_STR(find("link rate")->detail, "1-2 ");
    CHECK(strstr(find("link rate")->detail, "0-2") == NULL);
    fake_reset(2);
    fake.no_peer[1][0] = true;
    examine(NULL);
    expect("link rate", MOK_FINDING_SKIPPED, "no two devices reach each other");
    fake_reset(1);
    fake.cc_major[0] = 7;
    examine(NULL);
    expect("devices", MOK_FINDING_BAD, "device 0 (Fake H100) has compute capability 7.0");
}

TEST(sixteen_devices_are_more_than_a_line_has_room_for)
{
    fake_reset(FAKE_DEVICES);
    fake.memory_limit = (size_t)8 << 30;
    for (int i = 0; i < FAKE_DEVICES; i++)
        for (int j = 0; j < FAKE_DEVICES; j++)
            fake.no_peer[i][j] = i != 0;
    examine("memory");
    expect("peer access", MOK_FINDING_BAD, "pairs of devices have no peer access: 0-1, 0-2");
    CHECK(find("peer access")->detail[sizeof find("peer access")->detail - 1] == 0);
    expect("memory in use", MOK_FINDING_WARNING, "device 0: 2.0 GB, device 1: 2.0 GB");
    fake_reset(FAKE_DEVICES);
    fake.memory_limit = (size_t)8 << 30;
    examine("slow_link");
    expect("link rate", MOK_FINDING_WARNING, "0-1 20, 0-2 20");
}

TEST(misuse_is_refused)
{
    int32_t n = 3;
    CHECK_EQ(mok_doctor(NULL, NULL), MOK_E_ARG);
    CHECK_EQ(mok_doctor(findings, &n), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "room for 3 findings, but there are ");
    CHECK_EQ(mok_doctor(NULL, &n), MOK_OK);
    CHECK(n > 3);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
