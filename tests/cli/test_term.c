/* Tables, units, progress bar, curves and CSV (cli/term.h). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* posix_openpt */
#endif
#include "test.h"

#include "term.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>

static void check_text(const char *got, const char *expected)
{
    if (strcmp(got, expected) != 0)
        TEST_FAILED("got\n%s\nexpected\n%s", got, expected);
}

TEST(bytes_have_binary_units)
{
    check_text(term_bytes(0).text, "0 B");
    check_text(term_bytes(512).text, "512 B");
    check_text(term_bytes(1023).text, "1023 B");
    check_text(term_bytes(1024).text, "1.00 KiB");
    check_text(term_bytes(1.5 * 1024 * 1024 * 1024).text, "1.50 GiB");
    check_text(term_bytes(9.999 * 1024).text, "10.0 KiB"); /* rounding gives another digit before the point */
    check_text(term_bytes(99.99 * 1024).text, "100 KiB");
    check_text(term_bytes(1023.9 * 1024).text, "1.00 MiB");
    check_text(term_bytes(-2048).text, "-2.00 KiB");
    check_text(term_bytes(0x1p70).text, "1024 EiB");
    check_text(term_bytes(1e300).text, "8.67e+281 EiB");
}

TEST(rates_have_decimal_units)
{
    check_text(term_si(0, "B/s").text, "0.00 B/s");
    check_text(term_si(999, "B/s").text, "999 B/s");
    check_text(term_si(999.9, "B/s").text, "1.00 kB/s");
    check_text(term_si(450e9, "B/s").text, "450 GB/s");
    check_text(term_si(1.234e12, "FLOP/s").text, "1.23 TFLOP/s");
    check_text(term_si(0.0005, "step/s").text, "0.0005 step/s");
}

TEST(times_have_fitting_units)
{
    check_text(term_seconds(0).text, "0.00 s");
    check_text(term_seconds(2e-9).text, "2.00 ns");
    check_text(term_seconds(850e-6).text, "850 us");
    check_text(term_seconds(12.34e-3).text, "12.3 ms");
    check_text(term_seconds(0.9999).text, "1.00 s");
    check_text(term_seconds(59.94).text, "59.9 s");
    check_text(term_seconds(59.96).text, "1 min 00 s");
    check_text(term_seconds(125).text, "2 min 05 s");
    check_text(term_seconds(3599.7).text, "1 h 00 min");
    check_text(term_seconds(3720).text, "1 h 02 min");
    check_text(term_seconds(INFINITY).text, "?");
    check_text(term_seconds(NAN).text, "?");
}

TEST(counts_have_separators)
{
    check_text(term_count(0).text, "0");
    check_text(term_count(999).text, "999");
    check_text(term_count(2560).text, "2,560");
    check_text(term_count(14680064).text, "14,680,064");
    check_text(term_count(-123456).text, "-123,456");
    check_text(term_count(INT64_MIN).text, "-9,223,372,036,854,775,808");
}

/* A stream into memory; take() closes it and returns the text, which stays valid until the next open. */
static char *memory;
static size_t memory_length;
static FILE *open_memory(void)
{
    free(memory);
    memory = NULL;
    return open_memstream(&memory, &memory_length);
}
static const char *take(FILE *out)
{
    fclose(out);
    return memory;
}

TEST(table_aligns_columns_by_characters)
{
    term_table t;
    term_table_start(&t, "lrl", (const char *[]){"buffer", "bytes", "use"});
    term_table_cell(&t, "%s", "ring");
    term_table_cell(&t, "%d", 1234567);
    term_table_cell(&t, "%s", "rows of x");
    term_table_cell(&t, "%s", "caf\xc3\xa9");
    term_table_cell(&t, "%d", 8);
    term_table_cell(&t, "%s", "");
    FILE *out = open_memory();
    CHECK(term_table_print(&t, out));
    check_text(take(out), "buffer    bytes  use\n"
                          "------  -------  ---------\n"
                          "ring    1234567  rows of x\n"
                          "caf\xc3\xa9          8  \n");
}

TEST(table_without_rows_or_with_a_partial_row_is_printed)
{
    term_table t;
    term_table_start(&t, "lr", (const char *[]){"a", "b"});
    FILE *out = open_memory();
    CHECK(term_table_print(&t, out));
    check_text(take(out), "a  b\n-  -\n");
    term_table_start(&t, "lr", (const char *[]){"a", "b"});
    term_table_cell(&t, "x");
    out = open_memory();
    CHECK(term_table_print(&t, out));
    check_text(take(out), "a  b\n-  -\nx\n");
}

