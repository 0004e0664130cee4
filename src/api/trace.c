/* Traces: taking the memory, and bringing events to the caller. */
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "base/error.h"

enum { DEFAULT_EVENTS = 2048, MOST_EVENTS = 1 << 20, BATCHES = 4 /* of a tile's dispatch, at most */ };

static mok_status clear(mok_workspace *w, const mk_trace *t)
{
    mk_trace_head none;
    memset(&none, 0, sizeof none);
    for (int32_t track = 0; track < t->tracks; track++)
        for (int32_t lane = 0; lane < t->lanes; lane++)
            MK_TRY(w->backend->memory_copy(w, mk_trace_ring(t, track, lane), &none, sizeof none));
    return MOK_OK;
}

mok_status mok_trace_start(mok_workspace *w, int64_t events_per_lane)
{
    MK_TRY(mk_check_workspace(w));
    if (events_per_lane < 0 || events_per_lane > MOST_EVENTS)
        return mk_fail(MOK_E_ARG, "events_per_lane is %lld: it must be from 0 to %d", (long long)events_per_lane, MOST_EVENTS);
    MK_TRY(mok_trace_stop(w));
    mk_trace t = w->trace;
    if (!t.tracks)
        return mk_fail(MOK_E_UNSUPPORTED, "backend %s keeps no traces yet", w->backend->name);
    for (t.capacity = 1; t.capacity < (events_per_lane ? events_per_lane : DEFAULT_EVENTS); t.capacity *= 2) {
    }
    void *memory = NULL;
    MK_TRY(w->backend->memory_alloc(w, (size_t)mk_trace_bytes(&t), &memory));
    t.memory = memory;
    mok_status status = clear(w, &t);
    if (status == MOK_OK)
        w->trace = t;
    else
        w->backend->memory_free(w, memory);
    return status;
}

mok_status mok_trace_stop(mok_workspace *w)
{
    MK_TRY(mk_check_workspace(w));
    if (!w->trace.memory)
        return MOK_OK;
    MK_TRY(w->backend->wait(w, true));
    w->backend->memory_free(w, w->trace.memory);
    w->trace.memory = NULL;
    return MOK_OK;
}

/* Where times are equal the lane decides: the order is the same every time. */
static int by_begin(const void *a, const void *b)
{
    const mok_trace_event *x = a, *y = b;
    if (x->begin_ns != y->begin_ns)
        return x->begin_ns < y->begin_ns ? -1 : 1;
    if (x->track != y->track)
        return x->track - y->track;
    return x->lane != y->lane ? x->lane - y->lane : x->end_ns < y->end_ns ? -1 : x->end_ns > y->end_ns;
}

static void convert(const mok_workspace *w, const mk_trace_event *e, int32_t track, mok_trace_event *to)
{
    *to = (mok_trace_event){.begin_ns = e->begin_ns, .end_ns = e->end_ns, .link_bytes = e->link_bytes, .rank = w->dims.rank, .track = track, .lane = e->lane,
                            .sm = e->sm, .kind = e->kind, .tile = e->tile, .part = e->part, .shared = e->shared};
    if (e->kind == MK_TRACE_s1_dispatch) /* until it is resolved */
        to->link_bytes |= (uint64_t)e->peer_rows << 32;
}

/* A push knows the bytes of a row; how many of a tile's rows go to peers, its dispatch knew. */
static mok_status resolve_links(const mok_workspace *w, mok_trace_event *events, int64_t count)
{
    int64_t tiles = w->dims.capacity_tiles;
    uint8_t (*peer_rows)[BATCHES] = calloc((size_t)tiles + 1, sizeof *peer_rows);
    if (!peer_rows)
        return mk_fail(MOK_E_MEMORY, "no memory for the rows of %lld tiles", (long long)tiles);
    for (int64_t i = 0; i < count; i++) {
        mok_trace_event *e = &events[i];
        bool known = e->tile >= 0 && e->tile < tiles && !e->shared;
        if (e->kind == MK_TRACE_s1_dispatch && known)
            peer_rows[e->tile][e->part % BATCHES] = (uint8_t)(e->link_bytes >> 32);
        if (e->kind == MK_TRACE_s1_dispatch)
            e->link_bytes &= UINT32_MAX;
        uint64_t rows = 0;
        for (int i2 = 0; known && i2 < BATCHES; i2++)
            rows += peer_rows[e->tile][i2];
        if (mk_trace_is_push(e->kind))
            e->link_bytes *= rows;
    }
    free(peer_rows);
    return MOK_OK;
}

static int64_t events_in(const mk_trace_head *ring, uint32_t capacity) { return mk_min(ring->count, capacity); }

static void collect(const mok_workspace *w, const mk_trace *t, mok_trace_event *events)
{
    for (int32_t track = 0; track < t->tracks; track++)
        for (int32_t lane = 0; lane < t->lanes; lane++) {
            mk_trace_head *ring = mk_trace_ring(t, track, lane);
            for (uint32_t kept = (uint32_t)events_in(ring, t->capacity), n = ring->count - kept; n != ring->count; n++)
                convert(w, mk_trace_event_at(ring, t->capacity - 1, n), track, events++);
        }
}

static void count_events(const mk_trace *t, int64_t *kept, int64_t *lost)
{
    *kept = *lost = 0;
    for (int32_t track = 0; track < t->tracks; track++)
        for (int32_t lane = 0; lane < t->lanes; lane++) {
            const mk_trace_head *ring = mk_trace_ring(t, track, lane);
            *kept += events_in(ring, t->capacity);
            *lost += (int64_t)ring->count - events_in(ring, t->capacity);
        }
}

/* `t` on the host. */
static mok_status read_host(const mok_workspace *w, const mk_trace *t, mok_trace_event *events, int64_t *count, int64_t *lost)
{
    int64_t kept, gone;
    count_events(t, &kept, &gone);
    int64_t room = *count;
    *count = kept;
    if (lost)
        *lost = gone;
    if (!events)
        return MOK_OK;
    if (room < kept)
        return mk_fail(MOK_E_ARG, "there is room for %lld events, but there are %lld", (long long)room, (long long)kept);
    collect(w, t, events);
    qsort(events, (size_t)kept, sizeof *events, by_begin);
    return resolve_links(w, events, kept);
}

mok_status mok_trace_read(mok_workspace *w, mok_trace_event *events, int64_t *count, int64_t *lost)
{
    if (!w || !count)
        return mk_fail(MOK_E_ARG, "%s is NULL", w ? "count" : "workspace");
    if (!w->trace.memory)
        return mk_fail(MOK_E_STATE, "there is no trace: mok_trace_start begins one");
    mk_trace host = w->trace;
    size_t bytes = (size_t)mk_trace_bytes(&host);
    host.memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!host.memory)
        return mk_fail(MOK_E_MEMORY, "no memory for a copy of the trace, %zu bytes", bytes);
    mok_status status = w->backend->memory_copy(w, host.memory, w->trace.memory, bytes);
    if (status == MOK_OK)
        status = read_host(w, &host, events, count, lost);
    free(host.memory);
    return status;
}
