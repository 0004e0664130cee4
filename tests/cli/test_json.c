/* JSON reader and writer (cli/json.h). */
#include "test.h"

#include "json.h"
#include "mutate.h"

static char error[512];

static json_value *parse(const char *text)
{
    error[0] = '\0';
    return json_parse(text, strlen(text), error, sizeof error);
}

/* Parses a text that must be refused, with exactly this sentence. */
static void check_refused(const char *text, const char *sentence)
{
    json_value *v = parse(text);
    if (v)
        TEST_FAILED("accepted: %s", text);
    else if (strcmp(error, sentence) != 0)
        TEST_FAILED("for %s\n    got      \"%s\"\n    expected \"%s\"", text, error, sentence);
    json_free(v);
}

TEST(reader_keeps_the_tree_in_document_order)
{
    json_value *v = parse(" {\"b\": [1, true, null, \"x\"], \"a\": {}, \"c\": false}\n");
    REQUIRE(v != NULL);
    CHECK_EQ(v->type, JSON_OBJECT);
    CHECK_EQ(v->count, 3);
    CHECK_STR(v->first->key, "b");
    CHECK_STR(v->first->next->key, "a");
    const json_value *b = json_get(v, "b");
    CHECK_EQ(b->count, 4);
    CHECK_EQ(b->first->integer, 1);
    CHECK_EQ(b->first->next->boolean, true);
    CHECK_EQ(b->first->next->next->type, JSON_NULL);
    CHECK_STR(b->first->next->next->next->string, "x");
    CHECK_EQ(json_get(v, "a")->count, 0);
    CHECK_EQ(json_get(v, "c")->boolean, false);
    CHECK(json_get(v, "d") == NULL);
    CHECK(json_get(b, "b") == NULL);
    CHECK(json_get(NULL, "b") == NULL);
    json_free(v);
}

TEST(reader_accepts_every_kind_of_value_at_the_top)
{
    static const char *const texts[] = {"null", "true", "false", "0", "-1.5e-3", "\"\"", "[]", "{}", "\t[ ]\r\n"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        json_value *v = parse(texts[i]);
        if (!v)
            TEST_FAILED("refused %s: %s", texts[i], error);
        json_free(v);
    }
}

static void check_number(const char *text, double number, bool is_integer, int64_t integer)
{
    json_value *v = parse(text);
    if (!v || v->type != JSON_NUMBER || v->number != number || v->is_integer != is_integer || v->integer != integer)
        TEST_FAILED("%s: got %.17g, integer %d %lld (%s)", text, v ? v->number : NAN, v ? v->is_integer : 0,
                    v ? (long long)v->integer : 0, error);
    json_free(v);
}

TEST(numbers_are_doubles_and_exact_integers_where_integral)
{
    check_number("0", 0, true, 0);
    check_number("-0", -0.0, true, 0);
    check_number("2.5", 2.5, false, 0);
    check_number("4.0", 4, true, 4);
    check_number("1e3", 1000, true, 1000);
    check_number("1E+2", 100, true, 100);
    check_number("25e-1", 2.5, false, 0);
    check_number("9007199254740993", 9007199254740992.0, true, 9007199254740993); /* a double cannot hold it */
    check_number("9223372036854775807", 0x1p63, true, INT64_MAX);
    check_number("-9223372036854775808", -0x1p63, true, INT64_MIN);
    check_number("9223372036854775808", 0x1p63, false, 0);
    check_number("9007199254740994.0", 9007199254740994.0, false, 0); /* not known to be what was written */
    check_number("1e-999", 0, true, 0);
}

TEST(strings_are_decoded_and_utf8_passes_through)
{
    json_value *v = parse("\"\\\"\\\\\\/\\b\\f\\n\\r\\t \\u0041\\u00e9\\u20ac\\ud83d\\ude00 \xc3\xa9\xff\"");
    REQUIRE(v != NULL);
    const char *expected = "\"\\/\b\f\n\r\t A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80 \xc3\xa9\xff";
    CHECK_EQ(strlen(v->string), strlen(expected));
    CHECK_BYTES(v->string, expected, strlen(expected) + 1);
    json_free(v);
}

