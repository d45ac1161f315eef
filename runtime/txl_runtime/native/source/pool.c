#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "vector.h"

enum {
    SPINS = 2000,      /* pauses before a thread that waits for the others gives its core away: about 50 µs */
    IDLE_SPINS = 4000, /* pauses before a thread that waits for the next step sleeps: about 0.1 ms */
};

struct worker {
    struct pool *pool;
    pthread_t thread;
    int number;
};

struct pool {
    int threads, started;
    pid_t process; /* that has the threads: a fork has none of them */
    int active; /* threads of this step: all, or one */
    void (*work)(void *, int);
    void *argument;
    atomic_int round, stop;         /* `round` counts the steps */
    atomic_int arrived, generation; /* of the meeting */
    pthread_mutex_t caller, lock;
    pthread_cond_t wake;
    struct worker *workers;
};

void pool_lock(struct pool *pool) { pthread_mutex_lock(&pool->caller); }
void pool_unlock(struct pool *pool) { pthread_mutex_unlock(&pool->caller); }

void pool_share(const struct pool *pool, int thread, int count, int *first, int *last) {
    *first = (int)((long long)count * thread / pool->active);
    *last = (int)((long long)count * (thread + 1) / pool->active);
}

void pool_meet(struct pool *pool) {
    int active = pool->active; /* read before this thread arrives: from then on the caller may start the next step */
    if (active == 1) return;
    int now = atomic_load(&pool->generation);
    if (atomic_fetch_add(&pool->arrived, 1) == active - 1) {
        atomic_store(&pool->arrived, 0);
        atomic_store(&pool->generation, (int)((unsigned)now + 1));
        return;
    }
    for (int spins = 0; atomic_load(&pool->generation) == now; spins++) {
        if (spins < SPINS) pause_briefly();
        else sched_yield();
    }
}

/* Wait for a step after `seen`; return whether there is one, rather than the end. */
static int next_round(struct pool *pool, int seen) {
    for (int spins = 0; spins < IDLE_SPINS; spins++) {
        if (atomic_load(&pool->round) != seen || atomic_load(&pool->stop)) break;
        pause_briefly();
    }
    pthread_mutex_lock(&pool->lock);
    while (atomic_load(&pool->round) == seen && !atomic_load(&pool->stop)) pthread_cond_wait(&pool->wake, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    return !atomic_load(&pool->stop);
}

static void *serve(void *given) {
    struct worker *worker = given;
    struct pool *pool = worker->pool;
    for (int seen = 0; next_round(pool, seen); seen = (int)((unsigned)seen + 1)) {
        pool->work(pool->argument, worker->number);
        pool_meet(pool);
    }
    return NULL;
}

void pool_run(struct pool *pool, void (*work)(void *, int), void *argument, int alone) {
    pool->active = alone || getpid() != pool->process ? 1 : pool->threads;
    if (pool->active > 1) {
        pthread_mutex_lock(&pool->lock);
        pool->work = work;
        pool->argument = argument;
        atomic_store(&pool->round, (int)((unsigned)atomic_load(&pool->round) + 1));
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
    }
    work(argument, 0);
    pool_meet(pool);
}

struct pool *pool_open(int threads) {
    struct pool *pool = calloc(1, sizeof *pool);
    struct worker *workers = calloc((size_t)threads, sizeof *workers);
    if (!pool || !workers) {
        free(pool);
        free(workers);
        return NULL;
    }
    pool->threads = threads;
    pool->process = getpid();
    pool->workers = workers;
    pthread_mutex_init(&pool->caller, NULL);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    for (int i = 1; i < threads; i++) {
        workers[i] = (struct worker){.pool = pool, .number = i};
        if (pthread_create(&workers[i].thread, NULL, serve, &workers[i])) {
            pool_close(pool);
            return NULL;
        }
        pool->started = i;
    }
    return pool;
}

void pool_close(struct pool *pool) {
    if (!pool) return;
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->stop, 1);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 1; i <= pool->started && getpid() == pool->process; i++) pthread_join(pool->workers[i].thread, NULL);
    pthread_mutex_destroy(&pool->caller);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->wake);
    free(pool->workers);
    free(pool);
}
