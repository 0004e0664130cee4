/* The grouped GEMM core on Blackwell: what the other parts of the core are on Hopper, for a pair of CTAs and accumulators in tensor memory.
 *
 * The pair works on 256 rows x 256 columns at a time: each CTA brings 128 rows of A and half of B's rows, the tensor cores read both
 * CTAs' shared memory, and each CTA gets the 256 columns of its own rows. So a task of the walk, one row tile and one column
 * tile, is one CTA's share, and the pair takes two tasks with neighbouring numbers: walks put row tiles of the same columns next
 * to each other. Where two neighbours do not fit together (other expert, other columns, other GEMM), the pair does one after the other, the
 * second CTA helping with rows of zeros.
 *
 *   warp 0      load      of both CTAs, as on Hopper; bytes count on the leading CTA's barrier
 *   warp 1      mma       one thread of the leading CTA issues for the pair
 *               schedule  one thread of the other CTA
 *   warps 4-11  math      two warpgroups take turns: one reads its accumulators while the MMAs fill the other's
 *
 * Program, Epilogue and GemmTask are those of Hopper; a CTA that only helps has out_row kNoRows. Bits are those of Hopper, too: one accumulator,
 * K in steps of 16, ascending.
 *
 * TilePairScaled multiplies MXFP8 operands as well, each task as its input says. A row of 128 bytes then is 128 e4m3, a stage has their
 * scales too, and the mma role brings those to tensor memory before the MMAs that read them, in steps of 32. Either layout of an operand is good for both
 * precisions: with the other axis contiguous, a stage of e4m3 is 128 rows of the contraction, 128 numbers of the other axis in each. */
#ifndef MK_GEMM_PAIR_CUH
#define MK_GEMM_PAIR_CUH

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/mma.cuh"

