#include "graph_check.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "error.hpp"
#include "graph_values.hpp"
#include "ranges.hpp"

namespace txl_runtime {
namespace {

constexpr Known MODEL = {"the model", "1v 2b 3b 4b 5v 6b 7b", "8b 14b"};
constexpr Known GRAPH = {"the graph", "2b 10b", "1b 5b 11b 12b 13b"};
constexpr Known NODE = {"a node", "3b 4b 6b 7b", "1b 2b 5b"};
constexpr Known ATTRIBUTE = {"an attribute", "1b 2f 3v 4b 5b 13b 20v", "7b 7f 8b 8v"};
constexpr Known TENSOR = {"a constant", "2v 8b 9b 12b 14v", "1b 1v 4b 4f 5b 5v 7b 7v 10b 10d 11b 11v 13b"};
constexpr Known VALUE = {"a value", "1b 2b 3b", ""}, TYPE = {"a type", "1b 6b", ""},
                TENSOR_TYPE = {"a type", "1v 2b", ""};
constexpr Known SHAPE = {"a shape", "", "1b"}, SIZE = {"a size", "1v 2b 3b", ""}, PAIR = {"a pair", "1b 2b", ""},
                OPSET = {"an opset", "1b 2v", ""};

constexpr std::size_t NODES = 1U << 14, SIDES = 1U << 10;  // nodes, and a node's inputs or results
constexpr double OPENING = 1 << 24;                        // what ONNX Runtime's opening takes time for: see `walk`
constexpr double BASE = 536870912, EACH = 64;  // bytes of a step without a budget: BASE, and EACH for each of weights
constexpr double WORK = 17179869184.0, WORK_EACH = 128;  // products: WORK, and WORK_EACH for each byte beside BASE

struct Declared {
    std::int64_t type = 0;
    std::vector<std::int64_t> sizes;  // -1: open
};

// What a node returns, the bytes and the work that it takes, and whether it is always the same.
struct Returned {
    std::vector<ValuePtr> results;
    double bytes = 0, work = 0;
    bool always = false;
};

// An order of what is known of values.
struct Less {
    static auto fields(const GraphValue &value) {
        const std::string_view scales(reinterpret_cast<const char *>(value.scales.data()), 4 * value.scales.size());
        return std::tuple_cat(
            std::tie(value.dims, value.content, value.most, value.item, value.exact, value.fixed, value.loose),
            std::tuple(scales));
    }
    bool operator()(const ValuePtr &a, const ValuePtr &b) const { return fields(*a) < fields(*b); }
};

std::string in_quotes(const std::string &name) { return "'" + brief(name) + "'"; }

// Whether a number is one of a type whose numbers are written as whole ones of 64 bits.
bool within(std::int64_t type, std::int64_t number) {
    const bool natural = type == 2 || type == 4 || type == 9 || type == 10 || type == 12 || type == 16;
    const auto bits = type == 9 ? 1 : 8 * item_of(type);
    const auto ends = Int{1} << (natural ? bits : bits - 1);
    return number >= (natural ? 0 : -ends) && number < ends;
}

// Bytes of one number of what a node returns: engines compute in no fewer than 4.
int item_returned(const GraphNode &node) {
    const auto &op = node.op;
    static const std::set<std::string> WIDE = {"ArgMax", "ArgMin", "NonZero", "Shape", "Size", "TopK"};
    if (WIDE.count(op) || node.has("value_int") || node.has("value_ints") || (op == "MaxPool" && node.results > 1))
        return 8;
    if (const auto *value = node.find("value"); value && value->tensor) return std::max(4, value->tensor->item);
    for (const auto *name : {"to", "dtype"})
        if (node.has(name)) return std::max(4, item_of(node.whole(name, 0)));
    if (op == "Constant" || op == "ConstantOfShape") return 4;
    return std::max(4, node.value(op == "OneHot" ? 2 : op == "CastLike" || op == "Where" ? 1 : 0).item);
}

// One pass over a file; `values_` says of every value, by name, what is known of it.
class Walk {
public:
    Walk(std::string_view data, const std::string &kind, std::map<std::string, Dims> sizes, const std::string &weights,
         Budget &budget, Int least = -1)
        : least_(least),
          size_(data.size()),
          kind_(kind),
          sizes_(std::move(sizes)),
          weights_(weights),
          budget_(budget),
          published_(budget.published) {
        std::string_view body;
        for (const auto &field : fields(data, MODEL)) {
            if (field.number == 1 && !among(budget.published["ir_versions"], field.value))
                refuse_graph("version " + std::to_string(field.value) + " of the format", "8 to 12");
            if (field.number == 7) body = field.bytes;
            if (field.number == 8) read_opset(field.bytes);
            if (field.number == 14) fields(field.bytes, PAIR);
        }
        if (!imports.count("ai.onnx")) refuse_graph("no version of ONNX's operators", "18 to 24");
        walk(body);
    }
    std::map<std::string, std::int64_t> imports;
    std::vector<ValuePtr> normalized;  // what InstanceNormalization reads

private:
    static bool among(const Json &list, const Json &one) { return ranges::find(list, one) != list.end(); }

