/* s4_down and its backward against plain loops: y pushed to its slot, bit for bit with one fma per column; dh' unweighted into
 * dgate, dup, w h and the partial sums of the router-weight gradient. */
#include "stage.h"

static float y_of(const stage *s, bool shared, int64_t expert, int64_t col, const mk_bf16 *h, double *exact, double *size)
{
    int64_t width = shared ? s->cfg.shared_intermediate : s->cfg.intermediate;
    float acc = 0;
    *exact = *size = 0;
    for (int64_t i = 0; i < width; i++) {
        float a = mk_bf16_to_float(h[i]), b = stage_weight(s, 2, shared, expert, col, i);
        acc = fmaf(a, b, acc);
        *exact += (double)a * b;
        *size += fabs((double)a * b);
    }
    return acc;
}

static void check_forward(int shape, void (*change)(mok_config *))
{
    stage s;
    if (!stage_open_shape(&s, shape, true, change))
        return;
    mk_cpu_run *run = stage_pass(&s, MK_PASS_FORWARD);
    int64_t hidden = s.cfg.hidden, width = s.cfg.intermediate, ws = s.cfg.shared_intermediate, step = STAGE_STEP(hidden);
    stage_fill_rows(&s, run->ring_h, width, 1);
    stage_fill(&s, run->shared_h, s.tokens * ws, 1);
    stage_each(&s, MK_TASK_DOWN, mk_cpu_s4_down);
    stage_each(&s, MK_TASK_SHARED_DOWN, mk_cpu_s4_down);
    const mk_bf16 *slots = (const mk_bf16 *)(const void *)(s.w->heap + s.w->memory.slots);
    bool *pushed = calloc((size_t)(s.tokens * s.cfg.topk + 1), 1);
    double exact, size;
    for (int64_t r = 0; r < s.rows; r++) {
        if (!stage_valid(&s, r))
            continue;
        int64_t slot = run->table.rows[r].src_slot;
        CHECK(!pushed[slot]);
        pushed[slot] = true;
        for (int64_t col = 0; col < hidden; col += step) {
            float y = y_of(&s, false, stage_expert(&s, r), col, run->ring_h + r * width, &exact, &size);
            stage_near("y", r, col, mk_bf16_to_float(slots[slot * hidden + col]), exact, size * 0x1p-20);
            stage_same("y", r, col, slots[slot * hidden + col], mk_float_to_bf16(y));
        }
    }
    for (int64_t i = 0; i < s.tokens * s.cfg.topk; i++)
        if (!pushed[i])
            stage_untouched("slot of a dropped route", slots + i * hidden, 2 * hidden);
    for (int64_t t = 0; t < s.tokens && ws; t++)
        for (int64_t col = 0; col < hidden; col += step) {
            float y = y_of(&s, true, 0, col, run->shared_h + t * ws, &exact, &size);
            stage_near("shared y", t, col, mk_bf16_to_float(run->shared_y[t * hidden + col]), exact, size * 0x1p-20);
            stage_same("shared y", t, col, run->shared_y[t * hidden + col], mk_float_to_bf16(y));
        }
    CHECK_EQ(run->counted.bytes_pushed_peer, 0);
    free(pushed);
    stage_close(&s);
}

TEST(s4_forward_pushes_y)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check_forward(i, NULL);
}

static float dh_of(const stage *s, bool shared, int64_t expert, int64_t i, const mk_bf16 *dout)
{
    float acc = 0;
    for (int64_t k = 0; k < s->cfg.hidden; k++)
        acc = fmaf(mk_bf16_to_float(dout[k]), stage_weight(s, 2, shared, expert, k, i), acc);
    return acc;
}

/* One row: dh' by a plain loop, the rest through s3, which has its own test. */
static void check_row(const stage *s, bool shared, int64_t expert, int64_t r, const mk_bf16 *dout, const mk_bf16 *gate, const mk_bf16 *up, float weight,
                      const mk_bf16 *dgate, const mk_bf16 *dup, const mk_bf16 *weighted, const float *partial)
{
    int64_t width = shared ? s->cfg.shared_intermediate : s->cfg.intermediate;
    for (int64_t g = 0; g < width / 64; g += RANKS_SLOW ? 4 : 1 + (width > 256) * 3) {
        float dh[64];
        mk_bf16 a[64], b[64], c[64];
        for (int64_t i = 0; i < 64; i++)
            dh[i] = dh_of(s, shared, expert, g * 64 + i, dout);
        float sum = mk_cpu_s3_swiglu_bwd(dh, gate + g * 64, up + g * 64, weight, a, b, c, 64, s->cfg.swiglu_limit);
        for (int64_t i = 0; i < 64; i++) {
            stage_same("dgate", r, g * 64 + i, dgate[g * 64 + i], a[i]);
            stage_same("dup", r, g * 64 + i, dup[g * 64 + i], b[i]);
            stage_same("w h", r, g * 64 + i, weighted[g * 64 + i], c[i]);
        }
        stage_same("partial", r, g, stage_bits(partial[g]), stage_bits(sum));
    }
}

