/* Runs a policy at 50 Hz in its own thread, like a robot's control loop, and prints how late its steps were.
 *
 *     txl-control conformance/bundles/policy-1 500 100
 *
 * There are 500 observations; every hundredth begins an episode. The main thread stands for the rest of the robot: it
 * sends a slow wave in place of sensor values, and takes actions. It shares only two rings of messages with the control
 * thread, so neither waits for the other. A policy with a memory has to see every observation in order: the control
 * thread runs all that came since its last period, and resets are messages among them. Everything is prepared before
 * the loop, and the engine runs only on the control thread. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "txl.h"

enum { MOST = 16, NUMBERS = 64, ROOM = 128 /* messages; a power of two */, PERIOD = 20000000 /* nanoseconds */ };

typedef struct {
    enum { GO_ON, BEGIN, END } kind; /* BEGIN: the first observation of an episode */
    float numbers[NUMBERS];
} message;

/* A queue for one thread that puts and one that takes. Each writes only its own count, with release order, so the other
 * sees the messages written before. */
typedef struct {
    message messages[ROOM];
    _Alignas(64) atomic_uint put; /* the counts lie in different cache lines, so the threads do not slow each other */
    _Alignas(64) atomic_uint taken;
} ring;

static int ring_put(ring *to, const message *from) {
    const unsigned at = atomic_load_explicit(&to->put, memory_order_relaxed);
    if (at - atomic_load_explicit(&to->taken, memory_order_acquire) == ROOM) return 0; /* full */
    to->messages[at % ROOM] = *from;
    atomic_store_explicit(&to->put, at + 1, memory_order_release);
    return 1;
}

static int ring_take(ring *from, message *to) {
    const unsigned at = atomic_load_explicit(&from->taken, memory_order_relaxed);
    if (at == atomic_load_explicit(&from->put, memory_order_acquire)) return 0; /* empty */
    *to = from->messages[at % ROOM];
    atomic_store_explicit(&from->taken, at + 1, memory_order_release);
    return 1;
}

typedef struct {
    txl_stream *stream;
    void *given[MOST], *returned[MOST];
    size_t sees, acts; /* numbers of the first input and of the first output */
    ring observations, actions;
    atomic_int over;
    /* The control thread writes these; main reads them after its end. */
    int steps, resets, periods, missed, lost, failed;
    double late, latest, took, longest; /* microseconds: sums and maxima */
    txl_error error;
} control;

static double microseconds(struct timespec from, struct timespec to) {
    return (double)(to.tv_sec - from.tv_sec) * 1e6 + (double)(to.tv_nsec - from.tv_nsec) / 1e3;
}

static void later(struct timespec *time, long nanoseconds) {
    time->tv_nsec += nanoseconds;
    if (time->tv_nsec >= 1000000000) time->tv_nsec -= 1000000000, ++time->tv_sec;
}

/* Run all messages that have come; return 0 after END or a failure, 1 if more may come. */
static int run_all(control *self) {
    for (message seen; ring_take(&self->observations, &seen);) {
        if (seen.kind == END) return 0;
        if (seen.kind == BEGIN && ++self->resets && txl_stream_reset(self->stream, NULL, &self->error))
            return self->failed = 1, 0;
        for (size_t i = 0; i < self->sees; ++i) ((float *)self->given[0])[i] = seen.numbers[i];
        struct timespec began, ended;
        clock_gettime(CLOCK_MONOTONIC, &began);
        if (txl_stream_run(self->stream, 1, (const void *const *)self->given, NULL, self->returned, 1, &self->error))
            return self->failed = 1, 0;
        clock_gettime(CLOCK_MONOTONIC, &ended);
        const double took = microseconds(began, ended);
        self->took += took, self->longest = took > self->longest ? took : self->longest, ++self->steps;
        message action = {GO_ON, {0}};
        for (size_t i = 0; i < self->acts; ++i) action.numbers[i] = ((float *)self->returned[0])[i];
        self->lost += !ring_put(&self->actions, &action); /* the ring is full: the main thread is too slow */
    }
    return 1;
}

static void *run(void *argument) {
    control *self = argument;
    struct timespec due, now;
    clock_gettime(CLOCK_MONOTONIC, &due);
    for (int more = 1; more; ++self->periods) {
        later(&due, PERIOD);
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
        clock_gettime(CLOCK_MONOTONIC, &now);
        const double late = microseconds(due, now);
        self->late += late, self->latest = late > self->latest ? late : self->latest;
        more = run_all(self);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (microseconds(due, now) < PERIOD / 1e3) continue;
        ++self->missed; /* the step ended after the next one was due: periods are counted from now */
        due = now;
    }
    atomic_store(&self->over, 1);
    return NULL;
}

