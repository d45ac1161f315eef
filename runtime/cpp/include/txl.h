/* txl.h: bundles of txl-deploy from C. SPDX-License-Identifier: Apache-2.0
 *
 * Every struct but txl_file and txl_bias begins with its size, which TXL_NEW sets. The library takes an older, shorter
 * struct, with 0 for the fields that it lacks. A call that can fail returns a code and fills the caller's txl_error, which
 * may be NULL. No call throws, prints, ends the process or keeps global data. Threads may share a model; one thread at a
 * time may use a stream. A stream keeps its model alive, so both may be freed in any order.
 *
 * Arrays are row-major, with the axes in the tables' order. b: number of sequences of a stream; T: number of positions in
 * one call; V: number of token ids. The library cannot check an array's dtype and length: txl_model_tensor has the dtype,
 * txl_tensor_bytes the size. A call with `room` and `needed` sets `needed` to the size of its result, and returns TXL_ROOM
 * if that exceeds `room`: call once with NULL and 0, then with room for `needed`. Both count tokens in txl_encode, bytes
 * elsewhere. RT marks calls that allocate nothing and take no lock themselves after txl_stream_prepare, unless a state grows
 * or is absent at first. The engine in them may allocate: then the model has TXL_IS_ALLOCATING. */
#ifndef TXL_H
#define TXL_H
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && defined(TXL_STATIC) /* which CMake and pkg-config set for a static library */
#define TXL_API
#elif defined(_WIN32) && defined(TXL_BUILD)
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
#define TXL_DRAFT 4 /* most tokens of a draft, see txl_sampling.lookup */

typedef struct txl_model txl_model;
typedef struct txl_stream txl_stream;
typedef struct txl_sampler txl_sampler;

typedef enum {
    TXL_OK,
    TXL_BUNDLE,      /* the bundle is missing, altered, inconsistent, hostile or too new */
    TXL_BACKEND,     /* the engine is missing, cannot run the bundle, or returned NaN where a token is drawn */
    TXL_USAGE,       /* the model does not allow these arguments; nothing has changed, but see txl_stream_feed */
    TXL_CHECK,       /* the self-test did not pass */
    TXL_MEMORY,      /* there is not enough memory */
    TXL_UNSUPPORTED, /* the bundle or request is valid, but this library or its engine cannot run it */
    TXL_ROOM         /* the result exceeds `room`; `needed` is its size */
} txl_code;
typedef enum { TXL_BOOL = 1, TXL_INT32, TXL_FLOAT32, TXL_FLOAT16, TXL_BFLOAT16 } txl_dtype;
typedef enum { TXL_INPUTS = 1, TXL_OUTPUTS, TXL_STATES } txl_table; /* inputs: tokens and features, no counters */
enum { TXL_SIZE_B = -1, TXL_SIZE_L = -2, TXL_SIZE_ROWS = -3 };       /* in txl_tensor.shape: b, T, a state's rows */
enum {
    TXL_LOAD_UNHASHED = 1, /* do not check the SHA-256 of files */
    TXL_LOAD_LEAN = 2      /* use less memory: weights stay in the mapped file, steps are slower */
};
enum {
    TXL_IS_INDEPENDENT = 1, /* a sequence can be idle, reset and moved alone; else all run, or none */
    TXL_IS_JOINT = 2,       /* sequences influence one another: b has to be B */
    TXL_IS_EXACT = 4,       /* T is one of txl_model_lengths, and each count 0 or T */
    TXL_IS_TEXT = 8,        /* it reads only token ids and returns log-probabilities of the next one. It may lack a
                             * vocabulary: then txl_encode returns TXL_USAGE */
    TXL_IS_SCORING = 16,    /* TXL_IS_TEXT, and it has a state after each token: score, generate and draw work */
    TXL_IS_COUNTING = 32,   /* it counts memory rows: txl_stream_fill and memory_length apply */
    TXL_IS_ALLOCATING = 64  /* the engine allocates in a step */
};

typedef struct {
    uint32_t size;
    int32_t code;
    char message[1016]; /* one line: what was found, what was expected, what to do */
} txl_error;

