// Draws of tokens, with the random numbers of NumPy's PCG64 (§ 7).
#pragma once
#include <cstdint>
#include <vector>

#include "txl.h"

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

}  // namespace txl_runtime
