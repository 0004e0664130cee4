/* Weight gradients of MXFP8 operands on Blackwell's core, by themselves. Their operands, quantised along the rows: bit for bit against the CPU backend. What
 * mok_backward_fused_mx makes of such operands: bit for bit against a plain loop over the numbers that they widen to, for ragged ends, an expert without
 * rows, a piece over the ring's end and one that goes on. Whatever does not exist is NaN: elements, scales and results. */
#define MK_SM100
#include "cuda/kernel/backward.cu"

extern "C" {
#include "cpu/mx.h"
}
#include "test.h"
#include <vector>

/* One rank with a ring of five tiles. I is half an atom of scales, H one and a half. */
struct Layer {
    enum { H = 192, I = 64, RING = 5 };
    emu::Machine machine;
    uint64_t state;
    mk_rank_params r = {};
    emu::Buffer<uint8_t> local;
    Layer(mk_memory m, uint64_t seed) : machine(seed), state(seed), local(machine, "local", (size_t)m.local_bytes)
    {
        r.dims = dims();
        r.memory = m;
        r.local = reinterpret_cast<char *>(local.device());
        r.timeout_ns = 1ull << 60;
        r.swiglu_limit = INFINITY;
        memset(local.host(), 0xff, local.count());
        memset(at(m.device_state), 0, sizeof(mk_device_state));
    }
    explicit Layer(uint64_t seed) : Layer(map_of(), seed) {}

    static mk_dims dims()
    {
        mk_dims d = {};
        d.hidden = H, d.intermediate = I;
        d.num_experts = d.experts_count = 4;
        d.topk = 1, d.num_ranks = 1, d.max_tokens = 1024;
        d.ring_tiles = RING, d.mb_tiles_fwd = d.mb_tiles_bwd = 2, d.capacity_tiles = 8;
        d.mx = d.mx_scaled = d.mx_wgrad = 1;
        return d;
    }
    static mk_memory map_of()
    {
        mk_memory m;
        const mk_dims d = dims();
        mk_memory_map(&d, &m, nullptr);
        return m;
    }
    uint8_t *at(int64_t place) { return local.device() + place; }

    template <class Kernel> void launch(uint32_t blocks, uint32_t cluster, uint32_t threads, uint32_t shared, const Kernel &kernel)
    {
        emu::Launch l;
        l.blocks = blocks, l.cluster = cluster, l.threads = threads, l.shared_bytes = shared;
        machine.add_device(blocks).launch(l, kernel);
        const emu::Result result = machine.run();
        if (!result.ok)
            TEST_FAILED("%s", result.message.c_str());
    }
};

/* An operand of weight gradients in the ring: elements, and behind them the transpose's scales. */
struct Operand {
    uint8_t *elements, *scales;
    int64_t cols;
    Operand(Layer &l, int64_t place, int64_t columns) : elements(l.at(place)), scales(elements + Layer::RING * 128 * columns), cols(columns) {}

    /* Rows [row, row + count) of a block of 32, numbers in bf16 `stride` apart. */
    void quantise_block(int64_t row, int64_t count, const uint16_t *numbers, int64_t stride) const
    {
        for (int64_t c = 0; c < cols; c++) {
            uint16_t column[32] = {};
            uint8_t quantised[32];
            for (int64_t i = 0; i < count; i++)
                column[i] = numbers[i * stride + c];
            mk_cpu_mx_quantise(column, 32, quantised, scales + mk_mx_scale_index(c, row / 32, Layer::RING * 128));
            for (int64_t i = 0; i < count; i++)
                elements[(row + i) * cols + c] = quantised[i];
        }
    }
    float number(int64_t row, int64_t c) const
    {
        return emu::bf16_to_float(mk_mx_widen(elements[row * cols + c], scales[mk_mx_scale_index(c, row / 32, Layer::RING * 128)]));
    }
};

/* Numbers of very different size, as blocks are. */
static uint16_t draw(uint64_t *state, int spread) { return emu::float_to_bf16(ldexpf((float)test_normal(state), (int)test_below(state, 2 * spread + 1) - spread)); }

/* ---- operands ---- */

/* What a tile of the ring holds when its tasks of dx_k begin: x and dout in e4m3 with scales along H, the others in bf16; NaN and infinities among them. The rest of
 * the ring is NaN. */
