/* mok bench on backend cuda, all of it (and mok check and mok soak in MXFP8), with the emulator as the GPU. Its events tell launches as milliseconds, so every time is known. */
#define TEST_WATCHDOG 900
#define MOK_EXPERIMENTAL
#include "test.h"

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "emulated_driver.h"

extern "C" {
#include "bench.h"
#include "commands.h"
#include "json.h"
}

/* What a command prints (stream 1, or 2: what it complains about), and its exit status. */
static std::string run_command(int (*command)(int, char **), std::vector<const char *> args, int *status, int stream = 1,
                               std::function<void(const std::string &, const void *)> before_launch = nullptr)
{
    FILE *file = tmpfile();
    std::string text;
    fflush(nullptr);
    const int kept = dup(stream);
    dup2(fileno(file), stream);
    emulated::plug_in(test_seed(), 2);
    emulated::gpu.before_launch = before_launch;
    *status = command((int)args.size(), const_cast<char **>(args.data()));
    fflush(nullptr);
    dup2(kept, stream);
    close(kept);
    rewind(file);
    for (int c; (c = fgetc(file)) != EOF;)
        text += (char)c;
    fclose(file);
    if (!emulated::gpu.trouble.empty())
        TEST_FAILED("emulator: %s", emulated::gpu.trouble.c_str());
    CHECK_EQ(emulated::gpu.live, 0);
    return text;
}

static std::string bench(std::vector<const char *> args, int *status, int stream = 1, std::function<void(const std::string &, const void *)> before_launch = nullptr)
{
    return run_command(command_bench, args, status, stream, before_launch);
}

static double number(const json_value *object, const char *key)
{
    const json_value *v = json_get(object, key);
    if (!v || v->type != JSON_NUMBER)
        TEST_FAILED("there is no number %s", key);
    return v ? v->number : NAN;
}

static const json_value *stage(const json_value *stages, const char *operation, const char *name)
{
    for (const json_value *s = stages ? stages->first : nullptr; s; s = s->next)
        if (!strcmp(json_get(s, "operation")->string, operation) && !strcmp(json_get(s, "stage")->string, name))
            return s;
    TEST_FAILED("there is no %s of %s", name, operation);
    return nullptr;
}

static void check_stage(const json_value *stages, const char *operation, const char *name, double launches)
{
    const json_value *s = stage(stages, operation, name);
    if (!s)
        return;
    if (number(s, "launches") != launches || number(s, "p50_ms") != launches || number(s, "p99_ms") != launches)
        TEST_FAILED("%s of %s: %g launches, %g ms, %g ms, but there are %g", name, operation, number(s, "launches"), number(s, "p50_ms"), number(s, "p99_ms"), launches);
}

#define SHAPE "--backend", "cuda", "--hidden", "64", "--intermediate", "64", "--shared", "64", "--experts", "4", "--topk", "2", "--tokens", "24", "--repeat", "2"

