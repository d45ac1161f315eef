// The one exception of the library, with the code that says whose fault it is. c_api.cpp catches all exceptions.
//
// The namespace is not txl, which is that of txl.hpp: one program may contain both.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "txl.h"

namespace txl_runtime {

struct Refused : std::runtime_error {
    Refused(txl_code why, const std::string &said) : std::runtime_error(said), code(why) {}
    txl_code code;
};

// Join the parts to one sentence, e.g. join("b is ", 3) is "b is 3".
template <typename... Parts>
std::string join(const Parts &...parts) {
    std::ostringstream text;
    text.imbue(std::locale::classic());
    (text << ... << parts);
    return text.str();
}

// Throw a sentence that says what was found, what was expected and what to do.
template <typename... Parts>
[[noreturn]] void refuse(txl_code code, const Parts &...parts) {
    throw Refused(code, join(parts...));
}

template <typename... Parts>
void need(bool holds, txl_code code, const Parts &...parts) {
    if (!holds) refuse(code, parts...);
}

// Return numbers as a message shows them, e.g. "[2, 3]".
template <typename Numbers>
std::string listed(const Numbers &numbers) {
    std::string text = "[";
    for (auto number : numbers) text += (text.size() > 1 ? ", " : "") + std::to_string(number);
    return text + "]";
}

// The same text, made only when a message is: a step that is not refused allocates nothing for it.
template <typename Numbers>
struct Listed {
    const Numbers &numbers;
    friend std::ostream &operator<<(std::ostream &to, const Listed &list) { return to << listed(list.numbers); }
};
template <typename Numbers>
Listed(const Numbers &) -> Listed<Numbers>;

// Cut a name to 80 bytes: a hostile bundle may hold names of any length.
inline std::string brief(const std::string &name) { return name.size() > 80 ? name.substr(0, 80) + "..." : name; }

// Return one line of at most `most` bytes that any terminal can show. Bytes that are neither printable ASCII nor of a
// character of Latin-1 in UTF-8 are escaped, e.g. a line end as \x0a.
std::string printable(const std::string &text, std::size_t most);

}  // namespace txl_runtime
