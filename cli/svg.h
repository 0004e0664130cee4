/* Line charts as SVG, for browsers and documents; no library needed. */
#ifndef MOK_CLI_SVG_H
#define MOK_CLI_SVG_H

#include <stdbool.h>
#include <stddef.h>

enum { SVG_MAX_LINES = 16, SVG_MAX_PANELS = 4 };

typedef struct svg_line {
    char label[64];
    const double *x, *y; /* [count]; a NaN is a gap */
    size_t count;
} svg_line;

typedef struct svg_panel {
    const char *title, *x_label, *y_label;
    bool log_x;          /* powers of two on the x axis; x > 0 */
    svg_line lines[SVG_MAX_LINES];
    size_t num_lines;
} svg_panel;

/* Writes the panels below each other; y axes begin at 0. False and one sentence on failure. */
bool svg_write(const char *path, const svg_panel *panels, size_t num_panels, char *error, size_t error_size);

#endif
