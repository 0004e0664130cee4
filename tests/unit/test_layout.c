/* The memory map, expert ranges, and how a configuration is resolved or refused (layout/memory.h, dims.h, config.c, api/plan.c). */
#include "bad_config.h"
#include "layout/check.h"
#include "layout/config.h"
#include "layout/depend.h"
#include "test.h"

/* Sizes from a toy to far beyond 2^31 bytes and elements. */
static mok_config random_config(uint64_t *state)
{
    mok_config c = MOK_INIT(mok_config);
    int64_t scale = test_below(state, 3);
    c.hidden = 64 * (1 + test_below(state, scale == 2 ? 200 : 8));
    c.intermediate = 64 * (1 + test_below(state, scale == 2 ? 200 : 8));
    c.shared_intermediate = test_below(state, 2) ? 64 * test_below(state, 12) : 0;
    c.num_experts = 1 + test_below(state, scale ? 400 : 9);
    c.topk = 1 + test_below(state, c.num_experts < 12 ? c.num_experts : 12);
    c.max_tokens = 1 + test_below(state, scale == 2 ? 20000 : 300);
    if (test_below(state, 2)) {
        c.minibatch_rows = test_below(state, 2000);
        c.minibatch_rows_bwd = test_below(state, 2000);
    }
    if (test_below(state, 2))
        c.ring_rows = 2 * (c.minibatch_rows > c.minibatch_rows_bwd ? c.minibatch_rows : c.minibatch_rows_bwd) + 256 + test_below(state, 5000);
    c.save = (mok_save)test_below(state, 5);
    c.save_rows = c.save == MOK_SAVE_ROWS ? test_below(state, 9000) : 0;
    c.shared_gate = c.shared_intermediate && test_below(state, 2);
    c.backend = (mok_backend_id)test_below(state, 3);
    c.dtype = test_below(state, 2) ? MOK_MXFP8 : MOK_BF16;
    c.mx_wide_given = c.dtype == MOK_MXFP8 && test_below(state, 2);
    return c;
}

static int32_t random_ranks(uint64_t *state)
{
    static const int32_t some[] = {1, 2, 3, 4, 5, 8, 16, 72, 200};
    return some[test_below(state, 9)];
}

/* Resolves a random configuration that is legal. */
static void random_dims(uint64_t *state, mok_config *c, int32_t *ranks, mk_dims *d)
{
    for (;;) {
        *c = random_config(state);
        *ranks = random_ranks(state);
        mk_machine machine = mk_default_machine(c->backend);
        machine.scaled = test_below(state, 2);
        if (mk_resolve(c, *ranks, (int32_t)test_below(state, *ranks), machine, d) == MOK_OK)
            return;
        if (!strstr(mok_last_error(), "two minibatches") && !strstr(mok_last_error(), "fit a row table") && !strstr(mok_last_error(), "can be numbered"))
            TEST_FAILED("a random configuration is refused: %s", mok_last_error());
    }
}

