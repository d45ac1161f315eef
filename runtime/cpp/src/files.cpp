#include "files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "error.hpp"
#include "sha256.hpp"

namespace txl_runtime {
namespace {

namespace fs = std::filesystem;

class Opened {
public:
    Opened(const fs::path &root, const std::string &name, const std::string &where) : where_(where) {
        std::error_code error;
        const auto real = fs::canonical(root / name, error);
        need(!error, TXL_BUNDLE, where, ": missing or unreadable (", error.message(),
             "), expected a file; copy the bundle again");
        const auto inside = root / "";
        need(real.native().compare(0, inside.native().size(), inside.native()) == 0, TXL_BUNDLE, where,
             ": a link that leaves the bundle, expected a plain file in it; copy the bundle again");
        // Nonblocking, so that opening a pipe does not wait for who writes to it.
        handle_ = ::open(real.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        struct stat facts {};
        if (handle_ < 0 || ::fstat(handle_, &facts) || !S_ISREG(facts.st_mode)) {
            const std::string said = handle_ < 0 ? std::strerror(errno) : "no plain file";
            close();
            refuse(TXL_BUNDLE, where, ": ", said, ", expected a plain file; copy the bundle again");
        }
        size = static_cast<std::uint64_t>(facts.st_size);
    }
    ~Opened() { close(); }
    Opened(const Opened &) = delete;
    Opened &operator=(const Opened &) = delete;

    void read(char *to, std::uint64_t count) const {
        while (count) {
            const auto got = ::read(handle_, to, static_cast<std::size_t>(std::min<std::uint64_t>(count, 1U << 30)));
            if (got < 0 && errno == EINTR) continue;
            need(got > 0, TXL_BUNDLE, where_, ": became shorter while it was read, expected all of it; load it again");
            to += got, count -= static_cast<std::uint64_t>(got);
        }
    }
    void seek(std::uint64_t to) const { ::lseek(handle_, static_cast<off_t>(to), SEEK_SET); }
    std::uint64_t size = 0;

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
    [[nodiscard]] std::string read(const std::string &name, std::uint64_t most) const override {
        const Opened file(root_, name, where(name));
        need(file.size <= most, TXL_BUNDLE, where(name), ": ", file.size, " bytes, expected at most ", most,
             "; copy the bundle again");
        std::string content(static_cast<std::size_t>(file.size), '\0');
        file.read(content.data(), file.size);
        return content;
    }
    [[nodiscard]] std::uint64_t size(const std::string &name) const override {
        return Opened(root_, name, where(name)).size;
    }
    [[nodiscard]] std::string hash(const std::string &name) const override {
        const Opened file(root_, name, where(name));
        Sha256 digest;
        std::vector<char> piece(1U << 20);
        for (auto left = file.size; left;) {
            const auto count = std::min<std::uint64_t>(left, piece.size());
            file.read(piece.data(), count);
            digest.add(piece.data(), static_cast<std::size_t>(count));
            left -= count;
        }
        return digest.hex();
    }
    [[nodiscard]] std::string part(const std::string &name, std::uint64_t first, std::uint64_t count) const override {
        const Opened file(root_, name, where(name));
        need(first <= file.size && count <= file.size - first, TXL_BUNDLE, where(name), ": ends at ", file.size,
             ", expected ", count, " bytes from ", first, " on; copy the bundle again");
        file.seek(first);
        std::string content(static_cast<std::size_t>(count), '\0');
        file.read(content.data(), count);
        return content;
    }
    [[nodiscard]] const std::string &folder() const override { return root_; }
    [[nodiscard]] std::string_view held(const std::string &) const override { return {}; }
    [[nodiscard]] std::string where(const std::string &name) const override { return root_ + "/" + name; }

private:
    std::string root_;
};

class Memory : public Files {
public:
    Memory(const txl_file *files, std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) {
            need(files[i].name && (files[i].data || !files[i].bytes), TXL_USAGE, "file ", i,
                 " has no name or no data, expected both; give both");
            held_[files[i].name] = {static_cast<const char *>(files[i].data), files[i].bytes};
        }
    }
    [[nodiscard]] std::string read(const std::string &name, std::uint64_t most) const override {
        need(find(name).size() <= most, TXL_BUNDLE, where(name), ": ", find(name).size(), " bytes, expected at most ",
             most);
        return std::string(find(name));
    }
    [[nodiscard]] std::uint64_t size(const std::string &name) const override { return find(name).size(); }
    [[nodiscard]] std::string hash(const std::string &name) const override {
        return sha256(find(name).data(), find(name).size());
    }
    [[nodiscard]] std::string part(const std::string &name, std::uint64_t first, std::uint64_t count) const override {
        const auto all = find(name);
        need(first <= all.size() && count <= all.size() - first, TXL_BUNDLE, where(name), ": ends at ", all.size(),
             ", expected ", count, " bytes from ", first, " on; give all of it");
        return std::string(all.substr(static_cast<std::size_t>(first), static_cast<std::size_t>(count)));
    }
    [[nodiscard]] const std::string &folder() const override { return none_; }
    [[nodiscard]] std::string_view held(const std::string &name) const override { return find(name); }
    [[nodiscard]] std::string where(const std::string &name) const override { return "memory/" + name; }

private:
    [[nodiscard]] std::string_view find(const std::string &name) const {
        const auto found = held_.find(name);
        need(found != held_.end(), TXL_BUNDLE, where(name), ": missing, expected it among the files; give all files");
        return found->second;
    }
    std::map<std::string, std::string_view> held_;
    std::string none_;
};

}  // namespace

std::unique_ptr<Files> open_folder(const std::string &path) { return std::make_unique<Folder>(path); }

std::unique_ptr<Files> open_memory(const txl_file *files, std::size_t count) {
    return std::make_unique<Memory>(files, count);
}

}  // namespace txl_runtime
