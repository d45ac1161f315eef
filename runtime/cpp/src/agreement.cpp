// What the tables of a bundle have to agree on (§ 11), so that whoever runs it can believe them without opening a
// graph.
#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "error.hpp"
#include "manifest.hpp"

namespace txl_runtime {

Manifest implied(Manifest m);  // derived.cpp

namespace {

constexpr double MOST_VALUES = 1099511627776.0;  // of one tensor; more is no model but a mistake

using Say = std::function<void(const std::string &)>;  // refuses

std::string lowered(std::string text) {
    for (auto &sign : text)
        if (sign >= 'A' && sign <= 'Z') sign = static_cast<char>(sign - 'A' + 'a');
    return text;
}

// Whether every system can have a file of this name (§ 1).
bool portable(const std::string &part) {
    if (part.empty() || part.back() == '.' || part.back() == ' ') return false;
    for (const char sign : part)
        if (static_cast<unsigned char>(sign) < 0x20 || sign == 0x7f ||
            std::string("<>:\"|?*\\/").find(sign) != std::string::npos)
            return false;
    const auto stem = lowered(part.substr(0, part.find('.')));
    static const std::set<std::string> DEVICES = {"con", "prn", "aux", "nul"};
    const bool port = stem.size() == 4 && (stem.substr(0, 3) == "com" || stem.substr(0, 3) == "lpt") &&
                      stem[3] >= '0' && stem[3] <= '9';
    return !DEVICES.count(stem) && !port;
}

void check_files(const Manifest &m, const Say &say) {
    for (const auto &name : m.used_files())
        if (!m.files.count(name)) say(brief(name) + " is used but not in the list of files");
    std::set<std::string> alike;
    for (const auto &[name, _] : m.files) {
        for (std::size_t at = 0; at <= name.size();) {
            const auto end = std::min(name.find('/', at), name.size());
            if (!portable(name.substr(at, end - at)))
                say("file name " + brief(name) + " leaves the bundle, or is one that not every system can have");
            at = end + 1;
        }
        if (!alike.insert(lowered(name)).second)
            say("file name " + brief(name) + " is there twice but for upper and lower case, expected it once");
    }
}

void check_rules(const Manifest &m, const Say &say) {
    bool runs = false;
    for (const auto &program : m.programs) {
        if (program.kind == "attention") continue;
        const auto where = "program " + brief(program.name);
        if (program.softmax() != (program.update == Rule::none))
            say(where + " has update rule " + name_of(program.update) + ", which its kind " + program.kind +
                " has not");
        if (program.softmax() != (program.length == 0))
            say(where + " of kind " + program.kind + " has segments of " + std::to_string(program.length));
        runs = runs || program.length;
    }
    if (!runs) say("no program runs segments");
}

void check_columns(const Manifest &m, const Output &output, const Say &say) {
    const auto vocab = m.vocab_size();
    if (vocab && (output.axes.shape.empty() || output.axes.shape.back() != vocab))
        say(output.name + " has other columns than the " + std::to_string(vocab) + " of the vocabulary");
    std::int64_t edge = 0;
    bool ascend = true;
    for (const auto &[first, last] : output.clusters) ascend = ascend && first == edge && last > first, edge = last;
    if (!output.clusters.empty() && (!ascend || edge != vocab || !output.width))
        say("clusters do not ascend within the vocabulary of " + std::to_string(vocab));
}

template <typename Rows>
void unique(const Rows &rows, const std::string &what, const Say &say) {
    std::set<std::string> seen;
    for (const auto &row : rows)
        if (!seen.insert(row.name).second) say("two " + what + " are called " + brief(row.name));
}

void check_interface(const Manifest &m, const Say &say) {
    unique(m.inputs, "inputs", say), unique(m.outputs, "outputs", say), unique(m.programs, "programs", say);
    std::set<std::string> carried, seen;
    for (const auto &state : m.states) carried.insert(state.input);
    for (const auto rule : {Rule::ring, Rule::rolled, Rule::replace}) {
        seen.clear();
        for (const auto *state : m.states_of(rule))
            if (!seen.insert(state->name).second)
                say(join("two states of rule ", name_of(rule), " are called ", brief(state->name)));
    }
    bool valid = false, fill = false;
    for (const auto &entry : m.inputs) {
        if (carried.count(entry.name)) say(brief(entry.name) + " is an input and a state");
        if ((entry.role == "tokens") != (entry.vocab != 0))
            say("input " + brief(entry.name) + " of role " + entry.role +
                " has a vocab or none, expected one for tokens alone");
        const bool count = entry.role == "valid" || entry.role == "fill" || entry.role == "head";
        if (count && (entry.dtype != TXL_INT32 || entry.axes.shape != Sizes{TXL_SIZE_B}))
            say("input " + brief(entry.name) + " is no count, expected int32 ['B']");
        valid = valid || entry.role == "valid", fill = fill || entry.role == "fill";
    }
    if (fill && !m.counts_rows()) say("the programs read a fill, but no counter is called fill");
    for (const auto &[name, counter] : m.counters)
        if (counter.start > counter.most)
            say(join("counter ", brief(name), " starts at ", counter.start, ", expected at most ", counter.most));
    if (!m.exact && !valid) say("lengths are 'valid', but the programs read no valid");
    for (const auto &state : m.states)
        if (!m.lockstep && state.update == Rule::replace && (state.batch_axis < 0 || state.rows || state.absent))
            say("sequences are independent, but " + brief(state.name) + " is shared, grows or is absent at first");
    if (!m.lockstep && m.joint) say("sequences are independent and influence one another, expected one of the two");
    if (!m.lockstep && !valid) say("sequences are independent, but the programs read no valid");
    std::int64_t larger = m.B;
    for (auto size : m.batch_sizes) {
        if (size >= larger)
            say(join("batch_sizes are ", listed(m.batch_sizes), ", expected smaller ones than B ", m.B));
        larger = size;
    }
    for (const auto &program : m.programs) {
        if (!m.batch_sizes.empty() && program.length && !program.open_batch)
            say("there are several batch_sizes, but a program's graph is of one B");
        if (m.lockstep && program.kind == "step" && program.open_batch)
            say("sequences run all or none, but program " + brief(program.name) + " leaves their number open");
    }
    if (m.boundary >= 0 && m.boundary >= m.vocab_size())
        say(join("boundary_token is ", m.boundary, ", expected an id below ", m.vocab_size()));
    if (m.logprobs()) check_columns(m, *m.logprobs(), say);
}

void check_state(const Manifest &m, const State &state, const Say &say) {
    const auto where = "the state table does not fit: " + brief(state.name) + " is " + listed(state.shape);
    const auto rank = static_cast<int>(state.shape.size());
    const auto size = [&](int axis) { return state.shape[static_cast<std::size_t>(axis)]; };
    if (state.batch_axis >= 0 && (state.batch_axis >= rank || size(state.batch_axis) != m.B))
        say(join(where, " with batch axis ", state.batch_axis, ", expected B ", m.B, " there"));
    if (state.row_axis >= 0 && (state.row_axis >= rank || state.row_axis == state.batch_axis))
        say(join(where, " with row axis ", state.row_axis, ", expected another of its axes"));
    if (state.rows && (state.row_axis < 0 || state.rows->first != 0 || state.rows->second != size(state.row_axis)))
        say(where + " and grows, expected none up to its rows");
    double values = 1;
    for (auto one : state.shape) values *= static_cast<double>(one);
    if (values > MOST_VALUES) say(where + ", expected fewer values");
    if (state.initial.is_number_float() && !std::isfinite(state.initial.get<double>()))
        say(where + " and starts as no finite number");
    const bool floating = state.dtype == TXL_FLOAT32 || state.dtype == TXL_FLOAT16 || state.dtype == TXL_BFLOAT16;
    if (state.counted() && (state.batch_axis != 0 || state.row_axis < 0 || state.rows || state.absent || !floating))
        say(where + ", expected floating memory rows of every sequence, the batch first");
    if (state.update != Rule::ring && state.slots) say(where + " with slots, expected them of a ring alone");
}

void check_names(const Manifest &m, Rule rule, const Say &say) {
    std::vector<std::pair<std::string, std::string>> sides;
    for (const auto *state : m.states_of(rule)) sides.emplace_back(state->input, state->output);
    std::vector<std::string> inputs, outputs, in_order;
    for (const auto &[input, output] : sides) inputs.push_back(input), outputs.push_back(output);
    std::sort(sides.begin(), sides.end());
    for (auto *names : {&inputs, &outputs}) {
        std::sort(names->begin(), names->end());
        for (std::size_t i = 1; i < names->size(); ++i)
            if ((*names)[i].compare(0, (*names)[i - 1].size(), (*names)[i - 1]) == 0)
                say("the state table does not fit: " + brief((*names)[i - 1]) + " is a prefix of " +
                    brief((*names)[i]));
    }
    for (const auto &[_, output] : sides) in_order.push_back(output);
    if (in_order != outputs)
        say(join("the state table does not fit: inputs and outputs of rule ", name_of(rule), " sort differently"));
}

void check_memory(const Manifest &m, const Say &say) {
    const auto run = m.updates();
    std::map<std::string, std::pair<Sizes, txl_dtype>> rows;
    std::map<std::string, Json> initial;
    std::set<Rule> held, runs(run.begin(), run.end());
    for (const auto &state : m.states) {
        held.insert(state.update);
        if (state.counted()) rows[state.name] = {state.row_shape(), state.dtype};
        if (initial.emplace(state.name, state.initial).first->second != state.initial)
            say(brief(state.name) + " starts as two things, expected the same in all rules");
    }
    if (!run.empty() && !runs.count(Rule::replace))
        held.erase(Rule::replace);  // whole states may stand beside memory rows
    if (!m.states.empty() && held != runs)
        say("the state table does not fit: a rule has states or programs, expected both");
    if (m.counts_rows() && !m.states.empty() && rows.empty())
        say("counter fill counts memory rows, but the states are replaced, expected it with rolled or ring states");
    const auto longest = m.lengths()[0], ring = m.memory_length() + longest;
    for (auto rule : {Rule::ring, Rule::rolled}) {
        const bool slots = rule == Rule::ring;
        const auto size = slots ? ring + (longest > 1 ? longest : 0) : m.memory_length();
        std::map<std::string, std::pair<Sizes, txl_dtype>> kept;
        const State *first = nullptr;
        for (const auto *state : m.states_of(rule)) {
            if (!state->counted()) continue;
            first = first ? first : state;
            kept[state->name] = {state->row_shape(), state->dtype};
            const bool alike =
                state->shape == first->shape && state->row_axis == first->row_axis && state->dtype == first->dtype;
            if (!alike || state->shape[static_cast<std::size_t>(state->row_axis)] != size ||
                state->slots != (slots ? ring : 0))
                say(join("the state table does not fit memory of ", m.memory_length(), " rows and segments of ",
                         longest, ": ", brief(state->name), " of rule ", name_of(rule), " is ", listed(state->shape),
                         " with ", state->slots, " slots"));
        }
        if (first && kept != rows)
            say(join("the state table does not fit: rule ", name_of(rule),
                     " keeps other tensors than the bundle's other rules"));
    }
    for (auto rule : run) check_names(m, rule, say);
}

// Whether a program's tensor is the state, or one of the sizes that a growing state has.
bool takes(const Spec &spec, const State &state) {
    if (spec.dtype != state.dtype || spec.shape.size() != state.shape.size()) return false;
    for (std::size_t axis = 0; axis < spec.shape.size(); ++axis) {
        const auto size = spec.shape[axis];
        if (static_cast<int>(axis) == state.row_axis && state.rows) {
            if (size != TXL_SIZE_ROWS && (size < state.rows->first || size > state.rows->second)) return false;
        } else if (size != state.shape[axis]) {
            return false;
        }
    }
    return true;
}

Spec spec_of(const std::string &name, txl_dtype dtype, const Axes &axes, std::int64_t b, std::int64_t length) {
    Spec found{name, dtype, axes.shape};
    for (auto &size : found.shape) size = size == TXL_SIZE_B ? b : size == TXL_SIZE_L ? length + axes.ahead : size;
    return found;
}

const Spec *named(const std::vector<Spec> &specs, const std::string &name) {
    for (const auto &spec : specs)
        if (spec.name == name) return &spec;
    return nullptr;
}

void check_segment_program(const Manifest &m, const Program &program, const Say &say) {
    const auto where = "program " + brief(program.name);
    std::vector<Spec> read, returned;
    for (const auto &entry : m.inputs)
        if (entry.role != "targets" && (entry.role != "head" || program.update == Rule::ring))
            read.push_back(spec_of(entry.name, entry.dtype, entry.axes, m.B, program.length));
    if (program.kind == "hidden") {
        if (!m.logprobs() || !m.logprobs()->width)
            return say(where + " is 'hidden', but no output says how wide its rows are");
        returned = {{"hidden", TXL_FLOAT32, {m.B, program.length, m.logprobs()->width}}};
    } else {
        for (const auto &output : m.outputs)
            returned.push_back(spec_of(output.name, output.dtype, output.axes, m.B, program.length));
    }
    bool fits = true, whole = true;
    for (const auto *state : m.states_of(program.update)) {
        if (const auto *spec = named(program.inputs, state->input)) {
            fits = fits && takes(*spec, *state);
            read.push_back(*spec);
        } else {
            fits = fits && (state->absent || (state->rows && state->rows->first == 0));
        }
        const auto *spec = named(program.outputs, state->output);
        whole = whole && spec && takes(*spec, *state);
        if (spec) returned.push_back(*spec);
    }
    if (!fits || read != program.inputs) say("the inputs of " + where + " do not fit the state table");
    if (!whole || returned != program.outputs) say("the outputs of " + where + " do not fit the state table");
    const auto stem = program.name.substr(0, program.name.find('.')), end = "-" + std::to_string(program.length);
    if (stem.size() < end.size() || stem.compare(stem.size() - end.size(), end.size(), end) != 0)
        say(join(where, " has segments of ", program.length, ", expected them in its name"));
}

void check_softmax(const Manifest &m, const Say &say) {
    const auto *output = m.logprobs();
    std::map<std::string, std::pair<Spec, Spec>> wanted;
    for (std::size_t c = 0; output && c < output->clusters.size(); ++c) {
        const auto further = c ? 0 : static_cast<std::int64_t>(output->clusters.size()) - 1;
        const auto columns = output->clusters[c].second - output->clusters[c].first + further;
        wanted[c ? "tail." + std::to_string(c) : "head"] = {{"hidden", TXL_FLOAT32, {TXL_SIZE_ROWS, output->width}},
                                                            {"logprobs", TXL_FLOAT32, {TXL_SIZE_ROWS, columns}}};
    }
    std::set<std::string> held;
    bool needed = false;
    for (const auto &program : m.programs) {
        needed = needed || program.kind == "hidden" || program.softmax();
        if (!program.softmax()) continue;
        if (!wanted.count(program.kind)) say("program " + brief(program.name) + " is of a cluster that there is not");
        const auto &[input, returned] = wanted[program.kind];
        if (program.inputs != std::vector{input} || program.outputs != std::vector{returned})
            say("the inputs or outputs of program " + brief(program.name) + " do not fit the output table");
        held.insert(program.kind);
    }
    if (needed && wanted.empty()) say("program head is missing");
    for (const auto &[kind, _] : wanted)
        if (needed && !held.count(kind)) say("program " + kind + " is missing");
}

void check_programs(const Manifest &m, const Say &say) {
    const auto lengths = m.lengths();
    for (auto rule : m.updates()) {
        std::set<std::string> kinds;
        std::set<std::int64_t> there;
        for (const auto &program : m.programs)
            if (program.update == rule) kinds.insert(program.kind), there.insert(program.length);
        if (kinds.size() > 1 || (rule == Rule::replace && *kinds.begin() != "step"))
            say(join("the programs of rule ", name_of(rule), " are of kinds that it has not together"));
        for (auto length : lengths)
            if (!there.count(length))
                say(join("a program of rule ", name_of(rule), " for segments of ", length, " is missing"));
    }
    check_softmax(m, say);
    std::vector<const Program *> seen;
    for (const auto &program : m.programs) {
        if (program.softmax() || program.kind == "attention") continue;
        check_segment_program(m, program, say);
        for (const auto *other : seen)
            if (other->update == program.update && other->inputs == program.inputs)
                say("program " + brief(program.name) + " takes the same segments as " + brief(other->name));
        seen.push_back(&program);
    }
}

// The program that tells where a model looks stands aside: no stream runs it here, but what is wrong with it is
// refused.
void check_attention(const Manifest &m, const Say &say) {
    std::vector<const Program *> looks;
    for (const auto &program : m.programs)
        if (program.kind == "attention") looks.push_back(&program);
    if (looks.empty()) return;
    const auto &program = *looks[0];
    if (looks.size() > 1) say("two programs are of kind attention, expected one");
    if (program.update != Rule::none || program.open_batch)
        say("program attention has an update rule or several sequences, expected neither");
    bool valid = false, fill = false;
    const auto length = m.lengths()[0], rows = m.memory_length();
    std::vector<Spec> read;
    for (const auto &entry : m.inputs) {
        valid = valid || entry.role == "valid", fill = fill || entry.role == "fill";
        if (entry.role != "targets" && entry.role != "head")
            read.push_back(spec_of(entry.name, entry.dtype, entry.axes, 1, length));
    }
    for (const auto &other : m.programs)
        if (&other != &program && (other.name == program.name || other.file == program.file))
            say("program attention shares its name or file with another, expected its own");
    const auto *tokens = m.tokens();
    if (!tokens || tokens->axes.ahead || tokens->axes.shape != Sizes{TXL_SIZE_B, TXL_SIZE_L} || !valid || !fill)
        return say("program attention is there, but the model does not read tokens and counts");
    const auto run = m.updates();
    if (rows && std::find(run.begin(), run.end(), Rule::rolled) == run.end())
        say("program attention takes rolled memory, which no other program of the bundle has");
    for (const auto *state : m.states_of(Rule::rolled)) {
        Spec spec{state->input, TXL_FLOAT32, state->shape};
        spec.shape[0] = 1;
        read.push_back(spec);
    }
    if (program.length != length || program.inputs != read)
        say("the inputs of program attention do not fit the state table");
    const auto &shape = program.outputs.empty() ? Sizes{} : program.outputs[0].shape;
    const bool fits = shape.size() == 5 && shape[0] > 0 && shape[2] > 0;
    if (!fits || program.outputs !=
                     std::vector<Spec>{{"attention", TXL_FLOAT32, {shape[0], 1, shape[2], length, rows + length}}})
        say("the outputs of program attention are not attention [layers, 1, heads, L, M + L]");
}

void check_derived(const Manifest &m, const Say &say) {
    const auto expected = implied(m);
    for (std::size_t i = 0; i < m.inputs.size(); ++i)
        if (m.inputs[i].counter != expected.inputs[i].counter || m.inputs[i].beyond != expected.inputs[i].beyond)
            say("input " + brief(m.inputs[i].name) + " says another counter or beyond than the other fields imply");
    for (std::size_t i = 0; i < m.outputs.size(); ++i)
        if (m.outputs[i].columns != expected.outputs[i].columns)
            say("output " + brief(m.outputs[i].name) + " says other cluster_columns than the other fields imply");
    for (std::size_t i = 0; i < m.states.size(); ++i)
        if (m.states[i].spill != expected.states[i].spill || m.states[i].in_place != expected.states[i].in_place)
            say("state " + brief(m.states[i].name) + " says another spill or in_place than the other fields imply");
}

}  // namespace

void check_agreement(const Manifest &m, const std::string &where) {
    const Say say = [&](const std::string &problem) {
        refuse(TXL_BUNDLE, where, ": ", problem, "; export the model again");
    };
    check_files(m, say), check_rules(m, say), check_interface(m, say);
    for (const auto &state : m.states) check_state(m, state, say);
    check_memory(m, say), check_programs(m, say), check_attention(m, say), check_derived(m, say);
}

}  // namespace txl_runtime
