/* mok trace and the writers of traces: JSON that a viewer can read, a picture that is XML, sums that are those of the events. */
#include "test.h"

#include "commands.h"
#include "json.h"
#include "mok.h"

#include <fcntl.h>

static char *read_all(const char *path)
{
    FILE *f = fopen(path, "r");
    size_t n = 0, room = 1 << 22;
    char *text = malloc(room);
    if (f && text)
        n = fread(text, 1, room - 1, f);
    if (f)
        fclose(f);
    text[n] = 0;
    return text;
}

static int64_t count_words(const char *text, const char *word)
{
    int64_t n = 0;
    for (const char *at = text; (at = strstr(at, word)); at += strlen(word))
        n++;
    return n;
}

static const char *temporary(const char *name)
{
    static char path[4][256];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, 256, "/tmp/mok-test-%d-%s", (int)getpid(), name);
    return p;
}

/* Two ranks, a lane of a CTA each with two events and a gap, one barrier. */
static const mok_trace_event made_up[] = {
    {.begin_ns = 1000, .end_ns = 3000, .rank = 0, .track = 2, .lane = 4, .sm = 17, .kind = MOK_TRACE_s2_gate_up, .tile = 5, .part = 1},
    {.begin_ns = 3000, .end_ns = 3500, .rank = 0, .track = 2, .lane = 4, .sm = 17, .kind = MOK_TRACE_s3_swiglu, .tile = 5, .part = 1},
    {.begin_ns = 2000, .end_ns = 4000, .rank = 1, .track = 0, .lane = 1, .sm = 0, .kind = MOK_TRACE_s1_dispatch, .tile = 7, .link_bytes = 4096},
    {.begin_ns = 4000, .end_ns = 5000, .rank = 1, .track = 0, .lane = 0, .sm = 0, .kind = MOK_TRACE_rank_barrier, .tile = -1},
};
enum { MADE_UP = sizeof made_up / sizeof *made_up };

TEST(chrome_json_has_every_event_once_with_its_times)
{
    const char *path = temporary("chrome.json");
    char error[256];
    CHECK_EQ(mok_trace_save(made_up, MADE_UP, MOK_TRACE_CHROME, path), MOK_OK);
    json_value *root = json_read_file(path, error, sizeof error);
    if (!root)
        TEST_FAILED("%s", error);
    const json_value *list = json_get(root, "traceEvents");
    int64_t complete = 0, names = 0;
    for (const json_value *e = list ? list->first : NULL; e; e = e->next) {
        const char *ph = json_get(e, "ph")->string;
        names += !strcmp(json_get(e, "name")->string, "thread_name");
        if (strcmp(ph, "X"))
            continue;
        complete++;
        if (!strcmp(json_get(e, "name")->string, "s3_swiglu")) {
            CHECK_EQ(json_get(e, "ts")->number * 1000, 2000);
            CHECK_EQ(json_get(e, "dur")->number * 1000, 500);
            CHECK_EQ(json_get(e, "pid")->integer, 0);
        }
        if (!strcmp(json_get(e, "name")->string, "s1_dispatch"))
            CHECK_EQ(json_get(json_get(e, "args"), "link_bytes")->integer, 4096);
    }
    CHECK_EQ(complete, MADE_UP);
    CHECK_EQ(names, 3);
    json_free(root);
    unlink(path);
}

TEST(the_picture_shows_every_lane_and_a_legend_of_what_is_there)
{
    const char *path = temporary("picture.svg");
    CHECK_EQ(mok_trace_save(made_up, MADE_UP, MOK_TRACE_SVG, path), MOK_OK);
    char *text = read_all(path);
    CHECK_EQ(strncmp(text, "<svg ", 5), 0);
    CHECK_STR(text, ">SM 17 math0</text>");
    CHECK_STR(text, ">SM 0 dispatch</text>");
    CHECK_STR(text, ">rank 1</text>");
    CHECK_STR(text, ">s2_gate_up</text>");
    CHECK(strstr(text, ">wgrad</text>") == NULL);
    CHECK_EQ(count_words(text, "<rect"), 1 + 4 + 4); /* background, events, legend */
    CHECK_STR(text, "</svg>");
    free(text);
    /* Widths are proportional: 2 us of 4 are half of the picture. */
    text = read_all(path);
    CHECK_STR(text, "width=\"600\"");
    free(text);
    unlink(path);
}

TEST(the_summary_has_shares_waits_and_rates)
{
    const char *path = temporary("summary.txt");
    CHECK_EQ(mok_trace_save(made_up, MADE_UP, MOK_TRACE_TEXT, path), MOK_OK);
    char *text = read_all(path);
    CHECK_STR(text, "rank 0: 2.50 us, 2 events");
    CHECK_STR(text, "s2_gate_up                1     80.0%");
    CHECK_STR(text, "s3_swiglu                 1     20.0%");
    CHECK_STR(text, "rank 1: 3.00 us, 2 events");
    CHECK_STR(text, "1.00 us  rank_barrier, rank 1, SM 0 main, from 3.00 us");
    CHECK_STR(text, "0.004 MB, 1.02 GB/s in the mean");
    free(text);
    unlink(path);
}

