#include "words.hpp"

#include <algorithm>

#include "error.hpp"
#include "ranges.hpp"

namespace txl_runtime {
namespace {

// The length of the UTF-8 character at a place, and its number; 0 where there is none.
std::size_t character(std::string_view text, std::size_t at, std::uint32_t &code) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[at + i]); };
    const auto first = byte(0);
    const std::size_t length = first < 0x80                    ? 1
                               : first >= 0xc2 && first < 0xe0 ? 2
                               : first >= 0xe0 && first < 0xf0 ? 3
                               : first >= 0xf0 && first < 0xf5 ? 4
                                                               : 0;
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

// What Python's str.isspace says.
bool is_white(std::uint32_t code) {
    return (code >= 9 && code <= 13) || (code >= 28 && code <= 32) || code == 0x85 || code == 0xa0 || code == 0x1680 ||
           (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f ||
           code == 0x3000;
}

}  // namespace

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
        ids_[symbol] = std::int32_t(symbols_.size());  // of symbols that are alike the last
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
    bool plain = true;
    for (std::size_t at = 0; at < text.size();) {
        std::uint32_t code = 0;
        const auto length = character(text, at, code);
        need(length > 0, TXL_USAGE, "the text is not UTF-8 at byte ", at, ", expected text; convert it first");
        plain = plain && length == 1;
        at += length;
    }
    need(plain || !lower_case_, TXL_UNSUPPORTED,
         "the vocabulary has lower_case and the text is not ASCII, which needs tables of Unicode; encode it with "
         "txl_runtime from Python");
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
    std::string lowered(line);
    if (lower_case_)
        ranges::transform(line, lowered.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? char(c + 32) : c; });
    line = lowered;
    std::vector<std::pair<std::size_t, std::size_t>> words;  // between white space: where they begin and end
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
