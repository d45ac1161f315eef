// A reader of JSON with bounds, and a check against a JSON schema, which also fills in defaults.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace txl_runtime {

using Json = nlohmann::json;

// Parse UTF-8 that is nested at most 64 deep; throw TXL_BUNDLE otherwise. `where` begins the message.
Json parse_json(std::string_view text, const std::string &where);

// Add the schema's defaults for missing fields; throw TXL_BUNDLE for a document that the schema does not allow. Only
// keywords that bundle-format.schema.json uses are known: a schema with others throws std::logic_error.
void hold_against(Json &document, const Json &schema, const std::string &where);

// The texts of docs/bundle-format.schema.json and docs/bundle-cases.json, which the build puts into the library.
std::string_view published_schema();
std::string_view published_cases();

}  // namespace txl_runtime
