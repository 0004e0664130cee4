/* mok_doctor: one function for each check, in the order in which they build on each other. Facts that a check needs come from the driver table and the
 * kernel; MOK_DOCTOR_FAULT=driver|devices|architecture|compute_mode|mig|peer|slow_link|fabric|fd|vmm|memory|ptrace|shared_memory|socket spoils one. */
#define _GNU_SOURCE /* memfd_create */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "backend/backend.h"
#include "base/error.h"
#include "cuda/host/vmm.h"
#include "peer/mesh.h"

enum { MAX_DEVICES = 16, COPY_BYTES = 64 << 20, COPIES = 4, MODE_EXCLUSIVE = 3, MODE_PROHIBITED = 2 };
static const double BUSY_BYTES = 1e9, SLOW_LINK = 100e9; /* an NVLink pair of Hopper moves several times that, PCIe about half of it */

typedef struct doctor {
    mok_finding *finding;          /* the next to be filled */
    const mk_cuda_driver *api;     /* NULL: no driver */
    int count;                     /* devices, at most MAX_DEVICES */
    mk_cuda_device *device[MAX_DEVICES]; /* open ones; NULL where it did not open */
    int open;
    bool pairs_reach, shares_fd, shares_fabric, host_sharing;
} doctor;

static bool forced(const char *fault)
{
    const char *wish = getenv("MOK_DOCTOR_FAULT");
    return wish && !strcmp(wish, fault);
}

__attribute__((format(printf, 4, 5)))
static void found(doctor *d, mok_finding_state state, const char *advice, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(d->finding->detail, sizeof d->finding->detail, format, args);
    va_end(args);
    d->finding->state = state;
    snprintf(d->finding->advice, sizeof d->finding->advice, "%s", advice);
}

/* Adds to a list; "..." stands for those that there is no room for. */
__attribute__((format(printf, 3, 4)))
static void append(char *list, size_t size, const char *format, ...)
{
    va_list args;
    size_t used = strlen(list);
    if (used + 24 > size) {
        snprintf(list + used, size - used, "%s", strstr(list, "...") ? "" : ", ...");
        return;
    }
    va_start(args, format);
    used += (size_t)snprintf(list + used, size - used, "%s", used ? ", " : "");
    vsnprintf(list + used, size - used, format, args);
    va_end(args);
}

/* --- the machine --------------------------------------------------------------------------------------------------------- */
static void check_library(doctor *d)
{
    const char *archs, *why;
    if (mk_cuda_image(&archs, &why))
        found(d, MOK_FINDING_GOOD, "", "mok %s, with kernels for sm_%s", mok_version(), archs);
    else
        found(d, MOK_FINDING_WARNING, "build where nvcc is (MOK_CUDA=ON makes that an error)", "mok %s: %s", mok_version(), why);
}

static void check_driver(doctor *d)
{
    int version = 0;
    if (forced("driver") || mk_cuda_driver_get(&d->api) != MOK_OK) {
        d->api = NULL;
        found(d, MOK_FINDING_BAD, "install the NVIDIA driver (in a container: start it with --gpus, and the container toolkit), or use backend cpu",
              "%s", forced("driver") ? "there is no CUDA driver: forced by MOK_DOCTOR_FAULT" : mok_last_error());
        return;
    }
    d->api->cuDriverGetVersion(&version);
    found(d, MOK_FINDING_GOOD, "", "the CUDA driver speaks version %d.%d", version / 1000, version % 1000 / 10);
}

/* False: there is no GPU to look at, and it has been said. */
static bool has_devices(doctor *d)
{
    if (d->open)
        return true;
    found(d, MOK_FINDING_SKIPPED, "", "%s", d->api ? "there is no GPU that MoK can use" : "there is no CUDA driver");
    return false;
}

