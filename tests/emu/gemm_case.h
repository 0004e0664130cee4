/* A grouped GEMM on the emulator, and the plain loop it must equal bit for bit. Sizes, routing and data come from a seed. */
#ifndef MK_TESTS_GEMM_CASE_H
#define MK_TESTS_GEMM_CASE_H

#include "cuda/gemm/gemm.cuh"
#include "test.h"
#include <string>
#include <vector>

enum GemmMode { GEMM_PLAIN, GEMM_PUSH, GEMM_SWIGLU, GEMM_SWIGLU_KEEP };
static const char *const gemm_mode_name[] = {"plain", "push", "swiglu", "swiglu_keep"};

struct GemmShape {
    std::vector<int32_t> rows;    /* of each expert */
    int64_t cols = 64, depth = 64;/* of the result, of the contraction */
    uint32_t blocks = 2, resident = 2;
    bool expert_maps = false;     /* one tensor map for each expert, in global memory */
    float limit = INFINITY;
};

static inline uint16_t random_bf16(uint64_t *seed) { return emu::float_to_bf16((float)test_normal(seed)); }
static inline float bf(uint16_t x) { return emu::bf16_to_float(x); }
static const uint16_t kNan = 0x7fc1;

/* One element as the contract defines it: fp32, one fma for each k, ascending; rounded to bf16. */
static inline uint16_t dot_bf16(const uint16_t *a, const uint16_t *b, int64_t depth)
{
    float sum = 0.0f;
    for (int64_t k = 0; k < depth; k++)
        sum = fmaf(bf(a[k]), bf(b[k]), sum);
    return emu::float_to_bf16(sum);
}

static inline mk_tensor_map encode(const mk_tensor &t)
{
    mk_tensor_map map;
    if (mk_tensor_map_encode(&map, &t, emu::tensor_map_encode_tiled) != 0)
        TEST_FAILED("tensor map refused");
    return map;
}

