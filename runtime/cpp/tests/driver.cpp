// Lets the runner of the conformance list drive this library, by the protocol of conformance/README.md: a JSON object a
// line in, and one out; beyond it, it commits parts of a segment, drafts, and runs a compiled step. It calls the
// library through txl.h and txl.hpp alone.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "txl.hpp"

#ifdef _WIN32
#define setenv(name, value, over) _putenv_s(name, value)
#endif

namespace {

using Json = nlohmann::json;

// All that the README names but `strangers`: graphs go to the engine unchecked.
const char *const SUPPORTS[] = {"padding",     "idle",   "cut",      "last",     "fill",   "spill",    "initial",
                                "reset",       "select", "snapshot", "rows",     "limit",  "commit",   "lookahead",
                                "lockstep",    "grows",  "open",     "score",    "greedy", "draws",    "apart",
                                "temperature", "top_k",  "top_p",    "clusters", "text",   "selftest", "refusals",
                                "axes",        "int8",   "half",     "old"};

struct Refused : std::runtime_error {
    Refused(std::string whose, const std::string &said) : std::runtime_error(said), kind(std::move(whose)) {}
    std::string kind;
};

void need(bool holds, const std::string &said) {
    if (!holds) throw Refused("usage", said);
}

const char *name_of(txl_dtype dtype) {
    static const char *const NAMES[] = {"", "bool", "int32", "float32", "float16", "bfloat16"};
    return NAMES[dtype];
}

std::size_t width_of(const std::string &dtype) {
    return dtype == "bool" ? 1 : dtype == "float16" || dtype == "bfloat16" ? 2 : 4;
}

constexpr std::string_view DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

std::string to_base64(const std::string &bytes) {
    std::string text;
    for (std::size_t i = 0; i < bytes.size(); i += 3) {
        std::uint32_t group = 0;
        for (std::size_t k = 0; k < 3; ++k)
            group = group << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0U);
        for (std::size_t k = 0; k < 4; ++k) text += i + k > bytes.size() ? '=' : DIGITS[group >> (18 - 6 * k) & 63U];
    }
    return text;
}

std::string from_base64(const std::string &text) {
    need(text.size() % 4 == 0, "bytes are no base64");
    std::string bytes;
    for (std::size_t i = 0; i < text.size(); i += 4) {
        std::uint32_t group = 0;
        std::size_t there = 3;
        for (std::size_t k = 0; k < 4; ++k) {
            const auto digit = DIGITS.find(text[i + k]);
            const bool padding = text[i + k] == '=' && i + 4 == text.size() && k >= 2;
            need(digit != std::string_view::npos || padding, "bytes are no base64");
            if (padding) there = std::min(there, k - 1);
            group = group << 6 | (padding ? 0U : static_cast<std::uint32_t>(digit));
        }
        for (std::size_t k = 0; k < there; ++k) bytes += static_cast<char>(group >> (16 - 8 * k));
    }
    return bytes;
}

struct Array {
    std::string dtype;
    std::vector<std::int64_t> shape;
    std::string data;
};

Array array_of(const Json &document) {
    Array found{document.at("dtype"), document.at("shape").get<std::vector<std::int64_t>>(),
                from_base64(document.at("data"))};
    std::size_t bytes = width_of(found.dtype);
    for (auto size : found.shape) bytes *= static_cast<std::size_t>(size);
    need(bytes == found.data.size(), "an array has other bytes than its shape says");
    return found;
}

Json json_of(const Array &array) {
    return {{"dtype", array.dtype}, {"shape", array.shape}, {"data", to_base64(array.data)}};
}

// int32 [...] of an array; what would lose something is refused.
std::vector<std::int32_t> ids_of(const Array &array) {
    need(array.dtype == "int32", "tokens are " + array.dtype + ", expected int32; convert them");
    std::vector<std::int32_t> found(array.data.size() / 4);
    if (!found.empty()) std::memcpy(found.data(), array.data.data(), array.data.size());
    return found;
}

