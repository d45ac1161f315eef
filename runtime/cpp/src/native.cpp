#include "native.hpp"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <type_traits>

#include "error.hpp"
#include "model.hpp"
#include "ranges.hpp"
#include "safetensors.hpp"
#include "sha256.hpp"
#include "system.hpp"

namespace txl_runtime {
// The step's own header, in a namespace of its own: it has a txl_version, too.
namespace in_c {
extern "C" {
#undef TXL_API
#define txl_version version_of_step
#include "txl_native.h"
#undef txl_version
}
}  // namespace in_c

namespace {

constexpr const char *SIDECAR = "engines/native/step.json";
constexpr const char *ADVICE = "; build it again with `txl-deploy build`";
constexpr std::int64_t LANES = 16;  // numbers to a multiple of which a head is padded
constexpr std::int32_t MOST_THREADS = 1024;

std::int64_t padded(std::int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// Return an array [outer, width, inner] with `width` padded by zeros.
template <typename T>
std::vector<T> padded(const std::vector<T> &from, std::int64_t width, std::int64_t inner) {
    const auto block = width * inner, wide = padded(width) * inner, blocks = std::int64_t(from.size()) / block;
    std::vector<T> found(std::size_t(blocks * wide));
    for (std::int64_t i = 0; i < blocks; ++i) std::copy_n(from.begin() + i * block, block, found.begin() + i * wide);
    return found;
}

template <typename T>
const T *or_null(const std::vector<T> &values) {
    return values.empty() ? nullptr : values.data();
}

// A matrix [in, out] in float32, or as codes of int8 with a scale for each column.
struct Matrix {
    std::int64_t in, out;
    std::vector<float> values, scales;
    std::vector<std::int8_t> codes;

    // Pad the rows of each head, or with `columns` its columns.
    void pad(bool columns, std::int64_t heads, std::int64_t width) {
        const auto inner = columns ? 1 : out;
        values = padded(values, width, inner), codes = padded(codes, width, inner);
        if (columns) scales = padded(scales, width, 1);
        (columns ? out : in) = heads * padded(width);
    }
};

// The tensors of a bundle's weight file, held against the shapes that the config gives.
class Weights {
public:
    Weights(const Files &files, const std::string &name)
        : files_(files), file_(name), where_(files.where(name)), header_(read_header(files, name)) {}

    [[nodiscard]] bool has(const std::string &name) const { return header_.find(name) != nullptr; }

    template <typename T = float>
    [[nodiscard]] std::vector<T> tensor(const std::string &name, const Sizes &shape) const {
        const char *dtype = std::is_same_v<T, float> ? "F32" : std::is_same_v<T, std::int8_t> ? "I8" : "U8";
        const auto *found = header_.find(name);
        const bool fits = found && found->dtype == dtype && found->shape == shape &&
                          found->last - found->first == std::uint64_t(found->size()) * sizeof(T);
        need(fits, TXL_BUNDLE, where_, ": ", brief(name), " is ",
             found ? brief(found->dtype) + " " + listed(found->shape) : "missing", ", expected ", dtype, " ",
             listed(shape), "; export the model again");
        const auto bytes = files_.part(file_, found->first, found->last - found->first);
        std::vector<T> values(bytes.size() / sizeof(T));
        if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
        return values;
    }

    // Return a tensor, or nothing if there is none of that name.
    [[nodiscard]] std::vector<float> optional(const std::string &name, const Sizes &shape) const {
        return has(name) ? tensor(name, shape) : std::vector<float>();
    }

    // Return a matrix in float32 or int8, whichever the bundle has.
    [[nodiscard]] Matrix matrix(const std::string &name, std::int64_t in, std::int64_t out) const {
        Matrix found{in, out, {}, {}, {}};
        if (has(name + ".columns")) {
            found.codes = tensor<std::int8_t>(name + ".columns", {in, out});
            found.scales = tensor(name + ".column_scale", {out});
        } else if (const auto *stored = header_.find(name + ".int8")) {
            const auto block = stored->shape.size() == 3 ? std::max<std::int64_t>(stored->shape[2], 1) : 1;
            const auto blocks = (in + block - 1) / block;
            const auto codes = tensor<std::uint8_t>(name + ".int8", {out, blocks, block});
            const auto scales = tensor(name + ".scale", {out * blocks});
            found.codes.resize(std::size_t(in * out)), found.scales.resize(std::size_t(out));
            for (std::int64_t o = 0; o < out; ++o) {
                const auto first = scales.begin() + o * blocks;
                need(std::all_of(first, first + blocks, [&](float one) { return one == *first; }), TXL_BACKEND, where_,
                     ": ", brief(name), " has a scale for each block, expected one for each column, which the step ",
                     "takes; export the model again");
                found.scales[std::size_t(o)] = *first;
                for (std::int64_t i = 0; i < in; ++i)
                    found.codes[std::size_t(i * out + o)] =
                        std::int8_t(int(codes[std::size_t(o * blocks * block + i)]) - 128);
            }
        } else {
            found.values = tensor(name, {in, out});
        }
        need(!ranges::count(found.codes, std::int8_t{-128}), TXL_BACKEND, where_, ": ", brief(name),
             " has the code -128, expected -127 ... 127; export the model again");
        return found;
    }

    // Return the tensor with the most columns of those named `start` and a number, [H, rows, columns].
    [[nodiscard]] std::vector<float> largest(const std::string &start, std::int64_t heads, std::int64_t rows,
                                             std::int64_t &columns) const {
        std::string best = start + "00001";
        columns = 0;
        for (const auto &[name, stored] : header_.all) {
            const bool numbered = starts_with(name, start) && name.size() > start.size() &&
                                  name.find_first_not_of("0123456789", start.size()) == std::string::npos;
            if (numbered && !stored.shape.empty() && stored.shape.back() > columns)
                best = name, columns = stored.shape.back();
        }
        return tensor(best, {heads, rows, std::max<std::int64_t>(columns, 1)});
    }

private:
    const Files &files_;
    std::string file_, where_;
    Tensors header_;
};

// A field of the family block, or `otherwise` where it is absent or null.
template <typename T>
T field(const Json &block, const char *name, T otherwise) {
    const auto found = block.find(name);
    return found == block.end() || found->is_null() ? otherwise : found->template get<T>();
}

std::int32_t count(const Json &block, const char *name, std::int64_t otherwise, std::int64_t least = 0) {
    const auto found = field(block, name, otherwise);
    need(found >= least && found <= INT32_MAX, TXL_BUNDLE, "the config's ", name, " is ", found, ", expected at least ",
         least, "; export the model again");
    return std::int32_t(found);
}

struct Config {
    explicit Config(const Json &family, std::int64_t memory_length);
    in_c::txl_shape shape{};
    std::int64_t attn_type = 0, div_val = 1;
    Sizes edges;  // of clusters: 0, cutoffs, V

    [[nodiscard]] std::int64_t width(std::size_t cluster) const {
        std::int64_t found = shape.embedding;
        while (cluster--) found /= div_val;
        return found;
    }
};

Config::Config(const Json &family, std::int64_t memory_length) {
    const auto config = family.at("config"), dialect = family.at("dialect");
    shape.vocabulary = count(config, "vocab_size", 0, 1), shape.layers = count(config, "n_layer", 0, 1);
    shape.heads = count(config, "n_head", 0, 1), shape.width = count(config, "d_model", 0, 1);
    shape.head_width = count(config, "d_head", 0, 1), shape.inner = count(config, "d_inner", 0, 1);
    shape.embedding = count(config, "d_embed", 0, 1);
    attn_type = count(config, "attn_type", 0), div_val = count(config, "div_val", 1, 1);
    shape.window = count(dialect, "window", 0), shape.single_steps = count(dialect, "single_steps", 0);
    shape.segment_window = field(dialect, "segment_window", false);
    shape.step_window = std::int32_t(memory_length + 1);
    shape.pre_norm = field(config, "pre_lnorm", false), shape.final_norm = field(config, "final_norm", false);
    shape.div_val = div_val > 1;
    shape.large_pages = true;
    shape.epsilon = field(config, "layer_norm_epsilon", 1e-5F);
    shape.scale = field(config, "embedding_scale", 1.0F);
    const auto activation = field<std::string>(config, "activation", "relu");
    const std::array<const char *, 3> known = {"relu", "gelu", "gelu_tanh"};
    const auto found = ranges::find(known, activation);
    need(found != known.end(), TXL_BACKEND, "the config's activation is ", brief(activation),
         ", expected relu, gelu or gelu_tanh; use ONNX Runtime");
    shape.activation = std::int32_t(found - known.begin());
    edges = {0};
    for (const auto &edge : config.value("cutoffs", Json::array())) edges.push_back(edge.get<std::int64_t>());
    edges.push_back(shape.vocabulary);
    shape.clusters = std::int32_t(edges.size() - 1);
}

// Compare the tables, which size the arrays, with the config, which the step uses to read and write them.
void check_tables(const Model &model, const Config &config) {
    const auto &m = model.manifest;
    const auto &s = config.shape;
    bool fits = model.update == Rule::ring && model.states.size() == 2 * std::size_t(s.layers) && m.tokens() &&
                m.tokens()->axes.shape == Sizes{TXL_SIZE_B, TXL_SIZE_L} &&
                model.softmax.size() == std::size_t(s.clusters);
    for (const auto *state : model.states)
        fits = fits && state->shape.size() == 4 && state->shape[0] == m.B && state->shape[1] == s.heads &&
               state->shape[3] == s.head_width && state->batch_axis == 0 && state->row_axis == 2 &&
               state->slots == model.states[0]->slots && m.memory_length() <= state->slots - model.lengths[0];
    for (const auto *program : model.programs)
        fits = fits && program->kind == "hidden" && program->outputs[0].shape.back() == s.width;
    for (std::size_t c = 0; fits && c < model.softmax.size(); ++c) {
        const auto columns = config.edges[c + 1] - config.edges[c] + (c ? 0 : s.clusters - 1);
        fits = model.softmax[c]->inputs[0].shape.back() == s.width && config.width(c) > 0 &&
               model.softmax[c]->outputs[0].shape.back() == columns;
    }
    need(fits, TXL_BUNDLE, model.files->where("manifest.json"),
         ": the tables of states and programs are not those of its config, expected keys and values of each layer in ",
         "one ring, and rows and words of the config's sizes; export the model again");
}

bool runs_here(const std::string &instructions) {
#if defined(__x86_64__) && defined(__GNUC__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (instructions == "avx2") return avx2;
    const bool bf16 = instructions == "avx512_bf16";
    if (bf16 || instructions == "avx512")
        return avx2 && (!bf16 || __builtin_cpu_supports("avx512bf16")) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#endif
    return instructions == "plain" || (instructions == "neon" && has_dot_products());
}

}  // namespace

#define TXL_FUNCTIONS(each)                                                                       \
    each(txl_open) each(txl_close) each(txl_set_product) each(txl_set_codes) each(txl_set_vector) \
        each(txl_set_positions) each(txl_set_cluster) each(txl_set_softmax) each(txl_step) each(txl_softmax)

// The library, which stays open: the system may hand out its handle again.
struct Native::Inside {
    Inside(const std::string &path, const std::string &code, const Config &config, std::int32_t threads);
    ~Inside();
    void done(int status) const {
        need(!status, TXL_MEMORY, "there is not enough memory for the weights, expected more; use a smaller model");
    }
    void set_layers(const Weights &weights, const Config &config);
    void set_norm(const Weights &weights, std::int32_t layer, int which, const std::string &name) const;
    void set_vector(std::int32_t layer, int which, const std::vector<float> &values) const;
    void set_product(std::int32_t layer, int which, const Matrix &matrix, const std::vector<float> &bias) const;
    void set_clusters(const Weights &weights, const Config &config, std::list<std::vector<float>> &tables) const;

