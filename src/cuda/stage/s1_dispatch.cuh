/* s1_dispatch on the device: rows of x from their ranks' heaps, or from an earlier row of the same token, into the ring.
 *
 * One thread moves whole rows through slots of shared memory by bulk copies: heap or ring -> slot -> ring. As many slots as fit
 * (1, 2, 4 or 8) make a pipeline: half of them are being filled, the other half emptied. Rows come from a ticket in the order of
 * the walk, so a row that is copied waits only for rows with smaller tickets; before a thread waits for others it finishes
 * the rows it has under way, since others may wait for those. Rows of one token in one tile (duplicate routes: neighbours in
 * the table) are written together by whoever fetches the first of them. */
#ifndef MK_STAGE_S1_DISPATCH_CUH
#define MK_STAGE_S1_DISPATCH_CUH

#include "cuda/stage/stage.cuh"
#include "cuda/sync/wait.cuh"

namespace mk {

enum { DISPATCH_MAX_SLOTS = 8, DISPATCH_RECORDS = 16 }; /* a row's record outlives its slot: until its stores are written */

/* A row on its way. */
struct alignas(16) RowInFlight {
    int64_t row;         /* of the table */
    int32_t from;        /* table row it is copied from, -1: pulled */
    int32_t duplicates;  /* rows behind it in the walk that are copies of it in the same tile */
};

struct DispatchShared {
    alignas(128) uint8_t area[MK_DISPATCH_AREA];
    RowInFlight rows[DISPATCH_RECORDS];
    uint64_t full[DISPATCH_MAX_SLOTS];
};
static_assert(sizeof(DispatchShared) <= MK_DISPATCH_SHARED, "shared memory of a dispatch block");

/* What it takes to move rows, whoever asks for them and in whichever order. */
struct Dispatch {
    const mk_rank_params &r;
    mk_table t;
    DispatchShared &s;
    const mk_walk *walk;       /* fused: its readers free the ring's slots; null: launches do */
    int64_t free_tile = -1;    /* tile whose slot this thread knows to be free */
    uint32_t loaded = 0, stored = 0, signalled = 0; /* rows so far: loads issued, stores issued, arrival announced */
    int64_t pulled = 0, pulled_peer = 0, copied = 0;

    MK_MEMBER Dispatch(const mk_rank_params &rank, const mk_table &table, DispatchShared &shared, const mk_walk *fused)
        : r(rank), t(table), s(shared), walk(fused)
    {
        for (uint32_t i = 0; i < DISPATCH_MAX_SLOTS; i++)
            mbar_init(smem_addr(&s.full[i]), 1);
        fence_mbar_init_release_cluster();
        fence_proxy_async_shared_cta(); /* the barriers are used by copies next */
    }

    MK_MEMBER uint8_t *ring_at(int64_t row) const
    {
        return in_local<uint8_t>(r, r.memory.ring_x) + (ring_row(r.dims, row / MK_ROW_TILE) + row % MK_ROW_TILE) * r.dims.hidden * 2;
    }

    MK_MEMBER int32_t duplicates_of(int64_t row) const
    {
        int32_t n = 0;
        while ((row - n) % MK_ROW_TILE != 0 && load(&t.rows[row - n - 1].src_rank) >= 0 && load(&t.rows[row - n - 1].copy_fwd) == row - n)
            n++;
        return n;
    }

    /* Where a row comes from. */
    MK_MEMBER const uint8_t *source_of(const mk_row &record) const
    {
        if (record.copy_fwd >= 0)
            return ring_at(record.copy_fwd);
        return in_peer<uint8_t>(r, record.src_rank, r.memory.x) + record.src_slot / r.dims.topk * r.dims.hidden * 2;
    }

    /* ---- one slot's two copies ---- */

    template <uint32_t Slots> MK_MEMBER uint32_t slot_addr(uint32_t n) const { return smem_addr(s.area) + n % Slots * (MK_DISPATCH_AREA / Slots); }

