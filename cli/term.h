/* What people see: aligned tables, numbers with units, a progress bar, curves drawn with characters, and CSV files. */
#ifndef MOK_CLI_TERM_H
#define MOK_CLI_TERM_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* ------------------------------------------------------------------------------------------ numbers with units -- *
 * The text is returned by value, so that it can be used inside one printf: printf("%s\n", term_bytes(n).text). */
typedef struct term_text { char text[72]; } term_text;

term_text term_bytes(double bytes);                    /* "512 B", "1.50 GiB": powers of 1024 */
term_text term_si(double value, const char *unit);     /* "1.23 TFLOP/s", "450 GB/s": powers of 1000, three digits */
term_text term_seconds(double seconds);                /* "850 us", "12.3 ms", "1.50 s", "2 min 05 s", "1 h 02 min" */
term_text term_count(int64_t count);                   /* "14,680,064" */

double term_now(void); /* seconds on a clock that only moves forward */

/* The width of the terminal behind `stream`, between 40 and 200; 80 if there is none. */
int term_columns(FILE *stream);

/* -------------------------------------------------------------------------------------------------------- tables -- *
 *   term_table t;
 *   term_table_start(&t, "lr", (const char *[]){"buffer", "bytes"});   one letter per column: l left, r right
 *   term_table_cell(&t, "%s", name); term_table_cell(&t, "%s", term_bytes(n).text);     row after row
 *   term_table_print(&t, stdout);                                      and frees it */
typedef struct term_table {
    const char *align;
    size_t num_columns, num_cells, capacity;
    char **cells; /* the headers first, then row after row */
    bool failed;  /* memory ran out */
} term_table;

void term_table_start(term_table *t, const char *align, const char *const *headers);
__attribute__((format(printf, 2, 3))) void term_table_cell(term_table *t, const char *format, ...);
bool term_table_print(term_table *t, FILE *out); /* false if memory ran out; then nothing was printed */

/* -------------------------------------------------------------------------------------------------- progress bar -- *
 * Drawn on stderr, and only if that is a terminal; otherwise all of these do nothing. */
typedef struct term_progress {
    const char *label, *unit;     /* "training", "step": kept, not copied */
    int64_t first, done, total;   /* first: where this run began, e.g. the step of a checkpoint */
    double started, drawn;        /* term_now() */
    bool visible;
} term_progress;

void term_progress_start(term_progress *p, const char *label, const char *unit, int64_t first, int64_t total);
void term_progress_update(term_progress *p, int64_t done); /* draws at most ten times a second: call it freely */
void term_progress_clear(term_progress *p);                /* removes the bar; before other output and at the end */
/* The line itself, for `seconds` since the start: what term_progress_update draws. Returns `line`. */
char *term_progress_line(const term_progress *p, double seconds, int columns, char *line, size_t size);

/* -------------------------------------------------------------------------------------------------------- curves -- */
typedef struct term_curve {
    const char *label;
    const double *x; /* [count], ascending; NULL = 0, 1, 2, ... */
    const double *y; /* [count]; a NaN or infinity is a gap */
    size_t count;
} term_curve;

/* Draws the curves into a field of `columns` x about `rows` characters, axes and labels included. Where several points
 * share a column, their mean is drawn. False if memory ran out. */
bool term_plot(FILE *out, const char *x_label, const char *y_label, const term_curve *curves, size_t num_curves,
               int columns, int rows);

/* One line per x, one field per curve, empty where a curve has no point at that x. Numbers read back as the same doubles.
 * False and one sentence on failure. */
bool term_write_csv(const char *path, const char *x_name, const term_curve *curves, size_t num_curves, char *error,
                    size_t error_size);
#endif
