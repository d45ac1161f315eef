// What is known of the values of a graph: sizes, bounds, and the numbers of small ones; and the rules by which results
// follow.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "protobuf.hpp"

namespace txl_runtime {

__extension__ using Int = __int128;  // sums and products of two sizes always fit
using Dims = std::vector<Int>;
using Ranges = std::vector<std::pair<Int, Int>>;

constexpr Int SMALL_VALUE = 256;  // numbers of a value up to which its content is kept
constexpr Int FAR_AWAY = Int{1} << 62;
constexpr double SLOW = 32;  // products that take as long as the slowest function of one number

std::string said(Int number);
Int floored(Int a, Int b);  // of a / b
Int ceiled(Int a, Int b);
int item_of(std::int64_t type);  // bytes of a number of ONNX's type; 0 of what is none

struct GraphValue {
    Dims dims;
    bool exact = true;                // whether it has these sizes, or at most these
    Int most = 0;                     // how many numbers it can have
    std::optional<Ranges> content{};  // ranges of its numbers, where they are known
    bool fixed = false;               // whether it is always the same
    bool loose = false;               // whether it can have more axes than these
    std::vector<float> scales{};      // of a small constant that are no whole ones
    int item = 4;                     // bytes of one number
};
using ValuePtr = std::shared_ptr<const GraphValue>;

GraphValue sized(const Dims &dims, bool exact = true, std::optional<Ranges> content = {}, Int most = FAR_AWAY);

struct Attribute {
    std::int64_t type = 0, whole = 0;
    float number = 0;
    std::string text;
    std::vector<std::int64_t> wholes;
    std::size_t numbers = 0;
    ValuePtr tensor;
};

// An operator with what is known of its inputs; a rule says what it returns, and sets `work` and `memory`: products to
// sum and numbers that an engine keeps, beside what goes in and out.
struct GraphNode {
    std::string op;
    std::vector<ValuePtr> inputs;  // null: missing
    std::map<std::string, Attribute> attributes;
    std::size_t results = 1;
    double work = 0, memory = 0;
    bool loose = false, exact = true;

    [[nodiscard]] const Attribute *find(const char *name) const;  // null where there is none
    [[nodiscard]] bool has(const char *name) const { return find(name); }
    [[nodiscard]] std::int64_t whole(const char *name, std::int64_t missing) const;
    [[nodiscard]] std::string text(const char *name, const char *missing) const;
    [[nodiscard]] std::vector<std::int64_t> wholes(const char *name) const;
    [[nodiscard]] const GraphValue &value(std::size_t index) const;
    [[nodiscard]] bool there(std::size_t index) const { return index < inputs.size() && inputs[index]; }
    [[nodiscard]] std::optional<Ranges> content(std::size_t index) const;  // has to be known where the input is there
    [[nodiscard]] std::optional<Dims> numbers(std::size_t index) const;    // which depend on no open size
    [[nodiscard]] std::pair<Dims, bool> sizes(std::size_t index) const;    // at most, and whether they are exact
    [[nodiscard]] std::size_t axis(std::size_t rank, std::int64_t missing = 0) const;
    [[nodiscard]] GraphValue like(const Dims &dims, std::optional<Ranges> content = {}, bool as = true,
                                  Int most = FAR_AWAY) const;
};

std::size_t place(Int axis, std::size_t rank);
std::set<std::size_t> places(const Dims &axes, std::size_t rank);
Dims part(const Dims &dims, std::size_t first, std::size_t last = std::string::npos);  // as much of it as there is
Dims operator+(Dims dims, const Dims &more);                                           // one behind the other
Dims wider(const std::vector<Dims> &shapes);  // what shapes are broadcast to, at most
double product(const Dims &dims);
[[noreturn]] void refuse_graph(const std::string &found, const std::string &expected);

// What a node returns by a rule: one value for all of its results, or one for each.
using Results = std::vector<GraphValue>;
using SizeRules = std::map<std::string, Results (*)(GraphNode &)>;
const SizeRules &plain_rules();   // of operators that any program may have
const SizeRules &module_rules();  // of what programs of kind step may hold beside
Results reduced(GraphNode &node, const Dims &dims, const Dims &axes, bool keep);
void products(GraphNode &node, double many);

// A node: those that it reads of, and the bytes and the number of values that it returns.
struct Lived {
    std::set<std::size_t> reads;
    double bytes, values;
};

// How many bytes and values of a graph there are at once at most, in whatever order an engine runs the nodes.
std::pair<double, double> most_at_once(const std::vector<Lived> &nodes);

}  // namespace txl_runtime
