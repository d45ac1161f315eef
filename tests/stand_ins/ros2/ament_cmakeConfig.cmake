# Of ament_cmake, rclcpp, std_msgs and std_srvs as much as samples/ros2/CMakeLists.txt uses.
macro(ament_package)
endmacro()
