// Commits of a part of a segment: which parts a model allows (docs/runtime.md).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model.hpp"

namespace txl_runtime {

struct Parts {
    explicit Parts(const Model &model);
    // Throw TXL_USAGE unless the first `counts` of the `ran` positions can be committed, b numbers each. All that ran,
    // or nothing of it, can be committed with every model.
    void check(const std::vector<std::int32_t> &counts, const std::int32_t *ran) const;

    bool again = false;   // true: a part has to run again; a ring holds a row of each position, other states do not
    std::string refusal;  // the reason why not every number of positions can be committed; "" if every number can

private:
    const Model &model_;
    bool rolled_ = false;
};

}  // namespace txl_runtime
