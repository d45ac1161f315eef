/* txl.h: bundles of txl-deploy from C. SPDX-License-Identifier: Apache-2.0
 *
 * Structs begin with their size, which TXL_NEW sets; a library takes an older one, with 0 for the fields that it lacks.
 * Calls that can fail return a code and fill the caller's txl_error, which may be NULL. Nothing throws, prints, ends the
 * process or keeps a global. Threads may share a model; a stream belongs to one thread at a time. A stream holds its model,
 * so that both may be freed in any order.
 *
 * Arrays are row-major and in the tables' own order of axes. b: sequences of a stream; T: positions of what is given;
 * V: token ids. The library cannot see what an array holds and how long it is: txl_model_tensor has the dtype, and
 * txl_tensor_bytes the size. Where a result's size is not known, `needed` is set, and TXL_ROOM returned if it is above
 * `room`: call once with NULL and 0, then with room for `needed`. Both count tokens in txl_encode, and bytes elsewhere.
 * RT stands at calls that take no memory and no lock of their own after txl_stream_prepare; what the engine does in them
 * is its own, and TXL_IS_ALLOCATING says so. */
#ifndef TXL_H
#define TXL_H
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && defined(TXL_BUILD)
#define TXL_API __declspec(dllexport)
#elif defined(_WIN32)
#define TXL_API __declspec(dllimport)
#else
#define TXL_API __attribute__((visibility("default")))
#endif
#ifdef __cplusplus
#define TXL_NEW(type) ([] { type made{}; made.size = sizeof(type); return made; }())
extern "C" {
#else
#define TXL_NEW(type) {.size = sizeof(type)}
#endif

#define TXL_ABI 1 /* grows when a meaning changes, not with new functions or trailing fields */
#define TXL_AXES 8 /* axes that a tensor may have here */

typedef struct txl_model txl_model;
typedef struct txl_stream txl_stream;
typedef struct txl_sampler txl_sampler;

typedef enum {
    TXL_OK,
    TXL_BUNDLE,      /* the bundle is missing, altered, inconsistent, hostile or too new */
    TXL_BACKEND,     /* the engine is missing or cannot run it, or it returned NaN to draw from */
    TXL_USAGE,       /* what was asked is not what the model allows; nothing has changed */
    TXL_CHECK,       /* the self-test did not pass */
    TXL_MEMORY,      /* there is not enough memory */
    TXL_UNSUPPORTED, /* it is right, and this library cannot do it */
    TXL_ROOM         /* the result does not fit; `needed` says what would */
} txl_code;
typedef enum { TXL_BOOL = 1, TXL_INT32, TXL_FLOAT32, TXL_FLOAT16, TXL_BFLOAT16 } txl_dtype;
typedef enum { TXL_INPUTS = 1, TXL_OUTPUTS, TXL_STATES } txl_table; /* inputs: those that the caller gives */
enum { TXL_SIZE_B = -1, TXL_SIZE_L = -2, TXL_SIZE_ROWS = -3 };       /* in txl_tensor.shape: b, T, a state's rows */
enum {
    TXL_LOAD_UNHASHED = 1, /* no SHA-256 of files */
    TXL_LOAD_LEAN = 2      /* weights stay in the mapped file, steps are slower */
};
enum {
    TXL_IS_INDEPENDENT = 1, /* a sequence can be idle, reset and moved alone; else all run, or none */
    TXL_IS_JOINT = 2,       /* sequences influence one another: b has to be B */
    TXL_IS_EXACT = 4,       /* T is one of txl_model_lengths, and each count 0 or T */
    TXL_IS_TEXT = 8,        /* it reads token ids alone, and returns log-probabilities of the next one, with or without
                             * a vocabulary; without one txl_encode returns TXL_USAGE */
    TXL_IS_SCORING = 16,    /* besides there is a state after each token: score, generate and draw work */
    TXL_IS_COUNTING = 32,   /* it counts memory rows: fill and memory_length mean something */
    TXL_IS_ALLOCATING = 64  /* the engine allocates in a step */
};

typedef struct {
    uint32_t size;
    int32_t code;
    char message[1016]; /* one line: what was found, what was expected, what to do */
} txl_error;

typedef struct {
    uint32_t size;
    int32_t threads;             /* of the engine; 0: one per core */
    const char *update;          /* "ring", "rolled", "replace"; NULL: the best that the engine runs */
    const char *engine;          /* ONNX Runtime's library; NULL: $TXL_ONNXRUNTIME, then the system's search */
    const char *manifest_sha256; /* SHA-256 of the one manifest.json that is meant, as 64 lower-case digits; NULL: any */
    const void *ort_api_base;    /* the application's own OrtApiBase, for one engine in a process; then not `engine` */
    void *ort_env;               /* the OrtEnv of that OrtApiBase, which outlives the model; NULL: one is made */
    uint32_t flags;              /* TXL_LOAD_... */
} txl_load_options;

typedef struct {
    const char *name;
    const void *data; /* outlives the model */
    size_t bytes;
} txl_file;

typedef struct {
    uint32_t size;
    int32_t batch_size, vocab_size, memory_length; /* B, V and M; 0 where there is none */
    int32_t boundary_token;                        /* -1: none */
    int32_t longest;                               /* positions of the longest segment */
    uint32_t flags;                                /* TXL_IS_... */
    uint64_t state_bytes;                          /* of one sequence */
    const char *model_id, *update, *engine, *precision; /* the model's; they live as long as it */
} txl_model_info;

typedef struct {
    uint32_t size;
    txl_dtype dtype;
    int32_t rank;      /* -1: a state that is absent now */
    int32_t lookahead; /* positions that an input has behind T */
    int32_t vocab;     /* of token ids; else 0 */
    int64_t shape[TXL_AXES];
    const char *name, *role; /* the model's */
} txl_tensor;

typedef struct {
    uint32_t size;
    int32_t top_k;      /* 0: all */
    double temperature; /* 0: the most probable token */
    double top_p;       /* 0: all */
    uint64_t seed;
    const uint32_t *seed_words; /* a seed above 2^64, the lowest 32 bits first, in place of `seed`; else NULL */
    size_t seed_count;
} txl_sampling;

TXL_API uint32_t txl_abi(void);
TXL_API const char *txl_version(void);
/* The engine that a model would run on by these options (NULL: by default), such as "ONNX Runtime 1.31.1", and a 0. */
TXL_API txl_code txl_engine(const txl_load_options *, char *text, size_t room, size_t *needed, txl_error *);

/* A bundle's folder, or its files in memory: an asset, a resource of the executable. Both have to be whole, with all files
 * that manifest.json lists, report.html too. Sizes, hashes and tables are checked. Graphs are not: the engine runs what they
 * say, so load bundles of your own, and with `manifest_sha256` the one of somebody else that you have looked at. */
TXL_API txl_code txl_model_load(const char *path, const txl_load_options *, txl_model **, txl_error *);
TXL_API txl_code txl_model_load_memory(const txl_file *, size_t count, const txl_load_options *, txl_model **, txl_error *);
TXL_API void txl_model_free(txl_model *);
TXL_API txl_code txl_model_describe(const txl_model *, txl_model_info *, txl_error *);
TXL_API size_t txl_model_lengths(const txl_model *, int32_t *lengths, size_t room); /* how many; the largest first */
TXL_API size_t txl_model_count(const txl_model *, int32_t table); /* a txl_table */
TXL_API txl_code txl_model_tensor(const txl_model *, int32_t table, size_t index, txl_tensor *, txl_error *);
/* The row of a table that has this name; TXL_USAGE where none has. */
TXL_API txl_code txl_model_find(const txl_model *, int32_t table, const char *name, size_t *index, txl_error *);
/* Bytes of an array for b sequences and T positions; T is 1 for outputs of a feed with `last`. 0 where it cannot be told. */
TXL_API size_t txl_tensor_bytes(const txl_tensor *, int32_t b, int32_t T);
/* Replays the bundle's stored vectors; TXL_CHECK where they differ. `reached`, which may be NULL, is the largest difference, as
 * a share of what is allowed. */
TXL_API txl_code txl_model_selftest(const txl_model *, double *reached, txl_error *);

/* Texts are bytes of UTF-8. A decoded one has no 0 at its end, and one of few tokens may begin or end within a letter. */
TXL_API txl_code txl_encode(const txl_model *, const char *text, size_t bytes, int32_t *tokens, size_t room, size_t *needed,
                            txl_error *);
TXL_API txl_code txl_decode(const txl_model *, const int32_t *tokens, size_t count, char *text, size_t room, size_t *needed,
                            txl_error *);

/* b sequences, 1 ... B; they keep and see memory_length rows at most, -1 for all. */
TXL_API txl_code txl_stream_open(const txl_model *, int32_t b, int32_t memory_length, txl_stream **, txl_error *);
TXL_API void txl_stream_free(txl_stream *);
/* Binds and runs every program, and then resets: what comes later takes no memory of this library. */
TXL_API txl_code txl_stream_prepare(txl_stream *, txl_error *);
TXL_API int32_t txl_stream_batch(const txl_stream *);

/* One segment. `inputs` and `outputs` are arrays in the tables' order, an output may be NULL; `counts` [b] says how many
 * positions count of each sequence, NULL for all. A sequence whose count is 0 is idle: its state stays what it was.
 * Outputs are 0 where nothing counts. Without `commit` the state of all sequences stays what it was. RT */
TXL_API txl_code txl_stream_run(txl_stream *, int32_t T, const void *const *inputs, const int32_t *counts,
                                void *const *outputs, int commit, txl_error *);
/* Any T, cut into segments: the longest first, from the beginning of what is given. A Transformer-XL whose memory is full
 * sees a little further from later positions of a segment, so two ways to cut one text give slightly different numbers.
 * With `last` outputs are of the last position that counts, without the axis of positions. RT */
TXL_API txl_code txl_stream_feed(txl_stream *, int32_t T, const void *const *inputs, const int32_t *counts,
                                 void *const *outputs, int last, txl_error *);
/* Tokens [b, T]: what each but the first cost in nats, nll [b, T - 1], 0 behind what counts. The last token that counts
 * is not fed, so that it can be the first one of the next call. */
TXL_API txl_code txl_stream_score(txl_stream *, const int32_t *tokens, int32_t T, const int32_t *counts, float *nll,
                                  txl_error *);
/* Prompts [b, T] and `count` draws after them: drawn [count, b] and, unless NULL, their log-probabilities [count, b]. The
 * last token of each sequence is not fed, so that it can be the first one of the next call. */
TXL_API txl_code txl_stream_generate(txl_stream *, const txl_sampling *, const int32_t *tokens, int32_t T,
                                     const int32_t *counts, int32_t count, int32_t *drawn, float *logprobs, txl_error *);

/* Random numbers of b sequences. A draw is made where the last feed or committed run of a sequence ended, so one that was
 * idle since gets a token, too, and takes a random number; the tokens [b] are not fed. Log-probabilities [b] are those before
 * temperature and cuts, or NULL. A sequence that was not fed since it was new, reset or restored gets the token -1 and 0, and
 * takes no random number. Draws are RT but for a sampler's first one, which takes room for V numbers. */
TXL_API txl_code txl_sampler_open(const txl_sampling *, int32_t b, txl_sampler **, txl_error *);
TXL_API void txl_sampler_free(txl_sampler *);
TXL_API txl_code txl_sampler_draw(txl_sampler *, txl_stream *, int32_t *tokens, float *logprobs, txl_error *);
/* A draw for one row, by a sampler of one sequence: what it draws does not depend on when other rows are drawn for. Row -1
 * is as txl_sampler_draw. */
TXL_API txl_code txl_sampler_draw_row(txl_sampler *, txl_stream *, int32_t row, int32_t *token, float *logprob, txl_error *);

/* Sequences go back to what a new stream has: those whose which[row] is not 0; NULL for all. RT */
TXL_API txl_code txl_stream_reset(txl_stream *, const uint8_t *which, txl_error *);
/* Sequence i goes on as what rows[i] was; the stream then has `count` sequences. */
TXL_API txl_code txl_stream_select(txl_stream *, const int32_t *rows, int32_t count, txl_error *);
TXL_API int32_t txl_stream_fill(const txl_stream *, int32_t row); /* memory rows; -1 without such a sequence */
/* One tensor of the state, of b sequences: memory as float32 with M rows, the oldest first, those that exist last. */
TXL_API txl_code txl_stream_state(const txl_stream *, size_t index, txl_tensor *, void *data, size_t room, size_t *needed,
                                  txl_error *);
/* The bytes of the file that Python's StreamState saves and loads; `row` -1 for all sequences, else that one alone, which
 * any row of any stream of this model can take up. It has no log-probabilities and no random numbers. So to draw on from it,
 * save before the last token is fed, and feed that token after restoring; a new sampler of the same seed at both times
 * makes the same draws. */
TXL_API txl_code txl_stream_save(const txl_stream *, int32_t row, void *bytes, size_t room, size_t *needed, txl_error *);
TXL_API txl_code txl_stream_restore(txl_stream *, int32_t row, const void *bytes, size_t count, txl_error *);

#ifdef __cplusplus
}
#endif
#endif
