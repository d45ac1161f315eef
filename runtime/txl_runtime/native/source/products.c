#include "products.h"

#include <string.h>

#include "vector.h"

#define ALWAYS static inline __attribute__((always_inline))

/* 16 numbers of a matrix in FLOATS, HALVES or BYTES. */
ALWAYS vec load(const char *at, enum format format) {
    if (format == HALVES) return v_load_half((const uint16_t *)at);
    if (format == BYTES) return v_load_bytes((const int8_t *)at);
    return v_load((const float *)at);
}

/* In the functions below, every caller passes constants for rows, panels and format. */

/* sums[r · panels + p] += row r · panel p, of floats. */
ALWAYS void sum_floats(int rows, int panels, enum format format, const char *x, size_t x_pitch, const char *values,
                       size_t step_pitch, int steps, vec *sums) {
    for (int i = 0; i < steps; i++, values += step_pitch) {
        vec b[4];
        ints pairs[4];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            const char *at = values + p * LANES * size_of(format);
            if (format == PAIRS) pairs[p] = i_load_codes((const int8_t *)at);
            else b[p] = load(at, format);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const char *at = x + r * x_pitch + i * sizeof(float);
            ints pair = format == PAIRS ? i_set_codes((const uint8_t *)at) : i_zero();
            vec a = format == PAIRS ? v_zero() : v_set(*(const float *)at);
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) {
                vec *sum = &sums[r * panels + p];
                *sum = format == PAIRS ? v_dot_pairs(*sum, pair, pairs[p]) : v_fma(a, b[p], *sum);
            }
        }
    }
}

/* The same of codes, in integers, which are new sums. */
ALWAYS void sum_codes(int rows, int panels, enum format format, const uint8_t *x, size_t x_pitch, const char *values,
                      size_t step_pitch, int steps, ints *sums) {
    for (int i = 0; i < rows * panels; i++) sums[i] = i_zero();
    for (int i = 0; i < steps; i++, values += step_pitch) {
        ints low[4], high[4];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            ints b = i_load_codes((const int8_t *)values + p * LANES * 4);
            low[p] = format == NIBBLES ? i_low_nibbles(b) : b;
            if (format == NIBBLES) high[p] = i_high_nibbles(b);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const uint8_t *at = x + r * x_pitch + i * depth_of(format);
            ints a = i_set_codes(at), next = format == NIBBLES ? i_set_codes(at + 4) : a;
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) {
                ints *sum = &sums[r * panels + p];
                if (format == NIBBLES) *sum = i_dot_nibbles(i_dot_nibbles(*sum, a, low[p]), next, high[p]);
                else *sum = i_dot(*sum, a, low[p]);
            }
        }
    }
}

/* sums = rows · panels of codes, a scale for each column. */
ALWAYS void of_codes(int rows, int panels, const struct rows *x, int row, const struct matrix *w, int column, int k,
                     const char *values, vec *sums) {
    ints whole[SUMS];
    const uint8_t *in = (const uint8_t *)x->values + row * x->pitch;
    sum_codes(rows, panels, CODES, in, x->pitch, values, w->step_pitch, k / 4, whole);
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) {
        vec scale = v_load(w->scales + column + p * LANES);
        ints offset = i_load(w->offsets + column + p * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vec sum = v_of_ints(i_sub(whole[r * panels + p], offset));
            sums[r * panels + p] = v_mul(v_mul(sum, v_set(x->scales[row + r])), scale);
        }
    }
}

