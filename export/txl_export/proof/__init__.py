"""Proves that a bundle computes the same function as its PyTorch model, by comparing both over chains of segments."""
