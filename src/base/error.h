/* Errors: one sentence per thread, written by the function that decides that something is wrong; callers pass the status on. */
#ifndef MK_BASE_ERROR_H
#define MK_BASE_ERROR_H

#include "mok.h"

#define MK_ERROR_BYTES 512

/* Formats the thread's sentence and returns `status`, so that a check is one line: return mk_fail(MOK_E_ARG, "…", …); */
mok_status mk_fail(mok_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Hands a status on. */
#define MK_TRY(call)                            \
    do {                                        \
        mok_status mk_try_status = (call);      \
        if (mk_try_status != MOK_OK)            \
            return mk_try_status;               \
    } while (0)

/* The same where something must be undone first. Needs a variable `status`. */
#define MK_TRY_GOTO(call, label)                \
    do {                                        \
        status = (call);                        \
        if (status != MOK_OK)                   \
            goto label;                         \
    } while (0)

/* Internal checks: a failure is our bug and becomes a sentence, never an abort. */
#define MK_CHECK(condition)                                                                                        \
    do {                                                                                                           \
        if (!(condition))                                                                                          \
            return mk_fail(MOK_E_BUG, "internal check failed: %s (%s:%d)", #condition, __FILE__, __LINE__);        \
    } while (0)

#endif
