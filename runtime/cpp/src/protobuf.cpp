#include "protobuf.hpp"

#include <cstring>

namespace txl_runtime {
namespace {

[[noreturn]] void cut_off(const char *name) { throw GraphRefused{std::string(name) + " that is cut off", "all of it"}; }

// A whole number of at most 64 bits in its shortest form.
std::uint64_t varint(std::string_view message, std::size_t &at, const char *name) {
    std::uint64_t value = 0;
    for (unsigned shift = 0;; shift += 7) {
        if (at >= message.size()) cut_off(name);
        const auto byte = static_cast<unsigned char>(message[at++]);
        if (shift > 63 || (shift == 63 && byte > 1)) throw GraphRefused{"a number of more than 64 bits", "at most 64"};
        value |= std::uint64_t(byte & 127U) << shift;
        if (byte >= 128) continue;
        if (byte == 0 && shift > 0) throw GraphRefused{"a number with zeros before it", "its shortest form"};
        return value;
    }
}

// Whether a list such as "1b 2b" has a field, and how it is stored there.
bool listed(const char *list, std::uint64_t tag) {
    for (const char *at = list; *at;) {
        std::uint64_t number = 0;
        while (*at >= '0' && *at <= '9') number = 10 * number + std::uint64_t(*at++ - '0');
        const std::uint64_t kind = *at == 'v' ? 0 : *at == 'b' ? 2 : *at == 'f' ? 5 : 1;
        if (tag == (number << 3 | kind)) return true;
        at += at[1] ? 2 : 1;
    }
    return false;
}

}  // namespace

std::vector<Field> fields(std::string_view message, const Known &known) {
    std::vector<Field> found;
    std::uint64_t seen = 0;  // by number, which is below 64 in every table
    for (std::size_t at = 0; at < message.size();) {
        const auto tag = varint(message, at, known.name);
        const bool once = listed(known.once, tag);
        if (!once && !listed(known.many, tag))
            throw GraphRefused{"a field " + std::to_string(tag >> 3) + " in " + known.name, "those that graphs need"};
        if (once && seen >> (tag >> 3) & 1U)
            throw GraphRefused{"two fields " + std::to_string(tag >> 3) + " in " + known.name, "one"};
        if (once) seen |= 1ULL << (tag >> 3);
        Field field{int(tag >> 3), 0, {}};
        const auto kind = tag & 7U;
        auto size = kind == 5 ? 4 : kind == 1 ? 8 : varint(message, at, known.name);
        if (kind == 0) {
            field.value = size;
        } else {
            if (size > message.size() - at) cut_off(known.name);
            field.bytes = message.substr(at, std::size_t(size));
            at += std::size_t(size);
        }
        found.push_back(field);
    }
    return found;
}

std::vector<std::int64_t> wholes(const Field &field) {
    if (!field.bytes.data()) return {std::int64_t(field.value)};
    std::vector<std::int64_t> found;
    for (std::size_t at = 0; at < field.bytes.size();) found.push_back(varint(field.bytes, at, "numbers"));
    return found;
}

}  // namespace txl_runtime
