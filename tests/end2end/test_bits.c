/* Bits do not depend on ranks, ring, minibatch, save policy, threads, or the run. Each case counts what happened, so that none of it is
 * the same path taken twice. */
#include "rig.h"

/* What one rank with a ring that holds everything computes. */
typedef struct base { layer_problem p; layer_result want; } base;

static mok_config config(void)
{
    mok_config c = ranks_config(128, 128, 7, 3, 500);
    c.shared_intermediate = 64;
    c.shared_gate = true;
    c.timeout_ms = 0;
    return c;
}

static void open_base(base *b, int64_t tokens, layer_routing routing, double dropped, bool forward_only)
{
    mok_config c = config();
    layer_options o = {.ranks = 1, .ring_rows = 1 << 14, .save = MOK_SAVE_ALL, .cpu_threads = 1, .forward_only = forward_only};
    if (!layer_make(&b->p, &c, tokens, routing, dropped, test_seed()))
        exit(1);
    rig_run("the base", &b->p, &o, &b->want);
    CHECK_EQ(b->want.stats[0].ring_rotations, 0);
    CHECK_EQ(b->want.stats[0].wgrad_continued, 0);
    CHECK_EQ(b->want.stats[0].rows_replayed, 0);
}

static void close_base(base *b)
{
    layer_result_free(&b->want);
    layer_free(&b->p);
}

static void describe(char *text, size_t size, const layer_options *o)
{
    snprintf(text, size, "ranks %d, ring %lld, minibatches %lld and %lld, save %d (%lld rows), threads %d%s%s", o->ranks, (long long)o->ring_rows,
             (long long)o->minibatch_rows, (long long)o->minibatch_rows_bwd, (int)o->save, (long long)o->save_rows, o->cpu_threads,
             o->recompute ? ", recompute" : "", o->two_call_backward ? ", backward in two calls" : "");
}

static void compare(const base *b, const layer_options *o, rig_counts *counts)
{
    layer_result got;
    char what[200];
    describe(what, sizeof what, o);
    if (rig_run(what, &b->p, o, &got)) {
        ranks_same_results(what, &b->p, &got, &b->want, !o->forward_only);
        CHECK_BYTES(got.tokens_per_expert, b->want.tokens_per_expert, (size_t)b->p.cfg.num_experts * 8);
        rig_count(counts, &got);
    }
    layer_result_free(&got);
}

static const int32_t rank_counts[] = {1, 2, 3, 4, 8};

TEST(F6_bits_over_every_number_of_ranks)
{
    base b;
    rig_counts counts = {0};
    open_base(&b, 420, LAYER_UNIFORM, 0.08, false);
    for (int32_t ranks = 1; ranks <= 8; ranks += 1 + (RANKS_SLOW && ranks == 4) * 3) {
        layer_options o = {.ranks = ranks, .cpu_threads = 1};
        compare(&b, &o, &counts);
    }
    rig_print_counts(&counts);
    CHECK(counts.pulled_peer > 1000);
    CHECK(counts.copied > 100);
    close_base(&b);
}

TEST(bits_over_rings_from_smallest_to_all)
{
    base b;
    rig_counts counts = {0};
    open_base(&b, 420, LAYER_UNIFORM, 0, false);
    for (int64_t ring = 256; ring <= 2304; ring += ring < 768 ? 128 : 512)
        for (int i = 0; i < (RANKS_SLOW ? 2 : 5); i++) {
            layer_options o = {.ranks = rank_counts[i], .ring_rows = ring, .minibatch_rows = 128, .minibatch_rows_bwd = 128, .cpu_threads = 1};
            compare(&b, &o, &counts);
        }
    rig_print_counts(&counts);
    CHECK(counts.rotations > 30);
    CHECK(counts.continued > 5);
    CHECK(counts.copied > 1000);
    CHECK(counts.replayed > 1000);
    close_base(&b);
}

TEST(bits_over_minibatches)
{
    base b;
    rig_counts counts = {0};
    open_base(&b, 420, LAYER_UNIFORM, 0, false);
    for (int64_t forward = 128; forward <= 512; forward += 128)
        for (int64_t backward = 128; backward <= 512; backward += 128 + 128 * RANKS_SLOW) {
            int64_t most = forward > backward ? forward : backward;
            layer_options o = {.ranks = (int32_t)(1 + (forward + backward) / 128 % 3), .ring_rows = 2 * most + 128 * (forward == backward),
                               .minibatch_rows = forward, .minibatch_rows_bwd = backward, .cpu_threads = 1};
            compare(&b, &o, &counts);
        }
    rig_print_counts(&counts);
    CHECK(counts.rotations > 8);
    close_base(&b);
}

