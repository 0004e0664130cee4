/* The link by itself, for benchmarks: rows travel as in a pass, by the same code, and nothing is computed. Beside it what the GPU can do at
 * best with whole rows, and a check of what arrived. Grids and parameters: link_params.h. */
#include "cuda/kernel/link_params.h"
#include "cuda/stage/rows.cuh"
#include "cuda/stage/s1_dispatch.cuh"

namespace mk {

/* ---- known numbers: bf16 in [128, 256), so that neighbouring tokens, columns and ranks differ ---- */

MK_DEVICE uint32_t link_bits(uint32_t rank, uint32_t token, uint32_t col) { return 0x4300u | ((token * 37 + rank * 101 + col * 7 + col / 64 * 13) & 127); }
MK_DEVICE uint32_t link_word(uint32_t rank, uint32_t token, uint32_t word) { return link_bits(rank, token, 2 * word) | link_bits(rank, token, 2 * word + 1) << 16; }

/* One warp: a whole row. */
MK_DEVICE void link_fill_row(bf16 *row, uint32_t words, uint32_t rank, uint32_t token)
{
    for (uint32_t w = lane_idx(); w < words; w += 32)
        store(reinterpret_cast<uint32_t *>(row) + w, link_word(rank, token, w));
}
MK_DEVICE uint32_t link_wrong_words(const bf16 *row, uint32_t words, uint32_t rank, uint32_t token)
{
    uint32_t wrong = 0;
    for (uint32_t w = lane_idx(); w < words; w += 32)
        wrong += load(reinterpret_cast<const uint32_t *>(row) + w) != link_word(rank, token, w);
    return wrong;
}

/* In MXFP8: elements that are numbers, four to a word, and scales around 1. */
MK_DEVICE uint32_t link_mx_word(uint32_t rank, uint32_t token, uint32_t word)
{
    return (link_word(rank, token, 2 * word) & 0x770077) | (link_word(rank, token, 2 * word + 1) & 0x770077) << 8;
}
MK_DEVICE uint8_t link_mx_scale(uint32_t rank, uint32_t token, uint32_t block) { return (uint8_t)(124 + ((token * 5 + rank * 3 + block) & 7)); }

MK_DEVICE void link_fill_mx_row(uint8_t *row, uint32_t cols, uint32_t rank, uint32_t token)
{
    for (uint32_t w = lane_idx(); w < cols / 4; w += 32)
        store(reinterpret_cast<uint32_t *>(row) + w, link_mx_word(rank, token, w));
    for (uint32_t block = lane_idx(); block < cols / MK_MX_BLOCK; block += 32)
        store(row + cols + block, link_mx_scale(rank, token, block));
}

struct Link {
    const mk_link_params &p;
    const mk_rank_params &r;
    mk_table t;
    int64_t num_rows;            /* of the table, padding included */

    MK_MEMBER Link(const mk_link_params &params) : p(params), r(params.rank), t(mk_table_at(&params.rank.memory, params.schedule)), num_rows(load(&t.head->num_tiles) * (int64_t)MK_ROW_TILE) {}

