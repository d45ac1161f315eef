#include "manifest.hpp"

#include <algorithm>

#include "error.hpp"
#include "ranges.hpp"

namespace txl_runtime {
namespace {

// take() reads a field of a document that the schema has allowed.
void take(const Json &name, txl_dtype &to) {
    for (auto dtype : {TXL_BOOL, TXL_INT32, TXL_FLOAT32, TXL_FLOAT16, TXL_BFLOAT16})
        if (name == name_of(dtype)) to = dtype;
}

void take(const Json &name, Rule &to) {
    to = Rule::none;
    for (auto rule : {Rule::ring, Rule::rolled, Rule::replace})
        if (name == name_of(rule)) to = rule;
}

void take(const Json &shape, Sizes &to) {
    static const std::map<Json, std::int64_t> OPEN = {{"B", TXL_SIZE_B}, {"L", TXL_SIZE_L}, {"rows", TXL_SIZE_ROWS}};
    for (const auto &size : shape) to.push_back(size.is_string() ? OPEN.at(size) : size.get<std::int64_t>());
}

template <typename T>
void take(const Json &value, T &to) {
    value.get_to(to);
}

template <typename T>
void take(const Json &value, std::optional<T> &to) {
    to = value.get<T>();
}

// Read fields by name; a null field leaves `to` unchanged.
template <typename T, typename... More>
void take(const Json &row, const char *name, T &to, More &&...more) {
    if (const auto &value = row[name]; !value.is_null()) take(value, to);
    if constexpr (sizeof...(more)) take(row, more...);
}

}  // namespace

// nlohmann's reader finds these functions by their name, from_json.
void from_json(const Json &row, Counting &to) {
    take(row, "start", to.start, "most", to.most);
    if (row.contains("over")) take(row, "over", to.over);
}

void from_json(const Json &row, Record &to) { take(row, "size", to.size, "sha256", to.sha256); }

void from_json(const Json &row, Spec &to) { take(row, "name", to.name, "dtype", to.dtype, "shape", to.shape); }

void from_json(const Json &row, Input &to) {
    Sizes shape;
    take(row, "name", to.name, "role", to.role, "dtype", to.dtype, "shape", shape, "vocab", to.vocab, "counter",
         to.counter, "beyond", to.beyond);
    to.axes = Axes(shape, row["lookahead"]);
}

void from_json(const Json &row, Output &to) {
    Sizes shape;
    take(row, "name", to.name, "role", to.role, "dtype", to.dtype, "shape", shape, "clusters", to.clusters,
         "cluster_columns", to.columns, "width", to.width);
    to.axes = Axes(shape), to.still = to.axes.still();
}

void from_json(const Json &row, State &to) {
    take(row, "name", to.name, "input", to.input, "output", to.output, "dtype", to.dtype, "shape", to.shape,
         "batch_axis", to.batch_axis, "row_axis", to.row_axis, "rows", to.rows, "absent", to.absent, "in_place",
         to.in_place, "initial", to.initial, "update", to.update, "slots", to.slots, "spill", to.spill);
}

void from_json(const Json &row, Program &to) {
    take(row, "name", to.name, "kind", to.kind, "file", to.file, "segment_length", to.length, "update", to.update,
         "inputs", to.inputs, "outputs", to.outputs, "open_batch", to.open_batch, "opset", to.opset);
}

namespace {

// Throw TXL_BUNDLE unless the document is a manifest of format 2.
void check_version(const Json &document, const std::string &where) {
    const auto said = [&](const char *name) {
        const bool there = document.is_object() && document.contains(name) && document[name].is_string();
        return there ? document[name].get<std::string>() : "";
    };
    const auto format = said("format"), version = said("format_version"), major = version.substr(0, version.find('.'));
    need(format == "txl-deploy.bundle", TXL_BUNDLE, where, ": format is '", brief(format),
         "', expected 'txl-deploy.bundle'; export the model again");
    const bool number = !major.empty() && major.find_first_not_of("0123456789") == std::string::npos;
    need(number && major[0] != '0' && major != "1", TXL_BUNDLE, where, ": format_version is '", brief(version),
         "', expected such as '2.1'; export again");
    need(major == "2", TXL_BUNDLE, where, ": written in format ", brief(version),
         ", this library reads up to 2.x; upgrade it");
}

Sizes without(Sizes shape, int first, int second) {
    for (auto axis : {std::max(first, second), std::min(first, second)})
        if (axis >= 0) shape.erase(shape.begin() + axis);
    return shape;
}

// Return true if the manifest has none of the fields that format 2.1 added.
bool says_nothing(const Manifest &m) {
    return ranges::all_of(m.inputs, [](auto &entry) { return !entry.counter && entry.beyond.empty(); }) &&
           ranges::all_of(m.outputs, [](auto &output) { return output.columns.empty(); }) &&
           ranges::all_of(m.states, [](auto &state) { return !state.spill && !state.in_place; });
}

}  // namespace

const char *name_of(Rule rule) {
    static constexpr const char *NAMES[] = {"ring", "rolled", "replace", "none"};
    return NAMES[int(rule)];
}

Axes::Axes(const Sizes &sizes, std::int64_t behind) : shape(sizes), ahead(behind) {
    for (int axis = 0; axis < std::ptrdiff_t(sizes.size()); ++axis) {
        if (sizes[axis] == TXL_SIZE_B && batch < 0) batch = axis;
        if (sizes[axis] == TXL_SIZE_L) positions.push_back(axis);
    }
}

Shape Axes::sizes(std::int64_t b, std::int64_t length) const {
    Shape found(shape);
    for (int axis = 0; axis < found.rank(); ++axis)
        if (found[axis] < 0) found[axis] = found[axis] == TXL_SIZE_B ? b : length + ahead;
    return found;
}

Axes Axes::still() const {
    auto found = shape;
    ranges::erase(found, TXL_SIZE_L);
    return Axes(found, ahead);
}

Sizes State::row_shape() const { return without(shape, batch_axis, row_axis); }
Sizes State::sequence_shape() const { return without(shape, batch_axis, -1); }

bool Program::rows_open() const {
    const auto open = [](const Spec &spec) { return ranges::count(spec.shape, std::int64_t{TXL_SIZE_ROWS}) > 0; };
    return ranges::any_of(inputs, open) || ranges::any_of(outputs, open);
}

Sizes Manifest::lengths() const {
    std::set<std::int64_t, std::greater<>> found;
    for (const auto &program : programs)
        if (program.length) found.insert(program.length);
    return {found.begin(), found.end()};
}

std::vector<const State *> Manifest::states_of(Rule update) const {
    const bool whole = updates.count(update) > 0;
    std::vector<const State *> found;
    for (const auto &state : states)
        if (state.update == update || (whole && state.update == Rule::replace)) found.push_back(&state);
    return found;
}

std::vector<const Input *> Manifest::given() const {
    std::vector<const Input *> found;
    for (const auto &entry : inputs)
        if (entry.role == "tokens" || entry.role == "feature") found.push_back(&entry);
    return found;
}

const Input *Manifest::tokens() const {
    const auto read = given();
    return read.size() == 1 && read[0]->role == "tokens" ? read[0] : nullptr;
}

const Output *Manifest::logprobs() const {
    for (const auto &output : outputs)
        if (output.role == "logprobs") return &output;
    return nullptr;
}

std::int64_t Manifest::vocab_size() const {
    for (const auto &entry : inputs)
        if (entry.vocab) return entry.vocab;
    return 0;
}

bool Manifest::reads_text() const {
    const auto *read = tokens();
    const auto *returned = logprobs();
    if (!read || !returned || read->axes.ahead) return false;
    auto shape = read->axes.shape;
    const auto known = {Sizes{TXL_SIZE_B, TXL_SIZE_L}, Sizes{TXL_SIZE_L, TXL_SIZE_B}, Sizes{TXL_SIZE_B}};
    if (!ranges::count(known, shape)) return false;
    shape.push_back(vocab_size());
    return returned->axes.shape == shape;
}

std::set<std::string> Manifest::used_files() const {
    std::set<std::string> found = {weights};
    for (const auto &name : {vocabulary, selftest})
        if (!name.empty()) found.insert(name);
    for (const auto &program : programs) found.insert(program.file);
    return found;
}

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
        for (int tail = 1; tail < std::ptrdiff_t(output.clusters.size()); ++tail)
            output.columns.push_back(output.clusters[0].second + tail - 1);
    }
    for (auto &state : m.states) {
        state.in_place = state.update == Rule::ring;
        const bool rows =
            state.in_place && state.slots && state.row_axis >= 0 && state.row_axis < std::ptrdiff_t(state.shape.size());
        state.spill = rows ? std::max<std::int64_t>(state.shape[state.row_axis] - state.slots, 0) : 0;
    }
    return m;
}