TEST(json_has_stages_rates_and_traffic)
{
    int status;
    char error[256];
    const std::string text = bench({SHAPE, "--ranks", "1", "--json"}, &status);
    REQUIRE(status == 0);
    json_value *v = json_parse(text.data(), text.size(), error, sizeof error);
    if (!v)
        TEST_FAILED("%s: %s", error, text.c_str());
    REQUIRE(v);
    const json_value *layer = json_get(v, "layer"), *fused = json_get(layer, "stages"), *staged = json_get(layer, "staged");
    CHECK(!strcmp(json_get(v, "backend")->string, "cuda"));
    CHECK(json_get(v, "gpu") && json_get(layer, "schedule") && json_get(layer, "forward") && json_get(layer, "backward"));
    check_stage(fused, "schedule", "s0_schedule", 5);
    check_stage(fused, "forward", "begin", 1);
    check_stage(fused, "forward", "fused", 1);
    check_stage(fused, "forward", "s5_combine", 1);
    check_stage(fused, "backward", "fused", 1);
    const double routes = 24 * 2, flops = 6.0 * 64 * 64 * (routes + 24), steps = number(stage(staged, "forward", "s1_dispatch"), "launches");
    CHECK(steps >= 1);
    check_stage(staged, "forward", "s1_dispatch", steps);
    check_stage(staged, "forward", "s2_gate_up", steps + 1); /* and the shared expert's */
    check_stage(staged, "forward", "s4_down", steps + 1);
    CHECK_EQ(number(stage(fused, "forward", "fused"), "flops"), flops);
    CHECK_EQ(number(stage(staged, "forward", "s2_gate_up"), "flops") + number(stage(staged, "forward", "s4_down"), "flops"), flops);
    CHECK_EQ(number(stage(staged, "backward", "s4_down_bwd"), "flops") + number(stage(staged, "backward", "s2_gate_up_bwd"), "flops") +
             number(stage(staged, "backward", "wgrad"), "flops"), 2 * flops);
    CHECK_EQ(number(stage(fused, "backward", "fused"), "flops"), 2 * flops);
    CHECK_EQ(number(stage(staged, "forward", "s1_dispatch"), "bytes"), routes * 128);
    CHECK_EQ(number(stage(staged, "forward", "s5_combine"), "bytes"), 24 * 128 * 4);
    /* begin, fused, combine; a rank alone launches no barriers */
    const double ms = number(json_get(layer, "forward_gpu"), "p50_ms");
    CHECK_EQ(ms, 3);
    CHECK(fabs(number(layer, "tflops_per_second") / (1e-9 * flops / ms) - 1) < 1e-6);
    CHECK_EQ(number(layer, "rows"), routes);
    CHECK_EQ(number(layer, "table_rows"), 4 * 128);
    CHECK(fabs(number(layer, "padding_share") - (1 - routes / 512)) < 1e-9);
    CHECK_EQ(number(layer, "bytes_pulled"), 0);
    CHECK_EQ(number(layer, "link_gb_per_second"), 0);
    json_free(v);
}

TEST(table_for_people_over_two_ranks)
{
    int status;
    const std::string text = bench({SHAPE, "--ranks", "2"}, &status);
    CHECK_EQ(status, 0);
    for (const char *part : {"backend cuda (", "s0_schedule", "rank_barrier", "fused", "s1_dispatch", "s2_gate_up", "s4_down", "wgrad", "s5_combine", "FLOP/s", "are padding (", "The busiest rank pulls "})
        CHECK_STR(text.c_str(), part);
    CHECK(text.find(" pulls 0 B") == std::string::npos); /* half of the tokens live on the other rank */
}

TEST(mxfp8_has_a_stage_that_widens_weights)
{
    int status;
    const std::string text = bench({SHAPE, "--dtype", "mxfp8"}, &status);
    CHECK_EQ(status, 0);
    for (const char *part : {"mx_weights", "begin", "fused", "s1_dispatch", "s2_gate_up", "s4_down", "wgrad"})
        CHECK_STR(text.c_str(), part);
}

#define LINK "--backend", "cuda", "--only", "link", "--repeat", "1"

static const json_value *link_case(const json_value *v, const char *routing, double row_bytes)
{
    for (const json_value *c = json_get(json_get(v, "link"), "cases")->first; c; c = c->next)
        if (!strcmp(json_get(c, "routing")->string, routing) && number(c, "row_bytes") == row_bytes)
            return c;
    TEST_FAILED("there is no case %s of %g bytes", routing, row_bytes);
    return nullptr;
}

