#include "error.hpp"

#include <cstdio>

namespace txl_runtime {

std::string printable(const std::string &text, std::size_t most) {
    std::string line;
    for (std::size_t at = 0; at < text.size();) {
        const auto byte = static_cast<unsigned char>(text[at]);
        const auto next = at + 1 < text.size() ? static_cast<unsigned char>(text[at + 1]) : 0U;
        std::string sign;
        std::size_t taken = 1;
        if (byte >= 0x20 && byte < 0x7f) {
            sign = char(byte);
        } else if ((byte == 0xc2 && next >= 0xa1 && next <= 0xbf && next != 0xad) ||
                   (byte == 0xc3 && next >= 0x80 && next <= 0xbf)) {
            sign = text.substr(at, taken = 2);
        } else {
            char code[8];
            std::snprintf(code, sizeof code, "\\x%02x", byte);
            sign = code;
        }
        if (line.size() + sign.size() > most) break;
        line += sign;
        at += taken;
    }
    return line;
}

}  // namespace txl_runtime
