/* mok train: gradients against finite differences, the same bits for any number of ranks and after a resume, and every refusal a sentence. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* nftw */
#endif
#define LM_OPS_DOUBLE
#include "lm_ops.c" /* once more, in double: finite differences see the same source to twelve digits */
#undef LM_OPS_DOUBLE
#undef MOK_CLI_LM_OPS_H
#undef LM_OP
#define lm_real lm_real_float
#include "lm_ops.h"
#undef lm_real

#define TEST_WATCHDOG 400 /* ThreadSanitizer on a busy machine */
#include "command.h"

#include <ftw.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "commands.h"
#include "json.h"
#include "train.h"

/* ------------------------------------------------------------------------------------------------------------ files -- */
static char folder[64];

static int remove_entry(const char *path, const struct stat *st, int flag, struct FTW *walk)
{
    (void)st, (void)flag, (void)walk;
    return remove(path);
}
static pid_t folder_owner; /* children end in exit() too */
static void remove_folder(void)
{
    if (getpid() == folder_owner)
        nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

/* folder/name; four of them live at once. */
static const char *in_folder(const char *name)
{
    static char paths[4][256];
    static int next;
    if (!folder[0]) {
        snprintf(folder, sizeof folder, "/tmp/mok_train_XXXXXX");
        if (!mkdtemp(folder))
            TEST_FAILED("no temporary folder");
        folder_owner = getpid();
        atexit(remove_folder);
    }
    next = (next + 1) % 4;
    snprintf(paths[next], sizeof paths[next], "%s/%s", folder, name);
    return paths[next];
}

static void write_file(const char *name, const void *bytes, size_t size)
{
    FILE *file = fopen(in_folder(name), "wb");
    if (!file || fwrite(bytes, 1, size, file) != size)
        TEST_FAILED("cannot write %s", name);
    if (file)
        fclose(file);
}

/* The whole file, to be freed. */
static char *file_bytes(const char *name, size_t *size)
{
    FILE *file = fopen(in_folder(name), "rb");
    char *bytes = NULL;
    *size = 0;
    if (file) {
        fseek(file, 0, SEEK_END);
        *size = (size_t)ftell(file);
        rewind(file);
        bytes = malloc(*size + 1);
        if (bytes && fread(bytes, 1, *size, file) != *size)
            TEST_FAILED("cannot read %s", name);
        fclose(file);
    } else {
        TEST_FAILED("%s is not there", name);
    }
    return bytes;
}

static void check_same_files(const char *a, const char *b)
{
    size_t size_a, size_b;
    char *bytes_a = file_bytes(a, &size_a), *bytes_b = file_bytes(b, &size_b);
    CHECK_EQ(size_a, size_b);
    if (bytes_a && bytes_b && size_a == size_b)
        CHECK_BYTES(bytes_a, bytes_b, size_a);
    free(bytes_a);
    free(bytes_b);
}

/* Sentences out of few words: quickly learned. */
static lm_text make_text(int64_t size)
{
    static const char *const words[] = {"the ", "expert ", "router ", "learns ", "from ", "bytes ", "ring ", "turns ", "and ", "rank.\n"};
    lm_text t = {.train = malloc((size_t)size + 16), .held_out = malloc((size_t)size + 16), .train_size = size, .held_out_size = size / 10};
    uint64_t state = 5;
    for (int part = 0; part < 2; part++) {
        uint8_t *to = part ? t.held_out : t.train;
        for (int64_t n = 0; n < size;)
            for (const char *c = words[test_below(&state, 10)]; *c && n < size; c++)
                to[n++] = (uint8_t)*c;
    }
    t.fingerprint = 77;
    return t;
}

/* -------------------------------------------------------------------------------------------------- finite differences -- */
enum { FT = 5, FH = 32, FE = 6, FK = 2, FC = 4 };

static void fill(double *x, int64_t n, uint64_t *state)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = test_normal(state);
}

