// What the fuzz targets share: which errors are documented, and changes to a file that keep its form, without which
// libFuzzer seldom comes beyond the reader of the form. tests/helpers/fuzzing.py makes seeds and runs the targets.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "error.hpp"
#include "json.hpp"

namespace fuzzing {

// Ends the process, as libFuzzer wants it, where what has to hold does not.
void hold(bool holds, const char *what);

// Whether the input is accepted. Refused it may be with this code alone; every other error escapes, and is a finding.
// How many were accepted is told in the end.
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

// Each changes `size` bytes in place, which may become `room`; what is not of the form is changed byte by byte.
std::size_t change_json(std::uint8_t *data, std::size_t size, std::size_t room, unsigned seed);
std::size_t change_tensors(std::uint8_t *data, std::size_t size, std::size_t room, unsigned seed);  // safetensors

inline std::string_view text_of(const std::uint8_t *data, std::size_t size) {
    return {reinterpret_cast<const char *>(data), size};
}

}  // namespace fuzzing
