// The side of C in c_against_python.py: runs segments of a bundle and says what processor time they took.
//
//     c_side BUNDLE UPDATE first       one step in a fresh process
//     c_side BUNDLE UPDATE             one line of input, {"positions": T, "calls": n}, one line of output
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iostream>
#include <random>
#include <string>

#include <txl.hpp>

namespace {

double seconds(clockid_t clock) {
    timespec now{};
    clock_gettime(clock, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Peak memory of this program alone: getrusage counts the process that started it, too.
long peak() {
    std::ifstream file("/proc/self/status");
    for (std::string word; file >> word;)
        if (long kilobytes = 0; word == "VmHWM:" && file >> kilobytes) return kilobytes * 1024;
    return 0;
}

class Side {
public:
    Side(const txl::Model &model) : model_(model), stream_(model, model.info().batch_size) {}

    void prepare(std::int32_t T) {
        T_ = T, given_.clear(), returned_.clear(), inputs_.clear(), outputs_.clear();
        std::mt19937 random(0);
        for (const auto &tensor : model_.table(TXL_INPUTS)) {
            given_.emplace_back(count(tensor), 0);
            for (auto &number : given_.back()) {
                const auto drawn = static_cast<float>(random() % 1000) / 1000;
                number = tensor.dtype == TXL_INT32 ? static_cast<std::int32_t>(random() % tensor.vocab) : 0;
                if (tensor.dtype == TXL_FLOAT32) std::memcpy(&number, &drawn, sizeof drawn);
            }
        }
        for (const auto &tensor : model_.table(TXL_OUTPUTS)) returned_.emplace_back(count(tensor), 0);
        for (auto &array : given_) inputs_.push_back(array.data());
        for (auto &array : returned_) outputs_.push_back(array.data());
    }
    void run() { stream_.run(T_, inputs_.data(), outputs_.data()); }

private:
    [[nodiscard]] std::size_t count(const txl_tensor &tensor) const {
        if (tensor.dtype != TXL_INT32 && tensor.dtype != TXL_FLOAT32)
            throw std::runtime_error("another type of number");
        std::size_t all = 1;
        for (int axis = 0; axis < tensor.rank; ++axis)
            all *= static_cast<std::size_t>(tensor.shape[axis] == TXL_SIZE_B   ? stream_.batch()
                                            : tensor.shape[axis] == TXL_SIZE_L ? T_ + tensor.lookahead
                                                                               : tensor.shape[axis]);
        return all;
    }

    const txl::Model &model_;
    txl::Stream stream_;
    std::int32_t T_ = 0;
    std::vector<std::vector<std::int32_t>> given_, returned_;  // 4 bytes each, of either type
    std::vector<const void *> inputs_;
    std::vector<void *> outputs_;
};

}  // namespace

int main(int count, char **words) try {
    auto options = TXL_NEW(txl_load_options);
    options.threads = 1, options.update = words[2];
    const txl::Model model(words[1], options);
    Side side(model);
    if (count > 3) {
        side.prepare(1), side.run();
        std::cout << "{\"seconds\": " << seconds(CLOCK_PROCESS_CPUTIME_ID) << ", \"peak\": " << peak() << "}\n";
        return 0;
    }
    for (std::string line; std::getline(std::cin, line);) {
        int T = 0, calls = 0;
        if (std::sscanf(line.c_str(), "{\"positions\": %d, \"calls\": %d}", &T, &calls) != 2) return 2;
        side.prepare(T), side.run();
        const auto began = seconds(CLOCK_THREAD_CPUTIME_ID);
        for (int n = 0; n < calls; ++n) side.run();
        std::cout << "{\"seconds\": " << seconds(CLOCK_THREAD_CPUTIME_ID) - began << "}" << std::endl;
    }
    return 0;
} catch (const std::exception &error) {
    std::cerr << error.what() << '\n';
    return 2;
}
