// Stored vectors (§ 9): arrays by name, from safetensors or, as bundles before 2.1 have them, from a zip of NumPy's
// arrays.
#pragma once
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace txl_runtime {

struct Stored {
    std::string dtype;  // as safetensors names it
    std::vector<std::int64_t> shape;
    std::string_view bytes;
    [[nodiscard]] std::int64_t size() const;
    [[nodiscard]] double number(std::int64_t index) const;
    [[nodiscard]] std::int64_t whole(std::int64_t index) const { return static_cast<std::int64_t>(number(index)); }
    [[nodiscard]] bool floating() const { return dtype[0] == 'F'; }
};

struct Vectors {
    std::map<std::string, Stored> arrays;
    std::list<std::string> memory;  // that arrays are views of
};

// Refuses, as TXL_BUNDLE, what is damaged or takes memory out of proportion to the file.
Vectors read_vectors(std::string file, const std::string &where);

}  // namespace txl_runtime
