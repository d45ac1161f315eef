// Arrays in files: safetensors, whose headers are read strictly, and stored vectors (§ 9), which bundles before 2.1
// have as a zip of NumPy's arrays.
#pragma once
#include <list>
#include <map>
#include <string>
#include <string_view>

#include "array.hpp"
#include "files.hpp"

namespace txl_runtime {

struct Stored {
    std::string dtype;  // as safetensors names it, such as F32
    Sizes shape;
    std::string_view bytes{};           // where the file is in memory
    std::uint64_t first = 0, last = 0;  // places in the file
    [[nodiscard]] std::int64_t size() const;
    [[nodiscard]] double number(std::int64_t index) const;
    [[nodiscard]] std::int64_t whole(std::int64_t index) const { return std::int64_t(number(index)); }
    [[nodiscard]] bool floating() const { return dtype[0] == 'F'; }
};

struct Tensors {
    std::map<std::string, std::string> facts;
    std::map<std::string, Stored> all;
    std::list<std::string> memory;                                    // what bytes are views of, where it is their own
    [[nodiscard]] const Stored *find(const std::string &name) const;  // null where there is none
};

// The header alone. `where` begins the message of what is refused.
Tensors read_header(const Files &files, const std::string &name);
// A whole file, whose tensors lie one behind the other without gaps and are of types whose size is known; what is none
// is refused with `code`.
Tensors read_tensors(std::string_view bytes, std::uint64_t most, txl_code code, const std::string &where);
// Refuses, as TXL_BUNDLE, what is damaged or takes memory out of proportion to the file.
Tensors read_vectors(std::string file, const std::string &where);
std::string write_tensors(const std::map<std::string, View> &tensors, const std::map<std::string, std::string> &facts);

std::size_t width_of(const std::string &dtype);  // bytes of a number; 0 of an unknown type
const char *stored_name(txl_dtype dtype);
// A whole number of some bytes, the lowest first.
std::uint64_t little(std::string_view bytes, std::size_t at, std::size_t count);

}  // namespace txl_runtime