    static std::string text(std::string_view bytes) {
        try {  // nlohmann's writer knows what UTF-8 is
            const Json found = bytes;
            return found.dump(), std::string(bytes);
        } catch (const Json::exception &) {
            refuse_graph("a name that is no UTF-8", "text");
        }
    }

    void read_opset(std::string_view entry) {
        std::string domain;
        std::uint64_t version = 0;
        for (const auto &field : fields(entry, OPSET)) {
            if (field.number == 1) domain = text(field.bytes);
            if (field.number == 2) version = field.value;
        }
        const bool microsoft = domain == published_["microsoft"];
        const bool known = domain.empty() ? among(published_["opsets"], version) : microsoft && version == 1;
        if (!known || !imports.emplace(domain.empty() ? "ai.onnx" : domain, version).second)
            refuse_graph("operators of " + in_quotes(domain) + " in version " + std::to_string(version) + ", or twice",
                         "ONNX's own in 18 to 24, and com.microsoft in 1");
    }

    void walk(std::string_view body) {
        std::map<int, std::vector<std::string_view>> parts;
        for (const auto &field : fields(body, GRAPH)) parts[field.number].push_back(field.bytes);
        if (parts[1].size() > NODES || parts[5].size() > NODES)
            refuse_graph(join(parts[1].size(), " nodes and ", parts[5].size(), " constants"), join("at most ", NODES));
        for (auto entry : parts[5]) {
            auto [name, value] = tensor(entry);
            define(name, one(std::move(value)));
        }
        for (auto entry : parts[11]) {
            const auto [name, declared] = value_info(entry);
            const auto value = one(input(name, declared));
            define(name, value);
            hold(name, *value);
        }
        std::map<std::string, Declared> inner, returned;
        for (auto [number, into] : {std::pair(13, &inner), {12, &returned}})
            for (auto entry : parts[number])
                if (!into->insert(value_info(entry)).second)
                    refuse_graph("a value that is declared twice", "each once");
        for (const auto &[name, declared] : returned) inner[name] = declared;
        double fixed = 0, fixed_work = 0, work = 0;
        for (auto entry : parts[1]) {
            double bytes = 0, here = 0;
            const bool always = run_node(entry, inner, returned, bytes, here);
            work += here;
            if (always) fixed += bytes, fixed_work += here;
            if (fixed > budget_.most / 8 || fixed_work > budget_.work() / 16)
                throw GraphRefused{
                    join("values of ", fixed, " bytes, by ", fixed_work, " products, that are always the same"),
                    join("at most ", budget_.most / 8, " and ", budget_.work() / 16),
                    std::max(8 * fixed, BASE + std::ceil((16 * fixed_work - WORK) / WORK_EACH))};
        }
        for (const auto &[name, _] : returned) {
            if (!values_.count(name))
                refuse_graph("an output " + in_quotes(name) + " that no node computes", "all of them computed");
            hold(name, *values_[name]);
        }
        const auto [bytes, many] = most_at_once(lives_);
        if (double(parts[1].size()) * (many + double(shapes_.size())) > OPENING)
            refuse_graph(join(parts[1].size(), " nodes, ", many, " values at once and ", shapes_.size(), " sizes"),
                         "fewer of them");
        budget_.take(fixed + bytes, work);
    }

