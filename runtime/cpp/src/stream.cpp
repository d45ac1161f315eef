#include "stream.hpp"

#include <algorithm>
#include <utility>

#include "error.hpp"
#include "ranges.hpp"

namespace txl_runtime {
namespace {

// Return a view [b, T, ...], e.g. of [T, b, V]. A tensor without axis of positions has T 1: [b, V] becomes [b, 1, V].
View rows_first(const View &view, const Axes &axes) {
    auto found = view.moved(axes.batch, 0);
    if (axes.positions.empty()) {
        found.shape.insert(1, 1), found.strides.insert(1, 0);
        return found;
    }
    return found.moved(axes.positions[0] + (axes.positions[0] < axes.batch), 1);
}

// Return `count` positions from `first` on, along each axis of positions.
View positions(View view, const Axes &axes, std::int64_t first, std::int64_t count) {
    for (auto axis : axes.positions) view = view.narrow(axis, first, count);
    return view;
}

View sequence(const View &view, const Axes &axes, std::int64_t row) {
    return axes.batch < 0 ? view : view.narrow(axes.batch, row, 1);
}

bool inside(const View &view, std::int64_t vocab) {
    if (view.shape.rank() == 0) {
        const auto id = number_at(view.data, TXL_INT32);
        return id >= 0 && id < vocab;
    }
    for (std::int64_t i = 0; i < view.shape[0]; ++i)
        if (!inside(view.at(0, i), vocab)) return false;
    return true;
}

}  // namespace

Stream::Stream(std::shared_ptr<const Model> model, std::int64_t b, std::int64_t memory_length)
    : model_(std::move(model)), parts_(*model_) {
    const auto &manifest = model_->manifest;
    const auto M = manifest.memory_length();
    check_batch(b);
    need(memory_length == -1 || manifest.counts_rows(), TXL_USAGE, "memory_length is ", memory_length,
         ", but this model counts no memory rows; give -1");
    need(memory_length >= -1 && memory_length <= M, TXL_USAGE, "memory_length is ", memory_length, ", expected 0 ... ",
         M, ", or -1 for all; export with --memory-length for more");
    states_ = std::make_unique<States>(*model_, memory_length < 0 ? M : memory_length);
    runner_ = std::make_unique<Runner>(*model_, *states_);
    inputs_.resize(model_->given.size());
    outputs_.resize(manifest.outputs.size());
    if (const auto *output = manifest.logprobs()) {
        softmax_ = std::make_unique<Softmax>(*model_);
        logprobs_ = output - manifest.outputs.data();
        if (output->axes.batch >= 0) last_ = Array(TXL_FLOAT32, {manifest.B, softmax_->width()});
        row_ = Array(TXL_FLOAT32, {softmax_->words()});
    }
    set_batch(b);
}

void Stream::check_batch(std::int64_t b) const {
    const auto B = model_->manifest.B;
    need(b >= 1 && b <= B, TXL_USAGE, "a stream of ", b, " sequences was asked for, expected 1 ... ", B,
         "; export with --batch-size for more");
    need(!model_->manifest.joint || b == B, TXL_USAGE, "a stream of ", b,
         " sequences was asked for, but this model's sequences influence one another, expected ", B, "; open all");
}

void Stream::set_batch(std::int64_t b) {
    b_ = b;
    counts_.assign(b, 0), inside_ = counts_;
    fed_.assign(b, false);
}

void Stream::prepare() {
    tried_ = 0;
    states_->reset();
    for (auto &bound : runner_->all()) {
        if (model_->growing) break;  // the state chooses the program of each step, so none can be bound before
        const auto rows = model_->leading ? b_ : model_->manifest.B;
        for (auto some = model_->leading ? 1 : rows; some <= rows && !model_->native; ++some)
            for (int side = 0; side < 2; ++side) runner_->bind(bound, some, side);
        for (int twice = 0; twice < 2; ++twice) {
            std::fill_n(states_->valid(), model_->manifest.B, 0);
            runner_->run(bound, rows);
            states_->advance(rows);
        }
    }
    if (!model_->softmax.empty()) {
        const auto rows = std::min(softmax_->chunk(), model_->lengths[0]);
        const Array some(TXL_FLOAT32, {rows, softmax_->width()});
        Array all(TXL_FLOAT32, {rows, softmax_->words()});
        softmax_->logprobs(some.as<float>(), rows, all.as<float>(), softmax_->words());
    }
    states_->reset();
    ranges::fill(fed_, false);
    if (last_.shape.rank()) zero(last_.view());
}

// Keep views of the caller's arrays; throw TXL_USAGE before anything runs if an array, T, count or id does not fit.
void Stream::read(std::int64_t length, const void *const *inputs, const std::int32_t *counts) {
    read_counts(length, counts);
    bool timed = false;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
        const auto &entry = *model_->given[i];
        need(inputs && inputs[i], TXL_USAGE, "input ", i, " (", entry.name,
             ") is NULL, expected an array; give all inputs");
        inputs_[i] = View(inputs[i], entry.dtype, entry.axes.sizes(b_, length));
        timed = timed || !entry.axes.positions.empty();
    }
    need(timed || length == 1, TXL_USAGE, "T is ", length,
         ", but no input has positions, expected 1; run steps one by one");
    check_ids();
}

