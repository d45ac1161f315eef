// The C functions of txl.h: they check arguments first, and turn exceptions into codes.
#include <algorithm>
#include <cstring>
#include <new>

#include "error.hpp"
#include "ranges.hpp"
#include "stream.hpp"

#ifndef TXL_VERSION
#define TXL_VERSION "0"
#endif

struct txl_model {
    std::shared_ptr<const txl_runtime::Model> own;
    static constexpr const char *NAME = "the model";
};
struct txl_stream {
    txl_runtime::Stream own;
    static constexpr const char *NAME = "the stream";
};
struct txl_sampler {
    txl_runtime::Sampler own;
    static constexpr const char *NAME = "the sampler";
};

namespace {

using txl_runtime::brief;
using txl_runtime::need;
using txl_runtime::refuse;

// Fill the caller's txl_error, as far as its size goes, and return the code.
txl_code tell(txl_error *error, txl_code code, const std::string &said) {
    constexpr auto BEFORE = offsetof(txl_error, message);
    if (error && error->size > BEFORE) {
        const auto room = std::min<std::size_t>(error->size, sizeof *error) - BEFORE;
        const auto line = txl_runtime::printable(said, room - 1);
        error->code = code;
        std::memcpy(error->message, line.c_str(), line.size() + 1);
    }
    return code;
}

template <typename Does>
txl_code guarded(txl_error *error, Does does) noexcept {
    try {
        try {
            does();
            return tell(error, TXL_OK, "");
        } catch (const txl_runtime::Refused &refused) {
            return tell(error, refused.code, refused.what());
        } catch (const std::bad_alloc &) {
            return tell(error, TXL_MEMORY,
                        "there is not enough memory, expected more; use a smaller model or fewer sequences");
        } catch (const std::exception &other) {
            return tell(error, TXL_BUNDLE,
                        std::string("something unforeseen: ") + other.what() + "; export the model again");
        }
    } catch (...) {
        return TXL_MEMORY;  // making the message failed, too
    }
}

void given(const void *pointer, const char *what) {
    need(pointer != nullptr, TXL_USAGE, what, " is NULL, expected one; give it");
}

// Return the bytes of a caller's struct that both sides know: it may be of an older or newer txl.h. Size 0, where
// TXL_NEW was forgotten, is refused: all fields would be ignored.
template <typename T>
std::size_t known(const T *caller) {
    need(caller->size >= sizeof caller->size, TXL_USAGE, "the struct's size is ", caller->size,
         ", expected sizeof of it; begin it with TXL_NEW");
    return std::min<std::size_t>(caller->size, sizeof *caller);
}

template <typename T>
T taken(const T *from) {
    T made{};
    if (from) std::memcpy(static_cast<void *>(&made), from, known(from));
    made.size = sizeof made;
    return made;
}

template <typename T>
void hand_out(T made, T *to) {
    given(to, "the struct to fill");
    const auto size = to->size;
    std::memcpy(static_cast<void *>(to), &made, known(to));
    to->size = size;
}

// Copy a result of unknown size to the caller; set `needed` even if `room` is too small.
void fill(const void *from, std::size_t bytes, std::size_t count, void *to, std::size_t room, std::size_t *needed) {
    given(needed, "needed");
    *needed = count;
    need(count <= room, TXL_ROOM, "the result takes ", count, count == bytes ? " bytes" : " tokens",
         ", and there is room for ", room, "; call again with `needed`");
    given(count ? to : needed, "the room for the result");
    if (bytes) std::memcpy(to, from, bytes);
}

// Call `does` with the object of a handle; refuse NULL.
template <typename Handle, typename Does>
txl_code with(Handle *handle, txl_error *error, Does does) {
    return guarded(error, [&] { given(handle, Handle::NAME), does(handle->own); });
}

// Set `made` to a new handle, or to NULL if `makes` throws.
template <typename Handle, typename Makes>
txl_code opened(Handle **made, txl_error *error, Makes makes) {
    return guarded(error, [&] {
        given(made, "the place for the result");
        *made = nullptr;
        *made = new Handle{makes()};
    });
}

txl_tensor tensor_of(const std::string &name, const char *role, txl_dtype dtype, const txl_runtime::Sizes &shape) {
    auto found = TXL_NEW(txl_tensor);
    found.dtype = dtype, found.rank = std::int32_t(shape.size());
    txl_runtime::ranges::copy(shape, found.shape);
    found.name = name.c_str(), found.role = role;
    return found;
}

std::size_t rows_of(const txl_runtime::Model &model, std::int32_t table) {
    return table == TXL_INPUTS    ? model.given.size()
           : table == TXL_OUTPUTS ? model.manifest.outputs.size()
           : table == TXL_STATES  ? model.states.size()
                                  : 0;
}

txl_tensor describe(const txl_runtime::Model &model, std::int32_t table, std::size_t index) {
    const auto rows = rows_of(model, table);
    need(index < rows, TXL_USAGE, "row ", index, " of table ", table, " was asked for, expected one below ", rows,
         "; ask txl_model_count");
    if (table == TXL_INPUTS) {
        const auto &entry = *model.given[index];
        auto found = tensor_of(entry.name, entry.role.c_str(), entry.dtype, entry.axes.shape);
        found.lookahead = entry.axes.ahead, found.vocab = entry.vocab;
        return found;
    }
    if (table == TXL_OUTPUTS) {
        const auto &output = model.manifest.outputs[index];
        return tensor_of(output.name, output.role.c_str(), output.dtype, output.axes.shape);
    }
    const auto &state = *model.states[index];
    auto shape = state.shape;
    if (state.batch_axis >= 0) shape[state.batch_axis] = TXL_SIZE_B;
    if (state.counted()) shape[state.row_axis] = model.manifest.memory_length();
    if (state.rows) shape[state.row_axis] = TXL_SIZE_ROWS;
    return tensor_of(state.name, name_of(state.update), state.counted() ? TXL_FLOAT32 : state.dtype, shape);
}

}  // namespace

