#include "model.hpp"

#include <algorithm>

#include "error.hpp"
#include "ranges.hpp"
#include "safetensors.hpp"
#include "sha256.hpp"

namespace txl_runtime {
namespace {

constexpr std::uint64_t MOST_MANIFEST = 1U << 24;  // bytes, 16 MiB: a hundred times a large model's
constexpr std::int64_t SMALL_SOFTMAX = 1 << 18;    // products per row, F * V, up to which one thread is used
constexpr const char *MANIFEST = "manifest.json";

Array number(double value, txl_dtype dtype) {
    Array exact(dtype == TXL_INT32 ? TXL_INT32 : TXL_FLOAT32, Shape{}), found(dtype, Shape{});
    dtype == TXL_INT32 ? void(*exact.as<std::int32_t>() = value) : void(*exact.as<float>() = value);
    copy(found.view(), exact.view());
    return found;
}

bool broadcasts(const Sizes &shape, const Sizes &over) {
    if (shape.size() > over.size()) return false;
    for (std::size_t i = 1; i <= shape.size(); ++i)
        if (shape[shape.size() - i] != 1 && shape[shape.size() - i] != over[over.size() - i]) return false;
    return true;
}

}  // namespace

Model::Model(std::unique_ptr<Files> from, const txl_load_options &options) : files(std::move(from)), options_(options) {
    const auto of_manifest = files->identity({MANIFEST});
    const auto document = files->read(MANIFEST, MOST_MANIFEST);
    need(!options.manifest_sha256 || sha256(document.data(), document.size()) == options.manifest_sha256, TXL_BUNDLE,
         files->where(MANIFEST),
         ": its SHA-256 is not the one that options.manifest_sha256 has; load the bundle that was meant");
    manifest = read_manifest(document, files->where(MANIFEST));
    // The engine opens the weights by path, after we hashed them. So the identity of the files is compared at the end:
    // a bundle that was replaced between the two is refused.
    const auto used = manifest.used_files();
    const auto of_files = files->identity(used);
    for (const auto &entry : manifest.inputs) Shape{entry.axes.shape};  // throws if txl_tensor has too few axes for it
    for (const auto &output : manifest.outputs) Shape{output.axes.shape};
    for (const auto &state : manifest.states) Shape{state.shape};
    check_files();
    lengths = manifest.lengths(), given = manifest.given();
    text = manifest.reads_text(), scoring = text && manifest.by_rows;
    need(manifest.precision != "bf16", TXL_BACKEND, files->where(MANIFEST),
         ": its precision is bf16, which ONNX Runtime cannot run on a CPU, expected fp32, fp16, int8 or int4; export "
         "another");
    if (!manifest.vocabulary.empty())
        vocabulary = std::make_unique<Vocabulary>(read(manifest.vocabulary), manifest.vocab_size(),
                                                  files->where(manifest.vocabulary));
    if (!options.native_library) {
        engine_ = std::make_unique<Engine>(options);
        engine_name = "ONNX Runtime " + engine_->version();
    }
    choose(options.update);
    if (options.native_library) {
        native = std::make_unique<const Native>(*this, options);
        engine_name = native->title, leading = true;
    } else {
        open_sessions();
    }
    read_initial();
    need(files->identity({MANIFEST}) == of_manifest && files->identity(used) == of_files, TXL_BUNDLE,
         files->where(MANIFEST), ": the bundle was replaced while it was loaded, expected it to stay; load it again");
    options_ = {};  // its pointers are the caller's, and may end after this call
    options_.flags = options.flags;
}

void Model::check_files() const {
    const auto used = manifest.used_files();
    for (const auto &[name, record] : manifest.files) {
        // A bundle stays usable when an engine is lost.
        if (starts_with(name, "engines/") && !used.count(name)) continue;
        const auto size = files->size(name);
        need(size == record.size, TXL_BUNDLE, files->where(name), ": ", size, " bytes, expected ", record.size,
             "; copy the bundle again");
        need((options_.flags & TXL_LOAD_UNHASHED) || files->hash(name) == record.sha256, TXL_BUNDLE, files->where(name),
             ": its SHA-256 is another than the manifest's, so it was altered or replaced; load or copy it again");
    }
}

std::string Model::read(const std::string &name) const {
    const auto &record = manifest.files.at(name);
    auto content = files->read(name, record.size);
    need((options_.flags & TXL_LOAD_UNHASHED) || sha256(content.data(), content.size()) == record.sha256, TXL_BUNDLE,
         files->where(name),
         ": was altered while the bundle was open, expected the file that it was opened with; load it again");
    return content;
}

void Model::choose(const char *asked) {
    const auto &there = manifest.updates;
    update = *there.begin();
    if (asked) {
        const auto found = ranges::find_if(there, [&](Rule rule) { return std::string(name_of(rule)) == asked; });
        need(found != there.end(), TXL_USAGE, "update is ", brief(asked),
             ", and the bundle has no programs of that rule; leave it out");
        update = *found;
        if (update == Rule::ring && engine_ && !engine_->runs_opset(24))
            refuse(TXL_UNSUPPORTED, "update is ring, which needs ONNX Runtime 1.25 or newer, and this is ",
                   engine_->version(), "; use rolled");
    } else if (update == Rule::ring && there.size() > 1 && engine_ && !engine_->runs_opset(24)) {
        update = *std::next(there.begin());
    }
    states = manifest.states_of(update);
    for (const auto &program : manifest.programs)
        if (program.update == update) programs.push_back(&program);
    std::stable_sort(programs.begin(), programs.end(), [](const Program *a, const Program *b) {
        return std::pair(a->length, a->rows_open()) < std::pair(b->length, b->rows_open());
    });
    for (const auto *state : states) growing = growing || state->absent || state->rows;
    leading = !growing && ranges::all_of(programs, [](const Program *program) { return program->open_batch; });
    if (programs[0]->kind != "hidden") return;
    const auto &axes = manifest.logprobs()->axes;
    need(manifest.outputs.size() == 1 && manifest.logprobs()->dtype == TXL_FLOAT32 && axes.batch >= 0 &&
             axes.positions.size() == 1,
         TXL_UNSUPPORTED, files->where(MANIFEST),
         ": has a softmax in parts and other outputs than float32 log-probabilities, which this library cannot put "
         "together; use txl_runtime from Python");
    for (std::size_t c = 0; c < manifest.logprobs()->clusters.size(); ++c)
        for (const auto &program : manifest.programs)
            if (program.kind == (c ? "tail." + std::to_string(c) : "head")) softmax.push_back(&program);
}

void Model::open_sessions() {
    const bool lean = options_.flags & TXL_LOAD_LEAN;
    const auto *logprobs = manifest.logprobs();
    const bool small = !logprobs || logprobs->width * manifest.vocab_size() <= SMALL_SOFTMAX;
    auto all = programs;
    all.insert(all.end(), softmax.begin(), softmax.end());
    for (const auto *program : all) {
        const auto where = files->where(program->file);
        if (!sessions_.count(program->file)) {
            const auto graph = read(program->file);
            const auto opset = program->opset.find("ai.onnx");
            const auto wanted = opset == program->opset.end() ? "" : engine_->wanted_for(opset->second);
            need(wanted.empty(), TXL_BACKEND, where, ": needs opset ", opset->second, ", which ONNX Runtime has from ",
                 wanted, " on, and this is ", engine_->version(), "; install that");
            SessionOptions options{options_.threads, false, lean, !lean && small, files->folder(),
                                   manifest.weights, {}};
            options.threads = small && program->softmax() ? 1 : options_.threads;
            // An arena never frees the peak of a segment: worth it for layers, too much for log-probabilities [L, V].
            options.arena = !lean && (program->kind == "hidden" || program->kind == "step");
            if (options.folder.empty()) options.weights = files->held(manifest.weights);
            sessions_[program->file] = std::make_unique<Session>(*engine_, graph, where, options);
        }
        sessions_[program->file]->hold_against(*program, manifest, where);
    }
}

void Model::read_initial() {
    for (const auto *state : states) {
        if (!state->initial.is_string()) {
            const auto value = state->initial.is_null() ? 0.0 : state->initial.get<double>();
            initial.emplace(state->name, number(value, state->dtype));
            continue;
        }
        const auto name = state->initial.get<std::string>();
        const auto where = files->where(manifest.weights);
        const auto header = read_header(*files, manifest.weights);
        const auto *found = header.find(name);
        need(found, TXL_BUNDLE, where, ": lacks ", brief(name), ", expected it; export the model again");
        const auto dtype = state->counted() ? TXL_FLOAT32 : state->dtype;
        const auto over = state->counted() ? state->row_shape() : state->sequence_shape();
        need(found->dtype == stored_name(dtype) &&
                 (state->counted() ? found->shape == over : broadcasts(found->shape, over)),
             TXL_BUNDLE, where, ": ", brief(name), " is ", brief(found->dtype), " ", listed(found->shape),
             ", expected ", name_of(dtype), " ", listed(over), " for ", brief(state->name), "; export the model again");
        Array value(dtype, Shape(found->shape));
        need(found->last - found->first == value.bytes(), TXL_BUNDLE, where, ": ", brief(name),
             " has another size than its shape; export again");
        const auto bytes = files->part(manifest.weights, found->first, found->last - found->first);
        ranges::copy(bytes, value.as<char>());
        initial.emplace(state->name, std::move(value));
    }
}

std::uint64_t Model::state_bytes() const {
    std::uint64_t bytes = 0;
    for (const auto *state : states) {
        std::uint64_t values = state->counted() ? std::uint64_t(manifest.memory_length()) : 1;
        for (auto size : state->counted() ? state->row_shape() : state->sequence_shape()) values *= std::uint64_t(size);
        bytes += values * size_of(state->dtype);
    }
    return bytes;
}

}  // namespace txl_runtime
