// What the tables imply and say since format 2.1 (§ 10); tables may be wrong here, since agreement.cpp comes later.
#include "manifest.hpp"

namespace txl_runtime {
namespace {

bool says_nothing(const Manifest &m) {
    for (const auto &entry : m.inputs)
        if (entry.counter || !entry.beyond.empty()) return false;
    for (const auto &output : m.outputs)
        if (!output.columns.empty()) return false;
    for (const auto &state : m.states)
        if (state.spill || state.in_place) return false;
    return true;
}

}  // namespace

Manifest implied(Manifest m) {
    std::int64_t slots = 0;
    for (const auto &state : m.states)
        if (!slots) slots = state.slots;
    for (auto &entry : m.inputs) {
        entry.counter.reset();
        if (entry.role == "fill" && m.counts_rows()) entry.counter = m.counters.at("fill");
        if (entry.role == "head" && slots) entry.counter = Counting{0, slots, "wrap"};
        entry.beyond = entry.role != "valid" ? "" : m.lockstep ? "largest" : "zero";
    }
    for (auto &output : m.outputs) {
        output.columns.clear();
        for (std::size_t tail = 1; tail < output.clusters.size(); ++tail)
            output.columns.push_back(output.clusters[0].second + static_cast<std::int64_t>(tail) - 1);
    }
    for (auto &state : m.states) {
        const auto axis = static_cast<std::size_t>(state.row_axis);
        state.in_place = state.update == Rule::ring;
        const bool rows = state.in_place && state.slots && state.row_axis >= 0 && axis < state.shape.size();
        state.spill = rows ? std::max<std::int64_t>(state.shape[axis] - state.slots, 0) : 0;
    }
    return m;
}

void derive(Manifest &manifest) {
    if (says_nothing(manifest)) manifest = implied(manifest);
}

}  // namespace txl_runtime
