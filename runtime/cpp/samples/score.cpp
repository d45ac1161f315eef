// Prints how well a model predicts a text, as `txl-deploy score` does: the mean cost of a token and of a byte.
//
//     txl-score demo/model.txl heldout.txt
//
// The text is scored in pieces, with the state carried from one to the next, so that results in memory stay small.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <iterator>

#include "txl.hpp"

#ifdef _WIN32
#define setenv(name, value, over) _putenv_s(name, value)
#endif

namespace {

// Longest segments of one piece. Pieces of whole segments are cut as the whole text would be, so the numbers are equal.
constexpr std::ptrdiff_t SEGMENTS = 16;

std::string read(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    std::string found(std::istreambuf_iterator<char>(file), {});
    if (!file) throw std::runtime_error(path + ": cannot be read, expected a text");
    return found;
}

void run(const std::string &bundle, const std::string &path) {
    const txl::Model model(bundle);
    const auto text = read(path);
    const auto tokens = model.encode(text);
    if (tokens.size() < 2)
        throw std::runtime_error(path + ": holds " + std::to_string(tokens.size()) +
                                 " tokens, expected at least 2, because the first is only context");
    txl::Stream stream(model);
    const auto piece = SEGMENTS * model.info().longest;
    double nats = 0;
    for (auto first = tokens.begin(); tokens.end() - first > 1;) {
        const auto last = first + std::min(piece, tokens.end() - first - 1);
        for (const auto cost : stream.score({first, last + 1})) nats += cost;
        first = last;  // the last token was only a target
    }
    const auto mean = nats / static_cast<double>(tokens.size() - 1);
    std::cout << std::setprecision(12) << "tokens " << tokens.size() << "\nnll " << mean << "\nperplexity "
              << std::exp(mean) << "\nbits_per_token " << mean / std::log(2.0) << '\n';
    // Costs per byte are printed only if the ids decode to the text: unknown words do not.
    if (model.decode(tokens) == text) {
        const auto bytes = text.size() - model.decode({tokens.front()}).size();
        const auto each = nats / static_cast<double>(bytes);
        std::cout << "nats_per_byte " << each << "\nbits_per_byte " << each / std::log(2.0) << '\n';
    }
}

}  // namespace

int main(int count, char **words) {
    if (count != 3) {
        std::cerr << "usage: " << words[0] << " BUNDLE FILE\n";
        return 2;
    }
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);  // newer builds of the engine read it when they are opened
    try {
        run(words[1], words[2]);
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 2;
    }
    return 0;
}
