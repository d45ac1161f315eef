// Counts what this library allocates in the calls that txl.h marks RT, after txl_stream_prepare: nothing. The linker
// leads every `operator new` of the library here, and none of the engine's.
//
//     txl-real-time BUNDLE [STEP]      ends with 1 where something was allocated
#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

#include "txl.hpp"

namespace {
std::size_t allocated = 0;
}

#ifdef _WIN32  // where std::size_t is unsigned long long
#define WITH_SIZE(start) start##_Znwy
#define ALIGNED(start) start##_ZnwySt11align_val_t
#else
#define WITH_SIZE(start) start##_Znwm
#define ALIGNED(start) start##_ZnwmSt11align_val_t
#endif

extern "C" {
void *WITH_SIZE(__real_)(std::size_t size);
void *ALIGNED(__real_)(std::size_t size, std::align_val_t aligned);
void *WITH_SIZE(__wrap_)(std::size_t size) {
    ++allocated;
    return WITH_SIZE(__real_)(size);
}
void *ALIGNED(__wrap_)(std::size_t size, std::align_val_t aligned) {
    ++allocated;
    return ALIGNED(__real_)(size, aligned);
}
}

namespace {

void run(const char *bundle, const char *library) {
    auto options = TXL_NEW(txl_load_options);
    options.threads = 1, options.native_library = library;
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
    std::vector<std::int32_t> counts(static_cast<std::size_t>(b)), tokens(counts), halves(counts);
    std::vector<std::uint8_t> which(counts.size());
    auto sampling = TXL_NEW(txl_sampling);
    sampling.temperature = 0.7, sampling.top_k = 5;
    txl::Sampler sampler(sampling, b), own(sampling);
    const bool draws = info.flags & TXL_IS_SCORING, ring = std::string(info.update) == "ring";
    stream.prepare();
    for (int step = 0; step < 20; ++step) {
        if (step == 1) allocated = 0;  // the first draw takes room for the vocabulary
        for (std::size_t row = 0; row < counts.size(); ++row)
            counts[row] = (step + static_cast<int>(row)) % 3 ? T : (info.flags & TXL_IS_INDEPENDENT) ? 0 : T;
        stream.run(T, inputs.data(), outputs.data(), counts.data(), step % 4 != 3);
        auto error = TXL_NEW(txl_error);
        for (std::size_t row = 0; row < counts.size(); ++row) halves[row] = counts[row] / 2;
        if (step % 4 == 3 && txl_stream_commit(stream.get(), ring ? halves.data() : nullptr, &error))
            throw txl::Error(TXL_USAGE, error.message);
        stream.feed(T, inputs.data(), outputs.data(), counts.data(), step % 2 == 0);
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
        run(words[1], count > 2 ? words[2] : nullptr);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    }
    std::printf("%zu allocations\n", allocated);
    return allocated ? 1 : 0;
}
