// The files of a bundle: in a folder, opened so that nothing is waited for and nothing leads elsewhere, or in memory.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "txl.h"

namespace txl_runtime {

class Files {
public:
    virtual ~Files() = default;
    // The content of a plain file. Of one that is larger than `most` nothing is read.
    [[nodiscard]] virtual std::string read(const std::string &name, std::uint64_t most) const = 0;
    [[nodiscard]] virtual std::uint64_t size(const std::string &name) const = 0;
    [[nodiscard]] virtual std::string hash(const std::string &name) const = 0;
    // Reads a part of a file.
    [[nodiscard]] virtual std::string part(const std::string &name, std::uint64_t first, std::uint64_t count) const = 0;
    [[nodiscard]] virtual const std::string &folder() const = 0;                     // empty where there is none
    [[nodiscard]] virtual std::string_view held(const std::string &name) const = 0;  // in memory; else empty
    [[nodiscard]] virtual std::string where(const std::string &name) const = 0;      // for messages
};

std::unique_ptr<Files> open_folder(const std::string &path);
std::unique_ptr<Files> open_memory(const txl_file *files, std::size_t count);

}  // namespace txl_runtime
