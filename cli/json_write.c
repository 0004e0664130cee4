/* JSON out: one value as a line for people, and a writer that streams. */
#include "json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------------------------------------- text of one value -- */

/* One character of a string as it stands between the quotes. */
static const char *escape(char c, char text[8])
{
    static const char specials[] = "\"\\\b\f\n\r\t", names[] = "\"\\bfnrt";
    const char *special = c ? strchr(specials, c) : NULL;
    if (special)
        snprintf(text, 8, "\\%c", names[special - specials]);
    else if ((unsigned char)c < 0x20 || c == 0x7f)
        snprintf(text, 8, "\\u%04x", (unsigned)(unsigned char)c);
    else
        snprintf(text, 8, "%c", c);
    return text;
}

char *json_format_double(double value, char text[32])
{
    if (!isfinite(value)) {
        snprintf(text, 32, "null");
        return text;
    }
    for (int digits = 15; digits <= 17; digits++) { /* 15 digits suffice for most decimals, 17 for every double */
        snprintf(text, 32, "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            break;
    }
    return text;
}

static void describe_string(const char *s, char *text, size_t size)
{
    char one[8];
    size_t n = strlen(s), shown = n > 40 ? 40 : n, used = 0;
    while (shown < n && shown > 0 && ((unsigned char)s[shown] & 0xc0) == 0x80)
        shown--; /* never cut inside a character */
    used += (size_t)snprintf(text, size, "\"");
    for (size_t i = 0; i < shown && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s", escape(s[i], one));
    if (used < size)
        snprintf(text + used, size - used, "%s\"", shown < n ? "..." : "");
}

char *json_describe(const json_value *value, char *text, size_t size)
{
    char number[32];
    switch (value->type) {
    case JSON_NULL: snprintf(text, size, "null"); break;
    case JSON_BOOL: snprintf(text, size, "%s", value->boolean ? "true" : "false"); break;
    case JSON_STRING: describe_string(value->string, text, size); break;
    case JSON_ARRAY: snprintf(text, size, "an array"); break;
    case JSON_OBJECT: snprintf(text, size, "an object"); break;
    case JSON_NUMBER:
        if (value->is_integer)
            snprintf(text, size, "%lld", (long long)value->integer);
        else
            snprintf(text, size, "%s", json_format_double(value->number, number));
        break;
    }
    return text;
}

/* ------------------------------------------------------------------------------------------------------- writer -- */

static void write_quoted(json_writer *w, const char *s)
{
    char one[8];
    fputc('"', w->out);
    for (; *s; s++)
        fputs(escape(*s, one), w->out);
    fputc('"', w->out);
}

static void start_line(json_writer *w)
{
    fputc('\n', w->out);
    for (int i = 0; i < w->depth; i++)
        fputs("  ", w->out);
}

/* Everything that precedes a value: comma, line break, key. False if no value may stand here. */
static bool start_value(json_writer *w, const char *key)
{
    bool in_object = w->depth > 0 && w->in_object[w->depth - 1];
    if (w->failed || in_object != (key != NULL) || (w->depth == 0 && w->wrote_top)) {
        w->failed = true;
        return false;
    }
    if (w->depth == 0) {
        w->wrote_top = true;
        return true;
    }
    if (w->has_children[w->depth - 1])
        fputc(',', w->out);
    w->has_children[w->depth - 1] = true;
    start_line(w);
    if (key) {
        write_quoted(w, key);
        fputs(": ", w->out);
    }
    return true;
}

static void begin(json_writer *w, const char *key, bool object)
{
    if (!start_value(w, key))
        return;
    if (w->depth == JSON_MAX_DEPTH) {
        w->failed = true;
        return;
    }
    w->in_object[w->depth] = object;
    w->has_children[w->depth] = false;
    w->depth++;
    fputc(object ? '{' : '[', w->out);
}

static void end(json_writer *w, bool object)
{
    if (w->failed || w->depth == 0 || w->in_object[w->depth - 1] != object) {
        w->failed = true;
        return;
    }
    w->depth--;
    if (w->has_children[w->depth])
        start_line(w);
    fputc(object ? '}' : ']', w->out);
}

void json_writer_start(json_writer *w, FILE *out) { *w = (json_writer){.out = out}; }
void json_begin_object(json_writer *w, const char *key) { begin(w, key, true); }
void json_end_object(json_writer *w) { end(w, true); }
void json_begin_array(json_writer *w, const char *key) { begin(w, key, false); }
void json_end_array(json_writer *w) { end(w, false); }

void json_int(json_writer *w, const char *key, int64_t value)
{
    if (start_value(w, key))
        fprintf(w->out, "%lld", (long long)value);
}

void json_double(json_writer *w, const char *key, double value)
{
    char text[32];
    if (start_value(w, key))
        fputs(json_format_double(value, text), w->out);
}

void json_bool(json_writer *w, const char *key, bool value)
{
    if (start_value(w, key))
        fputs(value ? "true" : "false", w->out);
}

void json_null(json_writer *w, const char *key)
{
    if (start_value(w, key))
        fputs("null", w->out);
}

void json_string(json_writer *w, const char *key, const char *value)
{
    if (!value)
        json_null(w, key);
    else if (start_value(w, key))
        write_quoted(w, value);
}

bool json_writer_finish(json_writer *w)
{
    fputc('\n', w->out);
    return fflush(w->out) == 0 && !ferror(w->out) && !w->failed && w->depth == 0 && w->wrote_top;
}
