/* The cases that C and C++ share, in the language that is both: layout of the structs, old and new callers, one layer run through
 * the shared object. */
#ifndef MOK_TEST_ABI_CASES_H
#define MOK_TEST_ABI_CASES_H
#include "mok.h"
/* mok.h alone must be enough for itself; only now the rest. */
#include "abi_table.h"
#include "test.h"

TEST(sizes_and_offsets_are_pinned)
{
#define CHECK_SIZE(type, size) CHECK_EQ(sizeof(type), size);
    ABI_SIZE_LIST(CHECK_SIZE)
#undef CHECK_SIZE
#define CHECK_FIELD(type, field, offset, size)  \
    CHECK_EQ(offsetof(type, field), offset);    \
    CHECK_EQ(sizeof(((type *)0)->field), size);
    ABI_FIELD_LIST(CHECK_FIELD)
#undef CHECK_FIELD
    /* The table is complete: between neighbouring fields, and behind the last, there is no more than padding. */
    static const struct { const char *type; size_t size, offset, bytes; } fields[] = {
#define ROW(type, field, offset, bytes) {#type, sizeof(type), offset, bytes},
        ABI_FIELD_LIST(ROW)
#undef ROW
    };
    size_t count = sizeof fields / sizeof *fields;
    for (size_t i = 0; i < count; i++) {
        bool last = i + 1 == count || strcmp(fields[i].type, fields[i + 1].type) != 0;
        size_t end = fields[i].offset + fields[i].bytes, next = last ? fields[i].size : fields[i + 1].offset;
        if (next < end || next - end >= 8)
            TEST_FAILED("%s: a field at byte %zu is not in abi_table.h", fields[i].type, end);
    }
    CHECK_EQ(sizeof(mok_status), 4);
    CHECK_EQ(sizeof(void *), 8);
}

TEST(numbers_are_pinned)
{
    CHECK_EQ(MOK_API_VERSION, 1);
    CHECK_EQ(MOK_BACKEND_AUTO, 0); CHECK_EQ(MOK_BACKEND_CPU, 1); CHECK_EQ(MOK_BACKEND_CUDA, 2);
    CHECK_EQ(MOK_DTYPE_AUTO, 0); CHECK_EQ(MOK_BF16, 1); CHECK_EQ(MOK_FP32, 2); CHECK_EQ(MOK_MXFP8, 3);
    CHECK_EQ(MOK_ACT_SWIGLU, 0); CHECK_EQ(MOK_ACT_GPT_OSS, 1);
    CHECK_EQ(MOK_GATE_UP_SEPARATE, 0); CHECK_EQ(MOK_GATE_UP_COMBINED, 1); CHECK_EQ(MOK_GATE_UP_INTERLEAVED, 2);
    CHECK_EQ(MOK_WEIGHT_NK, 0); CHECK_EQ(MOK_WEIGHT_KN, 1);
    CHECK_EQ(MOK_SAVE_AUTO, 0); CHECK_EQ(MOK_SAVE_NONE, 1); CHECK_EQ(MOK_SAVE_RING, 2); CHECK_EQ(MOK_SAVE_ALL, 3); CHECK_EQ(MOK_SAVE_ROWS, 4);
    CHECK_EQ(MOK_MEM_HEAP, 0); CHECK_EQ(MOK_MEM_LOCAL, 1); CHECK_EQ(MOK_MEM_SCHEDULE, 2); CHECK_EQ(MOK_MEM_CONTEXT, 3);
    CHECK_EQ(MOK_BACKWARD_ALL, 0); CHECK_EQ(MOK_BACKWARD_DATA, 1); CHECK_EQ(MOK_BACKWARD_WEIGHTS, 2);
    CHECK_EQ(MOK_OK, 0); CHECK_EQ(MOK_NOT_READY, 1); CHECK_EQ(MOK_E_ARG, 2); CHECK_EQ(MOK_E_SHAPE, 3); CHECK_EQ(MOK_E_ROUTE, 4);
    CHECK_EQ(MOK_E_STATE, 5); CHECK_EQ(MOK_E_UNSUPPORTED, 6); CHECK_EQ(MOK_E_MEMORY, 20); CHECK_EQ(MOK_E_ENV, 21);
    CHECK_EQ(MOK_E_MISMATCH, 40); CHECK_EQ(MOK_E_PEER, 41); CHECK_EQ(MOK_E_TIMEOUT, 42); CHECK_EQ(MOK_E_DEVICE, 60); CHECK_EQ(MOK_E_BUG, 80);
}

