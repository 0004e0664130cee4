/* Option parser (cli/args.h). */
#include "test.h"

#include "args.h"

static char error[256];

static struct { int64_t hidden, seed; double rate; const char *model; bool json; arg_int_list ranks; arg_string_list text; } o;

static arg_option options[] = {
    ARG_INT("hidden", "H", &o.hidden, 7168, 1, 65536, "hidden size"),
    ARG_INT("seed", "N", &o.seed, -1, 0, ARG_NO_LIMIT, "seed of the random numbers"),
    ARG_DOUBLE("rate", "X", &o.rate, 0.5, 0.0, 1.0, "learning rate"),
    ARG_STRING("model", "NAME", &o.model, "kimi", "model of the table"),
    ARG_FLAG("json", &o.json, "print JSON"),
    ARG_INT_LIST("ranks", "LIST", &o.ranks, "1,2,4,8", 1, 4096, "numbers of ranks"),
    ARG_STRING_LIST("text", "PATH", &o.text, "src", "files to train on"),
};
enum { NUM_OPTIONS = sizeof options / sizeof *options };

/* Parses a command line that is given as words separated by '|'. The words stay valid until the next call. */
static args_result parse(const char *line)
{
    static char words[1024];
    char *argv[32];
    int argc = 0;
    snprintf(words, sizeof words, "%s", line);
    for (char *word = *line ? words : NULL, *next; word; word = next) {
        next = strchr(word, '|');
        if (next)
            *next++ = '\0';
        argv[argc++] = word;
    }
    error[0] = '\0';
    return args_parse(options, NUM_OPTIONS, argc, argv, error, sizeof error);
}

static void done(void) { args_free(options, NUM_OPTIONS); }

static void check_refused(const char *line, const char *sentence)
{
    args_result result = parse(line);
    if (result != ARGS_ERROR)
        TEST_FAILED("not refused: %s", line);
    else if (strcmp(error, sentence) != 0)
        TEST_FAILED("for %s\n    got      \"%s\"\n    expected \"%s\"", line, error, sentence);
    done();
}

TEST(defaults_are_stored_when_nothing_is_given)
{
    CHECK_EQ(parse(""), ARGS_OK);
    CHECK_EQ(o.hidden, 7168);
    CHECK_EQ(o.seed, -1); /* outside the range: "not given" */
    CHECK(o.rate == 0.5);
    CHECK_STR(o.model, "kimi");
    CHECK_EQ(o.json, false);
    CHECK_EQ(o.ranks.count, 4);
    CHECK_EQ(o.ranks.values[3], 8);
    REQUIRE(o.text.count == 1);
    CHECK_STR(o.text.values[0], "src");
    CHECK(!args_given(options, NUM_OPTIONS, "hidden"));
    done();
}

TEST(values_follow_after_a_space_or_an_equals_sign)
{
    CHECK_EQ(parse("--hidden|64|--rate=0.25|--model|glm|--json|--ranks=3,5|--seed=9223372036854775807"), ARGS_OK);
    CHECK_EQ(o.hidden, 64);
    CHECK(o.rate == 0.25);
    CHECK_EQ(strcmp(o.model, "glm"), 0);
    CHECK_EQ(o.json, true);
    CHECK_EQ(o.ranks.count, 2);
    CHECK_EQ(o.ranks.values[1], 5);
    CHECK_EQ(o.seed, INT64_MAX);
    CHECK(args_given(options, NUM_OPTIONS, "hidden") && args_given(options, NUM_OPTIONS, "json"));
    CHECK(!args_given(options, NUM_OPTIONS, "text") && !args_given(options, NUM_OPTIONS, "nonsense"));
    done();
}

TEST(last_of_several_values_wins)
{
    CHECK_EQ(parse("--hidden|64|--hidden=128|--ranks=1|--ranks=2,3"), ARGS_OK);
    CHECK_EQ(o.hidden, 128);
    CHECK_EQ(o.ranks.count, 2);
    done();
}

TEST(string_list_takes_all_values_up_to_the_next_option_and_may_be_repeated)
{
    CHECK_EQ(parse("--text|a.txt|b.txt|-c|--json|--text=--odd"), ARGS_OK);
    REQUIRE(o.text.count == 4);
    CHECK_STR(o.text.values[0], "a.txt");
    CHECK_STR(o.text.values[1], "b.txt");
    CHECK_STR(o.text.values[2], "-c");
    CHECK_STR(o.text.values[3], "--odd");
    CHECK(o.json);
    done();
}

TEST(value_with_equals_sign_is_kept_whole)
{
    CHECK_EQ(parse("--model=a=b"), ARGS_OK);
    CHECK_EQ(strcmp(o.model, "a=b"), 0);
    done();
}

TEST(unknown_options_are_refused)
{
    check_refused("--hiden|64", "there is no option --hiden; --help lists the options");
    check_refused("--hidde=64", "there is no option --hidde; --help lists the options");
    check_refused("--", "there is no option --; --help lists the options");
    check_refused("--=3", "there is no option --; --help lists the options");
    check_refused("hidden", "\"hidden\" is not an option; options begin with --, and --help lists them");
    check_refused("--json|yes", "\"yes\" is not an option; options begin with --, and --help lists them");
    check_refused("-j", "\"-j\" is not an option; options begin with --, and --help lists them");
}

