/* How many blocks a pass is launched with: those that stay, and those that make it possible that some leave in the middle (stage/yield.cuh). */
#include "cuda/host/state.h"

/* Blackwell: clusters ask so often in a pass whether somebody more important wants their SM. Hopper: so many leave in mok_config.yield_us, which makes 16 SMs. */
enum { LAUNCH_ROUNDS = 4, YIELD_CLUSTERS = 8, MOST_SPARE_CLUSTERS = 1 << 16 };
static const double slow_flops_per_ns = 3e3; /* of one SM: half of what an H200's does */

int64_t mk_cuda_resident_clusters(const mok_workspace *w, mk_cuda_kernel kernel)
{
    const mk_cuda_state *s = w->state;
    return mk_max(s->device->kernels.max_clusters[kernel] - s->reserve_clusters, 1);
}

/* Floating-point operations of this rank in a pass of so many products of [rows, H] and [H, I], under balanced routing. */
static double pass_flops(const mk_dims *d, int64_t num_tokens, int products)
{
    double tokens = (double)num_tokens, rows = tokens * (double)(d->topk * d->num_ranks * d->experts_count) / (double)d->num_experts;
    return 2.0 * products * (double)d->hidden * (rows * (double)d->intermediate + tokens * (double)d->shared_intermediate);
}

/* Hopper: as many clusters beyond those that fit as would leave if the GPU were half as fast as it is; those that are not needed find nothing to do. None in a pass
 * that is over soon anyway. */
static int64_t spare_clusters(const mk_yield_params *yield, mk_cuda_kernel kernel, double flops)
{
    double ns = flops / (slow_flops_per_ns * yield->num_resident * mk_cuda_kernel_shapes[kernel].cluster), period = (double)yield->interval_ns * YIELD_CLUSTERS;
    return ns < 4 * period ? 0 : mk_min((int64_t)(ns / yield->interval_ns), MOST_SPARE_CLUSTERS);
}

/* Those that come late would also take the SMs that are reserved; and of them nothing would be in a trace. */
int64_t mk_cuda_pass_blocks(const mok_workspace *w, mk_cuda_kernel kernel, int64_t num_tokens, int products, mk_yield_params *yield)
{
    const mk_cuda_state *s = w->state;
    int64_t resident = mk_cuda_resident_clusters(w, kernel), size = mk_cuda_kernel_shapes[kernel].cluster;
    int32_t us = w->config.yield_us;
    *yield = (mk_yield_params){.num_resident = (uint32_t)resident};
    if (us < 0 || (us == 0 && !s->device->blackwell) || s->reserve_clusters || s->rank.trace.memory)
        return resident * size;
    if (s->device->blackwell)
        return resident * size * LAUNCH_ROUNDS;
    yield->interval_ns = (uint32_t)us * 1000 / YIELD_CLUSTERS;
    int64_t spare = spare_clusters(yield, kernel, pass_flops(&w->dims, num_tokens, products));
    if (!spare)
        yield->interval_ns = 0;
    return (resident + spare) * size;
}
