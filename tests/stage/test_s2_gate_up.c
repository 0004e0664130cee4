/* s2_gate_up and its backward, against plain loops: the forward in double within one rounding, and bit for bit with one fused
 * multiply-add per k, ascending, from zero. */
#include "stage.h"

static float dot_row(const stage *s, int which, bool shared, int64_t expert, int64_t n, const mk_bf16 *x, double *exact, double *size)
{
    float acc = 0;
    *exact = *size = 0;
    for (int64_t k = 0; k < s->cfg.hidden; k++) {
        float a = mk_bf16_to_float(x[k]), b = stage_weight(s, which, shared, expert, n, k);
        acc = fmaf(a, b, acc);
        *exact += (double)a * b;
        *size += fabs((double)a * b);
    }
    return acc;
}

static void check_row(const stage *s, bool shared, int64_t expert, int64_t row, const mk_bf16 *x, const mk_bf16 *gate, const mk_bf16 *up)
{
    int64_t width = shared ? s->cfg.shared_intermediate : s->cfg.intermediate;
    for (int64_t n = 0; n < width; n += STAGE_STEP(width)) {
        double exact, size;
        float g = dot_row(s, 0, shared, expert, n, x, &exact, &size);
        stage_near("gate", row, n, mk_bf16_to_float(gate[n]), exact, size * 0x1p-20);
        stage_same("gate", row, n, gate[n], mk_float_to_bf16(g));
        float u = dot_row(s, 1, shared, expert, n, x, &exact, &size);
        stage_near("up", row, n, mk_bf16_to_float(up[n]), exact, size * 0x1p-20);
        stage_same("up", row, n, up[n], mk_float_to_bf16(u));
    }
}

static void check_h(const stage *s, int64_t row, const mk_bf16 *gate, const mk_bf16 *up, const mk_bf16 *h, int64_t width)
{
    for (int64_t n = 0; n < width; n++) {
        double g = mk_bf16_to_float(gate[n]), u = mk_bf16_to_float(up[n]), limit = s->cfg.swiglu_limit;
        if (limit > 0) {
            g = fmin(g, limit);
            u = fmax(fmin(u, limit), -limit);
        }
        stage_near("h", row, n, mk_bf16_to_float(h[n]), g / (1 + exp(-g)) * u, 1e-30);
    }
}

static void keep_all(mok_config *c) { c->save = MOK_SAVE_ALL; }
static void keep_none(mok_config *c) { c->save = MOK_SAVE_NONE; }
static void keep_one_tile(mok_config *c) { c->save = MOK_SAVE_ROWS; c->save_rows = 128; }
static void keep_all_limited(mok_config *c) { c->save = MOK_SAVE_ALL; c->swiglu_limit = 0.75f; }

/* Forward: gate/up of saved rows in the context, h in the ring. */
static void check_forward(int shape, bool shared, void (*change)(mok_config *))
{
    stage s;
    if (!stage_open_shape(&s, shape, shared, change))
        return;
    mk_cpu_run *run = stage_pass(&s, MK_PASS_FORWARD);
    int64_t hidden = s.cfg.hidden, width = s.cfg.intermediate, ws = s.cfg.shared_intermediate;
    mk_bf16 *x = (mk_bf16 *)(void *)(s.w->heap + s.w->memory.x);
    stage_fill_rows(&s, run->ring_x, hidden, 1);
    stage_fill(&s, x, s.tokens * hidden, 1);
    stage_each(&s, MK_TASK_GATE_UP, mk_cpu_s2_gate_up);
    stage_each(&s, MK_TASK_SHARED_GATE_UP, mk_cpu_s2_gate_up);
    for (int64_t r = 0; r < s.rows; r++) {
        bool saved = r < run->d->saved_tiles * MK_ROW_TILE;
        if (!stage_valid(&s, r)) {
            stage_untouched("padding of ring_h", run->ring_h + r * width, 2 * width);
            if (saved)
                stage_untouched("padding of saved_gate", run->saved_gate + r * width, 2 * width);
            continue;
        }
        if (saved) {
            check_row(&s, false, stage_expert(&s, r), r, run->ring_x + r * hidden, run->saved_gate + r * width, run->saved_up + r * width);
            check_h(&s, r, run->saved_gate + r * width, run->saved_up + r * width, run->ring_h + r * width, width);
        }
        stage_untouched("ring_gate", run->ring_gate + r * width, 2 * width); /* the forward has no use for it */
    }
    for (int64_t t = 0; t < s.tokens && ws && run->keep_shared; t++) {
        check_row(&s, true, 0, t, x + t * hidden, run->saved_shared_gate + t * ws, run->saved_shared_up + t * ws);
        check_h(&s, t, run->saved_shared_gate + t * ws, run->saved_shared_up + t * ws, run->shared_h + t * ws, ws);
    }
    stage_close(&s);
}

