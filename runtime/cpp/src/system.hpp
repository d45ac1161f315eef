// Questions of the library to the operating system: system/posix.cpp answers for Unix, system/windows.cpp for Windows.
// Paths, texts of variables and messages are UTF-8 on all of them.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "files.hpp"

namespace txl_runtime {

#ifdef _WIN32
using SystemPath = std::wstring;
#else
using SystemPath = std::string;
#endif
// Return a path as the system's and the engine's functions take it; empty if it is no UTF-8.
SystemPath system_path(const std::string &path);

// Return the path of a folder with links followed, names parted by "/"; "" if there is no such folder.
std::string real_folder(const std::string &path);
// Open a plain file of a folder that real_folder returned; throw TXL_BUNDLE if it is none, or lies outside.
std::unique_ptr<File> open_plain(const std::string &folder, const std::string &name, const std::string &where);
// Return a text that changes if the file or folder is replaced or written to.
std::string identity_of(const std::string &path);

// Return a variable of the environment; "" if it is not set.
std::string variable(const char *name);

// Return where ONNX Runtime's library is looked for if no one names it.
std::vector<std::string> engine_names();
// Open a library; return null if it cannot be, with the reason in `why`. It is never closed.
void *open_library(const std::string &name, std::string &why);
// Return the address of a library's function; null if it has none of that name.
void *symbol_of(void *library, const char *name);

// A compiled step is opened on Unix alone: platform_name returns "" where none is.
std::string platform_name();  // e.g. Linux-x86_64, as Python has it
bool has_dot_products();      // of a 64-bit Arm
std::int32_t cores();         // number of physical cores for this process; of all processors if that is unknown
// Open code whose hash was checked and that was read from `path`; return null if it cannot be.
void *open_code(const std::string &path, const std::string &code, std::string &why);

}  // namespace txl_runtime
