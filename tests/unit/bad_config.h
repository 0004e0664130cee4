/* Every field of mok_config wrong in every way it can be: used against mok_plan_query and mok_workspace_create. Each entry changes one
 * thing in a good configuration (good_config) and names the status and words of the sentence. */
#ifndef MOK_TEST_BAD_CONFIG_H
#define MOK_TEST_BAD_CONFIG_H
#include "mok.h"

#include <math.h>

static inline mok_config good_config(void)
{
    mok_config c = MOK_INIT(mok_config);
    c.hidden = 128;
    c.intermediate = 192;
    c.shared_intermediate = 64;
    c.num_experts = 6;
    c.topk = 2;
    c.max_tokens = 40;
    c.backend = MOK_BACKEND_CPU;
    c.cpu_threads = 1;
    c.timeout_ms = 30000;
    return c;
}

/* X(what to do to c, status, words of the sentence) */
#define BAD_CONFIG_LIST(X)                                                                                                     \
    X(c->struct_size = 0, MOK_E_ARG, "mok_config.struct_size is 0")                                                            \
    X(c->struct_size = 7, MOK_E_ARG, "mok_config.struct_size is 7")                                                            \
    X(c->struct_size = 65537, MOK_E_ARG, "mok_config.struct_size is 65537")                                                    \
    X(c->api_version = 0, MOK_E_ARG, "mok_config.api_version is 0")                                                            \
    X(c->api_version = MOK_API_VERSION + 1, MOK_E_ARG, "mok_config.api_version is 2")                                          \
    X(c->hidden = 0, MOK_E_ARG, "hidden is 0: it must be from 64 to 1048576")                                                  \
    X(c->hidden = -64, MOK_E_ARG, "hidden is -64")                                                                             \
    X(c->hidden = 96, MOK_E_SHAPE, "hidden is 96: it must be a multiple of 64")                                                \
    X(c->hidden = (1 << 20) + 64, MOK_E_ARG, "hidden is 1048640")                                                              \
    X(c->hidden = INT64_MAX, MOK_E_ARG, "hidden is 9223372036854775807")                                                       \
    X(c->intermediate = 0, MOK_E_ARG, "intermediate is 0")                                                                     \
    X(c->intermediate = 65, MOK_E_SHAPE, "intermediate is 65: it must be a multiple of 64")                                    \
    X(c->intermediate = INT64_MIN, MOK_E_ARG, "intermediate is -9223372036854775808")                                          \
    X(c->shared_intermediate = -64, MOK_E_ARG, "shared_intermediate is -64")                                                   \
    X(c->shared_intermediate = 1, MOK_E_SHAPE, "shared_intermediate is 1: it must be a multiple of 64")                        \
    X(c->routed_hidden = 64, MOK_E_UNSUPPORTED, "routed_hidden is 64")                                                         \
    X(c->routed_hidden = -1, MOK_E_UNSUPPORTED, "routed_hidden is -1")                                                         \
    X(c->num_experts = 0, MOK_E_ARG, "num_experts is 0")                                                                       \
    X(c->num_experts = -3, MOK_E_ARG, "num_experts is -3")                                                                     \
    X(c->num_experts = 1 << 21, MOK_E_ARG, "num_experts is 2097152")                                                           \
    X(c->topk = 0, MOK_E_ARG, "topk is 0: it must be from 1 to 64")                                                            \
    X(c->topk = 65, MOK_E_ARG, "topk is 65: it must be from 1 to 64")                                                          \
    X(c->topk = 7, MOK_E_SHAPE, "topk 7 is larger than num_experts 6")                                                         \
    X(c->max_tokens = 0, MOK_E_ARG, "max_tokens is 0")                                                                         \
    X(c->max_tokens = -5, MOK_E_ARG, "max_tokens is -5")                                                                       \
    X(c->max_tokens = INT64_MAX, MOK_E_ARG, "max_tokens is 9223372036854775807")                                               \
    X(c->max_tokens = INT32_MAX - 200, MOK_E_SHAPE, "max_tokens 2147483447")                                                   \
    X(c->dtype = (mok_dtype)4, MOK_E_ARG, "dtype is 4")                                                                        \
    X(c->dtype = MOK_FP32, MOK_E_ARG, "dtype is MOK_FP32")                                                                     \
    X(c->mx_wgrad_bf16 = true, MOK_E_ARG, "mx_wgrad_bf16 is set, but dtype is not MOK_MXFP8")                                  \
    X(c->mx_wide_given = true, MOK_E_ARG, "mx_wide_given is set, but dtype is not MOK_MXFP8")                                  \
    X(c->router_dtype = MOK_MXFP8, MOK_E_ARG, "router_dtype is 3")                                                             \
    X(c->activation = MOK_ACT_GPT_OSS, MOK_E_UNSUPPORTED, "activation 1 is not implemented yet")                               \
    X(c->activation = (mok_activation)2, MOK_E_ARG, "activation is 2")                                                         \
    X(c->swiglu_limit = -1, MOK_E_ARG, "swiglu_limit is -1")                                                                   \
    X(c->swiglu_limit = (float)NAN, MOK_E_ARG, "swiglu_limit is ")                                                             \
    X(c->swiglu_limit = (float)INFINITY, MOK_E_ARG, "swiglu_limit is inf")                                                     \
    X(c->gate_up = (mok_gate_up)3, MOK_E_ARG, "gate_up is 3")                                                                  \
    X(c->weight_layout = (mok_weight_layout)2, MOK_E_ARG, "weight_layout is 2")                                                \
    X((c->shared_gate = true, c->shared_intermediate = 0), MOK_E_SHAPE, "shared_gate is set, but shared_intermediate is 0")    \
    X(c->expert_bias = true, MOK_E_UNSUPPORTED, "expert_bias is not implemented yet")                                          \
    X(c->ring_rows = -1, MOK_E_ARG, "ring_rows is -1")                                                                         \
    X(c->ring_rows = (int64_t)1 << 31, MOK_E_ARG, "ring_rows is 2147483648")                                                   \
    X((c->ring_rows = 300, c->minibatch_rows = 256), MOK_E_SHAPE, "ring_rows 384 is smaller than two minibatches (256 rows forward") \
    X((c->ring_rows = 256, c->minibatch_rows_bwd = 129), MOK_E_SHAPE, "ring_rows 256 is smaller than two minibatches (")       \
    X(c->minibatch_rows = -1, MOK_E_ARG, "minibatch_rows is -1")                                                               \
    X(c->minibatch_rows = (1 << 20) + 1, MOK_E_ARG, "minibatch_rows is 1048577")                                               \
    X(c->minibatch_rows_bwd = -128, MOK_E_ARG, "minibatch_rows_bwd is -128")                                                   \
    X(c->save = (mok_save)5, MOK_E_ARG, "save is 5")                                                                           \
    X(c->save_rows = 128, MOK_E_ARG, "save_rows is 128, but save is not MOK_SAVE_ROWS")                                        \
    X((c->save = MOK_SAVE_ROWS, c->save_rows = -1), MOK_E_ARG, "save_rows is -1")                                              \
    X(c->save_x = true, MOK_E_UNSUPPORTED, "save_x is not implemented yet")                                                    \
    X(c->comm_sms = -1, MOK_E_ARG, "comm_sms is -1")                                                                           \
    X(c->comm_sms_bwd = 1025, MOK_E_ARG, "comm_sms_bwd is 1025")                                                               \
    X(c->reserve_sms = -2, MOK_E_ARG, "reserve_sms is -2")                                                                     \
    X(c->backend = (mok_backend_id)3, MOK_E_ARG, "backend is 3")                                                               \
    X(c->cpu_threads = -1, MOK_E_ARG, "cpu_threads is -1")                                                                     \
    X(c->cpu_threads = 1025, MOK_E_ARG, "cpu_threads is 1025")                                                                 \
    X(c->timeout_ms = -1, MOK_E_ARG, "timeout_ms is -1")                                                                       \
    X(c->yield_us = -2, MOK_E_ARG, "yield_us is -2")                                                                           \
    X(c->yield_us = 1000001, MOK_E_ARG, "yield_us is 1000001")                                                                 \
    X((c->hidden = 1 << 20, c->max_tokens = 1 << 25), MOK_E_SHAPE, "max_tokens 33554432 x ")

typedef struct bad_config {
    const char *what;
    mok_status status;
    const char *words;
} bad_config;

/* Spoils a good configuration in the index-th way; false past the last. */
static inline bool bad_config_at(int index, mok_config *c, bad_config *bad)
{
    int i = 0;
    *c = good_config();
#define BAD_CONFIG_TRY(what, status, words)            \
    if (i++ == index) {                                \
        what;                                          \
        *bad = (bad_config){#what, status, words};     \
        return true;                                   \
    }
    BAD_CONFIG_LIST(BAD_CONFIG_TRY)
#undef BAD_CONFIG_TRY
    return false;
}
#endif
