/* mok_trace_align: clocks that differ are brought together as well as the barriers allow, and clocks that do not differ are left alone. */
#include "mok.h"
#include "test.h"

enum { RANKS = 3, BARRIERS = 21, EVENTS = RANKS * BARRIERS * 2 };

/* A barrier and a task behind it, every 50 us; rank r's clock is ahead by offset[r], and it leaves up to noise_ns late. */
static void make(mok_trace_event *events, const int64_t *offset, int64_t noise_ns, uint64_t *state)
{
    memset(events, 0, sizeof *events * EVENTS);
    for (int32_t r = 0, at = 0; r < RANKS; r++)
        for (int b = 0; b < BARRIERS; b++) {
            int64_t left = 1000000000 + b * 50000 + offset[r] + test_below(state, noise_ns + 1);
            events[at++] = (mok_trace_event){.rank = 5 + r, .kind = MOK_TRACE_rank_barrier, .begin_ns = (uint64_t)(left - 3000 - 1000 * r), .end_ns = (uint64_t)left};
            events[at++] = (mok_trace_event){.rank = 5 + r, .kind = MOK_TRACE_s2_gate_up, .begin_ns = (uint64_t)left, .end_ns = (uint64_t)left + 40000};
        }
}

TEST(clocks_that_differ_are_brought_together)
{
    static const int64_t offset[RANKS] = {0, 7000123, -34567};
    uint64_t state = test_seed();
    mok_trace_event events[EVENTS], before[EVENTS];
    mok_trace_clock clocks[RANKS];
    int32_t num = RANKS;
    make(events, offset, 800, &state);
    memcpy(before, events, sizeof before);
    REQUIRE(mok_trace_align(events, EVENTS, clocks, &num) == MOK_OK);
    CHECK_EQ(num, RANKS);
    for (int r = 0; r < RANKS; r++) {
        CHECK_EQ(clocks[r].rank, 5 + r);
        CHECK_EQ(clocks[r].barriers, BARRIERS);
        CHECK_LE(clocks[r].accuracy_ns, 800);
        CHECK_LE(llabs(clocks[r].offset_ns - offset[r]), 800);
    }
    for (int i = 0; i < EVENTS; i++) {
        CHECK_EQ(events[i].end_ns - events[i].begin_ns, before[i].end_ns - before[i].begin_ns);
        CHECK_LE(llabs((long long)events[i].end_ns - (long long)events[i % (2 * BARRIERS)].end_ns), 1600);
    }
}

TEST(clocks_within_the_noise_are_left_alone)
{
    static const int64_t offset[RANKS] = {0, 0, 0};
    uint64_t state = test_seed();
    mok_trace_event events[EVENTS], before[EVENTS];
    mok_trace_clock clocks[RANKS];
    int32_t num = RANKS;
    make(events, offset, 0, &state);
    for (int i = 0; i < EVENTS; i++) /* by turns early and late */
        if (events[i].rank == 6)
            events[i].end_ns += (uint64_t)(i / 2 % 2 ? 900 : 0);
    memcpy(before, events, sizeof before);
    REQUIRE(mok_trace_align(events, EVENTS, clocks, &num) == MOK_OK);
    CHECK_BYTES(events, before, sizeof before);
    CHECK_EQ(clocks[1].offset_ns, 0);
    CHECK_EQ(clocks[1].accuracy_ns, 900);
}

/* A rank whose ring has lost its oldest barriers is compared by its youngest; one with too few is not moved. */
TEST(barriers_are_counted_from_the_youngest)
{
    static const int64_t offset[RANKS] = {0, 500000, 500000};
    uint64_t state = test_seed();
    mok_trace_event events[EVENTS];
    mok_trace_clock clocks[RANKS];
    int32_t num = RANKS;
    make(events, offset, 100, &state);
    for (int b = 0; b < BARRIERS; b++) {
        if (b < 7)
            events[2 * (BARRIERS + b)].kind = MOK_TRACE_s4_down;
        if (b < BARRIERS - 2)
            events[2 * (2 * BARRIERS + b)].kind = MOK_TRACE_s4_down;
    }
    REQUIRE(mok_trace_align(events, EVENTS, clocks, &num) == MOK_OK);
    CHECK_EQ(clocks[1].barriers, BARRIERS - 7);
    CHECK_LE(llabs(clocks[1].offset_ns - 500000), 100);
    CHECK_EQ(clocks[2].barriers, 2);
    CHECK_EQ(clocks[2].offset_ns, 0);
}

TEST(wrong_arguments_are_refused)
{
    mok_trace_event one = {.rank = 0}, far = {.rank = 5000};
    mok_trace_clock clock;
    int32_t num = 0;
    CHECK_EQ(mok_trace_align(NULL, 1, &clock, &num), MOK_E_ARG);
    CHECK_EQ(mok_trace_align(&one, -1, &clock, &num), MOK_E_ARG);
    CHECK_EQ(mok_trace_align(&one, 1, &clock, NULL), MOK_E_ARG);
    CHECK_EQ(mok_trace_align(&far, 1, &clock, &num), MOK_E_ARG);
    CHECK_EQ(mok_trace_align(&one, 1, &clock, &num), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "there is room for 0 clocks, but there are 1 ranks");
    CHECK_EQ(mok_trace_align(&one, 1, NULL, &num), MOK_OK);
    CHECK_EQ(num, 1);
    CHECK_EQ(mok_trace_align(NULL, 0, NULL, &num), MOK_OK);
    CHECK_EQ(num, 0);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
