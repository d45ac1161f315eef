// As much of ROS 2 as samples/ros2 uses. In place of a network, spin reads
// lines: `observation 1 2 3` is a message, `reset` calls the service, `tick`
// the timer, and what is published is printed. Parameters come as `-p
// NAME:=VALUE`.
#pragma once
#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#define RCLCPP_ERROR(logger, ...)                                              \
  (static_cast<void>(logger), std::printf(__VA_ARGS__), std::puts(""))

namespace rclcpp {

using Handler = std::function<void(std::istream &)>;
inline std::map<std::string, Handler> handlers;
inline std::map<std::string, std::string> given;

struct Logger {};

template <typename Message> struct Publisher {
  using SharedPtr = std::shared_ptr<Publisher>;
  std::string topic;
  void publish(const Message &message) {
    std::cout << topic;
    for (const auto number : message.data)
      std::cout << ' ' << number;
    std::cout << std::endl;
  }
};

class Node {
public:
  explicit Node(const std::string &) { std::cout.precision(9); }
  virtual ~Node() { handlers.clear(); }
  [[nodiscard]] Logger get_logger() const { return {}; }

  template <typename Value>
  Value declare_parameter(const std::string &name, const Value &otherwise) {
    if (!given.count(name))
      return otherwise;
    std::istringstream text(given[name]);
    Value found;
    if (!(text >> found))
      throw std::runtime_error(name + ": " + given[name]);
    return found;
  }
  template <typename Message>
  auto create_publisher(const std::string &topic, int) {
    return std::make_shared<Publisher<Message>>(Publisher<Message>{topic});
  }
  template <typename Message, typename Callback>
  auto create_subscription(const std::string &topic, int, Callback called) {
    return kept(topic, [called](std::istream &line) {
      Message message;
      for (float number; line >> number;)
        message.data.push_back(number);
      called(message);
    });
  }
  template <typename Service, typename Callback>
  auto create_service(const std::string &name, Callback called) {
    return kept(name, [called, name](std::istream &) {
      const auto response = std::make_shared<typename Service::Response>();
      called(std::make_shared<typename Service::Request>(), response);
      std::cout << name << ' ' << response->success << std::endl;
    });
  }
  template <typename Period, typename Callback>
  auto create_wall_timer(Period period, Callback called) {
    std::cout << "every " << std::chrono::duration<double>(period).count()
              << " s" << std::endl;
    return kept("tick", [called](std::istream &) { called(); });
  }

private:
  // Whoever lets it go hears nothing any more, as in ROS.
  static std::shared_ptr<std::string> kept(const std::string &name,
                                           Handler handler) {
    handlers[name] = std::move(handler);
    return {new std::string(name),
            [](std::string *gone) { handlers.erase(*gone), delete gone; }};
  }
};

inline void init(int count, char **words) {
  for (int i = 1; i + 1 < count; ++i) {
    const std::string word(words[i + 1]);
    if (const auto at = word.find(":=");
        std::string(words[i]) == "-p" && at != std::string::npos)
      given[word.substr(0, at)] = word.substr(at + 2);
  }
}
inline bool shutdown() { return true; }
inline void spin(const std::shared_ptr<Node> &) {
  for (std::string line, name; std::getline(std::cin, line);) {
    std::istringstream words(line);
    words >> name;
    handlers.at(name)(words);
  }
}

} // namespace rclcpp
