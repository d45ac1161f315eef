/* Steps and resets of the policy under a counter of calls (counting.c, preloaded) and a kernel that ends the process at
 * any system call but read, write and exit. Prints how many calls were counted. FAULT=1 allocates, 2 asks the system. */
#define _GNU_SOURCE
#include "policy.h"
#include <dlfcn.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef FAULT
#define FAULT 0
#endif

static policy_state state;
static float obs[POLICY_OBS_VALUES], action[POLICY_ACTION_VALUES], value[POLICY_VALUE_VALUES];

int main(void)
{
    char text[64];
    const int32_t idle[POLICY_BATCH_SIZE] = {0};
    const uint8_t which[POLICY_BATCH_SIZE] = {1};
    unsigned long *calls = (unsigned long *)dlsym(RTLD_DEFAULT, "counted_calls");
    if (!calls)
        return 3;
    policy_init(&state);
    free(malloc(16)); /* the heap asks the system for its room once */
    const unsigned long before = *calls;
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT))
        return 4;
    for (int step = 0; step < 1000; step++) {
        policy_step(&state, obs, step % 10 ? NULL : idle, action, value);
        if (step % 100 == 0)
            policy_reset(&state, which);
        if (FAULT == 1)
            free(malloc(16));
        if (FAULT == 2)
            syscall(SYS_getpid);
    }
    const int length = snprintf(text, sizeof text, "%lu\n", *calls - before);
    const int wrong = write(1, text, (size_t)length) != length;
    syscall(SYS_exit, wrong);
}
