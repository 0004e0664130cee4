/* The pieces of the driver's interface that cuda/host/driver.h declares for itself, against the toolkit's header where there is one. */
#include "test.h"

#include "cuda/host/driver.h"
#include "cuda/host/vmm.h"

#if __has_include("/usr/local/cuda/include/cuda.h")
#include "/usr/local/cuda/include/cuda.h"

#define SAME(ours, theirs) _Static_assert((long long)(ours) == (long long)(theirs), #ours " is not " #theirs)
SAME(MK_CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME(MK_CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(MK_CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME(MK_CU_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE);
SAME(MK_CU_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
SAME(MK_CU_NO_BINARY_FOR_GPU, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME(MK_CU_PEER_ACCESS_UNSUPPORTED, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
SAME(MK_CU_NOT_FOUND, CUDA_ERROR_NOT_FOUND);
SAME(MK_CU_NOT_READY, CUDA_ERROR_NOT_READY);
SAME(MK_CU_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(MK_CU_PEER_ACCESS_ALREADY_ENABLED, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
SAME(MK_CU_TOO_MANY_PEERS, CUDA_ERROR_TOO_MANY_PEERS);
SAME(MK_CU_NOT_PERMITTED, CUDA_ERROR_NOT_PERMITTED);
SAME(MK_CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME(MK_CU_SYSTEM_DRIVER_MISMATCH, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
SAME(MK_CU_COMPAT_NOT_SUPPORTED_ON_DEVICE, CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE);
SAME(MK_CU_CAPTURE_UNSUPPORTED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
SAME(MK_CU_CAPTURED_EVENT, CUDA_ERROR_CAPTURED_EVENT);
SAME(MK_CU_NUM_SMS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(MK_CU_CC_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(MK_CU_CC_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(MK_CU_COMPUTE_MODE, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE);
SAME(MK_CU_VMM_SUPPORTED, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(MK_CU_HANDLE_FD_SUPPORTED, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(MK_CU_HANDLE_FABRIC_SUPPORTED, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
SAME(MK_HANDLE_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(MK_HANDLE_FABRIC, CU_MEM_HANDLE_TYPE_FABRIC);
SAME(sizeof(((mk_shareable *)0)->fabric), sizeof(CUmemFabricHandle));
SAME(MK_CU_ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(MK_CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(MK_CU_GRANULARITY_RECOMMENDED, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
SAME(MK_CU_ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(sizeof(mk_cu_allocation), sizeof(CUmemAllocationProp));
SAME(offsetof(mk_cu_allocation, handle_types), offsetof(CUmemAllocationProp, requestedHandleTypes));
SAME(offsetof(mk_cu_allocation, location), offsetof(CUmemAllocationProp, location));
SAME(offsetof(mk_cu_allocation, flags), offsetof(CUmemAllocationProp, allocFlags));
SAME(sizeof(mk_cu_access), sizeof(CUmemAccessDesc));
SAME(offsetof(mk_cu_access, flags), offsetof(CUmemAccessDesc, flags));
SAME(MK_CU_FUNCTION_MAX_THREADS, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
SAME(MK_CU_FUNCTION_NUM_REGS, CU_FUNC_ATTRIBUTE_NUM_REGS);
SAME(MK_CU_FUNCTION_MAX_DYNAMIC_SHARED, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(MK_CU_POINTER_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(MK_CU_POINTER_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(MK_CU_MEMORY_DEVICE, CU_MEMORYTYPE_DEVICE);
SAME(MK_CU_LAUNCH_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(MK_CU_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
SAME(MK_CU_HOST_PORTABLE, CU_MEMHOSTALLOC_PORTABLE);
SAME(MK_CU_HOST_DEVICEMAP, CU_MEMHOSTALLOC_DEVICEMAP);
SAME(sizeof(mk_cu_uuid), sizeof(CUuuid));
SAME(sizeof(mk_cu_pointer), sizeof(CUdeviceptr));
SAME(sizeof(mk_cu_launch), sizeof(CUlaunchConfig));
SAME(offsetof(mk_cu_launch, shared_bytes), offsetof(CUlaunchConfig, sharedMemBytes));
SAME(offsetof(mk_cu_launch, stream), offsetof(CUlaunchConfig, hStream));
SAME(offsetof(mk_cu_launch, attributes), offsetof(CUlaunchConfig, attrs));
SAME(offsetof(mk_cu_launch, num_attributes), offsetof(CUlaunchConfig, numAttrs));
SAME(sizeof(mk_cu_launch_attribute), sizeof(CUlaunchAttribute));
SAME(offsetof(mk_cu_launch_attribute, value), offsetof(CUlaunchAttribute, value));

/* The one exception: its _v2 came with 12.8, takes the same parameters, and the first one stays exported. */
#undef cuEventElapsedTime

/* cuda.h maps each name to the version that its prototypes describe: the symbols we look up must be those. */
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
TEST(driver_symbols_are_the_toolkits_versions)
{
#define SYMBOL(field, symbol, parameters)  \
    if (strcmp(TEXT(field), symbol))       \
        TEST_FAILED("%s, but cuda.h has %s", symbol, TEXT(field));
    MK_CUDA_FUNCTIONS(SYMBOL)
#undef SYMBOL
}

TEST(driver_types_and_numbers_are_the_toolkits) { printf("  compared with CUDA %d.%d\n", CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10); }
#else
TEST(driver_types_and_numbers_are_the_toolkits) { SKIP("there is no /usr/local/cuda/include/cuda.h to compare with"); }
#endif

int main(int argc, char **argv) { return test_main(argc, argv); }
