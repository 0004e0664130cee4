/* MXFP8 through the public header: quantisation of matrices and its refusals, and which parts of a quantised weight each pass wants. */
#include "../multi/ranks.h"
#include "mx/mx.h"

#define FAILS(call, want, words)                                                                                  \
    do {                                                                                                          \
        CHECK_EQ((call), want);                                                                                   \
        CHECK_STR(mok_last_error(), words);                                                                       \
    } while (0)

enum { ROWS = 64, COLS = 192, COUNT = 2, N = COUNT * ROWS * COLS };
static uint16_t source[N];
static uint8_t data[N], turned[N], scales[COUNT * 2 * 512], turned_scales[COUNT * 2 * 512];

static mok_mx_quantise_args matrix(void)
{
    mok_mx_quantise_args a = MOK_INIT(mok_mx_quantise_args);
    a.count = COUNT;
    a.rows = ROWS;
    a.cols = COLS;
    a.source = source;
    a.data = data;
    a.scales = scales;
    a.transposed = turned;
    a.transposed_scales = turned_scales;
    return a;
}

TEST(matrices_are_quantised_both_ways_and_NaN_is_counted)
{
    uint64_t state = test_seed();
    int64_t not_finite = -1;
    for (int64_t i = 0; i < N; i++)
        source[i] = layer_bf16((float)test_normal(&state));
    source[5] = 0x7f80;
    source[N - 1] = 0xffff;
    memset(scales, 0xff, sizeof scales);
    CHECK_EQ(mok_mx_scale_bytes(ROWS, COLS), 2 * 512);
    CHECK_EQ(mok_mx_scale_bytes(COLS, ROWS), 2 * 512);
    mok_mx_quantise_args a = matrix();
    a.not_finite = &not_finite;
    CHECK_EQ(mok_mx_quantise(&a, NULL), MOK_OK);
    CHECK_EQ(not_finite, 2);
    for (int64_t m = 0; m < COUNT; m++)
        for (int64_t r = 0; r < ROWS; r++)
            for (int64_t c = 0; c < COLS; c++) {
                uint16_t x = source[(m * ROWS + r) * COLS + c];
                uint8_t along = scales[m * 1024 + c / 128 * 512 + r % 32 * 16 + r / 32 * 4 + c / 32 % 4];
                uint8_t across = turned_scales[m * 1024 + c / 128 * 512 + c % 32 * 16 + c % 128 / 32 * 4 + r / 32];
                CHECK_EQ(data[(m * ROWS + r) * COLS + c], mk_mx_encode(x, along));
                CHECK_EQ(turned[(m * COLS + c) * ROWS + r], mk_mx_encode(x, across));
            }
    /* Each alone gives the same. */
    uint8_t again[N], again_scales[COUNT * 2 * 512];
    a = matrix();
    a.data = again;
    a.scales = again_scales;
    a.transposed = a.transposed_scales = NULL;
    CHECK_EQ(mok_mx_quantise(&a, NULL), MOK_OK);
    CHECK_BYTES(again, data, sizeof data);
    CHECK_BYTES(again_scales, scales, sizeof scales);
}

TEST(quantisation_refuses_in_one_sentence)
{
    mok_mx_quantise_args a = matrix();
    FAILS(mok_mx_quantise(NULL, NULL), MOK_E_ARG, "mok_mx_quantise_args is NULL");
#define REFUSED(change, want, words)              \
    do {                                          \
        a = matrix();                             \
        change;                                   \
        FAILS(mok_mx_quantise(&a, NULL), want, words); \
    } while (0)
    REFUSED(a.struct_size = 3, MOK_E_ARG, "struct_size is 3");
    REFUSED(a.rows = 48, MOK_E_SHAPE, "rows is 48: it must be a multiple of 32");
    REFUSED(a.cols = -32, MOK_E_SHAPE, "cols is -32");
    REFUSED(a.cols = INT64_MAX - 31, MOK_E_SHAPE, "cols is 9223372036854775776");
    REFUSED(a.count = -1, MOK_E_SHAPE, "count is -1");
    REFUSED(a.count = INT64_MAX, MOK_E_SHAPE, "count is 9223372036854775807, for matrices of 64 x 192");
    REFUSED(a.source = NULL, MOK_E_ARG, "source is NULL");
    REFUSED(a.scales = NULL, MOK_E_ARG, "data is given, but scales is NULL");
    REFUSED(a.transposed = NULL, MOK_E_ARG, "transposed_scales is given, but transposed is NULL");
    REFUSED(a.backend = (mok_backend_id)7, MOK_E_ARG, "backend is 7");
    for (int64_t size = -64; size <= 64; size += 16)
        CHECK_EQ(mok_mx_scale_bytes(size, 32), size > 0 && size % 32 == 0 ? 512 : 0);
    a = matrix();
    a.count = 0; /* nothing to do */
    a.source = NULL;
    CHECK_EQ(mok_mx_quantise(&a, NULL), MOK_OK);
}