TEST(table_grows_to_many_rows)
{
    term_table t;
    term_table_start(&t, "r", (const char *[]){"n"});
    for (int i = 0; i < 1000; i++)
        term_table_cell(&t, "%d", i);
    FILE *out = open_memory();
    CHECK(term_table_print(&t, out));
    CHECK_STR(take(out), "\n 99\n100\n");
}

TEST(progress_line_shows_share_rate_and_time_left)
{
    char line[512];
    term_progress p = {.label = "training", .unit = "step", .done = 30, .total = 120};
    check_text(term_progress_line(&p, 10, 80, line, sizeof line),
               "training [######.....................]  25 %  30/120  3.00 step/s  30.0 s left");
    p.first = 20; /* resumed: only this run's steps count for the rate */
    CHECK_STR(term_progress_line(&p, 10, 80, line, sizeof line), "1.00 step/s  1 min 30 s left");
    p.done = 20;
    CHECK_STR(term_progress_line(&p, 0, 80, line, sizeof line), "0.00 step/s  ? left");
    p.done = 500; /* past the end: no overflow of the bar */
    CHECK_STR(term_progress_line(&p, 10, 80, line, sizeof line), "100 %");
    p.total = 0;
    CHECK_STR(term_progress_line(&p, 10, 10, line, sizeof line), "training []");
}

/* Runs the progress bar with `stderr` going to `fd`. */
static void run_progress(int fd)
{
    fflush(stderr);
    int saved = dup(STDERR_FILENO);
    dup2(fd, STDERR_FILENO);
    term_progress p;
    term_progress_start(&p, "reading", "file", 0, 4);
    for (int i = 0; i <= 4; i++)
        term_progress_update(&p, i);
    term_progress_clear(&p);
    fflush(stderr);
    dup2(saved, STDERR_FILENO);
    close(saved);
}

TEST(progress_is_silent_if_stderr_is_not_a_terminal)
{
    char path[] = "/tmp/mok_term_XXXXXX";
    int fd = mkstemp(path);
    REQUIRE(fd >= 0);
    run_progress(fd);
    CHECK_EQ(lseek(fd, 0, SEEK_END), 0);
    close(fd);
    unlink(path);
}

TEST(progress_draws_on_a_terminal_within_its_width_and_removes_itself)
{
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0)
        SKIP("no pseudo-terminal on this machine");
    int terminal = open(ptsname(master), O_RDWR | O_NOCTTY);
    REQUIRE(terminal >= 0);
    struct winsize window = {.ws_col = 60, .ws_row = 20};
    ioctl(terminal, TIOCSWINSZ, &window);
    run_progress(terminal);
    char text[4096];
    size_t n = 0;
    struct pollfd readable = {.fd = master, .events = POLLIN};
    while (n < sizeof text - 1 && poll(&readable, 1, 200) > 0) { /* what was written may arrive in pieces */
        ssize_t got = read(master, text + n, sizeof text - 1 - n);
        REQUIRE(got > 0);
        n += (size_t)got;
    }
    REQUIRE(n > 0);
    text[n] = '\0';
    CHECK_STR(text, "\rreading [");
    int width = 0;
    for (const char *c = text; *c; c++) {
        width = *c == '\r' ? 0 : width + 1;
        CHECK(width < 60);
        CHECK(*c != '\n');
    }
    CHECK_EQ(text[n - 1], '\r');
    close(terminal);
    close(master);
}

TEST(columns_are_80_without_a_terminal)
{
    FILE *file = fopen("/dev/null", "w");
    REQUIRE(file != NULL);
    CHECK_EQ(term_columns(file), 80);
    fclose(file);
}

TEST(plot_draws_a_curve_with_axes_and_labels)
{
    const double y[] = {8, 6, 4, 2, 0};
    const term_curve curve = {.label = "train", .y = y, .count = 5};
    FILE *out = open_memory();
    CHECK(term_plot(out, "step", "loss", &curve, 1, 52, 13));
    check_text(take(out), "loss\n"
                          "       8.0 |***\n"
                          "           |   *****\n"
                          "           |        *****\n"
                          "           |             *****\n"
                          "       4.0 |                  *****\n"
                          "           |                       ****\n"
                          "           |                           *****\n"
                          "           |                                *****\n"
                          "       0.0 |                                     ***\n"
                          "           +----------------------------------------\n"
                          "            0.0                2.0               4.0\n"
                          "                              step\n");
}

