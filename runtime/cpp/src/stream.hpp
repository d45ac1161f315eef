// A stream: b sequences of a model, with the calls of txl.h that run, feed, score, generate and snapshot (§ 4, § 5).
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "partial.hpp"
#include "programs.hpp"
#include "sampling.hpp"
#include "states.hpp"

namespace txl_runtime {

class Stream {
public:
    Stream(std::shared_ptr<const Model> model, std::int64_t b, std::int64_t memory_length);

    void prepare();
    void run(std::int64_t length, const void *const *inputs, const std::int32_t *counts, void *const *outputs,
             bool commit);
    void commit(const std::int32_t *counts);  // of the latest run without a commit; NULL: all that ran
    void feed(std::int64_t length, const void *const *inputs, const std::int32_t *counts, void *const *outputs,
              bool last);
    void score(const std::int32_t *tokens, std::int64_t length, const std::int32_t *counts, float *nll);
    // Feed prompts or the tokens drawn last, and draw 1 ... `most` of each sequence; `count` is what was drawn so far.
    void next(Sampler &sampler, const std::int32_t *tokens, std::int64_t length, const std::int32_t *counts,
              std::int32_t most, std::int32_t *drawn, float *logprobs, std::int32_t &count);
    void generate(const txl_sampling &sampling, const std::int32_t *tokens, std::int64_t length,
                  const std::int32_t *counts, std::int32_t count, std::int32_t *drawn, float *logprobs);
    void draw(Sampler &sampler, std::int32_t row, std::int32_t *tokens, float *logprobs);  // row -1: all rows

    void reset(const std::uint8_t *which);
    void select(const std::int32_t *rows, std::int64_t count);
    [[nodiscard]] std::string save(std::int32_t row) const;
    void restore(std::int32_t row, std::string_view bytes);

    [[nodiscard]] std::int64_t b() const { return b_; }
    [[nodiscard]] const Model &model() const { return *model_; }
    [[nodiscard]] const States &states() const { return *states_; }

private:
    struct Segment {
        std::int64_t first = 0, size = 0;
        bool any = false;  // true: a position of some sequence counts in it
    };
    bool next(Segment &segment, std::int64_t length);
    void set_batch(std::int64_t b);
    void check_batch(std::int64_t b) const;
    void check_row(std::int32_t row) const;
    void read(std::int64_t length, const void *const *inputs, const std::int32_t *counts);
    void read_counts(std::int64_t length, const std::int32_t *counts);
    void read_prompts(std::int64_t length, const std::int32_t *tokens, const std::int32_t *counts);
    void read_tokens(std::int64_t length, const std::int32_t *tokens, const std::int32_t *counts);
    void check_ids() const;
    void check_segment(std::int64_t length, const std::vector<std::int32_t> &counts) const;
    void check_feed(std::int64_t length);
    bool step_tokens(std::int64_t first, std::int64_t length, bool commit = true);  // steps over ids_
    bool step(std::int64_t first, std::int64_t length, bool commit);  // over inputs_; false: inside_ counts nothing
    void count_inside();                                              // writes inside_ into what programs read
    void clear_outputs(std::int64_t length, void *const *outputs, bool last);
    void give(void *const *outputs, std::int64_t first, std::int64_t length, bool last);
    [[nodiscard]] View before_softmax(std::int64_t row, std::int64_t position) const;
    void keep_last();
    void check_sampler(const Sampler &sampler, std::int64_t rows) const;
    void refuse_text(const char *what) const;
    [[nodiscard]] std::vector<std::int32_t> sequences(std::int32_t row) const;

    std::shared_ptr<const Model> model_;
    std::int64_t b_ = 0, given_length_ = 0;
    std::size_t logprobs_ = 0;  // index of the output with log-probabilities
    Parts parts_;
    std::unique_ptr<States> states_;
    std::unique_ptr<Runner> runner_;
    std::unique_ptr<Softmax> softmax_;           // null if the model returns no log-probabilities
    Runner::Bound *ran_ = nullptr;               // the program that ran last
    std::int64_t tried_ = 0;                     // sequences that it computed, if it is not committed; else 0
    std::vector<View> inputs_, outputs_;         // the caller's arrays
    View ids_;                                   // the caller's tokens [b, T]
    std::vector<std::int32_t> counts_, inside_;  // [b] positions that count: in the call, in the present segment
    Array last_, row_;       // [B, F] softmax inputs of each sequence's last position; [V] log-probabilities
    std::vector<char> fed_;  // [b] true: fed since it was opened, reset or restored
};

}  // namespace txl_runtime
