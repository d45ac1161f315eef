// Fuzz target: stored vectors, in a safetensors file or in the zip (.npz) of bundles before 0.8.
#include "safetensors.hpp"

#include "fuzzing.hpp"

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t *data, std::size_t size, std::size_t room, unsigned seed) {
    return fuzzing::change_tensors(data, size, room, seed);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t bytes) {
    fuzzing::accepted(TXL_BUNDLE, [&] {
        const std::string file(fuzzing::text_of(data, bytes));
        const char *where = file.rfind("PK", 0) == 0 ? "memory/selftest.npz" : "memory/selftest";
        const auto vectors = txl_runtime::read_vectors(file, where);
        for (const auto &[name, stored] : vectors.all)
            if (const auto size = stored.size(); size > 0) {  // sanitizers find reads outside of the file
                const volatile double ends[] = {stored.number(0), stored.number(size - 1)};
                static_cast<void>(ends);
            }
    });
    return 0;
}
