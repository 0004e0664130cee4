/* Output for people; see term.h. Only plain characters and the carriage return are used, so that any terminal will do. */
#include "term.h"

#include "json.h" /* json_format_double */

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

/* -------------------------------------------------------------------------------------------- numbers with units -- */

/* Three significant digits for 0 <= value < 1000 or so: 1.50, 12.3, 450. The limits are those of the rounding. */
static void format_three_digits(char *text, size_t size, double value)
{
    double magnitude = fabs(value);
    snprintf(text, size, "%.*f", magnitude < 9.995 ? 2 : magnitude < 99.95 ? 1 : 0, value);
}

term_text term_bytes(double bytes)
{
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    term_text t;
    char number[32];
    if (!(fabs(bytes) < 1023.5)) {
        size_t i = 0;
        for (bytes /= 1024; fabs(bytes) >= 1023.5 && i + 1 < sizeof units / sizeof units[0]; i++)
            bytes /= 1024;
        if (fabs(bytes) < 1e6)
            format_three_digits(number, sizeof number, bytes);
        else
            snprintf(number, sizeof number, "%.3g", bytes);
        snprintf(t.text, sizeof t.text, "%s %s", number, units[i]);
    } else {
        snprintf(t.text, sizeof t.text, "%.0f B", bytes);
    }
    return t;
}

term_text term_si(double value, const char *unit)
{
    static const char *const prefixes[] = {"", "k", "M", "G", "T", "P", "E"};
    term_text t;
    char number[32];
    size_t i = 0;
    for (; fabs(value) >= 999.5 && i + 1 < sizeof prefixes / sizeof prefixes[0]; i++)
        value /= 1000;
    if (fabs(value) < 1e6 && (fabs(value) >= 0.01 || value == 0))
        format_three_digits(number, sizeof number, value);
    else
        snprintf(number, sizeof number, "%.3g", value);
    snprintf(t.text, sizeof t.text, "%s %s%.20s", number, prefixes[i], unit);
    return t;
}

term_text term_seconds(double seconds)
{
    term_text t;
    char number[32];
    double magnitude = fabs(seconds);
    if (!(magnitude < 86400.0 * 36500)) { /* NaN, infinity or a century: an estimate gone wrong */
        snprintf(t.text, sizeof t.text, "?");
        return t;
    }
    if (magnitude < 59.95) {
        const char *unit = magnitude == 0 || magnitude >= 0.9995 ? "s" : magnitude >= 0.9995e-3 ? "ms"
                         : magnitude >= 0.9995e-6 ? "us" : "ns";
        double scale = *unit == 's' ? 1 : *unit == 'm' ? 1e3 : *unit == 'u' ? 1e6 : 1e9;
        format_three_digits(number, sizeof number, seconds * scale);
        snprintf(t.text, sizeof t.text, "%s %s", number, unit);
        return t;
    }
    long long whole = llround(magnitude);
    const char *sign = seconds < 0 ? "-" : "";
    if (whole < 3600)
        snprintf(t.text, sizeof t.text, "%s%lld min %02lld s", sign, whole / 60, whole % 60);
    else
        snprintf(t.text, sizeof t.text, "%s%lld h %02lld min", sign, whole / 3600, whole / 60 % 60);
    return t;
}

term_text term_count(int64_t count)
{
    term_text t;
    char digits[24];
    int n = snprintf(digits, sizeof digits, "%lld", (long long)count), used = 0;
    int first_digit = digits[0] == '-';
    for (int i = 0; i < n; i++) {
        if (i > first_digit && (n - i) % 3 == 0)
            t.text[used++] = ',';
        t.text[used++] = digits[i];
    }
    t.text[used] = '\0';
    return t;
}

double term_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int clamp(int value, int low, int high) { return value < low ? low : value > high ? high : value; }

int term_columns(FILE *stream)
{
    struct winsize window;
    if (!isatty(fileno(stream)) || ioctl(fileno(stream), TIOCGWINSZ, &window) != 0 || window.ws_col == 0)
        return 80;
    return clamp(window.ws_col, 40, 200);
}

