"""Write packages for NVIDIA's Triton Inference Server: model repositories with everything that a bundle needs there."""
