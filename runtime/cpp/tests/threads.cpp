// Eight threads on one model: streams of their own, which save, restore, score and draw. What each finds has to be what
// one thread alone finds. Built with -fsanitize=thread, it also shows that threads share nothing that one of them
// writes.
//
//     txl-threads BUNDLE [ROUNDS]      of a bundle that reads tokens
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "txl.hpp"

#ifdef _WIN32
#define setenv(name, value, over) _putenv_s(name, value)
#endif

namespace {

constexpr int THREADS = 8;

// Random calls, always the same ones for a seed, and all bits that they return.
std::string calls(const txl::Model &model, unsigned seed, int rounds) {
    std::mt19937 random(seed);
    const auto info = model.info();
    const auto b = info.batch_size;
    txl::Stream stream(model, b);
    auto sampling = TXL_NEW(txl_sampling);
    sampling.temperature = 0.8, sampling.top_k = 9, sampling.seed = seed;
    txl::Sampler sampler(sampling, b);
    std::string found;
    const auto note = [&](const void *data, std::size_t bytes) {
        found.append(static_cast<const char *>(data), bytes);
    };
    for (int round = 0; round < rounds; ++round) {
        const auto T = static_cast<std::int32_t>(1 + random() % 6);
        std::vector<std::int32_t> tokens(static_cast<std::size_t>(b) * static_cast<std::size_t>(T));
        for (auto &token : tokens) token = static_cast<std::int32_t>(random() % static_cast<unsigned>(info.vocab_size));
        std::vector<float> nll(tokens.size() - static_cast<std::size_t>(b));
        txl::detail::checked([&](txl_error *error) {
            return txl_stream_score(stream.get(), tokens.data(), T, nullptr, nll.data(), error);
        });
        note(nll.data(), nll.size() * sizeof(float));
        stream.feed(tokens);
        const auto drawn = stream.draw(sampler);
        note(drawn.data(), drawn.size() * sizeof(std::int32_t));
        // One sequence moves to a different place, and a second one is reset.
        const auto from = static_cast<std::int32_t>(random() % static_cast<unsigned>(b));
        const auto to = static_cast<std::int32_t>(random() % static_cast<unsigned>(b));
        const auto taken = stream.save(from);
        stream.restore(taken, to);
        note(taken.data(), taken.size());
        if (random() % 5 == 0) stream.reset();
    }
    return found + stream.save();
}

}  // namespace

int main(int count, char **words) {
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    if (count < 2) return 2;
    const int rounds = count > 2 ? std::atoi(words[2]) : 50;
    auto options = TXL_NEW(txl_load_options);
    options.threads = 1;
    const txl::Model model(words[1], options);
    std::vector<std::string> alone, together(THREADS);
    for (unsigned i = 0; i < THREADS; ++i) alone.push_back(calls(model, i, rounds));
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < THREADS; ++i) threads.emplace_back([&, i] { together[i] = calls(model, i, rounds); });
    for (auto &thread : threads) thread.join();
    for (std::size_t i = 0; i < THREADS; ++i)
        if (alone[i] != together[i]) return std::printf("thread %zu found something else than alone\n", i), 1;
    std::printf("%d threads found what each finds alone\n", THREADS);
    return 0;
}
