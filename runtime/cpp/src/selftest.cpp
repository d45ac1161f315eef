// The self-test, which replays stored vectors (§ 9): does this bundle, on this machine, compute what the original did?
#include <algorithm>
#include <cmath>
#include <limits>

#include "error.hpp"
#include "ranges.hpp"
#include "safetensors.hpp"
#include "stream.hpp"

namespace txl_runtime {
namespace {

constexpr double ROUNDING = 1e-4, FURTHER = 2, MASK = 1e3;  // § 9; MASK: larger values stand for "never", e.g. -1e4
constexpr double FAR = std::numeric_limits<double>::infinity();

// Pairs of computed and stored values of one tensor.
struct Pairs {
    std::vector<double> found, wanted;
    bool floating = true, nats = false;

    void add(double ours, double theirs) { found.push_back(ours), wanted.push_back(theirs); }
    // Return the largest difference: absolute for nats, else divided by max(1, largest value below MASK). A difference
    // of values from MASK on is divided by the value. Integers have to be equal.
    [[nodiscard]] double apart() const {
        double scale = 1, worst = 0;
        for (auto value : wanted)
            if (!nats && std::abs(value) < MASK) scale = std::max(scale, std::abs(value));
        for (std::size_t i = 0; i < wanted.size(); ++i) {
            if (found[i] == wanted[i]) continue;
            const auto size = std::abs(wanted[i]);
            const auto far = floating ? std::abs(found[i] - wanted[i]) / (size < MASK ? scale : size) : FAR;
            worst = std::isnan(far) ? FAR : std::max(worst, far);
        }
        return worst;
    }
};

// Return the value at a flat row-major place of one sequence's array: place 5 of [2, 4] is [1, 1].
double at(const View &own, std::int64_t place) {
    need(place >= 0 && place < own.shape.product(), TXL_BUNDLE,
         "stored vectors name a place outside of an array; export the model again");
    auto view = own;
    for (int axis = 0; axis < own.shape.rank(); ++axis) {
        std::int64_t behind = 1;
        for (int rest = axis + 1; rest < own.shape.rank(); ++rest) behind *= own.shape[rest];
        view = view.at(0, place / behind % own.shape[axis]);
    }
    return number_at(view.data, view.dtype);
}

class Replay {
public:
    Replay(std::shared_ptr<const Model> model, const Tensors &vectors)
        : model_(std::move(model)), m_(model_->manifest), vectors_(vectors), text_(vectors.find("tokens")) {
        const auto &counts = array("counts");
        const auto tokens = m_.tokens();
        fits(counts.shape.size() == 2 && counts.shape[1] == m_.B && (!text_ || (tokens && m_.logprobs())),
             "counts, or tokens of a model without");
        steps_ = counts.shape[0];
        fits(array("length").size() == steps_ && (text_ || array("reset").shape == counts.shape), "length or reset");
    }

    // Replay with b sequences; return the largest difference divided by the allowed one.
    double run(std::int64_t b) {
        Stream stream(model_, b, -1);
        std::map<std::string, Pairs> outputs;
        for (std::int64_t step = 0; step < steps_; ++step) segment(stream, step, outputs);
        double allowed[] = {ROUNDING, ROUNDING};
        for (int side = 0; side < 2; ++side)
            if (model_->native)
                allowed[side] += FURTHER * model_->native->reached[std::size_t(side)];
            else if (m_.precision != "fp32")
                allowed[side] += FURTHER * reached(side);
        double worst = 0;
        std::size_t values = 0;
        for (const auto &[_, pairs] : outputs)
            worst = std::max(worst, pairs.apart() / allowed[0]), values += pairs.found.size();
        fits(values > 0, "nothing to compare");
        for (std::size_t i = 0; i < model_->states.size(); ++i)
            if (stream.states().there(i)) worst = std::max(worst, state(stream, i) / allowed[1]);
        return std::isnan(worst) ? FAR : worst;
    }

private:
    static void fits(bool holds, const std::string &what) {
        need(holds, TXL_BUNDLE, "stored vectors do not fit the model (", what, "); export the model again");
    }
    [[nodiscard]] const Stored &array(const std::string &name) const {
        const auto *found = vectors_.find(name);
        fits(found, "no " + brief(name));
        return *found;
    }

