#include "lm_text.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_FILE = 1 << 20, MAX_DEPTH = 32, EVERY = 10 };
static const int64_t max_named_file = (int64_t)1 << 32; /* of a file that was named itself */

typedef struct reader {
    lm_text *text;
    char *error;
    size_t error_size;
} reader;

static bool fail(const reader *r, const char *path, const char *why)
{
    snprintf(r->error, r->error_size, "cannot read %s: %s", path, why);
    return false;
}

static uint64_t mix(uint64_t hash, const uint8_t *bytes, int64_t size)
{
    for (int64_t i = 0; i < size; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    return hash;
}

static bool append(uint8_t **to, int64_t *size, const uint8_t *bytes, int64_t n)
{
    uint8_t *larger = realloc(*to, (size_t)(*size + n + 1));
    if (!larger)
        return false;
    memcpy(larger + *size, bytes, (size_t)n);
    larger[*size + n] = 0;
    *to = larger;
    *size += n + 1;
    return true;
}

static bool add_file(reader *r, const char *path, const uint8_t *bytes, int64_t n)
{
    lm_text *t = r->text;
    bool out = ++t->files % EVERY == 0;
    t->files_held_out += out;
    if (append(out ? &t->held_out : &t->train, out ? &t->held_out_size : &t->train_size, bytes, n))
        return true;
    return fail(r, path, "out of memory");
}

/* `named`: the user wrote this path, so it is taken whatever is in it. */
static bool read_file(reader *r, const char *path, int64_t size, bool named)
{
    if (!named && size > MAX_FILE)
        return true;
    if (size > max_named_file)
        return fail(r, path, "it is larger than 4 GiB");
    FILE *file = fopen(path, "rb");
    if (!file)
        return fail(r, path, strerror(errno));
    uint8_t *bytes = malloc((size_t)size + 1);
    bool ok = bytes != NULL;
    int64_t n = ok ? (int64_t)fread(bytes, 1, (size_t)size, file) : 0;
    if (!ok || ferror(file))
        ok = fail(r, path, ok ? strerror(errno) : "out of memory");
    else if (n && (named || !memchr(bytes, 0, (size_t)n)))
        ok = add_file(r, path, bytes, n);
    free(bytes);
    fclose(file);
    return ok;
}

static bool is_left_out(const char *name, bool folder)
{
    size_t length = strlen(name);
    return name[0] == '.' || !strcmp(name, "__pycache__") || (folder && !strncmp(name, "build", 5)) ||
           (length > 4 && !strcmp(name + length - 4, ".log"));
}

static bool read_path(reader *r, const char *path, bool named, int depth);

/* scandir's order would follow the locale. */
static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* False with errno. */
static bool list_folder(const char *path, char ***names, size_t *count)
{
    DIR *dir = opendir(path);
    bool ok = dir != NULL;
    for (struct dirent *entry = ok ? readdir(dir) : NULL; entry && ok; entry = readdir(dir)) {
        char **more = realloc(*names, (*count + 1) * sizeof **names);
        ok = more != NULL;
        *names = ok ? more : *names;
        ok = ok && ((*names)[*count] = strdup(entry->d_name));
        *count += ok;
    }
    if (dir)
        closedir(dir);
    if (*count)
        qsort(*names, *count, sizeof **names, by_name);
    return ok;
}

/* CMake's mark. What is built changes from run to run, and is not what anybody wrote. */
static bool is_build_folder(char **names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!strcmp(names[i], "CMakeCache.txt"))
            return true;
    return false;
}

/* Links are not followed inside folders: they may lead round in circles. */
static bool read_entry(reader *r, const char *path, const char *name, int depth)
{
    size_t size = strlen(path) + strlen(name) + 2;
    char *inner = malloc(size);
    struct stat st;
    if (!inner)
        return fail(r, path, "out of memory");
    snprintf(inner, size, "%s/%s", path, name);
    bool ok = true;
    if (lstat(inner, &st))
        ok = fail(r, inner, strerror(errno));
    else if ((S_ISDIR(st.st_mode) || S_ISREG(st.st_mode)) && !is_left_out(name, S_ISDIR(st.st_mode)))
        ok = read_path(r, inner, false, depth + 1);
    free(inner);
    return ok;
}

static bool read_folder(reader *r, const char *path, int depth)
{
    char **names = NULL;
    size_t count = 0;
    bool ok = list_folder(path, &names, &count);
    if (!ok)
        fail(r, path, strerror(errno));
    else if (depth > MAX_DEPTH)
        ok = fail(r, path, "too many folders inside each other");
    bool skip = depth && is_build_folder(names, count);
    for (size_t i = 0; i < count; i++) {
        ok = ok && (skip || read_entry(r, path, names[i], depth));
        free(names[i]);
    }
    free(names);
    return ok;
}

static bool read_path(reader *r, const char *path, bool named, int depth)
{
    struct stat st;
    if (stat(path, &st))
        return fail(r, path, strerror(errno));
    if (S_ISDIR(st.st_mode))
        return read_folder(r, path, depth);
    if (!S_ISREG(st.st_mode))
        return fail(r, path, "it is neither a file nor a folder");
    return read_file(r, path, (int64_t)st.st_size, named);
}

/* Too few files: the end of the text is held out instead. */
static bool hold_out_end(lm_text *t)
{
    int64_t n = t->train_size / EVERY;
    if (t->held_out_size || !append(&t->held_out, &t->held_out_size, t->train + t->train_size - n, n))
        return t->held_out_size > 0;
    t->train_size -= n;
    return true;
}

bool lm_text_read(lm_text *text, const char *const *paths, size_t num_paths, char *error, size_t error_size)
{
    reader r = {text, error, error_size};
    bool ok = true;
    *text = (lm_text){.files = 0};
    for (size_t i = 0; i < num_paths && ok; i++)
        ok = read_path(&r, paths[i], true, 0);
    if (ok && !text->train_size)
        ok = fail(&r, num_paths ? paths[0] : "no path", "there is no text in it");
    if (ok && !hold_out_end(text))
        ok = fail(&r, paths[0], "out of memory");
    if (ok)
        text->fingerprint = mix(mix(0xcbf29ce484222325ull, text->train, text->train_size), text->held_out, text->held_out_size);
    else
        lm_text_free(text);
    return ok;
}

void lm_text_free(lm_text *text)
{
    free(text->train);
    free(text->held_out);
    *text = (lm_text){.files = 0};
}
