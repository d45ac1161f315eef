// Drafts of next tokens, looked up in what sequences have read, as txl_runtime/streaming/lookup.py does it.
//
// After "for i in range(" a draft is what stood there the last time. It runs with the latest token as one segment that
// is not committed; what is drawn at its positions says how much of it is.
#pragma once
#include <cmath>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include "partial.hpp"

namespace txl_runtime {

constexpr std::size_t MATCH = 3;  // number of latest tokens that are looked up

// Return the most tokens of a draft: 4 for `lookup` 4 and segments of 5. Throw TXL_USAGE if the model's segments are
// not as many steps, or it cannot keep a part of one.
std::int32_t longest_draft(std::int32_t lookup, const Model &model, const Parts &parts);

// The tokens of one sequence, and where the latest ones stood before.
class Repeats {
public:
    void add(std::int32_t token);
    // Write what followed the latest tokens where they stood before, `most` of them; return false if nowhere. For
    // [7, 8, 9, 7, 7, 8, 9] that is [7, 7, 8, 9]: beyond its end the text is taken to go on likewise.
    bool find(std::int64_t most, std::int32_t *into) const;

private:
    [[nodiscard]] std::uint64_t latest() const;
    std::vector<std::int32_t> read_;
    std::unordered_map<std::uint64_t, std::size_t> after_;  // by a hash of n tokens: index of the token after them
};

using Clock = std::function<double()>;  // seconds
double seconds();                       // of this machine's clock, since some start

// The times of steps and of drafts. The loss is the time of drafts less that of the steps which they saved, and at least
// 0. A draft is allowed while that is within 1 % of all the time so far.
class Pace {
public:
    explicit Pace(Clock clock) : clock_(std::move(clock)) {}
    [[nodiscard]] bool allows() const;
    void start() { since_ = clock_(); }
    // Count the time since `start` as that of a step, or of a draft that saved this number of steps.
    void count(bool draft, double steps);

private:
    Clock clock_;
    double since_ = 0, spent_ = 0, loss_ = 0;
    std::int64_t counts_[2] = {};  // of steps, of drafts
    double usual_[2] = {HUGE_VAL, HUGE_VAL};
    bool follows_ = false;  // whether the latest run was a draft
};

// The drafts of b sequences, which draw in step.
class Lookup {
public:
    Lookup(std::int32_t most, std::size_t b, Clock clock);
    [[nodiscard]] std::int32_t most() const { return most_; }
    void start() { pace_.start(); }
    void read(std::size_t row, std::int32_t token) { read_[row].add(token), latest_[row] = token; }
    // Look up drafts of `size` tokens. Return each sequence's latest token and its draft, flat [b, 1 + size]; null if
    // not every sequence has one, or they do not pay, or `size` is 0.
    const std::int32_t *draft(std::int64_t size);
    // Count the time since `start`, in which each sequence was given `tokens` tokens by the latest draft, or by a step.
    void count(std::int64_t tokens);

private:
    std::int32_t most_;
    Pace pace_;
    std::vector<Repeats> read_;
    std::vector<std::int32_t> latest_, ids_;
    bool drafted_ = false;  // whether the latest run is a draft
};

}  // namespace txl_runtime