std::vector<std::int32_t> numbers_of(const Json &list) {
    std::vector<std::int32_t> found;
    for (const auto &one : list) {
        need(one.is_number_integer() && one >= -2147483648LL && one <= 2147483647LL,
             "a list holds " + one.dump() + ", expected whole numbers");
        found.push_back(one);
    }
    return found;
}

class Driver {
public:
    Json answer(const std::string &line) {
        Json request = Json::parse(line, nullptr, false), reply;
        reply["id"] = request.is_object() ? request.value("id", Json()) : Json();
        try {
            need(request.is_object() && request.contains("do"), "a request is to do nothing that the protocol has");
            reply["ok"] = work(request, line);
        } catch (const Refused &refused) {
            reply["refused"] = refused.what(), reply["kind"] = refused.kind;
        } catch (const txl::Error &error) {
            static const std::map<txl_code, const char *> KINDS = {{TXL_BUNDLE, "bundle"},
                                                                   {TXL_BACKEND, "backend"},
                                                                   {TXL_MEMORY, "backend"},
                                                                   {TXL_UNSUPPORTED, "unsupported"}};
            const auto kind = KINDS.find(error.code);
            reply["refused"] = error.what(), reply["kind"] = kind == KINDS.end() ? "usage" : kind->second;
        } catch (const std::exception &error) {
            reply["refused"] = error.what(), reply["kind"] = "usage";
        }
        return reply;
    }

private:
    Json work(const Json &r, const std::string &line) {
        const std::string does = r["do"];
        if (does == "hello") return hello();
        if (does == "load") return load(r);
        need(model_ != nullptr, "no model is loaded, expected load before anything else");
        if (does == "open") return open(r);
        if (does == "encode") return encode(r);
        if (does == "decode") return {{"bytes", to_base64(model_->decode(ids_of(array_of(r.at("tokens")))))}};
        if (does == "selftest") return {{"passed", selftest()}};
        need(stream_ != nullptr, "no stream is open, expected open before anything that has a state");
        if (does == "run" || does == "feed") return run(r, does == "feed");
        if (does == "commit") return stream_->commit(numbers_of(r.at("counts"))), Json::object();
        if (does == "score") return score(r);
        if (does == "generate") return generate(r, line);
        if (does == "state") return state();
        if (does == "save") return {{"bytes", to_base64(stream_->save())}};
        if (does == "take") return {{"bytes", to_base64(stream_->save(row_of(r)))}};
        if (does == "restore") return stream_->restore(from_base64(r.at("bytes"))), Json::object();
        if (does == "put") return stream_->restore(from_base64(r.at("bytes")), row_of(r)), Json::object();
        if (does == "select") return stream_->select(numbers_of(r.at("rows"))), Json::object();
        if (does == "reset") return reset(r);
        throw Refused("unsupported", "a request is to do " + does + ", which this driver does not know");
    }

    static txl_load_options options(const Json &update, std::string &name) {
        auto found = TXL_NEW(txl_load_options);
        found.threads = 1;
        if (!update.is_null()) name = update.get<std::string>(), found.update = name.c_str();
        return found;
    }

    static Json hello() {
        const auto engine =
            txl::detail::sized<std::string>([](char *to, std::size_t room, std::size_t *needed, txl_error *error) {
                return txl_engine(nullptr, to, room, needed, error);
            });
        // An engine before 1.25 has no rings, and without them nothing spills.
        int minor = 0;
        std::sscanf(engine.c_str(), "ONNX Runtime 1.%d", &minor);
        Json keeps = Json::array();
        for (const std::string promise : SUPPORTS)
            if (promise != "spill" || minor >= 25) keeps.push_back(promise);
        return {{"name", "txl.h"}, {"version", txl_version()}, {"engine", engine.c_str()}, {"supports", keeps}};
    }

