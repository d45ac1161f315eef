// Checks graphs, one after the other, and says of each what the check found. tests/cpp/test_two_checks.py holds it
// against Python's check.
//
// A request is a line of JSON and the graph behind it, "bytes" long; "inputs" has the largest sizes of each input. A
// reply is a line of JSON: the bytes that a step takes, or the sentence with which the graph is refused.
#include <iostream>
#include <nlohmann/json.hpp>

#include "error.hpp"
#include "graph_check.hpp"

namespace {

using txl_runtime::Json;

Json checked(const Json &request, const std::string &graph, txl_runtime::Budget &budget) {
    static const double least = budget.most;
    txl_runtime::Manifest manifest;
    txl_runtime::Program program;
    manifest.B = program.length = 1;
    manifest.weights = request["weights"];
    program.kind = request["kind"], program.file = "graph.onnx";
    for (const auto &[name, sizes] : request["inputs"].items())
        program.inputs.push_back({name, TXL_FLOAT32, sizes.get<std::vector<std::int64_t>>()});
    manifest.programs = {program};
    const double weights = request["weight_bytes"];
    budget.weights = weights, budget.most = least + 64 * weights, budget.taken = 0, budget.held.clear();
    try {
        check_graph(graph, program.file, program, manifest, budget);
        return {{"taken", budget.taken}};
    } catch (const txl_runtime::Refused &refused) {
        return {{"refused", refused.what()}};
    }
}

}  // namespace

int main() {
    txl_runtime::Budget budget(0, 0);  // reading its table takes longer than checking most graphs
    for (std::string line; std::getline(std::cin, line);) {
        const auto request = Json::parse(line);
        std::string graph(request["bytes"].get<std::size_t>(), '\0');
        std::cin.read(graph.data(), static_cast<std::streamsize>(graph.size()));
        std::cout << checked(request, graph, budget).dump(-1, ' ', true, Json::error_handler_t::replace) << std::endl;
    }
}
