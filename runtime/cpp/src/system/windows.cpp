// The system's side of the library on Windows, by the functions of wide characters: those of narrow ones take paths in
// the code page of the machine.
#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <algorithm>

#include "error.hpp"
#include "ranges.hpp"
#include "system.hpp"

namespace txl_runtime {

SystemPath system_path(const std::string &path) {
    const auto size = int(path.size());
    std::wstring found(std::size_t(::MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path.data(), size, nullptr, 0)),
                       L'\0');
    ::MultiByteToWideChar(CP_UTF8, 0, path.data(), size, found.data(), int(found.size()));
    return found;
}

namespace {

constexpr DWORD SHARED = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;

std::string narrow(const std::wstring &text) {
    const auto size = int(text.size());
    std::string found(
        std::size_t(::WideCharToMultiByte(CP_UTF8, 0, text.data(), size, nullptr, 0, nullptr, nullptr)), '\0');
    ::WideCharToMultiByte(CP_UTF8, 0, text.data(), size, found.data(), int(found.size()), nullptr, nullptr);
    return found;
}

// Call a function that returns how many characters it wrote, or, if there was no room, how many it needs; return them.
template <typename Call>
std::wstring written(Call call) {
    std::wstring found(MAX_PATH, L'\0');
    for (;;) {
        const auto count = call(found.data(), DWORD(found.size()));
        const bool fits = count < found.size();
        found.resize(count + std::size_t(!fits));  // some count the final 0, and some do not
        if (fits) return found;
    }
}

std::wstring full(const std::string &path) {
    const auto given = system_path(path);
    if (given.empty() || given.find(L'\0') != std::wstring::npos) return L"";
    return written([&](wchar_t *to, DWORD room) { return ::GetFullPathNameW(given.c_str(), room, to, nullptr); });
}

// Return what Windows says of its latest error.
std::string said() {
    const auto error = ::GetLastError();
    wchar_t text[256] = L"";
    ::FormatMessageW(FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS | FORMAT_MESSAGE_MAX_WIDTH_MASK,
                     nullptr, error, 0, text, 256, nullptr);
    auto found = narrow(text);
    while (!found.empty() && (found.back() == ' ' || found.back() == '.')) found.pop_back();
    return join(found, found.empty() ? "" : ", ", "error ", error, " of Windows");
}

// An open file or folder.
class Handle {
public:
    // Without "\\?\" in front, a path may have 260 characters, and names like NUL are devices. Folders need `flags`.
    Handle(const std::string &path, DWORD access, DWORD flags) {
        const auto place = full(path);
        const bool plain = place.rfind(L"\\\\", 0) != 0;
        held_ = place.empty() ? INVALID_HANDLE_VALUE
                              : ::CreateFileW(((plain ? L"\\\\?\\" : L"") + place).c_str(), access, SHARED, nullptr,
                                              OPEN_EXISTING, flags, nullptr);
    }
    ~Handle() {
        if (*this) ::CloseHandle(held_);
    }
    Handle(const Handle &) = delete;
    Handle &operator=(const Handle &) = delete;
    explicit operator bool() const { return held_ != INVALID_HANDLE_VALUE; }
    [[nodiscard]] HANDLE get() const { return held_; }

    // Return the path with links followed: C:/models/a, or //server/share/a.
    [[nodiscard]] std::string path() const {
        auto found = narrow(written([&](wchar_t *to, DWORD room) {
            return ::GetFinalPathNameByHandleW(held_, to, room, FILE_NAME_NORMALIZED | VOLUME_NAME_DOS);
        }));
        std::replace(found.begin(), found.end(), '\\', '/');
        if (starts_with(found, "//?/UNC/")) return "//" + found.substr(8);
        return starts_with(found, "//?/") ? found.substr(4) : found;
    }

private:
    HANDLE held_;
};

class Plain : public File {
public:
    Plain(const std::string &folder, const std::string &where)
        : where_(where), file_(where, GENERIC_READ, FILE_FLAG_BACKUP_SEMANTICS) {
        need(bool(file_), TXL_BUNDLE, where, ": missing or unreadable (", said(),
             "), expected a file; copy the bundle again");
        // A drive's own folder, C:/, ends so already.
        need(starts_with(file_.path(), ends_with(folder, "/") ? folder : folder + "/"), TXL_BUNDLE, where,
             ": a link that leaves the bundle, expected a plain file in it; copy the bundle again");
        BY_HANDLE_FILE_INFORMATION facts{};
        need(::GetFileType(file_.get()) == FILE_TYPE_DISK && ::GetFileInformationByHandle(file_.get(), &facts) &&
                 !(facts.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY),
             TXL_BUNDLE, where, ": no plain file, expected a plain file; copy the bundle again");
        size = std::uint64_t(facts.nFileSizeHigh) << 32 | facts.nFileSizeLow;
    }

