"""Write packages for NVIDIA's Triton Inference Server: model repositories with everything to serve a bundle."""