/* The same of codes of 4 bits, with a scale and a zero for each column and block of rows. */
ALWAYS void of_nibbles(int rows, int panels, const struct rows *x, int row, const struct matrix *w, int column, int k,
                       const char *values, vec *sums) {
    int blocks = (k + w->block - 1) / w->block, steps = w->block / 8;
    const uint8_t *in = (const uint8_t *)x->values + row * x->pitch;
    size_t first = (size_t)(column / STRIP) * blocks * STRIP + column % STRIP;
    for (int b = 0; b < blocks; b++, values += steps * w->step_pitch, in += w->block) {
        ints whole[SUMS];
        sum_codes(rows, panels, NIBBLES, in, x->pitch, values, w->step_pitch, steps, whole);
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            size_t at = first + b * STRIP + p * LANES;
            vec scale = v_load(w->scales + at), zero = v_load_bytes(w->zeros + at);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                vec less = v_set(-x->sums[(size_t)(row + r) * blocks + b]);
                vec sum = v_fma(zero, less, v_of_ints(whole[r * panels + p]));
                sums[r * panels + p] = v_fma(sum, scale, sums[r * panels + p]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) sums[r * panels + p] = v_mul(sums[r * panels + p], v_set(x->scales[row + r]));
}

/* One tile: `rows` rows of x from `row` on, with `panels` times 16 columns of w from `column` on. */
ALWAYS void tile(int rows, int panels, enum format format, const struct rows *x, int row, const struct matrix *w,
                 int column, int k, float *y, size_t y_pitch, int add, int columns) {
    const char *values = (const char *)w->values + column / STRIP * w->strip_pitch + column % STRIP * size_of(format);
    vec sums[SUMS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            sums[r * panels + p] = add ? v_load(y + r * y_pitch + p * LANES) : v_zero();
    if (format == CODES) of_codes(rows, panels, x, row, w, column, k, values, sums);
    else if (format == NIBBLES) of_nibbles(rows, panels, x, row, w, column, k, values, sums);
    else {
        int steps = (k + depth_of(format) - 1) / depth_of(format);
        const char *in = (const char *)x->values + row * x->pitch;
        sum_floats(rows, panels, format, in, x->pitch, values, w->step_pitch, steps, sums);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            float *to = y + r * y_pitch + p * LANES;
            if (columns - p * LANES >= LANES) v_store(to, sums[r * panels + p]);
            else v_store_first(to, sums[r * panels + p], columns - p * LANES);
        }
}

/* Tiles of two rows or panels are there; plain C is compiled in half the time without them. */
#ifdef TXL_VECTOR_PLAIN_H
enum { TWOS = 0 };
#else
enum { TWOS = 1 };
#endif

/* The height of the next tile: 4, 2 or 1 rows. */
static inline int tile_rows(int left) { return left >= 4 ? 4 : left >= 2 && TWOS ? 2 : 1; }

/* The width of the next tile: 4, 2 or 1 panels, of those that are left in the strip, as many as registers hold. */
static inline int tile_panels(int rows, int left, int sums) {
    int most = at_most(left, sums / rows);
    return most >= 4 ? 4 : most >= 2 && TWOS ? 2 : 1;
}

#define TILE(ROWS, PANELS) tile(ROWS, PANELS, format, x, r, w, c, k, out, y_pitch, add, to - c)

ALWAYS void multiply_as(enum format format, const struct rows *x, const struct matrix *w, int k, int first, int last,
                        float *y, size_t y_pitch, int add, int cut) {
    int end = cut ? last : padded(last);
    int sums = format == NIBBLES ? SUMS / 2 : SUMS; /* NIBBLES have sums of two kinds */
    for (int from = first; from < end; from += STRIP - from % STRIP) {
        int to = at_most(end, from + STRIP - from % STRIP);
        for (int r = 0, high; r < x->count; r += high) {
            high = tile_rows(x->count - r);
            for (int c = from, wide; c < to; c += wide * LANES) {
                wide = tile_panels(high, (to - c + LANES - 1) / LANES, sums);
                float *out = y + r * y_pitch + c;
                if (high == 4 && wide == 4 && SUMS >= 16) TILE(4, 4);
                else if (high == 4 && wide == 2 && SUMS >= 8) TILE(4, 2);
                else if (high == 4) TILE(4, 1);
                else if (high == 2 && wide == 4 && SUMS >= 8) TILE(2, 4);
                else if (high == 2 && wide == 2 && TWOS) TILE(2, 2);
                else if (high == 2 && TWOS) TILE(2, 1);
                else if (wide == 4) TILE(1, 4);
                else if (wide == 2 && TWOS) TILE(1, 2);
                else TILE(1, 1);
            }
        }
    }
}

void multiply(const struct rows *x, const struct matrix *w, int k, int first, int last, float *y, size_t y_pitch,
              int add, int cut) {
    switch (w->format) {
    case FLOATS: multiply_as(FLOATS, x, w, k, first, last, y, y_pitch, add, cut); break;
    case HALVES: multiply_as(HALVES, x, w, k, first, last, y, y_pitch, add, cut); break;
    case BYTES: multiply_as(BYTES, x, w, k, first, last, y, y_pitch, add, cut); break;
    case PAIRS: multiply_as(PAIRS, x, w, k, first, last, y, y_pitch, add, cut); break;
    case CODES: multiply_as(CODES, x, w, k, first, last, y, y_pitch, 0, cut); break;
    case NIBBLES: multiply_as(NIBBLES, x, w, k, first, last, y, y_pitch, 0, cut); break;
    }
}

float largest_size(const float *x, int k) {
    vec largest = v_zero(), zeros = v_zero();
    for (int i = 0; i < k; i += LANES) {
        vec v = v_load(x + i);
        largest = v_max(v_abs(v), largest);
        zeros = v_fma(v, v_zero(), zeros); /* NaN where a value is no number */
    }
    return v_largest(largest) + v_sum(zeros);
}

float kept_scale(float largest) {
    if (largest < 1e-30f) return 0;
    float scale = largest / 127;
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    bits = (bits + 0xff) & ~0xffu; /* rounded up, lest a code is 128 */
    memcpy(&scale, &bits, 4);
    return scale;
}

/* Codes of one row, [k] bytes, and its scale. */
static float quantise(const float *x, int k, uint8_t *codes) {
    float top = largest_size(x, k);
    vec steps = v_set(top > 0 ? 127 / top : 0);
    for (int i = 0; i < k; i += LANES) v_store_codes(codes + i, v_mul(v_load(x + i), steps));
    return top / 127;
}

struct rows rows_for(const struct matrix *w, const float *x, size_t x_pitch, int count, int k,
                     const struct room *room) {
    if (depth_of(w->format) == 1) return (struct rows){x, x_pitch * sizeof *x, count, NULL, NULL};
    int wide = padded(k), block = w->format == NIBBLES ? w->block : wide, blocks = (wide + block - 1) / block;
    struct rows made = {room->values, (size_t)blocks * block, count, room->scales, room->sums};
    if (w->format == PAIRS) made.pitch *= sizeof(uint16_t);
    for (int r = 0; r < count; r++, x += x_pitch) {
        uint8_t *row = room->values + r * made.pitch;
        if (w->format == PAIRS) {
            for (int i = 0; i < wide; i += LANES) v_store_bf16((uint16_t *)row + i, v_load(x + i));
            continue;
        }
        room->scales[r] = quantise(x, wide, row);
        if (w->format == CODES) continue;
        memset(row + wide, CODE_OFFSET, made.pitch - wide);
        for (int b = 0; b < blocks; b++) {
            int32_t sum = 0;
            for (int i = b * block; i < (b + 1) * block; i++) {
                row[i] = (uint8_t)(row[i] - CODE_OFFSET);
                sum += (int8_t)row[i];
            }
            room->sums[r * blocks + b] = (float)sum;
        }
    }
    return made;
}

/* One number of each of 16 columns, or of PAIRS also the next row's. */
ALWAYS void store(char *to, enum format format, vec one, vec next) {
    if (format == PAIRS) v_store_pairs((uint16_t *)to, one, next);
    else if (format == HALVES) v_store_half((uint16_t *)to, one);
    else v_store((float *)to, one);
}

ALWAYS void columns_of(enum format format, const struct matrix *from, const float *scales, int k, int first, int last,
                       const struct matrix *to) {
    int depth = depth_of(to->format), size = size_of(to->format);
    for (int c = first; c < last; c += LANES) {
        const char *source = (const char *)from->values + c / STRIP * from->strip_pitch + c % STRIP * size_of(format);
        char *target = (char *)to->values + c / STRIP * to->strip_pitch + c % STRIP * size;
        vec scale = scales ? v_load(scales + c) : v_set(1), next = v_zero();
        for (int i = 0; i < k; i += depth, target += to->step_pitch) {
            vec one = v_mul(load(source + i * from->step_pitch, format), scale);
            if (i + 1 < k && depth == 2) next = v_mul(load(source + (i + 1) * from->step_pitch, format), scale);
            else next = v_zero();
            store(target, to->format, one, next);
        }
    }
}

void convert_columns(const struct matrix *from, const float *scales, int k, int first, int last,
                     const struct matrix *to) {
    if (from->format == FLOATS) columns_of(FLOATS, from, scales, k, first, last, to);
    else if (from->format == HALVES) columns_of(HALVES, from, scales, k, first, last, to);
    else columns_of(BYTES, from, scales, k, first, last, to);
}

ALWAYS void rows_of(enum format format, const struct matrix *from, const float *scales, int k, int first, int count,
                    int columns, const struct matrix *to) {
    int depth = depth_of(to->format), size = size_of(to->format);
    for (int i = 0; i < k; i += depth) {
        int among[2] = {(i - first + k) % k < count, depth == 2 && i + 1 < k && (i + 1 - first + k) % k < count};
        vec scale = v_set(scales && among[0] ? scales[i] : 1), more = v_set(scales && among[1] ? scales[i + 1] : 1);
        if (!among[0] && !among[1]) continue;
        for (int c = 0; c < columns; c += LANES) {
            const char *source = (const char *)from->values + i * from->step_pitch + c * size_of(format);
            char *target = (char *)to->values + i / depth * to->step_pitch + c * size;
            vec one = among[0] ? v_mul(load(source, format), scale) : v_zero();
            vec next = among[1] ? v_mul(load(source + from->step_pitch, format), more) : v_zero();
            store(target, to->format, one, next);
        }
    }
}

void convert_rows(const struct matrix *from, const float *scales, int k, int first, int count, int columns,
                  const struct matrix *to) {
    if (from->format == FLOATS) rows_of(FLOATS, from, scales, k, first, count, columns, to);
    else if (from->format == HALVES) rows_of(HALVES, from, scales, k, first, count, columns, to);
    else rows_of(BYTES, from, scales, k, first, count, columns, to);
}
