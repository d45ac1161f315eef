/* Tests beyond the conformance list: older structs, missing arguments, errors without room, models from memory, and
 * the order in which things are freed. Says what is wrong, and ends with 1 then.
 *
 *     txl-misuse BUNDLE FILE...      of a bundle with stored vectors; the names of all of its files */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "txl.h"

enum { MOST_FILES = 32 };
static int wrong = 0;

static void expect(int holds, const char *what) {
    if (!holds) fprintf(stderr, "wrong: %s\n", what), wrong = 1;
}

static txl_file read_file(const char *folder, const char *name) {
    txl_file found = {name, NULL, 0};
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file) return found;
    fseek(file, 0, SEEK_END);
    found.bytes = (size_t)ftell(file);
    rewind(file);
    void *data = malloc(found.bytes + 1);
    if (fread(data, 1, found.bytes, file) != found.bytes) found.bytes = 0;
    fclose(file);
    found.data = data;
    return found;
}

/* A sequence that was reset or restored has no log-probabilities of its own until it is fed, whatever the others have.
 */
static void draw_again(txl_model *model) {
    txl_error error = TXL_NEW(txl_error);
    txl_sampling sampling = TXL_NEW(txl_sampling);
    txl_stream *stream = NULL;
    txl_sampler *sampler = NULL;
    int32_t tokens[2] = {1, 1};
    float logprobs[2];
    const int32_t swapped[2] = {1, 0}, first[2] = {1, 0}, last[2] = {0, 1};
    const void *inputs[] = {tokens};
    const uint8_t second[2] = {0, 1};
    size_t needed = 0;
    expect(txl_stream_open(model, 2, -1, &stream, &error) == TXL_OK, error.message);
    expect(txl_sampler_open(&sampling, 2, &sampler, &error) == TXL_OK, error.message);
    expect(txl_sampler_draw(sampler, stream, tokens, NULL, &error) == TXL_USAGE, "a draw of a new stream is refused");
    expect(txl_stream_feed(stream, 1, inputs, first, NULL, 0, &error) == TXL_OK, error.message);
    expect(txl_sampler_draw(sampler, stream, tokens, NULL, &error) == TXL_OK && tokens[0] >= 0 && tokens[1] == -1,
           "a sequence that is idle from the start has no token");
    tokens[1] = 1;
    txl_stream_save(stream, 0, NULL, 0, &needed, &error);
    char *bytes = malloc(needed + 1);
    expect(txl_stream_save(stream, 0, bytes, needed, &needed, &error) == TXL_OK, error.message);
    for (int kind = 0; kind < 4; ++kind) {
        expect(txl_stream_feed(stream, 1, inputs, NULL, NULL, 0, &error) == TXL_OK, error.message);
        expect(txl_sampler_draw(sampler, stream, tokens, NULL, &error) == TXL_OK && tokens[1] >= 0,
               "once it was fed it is drawn");
        const txl_code code = kind == 0   ? txl_stream_reset(stream, second, &error)
                              : kind == 1 ? txl_stream_restore(stream, 1, bytes, needed, &error)
                                          : txl_stream_reset(stream, kind == 2 ? NULL : second, &error);
        expect(code == TXL_OK, error.message);
        if (kind == 3) expect(txl_stream_select(stream, swapped, 2, &error) == TXL_OK, error.message);
        const int other = kind == 3 ? 1 : 0;
        for (int fed = 0; fed < 2; ++fed) {
            if (fed || kind == 2)
                expect(txl_stream_feed(stream, 1, inputs, other ? last : first, NULL, 0, &error) == TXL_OK,
                       error.message);
            expect(txl_sampler_draw(sampler, stream, tokens, logprobs, &error) == TXL_OK && tokens[other] >= 0 &&
                       tokens[1 - other] == -1 && logprobs[1 - other] == 0,
                   "a sequence that was reset or restored has no token until it is fed");
            tokens[1 - other] = 1;
        }
    }
    expect(txl_stream_reset(stream, NULL, &error) == TXL_OK, error.message);
    expect(txl_sampler_draw(sampler, stream, tokens, NULL, &error) == TXL_USAGE, "where none was fed, a draw is refused");
    expect(txl_stream_prepare(stream, &error) == TXL_OK, error.message);
    expect(txl_stream_feed(stream, 1, inputs, first, NULL, 0, &error) == TXL_OK, error.message);
    expect(txl_sampler_draw(sampler, stream, tokens, NULL, &error) == TXL_OK, "a prepared stream is a new one");
    free(bytes);
    txl_sampler_free(sampler), txl_stream_free(stream);
}

