"""Is a bundle the same function as PyTorch's? Chains of segments, comparing, judging, bisecting."""
