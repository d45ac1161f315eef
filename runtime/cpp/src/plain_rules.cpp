// How large the values of a graph can be, found from the sizes of its inputs alone. The sizes that a file declares are
// not believed: few nodes make much of little, since broadcasts, products and repetitions multiply. The rules here are
// of the operators that any program may have; they are those of txl_runtime's guard, and compute the same.
#include <algorithm>
#include <numeric>
#include <set>

#include "graph_values.hpp"
#include "ranges.hpp"

namespace txl_runtime {
namespace {

constexpr double PRODUCT = 24,
                 STARTING = 512;  // kept of each of many products, and products that take as long to begin
constexpr Int WRAPS = Int{1} << 31;

// Numbers that no type wraps around.
std::optional<Ranges> kept(const Ranges &found) {
    for (const auto &[low, high] : found)
        if (low < -WRAPS || high >= WRAPS) return {};
    return found;
}

// What an operator makes of two numbers; nothing where it is another.
std::optional<Int> made(const std::string &op, Int x, Int y) {
    if (op == "Add") return x + y;
    if (op == "Sub") return x - y;
    if (op == "Mul") return x * y;
    if (op == "Min") return std::min(x, y);
    if (op == "Max") return std::max(x, y);
    return {};
}

std::optional<Ranges> computed(const std::string &op, const Ranges &left, const Ranges &right) {
    if (left.size() != right.size() && left.size() != 1 && right.size() != 1) return {};
    if (left.empty() || right.empty()) return Ranges();
    Ranges found;
    for (std::size_t i = 0; i < std::max(left.size(), right.size()); ++i) {
        const auto [a, b] = left[left.size() == 1 ? 0 : i];
        const auto [c, d] = right[right.size() == 1 ? 0 : i];
        Dims ends;
        if (op == "Div" && c > 0) {  // towards zero or down, whatever the type
            ends = {floored(a, c), floored(a, d), ceiled(b, c), ceiled(b, d)};
        } else {
            for (auto [x, y] : {std::pair(a, c), {a, d}, {b, c}, {b, d}}) {
                const auto end = made(op, x, y);
                if (!end) return {};
                ends.push_back(*end);
            }
        }
        const auto [low, high] = std::minmax_element(ends.begin(), ends.end());
        found.emplace_back(*low, *high);
    }
    return kept(found);
}

Results broadcast(GraphNode &node) {
    const auto &first = node.value(0);
    if (node.op == "Clip") return {{first.dims, first.exact, first.most}};  // its limits are single, and may be missing
    std::vector<Dims> shapes;
    for (std::size_t i = 0; i < node.inputs.size(); ++i) shapes.push_back(node.value(i).dims);
    const auto dims = wider(shapes);
    if (node.inputs.size() == 2 && (node.op == "Div" || node.op == "Mod") && node.value(1).content)
        for (const auto &[low, high] : *node.value(1).content)
            if (low == high && (low == 0 || low == -1))
                refuse_graph("whole numbers that are divided by 0 or -1", "a number above 0");
    if (node.op == "Mish" || node.op == "Swish" || node.op == "HardSwish") node.memory = 2 * product(dims);
    if (node.op == "Mod" && node.whole("fmod", 0)) node.work = 32 * SLOW * product(dims);  // a division bit by bit
    std::optional<Ranges> known;
    if (node.inputs.size() == 1) {
        Ranges ends;
        for (auto [low, high] : first.content.value_or(Ranges())) {
            if (node.op == "Neg" || high < 0) std::tie(low, high) = std::pair(-high, -low);
            if (node.op == "Abs" && low < 0) std::tie(low, high) = std::pair(Int{0}, std::max(-low, high));
            ends.emplace_back(low, high);
        }
        if (first.content && (node.op == "Neg" || node.op == "Abs")) known = kept(ends);
        return {{dims, node.exact, first.most, known}};
    }
    if (dims.size() < 2 && node.inputs.size() == 2 && first.content && node.value(1).content)
        known = computed(node.op, *first.content, *node.value(1).content);
    return {node.like(dims, known)};
}

Results same(GraphNode &node) {
    const auto &x = node.value(0);
    const auto to = node.whole("to", node.whole("dtype", 1));
    if (!item_of(to)) refuse_graph("the type " + std::to_string(to), "a number of 8 bits or more, or a truth value");
    GraphValue result{x.dims, x.exact, x.most};
    const bool keeps = node.op == "Identity" || (node.op == "Cast" && (to == 6 || to == 7));
    if (keeps && x.content && !x.content->empty()) result.content = kept(*x.content);
    if (node.op == "LayerNormalization") {
        auto dims = x.dims;
        std::fill(dims.begin() + node.axis(dims.size(), -1), dims.end(), 1);
        return {result, node.like(dims), node.like(dims)};
    }
    if (node.op == "GroupNormalization" || node.op == "RMSNormalization") node.memory = 4 * double(x.most);
    return {result};
}

Results quantised(GraphNode &node) {
    const auto &x = node.value(0), &scale = node.value(1), &zero = node.inputs.size() > 2 ? node.value(2) : scale;
    const bool single = scale.dims.empty() || scale.dims == Dims{1};
    const bool one = single || scale.dims == Dims{x.dims.at(node.axis(x.dims.size(), 1))};
    if (node.exact && (!one || zero.dims != scale.dims))
        refuse_graph("scales or zero points of other sizes than an axis of the value", "one for each, or one");
    return {{x.dims, x.exact, x.most}};
}

Results reduce(GraphNode &node) {
    const auto &dims = node.value(0).dims;
    auto axes = node.numbers(1).value_or(Dims());
    if (axes.empty() && !node.whole("noop_with_empty_axes", 0))
        for (std::size_t i = 0; i < dims.size(); ++i) axes.push_back(i);
    return reduced(node, dims, axes, node.whole("keepdims", 1) != 0);
}

Results concat(GraphNode &node) {
    auto dims = node.value(0).dims;
    const auto axis = node.axis(dims.size());
    Int along = 0;
    Ranges content;
    bool known = true;
    for (std::size_t i = 0; i < node.inputs.size(); ++i) {
        const auto &value = node.value(i);
        if (value.dims.size() != dims.size()) refuse_graph("values of different axes to join", "the same");
        for (std::size_t a = 0; a < dims.size(); ++a) dims[a] = std::max(dims[a], value.dims[a]);
        if (!dims.empty()) along += value.dims[axis];
        known = known && value.content && Int(content.size()) <= SMALL_VALUE;
        if (known) content.insert(content.end(), value.content->begin(), value.content->end());
    }
    if (!dims.empty()) dims[axis] = along;
    known = known && dims.size() == 1 && dims[0] <= SMALL_VALUE;
    return {node.like(dims, known ? std::optional(content) : std::nullopt)};
}

Results constant_of_shape(GraphNode &node) {
    const auto [given, exact] = node.sizes(0);
    std::optional<Ranges> content;
    if (const auto *value = node.find("value");
        value && value->tensor && exact && given.size() == 1 && given[0] >= 0 && given[0] <= SMALL_VALUE)
        if (const auto &one = value->tensor->content; one && !one->empty()) content = Ranges(given[0], one->front());
    return {sized(given, exact, content)};
}

Results expand(GraphNode &node) {
    const auto [given, exact] = node.sizes(1);
    for (auto size : given)
        if (size < 0) refuse_graph("a size of " + said(size), "0 or more");
    return {node.like(wider({node.value(0).dims, given}), {}, exact)};
}

Results gather(GraphNode &node) {
    const auto &data = node.value(0), &index = node.value(1);
    const auto axis = node.axis(data.dims.size());
    std::optional<Ranges> content;
    if (data.content && index.content && data.dims.size() == 1) {
        const Int many = data.content->size();
        content = Ranges();
        for (const auto &[low, high] : *index.content) {
            if (low != high || low < -many || low >= many) {
                content.reset();
                break;
            }
            content->push_back((*data.content)[low < 0 ? low + many : low]);
        }
    }
    return {node.like(part(data.dims, 0, axis) + index.dims + part(data.dims, axis + 1), content)};
}

Results gather_elements(GraphNode &node) { return {node.like(node.value(1).dims)}; }

Results gemm(GraphNode &node) {
    std::vector<Dims> sides;
    for (std::size_t i : {0U, 1U}) {
        auto dims = node.value(i).dims;
        if (dims.size() != 2)
            dims = {0, -1};
        else if (node.whole(i ? "transB" : "transA", 0))
            std::swap(dims[0], dims[1]);
        sides.push_back(dims);
    }
    const auto result = node.like({sides[0][0], sides[1][1]});
    node.work = double(result.most) * double(std::max(sides[0][1], sides[1][0]));
    return {result};
}

Results matmul(GraphNode &node) {
    const auto &a = node.value(0).dims, &b = node.value(1).dims;
    if (a.empty() || b.empty()) refuse_graph("a product of a single number", "axes to sum over");
    const auto batch =
        wider({part(a, 0, a.size() > 2 ? a.size() - 2 : 0), part(b, 0, b.size() > 2 ? b.size() - 2 : 0)});
    const auto columns = b.size() > 1 ? Dims{b.back()} : Dims{};
    const auto dims = batch + (a.size() > 1 ? Dims{a[a.size() - 2]} : Dims{}) + columns;
    const auto result = node.like(dims, {}, !ranges::count(dims, 0));  // ONNX Runtime broadcasts nothing empty
    for (std::size_t i = 2; i < node.inputs.size(); ++i)
        if (node.inputs[i] && !node.inputs[i]->dims.empty() && node.inputs[i]->dims != Dims{1} &&
            node.inputs[i]->dims != columns)
            refuse_graph("scales or zero points of another number than columns", "one for each, or one");
    const double slow = node.value(0).item > 4 ? node.value(0).item : 1;  // engines are quick with 4 bytes alone
    node.work = slow * double(result.most) * double(std::max(a.back(), b.size() > 1 ? b[b.size() - 2] : b[0]));
    products(node, product(batch));
    return {result};
}

// The forms that the exporter writes: other ones make ONNX Runtime read beyond what there is.
Results matmul_blocks(GraphNode &node) {
    const auto &a = node.value(0);
    const Int inner = node.whole("K", 0), columns = node.whole("N", 0), bits = node.whole("bits", 4),
              block = node.whole("block_size", 32);
    if (inner < 1 || columns < 1 || block < 1 || bits < 1) refuse_graph("weights of no size", "some");
    const Int blocks = ceiled(inner, block);
    const std::pair<int, Int> held[] = {
        {1, columns * blocks * (block * bits / 8)}, {4, columns * blocks}, {1, columns * ceiled(blocks * bits, 8)}};
    bool fits = !a.dims.empty() && a.dims.back() == inner;
    for (std::size_t i = 1; i < node.inputs.size(); ++i) {
        const auto &value = node.value(i);
        fits = fits && i < 4 && std::pair(value.item, value.most) == held[i - 1] && value.exact && value.fixed;
    }
    if (!fits)
        refuse_graph("weights in blocks that do not fit", "constants of the sizes that K, N, bits and block_size give");
    auto dims = a.dims;
    dims.back() = columns;
    const auto result = node.like(dims);
    node.work = double(result.most) * double(inner);
    node.memory = 2 * double(a.most);
    return {result};
}

Results range(GraphNode &node) {
    std::pair<Int, Int> ends[3];
    for (std::size_t i = 0; i < 3; ++i)
        if (const auto found = node.content(i); found && !found->empty()) ends[i] = found->front();
    const auto &[start, limit, step] = ends;
    if (step.first != step.second || !step.first)
        refuse_graph("a range whose steps depend on a size, or are 0", "a constant");
    const Int spans[] = {limit.second - start.first, limit.first - start.second};
    for (auto span : spans)
        if (span >= WRAPS || span <= -WRAPS) refuse_graph("a range over too much", "fewer numbers than 2^31");
    const bool up = step.first > 0;
    const Int most = std::max<Int>(ceiled(spans[up ? 0 : 1], step.first), 0),
              least = std::max<Int>(ceiled(spans[up ? 1 : 0], step.first), 0);
    return {node.like({most}, {}, most == least)};
}

Results reshape(GraphNode &node) {
    const auto &x = node.value(0);
    const bool zero_stays = node.whole("allowzero", 0) != 0;
    Dims dims;
    double known = 1;
    Int divisor = 1;
    int wild = -1;
    bool exact = true;
    for (auto [low, high] : node.content(1).value_or(Ranges())) {
        const auto i = dims.size();
        const Int before = i < x.dims.size() ? x.dims[i] : 0;
        if (low == 0 && high == 0 && !zero_stays) {
            low = x.exact ? before : 1, high = before;
        } else if (low <= 0 && high >= 0 && !zero_stays) {  // 0 means the size that was there
            high = std::max(high, before);
        }
        if (low < 0) {
            if (low != high || low != -1 || wild >= 0) refuse_graph("sizes that may be negative", "one -1 at most");
            wild = i;
        } else {
            known *= double(std::max<Int>(low, 1));
            if (known < 4e18) divisor *= std::max<Int>(low, 1);
        }
        exact = exact && low == high;
        dims.push_back(high);
    }
    if (wild >= 0) dims[wild] = known < 4e18 ? Int(std::min(double(x.most), product(x.dims))) / divisor : 0;
    return {node.like(dims, x.content, exact, x.most)};
}

Results shape(GraphNode &node) {
    const auto &dims = node.value(0).dims;
    if (node.loose) refuse_graph("the sizes of a value that may have dropped its axes or not", "axes that are kept");
    const std::int64_t many = dims.size();
    const auto inside = [&](std::int64_t at) {
        return std::clamp<std::int64_t>(at < 0 ? std::max(at, -many) + many : at, 0, many);
    };
    Ranges found;
    for (auto i = inside(node.whole("start", 0)); i < inside(node.whole("end", many)); ++i)
        found.emplace_back(node.exact ? dims[i] : 0, dims[i]);
    return {sized({Int(found.size())}, true, found)};
}

// The numbers along some indices of an axis, where they are known.
std::optional<Ranges> along(const std::optional<Ranges> &content, const Dims &dims, std::size_t axis,
                            const Dims &indices) {
    if (!content || product(dims) != double(content->size())) return {};
    const Int before = product(part(dims, 0, axis)), behind = product(part(dims, axis + 1));
    Ranges found;
    for (Int a = 0; a < before; ++a)
        for (auto index : indices)
            for (Int b = 0; b < behind; ++b) found.push_back(content->at((a * dims[axis] + index) * behind + b));
    return found;
}

Results slice(GraphNode &node) {
    const auto &x = node.value(0);
    const auto rank = x.dims.size();
    const auto starts = node.content(1).value_or(Ranges()), ends = node.content(2).value_or(Ranges());
    const auto axes = node.numbers(3);
    auto steps = node.numbers(4).value_or(Dims());
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < (axes ? axes->size() : starts.size()); ++i)
        places.push_back(place(axes ? (*axes)[i] : Int(i), rank));
    if (steps.empty()) steps.assign(places.size(), 1);
    const bool fits = starts.size() == ends.size() && ends.size() == places.size() && steps.size() == places.size() &&
                      std::set(places.begin(), places.end()).size() == places.size();
    if (!fits || (rank == 0 && !places.empty()))
        refuse_graph("a slice of other axes than its value", "a start and an end for each");
    auto dims = x.dims;
    bool exact = true;
    auto content = x.content;
    for (std::size_t i = 0; i < places.size(); ++i) {
        const auto axis = places[i];
        const Int n = x.dims[axis], step = steps[i];
        const auto [low, latest] = starts[i];
        const auto [earliest, high] = ends[i];
        if (x.exact && low == latest && earliest == high && step) {
            const Int least = step > 0 ? 0 : -1, most = step > 0 ? n : n - 1;  // of an end; a start is within the value
            const Int first = std::min(std::max<Int>(low < 0 ? low + n : low, 0), most);
            Int last = std::min(std::max(high < 0 ? high + n : high, least), most);
            // To ONNX Runtime the end of the way, not the last.
            if (step < 0 && (high == WRAPS - 1 || high == (Int{1} << 63) - 1)) last = least;
            const Int many = n ? std::max<Int>(ceiled(last - first, step), 0) : 0;
            Dims indices;
            for (Int k = 0; k < many && content && many <= SMALL_VALUE; ++k) indices.push_back(first + k * step);
            content = many <= SMALL_VALUE ? along(content, dims, axis, indices) : std::nullopt;
            dims[axis] = many;
            continue;
        }
        exact = false, content.reset();
        if (step > 0 && low >= 0 && earliest >= 0)
            dims[axis] = std::max<Int>(std::min(n, high - low), 0);
        else if (step > 0 && low > -FAR_AWAY && low < 0 && low == latest)
            dims[axis] = std::min(n, -low);
    }
    return {node.like(dims, content, exact)};
}

Results split(GraphNode &node) {
    const auto &dims = node.value(0).dims;
    const auto parts = node.content(1);
    const auto axis = node.axis(dims.size());
    const Int many = node.results;
    if (node.whole("num_outputs", node.results) != many || dims.empty() || (parts && Int(parts->size()) != many))
        refuse_graph("parts of another number than its results", "as many");
    const Int each = ceiled(dims[axis], many);
    Results found;
    for (Int i = 0; i < many; ++i) {
        auto one = dims;
        one[axis] = parts        ? (*parts)[i].second
                    : node.exact ? std::max<Int>(std::min(each, dims[axis] - i * each), 0)
                                 : each;
        found.push_back(node.like(one, {}, !parts || (*parts)[i].first == one[axis]));
    }
    return found;
}

Results squeeze(GraphNode &node) {
    const auto &x = node.value(0);
    const auto axes = node.numbers(1).value_or(Dims());
    if (axes.empty() && !x.exact) refuse_graph("axes to drop that depend on sizes", "constants");
    const auto gone = places(axes, x.dims.size());
    Dims dims;
    for (std::size_t i = 0; i < x.dims.size(); ++i)
        if (axes.empty() ? x.dims[i] != 1 : !gone.count(i)) dims.push_back(x.dims[i]);
    return {node.like(dims, x.content)};
}

Results top_k(GraphNode &node) {
    auto dims = node.value(0).dims;
    const auto [most, exact] = node.sizes(1);
    const auto axis = node.axis(dims.size(), -1);
    const auto many = double(node.value(0).most);
    int bits = 1;
    for (auto rest = dims.at(axis); rest > 1; rest /= 2) ++bits;
    node.memory = 2 * many;
    node.work = many * 4 * bits;
    dims[axis] = most.empty() ? 0 : most[0];
    return {node.like(dims, {}, exact)};
}

Results transpose(GraphNode &node) {
    const auto &x = node.value(0);
    const auto rank = x.dims.size();
    std::vector<std::int64_t> each(rank);
    std::iota(each.begin(), each.end(), 0);
    auto order = node.has("perm") ? node.wholes("perm") : std::vector(each.rbegin(), each.rend());
    if (!std::is_permutation(order.begin(), order.end(), each.begin(), each.end()))
        refuse_graph("an order of other axes than the value", "each once");
    GraphValue found{{}, x.exact, x.most};
    for (auto axis : order) found.dims.push_back(x.dims[axis]);
    if (!x.content || product(x.dims) != double(x.content->size())) return {found};
    found.content = Ranges();
    for (std::size_t i = 0; i < x.content->size(); ++i) {
        Int left = i, at = 0;
        for (auto axis = rank; axis-- > 0;) {  // the place of number i of the result in the value
            at += left % found.dims[axis] * Int(product(part(x.dims, order[axis] + 1))), left /= found.dims[axis];
        }
        found.content->push_back((*x.content)[at]);
    }
    return {found};
}

Results unsqueeze(GraphNode &node) {
    const auto &x = node.value(0);
    const auto axes = node.numbers(1).value_or(Dims());
    const auto rank = x.dims.size() + axes.size();
    const auto added = places(axes, rank);
    if (added.size() != axes.size()) refuse_graph("an axis twice", "each once");
    Dims dims;
    for (std::size_t i = 0, old = 0; i < rank; ++i) dims.push_back(added.count(i) ? 1 : x.dims.at(old++));
    return {node.like(dims, x.content, true, x.most)};
}

}  // namespace

