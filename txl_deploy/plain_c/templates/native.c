{% macro at(number) %}
{%- if number is none %}NULL{% elif weights_file %}(const void *)((const char *)state->weights + {{ weights[number].offset }}){% else %}{{ weights[number].name }}{% endif -%}
{% endmacro %}
{% macro of(product) -%}
{.in = {{ product.in }}, .out = {{ product.out }}, .columns = {{ product.columns }}, .bias = {{ at(product.bias) }},
{% if product.codes is defined %}
             .matrix = {.values = {{ at(product.codes) }}, .strip_pitch = {{ 64 * product.in }}, .step_pitch = 256, .format = CODES,
                        .scales = {{ at(product.scales) }}, .offsets = offsets({{ at(product.sums) }})}}
{%- else %}
             .matrix = {.values = {{ at(product.matrix) }}, .strip_pitch = {{ 256 * product.in }}, .step_pitch = 256, .format = FLOATS}}
{%- endif %}
{%- endmacro %}
/* {{ name }}: see {{ name }}.h. First txl-deploy's step of a Transformer-XL; at the end its numbers, and the functions that keep
 * its state. */
#include "{{ name }}.h"

#define TXL_ALONE
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wunused-function"
#elif !defined(__attribute__)
#define __attribute__(of)
#endif
#ifdef _MSC_VER
#pragma warning(disable : 4068) /* pragmas of GCC */
#endif

{{ programs[0].text }}
{% for each in weights if not weights_file %}
static const {{ each.ctype }} {{ each.name }}[{{ each.many }}] __attribute__((aligned(64))) = {
{{ each.text }}
};
{% endfor %}

static enum format cache_format(const struct txl_model *m) { (void)m; return FLOATS; }
static enum format position_format(const struct txl_model *m) { (void)m; return FLOATS; }
static enum format wide_format(const struct txl_model *m) { (void)m; return FLOATS; }
static size_t key_size(const struct txl_model *m, enum format format) { (void)m, (void)format; return {{ 4 * native.key_size }}; }
static size_t value_size(const struct txl_model *m, enum format format) { (void)m, (void)format; return {{ 4 * native.value_size }}; }
static size_t position_size(const struct txl_model *m, enum format format) { (void)m, (void)format; return {{ 4 * native.position_size }}; }
{% if native.codes %}

/* Numbers taken from sums over codes, by columns: 128 for each code where those of activations lie 128 higher. */
static const int32_t *offsets(const int32_t *sums)
{
    static const int32_t none[{{ native.widest }}];
    return CODE_OFFSET ? sums : none;
}
{% endif %}

/* Memory of a step. */
struct space {
{% for part, numbers in native.room.items() %}
    {{ "uint8_t" if part == "codes" else "float" }} {{ part }}[{{ 4 * numbers if part == "codes" else numbers }}];
{% endfor %}
} __attribute__((aligned(64)));

static const struct txl_shape shape = {
{% for field, value in native.shape %}
    .{{ field }} = {{ value }}{{ "f" if value is float }},
{% endfor %}
};

/* Log-probabilities of all words: hidden [rows, D] → out [rows, V]. */
static void log_probabilities(struct txl_model *m, int rows, const float *hidden, float *out)
{
    softmax(m, 0, rows, hidden, out, {{ native.vocabulary }});
{% if native.clusters | length > 1 %}
    float of_clusters[{{ batch_size * length }}][{{ native.clusters | length - 1 }}];
    for (int r = 0; r < rows; r++) /* they stand where the words of cluster 1 come */
        memcpy(of_clusters[r], out + (size_t)r * {{ native.vocabulary }} + m->clusters[0].last, sizeof of_clusters[r]);
    for (int c = 1; c < {{ native.clusters | length }}; c++) {
        const int first = m->clusters[c].first, last = m->clusters[c].last;
        softmax(m, c, rows, hidden, out + first, {{ native.vocabulary }});
        for (int r = 0; r < rows; r++)
            for (int i = first; i < last; i++)
                out[(size_t)r * {{ native.vocabulary }} + i] += of_clusters[r][c - 1];
    }
{% endif %}
}

