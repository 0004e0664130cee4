/* The commands plan, check and bench: run in a child process, their JSON read back, their refusals counted in sentences. */
#define TEST_WATCHDOG 400
#include "command.h"
#include "commands.h"
#include "json.h"
#include "models.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) /* slow builds: a smaller layer, five of the variants, every third output */
#define SIZES "--hidden 64 --intermediate 128 --shared 64 --quick "
enum { VARIANTS = 5, OUTPUT_STEP = 3 };
#else
#define SIZES "--hidden 256 --intermediate 384 --shared 128 "
enum { VARIANTS = 17, OUTPUT_STEP = 1 };
#endif

/* ------------------------------------------------------------------------------------------------- running a command -- */

static int run(command_fn *command, const char *line) { return command_run(command, line, NULL); }

/* The JSON of a command; NULL, and a failed check, if the command did not end with `status` or printed something else. */
static json_value *run_json(command_fn *command, const char *line, int status, const char *fault)
{
    char error[256];
    int is = command_run(command, line, fault);
    json_value *v = is == status ? json_parse(out, strlen(out), error, sizeof error) : NULL;
    if (is != status)
        TEST_FAILED("\"%s\" ended with %d instead of %d: %s%.400s", line, is, status, err, out);
    else if (!v)
        TEST_FAILED("\"%s\": %s", line, error);
    if (*err)
        TEST_FAILED("\"%s\" wrote to stderr: %s", line, err);
    return v;
}

/* "ring.rows": the value at a path; numbers only. -1 if there is none. */
static double number_at(const json_value *v, const char *path)
{
    char key[64];
    while (v && *path) {
        size_t n = strcspn(path, ".");
        snprintf(key, sizeof key, "%.*s", (int)n, path);
        v = json_get(v, key);
        path += n + (path[n] == '.');
    }
    return v && v->type == JSON_NUMBER ? v->number : v && v->type == JSON_BOOL ? v->boolean : -1;
}

static const char *text_at(const json_value *v, const char *key)
{
    const json_value *s = json_get(v, key);
    return s && s->type == JSON_STRING ? s->string : "";
}

/* Refused: status 2, nothing on stdout, and on stderr one sentence of one line that contains `part`. */
static void check_refused(command_fn *command, const char *name, const char *line, const char *part)
{
    char start[32];
    int status = run(command, line);
    size_t n = strlen(err);
    snprintf(start, sizeof start, "mok %s: ", name);
    if (status != 2 || *out || strncmp(err, start, strlen(start)) != 0 || n < 2 || strchr(err, '\n') != err + n - 1 || strstr(err, ". "))
        TEST_FAILED("mok %s %s: status %d, stdout \"%.80s\", stderr \"%s\"", name, line, status, out, err);
    if (!strstr(err, part))
        TEST_FAILED("mok %s %s: \"%s\" is not in \"%s\"", name, line, part, err);
}

static const char *data_path(const char *name)
{
    static char path[512];
    const char *slash = strrchr(__FILE__, '/');
    snprintf(path, sizeof path, "%.*s/data/%s", slash ? (int)(slash - __FILE__) : 1, slash ? __FILE__ : ".", name);
    return path;
}

/* ----------------------------------------------------------------------------------------------------------- plan -- */

/* Buffers of each kind lie one behind the other, 256 bytes apart, and end where the kind does. */
static void check_buffers(const json_value *memory)
{
    static const char *const kinds[] = {"heap", "local", "schedule", "context", "wide"};
    const json_value *buffers = json_get(memory, "buffers");
    int64_t end[5] = {0};
    REQUIRE(buffers);
    CHECK(buffers->count >= 30);
    for (const json_value *b = buffers->first; b; b = b->next)
        for (int k = 0; k < 5; k++)
            if (!strcmp(text_at(b, "memory"), kinds[k])) {
                CHECK_EQ(number_at(b, "offset"), end[k]);
                end[k] += ((int64_t)number_at(b, "bytes") + 255) / 256 * 256;
            }
    for (int k = 0; k < 5; k++) {
        char key[32];
        snprintf(key, sizeof key, "%s_bytes", kinds[k]);
        CHECK_EQ(number_at(memory, key), end[k]);
    }
    CHECK_EQ(number_at(memory, "workspace_bytes"), end[0] + end[1]);
}