    // Return the difference that the bundle had where it was made (0: outputs, 1: states), by which more is allowed
    // here. A difference above the largest stored value would let any result pass, so it is refused.
    [[nodiscard]] double reached(int side) const {
        double most = ROUNDING;
        const auto take = [&](const Stored *stored, bool nats) {
            for (std::int64_t i = 0; stored && stored->floating() && i < stored->size(); ++i) {
                const auto size = std::abs(stored->number(i));
                if (!nats || size < MASK) most = std::max(most, nats ? size : std::min(size, 1.0));
            }
        };
        for (const auto &output : m_.outputs)
            if (side == 0)
                take(vectors_.find(text_ ? "logprobs" : "output/" + output.name), output.role == "logprobs");
        for (const auto *state : model_->states)
            if (side == 1) take(vectors_.find((text_ ? "memory/" : "state/") + state->name), false);
        const auto found = array("reached").number(side);
        fits(found >= 0 && found <= most, join("reached is ", found, ", expected 0 ... ", most));
        return found;
    }

    void segment(Stream &stream, std::int64_t step, std::map<std::string, Pairs> &outputs) {
        const auto b = stream.b(), B = m_.B, length = array("length").whole(step);
        fits(length >= 1 && length <= model_->lengths[0], "length");
        std::vector<std::uint8_t> again;
        std::vector<std::int32_t> counts;
        for (std::int64_t row = 0; row < b; ++row) {
            again.push_back(!text_ && array("reset").number(step * B + row) != 0);
            counts.push_back(std::int32_t(array("counts").whole(step * B + row)));
        }
        if (ranges::count(again, 1)) stream.reset(again.data());
        std::vector<Array> given, results;
        std::vector<const void *> inputs;
        std::vector<void *> returned;
        for (const auto *entry : model_->given) {
            const auto &stored = array(text_ ? "tokens" : "input/" + entry->name);
            const auto whole = entry->axes.sizes(B, model_->lengths[0]), part = entry->axes.sizes(b, length);
            auto steps = whole;
            steps.insert(0, steps_);
            fits(ranges::equal(stored.shape, steps) &&
                     stored.bytes.size() == View(stored.bytes.data(), entry->dtype, steps).bytes(),
                 "input " + brief(entry->name));
            auto from = View(stored.bytes.data(), entry->dtype, steps).at(0, step);
            for (int axis = 0; axis < part.rank(); ++axis) from = from.narrow(axis, 0, part[axis]);
            given.emplace_back(entry->dtype, part);
            copy(given.back().view(), from);
            inputs.push_back(given.back().view().data);
        }
        for (const auto &output : m_.outputs) {
            results.emplace_back(output.dtype, output.axes.sizes(b, length));
            returned.push_back(results.back().view().data);
        }
        stream.run(length, inputs.data(), counts.data(), returned.data(), true);
        for (std::size_t i = 0; i < results.size(); ++i)
            for (std::int64_t row = 0; row < b; ++row)
                if (counts[row]) compare(m_.outputs[i], results[i].view(), step, row, outputs[m_.outputs[i].name]);
    }

