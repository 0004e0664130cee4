/* Groups of processes, one rank each. The library makes the symmetric memory itself: shared memory on the cpu backend, CUDA virtual memory on cuda;
 * what others need to map it travels over Unix sockets (mesh.h) between ranks of one machine. Ranks on several machines of one NVLink domain
 * exchange fabric handles through the caller's all-gather. */
#define _GNU_SOURCE /* memfd_create */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/error.h"
#include "cuda/host/vmm.h"
#include "layout/config.h"
#include "peer/group.h"
#include "peer/mesh.h"

/* One symmetric allocation: how to give it back. */
typedef struct shared_heap {
    struct shared_heap *next;
    size_t bytes;
    void **host;               /* [P] mappings of shared memory, or NULL */
    mk_vmm *device;            /* [P], or NULL */
    mk_cuda_device *on;        /* kept open for as long */
    void *own;
} shared_heap;

struct mk_processes {
    mk_mesh *mesh;             /* NULL: several machines, or alone */
    mok_bootstrap bootstrap;
    shared_heap *heaps;
};

/* --- meeting ------------------------------------------------------------------------------------------------------------ */
static mok_status call_bootstrap(const mok_group *g, const mok_bootstrap *b, const void *send, void *recv, size_t bytes)
{
    int error = b->all_gather(b->user, send, recv, bytes);
    return error ? mk_fail(MOK_E_ENV, "the bootstrap's all_gather of %zu bytes failed on rank %d with %d", bytes, g->rank, error) : MOK_OK;
}

static mok_status gather(mok_group *g, const void *send, void *recv, size_t bytes, int fd, int *fds, int64_t timeout_ms)
{
    struct mk_processes *p = g->processes;
    if (p->mesh)
        return mk_mesh_all_gather(p->mesh, send, recv, bytes, fd, fds, timeout_ms);
    if (g->size > 1)
        return call_bootstrap(g, &p->bootstrap, send, recv, bytes);
    memmove(recv, send, bytes);
    return MOK_OK;
}

static mok_status processes_all_gather(mok_group *g, const void *send, void *recv, size_t bytes, int64_t timeout_ms)
{
    return gather(g, send, recv, bytes, -1, NULL, timeout_ms);
}

static bool processes_gone(mok_group *g, int32_t rank) { return g->processes->mesh && mk_mesh_gone(g->processes->mesh, rank); }

static void processes_abandon(mok_group *g)
{
    if (g->processes->mesh)
        mk_mesh_leave(g->processes->mesh);
}

/* --- heaps -------------------------------------------------------------------------------------------------------------- */
/* What a rank tells the others about its part. */
typedef struct part {
    int32_t status;
    int32_t device;
    mk_handle_kind kind;
    unsigned char fabric[64];
    char host[64];
    char sentence[320];
} part;

static mok_status make_host_memory(const mok_group *g, size_t bytes, int *fd, void **own)
{
    *fd = memfd_create("mok heap", MFD_CLOEXEC);
    /* posix_fallocate takes the pages now: later there would be a signal in place of a sentence. */
    int error = *fd < 0 ? errno : posix_fallocate(*fd, 0, (off_t)bytes);
    *own = error ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (*own != MAP_FAILED)
        return MOK_OK;
    error = error ? error : errno;
    *own = NULL;
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
    return mk_fail(MOK_E_MEMORY, "rank %d could not get %zu bytes of shared memory: %s", g->rank, bytes, strerror(error));
}

/* Ranks of several machines can only share by fabric handle. MOK_HANDLE=fabric, fd: that kind, for tests and measurements. */
static mk_handle_kind handle_kind(const mok_group *g)
{
    const char *wish = getenv("MOK_HANDLE");
    if (wish && !strcmp(wish, "fabric"))
        return MK_HANDLE_FABRIC;
    return g->processes->mesh || g->size == 1 ? MK_HANDLE_FD : MK_HANDLE_FABRIC;
}

static mok_status make_device_memory(mok_group *g, shared_heap *h, part *mine, int *fd)
{
    mk_shareable share;
    MK_TRY(mk_cuda_enter(g->device));
    mok_status status = mk_vmm_create(g->device, h->bytes, handle_kind(g), &h->device[g->rank], &share);
    mk_cuda_leave(g->device);
    if (status != MOK_OK)
        return status;
    mine->kind = share.kind;
    memcpy(mine->fabric, share.fabric, sizeof mine->fabric);
    *fd = share.fd;
    return MOK_OK;
}

static mok_status make_own(mok_group *g, shared_heap *h, part *mine, int *fd)
{
    if (g->on_device)
        return make_device_memory(g, h, mine, fd);
    if (!g->processes->mesh && g->size > 1)
        return mk_fail(MOK_E_UNSUPPORTED, "rank %d: the ranks of this group are on several machines, and backend cpu shares memory on one only", g->rank);
    return make_host_memory(g, h->bytes, fd, &h->host[g->rank]);
}

static const char no_descriptor[] = "no descriptor came, as this process may hold no more of them (ulimit -n)";

