/* Weights and gradients in every form a caller may have them, through the public functions, over several ranks: whatever the form,
 * the same bits as separate [outputs, inputs] matrices, packed. */
#include "../multi/ranks.h"

enum { E = 5, K = 2, H = 128, I = 192, IS = 64, TOKENS = 90, P = 3 };

typedef struct form { mok_gate_up gate_up; mok_weight_layout layout; bool pointers; } form;

typedef struct matrix { int64_t outputs, inputs; } matrix; /* of gate and up, or of down */

/* Where element (n, k) of gate (part 0), up (1) or down (2) of an expert lies in that form. */
static int64_t place(const form *f, int part, matrix m, int64_t n, int64_t k)
{
    bool one = part < 2 && f->gate_up != MOK_GATE_UP_SEPARATE;
    int64_t rows = one ? 2 * m.outputs : m.outputs, row = n;
    if (one && f->gate_up == MOK_GATE_UP_COMBINED)
        row = part * m.outputs + n;
    if (one && f->gate_up == MOK_GATE_UP_INTERLEAVED)
        row = 2 * n + part;
    return f->layout == MOK_WEIGHT_KN ? k * rows + row : row * m.inputs + k;
}

static int64_t stored(const form *f, int part, matrix m) { return m.outputs * m.inputs * (part < 2 && f->gate_up != MOK_GATE_UP_SEPARATE ? 2 : 1); }

/* Copies between the plain form (separate, NK) and that form. */
static void convert(const form *f, int part, matrix m, int64_t experts, uint16_t *plain, uint16_t *formed, bool back)
{
    for (int64_t e = 0; e < experts; e++)
        for (int64_t n = 0; n < m.outputs; n++)
            for (int64_t k = 0; k < m.inputs; k++) {
                uint16_t *a = plain + (e * m.outputs + n) * m.inputs + k, *b = formed + e * stored(f, part, m) + place(f, part, m, n, k);
                if (back)
                    *a = *b;
                else
                    *b = *a;
            }
}

/* One rank's memory of a formed matrix; as pointers each expert has its own, in no order. */
typedef struct formed { uint16_t *packed; void *experts[E]; int64_t elements; } formed;

static void make_formed(formed *m, int64_t elements, int64_t experts, bool pointers)
{
    m->elements = elements;
    m->packed = ranks_block(2 * elements * (experts ? experts : 1));
    for (int64_t e = 0; e < experts; e++)
        m->experts[e] = pointers ? ranks_block(2 * elements) : NULL;
}

static void spread(formed *m, int64_t experts, bool gather)
{
    for (int64_t e = 0; e < experts && m->experts[0]; e++)
        memcpy(gather ? (void *)(m->packed + e * m->elements) : m->experts[e], gather ? m->experts[e] : (void *)(m->packed + e * m->elements),
               (size_t)m->elements * 2);
}

static void free_formed(formed *m, int64_t experts)
{
    for (int64_t e = 0; e < experts; e++)
        free(m->experts[e]);
    free(m->packed);
}

static mok_weight weight_of(const formed *m, bool pointers)
{
    mok_weight w = {0};
    if (pointers)
        w.experts = (const void *const *)m->experts;
    else
        w.packed = m->packed;
    return w;
}

static mok_grad grad_of(const formed *m, bool pointers)
{
    mok_grad g = {0};
    if (pointers)
        g.experts = m->experts;
    else
        g.packed = m->packed;
    return g;
}

typedef struct job { layer_problem p; layer_result want, got; form f; } job;

static const matrix wide = {I, H}, tall = {H, I}, shared_wide = {IS, H}, shared_tall = {H, IS};

