/* Device memory that other processes map: CUDA virtual memory, shared by file descriptor (one machine) or fabric handle (one NVLink domain). Never
 * multicast. */
#ifndef MK_CUDA_VMM_H
#define MK_CUDA_VMM_H

#include "cuda/host/device.h"

typedef enum mk_handle_kind { MK_HANDLE_NONE = 0, MK_HANDLE_FD = 1, MK_HANDLE_FABRIC = 8 } mk_handle_kind; /* as CUmemAllocationHandleType */

/* How an allocation goes to another process. fd: to be sent along and closed, -1 with a fabric handle. */
typedef struct mk_shareable {
    mk_handle_kind kind;
    int fd;
    unsigned char fabric[64];
} mk_shareable;

/* A mapping, own or a peer's. */
typedef struct mk_vmm {
    mk_cu_pointer address;
    size_t bytes;                  /* rounded up to the granularity */
    unsigned long long handle;
    bool has_handle, mapped;
} mk_vmm;

/* Does the device offer this kind? MOK_E_ENV and the reason. Whether it works shows only mk_vmm_create. */
mok_status mk_vmm_offers(const mk_cuda_device *device, mk_handle_kind kind);
/* All with the device's context current. Zeroed memory of this device, mapped, and its handle for others. On failure nothing is left. */
mok_status mk_vmm_create(const mk_cuda_device *device, size_t bytes, mk_handle_kind kind, mk_vmm *made, mk_shareable *share);
/* A peer's memory of the same size. Closes nothing. */
mok_status mk_vmm_import(const mk_cuda_device *device, size_t bytes, const mk_shareable *share, mk_vmm *made);
void mk_vmm_free(const mk_cuda_device *device, mk_vmm *vmm);

const char *mk_handle_kind_name(mk_handle_kind kind);

#endif
