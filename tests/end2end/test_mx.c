/* MXFP8 layers. The reference is a plain layer of one process in the words of docs/contract.md: it quantises every operand where it is
 * used, row by row, knows no ranks, rings or saved rows, and must have the library's bits. */
#include "cpu/run.h"
#include "rig.h"

typedef struct base { layer_problem p; layer_result want; } base;

/* --- the plain layer -------------------------------------------------------------------------------------------------------- */
typedef struct mx_expert {
    mk_bf16 *gate_h, *up_h, *down_i; /* quantised along the forward's contraction: [I, H], [I, H], [H, I] */
    mk_bf16 *gate_i, *up_i, *down_h; /* along the backward's */
} mx_expert;

typedef struct mx_row { mk_bf16 *gate, *up, *dgate, *dup, *wh; } mx_row; /* of one route, [I] each; gate and up after the round trip */

typedef struct mx_layer {
    const layer_problem *p;
    int64_t tokens, hidden, width, topk;
    mk_bf16 *x, *dout;  /* [N, H], quantised */
    mx_row *rows;       /* [N, K] */
    double worst;       /* of all sums: |fp32 - double| / (2^-24 * sum of sizes) */
    int64_t longest;
} mx_layer;

static mk_bf16 *bf16s(int64_t n) { return (mk_bf16 *)malloc(sizeof(mk_bf16) * (size_t)(n + 1)); }

/* The contract's sum, next to the same in double: the implementation's own operands, the error of fp32. */
static float dot(mx_layer *l, float acc, const mk_bf16 *a, int64_t sa, const mk_bf16 *b, int64_t sb, int64_t n)
{
    double exact = acc, size = fabs((double)acc);
    for (int64_t k = 0; k < n; k++) {
        float x = mk_bf16_to_float(a[k * sa]), y = mk_bf16_to_float(b[k * sb]);
        acc = fmaf(x, y, acc);
        exact += (double)x * y;
        size += fabs((double)x * y);
    }
    if (size > 0)
        l->worst = fmax(l->worst, fabs(acc - exact) / (0x1p-24 * size));
    l->longest = mk_max(l->longest, n);
    return acc;
}

static mk_bf16 *rounded_rows(const mk_bf16 *from, int64_t rows, int64_t cols)
{
    mk_bf16 *to = bf16s(rows * cols);
    for (int64_t r = 0; r < rows; r++)
        mk_cpu_mx_round(from + r * cols, cols, to + r * cols);
    return to;
}

static mk_bf16 *rounded_columns(const mk_bf16 *from, int64_t rows, int64_t cols)
{
    mk_bf16 *to = bf16s(rows * cols);
    mk_cpu_mx_round_columns(from, cols, rows, cols, to);
    return to;
}

static mx_expert expert_open(const mx_layer *l, int64_t e)
{
    int64_t h = l->hidden, w = l->width, at = e * h * w;
    const layer_problem *p = l->p;
    return (mx_expert){rounded_rows(p->gate + at, w, h), rounded_rows(p->up + at, w, h), rounded_rows(p->down + at, h, w),
                       rounded_columns(p->gate + at, w, h), rounded_columns(p->up + at, w, h), rounded_columns(p->down + at, h, w)};
}

static void expert_close(mx_expert *x)
{
    mk_bf16 *all[] = {x->gate_h, x->up_h, x->down_i, x->gate_i, x->up_i, x->down_h};
    for (int i = 0; i < 6; i++)
        free(all[i]);
}

static void forward_route(mx_layer *l, const mx_expert *e, int64_t route, mk_bf16 *y)
{
    int64_t w = l->width, h = l->hidden;
    const mk_bf16 *x = l->x + route / l->topk * h;
    mx_row *r = &l->rows[route];
    mk_bf16 *act = bf16s(w);
    *r = (mx_row){bf16s(w), bf16s(w), bf16s(w), bf16s(w), bf16s(w)};
    for (int64_t i = 0; i < w; i++) {
        r->gate[i] = mk_float_to_bf16(dot(l, 0, x, 1, e->gate_h + i * h, 1, h));
        r->up[i] = mk_float_to_bf16(dot(l, 0, x, 1, e->up_h + i * h, 1, h));
    }
    mk_cpu_s3_swiglu(r->gate, r->up, act, w, l->p->cfg.swiglu_limit);
    mk_cpu_mx_round(act, w, act);
    for (int64_t o = 0; o < h; o++)
        y[o] = mk_float_to_bf16(dot(l, 0, act, 1, e->down_i + o * w, 1, w));
    mk_cpu_mx_round(r->gate, w, r->gate);
    mk_cpu_mx_round(r->up, w, r->up);
    free(act);
}

