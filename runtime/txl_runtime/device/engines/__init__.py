"""Engines that a device's backend loads: the check that they fit this machine, and TensorRT's runtime."""
