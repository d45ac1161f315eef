#include "json.hpp"

#include <algorithm>
#include <regex>

#include "error.hpp"
#include "ranges.hpp"

namespace txl_runtime {
namespace {

constexpr int DEPTH = 64;  // most nested brackets: hold() recurses, and a deeper document could use up the stack

struct Unfit {
    std::string said;
};

bool is(const Json &value, const Json &type) {
    if (type == "integer") return value.is_number_integer();
    const auto known = {"object", "array", "string", "boolean", "null", "number"};
    if (ranges::find(known, type) == known.end()) throw std::logic_error("the schema has the type " + type.dump());
    return value.type_name() == type;
}

// Match a pattern of the schema. std::regex calls itself for each character, so a long text could use up the stack; the
// longest that may match, a hash, has 64.
bool matches(const std::string &text, const std::string &pattern) {
    return text.size() <= 256 && std::regex_match(text, std::regex(pattern));
}

// Check a value against a schema; keywords for other types of values are ignored, as JSON Schema says.
void hold(Json &value, const Json &schema, const Json &root, const std::string &path) {
    const auto must = [&](bool holds, const char *before, const Json &expected) {
        if (holds) return;
        throw Unfit{path + " is " + brief(value.is_structured() ? value.type_name() : value.dump()) + ", expected " +
                    before + (expected.is_string() ? expected.get<std::string>() : expected.dump())};
    };
    const auto entries = [&](bool holds, const char *before, const Json &expected) {
        if (value.is_array() && !holds)
            throw Unfit{join(path, " has ", value.size(), " entries, expected ", before, expected)};
    };
    const auto none = Json::object();
    const auto &properties = schema.contains("properties") ? schema["properties"] : none;
    for (const auto &[word, rule] : schema.items()) {
        if (word == "$ref") {
            hold(value, root.at(Json::json_pointer(rule.get<std::string>().substr(1))), root, path);
        } else if (word == "anyOf") {
            std::string first;
            const bool fits = ranges::any_of(rule, [&](const Json &choice) {
                try {
                    return hold(value, choice, root, path), true;
                } catch (const Unfit &unfit) {
                    return first = first.empty() ? unfit.said : first, false;
                }
            });
            if (!fits) throw Unfit{first};
        } else if (word == "const") {
            must(value == rule, "", rule);
        } else if (word == "enum") {
            must(ranges::find(rule, value) != rule.end(), "one of ", rule);
        } else if (word == "type") {
            must(is(value, rule), "", rule);
        } else if (word == "pattern") {
            must(!value.is_string() || matches(value, rule), "", rule);
        } else if (word == "minimum") {
            must(!value.is_number() || value >= rule, "at least ", rule);
        } else if (word == "maximum") {
            must(!value.is_number() || value <= rule, "at most ", rule);
        } else if (word == "minItems") {
            entries(value.size() >= rule, "at least ", rule);
        } else if (word == "maxItems") {
            entries(value.size() <= rule, "at most ", rule);
        } else if (word == "prefixItems" || word == "items") {
            const auto first = word == "items" && schema.contains("prefixItems") ? schema["prefixItems"].size() : 0;
            entries(rule != false || value.size() <= first, "at most ", first);
            for (std::size_t i = first; value.is_array() && !rule.is_boolean() && i < value.size(); ++i)
                if (word == "items" || i < rule.size())
                    hold(value[i], word == "items" ? rule : rule[i], root,
                         std::string(path).append("[").append(std::to_string(i)).append("]"));
        } else if (word == "required") {
            for (const auto &name : rule)
                if (value.is_object() && !value.contains(name)) throw Unfit{path + " lacks " + name.get<std::string>()};
        } else if (word == "properties") {
            if (!value.is_object()) continue;
            for (const auto &[name, inner] : rule.items()) {
                if (!value.contains(name) && inner.contains("default")) value[name] = inner["default"];
                if (value.contains(name)) hold(value[name], inner, root, std::string(path).append(".").append(name));
            }
        } else if (word == "additionalProperties" || word == "propertyNames") {
            if (!value.is_object()) continue;
            for (auto &[name, inner] : value.items()) {
                Json own = name;
                if (word == "propertyNames") hold(own, rule, root, std::string(path).append(".").append(brief(name)));
                if (word != "propertyNames" && !properties.contains(name))
                    hold(inner, rule, root, std::string(path).append(".").append(brief(name)));
            }
        } else if (word != "$schema" && word != "$defs" && word != "title" && word != "description" &&
                   word != "default") {
            throw std::logic_error("the schema has the word " + word);
        }
    }
}

// Return the depth of nested brackets outside of strings. The parser's callback could count them, but with a callback
// the parser searches the whole surrounding list at the end of each object.
int depth_of(std::string_view text) {
    int depth = 0, most = 0;
    bool inside = false;
    for (std::size_t at = 0; at < text.size(); ++at) {
        const char sign = text[at];
        if (sign == '"') inside = !inside;
        if (inside && sign == '\\') ++at;
        if (inside) continue;
        depth += int(sign == '[' || sign == '{') - int(sign == ']' || sign == '}');
        most = std::max(most, depth);
    }
    return most;
}

}  // namespace

Json parse_json(std::string_view text, const std::string &where) {
    need(depth_of(text) <= DEPTH, TXL_BUNDLE, where, ": is nested more than ", DEPTH, " deep; export the model again");
    try {
        return Json::parse(text.begin(), text.end());
    } catch (const Json::exception &error) {
        refuse(TXL_BUNDLE, where, ": is no JSON (", brief(error.what()), "); export the model again");
    }
}

void hold_against(Json &document, const Json &schema, const std::string &where) {
    try {
        hold(document, schema, schema, "it");
    } catch (const Unfit &unfit) {
        refuse(TXL_BUNDLE, where, ": ", unfit.said, "; export the model again");
    }
}

}  // namespace txl_runtime
