#include <string.h>

#include "backend/backend.h"
#include "base/error.h"

static const mk_backend *const backends[] = {&mk_backend_cpu};

int32_t mk_backend_count(void) { return (int32_t)(sizeof backends / sizeof *backends); }
const mk_backend *mk_backend_at(int32_t index) { return index >= 0 && index < mk_backend_count() ? backends[index] : NULL; }

mok_status mk_backend_choose(const mok_group *group, mok_backend_id wish, const mk_backend **backend)
{
    (void)group;
    if (wish == MOK_BACKEND_CUDA)
        return mk_fail(MOK_E_UNSUPPORTED, "backend cuda is not built into this library: use MOK_BACKEND_CPU or MOK_BACKEND_AUTO");
    *backend = &mk_backend_cpu;
    return MOK_OK;
}

mok_status mok_backend_query(int32_t index, mok_backend_info *out)
{
    mok_backend_info info;
    const mk_backend *backend = mk_backend_at(index);
    if (!backend)
        return mk_fail(MOK_E_ARG, "backend index %d: there are %d backends", index, mk_backend_count());
    memset(&info, 0, sizeof info);
    info.id = backend->id;
    strncpy(info.name, backend->name, sizeof info.name - 1);
    backend->probe(&info);
    return mk_write_struct("mok_backend_info", &info, sizeof info, out);
}
