/* {{ name }}: the model {{ model_id }} as plain C, made by txl-deploy {{ made_by }}. README.md explains it.
 *
 * {{ batch_size }} sequence{{ "s" if batch_size > 1 }}, segments of {{ length }} position{{ "s" if length > 1 }}, memory {{ "in the state" }} and nowhere else.
 * Arrays are flat and row-major, of the shapes below, and may not overlap.
{% if verified %} * {{ verified }}
{% else %} * NOT VERIFIED: nobody has compiled this and compared it with the bundle. Run the test before you rely on it.
{% endif %}
{% for line in told %} * {{ line }}
{% endfor %} */
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
{% for each in programs[1:] %}
#define {{ upper }}_MULTIPLY_ADDS_{{ each.length }} {{ each.multiply_adds }} /* of {{ each.length }} position{{ "s" if each.length > 1 }} */
{% endfor %}
{% endif %}
#define {{ upper }}_LATENCY {{ latency }} /* positions by which outputs are late where inputs come one by one */
{% if rate is not none %}
#define {{ upper }}_RATE {{ rate }} /* positions a second */
{% endif %}
{% if clip_actions is not none %}
#define {{ upper }}_CLIP_ACTIONS {{ clip_actions }} /* yours to apply, -this ... this, before scale and offset */
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

{% if native %}
/* The state of all sequences between steps: keys and values of each layer in a ring of {{ native.slots }} slots, `fill` rows of them up to
 * slot `head`. A copy of the struct is a snapshot. */
typedef struct {{ name }}_state {
    float keys[{{ native.layers | length }}][{{ batch_size * native.heads * native.key_size }}]; /* [B, H, slots / 64, d_head, 64] */
    float values[{{ native.layers | length }}][{{ batch_size * native.heads * native.value_size }}]; /* [B, H, slots, d_head rounded up to 16] */
    int32_t fill[{{ batch_size }}]; /* at most {{ native.memory }} */
    int32_t head[{{ batch_size }}];
{% if weights_file %}
    const void *weights;
{% endif %}
} {{ name }}_state;
{% else %}
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
{% endif %}

/* Begin with all sequences new.{% if weights_file %} `weights` are the bytes of {{ name }}.weights, aligned to 4 bytes or more; they have to outlive the state.{% endif %} */
void {{ name }}_init({{ name }}_state *state{% if weights_file %}, const void *weights{% endif %});

{% if several %}
/* Run any number of positions, {{ programs | map(attribute="length") | join(", ") }} at a time, the most first. Arrays have that many positions. */
void {{ name }}_feed({{ name }}_state *state, {% for each in inputs %}const {{ each.ctype }} *{{ each.name }}, {% endfor %}size_t positions{% for each in outputs %}, {{ each.ctype }} *{{ each.name }}{% endfor %});

{% endif %}
/* Run one segment. counts[b] is the number of positions of sequence b that count{% if exact and not several %}; more than 0 stands for all {{ length }}{% else %}, 0 ... {{ length }}{% endif %}; at 0 it keeps its
 * state. NULL: all count.{% if lockstep %} The sequences of this model run together: counts[0] holds for all.{% endif %} Inputs beyond a count are not
 * read, and outputs there are 0. */
void {{ name }}_step({{ name }}_state *state, {% for each in inputs %}const {{ each.ctype }} *{{ each.name }}, {% endfor %}const int32_t *counts{% for each in outputs %}, {{ each.ctype }} *{{ each.name }}{% endfor %});

/* Reset the sequences whose which[b] is not 0; NULL: all.{% if lockstep %} This model resets all of them or none.{% endif %} */
void {{ name }}_reset({{ name }}_state *state, const uint8_t *which);

#ifdef __cplusplus
}
#endif
#endif
