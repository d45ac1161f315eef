// Fuzz target: manifests are read, completed and checked, then asked everything that a model asks.
#include "manifest.hpp"

#include "fuzzing.hpp"

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t *data, std::size_t size, std::size_t room, unsigned seed) {
    return fuzzing::change_json(data, size, room, seed);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    fuzzing::accepted(TXL_BUNDLE, [&] {
        const auto manifest =
            txl_runtime::read_manifest(std::string(fuzzing::text_of(data, size)), "memory/manifest.json");
        fuzzing::hold(!manifest.programs.empty() && !manifest.lengths().empty() && !manifest.updates.empty(),
                      "there is something to run");
        for (const auto rule : manifest.updates)
            for (const auto *state : manifest.states_of(rule))
                fuzzing::hold(!state->counted() || !state->row_shape().empty() || manifest.counts_rows(),
                              "memory rows are counted");
        for (const auto &file : manifest.used_files())
            fuzzing::hold(manifest.files.count(file), "what is used is listed");
        fuzzing::hold(manifest.given().size() <= manifest.inputs.size() && manifest.fresh_fill() >= 0,
                      "counts are counts");
        fuzzing::hold(!manifest.reads_text() || (manifest.tokens() && manifest.logprobs()),
                      "text is read and returned");
        if (manifest.logprobs()) fuzzing::hold(manifest.vocab_size() > 0, "log-probabilities are of words");
    });
    return 0;
}