static void body(ranks_env *e)
{
    job *j = e->user;
    const form *f = &j->f;
    bool one = f->gate_up != MOK_GATE_UP_SEPARATE;
    ranks_part part = ranks_part_of(e, TOKENS, NULL);
    void *schedule = ranks_schedule_block(e), *context = ranks_context_block(e);
    int64_t experts = e->plan.experts_count, at = e->plan.experts_first * I * H;
    /* 0 gate, 1 up, 2 down; 3 to 5 the shared expert's */
    uint16_t *plain[6] = {j->p.gate + at, j->p.up + at, j->p.down + at, j->p.shared_gate, j->p.shared_up, j->p.shared_down};
    uint16_t *plain_grad[6] = {(uint16_t *)j->got.dgate + at, (uint16_t *)j->got.dup + at, (uint16_t *)j->got.ddown + at,
                               (uint16_t *)j->got.dshared_gate + e->rank * IS * H, (uint16_t *)j->got.dshared_up + e->rank * IS * H,
                               (uint16_t *)j->got.dshared_down + e->rank * IS * H};
    formed w[6], g[6];
    memset(w, 0, sizeof w);
    memset(g, 0, sizeof g);
    for (int i = 0; i < 6; i++) {
        matrix m = i == 2 ? tall : i == 5 ? shared_tall : i < 3 ? wide : shared_wide;
        int64_t count = i < 3 ? experts : 1;
        formed *to = one && i % 3 == 1 ? &w[i - 1] : &w[i];
        if (to == &w[i]) {
            make_formed(&w[i], stored(f, i % 3, m), count, f->pointers);
            make_formed(&g[i], stored(f, i % 3, m), count, f->pointers);
        }
        convert(f, i % 3, m, count, plain[i], to->packed, false);
    }
    for (int i = 0; i < 6; i++)
        spread(&w[i], i < 3 ? experts : 1, false);

    mok_schedule_args s = ranks_schedule_args(&j->p, part, schedule);
    mok_forward_args a = ranks_forward_args(e, &j->p, part, schedule, context, &j->got);
    mok_backward_args b = ranks_backward_args(e, &j->p, part, schedule, context, &j->got);
    mok_weights weights = {.gate = weight_of(&w[0], f->pointers), .down = weight_of(&w[2], f->pointers), .shared_gate = weight_of(&w[3], f->pointers),
                           .shared_down = weight_of(&w[5], f->pointers), .shared_output_gate = j->p.shared_output_gate};
    mok_grads grads = {.gate = grad_of(&g[0], f->pointers), .down = grad_of(&g[2], f->pointers), .shared_gate = grad_of(&g[3], f->pointers),
                       .shared_down = grad_of(&g[5], f->pointers), .shared_output_gate = b.grads.shared_output_gate};
    if (!one) {
        weights.up = weight_of(&w[1], f->pointers);
        weights.shared_up = weight_of(&w[4], f->pointers);
        grads.up = grad_of(&g[1], f->pointers);
        grads.shared_up = grad_of(&g[4], f->pointers);
    }
    a.weights = b.weights = weights;
    b.grads = grads;
    RANKS_OK(mok_schedule(e->w, &s, NULL));
    RANKS_OK(mok_forward(e->w, &a, NULL));
    RANKS_OK(mok_backward(e->w, &b, NULL));
    for (int i = 0; i < 6; i++)
        spread(&g[i], i < 3 ? experts : 1, true);
    for (int i = 0; i < 6; i++) {
        matrix m = i == 2 ? tall : i == 5 ? shared_tall : i < 3 ? wide : shared_wide;
        convert(f, i % 3, m, i < 3 ? experts : 1, plain_grad[i], one && i % 3 == 1 ? g[i - 1].packed : g[i].packed, true);
    }
    for (int i = 0; i < 6; i++) {
        free_formed(&w[i], i < 3 ? experts : 1);
        free_formed(&g[i], i < 3 ? experts : 1);
    }
    free(schedule);
    free(context);
}

static mok_config config(void)
{
    mok_config c = ranks_config(H, I, E, K, TOKENS);
    c.shared_intermediate = IS;
    c.shared_gate = true;
    return c;
}

static void open_job(job *j)
{
    mok_config c = config();
    layer_options o = {.ranks = P};
    char error[512];
    if (!layer_make(&j->p, &c, TOKENS, LAYER_UNIFORM, 0.1, test_seed()) || !layer_result_make(&j->want, &j->p, &o))
        exit(1);
    if (layer_run(&j->p, &o, &j->want, error) != MOK_OK)
        TEST_FAILED("%s", error);
}

