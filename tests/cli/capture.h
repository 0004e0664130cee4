/* Runs a command of the tool with its standard output in a file. */
#ifndef MOK_TEST_CAPTURE_H
#define MOK_TEST_CAPTURE_H
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Its exit status; *output: what it printed, to be freed. */
static inline int capture(int (*command)(int, char **), char **output, const char *const *args, int n)
{
    char *argv[32], path[64];
    snprintf(path, sizeof path, "/tmp/mok-capture-%d", (int)getpid());
    for (int i = 0; i < n; i++)
        argv[i] = (char *)(uintptr_t)args[i];
    fflush(stdout);
    int saved = dup(1), file = open(path, O_CREAT | O_TRUNC | O_RDWR, 0600);
    dup2(file, 1);
    int status = command(n, argv);
    fflush(stdout);
    dup2(saved, 1);
    close(saved);
    off_t bytes = lseek(file, 0, SEEK_END);
    *output = (char *)calloc(1, (size_t)bytes + 1);
    if (*output && pread(file, *output, (size_t)bytes, 0) != bytes)
        **output = 0;
    close(file);
    unlink(path);
    return status;
}
#define CAPTURE(command, output, ...) \
    capture(command, output, (const char *const[]){__VA_ARGS__}, (int)(sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *)))
#endif
