// Continues a text with a bundle and remembers earlier runs, as samples/embed.py does in Python.
//
//     txl-generate demo/model.txl "def main(" 200 memory.safetensors
//
// Restores the memory of earlier runs, feeds the text, prints each token as it is drawn, and saves the memory again.
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>

#include "txl.hpp"

namespace {

void write(const std::string &path, const std::string &bytes) {
    // Write a second file and rename it, so that a crash leaves the old memory whole.
    std::ofstream file(path + ".part", std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.close();
    if (!file || std::rename((path + ".part").c_str(), path.c_str()) != 0)
        throw std::runtime_error(path + ": cannot be written");
}

void run(const std::string &bundle, const std::string &text, int tokens, const std::string &memory) {
    const txl::Model model(bundle);
    txl::Stream stream(model);
    if (std::ifstream file(memory, std::ios::binary); file)
        stream.restore(std::string(std::istreambuf_iterator<char>(file), {}));

    auto sampling = TXL_NEW(txl_sampling);
    sampling.temperature = 0.7, sampling.top_p = 0.95;
    sampling.seed = 1;
    txl::Sampler sampler(sampling);
    txl::Text said(model);
    stream.feed(model.encode(text));
    for (int n = 0; n < tokens; ++n) {
        const auto drawn = stream.draw(sampler);
        std::cout << said.feed(drawn) << std::flush;
        stream.feed(drawn);
    }
    std::cout << said.finish() << std::flush;
    std::cerr << "\n[memory: " << stream.fill() << " of " << model.info().memory_length << " rows per layer]\n";
    if (!memory.empty()) write(memory, stream.save());
}

}  // namespace

int main(int count, char **words) {
    if (count < 3) {
        std::cerr << "usage: " << words[0] << " BUNDLE TEXT [TOKENS] [MEMORY]\n";
        return 2;
    }
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);  // newer builds of the engine read it when they are opened
    try {
        run(words[1], words[2], count > 3 ? std::atoi(words[3]) : 200, count > 4 ? words[4] : "");
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 2;
    }
    return 0;
}
