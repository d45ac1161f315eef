#include "graph_values.hpp"
#include "ranges.hpp"

#include <algorithm>

namespace txl_runtime {

std::string said(Int number) {
    if (number > FAR_AWAY || number < -FAR_AWAY) return "too much";
    return std::to_string(static_cast<long long>(number));
}

Int floored(Int a, Int b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
Int ceiled(Int a, Int b) { return -floored(-a, b); }

int item_of(std::int64_t type) {
    static constexpr int ITEMS[] = {0, 4, 1, 1, 2, 2, 4, 8, 0, 1, 2, 8, 4, 8, 0, 0, 2};
    return type > 0 && type <= 16 ? ITEMS[type] : 0;
}

void refuse_graph(const std::string &found, const std::string &expected) { throw GraphRefused{found, expected}; }

double product(const Dims &dims) {
    double found = 1;
    for (auto size : dims) found *= double(size);
    return found;
}

GraphValue sized(const Dims &dims, bool exact, std::optional<Ranges> content, Int most) {
    double without_zeros = 1;
    Int numbers = 1;
    if (dims.size() > 16) refuse_graph("a value of " + std::to_string(dims.size()) + " axes", "at most 16");
    for (auto size : dims) {
        if (size < 0) refuse_graph("a size of " + said(size), "0 or more");
        without_zeros *= double(size ? size : 1);
    }
    if (without_zeros > 281474976710656.0) refuse_graph("a value of too many numbers", "fewer numbers");
    for (auto size : dims) numbers *= size;
    return {dims, exact, std::min(most, numbers), std::move(content)};
}

const Attribute *GraphNode::find(const char *name) const {
    const auto found = attributes.find(name);
    return found == attributes.end() ? nullptr : &found->second;
}

std::int64_t GraphNode::whole(const char *name, std::int64_t missing) const {
    const auto *found = find(name);
    return found ? found->whole : missing;
}

std::string GraphNode::text(const char *name, const char *missing) const {
    const auto *found = find(name);
    return found ? found->text : missing;
}

std::vector<std::int64_t> GraphNode::wholes(const char *name) const {
    const auto *found = find(name);
    return found ? found->wholes : std::vector<std::int64_t>();
}

const GraphValue &GraphNode::value(std::size_t index) const {
    if (!there(index)) refuse_graph("no input " + std::to_string(index), "one");
    return *inputs[index];
}

std::optional<Ranges> GraphNode::content(std::size_t index) const {
    if (!there(index)) return {};
    if (!value(index).content)
        refuse_graph("a size that is computed from data", "one that follows from constants and sizes");
    return value(index).content;
}

std::optional<Dims> GraphNode::numbers(std::size_t index) const {
    const auto found = content(index);
    if (!found) return {};
    Dims numbers;
    for (const auto &[low, high] : *found) {
        if (low != high) refuse_graph("axes that depend on a size", "constants");
        numbers.push_back(low);
    }
    return numbers;
}

std::pair<Dims, bool> GraphNode::sizes(std::size_t index) const {
    std::pair<Dims, bool> found{{}, true};
    for (const auto &[low, high] : content(index).value_or(Ranges()))
        found.first.push_back(high), found.second = found.second && low == high;
    return found;
}

std::size_t GraphNode::axis(std::size_t rank, std::int64_t missing) const {
    return place(whole("axis", missing), rank);
}

GraphValue GraphNode::like(const Dims &dims, std::optional<Ranges> known, bool as, Int most) const {
    return sized(dims, exact && as, std::move(known), most);
}

std::size_t place(Int axis, std::size_t rank) {
    const Int many = rank;
    if (axis < -many || axis >= std::max<Int>(many, 1))
        refuse_graph("axis " + said(axis) + " of a value with " + std::to_string(rank), "one that it has");
    return rank ? std::size_t((axis + many) % many) : 0;
}

std::set<std::size_t> places(const Dims &axes, std::size_t rank) {
    std::set<std::size_t> found;
    for (auto axis : axes) found.insert(place(axis, rank));
    return found;
}

Dims part(const Dims &dims, std::size_t first, std::size_t last) {
    last = std::min(last, dims.size());
    return first < last ? Dims(dims.begin() + first, dims.begin() + last) : Dims();
}

Dims operator+(Dims dims, const Dims &more) {
    dims.insert(dims.end(), more.begin(), more.end());
    return dims;
}

Dims wider(const std::vector<Dims> &shapes) {
    // Shapes that are all alike stay as they are.
    if (ranges::count(shapes, shapes[0]) == std::ptrdiff_t(shapes.size())) return shapes[0];
    std::size_t rank = 0;
    for (const auto &shape : shapes) rank = std::max(rank, shape.size());
    Dims found;
    for (auto behind = rank; behind > 0; --behind) {
        bool none = false;
        Int most = 0;
        for (const auto &shape : shapes) {
            const auto size = shape.size() < behind ? Int{1} : shape[shape.size() - behind];
            none = none || size == 0, most = std::max(most, size);
        }
        found.push_back(none && most <= 1 ? 0 : most);
    }
    return found;
}

// What no order changes is that a node runs behind those that it reads of. So the longest chain of such nodes is a
// clock: every other node runs behind those of the chain that it depends on, and before those that depend on it, and
// what it returns may be there for as long as that leaves open.
std::pair<double, double> most_at_once(const std::vector<Lived> &nodes) {
    const auto count = nodes.size();
    std::vector<std::size_t> depth(count, 1), before(count, count), clock(count, 0), first(count), last(count),
        until(count, 0);
    std::size_t ticks = 0;
    for (std::size_t node = 0; node < count; ++node) {
        for (auto read : nodes[node].reads)
            if (depth[read] >= depth[node]) depth[node] = depth[read] + 1, before[node] = read;
        ticks = std::max(ticks, depth[node]);
    }
    for (auto node = std::size_t(ranges::find(depth, ticks) - depth.begin()); node < count; node = before[node])
        clock[node] = depth[node];
    for (std::size_t node = 0; node < count; ++node) {
        first[node] = clock[node], last[node] = ticks;
        for (auto read : nodes[node].reads)
            if (!clock[node]) first[node] = std::max(first[node], first[read]);
    }
    for (auto node = count; node-- > 0;) {
        const auto latest = clock[node] ? clock[node] : last[node];
        until[node] = std::max(until[node], latest);
        for (auto read : nodes[node].reads) {
            until[read] = std::max(until[read], latest);
            last[read] = std::min(last[read], clock[node] ? clock[node] - 1 : latest);
        }
    }
    std::pair<double, double> found{0, 0}, now{0, 0};
    std::vector<std::pair<double, double>> sums(ticks + 2);
    for (std::size_t node = 0; node < count; ++node) {
        sums[first[node]].first += nodes[node].bytes, sums[first[node]].second += nodes[node].values;
        sums[until[node] + 1].first -= nodes[node].bytes, sums[until[node] + 1].second -= nodes[node].values;
    }
    for (const auto &[bytes, values] : sums) {
        now = {now.first + bytes, now.second + values};
        found = {std::max(found.first, now.first), std::max(found.second, now.second)};
    }
    return found;
}

}  // namespace txl_runtime
