// How large the values of a graph can be, found from the sizes of its inputs alone. The sizes that a file declares are
// not believed: few nodes make much of little, since broadcasts, products and repetitions multiply. The rules here are
// of the operators that any program may have; they are those of txl_runtime's guard, and compute the same.
#include <algorithm>
#include <set>

#include "graph_values.hpp"

namespace txl_runtime {
namespace {

using Results = std::vector<GraphValue>;

constexpr double PRODUCT = 24,
                 STARTING = 512;  // what is kept of each of many products, and products that take as long to begin
constexpr Int WRAPS = Int{1} << 31;

// Numbers that no type wraps around.
std::optional<Ranges> kept(const Ranges &found) {
    for (const auto &[low, high] : found)
        if (low < -WRAPS || high >= WRAPS) return {};
    return found;
}

Int floored(Int a, Int b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
Int ceiled(Int a, Int b) { return -floored(-a, b); }

std::optional<Ranges> computed(const std::string &op, const Ranges &left, const Ranges &right) {
    if (left.size() != right.size() && left.size() != 1 && right.size() != 1) return {};
    if (left.empty() || right.empty()) return left.size() == right.size() ? std::optional(Ranges()) : std::nullopt;
    Ranges found;
    for (std::size_t i = 0; i < std::max(left.size(), right.size()); ++i) {
        const auto [a, b] = left[left.size() == 1 ? 0 : i];
        const auto [c, d] = right[right.size() == 1 ? 0 : i];
        std::vector<Int> ends;
        if (op == "Div" && c > 0) {  // towards zero or down, whatever the type
            ends = {floored(a, c), floored(a, d), ceiled(b, c), ceiled(b, d)};
        } else {
            for (auto x : {a, b})
                for (auto y : {c, d}) {
                    if (op == "Add")
                        ends.push_back(x + y);
                    else if (op == "Sub")
                        ends.push_back(x - y);
                    else if (op == "Mul")
                        ends.push_back(x * y);
                    else if (op == "Min")
                        ends.push_back(std::min(x, y));
                    else if (op == "Max")
                        ends.push_back(std::max(x, y));
                    else
                        return {};
                }
        }
        found.emplace_back(*std::min_element(ends.begin(), ends.end()), *std::max_element(ends.begin(), ends.end()));
    }
    return kept(found);
}

Results broadcast(GraphNode &node) {
    if (node.op == "Clip") {  // its limits are single numbers, and may be missing
        const auto &x = node.value(0);
        return {{x.dims, x.exact, x.most}};
    }
    std::vector<Dims> shapes;
    for (std::size_t i = 0; i < node.inputs.size(); ++i) shapes.push_back(node.value(i).dims);
    const auto dims = wider(shapes);
    const auto &first = node.value(0);
    const bool two = node.inputs.size() == 2;
    if (two && (node.op == "Div" || node.op == "Mod") && node.value(1).content)
        for (const auto &[low, high] : *node.value(1).content)
            if (low == high && (low == 0 || low == -1))
                refuse_graph("whole numbers that are divided by 0 or -1", "a number above 0");
    if (node.op == "Mish" || node.op == "Swish" || node.op == "HardSwish") node.memory = 2 * product(dims);
    if (node.op == "Mod" && node.whole("fmod", 0)) node.work = 32 * SLOW * product(dims);  // a division bit by bit
    if (node.inputs.size() == 1) {
        std::optional<Ranges> known;
        if (first.content && (node.op == "Neg" || node.op == "Abs")) {
            Ranges ends;
            for (auto [low, high] : *first.content) {
                if (node.op == "Neg" || high < 0) std::tie(low, high) = std::pair(-high, -low);
                if (node.op == "Abs" && low < 0) std::tie(low, high) = std::pair(Int{0}, std::max(-low, high));
                ends.emplace_back(low, high);
            }
            known = kept(ends);
        }
        return {{dims, node.exact, first.most, known}};
    }
    if (dims.size() > 1 || !two || !first.content || !node.value(1).content) return {node.like(dims)};
    return {node.like(dims, computed(node.op, *first.content, *node.value(1).content))};
}

Results same(GraphNode &node) {
    const auto &x = node.value(0);
    const auto to = node.whole("to", node.whole("dtype", 1));
    if (!item_of(to)) refuse_graph("the type " + std::to_string(to), "a number of 8 bits or more, or a truth value");
    const bool keeps = node.op == "Identity" || (node.op == "Cast" && (to == 6 || to == 7));
    GraphValue result{x.dims, x.exact, x.most};
    if (keeps && x.content && !x.content->empty()) result.content = kept(*x.content);
    if (node.op == "LayerNormalization") {
        auto dims = x.dims;
        for (auto axis = node.axis(dims.size(), -1); axis < dims.size(); ++axis) dims[axis] = 1;
        return {result, node.like(dims), node.like(dims)};
    }
    if (node.op == "GroupNormalization" || node.op == "RMSNormalization") node.memory = 4 * static_cast<double>(x.most);
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
        for (std::size_t i = 0; i < dims.size(); ++i) axes.push_back(static_cast<Int>(i));
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
        known = known && value.content && content.size() <= static_cast<std::size_t>(SMALL_VALUE);
        if (known) content.insert(content.end(), value.content->begin(), value.content->end());
    }
    if (!dims.empty()) dims[axis] = along;
    known = known && dims.size() == 1 && dims[0] <= SMALL_VALUE;
    return {node.like(dims, known ? std::optional(content) : std::nullopt)};
}

Results constant_of_shape(GraphNode &node) {
    const auto [given, exact] = node.sizes(0);
    std::optional<Ranges> content;
    const auto value = node.attributes.find("value");
    if (value != node.attributes.end() && value->second.tensor && exact && given.size() == 1 && given[0] >= 0 &&
        given[0] <= SMALL_VALUE) {
        const auto &one = value->second.tensor->content;
        if (one && !one->empty()) content = Ranges(static_cast<std::size_t>(given[0]), (*one)[0]);
    }
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
        const auto many = static_cast<Int>(data.content->size());
        content = Ranges();
        for (const auto &[low, high] : *index.content) {
            if (low != high || low < -many || low >= many) {
                content.reset();
                break;
            }
            content->push_back((*data.content)[static_cast<std::size_t>(low < 0 ? low + many : low)]);
        }
    }
    Dims dims(data.dims.begin(), data.dims.begin() + static_cast<std::ptrdiff_t>(std::min(axis, data.dims.size())));
    dims.insert(dims.end(), index.dims.begin(), index.dims.end());
    for (auto rest = axis + 1; rest < data.dims.size(); ++rest) dims.push_back(data.dims[rest]);
    return {node.like(dims, content)};
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
    node.work = static_cast<double>(result.most) * static_cast<double>(std::max(sides[0][1], sides[1][0]));
    return {result};
}

Results matmul(GraphNode &node) {
    const auto &a = node.value(0).dims, &b = node.value(1).dims;
    if (a.empty() || b.empty()) refuse_graph("a product of a single number", "axes to sum over");
    const auto before = [](const Dims &dims) {
        return Dims(dims.begin(), dims.end() - static_cast<std::ptrdiff_t>(std::min<std::size_t>(2, dims.size())));
    };
    const auto batch = wider({before(a), before(b)});
    auto dims = batch;
    if (a.size() > 1) dims.push_back(a[a.size() - 2]);
    const Dims columns = b.size() > 1 ? Dims{b.back()} : Dims{};
    dims.insert(dims.end(), columns.begin(), columns.end());
    const bool empty = std::find(dims.begin(), dims.end(), 0) != dims.end();
    const auto result = node.like(dims, {}, !empty);  // ONNX Runtime does not broadcast what is empty
    for (std::size_t i = 2; i < node.inputs.size(); ++i)
        if (node.inputs[i] && !node.inputs[i]->dims.empty() && node.inputs[i]->dims != Dims{1} &&
            node.inputs[i]->dims != columns)
            refuse_graph("scales or zero points of another number than columns", "one for each, or one");
    const auto slow =
        node.value(0).item > 4 ? node.value(0).item : 1;  // engines are quick with floats of 4 bytes alone
    node.work = slow * static_cast<double>(result.most) *
                static_cast<double>(std::max(a.back(), b.size() > 1 ? b[b.size() - 2] : b[0]));
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
        fits = fits && i < 4 && value.item == held[i - 1].first && value.most == held[i - 1].second && value.exact &&
               value.fixed;
    }
    if (!fits)
        refuse_graph("weights in blocks that do not fit", "constants of the sizes that K, N, bits and block_size give");
    auto dims = a.dims;
    dims.back() = columns;
    const auto result = node.like(dims);
    node.work = static_cast<double>(result.most) * static_cast<double>(inner),
    node.memory = 2 * static_cast<double>(a.most);
    return {result};
}