static void check_devices(doctor *d)
{
    char names[300] = "";
    size_t used = 0;
    if (!d->api) {
        has_devices(d);
        return;
    }
    if (forced("devices") || d->api->cuDeviceGetCount(&d->count) != MK_CU_SUCCESS)
        d->count = 0;
    d->count = d->count < MAX_DEVICES ? d->count : MAX_DEVICES;
    if (!d->count) {
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        found(d, MOK_FINDING_BAD, "look at nvidia-smi -L and at CUDA_VISIBLE_DEVICES; in a container, start it with --gpus", "the driver sees no GPU%s%.100s%s",
              visible ? " (CUDA_VISIBLE_DEVICES=" : "", visible ? visible : "", visible ? ")" : "");
        return;
    }
    for (int i = 0; i < d->count; i++) {
        bool opened = !forced("architecture") && mk_cuda_device_open(i, &d->device[i]) == MOK_OK;
        d->open += opened;
        if (used + 8 < sizeof names)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%d: %s", i ? "; " : "", i, opened ? d->device[i]->name : "not usable");
    }
    if (d->open == d->count)
        found(d, MOK_FINDING_GOOD, "", "%d: %s", d->count, names);
    else
        found(d, d->open ? MOK_FINDING_WARNING : MOK_FINDING_BAD, "use GPUs of a supported generation, or backend cpu", "%d of %d usable: %s. %.160s", d->open, d->count,
              names, forced("architecture") ? "compute capability: forced by MOK_DOCTOR_FAULT" : mok_last_error());
}

static void check_compute_mode(doctor *d)
{
    if (!has_devices(d))
        return;
    for (int i = 0; i < d->count; i++) {
        mk_cu_device number;
        int mode = 0;
        if (!d->device[i])
            continue;
        if (d->api->cuDeviceGet(&number, i) != MK_CU_SUCCESS || d->api->cuDeviceGetAttribute(&mode, MK_CU_COMPUTE_MODE, number) != MK_CU_SUCCESS)
            mode = 0;
        mode = forced("compute_mode") ? MODE_EXCLUSIVE : mode;
        if (mode == MODE_EXCLUSIVE || mode == MODE_PROHIBITED) {
            found(d, mode == MODE_PROHIBITED ? MOK_FINDING_BAD : MOK_FINDING_WARNING, "nvidia-smi -c DEFAULT, if several processes are to share the GPU",
                  "device %d is in compute mode %s", i, mode == MODE_PROHIBITED ? "prohibited: nobody may use it" : "exclusive process: one process may use it at a time");
            return;
        }
    }
    found(d, MOK_FINDING_GOOD, "", "default on every device: processes may share them");
}

static void check_mig(doctor *d)
{
    if (!has_devices(d))
        return;
    for (int i = 0; i < d->count; i++)
        if (forced("mig") || (d->device[i] && strstr(d->device[i]->name, "MIG"))) {
            found(d, MOK_FINDING_WARNING, "ranks over several GPUs need whole GPUs: nvidia-smi -mig 0, or one container with all of them",
                  "device %d is a MIG slice: it has no access to other GPUs, and only ranks that share it can work together", i);
            return;
        }
    found(d, MOK_FINDING_GOOD, "", "no device is a MIG slice");
}

static void check_memory(doctor *d)
{
    char busy[200] = "";
    if (!has_devices(d))
        return;
    for (int i = 0; i < d->count; i++) {
        size_t left = 0, total = 0;
        if (!d->device[i] || mk_cuda_enter(d->device[i]) != MOK_OK)
            continue;
        if (d->api->cuMemGetInfo(&left, &total) != MK_CU_SUCCESS)
            left = total = 0;
        mk_cuda_leave(d->device[i]);
        double taken = forced("memory") ? 2e9 : (double)(total - left);
        if (taken > BUSY_BYTES)
            append(busy, sizeof busy, "device %d: %.1f GB", i, 1e-9 * taken);
    }
    if (busy[0])
        found(d, MOK_FINDING_WARNING, "nvidia-smi shows the processes; they take memory, and their kernels take time", "in use before MoK begins, by this or other "
              "processes: %s", busy);
    else
        found(d, MOK_FINDING_GOOD, "", "nobody has more than %.0f GB of any device", 1e-9 * BUSY_BYTES);
}

