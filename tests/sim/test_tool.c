/* mok simulate, tune and calibrate as commands: JSON read back, files written, refusals in sentences. */
#define TEST_WATCHDOG 300
#include "command.h"
#include "commands.h"
#include "json.h"

static int run(command_fn *command, const char *line) { return command_run(command, line, NULL); }

static json_value *parsed(void)
{
    char error[256] = "";
    json_value *v = json_parse(out, strlen(out), error, sizeof error);
    if (!v)
        TEST_FAILED("%s in %.200s; stderr: %.300s", error, out, err);
    return v;
}

static double number(const json_value *v, const char *key)
{
    const json_value *n = json_get(v, key);
    return n && n->type == JSON_NUMBER ? n->number : NAN;
}

#define SMALL "--hidden 512 --intermediate 256 --experts 16 --topk 2 --tokens 256 "

/* In a folder that the program owns. */
static const char *path_of(const char *name)
{
    static char folder[64], path[4][128];
    static int next;
    if (!folder[0]) {
        snprintf(folder, sizeof folder, "/tmp/mok_test_sim_XXXXXX");
        if (!mkdtemp(folder))
            exit(1);
    }
    char *p = path[next++ % 4];
    snprintf(p, sizeof path[0], "%s/%s", folder, name);
    return p;
}

static bool file_contains(const char *path, const char *part)
{
    static char text[1 << 20];
    FILE *in = fopen(path, "r");
    if (!in)
        return false;
    text[fread(text, 1, sizeof text - 1, in)] = '\0';
    fclose(in);
    return strstr(text, part) != NULL;
}

TEST(simulate_prints_every_strategy_as_json)
{
    CHECK_EQ(run(command_simulate, SMALL "--ranks 2,4 --strategy all --moe-share 0.5 --baseline deepep --json"), 0);
    json_value *v = parsed();
    const json_value *runs = json_get(v, "runs");
    REQUIRE(runs && runs->count == 2 * 2 * 7);
    for (const json_value *r = runs->first; r; r = r->next) {
        CHECK(number(r, "seconds") > 0);
        CHECK_LE(number(r, "exposed_link"), number(r, "seconds"));
        CHECK_LE(fabs(number(r, "before") + number(r, "kernel") + number(r, "after") - number(r, "seconds")), 1e-4); /* phases have a shared part of their own */
        if (!strcmp(json_get(r, "pass")->string, "backward") && !strcmp(json_get(r, "strategy")->string, "deepep"))
            CHECK_LE(fabs(number(r, "step_ratio") - 1), 1e-12); /* the baseline against itself */
    }
    json_free(v);
}

TEST(simulate_reads_recorded_routes_and_writes_a_timeline_and_plots)
{
    const char *ids = path_of("ids.txt"), *trace = path_of("trace.json"), *svg = path_of("plot.svg");
    char line[1024];
    FILE *to = fopen(ids, "w");
    REQUIRE(to);
    for (int i = 0; i < 2 * 256; i++)
        fprintf(to, "%d, %d\n", i % 4, 4 + i % 4); /* experts 0 to 7 only: all on the first of two ranks */
    fclose(to);
    snprintf(line, sizeof line, SMALL "--ranks 2 --strategy mok --pass forward --routing file:%s --trace %s --svg %s --json", ids, trace, svg);
    CHECK_EQ(run(command_simulate, line), 0);
    json_value *v = parsed(), *events;
    char error[256];
    CHECK_LE(fabs(number(json_get(v, "runs")->first, "rows_max") - 1024), 0);
    CHECK_LE(fabs(number(json_get(v, "runs")->first, "rows_mean") - 512), 0);
    events = json_read_file(trace, error, sizeof error);
    CHECK(events && events->type == JSON_ARRAY && events->count > 20);
    CHECK(file_contains(trace, "\"dispatch\"") && file_contains(trace, "\"down\""));
    CHECK(file_contains(svg, "</svg>") && file_contains(svg, "rows in the ring"));
    json_free(events);
    json_free(v);
    snprintf(line, sizeof line, SMALL "--ranks 4 --strategy mok --routing file:%s", ids);
    CHECK_EQ(run(command_simulate, line), 2);
    CHECK_STR(err, "has 1024 ids");
    snprintf(line, sizeof line, "--hidden 512 --intermediate 256 --experts 4 --topk 2 --tokens 256 --ranks 2 --strategy mok --routing file:%s", ids);
    CHECK_EQ(run(command_simulate, line), 2);
    CHECK_STR(err, "is no expert from -1 to 3");
}

