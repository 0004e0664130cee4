/* mok doctor: what ranks need on this machine, whether it is there, and what to change. */
#include <stdio.h>

#include "args.h"
#include "commands.h"
#include "json.h"
#include "mok.h"

enum { MAX_FINDINGS = 64 };
static const char *const states[] = {"good", "skipped", "warning", "bad"};

static void print_json(const mok_finding *findings, int32_t count)
{
    json_writer w;
    json_writer_start(&w, stdout);
    json_begin_object(&w, NULL);
    json_string(&w, "version", mok_version());
    json_begin_array(&w, "findings");
    for (int32_t i = 0; i < count; i++) {
        json_begin_object(&w, NULL);
        json_string(&w, "check", findings[i].check);
        json_string(&w, "state", states[findings[i].state]);
        json_string(&w, "detail", findings[i].detail);
        json_string(&w, "advice", findings[i].advice);
        json_end_object(&w);
    }
    json_end_array(&w);
    json_end_object(&w);
    json_writer_finish(&w);
}

static void print_text(const mok_finding *findings, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        const mok_finding *f = &findings[i];
        printf("%s%-8s %-19s %s\n", i == count - 1 ? "\n" : "", states[f->state], f->check, f->detail);
        if (f->advice[0])
            printf("%28s -> %s\n", "", f->advice);
    }
}

int command_doctor(int argc, char **argv)
{
    bool json;
    char error[256];
    mok_finding findings[MAX_FINDINGS];
    int32_t count = MAX_FINDINGS;
    arg_option options[] = {ARG_FLAG("json", &json, "print JSON")};
    args_result parsed = args_parse(options, 1, argc, argv, error, sizeof error);
    int status = 0;
    if (parsed == ARGS_ERROR)
        fprintf(stderr, "mok doctor: %s\n", error);
    else if (parsed == ARGS_HELP)
        args_help(stdout, "mok doctor", "What ranks need on this machine, whether it is there, and what to change. Exit status 1 if the verdict is bad.", options, 1);
    else if (mok_doctor(findings, &count) != MOK_OK)
        status = (fprintf(stderr, "mok doctor: %s\n", mok_last_error()), 1);
    else {
        json ? print_json(findings, count) : print_text(findings, count);
        status = findings[count - 1].state == MOK_FINDING_BAD;
    }
    args_free(options, 1);
    return parsed == ARGS_ERROR ? 2 : status;
}
