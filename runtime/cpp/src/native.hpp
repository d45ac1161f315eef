// A Transformer-XL's compiled step (docs/engines.md), which the host names: it is machine code, so none is ever taken
// from a bundle. The bundle has its facts and its weights.
#pragma once
#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "array.hpp"
#include "manifest.hpp"

namespace txl_runtime {

struct Model;

// The order in which a state's memory lies: as the table says, or as the compiled step reads it.
enum class Layout { table, keys, values };

class Native {
public:
    // Open options.native_library and give it the model's weights; throw TXL_BACKEND if it cannot run here, TXL_BUNDLE
    // if a tensor or table does not fit.
    Native(const Model &model, const txl_load_options &options);
    ~Native();
    Native(const Native &) = delete;
    Native &operator=(const Native &) = delete;

    // Run one segment of the first `rows` sequences; see txl_native.h.
    void step(std::int64_t rows, std::int64_t length, const std::int32_t *tokens, const std::int32_t *valid,
              const std::int32_t *fill, const std::int32_t *head, void *const *keys, void *const *values,
              float *hidden) const;
    // Compute log-probabilities of a cluster's columns: hidden [rows, F] to out [rows, columns].
    void softmax(std::size_t cluster, std::int64_t rows, const float *hidden, float *out) const;
    // Return zeroed memory of a state for B sequences: keys [B, H, strips, 64 d_head], values [B, H, slots, padded
    // d_head].
    [[nodiscard]] Array memory(const State &state, Layout layout) const;

    std::string title;              // e.g. "a step in C (avx512, weights in int8, keys and values in fp16)"
    std::array<double, 2> reached;  // differences of outputs and states where it was built; 0 in fp32

private:
    struct Inside;
    std::string check_facts(const Model &model, const std::string &path);
    std::unique_ptr<Inside> inside_;
    std::list<std::vector<float>> tables_;  // of embeddings, which the step reads where they are
    bool half_ = false, bf16_ = false;
};

// Return `count` slots from `first` on of one sequence's memory, [count, H, d_head]; slots of keys lie in one strip.
View native_slots(const View &memory, Layout layout, std::int64_t d_head, std::int64_t first, std::int64_t count);
constexpr std::int64_t STRIP_SLOTS = 64;

}  // namespace txl_runtime
