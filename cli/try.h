/* Hands a status on. */
#ifndef MOK_CLI_TRY_H
#define MOK_CLI_TRY_H

#define TRY(call)                       \
    do {                                \
        mok_status try_status = (call); \
        if (try_status != MOK_OK)       \
            return try_status;          \
    } while (0)

#endif
