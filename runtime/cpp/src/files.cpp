#include "files.hpp"

#include <vector>

#include "error.hpp"
#include "sha256.hpp"
#include "system.hpp"

namespace txl_runtime {
namespace {

class Folder : public Files {
public:
    explicit Folder(const std::string &path) {
        root_ = real_folder(path);
        need(!root_.empty(), TXL_BUNDLE, path,
             ": found no folder, expected a bundle; make one with `txl-deploy export`");
    }
    [[nodiscard]] std::string folder() const override { return root_; }
    [[nodiscard]] std::string identity(const std::set<std::string> &names) const override {
        std::string found = identity_of(root_);
        for (const auto &name : names) found += identity_of(where(name));
        return found;
    }

private:
    [[nodiscard]] std::unique_ptr<File> open(const std::string &name) const override {
        return open_plain(root_, name, where(name));
    }
};

struct Piece : File {
    explicit Piece(std::string_view all) : bytes(all) { size = all.size(); }
    void read(char *to, std::uint64_t first, std::uint64_t count) const override { bytes.copy(to, count, first); }
    std::string_view bytes;
};

class Memory : public Files {
public:
    Memory(const txl_file *files, std::size_t count) {
        root_ = "memory";
        for (std::size_t i = 0; i < count; ++i) {
            need(files[i].name && (files[i].data || !files[i].bytes), TXL_USAGE, "file ", i,
                 " has no name or no data, expected both; give both");
            held_[files[i].name] = {static_cast<const char *>(files[i].data), files[i].bytes};
        }
    }
    [[nodiscard]] std::string_view held(const std::string &name) const override {
        const auto found = held_.find(name);
        need(found != held_.end(), TXL_BUNDLE, where(name), ": missing, expected it among the files; give all files");
        return found->second;
    }

private:
    [[nodiscard]] std::unique_ptr<File> open(const std::string &name) const override {
        return std::make_unique<Piece>(held(name));
    }
    std::map<std::string, std::string_view> held_;
};

}  // namespace

std::string Files::read(const std::string &name, std::uint64_t most) const {
    const auto file = open(name);
    need(file->size <= most, TXL_BUNDLE, where(name), ": ", file->size, " bytes, expected at most ", most,
         "; copy the bundle again");
    std::string content(file->size, '\0');
    file->read(content.data(), 0, file->size);
    return content;
}

std::string Files::part(const std::string &name, std::uint64_t first, std::uint64_t count) const {
    const auto file = open(name);
    need(first <= file->size && count <= file->size - first, TXL_BUNDLE, where(name), ": ends at ", file->size,
         ", expected ", count, " bytes from ", first, " on; copy all of it again");
    std::string content(count, '\0');
    file->read(content.data(), first, count);
    return content;
}

std::string Files::hash(const std::string &name) const {
    const auto file = open(name);
    Sha256 digest;
    std::vector<char> piece(1U << 20);
    for (std::uint64_t at = 0; at < file->size; at += piece.size()) {
        const auto count = std::min<std::uint64_t>(file->size - at, piece.size());
        file->read(piece.data(), at, count);
        digest.add(piece.data(), count);
    }
    return digest.hex();
}

std::unique_ptr<Files> open_folder(const std::string &path) { return std::make_unique<Folder>(path); }

std::unique_ptr<Files> open_memory(const txl_file *files, std::size_t count) {
    return std::make_unique<Memory>(files, count);
}

}  // namespace txl_runtime
