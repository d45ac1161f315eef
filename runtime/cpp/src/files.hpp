// The files of a bundle: in a folder, opened so that nothing is waited for and nothing leads elsewhere, or in memory.
#pragma once
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>

#include "txl.h"

namespace txl_runtime {

// An opened file.
class File {
public:
    virtual ~File() = default;
    virtual void read(char *to, std::uint64_t first, std::uint64_t count) const = 0;  // what lies inside of it
    std::uint64_t size = 0;
};

class Files {
public:
    virtual ~Files() = default;
    // The content of a plain file. Of one that is larger than `most` nothing is read.
    [[nodiscard]] std::string read(const std::string &name, std::uint64_t most) const;
    [[nodiscard]] std::string part(const std::string &name, std::uint64_t first, std::uint64_t count) const;
    [[nodiscard]] std::uint64_t size(const std::string &name) const { return open(name)->size; }
    [[nodiscard]] std::string hash(const std::string &name) const;
    [[nodiscard]] std::string where(const std::string &name) const { return root_ + "/" + name; }  // for messages
    [[nodiscard]] virtual std::string folder() const { return ""; }                                // empty: none
    [[nodiscard]] virtual std::string_view held(const std::string &) const { return {}; }          // in memory
    // Which files these are at present, and which folder: it changes where one is replaced or written to.
    [[nodiscard]] virtual std::string identity(const std::set<std::string> &) const { return ""; }

protected:
    [[nodiscard]] virtual std::unique_ptr<File> open(const std::string &name) const = 0;
    std::string root_;
};

std::unique_ptr<Files> open_folder(const std::string &path);
std::unique_ptr<Files> open_memory(const txl_file *files, std::size_t count);

}  // namespace txl_runtime
