/* Model table and config.json reader (cli/models.h). The example files are in data/. */
#include "test.h"

#include "models.h"
#include "mutate.h"

static char error[1024];

/* The path of data/<name>, found next to this source file. */
static const char *data_path(const char *name, char path[512])
{
    const char *slash = strrchr(__FILE__, '/');
    snprintf(path, 512, "%.*s/data/%s", slash ? (int)(slash - __FILE__) : 1, slash ? __FILE__ : ".", name);
    return path;
}

static void check_config(const char *file, model_shape expected)
{
    char path[512];
    model_shape m;
    error[0] = '\0';
    if (!model_load(data_path(file, path), &m, error, sizeof error))
        TEST_FAILED("%s", error);
    else if (strcmp(m.name, expected.name) != 0 || m.hidden != expected.hidden || m.intermediate != expected.intermediate ||
             m.experts != expected.experts || m.topk != expected.topk || m.shared != expected.shared ||
             m.shared_gate != expected.shared_gate || m.swiglu_limit != expected.swiglu_limit || m.benchmark || m.note)
        TEST_FAILED("%s: %s H %lld I %lld E %lld K %lld shared %lld gate %d limit %g", file, m.name, (long long)m.hidden,
                    (long long)m.intermediate, (long long)m.experts, (long long)m.topk, (long long)m.shared, m.shared_gate,
                    m.swiglu_limit);
}

#define SHAPE(...) ((model_shape){__VA_ARGS__})

TEST(config_deepseek_shared_width_is_count_times_width_and_dense_width_is_ignored)
{
    check_config("deepseek.json", SHAPE(.name = "deepseek_v3", .hidden = 768, .intermediate = 192, .experts = 48, .topk = 6,
                                        .shared = 384, .swiglu_limit = 10.0));
}
TEST(config_kimi_nested_in_text_config)
{
    check_config("kimi_nested.json", SHAPE(.name = "kimi_k2", .hidden = 1792, .intermediate = 448, .experts = 96, .topk = 8,
                                           .shared = 448));
}
TEST(config_kimi_linear_key_names)
{
    check_config("kimi_linear.json", SHAPE(.name = "kimi_linear", .hidden = 1152, .intermediate = 512, .experts = 64,
                                           .topk = 7, .shared = 512));
}
TEST(config_glm_with_two_equal_expert_counts)
{
    check_config("glm.json", SHAPE(.name = "glm4_moe", .hidden = 1536, .intermediate = 384, .experts = 40, .topk = 5,
                                   .shared = 384));
}
TEST(config_qwen2_moe_shared_expert_has_a_gate)
{
    check_config("qwen2_moe.json", SHAPE(.name = "qwen2_moe", .hidden = 896, .intermediate = 320, .experts = 60, .topk = 4,
                                         .shared = 1280, .shared_gate = true));
}
TEST(config_qwen3_moe_has_no_shared_expert)
{
    check_config("qwen3_moe.json", SHAPE(.name = "qwen3_moe", .hidden = 1024, .intermediate = 256, .experts = 32, .topk = 8));
}
TEST(config_qwen_nested_in_text_config)
{
    check_config("qwen_nested.json", SHAPE(.name = "qwen3_5_moe_text", .hidden = 1280, .intermediate = 128, .experts = 80,
                                           .topk = 10, .shared = 576, .shared_gate = true));
}
TEST(config_mixtral)
{
    check_config("mixtral.json", SHAPE(.name = "mixtral", .hidden = 960, .intermediate = 3520, .experts = 8, .topk = 2));
}
TEST(config_gpt_oss_with_swiglu_limit)
{
    check_config("gpt_oss.json", SHAPE(.name = "gpt_oss", .hidden = 704, .intermediate = 832, .experts = 24, .topk = 3,
                                       .swiglu_limit = 7.0));
}
TEST(config_olmoe)
{
    check_config("olmoe.json", SHAPE(.name = "olmoe", .hidden = 512, .intermediate = 448, .experts = 16, .topk = 4));
}