/* -------------------------------------------------------------------------------------------------------- tables -- */

/* Columns that a text takes on the screen: its characters, not its bytes. */
static int text_width(const char *text)
{
    int width = 0;
    for (; *text; text++)
        width += ((unsigned char)*text & 0xc0) != 0x80;
    return width;
}

void term_table_start(term_table *t, const char *align, const char *const *headers)
{
    *t = (term_table){.align = align, .num_columns = strlen(align)};
    for (size_t i = 0; i < t->num_columns; i++)
        term_table_cell(t, "%s", headers[i]);
}

static bool make_room(term_table *t)
{
    if (t->num_cells < t->capacity)
        return true;
    size_t capacity = t->capacity ? t->capacity * 2 : 64;
    char **larger = realloc(t->cells, capacity * sizeof *larger);
    if (!larger)
        return false;
    t->cells = larger;
    t->capacity = capacity;
    return true;
}

void term_table_cell(term_table *t, const char *format, ...)
{
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    char *copy = t->failed || !make_room(t) ? NULL : strdup(text);
    if (copy)
        t->cells[t->num_cells++] = copy;
    else
        t->failed = true;
}

static void print_cell(FILE *out, const char *text, int width, bool right, bool last)
{
    int space = width - text_width(text);
    if (right)
        fprintf(out, "%*s%s", space, "", text);
    else if (last)
        fputs(text, out); /* no spaces at the end of a line */
    else
        fprintf(out, "%s%*s", text, space, "");
    fputs(last ? "\n" : "  ", out);
}

static void print_rule(FILE *out, const int *widths, size_t num_columns)
{
    for (size_t c = 0; c < num_columns; c++) {
        for (int i = 0; i < widths[c]; i++)
            fputc('-', out);
        fputs(c + 1 == num_columns ? "\n" : "  ", out);
    }
}

static void free_table(term_table *t)
{
    for (size_t i = 0; i < t->num_cells; i++)
        free(t->cells[i]);
    free(t->cells);
    *t = (term_table){0};
}

bool term_table_print(term_table *t, FILE *out)
{
    size_t n = t->num_columns;
    int *widths = t->failed || n == 0 ? NULL : calloc(n, sizeof *widths);
    if (!widths) {
        free_table(t);
        return false;
    }
    for (size_t i = 0; i < t->num_cells; i++)
        if (text_width(t->cells[i]) > widths[i % n])
            widths[i % n] = text_width(t->cells[i]);
    for (size_t i = 0; i < t->num_cells; i++) {
        bool last = i % n == n - 1 || i + 1 == t->num_cells;
        print_cell(out, t->cells[i], widths[i % n], t->align[i % n] == 'r', last);
        if (i == n - 1)
            print_rule(out, widths, n);
    }
    free(widths);
    free_table(t);
    return true;
}

/* -------------------------------------------------------------------------------------------------- progress bar -- */

void term_progress_start(term_progress *p, const char *label, const char *unit, int64_t first, int64_t total)
{
    *p = (term_progress){.label = label, .unit = unit, .first = first, .done = first, .total = total};
    p->visible = isatty(STDERR_FILENO);
    p->started = term_now();
    p->drawn = -1;
}

char *term_progress_line(const term_progress *p, double seconds, int columns, char *line, size_t size)
{
    double share = p->total > 0 ? (double)p->done / (double)p->total : 1;
    share = share < 0 ? 0 : share > 1 ? 1 : share;
    double rate = seconds > 0 ? (double)(p->done - p->first) / seconds : 0;
    char numbers[256], bar[64], per_second[32];
    snprintf(per_second, sizeof per_second, "%.24s/s", p->unit);
    snprintf(numbers, sizeof numbers, "%3d %%  %lld/%lld  %s  %s left", (int)(100 * share), (long long)p->done,
             (long long)p->total, term_si(rate, per_second).text,
             term_seconds(rate > 0 ? (double)(p->total - p->done) / rate : INFINITY).text);
    int width = clamp(columns - 1 - text_width(p->label) - (int)strlen(numbers) - 5, 0, 40);
    int filled = (int)(share * width);
    for (int i = 0; i < width; i++)
        bar[i] = i < filled ? '#' : '.';
    bar[width] = '\0';
    snprintf(line, size, "%s [%s] %s", p->label, bar, numbers);
    return line;
}