    void read(char *to, std::uint64_t first, std::uint64_t count) const override {
        while (count) {
            OVERLAPPED place{};
            place.Offset = DWORD(first), place.OffsetHigh = DWORD(first >> 32);
            DWORD got = 0;
            const auto wanted = DWORD(std::min<std::uint64_t>(count, 1U << 30));
            need(::ReadFile(file_.get(), to, wanted, &got, &place) && got, TXL_BUNDLE, where_,
                 ": became shorter while it was read, expected all of it; load it again");
            to += got, first += got, count -= got;
        }
    }

private:
    std::string where_;
    Handle file_;
};

// Return the folder of the program, plugin or library that this function was linked into, with a final "\".
std::wstring own_folder() {
    HMODULE own = nullptr;
    ::GetModuleHandleExW(
        GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
        reinterpret_cast<const wchar_t *>(&own_folder), &own);
    std::wstring found(1U << 15, L'\0');  // the longest path; what is too long is cut without a word of its size
    found.resize(::GetModuleFileNameW(own, found.data(), DWORD(found.size())));
    return found.substr(0, found.find_last_of(L'\\') + 1);
}

}  // namespace

std::string real_folder(const std::string &path) {
    const Handle folder(path, 0, FILE_FLAG_BACKUP_SEMANTICS);
    BY_HANDLE_FILE_INFORMATION facts{};
    const bool holds = folder && ::GetFileInformationByHandle(folder.get(), &facts) &&
                       facts.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY;
    return holds ? folder.path() : "";
}

std::unique_ptr<File> open_plain(const std::string &folder, const std::string &, const std::string &where) {
    return std::make_unique<Plain>(folder, where);
}

std::string identity_of(const std::string &path) {
    const Handle file(path, 0, FILE_FLAG_BACKUP_SEMANTICS);
    BY_HANDLE_FILE_INFORMATION facts{};
    FILE_BASIC_INFO times{};
    if (!file || !::GetFileInformationByHandle(file.get(), &facts) ||
        !::GetFileInformationByHandleEx(file.get(), FileBasicInfo, &times, sizeof times))
        return "none;";
    return join(facts.dwVolumeSerialNumber, ',', facts.nFileIndexHigh, ',', facts.nFileIndexLow, ',',
                facts.nFileSizeHigh, ',', facts.nFileSizeLow, ',', times.LastWriteTime.QuadPart, ',',
                times.ChangeTime.QuadPart, ';');
}

std::string variable(const char *name) {
    const auto wanted = system_path(name);
    return narrow(written(
        [&](wchar_t *to, DWORD room) { return ::GetEnvironmentVariableW(wanted.c_str(), to, room); }));
}

// Beside the program or plugin alone: the system's own folder has an onnxruntime.dll of Windows' own, of any age, and the
// current folder may be anybody's.
std::vector<std::string> engine_names() { return {"onnxruntime.dll"}; }

void *open_library(const std::string &name, std::string &why) {
    const bool bare = name.find_first_of("/\\:") == std::string::npos;
    const auto place = bare ? own_folder() + system_path(name) : full(name);
    DWORD before = 0;
    ::SetThreadErrorMode(SEM_FAILCRITICALERRORS, &before);  // without it Windows may open a window
    // Libraries that this one needs are looked for beside it first.
    auto *library = ::LoadLibraryExW(place.c_str(), nullptr,
                                     LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR | LOAD_LIBRARY_SEARCH_DEFAULT_DIRS);
    if (!library) why = join(place.empty() ? name : narrow(place), ": ", said());
    ::SetThreadErrorMode(before, nullptr);
    return library;
}

void *symbol_of(void *library, const char *name) {
    return reinterpret_cast<void *>(::GetProcAddress(static_cast<HMODULE>(library), name));
}

// Compiled steps are refused by their name: none is made for Windows, which has no files in memory to open one from.
std::string platform_name() { return ""; }
bool has_dot_products() { return false; }
std::int32_t cores() { return 1; }
void *open_code(const std::string &, const std::string &, std::string &) { return nullptr; }

}  // namespace txl_runtime