TEST(init_sets_the_header_and_zeroes_the_rest)
{
#define CHECK_INIT(type)                                                                   \
    do {                                                                                   \
        type s = MOK_INIT(type);                                                           \
        const unsigned char *bytes_ = (const unsigned char *)&s;                           \
        CHECK_EQ(s.struct_size, sizeof(type));                                             \
        CHECK_EQ(s.api_version, 1);                                                        \
        for (size_t i_ = 8; i_ < sizeof s; i_++)                                           \
            CHECK_EQ(bytes_[i_], 0);                                                       \
    } while (0)
    CHECK_INIT(mok_config);
    CHECK_INIT(mok_plan);
    CHECK_INIT(mok_provider);
    CHECK_INIT(mok_bootstrap);
    CHECK_INIT(mok_schedule_args);
    CHECK_INIT(mok_forward_args);
    CHECK_INIT(mok_backward_args);
    CHECK_INIT(mok_stats);
    CHECK_INIT(mok_schedule_info);
    CHECK_INIT(mok_backend_info);
}

/* --- one layer, called by an old, a present and a future caller ------------------------------------------------------------------------ */
enum { ABI_TOKENS = 10, ABI_H = 64, ABI_I = 64, ABI_E = 2, ABI_K = 1 };

/* Copies of a struct as callers of another age pass them. */
typedef struct abi_caller {
    const char *name;
    int cut;  /* bytes that an old caller's structs lack at most: cut at `old` of each struct */
    int more; /* bytes that a future caller's structs have beyond ours */
} abi_caller;

/* `from` (size bytes) as that caller has it, in `room`. */
static void *abi_dress(void *room, const void *from, uint32_t size, uint32_t old, const abi_caller *caller)
{
    uint32_t theirs = caller->cut ? old : size + (uint32_t)caller->more;
    memset(room, 0, size + 64);
    memcpy(room, from, caller->cut ? old : size);
    if (caller->cut) /* what lies behind an old caller's struct is no field */
        memset((char *)room + old, 0xa5, size + 64 - old);
    memcpy(room, &theirs, sizeof theirs);
    return room;
}
#define ABI_DRESS(room, value, type, first_new) \
    ((type *)abi_dress(room, &(value), (uint32_t)sizeof(type), (uint32_t)offsetof(type, first_new), caller))

typedef union abi_room { unsigned char bytes[1024]; int64_t aligned; } abi_room;

static uint16_t abi_x[ABI_TOKENS * ABI_H], abi_dout[ABI_TOKENS * ABI_H], abi_weights[3 * ABI_E * ABI_I * ABI_H];

static void *abi_block(int64_t bytes)
{
    void *p = NULL;
    if (posix_memalign(&p, 256, (size_t)bytes))
        exit(1);
    memset(p, 0xff, (size_t)bytes);
    return p;
}