TEST(plan_of_kimi_reports_the_two_wave_bounds_of_the_contract)
{
    json_value *v = run_json(command_plan, "--model kimi-k2.7-code --ranks 64 --tokens 2048 --sms 148 --json", 0, NULL);
    REQUIRE(v);
    CHECK_EQ(number_at(v, "forward.two_wave_rows"), 2368);
    CHECK_EQ(number_at(v, "backward.two_wave_rows"), 4736);
    CHECK_EQ(number_at(v, "forward.minibatch_rows"), 4736);
    CHECK_EQ(number_at(v, "backward.minibatch_rows"), 4736);
    CHECK_STR(text_at(json_get(v, "forward"), "why"), "4096 columns of the narrowest GEMM = 2368 rows");
    CHECK_EQ(number_at(v, "experts.count"), 6);
    CHECK_EQ(number_at(v, "rows.balanced"), 16384);
    CHECK_EQ(number_at(v, "ring.smallest_rows"), 2 * 4736);
    CHECK_LE(number_at(v, "ring.smallest_rows"), number_at(v, "ring.rows"));
    CHECK(!strcmp(text_at(json_get(v, "ring"), "deadlock_check"), "passed"));
    CHECK_EQ(number_at(v, "forward.flops"), 6.0 * 7168 * 2048 * (16384 + 2048));
    CHECK_EQ(number_at(v, "forward.link_bytes_in"), 2.0 * 7168 * 2 * 16384 * 63 / 64);
    CHECK(number_at(v, "forward.floor_seconds") >= number_at(v, "forward.link_seconds"));
    CHECK(number_at(v, "forward.floor_seconds") >= number_at(v, "forward.compute_seconds"));
    check_buffers(json_get(v, "memory"));
    json_free(v);
}

TEST(plan_knows_every_model_of_the_table)
{
    for (size_t i = 0; i < model_count(); i++) {
        char line[128];
        snprintf(line, sizeof line, "--model %s --ranks 8 --tokens 512 --json", model_at(i)->name);
        json_value *v = run_json(command_plan, line, 0, NULL);
        REQUIRE(v);
        CHECK_EQ(number_at(v, "shape.hidden"), model_at(i)->hidden);
        json_free(v);
    }
}

TEST(plan_reads_a_config_json_and_flags_win_over_it)
{
    char line[700];
    snprintf(line, sizeof line, "--model %s --topk 2 --shared 0 --ranks 5 --rank 4 --json", data_path("kimi_nested.json"));
    json_value *v = run_json(command_plan, line, 0, NULL);
    REQUIRE(v);
    CHECK_EQ(number_at(v, "shape.hidden"), 1792);
    CHECK_EQ(number_at(v, "shape.experts"), 96);
    CHECK_EQ(number_at(v, "shape.topk"), 2);
    CHECK_EQ(number_at(v, "shape.shared"), 0);
    CHECK_EQ(number_at(v, "experts.first"), 96 * 4 / 5);
    json_free(v);
}

TEST(plan_says_why_a_minibatch_is_not_the_bound)
{
    CHECK_EQ(run(command_plan, "--model mixtral-8x7b --minibatch 512"), 0);
    CHECK_STR(out, "512 rows, as asked");
    CHECK_EQ(run(command_plan, "--model mixtral-8x7b --ring 1024"), 0);
    CHECK_STR(out, "so small a ring allows only 256 rows");
    CHECK_EQ(run(command_plan, "--model mixtral-8x7b --ring 1024 --save all"), 0);
    CHECK_STR(out, "so small a ring allows only 128 rows");
    CHECK_EQ(run(command_plan, "--model mixtral-8x7b --tokens 64"), 0);
    CHECK_STR(out, "the worst routing allows only");
    CHECK_EQ(run(command_plan, "--model mixtral-8x7b --backend cpu"), 0);
    CHECK_STR(out, "a CPU has no waves to fill");
}

