// How many bytes of a graph's values there are at once at most, in whatever order an engine runs the nodes.
//
// What no order changes is that a node runs behind those that it reads of. So the longest chain of such nodes is a
// clock: every other node runs behind those of the chain that it depends on, and before those that depend on it, and
// what it returns may be there for as long as that leaves open.
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

namespace txl_runtime {

class Lives {
public:
    // A node: those that it reads of, the bytes and the number of values that it returns; its own number.
    std::size_t add(std::vector<std::size_t> reads, double bytes, std::size_t values);
    [[nodiscard]] std::pair<double, double> most() const;  // bytes, and values

private:
    std::vector<std::vector<std::size_t>> reads_;
    std::vector<double> bytes_, values_;
};

}  // namespace txl_runtime
