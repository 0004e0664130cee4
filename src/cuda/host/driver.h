/* The CUDA driver, found at run time: MoK never links CUDA and includes no CUDA header, so the same libmok.so runs where there is none.
 *
 * In:  libcuda.so.1, if the machine has it.
 * Out: one table of function pointers, and sentences for what the driver refuses.
 * The few types and numbers of the driver's interface that we need are declared here (tests/cuda/test_driver_abi.c compares
 * them with cuda.h). Plain C, valid C++. Handles are the driver's: pointers may be passed to it and taken from it as they are. */
#ifndef MK_CUDA_DRIVER_H
#define MK_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "mok.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int mk_cu_result;           /* CUresult */
typedef int mk_cu_device;           /* CUdevice */
typedef unsigned long long mk_cu_pointer; /* CUdeviceptr */
typedef struct mk_cu_context_tag *mk_cu_context;
typedef struct mk_cu_module_tag *mk_cu_module;
typedef struct mk_cu_function_tag *mk_cu_function;
typedef struct mk_cu_stream_tag *mk_cu_stream;
typedef struct mk_cu_event_tag *mk_cu_event;
typedef struct mk_cu_uuid { char bytes[16]; } mk_cu_uuid;

enum { /* CUresult */
    MK_CU_SUCCESS = 0, MK_CU_INVALID_VALUE = 1, MK_CU_OUT_OF_MEMORY = 2, MK_CU_NO_DEVICE = 100, MK_CU_INVALID_DEVICE = 101,
    MK_CU_INVALID_CONTEXT = 201, MK_CU_NO_BINARY_FOR_GPU = 209, MK_CU_PEER_ACCESS_UNSUPPORTED = 217, MK_CU_NOT_FOUND = 500,
    MK_CU_NOT_READY = 600, MK_CU_ILLEGAL_ADDRESS = 700, MK_CU_PEER_ACCESS_ALREADY_ENABLED = 704, MK_CU_TOO_MANY_PEERS = 711,
    MK_CU_NOT_PERMITTED = 800, MK_CU_NOT_SUPPORTED = 801, MK_CU_SYSTEM_DRIVER_MISMATCH = 803, MK_CU_COMPAT_NOT_SUPPORTED_ON_DEVICE = 804,
    MK_CU_CAPTURE_UNSUPPORTED = 900, MK_CU_CAPTURED_EVENT = 907
};
enum { /* CUdevice_attribute */
    MK_CU_NUM_SMS = 16, MK_CU_COMPUTE_MODE = 20, MK_CU_CC_MAJOR = 75, MK_CU_CC_MINOR = 76, MK_CU_VMM_SUPPORTED = 102, MK_CU_HANDLE_FD_SUPPORTED = 103,
    MK_CU_HANDLE_FABRIC_SUPPORTED = 128
};
enum { /* CUfunction_attribute */ MK_CU_FUNCTION_MAX_THREADS = 0, MK_CU_FUNCTION_NUM_REGS = 4, MK_CU_FUNCTION_MAX_DYNAMIC_SHARED = 8 };
enum { /* CUpointer_attribute, CUmemorytype */ MK_CU_POINTER_MEMORY_TYPE = 2, MK_CU_POINTER_DEVICE_ORDINAL = 9, MK_CU_MEMORY_DEVICE = 2 };
enum { /* CUlaunchAttributeID */ MK_CU_LAUNCH_CLUSTER_DIMENSION = 4 };
enum { MK_CU_EVENT_DEFAULT = 0, MK_CU_EVENT_DISABLE_TIMING = 2, MK_CU_HOST_PORTABLE = 1, MK_CU_HOST_DEVICEMAP = 2 };

enum { /* virtual memory: CUmemAllocationType, CUmemLocationType, CUmemAllocationGranularity_flags, CUmemAccess_flags */
    MK_CU_ALLOCATION_PINNED = 1, MK_CU_LOCATION_DEVICE = 1, MK_CU_GRANULARITY_RECOMMENDED = 1, MK_CU_ACCESS_READ_WRITE = 3
};

typedef struct mk_cu_location { int type, id; } mk_cu_location; /* CUmemLocation */
typedef struct mk_cu_allocation { /* CUmemAllocationProp */
    int type, handle_types;
    mk_cu_location location;
    void *windows;
    unsigned char flags[8];
} mk_cu_allocation;
typedef struct mk_cu_access { mk_cu_location location; int flags; } mk_cu_access; /* CUmemAccessDesc */

