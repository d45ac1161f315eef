/* Preloaded: counts every allocation, release and lock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>

unsigned long counted_calls;
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void __libc_free(void *);

void *malloc(size_t bytes) { counted_calls++; return __libc_malloc(bytes); }
void *calloc(size_t count, size_t bytes) { counted_calls++; return __libc_calloc(count, bytes); }
void *realloc(void *old, size_t bytes) { counted_calls++; return __libc_realloc(old, bytes); }
void free(void *old) { counted_calls++; __libc_free(old); }

int pthread_mutex_lock(pthread_mutex_t *lock)
{
    static int (*real)(pthread_mutex_t *);
    if (!real)
        real = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_lock");
    counted_calls++;
    return real(lock);
}
