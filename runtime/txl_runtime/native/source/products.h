/* Products of rows with matrices that lie in strips of 64 columns.
 *
 * A sum runs over k in order, in one register, for any number of rows, columns and threads. So a row's result has the
 * same bits whatever is computed beside it.
 */
#ifndef TXL_PRODUCTS_H
#define TXL_PRODUCTS_H

#include <stddef.h>
#include <stdint.h>

enum { STRIP = 64 };

/* The numbers of a matrix. A step of a strip holds, for each column in turn, one or several rows of it:
 * one in float, half precision or int8; pairs in bf16; four int8 codes; or eight codes of 4 bits, of which the first
 * four are the low halves of their bytes. */
enum format { FLOATS, HALVES, BYTES, PAIRS, CODES, NIBBLES };

/* A matrix [k, columns]; c / 64 · strip_pitch + s · step_pitch + c % 64 · size_of(format): column c of step s. */
struct matrix {
    const void *values;
    size_t strip_pitch, step_pitch; /* bytes */
    enum format format;
    int block;              /* rows of NIBBLES that share a scale */
    const float *scales;    /* of each column, of CODES; of NIBBLES, [columns / 64, blocks, 64] */
    const int32_t *offsets; /* of each column of CODES: the sum of its codes, times CODE_OFFSET */
    const int8_t *zeros;    /* of NIBBLES, as their scales: the code that stands for zero */
};

/* Rows as a matrix's format multiplies them: floats; bf16 for PAIRS; int8 codes, each row with a scale and for NIBBLES
 * with the sum of each block's codes. */
struct rows {
    const void *values;
    size_t pitch; /* bytes */
    int count;
    const float *scales, *sums; /* [count], [count, blocks] */
};

/* Memory for such rows: at most 2 · k + 256 bytes, one scale, and k / 32 + 4 sums of each row. */
struct room {
    uint8_t *values;
    float *scales, *sums;
};

/* Bytes of a column in one step, and rows that it holds. */
static inline int size_of(enum format format) { return format == HALVES ? 2 : format == BYTES ? 1 : 4; }
static inline int depth_of(enum format format) {
    return format == PAIRS ? 2 : format == CODES ? 4 : format == NIBBLES ? 8 : 1;
}

#ifndef __cplusplus /* the runtime in C++ reads the types of this header alone */
/* A matrix [k, …] whose strips follow one another, and the bytes of a number of its columns. */
static inline struct matrix in_strips(const void *values, enum format format, int k) {
    int steps = (k + depth_of(format) - 1) / depth_of(format), step = STRIP * size_of(format);
    return (struct matrix){.values = values, .strip_pitch = (size_t)steps * step, .step_pitch = step, .format = format};
}
static inline size_t bytes_in_strips(enum format format, int k, int columns) {
    return (columns + STRIP - 1) / STRIP * in_strips(NULL, format, k).strip_pitch;
}
#endif

/* Rows [count, k] of floats, which are readable to the next multiple of 16, for a product with w. */
struct rows rows_for(const struct matrix *w, const float *x, size_t x_pitch, int count, int k, const struct room *room);

/* y[r, first … last) = x[r, 0 … k) · w, or added to it; first is a multiple of 16, and so is last unless `cut`.
 * With `cut` nothing is written beyond last; without it y has room up to the next multiple of 16. */
void multiply(const struct rows *x, const struct matrix *w, int k, int first, int last, float *y, size_t y_pitch,
              int add, int cut);

/* The largest |x| of k numbers, k a multiple of 16; NaN if one is infinite or no number. */
float largest_size(const float *x, int k);

/* The scale of numbers that are kept as int8, the largest of this size. It has 16 bits, so that codes times scales are
 * exact, and give the same codes and scale when they are kept again. */
float kept_scale(float largest);

/* Columns [first, last), multiples of 16, of a matrix [k, …] in FLOATS, HALVES or BYTES, each times its scale if there
 * are scales, into one of the same columns in FLOATS, HALVES or PAIRS. */
void convert_columns(const struct matrix *from, const float *scales, int k, int first, int last,
                     const struct matrix *to);

/* Likewise `count` rows from `first` on, and around the end of k to row 0, each times its scale. The second row of a
 * pair is 0 if it is not among them. */
void convert_rows(const struct matrix *from, const float *scales, int k, int first, int count, int columns,
                  const struct matrix *to);

#endif
