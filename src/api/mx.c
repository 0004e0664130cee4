/* MXFP8 outside a layer: weights are quantised once per version by whoever owns them. */
#include <string.h>

#include "backend/backend.h"
#include "base/error.h"

static const int64_t largest = (int64_t)1 << 40;

int64_t mok_mx_scale_bytes(int64_t rows, int64_t cols)
{
    bool legal = rows >= 0 && cols >= 0 && rows <= largest && cols <= largest && rows % MK_MX_BLOCK == 0 && cols % MK_MX_BLOCK == 0;
    return legal ? mk_mx_scale_bytes(rows, cols) : 0;
}

static mok_status check_size(const char *name, int64_t size)
{
    if (size < 0 || size > largest || size % MK_MX_BLOCK)
        return mk_fail(MOK_E_SHAPE, "%s is %lld: it must be a multiple of %d from 0 to %lld", name, (long long)size, MK_MX_BLOCK, (long long)largest);
    return MOK_OK;
}

static mok_status check_pair(const char *name, const void *elements, const char *scales_name, const void *scales)
{
    return !elements == !scales ? MOK_OK
                                : mk_fail(MOK_E_ARG, "%s is given, but %s is NULL: a quantisation is both", elements ? name : scales_name,
                                          elements ? scales_name : name);
}

static mok_status check(const mok_mx_quantise_args *a)
{
    MK_TRY(check_size("rows", a->rows));
    MK_TRY(check_size("cols", a->cols));
    if (a->count < 0 || (a->rows && a->cols && a->count > largest / a->rows / a->cols))
        return mk_fail(MOK_E_SHAPE, "count is %lld, for matrices of %lld x %lld: at most %lld elements", (long long)a->count, (long long)a->rows,
                       (long long)a->cols, (long long)largest);
    MK_TRY(check_pair("data", a->data, "scales", a->scales));
    MK_TRY(check_pair("transposed", a->transposed, "transposed_scales", a->transposed_scales));
    return a->source || a->count == 0 || a->rows == 0 || a->cols == 0 ? MOK_OK : mk_fail(MOK_E_ARG, "source is NULL");
}

mok_status mok_mx_quantise(const mok_mx_quantise_args *args, void *stream)
{
    mok_mx_quantise_args a;
    MK_TRY(mk_read_struct("mok_mx_quantise_args", args, &a, sizeof a));
    MK_TRY(check(&a));
    for (int32_t i = 0; i < mk_backend_count(); i++) {
        const mk_backend *backend = mk_backend_at(i);
        if (backend->id == (a.backend ? a.backend : MOK_BACKEND_CPU))
            return backend->mx_quantise ? backend->mx_quantise(&a, stream)
                                        : mk_fail(MOK_E_UNSUPPORTED, "backend %s does not quantise to MXFP8 yet: use backend cpu", backend->name);
    }
    return mk_fail(MOK_E_ARG, "backend is %d: it must be from %d to %d", (int)a.backend, MOK_BACKEND_AUTO, MOK_BACKEND_CUDA);
}
