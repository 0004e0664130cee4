/* s1_dispatch on the device: rows of x (in the backward: of dout, and of x where it is needed) from their ranks' heaps, or from an
 * earlier row of the same token, into the ring. The forward walks the table down, the backward up.
 *
 * A warp takes up to 32 neighbouring rows at a time (a quarter of a tile), a lane for each row: what is known about the rows is read by
 * all lanes at once, then the lanes move their rows through slots of shared memory by bulk copies, heap or ring -> slot -> ring, half of
 * the slots filling while the other half empties. Batches come from a ticket in the order of the walk, so a row that is
 * copied waits only for rows with smaller tickets; a batch is finished before the next is drawn. Rows of one token in one tile
 * (duplicate routes: neighbours in the table) are written together by the lane of the first of them.
 *
 * MXFP8 (Mx): heaps hold e4m3 with scales (mx/mx.h). Where the tensor cores multiply that (kScaled), so does the ring: the elements of a row move as
 * they lie, the warp puts its scales into their atoms. Elsewhere the ring is bf16: rows of a heap go from their slot to the ring through the
 * registers of the whole warp, widened; a row that is copied in the ring moves as in bf16. */
#ifndef MK_STAGE_S1_DISPATCH_CUH
#define MK_STAGE_S1_DISPATCH_CUH

#include "cuda/stage/fault.cuh"
#include "cuda/stage/mx.cuh"
#include "cuda/stage/trace.cuh"

