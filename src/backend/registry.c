#include <string.h>

#include "backend/backend.h"
#include "base/error.h"
#include "cuda/host/driver.h"

static const mk_backend *const backends[] = {&mk_backend_cpu, &mk_backend_cuda};

int32_t mk_backend_count(void) { return (int32_t)(sizeof backends / sizeof *backends); }
const mk_backend *mk_backend_at(int32_t index) { return index >= 0 && index < mk_backend_count() ? backends[index] : NULL; }

static mok_status choose_cuda(mok_group *group, const mk_backend **backend)
{
    if (!group->device && group->transport == &mk_transport_local) {
        const mk_cuda_driver *api;
        MK_TRY(mk_cuda_driver_get(&api)); /* the better reason, if there is no driver at all */
        return mk_fail(MOK_E_ARG, "backend cuda: the group was made without devices: give mok_group_create_local one device number per rank");
    }
    MK_TRY(mk_group_use_current_device(group));
    *backend = &mk_backend_cuda;
    return MOK_OK;
}

mok_status mk_backend_choose(mok_group *group, mok_backend_id wish, const mk_backend **backend)
{
    if ((int)wish < MOK_BACKEND_AUTO || (int)wish > MOK_BACKEND_CUDA)
        return mk_fail(MOK_E_ARG, "backend is %d: it must be from %d to %d", (int)wish, MOK_BACKEND_AUTO, MOK_BACKEND_CUDA);
    bool on_devices = group->device && group->transport == &mk_transport_local;
    if (wish == MOK_BACKEND_CUDA || (wish == MOK_BACKEND_AUTO && (on_devices || group->chose_device)))
        return choose_cuda(group, backend);
    if (on_devices) /* its heaps are device memory */
        return mk_fail(MOK_E_ARG, "backend cpu: the group was made with devices: pass devices = NULL to mok_group_create_local");
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
