// Arrays: shapes that take no memory, views with strides, and the copies between them.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "txl.h"

namespace txl_runtime {

using Sizes = std::vector<std::int64_t>;  // TXL_SIZE_B, TXL_SIZE_L and TXL_SIZE_ROWS stand for what is open

std::size_t size_of(txl_dtype dtype);
const char *name_of(txl_dtype dtype);
double number_at(const void *from, txl_dtype dtype);

// Up to TXL_AXES numbers: sizes, or strides.
class Shape {
public:
    Shape() = default;
    Shape(std::initializer_list<std::int64_t> sizes) : Shape(sizes.begin(), sizes.size()) {}
    explicit Shape(const Sizes &sizes) : Shape(sizes.data(), sizes.size()) {}
    [[nodiscard]] int rank() const { return rank_; }
    std::int64_t &operator[](int axis) { return sizes_[axis]; }
    std::int64_t operator[](int axis) const { return sizes_[axis]; }
    [[nodiscard]] const std::int64_t *begin() const { return sizes_.data(); }
    [[nodiscard]] const std::int64_t *end() const { return sizes_.data() + rank_; }
    bool operator==(const Shape &other) const { return std::equal(begin(), end(), other.begin(), other.end()); }
    bool operator!=(const Shape &other) const { return !(*this == other); }
    void insert(int axis, std::int64_t size);
    void erase(int axis);
    [[nodiscard]] std::int64_t product() const;

private:
    Shape(const std::int64_t *sizes, std::size_t rank);
    std::array<std::int64_t, TXL_AXES + 1> sizes_{};
    int rank_ = 0;
};

// Somebody else's memory as an array.
struct View {
    std::byte *data = nullptr;
    txl_dtype dtype = TXL_FLOAT32;
    Shape shape, strides;  // strides in bytes

    View() = default;
    View(void *memory, txl_dtype type, const Shape &sizes);
    View(const void *memory, txl_dtype type, const Shape &sizes) : View(const_cast<void *>(memory), type, sizes) {}
    [[nodiscard]] View narrow(int axis, std::int64_t first, std::int64_t count) const;
    [[nodiscard]] View at(int axis, std::int64_t index) const;  // without the axis
    [[nodiscard]] View moved(int from, int to) const;           // an axis stands elsewhere
    [[nodiscard]] View broadcast(const Shape &over) const;      // as NumPy does
    [[nodiscard]] bool together() const;                        // whether it is row-major without gaps
    [[nodiscard]] std::size_t bytes() const { return shape.product() * size_of(dtype); }
};

// Both have one shape; numbers are converted, and rounded to even, where the types differ.
void copy(const View &to, const View &from);
void zero(const View &to);

// An array that owns its memory, which begins as zeros.
class Array {
public:
    Array() = default;
    Array(txl_dtype type, const Shape &sizes);
    [[nodiscard]] View view() const { return {memory_.get(), dtype, shape}; }
    [[nodiscard]] std::size_t bytes() const { return view().bytes(); }
    template <typename T>
    [[nodiscard]] T *as() const {
        return reinterpret_cast<T *>(memory_.get());
    }
    txl_dtype dtype = TXL_FLOAT32;
    Shape shape;  // may be made smaller: the memory stays

private:
    struct Free {
        void operator()(std::byte *memory) const;
    };
    std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace txl_runtime