uint32_t txl_abi(void) { return TXL_ABI; }
const char *txl_version(void) { return TXL_VERSION; }

txl_code txl_engine(const txl_load_options *options, char *text, size_t room, size_t *needed, txl_error *error) {
    return guarded(error, [&] {
        const auto given = taken(options);
        const auto found = given.native_library ? std::string("a step in C") + '\0'
                                                : "ONNX Runtime " + txl_runtime::Engine(given).version() + '\0';
        fill(found.data(), found.size(), found.size(), text, room, needed);
    });
}

txl_code txl_model_load(const char *path, const txl_load_options *options, txl_model **made, txl_error *error) {
    return opened(made, error, [&] {
        given(path, "the path");
        return std::make_shared<const txl_runtime::Model>(txl_runtime::open_folder(path), taken(options));
    });
}

txl_code txl_model_load_memory(const txl_file *files, size_t count, const txl_load_options *options, txl_model **made,
                               txl_error *error) {
    return opened(made, error, [&] {
        given(files, "the list of files");
        return std::make_shared<const txl_runtime::Model>(txl_runtime::open_memory(files, count), taken(options));
    });
}

void txl_model_free(txl_model *model) { delete model; }

txl_code txl_model_describe(const txl_model *handle, txl_model_info *info, txl_error *error) {
    return with(handle, error, [&](const auto &model) {
        const auto &m = model->manifest;
        auto found = TXL_NEW(txl_model_info);
        found.batch_size = m.B, found.vocab_size = m.vocab_size(), found.memory_length = m.memory_length();
        found.boundary_token = m.boundary, found.longest = model->lengths[0], found.state_bytes = model->state_bytes();
        const auto flag = [](bool is, unsigned int bit) { return is ? bit : 0U; };
        found.flags = flag(!m.lockstep, TXL_IS_INDEPENDENT) | flag(m.joint, TXL_IS_JOINT) |
                      flag(m.exact, TXL_IS_EXACT) | flag(model->text, TXL_IS_TEXT) |
                      flag(model->scoring, TXL_IS_SCORING) | flag(m.counts_rows(), TXL_IS_COUNTING) |
                      flag(!model->native, TXL_IS_ALLOCATING);
        found.model_id = m.model_id.c_str(), found.update = name_of(model->update);
        found.engine = model->engine_name.c_str(), found.precision = m.precision.c_str();
        hand_out(found, info);
    });
}

size_t txl_model_lengths(const txl_model *handle, int32_t *lengths, size_t room) {
    if (!handle) return 0;
    const auto &known = handle->own->lengths;
    for (std::size_t i = 0; lengths && i < std::min(room, known.size()); ++i) lengths[i] = known[i];
    return known.size();
}

size_t txl_model_count(const txl_model *handle, int32_t table) { return handle ? rows_of(*handle->own, table) : 0; }

txl_code txl_model_tensor(const txl_model *handle, int32_t table, size_t index, txl_tensor *tensor, txl_error *error) {
    return with(handle, error, [&](const auto &model) { hand_out(describe(*model, table, index), tensor); });
}

