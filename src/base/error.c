#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char sentence[MK_ERROR_BYTES];

mok_status mk_fail(mok_status status, const char *format, ...)
{
    /* Arguments may point into the old sentence, so the new one is built beside it. */
    char text[MK_ERROR_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    __builtin_memcpy(sentence, text, sizeof sentence);
    return status;
}

const char *mok_last_error(void) { return sentence; }

const char *mok_status_name(mok_status status)
{
    switch (status) {
#define NAME(name, value, text) case name: return #name;
        MOK_STATUS_LIST(NAME)
#undef NAME
    }
    return "unknown status";
}

const char *mok_status_text(mok_status status)
{
    switch (status) {
#define TEXT(name, value, text) case name: return text;
        MOK_STATUS_LIST(TEXT)
#undef TEXT
    }
    return "unknown status";
}

const char *mok_version(void) { return MOK_VERSION_STRING; }
uint32_t mok_api_version(void) { return MOK_API_VERSION; }
