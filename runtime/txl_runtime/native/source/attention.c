#include "attention.h"

#include <math.h>
#include <string.h>

#include "vector.h"

enum {
    QUERIES = 4, /* that are computed together */
    WIDE = 16,   /* from which on a segment multiplies keys and values in a format of its own */
};

/* Factors of a query: keys [d_head, slots], values [slots, d_head] and the table of positions, with a scale of each
 * slot or column where they are int8. */
struct operands {
    struct matrix keys, values, positions;
    const float *key_scales, *value_scales, *position_scales;
};

static struct matrix values_at(const struct txl_model *m, const void *values, enum format format) {
    size_t size = size_of(format);
    return (struct matrix){
        .values = values, .strip_pitch = STRIP * size, .step_pitch = m->head_pitch * size, .format = format};
}

static struct operands kept(const struct txl_model *m, const struct layer *layer, int head, const struct attention *a) {
    enum format format = cache_format(m);
    struct operands o = {
        .keys = in_strips(a->keys, format, m->shape.head_width),
        .values = values_at(m, a->values, format),
        .positions = layer->positions,
    };
    o.positions.values = (const char *)o.positions.values + head * position_size(m, position_format(m));
    if (format != BYTES) return o;
    o.key_scales = (const float *)((const char *)a->keys + bytes_in_strips(BYTES, m->shape.head_width, m->ring_pitch));
    o.value_scales = (const float *)((const char *)a->values + (size_t)m->shape.slots * m->head_pitch);
    o.position_scales = layer->position_scales + (size_t)head * m->columns;
    return o;
}

/* The part of them that a long segment sees, copied to the thread's memory in the format of its products. */
static struct operands widened(const struct txl_model *m, const struct operands *o, const struct attention *a,
                               struct workspace *work) {
    enum format format = wide_format(m);
    int width = m->shape.head_width, slots = m->shape.slots;
    int count = at_most(a->fill, a->window - 1) + a->count, first = a->head - (count - a->count);
    if (first < 0) first += slots;
    char *keys = work->wide, *values = keys + key_size(m, format), *positions = values + value_size(m, format);
    struct operands wide = {
        .keys = in_strips(keys, format, width),
        .values = values_at(m, values, format),
        .positions = o->positions,
    };
    int before = at_most(count, slots - first); /* and from slot 0 on, behind the end of the ring, the rest */
    convert_columns(&o->keys, o->key_scales, width, first / LANES * LANES, padded(first + before), &wide.keys);
    convert_columns(&o->keys, o->key_scales, width, 0, padded(count - before), &wide.keys);
    convert_rows(&o->values, o->value_scales, slots, first, count, m->head_pitch, &wide.values);
    if (o->position_scales) {
        int nearest = m->columns - at_most(count, m->shape.distances);
        wide.positions = in_strips(positions, format, width);
        convert_columns(&o->positions, o->position_scales, width, nearest / LANES * LANES, m->columns, &wide.positions);
    }
    return wide;
}

/* The int8 codes of numbers in a row that is kept; return its scale. */
static float codes_of(const float *x, int count, int8_t *codes) {
    float scale = kept_scale(largest_size(x, count));
    vec steps = v_set(scale > 0 ? 1 / scale : 0);
    for (int i = 0; i < count; i += LANES) v_store_codes((uint8_t *)codes + i, v_mul(v_load(x + i), steps));
    for (int i = 0; i < count; i++) codes[i] = (int8_t)((uint8_t)codes[i] - CODE_OFFSET);
    return scale;
}

/* Write one head's key into column `slot`, and its value into row `slot`. */
static void write_slot(const struct txl_model *m, const struct attention *a, const struct operands *o, int slot,
                       const float *key, const float *value, struct workspace *work) {
    enum format format = o->keys.format;
    int width = m->shape.head_width, pitch = m->head_pitch, size = size_of(format);
    size_t column = slot / STRIP * o->keys.strip_pitch + slot % STRIP * size;
    char *keys = (char *)a->keys + column, *values = (char *)a->values + (size_t)slot * o->values.step_pitch;
    char *some = (char *)work->room.values;
    if (format == FLOATS) {
        memcpy(some, key, (size_t)pitch * size);
        memcpy(values, value, (size_t)pitch * size);
    } else if (format == HALVES) {
        for (int i = 0; i < pitch; i += LANES) {
            v_store_half((uint16_t *)some + i, v_load(key + i));
            v_store_half((uint16_t *)values + i, v_load(value + i));
        }
    } else {
        ((float *)o->key_scales)[slot] = codes_of(key, pitch, (int8_t *)some);
        ((float *)o->value_scales)[slot] = codes_of(value, pitch, (int8_t *)values);
    }
    for (int i = 0; i < width; i++) memcpy(keys + i * o->keys.step_pitch, some + i * size, size);
}

