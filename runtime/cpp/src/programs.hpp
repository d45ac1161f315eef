// The programs of a stream, with arrays for their inputs and outputs, bound once for each number of sequences.
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

    // A program with its arrays: `inputs` as the model's `given`; `outputs` as the table, or one for kind "hidden".
    struct Bound {
        const Program *program;
        std::vector<Array> inputs, outputs;
        std::map<std::pair<std::int64_t, int>, std::unique_ptr<Route>>
            routes;  // by the number of sequences and the side that they are on
    };
    // Return the shortest program that holds the segment and takes the present states; throw TXL_USAGE if none does.
    Bound &find(std::int64_t length);
    // Return the arrays of a run, bound at the first call, so that later runs allocate nothing; not for growing states.
    Route &bind(Bound &bound, std::int64_t rows, int side);
    // Run it on the first `rows` sequences. New states go to the other side (of a ring: beyond the rows that count) and
    // become valid by States::advance.
    void run(Bound &bound, std::int64_t rows);
    [[nodiscard]] std::vector<Bound> &all() { return bound_; }
    ~Runner();

private:
    [[nodiscard]] bool takes(const Program &program) const;
    std::unique_ptr<Route> route(Bound &bound, std::int64_t rows, int side);
    void collect(Bound &bound, Route &route);
    std::vector<void *> keys_, values_;  // the compiled step's memory of each layer
    const Model &model_;
    States &states_;
    std::vector<Bound> bound_;
};

}  // namespace txl_runtime
