/* Groups, and the transport that the caller provides. */
#include "peer/group.h"

#include <stdlib.h>

#include "base/error.h"
#include "layout/config.h"

static mok_status provider_all_gather(mok_group *g, const void *send, void *recv, size_t bytes, int64_t timeout_ms)
{
    (void)timeout_ms;
    int error = g->provider.all_gather(g->provider.user, send, recv, bytes);
    return error ? mk_fail(MOK_E_ENV, "the provider's all_gather of %zu bytes failed on rank %d with %d", bytes, g->rank, error) : MOK_OK;
}

static mok_status provider_heap_alloc(mok_group *g, size_t bytes, void **peers, int64_t timeout_ms)
{
    (void)timeout_ms;
    int error = g->provider.heap_alloc(g->provider.user, bytes, peers);
    if (error) {
        peers[g->rank] = NULL;
        return mk_fail(MOK_E_ENV, "the provider's heap_alloc of %zu bytes failed on rank %d with %d", bytes, g->rank, error);
    }
    for (int32_t r = 0; r < g->size; r++)
        if (!peers[r])
            return mk_fail(MOK_E_ENV, "the provider's heap_alloc gave rank %d no pointer to rank %d", g->rank, r);
    return MOK_OK;
}

static void provider_heap_free(mok_group *g, void *own) { g->provider.heap_free(g->provider.user, own); }
static void provider_abandon(mok_group *g) { (void)g; } /* whether its functions still work is for the provider to know */
static void provider_close(mok_group *g) { (void)g; }

static const mk_transport transport_provider = {provider_all_gather, provider_heap_alloc, provider_heap_free, provider_abandon, provider_close, NULL};

mok_status mok_group_create(const mok_provider *provider, int32_t rank, int32_t num_ranks, mok_group **group)
{
    mok_provider p;
    MK_TRY(mk_read_struct("mok_provider", provider, &p, sizeof p));
    if (!group)
        return mk_fail(MOK_E_ARG, "group is NULL: it must point to where the handle goes");
    if (num_ranks < 1 || rank < 0 || rank >= num_ranks)
        return mk_fail(MOK_E_ARG, "rank %d of %d ranks: it must be from 0 to num_ranks - 1", rank, num_ranks);
    if (!p.all_gather || !p.heap_alloc || !p.heap_free)
        return mk_fail(MOK_E_ARG, "mok_provider needs all_gather, heap_alloc and heap_free");
    mok_group *g = calloc(1, sizeof *g);
    if (!g)
        return mk_fail(MOK_E_MEMORY, "no memory for a group");
    g->rank = rank;
    g->size = num_ranks;
    g->transport = &transport_provider;
    g->provider = p;
    *group = g;
    return MOK_OK;
}

void mok_group_destroy(mok_group *group)
{
    if (!group)
        return;
    group->transport->close(group);
    mk_group_release_device(group);
    free(group);
}

int32_t mok_group_rank(const mok_group *group) { return group ? group->rank : -1; }
int32_t mok_group_size(const mok_group *group) { return group ? group->size : 0; }
