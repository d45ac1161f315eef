// Stored vectors: safetensors, or a zip of NumPy's arrays.
#include "safetensors.hpp"

#include "fuzzing.hpp"

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t *data, std::size_t size, std::size_t room, unsigned seed) {
    return fuzzing::change_tensors(data, size, room, seed);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t bytes) {
    fuzzing::accepted(TXL_BUNDLE, [&] {
        const auto vectors = txl_runtime::read_vectors(std::string(fuzzing::text_of(data, bytes)), "memory/selftest");
        for (const auto &[name, stored] : vectors.all)
            if (const auto size = stored.size(); size > 0) {  // the sanitizers see to it that they lie in the file
                const volatile double ends[] = {stored.number(0), stored.number(size - 1)};
                static_cast<void>(ends);
            }
    });
    return 0;
}
