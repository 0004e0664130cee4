/* The kernels of MXFP8 in the emulator, bit for bit against the CPU backend's loops: rows and matrices with NaN, infinities, zeros and
 * every size, tails of tiles, grids larger and smaller than the work. */
#include "cuda/kernel/mx.cu"

extern "C" {
#include "cpu/mx.h"
}
#include "test.h"

static void draw(uint16_t *x, int64_t n, uint64_t *state)
{
    for (int64_t b = 0; b < n; b += 32) {
        const int64_t kind = test_below(state, 6), centre = test_below(state, 256);
        for (int64_t i = b; i < b + 32 && i < n; i++) {
            int64_t exponent = centre + test_below(state, 17) - 12;
            exponent = exponent < 0 ? 0 : exponent > 254 ? 254 : exponent;
            x[i] = (uint16_t)((test_random(state) & 0x807f) | (uint64_t)exponent << 7);
            if (kind == 0)
                x[i] &= 0x8000;
            if (kind == 1 && test_below(state, 5) == 0)
                x[i] = (uint16_t)(0x7f80 | (test_random(state) & 0x807f));
        }
    }
}

template <class Params> static void run(emu::Machine &machine, void (*kernel)(const Params), const Params &p, uint32_t blocks, uint32_t shared = 0)
{
    emu::Launch launch;
    launch.blocks = blocks;
    launch.threads = 256;
    launch.shared_bytes = shared;
    machine.add_device(2).launch(launch, [=] { kernel(p); });
    const emu::Result result = machine.run();
    if (!result.ok)
        TEST_FAILED("%s", result.message.c_str());
}

TEST(rows_have_the_cpus_bits_and_come_back)
{
    static const int64_t shapes[][2] = {{1, 64}, {5, 320}, {19, 576}, {3, 1024}};
    uint64_t state = test_seed();
    for (auto &shape : shapes) {
        const int64_t rows = shape[0], cols = shape[1], stride = mk_mx_row_stride(cols), n = rows * cols;
        emu::Machine machine(test_random(&state));
        emu::Buffer<uint16_t> x(machine, "x", (size_t)n), wide(machine, "wide", (size_t)n);
        emu::Buffer<uint8_t> to(machine, "rows", (size_t)(rows * stride));
        emu::Buffer<uint64_t> counter(machine, "not_finite", 1);
        draw(x.host(), n, &state);
        counter.host()[0] = 7;
        run(machine, mok_mx_quantise_rows, mk_mx_rows_params{x.device(), to.device(), rows, cols, counter.device()}, 1 + (uint32_t)test_below(&state, 4));
        int64_t not_finite = 7;
        for (int64_t r = 0; r < rows; r++) {
            uint8_t elements[1024], scales[32];
            not_finite += mk_cpu_mx_quantise(x.device() + r * cols, cols, elements, scales);
            CHECK_BYTES(to.device() + r * stride, elements, (size_t)cols);
            CHECK_BYTES(to.device() + r * stride + cols, scales, (size_t)cols / 32);
            CHECK(to.written((size_t)(r * stride), (size_t)mk_mx_row_bytes(cols)));
        }
        CHECK_EQ(counter[0], not_finite);
        run(machine, mok_mx_widen_rows, mk_mx_rows_params{wide.device(), to.device(), rows, cols, nullptr}, 2);
        for (int64_t r = 0; r < rows; r++) {
            uint16_t back[1024];
            mk_cpu_mx_round(x.device() + r * cols, cols, back);
            CHECK_BYTES(wide.device() + r * cols, back, (size_t)cols * 2);
        }
    }
}

TEST(matrices_have_the_cpus_bits_both_ways_and_come_back)
{
    static const int64_t shapes[][3] = {{1, 32, 32}, {2, 64, 192}, {1, 160, 96}, {3, 192, 64}, {1, 128, 256}};
    uint64_t state = test_seed();
    for (auto &shape : shapes) {
        const int64_t count = shape[0], rows = shape[1], cols = shape[2], n = count * rows * cols;
        const size_t bytes = (size_t)(count * mk_mx_scale_bytes(rows, cols)), turned_bytes = (size_t)(count * mk_mx_scale_bytes(cols, rows));
        emu::Machine machine(test_random(&state));
        emu::Buffer<uint16_t> x(machine, "x", (size_t)n), wide(machine, "wide", (size_t)n);
        emu::Buffer<uint8_t> data(machine, "data", (size_t)n), turned(machine, "turned", (size_t)n);
        emu::Buffer<uint8_t> scales(machine, "scales", bytes), turned_scales(machine, "turned_scales", turned_bytes);
        emu::Buffer<uint64_t> counter(machine, "not_finite", 1);
        draw(x.host(), n, &state);
        counter.host()[0] = 0;
        mk_mx_matrix_params p = {x.device(), data.device(), scales.device(), count, rows, cols, counter.device(), rows * cols, cols, nullptr, 0};
        run(machine, mok_mx_quantise_matrix, p, 1 + (uint32_t)test_below(&state, 3));
        mk_mx_matrix_params t = {x.device(), turned.device(), turned_scales.device(), count, rows, cols, nullptr, rows * cols, cols, nullptr, 0};
        run(machine, mok_mx_quantise_turned, t, 1 + (uint32_t)test_below(&state, 9), MK_MX_TURNED_SHARED);
        uint8_t *want = (uint8_t *)malloc((size_t)n), *want_turned = (uint8_t *)malloc((size_t)n);
        uint8_t *want_scales = (uint8_t *)malloc(bytes), *want_turned_scales = (uint8_t *)malloc(turned_bytes);
        const mk_mx_matrix matrix = {x.device(), count, rows, cols, want, want_scales, want_turned, want_turned_scales};
        CHECK_EQ(mk_cpu_mx_quantise_matrix(&matrix), counter[0]);
        CHECK_BYTES(data.device(), want, (size_t)n);
        CHECK_BYTES(scales.device(), want_scales, bytes);
        CHECK_BYTES(turned.device(), want_turned, (size_t)n);
        CHECK_BYTES(turned_scales.device(), want_turned_scales, turned_bytes);
        CHECK(scales.written(0, bytes) && turned_scales.written(0, turned_bytes));
        /* The transpose is a matrix like any other. */
        run(machine, mok_mx_widen_matrix, mk_mx_matrix_params{wide.device(), turned.device(), turned_scales.device(), count, cols, rows, nullptr, 0, 0, nullptr, 0}, 2);
        uint16_t *back = (uint16_t *)malloc((size_t)n * 2);
        for (int64_t m = 0; m < count; m++)
            mk_cpu_mx_widen_matrix(want_turned + m * rows * cols, want_turned_scales + m * mk_mx_scale_bytes(cols, rows), rows, 0, cols, 0, rows, back + m * rows * cols);
        CHECK_BYTES(wide.device(), back, (size_t)n * 2);
        free(want);
        free(want_turned);
        free(want_scales);
        free(want_turned_scales);
        free(back);
    }
}

