// Log-probabilities from what the softmax takes: the head, and a tail for each further cluster (§ 6).
#pragma once
#include <vector>

#include "model.hpp"

namespace txl_runtime {

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
