// Snapshots: the state of sequences as a safetensors file, saved from a stream and restored into one (§ 5).
#include <algorithm>
#include <cstring>

#include "error.hpp"
#include "ranges.hpp"
#include "safetensors.hpp"
#include "stream.hpp"

namespace txl_runtime {
namespace {

constexpr std::uint64_t MOST_HEADER = 1U << 20;  // bytes, 1 MiB: enough for ten thousand tensors
constexpr const char *WHOLE = "whole/";          // prefix of replaced tensors in a snapshot that also has memory rows

// Return (a snapshot has memory rows, it has tensors that each step replaces).
std::pair<bool, bool> parts_of(const Model &model) {
    const auto whole = ranges::any_of(model.states, [](const State *state) { return !state->counted(); });
    return {model.manifest.counts_rows(), whole || !model.manifest.counts_rows()};
}

std::string kind_of(const Model &model) {
    const auto [rows, whole] = parts_of(model);
    return std::string("txl-deploy.state/") + (!whole ? "1" : !rows ? "2" : "3");
}

std::string label_of(const Model &model, const State &state) {
    return state.counted() || !model.manifest.counts_rows() ? state.name : WHOLE + state.name;
}

// Return true if some program takes or returns the growing state with this number of rows, or it is 0.
bool reached(const Model &model, const State &state, std::int64_t rows) {
    if (rows == 0) return true;
    for (const auto &program : model.manifest.programs)
        for (const auto *side : {&program.inputs, &program.outputs})
            for (const auto &spec : *side)
                if (spec.name == state.input || spec.name == state.output) {
                    const auto size = spec.shape[state.row_axis];
                    if (size == rows || size == TXL_SIZE_ROWS) return true;
                }
    return false;
}

}  // namespace

std::string Stream::save(std::int32_t row) const {
    const auto rows = sequences(row);
    const auto carried = states_->take(rows);
    std::map<std::string, View> tensors;
    std::map<std::string, std::string> facts = {{"format", kind_of(*model_)}, {"model_id", model_->manifest.model_id}};
    const auto n = std::int64_t(rows.size());
    if (parts_of(*model_).first) {
        tensors["fill"] = View(carried.fill.data(), TXL_INT32, {n});
        tensors["head"] = View(carried.head.data(), TXL_INT32, {n});
    }
    if (parts_of(*model_).second) facts["batch_size"] = std::to_string(n);
    for (const auto *state : model_->states)
        if (const auto found = carried.tensors.find(state->name); found != carried.tensors.end())
            tensors[label_of(*model_, *state)] = found->second.view();
    return write_tensors(tensors, facts);
}

void Stream::restore(std::int32_t row, std::string_view bytes) {
    const auto rows = sequences(row);
    const auto n = std::int64_t(rows.size());
    const auto refused = [](bool holds, const auto &...said) {
        need(holds, TXL_USAGE, "the snapshot ", said..., "; take it again from this model");
    };
    const auto stored = read_tensors(bytes, MOST_HEADER, TXL_USAGE, "the snapshot");
    const auto fact = [&](const char *name) {
        const auto found = stored.facts.find(name);
        return found == stored.facts.end() ? std::string() : found->second;
    };
    const auto [counts, whole] = parts_of(*model_);
    refused(fact("format") == kind_of(*model_), "is of format '", brief(fact("format")), "', expected ",
            kind_of(*model_));
    refused(fact("model_id") == model_->manifest.model_id, "belongs to model ", brief(fact("model_id")).substr(0, 12),
            ", expected ", model_->manifest.model_id.substr(0, 12));
    refused(!whole || fact("batch_size") == std::to_string(n), "holds '", brief(fact("batch_size")),
            "' sequences, expected ", n);
    Carried carried;
    carried.head.assign(rows.size(), 0);
    carried.fill = carried.head;
    std::size_t known = 0;
    for (auto [name, into] : {std::pair("fill", &carried.fill), {"head", &carried.head}}) {
        const auto *found = stored.find(name);
        if (!counts || (!found && into == &carried.head)) continue;
        const auto held = found && found->shape.size() == 1 ? found->shape[0] : n;
        refused(held == n, "holds ", held, " sequences, expected ", n, ", as many as are restored");
        refused(found && found->dtype == "I32" && found->shape == std::vector{n}, "has no ", name, " that is int32 [",
                n, "]");
        std::memcpy(into->data(), found->bytes.data(), found->bytes.size());
        ++known;
    }
    const auto M = model_->manifest.memory_length();
    for (auto fill : carried.fill) refused(fill >= 0 && fill <= M, "has a fill of ", fill, ", expected 0 ... ", M);
    const std::int64_t longest = ranges::max(carried.fill);
    for (const auto *state : model_->states) {
        const auto label = label_of(*model_, *state);
        const auto *found = stored.find(label);
        if (!found) {
            refused(state->absent, "lacks ", brief(label), ", expected it");
            continue;
        }
        ++known;
        Shape shape(state->counted() ? state->row_shape() : state->shape);
        if (state->counted()) {
            shape.insert(0, longest), shape.insert(0, n);
        } else {
            if (state->batch_axis >= 0) shape[state->batch_axis] = n;
            const auto axis = std::size_t(state->row_axis);
            if (state->rows && found->shape.size() == state->shape.size())
                shape[state->row_axis] = std::clamp(found->shape[axis], state->rows->first, state->rows->second);
        }
        const auto dtype = state->counted() ? TXL_FLOAT32 : state->dtype;
        refused(found->dtype == stored_name(dtype) && ranges::equal(found->shape, shape), "has ", brief(label), " as ",
                brief(found->dtype), " ", listed(found->shape), ", expected ", name_of(dtype), " ", listed(shape));
        refused(!state->rows || reached(*model_, *state, shape[state->row_axis]), "has ", brief(label),
                " with a number of rows that no step leads to");
        Array tensor(dtype, shape);
        copy(tensor.view(), View(found->bytes.data(), dtype, shape));
        carried.tensors.emplace(state->name, std::move(tensor));
    }
    refused(known == stored.all.size(), "has tensors that the model does not know");
    tried_ = 0;
    if (n == b_) states_->reset();
    for (std::size_t i = 0; n < b_ && i < rows.size(); ++i) states_->reset(rows[i]);
    states_->put(rows, carried);
    for (auto one : rows) fed_[one] = false;
}

}  // namespace txl_runtime