txl_code txl_model_find(const txl_model *handle, int32_t table, const char *name, size_t *index, txl_error *error) {
    return with(handle, error, [&](const auto &model) {
        given(name, "the name"), given(index, "the place for the index");
        std::string there;
        for (std::size_t i = 0; i < rows_of(*model, table); ++i) {
            const std::string one = describe(*model, table, i).name;
            if (one == name) return void(*index = i);
            there += (i ? ", " : "") + one;
        }
        refuse(TXL_USAGE, "table ", table, " has no ", brief(name), ", expected one of: ", there, "; take its name");
    });
}

size_t txl_tensor_bytes(const txl_tensor *tensor, int32_t b, int32_t T) {
    if (!tensor || tensor->rank < 0 || b < 1 || T < 1) return 0;
    auto bytes = txl_runtime::size_of(tensor->dtype);
    for (std::int32_t axis = 0; axis < std::min(tensor->rank, std::int32_t{TXL_AXES}); ++axis) {
        const auto size = tensor->shape[axis];
        const auto given = size == TXL_SIZE_B ? b : size == TXL_SIZE_L ? std::int64_t(T) + tensor->lookahead : size;
        if (given < 0 || (given && bytes > SIZE_MAX / std::size_t(given))) return 0;
        bytes *= std::size_t(given);
    }
    return bytes;
}

txl_code txl_model_selftest(const txl_model *handle, double *reached, txl_error *error) {
    return with(handle, error, [&](const auto &model) {
        const auto found = txl_runtime::run_selftest(model);
        if (reached) *reached = found;
        need(found <= 1, TXL_CHECK, "the self-test reached ", found,
             " times what is allowed; do not use this bundle here, export it again");
    });
}

txl_code txl_encode(const txl_model *handle, const char *text, size_t bytes, int32_t *tokens, size_t room,
                    size_t *needed, txl_error *error) {
    return with(handle, error, [&](const auto &model) {
        given(bytes ? text : "", "the text");
        need(model->vocabulary != nullptr, TXL_USAGE, "the bundle has no vocabulary, expected one; give token ids");
        const auto found = model->vocabulary->encode({text, bytes});
        fill(found.data(), found.size() * sizeof(int32_t), found.size(), tokens, room, needed);
    });
}

txl_code txl_decode(const txl_model *handle, const int32_t *tokens, size_t count, char *text, size_t room,
                    size_t *needed, txl_error *error) {
    return with(handle, error, [&](const auto &model) {
        given(count ? static_cast<const void *>(tokens) : "", "the tokens");
        need(model->vocabulary != nullptr, TXL_USAGE, "the bundle has no vocabulary, expected one; show token ids");
        const auto found = model->vocabulary->decode(tokens, count);
        fill(found.data(), found.size(), found.size(), text, room, needed);
    });
}

txl_code txl_decode_next(const txl_model *handle, txl_text *text, const int32_t *tokens, size_t count, char *to,
                         size_t room, size_t *needed, txl_error *error) {
    return with(handle, error, [&](const auto &model) {
        given(text, "the txl_text"), given(count ? static_cast<const void *>(tokens) : "", "the tokens");
        need(model->vocabulary != nullptr, TXL_USAGE, "the bundle has no vocabulary, expected one; show token ids");
        auto kept = taken(text);
        need(kept.held < sizeof kept.bytes, TXL_USAGE, "the txl_text holds ", kept.held,
             " bytes, expected at most 3; begin it with TXL_NEW");
        const auto bytes = std::string(kept.bytes, kept.held) + model->vocabulary->decode(tokens, count);
        std::size_t used = 0;
        const auto found = txl_runtime::whole_characters(bytes, count == 0, used);
        fill(found.data(), found.size(), found.size(), to, room, needed);
        kept.held = std::uint32_t(bytes.copy(kept.bytes, sizeof kept.bytes, used));
        hand_out(kept, text);
    });
}

txl_code txl_stream_open(const txl_model *handle, int32_t b, int32_t memory_length, txl_stream **made,
                         txl_error *error) {
    return opened(made, error, [&] {
        given(handle, txl_model::NAME);
        return txl_runtime::Stream(handle->own, b, memory_length);
    });
}

void txl_stream_free(txl_stream *handle) { delete handle; }

txl_code txl_stream_prepare(txl_stream *handle, txl_error *error) {
    return with(handle, error, [](auto &stream) { stream.prepare(); });
}

int32_t txl_stream_batch(const txl_stream *handle) { return handle ? handle->own.b() : 0; }

