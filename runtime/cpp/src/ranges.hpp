// Algorithms over whole ranges, starts_with and ends_with: those of C++20 that this C++17 library uses.
#pragma once
#include <algorithm>
#include <iterator>
#include <string_view>

namespace txl_runtime {

inline bool starts_with(std::string_view text, std::string_view start) { return text.substr(0, start.size()) == start; }

inline bool ends_with(std::string_view text, std::string_view end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

namespace ranges {

template <typename Range, typename Test>
bool any_of(const Range &range, Test test) {
    return std::any_of(std::begin(range), std::end(range), test);
}

template <typename Range, typename Test>
bool all_of(const Range &range, Test test) {
    return std::all_of(std::begin(range), std::end(range), test);
}

template <typename Range, typename Value>
auto find(const Range &range, const Value &value) {
    return std::find(std::begin(range), std::end(range), value);
}

template <typename Range, typename Value, typename Row, typename Member>
auto find(const Range &range, const Value &value, Member Row::*member) {
    return std::find_if(std::begin(range), std::end(range), [&](const Row &row) { return row.*member == value; });
}

template <typename Range, typename Test>
auto find_if(Range &range, Test test) {
    return std::find_if(std::begin(range), std::end(range), test);
}

template <typename Range, typename Value>
auto count(const Range &range, const Value &value) {
    return std::count(std::begin(range), std::end(range), value);
}

template <typename Range>
auto max(const Range &range) {  // the range is not empty
    return *std::max_element(std::begin(range), std::end(range));
}

template <typename Range, typename To>
void copy(const Range &range, To to) {
    std::copy(std::begin(range), std::end(range), to);
}

template <typename Range, typename Value>
void fill(Range &range, const Value &value) {
    std::fill(std::begin(range), std::end(range), value);
}

template <typename Range, typename Value>
void erase(Range &range, const Value &value) {
    range.erase(std::remove(range.begin(), range.end(), value), range.end());
}

template <typename Range, typename Test>
void erase_if(Range &range, Test test) {
    range.erase(std::remove_if(range.begin(), range.end(), test), range.end());
}

template <typename Range, typename... Order>
void sort(Range &range, Order... order) {
    std::sort(std::begin(range), std::end(range), order...);
}

template <typename One, typename Other, typename... Same>
bool equal(const One &one, const Other &other, Same... same) {
    return std::equal(std::begin(one), std::end(one), std::begin(other), std::end(other), same...);
}

}  // namespace ranges
}  // namespace txl_runtime