TEST(errors_say_line_column_and_what_was_expected)
{
    check_refused("", "line 1, column 1: expected a value, found the end of the text");
    check_refused("{\"a\": 1,\n \"b\" 2}", "line 2, column 6: expected ':', found '2'");
    check_refused("[1, 2", "line 1, column 6: expected ',' or ']', found the end of the text");
    check_refused("{\"a\": 1]", "line 1, column 8: expected ',' or '}', found ']'");
    check_refused("[1,]", "line 1, column 4: expected a value, found ']'");
    check_refused("{\"a\": 1,}", "line 1, column 9: expected a key in double quotes, found '}'");
    check_refused("{a: 1}", "line 1, column 2: expected a key in double quotes, found 'a'");
    check_refused("[1] x", "line 1, column 5: expected the end of the text, found 'x'");
    check_refused("[nul]", "line 1, column 2: expected a value, found 'n'");
    check_refused("[NaN]", "line 1, column 2: expected a value, found 'N'");
    check_refused("// no", "line 1, column 1: expected a value, found '/'");
    check_refused("\xef\xbb\xbf{}", "line 1, column 1: expected a value, found the byte 0xef");
    check_refused("[\"\xc3\xa9\", \x1b]", "line 1, column 7: expected a value, found the byte 0x1b");
}

TEST(malformed_numbers_are_refused)
{
    check_refused("01", "line 1, column 2: expected a number without leading zeros");
    check_refused("-", "line 1, column 2: expected a digit, found the end of the text");
    check_refused("1.", "line 1, column 3: expected a digit, found the end of the text");
    check_refused(".5", "line 1, column 1: expected a value, found '.'");
    check_refused("+1", "line 1, column 1: expected a value, found '+'");
    check_refused("1e", "line 1, column 3: expected a digit, found the end of the text");
    check_refused("[1e+x]", "line 1, column 5: expected a digit, found 'x'");
    check_refused("0x10", "line 1, column 2: expected the end of the text, found 'x'");
    check_refused("[-1e999]", "line 1, column 2: expected a number that a double can hold");
    char digits[200];
    memset(digits, '1', sizeof digits);
    digits[128] = '\0';
    check_refused(digits, "line 1, column 1: expected a number of fewer than 128 characters");
    digits[127] = '\0';
    json_value *v = parse(digits);
    CHECK(v != NULL);
    json_free(v);
}

TEST(malformed_strings_are_refused)
{
    check_refused("\"abc", "line 1, column 5: expected '\"' at the end of a string, found the end of the text");
    check_refused("\"abc\\", "line 1, column 6: expected one of \"\\/bfnrtu after a backslash, found the end of the text");
    check_refused("\"a\nb\"", "line 1, column 3: expected '\"' at the end of a string, found the end of the line");
    check_refused("\"\\x\"", "line 1, column 3: expected one of \"\\/bfnrtu after a backslash, found 'x'");
    check_refused("\"\\u12g4\"", "line 1, column 6: expected a hexadecimal digit, found 'g'");
    check_refused("\"\\u0000\"", "line 1, column 4: expected a character other than \\u0000");
    check_refused("\"\\udc00\"", "line 1, column 4: expected the first half of a surrogate pair before its second half");
    check_refused("\"\\ud800x\"", "line 1, column 8: expected the second half of a surrogate pair, found 'x'");
    check_refused("\"\\ud800\\u0041\"", "line 1, column 10: expected the second half of a surrogate pair");
}

TEST(duplicate_keys_are_refused)
{
    check_refused("{\"a\": 1, \"b\": 2, \"a\": 1}",
                  "line 1, column 24: expected different keys in the object that ends here, found \"a\" twice");
    check_refused("{\"\\n\": 1, \"\\u000a\": 2}",
                  "line 1, column 22: expected different keys in the object that ends here, found \"\\n\" twice");
    json_value *v = parse("{\"a\": {\"a\": 1}}");
    CHECK(v != NULL);
    json_free(v);
}

