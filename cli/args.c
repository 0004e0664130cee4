/* Option parser; see args.h. */
#include "args.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

typedef struct parser {
    arg_option *options;
    size_t num_options;
    char *error;
    size_t error_size;
} parser;

__attribute__((format(printf, 2, 3))) static bool fail(parser *p, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(p->error, p->error_size, format, args);
    va_end(args);
    return false;
}

/* ----------------------------------------------------------------------------------------------- value to number -- */

/* "from 1 to 8", "of at least 1", or nothing. */
static void describe_int_range(const arg_option *o, char *text, size_t size)
{
    if (o->int_max == ARG_NO_LIMIT && o->int_min == INT64_MIN)
        snprintf(text, size, "an integer");
    else if (o->int_max == ARG_NO_LIMIT)
        snprintf(text, size, "an integer of at least %lld", (long long)o->int_min);
    else
        snprintf(text, size, "an integer from %lld to %lld", (long long)o->int_min, (long long)o->int_max);
}

static void describe_real_range(const arg_option *o, char *text, size_t size)
{
    if (isinf(o->real_max) && isinf(o->real_min))
        snprintf(text, size, "a number");
    else if (isinf(o->real_max))
        snprintf(text, size, "a number of at least %g", o->real_min);
    else
        snprintf(text, size, "a number from %g to %g", o->real_min, o->real_max);
}

/* The characters are checked first because strtoll and strtod take more than we want: spaces, "nan", hexadecimal. */
static bool parse_int(const arg_option *o, const char *text, size_t length, int64_t *value)
{
    char digits[32];
    if (length == 0 || length >= sizeof digits || strspn(text, "+-0123456789") < length)
        return false;
    memcpy(digits, text, length);
    digits[length] = '\0';
    char *end;
    errno = 0;
    *value = strtoll(digits, &end, 10);
    return *end == '\0' && end > digits && errno == 0 && *value >= o->int_min && *value <= o->int_max;
}

static bool parse_real(const arg_option *o, const char *text, double *value)
{
    if (*text == '\0' || strspn(text, "+-.0123456789eE") < strlen(text))
        return false;
    char *end;
    *value = strtod(text, &end);
    return *end == '\0' && isfinite(*value) && *value >= o->real_min && *value <= o->real_max;
}

static bool store_int(parser *p, const arg_option *o, const char *text)
{
    int64_t value;
    char range[96];
    if (parse_int(o, text, strlen(text), &value)) {
        *o->target.integer = value;
        return true;
    }
    describe_int_range(o, range, sizeof range);
    return fail(p, "--%s is \"%s\", but must be %s", o->name, text, range);
}

static bool store_real(parser *p, const arg_option *o, const char *text)
{
    double value;
    char range[96];
    if (parse_real(o, text, &value)) {
        *o->target.real = value;
        return true;
    }
    describe_real_range(o, range, sizeof range);
    return fail(p, "--%s is \"%s\", but must be %s", o->name, text, range);
}

static bool store_int_list(parser *p, const arg_option *o, const char *text)
{
    arg_int_list *list = o->target.int_list;
    list->count = 0;
    for (const char *at = text;;) {
        size_t length = strcspn(at, ",");
        char range[96];
        if (list->count == ARG_LIST_MAX)
            return fail(p, "--%s has more than %d values", o->name, ARG_LIST_MAX);
        if (!parse_int(o, at, length, &list->values[list->count])) {
            describe_int_range(o, range, sizeof range);
            return fail(p, "--%s has \"%.*s\" in its list, but each value must be %s", o->name, (int)length, at, range);
        }
        list->count++;
        if (at[length] == '\0')
            return true;
        at += length + 1;
    }
}

static bool append_string(parser *p, const arg_option *o, const char *text)
{
    arg_string_list *list = o->target.string_list;
    const char **larger = realloc(list->values, (list->count + 1) * sizeof *larger);
    if (!larger)
        return fail(p, "out of memory while reading --%s", o->name);
    list->values = larger;
    list->values[list->count++] = text;
    return true;
}

/* ------------------------------------------------------------------------------------------------------- parsing -- */

static bool store(parser *p, const arg_option *o, const char *text)
{
    switch (o->kind) {
    case ARG_KIND_INT: return store_int(p, o, text);
    case ARG_KIND_DOUBLE: return store_real(p, o, text);
    case ARG_KIND_STRING: *o->target.string = text; return true;
    case ARG_KIND_FLAG: *o->target.flag = true; return true;
    case ARG_KIND_INT_LIST: return store_int_list(p, o, text);
    case ARG_KIND_STRING_LIST: return append_string(p, o, text);
    }
    return false;
}

static bool store_default(parser *p, const arg_option *o)
{
    switch (o->kind) {
    case ARG_KIND_INT: *o->target.integer = o->int_default; return true;
    case ARG_KIND_DOUBLE: *o->target.real = o->real_default; return true;
    case ARG_KIND_STRING: *o->target.string = o->text_default; return true;
    case ARG_KIND_FLAG: *o->target.flag = false; return true;
    case ARG_KIND_INT_LIST:
        o->target.int_list->count = 0;
        return !o->text_default || store_int_list(p, o, o->text_default);
    case ARG_KIND_STRING_LIST:
        *o->target.string_list = (arg_string_list){0};
        return !o->text_default || append_string(p, o, o->text_default);
    }
    return false;
}

static arg_option *find(const parser *p, const char *name, size_t length)
{
    for (size_t i = 0; i < p->num_options; i++)
        if (strlen(p->options[i].name) == length && memcmp(p->options[i].name, name, length) == 0)
            return &p->options[i];
    return NULL;
}

