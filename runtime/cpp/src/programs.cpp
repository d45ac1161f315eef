#include "programs.hpp"

#include <algorithm>

#include "error.hpp"
#include "ranges.hpp"

namespace txl_runtime {
namespace {

const Spec *spec_named(const std::vector<Spec> &specs, const std::string &name) {
    const auto found = ranges::find(specs, name, &Spec::name);
    return found == specs.end() ? nullptr : &*found;
}

Array array_of(const Spec &spec) {
    return ranges::count(spec.shape, std::int64_t{TXL_SIZE_ROWS}) ? Array() : Array(spec.dtype, Shape(spec.shape));
}

}  // namespace

// The arguments of one engine call: a program with one number of sequences, on one side of the states.
struct Route {
    std::vector<const char *> input_names, output_names;
    std::vector<Value> values;
    std::vector<const OrtValue *> inputs;
    std::vector<OrtValue *> outputs;
    std::vector<Array> apart;                          // contiguous copies of views with gaps, e.g. 2 rows of [M, B, 8]
    std::vector<std::pair<View, View>> before, after;  // (to, from): copies into `apart`, and out of it
};

Runner::Runner(const Model &model, States &states) : model_(model), states_(states) {
    for (const auto *program : model.programs) {
        Bound bound{program, {}, {}, {}};
        for (const auto *entry : model.given)
            bound.inputs.push_back(array_of(*spec_named(program->inputs, entry->name)));
        if (program->kind == "hidden") {
            bound.outputs.push_back(array_of(program->outputs[0]));
        } else {
            for (const auto &output : model.manifest.outputs)
                bound.outputs.push_back(array_of(*spec_named(program->outputs, output.name)));
        }
        bound_.push_back(std::move(bound));
    }
    for (const auto &held : states.held())
        if (held.layout != Layout::table)
            (held.layout == Layout::keys ? keys_ : values_).push_back(held.sides[0].view().data);
}

Runner::~Runner() = default;

bool Runner::takes(const Program &program) const {
    if (!model_.growing) return true;
    const auto side = states_.side(0);
    for (const auto &held : states_.held()) {
        if (held.state->update != Rule::replace) continue;
        const auto *spec = spec_named(program.inputs, held.state->input);
        const auto &shape = held.sides[side].shape;
        if (!spec || !held.there[side]) {
            if (spec || (held.there[side] && shape.product())) return false;
            continue;
        }
        const auto fits = [](auto wanted, auto size) { return wanted == TXL_SIZE_ROWS || wanted == size; };
        if (!ranges::equal(spec->shape, shape, fits)) return false;
    }
    return true;
}

Runner::Bound &Runner::find(std::int64_t length) {
    for (auto &bound : bound_) {
        const auto own = bound.program->length;
        if (own >= length && (own == length || !model_.manifest.exact) && takes(*bound.program)) return bound;
    }
    refuse(TXL_USAGE, "no program takes a segment of ", length,
           " positions with the state as it is now, expected lengths of ", listed(model_.lengths),
           "; reset the stream, or feed segments of one length");
}

std::unique_ptr<Route> Runner::route(Bound &bound, std::int64_t rows, int side) {
    auto found = std::make_unique<Route>();
    const auto &program = *bound.program;
    const auto &manifest = model_.manifest;
    const auto first = [&](const View &view, int batch) {
        return batch < 0 || rows == manifest.B ? view : view.narrow(batch, 0, rows);
    };
    const auto add = [&](const View &part, bool returned) {
        View own = part;
        if (!part.together()) {
            found->apart.emplace_back(part.dtype, part.shape);
            own = found->apart.back().view();
            (returned ? found->after : found->before).emplace_back(returned ? part : own, returned ? own : part);
        }
        found->values.emplace_back(model_.engine(), View(own.data, own.dtype, own.shape));
        returned ? found->outputs.push_back(found->values.back().get())
                 : found->inputs.push_back(found->values.back().get());
    };
    for (const auto &spec : program.inputs) {
        found->input_names.push_back(spec.name.c_str());
        if (const auto *held = states_.named(spec.name, false)) {
            add(first(held->sides[held->state->update == Rule::ring ? 0 : side].view(), held->state->batch_axis),
                false);
            continue;
        }
        std::size_t given = 0;
        for (const auto &entry : manifest.inputs) {
            const bool mine = given < model_.given.size() && model_.given[given] == &entry;
            if (entry.name == spec.name)
                add(first(mine ? bound.inputs[given].view() : states_.counts(entry.role), entry.axes.batch), false);
            given += mine;
        }
    }
    const bool open = program.rows_open();
    for (const auto &spec : program.outputs) {
        found->output_names.push_back(spec.name.c_str());
        if (open) {
            found->outputs.push_back(nullptr);
            continue;
        }
        if (auto *held = states_.named(spec.name, true)) {
            const auto to = held->state->update == Rule::ring ? 0 : 1 - side;
            if (held->state->update == Rule::replace) held->sides[to].shape = Shape(spec.shape), held->there[to] = true;
            add(first(held->sides[to].view(), held->state->batch_axis), true);
            continue;
        }
        if (program.kind == "hidden") {
            add(first(bound.outputs[0].view(), 0), true);
            continue;
        }
        for (std::size_t i = 0; i < manifest.outputs.size(); ++i)
            if (manifest.outputs[i].name == spec.name)
                add(first(bound.outputs[i].view(), manifest.outputs[i].axes.batch), true);
    }
    return found;
}

Route &Runner::bind(Bound &bound, std::int64_t rows, int side) {
    const std::pair key(rows, side);
    auto kept = bound.routes.find(key);
    if (kept == bound.routes.end()) kept = bound.routes.emplace(key, route(bound, rows, side)).first;
    return *kept->second;
}

void Runner::run(Bound &bound, std::int64_t rows) {
    if (model_.native) {
        const auto counts = [&](const char *role) {
            return reinterpret_cast<const std::int32_t *>(states_.counts(role).data);
        };
        return model_.native->step(rows, bound.program->length, bound.inputs[0].as<std::int32_t>(), counts("valid"),
                                   counts("fill"), counts("head"), keys_.data(), values_.data(),
                                   bound.outputs[0].as<float>());
    }
    const auto side = states_.side(0);
    std::unique_ptr<Route> once;
    if (model_.growing) once = route(bound, rows, side);  // shapes change from step to step: bind each time
    auto &way = once ? *once : bind(bound, rows, side);
    for (const auto &[to, from] : way.before) copy(to, from);
    model_.session(*bound.program).run(way.input_names, way.inputs, way.output_names, way.outputs, bound.program->name);
    for (const auto &[to, from] : way.after) copy(to, from);
    if (bound.program->rows_open()) collect(bound, way);
}

// Copy the outputs that the engine allocated, because the program leaves rows open, to ours; check their shapes.
void Runner::collect(Bound &bound, Route &route) {
    std::vector<Value> made;
    for (auto *value : route.outputs) made.emplace_back(model_.engine(), value);
    route.outputs.clear();
    const auto &specs = bound.program->outputs;
    const auto side = 1 - states_.side(0);
    for (std::size_t i = 0; i < specs.size(); ++i) {
        const auto view = made[i].view();
        Array *to = nullptr;
        Shape shape = view.shape;
        for (std::size_t o = 0; o < model_.manifest.outputs.size(); ++o)
            if (model_.manifest.outputs[o].name == specs[i].name) to = &bound.outputs[o], shape = to->shape;
        if (auto *held = states_.named(specs[i].name, true)) {
            to = &held->sides[side], shape = Shape(held->state->shape);
            const auto axis = held->state->rows ? held->state->row_axis : -1;
            const bool fits = axis >= 0 && view.shape.rank() == shape.rank() && view.shape[axis] <= shape[axis];
            if (fits) shape[axis] = view.shape[axis];
            held->there[side] = true;
        }
        need(to && view.dtype == to->dtype && view.shape == shape, TXL_BACKEND, "program ", brief(bound.program->name),
             " returned ", brief(specs[i].name), " ", listed(view.shape), ", expected at most ", listed(shape),
             "; export the model again");
        to->shape = shape;
        copy(to->view(), view);
    }
}

}  // namespace txl_runtime