TEST(plan_floor_follows_the_given_speeds)
{
    json_value *v = run_json(command_plan, "--model glm-5.2 --ranks 8 --rate 500 --link 100 --json", 0, NULL);
    REQUIRE(v);
    CHECK_LE(fabs(number_at(v, "backward.compute_seconds") * 500e12 / number_at(v, "backward.flops") - 1), 1e-12);
    double in = number_at(v, "backward.link_bytes_in"), way_out = number_at(v, "backward.link_bytes_out");
    CHECK_LE(fabs(number_at(v, "backward.link_seconds") * 100e9 / fmax(in, way_out) - 1), 1e-12);
    json_free(v);
}

TEST(plan_refuses_in_one_sentence)
{
    char line[700];
    check_refused(command_plan, "plan", "", "--hidden is missing");
    check_refused(command_plan, "plan", "--model kimi", "did you mean kimi-k2.7-code?");
    check_refused(command_plan, "plan", "--model Mixtral-8x7", "did you mean mixtral-8x7b?");
    check_refused(command_plan, "plan", "--model zzzzzzzzzzzz", "models: deepseek-v3");
    check_refused(command_plan, "plan", "--model no/such/config.json", "cannot read no/such/config.json");
    check_refused(command_plan, "plan", "--model /", "cannot read /");
    snprintf(line, sizeof line, "--model %s", data_path("README.md"));
    check_refused(command_plan, "plan", line, "expected a value");
    snprintf(line, sizeof line, "--model %s", data_path("dense.json"));
    check_refused(command_plan, "plan", line, "mixture-of-experts");
    check_refused(command_plan, "plan", "--hidden 256 --intermediate 256 --experts 8 --topk 9", "topk 9 is larger than num_experts 8");
    check_refused(command_plan, "plan", "--model mixtral-8x7b --hidden -64", "--hidden is \"-64\"");
    check_refused(command_plan, "plan", "--model mixtral-8x7b --hidden 100", "multiple of 64");
    check_refused(command_plan, "plan", "--model mixtral-8x7b --ring 512 --minibatch 512", "smaller than two minibatches");
    check_refused(command_plan, "plan", "--model mixtral-8x7b --rank 1", "rank is 1");
    check_refused(command_plan, "plan", "--model mixtral-8x7b --ranks 100000", "num_ranks is 100000");
    check_refused(command_plan, "plan", "--model mixtral-8x7b --save some", "--save is \"some\"");
    check_refused(command_plan, "plan", "--model mixtral-8x7b --save 99999999999999999999", "--save is");
    check_refused(command_plan, "plan", "--model mixtral-8x7b --tokens 9000000000000000000", "max_tokens");
    check_refused(command_plan, "plan", "--model mixtral-8x7b --backend gpu", "--backend is \"gpu\"");
    check_refused(command_plan, "plan", "--model mixtral-8x7b --frobnicate", "--frobnicate");
    check_refused(command_plan, "plan", "--model", "--model");
}

/* ---------------------------------------------------------------------------------------------------------- check -- */

#define SMALL "--hidden 64 --intermediate 128 --shared 64 --experts 4 --topk 2 --tokens 200 --ranks 1,2 --quick "

