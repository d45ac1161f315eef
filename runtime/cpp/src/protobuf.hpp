// Protocol buffers, read strictly: what two readers could understand differently is refused.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace txl_runtime {

// What in a graph was found, and what was expected.
struct GraphRefused {
    std::string found, expected;
    double needed = 0;  // the budget with which it may be, where that is what it lacks
};

struct Field {
    int number;
    std::uint64_t value = 0;  // of a whole number
    std::string_view bytes;   // of all else
};

// The fields of a message: numbers, each followed by v (a whole number), b (bytes), f or d (4 or 8 bytes).
struct Known {
    const char *name, *once, *many;
};

// A field is one that is known, or refused; one that can be there once is there once.
std::vector<Field> fields(std::string_view message, const Known &known);
// Whole numbers with signs, of a field that holds one, or several one after the other.
std::vector<std::int64_t> wholes(const Field &field);

}  // namespace txl_runtime
