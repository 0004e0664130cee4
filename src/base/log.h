/* Notable events that are no errors, one line each. Nothing is printed unasked: mok_set_log, or MOK_LOG=stderr in the environment. */
#ifndef MK_BASE_LOG_H
#define MK_BASE_LOG_H

#include "mok.h"

void mk_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* A wait for other ranks that lasts as long as this is worth a line; then whenever it has doubled. */
enum { MK_LATE_MS = 1000 };

#endif