/* largest_error: far above what bf16 gives, except where a swiglu limit makes the derivative jump at values that rounding moves. */
static void check_evidence(const json_value *v, double largest_error)
{
    CHECK_EQ(number_at(v, "passed"), 1);
    static const char *const same[] = {"out", "dx", "drouter_weights", "dgate", "dup", "ddown"};
    for (int i = 0; i < 6; i++) {
        char path[64];
        snprintf(path, sizeof path, "identical_bits.%s", same[i]);
        CHECK_EQ(number_at(v, path), 1);
    }
    CHECK_EQ(number_at(v, "equals_plan"), 1);
    CHECK_LE(3, number_at(v, "small_ring_rotations"));
    CHECK_LE(1, number_at(v, "rows_pulled_peer"));
    CHECK_LE(1, number_at(v, "rows_copied"));
    CHECK_LE(1, number_at(v, "rows_replayed"));
    CHECK_LE(1, number_at(v, "wgrad_continued"));
    CHECK_LE(0, number_at(v, "seed"));
    for (const json_value *r = json_get(v, "routings")->first; r; r = r->next)
        for (const json_value *e = json_get(r, "errors")->first; e; e = e->next) {
            double error = number_at(e, "error");
            CHECK(error > 0 && error < largest_error);
            CHECK_LE(error, 2 * number_at(e, "bf16_chain_error"));
        }
}

TEST(check_passes_the_acceptance_line_with_evidence)
{
    json_value *v = run_json(command_check, SIZES "--experts 8 --topk 3 --tokens 300 --ranks 1,2,4,8 --json", 0, NULL);
    REQUIRE(v);
    check_evidence(v, 0.02);
    const json_value *runs = json_get(json_get(v, "routings")->first->next, "runs");
    CHECK_EQ(runs->count, 4 * VARIANTS);
    for (const json_value *r = runs->first; r; r = r->next)
        CHECK_EQ(number_at(r, "equals_plan"), 1);
    json_free(v);
}

TEST(check_takes_uneven_splits_of_experts_and_tokens)
{
    static const char *const lines[] = {SIZES "--experts 10 --ranks 4 --json", SIZES "--experts 3 --ranks 4 --json",
                                        SMALL "--tokens 311 --ranks 3,5 --json"};
    for (int i = 0; i < 3; i++) {
        json_value *v = run_json(command_check, lines[i], 0, NULL);
        REQUIRE(v);
        check_evidence(v, 0.02);
        json_free(v);
    }
}

TEST(check_covers_the_shared_gate_and_the_swiglu_limit)
{
    json_value *v = run_json(command_check, SMALL "--shared-gate --swiglu-limit 0.5 --json", 0, NULL);
    REQUIRE(v);
    check_evidence(v, 0.2);
    CHECK_EQ(number_at(v, "identical_bits.dshared_output_gate"), 1);
    json_free(v);
}

TEST(N10_check_compares_mxfp8_with_the_unquantised_layer)
{
    json_value *v = run_json(command_check, SMALL "--dtype mxfp8 --json", 0, NULL);
    REQUIRE(v);
    CHECK_EQ(number_at(v, "passed"), 1);
    CHECK_EQ(number_at(v, "equals_plan"), 1);
    CHECK_EQ(number_at(v, "identical_bits.dgate"), 1);
    CHECK_STR(text_at(json_get(v, "shape"), "dtype"), "mxfp8");
    bool prequantised = false;
    for (const json_value *r = json_get(v, "routings")->first; r; r = r->next) {
        for (const json_value *e = json_get(r, "errors")->first; e; e = e->next) {
            bool routed = !strstr(text_at(e, "output"), "shared");
            CHECK(number_at(e, "error") > (routed ? 0.01 : 0) && number_at(e, "error") <= 0.1); /* e4m3 has three bits: it shows */
            CHECK(number_at(e, "largest_error") > 0 && number_at(e, "largest_error") <= 1.0);
        }
        for (const json_value *run_ = json_get(r, "runs")->first; run_; run_ = run_->next)
            prequantised |= !strcmp(text_at(run_, "variant"), "weights quantised before");
    }
    CHECK(prequantised);
    json_free(v);
    v = run_json(command_check, SMALL "--dtype mxfp8 --wgrad-bf16 --json", 1, "all:dx");
    REQUIRE(v);
    CHECK_EQ(number_at(v, "identical_bits.dx"), 1);
    CHECK_STR(json_get(v, "failures")->first->string, "dx is off by");
    json_free(v);
    v = run_json(command_check, SMALL "--dtype mxfp8 --json", 1, "counts");
    REQUIRE(v);
    CHECK_EQ(number_at(v, "equals_plan"), 0);
    json_free(v);
    check_refused(command_check, "check", SMALL "--dtype fp8", "--dtype is \"fp8\", but must be bf16 or mxfp8");
    check_refused(command_check, "check", SMALL "--wgrad-bf16", "mx_wgrad_bf16 is set, but dtype is not MOK_MXFP8");
}

