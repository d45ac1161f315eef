// Log-probabilities, and draws of tokens from them, with the random numbers of NumPy's PCG64 (§ 7).
#pragma once
#include <cstdint>
#include <vector>

#include "model.hpp"

namespace txl_runtime {

class Pcg64 {
public:
    Pcg64(const std::vector<std::uint32_t> &seed, std::uint32_t row);
    double random();  // in [0, 1)

private:
    __extension__ using Wide = unsigned __int128;
    void step();
    Wide state_ = 0, inc_ = 0;
};

class Sampler {
public:
    Sampler(const txl_sampling &sampling, std::int32_t b);
    [[nodiscard]] std::size_t batch() const { return numbers_.size(); }
    // The next token of a sequence, from its V log-probabilities.
    std::int32_t draw(std::size_t row, const float *logprobs, std::int64_t words);

private:
    double temperature_, top_p_;
    std::int64_t top_k_;
    std::vector<Pcg64> numbers_;
    std::vector<double> weights_;
    std::vector<std::int32_t> ids_;
};

// Log-probabilities from what the softmax takes: the head, and a tail for each further cluster (§ 6).
class Softmax {
public:
    explicit Softmax(const Model &model);
    // Rows [n, F] or, without programs of a softmax, [n, V], one behind the other; into [n, V], rows of which lie
    // `stride` numbers apart.
    void logprobs(const float *rows, std::int64_t n, float *into, std::int64_t stride);
    [[nodiscard]] std::int64_t width() const { return width_; }  // F, or V
    [[nodiscard]] std::int64_t words() const { return words_; }  // V
    [[nodiscard]] std::int64_t chunk() const { return chunk_; }  // rows at a time

private:
    void part(std::size_t cluster, const float *rows, std::int64_t n);
    const Model &model_;
    std::int64_t width_, words_, chunk_;
    std::vector<Array> results_;  // of each part, for some rows
    std::vector<const char *> input_names_, output_names_;
    std::vector<const OrtValue *> inputs_;
    std::vector<OrtValue *> outputs_;
};

}  // namespace txl_runtime
