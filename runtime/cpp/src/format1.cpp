// Bundles of format 1, whose manifests had a Transformer-XL's config in place of tables. This file alone knows of it.
#include <set>

#include "error.hpp"
#include "manifest.hpp"

namespace txl_runtime {
namespace {

// Of what the tables of format 2 are made; all else is held against the schema of format 2.
constexpr const char *SCHEMA = R"({
    "$defs": {"Count": {"type": "integer", "minimum": 1, "maximum": 2147483647}},
    "required": ["config", "dialect", "memory", "memory_length", "states", "programs"],
    "properties": {
        "config": {
            "type": "object",
            "required": ["vocab_size", "d_model", "n_layer"],
            "properties": {
                "vocab_size": {"$ref": "#/$defs/Count"}, "d_model": {"$ref": "#/$defs/Count"},
                "n_layer": {"$ref": "#/$defs/Count"},
                "cutoffs": {"type": "array", "default": [], "items": {"$ref": "#/$defs/Count"}}}},
        "dialect": {"type": "object", "properties": {"memory_start": {"enum": ["empty", "zeros"], "default": "empty"}}},
        "memory": {"enum": ["kv", "hidden"]},
        "memory_length": {"type": "integer", "minimum": 0, "maximum": 2147483647},
        "states": {"type": "array", "items": {
            "type": "object",
            "required": ["axis", "shape"],
            "properties": {
                "row_axis": {"enum": []}, "update": {"type": "string", "default": "rolled"},
                "initial": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}},
        "programs": {"type": "array", "items": {"type": "object", "required": ["kind", "update"]}}}})";

Json input(const char *name, const Json &shape) {
    return {{"name", name}, {"role", name}, {"dtype", "int32"}, {"shape", shape}};
}

}  // namespace

Json upgraded(const Json &old, const std::string &where) {
    auto found = old;
    hold_against(found, parse_json(SCHEMA, "format 1"), where);
    const auto &config = found["config"];
    const auto &vocab = config["vocab_size"], &rows = found["memory_length"];
    std::set<Json> updates;
    bool softmax = false;
    for (const auto &program : found["programs"]) {
        updates.insert(program["update"]);
        softmax = softmax || program["kind"] == "head";
    }
    std::int64_t kept = 0;
    for (auto &state : found["states"]) {
        state["row_axis"] = state["axis"];
        updates.insert(state["update"]);
        kept += state["update"] == found["states"][0]["update"];
    }
    const auto layers = config["n_layer"].get<std::int64_t>() * (found["memory"] == "kv" ? 2 : 1);
    const auto expected = rows == 0 ? 0 : layers;
    need(kept == expected, TXL_BUNDLE, where, ": the state table has ", kept, " tensors, expected ", expected,
         " of its layers; export the model again");
    auto edges = config["cutoffs"], clusters = Json::array();
    edges.push_back(vocab);
    Json edge = 0;
    for (const auto &next : edges) {
        need(edge < next, TXL_BUNDLE, where, ": cutoffs do not ascend within the vocabulary of ", vocab,
             "; export the model again");
        clusters.push_back({edge, next}), edge = next;
    }
    found["inputs"] = {input("tokens", {"B", "L"}), input("valid", {"B"}), input("fill", {"B"})};
    found["inputs"][0]["vocab"] = vocab;
    if (updates.count("ring")) found["inputs"].push_back(input("head", {"B"}));
    Json output = input("logprobs", {"B", "L", vocab});
    output["dtype"] = "float32", output["width"] = config["d_model"];
    if (softmax) output["clusters"] = clusters;
    found["outputs"] = Json::array({output});
    const bool zeros = found["dialect"]["memory_start"] == "zeros";
    found["counters"] = {{"fill", {{"start", zeros ? rows : Json(0)}, {"most", rows}}}};
    found["format_version"] = "2.0", found["streams"] = "independent", found["lengths"] = "valid";
    found.erase("selftest");
    return found;
}

}  // namespace txl_runtime
