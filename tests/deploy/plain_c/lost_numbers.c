/* Two sequences in segments of four tokens; what is NaN in the second one's memory stays there until it is reset. */
#include "memory.h"
#include <math.h>
#include <stdio.h>

static memory_state state;
static int32_t tokens[MEMORY_TOKENS_VALUES];
static float logprobs[MEMORY_LOGPROBS_VALUES];

static void tell(void)
{
    const int half = MEMORY_LOGPROBS_VALUES / 2;
    int lost[2] = {0, 0};
    for (int i = 0; i < MEMORY_LOGPROBS_VALUES; i++)
        lost[i / half] += isnan(logprobs[i]) != 0;
    printf("%s %s\n", lost[0] ? "lost" : "whole", lost[1] == half ? "lost" : lost[1] ? "partly" : "whole");
}

int main(void)
{
    const uint8_t second[2] = {0, 1};
    const size_t row = 16, slots = 11; /* of one head; a sequence has half of a layer's values */
    const size_t values = sizeof state.values[0] / sizeof(float);
    memory_init(&state);
    for (int i = 0; i < MEMORY_TOKENS_VALUES; i++)
        tokens[i] = i % 2 ? -7 : 1 << 30; /* out of range: the nearest one in range */
    memory_step(&state, tokens, NULL, logprobs), tell();
    state.values[0][values / 2 + ((size_t)state.head[1] + slots - 1) % slots * row] = NAN; /* its newest row */
    memory_step(&state, tokens, NULL, logprobs), tell();
    memory_step(&state, tokens, NULL, logprobs), tell();
    memory_reset(&state, second);
    memory_step(&state, tokens, NULL, logprobs), tell();
    return 0;
}