    // An array that the library keeps for a program, as large as it gets.
    void hold(const std::string &name, const GraphValue &value) {
        const std::vector<std::int64_t> dims(value.dims.begin(), value.dims.end());
        if (budget_.held.emplace(name, dims).second) budget_.taken += value.item * double(value.most);
    }

    void define(const std::string &name, ValuePtr value) {
        if (name.empty() || !values_.emplace(name, std::move(value)).second)
            refuse_graph("two values called " + in_quotes(name) + ", or one without a name", "a name for each");
    }

    // One object for all values of which the same is known.
    ValuePtr one(GraphValue &&value) { return *same_.insert(std::make_shared<GraphValue>(std::move(value))).first; }

    std::pair<std::string, Declared> value_info(std::string_view entry) {
        std::pair<std::string, Declared> found;
        std::string_view kind;
        for (const auto &field : fields(entry, VALUE)) {
            if (field.number == 1) found.first = text(field.bytes);
            if (field.number == 2) kind = field.bytes;
        }
        std::string_view of_tensor;
        for (const auto &field : fields(kind, TYPE))
            if (field.number == 1) of_tensor = field.bytes;
        bool shaped = false;
        for (const auto &field : fields(of_tensor, TENSOR_TYPE)) {
            if (field.number == 1) found.second.type = std::int64_t(field.value);
            if (field.number != 2) continue;
            shaped = true;
            for (const auto &size : fields(field.bytes, SHAPE)) {
                int numbered = 0, named = 0;
                std::int64_t number = -1;
                for (const auto &part : fields(size.bytes, SIZE)) {
                    numbered += part.number == 1, named += part.number == 2;
                    if (part.number == 1) number = std::int64_t(part.value);
                    if (part.number == 2) text(part.bytes);
                }
                if (numbered && named) refuse_graph("a size with a number and a name", "one of them");
                if (numbered && number < 0) refuse_graph("a size below 0", "0 or more");
                found.second.sizes.push_back(numbered ? number : -1);
            }
        }
        if (!item_of(found.second.type) || !shaped)
            refuse_graph("a value of no type of numbers, or without axes", "a tensor of numbers");
        return found;
    }

    GraphValue input(const std::string &name, const Declared &declared) {
        const auto most = sizes_.find(name);
        if (most == sizes_.end() || most->second.size() != declared.sizes.size())
            refuse_graph(join(brief(name), " of ", declared.sizes.size(), " axes among its inputs"),
                         "those of the manifest");
        Dims dims;
        bool exact = true;
        for (std::size_t i = 0; i < declared.sizes.size(); ++i) {
            exact = exact && (least_ >= 0 || declared.sizes[i] >= 0);
            dims.push_back(declared.sizes[i] >= 0 ? Int{declared.sizes[i]} : least_ >= 0 ? least_ : most->second[i]);
        }
        auto found = sized(dims, exact);
        found.item = item_of(declared.type);
        return found;
    }

    // Enters what a node returns; whether it is always the same.
    bool run_node(std::string_view entry, const std::map<std::string, Declared> &declared,
                  const std::map<std::string, Declared> &returned, double &bytes, double &work) {
        GraphNode node;
        std::vector<std::string> outputs;
        std::vector<std::string_view> attributes;
        std::vector<const GraphValue *> inputs;
        Lived lived;
        std::string domain;
        for (const auto &field : fields(entry, NODE)) {
            if (field.number == 5) {
                attributes.push_back(field.bytes);
                continue;
            }
            const auto name = text(field.bytes);
            if (field.number == 1) {
                const auto found = values_.find(name);
                if (!name.empty() && found == values_.end())
                    refuse_graph("a node that reads " + in_quotes(name) + " before it is there",
                                 "nodes in their order");
                node.inputs.push_back(name.empty() ? nullptr : found->second);
                inputs.push_back(node.inputs.back().get());
                if (const auto maker = made_.find(name); maker != made_.end()) lived.reads.insert(maker->second);
            }
            if (field.number == 2) outputs.push_back(name);
            if (field.number == 4) node.op = name;
            if (field.number == 7) domain = name;
        }
        if (std::max(node.inputs.size(), outputs.size()) > SIDES)
            refuse_graph("a node of too many inputs or results", "at most " + std::to_string(SIDES));
        node.results = outputs.size();
        if (node.op == "InstanceNormalization" && !node.inputs.empty()) normalized.push_back(node.inputs[0]);
        const auto at = " at " + node.op.substr(0, 60) + " " + (outputs.empty() ? "" : in_quotes(outputs[0]));
        // A model's layers are alike: what has been found of one node is true of all that differ in names alone. Behind
        // the first image, engines may lay values out in another way.
        const auto key = std::tuple(images_, domain, node.op, outputs.size(), attributes, inputs);
        auto found = alike_.find(key);
        if (found == alike_.end()) found = alike_.emplace(key, returned_by(node, domain, attributes, at)).first;
        const auto &[results, size, products_summed, always] = found->second;
        bytes = lived.bytes = size, work = products_summed, lived.values = double(outputs.size());
        for (std::size_t i = 0; i < outputs.size(); ++i)
            if (returned.count(outputs[i])) lived.bytes -= double(results[i]->most) * results[i]->item;
        // What is always the same is there all the time. Sizes may be asked of another value that has the same.
        if (!always) lives_.push_back(lived);
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            if (outputs[i].empty()) continue;
            define(outputs[i], results[i]);
            if (!always && !asks_sizes(node)) made_[outputs[i]] = lives_.size() - 1;
            if (const auto said = declared.find(outputs[i]); said != declared.end())
                agree(outputs[i], *results[i], said->second);
        }
        return always;
    }