    Json load(const Json &r) {
        std::string name;
        auto how = options(r.value("update", Json()), name);
        const auto library = r.value("native_library", std::string());  // beyond the protocol
        if (!library.empty()) how.native_library = library.c_str();
        stream_.reset(), model_.reset();
        model_ = std::make_unique<txl::Model>(r.at("path").get<std::string>(), how);
        inputs_ = model_->table(TXL_INPUTS), outputs_ = model_->table(TXL_OUTPUTS), states_ = model_->table(TXL_STATES);
        return {{"update", model_->info().update}, {"engine", model_->info().engine}};
    }

    Json open(const Json &r) {
        const auto limit = r.value("memory_length", Json());
        const auto whole = [](const Json &number) {
            return number.is_number_integer() && number >= 0 && number <= 2147483647LL;
        };
        need(whole(r.at("b")) && (limit.is_null() || whole(limit)),
             "b or memory_length is no number that a stream can have");
        auto made = std::make_unique<txl::Stream>(*model_, r.at("b"), limit.is_null() ? -1 : limit.get<std::int32_t>());
        made->prepare();  // so that the list tries it, too
        stream_ = std::move(made);
        return Json::object();
    }

    // Sizes of an input or output, with b and T.
    static std::vector<std::int64_t> sizes(const txl_tensor &tensor, std::int64_t b, std::int64_t T,
                                           bool last = false) {
        std::vector<std::int64_t> found;
        for (int axis = 0; axis < tensor.rank; ++axis) {
            const auto size = tensor.shape[axis];
            if (size == TXL_SIZE_L && last) continue;
            found.push_back(size == TXL_SIZE_B ? b : size == TXL_SIZE_L ? T + tensor.lookahead : size);
        }
        return found;
    }

    // An array in the type of the table, where nothing is lost.
    static std::string as_type(const Array &array, txl_dtype dtype, const std::string &name) {
        if (array.dtype == name_of(dtype)) return array.data;
        need(array.dtype == "int32" && dtype == TXL_FLOAT32,
             name + " is " + array.dtype + ", expected " + name_of(dtype) + "; convert it");
        std::string found(array.data.size(), '\0');
        for (std::size_t at = 0; at < found.size(); at += 4) {
            std::int32_t whole;
            std::memcpy(&whole, array.data.data() + at, 4);
            const auto value = static_cast<float>(whole);
            std::memcpy(found.data() + at, &value, 4);
        }
        return found;
    }

    std::vector<std::int32_t> counts_of(const Json &r) const {
        const auto found = r.value("counts", Json());
        if (found.is_null()) return {};
        auto counts = numbers_of(found);
        need(static_cast<std::int32_t>(counts.size()) == stream_->batch(),
             "counts are of another number than the stream's sequences");
        return counts;
    }