typedef struct mk_cu_launch_attribute { /* CUlaunchAttribute */
    int id;
    char pad[4];
    union { unsigned cluster[3]; char pad[64]; } value;
} mk_cu_launch_attribute;

typedef struct mk_cu_launch { /* CUlaunchConfig */
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    mk_cu_stream stream;
    mk_cu_launch_attribute *attributes;
    unsigned num_attributes;
} mk_cu_launch;

/* X(field, exported symbol, parameters): the symbols carry the suffix of the version whose parameters these are. */
#define MK_CUDA_FUNCTIONS(X)                                                                                                    \
    X(cuInit, "cuInit", (unsigned flags))                                                                                       \
    X(cuDriverGetVersion, "cuDriverGetVersion", (int *version))                                                                 \
    X(cuGetErrorName, "cuGetErrorName", (mk_cu_result result, const char **name))                                               \
    X(cuGetErrorString, "cuGetErrorString", (mk_cu_result result, const char **text))                                           \
    X(cuDeviceGetCount, "cuDeviceGetCount", (int *count))                                                                       \
    X(cuDeviceGet, "cuDeviceGet", (mk_cu_device *device, int ordinal))                                                          \
    X(cuDeviceGetName, "cuDeviceGetName", (char *name, int bytes, mk_cu_device device))                                         \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, mk_cu_device device))                           \
    X(cuDeviceGetUuid, "cuDeviceGetUuid_v2", (mk_cu_uuid *uuid, mk_cu_device device))                                           \
    X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *bytes, mk_cu_device device))                                            \
    X(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", (int *can, mk_cu_device device, mk_cu_device peer))                       \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (mk_cu_context *context, mk_cu_device device))                      \
    X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (mk_cu_device device))                                         \
    X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (mk_cu_context context))                                                         \
    X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (mk_cu_context *context))                                                          \
    X(cuCtxGetDevice, "cuCtxGetDevice", (mk_cu_device *device))                                                                 \
    X(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", (mk_cu_context peer, unsigned flags))                                     \
    X(cuCtxSynchronize, "cuCtxSynchronize", (void))                                                                             \
    X(cuMemAlloc, "cuMemAlloc_v2", (mk_cu_pointer *memory, size_t bytes))                                                       \
    X(cuMemFree, "cuMemFree_v2", (mk_cu_pointer memory))                                                                        \
    X(cuMemGetInfo, "cuMemGetInfo_v2", (size_t *free_bytes, size_t *total))                                                     \
    X(cuMemcpy, "cuMemcpy", (mk_cu_pointer to, mk_cu_pointer from, size_t bytes))                                               \
    X(cuMemcpyHtoD, "cuMemcpyHtoD_v2", (mk_cu_pointer to, const void *from, size_t bytes))                                      \
    X(cuMemcpyDtoH, "cuMemcpyDtoH_v2", (void *to, mk_cu_pointer from, size_t bytes))                                            \
    X(cuMemsetD8, "cuMemsetD8_v2", (mk_cu_pointer memory, unsigned char value, size_t bytes))                                   \
    X(cuMemsetD32Async, "cuMemsetD32Async", (mk_cu_pointer memory, unsigned value, size_t words, mk_cu_stream stream))          \
    X(cuMemHostAlloc, "cuMemHostAlloc", (void **memory, size_t bytes, unsigned flags))                                          \
    X(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", (mk_cu_pointer *device, void *host, unsigned flags))           \
    X(cuMemFreeHost, "cuMemFreeHost", (void *memory))                                                                           \
    X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity", (size_t *bytes, const mk_cu_allocation *allocation, int option)) \
    X(cuMemCreate, "cuMemCreate", (unsigned long long *handle, size_t bytes, const mk_cu_allocation *allocation, unsigned long long flags)) \
    X(cuMemRelease, "cuMemRelease", (unsigned long long handle))                                                                \
    X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", (void *to, unsigned long long handle, int type, unsigned long long flags)) \
    X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", (unsigned long long *handle, void *from, int type))     \
    X(cuMemAddressReserve, "cuMemAddressReserve", (mk_cu_pointer *address, size_t bytes, size_t align, mk_cu_pointer wish, unsigned long long flags)) \
    X(cuMemAddressFree, "cuMemAddressFree", (mk_cu_pointer address, size_t bytes))                                              \
    X(cuMemMap, "cuMemMap", (mk_cu_pointer address, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags)) \
    X(cuMemUnmap, "cuMemUnmap", (mk_cu_pointer address, size_t bytes))                                                          \
    X(cuMemSetAccess, "cuMemSetAccess", (mk_cu_pointer address, size_t bytes, const mk_cu_access *access, size_t count))        \
    X(cuPointerGetAttributes, "cuPointerGetAttributes", (unsigned count, int *attributes, void **values, mk_cu_pointer memory)) \
    X(cuModuleLoadData, "cuModuleLoadData", (mk_cu_module *module, const void *image))                                          \
    X(cuModuleUnload, "cuModuleUnload", (mk_cu_module module))                                                                  \
    X(cuModuleGetFunction, "cuModuleGetFunction", (mk_cu_function *function, mk_cu_module module, const char *name))            \
    X(cuFuncSetAttribute, "cuFuncSetAttribute", (mk_cu_function function, int attribute, int value))                            \
    X(cuFuncGetAttribute, "cuFuncGetAttribute", (int *value, int attribute, mk_cu_function function))                           \
    X(cuOccupancyMaxActiveClusters, "cuOccupancyMaxActiveClusters", (int *clusters, mk_cu_function function, const mk_cu_launch *launch)) \
    X(cuLaunchKernelEx, "cuLaunchKernelEx", (const mk_cu_launch *launch, mk_cu_function function, void **params, void **extra)) \
    X(cuStreamIsCapturing, "cuStreamIsCapturing", (mk_cu_stream stream, int *status))                                           \
    X(cuStreamWaitEvent, "cuStreamWaitEvent", (mk_cu_stream stream, mk_cu_event event, unsigned flags))                         \
    X(cuEventCreate, "cuEventCreate", (mk_cu_event *event, unsigned flags))                                                     \
    X(cuEventDestroy, "cuEventDestroy_v2", (mk_cu_event event))                                                                 \
    X(cuEventRecord, "cuEventRecord", (mk_cu_event event, mk_cu_stream stream))                                                 \
    X(cuEventSynchronize, "cuEventSynchronize", (mk_cu_event event))                                                            \
    X(cuEventQuery, "cuEventQuery", (mk_cu_event event))                                                                        \
    X(cuEventElapsedTime, "cuEventElapsedTime", (float *ms, mk_cu_event from, mk_cu_event to))                                   \
    X(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                                                         \
      (void *map, int type, uint32_t rank, void *address, const uint64_t *dim, const uint64_t *stride_bytes, const uint32_t *box, \
       const uint32_t *element_stride, int interleave, int swizzle, int l2_promotion, int oob_fill))

