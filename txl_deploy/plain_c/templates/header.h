/* {{ name }}: the model {{ model_id }} as plain C, made by txl-deploy {{ made_by }}. README.md explains it.
 *
 * {{ batch_size }} sequence{{ "s" if batch_size > 1 }}, segments of {{ length }} position{{ "s" if length > 1 }}, memory {{ "in the state" }} and nowhere else.
 * Arrays are flat and row-major, of the shapes below, and may not overlap.
{% if verified %} * {{ verified }}
{% else %} * NOT VERIFIED: nobody has compiled this and compared it with the bundle. Run the test before you rely on it.
{% endif %} */
#ifndef {{ upper }}_H
#define {{ upper }}_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define {{ upper }}_VERIFIED {{ 1 if verified else 0 }}
#define {{ upper }}_BATCH_SIZE {{ batch_size }}
#define {{ upper }}_SEGMENT_LENGTH {{ length }}
{% for each in inputs + outputs %}
#define {{ upper }}_{{ each.name | upper }}_VALUES {{ each.many }} /* {{ each.ctype }} {{ each.shape | list }} */
{% endfor %}
#define {{ upper }}_STATE_BYTES (sizeof({{ name }}_state)) /* {{ state_bytes }} where pointers have 8 bytes */
#define {{ upper }}_WEIGHTS_BYTES {{ weight_bytes }}
{% if multiply_adds is not none %}
#define {{ upper }}_MULTIPLY_ADDS {{ multiply_adds }} /* of a step, in products of matrices and convolutions */
{% endif %}
{% if measured %}
#define {{ upper }}_STACK_BYTES {{ measured.stack }} /* of a step, with the flags below */
{% if measured.code is not none %}
#define {{ upper }}_CODE_BYTES {{ measured.code }} /* {{ measured.flags }} */
{% endif %}
{% endif %}

#ifdef __cplusplus
extern "C" {
#endif

/* The state of all sequences between steps. Every tensor has two sides: [side] holds the present values, and the next step
 * writes the other one before anything reads it. A copy of the struct is a snapshot. */
typedef struct {{ name }}_state {
{% if weights_file %}
    const void *weights;
{% endif %}
{% for each in states %}
    {{ each.ctype }} {{ each.name }}[2][{{ each.many }}]; /* {{ each.shape | list }} */
{% endfor %}
{% for each in counters %}
    int32_t {{ each.name }}[{{ batch_size }}]; /* one count per sequence, at most {{ each.most }} */
{% endfor %}
    int32_t side;
} {{ name }}_state;

/* Begin with all sequences new.{% if weights_file %} `weights` are the bytes of {{ name }}.weights, aligned to 4 bytes or more; they have to outlive the state.{% endif %} */
void {{ name }}_init({{ name }}_state *state{% if weights_file %}, const void *weights{% endif %});

/* Run one segment. counts[b] is the number of positions of sequence b that count{% if exact %}; more than 0 stands for all {{ length }}{% else %}, 0 ... {{ length }}{% endif %}; at 0 it keeps its
 * state. NULL: all count.{% if lockstep %} The sequences of this model run together: counts[0] holds for all.{% endif %} Inputs beyond a count are not
 * read, and outputs there are 0. */
void {{ name }}_step({{ name }}_state *state, {% for each in inputs %}const {{ each.ctype }} *{{ each.name }}, {% endfor %}const int32_t *counts{% for each in outputs %}, {{ each.ctype }} *{{ each.name }}{% endfor %});

/* Reset the sequences whose which[b] is not 0; NULL: all.{% if lockstep %} This model resets all of them or none.{% endif %} */
void {{ name }}_reset({{ name }}_state *state, const uint8_t *which);

#ifdef __cplusplus
}
#endif
#endif
