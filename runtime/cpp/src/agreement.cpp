// The check that a bundle's tables agree (§ 11), so that the rest of the library trusts them without opening a graph.
#include <algorithm>
#include <cmath>
#include <functional>

#include "error.hpp"
#include "manifest.hpp"
#include "ranges.hpp"

namespace txl_runtime {
namespace {

constexpr double MOST_VALUES = 1099511627776.0;  // 2^40 values of one tensor; no model has more
constexpr std::int64_t MOST_UNSEEN = 4096;       // largest B that no tensor's shape confirms

std::string lowered(std::string text) {
    for (auto &sign : text)
        if (sign >= 'A' && sign <= 'Z') sign += 'a' - 'A';
    return text;
}

// Return true if every operating system allows this part of a file name (§ 1).
bool portable(const std::string &part) {
    const auto bad = [](unsigned char sign) {
        return sign < 0x20 || sign == 0x7f || std::string("<>:\"|?*\\/").find(sign) != std::string::npos;
    };
    if (part.empty() || part.back() == '.' || part.back() == ' ' || ranges::any_of(part, bad)) return false;
    const auto stem = lowered(part.substr(0, part.find('.')));
    const bool port =
        stem.size() == 4 && (starts_with(stem, "com") || starts_with(stem, "lpt")) && stem[3] >= '0' && stem[3] <= '9';
    return !port && stem != "con" && stem != "prn" && stem != "aux" && stem != "nul";
}

// Return true if a program's tensor has the state's dtype and shape, or, if the state grows, an allowed number of rows.
bool takes(const Spec &spec, const State &state) {
    if (spec.dtype != state.dtype || spec.shape.size() != state.shape.size()) return false;
    for (int axis = 0; axis < std::ptrdiff_t(spec.shape.size()); ++axis) {
        const auto size = spec.shape[axis];
        const bool grows = axis == state.row_axis && state.rows;
        const bool fits = grows ? size == TXL_SIZE_ROWS || (size >= state.rows->first && size <= state.rows->second)
                                : size == state.shape[axis];
        if (!fits) return false;
    }
    return true;
}

// Return a table's tensor as a program has it: [B, L, 3] with b 2 and length 4 is [2, 4, 3].
template <typename Row>
Spec spec_of(const Row &row, std::int64_t b, std::int64_t length) {
    Spec found{row.name, row.dtype, row.axes.shape};
    for (auto &size : found.shape) size = size == TXL_SIZE_B ? b : size == TXL_SIZE_L ? length + row.axes.ahead : size;
    return found;
}

std::map<std::string, const Spec *> by_name(const std::vector<Spec> &specs) {
    std::map<std::string, const Spec *> found;
    for (const auto &spec : specs) found.emplace(spec.name, &spec);
    return found;
}

class Agreement {
public:
    Agreement(const Manifest &manifest, const std::string &where) : m(manifest), where_(where), lengths_(m.lengths()) {
        for (const auto &entry : m.inputs) roles_.insert(entry.role);
        files();
        rules();
        interface();
        for (const auto &state : m.states) tensor(state);
        memory();
        programs();
        softmax();
        derived();
    }

private:
    // `said` begins with what was found.
    template <typename... Parts>
    void must(bool holds, const Parts &...said) const {
        need(holds, TXL_BUNDLE, where_, ": ", said..., "; export the model again");
    }

    void files() const {
        for (const auto &name : m.used_files())
            must(m.files.count(name), brief(name), " is used but not in the list of files");
        std::set<std::string> alike;
        for (const auto &[name, _] : m.files) {
            for (std::size_t at = 0; at <= name.size();) {
                const auto end = std::min(name.find('/', at), name.size());
                must(portable(name.substr(at, end - at)), "file name ", brief(name),
                     " leaves the bundle, or is one that not every system can have");
                at = end + 1;
            }
            must(alike.insert(lowered(name)).second, "file name ", brief(name),
                 " is there twice but for upper and lower case, expected it once");
        }
    }

    void rules() const {
        for (const auto &program : m.programs) {
            must(program.softmax() == (program.update == Rule::none), "program ", brief(program.name),
                 " has update rule ", name_of(program.update), ", which its kind ", program.kind, " has not");
            must(program.softmax() == (program.length == 0), "program ", brief(program.name), " of kind ", program.kind,
                 " has segments of ", program.length);
        }
        must(!lengths_.empty(), "no program runs segments");
    }

