/* mok_trace_align: one clock for the events of several ranks. All ranks leave a rank barrier when its last signal has come, so the times at which two of them
 * leave differ by their clocks, and by noise whose middle is near 0. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "mok.h"

enum { MOST_RANKS = 4096, FEWEST_BARRIERS = 3 };

static int ascending(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* When `rank` left its barriers, ascending; NULL: no memory. */
static int64_t *departures(const mok_trace_event *events, int64_t count, int32_t rank, int64_t *found)
{
    int64_t n = 0;
    for (int64_t i = 0; i < count; i++)
        n += events[i].rank == rank && events[i].kind == MOK_TRACE_rank_barrier;
    int64_t *times = malloc(sizeof *times * (size_t)(n + 1));
    *found = n;
    for (int64_t i = 0, at = 0; times && i < count; i++)
        if (events[i].rank == rank && events[i].kind == MOK_TRACE_rank_barrier)
            times[at++] = (int64_t)events[i].end_ns;
    if (times)
        qsort(times, (size_t)n, sizeof *times, ascending);
    return times;
}

static int64_t distance(int64_t a, int64_t b) { return a > b ? a - b : b - a; }

/* From the barriers that both ranks have, counted from the youngest: a lane that overflowed has lost its oldest. Overwrites `theirs`. */
static void compare(const int64_t *ours, int64_t num_ours, int64_t *theirs, int64_t num_theirs, mok_trace_clock *clock)
{
    int64_t n = num_ours < num_theirs ? num_ours : num_theirs;
    const int64_t *from = ours + num_ours - n;
    int64_t *differences = theirs + num_theirs - n;
    clock->barriers = (int32_t)(n < INT32_MAX ? n : INT32_MAX);
    if (n < FEWEST_BARRIERS)
        return;
    for (int64_t i = 0; i < n; i++)
        differences[i] -= from[i];
    qsort(differences, (size_t)n, sizeof *differences, ascending);
    int64_t middle = differences[n / 2], below = distance(middle, differences[n / 4]), above = distance(middle, differences[n - 1 - n / 4]);
    clock->accuracy_ns = below > above ? below : above;
    clock->offset_ns = distance(middle, 0) > clock->accuracy_ns ? middle : 0;
}

/* The ranks of the events, ascending; their number, or -1 if there are too many or there is no memory. */
static int32_t find_ranks(const mok_trace_event *events, int64_t count, int32_t **ranks)
{
    bool *there = calloc(MOST_RANKS, sizeof *there);
    int32_t n = 0;
    *ranks = malloc(sizeof **ranks * MOST_RANKS);
    for (int64_t i = 0; there && *ranks && n >= 0 && i < count; i++)
        if (events[i].rank >= 0 && events[i].rank < MOST_RANKS)
            there[events[i].rank] = true;
        else
            n = -1;
    for (int32_t r = 0; there && *ranks && n >= 0 && r < MOST_RANKS; r++)
        if (there[r])
            (*ranks)[n++] = r;
    n = there && *ranks ? n : -1;
    free(there);
    return n;
}

static void move(mok_trace_event *events, int64_t count, const mok_trace_clock *clock)
{
    for (int64_t i = 0; clock->offset_ns && i < count; i++)
        if (events[i].rank == clock->rank) {
            events[i].begin_ns -= (uint64_t)clock->offset_ns;
            events[i].end_ns -= (uint64_t)clock->offset_ns;
        }
}

static mok_status align_all(mok_trace_event *events, int64_t count, const int32_t *ranks, int32_t num_ranks, mok_trace_clock *clocks)
{
    int64_t num_ours = 0, num_theirs = 0;
    int64_t *ours = num_ranks ? departures(events, count, ranks[0], &num_ours) : NULL;
    mok_status status = ours || !num_ranks ? MOK_OK : mk_fail(MOK_E_MEMORY, "no memory to compare the clocks of %d ranks", num_ranks);
    for (int32_t i = 0; i < num_ranks && status == MOK_OK; i++) {
        clocks[i] = (mok_trace_clock){.rank = ranks[i]};
        int64_t *theirs = departures(events, count, ranks[i], &num_theirs);
        if (!theirs)
            status = mk_fail(MOK_E_MEMORY, "no memory to compare the clocks of %d ranks", num_ranks);
        else
            compare(ours, num_ours, theirs, num_theirs, &clocks[i]);
        free(theirs);
    }
    for (int32_t i = 0; i < num_ranks && status == MOK_OK; i++)
        move(events, count, &clocks[i]);
    free(ours);
    return status;
}

mok_status mok_trace_align(mok_trace_event *events, int64_t count, mok_trace_clock *clocks, int32_t *num_clocks)
{
    if ((!events && count) || count < 0 || !num_clocks)
        return mk_fail(MOK_E_ARG, "%s", !num_clocks ? "num_clocks is NULL" : count < 0 ? "count is negative" : "events is NULL");
    int32_t *ranks, room = *num_clocks, num_ranks = find_ranks(events, count, &ranks);
    mok_status status = MOK_OK;
    if (num_ranks < 0)
        status = mk_fail(MOK_E_ARG, "an event's rank is not from 0 to %d, or there is no memory", MOST_RANKS - 1);
    else if (clocks && room < num_ranks)
        status = mk_fail(MOK_E_ARG, "there is room for %d clocks, but there are %d ranks", room, num_ranks);
    else if (clocks)
        status = align_all(events, count, ranks, num_ranks, clocks);
    if (num_ranks >= 0)
        *num_clocks = num_ranks;
    free(ranks);
    return status;
}