/* Compares gradient[n] with central differences of loss() in x[n]. */
static void check_gradient(const char *what, double *x, int64_t n, const double *gradient, double (*loss)(void))
{
    const double step = 1e-5;
    for (int64_t i = 0; i < n; i++) {
        double old = x[i];
        x[i] = old + step;
        double above = loss();
        x[i] = old - step;
        double below = loss();
        x[i] = old;
        double expected = (above - below) / (2 * step);
        if (!(fabs(gradient[i] - expected) <= 1e-8 + 1e-7 * fabs(expected)))
            TEST_FAILED("%s: gradient %lld is %.12g, finite differences give %.12g", what, (long long)i, gradient[i], expected);
    }
}

static double dot(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static double fd_x[FT * FH], fd_scale[FH], fd_coef[FT * FH], fd_rrms[FT], fd_y[FT * FH];

static double norm_loss(void)
{
    lm64_norm(FT, FH, fd_x, fd_scale, fd_y, fd_rrms);
    return dot(fd_y, fd_coef, FT * FH);
}

TEST(norm_gradients_are_finite_differences)
{
    uint64_t state = test_seed();
    double dx[FT * FH] = {0}, dscale[FH] = {0};
    fill(fd_x, FT * FH, &state);
    fill(fd_scale, FH, &state);
    fill(fd_coef, FT * FH, &state);
    norm_loss();
    lm64_norm_backward(FT, FH, fd_x, fd_scale, fd_rrms, fd_coef, dx, dscale);
    check_gradient("x", fd_x, FT * FH, dx, norm_loss);
    check_gradient("scale", fd_scale, FH, dscale, norm_loss);
}

static double fd_table[FC * 256 * (FH / FC)];
static uint8_t fd_text[FT + FC];

static double embed_loss(void)
{
    lm64_embed(FT, FH, FC, fd_text, fd_table, fd_y);
    return dot(fd_y, fd_coef, FT * FH);
}

TEST(embedding_gradients_are_finite_differences)
{
    uint64_t state = test_seed();
    static double dtable[FC * 256 * (FH / FC)];
    memset(dtable, 0, sizeof dtable);
    for (int i = 0; i < FT + FC; i++)
        fd_text[i] = (uint8_t)test_below(&state, 3); /* so that a byte comes more than once */
    fill(fd_table, FC * 256 * (FH / FC), &state);
    fill(fd_coef, FT * FH, &state);
    lm64_embed_backward(FT, FH, FC, fd_text, fd_coef, dtable);
    check_gradient("table", fd_table, FC * 256 * (FH / FC), dtable, embed_loss);
}

static double fd_W[FH * 256], fd_W_t[FH * 256], fd_probs[FT * FE], fd_weights[FT * FK], fd_wcoef[FT * FK], fd_balance[FE];
static int32_t fd_ids[FT * FK], fd_first_ids[FT * FK];
static bool fd_choice_changed;

static double route_loss(void)
{
    double loss = 0;
    lm64_route(FT, FH, FE, FK, fd_x, fd_W, fd_probs, fd_ids, fd_weights);
    fd_choice_changed |= memcmp(fd_ids, fd_first_ids, sizeof fd_ids) != 0;
    for (int t = 0; t < FT; t++)
        loss += dot(fd_probs + t * FE, fd_balance, FE);
    return loss + dot(fd_weights, fd_wcoef, FT * FK);
}

TEST(router_and_balance_gradients_are_finite_differences)
{
    uint64_t state = test_seed();
    double scratch[FT * FE], dx[FT * FH], dW[FH * FE] = {0};
    fill(fd_x, FT * FH, &state);
    fill(fd_W, FH * FE, &state);
    for (int i = 0; i < FH * FE; i++)
        fd_W[i] /= sqrt((double)FH);
    fill(fd_wcoef, FT * FK, &state);
    fill(fd_balance, FE, &state);
    lm64_route(FT, FH, FE, FK, fd_x, fd_W, fd_probs, fd_first_ids, fd_weights);
    lm64_transpose(FH, FE, fd_W, fd_W_t);
    lm64_route_backward(FT, FH, FE, FK, fd_x, fd_W_t, fd_probs, fd_first_ids, fd_weights, fd_wcoef, fd_balance, scratch, dx, dW);
    fd_choice_changed = false;
    check_gradient("x", fd_x, FT * FH, dx, route_loss);
    check_gradient("W", fd_W, FH * FE, dW, route_loss);
    if (fd_choice_changed) /* two probabilities within the step of each other: a jump, no gradient */
        SKIP("the drawn tokens sit on the edge between two experts");
}

static double fd_bias[256], fd_logits[FT * 256];
static uint8_t fd_targets[FT];
static const double fd_head_scale = 0.25;

static double head_loss(void) { return fd_head_scale * lm64_head(FT, FH, fd_x, fd_W, fd_bias, fd_targets, fd_logits); }

TEST(head_gradients_are_finite_differences)
{
    uint64_t state = test_seed();
    static double dx[FT * FH], dW[FH * 256], dbias[256];
    memset(dW, 0, sizeof dW);
    memset(dbias, 0, sizeof dbias);
    fill(fd_x, FT * FH, &state);
    fill(fd_W, FH * 256, &state);
    fill(fd_bias, 256, &state);
    for (int t = 0; t < FT; t++)
        fd_targets[t] = (uint8_t)test_below(&state, 256);
    lm64_transpose(FH, 256, fd_W, fd_W_t);
    head_loss();
    lm64_head_backward(FT, FH, fd_x, fd_W_t, fd_targets, fd_head_scale, fd_logits, dx, dW, dbias);
    check_gradient("x", fd_x, FT * FH, dx, head_loss);
    check_gradient("W", fd_W, FH * 256, dW, head_loss);
    check_gradient("bias", fd_bias, 256, dbias, head_loss);
}

TEST(equal_probabilities_are_routed_to_the_smaller_experts)
{
    double x[FH] = {0}, W[FH * FE] = {0}, probs[FE], weights[3];
    int32_t ids[3];
    lm64_route(1, FH, FE, 3, x, W, probs, ids, weights);
    for (int k = 0; k < 3; k++) {
        CHECK_EQ(ids[k], k);
        CHECK_LE(fabs(weights[k] - 1.0 / 3), 1e-15);
    }
}

/* ----------------------------------------------------------------------------------------------------- order of sums -- */
TEST(matmul_has_the_bits_of_plain_loops)
{
    static const int64_t shapes[][3] = {{1, 1, 1}, {4, 32, 8}, {5, 33, 7}, {9, 48, 64}, {3, 15, 5}, {130, 256, 17}, {7, 79, 3}};
    uint64_t state = test_seed();
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int variant = 0; variant < 4; variant++) {
            int64_t M = shapes[s][0], N = shapes[s][1], K = shapes[s][2], a_m = variant & 1 ? 1 : K, a_k = variant & 1 ? M : 1;
            float *a = malloc(sizeof(float) * (size_t)(M * K)), *b = malloc(sizeof(float) * (size_t)(K * N));
            float *got = malloc(sizeof(float) * (size_t)(M * N)), *expected = malloc(sizeof(float) * (size_t)(M * N));
            for (int64_t i = 0; i < M * K; i++)
                a[i] = (float)test_normal(&state);
            for (int64_t i = 0; i < K * N; i++)
                b[i] = (float)test_normal(&state);
            for (int64_t i = 0; i < M * N; i++)
                got[i] = (float)test_normal(&state);
            for (int64_t m = 0; m < M; m++)
                for (int64_t n = 0; n < N; n++) {
                    volatile float sum = variant & 2 ? got[m * N + n] : 0; /* volatile: neither fused nor reordered */
                    for (int64_t k = 0; k < K; k++) {
                        volatile float product = a[m * a_m + k * a_k] * b[k * N + n];
                        sum = sum + product;
                    }
                    expected[m * N + n] = sum;
                }
            lm_matmul(M, N, K, a, a_m, a_k, b, got, variant & 2);
            CHECK_BYTES(got, expected, sizeof(float) * (size_t)(M * N));
            free(a);
            free(b);
            free(got);
            free(expected);
        }
}

