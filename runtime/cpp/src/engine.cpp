#include "engine.hpp"

#include <algorithm>
#include <cstdio>

#include "error.hpp"
#include "ranges.hpp"
#include "system.hpp"

namespace txl_runtime {
namespace {

constexpr std::int32_t MOST_THREADS = 1024;  // as in Python; a larger number is a mistake
constexpr const char *WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path";

constexpr ONNXTensorElementDataType ELEMENTS[] = {  // indexed by txl_dtype
    ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,     ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,   ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16};

// An object of the engine, freed by the engine's own function.
template <typename T>
using Owned = std::unique_ptr<T, void (*)(T *)>;

// Return the txl_dtype of an element type; 0 if it has none.
txl_dtype dtype_of(ONNXTensorElementDataType element) {
    const auto found = ranges::find(ELEMENTS, element);
    return found == std::end(ELEMENTS) ? txl_dtype{} : txl_dtype(found - ELEMENTS);
}

// Open the library and never close it: ONNX Runtime's threads may still run.
const OrtApiBase *open_engine(const char *asked) {
    auto names = engine_names();
    if (const auto told = variable("TXL_ONNXRUNTIME"); !told.empty()) names = {told};
    if (asked) names = {asked};
    std::string said;
    for (const auto &name : names) {
        std::string why;
        if (void *library = open_library(name, why)) {
            void *symbol = symbol_of(library, "OrtGetApiBase");
            need(symbol != nullptr, TXL_BACKEND, name,
                 ": has no OrtGetApiBase, expected ONNX Runtime's library; give another");
            return reinterpret_cast<decltype(&OrtGetApiBase)>(symbol)();
        }
        said += (said.empty() ? "" : "; ") + why;
    }
    refuse(TXL_BACKEND, "ONNX Runtime cannot be opened (", said,
           "), expected its library; name it in options.engine or $TXL_ONNXRUNTIME");
}

// Without this logger the engine prints. An application that wants its log gives an OrtEnv of its own.
void stay_silent(void *, OrtLoggingLevel, const char *, const char *, const char *, const char *) {}

/** Return whether products of int8 are summed in 32 bits without being asked to; false where that is not known. */
bool sums_exactly() {
#if defined(__x86_64__) && defined(__GNUC__)
    return __builtin_cpu_supports("avx512vnni") != 0;
#else
    return false;
#endif
}

}  // namespace

Engine::Engine(const txl_load_options &options) {
    need(options.threads >= 0 && options.threads <= MOST_THREADS, TXL_USAGE, "threads is ", options.threads,
         ", expected 1 ... ", MOST_THREADS, ", or 0 for one per core");
    need(options.ort_api_base || !options.ort_env, TXL_USAGE,
         "ort_env is given without ort_api_base, expected both of one library; give its OrtApiBase too");
    const auto *base =
        options.ort_api_base ? static_cast<const OrtApiBase *>(options.ort_api_base) : open_engine(options.engine);
    version_ = base->GetVersionString();
    std::sscanf(version_.c_str(), "%d.%d", &numbers_.first, &numbers_.second);
    need(numbers_ >= std::pair(1, 21), TXL_BACKEND, "ONNX Runtime is ", version_,
         ", expected 1.21 or newer; install that");
    api_ = base->GetApi(ORT_API_VERSION);
    need(api_ != nullptr, TXL_BACKEND, "ONNX Runtime ", version_, " has no API ", ORT_API_VERSION, "; install another");
    if (options.ort_env) {
        env_ = static_cast<OrtEnv *>(options.ort_env);
    } else {
        check(api_->CreateEnvWithCustomLogger(stay_silent, nullptr, ORT_LOGGING_LEVEL_ERROR, "txl", &env_),
              "ONNX Runtime");
        owned_ = true;
        said(api_->DisableTelemetryEvents(env_));
    }
    check(api_->CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &memory_), "ONNX Runtime");
}

Engine::~Engine() {
    if (memory_) api_->ReleaseMemoryInfo(memory_);
    if (owned_) api_->ReleaseEnv(env_);
}

std::string Engine::wanted_for(std::int64_t opset) const {
    const auto first = opset >= 24 ? std::pair(1, 25) : opset == 23 ? std::pair(1, 23) : std::pair(1, 21);
    return numbers_ < first ? std::to_string(first.first) + "." + std::to_string(first.second) : "";
}

std::string Engine::said(OrtStatus *status) const {
    if (!status) return "";
    std::string text = api_->GetErrorMessage(status);
    api_->ReleaseStatus(status);
    return text.empty() ? "an error without words" : text;
}

