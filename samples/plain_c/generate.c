/* A language model in one file without any library: it continues a text, byte by byte.
 *
 *     generate PROMPT [COUNT [TEMPERATURE [SEED]]]       temperature 0 takes the most probable byte
 *
 * The model is a package called "tiny", of one sequence and one position, over bytes. README.md has the commands. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tiny.h"

#if TINY_BATCH_SIZE != 1 || TINY_SEGMENT_LENGTH != 1 || TINY_LOGPROBS_VALUES != 256
#error "this program feeds one byte at a time: package a model over bytes with --segment-length 1"
#endif

/* Draw a number in [0, 1) by xorshift64*, with 64 bits of state. */
static double drawn(unsigned long long *seed)
{
    *seed ^= *seed >> 12, *seed ^= *seed << 25, *seed ^= *seed >> 27;
    return (double)((*seed * 2685821657736338717ULL) >> 11) / 9007199254740992.0;
}

static int next_byte(const float logprobs[256], double temperature, unsigned long long *seed)
{
    double weights[256], sum = 0;
    int best = 0;
    for (int i = 1; i < 256; i++)
        best = logprobs[i] > logprobs[best] ? i : best;
    if (temperature <= 0) return best;
    for (int i = 0; i < 256; i++)
        sum += weights[i] = exp((double)(logprobs[i] - logprobs[best]) / temperature);
    sum *= drawn(seed);
    for (int i = 0; i < 256; i++)
        if ((sum -= weights[i]) < 0) return i;
    return best; /* reached only if rounding left a rest in sum */
}

int main(int count, char **words)
{
    if (count < 2 || !*words[1]) return fprintf(stderr, "usage: generate PROMPT [COUNT [TEMPERATURE [SEED]]]\n"), 2;
    const int bytes = count > 2 ? atoi(words[2]) : 300;
    const double temperature = count > 3 ? atof(words[3]) : 0.8;
    unsigned long long seed = count > 4 ? strtoull(words[4], NULL, 10) + 1 : 1;
    static tiny_state state;
    float logprobs[TINY_LOGPROBS_VALUES];
    int32_t token = 0;

    tiny_init(&state);
    for (const char *place = words[1]; *place; place++) {
        token = (unsigned char)*place;
        putchar(token);
        tiny_step(&state, &token, NULL, logprobs);
    }
    for (int drawn_so_far = 0; drawn_so_far < bytes; drawn_so_far++) {
        token = next_byte(logprobs, temperature, &seed);
        putchar(token);
        fflush(stdout);
        tiny_step(&state, &token, NULL, logprobs);
    }
    putchar('\n');
    return 0;
}
