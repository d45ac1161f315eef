// Numbers in a row that somebody else holds: as much of C++20's std::span as is used here.
#pragma once
#include <cstddef>

namespace txl_runtime {

template <typename T>
class Span {
public:
    Span(T *first, std::size_t count) : first_(first), count_(count) {}
    template <typename Container>
    Span(Container &held) : Span(held.data(), held.size()) {}
    [[nodiscard]] std::size_t size() const { return count_; }
    [[nodiscard]] T *begin() const { return first_; }
    [[nodiscard]] T *end() const { return first_ + count_; }
    T &operator[](std::size_t index) const { return first_[index]; }

private:
    T *first_;
    std::size_t count_;
};

}  // namespace txl_runtime
