#include "cuda/host/device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

enum { MAX_DEVICES = 64 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static mk_cuda_device *open_devices[MAX_DEVICES]; /* by ordinal */

/* Compute capabilities that this host code drives. */
static bool driven(int major, int minor) { return (major == 9 && minor == 0) || (major == 10 && (minor == 0 || minor == 3)); }

/* Are there kernels for it in the image? "90a, sm_100a": of exactly that chip; "100f": of its family. */
static bool built_for(int major, int minor)
{
    const char *archs, *why;
    char exact[16], family[16];
    if (!mk_cuda_image(&archs, &why) || !strcmp(archs, "injected"))
        return true; /* another sentence's business */
    snprintf(exact, sizeof exact, "%d%da", major, minor);
    snprintf(family, sizeof family, "%d0f", major);
    return strstr(archs, exact) || strstr(archs, family);
}

static bool supported(int major, int minor) { return driven(major, minor) && built_for(major, minor); }

typedef struct properties { int major, minor, num_sms; size_t memory; char name[64]; } properties;

static mok_status look_at(const mk_cuda_driver *api, int ordinal, mk_cu_device *device, properties *p)
{
    memset(p, 0, sizeof *p);
    MK_CUDA_TRY(api->cuDeviceGet(device, ordinal), "opening device %d", ordinal);
    MK_CUDA_TRY(api->cuDeviceGetName(p->name, (int)sizeof p->name - 1, *device), "asking device %d for its name", ordinal);
    MK_CUDA_TRY(api->cuDeviceGetAttribute(&p->major, MK_CU_CC_MAJOR, *device), "asking device %d for its compute capability", ordinal);
    MK_CUDA_TRY(api->cuDeviceGetAttribute(&p->minor, MK_CU_CC_MINOR, *device), "asking device %d for its compute capability", ordinal);
    MK_CUDA_TRY(api->cuDeviceGetAttribute(&p->num_sms, MK_CU_NUM_SMS, *device), "asking device %d for its SMs", ordinal);
    MK_CUDA_TRY(api->cuDeviceTotalMem(&p->memory, *device), "asking device %d for its memory", ordinal);
    return MOK_OK;
}

static mok_status make_device(const mk_cuda_driver *api, int32_t ordinal, mk_cuda_device **made)
{
    mk_cu_device number;
    properties p;
    MK_TRY(look_at(api, ordinal, &number, &p));
    if (!driven(p.major, p.minor))
        return mk_fail(MOK_E_ENV, "device %d (%s) has compute capability %d.%d: backend cuda runs on 9.0 (Hopper), 10.0 and 10.3 (Blackwell)", ordinal,
                       p.name, p.major, p.minor);
    if (!built_for(p.major, p.minor)) {
        const char *archs, *why;
        mk_cuda_image(&archs, &why);
        return mk_fail(MOK_E_ENV, "device %d (%s) has compute capability %d.%d: this library was built with kernels for sm_%s only (MOK_CUDA_ARCHS)", ordinal,
                       p.name, p.major, p.minor, archs);
    }
    mk_cuda_device *d = calloc(1, sizeof *d);
    if (!d)
        return mk_fail(MOK_E_MEMORY, "no memory for device %d", ordinal);
    d->api = api;
    d->ordinal = ordinal;
    d->num_sms = p.num_sms;
    d->blackwell = p.major == 10;
    memcpy(d->name, p.name, sizeof d->name);
    mk_cu_result result = api->cuDeviceGetUuid(&d->uuid, number);
    if (result == MK_CU_SUCCESS)
        result = api->cuDevicePrimaryCtxRetain(&d->context, number);
    if (result != MK_CU_SUCCESS) {
        free(d);
        return mk_cuda_fail(result, "retaining the primary context of device %d (%s)", ordinal, p.name);
    }
    *made = d;
    return MOK_OK;
}

mok_status mk_cuda_device_open(int32_t ordinal, mk_cuda_device **device)
{
    const mk_cuda_driver *api;
    int count = 0;
    MK_TRY(mk_cuda_driver_get(&api));
    MK_CUDA_TRY(api->cuDeviceGetCount(&count), "counting the devices");
    count = count < MAX_DEVICES ? count : MAX_DEVICES;
    if (ordinal < 0 || ordinal >= count)
        return mk_fail(MOK_E_ARG, "device %d: there are %d CUDA devices, numbered from 0", ordinal, count);
    pthread_mutex_lock(&lock);
    mok_status status = open_devices[ordinal] ? MOK_OK : make_device(api, ordinal, &open_devices[ordinal]);
    if (status == MOK_OK) {
        *device = open_devices[ordinal];
        (*device)->users++;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

void mk_cuda_device_share(mk_cuda_device *d)
{
    pthread_mutex_lock(&lock);
    d->users++;
    pthread_mutex_unlock(&lock);
}

void mk_cuda_device_close(mk_cuda_device *d)
{
    if (!d)
        return;
    pthread_mutex_lock(&lock);
    if (--d->users == 0) {
        mk_cu_device number;
        if (d->kernels.module && mk_cuda_enter(d) == MOK_OK) {
            mk_cuda_kernels_unload(d->api, &d->kernels);
            mk_cuda_leave(d);
        }
        if (d->api->cuDeviceGet(&number, d->ordinal) == MK_CU_SUCCESS)
            d->api->cuDevicePrimaryCtxRelease(number);
        open_devices[d->ordinal] = NULL;
        free(d);
    }
    pthread_mutex_unlock(&lock);
}

mok_status mk_cuda_device_current(int32_t *ordinal)
{
    const mk_cuda_driver *api;
    mk_cu_device number, candidate;
    int count = 0;
    MK_TRY(mk_cuda_driver_get(&api));
    mk_cu_result result = api->cuCtxGetDevice(&number);
    if (result == MK_CU_INVALID_CONTEXT)
        return mk_fail(MOK_E_STATE, "no CUDA device is current in this thread: backend cuda with a caller's provider uses the current one "
                                    "(cudaSetDevice, torch.cuda.set_device)");
    if (result != MK_CU_SUCCESS)
        return mk_cuda_fail(result, "asking which device is current");
    MK_CUDA_TRY(api->cuDeviceGetCount(&count), "counting the devices");
    for (*ordinal = 0; *ordinal < count; ++*ordinal)
        if (api->cuDeviceGet(&candidate, *ordinal) == MK_CU_SUCCESS && candidate == number)
            return MOK_OK;
    return mk_fail(MOK_E_BUG, "the current device %d is none of the %d that there are", number, count);
}

mok_status mk_cuda_device_load(mk_cuda_device *d)
{
    MK_TRY(mk_cuda_enter(d));
    pthread_mutex_lock(&lock);
    mok_status status = mk_cuda_kernels_load(d->api, &d->kernels);
    pthread_mutex_unlock(&lock);
    mk_cuda_leave(d);
    return status;
}

mok_status mk_cuda_enter(const mk_cuda_device *d)
{
    MK_CUDA_TRY(d->api->cuCtxPushCurrent(d->context), "making device %d current", d->ordinal);
    return MOK_OK;
}

void mk_cuda_leave(const mk_cuda_device *d)
{
    mk_cu_context context;
    d->api->cuCtxPopCurrent(&context);
}

/* --- peer access ----------------------------------------------------------------------------------------------------- */
static mok_status reaches(const mk_cuda_device *from, const mk_cuda_device *to, bool *can)
{
    mk_cu_device a, b;
    int answer = 0;
    MK_CUDA_TRY(from->api->cuDeviceGet(&a, from->ordinal), "opening device %d", from->ordinal);
    MK_CUDA_TRY(from->api->cuDeviceGet(&b, to->ordinal), "opening device %d", to->ordinal);
    MK_CUDA_TRY(from->api->cuDeviceCanAccessPeer(&answer, a, b), "asking whether device %d can access device %d", from->ordinal, to->ordinal);
    *can = answer != 0;
    return MOK_OK;
}

/* Every pair is asked before anything is enabled, so that the sentence is complete. */
static mok_status check_pairs(mk_cuda_device *const *devices, int32_t count)
{
    char pairs[240] = "";
    size_t used = 0;
    int32_t failing = 0, named = 0;
    for (int32_t i = 0; i < count; i++)
        for (int32_t j = i + 1; j < count; j++) {
            bool there = true, back = true;
            MK_TRY(reaches(devices[i], devices[j], &there));
            MK_TRY(reaches(devices[j], devices[i], &back));
            if (there && back)
                continue;
            failing++;
            if (used + 24 > sizeof pairs)
                continue;
            used += (size_t)snprintf(pairs + used, sizeof pairs - used, "%s%d-%d", named++ ? ", " : "", devices[i]->ordinal, devices[j]->ordinal);
        }
    if (!failing)
        return MOK_OK;
    if (failing > named)
        snprintf(pairs + used, sizeof pairs - used, " and %d more", failing - named);
    return mk_fail(MOK_E_ENV, "%d of %d pairs of devices have no peer access: %s. Use devices of one NVLink or PCIe domain (nvidia-smi topo -p2p r "
                              "shows them; MIG slices have none), or fewer ranks",
                   failing, count * (count - 1) / 2, pairs);
}

static mok_status enable_from(mk_cuda_device *const *devices, int32_t count, int32_t i)
{
    mok_status status = MOK_OK;
    MK_TRY(mk_cuda_enter(devices[i]));
    for (int32_t j = 0; j < count && status == MOK_OK; j++) {
        mk_cu_result result = j == i ? MK_CU_SUCCESS : devices[i]->api->cuCtxEnablePeerAccess(devices[j]->context, 0);
        if (result != MK_CU_SUCCESS && result != MK_CU_PEER_ACCESS_ALREADY_ENABLED)
            status = mk_cuda_fail(result, "enabling access from device %d to device %d", devices[i]->ordinal, devices[j]->ordinal);
    }
    mk_cuda_leave(devices[i]);
    return status;
}

mok_status mk_cuda_connect(mk_cuda_device *const *devices, int32_t count)
{
    MK_TRY(check_pairs(devices, count));
    for (int32_t i = 0; i < count; i++)
        MK_TRY(enable_from(devices, count, i));
    return MOK_OK;
}

/* --- probe ------------------------------------------------------------------------------------------------------------ */
static mok_status describe_devices(const mk_cuda_driver *api, int count, mok_backend_info *info)
{
    int version = 0;
    properties first = {0}, p;
    mk_cu_device number;
    api->cuDriverGetVersion(&version);
    for (int i = 0; i < count; i++) {
        MK_TRY(look_at(api, i, &number, &p));
        if (!first.name[0] || (!supported(first.major, first.minor) && supported(p.major, p.minor)))
            first = p;
        info->num_devices += supported(p.major, p.minor);
    }
    if (!count)
        return mk_fail(MOK_E_ENV, "the driver (version %d.%d) sees no GPU", version / 1000, version % 1000 / 10);
    if (!info->num_devices)
        return mk_fail(MOK_E_ENV, "no GPU of compute capability 9.0 (Hopper), 10.0 or 10.3 (Blackwell) that there are kernels for: device 0 is a %s with %d.%d", first.name, first.major, first.minor);
    snprintf(info->detail, sizeof info->detail, "driver %d.%d, %d of %d devices: %s, %d SMs, %.0f GiB", version / 1000, version % 1000 / 10,
             info->num_devices, count, first.name, first.num_sms, (double)first.memory / (1 << 30));
    return MOK_OK;
}

void mk_cuda_probe(mok_backend_info *info)
{
    const mk_cuda_driver *api;
    const char *archs, *why;
    int count = 0;
    const void *image = mk_cuda_image(&archs, &why);
    mok_status status = mk_cuda_driver_get(&api);
    if (status == MOK_OK && api->cuDeviceGetCount(&count) == MK_CU_SUCCESS)
        status = describe_devices(api, count, info);
    if (status != MOK_OK)
        snprintf(info->detail, sizeof info->detail, "%s%s%s", mok_last_error(), image ? "" : "; ", why);
    else if (!image)
        snprintf(info->detail, sizeof info->detail, "%s", why);
    info->usable = status == MOK_OK && image;
}
