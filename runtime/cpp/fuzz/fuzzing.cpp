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

// Return the bytes after one of libFuzzer's own mutations.
std::string bent(std::string bytes) {
    const auto size = bytes.size();
    bytes.resize(size + 16);
    bytes.resize(LLVMFuzzerMutate(reinterpret_cast<std::uint8_t *>(bytes.data()), size, bytes.size()));
    return bytes;
}

// Write `made` over the input; if it is too long, let libFuzzer change the input instead.
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

}  // namespace fuzzing