typedef struct {
    uint32_t size;
    int32_t threads;             /* threads of the engine; 0: one per physical core */
    const char *update;          /* "ring", "rolled", "replace"; NULL: the best that the engine runs */
    const char *engine;          /* path of ONNX Runtime's library; NULL: $TXL_ONNXRUNTIME, else the system's search; on
                                  * Windows, else onnxruntime.dll beside the program or plugin */
    const char *manifest_sha256; /* SHA-256 of the only manifest.json to load, 64 lower-case hex digits; NULL: any */
    const void *ort_api_base;    /* the application's own OrtApiBase, used instead of `engine`; NULL: open `engine` */
    void *ort_env;               /* OrtEnv of that OrtApiBase, has to outlive the model; NULL: the library makes one */
    uint32_t flags;              /* TXL_LOAD_... */
    const char *native_library;  /* path of the compiled step that runs the model instead of ONNX Runtime: a library that
                                  * you built or trust, since its code runs, and that the bundle's engines/native/step.json
                                  * has the SHA-256 of. NULL: ONNX Runtime. None is ever taken from a bundle by itself */
} txl_load_options;

typedef struct {
    const char *name;
    const void *data; /* has to outlive the model */
    size_t bytes;
} txl_file;

typedef struct {
    uint32_t size;
    int32_t batch_size, vocab_size, memory_length; /* B, the most sequences; V; M, the memory rows. V, M 0: none */
    int32_t boundary_token;                        /* id that separates texts; -1: none */
    int32_t longest;                               /* positions of the longest segment */
    uint32_t flags;                                /* TXL_IS_... */
    uint64_t state_bytes;                          /* of one sequence */
    const char *model_id, *update, *engine, *precision; /* owned by the model */
} txl_model_info;

typedef struct {
    uint32_t size;
    txl_dtype dtype;
    int32_t rank;      /* number of axes; -1: a state that is absent now */
    int32_t lookahead; /* an input has T + lookahead positions */
    int32_t vocab;     /* number of token ids; 0: the tensor holds no ids */
    int64_t shape[TXL_AXES];
    const char *name, *role; /* owned by the model */
} txl_tensor;

typedef struct {
    int32_t token;
    float bias; /* -100 ... 100 */
} txl_bias;

/* Change a sequence's V log-probabilities before a draw, in the order of ids: -INFINITY for a token that is never drawn; the
 * rest needs no normalising. `row` is the sequence's place in the sampler, `last` the token that the sampler drew for it last,
 * -1 before the first. Return 0; anything else refuses the draw. It must neither throw nor use the stream. */
typedef int (*txl_adjust)(void *data, int32_t row, int32_t last, double *logprobs, int32_t V);

typedef struct {
    uint32_t size;
    int32_t top_k;      /* 0: all */
    double temperature; /* 0: the most probable token */
    double top_p;       /* 0: all */
    uint64_t seed;
    const uint32_t *seed_words; /* a seed of any size, the lowest 32 bits first; NULL: use `seed` */
    size_t seed_count;
    txl_adjust adjust; /* comes before the temperature, then `logit_bias`, then `forbid`; NULL: none */
    void *adjust_data; /* for `adjust`; both have to outlive the sampler */
    const txl_bias *logit_bias; /* added to log-probabilities */
    size_t logit_bias_count;
    const int32_t *forbid; /* ids that are never drawn */
    size_t forbid_count;
    int32_t lookup; /* tokens of a draft, at most TXL_DRAFT, for txl_stream_generate and txl_sampler_next; 0: no drafts */
} txl_sampling;

typedef struct { /* a text that comes token by token; begin it with TXL_NEW */
    uint32_t size;
    uint32_t held; /* number of bytes held back */
    char bytes[4]; /* they begin a character that is not whole yet */
} txl_text;

TXL_API uint32_t txl_abi(void);
TXL_API const char *txl_version(void);
/* Write the name of the engine that these options choose (NULL: defaults), e.g. "ONNX Runtime 1.31.1", with a final 0. */
TXL_API txl_code txl_engine(const txl_load_options *, char *text, size_t room, size_t *needed, txl_error *);

/* Paths are UTF-8, on Windows too. Load a bundle from its folder or from memory, e.g. resources of the executable. All files that manifest.json lists have to
 * be there, report.html too; only engines/ may be missing. Sizes, hashes and tables are checked. Graphs are not: the engine
 * runs whatever they hold. So load your own bundles, and by `manifest_sha256` those of others that you have inspected. */
