/* A policy in a control loop without any library: it plays the mazes of samples/policy, one step every 20 ms.
 *
 *     control [MAZES [PERIOD [trace]]]      PERIOD in microseconds; 0 waits for nothing; trace prints every step
 *
 * The policy is a package called "policy", of one sequence. README.md has the commands. */
#define _POSIX_C_SOURCE 200112L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "policy.h"

#if POLICY_BATCH_SIZE != 1 || POLICY_SEGMENT_LENGTH != 1
#error "this loop runs one sequence, a step at a time: export with --batch-size 1 --segment-length 1"
#endif

enum { AHEAD, LEFT, RIGHT, DOORS = 3 };

/* A maze of three signs, then three doors; each sign names the right way at its door. */
typedef struct {
    int signs[DOORS], doors[DOORS], step;
} maze;

static int drawn(int below) { return rand() / 2 % below; }

static void enter(maze *self)
{
    self->step = 0;
    for (int i = 0, at = DOORS - 1; i < DOORS; i++) {
        self->signs[i] = drawn(2) ? LEFT : RIGHT;
        self->doors[i] = at += 2 + drawn(6);
    }
}

static int right_action(const maze *self)
{
    for (int i = 0; i < DOORS; i++)
        if (self->doors[i] == self->step)
            return self->signs[i];
    return AHEAD;
}

/* Observe 9 numbers: sign (-1 left, 1 right), one-hot number of sign or door [3], 1 at a door, step; then 3 of noise. */
static void observe(const maze *self, float seen[POLICY_OBSERVATION_VALUES])
{
    memset(seen, 0, POLICY_OBSERVATION_VALUES * sizeof *seen);
    if (self->step < DOORS)
        seen[0] = self->signs[self->step] == LEFT ? -1 : 1, seen[1 + self->step] = 1;
    for (int i = 0; i < DOORS; i++)
        if (self->doors[i] == self->step)
            seen[1 + i] += 1, seen[4] = 1;
    seen[5] = (float)self->step;
    seen[6] = 80 + 20 * (float)(drawn(201) - 100) / 100;
    seen[7] = 293 + 2 * (float)(drawn(201) - 100) / 100;
    seen[8] = (float)(drawn(201) - 100) / 100;
}

static double microseconds(struct timespec from, struct timespec to)
{
    return (double)(to.tv_sec - from.tv_sec) * 1e6 + (double)(to.tv_nsec - from.tv_nsec) / 1e3;
}

int main(int count, char **words)
{
    const int mazes = count > 1 ? atoi(words[1]) : 20, trace = count > 3;
    const long period = count > 2 ? atol(words[2]) : 20000;
    static policy_state state; /* the policy's whole memory */
    float seen[POLICY_OBSERVATION_VALUES], action[POLICY_ACTION_VALUES], value[POLICY_VALUE_VALUES];
    int taken = 0, steps = 0;
    double longest = 0, all = 0;
    maze here;
    struct timespec due, began, ended;

    policy_init(&state);
    enter(&here);
    clock_gettime(CLOCK_MONOTONIC, &due);
    for (int played = 0; played < mazes; steps++) {
        observe(&here, seen);
        clock_gettime(CLOCK_MONOTONIC, &began);
        policy_step(&state, seen, NULL, action, value);
        clock_gettime(CLOCK_MONOTONIC, &ended);
        const double took = microseconds(began, ended);
        all += took, longest = took > longest ? took : longest;

        int chosen = AHEAD;
        for (int i = 1; i < POLICY_ACTION_VALUES; i++)
            chosen = action[i] > action[chosen] ? i : chosen;
        if (trace) {
            printf("%d", here.step);
            for (int i = 0; i < POLICY_OBSERVATION_VALUES; i++) printf(" %.9g", (double)seen[i]);
            for (int i = 0; i < POLICY_ACTION_VALUES; i++) printf(" %.9g", (double)action[i]);
            printf("\n");
        }
        const int right = chosen == right_action(&here), last = here.doors[DOORS - 1] == here.step;
        taken += right && chosen != AHEAD;
        here.step++;
        if (!right || last) {
            played++;
            enter(&here);
            policy_reset(&state, NULL); /* the next observation begins an episode */
        }
        due.tv_nsec += period * 1000;
        due.tv_sec += due.tv_nsec / 1000000000, due.tv_nsec %= 1000000000;
        if (period) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
    }
    fprintf(stderr, "%d mazes, %.2f of %d doors taken rightly; ", mazes, (double)taken / mazes, DOORS);
    fprintf(stderr, "%d steps of %.1f us, the longest %.1f us\n", steps, all / steps, longest);
    return 0;
}