static void backward_route(mx_layer *l, const mx_expert *e, int64_t route, mk_bf16 *dx, float *dw)
{
    int64_t w = l->width, h = l->hidden;
    const mk_bf16 *dout = l->dout + route / l->topk * h;
    mx_row *r = &l->rows[route];
    float *dh = (float *)malloc(sizeof *dh * (size_t)w);
    mk_bf16 *dgate = bf16s(w), *dup = bf16s(w);
    for (int64_t i = 0; i < w; i++)
        dh[i] = dot(l, 0, dout, 1, e->down_h + i, w, h);
    *dw = 0;
    for (int64_t i = 0; i < w; i += 64)
        *dw += mk_cpu_s3_swiglu_bwd(dh + i, r->gate + i, r->up + i, l->p->router_weights[route], r->dgate + i, r->dup + i, r->wh + i, 64,
                                    l->p->cfg.swiglu_limit);
    mk_cpu_mx_round(r->dgate, w, dgate);
    mk_cpu_mx_round(r->dup, w, dup);
    for (int64_t c = 0; c < h; c++)
        dx[c] = mk_float_to_bf16(dot(l, dot(l, 0, dgate, 1, e->gate_i + c, h, w), dup, 1, e->up_i + c, h, w));
    free(dh);
    free(dgate);
    free(dup);
}

/* left^T right over `rows` rows; both quantised along the rows, or not. */
static void weight_gradient(mx_layer *l, const mk_bf16 *left, const mk_bf16 *right, int64_t rows, int64_t outputs, int64_t inputs, float *to)
{
    bool quantise = !l->p->cfg.mx_wgrad_bf16;
    mk_bf16 *a = quantise ? rounded_columns(left, rows, outputs) : NULL, *b = quantise ? rounded_columns(right, rows, inputs) : NULL;
    for (int64_t n = 0; n < outputs; n++)
        for (int64_t k = 0; k < inputs; k++)
            to[n * inputs + k] = dot(l, 0, (a ? a : left) + n, outputs, (b ? b : right) + k, inputs, rows);
    free(a);
    free(b);
}

/* The expert's routes in the order of the contract: (g mod S, g div S, k). */
static int64_t rows_of_expert(const mx_layer *l, int64_t e, int64_t *routes)
{
    int64_t shard = (l->tokens + 63) / 64, n = 0;
    for (int64_t j = 0; j < shard; j++)
        for (int64_t g = j; g < l->tokens; g += shard)
            for (int64_t k = 0; k < l->topk; k++)
                if (l->p->expert_ids[g * l->topk + k] == e)
                    routes[n++] = g * l->topk + k;
    return n;
}

static mk_bf16 *gather(const mx_layer *l, const int64_t *routes, int64_t n, int64_t width, const mk_bf16 *of_tokens, size_t field)
{
    mk_bf16 *to = bf16s(n * width);
    for (int64_t i = 0; i < n; i++) {
        const mk_bf16 *from = of_tokens ? of_tokens + routes[i] / l->topk * width : *(mk_bf16 **)(void *)((char *)&l->rows[routes[i]] + field);
        memcpy(to + i * width, from, sizeof *to * (size_t)width);
    }
    return to;
}

static void run_expert(mx_layer *l, int64_t e, mk_bf16 *slots, mk_bf16 *dslots, layer_result *r)
{
    int64_t *routes = (int64_t *)malloc(sizeof *routes * (size_t)(l->tokens * l->topk)), n = rows_of_expert(l, e, routes), h = l->hidden, w = l->width;
    mx_expert expert = expert_open(l, e);
    for (int64_t i = 0; i < n; i++) {
        forward_route(l, &expert, routes[i], slots + routes[i] * h);
        backward_route(l, &expert, routes[i], dslots + routes[i] * h, &r->drouter_weights[routes[i]]);
    }
    mk_bf16 *x = gather(l, routes, n, h, l->x, 0), *dout = gather(l, routes, n, h, l->dout, 0), *wh = gather(l, routes, n, w, NULL, offsetof(mx_row, wh));
    mk_bf16 *dgate = gather(l, routes, n, w, NULL, offsetof(mx_row, dgate)), *dup = gather(l, routes, n, w, NULL, offsetof(mx_row, dup));
    weight_gradient(l, dgate, x, n, w, h, (float *)r->dgate + e * h * w);
    weight_gradient(l, dup, x, n, w, h, (float *)r->dup + e * h * w);
    weight_gradient(l, dout, wh, n, h, w, (float *)r->ddown + e * h * w);
    mk_bf16 *all[] = {x, dout, wh, dgate, dup};
    for (int i = 0; i < 5; i++)
        free(all[i]);
    free(routes);
    expert_close(&expert);
}

