/* Layer norms, activations and the softmax, computed row by row. */
#ifndef TXL_ROWS_H
#define TXL_ROWS_H

/* out = norm(x + y) · weight + bias over the first `width` numbers; y may be NULL. Beyond them out is 0. */
void layer_norm(float *out, const float *x, const float *y, int width, float epsilon, const float *weight,
                const float *bias);

/* x += y over a multiple of 16 numbers. */
void add_row(float *x, const float *y, int count);

/* x = activation(x + bias) over a multiple of 16 numbers; activation -1 for none, bias may be NULL. */
void finish_row(float *x, int count, const float *bias, int activation);

/* x = x + bias - log(sum(exp(x + bias))) over `count` numbers; bias may be NULL. */
void log_softmax(float *x, const float *bias, int count);

#endif
