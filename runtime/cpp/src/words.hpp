// The vocabulary, which turns text into token ids and back (§ 8).
#pragma once
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "json.hpp"

namespace txl_runtime {

// Return the text of UTF-8 bytes with U+FFFD for what is none, as Python's decoder has it, and set `used`: unless it is
// the `end`, the bytes behind these, 3 at most, may begin a character.
std::string whole_characters(std::string_view bytes, bool end, std::size_t &used);

class Vocabulary {
public:
    // Read a vocabulary from its file's text; throw TXL_BUNDLE unless it fits `vocab_size` ids.
    Vocabulary(const std::string &text, std::int64_t vocab_size, const std::string &where);
    [[nodiscard]] std::vector<std::int32_t> encode(std::string_view text) const;
    [[nodiscard]] std::string decode(const std::int32_t *tokens, std::size_t count) const;

private:
    void split(std::string_view line, std::vector<std::int32_t> &ids) const;
    [[nodiscard]] std::int32_t id(std::string_view word) const;
    bool bytes_ = false, lower_case_ = false, white_ = true;  // white_: white space separates words
    std::vector<std::string> symbols_;
    std::map<std::string, std::int32_t, std::less<>> ids_;
    std::int64_t unknown_ = -1, line_start_ = -1, line_end_ = -1;
    std::string delimiter_;
};

}  // namespace txl_runtime
