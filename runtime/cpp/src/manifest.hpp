// The manifest: tables of the tensors that graphs read, return and carry. "§" are sections of docs/bundle-format.md.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "array.hpp"
#include "json.hpp"
#include "ranges.hpp"

namespace txl_runtime {

enum class Rule { ring, rolled, replace, none };  // the preferred one first
const char *name_of(Rule rule);

// Compare rows of a table field by field.
template <typename Row>
auto operator==(const Row &one, const Row &other) -> decltype(one.fields() == other.fields()) {
    return one.fields() == other.fields();
}

template <typename Row>
auto operator!=(const Row &one, const Row &other) -> decltype(one.fields() == other.fields()) {
    return !(one == other);
}

template <typename Row>
auto operator<(const Row &one, const Row &other) -> decltype(one.fields() < other.fields()) {
    return one.fields() < other.fields();
}

// The shape of a tensor, with the places of its axes of sequences and positions: [B, L, 3] has batch 0, positions {1}.
struct Axes {
    Sizes shape;
    std::int64_t ahead = 0;      // positions that it has beyond a segment's length
    int batch = -1;              // the axis of sequences; -1: none
    std::vector<int> positions;  // the axes of positions
    Axes() = default;
    explicit Axes(const Sizes &shape, std::int64_t ahead = 0);
    [[nodiscard]] auto fields() const { return std::tie(shape, ahead, batch, positions); }
    [[nodiscard]] Shape sizes(std::int64_t b, std::int64_t length) const;
    [[nodiscard]] Axes still() const;  // without axes of positions: [B, L, 3] becomes [B, 3]
};

struct Counting {
    std::int64_t start = 0, most = 0;
    std::string over = "stay";
    [[nodiscard]] auto fields() const { return std::tie(start, most, over); }
};

struct Input {
    std::string name, role, beyond;  // beyond: "" if the table does not say
    txl_dtype dtype{};
    Axes axes;
    std::int64_t vocab = 0;  // 0: none
    std::optional<Counting> counter;
    [[nodiscard]] auto fields() const { return std::tie(name, role, beyond, dtype, axes, vocab, counter); }
};

struct Output {
    std::string name, role;
    txl_dtype dtype{};
    Axes axes, still;  // still: axes.still()
    std::vector<std::pair<std::int64_t, std::int64_t>> clusters;
    Sizes columns;
    std::int64_t width = 0;  // 0: none
    [[nodiscard]] auto fields() const { return std::tie(name, role, dtype, axes, still, clusters, columns, width); }
};

struct State {
    std::string name, input, output;
    txl_dtype dtype{};
    Sizes shape;
    int batch_axis = -1, row_axis = -1;  // -1: none
    std::optional<std::pair<std::int64_t, std::int64_t>> rows;
    bool absent = false, in_place = false;
    Json initial;
    Rule update{};
    std::int64_t slots = 0, spill = 0;
    [[nodiscard]] auto fields() const {
        return std::tie(name, input, output, dtype, shape, batch_axis, row_axis, rows, absent, in_place, initial,
                        update, slots, spill);
    }
    [[nodiscard]] bool counted() const { return update != Rule::replace; }
    [[nodiscard]] Sizes row_shape() const;       // one row of one sequence: [B, rows, 8] gives [8]
    [[nodiscard]] Sizes sequence_shape() const;  // one sequence: [B, rows, 8] gives [rows, 8]
};

struct Spec {
    std::string name;
    txl_dtype dtype{};
    Sizes shape;
    [[nodiscard]] auto fields() const { return std::tie(name, dtype, shape); }
};

struct Program {
    std::string name, kind, file;
    std::int64_t length = 0;
    Rule update{};
    std::vector<Spec> inputs, outputs;
    bool open_batch = false;
    std::map<std::string, std::int64_t> opset;
    [[nodiscard]] bool softmax() const { return kind == "head" || starts_with(kind, "tail."); }
    [[nodiscard]] bool rows_open() const;
};

struct Record {
    std::uint64_t size = 0;
    std::string sha256;
};

struct Manifest {
    std::string model_id, precision, weights;
    std::string vocabulary, selftest;   // empty: none
    std::int64_t B = 0, boundary = -1;  // -1: none
    std::int64_t stepwise = 0;          // 0: not known
    Sizes batch_sizes;
    bool lockstep = false, joint = false, exact = false, by_rows = true;
    std::vector<Input> inputs;
    std::vector<Output> outputs;
    std::vector<State> states;
    std::vector<Program> programs;
    std::set<Rule> updates;  // the rules that have programs
    std::map<std::string, Counting> counters;
    std::map<std::string, Record> files;
    std::string family;  // its JSON, which the compiled step alone reads

    [[nodiscard]] Sizes lengths() const;  // segment lengths, the largest first
    [[nodiscard]] std::vector<const State *> states_of(Rule update) const;
    [[nodiscard]] std::vector<const Input *> given() const;  // the caller's inputs: tokens and features
    [[nodiscard]] const Input *tokens() const;               // the caller's only input, if it is tokens; else null
    [[nodiscard]] const Output *logprobs() const;
    [[nodiscard]] std::int64_t vocab_size() const;
    [[nodiscard]] std::int64_t memory_length() const { return counts_rows() ? counters.at("fill").most : 0; }
    [[nodiscard]] std::int64_t fresh_fill() const { return counts_rows() ? counters.at("fill").start : 0; }
    [[nodiscard]] bool counts_rows() const { return counters.count("fill"); }
    [[nodiscard]] bool reads_text() const;  // ids [b, T], [T, b] or [b] in, log-probabilities [..., V] out
    [[nodiscard]] std::set<std::string> used_files() const;
};

// Read, complete and check a manifest; throw TXL_BUNDLE if it is none.
Manifest read_manifest(const std::string &text, const std::string &where);

// Return the manifest with the fields that format 2.1 added (§ 10), computed from the others, not checked yet.
Manifest implied(Manifest manifest);
// Throw TXL_BUNDLE if tables contradict one another (§ 11); in agreement.cpp.
void check_agreement(const Manifest &manifest, const std::string &where);

}  // namespace txl_runtime
