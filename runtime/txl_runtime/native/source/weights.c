/* Weights: the model's memory, and matrices packed into strips. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "txl_native.h"
#include "vector.h"

enum { LARGE_PAGE = 1 << 21, CHUNK = 1 << 26 };

/* Mapped memory, of which `used` bytes are taken. */
struct chunk {
    struct chunk *next;
    char *mapped, *start;
    size_t mapped_size, size, used;
};

static struct chunk *map_chunk(struct chunk *next, size_t size, int large_pages) {
    struct chunk *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    size_t whole = size + LARGE_PAGE;
    void *at = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        free(c);
        return NULL;
    }
    size_t gap = -(uintptr_t)at & (LARGE_PAGE - 1);
    *c = (struct chunk){next, at, (char *)at + gap, whole, size, 0};
#ifdef MADV_HUGEPAGE
    if (large_pages) madvise(c->start, size, MADV_HUGEPAGE);
#else
    (void)large_pages;
#endif
    return c;
}

void *model_take(struct txl_model *m, size_t bytes) {
    size_t need = (bytes + 63) & ~(size_t)63;
    if (!m->memory || m->memory->size - m->memory->used < need) {
        struct chunk *fresh = map_chunk(m->memory, need > CHUNK ? need : CHUNK, m->shape.large_pages);
        if (!fresh) return NULL;
        m->memory = fresh;
    }
    void *at = m->memory->start + m->memory->used;
    m->memory->used += need;
    return at;
}

static void unmap(struct chunk *chunk) {
    while (chunk) {
        struct chunk *next = chunk->next;
        munmap(chunk->mapped, chunk->mapped_size);
        free(chunk);
        chunk = next;
    }
}

enum format cache_format(const struct txl_model *m) {
    return m->shape.cache == 2 ? BYTES : m->shape.cache == 1 ? HALVES : FLOATS;
}
enum format position_format(const struct txl_model *m) {
    enum format cache = cache_format(m);
    return m->shape.bf16 && cache != BYTES ? PAIRS : cache;
}
enum format wide_format(const struct txl_model *m) {
#ifdef TXL_FAST_PAIRS
    if (m->shape.bf16) return PAIRS;
#endif
    return cache_format(m) == BYTES ? FLOATS : cache_format(m);
}

size_t key_size(const struct txl_model *m, enum format format) {
    size_t scales = format == BYTES ? bytes_in_strips(FLOATS, 1, m->ring_pitch) : 0;
    return bytes_in_strips(format, m->shape.head_width, m->ring_pitch) + scales;
}
size_t value_size(const struct txl_model *m, enum format format) {
    size_t slots = (size_t)m->shape.slots, steps = (slots + depth_of(format) - 1) / depth_of(format);
    size_t scales = format == BYTES ? (size_t)m->ring_pitch * sizeof(float) : 0;
    return steps * m->head_pitch * size_of(format) + scales;
}
size_t position_size(const struct txl_model *m, enum format format) {
    return bytes_in_strips(format, m->shape.head_width, m->columns);
}

static const float *copied(struct txl_model *m, const float *values, int count) {
    float *copy = model_take(m, (size_t)padded(count) * sizeof *copy);
    if (copy) memcpy(copy, values, (size_t)count * sizeof *copy);
    return copy;
}

/* Set the sizes and the bias of a product; return -1 without memory. */
static int begin(struct txl_model *m, struct product *p, int in, int out, const float *bias) {
    *p = (struct product){.in = padded(in), .out = padded(out), .columns = out};
    if (bias && !(p->bias = copied(m, bias, out))) return -1;
    return 0;
}

