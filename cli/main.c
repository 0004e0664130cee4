/* mok: the command-line tool. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "commands.h"
#include "mok.h"

static void usage(FILE *to)
{
    fprintf(to, "mok %s - mixture-of-experts layers in training\n\nusage: mok COMMAND [--OPTION VALUE ...]\n\n", mok_version());
#define SHOW(name, summary) fprintf(to, "  %-9s %s\n", #name, summary);
    COMMAND_LIST(SHOW)
#undef SHOW
    fprintf(to, "\n'mok COMMAND --help' lists the options of a command.\n");
}

static int command(int argc, char **argv)
{
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        usage(stdout);
        return 0;
    }
    if (!strcmp(argv[1], "--version")) {
        printf("mok %s\n", mok_version());
        return 0;
    }
#define RUN(name, summary)             \
    if (!strcmp(argv[1], #name))       \
        return command_##name(argc - 2, argv + 2);
    COMMAND_LIST(RUN)
#undef RUN
    fprintf(stderr, "mok: there is no command '%s'; 'mok --help' lists them\n", argv[1]);
    return 2;
}

int main(int argc, char **argv)
{
    int status = command(argc, argv);
    if (fflush(stdout) == 0 && !ferror(stdout))
        return status;
    fprintf(stderr, "mok: cannot write all of the output: %s\n", strerror(errno));
    return status ? status : 1;
}
