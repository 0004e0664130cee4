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
        mk_mx_matrix_params p = {x.device(), data.device(), scales.device(), count, rows, cols, counter.device()};
        run(machine, mok_mx_quantise_matrix, p, 1 + (uint32_t)test_below(&state, 3));
        mk_mx_matrix_params t = {x.device(), turned.device(), turned_scales.device(), count, rows, cols, nullptr};
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
        run(machine, mok_mx_widen_matrix, mk_mx_matrix_params{wide.device(), turned.device(), turned_scales.device(), count, cols, rows, nullptr}, 2);
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

int main(int argc, char **argv) { return test_main(argc, argv); }