Results range(GraphNode &node) {
    std::pair<Int, Int> ends[3];
    for (std::size_t i = 0; i < 3; ++i) {
        const auto found = node.content(i).value_or(Ranges());
        ends[i] = found.empty() ? std::pair<Int, Int>(0, 0) : found[0];
    }
    const auto [start, limit, step] = std::tuple(ends[0], ends[1], ends[2]);
    if (step.first != step.second || !step.first)
        refuse_graph("a range whose steps depend on a size, or are 0", "a constant");
    const Int spans[] = {limit.second - start.first, limit.first - start.second};
    Int counts[2];
    for (int i = 0; i < 2; ++i) {
        if (spans[i] >= WRAPS || spans[i] <= -WRAPS) refuse_graph("a range over too much", "fewer numbers than 2^31");
        counts[i] = std::max<Int>(ceiled(spans[step.first > 0 ? i : 1 - i], step.first), 0);
    }
    return {node.like({counts[0]}, {}, counts[0] == counts[1])};
}

Results reshape(GraphNode &node) {
    const auto &x = node.value(0);
    const bool zero_stays = node.whole("allowzero", 0) != 0;
    Dims dims;
    double known = 1;
    Int divisor = 1;
    int wild = -1;
    bool exact = true;
    const auto content = node.content(1).value_or(Ranges());
    for (std::size_t i = 0; i < content.size(); ++i) {
        auto [low, high] = content[i];
        const Int before = i < x.dims.size() ? x.dims[i] : 0;
        if (low == 0 && high == 0 && !zero_stays) {
            low = high = before;
            if (!x.exact) low = 1;
        } else if (low <= 0 && high >= 0 && !zero_stays) {  // 0 means the size that was there
            high = std::max(high, before);
        }
        if (low < 0) {
            if (low != high || low != -1 || wild >= 0) refuse_graph("sizes that may be negative", "one -1 at most");
            wild = static_cast<int>(i);
        } else {
            known *= static_cast<double>(std::max<Int>(low, 1));
            if (known < 4e18) divisor *= std::max<Int>(low, 1);
        }
        exact = exact && low == high;
        dims.push_back(high);
    }
    if (wild >= 0) {
        const auto numbers = std::min(static_cast<double>(x.most), product(x.dims));
        dims[static_cast<std::size_t>(wild)] = known < 4e18 ? static_cast<Int>(numbers) / divisor : 0;
    }
    return {node.like(dims, x.content, exact, x.most)};
}

