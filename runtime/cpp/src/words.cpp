#include "words.hpp"

#include <algorithm>
#include <array>

#include "error.hpp"
#include "ranges.hpp"

namespace txl_runtime {
namespace {

// Return the bytes of a UTF-8 character by its first one; 0: none begins with it.
std::size_t length_by(unsigned char first) {
    return first < 0x80                    ? 1
           : first >= 0xc2 && first < 0xe0 ? 2
           : first >= 0xe0 && first < 0xf0 ? 3
           : first >= 0xf0 && first < 0xf5 ? 4
                                           : 0;
}

// Return the bytes of the UTF-8 character at a place, 0 if it is invalid, and set its code point.
std::size_t character(std::string_view text, std::size_t at, std::uint32_t &code) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[at + i]); };
    const auto first = byte(0);
    const auto length = length_by(first);
    if (!length || at + length > text.size()) return 0;
    code = length == 1 ? first : first & (0xffU >> (length + 1));
    for (std::size_t i = 1; i < length; ++i) {
        if ((byte(i) & 0xc0) != 0x80) return 0;
        code = code << 6 | (byte(i) & 0x3fU);
    }
    const bool sound = (length < 3 || code >= (length == 3 ? 0x800U : 0x10000U)) && code <= 0x10ffff &&
                       (code < 0xd800 || code > 0xdfff);
    return sound ? length : 0;
}

// Return what Python's str.isspace does for one character.
bool is_white(std::uint32_t code) {
    return (code >= 9 && code <= 13) || (code >= 28 && code <= 32) || code == 0x85 || code == 0xa0 || code == 0x1680 ||
           (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f ||
           code == 0x3000;
}

void write(std::string &text, std::uint32_t code) {
    const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    text += char(more ? (0xff00U >> (more + 1) & 0xffU) | code >> 6 * more : code);
    for (int i = more; i-- > 0;) text += char(0x80U | (code >> 6 * i & 0x3fU));
}

// The table of Python's str.lower for single characters: sorted rows that begin with their first and last code.
struct Cases {
    std::vector<std::array<std::int32_t, 4>> lower;  // every n-th code of the row changes, by how much
    std::vector<std::array<std::int32_t, 3>> kinds;  // CASED, or IGNORABLE next to a sigma
};
constexpr int CASED = 1, IGNORABLE = 2;

const Cases &cases() {
    static const auto found = [] {
        const auto table = parse_json(published_cases(), "the table of cases");
        return Cases{table["lower"], table["kinds"]};
    }();
    return found;
}

// Return the row of a character; null if it has none.
template <typename Row>
const Row *row_of(const std::vector<Row> &rows, std::uint32_t code) {
    const auto number = std::int32_t(code);
    const auto behind =
        std::upper_bound(rows.begin(), rows.end(), number, [](auto n, const Row &row) { return n < row[0]; });
    return behind == rows.begin() || behind[-1][1] < number ? nullptr : &behind[-1];
}

int kind_of(std::uint32_t code) {
    const auto *row = row_of(cases().kinds, code);
    return row ? (*row)[2] : 0;
}

// Return true if a sigma ends a word: there it becomes U+03C2, elsewhere U+03C3.
bool is_final(const std::vector<std::uint32_t> &codes, std::size_t at) {
    auto before = at, behind = at + 1;
    while (before > 0 && kind_of(codes[before - 1]) == IGNORABLE) --before;
    while (behind < codes.size() && kind_of(codes[behind]) == IGNORABLE) ++behind;
    return before > 0 && kind_of(codes[before - 1]) == CASED &&
           !(behind < codes.size() && kind_of(codes[behind]) == CASED);
}

std::string lower_case(std::string_view text) {
    std::vector<std::uint32_t> codes;
    for (std::size_t at = 0; at < text.size();) at += character(text, at, codes.emplace_back());
    std::string lowered;
    for (std::size_t i = 0; i < codes.size(); ++i) {
        const auto code = codes[i];
        const auto *row = row_of(cases().lower, code);
        const bool changes = row && (std::int32_t(code) - (*row)[0]) % (*row)[2] == 0;
        if (code == 0x130)  // the one letter that becomes two characters
            lowered += "i\u0307";
        else
            write(lowered, code == 0x3a3 && is_final(codes, i) ? 0x3c2
                           : changes                           ? code + std::uint32_t((*row)[3])
                                                               : code);
    }
    return lowered;
}

}  // namespace

std::string whole_characters(std::string_view bytes, bool end, std::size_t &used) {
    std::string text;
    for (used = 0; used < bytes.size();) {
        const auto first = static_cast<unsigned char>(bytes[used]);
        const auto length = length_by(first);
        // The second byte's range excludes overlong forms, surrogates and codes above U+10FFFF.
        unsigned low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
        unsigned high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
        std::size_t there = 1;
        for (; there < length && used + there < bytes.size(); ++there, low = 0x80, high = 0xbf) {
            const auto next = static_cast<unsigned char>(bytes[used + there]);
            if (next < low || next > high) break;
        }
        if (there == length)
            text += bytes.substr(used, length);
        else if (length && !end && used + there == bytes.size())
            return text;
        else
            text += "\uFFFD";
        used += there;
    }
    return text;
}

