#include "partial.hpp"

#include <algorithm>

#include "error.hpp"
#include "ranges.hpp"

namespace txl_runtime {

Parts::Parts(const Model &model)
    : again(ranges::any_of(model.states, [](const State *state) { return !state->slots; })),
      model_(model),
      rolled_(ranges::any_of(model.states, [](const State *state) { return state->update == Rule::rolled; })) {
    const auto &manifest = model.manifest;
    if (rolled_)
        refusal = std::string("the memory is rolled, which a step moves by the whole segment, expected a ring; ") +
                  (manifest.updates.count(Rule::ring) ? "load with update=\"ring\""
                                                      : "run the part alone, the bundle has no ring");
    else if (!manifest.by_rows)
        refusal = "the model has no state inside a segment, expected 0 or all that ran of each; keep it whole";
    else if (manifest.exact && again)
        refusal = join("it runs again as one segment, expected 0 or one of ",
                       listed(Sizes(model.lengths.rbegin(), model.lengths.rend())), " in all sequences; keep so many");
}

void Parts::check(const std::vector<std::int32_t> &counts, const std::int32_t *ran) const {
    const auto most = ranges::max(counts);
    bool fewer = true, all = true, whole = true, one = true;
    for (std::size_t row = 0; row < counts.size(); ++row) {
        const auto count = counts[row];
        fewer = fewer && count <= ran[row], all = all && count == ran[row];
        whole = whole && (!count || count == ran[row]), one = one && (!count || count == most);
    }
    const auto refused = [&](const std::string &said) {
        const std::vector<std::int32_t> held(ran, ran + counts.size());
        refuse(TXL_USAGE, listed(counts), " positions of ", listed(held), " that ran are to be committed, but ", said);
    };
    if (!fewer) refused("there are no more, expected at most those that ran; give other numbers");
    if (all || !most) return;
    if (model_.manifest.lockstep && ranges::any_of(counts, [&](auto count) { return count < most; }))
        refused("sequences run in lockstep, expected the same number of each; take the smallest");
    const bool fits = model_.manifest.by_rows ? one && ranges::count(model_.lengths, std::int64_t{most}) : whole;
    if (!refusal.empty() && (rolled_ || !fits)) refused(refusal);
}

}  // namespace txl_runtime
