/* Attention with relative positions over a ring of keys and values. */
#ifndef TXL_ATTENTION_H
#define TXL_ATTENTION_H

#include "model.h"

/* A sequence's segment in one layer and head. */
struct attention {
    const float *qkv;  /* rows [count], each of 3 · H · head_pitch numbers */
    int count, fill, head, window; /* positions that count, memory rows, slot of the first position, keys seen at most */
    void *keys, *values; /* of this sequence and head */
    float *mixed;        /* rows [count], each of H · head_pitch numbers */
};

/* Write the keys and values of a head's positions into the ring, and mix values for each query. */
void attend(const struct txl_model *m, const struct layer *layer, int head, const struct attention *a,
            struct workspace *work);

#endif
