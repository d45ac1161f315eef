// The states of B sequences and how far each has come: where rows of a ring, rolled rows and replaced tensors stand.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model.hpp"

namespace txl_runtime {

// The state of some sequences apart from any graph, as snapshots have it: memory rows are float32 [n, rows, ...], and
// the oldest row stands first behind zeros; other tensors are as the table says, with n sequences. An absent one is
// left out.
struct Carried {
    std::vector<std::int32_t> fill, head;
    std::map<std::string, Array> tensors;  // by the states' names
};

struct Held {
    const State *state;
    std::array<Array, 2> sides;   // a ring has the first alone; room for the largest shape, `shape` is the present one
    std::array<bool, 2> there{};  // false: absent
};

class States {
public:
    States(const Model &model, std::int64_t most);

    void reset();                  // all B
    void reset(std::int64_t row);  // of an independent model
    [[nodiscard]] Carried take(const std::vector<std::int32_t> &rows) const;
    void put(const std::vector<std::int32_t> &rows, const Carried &carried);  // they were reset
    [[nodiscard]] Array table(std::size_t index, std::int64_t b) const;       // of b sequences; memory with M rows
    [[nodiscard]] bool there(std::size_t index) const { return held_[index].there[side(0)]; }

    // A step of the first `rows` sequences: brings them to one side, and lets it be done.
    void join(std::int64_t rows);
    void advance(std::int64_t rows);
    [[nodiscard]] int side(std::int64_t row) const { return sides_[static_cast<std::size_t>(row)]; }
    [[nodiscard]] std::vector<Held> &held() { return held_; }
    [[nodiscard]] Held *named(const std::string &name,
                              bool returned);  // by its input's name, or its output's; null without
    [[nodiscard]] std::int32_t *valid() const { return valid_.as<std::int32_t>(); }
    [[nodiscard]] std::int32_t *fill() const { return fill_.as<std::int32_t>(); }
    [[nodiscard]] View counts(const std::string &role) const;  // int32 [B] of valid, fill or head

private:
    [[nodiscard]] View own(const Held &held, std::int64_t row) const;      // one sequence's part, where it is now
    [[nodiscard]] View rows_of(const Held &held, std::int64_t row) const;  // its memory, [slots, ...]
    // Calls with each run of its memory rows, the oldest first: where it stands, how many are before it, and its
    // length.
    template <typename Move>
    void pieces(std::int64_t row, Move move) const;
    [[nodiscard]] Array gathered(const Held &held, const std::vector<std::int32_t> &rows) const;  // a replaced one
    void start(Held &held, std::int64_t row);
    const Model &model_;
    std::int64_t B_, M_, R_, most_;
    bool counted_, ring_;
    Array valid_, fill_, head_;
    std::vector<int> sides_;
    std::vector<Held> held_;
};

}  // namespace txl_runtime
