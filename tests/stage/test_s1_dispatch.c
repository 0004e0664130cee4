/* s1_dispatch: rows in the ring are the rows of the tokens that the table names; padding is not touched; copies, which are within a tile here, go with pulls. */
#include "stage.h"

static void dispatch(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task)
{
    (void)scratch;
    mk_cpu_s1_dispatch(run, task);
    /* as finish_task in cpu/pass.c: a later tile may copy from this one */
    mk_cpu_signal(run, MK_COUNTER_s1_rows_arrived, task.tile,
                  (uint32_t)mk_valid_rows(&run->table, task.tile));
}

static void check_pass(int shape, mk_pass pass, bool need_x)
{
    stage s;
    if (!stage_open_shape(&s, shape, false, NULL))
        return;
    mk_cpu_run *run = stage_pass(&s, pass);
    const mk_memory *m = &s.w->memory;
    int64_t hidden = s.cfg.hidden, topk = s.cfg.topk, valid = 0;
    mk_bf16 *x = (mk_bf16 *)(void *)(s.w->heap + m->x), *dout = (mk_bf16 *)(void *)(s.w->heap + m->dout);
    float *weights = (float *)(void *)(s.w->heap + m->router_weights);
    run->need_x = need_x;
    stage_fill(&s, x, s.tokens * hidden, 1);
    stage_fill(&s, dout, s.tokens * hidden, 1);
    for (int64_t i = 0; i < s.tokens * topk; i++)
        weights[i] = (float)test_normal(&s.state);
    CHECK_EQ(stage_each(&s, MK_TASK_DISPATCH, dispatch), run->walk.num_tiles);
    for (int64_t r = 0; r < s.rows; r++) {
        const mk_row *row = &run->table.rows[r];
        if (row->src_rank < 0) {
            stage_untouched("padding of ring_x", run->ring_x + r * hidden, 2 * hidden);
            stage_untouched("padding of ring_dout", run->ring_dout + r * hidden, 2 * hidden);
            stage_untouched("padding of ring_weight", run->ring_weight + r, 4);
            continue;
        }
        int64_t token = row->src_slot / topk;
        valid++;
        if (need_x)
            CHECK_BYTES(run->ring_x + r * hidden, x + token * hidden, (size_t)hidden * 2);
        else
            stage_untouched("ring_x", run->ring_x + r * hidden, 2 * hidden);
        if (pass == MK_PASS_BACKWARD) {
            CHECK_BYTES(run->ring_dout + r * hidden, dout + token * hidden, (size_t)hidden * 2);
            CHECK_EQ(stage_bits(run->ring_weight[r]), stage_bits(weights[row->src_slot]));
        } else {
            stage_untouched("ring_dout", run->ring_dout + r * hidden, 2 * hidden);
        }
    }
    const mk_schedule_head *h = run->table.head;
    int64_t copied = pass == MK_PASS_BACKWARD ? h->rows_copied_bwd : h->rows_copied_fwd;
    CHECK_EQ(run->counted.rows, valid);
    CHECK_EQ(run->counted.rows_copied, copied);
    CHECK_EQ(run->counted.rows_pulled, valid - copied);
    CHECK_EQ(run->counted.rows_padding, s.rows - valid);
    CHECK_EQ(run->counted.rows_pulled_peer, 0);
    if (topk > 1 && s.tokens > 4 && s.cfg.num_experts <= 3)
        CHECK(copied > 0);
    const int32_t *copies_out = pass == MK_PASS_BACKWARD ? run->table.copies_out_bwd : run->table.copies_out_fwd;
    for (int64_t t = 0; t < run->walk.num_tiles; t++)
        CHECK_EQ(run->counters[mk_counter_index(run->d, MK_COUNTER_s1_copies_done, t)], copies_out[t]);
    stage_close(&s);
}

TEST(s1_forward_pulls_and_copies_x)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check_pass(i, MK_PASS_FORWARD, true);
}
TEST(s1_backward_brings_dout_weights_and_x)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check_pass(i, MK_PASS_BACKWARD, true);
}
TEST(s1_backward_leaves_x_where_nothing_needs_it)
{
    for (int i = 0; i < STAGE_NUM_SHAPES; i++)
        check_pass(i, MK_PASS_BACKWARD, false);
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