/* Begin a sequence's keys or values of a layer: zeros, or in each slot the row `start`. */
static void begin(float *memory, bool keys, const float *start)
{
    const size_t whole = keys ? {{ native.key_size }} : {{ native.value_size }}, width = {{ native.head_width }};
    memset(memory, 0, {{ native.heads }} * whole * sizeof *memory);
    for (size_t head = 0; start && head < {{ native.heads }}; head++)
        for (size_t slot = 0; slot < {{ native.slots }}; slot++)
            for (size_t d = 0; d < width; d++) {
                const size_t key = slot / STRIP * STRIP * width + d * STRIP + slot % STRIP;
                memory[head * whole + (keys ? key : slot * {{ native.value_size // native.slots }} + d)] = start[head * width + d];
            }
}

void {{ name }}_init({{ name }}_state *state{% if weights_file %}, const void *weights{% endif %})
{
{% if weights_file %}
    state->weights = weights;
{% endif %}
    {{ name }}_reset(state, NULL);
}

void {{ name }}_step({{ name }}_state *state, const int32_t *{{ inputs[0].name }}, const int32_t *counts, float *{{ outputs[0].name }})
{
    struct space room;
    struct layer layers[] = {
{% for layer in native.layers %}
        {.products = {
{% for number in range(4) %}
            {{ of(layer.products[number]) }},
{% endfor %}
         },
         .vectors = {
{%- for number in range(6) %}{{ at(layer.vectors[number]) }}, {% endfor -%}
         },
         .positions = {.values = {{ at(layer.positions) }}, .strip_pitch = {{ 256 * native.head_width }}, .step_pitch = 256, .format = FLOATS}, .position_scores = {{ at(layer.scores) }}},
{% endfor %}
    };
    struct cluster clusters[] = {
{% for cluster in native.clusters %}
        {.first = {{ cluster.sizes[0] }}, .last = {{ cluster.sizes[1] }}, .width = {{ cluster.sizes[2] }}, .table = {{ at(cluster.table) }},
{% for part in ("into", "out_of", "words") if cluster[part] is not none %}
         .{{ part }} = {{ of(cluster[part]) }},
{% endfor %}
        },
{% endfor %}
    };
    struct workspace work = {
        .scores = room.scores, .by_distance = room.by_distance, .queries = room.queries, .row = room.row,
        .room = {.values = room.codes{% if native.codes %}, .scales = room.scales, .sums = room.sums{% endif %}},
    };
    struct txl_model model = {
        .shape = shape, .layers = layers, .clusters = clusters, .most_rows = {{ native.rows }}, .work = &work,
        {% for pad, size in native.pads.items() %}.{{ pad }} = {{ size }}, {% endfor %}

        .x = room.x, .y = room.y, .qkv = room.qkv, .mixed = room.mixed, .inner = room.inner,
{% if "source" in native.room %}
        .source = room.source,
{% endif %}
{% if native.final %}
        .final_norm = { {{- at(native.final[0]) }}, {{ at(native.final[1]) -}} },
{% endif %}
    };
    int32_t running[{{ batch_size }}];
    bool whole = true;
    for (int row = 0; row < {{ batch_size }}; row++) {
        const int32_t count = counts ? counts[row] : {{ length }};
        running[row] = count < 0 ? 0 : count > {{ length }} ? {{ length }} : count;
        whole = whole && running[row] == {{ length }};
    }
    void *keys[{{ native.layers | length }}], *values[{{ native.layers | length }}];
    for (int layer = 0; layer < {{ native.layers | length }}; layer++) {
        keys[layer] = state->keys[layer];
        values[layer] = state->values[layer];
    }
    txl_step(&model, {{ batch_size }}, {{ length }}, {{ inputs[0].name }}, running, state->fill, state->head, keys, values, room.hidden);
    if (whole)
        log_probabilities(&model, {{ batch_size * length }}, room.hidden, {{ outputs[0].name }});
    for (size_t row = 0; row < {{ batch_size }}; row++) {
        float *out = {{ outputs[0].name }} + row * {{ length * native.vocabulary }};
        const size_t count = (size_t)running[row];
        if (!whole)
            log_probabilities(&model, running[row], room.hidden + row * {{ length * native.width }}, out);
        memset(out + count * {{ native.vocabulary }}, 0, ({{ length }} - count) * {{ native.vocabulary }} * sizeof *out);
        state->head[row] = (state->head[row] + running[row]) % {{ native.slots }};
        state->fill[row] = running[row] > {{ native.memory }} - state->fill[row] ? {{ native.memory }} : state->fill[row] + running[row];
    }
}

void {{ name }}_reset({{ name }}_state *state, const uint8_t *which)
{
    for (size_t row = 0; row < {{ batch_size }}; row++) {
        if (which && !which[row])
            continue;
{% for number in range(native.layers | length) %}
        begin(state->keys[{{ number }}] + row * {{ native.heads * native.key_size }}, true, {{ at(native.starts[2 * number]) }});
        begin(state->values[{{ number }}] + row * {{ native.heads * native.value_size }}, false, {{ at(native.starts[2 * number + 1]) }});
{% endfor %}
        state->fill[row] = {{ counters[0].first }};
        state->head[row] = 0;
    }
}
