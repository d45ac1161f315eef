/* The step: embedding, layers and softmax of the rows that count. */
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "rows.h"
#ifndef TXL_ALONE
#include "txl_native.h"
#endif
#include "vector.h"

enum { GROUP = 128 }; /* rows that are computed together, unless one sequence has more */

/* Number of products from which threads share a step: fewer take less time than synchronising the threads. */
#ifndef TXL_SHARED
#define TXL_SHARED (1 << 21)
#endif

/* A sequence's part of a group: its number, its first row among the group's, and its positions that count. */
struct part { int sequence, row, count; };

/* Work that threads compute together: some sequences' segments, or a softmax. */
struct job {
    struct txl_model *m;
    int rows, parts, length;
    const struct part *part;
    const int32_t *tokens, *fill, *head;
    void *const *keys, *const *values;
    float *hidden;
    int cluster; /* of a softmax */
    const float *given;
    float *out;
    size_t pitch; /* of rows of `out` */
};

/* True if `rows` rows of `products` products each are too little for several threads. */
static int is_small(int rows, int64_t products) { return rows * products < TXL_SHARED; }

#ifndef TXL_ALONE /* a package has its memory and its tables in its own text */

int txl_version(void) { return TXL_NATIVE_VERSION; }

const char *txl_instructions(void) {
#if defined(TXL_FAST_PAIRS)
    return "avx512_bf16";
#elif defined(TXL_VECTOR_AVX512_H)
    return "avx512";
#elif defined(TXL_VECTOR_AVX2_H)
    return "avx2";
#elif defined(TXL_VECTOR_NEON_H)
    return "neon";
#else
    return "plain";
#endif
}

static int open_workspaces(struct txl_model *m, int threads) {
    const struct txl_shape *s = &m->shape;
    size_t rows = (size_t)m->most_rows, scores = (size_t)m->ring_pitch + LANES, columns = (size_t)m->columns + LANES;
    size_t inputs = (size_t)at_least(at_least(m->widest, m->inner_pitch), s->heads * m->head_pitch);
    size_t room = at_least(rows * (2 * inputs + 256), 4 * (2 * scores + 256));
    enum format wide = wide_format(m);
    size_t converted = key_size(m, wide) + value_size(m, wide) + position_size(m, wide);
    int converts = wide != cache_format(m);
    m->work = calloc((size_t)threads, sizeof *m->work);
    if (!m->work) return -1;
    for (int i = 0; i < threads; i++) {
        struct workspace *w = &m->work[i];
        w->scores = model_take(m, (4 * scores + LANES) * sizeof(float));
        w->by_distance = model_take(m, (4 * columns + LANES) * sizeof(float));
        w->queries = model_take(m, 8 * (size_t)m->head_pitch * sizeof(float));
        w->room.values = model_take(m, room);
        w->room.scales = model_take(m, rows * sizeof(float));
        w->room.sums = model_take(m, rows * (inputs / 32 + 4) * sizeof(float));
        w->row = model_take(m, (size_t)m->widest * sizeof(float));
        if (converts) w->wide = model_take(m, converted);
        if (!w->scores || !w->by_distance || !w->queries || !w->row || (converts && !w->wide)) return -1;
        if (!w->room.values || !w->room.scales || !w->room.sums) return -1;
    }
    m->x = model_take(m, rows * m->wide * sizeof(float));
    m->source = model_take(m, rows * m->wide * sizeof(float));
    m->y = model_take(m, rows * m->widest * sizeof(float));
    m->qkv = model_take(m, rows * 3 * s->heads * m->head_pitch * sizeof(float));
    m->mixed = model_take(m, rows * s->heads * m->head_pitch * sizeof(float));
    m->inner = model_take(m, rows * m->inner_pitch * sizeof(float));
    return m->x && m->source && m->y && m->qkv && m->mixed && m->inner ? 0 : -1;
}

struct txl_model *txl_open(const struct txl_shape *shape, int threads) {
    struct txl_model *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->shape = *shape;
    m->wide = padded(shape->width);
    m->widest = at_least(m->wide, padded(shape->embedding));
    m->head_pitch = padded(shape->head_width);
    m->inner_pitch = padded(shape->inner);
    m->ring_pitch = padded(shape->slots);
    m->columns = padded(shape->distances);
    m->most_rows = at_least(GROUP, shape->segment);
    m->layers = calloc((size_t)shape->layers, sizeof *m->layers);
    m->clusters = calloc((size_t)shape->clusters, sizeof *m->clusters);
    m->pool = pool_open(threads);
    if (!m->layers || !m->clusters || !m->pool || open_workspaces(m, threads)) {
        txl_close(m);
        return NULL;
    }
    return m;
}

#endif

/* y[r, first … last) = x · w; see `multiply`. */
static void product(struct workspace *work, const struct product *p, const float *x, int rows, int first, int last,
                    float *y, size_t y_pitch, int cut) {
    struct rows in = rows_for(&p->matrix, x, p->in, rows, p->in, &work->room);
    multiply(&in, &p->matrix, p->in, first, last, y, y_pitch, 0, cut);
}

