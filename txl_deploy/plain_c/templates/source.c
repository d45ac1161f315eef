/* {{ name }}: see {{ name }}.h. First the program, written by emx-onnx-cgen; at the end the functions that keep its state. */
#include "{{ name }}.h"
#include <math.h>
#include <string.h>

#ifdef _MSC_VER
#define EMX_RESTRICT
#else
#define EMX_RESTRICT restrict
#endif

{% for each in programs %}
{{ each.text }}
{% endfor %}
{% for each in weights if not weights_file %}
static const {{ each.ctype }} {{ each.name }}[{{ each.many }}] = {
{{ each.text }}
};
{% endfor %}
{% for each in states if each.start %}
static const {{ each.ctype }} start_{{ each.name }}[{{ each.one }}] = {
{{ each.start }}
};
{% endfor %}
{% if partial %}

/* Set to 0 the positions that do not count of an array [outer][one][middle][other][bytes]: axis `one` is that of sequences
 * and `other` that of positions, or the reverse if positions_first. */
static void blank(void *array, const size_t sizes[5], bool positions_first, const int32_t *counts, int32_t ahead)
{
    char *place = array;
    for (size_t outer = 0; outer < sizes[0]; outer++)
        for (size_t one = 0; one < sizes[1]; one++)
            for (size_t middle = 0; middle < sizes[2]; middle++)
                for (size_t other = 0; other < sizes[3]; other++, place += sizes[4]) {
                    const int32_t count = counts[positions_first ? other : one];
                    const size_t position = positions_first ? one : other;
                    if (count == 0 || position >= (size_t)(count + ahead))
                        memset(place, 0, sizes[4]);
                }
}
{% endif %}
{% if states %}

/* Write a sequence's initial value into an array [outer][sequences][bytes]; zeros if start is NULL. */
static void begin(void *array, const void *start, size_t outer, size_t sequences, size_t bytes, size_t row)
{
    for (size_t part = 0; part < outer; part++) {
        char *place = (char *)array + (part * sequences + row) * bytes;
        if (start)
            memcpy(place, (const char *)start + part * bytes, bytes);
        else
            memset(place, 0, bytes);
    }
}
{% endif %}

void {{ name }}_init({{ name }}_state *state{% if weights_file %}, const void *weights{% endif %})
{
{% if weights_file %}
    state->weights = weights;
{% endif %}
    state->side = 0;
    {{ name }}_reset(state, NULL);
}

{% if several %}
void {{ name }}_feed({{ name }}_state *state, {% for each in inputs %}const {{ each.ctype }} *{{ each.name }}, {% endfor %}size_t positions{% for each in outputs %}, {{ each.ctype }} *{{ each.name }}{% endfor %})
{
    for (size_t length = 0; positions > 0; positions -= length) {
        const int old = state->side != 0, next = !old;
{% for each in programs %}
        {{ "if" if loop.first else "else if" }} (positions >= {{ each.length }}) {
            const int32_t running[1] = {length = {{ each.length }}};
            (void)running;
            {{ each.name }}({{ each.arguments | join(", ") }});
        }
{% endfor %}
        state->side = next;
{% for each in inputs + outputs %}
        {{ each.name }} += length{{ " * %d" % each.each if each.each != 1 }};
{% endfor %}
    }
}

