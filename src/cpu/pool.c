#include "cpu/pool.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

typedef struct { mk_pool *pool; int32_t index; pthread_t thread; } pool_worker;

struct mk_pool {
    pthread_mutex_t lock;
    pthread_cond_t start, finish;
    int32_t num_workers, running;
    uint64_t round;
    bool closing;
    void (*job)(void *, int32_t);
    void *argument;
    pool_worker *workers; /* [num_workers]; 0 is the caller and has no thread */
};

static void *worker_main(void *argument)
{
    pool_worker *self = argument;
    mk_pool *pool = self->pool;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->round == seen && !pool->closing)
            pthread_cond_wait(&pool->start, &pool->lock);
        if (pool->closing)
            break;
        seen = pool->round;
        pthread_mutex_unlock(&pool->lock);
        pool->job(pool->argument, self->index);
        pthread_mutex_lock(&pool->lock);
        if (--pool->running == 0)
            pthread_cond_signal(&pool->finish);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static void pool_close(mk_pool *pool, int32_t started)
{
    pthread_mutex_lock(&pool->lock);
    pool->closing = true;
    pthread_cond_broadcast(&pool->start);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 1; i < started; i++)
        pthread_join(pool->workers[i].thread, NULL);
    pthread_cond_destroy(&pool->start);
    pthread_cond_destroy(&pool->finish);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}

mk_pool *mk_pool_create(int32_t num_workers)
{
    mk_pool *pool = calloc(1, sizeof *pool);
    pool_worker *workers = calloc((size_t)num_workers, sizeof *workers);
    if (!pool || !workers) {
        free(pool);
        free(workers);
        return NULL;
    }
    pool->num_workers = num_workers;
    pool->workers = workers;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->start, NULL);
    pthread_cond_init(&pool->finish, NULL);
    for (int32_t i = 1; i < num_workers; i++) {
        workers[i].pool = pool;
        workers[i].index = i;
        if (pthread_create(&workers[i].thread, NULL, worker_main, &workers[i])) {
            pool_close(pool, i);
            return NULL;
        }
    }
    return pool;
}

void mk_pool_destroy(mk_pool *pool)
{
    if (pool)
        pool_close(pool, pool->num_workers);
}

int32_t mk_pool_size(const mk_pool *pool) { return pool->num_workers; }

void mk_pool_run(mk_pool *pool, void (*job)(void *, int32_t), void *argument)
{
    pthread_mutex_lock(&pool->lock);
    pool->job = job;
    pool->argument = argument;
    pool->running = pool->num_workers - 1;
    pool->round++;
    pthread_cond_broadcast(&pool->start);
    pthread_mutex_unlock(&pool->lock);
    job(argument, 0);
    pthread_mutex_lock(&pool->lock);
    while (pool->running)
        pthread_cond_wait(&pool->finish, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}