    // Whether a node reads the sizes of a value, and not its numbers.
    static bool asks_sizes(const GraphNode &node) { return node.op == "Shape" || node.op == "Size"; }

    Returned returned_by(GraphNode &node, const std::string &domain, const std::vector<std::string_view> &attributes,
                         const std::string &at) {
        const auto &forms = published_["forms"];
        const bool known = imports.count(domain.empty() ? "ai.onnx" : domain) && forms.contains(domain) &&
                           forms[domain].contains(node.op) && (kind_ == "step" || among(published_["plain"], node.op));
        if (!known)
            refuse_graph("the operator " + in_quotes(domain.empty() ? node.op : domain + "." + node.op),
                         "one of the operators that graphs may have");
        const auto &form = forms[domain][node.op];
        for (auto entry : attributes) read_attribute(node, entry, form["attributes"]);
        hold_against_form(node, form, at);
        for (const auto &value : node.inputs)
            node.loose = node.loose || (value && value->loose), node.exact = node.exact && (!value || value->exact);
        const auto name = form["rule"].get<std::string>();
        const auto plain = plain_rules().find(name), module = module_rules().find(name);
        if (plain == plain_rules().end() && module == module_rules().end())
            throw std::logic_error("no rule is called " + name);
        std::vector<GraphValue> results;
        try {
            results = (plain != plain_rules().end() ? plain : module)->second(node);
        } catch (GraphRefused &refused) {
            refused.found += at;
            throw;
        } catch (const std::out_of_range &) {
            refuse_graph(node.op.substr(0, 60) + at + " of values that it cannot take", "some that it can");
        }
        results.resize(node.results, results.at(0));
        images_ = images_ || name == "conv" || name == "pool";
        const auto same = [](const ValuePtr &value) { return !value || value->fixed; };
        const auto item = item_returned(node);
        double numbers = node.memory;
        Returned found;
        found.always = (asks_sizes(node) && node.exact) || ranges::all_of(node.inputs, same);
        for (auto &result : results) {
            known_ += result.content ? Int(result.content->size()) : 0;
            if (known_ > 1024 + size_ / 8) result.content.reset();
            shapes_.insert(result.dims);
            if (known_ > 65536 + size_)
                refuse_graph("sizes that are computed of more numbers than the file has bytes", "a few of each");
            result.loose = node.loose, result.item = item, result.fixed = found.always;
            numbers += laid_out(result);
            found.results.push_back(one(std::move(result)));
        }
        found.bytes = numbers * item;
        for (const auto &value : node.inputs) numbers += value ? double(value->most) : 0;
        found.work = node.work + SLOW * numbers;
        return found;
    }

