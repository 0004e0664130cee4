/* Seeded mutation of a text, for the fuzz cases: a few edits, each of them one that breaks real files or real readers.
 * Include it after test.h. */
#ifndef MOK_TEST_MUTATE_H
#define MOK_TEST_MUTATE_H

/* Pieces that readers get wrong: limits of types, half-written literals, escapes, brackets, broken UTF-8. */
static const char *const mutate_pieces[] = {
    "null", "true", "fals", "-0", "-1", "0", "1e999", "1e-999", "0.5", "01", "2147483647", "2147483648", "-2147483648",
    "9223372036854775807", "9223372036854775808", "-9223372036854775809", "1e18", "NaN", "Infinity", "\"", "\\", "\\u",
    "\\u0000", "\"\\ud800\"", "\"\\udc00\\ud800\"", "\"\\ud83d\\ude00\"", "{", "}", "[", "]", ",", ":", "[[[[[[[[[[", "{\"a\":",
    "\xff", "\xc3", "\xe2\x82", "\n", "\x1b", "text_config", "n_routed_experts", "\"num_experts\":", "\"hidden_size\":"};

static inline size_t mutate_replace(char *text, size_t length, size_t capacity, size_t at, size_t removed,
                                    const char *piece, size_t piece_length)
{
    if (removed > length - at)
        removed = length - at;
    if (length - removed + piece_length > capacity)
        return length;
    memmove(text + at + piece_length, text + at + removed, length - at - removed);
    memcpy(text + at, piece, piece_length);
    return length - removed + piece_length;
}

/* Valid values, most of them absurd as a size or a count. */
static const char *const mutate_values[] = {
    "null", "true", "-0", "-1", "0", "1", "3", "64", "0.5", "8.0", "1e1", "2147483647", "2147483648", "-2147483648",
    "9223372036854775807", "9223372036854775808", "1e18", "1e300", "1e-300", "\"\"", "\"8\"", "\"\\u001b[2J\"", "[]", "[8]",
    "{}", "{\"num_experts\": 8}"};

/* Puts `piece` in the place of the value of the first member after `at`, which usually leaves valid JSON. */
static inline size_t mutate_value(char *text, size_t length, size_t capacity, size_t at, const char *piece)
{
    while (at < length && text[at] != ':')
        at++;
    at += at < length;
    size_t end = at;
    while (end < length && !strchr(",\n{}", text[end]))
        end++;
    return mutate_replace(text, length, capacity, at, end - at, piece, strlen(piece));
}

/* Edits text[0..length) in place, growing it to at most `capacity` bytes. Returns the new length. */
static inline size_t mutate(char *text, size_t length, size_t capacity, uint64_t *random)
{
    for (int64_t edits = 1 + test_below(random, 3); edits > 0; edits--) {
        size_t at = (size_t)test_below(random, (int64_t)length + 1), span = (size_t)test_below(random, 12);
        const char *piece = mutate_pieces[test_below(random, (int64_t)(sizeof mutate_pieces / sizeof *mutate_pieces))];
        char byte = (char)test_below(random, 256), copy[64];
        size_t copied = (size_t)test_below(random, (int64_t)(length - at < sizeof copy ? length - at : sizeof copy) + 1);
        switch (test_below(random, 15)) {
        case 0: length = mutate_replace(text, length, capacity, at, 1, &byte, 1); break;
        case 1: length = mutate_replace(text, length, capacity, at, span, piece, strlen(piece)); break;
        case 2: length = mutate_replace(text, length, capacity, at, span * 4, "", 0); break;
        case 3: length = at; break; /* a file that was cut off */
        case 4:
            memcpy(copy, text + at, copied);
            length = mutate_replace(text, length, capacity, (size_t)test_below(random, (int64_t)length + 1), 0, copy, copied);
            break;
        default:
            piece = mutate_values[test_below(random, (int64_t)(sizeof mutate_values / sizeof *mutate_values))];
            length = mutate_value(text, length, capacity, at, piece);
        }
    }
    return length;
}

/* What every sentence for a person must be: there, one line, no control characters, i.e. safe for a terminal. */
static inline bool is_one_sentence(const char *error)
{
    for (const char *p = error; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            return false;
    return *error != '\0';
}
#endif
