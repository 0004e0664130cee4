#include "cuda/host/kernels.h"

#include <string.h>

#include "base/error.h"

const mk_cuda_kernel_shape mk_cuda_kernel_shapes[MK_NUM_CUDA_KERNELS] = {
#define SHAPE(name, threads, shared, cluster) {#name, threads, shared, cluster},
    MK_CUDA_KERNEL_LIST(SHAPE)
#undef SHAPE
};

/* cmake/cuda.cmake defines MOK_CUDA_IMAGE_ARCHS if it made the image, else MOK_CUDA_IMAGE_WHY. */
#ifdef MOK_CUDA_IMAGE_ARCHS
extern const unsigned char mk_cuda_image_start[] __attribute__((visibility("hidden")));
static const void *const built_in = mk_cuda_image_start;
static const char built_in_archs[] = MOK_CUDA_IMAGE_ARCHS, built_in_why[] = "";
#else
static const void *const built_in = NULL;
static const char built_in_archs[] = "", built_in_why[] = MOK_CUDA_IMAGE_WHY;
#endif

static const void *injected;

const void *mk_cuda_image(const char **archs, const char **why)
{
    const void *other = __atomic_load_n(&injected, __ATOMIC_ACQUIRE);
    *archs = other ? "injected" : built_in_archs;
    *why = other ? "" : built_in_why;
    return other ? other : built_in;
}

void mk_cuda_image_inject(const void *image) { __atomic_store_n(&injected, image, __ATOMIC_RELEASE); }

static mok_status prepare(const mk_cuda_driver *api, mk_cuda_kernels *k, int i)
{
    const mk_cuda_kernel_shape *shape = &mk_cuda_kernel_shapes[i];
    int registers = 0, threads = 0;
    MK_CUDA_TRY(api->cuModuleGetFunction(&k->function[i], k->module, shape->name), "finding kernel %s in the image", shape->name);
    MK_CUDA_TRY(api->cuFuncSetAttribute(k->function[i], MK_CU_FUNCTION_MAX_DYNAMIC_SHARED, (int)shape->shared),
                "giving kernel %s %u bytes of shared memory", shape->name, shape->shared);
    /* Asking for a compiled property makes the driver load the kernel now. */
    MK_CUDA_TRY(api->cuFuncGetAttribute(&registers, MK_CU_FUNCTION_NUM_REGS, k->function[i]), "loading kernel %s", shape->name);
    MK_CUDA_TRY(api->cuFuncGetAttribute(&threads, MK_CU_FUNCTION_MAX_THREADS, k->function[i]), "asking for the threads of kernel %s", shape->name);
    k->threads[i] = (unsigned)threads < shape->threads ? (unsigned)threads : shape->threads;
    if (shape->cluster == 1)
        return MOK_OK;
    mk_cu_launch_attribute cluster = {.id = MK_CU_LAUNCH_CLUSTER_DIMENSION, .value = {.cluster = {shape->cluster, 1, 1}}};
    mk_cu_launch launch = {.grid_x = shape->cluster, .grid_y = 1, .grid_z = 1, .block_x = k->threads[i], .block_y = 1, .block_z = 1,
                           .shared_bytes = shape->shared, .attributes = &cluster, .num_attributes = 1};
    MK_CUDA_TRY(api->cuOccupancyMaxActiveClusters(&k->max_clusters[i], k->function[i], &launch), "asking how many clusters of kernel %s fit",
                shape->name);
    if (k->max_clusters[i] < 1)
        return mk_fail(MOK_E_ENV, "no cluster of kernel %s (%u CTAs, %u bytes of shared memory each) fits on this GPU (a MIG slice or an SM limit?)",
                       shape->name, shape->cluster, shape->shared);
    return MOK_OK;
}

mok_status mk_cuda_kernels_load(const mk_cuda_driver *api, mk_cuda_kernels *k)
{
    const char *archs, *why;
    const void *image = mk_cuda_image(&archs, &why);
    mok_status status = MOK_OK;
    if (k->module)
        return MOK_OK;
    if (!image)
        return mk_fail(MOK_E_ENV, "%s", why);
    MK_CUDA_TRY(api->cuModuleLoadData(&k->module, image), "loading the kernels (built for sm_%s)", archs);
    for (int i = 0; i < MK_NUM_CUDA_KERNELS && status == MOK_OK; i++)
        status = prepare(api, k, i);
    if (status != MOK_OK)
        mk_cuda_kernels_unload(api, k);
    return status;
}

void mk_cuda_kernels_unload(const mk_cuda_driver *api, mk_cuda_kernels *k)
{
    if (k->module)
        api->cuModuleUnload(k->module);
    memset(k, 0, sizeof *k);
}
