/* mok info: backends, devices and limits of this library on this machine. */
#include <stdio.h>
#include <unistd.h>

#include "args.h"
#include "commands.h"
#include "json.h"
#include "mok.h"
#include "term.h"

static void print_json(void)
{
    json_writer w;
    json_writer_start(&w, stdout);
    json_begin_object(&w, NULL);
    json_string(&w, "version", mok_version());
    json_int(&w, "api_version", mok_api_version());
    json_int(&w, "cores", sysconf(_SC_NPROCESSORS_ONLN));
    json_begin_array(&w, "backends");
    mok_backend_info b = MOK_INIT(mok_backend_info);
    for (int32_t i = 0; mok_backend_query(i, &b) == MOK_OK; i++) {
        json_begin_object(&w, NULL);
        json_string(&w, "name", b.name);
        json_bool(&w, "usable", b.usable);
        json_int(&w, "devices", b.num_devices);
        json_string(&w, "detail", b.detail);
        json_end_object(&w);
    }
    json_end_array(&w);
    json_end_object(&w);
    json_writer_finish(&w);
}

static void print_text(void)
{
    term_table t;
    mok_backend_info b = MOK_INIT(mok_backend_info);
    printf("mok %s, API version %u, %ld cores\n\n", mok_version(), mok_api_version(), sysconf(_SC_NPROCESSORS_ONLN));
    term_table_start(&t, "llrl", (const char *[]){"backend", "usable", "devices", "detail"});
    for (int32_t i = 0; mok_backend_query(i, &b) == MOK_OK; i++) {
        term_table_cell(&t, "%s", b.name);
        term_table_cell(&t, "%s", b.usable ? "yes" : "no");
        term_table_cell(&t, "%d", b.num_devices);
        term_table_cell(&t, "%s", b.detail);
    }
    term_table_print(&t, stdout);
    printf("\nLimits: H, I and Is multiples of 64; top-k 1 to 64; ranks 1 to 4096; experts need not divide by ranks;\n"
           "tokens per rank 0 to max_tokens, different on every rank; the smallest ring is two minibatches.\n");
}

int command_info(int argc, char **argv)
{
    bool json;
    char error[256];
    arg_option options[] = {ARG_FLAG("json", &json, "print JSON")};
    args_result parsed = args_parse(options, 1, argc, argv, error, sizeof error);
    if (parsed == ARGS_ERROR)
        fprintf(stderr, "mok info: %s\n", error);
    else if (parsed == ARGS_HELP)
        args_help(stdout, "mok info", "What this library can run here.", options, 1);
    else if (json)
        print_json();
    else
        print_text();
    args_free(options, 1);
    return parsed == ARGS_ERROR ? 2 : 0;
}