/* x[i] *= scales[i]; nothing without scales. */
static void scale_row(float *restrict x, const float *restrict scales, int count) {
    if (!scales) return;
    for (int i = 0; i < count; i++) x[i] *= scales[i];
}

/* scores[i] += by_distance[i], or *by_distance where it is the same for all; return the largest of `count`. */
static float add_positions(float *scores, const float *by_distance, int same, int count) {
    vec largest = v_set(-INFINITY);
    for (int i = 0; i < count; i += LANES) {
        vec s = v_add(v_load(scores + i), same ? v_set(*by_distance) : v_load(by_distance + i));
        v_store_first(scores + i, s, count - i);
        largest = v_max(v_first(s, count - i, v_set(-INFINITY)), largest);
    }
    return v_largest(largest);
}

/* scores[i] = exp(scores[i] - top); return their sum. */
static float exponentials(float *scores, float top, int count) {
    vec sum = v_zero();
    for (int i = 0; i < count; i += LANES) {
        vec e = v_exp(v_sub(v_load(scores + i), v_set(top)));
        v_store_first(scores + i, e, count - i);
        sum = v_add(sum, v_first(e, count - i, v_zero()));
    }
    return v_sum(sum);
}

/* Keys of a range of time, oldest first, lie in at most two runs of slots: time from … is at slot … */
struct run { int slot, count; };

static void runs_of(const struct txl_model *m, const struct attention *a, int from, int to, struct run runs[2]) {
    int slots = m->shape.slots, first = a->head - a->fill + from;
    if (first < 0) first += slots;
    if (first >= slots) first -= slots;
    int before = at_most(to - from, slots - first);
    runs[0] = (struct run){first, before};
    runs[1] = (struct run){0, to - from - before};
}

/* The scores of the query of time `now` become its shares of the values in time from … to; return 1 / their sum. */
static float share(const struct txl_model *m, const struct attention *a, int now, int from, int to, float *scores,
                   const float *by_distance) {
    int first = at_least(from, now - a->window + 1);         /* the oldest key that it sees */
    int far = at_least(first, now - m->shape.distances + 2); /* keys before it share the last distance's score */
    int parts[3] = {first, at_most(far, now + 1), now + 1};
    struct run runs[2];
    float top = -INFINITY, sum = 0;
    for (int part = 0; part < 2; part++) {
        runs_of(m, a, parts[part], parts[part + 1], runs);
        const float *at = by_distance + m->columns - (part ? 1 + now - parts[1] : m->shape.distances);
        for (int i = 0; i < 2; i++) {
            if (!runs[i].count) continue;
            float some = add_positions(scores + runs[i].slot, at, !part, runs[i].count);
            top = some > top || isnan(some) ? some : top;
            at += part ? runs[i].count : 0;
        }
    }
    runs_of(m, a, first, now + 1, runs);
    for (int i = 0; i < 2; i++) sum += exponentials(scores + runs[i].slot, top, runs[i].count);
    int unseen[2][2] = {{from, first}, {now + 1, to}};
    for (int side = 0; side < 2; side++) {
        runs_of(m, a, unseen[side][0], unseen[side][1], runs);
        for (int i = 0; i < 2; i++) memset(scores + runs[i].slot, 0, (size_t)runs[i].count * sizeof *scores);
    }
    return 1 / sum;
}

/* mixed = shares · values of one run of slots, or added to it. */
static void mix(const struct txl_model *m, const struct operands *o, struct workspace *work, int queries, int scores,
                struct run run, float *mixed, int add) {
    struct matrix values = o->values;
    struct rows shares = {work->scores + run.slot, scores * sizeof(float), queries, NULL, NULL};
    int before = values.format == PAIRS ? run.slot % 2 : 0, wide = padded(run.count + 1) + LANES;
    if (values.format == PAIRS) { /* of which the first and the last may have a slot beyond the run */
        shares.values = work->room.values;
        shares.pitch = wide * sizeof(uint16_t);
        for (int r = 0; r < queries; r++) {
            const float *from = work->scores + r * scores + run.slot;
            uint16_t *to = (uint16_t *)work->room.values + r * wide;
            to[0] = 0;
            for (int i = 0; i < run.count; i += LANES)
                v_store_bf16(to + before + i, v_first(v_load(from + i), run.count - i, v_zero()));
            to[before + run.count] = 0;
        }
    }
    values.values = (const char *)values.values + run.slot / depth_of(values.format) * values.step_pitch;
    int pitch = m->head_pitch;
    multiply(&shares, &values, before + run.count, 0, pitch, mixed, (size_t)m->shape.heads * pitch, add, 0);
}