    MK_MEMBER bf16 *ring(int64_t buffer, int64_t row) const { return in_local<bf16>(r, buffer) + row * r.dims.hidden; }
    /* One warp: a row of ring_x, whose token came in MXFP8: widened, or where it is multiplied as it is, elements and behind the ring's all scales. */
    MK_MEMBER uint32_t wrong_mx_words(int64_t row, uint32_t rank, uint32_t token) const
    {
        const uint32_t cols = (uint32_t)r.dims.hidden;
        const uint8_t *base = in_local<uint8_t>(r, r.memory.ring_x), *scales = base + MK_RING_ROWS(&r.dims) * r.dims.hidden;
        uint32_t wrong = 0;
        for (uint32_t w = lane_idx(); w < cols / 4; w += 32) {
            const uint32_t word = link_mx_word(rank, token, w);
            const uint8_t scale = link_mx_scale(rank, token, w / (MK_MX_BLOCK / 4));
            if constexpr (kMultipliesMx) {
                wrong += load(reinterpret_cast<const uint32_t *>(base + row * cols) + w) != word;
                wrong += w % (MK_MX_BLOCK / 4) == 0 && load(scales + mk_mx_scale_index(row, w / (MK_MX_BLOCK / 4), cols)) != scale;
            } else {
                for (uint32_t i = 0; i < 4; i++)
                    wrong += load(ring(r.memory.ring_x, row) + 4 * w + i) != mk_mx_widen((uint8_t)(word >> 8 * i), scale);
            }
        }
        return wrong;
    }
    MK_MEMBER bf16 *slot(const mk_row &record) const { return in_peer<bf16>(r, record.src_rank, r.memory.slots) + record.src_slot * r.dims.hidden; }
    MK_MEMBER uint32_t *flag(const mk_row &record) const { return in_peer<uint32_t>(r, record.src_rank, r.memory.dweight_slots) + record.src_slot; }
};

MK_DEVICE void link_fill(const mk_link_params &p, int64_t warp, int64_t num_warps)
{
    const Link link(p);
    const uint32_t words = (uint32_t)(p.rank.dims.hidden / 2);
    for (int64_t token = warp; token < p.num_tokens && p.mx; token += num_warps)
        link_fill_mx_row(in_heap<uint8_t>(p.rank, p.rank.memory.x) + token * mk_mx_row_stride(p.rank.dims.hidden), words * 2, (uint32_t)p.rank.dims.rank, (uint32_t)token);
    for (int64_t token = warp; token < p.num_tokens && !p.mx; token += num_warps)
        link_fill_row(in_heap<bf16>(p.rank, p.rank.memory.x) + token * p.rank.dims.hidden, words, (uint32_t)p.rank.dims.rank, (uint32_t)token);
    for (int64_t row = warp; row < link.num_rows; row += num_warps) {
        const mk_row record = load(&link.t.rows[row]);
        if (record.src_rank >= 0)
            link_fill_row(link.ring(p.rank.memory.ring_dout, row), words, (uint32_t)record.src_rank, (uint32_t)record.src_slot);
    }
}

MK_DEVICE void link_check(const mk_link_params &p, int64_t warp, int64_t num_warps)
{
    const Link link(p);
    const uint32_t words = (uint32_t)(p.rank.dims.hidden / 2), self = (uint32_t)p.rank.dims.rank;
    uint32_t wrong = 0;
    for (int64_t row = warp; row < link.num_rows && p.pull; row += num_warps) {
        const mk_row record = load(&link.t.rows[row]);
        if (p.mx && record.src_rank >= 0)
            wrong += link.wrong_mx_words(row, (uint32_t)record.src_rank, (uint32_t)record.src_slot);
        else if (p.payload && record.src_rank >= 0)
            wrong += link_wrong_words(link.ring(p.rank.memory.ring_x, row), words, (uint32_t)record.src_rank, (uint32_t)record.src_slot);
        if ((p.signal & MK_LINK_SIGNAL_PULL) && row % MK_ROW_TILE == 0 && lane_idx() == 0)
            wrong += load(counter_at(p.rank, MK_COUNTER_s1_rows_arrived, row / MK_ROW_TILE)) != (uint32_t)mk_valid_rows(&link.t, row / MK_ROW_TILE);
    }
    for (int64_t token = warp; token < p.num_tokens && p.push; token += num_warps) {
        if (load(&link.t.own_ids[token]) < 0)
            continue;
        if (p.payload)
            wrong += link_wrong_words(in_heap<bf16>(p.rank, p.rank.memory.slots) + token * p.rank.dims.hidden, words, self, (uint32_t)token);
        if ((p.signal & MK_LINK_SIGNAL_PUSH) && lane_idx() == 0)
            wrong += load(in_heap<uint32_t>(p.rank, p.rank.memory.dweight_slots) + token) != p.round;
    }
    if (wrong)
        counter_add_relaxed_gpu(p.wrong, (uint64_t)wrong);
}

/* ---- by the stages' code ---- */

/* A tile that nobody has multiplied: what the epilogue reads from it are the known numbers. */
struct TileLink { static constexpr uint32_t cols = 128; };

template <> struct Acc<TileLink> {
    static constexpr uint32_t blocks = 1, block_rows = MK_ROW_TILE;
    uint32_t col, rank[2], token[2]; /* of the task; of this lane's rows l/4 and l/4 + 8 */

    MK_MEMBER void read(uint32_t, uint32_t c, float (&v)[32]) const
    {
        MK_UNROLL for (uint32_t n = 0; n < 32; n++) {
            const uint32_t half = n / 2 % 2, at = col + 64 * c + n / 4 * 8 + lane_idx() % 4 * 2 + n % 2;
            v[n] = bits_to_float(link_bits(rank[half], token[half], at) << 16);
        }
    }
};

struct LinkMoveShared {
    DispatchShared dispatch;
    alignas(128) uint8_t staging[MK_LINK_WARPS][kStagingBytes];
};
static_assert(sizeof(LinkMoveShared) <= MK_LINK_MOVE_SHARED, "what the host asks for");

/* Sixteen rows of a table tile, 128 columns: a math warp's share of a tile of down. The order of tiles is that of the stage. */
MK_DEVICE void link_push_share(const Link &link, int64_t number, uint32_t staging)
{
    constexpr int64_t group = 16, shares = MK_ROW_TILE / 16;
    const int64_t num_tiles = link.num_rows / MK_ROW_TILE, steps = mk_ceil_div(link.r.dims.hidden, TileLink::cols), task = number / shares;
    const int64_t first = task / (group * steps) * group, in_group = task % (group * steps), group_tiles = mk_min(num_tiles - first, group);
    const int64_t tile = first + in_group % group_tiles;
    if (in_group >= group_tiles * steps) /* of a last group that is not full */
        return;
    GemmTask what = {};
    what.row = what.out_row = (int32_t)(tile * MK_ROW_TILE);
    what.col = (int32_t)(in_group / group_tiles * TileLink::cols);
    what.num_rows = (int32_t)mk_valid_rows(&link.t, tile);
    const WarpOut out = {staging, (uint32_t)(number % shares * 16)};
    Acc<TileLink> acc;
    acc.col = (uint32_t)what.col;
    for (uint32_t half = 0; half < 2; half++) {
        const mk_row record = load(&link.t.rows[what.out_row + out.row + lane_idx() / 4 + 8 * half]);
        acc.rank[half] = (uint32_t)record.src_rank;
        acc.token[half] = (uint32_t)record.src_slot;
    }
    const StoreRows<SlotRows> epilogue = {{link.r, link.t.rows, nullptr, link.r.dims.hidden}};
    epilogue(what, acc, out);
}

MK_DEVICE void link_push(const Link &link, uint32_t staging)
{
    const int64_t groups = mk_ceil_div(link.num_rows / MK_ROW_TILE, 16), steps = mk_ceil_div(link.r.dims.hidden, TileLink::cols);
    for (;;) {
        uint32_t number = 0;
        if (lane_idx() == 0)
            number = ticket_take_relaxed_gpu(&device_state(link.r)->tickets[1], 1);
        number = shuffle(number, 0);
        if (number >= groups * 16 * steps * (MK_ROW_TILE / 16))
            return;
        link_push_share(link, number, staging);
    }
}

template <bool Mx> MK_DEVICE void link_move(const mk_link_params &p, LinkMoveShared &s)
{
    const Link link(p);
    if constexpr (!Mx)
        if (warp_idx() < MK_LINK_WARPS && p.push)
            link_push(link, smem_addr(s.staging[warp_idx()]));
    if (warp_idx() == MK_LINK_WARPS && p.pull && link.num_rows) {
        Dispatch<Mx> dispatch(p.rank, link.t, s.dispatch, nullptr);
        dispatch.move_all(&device_state(p.rank)->tickets[0], link.num_rows - 1, link.num_rows);
        dispatch.count();
    }
}

/* ---- as fast as the GPU can ---- */

struct LinkCopyShared {
    alignas(128) uint8_t area[MK_LINK_WARPS][MK_LINK_SLOT];
    uint64_t full[MK_LINK_WARPS];
};
static_assert(sizeof(LinkCopyShared) <= MK_LINK_COPY_SHARED, "what the host asks for");

/* One warp: as many whole rows at a time as its slot holds (a longer row in pieces), a lane each. */
struct LinkCopy {
    const Link &link;
    const bool push;
    const uint32_t area, full;
    uint32_t parity;

