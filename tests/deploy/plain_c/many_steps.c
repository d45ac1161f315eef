/* Runs the policy over the observations of a file, [n, L, 6], and writes its actions, [n, L, 3]. */
#include "policy.h"
#include <stdio.h>

static policy_state state;
static float obs[POLICY_OBS_VALUES], action[POLICY_ACTION_VALUES], value[POLICY_VALUE_VALUES];

int main(int argc, char **argv)
{
    FILE *from = argc == 3 ? fopen(argv[1], "rb") : NULL, *to = argc == 3 ? fopen(argv[2], "wb") : NULL;
    if (!from || !to)
        return 2;
    policy_init(&state);
    while (fread(obs, sizeof obs, 1, from) == 1) {
        policy_step(&state, obs, NULL, action, value);
        if (fwrite(action, sizeof action, 1, to) != 1)
            return 2;
    }
    return fclose(to);
}