/* Memory and maps of one case. B is [E, 2 cols, depth] under SwiGLU (gate rows, then up rows), [E, cols, depth] otherwise. */
template <class Tile, class Program = mk::GroupedProgram<Tile>> struct GemmCase {
    const GemmShape &shape;
    GemmMode mode;
    bool swiglu;
    int64_t experts, b_rows, table_rows;
    std::vector<int32_t> first;
    emu::Machine machine;
    emu::Buffer<uint16_t> a, b, c, gate, up;
    emu::Buffer<int32_t> tile_first, rows;
    emu::Buffer<uint32_t> ticket;
    emu::Buffer<uint16_t *> slot;
    emu::Buffer<mk_tensor_map> maps;
    Program program;

    GemmCase(const GemmShape &s, GemmMode m, uint64_t seed)
        : shape(s), mode(m), swiglu(m >= GEMM_SWIGLU), experts((int64_t)s.rows.size()), b_rows(swiglu ? 2 * s.cols : s.cols),
          table_rows(0), first(place_rows(s, table_rows)), machine(seed), a(machine, "a", (size_t)(table_rows * s.depth)),
          b(machine, "b", (size_t)(experts * b_rows * s.depth)), c(machine, "c", (size_t)(table_rows * s.cols)),
          gate(machine, "gate", (size_t)(table_rows * s.cols)), up(machine, "up", (size_t)(table_rows * s.cols)),
          tile_first(machine, "tile_first", first.size()), rows(machine, "rows", s.rows.size()), ticket(machine, "ticket", 1),
          slot(machine, "slot", (size_t)table_rows), maps(machine, "maps", (size_t)experts * 2)
    {
        uint64_t state = seed;
        uint16_t *host_a = a.host(), *host_b = b.host();
        uint16_t **host_slot = slot.host();
        for (size_t i = 0; i < b.count(); i++)
            host_b[i] = random_bf16(&state);
        for (size_t i = 0; i < a.count(); i++)
            host_a[i] = kNan;  /* padding rows stay so */
        for (int64_t e = 0; e < experts; e++)
            for (int64_t r = 0; r < s.rows[(size_t)e] * s.depth; r++)
                host_a[first[(size_t)e] * 128 * s.depth + r] = random_bf16(&state);
        memcpy(tile_first.host(), first.data(), first.size() * sizeof(int32_t));
        memcpy(rows.host(), s.rows.data(), s.rows.size() * sizeof(int32_t));
        ticket.host()[0] = 0;
        for (int64_t r = 0; r < table_rows; r++)  /* pushed rows land in reverse order */
            host_slot[r] = c.device() + (table_rows - 1 - r) * s.cols;
        fill_program();
    }

    static std::vector<int32_t> place_rows(const GemmShape &s, int64_t &table_rows)
    {
        std::vector<int32_t> first(1, 0);
        for (int32_t r : s.rows)
            first.push_back(first.back() + (r + 127) / 128);
        table_rows = first.back() * 128 + 128;  /* at least one tile, so that no buffer is empty */
        return first;
    }

    void fill_program()
    {
        const int64_t high = swiglu ? shape.cols : Tile::cols / 2;
        program.a = encode(mk_tensor_operand(a.device(), (uint64_t)shape.depth, (uint64_t)table_rows, 0, mk::kBoxRowsA<Tile>));
        program.b_low = program.b_high =
            encode(mk_tensor_operand(b.device(), (uint64_t)shape.depth, (uint64_t)b_rows, (uint64_t)experts, mk::kBoxRowsB<Tile>));
        program.expert_maps = shape.expert_maps ? maps.device() : nullptr;
        for (int64_t e = 0; e < experts; e++) {
            const uint16_t *own = b.device() + e * b_rows * shape.depth;
            maps.host()[2 * e] = maps.host()[2 * e + 1] =
                encode(mk_tensor_operand(own, (uint64_t)shape.depth, (uint64_t)b_rows, 1, mk::kBoxRowsB<Tile>));
        }
        program.tile_first = tile_first.device();
        program.rows = rows.device();
        program.ticket = ticket.device();
        program.num_experts = (int32_t)experts;
        program.num_k_blocks = (int32_t)((shape.depth + 63) / 64);
        program.num_cols = (int32_t)shape.cols;
        program.tile_cols = swiglu ? Tile::cols / 2 : Tile::cols;
        program.b_high_row = (int32_t)high;
    }

    template <class Epilogue> emu::Result launch(const Epilogue &epilogue)
    {
        emu::Launch launch;
        launch.blocks = shape.blocks;
        launch.cluster = Tile::cluster;
        launch.threads = mk::kGemmThreads;
        launch.shared_bytes = sizeof(mk::GemmShared<Tile>);
        launch.name = "grouped GEMM";
        machine.add_device(shape.resident).launch(launch, [=, this_program = &program] {
            mk::gemm_kernel<Tile, Program, Epilogue>(*this_program, epilogue);
        });
        return machine.run();
    }

    emu::Result run()
    {
        const mk::MatrixRows to_c = {c.device(), shape.cols}, nowhere = {nullptr, shape.cols};
        const bool keep = mode == GEMM_SWIGLU_KEEP;
        if (mode == GEMM_PLAIN)
            return launch(mk::StoreRows<mk::MatrixRows>{to_c});
        if (mode == GEMM_PUSH)
            return launch(mk::StoreRows<mk::PushedRows>{{slot.device(), shape.cols}});
        return launch(mk::SwigluRows{to_c, keep ? mk::MatrixRows{gate.device(), shape.cols} : nowhere,
                                     keep ? mk::MatrixRows{up.device(), shape.cols} : nowhere, shape.limit});
    }

    /* 0, or how many elements differ from the plain loop (or were written where nothing may be). */
    int64_t count_differences()
    {
        int64_t wrong = 0;
        std::vector<int> owner((size_t)table_rows, -1);
        for (int64_t e = 0; e < experts; e++)
            for (int32_t r = 0; r < shape.rows[(size_t)e]; r++)
                owner[(size_t)(first[(size_t)e] * 128 + r)] = (int)e;
        for (int64_t row = 0; row < table_rows; row++) {
            const int64_t to = mode == GEMM_PUSH ? table_rows - 1 - row : row;
            for (int64_t col = 0; col < shape.cols; col++)
                wrong += owner[(size_t)row] < 0 ? c.written((size_t)(to * shape.cols + col))
                                                : !element_right(owner[(size_t)row], row, to, col);
        }
        return wrong;
    }

    bool element_right(int e, int64_t row, int64_t to, int64_t col)
    {
        const uint16_t *x = a.device() + row * shape.depth;
        const uint16_t *weights = b.device() + e * b_rows * shape.depth;
        const size_t at = (size_t)(to * shape.cols + col);
        const uint16_t low = dot_bf16(x, weights + col * shape.depth, shape.depth);
        if (!swiglu)
            return c.written(at) && c[at] == low;
        const uint16_t high = dot_bf16(x, weights + (shape.cols + col) * shape.depth, shape.depth);
        const uint16_t h = emu::float_to_bf16(mk::swiglu(bf(low), bf(high), shape.limit));
        return c.written(at) && c[at] == h && (mode != GEMM_SWIGLU_KEEP || (gate[at] == low && up[at] == high));
    }
};