TEST(depth_is_limited_to_64)
{
    char text[200];
    for (int depth = 64; depth <= 65; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        text[2 * depth] = '\0';
        if (depth == 65) {
            check_refused(text, "line 1, column 65: expected at most 64 objects and arrays inside each other");
        } else {
            json_value *v = parse(text);
            CHECK(v != NULL);
            json_free(v);
        }
    }
}

TEST(size_is_limited_and_a_large_document_is_read_quickly)
{
    size_t n = JSON_MAX_BYTES;
    char *text = malloc(n + 1);
    REQUIRE(text != NULL);
    memset(text, ' ', n + 1);
    CHECK(json_parse(text, n + 1, error, sizeof error) == NULL);
    CHECK_STR(error, "the JSON text has 4194305 bytes, more than the 4194304 that are read");
    size_t used = 1, members = 0; /* many different keys: must not be compared pair by pair */
    text[0] = '{';
    while (used + 32 < n)
        used += (size_t)sprintf(text + used, "%s\"%zx\":1", members ? "," : "", members), members++;
    text[used++] = '}';
    json_value *v = json_parse(text, used, error, sizeof error);
    CHECK(v != NULL && v->count == members);
    json_free(v);
    free(text);
}

TEST(text_needs_no_zero_at_its_end)
{
    static const char *const texts[] = {"12", "tru", "\"ab", "\"a\\", "\"\\u12", "[1,", "{\"a\":", "-", "1e", "nul"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        size_t n = strlen(texts[i]);
        char *exact = malloc(n); /* the sanitizer sees a read past the end */
        REQUIRE(exact != NULL);
        memcpy(exact, texts[i], n);
        json_free(json_parse(exact, n, error, sizeof error));
        free(exact);
    }
    CHECK(json_parse(NULL, 0, error, sizeof error) == NULL);
}

TEST(unreadable_files_are_named)
{
    CHECK(json_read_file("/nonexistent/file.json", error, sizeof error) == NULL);
    CHECK_STR(error, "cannot read /nonexistent/file.json: No such file or directory");
    CHECK(json_read_file("/tmp", error, sizeof error) == NULL);
    CHECK_STR(error, "cannot read /tmp: Is a directory");
    CHECK(json_read_file("/dev/null", error, sizeof error) == NULL);
    CHECK_STR(error, "/dev/null, line 1, column 1: expected a value, found the end of the text");
    CHECK(json_read_file("/dev/zero", error, sizeof error) == NULL);
    CHECK_STR(error, "/dev/zero has more than the 4194304 bytes that are read of a JSON file");
}

TEST(describe_is_short_and_safe_for_a_terminal)
{
    char text[64];
    json_value *v = parse("[null, true, 7, 7.25, 1e300, [], {}, \"a\\u001b[31m\\\"\", \"aaaaaaaaaabbbbbbbbbbccccccccccddddddddd\xc3\xa9 and more\"]");
    REQUIRE(v != NULL);
    static const char *const expected[] = {"null", "true", "7", "7.25", "1e+300", "an array", "an object",
        "\"a\\u001b[31m\\\"\"", "\"aaaaaaaaaabbbbbbbbbbccccccccccddddddddd...\""};
    const json_value *item = v->first;
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++, item = item->next)
        if (strcmp(json_describe(item, text, sizeof text), expected[i]) != 0)
            TEST_FAILED("got %s, expected %s", text, expected[i]);
    json_free(v);
}

