/* Lets a voice through and keeps noise back, in an audio callback: blocks of any size go in and come out.
 *
 *     arecord -f FLOAT_LE -r 16000 -t raw | voice [BLOCK] | aplay -f FLOAT_LE -r 16000 -t raw
 *
 * The model is a package called "voice" of voice.py: HOP samples in and out. It allocates nothing and waits for nothing,
 * so the callback may call it. What comes out is HOP samples late. README.md has the commands. */
#include <stdio.h>
#include <stdlib.h>

#include "voice.h"

enum { HOP = VOICE_X_VALUES, MOST = 4096 };

static voice_state state;
static float heard[HOP], said[HOP]; /* a hop that fills, and the one that is played */
static int place;

/* What a sound card calls with as many samples as it likes; they are replaced. */
static void callback(float *samples, int count)
{
    for (int i = 0; i < count; i++) {
        heard[place] = samples[i];
        samples[i] = said[place];
        if (++place == HOP) {
            voice_step(&state, heard, NULL, said);
            place = 0;
        }
    }
}

int main(int count, char **words)
{
    static float block[MOST];
    const int size = count > 1 ? atoi(words[1]) : 256;
    if (size < 1 || size > MOST) return fprintf(stderr, "a block has %d samples, expected 1 to %d\n", size, MOST), 2;
    voice_init(&state);
    for (size_t got; (got = fread(block, sizeof *block, (size_t)size, stdin)) > 0;) {
        callback(block, (int)got);
        fwrite(block, sizeof *block, got, stdout);
    }
    return 0;
}
