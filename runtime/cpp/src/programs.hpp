// The programs of a stream: arrays for what they read and return, bound to sessions once for each number of sequences.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "states.hpp"

namespace txl_runtime {

struct Route;

class Runner {
public:
    Runner(const Model &model, States &states);

    // A program with its arrays; `inputs` as the model's `given`, `outputs` as the table or, of kind hidden, one.
    struct Bound {
        const Program *program;
        std::vector<Array> inputs, outputs;
        std::map<std::pair<std::int64_t, int>, std::unique_ptr<Route>>
            routes;  // by the number of sequences and their side
    };
    // The smallest program that holds a segment and takes the states as they are; refuses where there is none.
    Bound &find(std::int64_t length);
    // Binds it once and for all, where shapes do not change: then a run takes no memory.
    Route &bind(Bound &bound, std::int64_t rows, int side);
    // Runs it on the first `rows` sequences; states are written behind, and become so by States::advance.
    void run(Bound &bound, std::int64_t rows);
    [[nodiscard]] std::vector<Bound> &all() { return bound_; }
    ~Runner();

private:
    [[nodiscard]] bool takes(const Program &program) const;
    std::unique_ptr<Route> route(Bound &bound, std::int64_t rows, int side);
    void collect(Bound &bound, Route &route);
    const Model &model_;
    States &states_;
    std::vector<Bound> bound_;
};

}  // namespace txl_runtime