static void fill_tile(Layer &l, int64_t row, int64_t rows)
{
    const mk_memory &m = l.r.memory;
    for (int64_t place : {m.ring_x, m.ring_dout}) {
        uint8_t *elements = l.at(place), *scales = elements + Layer::RING * 128 * Layer::H;
        for (int64_t i = row; i < row + rows; i++)
            for (int64_t b = 0; b < Layer::H / 32; b++) {
                scales[mk_mx_scale_index(i, b, Layer::H)] = (uint8_t)(test_below(&l.state, 20) ? 110 + test_below(&l.state, 24) : 88 + test_below(&l.state, 159));
                for (int64_t c = 32 * b; c < 32 * b + 32; c++)
                    elements[i * Layer::H + c] = (uint8_t)test_random(&l.state);
            }
    }
    for (int64_t place : {m.ring_gate, m.ring_up, m.ring_h})
        for (int64_t i = 0; i < rows * Layer::I; i++)
            reinterpret_cast<uint16_t *>(l.at(place))[row * Layer::I + i] = test_below(&l.state, 300) ? draw(&l.state, 20) : (uint16_t)(0x7f80 | (test_random(&l.state) & 0x807f));
}

TEST(operands_have_the_cpus_bits)
{
    for (int32_t rows : {1, 32, 77, 128}) {
        Layer l(test_seed() + (uint64_t)rows);
        const mk_memory &m = l.r.memory;
        mk::GemmTask task = {};
        task.row = (int32_t)test_below(&l.state, Layer::RING) * 128, task.num_rows = rows;
        fill_tile(l, task.row, rows);
        std::vector<uint8_t> before(l.local.host(), l.local.host() + l.local.count());
        for (int32_t part = 0; part < 2; part++) { /* the second task's columns of x and dout are past the last */
            task.col = 256 * part;
            l.launch(1, 1, 128, 64, [&l, task, part] { mk::WgradOperands{l.r, true}.share(task, 256, (uint32_t)part, 2); });
        }
        std::vector<uint8_t> got(l.local.host(), l.local.host() + l.local.count());
        memcpy(l.local.host(), before.data(), before.size());
        const struct { int64_t to, from, cols; bool widened; } all[] = {{m.wgrad_x, m.ring_x, Layer::H, true}, {m.wgrad_dout, m.ring_dout, Layer::H, true},
                                                                        {m.wgrad_dgate, m.ring_gate, Layer::I, false}, {m.wgrad_dup, m.ring_up, Layer::I, false},
                                                                        {m.wgrad_h, m.ring_h, Layer::I, false}};
        for (auto &o : all)
            for (int64_t first = 0; first < rows; first += 32) {
                const int64_t row = task.row + first, count = mk_min(rows - first, 32);
                std::vector<uint16_t> numbers((size_t)(count * o.cols));
                for (int64_t i = 0; i < count * o.cols; i++) {
                    const uint8_t *elements = l.at(o.from);
                    const int64_t r = row + i / o.cols, c = i % o.cols;
                    numbers[(size_t)i] = o.widened ? mk_mx_widen(elements[r * o.cols + c], elements[Layer::RING * 128 * o.cols + mk_mx_scale_index(r, c / 32, o.cols)])
                                                   : reinterpret_cast<const uint16_t *>(elements)[r * o.cols + c];
                }
                Operand(l, o.to, o.cols).quantise_block(row, count, numbers.data(), o.cols);
            }
        CHECK_BYTES(got.data(), l.local.host(), got.size()); /* and nothing else was written */
    }
}

/* ---- products ---- */

struct Problem : Layer {
    emu::Buffer<uint8_t> schedule;
    emu::Buffer<float> grads[MK_NUM_GRADS];
    mk_backward_params p = {};
    mk_table t;
    std::vector<mk_piece> pieces;
    std::vector<float> sums[MK_NUM_GRADS]; /* of a plain loop */

