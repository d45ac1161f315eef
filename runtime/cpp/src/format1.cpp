// Bundles of format 1, whose manifests had a Transformer-XL's config in place of tables. This file alone knows of it.
#include <set>

#include "error.hpp"
#include "manifest.hpp"

namespace txl_runtime {
namespace {

class Old {
public:
    Old(const Json &document, std::string where) : document_(document), where_(std::move(where)) {}

    [[nodiscard]] const Json &field(const Json &of, const char *name, Json::value_t kind) const {
        const auto found = of.find(name);
        need(found != of.end() &&
                 (found->type() == kind || (kind == Json::value_t::number_unsigned && found->is_null())),
             TXL_BUNDLE, where_, ": has no ", name, " as format 1 has it, expected one; export the model again");
        return *found;
    }
    [[nodiscard]] std::int64_t number(const Json &of, const char *name, std::int64_t least) const {
        const auto &found = field(of, name, Json::value_t::number_unsigned);
        const bool sound =
            !found.is_null() && found.get<std::uint64_t>() <= 0x7fffffffU && found.get<std::int64_t>() >= least;
        need(sound, TXL_BUNDLE, where_, ": ", name, " is ", brief(found.dump()), ", expected a whole number from ",
             least, " on; export the model again");
        return found.get<std::int64_t>();
    }

    Json upgraded() {
        const auto &config = field(document_, "config", Json::value_t::object);
        const auto &dialect = field(document_, "dialect", Json::value_t::object);
        const auto &old_states = field(document_, "states", Json::value_t::array);
        const auto &programs = field(document_, "programs", Json::value_t::array);
        const auto vocab = number(config, "vocab_size", 1), rows = number(document_, "memory_length", 0);
        std::set<std::string> updates;
        bool softmax = false;
        Json states = Json::array();
        for (auto row : old_states) {
            need(row.is_object() && row.contains("axis") && row.contains("shape") && !row.contains("row_axis") &&
                     !row.value("initial", Json()).is_number(),
                 TXL_BUNDLE, where_, ": a row of its state table is none of format 1; export the model again");
            row["row_axis"] = row["axis"], row["update"] = row.value("update", Json("rolled"));
            updates.insert(row["update"].dump());
            states.push_back(row);
        }
        for (const auto &program : programs) {
            need(program.is_object(), TXL_BUNDLE, where_, ": a program is no object; export the model again");
            updates.insert(program.value("update", Json()).dump());
            softmax = softmax || program.value("kind", Json()) == "head";
        }
        check_layers(config, old_states, rows);
        const auto ranges = clusters(config, vocab);
        const auto count = [](const char *name) {
            return Json{{"name", name}, {"role", name}, {"dtype", "int32"}, {"shape", {"B"}}};
        };
        Json inputs = {
            {{"name", "tokens"}, {"role", "tokens"}, {"dtype", "int32"}, {"shape", {"B", "L"}}, {"vocab", vocab}},
            count("valid"),
            count("fill")};
        if (updates.count("\"ring\"")) inputs.push_back(count("head"));
        Json output = {{"name", "logprobs"},
                       {"role", "logprobs"},
                       {"dtype", "float32"},
                       {"shape", {"B", "L", vocab}},
                       {"width", number(config, "d_model", 1)}};
        if (softmax) output["clusters"] = ranges;
        const auto start = dialect.value("memory_start", Json("empty"));
        need(start == "empty" || start == "zeros", TXL_BUNDLE, where_, ": memory_start is ", brief(start.dump()),
             ", expected empty or zeros; export the model again");
        Json found = document_;
        found.erase("selftest");
        found["format_version"] = "2.0", found["inputs"] = inputs, found["outputs"] = Json::array({output});
        found["states"] = states, found["streams"] = "independent", found["lengths"] = "valid";
        found["counters"] = {{"fill", {{"start", start == "zeros" ? rows : 0}, {"most", rows}}}};
        return found;
    }

private:
    [[nodiscard]] Json clusters(const Json &config, std::int64_t vocab) const {
        Json found = Json::array();
        std::int64_t edge = 0;
        const auto cutoffs = config.value("cutoffs", Json::array());
        need(cutoffs.is_array(), TXL_BUNDLE, where_, ": cutoffs are no list; export the model again");
        for (const auto &cutoff : cutoffs) {
            const bool ascends = cutoff.is_number_unsigned() &&
                                 cutoff.get<std::uint64_t>() < static_cast<std::uint64_t>(vocab) &&
                                 cutoff.get<std::int64_t>() > edge;
            need(ascends, TXL_BUNDLE, where_, ": cutoffs do not ascend within the vocabulary of ", vocab,
                 "; export the model again");
            found.push_back({edge, cutoff}), edge = cutoff;
        }
        found.push_back({edge, vocab});
        return found;
    }

    void check_layers(const Json &config, const Json &states, std::int64_t rows) const {
        const auto &memory = field(document_, "memory", Json::value_t::string);
        need(memory == "kv" || memory == "hidden", TXL_BUNDLE, where_, ": memory is ", brief(memory.dump()),
             ", expected kv or hidden");
        std::int64_t kept = 0;
        for (const auto &row : states)
            kept += row.value("update", Json("rolled")) == states[0].value("update", Json("rolled"));
        const auto expected = rows ? number(config, "n_layer", 1) * (memory == "kv" ? 2 : 1) : 0;
        need(kept == expected, TXL_BUNDLE, where_, ": the state table has ", kept, " tensors, expected ", expected,
             " of its layers; export the model again");
    }

    const Json &document_;
    std::string where_;
};

}  // namespace

Json upgraded(const Json &old, const std::string &where) { return Old(old, where).upgraded(); }

}  // namespace txl_runtime
