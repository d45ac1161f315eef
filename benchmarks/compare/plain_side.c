/* The side of plain C in plain_against_library.py; it answers as c_side.cpp does. A segment is as long as the package's.
 *
 *     plain_side WEIGHTS         one line of input, {"positions": T, "calls": n}, one line of output
 *
 * glue.h has the package's header, inputs as arrays, and STEP, which calls the step with them. */
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "glue.h"

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

int main(int count, char **words)
{
    char *weights = malloc(WEIGHTS + 1);
    FILE *file = count > 1 ? fopen(words[1], "rb") : NULL;
    if (!weights || !file || fread(weights, 1, WEIGHTS, file) != WEIGHTS)
        return fprintf(stderr, "no weights of %lu bytes\n", (unsigned long)WEIGHTS), 2;
    INIT(weights);
    char line[100];
    for (int positions, calls; fgets(line, sizeof line, stdin);) {
        if (sscanf(line, "{\"positions\": %d, \"calls\": %d}", &positions, &calls) != 2)
            return 2;
        STEP;
        const double began = seconds();
        for (int n = 0; n < calls; n++)
            STEP;
        printf("{\"seconds\": %.9f}\n", seconds() - began);
        fflush(stdout);
    }
    return 0;
}