/* y = x · w, then bias and activation, for a thread's part of the columns. */
static void compute(const struct job *job, int thread, const struct product *p, const float *x, float *y,
                    int activation) {
    struct txl_model *m = job->m;
    int first, last;
    pool_share(m->pool, thread, (p->out + STRIP - 1) / STRIP, &first, &last);
    first *= STRIP;
    last = at_most(last * STRIP, p->out);
    if (first >= last) return;
    product(&m->work[thread], p, x, job->rows, first, last, y, p->out, 0);
    const float *bias = p->bias ? p->bias + first : NULL;
    for (int r = 0; r < job->rows; r++) finish_row(y + (size_t)r * p->out + first, last - first, bias, activation);
}

/* The embedding of a token, [D], in x. */
static void embed(const struct txl_model *m, int token, struct workspace *work, float *x) {
    int id = at_most(at_least(token, 0), m->shape.vocabulary - 1), c = 0;
    if (m->shape.div_val)
        while (id >= m->clusters[c].last) c++;
    const struct cluster *from = &m->clusters[c];
    const float *row = from->table + (size_t)(id - (m->shape.div_val ? from->first : 0)) * from->width;
    if (from->into.in) {
        memcpy(work->row, row, (size_t)from->width * sizeof *row);
        memset(work->row + from->width, 0, (size_t)(from->into.in - from->width) * sizeof *row);
        product(work, &from->into, work->row, 1, 0, m->wide, x, 0, 0);
    } else {
        memcpy(x, row, (size_t)m->shape.width * sizeof *x);
        memset(x + m->shape.width, 0, (size_t)(m->wide - m->shape.width) * sizeof *x);
    }
    for (int i = 0; i < m->shape.width; i++) x[i] *= m->shape.scale;
}

static void embed_rows(const struct job *job, int thread) {
    struct txl_model *m = job->m;
    int first, last;
    pool_share(m->pool, thread, job->rows, &first, &last);
    for (int i = 0; i < job->parts; i++) {
        const struct part *part = &job->part[i];
        const int32_t *tokens = job->tokens + (size_t)part->sequence * job->length - part->row;
        for (int r = at_least(first, part->row); r < at_most(last, part->row + part->count); r++)
            embed(m, tokens[r], &m->work[thread], m->x + (size_t)r * m->wide);
    }
}

/* x = norm(x + y), or x += y where norms come before the blocks; for a thread's part of the rows. */
static void add_block(const struct job *job, int thread, const float *weight, const float *bias) {
    struct txl_model *m = job->m;
    int first, last;
    pool_share(m->pool, thread, job->rows, &first, &last);
    for (int r = first; r < last; r++) {
        float *x = m->x + (size_t)r * m->wide, *y = m->y + (size_t)r * m->wide;
        if (m->shape.pre_norm) add_row(x, y, m->wide);
        else layer_norm(x, x, y, m->shape.width, m->shape.epsilon, weight, bias);
    }
}

/* The input of a block: x, or with norms before the blocks source = norm(x). */
static const float *block_source(const struct job *job, int thread, const float *weight, const float *bias) {
    struct txl_model *m = job->m;
    if (!m->shape.pre_norm) return m->x;
    int first, last;
    pool_share(m->pool, thread, job->rows, &first, &last);
    for (int r = first; r < last; r++) {
        size_t at = (size_t)r * m->wide;
        layer_norm(m->source + at, m->x + at, NULL, m->shape.width, m->shape.epsilon, weight, bias);
    }
    pool_meet(m->pool);
    return m->source;
}

static void attend_parts(const struct job *job, int thread, int number) {
    struct txl_model *m = job->m;
    const struct txl_shape *s = &m->shape;
    int heads = s->heads, row = heads * m->head_pitch, first, last;
    size_t key = key_size(m, cache_format(m)), value = value_size(m, cache_format(m));
    pool_share(m->pool, thread, job->parts * heads, &first, &last);
    for (int i = first; i < last; i++) {
        const struct part *part = &job->part[i / heads];
        size_t head = (size_t)part->sequence * heads + i % heads;
        int window = s->window ? s->window : s->slots;
        if (s->segment_window && part->count > 1) window = part->count;
        if (part->count <= s->single_steps) window = s->step_window;
        struct attention a = {
            .qkv = m->qkv + (size_t)part->row * 3 * row,
            .count = part->count,
            .fill = job->fill[part->sequence],
            .head = job->head[part->sequence],
            .window = window,
            .keys = (char *)job->keys[number] + head * key,
            .values = (char *)job->values[number] + head * value,
            .mixed = m->mixed + (size_t)part->row * row,
        };
        attend(m, &m->layers[number], i % heads, &a, &m->work[thread]);
    }
}

