/* Plays a WAV file of one channel through an amplifier, in blocks as a plugin's host gives them.
 *
 *     play IN.wav OUT.wav [BLOCK]     BLOCK samples a call, 64 unless said; 0: a different number from 1 to 512 each time
 *
 * The model is a package called "amp" with several lengths; README.md has the commands. What is read may be PCM of 16, 24
 * or 32 bits or float32; what is written is float32. The audio part, from the state to the loop, allocates nothing. */
#define _POSIX_C_SOURCE 199309L
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "amp.h"

enum { MOST = 512 };

static amp_state state;
static float given[MOST], played[MOST];
static unsigned char bytes[4 * MOST];

static uint32_t number(const unsigned char *at, int count)
{
    uint32_t found = 0;
    while (count--)
        found = found << 8 | at[count];
    return found;
}

/* Read a WAV file's header up to its samples; return their number of bytes, 0 if it is none of the kinds above. */
static uint32_t open_wav(FILE *file, int *format, int *bits, uint32_t *rate)
{
    unsigned char head[12], body[40];
    int channels = 0;
    *format = 0;
    if (fread(head, 1, 12, file) != 12 || memcmp(head, "RIFF", 4) || memcmp(head + 8, "WAVE", 4)) return 0;
    while (fread(head, 1, 8, file) == 8) {
        const uint32_t size = number(head + 4, 4);
        if (!memcmp(head, "data", 4)) {
            const int pcm = *format == 1 && (*bits == 16 || *bits == 24 || *bits == 32);
            return channels == 1 && (pcm || (*format == 3 && *bits == 32)) ? size : 0;
        }
        const uint32_t read = size < sizeof body ? size : (uint32_t)sizeof body;
        if (fread(body, 1, read, file) != read || fseek(file, (long)(size - read + (size & 1)), SEEK_CUR)) return 0;
        if (!memcmp(head, "fmt ", 4) && read >= 16) {
            *format = (int)number(body, 2), channels = (int)number(body + 2, 2);
            *rate = number(body + 4, 4), *bits = (int)number(body + 14, 2);
            if (*format == 0xfffe && read >= 26) *format = (int)number(body + 24, 2); /* WAVE_FORMAT_EXTENSIBLE */
        }
    }
    return 0;
}

/* Write the header of a WAV file of float32, one channel. */
static void begin_wav(FILE *file, uint32_t rate, uint32_t samples)
{
    static const char *const names[] = {"RIFF", "WAVEfmt ", "", "", "", "", "data"};
    const uint32_t words[] = {36 + 4 * samples, 16, 1 << 16 | 3, rate, 4 * rate, 32 << 16 | 4, 4 * samples};
    for (int i = 0; i < 7; i++) {
        fputs(names[i], file);
        for (int shift = 0; shift < 32; shift += 8)
            fputc((int)(words[i] >> shift & 255), file);
    }
}

static float sample(const unsigned char *at, int format, int bits)
{
    const uint32_t word = number(at, bits / 8) << (32 - bits);
    float found;
    if (format == 3) return memcpy(&found, &word, 4), found;
    return (float)(word < 1u << 31 ? (double)word : (double)word - 4294967296.0) / 2147483648.0f;
}

/* Return processor time, which a busy machine does not lengthen. */
static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int count, char **words)
{
    int format = 0, bits = 0;
    uint32_t rate = 0, seed = 1;
    const int size = count > 3 ? atoi(words[3]) : 64;
    if (count < 3 || size < 0 || size > MOST)
        return fprintf(stderr, "%s: expected IN.wav OUT.wav [BLOCK], a block of 0 to %d samples\n", words[0], MOST), 2;
    FILE *in = fopen(words[1], "rb"), *out = in ? fopen(words[2], "wb") : NULL;
    if (!in || !out) return fprintf(stderr, "%s: cannot be opened; check the path\n", words[in ? 2 : 1]), 2;
    const uint32_t length = open_wav(in, &format, &bits, &rate);
    if (!length) return fprintf(stderr, "%s: expected a WAV file of one channel, PCM or float32\n", words[1]), 2;
    if (rate != (uint32_t)AMP_RATE)
        return fprintf(stderr, "%s: has %u samples a second, the model expects %g; convert it\n", words[1], (unsigned)rate, AMP_RATE), 2;
    const size_t each = (size_t)bits / 8, samples = length / each;
    begin_wav(out, rate, (uint32_t)samples);
    amp_init(&state);
    double spent = 0, longest = 0;
    for (size_t done = 0, now; done < samples; done += now) {
        seed = seed * 1664525u + 1013904223u;
        now = size ? (size_t)size : 1 + (seed >> 16) % MOST;
        now = now < samples - done ? now : samples - done;
        if (fread(bytes, each, now, in) != now)
            return fprintf(stderr, "%s: ends before its samples do; it was cut\n", words[1]), 2;
        for (size_t i = 0; i < now; i++)
            given[i] = sample(bytes + i * each, format, bits);
        const double began = seconds();
        amp_feed(&state, given, now, played);
        const double took = seconds() - began, share = took * AMP_RATE / (double)now;
        spent += took, longest = share > longest ? share : longest;
        fwrite(played, sizeof *played, now, out); /* where bytes are in this order, as on x86 and ARM */
    }
    if (fclose(out)) return fprintf(stderr, "%s: cannot be written\n", words[2]), 2;
    printf("%zu samples in %.3f s of processor time, %.1f %% of what they play; a block at most %.0f %%; %d samples late\n", samples,
           spent, 100 * spent * AMP_RATE / (double)samples, 100 * longest, AMP_LATENCY);
    return 0;
}
