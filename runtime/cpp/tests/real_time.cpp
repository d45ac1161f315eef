// Counts what this library allocates in the calls that txl.h marks RT, after txl_stream_prepare: nothing. The linker
// leads every `operator new` of the library here, and none of the engine's.
//
//     txl-real-time BUNDLE      ends with 1 where something was allocated
#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

#include "txl.hpp"

namespace {
std::size_t allocated = 0;
}

extern "C" {
void *__real__Znwm(std::size_t size);
void *__real__ZnwmSt11align_val_t(std::size_t size, std::align_val_t aligned);
void *__wrap__Znwm(std::size_t size) {
    ++allocated;
    return __real__Znwm(size);
}
void *__wrap__ZnwmSt11align_val_t(std::size_t size, std::align_val_t aligned) {
    ++allocated;
    return __real__ZnwmSt11align_val_t(size, aligned);
}
}

namespace {

void run(const char *bundle) {
    auto options = TXL_NEW(txl_load_options);
    options.threads = 1;
    const txl::Model model(bundle, options);
    const auto info = model.info();
    const auto b = info.batch_size, T = info.longest;
    txl::Stream stream(model, b);
    std::vector<std::vector<char>> held;
    std::vector<const void *> inputs;
    std::vector<void *> outputs;
    for (const auto &tensor : model.table(TXL_INPUTS)) held.emplace_back(txl_tensor_bytes(&tensor, b, T));
    for (const auto &array : held) inputs.push_back(array.data());
    std::vector<std::vector<char>> returned;
    for (const auto &tensor : model.table(TXL_OUTPUTS)) returned.emplace_back(txl_tensor_bytes(&tensor, b, T));
    for (auto &array : returned) outputs.push_back(array.data());
    std::vector<std::int32_t> counts(static_cast<std::size_t>(b)), tokens(counts);
    std::vector<std::uint8_t> which(counts.size());
    auto sampling = TXL_NEW(txl_sampling);
    sampling.temperature = 0.7, sampling.top_k = 5;
    txl::Sampler sampler(sampling, b), own(sampling);
    const bool draws = info.flags & TXL_IS_SCORING;
    stream.prepare();
    for (int step = 0; step < 20; ++step) {
        if (step == 1) allocated = 0;  // the first draw takes room for the vocabulary
        for (std::size_t row = 0; row < counts.size(); ++row)
            counts[row] = (step + static_cast<int>(row)) % 3 ? T : (info.flags & TXL_IS_INDEPENDENT) ? 0 : T;
        stream.run(T, inputs.data(), outputs.data(), counts.data(), step % 4 != 3);
        stream.feed(T, inputs.data(), outputs.data(), counts.data(), step % 2 == 0);
        auto error = TXL_NEW(txl_error);
        if (draws && txl_sampler_draw(sampler.get(), stream.get(), tokens.data(), nullptr, &error))
            throw txl::Error(TXL_USAGE, error.message);
        if (draws) (void)stream.draw(own, b - 1);
        which[0] = 1;
        stream.reset((info.flags & TXL_IS_INDEPENDENT) && b > 1 ? which.data() : nullptr);
        if (b == 1 && draws) stream.feed(1, inputs.data(), nullptr);
    }
}

}  // namespace

int main(int count, char **words) {
    if (count < 2) return 2;
    try {
        run(words[1]);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    }
    std::printf("%zu allocations\n", allocated);
    return allocated ? 1 : 0;
}
