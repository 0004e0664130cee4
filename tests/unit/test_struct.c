/* Structs that carry their size (layout/config.c), seen from inside and through the public functions. And the small things
 * underneath: status names, the thread's sentence, bf16. */
#include <stddef.h>

#include "bad_config.h"
#include "base/error.h"
#include "cpu/bf16.h"
#include "layout/config.h"
#include "test.h"

#include <pthread.h>

typedef struct sample { uint32_t struct_size, api_version; unsigned char body[56]; } sample;

static sample sample_of(uint32_t size, unsigned char fill)
{
    sample s = {size, 1, {0}};
    memset(s.body, fill, sizeof s.body);
    return s;
}

TEST(read_copies_every_prefix_over_zeros)
{
    for (uint32_t size = 8; size <= sizeof(sample); size++) {
        sample from = sample_of(size, 0x77), to;
        memset(&to, 0xee, sizeof to);
        CHECK_EQ(mk_read_struct("sample", &from, &to, sizeof to), MOK_OK);
        CHECK_EQ(to.struct_size, sizeof to); /* from here on the library's own size */
        CHECK_EQ(to.api_version, 1);
        for (uint32_t i = 0; i < sizeof to.body; i++)
            CHECK_EQ(to.body[i], i + 8 < size ? 0x77 : 0);
    }
}

TEST(read_refuses_what_it_cannot_know)
{
    struct { sample known; unsigned char tail[24]; } longer;
    sample to, before;
    for (int byte = 0; byte < 24; byte++) {
        longer.known = sample_of(sizeof longer, 0x11);
        memset(longer.tail, 0, sizeof longer.tail);
        memset(&to, 0xee, sizeof to);
        before = to;
        CHECK_EQ(mk_read_struct("sample", &longer, &to, sizeof to), MOK_OK); /* a longer struct with nothing in it */
        CHECK_EQ(to.struct_size, sizeof to);
        CHECK_BYTES(to.body, longer.known.body, sizeof to.body);
        longer.tail[byte] = 1;
        to = before;
        CHECK_EQ(mk_read_struct("sample", &longer, &to, sizeof to), MOK_E_UNSUPPORTED);
        char where[64];
        snprintf(where, sizeof where, "something in byte %d; this library knows 64", 64 + byte);
        CHECK_STR(mok_last_error(), where);
        CHECK_BYTES(&to, &before, sizeof to);
    }
    static const uint32_t sizes[] = {0, 1, 7, 65537, UINT32_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        sample from = sample_of(sizes[i], 0);
        CHECK_EQ(mk_read_struct("sample", &from, &to, sizeof to), MOK_E_ARG);
        CHECK_STR(mok_last_error(), "sample.struct_size is");
        CHECK_EQ(mk_write_struct("sample", &before, sizeof before, &from), MOK_E_ARG);
        CHECK_STR(mok_last_error(), "sample.struct_size is");
    }
    static const uint32_t versions[] = {0, MOK_API_VERSION + 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        sample from = sample_of(sizeof from, 0);
        from.api_version = versions[i];
        CHECK_EQ(mk_read_struct("sample", &from, &to, sizeof to), MOK_E_ARG);
        CHECK_STR(mok_last_error(), "sample.api_version is");
    }
    CHECK_EQ(mk_read_struct("sample", NULL, &to, sizeof to), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "sample is NULL");
    CHECK_EQ(mk_write_struct("sample", &before, sizeof before, NULL), MOK_E_ARG);
    CHECK_STR(mok_last_error(), "sample is NULL");
}

TEST(write_fills_what_the_caller_has_room_for)
{
    sample from = sample_of(sizeof from, 0x55);
    for (uint32_t size = 8; size <= sizeof(sample) + 16; size++) {
        unsigned char to[sizeof(sample) + 32];
        memset(to, 0xee, sizeof to);
        uint32_t head[2] = {size, 1};
        memcpy(to, head, sizeof head);
        CHECK_EQ(mk_write_struct("sample", &from, sizeof from, to), MOK_OK);
        CHECK_BYTES(to, head, sizeof head); /* the header stays the caller's */
        for (uint32_t i = 8; i < sizeof to; i++)
            CHECK_EQ(to[i], i < size && i < sizeof(sample) ? 0x55 : 0xee);
    }
}