static void same_shared(const job *j)
{
    size_t n = (size_t)P * IS * H * 2;
    CHECK_BYTES(j->got.dshared_gate, j->want.dshared_gate, n);
    CHECK_BYTES(j->got.dshared_up, j->want.dshared_up, n);
    CHECK_BYTES(j->got.dshared_down, j->want.dshared_down, n);
    CHECK_BYTES(j->got.dshared_output_gate, j->want.dshared_output_gate, (size_t)P * H * 2);
}

TEST(M7_every_layout_has_the_same_bits)
{
    job j;
    open_job(&j);
    for (int i = 0; i < 12; i++) {
        layer_options o = {.ranks = P};
        mok_config c = config();
        j.f = (form){(mok_gate_up)(i % 3), (mok_weight_layout)(i / 3 % 2), i / 6};
        c.gate_up = j.f.gate_up;
        c.weight_layout = j.f.layout;
        if (!layer_result_make(&j.got, &j.p, &o))
            exit(1);
        ranks_run(P, &c, body, &j);
        char what[64];
        snprintf(what, sizeof what, "gate_up %d, layout %d, %s", (int)j.f.gate_up, (int)j.f.layout, j.f.pointers ? "pointers" : "packed");
        ranks_same_results(what, &j.p, &j.got, &j.want, true);
        same_shared(&j);
        layer_result_free(&j.got);
    }
    layer_result_free(&j.want);
    layer_free(&j.p);
}

TEST(layer_run_by_pointers)
{
    job j;
    char error[512];
    open_job(&j);
    layer_options o = {.ranks = P, .experts_by_pointer = true};
    if (!layer_result_make(&j.got, &j.p, &o))
        exit(1);
    CHECK_EQ(layer_run(&j.p, &o, &j.got, error), MOK_OK);
    ranks_same_results("pointers", &j.p, &j.got, &j.want, true);
    layer_result_free(&j.got);
    layer_result_free(&j.want);
    layer_free(&j.p);
}

/* --- which gradients -------------------------------------------------------------------------------------------------------------- */
typedef struct choice { layer_problem p; layer_result want; } choice;

