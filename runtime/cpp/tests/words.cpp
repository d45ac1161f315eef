// Reads a vocabulary, a line of JSON, and then texts, each a line of JSON; tells the ids of each.
// tests/cpp/test_words.py holds them against Python's.
#include "words.hpp"

#include <iostream>

int main() {
    std::string line;
    std::getline(std::cin, line);
    const txl_runtime::Vocabulary vocabulary(line, 1 << 21, "the vocabulary");
    while (std::getline(std::cin, line))
        std::cout << txl_runtime::Json(vocabulary.encode(txl_runtime::Json::parse(line).get<std::string>())) << "\n";
}
