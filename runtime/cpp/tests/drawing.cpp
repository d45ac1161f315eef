// Draws with what txl.h has before a draw, and decodes texts token by token. tests/cpp/test_drawing.py holds both
// against Python's.
//
//     txl-drawing BUNDLE draw KIND TEMPERATURE TOP_K TOP_P
//                      two sequences, 60 tokens each, a line of two for each draw
//     txl-drawing BUNDLE refused
//                      a line for each fault
//     txl-drawing BUNDLE text < LINES
//                      ids of a piece in each line; an empty one ends the text
#include <array>
#include <cmath>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <sstream>

#include "txl.hpp"

#ifdef _WIN32
#define setenv(name, value, over) _putenv_s(name, value)
#endif

namespace {

const std::vector<std::int32_t> PROMPT = {1, 70, 200, 9, 5, 6, 0, 3};  // [2, 4]
constexpr std::array<txl_bias, 2> BIAS = {{{3, 2.5F}, {250, -100}}};
constexpr std::array<std::int32_t, 3> FORBID = {7, 9, 7};

// Let even and odd tokens alternate.
void alternate(std::int32_t, std::int32_t last, double *logprobs, std::int32_t V) {
    for (std::int32_t token = 0; token < V; ++token)
        if (last >= 0 && token % 2 == last % 2) logprobs[token] = -INFINITY;
}

void draw(const txl::Model &model, const std::string &kind, txl_sampling sampling) {
    txl::Stream stream(model, 2);
    if (kind != "alternating") {
        sampling.logit_bias = BIAS.data(), sampling.logit_bias_count = BIAS.size();
        sampling.forbid = FORBID.data(), sampling.forbid_count = FORBID.size();
    }
    if (kind == "whole") {  // all of it in one call
        std::vector<std::int32_t> drawn(120);
        txl::detail::checked(txl_stream_generate, stream.get(), &sampling, PROMPT.data(), 4, nullptr, 60, drawn.data(),
                             nullptr);
        for (std::size_t n = 0; n < drawn.size(); n += 2) std::cout << drawn[n] << ' ' << drawn[n + 1] << '\n';
        return;
    }
    auto sampler = kind == "alternating" ? txl::Sampler(sampling, 2, alternate) : txl::Sampler(sampling, 2);
    auto moved = std::move(sampler);  // the function goes with it
    auto tokens = PROMPT;
    for (int n = 0; n < 60; ++n) {
        stream.feed(tokens);
        tokens = stream.draw(moved);
        std::cout << tokens[0] << ' ' << tokens[1] << '\n';
    }
}

template <typename Does>
void tried(Does does) {
    try {
        does();
        std::cout << "taken\n";
    } catch (const txl::Error &error) {
        std::cout << error.code << ": " << error.what() << '\n';
    } catch (const std::exception &error) {
        std::cout << error.what() << '\n';
    }
}

void refused(const txl::Model &model) {
    auto sampling = TXL_NEW(txl_sampling);
    sampling.temperature = 1, sampling.seed = 5;
    txl::Stream stream(model, 1);
    stream.feed({1, 2});
    txl::Sampler plain(sampling);
    const auto expected = stream.draw(plain);
    const auto with = [&](txl::Adjust adjust) { return txl::Sampler(sampling, 1, std::move(adjust)); };
    const auto each = [](double value) {
        return [=](std::int32_t, std::int32_t, double *row, std::int32_t V) { std::fill(row, row + V, value); };
    };
    int calls = 0;
    auto once = with([&](std::int32_t, std::int32_t, double *, std::int32_t) {
        if (!calls++) throw std::runtime_error("a rule of one's own");
    });
    tried([&] { (void)stream.draw(once); });
    std::cout << (stream.draw(once) == expected ? "no number was used\n" : "a number was used\n");
    for (double value : {double(NAN), double(INFINITY), -double(INFINITY)}) {
        auto sampler = with(each(value));
        tried([&] { (void)stream.draw(sampler, 0); });
    }
    sampling.adjust = [](void *, std::int32_t, std::int32_t, double *, std::int32_t) { return 3; };
    txl::Sampler three(sampling);
    tried([&] { (void)stream.draw(three); });
    sampling.adjust = nullptr;
    const std::int32_t no_ids[] = {256}, negative[] = {-1};
    for (const auto *ids : {no_ids, negative}) {
        sampling.forbid = ids, sampling.forbid_count = 1;
        txl::Sampler sampler(sampling);
        tried([&] { (void)stream.draw(sampler); });
    }
    std::int32_t drawn = 0;
    txl::Stream fresh(model, 1);
    tried([&] {
        txl::detail::checked(txl_stream_generate, fresh.get(), &sampling, PROMPT.data(), 4, nullptr, 1, &drawn,
                             nullptr);
    });
    std::cout << fresh.fill() << " rows\n";
    sampling.forbid = nullptr;
    tried([&] { txl::Sampler sampler(sampling); });
    sampling.forbid_count = 0;
    for (float bias : {100.5F, NAN}) {
        const txl_bias biases[] = {{5, bias}};
        sampling.logit_bias = biases, sampling.logit_bias_count = 1;
        tried([&] { txl::Sampler sampler(sampling); });
    }
    auto text = TXL_NEW(txl_text);
    text.held = 4;
    std::size_t needed = 0;
    tried([&] {
        txl::detail::checked(txl_decode_next, model.get(), &text, PROMPT.data(), std::size_t(1), nullptr,
                             std::size_t(0), &needed);
    });
}

void decode(const txl::Model &model) {
    txl::Text text(model);
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream ids(line);
        std::vector<std::int32_t> tokens;
        for (std::int32_t token = 0; ids >> token;) tokens.push_back(token);
        for (const char one : tokens.empty() ? text.finish() : text.feed(tokens))
            std::cout << std::hex << std::setw(2) << std::setfill('0') << int(static_cast<unsigned char>(one));
        std::cout << '\n';
    }
}

}  // namespace

int main(int count, char **words) {
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    auto load = TXL_NEW(txl_load_options);
    load.threads = 1;
    const txl::Model model(words[1], load);
    const std::string does = words[2];
    if (does == "draw" && count == 7) {
        auto sampling = TXL_NEW(txl_sampling);
        sampling.seed = 5, sampling.temperature = std::atof(words[4]);
        sampling.top_k = std::atoi(words[5]), sampling.top_p = std::atof(words[6]);
        draw(model, words[3], sampling);
    } else if (does == "refused") {
        refused(model);
    } else {
        decode(model);
    }
    return 0;
}