TEST(many_tracks_are_sampled_and_empty_traces_are_written)
{
    enum { TRACKS = 132 };
    const char *path = temporary("many.svg");
    mok_trace_event *e = calloc(TRACKS, sizeof *e);
    for (int i = 0; i < TRACKS; i++)
        e[i] = (mok_trace_event){.begin_ns = 10, .end_ns = 20, .track = i, .sm = i, .lane = 4, .kind = MOK_TRACE_s4_down};
    CHECK_EQ(mok_trace_save(e, TRACKS, MOK_TRACE_SVG, path), MOK_OK);
    char *text = read_all(path);
    CHECK_STR(text, "one track in 2 is shown");
    CHECK_EQ(count_words(text, "math0</text>"), 66);
    free(text);
    for (int f = MOK_TRACE_CHROME; f <= MOK_TRACE_TEXT; f++)
        CHECK_EQ(mok_trace_save(NULL, 0, (mok_trace_format)f, path), MOK_OK);
    unlink(path);
    free(e);
}

TEST(what_cannot_be_saved_is_said)
{
    mok_trace_event backwards = {.begin_ns = 2, .end_ns = 1};
    CHECK_EQ(mok_trace_save(made_up, MADE_UP, (mok_trace_format)9, "/tmp/x"), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "format is 9");
    CHECK_EQ(mok_trace_save(made_up, MADE_UP, MOK_TRACE_SVG, "/no/such/folder/x.svg"), MOK_E_ENV);
    CHECK_STR(mok_last_error(), "cannot write /no/such/folder/x.svg: No such file or directory");
    CHECK_EQ(mok_trace_save(&backwards, 1, MOK_TRACE_SVG, "/tmp/x"), MOK_E_ARG);
    CHECK_EQ(mok_trace_save(NULL, 1, MOK_TRACE_SVG, "/tmp/x"), MOK_E_ARG);
    CHECK_EQ(mok_trace_save(made_up, MADE_UP, MOK_TRACE_SVG, "/dev/full"), MOK_E_ENV);
    CHECK_STR(mok_trace_kind_name(-1), "unknown");
    CHECK_STR(mok_trace_kind_group(MOK_TRACE_s5_push), "s5_combine");
}

/* The command, its output in a file, behind what was said before. */
static const char *said_before = "";
static int run(char *output, const char *const *args, int n)
{
    char *argv[24];
    for (int i = 0; i < n; i++)
        argv[i] = (char *)(uintptr_t)args[i];
    fflush(stdout);
    int saved = dup(1), file = open(output, O_CREAT | O_TRUNC | O_WRONLY, 0600);
    dup2(file, 1);
    fputs(said_before, stdout);
    int status = command_trace(n, argv);
    fflush(stdout);
    dup2(saved, 1);
    close(saved);
    close(file);
    return status;
}
#define RUN(output, ...) run((char *)(uintptr_t)(output), (const char *const[]){__VA_ARGS__}, (int)(sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *)))
#define SMALL "--hidden", "128", "--intermediate", "64", "--shared", "64", "--experts", "4", "--tokens", "64", "--ranks", "2", "--threads", "2"

TEST(the_command_traces_each_pass)
{
    static const char *const passes[] = {"schedule", "forward", "recompute", "backward", "all"};
    static const char *const shown[] = {"s0_schedule", "s4_down", "s2_gate_up", "wgrad", "s5_combine_bwd"};
    const char *out = temporary("out.json"), *svg = temporary("out.svg");
    char error[256];
    for (size_t i = 0; i < sizeof passes / sizeof *passes; i++) {
        CHECK_EQ(RUN(out, SMALL, "--pass", passes[i], "--svg", svg, "--json"), 0);
        char *picture = read_all(svg), *text = read_all(out);
        if (i >= 3) { /* what is short beside a wait that lasts, on a busy machine, is in no pixel: but something is always seen */
            CHECK_STR(picture, "<rect");
            CHECK_STR(text, shown[i]);
        }
        json_value *root = json_parse(text, strlen(text), error, sizeof error);
        if (!root)
            TEST_FAILED("%s: %s", passes[i], error);
        CHECK_STR(json_get(root, "pass")->string, passes[i]);
        CHECK(json_get(root, "events")->integer > 0);
        CHECK_EQ(json_get(root, "events_lost")->integer, 0);
        const json_value *kinds = json_get(root, "kinds");
        CHECK(i == 4 || json_get(kinds, shown[i]) != NULL);
        CHECK((json_get(kinds, "wgrad") != NULL) == (i >= 3));
        CHECK((json_get(kinds, "s4_down") != NULL) == (i == 1 || i == 4));
        json_free(root);
        free(text);
        free(picture);
    }
    said_before = "a log that others write too\n";
    CHECK_EQ(RUN(out, SMALL), 0);
    char *text = read_all(out);
    CHECK_EQ(strncmp(text, said_before, strlen(said_before)), 0);
    said_before = "";
    CHECK_STR(text, "rank 1: ");
    CHECK_STR(text, "longest waits");
    free(text);
    unlink(out);
    unlink(svg);
}

TEST(the_command_refuses_in_a_sentence)
{
    const char *out = temporary("refused.txt");
    CHECK_EQ(RUN(out, "--pass", "sideways"), 2);
    CHECK_EQ(RUN(out, "--hidden", "100"), 2);
    CHECK_EQ(RUN(out, "--backend", "tpu"), 2);
    CHECK_EQ(RUN(out, SMALL, "--svg", "/no/such/folder/x.svg"), 1);
    CHECK_EQ(RUN(out, "--help"), 0);
    unlink(out);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
