#include "svg.h"

#include <math.h>
#include <stdio.h>

enum { WIDTH = 820, HEIGHT = 340, LEFT = 70, RIGHT = 200, TOP = 34, BOTTOM = 48, TICKS = 5 };

static const char *const colours[] = {"#2a6f97", "#e07a5f", "#588157", "#8d5b9c", "#b08900", "#6c757d", "#c1121f", "#0b7a75"};

typedef struct range { double x_low, x_high, y_high; } range;

static double place_on(const svg_panel *p, double x) { return p->log_x ? log2(x) : x; }

static range range_of(const svg_panel *p)
{
    range r = {INFINITY, -INFINITY, 0};
    for (size_t l = 0; l < p->num_lines; l++)
        for (size_t i = 0; i < p->lines[l].count; i++) {
            double x = place_on(p, p->lines[l].x[i]), y = p->lines[l].y[i];
            if (!isfinite(y))
                continue;
            r.x_low = fmin(r.x_low, x);
            r.x_high = fmax(r.x_high, x);
            r.y_high = fmax(r.y_high, y);
        }
    if (r.x_low > r.x_high)
        r.x_low = r.x_high = 0;
    r.x_high += r.x_high == r.x_low;
    r.y_high = r.y_high > 0 ? r.y_high * 1.05 : 1;
    return r;
}

/* 1, 2 or 5 times a power of ten, so that about TICKS fit. */
static double tick_step(double span)
{
    double raw = span / TICKS, power = pow(10, floor(log10(raw))), f = raw / power;
    return power * (f < 1.5 ? 1 : f < 3.5 ? 2 : f < 7.5 ? 5 : 10);
}

/* XML has no use for these three characters as they are. */
static void put_text(FILE *out, const char *text)
{
    for (; *text; text++) {
        if (*text == '<')
            fputs("&lt;", out);
        else if (*text == '&')
            fputs("&amp;", out);
        else if (*text == '>')
            fputs("&gt;", out);
        else
            fputc(*text, out);
    }
}

static void text_at(FILE *out, double x, double y, const char *anchor, const char *extra, const char *text)
{
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" %s>", x, y, anchor, extra);
    put_text(out, text);
    fputs("</text>\n", out);
}

static void draw_axes(FILE *out, const svg_panel *p, range r, double top)
{
    double plot_w = WIDTH - LEFT - RIGHT, plot_h = HEIGHT - TOP - BOTTOM, bottom = top + TOP + plot_h;
    char number[32];
    text_at(out, LEFT, top + 20, "start", "font-weight=\"bold\"", p->title);
    double step = tick_step(r.y_high);
    for (double y = 0; y <= r.y_high; y += step) {
        double at = bottom - y / r.y_high * plot_h;
        fprintf(out, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", LEFT, at, LEFT + plot_w, at);
        snprintf(number, sizeof number, "%.6g", y);
        text_at(out, LEFT - 6, at + 4, "end", "", number);
    }
    step = p->log_x ? fmax(1, ceil((r.x_high - r.x_low) / 8)) : tick_step(r.x_high - r.x_low);
    for (double x = ceil(r.x_low / step) * step; x <= r.x_high + step / 1000; x += step) {
        double at = LEFT + (x - r.x_low) / (r.x_high - r.x_low) * plot_w;
        fprintf(out, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#888\"/>\n", at, bottom, at, bottom + 4);
        snprintf(number, sizeof number, "%.6g", p->log_x ? exp2(x) : x);
        text_at(out, at, bottom + 18, "middle", "", number);
    }
    fprintf(out, "<rect x=\"%d\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"none\" stroke=\"#888\"/>\n", LEFT, top + TOP, plot_w, plot_h);
    text_at(out, LEFT + plot_w / 2, bottom + 36, "middle", "", p->x_label);
    fprintf(out, "<g transform=\"translate(16 %.1f) rotate(-90)\">", top + TOP + plot_h / 2);
    text_at(out, 0, 0, "middle", "", p->y_label);
    fputs("</g>\n", out);
}

static void draw_line(FILE *out, const svg_panel *p, const svg_line *line, size_t index, range r, double top)
{
    double plot_w = WIDTH - LEFT - RIGHT, plot_h = HEIGHT - TOP - BOTTOM, bottom = top + TOP + plot_h;
    const char *colour = colours[index % (sizeof colours / sizeof colours[0])];
    bool pen_down = false;
    fprintf(out, "<path fill=\"none\" stroke=\"%s\" stroke-width=\"2\"%s d=\"", colour, index >= 8 ? " stroke-dasharray=\"6 3\"" : "");
    for (size_t i = 0; i < line->count; i++) {
        if (!isfinite(line->y[i])) {
            pen_down = false;
            continue;
        }
        fprintf(out, "%s%.1f %.1f ", pen_down ? "L" : "M", LEFT + (place_on(p, line->x[i]) - r.x_low) / (r.x_high - r.x_low) * plot_w,
                bottom - line->y[i] / r.y_high * plot_h);
        pen_down = true;
    }
    fputs("\"/>\n", out);
    double y = top + TOP + 12 + 18 * (double)index;
    fprintf(out, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"%s\" stroke-width=\"3\"/>\n", WIDTH - RIGHT + 12, y - 4, WIDTH - RIGHT + 34, y - 4, colour);
    text_at(out, WIDTH - RIGHT + 40, y, "start", "", line->label);
}

bool svg_write(const char *path, const svg_panel *panels, size_t num_panels, char *error, size_t error_size)
{
    FILE *out = fopen(path, "w");
    if (!out) {
        snprintf(error, error_size, "%s cannot be written", path);
        return false;
    }
    int height = HEIGHT * (int)num_panels;
    fprintf(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" font-size=\"12\">\n"
                 "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n", WIDTH, height, WIDTH, height);
    for (size_t i = 0; i < num_panels; i++) {
        range r = range_of(&panels[i]);
        double top = (double)i * HEIGHT;
        draw_axes(out, &panels[i], r, top);
        for (size_t l = 0; l < panels[i].num_lines; l++)
            draw_line(out, &panels[i], &panels[i].lines[l], l, r, top);
    }
    fputs("</svg>\n", out);
    bool ok = !ferror(out);
    ok &= fclose(out) == 0;
    if (!ok)
        snprintf(error, error_size, "%s cannot be written", path);
    return ok;
}
