// txl.hpp: bundles of txl-deploy from C++17, over txl.h. SPDX-License-Identifier: Apache-2.0
//
// Model, Sampler and Stream free what they hold. A call that fails throws txl::Error, whose text says what was found,
// what was expected and what to do. Arrays stand in the tables' order, as in txl.h.
#ifndef TXL_HPP
#define TXL_HPP
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "txl.h"

namespace txl {

class Error : public std::runtime_error {
public:
    Error(txl_code why, const char *said) : std::runtime_error(said), code(why) {}
    txl_code code;
};

namespace detail {

// Call a function of txl.h, whose last argument is the txl_error; throw if it fails.
template <typename Call, typename... Given>
void checked(Call call, Given... given) {
    auto error = TXL_NEW(txl_error);
    const auto code = call(given..., &error);
    if (code != TXL_OK) throw Error(code, error.message);
}

// Call a function with `room` and `needed` twice: for the size, then for the result.
template <typename Result, typename Call, typename... Given>
Result sized(Call call, Given... given) {
    std::size_t needed = 0;
    auto error = TXL_NEW(txl_error);
    auto code = call(given..., nullptr, 0, &needed, &error);
    Result found(needed, typename Result::value_type{});
    if (code == TXL_ROOM) code = call(given..., found.data(), found.size(), &needed, &error);
    if (code != TXL_OK) throw Error(code, error.message);
    return found;
}

struct Free {
    void operator()(txl_model *model) const { txl_model_free(model); }
    void operator()(txl_stream *stream) const { txl_stream_free(stream); }
    void operator()(txl_sampler *sampler) const { txl_sampler_free(sampler); }
};

template <typename Handle>
class Held {
public:
    [[nodiscard]] Handle *get() const { return handle_.get(); }

protected:
    template <typename Call, typename... Given>
    explicit Held(Call call, Given... given) {
        Handle *made = nullptr;
        checked(call, given..., &made);
        handle_.reset(made);
    }

private:
    std::unique_ptr<Handle, Free> handle_;
};

}  // namespace detail

class Model : public detail::Held<txl_model> {
public:
    explicit Model(const std::string &path, const txl_load_options &options = TXL_NEW(txl_load_options))
        : Held(txl_model_load, path.c_str(), &options) {}
    explicit Model(const std::vector<txl_file> &files, const txl_load_options &options = TXL_NEW(txl_load_options))
        : Held(txl_model_load_memory, files.data(), files.size(), &options) {}

    [[nodiscard]] txl_model_info info() const {
        auto found = TXL_NEW(txl_model_info);
        detail::checked(txl_model_describe, get(), &found);
        return found;
    }
    [[nodiscard]] std::vector<std::int32_t> lengths() const {
        std::vector<std::int32_t> found(txl_model_lengths(get(), nullptr, 0));
        txl_model_lengths(get(), found.data(), found.size());
        return found;
    }
    [[nodiscard]] std::vector<txl_tensor> table(txl_table which) const {
        std::vector<txl_tensor> found(txl_model_count(get(), which), TXL_NEW(txl_tensor));
        for (std::size_t i = 0; i < found.size(); ++i) detail::checked(txl_model_tensor, get(), which, i, &found[i]);
        return found;
    }
    // Return the index of the row with this name, e.g. find(TXL_STATES, "memory").
    [[nodiscard]] std::size_t find(txl_table which, const std::string &name) const {
        std::size_t index = 0;
        detail::checked(txl_model_find, get(), which, name.c_str(), &index);
        return index;
    }
    [[nodiscard]] std::vector<std::int32_t> encode(std::string_view text) const {
        return detail::sized<std::vector<std::int32_t>>(txl_encode, get(), text.data(), text.size());
    }
    [[nodiscard]] std::string decode(const std::vector<std::int32_t> &tokens) const {
        return detail::sized<std::string>(txl_decode, get(), tokens.data(), tokens.size());
    }
    // Throw TXL_CHECK if the stored vectors differ by more than is allowed.
    void selftest() const { detail::checked(txl_model_selftest, get(), nullptr); }
};

// Decodes a text that comes token by token to whole characters, and U+FFFD for bytes that are no UTF-8.
class Text {
public:
    explicit Text(const Model &model) : model_(&model) {}  // the model has to outlive it

