#include "cuda/host/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static mk_cuda_driver real_driver;
static bool real_usable;
static char real_why[400];
static const mk_cuda_driver *injected;

/* In a table's words; works on a half-filled table too. */
static void describe(const mk_cuda_driver *api, mk_cu_result result, char *text, size_t bytes)
{
    const char *name = NULL, *words = NULL;
    if (api->cuGetErrorName)
        api->cuGetErrorName(result, &name);
    if (api->cuGetErrorString)
        api->cuGetErrorString(result, &words);
    if (name)
        snprintf(text, bytes, "%s (%s)", name, words ? words : "no description");
    else
        snprintf(text, bytes, "CUDA error %d", result);
}

static bool find(void *library, const char *symbol, void *function)
{
    void *address = dlsym(library, symbol);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

bool mk_cuda_driver_load(const char *library, mk_cuda_driver *table, char *why, size_t bytes)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL); /* never closed: the driver does not survive it */
    char text[200];
    int version = 0;
    memset(table, 0, sizeof *table);
    if (!handle) {
        const char *error = dlerror();
        snprintf(why, bytes, "there is no CUDA driver: %.300s", error ? error : library);
        return false;
    }
    if (find(handle, "cuDriverGetVersion", &table->cuDriverGetVersion))
        table->cuDriverGetVersion(&version);
#define LOAD(field, symbol, parameters)                                                                                        \
    if (!find(handle, symbol, &table->field)) {                                                                                \
        snprintf(why, bytes, "the CUDA driver (%s, version %d.%d) has no %s: version 12.0 or newer is needed", library, version / 1000, \
                 version % 1000 / 10, symbol);                                                                                 \
        return false;                                                                                                          \
    }
    MK_CUDA_FUNCTIONS(LOAD)
#undef LOAD
    mk_cu_result result = table->cuInit(0);
    if (result == MK_CU_SUCCESS)
        return true;
    describe(table, result, text, sizeof text);
    snprintf(why, bytes, "the CUDA driver (%s, version %d.%d) does not start: %s", library, version / 1000, version % 1000 / 10, text);
    return false;
}

static void load_real(void) { real_usable = mk_cuda_driver_load("libcuda.so.1", &real_driver, real_why, sizeof real_why); }

mok_status mk_cuda_driver_get(const mk_cuda_driver **api)
{
    *api = __atomic_load_n(&injected, __ATOMIC_ACQUIRE);
    if (*api)
        return MOK_OK;
    pthread_once(&once, load_real);
    if (!real_usable)
        return mk_fail(MOK_E_ENV, "%s", real_why);
    *api = &real_driver;
    return MOK_OK;
}

void mk_cuda_driver_inject(const mk_cuda_driver *table) { __atomic_store_n(&injected, table, __ATOMIC_RELEASE); }

static mok_status status_of(mk_cu_result result)
{
    switch (result) {
    case MK_CU_OUT_OF_MEMORY: return MOK_E_MEMORY;
    case MK_CU_NO_DEVICE:
    case MK_CU_INVALID_DEVICE:
    case MK_CU_NO_BINARY_FOR_GPU:
    case MK_CU_PEER_ACCESS_UNSUPPORTED:
    case MK_CU_TOO_MANY_PEERS:
    case MK_CU_NOT_PERMITTED:
    case MK_CU_NOT_SUPPORTED:
    case MK_CU_SYSTEM_DRIVER_MISMATCH:
    case MK_CU_COMPAT_NOT_SUPPORTED_ON_DEVICE: return MOK_E_ENV;
    default: return result >= MK_CU_CAPTURE_UNSUPPORTED && result <= MK_CU_CAPTURED_EVENT ? MOK_E_STATE : MOK_E_DEVICE;
    }
}

mok_status mk_cuda_fail(mk_cu_result result, const char *format, ...)
{
    const mk_cuda_driver *api = NULL;
    char what[300], text[200] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (mk_cuda_driver_get(&api) == MOK_OK)
        describe(api, result, text, sizeof text);
    return mk_fail(status_of(result), "%s: %s", what, text);
}