TEST(link_of_virtual_ranks_moves_what_the_routing_says)
{
    int status;
    char error[256];
    const std::string text = bench({LINK, "--ranks", "3", "--tokens", "8", "--row-bytes", "1152", "--json"}, &status);
    REQUIRE(status == 0);
    json_value *v = json_parse(text.data(), text.size(), error, sizeof error);
    REQUIRE(v);
    CHECK(json_get(json_get(v, "link"), "one_gpu")->boolean);
    const double bytes = 1152;
    const json_value *balanced = link_case(v, "balanced", bytes), *most = link_case(v, "most to rank 0", bytes), *one = link_case(v, "all to rank 0", bytes);
    REQUIRE(balanced && most && one);
    CHECK_EQ(number(balanced, "rows"), 8);
    CHECK_EQ(number(json_get(balanced, "pull"), "bytes"), 8 * bytes);
    CHECK_EQ(number(json_get(balanced, "both"), "bytes"), 16 * bytes);
    CHECK_EQ(number(one, "rows"), 16); /* of the two others */
    CHECK_EQ(number(json_get(one, "plain_push"), "bytes"), 16 * bytes);
    CHECK_EQ(number(json_get(one, "both"), "bytes"), 16 * bytes); /* nothing leaves rank 0 */
    CHECK_EQ(number(most, "rows"), 2 * 6 + 2); /* three quarters of the rows of the others, and one row more of each */
    for (const char *work : {"pull", "push", "both"}) {
        const json_value *t = json_get(balanced, work);
        CHECK(number(t, "p50_ms") > 0 && number(t, "p99_ms") >= number(t, "p50_ms") && number(t, "share_of_ceiling") > 0);
        CHECK(fabs(number(t, "gb_per_second") / (1e-6 * number(t, "bytes") / number(t, "p50_ms")) - 1) < 1e-6);
    }
    CHECK(number(json_get(one, "push_news"), "p50_ms") > 0);
    const json_value *mx = json_get(balanced, "pull_mx");
    CHECK_EQ(number(mx, "bytes"), 8 * (576 + 576 / 32)); /* of 576 numbers; the bench has compared with what dispatch counted */
    CHECK(number(mx, "times_as_fast_as_bf16") > 0 && number(balanced, "mx_bytes_of_bf16") <= 0.52 && number(balanced, "mx_bytes_of_bf16") > 0.5);
    json_free(v);
}

TEST(link_of_one_rank_with_rows_longer_than_a_slot)
{
    int status;
    const std::string text = bench({LINK, "--ranks", "1", "--tokens", "3", "--row-bytes", "33024"}, &status);
    CHECK_EQ(status, 0);
    for (const char *part : {"1 rank", "on one GPU, so nothing crosses a link", "33024", "alone", "pull", "push", "both", "push: more", "0.516"})
        CHECK_STR(text.c_str(), part);
}

TEST(link_notices_a_wrong_word_and_a_missing_signal)
{
    for (const bool signal : {false, true}) {
        int status, checks = 0;
        const std::string text = bench({LINK, "--ranks", "1", "--tokens", "200", "--row-bytes", "256"}, &status, 2, [&](const std::string &kernel, const void *params) {
            const mk_link_params &p = *static_cast<const mk_link_params *>(params);
            if (kernel != "mok_link_check" || (signal ? !(p.signal & MK_LINK_SIGNAL_PUSH) : !p.payload || !p.pull) || checks++)
                return;
            if (signal)
                *reinterpret_cast<uint32_t *>(p.rank.heap + p.rank.memory.dweight_slots + 4 * 7) ^= 1;
            else
                p.rank.local[p.rank.memory.ring_x + 256 * 3 + 17] ^= 4;
        });
        CHECK_EQ(status, 1);
        CHECK_STR(text.c_str(), "rank 0: 1 of the words it received are wrong");
    }
}

TEST(link_notices_a_wrong_number_that_came_in_MXFP8_and_a_miscount)
{
    for (const bool miscount : {false, true}) {
        int status, moves = 0;
        const std::string text = bench({LINK, "--ranks", "1", "--tokens", "20", "--row-bytes", "256"}, &status, 2, [&](const std::string &kernel, const void *params) {
            const mk_link_params &p = *static_cast<const mk_link_params *>(params);
            if (kernel != "mok_link_check" || !p.mx || moves++)
                return;
            if (miscount)
                reinterpret_cast<mk_device_state *>(p.rank.local + p.rank.memory.device_state)->row_moves_peer++;
            else
                p.rank.local[p.rank.memory.ring_x + 2] ^= 4;
        });
        CHECK_EQ(status, 1);
        CHECK_STR(text.c_str(), miscount ? "bytes were counted over the link, but its" : "1 of the words it received are wrong");
    }
}

