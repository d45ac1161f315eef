#include "manifest.hpp"

#include <algorithm>
#include <set>

#include "error.hpp"
#include "published.hpp"

namespace txl_runtime {
namespace {

txl_dtype dtype_of(const Json &name) {
    for (auto dtype : {TXL_BOOL, TXL_INT32, TXL_FLOAT32, TXL_FLOAT16, TXL_BFLOAT16})
        if (name == name_of(dtype)) return dtype;
    throw std::logic_error("the schema allows another type");
}

Rule rule_of(const Json &name) {
    for (auto rule : {Rule::ring, Rule::rolled, Rule::replace})
        if (name == name_of(rule)) return rule;
    return Rule::none;
}

Sizes sizes_of(const Json &shape) {
    static const std::map<std::string, std::int64_t> OPEN = {
        {"B", TXL_SIZE_B}, {"L", TXL_SIZE_L}, {"rows", TXL_SIZE_ROWS}};
    Sizes found;
    for (const auto &size : shape) found.push_back(size.is_string() ? OPEN.at(size) : size.get<std::int64_t>());
    return found;
}

template <typename T>
T or_else(const Json &value, T none) {
    return value.is_null() ? none : value.get<T>();
}

Input input_of(const Json &row) {
    Input found{row["name"], row["role"], or_else<std::string>(row["beyond"], ""), dtype_of(row["dtype"]), {}, 0, {}};
    found.axes = Axes(sizes_of(row["shape"]), row["lookahead"].get<std::int64_t>());
    found.vocab = or_else<std::int64_t>(row["vocab"], 0);
    if (const auto &counter = row["counter"]; !counter.is_null())
        found.counter = Counting{counter["start"], counter["most"], counter["over"]};
    return found;
}

Output output_of(const Json &row) {
    Output found{row["name"], row["role"], dtype_of(row["dtype"]), Axes(sizes_of(row["shape"])), {}, {}, {}, 0};
    found.still = found.axes.still();
    for (const auto &pair : row["clusters"]) found.clusters.emplace_back(pair[0], pair[1]);
    found.columns = row["cluster_columns"].get<std::vector<std::int64_t>>();
    found.width = or_else<std::int64_t>(row["width"], 0);
    return found;
}

State state_of(const Json &row) {
    State found{
        row["name"], row["input"],  row["output"],   dtype_of(row["dtype"]), sizes_of(row["shape"]), -1, -1,
        {},          row["absent"], row["in_place"], row["initial"],         rule_of(row["update"]), 0,  row["spill"]};
    found.batch_axis = or_else(row["batch_axis"], -1);
    found.row_axis = or_else(row["row_axis"], -1);
    found.slots = or_else<std::int64_t>(row["slots"], 0);
    if (const auto &rows = row["rows"]; !rows.is_null()) found.rows = std::pair(rows[0], rows[1]);
    return found;
}

std::vector<Spec> specs_of(const Json &rows) {
    std::vector<Spec> found;
    for (const auto &row : rows) found.push_back({row["name"], dtype_of(row["dtype"]), sizes_of(row["shape"])});
    return found;
}

Program program_of(const Json &row) {
    Program found{row["name"],
                  row["kind"],
                  row["file"],
                  row["segment_length"],
                  rule_of(row["update"]),
                  specs_of(row["inputs"]),
                  specs_of(row["outputs"]),
                  row["open_batch"],
                  {}};
    found.opset = row["opset"].get<std::map<std::string, std::int64_t>>();
    return found;
}

// The major version; what is none is refused.
int major_of(const Json &document, const std::string &where) {
    const auto text = document.is_object() && document.contains("format") && document["format"].is_string()
                          ? document["format"].get<std::string>()
                          : std::string();
    need(text == "txl-deploy.bundle", TXL_BUNDLE, where, ": format is '", brief(text),
         "', expected 'txl-deploy.bundle'; export the model again");
    const auto version = document.contains("format_version") && document["format_version"].is_string()
                             ? document["format_version"].get<std::string>()
                             : std::string();
    const auto major = version.substr(0, version.find('.'));
    const bool number = !major.empty() && major.find_first_not_of("0123456789") == std::string::npos && major[0] != '0';
    need(number, TXL_BUNDLE, where, ": format_version is '", brief(version), "', expected such as '2.1'; export again");
    need(major == "1" || major == "2", TXL_BUNDLE, where, ": written in format ", brief(version),
         ", this library reads up to 2.x; upgrade it");
    return major[0] - '0';
}

Sizes without(const Sizes &shape, int first, int second) {
    Sizes found;
    for (int axis = 0; axis < static_cast<int>(shape.size()); ++axis)
        if (axis != first && axis != second) found.push_back(shape[static_cast<std::size_t>(axis)]);
    return found;
}

}  // namespace

const char *name_of(Rule rule) {
    static constexpr const char *NAMES[] = {"ring", "rolled", "replace", "none"};
    return NAMES[static_cast<int>(rule)];
}

Axes::Axes(const Sizes &sizes, std::int64_t behind) : shape(sizes), ahead(behind) {
    for (int axis = 0; axis < static_cast<int>(sizes.size()); ++axis) {
        if (sizes[static_cast<std::size_t>(axis)] == TXL_SIZE_B && batch < 0) batch = axis;
        if (sizes[static_cast<std::size_t>(axis)] == TXL_SIZE_L) positions.push_back(axis);
    }
}

Shape Axes::sizes(std::int64_t b, std::int64_t length) const {
    Shape found(shape);
    for (int axis = 0; axis < found.rank(); ++axis)
        if (found[axis] < 0) found[axis] = found[axis] == TXL_SIZE_B ? b : length + ahead;
    return found;
}

Axes Axes::still() const {
    Sizes found;
    for (auto size : shape)
        if (size != TXL_SIZE_L) found.push_back(size);
    return Axes(found, ahead);
}

Sizes State::row_shape() const { return without(shape, batch_axis, row_axis); }
Sizes State::sequence_shape() const { return without(shape, batch_axis, batch_axis); }

bool Program::rows_open() const {
    for (const auto *side : {&inputs, &outputs})
        for (const auto &spec : *side)
            if (std::find(spec.shape.begin(), spec.shape.end(), TXL_SIZE_ROWS) != spec.shape.end()) return true;
    return false;
}

std::vector<std::int64_t> Manifest::lengths() const {
    std::set<std::int64_t, std::greater<>> found;
    for (const auto &program : programs)
        if (program.length) found.insert(program.length);
    return {found.begin(), found.end()};
}

std::vector<Rule> Manifest::updates() const {
    std::set<Rule> found;
    for (const auto &program : programs)
        if (program.update != Rule::none) found.insert(program.update);
    return {found.begin(), found.end()};
}

std::vector<const State *> Manifest::states_of(Rule update) const {
    const auto run = updates();
    const bool whole = std::find(run.begin(), run.end(), update) != run.end();
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

std::int64_t Manifest::memory_length() const { return counts_rows() ? counters.at("fill").most : 0; }
std::int64_t Manifest::fresh_fill() const { return counts_rows() ? counters.at("fill").start : 0; }

bool Manifest::reads_text() const {
    const auto *read = tokens();
    const auto *returned = logprobs();
    if (!read || !returned || read->axes.ahead) return false;
    const auto &shape = read->axes.shape;
    const bool known =
        shape == Sizes{TXL_SIZE_B, TXL_SIZE_L} || shape == Sizes{TXL_SIZE_L, TXL_SIZE_B} || shape == Sizes{TXL_SIZE_B};
    auto wanted = shape;
    wanted.push_back(vocab_size());
    return known && returned->axes.shape == wanted;
}

std::vector<std::string> Manifest::used_files() const {
    std::set<std::string> found = {weights};
    if (!vocabulary.empty()) found.insert(vocabulary);
    if (!selftest.empty()) found.insert(selftest);
    for (const auto &program : programs) found.insert(program.file);
    return {found.begin(), found.end()};
}

Manifest read_manifest(const std::string &text, const std::string &where) {
    auto document = parse_json(text, where);
    if (major_of(document, where) == 1) document = upgraded(document, where);
    hold_against(document, parse_json(published_schema(), "the schema"), "Manifest", where);
    Manifest found;
    found.model_id = document["model_id"], found.precision = document["precision"], found.weights = document["weights"];
    found.vocabulary = or_else<std::string>(document["vocabulary"], "");
    found.selftest =
        or_else<std::string>(document["selftest"], document["files"].contains("selftest.npz") ? "selftest.npz" : "");
    found.B = document["batch_size"], found.boundary = or_else<std::int64_t>(document["boundary_token"], -1);
    found.batch_sizes = document["batch_sizes"].get<std::vector<std::int64_t>>();
    found.lockstep = document["streams"] == "lockstep", found.joint = document["joint"];
    found.exact = document["lengths"] == "exact", found.by_rows = document["commits"] == "rows";
    for (const auto &row : document["inputs"]) found.inputs.push_back(input_of(row));
    for (const auto &row : document["outputs"]) found.outputs.push_back(output_of(row));
    for (const auto &row : document["states"]) found.states.push_back(state_of(row));
    for (const auto &row : document["programs"]) found.programs.push_back(program_of(row));
    for (const auto &[name, row] : document["counters"].items())
        found.counters[name] = {row["start"], row["most"], "stay"};
    for (const auto &[name, row] : document["files"].items()) found.files[name] = {row["size"], row["sha256"]};
    derive(found);
    check_agreement(found, where);
    return found;
}

}  // namespace txl_runtime