static void run_layer(const struct job *job, int thread, int number) {
    struct txl_model *m = job->m;
    const struct layer *layer = &m->layers[number];
    const float *const *v = layer->vectors;
    const float *source = block_source(job, thread, v[NORM_1_WEIGHT], v[NORM_1_BIAS]);
    compute(job, thread, &layer->products[QKV], source, m->qkv, -1);
    pool_meet(m->pool);
    attend_parts(job, thread, number);
    pool_meet(m->pool);
    compute(job, thread, &layer->products[OUTPUT], m->mixed, m->y, -1);
    pool_meet(m->pool);
    add_block(job, thread, v[NORM_1_WEIGHT], v[NORM_1_BIAS]);
    pool_meet(m->pool);
    source = block_source(job, thread, v[NORM_2_WEIGHT], v[NORM_2_BIAS]);
    compute(job, thread, &layer->products[INNER], source, m->inner, m->shape.activation);
    pool_meet(m->pool);
    compute(job, thread, &layer->products[OUTER], m->inner, m->y, -1);
    pool_meet(m->pool);
    add_block(job, thread, v[NORM_2_WEIGHT], v[NORM_2_BIAS]);
    pool_meet(m->pool);
}

static void run_group(void *given, int thread) {
    const struct job *job = given;
    struct txl_model *m = job->m;
    embed_rows(job, thread);
    pool_meet(m->pool);
    for (int number = 0; number < m->shape.layers; number++) run_layer(job, thread, number);
    if (thread) return;
    int width = m->shape.width;
    for (int i = 0; i < job->parts; i++)
        for (int r = 0; r < job->part[i].count; r++) {
            float *x = m->x + (size_t)(job->part[i].row + r) * m->wide;
            if (m->shape.final_norm)
                layer_norm(x, x, NULL, width, m->shape.epsilon, m->final_norm[0], m->final_norm[1]);
            float *out = job->hidden + ((size_t)job->part[i].sequence * job->length + r) * width;
            memcpy(out, x, (size_t)width * sizeof *x);
        }
}

void txl_step(struct txl_model *m, int sequences, int length, const int32_t *tokens, const int32_t *valid,
              const int32_t *fill, const int32_t *head, void *const *keys, void *const *values, float *hidden) {
    struct part parts[GROUP];
    struct job job = {.m = m, .part = parts, .length = length, .tokens = tokens, .fill = fill, .head = head};
    const struct txl_shape *s = &m->shape;
    int64_t products = (int64_t)s->layers * m->wide * (4 * s->heads * m->head_pitch + 2 * m->inner_pitch);
    job.keys = keys;
    job.values = values;
    job.hidden = hidden;
    pool_lock(m->pool);
    for (int b = 0; b <= sequences; b++) {
        int count = b < sequences ? valid[b] : 0, full = job.parts == GROUP || job.rows + count > m->most_rows;
        if (job.parts && (full || b == sequences)) {
            pool_run(m->pool, run_group, &job, is_small(job.rows, products));
            job.rows = job.parts = 0;
        }
        if (!count) continue;
        parts[job.parts++] = (struct part){b, job.rows, count};
        job.rows += count;
    }
    pool_unlock(m->pool);
}

static void run_softmax(void *given, int thread) {
    const struct job *job = given;
    struct txl_model *m = job->m;
    const struct cluster *c = &m->clusters[job->cluster];
    const struct product *words = &c->words;
    const float *x = m->x;
    int width = m->shape.width, first, last;
    pool_share(m->pool, thread, job->rows, &first, &last);
    for (int r = first; r < last; r++) {
        float *row = m->x + (size_t)r * m->wide;
        memcpy(row, job->given + (size_t)r * width, (size_t)width * sizeof *row);
        memset(row + width, 0, (size_t)(m->wide - width) * sizeof *row);
        if (c->out_of.in) {
            float *projected = m->y + (size_t)r * words->in;
            product(&m->work[thread], &c->out_of, row, 1, 0, c->out_of.out, projected, 0, 0);
            x = m->y;
        }
    }
    if (c->out_of.in) x = m->y;
    pool_meet(m->pool);
    int strip, end;
    pool_share(m->pool, thread, (words->out + STRIP - 1) / STRIP, &strip, &end);
    end = at_most(end * STRIP, words->columns);
    if (strip * STRIP < end)
        product(&m->work[thread], words, x, job->rows, strip * STRIP, end, job->out, job->pitch, 1);
    pool_meet(m->pool);
    for (int r = first; r < last; r++) log_softmax(job->out + (size_t)r * job->pitch, words->bias, words->columns);
}

/* Log-probabilities of a cluster's columns: hidden [rows, D] → out, rows of `pitch` numbers. */
static void softmax(struct txl_model *m, int cluster, int rows, const float *hidden, float *out, size_t pitch) {
    int columns = m->clusters[cluster].words.columns;
    pool_lock(m->pool);
    for (int r = 0; r < rows; r += m->most_rows) {
        struct job job = {.m = m, .rows = at_most(m->most_rows, rows - r), .cluster = cluster, .pitch = pitch};
        job.given = hidden + (size_t)r * m->shape.width;
        job.out = out + (size_t)r * pitch;
        pool_run(m->pool, run_softmax, &job, is_small(job.rows, (int64_t)columns * m->wide));
    }
    pool_unlock(m->pool);
}

#ifndef TXL_ALONE
void txl_softmax(struct txl_model *m, int cluster, int rows, const float *hidden, float *out) {
    softmax(m, cluster, rows, hidden, out, (size_t)m->clusters[cluster].words.columns);
}
#endif