// A value without some axes, or with one entry along them.
Results reduced(GraphNode &node, const Dims &dims, const Dims &axes, bool keep) {
    const auto gone = places(axes, dims.size());
    Dims left;
    for (std::size_t i = 0; i < dims.size(); ++i)
        if (keep || !gone.count(i)) left.push_back(gone.count(i) ? 1 : dims[i]);
    const bool empty = ranges::count(dims, 0) > 0, exact = node.exact && !empty;
    if (!gone.empty() && !exact) {  // ONNX Runtime may leave an empty value as it is
        if (empty && !keep) refuse_graph("axes that are dropped from a value without numbers", "some numbers");
        node.loose = !keep;
        const auto shift = dims.size() - left.size();
        for (std::size_t i = 0; i < left.size(); ++i) left[i] = std::max({left[i], dims[i], dims[i + shift]});
    }
    return {node.like(left, {}, exact)};
}

// What an engine keeps of each of many products of matrices, and what it takes to begin each.
void products(GraphNode &node, double many) {
    if (many > 1) node.memory += PRODUCT * many, node.work += STARTING * many;
}

const SizeRules &plain_rules() {
    static const SizeRules RULES = {
        {"broadcast", broadcast}, {"same", same},           {"quantised", quantised},
        {"reduce", reduce},       {"concat", concat},       {"constant_of_shape", constant_of_shape},
        {"expand", expand},       {"gather", gather},       {"gather_elements", gather_elements},
        {"gemm", gemm},           {"matmul", matmul},       {"matmul_blocks", matmul_blocks},
        {"range", range},         {"reshape", reshape},     {"shape", shape},
        {"slice", slice},         {"split", split},         {"squeeze", squeeze},
        {"top_k", top_k},         {"transpose", transpose}, {"unsqueeze", unsqueeze}};
    return RULES;
}

}  // namespace txl_runtime
