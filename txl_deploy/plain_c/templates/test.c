/* Replays stored steps of {{ name }} and compares the results: {{ vectors.origin }}. Exit code 0: all agree. */
#include "{{ name }}.h"
#include <math.h>
#include <stdio.h>
{% if weights_file %}
#include <stdlib.h>
{% endif %}

enum { STEPS = {{ vectors.steps }} };

static const uint8_t resets[STEPS][{{ batch_size }}] = {{ vectors.resets }};
static const int32_t counts[STEPS][{{ batch_size }}] = {{ vectors.counts }};
{% for each in vectors.inputs %}
static const {{ each.ctype }} given_{{ each.name }}[STEPS][{{ each.many }}] = {{ each.text }};
{% endfor %}
{% for each in vectors.outputs %}
static const int32_t places_{{ each.name }}[STEPS][{{ each.count }}] = {{ each.places }};
static const {{ each.ctype }} expected_{{ each.name }}[STEPS][{{ each.count }}] = {{ each.text }};
static {{ each.ctype }} found_{{ each.name }}[{{ each.many }}];
{% endfor %}
static {{ name }}_state state;

/* Return a difference divided by the allowed one; values from {{ "%g" % vectors.mask }} on are compared relative to themselves. */
static double apart(double found, double expected, double room)
{
    if (found == expected || (isnan(found) && isnan(expected)))
        return 0;
    const double far = fabs(found - expected) / (fabs(expected) < {{ vectors.mask }} ? room : {{ vectors.limit }} * fabs(expected));
    return far <= HUGE_VAL ? far : HUGE_VAL; /* NaN is infinitely far */
}

int main({% if weights_file %}int argc, char **argv{% else %}void{% endif %})
{
{% if weights_file %}
    const char *path = argc > 1 ? argv[1] : "{{ name }}.weights";
    FILE *file = fopen(path, "rb");
    void *weights = malloc({{ upper }}_WEIGHTS_BYTES + 1);
    if (!file || !weights || fread(weights, 1, {{ upper }}_WEIGHTS_BYTES + 1, file) != {{ upper }}_WEIGHTS_BYTES) {
        fprintf(stderr, "%s: expected the %ld bytes of weights beside the source\n", path, (long){{ upper }}_WEIGHTS_BYTES);
        return 2;
    }
    fclose(file);
    {{ name }}_init(&state, weights);
{% else %}
    {{ name }}_init(&state);
{% endif %}
    double worst = 0;
    for (int step = 0; step < STEPS; step++) {
        {{ name }}_reset(&state, resets[step]);
        {{ name }}_step(&state, {% for each in vectors.inputs %}given_{{ each.name }}[step], {% endfor %}counts[step]{% for each in vectors.outputs %}, found_{{ each.name }}{% endfor %});
{% for each in vectors.outputs %}
        for (int i = 0; i < {{ each.count }}; i++) {
            if (places_{{ each.name }}[step][i] < 0) /* the sequence is idle */
                continue;
            const double far = apart((double)found_{{ each.name }}[places_{{ each.name }}[step][i]], (double)expected_{{ each.name }}[step][i], {{ each.room }});
            if (far > 1)
                fprintf(stderr, "step %d: {{ each.name }}[%d] is %g, expected %g\n", step, (int)places_{{ each.name }}[step][i],
                        (double)found_{{ each.name }}[places_{{ each.name }}[step][i]], (double)expected_{{ each.name }}[step][i]);
            worst = far > worst ? far : worst;
        }
{% endfor %}
    }
    printf("%s: %d steps, the largest difference is %.2g of what it may be\n", worst <= 1 ? "passed" : "FAILED", STEPS, worst);
    return worst <= 1 ? 0 : 1;
}
