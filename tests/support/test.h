/* Test support: named cases, asserts that print both operands, one line per case.
 *
 *   TEST(Z1_empty_expert_backward) { CHECK_EQ(a, b); }
 *   int main(int argc, char **argv) { return test_main(argc, argv); }
 *
 * Each case prints "PASS name", "FAIL name" or "SKIP name: why"; tools/test_summary.sh counts these lines. The program
 * exits 0, 1 or 77 (every case skipped). Arguments: names (substrings) of the cases to run. MOK_TEST_SEED overrides the
 * seed, which is printed. A case that does not end within its watchdog (default 120 s, TEST_WATCHDOG) aborts the program
 * by name. Include it in one file per program. */
#ifndef MOK_TEST_H
#define MOK_TEST_H
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef TEST_WATCHDOG
#define TEST_WATCHDOG 120
#endif

typedef struct test_case { const char *name; void (*run)(void); struct test_case *next; } test_case;
static test_case *test_first, **test_tail = &test_first;
static int test_failures;          /* failed checks of the running case */
static const char *test_skip_why;  /* set by SKIP */
static const char *test_skip_all;  /* a program's, before test_main: why no case of it can run */
static char test_current[128];
static uint64_t test_seed_value;

#define TEST(id)                                                                                                  \
    static void test_##id(void);                                                                                  \
    static test_case test_case_##id = {#id, test_##id, NULL};                                                     \
    __attribute__((constructor)) static void test_register_##id(void)                                             \
    { *test_tail = &test_case_##id; test_tail = &test_case_##id.next; }                                           \
    static void test_##id(void)

#define TEST_FAILED(...) (__atomic_add_fetch(&test_failures, 1, __ATOMIC_RELAXED) <= 20 ?                         \
    (printf("  %s:%d: ", __FILE__, __LINE__), printf(__VA_ARGS__), printf("\n"), 0) : 0)
#define CHECK(cond) do { if (!(cond)) TEST_FAILED("%s is false", #cond); } while (0)
#define REQUIRE(cond) do { if (!(cond)) { TEST_FAILED("%s is false", #cond); return; } } while (0)
#define CHECK_EQ(a, b) do { long long va_ = (long long)(a), vb_ = (long long)(b);                                 \
    if (va_ != vb_) TEST_FAILED("%s is %lld, %s is %lld", #a, va_, #b, vb_); } while (0)
#define CHECK_LE(a, b) do { double va_ = (double)(a), vb_ = (double)(b);                                          \
    if (!(va_ <= vb_)) TEST_FAILED("%s is %.9g, more than %s, which is %.9g", #a, va_, #b, vb_); } while (0)
#define CHECK_STR(text, part) do { const char *vt_ = (text), *vp_ = (part);                                       \
    if (!vt_ || !strstr(vt_, vp_)) TEST_FAILED("\"%s\" does not contain \"%s\"", vt_ ? vt_ : "(null)", vp_); } while (0)
#define CHECK_BYTES(a, b, n) test_check_bytes(__FILE__, __LINE__, #a, #b, (a), (b), (n))
#define SKIP(why) do { test_skip_why = (why); return; } while (0)

static inline void test_check_bytes(const char *file, int line, const char *na, const char *nb, const void *a, const void *b, size_t n)
{
    const unsigned char *pa = (const unsigned char *)a, *pb = (const unsigned char *)b;
    for (size_t i = 0; i < n; i++)
        if (pa[i] != pb[i]) {
            __atomic_add_fetch(&test_failures, 1, __ATOMIC_RELAXED);
            printf("  %s:%d: %s and %s differ first at byte %zu of %zu: %02x against %02x\n", file, line, na, nb, i, n, pa[i], pb[i]);
            return;
        }
}

/* splitmix64: a small generator whose whole state is its seed. */
static inline uint64_t test_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
static inline int64_t test_below(uint64_t *state, int64_t n) { return (int64_t)(test_random(state) % (uint64_t)n); }
static inline double test_uniform(uint64_t *state) { return (double)(test_random(state) >> 11) * 0x1p-53; }
static inline double test_normal(uint64_t *state)
{
    double u = 1.0 - test_uniform(state), v = test_uniform(state);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}
/* A fresh seed for this program; the failing run is repeated with MOK_TEST_SEED. */
static inline uint64_t test_seed(void) { return test_seed_value; }

static void test_on_alarm(int sig)
{
    (void)sig;
    static const char text[] = "FAIL (watchdog) ";
    (void)!write(1, text, sizeof text - 1);
    (void)!write(1, test_current, strlen(test_current));
    (void)!write(1, "\n", 1);
    _exit(1);
}

static inline int test_main(int argc, char **argv)
{
    const char *env = getenv("MOK_TEST_SEED");
    test_seed_value = env ? strtoull(env, NULL, 0) : (uint64_t)time(NULL) * 1000003u + (uint64_t)getpid();
    setvbuf(stdout, NULL, _IOLBF, 0); /* a test that is killed shows how far it came */
    printf("seed: MOK_TEST_SEED=%llu\n", (unsigned long long)test_seed_value);
    signal(SIGALRM, test_on_alarm);
    int failed = 0, passed = 0, skipped = 0;
    for (test_case *c = test_first; c; c = c->next) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; i++)
            wanted |= strstr(c->name, argv[i]) != NULL;
        if (!wanted)
            continue;
        test_failures = 0;
        test_skip_why = test_skip_all;
        snprintf(test_current, sizeof test_current, "%s", c->name);
        alarm(TEST_WATCHDOG);
        if (!test_skip_all)
            c->run();
        alarm(0);
        if (test_failures) { printf("FAIL %s (repeat: MOK_TEST_SEED=%llu %s %s)\n", c->name, (unsigned long long)test_seed_value, argv[0], c->name); failed++; }
        else if (test_skip_why) { printf("SKIP %s: %s\n", c->name, test_skip_why); skipped++; }
        else { printf("PASS %s\n", c->name); passed++; }
    }
    return failed ? 1 : (!passed && skipped) ? 77 : 0;
}
#endif
