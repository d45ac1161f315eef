#include "sampling.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "error.hpp"

namespace txl_runtime {

namespace {

constexpr std::int64_t CHUNK = 1 << 22;  // most log-probabilities computed at once: 16 MiB of float32
constexpr float MOST_BIAS = 100;         // as OpenAI has it

}  // namespace

Pcg64::Pcg64(const std::vector<std::uint32_t> &seed, std::uint32_t row) {
    auto words = seed;
    while (words.size() > 1 && words.back() == 0) words.pop_back();
    while (words.size() < 4) words.push_back(0);
    words.push_back(row);
    std::uint32_t a = 0x43b0d7e5;
    const auto hash = [&](std::uint32_t v) {
        v ^= a, a *= 0x931e8875U, v *= a;
        return v ^ (v >> 16);
    };
    const auto mix = [](std::uint32_t x, std::uint32_t y) {
        const std::uint32_t r = x * 0xca01f9ddU - y * 0x4973f715U;
        return r ^ (r >> 16);
    };
    std::array<std::uint32_t, 4> pool{};
    for (std::size_t i = 0; i < 4; ++i) pool[i] = hash(words[i]);
    for (std::size_t s = 0; s < 4; ++s)
        for (std::size_t d = 0; d < 4; ++d)
            if (s != d) pool[d] = mix(pool[d], hash(pool[s]));
    for (std::size_t w = 4; w < words.size(); ++w)
        for (auto &one : pool) one = mix(one, hash(words[w]));
    std::uint32_t c = 0x8b51f9dd;
    std::array<std::uint64_t, 4> q{};
    for (std::size_t i = 0; i < 8; ++i) {
        std::uint32_t v = pool[i % 4] ^ c;
        c *= 0x58f38dedU, v *= c, v ^= v >> 16;
        q[i / 2] |= std::uint64_t(v) << (i % 2 ? 32 : 0);
    }
    inc_ = {q[2] << 1 | q[3] >> 63, q[3] << 1 | 1};
    state_ = sum(inc_, {q[0], q[1]});
    step();
}

Pcg64::Wide Pcg64::sum(Wide a, Wide b) {
    const auto low = a.low + b.low;
    return {a.high + b.high + std::uint64_t(low < a.low), low};
}

Pcg64::Wide Pcg64::product(Wide a, Wide b) {
    constexpr std::uint64_t HALF = 0xffffffff;
    const auto a0 = a.low & HALF, a1 = a.low >> 32, b0 = b.low & HALF, b1 = b.low >> 32;
    const auto middle = a1 * b0 + (a0 * b0 >> 32);
    const auto other = a0 * b1 + (middle & HALF);
    return {a.high * b.low + a.low * b.high + a1 * b1 + (middle >> 32) + (other >> 32), a.low * b.low};
}

void Pcg64::step() { state_ = sum(product(state_, {0x2360ed051fc65da4ULL, 0x4385df649fccf645ULL}), inc_); }

double Pcg64::random() {
    step();
    const auto x = state_.high ^ state_.low, r = state_.high >> 58;
    const auto turned = x >> r | x << ((64 - r) & 63U);
    return double(turned >> 11) * 0x1p-53;
}

Sampler::Sampler(const txl_sampling &sampling, std::int32_t b, Clock clock)
    : temperature_(sampling.temperature),
      top_p_(sampling.top_p),
      top_k_(sampling.top_k),
      adjust_(sampling.adjust),
      adjust_data_(sampling.adjust_data) {
    need(b >= 1, TXL_USAGE, "a sampler is for ", b, " sequences, expected at least 1; give the stream's");
    need(std::isfinite(temperature_) && temperature_ >= 0, TXL_USAGE, "temperature is ", temperature_,
         ", expected a number of at least 0; 0 is greedy");
    need(top_k_ >= 0, TXL_USAGE, "top_k is ", top_k_, ", expected at least 1, or 0 to keep every token");
    need(top_p_ >= 0 && top_p_ <= 1, TXL_USAGE, "top_p is ", top_p_,
         ", expected more than 0 and at most 1, or 0 to keep every token");
    std::vector<std::uint32_t> seed = {std::uint32_t(sampling.seed), std::uint32_t(sampling.seed >> 32)};
    if (sampling.seed_words) seed.assign(sampling.seed_words, sampling.seed_words + sampling.seed_count);
    for (std::int32_t row = 0; row < b; ++row) numbers_.emplace_back(seed, std::uint32_t(row));
    last_.assign(std::size_t(b), -1);
    need(sampling.logit_bias || !sampling.logit_bias_count, TXL_USAGE, "logit_bias is NULL, expected ",
         sampling.logit_bias_count, "; give it");
    need(sampling.forbid || !sampling.forbid_count, TXL_USAGE, "forbid is NULL, expected ", sampling.forbid_count,
         " ids; give them");
    bias_.assign(sampling.logit_bias, sampling.logit_bias + sampling.logit_bias_count);
    forbid_.assign(sampling.forbid, sampling.forbid + sampling.forbid_count);
    need(sampling.lookup >= 0 && sampling.lookup <= TXL_DRAFT, TXL_USAGE, "lookup is ", sampling.lookup,
         ", expected a whole number of 0 ... ", TXL_DRAFT, "; 0 is off");
    if (sampling.lookup) lookup_.emplace(sampling.lookup, std::size_t(b), std::move(clock));
    for (const auto &[token, bias] : bias_)
        need(bias >= -MOST_BIAS && bias <= MOST_BIAS, TXL_USAGE, "logit_bias is ", bias, " for token ", token,
             ", expected a number, -100 ... 100");
}

void Sampler::check(std::int64_t words) const {
    const auto known = [&](const char *what, std::int32_t token) {
        need(token >= 0 && token < words, TXL_USAGE, what, " has token ", token, ", expected 0 ... ", words - 1,
             "; look where it comes from");
    };
    for (const auto &one : bias_) known("logit_bias", one.token);
    for (const auto token : forbid_) known("forbid", token);
}

std::int32_t Sampler::draw(std::size_t row, const float *logprobs, std::int64_t words) {
    const auto *end = logprobs + words;
    need(std::none_of(logprobs, end, [](float one) { return std::isnan(one); }), TXL_BACKEND, "sequence ", row,
         " produced NaN, expected log-probabilities; reset the stream");
    if (!adjust_ && bias_.empty() && forbid_.empty()) return pick(row, logprobs, words);
    row_.assign(logprobs, end);
    adjust(row);
    return last_[row] = pick(row, row_.data(), words);
}

void Sampler::adjust(std::size_t row) {
    const auto said =
        adjust_ ? adjust_(adjust_data_, std::int32_t(row), last_[row], row_.data(), std::int32_t(row_.size())) : 0;
    need(said == 0, TXL_USAGE, "adjust returned ", said, " for sequence ", row, ", expected 0; mend it");
    for (const auto &[token, bias] : bias_) row_[std::size_t(token)] += double(bias);
    for (const auto token : forbid_) row_[std::size_t(token)] = -INFINITY;
    bool any = false;
    for (std::size_t token = 0; token < row_.size(); ++token) {
        need(row_[token] < INFINITY, TXL_USAGE, "adjust left ", row_[token], " for token ", token,
             ", expected a number, or -inf for a token that is never drawn");
        any = any || row_[token] > -INFINITY;
    }
    need(any, TXL_USAGE, "no token may be drawn for sequence ", row,
         ": all log-probabilities are -inf, expected at least one that is not; let adjust and forbid leave one");
}

template <typename Number>
std::int32_t Sampler::pick(std::size_t row, const Number *logprobs, std::int64_t words) {
    const auto *end = logprobs + words;
    const auto *best = std::max_element(logprobs, end);  // the first of equal ones
    if (temperature_ == 0) return std::int32_t(best - logprobs);
    const auto uniform = numbers_[row].random(), highest = double(*best);
    ids_.resize(std::size_t(words));
    std::iota(ids_.begin(), ids_.end(), 0);
    if (top_k_ || top_p_ > 0) {
        const auto before = [&](std::int32_t x, std::int32_t y) {
            return logprobs[x] > logprobs[y] || (logprobs[x] == logprobs[y] && x < y);
        };
        const auto count = top_k_ ? std::min(top_k_, words) : words;
        std::partial_sort(ids_.begin(), ids_.begin() + count, ids_.end(), before);
        ids_.resize(std::size_t(count));
    }
    // Cumulative sums of the weights, in the order of ids_.
    weights_.resize(ids_.size());
    double sum = 0;
    for (std::size_t i = 0; i < ids_.size(); ++i) {
        const auto apart = double(logprobs[ids_[i]]) - highest;
        weights_[i] = sum += apart == 0 ? 1 : std::exp(apart / temperature_);
    }
    std::size_t count = ids_.size();
    if (top_p_ > 0) {
        const auto asked = top_p_ * sum;
        for (count = 1; count < ids_.size() && weights_[count - 1] < asked;) ++count;
    }
    const auto last = weights_.begin() + std::ptrdiff_t(count);
    const auto at = std::upper_bound(weights_.begin(), last, uniform * weights_[count - 1]) - weights_.begin();
    return ids_[std::min<std::size_t>(std::size_t(at), count - 1)];
}

Softmax::Softmax(const Model &model)
    : model_(model),
      width_(model.softmax.empty() ? model.manifest.logprobs()->axes.shape.back() : model.manifest.logprobs()->width),
      words_(model.manifest.logprobs()->axes.shape.back()),
      chunk_(std::max<std::int64_t>(1, CHUNK / words_)),
      results_(model.softmax.size()),
      input_names_(1),
      output_names_(1),
      inputs_(1),
      outputs_(1) {}

void Softmax::part(std::size_t cluster, const float *rows, std::int64_t n) {
    const auto &program = *model_.softmax[cluster];
    const auto columns = program.outputs[0].shape[1];
    auto &result = results_[cluster];
    if (result.shape.rank() == 0 || result.shape[0] < n) result = Array(TXL_FLOAT32, {n, columns});
    if (model_.native) return model_.native->softmax(cluster, n, rows, result.as<float>());
    const Value input(model_.engine(), View(rows, TXL_FLOAT32, {n, width_}));
    const Value output(model_.engine(), View(result.view().data, TXL_FLOAT32, {n, columns}));
    input_names_[0] = program.inputs[0].name.c_str(), output_names_[0] = program.outputs[0].name.c_str();
    inputs_[0] = input.get(), outputs_[0] = output.get();
    model_.session(program).run(input_names_, inputs_, output_names_, outputs_, program.name);
}

void Softmax::logprobs(const float *rows, std::int64_t n, float *into, std::int64_t stride) {
    const auto bytes = [](std::int64_t numbers) { return numbers * sizeof(float); };
    if (model_.softmax.empty()) {
        for (std::int64_t i = 0; i < n; ++i) std::memcpy(into + i * stride, rows + i * words_, bytes(words_));
        return;
    }
    const auto &output = *model_.manifest.logprobs();
    for (std::int64_t begin = 0; begin < n; begin += chunk_) {
        const auto some = std::min(chunk_, n - begin);
        for (std::size_t c = 0; c < model_.softmax.size(); ++c) {
            part(c, rows + begin * width_, some);
            const auto [first, last] = output.clusters[c];
            const auto columns = model_.softmax[c]->outputs[0].shape[1], head = model_.softmax[0]->outputs[0].shape[1];
            for (std::int64_t i = 0; i < some; ++i) {
                const auto *from = results_[c].as<float>() + i * columns;
                auto *to = into + (begin + i) * stride + first;
                std::memcpy(to, from, bytes(last - first));
                if (!c) continue;
                const float cluster = results_[0].as<float>()[i * head + output.columns[c - 1]];
                for (std::int64_t word = 0; word < last - first; ++word) to[word] += cluster;
            }
        }
    }
}

}  // namespace txl_runtime
