/* A group's inside: who takes part, and the three collective functions behind everything that crosses ranks on the host. */
#ifndef MK_PEER_GROUP_H
#define MK_PEER_GROUP_H

#include "mok.h"

/* As mok_provider, but every function has written the sentence when it fails. timeout_ms bounds each wait, where the transport can. */
typedef struct mk_transport {
    mok_status (*all_gather)(mok_group *group, const void *send, void *recv, size_t bytes, int64_t timeout_ms);
    /* After a failure peers[own rank] is what heap_free must still be called for, or NULL. Where another rank has failed, peers may be NULL: the
     * caller compares statuses next. */
    mok_status (*heap_alloc)(mok_group *group, size_t bytes, void **peers, int64_t timeout_ms);
    void (*heap_free)(mok_group *group, void *own);
    /* This rank leaves a workspace without waiting for the others: from here on no rank of the group waits at a rendezvous. */
    void (*abandon)(mok_group *group);
    void (*close)(mok_group *group);
    /* Is it known that `rank` will never come? A look, no wait. NULL: such a transport does not know. */
    bool (*gone)(mok_group *group, int32_t rank);
} mk_transport;

struct mok_group {
    int32_t rank, size;
    const mk_transport *transport;
    mok_provider provider;      /* transport of mok_group_create */
    struct mk_rendezvous *local;/* transport of mok_group_create_local */
    struct mk_processes *processes; /* transport of mok_group_create_processes */
    bool on_device;             /* heaps are to be device memory (of `device`); mok_workspace_create says so before each */
    mok_workspace *workspaces;  /* that are alive */
    bool chose_device;          /* `device` is the caller's wish, which MOK_BACKEND_AUTO follows */
    uint32_t num_created;       /* workspaces so far */
    struct mk_cuda_device *device; /* this rank's GPU, or NULL; the handle's own use of it */
};

/* peer/local.c */
extern const mk_transport mk_transport_local;

/* peer/devices.c: a GPU for every handle, ranks[r] on devices[r], all reaching each other. On failure no handle has one. */
mok_status mk_group_use_devices(mok_group *const *ranks, const int32_t *devices, int32_t num_ranks);
/* This rank's GPU is `ordinal`, because the caller says so. */
mok_status mk_group_choose_device(mok_group *group, int32_t ordinal);
/* A group of a caller's provider: the GPU that is current in this thread. Nothing happens if the handle has one. */
mok_status mk_group_use_current_device(mok_group *group);
void mk_group_release_device(mok_group *group);
/* Another use of the group's device, to be released by whoever keeps it; NULL without a device. */
struct mk_cuda_device *mk_group_share_device(const mok_group *group);
/* Zeroed device memory of a rank, NULL if there is none. */
void *mk_group_device_alloc(const mok_group *group, size_t bytes);
void mk_group_device_free(const mok_group *group, void *memory);

#endif
