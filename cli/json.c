/* JSON in; see json.h. The reader is a recursive descent, one function per rule of the grammar. */
#include "json.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct reader {
    const char *text;
    size_t length, at; /* `at` is the next byte to look at */
    int depth;
    char *error;
    size_t error_size;
} reader;

/* ------------------------------------------------------------------------------------------------------- errors -- */

/* Line and column are counted only when an error needs them, so that reading carries no bookkeeping. Columns count
 * characters, i.e. every byte but the continuation bytes of UTF-8. */
static void find_position(const reader *r, size_t at, size_t *line, size_t *column)
{
    *line = *column = 1;
    for (size_t i = 0; i < at && i < r->length; i++) {
        if (r->text[i] == '\n') {
            ++*line;
            *column = 1;
        } else if (((unsigned char)r->text[i] & 0xc0) != 0x80) {
            ++*column;
        }
    }
}

static bool fail(reader *r, size_t at, const char *what)
{
    size_t line, column;
    find_position(r, at, &line, &column);
    snprintf(r->error, r->error_size, "line %zu, column %zu: %s", line, column, what);
    return false;
}

static bool fail_expected(reader *r, const char *expected)
{
    char what[128];
    unsigned char c = r->at < r->length ? (unsigned char)r->text[r->at] : 0;
    if (r->at >= r->length)
        snprintf(what, sizeof what, "expected %s, found the end of the text", expected);
    else if (c == '\n' || c == '\r')
        snprintf(what, sizeof what, "expected %s, found the end of the line", expected);
    else if (c > 0x20 && c < 0x7f)
        snprintf(what, sizeof what, "expected %s, found '%c'", expected, c);
    else
        snprintf(what, sizeof what, "expected %s, found the byte 0x%02x", expected, c);
    return fail(r, r->at, what);
}

static bool fail_memory(reader *r)
{
    snprintf(r->error, r->error_size, "out of memory while reading JSON");
    return false;
}

/* ------------------------------------------------------------------------------------------------------ scalars -- */

static bool next_is(const reader *r, char c) { return r->at < r->length && r->text[r->at] == c; }

static bool next_is_digit(const reader *r) { return r->at < r->length && r->text[r->at] >= '0' && r->text[r->at] <= '9'; }

static void skip_space(reader *r)
{
    while (next_is(r, ' ') || next_is(r, '\t') || next_is(r, '\n') || next_is(r, '\r'))
        r->at++;
}

static bool read_word(reader *r, const char *word)
{
    size_t n = strlen(word);
    if (r->length - r->at < n || memcmp(r->text + r->at, word, n) != 0)
        return fail_expected(r, "a value");
    r->at += n;
    return true;
}

static bool skip_digits(reader *r)
{
    if (!next_is_digit(r))
        return fail_expected(r, "a digit");
    while (next_is_digit(r))
        r->at++;
    return true;
}

/* Moves past the number and says whether it was written without fraction and exponent. */
static bool skip_number(reader *r, bool *plain)
{
    *plain = true;
    if (next_is(r, '-'))
        r->at++;
    if (next_is(r, '0')) {
        r->at++; /* no digit may follow a leading zero */
        if (next_is_digit(r))
            return fail(r, r->at, "expected a number without leading zeros");
    } else if (!skip_digits(r)) {
        return false;
    }
    if (next_is(r, '.')) {
        r->at++;
        *plain = false;
        if (!skip_digits(r))
            return false;
    }
    if (next_is(r, 'e') || next_is(r, 'E')) {
        r->at++;
        *plain = false;
        if (next_is(r, '+') || next_is(r, '-'))
            r->at++;
        return skip_digits(r);
    }
    return true;
}

static bool read_number(reader *r, json_value *v)
{
    size_t start = r->at;
    bool plain;
    if (!skip_number(r, &plain))
        return false;
    char digits[128]; /* strtod needs a zero at the end, which the text may not have */
    if (r->at - start >= sizeof digits)
        return fail(r, start, "expected a number of fewer than 128 characters");
    memcpy(digits, r->text + start, r->at - start);
    digits[r->at - start] = '\0';

    v->type = JSON_NUMBER;
    v->number = strtod(digits, NULL);
    if (!isfinite(v->number))
        return fail(r, start, "expected a number that a double can hold");
    if (plain) {
        errno = 0;
        v->integer = strtoll(digits, NULL, 10);
        v->is_integer = errno == 0;
    } else if (fabs(v->number) <= 0x1p53 && v->number == floor(v->number)) {
        /* "1e3" and "4.0". Above 2^53 the double may not be what was written; below, only digits past the 16th are lost. */
        v->integer = (int64_t)v->number;
        v->is_integer = true;
    }
    if (!v->is_integer)
        v->integer = 0;
    return true;
}

