/* Runs a command of the tool in a child, so that it may exit or crash, and keeps what it printed. */
#ifndef MOK_TEST_COMMAND_H
#define MOK_TEST_COMMAND_H
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

typedef int command_fn(int argc, char **argv);

static char out[1 << 20], err[1 << 16]; /* of the last command */

static inline void command_read_back(FILE *file, char *text, size_t size)
{
    rewind(file);
    text[fread(text, 1, size - 1, file)] = '\0';
    fclose(file);
}

/* The exit status, or -1 after a crash. `line` is split at spaces. fault: value of MOK_CHECK_FAULT, or NULL. */
static inline int command_run(command_fn *command, const char *line, const char *fault)
{
    static char copy[4096];
    char *argv[64];
    int argc = 0, status = 0;
    FILE *to_out = tmpfile(), *to_err = tmpfile();
    snprintf(copy, sizeof copy, "%s", line);
    for (char *word = strtok(copy, " "); word && argc < 63; word = strtok(NULL, " "))
        argv[argc++] = word;
    argv[argc] = NULL;
    fflush(NULL);
    if (!to_out || !to_err)
        return -1;
    pid_t child = fork();
    if (child == 0) {
        dup2(fileno(to_out), 1);
        dup2(fileno(to_err), 2);
        if (fault)
            setenv("MOK_CHECK_FAULT", fault, 1);
        else
            unsetenv("MOK_CHECK_FAULT");
        exit(command(argc, argv));
    }
    waitpid(child, &status, 0);
    command_read_back(to_out, out, sizeof out);
    command_read_back(to_err, err, sizeof err);
    if (!WIFEXITED(status))
        TEST_FAILED("\"%s\" ended by signal %d: %s", line, WTERMSIG(status), err);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
#endif
