/* A CUDA driver without GPUs, for tests of the host code: device memory is host memory, kernels do not run but are written into a log, and
 * every call can be made to fail. Thread-safe. Include it in one file per program.
 *
 *   fake_reset(4);                       4 devices of compute capability 9.0 that all reach each other, an empty log
 *   fake.no_peer[0][3] = true; …         a machine with faults
 *   fake.fail_at = 17;                   the 17th call from now on returns fake.fail_with
 *   fake.on_launch = f;                  stands in for the device
 */
#ifndef MOK_FAKE_DRIVER_H
#define MOK_FAKE_DRIVER_H

#include "cuda/host/driver.h"
#include "cuda/host/kernels.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { FAKE_DEVICES = 16, FAKE_LOG = 8192, FAKE_SMS = 132, FAKE_CLUSTERS = 66, FAKE_MAPS = 64, FAKE_STACK = 8 };

typedef struct fake_launch {
    const char *name;
    int rank;
    unsigned grid, block, cluster, shared;
    mk_cu_stream stream;
    int32_t operation, status;      /* mok_call_begin */
    int32_t step, ticket, is_shared;
    int64_t tiles_or_cols;          /* num_cols of a GEMM */
    const void *out, *context;
} fake_launch;

typedef struct fake_map { uint64_t dim[3], stride[2]; uint32_t box[3], rank; const void *address; } fake_map;

typedef struct fake_block { struct fake_block *next; char *memory; size_t bytes; int device; bool pinned; } fake_block;

typedef struct fake_state {
    pthread_mutex_t lock;
    int num_devices, init_result;
    int cc_major[FAKE_DEVICES], cc_minor[FAKE_DEVICES];
    bool no_peer[FAKE_DEVICES][FAKE_DEVICES];
    bool peer_enabled[FAKE_DEVICES][FAKE_DEVICES];
    size_t memory_limit;            /* of all devices together; 0: none */
    long calls, fail_at;            /* calls so far; the one that fails, 0: none */
    const char *fail_name;          /* or: every call of this function */
    int fail_with;
    const char *failed;             /* which it was */
    bool failed_unheard;            /* and it failed under fake_nobody_listens */
    int compute_mode;
    bool no_vmm, no_fd_handles, fabric_handles; /* fabric_handles: offered, and cuMemCreate refuses them, as without an IMEX channel */
    long live_handles, live_ranges;             /* of virtual memory */
    bool capturing, busy;
    void (*on_launch)(const char *name, const void *params);
    /* What is alive. */
    fake_block *blocks;
    long live_blocks, live_events, live_modules, live_contexts;
    size_t live_bytes;
    /* What happened. */
    fake_launch log[FAKE_LOG];
    int launches;
    int event_records, event_waits, context_syncs, event_syncs, memsets;
    fake_map maps[FAKE_MAPS];
    int num_maps;
    long pushes, pops;
} fake_state;

static fake_state fake = {.lock = PTHREAD_MUTEX_INITIALIZER};
static char fake_contexts[FAKE_DEVICES];
static char fake_functions[MK_NUM_CUDA_KERNELS];
static _Thread_local int fake_stack[FAKE_STACK], fake_depth;
static _Thread_local bool fake_nobody_listens; /* set by a test around what cannot return an error */