static void reduce(const mx_layer *l, const mk_bf16 *slots, bool weighted, mk_bf16 *to)
{
    for (int64_t t = 0; t < l->tokens; t++)
        for (int64_t c = 0; c < l->hidden; c++) {
            float acc = 0;
            for (int64_t route = t * l->topk; route < (t + 1) * l->topk; route++) {
                float v = mk_bf16_to_float(slots[route * l->hidden + c]);
                if (l->p->expert_ids[route] >= 0)
                    acc = weighted ? fmaf(l->p->router_weights[route], v, acc) : acc + v;
            }
            to[t * l->hidden + c] = mk_float_to_bf16(acc);
        }
}

/* Without a shared expert; fp32 gradients. */
static void plain_layer(const layer_problem *p, layer_result *r, double *worst)
{
    mx_layer l = {.p = p, .tokens = p->tokens, .hidden = p->cfg.hidden, .width = p->cfg.intermediate, .topk = p->cfg.topk};
    int64_t routes = l.tokens * l.topk;
    mk_bf16 *slots = bf16s(routes * l.hidden), *dslots = bf16s(routes * l.hidden);
    layer_options o = {.ranks = 1, .grad_dtype = MOK_FP32};
    if (!layer_result_make(r, p, &o))
        exit(1);
    l.x = rounded_rows(p->x, l.tokens, l.hidden);
    l.dout = rounded_rows(p->dout, l.tokens, l.hidden);
    l.rows = (mx_row *)calloc((size_t)routes, sizeof *l.rows);
    memset(r->drouter_weights, 0, sizeof(float) * (size_t)routes);
    for (int64_t e = 0; e < p->cfg.num_experts; e++)
        run_expert(&l, e, slots, dslots, r);
    reduce(&l, slots, true, r->out);
    reduce(&l, dslots, false, r->dx);
    *worst = l.worst / (double)l.longest;
    for (int64_t i = 0; i < routes; i++) {
        mk_bf16 *all[] = {l.rows[i].gate, l.rows[i].up, l.rows[i].dgate, l.rows[i].dup, l.rows[i].wh};
        for (int f = 0; f < 5; f++)
            free(all[f]);
    }
    free(l.rows);
    free(l.x);
    free(l.dout);
    free(slots);
    free(dslots);
}

static mok_config mx_config(int64_t hidden, int64_t width, int64_t experts, int64_t topk)
{
    mok_config c = ranks_config(hidden, width, experts, topk, 500);
    c.dtype = MOK_MXFP8;
    c.timeout_ms = 0;
    return c;
}

static void against_plain_layer(const layer_problem *p, const layer_options *o)
{
    layer_result want, got;
    double worst;
    plain_layer(p, &want, &worst);
    if (rig_run("the library", p, o, &got))
        ranks_same_results("the plain layer", p, &got, &want, true);
    CHECK_LE(worst, 1); /* n terms, n roundings: as bf16 operands have */
    layer_result_free(&got);
    layer_result_free(&want);
}

TEST(N3_N6_N7_a_layer_has_the_bits_of_one_that_quantises_where_operands_are_used)
{
    static const int64_t shapes[][4] = {{64, 64, 3, 2}, {128, 192, 5, 4}, {576, 64, 3, 1}, {64, 640, 2, 2}};
    for (int s = 0; s < (RANKS_SLOW ? 2 : 4); s++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            layer_problem p;
            mok_config c = mx_config(shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3]);
            c.mx_wgrad_bf16 = bf16;
            c.swiglu_limit = s == 1 ? 1.5f : 0;
            if (!layer_make(&p, &c, s < 2 ? 90 : 40, LAYER_UNIFORM, 0.1, test_seed() + (uint64_t)s))
                exit(1);
            layer_options o = {.ranks = 1 + s, .grad_dtype = MOK_FP32, .cpu_threads = 1, .ring_rows = 256, .minibatch_rows = 128, .minibatch_rows_bwd = 128,
                               .save = s % 2 ? MOK_SAVE_ALL : MOK_SAVE_NONE, .before_pass = rig_poison, .mx_prequantised = bf16};
            against_plain_layer(&p, &o);
            layer_free(&p);
        }
}

