// Safetensors files: the header, read strictly; whole small files (snapshots, stored vectors); and snapshots written.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "array.hpp"
#include "files.hpp"
#include "json.hpp"

namespace txl_runtime {

struct Entry {
    std::string dtype;  // as safetensors names it, such as F32
    std::vector<std::int64_t> shape;
    std::uint64_t first, last;  // bytes from the first tensor's on
};

struct Header {
    std::map<std::string, std::string> facts;
    std::map<std::string, Entry> entries;
    std::uint64_t start;  // where tensors begin
};

// `head` is the begin of a file of `size` bytes. Refused, with `code`, is what is no header; `where` begins the
// message.
std::uint64_t header_length(std::string_view head, std::uint64_t size, std::uint64_t most, txl_code code,
                            const std::string &where);
Header read_header(std::string_view head, std::uint64_t size, std::uint64_t most, txl_code code,
                   const std::string &where);
Header read_header(const Files &files, const std::string &name);

struct Tensors {
    Header header;
    std::string_view bytes;  // of the file
    [[nodiscard]] bool has(const std::string &name) const { return header.entries.count(name) > 0; }
    [[nodiscard]] const Entry &entry(const std::string &name) const { return header.entries.at(name); }
    [[nodiscard]] const char *data(const std::string &name) const {
        return bytes.data() + header.start + entry(name).first;
    }
};

// A whole file, whose tensors lie one behind the other without gaps and are of types whose size is known.
Tensors read_tensors(std::string_view bytes, std::uint64_t most, txl_code code, const std::string &where);

std::string write_tensors(const std::map<std::string, View> &tensors, const std::map<std::string, std::string> &facts);

const char *stored_name(txl_dtype dtype);

}  // namespace txl_runtime
