/* A Transformer-XL's weights, laid out for this step, and the step's working memory. */
#ifndef TXL_MODEL_H
#define TXL_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "pool.h"
#include "products.h"

/* Sizes and choices, as Python gives them. All widths are those of the model, unpadded. */
struct txl_shape {
    int32_t vocabulary, layers, heads, width, head_width, inner; /* V, layers, H, D, d_head, d_inner */
    int32_t slots;          /* of a ring, R */
    int32_t batch, segment; /* B and the longest L */
    int32_t distances;      /* rows of the tables of positions */
    int32_t window;         /* keys that a query sees at most, itself included; 0 for all */
    int32_t segment_window; /* whether that is the number of the segment's tokens, and all for a single one */
    int32_t single_steps;   /* tokens of a segment up to which a query sees `step_window` keys instead; 0 for none */
    int32_t step_window;
    int32_t pre_norm, final_norm;
    int32_t activation;     /* 0 relu, 1 gelu, 2 gelu by tanh */
    int32_t cache;          /* keys, values and tables of positions: 0 float, 1 half precision, 2 int8 */
    int32_t bf16;           /* whether weights are in bf16, and tables of positions unless they are int8 */
    int32_t clusters;       /* of embedding and softmax */
    int32_t embedding;      /* width of the widest embedding table */
    int32_t div_val;        /* whether each cluster has an embedding table of its own */
    int32_t large_pages;    /* whether to ask for them */
    float epsilon, scale;   /* of layer norms, and the factor on the embedding */
};

/* A product with a matrix, its columns padded to a multiple of 16. */
struct product {
    int in, out;       /* padded */
    int columns;       /* that count */
    struct matrix matrix;
    const float *bias; /* [out], or NULL */
};

enum { QKV, OUTPUT, INNER, OUTER, LAYER_PRODUCTS };

enum { CONTENT_BIAS, POSITION_BIAS, NORM_1_WEIGHT, NORM_1_BIAS, NORM_2_WEIGHT, NORM_2_BIAS, LAYER_VECTORS };

struct layer {
    struct product products[LAYER_PRODUCTS];
    const float *vectors[LAYER_VECTORS];
    struct matrix positions;       /* [H], each [d_head, columns]; the last column is of distance 0 */
    const float *position_scales;  /* [H, columns] to multiply by, or NULL */
    const float *position_scores;  /* [H, columns] to add, or NULL */
};

struct cluster {
    int first, last, width;          /* ids, and the width of the table */
    const float *table;              /* [last - first, width], the caller's memory */
    struct product into, out_of;     /* projections to D, and from D to the softmax's table; in == 0 where there is none */
    struct product words;            /* of the softmax, and behind them, in cluster 0, one column for each other cluster */
};

struct chunk;

struct txl_model {
    struct txl_shape shape;
    int wide, head_pitch, inner_pitch, ring_pitch, columns; /* padded D, d_head, d_inner, R, distances */
    int widest;          /* of D and embeddings, padded */
    int most_rows;       /* that are computed together */
    struct layer *layers;
    struct cluster *clusters;
    const float *final_norm[2];
    struct chunk *memory;
    struct pool *pool;
    float *x, *source, *qkv, *mixed, *inner, *y; /* [most_rows, padded width]; y [most_rows, widest] */
    struct workspace *work;                      /* of each thread */
};

/* Memory that one thread works in. */
struct workspace {
    float *scores, *by_distance; /* [4, R + columns + …] */
    float *queries;              /* [2, 4, d_head] */
    struct room room;            /* for [most_rows, widest in] */
    float *row;                  /* [widest] */
    char *wide;                  /* one head's keys, values and table of positions as segments multiply them, or NULL */
};

/* Memory of the model, zeroed, at a multiple of 64 bytes and in large pages where there are some; NULL if there is none. */
void *model_take(struct txl_model *m, size_t bytes);

/* Keys, values and positions as the cache has them, and as segments multiply them. */
enum format cache_format(const struct txl_model *m);
enum format position_format(const struct txl_model *m);
enum format wide_format(const struct txl_model *m);

/* Bytes of one head in a ring of keys, of one in a ring of values, and of one in a table of positions. Behind keys and
 * values in int8 is a scale for each slot. */
size_t key_size(const struct txl_model *m, enum format format);
size_t value_size(const struct txl_model *m, enum format format);
size_t position_size(const struct txl_model *m, enum format format);

#endif