TEST(bits_over_save_policies)
{
    base b;
    rig_counts counts = {0};
    static const int64_t rows[] = {0, 1, 127, 128, 129, 200, 255, 640, 1000, 100000};
    open_base(&b, 420, LAYER_UNIFORM, 0.05, false);
    for (int ranks = 1 + 2 * RANKS_SLOW; ranks <= 3; ranks += 2) {
        for (int save = MOK_SAVE_AUTO; save <= MOK_SAVE_ALL; save++) {
            layer_options o = {.ranks = ranks, .ring_rows = 384, .minibatch_rows = 128, .minibatch_rows_bwd = 128, .save = (mok_save)save, .cpu_threads = 1};
            compare(&b, &o, &counts);
            o.recompute = true;
            compare(&b, &o, &counts);
        }
        for (int i = 0; i < 10; i++) {
            layer_options o = {.ranks = ranks, .ring_rows = 512, .minibatch_rows = 128, .minibatch_rows_bwd = 256, .save = MOK_SAVE_ROWS,
                               .save_rows = rows[i], .cpu_threads = 1, .recompute = i % 2};
            compare(&b, &o, &counts);
        }
    }
    rig_print_counts(&counts);
    CHECK(counts.replayed > 1000);
    close_base(&b);
}

/* One expert gets every route: one segment longer than the ring, its gradient cut again and again, every token copied. */
TEST(R6_bits_where_one_expert_has_everything)
{
    base b;
    rig_counts counts = {0};
    open_base(&b, 300, LAYER_ONE_EXPERT, 0, false);
    for (int i = 0; i < 5; i++) {
        layer_options o = {.ranks = rank_counts[i], .ring_rows = 256 + 128 * i, .minibatch_rows = 128, .minibatch_rows_bwd = 128, .cpu_threads = 1,
                           .two_call_backward = i % 2};
        compare(&b, &o, &counts);
    }
    rig_print_counts(&counts);
    CHECK(counts.rotations >= 3);
    CHECK(counts.continued >= 10);
    CHECK(counts.copied > 1000);
    close_base(&b);
}

TEST(bits_of_recompute_and_of_a_backward_in_two_calls)
{
    base b;
    rig_counts counts = {0};
    open_base(&b, 420, LAYER_DISTINCT, 0.1, false);
    for (int i = 0; i < 8; i++) {
        layer_options o = {.ranks = 1 + i % 4, .ring_rows = 384, .minibatch_rows = 128, .minibatch_rows_bwd = 128, .recompute = i & 1,
                           .two_call_backward = i & 2, .experts_by_pointer = i & 4, .cpu_threads = 1};
        compare(&b, &o, &counts);
    }
    CHECK(counts.rotations > 10);
    close_base(&b);
}

TEST(C3_bits_over_threads_and_from_run_to_run)
{
    base b;
    rig_counts counts = {0};
    open_base(&b, 420, LAYER_UNIFORM, 0, false);
    for (int round = 0; round < (RANKS_SLOW ? 2 : 8); round++)
        for (int32_t threads = 1; threads <= 3; threads++) {
            layer_options o = {.ranks = 1 + round % 3, .ring_rows = 256 + 128 * (round % 2), .minibatch_rows = 128, .minibatch_rows_bwd = 128,
                               .cpu_threads = threads, .repeat = 2, .before_pass = rig_poison};
            compare(&b, &o, &counts);
        }
    rig_print_counts(&counts);
    CHECK(counts.rotations > 50);
    close_base(&b);
}