static int pack(struct txl_model *m, struct product *p, int in, int out, const float *values, int64_t in_step,
                int64_t out_step, const float *bias) {
    enum format format = m->shape.bf16 ? PAIRS : FLOATS;
    if (begin(m, p, in, out, bias)) return -1;
    char *packed = model_take(m, bytes_in_strips(format, p->in, out));
    if (!packed) return -1;
    p->matrix = in_strips(packed, format, p->in);
    for (int o = 0; o < out; o += STRIP, packed += p->matrix.strip_pitch)
        for (int i = 0; i < in; i++) {
            float line[STRIP] = {0};
            for (int c = o; c < at_most(o + STRIP, out); c++) line[c - o] = values[i * in_step + c * out_step];
            char *to = packed + i / depth_of(format) * p->matrix.step_pitch;
            if (format == FLOATS) {
                memcpy(to, line, sizeof line);
                continue;
            }
            uint16_t short_line[STRIP];
            for (int c = 0; c < STRIP; c += LANES) v_store_bf16(short_line + c, v_load(line + c));
            for (int c = 0; c < STRIP; c++) ((uint16_t *)to)[2 * c + i % 2] = short_line[c];
        }
    return 0;
}

static struct product *product_of(struct txl_model *m, int layer, int which) {
    return &m->layers[layer].products[which];
}

int txl_set_product(struct txl_model *m, int layer, int which, int in, int out, const float *values, int64_t in_step,
                    int64_t out_step, const float *bias) {
    return pack(m, product_of(m, layer, which), in, out, values, in_step, out_step, bias);
}

int txl_set_codes(struct txl_model *m, int layer, int which, int in, int out, const int8_t *values, int64_t in_step,
                  int64_t out_step, const float *scales, const float *bias) {
    struct product *p = product_of(m, layer, which);
    if (begin(m, p, in, out, bias)) return -1;
    int8_t *packed = model_take(m, bytes_in_strips(CODES, p->in, out));
    int32_t *offsets = model_take(m, p->out * sizeof *offsets);
    const float *copy = copied(m, scales, out);
    if (!packed || !offsets || !copy) return -1;
    for (int i = 0; i < in; i++)
        for (int o = 0; o < out; o++) {
            int8_t code = values[i * in_step + o * out_step];
            packed[(size_t)(o / STRIP) * STRIP * p->in + i / 4 * 4 * STRIP + o % STRIP * 4 + i % 4] = code;
            offsets[o] += code * CODE_OFFSET;
        }
    p->matrix = in_strips(packed, CODES, p->in);
    p->matrix.scales = copy;
    p->matrix.offsets = offsets;
    return 0;
}

int txl_set_nibbles(struct txl_model *m, int layer, int which, int in, int out, int block, const uint8_t *values,
                    const float *scales, const uint8_t *zeros, const float *bias) {
    struct product *p = product_of(m, layer, which);
    int blocks = (in + block - 1) / block, k = blocks * block, columns = (out + STRIP - 1) / STRIP * STRIP;
    if (block < 32 || block > 128 || block % 16 || begin(m, p, in, out, bias)) return -1;
    uint8_t *packed = model_take(m, bytes_in_strips(NIBBLES, k, out));
    float *all = model_take(m, (size_t)blocks * columns * sizeof *all);
    int8_t *nothing = model_take(m, (size_t)blocks * columns);
    if (!packed || !all || !nothing) return -1;
    p->matrix = in_strips(packed, NIBBLES, k);
    for (int o = 0; o < out; o++) {
        size_t first = (size_t)(o / STRIP) * blocks * STRIP + o % STRIP;
        for (int b = 0; b < blocks; b++) {
            all[first + b * STRIP] = scales[(size_t)o * blocks + b];
            nothing[first + b * STRIP] = (int8_t)zeros[(size_t)o * blocks + b];
        }
        for (int i = 0; i < k; i++) {
            uint8_t code = values[((size_t)o * k + i) / 2] >> i % 2 * 4 & 15;
            packed[o / STRIP * p->matrix.strip_pitch + i / 8 * p->matrix.step_pitch + o % STRIP * 4 + i % 4] |=
                (uint8_t)(code << i / 4 % 2 * 4);
        }
    }
    p->matrix.block = block;
    p->matrix.scales = all;
    p->matrix.zeros = nothing;
    return 0;
}