TEST(chunks_of_a_batch_are_drawn_inside_the_text)
{
    lm_config c = {.context = 8, .tokens = 160, .seed = 3};
    int64_t starts[LM_CHUNKS];
    for (int64_t size = lm_chunk_bytes(&c); size < 40; size++)
        for (int64_t step = 0; step < 50; step++) {
            lm_random_starts(&c, (uint64_t)step, size, starts);
            for (int i = 0; i < LM_CHUNKS; i++)
                CHECK(starts[i] >= 0 && starts[i] + lm_chunk_bytes(&c) <= size);
            lm_even_starts(&c, step, 50, size, starts);
            for (int i = 0; i < LM_CHUNKS; i++)
                CHECK(starts[i] >= 0 && starts[i] + lm_chunk_bytes(&c) <= size);
        }
    CHECK_EQ(starts[LM_CHUNKS - 1], 39 - lm_chunk_bytes(&c)); /* the last batch's last chunk is the text's end */
}

/* ---------------------------------------------------------------------------------------------------------- the model -- */
static lm_config tiny_model(int32_t ranks)
{
    return (lm_config){.hidden = 64, .intermediate = 64, .shared_intermediate = 64, .layers = 2, .experts = 6, .topk = 2, .context = 4, .tokens = 256,
                       .seed = 9, .balance = 0.02, .ranks = ranks};
}