    template <uint32_t Slots> MK_MEMBER void load_piece(uint32_t n, const uint8_t *from, uint32_t bytes)
    {
        const uint32_t bar = smem_addr(&s.full[n % Slots]);
        mbar_arrive_expect_tx_release_cta(bar, bytes);
        bulk_load(slot_addr<Slots>(n), from, bytes, bar);
    }

    template <uint32_t Slots> MK_MEMBER void store_piece(uint32_t n, const RowInFlight &row, int64_t at, uint32_t bytes)
    {
        wait_mbar(smem_addr(&s.full[n % Slots]), n / Slots & 1, "s1_dispatch: piece of a row");
        for (int32_t i = 0; i <= row.duplicates; i++)
            bulk_store(ring_at(row.row - i) + at, slot_addr<Slots>(n), bytes);
        bulk_commit();
    }

    /* ---- waiting for others ---- */

    /* A counter that must reach `wanted`; rows under way are finished first if it has not. Acquire. */
    template <uint32_t Slots> MK_MEMBER void wait_counter(const uint32_t *counter, uint32_t wanted, const char *what)
    {
        if ((int32_t)(flag_load_acquire_gpu(counter) - wanted) >= 0)
            return;
        drain<Slots>();
        wait_flag_at_least_gpu(counter, wanted, what);
    }

    /* Everybody who read the slot's old rows is done; pairs with the releases of s2_gate_up's and this stage's tasks. */
    template <uint32_t Slots> MK_MEMBER void wait_slot(int64_t tile)
    {
        const int64_t old = walk ? mk_tile_before(walk, r.dims.ring_tiles, tile) : -1;
        if (old < 0 || free_tile == tile)
            return;
        mk_need need;
        for (int i = 0; mk_dispatch_need(walk, &t, old, i, &need); i++)
            wait_counter<Slots>(counter_at(r, need.counter, need.first), need.count, "s1_dispatch: free slot");
        free_tile = tile;
    }

    /* All rows of the tile to copy from are there; pairs with the release in announce of whoever moved them. */
    template <uint32_t Slots> MK_MEMBER void wait_tile(int64_t tile)
    {
        const int64_t expert = mk_expert_of_tile(&t, r.dims.experts_count, tile);
        wait_counter<Slots>(counter_at(r, MK_COUNTER_s1_rows_arrived, tile), (uint32_t)mk_valid_rows(&t, expert, tile), "s1_dispatch: tile to copy from");
        fence_proxy_async_global(); /* the row was announced to plain loads; a bulk copy reads it */
    }

    /* ---- the pipeline ---- */

    /* The next row's arrival, once it is written. Release: pairs with wait_tile, and with the wait of s2_gate_up. */
    MK_MEMBER void announce()
    {
        const RowInFlight row = load(&s.rows[signalled++ % DISPATCH_RECORDS]);
        const int64_t tile = row.row / MK_ROW_TILE;
        flag_add_release_gpu(counter_at(r, MK_COUNTER_s1_rows_arrived, tile), 1 + (uint32_t)row.duplicates);
        if (row.from >= 0) /* a reader of the other tile's slot less */
            flag_add_release_gpu(counter_at(r, MK_COUNTER_s1_copies_done, row.from / MK_ROW_TILE), 1);
        if (row.duplicates)
            flag_add_release_gpu(counter_at(r, MK_COUNTER_s1_copies_done, tile), (uint32_t)row.duplicates);
    }

    template <uint32_t Slots> MK_MEMBER void store_next()
    {
        const RowInFlight row = load(&s.rows[stored % DISPATCH_RECORDS]);
        store_piece<Slots>(stored++, row, 0, (uint32_t)(r.dims.hidden * 2));
    }

    template <uint32_t Slots> MK_MEMBER void drain()
    {
        while (stored != loaded)
            store_next<Slots>();
        bulk_wait<0>(); /* written, visibly to this thread */
        while (signalled != stored)
            announce();
    }

