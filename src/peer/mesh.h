/* Processes of one machine, each connected with each by a Unix socket: a bounded all-gather that names who is missing, and notices at once when a
 * process ends. File descriptors travel along. */
#ifndef MK_PEER_MESH_H
#define MK_PEER_MESH_H

#include "mok.h"

typedef struct mk_mesh mk_mesh;

/* Where a rank can be reached: exchanged by the caller's bootstrap. Plain bytes. */
typedef struct mk_address {
    uint64_t machine, network; /* the kernel's boot, and the network namespace: equal on ranks that can connect */
    uint64_t secret;           /* who connects must know it */
    char name[48];             /* of the socket, in the abstract namespace */
    char host[64];             /* for sentences */
    int32_t pid;
} mk_address;

/* Opens this rank's socket. */
mok_status mk_mesh_listen(int32_t rank, int32_t num_ranks, mk_mesh **mesh, mk_address *address);
/* Connects with all: blocks until every rank has called it, at most timeout_ms. Afterwards nobody else can connect. */
mok_status mk_mesh_connect(mk_mesh *mesh, const mk_address *all, int64_t timeout_ms);

/* Every rank's `bytes` bytes, in rank order, into `recv` of all. fd: one more thing for each peer, -1: none; fds[r] receives rank r's (own:
 * untouched; the caller closes them) or -1, and may be NULL if nobody sends any. MOK_E_MISMATCH on all ranks if sizes differ. MOK_E_TIMEOUT names
 * the missing; then, and once a peer has left, the mesh is broken for good and every later call says so at once. */
mok_status mk_mesh_all_gather(mk_mesh *mesh, const void *send, void *recv, size_t bytes, int fd, int *fds, int64_t timeout_ms);

/* Has the process of `rank` ended, or left the mesh? A look, no wait. */
bool mk_mesh_gone(mk_mesh *mesh, int32_t rank);

/* Leaves: the others' waits end with a sentence that passes on whom this rank was waiting for. Idempotent. */
void mk_mesh_leave(mk_mesh *mesh);
void mk_mesh_close(mk_mesh *mesh); /* NULL is allowed */

#endif
