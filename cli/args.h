/* Options of a command: one table gives the parser, the checks and the text of --help.
 *
 *   int64_t hidden; bool json;
 *   arg_option options[] = {
 *       ARG_INT("hidden", "H", &hidden, 7168, 64, ARG_NO_LIMIT, "hidden size"),
 *       ARG_FLAG("json", &json, "print JSON"),
 *   };
 *
 * A value follows as "--name value" or "--name=value". The last of several wins, except that a string list collects: it
 * takes all arguments up to the next one that begins with "--", and may be repeated. A value that begins with "--" must be
 * attached by "=". --help and -h are always there. */
#ifndef MOK_CLI_ARGS_H
#define MOK_CLI_ARGS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define ARG_NO_LIMIT INT64_MAX
#define ARG_LIST_MAX 64

typedef struct arg_int_list { size_t count; int64_t values[ARG_LIST_MAX]; } arg_int_list;
typedef struct arg_string_list { size_t count; const char **values; } arg_string_list; /* freed by args_free */

typedef enum arg_kind { ARG_KIND_INT, ARG_KIND_DOUBLE, ARG_KIND_STRING, ARG_KIND_FLAG, ARG_KIND_INT_LIST,
                        ARG_KIND_STRING_LIST } arg_kind;

typedef struct arg_option {
    const char *name, *metavar; /* name without the dashes; metavar stands for the value in --help */
    arg_kind kind;
    union {
        int64_t *integer;
        double *real;
        const char **string;
        bool *flag;
        arg_int_list *int_list;
        arg_string_list *string_list;
    } target;
    int64_t int_default, int_min, int_max;
    double real_default, real_min, real_max;
    const char *text_default; /* strings and lists; NULL = NULL or an empty list */
    const char *help;
    bool given; /* set by args_parse: stood on the command line */
} arg_option;

/* A numeric default outside the range means "not given": it is stored, but --help does not show it. */
#define ARG_INT(name_, metavar_, target_, default_, min_, max_, help_)                                                 \
    {.name = (name_), .metavar = (metavar_), .kind = ARG_KIND_INT, .target.integer = (target_),                        \
     .int_default = (default_), .int_min = (min_), .int_max = (max_), .help = (help_)}
#define ARG_DOUBLE(name_, metavar_, target_, default_, min_, max_, help_)                                              \
    {.name = (name_), .metavar = (metavar_), .kind = ARG_KIND_DOUBLE, .target.real = (target_),                        \
     .real_default = (default_), .real_min = (min_), .real_max = (max_), .help = (help_)}
#define ARG_STRING(name_, metavar_, target_, default_, help_)                                                          \
    {.name = (name_), .metavar = (metavar_), .kind = ARG_KIND_STRING, .target.string = (target_),                      \
     .text_default = (default_), .help = (help_)}
#define ARG_FLAG(name_, target_, help_)                                                                                \
    {.name = (name_), .kind = ARG_KIND_FLAG, .target.flag = (target_), .help = (help_)}
#define ARG_INT_LIST(name_, metavar_, target_, default_, min_, max_, help_) /* default as text: "1,2,4" */             \
    {.name = (name_), .metavar = (metavar_), .kind = ARG_KIND_INT_LIST, .target.int_list = (target_),                  \
     .text_default = (default_), .int_min = (min_), .int_max = (max_), .help = (help_)}
#define ARG_STRING_LIST(name_, metavar_, target_, default_, help_) /* default: NULL or one string */                   \
    {.name = (name_), .metavar = (metavar_), .kind = ARG_KIND_STRING_LIST, .target.string_list = (target_),            \
     .text_default = (default_), .help = (help_)}

typedef enum args_result { ARGS_OK, ARGS_HELP, ARGS_ERROR } args_result;

/* Stores the defaults, then reads argv[0..argc), which begins after the command's name. ARGS_HELP as soon as --help or -h
 * is met; ARGS_ERROR with one sentence. Call args_free afterwards in every case. Strings point into argv. */
args_result args_parse(arg_option *options, size_t num_options, int argc, char **argv, char *error, size_t error_size);
void args_free(arg_option *options, size_t num_options);

/* Whether --name stood on the command line. */
bool args_given(const arg_option *options, size_t num_options, const char *name);

/* "usage: COMMAND [options]", the summary and one entry per option. */
void args_help(FILE *out, const char *command, const char *summary, const arg_option *options, size_t num_options);
#endif
