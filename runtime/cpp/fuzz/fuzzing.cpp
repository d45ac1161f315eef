#include "fuzzing.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t *data, std::size_t size, std::size_t room);

namespace fuzzing {
namespace {

using Json = nlohmann::json;
using Random = std::minstd_rand;

struct Tally {
    std::size_t accepted = 0, all = 0;
    ~Tally() { std::fprintf(stderr, "accepted %zu of %zu\n", accepted, all); }
} tally;

// Bytes changed as libFuzzer does it.
std::string bent(std::string bytes) {
    const auto size = bytes.size();
    bytes.resize(size + 16);
    bytes.resize(LLVMFuzzerMutate(reinterpret_cast<std::uint8_t *>(bytes.data()), size, bytes.size()));
    return bytes;
}

// Puts what was made where the input was, unless it is too long.
std::size_t put(const std::string &made, std::uint8_t *data, std::size_t size, std::size_t room) {
    if (made.size() > room) return LLVMFuzzerMutate(data, size, room);
    std::copy(made.begin(), made.end(), data);
    return made.size();
}

void gather(Json &document, std::vector<Json *> &all) {
    all.push_back(&document);
    if (document.is_structured())
        for (auto &inner : document) gather(inner, all);
}

void change(Json &document, Random &random) {
    static const Json OTHERS[] = {0,
                                  1,
                                  2,
                                  3,
                                  -1,
                                  64,
                                  2147483647,
                                  2147483648,
                                  1e300,
                                  0.5,
                                  4294967296,
                                  9223372036854775807LL,
                                  true,
                                  "",
                                  nullptr,
                                  18446744073709551615ULL,
                                  "B",
                                  Json::array(),
                                  Json::object(),
                                  4611686018427387904LL};
    std::vector<Json *> all;
    gather(document, all);
    auto &one = *all[random() % all.size()];
    const Json other = *all[random() % all.size()];
    switch (random() % 6) {
        case 0:
            one = other;
            break;
        case 1:
            one = OTHERS[random() % (sizeof OTHERS / sizeof *OTHERS)];
            break;
        case 2:
            if (one.is_structured() && !one.empty())
                one.erase(std::next(one.begin(), static_cast<std::ptrdiff_t>(random() % one.size())));
            break;
        case 3:
            if (one.is_array())
                one.push_back(one.empty() ? other : one[random() % one.size()]);
            else if (one.is_object() && !one.empty())
                one[bent(std::next(one.begin(), static_cast<std::ptrdiff_t>(random() % one.size())).key())] = other;
            break;
        case 4:
            if (one.is_number_integer()) one = one.get<std::uint64_t>() + (random() % 2 ? 1 : ~std::uint64_t{0});
            if (one.is_string()) one = bent(one);
            break;
        default:
            if (one.is_array() && one.size() > 1) std::swap(one[random() % one.size()], one[random() % one.size()]);
    }
}

std::optional<std::string> changed_json(std::string_view text, Random &random) {
    auto document = Json::parse(text.begin(), text.end(), nullptr, false);
    if (document.is_discarded()) return {};
    for (auto times = 1 + random() % 3; times--;) change(document, random);
    return document.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// A field of a message, whose bytes are again a message where they can be.
struct Piece {
    std::uint64_t key = 0, value = 0;
    std::string bytes;
    std::optional<std::vector<Piece>> inner{};
};

std::optional<std::uint64_t> varint(std::string_view &left) {
    std::uint64_t number = 0;
    for (unsigned shift = 0; shift < 64 && !left.empty(); shift += 7) {
        const auto byte = static_cast<unsigned char>(left[0]);
        left.remove_prefix(1);
        number |= std::uint64_t{byte & 127U} << shift;
        if (byte < 128) return number;
    }
    return {};
}

std::optional<std::vector<Piece>> pieces(std::string_view left, int depth = 0) {
    std::vector<Piece> found;
    while (!left.empty()) {
        Piece piece;
        const auto key = varint(left);
        if (!key || *key < 8 || *key >> 3 > 64) return {};
        piece.key = *key;
        std::uint64_t length = 0;
        switch (*key & 7U) {
            case 0: {
                const auto value = varint(left);
                if (!value) return {};
                piece.value = *value;
                break;
            }
            case 1:
                length = 8;
                break;
            case 5:
                length = 4;
                break;
            case 2: {
                const auto told = varint(left);
                if (!told) return {};
                length = *told;
                break;
            }
            default:
                return {};
        }
        if (length > left.size()) return {};
        piece.bytes = left.substr(0, static_cast<std::size_t>(length));
        left.remove_prefix(static_cast<std::size_t>(length));
        if ((*key & 7U) == 2 && length && depth < 12) piece.inner = pieces(piece.bytes, depth + 1);
        found.push_back(std::move(piece));
    }
    return found;
}

void write_varint(std::string &into, std::uint64_t number) {
    for (; number > 127; number >>= 7) into += static_cast<char>(number | 128U);
    into += static_cast<char>(number);
}

std::string written(const std::vector<Piece> &message) {
    std::string found;
    for (const auto &piece : message) {
        write_varint(found, piece.key);
        const auto kind = piece.key & 7U;
        const auto bytes = piece.inner ? written(*piece.inner) : piece.bytes;
        if (kind == 0) write_varint(found, piece.value);
        if (kind == 2) write_varint(found, bytes.size());
        if (kind) found += bytes;
    }
    return found;
}

void gather(std::vector<Piece> &message, std::vector<std::vector<Piece> *> &all) {
    if (!message.empty()) all.push_back(&message);
    for (auto &piece : message)
        if (piece.inner) gather(*piece.inner, all);
}

void change(std::vector<Piece> &message, Random &random) {
    static const std::uint64_t NUMBERS[] = {0, 1, 2, 7, 11, 16, 18, 24, 0x7fffffff, 1ULL << 32, 1ULL << 62, ~0ULL};
    std::vector<std::vector<Piece> *> all;
    gather(message, all);
    if (all.empty()) return;
    auto &many = *all[random() % all.size()];
    const auto &others = *all[random() % all.size()];
    const auto at = random() % many.size();
    const Piece other = others[random() % others.size()];
    switch (random() % 6) {
        case 0:
            many.erase(many.begin() + static_cast<std::ptrdiff_t>(at));
            break;
        case 1:
            many.push_back(other);
            break;
        case 2:
            many[at] = other;
            break;
        case 3:
            std::swap(many[at], many[random() % many.size()]);
            break;
        default:
            if ((many[at].key & 7U) == 0)
                many[at].value = random() % 2 ? NUMBERS[random() % (sizeof NUMBERS / sizeof *NUMBERS)]
                                              : many[at].value + (random() % 2 ? 1 : ~std::uint64_t{0});
            else if (const auto long_as_before = many[at].bytes.size(); !many[at].inner) {
                many[at].bytes = bent(many[at].bytes);
                if ((many[at].key & 7U) != 2) many[at].bytes.resize(long_as_before);
            }
    }
}

}  // namespace

void hold(bool holds, const char *what) {
    if (holds) return;
    std::fprintf(stderr, "it does not hold: %s\n", what);
    std::abort();
}

void count(bool accepted) { tally.accepted += accepted, ++tally.all; }

std::size_t change_json(std::uint8_t *data, std::size_t size, std::size_t room, unsigned seed) {
    Random random(seed);
    const auto made = random() % 8 ? changed_json(text_of(data, size), random) : std::nullopt;
    return made ? put(*made, data, size, room) : LLVMFuzzerMutate(data, size, room);
}

std::size_t change_tensors(std::uint8_t *data, std::size_t size, std::size_t room, unsigned seed) {
    Random random(seed);
    std::uint64_t length = 0;
    if (size >= 8)
        for (std::size_t i = 8; i-- > 0;) length = length << 8 | data[i];
    if (size < 8 || length > size - 8 || random() % 8 == 0) return LLVMFuzzerMutate(data, size, room);
    const auto text = text_of(data + 8, static_cast<std::size_t>(length));
    const auto header = changed_json(text, random);
    if (!header) return LLVMFuzzerMutate(data, size, room);
    std::string made(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) made[i] = static_cast<char>(header->size() >> (8 * i));
    made += *header;
    made.append(text.data() + text.size(), size - 8 - text.size());
    return put(made, data, size, room);
}

std::size_t change_messages(std::uint8_t *data, std::size_t size, std::size_t room, unsigned seed) {
    Random random(seed);
    auto message = random() % 8 ? pieces(text_of(data, size)) : std::nullopt;
    if (!message) return LLVMFuzzerMutate(data, size, room);
    for (auto times = 1 + random() % 3; times--;) change(*message, random);
    return put(written(*message), data, size, room);
}

}  // namespace fuzzing
