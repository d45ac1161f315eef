#include "array.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "error.hpp"
#include "ranges.hpp"

namespace txl_runtime {
namespace {

constexpr std::size_t ALIGNED = 64;  // bytes: a cache line

template <typename T>
T at(const void *from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

float from_half(std::uint16_t half) {
    const std::uint32_t sign = (half & 0x8000U) << 16, exponent = (half >> 10) & 31U;
    std::uint32_t mantissa = half & 1023U, bits = sign;
    if (exponent == 31) {
        bits |= 0x7f800000U | (mantissa << 13);
    } else if (exponent) {
        bits |= ((exponent + 112) << 23) | (mantissa << 13);
    } else if (mantissa) {
        std::uint32_t shift = 1;
        while (!((mantissa << shift) & 1024U)) ++shift;
        bits |= ((113 - shift) << 23) | (((mantissa << shift) & 1023U) << 13);
    }
    return at<float>(&bits);
}

std::uint16_t to_half(float value) {
    const auto bits = at<std::uint32_t>(&value);
    const std::uint32_t sign = (bits >> 16) & 0x8000U, exponent = (bits >> 23) & 255U, mantissa = bits & 0x7fffffU;
    if (exponent == 255) return sign | 0x7c00U | (mantissa ? 0x200U | (mantissa >> 13) : 0U);
    const int scaled = int(exponent) - 112;
    if (scaled >= 31) return sign | 0x7c00U;
    if (scaled < -10) return sign;
    const std::uint32_t whole = scaled > 0 ? (std::uint32_t(scaled) << 23) | mantissa : mantissa | 0x800000U;
    const std::uint32_t shift = scaled > 0 ? 13 : 14 - scaled;
    const std::uint32_t kept = whole >> shift, rest = whole & ((1U << shift) - 1), middle = 1U << (shift - 1);
    return sign | (kept + (rest > middle || (rest == middle && (kept & 1U))));
}

float from_brain(std::uint16_t brain) {
    const auto bits = std::uint32_t{brain} << 16;
    return at<float>(&bits);
}

std::uint16_t to_brain(float value) {
    const auto bits = at<std::uint32_t>(&value);
    if ((bits & 0x7fffffffU) > 0x7f800000U) return (bits >> 16) | 64U;
    return (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
}

void write(std::byte *to, txl_dtype dtype, double number) {
    const auto store = [&](auto value) { std::memcpy(to, &value, sizeof value); };
    switch (dtype) {
        case TXL_BOOL:
            return store(char(number != 0));
        case TXL_INT32:
            return store(std::int32_t(number));
        case TXL_FLOAT32:
            return store(float(number));
        case TXL_FLOAT16:
            return store(to_half(float(number)));
        default:
            return store(to_brain(float(number)));
    }
}

// Copy, or write zeros if `from` is null. From axis `dense` on, both arrays are contiguous.
void move_axes(std::byte *to, const View &a, const std::byte *from, const View &b, int axis, int dense) {
    if (axis == dense) {
        std::size_t bytes = size_of(a.dtype);
        for (int rest = axis; rest < a.shape.rank(); ++rest) bytes *= a.shape[rest];
        if (bytes) from ? std::memcpy(to, from, bytes) : std::memset(to, 0, bytes);
        return;
    }
    if (from && axis == a.shape.rank()) return write(to, a.dtype, number_at(from, b.dtype));
    for (std::int64_t i = 0; i < a.shape[axis]; ++i)
        move_axes(to + i * a.strides[axis], a, from ? from + i * b.strides[axis] : nullptr, b, axis + 1, dense);
}

// Return the first axis from which on the elements are contiguous; 0 if all are.
int dense_from(const View &view) {
    std::int64_t stride = size_of(view.dtype);
    int axis = view.shape.rank();
    while (axis > 0 && (view.strides[axis - 1] == stride || view.shape[axis - 1] == 1)) stride *= view.shape[--axis];
    return axis;
}

}  // namespace

std::size_t size_of(txl_dtype dtype) {
    return dtype == TXL_BOOL ? 1 : dtype == TXL_FLOAT16 || dtype == TXL_BFLOAT16 ? 2 : 4;
}

const char *name_of(txl_dtype dtype) {
    static constexpr const char *NAMES[] = {"", "bool", "int32", "float32", "float16", "bfloat16"};
    return NAMES[dtype];
}

double number_at(const void *from, txl_dtype dtype) {
    switch (dtype) {
        case TXL_BOOL:
            return at<char>(from) != 0;
        case TXL_INT32:
            return at<std::int32_t>(from);
        case TXL_FLOAT32:
            return double(at<float>(from));
        case TXL_FLOAT16:
            return double(from_half(at<std::uint16_t>(from)));
        default:
            return double(from_brain(at<std::uint16_t>(from)));
    }
}

Shape::Shape(const std::int64_t *sizes, std::size_t rank) : rank_(rank) {
    need(rank <= TXL_AXES, TXL_UNSUPPORTED, "a tensor has ", rank, " axes, this library takes at most ", TXL_AXES,
         "; use txl_runtime from Python");
    std::copy_n(sizes, rank, sizes_.begin());
}

void Shape::insert(int axis, std::int64_t size) {
    std::copy_backward(sizes_.begin() + axis, sizes_.begin() + rank_, sizes_.begin() + rank_ + 1);
    sizes_[axis] = size, ++rank_;
}

void Shape::erase(int axis) { std::copy(sizes_.begin() + axis + 1, sizes_.begin() + rank_--, sizes_.begin() + axis); }

std::int64_t Shape::product() const {
    std::int64_t found = 1;
    for (auto size : *this) found *= size;
    return found;
}

View::View(void *memory, txl_dtype type, const Shape &sizes)
    : data(static_cast<std::byte *>(memory)), dtype(type), shape(sizes), strides(sizes) {
    auto stride = std::int64_t(size_of(type));
    for (int axis = sizes.rank(); axis-- > 0; stride *= sizes[axis]) strides[axis] = stride;
}

View View::narrow(int axis, std::int64_t first, std::int64_t count) const {
    View found = *this;
    found.data += first * strides[axis];
    found.shape[axis] = count;
    return found;
}

View View::at(int axis, std::int64_t index) const {
    View found = narrow(axis, index, 1);
    found.shape.erase(axis);
    found.strides.erase(axis);
    return found;
}

View View::moved(int from, int to) const {
    View found = *this;
    found.shape.erase(from), found.strides.erase(from);
    found.shape.insert(to, shape[from]), found.strides.insert(to, strides[from]);
    return found;
}

View View::broadcast(const Shape &over) const {
    View found = *this;
    while (found.shape.rank() < over.rank()) found.shape.insert(0, 1), found.strides.insert(0, 0);
    for (int axis = 0; axis < over.rank(); ++axis) {
        if (found.shape[axis] != over[axis]) found.strides[axis] = 0;
        found.shape[axis] = over[axis];
    }
    return found;
}

bool View::together() const { return dense_from(*this) == 0; }

void copy(const View &to, const View &from) {
    const int dense = to.dtype == from.dtype ? std::max(dense_from(to), dense_from(from)) : to.shape.rank() + 1;
    move_axes(to.data, to, from.data, from, 0, dense);
}

void zero(const View &to) { move_axes(to.data, to, nullptr, to, 0, dense_from(to)); }

Array::Array(txl_dtype type, const Shape &sizes) : dtype(type), shape(sizes) {
    const std::size_t room = (bytes() / ALIGNED + 1) * ALIGNED;
    memory_.reset(static_cast<std::byte *>(::operator new (room, std::align_val_t{ALIGNED})));
    std::memset(memory_.get(), 0, room);
}

void Array::Free::operator()(std::byte *memory) const { ::operator delete (memory, std::align_val_t{ALIGNED}); }

}  // namespace txl_runtime
