// ONNX Runtime, opened at run time through its C API. It is not linked, so any version from 1.21 on works.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "array.hpp"
#include "manifest.hpp"
#ifdef __MINGW32__
#define _Return_type_success_(holds)  // an annotation of Microsoft's compiler that the header takes for granted
#endif
#include "onnxruntime_c_api.h"

namespace txl_runtime {

class Engine {
public:
    explicit Engine(const txl_load_options &options);
    ~Engine();
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;

    [[nodiscard]] const OrtApi &api() const { return *api_; }
    [[nodiscard]] OrtEnv *env() const { return env_; }
    [[nodiscard]] const OrtMemoryInfo *memory() const { return memory_; }
    [[nodiscard]] const std::string &version() const { return version_; }
    [[nodiscard]] bool runs_opset(std::int64_t opset) const { return wanted_for(opset).empty(); }
    // Return the first version that runs an opset, e.g. "1.25" for 24; "" if this one does.
    [[nodiscard]] std::string wanted_for(std::int64_t opset) const;
    // Free a status and return its text, "" if the call succeeded.
    std::string said(OrtStatus *status) const;
    void check(OrtStatus *status, const std::string &where) const;  // throws TXL_BACKEND if the call failed

private:
    const OrtApi *api_ = nullptr;
    OrtEnv *env_ = nullptr;
    bool owned_ = false;
    OrtMemoryInfo *memory_ = nullptr;
    std::string version_;
    std::pair<int, int> numbers_{};
};

// An OrtValue. One made of a view does not own the view's memory, which has to outlive it.
class Value {
public:
    Value() = default;
    Value(const Engine &engine, const View &view);
    Value(const Engine &engine, OrtValue *value) : engine_(&engine), value_(value) {}
    Value(Value &&other) noexcept { *this = std::move(other); }
    Value &operator=(Value &&other) noexcept;
    ~Value();
    [[nodiscard]] OrtValue *get() const { return value_; }
    [[nodiscard]] View view() const;  // the array of a value that the engine made

private:
    const Engine *engine_ = nullptr;
    OrtValue *value_ = nullptr;
};

struct SessionOptions {
    int threads;  // 0: one per physical core
    bool arena, lean, spin;
    std::string folder;        // folder of the weight file; "": it is in memory
    std::string name;          // name of the weight file
    std::string_view weights;  // its bytes, if it is in memory
};

class Session {
public:
    Session(const Engine &engine, const std::string &graph, const std::string &where, const SessionOptions &options);
    ~Session();
    Session(const Session &) = delete;
    Session &operator=(const Session &) = delete;
    // Throw TXL_BUNDLE unless the graph has exactly the inputs and outputs that the program's table lists.
    void hold_against(const Program &program, const Manifest &manifest, const std::string &where) const;
    // Run the graph. The engine makes the outputs that are null. Throws TXL_BACKEND if the engine fails.
    void run(const std::vector<const char *> &input_names, const std::vector<const OrtValue *> &inputs,
             const std::vector<const char *> &output_names, std::vector<OrtValue *> &outputs,
             const std::string &program) const;

private:
    struct Binding {
        std::string name;
        std::string dtype;
        Sizes shape;
        std::vector<std::string> names;  // per axis: the name of an open size, else ""
    };
    [[nodiscard]] std::vector<Binding> bindings(bool outputs) const;
    const Engine &engine_;
    OrtSession *session_ = nullptr;
};

}  // namespace txl_runtime
