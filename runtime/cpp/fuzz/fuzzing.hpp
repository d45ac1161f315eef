// Shared code of the fuzz targets: a check that only documented errors occur, and mutations that keep a file's format,
// without which libFuzzer seldom passes its reader. tests/helpers/cpp_seeds.py has the seeds.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "error.hpp"
#include "json.hpp"

namespace fuzzing {

// Abort the process, which libFuzzer reports as a finding, if `holds` is false.
void hold(bool holds, const char *what);

// Return true if `does` accepts the input. It may refuse with `code` only; every other error escapes and is a finding.
// The number of accepted inputs is printed at the end.
void count(bool accepted);
template <typename Does>
bool accepted(txl_code code, Does does) {
    try {
        does();
        count(true);
        return true;
    } catch (const txl_runtime::Refused &refused) {
        hold(refused.code == code && refused.what()[0], "refused by another code, or without a word");
        count(false);
        return false;
    }
}

// Change `size` bytes in place, up to `room` bytes, and return their number. Input of a different format is changed
// byte by byte.
std::size_t change_json(std::uint8_t *data, std::size_t size, std::size_t room, unsigned seed);
std::size_t change_tensors(std::uint8_t *data, std::size_t size, std::size_t room, unsigned seed);  // safetensors

inline std::string_view text_of(const std::uint8_t *data, std::size_t size) {
    return {reinterpret_cast<const char *>(data), size};
}

}  // namespace fuzzing
