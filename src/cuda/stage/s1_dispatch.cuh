/* s1_dispatch on the device: rows of x from their ranks' heaps, or from an earlier row of the same token, into the ring.
 * One thread moves whole rows through a slot of shared memory by bulk copies: heap or ring -> slot -> ring. Rows come from a
 * ticket in the order of the walk, so a row that is copied waits only for rows with smaller tickets. Rows of one token in one
 * tile (duplicate routes: neighbours in the table) are written together by whoever fetches the first of them. */
#ifndef MK_STAGE_S1_DISPATCH_CUH
#define MK_STAGE_S1_DISPATCH_CUH

#include "cuda/stage/stage.cuh"
#include "cuda/sync/wait.cuh"

namespace mk {

struct DispatchShared {
    alignas(128) uint8_t slot[MK_DISPATCH_PIECE];
    uint64_t full;
};
static_assert(sizeof(DispatchShared) <= MK_DISPATCH_SHARED, "shared memory of a dispatch block");

struct Dispatch {
    const mk_rank_params &r;
    mk_table t;
    DispatchShared &s;
    const mk_walk *walk;       /* fused: its readers free the ring's slots; null: launches do */
    int64_t free_tile = -1;    /* tile whose slot this thread knows to be free */
    uint32_t parity = 0;
    int64_t pulled = 0, pulled_peer = 0, copied = 0;

    MK_MEMBER Dispatch(const mk_rank_params &rank, const mk_table &table, DispatchShared &shared, const mk_walk *fused)
        : r(rank), t(table), s(shared), walk(fused)
    {
        mbar_init(smem_addr(&s.full), 1);
        fence_mbar_init_release_cluster();
        fence_proxy_async_shared_cta(); /* the barrier is used by copies next */
    }

    MK_MEMBER uint8_t *ring_at(int64_t row) const
    {
        return in_local<uint8_t>(r, r.memory.ring_x) + (ring_row(r.dims, row / MK_ROW_TILE) + row % MK_ROW_TILE) * r.dims.hidden * 2;
    }

    /* How many rows behind this one (in the walk) are copies of it in the same tile. */
    MK_MEMBER int32_t duplicates_of(int64_t row) const
    {
        int32_t n = 0;
        while ((row - n) % MK_ROW_TILE != 0 && load(&t.rows[row - n - 1].src_rank) >= 0 && load(&t.rows[row - n - 1].copy_fwd) == row - n)
            n++;
        return n;
    }

    /* Acquire: pairs with the release at the end of move_row in whoever moved the tile's rows. */
    MK_MEMBER void wait_tile(int64_t tile) const
    {
        const int64_t expert = mk_expert_of_tile(&t, r.dims.experts_count, tile);
        wait_flag_at_least_gpu(counter_at(r, MK_COUNTER_s1_rows_arrived, tile), (uint32_t)mk_valid_rows(&t, expert, tile), "s1_dispatch: tile to copy from");
        fence_proxy_async_global(); /* the row was announced to plain loads; a bulk copy reads it */
    }

    /* Everybody who read the slot's old rows is done. Acquire: pairs with the releases of s2_gate_up's and this stage's tasks. */
    MK_MEMBER void wait_slot(int64_t tile)
    {
        const int64_t old = walk ? mk_tile_before(walk, r.dims.ring_tiles, tile) : -1;
        if (old < 0 || free_tile == tile)
            return;
        mk_need need;
        for (int i = 0; mk_dispatch_need(walk, &t, old, i, &need); i++)
            wait_flag_at_least_gpu(counter_at(r, need.counter, need.first), need.count, "s1_dispatch: free slot");
        free_tile = tile;
    }

    /* `bytes` bytes from `from` to row `row` and its duplicates, in pieces. */
    MK_MEMBER void move_bytes(const uint8_t *from, int64_t row, int32_t duplicates, int64_t bytes)
    {
        for (int64_t at = 0; at < bytes; at += MK_DISPATCH_PIECE) {
            const uint32_t piece = (uint32_t)mk_min(bytes - at, MK_DISPATCH_PIECE);
            bulk_wait_read<0>(); /* the slot's last stores have read it */
            mbar_arrive_expect_tx_release_cta(smem_addr(&s.full), piece);
            bulk_load(smem_addr(s.slot), from + at, piece, smem_addr(&s.full));
            wait_mbar(smem_addr(&s.full), parity, "s1_dispatch: piece of a row");
            parity ^= 1;
            for (int32_t i = 0; i <= duplicates; i++)
                bulk_store(ring_at(row - i) + at, smem_addr(s.slot), piece);
            bulk_commit();
        }
    }

    MK_MEMBER void move_row(int64_t row)
    {
        const mk_row record = load(&t.rows[row]);
        const int64_t tile = row / MK_ROW_TILE, bytes = r.dims.hidden * 2, from = record.copy_fwd;
        if (record.src_rank < 0 || (from >= 0 && from / MK_ROW_TILE == tile))
            return; /* padding, or written together with the row it copies */
        const int32_t duplicates = duplicates_of(row);
        wait_slot(tile);
        if (from >= 0) {
            wait_tile(from / MK_ROW_TILE);
            move_bytes(ring_at(from), row, duplicates, bytes);
        } else {
            const uint8_t *x = in_peer<uint8_t>(r, record.src_rank, r.memory.x);
            move_bytes(x + record.src_slot / r.dims.topk * bytes, row, duplicates, bytes);
        }
        bulk_wait<0>(); /* written, visibly to this thread */
        /* Release: pairs with wait_tile, and with the wait of s2_gate_up. */
        flag_add_release_gpu(counter_at(r, MK_COUNTER_s1_rows_arrived, tile), 1 + (uint32_t)duplicates);
        if (from >= 0) /* a reader of the other tile's slot less */
            flag_add_release_gpu(counter_at(r, MK_COUNTER_s1_copies_done, from / MK_ROW_TILE), 1);
        if (duplicates)
            flag_add_release_gpu(counter_at(r, MK_COUNTER_s1_copies_done, tile), (uint32_t)duplicates);
        count(record, from, duplicates);
    }

    MK_MEMBER void count(const mk_row &record, int64_t from, int32_t duplicates)
    {
        copied += (from >= 0) + duplicates;
        pulled += from < 0;
        pulled_peer += from < 0 && record.src_rank != r.dims.rank;
    }

    MK_MEMBER void finish() const
    {
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
    const int64_t num_rows = (end - first) * MK_ROW_TILE;
    for (int64_t i = ticket_take_relaxed_gpu(ticket, 1); i < num_rows; i = ticket_take_relaxed_gpu(ticket, 1))
        dispatch.move_row(end * MK_ROW_TILE - 1 - i);
    dispatch.finish();
}

} /* namespace mk */
#endif
