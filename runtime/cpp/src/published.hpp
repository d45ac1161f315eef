// docs/bundle-format.schema.json and docs/bundle-forms.json, which the build puts into the library as they are.
#pragma once
#include <string_view>

namespace txl_runtime {

std::string_view published_schema();
std::string_view published_forms();

}  // namespace txl_runtime
