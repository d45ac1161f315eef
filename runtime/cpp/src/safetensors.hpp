// Arrays in files: safetensors, with a strict reader of headers, and stored vectors (§ 9), which bundles before 2.1
// keep as a zip of NumPy's arrays.
#pragma once
#include <list>
#include <map>
#include <string>
#include <string_view>

#include "array.hpp"
#include "files.hpp"

namespace txl_runtime {

struct Stored {
    std::string dtype;  // safetensors' name, e.g. "F32"
    Sizes shape;
    std::string_view bytes{};           // empty if only the header was read
    std::uint64_t first = 0, last = 0;  // the tensor's bytes in the file: [first, last)
    [[nodiscard]] std::int64_t size() const;
    [[nodiscard]] double number(std::int64_t index) const;
    [[nodiscard]] std::int64_t whole(std::int64_t index) const { return std::int64_t(number(index)); }
    [[nodiscard]] bool floating() const { return dtype[0] == 'F'; }
};

struct Tensors {
    std::map<std::string, std::string> facts;
    std::map<std::string, Stored> all;
    std::list<std::string> memory;                                    // contents that `bytes` view, if owned
    [[nodiscard]] const Stored *find(const std::string &name) const;  // null if there is none
};

// Read only the header; throw TXL_BUNDLE if it is damaged.
Tensors read_header(const Files &files, const std::string &name);
// Read a whole file with a header of at most `most` bytes. Throw `code` if tensors leave gaps, overlap or have unknown
// types. `where` begins the message.
Tensors read_tensors(std::string_view bytes, std::uint64_t most, txl_code code, const std::string &where);
// Read stored vectors; throw TXL_BUNDLE if they are damaged or unpack to far more than the file's size.
Tensors read_vectors(std::string file, const std::string &where);
std::string write_tensors(const std::map<std::string, View> &tensors, const std::map<std::string, std::string> &facts);

std::size_t width_of(const std::string &dtype);  // bytes of a number; 0: unknown type
const char *stored_name(txl_dtype dtype);
// Return the integer of `count` bytes from `at` on, the lowest first.
std::uint64_t little(std::string_view bytes, std::size_t at, std::size_t count);

}  // namespace txl_runtime
