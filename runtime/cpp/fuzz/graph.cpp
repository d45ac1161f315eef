// Graphs: checked as the programs of the conformance list's bundles. The first byte says as which.
#include <algorithm>
#include <filesystem>

#include "files.hpp"
#include "fuzzing.hpp"
#include "graph_check.hpp"

namespace {

struct Promised {
    txl_runtime::Manifest manifest;
    std::size_t program;
};

// The programs of all bundles, by the bundles' names.
const std::vector<Promised> &programs() {
    static const auto found = [] {
        std::vector<std::filesystem::path> folders;
        for (const auto &entry : std::filesystem::directory_iterator(TXL_BUNDLES)) folders.push_back(entry.path());
        std::sort(folders.begin(), folders.end());
        std::vector<Promised> all;
        for (const auto &folder : folders) {
            const auto text = txl_runtime::open_folder(folder.string())->read("manifest.json", 1U << 24);
            const auto manifest = txl_runtime::read_manifest(text, folder.string());
            for (std::size_t i = 0; i < manifest.programs.size(); ++i) all.push_back({manifest, i});
        }
        return all;
    }();
    return found;
}

}  // namespace

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t *data, std::size_t size, std::size_t room, unsigned seed) {
    if (size < 2 || room < 2) return size;
    if (seed % 16 == 0) data[0] = static_cast<std::uint8_t>(seed / 16);
    return 1 + fuzzing::change_messages(data + 1, size - 1, room - 1, seed);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    if (size < 1) return 0;
    const auto &[manifest, program] = programs()[data[0] % programs().size()];
    static txl_runtime::Budget budget(0, 0);  // reading its table takes longer than checking most graphs
    static const double least = budget.most;
    const auto weights = static_cast<double>(manifest.files.at(manifest.weights).size);
    budget.weights = weights, budget.most = least + 64 * weights;
    budget.taken = 0, budget.held.clear();
    fuzzing::accepted(TXL_BUNDLE, [&, &manifest = manifest, &program = program] {
        check_graph(std::string(fuzzing::text_of(data + 1, size - 1)), "memory/step.onnx", manifest.programs[program],
                    manifest, budget);
        fuzzing::hold(budget.taken <= budget.most, "a step takes no more than the budget");
    });
    return 0;
}