void Stream::read_counts(std::int64_t length, const std::int32_t *counts) {
    need(length >= 1, TXL_USAGE, "T is ", length, ", expected at least 1; give positions");
    given_length_ = length;
    for (std::size_t row = 0; row < counts_.size(); ++row) {
        counts_[row] = counts ? counts[row] : std::int32_t(length);
        need(counts_[row] >= 0 && counts_[row] <= length, TXL_USAGE, "the count of sequence ", row, " is ",
             counts_[row], ", expected 0 ... ", length, "; 0 leaves a sequence idle");
    }
}

void Stream::read_tokens(std::int64_t length, const std::int32_t *tokens, const std::int32_t *counts) {
    need(tokens != nullptr, TXL_USAGE, "tokens are NULL, expected an array; give token ids");
    read_counts(length, counts);
    ids_ = View(tokens, TXL_INT32, {b_, length});
    const auto vocab = model_->manifest.vocab_size();
    for (std::int64_t row = 0; row < b_; ++row)
        need(inside(ids_.at(0, row).narrow(0, 0, counts_[row]), vocab), TXL_USAGE, "tokens hold an id outside 0 ... ",
             vocab - 1, " in sequence ", row, "; check the vocabulary that they come from");
}

// Step over ids_ [b, T] in the table's order of axes: [T, b], [b, T], or [b] for one position.
bool Stream::step_tokens(std::int64_t first, std::int64_t length, bool commit) {
    const auto &axes = model_->given[0]->axes;
    inputs_[0] = axes.positions.empty() ? ids_.at(1, first) : axes.batch == 1 ? ids_.moved(0, 1) : ids_;
    return step(first, length, commit);
}

void Stream::check_ids() const {
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
        const auto &entry = *model_->given[i];
        if (!entry.vocab) continue;
        for (std::int64_t row = 0; row < (entry.axes.batch < 0 ? 1 : b_); ++row) {
            const std::int64_t count = entry.axes.batch < 0 ? given_length_ : counts_[row];
            if (!count) continue;
            const auto counted =
                positions(sequence(inputs_[i], entry.axes, row), entry.axes, 0, count + entry.axes.ahead);
            need(inside(counted, entry.vocab), TXL_USAGE, entry.name, " holds an id outside 0 ... ", entry.vocab - 1,
                 " in sequence ", row, "; check the vocabulary that the ids come from");
        }
    }
}

void Stream::check_segment(std::int64_t length, const std::vector<std::int32_t> &counts) const {
    const auto &known = model_->lengths;
    const auto running = std::count_if(counts.begin(), counts.end(), [](auto count) { return count > 0; });
    if (model_->manifest.exact) {
        need(ranges::find(known, length) != known.end(), TXL_USAGE, "a segment has ", length,
             " positions, expected one of ", Listed{known},
             ", because this model takes whole segments alone; feed several, or export another --segment-length");
        need(ranges::all_of(counts, [&](auto count) { return count == 0 || count == length; }), TXL_USAGE,
             "counts are ", Listed{counts}, ", expected 0 or ", length,
             " each, because this model takes whole segments alone");
    } else {
        need(length <= known[0], TXL_USAGE, "a segment has ", length, " positions, expected at most ", known[0],
             "; feed more");
    }
    need(!model_->manifest.lockstep || running == 0 || running == b_, TXL_USAGE, "counts are ", Listed{counts},
         ", expected all sequences to run or none, because this model's run in lockstep; give all the same count");
}

// Move to the next segment and set inside_; return false at the end. T 10 is cut into 4, 4, 2 for lengths 4 and 1, or,
// if segments have exact lengths, into 4, 4, 1, 1.
bool Stream::next(Segment &segment, std::int64_t length) {
    const auto &known = model_->lengths;
    segment.first += segment.size;
    const auto left = length - segment.first;
    if (left <= 0) return false;
    segment.size = std::min(left, known[0]);
    if (model_->manifest.exact) {
        const auto fits = ranges::find_if(known, [&](auto one) { return one <= left; });
        need(fits != known.end(), TXL_USAGE, "there are ", length, " positions (look-ahead aside), of which ", left,
             " remain after segments, expected what segments of ", Listed{known}, " add up to; give more or fewer");
        segment.size = *fits;
    }
    segment.any = false;
    for (std::size_t row = 0; row < counts_.size(); ++row) {
        inside_[row] = std::clamp<std::int64_t>(counts_[row] - segment.first, 0, segment.size);
        segment.any = segment.any || inside_[row];
    }
    return true;
}