TEST(s2_forward_saves_gate_and_up)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check_forward(i, true, keep_all);
}
TEST(s2_forward_saves_some_rows)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check_forward(i, true, keep_one_tile);
}
TEST(s2_forward_with_limit)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check_forward(i, true, keep_all_limited);
}

/* What is not kept is computed again, with the same bits: recompute into the context, backward into the ring. */
static void check_replay(int shape)
{
    stage s, b;
    if (!stage_open_shape(&s, shape, true, keep_all) || !stage_open_shape(&b, shape, true, keep_none))
        return;
    mk_cpu_run *forward = stage_pass(&s, MK_PASS_FORWARD), *replay = stage_pass(&b, MK_PASS_BACKWARD);
    int64_t hidden = s.cfg.hidden, width = s.cfg.intermediate, ws = s.cfg.shared_intermediate;
    CHECK_EQ(b.rows, s.rows);
    b.weights = s.weights;
    stage_fill_rows(&s, forward->ring_x, hidden, 1);
    memcpy(replay->ring_x, forward->ring_x, (size_t)(s.rows * hidden) * 2);
    stage_fill(&s, (mk_bf16 *)(void *)(s.w->heap + s.w->memory.x), s.tokens * hidden, 1);
    memcpy(b.w->heap + b.w->memory.x, s.w->heap + s.w->memory.x, (size_t)(s.tokens * hidden) * 2);
    stage_each(&s, MK_TASK_GATE_UP, mk_cpu_s2_gate_up);
    stage_each(&s, MK_TASK_SHARED_GATE_UP, mk_cpu_s2_gate_up);
    CHECK(stage_each(&b, MK_TASK_GATE_UP, mk_cpu_s2_gate_up) > 0);
    stage_each(&b, MK_TASK_SHARED_GATE_UP, mk_cpu_s2_gate_up);
    CHECK_BYTES(replay->ring_gate, forward->saved_gate, (size_t)(s.rows * width) * 2);
    CHECK_BYTES(replay->ring_up, forward->saved_up, (size_t)(s.rows * width) * 2);
    CHECK_BYTES(replay->shared_gate, forward->saved_shared_gate, (size_t)(s.tokens * ws) * 2);
    CHECK_BYTES(replay->shared_up, forward->saved_shared_up, (size_t)(s.tokens * ws) * 2);
    CHECK_EQ(replay->counted.rows_replayed, replay->table.head->num_rows);
    int64_t rows = s.rows, tokens = s.tokens; /* and a recompute, over what the forward has saved */
    mk_bf16 *gate = malloc((size_t)(rows * width + 1) * 2), *shared = malloc((size_t)(tokens * ws + 1) * 2);
    memcpy(gate, forward->saved_gate, (size_t)(rows * width) * 2);
    memcpy(shared, forward->saved_shared_up, (size_t)(tokens * ws) * 2);
    stage_pass(&s, MK_PASS_RECOMPUTE);
    memset(s.run.saved_gate, 0xff, (size_t)(rows * width) * 2);
    memset(s.run.saved_shared_up, 0xff, (size_t)(tokens * ws) * 2);
    stage_each(&s, MK_TASK_GATE_UP, mk_cpu_s2_gate_up);
    stage_each(&s, MK_TASK_SHARED_GATE_UP, mk_cpu_s2_gate_up);
    CHECK_BYTES(s.run.saved_gate, gate, (size_t)(rows * width) * 2);
    CHECK_BYTES(s.run.saved_shared_up, shared, (size_t)(tokens * ws) * 2);
    free(gate);
    free(shared);
    stage_close(&s);
    stage_close(&b);
}

TEST(s2_replay_and_recompute_have_the_forwards_bits)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check_replay(i);
}

/* --- backward: dx_k = dgate Wg + dup Wu ------------------------------------------------------------------------------------------ */
static float dx_of(const stage *s, bool shared, int64_t expert, int64_t col, const mk_bf16 *dgate, const mk_bf16 *dup, double *exact, double *size)
{
    int64_t width = shared ? s->cfg.shared_intermediate : s->cfg.intermediate;
    float acc = 0;
    *exact = *size = 0;
    for (int which = 0; which < 2; which++) /* gate first, in one accumulator */
        for (int64_t n = 0; n < width; n++) {
            float a = mk_bf16_to_float((which ? dup : dgate)[n]), b = stage_weight(s, which, shared, expert, n, col);
            acc = fmaf(a, b, acc);
            *exact += (double)a * b;
            *size += fabs((double)a * b);
        }
    return acc;
}

static void gated(mok_config *c) { c->shared_gate = c->shared_intermediate > 0; }

