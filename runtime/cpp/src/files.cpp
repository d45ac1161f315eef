#include "files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "error.hpp"
#include "ranges.hpp"
#include "sha256.hpp"

#ifdef __APPLE__
#define st_ctim st_ctimespec
#endif

namespace txl_runtime {
namespace {

namespace fs = std::filesystem;

class Plain : public File {
public:
    Plain(const fs::path &root, const std::string &name, const std::string &where) : where_(where) {
        std::error_code error;
        const auto real = fs::canonical(root / name, error);
        need(!error, TXL_BUNDLE, where, ": missing or unreadable (", error.message(),
             "), expected a file; copy the bundle again");
        need(starts_with(real.native(), (root / "").native()), TXL_BUNDLE, where,
             ": a link that leaves the bundle, expected a plain file in it; copy the bundle again");
        // Without O_NONBLOCK opening a pipe waits for a writer.
        handle_ = ::open(real.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        struct stat facts {};
        if (handle_ < 0 || ::fstat(handle_, &facts) || !S_ISREG(facts.st_mode)) {
            const std::string said = handle_ < 0 ? std::strerror(errno) : "no plain file";
            close();
            refuse(TXL_BUNDLE, where, ": ", said, ", expected a plain file; copy the bundle again");
        }
        size = facts.st_size;
    }
    ~Plain() override { close(); }
    Plain(const Plain &) = delete;
    Plain &operator=(const Plain &) = delete;

    void read(char *to, std::uint64_t first, std::uint64_t count) const override {
        while (count) {
            const auto got = ::pread(handle_, to, std::min<std::uint64_t>(count, 1U << 30), off_t(first));
            if (got < 0 && errno == EINTR) continue;
            need(got > 0, TXL_BUNDLE, where_, ": became shorter while it was read, expected all of it; load it again");
            to += got, first += got, count -= got;
        }
    }

private:
    void close() const {
        if (handle_ >= 0) ::close(handle_);
    }
    std::string where_;
    int handle_ = -1;
};

class Folder : public Files {
public:
    explicit Folder(const std::string &path) {
        std::error_code error;
        const auto real = fs::canonical(path, error);
        need(!error && fs::is_directory(real, error), TXL_BUNDLE, path,
             ": found no folder, expected a bundle; make one with `txl-deploy export`");
        root_ = real.native();
    }
    [[nodiscard]] std::string folder() const override { return root_; }
    // With the time of change: when a folder was replaced and moved back, device, inode and size are the same again.
    [[nodiscard]] std::string identity(const std::set<std::string> &names) const override {
        std::string found = identity_of(root_);
        for (const auto &name : names) found += identity_of(fs::path(root_) / name);
        return found;
    }

private:
    static std::string identity_of(const fs::path &path) {
        struct stat facts {};
        if (::stat(path.c_str(), &facts)) return "none;";
        return join(facts.st_dev, ',', facts.st_ino, ',', facts.st_size, ',', facts.st_ctim.tv_sec, ',',
                    facts.st_ctim.tv_nsec, ';');
    }
    [[nodiscard]] std::unique_ptr<File> open(const std::string &name) const override {
        return std::make_unique<Plain>(root_, name, where(name));
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
