// Fuzz target: snapshots are restored into streams of several models. A stream saves an accepted one again as the same
// bytes; a refused one changes nothing. The engine is $TXL_ONNXRUNTIME.
#include <filesystem>
#include <list>

#include "files.hpp"
#include "fuzzing.hpp"
#include "stream.hpp"

namespace {

std::list<txl_runtime::Stream> &streams() {
    static auto found = [] {
        std::list<txl_runtime::Stream> all;
        for (const auto &entry : std::filesystem::directory_iterator(TXL_BUNDLES)) {
            auto options = TXL_NEW(txl_load_options);
            options.threads = 1;
            const auto model =
                std::make_shared<const txl_runtime::Model>(txl_runtime::open_folder(entry.path().string()), options);
            all.emplace_back(model, model->manifest.B, -1);
        }
        return all;
    }();
    return found;
}

}  // namespace

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t *data, std::size_t size, std::size_t room, unsigned seed) {
    return fuzzing::change_tensors(data, size, room, seed);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    const auto bytes = fuzzing::text_of(data, size);
    for (auto &stream : streams()) {
        // A snapshot of a different model is refused early: one such stream is enough.
        if (bytes.find(stream.model().manifest.model_id) == std::string_view::npos && &stream != &streams().front())
            continue;
        const auto before = stream.save(-1);
        const bool taken = fuzzing::accepted(TXL_USAGE, [&] { stream.restore(-1, bytes); });
        const auto after = stream.save(-1);
        if (taken) {
            stream.reset(nullptr);
            stream.restore(-1, after);
        }
        fuzzing::hold(taken ? stream.save(-1) == after : after == before, "a state is saved as it was taken, or stays");
    }
    return 0;
}
