// The system's side of the library on Linux, macOS and other Unixes.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>
#ifdef __linux__
#include <sched.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "error.hpp"
#include "ranges.hpp"
#include "system.hpp"

#ifdef __APPLE__
#define st_ctim st_ctimespec
#endif

namespace txl_runtime {
namespace {

namespace fs = std::filesystem;

class Plain : public File {
public:
    Plain(const std::string &path, const std::string &where) : where_(where) {
        // Without O_NONBLOCK opening a pipe waits for a writer.
        handle_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
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

}  // namespace

SystemPath system_path(const std::string &path) { return path; }

std::string real_folder(const std::string &path) {
    std::error_code error;
    const auto real = fs::canonical(path, error);
    return !error && fs::is_directory(real, error) ? real.native() : "";
}

std::unique_ptr<File> open_plain(const std::string &folder, const std::string &name, const std::string &where) {
    std::error_code error;
    const auto real = fs::canonical(fs::path(folder) / name, error);
    need(!error, TXL_BUNDLE, where, ": missing or unreadable (", error.message(),
         "), expected a file; copy the bundle again");
    need(starts_with(real.native(), (fs::path(folder) / "").native()), TXL_BUNDLE, where,
         ": a link that leaves the bundle, expected a plain file in it; copy the bundle again");
    return std::make_unique<Plain>(real.native(), where);
}

// With the time of change: when a folder was replaced and moved back, device, inode and size are the same again.
std::string identity_of(const std::string &path) {
    struct stat facts {};
    if (::stat(path.c_str(), &facts)) return "none;";
    return join(facts.st_dev, ',', facts.st_ino, ',', facts.st_size, ',', facts.st_ctim.tv_sec, ',',
                facts.st_ctim.tv_nsec, ';');
}

std::string variable(const char *name) {
    const char *value = std::getenv(name);
    return value ? value : "";
}

std::vector<std::string> engine_names() {
#ifdef __APPLE__
    return {"libonnxruntime.dylib"};
#else
    return {"libonnxruntime.so.1", "libonnxruntime.so"};
#endif
}

void *open_library(const std::string &name, std::string &why) {
    void *library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library) return library;
    why = ::dlerror();
    // The loader also says "No such file" of a library for a different processor.
    if (why.find("No such file") != std::string::npos && name.find('/') != std::string::npos &&
        ::access(name.c_str(), F_OK) == 0)
        why += ", but there is such a file: it may be for another processor";
    return nullptr;
}

void *symbol_of(void *library, const char *name) { return ::dlsym(library, name); }

std::string platform_name() {
    utsname system{};
    ::uname(&system);
    return join(system.sysname, '-', system.machine);
}

bool has_dot_products() {
#if defined(__aarch64__) && defined(__linux__)
    const auto needs = HWCAP_ASIMD | HWCAP_ASIMDDP | HWCAP_ATOMICS;
    return (::getauxval(AT_HWCAP) & needs) == needs;
#else
    return false;
#endif
}

std::int32_t cores() {
    std::set<std::string> found;
#ifdef __linux__
    cpu_set_t usable;
    if (!::sched_getaffinity(0, sizeof usable, &usable))
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
            std::string siblings;
            std::ifstream shared(join("/sys/devices/system/cpu/cpu", cpu, "/topology/thread_siblings_list"));
            if (CPU_ISSET(cpu, &usable) && std::getline(shared, siblings)) found.insert(siblings);
        }
#endif
    return std::max<std::int32_t>(
        1, found.empty() ? std::int32_t(std::thread::hardware_concurrency()) : std::int32_t(found.size()));
}

// On Linux from memory: a file could be replaced after its hash was checked, and the system takes a library of a path
// that it has loaded for the same one.
void *open_code([[maybe_unused]] const std::string &path, [[maybe_unused]] const std::string &code, std::string &why) {
#ifdef __linux__
    const int file = ::memfd_create("txl-native", MFD_CLOEXEC);  // stays open: its number is in the library's path
    if (file < 0 || ::write(file, code.data(), code.size()) != ssize_t(code.size())) {
        why = join(std::strerror(errno), ", expected memory for ", code.size(), " bytes");
        if (file >= 0) ::close(file);
        return nullptr;
    }
    void *library = open_library(join("/proc/self/fd/", file), why);
    if (!library) ::close(file);
    return library;
#else
    return open_library(path, why);
#endif
}

}  // namespace txl_runtime
