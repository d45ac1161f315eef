// Tries what finds drafts, what pauses them, and generation with every draft that is found. tests/cpp/test_lookup.py
// holds all of it against Python's.
//
//     txl-lookup repeats < TOKENS           after each token the draft of four; "-" for none
//     txl-lookup pace < LINES               "DRAFT SECONDS TOKENS", 0 for a step; tells whether a draft is allowed
//     txl-lookup BUNDLE b LOOKUP TEMPERATURE COUNT [FAILS] < TOKENS
//                                           tokens [b, T]; a line for each call; the draw of this number is refused
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <iterator>

#include "error.hpp"
#include "stream.hpp"

#ifdef _WIN32
#define setenv(name, value, over) _putenv_s(name, value)
#endif

using namespace txl_runtime;

namespace {

std::vector<std::int32_t> given() { return {std::istream_iterator<std::int32_t>(std::cin), {}}; }

void told(const std::vector<std::int32_t> &drawn, std::int32_t count) {
    for (std::int32_t i = 0; i < count; ++i) std::cout << drawn[i] << ' ';
    std::cout << '\n';
}

void repeats() {
    Repeats read;
    for (auto token : given()) {
        read.add(token);
        std::int32_t draft[4];
        if (!read.find(4, draft))
            std::cout << "-";
        else
            for (auto one : draft) std::cout << one << ' ';
        std::cout << '\n';
    }
}

void pace() {
    double now = 0, time = 0, tokens = 0;
    bool draft = false;
    Pace pace([&] { return now; });
    while (std::cin >> draft >> time >> tokens) {
        pace.start();
        now += time;
        pace.count(draft, tokens);
        now += 50;  // what the caller does with the token
        std::cout << pace.allows() << '\n';
    }
}

struct Refusing {
    int left;  // draws until one is refused
    static int call(void *data, std::int32_t, std::int32_t, double *, std::int32_t) {
        return static_cast<Refusing *>(data)->left-- == 0;
    }
};

void generate(const char *bundle, std::int32_t b, txl_sampling sampling, std::int32_t count, int fails) {
    auto load = TXL_NEW(txl_load_options);
    load.threads = 1;
    Stream stream(std::make_shared<const Model>(open_folder(bundle), load), b, -1);
    Refusing refusing{fails};
    if (fails >= 0) sampling.adjust = Refusing::call, sampling.adjust_data = &refusing;
    Sampler sampler(sampling, b, [] { return 0.0; });  // no draft takes longer than a step
    auto tokens = given();
    std::vector<std::int32_t> drawn(std::size_t(count * b));
    std::int32_t some = 0;
    try {
        for (std::int32_t n = 0; n < count; n += some) {
            stream.next(sampler, tokens.data(), std::int64_t(tokens.size()) / b, nullptr, count - n, drawn.data(),
                        nullptr, some);
            told(drawn, some * b);
            tokens.assign(drawn.begin() + (some - 1) * b, drawn.begin() + some * b);
        }
    } catch (const Refused &refused) {
        if (some) told(drawn, some * b);
        std::cout << "after " << some << ": " << refused.what() << '\n';
    }
    std::ostream_iterator<std::int32_t> out(std::cout << std::setprecision(9), " ");
    std::copy(stream.states().fill(), stream.states().fill() + b, out);
    for (std::int32_t token = 0; token < 3; ++token) {  // the state, as what comes next by it
        const std::vector<std::int32_t> next(b, token);
        std::vector<float> logprobs(b * stream.model().manifest.vocab_size());
        const void *inputs[] = {next.data()};
        void *outputs[] = {logprobs.data()};
        stream.run(1, inputs, nullptr, outputs, false);
        for (auto one : logprobs) std::cout << one << ' ';
    }
    std::cout << '\n';
}

}  // namespace

int main(int count, char **words) {
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    const std::string does = words[1];
    if (does == "repeats") return repeats(), 0;
    if (does == "pace") return pace(), 0;
    auto sampling = TXL_NEW(txl_sampling);
    sampling.lookup = std::atoi(words[3]), sampling.temperature = std::atof(words[4]), sampling.seed = 5;
    generate(words[1], std::atoi(words[2]), sampling, std::atoi(words[5]), count > 6 ? std::atoi(words[6]) : -1);
    return 0;
}
