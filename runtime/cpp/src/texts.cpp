// A stream's calls for token ids: score them, draw the next ones, generate (§ 5, § 7).
#include <algorithm>

#include "error.hpp"
#include "stream.hpp"

namespace txl_runtime {

void Stream::refuse_text(const char *what) const {
    need(model_->text, TXL_USAGE, what,
         " takes token ids alone and log-probabilities of the next one, which this model does not read and return; use "
         "run or feed");
    need(model_->scoring, TXL_USAGE, what,
         " needs a state after every token, but this model's is that of whole segments of ", Listed{model_->lengths},
         "; use run without commit, and feed for whole ones");
}

void Stream::score(const std::int32_t *tokens, std::int64_t length, const std::int32_t *counts, float *nll) {
    refuse_text("score");
    need(nll || length < 2, TXL_USAGE, "nll is NULL, expected room for [b, T - 1]; give an array");
    read_tokens(length, tokens, counts);
    const auto columns = length - 1;
    std::fill_n(nll, b_ * columns, 0.0F);
    for (auto &count : counts_) count = std::max(count - 1, 0);  // the last token is only a target
    check_feed(columns);
    for (Segment segment; next(segment, columns);) {
        if (!step_tokens(segment.first, segment.size)) continue;
        for (std::int64_t row = 0; row < b_; ++row) {
            for (std::int64_t t = 0; t < inside_[row]; ++t) {
                const auto one = before_softmax(row, t);
                softmax_->logprobs(reinterpret_cast<const float *>(one.data), 1, row_.as<float>(), softmax_->words());
                const auto at = segment.first + t;
                const auto target = std::int64_t(number_at(ids_.at(0, row).at(0, at + 1).data, TXL_INT32));
                nll[row * columns + at] = -row_.as<float>()[target];
            }
        }
    }
}

void Stream::draw(Sampler &sampler, std::int32_t row, std::int32_t *tokens, float *logprobs) {
    refuse_text("a draw");
    check_row(row);
    const auto first = std::int64_t(std::max(row, 0)), count = row < 0 ? b_ : 1;
    need(tokens != nullptr, TXL_USAGE, "tokens are NULL, expected room for ", count, "; give an array");
    need(std::count(fed_.begin() + first, fed_.begin() + first + count, true), TXL_USAGE,
         "no sequence was fed since it was new, reset or restored, expected a prompt to draw after; feed one");
    need(sampler.batch() == std::size_t(count), TXL_USAGE, "the sampler is for ", sampler.batch(),
         " sequences, expected ", count, "; open another");
    sampler.check(softmax_->words());
    for (std::int64_t i = 0; i < count; ++i) {
        tokens[i] = -1;
        if (logprobs) logprobs[i] = 0;
        if (!fed_[first + i]) continue;
        softmax_->logprobs(last_.as<float>() + (first + i) * softmax_->width(), 1, row_.as<float>(), softmax_->words());
        tokens[i] = sampler.draw(std::size_t(i), row_.as<float>(), softmax_->words());
        if (logprobs) logprobs[i] = row_.as<float>()[tokens[i]];
    }
}

void Stream::generate(const txl_sampling &sampling, const std::int32_t *tokens, std::int64_t length,
                      const std::int32_t *counts, std::int32_t count, std::int32_t *drawn, float *logprobs) {
    refuse_text("generate");
    Sampler sampler(sampling, std::int32_t(b_));
    sampler.check(softmax_->words());
    need(count >= 0 && (drawn || !count), TXL_USAGE, count,
         " tokens were asked for, expected at least 0, and room for them");
    read_tokens(length, tokens, counts);
    for (std::size_t row = 0; row < counts_.size(); ++row)
        need(counts_[row] >= 1, TXL_USAGE, "sequence ", row,
             " has no prompt, expected at least one token to draw after; give one");
    check_feed(length);
    for (Segment segment; next(segment, length);) step_tokens(segment.first, segment.size);
    for (std::int32_t n = 0; n < count; ++n) {
        if (n) {
            read_tokens(1, drawn + (n - 1) * b_, nullptr);
            for (Segment segment; next(segment, 1);) step_tokens(segment.first, segment.size);
        }
        draw(sampler, -1, drawn + n * b_, logprobs ? logprobs + n * b_ : nullptr);
    }
}

}  // namespace txl_runtime
