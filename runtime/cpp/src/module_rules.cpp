// Rules for the sizes of what programs of kind step may hold beside (plain_rules.cpp): modules of all sorts.
#include <algorithm>
#include <cmath>
#include <set>

#include "graph_values.hpp"
#include "ranges.hpp"

namespace txl_runtime {
namespace {

Results arg(GraphNode &node) {
    const auto &dims = node.value(0).dims;
    return reduced(node, dims, {Int(node.axis(dims.size()))}, node.whole("keepdims", 1) != 0);
}

// Sizes behind a window that moves over all axes but the first two, and whether they are exact.
std::pair<Dims, bool> window(GraphNode &node, const Dims &kernel) {
    const auto &x = node.value(0);
    const auto many = x.dims.size() > 2 ? x.dims.size() - 2 : 0;
    const auto padding = node.text("auto_pad", "NOTSET");
    const auto given = [&](const char *name, std::size_t count, std::int64_t missing) {
        const auto found = node.wholes(name);
        return found.empty() ? std::vector<std::int64_t>(count, missing) : found;
    };
    const auto strides = given("strides", many, 1), gaps = given("dilations", many, 1),
               more = given("output_padding", many, 0);
    const auto pads = padding == "NOTSET" ? given("pads", 2 * many, 0) : std::vector<std::int64_t>(2 * many, 0);
    const auto least = [](const auto &list, int one) {
        return ranges::all_of(list, [=](auto other) { return other >= one; });
    };
    const bool fits = many > 0 && many == kernel.size() && many == strides.size() && many == gaps.size() &&
                      many == more.size() && pads.size() / 2 == many && least(strides, 1) && least(gaps, 1) &&
                      least(kernel, 0) && least(pads, 0) && least(more, 0);
    if (!fits) refuse_graph("windows, strides or pads of other sizes than the value", "some for each axis");
    const bool same = starts_with(padding, "SAME"), ceil = node.whole("ceil_mode", 0) != 0;
    Dims sizes;
    for (std::size_t i = 0; i < many; ++i) {
        const Int n = x.dims[i + 2], stride = strides[i], reach = gaps[i] * (kernel[i] - 1) + 1,
                  pad = Int{pads[i]} + pads.at(many + i);
        Int size;
        if (node.op == "ConvTranspose") {
            size = same ? n * stride : stride * (n - 1) + more[i] + reach - pad;
        } else if (same) {
            size = ceiled(n, stride);
        } else {
            const Int room = n + pad - reach + (ceil ? stride - 1 : 0);  // what is less than 0 is rounded towards it
            size = room / stride + 1;
        }
        sizes.push_back(std::max<Int>(size, 0));
    }
    if (node.whole("group", 1) < 1) refuse_graph("no groups", "1 or more");
    return {sizes, !ceil && (node.op != "ConvTranspose" || padding == "NOTSET")};
}

// Sizes of a convolution's weights, which have to be exact: behind a larger window is less.
const Dims &kernel_of(GraphNode &node) {
    if (!node.value(1).exact) refuse_graph("weights whose sizes are open", "fixed ones");
    return node.value(1).dims;
}

Results conv(GraphNode &node) {
    const auto &w = kernel_of(node);
    const auto [sizes, exact] = window(node, part(w, 2));
    const auto result = node.like(Dims{node.value(0).dims.at(0), w.at(0)} + sizes, {}, exact);
    node.work = double(result.most) * product(part(w, 1));
    node.memory = product(part(w, 1)) * product(sizes);
    return {result};
}

Results conv_transpose(GraphNode &node) {
    const auto &w = kernel_of(node);
    const auto &x = node.value(0);
    const auto [sizes, exact] = window(node, part(w, 2));
    const auto spatial = part(x.dims, 2);
    if (x.dims.size() == 5 && (!x.exact || !product(spatial)))  // ONNX Runtime reads before it
        refuse_graph("a transposed convolution over three axes that may be empty", "three of known sizes");
    node.work = double(x.most) * product(part(w, 1));
    node.memory = product(part(w, 1)) * product(spatial);
    return {node.like(Dims{x.dims.at(0), w.at(1) * node.whole("group", 1)} + sizes, {}, exact)};
}

Results pool(GraphNode &node) {
    const auto given = node.wholes("kernel_shape");
    const Dims kernel(given.begin(), given.end());
    auto [sizes, exact] = window(node, kernel);
    if (starts_with(node.text("auto_pad", ""), "SAME"))
        for (auto gap : node.wholes("dilations")) exact = exact && gap <= 1;  // which dilations make less
    const auto result = node.like(part(node.value(0).dims, 0, 2) + sizes, {}, exact);
    node.work = 4 * double(result.most) * product(kernel);
    return {result};
}

Results global_pool(GraphNode &node) {
    auto dims = node.value(0).dims;
    for (std::size_t i = 2; i < dims.size(); ++i) dims[i] = 1;
    return {node.like(dims)};
}

Results recurrent(GraphNode &node) {
    const auto &x = node.value(0), &w = node.value(1), &r = node.value(2);
    if (x.dims.size() != 3 || w.dims.size() != 3 || r.dims.size() != 3)
        refuse_graph("a recurrent network of other than three axes", "three");
    const Int ways = r.dims[0], rows = r.dims[1], hidden = r.dims[2], gates = rows / std::max<Int>(hidden, 1);
    // Where a size is not exact it is the most that there may be; engines compare what there is.
    const bool fits = w.dims[2] <= x.dims[2] && (!x.exact || w.dims[2] == x.dims[2]);
    if (gates * hidden < 1 || gates * hidden != rows || w.dims[0] != ways || w.dims[1] != rows || !fits)
        refuse_graph("weights of a recurrent network that do not fit each other", "those of one network");
    const Int steps = x.dims[0], batch = x.dims[1];
    const auto cells = double(steps) * double(batch), units = double(ways) * double(hidden);
    node.work = cells * (double(w.most) + double(r.most) + SLOW * units * double(gates));
    // All gates of all steps are kept, and what it returns, whether or not somebody asks for that; half of it twice.
    node.memory = 2 * double(x.most) + cells * units * double(gates + 4);
    Results found = {node.like({steps, ways, batch, hidden}), node.like({ways, batch, hidden}),
                     node.like({ways, batch, hidden})};
    found.resize(node.results);
    return found;
}

Results constant(GraphNode &node) {
    if (node.attributes.size() != 1) refuse_graph("a constant of several values or none", "one");
    const auto &[name, given] = *node.attributes.begin();
    if (given.tensor) return {*given.tensor};
    const bool list = given.type == 6 || given.type == 7, whole = given.type == 2 || given.type == 7;
    const auto count = given.type == 7 ? given.wholes.size() : given.type == 6 ? given.numbers : 1;
    std::optional<Ranges> content;
    if (whole && Int(count) <= SMALL_VALUE) {
        content = Ranges();
        for (auto number : list ? given.wholes : std::vector{given.whole}) content->emplace_back(number, number);
    }
    return {sized(list ? Dims{Int(count)} : Dims{}, true, content)};
}

Results depth_to_space(GraphNode &node) {
    const auto &x = node.value(0).dims;
    const Int block = node.whole("blocksize", 0);
    if (x.size() != 4 || block < 1 || block > ranges::max(x))  // the square of a larger one ends the process
        refuse_graph("blocks of a value without four axes, or of no size", "four axes, and blocks within them");
    if (node.op == "DepthToSpace") return {node.like({x[0], x[1] / (block * block), x[2] * block, x[3] * block})};
    return {node.like({x[0], x[1] * block * block, x[2] / block, x[3] / block})};
}

struct Term {
    std::string before, behind;  // letters, before and behind the dots
    bool dots = false;
};

Term term_of(const std::string &text) {
    const auto at = text.find("...");
    if (at == std::string::npos) return {text, "", false};
    return {text.substr(0, at), text.substr(at + 3), true};
}

Results einsum(GraphNode &node) {
    auto equation = node.text("equation", "");
    ranges::erase(equation, ' ');
    const auto arrow = equation.find("->");
    const auto left = equation.substr(0, arrow);
    const auto letter = [](char sign) { return (sign >= 'a' && sign <= 'z') || (sign >= 'A' && sign <= 'Z'); };
    const auto all = [&](const std::string &text, bool commas) {
        return ranges::all_of(text, [&](char s) { return letter(s) || s == '.' || (commas && s == ','); });
    };
    if (left.empty() || !all(left, true) || (arrow != std::string::npos && !all(equation.substr(arrow + 2), false)))
        refuse_graph("an equation that is none", "letters for axes");
    std::vector<std::string> terms = {""};
    for (char sign : left) sign == ',' ? void(terms.emplace_back()) : terms.back().push_back(sign);
    if (terms.size() != node.inputs.size()) refuse_graph("an equation of another number of values", "as many");
    std::map<char, Int> sizes;
    std::map<char, int> times;
    std::set<std::size_t> unnamed;
    Dims rest;
    for (std::size_t i = 0; i < terms.size(); ++i) {
        const auto term = term_of(terms[i]);
        const auto &dims = node.value(i).dims;
        const auto letters = term.before + term.behind;
        const auto named = letters.size();
        if (dims.size() < named || (dims.size() > named && !term.dots) || letters.find('.') != std::string::npos)
            refuse_graph("an equation of other axes than its values", "the same");
        const auto more = dims.size() - named;
        if (term.dots) unnamed.insert(more);
        rest = wider({rest, part(dims, term.before.size(), term.before.size() + more)});
        for (std::size_t k = 0; k < named; ++k) {
            auto &size = sizes[letters[k]];
            size = std::max(size, dims[k < term.before.size() ? k : k + more]), ++times[letters[k]];
        }
    }
    if (unnamed.size() > 1 || (!unnamed.empty() && node.loose))
        refuse_graph("an equation whose dots are of several numbers of axes", "of one");
    for (std::size_t i = 0; i < terms.size(); ++i)
        if (!node.value(i).most)
            refuse_graph("an equation of a value without numbers", "some numbers");  // may end the process
    std::string result = arrow == std::string::npos ? "..." : equation.substr(arrow + 2);
    if (arrow == std::string::npos)
        for (const auto &[sign, count] : times)
            if (count == 1) result += sign;
    const auto term = term_of(result);
    const auto named = [&](const std::string &letters) {
        Dims found;
        for (char sign : letters) {
            if (!sizes.count(sign)) refuse_graph("an equation that returns axes it has not", "some of its own");
            found.push_back(sizes[sign]);
        }
        return found;
    };
    const auto kept = named(term.before) + (term.dots ? rest : Dims()) + named(term.behind);
    node.work = product(rest);
    double each = product(rest);
    for (const auto &[sign, size] : sizes) {
        node.work *= double(size);
        if (times[sign] > 1 && result.find(sign) != std::string::npos) each *= double(size);
    }
    if (terms.size() > 2) node.memory = node.work;  // pairs are multiplied one after the other
    products(node, each);
    for (std::size_t i = 0; i < terms.size(); ++i) node.memory += double(node.value(i).most);
    node.memory += product(kept);
    return {node.like(kept)};
}

Results flatten(GraphNode &node) {
    const auto &x = node.value(0);
    const auto rank = std::ptrdiff_t(x.dims.size());
    auto axis = node.whole("axis", 1);
    axis += axis < 0 ? rank : 0;
    axis = std::clamp<std::int64_t>(axis < 0 ? axis + rank : axis, 0, rank);
    return {node.like({Int(product(part(x.dims, 0, axis))), Int(product(part(x.dims, axis)))}, {}, true, x.most)};
}

Results gather_nd(GraphNode &node) {
    const auto &data = node.value(0).dims;
    const auto &index = node.value(1);
    const Int batch = node.whole("batch_dims", 0), rank = Int(data.size());
    if (index.dims.empty() || !index.exact || batch + index.dims.back() < 0 || batch + index.dims.back() > rank ||
        index.dims.back() < 0)
        refuse_graph("indices of more axes than the value, or of an open number", "those of the value");
    node.memory = 2 * double(index.most);
    return {node.like(part(index.dims, 0, index.dims.size() - 1) + part(data, batch + index.dims.back()))};
}

Results grid_sample(GraphNode &node) {
    const auto &x = node.value(0).dims, &grid = node.value(1).dims;
    const auto result = node.like(part(x, 0, 2) + part(grid, 1, grid.empty() ? 0 : grid.size() - 1));
    node.work = 16 * SLOW * double(result.most);
    return {result};
}

Results nonzero(GraphNode &node) {
    const auto &x = node.value(0);
    const auto rank = std::max<Int>(Int(x.dims.size()), 1);
    node.memory = 2 * double(rank) * double(x.most);  // counted twice over before it is returned
    return {node.like({rank, x.most}, {}, false)};
}

Results one_hot(GraphNode &node) {
    auto dims = node.value(0).dims;
    const auto [depth, exact] = node.sizes(1);
    if (depth.size() != 1 || node.value(2).dims != Dims{2})
        refuse_graph("a depth that is no single number, or other than two values", "one depth, two values");
    dims.insert(dims.begin() + node.axis(dims.size() + 1, -1), depth[0]);
    return {node.like(dims, {}, exact)};
}

Results pad(GraphNode &node) {
    auto dims = node.value(0).dims;
    const auto [pads, exact] = node.sizes(1);
    const auto axes = node.numbers(3);
    const auto many = axes ? axes->size() : dims.size();
    if (pads.size() != 2 * many) refuse_graph("pads of another number than axes", "two for each");
    for (std::size_t i = 0; i < many; ++i) {
        const auto axis = axes ? place((*axes)[i], dims.size()) : i;
        dims.at(axis) = std::max<Int>(dims.at(axis) + pads[i] + pads[many + i], 0);
    }
    return {node.like(dims, {}, exact)};
}

Results size(GraphNode &node) {
    const auto &x = node.value(0);
    const auto most = Int(std::min(double(x.most), product(x.dims)));
    return {sized({}, true, Ranges{{node.exact ? most : 0, most}})};
}

Results tile(GraphNode &node) {
    auto dims = node.value(0).dims;
    const auto [times, exact] = node.sizes(1);
    if (times.size() != dims.size()) refuse_graph("repetitions of other axes than the value", "one for each");
    for (std::size_t i = 0; i < dims.size(); ++i) dims[i] *= times[i];
    return {node.like(dims, {}, exact)};
}

Results resize(GraphNode &node) {
    const auto &x = node.value(0);
    if (node.there(1) && node.value(1).most) refuse_graph("a part of a value that is resized", "all of it");
    Dims dims;
    bool exact = true;
    if (node.there(2) && node.value(2).most) {
        const auto &scales = node.value(2).scales;
        const bool sound = ranges::all_of(scales, [](auto scale) { return scale > 0 && scale < 65536; });
        if (!sound || scales.size() != x.dims.size())
            refuse_graph("scales that are no constants above 0, one for each axis", "such constants");
        const auto scaled = [&](std::size_t i) { return double(x.dims[i]) * double(scales[i]); };
        for (std::size_t i = 0; i < scales.size(); ++i)
            exact = exact && std::floor(scaled(i)) == scaled(i) && scaled(i) < 16777216;
        for (std::size_t i = 0; i < scales.size(); ++i) dims.push_back(Int(scaled(i)) + !exact);
    } else {
        std::tie(dims, exact) = node.sizes(3);
        if (dims.size() != x.dims.size()) refuse_graph("sizes of other axes than the value", "one for each");
    }
    const auto result = node.like(dims, {}, exact);
    const bool slow = node.text("mode", "") == "cubic" || node.whole("antialias", 0);
    node.memory = slow ? 3 * double(result.most) : 0;
    node.work = (slow ? 16 : 2) * SLOW * (double(x.most) + double(result.most));
    return {result};
}

Results col2im(GraphNode &node) {
    const auto &x = node.value(0).dims;
    const auto [image, exact] = node.sizes(1);
    const auto block = node.numbers(2).value_or(Dims());
    double each = 1;
    bool fits = x.size() == 3 && image.size() == block.size();
    for (auto one : block) fits = fits && one >= 1, each *= double(one);
    if (!fits)
        refuse_graph("blocks of other axes than the image, or of no size", "one size for each axis of the image");
    return {node.like(Dims{x[0], each < 1e18 ? x[1] / Int(each) : 0} + image, {}, exact)};
}

}  // namespace

const SizeRules &module_rules() {
    static const SizeRules RULES = {{"arg", arg},
                                    {"conv", conv},
                                    {"conv_transpose", conv_transpose},
                                    {"pool", pool},
                                    {"global_pool", global_pool},
                                    {"recurrent", recurrent},
                                    {"constant", constant},
                                    {"depth_to_space", depth_to_space},
                                    {"einsum", einsum},
                                    {"flatten", flatten},
                                    {"gather_nd", gather_nd},
                                    {"grid_sample", grid_sample},
                                    {"nonzero", nonzero},
                                    {"one_hot", one_hot},
                                    {"pad", pad},
                                    {"size", size},
                                    {"tile", tile},
                                    {"resize", resize},
                                    {"col2im", col2im}};
    return RULES;
}

}  // namespace txl_runtime