/* Runs and compares; prints what is wrong. */
template <class Case> static bool gemm_case_passes(const GemmShape &shape, GemmMode mode, uint64_t seed, const char *tile)
{
    Case gemm(shape, mode, seed);
    const emu::Result result = gemm.run();
    if (!result.ok) {
        printf("  %s, %s, seed %llu: %s\n", tile, gemm_mode_name[mode], (unsigned long long)seed, result.message.c_str());
        return false;
    }
    const int64_t wrong = gemm.count_differences();
    if (wrong)
        printf("  %s, %s, seed %llu: %lld elements are wrong\n", tile, gemm_mode_name[mode], (unsigned long long)seed, (long long)wrong);
    return wrong == 0;
}

/* Sizes that exercise: an odd last column tile, tails of rows and of columns, more K blocks (of 64) than stages. */
static inline GemmShape small_shape(uint64_t *state, int64_t most_k_blocks)
{
    GemmShape s;
    const int64_t experts = 1 + test_below(state, 4);
    int64_t budget = 3;  /* row tiles */
    for (int64_t e = 0; e < experts; e++) {
        static const int32_t some[] = {0, 1, 63, 64, 65, 127, 128, 130};
        int32_t rows = some[test_below(state, 8)];
        if ((rows + 127) / 128 > budget)
            rows = 0;
        budget -= (rows + 127) / 128;
        s.rows.push_back(rows);
    }
    s.cols = 64 * (1 + test_below(state, 7));
    s.depth = 64 * (1 + test_below(state, most_k_blocks));
    s.blocks = 2 * (1 + (uint32_t)test_below(state, 3));
    s.resident = 1 + (uint32_t)test_below(state, 3);
    s.expert_maps = test_below(state, 2) != 0;
    s.limit = test_below(state, 2) ? INFINITY : 1.5f;
    return s;
}

template <class Case> static void sweep(const char *tile, GemmMode mode, int64_t most_k_blocks)
{
    const char *env = getenv("MOK_TEST_SEEDS");
    const int count = env ? atoi(env) : 2;
    for (int i = 0; i < count; i++) {
        uint64_t state = test_seed() + (uint64_t)i * 7919;
        const GemmShape shape = small_shape(&state, most_k_blocks);
        CHECK((gemm_case_passes<Case>(shape, mode, test_seed() + (uint64_t)i, tile)));
    }
}
#endif