/* --- between devices ------------------------------------------------------------------------------------------------------- */
static bool reach(doctor *d, int i, int j)
{
    mk_cu_device a, b;
    int can = 0;
    bool asked = d->api->cuDeviceGet(&a, i) == MK_CU_SUCCESS && d->api->cuDeviceGet(&b, j) == MK_CU_SUCCESS &&
                 d->api->cuDeviceCanAccessPeer(&can, a, b) == MK_CU_SUCCESS;
    return asked && can && !(forced("peer") && i + j == 1);
}

static void check_peers(doctor *d)
{
    char missing[300] = "";
    int pairs = 0, failing = 0;
    if (!has_devices(d))
        return;
    for (int i = 0; i < d->count; i++)
        for (int j = i + 1; j < d->count; j++) {
            pairs++;
            if (reach(d, i, j) && reach(d, j, i))
                continue;
            failing++;
            append(missing, sizeof missing, "%d-%d", i, j);
        }
    d->pairs_reach = failing == 0;
    if (failing)
        found(d, MOK_FINDING_BAD, "use GPUs of one NVLink or PCIe domain (nvidia-smi topo -p2p r shows them); PCIe access control (ACS) in the BIOS and IOMMUs "
              "can be in the way; MIG slices have none", "%d of %d pairs of devices have no peer access: %s", failing, pairs, missing);
    else
        found(d, MOK_FINDING_GOOD, "", pairs ? "all %d pairs of devices reach each other" : "one device: nothing to reach (%d pairs)", pairs);
}