static void abi_run(const abi_caller *caller, uint16_t *out, uint16_t *dx, uint16_t *ddown)
{
    abi_room room, room2;
    mok_group *group = NULL;
    mok_workspace *w = NULL;
    float router[ABI_TOKENS];
    int32_t ids[ABI_TOKENS];
    int before = test_failures;
    uint64_t state = 5;
    for (int i = 0; i < ABI_TOKENS * ABI_H; i++) {
        abi_x[i] = (uint16_t)(0x3f00 + test_below(&state, 200) + (test_below(&state, 2) ? 0x8000 : 0));
        abi_dout[i] = (uint16_t)(0x3f00 + test_below(&state, 200));
    }
    for (int i = 0; i < 3 * ABI_E * ABI_I * ABI_H; i++)
        abi_weights[i] = (uint16_t)(0x3d00 + test_below(&state, 200) + (test_below(&state, 2) ? 0x8000 : 0));
    for (int i = 0; i < ABI_TOKENS; i++) {
        router[i] = 0.5f;
        ids[i] = i % ABI_E;
    }
    mok_config c = MOK_INIT(mok_config);
    c.hidden = ABI_H;
    c.intermediate = ABI_I;
    c.num_experts = ABI_E;
    c.topk = ABI_K;
    c.max_tokens = ABI_TOKENS;
    REQUIRE(mok_group_create_local(1, NULL, &group) == MOK_OK);
    CHECK_EQ(mok_workspace_create(group, ABI_DRESS(&room, c, mok_config, cpu_threads), &w), MOK_OK);
    mok_plan plan = MOK_INIT(mok_plan), *theirs = ABI_DRESS(&room2, plan, mok_plan, forward);
    CHECK_EQ(mok_workspace_plan(w, theirs), MOK_OK);
    plan.schedule_bytes = theirs->schedule_bytes;
    plan.context_bytes = theirs->context_bytes;
    CHECK(plan.schedule_bytes > 0 && plan.context_bytes > 0);
    if (caller->cut) /* nothing is written behind what an old caller has */
        CHECK_EQ(((unsigned char *)theirs)[offsetof(mok_plan, forward)], 0xa5);
    void *schedule = abi_block(plan.schedule_bytes), *context = abi_block(plan.context_bytes);

    mok_schedule_args s = MOK_INIT(mok_schedule_args);
    s.num_tokens = ABI_TOKENS;
    s.expert_ids = ids;
    s.schedule = schedule;
    CHECK_EQ(mok_schedule(w, ABI_DRESS(&room, s, mok_schedule_args, tokens_per_expert_local), NULL), MOK_OK);
    mok_forward_args f = MOK_INIT(mok_forward_args);
    f.num_tokens = ABI_TOKENS;
    f.schedule = schedule;
    f.x = abi_x;
    f.router_weights = router;
    f.weights.gate.packed = abi_weights;
    f.weights.up.packed = abi_weights + ABI_E * ABI_I * ABI_H;
    f.weights.down.packed = abi_weights + 2 * ABI_E * ABI_I * ABI_H;
    f.context = context;
    f.out = out;
    abi_caller whole = *caller; /* `out` is the last field of the first version: there is nothing to cut */
    whole.cut = 0;
    CHECK_EQ(mok_forward(w, (mok_forward_args *)abi_dress(&room, &f, sizeof f, sizeof f, &whole), NULL), MOK_OK);
    mok_backward_args b = MOK_INIT(mok_backward_args);
    b.num_tokens = ABI_TOKENS;
    b.schedule = schedule;
    b.context = context;
    b.dout = abi_dout;
    b.x = abi_x;
    b.router_weights = router;
    b.weights = f.weights;
    b.dx = dx;
    b.grads.down.packed = ddown;
    /* An old caller knows no gradients: it gets dx alone. */
    CHECK_EQ(mok_backward(w, ABI_DRESS(&room, b, mok_backward_args, drouter_weights), NULL), MOK_OK);
    mok_stats stats = MOK_INIT(mok_stats), *their_stats = ABI_DRESS(&room, stats, mok_stats, rows_pulled);
    CHECK_EQ(mok_get_stats(w, their_stats), MOK_OK);
    CHECK_EQ(their_stats->rows, 2 * ABI_TOKENS);
    if (caller->cut)
        CHECK_EQ(((unsigned char *)their_stats)[offsetof(mok_stats, rows_pulled)], 0xa5);
    mok_schedule_info info = MOK_INIT(mok_schedule_info), *their_info = ABI_DRESS(&room, info, mok_schedule_info, wgrad_pieces);
    CHECK_EQ(mok_schedule_query(w, schedule, their_info), MOK_OK);
    CHECK_EQ(their_info->rows, ABI_TOKENS);
    mok_workspace_destroy(w);
    mok_group_destroy(group);
    free(schedule);
    free(context);
    if (test_failures != before)
        printf("  … as %s; the last sentence is \"%s\"\n", caller->name, mok_last_error());
}

