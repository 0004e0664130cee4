#include "cuda/host/vmm.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"

const char *mk_handle_kind_name(mk_handle_kind kind)
{
    return kind == MK_HANDLE_FD ? "file descriptor" : kind == MK_HANDLE_FABRIC ? "fabric handle" : "no handle";
}

static mk_cu_allocation allocation_of(const mk_cuda_device *d, mk_handle_kind kind)
{
    mk_cu_allocation a;
    memset(&a, 0, sizeof a);
    a.type = MK_CU_ALLOCATION_PINNED;
    a.handle_types = (int)kind;
    a.location = (mk_cu_location){MK_CU_LOCATION_DEVICE, d->ordinal};
    return a;
}

static mok_status attribute_must_hold(const mk_cuda_device *d, int attribute, const char *what)
{
    mk_cu_device number;
    int value = 0;
    MK_CUDA_TRY(d->api->cuDeviceGet(&number, d->ordinal), "opening device %d", d->ordinal);
    MK_CUDA_TRY(d->api->cuDeviceGetAttribute(&value, attribute, number), "asking device %d for %s", d->ordinal, what);
    return value ? MOK_OK : mk_fail(MOK_E_ENV, "device %d (%s) does not offer %s", d->ordinal, d->name, what);
}

mok_status mk_vmm_offers(const mk_cuda_device *d, mk_handle_kind kind)
{
    MK_TRY(attribute_must_hold(d, MK_CU_VMM_SUPPORTED, "virtual memory management"));
    if (kind == MK_HANDLE_FABRIC)
        return attribute_must_hold(d, MK_CU_HANDLE_FABRIC_SUPPORTED, "fabric handles");
    return attribute_must_hold(d, MK_CU_HANDLE_FD_SUPPORTED, "file-descriptor handles");
}

static mok_status round_up_bytes(const mk_cuda_device *d, size_t bytes, mk_handle_kind kind, size_t *rounded)
{
    size_t grain = 0;
    mk_cu_allocation a = allocation_of(d, kind);
    MK_CUDA_TRY(d->api->cuMemGetAllocationGranularity(&grain, &a, MK_CU_GRANULARITY_RECOMMENDED), "asking device %d for its allocation granularity", d->ordinal);
    grain = grain ? grain : 1;
    *rounded = ((bytes ? bytes : 1) + grain - 1) / grain * grain;
    return MOK_OK;
}

/* Address range for v->handle, readable and writable from this device. */
static mok_status map(const mk_cuda_device *d, mk_vmm *v)
{
    mk_cu_access access = {{MK_CU_LOCATION_DEVICE, d->ordinal}, MK_CU_ACCESS_READ_WRITE};
    MK_CUDA_TRY(d->api->cuMemAddressReserve(&v->address, v->bytes, 0, 0, 0), "reserving %zu bytes of address space on device %d", v->bytes, d->ordinal);
    MK_CUDA_TRY(d->api->cuMemMap(v->address, v->bytes, 0, v->handle, 0), "mapping %zu bytes on device %d", v->bytes, d->ordinal);
    v->mapped = true;
    MK_CUDA_TRY(d->api->cuMemSetAccess(v->address, v->bytes, &access, 1), "giving device %d access to %zu bytes", d->ordinal, v->bytes);
    return MOK_OK;
}

static mok_status create(const mk_cuda_device *d, mk_handle_kind kind, mk_vmm *v, mk_shareable *share)
{
    mk_cu_allocation a = allocation_of(d, kind);
    void *where = kind == MK_HANDLE_FABRIC ? (void *)share->fabric : (void *)&share->fd;
    MK_CUDA_TRY(d->api->cuMemCreate(&v->handle, v->bytes, &a, 0), "allocating %zu bytes on device %d that can be shared by %s", v->bytes, d->ordinal,
                mk_handle_kind_name(kind));
    v->has_handle = true;
    MK_TRY(map(d, v));
    MK_CUDA_TRY(d->api->cuMemsetD8(v->address, 0, v->bytes), "clearing %zu bytes on device %d", v->bytes, d->ordinal);
    MK_CUDA_TRY(d->api->cuMemExportToShareableHandle(where, v->handle, (int)kind, 0), "exporting memory of device %d as a %s", d->ordinal, mk_handle_kind_name(kind));
    return MOK_OK;
}

mok_status mk_vmm_create(const mk_cuda_device *d, size_t bytes, mk_handle_kind kind, mk_vmm *made, mk_shareable *share)
{
    mk_vmm v;
    memset(&v, 0, sizeof v);
    *share = (mk_shareable){.kind = kind, .fd = -1};
    MK_TRY(mk_vmm_offers(d, kind));
    MK_TRY(round_up_bytes(d, bytes, kind, &v.bytes));
    mok_status status = create(d, kind, &v, share);
    if (status == MOK_OK)
        *made = v;
    else
        mk_vmm_free(d, &v);
    return status;
}

mok_status mk_vmm_import(const mk_cuda_device *d, size_t bytes, const mk_shareable *share, mk_vmm *made)
{
    mk_vmm v;
    memset(&v, 0, sizeof v);
    void *from = share->kind == MK_HANDLE_FABRIC ? (void *)(uintptr_t)share->fabric : (void *)(intptr_t)share->fd;
    MK_TRY(round_up_bytes(d, bytes, share->kind, &v.bytes));
    mk_cu_result result = d->api->cuMemImportFromShareableHandle(&v.handle, from, (int)share->kind);
    if (result != MK_CU_SUCCESS)
        return mk_cuda_fail(result, "importing a %s on device %d", mk_handle_kind_name(share->kind), d->ordinal);
    v.has_handle = true;
    mok_status status = map(d, &v);
    if (status == MOK_OK)
        *made = v;
    else
        mk_vmm_free(d, &v);
    return status;
}

void mk_vmm_free(const mk_cuda_device *d, mk_vmm *v)
{
    if (v->mapped)
        d->api->cuMemUnmap(v->address, v->bytes);
    if (v->address)
        d->api->cuMemAddressFree(v->address, v->bytes);
    if (v->has_handle)
        d->api->cuMemRelease(v->handle);
    memset(v, 0, sizeof *v);
}
