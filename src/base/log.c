#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*receiver)(void *, const char *);
static void *receiver_user;

void mok_set_log(void (*line)(void *user, const char *text), void *user)
{
    pthread_mutex_lock(&lock);
    receiver = line;
    receiver_user = user;
    pthread_mutex_unlock(&lock);
}

void mk_log(const char *format, ...)
{
    char text[512];
    const char *wish = getenv("MOK_LOG");
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    pthread_mutex_lock(&lock);
    if (receiver)
        receiver(receiver_user, text);
    else if (wish && !strcmp(wish, "stderr"))
        fprintf(stderr, "mok: %s\n", text);
    pthread_mutex_unlock(&lock);
}