void Engine::check(OrtStatus *status, const std::string &where) const {
    const auto text = said(status);
    need(text.empty(), TXL_BACKEND, where, ": ", text.substr(0, 600), "; look into the engine's log");
}

Value::Value(const Engine &engine, const View &view) : engine_(&engine) {
    engine.check(
        engine.api().CreateTensorWithDataAsOrtValue(engine.memory(), view.data, view.bytes(), view.shape.begin(),
                                                    view.shape.rank(), ELEMENTS[view.dtype], &value_),
        "an array");
}

Value &Value::operator=(Value &&other) noexcept {
    std::swap(engine_, other.engine_), std::swap(value_, other.value_);
    return *this;
}

Value::~Value() {
    if (value_) engine_->api().ReleaseValue(value_);
}

View Value::view() const {
    const auto &api = engine_->api();
    const auto ask = [&](OrtStatus *status) { engine_->check(status, "a result"); };
    OrtTensorTypeAndShapeInfo *info = nullptr;
    ask(api.GetTensorTypeAndShape(value_, &info));
    const Owned<OrtTensorTypeAndShapeInfo> held(info, api.ReleaseTensorTypeAndShapeInfo);
    std::size_t rank = 0;
    ONNXTensorElementDataType element{};
    void *data = nullptr;
    ask(api.GetDimensionsCount(info, &rank));
    Sizes sizes(rank);
    ask(api.GetDimensions(info, sizes.data(), rank));
    ask(api.GetTensorElementType(info, &element));
    ask(api.GetTensorMutableData(value_, &data));
    return {data, dtype_of(element), Shape(sizes)};
}

Session::Session(const Engine &engine, const std::string &graph, const std::string &where,
                 const SessionOptions &options)
    : engine_(engine) {
    const auto &api = engine.api();
    OrtSessionOptions *made = nullptr;
    const auto set = [&](OrtStatus *status) { engine.check(status, where); };
    set(api.CreateSessionOptions(&made));
    const Owned<OrtSessionOptions> held(made, api.ReleaseSessionOptions);
    set(api.SetSessionLogSeverityLevel(made, ORT_LOGGING_LEVEL_ERROR));
    set(api.SetInterOpNumThreads(made, 1));
    if (options.threads) set(api.SetIntraOpNumThreads(made, options.threads));
    set(options.arena ? api.EnableCpuMemArena(made) : api.DisableCpuMemArena(made));
    // Refuse a graph whose declared shapes differ from those that inference finds; by default the engine only warns.
    set(api.AddSessionConfigEntry(made, "session.strict_shape_type_inference", "1"));
    // On x86 without VNNI pairs of int8 products are summed in 16 bits, which 2 * 255 * 127 = 64,770 overflows. With VNNI
    // the product that is asked for is exact, too, but takes 2.2 times as long.
    set(api.AddSessionConfigEntry(made, "session.x64quantprecision", sums_exactly() ? "0" : "1"));
    if (!options.spin) set(api.AddSessionConfigEntry(made, "session.force_spinning_stop", "1"));
    if (options.lean) {
        set(api.AddSessionConfigEntry(made, "session.disable_prepacking", "1"));
        set(api.DisableMemPattern(made));
    }
    if (!options.folder.empty()) {
        set(api.AddSessionConfigEntry(made, WEIGHTS_FOLDER, options.folder.c_str()));
    } else if (!options.weights.empty()) {
        const auto name = system_path(options.name);
        const ORTCHAR_T *names[] = {name.c_str()};
        char *data[] = {const_cast<char *>(options.weights.data())};
        const std::size_t sizes[] = {options.weights.size()};
        set(api.AddExternalInitializersFromFilesInMemory(made, names, data, sizes, 1));
    }
    const auto said =
        engine.said(api.CreateSessionFromArray(engine.env(), graph.data(), graph.size(), made, &session_));
    need(said.empty(), TXL_BUNDLE, where, ": ", said.substr(0, 600), "; expected a graph that ONNX Runtime ",
         engine.version(), " can load");
}

Session::~Session() {
    if (session_) engine_.api().ReleaseSession(session_);
}