static uint16_t abi_out[3][ABI_TOKENS * ABI_H], abi_dx[3][ABI_TOKENS * ABI_H], abi_ddown[3][ABI_E * ABI_I * ABI_H];

TEST(old_present_and_future_callers_get_the_same)
{
    static const abi_caller callers[3] = {{"a present caller", 0, 0}, {"an old caller", 1, 0}, {"a future caller that asks for nothing new", 0, 48}};
    for (int i = 0; i < 3; i++) {
        memset(abi_ddown[i], 0xff, sizeof abi_ddown[i]);
        abi_run(&callers[i], abi_out[i], abi_dx[i], abi_ddown[i]);
        CHECK_BYTES(abi_out[i], abi_out[0], sizeof abi_out[0]);
        CHECK_BYTES(abi_dx[i], abi_dx[0], sizeof abi_dx[0]);
    }
    CHECK(abi_ddown[0][0] != 0xffff);
    CHECK_EQ(abi_ddown[1][0], 0xffff);
    CHECK_BYTES(abi_ddown[2], abi_ddown[0], sizeof abi_ddown[0]);
    int zeros = 0;
    for (int i = 0; i < ABI_TOKENS * ABI_H; i++)
        zeros += abi_out[0][i] == 0;
    CHECK(zeros < ABI_TOKENS * ABI_H / 4); /* a layer was run */
}

/* A future caller that does ask for something new is refused, for every struct that goes in. */
TEST(a_future_caller_is_refused_what_is_unknown)
{
    abi_caller future = {"a future caller", 0, 48}, *caller = &future;
    abi_room room;
    mok_group *group = NULL;
    mok_workspace *w = NULL;
    mok_plan plan = MOK_INIT(mok_plan);
    mok_config c = MOK_INIT(mok_config);
    c.hidden = c.intermediate = 64;
    c.num_experts = c.topk = c.max_tokens = 1;
    REQUIRE(mok_group_create_local(1, NULL, &group) == MOK_OK);
    REQUIRE(mok_workspace_create(group, &c, &w) == MOK_OK);
#define ABI_REFUSED(type, value, call)                                                   \
    do {                                                                                 \
        type *a = (type *)abi_dress(&room, &(value), sizeof(type), sizeof(type), caller);  \
        ((unsigned char *)a)[sizeof(type) + 40] = 1;                                     \
        CHECK_EQ(call, MOK_E_UNSUPPORTED);                                               \
        CHECK_STR(mok_last_error(), #type " has ");                                      \
    } while (0)
    mok_provider provider = MOK_INIT(mok_provider);
    mok_bootstrap bootstrap = MOK_INIT(mok_bootstrap);
    mok_schedule_args s = MOK_INIT(mok_schedule_args);
    mok_forward_args f = MOK_INIT(mok_forward_args);
    mok_backward_args b = MOK_INIT(mok_backward_args);
    mok_workspace *none = NULL;
    mok_group *nobody = NULL;
    ABI_REFUSED(mok_config, c, mok_workspace_create(group, a, &none));
    ABI_REFUSED(mok_config, c, mok_plan_query(a, 1, 0, 0, 0, 0, &plan, NULL, NULL));
    ABI_REFUSED(mok_provider, provider, mok_group_create(a, 0, 1, &nobody));
    ABI_REFUSED(mok_bootstrap, bootstrap, mok_group_create_processes(a, 0, 1, &nobody));
    ABI_REFUSED(mok_schedule_args, s, mok_schedule(w, a, NULL));
    ABI_REFUSED(mok_forward_args, f, mok_forward(w, a, NULL));
    ABI_REFUSED(mok_forward_args, f, mok_recompute(w, a, NULL));
    ABI_REFUSED(mok_backward_args, b, mok_backward(w, a, NULL));
    CHECK(none == NULL && nobody == NULL);
    mok_workspace_destroy(w);
    mok_group_destroy(group);
}
#endif