    static void hold_against_form(const GraphNode &node, const Json &form, const std::string &at) {
        const auto &wanted = form["inputs"];
        const auto needed = std::size_t(ranges::count(wanted, Json(true)));
        if (node.inputs.size() < needed || node.inputs.size() > form["most_inputs"].get<std::size_t>())
            refuse_graph(std::to_string(node.inputs.size()) + " inputs" + at, "as many as the operator has");
        for (std::size_t i = 0; i < node.inputs.size(); ++i)
            if (!node.inputs[i] && (wanted[std::min(i, wanted.size() - 1)].get<bool>() || i + 1 == node.inputs.size()))
                refuse_graph("no input " + std::to_string(i) + at, "one");
        if (node.results < 1 || node.results > form["most_results"].get<std::size_t>())
            refuse_graph(std::to_string(node.results) + " results" + at, "as many as the operator has");
        for (const auto &name : form["required"])
            if (!node.attributes.count(name)) refuse_graph("no attribute " + name.get<std::string>() + at, "one");
        for (const auto &[name, allowed] : form["values"].items()) {
            const auto found = node.attributes.find(name);
            if (found == node.attributes.end()) continue;
            const auto value = found->second.type == 3 ? found->second.text : std::to_string(found->second.whole);
            if (!among(allowed, value))
                refuse_graph(join(in_quotes(value), " as ", name, at), "one that the operator has");
        }
    }

    void read_attribute(GraphNode &node, std::string_view entry, const Json &allowed) {
        Attribute found;
        std::string name;
        std::vector<Field> values;
        for (const auto &field : fields(entry, ATTRIBUTE)) {
            if (field.number == 1)
                name = text(field.bytes);
            else if (field.number == 20)
                found.type = std::int64_t(field.value);
            else if (field.number != 13)
                values.push_back(field);
        }
        // By ONNX's number of a type: its letter in the forms, and the field that holds the value.
        static const std::map<std::int64_t, std::pair<std::string, int>> TYPES = {
            {1, {"f", 2}}, {2, {"ib", 3}}, {3, {"s", 4}}, {4, {"t", 5}}, {6, {"F", 7}}, {7, {"I", 8}}};
        const auto type = TYPES.find(found.type);
        const bool several = found.type == 6 || found.type == 7;
        bool fits = type != TYPES.end() && (several || values.size() == 1);
        for (const auto &field : values) fits = fits && field.number == type->second.second;
        if (!fits)
            refuse_graph("the attribute " + in_quotes(name) + " of type " + std::to_string(found.type),
                         "a value of its type");
        if (node.attributes.count(name) || !allowed.contains(name) ||
            type->second.first.find(allowed[name].get<std::string>()) == std::string::npos)
            refuse_graph("the attribute " + in_quotes(name) + " of " + node.op.substr(0, 60),
                         "those that are its own, each once");
        for (const auto &field : values) {
            if (found.type == 2) found.whole = std::int64_t(field.value);
            if (found.type == 3) found.text = std::string(field.bytes);
            if (found.type == 4) found.tensor = std::make_shared<GraphValue>(tensor(field.bytes).second);
            if (found.type == 6 && field.bytes.size() % 4)
                refuse_graph("the attribute " + in_quotes(name) + " with a part of a number", "whole ones");
            if (found.type == 6) found.numbers += field.bytes.size() / 4;
            if (found.type == 7) ranges::copy(wholes(field), std::back_inserter(found.wholes));
        }
        if (allowed[name] == "b" && found.whole != 0 && found.whole != 1)
            refuse_graph(std::to_string(found.whole) + " as " + name, "0 or 1");
        if ((found.type == 2 || found.type == 7) && node.op != "Constant" &&
            node.op != "Shape") {  // what else an engine may cut off
            auto numbers = found.wholes;
            numbers.push_back(found.whole);
            for (auto number : numbers)
                if (number != std::int32_t(number)) refuse_graph(join(number, " as ", name), "numbers of 32 bits");
        }
        node.attributes.emplace(name, std::move(found));
    }

    // Numbers of a value as an engine lays it out: channels of images in blocks of 16.
    [[nodiscard]] double laid_out(const GraphValue &value) const {
        const auto most = double(value.most);
        if (value.dims.size() != 4 || !images_ || !value.dims[1]) return most;
        const auto channels = double(value.dims[1]);
        return std::floor(most * std::ceil(channels / 16) * 16 / channels);
    }