    MK_MEMBER void move(const mk_row &record, int64_t row, bool moves)
    {
        const mk_rank_params &r = link.r;
        const uint32_t row_bytes = (uint32_t)(r.dims.hidden * 2), movers = ballot(moves);
        const uint32_t mine = population_count(movers & ((1u << lane_idx()) - 1));
        for (uint32_t at = 0; at < row_bytes; at += MK_LINK_SLOT, parity ^= 1) {
            const uint32_t bytes = (uint32_t)mk_min(row_bytes - at, MK_LINK_SLOT), place = area + mine * bytes;
            if (lane_idx() == 0)
                mbar_arrive_expect_tx_release_cta(full, population_count(movers) * bytes);
            sync_warp();
            if (moves) {
                const bf16 *from = push ? link.ring(r.memory.ring_dout, row) : in_peer<bf16>(r, record.src_rank, r.memory.x) + record.src_slot * r.dims.hidden;
                bulk_load(place, reinterpret_cast<const uint8_t *>(from) + at, bytes, full);
            }
            wait_mbar(full, parity, "mok_link_copy: rows");
            if (moves)
                bulk_store(reinterpret_cast<uint8_t *>(push ? link.slot(record) : link.ring(r.memory.ring_x, row)) + at, place, bytes);
            bulk_commit();
            bulk_wait_read<0>(); /* the next rows take the slot */
            sync_warp();
        }
    }