TEST(plot_marks_several_curves_differently)
{
    const double a[] = {1, 2, 3}, b[] = {3, 2, 1}, x[] = {0, 500, 1000};
    const term_curve curves[] = {{"train", x, a, 3}, {"held out", x, b, 3}};
    FILE *out = open_memory();
    CHECK(term_plot(out, "step", "loss", curves, 2, 80, 16));
    const char *text = take(out);
    CHECK_STR(text, "* train   o held out\n");
    CHECK_STR(text, " 3.00 |o");
    CHECK_STR(text, " 1.00 |*");
    CHECK_STR(text, "  0 ");
    CHECK_STR(text, " 500 ");
    CHECK_STR(text, " 1000\n");
}

TEST(plot_leaves_out_what_is_not_finite)
{
    const double y[] = {NAN, 1, INFINITY, 2, -INFINITY, 1e308, NAN};
    const term_curve curve = {.label = "a", .y = y, .count = 7};
    FILE *out = open_memory();
    CHECK(term_plot(out, "step", "loss", &curve, 1, 80, 16));
    const char *text = take(out);
    CHECK_STR(text, "2.00 |");
    CHECK_STR(text, "1.00 |");
    CHECK(!strstr(text, "nan") && !strstr(text, "inf"));
}

TEST(plot_survives_degenerate_ranges)
{
    const double same[] = {5, 5, 5}, zero[] = {0}, tiny[] = {5e-324}, huge[] = {-1e299, 1e299}, none[] = {NAN};
    const term_curve curves[] = {{"same", NULL, same, 3}, {"zero", zero, zero, 1}, {"tiny", tiny, tiny, 1},
                                 {"huge", huge, huge, 2}, {"none", NULL, none, 1}, {"empty", NULL, NULL, 0}};
    for (size_t i = 0; i < sizeof curves / sizeof *curves; i++) {
        FILE *out = open_memory();
        CHECK(term_plot(out, "step", "loss", &curves[i], 1, 80, 16));
        const char *text = take(out);
        if (i >= 4)
            check_text(text, "loss: no points to draw\n");
        else
            CHECK_STR(text, "*");
    }
}

TEST(plot_stays_within_its_width)
{
    double y[3000];
    uint64_t random = test_seed();
    for (int i = 0; i < 3000; i++)
        y[i] = 5.5 - 0.001 * i + 0.2 * test_normal(&random);
    const term_curve curve = {.label = "train", .y = y, .count = 3000};
    for (int columns = 40; columns <= 200; columns += 20) {
        FILE *out = open_memory();
        CHECK(term_plot(out, "step", "loss", &curve, 1, columns, 20));
        int width = 0;
        for (const char *c = take(out); *c; c++) {
            width = *c == '\n' ? 0 : width + 1;
            CHECK(width <= columns);
        }
    }
}

static const char *read_back(const char *path)
{
    static char text[4096];
    FILE *file = fopen(path, "r");
    size_t n = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file)
        fclose(file);
    text[n] = '\0';
    return text;
}

TEST(csv_merges_curves_with_different_x)
{
    char path[] = "/tmp/mok_csv_XXXXXX", error[256];
    int fd = mkstemp(path);
    REQUIRE(fd >= 0);
    close(fd);
    const double xb[] = {1, 2.5}, ya[] = {0.1, 1.0 / 3, NAN, -INFINITY}, yb[] = {7, 8};
    const term_curve curves[] = {{"train, \"a\"", NULL, ya, 4}, {"held", xb, yb, 2}};
    CHECK(term_write_csv(path, "step", curves, 2, error, sizeof error));
    check_text(read_back(path), "step,\"train, \"\"a\"\"\",held\n"
                                "0,0.1,\n"
                                "1,0.3333333333333333,7\n"
                                "2,nan,\n"
                                "2.5,,8\n"
                                "3,-inf,\n");
    unlink(path);
}

TEST(csv_failures_name_the_file)
{
    char error[256];
    const double y[] = {1};
    const term_curve curve = {"a", NULL, y, 1};
    CHECK(!term_write_csv("/nonexistent/loss.csv", "step", &curve, 1, error, sizeof error));
    check_text(error, "cannot write /nonexistent/loss.csv: No such file or directory");
    if (access("/dev/full", W_OK) == 0) {
        CHECK(!term_write_csv("/dev/full", "step", &curve, 1, error, sizeof error));
        check_text(error, "cannot write /dev/full: No space left on device");
    }
}

int main(int argc, char **argv) { return test_main(argc, argv); }
