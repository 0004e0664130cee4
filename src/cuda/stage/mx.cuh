/* MXFP8 on a GPU: quantises and widens rows and matrices with the functions of mx/mx.h, so that bits are the CPU's. Bound by memory:
 * a thread moves 16 bytes of bf16 at a time, four threads share a block of 32. */
#ifndef MK_STAGE_MX_CUH
#define MK_STAGE_MX_CUH

#include "cuda/arch/arch.cuh"
#include "cuda/kernel/mx_params.h"

namespace mk {

struct alignas(8) MxElements8 { uint32_t low, high; }; /* eight e4m3 */

/* ---- eight numbers in registers ----
 * Usually all are finite and a few instructions do two at once; what they do not hold for goes one by one through mx/mx.h, in rolled
 * loops: they cost neither time nor registers where nobody comes. */
MK_DEVICE uint16_t mx_number(const Vec4 &v, int i)
{
    const uint32_t word = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
    return (uint16_t)(word >> 16 * (i & 1));
}

/* The last number leaves at the top, or all move up by one and `next` becomes the first. */
MK_DEVICE Vec4 mx_push(const Vec4 &v, uint32_t next) { return {v.x << 16 | next, v.y << 16 | v.x >> 16, v.z << 16 | v.y >> 16, v.w << 16 | v.z >> 16}; }
MK_DEVICE uint16_t mx_last(const Vec4 &v) { return (uint16_t)(v.w >> 16); }

/* The largest |x|, NaN and infinities too: from 0x7f80 on there are some. */
MK_DEVICE uint32_t mx_sizes(uint32_t pair) { return pair & 0x7fff7fff; }
MK_DEVICE uint16_t mx_largest8(const Vec4 &v)
{
    const uint32_t two = max_u16x2(max_u16x2(mx_sizes(v.x), mx_sizes(v.y)), max_u16x2(mx_sizes(v.z), mx_sizes(v.w)));
    return (uint16_t)max_u16x2(two, two >> 16);
}
MK_DEVICE bool mx_all_finite8(const Vec4 &v) { return mk_mx_is_finite(mx_largest8(v)); }

MK_DEVICE uint16_t mx_amax8(const Vec4 &v)
{
    if (mx_all_finite8(v))
        return mx_largest8(v);
    uint16_t amax = 0;
    Vec4 left = v;
    MK_ROLLED for (int i = 0; i < 8; i++, left = mx_push(left, 0))
        amax = mk_mx_amax(amax, mx_last(left));
    return amax;
}

/* 1 / scale of mk_mx_scale, as mk_mx_encode multiplies with. */
MK_DEVICE float mx_reciprocal(uint32_t scale) { return bits_to_float((254 - scale) << 23); }

/* Two finite numbers, each with its 1 / scale: two e4m3. */
MK_DEVICE uint32_t mx_encode2(uint32_t pair, float low, float high) { return pack_e4m3(bits_to_float(pair << 16) * low, bits_to_float(pair & 0xffff0000u) * high); }

MK_DEVICE MxElements8 mx_encode8_finite(const Vec4 &v, uint8_t scale)
{
    const float r = mx_reciprocal(scale);
    return {mx_encode2(v.x, r, r) | mx_encode2(v.y, r, r) << 16, mx_encode2(v.z, r, r) | mx_encode2(v.w, r, r) << 16};
}

/* scale: of mk_mx_scale. */
MK_DEVICE MxElements8 mx_encode8(const Vec4 &v, uint8_t scale)
{
    if (mx_all_finite8(v))
        return mx_encode8_finite(v, scale);
    MxElements8 e = {0, 0};
    Vec4 left = v;
    MK_ROLLED for (int i = 0; i < 8; i++, left = mx_push(left, 0))
        e = {e.low << 8 | mk_mx_encode(mx_last(left), scale), e.high << 8 | e.low >> 24};
    return e;
}

/* An e4m3's seven bits, four places up, are a bf16's: of the number times 2^-120, subnormals included. One exact product brings back 2^120 and
 * the scale, as long as both together are a power of two that bf16 has: for scales up to 2^7, blocks up to 57,344. */
enum { MX_SCALE_ONE_FACTOR = 127 + 7 };
MK_DEVICE uint32_t mx_factor(uint32_t scale) { return (scale + 120) << 7; }
MK_DEVICE bool mx_has_factor(uint32_t scale) { return scale - MK_MX_SCALE_MIN <= MX_SCALE_ONE_FACTOR - MK_MX_SCALE_MIN; }

/* Two of four elements, numbers all, each times its factor. `which`: permute_bytes's selector of their bytes, each with its sign above it. */
enum { MX_FIRST_TWO = 0x9180, MX_LAST_TWO = 0xb3a2 };
MK_DEVICE uint32_t mx_widen2(uint32_t elements, uint32_t which, uint32_t factors)
{
    return multiply_bf16x2(permute_bytes(elements, which) << 4 & 0x87f087f0, factors);
}

MK_DEVICE Vec4 mx_widen8_numbers(const MxElements8 &e, uint8_t scale)
{
    const uint32_t factors = mx_factor(scale) * 0x10001;
    return {mx_widen2(e.low, MX_FIRST_TWO, factors), mx_widen2(e.low, MX_LAST_TWO, factors), mx_widen2(e.high, MX_FIRST_TWO, factors),
            mx_widen2(e.high, MX_LAST_TWO, factors)};
}

/* As mk_mx_widen: any element, any scale. */
MK_DEVICE Vec4 mx_widen8(const MxElements8 &e, uint8_t scale)
{
    const uint32_t is_nan = (((e.low & 0x7f7f7f7f) + 0x01010101) | ((e.high & 0x7f7f7f7f) + 0x01010101)) & 0x80808080; /* 0x7f carries */
    if (!is_nan && mx_has_factor(scale))
        return mx_widen8_numbers(e, scale);
    Vec4 v = {0, 0, 0, 0};
    MxElements8 left = e;
    MK_ROLLED for (int i = 0; i < 8; i++, left = {left.low << 8, left.high << 8 | left.low >> 24})
        v = mx_push(v, mk_mx_widen((uint8_t)(left.high >> 24), scale));
    return v;
}

/* The scale of a block of 32: eight numbers of each of four neighbouring lanes. By all lanes of a warp. */
MK_DEVICE uint8_t mx_block_scale(const Vec4 &v)
{
    uint32_t amax = mx_amax8(v);
    MK_UNROLL for (uint32_t mask = 1; mask < 4; mask *= 2) {
        const uint32_t other = shuffle_xor(amax, mask);
        amax = other > amax ? other : amax;
    }
    return mk_mx_scale((uint16_t)amax);
}

/* Quantised and widened again, along the columns: the lane's eight numbers of a block. By all lanes of a warp. */
MK_DEVICE Vec4 mx_round8(const Vec4 &v)
{
    const uint8_t scale = mx_block_scale(v);
    if (mx_all_finite8(v) && mx_has_factor(scale))
        return mx_widen8_numbers(mx_encode8_finite(v, scale), scale);
    return mx_widen8(mx_encode8(v, scale), scale);
}

/* Usually there are none, so nothing is added up across threads. */
MK_DEVICE void mx_count_not_finite(uint64_t *counter, const Vec4 &v)
{
    uint32_t count = 0;
    if (mx_all_finite8(v) || !counter)
        return;
    Vec4 left = v;
    MK_ROLLED for (int i = 0; i < 8; i++, left = mx_push(left, 0))
        count += !mk_mx_is_finite(mx_last(left));
    counter_add_relaxed_gpu(counter, (uint64_t)count);
}

/* One column of mx_round_columns8, whatever is in it. */
MK_DEVICE void mx_round_column(const uint16_t *from, int64_t stride, int32_t rows, uint16_t *to, int64_t to_stride)
{
    uint16_t amax = 0;
    MK_ROLLED for (int32_t r = 0; r < rows; r++)
        amax = mk_mx_amax(amax, load(from + r * stride));
    const uint8_t scale = mk_mx_scale(amax);
    MK_ROLLED for (int32_t r = 0; r < rows; r++)
        store(to + r * to_stride, mk_mx_widen(mk_mx_encode(load(from + r * stride), scale), scale));
}

/* Eight columns of rows in bf16. */
struct MxColumns8 {
    const uint16_t *from;
    int64_t stride;
    MK_MEMBER Vec4 operator()(int32_t row) const { return load(reinterpret_cast<const Vec4 *>(from + row * stride)); }
};

/* The largest |x| of each column, NaN and infinities too. */
template <class RowAt> MK_DEVICE Vec4 mx_largest_down(const RowAt &row_at, int32_t rows)
{
    Vec4 largest = {0, 0, 0, 0};
    MK_UNROLL_4 for (int32_t r = 0; r < rows; r++) {
        const Vec4 v = row_at(r);
        largest = {max_u16x2(largest.x, mx_sizes(v.x)), max_u16x2(largest.y, mx_sizes(v.y)), max_u16x2(largest.z, mx_sizes(v.z)), max_u16x2(largest.w, mx_sizes(v.w))};
    }
    return largest;
}

/* One column of mx_quantise_columns8, whatever is in it. */
template <class RowAt> MK_DEVICE uint8_t mx_quantise_column_of(const RowAt &row_at, int i, int32_t rows, uint8_t *to, int64_t to_stride)
{
    uint16_t amax = 0;
    MK_ROLLED for (int32_t r = 0; r < rows; r++)
        amax = mk_mx_amax(amax, mx_number(row_at(r), i));
    const uint8_t scale = mk_mx_scale(amax);
    MK_ROLLED for (int32_t r = 0; r < rows; r++)
        store(to + r * to_stride + i, mk_mx_encode(mx_number(row_at(r), i), scale));
    return scale;
}

/* Eight columns of up to 32 rows, row_at(r) each, quantised down the rows: elements as they lie, and put_scale(i, scale) of column i. Rows from `rows` on
 * count as zeros and are not written. Read twice, as by mx_round_columns8. */
template <class RowAt, class PutScale> MK_DEVICE void mx_quantise_columns8(const RowAt &row_at, int32_t rows, uint8_t *to, int64_t to_stride, const PutScale &put_scale)
{
    const Vec4 largest = mx_largest_down(row_at, rows);
    if (!mx_all_finite8(largest)) {
        MK_ROLLED for (int i = 0; i < 8; i++)
            put_scale(i, mx_quantise_column_of(row_at, i, rows, to, to_stride));
        return;
    }
    float r[8];
    MK_UNROLL for (int i = 0; i < 8; i++) {
        const uint8_t scale = mk_mx_scale(mx_number(largest, i));
        put_scale(i, scale);
        r[i] = mx_reciprocal(scale);
    }
    MK_UNROLL_4 for (int32_t row = 0; row < rows; row++) {
        const Vec4 v = row_at(row);
        store(reinterpret_cast<MxElements8 *>(to + row * to_stride), MxElements8{mx_encode2(v.x, r[0], r[1]) | mx_encode2(v.y, r[2], r[3]) << 16,
                                                                                 mx_encode2(v.z, r[4], r[5]) | mx_encode2(v.w, r[6], r[7]) << 16});
    }
}

/* Eight columns of up to 32 rows, quantised down the rows and widened again; rows from `rows` on count as zeros and are not written. In place
 * if to == from. Read twice: 32 rows of registers would be too many, and the second time they come from a cache. */
MK_DEVICE void mx_round_columns8(const uint16_t *from, int64_t stride, int32_t rows, uint16_t *to, int64_t to_stride)
{
    const Vec4 largest = mx_largest_down(MxColumns8{from, stride}, rows);
    if (!mx_has_factor(mk_mx_scale(mx_largest8(largest))) || !mx_all_finite8(largest)) {
        MK_ROLLED for (int i = 0; i < 8; i++)
            mx_round_column(from + i, stride, rows, to + i, to_stride);
        return;
    }
    float reciprocal[8];
    uint32_t factors[4];
    MK_UNROLL for (int i = 0; i < 8; i++) {
        const uint32_t scale = mk_mx_scale(mx_number(largest, i));
        reciprocal[i] = mx_reciprocal(scale);
        factors[i / 2] = i % 2 ? factors[i / 2] | mx_factor(scale) << 16 : mx_factor(scale);
    }
    MK_UNROLL_4 for (int32_t r = 0; r < rows; r++) {
        const Vec4 v = load(reinterpret_cast<const Vec4 *>(from + r * stride));
        const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
        uint32_t word[4];
        MK_UNROLL for (int i = 0; i < 4; i++)
            word[i] = mx_widen2(mx_encode2(pair[i], reciprocal[2 * i], reciprocal[2 * i + 1]), MX_FIRST_TWO, factors[i]);
        store(reinterpret_cast<Vec4 *>(to + r * to_stride), Vec4{word[0], word[1], word[2], word[3]});
    }
}

/* ---- rows ---- */
/* One warp, one row of `cols` numbers: elements to `data`, the scale of block b to scale_at(b). */
template <class ScaleAt> MK_DEVICE void mx_quantise_row(const uint16_t *from, int64_t cols, uint8_t *data, uint64_t *not_finite, const ScaleAt &scale_at)
{
    const uint32_t lane = lane_idx();
    for (int64_t first = 0; first < cols; first += 256) {
        const int64_t col = first + lane * 8;
        const bool here = col < cols;
        const Vec4 v = here ? load(reinterpret_cast<const Vec4 *>(from + col)) : Vec4{0, 0, 0, 0};
        const uint8_t scale = mx_block_scale(v);
        if (!here)
            continue;
        store(reinterpret_cast<MxElements8 *>(data + col), mx_encode8(v, scale));
        if (lane % 4 == 0)
            store(scale_at(col / MK_MX_BLOCK), scale);
        mx_count_not_finite(not_finite, v);
    }
}

/* All warps of the grid: row by row. */
MK_DEVICE void mx_quantise_rows(const mk_mx_rows_params &p, int64_t warp, int64_t num_warps)
{
    for (int64_t r = warp; r < p.num_rows; r += num_warps) {
        uint8_t *to = static_cast<uint8_t *>(p.rows) + r * mk_mx_row_stride(p.cols);
        mx_quantise_row(static_cast<const uint16_t *>(p.bf16) + r * p.cols, p.cols, to, p.not_finite, [&](int64_t block) { return to + p.cols + block; });
    }
}

MK_DEVICE void mx_widen_rows(const mk_mx_rows_params &p, int64_t warp, int64_t num_warps)
{
    for (int64_t r = warp; r < p.num_rows; r += num_warps) {
        const uint8_t *from = static_cast<const uint8_t *>(p.rows) + r * mk_mx_row_stride(p.cols);
        uint16_t *to = static_cast<uint16_t *>(p.bf16) + r * p.cols;
        for (int64_t col = lane_idx() * 8; col < p.cols; col += 256)
            store(reinterpret_cast<Vec4 *>(to + col), mx_widen8(load(reinterpret_cast<const MxElements8 *>(from + col)), load(from + p.cols + col / MK_MX_BLOCK)));
    }
}

/* ---- matrices: scales in tiles ---- */
/* By pointer: can matrix m be read? A pass tells of it (stage/weights.cuh), and its results are void. */
MK_DEVICE bool mx_is_there(const void *const *experts, int64_t m)
{
    const uintptr_t address = experts ? reinterpret_cast<uintptr_t>(load(&experts[m])) : 16;
    return address && address % 16 == 0;
}

/* Where the rows of matrix m begin. */
MK_DEVICE const uint16_t *mx_matrix_rows(const mk_mx_matrix_params &p, int64_t m)
{
    return p.experts ? static_cast<const uint16_t *>(load(&p.experts[m])) + p.experts_offset : static_cast<const uint16_t *>(p.bf16) + m * p.matrix_elements;
}

/* Rows that only fill a tile have the scale of zeros, and so have columns. */
MK_DEVICE void mx_quantise_matrix(const mk_mx_matrix_params &p, int64_t warp, int64_t num_warps)
{
    const int64_t padded = mk_round_up(p.rows, MK_MX_TILE), blocks = p.cols / MK_MX_BLOCK, padded_blocks = mk_ceil_div(p.cols, MK_MX_TILE) * 4;
    for (int64_t i = warp; i < p.count * padded; i += num_warps) {
        const int64_t m = i / padded, r = i % padded;
        if (!mx_is_there(p.experts, m))
            continue;
        uint8_t *scales = static_cast<uint8_t *>(p.scales) + m * mk_mx_scale_bytes(p.rows, p.cols);
        if (r < p.rows)
            mx_quantise_row(mx_matrix_rows(p, m) + r * p.row_stride, p.cols, static_cast<uint8_t *>(p.data) + (m * p.rows + r) * p.cols,
                            p.not_finite, [&](int64_t block) { return scales + mk_mx_scale_index(r, block, p.cols); });
        for (int64_t b = (r < p.rows ? blocks : 0) + lane_idx(); b < padded_blocks; b += 32)
            store(scales + mk_mx_scale_index(r, b, p.cols), (uint8_t)MK_MX_SCALE_MIN);
    }
}

/* All warps of the grid: row by row. What only fills a tile has the scale of zeros. */
MK_DEVICE void mx_take_part(const mk_mx_part_params &p, int64_t warp, int64_t num_warps)
{
    const int64_t padded = mk_round_up(p.rows, MK_MX_TILE), blocks = p.cols / MK_MX_BLOCK, padded_blocks = mk_ceil_div(p.cols, MK_MX_TILE) * 4;
    for (int64_t i = warp; i < p.count * padded; i += num_warps) {
        const int64_t m = i / padded, r = i % padded, row = p.first_row + r;
        const uint8_t *from = static_cast<const uint8_t *>(p.source) + (m * p.stored_rows + row) * p.stored_cols + p.first_col;
        const uint8_t *from_scales = static_cast<const uint8_t *>(p.source_scales) + m * mk_mx_scale_bytes(p.stored_rows, p.stored_cols);
        uint8_t *to = static_cast<uint8_t *>(p.data) + (m * p.rows + r) * p.cols, *scales = static_cast<uint8_t *>(p.scales) + m * mk_mx_scale_bytes(p.rows, p.cols);
        for (int64_t col = lane_idx() * 16; r < p.rows && col < p.cols; col += 512)
            store(reinterpret_cast<Vec4 *>(to + col), load(reinterpret_cast<const Vec4 *>(from + col)));
        for (int64_t b = lane_idx(); b < padded_blocks; b += 32) {
            uint8_t scale = MK_MX_SCALE_MIN;
            if (r < p.rows && b < blocks)
                scale = load(from_scales + mk_mx_scale_index(row, p.first_col / MK_MX_BLOCK + b, p.stored_cols));
            store(scales + mk_mx_scale_index(r, b, p.cols), scale);
        }
    }
}

MK_DEVICE void mx_widen_matrix(const mk_mx_matrix_params &p, int64_t warp, int64_t num_warps)
{
    for (int64_t i = warp; i < p.count * p.rows; i += num_warps) {
        const int64_t m = i / p.rows, r = i % p.rows;
        const uint8_t *scales = static_cast<const uint8_t *>(p.scales) + m * mk_mx_scale_bytes(p.rows, p.cols);
        const uint8_t *from = static_cast<const uint8_t *>(p.data) + i * p.cols;
        uint16_t *to = static_cast<uint16_t *>(p.bf16) + i * p.cols;
        for (int64_t col = lane_idx() * 8; col < p.cols; col += 256)
            store(reinterpret_cast<Vec4 *>(to + col), mx_widen8(load(reinterpret_cast<const MxElements8 *>(from + col)),
                                                            load(scales + mk_mx_scale_index(r, col / MK_MX_BLOCK, p.cols))));
    }
}

/* ---- the transpose ---- */
struct MxTurnedShared {
    uint16_t tile[MK_MX_TURNED_ROWS][MK_MX_TURNED_COLS];
};
static_assert(sizeof(MxTurnedShared) == MK_MX_TURNED_SHARED, "what the host asks for");

/* A tile of the source, zeros outside the matrix. */
MK_DEVICE void mx_load_tile(const mk_mx_matrix_params &p, int64_t matrix, int64_t row, int64_t col, MxTurnedShared &s)
{
    constexpr int kPieces = MK_MX_TURNED_COLS / 8;
    MK_UNROLL for (int i = 0; i < MK_MX_TURNED_ROWS * kPieces / 256; i++) {
        const int piece = (int)thread_idx() + i * 256, r = piece / kPieces, c = piece % kPieces * 8;
        const bool there = row + r < p.rows && col + c < p.cols;
        const uint16_t *from = mx_matrix_rows(p, matrix) + (row + r) * p.row_stride + col + c;
        const Vec4 v = there ? load(reinterpret_cast<const Vec4 *>(from)) : Vec4{0, 0, 0, 0};
        store_shared_b128(smem_addr(&s.tile[r][c]), v);
        mx_count_not_finite(p.not_finite, v);
    }
}

/* One thread, one block: 32 rows of a column, neighbouring threads neighbouring columns (no bank is met twice). Its elements are 32 bytes of
 * the transpose's row: a whole sector. */
MK_DEVICE void mx_quantise_column(const MxTurnedShared &s, uint32_t c, uint32_t first, uint8_t *data, uint8_t *scale_at, bool there)
{
    uint16_t amax = 0;
    MK_UNROLL for (int i = 0; i < MK_MX_BLOCK; i++)
        amax = mk_mx_amax(amax, load(&s.tile[first + i][c]));
    const uint8_t scale = mk_mx_scale(amax);
    store(scale_at, there ? scale : (uint8_t)MK_MX_SCALE_MIN);
    if (!there)
        return;
    MK_UNROLL for (int half = 0; half < 2; half++) {
        uint32_t word[4] = {0, 0, 0, 0};
        MK_UNROLL for (int i = 0; i < 16; i++)
            word[i / 4] |= (uint32_t)mk_mx_encode(load(&s.tile[first + half * 16 + i][c]), scale) << 8 * (i & 3);
        store(reinterpret_cast<Vec4 *>(data) + half, Vec4{word[0], word[1], word[2], word[3]});
    }
}

/* A CTA takes tile after tile of the padded source. */
MK_DEVICE void mx_quantise_turned(const mk_mx_matrix_params &p, MxTurnedShared &s)
{
    const int64_t across = mk_ceil_div(p.cols, MK_MX_TILE) * (MK_MX_TILE / MK_MX_TURNED_COLS), down = mk_ceil_div(p.rows, MK_MX_TURNED_ROWS);
    for (int64_t i = block_idx(); i < p.count * down * across; i += num_blocks()) {
        const int64_t m = i / (down * across), row = i / across % down * MK_MX_TURNED_ROWS, col = i % across * MK_MX_TURNED_COLS;
        if (!mx_is_there(p.experts, m))
            continue;
        mx_load_tile(p, m, row, col, s);
        barrier_block_sync();
        const uint32_t c = thread_idx() % MK_MX_TURNED_COLS, first = thread_idx() / MK_MX_TURNED_COLS * MK_MX_BLOCK;
        const int64_t turned_row = col + c, turned_col = row + first;
        uint8_t *scales = static_cast<uint8_t *>(p.scales) + m * mk_mx_scale_bytes(p.cols, p.rows);
        uint8_t *data = static_cast<uint8_t *>(p.data) + (m * p.cols + turned_row) * p.rows + turned_col;
        mx_quantise_column(s, c, first, data, scales + mk_mx_scale_index(turned_row, turned_col / MK_MX_BLOCK, p.rows),
                        turned_row < p.cols && turned_col < p.rows);
        barrier_block_sync(); /* before the next tile is loaded over this one */
    }
}

/* ---- weights of a layer, widened ---- */

/* Where the rows wanted of matrix m begin, in bf16. */
MK_DEVICE const uint16_t *mx_weight_rows(const mk_mx_weight_params &p, int64_t m)
{
    return (p.experts ? static_cast<const uint16_t *>(load(&p.experts[m])) : static_cast<const uint16_t *>(p.source) + m * p.matrix_elements) + p.offset;
}

/* Rows as they lie, blocks along the columns: a warp for each. */
MK_DEVICE void mx_round_weight_row(const mk_mx_weight_params &p, int64_t m, int64_t r)
{
    const uint16_t *from = mx_weight_rows(p, m) + r * p.row_stride;
    uint16_t *to = p.wide + (m * p.rows + r) * p.cols;
    for (int64_t first = 0; first < p.cols; first += 256) {
        const int64_t col = first + lane_idx() * 8;
        const bool here = col < p.cols;
        const Vec4 v = mx_round8(here ? load(reinterpret_cast<const Vec4 *>(from + col)) : Vec4{0, 0, 0, 0});
        if (here)
            store(reinterpret_cast<Vec4 *>(to + col), v);
    }
}

/* 32 rows, blocks down them: a warp, a lane for eight columns. */
MK_DEVICE void mx_round_weight_block(const mk_mx_weight_params &p, int64_t m, int64_t block)
{
    const uint16_t *from = mx_weight_rows(p, m) + block * MK_MX_BLOCK * p.row_stride;
    for (int64_t col = lane_idx() * 8; col < p.cols; col += 256)
        mx_round_columns8(from + col, p.row_stride, MK_MX_BLOCK, p.wide + (m * p.rows + block * MK_MX_BLOCK) * p.cols + col, p.cols);
}

/* Rows of a quantised matrix, blocks along the columns: a warp for each. */
MK_DEVICE void mx_widen_weight_row(const mk_mx_weight_params &p, int64_t m, int64_t r)
{
    const int64_t row = p.first_row + r;
    const uint8_t *scales = static_cast<const uint8_t *>(p.scales) + m * mk_mx_scale_bytes(p.stored_rows, p.cols);
    const uint8_t *from = static_cast<const uint8_t *>(p.source) + (m * p.stored_rows + row) * p.cols;
    uint16_t *to = p.wide + (m * p.rows + r) * p.cols;
    for (int64_t col = lane_idx() * 8; col < p.cols; col += 256)
        store(reinterpret_cast<Vec4 *>(to + col), mx_widen8(load(reinterpret_cast<const MxElements8 *>(from + col)),
                                                           load(scales + mk_mx_scale_index(row, col / MK_MX_BLOCK, p.cols))));
}

/* The quantised transpose [cols, stored_rows], blocks along the stored rows, turned back: 32 rows of a column by a lane, neighbouring lanes
 * neighbouring columns. */
MK_DEVICE void mx_widen_turned_block(const mk_mx_weight_params &p, int64_t m, int64_t block)
{
    const int64_t first = p.first_row + block * MK_MX_BLOCK;
    const uint8_t *scales = static_cast<const uint8_t *>(p.scales) + m * mk_mx_scale_bytes(p.cols, p.stored_rows);
    for (int64_t col = lane_idx(); col < p.cols; col += 32) {
        const uint8_t *from = static_cast<const uint8_t *>(p.source) + (m * p.cols + col) * p.stored_rows + first;
        uint16_t *to = p.wide + (m * p.rows + block * MK_MX_BLOCK) * p.cols + col;
        const uint8_t scale = load(scales + mk_mx_scale_index(col, first / MK_MX_BLOCK, p.stored_rows));
        for (int64_t i = 0; i < MK_MX_BLOCK; i += 8) {
            const Vec4 v = mx_widen8(load(reinterpret_cast<const MxElements8 *>(from + i)), scale);
            MK_UNROLL for (int j = 0; j < 8; j++)
                store(to + (i + j) * p.cols, mx_number(v, j));
        }
    }
}

/* All warps of the grid. */
MK_DEVICE void mx_widen_weights(const mk_mx_weight_params &p, int64_t warp, int64_t num_warps)
{
    const bool down = p.form == MK_MX_BF16_DOWN || p.form == MK_MX_TURNED;
    const int64_t units = down ? p.rows / MK_MX_BLOCK : p.rows;
    for (int64_t i = warp; i < p.count * units; i += num_warps) {
        const int64_t m = i / units, unit = i % units;
        if (!mx_is_there(p.experts, m))
            continue;
        switch (p.form) {
        case MK_MX_BF16_ALONG: mx_round_weight_row(p, m, unit); break;
        case MK_MX_BF16_DOWN: mx_round_weight_block(p, m, unit); break;
        case MK_MX_QUANTISED: mx_widen_weight_row(p, m, unit); break;
        default: mx_widen_turned_block(p, m, unit); break;
        }
    }
}

} /* namespace mk */
#endif