    // Return a function of the library.
    template <typename Function>
    Function *function(const char *name) const {
        void *found = symbol_of(library, name);
        need(found != nullptr, TXL_BACKEND, path, ": has no ", name, ", expected a compiled step", ADVICE);
        return reinterpret_cast<Function *>(found);
    }
    std::string path;
    void *library = nullptr;
    in_c::txl_model *model = nullptr;
    in_c::txl_shape shape;
#define TXL_MEMBER(name) decltype(in_c::name) *name = nullptr;
    TXL_FUNCTIONS(TXL_MEMBER)
#undef TXL_MEMBER
};

// Load the code whose hash was checked. A library stays loaded, and each code is loaded once.
void *load_library(const std::string &path, const std::string &code) {
    static std::mutex lock;
    static std::map<std::string, void *> loaded;
    const std::lock_guard<std::mutex> held(lock);
    auto &library = loaded[sha256(code.data(), code.size())];
    if (library) return library;
    std::string why;
    library = open_code(path, code, why);
    need(library != nullptr, TXL_BACKEND, path, ": ", why, "; expected a step for this machine", ADVICE);
    return library;
}

Native::Inside::Inside(const std::string &from, const std::string &code, const Config &config, std::int32_t threads)
    : path(from), library(load_library(from, code)), shape(config.shape) {
    const auto version = function<int()>("txl_version")();
    need(version == in_c::TXL_NATIVE_VERSION, TXL_BACKEND, path, ": its functions are of version ", version,
         ", expected ", int(in_c::TXL_NATIVE_VERSION), ADVICE);
#define TXL_FIND(name) name = function<decltype(in_c::name)>(#name);
    TXL_FUNCTIONS(TXL_FIND)
#undef TXL_FIND
    model = txl_open(&shape, threads);
    need(model != nullptr, TXL_BACKEND, path, ": got no memory or threads, expected them; give fewer threads");
}

Native::Inside::~Inside() {
    if (model) txl_close(model);
}

void Native::Inside::set_vector(std::int32_t layer, int which, const std::vector<float> &values) const {
    done(txl_set_vector(model, layer, which, values.data(), int(values.size())));
}

void Native::Inside::set_norm(const Weights &weights, std::int32_t layer, int which, const std::string &name) const {
    set_vector(layer, which, weights.tensor(name + ".weight", {shape.width}));
    set_vector(layer, which + 1, weights.tensor(name + ".bias", {shape.width}));
}

void Native::Inside::set_product(std::int32_t layer, int which, const Matrix &matrix,
                                 const std::vector<float> &bias) const {
    const auto in = int(matrix.in), out = int(matrix.out);
    if (matrix.codes.empty())
        done(txl_set_product(model, layer, which, in, out, matrix.values.data(), out, 1, or_null(bias)));
    else
        done(txl_set_codes(model, layer, which, in, out, matrix.codes.data(), out, 1, matrix.scales.data(),
                           or_null(bias)));
}

void Native::Inside::set_layers(const Weights &weights, const Config &config) {
    const std::int64_t D = shape.width, H = shape.heads, width = shape.head_width, inner = shape.inner;
    for (std::int32_t i = 0; i < shape.layers; ++i) {
        const auto layer = join("layers.", i < 10 ? "0" : "", i), attention = layer + ".attention";
        const auto feed_forward = layer + ".feed_forward";
        auto joined = weights.matrix(attention + ".query_key_value.weight", D, 3 * H * width);
        joined.pad(true, 3 * H, width);
        const auto bias = weights.optional(attention + ".query_key_value.bias", {3 * H * width});
        set_product(i, in_c::QKV, joined, padded(bias, width, 1));
        auto mixed = weights.matrix(attention + ".output.weight", H * width, D);
        mixed.pad(false, H, width);
        set_product(i, in_c::OUTPUT, mixed, weights.optional(attention + ".output.bias", {D}));
        set_product(i, in_c::INNER, weights.matrix(feed_forward + ".inner.weight", D, inner),
                    weights.optional(feed_forward + ".inner.bias", {inner}));
        set_product(i, in_c::OUTER, weights.matrix(feed_forward + ".outer.weight", inner, D),
                    weights.optional(feed_forward + ".outer.bias", {D}));
        for (const auto &[which, name] :
             {std::pair(in_c::CONTENT_BIAS, ".content_bias"), std::pair(in_c::POSITION_BIAS, ".position_bias")}) {
            auto found = weights.optional(attention + name, {H, width});
            if (found.empty()) found.resize(std::size_t(H * width));
            set_vector(i, which, found);
        }
        set_norm(weights, i, in_c::NORM_1_WEIGHT, attention + ".norm");
        set_norm(weights, i, in_c::NORM_2_WEIGHT, feed_forward + ".norm");
        std::int64_t rows = 0, scored = shape.distances;
        const auto table = weights.largest(attention + ".position.table.", H, width, rows);
        std::vector<float> scores;
        if (config.attn_type == 1) scores = weights.largest(attention + ".position.table.bias.", H, 1, scored);
        need(rows == shape.distances && scored == shape.distances, TXL_BUNDLE,
             "tables of positions have different numbers of rows, expected one number; export the model again");
        done(txl_set_positions(model, i, table.data(), or_null(scores)));
    }
    if (shape.final_norm) set_norm(weights, shape.layers, 0, "final_norm");
}

void Native::Inside::set_clusters(const Weights &weights, const Config &config,
                                  std::list<std::vector<float>> &tables) const {
    const std::int64_t D = shape.width, more = shape.clusters - 1;
    for (std::size_t c = 0; c + 1 < config.edges.size(); ++c) {
        const auto first = config.edges[c], last = config.edges[c + 1], words = last - first;
        const auto own = shape.div_val ? c : 0;  // the table and projection that the cluster's words have
        const auto width = config.width(own);
        const bool brings = shape.div_val || !c;
        if (brings)
            tables.push_back(
                weights.tensor(join("embedding.tables.", c), {shape.div_val ? words : shape.vocabulary, width}));
        const auto &whole = tables.back();
        const auto into = width == D ? weights.optional(join("embedding.projections.", own), {D, width})
                                     : weights.tensor(join("embedding.projections.", own), {D, width});
        auto out_of = weights.optional(join("softmax.projections.", c), {D, width});
        if (out_of.empty()) out_of = into;
        done(txl_set_cluster(model, int(c), int(first), int(last), int(width), brings ? whole.data() : nullptr,
                             brings ? or_null(into) : nullptr, or_null(out_of)));
        auto table = weights.optional(join("softmax.tables.", c), {words, width});
        if (table.empty()) {
            const auto from = whole.begin() + (shape.div_val ? 0 : first * width);
            table.assign(from, from + words * width);
        }
        auto bias = weights.optional(join("softmax.biases.", c), {words});
        if (!c && more) {  // a column for each further cluster behind the words
            const auto columns = weights.tensor("softmax.cluster.weight", {more, width});
            auto behind = weights.optional("softmax.cluster.bias", {more});
            bias.resize(std::size_t(words)), behind.resize(std::size_t(more));
            table.insert(table.end(), columns.begin(), columns.end());
            bias.insert(bias.end(), behind.begin(), behind.end());
        }
        done(txl_set_softmax(model, int(c), int(table.size() / std::size_t(width)), int(width), table.data(),
                             or_null(bias)));
    }
}

// Hold the library's hash and the machine against the facts that `build` put into the bundle, before its code runs, and
// return the code.
std::string Native::check_facts(const Model &model, const std::string &path) {
    const auto &files = model.manifest.files;
    const auto where = model.files->where(SIDECAR);
    need(files.count(SIDECAR), TXL_BACKEND, where, ": missing, expected the facts of ", path,
         "; make both with `txl-deploy build --target native`");
    const auto facts = parse_json(model.read(SIDECAR), where);
    const auto said = [&](const char *fact) { return field<std::string>(facts, fact, ""); };
    std::ifstream file(path, std::ios::binary);
    std::string code((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    need(file.is_open() && !code.empty(), TXL_BACKEND, path,
         ": missing or unreadable, expected a compiled step; name it in options.native_library");
    need(sha256(code.data(), code.size()) == said("sha256"), TXL_BACKEND, path, ": its SHA-256 is not that of ", where,
         ", expected the step that was verified with this bundle", ADVICE);
    need(said("weights") == files.at(model.manifest.weights).sha256, TXL_BUNDLE, where,
         ": is of different weights, expected those of the bundle", ADVICE);
    const auto lower = [](std::string text) {
        for (auto &letter : text) letter = char(std::tolower(static_cast<unsigned char>(letter)));
        return text;
    };
    const auto instructions = said("instructions"), cache = said("cache"), here = platform_name();
    need(lower(said("platform")) == lower(here) && runs_here(instructions), TXL_BACKEND, path, ": was compiled for ",
         brief(said("platform")), " with ", brief(instructions), ", this is ", here,
         ", which lacks one of them; build it here with `txl-deploy build`, or use ONNX Runtime");
    need(cache == "fp32" || cache == "fp16", TXL_BACKEND, where, ": keys and values are in ", brief(cache),
         ", expected fp32 or fp16, which this library lays out; use txl_runtime from Python");
    const auto precision = said("precision");
    need(precision == model.manifest.precision || (precision == "bf16" && model.manifest.precision == "fp32"),
         TXL_BUNDLE, where, ": is of ", brief(precision), ", the bundle is of ", model.manifest.precision, ADVICE);
    half_ = cache == "fp16", bf16_ = precision == "bf16";
    title = join("a step in C (", instructions, ", weights in ", precision, ", keys and values in ", cache, ")");
    if (half_ || precision != "fp32") facts.at("reached").get_to(reached);
    return code;
}

Native::Native(const Model &model, const txl_load_options &options) : reached{} {
    const auto &m = model.manifest;
    const auto where = model.files->where("manifest.json");
    need(options.threads >= 0 && options.threads <= MOST_THREADS, TXL_USAGE, "threads is ", options.threads,
         ", expected 1 ... ", MOST_THREADS, ", or 0 for one per core");
    need(!platform_name().empty(), TXL_BACKEND, "options.native_library is ", brief(options.native_library),
         ", expected NULL on Windows, for which no compiled step is made; leave it out");
    need(model.update == Rule::ring && !(options.flags & TXL_LOAD_LEAN), TXL_BACKEND, where,
         ": a compiled step has a ring and a copy of the weights, expected neither rolled memory nor TXL_LOAD_LEAN; ",
         "leave out options.native_library");
    need(m.precision == "fp32" || m.precision == "int8", TXL_BACKEND, where, ": its precision is ", m.precision,
         ", expected fp32 or int8 for a compiled step; leave out options.native_library");
    try {
        const auto family = parse_json(m.family, where);
        need(family.value("name", "") == "transformer_xl", TXL_BACKEND, where,
             ": is of a different family, expected a Transformer-XL; leave out options.native_library");
        const std::string path = options.native_library;
        need(std::filesystem::is_regular_file(path), TXL_BACKEND, brief(path),
             ": is no file, expected a compiled step; name it in options.native_library");
        const auto code = check_facts(model, path);
        Config config(family, m.memory_length());
        check_tables(model, config);
        const Weights weights(*model.files, m.weights);
        config.shape.slots = std::int32_t(model.states[0]->slots), config.shape.batch = std::int32_t(m.B);
        config.shape.segment = std::int32_t(model.lengths[0]), config.shape.cache = half_;
        config.shape.bf16 = bf16_;
        std::int64_t distances = 0;
        (void)weights.largest("layers.00.attention.position.table.", config.shape.heads, config.shape.head_width,
                              distances);
        config.shape.distances = std::int32_t(distances);
        inside_ = std::make_unique<Inside>(path, code, config, options.threads ? options.threads : cores());
        inside_->set_layers(weights, config);
        inside_->set_clusters(weights, config, tables_);
    } catch (const Json::exception &error) {
        refuse(TXL_BUNDLE, where, ": its family or ", SIDECAR, " is damaged (", brief(error.what()),
               "), expected what `export` and `build` write", ADVICE);
    }
}

Native::~Native() = default;

void Native::step(std::int64_t rows, std::int64_t length, const std::int32_t *tokens, const std::int32_t *valid,
                  const std::int32_t *fill, const std::int32_t *head, void *const *keys, void *const *values,
                  float *hidden) const {
    inside_->txl_step(inside_->model, int(rows), int(length), tokens, valid, fill, head, keys, values, hidden);
}

void Native::softmax(std::size_t cluster, std::int64_t rows, const float *hidden, float *out) const {
    inside_->txl_softmax(inside_->model, int(cluster), int(rows), hidden, out);
}

Array Native::memory(const State &state, Layout layout) const {
    const auto slots = state.slots, width = state.shape[3];
    const auto strips = (slots + STRIP_SLOTS - 1) / STRIP_SLOTS;
    const auto dtype = half_ ? TXL_FLOAT16 : TXL_FLOAT32;
    if (layout == Layout::keys) return {dtype, {state.shape[0], state.shape[1], strips, STRIP_SLOTS * width}};
    return {dtype, {state.shape[0], state.shape[1], slots, padded(width)}};
}

View native_slots(const View &memory, Layout layout, std::int64_t d_head, std::int64_t first, std::int64_t count) {
    if (layout == Layout::values) return memory.narrow(2, 0, d_head).moved(1, 0).narrow(0, first, count);
    const auto strip = memory.at(1, first / STRIP_SLOTS);  // [H, 64 d_head]
    const auto size = std::int64_t(size_of(memory.dtype));
    auto found = memory;  // for the rank
    found.data = strip.data + first % STRIP_SLOTS * size;
    found.shape = {count, memory.shape[0], d_head}, found.strides = {size, strip.strides[0], STRIP_SLOTS * size};
    return found;
}

}  // namespace txl_runtime
