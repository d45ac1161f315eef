// Fuzz target: headers of weight files, read as the loader does to find an initial state.
#include "files.hpp"
#include "fuzzing.hpp"
#include "safetensors.hpp"

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t *data, std::size_t size, std::size_t room, unsigned seed) {
    return fuzzing::change_tensors(data, size, room, seed);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    constexpr auto *NAME = "weights.safetensors";
    const txl_file file{NAME, size ? data : nullptr, size};
    const auto files = txl_runtime::open_memory(&file, 1);
    fuzzing::accepted(TXL_BUNDLE, [&] {
        const auto header = txl_runtime::read_header(*files, NAME);
        for (const auto &[name, entry] : header.all) {
            const auto part = files->part(NAME, entry.first, entry.last - entry.first);
            fuzzing::hold(part.size() == entry.last - entry.first, "a tensor lies in the file");
            for (auto extent : entry.shape) fuzzing::hold(extent >= 0, "no size is below zero");
        }
    });
    return 0;
}
