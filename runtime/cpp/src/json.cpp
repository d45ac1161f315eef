#include "json.hpp"

#include <regex.h>

#include <algorithm>
#include <set>

#include "error.hpp"

namespace txl_runtime {
namespace {

constexpr int DEPTH = 64;

class Holder {
public:
    explicit Holder(const Json &schema) : root_(schema) {}

    // What is wrong, or an empty text.
    std::string hold(Json &value, const Json &schema, const std::string &path) const {
        static const std::set<std::string> KNOWN = {"$schema",
                                                    "$ref",
                                                    "$defs",
                                                    "title",
                                                    "description",
                                                    "type",
                                                    "properties",
                                                    "required",
                                                    "const",
                                                    "pattern",
                                                    "enum",
                                                    "minimum",
                                                    "maximum",
                                                    "items",
                                                    "prefixItems",
                                                    "minItems",
                                                    "maxItems",
                                                    "anyOf",
                                                    "additionalProperties",
                                                    "propertyNames",
                                                    "default"};
        for (const auto &[word, _] : schema.items())
            if (!KNOWN.count(word)) throw std::logic_error("the schema has the word " + word);
        if (schema.contains("$ref")) {
            const auto name = schema["$ref"].get<std::string>();
            return hold(value, root_["$defs"][name.substr(name.rfind('/') + 1)], path);
        }
        if (schema.contains("anyOf")) return any(value, schema["anyOf"], path);
        if (schema.contains("const") && value != schema["const"]) return told(value, path, schema["const"].dump());
        if (schema.contains("enum") &&
            std::find(schema["enum"].begin(), schema["enum"].end(), value) == schema["enum"].end())
            return told(value, path, "one of " + schema["enum"].dump());
        if (schema.contains("type")) {
            const auto type = schema["type"].get<std::string>();
            if (!is(value, type)) return told(value, path, type);
        }
        if (value.is_number_integer()) return range(value, schema, path);
        if (value.is_string() && schema.contains("pattern")) {
            const auto text = value.get<std::string>();
            const auto pattern = schema["pattern"].get<std::string>();
            if (!matches(text, pattern)) return told(value, path, pattern);
        }
        if (value.is_array()) return array(value, schema, path);
        return value.is_object() ? object(value, schema, path) : "";
    }

private:
    static bool is(const Json &value, const std::string &type) {
        if (type == "object") return value.is_object();
        if (type == "array") return value.is_array();
        if (type == "string") return value.is_string();
        if (type == "boolean") return value.is_boolean();
        if (type == "null") return value.is_null();
        if (type == "integer") return value.is_number_integer();
        if (type == "number") return value.is_number();
        throw std::logic_error("the schema has the type " + type);
    }

    // The schema's patterns are POSIX's extended ones as well; to these a text ends at a zero.
    static bool matches(const std::string &text, const std::string &pattern) {
        regex_t made;
        if (regcomp(&made, pattern.c_str(), REG_EXTENDED | REG_NOSUB))
            throw std::logic_error("the schema has the pattern " + pattern);
        const bool found = text.find('\0') == std::string::npos && !regexec(&made, text.c_str(), 0, nullptr, 0);
        regfree(&made);
        return found;
    }

    static std::string told(const Json &value, const std::string &path, const std::string &expected) {
        const auto text = value.is_structured() ? std::string(value.type_name()) : value.dump();
        return path + " is " + brief(text) + ", expected " + expected;
    }

    static std::string range(const Json &value, const Json &schema, const std::string &path) {
        // A whole number beyond 64 bits with a sign is larger than every maximum.
        const bool huge = value.is_number_unsigned() && value.get<std::uint64_t>() > 0x7fffffffffffffffULL;
        const auto number = huge ? 0 : value.get<std::int64_t>();
        if (schema.contains("minimum") && !huge && number < schema["minimum"].get<std::int64_t>())
            return told(value, path, "at least " + schema["minimum"].dump());
        if (schema.contains("maximum") && (huge || number > schema["maximum"].get<std::int64_t>()))
            return told(value, path, "at most " + schema["maximum"].dump());
        return "";
    }

    std::string any(Json &value, const Json &choices, const std::string &path) const {
        std::string said;
        for (const auto &choice : choices) {
            const auto problem = hold(value, choice, path);
            if (problem.empty()) return "";
            said = said.empty() || !value.is_object() ? (said.empty() ? problem : said) : said;
        }
        return said;
    }

    std::string array(Json &value, const Json &schema, const std::string &path) const {
        if (schema.contains("minItems") && value.size() < schema["minItems"].get<std::size_t>())
            return path + " has " + std::to_string(value.size()) + " entries, expected at least " +
                   schema["minItems"].dump();
        if (schema.contains("maxItems") && value.size() > schema["maxItems"].get<std::size_t>())
            return path + " has " + std::to_string(value.size()) + " entries, expected at most " +
                   schema["maxItems"].dump();
        const auto first = schema.contains("prefixItems") ? schema["prefixItems"].size() : 0;
        for (std::size_t i = 0; i < value.size(); ++i) {
            if (i >= first && !schema.contains("items")) break;
            const auto &rule = i < first ? schema["prefixItems"][i] : schema["items"];
            if (rule.is_boolean()) {
                if (!rule.get<bool>()) return path + " has too many entries";
                continue;
            }
            if (auto problem = hold(value[i], rule, path + "[" + std::to_string(i) + "]"); !problem.empty())
                return problem;
        }
        return "";
    }

    std::string object(Json &value, const Json &schema, const std::string &path) const {
        if (schema.contains("required"))
            for (const auto &name : schema["required"])
                if (!value.contains(name)) return path + " lacks " + name.get<std::string>();
        const auto properties = schema.contains("properties") ? schema["properties"] : Json::object();
        for (const auto &[name, rule] : properties.items())
            if (!value.contains(name) && rule.contains("default")) value[name] = rule["default"];
        for (auto &[name, inner] : value.items()) {
            const auto inside = path + "." + brief(name);
            if (schema.contains("propertyNames")) {
                Json word = name;
                if (auto problem = hold(word, schema["propertyNames"], inside); !problem.empty()) return problem;
            }
            const bool listed = properties.contains(name);
            if (!listed && !schema.contains("additionalProperties")) continue;
            if (auto problem = hold(inner, listed ? properties[name] : schema["additionalProperties"], inside);
                !problem.empty())
                return problem;
        }
        return "";
    }

    const Json &root_;
};

}  // namespace

Json parse_json(std::string_view text, const std::string &where) {
    try {
        const auto bounded = [&](int depth, Json::parse_event_t, Json &) {
            need(depth <= DEPTH, TXL_BUNDLE, where, ": is nested more than ", DEPTH, " deep; export the model again");
            return true;
        };
        return Json::parse(text.begin(), text.end(), bounded);
    } catch (const Json::exception &error) {
        refuse(TXL_BUNDLE, where, ": is no JSON (", brief(error.what()), "); export the model again");
    }
}

void hold_against(Json &document, const Json &schema, const std::string &definition, const std::string &where) {
    const auto problem = Holder(schema).hold(document, schema["$defs"][definition], "it");
    need(problem.empty(), TXL_BUNDLE, where, ": ", problem, "; export the model again");
}

}  // namespace txl_runtime