/* The caller of an older library: it does not know the fields from `known` on. */
TEST(an_older_callers_config_plans_like_todays)
{
    mok_config today = good_config();
    mok_plan want = MOK_INIT(mok_plan);
    today.timeout_ms = 0;
    today.cpu_threads = today.yield_us = 0;
    REQUIRE(mok_plan_query(&today, 2, 1, 0, 0, 0, &want, NULL, NULL) == MOK_OK);
    struct { mok_config c; } old = {today};
    old.c.struct_size = offsetof(mok_config, cpu_threads);
    old.c.cpu_threads = -7; /* not part of the struct that it passes */
    old.c.timeout_ms = -7;
    old.c.yield_us = -7;
    mok_plan got = MOK_INIT(mok_plan);
    CHECK_EQ(mok_plan_query(&old.c, 2, 1, 0, 0, 0, &got, NULL, NULL), MOK_OK);
    CHECK_BYTES(&got, &want, sizeof got);

    mok_plan part;
    memset(&part, 0xee, sizeof part);
    part.struct_size = offsetof(mok_plan, ring_rows);
    part.api_version = 1;
    CHECK_EQ(mok_plan_query(&today, 2, 1, 0, 0, 0, &part, NULL, NULL), MOK_OK);
    CHECK_EQ(part.row_tile, 128);
    CHECK_EQ((uint64_t)part.ring_rows, 0xeeeeeeeeeeeeeeeeull);
}

TEST(a_newer_callers_config_works_if_it_asks_for_nothing_new)
{
    struct { mok_config c; int64_t news[3]; } newer = {good_config(), {0}};
    mok_plan plan = MOK_INIT(mok_plan);
    newer.c.struct_size = sizeof newer;
    CHECK_EQ(mok_plan_query(&newer.c, 2, 1, 0, 0, 0, &plan, NULL, NULL), MOK_OK);
    newer.news[2] = 1;
    CHECK_EQ(mok_plan_query(&newer.c, 2, 1, 0, 0, 0, &plan, NULL, NULL), MOK_E_UNSUPPORTED);
    CHECK_STR(mok_last_error(), "mok_config has");
}

/* --- errors ---------------------------------------------------------------------------------------------------------------------- */
TEST(statuses_have_names_and_texts)
{
    static const struct { mok_status s; int value; const char *name; } all[] = {
        {MOK_OK, 0, "MOK_OK"}, {MOK_NOT_READY, 1, "MOK_NOT_READY"}, {MOK_E_ARG, 2, "MOK_E_ARG"}, {MOK_E_SHAPE, 3, "MOK_E_SHAPE"},
        {MOK_E_ROUTE, 4, "MOK_E_ROUTE"}, {MOK_E_STATE, 5, "MOK_E_STATE"}, {MOK_E_UNSUPPORTED, 6, "MOK_E_UNSUPPORTED"},
        {MOK_E_MEMORY, 20, "MOK_E_MEMORY"}, {MOK_E_ENV, 21, "MOK_E_ENV"}, {MOK_E_MISMATCH, 40, "MOK_E_MISMATCH"}, {MOK_E_PEER, 41, "MOK_E_PEER"},
        {MOK_E_TIMEOUT, 42, "MOK_E_TIMEOUT"}, {MOK_E_DEVICE, 60, "MOK_E_DEVICE"}, {MOK_E_BUG, 80, "MOK_E_BUG"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        CHECK_EQ(all[i].s, all[i].value);
        CHECK_EQ(strcmp(mok_status_name(all[i].s), all[i].name), 0);
        CHECK(strlen(mok_status_text(all[i].s)) > 5);
        for (size_t j = 0; j < i; j++)
            CHECK(strcmp(mok_status_text(all[i].s), mok_status_text(all[j].s)) != 0);
    }
    static const int unknown[] = {-1, 7, 19, 81, 1000, INT32_MAX};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        CHECK_STR(mok_status_name((mok_status)unknown[i]), "unknown status");
        CHECK_STR(mok_status_text((mok_status)unknown[i]), "unknown status");
    }
    CHECK_EQ(mok_api_version(), MOK_API_VERSION);
    int major = -1, minor = -1, patch = -1;
    CHECK_EQ(sscanf(mok_version(), "%d.%d.%d", &major, &minor, &patch), 3);
}