    /* What a reader would wait for. Push: a flag beside the slot, at the token's rank. Pull: this tile's counter, here. Release: the rows are complete. */
    MK_MEMBER void tell(const mk_row &record, int64_t row, bool moves) const
    {
        bulk_wait<0>();
        sync_warp();
        const uint32_t count = population_count(ballot(moves));
        if (push && moves)
            flag_store_release_sys(link.flag(record), link.p.round);
        if (!push && lane_idx() == 0)
            flag_add_release_gpu(counter_at(link.r, MK_COUNTER_s1_rows_arrived, row / MK_ROW_TILE), count);
    }

    MK_MEMBER void run()
    {
        uint32_t batch = 32; /* a power of two, so that a batch lies in one tile */
        while (batch > 1 && batch * link.r.dims.hidden * 2 > MK_LINK_SLOT)
            batch /= 2;
        for (;;) {
            uint32_t number = 0;
            if (lane_idx() == 0)
                number = ticket_take_relaxed_gpu(&device_state(link.r)->tickets[push], 1);
            const int64_t first = (int64_t)shuffle(number, 0) * batch;
            if (first >= link.num_rows)
                break;
            mk_row record = {-1, 0, 0, 0};
            if (lane_idx() < batch)
                record = load(&link.t.rows[first + lane_idx()]);
            const bool moves = record.src_rank >= 0;
            if (!ballot(moves))
                continue;
            if (link.p.payload)
                move(record, first + lane_idx(), moves);
            if (link.p.signal & (push ? MK_LINK_SIGNAL_PUSH : MK_LINK_SIGNAL_PULL))
                tell(record, first, moves);
        }
        bulk_wait<0>(); /* written, before the CTA ends */
    }
};

MK_DEVICE void link_copy(const mk_link_params &p, LinkCopyShared &s)
{
    const Link link(p);
    const uint32_t warp = warp_idx(), full = smem_addr(&s.full[warp]);
    const bool push = p.pull && p.push ? warp % 2 != 0 : p.push != 0;
    if (lane_idx() == 0)
        mbar_init(full, 1);
    fence_proxy_async(); /* the barrier is this warp's own; and its copies read rows that plain stores of an earlier launch wrote */
    sync_warp();
    LinkCopy copy = {link, push, smem_addr(s.area[warp]), full, 0};
    copy.run();
}

MK_DEVICE int64_t link_warp() { return ((int64_t)block_idx() * 256 + thread_idx()) / 32; }
MK_DEVICE int64_t link_warps() { return (int64_t)num_blocks() * 8; }

} /* namespace mk */

MK_ENTRY MK_KERNEL(256) mok_link_fill(MK_KERNEL_PARAM mk_link_params p) { mk::link_fill(p, mk::link_warp(), mk::link_warps()); }
MK_ENTRY MK_KERNEL(288) mok_link_move(MK_KERNEL_PARAM mk_link_params p) { mk::link_move<false>(p, *static_cast<mk::LinkMoveShared *>(mk::shared_base())); }
MK_ENTRY MK_KERNEL(288) mok_link_move_mx(MK_KERNEL_PARAM mk_link_params p) { mk::link_move<true>(p, *static_cast<mk::LinkMoveShared *>(mk::shared_base())); }
MK_ENTRY MK_KERNEL(256) mok_link_copy(MK_KERNEL_PARAM mk_link_params p) { mk::link_copy(p, *static_cast<mk::LinkCopyShared *>(mk::shared_base())); }
MK_ENTRY MK_KERNEL(256) mok_link_check(MK_KERNEL_PARAM mk_link_params p) { mk::link_check(p, mk::link_warp(), mk::link_warps()); }