    template <typename Rows, typename Row>
    void unique(const Rows &rows, const std::string &what, std::string Row::*name) const {
        std::set<std::string> seen;
        for (const auto &row : rows)
            must(seen.insert(std::invoke(name, row)).second, "two ", what, " are called ",
                 brief(std::invoke(name, row)));
    }

    void interface() const {
        unique(m.inputs, "inputs", &Input::name);
        unique(m.outputs, "outputs", &Output::name);
        unique(m.programs, "programs", &Program::name);
        std::set<std::string> carried;
        for (const auto &state : m.states) carried.insert(state.input);
        for (const auto rule : {Rule::ring, Rule::rolled, Rule::replace})
            unique(m.states_of(rule), join("states of rule ", name_of(rule)), &State::name);
        for (const auto &entry : m.inputs) {
            must(!carried.count(entry.name), brief(entry.name), " is an input and a state");
            must((entry.role == "tokens") == (entry.vocab != 0), "input ", brief(entry.name), " of role ", entry.role,
                 " has a vocab or none, expected one for tokens alone");
            const bool count = entry.role == "valid" || entry.role == "fill" || entry.role == "head";
            must(!count || (entry.dtype == TXL_INT32 && entry.axes.shape == Sizes{TXL_SIZE_B}), "input ",
                 brief(entry.name), " is no count, expected int32 ['B']");
        }
        const bool valid = roles_.count("valid");
        must(!roles_.count("fill") || m.counts_rows(), "the programs read a fill, but no counter is called fill");
        for (const auto &[name, counter] : m.counters)
            must(counter.start <= counter.most, "counter ", brief(name), " starts at ", counter.start,
                 ", expected at most ", counter.most);
        must(m.exact || valid, "lengths are 'valid', but the programs read no valid");
        must(m.lockstep || valid, "sequences are independent, but the programs read no valid");
        must(m.lockstep || !m.joint, "sequences are independent and influence one another, expected one of the two");
        for (const auto &state : m.states)
            must(m.lockstep || state.counted() || (state.batch_axis >= 0 && !state.rows && !state.absent),
                 "sequences are independent, but ", brief(state.name), " is shared, grows or is absent at first");
        const auto has = [](const auto &row) { return row.axes.batch >= 0; };
        const auto carries = [](const State &state) { return state.batch_axis >= 0; };
        must(m.B <= MOST_UNSEEN || ranges::any_of(m.inputs, has) || ranges::any_of(m.outputs, has) ||
                 ranges::any_of(m.states, carries),
             "batch_size is ", m.B, ", which no input, output or state has, expected at most ", MOST_UNSEEN);
        must(m.stepwise <= lengths_[0], "stepwise is ", m.stepwise, ", expected at most ", lengths_[0],
             ", the positions of the longest segment");
        auto larger = m.B;
        for (auto size : m.batch_sizes) {
            must(size < larger, "batch_sizes are ", listed(m.batch_sizes), ", expected smaller ones than B ", m.B);
            larger = size;
        }
        for (const auto &program : m.programs) {
            must(m.batch_sizes.empty() || !program.length || program.open_batch,
                 "there are several batch_sizes, but a program's graph is of one B");
            must(!m.lockstep || program.kind != "step" || !program.open_batch,
                 "sequences run all or none, but program ", brief(program.name), " leaves their number open");
        }
        must(m.boundary < 0 || m.boundary < m.vocab_size(), "boundary_token is ", m.boundary, ", expected an id below ",
             m.vocab_size());
        if (m.logprobs()) columns(*m.logprobs());
    }

    void columns(const Output &output) const {
        const auto vocab = m.vocab_size();
        const auto &shape = output.axes.shape;
        must(!vocab || (!shape.empty() && shape.back() == vocab), output.name, " has other columns than the ", vocab,
             " of the vocabulary");
        std::int64_t edge = 0;
        bool ascend = true;
        for (const auto &[first, last] : output.clusters) ascend = ascend && first == edge && last > first, edge = last;
        must(output.clusters.empty() || (ascend && edge == vocab && output.width),
             "clusters do not ascend within the vocabulary of ", vocab);
    }