Results shape(GraphNode &node) {
    const auto &dims = node.value(0).dims;
    if (node.loose) refuse_graph("the sizes of a value that may have dropped its axes or not", "axes that are kept");
    const auto many = static_cast<std::int64_t>(dims.size());
    const auto inside = [&](std::int64_t at) {
        return std::clamp<std::int64_t>(at < 0 ? std::max(at, -many) + many : at, 0, many);
    };
    Ranges part;
    for (auto i = inside(node.whole("start", 0)); i < inside(node.whole("end", many)); ++i)
        part.emplace_back(node.exact ? dims[static_cast<std::size_t>(i)] : 0, dims[static_cast<std::size_t>(i)]);
    return {sized({static_cast<Int>(part.size())}, true, part)};
}

// Which of a value's known numbers are where, after places of one shape were found for it; `from` tells the old place.
template <typename From>
std::optional<Ranges> picked(const std::optional<Ranges> &content, const Dims &dims, From from) {
    if (!content || product(dims) != product(Dims{static_cast<Int>(content->size())})) return {};
    Ranges found;
    from(found);
    return found;
}

// The numbers along some indices of an axis.
Ranges along(const Ranges &content, const Dims &dims, std::size_t axis, const Dims &indices) {
    Int before = 1, behind = 1;
    for (std::size_t i = 0; i < axis; ++i) before *= dims[i];
    for (std::size_t i = axis + 1; i < dims.size(); ++i) behind *= dims[i];
    Ranges found;
    for (Int a = 0; a < before; ++a)
        for (auto index : indices)
            for (Int b = 0; b < behind; ++b)
                found.push_back(content.at(static_cast<std::size_t>((a * dims[axis] + index) * behind + b)));
    return found;
}