static bool read_hex4(reader *r, uint32_t *code)
{
    *code = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        char c = r->at < r->length ? r->text[r->at] : '\0';
        uint32_t digit = c >= '0' && c <= '9' ? (uint32_t)(c - '0')
                       : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a' + 10)
                       : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A' + 10) : 16;
        if (digit == 16)
            return fail_expected(r, "a hexadecimal digit");
        *code = *code * 16 + digit;
    }
    return true;
}

static size_t encode_utf8(uint32_t code, char *out)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xc0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3f));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xe0 | code >> 12);
        out[1] = (char)(0x80 | (code >> 6 & 0x3f));
        out[2] = (char)(0x80 | (code & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | code >> 18);
    out[1] = (char)(0x80 | (code >> 12 & 0x3f));
    out[2] = (char)(0x80 | (code >> 6 & 0x3f));
    out[3] = (char)(0x80 | (code & 0x3f));
    return 4;
}

/* After "\u": four digits, or two such escapes that form one character beyond U+FFFF (a surrogate pair). */
static bool read_unicode_escape(reader *r, char *out, size_t *used)
{
    size_t start = r->at;
    uint32_t code, low;
    if (!read_hex4(r, &code))
        return false;
    if (code == 0)
        return fail(r, start, "expected a character other than \\u0000");
    if (code >= 0xdc00 && code <= 0xdfff)
        return fail(r, start, "expected the first half of a surrogate pair before its second half");
    if (code >= 0xd800 && code <= 0xdbff) {
        if (!next_is(r, '\\') || r->at + 1 >= r->length || r->text[r->at + 1] != 'u')
            return fail_expected(r, "the second half of a surrogate pair");
        r->at += 2;
        start = r->at;
        if (!read_hex4(r, &low))
            return false;
        if (low < 0xdc00 || low > 0xdfff)
            return fail(r, start, "expected the second half of a surrogate pair");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    *used += encode_utf8(code, out + *used);
    return true;
}

static bool read_escape(reader *r, char *out, size_t *used)
{
    static const char names[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    r->at++; /* the backslash */
    if (next_is(r, 'u')) {
        r->at++;
        return read_unicode_escape(r, out, used);
    }
    const char *name = r->at < r->length && r->text[r->at] ? strchr(names, r->text[r->at]) : NULL;
    if (!name)
        return fail_expected(r, "one of \"\\/bfnrtu after a backslash");
    r->at++;
    out[(*used)++] = meanings[name - names];
    return true;
}

/* Reads a string, the opening quote being next. Returns it decoded, or NULL after an error. */
static char *read_string(reader *r)
{
    r->at++;
    size_t end = r->at; /* the closing quote, found first: no decoded string is longer than its text */
    while (end < r->length && r->text[end] != '"')
        end += r->text[end] == '\\' ? 2 : 1;
    if (end > r->length)
        end = r->length;
    char *out = malloc(end - r->at + 1);
    if (!out) {
        fail_memory(r);
        return NULL;
    }
    size_t used = 0;
    bool ok = true;
    while (ok && r->at < r->length && r->text[r->at] != '"') {
        if ((unsigned char)r->text[r->at] < 0x20)
            ok = fail_expected(r, "'\"' at the end of a string");
        else if (r->text[r->at] == '\\')
            ok = read_escape(r, out, &used);
        else
            out[used++] = r->text[r->at++];
    }
    if (ok && r->at >= r->length)
        ok = fail_expected(r, "'\"' at the end of a string");
    if (!ok) {
        free(out);
        return NULL;
    }
    r->at++;
    out[used] = '\0';
    return out;
}

/* --------------------------------------------------------------------------------------------- arrays and objects -- */

static json_value *read_value(reader *r);

static int compare_keys(const void *a, const void *b)
{
    return strcmp((*(json_value *const *)a)->key, (*(json_value *const *)b)->key);
}

/* Sorting keeps this fast for an object of a million keys, where comparing all pairs would take hours. */
static bool check_keys_differ(reader *r, const json_value *object)
{
    if (object->count < 2)
        return true;
    const json_value **members = malloc(object->count * sizeof *members);
    if (!members)
        return fail_memory(r);
    size_t n = 0;
    for (const json_value *m = object->first; m; m = m->next)
        members[n++] = m;
    qsort(members, n, sizeof *members, compare_keys);
    bool ok = true;
    for (size_t i = 1; ok && i < n; i++)
        if (strcmp(members[i - 1]->key, members[i]->key) == 0) {
            char what[192], name[64];
            json_value key = {.type = JSON_STRING, .string = members[i]->key};
            snprintf(what, sizeof what, "expected different keys in the object that ends here, found %s twice",
                     json_describe(&key, name, sizeof name));
            ok = fail(r, r->at - 1, what);
        }
    free(members);
    return ok;
}

static bool read_key(reader *r, char **key)
{
    skip_space(r);
    if (!next_is(r, '"'))
        return fail_expected(r, "a key in double quotes");
    *key = read_string(r);
    if (!*key)
        return false;
    skip_space(r);
    if (next_is(r, ':')) {
        r->at++;
        return true;
    }
    free(*key);
    *key = NULL;
    return fail_expected(r, "':'");
}

/* Reads the children of `v`, an array or an object whose opening bracket is next, up to the closing bracket. */
static bool read_children(reader *r, json_value *v)
{
    bool object = v->type == JSON_OBJECT;
    char close = object ? '}' : ']';
    if (r->depth == JSON_MAX_DEPTH)
        return fail(r, r->at, "expected at most 64 objects and arrays inside each other");
    r->depth++;
    r->at++;
    skip_space(r);
    if (next_is(r, close)) {
        r->at++;
        r->depth--;
        return true;
    }
    for (json_value **tail = &v->first;; tail = &(*tail)->next) {
        char *key = NULL;
        if (object && !read_key(r, &key))
            return false;
        *tail = read_value(r);
        if (!*tail) {
            free(key);
            return false;
        }
        (*tail)->key = key;
        v->count++;
        skip_space(r);
        if (!next_is(r, ','))
            break;
        r->at++;
    }
    if (!next_is(r, close))
        return fail_expected(r, object ? "',' or '}'" : "',' or ']'");
    r->at++;
    r->depth--;
    return !object || check_keys_differ(r, v);
}

static bool read_value_into(reader *r, json_value *v)
{
    char c = r->at < r->length ? r->text[r->at] : '\0';
    switch (c) {
    case '{':
    case '[':
        v->type = c == '{' ? JSON_OBJECT : JSON_ARRAY;
        return read_children(r, v);
    case '"':
        v->type = JSON_STRING;
        v->string = read_string(r);
        return v->string != NULL;
    case 't':
    case 'f':
        v->type = JSON_BOOL;
        v->boolean = c == 't';
        return read_word(r, c == 't' ? "true" : "false");
    case 'n':
        return read_word(r, "null");
    default:
        if (c == '-' || (c >= '0' && c <= '9'))
            return read_number(r, v);
        return fail_expected(r, "a value");
    }
}

static json_value *read_value(reader *r)
{
    skip_space(r);
    json_value *v = calloc(1, sizeof *v); /* JSON_NULL is 0 */
    if (!v) {
        fail_memory(r);
        return NULL;
    }
    if (read_value_into(r, v))
        return v;
    json_free(v);
    return NULL;
}

json_value *json_parse(const char *text, size_t length, char *error, size_t error_size)
{
    reader r = {.text = text, .length = length, .error = error, .error_size = error_size};
    if (length > JSON_MAX_BYTES) {
        snprintf(error, error_size, "the JSON text has %zu bytes, more than the %u that are read", length, JSON_MAX_BYTES);
        return NULL;
    }
    json_value *root = read_value(&r);
    if (!root)
        return NULL;
    skip_space(&r);
    if (r.at == length)
        return root;
    fail_expected(&r, "the end of the text");
    json_free(root);
    return NULL;
}

/* Reads by blocks and not by the file's size, so that pipes work too. */
static char *read_text(FILE *file, const char *path, size_t *length, char *error, size_t error_size)
{
    size_t capacity = 0, used = 0;
    char *text = NULL;
    for (;;) {
        if (used == capacity) {
            capacity = capacity ? capacity * 2 : 16384;
            char *larger = realloc(text, capacity);
            if (!larger) {
                snprintf(error, error_size, "out of memory while reading %s", path);
                break;
            }
            text = larger;
        }
        size_t got = fread(text + used, 1, capacity - used, file);
        used += got;
        if (ferror(file)) {
            snprintf(error, error_size, "cannot read %s: %s", path, strerror(errno));
            break;
        }
        if (used > JSON_MAX_BYTES) {
            snprintf(error, error_size, "%s has more than the %u bytes that are read of a JSON file", path, JSON_MAX_BYTES);
            break;
        }
        if (got == 0) {
            *length = used;
            return text;
        }
    }
    free(text);
    return NULL;
}

json_value *json_read_file(const char *path, char *error, size_t error_size)
{
    FILE *file = fopen(path, "rb");
    if (!file) {
        snprintf(error, error_size, "cannot read %s: %s", path, strerror(errno));
        return NULL;
    }
    size_t length = 0;
    char *text = read_text(file, path, &length, error, error_size);
    fclose(file);
    if (!text)
        return NULL;
    char reason[256];
    json_value *root = json_parse(text, length, reason, sizeof reason);
    free(text);
    if (!root)
        snprintf(error, error_size, "%s, %s", path, reason);
    return root;
}

void json_free(json_value *value)
{
    if (!value)
        return;
    for (json_value *child = value->first, *next; child; child = next) {
        next = child->next;
        json_free(child); /* no deeper than JSON_MAX_DEPTH */
    }
    free(value->string);
    free(value->key);
    free(value);
}

const json_value *json_get(const json_value *object, const char *key)
{
    if (!object || object->type != JSON_OBJECT)
        return NULL;
    for (const json_value *m = object->first; m; m = m->next)
        if (strcmp(m->key, key) == 0)
            return m;
    return NULL;
}