    void tensor(const State &state) const {
        const auto rank = std::ptrdiff_t(state.shape.size());
        const auto fits = [&](bool holds, const auto &...said) {
            must(holds, "the state table does not fit: ", brief(state.name), " is ", listed(state.shape), said...);
        };
        fits(state.batch_axis < 0 || (state.batch_axis < rank && state.shape[state.batch_axis] == m.B),
             " with batch axis ", state.batch_axis, ", expected B ", m.B, " there");
        fits(state.row_axis < 0 || (state.row_axis < rank && state.row_axis != state.batch_axis), " with row axis ",
             state.row_axis, ", expected another of its axes");
        fits(!state.rows ||
                 (state.row_axis >= 0 && state.rows->first == 0 && state.rows->second == state.shape[state.row_axis]),
             " and grows, expected none up to its rows");
        double values = 1;
        for (auto one : state.shape) values *= one;
        fits(values <= MOST_VALUES, ", expected fewer values");
        fits(!state.initial.is_number_float() || std::isfinite(state.initial.get<double>()),
             " and starts as no finite number");
        const bool floating = state.dtype == TXL_FLOAT32 || state.dtype == TXL_FLOAT16 || state.dtype == TXL_BFLOAT16;
        const bool rows = state.batch_axis == 0 && state.row_axis >= 0 && !state.rows && !state.absent && floating;
        fits(!state.counted() || rows, ", expected floating memory rows of every sequence, the batch first");
        fits(state.update == Rule::ring || !state.slots, " with slots, expected them of a ring alone");
    }

    // All rules keep the same memory tensors, and those of one rule share one shape.
    void memory() const {
        using Kept = std::map<std::string, std::pair<Sizes, txl_dtype>>;
        Kept rows;
        std::map<std::string, Json> initial;
        std::set<Rule> held;
        const auto &runs = m.updates;
        for (const auto &state : m.states) {
            held.insert(state.update);
            if (state.counted()) rows[state.name] = {state.row_shape(), state.dtype};
            must(initial.emplace(state.name, state.initial).first->second == state.initial, brief(state.name),
                 " starts as two things, expected the same in all rules");
        }
        if (!runs.empty() && !runs.count(Rule::replace)) held.erase(Rule::replace);  // such states may accompany memory
        must(m.states.empty() || held == runs,
             "the state table does not fit: a rule has states or programs, expected both");
        must(!m.counts_rows() || m.states.empty() || !rows.empty(),
             "counter fill counts memory rows, but the states are replaced, expected it with rolled or ring states");
        const auto longest = lengths_[0], ring = m.memory_length() + longest;
        for (auto rule : {Rule::ring, Rule::rolled}) {
            const auto slots = rule == Rule::ring ? ring : 0;
            const auto size = slots ? ring + (longest > 1 ? longest : 0) : m.memory_length();
            Kept kept;
            const State *first = nullptr;
            for (const auto *state : m.states_of(rule)) {
                if (!state->counted()) continue;
                first = first ? first : state;
                kept[state->name] = {state->row_shape(), state->dtype};
                const bool alike =
                    state->shape == first->shape && state->row_axis == first->row_axis && state->dtype == first->dtype;
                must(alike && state->shape[state->row_axis] == size && state->slots == slots,
                     "the state table does not fit memory of ", m.memory_length(), " rows and segments of ", longest,
                     ": ", brief(state->name), " of rule ", name_of(rule), " is ", listed(state->shape), " with ",
                     state->slots, " slots");
            }
            must(!first || kept == rows, "the state table does not fit: rule ", name_of(rule),
                 " keeps other tensors than the bundle's other rules");
        }
        for (auto rule : runs) names(rule);
    }

    // Sorted inputs pair with sorted outputs, and no name is a prefix of a different one.
    void names(Rule rule) const {
        std::vector<std::pair<std::string, std::string>> sides;
        for (const auto *state : m.states_of(rule)) sides.emplace_back(state->input, state->output);
        ranges::sort(sides);
        std::vector<std::string> inputs, in_order;
        for (const auto &[input, output] : sides) inputs.push_back(input), in_order.push_back(output);
        auto outputs = in_order;
        ranges::sort(outputs);
        for (const auto *list : {&inputs, &outputs})
            for (std::size_t i = 1; i < list->size(); ++i)
                must(!starts_with((*list)[i], (*list)[i - 1]), "the state table does not fit: ", brief((*list)[i - 1]),
                     " is a prefix of ", brief((*list)[i]));
        must(in_order == outputs, "the state table does not fit: inputs and outputs of rule ", name_of(rule),
             " sort differently");
    }

