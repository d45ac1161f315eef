// Continues a text with a bundle and remembers earlier runs, as samples/embed.py does in Python.
//
//     txl-generate demo/model.txl "def main(" 200 memory.safetensors --lookup 4
//
// Restores the memory of earlier runs, feeds the text, prints each token as it is drawn, and saves the memory again.
// With --lookup N it tries drafts of up to N tokens from the text so far, for which segments have to give what steps give.
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>

#include "txl.hpp"

#ifdef _WIN32
#define setenv(name, value, over) _putenv_s(name, value)
#endif

namespace {

void write(const std::string &path, const std::string &bytes) {
    // Write a second file and rename it, so that a crash leaves the old memory whole.
    std::ofstream file(path + ".part", std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.close();
    if (!file || std::rename((path + ".part").c_str(), path.c_str()) != 0)
        throw std::runtime_error(path + ": cannot be written");
}

void run(const std::string &bundle, const std::string &text, int tokens, const std::string &memory, int lookup) {
    const txl::Model model(bundle);
    txl::Stream stream(model);
    if (std::ifstream file(memory, std::ios::binary); file)
        stream.restore(std::string(std::istreambuf_iterator<char>(file), {}));

    auto sampling = TXL_NEW(txl_sampling);
    sampling.temperature = 0.7, sampling.top_p = 0.95;
    sampling.seed = 1, sampling.lookup = lookup;
    txl::Sampler sampler(sampling);
    txl::Text said(model);
    auto latest = model.encode(text);
    for (int left = tokens; left > 0;) {
        const auto drawn = stream.next(sampler, latest, left);
        std::cout << said.feed(drawn) << std::flush;
        left -= static_cast<int>(drawn.size());
        latest = {drawn.back()};
    }
    stream.feed(latest);
    std::cout << said.finish() << std::flush;
    std::cerr << "\n[memory: " << stream.fill() << " of " << model.info().memory_length << " rows per layer]\n";
    if (!memory.empty()) write(memory, stream.save());
}

}  // namespace

int main(int count, char **words) {
    std::vector<std::string> given(words + 1, words + count);
    int lookup = 0;
    if (given.size() > 3 && given[given.size() - 2] == "--lookup") {
        lookup = std::atoi(given.back().c_str());
        given.resize(given.size() - 2);
    }
    if (given.size() < 2 || given.size() > 4) {
        std::cerr << "usage: " << words[0] << " BUNDLE TEXT [TOKENS] [MEMORY] [--lookup N]\n";
        return 2;
    }
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);  // newer builds of the engine read it when they are opened
    try {
        given.resize(4);
        run(given[0], given[1], given[2].empty() ? 200 : std::atoi(given[2].c_str()), given[3], lookup);
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 2;
    }
    return 0;
}
