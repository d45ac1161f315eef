/* Writes what the functions of vector.h make of the same numbers, for a comparison of instruction sets. */
#include <stdio.h>
#include <string.h>

#include "vector.h"

enum { ROUNDS = 4096 };

static uint32_t state = 1;
static uint32_t next(void) { return state = state * 1664525u + 1013904223u; }

/* A float of any exponent within 2^-30 … 2^30, a zero, an infinity or NaN. */
static float some(void) {
    uint32_t bits = next(), kind = next() >> 26;
    static const uint32_t odd[] = {0, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000};
    bits = kind < 5 ? odd[kind] : (bits & 0x807fffff) | (97 + (next() >> 8) % 60) << 23;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static float small(void) { return (float)(int32_t)next() / 17179869184.f * 1000; } /* -125 … 125 */

static void put(const void *data, size_t bytes) { fwrite(data, 1, bytes, stdout); }
static void put_vector(vec x) {
    float out[16];
    v_store(out, x);
    for (int i = 0; i < 16; i++) out[i] = out[i] != out[i] ? 12345.f : out[i] + 0; /* any NaN, and zero without a sign */
    put(out, sizeof out);
}

int main(void) {
    for (int round = 0; round < ROUNDS; round++) {
        float x[16], y[16], z[16], cut[17] = {0};
        uint16_t half[16];
        int8_t codes[64];
        uint8_t given[16];
        for (int i = 0; i < 16; i++) {
            x[i] = some();
            y[i] = some();
            z[i] = small();
            half[i] = (uint16_t)(round * 16 + i); /* all 65,536 of them */
        }
        for (int i = 0; i < 64; i++) codes[i] = (int8_t)((int32_t)(next() >> 8) % 127);
        for (int i = 0; i < 16; i++) given[i] = (uint8_t)((int32_t)(next() >> 8) % 127 + CODE_OFFSET);
        vec a = v_load(x), b = v_load(y), c = v_load(z);
        put_vector(v_add(a, b));
        put_vector(v_sub(a, b));
        put_vector(v_mul(a, b));
        put_vector(v_max(a, b));
        put_vector(v_abs(a));
        put_vector(v_round(c));
        put_vector(v_times_power(b, v_round(c)));
        put_vector(v_first(a, round % 17, b));
        put_vector(v_load_half(half));
        v_store_half(half, v_first(a, 16, b));
        for (int i = 0; i < 16; i++) half[i] = x[i] != x[i] ? 0 : half[i];
        put(half, sizeof half);
        v_store_first(cut, c, round % 17);
        put(cut, sizeof cut);
        uint16_t pairs[32];
        ints both;
        v_store_bf16(half, a);
        put(half, sizeof half);
        v_store_pairs(pairs, a, c);
        put(pairs, sizeof pairs);
        memcpy(&both, pairs, sizeof pairs);
        put_vector(v_low_bf16(both));
        put_vector(v_high_bf16(both));
        put_vector(v_dot_pairs(c, both, both));
        put_vector(v_load_bytes(codes));
        uint8_t few[4] = {(uint8_t)(round % 127), 1, 2, 3};
        memcpy(&both, codes, sizeof codes);
        put_vector(v_of_ints(i_dot_nibbles(i_zero(), i_set_codes(few), i_low_nibbles(both))));
        put_vector(v_of_ints(i_dot_nibbles(i_zero(), i_set_codes(few), i_high_nibbles(both))));
        float largest = v_largest(c);
        put(&largest, 4);
        uint8_t made[16];
        v_store_codes(made, c);
        for (int i = 0; i < 16; i++) made[i] = (uint8_t)(made[i] - CODE_OFFSET);
        put(made, 16);
        int32_t offsets[16];
        for (int i = 0; i < 16; i++) {
            offsets[i] = 0;
            for (int j = 0; j < 4; j++) offsets[i] += codes[4 * i + j] * CODE_OFFSET;
        }
        put_vector(v_of_ints(i_sub(i_dot(i_zero(), i_set_codes(given), i_load_codes(codes)), i_load(offsets))));
    }
    return 0;
}