TEST(D1_two_runs_have_the_same_bits)
{
    /* The shared expert's gradients too: they belong to a rank's own tokens, so the same split is compared. */
    base b;
    layer_result one, two;
    open_base(&b, 300, LAYER_UNIFORM, 0.1, false);
    layer_options o = {.ranks = 3, .ring_rows = 256, .minibatch_rows = 128, .minibatch_rows_bwd = 128, .cpu_threads = 2};
    rig_run("one", &b.p, &o, &one);
    o.cpu_threads = 3;
    rig_run("two", &b.p, &o, &two);
    ranks_same_results("two runs", &b.p, &one, &two, true);
    size_t n = 3 * 64 * 128 * 2;
    CHECK_BYTES(one.dshared_gate, two.dshared_gate, n);
    CHECK_BYTES(one.dshared_up, two.dshared_up, n);
    CHECK_BYTES(one.dshared_down, two.dshared_down, n);
    CHECK_BYTES(one.dshared_output_gate, two.dshared_output_gate, 3 * 128 * 2);
    layer_result_free(&one);
    layer_result_free(&two);
    close_base(&b);
}

TEST(bits_of_a_forward_alone)
{
    base b;
    rig_counts counts = {0};
    open_base(&b, 420, LAYER_UNIFORM, 0.1, true);
    for (int i = 0; i < 5; i++) {
        layer_options o = {.ranks = rank_counts[i], .ring_rows = 256, .minibatch_rows = 128, .minibatch_rows_bwd = 128, .forward_only = true, .cpu_threads = 1};
        compare(&b, &o, &counts);
    }
    CHECK(counts.rotations > 5);
    close_base(&b);
}

TEST(bits_over_unequal_splits)
{
    base b;
    rig_counts counts = {0};
    uint64_t state = test_seed();
    open_base(&b, 400, LAYER_UNIFORM, 0.05, false);
    for (int i = 0; i < 10; i++) {
        int64_t tokens[8], left = 400;
        int32_t ranks = (int32_t)(2 + test_below(&state, 7));
        for (int32_t r = 0; r < ranks; r++) {
            tokens[r] = r == ranks - 1 ? left : test_below(&state, 3) ? test_below(&state, left + 1) : 0;
            left -= tokens[r];
        }
        layer_options o = {.ranks = ranks, .tokens_of_rank = tokens, .ring_rows = 256 + 128 * test_below(&state, 4), .minibatch_rows = 128,
                           .minibatch_rows_bwd = 128, .cpu_threads = 1, .before_pass = rig_poison};
        compare(&b, &o, &counts);
    }
    close_base(&b);
}

/* Bytes and rows counted are what the schedule said, and the other way round. */
TEST(P6_counts_equal_the_plan_of_the_schedule)
{
    base b;
    open_base(&b, 420, LAYER_UNIFORM, 0.05, false);
    for (int i = 0; i < 5; i++) {
        layer_result got;
        int64_t peer_in = 0, peer_out = 0;
        layer_options o = {.ranks = rank_counts[i], .ring_rows = 256, .minibatch_rows = 128, .minibatch_rows_bwd = 128, .cpu_threads = 1};
        rig_run("counting", &b.p, &o, &got);
        for (int32_t r = 0; r < o.ranks; r++) {
            const mok_stats *s = &got.stats[r];
            const mok_schedule_info *info = &got.info[r];
            CHECK_EQ(s->schedules + s->forwards + s->backwards + s->recomputes, 3);
            CHECK_EQ(s->rows, 2 * info->rows);
            CHECK_EQ(s->rows_copied, info->rows_copied_fwd + info->rows_copied_bwd);
            CHECK_EQ(s->rows_pulled + s->rows_copied, s->rows);
            CHECK_EQ(s->rows_pulled_peer, info->rows_pulled_peer_fwd + info->rows_pulled_peer_bwd);
            CHECK_EQ(s->rows_padding, 2 * (info->table_rows - info->rows));
            CHECK_EQ(s->wgrad_continued, info->wgrad_continued);
            CHECK_EQ(s->bytes_pulled_peer, info->bytes_pulled_peer_fwd + info->bytes_pulled_peer_bwd);
            CHECK_EQ(s->bytes_pushed_peer, info->bytes_pushed_peer_fwd + info->bytes_pushed_peer_bwd);
            CHECK_EQ(s->ring_rotations, 2 * (info->table_rows / got.config.ring_rows));
            peer_in += s->bytes_pulled_peer;
            peer_out += s->bytes_pushed_peer;
        }
        CHECK(o.ranks == 1 ? peer_in + peer_out == 0 : peer_in > 0 && peer_out > 0);
        layer_result_free(&got);
    }
    close_base(&b);
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
