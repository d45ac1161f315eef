// The states of B sequences and their counters: ring memory, rolled memory, and tensors that each step replaces.
//
// Rolled and replaced tensors have two sides: a step reads side s of a sequence and writes 1 - s. A ring has one side.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model.hpp"

namespace txl_runtime {

// The state of n sequences in the form of snapshots: memory is float32 [n, rows, ...] with zeros first, then the rows
// from the oldest on; other tensors have the table's shape with n sequences. Absent tensors are left out.
struct Carried {
    std::vector<std::int32_t> fill, head;
    std::map<std::string, Array> tensors;  // by the states' names
};

struct Held {
    const State *state;
    Layout layout;
    std::array<Array, 2> sides;   // of a ring only the first; memory for the largest shape, `shape` is the present one
    std::array<bool, 2> there{};  // per side; false: absent
};

class States {
public:
    States(const Model &model, std::int64_t most);

    void reset();                  // all B sequences
    void reset(std::int64_t row);  // one sequence of an independent model
    [[nodiscard]] Carried take(const std::vector<std::int32_t> &rows) const;
    void put(const std::vector<std::int32_t> &rows, const Carried &carried);  // the rows were reset before
    [[nodiscard]] Array table(std::size_t index, std::int64_t b) const;       // state of b sequences; M memory rows
    [[nodiscard]] bool there(std::size_t index) const { return held_[index].there[side(0)]; }

    // Before and after a step of the first `rows` sequences: join copies their states to one side, since a program
    // reads one side of all; advance counts the positions of `valid` and switches sides.
    void join(std::int64_t rows);
    void advance(std::int64_t rows);
    [[nodiscard]] int side(std::int64_t row) const { return sides_[static_cast<std::size_t>(row)]; }
    [[nodiscard]] std::vector<Held> &held() { return held_; }
    [[nodiscard]] Held *named(const std::string &name,
                              bool returned);  // by its input's or output's name; null if there is none
    [[nodiscard]] std::int32_t *valid() const { return valid_.as<std::int32_t>(); }
    [[nodiscard]] std::int32_t *fill() const { return fill_.as<std::int32_t>(); }
    [[nodiscard]] View counts(const std::string &role) const;  // int32 [B]; the role is "valid", "fill" or "head"

private:
    [[nodiscard]] View own(const Held &held, std::int64_t row) const;      // one sequence's part of its present side
    [[nodiscard]] View rows_of(const Held &held, std::int64_t row) const;  // its memory, [slots, ...]
    // Return contiguous slots of its memory, [count, ...].
    [[nodiscard]] View slots_of(const Held &held, std::int64_t row, std::int64_t first, std::int64_t count) const;
    // Call move(place, rows before it, length) for each contiguous run of filled memory rows, the oldest first. A ring
    // has two runs: with 8 slots, head 2 and 5 rows they are (5, 0, 3) and (0, 3, 2). The compiled step's end at strips.
    template <typename Move>
    void pieces(std::int64_t row, Move move) const;
    template <typename Move>
    void run(std::int64_t first, std::int64_t before, std::int64_t count, Move move) const;
    [[nodiscard]] Array gathered(const Held &held, const std::vector<std::int32_t> &rows) const;  // not memory
    void start(Held &held, std::int64_t row);
    const Model &model_;
    std::int64_t B_, M_, R_, most_;
    bool counted_, ring_;
    Array valid_, fill_, head_;
    std::vector<int> sides_;
    std::vector<Held> held_;
};

}  // namespace txl_runtime