int txl_set_vector(struct txl_model *m, int layer, int which, const float *values, int count) {
    const float **slot = layer == m->shape.layers ? &m->final_norm[which] : &m->layers[layer].vectors[which];
    *slot = copied(m, values, count);
    return *slot ? 0 : -1;
}

/* Columns of a matrix [k, columns] in FLOATS as int8, each with a scale. */
static void quantise_columns(const struct matrix *from, int k, int columns, int8_t *to, float *scales) {
    for (int c = 0; c < columns; c += LANES) {
        const float *first = (const float *)((const char *)from->values + c / STRIP * from->strip_pitch) + c % STRIP;
        vec largest = v_zero();
        for (int i = 0; i < k; i++) largest = v_max(v_abs(v_load(first + i * STRIP)), largest);
        float tops[LANES], steps[LANES];
        v_store(tops, largest);
        for (int j = 0; j < LANES; j++) {
            scales[c + j] = tops[j] / 127;
            steps[j] = tops[j] > 0 ? 127 / tops[j] : 0;
        }
        for (int i = 0; i < k; i++) {
            uint8_t codes[LANES];
            v_store_codes(codes, v_mul(v_load(first + i * STRIP), v_load(steps)));
            int8_t *at = to + (size_t)(c / STRIP) * STRIP * k + i * STRIP + c % STRIP;
            for (int j = 0; j < LANES; j++) at[j] = (int8_t)(codes[j] - CODE_OFFSET);
        }
    }
}

int txl_set_positions(struct txl_model *m, int layer, const float *table, const float *scores) {
    int width = m->shape.head_width, rows = m->shape.distances, columns = m->columns, heads = m->shape.heads;
    enum format format = position_format(m);
    size_t head_size = position_size(m, format);
    char *packed = model_take(m, head_size * heads);
    float *plain = calloc(1, position_size(m, FLOATS)), *more = NULL, *scales = NULL;
    if (scores) more = model_take(m, (size_t)heads * columns * sizeof *more);
    if (format == BYTES) scales = model_take(m, (size_t)heads * columns * sizeof *scales);
    if (!packed || !plain || (scores && !more) || (format == BYTES && !scales)) {
        free(plain);
        return -1;
    }
    struct matrix from = in_strips(plain, FLOATS, width);
    for (int h = 0; h < heads; h++) {
        struct matrix to = in_strips(packed + h * head_size, format, width);
        for (int i = 0; i < width; i++)
            for (int d = 0; d < rows; d++) {
                int c = columns - 1 - d;
                float *at = plain + (size_t)(c / STRIP) * STRIP * width + i * STRIP + c % STRIP;
                *at = table[((size_t)h * width + i) * rows + d];
            }
        int8_t *codes = (int8_t *)packed + h * head_size;
        if (format == BYTES) quantise_columns(&from, width, columns, codes, scales + h * columns);
        else convert_columns(&from, NULL, width, 0, columns, &to);
        for (int d = 0; scores && d < rows; d++) more[h * columns + columns - 1 - d] = scores[h * rows + d];
    }
    free(plain);
    m->layers[layer].positions = in_strips(packed, format, width);
    m->layers[layer].position_scales = scales;
    m->layers[layer].position_scores = more;
    return 0;
}

int txl_set_cluster(struct txl_model *m, int cluster, int first, int last, int width, const float *table,
                    const float *into, const float *out_of) {
    struct cluster *c = &m->clusters[cluster];
    c->first = first;
    c->last = last;
    c->width = width;
    c->table = table;
    int wide = m->shape.width;
    if (into && pack(m, &c->into, width, wide, into, 1, width, NULL)) return -1;
    return out_of ? pack(m, &c->out_of, wide, width, out_of, width, 1, NULL) : 0;
}

int txl_set_softmax(struct txl_model *m, int cluster, int columns, int width, const float *table, const float *bias) {
    return pack(m, &m->clusters[cluster].words, width, columns, table, 1, width, bias);
}

void txl_close(struct txl_model *m) {
    if (!m) return;
    pool_close(m->pool);
    unmap(m->memory);
    free(m->layers);
    free(m->clusters);
    free(m->work);
    free(m);
}