/* Counts the call; true: it fails. Under the lock until fake_leave. */
static bool fake_enter(const char *name)
{
    pthread_mutex_lock(&fake.lock);
    fake.calls++;
    if (fake.calls != fake.fail_at && !(fake.fail_name && !strcmp(fake.fail_name, name)))
        return false;
    fake.failed = name;
    fake.failed_unheard = fake_nobody_listens;
    return true;
}
static mk_cu_result fake_leave(mk_cu_result result)
{
    pthread_mutex_unlock(&fake.lock);
    return result;
}
#define FAKE_BEGIN(name)    \
    if (fake_enter(#name))  \
        return fake_leave(fake.fail_with)

static fake_block *fake_find(const void *p)
{
    for (fake_block *b = fake.blocks; b; b = b->next)
        if ((const char *)p >= b->memory && (const char *)p < b->memory + b->bytes)
            return b;
    return NULL;
}

static int fake_current(void) { return fake_depth ? fake_stack[fake_depth - 1] : -1; }

static mk_cu_result fake_new_block(void **memory, size_t bytes, bool pinned)
{
    fake_block *b = calloc(1, sizeof *b);
    if (fake_current() < 0)
        return free(b), MK_CU_INVALID_CONTEXT;
    if (!pinned && fake.memory_limit && fake.live_bytes + bytes > fake.memory_limit)
        return free(b), MK_CU_OUT_OF_MEMORY;
    if (!b || posix_memalign((void **)&b->memory, 256, bytes ? bytes : 1))
        return free(b), MK_CU_OUT_OF_MEMORY;
    memset(b->memory, 0xa5, bytes);
    b->bytes = bytes ? bytes : 1;
    b->device = fake_current();
    b->pinned = pinned;
    b->next = fake.blocks;
    fake.blocks = b;
    fake.live_blocks++;
    fake.live_bytes += bytes;
    *memory = b->memory;
    return MK_CU_SUCCESS;
}

static mk_cu_result fake_free_block(void *memory)
{
    for (fake_block **at = &fake.blocks; *at; at = &(*at)->next)
        if ((*at)->memory == memory) {
            fake_block *b = *at;
            *at = b->next;
            fake.live_blocks--;
            fake.live_bytes -= b->bytes;
            free(b->memory);
            free(b);
            return MK_CU_SUCCESS;
        }
    return MK_CU_INVALID_VALUE;
}

/* --- the driver's functions ------------------------------------------------------------------------------------------- */
static mk_cu_result fake_cuInit(unsigned flags) { (void)flags; return MK_CU_SUCCESS; }
static mk_cu_result fake_cuDriverGetVersion(int *version) { *version = 13000; return MK_CU_SUCCESS; }
static mk_cu_result fake_cuGetErrorName(mk_cu_result result, const char **name)
{
    *name = result == MK_CU_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
    return MK_CU_SUCCESS;
}
static mk_cu_result fake_cuGetErrorString(mk_cu_result result, const char **text)
{
    *text = result == MK_CU_OUT_OF_MEMORY ? "out of memory" : "made up by a test";
    return MK_CU_SUCCESS;
}
static mk_cu_result fake_cuDeviceGetCount(int *count) { FAKE_BEGIN(cuDeviceGetCount); *count = fake.num_devices; return fake_leave(0); }
static mk_cu_result fake_cuDeviceGet(mk_cu_device *device, int ordinal) { FAKE_BEGIN(cuDeviceGet); *device = 100 + ordinal; return fake_leave(0); }
static mk_cu_result fake_cuDeviceGetName(char *name, int bytes, mk_cu_device device)
{
    FAKE_BEGIN(cuDeviceGetName);
    snprintf(name, (size_t)bytes, "Fake H%d", device);
    return fake_leave(0);
}
static mk_cu_result fake_cuDeviceGetAttribute(int *value, int attribute, mk_cu_device device)
{
    FAKE_BEGIN(cuDeviceGetAttribute);
    switch (attribute) {
    case MK_CU_CC_MAJOR: *value = fake.cc_major[device - 100]; break;
    case MK_CU_CC_MINOR: *value = fake.cc_minor[device - 100]; break;
    case MK_CU_COMPUTE_MODE: *value = fake.compute_mode; break;
    case MK_CU_VMM_SUPPORTED: *value = !fake.no_vmm; break;
    case MK_CU_HANDLE_FD_SUPPORTED: *value = !fake.no_fd_handles; break;
    case MK_CU_HANDLE_FABRIC_SUPPORTED: *value = fake.fabric_handles; break;
    default: *value = FAKE_SMS;
    }
    return fake_leave(0);
}
static mk_cu_result fake_cuDeviceGetUuid(mk_cu_uuid *uuid, mk_cu_device device)
{
    FAKE_BEGIN(cuDeviceGetUuid);
    memset(uuid, device, sizeof *uuid);
    return fake_leave(0);
}
static mk_cu_result fake_cuDeviceTotalMem(size_t *bytes, mk_cu_device device)
{
    (void)device;
    FAKE_BEGIN(cuDeviceTotalMem);
    *bytes = (size_t)139 << 30;
    return fake_leave(0);
}
static mk_cu_result fake_cuDeviceCanAccessPeer(int *can, mk_cu_device device, mk_cu_device peer)
{
    FAKE_BEGIN(cuDeviceCanAccessPeer);
    *can = !fake.no_peer[device - 100][peer - 100];
    return fake_leave(0);
}
static mk_cu_result fake_cuDevicePrimaryCtxRetain(mk_cu_context *context, mk_cu_device device)
{
    FAKE_BEGIN(cuDevicePrimaryCtxRetain);
    *context = (mk_cu_context)(void *)&fake_contexts[device - 100];
    fake.live_contexts++;
    return fake_leave(0);
}
static mk_cu_result fake_cuDevicePrimaryCtxRelease(mk_cu_device device)
{
    (void)device;
    pthread_mutex_lock(&fake.lock);
    fake.live_contexts--;
    return fake_leave(0);
}
/* Never fails: without a context nothing can be given back, and the driver fails here only after its end. */
static mk_cu_result fake_cuCtxPushCurrent(mk_cu_context context)
{
    pthread_mutex_lock(&fake.lock);
    fake.pushes++;
    if (fake_depth < FAKE_STACK)
        fake_stack[fake_depth++] = (int)((char *)context - fake_contexts);
    return fake_leave(0);
}
static mk_cu_result fake_cuCtxPopCurrent(mk_cu_context *context)
{
    pthread_mutex_lock(&fake.lock);
    fake.pops++;
    if (fake_depth > 0)
        *context = (mk_cu_context)(void *)&fake_contexts[fake_stack[--fake_depth]];
    return fake_leave(0);
}
static mk_cu_result fake_cuCtxGetDevice(mk_cu_device *device)
{
    FAKE_BEGIN(cuCtxGetDevice);
    *device = 100 + fake_current();
    return fake_leave(fake_current() < 0 ? MK_CU_INVALID_CONTEXT : MK_CU_SUCCESS);
}
static mk_cu_result fake_cuCtxEnablePeerAccess(mk_cu_context peer, unsigned flags)
{
    (void)flags;
    FAKE_BEGIN(cuCtxEnablePeerAccess);
    bool *enabled = &fake.peer_enabled[fake_current()][(char *)peer - fake_contexts];
    mk_cu_result result = *enabled ? MK_CU_PEER_ACCESS_ALREADY_ENABLED : MK_CU_SUCCESS;
    *enabled = true;
    return fake_leave(result);
}
static mk_cu_result fake_cuCtxSynchronize(void) { FAKE_BEGIN(cuCtxSynchronize); fake.context_syncs++; return fake_leave(0); }
static mk_cu_result fake_cuMemAlloc(mk_cu_pointer *memory, size_t bytes)
{
    void *p = NULL;
    FAKE_BEGIN(cuMemAlloc);
    mk_cu_result result = fake_new_block(&p, bytes, false);
    *memory = (mk_cu_pointer)(uintptr_t)p;
    return fake_leave(result);
}
static mk_cu_result fake_cuMemFree(mk_cu_pointer memory)
{
    pthread_mutex_lock(&fake.lock);
    return fake_leave(fake_free_block((void *)(uintptr_t)memory));
}

/* --- virtual memory: a handle is a memfd, so that it works between processes, as the real ones do ---------------------------- */
enum { FAKE_GRAIN = 65536 };
static mk_cu_result fake_cuMemGetAllocationGranularity(size_t *bytes, const mk_cu_allocation *allocation, int option)
{
    FAKE_BEGIN(cuMemGetAllocationGranularity);
    *bytes = FAKE_GRAIN;
    return fake_leave(allocation->type == MK_CU_ALLOCATION_PINNED && option == MK_CU_GRANULARITY_RECOMMENDED ? 0 : MK_CU_INVALID_VALUE);
}
static mk_cu_result fake_cuMemCreate(unsigned long long *handle, size_t bytes, const mk_cu_allocation *allocation, unsigned long long flags)
{
    FAKE_BEGIN(cuMemCreate);
    if (flags || bytes % FAKE_GRAIN || fake_current() < 0)
        return fake_leave(MK_CU_INVALID_VALUE);
    if (allocation->handle_types != 1)
        return fake_leave(MK_CU_NOT_PERMITTED);
    int fd = (int)syscall(SYS_memfd_create, "mok heap of a fake device", 0u);
    if (fd < 0 || ftruncate(fd, (off_t)bytes))
        return fake_leave(MK_CU_OUT_OF_MEMORY);
    fake.live_handles++;
    *handle = (unsigned long long)fd;
    return fake_leave(0);
}
static mk_cu_result fake_cuMemRelease(unsigned long long handle)
{
    FAKE_BEGIN(cuMemRelease);
    fake.live_handles--;
    return fake_leave(close((int)handle) ? MK_CU_INVALID_VALUE : 0);
}
static mk_cu_result fake_cuMemExportToShareableHandle(void *to, unsigned long long handle, int type, unsigned long long flags)
{
    FAKE_BEGIN(cuMemExportToShareableHandle);
    *(int *)to = type == 1 && !flags ? dup((int)handle) : -1;
    return fake_leave(*(int *)to < 0 ? MK_CU_INVALID_VALUE : 0);
}
static mk_cu_result fake_cuMemImportFromShareableHandle(unsigned long long *handle, void *from, int type)
{
    FAKE_BEGIN(cuMemImportFromShareableHandle);
    int fd = type == 1 ? dup((int)(intptr_t)from) : -1;
    *handle = (unsigned long long)fd;
    fake.live_handles += fd >= 0;
    return fake_leave(fd < 0 ? MK_CU_INVALID_VALUE : 0);
}
static mk_cu_result fake_cuMemAddressReserve(mk_cu_pointer *address, size_t bytes, size_t align, mk_cu_pointer wish, unsigned long long flags)
{
    (void)align;
    FAKE_BEGIN(cuMemAddressReserve);
    void *p = wish || flags ? MAP_FAILED : mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *address = (mk_cu_pointer)(uintptr_t)p;
    fake.live_ranges += p != MAP_FAILED;
    return fake_leave(p == MAP_FAILED ? MK_CU_OUT_OF_MEMORY : 0);
}
static mk_cu_result fake_cuMemAddressFree(mk_cu_pointer address, size_t bytes)
{
    FAKE_BEGIN(cuMemAddressFree);
    fake.live_ranges--;
    return fake_leave(munmap((void *)(uintptr_t)address, bytes) ? MK_CU_INVALID_VALUE : 0);
}
static mk_cu_result fake_cuMemMap(mk_cu_pointer address, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags)
{
    FAKE_BEGIN(cuMemMap);
    void *p = offset || flags ? MAP_FAILED : mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, 0);
    return fake_leave(p == MAP_FAILED ? MK_CU_INVALID_VALUE : 0);
}
static mk_cu_result fake_cuMemUnmap(mk_cu_pointer address, size_t bytes)
{
    FAKE_BEGIN(cuMemUnmap);
    void *p = mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return fake_leave(p == MAP_FAILED ? MK_CU_INVALID_VALUE : 0);
}
static mk_cu_result fake_cuMemSetAccess(mk_cu_pointer address, size_t bytes, const mk_cu_access *access, size_t count)
{
    FAKE_BEGIN(cuMemSetAccess);
    bool all = count == 1 && access->flags == MK_CU_ACCESS_READ_WRITE && access->location.type == MK_CU_LOCATION_DEVICE;
    return fake_leave(!all || mprotect((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE) ? MK_CU_INVALID_VALUE : 0);
}

static mk_cu_result fake_cuMemGetInfo(size_t *left, size_t *total)
{
    FAKE_BEGIN(cuMemGetInfo);
    *total = fake.memory_limit;
    *left = fake.memory_limit - fake.live_bytes;
    return fake_leave(0);
}
static mk_cu_result fake_copy(void *to, const void *from, size_t bytes)
{
    if (fake_current() < 0)
        return fake_leave(MK_CU_INVALID_CONTEXT);
    memcpy(to, from, bytes);
    return fake_leave(0);
}
static mk_cu_result fake_cuMemcpy(mk_cu_pointer to, mk_cu_pointer from, size_t bytes)
{
    FAKE_BEGIN(cuMemcpy);
    return fake_copy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
}
static mk_cu_result fake_cuMemcpyHtoD(mk_cu_pointer to, const void *from, size_t bytes)
{
    FAKE_BEGIN(cuMemcpyHtoD);
    return fake_copy((void *)(uintptr_t)to, from, bytes);
}
static mk_cu_result fake_cuMemcpyDtoH(void *to, mk_cu_pointer from, size_t bytes)
{
    FAKE_BEGIN(cuMemcpyDtoH);
    return fake_copy(to, (const void *)(uintptr_t)from, bytes);
}
static mk_cu_result fake_cuMemsetD8(mk_cu_pointer memory, unsigned char value, size_t bytes)
{
    FAKE_BEGIN(cuMemsetD8);
    memset((void *)(uintptr_t)memory, value, bytes);
    return fake_leave(0);
}
static mk_cu_result fake_cuMemsetD32Async(mk_cu_pointer memory, unsigned value, size_t words, mk_cu_stream stream)
{
    (void)stream;
    FAKE_BEGIN(cuMemsetD32Async);
    fake.memsets++;
    for (size_t i = 0; i < words; i++)
        ((uint32_t *)(uintptr_t)memory)[i] = value;
    return fake_leave(0);
}
static mk_cu_result fake_cuMemHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    (void)flags;
    FAKE_BEGIN(cuMemHostAlloc);
    return fake_leave(fake_new_block(memory, bytes, true));
}
static mk_cu_result fake_cuMemHostGetDevicePointer(mk_cu_pointer *device, void *host, unsigned flags)
{
    (void)flags;
    FAKE_BEGIN(cuMemHostGetDevicePointer);
    *device = (mk_cu_pointer)(uintptr_t)host;
    return fake_leave(0);
}
static mk_cu_result fake_cuMemFreeHost(void *memory)
{
    pthread_mutex_lock(&fake.lock);
    return fake_leave(fake_free_block(memory));
}
static mk_cu_result fake_cuPointerGetAttributes(unsigned count, int *attributes, void **values, mk_cu_pointer memory)
{
    (void)count;
    (void)attributes;
    FAKE_BEGIN(cuPointerGetAttributes);
    const fake_block *b = fake_find((const void *)(uintptr_t)memory);
    *(unsigned *)values[0] = !b ? 0 : b->pinned ? 1 : MK_CU_MEMORY_DEVICE;
    *(int *)values[1] = b ? b->device : -2;
    return fake_leave(0);
}
static mk_cu_result fake_cuModuleLoadData(mk_cu_module *module, const void *image)
{
    FAKE_BEGIN(cuModuleLoadData);
    *module = (mk_cu_module)(uintptr_t)image;
    fake.live_modules++;
    return fake_leave(0);
}
static mk_cu_result fake_cuModuleUnload(mk_cu_module module)
{
    (void)module;
    pthread_mutex_lock(&fake.lock);
    fake.live_modules--;
    return fake_leave(0);
}
static mk_cu_result fake_cuModuleGetFunction(mk_cu_function *function, mk_cu_module module, const char *name)
{
    (void)module;
    FAKE_BEGIN(cuModuleGetFunction);
    for (int i = 0; i < MK_NUM_CUDA_KERNELS; i++)
        if (!strcmp(name, mk_cuda_kernel_shapes[i].name)) {
            *function = (mk_cu_function)(void *)&fake_functions[i];
            return fake_leave(0);
        }
    return fake_leave(MK_CU_NOT_FOUND);
}
static mk_cu_result fake_cuFuncSetAttribute(mk_cu_function f, int attribute, int value)
{
    (void)f; (void)attribute; (void)value;
    FAKE_BEGIN(cuFuncSetAttribute);
    return fake_leave(0);
}
static mk_cu_result fake_cuFuncGetAttribute(int *value, int attribute, mk_cu_function f)
{
    (void)f;
    FAKE_BEGIN(cuFuncGetAttribute);
    *value = attribute == MK_CU_FUNCTION_MAX_THREADS ? 1024 : 168;
    return fake_leave(0);
}
static mk_cu_result fake_cuOccupancyMaxActiveClusters(int *clusters, mk_cu_function f, const mk_cu_launch *launch)
{
    (void)f; (void)launch;
    FAKE_BEGIN(cuOccupancyMaxActiveClusters);
    *clusters = FAKE_CLUSTERS;
    return fake_leave(0);
}

static fake_launch fake_describe(int kernel, const void *params)
{
    fake_launch l = {.name = mk_cuda_kernel_shapes[kernel].name};
    if (!strncmp(l.name, "mok_mx_", 7)) /* those know no ranks; all others begin with the rank */
        return l;
    if (kernel == MK_CUDA_mok_call_begin || kernel == MK_CUDA_mok_call_check) {
        const mk_open_params *p = (const mk_open_params *)params;
        l.rank = p->rank.dims.rank;
        l.operation = p->operation;
        l.status = p->status;
    } else if (kernel == MK_CUDA_mok_s1_dispatch) {
        const mk_dispatch_params *p = (const mk_dispatch_params *)params;
        l.rank = p->rank.dims.rank;
        l.step = p->step;
        l.ticket = p->ticket;
    } else if (strstr(l.name, "_wide") || strstr(l.name, "_narrow")) {
        const mk_gemm_params *p = (const mk_gemm_params *)params;
        l.rank = p->rank.dims.rank;
        l.step = p->step;
        l.ticket = p->ticket;
        l.is_shared = p->shared;
        l.tiles_or_cols = p->num_cols;
        l.context = p->context;
    } else if (strstr(l.name, "fused")) {
        l.rank = ((const mk_forward_params *)params)->rank.dims.rank;
        l.context = ((const mk_forward_params *)params)->context;
    } else {
        l.rank = ((const mk_rank_params *)params)->dims.rank;
        if (kernel == MK_CUDA_mok_s5_combine) {
            l.out = ((const mk_combine_params *)params)->out;
            l.context = ((const mk_combine_params *)params)->context;
        }
    }
    return l;
}

static mk_cu_result fake_cuLaunchKernelEx(const mk_cu_launch *launch, mk_cu_function function, void **params, void **extra)
{
    (void)extra;
    FAKE_BEGIN(cuLaunchKernelEx);
    fake_launch l = fake_describe((int)((char *)function - fake_functions), params[0]);
    l.grid = launch->grid_x;
    l.block = launch->block_x;
    l.shared = launch->shared_bytes;
    l.cluster = launch->num_attributes ? launch->attributes[0].value.cluster[0] : 1;
    l.stream = launch->stream;
    if (fake.launches < FAKE_LOG)
        fake.log[fake.launches++] = l;
    if (fake.on_launch)
        fake.on_launch(l.name, params[0]);
    return fake_leave(fake_current() < 0 ? MK_CU_INVALID_CONTEXT : l.grid % l.cluster ? MK_CU_INVALID_VALUE : MK_CU_SUCCESS);
}
static mk_cu_result fake_cuStreamIsCapturing(mk_cu_stream stream, int *status)
{
    (void)stream;
    FAKE_BEGIN(cuStreamIsCapturing);
    *status = fake.capturing;
    return fake_leave(0);
}
static mk_cu_result fake_cuStreamWaitEvent(mk_cu_stream stream, mk_cu_event event, unsigned flags)
{
    (void)stream; (void)event; (void)flags;
    FAKE_BEGIN(cuStreamWaitEvent);
    fake.event_waits++;
    return fake_leave(0);
}
static mk_cu_result fake_cuEventCreate(mk_cu_event *event, unsigned flags)
{
    (void)flags;
    FAKE_BEGIN(cuEventCreate);
    *event = (mk_cu_event)malloc(1); /* so that a leak of one shows under ASan */
    fake.live_events++;
    return fake_leave(0);
}
static mk_cu_result fake_cuEventDestroy(mk_cu_event event)
{
    pthread_mutex_lock(&fake.lock);
    free((void *)event);
    fake.live_events--;
    return fake_leave(0);
}
static mk_cu_result fake_cuEventRecord(mk_cu_event event, mk_cu_stream stream)
{
    (void)event; (void)stream;
    FAKE_BEGIN(cuEventRecord);
    fake.event_records++;
    return fake_leave(0);
}
static mk_cu_result fake_cuEventSynchronize(mk_cu_event event) { (void)event; FAKE_BEGIN(cuEventSynchronize); fake.event_syncs++; return fake_leave(0); }
static mk_cu_result fake_cuEventQuery(mk_cu_event event) { (void)event; FAKE_BEGIN(cuEventQuery); return fake_leave(fake.busy ? MK_CU_NOT_READY : 0); }
static mk_cu_result fake_cuEventElapsedTime(float *ms, mk_cu_event from, mk_cu_event to)
{
    (void)from; (void)to;
    FAKE_BEGIN(cuEventElapsedTime);
    *ms = 1;
    return fake_leave(0);
}

/* What the real one refuses is refused here too. */
static mk_cu_result fake_cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *dim, const uint64_t *stride_bytes,
                                                const uint32_t *box, const uint32_t *element_stride, int interleave, int swizzle, int l2_promotion, int oob_fill)
{
    (void)type; (void)element_stride; (void)interleave; (void)swizzle; (void)l2_promotion; (void)oob_fill;
    FAKE_BEGIN(cuTensorMapEncodeTiled);
    fake_map *m = &fake.maps[fake.num_maps++ % FAKE_MAPS];
    memset(m, 0, sizeof *m);
    m->address = address;
    m->rank = rank;
    if ((uintptr_t)map % 64 || (uintptr_t)address % 16)
        return fake_leave(MK_CU_INVALID_VALUE);
    for (uint32_t i = 0; i < rank; i++) {
        m->dim[i] = dim[i];
        m->box[i] = box[i];
        if (i + 1 < rank)
            m->stride[i] = stride_bytes[i];
        if (!dim[i] || !box[i] || box[i] > 256 || (i + 1 < rank && stride_bytes[i] % 16))
            return fake_leave(MK_CU_INVALID_VALUE);
    }
    memset(map, 0x5a, 128);
    return fake_leave(0);
}

static const mk_cuda_driver fake_driver = {
#define FAKE_ENTRY(field, symbol, parameters) .field = fake_##field,
    MK_CUDA_FUNCTIONS(FAKE_ENTRY)
#undef FAKE_ENTRY
};

/* A fresh machine; checks nothing. The library uses it from now on, with an image if it was built without. */
static void fake_reset(int num_devices)
{
    static const char image[16] = "not an image";
    fake_state fresh = {.lock = PTHREAD_MUTEX_INITIALIZER, .num_devices = num_devices, .fail_with = MK_CU_OUT_OF_MEMORY};
    for (int i = 0; i < FAKE_DEVICES; i++)
        fresh.cc_major[i] = 9;
    fake = fresh;
    mk_cuda_driver_inject(&fake_driver);
    mk_cuda_image_inject(image);
}

#endif