    Json run(const Json &r, bool feeds) {
        const auto b = stream_->batch();
        const auto &given = r.at("inputs");
        need(given.is_object() && given.size() == inputs_.size(),
             "inputs are missing or unknown, expected those of the table");
        std::vector<Array> arrays;
        std::optional<std::int64_t> positions;
        for (const auto &entry : inputs_) {
            need(given.contains(entry.name), std::string("inputs lack ") + entry.name + ", expected it; add it");
            arrays.push_back(array_of(given[entry.name]));
            for (int axis = 0; axis < entry.rank && axis < static_cast<int>(arrays.back().shape.size()); ++axis)
                if (entry.shape[axis] == TXL_SIZE_L && !positions)
                    positions = arrays.back().shape[static_cast<std::size_t>(axis)] - entry.lookahead;
        }
        const auto T = positions.value_or(1);
        std::vector<std::string> held;
        std::vector<const void *> inputs;
        for (std::size_t i = 0; i < arrays.size(); ++i) {
            need(arrays[i].shape == sizes(inputs_[i], b, T),
                 std::string(inputs_[i].name) + " is of another shape than the table says");
            held.push_back(as_type(arrays[i], inputs_[i].dtype, inputs_[i].name));
        }
        for (const auto &one : held) inputs.push_back(one.data());
        const bool last = feeds && r.value("last", false);
        std::vector<Array> results;
        std::vector<void *> outputs;
        for (const auto &output : outputs_) {
            Array array{name_of(output.dtype), sizes(output, b, std::max<std::int64_t>(T, 0), last), ""};
            std::size_t bytes = width_of(array.dtype);
            for (auto size : array.shape) bytes *= static_cast<std::size_t>(size);
            array.data.assign(bytes, '\x55');
            results.push_back(std::move(array));
        }
        for (auto &one : results) outputs.push_back(one.data.data());
        const auto counts = counts_of(r);
        const auto *some = counts.empty() ? nullptr : counts.data();
        need(T < 2147483647, "there are too many positions");
        if (feeds)
            stream_->feed(static_cast<std::int32_t>(T), inputs.data(), outputs.data(), some, last);
        else
            stream_->run(static_cast<std::int32_t>(T), inputs.data(), outputs.data(), some, r.value("commit", true));
        Json found = Json::object();
        for (std::size_t i = 0; i < results.size(); ++i) found[outputs_[i].name] = json_of(results[i]);
        return {{"outputs", found}};
    }

    // Token ids [b, T].
    Array tokens_of(const Json &r) const {
        auto found = array_of(r.at("tokens"));
        need(found.shape.size() == 2 && found.shape[0] == stream_->batch() && found.shape[1] >= 1,
             "tokens are no [b, T], expected the stream's b and a T of at least 1");
        return found;
    }

    Json score(const Json &r) {
        const auto array = tokens_of(r);
        const auto tokens = ids_of(array);
        const auto counts = counts_of(r);
        std::vector<float> nll(tokens.size() - static_cast<std::size_t>(stream_->batch()));
        txl::detail::checked([&](txl_error *error) {
            return txl_stream_score(stream_->get(), tokens.data(), static_cast<std::int32_t>(array.shape[1]),
                                    counts.empty() ? nullptr : counts.data(), nll.data(), error);
        });
        return {{"nll", packed("float32", {array.shape[0], array.shape[1] - 1}, nll)}};
    }

    Json generate(const Json &r, const std::string &line) {
        const auto array = tokens_of(r);
        const auto tokens = ids_of(array);
        const auto counts = counts_of(r);
        const std::int64_t count = r.at("count");
        need(count >= 1 && count < 1000000, "count is not at least 1");
        auto sampling = TXL_NEW(txl_sampling);
        const auto top_k = r.value("top_k", Json()), top_p = r.value("top_p", Json());
        need(r.at("temperature").is_number() && (top_p.is_null() || top_p.is_number()),
             "temperature or top_p is no number");
        need(top_k.is_null() || (top_k.is_number_integer() && top_k >= 1 && top_k <= 2147483647LL),
             "top_k is not at least 1");
        need(top_p.is_null() || top_p.get<double>() > 0, "top_p is not above 0");
        sampling.temperature = r["temperature"];
        sampling.top_k = top_k.is_null() ? 0 : top_k.get<std::int32_t>();
        sampling.top_p = top_p.is_null() ? 0 : top_p.get<double>();
        sampling.lookup = r.value("lookup", 0);
        const auto seed = seed_of(line);
        sampling.seed_words = seed.data(), sampling.seed_count = seed.size();
        const auto all = static_cast<std::size_t>(count * stream_->batch());
        std::vector<std::int32_t> drawn(all);
        std::vector<float> logprobs(all);
        txl::detail::checked([&](txl_error *error) {
            return txl_stream_generate(stream_->get(), &sampling, tokens.data(),
                                       static_cast<std::int32_t>(array.shape[1]),
                                       counts.empty() ? nullptr : counts.data(), static_cast<std::int32_t>(count),
                                       drawn.data(), logprobs.data(), error);
        });
        return {{"tokens", packed("int32", {count, stream_->batch()}, drawn)},
                {"logprobs", packed("float32", {count, stream_->batch()}, logprobs)}};
    }