TEST(plan_of_mxfp8_has_half_the_saved_memory)
{
    json_value *bf16 = run_json(command_plan, "--model kimi-k2.7-code --shared 0 --ranks 64 --json", 0, NULL);
    json_value *mx = run_json(command_plan, "--model kimi-k2.7-code --shared 0 --ranks 64 --dtype mxfp8 --json", 0, NULL);
    REQUIRE(bf16 && mx);
    CHECK_LE(number_at(mx, "memory.context_bytes"), 0.52 * number_at(bf16, "memory.context_bytes"));
    CHECK_LE(number_at(mx, "memory.heap_bytes"), number_at(bf16, "memory.heap_bytes") - 1);
    CHECK_EQ(number_at(mx, "memory.weight_bytes"), 6.0 * 3 * 2 * 7168 * 2048);
    CHECK_EQ(number_at(mx, "memory.quantised_weight_bytes"), 6.0 * 3 * 2 * 7168 * 2048 * (33.0 / 32));
    CHECK_EQ(number_at(bf16, "memory.quantised_weight_bytes"), 0);
    json_value *given = run_json(command_plan, "--model kimi-k2.7-code --shared 0 --ranks 64 --dtype mxfp8 --wide-given --json", 0, NULL);
    REQUIRE(given);
    CHECK_EQ(number_at(mx, "memory.wide_bytes"), 6.0 * 3 * 2 * 7168 * 2048);
    CHECK_EQ(number_at(given, "memory.wide_bytes"), number_at(mx, "memory.wide_bytes"));
    CHECK_EQ(number_at(mx, "memory.local_bytes") - number_at(given, "memory.local_bytes"), 2 * number_at(mx, "memory.wide_bytes"));
    CHECK_EQ(number_at(bf16, "memory.wide_bytes"), 0);
    json_free(given);
    check_refused(command_plan, "plan", "--model kimi-k2.7-code --wide-given", "mx_wide_given is set, but dtype is not MOK_MXFP8");
    CHECK_LE(number_at(mx, "forward.link_bytes_in"), 0.77 * number_at(bf16, "forward.link_bytes_in"));
    json_free(bf16);
    json_free(mx);
    CHECK_EQ(run(command_plan, "--model kimi-k2.7-code --ranks 64 --dtype mxfp8"), 0);
    CHECK_STR(out, "mxfp8");
    check_refused(command_plan, "plan", "--model mixtral-8x7b --dtype int8", "--dtype is \"int8\"");
}

TEST(check_fails_if_any_output_has_one_wrong_bit)
{
    enum { OUTPUTS = 10 };
    static const char *const outputs[OUTPUTS] = {"out", "dx", "drouter_weights", "dgate", "dup", "ddown", "dshared_gate", "dshared_up", "dshared_down", "dshared_output_gate"};
    for (int i = 0; i < OUTPUTS; i += OUTPUT_STEP) {
        char path[64], all[64];
        json_value *v = run_json(command_check, SMALL "--shared-gate --json", 1, outputs[i]);
        REQUIRE(v);
        snprintf(path, sizeof path, "identical_bits.%s", outputs[i]);
        CHECK_EQ(number_at(v, "passed"), 0);
        CHECK_EQ(number_at(v, path), 0);
        CHECK_STR(json_get(v, "failures")->first->string, "differ, first");
        json_free(v);
        /* The same wrong value in every run: only float64 can tell. */
        snprintf(all, sizeof all, "all:%s", outputs[i]);
        v = run_json(command_check, SMALL "--shared-gate --json", 1, all);
        REQUIRE(v);
        CHECK_EQ(number_at(v, path), 1);
        CHECK_STR(json_get(v, "failures")->first->string, "more than twice");
        json_free(v);
    }
}

