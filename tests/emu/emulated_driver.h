/* A CUDA driver whose one GPU is the emulator: with it the whole library runs its kernels on a laptop, host code included. A launch runs to its
 * end before it returns, whatever its stream: a legal order for ranks that share a GPU, whose kernels never wait for each other.
 * Memory begins as NaN and counts as written. The image is this program: it includes every kernel's source. */
#ifndef MOK_EMULATED_DRIVER_H
#define MOK_EMULATED_DRIVER_H

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string.h>

#include "cuda/kernel/staged.cu"
#include "cuda/kernel/forward.cu"
#include "cuda/kernel/backward.cu"
#include "cuda/kernel/mx.cu"
#include "cuda/kernel/link.cu"
#include "emu/emu.h"

extern "C" {
#include "cuda/host/driver.h"
void mk_cuda_image_inject(const void *image);
}

namespace emulated {

struct Kernel { const char *name; std::function<void(emu::Device &, const emu::Launch &, const void *)> run; };

struct Gpu {
    std::recursive_mutex lock;
    std::unique_ptr<emu::Machine> machine;
    emu::Device *device = nullptr;
    std::map<uintptr_t, size_t> blocks;
    std::string trouble;       /* the first thing that the emulator found wrong */
    std::map<std::string, int> launches;
    std::function<void(const std::string &kernel, const void *params)> before_launch; /* a test's, to change memory between launches */
    long clock = 0;            /* ms, for events: every launch takes one */
    long live = 0;             /* blocks and events */
};
inline Gpu gpu;
inline thread_local int depth;

template <class Params> Kernel kernel(const char *name, void (*function)(const Params))
{
    return {name, [function](emu::Device &device, const emu::Launch &shape, const void *params) {
                auto copy = std::shared_ptr<Params>(new Params);
                memcpy(static_cast<void *>(copy.get()), params, sizeof(Params));
                device.launch(shape, [=] { function(*copy); });
            }};
}

inline const std::vector<Kernel> &kernels()
{
#define MK_EMULATED(name) kernel(#name, name)
    static const std::vector<Kernel> all = {
        MK_EMULATED(mok_weight_maps), MK_EMULATED(mok_call_begin), MK_EMULATED(mok_rank_barrier), MK_EMULATED(mok_call_check), MK_EMULATED(mok_s0_count),
        MK_EMULATED(mok_s0_scan), MK_EMULATED(mok_s0_segments), MK_EMULATED(mok_s0_place), MK_EMULATED(mok_s0_copies), MK_EMULATED(mok_s1_dispatch),
        MK_EMULATED(mok_s2_gate_up_wide), MK_EMULATED(mok_s2_gate_up_narrow), MK_EMULATED(mok_s4_down_wide), MK_EMULATED(mok_s4_down_narrow),
        MK_EMULATED(mok_forward_fused), MK_EMULATED(mok_s5_combine), MK_EMULATED(mok_shared_scale), MK_EMULATED(mok_backward_fused),
        MK_EMULATED(mok_s5_combine_bwd), MK_EMULATED(mok_mx_quantise_rows), MK_EMULATED(mok_mx_widen_rows), MK_EMULATED(mok_mx_quantise_matrix),
        MK_EMULATED(mok_mx_widen_matrix), MK_EMULATED(mok_mx_widen_weights), MK_EMULATED(mok_s1_dispatch_mx), MK_EMULATED(mok_s2_gate_up_wide_mx),
        MK_EMULATED(mok_s2_gate_up_narrow_mx), MK_EMULATED(mok_forward_fused_mx), MK_EMULATED(mok_backward_fused_mx),
        MK_EMULATED(mok_mx_quantise_turned), MK_EMULATED(mok_mx_take_part), MK_EMULATED(mok_s4_down_wide_mx), MK_EMULATED(mok_s4_down_narrow_mx), MK_EMULATED(mok_link_fill), MK_EMULATED(mok_link_move), MK_EMULATED(mok_link_move_mx),
        MK_EMULATED(mok_link_copy), MK_EMULATED(mok_link_check)};
#undef MK_EMULATED
    return all;
}

inline mk_cu_result allocate(void **memory, size_t bytes)
{
    std::lock_guard<std::recursive_mutex> hold(gpu.lock);
    void *p = gpu.machine->allocate(bytes, ("block " + std::to_string(gpu.blocks.size())).c_str());
    memset(p, 0xff, bytes);
    gpu.machine->set_written(p, bytes, true);
    gpu.blocks[(uintptr_t)p] = bytes;
    gpu.live++;
    *memory = p;
    return MK_CU_SUCCESS;
}

inline mk_cu_result release(void *memory)
{
    std::lock_guard<std::recursive_mutex> hold(gpu.lock);
    gpu.live -= (long)gpu.blocks.erase((uintptr_t)memory);
    gpu.machine->release(memory);
    return MK_CU_SUCCESS;
}

inline bool on_gpu(uintptr_t p)
{
    auto after = gpu.blocks.upper_bound(p);
    return after != gpu.blocks.begin() && p < std::prev(after)->first + std::prev(after)->second;
}

inline mk_cu_result copy(void *to, const void *from, size_t bytes)
{
    std::lock_guard<std::recursive_mutex> hold(gpu.lock);
    memcpy(to, from, bytes);
    if (on_gpu((uintptr_t)to))
        gpu.machine->set_written(to, bytes, true);
    return MK_CU_SUCCESS;
}

inline mk_cu_result launch(const mk_cu_launch *l, mk_cu_function function, void **params, void **)
{
    std::lock_guard<std::recursive_mutex> hold(gpu.lock);
    const Kernel &k = *reinterpret_cast<const Kernel *>(function);
    emu::Launch shape;
    shape.blocks = l->grid_x;
    shape.threads = l->block_x;
    shape.cluster = l->num_attributes ? l->attributes[0].value.cluster[0] : 1;
    shape.shared_bytes = l->shared_bytes;
    shape.name = k.name;
    if (!gpu.trouble.empty())
        return MK_CU_ILLEGAL_ADDRESS;
    gpu.launches[k.name]++;
    gpu.clock++;
    if (gpu.before_launch)
        gpu.before_launch(k.name, params[0]);
    k.run(*gpu.device, shape, params[0]);
    const emu::Result result = gpu.machine->run();
    if (!result.ok)
        gpu.trouble = std::string(k.name) + ": " + result.message;
    return result.ok ? MK_CU_SUCCESS : MK_CU_ILLEGAL_ADDRESS;
}

inline mk_cuda_driver table()
{
    mk_cuda_driver t;
    t.cuInit = [](unsigned) { return 0; };
    t.cuDriverGetVersion = [](int *v) { *v = 13000; return 0; };
    t.cuGetErrorName = [](int, const char **name) { *name = "CUDA_ERROR_EMULATED"; return 0; };
    t.cuGetErrorString = [](int, const char **text) { *text = gpu.trouble.c_str(); return 0; };
    t.cuDeviceGetCount = [](int *count) { *count = 1; return 0; };
    t.cuDeviceGet = [](int *device, int ordinal) { *device = ordinal; return 0; };
    t.cuDeviceGetName = [](char *name, int bytes, int) { snprintf(name, (size_t)bytes, "emulator"); return 0; };
#ifdef MK_SM100
    enum { CC_MAJOR = 10 };
#else
    enum { CC_MAJOR = 9 };
#endif
    t.cuDeviceGetAttribute = [](int *v, int what, int) { *v = what == MK_CU_CC_MAJOR ? CC_MAJOR : what == MK_CU_CC_MINOR ? 0 : 1; return 0; };
    t.cuDeviceGetUuid = [](mk_cu_uuid *uuid, int) { memset(uuid, 1, sizeof *uuid); return 0; };
    t.cuDeviceTotalMem = [](size_t *bytes, int) { *bytes = (size_t)1 << 34; return 0; };
    t.cuDeviceCanAccessPeer = [](int *can, int, int) { *can = 1; return 0; };
    t.cuDevicePrimaryCtxRetain = [](mk_cu_context *c, int) { *c = reinterpret_cast<mk_cu_context>(&gpu); return 0; };
    t.cuDevicePrimaryCtxRelease = [](int) { return 0; };
    t.cuCtxPushCurrent = [](mk_cu_context) { depth++; return 0; };
    t.cuCtxPopCurrent = [](mk_cu_context *) { depth--; return 0; };
    t.cuCtxGetDevice = [](int *device) { *device = 0; return depth ? 0 : (int)MK_CU_INVALID_CONTEXT; };
    t.cuCtxEnablePeerAccess = [](mk_cu_context, unsigned) { return 0; };
    t.cuCtxSynchronize = []() { return 0; };
    t.cuMemAlloc = [](mk_cu_pointer *p, size_t bytes) { void *m; int r = allocate(&m, bytes); *p = (uintptr_t)m; return r; };
    t.cuMemFree = [](mk_cu_pointer p) { return release((void *)(uintptr_t)p); };
    t.cuMemGetInfo = [](size_t *left, size_t *total) { *left = *total = 0; return 0; };
    t.cuMemcpy = [](mk_cu_pointer to, mk_cu_pointer from, size_t n) { return copy((void *)(uintptr_t)to, (void *)(uintptr_t)from, n); };
    t.cuMemcpyHtoD = [](mk_cu_pointer to, const void *from, size_t n) { return copy((void *)(uintptr_t)to, from, n); };
    t.cuMemcpyDtoH = [](void *to, mk_cu_pointer from, size_t n) { return copy(to, (void *)(uintptr_t)from, n); };
    t.cuMemsetD8 = [](mk_cu_pointer p, unsigned char v, size_t n) { memset((void *)(uintptr_t)p, v, n); return 0; };
    t.cuMemsetD32Async = [](mk_cu_pointer p, unsigned v, size_t n, mk_cu_stream) {
        for (size_t i = 0; i < n; i++)
            reinterpret_cast<uint32_t *>(p)[i] = v;
        return 0;
    };
    t.cuMemHostAlloc = [](void **p, size_t bytes, unsigned) { return allocate(p, bytes); };
    t.cuMemHostGetDevicePointer = [](mk_cu_pointer *d, void *h, unsigned) { *d = (uintptr_t)h; return 0; };
    t.cuMemFreeHost = [](void *p) { return release(p); };
    t.cuPointerGetAttributes = [](unsigned, int *, void **values, mk_cu_pointer p) {
        std::lock_guard<std::recursive_mutex> hold(gpu.lock);
        *static_cast<unsigned *>(values[0]) = on_gpu((uintptr_t)p) ? MK_CU_MEMORY_DEVICE : 0;
        *static_cast<int *>(values[1]) = 0;
        return 0;
    };
    t.cuModuleLoadData = [](mk_cu_module *m, const void *image) { *m = (mk_cu_module)const_cast<void *>(image); return 0; };
    t.cuModuleUnload = [](mk_cu_module) { return 0; };
    t.cuModuleGetFunction = [](mk_cu_function *f, mk_cu_module, const char *name) {
        for (const Kernel &k : kernels())
            if (!strcmp(k.name, name)) {
                *f = reinterpret_cast<mk_cu_function>(const_cast<Kernel *>(&k));
                return 0;
            }
        return (int)MK_CU_NOT_FOUND;
    };
    t.cuFuncSetAttribute = [](mk_cu_function, int, int) { return 0; };
    t.cuFuncGetAttribute = [](int *v, int attribute, mk_cu_function f) {
        const bool forward = !strcmp(reinterpret_cast<const Kernel *>(f)->name, "mok_forward_fused");
        *v = attribute != MK_CU_FUNCTION_MAX_THREADS ? 168 : forward ? (int)mk::kForwardThreads<false> : 1024;
        return 0;
    };
    t.cuOccupancyMaxActiveClusters = [](int *clusters, mk_cu_function, const mk_cu_launch *) { *clusters = 2; return 0; };
    t.cuLaunchKernelEx = launch;
    t.cuStreamIsCapturing = [](mk_cu_stream, int *status) { *status = 0; return 0; };
    t.cuStreamWaitEvent = [](mk_cu_stream, mk_cu_event, unsigned) { return 0; };
    t.cuEventCreate = [](mk_cu_event *e, unsigned) {
        std::lock_guard<std::recursive_mutex> hold(gpu.lock);
        gpu.live++;
        *e = reinterpret_cast<mk_cu_event>(new long(0));
        return 0;
    };
    t.cuEventDestroy = [](mk_cu_event e) {
        std::lock_guard<std::recursive_mutex> hold(gpu.lock);
        gpu.live--;
        delete reinterpret_cast<long *>(e);
        return 0;
    };
    t.cuEventRecord = [](mk_cu_event e, mk_cu_stream) {
        std::lock_guard<std::recursive_mutex> hold(gpu.lock);
        *reinterpret_cast<long *>(e) = gpu.clock;
        return 0;
    };
    t.cuEventElapsedTime = [](float *ms, mk_cu_event from, mk_cu_event to) {
        *ms = (float)(*reinterpret_cast<long *>(to) - *reinterpret_cast<long *>(from));
        return 0;
    };
    t.cuEventSynchronize = [](mk_cu_event) { return gpu.trouble.empty() ? 0 : (int)MK_CU_ILLEGAL_ADDRESS; };
    t.cuEventQuery = [](mk_cu_event) { return 0; };
    t.cuTensorMapEncodeTiled = emu::tensor_map_encode_tiled;
    return t;
}

/* A fresh machine; the library uses it from now on. Nothing of an earlier one may be alive. */
inline void plug_in(uint64_t seed, uint32_t resident_clusters)
{
    static mk_cuda_driver driver = table();
    gpu.trouble.clear();
    gpu.launches.clear();
    gpu.before_launch = nullptr;
    gpu.blocks.clear();
    gpu.machine = std::make_unique<emu::Machine>(seed);
    gpu.device = &gpu.machine->add_device(resident_clusters);
    mk_cuda_driver_inject(&driver);
    mk_cuda_image_inject(&driver);
}

} /* namespace emulated */
#endif
