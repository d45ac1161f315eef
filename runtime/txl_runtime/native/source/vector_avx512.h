/* Vectors of 16 floats or integers in one register of AVX-512, with products of bytes by VNNI. */
#ifndef TXL_VECTOR_AVX512_H
#define TXL_VECTOR_AVX512_H

#include <immintrin.h>
#include <stdint.h>

typedef __m512 vec;
typedef __m512i ints;

enum {
    SUMS = 16,         /* sums of 16 columns that a tile keeps in registers */
    CODE_OFFSET = 128, /* added to codes of activations, because VNNI multiplies unsigned bytes with signed ones */
};

static inline __mmask16 first_lanes(int n) { return n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1); }

static inline vec v_zero(void) { return _mm512_setzero_ps(); }
static inline vec v_set(float x) { return _mm512_set1_ps(x); }
static inline vec v_load(const float *at) { return _mm512_loadu_ps(at); }
static inline void v_store(float *at, vec x) { _mm512_storeu_ps(at, x); }
static inline void v_store_first(float *at, vec x, int n) { _mm512_mask_storeu_ps(at, first_lanes(n), x); }
static inline vec v_load_half(const uint16_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }
static inline void v_store_half(uint16_t *at, vec x) { _mm256_storeu_si256((__m256i *)at, _mm512_cvtps_ph(x, 0)); }
static inline vec v_load_bytes(const int8_t *at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
}
static inline vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec v_abs(vec a) { return _mm512_abs_ps(a); }
static inline vec v_round(vec a) { return _mm512_roundscale_ps(a, 0); }
static inline vec v_times_power(vec a, vec n) { return _mm512_scalef_ps(a, n); }
static inline vec v_first(vec x, int n, vec rest) { return _mm512_mask_mov_ps(rest, first_lanes(n), x); }
static inline float v_sum(vec a) { return _mm512_reduce_add_ps(a); }
static inline float v_largest(vec a) { return _mm512_reduce_max_ps(a); }

static inline ints i_zero(void) { return _mm512_setzero_si512(); }
static inline ints i_sub(ints a, ints b) { return _mm512_sub_epi32(a, b); }
static inline ints i_load(const int32_t *at) { return _mm512_loadu_si512(at); }
static inline vec v_of_ints(ints a) { return _mm512_cvtepi32_ps(a); }
static inline ints i_load_codes(const int8_t *at) { return _mm512_loadu_si512(at); }
static inline ints i_set_codes(const uint8_t *at) {
    int32_t four;
    __builtin_memcpy(&four, at, 4);
    return _mm512_set1_epi32(four);
}
static inline ints i_dot(ints sum, ints activations, ints codes) {
    return _mm512_dpbusd_epi32(sum, activations, codes);
}
static inline void v_store_codes(uint8_t *at, vec x) {
    ints codes = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(CODE_OFFSET));
    _mm_storeu_si128((__m128i *)at, _mm512_cvtepi32_epi8(codes));
}

static inline ints i_low_nibbles(ints a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
static inline ints i_high_nibbles(ints a) { return i_low_nibbles(_mm512_srli_epi16(a, 4)); }
/* Activations have no offset here: it is the other codes, 0 … 15, that are unsigned. */
static inline ints i_dot_nibbles(ints sum, ints activations, ints codes) {
    return _mm512_dpbusd_epi32(sum, codes, activations);
}

#ifdef __AVX512BF16__
#define TXL_FAST_PAIRS
static inline vec v_dot_pairs(vec sum, ints a, ints b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
static inline ints bits_of_bf16(vec x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }
#else
static inline vec v_low_bf16(ints a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
static inline vec v_high_bf16(ints a) {
    return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32((int)0xffff0000)));
}
static inline ints bits_of_bf16(vec x) {
    ints bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    ints rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 none = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); /* NaN could be rounded to a number */
    return _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, none, _mm512_set1_epi32(0x7fc00000)), 16);
}
#endif
static inline void v_store_bf16(uint16_t *at, vec x) {
    _mm256_storeu_si256((__m256i *)at, _mm512_cvtepi32_epi16(bits_of_bf16(x)));
}
static inline void v_store_pairs(uint16_t *at, vec x, vec y) {
    _mm512_storeu_si512(at, _mm512_or_si512(bits_of_bf16(x), _mm512_slli_epi32(bits_of_bf16(y), 16)));
}

static inline void pause_briefly(void) { _mm_pause(); }

#endif