    // Return the characters that are whole now.
    [[nodiscard]] std::string feed(const std::vector<std::int32_t> &tokens) {
        return tokens.empty() ? std::string() : next(tokens);
    }
    // Return what was held back, and begin anew.
    [[nodiscard]] std::string finish() { return next({}); }

private:
    std::string next(const std::vector<std::int32_t> &tokens) {
        return detail::sized<std::string>(txl_decode_next, model_->get(), &text_, tokens.data(), tokens.size());
    }
    const Model *model_;
    txl_text text_ = TXL_NEW(txl_text);
};

// A function that changes log-probabilities before a draw, as txl_adjust of txl.h; what it throws comes out of the
// draw.
using Adjust = std::function<void(std::int32_t row, std::int32_t last, double *logprobs, std::int32_t V)>;

class Sampler : public detail::Held<txl_sampler> {
public:
    explicit Sampler(const txl_sampling &sampling, std::int32_t b = 1) : Held(txl_sampler_open, &sampling, b) {}
    Sampler(const txl_sampling &sampling, std::int32_t b, Adjust adjust)
        : Sampler(sampling, b, std::make_unique<Hook>(Hook{std::move(adjust), nullptr})) {}

private:
    friend class Stream;
    struct Hook {
        Adjust adjust;
        std::exception_ptr thrown;
        static int call(void *data, std::int32_t row, std::int32_t last, double *logprobs, std::int32_t V) noexcept {
            auto &hook = *static_cast<Hook *>(data);
            try {
                hook.adjust(row, last, logprobs, V);
                return 0;
            } catch (...) {
                hook.thrown = std::current_exception();
                return 1;
            }
        }
    };
    Sampler(txl_sampling sampling, std::int32_t b, std::unique_ptr<Hook> hook)
        : Held(txl_sampler_open, with(sampling, hook.get()), b), hook_(std::move(hook)) {}
    static const txl_sampling *with(txl_sampling &sampling, Hook *hook) {
        sampling.adjust = &Hook::call, sampling.adjust_data = hook;
        return &sampling;
    }
    // Call a function of txl.h that draws.
    template <typename Call, typename... Given>
    void draw(Call call, Given... given) {
        try {
            detail::checked(call, get(), given...);
        } catch (const Error &) {
            if (hook_ && hook_->thrown) std::rethrow_exception(std::exchange(hook_->thrown, nullptr));
            throw;
        }
    }
    std::unique_ptr<Hook> hook_;
};

class Stream : public detail::Held<txl_stream> {
public:
    explicit Stream(const Model &model, std::int32_t b = 1, std::int32_t memory_length = -1)
        : Held(txl_stream_open, model.get(), b, memory_length) {}

