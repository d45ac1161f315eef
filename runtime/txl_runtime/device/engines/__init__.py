"""Modules that check that a bundle's engines fit this machine, and run them with TensorRT or TensorRT-RTX."""
