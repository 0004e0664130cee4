/* A group of processes from an NCCL communicator, for programs that have one: copy this into yours. NCCL moves device memory, so the bytes of the
 * library's introduction go over the GPU and back. Needs nccl.h and the CUDA runtime.
 *
 *   nccl_bootstrap n = {comm, stream, rank, ranks};
 *   mok_bootstrap b = MOK_INIT(mok_bootstrap);
 *   b.user = &n;
 *   b.all_gather = nccl_bootstrap_all_gather;
 *   b.set_device = true;
 *   b.device = device;
 *   mok_group_create_processes(&b, rank, ranks, &group);
 *
 * On one machine all_gather is called in mok_group_create_processes only, and `n` may go afterwards. */
#ifndef NCCL_BOOTSTRAP_H
#define NCCL_BOOTSTRAP_H

#include <cuda_runtime_api.h>
#include <mok.h>
#include <nccl.h>

typedef struct nccl_bootstrap {
    ncclComm_t comm;
    cudaStream_t stream;
    int rank, ranks;
} nccl_bootstrap;

/* 0, or an error of the CUDA runtime (positive) or of NCCL (negative). */
static inline int nccl_bootstrap_all_gather(void *user, const void *send, void *recv, size_t bytes)
{
    nccl_bootstrap *n = (nccl_bootstrap *)user;
    char *all = NULL;
    cudaError_t error = cudaMalloc((void **)&all, bytes * (size_t)n->ranks);
    if (error != cudaSuccess)
        return (int)error;
    char *mine = all + bytes * (size_t)n->rank;
    error = cudaMemcpyAsync(mine, send, bytes, cudaMemcpyHostToDevice, n->stream);
    ncclResult_t result = error == cudaSuccess ? ncclAllGather(mine, all, bytes, ncclInt8, n->comm, n->stream) : ncclSuccess;
    if (error == cudaSuccess && result == ncclSuccess)
        error = cudaMemcpyAsync(recv, all, bytes * (size_t)n->ranks, cudaMemcpyDeviceToHost, n->stream);
    cudaError_t done = cudaStreamSynchronize(n->stream);
    cudaFree(all);
    return result != ncclSuccess ? -(int)result : error != cudaSuccess ? (int)error : (int)done;
}

#endif