/* A step against the gradient of one kind of parameter must change the loss by what the gradient promises. The experts compute in bf16, so
 * steps are long, and the second order is taken out by going both ways. */
static void check_kind(lm *model, const lm_text *text, const int64_t *starts, const char *kind, bool experts)
{
    char error[LM_ERROR];
    int64_t count;
    const lm_tensor *t = lm_tensors(model, &count);
    double squares = 0, loss[2];
    for (int64_t i = 0; i < count; i++)
        if (!strcmp(t[i].name, kind) && (t[i].expert >= 0) == experts)
            squares += lm_sum_squares(t[i].count, t[i].grad);
    REQUIRE(squares > 0);
    double length = 0.02 / squares; /* changes the loss by 0.02 to first order */
    for (int way = 0; way < 2; way++) {
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < t[i].count && !strcmp(t[i].name, kind) && (t[i].expert >= 0) == experts; j++)
                t[i].value[j] += (float)((way ? -2 : 1) * length * (double)t[i].grad[j]);
        lm_values_changed(model);
        if (!lm_forward(model, text->train, starts, &loss[way], error))
            TEST_FAILED("%s", error);
    }
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < t[i].count && !strcmp(t[i].name, kind) && (t[i].expert >= 0) == experts; j++)
            t[i].value[j] += (float)(length * (double)t[i].grad[j]);
    lm_values_changed(model);
    double ratio = (loss[0] - loss[1]) / 0.04;
    if (!(fabs(ratio - 1) < 0.06))
        TEST_FAILED("%s: the loss changes by %.4f of what the gradient says", kind, ratio);
}

TEST(gradients_of_the_whole_model_predict_the_loss)
{
    static const char *const kinds[] = {"embedding", "head", "bias", "norm", "shared_gate", "shared_up", "shared_down"};
    char error[LM_ERROR];
    int64_t starts[LM_CHUNKS];
    double loss, norm;
    lm_config c = tiny_model(3);
    c.topk = c.experts; /* every expert gets every byte: with fewer, a choice that flips is a jump in the loss */
    c.balance = 0;      /* not part of the loss that is returned */
    lm_text text = make_text(20000);
    lm *model = lm_open(&c, error);
    REQUIRE(model != NULL);
    for (int64_t step = 1; step <= 12; step++) { /* a little training, so that gradients point somewhere */
        lm_random_starts(&c, (uint64_t)step, text.train_size, starts);
        CHECK(lm_gradients(model, text.train, starts, &loss, error) && lm_update(model, step, 3e-3, 1, &norm, error));
    }
    CHECK(lm_gradients(model, text.train, starts, &loss, error));
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        check_kind(model, &text, starts, kinds[i], false);
    check_kind(model, &text, starts, "router", false);
    check_kind(model, &text, starts, "gate", true);
    check_kind(model, &text, starts, "up", true);
    check_kind(model, &text, starts, "down", true);
    lm_close(model);
    lm_text_free(&text);
}

static train_settings tiny_run(int32_t ranks, int64_t steps)
{
    return (train_settings){.cfg = tiny_model(ranks), .steps = steps, .every = 3, .rate = 3e-3};
}

/* Trains, or fails the test. The checkpoint holds curve, parameters and optimizer, but not the number of ranks: if two are the
 * same file, everything was the same. */