    // A declared size has to be the one that was found, or at most the bound.
    static void agree(const std::string &name, const GraphValue &value, const Declared &declared) {
        bool fits = declared.sizes.size() == value.dims.size();
        for (std::size_t i = 0; fits && i < value.dims.size(); ++i)
            fits = declared.sizes[i] < 0 || declared.sizes[i] == value.dims[i] ||
                   (!value.exact && declared.sizes[i] <= value.dims[i]);
        if (!fits)
            refuse_graph(in_quotes(name) + " declared as " + listed(declared.sizes),
                         "the sizes that follow from its inputs");
    }

    // Name and sizes of a constant, which lies in the graph whole, or in the weight file.
    std::pair<std::string, GraphValue> tensor(std::string_view entry) {
        std::string name;
        std::int64_t kind = 0, outside = 0;
        Dims dims;
        std::vector<std::string_view> places;
        std::optional<std::string_view> raw;
        std::vector<Field> numbers;
        for (const auto &field : fields(entry, TENSOR)) {
            if (field.number == 8) name = text(field.bytes);
            if (field.number == 1) ranges::copy(wholes(field), std::back_inserter(dims));
            if (field.number == 2) kind = std::int64_t(field.value);
            if (field.number == 9) raw = field.bytes;
            if (field.number == 13) places.push_back(field.bytes);
            if (field.number == 14) outside = std::int64_t(field.value);
            if (field.number == 4 || field.number == 5 || field.number == 7 || field.number == 10 || field.number == 11)
                numbers.push_back(field);
        }
        const Int item = item_of(kind);
        if (!item) refuse_graph("a constant of type " + std::to_string(kind), "numbers");
        auto found = sized(dims);
        found.fixed = true, found.item = int(item);
        const Int length = found.most * item;
        bool fits = outside == 1 && !raw && numbers.empty() && lies_outside(places, length);
        const bool small = (kind == 6 || kind == 7) && found.most <= SMALL_VALUE;
        Ranges content;
        if (!fits && !outside && places.empty() && raw && numbers.empty()) {
            fits = Int(raw->size()) == length;
            if (kind == 9 && raw->find_first_not_of(std::string_view("\0\1", 2)) != std::string_view::npos)
                refuse_graph("the constant " + in_quotes(name) + " with other truth values than 0 and 1", "those");
            for (std::size_t at = 0; fits && small && at < raw->size(); at += std::size_t(item)) {
                std::int64_t wide = 0;
                std::int32_t narrow = 0;
                item == 8 ? std::memcpy(&wide, raw->data() + at, 8) : std::memcpy(&narrow, raw->data() + at, 4);
                content.emplace_back(item == 8 ? wide : narrow, item == 8 ? wide : narrow);
            }
            if (fits && kind == 1 && found.most <= 16) {
                found.scales.resize(std::size_t(found.most));
                if (!raw->empty()) std::memcpy(found.scales.data(), raw->data(), raw->size());
            }
        } else if (!fits && !outside && places.empty() && !raw) {
            const int field_of = kind == 1 ? 4 : kind == 11 ? 10 : kind == 7 ? 7 : kind == 12 || kind == 13 ? 11 : 5;
            Int count = 0;
            fits = ranges::all_of(numbers, [&](const Field &field) { return field.number == field_of; });
            for (const auto &field : fits ? numbers : std::vector<Field>()) {
                if (kind == 1 || kind == 11) {
                    fits = fits && field.bytes.size() % std::size_t(item) == 0;
                    count += Int(field.bytes.size()) / item;
                    continue;
                }
                for (auto number : wholes(field)) {
                    if (!within(kind, number))
                        refuse_graph("the constant " + in_quotes(name) + " with numbers beyond its type",
                                     "numbers of it");
                    if (small) content.emplace_back(number, number);
                    ++count;
                }
            }
            fits = fits && count == found.most;
        }
        if (!fits)
            refuse_graph(
                "the constant " + in_quotes(name) + ", whose numbers are not where or as many as they should be",
                said(length) + " bytes of it, in the graph or in " + weights_);
        if (small && !outside) found.content = content;
        return {name, found};
    }

