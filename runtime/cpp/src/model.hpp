// A loaded bundle: its manifest, its checked files and the sessions of one update rule. It never changes, so threads
// and streams share it.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine.hpp"
#include "files.hpp"
#include "manifest.hpp"
#include "native.hpp"
#include "words.hpp"

namespace txl_runtime {

struct Model {
    Model(std::unique_ptr<Files> files, const txl_load_options &options);

    std::unique_ptr<Files> files;
    Manifest manifest;
    Rule update{};
    std::vector<std::int64_t> lengths;      // segment lengths, the largest first
    std::vector<const Input *> given;       // the caller's inputs, in the table's order
    std::vector<const State *> states;      // states of the rule, in the table's order
    std::vector<const Program *> programs;  // programs of the rule, the shortest first; of equal ones open rows last
    std::vector<const Program *> softmax;   // head, tail.1, ...; empty if programs return log-probabilities
    std::map<std::string, Array> initial;   // initial value by a state's name: one sequence's, or one memory row
    bool leading = false;                   // true: a step computes only the sequences up to the last that runs
    bool growing = false;                   // true: the shape of a state changes from step to step
    bool text = false;                      // true: it reads only token ids and returns log-probabilities
    bool scoring = false;                   // true: `text`, and it has a state after each token
    std::unique_ptr<Vocabulary> vocabulary;
    std::unique_ptr<const Native> native;  // null: ONNX Runtime runs the programs
    std::string engine_name;

    [[nodiscard]] const Engine &engine() const { return *engine_; }
    [[nodiscard]] const Session &session(const Program &program) const { return *sessions_.at(program.file); }
    [[nodiscard]] std::uint64_t state_bytes() const;
    [[nodiscard]] std::string read(const std::string &name) const;  // compares the hash again

private:
    void check_files() const;
    void choose(const char *asked);
    void open_sessions();
    void read_initial();
    txl_load_options options_;
    std::unique_ptr<Engine> engine_;
    std::map<std::string, std::unique_ptr<Session>> sessions_;
};

// Replay the stored vectors; return the largest difference divided by the allowed one. In selftest.cpp.
double run_selftest(const std::shared_ptr<const Model> &model);

}  // namespace txl_runtime