    explicit Problem(uint64_t seed)
        : Layer(seed), schedule(machine, "schedule", (size_t)r.memory.schedule_bytes),
          grads{{machine, "dgate", 4 * H * I}, {machine, "dup", 4 * H * I}, {machine, "ddown", 4 * H * I}}
    {
        /* Two tiles; none; two, and two more over the ring's end; a few rows. */
        const int32_t ragged = 1 + (int32_t)test_below(&state, 127), tail = 1 + (int32_t)test_below(&state, 127);
        pieces = {{0, 0, 2, 0, 128 + ragged, 1, 1, -1}, {1, 2, 2, 1, 0, 1, 1, -1}, {2, 2, 4, 1, 256, 1, 0, -1}, {2, 4, 6, 2, 128 + tail, 0, 1, 2}, {3, 6, 7, 3, 1 + (int32_t)test_below(&state, 40), 1, 1, -1}};
        static const int32_t first[] = {0, 1, 3, 4, 5};
        memset(schedule.host(), 0, schedule.count());
        t = mk_table_at(&r.memory, schedule.host());
        t.head->num_tiles = 7, t.head->num_pieces = (int32_t)pieces.size();
        memcpy(t.pieces, pieces.data(), pieces.size() * sizeof(mk_piece));
        memcpy(t.piece_first, first, sizeof first);
        uint32_t *counters = reinterpret_cast<uint32_t *>(at(r.memory.counters)), *end = reinterpret_cast<uint32_t *>(at(r.memory.device_state));
        std::fill(counters, end, 1u << 20); /* all operands are there */
        for (int m = 0; m < MK_NUM_GRADS; m++) {
            memset(grads[m].host(), 0xff, grads[m].count() * sizeof(float));
            sums[m].assign(grads[m].count(), 0.0f);
            p.grads[m] = {grads[m].device(), H * I * 4, nullptr, 0, m == MK_GRAD_DOWN ? I : H, 1, 0};
        }
        p.rank = r;
        p.schedule = schedule.device();
        p.num_tokens = 700, p.want_weights = 1;
        p.kind = MK_TASK_WGRAD;
        map(p.wgrad_x, p.wgrad_x_scales, r.memory.wgrad_x, H), map(p.wgrad_dout, p.wgrad_dout_scales, r.memory.wgrad_dout, H);
        map(p.wgrad_dgate, p.wgrad_dgate_scales, r.memory.wgrad_dgate, I), map(p.wgrad_dup, p.wgrad_dup_scales, r.memory.wgrad_dup, I);
        map(p.wgrad_h, p.wgrad_h_scales, r.memory.wgrad_h, I);
    }
    void map(mk_tensor_map &elements, mk_tensor_map &scales, int64_t place, uint64_t cols)
    {
        uint8_t *base = local.device() + place;
        const mk_tensor e = mk_tensor_operand_e4m3(base, cols, RING * 128, 1, 64), s = mk_tensor_scales(base + RING * 128 * cols, RING * 128, cols, 1);
        CHECK_EQ(mk_tensor_map_encode(&elements, &e, emu::tensor_map_encode_tiled), 0);
        CHECK_EQ(mk_tensor_map_encode(&scales, &s, emu::tensor_map_encode_tiled), 0);
    }
    static int64_t ring_row(const mk_piece &piece, int64_t i) { return (piece.tile_first + i / 128) % RING * 128 + i % 128; }

    /* Random operands of a piece's rows; the rest of the ring becomes NaN. */
    void fill(const std::vector<mk_piece> &now)
    {
        const mk_memory &m = r.memory;
        for (int64_t place : {m.wgrad_x, m.wgrad_dout, m.wgrad_dgate, m.wgrad_dup, m.wgrad_h}) {
            const int64_t cols = place == m.wgrad_x || place == m.wgrad_dout ? H : I;
            memset(at(place), 0xff, (size_t)(RING * 128 * (cols + mk_mx_scale_bytes(128, cols) / 128)));
            for (const mk_piece &piece : now)
                for (int64_t i = 0; i < piece.rows; i += 32) {
                    std::vector<uint16_t> numbers((size_t)(32 * cols));
                    for (uint16_t &x : numbers)
                        x = draw(&state, 6);
                    Operand(*this, place, cols).quantise_block(ring_row(piece, i), mk_min(piece.rows - i, 32), numbers.data(), cols);
                }
        }
    }
    void add(const mk_piece &piece)
    {
        const mk_memory &m = r.memory;
        const Operand x(*this, m.wgrad_x, H), dout(*this, m.wgrad_dout, H), dgate(*this, m.wgrad_dgate, I), dup(*this, m.wgrad_dup, I), h(*this, m.wgrad_h, I);
        const struct { const Operand &left, &right; } all[MK_NUM_GRADS] = {{dgate, x}, {dup, x}, {dout, h}};
        for (int which = 0; which < MK_NUM_GRADS; which++)
            for (int64_t i = 0; i < piece.rows; i++)
                for (int64_t a = 0; a < all[which].left.cols; a++) {
                    const float left = all[which].left.number(ring_row(piece, i), a);
                    float *sum = &sums[which][(size_t)(piece.expert * H * I + a * all[which].right.cols)];
                    for (int64_t b = 0; b < all[which].right.cols; b++)
                        sum[b] = fmaf(left, all[which].right.number(ring_row(piece, i), b), sum[b]);
                }
    }
    void run_minibatch(int32_t step)
    {
        std::vector<mk_piece> now(pieces.begin() + t.piece_first[step], pieces.begin() + t.piece_first[step + 1]);
        fill(now);
        for (const mk_piece &piece : now)
            add(piece);
        memset(at(r.memory.device_state), 0, sizeof(mk_device_state));
        p.step = step + 1; /* what lags */
        const mk_backward_params params = p;
        launch(4, 2, 384, MK_BACKWARD_SHARED, [params] { mok_backward_fused_mx(params); });
    }
};

TEST(products_have_the_bits_of_a_loop_over_the_rows)
{
    Problem problem(test_seed());
    for (int32_t step = 0; step < 4; step++)
        problem.run_minibatch(step);
    for (int m = 0; m < MK_NUM_GRADS; m++)
        for (int64_t e = 0; e < 4; e++)
            CHECK_BYTES(problem.grads[m].device() + e * Layer::H * Layer::I, problem.sums[m].data() + e * Layer::H * Layer::I, sizeof(float) * Layer::H * Layer::I);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