/* Row s has scale s. Every element in order, then again with NaN replaced, so that its neighbours are seen alone too. */
TEST(every_element_of_every_scale_widens_to_the_cpus_bits)
{
    enum { SCALES = 256, COLS = 512 };
    emu::Machine machine(test_seed());
    emu::Buffer<uint8_t> data(machine, "data", SCALES * COLS), scales(machine, "scales", (size_t)mk_mx_scale_bytes(SCALES, COLS));
    emu::Buffer<uint16_t> wide(machine, "wide", SCALES * COLS);
    for (int64_t i = 0; i < SCALES * COLS; i++) {
        const int64_t row = i / COLS, col = i % COLS;
        data.host()[i] = (uint8_t)(col >= 256 && (col & 0x7f) == 0x7f ? col - 1 : col);
        scales.host()[mk_mx_scale_index(row, col / 32, COLS)] = (uint8_t)row;
    }
    run(machine, mok_mx_widen_matrix, mk_mx_matrix_params{wide.device(), data.device(), scales.device(), 1, SCALES, COLS, nullptr, 0, 0, nullptr, 0}, 3);
    int64_t differ = 0, inexact = 0;
    for (int64_t i = 0; i < SCALES * COLS; i++) {
        const int element = data[(size_t)i], scale = (int)(i / COLS), size = element & 0x7f;
        differ += wide[(size_t)i] != mk_mx_widen((uint8_t)element, (uint8_t)scale);
        if (scale < MK_MX_SCALE_MIN || scale > MK_MX_SCALE_MAX || size == MK_MX_NAN)
            continue;
        const double value = ldexp(size < 8 ? size / 8.0 : 1 + size % 8 / 8.0, (size < 8 ? 1 : size / 8) - 7 + scale - 127);
        inexact += (double)emu::bf16_to_float(wide[(size_t)i]) != (element & 0x80 ? -value : value);
    }
    CHECK_EQ(differ, 0);
    CHECK_EQ(inexact, 0);
}

/* Blocks down the rows and along them, as the stages round their operands: NaN, zeros, every scale, tails. */
TEST(eight_numbers_round_to_the_cpus_bits_either_way)
{
    uint64_t state = test_seed();
    for (int round = 0; round < 12; round++) {
        enum { COLS = 256 };
        const int32_t rows = 1 + (int32_t)test_below(&state, 32);
        emu::Machine machine(test_random(&state));
        emu::Buffer<uint16_t> x(machine, "x", 32 * COLS), down(machine, "down", 32 * COLS), along(machine, "along", 32 * COLS);
        draw(x.host(), 32 * COLS, &state);
        for (int64_t i = 0; i < 32 * COLS && round % 2; i++) /* one size for a whole column */
            x.host()[i] = (uint16_t)((x.host()[i] & 0x807f) | (uint64_t)(i % COLS) << 7);
        emu::Launch launch;
        launch.blocks = 1;
        launch.threads = 32;
        uint16_t *from = x.device(), *to_down = down.device(), *to_along = along.device();
        machine.add_device(1).launch(launch, [=] {
            mx_round_columns8(from + lane_idx() * 8, COLS, rows, to_down + lane_idx() * 8, COLS);
            for (int32_t r = 0; r < rows; r++)
                store(reinterpret_cast<Vec4 *>(to_along + r * COLS) + lane_idx(), mx_round8(load(reinterpret_cast<const Vec4 *>(from + r * COLS) + lane_idx())));
        });
        const emu::Result result = machine.run();
        if (!result.ok)
            TEST_FAILED("%s", result.message.c_str());
        for (int32_t r = 0; r < rows; r++) {
            uint16_t want[COLS];
            mk_cpu_mx_round(x.device() + r * COLS, COLS, want);
            CHECK_BYTES(along.device() + r * COLS, want, sizeof want);
        }
        for (int64_t c = 0; c < COLS; c++) {
            uint16_t column[32] = {}, want[32], got[32];
            for (int32_t r = 0; r < rows; r++)
                column[r] = x.device()[r * COLS + c], got[r] = down.device()[r * COLS + c];
            mk_cpu_mx_round(column, 32, want);
            CHECK_BYTES(got, want, sizeof *want * (size_t)rows);
        }
    }
}

int main(int argc, char **argv) { return test_main(argc, argv); }