TXL_API txl_code txl_model_load(const char *path, const txl_load_options *, txl_model **, txl_error *);
TXL_API txl_code txl_model_load_memory(const txl_file *, size_t count, const txl_load_options *, txl_model **, txl_error *);
TXL_API void txl_model_free(txl_model *);
TXL_API txl_code txl_model_describe(const txl_model *, txl_model_info *, txl_error *);
TXL_API size_t txl_model_lengths(const txl_model *, int32_t *lengths, size_t room); /* returns how many; largest first */
TXL_API size_t txl_model_count(const txl_model *, int32_t table); /* a txl_table */
TXL_API txl_code txl_model_tensor(const txl_model *, int32_t table, size_t index, txl_tensor *, txl_error *);
/* Set `index` to the row of the table that has this name; TXL_USAGE if none has. */
TXL_API txl_code txl_model_find(const txl_model *, int32_t table, const char *name, size_t *index, txl_error *);
/* Return the bytes of an array for b sequences and T positions, e.g. 120 for float32 [B, L, 3] with b 2 and T 5. T is 1 for
 * outputs of a feed with `last`. Returns 0 if the size is unknown: a state is absent, or its number of rows is open. */
TXL_API size_t txl_tensor_bytes(const txl_tensor *, int32_t b, int32_t T);
/* Replay the bundle's stored vectors; TXL_CHECK if results differ by more than is allowed. `reached`, which may be NULL, is
 * the largest difference divided by the allowed one. */
TXL_API txl_code txl_model_selftest(const txl_model *, double *reached, txl_error *);

/* Texts are UTF-8. A decoded text has no final 0, and may begin or end within a character, e.g. if a token is one byte. */
TXL_API txl_code txl_encode(const txl_model *, const char *text, size_t bytes, int32_t *tokens, size_t room, size_t *needed,
                            txl_error *);
TXL_API txl_code txl_decode(const txl_model *, const int32_t *tokens, size_t count, char *text, size_t room, size_t *needed,
                            txl_error *);
/* Decode a text's next tokens to whole characters; what begins a character is held back for the next call. Bytes that are no
 * UTF-8 become U+FFFD, as in Python. With count 0 the text ends, and what was held back becomes U+FFFD. If the result exceeds
 * `room`, the text stays as it was. */
TXL_API txl_code txl_decode_next(const txl_model *, txl_text *, const int32_t *tokens, size_t count, char *text, size_t room,
                                 size_t *needed, txl_error *);

/* Open a stream of b sequences, 1 ... B, which keep and see at most memory_length memory rows; -1: all M. */
TXL_API txl_code txl_stream_open(const txl_model *, int32_t b, int32_t memory_length, txl_stream **, txl_error *);
TXL_API void txl_stream_free(txl_stream *);
/* Bind and run every program, then reset, so that later calls marked RT allocate nothing in this library. */
TXL_API txl_code txl_stream_prepare(txl_stream *, txl_error *);
TXL_API int32_t txl_stream_batch(const txl_stream *);

/* Run one segment. `inputs` and `outputs` are arrays in the tables' order; an output may be NULL. `counts` [b] is the number
 * of positions that count, NULL: T. E.g. T 4 and counts {4, 0}: sequence 0 advances by 4; sequence 1 is idle and keeps its
 * state. Outputs are 0 at positions that do not count. Without `commit` all sequences keep their states until
 * txl_stream_commit. RT */
TXL_API txl_code txl_stream_run(txl_stream *, int32_t T, const void *const *inputs, const int32_t *counts,
                                void *const *outputs, int commit, txl_error *);
/* Make the latest run without `commit` part of the state, or its first `counts` [b] positions, e.g. of a draft what came true;
 * NULL: all that ran. A ring advances by fewer rows; where a state is replaced, a part runs once more, with the same inputs.
 * Nothing happens if the run is part of the state already, or the state has changed since. TXL_USAGE, after which other counts
 * can be given: more than ran, or rolled memory, exact or whole segments, or lockstep does not allow the part. RT, unless a part
 * runs once more */
TXL_API txl_code txl_stream_commit(txl_stream *, const int32_t *counts, txl_error *);
/* Run any T, cut into segments from the start, the longest first: T 10 into 4, 4, 2 if the longest is 4. In a Transformer-XL
 * with a full memory later positions of a segment see further back, so a different cut gives slightly different numbers.
 * With `last` outputs are of the last position that counts and lack the axis of positions: [b, V], not [b, T, V]. If a state
 * grows, segments before a refused one stay fed. RT */
TXL_API txl_code txl_stream_feed(txl_stream *, int32_t T, const void *const *inputs, const int32_t *counts,
                                 void *const *outputs, int last, txl_error *);
/* Score tokens [b, T]: nll [b, T - 1] is the cost in nats of each but the first, 0 where it does not count. The last token
 * that counts is not fed, so that it can be the first one of the next call. */
