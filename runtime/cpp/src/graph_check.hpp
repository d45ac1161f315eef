// A graph, checked before the engine sees it (§ 11).
#pragma once
#include <map>
#include <set>
#include <string>

#include "manifest.hpp"

namespace txl_runtime {

// What a step of a bundle may take, all of its programs together.
struct Budget {
    Budget(std::uint64_t weights, std::uint64_t asked);
    [[nodiscard]] double work() const;  // products that each graph may sum
    void take(double size, double work);
    double weights, most;  // bytes of the weight file, and that a step may take
    double taken = 0;
    std::set<std::pair<std::string, std::vector<std::int64_t>>> held;  // arrays that programs share
    Json published;                                                    // docs/bundle-forms.json
};

// Refuses, as TXL_BUNDLE, what may not be given to an engine.
void check_graph(const std::string &data, const std::string &where, const Program &program, const Manifest &manifest,
                 Budget &budget);

}  // namespace txl_runtime