static train_outcome train_to(train_settings s, const lm_text *text, const char *checkpoint)
{
    train_outcome o = {.first_step = 0};
    char error[LM_ERROR] = "", path[256];
    snprintf(path, sizeof path, "%s", in_folder(checkpoint));
    s.checkpoint = path;
    if ((s.resume && !train_resume(&s, &o, error)) || !train_run(&s, text, NULL, &o, error))
        TEST_FAILED("training for %s failed: %s", checkpoint, error);
    return o;
}

TEST(losses_and_parameters_have_the_same_bits_for_any_number_of_ranks)
{
    static const int32_t ranks[] = {1, 2, 3, 4, 7, 19}; /* 19: more than chunks and experts, so some ranks have nothing */
    lm_text text = make_text(20000);
    double held_out = 0;
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        train_outcome o = train_to(tiny_run(ranks[i], 6), &text, i ? "other" : "one");
        if (i) {
            check_same_files("one", "other");
            CHECK_BYTES(&o.held_out, &held_out, sizeof held_out);
        }
        held_out = o.held_out;
        CHECK(held_out > 0 && held_out < 6);
        train_outcome_free(&o);
    }
    lm_text_free(&text);
}

TEST(resumed_runs_have_the_bits_of_uninterrupted_ones_also_with_other_ranks)
{
    lm_text text = make_text(20000);
    train_outcome whole = train_to(tiny_run(2, 8), &text, "whole");
    train_settings s = tiny_run(2, 4);
    train_outcome part = train_to(s, &text, "part");
    static char path[256];
    snprintf(path, sizeof path, "%s", in_folder("part"));
    for (int32_t ranks = 1; ranks <= 3; ranks++) {
        s = (train_settings){.cfg = {.ranks = ranks}, .steps = 8, .every = 3, .resume = path}; /* the rest comes from the file */
        train_outcome rest = train_to(s, &text, "rest");
        CHECK_EQ(rest.first_step, 4);
        CHECK_EQ(rest.run.step, 8);
        CHECK_BYTES(rest.run.losses, whole.run.losses, 8 * sizeof(double));
        CHECK_BYTES(&rest.held_out, &whole.held_out, sizeof(double));
        check_same_files("whole", "rest");
        train_outcome_free(&rest);
    }
    train_outcome_free(&whole);
    train_outcome_free(&part);
    lm_text_free(&text);
}

TEST(losses_fall_and_fall_further_with_experts)
{
    lm_text text = make_text(20000);
    train_settings s = tiny_run(2, 40);
    s.every = 40;
    s.cfg.shared_intermediate = 0;
    train_outcome with = train_to(s, &text, "with");
    s.cfg.drop_routes = true;
    train_outcome without = train_to(s, &text, "without");
    CHECK(fabs(with.run.losses[0] - log(256)) < 0.3);
    CHECK_LE(with.held_out, 2.0);
    CHECK_LE(with.held_out, without.held_out - 0.2);
    CHECK_LE(without.held_out, without.run.losses[0]); /* the rest of the model learns a little */
    for (int64_t i = 0; i < s.cfg.layers * s.cfg.experts; i++) {
        CHECK(with.routes[i] > 0);
        CHECK_EQ(without.routes[i], 0);
    }
    train_outcome_free(&with);
    train_outcome_free(&without);
    lm_text_free(&text);
}

TEST(mxfp8_learns_as_bf16_does_with_the_same_bits_for_any_ranks_and_resumes)
{
    lm_text text = make_text(20000);
    train_settings s = tiny_run(2, 40);
    s.every = 20;
    train_outcome bf16 = train_to(s, &text, "bf16");
    s.cfg.mxfp8 = true;
    train_outcome mx = train_to(s, &text, "mx");
    CHECK_LE(fabs(mx.held_out - bf16.held_out), 0.01 * bf16.held_out);
    CHECK(mx.held_out != bf16.held_out);
    s.cfg.ranks = 1;
    s.steps = 20;
    train_outcome half = train_to(s, &text, "half");
    static char path[256];
    snprintf(path, sizeof path, "%s", in_folder("half"));
    s = (train_settings){.cfg = {.ranks = 3}, .steps = 40, .every = 20, .resume = path};
    train_outcome rest = train_to(s, &text, "rest");
    check_same_files("mx", "rest");
    train_outcome_free(&bf16);
    train_outcome_free(&mx);
    train_outcome_free(&half);
    train_outcome_free(&rest);
    lm_text_free(&text);
}

