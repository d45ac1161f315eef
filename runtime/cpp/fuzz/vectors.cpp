// Fuzz target: stored vectors as a safetensors file. The zip of older bundles is not read: the name lacks ".npz".
#include "safetensors.hpp"

#include "fuzzing.hpp"

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t *data, std::size_t size, std::size_t room, unsigned seed) {
    return fuzzing::change_tensors(data, size, room, seed);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t bytes) {
    fuzzing::accepted(TXL_BUNDLE, [&] {
        const auto vectors = txl_runtime::read_vectors(std::string(fuzzing::text_of(data, bytes)), "memory/selftest");
        for (const auto &[name, stored] : vectors.all)
            if (const auto size = stored.size(); size > 0) {  // sanitizers find reads outside of the file
                const volatile double ends[] = {stored.number(0), stored.number(size - 1)};
                static_cast<void>(ends);
            }
    });
    return 0;
}