/* Allocate arrays for a table; return the numbers in the first one, 0 if it is not float32 or has more than NUMBERS. */
static size_t make_arrays(const txl_model *model, txl_table table, void **arrays, txl_error *error) {
    size_t numbers = 0;
    for (size_t i = 0; i < txl_model_count(model, table) && i < MOST; ++i) {
        txl_tensor tensor = TXL_NEW(txl_tensor);
        if (txl_model_tensor(model, table, i, &tensor, error)) return 0;
        arrays[i] = calloc(1, txl_tensor_bytes(&tensor, 1, 1));
        if (i == 0 && tensor.dtype == TXL_FLOAT32) numbers = txl_tensor_bytes(&tensor, 1, 1) / sizeof(float);
    }
    return numbers <= NUMBERS ? numbers : 0;
}

static int failed(const char *said) {
    fprintf(stderr, "%s\n", said);
    return 2;
}

int main(int count, char **words) {
    if (count < 2) return fprintf(stderr, "usage: %s BUNDLE [OBSERVATIONS [PER EPISODE]]\n", words[0]), 2;
    const int observations = count > 2 ? atoi(words[2]) : 500, episode = count > 3 ? atoi(words[3]) : 100;
    setenv("ORT_DISABLE_TELEMETRY", "1", 0); /* newer builds of the engine read it when they are opened */
    txl_load_options options = TXL_NEW(txl_load_options);
    options.threads = 1;
    static txl_model *model; /* after a failure the end of the process frees model and stream */
    static control self = {.error = TXL_NEW(txl_error)};
    if (txl_model_load(words[1], &options, &model, &self.error) ||
        txl_stream_open(model, 1, -1, &self.stream, &self.error))
        return failed(self.error.message);
    self.sees = make_arrays(model, TXL_INPUTS, self.given, &self.error);
    self.acts = make_arrays(model, TXL_OUTPUTS, self.returned, &self.error);
    if (!self.sees || !self.acts || txl_model_count(model, TXL_INPUTS) > MOST)
        return failed("this loop is for models whose first input and output are a few numbers; take another bundle");
    if (txl_stream_prepare(self.stream, &self.error)) return failed(self.error.message);
    if (mlockall(MCL_CURRENT | MCL_FUTURE)) fprintf(stderr, "memory is not locked, a step may wait for a page\n");

    pthread_t thread;
    if (pthread_create(&thread, NULL, run, &self)) return failed("a thread cannot be started");
    const struct sched_param priority = {.sched_priority = sched_get_priority_min(SCHED_FIFO)};
    if (pthread_setschedparam(thread, SCHED_FIFO, &priority))
        fprintf(stderr, "the control thread is not put first, other threads may make it late\n");
    struct timespec due;
    clock_gettime(CLOCK_MONOTONIC, &due);
    int overrun = 0, taken = 0;
    message action = {GO_ON, {0}};
    for (int n = 0; n <= observations && !atomic_load(&self.over); ++n) {
        later(&due, PERIOD);
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
        message seen = {n == observations ? END : episode > 0 && n % episode == 0 ? BEGIN : GO_ON, {0}};
        for (size_t i = 0; i < self.sees; ++i) seen.numbers[i] = (float)sin(0.05 * n + (double)i);
        while (!ring_put(&self.observations, &seen) && ++overrun && seen.kind == END && !atomic_load(&self.over))
            clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){0, PERIOD}, NULL);
        while (ring_take(&self.actions, &action)) ++taken;
    }
    pthread_join(thread, NULL);
    while (ring_take(&self.actions, &action)) ++taken;
    if (self.failed) return failed(self.error.message);

    printf("%d steps, %d resets, %d observations and %d actions lost\n", self.steps, self.resets, overrun, self.lost);
    printf("a step took %.1f us on average, %.1f us at most\n", self.steps ? self.took / self.steps : 0, self.longest);
    printf("%d periods began %.1f us late on average, %.1f us at most; %d of them ended too late\n", self.periods,
           self.late / self.periods, self.latest, self.missed);
    printf("%d actions, the last one", taken);
    for (size_t i = 0; i < self.acts; ++i) printf(" %.9g", (double)action.numbers[i]);
    printf("\n");
    txl_stream_free(self.stream);
    txl_model_free(model);
    for (size_t i = 0; i < MOST; ++i) free(self.given[i]), free(self.returned[i]);
    return 0;
}