Results slice(GraphNode &node) {
    const auto &x = node.value(0);
    const auto rank = x.dims.size();
    const auto starts = node.content(1).value_or(Ranges()), ends = node.content(2).value_or(Ranges());
    const auto axes = node.numbers(3), steps = node.numbers(4);
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < (axes ? axes->size() : starts.size()); ++i)
        places.push_back(place(axes ? (*axes)[i] : static_cast<Int>(i), rank));
    const bool fits = starts.size() == ends.size() && ends.size() == places.size() &&
                      (!steps || steps->empty() || steps->size() == places.size()) &&
                      std::set<std::size_t>(places.begin(), places.end()).size() == places.size();
    if (!fits || (rank == 0 && !places.empty()))
        refuse_graph("a slice of other axes than its value", "a start and an end for each");
    auto dims = x.dims;
    bool exact = true;
    auto content = x.content;
    for (std::size_t i = 0; i < places.size(); ++i) {
        const auto axis = places[i];
        const Int n = x.dims[axis], step = steps && !steps->empty() ? (*steps)[i] : 1;
        if (x.exact && starts[i].first == starts[i].second && ends[i].first == ends[i].second && step) {
            const Int least = step > 0 ? 0 : -1, most = step > 0 ? n : n - 1;  // of an end; a start is within the value
            Int first = starts[i].first < 0 ? starts[i].first + n : starts[i].first,
                last = ends[i].first < 0 ? ends[i].first + n : ends[i].first;
            first = std::min(std::max<Int>(first, 0), most), last = std::min(std::max(last, least), most);
            // To ONNX Runtime the end of the way, not the last.
            if (step < 0 && (ends[i].first == WRAPS - 1 || ends[i].first == (Int{1} << 63) - 1)) last = least;
            const Int many =
                !n ? 0 : std::max<Int>(step > 0 ? ceiled(last - first, step) : ceiled(first - last, -step), 0);
            if (content && many <= SMALL_VALUE) {
                Dims indices;
                for (Int k = 0; k < many; ++k) indices.push_back(first + k * step);
                content = picked(content, dims, [&](Ranges &found) { found = along(*content, dims, axis, indices); });
            } else {
                content.reset();
            }
            dims[axis] = many;
            continue;
        }
        exact = false, content.reset();
        const auto low = starts[i].first, high = ends[i].second;
        if (step > 0 && low >= 0 && ends[i].first >= 0)
            dims[axis] = std::max<Int>(std::min(n, high - low), 0);
        else if (step > 0 && low > -FAR_AWAY && low < 0 && low == starts[i].second)
            dims[axis] = std::min(n, -low);
    }
    return {node.like(dims, content, exact)};
}

Results split(GraphNode &node) {
    const auto &dims = node.value(0).dims;
    const auto parts = node.content(1);
    const auto axis = node.axis(dims.size());
    const auto many = static_cast<Int>(node.results);
    if (node.whole("num_outputs", static_cast<std::int64_t>(node.results)) != static_cast<std::int64_t>(node.results))
        refuse_graph("parts of another number than its results", "as many");
    if (dims.empty() || (parts && parts->size() != node.results))
        refuse_graph("parts of another number than its results", "the same");
    Results found;
    for (Int i = 0; i < many; ++i) {
        auto one = dims;
        const Int each = ceiled(dims[axis], many);
        one[axis] = parts        ? (*parts)[static_cast<std::size_t>(i)].second
                    : node.exact ? std::max<Int>(std::min(each, dims[axis] - i * each), 0)
                                 : each;
        found.push_back(node.like(one, {}, !parts || (*parts)[static_cast<std::size_t>(i)].first == one[axis]));
    }
    return found;
}

