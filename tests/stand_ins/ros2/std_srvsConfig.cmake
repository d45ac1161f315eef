set(std_srvs_TARGETS rclcpp::rclcpp)