TEST(doubles_are_written_short_and_read_back_the_same)
{
    char text[32];
    CHECK_STR(json_format_double(0.1, text), "0.1");
    CHECK_EQ(strlen(json_format_double(0.1, text)), 3);
    CHECK_EQ(strcmp(json_format_double(1.0 / 3, text), "0.3333333333333333"), 0);
    CHECK_EQ(strcmp(json_format_double(0.1 + 0.2, text), "0.30000000000000004"), 0);
    CHECK_EQ(strcmp(json_format_double(2368, text), "2368"), 0);
    CHECK_EQ(strcmp(json_format_double(NAN, text), "null"), 0);
    CHECK_EQ(strcmp(json_format_double(-INFINITY, text), "null"), 0);
    uint64_t random = test_seed();
    for (int i = 0; i < 20000; i++) {
        uint64_t bits = test_random(&random);
        double value;
        memcpy(&value, &bits, sizeof value);
        if (!isfinite(value))
            continue;
        json_value *v = parse(json_format_double(value, text));
        if (!v || memcmp(&v->number, &value, sizeof value) != 0)
            TEST_FAILED("%a became %s", value, text);
        json_free(v);
    }
}

/* Runs `write` on a writer into memory; the text must be freed. */
static char *written(void (*write)(json_writer *), bool *ok)
{
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    json_writer w;
    json_writer_start(&w, out);
    write(&w);
    *ok = json_writer_finish(&w);
    fclose(out);
    return text;
}

static void write_sample(json_writer *w)
{
    json_begin_object(w, NULL);
    json_string(w, "name", "a \"b\"\n\x01\xc3\xa9");
    json_int(w, "smallest", INT64_MIN);
    json_double(w, "rate", 0.1);
    json_double(w, "nothing", NAN);
    json_bool(w, "yes", true);
    json_string(w, "absent", NULL);
    json_begin_array(w, "list");
    json_int(w, NULL, 1);
    json_begin_object(w, NULL);
    json_end_object(w);
    json_begin_array(w, NULL);
    json_end_array(w);
    json_end_array(w);
    json_end_object(w);
}

TEST(writer_prints_indented_json)
{
    bool ok;
    char *text = written(write_sample, &ok);
    CHECK(ok);
    const char *expected = "{\n  \"name\": \"a \\\"b\\\"\\n\\u0001\xc3\xa9\",\n  \"smallest\": -9223372036854775808,\n"
                           "  \"rate\": 0.1,\n  \"nothing\": null,\n  \"yes\": true,\n  \"absent\": null,\n  \"list\": [\n"
                           "    1,\n    {},\n    []\n  ]\n}\n";
    if (strcmp(text, expected) != 0)
        TEST_FAILED("got\n%s", text);
    json_value *v = parse(text);
    CHECK(v != NULL);
    json_free(v);
    free(text);
}

static void write_nothing(json_writer *w) { (void)w; }
static void write_unclosed(json_writer *w) { json_begin_object(w, NULL); }
static void write_wrong_end(json_writer *w) { json_begin_object(w, NULL); json_end_array(w); }
static void write_extra_end(json_writer *w) { json_end_object(w); }
static void write_no_key(json_writer *w) { json_begin_object(w, NULL); json_int(w, NULL, 1); json_end_object(w); }
static void write_key_in_array(json_writer *w) { json_begin_array(w, NULL); json_int(w, "a", 1); json_end_array(w); }
static void write_two_values(json_writer *w) { json_int(w, NULL, 1); json_int(w, NULL, 2); }
static void write_too_deep(json_writer *w)
{
    for (int i = 0; i < 65; i++)
        json_begin_array(w, NULL);
    for (int i = 0; i < 65; i++)
        json_end_array(w);
}

TEST(writer_reports_wrong_use)
{
    void (*const wrong[])(json_writer *) = {write_nothing, write_unclosed, write_wrong_end, write_extra_end, write_no_key,
                                            write_key_in_array, write_two_values, write_too_deep};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        bool ok;
        free(written(wrong[i], &ok));
        if (ok)
            TEST_FAILED("wrong use %zu was not reported", i);
    }
}

