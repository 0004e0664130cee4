/* The bytes to learn from: files and folders, every tenth file held out. */
#ifndef MOK_CLI_LM_TEXT_H
#define MOK_CLI_LM_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct lm_text {
    uint8_t *train, *held_out;
    int64_t train_size, held_out_size;
    int64_t files, files_held_out;
    uint64_t fingerprint; /* of both */
} lm_text;

/* Reads `paths` in their order; a folder's files in the order of their names, folder by folder. Within folders, files that are not text
 * (with a zero byte), of more than 1 MiB, hidden or empty, logs, links, and folders that CMake built in or that begin with "build" are left out.
 * Of files 1, 2, ... those divisible by ten are held out; with fewer than ten, the last tenth of the bytes is. Between two files
 * stands a zero byte. False and one sentence if something cannot be read or nothing is left. */
bool lm_text_read(lm_text *text, const char *const *paths, size_t num_paths, char *error, size_t error_size);
void lm_text_free(lm_text *text);

#endif