// Check all segments of a feed before the first one runs.
void Stream::check_feed(std::int64_t length) {
    int segments = 0;
    for (Segment segment; next(segment, length); segments += segment.any) check_segment(segment.size, inside_);
    if (segments < 2) return;
    const auto cuttable = [](const auto &entry) {
        need(entry.axes.positions.size() < 2, TXL_USAGE, entry.name,
             " has several axes of positions, expected one to cut along; run its segments one by one");
    };
    for (const auto *entry : model_->given) cuttable(*entry);
    for (const auto &output : model_->manifest.outputs) cuttable(output);
}

void Stream::count_inside() {
    const auto most = ranges::max(inside_);
    for (std::int64_t row = 0; row < model_->manifest.B; ++row)
        states_->valid()[row] = row < b_ ? inside_[row] : model_->manifest.lockstep ? most : 0;
}

bool Stream::step(std::int64_t first, std::int64_t length, bool commit) {
    std::int64_t rows = b_;
    tried_ = 0;  // if the engine fails, there is nothing to commit
    while (rows && !inside_[rows - 1]) --rows;
    if (!rows) return false;
    if (!model_->leading) rows = model_->manifest.B;
    auto &bound = runner_->find(length);
    count_inside();
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
        const auto &axes = model_->given[i]->axes;
        const auto to = bound.inputs[i].view();
        zero(to);
        for (std::int64_t row = 0; row < (axes.batch < 0 ? 1 : b_); ++row) {
            const auto count = axes.batch < 0 ? length : inside_[row];
            if (count)
                copy(positions(sequence(to, axes, row), axes, 0, count + axes.ahead),
                     positions(sequence(inputs_[i], axes, row), axes, first, count + axes.ahead));
        }
    }
    if (model_->leading) states_->join(rows);
    runner_->run(bound, rows);
    ran_ = &bound;
    if (commit) {
        states_->advance(rows);
        keep_last();
    } else {
        tried_ = rows;
    }
    return true;
}

void Stream::commit(const std::int32_t *counts) {
    if (counts) read_counts(model_->lengths[0], counts);
    if (!tried_) return;
    const auto *ran = states_->valid();
    if (!counts) counts_.assign(ran, ran + b_);
    parts_.check(counts_, ran);
    const auto rows = std::exchange(tried_, 0);
    const bool all = std::equal(counts_.begin(), counts_.end(), ran);
    inside_ = counts_;
    if (!ranges::max(inside_)) return;
    if (all || !parts_.again) {
        count_inside();
        states_->advance(rows), keep_last();
        return;
    }
    std::vector<Array> kept;  // copies: the part may run in the same program, which clears its inputs first
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
        const auto from = ran_->inputs[i].view();
        copy(kept.emplace_back(from.dtype, from.shape).view(), from);
        inputs_[i] = kept.back().view();
    }
    step(0, ranges::max(inside_), true);
}

// Return a position's input of the softmax [F], or its log-probabilities [V], in the segment that ran last.
View Stream::before_softmax(std::int64_t row, std::int64_t position) const {
    const auto &axes = model_->manifest.logprobs()->axes;
    const bool parts = ran_->program->kind == "hidden";
    const auto all = ran_->outputs[parts ? 0 : logprobs_].view();
    return (parts ? all : rows_first(all, axes)).at(0, row).at(0, axes.positions.empty() ? 0 : position);
}

// Copy what a draw needs of the last position: the draw may come when the program's arrays hold a different segment.
void Stream::keep_last() {
    if (last_.shape.rank() == 0) return;
    for (std::int64_t row = 0; row < b_; ++row) {
        if (!inside_[row]) continue;
        const auto last = before_softmax(row, inside_[row] - 1);
        if (last.shape.rank() == 1) copy(last_.view().at(0, row), last);
        fed_[row] = true;
    }
}

void Stream::clear_outputs(std::int64_t length, void *const *outputs, bool last) {
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
        outputs_[i].data = nullptr;
        if (!outputs || !outputs[i]) continue;
        const auto &output = model_->manifest.outputs[i];
        outputs_[i] = View(outputs[i], output.dtype, (last ? output.still : output.axes).sizes(b_, length));
        zero(outputs_[i]);
    }
}

