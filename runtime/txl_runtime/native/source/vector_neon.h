/* Vectors of 16 floats or integers in four registers of NEON on a 64-bit Arm, with products of bytes by its dot products. */
#ifndef TXL_VECTOR_NEON_H
#define TXL_VECTOR_NEON_H

#include <arm_neon.h>
#include <stdint.h>

typedef struct { float32x4_t a, b, c, d; } vec;
typedef struct { int32x4_t a, b, c, d; } ints;

enum {
    SUMS = 4,        /* sums of 16 columns that a tile keeps in registers */
    CODE_OFFSET = 0, /* codes of activations keep their sign */
};

/* A vector or integers of one expression for each of the four registers, in which `i` is a, b, c and d. */
#define EACH(type, of) ((type){of(a), of(b), of(c), of(d)})

static inline vec v_set(float x) {
    float32x4_t four = vdupq_n_f32(x);
    return (vec){four, four, four, four};
}
static inline vec v_zero(void) { return v_set(0); }
static inline vec v_load(const float *at) {
    return (vec){vld1q_f32(at), vld1q_f32(at + 4), vld1q_f32(at + 8), vld1q_f32(at + 12)};
}
static inline void v_store(float *at, vec x) {
    vst1q_f32(at, x.a);
    vst1q_f32(at + 4, x.b);
    vst1q_f32(at + 8, x.c);
    vst1q_f32(at + 12, x.d);
}
static inline void v_store_first(float *at, vec x, int n) {
    float all[16];
    v_store(n < 16 ? all : at, x);
    for (int i = 0; n < 16 && i < n; i++) at[i] = all[i];
}
static inline vec v_load_half(const uint16_t *at) {
    float16x8_t low = vreinterpretq_f16_u16(vld1q_u16(at)), high = vreinterpretq_f16_u16(vld1q_u16(at + 8));
    return (vec){vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
                 vcvt_high_f32_f16(high)};
}
static inline void v_store_half(uint16_t *at, vec x) {
    vst1q_u16(at, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)));
    vst1q_u16(at + 8, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.c), x.d)));
}
static inline vec v_load_bytes(const int8_t *at) {
    int8x16_t bytes = vld1q_s8(at);
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return (vec){vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
                 vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
}
#define ADD(i) vaddq_f32(x.i, y.i)
static inline vec v_add(vec x, vec y) { return EACH(vec, ADD); }
#define SUB(i) vsubq_f32(x.i, y.i)
static inline vec v_sub(vec x, vec y) { return EACH(vec, SUB); }
#define MUL(i) vmulq_f32(x.i, y.i)
static inline vec v_mul(vec x, vec y) { return EACH(vec, MUL); }
#define FMA(i) vfmaq_f32(z.i, x.i, y.i)
static inline vec v_fma(vec x, vec y, vec z) { return EACH(vec, FMA); }
#define MAX(i) vbslq_f32(vcgtq_f32(x.i, y.i), x.i, y.i) /* y where one of them is NaN, as on x86 */
static inline vec v_max(vec x, vec y) { return EACH(vec, MAX); }
#define ABS(i) vabsq_f32(x.i)
static inline vec v_abs(vec x) { return EACH(vec, ABS); }
#define ROUND(i) vrndnq_f32(x.i)
static inline vec v_round(vec x) { return EACH(vec, ROUND); }
#define POWER(i) vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.i), vdupq_n_s32(127)), 23))
static inline vec v_times_power(vec x, vec n) { return v_mul(x, EACH(vec, POWER)); }
static inline uint32x4_t first_lanes(int n) {
    static const int32_t lanes[4] = {0, 1, 2, 3};
    return vcltq_s32(vld1q_s32(lanes), vdupq_n_s32(n));
}
static inline vec v_first(vec x, int n, vec rest) {
    return (vec){vbslq_f32(first_lanes(n), x.a, rest.a), vbslq_f32(first_lanes(n - 4), x.b, rest.b),
                 vbslq_f32(first_lanes(n - 8), x.c, rest.c), vbslq_f32(first_lanes(n - 12), x.d, rest.d)};
}
static inline float v_sum(vec x) { return vaddvq_f32(vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d))); }
static inline float v_largest(vec x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.c), vmaxq_f32(x.b, x.d))); }

