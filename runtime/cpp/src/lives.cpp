#include "lives.hpp"

#include <algorithm>

namespace txl_runtime {

std::size_t Lives::add(std::vector<std::size_t> reads, double bytes, std::size_t values) {
    reads_.push_back(std::move(reads)), bytes_.push_back(bytes), values_.push_back(static_cast<double>(values));
    return reads_.size() - 1;
}

std::pair<double, double> Lives::most() const {
    const auto count = reads_.size();
    std::vector<std::size_t> depth(count, 1), before(count, count), clock(count, 0), first(count), last(count),
        until(count, 0);
    std::size_t ticks = 0;
    for (std::size_t node = 0; node < count; ++node) {
        for (auto read : reads_[node])
            if (depth[read] >= depth[node]) depth[node] = depth[read] + 1, before[node] = read;
        ticks = std::max(ticks, depth[node]);
    }
    for (auto node = static_cast<std::size_t>(std::find(depth.begin(), depth.end(), ticks) - depth.begin());
         node < count; node = before[node])
        clock[node] = depth[node];
    for (std::size_t node = 0; node < count; ++node) {
        first[node] = clock[node], last[node] = ticks;
        for (auto read : reads_[node])
            if (!clock[node]) first[node] = std::max(first[node], first[read]);
    }
    for (auto node = count; node-- > 0;) {
        const auto latest = clock[node] ? clock[node] : last[node];
        until[node] = std::max(until[node], latest);
        for (auto read : reads_[node]) {
            until[read] = std::max(until[read], latest);
            last[read] = std::min(last[read], clock[node] ? clock[node] - 1 : latest);
        }
    }
    std::pair<double, double> found{0, 0}, now{0, 0};
    std::vector<std::pair<double, double>> sums(ticks + 2);
    for (std::size_t node = 0; node < count; ++node) {
        sums[first[node]].first += bytes_[node], sums[first[node]].second += values_[node];
        sums[until[node] + 1].first -= bytes_[node], sums[until[node] + 1].second -= values_[node];
    }
    for (const auto &[bytes, values] : sums) {
        now = {now.first + bytes, now.second + values};
        found = {std::max(found.first, now.first), std::max(found.second, now.second)};
    }
    return found;
}

}  // namespace txl_runtime