TEST(refusals_are_sentences)
{
    CHECK_EQ(run(command_simulate, SMALL "--profile no-such-machine"), 2);
    CHECK_STR(err, "there is no profile \"no-such-machine\"");
    CHECK_EQ(run(command_simulate, SMALL "--strategy mok,magic"), 2);
    CHECK_STR(err, "there is no \"magic\"");
    CHECK_EQ(run(command_simulate, SMALL "--set speed=3"), 2);
    CHECK_STR(err, "\"speed\" is no figure");
    CHECK_EQ(run(command_simulate, SMALL "--set sms=1.5"), 2);
    CHECK_STR(err, "sms is 1.5");
    CHECK_EQ(run(command_simulate, SMALL "--comm-sms 132 --strategy mok --ranks 2"), 2);
    CHECK_STR(err, "leave no cluster");
    CHECK_EQ(run(command_simulate, SMALL "--ranks 16"), 2);
    CHECK_STR(err, "16 ranks, but profile h200-x8 is an NVLink domain of 8 GPUs");
    CHECK_EQ(run(command_simulate, SMALL "--dtype fp4"), 2);
    CHECK_STR(err, "must be bf16 or mxfp8");
    const char *bad = path_of("bad.json");
    FILE *to = fopen(bad, "w");
    REQUIRE(to);
    fputs("{\"base\": \"h200-x8\", \"hbm_gbps\": \"fast\"}", to);
    fclose(to);
    char line[512];
    snprintf(line, sizeof line, SMALL "--profile %s", bad);
    CHECK_EQ(run(command_simulate, line), 2);
    CHECK_STR(err, "\"hbm_gbps\" is \"fast\"");
}

TEST(every_shipped_profile_loads)
{
    static const char *const names[] = {"h200-x2", "h200-x8", "gb200-nvl72", "gb300-nvl72", "b300-x8"};
    char line[512];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(line, sizeof line, SMALL "--ranks 2 --strategy mok --pass forward --json --profile %s", names[i]);
        CHECK_EQ(run(command_simulate, line), 0);
        json_value *v = parsed();
        CHECK_STR(json_get(v, "profile")->string, names[i]);
        json_free(v);
    }
}

TEST(tune_finds_no_worse_than_the_plan)
{
    const char *svg = path_of("tune.svg");
    char line[512];
    snprintf(line, sizeof line, SMALL "--ranks 2 --seeds 2 --json --svg %s", svg);
    CHECK_EQ(run(command_tune, line), 0);
    json_value *v = parsed();
    static const char *const passes[] = {"forward", "backward"};
    for (int i = 0; i < 2; i++) {
        const json_value *pass = json_get(v, passes[i]);
        double best = number(pass, "seconds");
        CHECK_LE(best, 1.001 * number(pass, "plan_seconds"));
        for (const json_value *t = json_get(pass, "tried")->first; t; t = t->next)
            CHECK(!(number(t, "seconds") < 0.998 * best)); /* ties go to the smaller minibatch */
        CHECK_LE(2 * number(pass, "minibatch_rows"), number(v, "ring_rows"));
    }
    CHECK_LE(number(v, "gain_least"), number(v, "gain_most"));
    CHECK(json_get(v, "verdict") && file_contains(svg, "rows of a minibatch"));
    json_free(v);
}

/* Records that the simulator itself has made, on a machine with another rate: the fit must find them again. */
TEST(calibrate_predicts_the_half_it_has_not_seen)
{
    const char *records = path_of("records.json"), *profile = path_of("fitted.json");
    char line[512];
    FILE *to = fopen(records, "w");
    REQUIRE(to);
    static const char *const passes[] = {"forward", "backward", "train"};
    for (int i = 0; i < 12; i++) {
        const char *pass = passes[i % 3];
        int tokens = 1024 + 512 * (i / 3);
        double seconds = 0;
        snprintf(line, sizeof line, "--hidden 1024 --intermediate 512 --experts 8 --topk 2 --tokens %d --ranks 1 --mode burst --strategy mok --pass %s --routing replacement --ring 8192 --save all "
                 "--set bf16_tflops=500 --json --profile h200-x2", tokens, i % 3 == 2 ? "both" : pass);
        REQUIRE(run(command_simulate, line) == 0);
        json_value *v = parsed();
        for (const json_value *r = json_get(v, "runs")->first; r; r = r->next)
            seconds += number(r, "seconds");
        fprintf(to, "%s{\"shape\": \"made\", \"T\": %d, \"H\": 1024, \"I\": 512, \"E\": 8, \"K\": 2, \"ranks\": 1, \"shared\": 0, \"save\": \"all\", \"ring_rows\": 8192, \"pass\": \"%s\", "
                "\"mode\": \"burst\", \"ms\": {\"p50\": %.9g}}", i ? ",\n" : "[", tokens, pass, seconds * 1e3);
        json_free(v);
    }
    fputs("]\n", to);
    fclose(to);
    snprintf(line, sizeof line, "--records %s --profile h200-x2 --free bf16_tflops --json --within 1 --out %s --name fitted", records, profile);
    CHECK_EQ(run(command_calibrate, line), 0);
    json_value *v = parsed();
    REQUIRE(v);
    CHECK_LE(number(v, "worst_fitted_on_a"), 0.01);
    CHECK_LE(number(v, "worst_fitted_on_b"), 0.01);
    CHECK_LE(fabs(number(json_get(v, "free")->first, "fitted_on_a") / 500 - 1), 0.02);
    json_free(v);
    snprintf(line, sizeof line, SMALL "--ranks 1 --strategy mok --json --profile %s", profile);
    CHECK_EQ(run(command_simulate, line), 0); /* what was written can be read */
    snprintf(line, sizeof line, "--records %s --profile h200-x2 --free task_us --within 0.001", records);
    CHECK_EQ(run(command_calibrate, line), 1); /* the wrong figure cannot make up for it */
}

int main(int argc, char **argv) { return test_main(argc, argv); }