TEST(the_balancing_loss_evens_out_the_experts)
{
    lm_text text = make_text(20000);
    double worst[2];
    for (int balanced = 0; balanced < 2; balanced++) {
        train_settings s = tiny_run(2, 40);
        s.every = 40;
        s.cfg.balance = balanced ? 0.2 : 0;
        train_outcome o = train_to(s, &text, "balance");
        int64_t most = 0, sum = 0;
        for (int64_t i = 0; i < s.cfg.experts; i++) {
            most = o.routes[i] > most ? o.routes[i] : most;
            sum += o.routes[i];
        }
        worst[balanced] = (double)(most * s.cfg.experts) / (double)sum;
        train_outcome_free(&o);
    }
    printf("  busiest expert over the mean: %.2f without, %.2f with\n", worst[0], worst[1]);
    CHECK_LE(worst[1], 1.5);
    CHECK_LE(worst[1], worst[0] - 0.2);
    lm_text_free(&text);
}

TEST(dropped_routes_give_experts_and_router_no_gradient)
{
    char error[LM_ERROR];
    int64_t starts[LM_CHUNKS], count;
    double loss;
    lm_config c = tiny_model(2);
    c.drop_routes = true;
    lm_text text = make_text(20000);
    lm *model = lm_open(&c, error);
    REQUIRE(model != NULL);
    lm_random_starts(&c, 1, text.train_size, starts);
    CHECK(lm_gradients(model, text.train, starts, &loss, error));
    const lm_tensor *t = lm_tensors(model, &count);
    for (int64_t i = 0; i < count; i++) {
        bool learns = t[i].expert < 0 && strcmp(t[i].name, "router") != 0;
        if ((lm_sum_squares(t[i].count, t[i].grad) > 0) != learns)
            TEST_FAILED("%s of layer %lld %s a gradient", t[i].name, (long long)t[i].layer, learns ? "should have" : "should not have");
    }
    lm_close(model);
    lm_text_free(&text);
}

TEST(models_that_do_not_fit_are_refused_with_a_sentence)
{
    char error[LM_ERROR];
    struct { lm_config c; const char *part; } bad[] = {
        {tiny_model(2), "multiple of 64"}, {tiny_model(2), "multiple of context"}, {tiny_model(2), "multiple of 16"}, {tiny_model(2), "topk"},
        {tiny_model(0), "num_ranks"}, {tiny_model(2), "layers is 0"}};
    bad[0].c.hidden = 100;
    bad[1].c.context = 5;
    bad[2].c.tokens = 250;
    bad[3].c.topk = 7;
    bad[5].c.layers = 0;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK(lm_open(&bad[i].c, error) == NULL);
        CHECK_STR(error, bad[i].part);
    }
}

/* --------------------------------------------------------------------------------------------------------- the text -- */
TEST(every_tenth_file_is_held_out_and_what_is_no_text_is_left_out)
{
    char name[64], error[512], path[256];
    mkdir(in_folder("texts"), 0700);
    mkdir(in_folder("texts/build-1"), 0700);
    mkdir(in_folder("texts/folder"), 0700);
    for (int i = 0; i < 23; i++) {
        snprintf(name, sizeof name, "texts/%s%02d", i < 12 ? "folder/" : "z", i);
        char content[8];
        write_file(name, content, (size_t)snprintf(content, sizeof content, "%02d", i));
    }
    mkdir(in_folder("texts/made"), 0700);
    write_file("texts/made/CMakeCache.txt", "left out", 8);
    write_file("texts/made/x", "left out", 8);
    write_file("texts/build-1/x", "left out", 8);
    write_file("texts/.hidden", "left out", 8);
    write_file("texts/x.log", "left out", 8);
    write_file("texts/binary", "left\0out", 8);
    write_file("texts/empty", "", 0);
    snprintf(path, sizeof path, "%s", in_folder("texts"));
    lm_text t;
    const char *paths[] = {path};
    REQUIRE(lm_text_read(&t, paths, 1, error, sizeof error));
    CHECK_EQ(t.files, 23);
    CHECK_EQ(t.files_held_out, 2);
    CHECK_EQ(t.held_out_size, 6);
    CHECK_BYTES(t.held_out, "09\0" "19", 6);
    CHECK_EQ(t.train_size, 21 * 3);
    CHECK_BYTES(t.train, "00\0" "01\0" "02\0" "03\0" "04\0" "05\0" "06\0" "07\0" "08\0" "10\0", 30);
    lm_text_free(&t);
}