TEST(check_fails_if_bytes_are_not_the_schedules)
{
    json_value *v = run_json(command_check, SMALL "--json", 1, "counts");
    REQUIRE(v);
    CHECK_EQ(number_at(v, "equals_plan"), 0);
    CHECK_STR(json_get(v, "failures")->first->string, "bytes_pulled_peer, but the schedule says");
    json_free(v);
}

TEST(check_fails_if_it_proves_nothing)
{
    CHECK_EQ(run(command_check, SMALL "--tokens 8"), 1);
    CHECK_STR(out, "FAILED: this proves nothing");
    CHECK_EQ(run(command_check, SMALL "--dropped 1"), 1);
    CHECK_STR(out, "the smallest ring turned only 0 times");
    CHECK_STR(out, "no row came from another rank");
}

TEST(check_seed_repeats_a_run_and_is_fresh_otherwise)
{
    char first[512];
    double seeds[2];
    for (int i = 0; i < 2; i++) {
        json_value *v = run_json(command_check, SMALL "--json", 0, NULL);
        REQUIRE(v);
        seeds[i] = number_at(v, "seed");
        snprintf(first, sizeof first, SMALL "--json --seed %.0f", seeds[i]);
        double error = number_at(json_get(json_get(v, "routings")->first, "errors")->first, "error");
        json_free(v);
        v = run_json(command_check, first, 0, NULL);
        REQUIRE(v);
        CHECK(error == number_at(json_get(json_get(v, "routings")->first, "errors")->first, "error"));
        json_free(v);
    }
    CHECK(seeds[0] != seeds[1]);
}

TEST(check_text_shows_counts_errors_and_a_verdict)
{
    CHECK_EQ(run(command_check, SMALL "--seed 7"), 0);
    CHECK_STR(out, "--seed 7 repeats this run");
    CHECK_STR(out, "skewed routing");
    CHECK_STR(out, "smallest ring");
    CHECK_STR(out, "drouter_weights");
    CHECK_STR(out, "passed: ");
    CHECK(*err == '\0');
}

TEST(check_refuses_in_one_sentence)
{
    check_refused(command_check, "check", "--experts 8 --topk 9", "topk 9 is larger than num_experts 8");
    check_refused(command_check, "check", "--tokens -300", "--tokens is \"-300\"");
    check_refused(command_check, "check", "--hidden -256", "--hidden is \"-256\"");
    check_refused(command_check, "check", "--hidden 250", "multiple of 64");
    check_refused(command_check, "check", "--ranks 1,two", "\"two\"");
    check_refused(command_check, "check", "--ranks 0", "\"0\"");
    check_refused(command_check, "check", "--dropped 1.5", "--dropped");
    check_refused(command_check, "check", "--shared 0 --shared-gate", "no shared expert");
    check_refused(command_check, "check", "--swiglu-limit -1", "--swiglu-limit");
    check_refused(command_check, "check", "--backend cuda", "cuda");
    check_refused(command_check, "check", "--hidden 65536 --intermediate 65536 --experts 1000", "try fewer --experts");
    check_refused(command_check, "check", "--colour", "--colour");
    check_refused(command_check, "check", "--bad-ids --ranks 1", "expert id 8 is outside [-1, 8)");
    check_refused(command_check, "check", "--bad-ids --ranks 4 --experts 5", "expert id 5 is outside [-1, 5)");
}

/* ---------------------------------------------------------------------------------------------------------- bench -- */

#define TINY "--hidden 64 --intermediate 64 --shared 64 --experts 4 --tokens 32 --repeat 5 "

static void check_times(const json_value *layer, const char *name)
{
    const json_value *t = json_get(layer, name);
    CHECK_LE(0, number_at(t, "fastest_ms"));
    CHECK_LE(number_at(t, "fastest_ms"), number_at(t, "p50_ms"));
    CHECK_LE(number_at(t, "p50_ms"), number_at(t, "p99_ms"));
}