static mok_status map_host(shared_heap *h, const mok_group *g, int32_t r, int fd)
{
    void *at = fd < 0 ? MAP_FAILED : mmap(NULL, h->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        return mk_fail(MOK_E_MEMORY, "rank %d could not map the %zu bytes of rank %d: %s", g->rank, h->bytes, r, fd < 0 ? no_descriptor : strerror(errno));
    h->host[r] = at;
    return MOK_OK;
}

static mok_status map_device(shared_heap *h, const mok_group *g, int32_t r, const part *its, int fd)
{
    mk_shareable share = {.kind = its->kind, .fd = fd};
    char why[300];
    memcpy(share.fabric, its->fabric, sizeof share.fabric);
    MK_TRY(mk_cuda_enter(g->device));
    mok_status status = its->kind == MK_HANDLE_FD && fd < 0 ? mk_fail(MOK_E_MEMORY, "%s", no_descriptor)
                                                            : mk_vmm_import(g->device, h->bytes, &share, &h->device[r]);
    mk_cuda_leave(g->device);
    if (status == MOK_OK)
        return MOK_OK;
    snprintf(why, sizeof why, "%s", mok_last_error());
    return mk_fail(status, "rank %d (device %d) cannot map the memory of rank %d (%s, device %d): %s; `mok doctor` says what works here", g->rank,
                   g->device->ordinal, r, its->host, its->device, why);
}

/* A rank that has no part of its own says so itself, to all (mok_workspace_create); the others keep quiet, so that its sentence is heard. */
static mok_status map_peers(mok_group *g, shared_heap *h, const part *all, const int *fds)
{
    if (all[g->rank].status != MOK_OK)
        return mk_fail((mok_status)all[g->rank].status, "%s", all[g->rank].sentence);
    for (int32_t r = 0; r < g->size; r++)
        if (all[r].status != MOK_OK)
            return MOK_OK;
    for (int32_t r = 0; r < g->size; r++)
        if (r != g->rank)
            MK_TRY(g->on_device ? map_device(h, g, r, &all[r], fds[r]) : map_host(h, g, r, fds[r]));
    return MOK_OK;
}

static void free_heap(mok_group *g, shared_heap *h)
{
    for (int32_t r = 0; h->host && r < g->size; r++)
        if (h->host[r])
            munmap(h->host[r], h->bytes);
    if (h->device && mk_cuda_enter(h->on) == MOK_OK) {
        for (int32_t r = 0; r < g->size; r++)
            mk_vmm_free(h->on, &h->device[r]);
        mk_cuda_leave(h->on);
    }
    mk_cuda_device_close(h->on);
    free(h->host);
    free(h->device);
    free(h);
}

/* Everybody's part made, sent and mapped. A rank that fails tells the others, so that nobody waits. */
static mok_status share_parts(mok_group *g, shared_heap *h, part *all, int *fds, int64_t timeout_ms)
{
    part mine;
    int fd = -1;
    memset(&mine, 0, sizeof mine);
    gethostname(mine.host, sizeof mine.host - 1);
    mine.device = g->on_device ? g->device->ordinal : -1;
    mine.status = (int32_t)make_own(g, h, &mine, &fd);
    if (mine.status != MOK_OK)
        snprintf(mine.sentence, sizeof mine.sentence, "%s", mok_last_error());
    mok_status status = gather(g, &mine, all, sizeof mine, fd, fds, timeout_ms);
    if (fd >= 0)
        close(fd);
    return status == MOK_OK ? map_peers(g, h, all, fds) : status;
}

static mok_status processes_heap_alloc(mok_group *g, size_t bytes, void **peers, int64_t timeout_ms)
{
    size_t ranks = (size_t)g->size;
    shared_heap *h = calloc(1, sizeof *h);
    part *all = calloc(ranks, sizeof *all);
    int *fds = malloc(ranks * sizeof *fds);
    peers[g->rank] = NULL;
    for (size_t r = 0; fds && r < ranks; r++)
        fds[r] = -1;
    if (h && g->on_device)
        h->device = calloc(ranks, sizeof *h->device);
    else if (h)
        h->host = calloc(ranks, sizeof *h->host);
    mok_status status = h && all && fds && (h->device || h->host) ? MOK_OK : mk_fail(MOK_E_MEMORY, "no memory for a heap of %d ranks", g->size);
    if (status == MOK_OK) {
        h->bytes = bytes ? bytes : 1;
        h->on = g->on_device ? mk_group_share_device(g) : NULL;
        status = share_parts(g, h, all, fds, timeout_ms);
    }
    for (size_t r = 0; fds && r < ranks; r++)
        if (fds[r] >= 0)
            close(fds[r]);
    for (int32_t r = 0; status == MOK_OK && r < g->size; r++)
        peers[r] = h->device ? (void *)(uintptr_t)h->device[r].address : h->host[r];
    if (status == MOK_OK) {
        h->own = peers[g->rank];
        h->next = g->processes->heaps;
        g->processes->heaps = h;
    } else if (h) {
        free_heap(g, h);
    }
    free(all);
    free(fds);
    return status;
}

static void processes_heap_free(mok_group *g, void *own)
{
    for (shared_heap **at = &g->processes->heaps; *at; at = &(*at)->next)
        if ((*at)->own == own) {
            shared_heap *h = *at;
            *at = h->next;
            free_heap(g, h);
            return;
        }
}

static void processes_close(mok_group *g)
{
    mk_mesh_close(g->processes->mesh);
    free(g->processes);
}

static const mk_transport transport_processes = {processes_all_gather, processes_heap_alloc, processes_heap_free, processes_abandon, processes_close,
                                                 processes_gone};

/* --- creation ----------------------------------------------------------------------------------------------------------- */
/* What ranks tell each other first. */
typedef struct introduction {
    mk_address address;
    int32_t status, size;
    char sentence[256];
} introduction;

/* The same verdict on all ranks. *one_machine: all can reach each other's sockets. */
static mok_status judge(const introduction *all, int32_t num_ranks, bool *one_machine)
{
    *one_machine = true;
    for (int32_t r = 0; r < num_ranks; r++)
        if (all[r].status != MOK_OK)
            return mk_fail((mok_status)all[r].status, "rank %d: %s", r, all[r].sentence);
    for (int32_t r = 0; r < num_ranks; r++) {
        const mk_address *zero = &all[0].address, *a = &all[r].address;
        if (all[r].size != all[0].size)
            return mk_fail(MOK_E_MISMATCH, "num_ranks is %d on rank 0, but %d on rank %d", all[0].size, all[r].size, r);
        if (a->machine == zero->machine && a->network != zero->network)
            return mk_fail(MOK_E_ENV, "ranks 0 (process %d) and %d (process %d) are on one machine (%s), but in containers with networks of their own: give them "
                                      "one network (docker run --network), or run them in one container", zero->pid, r, a->pid, a->host);
        *one_machine &= a->machine == zero->machine;
    }
    return MOK_OK;
}

static mok_status introduce(mok_group *g, const mok_bootstrap *b, int64_t timeout_ms)
{
    introduction mine, *all = calloc((size_t)g->size, sizeof *all);
    mk_address *addresses = calloc((size_t)g->size, sizeof *addresses);
    bool one_machine = false;
    memset(&mine, 0, sizeof mine);
    mine.size = g->size;
    mok_status status = b->set_device ? mk_group_choose_device(g, b->device) : MOK_OK;
    if (status == MOK_OK)
        status = all && addresses ? mk_mesh_listen(g->rank, g->size, &g->processes->mesh, &mine.address) : mk_fail(MOK_E_MEMORY, "no memory for a group of %d ranks", g->size);
    mine.status = (int32_t)status;
    if (status != MOK_OK)
        snprintf(mine.sentence, sizeof mine.sentence, "%s", mok_last_error());
    if (all && addresses) { /* a rank that has failed comes all the same */
        status = call_bootstrap(g, b, &mine, all, sizeof mine);
        if (status == MOK_OK)
            status = judge(all, g->size, &one_machine);
        for (int32_t r = 0; status == MOK_OK && r < g->size; r++)
            addresses[r] = all[r].address;
        if (status == MOK_OK && one_machine)
            status = mk_mesh_connect(g->processes->mesh, addresses, timeout_ms);
        if (status == MOK_OK && !one_machine) {
            mk_mesh_close(g->processes->mesh);
            g->processes->mesh = NULL;
        }
    }
    free(all);
    free(addresses);
    return status;
}

mok_status mok_group_create_processes(const mok_bootstrap *bootstrap, int32_t rank, int32_t num_ranks, mok_group **group)
{
    mok_bootstrap b;
    MK_TRY(mk_read_struct("mok_bootstrap", bootstrap, &b, sizeof b));
    if (!group)
        return mk_fail(MOK_E_ARG, "group is NULL: it must point to where the handle goes");
    if (num_ranks < 1 || num_ranks > 4096 || rank < 0 || rank >= num_ranks)
        return mk_fail(MOK_E_ARG, "rank %d of %d ranks: it must be from 0 to num_ranks - 1, of at most 4096", rank, num_ranks);
    if (!b.all_gather && num_ranks > 1)
        return mk_fail(MOK_E_ARG, "mok_bootstrap needs all_gather");
    MK_TRY(mk_timeout("mok_bootstrap.timeout_ms", b.timeout_ms, &b.timeout_ms));
    mok_group *g = calloc(1, sizeof *g);
    struct mk_processes *p = calloc(1, sizeof *p);
    if (!g || !p) {
        free(g);
        free(p);
        return mk_fail(MOK_E_MEMORY, "no memory for a group");
    }
    *g = (mok_group){.rank = rank, .size = num_ranks, .transport = &transport_processes, .processes = p};
    p->bootstrap = b;
    mok_status status = num_ranks > 1 ? introduce(g, &b, b.timeout_ms) : b.set_device ? mk_group_choose_device(g, b.device) : MOK_OK;
    if (status == MOK_OK)
        *group = g;
    else
        mok_group_destroy(g);
    return status;
}
