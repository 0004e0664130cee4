/* The experimental part of mok.h. */
#define MOK_EXPERIMENTAL
#include <stdlib.h>

#include "backend/backend.h"
#include "base/error.h"
#include "cpu/gemm.h"

mok_status mok_cpu_gemm(int64_t M, int64_t N, int64_t K, const void *a_bf16, const void *b_bf16, float *c)
{
    const int64_t most = 1 << 20;
    if (M < 0 || N < 0 || K < 0 || M > most || N > most || K > most)
        return mk_fail(MOK_E_ARG, "M is %lld, N is %lld, K is %lld: each must be from 0 to %lld", (long long)M, (long long)N, (long long)K,
                       (long long)most);
    if ((!a_bf16 && M && K) || (!b_bf16 && N && K) || (!c && M && N))
        return mk_fail(MOK_E_ARG, "%s is NULL", !c && M && N ? "c" : !a_bf16 && M && K ? "a_bf16" : "b_bf16");
    void *scratch = malloc(mk_gemm_scratch_bytes());
    if (!scratch)
        return mk_fail(MOK_E_MEMORY, "no memory for %zu bytes of scratch", mk_gemm_scratch_bytes());
    mk_gemm_bf16(M, N, K, (mk_gemm_operand){a_bf16, K, 1}, (mk_gemm_operand){b_bf16, K, 1}, c, N, false, scratch);
    free(scratch);
    return MOK_OK;
}

static mok_status check_stage_times(const mok_workspace *w)
{
    MK_TRY(mk_check_workspace(w));
    if (!w->backend->stage_times_start)
        return mk_fail(MOK_E_UNSUPPORTED, "backend %s has no stage times: backend cuda has", w->backend->name);
    return MOK_OK;
}

mok_status mok_stage_times_start(mok_workspace *w)
{
    MK_TRY(check_stage_times(w));
    return w->backend->stage_times_start(w);
}

mok_status mok_stage_times_read(mok_workspace *w, mok_stage_time *times, int32_t *count)
{
    MK_TRY(check_stage_times(w));
    if (!times || !count)
        return mk_fail(MOK_E_ARG, "%s is NULL", times ? "count" : "times");
    return w->backend->stage_times_read(w, times, count);
}

mok_status mok_link_move(mok_workspace *w, const mok_link_args *a, void *stream, mok_link_result *result)
{
    const int32_t all = MOK_LINK_PULL | MOK_LINK_PUSH | MOK_LINK_PLAIN | MOK_LINK_SIGNAL | MOK_LINK_EMPTY | MOK_LINK_MX;
    if (!w || !a || !result || !a->schedule)
        return mk_fail(MOK_E_ARG, "%s is NULL", !w ? "workspace" : !a ? "args" : !result ? "result" : "schedule");
    if (!w->backend->link_move)
        return mk_fail(MOK_E_UNSUPPORTED, "backend %s has no link to measure: backend cuda has", w->backend->name);
    if (!(a->work & (MOK_LINK_PULL | MOK_LINK_PUSH)) || (a->work & ~all) || ((a->work & (MOK_LINK_SIGNAL | MOK_LINK_EMPTY)) && !(a->work & MOK_LINK_PLAIN)) ||
        ((a->work & MOK_LINK_EMPTY) && !(a->work & MOK_LINK_SIGNAL)))
        return mk_fail(MOK_E_ARG, "work is %d: it needs MOK_LINK_PULL, MOK_LINK_PUSH or both; MOK_LINK_SIGNAL goes with MOK_LINK_PLAIN, MOK_LINK_EMPTY with both", a->work);
    if ((a->work & MOK_LINK_MX) && (a->work & ~MOK_LINK_MX) != MOK_LINK_PULL)
        return mk_fail(MOK_E_ARG, "work is %d: MOK_LINK_MX goes with MOK_LINK_PULL alone: only rows of x travel in MXFP8", a->work);
    if (a->blocks < 0 || a->blocks > 65535)
        return mk_fail(MOK_E_ARG, "blocks is %d, but must be from 0 to 65535", a->blocks);
    if (w->broken)
        return mk_fail(MOK_E_STATE, "the workspace is broken: an earlier call of it failed");
    return w->backend->link_move(w, a, stream, result);
}