    [[nodiscard]] std::int32_t batch() const { return txl_stream_batch(get()); }
    [[nodiscard]] std::int32_t fill(std::int32_t row = 0) const { return txl_stream_fill(get(), row); }
    void prepare() { detail::checked(txl_stream_prepare, get()); }
    void run(std::int32_t T, const void *const *inputs, void *const *outputs, const std::int32_t *counts = nullptr,
             bool commit = true) {
        detail::checked(txl_stream_run, get(), T, inputs, counts, outputs, commit);
    }
    // Commit the latest run without a commit, or its first positions, one number for each sequence.
    void commit() { detail::checked(txl_stream_commit, get(), nullptr); }
    void commit(const std::vector<std::int32_t> &counts) {
        if (counts.size() != static_cast<std::size_t>(get() ? batch() : 1))
            throw Error(TXL_USAGE, (std::to_string(counts.size()) + " counts were given, expected one for each of " +
                                    std::to_string(batch()) + " sequences; give so many")
                                       .c_str());
        detail::checked(txl_stream_commit, get(), counts.data());
    }
    void feed(std::int32_t T, const void *const *inputs, void *const *outputs, const std::int32_t *counts = nullptr,
              bool last = false) {
        detail::checked(txl_stream_feed, get(), T, inputs, counts, outputs, last);
    }
    // Feed token ids, [T] for one sequence or flat [b, T]; the next draw continues after them.
    void feed(const std::vector<std::int32_t> &tokens) {
        if (tokens.empty()) return;
        const void *inputs[] = {tokens.data()};
        feed(positions(tokens), inputs, nullptr);
    }
    // Return the cost in nats of each token but the first of its sequence, flat [b, T - 1]; the last one is not fed.
    [[nodiscard]] std::vector<float> score(const std::vector<std::int32_t> &tokens) {
        const auto T = positions(tokens);
        std::vector<float> nll(T > 1 ? tokens.size() - static_cast<std::size_t>(batch()) : 0);
        detail::checked(txl_stream_score, get(), tokens.data(), T, nullptr, nll.data());
        return nll;
    }
    [[nodiscard]] std::vector<std::int32_t> draw(Sampler &sampler) {
        std::vector<std::int32_t> tokens(static_cast<std::size_t>(batch()));
        sampler.draw(txl_sampler_draw, get(), tokens.data(), nullptr);
        return tokens;
    }
    // Draw for one row, with a sampler of one sequence.
    [[nodiscard]] std::int32_t draw(Sampler &sampler, std::int32_t row) {
        std::int32_t token = -1;
        sampler.draw(txl_sampler_draw_row, get(), row, &token, nullptr);
        return token;
    }
    // Feed token ids, flat [b, T], and draw what comes next, flat [n, b] with n 1 ... `most`, as txl_sampler_next. The
    // last tokens are not fed: give them to the next call.
    [[nodiscard]] std::vector<std::int32_t> next(Sampler &sampler, const std::vector<std::int32_t> &tokens,
                                                 std::int32_t most = 1) {
        const auto b = static_cast<std::size_t>(get() ? batch() : 1);
        const auto room = most < 1 + TXL_DRAFT ? most : 1 + TXL_DRAFT;
        std::int32_t count = 0;
        std::vector<std::int32_t> drawn(room > 0 ? static_cast<std::size_t>(room) * b : 0);
        sampler.draw(txl_sampler_next, get(), tokens.data(), positions(tokens), nullptr, room, drawn.data(), nullptr,
                     &count);
        drawn.resize(static_cast<std::size_t>(count) * b);
        return drawn;
    }
    void reset(const std::uint8_t *which = nullptr) { detail::checked(txl_stream_reset, get(), which); }
    void select(const std::vector<std::int32_t> &rows) {
        detail::checked(txl_stream_select, get(), rows.data(), static_cast<std::int32_t>(rows.size()));
    }
    [[nodiscard]] std::string save(std::int32_t row = -1) const {
        return detail::sized<std::string>(txl_stream_save, get(), row);
    }
    void restore(std::string_view bytes, std::int32_t row = -1) {
        detail::checked(txl_stream_restore, get(), row, bytes.data(), bytes.size());
    }

private:
    [[nodiscard]] std::int32_t positions(const std::vector<std::int32_t> &tokens) const {
        // A moved-from stream has no handle; the call that follows refuses it.
        const auto b = static_cast<std::size_t>(get() ? batch() : 1), T = tokens.size() / b;
        if (T * b != tokens.size())
            throw Error(TXL_USAGE,
                        (std::to_string(tokens.size()) + " token ids were given, expected as many for each of " +
                         std::to_string(b) + " sequences; give [b, T]")
                            .c_str());
        return static_cast<std::int32_t>(T);
    }
};

}  // namespace txl
#endif
