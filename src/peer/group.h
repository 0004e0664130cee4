/* A group's inside: who takes part, and the three collective functions behind everything that crosses ranks on the host. */
#ifndef MK_PEER_GROUP_H
#define MK_PEER_GROUP_H

#include "mok.h"

/* As mok_provider, but every function has written the sentence when it fails. timeout_ms bounds each wait, where the transport can. */
typedef struct mk_transport {
    mok_status (*all_gather)(mok_group *group, const void *send, void *recv, size_t bytes, int64_t timeout_ms);
    mok_status (*heap_alloc)(mok_group *group, size_t bytes, void **peers, int64_t timeout_ms);
    void (*heap_free)(mok_group *group, void *own);
    void (*close)(mok_group *group);
} mk_transport;

struct mok_group {
    int32_t rank, size;
    const mk_transport *transport;
    mok_provider provider;      /* transport of mok_group_create */
    struct mk_rendezvous *local;/* transport of mok_group_create_local */
};

/* peer/local.c */
extern const mk_transport mk_transport_local;

#endif
