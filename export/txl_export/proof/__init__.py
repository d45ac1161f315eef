"""Proof that a bundle is the same function as its PyTorch model: chains of segments, comparisons, gates."""