/* Padding with spaces erases what is left of the line before. */
static void draw_line(const char *line)
{
    int columns = term_columns(stderr);
    fprintf(stderr, "\r%-*.*s", columns - 1, columns - 1, line);
    fflush(stderr);
}

void term_progress_update(term_progress *p, int64_t done)
{
    char line[512];
    p->done = done;
    if (!p->visible)
        return;
    double now = term_now();
    if (p->drawn >= 0 && now - p->drawn < 0.1)
        return;
    p->drawn = now;
    draw_line(term_progress_line(p, now - p->started, term_columns(stderr), line, sizeof line));
}

void term_progress_clear(term_progress *p)
{
    if (!p->visible || p->drawn < 0)
        return;
    draw_line("");
    fputc('\r', stderr);
    fflush(stderr);
    p->drawn = -1;
}

/* -------------------------------------------------------------------------------------------------------- curves -- */

typedef struct plot {
    const term_curve *curves;
    size_t num_curves;
    int width, height;   /* of the field inside the axes */
    double x_low, x_high, y_low, y_high;
    double *mean;        /* [num_curves, width]: mean of the points in a column; NaN = none */
    char *field;         /* [height, width] */
} plot;

static const char marks[] = "*o+x#@";
static char mark_of(size_t curve) { return marks[curve % (sizeof marks - 1)]; }

static double curve_x(const term_curve *c, size_t i) { return c->x ? c->x[i] : (double)i; }

/* Values beyond 1e300 are left out with NaN and infinities, so that differences and sums stay finite. */
static bool is_drawn(const term_curve *c, size_t i) { return fabs(c->y[i]) < 1e300 && fabs(curve_x(c, i)) < 1e300; }

static int column_of(const plot *p, double x)
{
    return clamp((int)floor((x - p->x_low) / (p->x_high - p->x_low) * (p->width - 1) + 0.5), 0, p->width - 1);
}

static int row_of(const plot *p, double y)
{
    return clamp((int)floor((p->y_high - y) / (p->y_high - p->y_low) * (p->height - 1) + 0.5), 0, p->height - 1);
}

/* A range of zero length is widened, as positions are divided by it. */
static void widen(double *low, double *high)
{
    if (*high > *low)
        return;
    double by = fabs(*low) < 1e-300 ? 1 : fabs(*low) * 0.5; /* half of the smallest doubles would be 0 */
    *low -= by;
    *high += by;
}

static bool find_x_range(plot *p)
{
    p->x_low = INFINITY;
    p->x_high = -INFINITY;
    for (size_t c = 0; c < p->num_curves; c++)
        for (size_t i = 0; i < p->curves[c].count; i++)
            if (is_drawn(&p->curves[c], i)) {
                p->x_low = fmin(p->x_low, curve_x(&p->curves[c], i));
                p->x_high = fmax(p->x_high, curve_x(&p->curves[c], i));
            }
    if (p->x_low > p->x_high)
        return false;
    widen(&p->x_low, &p->x_high);
    return true;
}

/* Sums as sum/n, one term after the other, which cannot overflow: mean += (y - mean) / n. */
static void find_column_means(plot *p, size_t c, int64_t *points)
{
    const term_curve *curve = &p->curves[c];
    double *mean = p->mean + c * (size_t)p->width;
    for (int i = 0; i < p->width; i++) {
        mean[i] = NAN;
        points[i] = 0;
    }
    for (size_t i = 0; i < curve->count; i++) {
        if (!is_drawn(curve, i))
            continue;
        int column = column_of(p, curve_x(curve, i));
        if (points[column]++ == 0)
            mean[column] = curve->y[i];
        else
            mean[column] += (curve->y[i] - mean[column]) / (double)points[column];
    }
}