static inline ints i_zero(void) {
    int32x4_t four = vdupq_n_s32(0);
    return (ints){four, four, four, four};
}
#define LESS(i) vsubq_s32(x.i, y.i)
static inline ints i_sub(ints x, ints y) { return EACH(ints, LESS); }
static inline ints i_load(const int32_t *at) {
    return (ints){vld1q_s32(at), vld1q_s32(at + 4), vld1q_s32(at + 8), vld1q_s32(at + 12)};
}
#define FLOAT(i) vcvtq_f32_s32(x.i)
static inline vec v_of_ints(ints x) { return EACH(vec, FLOAT); }
static inline ints i_load_codes(const int8_t *at) {
    return (ints){vreinterpretq_s32_s8(vld1q_s8(at)), vreinterpretq_s32_s8(vld1q_s8(at + 16)),
                  vreinterpretq_s32_s8(vld1q_s8(at + 32)), vreinterpretq_s32_s8(vld1q_s8(at + 48))};
}
static inline ints i_set_codes(const uint8_t *at) {
    int32_t four;
    __builtin_memcpy(&four, at, 4);
    int32x4_t all = vdupq_n_s32(four);
    return (ints){all, all, all, all};
}
#define DOT(i) vdotq_s32(sum.i, vreinterpretq_s8_s32(activations.i), vreinterpretq_s8_s32(codes.i))
static inline ints i_dot(ints sum, ints activations, ints codes) { return EACH(ints, DOT); }
static inline void v_store_codes(uint8_t *at, vec x) {
    int16x8_t low = vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(x.a)), vcvtnq_s32_f32(x.b));
    int16x8_t high = vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(x.c)), vcvtnq_s32_f32(x.d));
    vst1q_u8(at, vreinterpretq_u8_s8(vqmovn_high_s16(vqmovn_s16(low), high)));
}

#define LOW_NIBBLES(i) vandq_s32(x.i, vdupq_n_s32(0x0f0f0f0f))
static inline ints i_low_nibbles(ints x) { return EACH(ints, LOW_NIBBLES); }
#define UPPER(i) vshrq_n_s32(x.i, 4)
static inline ints i_high_nibbles(ints x) { return i_low_nibbles(EACH(ints, UPPER)); }
static inline ints i_dot_nibbles(ints sum, ints activations, ints codes) { return i_dot(sum, activations, codes); }

#define LOW_BF16(i) vreinterpretq_f32_s32(vshlq_n_s32(x.i, 16))
static inline vec v_low_bf16(ints x) { return EACH(vec, LOW_BF16); }
#define HIGH_BF16(i) vreinterpretq_f32_s32(vandq_s32(x.i, vdupq_n_s32(~0xffff)))
static inline vec v_high_bf16(ints x) { return EACH(vec, HIGH_BF16); }
static inline uint32x4_t bits_of_bf16(float32x4_t x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vshrq_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000)), 16); /* NaN stays NaN */
}
static inline void v_store_bf16(uint16_t *at, vec x) {
    vst1q_u16(at, vmovn_high_u32(vmovn_u32(bits_of_bf16(x.a)), bits_of_bf16(x.b)));
    vst1q_u16(at + 8, vmovn_high_u32(vmovn_u32(bits_of_bf16(x.c)), bits_of_bf16(x.d)));
}
#define PAIRS(i) vst1q_u16(at, vreinterpretq_u16_u32(vsliq_n_u32(bits_of_bf16(x.i), bits_of_bf16(y.i), 16))), at += 8
static inline void v_store_pairs(uint16_t *at, vec x, vec y) { PAIRS(a), PAIRS(b), PAIRS(c), PAIRS(d); }

static inline void pause_briefly(void) { __asm__ volatile("yield"); }

#endif