TEST(missing_values_are_refused)
{
    check_refused("--hidden", "--hidden needs a value (H)");
    check_refused("--hidden|--json", "--hidden needs a value (H)");
    check_refused("--hidden=", "--hidden needs a value (H)");
    check_refused("--model=", "--model needs a value (NAME)");
    check_refused("--text", "--text needs a value (PATH)");
    check_refused("--ranks|--json", "--ranks needs a value (LIST)");
    check_refused("--json=yes", "--json takes no value, but \"yes\" was given");
}

TEST(non_numbers_are_refused)
{
    check_refused("--hidden|many", "--hidden is \"many\", but must be an integer from 1 to 65536");
    check_refused("--hidden|64k", "--hidden is \"64k\", but must be an integer from 1 to 65536");
    check_refused("--hidden| 64", "--hidden is \" 64\", but must be an integer from 1 to 65536");
    check_refused("--hidden|1.5", "--hidden is \"1.5\", but must be an integer from 1 to 65536");
    check_refused("--hidden|0x40", "--hidden is \"0x40\", but must be an integer from 1 to 65536");
    check_refused("--hidden|+-3", "--hidden is \"+-3\", but must be an integer from 1 to 65536");
    check_refused("--rate|fast", "--rate is \"fast\", but must be a number from 0 to 1");
    check_refused("--rate|nan", "--rate is \"nan\", but must be a number from 0 to 1");
    check_refused("--rate|1e", "--rate is \"1e\", but must be a number from 0 to 1");
}

TEST(numbers_outside_the_range_are_refused)
{
    check_refused("--hidden|-64", "--hidden is \"-64\", but must be an integer from 1 to 65536");
    check_refused("--hidden|65537", "--hidden is \"65537\", but must be an integer from 1 to 65536");
    check_refused("--seed|-1", "--seed is \"-1\", but must be an integer of at least 0");
    check_refused("--seed|9223372036854775808", "--seed is \"9223372036854775808\", but must be an integer of at least 0");
    check_refused("--seed|99999999999999999999999999999999999999", "--seed is \"99999999999999999999999999999999999999\", but must be an integer of at least 0");
    check_refused("--rate|-0.1", "--rate is \"-0.1\", but must be a number from 0 to 1");
    check_refused("--rate|1e999", "--rate is \"1e999\", but must be a number from 0 to 1");
}

TEST(bad_lists_are_refused)
{
    check_refused("--ranks|1,x", "--ranks has \"x\" in its list, but each value must be an integer from 1 to 4096");
    check_refused("--ranks|1,,2", "--ranks has \"\" in its list, but each value must be an integer from 1 to 4096");
    check_refused("--ranks|1,2,", "--ranks has \"\" in its list, but each value must be an integer from 1 to 4096");
    check_refused("--ranks|0", "--ranks has \"0\" in its list, but each value must be an integer from 1 to 4096");
    char line[256] = "--ranks=1";
    for (int i = 1; i < ARG_LIST_MAX; i++)
        strcat(line, ",1");
    CHECK_EQ(parse(line), ARGS_OK);
    CHECK_EQ(o.ranks.count, ARG_LIST_MAX);
    done();
    strcat(line, ",1");
    check_refused(line, "--ranks has more than 64 values");
}

TEST(long_arguments_do_not_overflow_the_sentence)
{
    char line[600] = "--hidden=";
    memset(line + 9, 'x', 500);
    CHECK_EQ(parse(line), ARGS_ERROR);
    CHECK_EQ(strlen(error), sizeof error - 1);
    done();
}

TEST(help_is_found_anywhere_before_an_error)
{
    CHECK_EQ(parse("--hidden|64|--help|--nonsense"), ARGS_HELP);
    done();
    CHECK_EQ(parse("-h"), ARGS_HELP);
    done();
}

TEST(help_lists_every_option_with_its_default)
{
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    args_help(out, "mok sample", "Shows how options look.", options, NUM_OPTIONS);
    fclose(out);
    const char *expected = "usage: mok sample [options]\n"
                           "Shows how options look.\n"
                           "\n"
                           "  --hidden H      hidden size (default 7168)\n"
                           "  --seed N        seed of the random numbers\n"
                           "  --rate X        learning rate (default 0.5)\n"
                           "  --model NAME    model of the table (default kimi)\n"
                           "  --json          print JSON\n"
                           "  --ranks LIST    numbers of ranks (default 1,2,4,8)\n"
                           "  --text PATH...  files to train on (default src)\n"
                           "  --help          print this text\n";
    if (strcmp(text, expected) != 0)
        TEST_FAILED("got\n%s", text);
    free(text);
}

TEST(help_wraps_long_lines)
{
    bool flag;
    arg_option one[] = {ARG_FLAG("an-option-with-a-rather-long-name", &flag,
        "a description that is much longer than one line of the terminal and therefore continues on the next line, below its own beginning")};
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    args_help(out, "mok", "x", one, 1);
    fclose(out);
    int width = 0;
    for (const char *p = text; *p; p++) {
        width = *p == '\n' ? 0 : width + 1;
        CHECK(width <= 100);
    }
    CHECK_STR(text, "  --an-option-with-a-rather-long-name\n          a description");
    free(text);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
