#include "graph_values.hpp"

#include <algorithm>

namespace txl_runtime {

std::string said(Int number) {
    if (number > FAR_AWAY || number < -FAR_AWAY) return "too much";
    return std::to_string(static_cast<long long>(number));
}

int item_of(std::int64_t type) {
    static constexpr int ITEMS[] = {0, 4, 1, 1, 2, 2, 4, 8, 0, 1, 2, 8, 4, 8, 0, 0, 2};
    return type > 0 && type <= 16 ? ITEMS[type] : 0;
}

void refuse_graph(const std::string &found, const std::string &expected) { throw GraphRefused{found, expected}; }

double product(const Dims &dims) {
    double found = 1;
    for (auto size : dims) found *= static_cast<double>(size);
    return found;
}

GraphValue sized(const Dims &dims, bool exact, std::optional<Ranges> content, Int most) {
    double without_zeros = 1;
    Int numbers = 1;
    if (dims.size() > 16) refuse_graph("a value of " + std::to_string(dims.size()) + " axes", "at most 16");
    for (auto size : dims) {
        if (size < 0) refuse_graph("a size of " + said(size), "0 or more");
        without_zeros *= static_cast<double>(size ? size : 1);
    }
    if (without_zeros > 281474976710656.0) refuse_graph("a value of too many numbers", "fewer numbers");
    for (auto size : dims) numbers *= size;
    return {dims, exact, std::min(most, numbers), std::move(content)};
}

std::int64_t GraphNode::whole(const char *name, std::int64_t missing) const {
    const auto found = attributes.find(name);
    return found == attributes.end() ? missing : found->second.whole;
}

std::string GraphNode::text(const char *name, const char *missing) const {
    const auto found = attributes.find(name);
    return found == attributes.end() ? missing : found->second.text;
}

std::vector<std::int64_t> GraphNode::wholes(const char *name) const {
    const auto found = attributes.find(name);
    return found == attributes.end() ? std::vector<std::int64_t>() : found->second.wholes;
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
    const auto many = static_cast<Int>(rank);
    if (axis < -many || axis >= std::max<Int>(many, 1))
        refuse_graph("axis " + said(axis) + " of a value with " + std::to_string(rank), "one that it has");
    return rank ? static_cast<std::size_t>((axis + many) % many) : 0;
}

Dims wider(const std::vector<Dims> &shapes) {
    std::size_t rank = 0;
    for (const auto &shape : shapes) rank = std::max(rank, shape.size());
    Dims found(rank);
    for (std::size_t axis = 0; axis < rank; ++axis) {
        bool none = false;
        Int most = 0;
        for (const auto &shape : shapes) {
            const auto behind = rank - axis;
            const auto size = shape.size() < behind ? Int{1} : shape[shape.size() - behind];
            none = none || size == 0, most = std::max(most, size);
        }
        found[axis] = none && most <= 1 ? 0 : most;
    }
    // Shapes that are all alike stay as they are.
    return std::all_of(shapes.begin(), shapes.end(), [&](const Dims &shape) { return shape == shapes[0]; }) ? shapes[0]
                                                                                                            : found;
}

}  // namespace txl_runtime
