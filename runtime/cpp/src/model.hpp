// A loaded bundle: its manifest, its checked files and the sessions of one update rule. It never changes, so that
// threads and streams share it.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine.hpp"
#include "files.hpp"
#include "manifest.hpp"
#include "words.hpp"

namespace txl_runtime {

struct Model {
    Model(std::unique_ptr<Files> files, const txl_load_options &options);

    std::unique_ptr<Files> files;
    Manifest manifest;
    Rule update{};
    std::vector<std::int64_t> lengths;      // the largest first
    std::vector<const Input *> given;       // in the table's order
    std::vector<const State *> states;      // those of the rule, in the table's order
    std::vector<const Program *> programs;  // those of the rule, the shortest first, those with open rows last
    std::vector<const Program *> softmax;   // head, tail.1, ...; empty where programs return log-probabilities
    std::map<std::string, Array> initial;   // by a state's name: of one sequence, or of one memory row
    bool leading = false;                   // whether sequences behind the last one that runs need not be computed
    bool growing = false;                   // whether a state has other shapes from step to step
    bool text = false;                      // whether it reads token ids alone, and returns log-probabilities
    bool scoring = false;                   // whether there is a state after each token of a text
    std::unique_ptr<Vocabulary> vocabulary;
    std::string engine_name;

    [[nodiscard]] const Engine &engine() const { return *engine_; }
    [[nodiscard]] const Session &session(const Program &program) const { return *sessions_.at(program.file); }
    [[nodiscard]] std::uint64_t state_bytes() const;
    [[nodiscard]] std::string read(const std::string &name) const;  // checked again

private:
    void check_files() const;
    void choose(const char *asked);
    void open_sessions();
    void read_initial();
    txl_load_options options_;
    std::unique_ptr<Engine> engine_;
    std::map<std::string, std::unique_ptr<Session>> sessions_;
};

// selftest.cpp: replays the stored vectors; the largest difference, where 1 is what is allowed.
double run_selftest(const std::shared_ptr<const Model> &model);

}  // namespace txl_runtime