static bool is_option(const char *argument) { return strncmp(argument, "--", 2) == 0; }

/* Handles the option argv[*at] and leaves *at at the first argument after it and its values. */
static bool parse_option(parser *p, int argc, char **argv, int *at)
{
    const char *argument = argv[(*at)++];
    if (!is_option(argument))
        return fail(p, "\"%s\" is not an option; options begin with --, and --help lists them", argument);
    const char *name = argument + 2;
    size_t length = strcspn(name, "=");
    const char *attached = name[length] == '=' ? name + length + 1 : NULL;
    arg_option *o = find(p, name, length);
    if (!o)
        return fail(p, "there is no option --%.*s; --help lists the options", (int)length, name);
    if (o->kind == ARG_KIND_FLAG && attached)
        return fail(p, "--%s takes no value, but \"%s\" was given", o->name, attached);
    if (o->kind == ARG_KIND_STRING_LIST && !o->given)
        o->target.string_list->count = 0; /* drops the default */
    o->given = true;
    if (o->kind == ARG_KIND_FLAG)
        return store(p, o, NULL);
    const char *value = attached ? attached : *at < argc && !is_option(argv[*at]) ? argv[(*at)++] : NULL;
    if (!value || !*value)
        return fail(p, "--%s needs a value (%s)", o->name, o->metavar);
    bool ok = store(p, o, value);
    while (ok && o->kind == ARG_KIND_STRING_LIST && !attached && *at < argc && !is_option(argv[*at]))
        ok = store(p, o, argv[(*at)++]);
    return ok;
}

args_result args_parse(arg_option *options, size_t num_options, int argc, char **argv, char *error, size_t error_size)
{
    parser p = {options, num_options, error, error_size};
    bool ok = true;
    for (size_t i = 0; i < num_options; i++) {
        options[i].given = false;
        ok = store_default(&p, &options[i]) && ok; /* all of them, so that args_free finds every list set */
    }
    for (int at = 0; ok && at < argc;) {
        if (strcmp(argv[at], "--help") == 0 || strcmp(argv[at], "-h") == 0)
            return ARGS_HELP;
        ok = parse_option(&p, argc, argv, &at);
    }
    return ok ? ARGS_OK : ARGS_ERROR;
}

void args_free(arg_option *options, size_t num_options)
{
    for (size_t i = 0; i < num_options; i++)
        if (options[i].kind == ARG_KIND_STRING_LIST) {
            free(options[i].target.string_list->values);
            *options[i].target.string_list = (arg_string_list){0};
        }
}

bool args_given(const arg_option *options, size_t num_options, const char *name)
{
    for (size_t i = 0; i < num_options; i++)
        if (strcmp(options[i].name, name) == 0)
            return options[i].given;
    return false;
}

/* --------------------------------------------------------------------------------------------------------- --help -- */

enum { HELP_WIDTH = 100, HELP_COLUMN_MAX = 32 };

/* "--hidden H" */
static int option_title(const arg_option *o, char *text, size_t size)
{
    return o->kind == ARG_KIND_FLAG ? snprintf(text, size, "--%s", o->name)
                                    : snprintf(text, size, "--%s %s%s", o->name, o->metavar,
                                               o->kind == ARG_KIND_STRING_LIST ? "..." : "");
}

/* " (default 7168)", or nothing. */
static void option_default(const arg_option *o, char *text, size_t size)
{
    *text = '\0';
    if (o->kind == ARG_KIND_INT && o->int_default >= o->int_min && o->int_default <= o->int_max)
        snprintf(text, size, " (default %lld)", (long long)o->int_default);
    else if (o->kind == ARG_KIND_DOUBLE && o->real_default >= o->real_min && o->real_default <= o->real_max)
        snprintf(text, size, " (default %g)", o->real_default);
    else if (o->text_default)
        snprintf(text, size, " (default %s)", o->text_default);
}

/* Prints words, breaking lines at HELP_WIDTH; the cursor stands at `column` and new lines begin there. */
static void print_wrapped(FILE *out, const char *words, int column)
{
    int at = column;
    for (const char *word = words + strspn(words, " "); *word;) {
        int length = (int)strcspn(word, " ");
        if (at > column && at + 1 + length > HELP_WIDTH) {
            fprintf(out, "\n%*s", column, "");
            at = column;
        }
        at += fprintf(out, "%s%.*s", at > column ? " " : "", length, word);
        word += length;
        word += strspn(word, " ");
    }
    fputc('\n', out);
}

void args_help(FILE *out, const char *command, const char *summary, const arg_option *options, size_t num_options)
{
    char title[128], text[1024], value[256];
    int column = 10;
    for (size_t i = 0; i < num_options; i++) {
        int width = option_title(&options[i], title, sizeof title) + 4;
        if (width > column && width <= HELP_COLUMN_MAX)
            column = width;
    }
    fprintf(out, "usage: %s [options]\n", command);
    print_wrapped(out, summary, 0);
    fputc('\n', out);
    for (size_t i = 0; i < num_options; i++) {
        int width = option_title(&options[i], title, sizeof title);
        option_default(&options[i], value, sizeof value);
        snprintf(text, sizeof text, "%s%s", options[i].help, value);
        if (width + 4 > column)
            fprintf(out, "  %s\n%*s", title, column, "");
        else
            fprintf(out, "  %-*s", column - 2, title);
        print_wrapped(out, text, column);
    }
    fprintf(out, "  %-*sprint this text\n", column - 2, "--help");
}