TEST(link_refuses_with_a_sentence)
{
    const struct { std::vector<const char *> args; const char *sentence; } wrong[] = {
        {{LINK, "--row-bytes", "1000"}, "--row-bytes has 1000, but rows are multiples of 128 bytes"},
        {{LINK, "--ranks", "65"}, "--ranks is 65, but the link is measured with at most 64"},
        {{"--only", "link"}, "--only link needs --backend cuda"},
        {{LINK, "--devices", "0"}, "--devices"},
        {{"--backend", "cuda", "--processes"}, "--processes goes with --only link"},
    };
    for (const auto &w : wrong) {
        int status;
        const std::string text = bench(w.args, &status, 2);
        CHECK_EQ(status, 2);
        CHECK_STR(text.c_str(), w.sentence);
    }
}

TEST(a_gpu_line_of_the_drivers_tool_is_read)
{
    bench_gpu g = {};
    CHECK(bench_gpu_parse("NVIDIA H200, 580.95.05, 1755, 1980, 3201, 512.34\n", &g));
    CHECK_STR(g.name, "NVIDIA H200");
    CHECK_STR(g.driver, "580.95.05");
    CHECK(g.sm_clock_mhz == 1755 && g.max_sm_clock_mhz == 1980 && g.memory_clock_mhz == 3201 && g.power_w == 512.34);
    CHECK(bench_gpu_parse("GPU, 1, [N/A], 2, 3, [N/A]", &g) && isnan(g.sm_clock_mhz) && isnan(g.power_w));
    CHECK(!bench_gpu_parse("No devices were found", &g));
    CHECK(!bench_gpu_parse("", &g));
    CHECK(!bench_gpu_parse("a, b, 1, 2, 3, 4, 5", &g));
}

TEST(stage_times_are_refused_where_there_are_none)
{
    mok_group *group;
    mok_workspace *w;
    mok_config c = MOK_INIT(mok_config);
    mok_stage_time times[1];
    int32_t count = 1;
    c.hidden = c.intermediate = 64;
    c.num_experts = c.topk = c.max_tokens = 1;
    REQUIRE(mok_group_create_local(1, nullptr, &group) == MOK_OK);
    REQUIRE(mok_workspace_create(group, &c, &w) == MOK_OK);
    CHECK_EQ(mok_stage_times_start(w), MOK_E_UNSUPPORTED);
    CHECK_STR(mok_last_error(), "backend cpu has no stage times");
    mok_workspace_destroy(w);
    mok_group_destroy(group);
    const int32_t device = 0;
    emulated::plug_in(test_seed(), 2);
    REQUIRE(mok_group_create_local(1, &device, &group) == MOK_OK);
    REQUIRE(mok_workspace_create(group, &c, &w) == MOK_OK);
    CHECK_EQ(mok_stage_times_read(w, times, &count), MOK_E_STATE);
    CHECK_EQ(mok_stage_times_start(w), MOK_OK);
    CHECK_EQ(mok_stage_times_read(w, times, &count), MOK_OK);
    CHECK_EQ(count, 0);
    CHECK_EQ(mok_stage_times_read(w, nullptr, &count), MOK_E_ARG);
    mok_workspace_destroy(w);
    mok_group_destroy(group);
    CHECK_EQ(emulated::gpu.live, 0);
}

/* ---- mok check and mok soak in MXFP8, as on a GPU ---- */

TEST(check_and_soak_pass_in_mxfp8)
{
    int status;
    const std::string checked = run_command(command_check, {"--backend", "cuda", "--dtype", "mxfp8", "--hidden", "64", "--intermediate", "64", "--experts", "2", "--topk", "2",
                                                            "--tokens", "132", "--ranks", "2", "--quick"}, &status);
    if (status)
        TEST_FAILED("%s", checked.c_str());
    CHECK_STR(checked.c_str(), "weights widened before");
    int widened = 0;
    const std::string seed = std::to_string(test_seed() % 100000); /* which decides what the faults are, too */
    const std::string soaked = run_command(command_soak, {"--backend", "cuda", "--dtype", "mxfp8", "--steps", "4", "--seed", seed.c_str(), "--faults", "1", "--processes", "0"}, &status, 1,
                                           [&](const std::string &kernel, const void *) { widened += kernel == "mok_mx_widen_weights"; });
    CHECK_EQ(status, 0);
    CHECK_STR(soaked.c_str(), "4 steps in");
    CHECK_STR(soaked.c_str(), "4 faults, each told to all ranks");
    CHECK(widened > 0);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
