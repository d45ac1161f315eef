// A stream's calls for token ids: score them, draw the next ones, generate (§ 5, § 7).
#include <algorithm>

#include "error.hpp"
#include "ranges.hpp"
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

// Keep a view of prompts [b, T], each of at least one token.
void Stream::read_prompts(std::int64_t length, const std::int32_t *tokens, const std::int32_t *counts) {
    read_tokens(length, tokens, counts);
    for (std::size_t row = 0; row < counts_.size(); ++row)
        need(counts_[row] >= 1, TXL_USAGE, "sequence ", row,
             " has no prompt, expected at least one token to draw after; give one");
    check_feed(length);
}

void Stream::check_sampler(const Sampler &sampler, std::int64_t rows) const {
    need(sampler.batch() == std::size_t(rows), TXL_USAGE, "the sampler is for ", sampler.batch(),
         " sequences, expected ", rows, "; open another");
    sampler.check(softmax_->words());
}

void Stream::draw(Sampler &sampler, std::int32_t row, std::int32_t *tokens, float *logprobs) {
    refuse_text("a draw");
    check_row(row);
    const auto first = std::int64_t(std::max(row, 0)), count = row < 0 ? b_ : 1;
    need(tokens != nullptr, TXL_USAGE, "tokens are NULL, expected room for ", count, "; give an array");
    need(std::count(fed_.begin() + first, fed_.begin() + first + count, true), TXL_USAGE,
         "no sequence was fed since it was new, reset or restored, expected a prompt to draw after; feed one");
    check_sampler(sampler, count);
    for (std::int64_t i = 0; i < count; ++i) {
        tokens[i] = -1;
        if (logprobs) logprobs[i] = 0;
        if (!fed_[first + i]) continue;
        softmax_->logprobs(last_.as<float>() + (first + i) * softmax_->width(), 1, row_.as<float>(), softmax_->words());
        tokens[i] = sampler.draw(std::size_t(i), row_.as<float>(), softmax_->words());
        if (logprobs) logprobs[i] = row_.as<float>()[tokens[i]];
    }
}

void Stream::next(Sampler &sampler, const std::int32_t *tokens, std::int64_t length, const std::int32_t *counts,
                  std::int32_t most, std::int32_t *drawn, float *logprobs, std::int32_t &count) {
    count = 0;
    refuse_text("next");
    check_sampler(sampler, b_);
    need(most >= 1 && drawn, TXL_USAGE, "at most ", most,
         " tokens were asked for, expected at least 1 and room for them; give both");
    auto *lookup = sampler.lookup();
    const auto longest = lookup ? longest_draft(lookup->most(), *model_, parts_) : 0;
    read_prompts(length, tokens, counts);
    const std::int32_t *draft = nullptr;
    const auto size = std::min(longest, most - 1);
    if (lookup) {
        lookup->start();
        for (std::int64_t row = 0; row < b_; ++row)
            for (std::int32_t t = 0; t < counts_[row]; ++t) lookup->read(row, tokens[row * length + t]);
        draft = length == 1 ? lookup->draft(size) : nullptr;
    }
    if (!draft) {
        for (Segment segment; next(segment, length);) step_tokens(segment.first, segment.size);
        draw(sampler, -1, drawn, logprobs);
        count = 1;
        if (lookup && length == 1) lookup->count(1);
        return;
    }
    read_tokens(size + 1, draft, nullptr);
    inside_ = counts_;
    step_tokens(0, size + 1, false);
    const auto id = [&](std::int64_t row, std::int64_t position) { return draft[row * (size + 1) + position]; };
    const auto keep = [&](std::int32_t positions) {
        for (std::int64_t row = 0; row < b_; ++row)
            for (std::int32_t t = 1; t < positions; ++t) lookup->read(row, id(row, t));
        const std::vector<std::int32_t> kept(b_, positions);
        commit(kept.data());
    };
    try {
        for (bool came_true = true; came_true;) {
            ranges::fill(inside_, count + 1);
            keep_last();
            draw(sampler, -1, drawn + count * b_, logprobs ? logprobs + count * b_ : nullptr);
            ++count;
            came_true = count <= size;
            for (std::int64_t row = 0; came_true && row < b_; ++row)
                came_true = drawn[(count - 1) * b_ + row] == id(row, count);
        }
    } catch (...) {
        keep(count + 1);  // as if it had been steps: what was drawn before is fed
        throw;
    }
    keep(count);
    lookup->count(count);
}

void Stream::generate(const txl_sampling &sampling, const std::int32_t *tokens, std::int64_t length,
                      const std::int32_t *counts, std::int32_t count, std::int32_t *drawn, float *logprobs) {
    refuse_text("generate");
    Sampler sampler(sampling, std::int32_t(b_));
    check_sampler(sampler, b_);
    need(count >= 0 && (drawn || !count), TXL_USAGE, count,
         " tokens were asked for, expected at least 0, and room for them");
    read_prompts(length, tokens, counts);
    if (!count)
        for (Segment segment; next(segment, length);) step_tokens(segment.first, segment.size);
    for (std::int32_t n = 0, some = 0; n < count; n += some) {
        const auto *latest = drawn + (n - 1) * b_;
        next(sampler, n ? latest : tokens, n ? 1 : length, n ? nullptr : counts, count - n, drawn + n * b_,
             logprobs ? logprobs + n * b_ : nullptr, some);
    }
}

}  // namespace txl_runtime