TEST(load_takes_a_folder_that_holds_config_json)
{
    char folder[] = "/tmp/mok_models_XXXXXX", path[64];
    REQUIRE(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *file = fopen(path, "w");
    REQUIRE(file != NULL);
    fputs("{\"num_experts\": 4, \"num_experts_per_tok\": 2, \"hidden_size\": 64, \"intermediate_size\": 128}", file);
    fclose(file);
    model_shape m;
    CHECK(model_load(folder, &m, error, sizeof error));
    CHECK_EQ(m.experts, 4);
    CHECK_STR(m.name, "config.json"); /* there is no model_type */
    unlink(path);
    CHECK(!model_load(folder, &m, error, sizeof error));
    CHECK_STR(error, "/config.json: No such file or directory");
    rmdir(folder);
}

TEST(table_is_alphabetical_and_plausible)
{
    for (size_t i = 0; i < model_count(); i++) {
        const model_shape *m = model_at(i);
        CHECK(model_find(m->name) == m);
        CHECK(i == 0 || strcmp(model_at(i - 1)->name, m->name) < 0);
        CHECK(m->hidden % 64 == 0 && m->intermediate % 64 == 0 && m->shared % 64 == 0);
        CHECK(m->hidden > 0 && m->intermediate > 0 && m->topk > 0 && m->topk <= m->experts);
        CHECK(!m->shared_gate || m->shared > 0);
    }
    CHECK(model_find("gpt-5") == NULL);
}

TEST(table_has_the_shape_that_the_two_wave_bounds_are_quoted_for)
{
    model_shape m;
    REQUIRE(model_load("kimi-k2.7-code", &m, error, sizeof error));
    CHECK_EQ(m.hidden, 7168);
    CHECK_EQ(m.intermediate, 2048);
    CHECK_EQ(m.experts, 384);
    CHECK_EQ(m.topk, 8);
    CHECK_EQ(m.shared, 2048);
    CHECK(m.benchmark && !m.shared_gate);
}

TEST(unknown_model_gives_the_list_of_models)
{
    model_shape m;
    CHECK(!model_load("gpt-5", &m, error, sizeof error));
    CHECK_EQ(strcmp(error, "there is no model and no file \"gpt-5\"; models: deepseek-v3, deepseek-v4-flash, deepseek-v4-pro, "
                           "glm-5.2, gpt-oss-20b, kimi-k2.7-code, mixtral-8x7b, olmoe-1b-7b, qwen3-30b-a3b, "
                           "qwen3.5-397b-a17b"), 0);
}

static void check_sentence(const char *input, const char *sentence)
{
    if (strcmp(error, sentence) != 0)
        TEST_FAILED("for %s\n    got      \"%s\"\n    expected \"%s\"", input, error, sentence);
}

/* A config that must be refused with exactly this sentence, `out` being left alone. */
static void check_refused(const char *text, const char *sentence)
{
    model_shape m = {.hidden = -77};
    json_value *v = json_parse(text, strlen(text), error, sizeof error);
    REQUIRE(v != NULL);
    if (model_from_config(v, "cfg.json", &m, error, sizeof error))
        TEST_FAILED("accepted: %s", text);
    else
        check_sentence(text, sentence);
    CHECK_EQ(m.hidden, -77);
    json_free(v);
}

TEST(file_that_cannot_be_read_is_named)
{
    model_shape m;
    CHECK(!model_load("/nonexistent/config.json", &m, error, sizeof error));
    check_sentence("no file", "cannot read /nonexistent/config.json: No such file or directory");
    CHECK(!model_load("missing.json", &m, error, sizeof error));
    check_sentence("no file", "cannot read missing.json: No such file or directory");
    CHECK(!model_load("/dev/null", &m, error, sizeof error));
    check_sentence("empty file", "/dev/null, line 1, column 1: expected a value, found the end of the text");
}

TEST(file_of_a_dense_model_is_refused)
{
    char path[512], sentence[1024];
    model_shape m;
    CHECK(!model_load(data_path("dense.json", path), &m, error, sizeof error));
    snprintf(sentence, sizeof sentence, "%s: not the config of a mixture-of-experts model, as none of \"n_routed_experts\", "
             "\"num_experts\", \"num_local_experts\" is there", path);
    check_sentence(path, sentence);
    check_refused("[1, 2]", "cfg.json: expected an object of settings, found another kind of JSON value");
    check_refused("{\"num_experts\": null, \"text_config\": 3}",
                  "cfg.json: not the config of a mixture-of-experts model, as none of \"n_routed_experts\", \"num_experts\", "
                  "\"num_local_experts\" is there");
}

#define REST "\"num_experts_per_tok\": 2, \"hidden_size\": 64, \"moe_intermediate_size\": 64}"

TEST(absurd_expert_counts_are_refused_with_key_and_value)
{
    check_refused("{\"num_experts\": 0, " REST, "cfg.json: \"num_experts\" is 0, but must be an integer from 1 to 2147483647");
    check_refused("{\"n_routed_experts\": -8, " REST, "cfg.json: \"n_routed_experts\" is -8, but must be an integer from 1 to 2147483647");
    check_refused("{\"num_local_experts\": 7.5, " REST, "cfg.json: \"num_local_experts\" is 7.5, but must be an integer from 1 to 2147483647");
    check_refused("{\"num_experts\": 2147483648, " REST, "cfg.json: \"num_experts\" is 2147483648, but must be an integer from 1 to 2147483647");
    check_refused("{\"num_experts\": 1e30, " REST, "cfg.json: \"num_experts\" is 1e+30, but must be an integer from 1 to 2147483647");
    check_refused("{\"num_experts\": \"8\\u001b\", " REST, "cfg.json: \"num_experts\" is \"8\\u001b\", but must be an integer from 1 to 2147483647");
    check_refused("{\"num_experts\": [8], " REST, "cfg.json: \"num_experts\" is an array, but must be an integer from 1 to 2147483647");
    check_refused("{\"num_experts\": true, " REST, "cfg.json: \"num_experts\" is true, but must be an integer from 1 to 2147483647");
    check_refused("{\"num_experts\": 8, \"n_routed_experts\": 9, " REST, "cfg.json: \"n_routed_experts\" is 9, but \"num_experts\" is 8");
}

TEST(absurd_topk_is_refused_with_key_and_value)
{
    check_refused("{\"num_experts\": 8, \"num_experts_per_tok\": 9, \"hidden_size\": 64, \"moe_intermediate_size\": 64}",
                  "cfg.json: \"num_experts_per_tok\" is 9, more than the 8 experts that \"num_experts\" gives");
    check_refused("{\"text_config\": {\"num_local_experts\": 8, \"experts_per_token\": 9, \"hidden_size\": 64, \"intermediate_size\": 64}}",
                  "cfg.json: \"text_config.experts_per_token\" is 9, more than the 8 experts that \"text_config.num_local_experts\" gives");
    check_refused("{\"num_experts\": 8, \"hidden_size\": 64}", "cfg.json: \"num_experts_per_tok\" is missing");
    check_refused("{\"num_experts\": 8, \"num_experts_per_tok\": 2, \"experts_per_token\": 4}",
                  "cfg.json: \"num_experts_per_tok\" is 2, but \"experts_per_token\" is 4");
}

TEST(absurd_widths_are_refused_with_key_and_value)
{
    check_refused("{\"num_experts\": 8, \"num_experts_per_tok\": 2, \"hidden_size\": -5}",
                  "cfg.json: \"hidden_size\" is -5, but must be an integer from 1 to 2147483647");
    check_refused("{\"num_experts\": 8, \"num_experts_per_tok\": 2, \"hidden_size\": null}", "cfg.json: \"hidden_size\" is missing");
    check_refused("{\"num_experts\": 8, \"num_experts_per_tok\": 2, \"hidden_size\": 64}", "cfg.json: \"intermediate_size\" is missing");
    check_refused("{\"n_routed_experts\": 8, \"num_experts_per_tok\": 2, \"hidden_size\": 64, \"intermediate_size\": 128}",
                  "cfg.json: \"moe_intermediate_size\" is missing"); /* intermediate_size is that of the dense layers */
    check_refused("{\"language_config\": {\"text_config\": {\"num_experts\": 8, \"num_experts_per_tok\": 2, \"hidden_size\": {}}}}",
                  "cfg.json: \"language_config.text_config.hidden_size\" is an object, but must be an integer from 1 to 2147483647");
}

TEST(absurd_shared_experts_are_refused_with_key_and_value)
{
    check_refused("{\"num_experts\": 8, \"n_shared_experts\": -1, " REST,
                  "cfg.json: \"n_shared_experts\" is -1, but must be an integer from 0 to 2147483647");
    check_refused("{\"num_experts\": 8, \"n_shared_experts\": 1000000000, " REST,
                  "cfg.json: \"n_shared_experts\" is 1000000000, which makes the shared expert 64000000000 wide, more than 2147483647");
    check_refused("{\"num_experts\": 8, \"shared_expert_intermediate_size\": 0.5, " REST,
                  "cfg.json: \"shared_expert_intermediate_size\" is 0.5, but must be an integer from 0 to 2147483647");
    check_refused("{\"num_experts\": 8, \"n_shared_experts\": 1, \"shared_expert_intermediate_size\": 64, " REST,
                  "cfg.json: \"n_shared_experts\" is 1 and \"shared_expert_intermediate_size\" is 64, but only one of them can "
                  "describe the shared expert");
}

TEST(absurd_swiglu_limits_are_refused_with_key_and_value)
{
    check_refused("{\"num_experts\": 8, \"swiglu_limit\": -7.5, " REST,
                  "cfg.json: \"swiglu_limit\" is -7.5, but must be a number from 0 (no limit) to 2147483647");
    check_refused("{\"num_experts\": 8, \"swiglu_limit\": \"7\", " REST,
                  "cfg.json: \"swiglu_limit\" is \"7\", but must be a number from 0 (no limit) to 2147483647");
}

TEST(shared_expert_of_width_zero_is_none)
{
    model_shape m;
    static const char text[] = "{\"num_experts\": 8, \"n_shared_experts\": 0, \"shared_expert_intermediate_size\": 0, \"swiglu_limit\": 0, " REST;
    json_value *v = json_parse(text, sizeof text - 1, error, sizeof error);
    REQUIRE(v != NULL);
    CHECK(model_from_config(v, "cfg.json", &m, error, sizeof error));
    CHECK_EQ(m.shared, 0);
    CHECK(!m.shared_gate && m.swiglu_limit == 0);
    json_free(v);
}

TEST(model_type_with_control_characters_is_made_printable)
{
    model_shape m;
    static const char text[] = "{\"model_type\": \"a\\u001b[31m\xc3\xa9 long name long name long name long name long name long name end\", \"num_experts\": 8, " REST;
    json_value *v = json_parse(text, sizeof text - 1, error, sizeof error);
    REQUIRE(v != NULL);
    CHECK(model_from_config(v, "cfg.json", &m, error, sizeof error));
    CHECK_STR(m.name, "a?[31m?? long name");
    CHECK_EQ(strlen(m.name), sizeof m.name - 1);
    json_free(v);
    static const char unnamed[] = "{\"model_type\": \"\", \"num_experts\": 8, " REST;
    v = json_parse(unnamed, sizeof unnamed - 1, error, sizeof error);
    REQUIRE(v != NULL);
    CHECK(model_from_config(v, "cfg.json", &m, error, sizeof error));
    CHECK_STR(m.name, "config.json");
    json_free(v);
}

TEST(nesting_is_followed_only_as_far_as_a_sentence_can_name_it)
{
    char text[2048] = "";
    for (int i = 0; i < 20; i++)
        strcat(text, "{\"language_config\": ");
    strcat(text, "{\"num_experts\": 0}");
    for (int i = 0; i < 20; i++)
        strcat(text, "}");
    check_refused(text, "cfg.json: not the config of a mixture-of-experts model, as none of \"n_routed_experts\", "
                        "\"num_experts\", \"num_local_experts\" is there");
}

static bool is_plausible(const model_shape *m)
{
    const int64_t max = MODEL_MAX_VALUE;
    return m->hidden >= 1 && m->hidden <= max && m->intermediate >= 1 && m->intermediate <= max && m->experts >= 1 &&
           m->experts <= max && m->topk >= 1 && m->topk <= m->experts && m->shared >= 0 && m->shared <= max &&
           (!m->shared_gate || m->shared > 0) && m->swiglu_limit >= 0 && m->swiglu_limit <= (double)max &&
           is_one_sentence(m->name);
}

static size_t read_example(const char *name, char *text, size_t capacity)
{
    char path[512];
    FILE *file = fopen(data_path(name, path), "rb");
    size_t length = file ? fread(text, 1, capacity, file) : 0;
    if (file)
        fclose(file);
    return length;
}

TEST(fuzz_20000_mutated_configs_are_read_or_refused_with_one_sentence)
{
    static const char *const names[] = {"deepseek.json", "kimi_linear.json", "kimi_nested.json", "glm.json", "qwen2_moe.json",
        "qwen3_moe.json", "qwen_nested.json", "mixtral.json", "gpt_oss.json", "olmoe.json", "dense.json"};
    uint64_t random = test_seed();
    char text[4096];
    int shapes = 0, refused = 0, not_json = 0;
    for (int i = 0; i < 20000; i++) {
        size_t length = read_example(names[(size_t)i % (sizeof names / sizeof *names)], text, sizeof text / 2);
        REQUIRE(length > 0);
        length = mutate(text, length, sizeof text, &random);
        model_shape m;
        error[0] = '\0';
        json_value *v = json_parse(text, length, error, sizeof error);
        bool ok = v && model_from_config(v, "cfg.json", &m, error, sizeof error);
        *(ok ? &shapes : v ? &refused : &not_json) += 1;
        if (ok ? !is_plausible(&m) : !is_one_sentence(error))
            TEST_FAILED("config %d: %s: %.*s", i, ok ? "implausible shape" : error, (int)length, text);
        json_free(v);
    }
    printf("  %d shapes, %d refused, %d not JSON\n", shapes, refused, not_json);
    CHECK(shapes > 1000 && refused > 1000 && not_json > 200);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
