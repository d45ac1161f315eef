"""Proves that a bundle computes the same function as its PyTorch model: chains of segments, comparisons, gates."""