namespace mk {

constexpr int32_t kNoRows = 1 << 30; /* rows from here on are past every map: zeros */

/* rows and cols of one CTA's share; 2 x 256 accumulator columns are all of the tensor memory. */
struct TilePair {
    static constexpr uint32_t rows = 128, cols = 256, stages = 6, cluster = 2;
    static constexpr bool ping_pong = true, tensor_memory = true, scaled = false;
};
struct TilePairScaled : TilePair {
    static constexpr uint32_t stages = 5;
    static constexpr bool scaled = true;
};

/* Atoms of scales in a stage (arch/tensor_core.h): of this CTA's rows of A, and of all rows of B, low half and high half. */
constexpr uint32_t kScaleAtoms = 3, kStageScaleBytes = kScaleAtoms * MK_SCALE_ATOM_BYTES;
template <class Tile, bool Scaled> struct PairScales {};
template <class Tile> struct PairScales<Tile, true> {
    alignas(128) uint8_t scales[Tile::stages][kScaleAtoms][MK_SCALE_ATOM_BYTES];
    uint64_t columns_taken[kMathWarpgroups]; /* this CTA's math warps of the other warpgroup have read the columns that a warpgroup's sums share with theirs */
};

template <class Tile> struct PairShared : PairScales<Tile, Tile::scaled> {
    alignas(1024) uint8_t a[Tile::stages][Tile::rows * kRowBytes];
    alignas(1024) uint8_t b[Tile::stages][Tile::cols / 2 * kRowBytes]; /* this CTA's half of B */
    alignas(1024) uint8_t staging[kMathWarps][kStagingBytes];
    GemmTask task[kTaskSlots];
    uint64_t full[Tile::stages];         /* of the leading CTA: one arrival and the bytes of both CTAs */
    uint64_t empty[Tile::stages];        /* one arrival: the MMAs that read the stage are done */
    uint64_t task_full[kTaskSlots];      /* one arrival and the bytes of a task */
    uint64_t task_empty[kTaskSlots];     /* of the scheduling CTA: every reader of the pair */
    uint64_t sums_full[kMathWarpgroups]; /* one arrival: a warpgroup's sums are there */
    uint64_t sums_ready[kMathWarpgroups];/* of the leading CTA: the math warps of both CTAs have read the last sums, and put in what the next begin with;
                                          * and the other warpgroup's have read the columns that its sums share with these */
    uint64_t tail_landed[kMathWarpgroups]; /* one arrival: the last K block of a task is there, and has rows that do not exist */
    uint64_t tail_zeroed[kMathWarpgroups]; /* of the leading CTA: the math warps of both CTAs have made them zero */
    uint32_t tensor_memory;              /* address of the CTA's columns */
};
template <> struct GemmShared<TilePair> : PairShared<TilePair> {};
template <> struct GemmShared<TilePairScaled> : PairShared<TilePairScaled> {};

/* How a task multiplies. Which axis of an operand is the contiguous one, the contraction (false) or the other; are operands e4m3 with scales; what the
 * sums begin with; and rows of the contraction that do not exist in the last K block (both operands have the other axis contiguous then): they are
 * made zero in shared memory. */
struct PairRecipe {
    bool a_outer = false, b_outer = false, scaled = false, continues = false;
    uint32_t missing_rows = 0;
};

/* An epilogue may look at a task before its MMAs; kernels overload this. */
template <class Epilogue> MK_DEVICE void before_task(Epilogue &, const GemmTask &, const WarpOut &) {}

/* What a kernel may add to the core's roles; this is nothing. All threads of a math warpgroup call `see` and `begin`. */

template <class Tile> struct PlainTasks {
    MK_MEMBER void see(uint32_t, uint32_t) const {}                              /* a task of its own has been read from this slot of the ring, in this round */
    MK_MEMBER PairRecipe recipe(const GemmTask &) const
    {
        PairRecipe how;
        how.scaled = Tile::scaled;
        return how;
    }
    template <class Acc> MK_MEMBER void begin(const GemmTask &, const Acc &, const WarpOut &) const {} /* puts in what the sums continue */
    MK_MEMBER void meanwhile(const GemmTask &, const WarpOut &) const {}         /* before the wait for the MMAs */
};

/* Which tasks a pair may do at once, and what a CTA does that only helps. */
template <class Program> struct Pairing {
    /* The first task of the pair that was drawn. */
    static MK_MEMBER uint32_t first(const Program &, uint32_t drawn) { return 2 * drawn; }
    static MK_MEMBER bool fit(const GemmTask &a, const GemmTask &b)
    {
        return a.kind == b.kind && a.expert == b.expert && a.col == b.col && a.num_k_blocks == b.num_k_blocks;
    }
    static MK_MEMBER GemmTask helper(GemmTask task)
    {
        task.row = task.out_row = kNoRows;
        task.num_rows = 0;
        return task;
    }
};
MK_DEVICE bool only_helps(const GemmTask &task) { return task.out_row == kNoRows; }

static_assert(sizeof(GemmShared<TilePair>) <= 232448 && sizeof(GemmShared<TilePairScaled>) <= 232448, "shared memory of a CTA");

constexpr uint32_t kPairStageBytes = (TilePair::rows + TilePair::cols / 2) * kRowBytes; /* in one CTA */
constexpr uint32_t kBoxBytes = 64 * kRowBytes;                                          /* of a box of 64 rows */
constexpr uint16_t kBothCtas = 3;

/* ---- tensor memory ----
 *
 * Two accumulators take all of it. With scales they share columns, the last of one and the first of the other, which a warpgroup reads first of
 * all, into registers: then the MMAs of the next task may begin, and the rest is read under them.
 *
 *   0 .. 255     sums of warpgroup 0            0 .. 255     sums of warpgroup 0
 *   256 .. 511   sums of warpgroup 1            240 .. 495   sums of warpgroup 1
 *                                               496 .. 507   scales of the K block that is multiplied: A, B low, B high */
template <class Tile> constexpr uint32_t kSharedColumns = Tile::scaled ? 16 : 0;
template <class Tile> constexpr uint32_t kSumsApart = Tile::cols - kSharedColumns<Tile>;
template <class Tile> constexpr uint32_t kFirstScaleColumn = kSumsApart<Tile> + Tile::cols;
static_assert(kFirstScaleColumn<TilePairScaled> + kScaleAtoms * MK_SCALE_ATOM_COLUMNS <= MK_TMEM_COLUMNS, "columns of a CTA");

/* The seam to the epilogues: a warp reads 32 lanes, as two blocks of 16 rows. */
template <class Tile> struct PairAcc {
    static constexpr uint32_t blocks = 2, block_rows = 16;
    uint32_t address; /* of the warp's first lane and its warpgroup's first column */

    MK_MEMBER void read(uint32_t m, uint32_t c, float (&v)[32]) const
    {
        tmem_load_16x64(address + mk_tmem_address(m * block_rows, 64 * c), v);
        tmem_wait_load(v);
    }
    MK_MEMBER void write(uint32_t m, uint32_t c, const float (&v)[32]) const { tmem_store_16x64(address + mk_tmem_address(m * block_rows, 64 * c), v); }
};
/* Sums that share columns with those of the other warpgroup. */
template <class Tile> struct SharingAcc : PairAcc<Tile> {
    using All = PairAcc<Tile>;
    bool second;                   /* the second warpgroup's: its first columns are shared, not its last */
    float shared[All::blocks * 8]; /* 16 columns of each block, in the layout of `read` */

    MK_MEMBER void take_shared()
    {
        static_assert(kSharedColumns<Tile> == 16, "what is loaded here");
        const uint32_t from = All::address + (second ? 0 : kSumsApart<Tile>);
        tmem_load_16x16<0>(from, shared);
        tmem_load_16x16<8>(from + mk_tmem_address(All::block_rows, 0), shared);
        tmem_wait_load(shared);
    }
    /* Not by index: loops over blocks need not be unrolled, and nothing goes to local memory. */
    MK_MEMBER float taken(uint32_t m, uint32_t i) const
    {
        static_assert(All::blocks == 2, "one or the other");
        return m == 0 ? shared[i] : shared[8 + i];
    }
    MK_MEMBER void read(uint32_t m, uint32_t c, float (&v)[32]) const
    {
        const uint32_t from = All::address + mk_tmem_address(m * All::block_rows, 64 * c);
        if (second && c == 0) {
            MK_UNROLL for (uint32_t i = 0; i < 8; i++)
                v[i] = taken(m, i);
            tmem_load_16x16<8>(from + 16, v);
            tmem_load_16x32<16>(from + 32, v);
            tmem_wait_load(v);
        } else if (!second && c == Tile::cols / 64 - 1) {
            MK_UNROLL for (uint32_t i = 0; i < 8; i++)
                v[24 + i] = taken(m, i);
            tmem_load_16x32<0>(from, v);
            tmem_load_16x16<16>(from + 32, v);
            tmem_wait_load(v);
        } else {
            All::read(m, c, v);
        }
    }
};
template <> struct Acc<TilePair> : PairAcc<TilePair> {};
template <> struct Acc<TilePairScaled> : SharingAcc<TilePairScaled> {};

/* As gemm_init. */
template <class Tile> MK_DEVICE void pair_init(GemmShared<Tile> &s, uint32_t more_readers)
{
    for (uint32_t i = 0; i < Tile::stages; i++) {
        mbar_init(smem_addr(&s.full[i]), 1);
        mbar_init(smem_addr(&s.empty[i]), 1);
    }
    for (uint32_t i = 0; i < kTaskSlots; i++) {
        mbar_init(smem_addr(&s.task_full[i]), 1);
        mbar_init(smem_addr(&s.task_empty[i]), (kTaskReaders + more_readers) * Tile::cluster + 1); /* and the mma role */
    }
    for (uint32_t i = 0; i < kMathWarpgroups; i++) {
        mbar_init(smem_addr(&s.sums_full[i]), 1);
        mbar_init(smem_addr(&s.sums_ready[i]), kWarpsPerTile<Tile> * Tile::cluster * (Tile::scaled ? 2 : 1));
        mbar_init(smem_addr(&s.tail_landed[i]), 1);
        mbar_init(smem_addr(&s.tail_zeroed[i]), kWarpsPerTile<Tile> * Tile::cluster);
        if constexpr (Tile::scaled)
            mbar_init(smem_addr(&s.columns_taken[i]), kWarpsPerTile<Tile>);
    }
    fence_mbar_init_release_cluster();
}

/* ---- schedule ---- */

template <class Tile> MK_DEVICE void post_pair(GemmShared<Tile> &s, RingCursor<kTaskSlots> &at, const GemmTask &leading, const GemmTask &other)
{
    wait_mbar_cluster(smem_addr(&s.task_empty[at.slot]), at.parity ^ 1, "gemm_schedule: free task slot");
    post_task(s, at.slot, 0, leading);
    post_task(s, at.slot, 1, other);
    at.next();
}

template <class Tile, class Program> MK_DEVICE void pair_schedule(GemmShared<Tile> &s, Program &program)
{
    RingCursor<kTaskSlots> at;
    for (;;) {
        const uint32_t number = Pairing<Program>::first(program, program.next());
        GemmTask first = {}, second = {};
        const bool any = program.task(number, 0, first), both = any && program.task(number + 1, 0, second);
        if (!any) {
            post_pair(s, at, first, first);
            return;
        }
        if (both && Pairing<Program>::fit(first, second)) {
            post_pair(s, at, first, second);
            continue;
        }
        post_pair(s, at, first, Pairing<Program>::helper(first));
        if (both)
            post_pair(s, at, second, Pairing<Program>::helper(second));
    }
}

/* ---- load ---- */

/* Scales of K block k: an atom of this CTA's rows of A, and both of B. */
template <class Tile> MK_DEVICE void load_scales(GemmShared<Tile> &s, uint32_t stage, const GemmTask &task, const ScaledGemmInput &in, int32_t k, uint32_t leading_full)
{
    const int32_t x = k * (MK_SCALE_ATOM_BYTES / 2); /* mk_tensor_scales */
    tma_load_2d_pair(smem_addr(s.scales[stage][0]), in.a_scales, x, task.row / MK_SCALE_ATOM_ROWS, leading_full);
    tma_load_3d_pair(smem_addr(s.scales[stage][1]), in.b_low_scales, x, task.col / MK_SCALE_ATOM_ROWS, in.b_depth, leading_full);
    tma_load_3d_pair(smem_addr(s.scales[stage][2]), in.b_high_scales, x, (task.col + in.b_high_row) / MK_SCALE_ATOM_ROWS, in.b_depth, leading_full);
}

/* This CTA's share of K block k. The leading CTA's barrier counts both shares. */
template <class Tile, class Input> MK_DEVICE void load_pair_stage(GemmShared<Tile> &s, uint32_t stage, const GemmTask &task, const Input &in, int32_t k)
{
    const uint32_t full = smem_addr(&s.full[stage]), leading_full = cluster_addr(full, 0);
    bool scaled = false;
    if constexpr (Tile::scaled)
        scaled = in.a_scales != nullptr;
    const int32_t x = k * (int32_t)block_depth(scaled);
    if (cluster_rank() == 0)
        mbar_arrive_expect_tx_release_cta(full, scaled ? 2 * (kPairStageBytes + kStageScaleBytes) : 2 * kPairStageBytes);
    if constexpr (Tile::scaled)
        if (scaled)
            load_scales(s, stage, task, in, k, leading_full);
    tma_load_2d_pair(smem_addr(s.a[stage]), in.a, x, task.row, leading_full);
    if (cluster_rank() == 0)
        tma_load_3d_pair(smem_addr(s.b[stage]), in.b_low, x, task.col, in.b_depth, leading_full);
    else
        tma_load_3d_pair(smem_addr(s.b[stage]), in.b_high, x, task.col + in.b_high_row, in.b_depth, leading_full);
}

/* ---- mma ---- */

/* An operand of which the contraction axis is contiguous, or the other one: bf16 in boxes of 64 x 64, one after the other; e4m3 in one of 128 x 128. */
MK_DEVICE uint64_t pair_operand(uint32_t addr, bool outer)
{
    return outer ? mk_smem_descriptor_sm100(addr, kBoxBytes, 1024, MK_SMEM_SWIZZLE_128B) : mk_operand_sm100(addr);
}
/* From one step (of 32 bytes: 16 bf16 or 32 e4m3) to the next, in the descriptor's units. */
MK_DEVICE uint64_t pair_next_step(bool outer, uint32_t depth) { return (outer ? depth * kRowBytes : 32) >> 4; }

/* One K block: four steps of 16, ascending. */
template <class Tile> MK_DEVICE void multiply_pair_stage(GemmShared<Tile> &s, uint32_t stage, uint32_t sums, const PairRecipe &how, bool accumulate)
{
    const uint64_t a = pair_operand(smem_addr(s.a[stage]), how.a_outer), b = pair_operand(smem_addr(s.b[stage]), how.b_outer);
    const uint32_t instruction = mk_mma_descriptor_bf16(2 * Tile::rows, Tile::cols, how.a_outer, how.b_outer);
    MK_UNROLL for (uint32_t step = 0; step < kBlockK / 16; step++)
        tcgen05_mma_pair_bf16(sums, a + step * pair_next_step(how.a_outer, 16), b + step * pair_next_step(how.b_outer, 16), instruction, accumulate || step > 0);
}

/* The same of MXFP8: the block's scales, then four steps of 32, each with its own byte of the scales' cells. Copies and MMAs of one thread happen in the
 * order of their issue, so one place for scales is enough. */
template <class Tile> MK_DEVICE void multiply_scaled_stage(GemmShared<Tile> &s, uint32_t stage, uint32_t sums, uint32_t scales, const PairRecipe &how, bool accumulate)
{
    const uint64_t a = pair_operand(smem_addr(s.a[stage]), how.a_outer), b = pair_operand(smem_addr(s.b[stage]), how.b_outer);
    MK_UNROLL for (uint32_t i = 0; i < kScaleAtoms; i++)
        tcgen05_copy_scales_pair(scales + i * MK_SCALE_ATOM_COLUMNS, mk_scale_descriptor_sm100(smem_addr(s.scales[stage][i])));
    MK_UNROLL for (uint32_t step = 0; step < kRowBytes / 32; step++)
        tcgen05_mma_pair_mx(sums, a + step * pair_next_step(how.a_outer, 32), b + step * pair_next_step(how.b_outer, 32),
                            mk_mma_descriptor_mx(2 * Tile::rows, Tile::cols, how.a_outer, how.b_outer, MK_MMA_E4M3, MK_MMA_E4M3, step, step), scales,
                            scales + MK_SCALE_ATOM_COLUMNS, accumulate || step > 0);
}

/* The leading CTA's side of zero_tail: both CTAs' math warps are told that the block is there, and waited for. Release and acquire at cluster scope:
 * they write shared memory, which the MMAs of the pair read (through their proxy fence). */
template <class Tile> MK_DEVICE void have_tail_zeroed(GemmShared<Tile> &s, uint32_t turn, uint32_t parity)
{
    for (uint32_t rank = 0; rank < Tile::cluster; rank++)
        mbar_arrive_remote_release_cluster(cluster_addr(smem_addr(&s.tail_landed[turn]), rank));
    wait_mbar_cluster(smem_addr(&s.tail_zeroed[turn]), parity, "gemm_mma: the last block's missing rows are zeros");
}

/* The mma role: one thread of the leading CTA. Its commits tell both CTAs that a stage is free, and that sums are complete. */
template <class Tile, class Tasks> MK_DEVICE void pair_mma(GemmShared<Tile> &s, const Tasks &of)
{
    TaskReader<Tile> tasks;
    RingCursor<Tile::stages> at;
    RingCursor<kMathWarpgroups> turn;
    uint32_t tails = 0; /* bit g: parity of warpgroup g's next tail */
    const uint32_t tensor_memory = load(&s.tensor_memory);
    for (;; tasks.at.next(), turn.next()) {
        const GemmTask task = tasks.wait(s);
        tasks.release(s);
        if (task.num_k_blocks == 0)
            return;
        const PairRecipe how = of.recipe(task);
        wait_mbar_cluster(smem_addr(&s.sums_ready[turn.slot]), turn.parity, "gemm_mma: free accumulators");
        for (int32_t k = 0; k < task.num_k_blocks; k++, at.next()) {
            wait_mbar_cluster(smem_addr(&s.full[at.slot]), at.parity, "gemm_mma: full stage");
            if (k == task.num_k_blocks - 1 && how.missing_rows) {
                have_tail_zeroed(s, turn.slot, tails >> turn.slot & 1);
                tails ^= 1u << turn.slot;
            }
            tcgen05_fence_after_sync(); /* of the loads' and, at first, of the math warps' arrival */
            const uint32_t sums = tensor_memory + turn.slot * kSumsApart<Tile>;
            const bool accumulate = k > 0 || how.continues;
            if constexpr (Tile::scaled)
                if (how.scaled)
                    multiply_scaled_stage(s, at.slot, sums, tensor_memory + kFirstScaleColumn<Tile>, how, accumulate);
            if (!Tile::scaled || !how.scaled)
                multiply_pair_stage(s, at.slot, sums, how, accumulate);
            tcgen05_commit_pair(smem_addr(&s.empty[at.slot]), kBothCtas);
        }
        tcgen05_commit_pair(smem_addr(&s.sums_full[turn.slot]), kBothCtas);
    }
}

/* ---- math ---- */

/* Scales of blocks without a row that exists: not NaN. A thread has a row's cell of each atom. */
template <class Tile> MK_DEVICE void zero_tail_scales(GemmShared<Tile> &s, uint32_t stage, uint32_t rows)
{
    static_assert(MK_SCALE_ATOM_BYTES == 128 * MK_SCALE_ATOM_BLOCKS, "a cell for each thread of a warpgroup");
    for (uint32_t atom = 0; atom < kScaleAtoms; atom++)
        for (uint32_t block = (rows + 31) / 32; block < MK_SCALE_ATOM_BLOCKS; block++)
            store(&s.scales[stage][atom][thread_idx() % 128 * MK_SCALE_ATOM_BLOCKS + block], (uint8_t)0);
}

/* This CTA's share of the last K block, its rows that do not exist: zeros in both operands, because 0 times what lies there may be NaN. Rows are the
 * contraction axis: all 128 of e4m3, or 64 of bf16 twice. A warpgroup, before its MMAs. */
template <class Tile> MK_DEVICE void zero_tail(GemmShared<Tile> &s, uint32_t stage, const PairRecipe &how)
{
    const uint32_t depth = block_depth(how.scaled), rows = depth - how.missing_rows;
    static_assert(Tile::cols / 2 == Tile::rows, "as many rows of B as of A");
    for (uint32_t i = thread_idx() % 128; i < how.missing_rows * 8; i += 128)
        for (uint32_t first = rows; first < Tile::rows; first += depth) {
            store_shared_b128(smem_addr(s.a[stage]) + first * kRowBytes + i * 16, {0, 0, 0, 0});
            store_shared_b128(smem_addr(s.b[stage]) + first * kRowBytes + i * 16, {0, 0, 0, 0});
        }
    if constexpr (Tile::scaled)
        if (how.scaled)
            zero_tail_scales(s, stage, rows);
    fence_proxy_async_shared_cta(); /* plain stores, read by MMAs */
}

/* A math warp has read what a warpgroup's next MMAs overwrite, or put in what they continue. Of memory they see nothing, so the cheap arrive is enough. */
template <class Tile> MK_DEVICE void give_up_columns(GemmShared<Tile> &s, uint32_t to_warpgroup)
{
    tcgen05_fence_before_sync();
    sync_warp();
    if (lane_idx() == 0)
        mbar_arrive_remote_release_cta(cluster_addr(smem_addr(&s.sums_ready[to_warpgroup]), 0));
}

/* With scales: the columns that the other warpgroup's sums share with this one's are read. */
template <class Tile> MK_DEVICE void give_up_shared_columns(GemmShared<Tile> &s, uint32_t to_warpgroup)
{
    give_up_columns(s, to_warpgroup);
    if (lane_idx() == 0)
        mbar_arrive_release_cta(smem_addr(&s.columns_taken[to_warpgroup]));
}

template <class Tile, class Epilogue, class Tasks> MK_DEVICE void pair_math(GemmShared<Tile> &s, uint32_t warpgroup, Epilogue &epilogue, const Tasks &of)
{
    const uint32_t warp = warp_idx() - kFirstMathWarp, first_lane = warp % 4 * 32;
    const WarpOut out = {smem_addr(s.staging[warp]), first_lane};
    TaskReader<Tile> tasks;
    RingCursor<Tile::stages> at;
    RingCursor<kMathWarpgroups> turn;
    uint32_t tails = 0; /* parity of the next */
    uint32_t number = 0;
    Acc<Tile> acc;
    acc.address = load(&s.tensor_memory) + mk_tmem_address(first_lane, warpgroup * kSumsApart<Tile>);
    if constexpr (Tile::scaled) {
        acc.second = warpgroup == 1;
        if (acc.second)
            give_up_shared_columns(s, 0); /* nothing is there yet */
    }
    for (;; tasks.at.next(), turn.next(), number++) {
        const GemmTask task = tasks.wait(s);
        const bool mine = turn.slot == warpgroup && task.num_k_blocks != 0;
        if (mine)
            of.see(tasks.at.slot, tasks.at.parity);
        sync_warp();
        if (lane_idx() == 0)
            tasks.release(s);
        if (task.num_k_blocks == 0)
            return;
        at.skip((uint32_t)task.num_k_blocks);
        if (!mine)
            continue;
        const PairRecipe how = of.recipe(task);
        if (how.continues) {
            if constexpr (Tile::scaled) { /* all columns are written, the shared ones too: these tasks do not begin under the other warpgroup's MMAs */
                wait_mbar(smem_addr(&s.columns_taken[warpgroup]), turn.parity, "gemm_math: shared columns");
                tcgen05_fence_after_sync();
            }
            of.begin(task, acc, out);
            tmem_wait_store();
        }
        give_up_columns(s, warpgroup);
        note_task(epilogue, number, TRACE_PRODUCT_BEGINS);
        if (!only_helps(task)) {
            of.meanwhile(task, out);
            before_task(epilogue, task, out);
        }
        if (how.missing_rows) {
            wait_mbar_cluster(smem_addr(&s.tail_landed[warpgroup]), tails, "gemm_math: last block of a task");
            tails ^= 1;
            zero_tail(s, (at.slot + Tile::stages - 1) % Tile::stages, how);
            sync_warp();
            if (lane_idx() == 0)
                mbar_arrive_remote_release_cluster(cluster_addr(smem_addr(&s.tail_zeroed[warpgroup]), 0));
        }
        wait_mbar_cluster(smem_addr(&s.sums_full[warpgroup]), turn.parity, "gemm_math: finished sums");
        tcgen05_fence_after_sync();
        if constexpr (Tile::scaled) {
            acc.take_shared();
            give_up_shared_columns(s, warpgroup ^ 1);
        }
        note_task(epilogue, number, TRACE_EPILOGUE_BEGINS);
        if (!only_helps(task))
            epilogue(task, acc, out);
        note_task(epilogue, number, TRACE_EPILOGUE_ENDS);
    }
}

/* ---- tensor memory, all of it, by warp 1 of both CTAs: before the barrier of the cluster that begins a kernel, and after the one that ends it ---- */

template <class Tile> MK_DEVICE void pair_allocate(GemmShared<Tile> &s)
{
    tmem_allocate_pair<MK_TMEM_COLUMNS>(smem_addr(&s.tensor_memory));
    tmem_relinquish_pair();
    tcgen05_fence_before_sync();
}

template <class Tile> MK_DEVICE void pair_release(GemmShared<Tile> &s) { tmem_release_pair<MK_TMEM_COLUMNS>(load(&s.tensor_memory)); }

} /* namespace mk */
#endif