txl_code txl_stream_run(txl_stream *handle, int32_t T, const void *const *inputs, const int32_t *counts,
                        void *const *outputs, int commit, txl_error *error) {
    return with(handle, error, [&](auto &stream) { stream.run(T, inputs, counts, outputs, commit != 0); });
}

txl_code txl_stream_commit(txl_stream *handle, const int32_t *counts, txl_error *error) {
    return with(handle, error, [&](auto &stream) { stream.commit(counts); });
}

txl_code txl_stream_feed(txl_stream *handle, int32_t T, const void *const *inputs, const int32_t *counts,
                         void *const *outputs, int last, txl_error *error) {
    return with(handle, error, [&](auto &stream) { stream.feed(T, inputs, counts, outputs, last != 0); });
}

txl_code txl_stream_score(txl_stream *handle, const int32_t *tokens, int32_t T, const int32_t *counts, float *nll,
                          txl_error *error) {
    return with(handle, error, [&](auto &stream) { stream.score(tokens, T, counts, nll); });
}

txl_code txl_stream_generate(txl_stream *handle, const txl_sampling *sampling, const int32_t *tokens, int32_t T,
                             const int32_t *counts, int32_t count, int32_t *drawn, float *logprobs, txl_error *error) {
    return with(handle, error,
                [&](auto &stream) { stream.generate(taken(sampling), tokens, T, counts, count, drawn, logprobs); });
}

txl_code txl_sampler_open(const txl_sampling *sampling, int32_t b, txl_sampler **made, txl_error *error) {
    return opened(made, error, [&] { return txl_runtime::Sampler(taken(sampling), b); });
}

void txl_sampler_free(txl_sampler *handle) { delete handle; }

txl_code txl_sampler_draw(txl_sampler *handle, txl_stream *stream, int32_t *tokens, float *logprobs, txl_error *error) {
    return txl_sampler_draw_row(handle, stream, -1, tokens, logprobs, error);
}

txl_code txl_sampler_draw_row(txl_sampler *handle, txl_stream *stream, int32_t row, int32_t *tokens, float *logprobs,
                              txl_error *error) {
    return with(handle, error, [&](auto &sampler) {
        given(stream, txl_stream::NAME);
        stream->own.draw(sampler, row, tokens, logprobs);
    });
}

txl_code txl_sampler_next(txl_sampler *handle, txl_stream *stream, const int32_t *tokens, int32_t T,
                          const int32_t *counts, int32_t most, int32_t *drawn, float *logprobs, int32_t *count,
                          txl_error *error) {
    return with(handle, error, [&](auto &sampler) {
        given(stream, txl_stream::NAME), given(count, "count");
        stream->own.next(sampler, tokens, T, counts, most, drawn, logprobs, *count);
    });
}

txl_code txl_stream_reset(txl_stream *handle, const uint8_t *which, txl_error *error) {
    return with(handle, error, [&](auto &stream) { stream.reset(which); });
}

txl_code txl_stream_select(txl_stream *handle, const int32_t *rows, int32_t count, txl_error *error) {
    return with(handle, error, [&](auto &stream) { stream.select(rows, count); });
}

int32_t txl_stream_fill(const txl_stream *handle, int32_t row) {
    return handle && row >= 0 && row < handle->own.b() ? handle->own.states().fill()[row] : -1;
}

txl_code txl_stream_state(const txl_stream *handle, size_t index, txl_tensor *tensor, void *data, size_t room,
                          size_t *needed, txl_error *error) {
    return with(handle, error, [&](const auto &stream) {
        given(needed, "needed");
        auto found = describe(stream.model(), TXL_STATES, index);
        *needed = 0;
        if (!stream.states().there(index)) {
            found.rank = -1;
            return hand_out(found, tensor);
        }
        const auto all = stream.states().table(index, stream.b());
        txl_runtime::ranges::copy(all.shape, found.shape);
        hand_out(found, tensor);
        fill(all.view().data, all.bytes(), all.bytes(), data, room, needed);
    });
}

txl_code txl_stream_save(const txl_stream *handle, int32_t row, void *bytes, size_t room, size_t *needed,
                         txl_error *error) {
    return with(handle, error, [&](const auto &stream) {
        const auto found = stream.save(row);
        fill(found.data(), found.size(), found.size(), bytes, room, needed);
    });
}

txl_code txl_stream_restore(txl_stream *handle, int32_t row, const void *bytes, size_t count, txl_error *error) {
    return with(handle, error, [&](auto &stream) {
        given(bytes, "the snapshot");
        stream.restore(row, {static_cast<const char *>(bytes), count});
    });
}