/* --- rows of public reports -------------------------------------------------------------------------------------------------- */

/* Routes by hand: expert e gets counts[e] tokens, one route each. */
static void counted_layer(layer_problem *p, const int64_t *counts, int64_t experts)
{
    int64_t tokens = 0, at = 0;
    for (int64_t e = 0; e < experts; e++)
        tokens += counts[e];
    mok_config c = mx_config(128, 128, experts, 1);
    if (!layer_make(p, &c, tokens, LAYER_UNIFORM, 0, test_seed()))
        exit(1);
    for (int64_t e = 0; e < experts; e++)
        for (int64_t i = 0; i < counts[e]; i++)
            p->expert_ids[at++] = (int32_t)e;
    uint64_t state = test_seed(); /* in any order */
    for (int64_t i = tokens - 1; i > 0; i--) {
        int64_t j = test_below(&state, i + 1);
        int32_t id = p->expert_ids[i];
        p->expert_ids[i] = p->expert_ids[j];
        p->expert_ids[j] = id;
    }
}

TEST(S5_experts_with_any_number_of_tokens)
{
    static const int64_t counts[][5] = {{44, 1, 31, 33, 0}, {0, 0, 65, 129, 2}};
    for (int i = 0; i < 2; i++)
        for (int32_t ranks = 1; ranks <= 4; ranks += 3) {
            layer_problem p;
            counted_layer(&p, counts[i], 5);
            layer_options o = {.ranks = ranks, .grad_dtype = MOK_FP32, .cpu_threads = 1, .before_pass = rig_poison};
            against_plain_layer(&p, &o);
            layer_free(&p);
        }
}

TEST(N1_padding_rows_of_NaN_do_not_matter_in_any_pass)
{
    static const int64_t counts[] = {1, 3, 130, 0, 7};
    layer_problem p;
    layer_result once, thrice;
    counted_layer(&p, counts, 5);
    layer_options o = {.ranks = 2, .ring_rows = 256, .minibatch_rows = 128, .minibatch_rows_bwd = 128, .cpu_threads = 1, .save = MOK_SAVE_NONE,
                       .before_pass = rig_poison};
    rig_run("one pass", &p, &o, &once);
    o.repeat = 3;
    rig_run("three passes", &p, &o, &thrice);
    ranks_same_results("three passes", &p, &thrice, &once, true);
    for (int64_t i = 0; i < p.tokens * p.cfg.hidden; i++)
        if (!isfinite(layer_float(thrice.out[i])) || !isfinite(layer_float(thrice.dx[i]))) {
            TEST_FAILED("out or dx has a NaN at %lld", (long long)i);
            break;
        }
    CHECK_EQ(thrice.stats[0].mx_not_finite + thrice.stats[1].mx_not_finite, 0);
    layer_result_free(&once);
    layer_result_free(&thrice);
    layer_free(&p);
}

/* Rows of tokens other than `bad`: as without. */
static void check_neighbours(const uint16_t *got, const uint16_t *want, int64_t bad)
{
    for (int64_t t = 0; t < 60; t++)
        if (t != bad)
            CHECK_BYTES(got + t * 128, want + t * 128, 256);
        else
            for (int64_t i = 0; i < 128; i++)
                CHECK(isnan(layer_float(got[t * 128 + i])));
}

static int64_t not_finite(const layer_result *r) { return r->stats[0].mx_not_finite + r->stats[1].mx_not_finite; }

TEST(NaN_and_infinity_stay_in_their_rows_and_are_counted)
{
    layer_problem p;
    layer_result got, want;
    mok_config c = mx_config(128, 192, 4, 2);
    if (!layer_make(&p, &c, 60, LAYER_UNIFORM, 0, test_seed()))
        exit(1);
    layer_options o = {.ranks = 2, .cpu_threads = 1};
    rig_run("clean", &p, &o, &want);
    CHECK_EQ(not_finite(&want), 0);
    for (int i = 0; i < 2; i++) { /* x: one element, then h of the token's rows */
        uint16_t before = p.x[7 * 128 + 5 + i];
        p.x[7 * 128 + 5 + i] = i ? 0xffc1 : 0x7f80;
        o.forward_only = true;
        rig_run("x is not finite", &p, &o, &got);
        check_neighbours(got.out, want.out, 7);
        CHECK_EQ(not_finite(&got), 1 + 2 * 192);
        p.x[7 * 128 + 5 + i] = before;
        layer_result_free(&got);
    }
    p.dout[31 * 128 + 127] = 0xff80; /* dout: one element, then dgate and dup */
    o.forward_only = false;
    rig_run("dout is not finite", &p, &o, &got);
    CHECK_BYTES(got.out, want.out, 60 * 256);
    check_neighbours(got.dx, want.dx, 31);
    CHECK_EQ(not_finite(&got), 1 + 2 * 192 * 2);
    layer_result_free(&got);
    layer_result_free(&want);
    layer_free(&p);
}

