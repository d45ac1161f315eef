/* Runs a policy at 50 Hz in a thread of its own, as a robot's control loop would, and says how well it kept its times.
 *
 *     txl-control conformance/bundles/policy-1 500 100
 *
 * 500 observations, of which every hundredth begins an episode. The main thread stands for the rest of the robot: it
 * sends a slow wave in place of what sensors measure, and takes actions. It and the control thread share two rings of
 * messages and nothing else, so neither ever waits for the other. A policy with a memory has to see every observation
 * in its order: the control thread runs all that have come since its last period, and resets travel among them.
 * Everything is prepared before the loop, and the engine runs on the control thread alone. */
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

/* One thread puts, one takes. Each writes its own count alone, and what it wrote before is seen with it. */
typedef struct {
    message messages[ROOM];
    _Alignas(64) atomic_uint put; /* apart from each other, so that the threads do not share a line of a cache */
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
    /* Written by the control thread, read when it has ended. */
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

/* What is sent, one after the other; whether there may be more. */
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
        self->lost += !ring_put(&self->actions, &action); /* nobody takes them */
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
        ++self->missed; /* what is due next is over: the periods go on from here */
        due = now;
    }
    atomic_store(&self->over, 1);
    return NULL;
}

/* Arrays for a table; how many numbers the first one has, 0 where it holds something else or too many. */
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
    setenv("ORT_DISABLE_TELEMETRY", "1", 0); /* which newer builds of the engine look at when they are opened */
    txl_load_options options = TXL_NEW(txl_load_options);
    options.threads = 1;
    static txl_model *model; /* where something fails, the end of the process frees both */
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