Results squeeze(GraphNode &node) {
    const auto &x = node.value(0);
    const auto axes = node.numbers(1).value_or(Dims());
    if (axes.empty() && !x.exact) refuse_graph("axes to drop that depend on sizes", "constants");
    std::set<std::size_t> gone;
    for (auto axis : axes) gone.insert(place(axis, x.dims.size()));
    Dims dims;
    for (std::size_t i = 0; i < x.dims.size(); ++i)
        if (axes.empty() ? x.dims[i] != 1 : !gone.count(i)) dims.push_back(x.dims[i]);
    return {node.like(dims, x.content)};
}

Results top_k(GraphNode &node) {
    auto dims = node.value(0).dims;
    const auto [most, exact] = node.sizes(1);
    const auto axis = node.axis(dims.size(), -1);
    double bits = 0;
    for (Int left = std::max<Int>(dims.at(axis), 1); left; left >>= 1) ++bits;
    node.memory = 2 * static_cast<double>(node.value(0).most),
    node.work = static_cast<double>(node.value(0).most) * 4 * bits;
    dims[axis] = most.empty() ? 0 : most[0];
    return {node.like(dims, {}, exact)};
}

Results transpose(GraphNode &node) {
    const auto &x = node.value(0);
    const auto rank = x.dims.size();
    auto order = node.wholes("perm");
    if (!node.has("perm"))
        for (auto i = rank; i-- > 0;) order.push_back(static_cast<std::int64_t>(i));
    auto sorted = order;
    std::sort(sorted.begin(), sorted.end());
    bool each = sorted.size() == rank;
    for (std::size_t i = 0; each && i < rank; ++i) each = sorted[i] == static_cast<std::int64_t>(i);
    if (!each) refuse_graph("an order of other axes than the value", "each once");
    GraphValue found{{}, x.exact, x.most};
    for (auto axis : order) found.dims.push_back(x.dims[static_cast<std::size_t>(axis)]);
    found.content = picked(x.content, x.dims, [&](Ranges &ranges) {
        for (std::size_t i = 0; i < x.content->size(); ++i) {
            Int left = static_cast<Int>(i), at = 0;
            for (auto axis = rank; axis-- > 0;) {  // the place of number i of the result in the value
                Int behind = 1;
                for (auto rest = static_cast<std::size_t>(order[axis]) + 1; rest < rank; ++rest) behind *= x.dims[rest];
                at += left % found.dims[axis] * behind, left /= found.dims[axis];
            }
            ranges.push_back((*x.content)[static_cast<std::size_t>(at)]);
        }
    });
    return {found};
}

Results unsqueeze(GraphNode &node) {
    const auto &x = node.value(0);
    const auto axes = node.numbers(1).value_or(Dims());
    const auto rank = x.dims.size() + axes.size();
    std::set<std::size_t> added;
    for (auto axis : axes) added.insert(place(axis, rank));
    if (added.size() != axes.size()) refuse_graph("an axis twice", "each once");
    Dims dims;
    for (std::size_t i = 0, old = 0; i < rank; ++i) dims.push_back(added.count(i) ? 1 : x.dims.at(old++));
    return {node.like(dims, x.content, true, x.most)};
}

}  // namespace

// A value without some axes, or with one entry along them.
Results reduced(GraphNode &node, const Dims &dims, const Dims &axes, bool keep) {
    std::set<std::size_t> gone;
    for (auto axis : axes) gone.insert(place(axis, dims.size()));
    Dims left;
    for (std::size_t i = 0; i < dims.size(); ++i)
        if (keep || !gone.count(i)) left.push_back(gone.count(i) ? 1 : dims[i]);
    const bool empty = std::find(dims.begin(), dims.end(), 0) != dims.end(), exact = node.exact && !empty;
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

const std::map<std::string, SizeRule> &plain_rules() {
    static const std::map<std::string, SizeRule> RULES = {
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
