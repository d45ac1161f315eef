/* The vectors of the instruction set that the compiler was asked for, and functions of them that need no more. */
#ifndef TXL_VECTOR_H
#define TXL_VECTOR_H

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#include "vector_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vector_avx2.h"
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "vector_neon.h"
#else
#include "vector_plain.h"
#endif

enum { LANES = 16 };

static inline int padded(int n) { return (n + LANES - 1) / LANES * LANES; }
static inline int at_most(int a, int b) { return a < b ? a : b; }
static inline int at_least(int a, int b) { return a > b ? a : b; }

/* sum + the products of two pairs in bf16 in each lane; on a processor that has it in one instruction, in an order and
 * a rounding of its own. */
#ifndef TXL_FAST_PAIRS
static inline vec v_dot_pairs(vec sum, ints a, ints b) {
    return v_fma(v_high_bf16(a), v_high_bf16(b), v_fma(v_low_bf16(a), v_low_bf16(b), sum));
}
#endif

/* e^x for x of at most 88, with a relative error of 2^-23; 0 or almost so below -87. */
static inline vec v_exp(vec x) {
    x = v_max(v_set(-87.f), x);
    vec n = v_round(v_mul(x, v_set(1.44269504088896f)));
    vec r = v_fma(n, v_set(-0.693359375f), x);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    vec p = v_set(1.9875691500e-4f);
    p = v_fma(p, r, v_set(1.3981999507e-3f));
    p = v_fma(p, r, v_set(8.3334519073e-3f));
    p = v_fma(p, r, v_set(4.1665795894e-2f));
    p = v_fma(p, r, v_set(1.6666665459e-1f));
    p = v_fma(p, r, v_set(5.0000001201e-1f));
    p = v_fma(p, v_mul(r, r), v_add(r, v_set(1.f)));
    return v_times_power(p, n);
}

#endif