/* Frozen experts, matrices that nobody wants, and the flags; each leaves the rest's bits alone. */
static void chosen(ranks_env *e)
{
    choice *j = e->user;
    ranks_part part = ranks_part_of(e, TOKENS, NULL);
    void *schedule = ranks_schedule_block(e), *context = ranks_context_block(e);
    int64_t experts = e->plan.experts_count, at = e->plan.experts_first * I * H, one = I * H;
    layer_result got;
    layer_options o = {.ranks = P};
    if (!layer_result_make(&got, &j->p, &o))
        exit(1);
    mok_schedule_args s = ranks_schedule_args(&j->p, part, schedule);
    mok_forward_args f = ranks_forward_args(e, &j->p, part, schedule, context, &got);
    mok_backward_args all = ranks_backward_args(e, &j->p, part, schedule, context, &got);
    RANKS_OK(mok_schedule(e->w, &s, NULL));
    RANKS_OK(mok_forward(e->w, &f, NULL));

    void *gate[E], *up[E], *down[E];
    uint32_t ready[E + 1];
    mok_backward_args b = all;
    for (int64_t x = 0; x < experts; x++) { /* every second expert is frozen, another one in each matrix */
        gate[x] = x % 2 ? NULL : (uint16_t *)got.dgate + at + x * one;
        up[x] = x % 2 ? (uint16_t *)got.dup + at + x * one : NULL;
        down[x] = NULL;
    }
    b.grads.gate = (mok_grad){.experts = gate};
    b.grads.up = (mok_grad){.experts = up};
    b.grads.down = (mok_grad){.experts = down};
    b.grads.shared_up = (mok_grad){0};
    b.grads.ready = ready;
    b.grads.ready_value = 41;
    memset(ready, 0, sizeof ready);
    b.parts = MOK_BACKWARD_DATA; /* no gradient is written, so no flag either */
    RANKS_OK(mok_backward(e->w, &b, NULL));
    for (int64_t x = 0; x <= experts; x++)
        CHECK_EQ(ready[x], 0);
    b.parts = MOK_BACKWARD_ALL;
    RANKS_OK(mok_backward(e->w, &b, NULL));
    for (int64_t x = 0; x < experts; x++) { /* of experts without rows and of frozen ones too */
        CHECK_EQ(ready[x], 41);
        const uint16_t *poison = (const uint16_t *)got.ddown + at + x * one;
        for (int64_t i = 0; i < one; i++)
            if (poison[i] != 0xffff) {
                TEST_FAILED("the frozen down of expert %lld was written", (long long)x);
                break;
            }
        const uint16_t *dgate = (const uint16_t *)got.dgate + at + x * one, *dup = (const uint16_t *)got.dup + at + x * one;
        if (x % 2) {
            CHECK_EQ(dgate[0], 0xffff);
            CHECK_BYTES(dup, (const uint16_t *)j->want.dup + at + x * one, (size_t)one * 2);
        } else {
            CHECK_EQ(dup[one - 1], 0xffff);
            CHECK_BYTES(dgate, (const uint16_t *)j->want.dgate + at + x * one, (size_t)one * 2);
        }
    }
    CHECK_EQ(ready[experts], 0);
    CHECK_EQ(((const uint16_t *)got.dshared_up)[e->rank * IS * H], 0xffff);
    size_t n = (size_t)part.tokens * H * 2;
    CHECK_BYTES(got.dx + part.first * H, j->want.dx + part.first * H, n);

    /* No weight gradient at all, and no router-weight gradient. */
    memset(got.dx, 0xff, (size_t)TOKENS * H * 2);
    memset(got.drouter_weights, 0xff, (size_t)TOKENS * K * 4);
    b = all;
    memset(&b.grads, 0, sizeof b.grads);
    b.drouter_weights = NULL;
    RANKS_OK(mok_backward(e->w, &b, NULL));
    CHECK_BYTES(got.dx + part.first * H, j->want.dx + part.first * H, n);
    for (int64_t i = 0; i < TOKENS * K; i++)
        CHECK(isnan(got.drouter_weights[i]));

    /* Weights alone, without dx. */
    b = all;
    b.parts = MOK_BACKWARD_WEIGHTS;
    b.dx = NULL;
    b.drouter_weights = NULL;
    RANKS_OK(mok_backward(e->w, &b, NULL));
    CHECK_BYTES((uint16_t *)got.ddown + at, (const uint16_t *)j->want.ddown + at, (size_t)(experts * one) * 2);
    CHECK_BYTES((uint16_t *)got.dgate + at, (const uint16_t *)j->want.dgate + at, (size_t)(experts * one) * 2);
    CHECK_BYTES((uint16_t *)got.dshared_up + e->rank * IS * H, (const uint16_t *)j->want.dshared_up + e->rank * IS * H, IS * H * 2);
    layer_result_free(&got);
    free(schedule);
    free(context);
}

TEST(frozen_unwanted_and_ready)
{
    job j;
    open_job(&j);
    choice c = {j.p, j.want};
    mok_config cfg = config();
    ranks_run(P, &cfg, chosen, &c);
    layer_result_free(&j.want);
    layer_free(&j.p);
}

/* --- formats --------------------------------------------------------------------------------------------------------------------- */
/* Two halves accumulated are not the whole (roundings differ), but fresh fp32 and bf16 agree exactly. */
TEST(fresh_bf16_is_fp32_rounded_once)
{
    job j;
    char error[512];
    open_job(&j);
    layer_options o = {.ranks = P, .grad_dtype = MOK_FP32};
    if (!layer_result_make(&j.got, &j.p, &o))
        exit(1);
    CHECK_EQ(layer_run(&j.p, &o, &j.got, error), MOK_OK);
    for (int64_t i = 0; i < (int64_t)E * I * H; i++)
        if (((const uint16_t *)j.want.ddown)[i] != layer_bf16(((const float *)j.got.ddown)[i]) ||
            ((const uint16_t *)j.want.dup)[i] != layer_bf16(((const float *)j.got.dup)[i])) {
            TEST_FAILED("element %lld differs", (long long)i);
            break;
        }
    layer_result_free(&j.got);
    layer_result_free(&j.want);
    layer_free(&j.p);
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