/* --- weights of a layer ----------------------------------------------------------------------------------------------------- */
typedef struct weight_case { layer_problem p; layer_result r; } weight_case;

/* Quantised weights of one rank: both quantisations of each matrix. */
static mok_weight quantised(const uint16_t *bf16, int64_t count, int64_t rows, int64_t cols)
{
    mok_mx_quantise_args a = MOK_INIT(mok_mx_quantise_args);
    a.count = count;
    a.rows = rows;
    a.cols = cols;
    a.source = bf16;
    a.data = malloc((size_t)(count * rows * cols));
    a.scales = malloc((size_t)(count * mok_mx_scale_bytes(rows, cols)));
    a.transposed = malloc((size_t)(count * rows * cols));
    a.transposed_scales = malloc((size_t)(count * mok_mx_scale_bytes(cols, rows)));
    CHECK_EQ(mok_mx_quantise(&a, NULL), MOK_OK);
    mok_weight w = {a.data, NULL, a.scales, a.transposed, a.transposed_scales};
    return w;
}

static void free_weight(mok_weight *w)
{
    free((void *)(uintptr_t)w->packed);
    free((void *)(uintptr_t)w->scales);
    free((void *)(uintptr_t)w->transposed);
    free((void *)(uintptr_t)w->transposed_scales);
}

static void try_weights(ranks_env *e)
{
    weight_case *c = e->user;
    const layer_problem *p = &c->p;
    void *schedule = ranks_schedule_block(e), *context = ranks_context_block(e);
    ranks_part part = ranks_part_of(e, p->tokens, NULL);
    mok_weight gate = quantised(p->gate, 4, 64, 128), up = quantised(p->up, 4, 64, 128), down = quantised(p->down, 4, 128, 64), bf16 = {p->gate, NULL, NULL, NULL, NULL};
    const void *const table[4] = {p->gate, p->gate, p->gate, p->gate};
    mok_schedule_args s = ranks_schedule_args(p, part, schedule);
    RANKS_OK(mok_schedule(e->w, &s, NULL));
    mok_forward_args good = ranks_forward_args(e, p, part, schedule, context, &c->r), f;
    good.weights.gate = gate;
    good.weights.up = up;
    good.weights.down = down;
#define FORWARD(change, want, words)                       \
    do {                                                   \
        f = good;                                          \
        change;                                            \
        FAILS(mok_forward(e->w, &f, NULL), want, words);   \
    } while (0)
    FORWARD(f.weights.gate.scales = NULL, MOK_E_ARG, "weights.gate has packed but not scales");
    FORWARD(f.weights.up.packed = NULL, MOK_E_ARG, "weights.up has scales but not packed");
    FORWARD(f.weights.down.transposed = NULL, MOK_E_ARG, "weights.down has transposed_scales but not transposed");
    FORWARD((f.weights.down.packed = f.weights.down.scales = NULL), MOK_E_ARG, "weights.down has no packed and scales, which this call reads");
    FORWARD(f.weights.gate.experts = table, MOK_E_UNSUPPORTED, "weights.gate has experts and MXFP8 parts");
    FORWARD((f.weights.gate = (mok_weight){.packed = NULL}), MOK_E_ARG, "weights.gate has neither packed nor experts");
    FORWARD(f.weights.shared_gate.scales = p->gate, MOK_E_ARG, "weights.shared_gate has MXFP8 parts: only the routed weights");
    f = good; /* only what is read; one of them in bf16 */
    f.weights.gate = bf16;
    f.weights.up.transposed = f.weights.up.transposed_scales = NULL;
    RANKS_OK(mok_forward(e->w, &f, NULL));
    mok_backward_args back = ranks_backward_args(e, p, part, schedule, context, &c->r), b;
    back.weights.gate = gate;
    back.weights.up = up;
    back.weights.down = down;
#define BACKWARD(change, want, words)                      \
    do {                                                   \
        b = back;                                          \
        change;                                            \
        FAILS(mok_backward(e->w, &b, NULL), want, words);  \
    } while (0)
    BACKWARD((b.weights.down.transposed = b.weights.down.transposed_scales = NULL), MOK_E_ARG, "weights.down has no transposed and transposed_scales");
    BACKWARD((b.weights.up.transposed = b.weights.up.transposed_scales = NULL), MOK_E_ARG, "weights.up has no transposed and transposed_scales");
    BACKWARD((b.weights.gate.packed = b.weights.gate.scales = NULL), MOK_E_ARG, "weights.gate has no packed and scales, which this call reads");
    b = back;
    b.weights.down.packed = b.weights.down.scales = NULL;
    RANKS_OK(mok_backward(e->w, &b, NULL));
    free_weight(&gate);
    free_weight(&up);
    free_weight(&down);
    free(schedule);
    free(context);
}

