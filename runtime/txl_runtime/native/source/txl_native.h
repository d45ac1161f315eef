/* A Transformer-XL's step with ring memory, for Python and C++. All functions that return int return 0, or -1 without memory. */
#ifndef TXL_NATIVE_H
#define TXL_NATIVE_H

#include <stdint.h>

#include "model.h"

#ifdef __GNUC__
#define TXL_API __attribute__((visibility("default")))
#else
#define TXL_API
#endif

/* The version of these functions, and the instruction set that they were compiled for. */
enum { TXL_NATIVE_VERSION = 3 };
TXL_API int txl_version(void);
TXL_API const char *txl_instructions(void);

TXL_API struct txl_model *txl_open(const struct txl_shape *shape, int threads);
TXL_API void txl_close(struct txl_model *m);

/* A product of a layer: values[i · in_step + o · out_step] is the weight from input i to output o; bias may be NULL. */
TXL_API int txl_set_product(struct txl_model *m, int layer, int which, int in, int out, const float *values,
                            int64_t in_step, int64_t out_step, const float *bias);
TXL_API int txl_set_codes(struct txl_model *m, int layer, int which, int in, int out, const int8_t *values,
                          int64_t in_step, int64_t out_step, const float *scales, const float *bias);

/* The same in 4 bits: codes [out, blocks, block / 2], the first of two in the low half of a byte; the scale and the
 * code that stands for zero [out, blocks]. block is 32, 64 or 128. */
TXL_API int txl_set_nibbles(struct txl_model *m, int layer, int which, int in, int out, int block,
                            const uint8_t *values, const float *scales, const uint8_t *zeros, const float *bias);

/* A vector of a layer; layer == layers for those of the final norm. */
TXL_API int txl_set_vector(struct txl_model *m, int layer, int which, const float *values, int count);

/* The table of positions of a layer, [H, d_head, distances], and scores to add, [H, distances], or NULL. */
TXL_API int txl_set_positions(struct txl_model *m, int layer, const float *table, const float *scores);

/* A cluster of token ids [first, last): a table [last - first, width] that stays the caller's, and its projections
 * [D, width], of the embedding and of the softmax; each may be NULL. */
TXL_API int txl_set_cluster(struct txl_model *m, int cluster, int first, int last, int width, const float *table,
                            const float *into, const float *out_of);

/* The softmax of a cluster: a table [columns, width] and a bias [columns], which may be NULL. */
TXL_API int txl_set_softmax(struct txl_model *m, int cluster, int columns, int width, const float *table,
                            const float *bias);

/* One segment of the first `sequences` sequences. tokens [B, length], valid, fill and head [B], keys and values of each
 * layer [B, H, …] → hidden [B, length, D], of which rows that do not count stay as they are. */
TXL_API void txl_step(struct txl_model *m, int sequences, int length, const int32_t *tokens, const int32_t *valid,
                      const int32_t *fill, const int32_t *head, void *const *keys, void *const *values, float *hidden);

/* Log-probabilities of a cluster's columns: hidden [rows, D] → out [rows, columns]. */
TXL_API void txl_softmax(struct txl_model *m, int cluster, int rows, const float *hidden, float *out);

#endif
