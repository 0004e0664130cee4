/* The shared object as a C program sees it: layout, symbols, callers of other versions. Built with -Wpedantic. */
#define _GNU_SOURCE
#include "abi_cases.h"

#include <dlfcn.h>

/* --- exported symbols are exactly the functions of the header -------------------------------------------------------------------------- */
enum { MAX_NAMES = 256, MAX_NAME = 64 };
typedef struct names { char name[MAX_NAMES][MAX_NAME]; int count; } names;

static void add_name(names *n, const char *start, size_t length)
{
    if (length >= MAX_NAME || n->count == MAX_NAMES) {
        TEST_FAILED("no room for a name of %zu characters, after %d names", length, n->count);
        return;
    }
    memcpy(n->name[n->count], start, length);
    n->name[n->count++][length] = 0;
}

static bool has_name(const names *n, const char *name)
{
    for (int i = 0; i < n->count; i++)
        if (!strcmp(n->name[i], name))
            return true;
    return false;
}

/* "MOK_API … mok_something(": the identifier before the first parenthesis. */
static void read_header(names *n)
{
    FILE *file = fopen(TEST_HEADER, "r");
    char line[1024];
    REQUIRE(file != NULL);
    while (fgets(line, sizeof line, file)) {
        char *end = strchr(line, '('), *start = end;
        if (strncmp(line, "MOK_API ", 8) || !end)
            continue;
        while (start > line && (start[-1] == '_' || (start[-1] >= 'a' && start[-1] <= 'z') || (start[-1] >= '0' && start[-1] <= '9')))
            start--;
        add_name(n, start, (size_t)(end - start));
    }
    fclose(file);
}

/* The shared object that this program has loaded. */
static bool library_path(char *path, size_t size)
{
    Dl_info info;
    const char *(*function)(void) = mok_version;
    void *address;
    memcpy(&address, &function, sizeof address); /* ISO C has no cast for it */
    if (!dladdr(address, &info) || !info.dli_fname)
        return false;
    snprintf(path, size, "%s", info.dli_fname);
    return true;
}

TEST(every_function_of_the_header_is_exported)
{
    names header = {.count = 0};
    read_header(&header);
    CHECK(header.count >= 25);
    CHECK(has_name(&header, "mok_backward") && has_name(&header, "mok_status_name") && has_name(&header, "mok_group_destroy"));
    for (int i = 0; i < header.count; i++)
        if (!dlsym(RTLD_DEFAULT, header.name[i]))
            TEST_FAILED("%s is in mok.h, but not in the shared object", header.name[i]);
}

TEST(nothing_else_is_exported)
{
    names header = {.count = 0};
    char path[900], command[1000], line[1024];
    int found = 0;
    REQUIRE(library_path(path, sizeof path));
    if (!strstr(path, "libmok"))
        SKIP("libmok is not a shared object here");
    if (system("nm --version >/dev/null 2>&1"))
        SKIP("there is no nm");
    read_header(&header);
    snprintf(command, sizeof command, "nm -D --defined-only '%s'", path);
    FILE *pipe = popen(command, "r");
    REQUIRE(pipe != NULL);
    while (fgets(line, sizeof line, pipe)) {
        char type, name[512];
        if (sscanf(line, "%*s %c %511s", &type, name) != 2 || type == 'A') /* A: the name of the version itself */
            continue;
        char *version = strchr(name, '@');
        if (!version || strcmp(version, "@@MOK_0.1"))
            TEST_FAILED("%s has not the version MOK_0.1", name);
        else
            *version = 0;
        found++;
        if (!has_name(&header, name))
            TEST_FAILED("%s is exported, but not in mok.h", name);
        if (type != 'T')
            TEST_FAILED("%s is exported as '%c': only functions should be", name, type);
    }
    CHECK_EQ(pclose(pipe), 0);
    CHECK_EQ(found, header.count);
}

/* What it needs to be loaded: nothing that a machine without GPU lacks. */
TEST(E9_it_needs_no_cuda_to_be_loaded)
{
    char path[900], command[1000], line[1024];
    REQUIRE(library_path(path, sizeof path));
    if (!strstr(path, "libmok") || system("readelf --version >/dev/null 2>&1"))
        SKIP("no shared object, or no readelf");
    snprintf(command, sizeof command, "readelf -d '%s'", path);
    FILE *pipe = popen(command, "r");
    REQUIRE(pipe != NULL);
    int needed = 0;
    while (fgets(line, sizeof line, pipe))
        if (strstr(line, "(NEEDED)")) {
            needed++;
            if (strstr(line, "cuda") || strstr(line, "nvidia") || strstr(line, "nccl") || strstr(line, "torch") || strstr(line, "stdc++"))
                TEST_FAILED("%s", line);
        }
    CHECK(needed > 0);
    CHECK_EQ(pclose(pipe), 0);
}

/* --- the header by itself, in every language level that it promises --------------------------------------------------------------------- */
static void compiles(const char *compiler, const char *language, const char *standard, const char *source)
{
    char command[1200];
    snprintf(command, sizeof command, "printf '%s' | '%s' -x %s -std=%s -pedantic-errors -Wall -Wextra -Wshadow -Werror -fsyntax-only -include '%s' -", source,
             compiler, language, standard, TEST_HEADER);
    if (system(command))
        TEST_FAILED("as %s: %s", standard, command);
}

TEST(the_header_is_strict_c11_and_cpp)
{
    if (system("'" TEST_CC "' --version >/dev/null 2>&1") || system("'" TEST_CXX "' --version >/dev/null 2>&1"))
        SKIP("the compilers that built this are gone");
    static const char use[] = "int f(void);\\nint f(void) { mok_config c = MOK_INIT(mok_config); return (int)c.hidden; }\\n";
    compiles(TEST_CC, "c", "c11", use);
    compiles(TEST_CC, "c", "c17", use);
    compiles(TEST_CXX, "c++", "c++11", use);
    compiles(TEST_CXX, "c++", "c++17", use);
    compiles(TEST_CXX, "c++", "c++20", use);
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
