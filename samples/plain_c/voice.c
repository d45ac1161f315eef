/* Removes noise from a voice in an audio callback, which takes and returns blocks of any size.
 *
 *     arecord -f FLOAT_LE -r 16000 -t raw | voice [BLOCK] | aplay -f FLOAT_LE -r 16000 -t raw
 *
 * The model is a package called "voice", made of voice.py, with HOP samples in and out. It allocates nothing and waits
 * for nothing, so an audio callback may call it. The output is HOP samples late. README.md has the commands. */
#include <stdio.h>
#include <stdlib.h>

#include "voice.h"

enum { HOP = VOICE_X_VALUES, MOST = 4096 };

static voice_state state;
static float heard[HOP], said[HOP]; /* the hop that is filling, and the one that is playing */
static int place;

/* Replace `count` samples, any number, by denoised ones; a sound card's driver would call this. */
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