/* A sampler of one sequence draws for a row what it draws on a stream of its own, whatever the other rows do. */
static void draw_rows(txl_model *model) {
    enum { ROUNDS = 12 };
    txl_error error = TXL_NEW(txl_error);
    txl_sampling sampling = TXL_NEW(txl_sampling);
    sampling.temperature = 1, sampling.seed = 5;
    txl_stream *shared = NULL, *own = NULL;
    txl_sampler *both = NULL, *samplers[3] = {NULL, NULL, NULL};
    expect(txl_stream_open(model, 2, -1, &shared, &error) == TXL_OK, error.message);
    expect(txl_stream_open(model, 1, -1, &own, &error) == TXL_OK, error.message);
    expect(txl_sampler_open(&sampling, 2, &both, &error) == TXL_OK, error.message);
    for (int i = 0; i < 3; ++i) expect(txl_sampler_open(&sampling, 1, &samplers[i], &error) == TXL_OK, error.message);
    int32_t tokens[2] = {1, 2}, alone = 2, moved = 0;
    float logprob = 0;
    for (int round = 0; round < ROUNDS; ++round) {
        const int32_t counts[2] = {1, round % 3 == 0};
        const void *inputs[] = {tokens}, *input[] = {&alone};
        expect(txl_stream_feed(shared, 1, inputs, counts, NULL, 0, &error) == TXL_OK, error.message);
        expect(txl_sampler_draw_row(samplers[0], shared, 0, &tokens[0], NULL, &error) == TXL_OK, error.message);
        if (!counts[1]) continue;
        expect(txl_stream_feed(own, 1, input, NULL, NULL, 0, &error) == TXL_OK, error.message);
        expect(txl_sampler_draw(samplers[2], own, &alone, NULL, &error) == TXL_OK, error.message);
        expect(txl_sampler_draw_row(samplers[1], shared, 1, &tokens[1], &logprob, &error) == TXL_OK && logprob < 0,
               error.message);
        expect(tokens[1] == alone, "a row is drawn for as on a stream of its own");
        moved |= alone != 2;
    }
    expect(moved, "draws are not all the same token");
    const uint8_t first[2] = {1, 0};
    size_t needed = 0;
    txl_stream_save(shared, -1, NULL, 0, &needed, &error);
    char *bytes = malloc(needed + 1);
    expect(txl_stream_save(shared, -1, bytes, needed, &needed, &error) == TXL_OK, error.message);
    expect(txl_stream_restore(own, -1, bytes, needed, &error) == TXL_USAGE &&
               strstr(error.message, "holds 2 sequences, expected 1"),
           "a snapshot of two is not one of one");
    free(bytes);
    expect(txl_sampler_draw_row(both, shared, 1, tokens, NULL, &error) == TXL_USAGE, "a sampler of two has no row");
    expect(txl_sampler_draw_row(both, shared, -1, tokens, NULL, &error) == TXL_OK, "row -1 draws for all");
    expect(txl_sampler_draw_row(samplers[0], shared, 2, tokens, NULL, &error) == TXL_USAGE &&
               strstr(error.message, "sequence 2"),
           "row 2 of two is refused by name");
    expect(txl_stream_reset(shared, first, &error) == TXL_OK, error.message);
    expect(txl_sampler_draw_row(samplers[0], shared, 0, tokens, NULL, &error) == TXL_USAGE,
           "a row that was reset is not drawn for");
    expect(txl_sampler_draw_row(samplers[1], shared, 1, tokens, NULL, &error) == TXL_OK && tokens[0] >= 0,
           "a row beside one that was reset is drawn for");
    int32_t some = 7;
    expect(txl_sampler_next(both, shared, tokens, 1, NULL, 1, tokens, NULL, NULL, &error) == TXL_USAGE &&
               strstr(error.message, "count is NULL"),
           "a place for the count is needed");
    expect(txl_sampler_next(both, shared, tokens, 1, NULL, 0, tokens, NULL, &some, &error) == TXL_USAGE && some == 0 &&
               strstr(error.message, "at most 0 tokens"),
           "no tokens are refused");
    expect(txl_sampler_next(samplers[0], shared, tokens, 1, NULL, 1, tokens, NULL, &some, &error) == TXL_USAGE,
           "a sampler of one is not one of two");
    expect(txl_stream_commit(NULL, NULL, &error) == TXL_USAGE, "no stream is refused");
    expect(txl_stream_commit(shared, NULL, &error) == TXL_OK, "a state that is committed stays");
    sampling.lookup = TXL_DRAFT;
    sampling.size = offsetof(txl_sampling, lookup); /* a struct of an older header */
    expect(txl_stream_generate(shared, &sampling, tokens, 1, NULL, 0, NULL, NULL, &error) == TXL_OK, error.message);
    for (int i = 0; i < 3; ++i) txl_sampler_free(samplers[i]);
    txl_sampler_free(both), txl_stream_free(shared), txl_stream_free(own);
}