namespace mk {

enum { DISPATCH_BATCH = 32, DISPATCH_MAX_SLOTS = 8 };

/* Rows that a warp takes at a time: fewer of long rows, which take it longer, because nobody multiplies before the first tiles are whole. */
template <uint32_t Slots> constexpr uint32_t kBatchRows = Slots >= 8 ? DISPATCH_BATCH : Slots == 4 ? DISPATCH_BATCH / 2 : DISPATCH_BATCH / 4;

template <uint32_t Area> struct DispatchSlots {
    alignas(128) uint8_t area[Area];
    uint64_t full[DISPATCH_MAX_SLOTS];
};
typedef DispatchSlots<MK_DISPATCH_AREA> DispatchShared;
static_assert(sizeof(DispatchShared) <= MK_DISPATCH_SHARED, "shared memory of a dispatch block");

/* A lane's row. */
struct DispatchRow {
    int64_t row;              /* of the table */
    bool moves;               /* false: padding, or written together with the row it copies */
    int32_t from;             /* table row it is copied from, -1: pulled */
    bool waits;               /* copied in the ring, from another tile: the token is another rank's (layout/table.h), and `from` must be there first */
    int32_t duplicates;       /* rows behind it in the walk that are copies of it in the same tile */
    bool remote;              /* the token is another rank's */
    float weight;             /* of its route (backward, if it moves) */
    const uint8_t *heap;      /* of the token's rank; null: padding */
    int64_t token;            /* there */
};

/* What is moved: from where in a heap, or from the caller's rows, to where in the ring. */
struct DispatchPayload { int64_t heap_offset, ring_offset; const void *own; };

/* One warp. What it takes to move rows, whoever asks for them. */
template <bool Mx, bool Backward = false, uint32_t Area = MK_DISPATCH_AREA> struct Dispatch {
    const mk_rank_params &r;
    mk_table t;
    DispatchSlots<Area> &s;
    const mk_walk *walk;      /* fused: its readers free the ring's slots; null: launches do (forward and recompute only) */
    TraceShared *trace;       /* fused */
    const bool backward;
    bool need_x = true;
    uint32_t parities = 0;    /* bit s: parity of the next filling of slot s */
    uint32_t pulled = 0, pulled_peer = 0, copied = 0; /* this lane's, of this launch */
    uint32_t stop = 0;        /* an mbarrier after whose first phase no more rows are drawn; 0: none */
    static constexpr bool kScaled = Mx && kMultipliesMx;

    MK_MEMBER Dispatch(const mk_rank_params &rank, const mk_table &table, DispatchSlots<Area> &shared, const mk_walk *fused, TraceShared *fused_trace = nullptr)
        : r(rank), t(table), s(shared), walk(fused), trace(fused_trace), backward(Mx ? Backward : fused && fused->pass == MK_PASS_BACKWARD)
    {
        if (lane_idx() < DISPATCH_MAX_SLOTS)
            mbar_init(smem_addr(&s.full[lane_idx()]), 1);
        fence_proxy_async_shared_cta(); /* the barriers are this CTA's own, and used by copies next */
        sync_warp();
    }

    MK_MEMBER uint8_t *ring_at(const DispatchPayload &what, int64_t row) const
    {
        return in_local<uint8_t>(r, what.ring_offset) + place_in_ring(row) * ring_row_bytes();
    }
    MK_MEMBER int64_t place_in_ring(int64_t row) const { return ring_row(r.dims, row / MK_ROW_TILE) + row % MK_ROW_TILE; }
    MK_MEMBER int64_t ring_row_bytes() const { return kScaled ? r.dims.hidden : r.dims.hidden * 2; }
    MK_MEMBER const uint8_t *source(const DispatchPayload &what, const DispatchRow &d) const
    {
        if (d.waits)
            return ring_at(what, d.from);
        return (!Mx && what.own ? static_cast<const uint8_t *>(what.own) : d.heap + what.heap_offset) + d.token * heap_row();
    }
    /* Bytes from one row of a heap to the next; those of them that count; and those to move of a row. */
    MK_MEMBER int64_t heap_row() const { return Mx ? mk_mx_row_stride(r.dims.hidden) : r.dims.hidden * 2; }
    MK_MEMBER uint32_t link_row() const { return (uint32_t)(Mx ? mk_mx_row_bytes(r.dims.hidden) : r.dims.hidden * 2); }
    MK_MEMBER uint32_t row_bytes(const DispatchRow &d) const { return (uint32_t)(d.waits ? ring_row_bytes() : heap_row()); }

    /* n rows further along the walk; where a row's copy comes from; is `row` the last of its tile? */
    MK_MEMBER int64_t ahead(int64_t row, int64_t n) const { return backward ? row + n : row - n; }
    MK_MEMBER int32_t copy_of(const mk_row &record) const { return backward ? record.copy_bwd : record.copy_fwd; }
    /* A recompute walks some of the table: what lies beyond is not in the ring. */
    MK_MEMBER int32_t in_walk(int32_t row) const { return !walk || row / MK_ROW_TILE < walk->num_tiles ? row : -1; }
    MK_MEMBER bool ends_tile(int64_t row) const { return row % MK_ROW_TILE == (backward ? MK_ROW_TILE - 1 : 0); }
    MK_MEMBER bool copies_neighbour(int64_t row) const
    {
        const mk_row record = load(&t.rows[row]);
        return record.src_rank >= 0 && copy_of(record) == ahead(row, -1);
    }

    /* Lane i looks at the i-th row from `start` on, as the walk does; a batch lies in one tile. */
    template <uint32_t Rows> MK_MEMBER DispatchRow look_at(int64_t start) const
    {
        DispatchRow d = {};
        d.row = ahead(start, lane_idx() % Rows);
        const mk_row record = load(&t.rows[d.row]);
        const int32_t from = in_walk(copy_of(record));
        const bool exists = lane_idx() < Rows && record.src_rank >= 0, in_tile = exists && from >= 0 && from / MK_ROW_TILE == d.row / MK_ROW_TILE;
        const uint32_t behind = ballot(in_tile) >> lane_idx() >> 1; /* lanes behind this one that copy their neighbour */
        d.from = exists ? from : -1;
        d.remote = exists && record.src_rank != r.dims.rank;
        if (!exists)
            return d;
        d.heap = in_peer<uint8_t>(r, record.src_rank, 0);
        d.token = record.src_slot / r.dims.topk;
        if (in_tile)
            return d;
        d.moves = true;
        if (backward)
            d.weight = load(router_weights(d) + record.src_slot);
        d.duplicates = (int32_t)population_count(behind & ~(behind + 1)); /* ones before the first zero */
        if (lane_idx() + (uint32_t)d.duplicates == Rows - 1) /* they may go on in the next batch */
            while (!ends_tile(ahead(d.row, d.duplicates)) && copies_neighbour(ahead(d.row, d.duplicates + 1)))
                d.duplicates++;
        d.waits = d.from >= 0;
        return d;
    }

    /* ---- waiting for others; nothing is under way here ---- */

    /* Everybody who read the slot's old rows is done. Acquire: pairs with the releases of s2_gate_up's and this stage's tasks. */
    MK_MEMBER void wait_slot(int64_t tile) const
    {
        const int64_t old = walk ? mk_tile_before(walk, r.dims.ring_tiles, tile) : -1;
        mk_need need;
        for (int i = 0; old >= 0 && mk_dispatch_need(walk, &t, old, i, &need); i++)
            wait_counter(r, MK_TASK_DISPATCH, need.counter, need.first, need.count, "s1_dispatch: free slot");
    }

    /* All rows of the tile to copy from are there. Acquire: pairs with the release in announce of whoever moved them. */
    MK_MEMBER void wait_source(const DispatchRow &d) const
    {
        if (!d.waits)
            return;
        const int64_t tile = d.from / MK_ROW_TILE;
        wait_counter(r, MK_TASK_DISPATCH, MK_COUNTER_s1_rows_arrived, tile, (uint32_t)mk_valid_rows(&t, tile), "s1_dispatch: tile to copy from");
    }

    /* ---- moving ---- */

    MK_MEMBER void load_piece(const DispatchPayload &what, const DispatchRow &d, uint32_t slot, uint32_t slot_bytes, int64_t at, uint32_t bytes) const
    {
        const uint32_t bar = smem_addr(&s.full[slot]);
        mbar_arrive_expect_tx_release_cta(bar, bytes);
        bulk_load(smem_addr(s.area) + slot * slot_bytes, source(what, d) + at, bytes, bar);
    }

    MK_MEMBER void store_piece(const DispatchPayload &what, const DispatchRow &d, uint32_t slot, uint32_t slot_bytes, int64_t at, uint32_t bytes, uint32_t parity) const
    {
        wait_mbar(smem_addr(&s.full[slot]), parity, "s1_dispatch: piece of a row");
        for (int32_t i = 0; i <= d.duplicates; i++)
            bulk_store(ring_at(what, ahead(d.row, i)) + at, smem_addr(s.area) + slot * slot_bytes, bytes);
        bulk_commit();
    }

    /* After a batch every slot was filled count / Slots times, the first count % Slots of them once more. */
    template <uint32_t Slots> MK_MEMBER void flip_parities(uint32_t count)
    {
        parities ^= (count / Slots % 2 ? (1u << Slots) - 1 : 0) ^ ((1u << count % Slots) - 1);
    }

    /* The batch's rows, packed: the n-th lane that has one takes slot n mod slots. Groups of half the slots: group g is loaded
     * while group g - 1 is stored. */
    template <uint32_t Slots> MK_MEMBER void move_batch(const DispatchPayload &what, const DispatchRow &d)
    {
        constexpr uint32_t half = Slots / 2, slot_bytes = Area / Slots;
        const uint32_t movers = ballot(d.moves), count = population_count(movers), bytes = (uint32_t)(r.dims.hidden * 2);
        const uint32_t mine = population_count(movers & ((1u << lane_idx()) - 1)), slot = mine % Slots, groups = (count + half - 1) / half;
        for (uint32_t g = 0; g <= groups; g++) {
            if (d.moves && mine / half == g)
                load_piece(what, d, slot, slot_bytes, 0, bytes);
            if (d.moves && mine / half + 1 == g) {
                store_piece(what, d, slot, slot_bytes, 0, bytes, (parities >> slot ^ mine / Slots) & 1);
                bulk_wait_read<0>(); /* group g + 1 takes the slot */
            }
            sync_warp();
        }
        flip_parities<Slots>(count);
    }

    /* Rows longer than half the area: one at a time, in pieces, through slot 0. */
    MK_MEMBER void move_long_rows(const DispatchPayload &what, const DispatchRow &d)
    {
        const uint32_t movers = ballot(d.moves);
        const int64_t bytes = ring_row_bytes();
        if constexpr (kScaled)
            sync_warp(); /* a row's scales are read by all lanes, from where one has waited for them */
        for (uint32_t lane = 0; lane < kBatchRows<1>; lane++) {
            if (!(movers >> lane & 1))
                continue;
            if constexpr (kScaled) {
                store_scales(what, d, lane, source_of(what, d, lane) + r.dims.hidden);
            } else if constexpr (Mx) {
                if (!shuffle((uint32_t)d.waits, lane)) {
                    widen_row(what, d, lane, source_of(what, d, lane));
                    continue;
                }
            }
            for (int64_t at = 0; at < bytes; at += Area, parities ^= 1) {
                const uint32_t piece = (uint32_t)mk_min(bytes - at, Area);
                if (lane_idx() == lane) {
                    load_piece(what, d, 0, Area, at, piece);
                    store_piece(what, d, 0, Area, at, piece, parities & 1);
                    bulk_wait_read<0>();
                }
                sync_warp();
            }
        }
    }

    /* The batch's arrival, once every lane's rows are written. Release, cumulative over the warp: pairs with wait_source, and with
     * the wait of s2_gate_up. */
    MK_MEMBER void announce(const DispatchRow &d, int64_t tile)
    {
        bulk_wait<0>(); /* written, visibly to this lane */
        sync_warp();
        const uint32_t rows = d.moves ? 1 + (uint32_t)d.duplicates : 0, duplicates = d.moves ? (uint32_t)d.duplicates : 0;
        const uint32_t all_rows = sum_of_warp(rows), all_duplicates = sum_of_warp(duplicates);
        if (lane_idx() == 0 && all_rows)
            flag_add_release_gpu(counter_at(r, MK_COUNTER_s1_rows_arrived, tile), all_rows);
        if (lane_idx() == 0 && all_duplicates)
            flag_add_release_gpu(counter_at(r, MK_COUNTER_s1_copies_done, tile), all_duplicates);
        if (d.moves && d.from >= 0) /* a reader of the other tile's slot less */
            flag_add_release_gpu(counter_at(r, MK_COUNTER_s1_copies_done, d.from / MK_ROW_TILE), 1);
    }

    template <uint32_t Slots> MK_MEMBER void move_payload(const DispatchPayload &what, const DispatchRow &d)
    {
        if constexpr (Slots == 1)
            move_long_rows(what, d);
        else if constexpr (Mx)
            move_batch_mx<Slots>(what, d);
        else
            move_batch<Slots>(what, d);
    }

    /* ---- moving MXFP8 as it is ---- */

    /* Of a row of the ring, whose cell it is: the scales of 128 columns. */
    MK_MEMBER uint32_t *scale_cell(const DispatchPayload &what, int64_t row, uint32_t atom) const
    {
        const mk_dims &d = r.dims;
        return reinterpret_cast<uint32_t *>(in_local<uint8_t>(r, what.ring_offset) + MK_RING_ROWS(&d) * d.hidden + mk_mx_scale_index(place_in_ring(row), 4 * (int64_t)atom, d.hidden));
    }

    /* All lanes: the scales of `owner`'s row, into the row's atoms and those of its duplicates. from: scales of a row of a heap, wherever they lie now; a row
     * that waits has them from the ring. The cell of a last half atom gets scales of zeros for what no column has. */
    MK_MEMBER void store_scales(const DispatchPayload &what, const DispatchRow &d, uint32_t owner, const uint8_t *from) const
    {
        const uint32_t atoms = (uint32_t)mk_ceil_div(r.dims.hidden, MK_MX_TILE), zeros = MK_MX_SCALE_MIN * 0x01010101u;
        const bool waits = shuffle((uint32_t)d.waits, owner);
        const int64_t row = shuffle((uint32_t)d.row, owner), source_row = shuffle((uint32_t)d.from, owner);
        const int32_t duplicates = (int32_t)shuffle((uint32_t)d.duplicates, owner);
        MK_ROLLED for (uint32_t atom = lane_idx(); atom < atoms; atom += 32) {
            uint32_t cell = load(waits ? scale_cell(what, source_row, atom) : reinterpret_cast<const uint32_t *>(from) + atom);
            if ((int64_t)atom * MK_MX_TILE + MK_MX_TILE / 2 == r.dims.hidden)
                cell = (cell & 0xffff) | (zeros & 0xffff0000u);
            MK_ROLLED for (int32_t i = 0; i <= duplicates; i++)
                store(scale_cell(what, ahead(row, i), atom), cell);
        }
    }

    /* All lanes: where `lane`'s row comes from. */
    MK_MEMBER const uint8_t *source_of(const DispatchPayload &what, const DispatchRow &d, uint32_t lane) const
    {
        const uint64_t mine = reinterpret_cast<uint64_t>(source(what, d));
        return reinterpret_cast<const uint8_t *>((uint64_t)shuffle((uint32_t)(mine >> 32), lane) << 32 | shuffle((uint32_t)mine, lane));
    }

    /* ---- moving MXFP8 widened ---- */

    /* All lanes: `owner`'s row of a heap, wherever it lies now, into the ring's row and those that are its duplicates. */
    MK_MEMBER void widen_row(const DispatchPayload &what, const DispatchRow &d, uint32_t owner, const uint8_t *from) const
    {
        const uint32_t hidden = (uint32_t)r.dims.hidden;
        const int64_t row = shuffle((uint32_t)d.row, owner);
        const int32_t duplicates = (int32_t)shuffle((uint32_t)d.duplicates, owner);
        MK_ROLLED for (int32_t i = 0; i <= duplicates; i++) {
            uint8_t *to = ring_at(what, ahead(row, i));
            uint32_t col = lane_idx() * 8;
            if constexpr (!Backward) /* which has no registers for it */
                MK_ROLLED for (; col + 3 * kWarpCols < hidden; col += 4 * kWarpCols)
                    widen_four(from, to, col);
            MK_ROLLED for (; col < hidden; col += kWarpCols)
                store(reinterpret_cast<Vec4 *>(to + col * 2), mx_widen8(load(reinterpret_cast<const MxElements8 *>(from + col)), load(from + hidden + col / MK_MX_BLOCK)));
        }
    }

    /* This lane's eight columns of four runs: one would wait for its loads. */
    static constexpr uint32_t kWarpCols = 32 * 8;
    MK_MEMBER void widen_four(const uint8_t *from, uint8_t *to, uint32_t col) const
    {
        MxElements8 e[4];
        uint8_t scale[4];
        MK_UNROLL for (uint32_t i = 0; i < 4; i++) {
            e[i] = load(reinterpret_cast<const MxElements8 *>(from + col + i * kWarpCols));
            scale[i] = load(from + r.dims.hidden + (col + i * kWarpCols) / MK_MX_BLOCK);
        }
        MK_UNROLL for (uint32_t i = 0; i < 4; i++)
            store(reinterpret_cast<Vec4 *>(to + (col + i * kWarpCols) * 2), mx_widen8(e[i], scale[i]));
    }

    /* ---- moving MXFP8, either way ---- */

    /* move_batch, but for what becomes of a row that has come, one after the other: its lane stores elements as they lie, the warp its scales; or the warp
     * widens it, unless it is a copy of a row of the ring, which its lane stores. */
    template <uint32_t Slots> MK_MEMBER void move_batch_mx(const DispatchPayload &what, const DispatchRow &d)
    {
        constexpr uint32_t half = Slots / 2, slot_bytes = Area / Slots;
        const uint32_t movers = ballot(d.moves), count = population_count(movers);
        const uint32_t mine = population_count(movers & ((1u << lane_idx()) - 1)), groups = (count + half - 1) / half;
        for (uint32_t g = 0; g <= groups; g++) {
            if (d.moves && mine / half == g)
                load_piece(what, d, mine % Slots, slot_bytes, 0, row_bytes(d));
            for (uint32_t n = g * half - half; g > 0 && n < g * half && n < count; n++) {
                const uint32_t slot = n % Slots, parity = (parities >> slot ^ n / Slots) & 1, is_owner = ballot(d.moves && mine == n);
                const uint32_t owner = population_count(is_owner - 1); /* the only bit's place */
                const uint8_t *row = s.area + slot * slot_bytes;
                wait_mbar(smem_addr(&s.full[slot]), parity, "s1_dispatch: row in MXFP8");
                if (lane_idx() == owner && (kScaled || d.waits))
                    store_piece(what, d, slot, slot_bytes, 0, (uint32_t)ring_row_bytes(), parity);
                if constexpr (kScaled)
                    store_scales(what, d, owner, row + r.dims.hidden);
                else if (!shuffle((uint32_t)d.waits, owner))
                    widen_row(what, d, owner, row);
            }
            bulk_wait_read<0>();
            fence_proxy_async_shared_cta(); /* slots have been read by plain loads, and are filled by copies next */
            sync_warp();
        }
        flip_parities<Slots>(count);
    }

    MK_MEMBER void trace_starts(mk_trace_kind kind, int64_t start) const
    {
        if (trace && lane_idx() == 0)
            trace_begin(r, *trace, MK_TRACE_LANE_dispatch, kind, (int32_t)(start / MK_ROW_TILE), (uint32_t)(start % MK_ROW_TILE / DISPATCH_BATCH));
    }
    MK_MEMBER void trace_ends() const
    {
        if (trace && lane_idx() == 0)
            trace_end(r, *trace, MK_TRACE_LANE_dispatch);
    }
    /* All lanes, before they move: what the batch is going to bring over the link. */
    MK_MEMBER void trace_batch(const DispatchRow &d) const
    {
        if (!trace || !trace_on(r))
            return;
        const uint32_t peer = ballot(d.remote), over_link = ballot(d.moves && d.remote && d.from < 0);
        if (lane_idx() == 0)
            trace_link(*trace, MK_TRACE_LANE_dispatch, population_count(over_link) * link_row() * (backward + need_x), population_count(peer));
    }

    MK_MEMBER const float *router_weights(const DispatchRow &d) const { return reinterpret_cast<const float *>(d.heap + r.memory.router_weights); }

    /* Of the row and of those written together with it: whoever moves rows announces them, so it brings all that belongs to them. */
    MK_MEMBER void store_weights(const DispatchRow &d, int64_t tile) const
    {
        float *weights = in_local<float>(r, r.memory.ring_weight) + ring_row(r.dims, tile);
        store(&weights[d.row % MK_ROW_TILE], d.weight);
        for (int32_t i = 1; i <= d.duplicates; i++) {
            const int64_t row = ahead(d.row, i);
            store(&weights[row % MK_ROW_TILE], load(router_weights(d) + load(&t.rows[row].src_slot)));
        }
    }

    template <uint32_t Slots> MK_MEMBER void move_rows(int64_t start)
    {
        const int64_t tile = start / MK_ROW_TILE;
        const DispatchRow d = look_at<kBatchRows<Slots>>(start);
        trace_starts(MK_TRACE_wait_slot, start);
        wait_slot(tile);
        trace_ends();
        trace_starts(MK_TRACE_wait_source, start);
        wait_source(d);
        trace_ends();
        trace_starts(MK_TRACE_s1_dispatch, start);
        trace_batch(d);
        fence_proxy_async_global(); /* rows to copy were announced to plain loads of this lane; its bulk copies read them */
        if (backward && d.moves)
            store_weights(d, tile);
        if (backward)
            move_payload<Slots>({r.memory.dout, r.memory.ring_dout, r.own_dout}, d);
        if (need_x)
            move_payload<Slots>({r.memory.x, r.memory.ring_x, r.own_x}, d);
        announce(d, tile);
        trace_ends();
        if (!d.moves)
            return;
        copied += (d.from >= 0) + d.duplicates;
        pulled += d.from < 0;
        pulled_peer += d.from < 0 && d.remote;
    }

    template <uint32_t Slots> MK_MEMBER void move_drawn(uint32_t *ticket, int64_t start, int64_t num_rows)
    {
        for (;;) {
            uint32_t batch = 0;
            if (lane_idx() == 0)
                batch = stop && mbar_test_parity_acquire_cta(stop, 0) ? ~0u : ticket_take_relaxed_gpu(ticket, 1);
            batch = shuffle(batch, 0);
            if ((int64_t)batch * kBatchRows<Slots> >= num_rows)
                return;
            move_rows<Slots>(ahead(start, (int64_t)batch * kBatchRows<Slots>));
        }
    }

    /* num_rows table rows from `start` on (whole tiles), as many batches of them as this warp draws. */
    MK_MEMBER void move_all(uint32_t *ticket, int64_t start, int64_t num_rows)
    {
        const int64_t fit = Area / (kScaled ? heap_row() : r.dims.hidden * 2);
        if (fit >= 8)
            move_drawn<8>(ticket, start, num_rows);
        else if (fit >= 4)
            move_drawn<4>(ticket, start, num_rows);
        else if (fit >= 2)
            move_drawn<2>(ticket, start, num_rows);
        else
            move_drawn<1>(ticket, start, num_rows);
    }

    /* After all that: what this warp has moved, for mok_stats. */
    MK_MEMBER void count() const
    {
        mk_device_state *state = device_state(r);
        counter_add_relaxed_gpu(reinterpret_cast<uint64_t *>(&state->rows_pulled), (uint64_t)pulled);
        counter_add_relaxed_gpu(reinterpret_cast<uint64_t *>(&state->rows_pulled_peer), (uint64_t)pulled_peer);
        counter_add_relaxed_gpu(reinterpret_cast<uint64_t *>(&state->row_moves_peer), (uint64_t)pulled_peer * (need_x + backward));
        counter_add_relaxed_gpu(reinterpret_cast<uint64_t *>(&state->rows_copied), (uint64_t)copied);
    }
};

/* One warp, one minibatch of the forward's walk, with others like it. */
template <bool Mx> MK_DEVICE void s1_dispatch(const mk_dispatch_params &p)
{
    Dispatch<Mx> dispatch(p.rank, mk_table_at(&p.rank.memory, p.schedule), *static_cast<DispatchShared *>(shared_base()), nullptr);
    uint32_t *ticket = draw_from(p.rank, p.ticket);
    int64_t first, end;
    forward_minibatch(p.rank.dims, load(&dispatch.t.head->num_tiles), p.step, &first, &end);
    dispatch.move_all(ticket, end * MK_ROW_TILE - 1, (end - first) * MK_ROW_TILE);
    dispatch.count();
}

} /* namespace mk */
#endif
