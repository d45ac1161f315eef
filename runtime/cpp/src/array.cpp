#include "array.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "error.hpp"

namespace txl_runtime {
namespace {

constexpr std::size_t ALIGNED = 64;

float from_half(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16, exponent = (half >> 10) & 31U;
    std::uint32_t mantissa = half & 1023U, bits = sign;
    if (exponent == 31) {
        bits |= 0x7f800000U | (mantissa << 13);
    } else if (exponent) {
        bits |= ((exponent + 112) << 23) | (mantissa << 13);
    } else if (mantissa) {
        std::uint32_t shift = 0;
        while (!(mantissa & 1024U)) mantissa <<= 1, ++shift;
        bits |= ((113 - shift) << 23) | ((mantissa & 1023U) << 13);
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

std::uint16_t to_half(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
    const std::uint32_t exponent = (bits >> 23) & 255U, mantissa = bits & 0x7fffffU;
    if (exponent == 255)
        return static_cast<std::uint16_t>(sign | 0x7c00U | (mantissa ? 0x200U | (mantissa >> 13) : 0U));
    const int scaled = static_cast<int>(exponent) - 112;
    if (scaled >= 31) return static_cast<std::uint16_t>(sign | 0x7c00U);
    if (scaled < -10) return sign;
    const std::uint32_t whole =
        scaled > 0 ? (static_cast<std::uint32_t>(scaled) << 23) | mantissa : mantissa | 0x800000U;
    const auto shift = static_cast<std::uint32_t>(scaled > 0 ? 13 : 14 - scaled);
    const std::uint32_t kept = whole >> shift, rest = whole & ((1U << shift) - 1), middle = 1U << (shift - 1);
    return static_cast<std::uint16_t>(sign | (kept + (rest > middle || (rest == middle && (kept & 1U)))));
}

float from_brain(std::uint16_t brain) {
    const std::uint32_t bits = static_cast<std::uint32_t>(brain) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

std::uint16_t to_brain(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 64U);
    return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

double read(const std::byte *at, txl_dtype dtype) {
    std::int32_t whole;
    std::uint16_t half;
    float value;
    switch (dtype) {
        case TXL_BOOL:
            return *at != std::byte{0} ? 1 : 0;
        case TXL_INT32:
            return std::memcpy(&whole, at, 4), whole;
        case TXL_FLOAT32:
            return static_cast<double>((std::memcpy(&value, at, 4), value));
        case TXL_FLOAT16:
            return static_cast<double>(from_half((std::memcpy(&half, at, 2), half)));
        default:
            return static_cast<double>(from_brain((std::memcpy(&half, at, 2), half)));
    }
}

void write(std::byte *at, txl_dtype dtype, double number) {
    const auto value = static_cast<float>(number);
    std::int32_t whole;
    std::uint16_t half;
    switch (dtype) {
        case TXL_BOOL:
            *at = std::byte{number != 0};
            break;
        case TXL_INT32:
            whole = static_cast<std::int32_t>(number), std::memcpy(at, &whole, 4);
            break;
        case TXL_FLOAT32:
            std::memcpy(at, &value, 4);
            break;
        case TXL_FLOAT16:
            half = to_half(value), std::memcpy(at, &half, 2);
            break;
        default:
            half = to_brain(value), std::memcpy(at, &half, 2);
    }
}

void copy_axes(std::byte *to, const View &a, const std::byte *from, const View &b, int axis, int dense) {
    if (axis == dense) {  // what is left lies together on both sides
        std::size_t bytes = size_of(a.dtype);
        for (int rest = axis; rest < a.shape.rank(); ++rest) bytes *= static_cast<std::size_t>(a.shape[rest]);
        if (bytes) std::memcpy(to, from, bytes);
        return;
    }
    if (axis == a.shape.rank()) return write(to, a.dtype, read(from, b.dtype));
    for (std::int64_t i = 0; i < a.shape[axis]; ++i)
        copy_axes(to + i * a.strides[axis], a, from + i * b.strides[axis], b, axis + 1, dense);
}

// The first axis from which on the elements lie together.
int dense_from(const View &view) {
    auto stride = static_cast<std::int64_t>(size_of(view.dtype));
    int axis = view.shape.rank();
    while (axis > 0 && (view.strides[axis - 1] == stride || view.shape[axis - 1] == 1)) stride *= view.shape[--axis];
    return axis;
}

void zero_axes(std::byte *to, const View &view, int axis, int dense) {
    if (axis == dense) {
        std::size_t bytes = size_of(view.dtype);
        for (int rest = axis; rest < view.shape.rank(); ++rest) bytes *= static_cast<std::size_t>(view.shape[rest]);
        if (bytes) std::memset(to, 0, bytes);
        return;
    }
    for (std::int64_t i = 0; i < view.shape[axis]; ++i) zero_axes(to + i * view.strides[axis], view, axis + 1, dense);
}

}  // namespace

std::size_t size_of(txl_dtype dtype) {
    return dtype == TXL_BOOL ? 1 : dtype == TXL_FLOAT16 || dtype == TXL_BFLOAT16 ? 2 : 4;
}

const char *name_of(txl_dtype dtype) {
    static constexpr const char *NAMES[] = {"", "bool", "int32", "float32", "float16", "bfloat16"};
    return NAMES[dtype];
}

Shape::Shape(std::initializer_list<std::int64_t> sizes) { fill(sizes.begin(), sizes.size()); }
Shape::Shape(const std::vector<std::int64_t> &sizes) { fill(sizes.data(), sizes.size()); }

void Shape::fill(const std::int64_t *sizes, std::size_t count) {
    need(count <= TXL_AXES, TXL_UNSUPPORTED, "a tensor has ", count, " axes, this library takes at most ", TXL_AXES,
         "; use txl_runtime from Python");
    std::copy_n(sizes, count, sizes_.begin());
    rank_ = static_cast<int>(count);
}

bool Shape::operator==(const Shape &other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

bool Shape::operator<(const Shape &other) const {
    return std::lexicographical_compare(begin(), end(), other.begin(), other.end());
}

void Shape::insert(int axis, std::int64_t size) {
    std::copy_backward(sizes_.begin() + axis, sizes_.begin() + rank_, sizes_.begin() + rank_ + 1);
    sizes_[static_cast<std::size_t>(axis)] = size;
    ++rank_;
}

void Shape::erase(int axis) {
    std::copy(sizes_.begin() + axis + 1, sizes_.begin() + rank_, sizes_.begin() + axis);
    --rank_;
}

std::int64_t Shape::product() const {
    std::int64_t found = 1;
    for (auto size : *this) found *= size;
    return found;
}

View::View(void *memory, txl_dtype type, const Shape &sizes)
    : data(static_cast<std::byte *>(memory)), dtype(type), shape(sizes), strides(sizes) {
    auto stride = static_cast<std::int64_t>(size_of(type));
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
    copy_axes(to.data, to, from.data, from, 0, dense);
}

void zero(const View &to) { zero_axes(to.data, to, 0, dense_from(to)); }

Array::Array(txl_dtype type, const Shape &sizes) : dtype(type), shape(sizes) {
    const std::size_t room = (bytes() / ALIGNED + 1) * ALIGNED;
    memory_.reset(static_cast<std::byte *>(::operator new (room, std::align_val_t{ALIGNED})));
    std::memset(memory_.get(), 0, room);
}

void Array::Free::operator()(std::byte *memory) const { ::operator delete (memory, std::align_val_t{ALIGNED}); }

}  // namespace txl_runtime
