/* Vectors of 16 floats or integers in two registers of AVX2, with FMA and F16C. */
#ifndef TXL_VECTOR_AVX2_H
#define TXL_VECTOR_AVX2_H

#include <immintrin.h>
#include <stdint.h>

typedef struct { __m256 a, b; } vec;
typedef struct { __m256i a, b; } ints;

enum {
    SUMS = 4,        /* sums of 16 columns that a tile keeps in registers */
    CODE_OFFSET = 0, /* codes of activations keep their sign */
};

/* All bits of the first n of 8 lanes. */
static inline __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline vec v_of(__m256 a, __m256 b) { vec x = {a, b}; return x; }
static inline ints i_of(__m256i a, __m256i b) { ints x = {a, b}; return x; }

static inline vec v_zero(void) { return v_of(_mm256_setzero_ps(), _mm256_setzero_ps()); }
static inline vec v_set(float x) { return v_of(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
static inline vec v_load(const float *at) { return v_of(_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)); }
static inline void v_store(float *at, vec x) {
    _mm256_storeu_ps(at, x.a);
    _mm256_storeu_ps(at + 8, x.b);
}
static inline void v_store_first(float *at, vec x, int n) {
    if (n >= 16) {
        v_store(at, x);
        return;
    }
    _mm256_maskstore_ps(at, first_lanes(n), x.a);
    if (n > 8) _mm256_maskstore_ps(at + 8, first_lanes(n - 8), x.b);
}
static inline vec v_load_half(const uint16_t *at) {
    return v_of(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at + 8))));
}
static inline void v_store_half(uint16_t *at, vec x) {
    _mm_storeu_si128((__m128i *)at, _mm256_cvtps_ph(x.a, 0));
    _mm_storeu_si128((__m128i *)(at + 8), _mm256_cvtps_ph(x.b, 0));
}
static inline vec v_load_bytes(const int8_t *at) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)at);
    return v_of(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes))));
}
static inline vec v_add(vec x, vec y) { return v_of(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
static inline vec v_sub(vec x, vec y) { return v_of(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
static inline vec v_mul(vec x, vec y) { return v_of(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
static inline vec v_fma(vec x, vec y, vec z) {
    return v_of(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
static inline vec v_max(vec x, vec y) { return v_of(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
static inline vec v_abs(vec x) {
    __m256 sign = _mm256_set1_ps(-0.f);
    return v_of(_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b));
}
static inline vec v_round(vec x) { return v_of(_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)); }
static inline __m256 times_power(__m256 x, __m256 n) {
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(power));
}
static inline vec v_times_power(vec x, vec n) { return v_of(times_power(x.a, n.a), times_power(x.b, n.b)); }
static inline vec v_first(vec x, int n, vec rest) {
    return v_of(_mm256_blendv_ps(rest.a, x.a, _mm256_castsi256_ps(first_lanes(n))),
                _mm256_blendv_ps(rest.b, x.b, _mm256_castsi256_ps(first_lanes(n - 8))));
}
static inline float v_sum(vec x) {
    __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline float v_largest(vec x) {
    __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

static inline ints i_zero(void) { return i_of(_mm256_setzero_si256(), _mm256_setzero_si256()); }
static inline ints i_sub(ints x, ints y) { return i_of(_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)); }
static inline ints i_load(const int32_t *at) {
    return i_of(_mm256_loadu_si256((const __m256i *)at), _mm256_loadu_si256((const __m256i *)(at + 8)));
}
static inline vec v_of_ints(ints x) { return v_of(_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }
static inline ints i_load_codes(const int8_t *at) {
    return i_of(_mm256_loadu_si256((const __m256i *)at), _mm256_loadu_si256((const __m256i *)(at + 32)));
}
static inline ints i_set_codes(const uint8_t *at) {
    int32_t four;
    __builtin_memcpy(&four, at, 4);
    return i_of(_mm256_set1_epi32(four), _mm256_set1_epi32(four));
}
/* Pairs are summed in 16 bits: 2 · 127 · 127 is less than 2^15, so the sign goes to the weight. */
static inline __m256i dot(__m256i sum, __m256i activations, __m256i codes) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(activations), _mm256_sign_epi8(codes, activations));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static inline ints i_dot(ints sum, ints activations, ints codes) {
    return i_of(dot(sum.a, activations.a, codes.a), dot(sum.b, activations.b, codes.b));
}
static inline void v_store_codes(uint8_t *at, vec x) {
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)at, bytes);
}

static inline __m256i low_nibbles(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
static inline ints i_low_nibbles(ints x) { return i_of(low_nibbles(x.a), low_nibbles(x.b)); }
static inline ints i_high_nibbles(ints x) {
    return i_of(low_nibbles(_mm256_srli_epi16(x.a, 4)), low_nibbles(_mm256_srli_epi16(x.b, 4)));
}
/* Pairs are summed in 16 bits: 2 · 15 · 127 is less than 2^15. */
static inline __m256i dot_nibbles(__m256i sum, __m256i activations, __m256i codes) {
    __m256i pairs = _mm256_maddubs_epi16(codes, activations);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static inline ints i_dot_nibbles(ints sum, ints activations, ints codes) {
    return i_of(dot_nibbles(sum.a, activations.a, codes.a), dot_nibbles(sum.b, activations.b, codes.b));
}

static inline vec v_low_bf16(ints x) {
    return v_of(_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16)));
}
static inline vec v_high_bf16(ints x) {
    __m256i high = _mm256_set1_epi32((int)0xffff0000);
    return v_of(_mm256_castsi256_ps(_mm256_and_si256(x.a, high)), _mm256_castsi256_ps(_mm256_and_si256(x.b, high)));
}
static inline __m256i bits_of_bf16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i none = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); /* NaN could be rounded to a number */
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), none), 16);
}
static inline void v_store_bf16(uint16_t *at, vec x) {
    __m256i words = _mm256_packus_epi32(bits_of_bf16(x.a), bits_of_bf16(x.b));
    _mm256_storeu_si256((__m256i *)at, _mm256_permute4x64_epi64(words, 0xd8));
}
static inline void v_store_pairs(uint16_t *at, vec x, vec y) {
    __m256i *to = (__m256i *)at;
    _mm256_storeu_si256(to, _mm256_or_si256(bits_of_bf16(x.a), _mm256_slli_epi32(bits_of_bf16(y.a), 16)));
    _mm256_storeu_si256(to + 1, _mm256_or_si256(bits_of_bf16(x.b), _mm256_slli_epi32(bits_of_bf16(y.b), 16)));
}

static inline void pause_briefly(void) { _mm_pause(); }

#endif