TXL_API txl_code txl_stream_score(txl_stream *, const int32_t *tokens, int32_t T, const int32_t *counts, float *nll,
                                  txl_error *);
/* Feed prompts [b, T] and draw `count` tokens per sequence: drawn [count, b] and, unless NULL, their log-probabilities
 * [count, b]. The last drawn token is not fed, so that it can be the first one of the next call.
 *
 * With sampling.lookup a draft of the next tokens is looked up in the sequence: what followed the last time. It runs with the
 * latest token as one segment; each position is drawn from with its own random number, and the first token that is not the
 * draft's ends it. So the tokens are those of lookup 0, up to the rounding of a longer segment. Drafts that lose time pause.
 * TXL_USAGE if a segment is not as many steps in this model, or it cannot commit a part of one. */
TXL_API txl_code txl_stream_generate(txl_stream *, const txl_sampling *, const int32_t *tokens, int32_t T,
                                     const int32_t *counts, int32_t count, int32_t *drawn, float *logprobs, txl_error *);

/* A sampler holds the random numbers of b sequences. A draw takes the next token where the last feed or committed run of a
 * sequence ended, so a sequence that was idle since gets one, too. The tokens [b] are not fed. Log-probabilities [b], which
 * may be NULL, are the model's, before `adjust`, `logit_bias`, `forbid`, temperature, top_k and top_p. A sequence not fed
 * since it was opened, reset or restored gets token -1 and log-probability 0, and uses no random number. Draws are RT, but a
 * sampler's first allocates V numbers. */
TXL_API txl_code txl_sampler_open(const txl_sampling *, int32_t b, txl_sampler **, txl_error *);
TXL_API void txl_sampler_free(txl_sampler *);
TXL_API txl_code txl_sampler_draw(txl_sampler *, txl_stream *, int32_t *tokens, float *logprobs, txl_error *);
/* Draw for one row with a sampler of one sequence, so that draws for other rows use none of its random numbers. Row -1 does
 * what txl_sampler_draw does. */
TXL_API txl_code txl_sampler_draw_row(txl_sampler *, txl_stream *, int32_t row, int32_t *token, float *logprob, txl_error *);

/* Feed prompts [b, T], or the tokens [b, 1] drawn last, and draw the next ones: drawn [count, b] and, unless NULL, their
 * log-probabilities. `count` is 1, or with sampling.lookup 1 ... 1 + TXL_DRAFT, and at most `most`. The last of them is not
 * fed: give it to the next call. If a draw fails, the `count` tokens before it are fed. One sampler, from the prompt on, gives
 * what txl_stream_generate gives at once. */
TXL_API txl_code txl_sampler_next(txl_sampler *, txl_stream *, const int32_t *tokens, int32_t T, const int32_t *counts,
                                  int32_t most, int32_t *drawn, float *logprobs, int32_t *count, txl_error *);

/* Give the sequences whose which[row] is not 0 the state of a new stream; NULL: all. RT */
TXL_API txl_code txl_stream_reset(txl_stream *, const uint8_t *which, txl_error *);
/* Let sequence i continue from the state of rows[i]; the stream then has `count` sequences. {2, 2} makes two copies of 2. */
TXL_API txl_code txl_stream_select(txl_stream *, const int32_t *rows, int32_t count, txl_error *);
TXL_API int32_t txl_stream_fill(const txl_stream *, int32_t row); /* filled memory rows; -1: no such sequence */
/* Copy one tensor of the state of b sequences. Memory is float32 with M rows: first 0 for those not filled, then the filled
 * ones, oldest first. */
TXL_API txl_code txl_stream_state(const txl_stream *, size_t index, txl_tensor *, void *data, size_t room, size_t *needed,
                                  txl_error *);
/* Save a snapshot: the bytes of the file that Python's StreamState saves and loads. `row` -1 saves all sequences; else one,
 * which any row of any stream of this model can restore. A snapshot has no log-probabilities and no random numbers. To draw
 * on from it, save before the last token is fed and feed that token after restoring; new samplers of one seed, opened both
 * times, then make the same draws. */
TXL_API txl_code txl_stream_save(const txl_stream *, int32_t row, void *bytes, size_t room, size_t *needed, txl_error *);
TXL_API txl_code txl_stream_restore(txl_stream *, int32_t row, const void *bytes, size_t count, txl_error *);

#ifdef __cplusplus
}
#endif
#endif