{% endif %}
void {{ name }}_step({{ name }}_state *state, {% for each in inputs %}const {{ each.ctype }} *{{ each.name }}, {% endfor %}const int32_t *counts{% for each in outputs %}, {{ each.ctype }} *{{ each.name }}{% endfor %})
{
{% if several %}
    const int32_t given = counts ? counts[0] : {{ length }};
    const size_t count = given < 0 ? 0 : given > {{ length }} ? {{ length }} : (size_t)given;
    {{ name }}_feed(state, {% for each in inputs %}{{ each.name }}, {% endfor %}count{% for each in outputs %}, {{ each.name }}{% endfor %});
{% for each in outputs %}
    memset({{ each.name }} + count{{ " * %d" % each.each if each.each != 1 }}, 0, ({{ length }} - count) * {{ each.each }} * sizeof *{{ each.name }});
{% endfor %}
{% else %}
    int32_t running[{{ batch_size }}];
    bool some = false;
{% if partial %}
    bool whole = true;
{% endif %}
    for (int row = 0; row < {{ batch_size }}; row++) {
        int32_t count = counts ? counts[{{ "0" if lockstep else "row" }}] : {{ length }};
{% if exact %}
        count = count > 0 ? {{ length }} : 0;
{% else %}
        count = count < 0 ? 0 : count > {{ length }} ? {{ length }} : count;
{% endif %}
        running[row] = count;
        some = some || count > 0;
{% if partial %}
        whole = whole && count == {{ length }};
{% endif %}
    }
    if (!some) {
{% for each in outputs %}
        memset({{ each.name }}, 0, {{ each.many }} * sizeof *{{ each.name }});
{% endfor %}
        return;
    }
{% for each in inputs if each.vocab or (partial and each.blanks) %}
    {{ each.ctype }} read_{{ each.name }}[{{ each.many }}];
{% if each.vocab %}
    for (int i = 0; i < {{ each.many }}; i++)
        read_{{ each.name }}[i] = {{ each.name }}[i] < 0 ? 0 : {{ each.name }}[i] < {{ each.vocab }} ? {{ each.name }}[i] : {{ each.vocab - 1 }};
{% else %}
    if (!whole)
        memcpy(read_{{ each.name }}, {{ each.name }}, sizeof read_{{ each.name }});
{% endif %}
{% if partial and each.blanks %}
    if (!whole) {
{% for sizes in each.blanks %}
        blank(read_{{ each.name }}, (const size_t[]){{ sizes.text }}, {{ sizes.first }}, running, {{ each.ahead }});
{% endfor %}
{% if not each.vocab %}
        {{ each.name }} = read_{{ each.name }};
{% endif %}
    }
{% endif %}
{% if each.vocab %}
    {{ each.name }} = read_{{ each.name }};
{% endif %}
{% endfor %}
    const int old = state->side != 0, next = !old;
    {{ name }}_program({{ programs[0].arguments | join(", ") }});
    state->side = next;
{% for each in counters %}
    for (int row = 0; row < {{ batch_size }}; row++)
        state->{{ each.name }}[row] = running[row] > {{ each.most }} - state->{{ each.name }}[row] ? {{ each.most }} : state->{{ each.name }}[row] + running[row];
{% endfor %}
{% if partial %}
    if (!whole) {
{% for each in outputs %}
{% for sizes in each.blanks %}
        blank({{ each.name }}, (const size_t[]){{ sizes.text }}, {{ sizes.first }}, running, 0);
{% endfor %}
{% endfor %}
    }
{% endif %}
{% endif %}
}

void {{ name }}_reset({{ name }}_state *state, const uint8_t *which)
{
{% if lockstep or shared %}
    bool all = true;
    for (int row = 0; row < {{ batch_size }}; row++)
        all = all && (!which || which[row]);
{% endif %}
{% if lockstep %}
    if (!all)
        return;
{% endif %}
    for (size_t row = 0; row < {{ batch_size }}; row++) {
        if (which && !which[row])
            continue;
{% if not states and not counters %}
        (void)state;
{% endif %}
{% for each in states if not each.shared %}
        begin(state->{{ each.name }}[state->side != 0], {{ "start_" ~ each.name if each.start else "NULL" }}, {{ each.outer }}, {{ batch_size }}, {{ each.bytes }}, row);
{% endfor %}
{% for each in counters %}
        state->{{ each.name }}[row] = {{ each.first }};
{% endfor %}
    }
{% for each in states if each.shared %}
    if (all)
        begin(state->{{ each.name }}[state->side != 0], {{ "start_" ~ each.name if each.start else "NULL" }}, 1, 1, {{ each.bytes }}, 0);
{% endfor %}
}