/* Finds each array by its name, and checks the bytes of arrays of given shapes. */
static void find_arrays(txl_model *model) {
    txl_error error = TXL_NEW(txl_error);
    txl_tensor tensor = TXL_NEW(txl_tensor);
    for (int32_t table = TXL_INPUTS; table <= TXL_STATES; ++table)
        for (size_t i = 0, found = 77; i < txl_model_count(model, table); ++i) {
            expect(txl_model_tensor(model, table, i, &tensor, &error) == TXL_OK, error.message);
            expect(txl_model_find(model, table, tensor.name, &found, &error) == TXL_OK && found == i,
                   "a tensor is found by its name");
        }
    size_t found = 77;
    expect(txl_model_find(model, TXL_INPUTS, "nothing", &found, &error) == TXL_USAGE && found == 77 &&
               strstr(error.message, "nothing"),
           "a name that no tensor has is refused");
    expect(txl_model_find(model, TXL_INPUTS, NULL, &found, &error) == TXL_USAGE, "no name is refused");
    tensor.dtype = TXL_FLOAT16, tensor.rank = 3, tensor.lookahead = 2;
    tensor.shape[0] = TXL_SIZE_B, tensor.shape[1] = TXL_SIZE_L, tensor.shape[2] = 5;
    expect(txl_tensor_bytes(&tensor, 3, 4) == (size_t)2 * 3 * (4 + 2) * 5, "bytes are those of b, T and look-ahead");
    expect(!txl_tensor_bytes(&tensor, 0, 4) && !txl_tensor_bytes(&tensor, 3, 0) && !txl_tensor_bytes(NULL, 3, 4),
           "no sequences and no positions have no bytes");
    tensor.shape[2] = INT64_MAX / 4;
    expect(!txl_tensor_bytes(&tensor, 3, 4), "bytes that no number holds are not told");
    tensor.dtype = TXL_BOOL, tensor.rank = 1, tensor.shape[0] = TXL_SIZE_ROWS;
    expect(!txl_tensor_bytes(&tensor, 3, 4), "bytes of rows that nobody knows are not told");
    tensor.rank = -1;
    expect(!txl_tensor_bytes(&tensor, 3, 4), "a state that is absent has no bytes");
}