    // Whether a constant is a range of the weight file.
    [[nodiscard]] bool lies_outside(const std::vector<std::string_view> &places, Int length) const {
        std::map<std::string, std::string> found;
        for (auto entry : places) {
            std::string key, value;
            for (const auto &field : fields(entry, PAIR)) (field.number == 1 ? key : value) = text(field.bytes);
            if (!found.emplace(key, value).second) return false;
        }
        if (found.size() != 3 || found["location"] != weights_) return false;
        const auto number = [&](const char *key) -> Int {
            const auto &digits = found[key];
            if (digits.empty() || digits.size() > 18 || digits.find_first_not_of("0123456789") != std::string::npos)
                return -1;
            return std::stoll(digits);
        };
        const auto offset = number("offset"), own = number("length");
        return own == length && offset >= 0 && double(offset + length) <= budget_.weights;
    }

    Int least_;  // what inputs leave open; -1 where that is at most `sizes_`
    Int size_, known_ = 0;
    std::string kind_;
    std::map<std::string, Dims> sizes_;
    std::string weights_;
    Budget &budget_;
    const Json &published_;
    std::map<std::string, ValuePtr> values_;
    std::map<std::string, std::size_t> made_;
    std::map<std::tuple<bool, std::string, std::string, std::size_t, std::vector<std::string_view>,
                        std::vector<const GraphValue *>>,
             Returned>
        alike_;
    std::set<ValuePtr, Less> same_;
    std::set<Dims> shapes_;
    bool images_ = false;
    std::vector<Lived> lives_;
};

// The sizes of a program's inputs, the largest where they are open: a state's rows, or all rows of a segment.
void largest(const Program &program, const Manifest &m, Int rows, std::map<std::string, Dims> &sizes) {
    for (const auto &spec : program.inputs) {
        Dims dims;
        for (std::size_t axis = 0; axis < spec.shape.size(); ++axis) {
            Int size = spec.shape[axis];
            if (size < 0) {
                size = rows;
                for (const auto *state : m.states_of(program.update))
                    if (state->input == spec.name) size = state->shape[axis];
            }
            dims.push_back(size);
        }
        auto &held = sizes[spec.name];
        if (held.size() != dims.size()) held = dims;
        for (std::size_t axis = 0; axis < dims.size(); ++axis) held[axis] = std::max(held[axis], dims[axis]);
    }
}

}  // namespace

Budget::Budget(std::uint64_t bytes, std::uint64_t asked)
    : weights(double(bytes)),
      most(asked ? double(asked) : BASE + EACH * weights),
      published(parse_json(published_forms(), "the forms")) {}

double Budget::work() const { return WORK + WORK_EACH * std::max(most - BASE, 0.0); }

void Budget::take(double size, double products_summed) {
    taken += size;
    const auto needed =
        std::max(taken, products_summed > work() ? BASE + std::ceil((products_summed - WORK) / WORK_EACH) : 0);
    if (needed > most)
        throw GraphRefused{join("steps of ", taken, " bytes and ", products_summed, " products"),
                           join("at most ", most, " and ", work()), needed};
}

void check_graph(const std::string &data, const std::string &where, const Program &program, const Manifest &manifest,
                 Budget &budget) {
    try {
        std::map<std::string, Dims> sizes;
        const Int rows = std::max<Int>(2, Int{manifest.B} * manifest.lengths()[0]);
        for (const auto &other : manifest.programs)
            if (other.file == program.file) largest(other, manifest, rows, sizes);
        const Walk walk(data, program.kind, sizes, manifest.weights, budget);
        for (const auto &other : manifest.programs)
            if (other.file == program.file && !other.opset.empty() && other.opset != walk.imports)
                refuse_graph("operators of other versions", "those that the manifest says of " + brief(other.name));
        if (walk.normalized.empty()) return;
        // Over no positions it ends the process. With one sequence, an honest graph has all its other sizes.
        auto apart = budget;
        apart.taken = 0, apart.held.clear();
        const Walk small(data, program.kind, sizes, manifest.weights, apart, program.rows_open() ? 0 : 1);
        for (const auto &value : small.normalized)
            if (!value || !value->exact || !product(part(value->dims, 2)))
                refuse_graph("an InstanceNormalization of what may have no positions", "some positions always");
    } catch (const GraphRefused &refused) {
        std::string advice = "export the model again";
        if (refused.needed > 0)
            advice =
                join("if you trust it, load it with options.budget = ", std::uint64_t(std::min(refused.needed, 9e18)));
        refuse(TXL_BUNDLE, where, ": has ", refused.found, ", expected ", refused.expected, "; ", advice);
    }
}

}  // namespace txl_runtime