/* --- memory map --------------------------------------------------------------------------------------------------------------- */
static void check_map(const mk_dims *d)
{
    mk_memory m;
    mok_buffer_info infos[MK_NUM_BUFFERS];
    mk_memory_map(d, &m, infos);
    int64_t total[5] = {m.heap_bytes, m.local_bytes, m.schedule_bytes, m.context_bytes, m.weights_bytes}, used[5] = {0};
    for (int i = 0; i < MK_NUM_BUFFERS; i++) {
        const mok_buffer_info *a = &infos[i];
        CHECK(a->bytes >= 0);
        CHECK(a->offset >= 0);
        CHECK_EQ(a->offset % MK_BUFFER_ALIGN, 0);
        if (a->offset + a->bytes > total[a->kind])
            TEST_FAILED("%s ends at %lld, beyond %lld", a->name, (long long)(a->offset + a->bytes), (long long)total[a->kind]);
        used[a->kind] += a->bytes;
        for (int j = 0; j < i; j++) {
            const mok_buffer_info *b = &infos[j];
            CHECK(strcmp(a->name, b->name) != 0);
            if (a->kind == b->kind && a->bytes && b->bytes && a->offset < b->offset + b->bytes && b->offset < a->offset + a->bytes)
                TEST_FAILED("%s [%lld, +%lld) and %s [%lld, +%lld) overlap", a->name, (long long)a->offset, (long long)a->bytes, b->name,
                            (long long)b->offset, (long long)b->bytes);
        }
    }
    for (int k = 0; k < 5; k++) /* nothing is wasted but alignment */
        CHECK(total[k] - used[k] < (int64_t)MK_NUM_BUFFERS * MK_BUFFER_ALIGN);
    int i = 0;
#define SAME(kind_, name_, bytes_, count_)             \
    CHECK_EQ(infos[i].offset, m.name_);                \
    CHECK_EQ(infos[i].kind, MOK_MEM_##kind_);          \
    CHECK_EQ(strcmp(infos[i].name, #name_), 0);        \
    i++;
    MK_BUFFER_LIST(SAME)
#undef SAME
    mk_memory again;
    mk_memory_map(d, &again, NULL);
    CHECK_BYTES(&again, &m, sizeof m);
}

TEST(memory_map_has_no_overlap_and_is_aligned)
{
    uint64_t state = test_seed();
    for (int i = 0; i < 400; i++) {
        mok_config c;
        int32_t ranks;
        mk_dims d;
        random_dims(&state, &c, &ranks, &d);
        check_map(&d);
    }
}

static const mok_buffer_info *find_buffer(const mok_buffer_info *infos, const char *name)
{
    for (int i = 0; i < MK_NUM_BUFFERS; i++)
        if (!strcmp(infos[i].name, name))
            return &infos[i];
    TEST_FAILED("there is no buffer %s", name);
    return infos;
}

/* Just below, at and above 2^31 and 2^32 bytes and elements: every size in 128-bit arithmetic. */
TEST(M1_sizes_and_offsets_beyond_2_to_the_31)
{
    static const int64_t tokens[] = {149796, 149797, 299593, 300000, 599186, 599187, 2000000};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        for (int64_t topk = 1; topk <= 8; topk += 7) {
            mok_config c = MOK_INIT(mok_config);
            mk_dims d;
            mk_memory m;
            mok_buffer_info infos[MK_NUM_BUFFERS];
            c.hidden = 7168;
            c.intermediate = 2048;
            c.num_experts = 384;
            c.topk = topk;
            c.max_tokens = tokens[i];
            c.save = MOK_SAVE_ALL;
            c.ring_rows = 128 * 4096;
            REQUIRE(mk_resolve(&c, 64, 63, mk_default_machine(MOK_BACKEND_CUDA), &d) == MOK_OK);
            mk_memory_map(&d, &m, infos);
            check_map(&d);
            CHECK(find_buffer(infos, "x")->bytes == (__int128)tokens[i] * 7168 * 2);
            CHECK(find_buffer(infos, "slots")->bytes == (__int128)tokens[i] * topk * 7168 * 2);
            CHECK(find_buffer(infos, "ring_x")->bytes == (__int128)128 * 4096 * 7168 * 2);
            CHECK(find_buffer(infos, "saved_up")->bytes == (__int128)d.capacity_tiles * 128 * 2048 * 2);
            CHECK(find_buffer(infos, "rows")->bytes == (__int128)d.capacity_tiles * 128 * (int64_t)sizeof(mk_row));
            CHECK(m.dweight_slots - m.slots == mk_round_up(tokens[i] * topk * 7168 * 2, MK_BUFFER_ALIGN));
            /* Counter places of the last tile do not wrap or meet others. */
            int64_t last = d.capacity_tiles - 1;
            CHECK_EQ(mk_counter_index(&d, MK_COUNTER_s2_bwd_tasks_done, last) + 1, mk_counter_index(&d, MK_COUNTER_wgrad_tasks_done, 0));
            CHECK(mk_counter_index(&d, MK_COUNTER_shared_s4_bwd_tasks_done, 0) * 4 <= find_buffer(infos, "counters")->bytes);
        }
}

/* A row's number is an int32 everywhere, padding included. */
TEST(M1_rows_of_a_table_fit_32_bits)
{
    mok_config c = MOK_INIT(mok_config);
    mk_dims d;
    c.hidden = c.intermediate = 64;
    c.num_experts = 1 << 20;
    c.topk = 64;
    int64_t legal = 0;
    for (c.max_tokens = INT32_MAX / 64 + 2; !legal && c.max_tokens > 1000; c.max_tokens -= 9973) {
        mok_config r = c;
        if (mk_resolve(&r, 1, 0, mk_default_machine(MOK_BACKEND_CPU), &d) != MOK_OK) {
            CHECK_STR(mok_last_error(), "fit a row table");
            continue;
        }
        legal = c.max_tokens;
        CHECK(d.capacity_tiles * MK_ROW_TILE <= INT32_MAX);
    }
    CHECK(legal > 0);
}

/* The worst routing fits, and none of the capacity is beyond the worst routing. */
TEST(capacity_is_what_the_worst_routing_needs)
{
    uint64_t state = test_seed();
    for (int i = 0; i < 300; i++) {
        mok_config c;
        int32_t ranks;
        mk_dims d;
        random_dims(&state, &c, &ranks, &d);
        int64_t routes = d.max_tokens * ranks * d.topk, worst = 0, left = routes;
        if (!d.experts_count) {
            CHECK_EQ(d.capacity_tiles, 0);
            continue;
        }
        /* One row more than a whole tile in as many experts as there are routes for, the rest in tiles of one expert. */
        for (int64_t e = 0; e < d.experts_count && left > 0; e++) {
            worst++;
            left--;
        }
        worst += left / MK_ROW_TILE; /* each further 128 rows of an expert with one row add a tile; the last rows may just spill */
        if (worst > d.capacity_tiles)
            TEST_FAILED("%lld routes over %lld experts can fill %lld tiles; the capacity is %lld", (long long)routes, (long long)d.experts_count, (long long)worst, (long long)d.capacity_tiles);
        CHECK(d.capacity_tiles <= worst + 1 || routes < d.experts_count);
        for (int j = 0; j < 20; j++) { /* and any other */
            int64_t tiles = 0;
            left = routes;
            for (int64_t e = 0; e < d.experts_count; e++) {
                int64_t rows = test_below(&state, left / (1 + test_below(&state, d.experts_count)) + 1);
                tiles += mk_ceil_div(rows, MK_ROW_TILE);
                left -= rows;
            }
            CHECK(tiles <= d.capacity_tiles);
        }
    }
}

/* --- expert ranges -------------------------------------------------------------------------------------------------------------- */
TEST(S8_expert_ranges_cover_and_balance)
{
    for (int64_t experts = 1; experts <= 50; experts++)
        for (int32_t ranks = 1; ranks <= 20; ranks++) {
            int64_t next = 0;
            for (int32_t r = 0; r < ranks; r++) {
                int64_t first = -1, count = -1;
                CHECK_EQ(mok_expert_range(experts, ranks, r, &first, &count), MOK_OK);
                CHECK_EQ(first, next);
                CHECK_EQ(first, r * experts / ranks);
                CHECK(count == experts / ranks || count == experts / ranks + 1);
                next += count;
            }
            CHECK_EQ(next, experts);
        }
    int64_t first, count, next = 0; /* products beyond 32 bits */
    for (int32_t r = 0; r < 4000; r++) {
        CHECK_EQ(mok_expert_range(INT32_MAX, 4000, r, &first, &count), MOK_OK);
        CHECK_EQ(first, next);
        next += count;
    }
    CHECK_EQ(next, INT32_MAX);
}

/* --- resolving ------------------------------------------------------------------------------------------------------------------ */
TEST(resolve_fills_every_choice)
{
    uint64_t state = test_seed();
    for (int i = 0; i < 400; i++) {
        mok_config wish = random_config(&state), c = wish;
        int32_t ranks = random_ranks(&state);
        mk_machine machine = mk_default_machine(c.backend);
        mk_dims d, d2;
        if (mk_resolve(&c, ranks, 0, machine, &d) != MOK_OK)
            continue;
        CHECK_EQ(c.dtype, wish.dtype);
        CHECK_EQ(c.router_dtype, MOK_FP32);
        CHECK_EQ(c.routed_hidden, c.hidden);
        CHECK_EQ(c.timeout_ms, 600000);
        CHECK_EQ(c.minibatch_rows % 128 + c.minibatch_rows_bwd % 128 + c.ring_rows % 128 + c.save_rows % 128, 0);
        CHECK(c.minibatch_rows > 0 && c.minibatch_rows_bwd > 0);
        CHECK(c.ring_rows >= 2 * mk_max(c.minibatch_rows, c.minibatch_rows_bwd));
        if (wish.ring_rows)
            CHECK_EQ(c.ring_rows, mk_round_up(wish.ring_rows, 128));
        if (wish.minibatch_rows)
            CHECK_EQ(c.minibatch_rows, mk_round_up(wish.minibatch_rows, 128));
        if (wish.minibatch_rows_bwd)
            CHECK_EQ(c.minibatch_rows_bwd, mk_round_up(wish.minibatch_rows_bwd, 128));
        CHECK(c.save != MOK_SAVE_AUTO);
        CHECK_EQ(d.ring_tiles * 128, c.ring_rows);
        CHECK_EQ(d.mb_tiles_fwd * 128, c.minibatch_rows);
        CHECK_EQ(d.mb_tiles_bwd * 128, c.minibatch_rows_bwd);
        if (c.save == MOK_SAVE_NONE)
            CHECK_EQ(d.saved_tiles, 0);
        if (c.save == MOK_SAVE_ALL)
            CHECK_EQ(d.saved_tiles, d.capacity_tiles);
        if (c.save == MOK_SAVE_RING)
            CHECK_EQ(d.saved_tiles, mk_min(d.ring_tiles, d.capacity_tiles));
        if (c.save == MOK_SAVE_ROWS)
            CHECK_EQ(d.saved_tiles, mk_min(mk_ceil_div(wish.save_rows, 128), d.capacity_tiles));
        mok_config again = c; /* resolving what is resolved changes nothing */
        again.save_rows = c.save == MOK_SAVE_ROWS ? c.save_rows : 0;
        CHECK_EQ(mk_resolve(&again, ranks, 0, machine, &d2), MOK_OK);
        CHECK_BYTES(&again, &c, sizeof c);
        CHECK_BYTES(&d2, &d, sizeof d);
        for (int32_t r = 1; r < ranks && r < 9; r++) { /* all ranks come to the same, the fingerprint included */
            mok_config other = wish;
            double a, b;
            CHECK_EQ(mk_resolve(&other, ranks, r, machine, &d2), MOK_OK);
            CHECK(mk_config_difference(&c, &other, &a, &b) == NULL);
            CHECK_EQ(mk_config_fingerprint(&c, ranks), mk_config_fingerprint(&other, ranks));
        }
    }
}

static mok_config kimi(int64_t num_experts)
{
    mok_config c = MOK_INIT(mok_config);
    c.hidden = 7168;
    c.intermediate = 2048;
    c.num_experts = num_experts;
    c.topk = 8;
    c.max_tokens = 2048;
    return c;
}

TEST(two_wave_bound_of_kimi)
{
    mok_config c = kimi(384);
    mok_plan plan = MOK_INIT(mok_plan);
    c.shared_intermediate = 2048;
    REQUIRE(mok_plan_query(&c, 64, 0, 148, 128, 256, &plan, NULL, NULL) == MOK_OK);
    CHECK(plan.forward.two_wave_rows == 2368);
    CHECK(plan.backward.two_wave_rows == 4736);
    CHECK_EQ(plan.forward.narrowest_gemm, 4096);
    CHECK_EQ(plan.backward.narrowest_gemm, 2048);
    CHECK_EQ(plan.forward.minibatch_rows, 4736);
    CHECK_EQ(plan.backward.minibatch_rows, 4736);
    CHECK_EQ(plan.smallest_ring_rows, 9472);
    CHECK_EQ(plan.experts_count, 6);
    CHECK_EQ(plan.balanced_rows, 16384);
    CHECK(plan.ring_rows >= plan.balanced_rows);
}

TEST(two_wave_bound_follows_the_machine)
{
    for (int32_t sms = 8; sms <= 160; sms += 19)
        for (int64_t wide = 64; wide <= 8192; wide *= 2) {
            mok_config c = MOK_INIT(mok_config);
            mok_plan plan = MOK_INIT(mok_plan);
            c.hidden = 2048;
            c.intermediate = wide;
            c.num_experts = 8;
            c.topk = 8;
            c.max_tokens = 1 << 15;
            REQUIRE(mok_plan_query(&c, 8, 3, sms, 128, 256, &plan, NULL, NULL) == MOK_OK);
            double narrow_fwd = 2 * wide < 2048 ? (double)(2 * wide) : 2048, narrow_bwd = wide < 2048 ? (double)wide : 2048;
            CHECK(plan.forward.two_wave_rows == 2.0 * sms * 128 * 256 / narrow_fwd);
            CHECK(plan.backward.two_wave_rows == 2.0 * sms * 128 * 256 / narrow_bwd);
            /* Whole turns of all clusters in both GEMMs; the fewest beyond the bound. */
            int64_t tiles = plan.forward.minibatch_rows / 128, at_once = sms > 144 ? sms : sms / 2, gate_up = (2 * wide + 255) / 256, down = 8, fewer = 0;
            CHECK((double)plan.forward.minibatch_rows >= plan.forward.two_wave_rows);
            CHECK_EQ(plan.forward.minibatch_rows % 128, 0);
            CHECK_EQ(tiles * gate_up % at_once, 0);
            CHECK_EQ(tiles * down % at_once, 0);
            if (plan.backward.two_wave_rows < 65536) { /* of 262,144: two minibatches are there for sure */
                CHECK_EQ(plan.backward.minibatch_rows / 128 * ((wide + 255) / 256) % at_once, 0);
                CHECK_EQ(plan.backward.minibatch_rows / 128 * down % at_once, 0);
            }
            CHECK((double)plan.backward.minibatch_rows >= plan.backward.two_wave_rows);
            for (int64_t t = (int64_t)ceil(plan.forward.two_wave_rows / 128); t < tiles; t++)
                fewer += t * gate_up % at_once == 0 && t * down % at_once == 0;
            CHECK_EQ(fewer, 0);
        }
}

/* Fewer rows than two minibatches of whole waves, or a ring that cannot hold them: the bound alone. */
TEST(few_rows_have_no_whole_waves)
{
    mok_config c = kimi(8);
    mok_plan plan = MOK_INIT(mok_plan);
    for (c.max_tokens = 512; c.max_tokens <= 2048; c.max_tokens *= 2) {
        REQUIRE(mok_plan_query(&c, 1, 0, 132, 128, 256, &plan, NULL, NULL) == MOK_OK);
        CHECK_EQ(plan.forward.minibatch_rows, c.max_tokens == 2048 ? 4224 : 2304);
        CHECK_EQ(plan.backward.minibatch_rows, c.max_tokens == 2048 ? 4224 : 4352);
    }
    for (c.max_tokens = 1055; c.max_tokens <= 1056; c.max_tokens++) { /* 8,440 and 8,448 rows: two minibatches of 33 tiles */
        REQUIRE(mok_plan_query(&c, 1, 0, 132, 128, 256, &plan, NULL, NULL) == MOK_OK);
        CHECK_EQ(plan.forward.minibatch_rows, c.max_tokens == 1056 ? 4224 : 2304);
    }
    c.max_tokens = 2048;
    c.ring_rows = 8192; /* a third of it is less than 33 tiles */
    REQUIRE(mok_plan_query(&c, 1, 0, 132, 128, 256, &plan, NULL, NULL) == MOK_OK);
    CHECK_EQ(plan.forward.minibatch_rows, 2304);
    c.ring_rows = 0;
    c.reserve_sms = 12; /* 60 clusters: 60 / gcd(60, 16, 28) = 15 tiles, of which two make the bound */
    REQUIRE(mok_plan_query(&c, 1, 0, 132, 128, 256, &plan, NULL, NULL) == MOK_OK);
    CHECK_EQ(plan.forward.minibatch_rows, 30 * 128);
}

/* --- refusing ------------------------------------------------------------------------------------------------------------------- */
TEST(every_bad_field_is_refused_with_its_sentence)
{
    mok_config c;
    bad_config bad;
    int i = 0;
    for (; bad_config_at(i, &c, &bad); i++) {
        mok_plan plan, before;
        memset(&plan, 0xa5, sizeof plan);
        plan.struct_size = sizeof plan;
        plan.api_version = 1;
        before = plan;
        mok_buffer_info infos[4], infos_before[4];
        int32_t num = 4;
        memset(infos, 0x5a, sizeof infos);
        memcpy(infos_before, infos, sizeof infos);
        mok_status status = mok_plan_query(&c, 4, 1, 0, 0, 0, &plan, infos, &num);
        if (status != bad.status || !strstr(mok_last_error(), bad.words))
            TEST_FAILED("%s: %s, \"%s\"; expected %s with \"%s\"", bad.what, mok_status_name(status), mok_last_error(), mok_status_name(bad.status),
                        bad.words);
        CHECK_BYTES(&plan, &before, sizeof plan);
        CHECK_BYTES(infos, infos_before, sizeof infos);
        CHECK_EQ(num, 4);
    }
    CHECK(i > 50);
    c = good_config();
    mok_plan plan = MOK_INIT(mok_plan);
    CHECK_EQ(mok_plan_query(&c, 4, 1, 0, 0, 0, &plan, NULL, NULL), MOK_OK);
}

TEST(fields_that_must_agree_are_told_apart)
{
    mok_config base = good_config();
    mk_dims d;
    REQUIRE(mk_resolve(&base, 2, 0, mk_default_machine(MOK_BACKEND_CPU), &d) == MOK_OK);
    uint64_t print = mk_config_fingerprint(&base, 2);
    CHECK(mk_config_fingerprint(&base, 3) != print);
#define DIFFERENT(field, value)                                                                     \
    do {                                                                                            \
        mok_config other = base;                                                                    \
        double a = 0, b = 0;                                                                        \
        other.field = (value);                                                                      \
        const char *name = mk_config_difference(&base, &other, &a, &b);                             \
        CHECK(name && !strcmp(name, #field));                                                       \
        CHECK(a == (double)base.field && b == (double)other.field);                                 \
        CHECK(mk_config_fingerprint(&other, 2) != print);                                           \
    } while (0)
#define ALIKE(field, value)                                                                         \
    do {                                                                                            \
        mok_config other = base;                                                                    \
        double a = 0, b = 0;                                                                        \
        other.field = (value);                                                                      \
        CHECK(mk_config_difference(&base, &other, &a, &b) == NULL);                                 \
        CHECK_EQ(mk_config_fingerprint(&other, 2), print);                                          \
    } while (0)
    DIFFERENT(hidden, 256);
    DIFFERENT(intermediate, 64);
    DIFFERENT(shared_intermediate, 0);
    DIFFERENT(routed_hidden, 64);
    DIFFERENT(num_experts, 7);
    DIFFERENT(topk, 3);
    DIFFERENT(max_tokens, 41);
    DIFFERENT(dtype, MOK_MXFP8);
    DIFFERENT(router_dtype, MOK_BF16);
    DIFFERENT(activation, MOK_ACT_GPT_OSS);
    DIFFERENT(swiglu_limit, 7.0f);
    DIFFERENT(gate_up, MOK_GATE_UP_COMBINED);
    DIFFERENT(weight_layout, MOK_WEIGHT_KN);
    DIFFERENT(shared_gate, true);
    DIFFERENT(expert_bias, true);
    DIFFERENT(mx_wgrad_bf16, true);
    DIFFERENT(ring_rows, 4096);
    DIFFERENT(minibatch_rows, 384);
    DIFFERENT(minibatch_rows_bwd, 384);
    DIFFERENT(save, MOK_SAVE_ALL);
    DIFFERENT(save_rows, 8192);
    DIFFERENT(save_x, true);
    DIFFERENT(comm_sms, 4);
    DIFFERENT(comm_sms_bwd, 6);
    DIFFERENT(reserve_sms, 2);
    DIFFERENT(backend, MOK_BACKEND_CUDA);
    ALIKE(cpu_threads, 3);
    ALIKE(timeout_ms, 77);
    ALIKE(yield_us, -1);
}

/* --- plan ----------------------------------------------------------------------------------------------------------------------- */
TEST(plan_lists_every_buffer)
{
    mok_config c = good_config();
    mok_plan plan = MOK_INIT(mok_plan);
    int32_t num = 0;
    CHECK_EQ(mok_plan_query(&c, 4, 0, 0, 0, 0, &plan, NULL, &num), MOK_OK);
    CHECK_EQ(num, MK_NUM_BUFFERS);
    mok_buffer_info all[MK_NUM_BUFFERS + 2], few[MK_NUM_BUFFERS];
    memset(all, 0x77, sizeof all);
    memset(few, 0x77, sizeof few);
    num = MK_NUM_BUFFERS + 2;
    CHECK_EQ(mok_plan_query(&c, 4, 0, 0, 0, 0, &plan, all, &num), MOK_OK);
    CHECK_EQ(num, MK_NUM_BUFFERS);
    num = 3; /* room for three: three are written, all are counted */
    CHECK_EQ(mok_plan_query(&c, 4, 0, 0, 0, 0, &plan, few, &num), MOK_OK);
    CHECK_EQ(num, MK_NUM_BUFFERS);
    CHECK_BYTES(few, all, 3 * sizeof *few);
    unsigned char poison[sizeof *few];
    memset(poison, 0x77, sizeof poison);
    CHECK_BYTES(&few[3], poison, sizeof poison);
    CHECK_BYTES(&all[MK_NUM_BUFFERS], poison, sizeof poison);
    int64_t end[5] = {0};
    for (int i = 0; i < MK_NUM_BUFFERS; i++)
        end[all[i].kind] = mk_max(end[all[i].kind], all[i].offset + all[i].bytes);
    CHECK_EQ(mk_round_up(end[MOK_MEM_HEAP], 256), plan.heap_bytes);
    CHECK_EQ(mk_round_up(end[MOK_MEM_LOCAL], 256), plan.local_bytes);
    CHECK_EQ(mk_round_up(end[MOK_MEM_SCHEDULE], 256), plan.schedule_bytes);
    CHECK_EQ(mk_round_up(end[MOK_MEM_CONTEXT], 256), plan.context_bytes);
    CHECK_EQ(mk_round_up(end[MOK_MEM_WEIGHTS], 256), plan.wide_bytes);
}

TEST(plan_of_every_rank_of_an_uneven_split)
{
    mok_config c = good_config();
    c.num_experts = 10;
    int64_t experts = 0, rows = 0;
    for (int32_t r = 0; r < 4; r++) {
        mok_plan plan = MOK_INIT(mok_plan);
        CHECK_EQ(mok_plan_query(&c, 4, r, 0, 0, 0, &plan, NULL, NULL), MOK_OK);
        experts += plan.experts_count;
        rows += plan.balanced_rows;
        CHECK_EQ(plan.row_tile, 128);
    }
    CHECK_EQ(experts, 10);
    CHECK_EQ(rows, 40 * 4 * 2);
    c.num_experts = 3; /* a rank without experts */
    mok_plan plan = MOK_INIT(mok_plan);
    CHECK_EQ(mok_plan_query(&c, 4, 0, 0, 0, 0, &plan, NULL, NULL), MOK_OK);
    CHECK_EQ(plan.experts_count, 0);
    CHECK_EQ(plan.capacity_rows, 0);
    CHECK_EQ(plan.balanced_rows, 0);
}

static int64_t bytes_of(const mok_buffer_info *all, const char *name)
{
    int64_t bytes = 0;
    for (int i = 0; i < MK_NUM_BUFFERS; i++)
        bytes += strncmp(all[i].name, name, strlen(name)) ? 0 : all[i].bytes;
    return bytes;
}

/* Chosen minibatches: the two-wave bound in whole waves, unless the ring turns; and giving one of them does not make the other too long for the ring. */
TEST(minibatches_follow_a_ring_that_turns)
{
    mok_config c = kimi(8);
    mok_plan whole = MOK_INIT(mok_plan), p = MOK_INIT(mok_plan);
    int32_t none = 0;
    c.backend = MOK_BACKEND_CUDA;
#define PLAN(to) CHECK_EQ(mok_plan_query(&c, 1, 0, 132, 0, 0, &(to), NULL, &none), MOK_OK)
    PLAN(whole); /* 16,384 rows */
    c.ring_rows = whole.ring_rows;
    PLAN(p);
    CHECK_EQ(p.forward.minibatch_rows, whole.forward.minibatch_rows);
    CHECK_EQ(p.backward.minibatch_rows, whole.backward.minibatch_rows);
    c.ring_rows = 4352;
    PLAN(p);
    CHECK_EQ(p.forward.minibatch_rows, 11 * 128);
    CHECK_EQ(p.backward.minibatch_rows, 11 * 128);
    c.save = MOK_SAVE_ALL;
    PLAN(p);
    CHECK_EQ(p.forward.minibatch_rows, 11 * 128);
    CHECK_EQ(p.backward.minibatch_rows, 6 * 128);
    c.minibatch_rows = 17 * 128;
    PLAN(p);
    CHECK_EQ(p.backward.minibatch_rows, 6 * 128);
    c.ring_rows = 256, c.minibatch_rows = 0, c.minibatch_rows_bwd = 128;
    PLAN(p);
    CHECK_EQ(p.forward.minibatch_rows, 128);
#undef PLAN
}

/* A GPU with more SMs than any Hopper: operands in MXFP8 are kept as they are; those of weight gradients of bf16, widened. */
TEST(plan_of_MXFP8_on_Blackwell)
{
    mok_config c = good_config();
    mok_plan hopper = MOK_INIT(mok_plan), blackwell = MOK_INIT(mok_plan);
    mok_buffer_info on_hopper[MK_NUM_BUFFERS], on_blackwell[MK_NUM_BUFFERS];
    int32_t num = MK_NUM_BUFFERS;
    c.dtype = MOK_MXFP8;
    c.backend = MOK_BACKEND_CUDA;
    c.ring_rows = 8192;
    CHECK_EQ(mok_plan_query(&c, 4, 0, 144, 0, 0, &hopper, on_hopper, &num), MOK_OK);
    CHECK_EQ(mok_plan_query(&c, 4, 0, 148, 0, 0, &blackwell, on_blackwell, &num), MOK_OK);
    const int64_t rows = hopper.ring_rows, weights = 6 * hopper.experts_count * c.hidden * c.intermediate;
    CHECK_EQ(blackwell.ring_rows, rows);
    CHECK_EQ(bytes_of(on_hopper, "wide_weights"), 2 * weights);
    CHECK_EQ(hopper.wide_bytes, weights);
    CHECK_EQ(blackwell.wide_bytes, 0);
    CHECK_EQ(bytes_of(on_hopper, "scaled_"), 0);
    CHECK_EQ(bytes_of(on_hopper, "ring_x"), 2 * rows * c.hidden);
    CHECK_EQ(bytes_of(on_blackwell, "wide_"), 0);
    CHECK_EQ(bytes_of(on_blackwell, "scaled_"), weights + 3 * hopper.experts_count * (mok_mx_scale_bytes(c.hidden, c.intermediate) + mok_mx_scale_bytes(c.intermediate, c.hidden)));
    CHECK_EQ(bytes_of(on_blackwell, "ring_x"), rows * c.hidden + mok_mx_scale_bytes(rows, c.hidden));
    CHECK_EQ(bytes_of(on_blackwell, "dgrad_"), 2 * (rows * c.intermediate + mok_mx_scale_bytes(rows, c.intermediate)));
    CHECK_EQ(bytes_of(on_hopper, "wgrad_x"), 2 * rows * c.hidden);
    CHECK_EQ(bytes_of(on_hopper, "wgrad_dgate") + bytes_of(on_hopper, "wgrad_dup") + bytes_of(on_hopper, "wgrad_h"), 0);
    CHECK_EQ(bytes_of(on_blackwell, "wgrad_x"), rows * c.hidden + mok_mx_scale_bytes(c.hidden, rows));
    CHECK_EQ(bytes_of(on_blackwell, "wgrad_dout"), bytes_of(on_blackwell, "wgrad_x"));
    CHECK_EQ(bytes_of(on_blackwell, "wgrad_dgate"), rows * c.intermediate + mok_mx_scale_bytes(c.intermediate, rows));
    CHECK_EQ(bytes_of(on_blackwell, "wgrad_dup"), bytes_of(on_blackwell, "wgrad_dgate"));
    CHECK_EQ(bytes_of(on_blackwell, "wgrad_h"), bytes_of(on_blackwell, "wgrad_dgate"));
    c.mx_wgrad_bf16 = true;
    CHECK_EQ(mok_plan_query(&c, 4, 0, 148, 0, 0, &blackwell, on_blackwell, &num), MOK_OK);
    CHECK_EQ(bytes_of(on_blackwell, "wgrad_x"), 2 * rows * c.hidden);
    CHECK_EQ(bytes_of(on_blackwell, "wgrad_dgate") + bytes_of(on_blackwell, "wgrad_dup") + bytes_of(on_blackwell, "wgrad_h"), 0);
    c.dtype = MOK_BF16;
    c.mx_wgrad_bf16 = false;
    CHECK_EQ(mok_plan_query(&c, 4, 0, 148, 0, 0, &blackwell, on_blackwell, &num), MOK_OK);
    CHECK_EQ(bytes_of(on_blackwell, "scaled_") + bytes_of(on_blackwell, "dgrad_"), 0);
}

TEST(the_default_time_out_comes_from_the_environment)
{
    static const struct { const char *wish; int64_t ms; } cases[] = {{"1234", 1234}, {"0", 0}, {"-5", 0}, {"12s", 0}, {"", 0}, {"2592000001", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mok_config c = MOK_INIT(mok_config);
        mk_dims d;
        c.hidden = c.intermediate = 64;
        c.num_experts = c.topk = c.max_tokens = 1;
        mok_config said = c; /* then nobody looks at the environment */
        said.timeout_ms = 77;
        setenv("MOK_TIMEOUT_MS", cases[i].wish, 1);
        mok_status status = mk_resolve(&c, 1, 0, mk_default_machine(MOK_BACKEND_CPU), &d);
        CHECK_EQ(status, cases[i].ms ? MOK_OK : MOK_E_ENV);
        if (cases[i].ms)
            CHECK_EQ(c.timeout_ms, cases[i].ms);
        else
            CHECK(strstr(mok_last_error(), cases[i].wish));
        CHECK_EQ(mk_resolve(&said, 1, 0, mk_default_machine(MOK_BACKEND_CPU), &d), MOK_OK);
        CHECK_EQ(said.timeout_ms, 77);

        int64_t ms = -1; /* the same for those who ask */
        CHECK_EQ(mok_timeout(0, &ms), status);
        CHECK_EQ(ms, cases[i].ms ? cases[i].ms : -1);
        CHECK_EQ(mok_timeout(77, &ms), MOK_OK);
        CHECK_EQ(ms, 77);
        CHECK_EQ(mok_timeout(2592000001, &ms), MOK_E_ARG);
        CHECK_EQ(mok_timeout(-1, &ms), MOK_E_ARG);
        CHECK_EQ(ms, 77);
        mok_bootstrap b = MOK_INIT(mok_bootstrap);
        mok_group *group = NULL;
        b.timeout_ms = INT64_MAX;
        CHECK_EQ(mok_group_create_processes(&b, 0, 1, &group), MOK_E_ARG);
        CHECK_STR(mok_last_error(), "mok_bootstrap.timeout_ms is 9223372036854775807: it must be from 0 to 2592000000");
    }
    CHECK_EQ(mok_timeout(0, NULL), MOK_E_ARG);
    unsetenv("MOK_TIMEOUT_MS");
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