int main(int count, char **words) {
    if (count < 3) return 2;
    txl_error error = TXL_NEW(txl_error);
    txl_load_options options = TXL_NEW(txl_load_options);
    txl_model *model = NULL, *held = NULL;
    txl_stream *stream = NULL;
    txl_model_info info = TXL_NEW(txl_model_info);
    options.threads = 1;

    expect(txl_abi() == TXL_ABI, "the header and the library are of one ABI");
    expect(txl_model_load(NULL, &options, &model, &error) == TXL_USAGE && !model, "no path is refused");
    expect(txl_model_load("nowhere", &options, NULL, &error) == TXL_USAGE, "no place for the model is refused");
    expect(txl_model_load("nowhere", NULL, &model, NULL) == TXL_BUNDLE, "an error may be NULL, and options too");
    expect(txl_model_load("nowhere", &options, &model, &error) == TXL_BUNDLE && strstr(error.message, "nowhere"),
           "a message names what was asked for");
    error.size = 24; /* room for a few characters */
    memset(error.message, 'x', sizeof error.message);
    expect(txl_model_load("nowhere", &options, &model, &error) == TXL_BUNDLE && strlen(error.message) < 16,
           "a message stays in its room");
    error.size = sizeof error;

    options.manifest_sha256 = "0000000000000000000000000000000000000000000000000000000000000000";
    expect(txl_model_load(words[1], &options, &model, &error) == TXL_BUNDLE && !model,
           "another manifest than the pinned one is refused");
    options.manifest_sha256 = "";
    expect(txl_model_load(words[1], &options, &model, &error) == TXL_BUNDLE && !model, "an empty pin was taken for none");
    options.manifest_sha256 = getenv("MANIFEST_SHA256"); /* the bundle's own */
    expect(options.manifest_sha256 && txl_model_load(words[1], &options, &model, &error) == TXL_OK, error.message);
    txl_model_free(model);
    options.manifest_sha256 = NULL;
    options.engine = "no-such-library.so";
    expect(txl_model_load(words[1], &options, &model, &error) == TXL_BACKEND, "a missing engine is refused");
    options.engine = NULL;
    options.threads = -1;
    expect(txl_model_load(words[1], &options, &model, &error) == TXL_USAGE, "fewer threads than none are refused");
    options.threads = 1;
    options.ort_env = &options;
    expect(txl_model_load(words[1], &options, &model, &error) == TXL_USAGE, "an environment of no engine is refused");
    options.ort_env = NULL;
    options.size = 0;
    expect(txl_model_load(words[1], &options, &model, &error) == TXL_USAGE && strstr(error.message, "TXL_NEW"),
           "options without a size are refused, not ignored");
    options.size = offsetof(txl_load_options, update); /* a struct of an older header */
    expect(txl_model_load(words[1], &options, &model, &error) == TXL_OK, "an older struct will do");
    options.size = sizeof options;
    if (!model) return fprintf(stderr, "%s\n", error.message), 1;

    info.size = offsetof(txl_model_info, longest);
    info.longest = -7;
    expect(txl_model_describe(model, &info, &error) == TXL_OK && info.batch_size > 0 && info.longest == -7,
           "only what an older struct has is written");
    find_arrays(model);
    txl_tensor tensor = TXL_NEW(txl_tensor);
    expect(txl_model_tensor(model, TXL_INPUTS, 1000, &tensor, &error) == TXL_USAGE,
           "a row that there is not is refused");
    expect(txl_model_tensor(model, 77, 0, &tensor, &error) == TXL_USAGE, "a table that there is not is refused");
    expect(txl_stream_open(model, 0, -1, &stream, &error) == TXL_USAGE && !stream, "no sequences are refused");
    expect(txl_stream_open(model, 1, -1, &stream, &error) == TXL_OK, error.message);
    txl_model_free(model); /* the stream holds it */
    expect(txl_stream_run(stream, 1, NULL, NULL, NULL, 1, &error) == TXL_USAGE, "missing inputs are refused");
    expect(txl_stream_run(NULL, 1, NULL, NULL, NULL, 1, &error) == TXL_USAGE, "a missing stream is refused");
    size_t needed = 0, again = 0;
    expect(txl_stream_save(stream, -1, NULL, 0, &needed, &error) == TXL_ROOM && needed > 0 &&
               strstr(error.message, " bytes"),
           "the size of a snapshot is told");
    char *bytes = malloc(needed + 1);
    expect(txl_stream_save(stream, -1, bytes, needed, &again, &error) == TXL_OK && again == needed,
           "a snapshot fits where it said");
    expect(txl_stream_restore(stream, -1, bytes, needed, &error) == TXL_OK, error.message);
    for (size_t cut = 0; cut < needed; ++cut)
        expect(txl_stream_restore(stream, -1, bytes, cut, &error) == TXL_USAGE,
               "a snapshot that is cut off is refused");
    expect(txl_stream_fill(stream, 99) == -1, "a sequence that there is not has no fill");
    txl_stream_free(stream);
    txl_stream_free(NULL), txl_model_free(NULL), txl_sampler_free(NULL);
    free(bytes);

    /* The same from memory. */
    txl_file files[MOST_FILES];
    size_t many = 0;
    for (int i = 2; i < count && many < MOST_FILES; ++i) files[many++] = read_file(words[1], words[i]);
    expect(txl_model_load_memory(files, many - 1, &options, &model, &error) == TXL_BUNDLE,
           "a file that is missing in memory is refused");
    for (int lean = 0; lean < 2; ++lean) {
        options.flags = lean ? TXL_LOAD_LEAN : 0;
        expect(txl_model_load_memory(files, many, &options, &held, &error) == TXL_OK, error.message);
        double reached = -1;
        expect(!held || (txl_model_selftest(held, &reached, &error) == TXL_OK && reached >= 0 && reached <= 1),
               "a model from memory passes its self-test, lean or not");
        info.size = sizeof info;
        if (held && !txl_model_describe(held, &info, &error) && info.flags & TXL_IS_SCORING && info.batch_size > 1)
            draw_again(held), draw_rows(held);
        txl_model_free(held);
        held = NULL;
    }
    for (size_t i = 0; i < many; ++i) free((void *)files[i].data);
    return wrong;
}
