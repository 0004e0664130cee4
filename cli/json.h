/* JSON for the command-line tool: a strict reader into a small tree, and a writer that streams.
 *
 * Strict means RFC 8259 and no more: no comments, no trailing commas, no NaN. Beyond the RFC the reader refuses duplicate
 * keys, the escape \u0000 (strings here end at their first zero byte), numbers that a double cannot hold and numbers of
 * 128 characters and more. Bytes of 0x80 and above are passed through unchanged, in both directions. */
#ifndef MOK_CLI_JSON_H
#define MOK_CLI_JSON_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define JSON_MAX_DEPTH 64                 /* objects and arrays inside each other, reader and writer */
#define JSON_MAX_BYTES (4u * 1024 * 1024) /* of one document; real config.json files stay below 1 MiB */

typedef enum json_type { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } json_type;

typedef struct json_value json_value;
struct json_value {
    json_type type;
    bool boolean;      /* JSON_BOOL */
    bool is_integer;   /* JSON_NUMBER: `integer` is exactly the number that was written */
    int64_t integer;
    double number;     /* JSON_NUMBER, always set */
    char *string;      /* JSON_STRING, decoded */
    char *key;         /* name of a member of an object, else NULL */
    json_value *first; /* JSON_ARRAY and JSON_OBJECT: first child, the others follow through `next`, in document order */
    json_value *next;
    size_t count;      /* number of children */
};

/* Both return the tree, to be given to json_free, or NULL and one sentence in `error`. `text` needs no zero at its end. */
json_value *json_parse(const char *text, size_t length, char *error, size_t error_size);
json_value *json_read_file(const char *path, char *error, size_t error_size);
void json_free(json_value *value); /* NULL is fine */

/* The member `key`; NULL if there is none, or if `object` is NULL or not an object. */
const json_value *json_get(const json_value *object, const char *key);

/* The value as one short printable line for an error message: numbers, true, false, null and strings (cut after 40 bytes)
 * as JSON writes them, "an array" or "an object" for the rest. Returns `text`. */
char *json_describe(const json_value *value, char *text, size_t size);

/* The shortest decimal that reads back as the same double; "null" for NaN and infinities. Returns `text`. */
char *json_format_double(double value, char text[32]);

/* The writer. `key` is the member's name inside an object and NULL elsewhere. A wrong use (key missing or not wanted, an
 * end without its begin, a second top-level value) is remembered and reported by json_writer_finish. */
typedef struct json_writer {
    FILE *out;
    int depth;
    bool failed, wrote_top;
    bool in_object[JSON_MAX_DEPTH];
    bool has_children[JSON_MAX_DEPTH];
} json_writer;

void json_writer_start(json_writer *w, FILE *out);
void json_begin_object(json_writer *w, const char *key);
void json_end_object(json_writer *w);
void json_begin_array(json_writer *w, const char *key);
void json_end_array(json_writer *w);
void json_int(json_writer *w, const char *key, int64_t value);
void json_double(json_writer *w, const char *key, double value); /* NaN and infinities become null */
void json_bool(json_writer *w, const char *key, bool value);
void json_null(json_writer *w, const char *key);
void json_string(json_writer *w, const char *key, const char *value); /* NULL becomes null */
bool json_writer_finish(json_writer *w); /* ends the last line; true if one whole document was written without an error */
#endif
