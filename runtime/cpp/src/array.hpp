// Arrays: shapes without memory of their own on the heap, views with strides, and copies between views.
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

using Sizes = std::vector<std::int64_t>;  // an open size is TXL_SIZE_B, TXL_SIZE_L or TXL_SIZE_ROWS

std::size_t size_of(txl_dtype dtype);
const char *name_of(txl_dtype dtype);
double number_at(const void *from, txl_dtype dtype);

// A list of up to TXL_AXES sizes or strides.
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

// An array in memory that it does not own.
struct View {
    std::byte *data = nullptr;
    txl_dtype dtype = TXL_FLOAT32;
    Shape shape, strides;  // strides in bytes

    View() = default;
    View(void *memory, txl_dtype type, const Shape &sizes);
    View(const void *memory, txl_dtype type, const Shape &sizes) : View(const_cast<void *>(memory), type, sizes) {}
    [[nodiscard]] View narrow(int axis, std::int64_t first, std::int64_t count) const;
    [[nodiscard]] View at(int axis, std::int64_t index) const;  // without the axis: at(1, 0) of [2, 3, 4] is [2, 4]
    [[nodiscard]] View moved(int from, int to) const;           // moved(2, 0) of [2, 3, 4] is [4, 2, 3]
    [[nodiscard]] View broadcast(const Shape &over) const;      // as NumPy does: [3] over [2, 3] is [2, 3]
    [[nodiscard]] bool together() const;                        // true: row-major without gaps
    [[nodiscard]] std::size_t bytes() const { return shape.product() * size_of(dtype); }
};

// Copy between views of one shape. Numbers are converted if the types differ, with ties rounded to even.
void copy(const View &to, const View &from);
void zero(const View &to);

// An array that owns its memory, filled with 0 at first.
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
    Shape shape;  // callers may make it smaller; the memory stays

private:
    struct Free {
        void operator()(std::byte *memory) const;
    };
    std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace txl_runtime
