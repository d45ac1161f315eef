// The files of a bundle: in memory, or in a folder, where pipes and links that leave the bundle are refused.
#pragma once
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>

#include "txl.h"

namespace txl_runtime {

// An open file.
class File {
public:
    virtual ~File() = default;
    virtual void read(char *to, std::uint64_t first, std::uint64_t count) const = 0;  // callers keep to `size`
    std::uint64_t size = 0;
};

class Files {
public:
    virtual ~Files() = default;
    // Return the content of a file; throw TXL_BUNDLE, without reading, if it has more than `most` bytes.
    [[nodiscard]] std::string read(const std::string &name, std::uint64_t most) const;
    [[nodiscard]] std::string part(const std::string &name, std::uint64_t first, std::uint64_t count) const;
    [[nodiscard]] std::uint64_t size(const std::string &name) const { return open(name)->size; }
    [[nodiscard]] std::string hash(const std::string &name) const;
    [[nodiscard]] std::string where(const std::string &name) const { return root_ + "/" + name; }  // for messages
    [[nodiscard]] virtual std::string folder() const { return ""; }                                // "": in memory
    [[nodiscard]] virtual std::string_view held(const std::string &) const { return {}; }          // bytes in memory
    // Return a text that changes if the folder or one of these files is replaced or written to; "" for files in memory.
    [[nodiscard]] virtual std::string identity(const std::set<std::string> &) const { return ""; }

protected:
    [[nodiscard]] virtual std::unique_ptr<File> open(const std::string &name) const = 0;
    std::string root_;
};

std::unique_ptr<Files> open_folder(const std::string &path);
std::unique_ptr<Files> open_memory(const txl_file *files, std::size_t count);

}  // namespace txl_runtime