    // A seed may be above 2^64, which the reader of JSON would round: its digits are taken from the line.
    static std::vector<std::uint32_t> seed_of(const std::string &line) {
        auto at = line.find("\"seed\"");
        need(at != std::string::npos, "the request lacks seed");
        at = line.find_first_not_of(" :", at + 6);
        std::vector<std::uint32_t> words = {0};
        need(at != std::string::npos && line[at] >= '0' && line[at] <= '9', "seed is no whole number of at least 0");
        for (; at < line.size() && line[at] >= '0' && line[at] <= '9'; ++at) {
            std::uint64_t carry = static_cast<std::uint64_t>(line[at] - '0');
            for (auto &word : words) {
                carry += std::uint64_t{word} * 10;
                word = static_cast<std::uint32_t>(carry), carry >>= 32;
            }
            if (carry) words.push_back(static_cast<std::uint32_t>(carry));
        }
        return words;
    }

    template <typename T>
    static Json packed(const char *dtype, std::vector<std::int64_t> shape, const std::vector<T> &values) {
        return json_of({dtype, std::move(shape),
                        std::string(reinterpret_cast<const char *>(values.data()), values.size() * sizeof(T))});
    }

    Json state() {
        Json found = Json::object(), fill = Json::array();
        for (std::size_t i = 0; i < states_.size(); ++i) {
            auto tensor = TXL_NEW(txl_tensor);
            const auto data =
                txl::detail::sized<std::string>([&](char *to, std::size_t room, std::size_t *needed, txl_error *error) {
                    return txl_stream_state(stream_->get(), i, &tensor, to, room, needed, error);
                });
            if (tensor.rank >= 0)
                found[tensor.name] = json_of({name_of(tensor.dtype), {tensor.shape, tensor.shape + tensor.rank}, data});
        }
        for (std::int32_t row = 0; row < stream_->batch(); ++row) fill.push_back(stream_->fill(row));
        return {{"states", found}, {"fill", fill}};
    }

    static std::int32_t row_of(const Json &r) {
        const auto &row = r.at("row");
        need(row.is_number_integer() && row >= 0 && row <= 2147483647LL,
             "row is " + row.dump() + ", expected one of the stream's");
        return row;
    }

    Json reset(const Json &r) {
        const auto rows = r.value("rows", Json());
        if (rows.is_null()) return stream_->reset(), Json::object();
        std::vector<std::uint8_t> which(static_cast<std::size_t>(stream_->batch()));
        for (auto row : numbers_of(rows)) {
            need(row >= 0 && row < stream_->batch(), "rows name a sequence that there is not");
            which[static_cast<std::size_t>(row)] = 1;
        }
        return stream_->reset(which.data()), Json::object();
    }

    Json encode(const Json &r) {
        const auto tokens = model_->encode(from_base64(r.at("bytes")));
        return {{"tokens", packed("int32", {static_cast<std::int64_t>(tokens.size())}, tokens)}};
    }

    bool selftest() {
        try {
            model_->selftest();
            return true;
        } catch (const txl::Error &error) {
            if (error.code != TXL_CHECK) throw;
            return false;
        }
    }

    std::unique_ptr<txl::Model> model_;
    std::unique_ptr<txl::Stream> stream_;
    std::vector<txl_tensor> inputs_, outputs_, states_;
};

}  // namespace

int main() {
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);  // which newer builds of the engine look at when they are opened
    Driver driver;
    for (std::string line; std::getline(std::cin, line);)
        std::cout << driver.answer(line).dump(-1, ' ', true, Json::error_handler_t::replace) << std::endl;
    return 0;
}
