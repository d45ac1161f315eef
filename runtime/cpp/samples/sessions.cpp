// Many users on the few sequences of one stream: a served user moves onto a row, whose former user is saved as bytes.
//
//     txl-sessions samples/tiny.txl 12 8
//
// Each of 12 users begins with a text of their own and is answered 8 times with 5 tokens; the users of a round are
// drawn at random. A row without a user is idle. At the end each user is served again, alone on a stream, and the
// program prints whether the answers are the same.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <random>

#include "txl.hpp"

#ifdef _WIN32
#define setenv(name, value, over) _putenv_s(name, value)
#endif

namespace {

constexpr int WORDS = 5;  // tokens of an answer

struct User {
    std::vector<std::int32_t> next;  // tokens not fed yet: the text at first, later the last answered token
    std::vector<std::int32_t> said;  // tokens of all answers
    std::vector<float> certain;      // log-probabilities of `said`
    std::string kept;                // snapshot of the state while the user is on no row
    int answers = 0, row = -1;
};

// Feed `next` of the user on each row, and answer each with the most probable token.
void feed(txl::Stream &stream, const std::vector<User *> &rows, std::int32_t vocab) {
    const auto b = static_cast<std::size_t>(stream.batch()), V = static_cast<std::size_t>(vocab);
    std::size_t T = 0;
    for (const auto *user : rows) T = std::max(T, user ? user->next.size() : 0);
    std::vector<std::int32_t> tokens(b * T), counts(b);
    for (std::size_t row = 0; row < b; ++row) {
        if (!rows[row]) continue;  // the count stays 0: the row is idle
        counts[row] = static_cast<std::int32_t>(rows[row]->next.size());
        std::copy(rows[row]->next.begin(), rows[row]->next.end(),
                  tokens.begin() + static_cast<std::ptrdiff_t>(row * T));
    }
    std::vector<float> logprobs(b * V);
    const void *inputs[] = {tokens.data()};
    void *outputs[] = {logprobs.data()};
    stream.feed(static_cast<std::int32_t>(T), inputs, outputs, counts.data(), true);
    for (std::size_t row = 0; row < b; ++row) {
        if (!rows[row]) continue;
        const auto *const first = logprobs.data() + row * V, *const best = std::max_element(first, first + V);
        rows[row]->next = {static_cast<std::int32_t>(best - first)};
        rows[row]->said.push_back(rows[row]->next.front()), rows[row]->certain.push_back(*best);
    }
}

// The rows of one stream and the users on them.
class Rows {
public:
    Rows(const txl::Model &model, std::int32_t b)
        : stream_(model, b), on_(static_cast<std::size_t>(b)), vocab_(model.info().vocab_size) {}

    void answer(const std::vector<User *> &served) {
        for (auto *user : served)
            if (user->row < 0) put(*user, served);
        std::vector<User *> rows(on_.size());
        for (auto *user : served) rows[static_cast<std::size_t>(user->row)] = user, ++user->answers;
        for (int word = 0; word < WORDS; ++word) feed(stream_, rows, vocab_);
    }
    [[nodiscard]] int moves() const { return moves_; }

private:
    // A user stays on a row until a different user needs it, because saving copies the state.
    void put(User &user, const std::vector<User *> &served) {
        const auto free = std::find_if(on_.begin(), on_.end(), [&](User *there) {
            return std::find(served.begin(), served.end(), there) == served.end();
        });
        const auto row = static_cast<std::int32_t>(free - on_.begin());
        if (*free) (*free)->kept = stream_.save(row), (*free)->row = -1, ++moves_;
        if (user.kept.empty()) {
            std::vector<std::uint8_t> which(on_.size());
            which[static_cast<std::size_t>(row)] = 1;
            stream_.reset(which.data());
        } else {
            stream_.restore(user.kept, row);
        }
        *free = &user, user.row = row;
    }

    txl::Stream stream_;
    std::vector<User *> on_;
    std::int32_t vocab_;
    int moves_ = 0;
};

void run(const std::string &bundle, std::size_t users, int answers) {
    const txl::Model model(bundle);
    const auto info = model.info();
    if (!(info.flags & TXL_IS_INDEPENDENT) || !(info.flags & TXL_IS_TEXT))
        throw std::runtime_error(bundle + ": expected a model of text whose sequences can be idle and moved alone");
    std::mt19937 random(1);
    std::vector<User> all(users);
    for (auto &user : all) {
        user.next.resize(1 + random() % 20);
        for (auto &token : user.next)
            token = static_cast<std::int32_t>(random() % static_cast<unsigned>(info.vocab_size));
    }
    auto alone = all;

    const auto b = info.batch_size;
    Rows rows(model, b);
    int rounds = 0;
    for (std::vector<User *> waiting;; ++rounds) {
        waiting.clear();
        for (auto &user : all)
            if (user.answers < answers) waiting.push_back(&user);
        if (waiting.empty()) break;
        std::shuffle(waiting.begin(), waiting.end(), random);
        waiting.resize(std::min(waiting.size(), std::size_t{1} + random() % static_cast<unsigned>(b)));
        rows.answer(waiting);
    }
    std::cout << users << " users on " << b << " rows: " << rounds << " rounds, " << rows.moves() << " moves\n";

    std::size_t same = 0;
    float apart = 0;
    for (std::size_t i = 0; i < users; ++i) {
        Rows own(model, 1);
        while (alone[i].answers < answers) own.answer({&alone[i]});
        same += all[i].said == alone[i].said;
        for (std::size_t n = 0; n < all[i].certain.size(); ++n)
            apart = std::max(apart, std::abs(all[i].certain[n] - alone[i].certain[n]));
    }
    std::cout << same << " of " << users << " users were told the same alone, log-probabilities " << apart
              << " apart\n";
}

}  // namespace

int main(int count, char **words) {
    if (count < 2) {
        std::cerr << "usage: " << words[0] << " BUNDLE [USERS] [ANSWERS]\n";
        return 2;
    }
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);  // newer builds of the engine read it when they are opened
    try {
        run(words[1], count > 2 ? std::strtoul(words[2], nullptr, 10) : 12, count > 3 ? std::atoi(words[3]) : 8);
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 2;
    }
    return 0;
}
