#include "lookup.hpp"

#include <algorithm>
#include <chrono>

#include "error.hpp"
#include "ranges.hpp"

namespace txl_runtime {
namespace {

constexpr std::int64_t SHORT = 8;      // longest L of a program that drafts run in: in longer ones padding costs more
constexpr std::size_t KEPT = 1 << 16;  // least number of latest tokens that are searched once there are more
constexpr double SHARE = 0.01;         // largest share of the time that drafts may lose
constexpr std::int64_t FIRST = 2;      // steps, and drafts, whose time does not count, since engines prepare then
constexpr std::int64_t WARM = 6;       // steps before the first draft, of which the shortest counts
constexpr double MEAN_OF = 32;         // times of a mean later

// Return true if a program is meant for segments of `size`: of exactly as many, or of few more that are padded.
bool holds(std::int64_t size, const Model &model) {
    if (model.manifest.exact) return ranges::count(model.lengths, size) > 0;
    return ranges::any_of(model.lengths, [&](auto length) { return length >= size && length <= SHORT; });
}

}  // namespace

std::int32_t longest_draft(std::int32_t lookup, const Model &model, const Parts &parts) {
    const auto &manifest = model.manifest;
    const auto stepwise = manifest.stepwise;
    std::int32_t draft = 0;
    while (draft < std::min<std::int64_t>(lookup, stepwise - 1) && holds(draft + 2, model)) ++draft;
    auto refusal = manifest.exact ? std::string() : parts.refusal;  // of exact lengths `holds` knows the parts
    if (draft && refusal.empty()) return draft;
    if (!stepwise)
        refusal = "the bundle does not say that a segment is as many steps; export the model again, with --lookup if it has that";
    else if (stepwise < 2)
        refusal = "a position of a segment sees more than that of a step; export with --lookup if the model has that";
    else if (refusal.empty())
        refusal = join("segments are of ", listed(Sizes(model.lengths.rbegin(), model.lengths.rend())),
                       " positions; export with ",
                       manifest.exact ? "segments of exactly 1, 2, 3, 4 and 5" : "--segment-length 5 besides");
    refuse(TXL_USAGE, "lookup is ", lookup, ", expected 0, because ", refusal);
}

std::uint64_t Repeats::latest() const {
    std::uint64_t hash = 0;
    for (auto token = read_.end() - std::ptrdiff_t(MATCH); token != read_.end(); ++token) {
        hash = (hash ^ std::uint32_t(*token)) * 0x9e3779b97f4a7c15ULL;
        hash ^= hash >> 32;
    }
    return hash;
}

void Repeats::add(std::int32_t token) {
    if (read_.size() == 2 * KEPT) {
        const std::vector<std::int32_t> kept(read_.end() - KEPT, read_.end());
        read_.clear(), after_.clear();
        for (auto one : kept) add(one);
    }
    if (read_.size() >= MATCH) after_[latest()] = read_.size();
    read_.push_back(token);
}

bool Repeats::find(std::int64_t most, std::int32_t *into) const {
    if (read_.size() <= MATCH) return false;
    const auto found = after_.find(latest());
    if (found == after_.end()) return false;
    const auto there = read_.size() - found->second;
    for (std::size_t i = 0; i < std::size_t(most); ++i) into[i] = read_[found->second + i % there];
    return true;
}

bool Pace::allows() const { return counts_[0] > WARM && loss_ <= SHARE * spent_; }

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void Pace::count(bool draft, double steps) {
    auto took = clock_() - since_;
    const bool judged = draft || follows_;
    follows_ = draft;
    if (++counts_[draft] <= FIRST) return;
    auto &usual = usual_[draft];
    auto now = counts_[draft] <= WARM ? std::min(usual, took) : usual;
    took = std::min(took, 2 * now);  // else one wait for a processor counts as 100 steps
    spent_ += took;
    // A step after a draft, too: it reads weights that have left the caches.
    if (judged) loss_ = std::max(0.0, loss_ + took - steps * usual_[false]);
    if (draft || !judged) usual = now + (took - now) / MEAN_OF;
}

Lookup::Lookup(std::int32_t most, std::size_t b, Clock clock)
    : most_(most), pace_(std::move(clock)), read_(b), latest_(b), ids_(b * (TXL_DRAFT + 1)) {}

const std::int32_t *Lookup::draft(std::int64_t size) {
    const auto width = std::size_t(size) + 1;
    drafted_ = size && pace_.allows();
    for (std::size_t row = 0; drafted_ && row < read_.size(); ++row) {
        drafted_ = read_[row].find(size, &ids_[row * width + 1]);
        ids_[row * width] = latest_[row];
    }
    return drafted_ ? ids_.data() : nullptr;
}

void Lookup::count(std::int64_t tokens) { pace_.count(drafted_, double(tokens)); }

}  // namespace txl_runtime
