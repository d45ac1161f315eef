// ONNX Runtime, opened at run time through its C API: the library is not linked, so that any version from 1.21 on will
// do.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "array.hpp"
#include "manifest.hpp"
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
    // The first version that runs an opset, where this one is older; else empty.
    [[nodiscard]] std::string wanted_for(std::int64_t opset) const;
    // Frees a status; its text is empty where all is well.
    std::string said(OrtStatus *status) const;
    void check(OrtStatus *status, const std::string &where) const;  // refuses, as TXL_BACKEND, what failed

private:
    const OrtApi *api_ = nullptr;
    OrtEnv *env_ = nullptr;
    bool owned_ = false;
    OrtMemoryInfo *memory_ = nullptr;
    std::string version_;
    std::pair<int, int> numbers_{};
};

// An array as the engine sees it; its memory has to outlive this.
class Value {
public:
    Value() = default;
    Value(const Engine &engine, const View &view);
    Value(const Engine &engine, OrtValue *value) : engine_(&engine), value_(value) {}
    Value(Value &&other) noexcept { *this = std::move(other); }
    Value &operator=(Value &&other) noexcept;
    ~Value();
    [[nodiscard]] OrtValue *get() const { return value_; }
    [[nodiscard]] View view() const;  // of a value that the engine made

private:
    const Engine *engine_ = nullptr;
    OrtValue *value_ = nullptr;
};

struct SessionOptions {
    int threads;  // 0: one per core
    bool arena, lean, spin;
    std::string folder;        // where weights lie; or
    std::string name;          // the file's name and
    std::string_view weights;  // its bytes in memory
};

class Session {
public:
    Session(const Engine &engine, const std::string &graph, const std::string &where, const SessionOptions &options);
    ~Session();
    Session(const Session &) = delete;
    Session &operator=(const Session &) = delete;
    // Refuses a graph that has other inputs and outputs than a program promises.
    void hold_against(const Program &program, const Manifest &manifest, const std::string &where) const;
    // Outputs that are null are made by the engine; refused as TXL_BACKEND is what it cannot run.
    void run(const std::vector<const char *> &input_names, const std::vector<const OrtValue *> &inputs,
             const std::vector<const char *> &output_names, std::vector<OrtValue *> &outputs,
             const std::string &program) const;

private:
    struct Binding {
        std::string name;
        std::string dtype;
        Sizes shape;
        std::vector<std::string> names;  // of sizes that are open
    };
    [[nodiscard]] std::vector<Binding> bindings(bool outputs) const;
    const Engine &engine_;
    OrtSession *session_ = nullptr;
};

}  // namespace txl_runtime
