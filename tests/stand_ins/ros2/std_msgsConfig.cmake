set(std_msgs_TARGETS rclcpp::rclcpp)