// Copy the counted positions of the segment that ran to the caller's outputs, which were zeroed before.
void Stream::give(void *const *outputs, std::int64_t first, std::int64_t length, bool last) {
    const auto most = ranges::max(inside_);
    for (std::size_t i = 0; outputs && i < outputs_.size(); ++i) {
        if (!outputs_[i].data) continue;
        const auto &output = model_->manifest.outputs[i];
        const auto &axes = output.axes;
        const bool one = last && !axes.positions.empty();
        for (std::int64_t row = 0; row < (axes.batch < 0 ? 1 : b_); ++row) {
            const std::int64_t count = axes.batch < 0 ? length : inside_[row];
            if (!count) continue;
            const auto from = one ? (axes.batch < 0 ? most : count) - 1 : 0, some = one ? 1 : count;
            auto to = sequence(outputs_[i], one ? output.still : axes, row);
            if (!one) to = positions(to, axes, first, some);
            if (ran_->program->kind == "hidden") {
                const auto stride = one ? 0 : to.strides[axes.positions[0]] / std::int64_t(sizeof(float));
                softmax_->logprobs(reinterpret_cast<const float *>(before_softmax(row, from).data), some,
                                   reinterpret_cast<float *>(to.data), stride);
                continue;
            }
            auto found = positions(sequence(ran_->outputs[i].view(), axes, row), axes, from, some);
            for (auto axis = axes.positions.rbegin(); one && axis != axes.positions.rend(); ++axis)
                found = found.at(*axis, 0);
            copy(to, found);
        }
    }
}

void Stream::run(std::int64_t length, const void *const *inputs, const std::int32_t *counts, void *const *outputs,
                 bool commit) {
    read(length, inputs, counts);
    check_segment(length, counts_);
    inside_ = counts_;
    if (ranges::any_of(counts_, [](auto count) { return count > 0; })) runner_->find(length);
    clear_outputs(length, outputs, false);
    if (step(0, length, commit)) give(outputs, 0, length, false);
}

void Stream::feed(std::int64_t length, const void *const *inputs, const std::int32_t *counts, void *const *outputs,
                  bool last) {
    read(length, inputs, counts);
    check_feed(length);
    clear_outputs(length, outputs, last);
    for (Segment segment; next(segment, length);)
        if (step(segment.first, segment.size, true)) give(outputs, segment.first, segment.size, last);
}

void Stream::reset(const std::uint8_t *which) {
    tried_ = 0;  // an uncommitted segment began from a different state; so it is below
    const auto many = which ? std::count_if(which, which + b_, [](auto one) { return one != 0; }) : b_;
    need(many == 0 || many == b_ || !model_->manifest.lockstep, TXL_USAGE,
         "some sequences are to be reset, but this model's run in lockstep, expected all or none; reset all");
    for (std::int64_t row = 0; row < b_; ++row) fed_[row] = fed_[row] && which && !which[row];
    if (!which || (many == b_ && model_->manifest.lockstep)) return states_->reset();
    for (std::int64_t row = 0; row < b_; ++row)
        if (which[row]) states_->reset(row);
}

void Stream::select(const std::int32_t *rows, std::int64_t count) {
    need(rows && count >= 1, TXL_USAGE, "no sequences were selected, expected at least one; name some");
    check_batch(count);
    const std::vector<std::int32_t> from(rows, rows + count);
    for (auto row : from)
        need(row >= 0 && row < b_, TXL_USAGE, "sequence ", row, " was selected, expected 0 ... ", b_ - 1,
             "; name those that there are");
    const auto carried = states_->take(from);
    tried_ = 0;
    std::vector<char> fed;
    for (auto row : from) fed.push_back(fed_[row]);
    Array last = last_.shape.rank() ? Array(TXL_FLOAT32, last_.shape) : Array();
    for (std::size_t i = 0; last.shape.rank() && i < from.size(); ++i)
        copy(last.view().at(0, i), last_.view().at(0, from[i]));
    states_->reset();
    set_batch(count);
    states_->put(sequences(-1), carried);
    last_ = std::move(last), fed_ = std::move(fed);
}

void Stream::check_row(std::int32_t row) const {
    need(row >= -1 && row < b_, TXL_USAGE, "sequence ", row, " was named, expected 0 ... ", b_ - 1,
         "; name one that there is");
}

std::vector<std::int32_t> Stream::sequences(std::int32_t row) const {
    std::vector<std::int32_t> found;
    for (std::int32_t one = 0; one < b_; ++one)
        if (row < 0 || row == one) found.push_back(one);
    check_row(row);
    need(row < 0 || b_ == 1 || !model_->manifest.lockstep, TXL_USAGE, "one of ", b_,
         " sequences was named, but this model's run in lockstep, expected all of them; give -1");
    return found;
}

}  // namespace txl_runtime
