// What is refused, and whose fault it is. Exceptions end at the C functions, in c_api.cpp.
//
// The library's own names are in a namespace that txl.hpp has not: both may stand in one program.
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

// Joins what is given to one sentence.
template <typename... Parts>
std::string join(const Parts &...parts) {
    std::ostringstream text;
    text.imbue(std::locale::classic());
    (text << ... << parts);
    return text.str();
}

// A sentence says what was found, what was expected and what to do.
template <typename... Parts>
[[noreturn]] void refuse(txl_code code, const Parts &...parts) {
    throw Refused(code, join(parts...));
}

template <typename... Parts>
void need(bool holds, txl_code code, const Parts &...parts) {
    if (!holds) refuse(code, parts...);
}

// Sizes as a message shows them.
template <typename Numbers>
std::string listed(const Numbers &numbers) {
    std::string text = "[";
    for (auto number : numbers) text += (text.size() > 1 ? ", " : "") + std::to_string(number);
    return text + "]";
}

// The same, written out only where a message is made: steps take no memory for what is not said.
template <typename Numbers>
struct Listed {
    const Numbers &numbers;
    friend std::ostream &operator<<(std::ostream &to, const Listed &list) { return to << listed(list.numbers); }
};
template <typename Numbers>
Listed(const Numbers &) -> Listed<Numbers>;

// A name that may be of any length and hold anything.
inline std::string brief(const std::string &name) { return name.size() > 80 ? name.substr(0, 80) + "..." : name; }

// One line that any terminal can show, and that fits: what is neither ASCII nor a letter of Latin-1 is escaped.
std::string printable(const std::string &text, std::size_t most);

}  // namespace txl_runtime
