/* mok soak and mok doctor: what they print, and that the soak notices what is wrong. */
#include "capture.h"
#include "test.h"

#include "commands.h"
#include "json.h"

static json_value *parse(const char *text)
{
    char error[256];
    json_value *v = json_parse(text, strlen(text), error, sizeof error);
    if (!v)
        TEST_FAILED("%s in %.200s", error, text);
    return v;
}

TEST(a_short_soak_passes_and_counts)
{
    char *text, seed[32];
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)(test_seed() >> 16));
    int status = CAPTURE(command_soak, &text, "--steps", "24", "--faults", "4", "--seed", seed, "--json");
    json_value *v = parse(text);
    if (v) {
        CHECK_EQ(status, 0);
        CHECK(json_get(v, "passed")->boolean);
        CHECK_EQ(json_get(v, "steps")->integer, 24);
        CHECK_EQ(json_get(v, "faults")->integer, 6);
        CHECK(json_get(v, "rows")->integer > 0);
    }
    json_free(v);
    free(text);
}

TEST(a_wrong_bit_is_noticed_and_the_step_can_be_repeated)
{
    char *text;
    setenv("MOK_SOAK_FAULT", "dx", 1);
    CHECK_EQ(CAPTURE(command_soak, &text, "--steps", "3", "--seed", "5", "--json"), 1);
    json_value *v = parse(text);
    CHECK(v && !json_get(v, "passed")->boolean);
    CHECK_STR(v ? json_get(v, "error")->string : "", "dx differs from its repetition");
    json_free(v);
    free(text);
    unsetenv("MOK_SOAK_FAULT");
}

TEST(ranks_that_are_told_different_things_are_noticed)
{
    char *text;
    setenv("MOK_SOAK_FAULT", "told", 1);
    CHECK_EQ(CAPTURE(command_soak, &text, "--steps", "20", "--faults", "1", "--seed", "5", "--json"), 1);
    json_value *v = parse(text);
    CHECK_STR(v ? json_get(v, "error")->string : "", "is told");
    json_free(v);
    free(text);
    unsetenv("MOK_SOAK_FAULT");
}

TEST(F2_processes_that_end_leave_the_others_to_go_on)
{
    char *text, seed[32];
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)(test_seed() >> 16));
    CHECK_EQ(CAPTURE(command_soak, &text, "--steps", "3", "--faults", "0", "--processes", "1", "--seed", seed, "--json"), 0);
    json_value *v = parse(text);
    if (v) {
        CHECK(json_get(v, "passed")->boolean);
        CHECK_EQ(json_get(v, "processes_ended")->integer, 3);
        CHECK(json_get(v, "steps")->integer >= 3 + 3 * 4); /* at least one process of each three goes on for four steps */
    }
    json_free(v);
    free(text);
    setenv("MOK_SOAK_FAULT", "process", 1);
    CHECK_EQ(CAPTURE(command_soak, &text, "--steps", "1", "--faults", "0", "--processes", "1", "--seed", "3", "--json"), 1);
    v = parse(text);
    CHECK_STR(v ? json_get(v, "error")->string : "", "is not as one rank has it");
    json_free(v);
    free(text);
    unsetenv("MOK_SOAK_FAULT");
}

TEST(doctor_prints_every_finding_in_both_forms)
{
    char *text;
    setenv("MOK_DOCTOR_FAULT", "driver", 1);
    CHECK_EQ(CAPTURE(command_doctor, &text, "--json"), 0);
    json_value *v = parse(text);
    const json_value *list = json_get(v, "findings");
    CHECK(list && list->count >= 14);
    const json_value *last = NULL;
    for (const json_value *f = list ? list->first : NULL; f; f = f->next)
        last = f;
    CHECK_STR(last ? json_get(last, "check")->string : "", "verdict");
    CHECK_STR(last ? json_get(last, "detail")->string : "", "backend cpu works");
    json_free(v);
    free(text);
    CHECK_EQ(CAPTURE(command_doctor, &text, "--help"), 0);
    free(text);
    setenv("MOK_DOCTOR_FAULT", "socket", 1);
    (void)CAPTURE(command_doctor, &text, "--help");
    free(text);
    const char *const nothing[1] = {NULL};
    int status = capture(command_doctor, &text, nothing, 0);
    CHECK(status == 0 || status == 1); /* as the machine is */
    CHECK_STR(text, "bad      sockets ");
    CHECK_STR(text, "-> allow AF_UNIX sockets");
    free(text);
    unsetenv("MOK_DOCTOR_FAULT");
}

int main(int argc, char **argv) { return test_main(argc, argv); }
