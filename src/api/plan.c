/* Plans: pure functions over layout/. */
#include <string.h>

#include "backend/backend.h"
#include "base/error.h"
#include "layout/check.h"

mok_status mok_expert_range(int64_t num_experts, int32_t num_ranks, int32_t rank, int64_t *first, int64_t *count)
{
    if (num_experts < 1 || num_experts > INT32_MAX || num_ranks < 1 || rank < 0 || rank >= num_ranks)
        return mk_fail(MOK_E_ARG, "rank %d of %d ranks, %lld experts: a rank must be from 0 to num_ranks - 1 and there must be an expert", rank,
                       num_ranks, (long long)num_experts);
    if (!first || !count)
        return mk_fail(MOK_E_ARG, "first and count must not be NULL");
    *first = mk_expert_first(num_experts, num_ranks, rank);
    *count = mk_expert_first(num_experts, num_ranks, rank + 1) - *first;
    return MOK_OK;
}

mok_status mok_timeout(int64_t timeout_ms, int64_t *ms)
{
    int64_t meant;
    if (!ms)
        return mk_fail(MOK_E_ARG, "ms is NULL");
    MK_TRY(mk_timeout("timeout_ms", timeout_ms, &meant));
    *ms = meant;
    return MOK_OK;
}

mok_status mok_plan_query(const mok_config *cfg, int32_t num_ranks, int32_t rank, int32_t num_sms, int32_t tile_rows, int32_t tile_cols,
                          mok_plan *plan, mok_buffer_info *buffers, int32_t *num_buffers)
{
    mok_config config;
    mk_dims dims;
    mk_memory memory;
    mok_buffer_info infos[MK_NUM_BUFFERS];
    mok_plan filled;
    MK_TRY(mk_read_struct("mok_config", cfg, &config, sizeof config));
    if (num_sms < 0 || tile_rows < 0 || tile_cols < 0 || num_sms > 4096 || tile_rows > 4096 || tile_cols > 4096)
        return mk_fail(MOK_E_ARG, "%d SMs, tiles of %d x %d: each must be from 0 to 4096", num_sms, tile_rows, tile_cols);
    if (buffers && !num_buffers)
        return mk_fail(MOK_E_ARG, "buffers is given, but num_buffers is NULL: it must say how many entries there is room for");
    mk_machine machine = mk_default_machine(config.backend);
    machine.num_sms = num_sms ? num_sms : machine.num_sms;
    machine.scaled = machine.num_sms > MK_HOPPER_SMS;
    machine.tile_rows = tile_rows ? tile_rows : machine.tile_rows;
    machine.tile_cols = tile_cols ? tile_cols : machine.tile_cols;
    MK_TRY(mk_resolve(&config, num_ranks, rank, machine, &dims));
    MK_TRY(mk_check_dims(&dims));
    mk_memory_map(&dims, &memory, infos);
    memset(&filled, 0, sizeof filled);
    mk_fill_plan(&config, &dims, &memory, machine, &filled);
    MK_TRY(mk_write_struct("mok_plan", &filled, sizeof filled, plan));
    for (int32_t i = 0; buffers && i < MK_NUM_BUFFERS && i < *num_buffers; i++)
        buffers[i] = infos[i];
    if (num_buffers)
        *num_buffers = MK_NUM_BUFFERS;
    return MOK_OK;
}