/* Queries first … first + count - 1 of the segment. */
static void attend_some(const struct txl_model *m, const struct layer *layer, int head, const struct attention *a,
                        const struct operands *o, struct workspace *work, int first, int count) {
    const struct txl_shape *s = &m->shape;
    int width = s->head_width, pitch = m->head_pitch, heads = s->heads, row = 3 * heads * pitch;
    int now = a->fill + first, from = at_least(0, now - a->window + 1), to = now + count;
    float *content = work->queries, *position = content + QUERIES * pitch;
    for (int r = 0; r < count; r++)
        for (int i = 0; i < width; i++) {
            float query = a->qkv[(size_t)(first + r) * row + head * pitch + i];
            content[r * pitch + i] = query + layer->vectors[CONTENT_BIAS][head * width + i];
            position[r * pitch + i] = query + layer->vectors[POSITION_BIAS][head * width + i];
        }
    struct rows queries = rows_for(&o->keys, content, pitch, count, width, &work->room);
    struct run runs[2];
    runs_of(m, a, from, to, runs);
    int scores = m->ring_pitch + LANES;
    for (int i = 0; i < 2; i++) {
        int start = runs[i].slot / LANES * LANES, end = runs[i].slot + runs[i].count;
        if (runs[i].count) multiply(&queries, &o->keys, width, start, end, work->scores, scores, 0, 0);
    }
    int far = at_most(to - from, s->distances), columns = m->columns + LANES, nearest = m->columns - far;
    queries = rows_for(&o->positions, position, pitch, count, width, &work->room);
    multiply(&queries, &o->positions, width, nearest / LANES * LANES, m->columns, work->by_distance, columns, 0, 0);
    float factors[QUERIES];
    for (int r = 0; r < count; r++) {
        float *by_distance = work->by_distance + r * columns, *shares = work->scores + r * scores;
        if (o->position_scales) scale_row(by_distance + nearest, o->position_scales + nearest, far);
        if (layer->position_scores) {
            const float *more = layer->position_scores + (size_t)head * m->columns;
            for (int i = nearest; i < m->columns; i++) by_distance[i] += more[i];
        }
        for (int i = 0; o->key_scales && i < 2; i++)
            scale_row(shares + runs[i].slot, o->key_scales + runs[i].slot, runs[i].count);
        factors[r] = share(m, a, now + r, from, to, shares, by_distance);
        for (int i = 0; o->value_scales && i < 2; i++)
            scale_row(shares + runs[i].slot, o->value_scales + runs[i].slot, runs[i].count);
    }
    float *mixed = a->mixed + ((size_t)first * heads + head) * pitch;
    for (int i = 0, add = 0; i < 2; i++) {
        if (!runs[i].count) continue;
        mix(m, o, work, count, scores, runs[i], mixed, add);
        add = 1;
    }
    for (int r = 0; r < count; r++)
        for (int i = 0; i < pitch; i += LANES) {
            float *at = mixed + (size_t)r * heads * pitch + i;
            v_store(at, v_mul(v_load(at), v_set(factors[r])));
        }
}

void attend(const struct txl_model *m, const struct layer *layer, int head, const struct attention *a,
            struct workspace *work) {
    int pitch = m->head_pitch, heads = m->shape.heads;
    struct operands o = kept(m, layer, head, a);
    for (int i = 0; i < a->count; i++) {
        const float *row = a->qkv + (size_t)i * 3 * heads * pitch + head * pitch;
        write_slot(m, a, &o, (a->head + i) % m->shape.slots, row + heads * pitch, row + 2 * heads * pitch, work);
    }
    if (a->count >= WIDE && o.keys.format != wide_format(m)) o = widened(m, &o, a, work);
    for (int i = 0; i < a->count; i += QUERIES)
        attend_some(m, layer, head, a, &o, work, i, at_most(QUERIES, a->count - i));
}
