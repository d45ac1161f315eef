#include "graph_check.hpp"
#include "error.hpp"
namespace txl {
Budget::Budget(std::uint64_t w, std::uint64_t) : weights(static_cast<double>(w)), most(0) {}
void check_graph(const std::string &, const std::string &, const Program &, const Manifest &, Budget &) {}
}