TEST(of_few_files_the_end_is_held_out)
{
    char error[512], path[256];
    write_file("lines", "0123456789abcdefghi", 19);
    snprintf(path, sizeof path, "%s", in_folder("lines"));
    lm_text t;
    const char *paths[] = {path};
    REQUIRE(lm_text_read(&t, paths, 1, error, sizeof error));
    CHECK_EQ(t.train_size, 18);
    CHECK_BYTES(t.train, "0123456789abcdefgh", 18);
    CHECK_BYTES(t.held_out, "i", 2);
    lm_text_free(&t);
}

/* ------------------------------------------------------------------------------------------------------ the command -- */
/* "mok train" with `line`, where @ stands for the temporary folder. */
static int run_train(const char *line)
{
    static char full[4096];
    size_t n = 0;
    in_folder("");
    for (const char *c = line; *c && n < sizeof full - 80; c++)
        n += (size_t)snprintf(full + n, sizeof full - n, *c == '@' ? "%s/" : "%.1s", *c == '@' ? folder : c);
    return command_run(command_train, full, NULL);
}

/* It must refuse with exit status `expected` and one sentence that contains `part`. */
static void check_refused(const char *line, int expected, const char *part)
{
    int status = run_train(line);
    if (status != expected)
        TEST_FAILED("\"%s\" gave %d, not %d: %s", line, status, expected, err);
    CHECK_STR(err, part);
    char *end = strchr(err, '\n');
    if (!end || end[1] || strncmp(err, "mok train: ", 11) != 0)
        TEST_FAILED("\"%s\" should give one line that begins with the command's name: %s", line, err);
}

static void write_words(const char *name)
{
    lm_text text = make_text(20000);
    write_file(name, text.train, 20000);
    lm_text_free(&text);
}

TEST(the_command_trains_and_its_json_and_csv_can_be_read)
{
    char error[512];
    write_words("words");
    REQUIRE(run_train("--quick --steps 4 --ranks 2 --every 2 --text @words --json --csv @curve.csv") == 0);
    json_value *v = json_parse(out, strlen(out), error, sizeof error);
    REQUIRE(v != NULL);
    const json_value *losses = json_get(v, "losses"), *held = json_get(v, "held_out");
    REQUIRE(losses && held);
    CHECK_EQ(losses->count, 4);
    CHECK_EQ(held->count, 3); /* before the first step, after the second and the fourth */
    CHECK(losses->first && json_get(losses->first, "loss")->number == strtod(json_get(losses->first, "hex")->string, NULL));
    CHECK_EQ(json_get(v, "ranks")->integer, 2);
    json_free(v);
    size_t size;
    char *csv = file_bytes("curve.csv", &size);
    int lines = 0;
    for (size_t i = 0; csv && i < size; i++)
        lines += csv[i] == '\n';
    CHECK_EQ(lines, 1 + 5); /* steps 0 to 4 */
    free(csv);
    REQUIRE(run_train("--quick --steps 6 --ranks 3 --every 2 --text @words") == 0);
    CHECK_STR(out, "0x1.");
    CHECK_STR(out, "held out");
    CHECK_STR(out, "bytes per second");
    REQUIRE(run_train("--quick --steps 1 --text @words --dtype mxfp8 --json") == 0);
    CHECK_STR(out, "\"dtype\": \"mxfp8\"");
    REQUIRE(run_train("--quick --steps 2 --ranks 3 --text @words --drop-routes") == 0);
    CHECK_STR(out, "Every route was dropped");
}

