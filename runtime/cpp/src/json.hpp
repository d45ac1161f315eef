// JSON, read with bounds, and held against a JSON schema, which also says what a missing field is.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace txl_runtime {

using Json = nlohmann::json;

// Nested at most 64 deep, in UTF-8; `where` begins the message of what is refused, as TXL_BUNDLE.
Json parse_json(std::string_view text, const std::string &where);

// Refuses, as TXL_BUNDLE, what the schema does not allow, and adds the defaults of what is missing. It knows the words
// that bundle-format.schema.json uses, and refuses a schema with others by std::logic_error.
void hold_against(Json &document, const Json &schema, const std::string &where);

// docs/bundle-format.schema.json and bundle-cases.json, which the build puts into the library.
std::string_view published_schema();
std::string_view published_cases();

}  // namespace txl_runtime
