/* Runs steps from standard input and writes results to standard output, for the verification; not part of a package.
 * A record is: wanted (uint8: 1 asks for the state), which[B], counts[B], the inputs. The answer is the outputs and, if
 * wanted, the state's tensors of the present side and the counters. The answer to the end of input is two uint64: the
 * bytes of stack that the steps used, and of the state. */
#define _GNU_SOURCE
#include "{{ name }}.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static {{ name }}_state state;
{% for each in inputs + outputs %}
static {{ each.ctype }} array_{{ each.name }}[{{ each.many }}];
{% endfor %}

static void put(const void *data, size_t bytes)
{
    if (fwrite(data, 1, bytes, stdout) != bytes)
        exit(3);
}

{% if native %}

/* Write a layer's keys or values as [B, H, M, d_head], the oldest row first. */
static void put_memory(const float *tensor, int keys)
{
    const size_t whole = keys ? {{ native.key_size }} : {{ native.value_size }}, width = {{ native.head_width }};
    for (size_t row = 0; row < {{ batch_size }}; row++)
        for (size_t head = 0; head < {{ native.heads }}; head++)
            for (int32_t i = 0; i < {{ native.memory }}; i++) {
                const float *place = tensor + (row * {{ native.heads }} + head) * whole;
                const size_t slot = (size_t)(state.head[row] - {{ native.memory }} + i + {{ native.slots }}) % {{ native.slots }};
                for (size_t d = 0; d < width; d++)
                    put(place + (keys ? slot / 64 * 64 * width + d * 64 + slot % 64 : slot * {{ native.value_size // native.slots }} + d), sizeof *place);
            }
}
{% endif %}

static char *top;
static uint8_t wanted, which[{{ batch_size }}];
static int32_t counts[{{ batch_size }}];

static void *one_step(void *unused)
{
    char here;
    top = &here;
    {{ name }}_reset(&state, which);
    {{ name }}_step(&state, {% for each in inputs %}array_{{ each.name }}, {% endfor %}counts{% for each in outputs %}, array_{{ each.name }}{% endfor %});
    return unused;
}

int main(int argc, char **argv)
{
    const size_t room = (size_t)1 << 30;
    uint64_t deepest = 0;
    pthread_attr_t attributes;
    char *stack = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED || pthread_attr_init(&attributes) || pthread_attr_setstack(&attributes, stack, room))
        return 3;
    memset(&state, 0xff, sizeof state); /* NaN everywhere: a value that is read before it is written shows up */
{% if weights_file %}
    void *weights = malloc({{ upper }}_WEIGHTS_BYTES + 1);
    FILE *file = argc > 1 ? fopen(argv[1], "rb") : NULL;
    if (!weights || !file || fread(weights, 1, {{ upper }}_WEIGHTS_BYTES, file) != {{ upper }}_WEIGHTS_BYTES)
        return 3;
    {{ name }}_init(&state, weights);
{% else %}
    (void)argc, (void)argv;
    {{ name }}_init(&state);
{% endif %}
    while (fread(&wanted, 1, 1, stdin) == 1) {
        if (fread(which, sizeof which, 1, stdin) != 1 || fread(counts, sizeof counts, 1, stdin) != 1)
            return 3;
{% for each in inputs %}
        if (fread(array_{{ each.name }}, sizeof array_{{ each.name }}, 1, stdin) != 1)
            return 3;
{% endfor %}
        pthread_t thread;
        if (pthread_create(&thread, &attributes, one_step, NULL) || pthread_join(thread, NULL))
            return 3;
{% for each in outputs %}
        put(array_{{ each.name }}, sizeof array_{{ each.name }});
{% endfor %}
        if (wanted) {
{% if native %}
            for (size_t i = 0; i < {{ native.layers | length }}; i++) {
                put_memory(state.keys[i], 1);
                put_memory(state.values[i], 0);
            }
{% else %}
{% for each in states %}
            put(state.{{ each.name }}[state.side], sizeof state.{{ each.name }}[0]);
{% endfor %}
{% endif %}
{% for each in counters %}
            put(state.{{ each.name }}, sizeof state.{{ each.name }});
{% endfor %}
        }
        fflush(stdout);
    }
    const char *low = stack; /* bytes of the stack that were never written are 0 */
    while (low < top && *low == 0)
        low++;
    deepest = (uint64_t)(top - low);
    const uint64_t bytes = sizeof state;
    put(&deepest, sizeof deepest);
    put(&bytes, sizeof bytes);
    return 0;
}
