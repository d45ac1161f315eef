// Log-probabilities, and draws of tokens from them, with the random numbers of NumPy's PCG64 (§ 7).
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "lookup.hpp"

namespace txl_runtime {

class Pcg64 {
public:
    Pcg64(const std::vector<std::uint32_t> &seed, std::uint32_t row);
    double random();  // in [0, 1)

private:
    struct Wide {  // an unsigned number of 128 bits, which not every compiler has
        std::uint64_t high, low;
    };
    static Wide sum(Wide a, Wide b);
    static Wide product(Wide a, Wide b);
    void step();
    Wide state_{}, inc_{};
};

class Sampler {
public:
    Sampler(const txl_sampling &sampling, std::int32_t b, Clock clock = seconds);
    [[nodiscard]] std::size_t batch() const { return numbers_.size(); }
    [[nodiscard]] Lookup *lookup() { return lookup_ ? &*lookup_ : nullptr; }  // null: no drafts
    // Throw TXL_USAGE if an id of `logit_bias` or `forbid` is none of V = `words`.
    void check(std::int64_t words) const;
    // Draw the next token of a sequence from its V = `words` log-probabilities.
    std::int32_t draw(std::size_t row, const float *logprobs, std::int64_t words);

private:
    void adjust(std::size_t row);  // of `row_`
    template <typename Number>
    std::int32_t pick(std::size_t row, const Number *logprobs, std::int64_t words);

    double temperature_, top_p_;
    std::int64_t top_k_;
    txl_adjust adjust_;
    void *adjust_data_;
    std::vector<txl_bias> bias_;
    std::optional<Lookup> lookup_;
    std::vector<Pcg64> numbers_;
    std::vector<double> weights_, row_;              // row_: [V] adjusted log-probabilities
    std::vector<std::int32_t> ids_, forbid_, last_;  // last_: [b] tokens drawn last, -1 for none
};

// The softmax, which turns rows of F numbers into V log-probabilities by a head and a tail per further cluster (§ 6).
class Softmax {
public:
    explicit Softmax(const Model &model);
    // Compute `into` [n, V], whose rows begin `stride` numbers apart, from `rows` [n, F]. Without softmax programs
    // `rows` are [n, V] log-probabilities already, and are copied.
    void logprobs(const float *rows, std::int64_t n, float *into, std::int64_t stride);
    [[nodiscard]] std::int64_t width() const { return width_; }  // F; V without softmax programs
    [[nodiscard]] std::int64_t words() const { return words_; }  // V
    [[nodiscard]] std::int64_t chunk() const { return chunk_; }  // most rows computed at once

private:
    void part(std::size_t cluster, const float *rows, std::int64_t n);
    const Model &model_;
    std::int64_t width_, words_, chunk_;
    std::vector<Array> results_;  // per cluster, for up to `chunk_` rows
    std::vector<const char *> input_names_, output_names_;
    std::vector<const OrtValue *> inputs_;
    std::vector<OrtValue *> outputs_;
};

}  // namespace txl_runtime