Vocabulary::Vocabulary(const std::string &text, std::int64_t vocab_size, const std::string &where) {
    const auto sound = [&](bool holds, const std::string &what) {
        need(holds, TXL_BUNDLE, where, ": ", what, ", expected a vocabulary; export the model again");
    };
    const auto found = parse_json(text, where);
    sound(found.is_object() && found.contains("kind"), "has no kind");
    if (found["kind"] == "bytes") {
        bytes_ = true;
        sound(vocab_size == 256, "a byte vocabulary has 256 ids, the model " + std::to_string(vocab_size));
        return;
    }
    sound(found["kind"] == "words" && found.contains("symbols") && found["symbols"].is_array(), "is of no known kind");
    for (const auto &symbol : found["symbols"]) {
        sound(symbol.is_string(), "has a symbol that is no text");
        ids_[symbol] = std::int32_t(symbols_.size());  // of equal symbols the last id wins
        symbols_.push_back(symbol);
    }
    sound(!symbols_.empty() && std::int64_t(symbols_.size()) <= vocab_size,
          "has " + std::to_string(symbols_.size()) + " symbols for " + std::to_string(vocab_size) + " ids");
    for (auto [name, into] :
         {std::pair("unknown", &unknown_), {"line_start", &line_start_}, {"line_end", &line_end_}}) {
        if (!found.contains(name) || found[name].is_null()) continue;
        sound(found[name].is_number_unsigned() && found[name].get<std::uint64_t>() < symbols_.size(),
              std::string("its ") + name + " is no id of it");
        *into = found[name];
    }
    if (found.contains("lower_case")) {
        sound(found["lower_case"].is_boolean(), "its lower_case is no truth");
        lower_case_ = found["lower_case"];
    }
    if (found.contains("delimiter") && !found["delimiter"].is_null()) {
        sound(found["delimiter"].is_string(), "its delimiter is no text");
        delimiter_ = found["delimiter"], white_ = false;
    }
}

std::vector<std::int32_t> Vocabulary::encode(std::string_view text) const {
    std::vector<std::int32_t> ids;
    if (bytes_) {
        for (const char byte : text) ids.push_back(static_cast<unsigned char>(byte));
        return ids;
    }
    for (std::size_t at = 0; at < text.size();) {
        std::uint32_t code = 0;
        const auto length = character(text, at, code);
        need(length > 0, TXL_USAGE, "the text is not UTF-8 at byte ", at, ", expected text; convert it first");
        at += length;
    }
    for (std::size_t at = 0; at < text.size();) {
        const auto end = std::min(text.find_first_of("\r\n", at), text.size());
        if (line_start_ >= 0) ids.push_back(std::int32_t(line_start_));
        split(text.substr(at, end - at), ids);
        if (line_end_ >= 0 && end < text.size()) ids.push_back(std::int32_t(line_end_));
        at = end + (text.substr(end, 2) == "\r\n" ? 2 : 1);
    }
    return ids;
}

void Vocabulary::split(std::string_view line, std::vector<std::int32_t> &ids) const {
    const auto lowered = lower_case_ ? lower_case(line) : std::string();
    if (lower_case_) line = lowered;
    std::vector<std::pair<std::size_t, std::size_t>> words;  // [begin, end) of each word between white space
    for (std::size_t at = 0, end = line.size(); at < line.size();) {
        std::uint32_t code = 0;
        const auto length = character(line, at, code);
        if (!is_white(code) && end != at) words.emplace_back(at, at);
        at += length;
        if (!is_white(code)) words.back().second = end = at;
    }
    if (words.empty()) return;
    if (white_) {
        for (const auto &[begin, end] : words) ids.push_back(id(line.substr(begin, end - begin)));
        return;
    }
    line = line.substr(words.front().first, words.back().second - words.front().first);
    for (std::size_t at = 0, end = 0; end != std::string_view::npos; at = end + delimiter_.size()) {
        std::uint32_t code = 0;
        end = !delimiter_.empty() ? line.find(delimiter_, at) : at + character(line, at, code);
        ids.push_back(id(line.substr(at, end - at)));
        if (delimiter_.empty() && end == line.size()) return;
    }
}

std::int32_t Vocabulary::id(std::string_view word) const {
    const auto found = ids_.find(word);
    if (found != ids_.end()) return found->second;
    need(unknown_ >= 0, TXL_USAGE, "'", brief(std::string(word)), "' is not among the ", symbols_.size(),
         " words of the vocabulary, which has no unknown one; give a text of its words, or token ids");
    return std::int32_t(unknown_);
}

std::string Vocabulary::decode(const std::int32_t *tokens, std::size_t count) const {
    std::string text;
    for (std::size_t i = 0; i < count; ++i) {
        const auto token = tokens[i];
        need(token >= 0 && (!bytes_ || token < 256), TXL_USAGE, "token ", i, " is ", token,
             ", expected an id of the vocabulary; look where it comes from");
        if (bytes_) {
            text += char(token);
        } else if (token == line_end_) {
            text += '\n';
        } else {
            const auto known = std::size_t(token) < symbols_.size();
            text += known ? symbols_[token] : join("<", token, ">");
            text += white_ ? " " : delimiter_;
        }
    }
    return text;
}

}  // namespace txl_runtime