typedef struct mk_cuda_driver {
#define MK_CUDA_FIELD(field, symbol, parameters) mk_cu_result (*field) parameters;
    MK_CUDA_FUNCTIONS(MK_CUDA_FIELD)
#undef MK_CUDA_FIELD
} mk_cuda_driver;

/* The driver, opened and initialised once per process; thread-safe. MOK_E_ENV and why there is none. */
mok_status mk_cuda_driver_get(const mk_cuda_driver **api);

/* Fills a table from a library. False: `why` says what is missing. */
bool mk_cuda_driver_load(const char *library, mk_cuda_driver *table, char *why, size_t bytes);

/* For tests and the emulator: this table is the driver from now on; NULL: the real one again. Nothing of ours may be alive. */
void mk_cuda_driver_inject(const mk_cuda_driver *table);

/* Writes "<what was attempted>: CUDA_ERROR_… (the driver's words)" and returns the status that says who must act. */
mok_status mk_cuda_fail(mk_cu_result result, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* One driver call, and the sentence if it fails: MK_CUDA_TRY(api->cuMemAlloc(&p, n), "allocating %zu bytes", n); */
#define MK_CUDA_TRY(call, ...)                                \
    do {                                                      \
        mk_cu_result mk_cuda_result = (call);                 \
        if (mk_cuda_result != MK_CU_SUCCESS)                  \
            return mk_cuda_fail(mk_cuda_result, __VA_ARGS__); \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