/* --- what must not change a bit -------------------------------------------------------------------------------------------------- */
static void open_base(base *b, int64_t tokens, layer_routing routing)
{
    mok_config c = mx_config(128, 192, 7, 3);
    c.shared_intermediate = 64;
    c.shared_gate = true;
    layer_options o = {.ranks = 1, .ring_rows = 1 << 14, .save = MOK_SAVE_ALL, .cpu_threads = 1};
    if (!layer_make(&b->p, &c, tokens, routing, 0.05, test_seed()))
        exit(1);
    rig_run("the base", &b->p, &o, &b->want);
    CHECK_EQ(b->want.stats[0].rows_replayed + b->want.stats[0].ring_rotations, 0);
}

static void close_base(base *b)
{
    layer_result_free(&b->want);
    layer_free(&b->p);
}

static void same(const base *b, const layer_options *o, rig_counts *counts)
{
    layer_result got;
    char what[160];
    snprintf(what, sizeof what, "ranks %d, ring %lld, save %d (%lld rows)%s%s%s", o->ranks, (long long)o->ring_rows, (int)o->save, (long long)o->save_rows,
             o->recompute ? ", recompute" : "", o->two_call_backward ? ", two calls" : "", o->mx_prequantised ? ", prequantised" : "");
    if (rig_run(what, &b->p, o, &got)) {
        ranks_same_results(what, &b->p, &got, &b->want, true);
        rig_count(counts, &got);
    }
    layer_result_free(&got);
}

TEST(N5_bits_over_ranks_rings_save_policies_and_who_quantises)
{
    base b;
    rig_counts counts = {0};
    open_base(&b, 400, LAYER_UNIFORM);
    for (int i = 0; i < (RANKS_SLOW ? 6 : 24); i++) {
        static const int32_t ranks[] = {1, 2, 4, 8, 3, 5};
        layer_options o = {.ranks = ranks[i % 6], .ring_rows = 256 + 128 * (i % 4), .minibatch_rows = 128, .minibatch_rows_bwd = 128,
                           .save = (mok_save)(i % 5), .save_rows = i % 5 == MOK_SAVE_ROWS ? 200 : 0, .recompute = i % 3 == 1, .two_call_backward = i % 7 == 2,
                           .mx_prequantised = i % 2, .experts_by_pointer = i % 4 == 2, .cpu_threads = 1 + i % 2, .before_pass = rig_poison};
        same(&b, &o, &counts);
    }
    rig_print_counts(&counts);
    CHECK(counts.rotations > 10);
    CHECK(counts.copied > 1000);
    CHECK(counts.replayed > 1000);
    CHECK(counts.pulled_peer > 1000);
    close_base(&b);
}

TEST(R6_bits_where_one_expert_has_everything)
{
    base b;
    rig_counts counts = {0};
    open_base(&b, 200, LAYER_ONE_EXPERT);
    for (int i = 0; i < 4; i++) {
        layer_options o = {.ranks = 1 << i, .ring_rows = 256 + 128 * i, .minibatch_rows = 128, .minibatch_rows_bwd = 128, .cpu_threads = 1};
        same(&b, &o, &counts);
    }
    CHECK(counts.continued >= 5);
    CHECK(counts.rotations >= 3);
    close_base(&b);
}