TEST(quantised_weights_need_what_a_pass_reads)
{
    weight_case c;
    mok_config cfg = ranks_config(128, 64, 4, 2, 40);
    layer_options o = {.ranks = 1};
    cfg.dtype = MOK_MXFP8;
    cfg.shared_intermediate = 64;
    cfg.save = MOK_SAVE_NONE;
    REQUIRE(layer_make(&c.p, &cfg, 40, LAYER_UNIFORM, 0, test_seed()) && layer_result_make(&c.r, &c.p, &o));
    ranks_run(1, &cfg, try_weights, &c);
    layer_result_free(&c.r);
    layer_free(&c.p);
}

static void try_layout(ranks_env *e)
{
    weight_case *c = e->user;
    void *schedule = ranks_schedule_block(e);
    ranks_part part = ranks_part_of(e, c->p.tokens, NULL);
    mok_schedule_args s = ranks_schedule_args(&c->p, part, schedule);
    RANKS_OK(mok_schedule(e->w, &s, NULL));
    mok_forward_args f = ranks_forward_args(e, &c->p, part, schedule, NULL, &c->r);
    if (e->cfg.gate_up != MOK_GATE_UP_SEPARATE)
        f.weights.up.packed = NULL;
    f.weights.down.scales = c->p.down;
    FAILS(mok_forward(e->w, &f, NULL), MOK_E_UNSUPPORTED, "weights.down is quantised: weight_layout must be MOK_WEIGHT_NK and gate_up not interleaved");
    free(schedule);
}

TEST(quantised_weights_of_other_layouts_are_refused)
{
    for (int i = 0; i < 2; i++) {
        weight_case c;
        mok_config cfg = ranks_config(128, 64, 4, 2, 40);
        layer_options o = {.ranks = 1, .forward_only = true};
        cfg.dtype = MOK_MXFP8;
        if (i)
            cfg.weight_layout = MOK_WEIGHT_KN;
        else
            cfg.gate_up = MOK_GATE_UP_INTERLEAVED;
        REQUIRE(layer_make(&c.p, &cfg, 40, LAYER_UNIFORM, 0, test_seed()) && layer_result_make(&c.r, &c.p, &o));
        ranks_run(1, &cfg, try_layout, &c);
        layer_result_free(&c.r);
        layer_free(&c.p);
    }
}

int main(int argc, char **argv) { return test_main(argc, argv); }
