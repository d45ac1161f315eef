#include "softmax.hpp"

#include <algorithm>
#include <cstring>

namespace txl_runtime {
namespace {

constexpr std::int64_t CHUNK = 1 << 22;  // log-probabilities computed at a time: 16 MiB

}  // namespace

Softmax::Softmax(const Model &model)
    : model_(model),
      width_(model.softmax.empty() ? model.manifest.logprobs()->axes.shape.back() : model.manifest.logprobs()->width),
      words_(model.manifest.logprobs()->axes.shape.back()),
      chunk_(std::max<std::int64_t>(1, CHUNK / words_)),
      results_(model.softmax.size()),
      input_names_(1),
      output_names_(1),
      inputs_(1),
      outputs_(1) {}

void Softmax::part(std::size_t cluster, const float *rows, std::int64_t n) {
    const auto &program = *model_.softmax[cluster];
    const auto columns = program.outputs[0].shape[1];
    auto &result = results_[cluster];
    if (result.shape.rank() == 0 || result.shape[0] < n) result = Array(TXL_FLOAT32, {n, columns});
    const Value input(model_.engine(), View(rows, TXL_FLOAT32, {n, width_}));
    const Value output(model_.engine(), View(result.view().data, TXL_FLOAT32, {n, columns}));
    input_names_[0] = program.inputs[0].name.c_str(), output_names_[0] = program.outputs[0].name.c_str();
    inputs_[0] = input.get(), outputs_[0] = output.get();
    model_.session(program).run(input_names_, inputs_, output_names_, outputs_, program.name);
}

void Softmax::logprobs(const float *rows, std::int64_t n, float *into, std::int64_t stride) {
    const auto bytes = [](std::int64_t numbers) { return static_cast<std::size_t>(numbers) * sizeof(float); };
    if (model_.softmax.empty()) {
        for (std::int64_t i = 0; i < n; ++i) std::memcpy(into + i * stride, rows + i * words_, bytes(words_));
        return;
    }
    const auto &output = *model_.manifest.logprobs();
    for (std::int64_t begin = 0; begin < n; begin += chunk_) {
        const auto some = std::min(chunk_, n - begin);
        for (std::size_t c = 0; c < model_.softmax.size(); ++c) {
            part(c, rows + begin * width_, some);
            const auto [first, last] = output.clusters[c];
            const auto columns = model_.softmax[c]->outputs[0].shape[1], head = model_.softmax[0]->outputs[0].shape[1];
            for (std::int64_t i = 0; i < some; ++i) {
                const auto *from = results_[c].as<float>() + i * columns;
                auto *to = into + (begin + i) * stride + first;
                std::memcpy(to, from, bytes(last - first));
                if (!c) continue;
                const float cluster = results_[0].as<float>()[i * head + output.columns[c - 1]];
                for (std::int64_t word = 0; word < last - first; ++word) to[word] += cluster;
            }
        }
    }
}

}  // namespace txl_runtime