static void find_y_range(plot *p)
{
    p->y_low = INFINITY;
    p->y_high = -INFINITY;
    for (size_t i = 0; i < p->num_curves * (size_t)p->width; i++)
        if (!isnan(p->mean[i])) {
            p->y_low = fmin(p->y_low, p->mean[i]);
            p->y_high = fmax(p->y_high, p->mean[i]);
        }
    widen(&p->y_low, &p->y_high);
}

/* Marks every column from the curve's first to its last point; columns without points are interpolated. */
static void draw_curve(plot *p, size_t c)
{
    const double *mean = p->mean + c * (size_t)p->width;
    int last = -1;
    for (int i = 0; i < p->width; i++) {
        if (isnan(mean[i]))
            continue;
        for (int j = last < 0 ? i : last + 1; j <= i; j++) {
            double y = j == i ? mean[i] : mean[last] + (mean[i] - mean[last]) * (j - last) / (i - last);
            p->field[row_of(p, y) * p->width + j] = mark_of(c);
        }
        last = i;
    }
}

/* As many decimals as tell neighbouring labels apart. */
static void format_label(char *text, size_t size, double value, double step)
{
    if (fabs(value) >= 1e9 || step < 1e-6)
        snprintf(text, size, "%.4g", value);
    else
        snprintf(text, size, "%.*f", clamp((int)ceil(-log10(step)) + 1, 0, 7), value);
}

/* The margin is fixed because the labels' width would depend on the y range, which depends on the width of the field. */
enum { ROWS_PER_LABEL = 4, PLOT_MARGIN = 10 };

static void y_axis_label(const plot *p, int row, char *text, size_t size)
{
    double step = (p->y_high - p->y_low) / (p->height - 1);
    *text = '\0';
    if (row % ROWS_PER_LABEL == 0)
        format_label(text, size, p->y_high - step * row, step * ROWS_PER_LABEL);
}

static void print_x_axis(const plot *p, FILE *out, const char *x_label)
{
    char low[32], middle[32], high[32];
    double half = (p->x_high - p->x_low) / 2;
    fprintf(out, "%*s +", PLOT_MARGIN, "");
    for (int i = 0; i < p->width; i++)
        fputc('-', out);
    format_label(low, sizeof low, p->x_low, half);
    format_label(middle, sizeof middle, p->x_low + half, half);
    format_label(high, sizeof high, p->x_high, half);
    int before = p->width / 2 - (int)strlen(low) - (int)strlen(middle) / 2;
    int after = p->width - (int)strlen(low) - before - (int)strlen(middle) - (int)strlen(high);
    if (before < 1 || after < 1) { /* no room for three */
        middle[0] = '\0';
        before = 0;
        after = p->width - (int)strlen(low) - (int)strlen(high);
    }
    fprintf(out, "\n%*s  %s%*s%s%*s%s\n", PLOT_MARGIN, "", low, before, "", middle, after > 0 ? after : 1, "", high);
    int indent = (p->width - text_width(x_label)) / 2;
    fprintf(out, "%*s  %*s%s\n", PLOT_MARGIN, "", indent > 0 ? indent : 0, "", x_label);
}

static void print_plot(const plot *p, FILE *out, const char *x_label, const char *y_label)
{
    char label[32];
    fprintf(out, "%s\n", y_label);
    for (int row = 0; row < p->height; row++) {
        const char *line = p->field + row * p->width;
        int end = p->width;
        while (end > 0 && line[end - 1] == ' ')
            end--;
        y_axis_label(p, row, label, sizeof label);
        fprintf(out, "%*s |%.*s\n", PLOT_MARGIN, label, end, line);
    }
    print_x_axis(p, out, x_label);
    for (size_t c = 0; p->num_curves > 1 && c < p->num_curves; c++)
        fprintf(out, "%s%c %s%s", c ? "   " : "  ", mark_of(c), p->curves[c].label, c + 1 == p->num_curves ? "\n" : "");
}