/* replayed: gate and up lie in the ring, where dgate and dup will lie; else in the context, which must stay as it is. */
static void check_backward(int shape, bool replayed, void (*change)(mok_config *))
{
    stage s;
    if (!stage_open_shape(&s, shape, true, change))
        return;
    mk_cpu_run *run = stage_pass(&s, MK_PASS_BACKWARD);
    int64_t hidden = s.cfg.hidden, width = s.cfg.intermediate, ws = s.cfg.shared_intermediate, tokens = s.tokens;
    mk_bf16 *gate = stage_own(&s, s.rows * width * 2), *up = stage_own(&s, s.rows * width * 2);
    mk_bf16 *shared_gate = stage_own(&s, tokens * ws * 2), *shared_up = stage_own(&s, tokens * ws * 2);
    stage_fill_rows(&s, gate, width, 1);
    stage_fill_rows(&s, up, width, 1);
    stage_fill(&s, shared_gate, tokens * ws, 1);
    stage_fill(&s, shared_up, tokens * ws, 1);
    memcpy(replayed ? run->ring_gate : run->saved_gate, gate, (size_t)(s.rows * width) * 2);
    memcpy(replayed ? run->ring_up : run->saved_up, up, (size_t)(s.rows * width) * 2);
    if (ws) {
        memcpy(replayed ? run->shared_gate : run->saved_shared_gate, shared_gate, (size_t)(tokens * ws) * 2);
        memcpy(replayed ? run->shared_up : run->saved_shared_up, shared_up, (size_t)(tokens * ws) * 2);
    }
    CHECK_EQ(run->walk.replay_from, replayed ? 0 : run->walk.num_tiles);
    mk_bf16 *dout = (mk_bf16 *)(void *)(s.w->heap + s.w->memory.dout);
    stage_fill(&s, dout, tokens * hidden, 1);
    stage_fill_rows(&s, run->ring_dout, hidden, 1);
    for (int64_t r = 0; r < s.rows; r++)
        if (stage_valid(&s, r))
            run->ring_weight[r] = r % 5 ? (float)test_normal(&s.state) : 0;
    for (int64_t t = 0; t < tokens && ws; t++)
        run->shared_scale[t] = (float)test_uniform(&s.state);
    stage_each(&s, MK_TASK_DGRAD_DOWN, mk_cpu_s4_down_bwd);
    stage_each(&s, MK_TASK_SHARED_DGRAD_DOWN, mk_cpu_s4_down_bwd);
    for (int64_t r = 0; r < s.rows; r++) {
        if (stage_valid(&s, r)) {
            check_row(&s, false, stage_expert(&s, r), r, run->ring_dout + r * hidden, gate + r * width, up + r * width, run->ring_weight[r],
                      run->ring_gate + r * width, run->ring_up + r * width, run->ring_h + r * width, run->ring_dweight + r * (width / 64));
        } else {
            stage_untouched("padding of ring_h", run->ring_h + r * width, 2 * width);
            stage_untouched("padding of ring_dweight", run->ring_dweight + r * (width / 64), 4 * (width / 64));
        }
    }
    for (int64_t t = 0; t < tokens && ws; t++)
        check_row(&s, true, 0, t, dout + t * hidden, shared_gate + t * ws, shared_up + t * ws, run->shared_scale[t], run->shared_gate + t * ws,
                  run->shared_up + t * ws, run->shared_h + t * ws, run->shared_dpartial + t * (ws / 64));
    if (!replayed) {
        CHECK_BYTES(run->saved_gate, gate, (size_t)(s.rows * width) * 2); /* the context is read only */
        CHECK_BYTES(run->saved_shared_up, shared_up, (size_t)(tokens * ws) * 2);
    }
    stage_close(&s);
}

static void keep_all(mok_config *c) { c->save = MOK_SAVE_ALL; }
static void keep_none(mok_config *c) { c->save = MOK_SAVE_NONE; }
static void limited(mok_config *c) { c->save = MOK_SAVE_ALL; c->swiglu_limit = 0.8f; }
static mok_weight_layout lay_layout;
static mok_gate_up lay_gate_up;
static void lay(mok_config *c)
{
    c->save = MOK_SAVE_ALL;
    c->weight_layout = lay_layout;
    c->gate_up = lay_gate_up;
}

TEST(s4_backward_of_saved_rows)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check_backward(i, false, keep_all);
}
TEST(s4_backward_of_replayed_rows_in_place)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check_backward(i, true, keep_none);
}
TEST(s4_backward_with_limit)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check_backward(i, false, limited);
}
TEST(s4_with_weights_in_every_layout)
{
    for (int i = 0; i < 6; i++) {
        lay_layout = (mok_weight_layout)(i % 2);
        lay_gate_up = (mok_gate_up)(i / 2);
        check_forward(1, lay);
        check_forward(4, lay);
        check_backward(1, false, lay);
        check_backward(3, false, lay);
    }
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
