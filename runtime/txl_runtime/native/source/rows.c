#include "rows.h"

#include <math.h>
#include <stddef.h>

#include "vector.h"

void layer_norm(float *out, const float *x, const float *y, int width, float epsilon, const float *weight,
                const float *bias) {
    vec sum = v_zero(), squares = v_zero();
    for (int i = 0; i < width; i += LANES) {
        vec v = y ? v_add(v_load(x + i), v_load(y + i)) : v_load(x + i);
        v_store(out + i, v);
        sum = v_add(sum, v);
    }
    vec mean = v_set(v_sum(sum) / (float)width);
    for (int i = 0; i < width; i += LANES) {
        vec v = v_first(v_sub(v_load(out + i), mean), width - i, v_zero());
        squares = v_fma(v, v, squares);
    }
    vec factor = v_set(1 / sqrtf(v_sum(squares) / (float)width + epsilon));
    for (int i = 0; i < width; i += LANES) {
        vec v = v_mul(v_sub(v_load(out + i), mean), factor);
        v_store(out + i, v_fma(v, v_load(weight + i), v_load(bias + i)));
    }
}

void add_row(float *x, const float *y, int count) {
    for (int i = 0; i < count; i += LANES) v_store(x + i, v_add(v_load(x + i), v_load(y + i)));
}

static void gelu(float *x, int count, int by_tanh) {
    for (int i = 0; i < count; i++) {
        float v = x[i];
        float inner = by_tanh ? tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v)) : erff(v * 0.7071067811865476f);
        x[i] = 0.5f * v * (1 + inner);
    }
}

void finish_row(float *x, int count, const float *bias, int activation) {
    if (bias) add_row(x, bias, count);
    if (activation == 0)
        for (int i = 0; i < count; i += LANES) v_store(x + i, v_max(v_zero(), v_load(x + i)));
    else if (activation > 0) gelu(x, count, activation == 2);
}

void log_softmax(float *x, const float *bias, int count) {
    int whole = count / LANES * LANES;
    vec largest = v_set(-INFINITY), sum = v_zero();
    for (int i = 0; bias && i < count; i++) x[i] += bias[i];
    for (int i = 0; i < whole; i += LANES) largest = v_max(v_load(x + i), largest);
    float top = v_largest(largest), rest = 0;
    for (int i = whole; i < count; i++) top = x[i] > top ? x[i] : top;
    for (int i = 0; i < whole; i += LANES) sum = v_add(sum, v_exp(v_sub(v_load(x + i), v_set(top))));
    for (int i = whole; i < count; i++) rest += expf(x[i] - top);
    float shift = top + logf(v_sum(sum) + rest);
    for (int i = 0; i < count; i++) x[i] -= shift;
}