/* Bytes a second from one allocation to another, the second half of some copies. 0: it did not work. */
static double copy_rate(doctor *d, mk_cu_pointer to, mk_cu_pointer from)
{
    struct timespec a, b;
    for (int i = 0; i < 2 * COPIES; i++) {
        if (i == COPIES)
            clock_gettime(CLOCK_MONOTONIC, &a);
        if (d->api->cuMemcpy(to, from, COPY_BYTES) != MK_CU_SUCCESS || d->api->cuCtxSynchronize() != MK_CU_SUCCESS)
            return 0;
    }
    clock_gettime(CLOCK_MONOTONIC, &b);
    double seconds = (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
    return (double)COPIES * COPY_BYTES / (seconds > 1e-9 ? seconds : 1e-9);
}

static mk_cu_pointer take(const mk_cuda_device *device)
{
    mk_cu_pointer memory = 0;
    if (mk_cuda_enter(device) != MOK_OK)
        return 0;
    if (device->api->cuMemAlloc(&memory, COPY_BYTES) != MK_CU_SUCCESS)
        memory = 0;
    mk_cuda_leave(device);
    return memory;
}

static void give(const mk_cuda_device *device, mk_cu_pointer memory)
{
    if (!memory || mk_cuda_enter(device) != MOK_OK)
        return;
    device->api->cuMemFree(memory);
    mk_cuda_leave(device);
}

/* Bytes a second from device i to device j. 0: it did not work. */
static double pair_rate(doctor *d, int i, int j)
{
    mk_cuda_device *pair[] = {d->device[i], d->device[j]};
    double rate = 0;
    if (forced("slow_link"))
        return 20e9;
    if (mk_cuda_connect(pair, 2) != MOK_OK)
        return 0;
    mk_cu_pointer from = take(pair[0]), to = take(pair[1]);
    if (from && to && mk_cuda_enter(pair[0]) == MOK_OK) {
        rate = copy_rate(d, to, from);
        mk_cuda_leave(pair[0]);
    }
    give(pair[0], from);
    give(pair[1], to);
    return rate;
}

/* Every pair that can be measured, in one direction. */
static void check_links(doctor *d)
{
    char rates[330] = "", slow[90] = "";
    if (!has_devices(d))
        return;
    for (int i = 0; i < d->count; i++)
        for (int j = i + 1; j < d->count; j++) {
            if (!d->device[i] || !d->device[j] || !reach(d, i, j) || !reach(d, j, i))
                continue;
            double rate = pair_rate(d, i, j);
            append(rates, sizeof rates, "%d-%d %.0f", i, j, 1e-9 * rate);
            if (rate < SLOW_LINK)
                append(slow, sizeof slow, "%d-%d", i, j);
        }
    if (!rates[0])
        found(d, MOK_FINDING_SKIPPED, "", "%s", d->count < 2 ? "one device: there is no link to measure" : "no two devices reach each other");
    else if (slow[0])
        found(d, MOK_FINDING_WARNING, "put the ranks of a group on GPUs that NVLink connects (nvidia-smi topo -m); nvidia-smi nvlink -s shows links that are down",
              "copies between devices, GB/s: %s; by their rates no NVLink: %s", rates, slow);
    else
        found(d, MOK_FINDING_GOOD, "", "copies between devices, GB/s: %s; NVLink by their rates", rates);
}

/* --- memory that processes share ---------------------------------------------------------------------------------------------- */
/* Made, exported and mapped once more, as a peer would. */
static mok_status try_handle(const mk_cuda_device *device, mk_handle_kind kind)
{
    mk_vmm own, again;
    mk_shareable share;
    if (forced("vmm") || forced(kind == MK_HANDLE_FD ? "fd" : "fabric"))
        return mk_fail(MOK_E_ENV, "device %d does not offer %s: forced by MOK_DOCTOR_FAULT", device->ordinal,
                       forced("vmm") ? "virtual memory management" : kind == MK_HANDLE_FD ? "file-descriptor handles" : "fabric handles");
    MK_TRY(mk_cuda_enter(device));
    mok_status status = mk_vmm_create(device, 1, kind, &own, &share);
    if (status == MOK_OK) {
        status = mk_vmm_import(device, 1, &share, &again);
        if (status == MOK_OK)
            mk_vmm_free(device, &again);
        mk_vmm_free(device, &own);
        if (share.fd >= 0)
            close(share.fd);
    }
    mk_cuda_leave(device);
    return status;
}

static void check_handle(doctor *d, mk_handle_kind kind, bool *works, mok_finding_state otherwise, const char *advice)
{
    if (!has_devices(d))
        return;
    for (int i = 0; i < d->count; i++)
        if (d->device[i] && try_handle(d->device[i], kind) != MOK_OK) {
            found(d, otherwise, advice, "%s", mok_last_error());
            return;
        }
    *works = true;
    found(d, MOK_FINDING_GOOD, "", "memory of every device can be shared by %s", mk_handle_kind_name(kind));
}

static void check_fabric(doctor *d)
{
    check_handle(d, MK_HANDLE_FABRIC, &d->shares_fabric, MOK_FINDING_WARNING,
                 "only needed for ranks on several machines of one NVLink domain: start nvidia-imex there, and give containers /dev/nvidia-caps-imex-channels");
}

static void check_fd(doctor *d)
{
    check_handle(d, MK_HANDLE_FD, &d->shares_fd, MOK_FINDING_BAD,
                 "ranks as processes cannot share device memory here: use ranks as threads (mok_group_create_local), or a newer driver");
}

static void check_shared_memory(doctor *d)
{
    int fd = memfd_create("mok doctor", MFD_CLOEXEC), error = fd < 0 ? errno : posix_fallocate(fd, 0, 1 << 20);
    error = forced("shared_memory") ? EPERM : error;
    void *at = error ? MAP_FAILED : mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    bool works = at != MAP_FAILED;
    if (works)
        munmap(at, 1 << 20);
    if (fd >= 0)
        close(fd);
    d->host_sharing = works;
    if (works)
        found(d, MOK_FINDING_GOOD, "", "memory of the host can be shared between processes");
    else
        found(d, MOK_FINDING_BAD, "allow memfd_create in the container's seccomp profile; the default profiles do", "shared memory of the host: %s", strerror(error));
}

static void check_sockets(doctor *d)
{
    mk_mesh *mesh = NULL;
    mk_address address;
    mok_status status = forced("socket") ? mk_fail(MOK_E_ENV, "rank 0 cannot open a Unix socket for its peers: forced by MOK_DOCTOR_FAULT")
                                         : mk_mesh_listen(0, 2, &mesh, &address);
    d->host_sharing &= status == MOK_OK;
    if (status == MOK_OK)
        found(d, MOK_FINDING_GOOD, "", "Unix sockets work; ranks in different containers need one network namespace");
    else
        found(d, MOK_FINDING_BAD, "allow AF_UNIX sockets in the container's seccomp profile", "%s", mok_last_error());
    mk_mesh_close(mesh);
}

/* PyTorch's symmetric memory takes descriptors out of another process, which is a matter of ptrace rights; ours are sent. */
static void check_ptrace(doctor *d)
{
    unsigned long long capabilities = 0;
    int scope = 0;
    char line[256];
    FILE *status = fopen("/proc/self/status", "r"), *yama = fopen("/proc/sys/kernel/yama/ptrace_scope", "r");
    while (status && fgets(line, sizeof line, status))
        if (!strncmp(line, "CapEff:", 7))
            capabilities = strtoull(line + 7, NULL, 16);
    if (status)
        fclose(status);
    if (yama) {
        scope = fgets(line, sizeof line, yama) ? atoi(line) : 0;
        fclose(yama);
    }
    bool may = (capabilities >> 19 & 1) || scope == 0; /* CAP_SYS_PTRACE */
    if (may && !forced("ptrace"))
        found(d, MOK_FINDING_GOOD, "", "this process may take descriptors from others of its user (MoK itself sends them and does not need that)");
    else
        found(d, MOK_FINDING_WARNING, "only PyTorch's symmetric memory needs it: docker run --cap-add SYS_PTRACE, or ptrace_scope 0",
              "no ptrace rights (scope %d): MoK's own groups of processes work all the same", scope);
}

static void check_verdict(doctor *d)
{
    if (d->open == 0)
        found(d, d->host_sharing ? MOK_FINDING_WARNING : MOK_FINDING_BAD, d->host_sharing ? "for GPUs, see the checks above" : "see the checks above",
              "backend cpu works, with ranks as threads%s; backend cuda does not", d->host_sharing ? " or processes" : " (not as processes)");
    else
        found(d, d->pairs_reach && d->shares_fd && d->host_sharing ? MOK_FINDING_GOOD : MOK_FINDING_WARNING,
              d->pairs_reach && d->shares_fd && d->host_sharing ? "" : "see the checks above",
              "backend cuda works on %d device%s: virtual ranks on one%s%s%s%s", d->open, d->open > 1 ? "s" : "",
              d->count < 2 ? "" : d->pairs_reach ? "; ranks as threads with a device each" : "; NOT ranks with a device each",
              d->shares_fd && d->host_sharing ? "; ranks as processes by file descriptor" : "; NOT ranks as processes", d->shares_fabric ? "; over machines by fabric handle" : "",
              d->host_sharing ? "; backend cpu too" : "; backend cpu with ranks as threads");
}

static const struct { const char *name; void (*run)(doctor *); } checks[] = {
    {"library", check_library}, {"driver", check_driver}, {"devices", check_devices}, {"compute mode", check_compute_mode}, {"MIG", check_mig},
    {"memory in use", check_memory}, {"peer access", check_peers}, {"link rate", check_links}, {"fabric handles", check_fabric},
    {"descriptor handles", check_fd}, {"shared memory", check_shared_memory}, {"sockets", check_sockets}, {"ptrace rights", check_ptrace}, {"verdict", check_verdict},
};
enum { NUM_CHECKS = sizeof checks / sizeof *checks };

mok_status mok_doctor(mok_finding *findings, int32_t *count)
{
    doctor d;
    if (!count)
        return mk_fail(MOK_E_ARG, "count is NULL");
    int32_t room = *count;
    *count = NUM_CHECKS;
    if (!findings)
        return MOK_OK;
    if (room < NUM_CHECKS)
        return mk_fail(MOK_E_ARG, "there is room for %d findings, but there are %d", room, (int)NUM_CHECKS);
    memset(&d, 0, sizeof d);
    memset(findings, 0, sizeof *findings * NUM_CHECKS);
    for (int i = 0; i < NUM_CHECKS; i++) {
        d.finding = &findings[i];
        snprintf(d.finding->check, sizeof d.finding->check, "%s", checks[i].name);
        checks[i].run(&d);
    }
    for (int i = 0; i < d.count; i++)
        mk_cuda_device_close(d.device[i]);
    return MOK_OK;
}
