"""Packages for NVIDIA's Triton Inference Server: model repositories that hold all that a bundle needs there."""
