/* A picture of a trace: time to the right, a line for each lane, a colour for each group. Of many tracks an even sample is shown. Neighbouring
 * pixels of one colour are one rectangle, so that the file stays small whatever the number of events. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trace/write.h"

enum { WIDTH = 1200, LEFT = 110, TOP = 56, MOST_LINES = 96, LINE = 9, GAP = 14 };

typedef struct colour { const char *group, *fill; } colour;
static const colour colours[] = {
    {"s1_dispatch", "#3b7dd8"}, {"s2_gate_up", "#2e9e5b"}, {"s3_swiglu", "#9bd3a8"}, {"s4_down", "#e08a1e"}, {"s5_combine", "#f4c98a"},
    {"s4_down_bwd", "#c2602b"}, {"s3_swiglu_bwd", "#e3b08f"}, {"s2_gate_up_bwd", "#7a4fc0"}, {"s5_combine_bwd", "#c9b3ea"}, {"wgrad", "#1d8a8a"},
    {"s0_schedule", "#8a6d3b"}, {"publish", "#c5b358"}, {"wait", "#d8d8d8"}, {"barrier", "#d14b5a"}, {"call", "#222222"},
};
enum { NUM_COLOURS = sizeof colours / sizeof *colours };

static int colour_of(int32_t kind)
{
    for (int i = 0; i < NUM_COLOURS; i++)
        if (!strcmp(colours[i].group, mok_trace_kind_group(kind)))
            return i;
    return NUM_COLOURS - 1;
}

/* Nanoseconds of each colour in each pixel of one line. */
typedef struct pixels { float time[WIDTH][NUM_COLOURS]; } pixels;

static void add_event(pixels *p, const mok_trace_event *e, mk_trace_span span)
{
    double scale = WIDTH / (double)(span.end - span.begin), from = (double)(e->begin_ns - span.begin) * scale, to = (double)(e->end_ns - span.begin) * scale;
    int c = colour_of(e->kind);
    for (int x = (int)from; x < WIDTH && x <= to; x++)
        p->time[x][c] += (float)fmax(fmin(to, x + 1) - fmax(from, x), 1e-6);
}

/* The colour that most of a pixel has, -1 for a pixel that is idle for the most part. */
static int shown(const float *time)
{
    int best = 0;
    float sum = 0;
    for (int c = 0; c < NUM_COLOURS; c++) {
        sum += time[c];
        best = time[c] > time[best] ? c : best;
    }
    return sum < 0.3f ? -1 : best;
}

static void write_line(FILE *to, const pixels *p, int y, bool *used)
{
    for (int x = 0, end; x < WIDTH; x = end) {
        int c = shown(p->time[x]);
        for (end = x + 1; end < WIDTH && shown(p->time[end]) == c; end++) {
        }
        if (c < 0)
            continue;
        used[c] = true;
        fprintf(to, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"%s\"/>\n", LEFT + x, y, end - x, LINE - 1, colours[c].fill);
    }
}

static void write_axis(FILE *to, mk_trace_span span, int height)
{
    double us = 1e-3 * (double)(span.end - span.begin), step = pow(10, floor(log10(us)));
    step = us / step < 2 ? step / 5 : us / step < 5 ? step / 2 : step;
    for (double t = 0; t <= us; t += step) {
        double x = LEFT + WIDTH * t / us;
        fprintf(to, "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" stroke=\"#eeeeee\"/>\n", x, TOP - 4, x, height - 20);
        fprintf(to, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%g</text>\n", x, TOP - 8, t);
    }
    fprintf(to, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">us</text>\n", LEFT - 8, TOP - 8);
}

static void write_legend(FILE *to, const bool *used)
{
    int x = LEFT;
    for (int c = 0; c < NUM_COLOURS; c++) {
        if (!used[c])
            continue;
        fprintf(to, "<rect x=\"%d\" y=\"8\" width=\"10\" height=\"10\" fill=\"%s\"/><text x=\"%d\" y=\"17\">%s</text>\n", x, colours[c].fill, x + 14, colours[c].group);
        x += 30 + 7 * (int)strlen(colours[c].group);
    }
}

/* Lanes of every every-th track, and ranks. */
static int64_t count_lines(const mok_trace_event *sorted, int64_t count, int64_t every, int64_t *ranks)
{
    int64_t lines = 0;
    *ranks = 0;
    for (int64_t i = 0; i < count; i++) {
        *ranks += i == 0 || sorted[i].rank != sorted[i - 1].rank;
        lines += (i == 0 || !mk_trace_same_lane(&sorted[i], &sorted[i - 1])) && sorted[i].track % every == 0;
    }
    return lines;
}

static bool write_lines(FILE *to, const mok_trace_event *sorted, int64_t count, mk_trace_span span, int64_t every, int *y, bool *used)
{
    bool lanes = mk_trace_has_lanes(sorted, count);
    pixels *p = malloc(sizeof *p);
    for (int64_t i = 0, end; p && i < count; i = end) {
        bool new_rank = i == 0 || sorted[i].rank != sorted[i - 1].rank;
        char name[64];
        memset(p, 0, sizeof *p);
        for (end = i; end < count && mk_trace_same_lane(&sorted[end], &sorted[i]); end++)
            add_event(p, &sorted[end], span);
        if (new_rank) {
            *y += GAP;
            fprintf(to, "<text x=\"%d\" y=\"%d\" font-weight=\"bold\">rank %d</text>\n", 8, *y - 3, sorted[i].rank);
        }
        if (sorted[i].track % every)
            continue;
        mk_trace_lane_name(&sorted[i], lanes, name, sizeof name);
        fprintf(to, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%s</text>\n", LEFT - 8, *y + LINE - 2, name);
        write_line(to, p, *y, used);
        *y += LINE;
    }
    free(p);
    return p != NULL;
}

bool mk_trace_write_svg(FILE *to, const mok_trace_event *events, int64_t count)
{
    mok_trace_event *sorted = mk_trace_by_lane(events, count);
    mk_trace_span span = mk_trace_span_of(events, count);
    if (!sorted)
        return false;
    span.end = span.end > span.begin ? span.end : span.begin + 1;
    int64_t ranks, lines = count_lines(sorted, count, 1, &ranks), every = lines > MOST_LINES ? (lines + MOST_LINES - 1) / MOST_LINES : 1;
    lines = count_lines(sorted, count, every, &ranks);
    int height = TOP + (int)(ranks * GAP + lines * LINE) + 24, y = TOP;
    bool used[NUM_COLOURS] = {false};
    fprintf(to, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" font-size=\"9\">\n"
                "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n", LEFT + WIDTH + 20, height);
    write_axis(to, span, height);
    bool memory = write_lines(to, sorted, count, span, every, &y, used);
    write_legend(to, used);
    if (every > 1)
        fprintf(to, "<text x=\"%d\" y=\"32\">one track in %lld is shown</text>\n", LEFT, (long long)every);
    fprintf(to, "</svg>\n");
    free(sorted);
    return memory;
}