bool term_plot(FILE *out, const char *x_label, const char *y_label, const term_curve *curves, size_t num_curves,
               int columns, int rows)
{
    plot p = {.curves = curves, .num_curves = num_curves};
    p.width = clamp(columns, 40, 200) - PLOT_MARGIN - 2;
    p.height = clamp(rows - 4, 2 * ROWS_PER_LABEL, 60) / ROWS_PER_LABEL * ROWS_PER_LABEL + 1; /* a label at both ends */
    if (!find_x_range(&p)) {
        fprintf(out, "%s: no points to draw\n", y_label);
        return true;
    }
    size_t cells = (size_t)p.width * (size_t)p.height;
    p.mean = calloc(num_curves * (size_t)p.width, sizeof *p.mean);
    p.field = malloc(cells);
    int64_t *points = calloc((size_t)p.width, sizeof *points);
    bool ok = p.mean && p.field && points;
    if (ok) {
        memset(p.field, ' ', cells);
        for (size_t c = 0; c < num_curves; c++)
            find_column_means(&p, c, points);
        find_y_range(&p);
        for (size_t c = 0; c < num_curves; c++)
            draw_curve(&p, c);
        print_plot(&p, out, x_label, y_label);
    }
    free(points);
    free(p.field);
    free(p.mean);
    return ok;
}

/* ----------------------------------------------------------------------------------------------------------- CSV -- */

static void write_csv_name(FILE *file, const char *name)
{
    bool quoted = strpbrk(name, ",\"\n\r") != NULL;
    if (quoted)
        fputc('"', file);
    for (; *name; name++)
        fputs(*name == '"' ? "\"\"" : (char[]){*name, '\0'}, file);
    if (quoted)
        fputc('"', file);
}

static void write_csv_number(FILE *file, double value)
{
    char text[32];
    fputs(isnan(value) ? "nan" : isinf(value) ? (value < 0 ? "-inf" : "inf") : json_format_double(value, text), file);
}

/* Walks all curves at once, each with its own position, always taking the smallest x that is left. */
static void write_csv_lines(FILE *file, const term_curve *curves, size_t num_curves, size_t *position)
{
    for (;;) {
        double x = NAN;
        for (size_t c = 0; c < num_curves; c++)
            if (position[c] < curves[c].count)
                x = fmin(x, curve_x(&curves[c], position[c])); /* fmin ignores NaN */
        if (isnan(x))
            return;
        write_csv_number(file, x);
        for (size_t c = 0; c < num_curves; c++) {
            fputc(',', file);
            if (position[c] < curves[c].count && curve_x(&curves[c], position[c]) == x)
                write_csv_number(file, curves[c].y[position[c]++]);
        }
        fputc('\n', file);
    }
}

bool term_write_csv(const char *path, const char *x_name, const term_curve *curves, size_t num_curves, char *error,
                    size_t error_size)
{
    size_t *position = calloc(num_curves ? num_curves : 1, sizeof *position);
    if (!position) {
        snprintf(error, error_size, "out of memory while writing %s", path);
        return false;
    }
    FILE *file = fopen(path, "w");
    if (file) {
        write_csv_name(file, x_name);
        for (size_t c = 0; c < num_curves; c++) {
            fputc(',', file);
            write_csv_name(file, curves[c].label);
        }
        fputc('\n', file);
        write_csv_lines(file, curves, num_curves, position);
    }
    bool ok = file && !ferror(file);
    if (file && fclose(file) != 0) /* a full disk may show only here */
        ok = false;
    if (!ok)
        snprintf(error, error_size, "cannot write %s: %s", path, strerror(errno));
    free(position);
    return ok;
}
