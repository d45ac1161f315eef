"""Engines that a device's backend loads: their facts, the check that they fit this machine, and TensorRT's runtime."""