Manifest read_manifest(const std::string &text, const std::string &where) {
    auto document = parse_json(text, where);
    check_version(document, where);
    hold_against(document, parse_json(published_schema(), "the schema"), where);
    Manifest m;
    take(document, "model_id", m.model_id, "precision", m.precision, "weights", m.weights, "vocabulary", m.vocabulary,
         "selftest", m.selftest, "batch_size", m.B, "boundary_token", m.boundary, "stepwise", m.stepwise,
         "batch_sizes", m.batch_sizes, "joint", m.joint, "inputs", m.inputs, "outputs", m.outputs, "states", m.states,
         "programs", m.programs, "counters", m.counters, "files", m.files);
    m.family = document["family"].dump();
    // Only bundles of 0.8 have programs of this kind; nothing runs them.
    ranges::erase_if(m.programs, [](const Program &program) { return program.kind == "attention"; });
    for (const auto &program : m.programs)
        if (program.update != Rule::none) m.updates.insert(program.update);
    m.lockstep = document["streams"] == "lockstep";
    m.exact = document["lengths"] == "exact", m.by_rows = document["commits"] == "rows";
    if (m.selftest.empty() && m.files.count("selftest.npz")) m.selftest = "selftest.npz";
    if (says_nothing(m)) m = implied(m);
    check_agreement(m, where);
    return m;
}

}  // namespace txl_runtime