TEST(wrong_use_of_the_command_is_refused)
{
    write_words("words");
    write_file("short", "too short", 9);
    write_file("nothing", "", 0);
    check_refused("--text @not-there", 1, "not-there: No such file");
    check_refused("--text @words @not-there", 1, "not-there: No such file");
    check_refused("--text @nothing", 1, "no text");
    check_refused("--text /dev/null", 1, "neither a file nor a folder");
    check_refused("--text @short --quick", 1, "too short");
    check_refused("--text @words --quick --tokens 100", 1, "multiple of 16");
    check_refused("--text @words --quick --hidden 100", 1, "multiple of 64");
    check_refused("--text @words --quick --experts 2 --topk 3", 1, "topk 3");
    check_refused("--text @words --quick --context 7", 1, "multiple of context");
    check_refused("--text @words --quick --steps 1 --checkpoint @not/there", 1, "cannot write the checkpoint");
    check_refused("--text @words --quick --steps 1 --csv @not/there", 1, "not/there");
    check_refused("--ranks 0", 2, "--ranks");
    check_refused("--dtype fp8", 2, "--dtype is \"fp8\"");
    check_refused("--ranks -1", 2, "--ranks");
    check_refused("--steps x", 2, "--steps");
    check_refused("--lr -1", 2, "--lr");
    check_refused("--hidden 16384 --intermediate 65536 --experts 4096", 2, "the machine has");
    check_refused("--resume @not-there", 2, "cannot read the checkpoint");
}

TEST(damaged_checkpoints_are_refused)
{
    size_t size;
    uint64_t state = test_seed();
    write_words("words");
    REQUIRE(run_train("--quick --steps 2 --ranks 2 --text @words --checkpoint @good") == 0);
    char *bytes = file_bytes("good", &size);
    REQUIRE(bytes != NULL);
    for (int i = 0; i < 12; i++) { /* one bit anywhere, or the end cut off anywhere */
        size_t at = i < 2 ? (size_t)i * 8 : (size_t)test_below(&state, (int64_t)size);
        if (i % 2) {
            write_file("bad", bytes, at);
        } else {
            bytes[at] ^= 4;
            write_file("bad", bytes, size);
            bytes[at] ^= 4;
        }
        check_refused("--quick --text @words --resume @bad", 2, "is not a checkpoint");
    }
    free(bytes);
    check_refused("--quick --text @words --resume @words", 2, "is not a checkpoint");
    check_refused("--text @words --resume @good --hidden 192", 2, "--hidden 64");
    check_refused("--text @words --resume @good --lr 0.5", 2, "--lr");
    check_refused("--text @words --resume @good --steps 1", 1, "2 steps already");
    write_file("other", "other text, other bits: long enough to be cut into chunks; other text, other bits: long enough to be cut into chunks; "
                        "other text, other bits: long enough to be cut into chunks; other text, other bits: long enough to be cut into chunks; "
                        "other text, other bits: long enough to be cut into chunks; other text, other bits: long enough to be cut into chunks; ", 354);
    check_refused("--text @other --resume @good --tokens 512", 1, "too short");
    write_words("longer");
    FILE *file = fopen(in_folder("longer"), "ab");
    REQUIRE(file != NULL);
    fputs("one more line\n", file);
    fclose(file);
    check_refused("--text @longer --resume @good", 1, "not the one that the checkpoint was trained on");
    CHECK_EQ(run_train("--text @words --resume @good --steps 3 --quick --ranks 3"), 0);
}

TEST(checkpoints_replace_each_other_and_leave_nothing_else)
{
    write_words("words");
    mkdir(in_folder("kept"), 0700);
    REQUIRE(run_train("--quick --steps 5 --every 2 --ranks 1 --text @words --checkpoint @kept/run") == 0);
    REQUIRE(run_train("--steps 7 --every 2 --ranks 2 --text @words --resume @kept/run --checkpoint @kept/run --quick") == 0);
    REQUIRE(run_train("--quick --steps 7 --every 2 --ranks 3 --text @words --checkpoint @whole") == 0);
    check_same_files("kept/run", "whole");
    CHECK_EQ(rmdir(in_folder("kept")), -1);
    CHECK_EQ(unlink(in_folder("kept/run")), 0);
    CHECK_EQ(rmdir(in_folder("kept")), 0); /* empty: no temporary file was left */
}

int main(int argc, char **argv) { return test_main(argc, argv); }
