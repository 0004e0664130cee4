/* Groups on GPUs: which rank has which device, and memory there that all ranks of the process reach. */
#include <stdlib.h>

#include "base/error.h"
#include "cuda/host/device.h"
#include "peer/group.h"

static int32_t distinct_devices(mok_group *const *ranks, int32_t num_ranks, mk_cuda_device **devices)
{
    int32_t count = 0;
    for (int32_t r = 0; r < num_ranks; r++) {
        int32_t i = 0;
        while (i < count && devices[i] != ranks[r]->device)
            i++;
        if (i == count)
            devices[count++] = ranks[r]->device;
    }
    return count;
}

mok_status mk_group_use_devices(mok_group *const *ranks, const int32_t *devices, int32_t num_ranks)
{
    mk_cuda_device **distinct = calloc((size_t)num_ranks, sizeof *distinct);
    mok_status status = distinct ? MOK_OK : mk_fail(MOK_E_MEMORY, "no memory for a list of %d devices", num_ranks);
    for (int32_t r = 0; r < num_ranks && status == MOK_OK; r++)
        status = mk_cuda_device_open(devices[r], &ranks[r]->device);
    if (status == MOK_OK)
        status = mk_cuda_connect(distinct, distinct_devices(ranks, num_ranks, distinct));
    for (int32_t r = 0; r < num_ranks && status != MOK_OK; r++)
        mk_group_release_device(ranks[r]);
    free(distinct);
    return status;
}

mok_status mk_group_choose_device(mok_group *group, int32_t ordinal)
{
    group->chose_device = true;
    return mk_cuda_device_open(ordinal, &group->device);
}

mok_status mk_group_use_current_device(mok_group *group)
{
    int32_t ordinal;
    if (group->device)
        return MOK_OK;
    MK_TRY(mk_cuda_device_current(&ordinal));
    return mk_cuda_device_open(ordinal, &group->device);
}

struct mk_cuda_device *mk_group_share_device(const mok_group *group)
{
    if (group->device)
        mk_cuda_device_share(group->device);
    return group->device;
}

void mk_group_release_device(mok_group *group)
{
    mk_cuda_device_close(group->device);
    group->device = NULL;
}

void *mk_group_device_alloc(const mok_group *group, size_t bytes)
{
    const mk_cuda_device *d = group->device;
    mk_cu_pointer memory = 0;
    if (mk_cuda_enter(d) != MOK_OK)
        return NULL;
    if (d->api->cuMemAlloc(&memory, bytes ? bytes : 1) != MK_CU_SUCCESS) {
        memory = 0;
    } else if (d->api->cuMemsetD8(memory, 0, bytes) != MK_CU_SUCCESS) {
        d->api->cuMemFree(memory);
        memory = 0;
    }
    mk_cuda_leave(d);
    return (void *)(uintptr_t)memory;
}

void mk_group_device_free(const mok_group *group, void *memory)
{
    if (!memory || mk_cuda_enter(group->device) != MOK_OK)
        return;
    group->device->api->cuMemFree((mk_cu_pointer)(uintptr_t)memory);
    mk_cuda_leave(group->device);
}