static void check_backward(int shape, void (*change)(mok_config *))
{
    stage s;
    if (!stage_open_shape(&s, shape, true, change))
        return;
    mk_cpu_run *run = stage_pass(&s, MK_PASS_BACKWARD);
    int64_t hidden = s.cfg.hidden, width = s.cfg.intermediate, ws = s.cfg.shared_intermediate, groups = width / 64, topk = s.cfg.topk;
    stage_fill_rows(&s, run->ring_gate, width, 1);
    stage_fill_rows(&s, run->ring_up, width, 1);
    for (int64_t r = 0; r < s.rows; r++)
        for (int64_t g = 0; g < groups && stage_valid(&s, r); g++)
            run->ring_dweight[r * groups + g] = (float)test_normal(&s.state);
    stage_fill(&s, run->shared_gate, s.tokens * ws, 1);
    stage_fill(&s, run->shared_up, s.tokens * ws, 1);
    for (int64_t i = 0; i < s.tokens * (ws / 64); i++)
        run->shared_dpartial[i] = (float)test_normal(&s.state);
    for (int64_t t = 0; t < s.tokens && ws; t++)
        run->shared_scale[t] = (float)test_uniform(&s.state);
    stage_each(&s, MK_TASK_DGRAD_GATE_UP, mk_cpu_s2_gate_up_bwd);
    stage_each(&s, MK_TASK_SHARED_DGRAD_GATE_UP, mk_cpu_s2_gate_up_bwd);
    const mk_bf16 *slots = (const mk_bf16 *)(const void *)(s.w->heap + s.w->memory.slots);
    const float *dweights = (const float *)(const void *)(s.w->heap + s.w->memory.dweight_slots);
    bool *pushed = calloc((size_t)(s.tokens * topk + 1), 1);
    for (int64_t r = 0; r < s.rows; r++) {
        if (!stage_valid(&s, r))
            continue;
        int64_t slot = run->table.rows[r].src_slot;
        pushed[slot] = true;
        for (int64_t col = 0; col < hidden; col += STAGE_STEP(hidden)) {
            double exact, size;
            float dx = dx_of(&s, false, stage_expert(&s, r), col, run->ring_gate + r * width, run->ring_up + r * width, &exact, &size);
            stage_near("dx_k", r, col, mk_bf16_to_float(slots[slot * hidden + col]), exact, size * 0x1p-20);
            stage_same("dx_k", r, col, slots[slot * hidden + col], mk_float_to_bf16(dx));
        }
        float dw = 0;
        for (int64_t g = 0; g < groups; g++)
            dw += run->ring_dweight[r * groups + g];
        stage_same("dw", r, 0, stage_bits(dweights[slot]), stage_bits(dw));
    }
    for (int64_t i = 0; i < s.tokens * topk; i++)
        if (!pushed[i])
            stage_untouched("slot of a dropped route", slots + i * hidden, 2 * hidden);
    free(pushed);
    for (int64_t t = 0; t < s.tokens && ws; t++)
        for (int64_t col = 0; col < hidden; col += STAGE_STEP(hidden)) {
            double exact, size;
            float dx = dx_of(&s, true, 0, col, run->shared_gate + t * ws, run->shared_up + t * ws, &exact, &size), scale = run->shared_scale[t], ds = 0;
            for (int64_t g = 0; g < ws / 64; g++)
                ds += run->shared_dpartial[t * (ws / 64) + g];
            if (s.cfg.shared_gate) {
                float wgate = mk_bf16_to_float(((const mk_bf16 *)s.weights.shared_output_gate)[col]);
                exact += (double)ds * scale * (1 - (double)scale) * wgate;
                size += fabs((double)ds * wgate);
                dx = fmaf(ds * (scale * (1.0f - scale)), wgate, dx);
            }
            stage_near("shared dx", t, col, mk_bf16_to_float(run->shared_y[t * hidden + col]), exact, size * 0x1p-20);
            stage_same("shared dx", t, col, run->shared_y[t * hidden + col], mk_float_to_bf16(dx));
        }
    stage_close(&s);
}

TEST(s2_backward_pushes_dx_and_dw)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check_backward(i, NULL);
}
TEST(s2_backward_adds_the_shared_gates_part)
{
    for (int i = 1; i < STAGE_NUM_SHAPES; i++)
        check_backward(i, gated);
}

/* The same in every way that weights may lie. */
static mok_gate_up lay_gate_up;
static mok_weight_layout lay_layout;
static void lay(mok_config *c)
{
    c->save = MOK_SAVE_ALL;
    c->gate_up = lay_gate_up;
    c->weight_layout = lay_layout;
}
TEST(s2_with_weights_in_every_layout)
{
    for (int i = 0; i < 6; i++) {
        lay_gate_up = (mok_gate_up)(i % 3);
        lay_layout = (mok_weight_layout)(i / 3);
        check_forward(1, true, lay);
        check_forward(3, true, lay);
        check_backward(1, lay);
        check_backward(4, lay);
    }
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