/* The shared expert computes in bf16 from the caller's own x and dout, quantised routed rows or not. */
TEST(a_shared_expert_alone_is_a_bf16_layer)
{
    layer_problem p;
    layer_result mx, bf16;
    mok_config c = mx_config(128, 64, 3, 2);
    c.shared_intermediate = 192;
    c.shared_gate = true;
    if (!layer_make(&p, &c, 150, LAYER_UNIFORM, 1.0, test_seed()))
        exit(1);
    layer_options o = {.ranks = 2, .cpu_threads = 1, .before_pass = rig_poison};
    rig_run("MXFP8", &p, &o, &mx);
    p.cfg.dtype = MOK_BF16;
    rig_run("bf16", &p, &o, &bf16);
    ranks_same_results("the shared expert", &p, &mx, &bf16, true);
    CHECK_BYTES(mx.dshared_gate, bf16.dshared_gate, 2 * 192 * 128 * 2);
    CHECK_BYTES(mx.dshared_up, bf16.dshared_up, 2 * 192 * 128 * 2);
    CHECK_BYTES(mx.dshared_down, bf16.dshared_down, 2 * 192 * 128 * 2);
    CHECK_BYTES(mx.dshared_output_gate, bf16.dshared_output_gate, 2 * 128 * 2);
    layer_result_free(&mx);
    layer_result_free(&bf16);
    layer_free(&p);
}

/* --- memory; links --------------------------------------------------------------------------------------------------------------------- */
TEST(P6_rows_pulled_are_half_the_bytes_and_counts_are_the_schedules)
{
    layer_problem p;
    layer_result got[2];
    mok_config c = mx_config(256, 64, 8, 3);
    if (!layer_make(&p, &c, 300, LAYER_UNIFORM, 0, test_seed()))
        exit(1);
    layer_options o = {.ranks = 4, .cpu_threads = 1, .ring_rows = 256, .minibatch_rows = 128, .minibatch_rows_bwd = 128};
    for (int i = 0; i < 2; i++) {
        p.cfg.dtype = i ? MOK_BF16 : MOK_MXFP8;
        rig_run(i ? "bf16" : "MXFP8", &p, &o, &got[i]);
        for (int32_t r = 0; r < 4; r++) {
            CHECK_EQ(got[i].stats[r].bytes_pulled_peer, got[i].info[r].bytes_pulled_peer_fwd + got[i].info[r].bytes_pulled_peer_bwd);
            CHECK_EQ(got[i].stats[r].bytes_pushed_peer, got[i].info[r].bytes_pushed_peer_fwd + got[i].info[r].bytes_pushed_peer_bwd);
        }
    }
    for (int32_t r = 0; r < 4; r++) {
        const mok_stats *mx = &got[0].stats[r], *bf16 = &got[1].stats[r];
        CHECK_EQ(mx->rows_pulled_peer, bf16->rows_pulled_peer);
        CHECK_EQ(mx->bytes_pushed_peer, bf16->bytes_pushed_peer);
        CHECK_LE((double)mx->bytes_pulled_peer, 0.52 * (double)bf16->bytes_pulled_peer);
        CHECK(mx->bytes_pulled_peer > 0);
    }
    for (int i = 0; i < 2; i++)
        layer_result_free(&got[i]);
    layer_free(&p);
}

TEST(saved_rows_and_published_tokens_are_half_the_memory)
{
    mok_config c = mx_config(7168, 2048, 384, 8);
    mok_plan mx = MOK_INIT(mok_plan), bf16 = MOK_INIT(mok_plan);
    c.max_tokens = 2048;
    REQUIRE(mok_plan_query(&c, 64, 0, 0, 0, 0, &mx, NULL, NULL) == MOK_OK);
    c.dtype = MOK_BF16;
    REQUIRE(mok_plan_query(&c, 64, 0, 0, 0, 0, &bf16, NULL, NULL) == MOK_OK);
    CHECK_EQ(mx.saved_rows, bf16.saved_rows);
    CHECK_LE((double)mx.context_bytes, 0.52 * (double)bf16.context_bytes);
    CHECK_EQ(bf16.heap_bytes - mx.heap_bytes, 2 * 2048 * (2 * 7168 - 7168 - 7168 / 32)); /* x and dout */
    double less = (2 * 7168 - 7168 - 7168 / 32) * 63.0 / 64; /* of a row that 63 of 64 ranks have to pull */
    CHECK_EQ(bf16.forward.link_bytes_in - mx.forward.link_bytes_in, less * (double)mx.balanced_rows);
    CHECK_EQ(bf16.backward.link_bytes_in - mx.backward.link_bytes_in, 2 * less * (double)mx.balanced_rows);
    CHECK_EQ(bf16.forward.link_bytes_out - mx.forward.link_bytes_out, less * 2048 * 8);
    CHECK_EQ(bf16.backward.link_bytes_out - mx.backward.link_bytes_out, 2 * less * 2048 * 8);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
