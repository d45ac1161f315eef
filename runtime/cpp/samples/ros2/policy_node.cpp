// A ROS 2 node that runs a policy at a fixed rate. It reads the newest `observation` and publishes an `action`, both
// Float32MultiArray.
//
//     ros2 run txl_policy policy_node --ros-args -p bundle:=/opt/robot/policy.txl -p rate:=50.0
//
// The service `reset` begins an episode. rclcpp::spin calls all callbacks in one thread, so the stream needs no lock.
#include <cstdlib>
#include <rclcpp/rclcpp.hpp>
#include <std_msgs/msg/float32_multi_array.hpp>
#include <std_srvs/srv/trigger.hpp>
#include <txl.hpp>

using Numbers = std_msgs::msg::Float32MultiArray;
using Trigger = std_srvs::srv::Trigger;

class PolicyNode : public rclcpp::Node {
public:
    PolicyNode()
        : Node("txl_policy"),
          model_(declare_parameter<std::string>("bundle", "policy.txl"), one_thread()),
          stream_(model_) {
        const auto inputs = model_.table(TXL_INPUTS), outputs = model_.table(TXL_OUTPUTS);
        if (inputs.size() != 1) throw std::runtime_error("the policy has several inputs, expected one");
        seen_.resize(numbers(inputs[0])), action_.data.resize(numbers(outputs.at(0)));
        wanted_.resize(outputs.size()), wanted_[0] = action_.data.data();  // NULL: not wanted
        stream_.prepare();
        publisher_ = create_publisher<Numbers>("action", 1);
        subscription_ = create_subscription<Numbers>("observation", 1, [this](const Numbers &message) {
            known_ = message.data.size() == seen_.size();
            if (known_) seen_ = message.data;
            if (!known_) RCLCPP_ERROR(get_logger(), "%zu numbers, expected %zu", message.data.size(), seen_.size());
        });
        service_ =
            create_service<Trigger>("reset", [this](Trigger::Request::SharedPtr, Trigger::Response::SharedPtr done) {
                stream_.reset(), known_ = false, done->success = true;
            });
        timer_ = create_wall_timer(std::chrono::duration<double>(1 / declare_parameter<double>("rate", 50.0)), [this] {
            const void *given[] = {seen_.data()};
            if (known_) stream_.run(1, given, wanted_.data()), publisher_->publish(action_);
        });
    }

private:
    static txl_load_options one_thread() {
        auto options = TXL_NEW(txl_load_options);
        options.threads = 1;
        return options;
    }
    static std::size_t numbers(const txl_tensor &tensor) {
        if (tensor.dtype != TXL_FLOAT32) throw std::runtime_error(std::string(tensor.name) + " is not of float32");
        return txl_tensor_bytes(&tensor, 1, 1) / sizeof(float);
    }
    txl::Model model_;
    txl::Stream stream_;
    std::vector<float> seen_;
    std::vector<void *> wanted_;
    Numbers action_;
    bool known_ = false;  // true: an observation of this episode has come
    rclcpp::Publisher<Numbers>::SharedPtr publisher_;
    std::shared_ptr<void> subscription_, service_, timer_;
};

int main(int count, char **words) {
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    rclcpp::init(count, words);
    rclcpp::spin(std::make_shared<PolicyNode>());  // an exception ends the node with its message
    return rclcpp::shutdown() ? 0 : 1;
}