    void programs() const {
        for (auto rule : m.updates) {
            std::set<std::string> kinds;
            std::set<std::int64_t> there;
            for (const auto &program : m.programs)
                if (program.update == rule) kinds.insert(program.kind), there.insert(program.length);
            must(kinds.size() == 1 && (rule != Rule::replace || kinds.count("step")), "the programs of rule ",
                 name_of(rule), " are of kinds that it has not together");
            for (auto length : lengths_)
                must(there.count(length), "a program of rule ", name_of(rule), " for segments of ", length,
                     " is missing");
        }
        std::map<std::pair<Rule, std::vector<Spec>>, std::string> seen;
        for (const auto &program : m.programs) {
            if (program.softmax()) continue;
            segment(program);
            const auto [other, first] = seen.emplace(std::pair(program.update, program.inputs), program.name);
            must(first, "program ", brief(program.name), " takes the same segments as ", brief(other->second));
        }
    }

    void segment(const Program &program) const {
        const auto name = "program " + brief(program.name);
        std::vector<Spec> read, returned;
        for (const auto &entry : m.inputs)
            if (entry.role != "targets" && (entry.role != "head" || program.update == Rule::ring))
                read.push_back(spec_of(entry, m.B, program.length));
        if (program.kind == "hidden") {
            must(m.logprobs() && m.logprobs()->width, name, " is 'hidden', but no output says how wide its rows are");
            returned = {{"hidden", TXL_FLOAT32, {m.B, program.length, m.logprobs()->width}}};
        } else {
            for (const auto &output : m.outputs) returned.push_back(spec_of(output, m.B, program.length));
        }
        bool fits = true, whole = true;
        auto taken = by_name(program.inputs), given = by_name(program.outputs);
        for (const auto *state : m.states_of(program.update)) {
            const auto *input = taken[state->input], *output = given[state->output];
            // A program for the first step need not read a state that is absent or has no rows yet.
            fits = fits && (input ? takes(*input, *state) : state->absent || (state->rows && state->rows->first == 0));
            whole = whole && output && takes(*output, *state);
            if (input) read.push_back(*input);
            if (output) returned.push_back(*output);
        }
        must(fits && read == program.inputs, "the inputs of ", name, " do not fit the state table");
        must(whole && returned == program.outputs, "the outputs of ", name, " do not fit the state table");
        must(ends_with(program.name.substr(0, program.name.find('.')), join("-", program.length)), name,
             " has segments of ", program.length, ", expected them in its name");
    }

    void softmax() const {
        const auto *output = m.logprobs();
        std::map<std::string, std::pair<Spec, Spec>> wanted;
        for (std::size_t c = 0; output && c < output->clusters.size(); ++c) {
            const std::int64_t further = c ? 0 : output->clusters.size() - 1;
            const auto columns = output->clusters[c].second - output->clusters[c].first + further;
            wanted[c ? join("tail.", c) : "head"] = {{"hidden", TXL_FLOAT32, {TXL_SIZE_ROWS, output->width}},
                                                     {"logprobs", TXL_FLOAT32, {TXL_SIZE_ROWS, columns}}};
        }
        std::set<std::string> held;
        bool needed = false;
        for (const auto &program : m.programs) {
            needed = needed || program.kind == "hidden" || program.softmax();
            if (!program.softmax()) continue;
            must(wanted.count(program.kind), "program ", brief(program.name), " is of a cluster that there is not");
            const auto &[input, returned] = wanted[program.kind];
            must(program.inputs == std::vector{input} && program.outputs == std::vector{returned},
                 "the inputs or outputs of program ", brief(program.name), " do not fit the output table");
            held.insert(program.kind);
        }
        must(!needed || !wanted.empty(), "program head is missing");
        for (const auto &[kind, _] : wanted) must(!needed || held.count(kind), "program ", kind, " is missing");
    }

    void derived() const {
        const auto expected = implied(m);
        const auto same = [&](const auto &rows, const auto &wanted, const char *what, const char *fields) {
            for (std::size_t i = 0; i < rows.size(); ++i)
                must(rows[i] == wanted[i], what, brief(rows[i].name), " says another ", fields,
                     " than the other fields imply");
        };
        same(m.inputs, expected.inputs, "input ", "counter or beyond");
        same(m.outputs, expected.outputs, "output ", "cluster_columns");
        same(m.states, expected.states, "state ", "spill or in_place");
    }

    const Manifest &m;
    const std::string &where_;
    const Sizes lengths_;  // segment lengths, the largest first
    std::set<std::string> roles_;
};

}  // namespace

void check_agreement(const Manifest &manifest, const std::string &where) { Agreement(manifest, where); }

}  // namespace txl_runtime
