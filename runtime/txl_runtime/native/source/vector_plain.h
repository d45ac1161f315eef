/* Vectors of 16 floats or integers in plain C, for every processor; compilers make vector instructions of the loops. */
#ifndef TXL_VECTOR_PLAIN_H
#define TXL_VECTOR_PLAIN_H

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct { float v[16]; } vec;
typedef struct { int32_t v[16]; } ints;

enum {
    SUMS = 4,        /* sums of 16 columns that a tile keeps in registers */
    CODE_OFFSET = 0, /* codes of activations keep their sign */
};

static inline vec v_set(float x) {
    vec r;
    for (int i = 0; i < 16; i++) r.v[i] = x;
    return r;
}
static inline vec v_zero(void) { return v_set(0); }
static inline vec v_load(const float *at) {
    vec r;
    memcpy(r.v, at, sizeof r.v);
    return r;
}
static inline void v_store(float *at, vec x) { memcpy(at, x.v, sizeof x.v); }
static inline void v_store_first(float *at, vec x, int n) {
    for (int i = 0; i < n && i < 16; i++) at[i] = x.v[i];
}
static inline float of_half(uint16_t half) {
    uint32_t rest = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16, bits;
    float x;
    memcpy(&x, &rest, 4);
    x *= 0x1p112f; /* moves the exponent, and makes small numbers of half precision normal */
    memcpy(&bits, &x, 4);
    if ((half & 0x7c00) == 0x7c00) bits = rest | 0x7f800000u;
    bits |= sign;
    memcpy(&x, &bits, 4);
    return x;
}
static inline uint16_t to_half(float x) {
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds to more than 65504 */
    if (bits < 0x38800000) {                                  /* rounded to a multiple of 2^-24 by an addition */
        float small;
        memcpy(&small, &bits, 4);
        small += 0.5f;
        memcpy(&bits, &small, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | (bits - 0x38000000) >> 13);
}
static inline vec v_load_half(const uint16_t *at) {
    vec r;
    for (int i = 0; i < 16; i++) r.v[i] = of_half(at[i]);
    return r;
}
static inline void v_store_half(uint16_t *at, vec x) {
    for (int i = 0; i < 16; i++) at[i] = to_half(x.v[i]);
}
static inline vec v_load_bytes(const int8_t *at) {
    vec r;
    for (int i = 0; i < 16; i++) r.v[i] = at[i];
    return r;
}
static inline vec v_add(vec a, vec b) {
    for (int i = 0; i < 16; i++) a.v[i] += b.v[i];
    return a;
}
static inline vec v_sub(vec a, vec b) {
    for (int i = 0; i < 16; i++) a.v[i] -= b.v[i];
    return a;
}
static inline vec v_mul(vec a, vec b) {
    for (int i = 0; i < 16; i++) a.v[i] *= b.v[i];
    return a;
}
static inline vec v_fma(vec a, vec b, vec c) {
    for (int i = 0; i < 16; i++) c.v[i] += a.v[i] * b.v[i];
    return c;
}
static inline vec v_max(vec a, vec b) {
    for (int i = 0; i < 16; i++) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
}
static inline vec v_abs(vec a) {
    for (int i = 0; i < 16; i++) a.v[i] = fabsf(a.v[i]);
    return a;
}
/* The nearest whole number, to even, of a number below 2^22; by its bits, since compilers that may order sums anew would
 * take a number away from itself. */
static inline vec v_round(vec a) {
    for (int i = 0; i < 16; i++) {
        float moved = a.v[i] + 0x1.8p23f;
        int32_t bits;
        memcpy(&bits, &moved, 4);
        a.v[i] = (float)(bits - 0x4b400000);
    }
    return a;
}
static inline vec v_times_power(vec a, vec n) {
    for (int i = 0; i < 16; i++) {
        uint32_t bits = (uint32_t)((int32_t)n.v[i] + 127) << 23;
        float power;
        memcpy(&power, &bits, 4);
        a.v[i] *= power;
    }
    return a;
}
static inline vec v_first(vec x, int n, vec rest) {
    for (int i = 0; i < 16; i++) rest.v[i] = i < n ? x.v[i] : rest.v[i];
    return rest;
}
static inline float v_sum(vec a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
    return a.v[0];
}
static inline float v_largest(vec a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
    return a.v[0];
}

static inline ints i_zero(void) {
    ints r = {{0}};
    return r;
}
static inline ints i_sub(ints a, ints b) {
    for (int i = 0; i < 16; i++) a.v[i] -= b.v[i];
    return a;
}
static inline ints i_load(const int32_t *at) {
    ints r;
    memcpy(r.v, at, sizeof r.v);
    return r;
}
static inline vec v_of_ints(ints a) {
    vec r;
    for (int i = 0; i < 16; i++) r.v[i] = (float)a.v[i];
    return r;
}
static inline ints i_load_codes(const int8_t *at) {
    ints r;
    memcpy(r.v, at, sizeof r.v);
    return r;
}
static inline ints i_set_codes(const uint8_t *at) {
    ints r;
    for (int i = 0; i < 16; i++) memcpy(&r.v[i], at, 4);
    return r;
}
static inline ints i_dot(ints sum, ints activations, ints codes) {
    int8_t a[64], c[64];
    memcpy(a, activations.v, 64);
    memcpy(c, codes.v, 64);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 4; j++) sum.v[i] += a[4 * i + j] * c[4 * i + j];
    return sum;
}
static inline void v_store_codes(uint8_t *at, vec x) {
    vec whole = v_round(x);
    for (int i = 0; i < 16; i++) at[i] = (uint8_t)(int8_t)(x.v[i] == x.v[i] ? whole.v[i] : 0);
}

static inline ints i_low_nibbles(ints a) {
    for (int i = 0; i < 16; i++) a.v[i] &= 0x0f0f0f0f;
    return a;
}
static inline ints i_high_nibbles(ints a) {
    for (int i = 0; i < 16; i++) a.v[i] = a.v[i] >> 4 & 0x0f0f0f0f;
    return a;
}
static inline ints i_dot_nibbles(ints sum, ints activations, ints codes) { return i_dot(sum, activations, codes); }

static inline vec v_low_bf16(ints a) {
    vec r;
    for (int i = 0; i < 16; i++) a.v[i] = (int32_t)((uint32_t)a.v[i] << 16);
    memcpy(r.v, a.v, sizeof r.v);
    return r;
}
static inline vec v_high_bf16(ints a) {
    vec r;
    for (int i = 0; i < 16; i++) a.v[i] &= ~0xffff;
    memcpy(r.v, a.v, sizeof r.v);
    return r;
}
static inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)(x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0);
}
static inline void v_store_bf16(uint16_t *at, vec x) {
    for (int i = 0; i < 16; i++) at[i] = to_bf16(x.v[i]);
}
static inline void v_store_pairs(uint16_t *at, vec x, vec y) {
    for (int i = 0; i < 16; i++) {
        at[2 * i] = to_bf16(x.v[i]);
        at[2 * i + 1] = to_bf16(y.v[i]);
    }
}

static inline void pause_briefly(void) {}

#endif
