/* GPUs of this process: primary contexts, kept while somebody uses them, with their loaded kernels.
 *
 * The primary context is the one that the CUDA runtime and PyTorch use, so that pointers and streams are shared with the caller. Every
 * public entry makes it current (mk_cuda_enter) and restores what the caller had (mk_cuda_leave). */
#ifndef MK_CUDA_DEVICE_H
#define MK_CUDA_DEVICE_H

#include "cuda/host/driver.h"
#include "cuda/host/kernels.h"

typedef struct mk_cuda_device {
    const mk_cuda_driver *api;
    int32_t ordinal;            /* as in the driver, and in the runtime */
    int32_t users;              /* group handles */
    int32_t num_sms;
    bool blackwell;             /* compute capability 10: other tiles (maps.c), clusters that leave (call.c) */
    mk_cu_context context;
    mk_cuda_kernels kernels;    /* loaded by the first workspace */
    mk_cu_uuid uuid;
    char name[64];
} mk_cuda_device;

/* Retains the device's primary context. MOK_E_ARG: no such device; MOK_E_ENV: no driver, or an architecture without kernels. */
mok_status mk_cuda_device_open(int32_t ordinal, mk_cuda_device **device);
void mk_cuda_device_close(mk_cuda_device *device);
/* One more user of an open device. */
void mk_cuda_device_share(mk_cuda_device *device);
/* The device of the context that is current in this thread. */
mok_status mk_cuda_device_current(int32_t *ordinal);

/* Loads the kernels once per device; later calls find them. Thread-safe. */
mok_status mk_cuda_device_load(mk_cuda_device *device);

mok_status mk_cuda_enter(const mk_cuda_device *device);
void mk_cuda_leave(const mk_cuda_device *device);

/* Makes all devices of the list reach each other's memory. MOK_E_ENV names every pair that cannot. */
mok_status mk_cuda_connect(mk_cuda_device *const *devices, int32_t count);

/* Fills usable, detail and num_devices. */
void mk_cuda_probe(mok_backend_info *info);

#endif
