/* The threads of one rank on the CPU backend: the caller is worker 0, the others sleep between jobs. */
#ifndef MK_CPU_POOL_H
#define MK_CPU_POOL_H

#include <stdint.h>

typedef struct mk_pool mk_pool;
/* NULL if threads cannot be had. */
mk_pool *mk_pool_create(int32_t num_workers);
void mk_pool_destroy(mk_pool *pool);
int32_t mk_pool_size(const mk_pool *pool);
/* Every worker runs job(argument, worker); returns when all have. */
void mk_pool_run(mk_pool *pool, void (*job)(void *argument, int32_t worker), void *argument);

#endif