    /* A row that is longer than the whole area: piece by piece, nothing else under way. */
    MK_MEMBER void move_long_row(const RowInFlight &row, const uint8_t *from)
    {
        const int64_t bytes = r.dims.hidden * 2;
        uint32_t pieces = loaded; /* parity of the slot's barrier goes on from row to row */
        for (int64_t at = 0; at < bytes; at += MK_DISPATCH_AREA, pieces++) {
            const uint32_t piece = (uint32_t)mk_min(bytes - at, MK_DISPATCH_AREA);
            bulk_wait_read<0>();
            load_piece<1>(pieces, from + at, piece);
            store_piece<1>(pieces, row, at, piece);
        }
        store(&s.rows[0], row);
        bulk_wait<0>();
        signalled = 0;
        announce();
        loaded = stored = signalled = pieces;
    }

    template <uint32_t Slots> MK_MEMBER void move_row(int64_t row)
    {
        constexpr uint32_t ahead = Slots / 2;  /* loads under way while others are stored */
        const mk_row record = load(&t.rows[row]);
        const int64_t tile = row / MK_ROW_TILE;
        const int32_t from = record.copy_fwd;
        if (record.src_rank < 0 || (from >= 0 && from / MK_ROW_TILE == tile))
            return; /* padding, or written together with the row it copies */
        const RowInFlight flight = {row, from, duplicates_of(row)};
        wait_slot<Slots>(tile);
        if (from >= 0)
            wait_tile<Slots>(from / MK_ROW_TILE);
        copied += (from >= 0) + flight.duplicates;
        pulled += from < 0;
        pulled_peer += from < 0 && record.src_rank != r.dims.rank;
        if (Slots == 1 && r.dims.hidden * 2 > MK_DISPATCH_AREA)
            return move_long_row(flight, source_of(record));

        bulk_wait_read<Slots == 1 ? 0 : (int)(Slots - ahead - 1)>(); /* the slot's last stores have read it */
        store(&s.rows[loaded % DISPATCH_RECORDS], flight);
        load_piece<Slots>(loaded++, source_of(record), (uint32_t)(r.dims.hidden * 2));
        if (loaded - stored > ahead)
            store_next<Slots>();
        bulk_wait<(int)ahead>(); /* all but the youngest `ahead` stores are written */
        while (stored - signalled > ahead)
            announce();
    }

    /* Rows i = 0, 1, … of the walk go to table rows last, last - 1, …: all that this thread draws. */
    template <uint32_t Slots> MK_MEMBER void move_rows(uint32_t *ticket, int64_t last, int64_t num_rows)
    {
        for (int64_t i = ticket_take_relaxed_gpu(ticket, 1); i < num_rows; i = ticket_take_relaxed_gpu(ticket, 1))
            move_row<Slots>(last - i);
        drain<Slots>();
    }

    MK_MEMBER void move_all(uint32_t *ticket, int64_t last, int64_t num_rows)
    {
        const int64_t fit = MK_DISPATCH_AREA / (r.dims.hidden * 2);
        if (fit >= 8)
            move_rows<8>(ticket, last, num_rows);
        else if (fit >= 4)
            move_rows<4>(ticket, last, num_rows);
        else if (fit >= 2)
            move_rows<2>(ticket, last, num_rows);
        else
            move_rows<1>(ticket, last, num_rows);
        mk_device_state *state = device_state(r);
        counter_add_relaxed_gpu(reinterpret_cast<uint64_t *>(&state->rows_pulled), (uint64_t)pulled);
        counter_add_relaxed_gpu(reinterpret_cast<uint64_t *>(&state->rows_pulled_peer), (uint64_t)pulled_peer);
        counter_add_relaxed_gpu(reinterpret_cast<uint64_t *>(&state->rows_copied), (uint64_t)copied);
    }
};

/* One thread, one minibatch of the forward's walk, with others like it. */
MK_DEVICE void s1_dispatch(const mk_dispatch_params &p)
{
    Dispatch dispatch(p.rank, mk_table_at(&p.rank.memory, p.schedule), *static_cast<DispatchShared *>(shared_base()), nullptr);
    uint32_t *ticket = draw_from(p.rank, p.ticket);
    int64_t first, end;
    forward_minibatch(p.rank.dims, load(&dispatch.t.head->num_tiles), p.step, &first, &end);
    dispatch.move_all(ticket, end * MK_ROW_TILE - 1, (end - first) * MK_ROW_TILE);
}

} /* namespace mk */
#endif
