/* Threads that compute one step together and sleep between steps. */
#ifndef TXL_POOL_H
#define TXL_POOL_H

struct pool;

#ifdef TXL_ALONE /* in a package: one thread, which nobody else shares */

static inline void pool_lock(struct pool *pool) { (void)pool; }
static inline void pool_unlock(struct pool *pool) { (void)pool; }
static inline void pool_run(struct pool *pool, void (*work)(void *argument, int thread), void *argument, int alone) {
    (void)pool, (void)alone;
    work(argument, 0);
}
static inline void pool_meet(struct pool *pool) { (void)pool; }
static inline void pool_share(const struct pool *pool, int thread, int count, int *first, int *last) {
    (void)pool, (void)thread;
    *first = 0;
    *last = count;
}

#else

/* A pool of `threads` threads, of which the caller is one; NULL if the system gives no more. */
struct pool *pool_open(int threads);
void pool_close(struct pool *pool);

/* Keep other callers out until pool_unlock. */
void pool_lock(struct pool *pool);
void pool_unlock(struct pool *pool);

/* Call work(argument, thread) in every thread, or in the caller alone, and return when all have ended. The caller holds
 * the pool's lock. */
void pool_run(struct pool *pool, void (*work)(void *argument, int thread), void *argument, int alone);

/* Wait inside `work` until every thread has come here. */
void pool_meet(struct pool *pool);

/* The part [*first, *last) of `count` things that a thread does. */
void pool_share(const struct pool *pool, int thread, int count, int *first, int *last);

#endif
#endif