TEST(writer_reports_a_full_disk)
{
    FILE *out = fopen("/dev/full", "w");
    if (!out)
        SKIP("this machine has no /dev/full");
    json_writer w;
    json_writer_start(&w, out);
    json_int(&w, NULL, 1);
    CHECK(!json_writer_finish(&w));
    fclose(out);
}

/* Writes a tree again, so that what the fuzz case read can be compared with what it reads back. */
static void write_tree(json_writer *w, const json_value *v)
{
    switch (v->type) {
    case JSON_NULL: json_null(w, v->key); break;
    case JSON_BOOL: json_bool(w, v->key, v->boolean); break;
    case JSON_STRING: json_string(w, v->key, v->string); break;
    case JSON_NUMBER:
        if (v->is_integer && v->integer != 0)
            json_int(w, v->key, v->integer);
        else
            json_double(w, v->key, v->number);
        break;
    case JSON_ARRAY: json_begin_array(w, v->key); break;
    case JSON_OBJECT: json_begin_object(w, v->key); break;
    }
    for (const json_value *child = v->first; child; child = child->next)
        write_tree(w, child);
    if (v->type == JSON_ARRAY)
        json_end_array(w);
    else if (v->type == JSON_OBJECT)
        json_end_object(w);
}

static bool same_text(const char *a, const char *b) { return a && b ? strcmp(a, b) == 0 : a == b; }

static bool same_tree(const json_value *a, const json_value *b)
{
    for (; a && b; a = a->next, b = b->next)
        if (a->type != b->type || a->boolean != b->boolean ||
            (a->is_integer && (!b->is_integer || a->integer != b->integer)) || /* 1e17 is written as digits: may turn integer */
            memcmp(&a->number, &b->number, sizeof a->number) != 0 || a->count != b->count ||
            !same_text(a->string, b->string) || !same_text(a->key, b->key) || !same_tree(a->first, b->first))
            return false;
    return a == b; /* both at their end */
}

static bool survives_round_trip(const json_value *tree)
{
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    json_writer w;
    json_writer_start(&w, out);
    write_tree(&w, tree);
    bool ok = json_writer_finish(&w);
    fclose(out);
    json_value *again = json_parse(text, length, error, sizeof error);
    ok = ok && again && same_tree(tree, again);
    json_free(again);
    free(text);
    return ok;
}

TEST(fuzz_20000_mutated_documents_are_read_or_refused_with_one_sentence)
{
    static const char *const documents[] = {
        "{\"model_type\": \"kimi_k2\", \"hidden_size\": 7168, \"text_config\": {\"n_routed_experts\": 384, \"rope\": [1.5, -2e-3]}}",
        "[null, true, false, 0, -0, 1.25e2, \"\\u00e9\\ud83d\\ude00\\n\", [], {}, [[[{\"a\": {\"b\": []}}]]], \"\xe2\x82\xac\"]",
        "{\"a\": 1, \"b\": [1, 2, 3, 4], \"c\": {\"d\": \"x\", \"e\": \"y\\\\z\"}, \"f\": 9223372036854775807, \"g\": 0.1}"};
    uint64_t random = test_seed();
    char text[512];
    int accepted = 0;
    for (int i = 0; i < 20000; i++) {
        const char *document = documents[i % 3];
        size_t length = strlen(document);
        memcpy(text, document, length);
        length = mutate(text, length, sizeof text, &random);
        char *exact = malloc(length + !length); /* so that the sanitizer sees every read past the end */
        REQUIRE(exact != NULL);
        memcpy(exact, text, length);
        error[0] = '\0';
        json_value *v = json_parse(exact, length, error, sizeof error);
        accepted += v != NULL;
        if (v ? !survives_round_trip(v) : !is_one_sentence(error))
            TEST_FAILED("document %d: %s, \"%s\": %.*s", i, v ? "changed by a round trip" : "bad sentence", error, (int)length, text);
        json_free(v);
        free(exact);
    }
    printf("  %d of 20000 were still JSON\n", accepted);
    CHECK(accepted > 200 && accepted < 19800);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