static void *fresh_thread(void *argument)
{
    char *seen = argument;
    snprintf(seen, 64, "[%s]", mok_last_error());
    (void)mk_fail(MOK_E_ARG, "of the thread");
    snprintf(seen + 64, 64, "[%s]", mok_last_error());
    return NULL;
}

TEST(the_sentence_belongs_to_its_thread)
{
    char seen[128];
    pthread_t thread;
    CHECK_EQ(mk_fail(MOK_E_SHAPE, "of %s %d", "main", 7), MOK_E_SHAPE);
    REQUIRE(pthread_create(&thread, NULL, fresh_thread, seen) == 0);
    pthread_join(thread, NULL);
    CHECK_EQ(strcmp(seen, "[]"), 0);
    CHECK_EQ(strcmp(seen + 64, "[of the thread]"), 0);
    CHECK_EQ(strcmp(mok_last_error(), "of main 7"), 0);
    (void)mk_fail(MOK_E_BUG, "again: %s", mok_last_error()); /* from itself */
    CHECK_EQ(strcmp(mok_last_error(), "again: of main 7"), 0);
    char longest[2000];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    (void)mk_fail(MOK_E_BUG, "%s", longest);
    CHECK_EQ(strlen(mok_last_error()), MK_ERROR_BYTES - 1);
    mok_plan plan = MOK_INIT(mok_plan);
    mok_config c = good_config();
    CHECK_EQ(mok_plan_query(&c, 1, 0, 0, 0, 0, &plan, NULL, NULL), MOK_OK);
    CHECK_EQ(strlen(mok_last_error()), MK_ERROR_BYTES - 1); /* success does not touch it */
}

/* --- bf16 ------------------------------------------------------------------------------------------------------------------------ */
static uint32_t bits_of(float f)
{
    uint32_t b;
    memcpy(&b, &f, 4);
    return b;
}

static float float_of(uint32_t b)
{
    float f;
    memcpy(&f, &b, 4);
    return f;
}

TEST(bf16_rounds_to_nearest_even_everywhere)
{
    for (uint32_t i = 0; i < 65536; i++) {
        float f = mk_bf16_to_float((mk_bf16)i);
        CHECK_EQ(bits_of(f), i << 16);
        bool nan = (i & 0x7f80) == 0x7f80 && (i & 0x7f);
        CHECK_EQ(mk_float_to_bf16(f), nan ? (i | 0x40) : i);
        if ((i & 0x7f80) == 0x7f80)
            continue; /* between i and its neighbour away from zero: */
        CHECK_EQ(mk_float_to_bf16(float_of(i << 16 | 0x7fff)), i);
        CHECK_EQ(mk_float_to_bf16(float_of(i << 16 | 0x8000)), i + (i & 1));
        CHECK_EQ(mk_float_to_bf16(float_of(i << 16 | 0x8001)), i + 1);
        CHECK_EQ(mk_float_to_bf16(float_of(i << 16 | 0xffff)), i + 1);
    }
    CHECK_EQ(mk_float_to_bf16(float_of(0x7f7fffff)), 0x7f80); /* FLT_MAX becomes infinity */
    CHECK_EQ(mk_float_to_bf16(float_of(0xff7fffff)), 0xff80);
    static const uint32_t nans[] = {0x7f800001, 0x7fffffff, 0xff800001, 0xffffffff, 0x7fc00000, 0xffc00000};
    for (size_t i = 0; i < sizeof nans / sizeof *nans; i++) {
        uint32_t b = mk_float_to_bf16(float_of(nans[i]));
        CHECK((b & 0x7f80) == 0x7f80 && (b & 0x7f));
        CHECK_EQ(b >> 15, nans[i] >> 31);
    }
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