    void compare(const Output &output, const View &result, std::int64_t step, std::int64_t row, Pairs &pairs) const {
        const auto own = output.axes.batch < 0 ? result : result.at(output.axes.batch, row);
        const auto &wanted = array(text_ ? "logprobs" : "output/" + output.name);
        const auto line = step * m_.B + row;
        pairs.nats = output.role == "logprobs", pairs.floating = wanted.floating();
        if (text_) {
            const auto &positions = array("positions"), &columns = array("columns");
            const auto P = positions.shape.empty() ? 0 : positions.shape.back(), C = columns.size(),
                       V = m_.vocab_size();
            fits(positions.size() == steps_ * m_.B * P && wanted.size() == positions.size() * C,
                 "positions, columns and log-probabilities");
            for (std::int64_t p = 0; p < P; ++p)
                for (std::int64_t c = 0; c < C; ++c) {
                    const auto column = columns.whole(c);
                    fits(column >= 0 && column < V, "columns");
                    pairs.add(at(own, positions.whole(line * P + p) * V + column),
                              wanted.number((line * P + p) * C + c));
                }
            return;
        }
        const auto &places = array("place/" + output.name);
        const auto P = wanted.shape.empty() ? 0 : wanted.shape.back();
        fits(wanted.size() == steps_ * m_.B * P && (places.size() == P || places.size() == wanted.size()),
             "places of " + brief(output.name));
        for (std::int64_t p = 0; p < P; ++p)
            pairs.add(at(own, places.whole(places.size() == P ? p : line * P + p)), wanted.number(line * P + p));
    }

    double state(Stream &stream, std::size_t index) {
        const auto &state = *model_->states[index];
        const auto all = stream.states().table(index, stream.b());
        Pairs pairs;
        const auto &wanted = array((text_ ? "memory/" : "state/") + state.name);
        pairs.floating = wanted.floating();
        const auto sequences = state.batch_axis < 0 ? 1 : stream.b();
        const auto P = sequences ? wanted.size() / (state.batch_axis < 0 ? 1 : m_.B) : 0;
        fits(wanted.size() == P * (state.batch_axis < 0 ? 1 : m_.B), "values of " + brief(state.name));
        for (std::int64_t row = 0; row < sequences; ++row) {
            auto own = state.batch_axis < 0 ? all.view() : all.view().at(state.batch_axis, row);
            if (text_) {
                const std::int64_t fill = stream.states().fill()[row], M = m_.memory_length();
                fits(state.counted() && fill > 0, "memory of " + brief(state.name));
                own = own.moved(state.row_axis - 1, 0);
                const auto each = own.shape.product() / M;
                fits(P == 2 * each, "memory of " + brief(state.name));
                for (std::int64_t i = 0; i < P; ++i)
                    pairs.add(at(own.at(0, i < each ? M - fill : M - 1), i % each), wanted.number(row * P + i));
                continue;
            }
            const auto &shape = array("state_shape/" + state.name), &places = array("state_place/" + state.name);
            bool same = shape.size() == own.shape.rank();
            for (int axis = 0; same && axis < own.shape.rank(); ++axis) same = shape.whole(axis) == own.shape[axis];
            if (!same) return FAR;
            fits(places.size() == P, "places of " + brief(state.name));
            for (std::int64_t i = 0; i < P; ++i) pairs.add(at(own, places.whole(i)), wanted.number(row * P + i));
        }
        return pairs.apart();
    }

    std::shared_ptr<const Model> model_;
    const Manifest &m_;
    const Tensors &vectors_;
    bool text_;
    std::int64_t steps_ = 0;
};

}  // namespace

double run_selftest(const std::shared_ptr<const Model> &model) {
    const auto &name = model->manifest.selftest;
    const auto where = model->files->where(name);
    need(!name.empty(), TXL_BUNDLE,
         "the bundle holds no stored vectors, expected those that export writes; export again");
    const auto vectors = read_vectors(model->read(name), where);
    try {
        Replay replay(model, vectors);
        const auto worst = replay.run(model->manifest.B);
        const bool alone = !model->manifest.lockstep && model->manifest.B > 1;
        return alone ? std::max(worst, replay.run(1)) : worst;
    } catch (const Refused &refused) {
        // The stored vectors chose the call, so a call that the model does not allow is the bundle's fault.
        refuse(refused.code == TXL_USAGE ? TXL_BUNDLE : refused.code, where, ": ", refused.what());
    }
}

}  // namespace txl_runtime