std::vector<Session::Binding> Session::bindings(bool outputs) const {
    const auto &api = engine_.api();
    const auto ask = [&](OrtStatus *status) { engine_.check(status, "a graph's inputs and outputs"); };
    OrtAllocator *allocator = nullptr;
    ask(api.GetAllocatorWithDefaultOptions(&allocator));
    std::size_t count = 0;
    ask(outputs ? api.SessionGetOutputCount(session_, &count) : api.SessionGetInputCount(session_, &count));
    std::vector<Binding> found(count);
    for (std::size_t i = 0; i < count; ++i) {
        char *name = nullptr;
        ask(outputs ? api.SessionGetOutputName(session_, i, allocator, &name)
                    : api.SessionGetInputName(session_, i, allocator, &name));
        found[i].name = name;
        ask(api.AllocatorFree(allocator, name));
        OrtTypeInfo *type = nullptr;
        ask(outputs ? api.SessionGetOutputTypeInfo(session_, i, &type)
                    : api.SessionGetInputTypeInfo(session_, i, &type));
        const Owned<OrtTypeInfo> held(type, api.ReleaseTypeInfo);
        const OrtTensorTypeAndShapeInfo *info = nullptr;
        ask(api.CastTypeInfoToTensorInfo(type, &info));
        if (!info) continue;  // a sequence or map: its empty dtype is refused later
        ONNXTensorElementDataType element{};
        std::size_t rank = 0;
        ask(api.GetTensorElementType(info, &element));
        ask(api.GetDimensionsCount(info, &rank));
        found[i].dtype = dtype_of(element) ? name_of(dtype_of(element)) : "type " + std::to_string(element);
        found[i].shape.resize(rank);
        std::vector<const char *> names(rank);
        ask(api.GetDimensions(info, found[i].shape.data(), rank));
        ask(api.GetSymbolicDimensions(info, names.data(), rank));
        for (const auto *one : names) found[i].names.emplace_back(one ? one : "");
    }
    return found;
}

void Session::hold_against(const Program &program, const Manifest &manifest, const std::string &where) const {
    // The axis of sequences by tensor name. A graph with an open B calls its size "batch".
    std::map<std::string, int> batch;
    for (const auto &entry : manifest.inputs) batch[entry.name] = entry.axes.batch;
    for (const auto &output : manifest.outputs) batch[output.name] = output.axes.batch;
    if (program.kind == "hidden") batch[program.outputs[0].name] = 0;
    for (const auto *state : manifest.states_of(program.update))
        batch[state->input] = batch[state->output] = state->batch_axis;
    for (const bool returned : {false, true}) {
        const auto &specs = returned ? program.outputs : program.inputs;
        const auto found = bindings(returned);
        need(found.size() == specs.size(), TXL_BUNDLE, where, ": has ", found.size(), returned ? " outputs" : " inputs",
             ", expected the ", specs.size(), " of the manifest; export the model again");
        for (const auto &spec : specs) {
            const auto has = ranges::find(found, spec.name, &Binding::name);
            need(has != found.end(), TXL_BUNDLE, where, ": lacks ", brief(spec.name),
                 ", expected it as in the manifest; export the model again");
            bool fits = has->dtype == name_of(spec.dtype) && has->shape.size() == spec.shape.size();
            for (std::size_t axis = 0; fits && axis < spec.shape.size(); ++axis) {
                const auto wanted = spec.shape[axis], size = has->shape[axis];
                const auto &name = has->names[axis];
                const auto sequences = batch.find(spec.name);
                if (program.open_batch && sequences != batch.end() && sequences->second == int(axis))
                    fits = size < 0 && (name == "batch" || name == "segment");
                else if (wanted == TXL_SIZE_ROWS)
                    fits = returned || size < 0;
                else
                    fits = size == wanted || (size < 0 && name == "segment");
            }
            need(fits, TXL_BUNDLE, where, ": ", brief(spec.name), " is ", has->dtype, " ", listed(has->shape),
                 ", expected ", name_of(spec.dtype), " ", listed(spec.shape),
                 " as in the manifest; export the model again");
        }
    }
}

void Session::run(const std::vector<const char *> &input_names, const std::vector<const OrtValue *> &inputs,
                  const std::vector<const char *> &output_names, std::vector<OrtValue *> &outputs,
                  const std::string &program) const {
    auto *status = engine_.api().Run(session_, nullptr, input_names.data(), inputs.data(), inputs.size(),
                                     output_names.data(), output_names.size(), outputs.data());
    const auto said = engine_.said(status);
    need(said.empty(), TXL_BACKEND, "program ", program, " failed in ONNX Runtime: ", said.substr(0, 600),
         "; reset the stream");
}

}  // namespace txl_runtime
