/* Runs a policy at 50 Hz, as a robot's control loop would, and says how long its steps took.
 *
 *     txl-control conformance/bundles/policy-1 500
 *
 * The first input is made of a slow wave in place of sensors; a real loop would write what it measures, and send the
 * outputs to its actuators. Everything is prepared before the loop, and steps run on one thread. */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "txl.h"

enum { MOST = 16, PERIOD = 20000000 /* nanoseconds */ };

static size_t bytes_of(const txl_tensor *tensor) {
    size_t bytes = tensor->dtype == TXL_BOOL                                       ? 1
                   : tensor->dtype == TXL_FLOAT16 || tensor->dtype == TXL_BFLOAT16 ? 2
                                                                                   : 4;
    for (int axis = 0; axis < tensor->rank; ++axis) {
        const int64_t size = tensor->shape[axis];
        bytes *= (size_t)(size == TXL_SIZE_B ? 1 : size == TXL_SIZE_L ? 1 + tensor->lookahead : size);
    }
    return bytes;
}

static double microseconds(struct timespec from, struct timespec to) {
    return (double)(to.tv_sec - from.tv_sec) * 1e6 + (double)(to.tv_nsec - from.tv_nsec) / 1e3;
}

static int failed(const txl_error *error) {
    fprintf(stderr, "%s\n", error->message);
    return 2;
}

int main(int count, char **words) {
    if (count < 2) {
        fprintf(stderr, "usage: %s BUNDLE [STEPS]\n", words[0]);
        return 2;
    }
    const int steps = count > 2 ? atoi(words[2]) : 500;
    setenv("ORT_DISABLE_TELEMETRY", "1", 0); /* which newer builds of the engine look at when they are opened */
    txl_error error = TXL_NEW(txl_error);
    txl_load_options options = TXL_NEW(txl_load_options);
    options.threads = 1;
    txl_model *model = NULL;
    txl_stream *stream = NULL;
    if (txl_model_load(words[1], &options, &model, &error) || txl_stream_open(model, 1, -1, &stream, &error))
        return failed(&error);

    const size_t inputs = txl_model_count(model, TXL_INPUTS), outputs = txl_model_count(model, TXL_OUTPUTS);
    void *given[MOST] = {0}, *returned[MOST] = {0};
    size_t numbers = 0;
    for (size_t i = 0; i < inputs + outputs && i < MOST; ++i) {
        txl_tensor tensor = TXL_NEW(txl_tensor);
        const int input = i < inputs;
        if (txl_model_tensor(model, input ? TXL_INPUTS : TXL_OUTPUTS, input ? i : i - inputs, &tensor, &error))
            return failed(&error);
        *(input ? &given[i] : &returned[i - inputs]) = calloc(1, bytes_of(&tensor));
        if (i == 0 && tensor.dtype == TXL_FLOAT32) numbers = bytes_of(&tensor) / sizeof(float);
    }
    if (txl_stream_prepare(stream, &error)) return failed(&error);
    if (mlockall(MCL_CURRENT | MCL_FUTURE)) fprintf(stderr, "memory is not locked, a step may wait for a page\n");

    struct timespec due, began, ended;
    double worst = 0, sum = 0;
    clock_gettime(CLOCK_MONOTONIC, &due);
    for (int step = 0; step < steps; ++step) {
        due.tv_nsec += PERIOD;
        if (due.tv_nsec >= 1000000000) due.tv_nsec -= 1000000000, ++due.tv_sec;
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
        for (size_t i = 0; i < numbers; ++i) ((float *)given[0])[i] = (float)sin(0.05 * step + (double)i);
        clock_gettime(CLOCK_MONOTONIC, &began);
        if (txl_stream_run(stream, 1, (const void *const *)given, NULL, returned, 1, &error)) return failed(&error);
        clock_gettime(CLOCK_MONOTONIC, &ended);
        const double took = microseconds(began, ended);
        worst = took > worst ? took : worst, sum += took;
    }
    printf("%d steps, %.1f us on average, %.1f us at most\n", steps, steps ? sum / steps : 0, worst);
    txl_stream_free(stream);
    txl_model_free(model);
    for (size_t i = 0; i < MOST; ++i) free(given[i]), free(returned[i]);
    return 0;
}