TEST(bench_measures_the_layer_and_the_gemm_beside_openblas)
{
    json_value *v = run_json(command_bench, TINY "--backend cpu --json", 0, NULL);
    REQUIRE(v);
    const json_value *layer = json_get(v, "layer"), *gemm = json_get(v, "gemm");
    REQUIRE(layer && gemm);
    check_times(layer, "schedule");
    check_times(layer, "forward");
    check_times(layer, "backward");
    CHECK_EQ(number_at(layer, "forward.flops"), 6.0 * 64 * 64 * (64 * 2 + 64)); /* 64 tokens, top-2, and the shared expert */
    CHECK(number_at(layer, "backward.gflops_per_second") > 0);
    CHECK_EQ(json_get(gemm, "shapes")->count, 3);
    for (const json_value *s = json_get(gemm, "shapes")->first; s; s = s->next)
        CHECK(number_at(s, "gflops_per_second") > 0);
    if (*text_at(gemm, "openblas"))
        CHECK(number_at(gemm, "ratio") > 0 && number_at(v, "skipped") == 0);
    else
        CHECK(*text_at(gemm, "openblas_missing") && number_at(v, "skipped") == 1);
    json_free(v);
}

TEST(bench_takes_a_model_with_changes)
{
    json_value *v = run_json(command_bench, "--only layer --model olmoe-1b-7b --hidden 64 --experts 3 --topk 2 --ranks 3 --tokens 7 --repeat 1 --json", 0, NULL);
    REQUIRE(v);
    CHECK_EQ(number_at(v, "shape.intermediate"), 1024);
    CHECK_EQ(number_at(v, "shape.hidden"), 64);
    CHECK_EQ(number_at(v, "shape.shared"), 0);
    CHECK(!json_get(v, "gemm"));
    json_free(v);
    CHECK_EQ(run(command_bench, TINY "--only layer --ranks 1"), 0);
    CHECK_STR(out, "forward");
}

TEST(bench_measures_mxfp8_with_and_without_a_weight_cache)
{
    static const char *const lines[] = {TINY "--only layer --dtype mxfp8 --json", TINY "--only layer --dtype mxfp8 --requantise --json"};
    for (int i = 0; i < 2; i++) {
        json_value *v = run_json(command_bench, lines[i], 0, NULL);
        REQUIRE(v);
        CHECK_STR(text_at(json_get(v, "shape"), "dtype"), "mxfp8");
        CHECK_EQ(number_at(v, "requantise"), i);
        check_times(json_get(v, "layer"), "forward");
        check_times(json_get(v, "layer"), "backward");
        json_free(v);
    }
}

TEST(bench_refuses_in_one_sentence)
{
    check_refused(command_bench, "bench", "--dtype fp4", "--dtype is \"fp4\"");
    check_refused(command_bench, "bench", "--topk 9", "topk 9 is larger than num_experts 8");
    check_refused(command_bench, "bench", "--tokens 0", "--tokens");
    check_refused(command_bench, "bench", "--model kimi-k2.7-cod", "did you mean kimi-k2.7-code?");
    check_refused(command_bench, "bench", "--hidden 65536 --intermediate 65536 --experts 1000", "try fewer --experts");
    check_refused(command_bench, "bench", "--ranks 9", "more than the 8 experts");
    check_refused(command_bench, "bench", "--backend cuda", "cuda");
    check_refused(command_bench, "bench", "--only both", "--only is \"both\"");
    check_refused(command_bench, "bench", "--repeat -1", "--repeat");
}

/* ------------------------------------------------------------------------------------------------------- all of them -- */

TEST(every_command_has_help)
{
#define HELP(name, summary)                                                                  \
    CHECK_EQ(run(command_##name, "--help"), 0);                                              \
    CHECK_STR(out, "usage: mok " #name " [options]");                                        \
    CHECK(*err == '\0');
    COMMAND_LIST(HELP)
#undef HELP
}

int main(int argc, char **argv) { return test_main(argc, argv); }
